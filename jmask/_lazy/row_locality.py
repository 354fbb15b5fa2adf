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

An operation without a rule in `lattice` is NotRowLocal: an unknown transformation is refused,
not run wrongly.
"""

import functools
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
    scan_of,
    what_is_unknown,
    while_of,
)
from jmask._base.jaxprs import inlined
from jmask._base.types import Atom
from jmask._lazy.lattice import (
    BY_POSITION,
    ELEMENTWISE,
    RULES,
    Kind,
    NotRowLocal,
    Replicated,
    RowLocal,
    RowWise,
    elementwise,
    joined,
    not_row_local,
)

_COUNTS = "depends on the number of rows"

Kinds = Kind | list[Kind]
"""One for each output of an equation, or one for all."""


def classify(
    dense: ClosedJaxpr, rows: ClosedJaxpr, inputs: Sequence[Kind]
) -> tuple[list[Kind], dict[Var, Kind]]:
    """Return the kinds of the outputs of an update, and of all variables of `rows`.

    Args:
        dense: the program on whole tables, with its calls in line.
        rows: the same update on some rows of them. Once both are proved, `rows` with itself
            gives the same kinds.
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
        return elementwise(name, eqn, known)
    if name not in ("broadcast_in_dim", "reshape", "squeeze") and any(
        map(_is_sized, known, eqn.invars, counterpart.invars)
    ):
        return not_row_local(eqn, _COUNTS)
    rule = RULES.get(name)
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
        return kind if axes <= kind.uniform else not_row_local(eqn, BY_POSITION)
    return kind if axes <= {kind.axis} else not_row_local(eqn, _COUNTS)


# --- control flow ------------------------------------------------------------------------


def _cond(eqn: JaxprEqn, counterpart: JaxprEqn, inputs: list[Kind]) -> Kinds:
    which, *operands = inputs
    if isinstance(which, NotRowLocal):
        return which
    branches, counterparts = branches_of(eqn), branches_of(counterpart)
    if len(branches) != len(counterparts):
        return not_row_local(eqn, _COUNTS)
    pairs = zip(branches, counterparts, strict=True)
    return functools.reduce(joined, (_run(pair, operands) for pair in pairs))


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
