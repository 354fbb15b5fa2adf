"""Reductions by order, by truth and by count, and running ones, over entries that exist.

    x = MaskedTensor([3, inf, 1, 3], [T, F, T, T])
    max(x) = 3,  argmax(x) = 0,  median(x) = 3,  count(x) = 3,  cumsum(x) = [3, --, 4, 7]

An index is never that of a masked entry, also if the valid ones are -inf or nan. The
derivative of `max` and `min` is shared evenly among the valid entries that are equal to it.
"""

import functools
from typing import Any

import jax.numpy as jnp

from jmask._base.fallback import report_fallback
from jmask._ops import reduction_kernels as kernels
from jmask._ops.reduce import (
    became_dense,
    checked_axes,
    described,
    reduce,
    result_dtype,
    single_axis,
    where_at,
)
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.storage import as_dense, is_sparse


@described
def max(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:  # noqa: A001
    """The largest valid entry; nan if one is nan.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.max(jnp.array([1., 9., 3.]), where=jnp.array([True, False, True]))
        Array(3., dtype=float32)
    """
    of_all = kernels.maximum_of_all if where is None else None
    return reduce(
        kernels.maximum, x, axis, keepdims, where, name="max", plain=jnp.max, of_stored=of_all
    )


@described
def min(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:  # noqa: A001
    """The smallest valid entry; nan if one is nan.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.min(jnp.array([4., 0., 3.]), where=jnp.array([True, False, True]))
        Array(3., dtype=float32)
    """
    of_all = kernels.minimum_of_all if where is None else None
    return reduce(
        kernels.minimum, x, axis, keepdims, where, name="min", plain=jnp.min, of_stored=of_all
    )


amax, amin = max, min


@described
def argmax(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:
    """The index of the first largest valid entry along `axis`, an int or None: flattened.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([jnp.nan, -jnp.inf])
        >>> jmask.numpy.argmax(x, where=jnp.array([False, True]))
        Array(1, dtype=int32)
    """
    axis = single_axis(axis, "argmax")
    return reduce(kernels.argmax, x, axis, keepdims, where, name="argmax", plain=jnp.argmax)


@described
def argmin(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:
    """The index of the first smallest valid entry along `axis`, an int or None: flattened.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.argmin(jnp.array([0., 1.]), where=jnp.array([False, True]))
        Array(1, dtype=int32)
    """
    axis = single_axis(axis, "argmin")
    return reduce(kernels.argmin, x, axis, keepdims, where, name="argmin", plain=jnp.argmin)


@described
def all(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:  # noqa: A001
    """Whether no valid entry is 0 or False.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.all(jnp.array([1, 0]), where=jnp.array([True, False]))
        Array(True, dtype=bool)
    """
    of_all = kernels.every_of_all if where is None else None
    return reduce(
        kernels.every, x, axis, keepdims, where, name="all", plain=jnp.all, of_stored=of_all
    )


@described
def any(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:  # noqa: A001
    """Whether a valid entry is neither 0 nor False.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.any(jnp.array([0, 1]), where=jnp.array([True, False]))
        Array(False, dtype=bool)
    """
    of_all = kernels.some if where is None else None
    return reduce(
        kernels.some, x, axis, keepdims, where, name="any", plain=jnp.any, of_stored=of_all
    )


@described
def count(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:
    """How many entries are valid: an ordinary tensor, as there always is a number.

    Of an ordinary tensor all entries are.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.ones((2, 2)), jnp.array([[True], [False]]))
        >>> jmask.numpy.count(x, axis=1)
        Array([2, 0], dtype=int32)
    """
    result = reduce(kernels.number_of, x, axis, keepdims, where, name="count")
    return result.storage if isinstance(result, MaskedTensor) else result


@described
def count_nonzero(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:
    """How many valid entries are not 0.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.count_nonzero(jnp.array([0, 2]), where=jnp.array([True, False]))
        Array(0, dtype=int32)
    """
    return reduce(
        kernels.number_of_nonzero, x, axis, keepdims, where,
        name="count_nonzero", plain=jnp.count_nonzero, of_stored=kernels.number_of_nonzero,
    )  # fmt: skip


@described
def median(
    x: Any,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
    *,
    averaged: bool = True,
) -> Any:
    """The middle valid entry in order, of an even number the mean of two. nan if one is nan.

    The derivative is that of the entries. Sparse storage becomes dense.

    Args:
        averaged: whether, of an even number, it is the mean of the two in the middle, as
            `jnp.median` has it. False gives the lower of them, as torch.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> mask = jnp.array([True, True, False])
        >>> x = jmask.masked_tensor(jnp.array([4., 1., jnp.nan]), mask)
        >>> jmask.numpy.median(x).to_tensor(0)
        Array(2.5, dtype=float32)
        >>> jmask.numpy.median(x, averaged=False).to_tensor(0)
        Array(1., dtype=float32)
    """
    out = result_dtype(jnp.mean, x)
    return reduce(
        kernels.number_of, x, axis, keepdims, where,
        name="median", dtype=out, empty=jnp.nan,
        of_array=functools.partial(kernels.median, averaged=averaged),
    )  # fmt: skip


@described
def cumsum(x: Any, axis: Any = None, dtype: Any = None, where: Any = None) -> Any:
    """The running sum of the valid entries along `axis`; masked entries stay so.

    Sparse storage becomes dense. With axis None the tensor is flattened.

    Args:
        dtype: of the result; as `jnp.cumsum` by default.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.cumsum(jnp.array([1, 9, 3]), where=jnp.array([True, False, True]))
        Array([1, 1, 4], dtype=int32)
    """
    return _running("cumsum", jnp.cumsum, 0, x, axis, dtype, where)


@described
def cumprod(x: Any, axis: Any = None, dtype: Any = None, where: Any = None) -> Any:
    """The running product of the valid entries along `axis`; masked entries stay so.

    Sparse storage becomes dense. With axis None the tensor is flattened.

    Args:
        dtype: of the result; as `jnp.cumprod` by default.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.cumprod(jnp.array([2, 9, 3]), where=jnp.array([True, False, True]))
        Array([2, 2, 6], dtype=int32)
    """
    return _running("cumprod", jnp.cumprod, 1, x, axis, dtype, where)


def _running(
    name: str, function: Any, identity: int, x: Any, axis: Any, dtype: Any, where: Any
) -> Any:
    masked = isinstance(x, MaskedTensor)
    if is_sparse(x.storage if masked else x):
        report_fallback(became_dense(name, x))
        x = x.to_dense() if masked else as_dense(x)
    values = x.storage if masked else jnp.asarray(x)
    checked_axes(single_axis(axis, name), values.ndim)
    taken = where_at(where, values)
    if masked:
        taken &= x.valid
    safe = jnp.where(taken, values, jnp.asarray(identity, values.dtype))
    result = function(safe, axis=axis, dtype=dtype)
    if not masked:
        return result
    return joined(result, taken.reshape(result.shape))
