"""Find rows that equations write into zeros, and move them where others change the shape.

The transpose of a lookup `t[ids]` is an equation that writes cotangents into zeros of the
table's shape. It is a *row pattern* when it writes whole rows and addresses them by their
position in dimension 0:

    scatter-add(zeros(V, D), ids (3, 1), ct (3, D))         3 rows, at ids
    scatter-add(zeros(V, D), ids (3, 2), ct (3, 10))        the same, zeros in other columns
    scatter-add(zeros(V, D), ids (3, 2), ct (3, 1, D))      the same, CLIP mode only: the
                                                            window is as wide as the row,
                                                            so its second start clips to 0
    dynamic_update_slice(zeros(V, D), ct (k, D), (i, _))    k rows, from clip(i)
    pad(ct (k, D), (low, high), (0, 0))                     k rows, from low
    bcoo_dot_general(X, ct), X (m, V) sparse, over m        one row for each entry of X

Out-of-range ids do exactly what they do in the dense gradient: CLIP clamps them, every
other mode drops them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._autodiff.values import RowSum
from jmask._base.array_types import trailing
from jmask._base.forms import aval_of, parameter
from jmask._base.row_ids import canonical, id_dtype, numbered, positions_of, widen
from jmask._base.types import Shape
from jmask._kernels.lines import is_packed
from jmask._kernels.rows import gather_rows


def scatter_add_rows(eqn: JaxprEqn, indices: jax.Array, updates: jax.Array) -> RowSum | None:
    """Return what a `scatter-add` equation adds, as `window_rows`; indices (*entries, k)."""
    numbers = parameter(eqn, "dimension_numbers")
    shape = aval_of(eqn.outvars[0]).shape
    batching = numbers.operand_batching_dims
    along_entries = [*numbers.inserted_window_dims, *batching]
    batch_dims = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    windows = lax.transpose(updates, [*batch_dims, *numbers.update_window_dims])
    lead, sizes = len(batch_dims), list(windows.shape)
    for d in sorted(along_entries):
        sizes.insert(lead + d, 1)
    starts = {
        d: _column(indices, k) for k, d in enumerate(numbers.scatter_dims_to_operand_dims)
    }
    for d, axis in zip(batching, numbers.scatter_indices_batching_dims, strict=True):
        starts[d] = lax.broadcasted_iota(id_dtype(shape[d]), sizes[:lead], axis)
    clips = parameter(eqn, "mode") == lax.GatherScatterMode.CLIP
    return window_rows(shape, windows, tuple(sizes), starts, along_entries, clips=clips)


def _column(indices: jax.Array, k: int) -> jax.Array:
    """Return `indices[..., k]`, in one equation where there is no other column."""
    if indices.shape[-1] > 1:
        indices = lax.slice_in_dim(indices, k, k + 1, axis=-1)
    return lax.squeeze(indices, [indices.ndim - 1])


def window_rows(
    shape: Shape,
    windows: jax.Array,
    windows_shape: Shape,
    starts: Mapping[int, jax.Array],
    along_entries: Sequence[int] = (),
    *,
    clips: bool,
) -> RowSum | None:
    """Return what windows that are added somewhere add.

    The trailing dimensions that each window covers whole are a row; ids number all others in
    row-major order. None if entries of a matrix would be rows of their own, as in a lookup of
    columns.

    Args:
        shape (*leading, *row): of the array.
        windows: what is added, of any shape with these entries in this order.
        windows_shape: (*entries, *window).
        starts: arrays (*entries,) by the dimension along which they say where windows begin.
        along_entries: dimensions of which a window has one entry, by its form.
        clips: whether windows that do not fit are moved; others are dropped whole.
    """
    lead, leading = len(windows_shape) - len(shape), len(shape)
    entries, window = windows_shape[:lead], windows_shape[lead:]
    while leading > 1:
        d = leading - 1
        # A window that is as wide as the row can start at 0 alone, if it must fit.
        starts_at_0 = d not in along_entries and (d not in starts or clips)
        if not starts_at_0 or window[d] != shape[d]:
            break
        leading -= 1
    if leading == len(shape) > 1:
        # Entries in the shape of a matrix (the gradient of a sort) are no lookup of some.
        if entries == shape:
            return None
        if math.prod(window) > 1:
            # Some columns of a row, `t[ids, :10]`, are a row with zeros in the others.
            first = next(d for d, size in enumerate(window) if size > 1)
            leading = max([first, *(d + 1 for d in along_entries)])
            if leading in (0, len(shape)):
                return None
    sizes, row = window[:leading], window[leading:]
    count = math.prod((*entries, *sizes))
    rows = lax.reshape(windows, (count, *row))
    grid = lead + leading

    def per_row(x: jax.Array) -> jax.Array:
        if x.size == count:
            return lax.reshape(x, (count,))
        return jnp.broadcast_to(trailing(x, grid), (*entries, *sizes)).reshape(count)

    if row != shape[leading:]:
        zero = jnp.zeros((), jnp.int32)
        firsts = [per_row(starts.get(d, zero)) for d in range(leading, len(shape))]
        rows = _widened(rows, firsts, shape[leading:])
    elif sizes == (1,) and 0 in starts and not clips:
        return _looked_up(shape, canonical(per_row(starts[0]), shape[0]), rows)
    rows_in_all = math.prod(shape[:leading])
    dtype = id_dtype(rows_in_all)
    number: jax.Array | None = None
    valid: jax.Array | None = None
    for d, size in enumerate(window):
        position = jnp.zeros((1,) * grid, dtype)
        if d in starts:
            start, last = widen(starts[d], shape[d]), shape[d] - size
            if clips:
                start = jnp.clip(start, 0, last)
            else:
                fits = (start >= 0) & (start <= last)
                valid = fits if valid is None else valid & fits
            position = trailing(start, grid).astype(dtype)
        if d >= leading:
            continue
        if size > 1:
            along = [1] * grid
            along[lead + d] = size
            position = position + lax.iota(dtype, size).reshape(along)
        if number is not None:
            position = number * np.asarray(shape[d], dtype) + position
        number = position
    assert number is not None
    if valid is not None:
        number = jnp.where(trailing(valid, grid), number, np.asarray(rows_in_all, dtype))
    return _looked_up(shape, per_row(number), rows, leading)


def _looked_up(shape: Shape, ids: jax.Array, rows: jax.Array, leading: int = 1) -> RowSum:
    return RowSum(shape, rows.dtype, ((ids, rows),), looked_up=True, leading=leading)


def _widened(rows: jax.Array, starts: Sequence[jax.Array], shape: Shape) -> jax.Array:
    """Return rows (n, *shape), zeros outside of windows that begin at `starts`, each (n,)."""

    def placed(window: jax.Array, *start: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(jnp.zeros(shape, rows.dtype), window, start)

    return jax.vmap(placed)(rows, *starts)


def padded_rows(eqn: JaxprEqn, operand: jax.Array) -> RowSum | None:
    """Return the rows that `pad` places among zeros, or None if it pads rows too.

    The gradient of `table[start:stop:step]`: rows `start`, `start + step`, ... They are not
    `looked_up`, since users of such a slice expect an array.
    """
    (low, _, interior), *others = parameter(eqn, "padding_config")
    if any(any(config) for config in others):
        return None
    shape, step = aval_of(eqn.outvars[0]).shape, interior + 1
    ids = np.arange(low, low + step * operand.shape[0], step, dtype=id_dtype(shape[0]))
    return RowSum(shape, operand.dtype, ((jnp.asarray(ids), operand),))


def sparse_product_rows(
    eqn: JaxprEqn, data: jax.Array, indices: jax.Array, dense: jax.Array
) -> RowSum | None:
    """Return the rows of `X.T @ dense` for a sparse X: one for each of its stored entries.

    This is the gradient of W in `X @ W`: entry X[i, j] adds X[i, j] * dense[i] to row j. With
    batch dimensions, which the product sums over too, i is a position in all of them.
    """
    (contract, contract_dense), batch = parameter(eqn, "dimension_numbers")
    shape = parameter(eqn, "lhs_spinfo").shape
    kept = [d for d in range(len(shape)) if d not in contract]
    batched, sparse = indices.ndim - 2, indices.shape[-1]
    if any(batch) or len(kept) != 1 or kept[0] < batched or batched + sparse < len(shape):
        return None
    entries = (*shape[:batched], indices.shape[-2])
    places = [lax.broadcasted_iota(indices.dtype, entries, d) for d in range(batched)]
    places += [jnp.broadcast_to(indices[..., d], entries) for d in range(sparse)]
    inside = jnp.ones(entries, bool)
    number = jnp.zeros(entries, indices.dtype)  # of dense[i], counted in row-major order
    for d in contract:
        inside &= (places[d] >= 0) & (places[d] < shape[d])
        number = number * shape[d] + places[d]
    sizes = [shape[d] for d in contract]
    dense = jnp.moveaxis(dense, contract_dense, range(len(contract)))
    dense = dense.reshape(math.prod(sizes), *dense.shape[len(contract) :])
    ids = jnp.where(inside, places[kept[0]], shape[kept[0]]).reshape(-1)
    rows = gather_rows(dense, canonical(number.reshape(-1), dense.shape[0]))
    scale = trailing(jnp.broadcast_to(data, entries).reshape(-1), rows.ndim)
    result = aval_of(eqn.outvars[0])
    ids = canonical(ids, shape[kept[0]])
    return _looked_up(result.shape, ids, (scale * rows).astype(result.dtype))


# --- moves ---------------------------------------------------------------------------------
#
# Operations on the shape of an array that is a sum of rows: they move the rows.
#
#     x = RowSum (V, D)    ids i                    rows (n, D)
#     reshape to (M, W, D)          i               the same rows, i numbers (M, W)
#     pad 2 rows in front           i + 2
#     slice rows 3 to 5             i - 3, or padding
#     transpose of (M, W, D)        w * M + m       of i = m * W + w
#
# Ids number the leading dimensions in row-major order, so a move is arithmetic on the positions
# that an id stands for; what it does along a row is done to the rows. Where a row would fall
# apart into single entries (a lookup of columns) there is no move, and the array is dense.

Positions = list[jax.Array]


def reshaped(x: RowSum, shape: Shape) -> RowSum | None:
    """Return the rows in an array of another shape; None if it joins several to one."""
    if x.is_zero:
        return dataclasses.replace(x, shape=shape, leading=1)
    size = math.prod(x.row)
    if x.row and is_packed(shape, size) and size * x.count == math.prod(shape):
        return x.split(1, len(shape), shape, size)
    for leading in range(1, len(shape) + 1):
        row = shape[leading:]
        each, rest = divmod(size, math.prod(row)) if math.prod(row) else (1, 0)
        if rest or (each > 1 and not row):
            continue
        if each * x.count == math.prod(shape[:leading]):
            return x.split(each, leading, shape)
    return None


def padded(x: RowSum, config: Sequence[tuple[int, int, int]], shape: Shape) -> RowSum:
    """Return the rows in an array with zeros around and between, as `lax.pad` has it."""
    zero = np.zeros((), x.dtype)
    along_rows = [(0, 0, 0), *config[x.leading :]]

    def move(positions: Positions) -> tuple[Positions, jax.Array | bool]:
        inside: jax.Array | bool = True
        moved = []
        for p, size, (low, high, interior) in zip(positions, shape, config, strict=False):
            q = low + p * (interior + 1)
            if low < 0 or high < 0:  # rows that are cut off
                inside = inside & (q >= 0) & (q < size)
            moved.append(q)
        return moved, inside

    return _moved(x, shape, move, lambda rows: lax.pad(rows, zero, along_rows))


def sliced(x: RowSum, starts: Shape, shape: Shape, strides: Shape) -> RowSum:
    """Return the rows inside a slice that has this shape."""

    def move(positions: Positions) -> tuple[Positions, jax.Array | bool]:
        inside: jax.Array | bool = True
        moved = []
        for p, start, size, stride in zip(positions, starts, shape, strides, strict=False):
            q = lax.div(p - start, np.asarray(stride, p.dtype))
            inside = inside & (p >= start) & (q < size) & (start + q * stride == p)
            moved.append(q)
        return moved, inside

    along_rows = tuple(
        slice(start, start + (size - 1) * stride + 1 if size else start, stride)
        for start, size, stride in zip(starts, shape, strides, strict=True)
    )[x.leading :]
    return _moved(x, shape, move, lambda rows: rows[(slice(None), *along_rows)])


def placed_at(x: RowSum, starts: Sequence[jax.Array], shape: Shape) -> RowSum | None:
    """Return the rows in an array of zeros, as `dynamic_update_slice` places them."""
    if x.row != shape[x.leading :]:
        return None

    def move(positions: Positions) -> tuple[Positions, bool]:
        moved = []
        for d, p in enumerate(positions):
            first = jnp.clip(widen(jnp.asarray(starts[d]), shape[d]), 0, shape[d] - x.shape[d])
            moved.append(p + first.astype(p.dtype))
        return moved, True

    return _moved(x, shape, move, lambda rows: rows)


def transposed(eqn: JaxprEqn, x: RowSum) -> RowSum | None:
    """Return the rows with the dimensions in another order; None if that would cut them up."""
    order, leading = parameter(eqn, "permutation"), x.leading
    while set(order[:leading]) != set(range(leading)):
        leading += 1
    if leading == len(x.shape) and x.row:
        return None
    x = x.refined(dataclasses.replace(x, leading=leading, parts=()))
    along_rows = [0, *(d - leading + 1 for d in order[leading:])]

    def move(positions: Positions) -> tuple[Positions, bool]:
        return [positions[d] for d in order[:leading]], True

    shape = tuple(x.shape[d] for d in order)
    return _moved(x, shape, move, lambda rows: rows.transpose(along_rows))


def flipped(eqn: JaxprEqn, x: RowSum) -> RowSum:
    """Return the rows with some dimensions in reverse order."""
    dimensions = parameter(eqn, "dimensions")
    along_rows = [d - x.leading + 1 for d in dimensions if d >= x.leading]

    def move(positions: Positions) -> tuple[Positions, bool]:
        pairs = enumerate(positions)
        return [x.shape[d] - 1 - p if d in dimensions else p for d, p in pairs], True

    return _moved(x, x.shape, move, lambda rows: lax.rev(rows, along_rows))


def _moved(
    x: RowSum,
    shape: Shape,
    move: Callable[[Positions], tuple[Positions, jax.Array | bool]],
    along_rows: Callable[[jax.Array], jax.Array],
) -> RowSum:
    result = dataclasses.replace(x, shape=shape, parts=())
    sizes, new_sizes = x.shape[: x.leading], shape[: x.leading]
    # Positions are computed where both arrays' numbers fit.
    dtype = id_dtype(max(x.count, result.count))
    parts = []
    for ids, rows in x.in_few_parts().parts:
        positions, inside = move(positions_of(ids.astype(dtype), sizes))
        number = numbered(positions, new_sizes, dtype)
        valid = (ids < x.count) & inside
        number = jnp.where(valid, number, np.asarray(result.count, dtype))
        parts.append((number.astype(id_dtype(result.count)), along_rows(rows)))
    return dataclasses.replace(result, parts=tuple(parts))
