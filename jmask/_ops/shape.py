"""Shapes and selection, with the names of `jax.numpy`: data and mask move together.

    x                  [[1, --],       reshape(x, 4)         [1, --, 3, 4]
                        [3,  4]]       triu(x)               [[1, --], [0, 4]]
    where(x > 2, x, 0)                 [[0, --], [3, 4]]     masked where the condition is
    take(x, [0, 9], axis=0)            [[1, --], [--, --]]   masked where there is no entry

A function that only moves entries is applied to the data and, in the same way, to the flags
of masked entries. The flags say "masked", not "valid", so that zeros a function brings in
(`triu`, `diag`) come out as valid entries.

Coordinates and rows keep their storage where a rule knows the new positions:

    reshape(x, (V, 2, 3))       RowSparse: on the values, (n, 6) -> (n, 2, 3)
    transpose(x, (0, 2, 1))     RowSparse: on the values
    concatenate([x, y])         RowSparse: the indices of y count on from those of x
    concatenate([x, y], 1)      RowSparse: on the union of the rows

A rule returns None where there is no such storage: the result is dense then, with a warning.
Plain arrays are passed on to `jax.numpy`.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from jmask._base.fallback import report_fallback
from jmask._base.row_ids import widen
from jmask._base.types import Argument, Function, Mask, Options, Shape, Tensor, TensorLike
from jmask._base.validation import abstract_leaf
from jmask._ops.elementwise import elementwise, on_union_of_rows
from jmask._tensors.masked_tensor import MaskedTensor, any_masked, is_tensor, joined, read_at
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import (
    as_dense,
    is_sparse,
    same_positions,
    stored_values,
    with_stored_values,
)

# --- data and mask moved together --------------------------------------------------------


def moved(
    function: Function, *, variadic: bool = False, rule: Function | None = None
) -> Function:
    """Lift a function of `jax.numpy` that moves entries to masked tensors.

    Args:
        function: its first argument is an array or a sequence of arrays; it returns arrays
            of their entries (and zeros).
        variadic: all positional arguments are arrays.
        rule: computes the result on rows or masked coordinates, or returns None.

    Returns:
        A function that takes a `MaskedTensor` in place of any array, and returns a
        `MaskedTensor` in place of every array if it was given one.
    """

    @functools.wraps(function)
    def lifted(*args: Argument, **kwargs: Argument) -> Tensor:
        operands, arguments = (args, ()) if variadic else (args[:1], args[1:])
        leaves = jax.tree.leaves(operands, is_leaf=is_tensor)
        if not any(map(is_tensor, leaves)):
            return function(*args, **kwargs)
        if rule is not None and any(is_row_sparse(x) or is_masked_coo(x) for x in leaves):
            result = rule(function, args[0], arguments, kwargs)
            if result is not None:
                return result
        operands = jax.tree.map(
            lambda x: dense(x, function.__name__), operands, is_leaf=is_tensor
        )
        data = jax.tree.map(data_of, operands, is_leaf=is_tensor)
        result = function(*data, *arguments, **kwargs)
        if not any_masked(*leaves):
            return result
        masked = jax.tree.map(masked_of, operands, is_leaf=is_tensor)
        masked = function(*masked, *arguments, **kwargs)
        return jax.tree.map(lambda x, flags: joined(x, ~flags), result, masked)

    return lifted


def data_of(x: TensorLike) -> Tensor:
    """Return the data of a dense masked tensor; anything else as it is."""
    return x.storage if isinstance(x, MaskedTensor) else x


def masked_of(x: TensorLike) -> jax.Array:
    """Return where a dense masked tensor is masked: nowhere for anything else."""
    return ~x.valid if isinstance(x, MaskedTensor) else jnp.zeros(jnp.shape(x), bool)


def dense(x: TensorLike, name: str, why: str = "") -> Tensor:
    """Return `x` on dense storage, with a warning that names the operation if it was sparse."""
    if not is_sparse(data_of(x)):
        return x
    report_fallback(became_dense(x, name, why))
    return x.to_dense() if isinstance(x, MaskedTensor) else as_dense(x)


def became_dense(x: TensorLike, name: str, why: str = "") -> str:
    """Return the warning of an operation that makes a sparse tensor dense."""
    text = f"`{name}` made a sparse tensor of shape {np.shape(x)} dense, at O(size) cost"
    return f"{text}: {why}" if why else text


def is_masked_coo(x: TensorLike) -> bool:
    """Decide whether `x` is a masked tensor that stores a position for each single entry."""
    return isinstance(x, MaskedTensor) and isinstance(x.storage, BCOO) and not x.storage.n_dense


# --- rules of storages --------------------------------------------------------------------


def reshaped(function: Function, x: Tensor, arguments: tuple, kwargs: Options) -> Tensor | None:
    """Keep the storage under functions that keep the order of entries."""
    if not (is_row_sparse(x) or is_masked_coo(x)) or "F" in (*arguments, *kwargs.values()):
        return None
    if is_row_sparse(x):
        x.check_single()
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    shape = jax.eval_shape(lambda a: function(a, *arguments, **kwargs), like).shape
    if not shape or 0 in shape:
        return None
    if is_row_sparse(x):
        if shape[0] != x.shape[0]:
            return None
        return with_stored_values(x, x.values.reshape(-1, *shape[1:]), shape)
    indices = x.storage.indices
    if math.prod(shape) > jnp.iinfo(indices.dtype).max:
        raise ValueError(
            f"`{function.__name__}` of a coordinate tensor of shape {x.shape}: positions in "
            f"{math.prod(shape)} entries do not fit into its {indices.dtype} indices."
        )
    inside = (indices < jnp.array([x.shape], indices.dtype)).all(axis=1)
    flat = jnp.ravel_multi_index(tuple(indices.T), x.shape, mode="clip")
    places = jnp.stack(jnp.unravel_index(flat, shape), axis=1).astype(indices.dtype)
    places = jnp.where(inside[:, None], places, jnp.array([shape], indices.dtype))
    return _at_indices(x, places, shape, x.storage.indices_sorted)


def permuted(function: Function, x: Tensor, arguments: tuple, kwargs: Options) -> Tensor | None:
    """Keep the storage under functions that permute dimensions."""
    if not (is_row_sparse(x) or is_masked_coo(x)):
        return None
    if is_row_sparse(x):
        x.check_single()
    # Permuting an empty array of shape (0, 1, 2, ...) tells where each dimension goes.
    numbered = np.empty(tuple(range(x.ndim)))
    axes = getattr(np, function.__name__)(numbered, *arguments, **kwargs).shape
    shape = tuple(x.shape[axis] for axis in axes)
    if is_masked_coo(x):
        return _at_indices(x, x.storage.indices[:, jnp.array(axes)], shape, False)
    return with_stored_values(x, x.values.transpose(axes), shape) if axes[0] == 0 else None


def joined_rows(
    function: Function, tensors: Sequence[TensorLike], arguments: tuple, kwargs: Options
) -> Tensor | None:
    """Keep rows under functions that join tensors along an axis that there is."""
    if not isinstance(tensors, list | tuple) or not all(map(is_row_sparse, tensors)):
        return None
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tensors]
    result = jax.eval_shape(lambda a: function(a, *arguments, **kwargs), like)
    if result.ndim != tensors[0].ndim:
        return None
    tensors = [x.astype(result.dtype) for x in tensors]
    height = result.shape[0]
    if all(x.shape[1:] == result.shape[1:] for x in tensors) and (
        height == sum(x.shape[0] for x in tensors)
    ):
        indices, start = [], 0
        for x in tensors:
            ids = widen(x.row_ids(), height)
            indices.append(jnp.where(ids < x.shape[0], ids + start, height))
            start += x.shape[0]
        values = jnp.concatenate([x.values for x in tensors])
        return RowSparse(jnp.concatenate(indices), values, result.shape)
    if any(x.shape[0] != height for x in tensors):
        return None
    rows = on_union_of_rows(tensors)
    # The functions join along the axis where the sizes add up.
    values = function([x.values for x in rows], *arguments, **kwargs)
    return with_stored_values(rows[0], values, result.shape)


def _at_indices(
    x: MaskedTensor, indices: TensorLike, shape: Shape, is_sorted: bool
) -> MaskedTensor:
    storage = BCOO(
        (x.storage.data, indices),
        shape=tuple(shape),
        indices_sorted=is_sorted,
        unique_indices=x.storage.unique_indices,
    )
    return joined(storage, x.valid)


# --- functions; more of them are in the table of `jmask.numpy` ---------------------------


broadcast_to = moved(jnp.broadcast_to)
concatenate = moved(jnp.concatenate, rule=joined_rows)
diagonal = moved(jnp.diagonal)
expand_dims = moved(jnp.expand_dims, rule=reshaped)
split = moved(jnp.split)


def pad(
    array: TensorLike,
    pad_width: int | Sequence[int] | Sequence[Sequence[int]],
    mode: str = "constant",
    **kwargs: Argument,
) -> Tensor:
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


def where(
    condition: Mask, x: TensorLike = None, y: TensorLike = None, /, **kwargs: Argument
) -> Tensor:
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
    if not any_masked(*operands):
        return _plain_where(*operands, **kwargs)
    storages = [a.storage for a in (x, y) if isinstance(a, MaskedTensor)]
    alike = len(storages) == 2 and all(map(is_sparse, storages)) and same_positions(*storages)
    if alike and jnp.broadcast_shapes(x.shape, condition.shape) == x.shape:
        chosen, exists = read_at(condition, x.storage, became_dense(condition, "where"))
        values = jnp.where(chosen, stored_values(x.storage), stored_values(y.storage))
        return x.with_values(values, jnp.where(chosen, x.valid, y.valid) & exists)
    condition, x, y = (dense(a, "where") for a in operands)
    chosen = data_of(condition)
    masked = jnp.where(chosen, masked_of(x), masked_of(y)) | masked_of(condition)
    return joined(jnp.where(chosen, data_of(x), data_of(y)), ~masked)


_plain_where = elementwise(jnp.where)


def take(
    a: TensorLike, indices: TensorLike, axis: int | None = None, **kwargs: Argument
) -> Tensor:
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


def take_along_axis(
    arr: TensorLike, indices: TensorLike, axis: int | None = -1, **kwargs: Argument
) -> Tensor:
    """`jax.numpy.take_along_axis`: masked where the index is masked or out of range.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1, 2]), jnp.array([True, False]))
        >>> take_along_axis(x, jnp.array([1, 0]))
        MaskedTensor([--, 1], dtype=int32)
    """
    return _gathered(jnp.take_along_axis, arr, indices, axis, kwargs, lambda masked: masked)


def like(function: Function) -> Function:
    """Lift a function that makes a tensor like another one: a masked one keeps its mask."""

    @functools.wraps(function)
    def lifted(a: TensorLike, *args: Argument, **kwargs: Argument) -> Tensor:
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


def _gathered(
    function: Function,
    a: Tensor,
    indices: Tensor,
    axis: int | None,
    kwargs: Options,
    spread: Function,
) -> Tensor:
    """Read `a` at `indices`; `spread` brings masks of indices to the shape of the result."""
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
    unknown = masked_of(indices)
    places = jnp.where(unknown, 0, data_of(indices))
    data = function(data_of(a), places, axis, **kwargs)
    filled = {**kwargs, "fill_value": kwargs.get("fill_value") is None}
    masked = function(masked_of(a), places, axis, **filled)
    return joined(data, ~(masked | jnp.broadcast_to(spread(unknown), masked.shape)))
