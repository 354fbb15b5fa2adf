"""Functions of the order of entries: sorted, quantiles, the largest ones, the different ones.

    x = MaskedTensor([3, inf, 1, 3], [T, F, T, T])
    sort(x) = [1, 3, 3, --],  quantile(x, 0.25) = 2,  median(x) = 3,  top_k(x, 2) = [3, 3]
    unique(x) = [1, 3, --],  compressed(x) = [3, 1, 3],  nonzero(x) = ([0, 2, 3],)

Quantiles are reductions, as those of `reductions`, that need all entries in one array: sparse
storage becomes dense. The size of `unique`, `nonzero` and `compressed` depends on data; under
jit it is given as `size`, as in `jax.numpy`.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmask._base.array_types import is_nonzero, joint_dtype, typed_like
from jmask._base.types import (
    Argument,
    ArrayFunction,
    Axis,
    Mask,
    Numbers,
    Options,
    PyTree,
    Scalar,
    Tensor,
    TensorLike,
)
from jmask._base.validation import checked_choice
from jmask._ops import kernels
from jmask._ops.groups import Reduction, checked_axes, entries_of, single_axis
from jmask._ops.reductions import described
from jmask._ops.shape import dense, take_along_axis
from jmask._tensors.masked_tensor import MaskedTensor, as_masked_tensor, as_tensor, joined
from jmask._tensors.storage import entry_indices, is_sparse, stored_values

# --- quantiles ---------------------------------------------------------------------------

_QUANTILE, _MEDIAN = (
    Reduction(name, kernels.quantile, like=jnp.mean, empty=jnp.nan, dense=True)
    for name in ("quantile", "median")
)


@described
def quantile(
    x: TensorLike,
    q: Numbers,
    axis: Axis = None,
    keepdims: bool = False,
    where: Mask | None = None,
    *,
    method: str = "linear",
) -> Tensor:
    """Return the entry below which a part `q` of the valid entries lies; nan if one is nan.

    The derivative is that of the entries. Sparse storage becomes dense.

    Args:
        q: from 0 to 1; the dimensions of an array come first in the result.
        method: between two entries: "linear", "lower", "higher", "midpoint" or "nearest".

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.numpy.masked_invalid(jnp.array([4., 1., jnp.nan, 2.]))
        >>> jmask.numpy.quantile(x, 0.25).to_tensor(0)
        Array(1.5, dtype=float32)
        >>> jmask.numpy.quantile(x, jnp.array([0., 1.])).to_tensor(0)
        Array([1., 4.], dtype=float32)
    """
    checked_choice(method, "method", kernels.QUANTILE_METHODS)
    if not isinstance(q, jax.core.Tracer) and not np.all(
        (np.asarray(q) >= 0) & (np.asarray(q) <= 1)
    ):
        raise ValueError(f"`q` must be from 0 to 1, got {q}.")

    def one(q: jax.Array) -> Tensor:
        def rank(last: jax.Array) -> tuple[jax.Array, jax.Array]:
            place = jnp.where((q >= 0) & (q <= 1), q, jnp.nan) * last.astype(q.dtype)
            below = jnp.floor(place)
            return below.astype(last.dtype), place - below

        return _QUANTILE(x, axis, keepdims, where, rank=rank, method=method)

    q = jnp.asarray(q)
    q = q.astype(joint_dtype(q, jnp.float32))
    for _ in range(q.ndim):
        one = jax.vmap(one)
    return one(q)


def percentile(
    x: TensorLike,
    q: Numbers,
    axis: Axis = None,
    keepdims: bool = False,
    where: Mask | None = None,
    *,
    method: str = "linear",
) -> Tensor:
    """Return `quantile(x, q / 100)`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.numpy.masked_invalid(jnp.array([4., jnp.nan, 1.]))
        >>> jmask.numpy.percentile(x, 50).to_tensor(0)
        Array(2.5, dtype=float32)
    """
    q = q if isinstance(q, jax.Array) else np.asarray(q)
    return quantile(x, q / 100, axis, keepdims, where, method=method)


@described
def median(
    x: TensorLike,
    axis: Axis = None,
    keepdims: bool = False,
    where: Mask | None = None,
    *,
    averaged: bool = True,
) -> Tensor:
    """Return the middle valid entry, or the mean of the two in the middle; nan if one is nan.

    The derivative is that of the entries. Sparse storage becomes dense.

    Args:
        averaged: whether, of an even number, it is the mean of the two in the middle, as
            `jnp.median` has it. False gives the lower of them, as torch.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.numpy.masked_invalid(jnp.array([4., 1., jnp.nan]))
        >>> jmask.numpy.median(x).to_tensor(0)
        Array(2.5, dtype=float32)
        >>> jmask.numpy.median(x, averaged=False).to_tensor(0)
        Array(1., dtype=float32)
    """
    rank = lambda last: (last // 2, (last % 2) / 2)
    method = "linear" if averaged else "lower"
    return _MEDIAN(x, axis, keepdims, where, rank=rank, method=method)


# --- in order, the largest, the different, the valid ones ---------------------------------


def sort(a: TensorLike, axis: int | None = -1, **kwargs: Argument) -> Tensor:
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


def argsort(
    a: TensorLike, axis: int | None = -1, *, dtype: DTypeLike | None = None, **kwargs: Argument
) -> Tensor:
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


def _order(
    x: MaskedTensor, axis: int, *, descending: bool = False, stable: bool = True
) -> jax.Array:
    """Return for each place along the axis which entry belongs there; masked ones last."""
    values = lax.stop_gradient(jnp.where(x.valid, x.storage, jnp.zeros((), x.dtype)))
    position = lax.broadcasted_iota(jnp.int32, x.shape, axis % x.ndim)
    position = typed_like(position, jax.typeof(values))
    operands = [x.valid, values, position]
    if descending:
        # Backwards in and out, so that equal entries keep their order.
        operands = [jnp.flip(operand, axis) for operand in operands]
    else:
        operands[0] = ~x.valid
    order = lax.sort(operands, dimension=axis, is_stable=stable, num_keys=2)[-1]
    return jnp.flip(order, axis) if descending else order


def top_k(x: TensorLike, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    """Return the k largest valid entries along an axis, descending, and where they are.

    Args:
        x: `MaskedTensor` on any storage, or an array (a sparse tensor becomes one).
        k: how many; where fewer are valid, the others are masked.
        axis: the dimension to look along.

    Returns:
        Entries, and their indices in `axis`, with k in place of its size. Equal entries come
        in their order. The derivative is that of the entries.

    Raises:
        ValueError: if the axis has fewer than `k` entries.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.numpy.masked_invalid(jnp.array([1., jnp.inf, 3.]))
        >>> jmask.numpy.top_k(x, 2)[0]
        MaskedTensor([3.0, 1.0], dtype=float32)
        >>> jmask.numpy.top_k(x, 3)[1]
        MaskedTensor([2, 0, --], dtype=int32)
    """
    x = dense(as_tensor(x), "top_k")
    (axis,) = checked_axes((axis,), x.ndim)
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"`k`={k} must be from 0 to the size of the axis, {x.shape[axis]}.")
    order = argsort(x, axis, descending=True)
    order = jax.tree.map(lambda a: lax.slice_in_dim(a, 0, k, axis=axis), order)
    values = take_along_axis(x, order, axis)
    return values, order


def unique(
    ar: TensorLike,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    *,
    equal_nan: bool = True,
    size: int | None = None,
    fill_value: Scalar | None = None,
) -> PyTree:
    """Return the different entries, sorted; masked ones count as one, which comes last.

    Args:
        ar: `MaskedTensor` on any storage, or an array (a sparse tensor becomes one).
        return_index: whether to return the first place of each too.
        return_inverse: whether to return for each entry which of them it is.
        return_counts: whether to return how often each is there.
        axis: slices along it are compared, with their masks; None flattens the tensor.
        equal_nan: whether nan are equal.
        size: how many to return, static: fewer are padded and more cut. Needed under jit.
        fill_value: of the padding; by default it is masked, or of an array as in JAX.

    Raises:
        ValueError: if `size` is missing and the entries are traced.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> mask = jnp.array([True, False, True, True])
        >>> x = jmask.masked_tensor(jnp.array([2, 7, 1, 2]), mask)
        >>> jmask.numpy.unique(x)
        MaskedTensor([1, 2, --], dtype=int32)
        >>> jmask.numpy.unique(x, return_counts=True, size=4)[1]
        Array([1, 2, 1, 0], dtype=int32)
    """
    ar = dense(as_tensor(ar), "unique")
    masked = isinstance(ar, MaskedTensor)
    if size is None and any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(ar)):
        raise _needs_size("unique", "different")
    options: Options = {"equal_nan": equal_nan, "size": size, "fill_value": fill_value}
    wanted = (return_index, return_inverse, return_counts)
    if not masked:
        return jnp.unique(ar, *wanted, axis, **options)
    # Rows of masks and values, so that JAX compares both.
    values, shape = jnp.where(ar.valid, ar.storage, jnp.zeros((), ar.dtype)), ar.shape
    flags = ~ar.valid
    if axis is not None:
        values, flags = (jnp.moveaxis(a, axis, 0) for a in (values, flags))
    rest = values.shape[1:] if axis is not None else ()
    values, flags = (a.reshape(-1, math.prod(rest)) for a in (values, flags))
    if size is not None:
        padding = jnp.full_like(
            values[:1], 0 if fill_value is None else fill_value, shape=values.shape[1:]
        )
        is_masked = jnp.full_like(padding, fill_value is None)
        options["fill_value"] = jnp.concatenate([is_masked, padding])
    pairs = jnp.concatenate([flags.astype(values.dtype), values], axis=1)
    result, *others = jax.tree.leaves(jnp.unique(pairs, *wanted, 0, **options))
    flags, values = (a.reshape(-1, *rest) for a in jnp.split(result, 2, axis=1))
    if axis is not None:
        values, flags = (jnp.moveaxis(a, 0, axis) for a in (values, flags))
    elif return_inverse:
        place = int(return_index)
        others[place] = others[place].reshape(shape)
    result = joined(values, ~flags.astype(bool))
    return (result, *others) if others else result


def nonzero(
    x: TensorLike, *, size: int | None = None, fill_value: int | tuple[int, ...] | None = None
) -> tuple[jax.Array, ...]:
    """Return the indices of the valid entries that are not 0, an array for each dimension.

    Args:
        x: `MaskedTensor` on any storage, sparse tensor or array.
        size: how many to return, static: fewer are padded and more cut. Needed under jit.
        fill_value: the index of padding, 0 by default; a tuple of one for each dimension.

    Raises:
        ValueError: if `size` is missing and it is traced which entries are not 0; if `x` is a
            scalar, which has no index.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> mask = jnp.array([True, False, True, True])
        >>> jmask.numpy.nonzero(jmask.masked_tensor(jnp.array([2, 7, 0, 1]), mask))
        (Array([0, 3], dtype=int32),)
    """
    x = as_masked_tensor(as_tensor(x))
    if x.ndim == 0:
        raise ValueError("`x` is a scalar, whose entry has no index: take `x.reshape(1)`.")
    values, valid, places = _in_order(x)
    picked = _picked(valid & is_nonzero(values), size, "nonzero")
    fill = fill_value if isinstance(fill_value, tuple) else (fill_value or 0,) * len(places)
    return tuple(
        place.at[picked].get(mode="fill", fill_value=index)
        for place, index in zip(places, fill, strict=True)
    )


def compressed(x: TensorLike, *, size: int | None = None, fill_value: complex = 0) -> jax.Array:
    """Return the valid entries, in the order of their positions, as an array (n,).

    Args:
        x: `MaskedTensor` on any storage; of any other tensor all (stored) entries.
        size: how many to return, static: fewer are padded and more cut. Needed under jit.
        fill_value: what they are padded with.

    Raises:
        ValueError: if `size` is missing and the mask is traced.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([2, 7, 1]), jnp.array([True, False, True]))
        >>> jmask.numpy.compressed(x)
        Array([2, 1], dtype=int32)
        >>> x.compressed(size=3, fill_value=-1)
        Array([ 2,  1, -1], dtype=int32)
    """
    values, valid, _ = _in_order(as_masked_tensor(as_tensor(x)))
    picked = _picked(valid, size, "compressed")
    return values.at[picked].get(mode="fill", fill_value=fill_value)


def _in_order(x: MaskedTensor) -> tuple[jax.Array, jax.Array, Sequence[jax.Array]]:
    """Return stored values, whether they are valid, and their indices, sorted by these."""
    values = stored_values(x.storage)
    places = entry_indices(x.storage, jnp.arange(values.size))
    values, valid = values.reshape(-1), x.valid.reshape(-1)
    if not is_sparse(x.storage):
        return values, valid, places
    order = jnp.lexsort(tuple(places[::-1]))
    return values[order], valid[order], [place[order] for place in places]


def _picked(chosen: jax.Array, size: int | None, name: str) -> jax.Array:
    """Return the numbers of the `chosen`, padded with one that is out of range."""
    if size is None and isinstance(chosen, jax.core.Tracer):
        raise _needs_size(name, "valid")
    return jnp.flatnonzero(chosen, size=size, fill_value=chosen.size)


def _needs_size(name: str, which: str) -> ValueError:
    return ValueError(
        f"`size` of {name}() must be given while the tensor is traced (under jit, vmap or "
        f"grad): how many entries are {which} is not known."
    )


# --- running sums, products and the like ---------------------------------------------------
#
#     x = MaskedTensor([3, inf, 1, 3], [T, F, T, T])
#     cumsum(x) = [3, --, 4, 7]
#
# An entry that does not exist adds the identity, and stays masked.


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
    function: ArrayFunction,
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
