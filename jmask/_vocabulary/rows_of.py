"""The rows that the keys of a batch have or get.

    sorted   set 3  k  k  m       set 5  j        equal keys lie together, and keys of a set
    set_start    0  0  0              3           the first entry of the set
    line         four numbers for each place of set 3, ...     gathered for each key
    match        its place there, or -1     busy  places that any key of the set has
    change       new - old at the places of a key, else 0      added to the line

Arrays in between have the size of the batch. A place that a key of the batch has is not given
to another one: at most one key changes each number, so adding changes modulo 2³² is exact.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.row_ids import id_dtype
from jmask._base.shardings import Shards, typed_like
from jmask._base.types import Numbers, StorageLike
from jmask._base.validation import checked_array
from jmask._kernels.coalesce import to_entries
from jmask._kernels.lines import has_narrow_rows
from jmask._kernels.rows import add_rows, gather_rows, ids_after_reading
from jmask._kernels.update_rows import ADDITION, RowUpdate, updated
from jmask._tables.rows_at import shape_of
from jmask._vocabulary.keys import hashed, part_of, words_of
from jmask._vocabulary.vocabulary import Vocabulary

_HIGH, _LOW, _USED, _SEEN = range(4)
_MOST = np.uint32(0xFFFFFFFF)
# Places of a line up to which all pairs of them are compared.
_FEW_PLACES = 32


@jax.named_scope("jmask.vocabulary.rows_of")
def rows_of(
    vocab: Vocabulary, keys: Numbers, *, where: StorageLike | None = None
) -> tuple[jax.Array, Vocabulary, jax.Array]:
    """Return the row of each key; new keys get one.

    In a jitted step that donates `vocab` it is updated in place, at the cost of the keys.
    There is no loop over keys, and no call of the host.

    Args:
        vocab: as `create` makes it.
        keys: integers of any shape; or words of 32 bits, uint32 (..., 2), high word first, as
            `words_of` makes them of 64-bit keys, and `hash_strings` of strings.
        where: booleans of the shape of the keys; where False there is no key.

    Returns:
        rows, of the shape of the keys, int32 (int64 for long tables): below `vocab.capacity`
        rows of one key. From there to `vocab.table_rows` rows shared by keys that wait, or
        that found all rows of their set taken by other keys of the batch. `vocab.table_rows`,
        which is no row, where there is no key.

        The new vocabulary.

        recycled (n,): the row that a key got in this call, at the first of equal keys;
        otherwise `vocab.table_rows`. `reset` lets these rows start anew.

    Raises:
        TypeError: if `vocab` is no vocabulary, the keys are no integers, or `where` no mask.
        ValueError: if `where` has not the shape of the keys.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> vocab = jmask.vocabulary.create(capacity=4, ways=4, admit_after=2, shared_rows=1)
        >>> for keys in ([7, 9], [7, 8], [7, 9]):
        ...     rows, vocab, recycled = jmask.vocabulary.rows_of(vocab, jnp.array(keys))
        ...     print(rows, recycled)
        [4 4] [5 5]
        [0 4] [0 5]
        [0 1] [5 1]
        >>> vocab.counters()
        {'hits': 1, 'new': 2, 'evicted': 0, 'waiting': 3}
    """
    if not isinstance(vocab, Vocabulary):
        raise TypeError(
            "`vocab` must be a Vocabulary, which jmask.vocabulary.create makes, got "
            f"{type(vocab).__name__}: the order is rows_of(vocab, keys)."
        )
    words = jnp.asarray(words_of(keys))
    shape, dtype = words.shape[:-1], id_dtype(vocab.table_rows)
    exists = jnp.ones(shape, bool) if where is None else checked_array("where", where)
    if exists.dtype != jnp.dtype(bool):
        raise TypeError(f"`where` must be booleans, got {exists.dtype}.")
    if exists.shape != shape:
        raise ValueError(f"`where` has shape {exists.shape}, and the keys {shape}.")
    if not math.prod(shape):
        return jnp.zeros(shape, dtype), vocab, jnp.zeros(0, dtype)
    if math.prod(shape) == 1:  # of one row XLA makes slices, and copies; see `rows.never_alone`
        pair, alone = jnp.tile(words.reshape(1, 2), (2, 1)), exists.reshape(1)
        pair_exists = jnp.append(alone, jnp.zeros(1, bool))
        rows, vocab, recycled = rows_of(vocab, pair, where=pair_exists)
        return rows[:1].reshape(shape), vocab, recycled[:1]
    shards = Shards.of(vocab.lines, words, exists)
    arrays = vocab.lines, vocab.clock, words, exists
    results = _on_all_devices(jax.tree.map(shape_of, vocab), shards, *arrays)
    rows, recycled, lines, counts = results
    rows = typed_like(rows, words[..., 0])
    low = vocab.counts[:, 1] + counts
    high = vocab.counts[:, 0] + (low < counts).astype(jnp.uint32)
    counts, clock = jnp.stack([high, low], 1), vocab.clock + 1
    new = dataclasses.replace(vocab, lines=lines, clock=clock, counts=counts)
    return rows, new, recycled


# In one program: outside of jit its branches would be compiled in each call.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _on_all_devices(vocab: Vocabulary, shards: Shards, *arrays: jax.Array) -> list[jax.Array]:
    """Run `_on_device` on one device or several. `vocab` has shapes in the place of arrays."""
    # Every device gets all keys, and finds the ones in its own sets.
    run, exists = functools.partial(_on_device, vocab, shards), arrays[-1]
    specs = [shards.spec, *((None,) * x.ndim for x in arrays[1:])]
    out = [(None,) * exists.ndim, (None,), shards.spec, (None,)]
    results: list[jax.Array] = shards.run(run, *arrays, specs=specs, out=out)
    return results


def _on_device(
    vocab: Vocabulary,
    shards: Shards,
    lines: jax.Array,
    clock: jax.Array,
    words: jax.Array,
    exists: jax.Array,
) -> list[jax.Array]:
    """Return rows, recycled rows (n,), the new `lines` of this device, and counts.

    With two ways, where set 0 has the keys A and D, and B is of set 1, which is empty:

        batch      A  B  A  C       rows       0  2  0  1     set * ways + place
        sorted     A  A  C  B       set_start  0  0  0  3     the entry at which its set begins
        times      2  0  1  1       key_start  0  0  2  3     and its key
        match      0 -1 -1 -1       busy       the place of A, which C may not take
        row        -  -  1  0       evicts     F  F  T  F     C takes the place of D
    """
    shape, ways, count, places = exists.shape, vocab.ways, lines.shape[0], vocab.places
    words, exists = words.reshape(-1, 2), exists.reshape(-1)
    n, now, dtype = exists.shape[0], clock + 1, id_dtype(vocab.table_rows)
    entries = lax.iota(jnp.int32, n)
    key, all_sets, first_row = hashed(words), vocab.lines.shape[0], jnp.zeros((), dtype)
    sets = part_of(key, all_sets).astype(id_dtype(all_sets))
    sets = shards.local(sets, count)
    if shards.rows:
        first_row = lax.axis_index(shards.rows).astype(dtype) * (count * ways)
    is_here = exists & (sets < count)
    sets = jnp.where(is_here, sets, count)

    # --- sorted by hashes, which begin with the set: equal keys together, and keys of a set
    order = jnp.where(is_here, key, _MOST)
    sets, high, low, came = _sorted(order, sets, words[:, 0], words[:, 1])
    starts_set = _differs(sets)
    starts_key = starts_set | _differs(high) | _differs(low)
    is_first = starts_key & (sets < count)
    next_start = jnp.append(jnp.where(starts_key, entries, n)[1:], n)
    times = jnp.where(is_first, lax.cummin(next_start, reverse=True) - entries, 0).astype("u4")
    start_of = lambda starts: lax.cummax(jnp.where(starts, entries, 0))
    set_start, key_start = start_of(starts_set), start_of(starts_key)

    # --- the line of each key, and its place there; barriers, or all is computed for each place
    sets, set_start = lax.optimization_barrier((sets, set_start))
    line = gather_rows(lines, sets)
    highs, lows, used, counts = (line[:, i * places : (i + 1) * places] for i in range(4))
    place = np.arange(places, dtype=np.int32)[None]
    matches = (highs == high[:, None]) & (lows == low[:, None]) & (counts > 0)
    match = jnp.where(is_first, jnp.max(jnp.where(matches, place, -1), 1), -1)
    is_known, old_place = match >= 0, jnp.maximum(match, 0)
    before = jnp.where(is_known, _at(counts, old_place), 0)
    seen = before + jnp.minimum(times, _MOST - before)  # up to the limit
    has_row = is_known & (old_place < ways)
    busy = _busy(match, set_start, places)

    # --- new key number r of a set takes the place that is number r in the order of eviction
    age = jnp.minimum(now - used, _MOST - 1)
    recent = jnp.where(busy, _MOST, jnp.where(counts == 0, 0, _MOST - age))
    often = jnp.where(busy, _MOST, counts)
    by = [often, recent] if vocab.evict == "lfu" else [recent]
    wants_row = is_first & ~has_row & (seen >= vocab.admit_after)
    row, gets_row = _taken(wants_row, set_start, [x[:, :ways] for x in by], busy[:, :ways])
    evicts = gets_row & (_at(counts, row) > 0)
    waits = is_first & ~is_known & ~gets_row & (places > ways)
    waiting, gets_place = _taken(waits, set_start, [recent[:, ways:]], busy[:, ways:])
    kept = jnp.where(gets_row, row, jnp.where(gets_place, ways + waiting, old_place))

    # --- written: whole lines, which TPUs do without moving the others
    lane = np.arange(4 * places, dtype=np.int32)[None]
    # Where a key waited for the row that it has now is free.
    left = jnp.where(is_known & gets_row, _SEEN * places + old_place, -1)
    kept, left, seen = lax.optimization_barrier((kept, left, seen))
    new = now[None, None]
    for word, x in ((_HIGH, high), (_LOW, low), (_SEEN, seen)):
        new = jnp.where(lane // places == word, x[:, None], new)
    change = jnp.where(lane == left[:, None], -line, 0)
    change = jnp.where(lane % places == kept[:, None], new - line, change)
    after = ids_after_reading(sets, line)
    after = jnp.where(is_known | gets_row | gets_place, after, count)
    if has_narrow_rows(lines.shape):  # the other way warns on TPUs, with advice for tables
        lines = add_rows(lines, after, change)
    else:
        (lines,) = updated(RowUpdate(ADDITION, [lines], after, change, [], "any"))

    # --- in the order of the batch: equal keys have the row of the first of them
    number = first_row + sets.astype(dtype) * ways + kept.astype(dtype)
    owns = has_row | gets_row
    own, recycled = to_entries(
        came,
        jnp.where(owns, number, -1)[key_start],
        jnp.where(gets_row, number, vocab.table_rows),
    )
    shared = vocab.capacity + (key % np.uint32(vocab.shared_rows)).astype(dtype)
    rows = jnp.where(own < 0, shared, own)
    hits, waiting = (jnp.where(x, times, 0) for x in (has_row, ~owns))
    counted = (hits, gets_row, evicts, waiting)
    counts = jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in counted])
    if shards.rows:
        rows = lax.psum(jnp.where(is_here, rows, 0), shards.rows)
        recycled, counts = lax.pmin(recycled, shards.rows), lax.psum(counts, shards.rows)
    rows = jnp.where(exists, rows, vocab.table_rows)
    return [rows.reshape(shape), recycled, lines, counts]


def _sorted(order: jax.Array, *parts: jax.Array) -> list[jax.Array]:
    """Return parts (n,) of keys, sorted by `order`, then by themselves; the entry of each."""
    entries = lax.iota(jnp.int32, order.shape[0])

    def by_all() -> list[jax.Array]:
        num_keys = 1 + len(parts)
        return list(lax.sort((order, *parts, entries), num_keys=num_keys, is_stable=True)[1:])

    def by_order() -> list[jax.Array]:
        # One number is sorted six times faster on a CPU (jaxlib 0.12). That is enough unless
        # different keys of the batch have the same hash.
        came = lax.sort((order, entries), num_keys=1, is_stable=True)[1]
        ordered = [x[came] for x in parts]
        is_mixed = ~_differs(order[came]) & functools.reduce(
            jnp.logical_or, map(_differs, ordered)
        )
        return lax.cond(jnp.any(is_mixed), by_all, lambda: [*ordered, came])

    # A TPU sorts all in less time than it gathers one.
    return lax.platform_dependent(tpu=by_all, default=by_order)


def _differs(x: jax.Array) -> jax.Array:
    """Decide for each entry whether it differs from the one before."""
    return jnp.append(np.ones(1, bool), x[1:] != x[:-1])


def _at(x: jax.Array, place: jax.Array) -> jax.Array:
    """Return of each row of x (n, places) what is at its place (n,)."""
    return jnp.take_along_axis(x, place[:, None], 1)[:, 0]


def _busy(match: jax.Array, set_start: jax.Array, places: int) -> jax.Array:
    """Return which places (n, places) of a set its keys have; `match` (n,) is one, or -1."""
    busy = jnp.zeros((match.shape[0], places), bool)
    place = jnp.where(match < 0, places, match)  # -1 would be the last place
    return busy.at[set_start, place].set(True, mode="drop")[set_start]


def _taken(
    wants: jax.Array, set_start: jax.Array, by: list[jax.Array], busy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the place that each key (n,) takes, and whether it wants one and there is one.

    Args:
        by: (n, places), several numbers by which places are ordered; equal ones by position.
        busy (n, places): those that are not to be taken; they come last.
    """
    n, size = busy.shape
    if not size:
        return jnp.zeros(n, jnp.int32), jnp.zeros(n, bool)
    earlier = jnp.cumsum(wants, dtype=jnp.int32) - wants.astype(jnp.int32)
    number = earlier - earlier[set_start]
    # XLA's CPU compiler calls the comparison of a sort once for each pair of numbers. Comparing
    # all pairs is 8 times as fast for 16 places, and for 64 it takes 150 ms where rounds take 5
    # (8,192 keys, jaxlib 0.12). Other devices compare pairs while they read them.
    in_rounds = functools.partial(_in_rounds, number, busy)
    by_pairs = functools.partial(_by_pairs, number)
    if size <= _FEW_PLACES:
        place = by_pairs(*by)
    else:
        place = lax.platform_dependent(*by, cpu=in_rounds, default=by_pairs)
    return place, wants & (number < jnp.sum(~busy, 1, dtype=jnp.int32))


