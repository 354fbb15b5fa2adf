"""Running a reduction: arguments checked, storages brought to groups, results wrapped.

reduce(kernel, x, axis=1)       x MaskedTensor: MaskedTensor, masked where nothing was
                                x array:        array, over where= or over all
                                x sparse:       over its entries, zeros included
"""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jmask._base.fallback import report_fallback
from jmask._base.validation import refuse_scipy
from jmask._ops.groups import grouped
from jmask._tensors.mask_positions import as_booleans
from jmask._tensors.masked_tensor import MaskedTensor, as_tensor
from jmask._tensors.storage import (
    as_dense,
    is_entry,
    is_sparse,
    same_positions,
    sampled,
    stored_values,
    unique_positions,
    values_at,
)

_KEEPDIMS = "    keepdims: whether reduced axes stay, with size 1.\n"
_ARGUMENTS = """
Args:
    x: `MaskedTensor` on any storage, RowSparse, BCOO, BCSR or array, of any shape.
    axis: an int, a tuple of ints or None, which is all axes; may be negative.
    keepdims: whether reduced axes stay, with size 1.
    where: booleans that broadcast to the shape of `x`; other entries take no part. A
        `MaskedTensor` intersects them with its mask.
"""
_RAISES = """
Raises:
    TypeError: if `axis` is no int or tuple of ints, or `where` is not boolean.
    ValueError: if `axis` is out of bounds or there twice, or `where` does not
        broadcast.
"""
_F = TypeVar("_F", bound=Callable[..., Any])


def reduce(
    kernel: Callable[..., Any],
    x: Any,
    axis: Any,
    keepdims: bool,
    where: Any,
    *,
    name: str,
    dtype: Any = None,
    plain: Callable[..., Any] | None = None,
    empty: Any = None,
    of_stored: Callable[..., Any] | None = None,
    of_array: Callable[..., Any] | None = None,
) -> Any:
    """The results of `kernel` over the groups of `x` along `axis`.

    Args:
        kernel: takes groups; returns results and where there is one.
        x: MaskedTensor, array or plain sparse storage.
        axis, keepdims, where: as in `jmask.numpy.sum`.
        name: of the reduction, for messages.
        dtype: of the results; that of the kernel if None.
        plain: the function of JAX for an array without `where`; the kernel if None.
        empty: the result of an array where there is none, if the kernel gives another.
        of_stored: the kernel for plain sparse storage, if zeros do not change it.
        of_array: (values, valid, axes) in place of the kernel, if it needs a dense array.
    """
    x = as_tensor(x)
    axes = checked_axes(axis, len(x.shape))
    if isinstance(x, MaskedTensor):
        if of_array and is_sparse(x.storage):
            report_fallback(became_dense(name, x))
            x = x.to_dense()
        storage, valid = x.storage, x.valid & where_at(where, x.storage)
    elif not is_sparse(x):
        if where is None and plain is not None:
            axis = tuple(axis) if isinstance(axis, Sequence) else axis
            return plain(x, axis=axis, keepdims=keepdims)
        storage, valid = x, where_at(where, x)
    elif of_stored is None or bool(getattr(x, "n_batch", 0)) or _is_of_nothing(x, axes):
        if not _is_of_nothing(x, axes):  # which has no entries to make dense
            report_fallback(became_dense(name, x))
        return reduce(
            kernel, as_dense(x), axis, keepdims, where,
            name=name, dtype=dtype, plain=plain, empty=empty, of_array=of_array,
        )  # fmt: skip
    else:
        storage = unique_positions(x)
        valid = is_entry(storage) & where_at(where, storage)
    groups = grouped(storage, valid, axes, keepdims)
    if of_array:
        result, exists = of_array(storage, valid, axes)
    else:
        result, exists = (of_stored if is_sparse(x) else kernel)(groups)  # type: ignore[misc]
    result = result if dtype is None else result.astype(dtype)
    if isinstance(x, MaskedTensor):
        node = (groups.stored(result), groups.shaped(exists))
        return MaskedTensor.tree_unflatten(None, node)
    if empty is not None and not is_sparse(x):
        result = jnp.where(exists, result, empty)
    return groups.stored(result)


