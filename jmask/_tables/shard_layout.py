"""The layout of a sharded table's rows, and code that runs on each device.

    S shards of R = ceil(V / S) rows; row i lives on shard s at place j

    placement    s          j           shard 0 of 3, V = 8
    div          i // R     i % R       rows 0, 1, 2        contiguous blocks
    mod          i % S      i // S      rows 0, 3, 6        hot ids on all shards

Ids may need int64; places on a shard are int32.
"""

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmask._base.array_types import (
    automatic_mesh,
    by_rows,
    explicit_sharding,
    varying_alike,
    with_rows_over,
    with_whole_rows,
)
from jmask._base.row_ids import INT32_MAX, id_dtype
from jmask._base.types import Function, PyTree, Static, Table, TensorLike
from jmask._base.validation import check_flag, checked_choice, shown
from jmask._kernels.coalesce import coalesce_rows, unique_slots
from jmask._kernels.rows import gather_rows, set_rows
from jmask._tables.packed import LANES

PLACEMENTS = ("div", "mod")
Blocks = Table  # an array or a PackedTable: the blocks of all shards, or the one of a device


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a table's rows.

    Attributes:
        mesh: the devices.
        rows: the axes of the mesh over which rows are sharded.
        batch: the axes over which the ids of lookups are sharded.
        placement: "div" or "mod".
        count: V, the number of rows.
        block: R, the number of rows of a shard.
        capacity_factor: of the exchange of rows, or None; see `row_exchange`.
    """

    mesh: Mesh
    rows: tuple[str, ...]
    batch: tuple[str, ...]
    placement: str
    count: int
    block: int
    capacity_factor: float | None = None

    @property
    def shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.rows)

    def described(self) -> Static:
        """Return the layout in tuples, numbers and names, for files."""
        mesh = self.mesh
        devices = tuple(device.id for device in mesh.devices.flat)
        types = tuple(AxisType(x).name for x in mesh.axis_types)
        mesh_key = (mesh.devices.shape, devices, mesh.axis_names, types)
        others = (x.name for x in dataclasses.fields(self)[1:])
        return mesh_key, *(getattr(self, name) for name in others)

    @classmethod
    def from_description(cls, described: Static) -> "Layout":
        """Return the layout that was `described`, if its devices are there."""
        (shape, ids, names, types), *others = described
        devices = {device.id: device for device in jax.devices()}
        if not devices.keys() >= set(ids):
            raise ValueError(
                f"this ShardedTable lives on devices {list(ids)}, and here are "
                f"{sorted(devices)}: store jmask.to_arrays(table), and restore it by "
                "jmask.from_arrays(arrays, like=jmask.sharded(..., mesh))."
            )
        array = np.array([devices[i] for i in ids]).reshape(shape)
        axis_types = tuple(AxisType[x] for x in types)
        return cls(Mesh(array, names, axis_types=axis_types), *others)

    def local(self, ids: jax.Array, shard: jax.Array) -> jax.Array:
        """Return places (n,) of the ids on a shard, int32; R where a row is not there."""
        owner, place = self._owner_and_place(ids)
        here = (owner == jnp.asarray(shard, owner.dtype)) & (ids < self.count)
        return jnp.where(here, place, self.block).astype(jnp.int32)

    def _owner_and_place(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.placement == "div":
            return ids // self.block, ids % self.block
        return ids % self.shards, ids // self.shards

    def key(self, ids: jax.Array) -> jax.Array:
        """Return canonical ids (n,) as owner R + place, or S R for padding.

        Sorted by it, entries are in the order of the shards that they live on.
        """
        rows = self.shards * self.block
        dtype = id_dtype(rows)
        owner, place = self._owner_and_place(ids.astype(dtype))
        return jnp.where(ids < self.count, owner * self.block + place, jnp.asarray(rows, dtype))

    def capacity_for(self, entries: int) -> int:
        """Return the capacity of a shard in an exchange of `entries` on each device."""
        assert self.capacity_factor is not None
        return min(math.ceil(self.capacity_factor * entries), entries * self.shards)

    def ids(self, places: jax.Array, shard: jax.Array) -> jax.Array:
        """Return the ids of places on a shard, V of places that are no row."""
        dtype = id_dtype(self.count)
        there, shard = places.astype(dtype), jnp.asarray(shard, dtype)
        if self.placement == "div":
            ids = shard * self.block + there
        else:
            ids = there * self.shards + shard
        return jnp.where(places < self.block, ids, jnp.asarray(self.count, dtype))

    def summed_here(self, ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the ids and rows that live on this device, equal ids summed, inside `run`."""
        shard = self.shard()
        places, values = coalesce_rows(self.local(ids, shard), values, self.block)
        return self.ids(places, shard), values

    def missing(self, count: int) -> int:
        """Return how many entries to pad: devices get equally many, and at least one."""
        parts = math.prod(self.mesh.shape[axis] for axis in self.batch)
        return max(-(-count // parts), 1) * parts - count

    def shard(self) -> jax.Array:
        """Return the number of the shard on this device, inside `run`."""
        return lax.axis_index(self.rows)

    def inside(self) -> bool:
        """Decide whether this is a `shard_map` over the axes of the rows."""
        return set(self.rows) <= set(jax.sharding.get_abstract_mesh().manual_axes)

    def run(
        self, function: Function, *arguments: PyTree, over: Sequence[tuple[str, ...]]
    ) -> PyTree:
        """Run `function` on the blocks that each device holds of the arguments.

        Dimension 0 of each is sharded over the axes `over`, the last of which are for the
        results. Inside a `shard_map` over the axes of the rows it is called as it is.
        """
        if self.inside():
            return function(*arguments)
        sharding = explicit_sharding(*jax.tree.leaves(arguments))
        mesh = automatic_mesh(self.mesh) if sharding is None else sharding.mesh
        if sharding is not None:
            arguments = tuple(
                jax.tree.map(functools.partial(with_rows_over, like=sharding, axes=axes), x)
                for x, axes in zip(arguments, over, strict=False)
            )
        *inputs, outputs = (P(axes) for axes in over)
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=tuple(inputs), out_specs=outputs, check_vma=False
        )
        return jax.jit(mapped)(*arguments)

    def everywhere(self, x: jax.Array) -> jax.Array:
        """Replicate dimension 0 of `x` on every device."""
        if explicit_sharding(x) is not None:
            return with_whole_rows(x)
        return lax.with_sharding_constraint(x, NamedSharding(automatic_mesh(self.mesh), P()))

    def sharding(self, ndim: int) -> NamedSharding:
        """Return the sharding of arrays of all blocks."""
        return by_rows(self.mesh, self.rows, ndim)

    # A checkpoint has the arrays of a table and not its layout. "div" keeps rows in the order
    # of their ids, whatever the number of shards. "mod" does not, so its arrays have one more
    # dimension, whose size is the number of shards: an array never fits another layout. The
    # dimension is the first, so that on each device it is 1 and costs nothing.

    def stored(self, blocks: Blocks, parts: int | None = None) -> Blocks:
        """Return blocks (S R, ...) as a table holds them: (S, R, ...) if placed by "mod".

        With one part, the block (R, ...) of a device as (1, R, ...).
        """
        if self.placement == "div":
            return blocks
        parts = self.shards if parts is None else parts
        return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), blocks)

    def merged(self, stored: Blocks) -> Blocks:
        """Return the blocks (S R, ...), or the block (R, ...), that were `stored`."""
        if self.placement == "div":
            return stored
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stored)


