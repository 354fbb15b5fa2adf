"""A row update as one TPU kernel: rows travel between HBM and the core, and nothing else does.

    ids [7, 2, 9]      read rows 7, 2, 9      compute      write rows 7, 2, 9

XLA's scatter moves the tile of eight rows around each row, 16 rows a round, and waits for each
round; with sorted ids it moves the whole table. Here each row is one DMA of its own in and one
out, and blocks of rows overlap:

    step i      block i is read | block i - 1 is computed | block i - 2 is written

Ids must be unique, so that blocks touch different rows and need no order among each other.
Every table is aliased with its result: a row that no id names is not touched.

What an id names is what a DMA can move by itself, words of 32 bits in whole registers:

    row     a row of a table (V, width), of 32-bit numbers
    line    128 entries of a table (1, V)
    pair    two rows of a 16-bit table (V, width), which share their words: row 2 * i is the
            lower half of the words of pair i, and row 2 * i + 1 the upper half

The kernel has run in Pallas' interpreter and through the TPU compiler, but not yet on a TPU.
`JMASK_KERNELS=0` in the environment gives XLA's scatters instead; `choice` decides.
"""

import itertools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.types import Argument, ArraysFunction, IdVector, Index, TableArray
from jmask._kernels.lines import LANES

# Rows of a block, if they fit: the latency of a DMA, about 1 us, is short against the 5 us in
# which the DMAs of a block are issued, and 16 blocks of 8192 ids overlap well.
_BLOCK = 512
# Bytes of VMEM for all buffers: half of the 16 MiB that a kernel has by default on a v5e.
_VMEM = 8 * 2**20
# Rows whose DMAs are issued in one round of a loop.
_UNROLL = 16
# Rows whose arithmetic is done together: 8 registers for each array of 128 lanes.
_CHUNK = 64

Body = ArraysFunction
Unit = Literal["row", "line", "pair"]


