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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jmask._base.forms import CALLS, aval_of, called, name_of, parameter
from jmask._base.jaxprs import ARITHMETIC, bound, interpret
from jmask._base.types import Coefficient

# --- forms of a value in an inactive row -------------------------------------------------

# The number of a table, and 0 for its parameter or 1, 2, ... for its state.
Entry = tuple[int, int]


class Factor(NamedTuple):
    """A coefficient `ones` + `rest`: one near 1 keeps its digits."""

    ones: int
    rest: Coefficient

    def times(self, x: Coefficient) -> "Factor":
        if isinstance(self.rest, int | float):  # in Python's digits
            return Factor(0, _times(x, self.ones + self.rest))
        return Factor(0, _times(x, self.ones) + _times(x, self.rest))

    def plus(self, other: "Factor") -> "Factor":
        return Factor(self.ones + other.ones, self.rest + other.rest)

    def value(self) -> Coefficient:
        return self.rest if self.ones == 0 else self.ones + self.rest


@dataclasses.dataclass(frozen=True)
class Root:
    """√(y s_b + e0), plus e1 if it is not None; `e0` is None if it is 0."""

    b: Entry
    y: Coefficient
    e0: Coefficient
    e1: Coefficient


@dataclasses.dataclass(frozen=True)
class RowForm:
    """A value in a row that has no gradient, as a function of the entries of the row.

    Attributes:
        entries: coefficients of entries.
        constant: what all rows share, added; None for 0.
        quotients: (a, coefficient, root) of each s_a / root.
        signs: coefficients of the signs of entries.
        root: the value is this root; all else is empty then.
        inverse: it is 1 / this root.
        unknown: it is none of these, and why.
    """

    entries: dict[Entry, Factor] = dataclasses.field(default_factory=dict)
    constant: Coefficient = None
    quotients: tuple[tuple[Entry, Coefficient, Root], ...] = ()
    signs: dict[Entry, Coefficient] = dataclasses.field(default_factory=dict)
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

    def single(self) -> tuple[Entry, Coefficient] | None:
        """Return an entry and its coefficient, if that is all there is."""
        alone = self.is_sum and not self.quotients and not self.signs and self.constant is None
        if not alone or len(self.entries) != 1:
            return None
        ((entry, factor),) = self.entries.items()
        return entry, factor.value()

    def times(self, x: Coefficient) -> "RowForm":
        if not self.is_sum:
            return unknown("a root is multiplied")
        return RowForm(
            {entry: factor.times(x) for entry, factor in self.entries.items()},
            None if self.constant is None else _times(x, self.constant),
            tuple((a, _times(x, c), root) for a, c, root in self.quotients),
            {entry: _times(x, sign) for entry, sign in self.signs.items()},
        )

    def plus(self, other: "RowForm") -> "RowForm":
        entries = dict(self.entries)
        for entry, factor in other.entries.items():
            entries[entry] = entries[entry].plus(factor) if entry in entries else factor
        signs = dict(self.signs)
        for entry, sign in other.signs.items():
            signs[entry] = signs[entry] + sign if entry in signs else sign
        constants = [x for x in (self.constant, other.constant) if x is not None]
        constant = sum(constants) if constants else None
        return RowForm(entries, constant, self.quotients + other.quotients, signs)


ZERO = RowForm()


def entry(table: int, number: int) -> RowForm:
    """Return the form of an entry as it is before the step."""
    return RowForm({(table, number): Factor(1, 0.0)})


def unknown(why: str) -> RowForm:
    return RowForm(unknown=why)


def is_known_zero(x: object) -> bool:
    """Decide whether a coefficient is a Python number, and 0."""
    return isinstance(x, int | float) and x == 0


def _times(x: Coefficient, y: Coefficient) -> Coefficient:
    """Multiply coefficients; Python's 0 and 1 stay known, whatever the other one is."""
    for one, other in ((x, y), (y, x)):
        if isinstance(one, int | float) and one in (0, 1):
            return other if one else 0.0
    return x * y


