"""Choose which row updates run as the kernel of `row_updates`; XLA does the others.

float32[V, 128], ids int32, p - lr * g       the kernel
bfloat16[V, 128], new rows to be written     the kernel, by pairs of rows
float32[V, 64]                               XLA's scatters
p - lr * cbrt(g)                             XLA's scatters: Pallas does not lower `cbrt`

All is decided where a program is lowered, by the shapes, the operations and the switch
`JMASK_KERNELS` (see `switched_on`). Importing this lowers `WRITE` and `READ` of `rows`.
"""

import functools
import math
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jmask._base.array_types import at_most, is_known
from jmask._base.fallback import LARGE
from jmask._base.forms import aval_of, name_of
from jmask._base.jaxprs import ON_SCALARS, bound, inlined, only_arithmetic
from jmask._base.lowering import lower, switched_on
from jmask._base.row_ids import Order
from jmask._base.types import DType, IdVector, RowArray, Shaped, TableArray
from jmask._kernels import tuning
from jmask._kernels._tpu.row_updates import block_size, read_lines, update
from jmask._kernels.lines import LANES, has_narrow_rows, inserted, joined_in_lines, picked
from jmask._kernels.rows import (
    READ,
    WRITE,
    Kind,
    entries_of,
    gather_rows,
    read_rows,
    scattered,
    sorted_with,
)

_WORDS = {jnp.dtype(x) for x in ("float32", "int32", "uint32")}
_GIVEN = {*_WORDS, jnp.dtype("bfloat16")}
_COMPUTED = {*_GIVEN, jnp.dtype(bool)}
# Pallas lowers the others for all generations (jax 0.12); tests/accelerators compile each.
_LOWERED = ON_SCALARS - {"cbrt", "expm1"}


@functools.cache
def warn_if_copied(shape: tuple[int, ...], dtype: DType) -> None:
    """Warn, once for each shape, of a large table whose rows are not whole lines."""
    if has_narrow_rows(shape) and at_most(LARGE, math.prod(shape) * dtype.itemsize):
        warnings.warn(
            f"on a TPU a step copies a table {dtype}{list(shape)} or keeps it transposed: its "
            "rows are not lines of 128 entries. `jmask.packed(table)` keeps them in such "
            "lines.",
            stacklevel=2,
        )


def sorted_pays(table: Shaped, ids: Shaped) -> bool:
    """Decide whether a TPU gains by the promise of sorted ids."""
    rows, count = table.shape[0], ids.shape[0]
    return is_known(rows, count) and rows <= tuning.SORTED_PAYS * count


def accepts(
    tables: Sequence[Shaped],
    ids: IdVector,
    rows: Sequence[jax.Array],
    scalars: Sequence[jax.Array] = (),
    program: Jaxpr | None = None,
) -> bool:
    """Decide whether the kernel can be used, by the switch, the shapes and the arithmetic.

    `program` is the arithmetic on single entries; None if it is an addition or a copy.
    """
    return (
        _fits(tables[0], ids, len(tables) + len(rows))
        and all(x.dtype in _WORDS for x in tables)
        and all(x.dtype in _GIVEN for x in (*rows, *scalars))
        and (program is None or _is_lowered(program))
    )


def _fits(table: Shaped, ids: IdVector, arrays: int) -> bool:
    return (
        switched_on()
        # Mosaic (JAX 0.12) lowers Python numbers to 64 bits then, which do not fit int32 ids.
        and not jax.config.read("jax_enable_x64")
        # XLA keeps other widths transposed or padded, and would copy the table for the kernel.
        and table.ndim == 2
        and table.shape[1] % LANES == 0
        and ids.dtype == jnp.int32
        and is_known(*table.shape, *ids.shape)
        and ids.shape[0] > 0
        and block_size(arrays, table.shape[1], ids.shape[0]) > 0
    )


def _is_lowered(program: Jaxpr) -> bool:
    """Decide whether Pallas lowers all equations for all generations of TPUs."""
    variables = (v for eqn in inlined(ClosedJaxpr(program, ())).jaxpr.eqns for v in eqn.outvars)
    are_computed = all(aval_of(v).dtype in _COMPUTED for v in variables)
    return are_computed and only_arithmetic(program, _LOWERED)


def bound_in_kernel(eqn: JaxprEqn, inputs: list[jax.Array]) -> list[jax.Array]:
    """Bind an equation of a program that `accepts` took, in operations that Pallas lowers."""
    if name_of(eqn) != "sign":
        return bound(eqn, inputs)
    # Pallas asks which chip it is on, and ahead of time there is none.
    (x,) = inputs
    one = jnp.ones((), x.dtype)
    return [jnp.where(x > 0, one, jnp.where(x < 0, -one, x))]


# --- rows that are less than a register: 16-bit ones, and single entries ---------------------


def _written_by_xla(
    table: TableArray, ids: IdVector, rows: RowArray, *, kind: Kind, order: Order
) -> list[jax.Array]:
    pays = order == "sorted" and sorted_pays(table, ids)
    return [scattered(table, ids, rows, kind, "sorted" if pays else "any")]