def update(
    body: Body,
    tables: Sequence[jax.Array],
    ids: IdVector,
    rows: Sequence[jax.Array],
    scalars: Sequence[jax.Array] = (),
    *,
    padding_last: bool,
    read: Sequence[int] | None = None,
) -> list[jax.Array]:
    """Apply `body` to the rows `ids` of tables.

    Args:
        body: (*table rows, *rows, *scalars) -> new table rows (b, width), elementwise.
        tables: arrays (V, width) that `accepts` takes; or arrays (1, V), whose lines of 128
            entries are counted by the ids; or one bfloat16 array of an even number of rows, of
            which `body` gets and returns the words (b, width), int32, of pairs of rows.
        ids (n,): int32, canonical and unique, padding apart.
        rows: arrays (n, width).
        scalars: of at most 32 bits.
        padding_last: whether padding comes after all other ids.
        read: positions of the tables on whose old rows `body` depends; all by default.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    count, width = rows[0].shape
    table = tables[0]
    unit: Unit = "row" if table.shape[1] == width else "line"
    unit = "pair" if table.dtype.itemsize == 2 else unit
    padding = table.size * table.dtype.itemsize // (4 * width)
    block = block_size(len(tables) + len(rows), width, count)
    blocks = -(-count // block)
    rows = [_padded(x, blocks * block, 0) for x in rows]
    ids = _padded(ids, blocks * block, padding).reshape(blocks, block)
    valid = jnp.sum(ids < padding, axis=1, dtype=jnp.int32)
    reads = range(len(tables)) if read is None else read
    dtypes, counts = [x.dtype for x in scalars], [len(scalars), len(rows)] + [len(tables)] * 3
    # A scalar that is ready before the ids may get a place between two buffers that would share
    # one, and a step then takes 13 MB of temporaries where it needs 5 (libtpu 0.0.50).
    scalars = [jnp.where(valid[0] >= 0, x, jnp.zeros_like(x)) for x in scalars]
    parts = [ids]
    if not padding_last:
        place = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
        parts = list(lax.sort((ids, place), dimension=1, num_keys=1, is_stable=False))
    # Each step sees the numbers of the block that it reads, and of the one before.
    both = [jnp.pad(x, (ends, (0, 0))) for x in parts for ends in ((0, 1), (1, 0))]
    numbers = jnp.concatenate(both, axis=1)[:, None, :]

    def kernel(valid: Argument, numbers: Argument, *refs: Argument) -> None:
        given = iter(refs)
        take = lambda count: list(itertools.islice(given, count))
        scalar_refs, row_refs, _, table_refs, buffers = map(take, counts)
        semaphores = dict(zip(("read", "write"), given, strict=True))
        members = {"read": reads, "write": range(len(table_refs))}
        step = pl.program_id(0)

        def copy(way: str, t: int, slot: Index, row: Argument, j: Index) -> Argument:
            pair = lambda i: pl.ds(pl.multiple_of(2 * i, 2), 2)
            if unit == "line":
                line = pl.ds(pl.multiple_of(row * LANES, LANES), LANES)
                ends = table_refs[t].at[:, line], buffers[t].at[slot, pl.ds(j, 1)]
            elif unit == "pair":
                ends = table_refs[t].at[pair(row)], buffers[t].at[slot, pair(j)]
            else:
                ends = table_refs[t].at[row], buffers[t].at[slot, j]
            source, target = ends if way == "read" else ends[::-1]
            return pltpu.make_async_copy(source, target, semaphores[way].at[slot])

        def start(way: str, block_number: Index, behind: int) -> None:
            """Start to copy the rows of a block, which is `behind` this step by 0 or 1."""
            slot = lax.rem(block_number, 2)

            def one(q: Index) -> None:
                at = q + behind * block
                j = q if padding_last else numbers[0, 0, 2 * block + at]
                for t in members[way]:
                    copy(way, t, slot, numbers[0, 0, at], j).start()

            def several(first: Index, carry: int) -> int:
                for u in range(_UNROLL):
                    one(first * _UNROLL + u)
                return carry

            def single(q: Index, carry: int) -> int:
                one(q)
                return carry

            count = valid[block_number]
            rounds = lax.div(count, _UNROLL)
            lax.fori_loop(0, rounds, several, 0)
            lax.fori_loop(rounds * _UNROLL, count, single, 0)

        def wait(way: str, block_number: Index) -> None:
            """Wait until the rows of a block are copied."""
            count, slot = valid[block_number], lax.rem(block_number, 2)

            def all_rows() -> None:
                for t in members[way]:  # a semaphore counts bytes: one wait for all
                    rows = buffers[t].at[slot]
                    pltpu.make_async_copy(rows, rows, semaphores[way].at[slot]).wait()

            def row_by_row() -> None:
                def single(q: Index, carry: int) -> int:
                    for t in members[way]:
                        copy(way, t, slot, 0, 0).wait()
                    return carry

                lax.fori_loop(0, count, single, 0)

            lax.cond(count == block, all_rows, row_by_row)

        def compute(block_number: Index) -> None:
            slot = lax.rem(block_number, 2)
            words = [x[0].astype(d) for x, d in zip(scalar_refs, dtypes, strict=True)]

            def chunk(number: Index, carry: int) -> int:
                is_pair = unit == "pair"
                size = 2 * _CHUNK if is_pair else _CHUNK  # rows of a buffer
                place, kept = pl.ds(number * _CHUNK, _CHUNK), pl.ds(number * size, size)
                old = [buffer[slot, kept] for buffer in buffers]
                old = [pltpu.bitcast(x, jnp.int32) if is_pair else x for x in old]
                new = body(*old, *[x[place] for x in row_refs], *words)
                for buffer, x in zip(buffers, new, strict=True):
                    buffer[slot, kept] = pltpu.bitcast(x, buffer.dtype) if is_pair else x
                return carry

            lax.fori_loop(0, block // _CHUNK, chunk, 0)

        def update_block() -> None:
            if reads:
                wait("read", step - 1)
            compute(step - 1)
            start("write", step - 1, 1)

        # A block is read into the buffer from which the block of two steps ago is written.
        pl.when(step >= 2)(lambda: wait("write", step - 2))
        if reads:
            pl.when(step < blocks)(lambda: start("read", step, 0))
        pl.when((step >= 1) & (step <= blocks))(update_block)

    def computed(step: jax.Array, *_: Argument) -> tuple[jax.Array, int]:
        return jnp.clip(step - 1, 0, blocks - 1), 0

    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    one = pl.BlockSpec(memory_space=pltpu.SMEM)
    tables = [_kept_in_hbm(x) for x in tables]
    words = (x.astype(jnp.float32 if x.dtype.itemsize == 2 else x.dtype) for x in scalars)
    arguments = [valid, numbers, *(x.reshape(1) for x in words), *rows, *tables]
    return pl.pallas_call(
        kernel,
        out_shape=[_like(x) for x in tables],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(blocks + 2,),
            in_specs=[
                pl.BlockSpec(
                    (1, *numbers.shape[1:]),
                    lambda step, *_: (jnp.minimum(step, blocks), 0, 0),
                    memory_space=pltpu.SMEM,
                ),
                *[one for _ in scalars],
                *[pl.BlockSpec((block, width), computed) for _ in rows],
                *[in_hbm for _ in tables],
            ],
            out_specs=[in_hbm for _ in tables],
            scratch_shapes=[
                *[
                    pltpu.VMEM((2, block * 4 // x.dtype.itemsize, width), x.dtype)
                    for x in tables
                ],
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={len(arguments) - len(tables) + t: t for t in range(len(tables))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            # All ids that are used are rows of the table; the checks take four times as long
            # as the DMAs themselves.
            disable_bounds_checks=True,
        ),
        name="jmask_update_rows",
    )(*arguments)


def block_size(arrays: int, width: int, count: int) -> int:
    """Return the rows of a block, two of which fit in VMEM for each array; 0 if none do."""
    block = min(_BLOCK, _VMEM // (2 * arrays * width * 4), -(-count // _CHUNK) * _CHUNK)
    return block - block % _CHUNK


def _padded(x: jax.Array, count: int, value: int) -> jax.Array:
    widths = [(0, count - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, widths, constant_values=value)


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return shape and dtype, and in a `shard_map` the axes over which the array varies."""
    shape: jax.ShapeDtypeStruct = jax.eval_shape(lambda x: x, x)
    return shape


