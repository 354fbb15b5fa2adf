"""Embedding lookup: rows of a table by their ids.

    table = [[1, 2],        embedding_lookup(table, [2, 0, 2, -1], padding_id=-1)
             [3, 4],             = [[5, 6], [1, 2], [5, 6], [0, 0]]
             [5, 6]]

It is `table[ids]` with what an embedding needs and indexing leaves open: what an id outside
the table does, ids that are padding, and rows of bounded norm. Under `jmask.grad` its
gradient is a `RowSparse` with one stored row for each id.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import checkify
from jax.experimental.sparse import JAXSparse
from jax.typing import DTypeLike

from jmask._base.array_types import fewer, real_dtype, trailing, wide
from jmask._base.row_ids import COLUMNS, canonical, position_of, widen
from jmask._base.shardings import Shards, explicit_mesh, on_every_device, spec_of
from jmask._base.types import Argument, HostArray, Ids, Numbers, Scalar, Shape, Table
from jmask._base.validation import (
    as_table,
    check_flag,
    checked_choice,
    checked_integer,
    checked_scalar,
    naming_arguments,
)
from jmask._kernels import sharded_rows
from jmask._kernels.coalesce import unique_slots
from jmask._kernels.lines import LANES, rows_of_lines
from jmask._kernels.rows import gather_rows, rows_or_fill, set_rows
from jmask._kernels.sharded_rows import excess_of
from jmask._ops.formulas import shortened
from jmask._tables.packed import slot_of
from jmask._tables.quantized import QuantizedRows
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import stored_at

# --- ids -----------------------------------------------------------------------------------
#
# Each id becomes the position of the row that it reads, below V for a table of V rows. V reads
# nothing and trains nothing. Padding is found first: its id may be one of a row, or none.
#
#     V = 3, padding_id = 0        ids [2, 0, 7, -1]
#
#     mode      positions      row read
#     fill      [2, V, V, V]   row 2, 0, nan, nan
#     zero      [2, V, V, V]   row 2, 0, 0, 0
#     clip      [2, V, 2, 0]   row 2, 0, row 2, row 0
#     raise     [2, V, V, V]   an error

MODES = ("fill", "clip", "zero", "raise")
AnyTable = Table | QuantizedRows
"""(V, *row)."""


def reads_of(
    ids: Ids, padding: Ids | None, mode: str, shape: Shape, hashed: bool
) -> tuple[jax.Array, Ids | None, jax.Array | None]:
    """Find what ids from `checked_integers` read in a table; `padding` reads nothing.

    Returns:
        Arrays of the shape of the ids: the row that each reads, or V; where it is padding, and
        its row zero, or None for nowhere; where its row is to be nan, or None for nowhere.
    """
    rows, out_of_range = shape[0], None
    is_traced = any(isinstance(x, jax.core.Tracer) for x in (ids, padding))
    if mode == "clip":
        if rows == 0 and ids.size:
            raise ValueError(
                f"`mode` 'clip' has no row to clip to in a table of shape {shape}."
            )
        positions = jnp.clip(widen(ids, rows), 0, max(rows - 1, 0))
        positions = positions if padding is None else jnp.where(padding, rows, positions)
    elif mode == "raise" and is_traced:
        positions = _checked_by_checkify(ids, padding, shape)
    else:
        positions = rows_read(ids, padding, rows)
    if mode == "fill":
        out_of_range = positions == rows
        out_of_range = out_of_range if padding is None else out_of_range & ~padding
    if mode == "raise" and not is_traced:
        known = np.asarray(ids)
        wrong = (known < 0) | (known >= rows)
        wrong = wrong if padding is None else wrong & ~np.asarray(padding)
        for first in np.argwhere(wrong)[:1]:
            at = f"[{', '.join(map(str, first))}]" if known.ndim else ""
            raise IndexError(
                f"`ids{at}` is {known[tuple(first)]}, which is no row of the table of shape "
                f"{shape} ({wrong.sum()} such in all). Ids that are to be left out can be "
                "given as `padding_id`; for other choices see `mode`."
            )
    padding = positions == rows if mode == "raise" else padding
    return hashed_positions(positions, rows, hashed), padding, out_of_range


def _checked_by_checkify(ids: Ids, padding: Ids | None, shape: Shape) -> jax.Array:
    """Return the rows that traced ids read, with a check that all but padding are rows."""
    at = f"[{', '.join(['{}'] * ids.ndim)}]" if ids.ndim else ""
    message = f"`ids{at}` is {{id}}, which is no row of the table of shape {shape}"

    def checked(ids: jax.Array, padding: jax.Array | None) -> jax.Array:
        positions = rows_read(ids, padding, shape[0])
        wrong = positions == shape[0]
        wrong = wrong if padding is None else wrong & ~padding
        if ids.size:
            first = jnp.argmax(on_every_device(wrong).reshape(-1))
            where, every = jnp.unravel_index(first, ids.shape), on_every_device(ids).reshape(-1)
            checkify.check(~wrong.any(), message, *where, id=every[first])
        return positions

    if isinstance(ids, np.ndarray):  # JAX would keep the lower bits, which may be a row
        limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(ids.dtype))
        ids = clipped(ids, int(limits.min), int(limits.max)).astype(limits.dtype)
    # JAX drops an effect without outputs from the body of a scan that it differentiates.
    # An equation whose output is used it keeps, with the effect inside.
    return jax.checkpoint(checked)(jnp.asarray(ids), padding)


def rows_read(ids: Ids, padding: Ids | None, rows: int) -> jax.Array:
    """Return the row that each id reads, `rows` where it is padding or out of range."""
    ids = widen(ids, rows)
    ids = ids if padding is None else jnp.where(padding, rows, ids)
    if explicit_mesh(ids) is not None:
        return canonical(ids, rows)
    # Flat, as ids of a gradient are: XLA then sees that these are the same.
    return canonical(ids.reshape(-1), rows).reshape(ids.shape)


def clipped(ids: HostArray, low: int, high: int) -> HostArray:
    """Clip NumPy integers, whose dtype need not hold the limits."""
    limits = np.iinfo(ids.dtype)
    return np.clip(ids, max(low, limits.min), min(high, limits.max))


def is_padding(ids: Ids, padding_id: object) -> Ids | None:
    """Find which of the ids are `padding_id`, in NumPy for NumPy's; None if none can be."""
    if padding_id is None:
        return None
    number, limits = checked_integer("padding_id", padding_id), jnp.iinfo(ids.dtype)
    return ids == np.asarray(number, ids.dtype) if limits.min <= number <= limits.max else None


