"""What an elementwise function does where its sparse operands are zero.

A sparse result is possible where the entries that are not stored come out as zeros, and
that is a property of the function. It is read from the function's jaxpr, run on scalars
with 0 in place of every sparse operand s and *unknown* in place of every array d:

    sin(s)            0          sparse
    s > 0.5           False      sparse
    cos(s)            1          dense
    s * d             0 * ? = 0  sparse
    where(d, s, 0)    0          sparse: whichever is chosen
    d + s             d          an array plus some rows
    clip(s, d, 1)     ?          dense: it cannot be told

The product with what is not stored is 0, as in every sparse library, also where the other
factor is inf or nan. A quotient by an unknown *scalar* counts as a product.

The same pass decides whether the function is affine in its sparse operands. Then rows with
equal indices may be kept apart, since f(0 + a + b) = f(0) + L(a) + L(b). If it is linear in
the arrays too, as `s - d` is, it is the sum of a dense result and of rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from jmask._base.array_types import adds_when_cast
from jmask._base.forms import CALLS, aval_of, called, name_of, parameter
from jmask._base.jaxprs import bound, interpret
from jmask._ops.safe_numbers import trial

# How a value depends on operands, more from left to right: not, on arrays in an affine way, on
# sparse ones too, in another way.
_FREE, _ARRAYS, _AFFINE, _OTHER = range(4)


@dataclasses.dataclass(frozen=True)
class Known:
    """A constant."""

    value: Any

    def is_zero(self) -> bool:
        return not np.any(np.asarray(self.value) != 0)


@dataclasses.dataclass(frozen=True)
class Operand:
    """The operand with this number, unchanged but for its dtype.

    Attributes:
        number: among the operands of the function.
        scalar: whether it has no dimensions.
    """

    number: int
    scalar: bool


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Anything; `scalar` if it is computed from scalars alone."""

    scalar: bool


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """What a function is where its sparse operands are zero.

    Attributes:
        value: Known, Operand or Unknown.
        affine: whether the function is affine in the sparse operands together.
        sums: whether it is a sum of what it makes of sparse operands and of arrays: linear
            in all of them together.
    """

    value: Known | Operand | Unknown
    affine: bool
    sums: bool

    def keeps_zero(self) -> bool:
        """Whether the result is zero there."""
        return isinstance(self.value, Known) and self.value.is_zero()


@dataclasses.dataclass(frozen=True)
class Sparse:
    """Stands for a sparse operand of this dtype."""

    dtype: Any


@dataclasses.dataclass(frozen=True)
class Array:
    """Stands for an operand that is not looked at: an array, or a traced scalar."""

    dtype: Any
    weak: bool
    scalar: bool


@dataclasses.dataclass(frozen=True)
class Number:
    """A scalar whose value is known: a Python number, or a concrete array of no dimensions.

    Attributes:
        kind: its Python type, or its dtype and whether that is weak.
        value: as a Python number.
        given: the operand itself.
    """

    kind: Any
    value: Any
    given: Any = dataclasses.field(compare=False)


Role = Sparse | Array | Number


def role(x: Any) -> Role:
    """The role of an operand that is not sparse."""
    if isinstance(x, bool | int | float | complex):
        return Number(type(x), str(x), x)
    weak = bool(getattr(x, "weak_type", False))
    if jnp.ndim(x) == 0 and not isinstance(x, jax.core.Tracer):
        return Number((x.dtype, weak), str(x), x)
    return Array(x.dtype, weak, jnp.ndim(x) == 0)


def behaviour_at_zero(
    function: Callable[..., Any], roles: Sequence[Role], kwargs: dict[str, Any]
) -> Behaviour:
    """The behaviour of an elementwise function where its sparse operands are zero.

    Args:
        function: elementwise.
        roles: one for each operand.
        kwargs: keyword arguments of the function.
    """
    try:
        return _cached(function, tuple(roles), tuple(sorted(kwargs.items())))
    except TypeError:  # something that cannot be hashed
        return _behaviour(function, tuple(roles), tuple(kwargs.items()))


