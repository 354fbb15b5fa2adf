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
| reshape, broadcast, sum that keep dimension 0  | on the rows                          |
| select by a scalar                             | rows of the other branch are padding |
| identities (copy, names, barriers, ...)        | itself                               |
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jmask._autodiff.gathered_rows import remembered, rows_added
from jmask._autodiff.interpreter import (
    Flags,
    Interpreter,
    Outputs,
    Rule,
    Values,
    report_dense,
)
from jmask._autodiff.row_pattern import (
    dynamic_update_rows,
    padded_rows,
    scatter_add_rows,
    sparse_product_rows,
)
from jmask._autodiff.values import Filled, RowSum
from jmask._base.forms import aval_of, name_of, parameter
from jmask._base.precision import adds_when_cast


def _zero_rows(eqn: JaxprEqn) -> RowSum:
    aval = aval_of(eqn.outvars[0])
    return RowSum(aval.shape, aval.dtype)


def _bind(eqn: JaxprEqn, *inputs: Any) -> Any:
    return eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))


def _is_literal(x: Any) -> bool:
    # Values that are traced or computed are never looked at.
    return isinstance(x, bool | int | float | complex | np.generic | np.ndarray)


def _is_literal_zero(x: Any) -> bool:
    return _is_literal(x) and not np.any(x)


def _is_not_finite(x: Any) -> bool:
    """Whether a literal is infinite or nan: it makes nan of the zeros that are no rows."""
    return _is_literal(x) and not np.all(np.isfinite(x))


def _as_scalar(x: Any) -> Any | None:
    """The scalar that `x` is everywhere, if that is known without looking at values."""
    if isinstance(x, Filled):
        return x.value
    is_scalar = not isinstance(x, RowSum) and np.ndim(x) == 0
    return x if is_scalar and not _is_not_finite(x) else None


# --- demand: which inputs may be symbolic ------------------------------------------------


def _all(eqn: JaxprEqn, *_: Any) -> list[bool]:
    return [True] * len(eqn.invars)


def _first(eqn: JaxprEqn, *_: Any) -> list[bool]:
    return [True] + [False] * (len(eqn.invars) - 1)


def none_wanted(eqn: JaxprEqn, *_: Any) -> list[bool]:
    """Every input is to be an array."""
    return [False] * len(eqn.invars)


def same_wanted(eqn: JaxprEqn, wanted: Sequence[bool], *_: Any) -> list[bool]:
    """Input i is wanted where output i is."""
    return list(wanted)


def _keeping_rows(eqn: JaxprEqn, *_: Any) -> list[bool]:
    """A change of shape is followed where it keeps dimension 0."""
    old, new = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
    kept = bool(old) and bool(new) and old[0] == new[0]
    return [kept] + [False] * (len(eqn.invars) - 1)


def _summing_rows(eqn: JaxprEqn, *_: Any) -> list[bool]:
    return [0 not in parameter(eqn, "axes")]


def _cases(eqn: JaxprEqn, *_: Any) -> list[bool]:
    by_scalar = aval_of(eqn.invars[0]).shape == ()
    return [False] + [by_scalar] * (len(eqn.invars) - 1)


def _scaled(eqn: JaxprEqn, wanted: Any, _: Any, definitions: dict) -> list[bool]:
    """An operand of a product is wanted where the other one is a scalar."""

    def is_scalar(v: Any) -> bool:
        if aval_of(v).shape == ():
            return True
        maker = definitions.get(v)
        return (
            maker is not None
            and name_of(maker) == "broadcast_in_dim"
            and aval_of(maker.invars[0]).shape == ()
        )

    scalar = [is_scalar(v) for v in eqn.invars]
    return [any(scalar)] * 2


# --- rules -------------------------------------------------------------------------------


def _broadcast(
    eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter
) -> Outputs:
    (operand, *_) = inputs
    aval = aval_of(eqn.outvars[0])
    if not aval.shape:
        return None
    if isinstance(operand, RowSum):
        return _broadcast_rows(eqn, operand)
    if np.ndim(operand) != 0 or _is_not_finite(operand):
        return None
    if isinstance(eqn.invars[0], Literal) and _is_literal_zero(operand):
        return [_zero_rows(eqn)]
    return [Filled(aval.shape, jnp.asarray(operand, aval.dtype))]


