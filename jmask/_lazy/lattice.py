"""Define what the proof of row-locality knows of a value, and what operations make of it.

The abstract domain, its joins, and a rule for each operation without control flow:

Replicated(uniform)         the same in the dense program and in the one for a few rows; does
                            not vary along the axes in `uniform`, which may be longer in one
RowWise(axis, off_support)  one slice per row along `axis`; in untouched rows it is the constant
                            `off_support`, where that is known (0 for the gradient itself)
RowWise(.., merged)         the same where the axis of rows was merged with others: a ravelled
                            table (V * D,) has merged=(1, D)
NotRowLocal(why)            may differ between the two programs
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from jmask._base.forms import aval_of, name_of, parameter
from jmask._base.jaxprs import ARITHMETIC
from jmask._base.types import Scalar
from jmask._ops.rows import trial


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A value both programs agree on.

    Attributes:
        uniform: axes along which it does not vary.
        constant: the scalar it is everywhere, if that is known while tracing, else None.
    """

    uniform: frozenset[int] = frozenset()
    constant: Scalar | None = None


@dataclasses.dataclass(frozen=True)
class RowWise:
    """A value with one slice for each row of a table.

    Attributes:
        table: which table the rows belong to.
        axis: the axis of the rows.
        off_support: the scalar it is in every row the gradient does not touch, or None.
        merged: the sizes of the axes that were merged with the axis of rows, before and
            after it: `axis` is (merged[0], rows, merged[1]) ravelled. Sums over it are still
            known, and splitting it gives the axis of the rows back.
    """

    table: int
    axis: int
    off_support: Scalar | None = None
    merged: tuple[int, int] = (1, 1)

    # The invariant of `merged`: for a table of V rows the axis has merged[0] * V * merged[1]
    # entries, entry (o * V + r) * merged[1] + i being of row r. A reshape may split the axis at
    # these two places and nowhere else; a sum over all of it is a sum over rows all the same.

    def is_aligned(self, other: "RowWise") -> bool:
        """Decide whether the same places along the same axis belong to the same rows."""
        place = (self.table, self.axis, self.merged)
        return place == (other.table, other.axis, other.merged)

    def at(self, axis: int, off_support: Scalar | None) -> "RowWise":
        """Return the same rows along another axis."""
        return dataclasses.replace(self, axis=axis, off_support=off_support)

    def is_off_support(self, value: Scalar) -> bool:
        """Decide whether it is known to be `value` in untouched rows."""
        return self.off_support is not None and bool(self.off_support == value)


@dataclasses.dataclass(frozen=True)
class NotRowLocal:
    """A value that may depend on rows the gradient does not touch."""

    why: str


RowLocal = Replicated | RowWise
Kind = RowLocal | NotRowLocal


def not_row_local(eqn: JaxprEqn, what: str) -> NotRowLocal:
    """Return `NotRowLocal` because of what an equation does, with its source line."""
    place = source_info_util.summarize(eqn.source_info)
    at = f" (at {place})" if place else ""
    return NotRowLocal(f"`{eqn.primitive.name}` {what}{at}")


def join(x: Kind, y: Kind) -> Kind:
    """Return what is known of a value that is one of two."""
    if isinstance(x, NotRowLocal):
        return x
    if isinstance(y, NotRowLocal):
        return y
    if isinstance(x, Replicated) and isinstance(y, Replicated):
        return Replicated(x.uniform & y.uniform, _common(x.constant, y.constant))
    if isinstance(x, RowWise) and isinstance(y, RowWise):
        if not x.is_aligned(y):
            return NotRowLocal("control flow chooses between rows of two tables")
        return x.at(x.axis, _common(x.off_support, y.off_support))
    rows, other = (x, y) if isinstance(x, RowWise) else (y, x)
    assert isinstance(rows, RowWise)
    assert isinstance(other, Replicated)
    if rows.axis not in other.uniform:
        return NotRowLocal("control flow chooses between rows and fixed numbers")
    return rows.at(rows.axis, _common(rows.off_support, other.constant))


def joined(xs: Sequence[Kind], ys: Sequence[Kind]) -> list[Kind]:
    """Join two sequences item by item."""
    return [join(x, y) for x, y in zip(xs, ys, strict=True)]


def _common(x: Scalar | None, y: Scalar | None) -> Scalar | None:
    # By identity first: a nan is in common with itself.
    return x if x is y or (x is not None and y is not None and x == y) else None


Rule = Callable[[JaxprEqn, list[RowLocal]], Kind]

_OTHERS_COUNT = "rows outside the gradient would count in it"
BY_POSITION = "treats rows by their position (random or fixed numbers)"

ELEMENTWISE = ARITHMETIC | frozenset(
    "acos acosh asin asinh atan atanh complex conj cosh digamma erf erf_inv erfc imag lgamma "
    "name optimization_barrier population_count real reshard shift_left shift_right_arithmetic "
    "shift_right_logical sinh".split()
)

