"""Functions with the names of `jax.nn`, over the entries that exist.

    x = MaskedTensor([1, nan, 1], [T, F, T])
    softmax(x) = [0.5, --, 0.5]       relu(x) = [1, --, 1]

For a slice with no valid entry a `MaskedTensor` gives masked entries with derivative 0. An
array with `where=` gives what `torch.masked` does: nan for the softmax family, 0 for
`normalize`; in other slices the entries where it is False are 0 (`log_softmax`: -inf). Masked
tensors on sparse storage stay sparse: their slices are segments of the stored values.

    >>> import jax.numpy as jnp, jmask
    >>> x = jmask.numpy.masked_invalid(jnp.array([1., jnp.nan, 1.]))
    >>> jmask.nn.softmax(x).to_tensor(0)
    Array([0.5, 0. , 0.5], dtype=float32)
    >>> jmask.nn.log_softmax(jnp.array([5., 9.]), where=jnp.array([True, False]))
    Array([  0., -inf], dtype=float32)
    >>> jmask.nn.standardize(jnp.array([1., 9., 3.]), where=jnp.array([True, False, True]))
    Array([-0.999995,  0.      ,  0.999995], dtype=float32)
"""

from __future__ import annotations as _annotations

import jax.numpy as _jnp
from jax import nn as _nn

from jmask._base import types as _types
from jmask._ops import formulas as _of
from jmask._ops.lift import adopted as _adopted
from jmask._ops.lift import each as _each
from jmask._ops.lift import entrywise as _entrywise
from jmask._ops.products import dot_product_attention as dot_product_attention
from jmask._ops.reduce import checked_axes as _checked_axes
from jmask._ops.reduce import reduces as _reduces
from jmask._tensors.masked_tensor import MaskedTensor as _MaskedTensor
from jmask._tensors.masked_tensor import as_masked_tensor as _as_masked_tensor
from jmask._tensors.masked_tensor import as_tensor as _as_tensor
from jmask._tensors.masked_tensor import checked_mask as _checked_mask
from jmask.numpy import add as _add
from jmask.numpy import einsum as _einsum
from jmask.numpy import logsumexp as logsumexp
from jmask.numpy import negative as _negative
from jmask.numpy import split as _split

# Of slices: a result for each entry, or one for the slice (`logmeanexp`).
softmax = _reduces(_of.softmax, _nn.softmax, empty=_jnp.nan, fill=0.0, like=_jnp.mean)
log_softmax = _reduces(
    _of.log_softmax, _nn.log_softmax, empty=_jnp.nan, fill=-_jnp.inf, like=_jnp.mean
)
normalize = _reduces(_of.normalize, fill=0.0, like=_jnp.mean)
standardize = _reduces(
    _of.standardize, _nn.standardize, empty=_jnp.nan, fill=0.0, like=_jnp.mean
)
logmeanexp = _reduces(
    _of.logmeanexp, _nn.logmeanexp, empty=-_jnp.inf, like=_jnp.mean, arrays_too=True
)

# Activations.
relu, relu6, celu, elu, selu = _each(
    _entrywise, _nn.relu, _nn.relu6, _nn.celu, _nn.elu, _nn.selu
)
gelu, mish, silu, sigmoid = _each(_entrywise, _nn.gelu, _nn.mish, _nn.silu, _nn.sigmoid)
hard_sigmoid, hard_silu = _each(_entrywise, _nn.hard_sigmoid, _nn.hard_silu)
hard_tanh, tanh = _each(_entrywise, _nn.hard_tanh, _jnp.tanh)
log_sigmoid, soft_sign = _each(_entrywise, _nn.log_sigmoid, _nn.soft_sign)
softplus, squareplus = _each(_entrywise, _nn.softplus, _nn.squareplus)
swish, hard_swish = silu, hard_silu
leaky_relu = _entrywise(_nn.leaky_relu, vanishes=((0,),))  # for slopes that are arrays


def softmin(
    x: _types.TensorLike, axis: _types.Axis = -1, where: _types.StorageLike | None = None
) -> _types.Tensor:
    """Return `softmax` of -x.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.nn.softmin(jnp.array([2., 2., 0.]), where=jnp.array([True, True, False]))
        Array([0.5, 0.5, 0. ], dtype=float32)
    """
    return softmax(_negative(x), axis, where=where)


def attention_weights(
    scores: _types.TensorLike, mask: _types.StorageLike | None = None, axis: int = -1
) -> _MaskedTensor:
    """Return the softmax of scores over the keys that a query may attend to.

    A query with no key has masked weights, and sends derivative 0 to its scores.

    Args:
        scores (..., queries, keys): `MaskedTensor` or an array.
        mask: booleans that broadcast to the shape of `scores`, True for keys to attend to.
        axis: the axis of the keys.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> scores = jnp.array([[1., 1.], [2., 3.]])
        >>> mask = jnp.array([[True, True], [False, False]])
        >>> jmask.nn.attention_weights(scores, mask).to_tensor(0)
        Array([[0.5, 0.5],
               [0. , 0. ]], dtype=float32)
    """
    mask = None if mask is None else _checked_mask(mask)
    return softmax(_as_masked_tensor(_adopted(scores)), axis, where=mask)


def linear(
    x: _types.TensorLike, weight: _types.TensorLike, bias: _types.TensorLike | None = None
) -> _types.Tensor:
    """Return `x @ weight.T + bias`, each of them masked or not.

    Args:
        x (..., k): inputs.
        weight (m, k): as in torch, one row for each output.
        bias (m,): added where the product exists.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., jnp.inf]), jnp.array([True, False]))
        >>> jmask.nn.linear(x, jnp.array([[2., 3.]]), jnp.array([1.])).to_tensor(0)
        Array([3.], dtype=float32)
    """
    product = _einsum("...k,mk->...m", x, weight)
    return product if bias is None else _add(product, bias)


_gated = _entrywise(lambda x, gate: x * _nn.sigmoid(gate))


def glu(x: _types.TensorLike, axis: int = -1) -> _types.Tensor:
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
    x = _as_tensor(_adopted(x))
    (axis,) = _checked_axes((axis,), len(x.shape))
    if x.shape[axis] % 2:
        raise ValueError(f"`x` of shape {tuple(x.shape)} cannot be halved along axis {axis}.")
    return _gated(*_split(x, 2, axis))
