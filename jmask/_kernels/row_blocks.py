"""Rows of equal ids summed and put to use in blocks, in the order of their ids.

    ids    [4, 1, 4, 2]      in order   1  2 | 4  4        blocks of two
    rows   [a, b, c, d]                 b  d | a  c
                                        ids 1, 2 with b, d; then id 4 with a + c

Of all n rows no more than a block is ever written, which stays in the cache of a core: on CPUs
a batch of 10^5 lookups otherwise writes and reads its rows several times through memory, which
the operating system has to find first. A sum that goes on in the next block is carried there.
Where each row is added is found before the loop: small operations in it would keep those of
other tables waiting.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import varying_alike
from jmask._base.precision import sum_dtype
from jmask._kernels.block_loops import BlockLoop
from jmask._kernels.gathered_rows import Rows, rows_at
from jmask._kernels.rows import add_rows

Tables = list[jax.Array]
OnRows = Callable[[Tables, jax.Array, jax.Array], Tables]


def sums_in_blocks(
    update: OnRows, tables: Tables, ids: jax.Array, values: Rows, size: int
) -> BlockLoop:
    """A loop that updates tables with the sums of the rows of equal ids.

    Args:
        update: (tables, ids (k,), rows (k, *row)) -> tables; ids ascending and unique, with
            padding among them.
        tables: arrays (V, ...).
        ids (n,): canonical; n > 0.
        values (n, *row): one row for each id. Equal ids are summed in the order in which they
            come, 16-bit values in float32.
        size: of a block.
    """
    plan = _plan(ids, tables[0].shape[0], min(size, ids.shape[0]))
    at_most, size = plan.entries.shape[0] - 1, plan.entries.shape[1]
    zero = jnp.zeros(values.shape[1:], sum_dtype(values.dtype))

    def block(number: Any, carried: tuple[Tables, Any]) -> tuple[Tables, Any]:
        tables, open_sum = carried
        number = jnp.minimum(number, at_most)
        entries, slots, ids = (
            lax.dynamic_index_in_dim(x, number, keepdims=False)
            for x in (plan.entries, plan.slots, plan.ids)
        )
        rows = rows_at(values, entries).astype(zero.dtype)
        sums = jnp.zeros((size + 1, *zero.shape), zero.dtype).at[0].set(open_sum)
        sums = add_rows(sums, slots, rows, coalesced=False)
        open_sum = lax.dynamic_index_in_dim(sums, slots[-1], keepdims=False)
        return update(tables, ids, sums.astype(values.dtype)), open_sum

    return BlockLoop((tables, zero), block, plan.count, at_most)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Where the rows of each block are added.

    Attributes:
        entries (blocks, size): which rows they are.
        slots (blocks, size): where each is added: 0 is the sum that the block before left
            open, and i + 1 a sum that begins with the row i.
        ids (blocks, size + 1): of the sums that are complete after the block; others are
            padding.
        count: of blocks that are needed.
    """

    entries: jax.Array
    slots: jax.Array
    ids: jax.Array
    count: jax.Array


def _plan(ids: jax.Array, rows: int, size: int) -> _Plan:
    blocks = ids.shape[0] // size + 2  # at least one id of padding ends the last sum
    padding = blocks * size - ids.shape[0]
    ids, entries = in_order(ids)
    ids = jnp.pad(ids, (0, padding), constant_values=rows).reshape(blocks, size)
    entries = jnp.pad(entries, (0, padding)).reshape(blocks, size)
    last = ids[:, -1:]
    open_ids = jnp.concatenate([ids[:1, :1], last[:-1]])
    begins = ids != jnp.concatenate([open_ids, ids[:, :-1]], 1)
    slots = jnp.where(begins, lax.broadcasted_iota(jnp.int32, ids.shape, 1) + 1, 0)
    of_sums = jnp.concatenate([open_ids, jnp.where(begins, ids, rows)], 1)
    return _Plan(
        entries=entries,
        slots=lax.cummax(slots, axis=1),
        ids=jnp.where(of_sums == last, rows, of_sums),
        count=jnp.sum(last < rows, dtype=jnp.int32) + 1,
    )


def rows_in_blocks(
    update: OnRows, tables: Tables, ids: jax.Array, values: Rows, size: int
) -> BlockLoop:
    """A loop that updates tables with rows as they come, of equal ids too.

    Args:
        update, tables, ids, values, size: as in `sums_in_blocks`; ids are given as they come.
    """
    rows, count = tables[0].shape[0], ids.shape[0]
    size = min(size, count)
    blocks = -(-count // size)
    ids = jnp.pad(ids, (0, (blocks + 1) * size - count), constant_values=rows)

    def block(number: Any, carried: tuple[Tables, None]) -> tuple[Tables, None]:
        first = jnp.minimum(number, blocks) * size
        entries = jnp.minimum(first + lax.iota(jnp.int32, size), count - 1)
        block_ids = lax.dynamic_slice_in_dim(ids, first, size)
        return update(carried[0], block_ids, rows_at(values, entries)), None

    return BlockLoop((tables, None), block, blocks, blocks)


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