def checked_integers(name: str, x: Argument, mode: str, order: str = "") -> Ids:
    """Return `x` as a NumPy or JAX array of integers.

    NumPy arrays and lists stay NumPy, so that 64-bit ids are not cut to 32 bits. In mode
    "raise" all that is concrete becomes NumPy: under a trace, JAX makes a tracer even of a
    comparison of two constants. `order` is the call with its arguments in order, for
    callers who give the ids first, as torch does.
    """
    if isinstance(x, MaskedTensor | np.ma.MaskedArray):
        fill = "to_tensor" if isinstance(x, MaskedTensor) else "filled"
        raise TypeError(
            f"`{name}` is a {type(x).__name__}: fill what is masked with an id, "
            f"`{name}.{fill}(-1)`, and give that id as `padding_id`."
        )
    kind, kept = type(x).__name__, jax.core.Tracer if mode == "raise" else jax.Array
    if not isinstance(x, kept | RowSparse):  # a RowSparse is a table, refused below
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
        kind = kind if x.dtype == object else x.dtype
        hint = f": the order is {order}" if order else ""
        raise TypeError(f"`{name}` must be integers, got {kind}{hint}.")
    return x


def checked_table(table: object) -> AnyTable:
    """Return the table as a JAX array with rows, a `RowSparse`, or quantized."""
    if isinstance(table, RowSparse | QuantizedRows):
        return table
    if isinstance(table, JAXSparse | MaskedTensor):
        dense = "to_tensor(0)" if isinstance(table, MaskedTensor) else "todense()"
        raise TypeError(
            "`table` must be an array or a jmask.RowSparse, got "
            f"{type(table).__name__}: pass `table.{dense}`."
        )
    return as_table(table)


