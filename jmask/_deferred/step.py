"""Take a step of an optimizer where some of the parameters are deferred tables.

    of a deferred table                 what the optimizer sees
    gradient  RowSparse(ids, g)         g, (n, *row), equal ids summed
    parameter DeferredTable             its rows there as they are now, (n, *row)
    state     one unused row            those that the table holds, (n, *row)

So for the optimizer the table is a small dense parameter, of the rows that are in the batch; a
norm over all gradients covers them. `zero_gradient` runs the optimizer's program and finds what
it does to all other rows, and the table takes both.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmask._base.array_types import added
from jmask._base.types import (
    Coefficient,
    Gradient,
    Gradients,
    KeyPath,
    OptState,
    Params,
    PyTree,
    PyTreeDef,
    Table,
)
from jmask._base.validation import leaf_name
from jmask._deferred import zero_gradient
from jmask._deferred.closed_form import (
    Form,
    Pair,
    Quotient,
    StepWithout,
    products_of,
    terms_for,
)
from jmask._deferred.table import DeferredTable
from jmask._deferred.zero_gradient import Root, RowForm, Value, is_known_zero
from jmask._tables.deferral import is_deferred
from jmask._tables.stored_table import NewTable, RowsAt, fitted, is_stored_table, shape_of
from jmask._tensors.row_sparse import RowSparse
from jmask._updates.checks import with_wide_rows
from jmask._updates.state_rows import rows_of_state

Run = Callable[[Gradients, OptState, Params], tuple[PyTree, OptState]]


class NotDeferrableError(ValueError):
    """Say why a table cannot be deferred for a transformation."""

    def __init__(self, why: str):
        super().__init__(
            f"jmask.deferred cannot take this `tx`: {why}. Leave the table an array, with "
            "jmask.densify() for the dense trajectory or jmask.lazy for rows that wait."
        )


def has_deferred(params: Params) -> bool:
    """Decide whether some of the parameters are deferred tables."""
    return any(map(is_deferred, jax.tree.leaves(params, is_leaf=is_stored_table)))


def without_rows(params: Params) -> Params:
    """Return the parameters with arrays (1, *row) for tables, which hold their own state.

    One row, because checkpoints of orbax have no arrays without entries.
    """

    def empty(x: Table) -> Table:
        return jnp.zeros((1, *x.shape[1:]), x.dtype) if is_deferred(x) else x

    return jax.tree.map(empty, params, is_leaf=is_stored_table)


def rows_in_state(
    init: optax.TransformInitFn,
    params: Sequence[Table],
    tree: PyTreeDef,
    state: OptState,
    which: Sequence[bool],
) -> tuple[list[Table], PyTreeDef, dict[int, list[int]]]:
    """Return the leaves of a state, its structure, and those that are rows of each table.

    Args:
        params, tree: leaves and structure of the parameters; deferred tables have one row here.
        which: the tables among them.
    """
    shapes = [
        jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype) if is_deferred(x) else shape_of(x)
        for x in params
    ]
    owners = [i for i, _ in rows_of_state(init, shapes, shapes, list(which), tree, state)]
    leaves, structure = jax.tree.flatten(state, is_leaf=is_stored_table)
    places = {
        i: [k for k, owner in enumerate(owners) if owner == i]
        for i, is_table in enumerate(which)
        if is_table
    }
    return leaves, structure, places


def deferred_step(
    init: optax.TransformInitFn,
    update: Run,
    run: Run,
    updates: Gradients,
    state: OptState,
    params: Params,
    applies: bool,
) -> tuple[PyTree, OptState]:
    """Take a step, with the deferred tables of the parameters.

    Args:
        run: (gradients, state, params) -> (updates or new parameters, state).
        applies: whether `run` returns new parameters.

    Returns:
        The results of `run`, with a new table for each that is deferred: as it is among new
        parameters, and a `NewTable` among updates.

    Raises:
        ValueError: if a table was made for another transformation, or what this one does to
            rows without a gradient has no closed form.
    """
    paths: list[tuple[KeyPath, Table]] = jax.tree.leaves_with_path(
        params, is_leaf=is_stored_table
    )
    leaves = [x for _, x in paths]
    tree: PyTreeDef = jax.tree.structure(params, is_leaf=is_stored_table)
    gradients = with_wide_rows(tree.flatten_up_to(updates))
    tables: dict[int, DeferredTable] = {i: x for i, x in enumerate(leaves) if is_deferred(x)}
    which = [i in tables for i in range(len(leaves))]
    old_state, state_tree, places = rows_in_state(init, leaves, tree, state, which)
    made_for = fingerprint(init, update)

    # Rows in the place of tables, and their forms.
    taken: dict[int, RowsAt] = {}
    forms: dict[int, RowForm] = {}  # of arrays, by identity
    state_leaves = list(old_state)
    for i, table in tables.items():
        _check_made_for(table, leaf_name("params", paths[i][0]), made_for)
        if len(places[i]) != len(table.apart):
            raise NotDeferrableError(
                "it is a chain of transformations, of which each would take a step: put all of "
                "them into one jmask.lazy(optax.chain(...))"
            )
        taken[i], rows = table.taken(_fitted(table, gradients[i]))
        gradients[i], leaves[i] = taken[i].values, rows[0]
        forms[id(gradients[i])] = zero_gradient.ZERO
        forms.update((id(x), zero_gradient.entry(i, number)) for number, x in enumerate(rows))
        for k, x in zip(places[i], rows[1:], strict=True):
            state_leaves[k] = x

    def step_of_rows(updates: Gradients, state: OptState, params: Params) -> PyTree:
        """Return results (not for tables), the state, and new rows of the tables."""
        result, state = run(updates, state, params)
        results = tree.flatten_up_to(result)
        new = [results[i] for i in tables]
        if not applies:
            old = tree.flatten_up_to(params)
            new = [added(old[i], results[i]) for i in tables]
        rest = [() if i in tables else x for i, x in enumerate(results)]
        return rest, state_tree.flatten_up_to(state), new

    arguments = (
        tree.unflatten(gradients),
        state_tree.unflatten(state_leaves),
        tree.unflatten(leaves),
    )
    program, result_shapes = jax.make_jaxpr(step_of_rows, return_shape=True)(*arguments)
    structure: PyTreeDef = jax.tree.structure(result_shapes)
    values = zero_gradient.forms_of(
        program, [Value(x, forms.get(id(x))) for x in jax.tree.leaves(arguments)]
    )
    results, new_state, new_rows = structure.unflatten([x.array for x in values])
    _, state_values, row_values = structure.unflatten(values)

    # The tables take the new rows, and the step of all others.
    for (i, table), rows, value in zip(tables.items(), new_rows, row_values, strict=True):
        form, step = _step_without(i, [value, *(state_values[k] for k in places[i])])
        if table.form is None:
            table = table.begun(form, made_for)
        stepped = table.stepped(taken[i], [rows, *(new_state[k] for k in places[i])], step)
        results[i] = stepped if applies else NewTable(stepped)
        for k in places[i]:
            new_state[k] = old_state[k]
    return tree.unflatten(results), state_tree.unflatten(new_state)


def _fitted(table: DeferredTable, gradient: Gradient) -> RowSparse:
    gradient = fitted(table, gradient)
    if gradient.nse == 0:  # on no rows JAX leaves operations out
        ids = jnp.full((1,), table.shape[0], gradient.row_ids().dtype)
        values = jnp.zeros((1, *table.shape[1:]), gradient.dtype)
        gradient = fitted(table, RowSparse.from_rows(ids, values, table.shape, coalesced=True))
    return gradient


def fingerprint(init: optax.TransformInitFn, update: Run) -> str:
    """Return what distinguishes a transformation from others: its program on a small table.

    The text of a program may differ under another JAX, and then a table that was pickled or
    exported is refused. `jmask.from_arrays` takes the name from `like`, which is new.
    """
    table = jnp.ones((2, 2), jnp.float32)

    def step(gradient: jax.Array, param: jax.Array) -> PyTree:
        return update(gradient, init(param), param)

    try:
        program = jax.make_jaxpr(step)(table, table)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise NotDeferrableError(
            f"it cannot update a single array ({reason}), as optax.partition, optax.masked and "
            "a `mask` by names of parameters cannot: give `mask` as a function, or put "
            "jmask.lazy inside them, and give jmask.deferred what is inside, as in "
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
            f"{name} was made for another optimizer: inactive rows follow the one that "
            "jmask.deferred(table, tx) was given. Use the same `tx`, with numbers that change "
            "from step to step as schedules or by optax.inject_hyperparams; or make the table "
            "anew, jmask.deferred(table.todense(), tx)."
        )


# --- what is proved of a step ------------------------------------------------------------


def _step_without(table: int, values: Sequence[Value]) -> tuple[Form, StepWithout]:
    """Return the step of rows without a gradient.

    Args:
        table: the position of the table among the parameters.
        values: its parameter and state after the step.
    """
    forms = [_sum_of(x.form) for x in values]
    changes: dict[Pair, Coefficient] = {}
    for row, form in enumerate(forms):
        for (owner, column), factor in form.entries.items():
            if owner != table:
                raise NotDeferrableError("a row depends on the rows of another table")
            shapes = [values[x].array.shape for x in (row, column)]
            if shapes[0] != shapes[1] and row:
                raise NotDeferrableError("its state mixes the entries of a row")
            change = factor.rest + (factor.ones - (row == column))
            if not is_known_zero(change):
                changes[row, column] = change
        if (table, row) not in form.entries:
            changes[row, row] = -1.0
    param, *state = forms
    if any(x.quotients or x.signs for x in state):
        raise NotDeferrableError("its state holds quotients or signs of what it held before")
    terms = [(a, c, root) for (_, a), c, root in param.quotients if not is_known_zero(c)]
    signs = [(a, d) for (_, a), d in param.signs.items() if not is_known_zero(d)]
    if len(terms) > 1 or len(signs) > 1:
        raise NotDeferrableError("its step is a sum of several quotients or signs")
    special = {a for a, *_ in terms} | {a for a, _ in signs} | {r.b[1] for *_, r in terms}
    for row, column in changes:
        if (row in special and column != row) or (column == 0 < row and special):
            raise NotDeferrableError(
                "the moments that it divides depend on the parameter, or on each other"
            )
    sign, d = signs[0] if signs else (None, None)
    form_of_step = Form(len(values), products_of(tuple(changes), len(values)), sign=sign)
    step = StepWithout(changes, None, d)
    return _with_quotient(form_of_step, step, *terms[0]) if terms else (form_of_step, step)


def _sum_of(form: RowForm | None) -> RowForm:
    if form is None:
        raise NotDeferrableError("a row does not depend on what it was before")
    if form.unknown is not None:
        raise NotDeferrableError(form.unknown)
    if not form.is_sum or (form.constant is not None and not is_known_zero(form.constant)):
        raise NotDeferrableError("something is added to every row in each step")
    return form


def _with_quotient(
    form: Form, step: StepWithout, a: int, c: Coefficient, root: Root
) -> tuple[Form, StepWithout]:
    b = root.b[1]
    e0, e1 = (0.0 if x is None else x for x in (root.e0, root.e1))
    has_root = not is_known_zero(e0)
    if not has_root and is_known_zero(e1):
        raise NotDeferrableError("with `eps` 0 it divides 0 by 0 in rows without a gradient")
    b1, b2 = step.decay(a), step.decay(b)
    is_corrected = not isinstance(root.y, int | float)
    terms = terms_for(b1, b2, is_corrected, has_root)
    if terms is None:
        raise NotDeferrableError(
            f"with `b1`={b1:.6g} and `b2`={b2:.6g} no short sum of its steps is "
            "exact: b2 has to be nearer to 1 than b1 is"
        )
    form = dataclasses.replace(form, quotient=(a, b), has_root=has_root, terms=terms)
    return form, step._replace(quotient=Quotient(c, root.y, e0, e1))
