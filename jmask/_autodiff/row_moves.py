"""Operations on the shape of an array that is a sum of rows: they move the rows.

    x = RowSum (V, D)    ids i                    rows (n, D)
    reshape to (M, W, D)          i               the same rows, i numbers (M, W)
    pad 2 rows in front           i + 2
    slice rows 3 to 5             i - 3, or padding
    transpose of (M, W, D)        w * M + m       of i = m * W + w

Ids number the leading dimensions in row-major order, so a move is arithmetic on the positions
that an id stands for; what it does along a row is done to the rows. Where a row would fall
apart into single entries (a lookup of columns) there is no move, and the array is dense.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._autodiff.values import RowSum
from jmask._base.row_ids import id_dtype, widen
from jmask._base.types import Shape
from jmask._kernels.rows import split_rows

Positions = list[jax.Array]


def reshaped(x: RowSum, shape: Shape) -> RowSum | None:
    """Return the rows in an array of another shape; None if it joins several to one."""
    if x.is_zero:
        return dataclasses.replace(x, shape=shape, leading=1)
    size = math.prod(x.row)
    for leading in range(1, len(shape) + 1):
        row = shape[leading:]
        each, rest = divmod(size, math.prod(row)) if math.prod(row) else (1, 0)
        if rest or (each > 1 and not row):
            continue
        result = dataclasses.replace(x, shape=shape, leading=leading)
        if each * x.count != result.count:
            continue
        parts = tuple(split_rows(*part, each, result.count, result.row) for part in x.parts)
        return dataclasses.replace(result, parts=parts)
    return None


def padded(x: RowSum, config: Sequence[tuple[int, int, int]], shape: Shape) -> RowSum | None:
    """Return the rows in an array with zeros around and between, as `lax.pad` has it."""
    if any(low < 0 or high < 0 for low, high, _ in config):
        return None
    zero = np.zeros((), x.dtype)
    along_rows = [(0, 0, 0), *config[x.leading :]]

    def move(positions: Positions) -> tuple[Positions, bool]:
        pairs = zip(positions, config, strict=False)
        return [low + p * (interior + 1) for p, (low, _, interior) in pairs], True

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


def transposed(x: RowSum, order: Sequence[int], shape: Shape) -> RowSum | None:
    """Return the rows with the dimensions in another order; None if that would cut them up."""
    leading = x.leading
    while set(order[:leading]) != set(range(leading)):
        leading += 1
    if leading == len(shape) and x.row:
        return None
    x = x.refined(leading)
    along_rows = [0, *(d - leading + 1 for d in order[leading:])]

    def move(positions: Positions) -> tuple[Positions, bool]:
        return [positions[d] for d in order[:leading]], True

    return _moved(x, shape, move, lambda rows: rows.transpose(along_rows))


def flipped(x: RowSum, dimensions: Sequence[int]) -> RowSum:
    """Return the rows with these dimensions in reverse order."""
    along_rows = [d - x.leading + 1 for d in dimensions if d >= x.leading]

    def move(positions: Positions) -> tuple[Positions, bool]:
        pairs = enumerate(positions)
        return [x.shape[d] - 1 - p if d in dimensions else p for d, p in pairs], True

    return _moved(x, x.shape, move, lambda rows: lax.rev(rows, along_rows))


def concatenated(
    xs: Sequence[RowSum], axis: int, shape: Shape, dtype: jnp.dtype
) -> RowSum | None:
    """Return the rows of several arrays that are put one after another."""
    total, begin = RowSum(shape, dtype), 0
    for x in xs:
        end = begin + x.shape[axis]
        config = [(0, 0, 0)] * len(shape)
        config[axis] = (begin, shape[axis] - end, 0)
        part = padded(x, config, shape)
        if part is None:
            return None
        total = total.plus(part.parts, part.looked_up, part.leading)
        begin = end
    return total


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
    for ids, rows in x.parts:
        number, positions = ids.astype(dtype), list[jax.Array]()
        for size in reversed(sizes):
            divisor = np.asarray(max(size, 1), dtype)
            positions.insert(0, lax.rem(number, divisor))
            number = lax.div(number, divisor)
        positions, inside = move(positions)
        number = jnp.zeros_like(ids, dtype)
        for size, position in zip(new_sizes, positions, strict=True):
            number = number * np.asarray(size, dtype) + position.astype(dtype)
        valid = (ids < x.count) & inside
        number = jnp.where(valid, number, np.asarray(result.count, dtype))
        parts.append((number.astype(id_dtype(result.count)), along_rows(rows)))
    return dataclasses.replace(result, parts=tuple(parts))
