"""Put entries in order: sorted, the largest, the different, the valid ones, running sums.

    x = MaskedTensor([3, inf, 1, 3], [T, F, T, T])
    sort(x) = [1, 3, 3, --],  top_k(x, 2) = [3, 3],  cumsum(x) = [3, --, 4, 7]
    unique(x) = [1, 3, --],  compressed(x) = [3, 1, 3],  nonzero(x) = ([0, 2, 3],)

Sparse storage becomes dense, with the warning. The size of `unique`, `nonzero` and `compressed`
depends on data; under jit it is given as `size`, as in `jax.numpy`.
"""

import functools
import inspect
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmask._base.array_types import is_nonzero, typed_like
from jmask._base.types import (
    Argument,
    Function,
    Mask,
    Options,
    PyTree,
    Scalar,
    Tensor,
    TensorLike,
)
from jmask._ops.lift import adopted, dense
from jmask._ops.reduce import checked_axes, refuse_output, result_dtype, valid_entries
from jmask._ops.selection import take_along_axis
from jmask._tensors.masked_tensor import MaskedTensor, as_masked_tensor, as_tensor, joined
from jmask._tensors.storage import entry_indices, is_sparse, stored_values

# --- sorted ------------------------------------------------------------------------------


def sort(a: TensorLike, axis: int | None = -1, **kwargs: Argument) -> Tensor:
    """Sort as `jax.numpy.sort`, masked entries last, in ascending and in descending order.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([3, 1, 2]), jnp.array([True, False, True]))
        >>> jmask.numpy.sort(x), jmask.numpy.argsort(x)
        (MaskedTensor([2, 3, --], dtype=int32), MaskedTensor([2, 0, --], dtype=int32))
    """
    a = dense(adopted(a), "sort")
    if not isinstance(a, MaskedTensor):
        return jnp.sort(a, axis, **kwargs)
    a, axis = _along(a, axis)
    return take_along_axis(a, _order(a, axis, **kwargs), axis)


def argsort(
    a: TensorLike, axis: int | None = -1, *, dtype: DTypeLike | None = None, **kwargs: Argument
) -> Tensor:
    """Return what `sort` takes, as `jax.numpy.argsort`; masked where that entry is masked."""
    a = dense(adopted(a), "argsort")
    if not isinstance(a, MaskedTensor):
        return jnp.argsort(a, axis, dtype=dtype, **kwargs)
    a, axis = _along(a, axis)
    order = _order(a, axis, **kwargs)
    valid = jnp.take_along_axis(a.valid, order, axis)
    return joined(order if dtype is None else order.astype(dtype), valid)


def _along(x: MaskedTensor, axis: int | None) -> tuple[MaskedTensor, int]:
    if axis is None:
        return joined(x.storage.reshape(-1), x.valid.reshape(-1)), 0
    return x, checked_axes((axis,), x.ndim)[0]


def _order(
    x: MaskedTensor, axis: int, *, descending: bool = False, stable: bool = True
) -> jax.Array:
    """Return for each place along the axis which entry belongs there; masked ones last."""
    values = lax.stop_gradient(jnp.where(x.valid, x.storage, jnp.zeros((), x.dtype)))
    position = lax.broadcasted_iota(jnp.int32, x.shape, axis)
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

    Equal entries come in their order; where fewer than k are valid, the others are masked. The
    derivative is that of the entries.

    Raises:
        ValueError: if the axis has fewer than `k` entries.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.numpy.masked_invalid(jnp.array([1., jnp.inf, 3.]))
        >>> jmask.numpy.top_k(x, 2)[0]
        MaskedTensor([3.0, 1.0], dtype=float32)
    """
    x = dense(as_tensor(adopted(x)), "top_k")
    (axis,) = checked_axes((axis,), x.ndim)
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"`k`={k} must be from 0 to the size of the axis, {x.shape[axis]}.")
    order = argsort(x, axis, descending=True)
    order = jax.tree.map(lambda a: lax.slice_in_dim(a, 0, k, axis=axis), order)
    return take_along_axis(x, order, axis), order


# --- the different, the valid ones -------------------------------------------------------


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

    Arguments are those of `jax.numpy.unique`. Padding is masked unless `fill_value` is given.

    Raises:
        ValueError: if `size` is missing and the entries are traced.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> mask = jnp.array([True, False, True, True])
        >>> jmask.numpy.unique(jmask.masked_tensor(jnp.array([2, 7, 1, 2]), mask))
        MaskedTensor([1, 2, --], dtype=int32)
    """
    ar = dense(as_tensor(adopted(ar)), "unique")
    if size is None and any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(ar)):
        raise _needs_size("unique", "different")
    options: Options = {"equal_nan": equal_nan, "size": size, "fill_value": fill_value}
    returns = (return_index, return_inverse, return_counts)
    if not isinstance(ar, MaskedTensor):
        return jnp.unique(ar, *returns, axis, **options)
    # Rows of a mask and values, so that JAX compares both.
    values, flags = jnp.where(ar.valid, ar.storage, jnp.zeros((), ar.dtype)), ~ar.valid
    if axis is not None:
        values, flags = (jnp.moveaxis(a, axis, 0) for a in (values, flags))
    rest = values.shape[1:] if axis is not None else ()
    values, flags = (a.reshape(-1, math.prod(rest)) for a in (values, flags))
    if size is not None:
        padding = jnp.full(values.shape[1:], 0 if fill_value is None else fill_value, ar.dtype)
        is_masked = jnp.full_like(padding, fill_value is None)
        options["fill_value"] = jnp.concatenate([is_masked, padding])
    pairs = jnp.concatenate([flags.astype(values.dtype), values], axis=1)
    result, *others = jax.tree.leaves(jnp.unique(pairs, *returns, 0, **options))
    flags, values = (a.reshape(-1, *rest) for a in jnp.split(result, 2, axis=1))
    if axis is not None:
        values, flags = (jnp.moveaxis(a, 0, axis) for a in (values, flags))
    elif return_inverse:
        others[return_index] = others[return_index].reshape(ar.shape)
    result = joined(values, ~flags.astype(bool))
    return (result, *others) if others else result


