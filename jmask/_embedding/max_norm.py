"""Rows of bounded norm: scaled while they are read, or scaled in the table.

    row [3, 4], max_norm 2.5     ->     [1.5, 2]      a row no longer than that: itself

`embedding_lookup(max_norm=...)` reads a row r as r * min(1, max_norm / |r|) and leaves the
table alone; the derivative is that of the scaled row. `renormalize` is torch's way: it
writes the scaled rows into the table before they are looked up.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.doors import shown
from jmask._base.norms import shortened
from jmask._base.precision import wide
from jmask._base.row_ids import canonical
from jmask._embedding.ids import (
    checked_integers,
    checked_padding,
    checked_table,
    is_padding,
    narrowed,
)
from jmask._kernels.coalesce import unique_slots
from jmask._kernels.rows import gather_rows, set_rows
from jmask._tables.stored_table import is_stored_table
from jmask._tensors.row_sparse import RowSparse


def renormalize(
    table: Any,
    ids: Any,
    max_norm: Any,
    *,
    norm_type: float = 2.0,
    padding_id: int | None = None,
) -> jax.Array:
    """The table with the rows `ids` shortened to `max_norm` where their norm is greater.

    What torch's `Embedding(max_norm=...)` does to its weight before each lookup. It costs
    O(ids) and works in place where the table is donated (`jax.jit(..., donate_argnums)`).
    Call it before the loss: the gradient of a loss that contains it is dense.

    Args:
        table (V, *row): a real, floating array.
        ids: integers of any shape and dtype; ids outside the table touch nothing, and an
            id that is there twice counts once.
        max_norm: the greatest norm allowed; a number or a scalar array.
        norm_type: p of the p-norm, > 0; may be `math.inf`.
        padding_id: an id whose row, if it has one, is left alone.

    Returns:
        The table: row r of `ids` is r * max_norm / (|r| + 1e-7) where |r| > max_norm, and
        every other row is what it was, bit for bit. Rows with nan or inf are left alone.

    Raises:
        TypeError: if `ids` are not integers, `padding_id` is no int, or `table` is not a
            real floating array.
        ValueError: if `table` is a scalar, or `max_norm` or `norm_type` is not positive.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> table = jnp.array([[3., 4.], [6., 8.], [30., 40.]])
        >>> jmask.renormalize(table, [0, 1, 1], 5.)
        Array([[ 3.,  4.],
               [ 3.,  4.],
               [30., 40.]], dtype=float32)
    """
    table, ids = checked_table(table), checked_integers(ids, "ids", "zero")
    if isinstance(table, RowSparse):
        raise TypeError("`table` must be an array, got RowSparse: pass `table.todense()`.")
    if is_stored_table(table):
        raise TypeError(
            f"`table` must be an array, got {type(table).__name__}: bound its rows after each "
            "update with jmask.max_row_norm, or as they are read with "
            "jmask.embedding_lookup(table, ids, max_norm=...)."
        )
    bound = checked_bound(table, max_norm, norm_type)
    if bound is None:
        raise ValueError("`max_norm` must be a positive number, got None.")
    count = table.shape[0]
    positions = canonical(narrowed(ids, count), count).reshape(-1)
    absent = is_padding(ids, checked_padding(padding_id))
    if absent is not None:
        positions = jnp.where(absent.reshape(-1), count, positions)
    slots = min(count, positions.shape[0])
    if slots == 0:
        return table
    slot_ids, _ = unique_slots(positions, slots, count)
    rows = gather_rows(table, slot_ids, coalesced=True)
    shorter = bound.shortened(rows, 1, eps=1e-7)
    return set_rows(table, slot_ids, shorter, coalesced=True)


@dataclasses.dataclass(frozen=True)
class Bound:
    """The greatest norm that a row may have.

    Attributes:
        max_norm: a positive scalar.
        norm_type: p of the norm.
    """

    max_norm: jax.Array
    norm_type: float

    def shortened(self, rows: jax.Array, batch: int, eps: float = 0.0) -> jax.Array:
        """Rows after `batch` axes, those that are finite and too long scaled; dtype kept."""
        exact = rows.astype(wide(rows.dtype))
        axes = tuple(range(batch, rows.ndim))
        finite = jnp.isfinite(lax.stop_gradient(exact)).all(axes, keepdims=True)
        safe = jnp.where(finite, exact, 0)
        new = shortened(safe, self.max_norm, self.norm_type, batch, eps).astype(rows.dtype)
        return jnp.where(finite, new, rows)


def bounded(rows: jax.Array, batch: int, bound: Bound | None) -> jax.Array:
    """Rows after `batch` dimensions of entries, those that are too long scaled."""
    return rows if bound is None else bound.shortened(rows, batch)


def checked_bound(table: Any, max_norm: Any, norm_type: Any) -> Bound | None:
    """The bound on the norms, or None if `max_norm` is None.

    Raises:
        TypeError: if the table is not real and floating, or an argument is no number.
        ValueError: if an argument is not positive.
    """
    traced = isinstance(norm_type, jax.core.Tracer)
    if traced or not isinstance(norm_type, int | float) or isinstance(norm_type, bool):
        raise TypeError(f"`norm_type` must be a Python number, got {norm_type!r}.")
    if not norm_type > 0:
        raise ValueError(f"`norm_type` must be positive, got {norm_type}.")
    if max_norm is None:
        return None
    if not jnp.issubdtype(table.dtype, jnp.floating):
        raise TypeError(f"`max_norm` needs a real, floating `table`, got {table.dtype}.")
    if not isinstance(max_norm, jax.core.Tracer):
        number = np.asarray(max_norm)
        kind = number.dtype
        is_real = jnp.issubdtype(kind, jnp.integer) or jnp.issubdtype(kind, jnp.floating)
        if number.ndim or not is_real:
            raise TypeError(f"`max_norm` must be a number, got {shown(max_norm)}.")
        if not (number > 0 and np.isfinite(number)):
            raise ValueError(f"`max_norm` must be positive and finite, got {max_norm}.")
    return Bound(jnp.asarray(max_norm, wide(table.dtype)), norm_type)
