"""Sort, select and count entries; running sums; differences, covariance and comparisons.

    x = MaskedTensor([3, inf, 1, 3], [T, F, T, T])
    sort(x) = [1, 3, 3, --],  top_k(x, 2) = [3, 3],  cumsum(x) = [3, --, 4, 7]
    unique(x) = [1, 3, --],  compressed(x) = [3, 1, 3],  nonzero(x) = ([0, 2, 3],)
    diff(x) = [--, --, 2],  allclose(x, x) = True        a pair exists where both do
    nansum([1, nan, 3]) = 4                              nan takes no part, as masked entries

Sparse storage becomes dense, with the warning. The size of `unique`, `nonzero` and `compressed`
depends on data; under jit it is given as `size`, as in `jax.numpy`. Results that decide
(`allclose`, `array_equal`) always exist, so they are arrays.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmask._base.array_types import is_nonzero, joint_dtype, wide
from jmask._base.shardings import typed_like
from jmask._base.types import Argument, Dense, Function, PyTree, Scalar, Tensor, TensorLike
from jmask._base.validation import checked_integer
from jmask._ops.lift import (
    adopted,
    contracts,
    dense,
    entrywise,
    extends,
    filled,
    is_hidden,
    moves,
)
from jmask._ops.reduce import checked_axes, divide, result_dtype, valid_entries
from jmask._ops.selection import take_along_axis
from jmask._tensors.masked_tensor import MaskedTensor, as_masked_tensor, as_tensor, joined
from jmask._tensors.storage import as_dense, entry_indices, is_sparse, stored_values


@extends(jnp.sort)
def sort(a: MaskedTensor, axis: int | None = -1, **options: Argument) -> MaskedTensor:
    """Sort with masked entries last, in ascending and in descending order."""
    a, axis = _along(a, axis)
    return take_along_axis(a, _order(a, axis, **options), axis)


@extends(jnp.argsort)
def argsort(
    a: MaskedTensor, axis: int | None = -1, dtype: DTypeLike | None = None, **options: Argument
) -> MaskedTensor:
    """Return the indices that sort an axis, masked where their entries are masked."""
    a, axis = _along(a, axis)
    order = _order(a, axis, **options)
    valid = jnp.take_along_axis(a.valid, order, axis)
    return joined(order if dtype is None else order.astype(dtype), valid)


def _along(x: MaskedTensor, axis: int | None) -> tuple[MaskedTensor, int]:
    if axis is None:
        return joined(as_dense(x.storage).reshape(-1), x.valid.reshape(-1)), 0
    return x, checked_axes((axis,), x.ndim)[0]


def _order(
    x: MaskedTensor, axis: int, *, descending: bool = False, stable: bool = True
) -> jax.Array:
    """Return for each place along the axis which entry belongs there; masked ones last."""
    values = lax.stop_gradient(jnp.where(x.valid, as_dense(x.storage), jnp.zeros((), x.dtype)))
    position = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    operands = [x.valid, values, typed_like(position, values)]
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
    derivative goes to the entries taken.

    Raises:
        ValueError: if the axis has fewer than `k` entries.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.top_k(jmask.numpy.masked_invalid(jnp.array([1., jnp.inf, 3.])), 2)[0]
        MaskedTensor([3.0, 1.0], dtype=float32)
    """
    x = dense(as_tensor(adopted(x)), "top_k")
    (axis,), k = checked_axes((axis,), x.ndim), checked_integer("k", k)
    if not 0 <= k <= x.shape[axis]:
        raise ValueError(f"`k`={k} must be from 0 to the size of the axis, {x.shape[axis]}.")
    order = argsort(x, axis, descending=True)
    order = jax.tree.map(lambda a: lax.slice_in_dim(a, 0, k, axis=axis), order)
    return take_along_axis(x, order, axis), order


