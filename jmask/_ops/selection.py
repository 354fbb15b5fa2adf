"""Select entries by conditions and indices, with the names of `jax.numpy` and `numpy.ma`.

    where(x > 2, x, 0)         [[0, --], [3, 4]]      masked where the condition is
    take(x, [0, 9], axis=0)    [[1, --], [--, --]]    masked where there is no entry
    masked_where(x < 0, x)     [1, -2, 3]  ->  [1, --, 3]
    masked_less(x, 0)                          the same
    masked_fill(x, x < 0, 7)                   [1,  7, 3]
    select([x < 0], [-x], x)                   [1,  2, 3]

Functions of conditions keep the storage of a masked tensor: what it does not store is masked
already. What is read at indices is read from dense storage.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.types import (
    Argument,
    Function,
    Mask,
    Options,
    Scalar,
    Storage,
    Tensor,
    TensorLike,
)
from jmask._base.validation import abstract_leaf
from jmask._ops.lift import (
    adopted,
    aligned,
    data_of,
    dense,
    entrywise,
    is_hidden,
)
from jmask._ops.reduce import refuse_output
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    any_masked,
    as_masked_tensor,
    as_tensor,
    is_tensor,
    joined,
)
from jmask._tensors.storage import is_sparse, stored_values, with_stored_values

# --- by conditions -----------------------------------------------------------------------

# Linear in both together, whatever the condition is; where it is False, the second is taken.
_plain_where = entrywise(jnp.where, scales=((1, 2),), vanishes=((0, 2),))


def where(
    condition: Mask, x: TensorLike = None, y: TensorLike = None, /, **kwargs: Argument
) -> Tensor:
    """Choose entries as `jax.numpy.where`, with their masks; masked where the condition is.

    Raises:
        TypeError: if only a masked condition is given: the number of its entries that are
            True is not known.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., 2., 3.]), jnp.array([True, True, False]))
        >>> jmask.numpy.where(x < 2, x, 0.)
        MaskedTensor([1.0, 0.0, --], dtype=float32)
    """
    operands = condition, x, y = adopted(condition), adopted(x), adopted(y)
    if not any(map(is_tensor, operands)):
        return jnp.where(condition, x, y, **kwargs)
    if x is None or y is None:
        raise TypeError("where() of a masked or sparse condition needs `x` and `y`.")
    if not any_masked(*operands):
        return _plain_where(*operands, **kwargs)
    if not (is_sparse(data_of(x)) and is_sparse(data_of(y))):
        # What one of them does not store may be chosen from the other.
        operands = tuple(dense(a, "where") for a in operands)
    like, values, masks = aligned(operands, "where")
    condition, x, y = values
    known, of_x, of_y = masks
    return _on(like, jnp.where(condition, x, y), jnp.where(condition, of_x, of_y) & known)


def _on(like: Storage | None, values: jax.Array, valid: jax.Array) -> MaskedTensor:
    """Return values and a mask that broadcast to one shape, at the positions of `like`."""
    shape = jnp.broadcast_shapes(values.shape, valid.shape)
    values, valid = jnp.broadcast_to(values, shape), jnp.broadcast_to(valid, shape)
    return joined(values if like is None else with_stored_values(like, values), valid)


def masked_where(condition: Mask, x: TensorLike) -> MaskedTensor:
    """Mask the entries of `x` where `condition` is True, or itself masked.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([1., -1., 2.])
        >>> jmask.numpy.masked_where(x < 0, x)
        MaskedTensor([1.0, --, 2.0], dtype=float32)
    """
    x, condition = as_masked_tensor(as_tensor(adopted(x))), as_tensor(adopted(condition))
    like, (values, holds), (valid, known) = aligned([x, condition], "masked_where")
    return _on(like, values, jnp.asarray(valid) & known & ~holds.astype(bool))


def masks_where(name: str, which: str, condition: Function) -> Function:
    """Return the function of `numpy.ma` that masks the entries for which a condition holds.

    Args:
        which: entries these are, after "that".
        condition: elementwise, of `x` and the other arguments of the function.
    """
    holds = entrywise(condition)

    @functools.wraps(condition)
    def masked(x: TensorLike, *args: Argument, **kwargs: Argument) -> MaskedTensor:
        x = as_masked_tensor(as_tensor(adopted(x)))
        return masked_where(holds(x, *args, **kwargs), x)

    masked.__name__ = masked.__qualname__ = name
    masked.__doc__ = f"Mask the entries of `x` that {which}, as `numpy.ma.{name}`."
    return masked


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
    x, value = adopted(x), adopted(value)
    dtype = x.dtype if is_tensor(x) else jnp.result_type(x)
    value = value if isinstance(value, MaskedTensor) else jnp.asarray(value)
    return _where(where, value.astype(dtype), x)


_where = where


def select(
    condlist: Sequence[Mask], choicelist: Sequence[TensorLike], default: TensorLike = 0
) -> Tensor:
    """Return the entry of the first choice whose condition is True, as `jax.numpy.select`.

    The result is masked where a condition is, before which none is True.

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
    if not any(is_tensor(adopted(x)) for x in (*condlist, *choicelist, default)):
        return jnp.select(condlist, choicelist, default)
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        default = where(condition, choice, default)
    return default


