"""Lookups in an array that is made of tables, read from the tables themselves.

    y    = convert_element_type t        t (V, D) in bfloat16: O(V) where it is made
    rows = gather y ids                  convert_element_type (gather t ids): O(n)

XLA makes such an array whole in each step: on TPUs (libtpu 0.0.50) and, of slices and
concatenations, on CPUs (jaxlib 0.12.0). So equations that move rows, or compute on each entry
alone, note a *view* of what they make: how to read its rows from the tables.

    slice rows 3 to 5            row i     row i + 3
    reshape (V, D) to (M, W, D)  m, w      row m * W + w
    concatenate t and u          row i     of t where i < V, else row i - V of u
    multiply by a scalar         row i     row i times the scalar

A gather of fewer rows than the array has reads them through the view. What made the array is
then not needed, and XLA drops it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jmask._base.array_facts import ArrayFacts
from jmask._base.array_types import is_known, trailing
from jmask._base.forms import aval_of, bodies_of, name_of, parameter
from jmask._base.jaxprs import interpret
from jmask._base.row_ids import id_dtype, numbered, positions_of, widen
from jmask._base.shardings import explicit_sharding
from jmask._base.types import Index, Shape, Shaped, Value
from jmask._kernels import tuning
from jmask._kernels.bag_sum import BAG_SUM, BagSum
from jmask._kernels.gather import SLOW_COPY, Gather, slow_copy_of

# --- views, and a rule for each equation --------------------------------------------------

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
        equations: how many make it, each counted wherever it is used.
    """

    shape: Shape
    read: _Read
    tables: int = 1
    equations: int = 0


_Values = Sequence[Value]
_Views = Sequence[View | None]


def _array_view(x: jax.Array) -> View:
    """Return the view of an array as it is."""

    def read(positions: Positions) -> jax.Array:
        lead, along = positions[0].ndim, tuple(range(len(positions)))
        offsets = tuple(range(lead, lead + x.ndim - len(along)))
        numbers = lax.GatherDimensionNumbers(offsets, along, along)
        gather = Gather(numbers, (1,) * len(along) + x.shape[len(along) :], _CLIP)
        dtype = id_dtype(max(x.shape))
        return gather(x, jnp.stack([p.astype(dtype) for p in positions], -1))

    return View(x.shape, read)


def _first(views: _Views) -> View:
    """Return the view of the only array of an equation: its other operands are numbers."""
    view = views[0]
    assert view is not None
    return view


def _or_array(x: Value, view: View | None) -> View:
    return _array_view(jnp.asarray(x)) if view is None else view


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


