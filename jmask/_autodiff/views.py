"""Lookups in an array that is made of tables, read from the tables themselves.

    y    = convert_element_type t        t (V, D) in bfloat16: O(V) where it is made
    rows = gather y ids                  convert_element_type (gather t ids): O(n)

XLA makes such an array whole in each step: on TPUs (libtpu 0.0.50) and, of slices and
concatenations, on CPUs (jaxlib 0.12.0). So equations that move rows, or compute on each entry
alone, note a *view* of what they make: how to read its rows from the tables. A gather of fewer
rows than the array has reads them through the view. What made the array is then not needed, and
XLA drops it.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jmask._autodiff.view_rules import RULES, View, array_view
from jmask._base.array_types import ArrayFacts, explicit_sharding, is_known, trailing
from jmask._base.forms import aval_of, bodies_of, name_of, parameter
from jmask._base.jaxprs import interpret
from jmask._base.row_ids import id_dtype, widen
from jmask._base.types import Shaped, Value
from jmask._kernels.bag_sum import BAG_SUM, BagSum
from jmask._kernels.gather import SLOW_COPY, Gather, slow_copy_of

LOOKUPS = ("gather", SLOW_COPY.name)
"""The equations that look rows up."""

_TABLE = "table"
_KNOWN: ArrayFacts[View | str] = ArrayFacts()
"""Views of arrays that are made of tables, and `_TABLE` for tables."""

# What may read rows of a view.
READERS = (*LOOKUPS, "slice", "dynamic_slice")


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
    """Note the views of what an equation of `RULES` makes, if it makes rows of rows."""
    known = [_KNOWN.of(x) for x in arguments]
    if not any(known) or 0 in aval_of(eqn.outvars[0]).shape:
        return
    pairs = zip(known, arguments, strict=True)
    views = [array_view(x) if isinstance(view, str) else view for view, x in pairs]
    for output, view in zip(outputs, RULES[name](eqn, arguments, views), strict=False):
        if view.shape:
            _KNOWN.note(output, view)


def _view_of(x: Value) -> View | None:
    """Return the view of an array that is made of tables and no table itself."""
    known = _KNOWN.of(x)
    return known if isinstance(known, View) else None


def makes_view(eqn: JaxprEqn) -> bool:
    """Decide whether an equation may make a view."""
    return name_of(eqn) in RULES


def makes_views(jaxpr: Jaxpr) -> bool:
    """Decide whether a call makes nothing but views and scalars, as `jnp.flip` does."""
    return all(makes_view(e) or not aval_of(e.outvars[0]).shape for e in jaxpr.eqns)


def is_made_of_tables(x: Value) -> bool:
    """Decide whether an array can be read from the tables that it is made of."""
    return _view_of(x) is not None


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
    """Return rows that an equation of `READERS` reads, from what its operand is made of.

    None if its operand is made of none, or not much larger than what is read.
    """
    view = _view_of(arguments[0])
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
    view, count = _view_of(x.table), x.positions.size
    if view is None or count * view.tables >= view.shape[0]:
        return x
    positions = x.positions.reshape(-1)
    rows = view.read([jnp.minimum(positions, view.shape[0] - 1)])
    if rows is None:
        return x
    which = jnp.where(positions < view.shape[0], lax.iota(positions.dtype, count), count)
    return dataclasses.replace(x, table=rows, positions=which.reshape(x.positions.shape))
