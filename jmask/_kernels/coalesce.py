"""Rows of equal ids summed: in order, into the first slots, or where the first of them is.

    ids    [4, 1, 4, V]            ids    [1, 4, V, V]          ids    [4, 1, V, V]
    values [a, b, c, -]            values [b, a + c, 0, 0]      values [a + c, b, -, -]
                                   `coalesce_rows`              `summed_by_hashing`, `_sorting`

Sizes are static: n entries coalesce into min(n, V) slots, which always suffice, and the
slots left over are padding. An update of tables needs no order, and most ids of a batch come
once: their rows stay where they are, and only those that come again are moved.

Equal ids are summed in the order in which they came, so the result does not depend on how a
sort breaks ties; float16 and bfloat16 are summed in float32 and rounded once.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import fewer, is_known, sum_dtype, varying_alike, with_whole_rows
from jmask._base.types import Shaped
from jmask._kernels import tuning
from jmask._kernels.rows import add_rows, entries_of, gather_rows, set_rows, sorted_with

# --- in order, into the first slots -------------------------------------------------------


def coalesce_rows(ids: jax.Array, values: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Coalesce entries into min(n, rows) slots.

    Args:
        ids (n,): canonical ids.
        values (n, *row): one row for each id; ignored where the id is padding.
        rows: V, the number of rows of the table.

    Returns:
        ids (m,), sorted, unique, padding last, and values (m, *row), zero at padding.
    """
    ids, values = with_whole_rows(ids), with_whole_rows(values)
    count = ids.shape[0]
    slots = fewer(count, rows)
    if slots == 0:
        return ids[:0], values[:0]
    by_slots = functools.partial(_summed_by_slots, slots, rows)
    if not are_large(values) or are_marked(ids, rows):
        return by_slots(ids, values)
    in_order = functools.partial(_summed_in_order, slots, rows)
    slot_ids, summed = lax.platform_dependent(ids, values, tpu=in_order, default=by_slots)
    return slot_ids, summed


def are_large(values: Shaped) -> bool:
    """Decide whether rows are too many to be summed by one scatter on a TPU."""
    bytes_of_rows = math.prod(values.shape) * values.dtype.itemsize
    return is_known(bytes_of_rows) and bytes_of_rows >= tuning.LARGE_SUMS


def are_marked(ids: jax.Array, rows: int) -> bool:
    """Decide whether ids are found by marking the rows of the table."""
    count = ids.shape[0]
    return is_known(count, rows) and rows <= tuning.MARKED_ROWS_FOR_EACH_ID * count


