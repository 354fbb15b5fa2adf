"""Loops over blocks of rows, and rows of equal ids summed in such loops.

No more than a block of the n rows is ever written, which stays in the cache of a core: on CPUs
a batch of 10^5 lookups otherwise writes and reads its rows several times through memory, which
the operating system has to find first. Loops of several tables run side by side in one loop:

    loop 1   A A A          one loop of three rounds:  A B,  A B,  A
    loop 2   B B

XLA's CPU runtime gives the operations of a loop's body to several cores where none needs what
another computes. Two loops it runs one after the other, though they are of different tables:
their temporaries lie in the same memory (jaxlib 0.10.0 to 0.12.0).

Rows of equal ids are summed in the order of their ids:

    ids    [4, 1, 4, 2]      in order   1  2 | 4  4        blocks of two
    rows   [a, b, c, d]                 b  d | a  c
                                        ids 1, 2 with b, d; then id 4 with a + c

A sum that goes on in the next block is carried there. Where each row is added is found before
the loop: small operations in it would delay other tables.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import sum_dtype
from jmask._base.shardings import varying_alike
from jmask._base.types import IdVector, Index, PyTree
from jmask._kernels import tuning
from jmask._kernels.coalesce import in_order
from jmask._kernels.gathered_rows import Rows, rows_at
from jmask._kernels.rows import add_rows

# --- loops side by side -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlockLoop:
    """A loop over blocks, which are as many as are needed."""

    start: tuple[PyTree, PyTree]  # what is carried: (results, anything else)
    # (number, carried) -> carried. Blocks from `count` on are empty: they change no result.
    block: Callable[[jax.Array, tuple[PyTree, PyTree]], tuple[PyTree, PyTree]]
    count: Index  # of blocks, a number or a scalar
    at_most: int  # the greatest count that there can be


def block_size(bytes_of_rows: Sequence[int]) -> int:
    """Return how many rows a block has, given the bytes of a row of each loop."""
    least, most = tuning.BLOCK_ROWS
    in_work = sum(sorted(bytes_of_rows)[-tuning.LOOPS_TOGETHER :])
    return min(max(tuning.BYTES_IN_WORK // max(in_work, 1), least), most)


def run_side_by_side(loops: Sequence[BlockLoop]) -> list[PyTree]:
    """Return the results of each loop. Those of similar lengths run together."""
    order = sorted(range(len(loops)), key=lambda i: -loops[i].at_most)
    results: list[PyTree] = [None] * len(loops)
    while order:
        longest = loops[order[0]].at_most
        chosen = [i for i in order[: tuning.LOOPS_TOGETHER] if 2 * loops[i].at_most >= longest]
        order = order[len(chosen) :]
        together = {i: loops[i] for i in chosen}

        def blocks(number: jax.Array, carried: PyTree, together: PyTree = together) -> PyTree:
            return {i: loop.block(number, carried[i]) for i, loop in together.items()}

        count = functools.reduce(jnp.maximum, [loop.count for loop in together.values()])
        start = {i: loop.start for i, loop in together.items()}
        for i, (result, _) in lax.fori_loop(0, count, blocks, start).items():
            results[i] = result
    return results


# --- rows of equal ids --------------------------------------------------------------------

Tables = list[jax.Array]
OnRows = Callable[[Tables, jax.Array, jax.Array], Tables]


def sums_in_blocks(
    update: OnRows, tables: Tables, ids: IdVector, values: Rows, size: int
) -> BlockLoop:
    """Return a loop that updates tables with the sums of the rows of equal ids.

    `update(tables, ids, rows)` gets ids (k,), ascending and unique, with padding among them.
    Equal ids are summed in the order in which they come, 16-bit values in float32.
    """
    plan = _plan(ids, tables[0].shape[0], min(size, ids.shape[0]))
    at_most, size = plan.entries.shape[0] - 1, plan.entries.shape[1]
    zero = jnp.zeros(values.shape[1:], sum_dtype(values.dtype))
    zero = varying_alike(zero, ids)[0]

    def block(number: jax.Array, carried: tuple[Tables, jax.Array]) -> tuple[Tables, jax.Array]:
        tables, open_sum = carried
        number = jnp.minimum(number, at_most)
        entries, slots, ids = (
            lax.dynamic_index_in_dim(x, number, keepdims=False)
            for x in (plan.entries, plan.slots, plan.ids)
        )
        rows = rows_at(values, entries).astype(zero.dtype)
        sums = jnp.zeros((size + 1, *zero.shape), zero.dtype).at[0].set(open_sum)
        sums = add_rows(sums, slots, rows)
        open_sum = lax.dynamic_index_in_dim(sums, slots[-1], keepdims=False)
        return update(tables, ids, sums.astype(values.dtype)), open_sum

    return BlockLoop((tables, zero), block, plan.count, at_most)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The slots at which the rows of each block are added."""

    entries: jax.Array  # (blocks, size): which rows they are
    # (blocks, size): where each is added: 0 is the sum that the block before left open, and i +
    # 1 a sum that begins with the row i.
    slots: jax.Array
    # (blocks, size + 1): of the sums that are complete after the block; others are padding.
    ids: jax.Array
    count: jax.Array  # of blocks that are needed


