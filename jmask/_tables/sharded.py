"""Sharded tables: the rows of a table distributed over the devices of a mesh.

`shard_layout` says on which shard a row lives, and at what place: "div" gives each shard a
contiguous block of rows, "mod" deals them out. A lookup sends ids to the shards and rows back.
A gradient crosses the network once, as ids and rows; then each shard keeps what is its own,
and reads, computes and writes where the row lives: parameters and state never move.

    forward      all-gather of the ids, reduce-scatter of the rows        n + n D numbers
    backward     all-gather of the ids and the rows of the gradient       n + n D numbers

The batch may be sharded over the same axes of the mesh, over others, or over both.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jmask._base.array_types import (
    automatically,
    explicit_sharding,
    spec_of,
    trailing,
    varying_axes,
    with_rows_over,
    with_whole_rows,
)
from jmask._base.row_ids import Order
from jmask._base.types import (
    DType,
    Function,
    JvpArgs,
    Numbers,
    PyTree,
    Scalar,
    Shape,
    Static,
    Table,
)
from jmask._base.validation import as_table, checked_choice
from jmask._kernels.rows import add_rows, gather_unique_rows, set_rows
from jmask._tables.packed import PackedTable, checked_floating, part_shapes
from jmask._tables.shard_layout import (
    PLACEMENTS,
    Blocks,
    Layout,
    dealt,
    gathered,
    is_packed,
    layout_of,
    rows_from_owners,
    rows_to_owners,
)
from jmask._tables.stored_table import Placeholder, StoredTable, differentiable, read_rows
from jmask._tensors.row_sparse import RowSparse

# --- routed rows --------------------------------------------------------------------------
#
# `RoutedRows`: a row-sparse gradient of which each shard of a table has its own rows.
#
# shards of 2      entries of shard 0 | of shard 1        equal ids summed, in order
# ids              0  1  V            | 2  V  V           V is padding


@jax.tree_util.register_pytree_with_keys_class
class RoutedRows(RowSparse):
    """A gradient of which each shard has the rows that live there, equal ids summed.

    Entries [s m, (s + 1) m) belong to shard s and are sorted; it is a true `RowSparse`.
    """

    __slots__ = ("layout",)

    layout: Layout

    @property
    def order(self) -> Order:
        return "unique"

    @classmethod
    def from_shards(
        cls, ids: jax.Array, values: jax.Array, shape: Sequence[int], layout: Layout
    ) -> "RoutedRows":
        """Return the rows (S m, *row) that the shards have."""
        rows = RowSparse.from_rows(ids, values, tuple(shape), coalesced=False)
        leaves, static = rows.tree_flatten()
        return cls.tree_unflatten((static, layout), leaves)

    def tree_flatten(self) -> tuple[Sequence[PyTree], Static]:
        leaves, static = super().tree_flatten()
        return leaves, (static, self.layout)

    def tree_flatten_with_keys(self) -> tuple[Sequence[tuple[object, PyTree]], Static]:
        leaves, static = super().tree_flatten_with_keys()
        return leaves, (static, self.layout)

    @classmethod
    def tree_unflatten(cls, static: Static, leaves: Sequence[PyTree]) -> "RoutedRows":
        row_sparse_static, layout = static
        node: RoutedRows = super().tree_unflatten(row_sparse_static, leaves)
        node.layout = layout
        return node

    def with_values(self, values: jax.Array) -> "RoutedRows":
        (leaf, _), static = self.tree_flatten()
        return RoutedRows.tree_unflatten(static, (leaf, values))

    def without(self, rows: jax.Array) -> "RoutedRows":
        """Return the gradient without the entries where `rows` (S m,) is True."""
        layout = self.layout

        def others(ids: jax.Array, values: jax.Array, rows: jax.Array) -> tuple[jax.Array, ...]:
            return layout.summed_here(jnp.where(rows, layout.count, ids), values)

        over = (layout.rows,) * 4
        ids, values = layout.run(others, self.row_ids(), self.values, rows, over=over)
        return RoutedRows.from_shards(ids, values, self.shape, layout)


# --- sharded ------------------------------------------------------------------------------


@jax.tree_util.register_pytree_with_keys_class
class ShardedTable(StoredTable):
    """A table (V, *row) whose rows are sharded over devices. Made by `jmask.sharded`.

    Attributes:
        blocks: an array (S R, *row), or a `PackedTable` of that shape, with dimension 0
            sharded over `layout.rows`; rows beyond the last are never read.
        stored: the blocks as the leaves of the tree are: see `Layout.stored`.
        layout: where rows live.
        shape: (V, *row).

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> table = jmask.sharded(jnp.ones((5, 2)), mesh)
        >>> jmask.grad(lambda t: jnp.sum(t[jnp.array([4, 0, 4])]))(table)
        RowSparse(float32[5, 2], nse=3)
    """

    __slots__ = ("layout", "stored")

    _ARRAYS = ("stored", "placeholder")
    _NAMES = ("blocks", "placeholder")
    _STATIC = ("layout", "shape")

    def __init__(
        self,
        stored: Blocks,
        layout: Layout,
        shape: Sequence[int],
        placeholder: Placeholder | None = None,
    ):
        self.stored, self.layout = stored, layout
        self.shape, self.placeholder = tuple(shape), placeholder

    @property
    def blocks(self) -> Blocks:
        if self.layout.placement == "div":
            return self.stored
        sharding = self.layout.sharding(2 if self._is_packed() else self.ndim)
        return jax.jit(self.layout.merged, out_shardings=sharding)(self.stored)

    def _is_packed(self) -> bool:
        return isinstance(self.stored, PackedTable)

    @property
    def dtype(self) -> DType:
        return self.stored.dtype

    def _shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the stored arrays."""
        layout = self.layout
        shape = (layout.shards * layout.block, *self.shape[1:])
        parts = 1 if layout.inside() else layout.shards
        stored = part_shapes(shape) if self._is_packed() else [shape]
        blocks = ((rows // layout.shards, row) for rows, *row in stored)
        return [
            (parts * block, *row) if layout.placement == "div" else (parts, block, *row)
            for block, row in blocks
        ]

    def is_stack(self) -> bool:
        first, *_ = jax.tree.leaves(self.stored)
        return jnp.shape(first)[1:] == self._shapes()[0]

    def check_layout(self) -> Blocks:
        """Return the stored blocks; raise ValueError if they are of another layout."""
        self.check_single()
        layout = self.layout
        for x, shape in zip(jax.tree.leaves(self.stored), self._shapes(), strict=True):
            if jnp.shape(x) != shape:
                raise ValueError(
                    f"a ShardedTable (`placement`={layout.placement!r}, {layout.shards} "
                    f"shards) holds an array of shape {jnp.shape(x)} where {shape} is "
                    "expected: its rows are in the order of another mesh or placement. Restore "
                    "checkpoints by jmask.from_arrays(arrays, like=...)."
                )
        return self.stored

    def with_placement(self, placement: str) -> "ShardedTable":
        """Return the same table with rows placed otherwise: "div" or "mod"."""
        checked_choice(placement, "placement", PLACEMENTS)
        layout = dataclasses.replace(self.layout, placement=placement)
        return _placed(self.todense(), layout, self._is_packed())

    def todense(self) -> jax.Array:
        blocks = self.layout.merged(jax.tree.map(with_whole_rows, self.check_layout()))
        blocks = blocks.todense() if isinstance(blocks, PackedTable) else blocks
        if self.layout.placement == "mod":
            blocks = gathered(blocks.reshape(self.layout.shards, -1, *self.shape[1:]))
        return differentiable(blocks[: self.shape[0]], self.placeholder)

    def full(self, row: Sequence[int], value: Scalar, dtype: DTypeLike) -> "ShardedTable":
        layout, shape = self.layout, (self.layout.shards * self.layout.block, *row)
        make: Callable[[], Table] = functools.partial(jnp.full, shape, value, dtype)
        ndim = len(shape)
        if isinstance(self.stored, PackedTable):
            make = functools.partial(self.stored.full, row, value, dtype)
            ndim = 2
        sharding = layout.sharding(ndim + (layout.placement == "mod"))
        stored = jax.jit(lambda: layout.stored(make()), out_shardings=sharding)()
        return ShardedTable(stored, layout, (self.shape[0], *row))

    def entries(self) -> list[jax.Array]:
        """Return the rows of each shard where they are; in a `shard_map`, of this device."""
        layout = self.layout

        def local_entries(stored: Blocks) -> jax.Array:
            places = jnp.arange(layout.block)
            rows = read_rows(self._local(stored), places)
            exists = layout.ids(places, layout.shard()) < layout.count
            return jnp.where(trailing(exists, rows.ndim), rows, 0)

        return [layout.run(local_entries, self.check_layout(), over=(layout.rows, layout.rows))]

    def __reduce__(self) -> tuple[Function, tuple[object, ...]]:
        arrays = jax.tree.map(np.asarray, self.stored)
        return _unpickled, (arrays, self.layout.described(), self.shape)

    def read(self, ids: jax.Array) -> jax.Array:
        layout = self.layout
        is_exchanged = layout.capacity_factor is not None
        rows_of = self._from_owners if is_exchanged else self._from_everyone
        stored = self.check_layout()
        if layout.inside():
            return rows_of(self._local(stored), ids)
        count, extra = ids.shape[0], layout.missing(ids.shape[0])
        over = (layout.rows, layout.batch, layout.batch)
        padded = self._padded(ids, extra, layout.count)
        on_stored = lambda stored, ids: rows_of(self._local(stored), ids)
        rows = layout.run(on_stored, stored, padded, over=over)
        rows = layout.everywhere(rows)[:count] if extra else rows
        sharding = explicit_sharding(rows)
        return rows if sharding is None else with_rows_over(rows, sharding, spec_of(ids)[0])

    def _from_everyone(self, blocks: Blocks, ids: jax.Array) -> jax.Array:
        """Return rows of the ids of this device: every shard sees all ids, and all add up."""
        layout = self.layout
        shared = tuple(axis for axis in layout.batch if axis in layout.rows)
        others = tuple(axis for axis in layout.rows if axis not in layout.batch)
        if shared:
            ids = lax.all_gather(ids, shared, tiled=True)
        places = layout.local(ids, layout.shard())
        exists = trailing(places < layout.block, self.ndim)
        rows = jnp.where(exists, read_rows(blocks, places), 0)
        if shared:
            rows = lax.psum_scatter(rows, shared, scatter_dimension=0, tiled=True)
        return lax.psum(rows, others) if others else rows

    def _from_owners(self, blocks: Blocks, ids: jax.Array) -> jax.Array:
        """Look up the ids of this device: each id goes to its shard, and its row back."""
        like = jax.ShapeDtypeStruct((*ids.shape, *self.shape[1:]), self.dtype)

        @jax.custom_jvp
        def rows_of(blocks: Blocks, ids: jax.Array) -> jax.Array:
            return rows_from_owners(
                self.layout, functools.partial(read_rows, blocks), ids, like
            )

        @rows_of.defjvp
        def looked_up_jvp(primals: JvpArgs, tangents: JvpArgs) -> tuple[jax.Array, jax.Array]:
            # The rounds of an exchange are a loop, which has no transpose.
            return rows_of(*primals), self._from_everyone(tangents[0], primals[1])

        return rows_of(blocks, ids)

    def fitted(self, gradient: RowSparse) -> RoutedRows:
        if isinstance(gradient, RoutedRows) and gradient.layout == self.layout:
            return gradient
        layout, ids, values = self.layout, gradient.row_ids(), gradient.values
        sharding = explicit_sharding(*jax.tree.leaves(self.stored))
        if sharding is not None and explicit_sharding(values) is None:
            ids, values = (with_rows_over(x, sharding, None) for x in (ids, values))
        axes = self._not_yet_gathered(values)
        batch_axes = layout.batch if sharding is None else axes
        is_exchanged = layout.capacity_factor is not None and set(layout.rows) <= set(axes)

        def routed(ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
            if is_exchanged:
                places, values = rows_to_owners(layout, ids, values, axes)
                return layout.ids(places, layout.shard()), values
            if axes:
                ids = lax.all_gather(ids, axes, tiled=True)
                values = lax.all_gather(values, axes, tiled=True)
            return layout.summed_here(ids, values)

        if not layout.inside():
            extra = layout.missing(ids.shape[0])
            ids = self._padded(ids, extra, layout.count)
            values = self._padded(values, extra, 0)
        over = (batch_axes, batch_axes, layout.rows)
        ids, values = layout.run(routed, ids, values, over=over)
        return RoutedRows.from_shards(ids, values, self.shape, layout)

    def rows(self, gradient: RoutedRows) -> jax.Array:
        layout = self._layout_of(gradient)

        def rows_of(stored: Blocks, ids: jax.Array) -> jax.Array:
            blocks, places = self._local(stored), layout.local(ids, layout.shard())
            if not isinstance(blocks, PackedTable):
                return gather_unique_rows(blocks, places, "any")
            return read_rows(blocks, places)

        over = (layout.rows,) * 3
        return layout.run(rows_of, self.check_layout(), gradient.row_ids(), over=over)

    def set_rows(self, gradient: RoutedRows, rows: jax.Array) -> "ShardedTable":
        return self._written(gradient, rows, set_rows, PackedTable.write)

    def add_rows(self, gradient: RoutedRows, rows: jax.Array) -> "ShardedTable":
        return self._written(gradient, rows, add_rows, PackedTable.add)

    def _written(
        self,
        gradient: RoutedRows,
        rows: jax.Array,
        in_array: Callable[[jax.Array, jax.Array, jax.Array, Order], jax.Array],
        in_lines: Callable[[PackedTable, jax.Array, jax.Array], PackedTable],
    ) -> "ShardedTable":
        """Return the table with the rows of each shard written by one of two functions."""
        layout = self._layout_of(gradient)

        def written(stored: Blocks, ids: jax.Array, rows: jax.Array) -> Blocks:
            places, block = layout.local(ids, layout.shard()), self._local(stored)
            if not isinstance(block, PackedTable):
                return layout.stored(in_array(block, places, rows, "sorted"), 1)
            parts = in_lines(block, places, rows).parts
            return layout.stored(PackedTable(parts, stored.shape), 1)

        over = (layout.rows,) * 4
        stored = layout.run(written, self.check_layout(), gradient.row_ids(), rows, over=over)
        return ShardedTable(stored, layout, self.shape)

    def _padded(self, x: jax.Array, extra: int, value: int) -> jax.Array:
        """Return `x` with `extra` more entries in dimension 0."""
        if not extra:
            return x
        # Entries that do not divide by the devices must not be sharded before they are padded:
        # where they are, XLA's partitioner scatters its own padding to row 0.
        widths = [(0, extra)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(self.layout.everywhere(x), widths, constant_values=value)

    def _layout_of(self, gradient: RowSparse) -> Layout:
        """Return the layout, by which the gradient must have been routed."""
        if getattr(gradient, "layout", None) != self.layout:
            raise ValueError(
                "a ShardedTable of the optimizer state is placed otherwise than its parameter: "
                "make the state by `init` of the parameters as they are, or convert it alike."
            )
        return self.layout

    # --- inside a shard_map --------------------------------------------------------------

    def _not_yet_gathered(self, values: jax.Array) -> tuple[str, ...]:
        """Return the batch axes over which a gradient still differs from device to device.

        In a `shard_map` that tracks this, and where axes are explicit, the gradient of what
        all devices share is summed over them by JAX, and has the rows of all of them.
        """
        if explicit_sharding(values) is not None:
            return () if spec_of(values)[0] is None else self.layout.batch
        if not self.layout.inside() or not varying_axes(jax.tree.leaves(self.stored)[0]):
            return self.layout.batch
        return tuple(axis for axis in self.layout.batch if axis in varying_axes(values))

    def _local(self, stored: Blocks) -> Blocks:
        """Return the block of a device (R, *row), its shape said truly."""
        block = self.layout.merged(stored)
        if not isinstance(block, PackedTable):
            return block
        return PackedTable(block.parts, (self.layout.block, *self.shape[1:]))


def sharded(
    table: Numbers,
    mesh: Mesh,
    *,
    rows: str | Sequence[str] | None = None,
    batch: str | Sequence[str] | None = None,
    placement: str = "div",
    packed: bool | None = None,
    capacity_factor: float | None = None,
) -> ShardedTable:
    """Shard the rows of a table over the devices of a mesh.

    It is used like an array by lookups, gradients and optimizers, under jit, eagerly, and
    inside a `shard_map` over its axes. Optimizer state made by `init` is sharded alike.

    Args:
        table (V, *row): a floating array; V need not be divisible by anything. A table that
            no device can hold is made where it lives, under jit: `jax.jit(lambda key:
            jmask.sharded(jax.random.normal(key, shape), mesh))(key)`. For a
            `jax.ShapeDtypeStruct` the result holds shapes.
        mesh: of `jax.make_mesh`.
        rows: the axis or axes over which rows are sharded; all by default.
        batch: the axis or axes over which lookups are sharded; all by default.
        placement: "div", contiguous blocks of rows, or "mod", row i on shard i % S.
        packed: keep narrow rows in lines of 128 (see `jmask.packed`); by default on TPUs,
            where a step would copy the table otherwise.
        capacity_factor: send rows to the shard they live on alone, for many devices and large
            batches. The capacity of each shard is this many times its share of the lookups of
            a batch, in which an id counts once for each device that looks it up; 2.0 is
            ample where ids are even over shards, as by `placement="mod"`. A gradient that does
            not fit is nan in all rows of the shard. By default all shards see all rows.

    Raises:
        TypeError: if `table` is no array, or `mesh` no mesh.
        ValueError: if an axis is not one of the mesh, `placement` is not known, or
            `capacity_factor` is less than 1 or `batch` does not name all axes of `rows` then.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> table = jmask.sharded(jnp.arange(10.0).reshape(5, 2), mesh, placement="mod")
        >>> table
        ShardedTable(float32[5, 2])
        >>> table[jnp.array([3, 3])]
        Array([[6., 7.],
               [6., 7.]], dtype=float32)
    """
    if not isinstance(table, jax.ShapeDtypeStruct):
        table = as_table(table)
    checked_floating(table)
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"`mesh` must be a jax.sharding.Mesh, got {type(mesh).__name__}: write for example "
            "jax.make_mesh((8,), ('x',))."
        )
    layout = layout_of(table.shape, mesh, rows, batch, placement, packed, capacity_factor)
    return _placed(table, layout, is_packed(table.shape, mesh, packed))


def placed_alike(table: Numbers, like: ShardedTable) -> ShardedTable:
    """Return an array (V, *row) of any dtype as a table that is placed as `like` is."""
    return _placed(jnp.asarray(table), like.layout, like._is_packed())


def _placed(table: jax.Array, layout: Layout, in_lines: bool) -> ShardedTable:
    """Return an array, or the shape of one, as a table of a layout, in lines of 128 or not."""

    def blocks_of(table: jax.Array) -> Blocks:
        """Return all blocks (S R, *row), one after the other."""
        missing = layout.shards * layout.block - layout.count
        blocks = jnp.pad(table, [(0, missing)] + [(0, 0)] * (table.ndim - 1))
        if layout.placement == "mod":
            blocks = dealt(blocks, layout.shards).reshape(blocks.shape)
        return layout.stored(PackedTable.from_array(blocks) if in_lines else blocks)

    sharding = layout.sharding((2 if in_lines else table.ndim) + (layout.placement == "mod"))
    table_sharding = explicit_sharding(table)
    if isinstance(table, jax.ShapeDtypeStruct):
        place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        blocks = jax.tree.map(place, jax.eval_shape(blocks_of, table))
    elif table_sharding is not None:
        blocks = automatically(blocks_of, table, like=table_sharding, spec=sharding.spec)
    elif (
        not isinstance(table, jax.core.Tracer)
        and table.committed
        and table.sharding.device_set != set(layout.mesh.devices.flat)
    ):  # bound to devices outside the mesh
        blocks = jax.device_put(jax.jit(blocks_of)(table), sharding)
    else:
        blocks = jax.jit(blocks_of, out_shardings=sharding)(table)
    return ShardedTable(blocks, layout, table.shape)


def _unpickled(arrays: PyTree, described: Static, shape: Shape) -> ShardedTable:
    layout = Layout.from_description(described)
    put = lambda x: jax.device_put(x, layout.sharding(x.ndim))
    return ShardedTable(jax.tree.map(put, arrays), layout, shape)