def likened(function: Function) -> Function:
    """Lift a function that makes a tensor like another one: a masked one keeps its mask."""

    @functools.wraps(function)
    def lifted(a: TensorLike, *args: Argument, **kwargs: Argument) -> Tensor:
        a = adopted(a)
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

    return lifted


# --- by indices --------------------------------------------------------------------------


def pad(
    array: TensorLike,
    pad_width: int | Sequence[int] | Sequence[Sequence[int]],
    mode: str = "constant",
    **kwargs: Argument,
) -> Tensor:
    """Pad as `jax.numpy.pad`: constants are valid, entries are repeated with their mask.

    Mode "empty" pads a masked tensor with masked entries.

    Raises:
        ValueError: for a mode that computes with entries, if `array` is masked.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1, 2]), jnp.array([True, False]))
        >>> jmask.numpy.pad(x, (0, 2), mode="empty")
        MaskedTensor([1, --, --, --], dtype=int32)
    """
    array = dense(adopted(array), "pad")
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
        hidden = jnp.pad(~array.valid, pad_width, constant_values=constants[mode])
    else:
        hidden = jnp.pad(~array.valid, pad_width, mode, **kwargs)
    return joined(data, ~hidden)


def take(
    a: TensorLike,
    indices: TensorLike,
    axis: int | None = None,
    out: None = None,
    mode: str | None = None,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    fill_value: Scalar | None = None,
) -> Tensor:
    """Read as `jax.numpy.take`, masked where the index is masked or out of range.

    A `fill_value` for indices out of range is a valid entry.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1, 2]), jnp.array([True, False]))
        >>> jmask.numpy.take(x, jnp.array([0, 1, 5]))
        MaskedTensor([1, --, --], dtype=int32)
    """

    def spread(hidden: jax.Array) -> jax.Array:
        if axis is None:
            return hidden
        after = jnp.ndim(data_of(a)) - axis % jnp.ndim(data_of(a)) - 1
        return hidden.reshape(hidden.shape + (1,) * after)

    refuse_output({"out": out})
    options: Options = {"mode": mode, "fill_value": fill_value}
    options |= {"unique_indices": unique_indices, "indices_are_sorted": indices_are_sorted}
    return _gathered(jnp.take, a, indices, axis, options, spread)


def take_along_axis(
    arr: TensorLike,
    indices: TensorLike,
    axis: int | None = -1,
    mode: str | None = None,
    fill_value: Scalar | None = None,
    **kwargs: Argument,
) -> Tensor:
    """Read as `jax.numpy.take_along_axis`, masked where the index is, or out of range."""
    kwargs |= {"mode": mode, "fill_value": fill_value}
    return _gathered(jnp.take_along_axis, arr, indices, axis, kwargs, lambda hidden: hidden)


def _gathered(
    function: Function,
    a: Tensor,
    indices: Tensor,
    axis: int | None,
    kwargs: Options,
    spread: Function,
) -> Tensor:
    """Read `a` at `indices`; `spread` brings masks of indices to the shape of the result."""
    a, indices = adopted(a), adopted(indices)
    kind = indices if isinstance(indices, MaskedTensor) else abstract_leaf(indices)
    if kind is None or not jnp.issubdtype(kind.dtype, jnp.integer):
        of = type(indices).__name__ if kind is None else f"one of {kind.dtype}"
        raise TypeError(
            f"`indices` must be an array of integers, masked or not, got {of}: write "
            "jnp.array(indices)."
        )
    a, indices = dense(a, function.__name__), dense(indices, function.__name__)
    if not any_masked(a, indices):
        return function(a, indices, axis, **kwargs)
    unknown = is_hidden(indices)
    places = jnp.where(unknown, 0, data_of(indices))
    data = function(data_of(a), places, axis, **kwargs)
    filled = {**kwargs, "fill_value": kwargs.get("fill_value") is None}
    hidden = function(is_hidden(a), places, axis, **filled)
    return joined(data, ~(hidden | jnp.broadcast_to(spread(unknown), hidden.shape)))
