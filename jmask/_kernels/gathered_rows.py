"""Gathered rows, which are rows of another array, each times a number, and sums of rows.

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
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad
from jax.typing import DTypeLike

from jmask._base.array_types import is_known, joint_dtype, trailing, wide
from jmask._base.lowering import CallPrimitive
from jmask._base.shardings import end_to_end, explicit_mesh, varying_axes
from jmask._base.side_table import SideTable
from jmask._base.types import Argument, Arrays, DType, PyTreeDef, RowArray, Shaped
from jmask._kernels import tuning
from jmask._kernels.rows import add_rows, gather_rows, in_branch, rows_or_fill


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheredRows:
    """The rows source[index] * weight (n, *row), cast to `dtype`."""

    source: jax.Array  # (m, *row): inexact
    index: jax.Array  # (n,): int32, canonical: m stands for a row of zeros
    weight: jax.Array | None  # (n,): inexact, or None for ones
    dtype: DType = dataclasses.field(metadata={"static": True})  # of the rows
    # How many rows each row of the source makes, in its order, if it is one number.
    each: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.index.shape, *self.source.shape[1:]

    @property
    def ndim(self) -> int:
        return self.source.ndim

    def array(self) -> jax.Array:
        """Return the rows (n, *row)."""
        if self.each is None:
            rows = rows_or_fill(self.source, self.index)
        else:
            rows = jnp.repeat(self.source, self.each, 0)
        if self.weight is not None:
            dtype = joint_dtype(rows, self.weight)
            rows = rows.astype(dtype) * trailing(self.weight, rows.ndim).astype(dtype)
        return rows.astype(self.dtype)


Rows = RowArray | GatheredRows


class _Known(SideTable[GatheredRows]):
    """Notes how traced arrays are made; others are materialised."""

    def note(self, x: object, fact: GatheredRows) -> None:
        if isinstance(x, jax.core.Tracer):
            super().note(x, fact)


GATHERED = _Known()


def pays(sources: int, entries: int) -> bool:
    """Decide whether so many rows are worth keeping in place of the rows of so many entries."""
    return is_known(sources, entries) and 0 < tuning.REPEATS * sources <= entries


def gathered(rows: RowArray) -> Rows:
    """Return the `GatheredRows` that an array is known to be, or the array itself."""
    known = GATHERED.of(rows)
    return rows if known is None else known


def scaled(rows: RowArray, function: Callable[[jax.Array], jax.Array]) -> RowArray:
    """Multiply all rows by one number, and what makes them too."""
    known, result = GATHERED.of(rows), function(rows)
    if known is not None and result.dtype == rows.dtype:
        source = function(known.source)  # fewer than entries
        GATHERED.note(result, dataclasses.replace(known, source=source))
    return result


def cast(rows: RowArray, dtype: DTypeLike) -> RowArray:
    """Cast rows to a wider dtype; what makes them is not rounded to theirs before."""
    known, result = GATHERED.of(rows), rows.astype(dtype)
    if known is not None:
        GATHERED.note(result, dataclasses.replace(known, dtype=jnp.dtype(dtype)))
    return result


def concatenated(arrays: Sequence[RowArray]) -> RowArray:
    """Concatenate rows; they are known as gathered if some of them are and it pays."""
    if len(arrays) == 1:
        return arrays[0]
    result, parts = end_to_end(arrays), [gathered(x) for x in arrays]
    sources = [x.source if isinstance(x, GatheredRows) else x for x in parts]
    known = [x for x in parts if isinstance(x, GatheredRows)]
    total = sum(x.shape[0] for x in sources)
    alike = len({x.dtype for x in sources}) == 1
    if not known or not alike or not pays(total, result.shape[0]):
        return result
    weights = [x.weight for x in known if x.weight is not None]
    dtype = joint_dtype(*weights) if weights else None
    index, weight, begin = [], [], 0
    for x, source in zip(parts, sources, strict=True):
        entries, m = x.shape[0], source.shape[0]
        own = x.index if isinstance(x, GatheredRows) else lax.iota(jnp.int32, entries)
        # `m` stood for a row of zeros; among the concatenated sources that is `total`.
        index.append(jnp.where(own < m, own + begin, total))
        begin += m
        if dtype is not None:
            factor = x.weight if isinstance(x, GatheredRows) else None
            weight.append(jnp.ones(entries, dtype) if factor is None else factor.astype(dtype))
    joined = GatheredRows(
        jnp.concatenate(sources),
        jnp.concatenate(index),
        jnp.concatenate(weight) if weight else None,
        known[0].dtype,
    )
    GATHERED.note(result, joined)
    return result


def rows_at(rows: Rows, entries: jax.Array) -> RowArray:
    """Return the rows of the entries (k,), all of which exist."""
    if isinstance(rows, GatheredRows):  # index and weight are read first: few rows are written
        index = rows_at(rows.index, entries)
        weight = None if rows.weight is None else rows_at(rows.weight, entries)
        return GatheredRows(rows.source, index, weight, rows.dtype).array()
    return gather_rows(rows, entries)


# --- sums of rows, bag by bag, whose rows are not materialised --------------------------------
#
#     table [[1, 2],     positions [2, 0, 2]      sums [[6, 8],       row 2 + row 0
#            [3, 4],     bags      [0, 0, 1]            [5, 6]]       row 2
#            [5, 6]]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["table", "positions", "bag_of_entry", "weights"],
    meta_fields=["bags", "fill"],
)
@dataclasses.dataclass(frozen=True)
class BagSum:
    """Sums (bags, *row) of the rows of each bag, in float32 at least.

    On a CPU short bags of equal lengths are summed column by column; of others a block of rows
    is read at a time and added to its bags: all n rows of a large batch would go through memory
    twice. It is differentiated as a gather and a sum.

    No array is sharded over devices by its type, or differs from one to the other.
    """

    table: Argument  # (V, *row): floating; not empty
    # (n,): canonical ids, n > 0; V reads `fill`. (bags, k) if the bags have equal lengths.
    positions: jax.Array
    # (n,): canonical: `bags` where an entry is in none. None if the bags have equal lengths.
    bag_of_entry: jax.Array | None
    # Of the entries, of the same shape, in the dtype of the sums; None for ones.
    weights: jax.Array | None
    bags: int  # how many, > 0
    fill: float  # 0 or nan

    def zeros(self) -> jax.Array:
        """Return the sums (bags, *row) of nothing."""
        return jnp.zeros((self.bags, *self.table.shape[1:]), wide(self.table.dtype))

    def by_parts(self, linear: bool = False) -> jax.Array:
        """Return the sums by definition; if `linear`, in operations that JAX can transpose."""
        return self.combined(self.rows(linear))

    def rows(self, linear: bool = False) -> jax.Array:
        """Return the rows (*entries, *row) in float32 at least, without their weights."""
        rows = rows_or_fill(self.table, self.positions, self.fill, plain=linear)
        return rows.astype(wide(self.table.dtype))

    def combined(self, rows: jax.Array) -> jax.Array:
        """Return the sums of the rows (*entries, *row) that were read, times weights."""
        weights = self.weights
        if self.bag_of_entry is not None:
            rows = _weighted(rows, weights)
            return add_rows(self.zeros(), self.bag_of_entry, rows)
        if weights is None:
            return jnp.sum(rows, 1, dtype=rows.dtype)
        # A product that XLA's CPU compiler would write out to sum it is a `dot` instead.
        return jnp.einsum("bl,bl...->b...", weights, rows, precision=lax.Precision.HIGHEST)

    def in_one_list(self) -> jax.Array:
        """Return the sums by definition, of rows (n, *row) that are masked and weighted so.

        XLA for GPUs reads and sums such rows in one kernel. With a mask of bags (bags, k) it
        often writes all rows, transposed, before it sums them (jaxlib 0.12.0.1).
        """
        if self.bag_of_entry is not None:
            return self.by_parts()
        rows = dataclasses.replace(self, positions=self.positions.reshape(-1)).rows()
        rows = _weighted(rows, None if self.weights is None else self.weights.reshape(-1))
        rows = rows.reshape(*self.positions.shape, *rows.shape[1:])
        return dataclasses.replace(self, weights=None).combined(rows)

    def by_column(self) -> jax.Array:
        """Return the sums of bags of equal lengths: of all first rows, all second ones, ...

        XLA makes one loop over the sums of it, which writes no row and runs on all cores.
        """

        def sums() -> jax.Array:
            total = self.zeros()
            for k in range(self.positions.shape[1]):
                column = dataclasses.replace(self, positions=self.positions[:, k])
                rows = column.rows(linear=True)
                total += _weighted(rows, None if self.weights is None else self.weights[:, k])
            return total

        # Or it would be a part of each loop that reads the sums.
        return in_branch(sums, jax.eval_shape(self.zeros), self.positions)

    def in_blocks(self) -> jax.Array:
        """Return the sums by a loop that reads a block of rows and adds them to their bags."""
        count, bags, bag_of_entry = self.positions.size, self.bags, self.bag_of_entry
        dtype, padding = wide(self.table.dtype), self.table.shape[0]
        size = tuning.block_size(math.prod(self.table.shape[1:]) * dtype.itemsize)
        blocks = -(-count // size)
        missing = 0, blocks * size - count
        if bag_of_entry is None:
            bag_of_entry = lax.iota(jnp.int32, count) // (count // bags)
        positions = jnp.pad(self.positions.reshape(-1), missing, constant_values=padding)
        bag_of_entry = jnp.pad(bag_of_entry, missing, constant_values=bags)
        weights = self.weights
        if weights is not None:
            weights = jnp.pad(weights.reshape(-1), missing)

        def block(number: jax.Array, sums: jax.Array) -> jax.Array:
            part = lambda x: lax.dynamic_slice_in_dim(x, number * size, size)
            rows = dataclasses.replace(self, positions=part(positions)).rows()
            rows = _weighted(rows, None if weights is None else part(weights))
            return add_rows(sums, part(bag_of_entry), rows)

        return lax.fori_loop(0, blocks, block, self.zeros())


def is_bag_sum(
    table: jax.Array, positions: jax.Array, weights: jax.Array | None, bags: int
) -> bool:
    """Decide whether `bag_sum` takes these arrays: inexact, not empty, and on one device."""
    arrays = [x for x in (table, positions, weights) if x is not None]
    return (
        jnp.issubdtype(table.dtype, jnp.inexact)
        and 0 not in (bags, *positions.shape, *table.shape)
        # Where arrays are sharded by their type, XLA places the terms.
        and explicit_mesh(*arrays) is None
        and not any(map(varying_axes, arrays))
    )


def bag_sum(*operands: Argument) -> jax.Array:
    """Return the sums of a `BagSum` of these attributes."""
    x = BagSum(*operands)
    return BAG_SUM(x)[0] if has_many_rows(x) else x.by_parts()


def has_many_rows(x: BagSum) -> bool:
    """Decide whether bags have rows that are better not materialised; not of symbolic sizes."""
    shape = *x.positions.shape, *x.table.shape[1:]
    is_closed = is_known(x.bags, *shape)
    return is_closed and math.prod(shape) * x.table.dtype.itemsize > tuning.SMALL_ROWS


def has_few_columns(x: BagSum) -> bool:
    """Decide whether bags are of equal lengths, and so short that columns are added."""
    return x.bag_of_entry is None and x.positions.shape[1] <= tuning.COLUMNS


def _weighted(rows: jax.Array, weights: jax.Array | None) -> jax.Array:
    return rows if weights is None else rows * trailing(weights, rows.ndim)


def _shapes(x: BagSum) -> list[Shaped]:
    shape = x.bags, *x.table.shape[1:]
    return [x.table.update(shape=shape, dtype=wide(x.table.dtype))]


BAG_SUM: CallPrimitive[BagSum]
BAG_SUM = CallPrimitive("jmask_bag_sum", lambda x: [x.by_parts()], _shapes)
BAG_SUM.lower(lambda x: [x.in_one_list()], lambda x: [x.by_parts()], platform="gpu")
# Where arrays are sharded over devices, each block would go between them.
BAG_SUM.lower(
    lambda x: [x.by_column() if has_few_columns(x) else x.in_blocks()],
    lambda x: [x.by_parts()],
    platform="cpu",
)


def _derivative(
    primals: Arrays, tangents: Arrays, *, tree: PyTreeDef
) -> tuple[list[jax.Array], list[jax.Array]]:
    x, along = tree.unflatten(primals), tree.unflatten(tangents)
    terms = []
    if not isinstance(along.table, ad.Zero):
        moved = dataclasses.replace(x, table=along.table, fill=0)
        terms.append(moved.by_parts(linear=True))
    if x.weights is None or isinstance(along.weights, ad.Zero):
        sums = BAG_SUM(x)[0]
    else:
        # The derivative by the weights needs the rows themselves: they are read once for both.
        rows = x.rows()
        sums = x.combined(rows)
        moved = dataclasses.replace(x, weights=along.weights)
        terms.append(moved.combined(rows))
    return [sums], [sum(terms[1:], terms[0]) if terms else jnp.zeros_like(sums)]


ad.primitive_jvps[BAG_SUM.primitive] = _derivative
