"""Whether an operation is the same in the update programs for two numbers of rows.

A mean over a table divides by its number of rows, and other programs count them:

    for V = 1000 rows       c = div b 1000.0        d = scan[length=1000] ...
    for n = 8 rows          c = div b 8.0           d = scan[length=8] ...

Run on the touched rows, such a program computes something else than on the table. An operation
is the same if its literals and its parameters are: shapes apart that follow from the number of
rows, and the jaxprs of control flow, which `row_locality` reads in pairs itself.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jmask._base.forms import aval_of, compared, opened
from jmask._base.jaxprs import inlined

# Parameters that say how large or where a result is, or hold what is read in pairs.
_PLACES = ("sharding", "out_sharding")
_NOT_COMPARED = {
    "broadcast_in_dim": ("shape",),
    "iota": ("shape",),
    "random_bits": ("shape",),
    "reshape": ("new_sizes",),
    "cond": ("branches",),
    "scan": ("jaxpr",),
    "while": ("body_jaxpr", "cond_jaxpr"),
}


def same_operations(x: Jaxpr, y: Jaxpr) -> list[bool]:
    """Of jaxprs in step, whether their equations compute the same of the same operands."""
    return [
        one is other or _same_params(one, other, _NOT_COMPARED.get(one.primitive.name, ()))
        for one, other in zip(x.eqns, y.eqns, strict=True)
    ]


def in_step(x: Jaxpr, y: Jaxpr) -> bool:
    """Whether two jaxprs have the same primitives, on as many operands, one by one."""

    def form(jaxpr: Jaxpr) -> Any:
        each = [(e.primitive, len(e.invars), len(e.outvars)) for e in jaxpr.eqns]
        return each, len(jaxpr.constvars), len(jaxpr.invars), len(jaxpr.outvars)

    return form(x) == form(y)


def same(x: Any, y: Any) -> bool:
    """Whether literals, constants or parameters of equations are known to be equal."""
    if x is y:
        return True
    if isinstance(x, jax.core.Tracer) or isinstance(y, jax.core.Tracer):
        return False
    if isinstance(x, Jaxpr | ClosedJaxpr):
        if type(x) is not type(y):
            return False
        return _same_program(ClosedJaxpr(*opened(x)), ClosedJaxpr(*opened(y)))
    if isinstance(x, tuple | list):
        alike = type(x) is type(y) and len(x) == len(y)
        return alike and all(map(same, x, y))
    if not hasattr(x, "__array__") and not isinstance(x, float):
        return type(x) is type(y) and bool(x == y)
    if np.shape(x) != np.shape(y) or _is_opaque(x):
        return False
    x, y = map(np.asarray, jax.device_get((x, y)))
    return x.dtype == y.dtype and bool(np.all((x == y) | ((x != x) & (y != y))))


def same_literal(x: Literal, y: Literal) -> bool:
    """Whether two literals are the same number of the same type."""
    return aval_of(x).dtype == aval_of(y).dtype and same(x.val, y.val)


def _same_params(x: JaxprEqn, y: JaxprEqn, ignored: Sequence[str]) -> bool:
    if not (x.params or y.params):
        return True
    ignored = (*_PLACES, *ignored)
    ours, theirs = compared(x), compared(y)
    if ours.keys() != theirs.keys():
        return False
    return not [k for k, v in ours.items() if k not in ignored and not same(v, theirs[k])]


def _given(jaxpr: Jaxpr) -> tuple[Any, ...]:
    return (*jaxpr.constvars, *jaxpr.invars)


def _is_opaque(x: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", float), jax.dtypes.extended)


def _same_program(x: ClosedJaxpr, y: ClosedJaxpr) -> bool:
    """Whether two programs are the same but for the names in them."""
    x, y = inlined(x), inlined(y)
    one, other = x.jaxpr, y.jaxpr
    if not in_step(one, other) or not same(tuple(x.consts), tuple(y.consts)):
        return False
    twins = dict(zip(_given(one), _given(other), strict=True))

    def alike(v: Any, w: Any) -> bool:
        if isinstance(v, Literal) and isinstance(w, Literal):
            return same_literal(v, w)
        is_twin = not isinstance(v, Literal) and twins[v] is w
        return is_twin and aval_of(v) == aval_of(w)

    for eqn, twin in zip(one.eqns, other.eqns, strict=True):
        if not all(map(alike, eqn.invars, twin.invars)) or not _same_params(eqn, twin, ()):
            return False
        twins.update(zip(eqn.outvars, twin.outvars, strict=True))
    return all(map(alike, one.outvars, other.outvars))