# Reductions to which this value contributes nothing.
NEUTRAL = {
    "reduce_sum": 0,
    "reduce_or": False,
    "reduce_and": True,
    "reduce_prod": 1,
}
_IDEMPOTENT = ("reduce_or", "reduce_and", "reduce_max", "reduce_min")


# --- elementwise operations --------------------------------------------------------------


def elementwise(name: str, eqn: JaxprEqn, inputs: list[RowLocal]) -> Kind:
    """Return the kind of what an elementwise equation makes of these."""
    constant = _constant(name, eqn, inputs)
    rows = [kind for kind in inputs if isinstance(kind, RowWise)]
    shared = [  # scalars combine with everything
        kind.uniform
        for kind, v in zip(inputs, eqn.invars, strict=True)
        if isinstance(kind, Replicated) and aval_of(v).ndim
    ]
    if not rows:
        return Replicated(frozenset.intersection(*shared) if shared else frozenset(), constant)
    first, *others = rows
    if not all(map(first.is_aligned, others)):
        return not_row_local(eqn, "combines rows of two tables, or in two orders")
    if shared and first.axis not in frozenset.intersection(*shared):
        return not_row_local(eqn, BY_POSITION)
    return first if constant is first.off_support else first.at(first.axis, constant)


def _constant(name: str, eqn: JaxprEqn, inputs: list[RowLocal]) -> Scalar | None:
    """Return the scalar an elementwise equation gives in untouched rows, or None if unknown."""
    known = [k.off_support if isinstance(k, RowWise) else k.constant for k in inputs]
    if name == "reshard":  # the same numbers on other devices
        return known[0]
    if name == "select_n" and known[0] is not None:
        return known[1 + int(known[0])]
    if name == "select_n" and known[1] is not None:
        same = all(k is not None and k == known[1] for k in known[1:])
        return known[1] if same else None
    if None not in known:
        return _evaluated(eqn, known)
    # Zero wins over an unknown finite factor, as it does in the dense update.
    absorbing = {"mul": (0, 1), "and": (0, 1), "div": (0,)}.get(name, ())
    dtype = aval_of(eqn.outvars[0]).dtype
    for position in absorbing:
        if known[position] is not None and not known[position]:
            return dtype.type(0)
    return None


def _evaluated(eqn: JaxprEqn, scalars: list[Scalar | None]) -> Scalar:
    params = eqn.primitive.get_bind_params(eqn.params)
    with trial():
        operands = [
            np.asarray(x, aval_of(v).dtype) for x, v in zip(scalars, eqn.invars, strict=True)
        ]
        # There and back explicitly, which jax.transfer_guard("disallow") lets pass.
        result = eqn.primitive.bind(*jax.device_put(operands), **params)
        return jax.device_get(result[0] if eqn.primitive.multiple_results else result)


# --- operations that move, keep or remove axes -------------------------------------------


def _broadcast(eqn: JaxprEqn, inputs: list[RowLocal]) -> Kind:
    (kind, *_) = inputs
    dimensions = parameter(eqn, "broadcast_dimensions")
    if isinstance(kind, RowWise):
        return kind.at(dimensions[kind.axis], kind.off_support)
    operand, shape = aval_of(eqn.invars[0]), parameter(eqn, "shape")
    varying = {
        dimensions[d]
        for d in range(operand.ndim)
        if d not in kind.uniform and operand.shape[d] == shape[dimensions[d]]
    }
    return Replicated(frozenset(range(len(shape))) - varying, kind.constant)


def _for_rows(rule: Callable[[JaxprEqn, RowWise], Kind]) -> Rule:
    """Return a rule for the one operand that has rows; without rows the result is shared."""

    def apply(eqn: JaxprEqn, inputs: list[RowLocal]) -> Kind:
        (kind, *_) = inputs
        return rule(eqn, kind) if isinstance(kind, RowWise) else Replicated()

    return apply


def _reshape(eqn: JaxprEqn, inputs: list[RowLocal]) -> Kind:
    (kind, *_) = inputs
    if isinstance(kind, Replicated):  # what is the same everywhere is so in any shape
        is_uniform = len(kind.uniform) == aval_of(eqn.invars[0]).ndim
        axes = range(aval_of(eqn.outvars[0]).ndim if is_uniform else 0)
        return Replicated(frozenset(axes), kind.constant)
    old, new = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    rows, none = divmod(old[kind.axis], math.prod(kind.merged))
    if not rows:  # of a table without rows nothing tells what was merged
        same_place = new[: kind.axis + 1] == old[: kind.axis + 1]
        return kind if same_place else not_row_local(eqn, "merges rows with other axes")
    before = math.prod(old[: kind.axis]) * kind.merged[0]
    places = []
    for axis, size in enumerate(new):
        outer, rest = divmod(before, max(math.prod(new[:axis]), 1))
        inner, more = divmod(size, max(outer * rows, 1))
        if not (rest or more or none) and inner:
            places.append(dataclasses.replace(kind, axis=axis, merged=(outer, inner)))
    if not places:
        return not_row_local(eqn, "merges rows with other axes")
    return min(places, key=lambda kind: math.prod(kind.merged))


