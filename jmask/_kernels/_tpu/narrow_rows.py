"""Rows read and written on TPUs that are less than a register: 16-bit ones, and single entries.

Importing this lowers `WRITE` and `READ` of `rows` for TPUs.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.lowering import lower
from jmask._base.row_ids import Order
from jmask._base.types import IdVector, RowArray, TableArray
from jmask._kernels._tpu.choice import accepts, accepts_pairs, sorted_pays
from jmask._kernels._tpu.row_updates import read_lines, update
from jmask._kernels.lines import LANES, inserted, joined_in_lines, picked
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
    if is_sorted and accepts_pairs(table, ids):
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
        and table.size == table.shape[0]
        and not sorted_pays(table, ids)
        and accepts([in_one_row], ids, [])
    )


def _written_in_lines(
    table: TableArray, ids: IdVector, rows: RowArray, kind: Kind
) -> jax.Array:
    n, start = ids.shape[0], table.shape[0] // LANES * LANES
    lines, old = _lines_and_entries(table, ids)
    new = rows.reshape(n) + old if kind == "add" else rows.reshape(n)
    line, lines = inserted(lines, ids, new, start)
    (flat,) = update(
        lambda old, new: [new],
        [table.reshape(1, -1)],
        line,
        [lines],
        padding_last=False,
        read=[],
    )
    rest, rest_ids = _last_line(table, ids)
    if not rest.shape[0]:
        return flat.reshape(table.shape)
    # Ids are sorted: those in the last, partial line come right before the padding.
    few = min(n, LANES)
    first = jnp.maximum(jnp.sum(ids < table.shape[0], dtype=jnp.int32) - few, 0)
    rest_ids, new = (lax.dynamic_slice_in_dim(x, first, few) for x in (rest_ids, new))
    new = new.reshape(few, *table.shape[1:])
    rest = scattered(rest, rest_ids, new, "set", "any")
    return lax.dynamic_update_slice_in_dim(flat.reshape(table.shape), rest, start, axis=0)


def _last_line(table: TableArray, ids: IdVector) -> tuple[jax.Array, jax.Array]:
    """Return the entries of a table (V, 1, ..., 1) that fill no line, and the ids in them."""
    start = table.shape[0] // LANES * LANES
    rest = lax.slice_in_dim(table, start, None)
    return rest, jnp.where(ids < start, rest.shape[0], ids - start)


def _lines_and_entries(table: TableArray, ids: IdVector) -> tuple[jax.Array, jax.Array]:
    """Read the lines (n, 128) of ids in a table (V, 1, ..., 1), and their entries (n,)."""
    line = jnp.minimum(ids // LANES, table.shape[0] // LANES - 1)
    lines = read_lines(table.reshape(1, -1), line)
    entries = picked(lines, ids % LANES, 1).reshape(-1)
    rest, rest_ids = _last_line(table, ids)
    if not rest.shape[0]:
        return lines, entries
    is_rest = rest_ids < rest.shape[0]
    return lines, jnp.where(is_rest, gather_rows(rest, rest_ids).reshape(-1), entries)


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
