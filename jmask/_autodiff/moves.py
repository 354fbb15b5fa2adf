"""Views of what equations move: their operands are read at other positions.

    slice rows 3 to 5            row i     row i + 3
    reshape (V, D) to (M, W, D)  m, w      row m * W + w
    concatenate t and u          row i     of t where i < V, else row i - V of u

Each rule is a plan and a read of each result.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._autodiff.views import (
    Plans,
    Positions,
    Reads,
    Valid,
    View,
    Where,
    per_entry,
    view_of_array,
)
from jmask._base.array_types import trailing
from jmask._base.forms import aval_of, parameter
from jmask._base.row_ids import id_dtype, numbered, positions_of, widen
from jmask._base.types import Index, Shape, Value

Reading = tuple[
    Callable[[int, Where, Plans], bool], Callable[[Positions, Valid, Reads], jax.Array]
]
Rule = Callable[[JaxprEqn, Sequence[Value]], list[Reading] | None]


def _as_views(xs: Sequence[Value]) -> list[View]:
    return [x if isinstance(x, View) else view_of_array(x) for x in xs]


def _both(a: Valid, b: Valid) -> Valid:
    return b if a is None else a if b is None else a & b


def at_other_positions(x: View, key: object) -> Callable[[int, Where, Plans], bool]:
    """Return the plan of a read at other positions, along as many dimensions."""
    return lambda count, where, plans: plans.read(x, count, where.moved(key))


def slice_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading]:
    starts = parameter(eqn, "start_indices")
    strides = parameter(eqn, "strides") or (1,) * len(starts)
    return [_sliced(xs[0], aval_of(eqn.outvars[0]).shape, lambda: starts, strides)]


def split_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading]:
    pairs = zip(eqn.outvars, _begins(eqn), strict=True)
    return [_part(xs[0], aval_of(v).shape, starts) for v, starts in pairs]


def unstack_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading]:
    (x,), axis, readings = xs, parameter(eqn, "axis"), []
    for v, starts in zip(eqn.outvars, _begins(eqn), strict=True):
        shape = aval_of(v).shape
        one = (*shape[:axis], 1, *shape[axis:])
        readings.append(_reshaped(_with(x, one, _part(x, one, starts)), shape))
    return readings


def _part(x: View, shape: Shape, starts: Shape) -> Reading:
    return _sliced(x, shape, lambda: starts, (1,) * x.ndim)


def _begins(eqn: JaxprEqn) -> list[Shape]:
    """Return where each result of a `split` or an `unstack` begins."""
    axis, ndim = parameter(eqn, "axis"), len(aval_of(eqn.invars[0]).shape)
    begins, begin = [], 0
    for v in eqn.outvars:
        begins.append(tuple(begin * (d == axis) for d in range(ndim)))
        shape = aval_of(v).shape
        begin += shape[axis] if len(shape) == ndim else 1
    return begins


def _with(x: View, shape: Shape, reading: Reading) -> View:
    """Return a view that is read so, as a step of a rule."""
    return View(shape, x.dtype, *reading, x.make)


def _sliced(
    x: View, shape: Shape, starts_of: Callable[[], Sequence[Index]], strides: Shape
) -> Reading:
    key = object()

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        starts, count = starts_of(), len(p.along)
        where = zip(p.along, x.shape, starts, strides, strict=False)
        moved = [widen(q, n) * np.asarray(k, id_dtype(n)) + s for q, n, s, k in where]
        rows = reads.read(x, p.moved(key, moved), valid)
        along_row = list(zip(starts, shape, strides, strict=True))[count:]
        for d, (start, size, stride) in enumerate(along_row, -len(along_row)):
            if size == rows.shape[d]:
                continue
            if isinstance(start, int):
                end = start + (size - 1) * stride + 1 if size else start
                rows = lax.slice_in_dim(rows, start, end, stride, d)
            else:
                rows = lax.dynamic_slice_in_dim(rows, start, size, d)
        return rows

    return at_other_positions(x, key), read


def dynamic_slice_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading] | None:
    x, shape = xs[0], aval_of(eqn.outvars[0]).shape
    if not isinstance(x, View) or any(isinstance(start, View) for start in xs[1:]):
        return None

    def starts() -> list[jax.Array]:  # moved to where the slice fits
        return [
            jnp.clip(widen(jnp.asarray(s), n), 0, n - k)
            for s, n, k in zip(xs[1:], x.shape, shape, strict=True)
        ]

    return [_sliced(x, shape, starts, (1,) * len(shape))]


def pad_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading] | None:
    config, (x, padding) = parameter(eqn, "padding_config"), xs
    is_view = isinstance(x, View) and not isinstance(padding, View)
    if not is_view or 0 in x.shape or any(interior for *_, interior in config):
        return None

    key = object()

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        inside, moved = jnp.ones((), bool), []
        for q, size, (low, _, _) in zip(p.along, x.shape, config, strict=False):
            q = q - np.asarray(low, q.dtype)
            inside = inside & (q >= 0) & (q < size)
            moved.append(jnp.clip(q, 0, size - 1))
        rows = reads.read(x, p.moved(key, moved), _both(valid, inside))
        along_entries = [(0, 0, 0)] * len(p.entries)
        rows = lax.pad(rows, padding, [*along_entries, *config[len(p.along) :]])
        return jnp.where(trailing(inside, rows.ndim), rows, padding)

    return [(at_other_positions(x, key), read)]


def rev_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading]:
    (x,), dimensions = xs, parameter(eqn, "dimensions")

    key = object()

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        count, lead = len(p.along), len(p.entries)
        moved = [x.shape[d] - 1 - q if d in dimensions else q for d, q in enumerate(p.along)]
        rows = reads.read(x, p.moved(key, moved), valid)
        return lax.rev(rows, [lead + d - count for d in dimensions if d >= count])

    return [(at_other_positions(x, key), read)]


def transpose_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading]:
    return [transposed(*untransposed(eqn, xs[0]))]


def untransposed(eqn: JaxprEqn, x: View) -> tuple[View, Sequence[int]]:
    """Return what is transposed, once or several times, and the order of its dimensions."""
    order = parameter(eqn, "permutation")
    base, first = x.transpose_of or (x, range(x.ndim))
    return base, [first[d] for d in order]


def transposed(x: View, order: Sequence[int]) -> Reading:
    key = object()

    def whole_before(count: int) -> list[int]:
        """Return dimensions of the operand before the last one that positions are along."""
        last = max(order[:count], default=-1)
        return [d for d in range(last) if d not in order[:count]]

    def plan(count: int, where: Where, plans: Plans) -> bool:
        before = whole_before(count)
        total = count + len(before)
        # Single entries of a matrix, as its columns are, are no lookup of rows.
        if before and total == len(order):
            return False
        entries = (*where.entries, *(x.shape[d] for d in before))
        return plans.read(x, total, where.moved(key, entries))

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        count, lead = len(p.along), len(p.entries)
        before = whole_before(count)
        total, entries = count + len(before), (*p.entries, *(x.shape[d] for d in before))
        given = dict(zip(order, p.along, strict=False))
        moved = [
            per_entry(given[d], entries)
            if d in given
            else lax.broadcasted_iota(id_dtype(x.shape[d]), entries, lead + before.index(d))
            for d in range(total)
        ]
        valid = None if valid is None else per_entry(valid, entries)
        rows = reads.read(x, p.moved(key, moved, entries), valid)
        axes = [*before, *range(total, len(order))]
        along_row = (lead + axes.index(d) for d in order[count:])
        return rows.transpose([*range(lead), *along_row])

    return plan, read


def concatenate_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading]:
    return [_concatenated(_as_views(xs), parameter(eqn, "dimension"))]


def _concatenated(parts: Sequence[View], axis: int) -> Reading:
    keys = [object() for _ in parts]

    def plan(count: int, where: Where, plans: Plans) -> bool:
        if axis >= count:
            return all(plans.read(x, count, where) for x in parts)
        some = [(x, key) for x, key in zip(parts, keys, strict=True) if x.shape[axis]]
        return all(plans.read(x, count, where.moved(key)) for x, key in some)

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        count = len(p.along)
        if axis >= count:
            whole = [reads.read(x, p, valid) for x in parts]
            return lax.concatenate(whole, axis - count + len(p.entries))
        result: jax.Array | None = None
        local = p.along[axis]
        for x, key in zip(parts, keys, strict=True):
            size = x.shape[axis]
            if size:
                inside = (local >= 0) & (local < size)
                within = jnp.clip(local, 0, size - 1)
                moved = [*p.along[:axis], within, *p.along[axis + 1 :]]
                rows = reads.read(x, p.moved(key, moved), _both(valid, inside))
                is_later = trailing(local >= 0, rows.ndim)
                result = rows if result is None else jnp.where(is_later, rows, result)
            local = local - np.asarray(size, local.dtype)
        assert result is not None
        return result

    return plan, read


def stack_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading]:
    """Concatenate arrays with a dimension of size 1 more, which is `axis`."""
    axis, parts = parameter(eqn, "axis"), []
    for x in _as_views(xs):
        one = (*x.shape[:axis], 1, *x.shape[axis:])
        parts.append(_with(x, one, _reshaped(x, one)))
    return [_concatenated(parts, axis)]


def reshape_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading]:
    return [_reshaped(xs[0], aval_of(eqn.outvars[0]).shape)]


def _reshaped(x: View, shape: Shape) -> Reading:
    """Read a view in another shape, by the numbers of rows in row-major order."""
    sizes = [math.prod(x.shape[j:]) for j in range(x.ndim + 1)]
    key = object()

    def dimensions_read(count: int) -> int | None:
        """Return along how many dimensions of the operand to read: rows as long as possible."""
        size = math.prod(shape[count:])
        fits = [j for j in range(1, x.ndim + 1) if sizes[j] and size % sizes[j] == 0]
        fits = [j for j in fits if x.fits[j]]
        if not fits:
            return None
        j = min(fits)
        # Dimensions of size 1 are numbered too: what is sliced along them is then read alone.
        while j + 1 in fits and sizes[j + 1] == sizes[j] and j + 1 < x.ndim:
            j += 1
        # What is less than a row of a table, single entries of a matrix, is no lookup of rows.
        is_entry = j == x.ndim and count < len(shape) and size > 1
        return None if is_entry else j

    def plan(count: int, where: Where, plans: Plans) -> bool:
        j = dimensions_read(count)
        if j is None:
            return False
        each = math.prod(shape[count:]) // sizes[j]
        return plans.read(x, j, where.moved(key, (*where.entries, each)))

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        count, lead = len(p.along), len(p.entries)
        j = dimensions_read(count)
        assert j is not None
        each = math.prod(shape[count:]) // sizes[j]
        dtype = id_dtype(max(math.prod(x.shape[:j]), math.prod(shape[:count])))
        several = (*p.entries, each)
        number = jnp.broadcast_to(numbered(p.along, shape[:count], dtype), p.entries)
        number = per_entry(number * np.asarray(each, dtype), several)
        number = number + lax.broadcasted_iota(dtype, several, lead)
        valid = None if valid is None else per_entry(valid, several)
        along = positions_of(number, x.shape[:j])
        rows = reads.read(x, p.moved(key, along, several), valid)
        return rows.reshape(*p.entries, *shape[count:])

    return plan, read


def broadcast_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading]:
    x, shape = xs[0], aval_of(eqn.outvars[0]).shape
    dimensions = [int(d) for d in parameter(eqn, "broadcast_dimensions")]
    if math.prod(x.shape) == math.prod(shape):
        return [_reshaped(x, shape)]

    key = object()

    def operands(count: int) -> int | None:
        """Return how many of its dimensions positions are along: the first ones, or None."""
        inside = [d < count for d in dimensions]
        return sum(inside) if all(inside[: sum(inside)]) else None

    def plan(count: int, where: Where, plans: Plans) -> bool:
        k = operands(count)
        return k is not None and plans.read(x, k, where.moved(key))

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        count, lead, k = len(p.along), len(p.entries), operands(len(p.along))
        assert k is not None
        along = [p.along[d] for d in dimensions[:k]]
        moved = [
            q if size != 1 else jnp.zeros_like(q)
            for q, size in zip(along, x.shape, strict=False)
        ]
        rows = reads.read(x, p.moved(key, moved), valid)
        to = [*range(lead), *(lead + d - count for d in dimensions[k:])]
        return lax.broadcast_in_dim(rows, (*p.entries, *shape[count:]), to)

    return [(plan, read)]


def tile_rule(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading] | None:
    (x,), repeats, key = xs, tuple(parameter(eqn, "reps")), object()
    # As `numpy.tile`: repeats are of the last dimensions.
    repeats = (1,) * (x.ndim - len(repeats)) + repeats
    if len(repeats) > x.ndim:
        return None

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        count, lead = len(p.along), len(p.entries)
        moved = [
            lax.rem(q, np.asarray(size, q.dtype))
            for q, size in zip(p.along, x.shape, strict=False)
        ]
        rows = reads.read(x, p.moved(key, moved), valid)
        return jnp.tile(rows, (*(1,) * lead, *repeats[count:]))

    return [(at_other_positions(x, key), read)]
