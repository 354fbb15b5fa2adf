"""An optimizer's update on rows, taken apart: what is elementwise, and what is shared.

To run in one pass over the rows (see `_fused_update`) an update must be elementwise in the
gradient, the parameter and the state of a table. Its jaxpr on n rows is read once:

    count -> count + 1 -> 1 - 0.9 ** count        depends on no row: computed beforehand
    m, g  -> 0.9 m + 0.1 g -> / (1 - 0.9 ** c)    entries of one table: the combiner
    sum(g * g)                                    neither: the update is not elementwise

The combiner runs the same equations on single entries. What it takes from the shared part
are scalars, and it can take only as many as a scatter has room for.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmask._jaxprs import CALLS, aval_of, called, outputs_of, read

_ELEMENTWISE = frozenset(
    "abs add add_any and atan2 cbrt ceil clamp convert_element_type copy copy_p cos div eq exp "
    "exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg "
    "nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sqrt square "
    "stop_gradient sub tan tanh xor".split()
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A jaxpr whose outputs are entries of tables or do not depend on rows.

    Attributes:
        equations: all equations, calls in line, with the table they are entries of or None.
        consts, inputs, outputs: as in a jaxpr, the constants with their values.
        table_of: the table a variable has entries of.
        scalar_of: the scalar that a shared array is filled with.
        constants: shared scalars that are made of literals alone, known to a combiner.
    """

    equations: list[tuple[JaxprEqn, int | None]]
    consts: dict[Var, Any]
    inputs: Sequence[Var]
    outputs: Sequence[Any]
    table_of: dict[Var, int]
    scalar_of: dict[Var, Any]
    constants: set[Var]

    def shared(self, values: dict[Var, Any]) -> dict[Var, Any]:
        """The values of all variables that do not depend on rows."""
        values = {**self.consts, **values}
        for eqn, table in self.equations:
            if table is None:
                values.update(outputs_of(eqn, [read(values, v) for v in eqn.invars]))
        return values

    def scalars(self, table: int) -> list[Var]:
        """The shared variables that entries of a table are computed with."""
        found: dict[Var, None] = {}
        made = {v for eqn, of in self.equations if of == table for v in eqn.outvars}
        made |= {v for v in self.inputs if self.table_of.get(v) == table}
        for eqn, of in self.equations:
            if of == table:
                shared = (v for v in eqn.invars if not isinstance(v, Literal))
                found.update((v, None) for v in shared if v not in made | self.constants)
        return list(found)

    def combiner(
        self, table: int, inputs: Sequence[Var], scalars: Sequence[Var], outputs: Sequence[Any]
    ) -> Callable[..., tuple[Any, ...]]:
        """A function of entries of `inputs` and of `scalars` that gives those of `outputs`."""

        def function(*entries: Any) -> tuple[Any, ...]:
            values = dict(zip([*inputs, *scalars], entries, strict=True))
            for eqn, of in self.equations:
                if of != table and eqn.outvars[0] not in self.constants:
                    continue
                values.update(outputs_of(eqn, [read(values, v) for v in eqn.invars]))
            return tuple(read(values, v) for v in outputs)

        return function


def elementwise_program(
    jaxpr: Jaxpr, consts: Sequence[Any], tables: Sequence[int | None]
) -> Program | None:
    """The program of a jaxpr, or None if it is not elementwise.

    Args:
        jaxpr: of an update on rows.
        consts: its constants.
        tables: for each input the table whose rows it holds, or None.
    """
    table_of = {v: i for v, i in zip(jaxpr.invars, tables, strict=True) if i is not None}
    shapes = {table_of[v]: aval_of(v).shape for v in table_of}
    if any(aval_of(v).shape != shapes[i] for v, i in table_of.items()):
        return None  # one number for each row, say
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    program = Program([], values, [], [], table_of, {}, set())
    renamed: dict[Var, Any] = {}
    if not _inline(jaxpr, renamed, program, shapes):
        return None
    outputs = [_renamed(renamed, v) for v in jaxpr.outvars]
    return dataclasses.replace(program, inputs=jaxpr.invars, outputs=outputs)


def _inline(
    jaxpr: Jaxpr, renamed: dict[Var, Any], program: Program, shapes: dict[int, Any]
) -> bool:
    """Add the equations of a jaxpr to the program; False if one is not elementwise."""
    for eqn in jaxpr.eqns:
        inputs = [_renamed(renamed, v) for v in eqn.invars]
        tables = {
            program.table_of[v]
            for v in inputs
            if not isinstance(v, Literal) and v in program.table_of
        }
        if eqn.primitive.name in CALLS and tables:
            inner, consts = called(eqn)
            program.consts.update(zip(inner.constvars, consts, strict=True))
            # A jaxpr may be called twice: its variables get new names each time.
            names = dict(zip(inner.invars, inputs, strict=True))
            if not _inline(inner, names, program, shapes):
                return False
            outputs = [_renamed(names, v) for v in inner.outvars]
            renamed.update(zip(eqn.outvars, outputs, strict=True))
            continue
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
        elif eqn.primitive.name == "broadcast_in_dim" and aval_of(inputs[0]).shape == ():
            program.scalar_of[outputs[0]] = inputs[0]
        elif all(isinstance(v, Literal) or v in program.constants for v in inputs):
            program.constants.update(v for v in outputs if aval_of(v).shape == ())
    return True


def _scalar_if_filled(program: Program, v: Any) -> Any:
    return v if isinstance(v, Literal) else program.scalar_of.get(v, v)


def _is_entry(program: Program, v: Any, table: int) -> bool:
    """Whether a variable is a scalar or has entries of the table."""
    return aval_of(v).shape == () or program.table_of.get(v) == table


def _is_elementwise(eqn: JaxprEqn, shape: tuple[int, ...]) -> bool:
    operands = [aval_of(v).shape for v in eqn.invars]
    return (
        eqn.primitive.name in _ELEMENTWISE
        and not eqn.effects
        and all(aval_of(v).shape == shape for v in eqn.outvars)
        and all(operand in ((), shape) for operand in operands)
    )


def _new_variable(v: Any) -> Var:
    return Var(v.aval)


def _renamed(renamed: dict[Var, Any], v: Any) -> Any:
    return v if isinstance(v, Literal) else renamed.get(v, v)
