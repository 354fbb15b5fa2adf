"""Statistics made of other functions: without nan, weighted, of pairs; and comparisons.

    x = MaskedTensor([1, nan, 3, 7], [T, T, T, F])
    nansum(x) = 4,  nanmean(x) = 2                       nan takes no part, as masked entries
    diff(x) = [nan, nan, --],  allclose(x, x) = False    a pair exists where both do

Results that decide (`allclose`, `array_equal`) always exist, so they are arrays.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jmask._base.array_types import joint_dtype, wide
from jmask._base.types import Argument, Axis, Dense, Function, StorageLike, Tensor, TensorLike
from jmask._ops import formulas
from jmask._ops.lift import adopted, aligned, contracts, dense, entrywise, extends, moves, on
from jmask._ops.reduce import checked_axes, result_dtype, valid_entries, without_axes
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    any_masked,
    as_masked_tensor,
    as_tensor,
    joined,
)
from jmask._tensors.storage import stored_values

_broadcast_to, _concatenate = moves(jnp.broadcast_to), moves(jnp.concatenate)
_diagonal, _expand_dims = moves(jnp.diagonal), moves(jnp.expand_dims)
_outer = contracts(jnp.outer)


def skips_nan(function: Function, empty: ArrayLike | None) -> Function:
    """Return JAX's function of the entries that are not nan, which are as masked.

    Args:
        function: of `jmask.numpy`, of all entries; reduces or accumulates.
        empty: the result of an array where nothing but nan is. None keeps what is there.
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
        return result.storage if empty is None else result.to_tensor(empty)

    return skipping


def weighted_average(
    a: TensorLike, axis: Axis, weights: TensorLike, keepdims: bool, where: StorageLike | None
) -> tuple[Tensor, Tensor]:
    """Return the mean of entries counted by their weights, and the sums of these weights."""
    a, weights = as_tensor(adopted(a)), as_tensor(adopted(weights))
    masked, ndim = any_masked(a, weights), len(a.shape)
    axes = checked_axes(axis, ndim)
    a, weights = (x if any_masked(x) else dense(x, "average") for x in (a, weights))
    if len(weights.shape) == 1 < ndim and len(axes) == 1:
        weights = _expand_dims(weights, [i for i in range(ndim) if i != axes[0]])
    x, weights = valid_entries(a, where), _broadcast_to(weights, tuple(a.shape))
    like, (values, weights), (valid, counted) = aligned([x, weights], "average")
    valid = jnp.asarray(valid) & counted
    dtype = result_dtype(jnp.mean, joint_dtype(values, weights))
    weights = weights.astype(wide(dtype))
    sums = formulas.total(on(like, weights, valid), axes)
    # Values under the mask may be nan; `total` leaves them out.
    products = on(like, values.astype(wide(dtype)) * weights, valid)
    result = _divide(formulas.total(products, axes), sums)
    result, sums = (
        (x if keepdims else without_axes(x, axes)).astype(dtype) for x in (result, sums)
    )
    return (result, sums) if masked else (result.to_tensor(jnp.nan), sums.to_tensor(0))


_subtract, _differ = entrywise(jnp.subtract), entrywise(jnp.not_equal)
_divide, _root = entrywise(jnp.true_divide), entrywise(lambda x: jnp.sqrt(jnp.real(x)))


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

    The mean of a variable is that of all its entries, and the divisor counts the observations
    that exist for both; it is masked where not more than `ddof` are there. Where the shape of
    `y` is that of `m`, an observation that one of them lacks is masked in both.
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
    kind = result_dtype(jnp.mean, x.dtype if dtype is None else dtype)
    work = wide(kind)
    values, valid = jnp.where(x.valid, x.storage, 0).astype(work), x.valid.astype(work)

    def weighing(name: str, weights: Argument) -> jax.Array:
        weights = jnp.ones(x.shape[1]) if weights is None else jnp.abs(jnp.asarray(weights))
        if weights.shape != x.shape[1:]:
            raise ValueError(f"`{name}` must be of shape {x.shape[1:]}, got {weights.shape}.")
        return jnp.expand_dims(weights.astype(work), 0)

    factors = weighing("aweights", aweights)
    weights = weighing("fweights", fweights) * factors
    number = (valid * weights) @ valid.T
    own = jnp.diagonal(number)[:, None]
    mean = jnp.sum(values * weights, 1, keepdims=True) / jnp.where(own == 0, 1, own)
    distance = jnp.where(x.valid, values - mean, 0)
    # The square of the weights, by the weights: 1 for repeated observations.
    squares = (valid * weights * factors) @ valid.T / jnp.where(number == 0, 1, number)
    divisor = jnp.real(number - (int(not bias) if ddof is None else ddof) * squares)
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
    return _divide(c, _outer(deviation, deviation).reshape(c.shape))


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


# True where entries are no match: the zeros of two sparse tensors stay False, so sparse.
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
    """Decide whether no entry differs; and, if masked entries do not count, that all exist."""
    masked = isinstance(differs, MaskedTensor)
    differs = as_masked_tensor(differs)
    none = ~jnp.any(differs.valid & stored_values(differs))
    if masked_equal or not masked:
        return none
    return none & (jnp.sum(differs.valid) == differs.size)
