"""Apply a lazy update to the parameters in one pass over the rows.

    update, then add        gather rows; compute; scatter state; scatter-add updates
    in one pass             one scatter with the optimizer as its combiner, for each table

The update must be elementwise in the gradient, the parameter and the state of a table. The
shapes of the program that was proved, whose number of rows is open, decide that:

    count -> count + 1 -> 1 - 0.9 ** count        ()          computed before the pass
    g -> g * g -> sum                             ()          of the gradient alone: so is this
    full_like(g, 0.1)                             (rows, D)   one number, which fills it: so too
    m, g  -> 0.9 m + 0.1 g -> / (1 - 0.9 ** c)    (rows, D)   entry by entry: the combiner
    mean(g * g, 1)                                (rows,)     neither: it takes more passes

All arrays must have one dtype, and the scatter must have room for the scalars that change from
step to step: it takes one operand fewer than there are tables. Adam with a fixed rate needs two
scalars, and a scatter of parameter and both moments takes two; constants are compiled in and
need none. A value made of the gradient alone (clipped by the norm of all gradients) can
replace the gradient, which saves its scalars.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import JaxprEqn, Var

from jmask._base.array_types import added
from jmask._base.forms import aval_of
from jmask._base.jaxprs import ARITHMETIC, bound, needed_for, read, run
from jmask._base.types import (
    ArraysFunction,
    Atom,
    Function,
    Gradient,
    OptState,
    Params,
    Table,
    Value,
)
from jmask._kernels.update_rows import updated
from jmask._lazy.proved_update import ProvedUpdate
from jmask._lazy.row_local import NEUTRAL, axes_of_rows
from jmask._tables.packed import PackedTable
from jmask._tables.stored_table import is_stored_table
from jmask._tensors.storage import stored_values
from jmask._updates.row_update import update_rows

_FILL = "broadcast_in_dim"


class OnePassTransformation(optax.GradientTransformationExtraArgs):
    """A transformation that can also apply gradients to the parameters in one pass.

    Attributes:
        apply_gradients: (grads, state, params) -> (params, state), of gradients and parameters
            that have a `Fit`.
        rule: the `RowRule` of a named optimizer, else None.
        inner: the transformation whose steps it takes at times, else None.
    """

    apply_gradients: Function
    rule: object = None
    inner: optax.GradientTransformation | None = None


def applied_in_one_pass(update: ProvedUpdate) -> tuple[Params, OptState] | None:
    """Return new parameters and state, or None if it takes more than one pass."""
    leaves, gradients = update.call.leaves, update.call.gradients
    tables = [i for i, leaf in enumerate(gradients) if leaf.table is not None]
    is_empty = not tables or any(gradients[i].value.nse == 0 for i in tables)
    if is_empty or any(leaf.valid is not None for leaf in gradients):
        return None
    params = [leaf.value for leaf in leaves if leaf.kind == "param"]
    if any(is_stored_table(x) and not isinstance(x, PackedTable) for x in params):
        return None
    entries = _entries(update)
    if entries is None:
        return None
    outputs = update.proof.program.jaxpr.outvars
    # What each leaf becomes; a parameter takes the output of its gradient.
    outputs = [*outputs, *outputs[: len(gradients)]]
    combiners: dict[int, Combiner] = {}
    for table in tables:
        ways = _combiners(update, entries, table, outputs)
        combiner = next((c for c in ways if c.step is not None or _fits(update, c)), None)
        if combiner is None:
            return None
        combiners[table] = combiner
    results = _run(update, entries, combiners, outputs)
    _, state_tree, param_tree, _ = update.call.trees
    new_params = [results[i] for i, leaf in enumerate(leaves) if leaf.kind == "param"]
    new_state = [results[i] for i, leaf in enumerate(leaves) if leaf.kind == "state"]
    return param_tree.unflatten(new_params), state_tree.unflatten(new_state)


# --- the update, taken apart -------------------------------------------------------------


class Entries(NamedTuple):
    """The variables of an elementwise update that hold entries of tables.

    Attributes:
        table_of: the table a variable has an entry of for each of the table's; no others depend
            on rows.
        from_gradient: those that are made of the gradient alone.
        filled: those that have the shape of a table and one number in it.
        reduced: tables over whose gradient something shared is summed.
    """

    table_of: dict[Var, int]
    from_gradient: set[Var]
    filled: set[Var]
    reduced: set[int]


def _entries(update: ProvedUpdate) -> Entries | None:
    """Return the entries of tables in an update, or None if it is not elementwise."""
    jaxpr, leaves = update.proof.program.jaxpr, update.call.leaves
    # The open number of rows in its shape tells to which table an array belongs.
    tables = {
        aval_of(v).shape: leaf.table
        for v, leaf in zip(jaxpr.invars, leaves, strict=True)
        if leaf.table is not None and leaf.kind == "gradient"
    }
    table_of: dict[Var, int] = {}
    from_gradient: set[Var] = set()
    filled: set[Var] = set()
    reduced: set[int] = set()
    for v, leaf in zip(jaxpr.invars, leaves, strict=True):
        if leaf.table is not None:
            if aval_of(v).shape not in tables or 0 in aval_of(v).shape:
                return None  # one number for each row, say
            table_of[v] = leaf.table
            if leaf.kind == "gradient":
                from_gradient.add(v)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands = {v for v in eqn.invars if isinstance(v, Var)}
        entries = operands & table_of.keys()
        if not any(map(axes_of_rows, eqn.outvars)):
            if entries or operands & filled:
                if name not in NEUTRAL or not operands <= from_gradient:
                    return None
                reduced.update(table_of[v] for v in entries)
            continue
        out, *more = eqn.outvars
        if more or aval_of(out).shape not in tables or eqn.effects:
            return None
        others = operands - entries - filled
        if any(aval_of(v).ndim for v in others) or name not in (*ARITHMETIC, _FILL):
            return None
        if not entries:
            filled.add(out)
        elif name == _FILL:
            return None
        else:
            table_of[out] = tables[aval_of(out).shape]
            if entries <= from_gradient:
                from_gradient.add(out)
    return Entries(table_of, from_gradient, filled, reduced)


def _on_entries(entries: Entries) -> Callable[[JaxprEqn, list[Value]], Sequence[Value]]:
    """Return the rule that runs equations with a number in the place of what it fills."""

    def rule(eqn: JaxprEqn, values: list[Value]) -> Sequence[Value]:
        if entries.filled.issuperset(eqn.outvars) and eqn.primitive.name == _FILL:
            return values[:1]
        if entries.table_of.keys() >= {*eqn.outvars}:
            values = list(jnp.broadcast_arrays(*values))
        return bound(eqn, values)

    return rule


class Combiner(NamedTuple):
    """A way to compute new entries of a table.

    Attributes:
        places: of the leaves that are replaced: state and parameters of one table.
        source: the gradient, or what is made of it.
        scalars: shared numbers.
        function: entries of the leaves, of `source` and of `scalars` -> new entries.
        step: `scalars`, rows of `source` -> what is added to the parameter, if that is all and
            is linear in the gradient: rows of equal ids may be added one at a time.
    """

    places: list[int]
    source: Var
    scalars: list[Var]
    function: ArraysFunction
    step: Function | None = None


def _combiners(
    update: ProvedUpdate, entries: Entries, table: int, outputs: Sequence[Atom]
) -> Iterator[Combiner]:
    """Yield ways to compute entries of a table, from its gradient or a value of that."""
    jaxpr, table_of = update.proof.program.jaxpr, entries.table_of
    leaves, known = update.call.leaves, update.proof.known
    places = [i for i, x in enumerate(leaves) if x.table == table and x.kind != "gradient"]
    are_params = [leaves[i].kind == "param" for i in places]
    inputs, new = [jaxpr.invars[i] for i in places], [outputs[i] for i in places]
    wanted = [v for v in new if isinstance(v, Var)]
    if [table_of.get(v) for v in wanted] != [table] * len(places):
        return  # a state that is filled anew
    constants: dict[Var, Value] = {
        v: np.asarray(x, aval_of(v).dtype)
        for v, x in known.items()
        if x is not None and v not in table_of
    }

    def combiner(source: Var, chosen: Sequence[JaxprEqn], scalars: list[Var]) -> Combiner:
        # JAX keeps this function: it closes over no array that is traced.
        def function(*arrays: jax.Array) -> list[jax.Array]:
            values = dict(constants)
            values.update(zip((*inputs, source, *scalars), arrays, strict=True))
            run(chosen, values)
            results = zip(are_params, arrays, wanted, strict=False)
            return [
                _applied(x, values[v]) if is_param else values[v] for is_param, x, v in results
            ]

        def step(numbers: Sequence[jax.Array], rows: jax.Array) -> jax.Array:
            values = constants | {source: rows} | dict(zip(scalars, numbers, strict=True))
            run(chosen, values, _on_entries(entries))
            return values[wanted[0]]

        is_linear = are_params == [True] and all(_scales(eqn, table_of) for eqn in chosen)
        return Combiner(places, source, scalars, function, step if is_linear else None)

    equations = [e for e in jaxpr.eqns if e.outvars and table_of.get(e.outvars[0]) == table]
    gradient = jaxpr.invars[table]
    made = [v for e in equations for v in e.outvars if v in entries.from_gradient]
    for source in (gradient, *made):
        chosen, needed = needed_for(wanted, equations, source)
        if source is gradient or gradient not in needed:
            scalars = [v for v in needed if v not in table_of and v not in constants]
            yield combiner(source, chosen, scalars)


def _scales(eqn: JaxprEqn, table_of: Mapping[Var, int]) -> bool:
    """Decide whether an equation multiplies entries by a number."""
    are_entries = [isinstance(v, Var) and v in table_of for v in eqn.invars]
    name = eqn.primitive.name
    return (
        name in ("mul", "div", "neg")
        and sum(are_entries) == 1
        and (name == "mul" or are_entries[0])
    )


def _fits(update: ProvedUpdate, combiner: Combiner) -> bool:
    """Decide whether a scatter has room for the scalars, and all arrays have one dtype."""
    dtypes = {update.call.leaves[i].value.dtype for i in combiner.places}
    dtypes |= {aval_of(v).dtype for v in combiner.scalars}
    has_room = len(combiner.scalars) < len(combiner.places)
    return has_room and dtypes == {aval_of(combiner.source).dtype}


# --- the pass ----------------------------------------------------------------------------


def _run(
    update: ProvedUpdate,
    entries: Entries,
    combiners: dict[int, Combiner],
    outputs: Sequence[Atom],
) -> dict[int, Table]:
    """Return the new state and parameters, by the positions of the leaves they replace."""
    leaves, program = update.call.leaves, update.proof.program
    jaxpr = program.jaxpr
    known = {
        v: stored_values(leaf.value) if leaf.kind == "gradient" else leaf.value
        for v, leaf in zip(jaxpr.invars, leaves, strict=True)
        if v not in entries.table_of or v in entries.from_gradient
    }
    computed = [c.source for t, c in combiners.items() if c.source is not jaxpr.invars[t]]
    # Beside these, all that does not depend on rows is computed before the pass.
    known.update(zip(jaxpr.constvars, program.consts, strict=True))
    shared = [v for eqn in jaxpr.eqns for v in eqn.outvars if v not in entries.table_of]
    run(needed_for([*shared, *computed], jaxpr.eqns)[0], known, _on_entries(entries))
    started = []
    for table, combiner in combiners.items():
        gradient, step = leaves[table].uncoalesced, combiner.step
        # Rows of equal ids are summed here only if something is computed of the sums. Then
        # nothing is gained by adding them one at a time.
        if combiner.source in computed or table in entries.reduced:
            gradient, step = leaves[table].value.with_values(known[combiner.source]), None
        scalars = [known[v] for v in combiner.scalars]
        tables = [leaves[i].value for i in combiner.places]
        step = step and functools.partial(step, scalars)
        started.append(update_rows(combiner.function, tables, gradient, scalars, linear=step))
    results: dict[int, Table] = {}
    for combiner, new in zip(combiners.values(), updated(started), strict=True):
        results.update(zip(combiner.places, new, strict=True))
    for i, (leaf, v) in enumerate(zip(leaves, outputs, strict=False)):
        if leaf.table is None and leaf.kind != "gradient":
            new = read(known, v)
            results[i] = _applied(leaf.value, new) if leaf.kind == "param" else new
    return results


def _applied(old: Table, update: Gradient) -> Table:
    """Return a new parameter, or entries of one."""
    return added(old, update).astype(jnp.result_type(old))
