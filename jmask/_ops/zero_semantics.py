"""How an elementwise function behaves at entries that are not stored: zeros, or not there.

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
equal indices may be kept apart, since f(0 + a + b) = f(0) + L(a) + L(b); before any other
function equal positions are summed. If it is linear in the arrays too, as `s - d` is, it is
the sum of a dense result and of rows.

Where an entry does not exist, under a mask or in padding, the function gets a number that is
harmless to it and its derivatives.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn
from jax.typing import ArrayLike

from jmask._base.array_types import adds_when_cast
from jmask._base.forms import CALLS, aval_of, called, name_of, parameter
from jmask._base.jaxprs import bound, interpret
from jmask._base.types import DType, Function, Options, PyTree, TensorLike, Value
from jmask._tensors.storage import is_sparse

_T = TypeVar("_T")
_Keywords = tuple[tuple[str, Value], ...]
"""Options by name, which a cache can compare."""

# --- numbers harmless to a function and its slopes ---------------------------------------


# To try in turn, for floating and for integer operands.
_CANDIDATES = ((0.5, 1), (1.5, 0), (0.25, 2), (2.5, 3), (-0.5, -1))


def _remembered(
    decide: Callable[[Function, tuple[Value, ...], _Keywords], _T],
) -> Callable[[Function, Sequence[Value], Options], _T]:
    """Remember what is decided about a function, its operands and its options by name."""
    cached = functools.lru_cache(maxsize=4096)(decide)

    def remembered(function: Function, operands: Sequence[Value], kwargs: Options) -> _T:
        try:
            return cached(function, tuple(operands), tuple(sorted(kwargs.items())))
        except TypeError:  # something that cannot be hashed
            return decide(function, tuple(operands), tuple(kwargs.items()))

    return remembered


@_remembered
def safe_numbers(
    function: Function, kinds: tuple[Value, ...], kwargs: _Keywords
) -> tuple[ArrayLike, ...]:
    """Return for each operand a number to put where it does not exist.

    A number that is selected away after the function must be harmless in it: 0 times an
    infinite slope is nan. So value, first and second derivative must be finite there: 0.5 and
    not 0 for sqrt. The number is found by trying, which serves functions never seen before.
    `kinds` holds for each operand its dtype, or its value if it is a Python number.
    """
    fixed = dict(kwargs)
    numbers: tuple[ArrayLike, ...] = ()
    for candidate in _CANDIDATES:
        numbers = tuple(_number(candidate, kind) for kind in kinds)
        if _is_safe(lambda *xs: function(*xs, **fixed), numbers):
            return numbers
    return numbers


def _number(candidate: tuple[float, int], kind: Value) -> ArrayLike:
    if not varies(kind):
        return kind
    inexact, integer = candidate
    return np.array(inexact if jnp.issubdtype(kind, jnp.inexact) else integer).astype(kind)


def _is_safe(function: Function, numbers: tuple[ArrayLike, ...]) -> bool:
    arrays = ((i, x) for i, x in enumerate(numbers) if isinstance(x, np.ndarray))
    varying = [i for i, x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]

    def varying_function(*xs: ArrayLike) -> PyTree:
        arguments = list(numbers)
        for i, x in zip(varying, xs, strict=True):
            arguments[i] = x
        return function(*arguments)

    def slope(*xs: ArrayLike) -> tuple[PyTree, PyTree]:
        return jax.jvp(varying_function, xs, tuple(map(np.ones_like, xs)))

    xs = tuple(numbers[i] for i in varying)
    with trial():
        try:
            results = jax.jvp(slope, xs, tuple(map(np.ones_like, xs)))
        except (TypeError, NotImplementedError):
            results = varying_function(*xs)  # not differentiable: then its value decides
        leaves = (x for x in jax.tree.leaves(results) if x.dtype != jax.dtypes.float0)
        return all(bool(jnp.isfinite(x).all()) for x in leaves)


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Context in which a function is tried on numbers, also while something is traced.

    What comes out may be nan, and `jax_debug_nans` is not to take it for a mistake.
    """
    with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
        yield


def varies(x: TensorLike) -> bool:
    """Decide whether an operand is an array, and not a Python number."""
    # A Python number keeps its weak type, and static arguments must stay static.
    return not isinstance(x, bool | int | float | complex)


# --- what a function is where its sparse operands are zero -------------------------------


# How a value depends on operands, more from left to right: not, on arrays in an affine way, on
# sparse ones too, in another way.
_FREE, _ARRAYS, _AFFINE, _OTHER = range(4)


@dataclasses.dataclass(frozen=True)
class Known:
    """A constant."""

    value: TensorLike


@dataclasses.dataclass(frozen=True)
class Operand:
    """The operand with this number, unchanged but for its dtype."""

    number: int
    scalar: bool


