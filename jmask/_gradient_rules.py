"""Rules of the gradient program for single equations: each is linear in its cotangents.

| equation                                       | becomes                              |
|------------------------------------------------|--------------------------------------|
| broadcast of 0.0 to an array                   | Rows with no parts                   |
| broadcast of another scalar                    | Filled                               |
| scatter-add, dynamic_update_slice, pad         | one more part, if a row pattern      |
| add_any, add                                   | the parts of both                    |
| sub, neg, mul and div by a scalar, conversions | on the rows                          |
| reshape that keeps dimension 0                 | on the rows                          |
| select by a scalar                             | rows of the other branch are padding |
| identities (copy, names, barriers, ...)        | itself                               |
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jmask._cotangents import Filled, Rows
from jmask._gradient_program import Interpreter, Rule, report_dense
from jmask._row_pattern import dynamic_update_rows, padded_rows, scatter_add_rows


def _zero_rows(eqn: JaxprEqn) -> Rows:
    aval = eqn.outvars[0].aval
    return Rows(aval.shape, aval.dtype)


def _bind(eqn: JaxprEqn, *inputs: Any) -> Any:
    return eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))


def _is_literal_zero(x: Any) -> bool:
    # Values that are traced or computed are never looked at.
    return isinstance(x, bool | int | float | np.generic | np.ndarray) and not np.any(x)


def _as_scalar(x: Any) -> Any | None:
    """The scalar that `x` is everywhere, if that is known without looking at values."""
    if isinstance(x, Filled):
        return x.value
    return x if not isinstance(x, Rows) and np.ndim(x) == 0 else None


# --- demand: which inputs may be symbolic ------------------------------------------------


def _all(eqn: JaxprEqn, *_: Any) -> list[bool]:
    return [True] * len(eqn.invars)


def _first(eqn: JaxprEqn, *_: Any) -> list[bool]:
    return [True] + [False] * (len(eqn.invars) - 1)


def _none(eqn: JaxprEqn, *_: Any) -> list[bool]:
    return [False] * len(eqn.invars)


def _matching(eqn: JaxprEqn, wanted: Sequence[bool], *_: Any) -> list[bool]:
    return list(wanted)


def _cases(eqn: JaxprEqn, *_: Any) -> list[bool]:
    by_scalar = eqn.invars[0].aval.shape == ()
    return [False] + [by_scalar] * (len(eqn.invars) - 1)


def _scaled(eqn: JaxprEqn, wanted: Any, _: Any, definitions: dict) -> list[bool]:
    """An operand of a product is wanted where the other one is a scalar."""

    def is_scalar(v: Any) -> bool:
        maker = definitions.get(v) if not isinstance(v, Literal) else None
        broadcast = maker is not None and maker.primitive.name == "broadcast_in_dim"
        return v.aval.shape == () or (
            broadcast and maker.invars[0].aval.shape == ()
        )

    scalar = [is_scalar(v) for v in eqn.invars]
    return [any(scalar)] * 2


# --- rules -------------------------------------------------------------------------------


def _broadcast(eqn, inputs, wanted, interpreter: Interpreter):
    (operand, *_) = inputs
    aval = eqn.outvars[0].aval
    if not aval.shape:
        return None
    if isinstance(operand, Rows):
        return _reshape(eqn, inputs, wanted, interpreter)
    if np.ndim(operand) != 0:
        return None
    if isinstance(eqn.invars[0], Literal) and _is_literal_zero(operand):
        return [_zero_rows(eqn)]
    return [Filled(aval.shape, jnp.asarray(operand, aval.dtype))]


def _scatter_add(eqn, inputs, wanted, interpreter: Interpreter):
    operand, indices, updates = inputs
    if not isinstance(operand, Rows):
        return None
    updates = interpreter.dense(updates, eqn)
    entries = scatter_add_rows(eqn, interpreter.dense(indices, eqn), updates)
    return None if entries is None else [operand.plus((entries,), looked_up=True)]


def _dynamic_update_slice(eqn, inputs, wanted, interpreter: Interpreter):
    operand, update, *starts = inputs
    # It overwrites, which is adding only where nothing was before.
    if not (isinstance(operand, Rows) and operand.is_zero):
        return None
    entries = dynamic_update_rows(eqn, interpreter.dense(update, eqn), starts)
    return None if entries is None else [operand.plus((entries,), looked_up=True)]


def _pad(eqn, inputs, wanted, interpreter: Interpreter):
    operand, padding = inputs
    if not _is_literal_zero(padding):
        return None
    entries = padded_rows(eqn, interpreter.dense(operand, eqn))
    return (
        None if entries is None else [_zero_rows(eqn).plus((entries,), looked_up=False)]
    )


def _add(eqn, inputs, wanted, interpreter: Interpreter):
    x, y = inputs
    if isinstance(y, Rows) and not isinstance(x, Rows):
        x, y = y, x
    if not isinstance(x, Rows):
        return None
    if isinstance(y, Rows):
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
    return x.map_rows(jnp.negative) if isinstance(x, Rows) else -x


def _subtract(eqn, inputs, wanted, interpreter: Interpreter):
    x, y = inputs
    if not isinstance(x, Rows) and not isinstance(y, Rows):
        return None
    y = _negated(interpreter.dense(y, eqn) if isinstance(y, Filled) else y)
    return _add(eqn, (x, y), wanted, interpreter)


def _on_rows(eqn, inputs, wanted, interpreter: Interpreter):
    (x,) = inputs
    return [x.map_rows(lambda rows: _bind(eqn, rows))] if isinstance(x, Rows) else None


def _convert(eqn, inputs, wanted, interpreter: Interpreter):
    (x,) = inputs
    dtype = eqn.params["new_dtype"]
    if isinstance(x, Filled):
        return [Filled(x.shape, x.value.astype(dtype))]
    if not isinstance(x, Rows):
        return None
    if x.dtype == dtype:
        return [x]
    x = x.map_rows(lambda rows: rows.astype(dtype))
    return [dataclasses.replace(x, dtype=dtype)]


def _multiply(eqn, inputs, wanted, interpreter: Interpreter):
    x, y = inputs
    if isinstance(y, Rows):
        x, y = y, x
    factor = _as_scalar(y)
    if not isinstance(x, Rows) or factor is None:
        return None
    return [x.map_rows(lambda rows: rows * jnp.asarray(factor, rows.dtype))]


def _divide(eqn, inputs, wanted, interpreter: Interpreter):
    x, y = inputs
    divisor = _as_scalar(y)
    if not isinstance(x, Rows) or divisor is None:
        return None
    return [x.map_rows(lambda rows: rows / jnp.asarray(divisor, rows.dtype))]


def _reshape(eqn, inputs, wanted, interpreter: Interpreter):
    (x, *_) = inputs
    shape = eqn.outvars[0].aval.shape
    if isinstance(x, Filled):
        return [Filled(shape, x.value)]
    if not isinstance(x, Rows) or x.carry is not None:
        return None
    if x.is_zero:
        return [_zero_rows(eqn)]
    same_size = np.prod(shape, dtype=int) == np.prod(x.shape, dtype=int)
    if not shape or shape[0] != x.shape[0] or not same_size:
        return None
    parts = tuple(
        (ids, rows.reshape((ids.shape[0], *shape[1:]))) for ids, rows in x.parts
    )
    return [dataclasses.replace(x, shape=shape, parts=parts)]


def _select(eqn, inputs, wanted, interpreter: Interpreter):
    which, *cases = inputs
    if np.ndim(which) != 0 or not all(isinstance(case, Rows) for case in cases):
        return None
    total = _zero_rows(eqn)
    for number, case in enumerate(cases):
        if case.carry is not None:
            return None
        chosen = jnp.asarray(which, jnp.int32) == number
        parts = tuple(
            (jnp.where(chosen, ids, case.shape[0]), rows) for ids, rows in case.parts
        )
        total = total.plus(parts, case.looked_up)
    return [total]


def _identity(eqn, inputs, wanted, interpreter: Interpreter):
    return list(inputs) if isinstance(inputs[0], Rows | Filled) else None


def _barrier(eqn, inputs, wanted, interpreter: Interpreter):
    """`optimization_barrier` on the arrays inside the symbolic values too."""
    if not any(isinstance(x, Rows | Filled) for x in inputs):
        return None
    arrays, rebuild = jax.tree.flatten([_components(x) for x in inputs])
    arrays = jax.tree.unflatten(rebuild, eqn.primitive.bind(*arrays))
    return [_rebuilt(x, new) for x, new in zip(inputs, arrays, strict=True)]


def _components(x: Any) -> Any:
    if isinstance(x, Rows):
        return x.parts
    return x.value if isinstance(x, Filled) else x


def _rebuilt(x: Any, arrays: Any) -> Any:
    if isinstance(x, Rows):
        return dataclasses.replace(x, parts=arrays)
    return dataclasses.replace(x, value=arrays) if isinstance(x, Filled) else arrays


_IDENTITIES = (
    "copy",
    "copy_p",
    "name",
    "sharding_constraint",
)

EQUATION_RULES: dict[str, Rule] = {
    "broadcast_in_dim": Rule(_first, _broadcast),
    "scatter-add": Rule(_first, _scatter_add),
    "dynamic_update_slice": Rule(_first, _dynamic_update_slice),
    "pad": Rule(_none, _pad),
    "add_any": Rule(_all, _add),
    "add": Rule(_all, _add),
    "sub": Rule(_all, _subtract),
    "neg": Rule(_all, _on_rows),
    "reduce_precision": Rule(_all, _on_rows),
    "convert_element_type": Rule(_all, _convert),
    "mul": Rule(_scaled, _multiply),
    "div": Rule(_scaled, _divide),
    "reshape": Rule(_first, _reshape),
    "squeeze": Rule(_first, _reshape),
    "expand_dims": Rule(_first, _reshape),
    "select_n": Rule(_cases, _select),
    "optimization_barrier": Rule(_matching, _barrier),
} | {name: Rule(_first, _identity) for name in _IDENTITIES}
