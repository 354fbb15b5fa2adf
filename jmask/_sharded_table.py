"""Sharded tables: the rows of a table spread over the devices of a mesh.

    S shards of R = ceil(V / S) rows; row i lives on shard s at place j

    placement    s          j           shard 0 of 3, V = 8
    div          i // R     i % R       rows 0, 1, 2        contiguous blocks
    mod          i % S      i // S      rows 0, 3, 6        hot ids spread by themselves

A lookup sends ids to the shards and rows back. A gradient crosses the network once, as ids
and rows; then each shard keeps what is its own, and reads, computes and writes where the row
lives: parameters and optimizer state never move.

    forward      all-gather of the ids, reduce-scatter of the rows        n + n D numbers
    backward     all-gather of the ids and the rows of the gradient       n + n D numbers

The batch may be sharded over the same axes of the mesh, over others, or over both.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmask._coalesce import coalesce_rows
from jmask._packed_table import LANES, PackedTable
from jmask._row_ids import id_dtype
from jmask._row_sparse import RowSparse
from jmask._rows import gather_rows, set_rows
from jmask._stored_table import StoredTable

PLACEMENTS = ("div", "mod")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the rows of a table live.

    Attributes:
        mesh: the devices.
        rows: the axes of the mesh over which rows are spread.
        batch: the axes over which the ids of lookups are spread.
        placement: "div" or "mod".
        count: V, the number of rows.
        block: R, the number of rows of a shard.
    """

    mesh: Mesh
    rows: tuple[str, ...]
    batch: tuple[str, ...]
    placement: str
    count: int
    block: int

    @property
    def shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.rows)

    def local(self, ids: jax.Array, shard: Any) -> jax.Array:
        """Places (n,) of the ids on a shard, int32; R where a row is not there."""
        if self.placement == "div":
            owner, place = ids // self.block, ids % self.block
        else:
            owner, place = ids % self.shards, ids // self.shards
        here = (owner == shard) & (ids < self.count)
        return jnp.where(here, place, self.block).astype(jnp.int32)

    def ids(self, places: jax.Array, shard: Any) -> jax.Array:
        """The ids of places on a shard, V of places that are no row."""
        dtype = id_dtype(self.count)
        there, shard = places.astype(dtype), jnp.asarray(shard, dtype)
        if self.placement == "div":
            ids = shard * self.block + there
        else:
            ids = there * self.shards + shard
        return jnp.where(places < self.block, ids, jnp.asarray(self.count, dtype))

    def shard(self) -> jax.Array:
        """The number of the shard on this device, inside `run`."""
        return lax.axis_index(self.rows)

    def run(self, function: Callable[..., Any], *arguments: Any, over: Any) -> Any:
        """`function` on each device.

        Args:
            function: of the blocks that a device holds; returns arrays of one block each.
            arguments: arrays whose dimension 0 is spread over axes.
            over: for each argument, and at last for the result, these axes.

        Inside a `shard_map` over these axes it is called as it is.
        """
        if set(self.rows) <= set(jax.sharding.get_abstract_mesh().manual_axes):
            return function(*arguments)
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            raise ValueError(
                "a ShardedTable is used where the axes of the mesh are explicit: give "
                "`jax.set_mesh` a mesh with axis_types=(jax.sharding.AxisType.Auto,) for each "
                "axis, or use the table inside jax.shard_map."
            )
        *inputs, outputs = (P(axes) for axes in over)
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(inputs), out_specs=outputs, check_vma=False
        )
        return jax.jit(mapped)(*arguments)

    def sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(self.rows))


@jax.tree_util.register_pytree_with_keys_class
class RoutedRows(RowSparse):
    """A gradient of which each shard has the rows that live there, equal ids summed.

    Entries [s m, (s + 1) m) belong to shard s and are sorted; it is a true `RowSparse`.
    """

    __slots__ = ()

    is_distinct = True

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> "RoutedRows":
        node: Any = super().tree_unflatten(static, leaves)
        return node

    def with_values(self, values: jax.Array) -> "RoutedRows":
        return RoutedRows.tree_unflatten(
            (self.shape, self.coalesced), (self.index_leaf, values)
        )