def _written_on_a_tpu(
    table: TableArray, ids: IdVector, rows: RowArray, *, kind: Kind, order: Order
) -> list[jax.Array]:
    is_sorted = order == "sorted"
    if _is_in_lines(table, ids):
        if not is_sorted:
            _, row = sorted_with(ids, rows.reshape(ids.shape))
            ids, _ = sorted_with(ids, entries_of(ids))  # as the rows were read
            rows = row.reshape(rows.shape)
        return [_written_in_lines(table, ids, rows, kind)]
    # libtpu takes no float16 into kernels (0.0.50), and a cast to its bits copies the table.
    has_pairs = table.dtype == jnp.bfloat16 and table.shape[0] % 2 == 0
    if is_sorted and has_pairs and _fits(table, ids, 3):
        return [_written_in_pairs(table, ids, rows, kind)]
    if not accepts([table], ids, [rows]):
        return _written_by_xla(table, ids, rows, kind=kind, order=order)
    if kind == "set":
        body, read = lambda old, new: [new], []
    else:
        body, read = lambda old, step: [old + step], [0]
    return update(body, [table], ids, [rows], padding_last=is_sorted, read=read)


# --- rows of 16 bits ---------------------------------------------------------------------


def _written_in_pairs(
    table: TableArray, ids: IdVector, rows: RowArray, kind: Kind
) -> jax.Array:
    """Write rows of a 16-bit table (V, width), which share words of 32 bits in pairs."""
    if kind == "add":
        rows = gather_rows(table, ids, coalesced=True) + rows
    bits = lax.bitcast_convert_type(rows, jnp.uint16).astype(jnp.int32)
    is_upper = (ids % 2 == 1)[:, None]
    words = jnp.where(is_upper, bits << 16, bits)
    mask = jnp.where(is_upper, jnp.int32(-(2**16)), jnp.int32(2**16 - 1))
    target, words, mask = joined_in_lines(ids // 2, table.shape[0] // 2, 2, words, mask)
    (table,) = update(
        lambda old, new, mask: [(old & ~mask) | new],
        [table],
        target,
        [words, jnp.broadcast_to(mask, words.shape)],
        padding_last=False,
    )
    return table


# --- one entry for each row --------------------------------------------------------------

# On a TPU an array (V, 1) lies in memory as V entries in a row. XLA's gathers and scatters copy
# it to shape (V,) first. A reshape to (1, V) copies nothing, and of that the kernels read and
# write lines of 128 entries.


def _is_in_lines(table: TableArray, ids: IdVector) -> bool:
    """Decide whether a table (V, 1, ..., 1) is read and written by lines on a TPU."""
    in_one_row = jax.ShapeDtypeStruct((1, LANES), table.dtype)
    return (
        table.ndim > 1
        and is_known(*table.shape)
        and table.size == table.shape[0] >= LANES  # a line that is read lies in the table
        and not sorted_pays(table, ids)
        and accepts([in_one_row], ids, [])
    )


def _written_in_lines(
    table: TableArray, ids: IdVector, rows: RowArray, kind: Kind
) -> jax.Array:
    n, whole = ids.shape[0], table.shape[0] // LANES
    lines, old = _lines_and_entries(table, ids)
    new = rows.reshape(n) + old if kind == "add" else rows.reshape(n)
    line, lines = inserted(lines, ids, new, table.shape[0])
    (flat,) = update(
        lambda old, new: [new],
        [table.reshape(1, -1)],
        line,
        [lines],
        padding_last=False,
        read=[],
    )
    rest = table.shape[0] - whole * LANES
    if rest:  # the entries behind the last whole line, which the kernel has not written
        (new,) = lax.dynamic_slice_in_dim(lines, jnp.argmax(line == whole), 1)
        numbers = whole * LANES + lax.iota(ids.dtype, rest)
        is_new = jnp.any(ids[:, None] == numbers[None], axis=0)
        # Read by itself: XLA would copy what a fusion reads and writes in part.
        old, flat = lax.optimization_barrier((flat[0, whole * LANES :], flat))
        last = jnp.where(is_new, new[:rest], old)
        flat = lax.dynamic_update_slice(flat, last[None], (0, whole * LANES))
    return flat.reshape(table.shape)


def _lines_and_entries(table: TableArray, ids: IdVector) -> tuple[jax.Array, jax.Array]:
    """Read the lines (n, 128) of ids in a table (V, 1, ..., 1), and their entries (n,).

    Entries that fill no whole line are read apart; their line is the one before.
    """
    line, whole = ids // LANES, table.shape[0] // LANES
    lines = read_lines(table.reshape(1, -1), jnp.minimum(line, whole - 1))
    entries = picked(lines, ids % LANES, 1)
    if table.shape[0] % LANES:
        last = lax.slice_in_dim(table, whole * LANES, None).reshape(-1)
        last = jnp.pad(last, (0, LANES - last.size))
        of_last = picked(jnp.broadcast_to(last, lines.shape), ids % LANES, 1)
        entries = jnp.where((line == whole)[:, None], of_last, entries)
    return lines, entries.reshape(-1)


def _read_on_a_tpu(table: TableArray, ids: IdVector, *, order: Order) -> list[jax.Array]:
    if not _is_in_lines(table, ids):
        return read_rows(table, ids, order=order)
    # Sorted as `_written_on_a_tpu` sorts them, so that XLA reads the lines once for both.
    entry = entries_of(ids)
    if order != "sorted":
        ids, entry = sorted_with(ids, entry)
    _, entries = _lines_and_entries(table, ids)
    if order != "sorted":
        _, entries = sorted_with(entry, entries)
    return [entries.reshape(-1, *table.shape[1:])]


lower(WRITE, _written_on_a_tpu, _written_by_xla, platform="tpu")
lower(READ, _read_on_a_tpu, read_rows, platform="tpu")