# --- max norm -----------------------------------------------------------------------------
#
# Rows of bounded norm: scaled while they are read, or, as in torch, in the table.
#
#     row [3, 4], max_norm 2.5     ->     [1.5, 2]      a row no longer than that: itself


def renormalize(
    table: AnyTable,
    ids: Numbers,
    max_norm: Scalar,
    *,
    norm_type: float = 2.0,
    padding_id: int | None = None,
) -> jax.Array:
    """Return the table with the rows `ids` shortened to `max_norm` where their norm is greater.

    What torch's `Embedding(max_norm=...)` does to its weight before each lookup, at O(ids) cost
    where the table is donated. Call it before the loss, whose gradient it would make dense.

    Args:
        table (V, *row): a floating or complex array.
        ids: integers of any shape and dtype; what is outside the table touches nothing.
        max_norm, norm_type: as in `embedding_lookup`.
        padding_id: an id whose row, if it has one, is left alone.

    Returns:
        The table: row r of `ids` is r * max_norm / (|r| + 1e-7) where |r| > max_norm, and
        every other row is what it was, bit for bit. Rows with nan or inf are left alone.

    Raises:
        TypeError: if an argument is not of the type above.
        ValueError: if `table` is a scalar, or `max_norm` or `norm_type` is not positive.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.renormalize(jnp.array([[3., 4.], [6., 8.], [30., 40.]]), [0, 1, 1], 5.)
        Array([[ 3.,  4.],
               [ 3.,  4.],
               [30., 40.]], dtype=float32)
    """
    table = checked_table(table)
    ids = checked_integers("ids", ids, "zero", "renormalize(table, ids, max_norm)")
    if isinstance(table, RowSparse | QuantizedRows):
        raise TypeError(
            f"`table` must be an array, got {type(table).__name__}: bound its rows after each "
            "update with jmask.max_row_norm, or as they are read with "
            "jmask.embedding_lookup(table, ids, max_norm=...)."
        )
    if max_norm is None:
        raise ValueError("`max_norm` must be a positive number, got None.")
    count = table.shape[0]
    positions = rows_read(ids, is_padding(ids, padding_id), count)
    positions = on_every_device(positions).reshape(-1)
    slots = fewer(positions.shape[0], count)
    if slots == 0:
        return table
    slot_ids, _ = unique_slots(positions, slots, count)
    rows = gather_rows(table, slot_ids, coalesced=True)
    return set_rows(table, slot_ids, bounded(rows, max_norm, norm_type, 1, 1e-7), "sorted")


def bounded(
    rows: jax.Array, max_norm: Scalar | None, norm_type: float, batch: int, eps: float = 0.0
) -> jax.Array:
    """Scale the rows after `batch` axes that are finite and too long; keep the dtype."""
    check_norm_type(norm_type)
    if max_norm is None:
        return rows
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        raise TypeError(f"`max_norm` needs a floating or complex `table`, got {rows.dtype}.")
    number = checked_scalar("max_norm", max_norm, wide(real_dtype(rows.dtype)))
    is_known = not isinstance(max_norm, jax.core.Tracer)
    if isinstance(max_norm, bool) or (is_known and not 0 < np.asarray(max_norm) < np.inf):
        raise ValueError(f"`max_norm` must be positive and finite, got {max_norm}.")
    exact, axes = rows.astype(wide(rows.dtype)), tuple(range(batch, rows.ndim))
    finite = jnp.isfinite(lax.stop_gradient(exact)).all(axes, keepdims=True)
    new = shortened(jnp.where(finite, exact, 0), number, norm_type, batch, eps)
    return jnp.where(finite, new.astype(rows.dtype), rows)


