"""Proof that an update rule, run on the touched rows only, is exact on those rows.

`lazy(inner)` runs `inner.update` on the rows in the gradient. That equals the dense update
on these rows if nothing in it mixes rows, except through sums to which untouched rows
contribute nothing because their gradient is zero. This module decides it from the jaxpr of
the dense update, by following for each value

    Shared(uniform)     the same in both programs; does not vary along axes in `uniform`
    PerRow(axis, rest)  one slice per row along `axis`; in untouched rows it is the constant
                        `rest`, where that is known (0 for the gradient itself)
    Mixed(why)          may differ between the two programs

    g           PerRow(0, rest=0)
    g * g       PerRow(0, rest=0)
    sum(g * g)  Shared            untouched rows add 0: the global norm is exact
    p           PerRow(0, rest=?)
    sum(p * p)  Mixed             untouched rows count: LAMB's trust ratio is not row-local

Whatever has no rule here is Mixed, so an unknown transformation is refused, not run wrongly.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal


@dataclasses.dataclass(frozen=True)
class Shared:
    """A value both programs agree on.

    Attributes:
        uniform: axes along which it does not vary.
        constant: its scalar value if that is known while tracing, else None.
    """

    uniform: frozenset[int] = frozenset()
    constant: Any = None


@dataclasses.dataclass(frozen=True)
class PerRow:
    """A value with one slice for each row of a table.

    Attributes:
        table: which table the rows belong to.
        axis: the axis of the rows.
        rest: the scalar it is in every row the gradient does not touch, or None.
    """

    table: int
    axis: int
    rest: Any = None


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A value that may depend on rows the gradient does not touch."""

    why: str