# --- the interpreter ---------------------------------------------------------------------


class Value(NamedTuple):
    """A value of the program.

    Attributes:
        array: on the rows of the batch.
        form: its form in the other rows; None if it does not depend on rows.
        shared: the scalar that the array is filled with, if it is.
    """

    array: jax.Array
    form: RowForm | None = None
    shared: Coefficient = None

    def scalar(self) -> Coefficient:
        """Return the scalar that all rows share, or None."""
        if self.form is not None:
            constant = 0.0 if self.form.is_zero else self.form.constant
            return constant if self.form.is_constant else None
        if self.shared is not None:
            return self.shared
        return _number(self.array) if jnp.ndim(self.array) == 0 else None

    def as_form(self) -> RowForm | None:
        """Return the form; None of an array that is not filled with a scalar."""
        scalar = self.scalar()
        if self.form is not None or scalar is None:
            return self.form
        return ZERO if is_known_zero(scalar) else RowForm(constant=scalar)


def forms_of(program: ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
    """Run a program on arrays and forms together."""
    return _run(program.jaxpr, list(map(Value, program.consts)), inputs)


def _run(jaxpr: Jaxpr, consts: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
    return interpret(jaxpr, consts, inputs, _rule, lambda x: Value(x, shared=_number(x)))


def _number(x: Coefficient) -> Coefficient:
    """Return a Python number in place of one that is known, so that it takes any dtype."""
    if jnp.shape(x) != ():
        return None
    if isinstance(x, jax.core.Tracer) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x
    return float(x)


def _rule(eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
    name, arrays = name_of(eqn), [x.array for x in inputs]
    is_filled = any(x.shared is not None and jnp.ndim(x.array) for x in inputs)
    row_forms = [x for x in inputs if x.form is not None]
    if name in CALLS and (row_forms or is_filled):
        inner, consts = called(eqn)
        return _run(inner, list(map(Value, consts)), inputs)
    if not row_forms:
        results = _bound(eqn, arrays)
        shared = _shared(eqn, inputs, results)
        return [Value(x, shared=y) for x, y in zip(results, shared, strict=True)]
    results = bound(eqn, arrays)
    is_reduced = name in _REDUCTIONS and 0 in parameter(eqn, "axes")
    if is_reduced and all(x.form.is_zero for x in row_forms if x.form is not None):
        # A sum over all rows: those that are not in the batch add nothing to it.
        return [Value(x, shared=_number(x)) for x in results]
    form = _form(eqn, inputs)
    return [Value(x, form) for x in results]


def _bound(eqn: JaxprEqn, arrays: list[jax.Array]) -> list[jax.Array]:
    """Return the results of an equation, known where its operands are."""
    is_known = arrays and not any(isinstance(x, jax.core.Tracer) for x in arrays)
    if not is_known or name_of(eqn) not in ARITHMETIC:
        return bound(eqn, arrays)
    with jax.ensure_compile_time_eval():
        return bound(eqn, arrays)


def _shared(eqn: JaxprEqn, inputs: list[Value], results: list[jax.Array]) -> list[Coefficient]:
    """Return the scalars that results are filled with, or None."""
    if all(jnp.ndim(x) == 0 for x in results):
        return list(map(_number, results))
    scalars = [x.scalar() for x in inputs]
    if name_of(eqn) in ARITHMETIC and scalars and all(x is not None for x in scalars):
        dtypes = [aval_of(v).dtype for v in eqn.invars]
        filled = [jnp.asarray(x, dtype) for x, dtype in zip(scalars, dtypes, strict=True)]
        return list(map(_number, _bound(eqn, filled)))
    if name_of(eqn) in _MOVES and scalars:
        return [scalars[0]]
    return [None] * len(results)


# --- equations ---------------------------------------------------------------------------

# What puts entries elsewhere in their row, or copies a row's number along it.
_MOVES = frozenset("broadcast_in_dim reshape squeeze expand_dims".split())
_SAME = frozenset("copy copy_p stop_gradient optimization_barrier".split())
# Bits of the mantissa of bfloat16. Rounding to fewer counts as an operation of its own.
_FEWEST_BITS = 7
_ROUNDINGS = frozenset("convert_element_type reduce_precision".split())
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min".split())
# What is 0 where all operands are.
_ZERO_AT_ZERO = _REDUCTIONS.union(
    "abs neg sign square sqrt sin tan floor ceil round cbrt log1p mul add sub add_any max min "
    "expm1".split()
)
_DIVIDES_BY_ZERO = (
    "in a row without a gradient it divides by 0, as by the gradient itself, or with `eps` 0"
)

# None of an operand is an array that differs from row to row; None of a result, no form.
Unary = Callable[[JaxprEqn, RowForm], RowForm | None]
Binary = Callable[[JaxprEqn, RowForm | None, RowForm | None], RowForm | None]


def _form(eqn: JaxprEqn, inputs: list[Value]) -> RowForm:
    """Return the form of the results of an equation."""
    name = name_of(eqn)
    forms = [x.as_form() for x in inputs]
    known = [x for x in forms if x is not None]
    for x in known:
        if x.unknown is not None and name not in ("mul", "div", "select_n"):
            return x
    if name in _SAME or (name in _ROUNDINGS and (known[0].is_zero or _keeps(eqn))):
        return known[0]
    if name in _MOVES:
        rows = aval_of(eqn.invars[0]).shape[:1] == aval_of(eqn.outvars[0]).shape[:1]
        return known[0] if rows or known[0].is_zero else unknown(f"`{name}` moves rows")
    if len(known) == len(forms) and name in _ZERO_AT_ZERO and all(x.is_zero for x in known):
        return ZERO
    if name in _UNARY:
        form = _UNARY[name](eqn, known[0])
    elif name in _BINARY:
        form = _BINARY[name](eqn, *forms)
    elif name in ("max", "min", "clamp"):
        form = _bounded(name, [x.scalar() for x in inputs])
    elif name == "select_n":
        form = _select(inputs[0], forms[1:])
    else:
        form = None
    if form is not None:
        return form
    # No rule applies: say why.
    if name in ("mul", "div"):
        if len(known) < len(forms):
            why = f"`{name}` takes something that is not the same in each row (noise?)"
            return unknown(why)
        for x in known:
            if x.unknown:
                return x
    entries = {entry[1] for x in known for entry in x.entries}
    if 0 in entries and name in ("mul", "square", "integer_pow"):
        return unknown(
            "its state depends on the parameter in a way that is not linear, as with L2 decay "
            'inside an adaptive gradient; decoupled decay (`decay_mode="decoupled"`, '
            "optax.adamw) can be deferred; `weight_decay` that is injected counts as one, "
            "unless it is among the `static_args` of optax.inject_hyperparams"
        )
    return unknown(f"`{name}` of what the row holds has no closed form")


def _keeps(eqn: JaxprEqn) -> bool:
    """Decide whether an equation that rounds keeps a number as far as a floating dtype can."""
    if name_of(eqn) == "reduce_precision":
        return parameter(eqn, "mantissa_bits") >= _FEWEST_BITS
    dtype = aval_of(eqn.outvars[0]).dtype
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).nmant >= _FEWEST_BITS


def _add(eqn: JaxprEqn, x: RowForm | None, y: RowForm | None) -> RowForm | None:
    if x is None or y is None:
        return unknown("what is added is not the same in each row, as noise is")
    is_sum = name_of(eqn) != "sub"
    for one, other in ((x, y), (y, x)):
        if one.root is not None and is_sum and other.is_constant:
            if other.is_zero:
                return one
            root = one.root
            shift = other.constant if root.e1 is None else root.e1 + other.constant
            return RowForm(root=dataclasses.replace(root, e1=shift))
    if not x.is_sum or not y.is_sum:
        return None
    return x.plus(y if is_sum else y.times(-1.0))


def _mul(eqn: JaxprEqn, x: RowForm | None, y: RowForm | None) -> RowForm | None:
    known = [form for form in (x, y) if form is not None]
    if any(form.inverse is not None and _may_be_zero(form.inverse) for form in known):
        return unknown(_DIVIDES_BY_ZERO)
    if any(form.is_zero for form in known):
        return ZERO
    if x is None or y is None:
        return None
    for one, other in ((x, y), (y, x)):
        if other.is_constant:
            return one if one.unknown else one.times(other.constant)
    for one, other in ((x, y), (y, x)):
        if other.inverse is not None:
            return _quotient(one, other.inverse)
    return None


def _div(eqn: JaxprEqn, x: RowForm | None, y: RowForm | None) -> RowForm | None:
    if y is not None and (y.is_zero or (y.root is not None and _may_be_zero(y.root))):
        return unknown(_DIVIDES_BY_ZERO)
    if x is not None and x.is_zero:
        return ZERO
    if x is None or y is None:
        return None
    if y.is_constant and not x.unknown:
        by = y.constant
        return x.times(1 / by if isinstance(by, int | float) else jnp.reciprocal(by))
    return None if y.root is None else _quotient(x, y.root)


def _may_be_zero(root: Root) -> bool:
    """Decide whether a root is 0 where the entry of the state is."""
    return all(x is None or is_known_zero(x) for x in (root.e0, root.e1))


def _quotient(x: RowForm, root: Root) -> RowForm | None:
    alone = x.single()
    return None if alone is None else RowForm(quotients=((*alone, root),))


def _sqrt(eqn: JaxprEqn, form: RowForm) -> RowForm | None:
    if not form.is_sum or form.quotients or form.signs or len(form.entries) != 1:
        return None
    ((b, factor),) = form.entries.items()
    root = Root(b, factor.value(), form.constant, None)
    return RowForm(inverse=root) if name_of(eqn) == "rsqrt" else RowForm(root=root)


def _sign(eqn: JaxprEqn, form: RowForm) -> RowForm | None:
    alone = form.single()
    if alone is None:
        return None
    a, factor = alone
    sign = np.sign if isinstance(factor, int | float) else jnp.sign
    return RowForm(signs={a: sign(factor)})


def _integer_pow(eqn: JaxprEqn, form: RowForm) -> RowForm | None:
    power = parameter(eqn, "y")
    return form if power == 1 or (form.is_zero and power > 0) else None


def _bounded(name: str, scalars: Sequence[Coefficient]) -> RowForm | None:
    """Return zero for what is cut off at bounds around 0, if that is known."""
    if not all(isinstance(x, int | float) for x in scalars):
        return None
    if name == "clamp":
        low, x, high = scalars
        result = min(max(x, low), high)
    else:
        result = max(scalars) if name == "max" else min(scalars)
    return ZERO if result == 0 else None


def _select(which: Value, forms: Sequence[RowForm | None]) -> RowForm | None:
    known = [form for form in forms if form is not None]
    is_known, scalar = len(known) == len(forms), which.scalar()
    if is_known and all(form.is_zero for form in known):
        return ZERO
    if which.form is not None or scalar is None or not is_known:
        return unknown("which of its values a row takes depends on what it holds")
    if any(not form.is_sum for form in known):
        return next((form for form in known if form.unknown), None)
    total = ZERO
    for i, form in enumerate(known):
        total = total.plus(form.times(jnp.where(scalar == i, 1.0, 0.0)))
    return total


_UNARY: dict[str, Unary] = {
    "neg": lambda _, form: form.times(-1.0),
    "sqrt": _sqrt,
    "rsqrt": _sqrt,
    "sign": _sign,
    "integer_pow": _integer_pow,
}
_BINARY: dict[str, Binary] = {
    "add": _add,
    "add_any": _add,
    "sub": _add,
    "mul": _mul,
    "div": _div,
}