@dataclasses.dataclass(frozen=True)
class Unknown:
    """Anything; `scalar` if it is computed from scalars alone."""

    scalar: bool


_Entry = Known | Operand | Unknown


def _is_zero(value: _Entry) -> bool:
    return isinstance(value, Known) and not np.any(np.asarray(value.value) != 0)


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """A function where its sparse operands are zero.

    Attributes:
        value: the result there.
        affine: whether the function is affine in the sparse operands together.
        sums: whether it is linear in sparse operands and arrays together: the sum of a
            function of the former and one of the latter.
    """

    value: _Entry
    affine: bool
    sums: bool

    def keeps_zero(self) -> bool:
        return _is_zero(self.value)


@dataclasses.dataclass(frozen=True)
class Varying:
    """Stands for an operand whose value is not known: "sparse", an "array" or a "scalar"."""

    kind: str
    dtype: DType
    weak: bool = False


@dataclasses.dataclass(frozen=True)
class Number:
    """A scalar whose value is known: a Python number, or a concrete array of no dimensions.

    Attributes:
        kind: its Python type, or its dtype and whether that is weak.
        text: its value, as a string: nan is equal to nan.
    """

    kind: object
    text: str
    value: ArrayLike = dataclasses.field(compare=False)


def role(x: Value) -> Varying | Number:
    """Return what stands for an operand."""
    if is_sparse(x):
        return Varying("sparse", jnp.dtype(x.dtype))
    if not varies(x):
        return Number(type(x), str(x), x)
    weak = bool(getattr(x, "weak_type", False))
    if jnp.ndim(x) == 0 and not isinstance(x, jax.core.Tracer):
        return Number((x.dtype, weak), str(x), x)
    return Varying("array" if jnp.ndim(x) else "scalar", x.dtype, weak)


@_remembered
def behaviour_at_zero(
    function: Function,
    roles: tuple[Varying | Number, ...],
    kwargs: _Keywords,
) -> Behaviour:
    """Decide how an elementwise function behaves where its sparse operands are zero."""
    varying = [(i, x) for i, x in enumerate(roles) if isinstance(x, Varying)]

    def varying_function(*values: ArrayLike) -> jax.Array:
        rest = iter(values)
        operands = (x.value if isinstance(x, Number) else next(rest) for x in roles)
        return function(*operands, **dict(kwargs))

    program = jax.make_jaxpr(varying_function)(
        *(jax.ShapeDtypeStruct((), x.dtype, weak_type=x.weak) for _, x in varying)
    )
    consts = [
        (Unknown(jnp.ndim(c) == 0) if isinstance(c, jax.core.Tracer) else Known(c), _FREE)
        for c in program.consts
    ]
    # Once with zeros for the sparse operands only, and once for the arrays too.
    inputs: list[_Value] = []
    zeros: list[_Value] = []
    for i, x in varying:
        zero, operand = Known(np.zeros((), x.dtype)), Operand(i, x.kind == "scalar")
        inputs.append((zero, _AFFINE) if x.kind == "sparse" else (operand, _FREE))
        zeros.append((zero, _ARRAYS) if x.kind == "array" else inputs[-1])
    with trial():
        ((value, dependence),) = _run(program.jaxpr, consts, inputs)
        ((at_zero, affine_value),) = _run(program.jaxpr, consts, zeros)
    return Behaviour(
        value,
        affine=dependence != _OTHER,
        sums=affine_value != _OTHER and _is_zero(at_zero),
    )


_Value = tuple[_Entry, int]


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
    result = _with_unknown(eqn, values)
    if result is None:
        scalar = all(map(_is_scalar, values))
        return [(Unknown(scalar), dependence) for _ in eqn.outvars]
    return [(result, dependence)]


def _with_unknown(eqn: JaxprEqn, values: list[_Entry]) -> _Entry | None:
    """Return the result of an equation with unknown inputs where it is zero, or one of them."""
    name = name_of(eqn)
    zero = list(map(_is_zero, values))
    nothing = Known(np.zeros((), aval_of(eqn.outvars[0]).dtype))
    if name in ("mul", "and") and any(zero):
        return nothing
    if name == "div" and zero[0] and _is_scalar(values[1]):
        return nothing
    if name in ("add", "add_any", "or", "xor") and any(zero):
        return values[zero.index(False)]
    if (name == "sub" and zero[1]) or name in ("convert_element_type", "copy"):
        return values[0]
    if name == "select_n":
        which, *cases = values
        if isinstance(which, Known):
            chosen = cases[int(which.value)]
            return None if isinstance(chosen, Unknown) else chosen
        if all(zero[1:]):
            return nothing
        is_one = isinstance(cases[0], Operand) and all(case == cases[0] for case in cases)
        return cases[0] if is_one else None
    return None


def _is_scalar(value: _Entry) -> bool:
    return isinstance(value, Known) or value.scalar


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
