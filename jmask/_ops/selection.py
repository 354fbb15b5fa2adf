"""Select entries by conditions and indices, with the names of `jax.numpy` and `numpy.ma`.

    where(x > 2, x, 0)         [[0, --], [3, 4]]      masked where the condition is
    take(x, [0, 9], axis=0)    [[1, --], [--, --]]    masked where there is no entry
    masked_where(x < 0, x)     [1, -2, 3]  ->  [1, --, 3]
    masked_fill(x, x < 0, 7)                   [1,  7, 3]
    select([x < 0], [-x], x)                   [1,  2, 3]

Functions of conditions keep the storage of a masked tensor: what it does not store is masked
already. What is read at indices is read from dense storage.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmask._base.array_types import trailing
from jmask._base.types import Argument, Dense, Function, Options, Tensor, TensorLike
from jmask._ops.lift import adopted, aligned, data_of, dense, entrywise, extends, is_hidden, on
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    any_masked,
    as_masked_tensor,
    as_tensor,
    is_tensor,
    joined,
)
from jmask._tensors.storage import as_dense, is_sparse

# Linear in both together, whatever the condition is; where it is False, the second is taken.
_plain_where = entrywise(jnp.where, scales=((1, 2),), vanishes=((0, 2),))


def where(
    condition: TensorLike,
    x: TensorLike | None = None,
    y: TensorLike | None = None,
    /,
    **kwargs: Argument,
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
    choose: Function = jnp.where
    operands = [adopted(a) for a in (condition, x, y)]
    if not any(map(is_tensor, operands)):
        return choose(*operands, **kwargs)
    if x is None or y is None:
        raise TypeError("where() of a masked or sparse condition needs `x` and `y`.")
    if not any_masked(*operands):
        return _plain_where(*operands, **kwargs)
    if not (is_sparse(data_of(operands[1])) and is_sparse(data_of(operands[2]))):
        # What one of them does not store may be chosen from the other.
        operands = [dense(a, "where") for a in operands]
    like, (holds, *values), (known, *valid) = aligned(operands, "where")
    return on(like, choose(holds, *values), choose(holds, *valid) & known)


def masked_where(condition: TensorLike, x: TensorLike) -> MaskedTensor:
    """Mask the entries of `x` where `condition` is True, or itself masked.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([1., -1., 2.])
        >>> jmask.numpy.masked_where(x < 0, x)
        MaskedTensor([1.0, --, 2.0], dtype=float32)
    """
    x, condition = as_masked_tensor(as_tensor(adopted(x))), as_tensor(adopted(condition))
    like, (values, holds), (valid, known) = aligned([x, condition], "masked_where")
    return on(like, values, jnp.asarray(valid) & known & ~holds.astype(bool))


def masks_where(name: str, condition: Function) -> Function:
    """Return the function of `numpy.ma` that masks the entries for which a condition holds."""
    holds = entrywise(condition)

    @functools.wraps(condition)
    def masked(x: TensorLike, *args: Argument, **kwargs: Argument) -> MaskedTensor:
        x = as_masked_tensor(as_tensor(adopted(x)))
        return masked_where(holds(x, *args, **kwargs), x)

    masked.__name__ = masked.__qualname__ = name
    masked.__doc__ = f"Mask entries of `x` with condition and arguments of `numpy.ma.{name}`."
    return masked


def masked_fill(x: TensorLike, where: TensorLike, value: TensorLike) -> Tensor:
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


@functools.wraps(jnp.select)
def select(
    condlist: Sequence[Argument], choicelist: Sequence[Argument], default: Argument = 0
) -> Tensor:
    """Select with masks: the result is masked where a condition is, before which none holds."""
    operands = (*condlist, *choicelist, default)
    fits = len(condlist) == len(choicelist)
    if not fits or not any(is_tensor(adopted(x)) for x in operands):
        return jnp.select(condlist, choicelist, default)
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        default = where(condition, choice, default)
    return default


def likened(function: Function) -> Function:
    """Lift a function that makes a tensor like another one: a masked one keeps its mask."""
    lifted = entrywise(function)

    @functools.wraps(function)
    def like(a: Argument, *args: Argument, **kwargs: Argument) -> Tensor:
        a = adopted(a)
        if kwargs.get("shape") is None:
            return lifted(a, *args, **kwargs)
        if isinstance(a, MaskedTensor):
            raise ValueError(
                f"{function.__name__}() keeps the mask of a MaskedTensor, so it cannot change "
                f"its `shape`: use {function.__name__.removesuffix('_like')}()."
            )
        return function(dense(a, function.__name__), *args, **kwargs)

    return like


@extends(jnp.pad)
def pad(
    array: MaskedTensor,
    pad_width: Argument,
    mode: str = "constant",
    kwargs: Options | None = None,
) -> MaskedTensor:
    """Pad with valid constants, or repeat entries with their mask.

    Mode "empty" pads with masked entries; a mode that computes with entries is a ValueError.
    """
    options: Options = kwargs or {}
    constants = {"constant": False, "empty": True}
    copies = ("edge", "reflect", "symmetric", "wrap")
    if mode not in (*constants, *copies) or options.get("reflect_type") == "odd":
        raise ValueError(
            f"`mode`={mode!r} of pad() computes with entries, some of which are masked: "
            f"expected one of {', '.join(map(repr, [*constants, *copies]))}."
        )
    data = jnp.pad(as_dense(array.storage), pad_width, mode, **options)
    if mode in constants:
        mode, options = "constant", {"constant_values": constants[mode]}
    return joined(data, ~jnp.pad(~array.valid, pad_width, mode, **options))


@extends(jnp.take, "a", "indices")
def take(
    a: Dense, indices: Dense, axis: int | None = None, **options: Argument
) -> MaskedTensor:
    """Read with masks: the result is masked where the index is, or is out of range.

    A `fill_value` for indices out of range is a valid entry.
    """
    after = 0 if axis is None else a.ndim - axis % a.ndim - 1
    unknown = is_hidden(indices)
    spread = trailing(unknown, unknown.ndim + after)
    return _gathered(jnp.take, a, indices, spread, {"axis": axis, **options})


@extends(jnp.take_along_axis, "arr", "indices")
def take_along_axis(
    arr: Dense, indices: Dense, axis: int | None = -1, **options: Argument
) -> MaskedTensor:
    """Read with masks: the result is masked where the index is, or is out of range."""
    unknown = is_hidden(indices)
    return _gathered(jnp.take_along_axis, arr, indices, unknown, {"axis": axis, **options})


def _gathered(
    function: Function, a: Dense, indices: Dense, unknown: jax.Array, options: Options
) -> MaskedTensor:
    """Read `a` at `indices`; the mask `unknown` of these broadcasts to the result."""
    places = jnp.where(is_hidden(indices), 0, as_dense(data_of(indices)))
    data = function(data_of(a), places, **options)
    options["fill_value"] = options.get("fill_value") is None
    hidden = function(is_hidden(a), places, **options)
    return joined(data, ~(hidden | jnp.broadcast_to(unknown, hidden.shape)))