def result_dtype(function: Callable[..., Any], x: Any, dtype: Any = None) -> Any:
    """The dtype that a function of JAX, such as `jnp.sum`, gives for `x`."""
    kind = as_tensor(x).dtype
    if dtype is not None:
        function = functools.partial(function, dtype=dtype)
    return jax.eval_shape(function, jax.ShapeDtypeStruct((1,), kind)).dtype


def described(function: _F) -> _F:
    """Say in the docstring what the arguments of every reduction are."""
    # Without indentation, as the compiler has it since Python 3.13; none under `python -OO`.
    doc = inspect.cleandoc(function.__doc__ or "")
    text, example_follows, example = doc.partition("\nExample:")
    text, _, extra = text.partition("\nArgs:\n")
    arguments = _ARGUMENTS
    if "keepdims" not in inspect.signature(function).parameters:
        arguments = arguments.replace(_KEEPDIMS, "")
    function.__doc__ = f"{text}{arguments}{extra}{_RAISES}{example_follows}{example}"
    return function


def checked_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """`axis` as ascending axes that are not negative.

    Raises:
        TypeError: if it is neither an int, a sequence of ints nor None.
        ValueError: if one is out of bounds, or is there twice.
    """
    if axis is None:
        return tuple(range(ndim))
    given = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    try:
        axes = [operator.index(a) for a in given]
    except TypeError:
        raise TypeError(
            f"`axis` must be an int, a tuple of ints or None, got {axis!r}."
        ) from None
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(f"`axis` {a} is out of bounds for a tensor of {ndim} dimensions.")
    axes = sorted(a % ndim for a in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"`axis` {axis} names an axis twice.")
    return tuple(axes)


def single_axis(axis: Any, name: str) -> Any:
    """`axis`, refused with TypeError if it is a tuple."""
    if isinstance(axis, Sequence):
        raise TypeError(f"`axis` of {name} must be an int or None, got {axis!r}.")
    return axis


def where_at(where: Any, storage: Any) -> Any:
    """The booleans `where` at the stored values of a storage; True for None.

    Raises:
        TypeError: if it is not boolean.
        ValueError: if it does not broadcast to the shape of the tensor.
    """
    if where is None:
        return jnp.ones(stored_values(storage).shape, bool)
    refuse_scipy("where", where)
    masked = isinstance(where, MaskedTensor)
    if is_sparse(where):
        where = as_booleans(where)
    elif not masked:
        where = jnp.asarray(where)
    if masked or not jnp.issubdtype(where.dtype, jnp.bool_):
        kind = "a MaskedTensor" if masked else where.dtype
        raise TypeError(
            f"`where` must be a boolean array, True where an entry takes part, got {kind}."
        )
    if is_sparse(where):
        if same_positions(where, storage):
            return stored_values(where)
        if is_sparse(storage):
            # Repeated positions of `where` are one entry, which takes part if any is True.
            at_positions = values_at(unique_positions(where), storage)
            if at_positions is not None:
                taken = functools.reduce(operator.and_, at_positions)
                return jnp.broadcast_to(taken, stored_values(storage).shape)
        where = as_dense(where)
    shape = tuple(storage.shape)
    try:
        where = jnp.broadcast_to(where, shape)
    except ValueError:
        raise ValueError(
            f"`where` of shape {where.shape} does not broadcast to `x` of shape {shape}."
        ) from None
    return sampled(where, storage) if is_sparse(storage) else where


def _is_of_nothing(x: Any, axes: Sequence[int]) -> bool:
    """Decide whether the axes have no entry: a mean is nan then where no row is stored."""
    return any(x.shape[axis] == 0 for axis in axes)


def became_dense(name: str, x: Any) -> str:
    kind = "a masked" if isinstance(x, MaskedTensor) else "a sparse"
    return (
        f"`{name}` made {kind} tensor of shape {tuple(x.shape)} dense, at O(size) cost: it "
        "does not decompose into results of its stored values"
    )
