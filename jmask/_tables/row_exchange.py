"""Rows sent to the shard they live on and to no other: all-to-all, in rounds.

    4 entries on each of 3 shards, of which 2 fit between two shards at a time

    entries of shard 0, by the shard they go to      0 0 0 | 1 | -
                                  first round        0 0   | 1 | -
                                  second round       0     | - | -

What crosses the network for m entries on each shard is about f m rows there or back, where f is
the `capacity_factor` and however many shards there are. Nothing is dropped on the way: there
are as many rounds as the fullest pair of shards needs, mostly one, as equal ids are sent once.
A shard has room for f m rows of a gradient; what exceeds it makes all of them nan.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import varying_alike
from jmask._kernels.coalesce import coalesce_rows, unique_slots
from jmask._kernels.rows import gather_rows, set_rows
from jmask._tables.shard_layout import Layout


@dataclasses.dataclass(frozen=True)
class _Outbox:
    """Entries of a device, in the order of the shards that they go to.

    Attributes:
        layout: of the table.
        keys (m,): sorted and distinct, see `Layout.key`.
        starts (S + 1,): where the entries of each shard begin, and the last of them ends.
        room: how many entries a round takes from one shard to another.
        axes: over which entries differ, those of the rows among them.
    """

    layout: Layout
    keys: jax.Array
    starts: jax.Array
    room: int
    axes: Sequence[str]

    @classmethod
    def of(
        cls, layout: Layout, keys: jax.Array, entries: int, axes: Sequence[str]
    ) -> "_Outbox":
        bounds = jnp.arange(layout.shards + 1, dtype=keys.dtype) * layout.block
        # Compared with all of them: searching is a loop where that is one kernel.
        starts = jnp.searchsorted(keys, bounds, method="compare_all").astype(jnp.int32)
        room = -(-layout.room_for(entries) // layout.shards)
        return cls(layout, keys, starts, room, tuple(axes))

    @property
    def counts(self) -> jax.Array:
        """How many entries go to each shard (S,)."""
        return self.starts[1:] - self.starts[:-1]

    def rounds(self) -> jax.Array:
        """How many rounds the fullest pair of shards needs: the same on all devices."""
        fullest = lax.pmax(jnp.max(self.counts), self.axes)
        return (fullest + self.room - 1) // self.room

    def entries(self, number: jax.Array) -> jax.Array:
        """The entries of a round (S * room,), m where there is none."""
        offsets = number * self.room + lax.iota(jnp.int32, self.room)
        place = self.starts[:-1, None] + offsets[None]
        is_one = place < self.starts[1:, None]
        return jnp.where(is_one, place, self.keys.shape[0]).reshape(-1)

    def places_sent(self, entries: jax.Array) -> jax.Array:
        """The places on the shard of what is received where `entries` are sent."""
        place = (self.keys % self.layout.block).astype(jnp.int32)
        place = place.at[entries].get(mode="fill", fill_value=self.layout.block)
        return _swapped(place, self.layout)


def _swapped(x: jax.Array, layout: Layout) -> jax.Array:
    """Part s of S of `x` from shard s, of `x` of each shard the part of this one."""
    return lax.all_to_all(x, layout.rows, split_axis=0, concat_axis=0, tiled=True)


def rows_from_owners(
    layout: Layout,
    read: Callable[[jax.Array], jax.Array],
    ids: jax.Array,
    like: jax.ShapeDtypeStruct,
) -> jax.Array:
    """The rows (n, *row) of ids (n,) of each device, of no meaning for padding.

    Args:
        layout: where the rows live.
        read: places (m,) on this shard to rows (m, *row).
        ids (n,): canonical.
        like: shape (n, *row) and dtype of the result.
    """
    if not like.size:
        return jnp.zeros(like.shape, like.dtype)
    keys = layout.key(ids)
    rows = layout.shards * layout.block
    keys, slot_of_entry = unique_slots(keys, min(keys.shape[0], rows), rows)
    outbox = _Outbox.of(layout, keys, ids.shape[0], layout.batch)

    def one_round(number: jax.Array, found: jax.Array) -> jax.Array:
        entries = outbox.entries(number)
        replies = _swapped(read(outbox.places_sent(entries)), layout)
        return set_rows(found, entries, replies, coalesced=False)

    first = jnp.zeros((keys.shape[0], *like.shape[1:]), like.dtype)
    first, *_ = varying_alike(first, read(jnp.zeros((1,), jnp.int32)), keys)
    return gather_rows(lax.fori_loop(0, outbox.rounds(), one_round, first), slot_of_entry)


def rows_to_owners(
    layout: Layout, ids: jax.Array, values: jax.Array, axes: Sequence[str]
) -> tuple[jax.Array, jax.Array]:
    """Of the entries of all devices those that live on this shard, equal ids summed.

    Args:
        layout: where the rows live.
        ids (n,): canonical.
        values (n, *row): floating, a row for each id.
        axes: over which entries differ, those of the rows among them.

    Returns:
        places (m,) on this shard, sorted and unique, R for padding, and rows (m, *row), where
        m is f n or R, whichever is less; nan if there are more than f n entries for it.
    """
    keys, values = coalesce_rows(layout.key(ids), values, layout.shards * layout.block)
    outbox = _Outbox.of(layout, keys, ids.shape[0], axes)
    room = layout.room_for(ids.shape[0])
    coming = _swapped(outbox.counts, layout)
    begin = jnp.cumsum(coming) - coming
    column = lax.iota(jnp.int32, outbox.room)

    def one_round(number: jax.Array, received: Any) -> Any:
        places, rows = received
        entries = outbox.entries(number)
        nth = (number * outbox.room + column)[None]
        slots = jnp.where(nth < coming[:, None], begin[:, None] + nth, room).reshape(-1)
        sent = gather_rows(values, entries)
        return (
            places.at[slots].set(outbox.places_sent(entries), mode="drop"),
            set_rows(rows, slots, _swapped(sent, layout), coalesced=False),
        )

    places = jnp.full((room,), layout.block, jnp.int32)
    rows = jnp.zeros((room, *values.shape[1:]), values.dtype)
    places, rows, *_ = varying_alike(places, rows, keys, values, layout.shard())
    places, rows = lax.fori_loop(0, outbox.rounds(), one_round, (places, rows))
    others = tuple(axis for axis in axes if axis not in layout.rows)
    fits = jnp.sum(coming) <= room
    if others:
        places = lax.all_gather(places, others, tiled=True)
        rows = lax.all_gather(rows, others, tiled=True)
        fits = lax.pmin(fits.astype(jnp.int32), others) == 1
    places, rows = coalesce_rows(places, rows, layout.block)
    return places, jnp.where(fits, rows, jnp.asarray(math.nan, rows.dtype))
