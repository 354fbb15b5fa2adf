"""Find what an optimizer does to a row without a gradient, while it runs on rows with one.

    m' = 0.9 m + 0.1 g      on the rows of the batch: an array
                            in all other rows, where g = 0: 0.9 m

Each value of the program is computed twice: as it is for the rows of the batch, and as a form
in the entries of a row that has no gradient, its parameter and its state:

    0.9 m                   entries {m: 0.9}
    p - 0.1 m / (√v + e)    entries {p: 1}, quotients (m, -0.1, √v + e)
    √v + e                  root
    tanh(m)                 unknown

Factors are scalars that all rows share. A form is a sum of entries, quotients and signs, or a
root, or unknown. New entries whose forms `closed_form` can sum up are the proof that the steps
of inactive rows can be caught up later; any others are refused.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jmask._base.forms import CALLS, aval_of, called, name_of, parameter
from jmask._base.jaxprs import ARITHMETIC, bound, interpret

# --- forms of a value in an inactive row -------------------------------------------------

# The number of a table, and 0 for its parameter or 1, 2, ... for its state.
Entry = tuple[int, int]


class Factor(NamedTuple):
    """`ones` + `rest`: what is near 1 keeps its digits."""

    ones: int
    rest: Any

    def times(self, x: Any) -> "Factor":
        if isinstance(self.rest, int | float):  # in Python's digits
            return Factor(0, _times(x, self.ones + self.rest))
        return Factor(0, _times(x, self.ones) + _times(x, self.rest))

    def plus(self, other: "Factor") -> "Factor":
        return Factor(self.ones + other.ones, self.rest + other.rest)

    def value(self) -> Any:
        return self.rest if self.ones == 0 else self.ones + self.rest


@dataclasses.dataclass(frozen=True)
class Root:
    """√(y s_b + e0), plus e1 if it is not None; `e0` is None if it is 0."""

    b: Entry
    y: Any
    e0: Any
    e1: Any


@dataclasses.dataclass(frozen=True)
class Away:
    """The form of a value in a row that has no gradient.

    Attributes:
        entries: factors of entries.
        constant: what all rows share, added; None for 0.
        quotients: factors of s_a / root, by a and b.
        signs: factors of signs of entries.
        root: the value is this root; all else is empty then.
        inverse: it is 1 / this root.
        unknown: it is none of these, and why.
    """

    entries: dict[Entry, Factor] = dataclasses.field(default_factory=dict)
    constant: Any = None
    quotients: tuple[tuple[Entry, Any, Root], ...] = ()
    signs: dict[Entry, Any] = dataclasses.field(default_factory=dict)
    root: Root | None = None
    inverse: Root | None = None
    unknown: str | None = None

    @property
    def is_zero(self) -> bool:
        return self.is_constant and self.constant is None

    @property
    def is_constant(self) -> bool:
        kinds = (self.entries, self.quotients, self.signs, self.root, self.inverse)
        return self.unknown is None and not any(kinds)

    @property
    def is_sum(self) -> bool:
        return self.unknown is None and self.root is None and self.inverse is None

    def single(self) -> tuple[Entry, Any] | None:
        """An entry and its factor, if that is all there is."""
        alone = self.is_sum and not self.quotients and not self.signs and self.constant is None
        if not alone or len(self.entries) != 1:
            return None
        ((entry, factor),) = self.entries.items()
        return entry, factor.value()

    def times(self, x: Any) -> "Away":
        if not self.is_sum:
            return unknown("a root is multiplied")
        return Away(
            {entry: factor.times(x) for entry, factor in self.entries.items()},
            None if self.constant is None else _times(x, self.constant),
            tuple((a, _times(x, c), root) for a, c, root in self.quotients),
            {entry: _times(x, sign) for entry, sign in self.signs.items()},
        )

    def plus(self, other: "Away") -> "Away":
        entries = dict(self.entries)
        for entry, factor in other.entries.items():
            entries[entry] = entries[entry].plus(factor) if entry in entries else factor
        signs = dict(self.signs)
        for entry, sign in other.signs.items():
            signs[entry] = signs[entry] + sign if entry in signs else sign
        constants = [x for x in (self.constant, other.constant) if x is not None]
        constant = sum(constants) if constants else None
        return Away(entries, constant, self.quotients + other.quotients, signs)


ZERO = Away()


def entry(table: int, number: int) -> Away:
    """The form of an entry as it is before the step."""
    return Away({(table, number): Factor(1, 0.0)})


def unknown(why: str) -> Away:
    return Away(unknown=why)


def is_known_zero(x: Any) -> bool:
    return isinstance(x, int | float) and x == 0


def _times(x: Any, y: Any) -> Any:
    if is_known_zero(x) or is_known_zero(y):
        return 0.0
    return y if _is_one(x) else x if _is_one(y) else x * y


def _is_one(x: Any) -> bool:
    return isinstance(x, int | float) and x == 1


# --- the interpreter ---------------------------------------------------------------------


class Value(NamedTuple):
    """A value of the program.

    Attributes:
        array: on the rows of the batch.
        away: its form in the other rows; None if it does not depend on rows.
        shared: the scalar that the array is filled with, if it is.
    """

    array: Any
    away: Away | None = None
    shared: Any = None


def forms_of(program: ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
    """The outputs of a program."""
    return _run(program.jaxpr, list(map(Value, program.consts)), inputs)


def _run(jaxpr: Jaxpr, consts: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
    return interpret(jaxpr, consts, inputs, _rule, lambda x: Value(x, shared=_number(x)))


def _number(x: Any) -> Any:
    """A Python number in place of one that is known, so that it takes any dtype."""
    if jnp.shape(x) != ():
        return None
    if isinstance(x, jax.core.Tracer) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    return float(x)


def _rule(eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    if name_of(eqn) in CALLS and any(x.away is not None or _is_filled(x) for x in inputs):
        inner, consts = called(eqn)
        return _run(inner, list(map(Value, consts)), inputs)
    arrays = [x.array for x in inputs]
    if all(x.away is None for x in inputs):
        results = _bound(eqn, arrays)
        shared = _shared(eqn, inputs, results)
        return [Value(x, shared=y) for x, y in zip(results, shared, strict=True)]
    results = bound(eqn, arrays)
    if _is_sum_of_batch(eqn, inputs):
        # One of all rows: those that are not in the batch add nothing to it.
        return [Value(x, shared=_number(x)) for x in results]
    away = _away(eqn, inputs)
    return [Value(x, away) for x in results]


def _is_sum_of_batch(eqn: JaxprEqn, inputs: list[Value]) -> bool:
    if name_of(eqn) not in _REDUCTIONS or 0 not in parameter(eqn, "axes"):
        return False
    return all(x.away is None or x.away.is_zero for x in inputs)


def _bound(eqn: JaxprEqn, arrays: list[Any]) -> list[Any]:
    if any(isinstance(x, jax.core.Tracer) for x in arrays) or not arrays:
        return bound(eqn, arrays)
    if name_of(eqn) not in ARITHMETIC:
        return bound(eqn, arrays)
    with jax.ensure_compile_time_eval():
        return bound(eqn, arrays)


def _is_filled(x: Value) -> bool:
    return x.shared is not None and jnp.ndim(x.array) > 0


def _shared(eqn: JaxprEqn, inputs: list[Value], results: list[Any]) -> list[Any]:
    """The scalars that results are filled with, or None."""
    if all(jnp.ndim(x) == 0 for x in results):
        return list(map(_number, results))
    if name_of(eqn) == "broadcast_in_dim" and jnp.ndim(inputs[0].array) == 0:
        return [_scalar(inputs[0])]
    scalars = [_scalar(x) for x in inputs]
    if name_of(eqn) in ARITHMETIC and scalars and all(x is not None for x in scalars):
        dtypes = [aval_of(v).dtype for v in eqn.invars]
        given = [jnp.asarray(x, d) for x, d in zip(scalars, dtypes, strict=True)]
        return list(map(_number, _bound(eqn, given)))
    if name_of(eqn) in _MOVES and scalars and scalars[0] is not None:
        return [scalars[0]]
    return [None] * len(results)


def _scalar(x: Value) -> Any:
    """The scalar that all rows share, or None."""
    if x.away is not None:
        constant = 0.0 if x.away.is_zero else x.away.constant
        return constant if x.away.is_constant else None
    if x.shared is not None:
        return x.shared
    return _number(x.array) if jnp.ndim(x.array) == 0 else None


def _as_away(x: Value) -> Away | None:
    """The form of an operand; None if it is an array that is not filled with a scalar."""
    if x.away is not None:
        return x.away
    scalar = _scalar(x)
    if scalar is None:
        return None
    return ZERO if is_known_zero(scalar) else Away(constant=scalar)


# --- equations ---------------------------------------------------------------------------

# What puts entries elsewhere in their row, or copies a row's number along it.
_MOVES = frozenset("broadcast_in_dim reshape squeeze expand_dims".split())
_SAME = frozenset("copy copy_p stop_gradient optimization_barrier".split())
# Bits of the mantissa of bfloat16. What has fewer does not count as the number that it rounds.
_FEWEST_BITS = 7
_ROUNDINGS = frozenset("convert_element_type reduce_precision".split())
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min".split())
# What is 0 where all operands are.
_ZERO_AT_ZERO = frozenset(
    "abs neg sign square sqrt sin tan floor ceil round cbrt log1p mul add sub add_any max min "
    "expm1 integer_pow".split()
)


def _away(eqn: JaxprEqn, inputs: list[Value]) -> Away:
    name = name_of(eqn)
    forms = list(map(_as_away, inputs))
    known = [x for x in forms if x is not None]
    for x in known:
        if x.unknown is not None and name not in ("mul", "div", "select_n"):
            return x
    if name in _SAME or (name in _ROUNDINGS and (known[0].is_zero or _keeps(eqn))):
        return known[0]
    if name in _MOVES:
        rows = aval_of(eqn.invars[0]).shape[:1] == aval_of(eqn.outvars[0]).shape[:1]
        return known[0] if rows or known[0].is_zero else unknown(f"`{name}` moves rows")
    if name in _RULES:
        return _RULES[name](eqn, inputs, forms)
    all_zero = len(known) == len(forms) and all(x.is_zero for x in known)
    if all_zero and name in _ZERO_AT_ZERO | _REDUCTIONS:
        return ZERO
    return unknown(_described(name, known))


def _keeps(eqn: JaxprEqn) -> bool:
    """Whether an equation that rounds keeps a number as far as a floating dtype can."""
    if name_of(eqn) == "reduce_precision":
        return parameter(eqn, "mantissa_bits") >= _FEWEST_BITS
    dtype = aval_of(eqn.outvars[0]).dtype
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).nmant >= _FEWEST_BITS


def _described(name: str, forms: Sequence[Away]) -> str:
    numbers = {entry[1] for x in forms for entry in x.entries}
    if 0 in numbers and name in ("mul", "square", "integer_pow"):
        return (
            "its state depends on the parameter in a way that is not linear, as with L2 decay "
            'inside an adaptive gradient; decoupled decay (`decay_mode="decoupled"`, '
            "optax.adamw) can be deferred; `weight_decay` that is injected counts as one, "
            "unless it is among the `static_args` of optax.inject_hyperparams"
        )
    return f"`{name}` of what the row holds has no closed form"


def _neg(eqn: JaxprEqn, inputs: list[Value], forms: list[Any]) -> Away:
    return forms[0].times(-1.0)


def _add(sign: float) -> Callable[..., Away]:
    def rule(eqn: JaxprEqn, inputs: list[Value], forms: list[Any]) -> Away:
        x, y = forms
        if x is None or y is None:
            return unknown("what is added is not the same in each row, as noise is")
        for one, other in ((x, y), (y, x)):
            if one.root is not None and sign > 0 and other.is_constant:
                if other.is_zero:
                    return one
                root = one.root
                shift = other.constant if root.e1 is None else root.e1 + other.constant
                return Away(root=dataclasses.replace(root, e1=shift))
        if not x.is_sum or not y.is_sum:
            return unknown(_described("add", [x, y]))
        return x.plus(y if sign > 0 else y.times(-1.0))

    return rule


def _mul(eqn: JaxprEqn, inputs: list[Value], forms: list[Any]) -> Away:
    if any(x is not None and x.inverse is not None and _may_be_zero(x.inverse) for x in forms):
        return unknown(_DIVIDES_BY_ZERO)
    if any(x is not None and x.is_zero for x in forms):
        return ZERO
    for one, other in (forms, forms[::-1]):
        if one is not None and other is not None and other.is_constant:
            return one if one.unknown else one.times(other.constant)
    for one, other in (forms, forms[::-1]):
        if one is not None and other is not None and other.inverse is not None:
            return _quotient(one, other.inverse)
    return _first_unknown(forms, "mul")


def _div(eqn: JaxprEqn, inputs: list[Value], forms: list[Any]) -> Away:
    x, y = forms
    if y is not None and (y.is_zero or (y.root is not None and _may_be_zero(y.root))):
        return unknown(_DIVIDES_BY_ZERO)
    if x is not None and x.is_zero:
        return ZERO
    if x is not None and y is not None and not x.unknown and y.is_constant:
        by = y.constant
        return x.times(1 / by if isinstance(by, int | float) else jnp.reciprocal(by))
    if x is not None and y is not None and y.root is not None:
        return _quotient(x, y.root)
    return _first_unknown(forms, "div")


_DIVIDES_BY_ZERO = (
    "in a row without a gradient it divides by 0, as by the gradient itself, or with `eps` 0"
)


def _may_be_zero(root: Root) -> bool:
    """Whether a root is 0 where the entry of the state is."""
    return all(x is None or is_known_zero(x) for x in (root.e0, root.e1))


def _quotient(x: Away, root: Root) -> Away:
    alone = x.single()
    if alone is None:
        return unknown(_described("div", [x]))
    a, factor = alone
    return Away(quotients=((a, factor, root),))


def _first_unknown(forms: list[Any], name: str) -> Away:
    if any(x is None for x in forms):
        return unknown(f"`{name}` takes something that is not the same in each row (noise?)")
    return next((x for x in forms if x.unknown), unknown(_described(name, forms)))


def _root_of(form: Any) -> Root | None:
    if not form.is_sum or form.quotients or form.signs or len(form.entries) != 1:
        return None
    ((b, factor),) = form.entries.items()
    return Root(b, factor.value(), form.constant, None)


def _sqrt(eqn: JaxprEqn, inputs: list[Value], forms: list[Any]) -> Away:
    (form,) = forms
    if form.is_zero:
        return ZERO
    root = _root_of(form)
    return unknown(_described("sqrt", forms)) if root is None else Away(root=root)


def _rsqrt(eqn: JaxprEqn, inputs: list[Value], forms: list[Any]) -> Away:
    root = _root_of(forms[0])
    return unknown(_described("rsqrt", forms)) if root is None else Away(inverse=root)


def _sign(eqn: JaxprEqn, inputs: list[Value], forms: list[Any]) -> Away:
    (form,) = forms
    if form.is_zero:
        return ZERO
    alone = form.single()
    if alone is None:
        return unknown(_described("sign", forms))
    a, factor = alone
    return Away(signs={a: np.sign(factor) if _is_python(factor) else jnp.sign(factor)})


def _is_python(x: Any) -> bool:
    return isinstance(x, int | float)


def _integer_pow(eqn: JaxprEqn, inputs: list[Value], forms: list[Any]) -> Away:
    if parameter(eqn, "y") == 1 or (forms[0].is_zero and parameter(eqn, "y") > 0):
        return forms[0]
    return unknown(_described("integer_pow", forms))


def _extreme(chosen: Callable[..., float]) -> Callable[..., Away]:
    def rule(eqn: JaxprEqn, inputs: list[Value], forms: list[Any]) -> Away:
        bounds = [_scalar(x) for x in inputs if x.away is None]
        zeros = all(x.away.is_zero for x in inputs if x.away is not None)
        known = all(isinstance(x, int | float) for x in bounds)
        if zeros and known and chosen([0.0, *bounds]) == 0:
            return ZERO
        return unknown(_described(name_of(eqn), [x for x in forms if x is not None]))

    return rule


def _clamp(eqn: JaxprEqn, inputs: list[Value], forms: list[Any]) -> Away:
    low, high = _scalar(inputs[0]), _scalar(inputs[2])
    known = isinstance(low, int | float) and isinstance(high, int | float)
    if forms[1] is not None and forms[1].is_zero and known and low <= 0 <= high:
        return ZERO
    return unknown(_described("clamp", [x for x in forms if x is not None]))


def _select(eqn: JaxprEqn, inputs: list[Value], forms: list[Any]) -> Away:
    which = inputs[0]
    forms = forms[1:]
    if all(x is not None and x.is_zero for x in forms):
        return ZERO
    scalar = _scalar(which)
    if which.away is not None or scalar is None or any(x is None for x in forms):
        return unknown("which of its values a row takes depends on what it holds")
    if any(not x.is_sum for x in forms):
        return next((x for x in forms if x.unknown), unknown(_described("select_n", forms)))
    total = ZERO
    for i, form in enumerate(forms):
        total = total.plus(form.times(jnp.where(scalar == i, 1.0, 0.0)))
    return total


_RULES: dict[str, Callable[..., Away]] = {
    "neg": _neg,
    "add": _add(1.0),
    "add_any": _add(1.0),
    "sub": _add(-1.0),
    "mul": _mul,
    "div": _div,
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "sign": _sign,
    "integer_pow": _integer_pow,
    "max": _extreme(max),
    "min": _extreme(min),
    "clamp": _clamp,
    "select_n": _select,
}
