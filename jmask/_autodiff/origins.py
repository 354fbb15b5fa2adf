"""Where the arrays of a gradient program come from, asked while the program is run.

    b = mul a 2.0
    c = jit[{ d. e = neg d; in e }] b        maker of c: neg, of d, which is b; maker of b: mul

What makes an array may stand in a function that is called, and what it is made of outside. In a
jitted step what such a function computes is asked for too.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jmask._base.forms import CALLS, called, name_of, within
from jmask._base.jaxprs import bound, inlined


@dataclasses.dataclass(frozen=True)
class Made:
    """An array, and the variable of a program by which to ask what makes it."""

    array: jax.Array
    origins: "Origins"
    variable: Var


def plain(x: Any) -> Any:
    """The array of a `Made`, anything else as it is."""
    return x.array if isinstance(x, Made) else x


@dataclasses.dataclass(frozen=True)
class Program:
    """The equations that are run, and the variables that come out."""

    equations: Sequence[JaxprEqn]
    outputs: Sequence[Any]

    @functools.cached_property
    def definitions(self) -> dict[Var, JaxprEqn]:
        """The equation that makes a variable."""
        return {v: eqn for eqn in self.equations for v in eqn.outvars}

    @functools.cached_property
    def uses(self) -> collections.Counter[Var]:
        """How often equations need a variable, or it comes out."""
        needed = (v for eqn in self.equations for v in eqn.invars)
        variables = (*needed, *self.outputs)
        return collections.Counter(v for v in variables if not isinstance(v, Literal))


@dataclasses.dataclass(frozen=True)
class Origins:
    """Where the arrays of a program come from, while it is run.

    Attributes:
        program: what is run.
        values: what has been computed, `Made` for some inputs.
        scaled_only: whether to look no further than for what rows are multiplied with.
        is_inside: whether it is a function that is called, of which inputs alone are known.
    """

    program: Program
    values: dict[Var, Any]
    scaled_only: bool = False
    is_inside: bool = False

    def made(self, v: Any, value: Any) -> Any:
        """The value of a variable; that of an array with the variable."""
        if not isinstance(value, jax.Array) or isinstance(v, Literal) or not value.ndim:
            return value
        return Made(value, self, v)

    def read(self, v: Any) -> Any:
        """The array of a variable or literal; None if it is not there, or in another form."""
        if isinstance(v, Var) and self.is_inside and v not in self.values:
            self._compute(v)
        value = v.val if isinstance(v, Literal) else plain(self.values.get(v))
        return value if isinstance(value, jax.Array | np.ndarray | np.generic) else None

    def maker(self, v: Any, for_one: bool = False) -> "tuple[Origins, JaxprEqn | None]":
        """The equation that makes a variable, in a function that is called or outside of it.

        With `for_one`, if nothing else needs the variable.
        """
        if isinstance(v, Literal) or (for_one and self.program.uses[v] > 1):
            return self, None
        eqn = self.program.definitions.get(v)
        if eqn is not None and name_of(eqn) in CALLS:
            origins = self._inside(eqn)
            return origins.maker(origins.program.outputs[eqn.outvars.index(v)], for_one)
        value = self.values.get(v) if eqn is None else None
        if isinstance(value, Made):
            origins = dataclasses.replace(value.origins, scaled_only=self.scaled_only)
            return origins.maker(value.variable, for_one)
        return self, eqn

    def _inside(self, eqn: JaxprEqn) -> "Origins":
        """The same in a function that is called."""
        program = inlined(ClosedJaxpr(*called(eqn)))
        given = [
            v.val if isinstance(v, Literal) else self.made(v, self.read(v)) for v in eqn.invars
        ]
        variables = (*program.jaxpr.constvars, *program.jaxpr.invars)
        inputs = zip(variables, (*program.consts, *given), strict=True)
        inside = Program(program.eqns, program.jaxpr.outvars)
        return Origins(inside, dict(inputs), self.scaled_only, is_inside=True)

    def _compute(self, v: Var) -> None:
        """A value in a function, once more; the compiler of a jitted step makes it one."""
        eqn = self.program.definitions.get(v)
        if eqn is None or eqn.effects or len(within([eqn])) > 1:
            return
        inputs = [self.read(x) for x in eqn.invars]
        is_there = not any(x is None for x in inputs)
        if is_there and any(isinstance(x, jax.core.Tracer) for x in inputs):
            self.values.update(zip(eqn.outvars, bound(eqn, inputs), strict=True))
