"""Find the variables of a program that a gradient goes through.

    y = argmax x        no gradient comes through y: x is not needed for it
    z = sum (x * y)     it comes through x

A table that is used without a gradient, in a metric or behind a `stop_gradient`, is an array
there, and its gradient is rows all the same.
"""

from collections.abc import Sequence
from typing import TypeGuard

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmask._base.forms import CALLS, REMATS, aval_of, branches_of, called, name_of, scan_of
from jmask._base.types import Atom

Flags = Sequence[bool]
"""Of each variable whether a gradient is taken of it, or comes through it."""

_NO_GRADIENT = frozenset("stop_gradient floor ceil round sign nextafter".split())


class Needed:
    """Finds the variables that a gradient goes through; remembers programs that run twice."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[bool, ...]], tuple[Jaxpr, set[Var]]] = {}

    def within(self, jaxpr: Jaxpr, wanted: Flags) -> set[Var]:
        """Return the variables through which the gradient of the wanted outputs goes."""
        key = id(jaxpr), tuple(wanted)
        if key not in self._known:
            self._known[key] = jaxpr, self._found(jaxpr, wanted)
        return self._known[key][1]

    def _found(self, jaxpr: Jaxpr, wanted: Flags) -> set[Var]:
        live = {
            v for v, flag in zip(jaxpr.outvars, wanted, strict=True) if flag and _is_real(v)
        }
        for eqn in reversed(jaxpr.eqns):
            flags = [v in live for v in eqn.outvars]
            if any(flags) and eqn.primitive.name not in _NO_GRADIENT:
                inputs = zip(eqn.invars, self._inputs(eqn, flags), strict=True)
                live.update(v for v, flag in inputs if flag and _is_real(v))
        return live

    def _inputs(self, eqn: JaxprEqn, flags: Flags) -> list[bool]:
        name = name_of(eqn)
        if name in (*CALLS, *REMATS) and not name.startswith("custom"):
            return self._of(called(eqn)[0], flags)
        if name == "cond":
            branches = [self._of(branch, flags) for branch, _ in branches_of(eqn)]
            return [False, *map(any, zip(*branches, strict=True))]
        if name == "scan":
            return self._of(scan_of(eqn).body[0], self.of_scan(eqn, flags))
        return [True] * len(eqn.invars)

    def of_scan(self, eqn: JaxprEqn, flags: Flags) -> list[bool]:
        """Return which outputs of its body a scan needs, all the way around."""
        scan, wanted = scan_of(eqn), list(flags)
        while True:  # each round adds a carry, or is the last
            inputs = self._of(scan.body[0], wanted)[scan.consts :]
            pairs = zip(wanted[: scan.carry], inputs[: scan.carry], strict=True)
            carry = [a or b for a, b in pairs]
            if carry == wanted[: scan.carry]:
                return wanted
            wanted[: scan.carry] = carry

    def _of(self, jaxpr: Jaxpr, flags: Flags) -> list[bool]:
        live = self.within(jaxpr, flags)
        return [v in live for v in jaxpr.invars]


def _is_real(v: Atom) -> TypeGuard[Var]:
    is_array = isinstance(v, Var) and hasattr(aval_of(v), "dtype")
    return is_array and jnp.issubdtype(aval_of(v).dtype, jnp.inexact)
