"""Sums of rows, bag by bag, whose rows are never materialised.

    table [[1, 2],     positions [2, 0, 2]      sums [[6, 8],       row 2 + row 0
           [3, 4],     bags      [0, 0, 1]            [5, 6]]       row 2
           [5, 6]]

On a CPU a block of rows is read at a time and added to its bags: all n rows of a large batch
would go through memory twice. The bags of several tables are summed side by side, and
differentiated as a gather and a sum.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jmask._base.array_types import is_known, trailing, wide
from jmask._base.lowering import GroupedPrimitive, Results
from jmask._base.types import Argument, Arrays, PyTreeDef, Shaped
from jmask._kernels import tuning
from jmask._kernels.row_blocks import BlockLoop, block_size, run_side_by_side
from jmask._kernels.rows import Gather, add_rows

_Read = Callable[[Gather, jax.Array, jax.Array], jax.Array]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["table", "positions", "bag_of_entry", "weights", "valid"],
    meta_fields=["bags", "fill"],
)
@dataclasses.dataclass(frozen=True)
class BagSum:
    """Sums (bags, *row) of the rows of each bag, in float32 at least.

    No array is sharded over devices by its type, or differs from one to the other.
    """

    table: Argument  # (V, *row): floating; not empty
    # (n,): canonical ids, n > 0; V reads `fill`. (bags, k) if the bags have equal lengths.
    positions: jax.Array
    # (n,): canonical: `bags` where an entry is in none. None if the bags have equal lengths.
    bag_of_entry: jax.Array | None
    # Of the entries, of the same shape, in the dtype of the sums; None for ones.
    weights: jax.Array | None
    # A boolean; where it is False all sums begin with nan. None for True.
    valid: jax.Array | None
    bags: int  # how many, > 0
    fill: float  # 0 or nan

    def start(self) -> jax.Array:
        """Return the sums (bags, *row) of nothing."""
        zeros = jnp.zeros((self.bags, *self.table.shape[1:]), wide(self.table.dtype))
        return zeros if self.valid is None else jnp.where(self.valid, zeros, jnp.nan)

    def by_parts(self, linear: bool = False) -> jax.Array:
        """Return the sums by definition; if `linear`, in operations that JAX can transpose."""
        read = Gather.plain if linear else Gather.__call__
        return self.combined(self.rows(read))

    def rows(self, read: _Read = Gather.__call__) -> jax.Array:
        """Return the rows (*entries, *row) in float32 at least, without their weights."""
        fills, batch = lax.GatherScatterMode.FILL_OR_DROP, self.positions.ndim
        gather = Gather.rows_of(self.table.shape, fills, batch, fill_value=self.fill)
        rows = read(gather, self.table, self.positions[..., None])
        return rows.astype(wide(self.table.dtype))

    def combined(self, rows: jax.Array) -> jax.Array:
        """Return the sums of the rows (*entries, *row) that were read, times weights."""
        weights = self.weights
        if self.bag_of_entry is not None:
            rows = _weighted(rows, weights)
            return add_rows(self.start(), self.bag_of_entry, rows)
        if weights is None:
            total = jnp.sum(rows, 1, dtype=rows.dtype)
        else:  # a product that XLA's CPU compiler would write out to sum it is a `dot` instead
            total = jnp.einsum("bl,bl...->b...", weights, rows, precision=lax.Precision.HIGHEST)
        return total if self.valid is None else self.start() + total

    def loop(self, size: int) -> BlockLoop:
        """Return a loop that reads blocks of `size` rows and adds them to their bags."""
        count, bags, bag_of_entry = self.positions.size, self.bags, self.bag_of_entry
        blocks = -(-count // size)
        missing = (blocks + 1) * size - count  # the last block of all is empty
        if bag_of_entry is None:
            bag_of_entry = lax.iota(jnp.int32, count) // (count // bags)
        padding = self.table.shape[0]
        positions = jnp.pad(self.positions.reshape(-1), (0, missing), constant_values=padding)
        bag_of_entry = jnp.pad(bag_of_entry, (0, missing), constant_values=bags)
        weights = self.weights
        if weights is not None:
            weights = jnp.pad(weights.reshape(-1), (0, missing))

        def block(number: jax.Array, carried: tuple[jax.Array, None]) -> tuple[jax.Array, None]:
            first = jnp.minimum(number, blocks) * size

            part = lambda x: lax.dynamic_slice_in_dim(x, first, size)
            rows = dataclasses.replace(self, positions=part(positions)).rows()
            rows = _weighted(rows, None if weights is None else part(weights))
            return add_rows(carried[0], part(bag_of_entry), rows), None

        return BlockLoop((self.start(), None), block, blocks, blocks)


def bag_sum(*operands: Argument) -> jax.Array:
    """Return the sums of a `BagSum` of these attributes."""
    x = BagSum(*operands)
    if not is_known(*x.positions.shape, x.bags) or not are_many(x.positions.size):
        return x.by_parts()
    ((sums,),) = BAG_SUM([x])
    return sums


def are_many(entries: int) -> bool:
    """Decide whether so many rows are better not materialised."""
    return entries > tuning.MATERIALISED_ROWS


def _weighted(rows: jax.Array, weights: jax.Array | None) -> jax.Array:
    return rows if weights is None else rows * trailing(weights, rows.ndim)


# --- the primitive --------------------------------------------------------------------------


def _by_parts(sums: Sequence[BagSum]) -> Results:
    return [[x.by_parts()] for x in sums]


def _shapes(x: BagSum) -> list[Shaped]:
    shape = x.bags, *x.table.shape[1:]
    return [x.table.update(shape=shape, dtype=wide(x.table.dtype))]


BAG_SUM: GroupedPrimitive[BagSum] = GroupedPrimitive("jmask_bag_sum", _by_parts, _shapes)


def _derivative(
    primals: Arrays, tangents: Arrays, *, tree: PyTreeDef
) -> tuple[list[jax.Array], list[jax.Array]]:
    sums, along = tree.unflatten(primals), tree.unflatten(tangents)
    if any(_has_weight_tangent(x, t) for x, t in zip(sums, along, strict=True)):
        # The derivative by the weights needs the rows themselves: they are read once for both.
        rows = [x.rows() for x in sums]
        values = [x.combined(y) for x, y in zip(sums, rows, strict=True)]
        return values, list(map(_tangent, sums, along, rows))
    values = BAG_SUM.primitive.bind(*primals, tree=tree)
    return values, [_tangent(x, t, None) for x, t in zip(sums, along, strict=True)]


def _has_weight_tangent(x: BagSum, along: BagSum) -> bool:
    return x.weights is not None and not isinstance(along.weights, ad.Zero)


def _tangent(x: BagSum, along: BagSum, rows: jax.Array | None) -> jax.Array:
    """Return the tangent of the sums, linear in the tangents of table and weights."""
    terms = []
    if not isinstance(along.table, ad.Zero):
        moved = dataclasses.replace(x, table=along.table, valid=None, fill=0)
        terms.append(moved.by_parts(linear=True))
    if _has_weight_tangent(x, along):
        assert rows is not None
        terms.append(dataclasses.replace(x, weights=along.weights, valid=None).combined(rows))
    if not terms:
        value = jax.eval_shape(x.by_parts)
        return jnp.zeros(value.shape, value.dtype)
    return sum(terms[1:], terms[0])


ad.primitive_jvps[BAG_SUM.primitive] = _derivative


def _on_one_cpu(sums: Sequence[BagSum]) -> Results:
    # Bags of all tables advance in one loop, so that the blocks of all fit into the cache
    # together.
    tables = (x.table for x in sums)
    size = block_size([math.prod(x.shape[1:]) * wide(x.dtype).itemsize for x in tables])
    return [[x] for x in run_side_by_side([x.loop(size) for x in sums])]


# Where arrays are sharded over devices, each block would go between them.
BAG_SUM.lower(_on_one_cpu, _by_parts, platform="cpu")
