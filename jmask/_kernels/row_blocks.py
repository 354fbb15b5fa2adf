"""Rows of equal ids summed and put to use in blocks, in the order of their ids.

    ids    [4, 1, 4, 2]      in order   1  2 | 4  4        blocks of two
    rows   [a, b, c, d]                 b  d | a  c
                                        ids 1, 2 with b, d; then id 4 with a + c

Of all n rows no more than a block is ever written, which stays in the cache of a core: on CPUs
a batch of 10^5 lookups otherwise writes and reads its rows several times through memory, which
the operating system has to find first. A sum that goes on in the next block is carried there.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import varying_alike
from jmask._base.precision import sum_dtype
from jmask._kernels.factored_rows import Rows, rows_at
from jmask._kernels.rows import add_rows

# Enough for all cores, and few enough for their caches.
BLOCK = 4096

Tables = list[jax.Array]


def update_in_blocks(
    update: Callable[[Tables, jax.Array, jax.Array], Tables],
    tables: Tables,
    ids: jax.Array,
    values: Rows,
    one_by_one: bool = False,
) -> Tables:
    """Tables updated with the sums of the rows of equal ids.

    Args:
        update: (tables, ids (k,), rows (k, *row)) -> tables; ids sorted, unique and padding
            last.
        tables: arrays (V, ...).
        ids (n,): canonical; n > 0.
        values (n, *row): one row for each id. Equal ids are summed in the order in which they
            come, 16-bit values in float32.
        one_by_one: rows of equal ids are not summed, ids are as they come.
    """
    if one_by_one:
        return _one_by_one(update, tables, ids, values)
    rows, size = tables[0].shape[0], min(BLOCK, ids.shape[0])
    ids, entries = in_order(ids)
    used = jnp.sum(ids < rows, dtype=jnp.int32)
    # At least one id of padding ends the last sum.
    ids = jnp.pad(ids, (0, size), constant_values=rows)
    entries = jnp.pad(entries, (0, size))
    zero = jnp.zeros(values.shape[1:], sum_dtype(values.dtype))

    def block(number: jax.Array, carried: tuple[Tables, jax.Array, jax.Array]) -> Any:
        tables, open_id, open_sum = carried
        block_ids = lax.dynamic_slice_in_dim(ids, number * size, size)
        block_rows = rows_at(values, lax.dynamic_slice_in_dim(entries, number * size, size))
        before = jnp.concatenate([open_id[None], block_ids[:-1]])
        slot = jnp.cumsum(block_ids != before, dtype=jnp.int32)
        sums = jnp.zeros((size + 1, *zero.shape), zero.dtype).at[0].set(open_sum)
        sums = add_rows(sums, slot, block_rows.astype(zero.dtype), coalesced=False)
        slot_ids = jnp.full((size + 1,), rows, ids.dtype).at[0].set(open_id)
        slot_ids = slot_ids.at[slot].set(block_ids)
        last = slot[-1]
        open_sum = lax.dynamic_index_in_dim(sums, last, keepdims=False)
        complete = slot_ids.at[last].set(rows)
        tables = update(tables, complete, sums.astype(values.dtype))
        return tables, block_ids[-1], open_sum

    blocks = used // size + 1
    start = tables, ids[0], zero
    return lax.fori_loop(0, blocks, block, start)[0]


def _one_by_one(
    update: Callable[[Tables, jax.Array, jax.Array], Tables],
    tables: Tables,
    ids: jax.Array,
    values: Rows,
) -> Tables:
    rows, count, size = tables[0].shape[0], ids.shape[0], min(BLOCK, ids.shape[0])
    blocks = -(-count // size)
    ids = jnp.pad(ids, (0, blocks * size - count), constant_values=rows)

    def block(number: jax.Array, tables: Tables) -> Tables:
        first = number * size
        entries = jnp.minimum(first + lax.iota(jnp.int32, size), count - 1)
        block_ids = lax.dynamic_slice_in_dim(ids, first, size)
        return update(tables, block_ids, rows_at(values, entries))

    return lax.fori_loop(0, blocks, block, tables)


def in_order(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The ids (n,) sorted, and the entry that each comes from, int32; equal ones in order."""
    entry, ids = varying_alike(lax.iota(jnp.int32, ids.shape[0]), ids)
    if ids.dtype != jnp.int32:
        ordered, entry = lax.sort((ids, entry), num_keys=1)
        return ordered, entry
    # XLA's CPU compiler sorts one array of numbers in two thirds of the time of two.
    with jax.enable_x64(True):
        both = lax.sort((ids.astype(jnp.int64) << 32) | entry.astype(jnp.int64))
        return (both >> 32).astype(jnp.int32), both.astype(jnp.int32)
