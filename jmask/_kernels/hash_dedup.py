"""Rows of equal ids summed into the first of them, found by hashing.

    ids    [4, 1, 4, V]            ids    [4, 1, V, V]
    values [a, b, c, -]     ->     values [a + c, b, -, -]

`coalesce` does this by sorting and puts ids in order. An update needs no order, and one CPU
finds equal ids three to four times faster so (`benchmarks/tricks.py`): its scatter takes
entries one after the other, which is what a hash table wants. Each entry writes its number into
the bucket of its id, where the lowest stays, and reads there whose it is. If that entry has the
same id, it is the first of this id; otherwise this one tries again with another hash.

Ids are compared, so the result is exact whatever the hash does, and each round finds at least
one id of each bucket. Equal ids are summed in the order in which they came, 16-bit values in
float32.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.array_types import sum_dtype, varying_alike
from jmask._kernels.rows import add_rows

# Buckets for each entry: of four, one entry in eight takes a second round.
_BUCKETS = 4
# In place of the first entry of an id that no round has found yet.
_OPEN = -1


def summed_into_first(
    tables: Sequence[tuple[jax.Array, jax.Array, int]],
) -> list[tuple[jax.Array, jax.Array]]:
    """Sum the rows of equal ids of each table into the first of them.

    Args:
        tables: of each the canonical ids (n,), values (n, *row), one row for each id, and V,
            the number of its rows.

    Returns:
        Of each the ids (n,), V but for the first entry of each id, and values (n, *row), of no
        meaning where the id is V.
    """
    results = []
    firsts = first_entries([(ids, rows) for ids, _, rows in tables])
    for (ids, values, rows), first in zip(tables, firsts, strict=True):
        again = first != _entries(ids)
        # Without the barrier XLA computes rows twice that it can fuse: to add to, and to add.
        terms = lax.optimization_barrier(values.astype(sum_dtype(values.dtype)))
        into = jnp.where(again, first, ids.shape[0])
        sums = add_rows(terms, into, terms, coalesced=False)
        results.append((jnp.where(again, rows, ids), sums.astype(values.dtype)))
    return results


def first_entries(tables: Sequence[tuple[jax.Array, int]]) -> list[jax.Array]:
    """Return for each entry the first one with the same id (n,), int32; padding is its own.

    Args:
        tables: of each the ids (n,) and V. All are hashed together: one loop compiles and runs
            faster than one for each.
    """
    # Equal ids have equal bits in a signed type of their width or a greater one.
    bits = jnp.int64 if any(ids.dtype.itemsize > 4 for ids, _ in tables) else jnp.int32
    ids = jnp.concatenate([ids.astype(bits) for ids, _ in tables])
    is_id = jnp.concatenate([ids < rows for ids, rows in tables])
    begins = list(itertools.accumulate((x.shape[0] for x, _ in tables), initial=0))
    entries = _entries(ids)
    # Tables are told apart by where their entries begin.
    table = jnp.concatenate(
        [
            jnp.full_like(x, begin, jnp.int32)
            for (x, _), begin in zip(tables, begins, strict=False)
        ]
    )
    buckets = 2 ** (_BUCKETS * ids.shape[0] - 1).bit_length()

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


def _entries(ids: jax.Array) -> jax.Array:
    """Number the entries (n,), int32."""
    return varying_alike(lax.iota(jnp.int32, ids.shape[0]), ids)[0]


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
