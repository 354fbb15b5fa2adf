"""Rows of equal ids summed into the first of them, in no order.

    ids    [4, 1, 4, V]            ids    [4, 1, V, V]
    values [a, b, c, -]     ->     values [a + c, b, -, -]

`coalesce` also puts ids in order. An update of tables needs no order, and most ids of a batch
come once: their rows stay where they are, and only those that come again are moved. Equal ids
are summed in the order in which they came, 16-bit values in float32.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.array_types import sum_dtype, varying_alike
from jmask._kernels import tuning
from jmask._kernels.coalesce import in_stable_order, starts_of
from jmask._kernels.rows import add_rows, entries_of, gather_rows, sorted_with


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


# --- by sorting, on TPUs ----------------------------------------------------------------------


def summed_by_sorting(given: RowsOfTable) -> Unique:
    """Sum rows of equal ids into the first, in blocks of those that come again.

    XLA's scatter for TPUs takes as long for rows that it drops as for others (libtpu 0.0.50):
    it is given no more than there are.
    """
    ids, values, rows = given
    count, entries = ids.shape[0], entries_of(ids)
    ordered, came_from = in_stable_order(ids)
    starts = starts_of(ordered)
    again = ~starts & (ordered < rows)
    start = lax.cummax(jnp.where(starts, entries, 0))
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


# --- by hashing, on one CPU -------------------------------------------------------------------
#
# It is three to four times faster than sorting there (`benchmarks/tricks.py`): a scatter takes
# entries one after the other, which is what a hash table wants. Each entry writes its number
# into the bucket of its id, where the lowest stays, and reads there whose it is. If that entry
# has the same id, it is the first of this id; otherwise this one tries again with another hash.
# Ids are compared, so the result is exact whatever the hash does, and each round finds at least
# one id of each bucket.

# In place of the first entry of an id that no round has found yet.
_OPEN = -1


def summed_by_hashing(tables: Sequence[RowsOfTable]) -> list[Unique]:
    """Sum rows of equal ids of each table into the first of them."""
    results = []
    for (ids, values, rows), first in zip(tables, _first_entries(tables), strict=True):
        again = first != entries_of(ids)
        # Without the barrier XLA computes rows twice that it can fuse: to add to, and to add.
        terms = lax.optimization_barrier(values.astype(sum_dtype(values.dtype)))
        into = jnp.where(again, first, ids.shape[0])
        sums = add_rows(terms, into, terms)
        results.append((jnp.where(again, rows, ids), sums.astype(values.dtype)))
    return results


def _first_entries(tables: Sequence[RowsOfTable]) -> list[jax.Array]:
    """Return for each entry the first one with the same id (n,), int32; padding is its own.

    All tables are hashed together: one loop compiles and runs faster than one for each.
    """
    # Equal ids have equal bits in a signed type of their width or a greater one.
    bits = jnp.int64 if any(x.ids.dtype.itemsize > 4 for x in tables) else jnp.int32
    ids = jnp.concatenate([x.ids.astype(bits) for x in tables])
    is_id = jnp.concatenate([x.ids < x.rows for x in tables])
    begins = list(itertools.accumulate((x.ids.shape[0] for x in tables), initial=0))
    entries = entries_of(ids)
    # Tables are told apart by where their entries begin.
    table = jnp.concatenate(
        [
            jnp.full_like(x.ids, begin, jnp.int32)
            for x, begin in zip(tables, begins, strict=False)
        ]
    )
    buckets = 2 ** (tuning.HASH_BUCKETS * ids.shape[0] - 1).bit_length()

    def another_round(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, first = carried
        bucket = _hash(ids, table + number) & (buckets - 1)
        lowest = jnp.full((buckets,), ids.shape[0], jnp.int32)
        place = jnp.where(first == _OPEN, bucket, buckets)
        candidate = lowest.at[place].min(entries, mode="drop")[bucket]
        # It is no later entry, so it is of the same table unless it lies before that.
        is_same = (ids[candidate] == ids) & (candidate >= table)
        return number + 1, jnp.where((first == _OPEN) & is_same, candidate, first)

    def is_open(carried: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.min(carried[1]) == _OPEN

    start = jnp.int32(0), jnp.where(is_id, _OPEN, entries)
    first = lax.while_loop(is_open, another_round, start)[1]
    return [first[begin:end] - begin for begin, end in itertools.pairwise(begins)]


def _hash(ids: jax.Array, number: jax.Array) -> jax.Array:
    """Return well mixed bits (n,), int32, others for each number."""
    # The finalizer of MurmurHash3, which is in the public domain.
    x = ids.astype(jnp.int32)
    if ids.dtype.itemsize > 4:
        x ^= (ids >> 32).astype(jnp.int32) * _signed(0x9E3779B1)
    x += (number + 1) * _signed(0x9E3779B9)
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = _folded(x, bits) * _signed(factor)
    return _folded(x, 16)


def _folded(x: jax.Array, bits: int) -> jax.Array:
    return x ^ lax.shift_right_logical(x, jnp.int32(bits))


def _signed(bits: int) -> np.int32:
    return np.uint32(bits).astype(np.int32)