def _slice(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    starts, strides = parameter(eqn, "start_indices"), parameter(eqn, "strides")
    strides = strides or (1,) * len(starts)
    return [_sliced(_first(views), aval_of(eqn.outvars[0]).shape, starts, strides)]


def _split(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    axis, begin, results = parameter(eqn, "axis"), 0, []
    for v in eqn.outvars:
        shape = aval_of(v).shape
        starts = tuple(begin * (d == axis) for d in range(len(shape)))
        results.append(_sliced(_first(views), shape, starts, (1,) * len(shape)))
        begin += shape[axis]
    return results


def _sliced(view: View, shape: Shape, starts: Sequence[Index], strides: Shape) -> View:
    def read(positions: Positions) -> jax.Array | None:
        where = zip(positions, view.shape, starts, strides, strict=False)
        rows = view.read([widen(p, n) * stride + start for p, n, start, stride in where])
        along_row = list(zip(starts, shape, strides, strict=True))[len(positions) :]
        for d, (start, size, stride) in enumerate(along_row, -len(along_row)):
            if rows is None or size == rows.shape[d]:
                continue
            if isinstance(start, int):
                end = start + (size - 1) * stride + 1 if size else start
                rows = lax.slice_in_dim(rows, start, end, stride, d)
            else:
                rows = lax.dynamic_slice_in_dim(rows, start, size, d)
        return rows

    return view._replace(shape=shape, read=read)


def _dynamic_slice(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    view, shape = _first(views), aval_of(eqn.outvars[0]).shape

    def read(positions: Positions) -> jax.Array | None:
        starts = [  # moved to where the slice fits
            jnp.clip(widen(jnp.asarray(start), size), 0, size - length)
            for start, size, length in zip(values[1:], view.shape, shape, strict=True)
        ]
        return _sliced(view, shape, starts, (1,) * len(shape)).read(positions)

    return [view._replace(shape=shape, read=read)]


def _pad(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    config, padding = parameter(eqn, "padding_config"), values[1]
    view, shape = _first(views), aval_of(eqn.outvars[0]).shape
    if 0 in view.shape or any(interior for *_, interior in config):
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
    view, dimensions = _first(views), parameter(eqn, "dimensions")

    def read(positions: Positions) -> jax.Array | None:
        moved = [
            view.shape[d] - 1 - p if d in dimensions else p for d, p in enumerate(positions)
        ]
        rows, count = view.read(moved), len(positions)
        along_row = [positions[0].ndim + d - count for d in dimensions if d >= count]
        return None if rows is None else lax.rev(rows, along_row)

    return [view._replace(read=read)]


def _transpose(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    order, view = parameter(eqn, "permutation"), _first(views)

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
    parts = [_or_array(x, view) for x, view in zip(values, views, strict=True)]
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

    parts = [with_axis(_or_array(x, view)) for x, view in zip(values, views, strict=True)]
    return [_concatenated(parts, axis, aval_of(eqn.outvars[0]).shape)]


def _reshape(eqn: JaxprEqn, values: _Values, views: _Views) -> list[View]:
    view, shape = _first(views), aval_of(eqn.outvars[0]).shape
    is_repeated = math.prod(view.shape) != math.prod(shape)  # by a broadcast
    return [] if is_repeated else [view._replace(shape=shape, read=_reshaped(view, shape))]


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


# (equation, values and views of its operands, one at least made of tables) -> views of results.
Rule = Callable[[JaxprEqn, _Values, _Views], list[View]]
RULES: dict[str, Rule] = dict.fromkeys(
    "add complex conj convert_element_type copy copy_p div imag mul name neg real "
    "reduce_precision select_n stop_gradient sub".split(),
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


# --- arrays that are known to be made of tables ------------------------------------------

LOOKUPS = ("gather", SLOW_COPY.name)
"""The equations that look rows up."""

_TABLE = "table"
_KNOWN: ArrayFacts[View | str] = ArrayFacts()
"""Views of arrays that are made of tables, and `_TABLE` for tables."""

# What may read rows of a view.
_READERS = (*LOOKUPS, "slice", "dynamic_slice")


def note_tables(arrays: Sequence[Value]) -> None:
    """Note the arrays that views begin at: what a program is given."""
    for x in arrays:
        if (
            isinstance(x, jax.core.Tracer)
            and x.ndim  # a scalar has no rows
            and jnp.issubdtype(x.dtype, jnp.inexact)
            and is_known(*x.shape)
            and explicit_sharding(x) is None
        ):
            _KNOWN.note(x, _TABLE)


def note_view(
    eqn: JaxprEqn, name: str, arguments: Sequence[Value], outputs: Sequence[Value]
) -> None:
    """Note the views of what an equation makes, if it makes rows of rows."""
    known = [_KNOWN.of(x) for x in arguments] if name in RULES else []
    if not any(known) or 0 in aval_of(eqn.outvars[0]).shape:
        return
    pairs = zip(known, arguments, strict=True)
    views = [_array_view(x) if isinstance(view, str) else view for view, x in pairs]
    # A view of what is used twice, again and again, would be of exponentially many equations.
    equations = 1 + sum(view.equations for view in views if view is not None)
    if equations > tuning.VIEW_EQUATIONS:
        return
    for output, view in zip(outputs, RULES[name](eqn, arguments, views), strict=False):
        if view.shape:
            _KNOWN.note(output, view._replace(equations=equations))


def view_of(x: Value) -> View | None:
    """Return the view of an array that is made of tables and no table itself."""
    known = _KNOWN.of(x)
    return known if isinstance(known, View) else None


def makes_view(eqn: JaxprEqn) -> bool:
    """Decide whether an equation may make a view."""
    return name_of(eqn) in RULES


def makes_views(jaxpr: Jaxpr) -> bool:
    """Decide whether a call makes nothing but views and scalars, as `jnp.flip` does."""
    return all(makes_view(e) or not aval_of(e.outvars[0]).shape for e in jaxpr.eqns)


def is_of_tables(x: Value) -> bool:
    """Decide whether an array is a table or made of tables."""
    return _KNOWN.of(x) is not None


def looks_up_views(eqn: JaxprEqn, arguments: Sequence[Value]) -> bool:
    """Decide whether the body of an equation looks rows up in what is made of tables."""
    known = [_KNOWN.of(x) for x in arguments]
    kinds = [0 if x is None else 1 if isinstance(x, str) else _MADE for x in known]
    return any(kinds) and _looks_up(eqn, kinds)[0]


# What a variable is: made of tables; 1 for a table, 0 for neither.
_MADE = 2


def _looks_up(eqn: JaxprEqn, kinds: list[int]) -> tuple[bool, list[int]]:
    """Decide whether an equation reads rows of what is `_MADE`; return what its results are."""
    results, is_lookup, bodies = [0] * len(eqn.outvars), False, bodies_of(eqn)

    def rule(eqn: JaxprEqn, kinds: list[int]) -> list[int]:
        nonlocal is_lookup
        is_found, results = _looks_up(eqn, kinds)
        is_lookup = is_lookup or is_found
        return results

    for body, _ in bodies:
        inner = kinds[len(kinds) - len(body.invars) :]
        results = interpret(body, [0] * len(body.constvars), inner, rule, lambda _: 0)
    name = name_of(eqn)
    if not bodies and (name in LOOKUPS or name == BAG_SUM.primitive.name):
        is_lookup = kinds[0] == _MADE
    elif not bodies and makes_view(eqn) and any(kinds):
        results = [_MADE] * len(results)
    return is_lookup, results


def read_through_view(eqn: JaxprEqn, name: str, arguments: Sequence[Value]) -> jax.Array | None:
    """Return rows that an equation reads, from what its operand is made of.

    None if its operand is made of none, or not much larger than what is read.
    """
    view = view_of(arguments[0]) if name in _READERS else None
    if view is None:
        return None
    if name in LOOKUPS:
        return _gathered(gather_of(eqn), view, arguments[1], aval_of(eqn.outvars[0]))
    (part,) = RULES[name](eqn, arguments, [view])
    if not part.shape or 2 * math.prod(part.shape) > math.prod(view.shape):
        return None
    return part.read([lax.iota(id_dtype(part.shape[0]), part.shape[0])])


def gather_of(eqn: JaxprEqn) -> Gather:
    """Return the gather that an equation of `LOOKUPS` is."""
    if eqn.primitive is SLOW_COPY:
        return slow_copy_of(eqn.params)
    return Gather(**{f.name: parameter(eqn, f.name) for f in dataclasses.fields(Gather)})


def _gathered(
    gather: Gather, view: View, indices: jax.Array, result: Shaped
) -> jax.Array | None:
    if not is_known(*result.shape):
        return None
    numbers, sizes = gather.dimension_numbers, gather.slice_sizes
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    along_entries = {*numbers.collapsed_slice_dims, *batching}
    count = max(along_entries, default=-1) + 1
    whole = [d for d in range(len(sizes)) if d not in along_entries]
    if not count or any(sizes[d] != view.shape[d] for d in whole):
        return None
    # Dimensions before the last of the entries that are read whole are entries too.
    batch = result.ndim - len(whole)
    more = {d: batch + i for i, d in enumerate(d for d in whole if d < count)}
    entries = (*indices.shape[:-1], *(sizes[d] for d in more))
    if math.prod(entries) * view.tables >= math.prod(view.shape[:count]):
        return None

    starts = {
        d: widen(lax.index_in_dim(indices, k, -1, keepdims=False), view.shape[d])
        for k, d in enumerate(numbers.start_index_map)
    }
    exists: list[jax.Array] = []
    if gather.mode == lax.GatherScatterMode.FILL_OR_DROP:
        lasts = {d: view.shape[d] - sizes[d] for d in starts}
        exists = [(start >= 0) & (start <= lasts[d]) for d, start in starts.items()]
    positions: list[jax.Array] = []
    for d, size in enumerate(view.shape[:count]):
        if d in batching or d in more:
            axis = batching[d] if d in batching else more[d]
            positions.append(lax.broadcasted_iota(id_dtype(size), entries, axis))
        else:
            start = jnp.clip(starts[d], 0, size - 1) if d in starts else jnp.zeros((), np.int32)
            start = trailing(start, len(entries)) if start.ndim else start
            positions.append(jnp.broadcast_to(start, entries))
    rows = view.read(positions)
    if rows is None:
        return None
    for fits in exists:
        fill = gather.fill_value
        fill = jnp.asarray(math.nan if fill is None else fill, rows.dtype)
        rows = jnp.where(trailing(fits, rows.ndim), rows, fill)
    rows = jnp.moveaxis(rows, range(batch, rows.ndim), numbers.offset_dims)
    return rows if (rows.shape, rows.dtype) == (result.shape, result.dtype) else None


def sums_through_views(eqn: JaxprEqn, arguments: Sequence[Value]) -> list[Value]:
    """Return the operands of bag sums, with rows for arrays that are made of tables."""
    sums = BAG_SUM.calls(eqn.params, arguments)
    return [leaf for x in sums for leaf in jax.tree.leaves(_with_rows(x))]


def _with_rows(x: BagSum) -> BagSum:
    view, count = view_of(x.table), x.positions.size
    if view is None or count * view.tables >= view.shape[0]:
        return x
    positions = x.positions.reshape(-1)
    rows = view.read([jnp.minimum(positions, view.shape[0] - 1)])
    if rows is None:
        return x
    which = jnp.where(positions < view.shape[0], lax.iota(positions.dtype, count), count)
    return dataclasses.replace(x, table=rows, positions=which.reshape(x.positions.shape))