def _broadcast_rows(eqn: JaxprEqn, x: RowSum) -> Outputs:
    shape, dimensions = aval_of(eqn.outvars[0]).shape, parameter(eqn, "broadcast_dimensions")
    if x.is_zero:
        return [_zero_rows(eqn)]
    if x.carry is not None or dimensions[0] != 0 or shape[0] != x.shape[0]:
        return None
    parts = tuple(
        (ids, lax.broadcast_in_dim(rows, (*ids.shape, *shape[1:]), dimensions))
        for ids, rows in x.parts
    )
    return [dataclasses.replace(x, shape=shape, parts=parts)]


def _scatter_add(
    eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter
) -> Outputs:
    operand, indices, updates = inputs
    if not isinstance(operand, RowSum):
        return None
    updates = interpreter.dense(updates, eqn)
    entries = scatter_add_rows(eqn, interpreter.dense(indices, eqn), updates)
    if entries is None:
        return None
    ids, rows = entries
    rows = remembered(rows, rows_added(eqn, updates))
    return [operand.plus(((ids, rows),), looked_up=True)]


def _dynamic_update_slice(
    eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter
) -> Outputs:
    operand, update, *starts = inputs
    # It overwrites, which is adding only where nothing was before.
    if not (isinstance(operand, RowSum) and operand.is_zero):
        return None
    entries = dynamic_update_rows(eqn, interpreter.dense(update, eqn), starts)
    return None if entries is None else [operand.plus((entries,), looked_up=True)]