@extends(jnp.unique)
def unique(
    ar: MaskedTensor,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: int | None = None,
    fill_value: Scalar | None = None,
    **options: Argument,
) -> PyTree:
    """Return the distinct entries: masked ones are one of them, which comes last.

    Padding is masked unless `fill_value` is given.
    """
    x, along = _along(ar, axis)
    # Rows of a mask and values, so that JAX compares both.
    pair = [jnp.moveaxis(a, along, 0) for a in (is_hidden(x), as_dense(filled(x)))]
    count, *row = pair[0].shape
    size = math.prod(row)
    rows = jnp.concatenate([a.reshape(count, size).astype(x.dtype) for a in pair], axis=1)
    fills = (fill_value is None, 0 if fill_value is None else fill_value)
    padding = jnp.repeat(jnp.asarray(fills, x.dtype), size)
    returned = return_index, return_inverse, return_counts
    result = jnp.unique(rows, *returned, axis=0, fill_value=padding, **options)
    result, *others = jax.tree.leaves(result)
    parts = [a.reshape(-1, *row) for a in jnp.split(result, 2, axis=1)]
    hidden, values = (jnp.moveaxis(a, 0, along) for a in parts)
    if axis is None and return_inverse:
        others[return_index] = others[return_index].reshape(ar.shape)
    result = joined(values, ~hidden.astype(bool))
    return (result, *others) if others else result


def nonzero(
    a: TensorLike, *, size: int | None = None, fill_value: int | tuple[int, ...] | None = None
) -> tuple[jax.Array, ...]:
    """Return the indices of the valid entries that are not 0, an array for each dimension.

    It has the arguments and errors of `jax.numpy.nonzero`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.nonzero(jmask.numpy.masked_equal(jnp.array([7, 0, 2]), 7))
        (Array([2], dtype=int32),)
    """
    x = as_masked_tensor(adopted(a))
    if x.ndim == 0:
        raise ValueError("`a` is a scalar, whose entry has no index: take `a.reshape(1)`.")
    values, valid, places = _in_order(x)
    chosen = valid & is_nonzero(values)
    picked = jnp.flatnonzero(chosen, size=size, fill_value=chosen.size)
    fill = fill_value if isinstance(fill_value, tuple) else (fill_value or 0,) * len(places)
    return tuple(_filled_at(*x, picked) for x in zip(places, fill, strict=True))


def compressed(x: TensorLike, *, size: int | None = None, fill_value: complex = 0) -> jax.Array:
    """Return the valid entries, in the order of their positions, as an array (n,).

    Args:
        x: `MaskedTensor` on any storage; of any other tensor all (stored) entries.
        size: how many to return, static: fewer are padded and more cut. Needed under jit.
        fill_value: what they are padded with.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([2, 7, 1]), jnp.array([True, False, True]))
        >>> jmask.numpy.compressed(x)
        Array([2, 1], dtype=int32)
    """
    values, valid, _ = _in_order(as_masked_tensor(adopted(x)))
    picked = jnp.flatnonzero(valid, size=size, fill_value=valid.size)
    return _filled_at(values, fill_value, picked)


def _filled_at(x: jax.Array, fill: complex, places: jax.Array) -> jax.Array:
    """Return the entries of x (m,) at `places` (n,), `fill` where there is none."""
    if not x.size:  # of which JAX gathers nothing
        return jnp.full(places.shape, fill, x.dtype)
    return x.at[places].get(mode="fill", fill_value=fill)


def _in_order(x: MaskedTensor) -> tuple[jax.Array, jax.Array, Sequence[jax.Array]]:
    """Return stored values, whether they are valid, and their indices, sorted by these."""
    values = stored_values(x)
    places = entry_indices(x.storage, jnp.arange(values.size))
    values, valid = values.reshape(-1), x.valid.reshape(-1)
    if not is_sparse(x.storage):
        return values, valid, places
    order = jnp.lexsort(tuple(places[::-1]))
    return values[order], valid[order], [place[order] for place in places]


def accumulates(of_jax: Function, identity: ArrayLike) -> Function:
    """Lift a running reduction, in which an entry that is not valid adds the identity."""

    @extends(of_jax, more=("where",))
    def lifted(x: Dense, where: TensorLike | None = None, **options: Argument) -> Dense:
        """Leave out entries that are not valid, which stay masked."""
        checked_axes(options.get("axis"), x.ndim)
        taken = valid_entries(x, where)
        dtype = result_dtype(jnp.mean, x.dtype) if isinstance(identity, float) else x.dtype
        values = stored_values(taken).astype(dtype)
        values = jnp.where(taken.valid, values, jnp.asarray(identity, dtype))
        result = of_jax(values, **options)
        if not isinstance(x, MaskedTensor):
            return result
        return joined(result, taken.valid.reshape(result.shape))

    return lifted


