"""Rules of the gradient program for single equations.

What a rule does to rows is linear in them, or it is done to their sums: equal ids are summed
before a number is made an integer. Operands of size 1 along a dimension of the rows are
broadcast; along dimension 0 they are not rows of the result, and it is dense.

| equation                                       | becomes                              |
|------------------------------------------------|--------------------------------------|
| broadcast of 0.0 to an array                   | RowSum with no parts                   |
| broadcast of another scalar                    | Filled                               |
| scatter-add, dynamic_update_slice, pad,        | one more part, if a row pattern      |
| product of a sparse matrix                     |                                      |
| add_any, add                                   | the parts of both                    |
| sub, neg, mul and div by a scalar, conversions | on the rows                          |
| among floating types                           |                                      |
| conversions to integers, reduce_precision      | on the sums of equal rows            |
| reshape, pad, slice, split, concatenate, stack,| the rows of the result: see          |
| transpose, rev, broadcast, sum along rows      | `row_pattern`                        |
| select by a scalar                             | rows of the other branch are padding |
| identities (copy, names, barriers, ...)        | itself                               |
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jmask._autodiff import row_pattern
from jmask._autodiff.gathered_rows import rows_added
from jmask._autodiff.interpreter import (
    Flags,
    Interpreter,
    Outputs,
    Rule,
    Values,
    made_dense,
    report_dense,
)
from jmask._autodiff.values import (
    Filled,
    RowSum,
    as_scalar,
    dense,
    is_literal_zero,
    is_not_finite,
    is_symbolic,
)
from jmask._base.array_types import adds_when_cast
from jmask._base.forms import aval_of, name_of, parameter
from jmask._base.jaxprs import bound
from jmask._base.types import Atom, Value
from jmask._kernels import sharded_rows
from jmask._kernels.gathered_rows import GATHERED


def _zero_rows(eqn: JaxprEqn) -> RowSum:
    aval = aval_of(eqn.outvars[0])
    return RowSum(aval.shape, aval.dtype)


# --- demand: which inputs may be symbolic ------------------------------------------------


def _inputs(count: float) -> Callable[[JaxprEqn, Flags, Interpreter, object], list[bool]]:
    """Want the first `count` inputs, as far as there are any; all others are to be arrays."""
    return lambda eqn, *_: [i < count for i in range(len(eqn.invars))]


none_wanted, _first, _first_two, _all = map(_inputs, (0, 1, 2, math.inf))


def same_wanted(eqn: JaxprEqn, wanted: Sequence[bool], *_: object) -> list[bool]:
    """Want input i where output i is wanted."""
    return list(wanted)


def _first_wanted(eqn: JaxprEqn, *_: object) -> list[bool]:
    """Want the operand of a change of shape: if it keeps no rows, it is dense, and said."""
    is_array = bool(aval_of(eqn.invars[0]).shape) and bool(aval_of(eqn.outvars[0]).shape)
    return [is_array] + [False] * (len(eqn.invars) - 1)


def _summing_rows(eqn: JaxprEqn, *_: object) -> list[bool]:
    """Want no sum over rows, as of the cotangent of logits: it is no gradient of a table."""
    shape, axes = aval_of(eqn.invars[0]).shape, parameter(eqn, "axes")
    return [0 not in axes or all(shape[d] == 1 for d in axes)]


def _cases(eqn: JaxprEqn, *_: object) -> list[bool]:
    by_scalar = aval_of(eqn.invars[0]).shape == ()
    return [False] + [by_scalar] * (len(eqn.invars) - 1)


def _scaled(
    eqn: JaxprEqn, wanted: Flags, _: object, definitions: dict[Var, JaxprEqn]
) -> list[bool]:
    """Want an operand of a product where the other one is a scalar."""

    def is_scalar(v: Atom) -> bool:
        if aval_of(v).shape == ():
            return True
        maker = None if isinstance(v, Literal) else definitions.get(v)
        return (
            maker is not None
            and name_of(maker) == "broadcast_in_dim"
            and aval_of(maker.invars[0]).shape == ()
        )

    scalar = [is_scalar(v) for v in eqn.invars]
    return [any(scalar)] * 2


# --- rules -------------------------------------------------------------------------------


# Every rule must be linear in its symbolic inputs: a sum of rows stands for the dense array
# that they add up to, and f(a + b) = f(a) + f(b) lets a rule work on each part by itself. A
# rule that returns None is never wrong: the equation then runs on dense arrays.


def _on_rows(
    function: Callable[[JaxprEqn, RowSum], Outputs], *, moves: bool = False
) -> Callable[[JaxprEqn, Values, Flags, Interpreter], Outputs]:
    """Return the rule of an equation on one operand, which declines all but rows.

    An equation that `moves` rows cannot move the carry of a scan along.
    """

    def apply(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
        x = inputs[0]
        is_taken = _is_movable(x) if moves else isinstance(x, RowSum)
        return function(eqn, x) if is_taken else None

    return apply


def _is_movable(x: Value) -> bool:
    return isinstance(x, RowSum) and x.carry is None and not x.width


def _broadcast(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    x, aval = inputs[0], aval_of(eqn.outvars[0])
    if not aval.shape:
        return None
    if isinstance(x, RowSum):
        if x.is_zero:
            return _zero_rows(eqn)
        if math.prod(aval.shape) == math.prod(x.shape):
            return row_pattern.reshaped(x, aval.shape) if _is_movable(x) else None
        return x.broadcast(aval.shape, parameter(eqn, "broadcast_dimensions"))
    if isinstance(x, Filled):
        return Filled(aval.shape, x.value)
    if np.ndim(x) != 0 or is_not_finite(x):
        return None
    if isinstance(eqn.invars[0], Literal) and is_literal_zero(x):
        return _zero_rows(eqn)
    return Filled(aval.shape, jnp.asarray(x, aval.dtype))


def _scatter_add(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    operand, indices, updates = inputs
    if not isinstance(operand, RowSum):
        return None
    # The transpose of `gather`: this is where the gradient of a lookup becomes rows.
    updates = made_dense(updates, eqn)
    rows = row_pattern.scatter_add_rows(eqn, made_dense(indices, eqn), updates)
    if rows is None:
        return None
    known = rows_added(eqn, updates)
    if known is not None:
        GATHERED.note(rows.parts[0][1], known)
    return operand.plus(rows)


def _add_on_shards(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    ids, rows = (made_dense(x, eqn) for x in inputs)
    table = aval_of(eqn.outvars[0])
    ids, rows = sharded_rows.flat(ids, rows, len(table.shape) - 1)
    return RowSum(tuple(table.shape), table.dtype, ((ids, rows),), looked_up=True)


def _dynamic_update_slice(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    operand, update, *starts = inputs
    # It overwrites, which is adding only where nothing was before.
    if not (isinstance(operand, RowSum) and operand.is_zero):
        return None
    if isinstance(update, RowSum):
        return None if update.carry else row_pattern.placed_at(update, starts, operand.shape)
    along = {d: jnp.asarray(start) for d, start in enumerate(starts)}
    shape, update = operand.shape, made_dense(update, eqn)
    rows = row_pattern.window_rows(shape, update, update.shape, along, clips=True)
    return None if rows is None else operand.plus(rows)


def _pad(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    operand, padding = inputs
    if not is_literal_zero(padding):
        return None
    config = parameter(eqn, "padding_config")
    if isinstance(operand, RowSum):
        shape = aval_of(eqn.outvars[0]).shape
        return None if operand.carry else row_pattern.padded(operand, config, shape)
    if any(low < 0 or high < 0 for low, high, _ in config):
        return None
    return row_pattern.padded_rows(eqn, made_dense(operand, eqn))


def _reshape(eqn: JaxprEqn, x: RowSum) -> RowSum | None:
    return row_pattern.reshaped(x, aval_of(eqn.outvars[0]).shape)


def _slice(eqn: JaxprEqn, x: RowSum) -> RowSum:
    starts = parameter(eqn, "start_indices")
    strides = parameter(eqn, "strides") or (1,) * len(starts)
    return row_pattern.sliced(x, starts, aval_of(eqn.outvars[0]).shape, strides)


def _split(eqn: JaxprEqn, x: RowSum) -> Outputs:
    """Return the pieces of a `split`, or of an `unstack`: without the axis that has size 1."""
    axis, start, pieces = parameter(eqn, "axis"), [0] * len(x.shape), []
    for v in eqn.outvars:
        shape = aval_of(v).shape
        size = shape if len(shape) == len(x.shape) else (*shape[:axis], 1, *shape[axis:])
        piece = row_pattern.sliced(x, tuple(start), size, (1,) * len(size))
        pieces.append(row_pattern.reshaped(piece, shape))
        start[axis] += size[axis]
    return None if None in pieces else pieces


def _concatenate(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    return _joined(eqn, inputs, parameter(eqn, "dimension"))


def _stack(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    axis, shape = parameter(eqn, "axis"), aval_of(eqn.outvars[0]).shape
    one = (*shape[:axis], 1, *shape[axis + 1 :])
    with_axis = [row_pattern.reshaped(x, one) if _is_movable(x) else None for x in inputs]
    return _joined(eqn, with_axis, axis)


def _joined(eqn: JaxprEqn, inputs: Values, axis: int) -> Outputs:
    # The transpose of a split: each part is the cotangent of one piece of the table.
    if not all(map(_is_movable, inputs)):
        return None
    total, begin = _zero_rows(eqn), 0
    for x in inputs:
        end = begin + x.shape[axis]
        config = [(0, 0, 0)] * len(x.shape)
        config[axis] = (begin, total.shape[axis] - end, 0)
        total, begin = total.plus(row_pattern.padded(x, config, total.shape)), end
    # Pieces with fixed bounds alone are better concatenated as arrays, unless they are few.
    return total if total.is_zero or total.is_rows else None


def _sparse_product(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    return row_pattern.sparse_product_rows(eqn, *(made_dense(x, eqn) for x in inputs))


def _add(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    shape = aval_of(eqn.outvars[0]).shape
    every = range(len(shape))
    x, y = (a.broadcast(shape, every) if isinstance(a, RowSum) else a for a in inputs)
    if isinstance(y, RowSum) and not isinstance(x, RowSum):
        x, y = y, x
    if not isinstance(x, RowSum) or y is None:
        return None
    if isinstance(y, RowSum) and x.looked_up != y.looked_up:
        x, y = (x, y) if x.looked_up else (y, x)
        if y.carry is None and y.covers(0.5):  # `table[1:]` is a use of the whole table
            y = dense(y)
    if isinstance(y, RowSum):
        if x.carry is not None and y.carry is not None:
            return None
        return dataclasses.replace(x.plus(y), carry=x.carry or y.carry)
    # A sum of rows and an array is dense: here the gradient of a tied table becomes so.
    if x.carry is not None:
        return None
    y = jnp.broadcast_to(made_dense(y, eqn), x.shape)
    if x.looked_up:
        report_dense(x, eqn, "it is looked up and also used in a way that needs all of it")
    return x.added_to(y)


def _subtract(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    x, y = (dense(a) if isinstance(a, Filled) else a for a in inputs)
    if not isinstance(x, RowSum) and not isinstance(y, RowSum):
        return None
    y = y.scaled(jnp.negative) if isinstance(y, RowSum) else -y
    return _add(eqn, (x, y))


def _convert(eqn: JaxprEqn, x: RowSum) -> RowSum | None:
    dtype = parameter(eqn, "new_dtype")
    if dtype == jnp.dtype(bool):  # booleans do not add
        return None
    if x.dtype == dtype:
        return x
    convert = x.map_rows if adds_when_cast(x.dtype, dtype) else x.map_sums
    old, new = (jnp.issubdtype(d, jnp.complexfloating) for d in (x.dtype, dtype))
    if old and not new:
        return convert(lambda rows: rows.real.astype(dtype), dtype=dtype)
    return convert(lambda rows: rows.astype(dtype), dtype=dtype)


def _component(eqn: JaxprEqn, x: RowSum) -> RowSum:
    """Take the real or the imaginary part of rows, or their conjugates."""
    dtype = aval_of(eqn.outvars[0]).dtype
    return x.map_rows(lambda rows: bound(eqn, [rows])[0], dtype=dtype)


def _complex(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    """Return rows as the real part, or as the imaginary one, of rows that are complex."""
    x, y = inputs
    total = _zero_rows(eqn)
    if not all(_is_movable(a) or is_literal_zero(a) for a in inputs):
        return None
    if isinstance(x, RowSum):
        real = x.map_rows(lambda a: lax.complex(a, jnp.zeros_like(a)), dtype=total.dtype)
        total = total.plus(real)
    if isinstance(y, RowSum):
        imaginary = y.map_rows(lambda a: lax.complex(jnp.zeros_like(a), a), dtype=total.dtype)
        total = total.plus(imaginary)
    return total


def _times(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    """Multiply rows by a scalar, or divide them."""
    x, y = inputs
    result, is_quotient = aval_of(eqn.outvars[0]), name_of(eqn) == "div"
    # Quotients of integers are rounded: a sum of quotients is not the quotient of the sum.
    if is_quotient and (is_literal_zero(y) or not jnp.issubdtype(result.dtype, jnp.inexact)):
        return None
    if isinstance(y, RowSum) and not is_quotient:
        x, y = y, x
    number = as_scalar(y)
    if not isinstance(x, RowSum) or number is None:
        return None
    x = x.broadcast(result.shape, range(len(result.shape)))
    operation = jnp.true_divide if is_quotient else jnp.multiply
    if x is None:
        return None
    return x.scaled(lambda rows: operation(rows, jnp.asarray(number, rows.dtype)))


def _sum(eqn: JaxprEqn, x: RowSum) -> RowSum | None:
    axes, shape = parameter(eqn, "axes"), aval_of(eqn.outvars[0]).shape
    if not shape:
        return None
    if all(x.shape[d] == 1 for d in axes):
        return None if x.carry else row_pattern.reshaped(x, shape)
    if min(axes) < x.leading:
        return None
    along_rows = [d - x.leading + 1 for d in axes]
    return x.map_rows(lambda rows: rows.sum(along_rows), shape=shape)


def _select(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    which, *cases = inputs
    if np.ndim(which) != 0 or not all(isinstance(case, RowSum) for case in cases):
        return None
    total = _zero_rows(eqn)
    for number, case in enumerate(cases):
        if case.carry is not None:
            return None
        chosen = jnp.asarray(which, jnp.int32) == number
        few = case.in_few_parts().parts
        parts = tuple((jnp.where(chosen, ids, case.count), rows) for ids, rows in few)
        total = total.plus(dataclasses.replace(case, parts=parts))
    return total


def _identity(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    return inputs[0] if is_symbolic(inputs[0]) else None


def _barrier(eqn: JaxprEqn, inputs: Values, *_: object) -> Outputs:
    """Apply `optimization_barrier` to the arrays inside symbolic values too."""
    if not any(map(is_symbolic, inputs)):
        return None
    arrays, structure = jax.tree.flatten(list(inputs))
    return jax.tree.unflatten(structure, eqn.primitive.bind(*arrays))


EQUATION_RULES: dict[str, Rule] = (
    {
        "broadcast_in_dim": Rule(_first_wanted, _broadcast),
        "scatter-add": Rule(_first, _scatter_add),
        sharded_rows.ADD.name: Rule(none_wanted, _add_on_shards),
        "dynamic_update_slice": Rule(_first_two, _dynamic_update_slice),
        "pad": Rule(_first, _pad),
        "bcoo_dot_general": Rule(none_wanted, _sparse_product),
        "add_any": Rule(_all, _add),
        "add": Rule(_all, _add),
        "sub": Rule(_all, _subtract),
        "neg": Rule(_all, _on_rows(lambda _, x: x.scaled(jnp.negative))),
        "reduce_precision": Rule(
            _all, _on_rows(lambda eqn, x: x.map_sums(lambda rows: bound(eqn, [rows])[0]))
        ),
        "convert_element_type": Rule(_all, _on_rows(_convert)),
        "complex": Rule(_all, _complex),
        "mul": Rule(_scaled, _times),
        "div": Rule(_scaled, _times),
        "reshape": Rule(_first_wanted, _on_rows(_reshape, moves=True)),
        "squeeze": Rule(_first_wanted, _on_rows(_reshape, moves=True)),
        "reduce_sum": Rule(_summing_rows, _on_rows(_sum)),
        "slice": Rule(_first_wanted, _on_rows(_slice, moves=True)),
        "split": Rule(_first_wanted, _on_rows(_split, moves=True)),
        "unstack": Rule(_first_wanted, _on_rows(_split, moves=True)),
        "concatenate": Rule(_all, _concatenate),
        "stack": Rule(_all, _stack),
        "transpose": Rule(_first_wanted, _on_rows(row_pattern.transposed, moves=True)),
        "rev": Rule(_first_wanted, _on_rows(row_pattern.flipped, moves=True)),
        "select_n": Rule(_cases, _select),
        "optimization_barrier": Rule(same_wanted, _barrier),
    }
    | {name: Rule(_all, _on_rows(_component)) for name in ("real", "imag", "conj")}
    | {
        name: Rule(_first, _identity)
        for name in ("copy", "copy_p", "name", "sharding_constraint")
    }
)