def dealt(table: jax.Array, shards: int) -> jax.Array:
    """Move row i = j S + s of a table (R S, *row) to (s, j) of (S, R, *row)."""
    return jnp.swapaxes(table.reshape(-1, shards, *table.shape[1:]), 0, 1)


def gathered(blocks: jax.Array) -> jax.Array:
    """Return the table that was `dealt`."""
    return jnp.swapaxes(blocks, 0, 1).reshape(-1, *blocks.shape[2:])


def layout_of(
    shape: Sequence[int],
    mesh: Mesh,
    rows: str | Sequence[str] | None = None,
    batch: str | Sequence[str] | None = None,
    placement: str = "div",
    packed: bool | None = None,
    capacity_factor: float | None = None,
) -> Layout:
    """Return the layout that `sharded` gives a table of this shape."""
    checked_choice(placement, "placement", PLACEMENTS)
    if packed is not None:
        check_flag("packed", packed)
    rows, batch = _axes(mesh, rows, "rows"), _axes(mesh, batch, "batch")
    shards = math.prod(mesh.shape[axis] for axis in rows)
    block = -(-shape[0] // shards)
    if is_packed(shape, mesh, packed):
        block += -block % LANES  # a line belongs to one shard
    if block >= INT32_MAX:
        raise ValueError(
            f"`table` has {shape[0]} rows, {block} on each of {shards} shards, and places on a "
            "shard are int32: spread it over more devices."
        )
    if capacity_factor is not None:
        capacity_factor = _checked_factor(capacity_factor, rows, batch)
    return Layout(mesh, rows, batch, placement, shape[0], block, capacity_factor)


def _checked_factor(factor: TensorLike, rows: tuple[str, ...], batch: tuple[str, ...]) -> float:
    is_number = isinstance(factor, numbers.Real) and not isinstance(factor, bool)
    if not is_number or not 1 <= factor < math.inf:
        raise ValueError(
            "`capacity_factor`, a capacity in shares of a batch, must be a number "
            f"of at least 1, such as 2.0, or None, got {factor!r}."
        )
    if not set(rows) <= set(batch):
        raise ValueError(
            f"`capacity_factor`={factor} needs lookups spread over the axes of the rows, to be "
            f"sent from there: `batch` {batch} must name all of `rows` {rows}."
        )
    return float(factor)


def is_packed(shape: Sequence[int], mesh: Mesh, packed: bool | None) -> bool:
    """Decide whether a table is kept in lines of 128."""
    if packed is None:
        packed = mesh.devices.flat[0].platform == "tpu"
    return packed and math.prod(shape[1:]) % LANES != 0


def _axes(mesh: Mesh, axes: str | Sequence[str] | None, name: str) -> tuple[str, ...]:
    if axes is None:
        return tuple(mesh.axis_names)
    if not isinstance(axes, str | list | tuple):
        raise TypeError(f"`{name}` must be the name of an axis, or several, got {shown(axes)}.")
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    if unknown or len(set(axes)) != len(axes):
        raise ValueError(
            f"`{name}` must name different axes of the mesh, {mesh.axis_names}, got {axes}."
        )
    return axes


# --- row exchange -------------------------------------------------------------------------
#
# Rows sent to the shard they live on and to no other: all-to-all, in rounds.
#
#     4 entries on each of 3 shards, of which 2 fit between two shards at a time
#
#     entries of shard 0, by the shard they go to      0 0 0 | 1 | -
#                                   first round        0 0   | 1 | -
#                                   second round       0     | - | -
#
# What crosses the network for m entries on each shard is about f m rows there or back, where f
# is the `capacity_factor` and however many shards there are. Nothing is dropped on the way:
# there are as many rounds as the fullest pair of shards needs, mostly one, as equal ids are
# sent once. A shard's capacity is f m rows of a gradient; an excess makes all of them nan.


@dataclasses.dataclass(frozen=True)
class _Outbox:
    """Entries of a device, in the order of the shards that they go to.

    Attributes:
        layout: of the table.
        keys (m,): sorted and distinct, see `Layout.key`.
        starts (S + 1,): where the entries of each shard begin, and the last of them ends.
        capacity: how many entries a round takes from one shard to another.
        axes: over which entries differ, the axes of the rows among them.
    """

    layout: Layout
    keys: jax.Array
    starts: jax.Array
    capacity: int
    axes: Sequence[str]

    @classmethod
    def of(
        cls, layout: Layout, keys: jax.Array, entries: int, axes: Sequence[str]
    ) -> "_Outbox":
        bounds = jnp.arange(layout.shards + 1, dtype=keys.dtype) * layout.block
        # Compared with all of them: searching is a loop where that is one kernel.
        starts = jnp.searchsorted(keys, bounds, method="compare_all").astype(jnp.int32)
        capacity = -(-layout.capacity_for(entries) // layout.shards)
        return cls(layout, keys, starts, capacity, tuple(axes))

    @property
    def counts(self) -> jax.Array:
        """How many entries go to each shard (S,)."""
        return self.starts[1:] - self.starts[:-1]

    def rounds(self) -> jax.Array:
        """Count the rounds that the fullest pair of shards needs, the same on all devices."""
        fullest = lax.pmax(jnp.max(self.counts), self.axes)
        return (fullest + self.capacity - 1) // self.capacity

    def entries(self, number: jax.Array) -> jax.Array:
        """Return the entries of a round (S * capacity,), m where there is none."""
        offsets = number * self.capacity + lax.iota(jnp.int32, self.capacity)
        place = self.starts[:-1, None] + offsets[None]
        is_one = place < self.starts[1:, None]
        return jnp.where(is_one, place, self.keys.shape[0]).reshape(-1)

    def places_sent(self, entries: jax.Array) -> jax.Array:
        """Return the places on the shard of what is received where `entries` are sent."""
        place = (self.keys % self.layout.block).astype(jnp.int32)
        place = place.at[entries].get(mode="fill", fill_value=self.layout.block)
        return _swapped(place, self.layout)


def _swapped(x: jax.Array, layout: Layout) -> jax.Array:
    """Exchange parts of `x` between shards: part s of S comes from shard s."""
    return lax.all_to_all(x, layout.rows, split_axis=0, concat_axis=0, tiled=True)


def rows_from_owners(
    layout: Layout,
    read: Callable[[jax.Array], jax.Array],
    ids: jax.Array,
    like: jax.ShapeDtypeStruct,
) -> jax.Array:
    """Return the rows (n, *row) of canonical ids (n,), of no meaning for padding.

    `read` takes places (m,) on this shard to rows (m, *row); `like` is the shape and dtype of
    the result.
    """
    if not like.size:
        return jnp.zeros(like.shape, like.dtype)
    keys = layout.key(ids)
    rows = layout.shards * layout.block
    keys, slot_of_entry = unique_slots(keys, min(keys.shape[0], rows), rows)
    outbox = _Outbox.of(layout, keys, ids.shape[0], layout.batch)

    def one_round(number: jax.Array, received: jax.Array) -> jax.Array:
        entries = outbox.entries(number)
        replies = _swapped(read(outbox.places_sent(entries)), layout)
        return set_rows(received, entries, replies)

    first = jnp.zeros((keys.shape[0], *like.shape[1:]), like.dtype)
    first, *_ = varying_alike(first, read(jnp.zeros((1,), jnp.int32)), keys)
    return gather_rows(lax.fori_loop(0, outbox.rounds(), one_round, first), slot_of_entry)


def rows_to_owners(
    layout: Layout, ids: jax.Array, values: jax.Array, axes: Sequence[str]
) -> tuple[jax.Array, jax.Array]:
    """Bring the entries of all devices to the shards that own them, equal ids summed.

    Args:
        layout: where the rows live.
        ids, values: (n,), canonical, and (n, *row), floating.
        axes: over which entries differ, the axes of the rows among them.

    Returns:
        places (m,) on this shard, sorted and unique, R for padding, and rows (m, *row), where
        m is f n or R, whichever is less; nan if there are more than f n entries for it.
    """
    # Keys sort entries by owner and place: each device sends a row at most once, and what goes
    # to one owner is in one piece.
    keys, values = coalesce_rows(layout.key(ids), values, layout.shards * layout.block)
    outbox = _Outbox.of(layout, keys, ids.shape[0], axes)
    capacity = layout.capacity_for(ids.shape[0])
    coming = _swapped(outbox.counts, layout)
    begin = jnp.cumsum(coming) - coming
    column = lax.iota(jnp.int32, outbox.capacity)

    def one_round(
        number: jax.Array, received: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        places, rows = received
        entries = outbox.entries(number)
        nth = (number * outbox.capacity + column)[None]
        # An entry beyond the capacity gets a slot after the last, which writes drop: that it
        # is lost shows in `fits` below, and every row becomes nan rather than one row wrong.
        slots = jnp.where(nth < coming[:, None], begin[:, None] + nth, capacity).reshape(-1)
        sent = gather_rows(values, entries)
        return (
            places.at[slots].set(outbox.places_sent(entries), mode="drop"),
            set_rows(rows, slots, _swapped(sent, layout)),
        )

    places = jnp.full((capacity,), layout.block, jnp.int32)
    rows = jnp.zeros((capacity, *values.shape[1:]), values.dtype)
    places, rows, *_ = varying_alike(places, rows, keys, values, layout.shard())
    places, rows = lax.fori_loop(0, outbox.rounds(), one_round, (places, rows))
    others = tuple(axis for axis in axes if axis not in layout.rows)
    fits = jnp.sum(coming) <= capacity
    if others:
        places = lax.all_gather(places, others, tiled=True)
        rows = lax.all_gather(rows, others, tiled=True)
        # All devices must agree, or replicas of a table would differ.
        fits = lax.pmin(fits.astype(jnp.int32), others) == 1
    places, rows = coalesce_rows(places, rows, layout.block)
    return places, jnp.where(fits, rows, jnp.asarray(math.nan, rows.dtype))
