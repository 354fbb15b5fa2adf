"""What equations make of views: views again, of what is moved and of what is computed.

    sin                          row i     the sine of row i
    sum along each row           row i     the sum of row i
    product with a matrix        row i     row i times the matrix

How what is moved is read is in `moves`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jmask._autodiff import moves
from jmask._autodiff.moves import Reading, Rule
from jmask._autodiff.views import (
    Plans,
    Positions,
    Reads,
    Valid,
    View,
    Where,
    varies_of,
    view_of_array,
)
from jmask._base.forms import aval_of, parameter
from jmask._base.jaxprs import ARITHMETIC, bound
from jmask._base.types import Shape, Value
from jmask._kernels import tuning


def entrywise(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading] | None:
    shape = tuple(aval_of(eqn.outvars[0]).shape)
    if not shape:
        return None
    # Operands are of the shape of the result, of size 1 in some dimensions, or scalars.
    operands = [_stretched(x, shape) if np.ndim(x) else x for x in xs]
    views = [x for x in operands if isinstance(x, View)]

    def plan(count: int, where: Where, plans: Plans) -> bool:
        return all(plans.read(x, count, where) for x in views)

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        rows = [reads.read(x, p, valid) if isinstance(x, View) else x for x in operands]
        return bound(eqn, rows)[0]

    return [(plan, read)]


def _stretched(x: Value, shape: Shape) -> View:
    """Return an operand as a view that is read at positions of the result."""
    x, key = x if isinstance(x, View) else view_of_array(x), object()
    if x.shape == shape:
        return x
    along = [n == 1 != size for n, size in zip(x.shape, shape, strict=True)]

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        first = [
            jnp.zeros_like(q) if one else q for q, one in zip(p.along, along, strict=False)
        ]
        return reads.read(x, p.moved(key, first), valid)

    return dataclasses.replace(x, plan=moves.at_other_positions(x, key), read=read)


def _reduce(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading]:
    """Reduce along dimensions after those that positions are along."""
    (x,), axes = xs, parameter(eqn, "axes")

    def plan(count: int, where: Where, plans: Plans) -> bool:
        return count <= min(axes, default=0) and plans.read(x, count, where)

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        shift = len(p.entries) - len(p.along)
        rows, how = reads.read(x, p, valid), eqn.primitive.get_bind_params(eqn.params)
        moved = how | {"axes": tuple(d + shift for d in axes)}
        return eqn.primitive.bind(rows, **moved)

    return [(plan, read)]


def _product(eqn: JaxprEqn, xs: Sequence[Value]) -> list[Reading] | None:
    """Multiply each row: `t @ w`, or sum stacked tables with weights, `w @ stack`."""
    (contracted, batch) = parameter(eqn, "dimension_numbers")
    which = 0 if isinstance(xs[0], View) else 1
    x, other = xs[which], xs[1 - which]
    free = [d for d in range(x.ndim) if d not in contracted[which]]
    others = np.ndim(other) - len(contracted[1 - which])
    if any(batch) or isinstance(other, View) or (which == 1 and others) or not free:
        return None
    rows_first = [*free, *contracted[which]]
    plan_rows, read_rows = moves.transposed(x, rows_first)
    how = {
        name: value
        for name, value in eqn.primitive.get_bind_params(eqn.params).items()
        if name != "dimension_numbers"
    }

    def plan(count: int, where: Where, plans: Plans) -> bool:
        return count <= len(free) and plan_rows(count, where, plans)

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        rows = read_rows(p, valid, reads)
        first = len(p.entries) + len(free) - len(p.along)
        of_rows = tuple(range(first, first + len(contracted[which])))
        numbers = (of_rows, tuple(contracted[1 - which])), ((), ())
        return eqn.primitive.bind(rows, other, dimension_numbers=numbers, **how)

    return [(plan, read)]


_OF_ENTRIES = (
    *(ARITHMETIC - {"stop_gradient"}),
    *"complex conj erf imag name real reduce_precision".split(),
)
_REDUCTIONS = "reduce_max reduce_min reduce_prod reduce_sum".split()
RULES: dict[str, Rule] = {
    **dict.fromkeys(_OF_ENTRIES, entrywise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "broadcast_in_dim": moves.broadcast_rule,
    "concatenate": moves.concatenate_rule,
    "dot_general": _product,
    "dynamic_slice": moves.dynamic_slice_rule,
    "expand_dims": moves.reshape_rule,
    "pad": moves.pad_rule,
    "reshape": moves.reshape_rule,
    "rev": moves.rev_rule,
    "slice": moves.slice_rule,
    "split": moves.split_rule,
    "squeeze": moves.reshape_rule,
    "stack": moves.stack_rule,
    "tile": moves.tile_rule,
    "transpose": moves.transpose_rule,
    "unstack": moves.unstack_rule,
}

COMPUTING = (entrywise, _reduce, _product)
"""The rules of equations that compute: few rows are looked up before, by themselves."""


def views_of(eqn: JaxprEqn, name: str, xs: Sequence[Value]) -> list[View] | None:
    """Return what an equation makes of views as views, if rows can be read of all of them."""
    rule = RULES.get(name)
    operands = [x for x in xs if isinstance(x, View)]
    # A view of what is used twice, again and again, would be of exponentially many equations.
    equations = 1 + sum(x.equations for x in operands)
    avals = [aval_of(v) for v in eqn.outvars]
    if rule is None or equations > tuning.VIEW_EQUATIONS or any(0 in x.shape for x in avals):
        return None
    readings = rule(eqn, xs)
    if readings is None:
        return None
    tables = frozenset[int]().union(*(x.tables for x in operands))

    def make(number: int, made: Callable[[View], jax.Array]) -> jax.Array:
        return bound(eqn, [made(x) if isinstance(x, View) else x for x in xs])[number]

    views = [
        View(
            tuple(aval.shape),
            aval.dtype,
            *reading,
            functools.partial(make, i),
            tables,
            equations,
            name == "dynamic_slice" or any(x.is_lookup for x in operands),
            varies_of(aval),
            transpose_of=moves.untransposed(eqn, xs[0]) if name == "transpose" else None,
        )
        for i, (aval, reading) in enumerate(zip(avals, readings, strict=True))
    ]
    return views if all(any(x.fits) for x in views) else None