def _transpose(eqn: JaxprEqn, kind: RowWise) -> Kind:
    axis = parameter(eqn, "permutation").index(kind.axis)
    return kind.at(axis, kind.off_support)


def _concatenate(eqn: JaxprEqn, inputs: list[RowLocal]) -> Kind:
    axes = {kind.axis for kind in inputs if isinstance(kind, RowWise)}
    if parameter(eqn, "dimension") in axes:
        return not_row_local(eqn, "puts rows behind other rows")
    return _joined(eqn, inputs, lambda axis: axis)


def _stack(eqn: JaxprEqn, inputs: list[RowLocal]) -> Kind:
    new = parameter(eqn, "axis")
    return _joined(eqn, inputs, lambda axis: axis + (axis >= new))


def _joined(eqn: JaxprEqn, inputs: list[RowLocal], moved: Callable[[int], int]) -> Kind:
    """Return what is known of operands put together, with their axes `moved`."""
    unvalued: list[RowLocal] = [
        kind.at(moved(kind.axis), None)
        if isinstance(kind, RowWise)
        else Replicated(frozenset(map(moved, kind.uniform)))
        for kind in inputs
    ]
    kind = elementwise(name_of(eqn), eqn, unvalued)
    return Replicated() if isinstance(kind, Replicated) else kind


def _split(eqn: JaxprEqn, kind: RowWise) -> Kind:
    if parameter(eqn, "axis") == kind.axis:
        return not_row_local(eqn, "parts rows from other rows")
    return kind


def _slice(eqn: JaxprEqn, kind: RowWise) -> Kind:
    begin, steps = parameter(eqn, "start_indices"), parameter(eqn, "strides")
    old, new = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    is_whole = old[kind.axis] == new[kind.axis] and not begin[kind.axis]
    if not is_whole or (steps is not None and steps[kind.axis] != 1):
        return not_row_local(eqn, "parts rows from other rows")
    return kind


def _rev(eqn: JaxprEqn, kind: RowWise) -> Kind:
    if kind.axis in parameter(eqn, "dimensions"):
        return not_row_local(eqn, "reverses the order of rows")
    return kind


def _reduce(eqn: JaxprEqn, kind: RowWise) -> Kind:
    name, axes = eqn.primitive.name, parameter(eqn, "axes")
    neutral = name in NEUTRAL and kind.is_off_support(NEUTRAL[name])
    if name == "reduce_and":
        neutral &= aval_of(eqn.invars[0]).dtype == bool
    if kind.axis in axes:
        if neutral:
            return Replicated()
        return not_row_local(eqn, f"combines rows, and {_OTHERS_COUNT}")
    axis = kind.axis - sum(a < kind.axis for a in axes)
    keeps = neutral or name in _IDEMPOTENT
    return kind.at(axis, kind.off_support if keeps else None)


def _dot(eqn: JaxprEqn, inputs: list[RowLocal]) -> Kind:
    contract, batch = parameter(eqn, "dimension_numbers")
    rows = {side: kind for side, kind in enumerate(inputs) if isinstance(kind, RowWise)}
    if not rows:
        return Replicated()
    if any(kind.axis in batch[side] for side, kind in rows.items()):
        return not_row_local(eqn, "batches over rows")
    zero = any(kind.is_off_support(0) for kind in rows.values())
    contracted = [kind.axis in contract[side] for side, kind in rows.items()]
    if len(rows) == 2 and all(contracted):
        left, right = rows[0], rows[1]
        aligned = contract[0].index(left.axis) == contract[1].index(right.axis)
        if zero and aligned and left.at(right.axis, None).is_aligned(right):
            return Replicated()
        return not_row_local(eqn, f"sums over rows, and {_OTHERS_COUNT}")
    if len(rows) == 2 or any(contracted):
        return not_row_local(eqn, "combines rows with each other or with fixed numbers")
    ((side, kind),) = rows.items()
    removed = (*contract[side], *batch[side])
    free = [d for d in range(aval_of(eqn.invars[side]).ndim) if d not in removed]
    axis = len(batch[0]) + free.index(kind.axis)
    if side == 1:
        axis += aval_of(eqn.invars[0]).ndim - len(contract[0]) - len(batch[0])
    return kind.at(axis, kind.off_support if zero else None)


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "stack": _stack,
    "split": _for_rows(_split),
    "slice": _for_rows(_slice),
    "rev": _for_rows(_rev),
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _for_rows(_transpose),
    "dot_general": _dot,
} | {name: _for_rows(_reduce) for name in (*NEUTRAL, "reduce_max", "reduce_min")}
