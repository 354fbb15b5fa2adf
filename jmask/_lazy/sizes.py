"""Put numbers in the place of the open dimensions of a program.

{ lambda ; a:f32[rows0,3]. let b = mul a a in (b,) }     rows0 = 5     a:f32[5,3]
"""

import weakref
from collections.abc import Mapping, Sequence

from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jmask._base.types import Argument, Atom
from jmask._lazy.checks import NotRowLocalError
from jmask._lazy.state_rows import Dimension

# JAX compiles a called jaxpr once, by its identity: outside jit in each update otherwise. It is
# kept as long as JAX keeps the jaxpr that it is made of, which holds what a user's closures do.
_CALLED: weakref.WeakKeyDictionary[Jaxpr, dict[object, ClosedJaxpr]]
_CALLED = weakref.WeakKeyDictionary()


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

    def atoms(atoms: Sequence[Atom]) -> list[Atom]:
        return [v if isinstance(v, Literal) else var(v) for v in atoms]

    def parameter_of(x: Argument) -> Argument:
        if isinstance(x, ClosedJaxpr) and not x.consts:  # which may be traced
            sized = _CALLED.setdefault(x.jaxpr, {})
            key = tuple(numbers.items())
            if key not in sized:
                sized[key] = ClosedJaxpr(with_sizes(x.jaxpr, numbers), ())
            return sized[key]
        if isinstance(x, ClosedJaxpr):
            return ClosedJaxpr(with_sizes(x.jaxpr, numbers), x.consts)
        if isinstance(x, Jaxpr):
            return with_sizes(x, numbers)
        return type(x)(map(parameter_of, x)) if type(x) in (tuple, list) else size(x)

    def at_sizes(eqn: JaxprEqn) -> JaxprEqn:
        params = {name: parameter_of(x) for name, x in eqn.params.items()}
        invars, outvars = atoms(eqn.invars), list(map(var, eqn.outvars))
        return eqn.replace(invars=invars, outvars=outvars, params=params)

    constants, inputs = list(map(var, jaxpr.constvars)), list(map(var, jaxpr.invars))
    eqns, outputs = list(map(at_sizes, jaxpr.eqns)), atoms(jaxpr.outvars)
    return jaxpr.replace(constvars=constants, invars=inputs, eqns=eqns, outvars=outputs)
