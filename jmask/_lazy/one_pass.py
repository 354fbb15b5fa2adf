"""A lazy update and its application to the parameters in one pass over the rows.

    update, then add        gather rows; compute; scatter state; scatter-add updates
    in one pass             one scatter with the optimizer as its combiner, for each table

It is possible where the optimizer is elementwise (see `elementwise_program`), all its arrays
have one dtype, and the scatter has room for the scalars that change from step to step. Adam
with a fixed rate takes two: room for two is in a scatter of parameter and both moments. Where
gradients are clipped by their norm first, the scatter takes the clipped gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from jmask._base.array_types import added
from jmask._base.forms import aval_of
from jmask._base.jaxprs import read
from jmask._kernels.update_rows import updated
from jmask._lazy.call import LazyCall
from jmask._lazy.elementwise_program import (
    Combiner,
    ElementwiseProgram,
    elementwise_program,
    number_of,
)
from jmask._lazy.proved_update import ProvedUpdate
from jmask._tables.packed import PackedTable
from jmask._tables.stored_table import is_stored_table
from jmask._tensors.row_sparse import is_row_sparse
from jmask._tensors.storage import stored_values
from jmask._updates.row_update import update_entries


class OnePassTransformation(optax.GradientTransformationExtraArgs):
    """A transformation that can also apply gradients to the parameters in one pass.

    Attributes:
        apply_gradients: (grads, state, params) -> (params, state), of gradients and parameters
            that have a `Fit`.
        rule: the `RowRule` of a named optimizer, else None.
        inner: the transformation whose steps it takes at times, else None.
    """

    apply_gradients: Any
    rule: Any = None
    inner: Any = None


def applied_in_one_pass(call: LazyCall, update: ProvedUpdate) -> tuple[Any, Any] | None:
    """New parameters and state, or None if it takes more than one pass."""
    if not _is_candidate(call):
        return None
    parts = elementwise_program(update)
    if parts is None:
        return None
    members = {t: _members(call, t) for t in range(len(call.gradients)) if _is_table(call, t)}
    combiners = {}
    for table, places in members.items():
        combiner = _combiner(parts, call, table, places)
        if combiner is None:
            return None
        combiners[table] = combiner
    return _run(call, parts, members, combiners)


def _is_candidate(call: LazyCall) -> bool:
    sparse = [g for g in call.gradients if is_row_sparse(g)]
    stored = any(is_stored_table(x) and not isinstance(x, PackedTable) for x in call.params)
    masked = any(valid is not None for valid in call.valid)
    return bool(sparse) and not stored and not masked and all(g.nse for g in sparse)


def _is_table(call: LazyCall, i: int) -> bool:
    return call.gradient_tables[i] is not None


def _applied(old: Any, update: Any) -> Any:
    """A new parameter, or entries of one."""
    return added(old, update).astype(jnp.result_type(old))


def _members(call: LazyCall, table: int) -> list[int]:
    """Positions among all state arrays and then parameters of those that belong to a table."""
    arrays = [*call.state_tables, *call.param_tables]
    return [i for i, owner in enumerate(arrays) if owner == table]


def _combiner(
    parts: ElementwiseProgram, call: LazyCall, table: int, places: list[int]
) -> Combiner | None:
    """The first that a scatter has room for, or None."""
    count, arrays = len(call.gradients), [*call.state, *call.params]
    inputs = [parts.inputs[count + i] for i in places]
    outputs = _outputs(parts, count)
    for combiner in parts.combiners(table, inputs, [outputs[i] for i in places]):
        dtypes = {aval_of(v).dtype for v in combiner.scalars}
        dtypes |= {arrays[i].dtype for i in places}
        has_room = len(combiner.scalars) < len(places)
        if has_room and dtypes == {aval_of(combiner.source).dtype}:
            return combiner
    return None


def _outputs(parts: ElementwiseProgram, count: int) -> list[Any]:
    """State and updates, in the order of state and parameters."""
    return [*parts.outputs[count:], *parts.outputs[:count]]


def _is_entries(parts: ElementwiseProgram, v: Any) -> bool:
    return not isinstance(v, Literal) and v in parts.table_of


def _run(
    call: LazyCall,
    parts: ElementwiseProgram,
    members: dict[int, list[int]],
    combiners: dict[int, Combiner],
) -> tuple[Any, Any]:
    arrays = [*call.state, *call.params]
    # Gradients without equal ids, which are summed only if something is made of them here.
    values = dict(
        zip(parts.inputs, [*map(stored_values, call.gradients), *arrays], strict=True)
    )
    known = {
        v: x for v, x in values.items() if v not in parts.table_of or v in parts.of_gradient
    }
    sources = {t: combiner.source for t, combiner in combiners.items()}
    made = [v for t, v in sources.items() if v is not parts.inputs[t]]
    known = parts.hoisted(known, made)
    results = [
        None if _is_entries(parts, v) else read(known, v)
        for v in _outputs(parts, len(call.gradients))
    ]
    started: list[Any] = []
    for table, places in members.items():
        combiner, source = combiners[table], sources[table]
        summed = source in made or table in parts.reduced
        gradient = call.given[table]
        if summed:
            gradient = call.gradients[table].with_values(known[source])
        scalars = [number_of(known[v]) for v in combiner.scalars]
        is_param = [i >= len(call.state) for i in places]
        new_entries = functools.partial(_new_entries, combiner, is_param)
        started.append(
            update_entries(new_entries, [arrays[i] for i in places], gradient, scalars)
        )
    for places, new in zip(members.values(), updated(started), strict=True):
        for i, x in zip(places, new, strict=True):
            results[i] = x
    _, state_tree, param_tree = call.trees
    state, updates = results[: len(call.state)], results[len(call.state) :]
    params = [
        update if call.gradient_tables[i] is not None else _applied(call.params[i], update)
        for i, update in enumerate(updates)
    ]
    return jax.tree.unflatten(param_tree, params), jax.tree.unflatten(state_tree, state)


def _new_entries(combiner: Combiner, is_param: list[bool], *entries: Any) -> list[Any]:
    """Entries of state and parameters: to these their updates are added."""
    made = zip(is_param, entries, combiner(*entries), strict=False)
    return [_applied(old, new) if param else new for param, old, new in made]
