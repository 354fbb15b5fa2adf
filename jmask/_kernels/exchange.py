"""Rows sent to the shard that they live on and to no other: all-to-all with a capacity.

    entries of device 0, sorted by id, by the shard they go to     0 0 0 | 1 | -
    sent, of which 2 fit between two shards                        0 0   | 1 | -     overflow

An all-gather gives each shard all n rows of a batch; this gives it little more than its share
n / S, however many shards there are. The capacity is a share and five standard deviations of
ids that are drawn at random. A batch that overflows it anywhere takes the all-gather instead:
one flag that all devices agree on, and a `lax.cond`. So every step is exact.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import fewer, is_known
from jmask._base.shards import Shards, all_gathered, names
from jmask._base.types import Function, MeshAxes, PyTree
from jmask._kernels import tuning
from jmask._kernels.coalesce import coalesce_rows, unique_slots
from jmask._kernels.rows import gather_rows, set_rows


def capacity_of(shards: Shards, batch: MeshAxes, count: int) -> int | None:
    """Return how many entries a device sends to each shard; None if they are all-gathered.

    Args:
        batch: the axes over which entries are sharded.
        count: the number of entries of all devices.
    """
    axes, many = names(batch), tuning.EXCHANGED_IDS
    if not set(shards.rows) <= set(axes) or shards.count < 2 or not is_known(count):
        return None
    entries = count // math.prod(shards.mesh.shape[axis] for axis in axes)
    share = entries / shards.count
    capacity = math.ceil(share + 5 * math.sqrt(share) + 8)
    return capacity if count >= many and 2 * capacity <= entries else None


class _Outbox(NamedTuple):
    """Entries of a device, in the order of the shards that they go to.

    Attributes:
        entries (S, capacity): the entries that fit; m, the number of all, where there is none.
        places (S, capacity): of their rows on the shard, R for none.
        excess: how many of all devices do not fit.
    """

    entries: jax.Array
    places: jax.Array
    excess: jax.Array


def _outbox(
    shards: Shards, batch: MeshAxes, ids: jax.Array, size: int, capacity: int
) -> _Outbox:
    """Return where ids (m,) go, which are sorted and unique, with padding last."""
    shard = jnp.arange(shards.count, dtype=ids.dtype) * size
    # Compared with all of them: searching is a loop where that is one kernel.
    starts = jnp.searchsorted(ids, shard, method="compare_all")
    ends = jnp.searchsorted(ids, shard + size, method="compare_all")
    entries = starts[:, None] + jnp.arange(capacity)[None]
    entries = jnp.where(entries < ends[:, None], entries, ids.shape[0])
    places = ids.at[entries].get(mode="fill", fill_value=shards.count * size) - shard[:, None]
    excess = jnp.sum(jnp.maximum(ends - starts - capacity, 0))
    return _Outbox(
        entries, jnp.where(places < size, places, size), lax.psum(excess, names(batch))
    )


def _swapped(shards: Shards, x: jax.Array) -> jax.Array:
    """Exchange parts (S, ...) between shards: part s comes from shard s."""
    return lax.all_to_all(x, shards.rows, split_axis=0, concat_axis=0, tiled=True)


def rows_from_owners(
    shards: Shards,
    batch: MeshAxes,
    block: jax.Array,
    ids: jax.Array,
    capacity: int,
    by_all_gather: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Return the rows (m, *row) of the ids of this device (m,), zeros for padding.

    An id that a device looks up several times is sent once, to the shard that has it.
    """
    size, row = block.shape[0], block.shape[1:]
    count = shards.count * size
    unique, slot_of_entry = unique_slots(ids, fewer(ids.shape[0], count), count)
    outbox = _outbox(shards, batch, unique, size, capacity)

    def by_exchange(block: jax.Array, ids: jax.Array) -> jax.Array:
        places = _swapped(shards, outbox.places)
        rows = gather_rows(block, places.reshape(-1)).reshape(*places.shape, *row)
        received = _swapped(shards, rows).reshape(-1, *row)
        zeros = jnp.zeros((unique.shape[0], *row), block.dtype)
        rows = set_rows(zeros, outbox.entries.reshape(-1), received, "unique")
        return rows.at[slot_of_entry].get(mode="fill", fill_value=0)

    return lax.cond(outbox.excess > 0, by_all_gather, by_exchange, block, ids)


def with_own_rows(
    shards: Shards,
    batch: MeshAxes,
    ids: jax.Array,
    rows: Sequence[jax.Array],
    size: int,
    count: int,
    function: Function,
    *operands: PyTree,
) -> PyTree:
    """Call `function(ids, rows, *operands)` with what a device needs of the entries of all.

    Args:
        batch: the axes over which entries are sharded; None if each device has what it needs.
        ids, rows: entries (m,) of this device, canonical, and arrays (m, *row).
        size: R, the rows of a shard.
        count: the number of entries of all devices.
        function: its results are of the same shapes for any number of entries.
    """

    def by_all_gather(*operands: PyTree) -> PyTree:
        every, *more = all_gathered(batch, ids, *rows)
        return function(every, more, *operands)

    capacity = capacity_of(shards, batch, count)
    if capacity is None or len(rows) != 1:
        return by_all_gather(*operands)
    unique, summed = coalesce_rows(ids, rows[0], shards.count * size)
    outbox = _outbox(shards, batch, unique, size, capacity)
    others = tuple(axis for axis in names(batch) if axis not in shards.rows)

    def by_exchange(*operands: PyTree) -> PyTree:
        places = _swapped(shards, outbox.places).reshape(-1)
        sent = gather_rows(summed, outbox.entries.reshape(-1))
        received = _swapped(shards, sent.reshape(*outbox.entries.shape, *summed.shape[1:]))
        first = lax.axis_index(shards.rows).astype(ids.dtype) * size
        own = jnp.where(places < size, places + first, shards.count * size)
        own, received = all_gathered(others, own, received.reshape(-1, *summed.shape[1:]))
        return function(own, [received], *operands)

    return lax.cond(outbox.excess > 0, by_all_gather, by_exchange, *operands)


def excess_of(shards: Shards, ids: jax.Array, rows: int) -> jax.Array:
    """Return how many ids (n,) of a lookup do not fit the exchange, int32; see `_Outbox`."""
    batch = shards.batch(ids)
    capacity = capacity_of(shards, batch, ids.shape[0])
    if capacity is None:
        return jnp.zeros((), jnp.int32)

    def counted(ids: jax.Array) -> jax.Array:
        unique, _ = unique_slots(ids, fewer(ids.shape[0], rows), rows)
        return _outbox(shards, batch, unique, rows // shards.count, capacity).excess

    return shards.run(counted, ids, specs=[(batch,)], out=())
