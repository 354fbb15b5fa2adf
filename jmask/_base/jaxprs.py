"""Running jaxprs, which outputs depend on which inputs, and what is mere arithmetic.

{ lambda ; a b. let c = sin a in (c, b) }        evaluate(.., x, y)   [sin(x), y]
                                                 origins(.., [1, 2])  [1, 2]
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jmask._base.array_types import varying_alike
from jmask._base.forms import CALLS, called, name_of

# Each entry of the result is computed of the same entries of the operands.
_ARITHMETIC = frozenset(
    "abs add add_any and atan2 cbrt ceil clamp convert_element_type copy copy_p cos div eq exp "
    "exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg "
    "nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sqrt square "
    "stop_gradient sub tan tanh xor".split()
)


def is_arithmetic(eqn: JaxprEqn) -> bool:
    """Whether an equation is one operation on entries."""
    return name_of(eqn) in _ARITHMETIC and not eqn.effects


def only_arithmetic(jaxpr: Jaxpr) -> bool:
    """Whether all equations are, those of functions that are called too."""
    return all(
        only_arithmetic(called(eqn)[0]) if name_of(eqn) in CALLS else is_arithmetic(eqn)
        for eqn in jaxpr.eqns
    )


def lifted(program: ClosedJaxpr) -> Jaxpr:
    """The program as a function of its constants, then of its arguments; it holds no array.

    What JAX keeps, such as a function given to `custom_jvp`, must not hold a tracer.
    """
    jaxpr = program.jaxpr
    return jaxpr.replace(constvars=(), invars=(*jaxpr.constvars, *jaxpr.invars))


def read(values: dict[Any, Any], v: Any) -> Any:
    """The value of a variable or literal."""
    return v.val if isinstance(v, Literal) else values[v]


def outputs_of(eqn: JaxprEqn, inputs: Sequence[Any]) -> dict[Any, Any]:
    """The variables that an equation defines, with their values.

    In a `shard_map` arrays are typed as varying over its devices or not, and an operation asks
    that its operands be so alike: here, though the equation was traced for other types.
    """
    inputs = varying_alike(*inputs)
    outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    outputs = outputs if eqn.primitive.multiple_results else [outputs]
    return dict(zip(eqn.outvars, outputs, strict=True))


def origins(jaxpr: Jaxpr, inputs: Sequence[int]) -> list[int]:
    """For each output of a jaxpr the bits of all inputs on which it may depend."""
    found = dict(zip(jaxpr.invars, inputs, strict=True))

    def of(variables: Sequence[Any]) -> list[int]:
        return [0 if isinstance(v, Literal) else found.get(v, 0) for v in variables]

    for eqn in jaxpr.eqns:
        given = of(eqn.invars)
        if name_of(eqn) in CALLS:
            results = origins(called(eqn)[0], given)
        else:
            results = [functools.reduce(operator.or_, given, 0)] * len(eqn.outvars)
        found.update(zip(eqn.outvars, results, strict=True))
    return of(jaxpr.outvars)


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """The outputs of a jaxpr that was traced for other types of arrays: see `outputs_of`."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        inputs = [read(values, v) for v in eqn.invars]
        if name_of(eqn) in CALLS:
            inner, inner_consts = called(eqn)
            outputs = evaluate(inner, inner_consts, *inputs)
            values.update(zip(eqn.outvars, outputs, strict=True))
        else:
            values.update(outputs_of(eqn, inputs))
    return [read(values, v) for v in jaxpr.outvars]
