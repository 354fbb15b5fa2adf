"""Rows of equal ids summed, into as many slots as there are different ids.

    ids    [4, 1, 4, V]            ids    [1, 4, V, V]
    values [a, b, c, -]            values [b, a + c, 0, 0]

Sizes are static: n entries coalesce into min(n, V) slots, which always suffice, and the
slots left over are padding. Equal ids are summed in the order in which they came, so the result
does not depend on how a sort breaks ties; float16 and bfloat16 are summed in float32 and
rounded once.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import fewer, sum_dtype
from jmask._base.row_ids import mixed
from jmask._base.shardings import with_whole_rows
from jmask._base.types import IdVector, RowArray
from jmask._kernels import tuning
from jmask._kernels.rows import add_rows, entries_of, gather_rows, set_rows, sorted_with


def coalesce_rows(ids: IdVector, values: RowArray, rows: int) -> tuple[IdVector, RowArray]:
    """Coalesce values (n, *row) of canonical ids (n,) into min(n, rows) slots.

    Returns ids (m,), sorted, unique, padding last, and values (m, *row), zero at padding.
    """
    # JAX sorts along no dimension that is sharded.
    ids, values = with_whole_rows(ids), with_whole_rows(values)
    slots = fewer(ids.shape[0], rows)
    if slots == 0:
        return ids[:0], values[:0]
    wide = sum_dtype(values.dtype)
    slot_ids, slot_of_entry = unique_slots(ids, slots, rows)
    zeros = jnp.zeros((slots, *values.shape[1:]), wide)
    sums = add_rows(zeros, slot_of_entry, values.astype(wide))
    return slot_ids, sums.astype(values.dtype)


# --- which ids there are ------------------------------------------------------------------


def unique_slots(ids: IdVector, slots: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the sorted unique ids (slots,), and for each entry (n,) the slot it belongs to.

    Entries whose id is padding get slot = `slots`, which writes drop. The ids are on every
    device.
    """
    ordered, entries = in_order(ids)
    starts = starts_of(ordered)
    slot = jnp.cumsum(starts, dtype=jnp.int32) - 1  # of each run: 0 0 1 2 2 2
    (slot_of_entry,) = to_entries(entries, slot)

    def by_sort(ordered: IdVector, starts: jax.Array, slot: jax.Array) -> jax.Array:
        distinct = jnp.where(starts, ordered, jnp.full_like(ordered, rows))
        return lax.sort(distinct, is_stable=False)[:slots]

    def by_scatter(ordered: IdVector, starts: jax.Array, slot: jax.Array) -> jax.Array:
        return set_rows(jnp.full((slots,), rows, ordered.dtype), slot, ordered)

    # Of 8192 ids a TPU takes 3 us for a sort and 50 for a scatter, by its compiler. A CPU
    # takes 100 us longer for a sort than for a scatter, and an H100 40 us for 3, of 65,536.
    operands = ordered, starts, slot
    distinct: IdVector = lax.platform_dependent(*operands, tpu=by_sort, default=by_scatter)
    return distinct, jnp.where(ids < rows, slot_of_entry, slots)


# --- sorted ids ---------------------------------------------------------------------------


