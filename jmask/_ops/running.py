"""Running sums, products and the like along an axis, over the entries that exist.

    x = MaskedTensor([3, inf, 1, 3], [T, F, T, T])
    cumsum(x) = [3, --, 4, 7]

An entry that does not exist adds the identity, and stays masked. Sparse storage becomes dense.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jmask._base.types import Axis, Mask, Tensor, TensorLike
from jmask._ops import kernels
from jmask._ops.groups import checked_axes, entries_of, single_axis
from jmask._ops.reductions import described
from jmask._ops.shape import dense
from jmask._tensors.masked_tensor import MaskedTensor, as_tensor, joined


@described
def cumsum(
    x: TensorLike, axis: Axis = None, dtype: DTypeLike | None = None, where: Mask | None = None
) -> Tensor:
    """Return the running sum of the valid entries along `axis`; masked entries stay so.

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
def cumprod(
    x: TensorLike, axis: Axis = None, dtype: DTypeLike | None = None, where: Mask | None = None
) -> Tensor:
    """Return the running product of the valid entries along `axis`; masked entries stay so.

    Sparse storage becomes dense. With axis None the tensor is flattened.

    Args:
        dtype: of the result; as `jnp.cumprod` by default.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.cumprod(jnp.array([2, 9, 3]), where=jnp.array([True, False, True]))
        Array([2, 2, 6], dtype=int32)
    """
    return _running("cumprod", jnp.cumprod, 1, x, axis, dtype, where)


@described
def cumlogsumexp(x: TensorLike, axis: Axis = None, where: Mask | None = None) -> Tensor:
    """Return the log of the running sum of exp of the valid entries along `axis`.

    Masked entries stay so. Sparse storage becomes dense. With axis None the tensor is
    flattened.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([1000., 1e30, -jnp.inf])
        >>> jmask.numpy.cumlogsumexp(x, where=jnp.array([True, False, True]))
        Array([1000., 1000., 1000.], dtype=float32)
    """
    x = as_tensor(x)
    x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(kernels.inexact(x.dtype))
    return _running("cumlogsumexp", _cumlogsumexp, -jnp.inf, x, axis, None, where)


def _cumlogsumexp(x: jax.Array, axis: int | None, dtype: None) -> jax.Array:
    x = x.reshape(-1) if axis is None else x
    axis = (axis or 0) % x.ndim
    # With -inf itself, derivatives of the function are nan.
    adds = x != -jnp.inf
    result = lax.cumlogsumexp(jnp.where(adds, x, jnp.finfo(x.dtype).min), axis)
    return jnp.where(lax.cummax(adds.astype(jnp.int8), axis) > 0, result, -jnp.inf)


def _running(
    name: str,
    function: Callable[..., jax.Array],
    identity: float,
    x: TensorLike,
    axis: Axis,
    dtype: DTypeLike | None,
    where: Mask,
) -> Tensor:
    x = dense(as_tensor(x), name)
    checked_axes(single_axis(axis, name), x.ndim)
    values, taken = entries_of(x, where)
    safe = jnp.where(taken, values, jnp.asarray(identity, values.dtype))
    result = function(safe, axis=axis, dtype=dtype)
    if not isinstance(x, MaskedTensor):
        return result
    return joined(result, taken.reshape(result.shape))
