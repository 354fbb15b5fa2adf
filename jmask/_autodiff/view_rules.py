"""Rules of equations whose results are views: what a position reads of the operands.

slice rows 3 to 5            row i     row i + 3
reshape (V, D) to (M, W, D)  m, w      row m * W + w
concatenate t and u          row i     of t where i < V, else row i - V of u
sin                          row i     the sine of row i
sum along each row           row i     the sum of row i
product with a matrix        row i     row i times the matrix
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._autodiff.views import (
    Positions,
    Reading,
    Valid,
    View,
    as_view,
    per_entry,
    planned,
    tables_of,
    window_of,
)
from jmask._base.array_types import at_most, trailing
from jmask._base.forms import aval_of, parameter
from jmask._base.jaxprs import ARITHMETIC, bound
from jmask._base.row_ids import as_number, id_dtype, numbered, positions_of
from jmask._base.shardings import on_this_mesh, varying_alike, varying_axes, varying_over
from jmask._base.types import Argument, ArrayFunction, Index, Shape
from jmask._kernels import tuning

# --- views that move what is in others ----------------------------------------------------


def sliced(
    x: View,
    shape: Shape,
    starts: Callable[[], Sequence[Index]],
    strides: Sequence[int] | None = None,
) -> View:
    """Return a window of a view, backwards along dimensions with a stride of -1."""

    def reading(p: Positions) -> Reading:
        q, finish = window_of(x, shape, starts, strides or (1,) * x.ndim, p)
        return [(x, q)], finish

    return View(shape, x.dtype, reading)


def part_along(x: View, d: int, begin: int, size: int) -> View:
    """Return so many entries of a view along one dimension, from `begin` on."""
    starts = [begin * (i == d) for i in range(x.ndim)]
    return sliced(x, (*x.shape[:d], size, *x.shape[d + 1 :]), lambda: starts)


def transposed(x: View, order: Sequence[int]) -> View:
    """Return a transpose of a view; a transpose of a transpose is one transpose."""
    x, first = x.transpose_of or (x, range(x.ndim))
    order = [first[d] for d in order]
    if order == list(range(x.ndim)):
        return x

    def reading(p: Positions) -> Reading | None:
        count, lead = p.count, len(p.entries)
        # Dimensions of the operand before the last one that positions are along are read whole.
        before = [d for d in range(max(order[:count], default=-1)) if d not in order[:count]]
        total, entries = count + len(before), (*p.entries, *(x.shape[d] for d in before))
        # Single entries of a matrix, as its columns are, are no lookup of rows; of an array
        # that is no table they are read.
        if before and total == len(order) and planned(x, total, entries) != []:
            return None

        def at() -> tuple[list[jax.Array], Valid]:
            given = dict(zip(order, p.along, strict=False))
            along = [
                per_entry(given[d], entries)
                if d in given
                else lax.broadcasted_iota(id_dtype(x.shape[d]), entries, lead + before.index(d))
                for d in range(total)
            ]
            return along, None if p.valid is None else per_entry(p.valid, entries)

        def finish(rows: jax.Array) -> jax.Array:
            axes = [*before, *range(total, len(order))]
            along_row = (lead + axes.index(d) for d in order[count:])
            return rows.transpose([*range(lead), *along_row])

        return [(x, Positions(total, entries, at))], finish

    shape = tuple(x.shape[d] for d in order)
    return View(shape, x.dtype, reading, transpose_of=(x, order))


def joined(xs: Sequence[View], axis: int) -> View:
    """Return views one after the other along a dimension."""
    parts = [x for x in xs if x.shape[axis]]
    ends = list(itertools.accumulate(x.shape[axis] for x in parts))

    def reading(p: Positions) -> Reading:
        count = p.count
        if axis >= count:
            whole = lambda *rows: lax.concatenate(rows, axis - count + len(p.entries))
            return [(x, p) for x in parts], whole

        def at(x: View, end: int) -> tuple[list[jax.Array], Valid]:
            size, q = x.shape[axis], p.along[axis]
            local = q - np.asarray(end - size, q.dtype)
            inside = (local >= 0) & (local < size)
            local = jnp.clip(local, 0, size - 1)
            along = [*p.along[:axis], local, *p.along[axis + 1 :]]
            return along, inside if p.valid is None else p.valid & inside

        def finish(*rows: jax.Array) -> jax.Array:
            result = rows[0]
            for end, later in zip(ends, rows[1:], strict=False):
                is_later = trailing(p.along[axis] >= end, later.ndim)
                result = jnp.where(is_later, later, result)
            return result

        places = [functools.partial(at, *pair) for pair in zip(parts, ends, strict=True)]
        positions = (Positions(count, p.entries, place) for place in places)
        return list(zip(parts, positions, strict=True)), finish

    size = ends[-1] if ends else 0
    shape = (*xs[0].shape[:axis], size, *xs[0].shape[axis + 1 :])
    return View(shape, xs[0].dtype, reading)


def reshaped(x: View, shape: Shape) -> View:
    """Return a view in another shape, read by the numbers of rows in row-major order."""
    sizes = [math.prod(x.shape[j:]) for j in range(x.ndim + 1)]

    def dimensions_read(count: int) -> int | None:
        """Return along how many dimensions of the operand to read: rows as long as possible."""
        size = math.prod(shape[count:])
        fits = [j for j in range(x.ndim + 1) if sizes[j] and size % sizes[j] == 0]
        fits = [j for j in fits if x.fits[j]]
        if not fits:
            return None
        j = min(fits)
        # Dimensions of size 1 are numbered too: what is sliced along them is then read alone.
        while j + 1 in fits and sizes[j + 1] == sizes[j] and j + 1 < x.ndim:
            j += 1
        # What is less than a row of a table, single entries of a matrix, is no lookup of rows.
        is_entry = j == x.ndim and count < len(shape) and not at_most(size, 1)
        return None if is_entry else j

    def reading(p: Positions) -> Reading | None:
        count = p.count
        j = dimensions_read(count)
        if j is None:
            return None
        each = math.prod(shape[count:]) // sizes[j]
        several = (*p.entries, each)

        def at() -> tuple[list[jax.Array], Valid]:
            dtype = id_dtype(max(math.prod(x.shape[:j]), math.prod(shape[:count])))
            number = jnp.broadcast_to(numbered(p.along, shape[:count], dtype), p.entries)
            number = per_entry(number * as_number(each, dtype), several)
            number = number + lax.broadcasted_iota(dtype, several, len(p.entries))
            valid = None if p.valid is None else per_entry(p.valid, several)
            return positions_of(number, x.shape[:j]), valid

        whole = lambda rows: rows.reshape(*p.entries, *shape[count:])
        return [(x, Positions(j, several, at))], whole

    return View(shape, x.dtype, reading)


def broadcasted(x: View, shape: Shape, dimensions: Sequence[int]) -> View:
    """Return a view whose dimension d is number `dimensions[d]` of a larger array."""
    if math.prod(x.shape) == math.prod(shape):
        return x if x.shape == shape else reshaped(x, shape)

    def reading(p: Positions) -> Reading:
        count, lead = p.count, len(p.entries)
        k = sum(d < count for d in dimensions)  # they are in ascending order

        def at() -> tuple[list[jax.Array], Valid]:
            along = zip((p.along[d] for d in dimensions[:k]), x.shape, strict=False)
            return [q if size != 1 else jnp.zeros_like(q) for q, size in along], p.valid

        to = [*range(lead), *(lead + d - count for d in dimensions[k:])]
        whole = lambda rows: lax.broadcast_in_dim(rows, (*p.entries, *shape[count:]), to)
        return [(x, Positions(k, p.entries, at))], whole

    return View(shape, x.dtype, reading)


# --- rules of equations that move entries ---------------------------------------------------

Rule = Callable[[JaxprEqn, Sequence[Argument]], list[View] | None]


def _shape(eqn: JaxprEqn) -> Shape:
    return tuple(aval_of(eqn.outvars[0]).shape)


def _slice(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View]:
    starts = parameter(eqn, "start_indices")
    return [sliced(xs[0], _shape(eqn), lambda: starts, parameter(eqn, "strides"))]


def _dynamic_slice(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View] | None:
    x, *starts = xs
    if not isinstance(x, View) or any(isinstance(start, View) for start in starts):
        return None
    return [sliced(x, _shape(eqn), lambda: starts)]


def _split(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View]:
    """Return the parts of a `split`, or the arrays of an `unstack`."""
    (x,), axis, begin, parts = xs, parameter(eqn, "axis"), 0, []
    for v in eqn.outvars:
        shape = tuple(aval_of(v).shape)
        size = shape[axis] if len(shape) == x.ndim else 1
        part = part_along(x, axis, begin, size)
        parts.append(part if part.shape == shape else reshaped(part, shape))
        begin += size
    return parts


def _stack(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View]:
    axis = parameter(eqn, "axis")
    one = lambda x: reshaped(x, (*x.shape[:axis], 1, *x.shape[axis:]))
    return [joined([one(as_view(x)) for x in xs], axis)]


def _pad(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View] | None:
    (x, padding), config = xs, parameter(eqn, "padding_config")
    is_view = isinstance(x, View) and not isinstance(padding, View)
    if not is_view or any(interior for *_, interior in config):
        return None
    padding = padding if hasattr(padding, "shape") else np.asarray(padding, x.dtype)
    for d, (low, high) in enumerate((int(low), int(high)) for low, high, _ in config):
        cut = x.shape[d] + min(low, 0) + min(high, 0)
        if cut != x.shape[d]:
            x = part_along(x, d, max(-low, 0), cut)
        sides = [(*x.shape[:d], max(n, 0), *x.shape[d + 1 :]) for n in (low, high)]
        first, last = (broadcasted(as_view(padding), side, ()) for side in sides)
        x = joined([first, x, last], d)
    return [x]


def _rev(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View]:
    (x,), dimensions = xs, parameter(eqn, "dimensions")
    starts = [(n - 1) * (d in dimensions) for d, n in enumerate(x.shape)]
    steps = [-1 if d in dimensions else 1 for d in range(x.ndim)]
    return [sliced(x, x.shape, lambda: starts, steps)]


def _broadcast(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View]:
    dimensions = [int(d) for d in parameter(eqn, "broadcast_dimensions")]
    return [broadcasted(xs[0], _shape(eqn), dimensions)]


def _tile(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View]:
    (x,), repeats = xs, parameter(eqn, "reps")
    pairs = [n for pair in zip(repeats, x.shape, strict=True) for n in pair]
    copies = broadcasted(x, tuple(pairs), range(1, len(pairs), 2))
    return [reshaped(copies, _shape(eqn))]


def _same(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View] | None:
    (x,), axes = xs, varying_axes(aval_of(eqn.outvars[0]))
    reading = lambda p: ([(x, p)], functools.partial(varying_over, axes))
    return [View(x.shape, x.dtype, reading)]


def _set_row(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View] | None:
    """Return a view with one row set: `t.at[0].set(0)`, of a padding row."""
    (x, place, new), numbers = xs, parameter(eqn, "dimension_numbers")
    is_row = numbers.scatter_dims_to_operand_dims == numbers.inserted_window_dims == (0,)
    if not is_row or aval_of(eqn.invars[1]).shape != (1,) or isinstance(place, View):
        return None
    x, rows = as_view(x), broadcasted(as_view(new), x.shape, range(1, x.ndim))

    def reading(p: Positions) -> Reading | None:
        if not p.count:
            return None

        def is_set() -> jax.Array:
            q, row = jnp.asarray(p.along[0]), on_this_mesh(place)[0]
            dtype = jnp.promote_types(q.dtype, place.dtype)
            return q.astype(dtype) == row.astype(dtype)

        at = lambda: (p.along, ~is_set() if p.valid is None else p.valid & ~is_set())

        def finish(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(trailing(is_set(), old.ndim), new, old)

        return [(x, Positions(p.count, p.entries, at)), (rows, p)], finish

    return [View(x.shape, x.dtype, reading)]


# --- rules of equations that compute --------------------------------------------------------


def entrywise(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View] | None:
    shape = _shape(eqn)
    if not shape:
        return None
    # Operands are of the shape of the result, of size 1 in some dimensions, or scalars. What
    # is computed of transposes, as by layers that are mapped over rows, is a transpose.
    orders = [x.transpose_of and list(x.transpose_of[1]) for x in xs if isinstance(x, View)]
    order = orders[0] if all(other == orders[0] for other in orders) else None
    back = np.argsort(order or range(len(shape))).tolist()
    operands = [
        transposed(broadcasted(as_view(x), shape, range(x.ndim)), back)
        if isinstance(x, View) or np.ndim(x)
        else x
        for x in xs
    ]
    shape = tuple(shape[d] for d in back)

    def reading(p: Positions) -> Reading:
        def finish(*rows: jax.Array) -> jax.Array:
            rest = iter(rows)
            return bound(eqn, [next(rest) if isinstance(x, View) else x for x in operands])[0]

        return [(x, p) for x in operands if isinstance(x, View)], finish

    result = View(shape, aval_of(eqn.outvars[0]).dtype, reading)
    return [transposed(result, order or back)]


def _reduce(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View]:
    """Reduce along dimensions after those that positions are along."""
    (x,), axes = xs, parameter(eqn, "axes")
    how = eqn.primitive.get_bind_params(eqn.params)

    def reading(p: Positions) -> Reading | None:
        if p.count > min(axes, default=0):
            return None
        along_row = tuple(d + len(p.entries) - p.count for d in axes)
        return [(x, p)], lambda rows: eqn.primitive.bind(rows, **how | {"axes": along_row})

    return [View(_shape(eqn), aval_of(eqn.outvars[0]).dtype, reading)]


def _product(eqn: JaxprEqn, xs: Sequence[Argument]) -> list[View] | None:
    """Multiply each row: `t @ w`, or sum stacked tables with weights, `w @ stack`."""
    (contracted, batch) = parameter(eqn, "dimension_numbers")
    which = 0 if isinstance(xs[0], View) else 1
    x, other = xs[which], xs[1 - which]
    free = [d for d in range(x.ndim) if d not in contracted[which]]
    others = np.ndim(other) - len(contracted[1 - which])
    if any(batch) or isinstance(other, View) or not free:
        return None
    rows_first = transposed(x, [*free, *contracted[which]])
    how = eqn.primitive.get_bind_params(eqn.params)

    def reading(p: Positions) -> Reading | None:
        if p.count > len(free):
            return None
        first = len(p.entries) + len(free) - p.count
        of_rows = tuple(range(first, first + len(contracted[which])))
        numbers = (of_rows, tuple(contracted[1 - which])), ((), ())
        product = functools.partial(eqn.primitive.bind, **how | {"dimension_numbers": numbers})
        return [(rows_first, p)], lambda rows: product(*varying_alike(rows, other))

    # The rows are last in `w @ t.T`, as in the product of a layer that is mapped over rows.
    moved = others * which
    shape = _shape(eqn)[moved:] + _shape(eqn)[:moved]
    order = np.roll(range(len(shape)), moved).tolist()
    return [transposed(View(shape, aval_of(eqn.outvars[0]).dtype, reading), order)]


ENTRYWISE = (
    *(ARITHMETIC - {"stop_gradient"}),
    *"complex conj erf imag name real reduce_precision".split(),
)
COMPUTING: dict[str, Rule] = {
    **dict.fromkeys(ENTRYWISE, entrywise),
    **dict.fromkeys("reduce_max reduce_min reduce_prod reduce_sum".split(), _reduce),
    "dot_general": _product,
}
"""The rules of equations that compute: few rows are looked up before, by themselves."""
SAME_ARRAY = ("pvary", "pcast", "reshard", "sharding_constraint")
"""Equations that say where an array is, and on which devices it differs."""
_reshape: Rule = lambda eqn, xs: [reshaped(xs[0], _shape(eqn))]
RULES: dict[str, Rule] = {
    **COMPUTING,
    **dict.fromkeys(SAME_ARRAY, _same),
    **dict.fromkeys("expand_dims reshape squeeze".split(), _reshape),
    **dict.fromkeys(("split", "unstack"), _split),
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda eqn, xs: [joined([*map(as_view, xs)], parameter(eqn, "dimension"))],
    "dynamic_slice": _dynamic_slice,
    "pad": _pad,
    "rev": _rev,
    "scatter": _set_row,
    "slice": _slice,
    "stack": _stack,
    "tile": _tile,
    "transpose": lambda eqn, xs: [transposed(xs[0], parameter(eqn, "permutation"))],
}


def views_of(eqns: Sequence[JaxprEqn], name: str, xs: Sequence[Argument]) -> list[View] | None:
    """Return what an equation makes of views as views, if rows can be read of all of them.

    It is the last of the equations; the others run the program that it is in.
    """
    eqn = eqns[-1]
    rule = RULES.get(name)
    operands = [x for x in xs if isinstance(x, View)]
    # A view of what is used twice, again and again, would be of exponentially many equations.
    equations = 1 + sum(x.equations for x in operands)
    avals = [aval_of(v) for v in eqn.outvars]
    is_empty = any(0 in x.shape for x in (*avals, *operands))
    if rule is None or is_empty or equations > tuning.VIEW_EQUATIONS:
        return None
    tables = tables_of(operands)
    is_move = name not in (*COMPUTING, "dynamic_slice")
    is_lookup = name == "dynamic_slice" or any(x.is_lookup for x in operands)
    first = (x.computed_by for x in operands if x.computed_by)
    computed_by = next(first, () if is_move else tuple(eqns))

    def make(number: int, made: ArrayFunction) -> jax.Array:
        with eqn.ctx.manager:  # of its mesh, and not of that where it is needed
            return bound(eqn, [made(x) if isinstance(x, View) else x for x in xs])[number]

    views = [
        dataclasses.replace(
            view,
            make=functools.partial(make, number),
            tables=tables,
            equations=equations,
            is_lookup=is_lookup,
            varies=varying_axes(aval),
            computed_by=computed_by,
        )
        for number, (view, aval) in enumerate(zip(rule(eqn, xs) or [], avals, strict=False))
    ]
    # Of a transpose that is transposed back rows can be read.
    can_be_read = all(any((x.transpose_of or (x,))[0].fits) for x in views)
    return views if views and can_be_read else None
