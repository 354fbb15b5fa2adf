"""Shapes and selection, with the names of `jax.numpy`: data and mask move together.

    x                  [[1, --],       reshape(x, 4)         [1, --, 3, 4]
                        [3,  4]]       sort(x)               [[1, --], [3, 4]]
                                       triu(x)               [[1, --], [0, 4]]
    where(x > 2, x, 0)                 [[0, --], [3, 4]]     masked where the condition is
    take(x, [0, 9], axis=0)            [[1, --], [--, --]]   masked where there is no entry

Plain arrays are passed on to `jax.numpy`. The table of functions that only move entries is
the whole of them; what follows are the functions that also look at masks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.validation import abstract_leaf
from jmask._ops.elementwise import elementwise
from jmask._ops.masked_moves import (
    data_of,
    dense,
    masked_of,
    moved,
    permuted_coo,
    reshaped_coo,
)
from jmask._ops.row_shape import joined_rows, permuted_rows, reshaped_rows
from jmask._tensors.masked_tensor import MaskedTensor, as_masked_tensor, is_tensor, joined
from jmask._tensors.storage import (
    is_sparse,
    same_positions,
    sampled,
    stored_values,
    with_stored_values,
)

# One array.
broadcast_to = moved(jnp.broadcast_to)
delete = moved(jnp.delete)
diag = moved(jnp.diag)
diagonal = moved(jnp.diagonal)
expand_dims = moved(jnp.expand_dims, coo=reshaped_coo, rows=reshaped_rows)
flip = moved(jnp.flip)
fliplr = moved(jnp.fliplr)
flipud = moved(jnp.flipud)
matrix_transpose = moved(jnp.matrix_transpose, coo=permuted_coo, rows=permuted_rows)
moveaxis = moved(jnp.moveaxis, coo=permuted_coo, rows=permuted_rows)
permute_dims = moved(jnp.permute_dims, coo=permuted_coo, rows=permuted_rows)
ravel = moved(jnp.ravel, coo=reshaped_coo, rows=reshaped_rows)
repeat = moved(jnp.repeat)
reshape = moved(jnp.reshape, coo=reshaped_coo, rows=reshaped_rows)
roll = moved(jnp.roll)
rollaxis = moved(jnp.rollaxis, coo=permuted_coo, rows=permuted_rows)
rot90 = moved(jnp.rot90)
squeeze = moved(jnp.squeeze, coo=reshaped_coo, rows=reshaped_rows)
swapaxes = moved(jnp.swapaxes, coo=permuted_coo, rows=permuted_rows)
tile = moved(jnp.tile)
transpose = moved(jnp.transpose, coo=permuted_coo, rows=permuted_rows)
tril = moved(jnp.tril)
triu = moved(jnp.triu)

# One array into several.
array_split = moved(jnp.array_split)
dsplit = moved(jnp.dsplit)
hsplit = moved(jnp.hsplit)
split = moved(jnp.split)
unstack = moved(jnp.unstack)
vsplit = moved(jnp.vsplit)

# Several arrays.
atleast_1d = moved(jnp.atleast_1d, variadic=True)
atleast_2d = moved(jnp.atleast_2d, variadic=True)
atleast_3d = moved(jnp.atleast_3d, variadic=True)
broadcast_arrays = moved(jnp.broadcast_arrays, variadic=True)
column_stack = moved(jnp.column_stack, rows=joined_rows)
concat = concatenate = moved(jnp.concatenate, rows=joined_rows)
dstack = moved(jnp.dstack)
hstack = moved(jnp.hstack, rows=joined_rows)
stack = moved(jnp.stack)
vstack = moved(jnp.vstack, rows=joined_rows)


def pad(array: Any, pad_width: Any, mode: str = "constant", **kwargs: Any) -> Any:
    """`jax.numpy.pad`: constants are valid entries, and entries are repeated with their mask.

    Args:
        array: a masked tensor or an array.
        pad_width: as in `jax.numpy.pad`.
        mode: for a masked tensor "constant", "edge", "reflect", "symmetric", "wrap", or
            "empty", which pads with masked entries.
        **kwargs: as in `jax.numpy.pad`.

    Raises:
        ValueError: for a mode that computes with entries, if `array` is masked.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1, 2]), jnp.array([True, False]))
        >>> pad(x, 1)
        MaskedTensor([0, 1, --, 0], dtype=int32)
        >>> pad(x, (0, 2), mode="empty")
        MaskedTensor([1, --, --, --], dtype=int32)
    """
    array = dense(array, "pad")
    if not isinstance(array, MaskedTensor):
        return jnp.pad(array, pad_width, mode, **kwargs)
    constants = {"constant": False, "empty": True}
    copies = ("edge", "reflect", "symmetric", "wrap")
    if mode not in (*constants, *copies) or kwargs.get("reflect_type") == "odd":
        raise ValueError(
            f"`mode`={mode!r} of pad() computes with entries, some of which are masked: "
            f"expected one of {', '.join(map(repr, [*constants, *copies]))}."
        )
    data = jnp.pad(array.storage, pad_width, mode, **kwargs)
    if mode in constants:
        masked = jnp.pad(~array.valid, pad_width, constant_values=constants[mode])
    else:
        masked = jnp.pad(~array.valid, pad_width, mode, **kwargs)
    return joined(data, ~masked)


def where(condition: Any, x: Any = None, y: Any = None, /, **kwargs: Any) -> Any:
    """`jax.numpy.where`: the entry chosen, with its mask; masked where the condition is.

    Args:
        condition: boolean; masked tensors and arrays.
        x: taken where the condition is True.
        y: taken elsewhere.
        **kwargs: as in `jax.numpy.where`.

    Raises:
        TypeError: if only a masked condition is given: the number of its entries that are
            True is not known.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., 2., 3.]), jnp.array([True, True, False]))
        >>> where(x < 2, x, 0.)
        MaskedTensor([1.0, 0.0, --], dtype=float32)
    """
    operands = (condition, x, y)
    if not any(map(is_tensor, operands)):
        return jnp.where(condition, x, y, **kwargs)
    if x is None or y is None:
        raise TypeError("where() of a masked or sparse condition needs `x` and `y`.")
    if not any(isinstance(a, MaskedTensor) for a in operands):
        return _plain_where(*operands, **kwargs)
    if _share_positions(x, y) and jnp.broadcast_shapes(x.shape, condition.shape) == x.shape:
        condition = dense(condition, "where")
        chosen, masked = (
            sampled(a, x.storage) for a in (data_of(condition), masked_of(condition))
        )
        values = jnp.where(chosen, stored_values(x.storage), stored_values(y.storage))
        return x.with_values(values, jnp.where(chosen, x.valid, y.valid) & ~masked)
    condition, x, y = (dense(a, "where") for a in operands)
    chosen = data_of(condition)
    masked = jnp.where(chosen, masked_of(x), masked_of(y)) | masked_of(condition)
    return joined(jnp.where(chosen, data_of(x), data_of(y)), ~masked)


_plain_where = elementwise(jnp.where)


def masked_where(condition: Any, x: Any) -> MaskedTensor:
    """`x` with the entries masked where `condition` is True, or itself masked.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([1., -1., 2.])
        >>> masked_where(x < 0, x)
        MaskedTensor([1.0, --, 2.0], dtype=float32)
    """
    x = as_masked_tensor(x)
    condition = dense(condition, "masked_where")
    hidden = jnp.asarray(data_of(condition), bool) | masked_of(condition)
    if is_sparse(x.storage):
        return x.with_values(stored_values(x.storage), x.valid & ~sampled(hidden, x.storage))
    shape = jnp.broadcast_shapes(x.shape, hidden.shape)
    valid = jnp.broadcast_to(x.valid, shape) & ~hidden
    return joined(jnp.broadcast_to(x.storage, shape), valid)


def masked_fill(x: Any, where: Any, value: Any) -> Any:
    """`x` with `value`, which is valid, in the entries where `where` is True.

    Args:
        x: a masked tensor or an array.
        where: boolean, broadcasts with `x`; the result is masked where it is.
        value: cast to the dtype of `x`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., 2.]), jnp.array([True, False]))
        >>> masked_fill(x, jnp.array([False, True]), 7)
        MaskedTensor([1.0, 7.0], dtype=float32)
    """
    dtype = x.dtype if is_tensor(x) else jnp.result_type(x)
    if isinstance(value, MaskedTensor):
        return _where(where, value.astype(dtype), x)
    return _where(where, jnp.asarray(value, dtype), x)


_where = where


def take(a: Any, indices: Any, axis: int | None = None, **kwargs: Any) -> Any:
    """`jax.numpy.take`: masked where the index is masked or out of range.

    Args:
        a: a masked tensor or an array.
        indices: integers, which may be masked.
        axis: the dimension that is indexed; that of the flattened tensor by default.
        **kwargs: as in `jax.numpy.take`; a `fill_value` for indices out of range is valid.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1, 2]), jnp.array([True, False]))
        >>> take(x, jnp.array([0, 1, 5]))
        MaskedTensor([1, --, --], dtype=int32)
    """

    def spread(masked: jax.Array) -> jax.Array:
        if axis is None:
            return masked
        after = jnp.ndim(data_of(a)) - axis % jnp.ndim(data_of(a)) - 1
        return masked.reshape(masked.shape + (1,) * after)

    return _gathered(jnp.take, a, indices, axis, kwargs, spread)


def take_along_axis(arr: Any, indices: Any, axis: int | None = -1, **kwargs: Any) -> Any:
    """`jax.numpy.take_along_axis`: masked where the index is masked or out of range.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1, 2]), jnp.array([True, False]))
        >>> take_along_axis(x, jnp.array([1, 0]))
        MaskedTensor([--, 1], dtype=int32)
    """
    return _gathered(jnp.take_along_axis, arr, indices, axis, kwargs, lambda masked: masked)


def sort(a: Any, axis: int | None = -1, **kwargs: Any) -> Any:
    """`jax.numpy.sort`, masked entries last, in ascending and in descending order.

    Args:
        a: a masked tensor or an array.
        axis: the dimension to sort along; that of the flattened tensor for None.
        **kwargs: `descending` and, for arrays, the others of `jax.numpy.sort`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([3, 1, 2]), jnp.array([True, False, True]))
        >>> sort(x)
        MaskedTensor([2, 3, --], dtype=int32)
    """
    a = dense(a, "sort")
    if not isinstance(a, MaskedTensor):
        return jnp.sort(a, axis, **kwargs)
    if axis is None:
        a, axis = a.reshape(-1), 0
    return take_along_axis(a, _order(a, axis, **kwargs), axis)


def argsort(a: Any, axis: int | None = -1, *, dtype: Any = None, **kwargs: Any) -> Any:
    """`jax.numpy.argsort`: what `sort` takes; masked where the entry taken is masked.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([3, 1, 2]), jnp.array([True, False, True]))
        >>> argsort(x)
        MaskedTensor([2, 0, --], dtype=int32)
    """
    a = dense(a, "argsort")
    if not isinstance(a, MaskedTensor):
        return jnp.argsort(a, axis, dtype=dtype, **kwargs)
    if axis is None:
        a, axis = a.reshape(-1), 0
    order = _order(a, axis, **kwargs)
    valid = jnp.take_along_axis(a.valid, order, axis)
    return joined(order if dtype is None else order.astype(dtype), valid)


def _like(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a tensor like another one: a masked one keeps its mask."""

    @functools.wraps(function)
    def lifted(a: Any, *args: Any, **kwargs: Any) -> Any:
        if is_sparse(a) and kwargs.get("shape") is None:
            # Zeros and copies have the storage of what they are like.
            with jax.ensure_compile_time_eval():
                zero = function(np.zeros((), a.dtype), *args, **kwargs)
                stays = not isinstance(zero, jax.core.Tracer) and not zero.any()
            if stays:
                return with_stored_values(a, function(stored_values(a), *args, **kwargs))
        if not isinstance(a, MaskedTensor):
            return function(dense(a, function.__name__), *args, **kwargs)
        if kwargs.get("shape") is not None:
            raise ValueError(
                f"{function.__name__}() keeps the mask of a MaskedTensor, so it cannot change "
                f"its `shape`: use {function.__name__.removesuffix('_like')}()."
            )
        return a.with_values(function(stored_values(a.storage), *args, **kwargs))

    lifted.__doc__ = f"`jax.numpy.{function.__name__}`; a masked tensor keeps its mask."
    return lifted


