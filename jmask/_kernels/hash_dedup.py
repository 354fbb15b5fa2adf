"""Rows with distinct ids, in the order in which they first came: by hashing.

    ids    [4, 1, 4, V]            ids    [4, 1, V, V]
    values [a, b, c, -]     ->     values [a + c, b, -, -]

What `coalesce` does by sorting, without the order, and in half of the time on a CPU, where
a scatter is a loop that takes updates one after the other. Each entry writes its number into
the bucket of its id, where the lowest stays; then it reads there who that was. If it has the
same id it is the first one of this id; otherwise the entry tries again, with another hash.
Ids are compared, so the result is exact, and in each round at least one id of each bucket is
done. Equal ids are summed in the order in which they came, 16-bit values in float32. Where
there are many, some hundred at a time: a single scatter of the values into themselves needs a
copy of all.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.array_types import varying_alike
from jmask._base.precision import sum_dtype
from jmask._kernels.block_loops import BlockLoop, run_side_by_side, together
from jmask._kernels.rows import add_rows, gather_rows, lower_rows, set_rows

# Buckets for each entry: of four, one entry in eight takes a second round.
_BUCKETS = 4
# Entries that are added to the first of their id at a time.
_BLOCK = 256
# Bytes of the rows of one table, and of all, that are few enough to be copied: they are added
# at once, which takes no longer and compiles in half of the time.
_FEW, _FEW_OF_ALL = 2**20, 2**24
# In place of the first entry that is not found yet.
_OPEN = -1


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
    if not ids.shape[0]:
        return ids, values
    ((ids, values),) = deduplicated_tables([(ids, values, rows)])
    return ids, values


def deduplicated_tables(
    tables: Sequence[tuple[jax.Array, jax.Array, int]],
) -> list[tuple[jax.Array, jax.Array]]:
    """`deduplicated_rows` of several tables, side by side; each with an entry at least."""
    found = [
        first
        for group in together(tables)
        for first in first_entries([(ids, rows) for ids, _, rows in group])
    ]
    again = [x != _entries(x) for x in found]
    terms = [values.astype(sum_dtype(values.dtype)) for _, values, _ in tables]
    sums = _sums(list(zip(terms, found, again, strict=True)))
    return [
        (jnp.where(is_again, rows, ids), x.astype(values.dtype))
        for (ids, values, rows), is_again, x in zip(tables, again, sums, strict=True)
    ]


def _sums(given: Sequence[tuple[jax.Array, jax.Array, jax.Array]]) -> list[jax.Array]:
    """Rows (n, *row) with those that come again added to the first, in order.

    Args:
        given: of each table the rows, the first entry of each id, and which come again.
    """
    few = sum(values.nbytes for values, *_ in given if values.nbytes <= _FEW)
    most = _FEW if few <= _FEW_OF_ALL else 0
    blocks = [_in_blocks(*x) for x in given if x[0].nbytes > most]
    summed = iter(run_side_by_side(blocks))
    return [next(summed) if x[0].nbytes > most else _at_once(*x) for x in given]


def _at_once(values: jax.Array, first: jax.Array, again: jax.Array) -> jax.Array:
    into = jnp.where(again, first, values.shape[0])
    return add_rows(values, into, values, coalesced=False)


def _in_blocks(values: jax.Array, first: jax.Array, again: jax.Array) -> BlockLoop:
    count = values.shape[0]
    size = min(_BLOCK, count)
    ended = jnp.cumsum(again, dtype=jnp.int32)
    place = jnp.where(again, ended - 1, count + size)
    # The entries that come again, one after the other, and then padding.
    later = jnp.full((count + size,), count, jnp.int32)
    later = set_rows(later, place, lax.iota(jnp.int32, count), coalesced=False)

    def block(number: jax.Array, carried: tuple[jax.Array, None]) -> tuple[jax.Array, None]:
        entries = lax.dynamic_slice_in_dim(later, number * size, size)
        into = jnp.where(entries < count, gather_rows(first, entries), count)
        rows = gather_rows(carried[0], entries)
        return add_rows(carried[0], into, rows, coalesced=False), None

    blocks = lax.div(ended[-1] + (size - 1), jnp.int32(size))
    return BlockLoop((values, None), block, blocks, count // size)


def first_entries(tables: Sequence[tuple[jax.Array, int]]) -> list[jax.Array]:
    """For each entry the first one with the same id (n,), int32; padding is its own.

    Args:
        tables: of each the ids (n,) and the number of its rows. They are hashed side by side,
            in as many rounds as one of them needs.
    """

    def another_round(carried: tuple[jax.Array, list[jax.Array]]) -> Any:
        number, found = carried
        return number + 1, [
            _another_round(ids, number, first)
            for (ids, _), first in zip(tables, found, strict=True)
        ]

    def is_open(carried: tuple[jax.Array, list[jax.Array]]) -> jax.Array:
        return jnp.min(jnp.concatenate(carried[1])) == _OPEN

    found = [jnp.where(ids < rows, _OPEN, _entries(ids)) for ids, rows in tables]
    return lax.while_loop(is_open, another_round, (jnp.int32(0), found))[1]


def _entries(ids: jax.Array) -> jax.Array:
    """The number of each entry (n,), int32."""
    return varying_alike(lax.iota(jnp.int32, ids.shape[0]), ids)[0]


def _another_round(ids: jax.Array, number: jax.Array, first: jax.Array) -> jax.Array:
    """The first entries that are known after a round."""
    count = ids.shape[0]
    buckets = 2 ** (_BUCKETS * count - 1).bit_length()
    bucket = _hash(ids, number) & (buckets - 1)
    lowest = jnp.full((buckets,), count, jnp.int32)
    lowest = lower_rows(lowest, jnp.where(first == _OPEN, bucket, buckets), _entries(ids))
    found = gather_rows(lowest, bucket)
    is_same = gather_rows(ids, found) == ids
    return jnp.where((first == _OPEN) & is_same, found, first)


def _hash(ids: jax.Array, number: jax.Array) -> jax.Array:
    """Well mixed bits (n,), int32, others for each number."""
    # The finalizer of MurmurHash3, which is in the public domain.
    x = ids.astype(jnp.int32)
    if ids.dtype.itemsize > 4:
        x ^= (ids >> 32).astype(jnp.int32) * _signed(0x9E3779B1)
    x += (number + 1) * _signed(0x9E3779B9)
    x = _folded(x, 16) * _signed(0x85EBCA6B)
    x = _folded(x, 13) * _signed(0xC2B2AE35)
    return _folded(x, 16)


def _folded(x: jax.Array, bits: int) -> jax.Array:
    return x ^ lax.shift_right_logical(x, jnp.int32(bits))


def _signed(bits: int) -> np.int32:
    return np.uint32(bits).astype(np.int32)
