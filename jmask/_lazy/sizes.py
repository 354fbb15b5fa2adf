"""Put numbers in the place of the open dimensions of a program.

{ lambda ; a:f32[rows0,3]. let b = mul a a in (b,) }     rows0 = 5     a:f32[5,3]
"""

import weakref
from collections.abc import Callable, Mapping

from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jmask._base.types import Argument, Atom
from jmask._updates.checks import NotRowLocalError
from jmask._updates.state_rows import Dimension


def with_sizes(jaxpr: Jaxpr, numbers: Mapping[Dimension, int]) -> Jaxpr:
    """Return a jaxpr for arrays whose open dimensions have these sizes."""
    variables: dict[Var, Var] = {}

    def size(x: Argument) -> Argument:
        if not export.is_symbolic_dim(x):
            return x
        for dimension, number in numbers.items():
            if isinstance(times := x // dimension, int) and times * dimension == x:
                return times * number
        raise NotRowLocalError(f"it makes an array of {x} rows")

    def var(v: Var) -> Var:
        if v not in variables:
            shape = getattr(v.aval, "shape", None)
            sized = v.aval if shape is None else v.aval.update(shape=tuple(map(size, shape)))
            variables[v] = Var(sized)
        return variables[v]

    def atom(v: Atom) -> Atom:
        return v if isinstance(v, Literal) else var(v)

    def parameter_of(x: Argument) -> Argument:
        if isinstance(x, ClosedJaxpr):
            return _closed_with_sizes(x, numbers)
        if isinstance(x, Jaxpr):
            return with_sizes(x, numbers)
        return type(x)(map(parameter_of, x)) if type(x) in (tuple, list) else size(x)

    def at_sizes(eqn: JaxprEqn) -> JaxprEqn:
        params = {name: parameter_of(x) for name, x in eqn.params.items()}
        invars, outvars = list(map(atom, eqn.invars)), list(map(var, eqn.outvars))
        return eqn.replace(invars=invars, outvars=outvars, params=params)

    return jaxpr.replace(
        constvars=list(map(var, jaxpr.constvars)),
        invars=list(map(var, jaxpr.invars)),
        eqns=list(map(at_sizes, jaxpr.eqns)),
        outvars=list(map(atom, jaxpr.outvars)),
    )


def sized(
    jaxpr: Jaxpr, rows: Mapping[int, Dimension], sizes: Mapping[int, int]
) -> Callable[[JaxprEqn], JaxprEqn]:
    """Return a function of an equation of `jaxpr`: the same for these numbers of rows."""
    numbers = {rows[i]: size for i, size in sizes.items()}
    nothing = jaxpr.replace(constvars=[], invars=[], eqns=[], outvars=[])
    return lambda eqn: with_sizes(nothing.replace(eqns=[eqn]), numbers).eqns[0]


# JAX compiles a called jaxpr once, by its identity: outside jit in each update otherwise.
_WITH_SIZES: weakref.WeakKeyDictionary[Jaxpr, dict[object, ClosedJaxpr]]
_WITH_SIZES = weakref.WeakKeyDictionary()


def _closed_with_sizes(x: ClosedJaxpr, numbers: Mapping[Dimension, int]) -> ClosedJaxpr:
    if x.consts:  # which may be traced
        return ClosedJaxpr(with_sizes(x.jaxpr, numbers), x.consts)
    known = _WITH_SIZES.setdefault(x.jaxpr, {})
    key = tuple(numbers.items())
    if key not in known:
        known[key] = ClosedJaxpr(with_sizes(x.jaxpr, numbers), ())
    return known[key]