def _behaviour(
    function: Callable[..., Any], roles: tuple[Role, ...], kwargs: tuple[tuple[str, Any], ...]
) -> Behaviour:
    fixed, abstract, inputs, zeros = dict(kwargs), [], [], []
    for number, kind in enumerate(roles):
        if isinstance(kind, Number):
            continue
        weak = isinstance(kind, Array) and kind.weak
        abstract.append(jax.ShapeDtypeStruct((), kind.dtype, weak_type=weak))
        given = (Operand(number, getattr(kind, "scalar", False)), _FREE)
        zero = (Known(np.zeros((), kind.dtype)), _AFFINE)
        inputs.append(zero if isinstance(kind, Sparse) else given)
        if isinstance(kind, Array):
            zeros.append(given if kind.scalar else (zero[0], _ARRAYS))
        else:
            zeros.append(zero)

    def of_varying(*varying: Any) -> Any:
        rest = iter(varying)
        return function(
            *(k.given if isinstance(k, Number) else next(rest) for k in roles), **fixed
        )

    program = jax.make_jaxpr(of_varying)(*abstract)
    consts = [
        (Unknown(jnp.ndim(c) == 0) if isinstance(c, jax.core.Tracer) else Known(c), _FREE)
        for c in program.consts
    ]
    with trial():
        ((value, dependence),) = _run(program.jaxpr, consts, inputs)
        ((at_zero, of_all),) = _run(program.jaxpr, consts, zeros)
    sums = of_all != _OTHER and isinstance(at_zero, Known) and at_zero.is_zero()
    return Behaviour(value, dependence != _OTHER, sums)


_cached = functools.lru_cache(maxsize=4096)(_behaviour)

_Value = tuple[Known | Operand | Unknown, int]


def _run(jaxpr: Jaxpr, consts: Sequence[_Value], inputs: Sequence[_Value]) -> list[_Value]:
    return interpret(jaxpr, consts, inputs, _equation, lambda value: (Known(value), _FREE))


def _equation(eqn: JaxprEqn, inputs: list[_Value]) -> list[_Value]:
    if name_of(eqn) in CALLS:
        jaxpr, consts = called(eqn)
        return _run(jaxpr, [(Known(c), _FREE) for c in consts], inputs)
    values = [value for value, _ in inputs]
    dependence = _dependence(eqn, [depends for _, depends in inputs])
    known = [value.value for value in values if isinstance(value, Known)]
    if len(known) == len(values):
        return [(Known(result), dependence) for result in bound(eqn, known)]
    found = _with_unknown(eqn, values)
    if found is None:
        scalar = all(isinstance(value, Known) or value.scalar for value in values)
        return [(Unknown(scalar), dependence) for _ in eqn.outvars]
    return [(found, dependence)]


def _with_unknown(eqn: JaxprEqn, values: list[Any]) -> Known | Operand | None:
    """What an equation comes to although not all of its inputs are known."""
    name = name_of(eqn)
    zero = [isinstance(value, Known) and value.is_zero() for value in values]
    nothing = Known(np.zeros((), aval_of(eqn.outvars[0]).dtype))
    if name in ("mul", "and") and any(zero):
        return nothing
    if name == "div" and zero[0] and values[1].scalar:
        return nothing
    if name in ("add", "add_any", "or", "xor") and any(zero):
        return _unchanged(values[zero.index(False)])
    if name == "sub" and zero[1]:
        return _unchanged(values[0])
    if name in ("convert_element_type", "copy"):
        return _unchanged(values[0])
    if name == "select_n":
        which, *cases = values
        if isinstance(which, Known):
            chosen = cases[int(which.value)]
            return None if isinstance(chosen, Unknown) else chosen
        if all(zero[1:]):
            return nothing
        return _unchanged(cases[0]) if all(case == cases[0] for case in cases) else None
    return None


def _unchanged(value: Any) -> Operand | None:
    return value if isinstance(value, Operand) else None


# Affine in all inputs together.
_LINEAR = ("add", "add_any", "sub", "neg", "copy", "real", "imag", "conj")


def _dependence(eqn: JaxprEqn, inputs: list[int]) -> int:
    name, most = name_of(eqn), max(inputs, default=_FREE)
    if most in (_FREE, _OTHER) or name in _LINEAR:
        return most
    depends = [i for i, depends in enumerate(inputs) if depends]
    if name == "mul" and len(depends) == 1:
        return most
    if name == "div" and depends == [0]:
        old, new = (aval_of(v).dtype for v in (eqn.invars[0], eqn.outvars[0]))
        return most if jnp.issubdtype(new, jnp.inexact) and old == new else _OTHER
    if name == "select_n" and 0 not in depends:
        return most
    if name == "convert_element_type":
        adds = adds_when_cast(aval_of(eqn.invars[0]).dtype, parameter(eqn, "new_dtype"))
        return most if adds or most == _ARRAYS else _OTHER
    return _OTHER
