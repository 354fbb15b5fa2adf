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
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jmask._base.forms import aval_of
from jmask._base.jaxprs import ARITHMETIC, read, run
from jmask._base.precision import added
from jmask._kernels.update_rows import updated
from jmask._lazy.lattice import Replicated, RowWise
from jmask._lazy.leaves import LazyCall
from jmask._lazy.proved_update import ProvedUpdate
from jmask._lazy.row_locality import NEUTRAL
from jmask._tables.packed import PackedTable
from jmask._tables.stored_table import is_stored_table
from jmask._tensors.row_sparse import is_row_sparse
from jmask._tensors.storage import stored_values
from jmask._updates.row_update import update_entries

# --- the update, taken apart -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ElementwiseProgram:
    """A program whose variables are entries of tables or do not depend on rows.

    Attributes:
        program: its first inputs are the gradients.
        table_of: the table a variable has entries of.
        of_gradient: the variables with entries that are made of its gradient alone.
        reduced: tables over whose gradient something shared is summed.
        constants: the number that a shared variable is filled with, if it is known.
    """

    program: ClosedJaxpr
    table_of: dict[Var, int]
    of_gradient: set[Var]
    reduced: set[int]
    constants: dict[Var, Any]

    @property
    def inputs(self) -> Sequence[Var]:
        return self.program.jaxpr.invars

    @property
    def outputs(self) -> Sequence[Any]:
        return self.program.jaxpr.outvars

    def hoisted(self, values: dict[Var, Any], wanted: Iterable[Var]) -> dict[Var, Any]:
        """The values of all variables that do not depend on rows, and of those `wanted`.

        Args:
            values: of the inputs that are no rows, and of gradients without equal ids.
            wanted: variables that are made of a gradient alone.
        """
        jaxpr = self.program.jaxpr
        shared = [v for e in jaxpr.eqns for v in e.outvars if v not in self.table_of]
        values = dict(zip(jaxpr.constvars, self.program.consts, strict=True)) | values
        run(_makers([*shared, *wanted], jaxpr.eqns)[0], values)
        return values

    def combiners(
        self, table: int, inputs: Sequence[Var], outputs: Sequence[Any]
    ) -> Iterator["Combiner"]:
        """The ways to compute entries of a table: from its gradient, or from what it makes.

        Args:
            table: a table, whose gradient is the input of this number.
            inputs: those with entries of the table, but for the gradient.
            outputs: what is to be computed.
        """
        if any(isinstance(v, Literal) or self.table_of.get(v) != table for v in outputs):
            return  # a state that is filled anew
        mine = [e for e in self.program.jaxpr.eqns if self.table_of.get(e.outvars[0]) == table]
        made = [v for eqn in mine for v in eqn.outvars if v in self.of_gradient]
        gradient = self.inputs[table]
        for source in (gradient, *made):
            equations, needed = _makers(outputs, mine, source)
            if source is gradient or gradient not in needed:
                shared = [v for v in needed if v not in self.table_of]
                constants = {v: self.constants[v] for v in shared if v in self.constants}
                scalars = [v for v in shared if v not in constants]
                yield Combiner(source, inputs, outputs, equations, scalars, constants)


@dataclasses.dataclass(frozen=True)
class Combiner:
    """A function of entries of `inputs`, of `source` and of `scalars` that gives `outputs`.

    Attributes:
        source: the gradient, or what is made of it.
        inputs, outputs: of entries.
        equations: that make the outputs.
        scalars: shared variables that they use, each filled with one number.
        constants: those whose number is known.
    """

    source: Var
    inputs: Sequence[Var]
    outputs: Sequence[Any]
    equations: list[JaxprEqn]
    scalars: list[Var]
    constants: dict[Var, Any]

    def __call__(self, *entries: Any) -> tuple[Any, ...]:
        given = zip([*self.inputs, self.source, *self.scalars], entries, strict=True)
        values = self.constants | dict(given)
        run(self.equations, values)
        return tuple(values[v] for v in self.outputs)


def number_of(filled: jax.Array) -> jax.Array:
    """The number that an array is filled with."""
    return filled.reshape(-1)[0] if jnp.ndim(filled) else filled


def _makers(
    wanted: Iterable[Var], equations: Sequence[JaxprEqn], source: Var | None = None
) -> tuple[list[JaxprEqn], dict[Var, None]]:
    """The equations that make what is wanted, given `source`, and all variables they need."""
    needed, found = dict.fromkeys(wanted), []
    for eqn in reversed(equations):
        if source not in eqn.outvars and not needed.keys().isdisjoint(eqn.outvars):
            found.append(eqn)
            needed.update({v: None for v in eqn.invars if isinstance(v, Var)})
    return found[::-1], needed


def elementwise_program(update: ProvedUpdate) -> ElementwiseProgram | None:
    """The parts of an update, or None if it is not elementwise."""
    jaxpr, kinds = update.program.jaxpr, update.kinds
    rows = {v: kind for v, kind in kinds.items() if isinstance(kind, RowWise)}
    table_of = {v: kind.table for v, kind in rows.items()}
    of_gradient = {v for i, v in enumerate(jaxpr.invars) if table_of.get(v) == i}
    shapes = {table_of[v]: aval_of(v).shape for v in of_gradient}
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
            if name not in NEUTRAL or not entries <= of_gradient:
                return None
            reduced.update(table_of[v] for v in entries)
        elif name not in ARITHMETIC or eqn.effects or not operands - entries <= filled:
            return None
        elif entries <= of_gradient:
            of_gradient.update(eqn.outvars)
    constants = {
        v: np.asarray(kind.constant, aval_of(v).dtype)
        for v, kind in kinds.items()
        if isinstance(kind, Replicated) and kind.constant is not None
    }
    return ElementwiseProgram(update.program, table_of, of_gradient, reduced, constants)


# --- the pass ----------------------------------------------------------------------------


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