def _summed_by_slots(
    slots: int, rows: int, ids: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    slot_ids, slot_of_entry = unique_slots(ids, slots, rows)
    wide = sum_dtype(values.dtype)
    zeros = jnp.zeros((slots, *values.shape[1:]), wide)
    summed = add_rows(zeros, slot_of_entry, values.astype(wide))
    return slot_ids, summed.astype(values.dtype)


def _summed_in_order(
    slots: int, rows: int, ids: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    ordered, came_from = in_stable_order(ids)
    starts = starts_of(ordered)
    slot = _slots(starts)
    wide = sum_dtype(values.dtype)
    sums = jnp.zeros((slots, *values.shape[1:]), wide)
    sums = sums.at[jnp.where(ordered < rows, slot, slots)].add(
        gather_rows(values, came_from).astype(wide), mode="drop", indices_are_sorted=True
    )
    return _distinct(slots, rows, ordered, starts, slot), sums.astype(values.dtype)


def unique_slots(ids: jax.Array, slots: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the sorted unique ids (slots,), and for each entry (n,) the slot it belongs to.

    Entries whose id is padding get slot = `slots`, which writes drop.
    """
    ids = with_whole_rows(ids)  # JAX sorts along no dimension that is sharded
    # Both are exact; the choice is by sizes alone, so that a step compiles once.
    find = _by_marking if are_marked(ids, rows) else _by_sorting
    slot_ids, slot_of_entry = find(ids, slots, rows)
    return slot_ids, jnp.where(ids < rows, slot_of_entry, slots)


def _by_sorting(ids: jax.Array, slots: int, rows: int) -> tuple[jax.Array, jax.Array]:
    ordered, came_from = in_order(ids)
    starts = starts_of(ordered)
    slot = _slots(starts)
    return _distinct(slots, rows, ordered, starts, slot), _moved_back(came_from, slot)


def in_order(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sort ids (n,); return them and the entry of each, int32.

    On CPUs equal ids stay in the order in which they came.
    """
    packed = _sorted_in_one_array if ids.dtype == jnp.int32 else _sorted_stably
    return lax.platform_dependent(ids, entries_of(ids), cpu=packed, default=sorted_with)


def in_stable_order(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sort ids (n,), stably, in the form of TPUs; return them and the entry of each, int32."""
    # With the entry as a second key equal ids stay in order, as XLA makes a sort stable itself:
    # by an iota as one more key.
    ordered, came_from = lax.sort((ids, entries_of(ids)), num_keys=2, is_stable=False)
    return ordered, came_from


def _sorted_stably(ids: jax.Array, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
    ordered, came_from = lax.sort((ids, entry), num_keys=1)
    return ordered, came_from


def _sorted_in_one_array(ids: jax.Array, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
    # XLA's CPU compiler sorts one array up to three times faster than two.
    with jax.enable_x64(True):
        both = lax.sort((ids.astype(jnp.int64) << 32) | entry.astype(jnp.int64))
        return (both >> 32).astype(jnp.int32), both.astype(jnp.int32)


def starts_of(ordered: jax.Array) -> jax.Array:
    """Find where each of the sorted ids (n,) comes first."""
    return jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])


def _slots(starts: jax.Array) -> jax.Array:
    """Number the runs of equal ids: 0 0 1 2 2 2."""
    return jnp.cumsum(starts, dtype=jnp.int32) - 1


def _distinct(
    slots: int, rows: int, ordered: jax.Array, starts: jax.Array, slot: jax.Array
) -> jax.Array:
    """Return the distinct ids (slots,) of sorted ones, in order, then padding."""
    # Of 8192 ids a TPU takes 3 us for a sort and 50 for a scatter, by its compiler; a CPU takes
    # 100 us longer for a sort than for a scatter. An H100 takes 40 and 3 us of 65,536.
    by_scatter, by_sort = (
        functools.partial(form, slots, rows) for form in (_scattered_once, _sorted_again)
    )
    return lax.platform_dependent(ordered, starts, slot, tpu=by_sort, default=by_scatter)


def _scattered_once(
    slots: int, rows: int, ordered: jax.Array, starts: jax.Array, slot: jax.Array
) -> jax.Array:
    return set_rows(_unused(slots, rows, ordered), slot, ordered)


def _sorted_again(
    slots: int, rows: int, ordered: jax.Array, starts: jax.Array, slot: jax.Array
) -> jax.Array:
    padding = jnp.full_like(ordered, rows)
    return lax.sort(jnp.where(starts, ordered, padding), is_stable=False)[:slots]


def _moved_back(came_from: jax.Array, x: jax.Array) -> jax.Array:
    """Put what belongs to sorted entries (n,) where these came from."""
    moved: jax.Array = lax.platform_dependent(
        came_from, x, tpu=_sorted_back, default=_scattered_back
    )
    return moved


def _sorted_back(came_from: jax.Array, slot: jax.Array) -> jax.Array:
    return sorted_with(came_from, slot)[1]


def _scattered_back(came_from: jax.Array, slot: jax.Array) -> jax.Array:
    return jnp.zeros_like(slot).at[came_from].set(slot, unique_indices=True)


def _by_marking(ids: jax.Array, slots: int, rows: int) -> tuple[jax.Array, jax.Array]:
    # Padding is V, which a write to V rows drops.
    unmarked = jnp.zeros((rows,), jnp.int32)
    marked = set_rows(unmarked, ids, jnp.ones_like(ids))
    slot_of_row = jnp.cumsum(marked) - 1
    place = jnp.where(marked > 0, slot_of_row, slots)
    every = lax.iota(ids.dtype, rows)
    slot_ids = set_rows(_unused(slots, rows, ids), place, every)
    return slot_ids, gather_rows(slot_of_row, ids)


def _unused(slots: int, rows: int, ids: jax.Array) -> jax.Array:
    """Return the ids of slots that no row has."""
    return jnp.full((slots,), rows, ids.dtype)


# --- into the first of them ---------------------------------------------------------------


class RowsOfTable(NamedTuple):
    """Hold the rows of a gradient of one table.

    Attributes:
        ids (n,): canonical, n > 0.
        values (n, *row): one row for each id.
        rows: V, the number of rows of the table.
    """

    ids: jax.Array
    values: jax.Array
    rows: int


Unique = tuple[jax.Array, jax.Array]
"""Ids (n,), V but for the first entry of each id, and values (n, *row), of no meaning there."""


def _runs(ordered: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Find which of the sorted ids (n,) come first, and for each the place of the first."""
    starts = starts_of(ordered)
    return starts, lax.cummax(jnp.where(starts, entries_of(ordered), 0))


def summed_by_sorting(given: RowsOfTable) -> Unique:
    """Sum rows of equal ids into the first, in blocks of those that come again, on TPUs.

    XLA's scatter for TPUs takes as long for rows that it drops as for others (libtpu 0.0.50):
    it is given no more than there are.
    """
    ids, values, rows = given
    count, entries = ids.shape[0], entries_of(ids)
    ordered, came_from = in_stable_order(ids)
    starts, start = _runs(ordered)
    again = ~starts & (ordered < rows)
    # The places of those that come again, one after the other, then padding.
    later = lax.sort(jnp.where(again, entries, count), is_stable=False)
    size = max(tuning.LATER_ROWS, count // tuning.LATER_ROUNDS)
    later = jnp.pad(later, (0, size), constant_values=count)
    left = jnp.sum(again, dtype=jnp.int32)

    def block(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin, sums = carried
        places = lax.dynamic_slice_in_dim(later, begin, size)
        first = gather_rows(came_from, gather_rows(start, places))
        into = jnp.where(places < count, first, count)
        rows = gather_rows(sums, gather_rows(came_from, places))
        return begin + size, add_rows(sums, into, rows)

    sums = values.astype(sum_dtype(values.dtype))
    begin = varying_alike(jnp.int32(0), ids)[0]
    _, sums = lax.while_loop(lambda carried: carried[0] < left, block, (begin, sums))
    unique = jnp.where(again, rows, ordered)
    _, unique = sorted_with(came_from, unique)
    return unique, sums.astype(values.dtype)
