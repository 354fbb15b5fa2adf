"""Masks made of conditions: entries are masked, filled or chosen where a condition is true.

    masked_where(x < 0, x)     x = [1, -2, 3]     [1, --, 3]
    masked_less(x, 0)                             the same
    masked_fill(x, x < 0, 7)                      [1,  7, 3]
    select([x < 0], [-x], x)                      [1,  2, 3]

The functions of one condition have the names of `numpy.ma`; the table below is the whole of
them. The storage of a tensor stays: what it does not store is masked already.
"""

import inspect
from collections.abc import Sequence
from typing import TypeVar, cast

import jax.numpy as jnp

from jmask._base.types import Argument, Function, Mask, Scalar, Tensor, TensorLike
from jmask._ops.elementwise import elementwise
from jmask._ops.reductions import named
from jmask._ops.shape import became_dense, broadcast_to
from jmask._ops.shape import where as where_
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    as_masked_tensor,
    as_tensor,
    is_tensor,
    joined,
    read_at,
)
from jmask._tensors.storage import is_sparse

_Condition = TypeVar("_Condition", bound=Function)


def masked_where(condition: Mask, x: TensorLike) -> MaskedTensor:
    """Mask the entries of `x` where `condition` is True, or itself masked.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([1., -1., 2.])
        >>> jmask.numpy.masked_where(x < 0, x)
        MaskedTensor([1.0, --, 2.0], dtype=float32)
    """
    x, condition = as_masked_tensor(x), as_tensor(condition)
    if not is_sparse(x.storage):
        shape = jnp.broadcast_shapes(x.shape, condition.shape)
        x = broadcast_to(x, shape)
    message = became_dense(condition, "masked_where")
    holds, exists = read_at(condition, x.storage, message)
    return joined(x.storage, x.valid & exists & ~holds.astype(bool))


def _masks(name: str, which: str, condition: _Condition, example: str) -> _Condition:
    """Return the function of `numpy.ma` that masks the entries for which a condition holds.

    Args:
        which: entries those are, after "that".
        condition: elementwise, of `x` and the other arguments of the function.
        example: of entries, the other arguments, and the result.
    """
    holds = elementwise(condition)

    def masked(x: TensorLike, *args: Argument, **kwargs: Argument) -> MaskedTensor:
        x = as_masked_tensor(x)
        return masked_where(holds(x, *args, **kwargs), x)

    vars(masked)["__signature__"] = inspect.signature(condition)
    text = f"""Mask the entries of `x` that {which}, as `numpy.ma.{name}`.

    `x` is a `MaskedTensor` on any storage, whose masked entries stay so, a sparse tensor, of
    which entries that are not stored are masked, or an array. Other arguments broadcast to it.
    """
    arguments, entries = example.split(" -> ")
    example = (
        f"jnp.array([1., 2., jnp.inf]){arguments} -> MaskedTensor({entries}, dtype=float32)"
    )
    return named(cast(_Condition, masked), name, text, example)


def _is_inside(x: TensorLike, v1: TensorLike, v2: TensorLike) -> Tensor:
    return (x >= jnp.minimum(v1, v2)) & (x <= jnp.maximum(v1, v2))


def _is_outside(x: TensorLike, v1: TensorLike, v2: TensorLike) -> Tensor:
    return (x < jnp.minimum(v1, v2)) | (x > jnp.maximum(v1, v2))


def _is_close(
    x: TensorLike, value: TensorLike, rtol: Scalar = 1e-5, atol: Scalar = 1e-8
) -> Tensor:
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        return x == value
    return jnp.isclose(x, value, rtol, atol)


masked_equal = _masks(
    "masked_equal", "equal `value`", lambda x, value: x == value, ", 2 -> [1.0, --, inf]"
)
masked_not_equal = _masks(
    "masked_not_equal",
    "differ from `value`",
    lambda x, value: x != value,
    ", 2 -> [--, 2.0, --]",
)
masked_greater = _masks(
    "masked_greater", "exceed `value`", lambda x, value: x > value, ", 1 -> [1.0, --, --]"
)
masked_greater_equal = _masks(
    "masked_greater_equal",
    "are `value` or greater",
    lambda x, value: x >= value,
    ", 2 -> [1.0, --, --]",
)
masked_less = _masks(
    "masked_less", "are less than `value`", lambda x, value: x < value, ", 2 -> [--, 2.0, inf]"
)
masked_less_equal = _masks(
    "masked_less_equal",
    "are `value` or less",
    lambda x, value: x <= value,
    ", 2 -> [--, --, inf]",
)
masked_inside = _masks(
    "masked_inside", "lie from `v1` to `v2`", _is_inside, ", 2, 3 -> [1.0, --, inf]"
)
masked_outside = _masks(
    "masked_outside", "lie outside `v1` to `v2`", _is_outside, ", 2, 3 -> [--, 2.0, --]"
)
masked_values = _masks(
    "masked_values", "are close to `value`", _is_close, ", 2.000001 -> [1.0, --, inf]"
)
masked_invalid = _masks(
    "masked_invalid", "are nan or infinite", lambda x: ~jnp.isfinite(x), " -> [1.0, 2.0, --]"
)


def masked_fill(x: TensorLike, where: Mask, value: TensorLike) -> Tensor:
    """Set the entries of `x` where `where` is True to `value`, which is valid.

    Args:
        x: a masked tensor or an array.
        where: boolean, broadcasts with `x`; the result is masked where it is.
        value: cast to the dtype of `x`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., 2.]), jnp.array([True, False]))
        >>> jmask.numpy.masked_fill(x, jnp.array([False, True]), 7)
        MaskedTensor([1.0, 7.0], dtype=float32)
    """
    dtype = x.dtype if is_tensor(x) else jnp.result_type(x)
    if isinstance(value, MaskedTensor):
        return where_(where, value.astype(dtype), x)
    return where_(where, jnp.asarray(value, dtype), x)


def select(
    condlist: Sequence[Mask], choicelist: Sequence[TensorLike], default: TensorLike = 0
) -> Tensor:
    """Return the entry of the first choice whose condition is True, as `jax.numpy.select`.

    Args:
        condlist: booleans, masked or not. The result is masked where a condition is, before
            which none is True.
        choicelist: masked tensors and arrays, one for each condition.
        default: taken where no condition is True.

    Raises:
        ValueError: if there are not as many choices as conditions, or none.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., -2., 3.]), jnp.array([True, True, False]))
        >>> jmask.numpy.select([x < 0, x > 2], [-x, 2.])
        MaskedTensor([0.0, 2.0, --], dtype=float32)
    """
    if len(condlist) != len(choicelist) or not condlist:
        raise ValueError(
            f"`condlist` of length {len(condlist)} and `choicelist` of length "
            f"{len(choicelist)} must have one length, at least 1."
        )
    if not any(map(is_tensor, (*condlist, *choicelist, default))):
        return jnp.select(condlist, choicelist, default)
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        default = where_(condition, choice, default)
    return default
