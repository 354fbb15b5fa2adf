"""Find the row that each id reads, and what is read where there is no row.

For a table of V rows an id is *padding* (asked to be), *outside* (no row of the table), or
a row. Padding comes first: it may be any number, inside the table or not.

    V = 3, padding_id = 0        ids [2, 0, 7, -1]

    mode      positions      row read               gradient goes to
    fill      [2, V, V, V]   row 2, 0, nan, nan     row 2
    zero      [2, V, V, V]   row 2, 0, 0, 0         row 2
    clip      [2, V, 2, 0]   row 2, 0, row 2, row 0 rows 2, 2 and 0
    raise     [2, V, V, V]   an error               row 2

A position is a row of the table, or V, which reads nothing and trains nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.experimental.sparse import JAXSparse

from jmask._base.row_ids import canonical, id_dtype, widen
from jmask._base.types import HostArray, Ids, Mask, Table, TensorLike
from jmask._base.validation import abstract_leaf, as_table, checked_integer
from jmask._tables.stored_table import StoredTable
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import RowSparse

MODES = ("fill", "clip", "zero", "raise")


class Entries(NamedTuple):
    """The rows to be read, one for each id; arrays of the shape of the ids.

    Attributes:
        positions: rows of the table, or V.
        absent: where an id counts as not being there, its row zero; None for nowhere.
        outside: where a row is to be nan; None for nowhere.
    """

    positions: jax.Array
    absent: jax.Array | None
    outside: jax.Array | None


def entries_of(
    ids: Ids, absent: jax.Array | None, mode: str, shape: tuple[int, ...]
) -> Entries:
    """Find what `checked_integers` read in a table; `absent` says which of them are padding."""
    rows = shape[0]
    if mode == "raise":
        positions = _refusing(ids, absent, shape)
        return Entries(positions, positions == rows, None)
    if mode == "clip":
        if rows == 0 and ids.size:
            raise ValueError(
                f"`mode` 'clip' has no row to clip to in a table of shape {shape}."
            )
        positions = jnp.clip(narrowed(ids, rows), 0, max(rows - 1, 0))
        positions = positions if absent is None else jnp.where(absent, rows, positions)
        return Entries(positions, absent, None)
    positions = positions_of(ids, absent, rows)
    if mode == "zero":
        return Entries(positions, absent, None)
    outside = positions == rows
    return Entries(positions, absent, outside if absent is None else outside & ~absent)


def _refusing(ids: Ids, absent: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """Return the positions of ids; raise if one that is not padding is out of range."""
    if not isinstance(ids, jax.core.Tracer) and not isinstance(absent, jax.core.Tracer):
        _refuse_concrete(np.asarray(ids), absent, shape)
        return positions_of(ids, absent, shape[0])
    at = f"[{', '.join(['{}'] * ids.ndim)}]" if ids.ndim else ""
    message = f"`ids{at}` is {{id}}, which is no row of the table of shape {shape}"

    def checked(ids: jax.Array, absent: jax.Array | None) -> jax.Array:
        positions = positions_of(ids, absent, shape[0])
        wrong = positions == shape[0]
        wrong = wrong if absent is None else wrong & ~absent
        if ids.size:
            first = jnp.argmax(wrong.reshape(-1))
            where = jnp.unravel_index(first, ids.shape)
            checkify.check(~wrong.any(), message, *where, id=ids.reshape(-1)[first])
        return positions

    # JAX drops an effect without outputs from the body of a scan that it differentiates.
    # An equation whose output is used it keeps, with the effect inside.
    return jax.checkpoint(checked)(_in_jax(ids), absent)


def positions_of(ids: Ids, absent: jax.Array | None, rows: int) -> jax.Array:
    """Return the rows that ids read, `rows` where they read none or are absent."""
    positions = canonical(narrowed(ids, rows), rows)
    return positions if absent is None else jnp.where(absent, rows, positions)


def _refuse_concrete(ids: HostArray, absent: jax.Array | None, shape: tuple[int, ...]) -> None:
    wrong = (ids < 0) | (ids >= shape[0])
    if absent is not None:
        wrong &= ~np.asarray(absent)
    if not wrong.any():
        return
    first = np.argwhere(wrong)[0]
    at = f"[{', '.join(map(str, first))}]" if ids.ndim else ""
    raise IndexError(
        f"`ids{at}` is {ids[tuple(first)]}, which is no row of the table of shape {shape} "
        f"({wrong.sum()} such in all). Ids that are to be left out can be given as "
        "`padding_id`; for other choices see `mode`."
    )


def narrowed(ids: Ids, rows: int) -> jax.Array:
    """Cast integers to `id_dtype(rows)`; below 0 stays below, above `rows` above.

    NumPy integers may be wider than JAX holds (64 bits while x64 is disabled).
    """
    if isinstance(ids, np.ndarray):
        limits = np.iinfo(ids.dtype)
        ids = np.clip(ids, max(-1, limits.min), min(rows, limits.max))
        return jnp.asarray(ids.astype(id_dtype(rows)))
    return widen(ids, rows)


def _in_jax(ids: Ids) -> jax.Array:
    """Return integers as a JAX array, clipped to the limits of its widest dtype."""
    wide = isinstance(ids, np.ndarray) and ids.dtype.itemsize == 8
    if wide and not jax.config.read("jax_enable_x64"):
        limits = np.iinfo(np.int32)
        least = max(limits.min, np.iinfo(ids.dtype).min)
        ids = np.clip(ids, least, limits.max).astype(np.int32)
    return jnp.asarray(ids)


def is_padding(ids: Ids, padding_id: object) -> Mask | None:
    """Find which of the ids are `padding_id`, in NumPy for NumPy's; None if none can be."""
    if padding_id is None:
        return None
    number, limits = checked_integer("padding_id", padding_id), jnp.iinfo(ids.dtype)
    return ids == np.asarray(number, ids.dtype) if limits.min <= number <= limits.max else None


