"""Prove that an update rule, run on the touched rows only, is exact on those rows.

`lazy(inner)` runs `inner.update` on the rows in the gradient. That equals the dense update
on these rows if nothing in it mixes rows, except through sums to which untouched rows
contribute nothing because their gradient is zero. This module decides it by reading two jaxprs
in step, the dense update and the update on rows, and following what is known of each value (see
`lattice`):

    g           RowWise(axis=0, off_support=0)
    g * g       RowWise(axis=0, off_support=0)
    sum(g * g)  Replicated    untouched rows add 0: the global norm is exact
    vdot(g, g)  Replicated    the same of what is ravelled
    p           RowWise(axis=0)
    sum(p * p)  NotRowLocal   untouched rows count: LAMB's trust ratio is not row-local
    ones_like g Replicated    as many as there are rows: elementwise steps may use them
    sum(ones)   NotRowLocal   V in one program, n in the other

A mean over a table divides by its number of rows, and other programs count them. So both
programs must have the same literals and parameters, except shapes that follow from the number
of rows, and the jaxprs of control flow, which are read in pairs:

    for V = 1000 rows       c = div b 1000.0        d = scan[length=1000] ...
    for n = 8 rows          c = div b 8.0           d = scan[length=8] ...

An operation without a rule here is NotRowLocal: an unknown transformation is refused, not run
wrongly.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jmask._base.forms import (
    Opened,
    aval_of,
    branches_of,
    compared,
    name_of,
    opened,
    parameter,
    scan_of,
    what_is_unknown,
    while_of,
)
from jmask._base.jaxprs import ARITHMETIC, inlined
from jmask._base.types import Atom, Scalar
from jmask._lazy.lattice import Kind, NotRowLocal, Replicated, RowWise, joined, not_row_local
from jmask._ops.zero_semantics import trial

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

_COUNTS = "depends on the number of rows"
_OTHERS_COUNT = "rows outside the gradient would count in it"
_BY_POSITION = "treats rows by their position (random or fixed numbers)"

RowLocal = Replicated | RowWise
Kinds = Kind | list[Kind]
"""One for each output of an equation, or one for all."""
Rule = Callable[[JaxprEqn, list[RowLocal]], Kind]


def classify(
    dense: ClosedJaxpr, rows: ClosedJaxpr, inputs: Sequence[Kind]
) -> tuple[list[Kind], dict[Var, Kind]]:
    """Return the kinds of the outputs of an update, and of all variables of `rows`.

    Args:
        dense: the program on whole tables, with its calls in line.
        rows: the same update on some rows of them. Once both are proved, `rows` with itself
            gives the same kinds.
        inputs: what is known of the inputs.

    Returns:
        The kinds of the outputs, and of each variable of `rows`.
    """
    one, other = dense.jaxpr, rows.jaxpr
    if not _in_step(one, other):
        why = "it chooses other operations for tables of another size"
        return [NotRowLocal(why)] * len(one.outvars), {}
    kinds: dict[Var, Kind] = dict(zip(other.invars, inputs, strict=True))
    counterparts = dict(zip(one.invars, other.invars, strict=True))
    counterparts.update(zip(one.constvars, other.constvars, strict=True))
    for w, x, y in zip(other.constvars, dense.consts, rows.consts, strict=True):
        if _same(x, y):
            kinds[w] = Replicated()

    def read(eqn: JaxprEqn | None, v: Atom, w: Atom) -> Kind:
        if isinstance(v, Literal):
            alike = isinstance(w, Literal) and _same(v.val, w.val)
            if alike and aval_of(v).dtype == aval_of(w).dtype:
                return Replicated(constant=v.val if np.ndim(v.val) == 0 else None)
        elif isinstance(w, Var) and counterparts[v] is w and w in kinds:
            return kinds[w]
        return not_row_local(eqn, _COUNTS) if eqn else NotRowLocal(f"what it returns {_COUNTS}")

    for eqn, counterpart in zip(one.eqns, other.eqns, strict=True):
        operands = [
            read(eqn, v, w) for v, w in zip(eqn.invars, counterpart.invars, strict=True)
        ]
        outputs = _equation(eqn, counterpart, operands)
        if not isinstance(outputs, list):
            outputs = [outputs] * len(eqn.outvars)
        for v, w, kind in zip(eqn.outvars, counterpart.outvars, outputs, strict=True):
            counterparts[v] = w
            kinds[w] = kind if aval_of(v) == aval_of(w) else _agreeing(eqn, kind, v, w)
    pairs = zip(one.outvars, other.outvars, strict=True)
    return [read(None, v, w) for v, w in pairs], kinds


def _run(programs: Sequence[Opened], inputs: Sequence[Kind]) -> list[Kind]:
    """Return the kinds of the outputs of the jaxprs that a pair of equations holds."""
    dense, rows = (inlined(ClosedJaxpr(*program)) for program in programs)
    return classify(dense, rows, inputs)[0]


def _equation(eqn: JaxprEqn, counterpart: JaxprEqn, inputs: list[Kind]) -> Kinds:
    """Return the kinds of the outputs of an equation and of its counterpart on some rows.

    One kind, if it is that of all outputs.
    """
    name = name_of(eqn)
    unknown = None if name == eqn.primitive.name else what_is_unknown(eqn)
    if unknown is not None:
        return NotRowLocal(unknown)
    if eqn is not counterpart and not _same_params(eqn, counterpart):
        return not_row_local(eqn, _COUNTS)
    if name in _CONTROL_FLOW:
        return _CONTROL_FLOW[name](eqn, counterpart, inputs)
    if name == "optimization_barrier":
        return inputs
    known: list[RowLocal] = []
    for kind in inputs:
        if isinstance(kind, NotRowLocal):
            return kind
        known.append(kind)
    if name in ELEMENTWISE:
        return _elementwise(name, eqn, known)
    if name not in ("broadcast_in_dim", "reshape", "squeeze") and any(
        map(_is_sized, known, eqn.invars, counterpart.invars)
    ):
        return not_row_local(eqn, _COUNTS)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(eqn, known)
    if all(isinstance(kind, Replicated) for kind in known):
        return Replicated()
    return not_row_local(eqn, "has no row-local form that jmask knows")


def _is_sized(kind: RowLocal, v: Atom, w: Atom) -> bool:
    """Decide whether it is a shared number that is repeated as often as there are rows."""
    return isinstance(kind, Replicated) and aval_of(v).shape != aval_of(w).shape


def _agreeing(eqn: JaxprEqn, kind: Kind, v: Var, w: Var) -> Kind:
    """Return the kind of a value of two shapes; NotRowLocal if they differ otherwise."""
    dense, rows = aval_of(v), aval_of(w)
    if isinstance(kind, NotRowLocal):
        return kind
    if (dense.dtype, dense.ndim) != (rows.dtype, rows.ndim):
        return not_row_local(eqn, _COUNTS)
    pairs = zip(dense.shape, rows.shape, strict=True)
    axes = {axis for axis, (x, y) in enumerate(pairs) if x != y}
    if isinstance(kind, Replicated):
        return kind if axes <= kind.uniform else not_row_local(eqn, _BY_POSITION)
    return kind if axes <= {kind.axis} else not_row_local(eqn, _COUNTS)


# --- elementwise operations --------------------------------------------------------------


def _elementwise(name: str, eqn: JaxprEqn, inputs: list[RowLocal]) -> Kind:
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
        return not_row_local(eqn, _BY_POSITION)
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
    kind = _elementwise(name_of(eqn), eqn, unvalued)
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


_RULES: dict[str, Rule] = {
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


# --- control flow ------------------------------------------------------------------------


def _cond(eqn: JaxprEqn, counterpart: JaxprEqn, inputs: list[Kind]) -> Kinds:
    which, *operands = inputs
    if isinstance(which, NotRowLocal):
        return which
    branches, counterparts = branches_of(eqn), branches_of(counterpart)
    if len(branches) != len(counterparts):
        return not_row_local(eqn, _COUNTS)
    first, *others = [_run(pair, operands) for pair in zip(branches, counterparts, strict=True)]
    for outputs in others:
        first = joined(first, outputs)
    return first


def _while(eqn: JaxprEqn, counterpart: JaxprEqn, inputs: list[Kind]) -> Kinds:
    loops = [while_of(eqn), while_of(counterpart)]
    first, count = loops[0].condition_consts, loops[0].body_consts
    condition, consts = inputs[:first], inputs[first : first + count]
    carry = inputs[first + count :]
    body, until = [loop.body for loop in loops], [loop.condition for loop in loops]
    carry = _fixed_point(carry, lambda c: _run(body, consts + c))
    (again,) = _run(until, condition + carry)
    return again if isinstance(again, NotRowLocal) else carry


def _scan(eqn: JaxprEqn, counterpart: JaxprEqn, inputs: list[Kind]) -> Kinds:
    scans = [scan_of(eqn), scan_of(counterpart)]
    first, count = scans[0].consts, scans[0].carry
    consts, carry = inputs[:first], inputs[first : first + count]
    scanned = inputs[first + count :]
    if any(isinstance(kind, RowWise) and kind.axis == 0 for kind in scanned):
        return not_row_local(eqn, "runs over rows in sequence")
    scanned = [_with_axes_moved(kind, -1) for kind in scanned]
    body = [scan.body for scan in scans]
    carry = _fixed_point(carry, lambda c: _run(body, consts + c + scanned)[:count])
    stacked = _run(body, consts + carry + scanned)[count:]
    return carry + [_with_axes_moved(kind, 1) for kind in stacked]


def _with_axes_moved(kind: Kind, by: int) -> Kind:
    """Return what is known of a slice along the first axis, or of the stack of such."""
    if isinstance(kind, RowWise):
        return kind.at(kind.axis + by, kind.off_support)
    if isinstance(kind, Replicated):
        return Replicated(frozenset(axis + by for axis in kind.uniform if axis + by >= 0))
    return kind


def _fixed_point(carry: list[Kind], step: Callable[[list[Kind]], list[Kind]]) -> list[Kind]:
    while True:
        following = joined(carry, step(carry))
        if following == carry:
            return carry
        carry = following


_CONTROL_FLOW: dict[str, Callable[[JaxprEqn, JaxprEqn, list[Kind]], Kinds]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}


# --- operations that are the same for two numbers of rows --------------------------------

# Parameters that say how large or where a result is, or hold what is read in pairs.
_PLACES = ("sharding", "out_sharding")
_NOT_COMPARED = {
    "broadcast_in_dim": ("shape",),
    "iota": ("shape",),
    "random_bits": ("shape",),
    "reshape": ("new_sizes",),
    "slice": ("limit_indices",),
    "cond": ("branches",),
    "scan": ("jaxpr",),
    "while": ("body_jaxpr", "cond_jaxpr"),
}


def _in_step(x: Jaxpr, y: Jaxpr) -> bool:
    """Decide whether two jaxprs have the same primitives in order, on as many operands."""

    def form(jaxpr: Jaxpr) -> tuple[object, ...]:
        each = [(e.primitive, len(e.invars), len(e.outvars)) for e in jaxpr.eqns]
        return each, len(jaxpr.constvars), len(jaxpr.invars), len(jaxpr.outvars)

    return form(x) == form(y)


def _same(x: object, y: object) -> bool:
    """Decide whether literals, constants or parameters of equations are known to be equal."""
    if x is y:
        return True
    if isinstance(x, jax.core.Tracer) or isinstance(y, jax.core.Tracer):
        return False
    if isinstance(x, Jaxpr | ClosedJaxpr):
        if type(x) is not type(y):
            return False
        return _same_program(*(inlined(ClosedJaxpr(*opened(z))) for z in (x, y)))
    if isinstance(x, tuple | list):
        return type(x) is type(y) and len(x) == len(y) and all(map(_same, x, y))
    if not hasattr(x, "__array__") and not isinstance(x, float):
        return type(x) is type(y) and bool(x == y)
    is_opaque = jax.dtypes.issubdtype(getattr(x, "dtype", float), jax.dtypes.extended)
    if np.shape(x) != np.shape(y) or is_opaque:
        return False
    x, y = map(np.asarray, jax.device_get((x, y)))
    return x.dtype == y.dtype and bool(np.all((x == y) | ((x != x) & (y != y))))


def _same_params(x: JaxprEqn, y: JaxprEqn) -> bool:
    if not (x.params or y.params):
        return True
    ignored = (*_PLACES, *_NOT_COMPARED.get(name_of(x), ()))
    params, others = compared(x), compared(y)
    if params.keys() != others.keys():
        return False
    return not [k for k, v in params.items() if k not in ignored and not _same(v, others[k])]


def _same_program(x: ClosedJaxpr, y: ClosedJaxpr) -> bool:
    """Decide whether two programs compute the same of the same operands, by their proof."""
    # What a program does to references and prints is not among its outputs.
    if x.effects or y.effects or (x.in_avals, x.out_avals) != (y.in_avals, y.out_avals):
        return False
    outputs, _ = classify(x, y, [Replicated()] * len(x.in_avals))
    return all(isinstance(kind, Replicated) for kind in outputs)
