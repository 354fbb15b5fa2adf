"""A step of an optimizer where some of the parameters are deferred tables.

    of a deferred table                 what the optimizer sees
    gradient  RowSparse(ids, g)         g, (n, *row), equal ids summed
    parameter DeferredTable             its rows there as they are now, (n, *row)
    state     one row that is not used  those that the table holds, (n, *row)

So the table is for the optimizer a small dense parameter, of the rows that are in the batch;
a norm over all gradients covers them. The program that it runs is read once more for what it
does to the rows that are not (`without_gradient`), and the table takes both.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmask._base.array_types import added
from jmask._base.validation import leaf_name
from jmask._lazy.away_forms import ZERO as NO_GRADIENT
from jmask._lazy.away_forms import Away, Entry, Root, entry
from jmask._lazy.state_rows import tables_of_state
from jmask._lazy.without_gradient import Value, forms_of
from jmask._tables.deferred_table import DeferredTable, is_deferred
from jmask._tables.skipped_steps import Form, Quotient, StepWithout, products_of, terms_for
from jmask._tables.stored_table import NewTable, fitted, is_stored_table, shape_of
from jmask._tensors.row_sparse import RowSparse
from jmask._updates.checks import with_wide_rows

Run = Callable[[Any, Any, Any], tuple[Any, Any]]


class NotDeferrableError(ValueError):
    """Why a table cannot be deferred for a transformation."""

    def __init__(self, why: str):
        super().__init__(
            f"jmask.deferred cannot take this `tx`: {why}. Leave the table an array, with "
            "jmask.densify() for the dense trajectory or jmask.lazy for rows that wait."
        )


def has_deferred(params: Any) -> bool:
    """Whether some of the parameters are deferred tables."""
    return any(map(is_deferred, jax.tree.leaves(params, is_leaf=is_stored_table)))


def without_rows(params: Any) -> Any:
    """The parameters with arrays (1, *row) for deferred tables, whose state they hold.

    One row, for checkpoints of orbax have no arrays without entries.
    """

    def empty(x: Any) -> Any:
        return jnp.zeros((1, *x.shape[1:]), x.dtype) if is_deferred(x) else x

    return jax.tree.map(empty, params, is_leaf=is_stored_table)


def deferred_step(
    init: Callable[[Any], Any],
    update: Run,
    run: Run,
    updates: Any,
    state: Any,
    params: Any,
) -> tuple[Any, Any]:
    """A step, with the deferred tables of the parameters.

    Args:
        init, update: of the transformation.
        run: `update`, or (gradients, state, params) -> (new parameters, state).
        updates, state, params: of the step.

    Returns:
        What `run` does, with a new table for each that is deferred: as it is among new
        parameters, and a `NewTable` among updates.

    Raises:
        ValueError: if a table was made for another transformation, or what this one does to
            rows without a gradient has no closed form.
    """
    leaves = jax.tree.leaves(params, is_leaf=is_stored_table)
    tree: Any = jax.tree.structure(params, is_leaf=is_stored_table)
    names = [leaf_name("params", path) for path, _ in _with_paths(params)]
    gradients = with_wide_rows(tree.flatten_up_to(updates))
    old_state = jax.tree.leaves(state, is_leaf=is_stored_table)
    state_tree: Any = jax.tree.structure(state, is_leaf=is_stored_table)
    owners = _owners(init, leaves, tree, state)
    made_for = _name_of(init, update)
    tables: dict[int, DeferredTable] = {}
    taken: dict[int, RowSparse] = {}
    forms: dict[int, Away] = {}  # of arrays, by identity
    state_leaves = list(old_state)
    places = {
        i: [k for k, owner in enumerate(owners) if owner == i]
        for i, x in enumerate(leaves)
        if is_deferred(x)
    }
    for i, table in enumerate(leaves):
        if not is_deferred(table):
            continue
        _check_made_for(table, names[i], made_for)
        if len(places[i]) != len(table.apart):
            raise NotDeferrableError(
                "it is a chain of transformations, of which each would take a step: put all of "
                "them into one jmask.lazy(optax.chain(...))"
            )
        taken[i], rows = table.taken(_fitted(table, gradients[i]))
        tables[i] = table
        gradients[i], leaves[i] = taken[i].values, rows[0]
        forms[id(gradients[i])] = NO_GRADIENT
        forms.update((id(x), entry(i, number)) for number, x in enumerate(rows))
        for k, x in zip(places[i], rows[1:], strict=True):
            state_leaves[k] = x

    def of_rows(updates: Any, state: Any, params: Any) -> Any:
        result, state = run(updates, state, params)
        found = tree.flatten_up_to(result)
        new = [found[i] for i in tables]
        if run is update:
            old = tree.flatten_up_to(params)
            new = [added(old[i], found[i]) for i in tables]
        rest = [() if i in tables else x for i, x in enumerate(found)]
        return rest, state_tree.flatten_up_to(state), new

    given = (
        tree.unflatten(gradients),
        state_tree.unflatten(state_leaves),
        tree.unflatten(leaves),
    )
    program, shapes = jax.make_jaxpr(of_rows, return_shape=True)(*given)
    inputs = [Value(x, forms.get(id(x))) for x in jax.tree.leaves(given)]
    structure: Any = jax.tree.structure(shapes)
    results, new_state, new = structure.unflatten(forms_of(program, inputs))
    results = _arrays(results, tables)
    new_state = _arrays(new_state, [k for found in places.values() for k in found])
    for (i, table), row in zip(tables.items(), new, strict=True):
        mine = places[i]
        found = [row, *(new_state[k] for k in mine)]
        form, step = _step_without(i, found)
        if table.form is None:
            table = table.begun(form, made_for)
        stepped = table.stepped(taken[i], list(map(_array, found)), step)
        results[i] = NewTable(stepped) if run is update else stepped
        for k in mine:
            new_state[k] = old_state[k]
    return tree.unflatten(results), state_tree.unflatten(new_state)


def _is_value(x: Any) -> bool:
    return isinstance(x, Value)


def _array(x: Value) -> Any:
    return x.array


def _arrays(trees: Sequence[Any], but: Collection[int]) -> list[Any]:
    """The trees with values as arrays, `but` for those with these numbers."""
    return [
        x if i in but else jax.tree.map(_array, x, is_leaf=_is_value)
        for i, x in enumerate(trees)
    ]


def _with_paths(params: Any) -> Any:
    return jax.tree.leaves_with_path(params, is_leaf=is_stored_table)


def _owners(init: Any, leaves: list[Any], tree: Any, state: Any) -> list[int | None]:
    """For each leaf of the state the deferred table whose rows it stands for, or None."""
    shapes = [shape_of(x) for x in leaves]
    shapes = [
        jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) if is_deferred(leaf) else x
        for x, leaf in zip(shapes, leaves, strict=True)
    ]
    transformation = optax.GradientTransformation(init, lambda *_: _)
    which = list(map(is_deferred, leaves))
    return tables_of_state(transformation, shapes, which, tree, state)


def _fitted(table: DeferredTable, gradient: Any) -> RowSparse:
    gradient = fitted(table, gradient)
    if gradient.nse == 0:  # on no rows JAX leaves operations out
        ids = jnp.full((1,), table.shape[0], gradient.row_ids().dtype)
        values = jnp.zeros((1, *table.shape[1:]), gradient.dtype)
        gradient = fitted(table, RowSparse.of_rows(ids, values, table.shape, coalesced=True))
    return gradient


def _name_of(init: Callable[[Any], Any], update: Run) -> str:
    """What distinguishes a transformation from others: its program on a small table."""
    table = jnp.ones((2, 2), jnp.float32)

    def step(gradient: jax.Array, param: jax.Array) -> Any:
        return update(gradient, init(param), param)

    try:
        program = jax.make_jaxpr(step)(table, table)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise NotDeferrableError(
            f"it cannot update a single array ({reason}), as optax.partition and optax.masked "
            "cannot: put jmask.lazy inside them, and give jmask.deferred what is inside, as in "
            'optax.partition({"a": tx, "b": other}, labels) with tx = jmask.lazy(...)'
        ) from error
    text = re.sub(r"0x[0-9a-f]+", "", str(program.jaxpr))
    digest = hashlib.sha256(text.encode())
    for x in program.consts:
        if not isinstance(x, jax.core.Tracer):
            digest.update(np.asarray(x).tobytes())
    return digest.hexdigest()[:16]


def _check_made_for(table: DeferredTable, name: str, made_for: str) -> None:
    if table.form is not None and table.made_for != made_for:
        raise ValueError(
            f"{name} was made for another optimizer: rows that are away follow the one that "
            "jmask.deferred(table, tx) was given. Use the same `tx`, with numbers that change "
            "from step to step as schedules or by optax.inject_hyperparams; or make the table "
            "anew, jmask.deferred(table.todense(), tx)."
        )


# --- what is proved of a step ------------------------------------------------------------


def _step_without(table: int, found: Sequence[Value]) -> tuple[Form, StepWithout]:
    """The step of rows without a gradient, from the forms of parameter and state after it."""
    forms = [_form_of(x) for x in found]
    changes: dict[tuple[int, int], Any] = {}
    for row, away in enumerate(forms):
        for (owner, column), factor in away.entries.items():
            if owner != table:
                raise NotDeferrableError("a row depends on the rows of another table")
            if row != column and found[row].array.shape != found[column].array.shape and row:
                raise NotDeferrableError("its state mixes the entries of a row")
            change = factor.rest + (factor.ones - (row == column))
            if not _is_zero(change):
                changes[row, column] = change
        if (table, row) not in away.entries:
            changes[row, row] = -1.0
    _, *state = forms
    if any(x.quotients or x.signs for x in state):
        raise NotDeferrableError("its state holds quotients or signs of what it held before")
    param = forms[0]
    terms = [(a, c, root) for a, c, root in param.quotients if not _is_zero(c)]
    signs = {a: d for a, d in param.signs.items() if not _is_zero(d)}
    if len(terms) > 1 or len(signs) > 1:
        raise NotDeferrableError("its step is a sum of several quotients or signs")
    special = {a[1] for a, *_ in terms} | {a[1] for a in signs} | {r.b[1] for *_, r in terms}
    for row, column in changes:
        if (row in special and column != row) or (column == 0 < row and special):
            raise NotDeferrableError(
                "the moments that it divides depend on the parameter, or on each other"
            )
    quotient, of_quotient = _quotient(terms, changes)
    sign = next(iter(signs.items()), None)
    form = Form(
        width=len(found),
        pairs=products_of(tuple(changes), len(found)),
        sign=None if sign is None else sign[0][1],
        **of_quotient,
    )
    return form, StepWithout(changes, quotient, None if sign is None else sign[1])


def _form_of(x: Value) -> Away:
    form = x.away
    if form is None:
        raise NotDeferrableError("a row does not depend on what it was before")
    if form.unknown is not None:
        raise NotDeferrableError(form.unknown)
    if not form.is_sum or (form.constant is not None and not _is_zero(form.constant)):
        raise NotDeferrableError("something is added to every row in each step")
    return form


def _quotient(
    terms: Sequence[tuple[Entry, Any, Root]], changes: dict[tuple[int, int], Any]
) -> tuple[Quotient | None, dict[str, Any]]:
    if not terms:
        return None, {}
    (((_, a), c, root),) = terms
    b = root.b[1]
    e0 = 0.0 if root.e0 is None else root.e0
    e1 = 0.0 if root.e1 is None else root.e1
    if _is_zero(e0) and _is_zero(e1):
        raise NotDeferrableError("with `eps` 0 it divides 0 by 0 in rows without a gradient")
    b1, b2 = (1 + changes.get((i, i), 0.0) for i in (a, b))
    is_corrected = not isinstance(root.y, int | float)
    count = terms_for(b1, b2, is_corrected, has_root=not _is_zero(e0))
    if count is None:
        raise NotDeferrableError(
            f"with `b1`={b1:.6g} and `b2`={b2:.6g} no short sum of its steps is "
            "exact: b2 has to be nearer to 1 than b1 is"
        )
    of_form = {"quotient": (a, b), "has_root": not _is_zero(e0), "terms": count}
    return Quotient(c, root.y, e0, e1), of_form


def _is_zero(x: Any) -> bool:
    return isinstance(x, int | float) and x == 0