def check_order(table: object, ids: object, order: str) -> None:
    """Refuse ids in the place of the table, where torch has them."""
    first, second = abstract_leaf(table), abstract_leaf(ids)
    integers = isinstance(table, list) or (
        first is not None and jnp.issubdtype(first.dtype, jnp.integer)
    )
    is_table = isinstance(ids, RowSparse | StoredTable)
    floating = second is not None and jnp.issubdtype(second.dtype, jnp.inexact)
    if is_table or (integers and floating):
        kind = type(ids).__name__ if second is None else second.dtype
        raise TypeError(f"`ids` must be integers, got {kind}: the order is {order}.")


def checked_integers(x: TensorLike, name: str, mode: str) -> Ids:
    """Return `x` as a NumPy or JAX array of integers.

    NumPy arrays and lists stay NumPy, so that 64-bit ids are not cut to 32 bits. In mode
    "raise" all that is concrete becomes NumPy: under a trace, JAX makes even of a
    comparison of two constants a value that cannot be looked at.
    """
    if isinstance(x, MaskedTensor):
        raise TypeError(
            f"`{name}` is a MaskedTensor: fill what is masked with an id, "
            f"`{name}.to_tensor(-1)`, and give that id as `padding_id`."
        )
    given = x
    if not isinstance(x, jax.Array) or (mode == "raise" and not isinstance(x, jax.core.Tracer)):
        try:
            x = np.asarray(x)
        except ValueError:
            raise ValueError(
                f"`{name}` are lists of different lengths: fill them up with one id and give "
                "it as `padding_id`, or give embedding_bag one list and `offsets`."
            ) from None
        if x.size == 0 and x.dtype == float:  # what NumPy makes of an empty list
            x = x.astype(np.int32)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        kind = type(given).__name__ if x.dtype == object else x.dtype
        raise TypeError(f"`{name}` must be integers, got {kind}.")
    return x


def checked_table(table: object) -> Table:
    """Return the table as a JAX array with rows, a `RowSparse` or a `StoredTable`."""
    if isinstance(table, RowSparse | StoredTable):
        return table
    if isinstance(table, JAXSparse | MaskedTensor):
        dense = "to_tensor(0)" if isinstance(table, MaskedTensor) else "todense()"
        raise TypeError(
            "`table` must be an array or a jmask.RowSparse, got "
            f"{type(table).__name__}: pass `table.{dense}`."
        )
    table = as_table(table)
    if table.ndim == 0:
        raise ValueError("`table` must have a dimension of rows, got a scalar.")
    return table