def check_norm_type(norm_type: object) -> None:
    if not isinstance(norm_type, int | float) or isinstance(norm_type, bool):
        raise TypeError(f"`norm_type` must be a Python number, got {norm_type!r}.")
    if not norm_type > 0:
        raise ValueError(f"`norm_type` must be positive, got {norm_type}.")


# --- lookup -------------------------------------------------------------------------------


@naming_arguments(
    padding_idx="write `padding_id`",
    sparse="leave it out, under jmask.grad the gradient is a RowSparse",
)
def embedding_lookup(
    table: AnyTable,
    ids: Numbers,
    *,
    padding_id: int | None = None,
    mode: str = "fill",
    max_norm: Scalar | None = None,
    norm_type: float = 2.0,
    hashed: bool = False,
    width: int | None = None,
) -> jax.Array:
    """Return the rows of `table` with the given ids.

    Args:
        table (V, *row): an array of any dtype; a `RowSparse`, whose rows that are not stored
            are zeros; or what `jmask.quantize_rows` made of an array. Where axes of its mesh
            are explicit, the rows of an array may be sharded: they come to where their ids are.
        ids: integers of any shape and dtype, or a list. Ids below 0 and from V on are
            outside the table: they never wrap.
        padding_id: an id that gives zeros and no gradient, whether it is a row or not.
        mode: what any other id outside the table gives: "fill" nan, or the number that
            `jnp.take` gives of integers; "clip" the first or last row, and its gradient; "zero"
            zeros; "raise" an error. Ids that are traced are checked by
            `jax.experimental.checkify`, with which the step must be wrapped; after a failed
            check the row is zeros.
        max_norm: rows r whose norm is greater are read as r * max_norm / |r|, and
            differentiated so; those with nan or inf stay as they are. A number or a scalar
            array, for a floating or complex table.
        norm_type: p of the p-norm, > 0; may be `math.inf`.
        hashed: whether the rows of the table are permuted, as by `jmask.sharded(...,
            hashed=True)`. The indices of its gradient are the permuted positions.
        width: D, if `table` is `jmask.packed` of a table (V, D), or that table. The padding of
            the last line counts as rows of zeros.

    Returns:
        The rows (*ids.shape, *row), in the dtype of the table.

    Raises:
        IndexError: in mode "raise", for concrete ids outside the table.
        TypeError: if an argument is not of the type above.
        ValueError: if `table` is a scalar, `mode` is not one of the above, `max_norm` or
            `norm_type` is not positive, "clip" meets a table without rows, `hashed` a table
            whose rows are no multiple of 1024, or `table` has no lines of rows of `width`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> table = jnp.array([[1., 2.], [3., 4.], [5., 6.]])
        >>> jmask.embedding_lookup(table, [2, 0, -1], padding_id=-1)
        Array([[5., 6.],
               [1., 2.],
               [0., 0.]], dtype=float32)
    """
    table = checked_table(table)
    mode = checked_choice("mode", mode, MODES)
    ids = checked_integers("ids", ids, mode, "embedding_lookup(table, ids)")
    padding = is_padding(ids, padding_id)
    shape = shape_of_rows(table, width)
    rows = looked_up_rows(table, shape, *reads_of(ids, padding, mode, shape, hashed))
    return bounded(rows, max_norm, norm_type, ids.ndim)