copy = _like(jnp.copy)
empty_like = _like(jnp.empty_like)
full_like = _like(jnp.full_like)
ones_like = _like(jnp.ones_like)
zeros_like = _like(jnp.zeros_like)


def _share_positions(x: Any, y: Any) -> bool:
    return (
        isinstance(x, MaskedTensor)
        and isinstance(y, MaskedTensor)
        and is_sparse(x.storage)
        and same_positions(x.storage, y.storage)
    )


def _gathered(
    function: Callable, a: Any, indices: Any, axis: Any, kwargs: dict, spread: Callable
) -> Any:
    """Entries of `a` at `indices`; `spread` gives masks of indices the shape of the result."""
    kind = indices if isinstance(indices, MaskedTensor) else abstract_leaf(indices)
    if kind is None or not jnp.issubdtype(kind.dtype, jnp.integer):
        of = type(indices).__name__ if kind is None else f"one of {kind.dtype}"
        raise TypeError(
            f"`indices` must be an array of integers, masked or not, got {of}: write "
            "jnp.array(indices)."
        )
    a, indices = dense(a, function.__name__), dense(indices, function.__name__)
    if not isinstance(a, MaskedTensor) and not isinstance(indices, MaskedTensor):
        return function(a, indices, axis, **kwargs)
    unknown = masked_of(indices)
    places = jnp.where(unknown, 0, data_of(indices))
    data = function(data_of(a), places, axis, **kwargs)
    filled = {**kwargs, "fill_value": kwargs.get("fill_value") is None}
    masked = function(masked_of(a), places, axis, **filled)
    return joined(data, ~(masked | jnp.broadcast_to(spread(unknown), masked.shape)))


def _order(
    x: MaskedTensor, axis: int, *, descending: bool = False, stable: bool = True
) -> jax.Array:
    """For each place along the axis, which entry belongs there; masked ones last."""
    values = lax.stop_gradient(jnp.where(x.valid, x.storage, jnp.zeros((), x.dtype)))
    position = lax.broadcasted_iota(jnp.int32, x.shape, axis % x.ndim)
    operands = [x.valid, values, position]
    if descending:
        # Backwards in and out, so that equal entries keep their order.
        operands = [jnp.flip(operand, axis) for operand in operands]
    else:
        operands[0] = ~x.valid
    order = lax.sort(operands, dimension=axis, is_stable=stable, num_keys=2)[-1]
    return jnp.flip(order, axis) if descending else order