def _pad(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    operand, padding = inputs
    if not _is_literal_zero(padding):
        return None
    entries = padded_rows(eqn, interpreter.dense(operand, eqn))
    return None if entries is None else [_zero_rows(eqn).plus((entries,), looked_up=False)]


def _sparse_product(
    eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter
) -> Outputs:
    entries = sparse_product_rows(eqn, *(interpreter.dense(x, eqn) for x in inputs))
    return None if entries is None else [_zero_rows(eqn).plus((entries,), looked_up=True)]


def _add(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    shape = aval_of(eqn.outvars[0]).shape
    x, y = (a.broadcast(shape) if isinstance(a, RowSum) else a for a in inputs)
    if isinstance(y, RowSum) and not isinstance(x, RowSum):
        x, y = y, x
    if not isinstance(x, RowSum) or y is None:
        return None
    if isinstance(y, RowSum):
        if x.carry is not None and y.carry is not None:
            return None
        carry = x.carry if y.carry is None else y.carry
        total = x.plus(y.parts, y.looked_up)
        return [dataclasses.replace(total, carry=carry)]
    if x.carry is not None:
        return None
    y = jnp.broadcast_to(interpreter.dense(y, eqn), x.shape)
    if x.looked_up:
        report_dense(x, eqn, "it is looked up and also used in a way that needs all of it")
    return [x.added_to(y)]


def _negated(x: Any) -> Any:
    return x.scaled(jnp.negative) if isinstance(x, RowSum) else -x


def _subtract(
    eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter
) -> Outputs:
    x, y = inputs
    if not isinstance(x, RowSum) and not isinstance(y, RowSum):
        return None
    y = _negated(interpreter.dense(y, eqn) if isinstance(y, Filled) else y)
    return _add(eqn, (x, y), wanted, interpreter)


def _negate(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    (x,) = inputs
    return [_negated(x)] if isinstance(x, RowSum) else None


def _on_sums(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    (x,) = inputs
    return [x.map_sums(lambda rows: _bind(eqn, rows))] if isinstance(x, RowSum) else None


def _convert(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    (x,) = inputs
    dtype = parameter(eqn, "new_dtype")
    if isinstance(x, Filled):
        return [Filled(x.shape, x.value.astype(dtype))]
    # Booleans do not add.
    if not isinstance(x, RowSum) or dtype == jnp.dtype(bool):
        return None
    if x.dtype == dtype:
        return [x]
    convert = x.map_rows if adds_when_cast(x.dtype, dtype) else x.map_sums
    x = convert(lambda rows: rows.astype(dtype))
    return [dataclasses.replace(x, dtype=dtype)]


def _multiply(
    eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter
) -> Outputs:
    x, y = inputs
    if isinstance(y, RowSum):
        x, y = y, x
    factor = _as_scalar(y)
    if not isinstance(x, RowSum) or factor is None:
        return None
    x = x.broadcast(aval_of(eqn.outvars[0]).shape)
    if x is None:
        return None
    return [x.scaled(lambda rows: rows * jnp.asarray(factor, rows.dtype))]


def _divide(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    x, y = inputs
    divisor = None if _is_literal_zero(y) else _as_scalar(y)
    # The quotient of integers is rounded: that of a sum is another.
    if not isinstance(x, RowSum) or divisor is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return None
    x = x.broadcast(aval_of(eqn.outvars[0]).shape)
    if x is None:
        return None
    return [x.scaled(lambda rows: rows / jnp.asarray(divisor, rows.dtype))]


def _reshape(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    (x, *_) = inputs
    shape = aval_of(eqn.outvars[0]).shape
    if isinstance(x, Filled):
        return [Filled(shape, x.value)]
    if not isinstance(x, RowSum) or x.carry is not None:
        return None
    if x.is_zero:
        return [_zero_rows(eqn)]
    same_size = np.prod(shape, dtype=int) == np.prod(x.shape, dtype=int)
    if not shape or shape[0] != x.shape[0] or not same_size:
        return None
    parts = tuple((ids, rows.reshape((ids.shape[0], *shape[1:]))) for ids, rows in x.parts)
    return [dataclasses.replace(x, shape=shape, parts=parts)]


def _sum(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    (x,) = inputs
    axes = parameter(eqn, "axes")
    if not isinstance(x, RowSum) or 0 in axes:
        return None
    shape = aval_of(eqn.outvars[0]).shape
    x = x.map_rows(lambda rows: rows.sum(axes))
    return [dataclasses.replace(x, shape=shape)]


def _select(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    which, *cases = inputs
    if np.ndim(which) != 0 or not all(isinstance(case, RowSum) for case in cases):
        return None
    total = _zero_rows(eqn)
    for number, case in enumerate(cases):
        if case.carry is not None:
            return None
        chosen = jnp.asarray(which, jnp.int32) == number
        parts = tuple((jnp.where(chosen, ids, case.shape[0]), rows) for ids, rows in case.parts)
        total = total.plus(parts, case.looked_up)
    return [total]


def _identity(
    eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter
) -> Outputs:
    return list(inputs) if isinstance(inputs[0], RowSum | Filled) else None


def _barrier(eqn: JaxprEqn, inputs: Values, wanted: Flags, interpreter: Interpreter) -> Outputs:
    """`optimization_barrier` on the arrays inside the symbolic values too."""
    if not any(isinstance(x, RowSum | Filled) for x in inputs):
        return None
    arrays, rebuild = jax.tree.flatten([_components(x) for x in inputs])
    arrays = jax.tree.unflatten(rebuild, eqn.primitive.bind(*arrays))
    return [_rebuilt(x, new) for x, new in zip(inputs, arrays, strict=True)]


def _components(x: Any) -> Any:
    if isinstance(x, RowSum):
        return x.parts
    return x.value if isinstance(x, Filled) else x


def _rebuilt(x: Any, arrays: Any) -> Any:
    if isinstance(x, RowSum):
        return dataclasses.replace(x, parts=arrays)
    return dataclasses.replace(x, value=arrays) if isinstance(x, Filled) else arrays


_IDENTITIES = (
    "copy",
    "copy_p",
    "name",
    "sharding_constraint",
)

EQUATION_RULES: dict[str, Rule] = {
    "broadcast_in_dim": Rule(_keeping_rows, _broadcast),
    "scatter-add": Rule(_first, _scatter_add),
    "dynamic_update_slice": Rule(_first, _dynamic_update_slice),
    "pad": Rule(none_wanted, _pad),
    "bcoo_dot_general": Rule(none_wanted, _sparse_product),
    "add_any": Rule(_all, _add),
    "add": Rule(_all, _add),
    "sub": Rule(_all, _subtract),
    "neg": Rule(_all, _negate),
    "reduce_precision": Rule(_all, _on_sums),
    "convert_element_type": Rule(_all, _convert),
    "mul": Rule(_scaled, _multiply),
    "div": Rule(_scaled, _divide),
    "reshape": Rule(_keeping_rows, _reshape),
    "squeeze": Rule(_keeping_rows, _reshape),
    "reduce_sum": Rule(_summing_rows, _sum),
    "select_n": Rule(_cases, _select),
    "optimization_barrier": Rule(same_wanted, _barrier),
} | {name: Rule(_first, _identity) for name in _IDENTITIES}
