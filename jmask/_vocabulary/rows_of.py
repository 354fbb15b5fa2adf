"""The rows that the keys of a batch have or get.

    sorted   set 3  k  k  m       set 5  j        equal keys lie together, and those of a set
    slot         0  0  0              1           the number of the set among those of the batch
    line         (4, places) of set 3, ...        gathered; single places of it are written

All between is of the size of the batch. Places of its keys are never given to other ones.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.row_ids import id_dtype
from jmask._base.shardings import Shards, explicit_sharding, resharded, spec_of
from jmask._base.types import Numbers, StorageLike
from jmask._base.validation import checked_array
from jmask._kernels.rows import gather_rows, ids_after_reading
from jmask._vocabulary.keys import hashed, part_of, words_of
from jmask._vocabulary.vocabulary import Vocabulary

_HIGH, _LOW, _USED, _SEEN = range(4)
_MOST = np.uint32(0xFFFFFFFF)


@jax.named_scope("jmask.vocabulary.rows_of")
def rows_of(
    vocab: Vocabulary, keys: Numbers, *, where: StorageLike | None = None
) -> tuple[jax.Array, Vocabulary, jax.Array]:
    """Return the rows of keys, which new keys get.

    In a jitted step that donates `vocab` it is updated in place, at the cost of the keys.
    There is no loop over keys, and no call of the host.

    Args:
        vocab: as `create` makes it.
        keys: integers of any shape; or words of 32 bits, uint32 (..., 2), high word first, as
            `words_of` makes them of 64-bit keys, and `hash_strings` of strings.
        where: booleans of the shape of the keys; where False there is no key.

    Returns:
        rows, of the shape of the keys, int32 (int64 for long tables): below `vocab.capacity`
        those of one key. From there to `vocab.table_rows` those shared by keys that wait, or
        that found all rows of their set taken by other keys of the batch. `vocab.table_rows`,
        which is no row, where there is no key.

        The new vocabulary.

        recycled (n,): the row that each key has got, the first of equal ones, else
        `vocab.table_rows`. `reset` lets these rows start anew.

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
    given, find = (vocab.lines, vocab.clock, words, exists), functools.partial(_found, vocab)
    if shards is None:
        rows, recycled, lines, counts = find(None, *given)
    else:  # keys come to every device; what each finds is added up
        specs = [shards.spec, *((None,) * x.ndim for x in given[1:])]
        out = [(None,) * len(shape), (None,), shards.spec, (None,)]
        found = shards.run(functools.partial(find, shards), *given, specs=specs, out=out)
        rows, recycled, lines, counts = found
        where_keys_are = explicit_sharding(words)
        if where_keys_are is not None:
            rows = resharded(rows, where_keys_are, spec_of(words)[:-1])
    low = vocab.counts[:, 1] + counts
    high = vocab.counts[:, 0] + (low < counts).astype(jnp.uint32)
    counts, clock = jnp.stack([high, low], 1), vocab.clock + 1
    new = dataclasses.replace(vocab, lines=lines, clock=clock, counts=counts)
    return rows, new, recycled