def _plan(ids: IdVector, rows: int, size: int) -> _Plan:
    # One block more than n / size rounded down holds all ids. The sum that the last of them
    # leaves open is complete only where another id follows: the second one is padding alone.
    blocks = ids.shape[0] // size + 2
    padding = blocks * size - ids.shape[0]
    ids, entries = in_order(ids)
    ids = jnp.pad(ids, (0, padding), constant_values=rows).reshape(blocks, size)
    entries = jnp.pad(entries, (0, padding)).reshape(blocks, size)
    # The id of the sum that a block leaves open is its last one. In the first block no sum is
    # open, so its own first id stands there, which begins no second sum.
    last = ids[:, -1:]
    open_ids = jnp.concatenate([ids[:1, :1], last[:-1]])
    begins = ids != jnp.concatenate([open_ids, ids[:, :-1]], 1)
    slots = jnp.where(begins, lax.broadcasted_iota(jnp.int32, ids.shape, 1) + 1, 0)
    sum_ids = jnp.concatenate([open_ids, jnp.where(begins, ids, rows)], 1)
    return _Plan(
        entries=entries,
        # Entries of one sum have the slot at which it begins, the greatest so far.
        slots=_running_max(slots),
        ids=jnp.where(sum_ids == last, rows, sum_ids),
        count=jnp.sum(last < rows, dtype=jnp.int32) + 1,
    )


def _running_max(x: jax.Array) -> jax.Array:
    """Return the greatest so far along each line of numbers (k, size), none below 0.

    XLA compiles this loop five times faster than `lax.cummax`, which becomes two kernels for
    each power of two, and runs it two to five times faster (jaxlib 0.12.0): a step of 26 tables
    of bags with Adam takes 1.06 to 1.17 times as long with `cummax`.
    """
    size = x.shape[1]

    def twice_as_far(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        distance, x = carried
        padded = jnp.concatenate([jnp.zeros_like(x), x], 1)
        before = lax.dynamic_slice_in_dim(padded, size - distance, size, 1)
        return 2 * distance, jnp.maximum(x, before)

    start = jnp.int32(1), x
    return lax.while_loop(lambda carried: carried[0] < size, twice_as_far, start)[1]


def rows_in_blocks(
    update: OnRows, tables: Tables, ids: IdVector, values: Rows, size: int
) -> BlockLoop:
    """Return a loop that updates tables with rows as they come, of equal ids too."""
    rows, count = tables[0].shape[0], ids.shape[0]
    size = min(size, count)
    blocks = -(-count // size)
    ids = jnp.pad(ids, (0, (blocks + 1) * size - count), constant_values=rows)

    def block(number: jax.Array, carried: tuple[Tables, None]) -> tuple[Tables, None]:
        first = jnp.minimum(number, blocks) * size
        entries = jnp.minimum(first + lax.iota(jnp.int32, size), count - 1)
        block_ids = lax.dynamic_slice_in_dim(ids, first, size)
        return update(carried[0], block_ids, rows_at(values, entries)), None

    return BlockLoop((tables, None), block, blocks, blocks)