def shape_of_rows(table: AnyTable, width: int | None) -> Shape:
    """Return the shape (V, *row) of a table, or of the one whose lines `table` has."""
    shape = tuple(table.shape)
    if width is None:
        return shape
    width = checked_integer("width", width)
    slot = slot_of(width) if width > 0 else 0
    is_matrix = isinstance(table, jax.Array) and len(shape) == 2
    if is_matrix and slot and shape[1] in (width, max(slot, LANES)):
        return shape[0] * max(shape[1] // slot, 1), width
    raise ValueError(
        f"`width`={width}, and `table` is {table.dtype}{list(shape)}: give the lines "
        "`jmask.packed(table)` of a table (V, width), or that table."
    )


def hashed_positions(positions: jax.Array, rows: int, hashed: bool) -> jax.Array:
    """Permute positions if the table is one with `hashed=True`."""
    check_flag("hashed", hashed)
    if not hashed:
        return positions
    if rows % COLUMNS:
        raise ValueError(
            f"`hashed`=True, and `table` has {rows} rows, which is no multiple of {COLUMNS}: "
            "make it by jmask.sharded(table, mesh, hashed=True)."
        )
    return position_of(positions, rows)


def looked_up_rows(
    table: AnyTable,
    shape: Shape,
    positions: jax.Array,
    padding: Ids | None = None,
    out_of_range: jax.Array | None = None,
) -> jax.Array:
    """Return the rows (*ids, *row) that `reads_of` has found in a table of `shape`."""
    is_packed = shape[0] != table.shape[0]
    if isinstance(table, RowSparse):
        stored, places = stored_at(table, positions)
        rows = looked_up_rows(stored, stored.shape, places)
    elif isinstance(table, QuantizedRows):
        arrays = table.values, table.scales
        rows = table.dequantized(*(looked_up_rows(x, x.shape, positions) for x in arrays))
    elif table.shape[0] == 0:
        rows = jnp.zeros((*positions.shape, *table.shape[1:]), table.dtype)
    elif is_packed:
        if any(spec_of(table)):
            raise ValueError(
                f"`table` is sharded, {jax.typeof(table)}, and its lines hold several rows: "
                "shard the table itself, `jmask.sharded(table, mesh)`, and give no `width`."
            )
        rows = rows_of_lines(table, positions, slot_of(shape[1]))
    elif explicit_mesh(table, positions) is not None:
        rows = sharded_rows.looked_up(table, positions)
    else:
        # The gather itself fills in nan, if no padding reads V.
        fills_in = padding is None and out_of_range is not None
        fill, out_of_range = (None, None) if fills_in else (0, out_of_range)
        rows = rows_or_fill(table, positions, fill)
    if len(shape) > 1 and rows.shape[-1] != shape[-1]:
        rows = rows[..., : shape[-1]]  # without the padding of a slot in a line
    if out_of_range is not None and positions.size:
        is_marked = trailing(out_of_range, rows.ndim)
        rows = jnp.where(is_marked, out_of_range_value(rows.dtype), rows)
    return rows


def out_of_range_value(dtype: DTypeLike) -> HostArray:
    """Return what entries of a row out of range are, as in `jnp.take`."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(jnp.nan, dtype)
    if dtype == jnp.dtype(bool):
        return np.asarray(True)
    limits = jnp.iinfo(dtype)
    return np.asarray(limits.min or limits.max, dtype)


def exchange_overflow(
    table: jax.Array, ids: Numbers, *, padding_id: int | None = None, hashed: bool = False
) -> jax.Array:
    """Count the ids of a lookup beyond the capacity with which devices exchange rows.

    In large batches each row goes to the one shard that owns it. The capacity of a shard is its
    share of the batch and five standard deviations. Ids beyond it anywhere take further rounds,
    in the lookup and in the update: as exact, and slower. Where that happens often,
    `hashed=True` distributes frequent ids over all shards.

    Args:
        table, ids, padding_id, hashed: as in `embedding_lookup`. In a program that makes this
            lookup as well XLA sorts the ids once.

    Returns:
        A scalar, int32: 0 where all ids fit, and where rows are not exchanged: in batches of
        less than 8,192 ids, and in tables that are not sharded by their types.

    Raises:
        TypeError: if `table` is no array, or `ids` are no integers.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> table = jmask.sharded(jnp.ones((8, 2)), jax.make_mesh((1,), ("x",)))
        >>> int(jmask.exchange_overflow(table, jnp.array([3, 3])))
        0
    """
    table = as_table(table)
    ids = checked_integers("ids", ids, "zero", "exchange_overflow(table, ids)")
    count = table.shape[0]
    positions = rows_read(ids, is_padding(ids, padding_id), count)
    positions = hashed_positions(positions, count, hashed)
    return excess_of(Shards.of(table, positions), positions, count)