def _found(
    vocab: Vocabulary,
    shards: Shards | None,
    lines: jax.Array,
    clock: jax.Array,
    words: jax.Array,
    exists: jax.Array,
) -> list[jax.Array]:
    """Return rows, recycled rows (n,), the new lines, and what `counters` adds up.

    Args:
        lines: of the sets of this device.
    """
    shape, ways, (count, _, places) = exists.shape, vocab.ways, lines.shape
    words, exists = words.reshape(-1, 2), exists.reshape(-1)
    n, now, dtype = exists.shape[0], clock + 1, id_dtype(vocab.table_rows)
    entries = lax.iota(jnp.int32, n)
    key, every, first_row = hashed(words), vocab.lines.shape[0], jnp.zeros((), dtype)
    sets = part_of(key, every).astype(id_dtype(every))
    if shards is not None and shards.rows:
        sets = shards.local(sets, count)
        first_row = lax.axis_index(shards.rows).astype(dtype) * (count * ways)
    is_here = exists & (sets < count)
    sets = jnp.where(is_here, sets, count)

    # --- sorted by hashes, of which sets are parts: equal keys together, and those of a set
    came = _sorted(jnp.where(is_here, key, _MOST), sets, words, entries)
    sets, high, low = sets[came], words[came, 0], words[came, 1]
    starts_set = _differs(sets)
    starts_key = starts_set | _differs(high) | _differs(low)
    first = starts_key & (sets < count)
    next_start = jnp.append(jnp.where(starts_key, entries, n)[1:], n)
    times = jnp.where(first, lax.cummin(next_start, reverse=True) - entries, 0).astype("uint32")
    slot = jnp.cumsum(starts_set, dtype=jnp.int32) - 1

    # --- the line of each key, and its place there
    sets, slot = lax.optimization_barrier((sets, slot))  # or they are computed for each entry
    line = gather_rows(lines.reshape(count, -1), sets).reshape(n, 4, places)
    matches = (line[:, _HIGH] == high[:, None]) & (line[:, _LOW] == low[:, None])
    matches &= (line[:, _SEEN] > 0) & first[:, None]
    is_known, place = matches.any(1), jnp.argmax(matches, 1).astype(jnp.int32)
    before = jnp.where(matches, line[:, _SEEN], 0).max(1)
    seen = before + jnp.minimum(times, _MOST - before)  # up to the limit
    has_row = is_known & (place < ways)
    busy = jnp.zeros((n, places), bool)
    busy = busy.at[jnp.where(is_known, slot, n), place].set(True, mode="drop")[slot]

    # --- a place for the r-th new key of a set: the r-th of those that are given away first
    age = jnp.minimum(now - line[:, _USED], _MOST - 1)
    recent = jnp.where(busy, _MOST, jnp.where(line[:, _SEEN] == 0, 0, _MOST - age))
    often = jnp.where(busy, _MOST, line[:, _SEEN])
    by = [often, recent] if vocab.evict == "lfu" else [recent]
    wants_row = first & ~has_row & (seen >= vocab.admit_after)
    row, gets_row = _taken(wants_row, starts_set, [x[:, :ways] for x in by], busy[:, :ways])
    evicts = gets_row & (jnp.take_along_axis(line[:, _SEEN], row[:, None], 1)[:, 0] > 0)
    waits = first & ~is_known & ~gets_row & (places > ways)
    waiting, gets_place = _taken(waits, starts_set, [recent[:, ways:]], busy[:, ways:])
    kept = jnp.where(gets_row, row, jnp.where(gets_place, ways + waiting, place))

    # --- written; where a key waited for the row that it has now is free
    after = ids_after_reading(sets, line[:, 0])
    lines = lines.at[jnp.where(is_known & gets_row, after, count), _SEEN, place].set(0)
    after = jnp.where(is_known | gets_row | gets_place, after, count)
    new = jnp.stack([high, low, jnp.full_like(seen, now), seen], 1)
    lines = lines.at[after, :, kept].set(new)

    # --- in the order of the batch
    number = first_row + sets.astype(dtype) * ways + kept.astype(dtype)
    owns, leader = has_row | gets_row, lax.cummax(jnp.where(starts_key, entries, 0))
    shared = vocab.capacity + (key % np.uint32(vocab.shared_rows)).astype(dtype)
    rows = jnp.zeros(n, dtype).at[came].set(jnp.where(owns, number, -1)[leader])
    rows = jnp.where(rows < 0, shared, rows)
    recycled = jnp.zeros(n, dtype)
    recycled = recycled.at[came].set(jnp.where(gets_row, number, vocab.table_rows))
    hits, waiting = (jnp.where(x, times, 0) for x in (has_row, ~owns))
    counted = (hits, gets_row, evicts, waiting)
    counts = jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in counted])
    if shards is not None and shards.rows:
        rows = lax.psum(jnp.where(is_here, rows, 0), shards.rows)
        recycled, counts = lax.pmin(recycled, shards.rows), lax.psum(counts, shards.rows)
    rows = jnp.where(exists, rows, vocab.table_rows)
    return [rows.reshape(shape), recycled, lines, counts]


def _sorted(
    order: jax.Array, sets: jax.Array, words: jax.Array, entries: jax.Array
) -> jax.Array:
    """Return the entries (n,) by order, then set, then key."""
    came = lax.sort((order, entries), num_keys=1, is_stable=True)[1]
    # One number is sorted in a sixth of the time on a CPU (jaxlib 0.12). That is all unless
    # different keys of the batch have the same hash.
    is_same = order[came][1:] == order[came][:-1]
    parts = sets, words[:, 0], words[:, 1]
    is_mixed = jnp.any(
        is_same & functools.reduce(jnp.logical_or, [_differs(x[came])[1:] for x in parts])
    )
    by_all = lambda: lax.sort((order, *parts, entries), num_keys=4, is_stable=True)[4]
    return lax.cond(is_mixed, by_all, lambda: came)


def _differs(x: jax.Array) -> jax.Array:
    """Decide for each entry whether it differs from the one before."""
    return jnp.append(np.ones(1, bool), x[1:] != x[:-1])


def _taken(
    wants: jax.Array, starts_set: jax.Array, by: list[jax.Array], busy: jax.Array
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
    number = earlier - lax.cummax(jnp.where(starts_set, earlier, 0))
    # By all pairs: XLA's CPU compiler calls the comparison of a sort once for each, which takes
    # longer for 16 places; and along n, where it makes vector instructions (jaxlib 0.12).
    position = np.arange(size, dtype=np.int32)[:, None]
    less = jnp.asarray(position < position.T)[:, :, None]
    for x in reversed([lax.optimization_barrier(x.T) for x in by]):
        less = (x[:, None] < x[None]) | ((x[:, None] == x[None]) & less)
    rank = less.sum(0, dtype=jnp.int32)
    place = jnp.max(jnp.where(rank == number[None], position, 0), 0)
    return place, wants & (number < jnp.sum(~busy, 1, dtype=jnp.int32))