def _by_pairs(number: jax.Array, *by: jax.Array) -> jax.Array:
    """Return the place (n,) whose rank is `number` (n,), by comparing all pairs."""
    position = np.arange(by[0].shape[1], dtype=np.int32)[:, None]
    less = jnp.asarray(position < position.T)[:, :, None]
    # Along n, where a CPU has vector instructions.
    for x in reversed([lax.optimization_barrier(x.T) for x in by]):
        less = (x[:, None] < x[None]) | ((x[:, None] == x[None]) & less)
    rank = less.sum(0, dtype=jnp.int32)
    return jnp.max(jnp.where(rank == number[None], position, 0), 0)


def _in_rounds(number: jax.Array, busy: jax.Array, *by: jax.Array) -> jax.Array:
    """Return the same as `_by_pairs`; 0 past the last free place.

    Each round takes the least free place of each set: one round for each new key of a set.
    """
    position = np.arange(busy.shape[1], dtype=np.int32)[None]
    last = jnp.sum(~busy, 1, dtype=jnp.int32) - 1
    rounds = jnp.max(jnp.minimum(number, last)) + 1

    def one_round(i: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        free, place = carried
        least = free
        for x in by:
            left = jnp.where(least, x, _MOST)
            least &= left == jnp.min(left, 1, keepdims=True)
        first = jnp.argmax(least, 1).astype(jnp.int32)
        return free & (position != first[:, None]), jnp.where(number == i, first, place)

    start = busy | True, number * 0  # of their types, in a `shard_map` too
    return lax.fori_loop(0, rounds, one_round, start)[1]
