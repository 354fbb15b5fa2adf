"""Rows of a table that is sharded by its type: looked up, and brought to where they live.

    lookup      all-gather of the ids, reduce-scatter of the rows          n + n D numbers
    update      all-gather of the ids and of the rows of the gradient      n + n D numbers
    either      of many ids: all-to-all of the ids and of the rows         (n + n D) / S

A lookup is one equation of a trace, `LOOKUP`. Each device keeps what is its own, and reads,
computes and writes where the row lives: parameters and state never move.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import ad
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jmask._base.array_types import fewer, is_known, trailing
from jmask._base.lowering import primitive
from jmask._base.row_ids import id_dtype
from jmask._base.shardings import (
    Shards,
    Spec,
    all_gathered,
    entry,
    explicit_mesh,
    names,
    rows_in_any_order,
    spec_at,
    spec_of,
    typed_like,
)
from jmask._base.types import (
    Argument,
    ArrayFunction,
    Arrays,
    ArraysFunction,
    Function,
    IdArray,
    IdVector,
    RowArray,
    Shaped,
    TableArray,
)
from jmask._kernels import tuning
from jmask._kernels.coalesce import coalesce_rows, unique_slots
from jmask._kernels.rows import add_rows, entries_of, gather_rows, set_rows

_Carried = TypeVar("_Carried")

# --- rows sent to the shard that they live on, and to no other: all-to-all with a capacity ----
#
#     shards to which the sorted entries of device 0 go, - for none  0 0 0 | 1 | -
#     round 1, of which 2 fit between two shards                     0 0   | 1 | -
#     round 2                                                        0     | - | -
#
# An all-gather gives each shard all n rows of a batch; this gives it little more than its share
# n / S, however many shards there are. The capacity is a share and five standard deviations of
# ids that are drawn at random: such a batch takes one round. Any other takes as many as it
# needs, so that every step is exact, and none has room for more than a round.


class Exchange(NamedTuple):
    """Who sends what to the shards of a table: each device a share of the ids of a batch."""

    shards: Shards
    batch: tuple[str, ...]  # the axes of the ids
    capacity: int  # how many entries a device sends to each shard in a round

    @classmethod
    def of(cls, shards: Shards, ids: IdArray) -> "Exchange | None":
        """Return the exchange for ids, or None if they are all-gathered."""
        batch = sum(map(names, shards.spec_of_ids(ids)), ())
        count = math.prod(ids.shape)
        if not shards.rows or not is_known(count):
            return None
        entries = -(-count // shards.devices({*batch, *shards.rows}))
        share = entries / shards.count
        capacity = math.ceil(share + 5 * math.sqrt(share) + 8)
        pays = count >= tuning.EXCHANGED_IDS and 2 * capacity <= entries
        return cls(shards, batch, capacity) if pays else None

    @classmethod
    def of_sums(cls, ids: IdVector, values: RowArray) -> "Exchange | None":
        """Return the exchange that spreads rows over all devices for sums, or None."""
        mesh = explicit_mesh(ids, values)
        if mesh is None or any(spec_of(values)[1:]):
            return None
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        axes = tuple(name for name, kind in types if kind == AxisType.Explicit)
        return cls.of(Shards(mesh, axes, ()), ids)

    @property
    def alike(self) -> tuple[str, ...]:
        """The axes along which devices have the same ids, and each sends some of them."""
        return tuple(axis for axis in self.shards.rows if axis not in self.batch)

    @property
    def senders(self) -> tuple[str, ...]:
        """The axes over which ids are divided."""
        return self.batch + self.alike

    def own(self, padding: int, ids: IdVector, *values: RowArray) -> list[jax.Array]:
        """Return what a device sends of ids (m,) and their values, in equal shares."""
        if not self.alike:
            return [ids, *values]
        count, devices = ids.shape[0], self.shards.devices(self.alike)
        each = -(-count // devices)
        missing, first = each * devices - count, lax.axis_index(self.alike) * each

        def share(x: jax.Array, fill: int = 0) -> jax.Array:
            widths = [(0, missing)] + [(0, 0)] * (x.ndim - 1)
            padded = jnp.pad(x, widths, constant_values=np.asarray(fill, x.dtype))
            return lax.dynamic_slice_in_dim(padded, first, each)

        return [share(ids, padding), *map(share, values)]


def _in_rounds(
    exchange: Exchange,
    ids: IdVector,
    size: int,
    send: Callable[[jax.Array, jax.Array, _Carried], _Carried],
    carried: _Carried,
) -> _Carried:
    """Send ids (m,), which are sorted and unique, with padding last, until none is left.

    All devices send an id in the same round: it ends, for each shard, before the first id that
    some device has no room for.

    Args:
        size: the number of rows of a shard.
        send: (entries, places, carried) -> carried: what a device sends to each shard in a
            round. entries (S, capacity) are of its ids, and m for none; places (S, capacity)
            are of their rows on the shard, and `size` for none.
    """
    first, count = jnp.arange(exchange.shards.count, dtype=ids.dtype) * size, ids.shape[0]
    capacity, below = exchange.capacity, _numbers_below(ids)
    ends = below(first + size)

    def one(
        state: tuple[jax.Array, jax.Array, _Carried],
    ) -> tuple[jax.Array, jax.Array, _Carried]:
        begin, _, carried = state
        after = begin + capacity
        # The first id that does not fit, counted from the first row of the shard.
        without_room = ids.at[after].get(mode="fill", fill_value=0) - first
        # TPUs have no minimum of 64 bits over devices.
        limit = jnp.where(after < ends, without_room, size).astype(id_dtype(size))
        limit = lax.pmin(limit, exchange.senders)
        end = below(first + limit)
        entries = begin[:, None] + jnp.arange(capacity)[None]
        is_sent = entries < end[:, None]
        places = ids.at[entries].get(mode="fill", fill_value=0) - first[:, None]
        places = jnp.where(is_sent, places, size).astype(id_dtype(size))
        return end, limit, send(jnp.where(is_sent, entries, count), places, carried)

    state = below(first), jnp.zeros(first.shape, id_dtype(size)), carried
    return lax.while_loop(lambda state: jnp.any(state[1] < size), one, state)[2]


def with_derivative_of(definition: Function, rounds: Function) -> Function:
    """Return `rounds`, differentiated as its definition: JAX transposes no loop without end."""
    result = jax.custom_jvp(rounds)
    result.defjvp(lambda primals, tangents: jax.jvp(definition, primals, tangents))
    return result


def _numbers_below(ids: IdVector) -> ArrayFunction:
    """Return a function that says how many of sorted ids are below each of some numbers."""
    # Compared with all of them: searching is a loop where that is one kernel.
    return functools.partial(jnp.searchsorted, ids, method="compare_all")


def _swapped(shards: Shards, x: jax.Array) -> jax.Array:
    """Exchange parts (S, ...) between shards: part s comes from shard s."""
    return lax.all_to_all(x, shards.rows, split_axis=0, concat_axis=0, tiled=True)


def excess_of(shards: Shards, ids: IdArray, rows: int) -> jax.Array:
    """Return how many ids of a lookup do not fit the first round of the exchange, int32."""
    exchange = Exchange.of(shards, ids)
    if exchange is None:
        return jnp.zeros((), jnp.int32)

    def counted(ids: IdArray) -> jax.Array:
        (own,) = exchange.own(rows, ids.reshape(-1))
        unique, _ = unique_slots(own, fewer(own.shape[0], rows), rows)
        bounds = jnp.arange(shards.count + 1, dtype=unique.dtype) * (rows // shards.count)
        sent = jnp.diff(_numbers_below(unique)(bounds))
        too_many = jnp.maximum(sent - exchange.capacity, 0)
        return lax.psum(jnp.sum(too_many), exchange.senders)

    return shards.run(counted, ids, specs=[shards.spec_of_ids(ids)], out=())


# --- lookup -------------------------------------------------------------------------------


# In one program, so that outside of jit ids of no mesh come to its devices.
@functools.partial(jax.jit, inline=True)
def looked_up(table: TableArray, ids: IdArray) -> jax.Array:
    """Return the rows (*ids.shape, *row) of canonical ids, zeros for padding.

    The rows lie where their ids do, as far as their columns are not sharded over these axes.
    """
    rows: jax.Array
    (rows,) = LOOKUP.bind(table, ids)
    return rows


def _lookup(table: TableArray, ids: IdArray) -> list[jax.Array]:
    shards = Shards.of(table, ids)
    spec, there = shards.spec_of_ids(ids), spec_at(spec_of(ids), shards.columns)
    if 0 in (*ids.shape, *table.shape):  # XLA gathers no empty arrays
        zeros = jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype)
        return [shards.put(zeros, there)]
    exchange = Exchange.of(shards, ids)
    own_axes = (tuple(axis for axis in names(axes) if axis in shards.rows) for axes in spec)
    shared = {d: axes for d, axes in enumerate(own_axes) if axes}
    others = tuple(axis for axis in shards.rows if axis not in sum(shared.values(), ()))

    def by_all_gather(block: TableArray, ids: IdArray) -> jax.Array:
        for d, axes in shared.items():
            ids = lax.all_gather(ids, axes, axis=d, tiled=True)
        size = block.shape[0]
        places = shards.local(ids, size)
        rows = gather_rows(block, places.reshape(-1)).reshape(*ids.shape, *block.shape[1:])
        rows = jnp.where(trailing(places < size, rows.ndim), rows, jnp.zeros((), rows.dtype))
        is_bool = rows.dtype == jnp.dtype(bool)
        rows = rows.astype(jnp.int8) if is_bool else rows
        for d, axes in shared.items():
            rows = lax.psum_scatter(rows, axes, scatter_dimension=d, tiled=True)
        rows = lax.psum(rows, others) if others else rows
        return rows != 0 if is_bool else rows

    def by_exchange(block: TableArray, ids: IdArray) -> jax.Array:
        assert exchange is not None
        # An id that a device looks up several times is sent once, to the shard that has it.
        (size, *row), rows = block.shape, table.shape[0]
        (own,) = exchange.own(rows, ids.reshape(-1))
        slots = fewer(own.shape[0], rows)
        unique, slot_of_entry = unique_slots(own, slots, rows)

        def send(entries: jax.Array, places: jax.Array, rows: RowArray) -> RowArray:
            places = _swapped(shards, places)
            sent = gather_rows(block, places.reshape(-1)).reshape(*places.shape, *row)
            received = _swapped(shards, sent).reshape(-1, *row)
            return set_rows(rows, entries.reshape(-1), received, "unique")

        zeros = jnp.zeros((slots, *row), block.dtype)
        found = _in_rounds(exchange, unique, size, send, zeros)
        found = found.at[slot_of_entry].get(mode="fill", fill_value=0)
        (every,) = all_gathered(entry(exchange.alike), found)
        return every[: math.prod(ids.shape)].reshape(*ids.shape, *row)

    rows_of = by_all_gather if exchange is None else by_exchange
    specs, out = [shards.spec, spec], (*spec, *shards.columns)
    return [shards.put(shards.run(rows_of, table, ids, specs=specs, out=out), there)]


def _shapes(table: ShapedArray, ids: ShapedArray) -> list[Shaped]:
    mesh: Argument = explicit_mesh(table, ids)
    there = NamedSharding(mesh, P(*spec_at(spec_of(ids), spec_of(table)[1:])))
    shape = (*ids.shape, *table.shape[1:])
    return [table.update(shape=shape, sharding=there, weak_type=False)]


LOOKUP = primitive("jmask_lookup_on_shards", _lookup, _shapes, is_lookup=True)
"""Rows (*n, *row) of a table and ids (*n,), V for padding, which gives zeros."""


def _derivative(primals: Arrays, tangents: Arrays) -> Arrays:
    """Differentiate in the table, in which a lookup is linear."""
    (table, ids), along = primals, ad.instantiate_zeros(tangents[0])
    return LOOKUP.bind(table, ids), LOOKUP.bind(along, ids)


def _transposed(cotangents: Argument, table: Argument, ids: IdArray) -> list[Argument]:
    (rows,), aval = cotangents, table.aval
    if isinstance(rows, ad.Zero):
        return [ad.Zero(aval), None]
    zeros = typed_like(jnp.zeros(aval.shape, rows.dtype), aval)
    return [add_rows(zeros, *rows_in_any_order(ids, rows)), None]


ad.primitive_jvps[LOOKUP], ad.primitive_transposes[LOOKUP] = _derivative, _transposed


# --- to the shards --------------------------------------------------------------------------


def sent_to_shards(
    exchange: Exchange,
    ids: IdVector,
    values: RowArray,
    size: int,
    take: Callable[[IdVector, RowArray, _Carried], _Carried],
    carried: _Carried,
) -> _Carried:
    """Bring rows of a gradient to their shards, round by round, on each device.

    Args:
        take: (places (k,), rows (k, *row), carried) -> carried: what came to this shard of
            `size` rows in a round. No other round has rows of these places.
    """
    shards = exchange.shards
    rows = shards.count * size
    ids, values = exchange.own(rows, ids, values)
    unique, sums = coalesce_rows(ids, values, rows)
    others = entry([axis for axis in exchange.batch if axis not in shards.rows])

    def send(entries: jax.Array, places: jax.Array, carried: _Carried) -> _Carried:
        places = _swapped(shards, places).reshape(-1)
        sent = gather_rows(sums, entries.reshape(-1))
        received = _swapped(shards, sent.reshape(*entries.shape, *sums.shape[1:]))
        received = received.reshape(-1, *sums.shape[1:])
        places, rows = all_gathered(others, places, received)
        return take(places, rows, carried)

    return _in_rounds(exchange, unique, size, send, carried)


# In one program, so that outside of jit it is compiled once.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def routed(
    shards: Shards, count: int, ids: IdVector, values: RowArray
) -> tuple[IdVector, RowArray]:
    """Bring the rows of a gradient of `count` rows to the shards that they live on.

    Rows of equal ids are summed.

    Returns ids (S m,) and values, where m is min(n, V / S): entries [s m, (s + 1) m) belong to
    shard s, where they are. They are sorted there, and unique but for padding.
    """
    by_all_gather = functools.partial(_routed, shards, count, None)
    exchange = Exchange.of(shards, ids)
    if exchange is None:
        return by_all_gather(ids, values)
    in_rounds = functools.partial(_routed, shards, count, exchange)
    ids, values = with_derivative_of(by_all_gather, in_rounds)(ids, values)
    return ids, values


def _routed(
    shards: Shards, count: int, exchange: Exchange | None, ids: IdVector, values: RowArray
) -> tuple[IdVector, RowArray]:
    spec, size = shards.spec_of_ids(ids), count // shards.count
    slots = fewer(ids.shape[0], size)

    def own(ids: IdVector, values: RowArray) -> list[jax.Array]:
        if exchange is None:
            every, values = all_gathered(spec[0], ids, values)
            places, rows = coalesce_rows(shards.local(every, size), values, size)
        else:
            empty = jnp.full((slots,), size, id_dtype(size))
            zeros = jnp.zeros((slots, *values.shape[1:]), values.dtype)
            carried = jnp.int32(0), empty, zeros
            _, places, rows = sent_to_shards(exchange, ids, values, size, append, carried)
        first = lax.axis_index(shards.rows).astype(id_dtype(count)) * size
        return [jnp.where(places < size, places.astype(first.dtype) + first, count), rows]

    def append(
        places: IdVector, rows: RowArray, carried: tuple[jax.Array, IdVector, RowArray]
    ) -> tuple[jax.Array, IdVector, RowArray]:
        number, own_places, own_rows = carried
        places, rows = coalesce_rows(places, rows, size)
        at = jnp.where(places < size, number + entries_of(places), slots)
        number += jnp.sum(places < size, dtype=jnp.int32)
        own_places = set_rows(own_places, at, places.astype(own_places.dtype), "sorted")
        return number, own_places, set_rows(own_rows, at, rows, "sorted")

    specs = [spec, (*spec, *shards.columns)]
    out = [shards.spec[:1], shards.spec]
    ids, values = shards.run(own, ids, values, specs=specs, out=out)
    return ids, values


def summed_over_rows(
    exchange: Exchange, ids: IdVector, values: RowArray, count: int, function: ArraysFunction
) -> list[jax.Array]:
    """Return sums over the rows of a gradient of `count` rows, equal ids summed.

    There is no room for all of them: each round of the exchange adds what it brings.

    Args:
        function: (rows (k, *row)) -> their sums, to which rows of zeros add nothing.
    """
    shards, size = exchange.shards, -(-count // exchange.shards.count)
    if shards.count * size != count:  # equal ids let XLA share the exchange of the update
        ids = jnp.where(ids < count, ids, np.asarray(shards.count * size, ids.dtype))
    row = jax.ShapeDtypeStruct((1, *values.shape[1:]), values.dtype)
    like: list[Shaped] = jax.eval_shape(function, row)

    def add(places: IdVector, rows: RowArray, totals: list[jax.Array]) -> list[jax.Array]:
        _, rows = coalesce_rows(places, rows, size)
        return [x + y for x, y in zip(totals, function(rows), strict=True)]

    def own(ids: IdVector, values: RowArray) -> list[jax.Array]:
        zeros = [jnp.zeros(x.shape, x.dtype) for x in like]
        totals = sent_to_shards(exchange, ids, values, size, add, zeros)
        return lax.psum(totals, shards.rows)

    where = (entry(exchange.batch),)
    out: list[Spec] = [()] * len(like)
    in_rounds = functools.partial(shards.run, own, specs=[where, where], out=out)
    definition = lambda ids, values: function(
        coalesce_rows(ids, values, shards.count * size)[1]
    )
    totals: list[jax.Array] = with_derivative_of(definition, in_rounds)(ids, values)
    return totals
