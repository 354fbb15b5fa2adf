"""A JAX that calls the parameters of one primitive otherwise: what a newer one may do.

    scan[jaxpr=.. length=3 ..]      becomes      scan[new_jaxpr=.. new_length=3 ..]

Programs traced inside `renamed("scan")` have such equations, and can be run.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.interpreters import mlir

PREFIX = "new_"


class _Renamed(Primitive):
    """A primitive that is run with its parameters under their old names."""

    def __init__(self, original: Primitive) -> None:
        super().__init__(original.name)
        self.original = original
        self.multiple_results = original.multiple_results

    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]:
        old = {name.removeprefix(PREFIX): x for name, x in params.items()}
        return self.original.get_bind_params(old)

    def bind(self, *args: Any, **params: Any) -> Any:
        return self.original.bind(*args, **params)


@functools.cache
def _renamed(original: Primitive) -> _Renamed:
    primitive = _Renamed(original)

    def run(*args: Any, **params: Any) -> Any:
        return original.bind(*args, **primitive.get_bind_params(params))

    # For what JAX itself runs, the body of a loop say.
    lowering = mlir.lower_fun(run, multiple_results=original.multiple_results)
    mlir.register_lowering(primitive, lowering)
    return primitive


def _in_program(x: Any, name: str) -> Any:
    """A jaxpr, or whatever else a parameter is, with equations renamed."""
    if isinstance(x, tuple | list):
        return type(x)(_in_program(y, name) for y in x) if type(x) in (tuple, list) else x
    if isinstance(x, Jaxpr):
        return x.replace(eqns=[_in_equation(eqn, name) for eqn in x.eqns])
    if isinstance(x, ClosedJaxpr):
        return x.replace(jaxpr=_in_program(x.jaxpr, name))
    return x


def _in_equation(eqn: JaxprEqn, name: str) -> JaxprEqn:
    params = {key: _in_program(x, name) for key, x in eqn.params.items()}
    if eqn.primitive.name != name:
        return eqn.replace(params=params)
    params = {PREFIX + key: x for key, x in params.items()}
    return eqn.replace(primitive=_renamed(eqn.primitive), params=params)


@contextlib.contextmanager
def renamed(name: str) -> Iterator[None]:
    """Let `jax.make_jaxpr` rename all parameters of the primitive `name`."""
    make_jaxpr = jax.make_jaxpr

    def renaming(*given: Any, **how: Any) -> Any:
        def trace(*args: Any, **kwargs: Any) -> Any:
            program = make_jaxpr(*given, **how)(*args, **kwargs)
            if how.get("return_shape"):
                return _in_program(program[0], name), program[1]
            return _in_program(program, name)

        return trace

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, jax, "make_jaxpr", make_jaxpr)
        jax.make_jaxpr = renaming
        yield
