"""Rows that are rows of another array, each times a number of its own.

    source [[1, 2],      index [0, 0, 1]         rows [[1, 2],
            [3, 4]]      weight [1, 1, 2]              [1, 2],
                                                       [6, 8]]

The cotangent of a bag is that of each of its entries, so the gradient of bags needs one row
for each bag, not one for each entry: `source` are the cotangents of the bags, `index` is the
bag of each entry. That of a dot product is the other operand, row by row, each times a number:
these rows are there already, and there is no `index`. Who reads a few rows at a time never
writes all of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import varying_alike
from jmask._base.precision import joint_dtype
from jmask._base.shapes import is_known, trailing
from jmask._kernels.gather import Gather


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("source", "index", "weight"),
    meta_fields=("dtype",),
)
@dataclasses.dataclass(frozen=True)
class FactoredRows:
    """The rows source[index] * weight (n, *row), cast to `dtype`.

    Attributes:
        source (m, *row): floating.
        index (n,): int32, canonical: m stands for a row of zeros. None: rows in their order.
        weight (n,): floating, or None for ones.
        dtype: of the rows.
    """

    source: jax.Array
    index: jax.Array | None
    weight: jax.Array | None
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        if self.index is None:
            return self.source.shape
        return *self.index.shape, *self.source.shape[self.index.ndim :]

    @property
    def ndim(self) -> int:
        return self.source.ndim

    def array(self) -> jax.Array:
        """The rows (n, *row); of a stack of such, the stack of them."""
        if self.index is None:
            return _weighted(self.source, self.weight).astype(self.dtype)
        rows = _rows
        for _ in self.index.shape[1:]:
            rows = jax.vmap(rows, in_axes=(0, 0, None if self.weight is None else 0))
        return rows(self.source, self.index, self.weight).astype(self.dtype)

    def take(self, entries: jax.Array) -> jax.Array:
        """The rows (k, *row) of the entries (k,)."""
        weight = None if self.weight is None else rows_at(self.weight, entries)
        if self.index is None:
            return _weighted(rows_at(self.source, entries), weight).astype(self.dtype)
        return FactoredRows(
            self.source, rows_at(self.index, entries), weight, self.dtype
        ).array()

    def scaled(self, function: Callable[[jax.Array], jax.Array]) -> "FactoredRows":
        """All rows times a number, as `function` multiplies an array, of the same dtype."""
        if self.index is not None:
            return dataclasses.replace(self, source=function(self.source))
        weight = self.weight
        if weight is None:
            weight = jnp.ones(self.source.shape[:1], self.source.dtype)
        return dataclasses.replace(self, weight=function(weight))


Rows = jax.Array | FactoredRows

# Entries for each row of the source, below which nothing is gained.
_REPEATS = 2


def pays(sources: int, entries: int) -> bool:
    """Whether so many rows are worth keeping in place of those of so many entries."""
    return is_known(sources, entries) and 0 < _REPEATS * sources <= entries


def joined(parts: Sequence[Rows]) -> Rows:
    """All rows, one part after the other; in factors if some are and it pays."""
    if len(parts) == 1:
        return parts[0]
    sources = [x.source if isinstance(x, FactoredRows) else x for x in parts]
    in_factors = [x for x in parts if isinstance(x, FactoredRows)]
    total = sum(x.shape[0] for x in sources)
    alike = len({x.dtype for x in sources}) == 1
    if not in_factors or not alike or not pays(total, sum(x.shape[0] for x in parts)):
        return jnp.concatenate([as_array(x) for x in parts])
    weights = [x.weight for x in in_factors if x.weight is not None]
    dtype = joint_dtype(*weights) if weights else None
    index, weight, begin = [], [], 0
    for x, source in zip(parts, sources, strict=True):
        entries, m = x.shape[0], source.shape[0]
        given = x.index if isinstance(x, FactoredRows) else None
        own = lax.iota(jnp.int32, entries) if given is None else given
        index.append(jnp.where(own < m, own + begin, total))
        begin += m
        if dtype is not None:
            given = x.weight if isinstance(x, FactoredRows) else None
            weight.append(jnp.ones(entries, dtype) if given is None else given.astype(dtype))
    return FactoredRows(
        jnp.concatenate(sources),
        jnp.concatenate(index),
        jnp.concatenate(weight) if weight else None,
        in_factors[0].dtype,
    )


def _rows(source: jax.Array, index: jax.Array, weight: jax.Array | None) -> jax.Array:
    source, index = varying_alike(source, index)
    fills = lax.GatherScatterMode.FILL_OR_DROP
    gather = Gather.of_rows(source.shape, fills, fill_value=0)
    return _weighted(gather(source, index[:, None]), weight)


def _weighted(rows: jax.Array, weight: jax.Array | None) -> jax.Array:
    if weight is None:
        return rows
    dtype = joint_dtype(rows, weight)
    return rows.astype(dtype) * trailing(weight, rows.ndim).astype(dtype)


def as_array(rows: Rows) -> jax.Array:
    """The rows as one array."""
    if not isinstance(rows, FactoredRows):
        return rows
    if isinstance(rows.source, jax.ShapeDtypeStruct):
        return jax.eval_shape(FactoredRows.array, rows)
    return rows.array()


def rows_at(rows: Rows, entries: jax.Array) -> jax.Array:
    """The rows of the entries (k,), all of which there are."""
    if isinstance(rows, FactoredRows):
        return rows.take(entries)
    clips = lax.GatherScatterMode.CLIP
    return Gather.of_rows(rows.shape, clips)(rows, entries[:, None])