def in_order(ids: IdVector) -> tuple[jax.Array, jax.Array]:
    """Sort ids (n,); return them and the entry of each, int32.

    On CPUs equal ids stay in the order in which they came.
    """

    def in_one_array(ids: IdVector, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        # XLA's CPU compiler sorts one array up to three times faster than two.
        with jax.enable_x64(True):
            both = lax.sort((ids.astype(jnp.int64) << 32) | entry.astype(jnp.int64))
            return (both >> 32).astype(jnp.int32), both.astype(jnp.int32)

    def stably(ids: IdVector, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        ordered, entries = lax.sort((ids, entry), num_keys=1)
        return ordered, entries

    on_cpus = in_one_array if ids.dtype == jnp.int32 else stably
    return lax.platform_dependent(ids, entries_of(ids), cpu=on_cpus, default=sorted_with)


def to_entries(entries: jax.Array, *numbers: jax.Array) -> list[jax.Array]:
    """Put the i-th of numbers (n,) where entries[i] says, a permutation: undo a sort."""

    def by_sort(entries: jax.Array, *numbers: jax.Array) -> list[jax.Array]:
        return list(lax.sort((entries, *numbers), num_keys=1, is_stable=False)[1:])

    def by_scatter(entries: jax.Array, *numbers: jax.Array) -> list[jax.Array]:
        return [jnp.zeros_like(x).at[entries].set(x, unique_indices=True) for x in numbers]

    # See `unique_slots`: on TPUs a sort is faster than a scatter.
    return lax.platform_dependent(entries, *numbers, tpu=by_sort, default=by_scatter)


def starts_of(ids: IdVector) -> jax.Array:
    """Decide of sorted ids (n,), n > 0, whether each is the first of its run of equal ids."""
    return jnp.concatenate([jnp.ones((1,), bool), ids[1:] != ids[:-1]])


# --- on TPUs, for updates that need no order ------------------------------------------------


def summed_where_first(ids: IdVector, values: RowArray, rows: int) -> tuple[IdVector, RowArray]:
    """Sum rows of equal ids into the first of them.

        ids    [4, 1, 4, V]            ids    [4, 1, V, V]
        values [a, b, c, -]            values [a + c, b, -, -]

    Most ids of a batch come once: their rows stay where they are. XLA's scatter for TPUs takes
    as long for rows that it drops as for others (libtpu 0.0.50): it is given those that there
    are, in blocks.

    Returns ids (n,), `rows` but for the first entry of each id, and values (n, *row).
    """
    count, entries = ids.shape[0], entries_of(ids)
    # With the entry as a second key equal ids stay in order, as XLA makes a sort stable itself:
    # by an iota as one more key.
    ordered, moved = lax.sort((ids, entries), num_keys=2, is_stable=False)
    starts = starts_of(ordered)
    again = ~starts & (ordered < rows)
    # The place at which the run of each begins.
    start = lax.cummax(jnp.where(starts, entries, 0))
    # The places of those that come again, one after the other, then padding.
    later = lax.sort(jnp.where(again, entries, count), is_stable=False)
    size = max(tuning.LATER_ROWS, count // tuning.LATER_ROUNDS)
    later = jnp.pad(later, (0, size), constant_values=count)
    left = jnp.sum(again, dtype=jnp.int32)

    def block(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin, sums = carried
        places = lax.dynamic_slice_in_dim(later, begin, size)
        first = gather_rows(moved, gather_rows(start, places))
        into = jnp.where(places < count, first, count)
        rows = gather_rows(sums, gather_rows(moved, places))
        return begin + size, add_rows(sums, into, rows)

    sums = values.astype(sum_dtype(values.dtype))
    _, sums = lax.while_loop(lambda carried: carried[0] < left, block, (jnp.int32(0), sums))
    unique = jnp.where(again, rows, ordered)
    _, unique = sorted_with(moved, unique)
    return unique, sums.astype(values.dtype)


# --- on one CPU, for updates that need no order ----------------------------------------------
#
# Three to five times as fast as a sort: XLA's scatter for CPUs takes entries one after the
# other, which is what a hash table wants. Each entry writes its number into the bucket of its
# id, where the lowest stays, and reads there whose it is. If that entry has the same id, it is
# the first of this id; otherwise this one tries again with another hash. Ids are compared, so
# the result is exact whatever the hash does; each round finds one id of each bucket at least.

# In place of the first entry of an id that no round has found yet.
_OPEN = -1


# A function of the program, called for each table with so many ids and such rows: 26 tables are
# lowered in .4 of the time.
@jax.jit
def summed_by_hashing(ids: IdVector, values: RowArray, rows: int) -> tuple[IdVector, RowArray]:
    """Sum rows of equal ids into the first of them, as `summed_where_first` does."""
    count, entries = ids.shape[0], entries_of(ids)
    buckets = 2 ** (tuning.HASH_BUCKETS * count - 1).bit_length()

    def another_round(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, first = carried
        bucket = mixed(ids.astype(jnp.int32) + number) & (buckets - 1)
        place = jnp.where(first == _OPEN, bucket, buckets)
        own = entries_of(ids)  # not `entries`, which XLA would carry through the loop
        lowest = jnp.full((buckets,), count, jnp.int32).at[place].min(own, mode="drop")
        candidate = gather_rows(lowest, bucket)
        is_same = gather_rows(ids, candidate) == ids
        return number + 1, jnp.where((first == _OPEN) & is_same, candidate, first)

    def is_open(carried: tuple[jax.Array, jax.Array]) -> jax.Array:
        first = carried[1]  # XLA compiles this five times as fast as `any`
        return first[jnp.argmin(first)] == _OPEN

    start = jnp.int32(1), jnp.where(ids < rows, _OPEN, entries)
    _, first = lax.while_loop(is_open, another_round, start)
    again = first != entries
    into, sums = jnp.where(again, first, count), values.astype(sum_dtype(values.dtype))
    size = min(tuning.block_size(math.prod(sums.shape[1:]) * sums.dtype.itemsize), count)

    def block(number: jax.Array, sums: jax.Array) -> jax.Array:
        # The last block begins earlier, with rows that were added in the one before.
        begin = jnp.minimum(number * size, count - size)
        is_new = lax.iota(jnp.int32, size) >= number * size - begin
        at = jnp.where(is_new, lax.dynamic_slice_in_dim(into, begin, size), count)
        # Rows that come again are added, and never added to: they can be read from the sums.
        return add_rows(sums, at, lax.dynamic_slice_in_dim(sums, begin, size))

    # In one scatter of all rows XLA would copy them.
    sums = lax.fori_loop(0, -(-count // size), block, sums)
    return jnp.where(again, rows, ids), sums.astype(values.dtype)
