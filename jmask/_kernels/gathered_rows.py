"""Gathered rows: rows that are rows of another array, each times a number.

    source [[1, 2],      index [0, 0, 1]         rows [[1, 2],
            [3, 4]]      weight [1, 1, 2]              [1, 2],
                                                       [6, 8]]

All entries of a bag have the cotangent of the bag, so the gradient of bags needs one row
for each bag, not one for each entry: `source` are the cotangents of the bags, `index` is the
bag of each entry.

The rows are an array like any other. That they are gathered is a fact about a traced array,
kept next to it: a consumer that asks for it reads one block of rows at a time and never
materialises all of them, and the compiler removes the array that nothing reads.
"""

import dataclasses
import weakref
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jmask._base.array_types import is_known, joint_dtype, trailing
from jmask._base.shardings import varying_alike
from jmask._base.types import DType, RowArray
from jmask._kernels import tuning
from jmask._kernels.rows import Gather


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheredRows:
    """The rows source[index] * weight (n, *row), cast to `dtype`."""

    source: jax.Array  # (m, *row): inexact
    index: jax.Array  # (n,): int32, canonical: m stands for a row of zeros
    weight: jax.Array | None  # (n,): inexact, or None for ones
    dtype: DType = dataclasses.field(metadata={"static": True})  # of the rows

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.index.shape, *self.source.shape[1:]

    @property
    def ndim(self) -> int:
        return self.source.ndim

    def array(self) -> jax.Array:
        """Return the rows (n, *row)."""
        source, index = varying_alike(self.source, self.index)
        fills = lax.GatherScatterMode.FILL_OR_DROP
        gather = Gather.rows_of(source.shape, fills, fill_value=0)
        rows = gather(source, index[:, None])
        if self.weight is not None:
            dtype = joint_dtype(rows, self.weight)
            rows = rows.astype(dtype) * trailing(self.weight, rows.ndim).astype(dtype)
        return rows.astype(self.dtype)

    def scaled(self, function: Callable[[jax.Array], jax.Array]) -> "GatheredRows":
        """Multiply all rows by one number, as `function` multiplies an array."""
        return dataclasses.replace(self, source=function(self.source))  # fewer than entries


Rows = RowArray | GatheredRows


class _Known:
    """Remember how traced arrays are made, by identity, without keeping array or trace."""

    # Tracers have no hash, and `==` of arrays is elementwise, so this is no WeakKeyDictionary:
    # the key is the address, which the callback of the weak reference removes before it is used
    # again.

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[jax.Array], GatheredRows]] = {}

    def note(self, x: jax.Array, made_by: GatheredRows) -> None:
        """Keep what makes a traced array, in place of what was known of it."""
        if isinstance(x, jax.core.Tracer):
            key, known = id(x), self._known
            known[key] = (weakref.ref(x, lambda _: known.pop(key, None)), made_by)

    def of(self, x: jax.Array) -> GatheredRows | None:
        """Return what makes an array, in the same trace, or None."""
        reference, made_by = self._known.get(id(x), (None, None))
        return made_by if reference is not None and reference() is x else None

    def __len__(self) -> int:
        return len(self._known)


GATHERED = _Known()


def pays(sources: int, entries: int) -> bool:
    """Decide whether so many rows are worth keeping in place of the rows of so many entries."""
    return is_known(sources, entries) and 0 < tuning.REPEATS * sources <= entries


def gathered(rows: RowArray) -> Rows:
    """Return what is known to make the rows, or the array itself."""
    known = GATHERED.of(rows)
    return rows if known is None else known


def scaled(rows: RowArray, function: Callable[[jax.Array], jax.Array]) -> RowArray:
    """Multiply all rows by one number, and what makes them too."""
    known, result = GATHERED.of(rows), function(rows)
    if known is not None and result.dtype == rows.dtype:
        GATHERED.note(result, known.scaled(function))
    return result


def cast(rows: RowArray, dtype: DTypeLike) -> RowArray:
    """Cast rows to a wider dtype; what makes them is not rounded to theirs before."""
    known, result = GATHERED.of(rows), rows.astype(dtype)
    if known is not None:
        GATHERED.note(result, dataclasses.replace(known, dtype=jnp.dtype(dtype)))
    return result


def joined(parts: Sequence[RowArray]) -> RowArray:
    """Concatenate rows; they are known as gathered if some parts are and it pays."""
    if len(parts) == 1:
        return parts[0]
    result = jnp.concatenate(parts)
    known = joined_rows([gathered(x) for x in parts])
    if known is not None:
        GATHERED.note(result, known)
    return result


def joined_rows(parts: Sequence[Rows]) -> GatheredRows | None:
    """Join gathered rows and arrays of rows; None if that does not pay."""
    sources = [x.source if isinstance(x, GatheredRows) else x for x in parts]
    known = [x for x in parts if isinstance(x, GatheredRows)]
    total = sum(x.shape[0] for x in sources)
    alike = len({x.dtype for x in sources}) == 1
    if not known or not alike or not pays(total, sum(x.shape[0] for x in parts)):
        return None
    weights = [x.weight for x in known if x.weight is not None]
    dtype = joint_dtype(*weights) if weights else None
    index, weight, begin = [], [], 0
    for x, source in zip(parts, sources, strict=True):
        entries, m = x.shape[0], source.shape[0]
        own = x.index if isinstance(x, GatheredRows) else lax.iota(jnp.int32, entries)
        # `m` stood for a row of zeros; among the joined sources that is `total`.
        index.append(jnp.where(own < m, own + begin, total))
        begin += m
        if dtype is not None:
            factor = x.weight if isinstance(x, GatheredRows) else None
            weight.append(jnp.ones(entries, dtype) if factor is None else factor.astype(dtype))
    return GatheredRows(
        jnp.concatenate(sources),
        jnp.concatenate(index),
        jnp.concatenate(weight) if weight else None,
        known[0].dtype,
    )


def as_array(rows: Rows) -> RowArray:
    """Return the rows as one array."""
    return rows.array() if isinstance(rows, GatheredRows) else rows


def rows_at(rows: Rows, entries: jax.Array) -> RowArray:
    """Return the rows of the entries (k,), all of which exist."""
    if isinstance(rows, GatheredRows):  # index and weight are read first: few rows are written
        index = rows_at(rows.index, entries)
        weight = None if rows.weight is None else rows_at(rows.weight, entries)
        return GatheredRows(rows.source, index, weight, rows.dtype).array()
    clips = lax.GatherScatterMode.CLIP
    return Gather.rows_of(rows.shape, clips)(rows, entries[:, None])