@jax.tree_util.register_pytree_with_keys_class
class ShardedTable(StoredTable):
    """A table (V, *row) whose rows are spread over devices. Made by `jmask.sharded`.

    Attributes:
        blocks: an array (S R, *row), or a `PackedTable` of that shape, with dimension 0
            sharded over `layout.rows`; rows beyond the last are never read.
        layout: where rows live.
        shape: (V, *row).

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> table = jmask.sharded(jnp.ones((5, 2)), mesh)
        >>> jmask.grad(lambda t: jnp.sum(t[jnp.array([4, 0, 4])]))(table)
        RowSparse(float32[5, 2], nse=3)
    """

    __slots__ = ("blocks", "layout")

    def __init__(self, blocks: Any, layout: Layout, shape: Sequence[int], tap: Any = None):
        self.blocks, self.layout, self.shape, self.tap = blocks, layout, tuple(shape), tap

    def tree_flatten_with_keys(self) -> Any:
        keys = (jax.tree_util.GetAttrKey("blocks"), jax.tree_util.GetAttrKey("tap"))
        children = tuple(zip(keys, (self.blocks, self.tap), strict=True))
        return children, (self.layout, self.shape)

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "ShardedTable":
        node = object.__new__(cls)
        node.blocks, node.tap = children
        node.layout, node.shape = static
        return node

    @property
    def dtype(self) -> Any:
        return self.blocks.dtype

    def with_tap(self, tap: Any) -> "ShardedTable":
        return ShardedTable(self.blocks, self.layout, self.shape, tap)

    def with_placement(self, placement: str) -> "ShardedTable":
        """The same table with rows placed otherwise: "div" or "mod"."""
        layout = self.layout
        return sharded(
            self.todense(),
            layout.mesh,
            rows=layout.rows,
            batch=layout.batch,
            placement=placement,
            packed=isinstance(self.blocks, PackedTable),
        )

    def todense(self) -> jax.Array:
        blocks = self.blocks
        blocks = blocks.todense() if isinstance(blocks, PackedTable) else blocks
        if self.layout.placement == "mod":
            blocks = blocks.reshape(self.layout.shards, self.layout.block, *self.shape[1:])
            blocks = jnp.swapaxes(blocks, 0, 1).reshape(-1, *self.shape[1:])
        return blocks[: self.shape[0]]

    def full(self, row: Sequence[int], value: Any, dtype: Any) -> "ShardedTable":
        layout, shape = self.layout, (self.layout.shards * self.layout.block, *row)
        if isinstance(self.blocks, PackedTable):
            make: Any = functools.partial(self.blocks.full, row, value, dtype)
        else:
            make = functools.partial(jnp.full, shape, value, dtype)
        blocks = jax.jit(make, out_shardings=layout.sharding())()
        return ShardedTable(blocks, layout, (self.shape[0], *row))

    def read(self, ids: jax.Array) -> jax.Array:
        layout = self.layout
        shared = tuple(axis for axis in layout.batch if axis in layout.rows)
        others = tuple(axis for axis in layout.rows if axis not in layout.batch)

        def rows_of(blocks: Any, ids: jax.Array) -> jax.Array:
            if shared:
                ids = lax.all_gather(ids, shared, tiled=True)
            places = layout.local(ids, layout.shard())
            exists = (places < layout.block).reshape((-1,) + (1,) * (self.ndim - 1))
            rows = jnp.where(exists, _read(blocks, places), 0)
            rows = lax.psum(rows, others) if others else rows
            if shared:
                rows = lax.psum_scatter(rows, shared, scatter_dimension=0, tiled=True)
            return rows

        if self._inside():
            return rows_of(self._local(self.blocks), ids)
        count = ids.shape[0]
        parts = math.prod(layout.mesh.shape[axis] for axis in layout.batch)
        ids = jnp.pad(ids, (0, -count % parts), constant_values=layout.count)
        over = (layout.rows, layout.batch, layout.batch)
        rows = layout.run(self._on_local(rows_of), self.blocks, ids, over=over)
        return rows[:count]

    def distinct(self, gradient: RowSparse) -> RoutedRows:
        if isinstance(gradient, RoutedRows):
            return gradient
        layout, axes = self.layout, self._not_yet_gathered(gradient.values)

        def routed(ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
            if axes:
                ids = lax.all_gather(ids, axes, tiled=True)
                values = lax.all_gather(values, axes, tiled=True)
            shard = layout.shard()
            places, values = coalesce_rows(layout.local(ids, shard), values, layout.block)
            return layout.ids(places, shard), values

        ids, values = gradient.row_ids(), gradient.values
        if not self._inside():
            parts = math.prod(layout.mesh.shape[axis] for axis in layout.batch)
            extra = -ids.shape[0] % parts
            ids = jnp.pad(ids, (0, extra), constant_values=layout.count)
            values = jnp.pad(values, [(0, extra)] + [(0, 0)] * (values.ndim - 1))
        over = (layout.batch, layout.batch, layout.rows)
        ids, values = layout.run(routed, ids, values, over=over)
        leaves, static = RowSparse.of_rows(
            ids, values, self.shape, coalesced=False
        ).tree_flatten()
        return RoutedRows.tree_unflatten(static, leaves)

    def rows(self, gradient: RoutedRows) -> jax.Array:
        layout = self.layout

        def rows_of(blocks: Any, ids: jax.Array) -> jax.Array:
            return _read(self._local(blocks), layout.local(ids, layout.shard()))

        over = (layout.rows,) * 3
        return layout.run(rows_of, self.blocks, gradient.row_ids(), over=over)

    def set_rows(self, gradient: RoutedRows, rows: jax.Array) -> "ShardedTable":
        layout = self.layout

        def written(blocks: Any, ids: jax.Array, rows: jax.Array) -> Any:
            places = layout.local(ids, layout.shard())
            if not isinstance(blocks, PackedTable):
                return set_rows(blocks, places, rows, coalesced=True)
            block = self._local(blocks)
            new = block.set_rows(
                RowSparse.of_rows(places, rows, block.shape, coalesced=True), rows
            )
            return PackedTable(new.parts, blocks.shape)

        over = (layout.rows,) * 4
        blocks = layout.run(written, self.blocks, gradient.row_ids(), rows, over=over)
        return ShardedTable(blocks, layout, self.shape)

    # --- inside a shard_map --------------------------------------------------------------

    def _inside(self) -> bool:
        return set(self.layout.rows) <= set(jax.sharding.get_abstract_mesh().manual_axes)

    def _not_yet_gathered(self, values: jax.Array) -> tuple[str, ...]:
        """The batch axes over which a gradient still differs from device to device.

        In a `shard_map` that tracks this, the gradient of what all devices share is summed
        over them by JAX, and has the rows of all of them.
        """
        if not self._inside() or not _varying(jax.tree.leaves(self.blocks)[0]):
            return self.layout.batch
        return tuple(axis for axis in self.layout.batch if axis in _varying(values))

    def _local(self, blocks: Any) -> Any:
        """The block of a device, its shape said truly."""
        if not isinstance(blocks, PackedTable):
            return blocks
        return PackedTable(blocks.parts, (self.layout.block, *self.shape[1:]))

    def _on_local(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda blocks, *arguments: function(self._local(blocks), *arguments)


def sharded(
    table: Any,
    mesh: Mesh,
    *,
    rows: str | Sequence[str] | None = None,
    batch: str | Sequence[str] | None = None,
    placement: str = "div",
    packed: bool | None = None,
) -> ShardedTable:
    """A table whose rows are spread over the devices of a mesh.

    It is used like an array by lookups, gradients and optimizers, under jit, eagerly, and
    inside a `shard_map` over its axes. Optimizer state made by `init` is sharded alike.

    Args:
        table (V, *row): a floating array; V need not be divisible by anything. A table that
            no device can hold is made where it lives, under jit: `jax.jit(lambda key:
            jmask.sharded(jax.random.normal(key, shape), mesh))(key)`. For a
            `jax.ShapeDtypeStruct` the result holds shapes.
        mesh: of `jax.make_mesh`.
        rows: the axis or axes over which rows are spread; all by default.
        batch: the axis or axes over which lookups are spread; all by default.
        placement: "div", contiguous blocks of rows, or "mod", row i on shard i % S.
        packed: keep narrow rows in lines of 128 (see `jmask.packed`); by default on TPUs,
            where a step would copy the table otherwise.

    Raises:
        ValueError: if an axis is not one of the mesh, or `placement` is not known.

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
    if not isinstance(table, jax.Array | jax.ShapeDtypeStruct):
        table = jnp.asarray(table)
    if not table.ndim or not jnp.issubdtype(table.dtype, jnp.floating):
        raise ValueError(
            f"`table` must be a floating array (V, *row), got {table.dtype}{list(table.shape)}."
        )
    layout = layout_of(table.shape, mesh, rows, batch, placement, packed)
    in_lines = is_packed(table.shape, mesh, packed)

    def blocks_of(table: jax.Array) -> Any:
        blocks = _blocks_of(table, layout)
        return PackedTable.pack(blocks) if in_lines else blocks

    if isinstance(table, jax.ShapeDtypeStruct):
        shape_of = functools.partial(_placed_shape, layout.sharding())
        blocks = jax.tree.map(shape_of, jax.eval_shape(blocks_of, table))
    elif _is_elsewhere(table, mesh):
        blocks = jax.device_put(jax.jit(blocks_of)(table), layout.sharding())
    else:
        blocks = jax.jit(blocks_of, out_shardings=layout.sharding())(table)
    return ShardedTable(blocks, layout, table.shape)


def _is_elsewhere(table: jax.Array, mesh: Mesh) -> bool:
    """Whether an array is bound to other devices than those of the mesh."""
    if isinstance(table, jax.core.Tracer) or not table.committed:
        return False
    return table.sharding.device_set != set(mesh.devices.flat)


def _placed_shape(sharding: NamedSharding, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def layout_of(
    shape: Sequence[int],
    mesh: Mesh,
    rows: str | Sequence[str] | None = None,
    batch: str | Sequence[str] | None = None,
    placement: str = "div",
    packed: bool | None = None,
) -> Layout:
    """The layout that `sharded` gives a table of this shape."""
    if placement not in PLACEMENTS:
        raise ValueError(f"`placement` must be 'div' or 'mod', got {placement!r}.")
    rows, batch = _axes(mesh, rows, "rows"), _axes(mesh, batch, "batch")
    # In what is done with a table, XLA's partitioner places what has no place yet.
    automatic = (AxisType.Auto,) * len(mesh.axis_names)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)
    shards = math.prod(mesh.shape[axis] for axis in rows)
    block = -(-shape[0] // shards)
    if is_packed(shape, mesh, packed):
        block += -block % LANES  # a line belongs to one shard
    return Layout(mesh, rows, batch, placement, shape[0], block)


def is_packed(shape: Sequence[int], mesh: Mesh, packed: bool | None) -> bool:
    """Whether a table is kept in lines of 128."""
    if packed is None:
        packed = mesh.devices.flat[0].platform == "tpu"
    return packed and math.prod(shape[1:]) % LANES != 0


def _axes(mesh: Mesh, axes: str | Sequence[str] | None, name: str) -> tuple[str, ...]:
    if axes is None:
        return tuple(mesh.axis_names)
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    if unknown or len(set(axes)) != len(axes):
        raise ValueError(
            f"`{name}` must name different axes of the mesh, {mesh.axis_names}, got {axes}."
        )
    return axes


def _blocks_of(table: jax.Array, layout: Layout) -> jax.Array:
    """All blocks (S R, *row), one after the other."""
    missing = layout.shards * layout.block - layout.count
    table = jnp.pad(table, [(0, missing)] + [(0, 0)] * (table.ndim - 1))
    if layout.placement == "mod":
        table = table.reshape(layout.block, layout.shards, *table.shape[1:])
        table = jnp.swapaxes(table, 0, 1).reshape(-1, *table.shape[2:])
    return table


def _varying(x: jax.Array) -> frozenset[str]:
    """The axes over which `x` differs from device to device, as far as JAX tracks it."""
    of_manual_axes = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if of_manual_axes is None else of_manual_axes.varying


def _read(blocks: Any, places: jax.Array) -> jax.Array:
    return (
        blocks.read(places) if isinstance(blocks, PackedTable) else gather_rows(blocks, places)
    )