def nonzero(
    a: TensorLike, *, size: int | None = None, fill_value: int | tuple[int, ...] | None = None
) -> tuple[jax.Array, ...]:
    """Return the indices of the valid entries that are not 0, an array for each dimension.

    Arguments are those of `jax.numpy.nonzero`.

    Raises:
        ValueError: if `size` is missing and it is traced which entries are not 0; if `a` is a
            scalar, which has no index.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> mask = jnp.array([True, False, True, True])
        >>> jmask.numpy.nonzero(jmask.masked_tensor(jnp.array([2, 7, 0, 1]), mask))
        (Array([0, 3], dtype=int32),)
    """
    x = as_masked_tensor(as_tensor(adopted(a)))
    if x.ndim == 0:
        raise ValueError("`a` is a scalar, whose entry has no index: take `a.reshape(1)`.")
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
    """
    values, valid, _ = _in_order(as_masked_tensor(as_tensor(adopted(x))))
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


# --- running sums, products and the like -------------------------------------------------


def accumulates(of_jax: Function, identity: ArrayLike) -> Function:
    """Lift a running reduction: an entry that is not valid adds the identity, and stays masked.

    With axis None the tensor is flattened. Sparse storage becomes dense.
    """
    signature = inspect.signature(of_jax)
    first, *_ = signature.parameters

    @functools.wraps(of_jax)
    def lifted(*args: Argument, where: Mask | None = None, **kwargs: Argument) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        options = bound.arguments
        x = dense(as_tensor(adopted(options.pop(first))), of_jax.__name__)
        refuse_output(options)
        axis = options.get("axis")
        if isinstance(axis, Sequence):
            raise TypeError(
                f"`axis` of {of_jax.__name__} must be an int or None, got {axis!r}."
            )
        checked_axes(axis, x.ndim)
        if where is None and not isinstance(x, MaskedTensor):
            return of_jax(x, **options)
        taken = valid_entries(x, where)
        dtype = result_dtype(jnp.mean, x.dtype) if isinstance(identity, float) else x.dtype
        values = taken.storage.astype(dtype)
        values = jnp.where(taken.valid, values, jnp.asarray(identity, dtype))
        result = of_jax(values, **options)
        if not isinstance(x, MaskedTensor):
            return result
        return joined(result, taken.valid.reshape(result.shape))

    return lifted


def cumlogsumexp(x: TensorLike, axis: int | None = None) -> jax.Array:
    """Return the log of the running sum of exp of the valid entries along `axis`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([1000., 1e30, -jnp.inf])
        >>> jmask.numpy.cumlogsumexp(x, where=jnp.array([True, False, True]))
        Array([1000., 1000., 1000.], dtype=float32)
    """
    x = x.astype(result_dtype(jnp.mean, x.dtype))
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis % x.ndim)
    # With -inf itself, derivatives of the function are nan.
    adds = x != -jnp.inf
    result = lax.cumlogsumexp(jnp.where(adds, x, jnp.finfo(x.dtype).min), axis)
    exists = lax.cummax(adds.astype(jnp.int8), axis) > 0
    return jnp.where(exists, result, jnp.asarray(-jnp.inf, x.dtype))
