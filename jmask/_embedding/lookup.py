"""Embedding lookup: rows of a table by their ids.

    table = [[1, 2],        embedding_lookup(table, [2, 0, 2, -1], padding_id=-1)
             [3, 4],             = [[5, 6], [1, 2], [5, 6], [0, 0]]
             [5, 6]]

It is `table[ids]` with what an embedding needs and indexing leaves open: what an id outside
the table does, ids that are padding, and rows of bounded norm. Under `jmask.grad` its
gradient is a `RowSparse` with one stored row for each id.

With `max_norm` a row r is read as r * min(1, max_norm / |r|), and differentiated so; the
table keeps r.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.array_types import flat, placed_like
from jmask._base.doors import checked_choice, naming_arguments
from jmask._base.shapes import trailing
from jmask._embedding.ids import (
    MODES,
    Entries,
    check_order,
    checked_integers,
    checked_padding,
    checked_table,
    entries_of,
    is_padding,
)
from jmask._embedding.max_norm import Bound, bounded, checked_bound
from jmask._kernels.gather import Gather
from jmask._tables.stored_table import StoredTable, looked_up
from jmask._tensors.methods import install
from jmask._tensors.row_sparse import RowSparse


@naming_arguments(
    padding_idx="write `padding_id`",
    sparse="leave it out, under jmask.grad the gradient is a RowSparse",
)
def embedding_lookup(
    table: Any,
    ids: Any,
    *,
    padding_id: int | None = None,
    mode: str = "fill",
    max_norm: Any = None,
    norm_type: float = 2.0,
) -> jax.Array:
    """The rows of `table` with the given ids.

    Args:
        table (V, *row): an array of any dtype, a `PackedTable` or `ShardedTable`, or a
            `RowSparse`, whose rows that are not stored are zeros.
        ids: integers of any shape and dtype, or a list. Ids below 0 and from V on are
            outside the table: they never wrap.
        padding_id: an id whose lookups give zeros and no gradient, whatever row it names
            in the table, if any, and whatever that row holds. It is never an error.
        mode: what any other id outside the table gives.
            "fill": nan; in integer tables the least number of a signed dtype and the
            greatest of an unsigned one (as `jnp.take`). No gradient.
            "clip": the first or last row, and the gradient goes to that row.
            "zero": zeros, no gradient.
            "raise": an error. Ids that are traced are checked by
            `jax.experimental.checkify`, with which the step must be wrapped; after a
            failed check the row is zeros, without gradient.
        max_norm: rows whose norm is greater are scaled to it, before they are returned;
            the derivative is that of the scaled row. Rows with nan or inf stay as they
            are. A number or a scalar array; the table must be real and floating.
        norm_type: p of the p-norm, > 0; may be `math.inf`.

    Returns:
        The rows (*ids.shape, *row), in the dtype of the table.

    Raises:
        IndexError: in mode "raise", for concrete ids outside the table.
        TypeError: if `ids` are not integers, `padding_id` is no int, `table` is sparse
            but no `RowSparse`, or `max_norm` meets a table that is not real and floating.
        ValueError: if `table` is a scalar, `mode` is not one of the above, `max_norm` or
            `norm_type` is not positive, or "clip" meets a table without rows.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> table = jnp.array([[1., 2.], [3., 4.], [5., 6.]])
        >>> jmask.embedding_lookup(table, [2, 0, -1], padding_id=-1)
        Array([[5., 6.],
               [1., 2.],
               [0., 0.]], dtype=float32)
        >>> jmask.embedding_lookup(jnp.array([[3., 4.]]), [0], max_norm=2.5)
        Array([[1.5, 2. ]], dtype=float32)
    """
    check_order(table, ids, "embedding_lookup(table, ids)")
    table, mode = checked_table(table), checked_choice(mode, "mode", MODES)
    ids = checked_integers(ids, "ids", mode)
    absent = is_padding(ids, checked_padding(padding_id))
    bound = checked_bound(table, max_norm, norm_type)
    return looked_up_rows(table, entries_of(ids, absent, mode, table.shape), bound)


def looked_up_rows(table: Any, entries: Entries, bound: Bound | None) -> jax.Array:
    """The rows that the entries read: (*entries, *row), no longer than the bound."""
    positions, outside = entries.positions, entries.outside
    if isinstance(table, RowSparse):
        table, positions = _stored(table, positions)
    elif entries.absent is None and outside is not None:
        # Then everything without a row is outside, and the gather itself can fill it in.
        return bounded(_gathered(table, positions, None), positions.ndim, bound)
    rows = _gathered(table, positions, 0)
    if outside is not None and positions.size:
        rows = jnp.where(trailing(outside, rows.ndim), _missing(rows.dtype), rows)
    return bounded(rows, positions.ndim, bound)


def _stored(table: RowSparse, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The stored rows of `table`, and where among them each position is (or how many)."""
    table = table.coalesce()
    stored = table.row_ids()
    places = jnp.searchsorted(stored, positions).astype(stored.dtype)
    if not table.nse:
        return table.values, places
    found = stored[jnp.minimum(places, table.nse - 1)] == positions
    # Both the padding of the table and that of the ids are V, and found, but no row.
    found &= positions < table.shape[0]
    return table.values, jnp.where(found, places, table.nse)


def _gathered(source: Any, positions: jax.Array, fill: int | None) -> jax.Array:
    """Rows `source[positions]`; where a position is len(source), `fill` without gradient.

    None fills with what stands for a row that does not exist.
    """
    row = source.shape[1:]
    if source.shape[0] == 0:
        value = _missing(source.dtype) if fill is None else fill
        return jnp.full((*positions.shape, *row), value, source.dtype)
    if isinstance(source, StoredTable):
        rows = looked_up(source, flat(positions)).reshape(*positions.shape, *row)
        rows = placed_like(rows, positions)
        if fill is not None:
            return rows
        outside = trailing(positions == source.shape[0], rows.ndim)
        return jnp.where(outside, _missing(rows.dtype), rows)
    # Not `source.at[positions].get(...)`: like `jnp.where`, it drops what has no entries,
    # and JAX then gives a table that is looked up for nothing a gradient of dense zeros.
    fills = lax.GatherScatterMode.FILL_OR_DROP
    gather = Gather.of_rows(source.shape, fills, positions.ndim, fill_value=fill)
    return gather(source, positions[..., None])


def _missing(dtype: Any) -> np.ndarray:
    """What stands for a row that does not exist, as in `jnp.take`."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(jnp.nan, dtype)
    if dtype == jnp.dtype(bool):
        return np.asarray(True)
    limits = jnp.iinfo(dtype)
    return np.asarray(limits.min or limits.max, dtype)


install(lookup=embedding_lookup)