def cumlogsumexp(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Return the log of the running sum of exp of the entries along `axis`."""
    x = x.astype(result_dtype(jnp.mean, x.dtype))
    x = x.reshape(-1) if axis is None else x
    (axis,) = checked_axes((0 if axis is None else axis,), x.ndim)
    # With -inf itself, derivatives of the function are nan.
    adds = x != -jnp.inf
    result = lax.cumlogsumexp(jnp.where(adds, x, jnp.finfo(x.dtype).min), axis)
    exists = lax.cummax(adds.astype(jnp.int8), axis) > 0
    return jnp.where(exists, result, jnp.asarray(-jnp.inf, x.dtype))


_broadcast_to, _concatenate = moves(jnp.broadcast_to), moves(jnp.concatenate)
_diagonal, _outer = moves(jnp.diagonal), contracts(jnp.outer)


def skips_nan(function: Function, empty: ArrayLike | None) -> Function:
    """Return `jnp.nan*` for tensors: `function`, jmask's `*`, with nan masked.

    Args:
        empty: the result of an array where all entries are nan. None leaves it unfilled.
    """
    of_jax: Function = getattr(jnp, f"nan{function.__name__}")
    names = list(inspect.signature(of_jax).parameters)[1:]

    @functools.wraps(of_jax)
    def skipping(a: TensorLike, *args: Argument, **kwargs: Argument) -> Tensor:
        x, options = as_tensor(adopted(a)), dict(zip(names, args, strict=False)) | kwargs
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return function(x, **options)
        masked = isinstance(x, MaskedTensor)
        x = x if isinstance(x, MaskedTensor) else as_masked_tensor(dense(x, of_jax.__name__))
        is_number = ~jnp.isnan(stored_values(x))
        result = function(joined(x.storage, x.valid & is_number), **options)
        if masked:
            return result
        nothing = empty if options.get("initial") is None else options["initial"]
        return result.storage if empty is None else result.to_tensor(nothing)

    return skipping


_subtract, _differ = entrywise(jnp.subtract), entrywise(jnp.not_equal)
_root = entrywise(lambda x: jnp.sqrt(jnp.real(x)))


@extends(jnp.cov, "m", "y")
def cov(
    m: TensorLike,
    y: TensorLike | None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: TensorLike | None = None,
    aweights: TensorLike | None = None,
    dtype: DTypeLike | None = None,
) -> MaskedTensor:
    """Take each covariance over the observations that both variables have, as `numpy.ma.cov`.

    The mean of a variable is taken over all its entries, and the divisor counts the
    observations that exist for both; for `ddof` of these or fewer the result is masked. If `m`
    and `y` have one shape, an observation that is masked in one is masked in both.
    """
    tensors = [as_masked_tensor(x) for x in (m, y) if x is not None]
    shapes = [x.shape for x in tensors]
    if max(map(len, shapes)) > 2:
        raise ValueError(f"`m` and `y` have 2 dimensions at most, got {shapes}.")
    if len(tensors) == 2 and shapes[0] == shapes[1]:
        both = tensors[0].valid & tensors[1].valid
        tensors = [joined(x.storage, both) for x in tensors]
    x = _concatenate(
        [x.reshape(1, -1) if x.ndim < 2 else x if rowvar else x.T for x in tensors]
    )
    given = x.dtype if aweights is None else joint_dtype(x.dtype, jnp.asarray(aweights).dtype)
    kind = result_dtype(jnp.mean, given if dtype is None else dtype)
    work = wide(kind)
    values, valid = jnp.where(x.valid, x.storage, 0).astype(work), x.valid.astype(work)

    def weighing(name: str, weights: Argument) -> jax.Array:
        weights = jnp.ones(x.shape[1]) if weights is None else jnp.abs(jnp.asarray(weights))
        if weights.shape != x.shape[1:]:
            raise ValueError(f"`{name}` must be of shape {x.shape[1:]}, got {weights.shape}.")
        return jnp.expand_dims(weights.astype(work), 0)

    factors = weighing("aweights", aweights)
    weights = weighing("fweights", fweights) * factors
    counts = (valid * weights) @ valid.T
    total = jnp.diagonal(counts)[:, None]
    mean = jnp.sum(values * weights, 1, keepdims=True) / jnp.where(total == 0, 1, total)
    distance = jnp.where(x.valid, values - mean, 0)
    # sum(f a**2) / sum(f a) of frequencies f and weights a, as in `jnp.cov`.
    squares = (valid * weights * factors) @ valid.T / jnp.where(counts == 0, 1, counts)
    divisor = jnp.real(counts - (int(not bias) if ddof is None else ddof) * squares)
    exists = divisor > 0
    result = (distance * weights) @ distance.conj().T / jnp.where(exists, divisor, 1)
    return joined(result.astype(kind), exists).squeeze()


@extends(jnp.corrcoef, "x", "y")
def corrcoef(
    x: TensorLike, y: TensorLike | None, rowvar: bool = True, dtype: DTypeLike | None = None
) -> MaskedTensor:
    """Divide covariances by the deviations of all entries of each variable.

    Where variables lack different observations a correlation may exceed 1, as in numpy.ma.
    """
    c = cov(x, y, rowvar, dtype=dtype)
    deviation = _root(_diagonal(c) if c.ndim else c)
    return divide(c, _outer(deviation, deviation).reshape(c.shape))


@extends(jnp.diff, "a", "prepend", "append")
def diff(
    a: Dense, prepend: Dense | None, append: Dense | None, n: int = 1, axis: int = -1
) -> Dense:
    """Subtract neighbours: a difference exists where both do."""
    (axis,) = checked_axes((axis,), a.ndim)
    if n < 0:
        raise ValueError(f"`n` must be 0 or more, got {n}.")
    if n == 0:
        return a
    edge = (*a.shape[:axis], 1, *a.shape[axis + 1 :])
    pieces = [x for x in (prepend, a, append) if x is not None]
    x = _concatenate([x if x.ndim else _broadcast_to(x, edge) for x in pieces], axis)
    before = (slice(None),) * axis
    for _ in range(n):
        last, first = x[(*before, slice(1, None))], x[(*before, slice(-1))]
        x = (_differ if x.dtype == jnp.dtype(bool) else _subtract)(last, first)
    return x


def _unlike(a: jax.Array, b: jax.Array, equal_nan: bool) -> jax.Array:
    differ = jnp.not_equal(a, b)
    return differ & ~(jnp.isnan(a) & jnp.isnan(b)) if equal_nan else differ


# True where entries differ: for zeros of two sparse tensors False, so the result is sparse.
_is_other = entrywise(_unlike)
_is_far = entrywise(lambda a, b, **options: ~jnp.isclose(a, b, **options))


def allclose(
    a: TensorLike,
    b: TensorLike,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
    *,
    masked_equal: bool = True,
) -> jax.Array:
    """Decide whether all entries of two tensors are close, as `jnp.isclose` has it.

    An entry that is masked in one of them counts as close, unless `masked_equal` is False.

    Raises:
        ValueError: if the shapes do not broadcast.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., 5.]), jnp.array([True, False]))
        >>> jmask.numpy.allclose(x, jnp.ones(2))
        Array(True, dtype=bool)
    """
    return _none(_is_far(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan), masked_equal)


def array_equal(
    a1: TensorLike, a2: TensorLike, equal_nan: bool = False, *, masked_equal: bool = True
) -> jax.Array:
    """Decide whether two tensors have one shape and the same entries.

    An entry that is masked in one of them counts as equal, unless `masked_equal` is False.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., 5.]), jnp.array([True, False]))
        >>> jmask.numpy.array_equal(x, jnp.ones(2)), jmask.numpy.array_equal(x, jnp.ones(3))
        (Array(True, dtype=bool), Array(False, dtype=bool))
    """
    a1, a2 = as_tensor(adopted(a1)), as_tensor(adopted(a2))
    if a1.shape != a2.shape:
        return jnp.array(False)
    return _none(_is_other(a1, a2, equal_nan=equal_nan), masked_equal)


def _none(differs: TensorLike, masked_equal: bool) -> jax.Array:
    """Decide whether no entry differs and, unless `masked_equal`, none is masked."""
    masked = isinstance(differs, MaskedTensor)
    differs = as_masked_tensor(differs)
    none = ~jnp.any(differs.valid & stored_values(differs))
    if masked_equal or not masked:
        return none
    return none & (jnp.sum(differs.valid) == differs.size)
