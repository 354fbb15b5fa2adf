"""The softmax family, over the valid entries of each slice, on every storage.

    softmax of [1, --, 1]  =  [0.5, --, 0.5]

`jmask.nn` says what an array with `where=` gives.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax, nn
from jax.typing import DTypeLike

from jmask._base.array_types import wide
from jmask._base.types import Axis, Mask, Tensor, TensorLike
from jmask._ops import kernels, reductions
from jmask._ops.elementwise import elementwise
from jmask._ops.groups import (
    NOT_DECOMPOSED,
    Groups,
    checked_axes,
    entries_of,
    grouped,
    result_dtype,
)
from jmask._ops.shape import dense, split
from jmask._tensors.masked_tensor import MaskedTensor, as_tensor, joined
from jmask._tensors.storage import is_sparse, with_stored_values


def softmax(x: TensorLike, axis: Axis = -1, where: Mask | None = None) -> Tensor:
    """exp(x), divided by its sum over the valid entries of each slice along `axis`.

    Args:
        x: `MaskedTensor` on any storage, or an array (a sparse tensor becomes one).
        axis: an int, a tuple of ints or None, which is all axes.
        where: booleans that broadcast to the shape of `x`; other entries take no part. A
            `MaskedTensor` intersects them with its mask.

    Raises:
        TypeError: if `axis` is no int or tuple of ints, or `where` is not boolean.
        ValueError: if `axis` is out of bounds or there twice, or `where` does not
            broadcast.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> from jmask import nn
        >>> mask = jnp.array([True, False, True])
        >>> x = jmask.masked_tensor(jnp.array([1., jnp.nan, 1.]), mask)
        >>> nn.softmax(x).to_tensor(0)
        Array([0.5, 0. , 0.5], dtype=float32)
    """
    return _along(_softmax, x, axis, where, nn.softmax, absent=0, empty=jnp.nan)


def softmin(x: TensorLike, axis: Axis = -1, where: Mask | None = None) -> Tensor:
    """`softmax` of -x.

    Args:
        x, axis, where: as for `softmax`, and so are the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmask import nn
        >>> nn.softmin(jnp.array([2., 2., 0.]), where=jnp.array([True, True, False]))
        Array([0.5, 0.5, 0. ], dtype=float32)
    """
    return softmax(_negative(x), axis, where)


def log_softmax(x: TensorLike, axis: Axis = -1, where: Mask | None = None) -> Tensor:
    """The logarithm of `softmax`, without overflow.

    Args:
        x, axis, where: as for `softmax`, and so are the errors.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmask import nn
        >>> nn.log_softmax(jnp.array([5., 9.]), where=jnp.array([True, False]))
        Array([  0., -inf], dtype=float32)
    """
    return _along(_log_softmax, x, axis, where, nn.log_softmax, absent=-jnp.inf, empty=jnp.nan)


def attention_weights(
    scores: TensorLike, mask: Mask | None = None, axis: Axis = -1
) -> MaskedTensor:
    """`softmax` of scores over the keys a query may attend to.

    A query with no key has masked weights, and sends derivative 0 to its scores.

    Args:
        scores (..., queries, keys): `MaskedTensor` or an array.
        mask: booleans that broadcast to the shape of `scores`, True for keys to attend to.
        axis: of the keys.

    Raises:
        TypeError, ValueError: as for `softmax`, where `mask` is called `where`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmask import nn
        >>> scores = jnp.array([[1., 1.], [2., 3.]])
        >>> mask = jnp.array([[True, True], [False, False]])
        >>> nn.attention_weights(scores, mask).to_tensor(0)
        Array([[0.5, 0.5],
               [0. , 0. ]], dtype=float32)
    """
    if not isinstance(scores, MaskedTensor):
        scores = MaskedTensor(scores)
    return softmax(scores, axis, mask)


def normalize(
    x: TensorLike,
    ord: float | None = 2,  # noqa: A002
    axis: Axis = -1,
    eps: float = 1e-12,
    where: Mask | None = None,
) -> Tensor:
    """x divided by the norm of the valid entries of each slice, or by `eps` if it is less.

    Args:
        x: `MaskedTensor` on any storage, or an array (a sparse tensor becomes one).
        ord: of the norm, as in `jmask.numpy.norm`.
        axis: as for `softmax`.
        eps: the least number to divide by.
        where: as for `softmax`.

    Raises:
        TypeError, ValueError: as for `softmax`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmask import nn
        >>> nn.normalize(jnp.array([3., 9., 4.]), where=jnp.array([True, False, True]))
        Array([0.6, 0. , 0.8], dtype=float32)
    """
    order = 2 if ord is None else ord

    def kernel(groups: Groups, dtype: DTypeLike) -> Tensor:
        # The norm comes with a power of two, so that squares neither overflow nor vanish; `eps`
        # is scaled by it too.
        norm, _ = kernels.norm_in_parts(groups, jnp.finfo(dtype).dtype, order)
        least = norm.factor * eps
        size = jnp.where(norm.size < least, least, norm.size)
        return norm.entries.astype(dtype) / groups.spread(size)

    return _along(kernel, x, axis, where, None, absent=0, empty=0)


def standardize(
    x: TensorLike,
    axis: Axis = -1,
    mean: TensorLike | None = None,
    variance: TensorLike | None = None,
    epsilon: float = 1e-5,
    where: Mask | None = None,
) -> Tensor:
    """Return x less the mean of the valid entries of each slice, by their standard deviation.

    Args:
        x: `MaskedTensor` on any storage, or an array (a sparse tensor becomes one).
        axis: as for `softmax`.
        mean: in place of that of the entries; it broadcasts to `x`.
        variance: in place of that of the entries; it broadcasts to `x`.
        epsilon: added to the variance before the root.
        where: as for `softmax`.

    Raises:
        TypeError, ValueError: as for `softmax`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jmask import nn
        >>> nn.standardize(jnp.array([1., 9., 3.]), where=jnp.array([True, False, True]))
        Array([-0.999995,  0.      ,  0.999995], dtype=float32)
    """
    if mean is not None or variance is not None:
        if mean is None:
            mean = reductions.mean(x, axis, keepdims=True, where=where)
        if variance is None:
            variance = reductions.mean(_square(x), axis, keepdims=True, where=where)
            # E[x**2] - mean**2 about the mean that was given, as in jax.nn.standardize; it is
            # cut at 0, which rounding may cross.
            variance = _less_square(variance, mean)
        return _scaled(x, mean, variance, epsilon=epsilon)

    def kernel(groups: Groups, dtype: DTypeLike) -> Tensor:
        center, _ = kernels.mean(groups, dtype)
        spread, _ = kernels.variance(groups, dtype, 0)
        distance = kernels.select(groups, 0, dtype) - groups.spread(center)
        return distance * groups.spread(lax.rsqrt(spread + epsilon))

    plain = functools.partial(nn.standardize, epsilon=epsilon)
    return _along(kernel, x, axis, where, plain, absent=0, empty=jnp.nan)


def glu(x: TensorLike, axis: int = -1) -> Tensor:
    """Return the first half of x along an axis, times the sigmoid of the second.

    Args:
        x: `MaskedTensor` on any storage, or an array; an entry exists where both do.
        axis: the dimension that is halved, of even size.

    Raises:
        ValueError: if the size is odd.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([2., 3., 0., 0.]), jnp.array([1, 1, 1, 0]) > 0)
        >>> jmask.nn.glu(x)
        MaskedTensor([1.0, --], dtype=float32)
    """
    x = as_tensor(x)
    (axis,) = checked_axes((axis,), len(x.shape))
    if x.shape[axis] % 2:
        raise ValueError(f"`x` of shape {tuple(x.shape)} cannot be halved along axis {axis}.")
    return _gated(*split(x, 2, axis))


_negative, _square = elementwise(jnp.negative), elementwise(jnp.square)
_gated = elementwise(lambda x, gate: x * nn.sigmoid(gate))
_less_square = elementwise(lambda x, mean: jnp.maximum(x - jnp.square(mean), 0))
_scaled = elementwise(lambda x, mean, v, epsilon: (x - mean) * lax.rsqrt(v + epsilon))


def _softmax(groups: Groups, dtype: DTypeLike) -> Tensor:
    powers = kernels.exponentials(groups, kernels.shift_of(groups, dtype), dtype)
    total = groups.sum(powers)
    # In a slice without entries 0 / 0 would be masked, but its derivative, nan, would not.
    return powers / groups.spread(jnp.where(total == 0, 1, total))


def _log_softmax(groups: Groups, dtype: DTypeLike) -> Tensor:
    shift = kernels.shift_of(groups, dtype)
    total = groups.sum(kernels.exponentials(groups, shift, dtype))
    shift = shift.astype(dtype) + jnp.log(jnp.where(total == 0, 1, total))
    return kernels.select(groups, 0, dtype) - groups.spread(shift)


def _along(
    kernel: Callable[[Any, Any], Any],
    x: TensorLike,
    axis: Axis,
    where: Mask,
    plain: Callable[..., Any] | None,
    *,
    absent: float,
    empty: float,
) -> Tensor:
    """The entries that `kernel` gives for the groups along `axis`, in the shape of `x`.

    Args:
        plain: the function of JAX for an array without `where`; the kernel if None.
        absent: the result of an array at entries left out by `where`.
        empty: the same in slices of which no entry takes part.
    """
    x = as_tensor(x)
    x = dense(x, kernel.__name__.lstrip("_"), NOT_DECOMPOSED) if is_sparse(x) else x
    axes = checked_axes(axis, len(x.shape))
    masked = isinstance(x, MaskedTensor)
    # Where nothing is masked, the bits are those of JAX.
    if plain is not None and not masked and where is None:
        return plain(x, axis=axes)
    storage, valid = entries_of(x, where)
    groups = grouped(storage, valid, axes)
    out = result_dtype(jnp.mean, x)
    result = kernel(groups, wide(out)).astype(out)
    if masked:
        result = with_stored_values(storage, groups.restored(result))
        return joined(result, valid)
    # An entry that is left out differs from a slice without entries: 0 and nan for softmax, as
    # in torch.masked.
    exists = groups.spread(groups.any(valid))
    return jnp.where(valid, result, jnp.where(exists, absent, empty).astype(out))
