"""Apply a lazy update to the parameters in one pass over the rows.

    update, then add        gather rows; compute; scatter state; scatter-add updates
    in one pass             one scatter with the optimizer as its combiner, for each table

The update must be elementwise in the gradient, the parameter and the state of a table. What
the proof of row-locality knows of each variable of its program decides that:

    count -> count + 1 -> 1 - 0.9 ** count        Replicated: computed before the pass
    g -> g * g -> sum                             of the gradient alone: so is this
    m, g  -> 0.9 m + 0.1 g -> / (1 - 0.9 ** c)    RowWise, entry by entry: the combiner
    sum(m * m)                                    none of these: the update takes more passes

All arrays must have one dtype, and the scatter must have room for the scalars that change from
step to step: it takes one operand fewer than there are tables. Adam with a fixed rate needs two
scalars, and a scatter of parameter and both moments takes two; constants are compiled in and
need none. A value made of the gradient alone (clipped by the norm of all gradients) can
replace the gradient, which saves its scalars.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jmask._base.array_types import added
from jmask._base.forms import aval_of
from jmask._base.jaxprs import ARITHMETIC, read, run
from jmask._base.types import Atom, Function, Gradient, OptState, Params, Table, Value
from jmask._kernels.update_rows import updated
from jmask._lazy.lattice import Replicated, RowWise
from jmask._lazy.proved_update import LazyCall, ProvedUpdate
from jmask._lazy.row_locality import NEUTRAL
from jmask._tables.packed import PackedTable
from jmask._tables.stored_table import is_stored_table
from jmask._tensors.storage import stored_values
from jmask._updates.row_update import update_rows

# --- the update, taken apart -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ElementwiseProgram:
    """A program whose variables are entries of tables or do not depend on rows.

    Attributes:
        program: its first inputs are the gradients.
        call: the leaves that its inputs are.
        table_of: the table a variable has entries of.
        from_gradient: the variables with entries that are made of its gradient alone.
        reduced: tables over whose gradient something shared is summed.
        constants: the number that a shared variable is filled with, if it is known.
    """

    program: ClosedJaxpr
    call: LazyCall
    table_of: dict[Var, int]
    from_gradient: set[Var]
    reduced: set[int]
    constants: dict[Var, Value]

    @property
    def inputs(self) -> Sequence[Var]:
        return self.program.jaxpr.invars

    @property
    def outputs(self) -> list[Atom]:
        """Return what each leaf becomes; a parameter takes the output of its gradient."""
        outputs = self.program.jaxpr.outvars
        return [*outputs, *outputs[: len(self.call.gradients)]]

    def combiners(self, table: int) -> Iterator["Combiner"]:
        """Yield ways to compute entries of a table, from its gradient or a value of that."""
        places = [
            i
            for i, leaf in enumerate(self.call.leaves)
            if leaf.table == table and leaf.kind != "gradient"
        ]
        inputs, every = [self.inputs[i] for i in places], self.outputs
        outputs = [v for v in (every[i] for i in places) if isinstance(v, Var)]
        if [self.table_of.get(v) for v in outputs] != [table] * len(places):
            return  # a state that is filled anew
        equations_of_table = [
            e for e in self.program.jaxpr.eqns if self.table_of.get(e.outvars[0]) == table
        ]
        made = [v for eqn in equations_of_table for v in eqn.outvars if v in self.from_gradient]
        gradient = self.inputs[table]
        is_param = [self.call.leaves[i].kind == "param" for i in places]
        for source in (gradient, *made):
            equations, needed = _equations_for(outputs, equations_of_table, source)
            if source is gradient or gradient not in needed:
                shared = [v for v in needed if v not in self.table_of]
                constants = {v: self.constants[v] for v in shared if v in self.constants}
                scalars = [v for v in shared if v not in constants]
                yield Combiner(
                    places, is_param, source, inputs, outputs, equations, scalars, constants
                )


@dataclasses.dataclass(frozen=True, eq=False)
class Combiner:
    """A function of entries of `inputs`, of `source` and of `scalars` that gives new entries.

    Attributes:
        places: of the leaves that are replaced: state and parameters of one table.
        is_param: which of them take `outputs` as their updates, to be added.
        source: the gradient, or what is made of it.
        inputs, outputs: of entries.
        equations: that make the outputs.
        scalars: shared variables that they use, each filled with one number.
        constants: those whose number is known.
    """

    places: list[int]
    is_param: list[bool]
    source: Var
    inputs: list[Var]
    outputs: list[Var]
    equations: list[JaxprEqn]
    scalars: list[Var]
    constants: dict[Var, Value]

    def __call__(self, *entries: jax.Array) -> list[jax.Array]:
        arguments = zip([*self.inputs, self.source, *self.scalars], entries, strict=True)
        values = self.constants | dict(arguments)
        run(self.equations, values)
        computed = zip(self.is_param, entries, self.outputs, strict=False)
        return [
            _applied(old, values[v]) if is_param else values[v] for is_param, old, v in computed
        ]


def _equations_for(
    wanted: Iterable[Var], equations: Sequence[JaxprEqn], source: Var | None = None
) -> tuple[list[JaxprEqn], dict[Var, None]]:
    """Return the equations that compute `wanted` from `source`, and all variables they need."""
    needed, selected = dict.fromkeys(wanted), []
    for eqn in reversed(equations):
        if source not in eqn.outvars and not needed.keys().isdisjoint(eqn.outvars):
            selected.append(eqn)
            needed.update({v: None for v in eqn.invars if isinstance(v, Var)})
    return selected[::-1], needed


def elementwise_program(update: ProvedUpdate) -> ElementwiseProgram | None:
    """Return the parts of an update, or None if it is not elementwise."""
    jaxpr, kinds = update.program.jaxpr, update.kinds
    rows = {v: kind for v, kind in kinds.items() if isinstance(kind, RowWise)}
    table_of = {v: kind.table for v, kind in rows.items()}
    from_gradient = {v for i, v in enumerate(jaxpr.invars) if table_of.get(v) == i}
    shapes = {table_of[v]: aval_of(v).shape for v in from_gradient}
    for v, kind in rows.items():
        shape = aval_of(v).shape
        is_whole = (kind.axis, kind.merged) == (0, (1, 1))  # nothing else in that axis
        if not is_whole or shape != shapes[kind.table] or 0 in shape:
            return None  # one number for each row, say
    # One number for all entries; the others of an equation have one for each.
    filled = {
        v
        for v, kind in kinds.items()
        if isinstance(kind, Replicated) and len(kind.uniform) == aval_of(v).ndim
    }
    reduced: set[int] = set()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name  # what was proved has no form that is not known
        operands = {v for v in eqn.invars if isinstance(v, Var)}
        entries = operands & table_of.keys()
        if not entries:
            continue
        if eqn.outvars[0] not in table_of:
            if name not in NEUTRAL or not entries <= from_gradient:
                return None
            reduced.update(table_of[v] for v in entries)
        elif name not in ARITHMETIC or eqn.effects or not operands - entries <= filled:
            return None
        elif entries <= from_gradient:
            from_gradient.update(eqn.outvars)
    constants = {
        v: np.asarray(kind.constant, aval_of(v).dtype)
        for v, kind in kinds.items()
        if isinstance(kind, Replicated) and kind.constant is not None
    }
    return ElementwiseProgram(
        update.program, update.call, table_of, from_gradient, reduced, constants
    )


# --- the pass ----------------------------------------------------------------------------


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
    leaves = update.call.leaves
    gradients = update.call.gradients
    tables = [i for i, leaf in enumerate(gradients) if leaf.table is not None]
    is_empty = not tables or any(gradients[i].value.nse == 0 for i in tables)
    if is_empty or any(leaf.valid is not None for leaf in gradients):
        return None
    params = [leaf.value for leaf in leaves if leaf.kind == "param"]
    if any(is_stored_table(x) and not isinstance(x, PackedTable) for x in params):
        return None
    parts = elementwise_program(update)
    if parts is None:
        return None
    combiners: dict[int, Combiner] = {}
    for table in tables:
        for combiner in parts.combiners(table):
            dtypes = {leaves[i].value.dtype for i in combiner.places}
            dtypes |= {aval_of(v).dtype for v in combiner.scalars}
            has_room = len(combiner.scalars) < len(combiner.places)
            if has_room and dtypes == {aval_of(combiner.source).dtype}:
                combiners[table] = combiner
                break
        else:
            return None
    results = _run(parts, combiners)
    gradient_tree, state_tree, param_tree, _ = update.call.trees
    first = gradient_tree.num_leaves
    second = first + state_tree.num_leaves
    return (
        param_tree.unflatten([results[i] for i in range(second, len(leaves))]),
        state_tree.unflatten([results[i] for i in range(first, second)]),
    )


def _run(parts: ElementwiseProgram, combiners: dict[int, Combiner]) -> dict[int, Table]:
    """Return the new state and parameters, by the positions of the leaves they replace."""
    leaves, jaxpr = parts.call.leaves, parts.program.jaxpr
    known = {
        v: stored_values(leaf.value) if leaf.kind == "gradient" else leaf.value
        for v, leaf in zip(parts.inputs, leaves, strict=True)
        if v not in parts.table_of or v in parts.from_gradient
    }
    computed = [c.source for t, c in combiners.items() if c.source is not parts.inputs[t]]
    # Beside these, all that does not depend on rows is computed before the pass.
    known.update(zip(jaxpr.constvars, parts.program.consts, strict=True))
    shared = [v for eqn in jaxpr.eqns for v in eqn.outvars if v not in parts.table_of]
    run(_equations_for([*shared, *computed], jaxpr.eqns)[0], known)
    started = []
    for table, combiner in combiners.items():
        gradient = leaves[table].uncoalesced
        # Rows of equal ids are summed here only if something is computed of the sums.
        if combiner.source in computed or table in parts.reduced:
            gradient = leaves[table].value.with_values(known[combiner.source])
        filled = [known[v] for v in combiner.scalars]
        scalars = [x.reshape(-1)[0] if jnp.ndim(x) else x for x in filled]
        tables = [leaves[i].value for i in combiner.places]
        started.append(update_rows(combiner, tables, gradient, scalars))
    results: dict[int, Table] = {}
    for combiner, new in zip(combiners.values(), updated(started), strict=True):
        results.update(zip(combiner.places, new, strict=True))
    for i, (leaf, v) in enumerate(zip(leaves, parts.outputs, strict=True)):
        if leaf.table is None and leaf.kind != "gradient":
            new = read(known, v)
            results[i] = _applied(leaf.value, new) if leaf.kind == "param" else new
    return results


def _applied(old: Table, update: Gradient) -> Table:
    """Return a new parameter, or entries of one."""
    return added(old, update).astype(jnp.result_type(old))