def _kept_in_hbm(table: TableArray) -> jax.Array:
    """Keep a table in HBM: XLA would move a small one into the core's memory and back."""
    from jax.experimental.pallas import tpu as pltpu

    kept: jax.Array = pltpu.with_memory_space_constraint(table, pltpu.HBM)
    return kept


def read_lines(table: TableArray, ids: IdVector) -> jax.Array:
    """Read lines (n, 128) of an array (1, V); `ids` (n,) are in range."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    count = ids.shape[0]
    block = block_size(2, LANES, count)
    blocks = -(-count // block)
    ids = _padded(ids, blocks * block, 0).reshape(blocks, 1, block)

    def kernel(
        ids: Argument, table: Argument, lines: Argument, buffer: Argument, semaphores: Argument
    ) -> None:
        step = pl.program_id(0)
        slot, other = lax.rem(step, 2), lax.rem(step + 1, 2)

        def start() -> None:
            def several(first: Index, carry: int) -> int:
                for u in range(_UNROLL):
                    j = first * _UNROLL + u
                    line = pl.ds(pl.multiple_of(ids[0, 0, j] * LANES, LANES), LANES)
                    to = buffer.at[slot, pl.ds(j, 1)]
                    pltpu.make_async_copy(table.at[:, line], to, semaphores.at[slot]).start()
                return carry

            lax.fori_loop(0, block // _UNROLL, several, 0)

        def finish() -> None:
            done = buffer.at[other]
            pltpu.make_async_copy(done, done, semaphores.at[other]).wait()
            lines[...] = done[...]

        pl.when(step < blocks)(start)
        pl.when(step > 0)(finish)

    lines = pl.pallas_call(
        kernel,
        out_shape=_like(jnp.broadcast_to(table[:1, :1], (blocks * block, LANES))),
        grid=(blocks + 1,),
        in_specs=[
            pl.BlockSpec(
                (1, 1, block),
                lambda i: (jnp.minimum(i, blocks - 1), 0, 0),
                memory_space=pltpu.SMEM,
            ),
            pl.BlockSpec(memory_space=pltpu.HBM),
        ],
        out_specs=pl.BlockSpec((block, LANES), lambda i: (jnp.maximum(i - 1, 0), 0)),
        scratch_shapes=[
            pltpu.VMEM((2, block, LANES), table.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True
        ),
        name="jmask_read_lines",
    )(ids, _kept_in_hbm(table))
    return lines[:count]
