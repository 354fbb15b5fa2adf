"""An optimizer's update on rows, taken apart: what is elementwise, and what is shared.

To run in one pass over the rows (see `scatter_update`) an update must be elementwise in the
gradient, the parameter and the state of a table. Its jaxpr on n rows is read once:

    count -> count + 1 -> 1 - 0.9 ** count        depends on no row: computed hoisted
    g -> g * g -> sum                             of the gradient alone: computed hoisted
    m, g  -> 0.9 m + 0.1 g -> / (1 - 0.9 ** c)    entries of one table: the combiner
    sum(m * m)                                    none of these: the update takes more passes

The combiner runs the same equations on single entries. What it takes from the shared part
are scalars, and it can take only as many as a scatter has room for. What is made of the
gradient alone (clipped by the norm of all gradients) can be given to it in place of the
gradient, and then it needs no scalars for that.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmask._base.forms import CALLS, aval_of, called, name_of
from jmask._base.jaxprs import bound, is_arithmetic, read
from jmask._lazy.row_locality import NEUTRAL


@dataclasses.dataclass(frozen=True)
class ElementwiseProgram:
    """A jaxpr whose outputs are entries of tables or do not depend on rows.

    Attributes:
        equations: all equations, calls in line, with the table they are entries of or None.
        consts, inputs, outputs: as in a jaxpr, the constants with their values.
        table_of: the table a variable has entries of.
        of_gradient: the variables with entries that are made of its gradient alone.
        reduced: tables over whose gradient something shared is summed.
        scalar_of: the scalar that a shared array is filled with.
        constants: shared scalars that are arithmetic on literals alone: a combiner computes
            them itself. What is more than arithmetic (a loop, a random number) is shared.
    """

    equations: list[tuple[JaxprEqn, int | None]]
    consts: dict[Var, Any]
    inputs: Sequence[Var]
    outputs: Sequence[Any]
    table_of: dict[Var, int]
    of_gradient: set[Var]
    reduced: set[int]
    scalar_of: dict[Var, Any]
    constants: set[Var]

    def hoisted(self, values: dict[Var, Any], wanted: Iterable[Var]) -> dict[Var, Any]:
        """The values of all variables that do not depend on rows, and of those `wanted`.

        Args:
            values: of the inputs that are no rows, and of gradients without equal ids.
            wanted: variables that are made of a gradient alone.
        """
        shared = [v for eqn, table in self.equations if table is None for v in eqn.outvars]
        equations, _ = _makers([*shared, *wanted], [eqn for eqn, _ in self.equations])
        values = {**self.consts, **values}
        for eqn in equations:
            inputs = [read(values, v) for v in eqn.invars]
            if eqn.outvars[0] in self.table_of:  # entries, which are computed with scalars too
                shape = aval_of(eqn.outvars[0]).shape
                dtypes = [aval_of(v).dtype for v in eqn.invars]
                arrays = map(jnp.asarray, inputs, dtypes)
                inputs = [jnp.broadcast_to(x, shape) for x in arrays]
            values.update(zip(eqn.outvars, bound(eqn, inputs), strict=True))
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
        mine = [eqn for eqn, of in self.equations if of == table]
        made = [v for eqn in mine for v in eqn.outvars if v in self.of_gradient]
        gradient = self.inputs[table]
        for source in (gradient, *made):
            equations, needed = _makers(_variables(outputs), mine, source)
            if source is gradient or gradient not in needed:
                own = {*inputs, source, *(v for eqn in equations for v in eqn.outvars)}
                used = [v for eqn in equations for v in _variables(eqn.invars)]
                scalars = dict.fromkeys(v for v in used if v not in own | self.constants)
                yield Combiner(self, source, inputs, outputs, equations, list(scalars))


@dataclasses.dataclass(frozen=True)
class Combiner:
    """A function of entries of `inputs`, of `source` and of `scalars` that gives `outputs`.

    Attributes:
        program: which it is a part of.
        source: the gradient, or what is made of it.
        inputs, outputs: of entries.
        equations: that make the outputs.
        scalars: shared variables that they use.
    """

    program: ElementwiseProgram
    source: Var
    inputs: Sequence[Var]
    outputs: Sequence[Any]
    equations: list[JaxprEqn]
    scalars: list[Var]

    def __call__(self, *entries: Any) -> tuple[Any, ...]:
        values = dict(zip([*self.inputs, self.source, *self.scalars], entries, strict=True))
        constants = self.program.constants
        known = [eqn for eqn, _ in self.program.equations if eqn.outvars[0] in constants]
        for eqn in (*known, *self.equations):
            results = bound(eqn, [read(values, v) for v in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return tuple(read(values, v) for v in self.outputs)


def _makers(
    wanted: Iterable[Var], equations: Sequence[JaxprEqn], source: Var | None = None
) -> tuple[list[JaxprEqn], set[Var]]:
    """The equations that make what is wanted, given `source`, and all variables they need."""
    needed, found = set(wanted), []
    for eqn in reversed(equations):
        if source not in eqn.outvars and not needed.isdisjoint(eqn.outvars):
            found.append(eqn)
            needed.update(_variables(eqn.invars))
    return found[::-1], needed


def elementwise_program(
    jaxpr: Jaxpr, consts: Sequence[Any], tables: Sequence[int | None]
) -> ElementwiseProgram | None:
    """The program of a jaxpr, or None if it is not elementwise.

    Args:
        jaxpr: of an update on rows.
        consts: its constants.
        tables: for each input the table whose rows it holds, or None. Input number i holds
            the gradient of table i.
    """
    table_of = {v: i for v, i in zip(jaxpr.invars, tables, strict=True) if i is not None}
    shapes = {table_of[v]: aval_of(v).shape for v in table_of}
    if any(aval_of(v).shape != shapes[i] for v, i in table_of.items()):
        return None  # one number for each row, say
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    gradients = {v for i, v in enumerate(jaxpr.invars) if table_of.get(v) == i}
    program = ElementwiseProgram([], values, [], [], table_of, gradients, set(), {}, set())
    renamed: dict[Var, Any] = {}
    if not _inline(jaxpr, renamed, program, shapes):
        return None
    outputs = [_renamed(renamed, v) for v in jaxpr.outvars]
    return dataclasses.replace(program, inputs=jaxpr.invars, outputs=outputs)


def _inline(
    jaxpr: Jaxpr, renamed: dict[Var, Any], program: ElementwiseProgram, shapes: dict[int, Any]
) -> bool:
    """Add the equations of a jaxpr to the program; False if one is not elementwise."""
    for eqn in jaxpr.eqns:
        inputs = [_renamed(renamed, v) for v in eqn.invars]
        tables = {program.table_of[v] for v in _variables(inputs) if v in program.table_of}
        if name_of(eqn) in CALLS and (tables or _are_constants(program, inputs)):
            inner, consts = called(eqn)
            program.consts.update(zip(inner.constvars, consts, strict=True))
            # A jaxpr may be called twice: its variables get new names each time.
            names = dict(zip(inner.invars, inputs, strict=True))
            if not _inline(inner, names, program, shapes):
                return False
            outputs = [_renamed(names, v) for v in inner.outvars]
            renamed.update(zip(eqn.outvars, outputs, strict=True))
            continue
        if _is_reduction(eqn) and program.of_gradient.issuperset(inputs):
            program.reduced.update(tables)
            tables = set()
        if len(tables) > 1 or (tables and not _is_elementwise(eqn, shapes[min(tables)])):
            return False
        table = min(tables, default=None)
        if table is not None:
            inputs = [_scalar_if_filled(program, v) for v in inputs]
            if not all(_is_entry(program, v, table) for v in inputs):
                return False
        outputs = [_new_variable(v) for v in eqn.outvars]
        renamed.update(zip(eqn.outvars, outputs, strict=True))
        program.equations.append((eqn.replace(invars=inputs, outvars=outputs), table))
        if table is not None:
            program.table_of.update((v, table) for v in outputs)
            entries = {v for v in _variables(inputs) if v in program.table_of}
            if entries <= program.of_gradient:
                program.of_gradient.update(outputs)
        elif name_of(eqn) == "broadcast_in_dim" and aval_of(inputs[0]).shape == ():
            program.scalar_of[outputs[0]] = inputs[0]
        elif _is_elementwise(eqn, aval_of(outputs[0]).shape) and aval_of(outputs[0]).shape:
            _add_scalar_of(program, eqn, inputs, outputs)
        elif _is_elementwise(eqn, ()) and _are_constants(program, inputs):
            program.constants.update(outputs)
    return True


def _are_constants(program: ElementwiseProgram, inputs: Sequence[Any]) -> bool:
    return all(isinstance(v, Literal) or v in program.constants for v in inputs)


def _add_scalar_of(
    program: ElementwiseProgram, eqn: JaxprEqn, inputs: Sequence[Any], outputs: Sequence[Var]
) -> None:
    """Elementwise arithmetic on arrays filled with scalars gives one filled with a scalar."""
    scalars = [_scalar_if_filled(program, v) for v in inputs]
    if any(aval_of(v).shape for v in scalars):
        return
    results = [Var(aval_of(v).update(shape=())) for v in outputs]
    program.equations.append((eqn.replace(invars=scalars, outvars=results), None))
    program.scalar_of.update(zip(outputs, results, strict=True))
    if _are_constants(program, scalars):
        program.constants.update(results)


def _scalar_if_filled(program: ElementwiseProgram, v: Any) -> Any:
    return v if isinstance(v, Literal) else program.scalar_of.get(v, v)


def _is_entry(program: ElementwiseProgram, v: Any, table: int) -> bool:
    """Whether a variable is a scalar or has entries of the table."""
    return aval_of(v).shape == () or program.table_of.get(v) == table


def _is_elementwise(eqn: JaxprEqn, shape: tuple[int, ...]) -> bool:
    operands = [aval_of(v).shape for v in eqn.invars]
    return (
        is_arithmetic(eqn)
        and all(aval_of(v).shape == shape for v in eqn.outvars)
        and all(operand in ((), shape) for operand in operands)
    )


def _is_reduction(eqn: JaxprEqn) -> bool:
    """Whether an equation makes one number of all entries."""
    return name_of(eqn) in NEUTRAL and aval_of(eqn.outvars[0]).shape == ()


def _variables(found: Iterable[Any]) -> list[Var]:
    return [v for v in found if not isinstance(v, Literal)]


def _new_variable(v: Any) -> Var:
    return Var(v.aval)


def _renamed(renamed: dict[Var, Any], v: Any) -> Any:
    return v if isinstance(v, Literal) else renamed.get(v, v)
