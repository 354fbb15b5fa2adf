"""The softmax family, over the valid entries of each slice, on every storage.

    softmax of [1, --, 1]  =  [0.5, --, 0.5]

These are reductions of which each entry keeps a result of its own. `jmask.nn` says what an
array with `where=` gives: 0 and nan for softmax, as in torch.masked.
"""

import jax.numpy as jnp
from jax import lax, nn
from jax.typing import DTypeLike

from jmask._base.array_types import wide
from jmask._base.types import Axis, Mask, Tensor, TensorLike
from jmask._ops import kernels, reductions
from jmask._ops.elementwise import elementwise
from jmask._ops.groups import Groups, Reduction, Results, checked_axes
from jmask._ops.reductions import described
from jmask._ops.shape import split
from jmask._tensors.masked_tensor import MaskedTensor, as_tensor

_negative, _square = elementwise(jnp.negative), elementwise(jnp.square)
_gated = elementwise(lambda x, gate: x * nn.sigmoid(gate))
_less_square = elementwise(lambda x, mean: jnp.maximum(x - jnp.square(mean), 0))
_scaled = elementwise(lambda x, mean, v, epsilon: (x - mean) * lax.rsqrt(v + epsilon))


# --- kernels: a result for each entry ----------------------------------------------------


def _softmax_of(groups: Groups, dtype: DTypeLike) -> Results:
    dtype, exists = wide(dtype), groups.any(groups.valid)
    powers = kernels.exponentials(groups, kernels.shift_of(groups, dtype), dtype)
    total = groups.sum(powers)
    # In a slice without entries 0 / 0 would be masked, but its derivative, nan, would not.
    return powers / groups.spread(jnp.where(total == 0, 1, total)), exists


def _log_softmax_of(groups: Groups, dtype: DTypeLike) -> Results:
    dtype, exists = wide(dtype), groups.any(groups.valid)
    shift = kernels.shift_of(groups, dtype)
    total = groups.sum(kernels.exponentials(groups, shift, dtype))
    shift = shift.astype(dtype) + jnp.log(jnp.where(total == 0, 1, total))
    return kernels.select(groups, 0, dtype) - groups.spread(shift), exists


def _normalized(groups: Groups, dtype: DTypeLike, ord: float, eps: float) -> Results:  # noqa: A002
    # The norm comes with a power of two, so that squares neither overflow nor vanish; `eps` is
    # scaled by it too.
    norm, exists = kernels.norm_in_parts(groups, jnp.finfo(wide(dtype)).dtype, ord)
    least = norm.factor * eps
    size = jnp.where(norm.size < least, least, norm.size)
    return norm.entries.astype(wide(dtype)) / groups.spread(size), exists


def _standardized(groups: Groups, dtype: DTypeLike, epsilon: float) -> Results:
    dtype = wide(dtype)
    center, exists = kernels.mean(groups, dtype)
    spread, _ = kernels.variance(groups, dtype, 0)
    distance = kernels.select(groups, 0, dtype) - groups.spread(center)
    return distance * groups.spread(lax.rsqrt(spread + epsilon)), exists


_SOFTMAX = Reduction("softmax", _softmax_of, nn.softmax, jnp.mean, jnp.nan, absent=0)
_LOG_SOFTMAX = Reduction(
    "log_softmax", _log_softmax_of, nn.log_softmax, jnp.mean, jnp.nan, absent=-jnp.inf
)
_NORMALIZE = Reduction("normalize", _normalized, None, jnp.mean, 0, absent=0)
_STANDARDIZE = Reduction(
    "standardize", _standardized, nn.standardize, jnp.mean, jnp.nan, absent=0
)


# --- functions ---------------------------------------------------------------------------


@described
def softmax(x: TensorLike, axis: Axis = -1, where: Mask | None = None) -> Tensor:
    """Return exp(x), divided by its sum over the valid entries of each slice along `axis`.

    Ordinary sparse tensors become dense.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.numpy.masked_invalid(jnp.array([1., jnp.nan, 1.]))
        >>> jmask.nn.softmax(x).to_tensor(0)
        Array([0.5, 0. , 0.5], dtype=float32)
    """
    return _SOFTMAX(x, axis, False, where)


@described
def softmin(x: TensorLike, axis: Axis = -1, where: Mask | None = None) -> Tensor:
    """Return `softmax` of -x.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.nn.softmin(jnp.array([2., 2., 0.]), where=jnp.array([True, True, False]))
        Array([0.5, 0.5, 0. ], dtype=float32)
    """
    return softmax(_negative(x), axis, where)


@described
def log_softmax(x: TensorLike, axis: Axis = -1, where: Mask | None = None) -> Tensor:
    """Return the logarithm of `softmax`, without overflow.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.nn.log_softmax(jnp.array([5., 9.]), where=jnp.array([True, False]))
        Array([  0., -inf], dtype=float32)
    """
    return _LOG_SOFTMAX(x, axis, False, where)


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
        >>> import jax.numpy as jnp, jmask
        >>> scores = jnp.array([[1., 1.], [2., 3.]])
        >>> mask = jnp.array([[True, True], [False, False]])
        >>> jmask.nn.attention_weights(scores, mask).to_tensor(0)
        Array([[0.5, 0.5],
               [0. , 0. ]], dtype=float32)
    """
    if not isinstance(scores, MaskedTensor):
        scores = MaskedTensor(scores)
    return softmax(scores, axis, mask)


@described
def normalize(
    x: TensorLike,
    ord: float | None = 2,  # noqa: A002
    axis: Axis = -1,
    eps: float = 1e-12,
    where: Mask | None = None,
) -> Tensor:
    """Return x divided by the norm of the valid entries of each slice, or by `eps` if less.

    Ordinary sparse tensors become dense.

    Args:
        ord: of the norm, as in `jmask.numpy.norm`.
        eps: the least number to divide by.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.nn.normalize(jnp.array([3., 9., 4.]), where=jnp.array([True, False, True]))
        Array([0.6, 0. , 0.8], dtype=float32)
    """
    return _NORMALIZE(x, axis, False, where, ord=2 if ord is None else ord, eps=eps)


@described
def standardize(
    x: TensorLike,
    axis: Axis = -1,
    mean: TensorLike | None = None,
    variance: TensorLike | None = None,
    epsilon: float = 1e-5,
    where: Mask | None = None,
) -> Tensor:
    """Return x less the mean of the valid entries of each slice, by their standard deviation.

    Ordinary sparse tensors become dense.

    Args:
        mean: in place of that of the entries; it broadcasts to `x`.
        variance: in place of that of the entries; it broadcasts to `x`.
        epsilon: added to the variance before the root.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.nn.standardize(jnp.array([1., 9., 3.]), where=jnp.array([True, False, True]))
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
    return _STANDARDIZE(x, axis, False, where, epsilon=epsilon)


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
