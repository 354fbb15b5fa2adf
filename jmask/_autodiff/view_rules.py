"""Rules for arrays that are made of tables: where a row is read, and what becomes of it.

    slice rows 3 to 5            row i     row i + 3
    reshape (V, D) to (M, W, D)  m, w      row m * W + w
    concatenate t and u          row i     of t where i < V, else row i - V of u
    multiply by a scalar         row i     row i times the scalar

A view reads at positions along its first dimensions, as many as the lookup has; dimensions
after these are read whole. Each rule passes positions on to the views of its operands, and does
to the rows what its equation does to the array.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._base.array_types import trailing
from jmask._base.forms import aval_of, parameter
from jmask._base.row_ids import id_dtype, numbered, positions_of, widen
from jmask._base.types import Shape, Value
from jmask._kernels.gather import Gather

Positions = Sequence[jax.Array]
"""Indices (*entries,) along each of the first dimensions of an array, in range."""

_Read = Callable[[Positions], jax.Array | None]
_CLIP = lax.GatherScatterMode.CLIP


class View(NamedTuple):
    """How to read rows of an array from what it is made of.

    Attributes:
        shape: of the array.
        read: positions -> entries (*entries, *rest of the shape); None if it cannot.
        tables: from how many arrays it reads.
    """

    shape: Shape
    read: _Read
    tables: int = 1


# (equation, values and views of its operands) -> views of its results, one at least of its
# operands being made of tables.

_Values = Sequence[Value]
_Views = Sequence[View | None]


def array_view(x: jax.Array) -> View:
    """Return the view of an array as it is."""

    def read(positions: Positions) -> jax.Array:
        lead, along = positions[0].ndim, tuple(range(len(positions)))
        offsets = tuple(range(lead, lead + x.ndim - len(along)))
        numbers = lax.GatherDimensionNumbers(offsets, along, along)
        gather = Gather(numbers, (1,) * len(along) + x.shape[len(along) :], _CLIP)
        dtype = id_dtype(max(x.shape))
        return gather(x, jnp.stack([p.astype(dtype) for p in positions], -1))

    return View(x.shape, read)


def _view_of(x: Value, view: View | None) -> View:
    return array_view(jnp.asarray(x)) if view is None else view


def _elementwise(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    """Compute on the rows of all operands but scalars."""
    known = [view for view in views if view is not None]
    if any(view is None and np.ndim(x) for x, view in zip(values, views, strict=True)):
        return []

    def read(positions: Positions) -> jax.Array | None:
        operands = [
            x if view is None else view.read(positions)
            for x, view in zip(values, views, strict=True)
        ]
        if any(x is None for x in operands):
            return None
        return eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))

    return [View(known[0].shape, read, sum(view.tables for view in known))]


def _then(
    view: View,
    shape: Shape,
    move: Callable[[Positions], Positions],
    along_rows: Callable[[jax.Array, int], jax.Array],
) -> View:
    """Return a view of another shape.

    Args:
        view: what is read.
        shape: of the new view.
        move: positions in the new view -> as many in the old one.
        along_rows: (what is read, the number of positions) -> what the new view reads.
    """

    def read(positions: Positions) -> jax.Array | None:
        rows = view.read(move(positions))
        return None if rows is None else along_rows(rows, len(positions))

    return view._replace(shape=shape, read=read)


def _slice(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    starts, strides = parameter(eqn, "start_indices"), parameter(eqn, "strides")
    strides = strides or (1,) * len(starts)
    return [_sliced(views[0], aval_of(eqn.outvars[0]).shape, starts, strides)]


def _split(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    axis, begin, results = parameter(eqn, "axis"), 0, []
    for v in eqn.outvars:
        shape = aval_of(v).shape
        starts = tuple(begin * (d == axis) for d in range(len(shape)))
        results.append(_sliced(views[0], shape, starts, (1,) * len(shape)))
        begin += shape[axis]
    return results


def _sliced(view: View | None, shape: Shape, starts: Shape, strides: Shape) -> View:
    assert view is not None

    def move(positions: Positions) -> Positions:
        where = zip(positions, view.shape, starts, strides, strict=False)
        return [widen(p, size) * stride + start for p, size, start, stride in where]

    def along_rows(rows: jax.Array, count: int) -> jax.Array:
        parts = (
            slice(start, start + (size - 1) * stride + 1 if size else start, stride)
            for start, size, stride in zip(starts, shape, strides, strict=True)
        )
        return rows[(..., *list(parts)[count:])]

    return _then(view, shape, move, along_rows)


def _dynamic_slice(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    view, shape = views[0], aval_of(eqn.outvars[0]).shape
    if view is None:
        return []

    def starts() -> list[jax.Array]:
        """Return where the slice begins, moved to where it fits."""
        return [
            jnp.clip(widen(jnp.asarray(start), size), 0, size - length)
            for start, size, length in zip(values[1:], view.shape, shape, strict=True)
        ]

    def move(positions: Positions) -> Positions:
        where = zip(positions, view.shape, starts(), strict=False)
        return [widen(p, size) + start for p, size, start in where]

    def along_rows(rows: jax.Array, count: int) -> jax.Array:
        lead, begin = rows.ndim - len(shape) + count, starts()[count:]
        index = [jnp.zeros((), jnp.int32)] * lead + [x.astype(jnp.int32) for x in begin]
        return lax.dynamic_slice(rows, index, (*rows.shape[:lead], *shape[count:]))

    return [_then(view, shape, move, along_rows)]


def _pad(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    config, padding = parameter(eqn, "padding_config"), values[1]
    view, shape = views[0], aval_of(eqn.outvars[0]).shape
    if view is None or 0 in view.shape or any(interior for *_, interior in config):
        return []

    def read(positions: Positions) -> jax.Array | None:
        count, inside, moved = len(positions), jnp.ones((), bool), []
        for p, size, (low, _, _) in zip(positions, view.shape, config, strict=False):
            p = p - low
            inside = inside & (p >= 0) & (p < size)
            moved.append(jnp.clip(p, 0, size - 1))
        rows = view.read(moved)
        if rows is None:
            return None
        along_entries = [(0, 0, 0)] * positions[0].ndim
        rows = lax.pad(rows, padding, [*along_entries, *config[count:]])
        return jnp.where(trailing(inside, rows.ndim), rows, padding)

    return [view._replace(shape=shape, read=read)]


def _rev(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    view, dimensions = views[0], parameter(eqn, "dimensions")
    if view is None:
        return []

    def move(positions: Positions) -> Positions:
        return [
            view.shape[d] - 1 - p if d in dimensions else p for d, p in enumerate(positions)
        ]

    def along_rows(rows: jax.Array, count: int) -> jax.Array:
        lead = rows.ndim - len(view.shape)
        return lax.rev(rows, [lead + d for d in dimensions if d >= count])

    return [_then(view, view.shape, move, along_rows)]


def _transpose(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    order, view = parameter(eqn, "permutation"), views[0]
    if view is None:
        return []

    def read(positions: Positions) -> jax.Array | None:
        count, lead = len(positions), positions[0].ndim
        # Dimensions of the operand that come before the last of those, and are read whole.
        before = [d for d in range(max(order[:count])) if d not in order[:count]]
        entries = (*positions[0].shape, *(view.shape[d] for d in before))
        given = dict(zip(order, positions, strict=False))
        moved = [
            jnp.broadcast_to(trailing(given[d], len(entries)), entries)
            if d in given
            else lax.broadcasted_iota(id_dtype(view.shape[d]), entries, lead + before.index(d))
            for d in range(count + len(before))
        ]
        rows = view.read(moved)
        axes = [*before, *range(count + len(before), len(order))]
        along_row = (lead + axes.index(d) for d in order[count:])
        return None if rows is None else rows.transpose([*range(lead), *along_row])

    return [view._replace(shape=tuple(view.shape[d] for d in order), read=read)]


def _concatenate(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    parts = [_view_of(x, view) for x, view in zip(values, views, strict=True)]
    return [_concatenated(parts, parameter(eqn, "dimension"), aval_of(eqn.outvars[0]).shape)]


def _concatenated(parts: Sequence[View], axis: int, shape: Shape) -> View:
    def read(positions: Positions) -> jax.Array | None:
        count = len(positions)
        if axis >= count:
            rows = [part.read(positions) for part in parts]
            known = [x for x in rows if x is not None]
            axis_of_rows = axis - count + positions[0].ndim
            return lax.concatenate(known, axis_of_rows) if len(known) == len(parts) else None
        result: jax.Array | None = None
        local = positions[axis]
        for part in parts:
            size = part.shape[axis]
            if size:
                within = jnp.clip(local, 0, size - 1)
                part_rows = part.read([*positions[:axis], within, *positions[axis + 1 :]])
                if part_rows is None:
                    return None
                is_later = trailing(local >= 0, part_rows.ndim)
                result = part_rows if result is None else jnp.where(is_later, part_rows, result)
            local = local - size
        return result

    return View(shape, read, sum(part.tables for part in parts))


def _stack(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    """Concatenate arrays with a dimension of size 1 more, which is `axis`."""
    axis = parameter(eqn, "axis")

    def with_axis(view: View) -> View:
        shape = (*view.shape[:axis], 1, *view.shape[axis:])
        return view._replace(shape=shape, read=_reshaped(view, shape))

    parts = [with_axis(_view_of(x, view)) for x, view in zip(values, views, strict=True)]
    return [_concatenated(parts, axis, aval_of(eqn.outvars[0]).shape)]


def _reshape(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    view, shape = views[0], aval_of(eqn.outvars[0]).shape
    if view is None or math.prod(view.shape) != math.prod(shape) or 0 in shape:
        return []
    return [view._replace(shape=shape, read=_reshaped(view, shape))]


def _reshaped(view: View, shape: Shape) -> _Read:
    """Read a view in another shape, by the numbers of rows in row-major order."""
    sizes = [math.prod(view.shape[j:]) for j in range(len(view.shape) + 1)]

    def read(positions: Positions) -> jax.Array | None:
        count, entries = len(positions), positions[0].shape
        row = shape[count:]
        size = math.prod(row)
        dtype = id_dtype(max(math.prod(view.shape[:-1]), math.prod(shape[:count])))
        number = numbered(positions, shape[:count], dtype)
        # The longest rows of the view of which a row of the result holds one or several; what
        # is less than a row of a table has no row-sparse gradient.
        fits = [j for j in range(1, len(sizes)) if size % sizes[j] == 0]
        if not fits:
            return None
        j = min(fits)
        each = size // sizes[j]
        several = (*entries, each)
        number = jnp.broadcast_to(number[..., None] * np.asarray(each, dtype), several)
        number = number + lax.broadcasted_iota(dtype, several, len(entries))
        rows = view.read(positions_of(number, view.shape[:j]))
        return None if rows is None else rows.reshape(*entries, *row)

    return read


Rule = Callable[[JaxprEqn, _Values, _Views], list[View]]
RULES: dict[str, Rule] = dict.fromkeys(
    "add convert_element_type copy copy_p div mul name neg reduce_precision select_n "
    "stop_gradient sub".split(),
    _elementwise,
) | {
    "broadcast_in_dim": _reshape,
    "concatenate": _concatenate,
    "dynamic_slice": _dynamic_slice,
    "expand_dims": _reshape,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
}