Kind = Shared | PerRow | Mixed

ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1
    floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg
    nextafter not or pow real reduce_precision rem round rsqrt select_n sign sin sinh sqrt
    square stop_gradient sub tan tanh xor complex conj optimization_barrier name
    shift_left shift_right_arithmetic shift_right_logical population_count""".split()
)

# Reductions to which this value contributes nothing.
NEUTRAL = {
    "reduce_sum": 0,
    "reduce_or": False,
    "reduce_and": True,
    "reduce_prod": 1,
}
_IDEMPOTENT = ("reduce_or", "reduce_and", "reduce_max", "reduce_min")
_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "checkpoint",
)


def classify(program: ClosedJaxpr, inputs: Sequence[Kind]) -> list[Kind]:
    """The kinds of the outputs of a dense update program, from those of its inputs."""
    return _run(program.jaxpr, [Shared()] * len(program.consts), inputs)


def _run(jaxpr: Jaxpr, consts: Sequence[Kind], inputs: Sequence[Kind]) -> list[Kind]:
    kinds: dict[Any, Kind] = dict(zip(jaxpr.constvars, consts, strict=True))
    kinds.update(zip(jaxpr.invars, inputs, strict=True))

    def read(v: Any) -> Kind:
        if isinstance(v, Literal):
            return Shared(constant=v.val if np.ndim(v.val) == 0 else None)
        return kinds[v]

    for eqn in jaxpr.eqns:
        outputs = _equation(eqn, [read(v) for v in eqn.invars])
        kinds.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _equation(eqn: JaxprEqn, inputs: list[Kind]) -> list[Kind]:
    name = eqn.primitive.name
    if name in _CALLS:
        called = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
        return _run_closed(called, inputs)
    if name in _CONTROL_FLOW:
        return _CONTROL_FLOW[name](eqn, inputs)
    for kind in inputs:
        if isinstance(kind, Mixed):
            return [kind] * len(eqn.outvars)
    if name == "broadcast_in_dim":
        return [_broadcast(eqn, inputs[0])]
    if name in ELEMENTWISE:
        return [_elementwise(eqn, inputs)] * len(eqn.outvars)
    if all(isinstance(kind, Shared) for kind in inputs):
        return [Shared()] * len(eqn.outvars)
    rule = _ROW_RULES.get(name)
    if rule is not None:
        return [rule(eqn, inputs)]
    return [_mixed(eqn, "has no row-local form that jmask knows")] * len(eqn.outvars)


def _mixed(eqn: JaxprEqn, what: str) -> Mixed:
    place = source_info_util.summarize(eqn.source_info)
    return Mixed(f"`{eqn.primitive.name}` {what} (at {place})")


# --- elementwise operations --------------------------------------------------------------


def _elementwise(eqn: JaxprEqn, inputs: list[Kind]) -> Kind:
    rows = [kind for kind in inputs if isinstance(kind, PerRow)]
    ranks = [v.aval.ndim for v in eqn.invars]
    if not rows:
        shared = [k.uniform for k, r in zip(inputs, ranks, strict=True) if r]
        uniform = frozenset.intersection(*shared) if shared else frozenset()
        return Shared(uniform, _constant(eqn, inputs))
    table, axis = rows[0].table, rows[0].axis
    for kind, rank in zip(inputs, ranks, strict=True):
        if isinstance(kind, PerRow):
            if (kind.table, kind.axis) != (table, axis):
                return _mixed(eqn, "combines rows of two tables")
        elif rank and axis not in kind.uniform:
            return _mixed(eqn, "treats rows by their position (random or fixed numbers)")
    return PerRow(table, axis, _constant(eqn, inputs))


def _constant(eqn: JaxprEqn, inputs: list[Kind]) -> Any:
    """The scalar an elementwise equation gives in untouched rows, or None if unknown."""
    known = [k.rest if isinstance(k, PerRow) else k.constant for k in inputs]
    name = eqn.primitive.name
    if name == "select_n" and known[0] is not None:
        return known[1 + int(known[0])]
    if name == "select_n" and known[1] is not None:
        same = all(k is not None and k == known[1] for k in known[1:])
        return known[1] if same else None
    if None not in known:
        return _evaluated(eqn, known)
    # Zero wins over an unknown finite factor, as it does in the dense update.
    absorbing = {"mul": (0, 1), "and": (0, 1), "div": (0,)}.get(name, ())
    dtype = eqn.outvars[0].aval.dtype
    for position in absorbing:
        if known[position] is not None and not known[position]:
            return np.zeros((), dtype)
    return None


def _evaluated(eqn: JaxprEqn, scalars: list[Any]) -> Any:
    params = eqn.primitive.get_bind_params(eqn.params)
    with jax.ensure_compile_time_eval():
        operands = [
            np.asarray(x, v.aval.dtype)
            for x, v in zip(scalars, eqn.invars, strict=True)
        ]
        result = eqn.primitive.bind(*operands, **params)
        return np.asarray(result[0] if eqn.primitive.multiple_results else result)


# --- operations that move, keep or remove axes -------------------------------------------


def _broadcast(eqn: JaxprEqn, kind: Kind) -> Kind:
    dimensions = eqn.params["broadcast_dimensions"]
    operand, shape = eqn.invars[0].aval, eqn.params["shape"]
    if isinstance(kind, PerRow):
        return PerRow(kind.table, dimensions[kind.axis], kind.rest)
    assert isinstance(kind, Shared)
    varying = {
        dimensions[d]
        for d in range(operand.ndim)
        if d not in kind.uniform and operand.shape[d] == shape[dimensions[d]]
    }
    return Shared(frozenset(range(len(shape))) - varying, kind.constant)


def _reshape(eqn: JaxprEqn, inputs: list[Kind]) -> Kind:
    (kind, *_) = inputs
    assert isinstance(kind, PerRow)
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    before = int(np.prod(old[: kind.axis], dtype=int))
    for axis, size in enumerate(new):
        if size == old[kind.axis] and int(np.prod(new[:axis], dtype=int)) == before:
            return PerRow(kind.table, axis, kind.rest)
    return _mixed(eqn, "merges rows with other axes")


def _transpose(eqn: JaxprEqn, inputs: list[Kind]) -> Kind:
    (kind,) = inputs
    assert isinstance(kind, PerRow)
    axis = eqn.params["permutation"].index(kind.axis)
    return PerRow(kind.table, axis, kind.rest)


def _reduce(eqn: JaxprEqn, inputs: list[Kind]) -> Kind:
    (kind,) = inputs
    assert isinstance(kind, PerRow)
    name, axes = eqn.primitive.name, eqn.params["axes"]
    if kind.axis not in axes:
        axis = kind.axis - sum(a < kind.axis for a in axes)
        keeps = name in _IDEMPOTENT or (
            kind.rest is not None and kind.rest == NEUTRAL.get(name)
        )
        return PerRow(kind.table, axis, kind.rest if keeps else None)
    if name in NEUTRAL and kind.rest is not None and kind.rest == NEUTRAL[name]:
        return Shared()
    return _mixed(eqn, "combines rows, and rows outside the gradient would count in it")


def _dot(eqn: JaxprEqn, inputs: list[Kind]) -> Kind:
    (contract, batch) = eqn.params["dimension_numbers"]
    rows = [i for i, kind in enumerate(inputs) if isinstance(kind, PerRow)]
    axes = {i: inputs[i].axis for i in rows}  # type: ignore[union-attr]
    if any(axes[i] in batch[i] for i in rows):
        return _mixed(eqn, "batches over rows")
    if len(rows) == 2 and all(axes[i] in contract[i] for i in rows):
        aligned = contract[0].index(axes[0]) == contract[1].index(axes[1])
        zero = any(
            kind.rest is not None and not kind.rest
            for kind in inputs
            if isinstance(kind, PerRow)
        )
        same = inputs[0].table == inputs[1].table  # type: ignore[union-attr]
        if aligned and zero and same:
            return Shared()
        return _mixed(eqn, "sums over rows, and rows outside the gradient would count")
    if len(rows) == 2 or axes[rows[0]] in contract[rows[0]]:
        return _mixed(eqn, "combines rows with each other or with fixed numbers")
    (side,) = rows
    removed = set(contract[side]) | set(batch[side])
    free = [d for d in range(eqn.invars[side].aval.ndim) if d not in removed]
    position = free.index(axes[side]) + len(batch[0])
    if side == 1:
        lhs = eqn.invars[0].aval.ndim - len(contract[0]) - len(batch[0])
        position += lhs
    kind = inputs[side]
    assert isinstance(kind, PerRow)
    zero = kind.rest is not None and not kind.rest
    return PerRow(kind.table, position, kind.rest if zero else None)


_ROW_RULES: dict[str, Any] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "dot_general": _dot,
} | {
    name: _reduce
    for name in ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min")
    + ("reduce_or", "reduce_and")
}


# --- control flow ------------------------------------------------------------------------


def _run_closed(called: Any, inputs: Sequence[Kind]) -> list[Kind]:
    if isinstance(called, ClosedJaxpr):
        return _run(called.jaxpr, [Shared()] * len(called.consts), inputs)
    return _run(called, [], inputs)


def _join(x: Kind, y: Kind) -> Kind:
    """What is known of a value that is one of two."""
    if isinstance(x, Mixed) or isinstance(y, Mixed):
        return x if isinstance(x, Mixed) else y
    if isinstance(x, Shared) and isinstance(y, Shared):
        same = x.constant is not None and x.constant is y.constant
        return Shared(x.uniform & y.uniform, x.constant if same else None)
    if isinstance(x, PerRow) and isinstance(y, PerRow):
        if (x.table, x.axis) != (y.table, y.axis):
            return Mixed("control flow chooses between rows of two tables")
        same = x.rest is not None and y.rest is not None and x.rest == y.rest
        return PerRow(x.table, x.axis, x.rest if same else None)
    rows, shared = (x, y) if isinstance(x, PerRow) else (y, x)
    assert isinstance(rows, PerRow) and isinstance(shared, Shared)
    if rows.axis not in shared.uniform:
        return Mixed("control flow chooses between rows and fixed numbers")
    same = shared.constant is not None and rows.rest == shared.constant
    return PerRow(rows.table, rows.axis, rows.rest if same else None)


def _joined(xs: Sequence[Kind], ys: Sequence[Kind]) -> list[Kind]:
    return [_join(x, y) for x, y in zip(xs, ys, strict=True)]


def _cond(eqn: JaxprEqn, inputs: list[Kind]) -> list[Kind]:
    which, *operands = inputs
    if isinstance(which, Mixed):
        return [which] * len(eqn.outvars)
    first, *others = [
        _run_closed(branch, operands) for branch in eqn.params["branches"]
    ]
    for outputs in others:
        first = _joined(first, outputs)
    return first


def _while(eqn: JaxprEqn, inputs: list[Kind]) -> list[Kind]:
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition = inputs[:cond_consts]
    consts = inputs[cond_consts : cond_consts + body_consts]
    carry = inputs[cond_consts + body_consts :]
    carry = _fixed_point(carry, lambda c: _run_closed(eqn.params["body_jaxpr"], consts + c))
    (again,) = _run_closed(eqn.params["cond_jaxpr"], condition + carry)
    return [again] * len(carry) if isinstance(again, Mixed) else carry


def _scan(eqn: JaxprEqn, inputs: list[Kind]) -> list[Kind]:
    first, count = eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry = inputs[:first], inputs[first : first + count]
    scanned: list[Kind] = []
    for kind in inputs[first + count :]:
        if isinstance(kind, PerRow) and kind.axis == 0:
            kind = _mixed(eqn, "runs over rows in sequence")
            return [kind] * len(eqn.outvars)
        if isinstance(kind, PerRow):
            kind = PerRow(kind.table, kind.axis - 1, kind.rest)
        elif isinstance(kind, Shared):
            kind = Shared(frozenset(a - 1 for a in kind.uniform if a))
        scanned.append(kind)
    body = eqn.params["jaxpr"]
    carry = _fixed_point(
        carry, lambda c: _run_closed(body, consts + c + scanned)[:count]
    )
    stacked = []
    for kind in _run_closed(body, consts + carry + scanned)[count:]:
        if isinstance(kind, PerRow):
            kind = PerRow(kind.table, kind.axis + 1, kind.rest)
        elif isinstance(kind, Shared):
            kind = Shared(frozenset(a + 1 for a in kind.uniform))
        stacked.append(kind)
    return carry + stacked


def _fixed_point(carry: list[Kind], step: Any) -> list[Kind]:
    while True:
        following = _joined(carry, step(carry))
        if following == carry:
            return carry
        carry = following


_CONTROL_FLOW: dict[str, Any] = {"cond": _cond, "while": _while, "scan": _scan}


def same_arithmetic(x: Jaxpr, y: Jaxpr) -> str | None:
    """Why two programs differ in more than array sizes, or None if they do not.

    A mean over the table divides by its number of rows, which the program for a few rows
    gets wrong; it shows as a number that differs between the two.
    """
    if [e.primitive for e in x.eqns] != [e.primitive for e in y.eqns]:
        return "chooses other operations for tables of another size"
    for left, right in zip(x.eqns, y.eqns, strict=True):
        for a, b in zip(left.invars, right.invars, strict=True):
            literal = isinstance(a, Literal), isinstance(b, Literal)
            if literal == (True, True) and not _same_number(a.val, b.val):
                why = _mixed(left, f"computes with {b.val} for the number of rows")
                return why.why
        for inner, other in zip(_inner(left), _inner(right), strict=True):
            why_inner = same_arithmetic(inner, other)
            if why_inner is not None:
                return why_inner
    return None


def _same_number(x: Any, y: Any) -> bool:
    return bool(np.all((x == y) | ((x != x) & (y != y))))


def _inner(eqn: JaxprEqn) -> list[Jaxpr]:
    found = []
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found
