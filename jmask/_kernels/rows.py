"""Reading and writing a few rows of a large array: the only scatters in jmask.

With `ids` in canonical form (padding = number of rows) and T of shape (V, *row):

    gather_rows(T, ids)      (n, *row): T[ids]; padding reads some valid row
    set_rows(T, ids, rows)   T with T[ids] = rows; padding writes nothing
    add_rows(T, ids, rows)   T with T[ids] += rows; padding writes nothing
    lower_rows(T, ids, rows) T with T[ids] = min(T[ids], rows); padding writes nothing

A padding id reads an existing row, not zeros: arithmetic on what it reads is then the
arithmetic of an ordinary row, so it cannot raise a division by zero that no row has.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.array_types import (
    automatically,
    explicit_sharding,
    placed_like,
    spec_of,
    varying_alike,
)
from jmask._base.row_ids import widen
from jmask._kernels.gather import BITS, Gather, zero_of

_CLIP = lax.GatherScatterMode.CLIP
_DROP = lax.GatherScatterMode.FILL_OR_DROP


def gather_rows(table: jax.Array, ids: jax.Array, *, coalesced: bool = False) -> jax.Array:
    """Rows `table[ids]` (n, *row); padding ids read an arbitrary existing row.

    Args:
        table (V, *row): any array with at least one row.
        ids (n,): canonical ids.
        coalesced: the ids are sorted and, padding apart, unique.
    """
    if table.shape[0] == 0:
        return jnp.zeros((ids.shape[0], *table.shape[1:]), table.dtype)
    gather = Gather.of_rows(table.shape, _CLIP, indices_are_sorted=coalesced)
    return gather(table, ids[:, None])


def ids_after_reading(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """The ids (n,), which XLA takes to depend on what was read: rows (n, *row), or a number.

    It does not order a read before a write at the same place by itself: if nothing that is
    written depends on what is read, it reads from a copy of the whole table.
    """
    read = None if explicit_sharding(ids, rows) is not None else zero_after_reading(rows)
    return ids if read is None else plus_zero(ids, read)


def zero_after_reading(rows: jax.Array) -> jax.Array | None:
    """Integer zeros (n,) that XLA takes to depend on rows (n, *row), or one on a number.

    None if there are no rows, or no integers of their size.
    """
    bits = BITS.get(rows.dtype.itemsize)
    if bits is None or not rows.size:
        return None
    entry = lax.stop_gradient(rows)
    entry = entry.reshape(rows.shape[0], -1)[:, 0] if rows.ndim else entry
    return zero_of(lax.bitcast_convert_type(entry, bits))


def plus_zero(ids: jax.Array, zero: jax.Array) -> jax.Array:
    """The ids, which depend on what integer zeros, one for each or for all, depend on."""
    zeros = jnp.broadcast_to(lax.convert_element_type(zero, ids.dtype), ids.shape)
    return lax.add(*varying_alike(ids, placed_like(zeros, ids)))


def split_rows(
    ids: jax.Array, rows: jax.Array, each: int, count: int, row: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Canonical ids and rows with each row as `each` rows of shape `row`, of `count` in all."""
    first = widen(ids, count)
    if each != 1:
        first = first[:, None] * each + np.arange(each, dtype=first.dtype)[None]
        first = jnp.minimum(first, count).reshape(-1)
    return first, rows.reshape(first.shape[0], *row)


def set_rows(
    table: jax.Array, ids: jax.Array, rows: jax.Array, *, coalesced: bool
) -> jax.Array:
    """`table` with `table[ids] = rows`, in place when the table's buffer may be reused."""
    return _write(lax.scatter, table, ids, rows, coalesced)


def add_rows(
    table: jax.Array, ids: jax.Array, rows: jax.Array, *, coalesced: bool
) -> jax.Array:
    """`table` with `table[ids] += rows`, duplicates summed, in place when possible."""
    return _write(lax.scatter_add, table, ids, rows, coalesced)


def lower_rows(table: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """`table` with `table[ids] = min(table[ids], rows)`, in place when possible."""
    return _write(lax.scatter_min, table, ids, rows, coalesced=False)


def _write(scatter, table, ids, rows, coalesced):
    if table.shape[0] == 0:  # every id is padding, and the transposed gather has no row
        return table
    sharding = explicit_sharding(table, ids, rows)
    if sharding is not None and _is_ambiguous(table, ids, rows):
        write = functools.partial(_write, scatter, coalesced=coalesced)
        return automatically(write, table, ids, rows, like=sharding, spec=spec_of(table))
    if coalesced:
        ids, coalesced = _unique_padding(ids, table.shape[0])
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, table.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    return scatter(
        table,
        ids[:, None],
        rows.astype(table.dtype),
        dimensions,
        indices_are_sorted=coalesced,
        unique_indices=coalesced,
        mode=_DROP,
    )


def _is_ambiguous(table: jax.Array, ids: jax.Array, rows: jax.Array) -> bool:
    """Whether JAX, where axes are explicit, asks where the result is to be."""
    spread = any(spec_of(x)[0] is not None for x in (table, ids, rows))
    return spread or spec_of(table)[1:] != spec_of(rows)[1:]


def _unique_padding(ids: jax.Array, rows: int) -> tuple[jax.Array, bool]:
    """Sorted ids with padding V, V, V made V, V+1, V+2: XLA is promised unique ids.

    Returns the ids and whether the promise can be made (V + n must fit the dtype).
    """
    if rows + ids.shape[0] > jnp.iinfo(ids.dtype).max:
        return ids, False
    position = lax.iota(ids.dtype, ids.shape[0])
    return jnp.where(ids >= rows, rows + position, ids), True
