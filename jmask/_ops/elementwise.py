"""Elementwise functions on every storage, by one mechanism.

    elementwise(jnp.log)(x)         x masked:  log of the valid entries, masks kept
                                    x RowSparse: on the stored rows if log(0) were 0
                                    x array:   jnp.log(x)

**No nan under the mask.** A function is applied to `where(mask, x, safe)`: entries that do
not exist are replaced by a number at which the function and its derivatives are finite. So
no nan is computed, and the derivative of the selection sends exactly 0 to masked entries
whatever lies there, in forward and reverse mode and at every order. The number is found by
trying: the first candidate at which value, first and second derivative are finite.

**Masks** of operands intersect. An operand with sparse storage gives the result its
storage, and dense operands are sampled at the stored positions.

**Arguments by name** are operands as those by position: arrays and tensors are, while Python
numbers, flags and None are options, the same for every entry.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.fallback import report_fallback
from jmask._base.validation import refuse_scipy
from jmask._ops.zero_semantics import safe_numbers, varies, zero_semantics
from jmask._tensors.masked_tensor import MaskedTensor, common_shape, is_tensor, joined
from jmask._tensors.storage import (
    SPARSE,
    as_dense,
    is_sparse,
    same_positions,
    sampled,
    stored_values,
    stype,
    unique_positions,
    values_at,
    with_stored_values,
)


def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lift an elementwise JAX function to masked and sparse tensors.

    Args:
        function: takes one or more arrays that broadcast, by position or by name, and
            options; each entry of its result depends on that entry of the arrays alone.

    Returns:
        A function that takes `MaskedTensor`, `RowSparse`, BCOO, BCSR and arrays in place of
        arrays: masks intersect, plain operands broadcast, masked entries get no gradient.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([-1., 4.]), jnp.array([False, True]))
        >>> jmask.numpy.elementwise(lambda x: jnp.sqrt(x) + 1)(x)
        MaskedTensor([--, 3.0], dtype=float32)
    """

    @functools.wraps(function)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        for x in given:
            refuse_scipy("x", x)
        if any(isinstance(x, MaskedTensor) for x in given):
            return _masked(*_call(function, args, kwargs))
        if any(isinstance(x, SPARSE) for x in given):
            return zero_semantics(*_call(function, args, kwargs))
        return function(*args, **kwargs)

    return lifted


@dataclasses.dataclass(frozen=True)
class _Arranged:
    """A function of its operands alone; equal ones are equal, as caches need.

    Attributes:
        function: takes them among other arguments.
        places: for each operand the number or the name of the argument it is.
        count: of arguments by position. Those that are no operands are None.
    """

    function: Callable[..., Any]
    places: tuple[int | str, ...]
    count: int

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", "a function")

    def __call__(self, *operands: Any, **options: Any) -> Any:
        at = dict(zip(self.places, operands, strict=True))
        named = {name: at[name] for name in self.places if isinstance(name, str)}
        return self.function(*map(at.get, range(self.count)), **named, **options)


def _call(function: Callable, args: Sequence[Any], kwargs: dict) -> tuple:
    """A function of operands, the operands, and its options by name."""
    options = {name: x for name, x in kwargs.items() if not _is_operand(x)}
    operands: dict[int | str, Any] = {i: x for i, x in enumerate(args) if x is not None}
    operands |= {name: x for name, x in kwargs.items() if name not in options}
    if list(operands) == list(range(len(args))):
        return function, args, options
    return _Arranged(function, tuple(operands), len(args)), [*operands.values()], options


def _is_operand(x: Any) -> bool:
    """Whether an argument given by name may differ from entry to entry."""
    return isinstance(x, jax.Array | np.ndarray | list) or is_tensor(x)


# --- masked semantics --------------------------------------------------------------------


def _masked(function: Callable, operands: Sequence[Any], kwargs: dict) -> MaskedTensor:
    operands = [_as_operand(x) for x in operands]
    pattern = _pattern(operands)
    if pattern is None:
        operands = [_dense(x) for x in operands]
    else:
        operands = [_at_positions(x, pattern) for x in operands]
    # Operands made from one tensor share its mask, which is then not read twice.
    masks = {id(x.valid): x.valid for x in operands if isinstance(x, MaskedTensor)}
    valid = functools.reduce(operator.and_, masks.values())
    values = [x.storage if isinstance(x, MaskedTensor) else x for x in operands]
    kinds = tuple(x.dtype if varies(x) else x for x in values)
    safe = safe_numbers(function, kinds, kwargs)
    values = [
        jnp.where(valid, x, number) if varies(x) else x
        for x, number in zip(values, safe, strict=True)
    ]
    result = function(*values, **kwargs)
    shape = jnp.broadcast_shapes(result.shape, valid.shape)
    result, valid = jnp.broadcast_to(result, shape), jnp.broadcast_to(valid, shape)
    storage = result if pattern is None else with_stored_values(pattern, result)
    return joined(storage, valid)


def _as_operand(x: Any) -> Any:
    keep = isinstance(x, MaskedTensor | bool | int | float | complex) or is_sparse(x)
    return x if keep else jnp.asarray(x)


def _pattern(operands: Sequence[Any]) -> Any:
    """The sparse storage the result takes its positions from, or None for a dense one."""
    shape = common_shape([np.shape(x) for x in operands])
    for x in operands:
        if isinstance(x, MaskedTensor) and is_sparse(x.storage) and x.shape == shape:
            return x.storage
    return None


def _at_positions(x: Any, pattern: Any) -> Any:
    """The operand as (masked) values at the stored positions of `pattern`."""
    if not isinstance(x, MaskedTensor) and not is_sparse(x):
        return sampled(x, pattern) if jnp.ndim(x) else x
    storage = x.storage if isinstance(x, MaskedTensor) else unique_positions(x)
    if not is_sparse(storage):
        return joined(sampled(storage, pattern), sampled(x.valid, pattern))
    values = stored_values(storage)
    if same_positions(storage, pattern):
        return joined(values, x.valid) if isinstance(x, MaskedTensor) else values
    others = [x.valid] if isinstance(x, MaskedTensor) else []
    at_positions = values_at(storage, pattern, *others)
    if at_positions is not None:
        stored, values, *others = at_positions
        if others:
            return joined(values, others[0] & stored)
        # An ordinary tensor is zero where it stores nothing.
        return jnp.where(stored, values, jnp.zeros((), values.dtype))
    report_fallback(
        f"a {'masked ' * isinstance(x, MaskedTensor)}{stype(storage)} operand of shape "
        f"{tuple(x.shape)} became dense, at O(size) cost: its storage differs from that of "
        "the other operand"
    )
    if isinstance(x, MaskedTensor):
        return _at_positions(x.to_dense(), pattern)
    return sampled(as_dense(x), pattern)


def _dense(x: Any) -> Any:
    """The operand on dense storage, beside a dense or a larger one."""
    if isinstance(x, MaskedTensor) and is_sparse(x.storage):
        report_fallback(
            f"a masked {stype(x.storage)} operand of shape {x.shape} became dense, at O(size) "
            "cost: it was broadcast to a larger shape"
        )
        return x.to_dense()
    return as_dense(x) if is_sparse(x) else x
