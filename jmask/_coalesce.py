"""Coalescing: sorted unique row ids with the values of equal ids summed.

    ids    [4, 1, 4, V]            ids    [1, 4, V, V]
    values [a, b, c, -]     ->     values [b, a + c, 0, 0]

Sizes are static: n entries coalesce into min(n, V) slots, which always suffice, and the
slots left over are padding. Equal ids are summed in the order in which they came, so the
result does not depend on how a sort breaks ties; float16 and bfloat16 are summed in
float32 and rounded once.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jmask._rows import add_rows


def coalesce_rows(
    ids: jax.Array, values: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Coalesce entries into min(n, rows) slots.

    Args:
        ids (n,): canonical ids.
        values (n, *row): one row for each id; ignored where the id is padding.
        rows: V, the number of rows of the table.

    Returns:
        ids (m,), sorted, unique, padding last, and values (m, *row), zero at padding.
    """
    count = ids.shape[0]
    slots = min(count, rows)
    if slots == 0:
        return ids[:0], values[:0]
    slot_ids, slot_of_entry = _unique_slots(ids, slots, rows)
    wide = _accumulator_dtype(values.dtype)
    zeros = jnp.zeros((slots, *values.shape[1:]), wide)
    summed = add_rows(zeros, slot_of_entry, values.astype(wide), coalesced=False)
    return slot_ids, summed.astype(values.dtype)


def _unique_slots(ids: jax.Array, slots: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """The sorted unique ids (slots,), and for each entry (n,) the slot it belongs to.

    Entries whose id is padding get slot = `slots`, which writes drop.
    """
    position = lax.iota(jnp.int32, ids.shape[0])
    ordered, order = lax.sort((ids, position), num_keys=1, is_stable=True)
    starts = jnp.concatenate([jnp.ones((1,), bool), ordered[1:] != ordered[:-1]])
    slot = jnp.cumsum(starts, dtype=jnp.int32) - 1
    slot = jnp.where(ordered < rows, slot, slots)
    slot_ids = jnp.full((slots,), rows, ids.dtype).at[slot].set(ordered, mode="drop")
    slot_of_entry = jnp.zeros_like(slot).at[order].set(slot, unique_indices=True)
    return slot_ids, slot_of_entry


def _accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype
