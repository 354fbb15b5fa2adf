"""Rows with distinct ids, in the order in which they first came: by hashing.

    ids    [4, 1, 4, V]            ids    [4, 1, V, V]
    values [a, b, c, -]     ->     values [a + c, b, -, -]

What `coalesce` does by sorting, without the order, and in half of the time on a CPU, where
a scatter is a loop that takes updates one after the other. Each entry writes its number into
the bucket of its id, where the lowest stays; then it reads there who that was. If it has the
same id it is the first one of this id; otherwise the entry tries again, with another hash.
Ids are compared, so the result is exact, and in each round at least one id of each bucket is
done. Equal ids are summed in the order in which they came, 16-bit values in float32, and some
hundred at a time: a single scatter of the values into themselves would need a copy of all.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import varying_alike
from jmask._base.precision import sum_dtype
from jmask._kernels.rows import add_rows, gather_rows, lower_rows, set_rows

# Buckets for each entry: of four, one entry in eight takes a second round.
_BUCKETS = 4
# Entries that are added to the first of their id at a time.
_BLOCK = 256


def deduplicated_rows(
    ids: jax.Array, values: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Entries with the values of equal ids summed into the first of them.

    Args:
        ids (n,): canonical ids.
        values (n, *row): one row for each id.
        rows: V, the number of rows of the table.

    Returns:
        ids (n,), V but for the first entry of each id, and values (n, *row), of no meaning
        where the id is V.
    """
    count = ids.shape[0]
    if not count:
        return ids, values
    first = first_entries(ids, rows)
    again = first != lax.iota(jnp.int32, count)
    summed = _summed_into_first(values.astype(sum_dtype(values.dtype)), first, again)
    return jnp.where(again, rows, ids), summed.astype(values.dtype)


def _summed_into_first(values: jax.Array, first: jax.Array, again: jax.Array) -> jax.Array:
    """`values` (n, *row), those of entries that come again added to the first, in order."""
    count = values.shape[0]
    size = min(_BLOCK, count)
    ended = jnp.cumsum(again, dtype=jnp.int32)
    place = jnp.where(again, ended - 1, count + size)
    # The entries that come again, one after the other, and then padding.
    later = jnp.full((count + size,), count, jnp.int32)
    later = set_rows(later, place, lax.iota(jnp.int32, count), coalesced=False)

    def block(number: jax.Array, values: jax.Array) -> jax.Array:
        entries = lax.dynamic_slice_in_dim(later, number * size, size)
        into = jnp.where(entries < count, gather_rows(first, entries), count)
        return add_rows(values, into, gather_rows(values, entries), coalesced=False)

    blocks = lax.div(ended[-1] + (size - 1), jnp.int32(size))
    return lax.fori_loop(0, blocks, block, values)


def first_entries(ids: jax.Array, rows: int) -> jax.Array:
    """For each entry the first one with the same id (n,), int32; padding is its own."""
    count = ids.shape[0]
    entry, _ = varying_alike(lax.iota(jnp.int32, count), ids)
    buckets = 2 ** (_BUCKETS * count - 1).bit_length()

    def another_round(carried: Any) -> Any:
        number, first, is_open = carried
        bucket = _hash(ids, number) & (buckets - 1)
        lowest = jnp.full((buckets,), count, jnp.int32)
        lowest = lower_rows(lowest, jnp.where(is_open, bucket, buckets), entry)
        found = gather_rows(lowest, bucket)
        is_same = is_open & (gather_rows(ids, found) == ids)
        return number + 1, jnp.where(is_same, found, first), is_open & ~is_same

    start = jnp.uint32(0), entry, ids < rows
    return lax.while_loop(lambda carried: jnp.any(carried[2]), another_round, start)[1]


def _hash(ids: jax.Array, number: jax.Array) -> jax.Array:
    """Well mixed bits (n,), int32, others for each number."""
    # The finalizer of MurmurHash3, which is in the public domain.
    x = ids.astype(jnp.uint32)
    if ids.dtype.itemsize > 4:
        x ^= (ids >> 32).astype(jnp.uint32) * jnp.uint32(0x9E3779B1)
    x += (number + 1) * jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return (x ^ (x >> 16)).astype(jnp.int32)
