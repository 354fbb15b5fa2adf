"""An optimizer's update on rows, taken apart: what is elementwise, and what is shared.

To run in one pass over the rows (see `scatter_update`) an update must be elementwise in the
gradient, the parameter and the state of a table. What the proof of row-locality has found of
each variable of its program tells:

    count -> count + 1 -> 1 - 0.9 ** count        Replicated: computed before the pass
    g -> g * g -> sum                             of the gradient alone: so is this
    m, g  -> 0.9 m + 0.1 g -> / (1 - 0.9 ** c)    RowWise, entry by entry: the combiner
    sum(m * m)                                    none of these: the update takes more passes

The combiner runs the same equations on single entries. What it takes from the shared part
are scalars, and it can take only as many as a scatter has room for: a number that is known is
a constant of it. What is made of the gradient alone (clipped by the norm of all gradients) can
be given to it in place of the gradient, and then it needs no scalars for that.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jmask._base.forms import aval_of
from jmask._base.jaxprs import ARITHMETIC, run
from jmask._lazy.lattice import Replicated, RowWise
from jmask._lazy.proved_update import ProvedUpdate
from jmask._lazy.row_locality import NEUTRAL


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
