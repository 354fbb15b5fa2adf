"""Rows that are rows of another array, each times a number of its own.

    source [[1, 2],      index [0, 0, 1]         rows [[1, 2],
            [3, 4]]      weight [1, 1, 2]              [1, 2],
                                                       [6, 8]]

The cotangent of a bag is that of each of its entries, so the gradient of bags needs one row
for each bag, not one for each entry: `source` are the cotangents of the bags, `index` is the
bag of each entry. Who reads a few rows at a time never writes all of them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jmask._base.array_types import varying_alike
from jmask._base.precision import joint_dtype
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
        index (n,): int32, canonical: m stands for a row of zeros.
        weight (n,): floating, or None for ones.
        dtype: of the rows.
    """

    source: jax.Array
    index: jax.Array
    weight: jax.Array | None
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.index.shape, *self.source.shape[self.index.ndim :]

    @property
    def ndim(self) -> int:
        return self.source.ndim

    def array(self) -> jax.Array:
        """The rows (n, *row); of a stack of such, the stack of them."""
        rows = _rows
        for _ in self.index.shape[1:]:
            rows = jax.vmap(rows, in_axes=(0, 0, None if self.weight is None else 0))
        return rows(self.source, self.index, self.weight).astype(self.dtype)

    def take(self, entries: jax.Array) -> jax.Array:
        """The rows (k, *row) of the entries (k,)."""
        weight = None if self.weight is None else rows_at(self.weight, entries)
        return FactoredRows(
            self.source, rows_at(self.index, entries), weight, self.dtype
        ).array()

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "FactoredRows":
        """A function that is linear in each row, of the same shape and dtype, of all rows."""
        return dataclasses.replace(self, source=function(self.source))


Rows = jax.Array | FactoredRows


def _rows(source: jax.Array, index: jax.Array, weight: jax.Array | None) -> jax.Array:
    source, index = varying_alike(source, index)
    fills = lax.GatherScatterMode.FILL_OR_DROP
    gather = Gather.of_rows(source.shape, fills, fill_value=0)
    rows = gather(source, index[:, None])
    if weight is None:
        return rows
    dtype = joint_dtype(rows, weight)
    weight = weight.reshape((-1,) + (1,) * (rows.ndim - 1))
    return rows.astype(dtype) * weight.astype(dtype)


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
