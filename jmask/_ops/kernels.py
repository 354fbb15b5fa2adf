"""Kernels of reductions: results of groups, the same for every storage.

    kernel(groups, ...)  ->  results, and where there is one

    mean of {1, 3} and {}     ->  [2, 0],  [True, False]

A kernel reads `select(groups, fill)`: the entries that take part, and elsewhere a number
that changes nothing. So no nan is computed from what lies under a mask, and the derivative
of the selection sends exactly 0 there. Wherever a derivative would be infinite or undefined
(a root of 0, a quotient by the count of nothing) the argument is selected first and the
result again: the derivative there is 0.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmask._base.array_types import is_nonzero, joint_dtype, typed_like, wide
from jmask._base.types import Argument, ArrayFunction, DType, JvpArgs, Scalar
from jmask._ops.groups import (
    Groups,
    Kernel,
    Results,
    greatest,
    grouped,
    least,
    result_dtype,
)

_Rank = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def select(groups: Groups, fill: ArrayLike, dtype: DTypeLike | None = None) -> jax.Array:
    """Return the entries cast to `dtype`, `fill` where they take no part."""
    values = groups.values if dtype is None else groups.values.astype(dtype)
    return jnp.where(groups.valid, values, jnp.asarray(fill, values.dtype))


def applied_where(
    holds: jax.Array, function: ArrayFunction, x: jax.Array, otherwise: float = 0
) -> jax.Array:
    """Return function(x) where `holds`, and `otherwise` elsewhere, with the derivative 0."""
    return jnp.where(holds, function(jnp.where(holds, x, 1)), otherwise)


def inexact(dtype: DTypeLike) -> DType:
    """Return the dtype of a mean of `dtype`, as JAX promotes."""
    return result_dtype(jnp.mean, dtype)


# --- sums --------------------------------------------------------------------------------


def total(groups: Groups, dtype: DTypeLike) -> Results:
    return groups.sum(select(groups, 0, wide(dtype))), groups.any(groups.valid)


def product(groups: Groups, dtype: DTypeLike) -> Results:
    return groups.prod(select(groups, 1, wide(dtype))), groups.any(groups.valid)


def mean(groups: Groups, dtype: DTypeLike) -> Results:
    count = groups.count(groups.valid)
    result = groups.sum(select(groups, 0, wide(dtype)))
    # Not a selection after the quotient: 0 / 0 is nan, and so is its derivative.
    return result / jnp.maximum(count, 1).astype(result.dtype), count > 0


def mean_of_all(groups: Groups, dtype: DTypeLike) -> Results:
    """Return the mean when entries that are not stored are zeros."""
    result, exists = total(groups, dtype)
    return result / groups.size, exists


def with_zeros(kernel: Kernel, absorb: Callable[[jax.Array, jax.Array], jax.Array]) -> Kernel:
    """Return the kernel when entries that are not stored are zeros.

    `absorb` takes a result, and whether its group has an entry that is not stored.
    """

    def with_zeros(groups: Groups, **kwargs: Argument) -> Results:
        result, exists = kernel(groups, **kwargs)
        return absorb(result, groups.count(groups.valid) < groups.size), exists

    return with_zeros


def variance(groups: Groups, dtype: DTypeLike, ddof: float) -> Results:
    work = wide(joint_dtype(groups.values, dtype))
    # Two passes: the mean of squares less the square of the mean cancels.
    center, _ = mean(groups, work)
    distance = jnp.where(groups.valid, select(groups, 0, work) - groups.spread(center), 0)
    left = groups.count(groups.valid) - ddof
    exists = left > 0
    squares = groups.sum(squared(distance))
    return squares / jnp.where(exists, left, 1).astype(squares.dtype), exists


def deviation(groups: Groups, dtype: DTypeLike, ddof: float) -> Results:
    result, exists = variance(groups, dtype, ddof)
    return _root(result, 2), exists


def number_of(groups: Groups) -> Results:
    count = groups.count(groups.valid)
    return count, count > 0


def number_of_nonzero(groups: Groups) -> Results:
    return groups.count(groups.valid & is_nonzero(groups.values)), groups.any(groups.valid)


def every(groups: Groups) -> Results:
    return ~groups.any(groups.valid & ~is_nonzero(groups.values)), groups.any(groups.valid)


def some(groups: Groups) -> Results:
    return groups.any(groups.valid & is_nonzero(groups.values)), groups.any(groups.valid)


# --- norms -------------------------------------------------------------------------------

# Norms without overflow: the entries are brought near 1 before they are squared.
#
#     [3e38, 4e38]       times 2**-80 their squares are near 2**96
#                        norm inf, as float32 has no 5e38; direction [.6, .8]
#
# Three ranges of numbers have one fixed factor each, as in LAPACK's `nrm2` (Anderson, Algorithm
# 978, 2017). A quotient by the greatest entry would not do: XLA multiplies by the reciprocal,
# and the reciprocal of 1e38 is subnormal, for which it takes 0.


class Norm(NamedTuple):
    """Norms of groups in parts: `size / factor`, where `size` neither overflows nor vanishes.

    Attributes:
        entries: those that take part, times the factor of their group; 0 elsewhere.
        size: the norms of `entries`.
        factor: powers of two, of the shape of `size`.
    """

    entries: jax.Array
    size: jax.Array
    factor: jax.Array


def factor_for(greatest: jax.Array) -> jax.Array:
    """Return the power of two that brings entries up to `greatest` where they can be squared.

    It is a constant: the derivative of a norm does not depend on what it is computed with.
    """
    greatest = lax.stop_gradient(greatest)
    # In float32: numbers beyond 2**51 times 2**-80, those below 2**-51 times 2**80.
    bits = jnp.finfo(greatest.dtype).maxexp
    limit, power = 2.0 ** (2 * bits // 5), 2.0 ** (5 * bits // 8)
    small = jnp.where(greatest < 1 / limit, power, 1)
    return jnp.where(greatest > limit, 1 / power, small).astype(greatest.dtype)


def norm(groups: Groups, dtype: DTypeLike, ord: float) -> Results:  # noqa: A002
    parts, exists = norm_in_parts(groups, dtype, ord)
    return parts.size / parts.factor, exists


def norm_in_parts(groups: Groups, dtype: DTypeLike, ord: float) -> tuple[Norm, jax.Array]:  # noqa: A002
    """Return the norm of each group, and where there is one."""
    exists = groups.any(groups.valid)
    x = select(groups, 0, wide(joint_dtype(groups.values, dtype)))
    taken = groups.valid & (x != 0)
    if ord == 0:
        count = groups.count(taken).astype(dtype)
        return Norm(x, count, jnp.ones_like(count)), exists
    size = applied_where(taken, jnp.abs, x)
    # Powers of negative order are greatest where the entry is least.
    sizes = lax.stop_gradient(size if ord > 0 else jnp.where(taken, size, jnp.inf))
    pivot = groups.max(sizes) if ord > 0 else groups.min(sizes)
    pivot = jnp.where(jnp.isfinite(pivot) & (pivot > 0), pivot, 1)
    factor = factor_for(pivot)
    entry_factor = groups.spread(factor)
    x, size = x * entry_factor.astype(x.dtype), size * entry_factor
    if math.isinf(ord):
        result, _ = (maximum if ord > 0 else minimum)(dataclasses.replace(groups, values=size))
        result = jnp.maximum(result, 0)  # where there is no entry
    elif ord == 2:
        result = _root(groups.sum(squared(x)), 2)
    else:
        pivot = jnp.ones_like(pivot) if ord == 1 else pivot * factor
        ratio = size / groups.spread(pivot)
        powers = applied_where(taken, lambda x: x**ord, ratio)
        result = _root(groups.sum(powers), ord) * pivot
    if ord < 0:  # A single 0 makes the sum infinite and the norm 0.
        zero = groups.any(groups.valid & (x == 0))
        result = jnp.where(zero, 0, result)
    return Norm(x, result, factor), exists


def shortened(
    rows: jax.Array, max_norm: Scalar, order: float, batch: int = 1, eps: float = 0.0
) -> jax.Array:
    """Scale rows longer than `max_norm` by max_norm / (norm + eps); keep all others.

    Args:
        rows: floating or complex, after `batch` axes of entries.
        max_norm: a positive scalar of the dtype of `rows`, or a Python number.
        order: p of the p-norm, above 0; may be inf.
        eps: added to the norm.
    """
    every = jnp.ones_like(rows, dtype=bool)
    groups = grouped(rows, every, range(batch, rows.ndim), keepdims=True)
    norm, _ = norm_in_parts(groups, jnp.finfo(rows.dtype).dtype, order)
    size = norm.size + eps * norm.factor
    # A row that is short enough may be 0, by which its direction is divided.
    exceeds = norm.size / norm.factor > max_norm
    direction = norm.entries / jnp.where(exceeds, size, 1).astype(rows.dtype)
    return jnp.where(exceeds, direction * jnp.asarray(max_norm, rows.dtype), rows)


def squared(x: jax.Array) -> jax.Array:
    """Square the absolute values; the derivative at 0 is 0."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


# --- sums of powers of e -----------------------------------------------------------------


def log_sum_exp(groups: Groups, dtype: DTypeLike) -> Results:
    _refuse_complex(groups.values.dtype)
    exists = groups.any(groups.valid)
    largest = _peak(groups, wide(dtype))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    powers = exponentials(groups, largest, wide(dtype))
    return log(groups.sum(powers)) + largest, exists


def log_mean_exp(groups: Groups, dtype: DTypeLike) -> Results:
    result, exists = log_sum_exp(groups, dtype)
    count = jnp.maximum(groups.count(groups.valid), 1)
    return result - jnp.log(count.astype(result.dtype)), exists


def exponentials(groups: Groups, shift: jax.Array, dtype: DTypeLike) -> jax.Array:
    """exp(x - shift) of the entries that take part, 0 elsewhere."""
    x = jnp.where(
        groups.valid, select(groups, 0, dtype) - groups.spread(shift).astype(dtype), 0
    )
    return jnp.where(groups.valid, jnp.exp(x), 0)


def log(x: jax.Array) -> jax.Array:
    """log(x), with derivative 0 where x is 0."""
    return applied_where(x != 0, jnp.log, x, -jnp.inf)


def shift_of(groups: Groups, dtype: DTypeLike) -> jax.Array:
    """Return the largest (real part of an) entry of each group as a constant, 0 for none."""
    return jnp.where(groups.any(groups.valid), _peak(groups, dtype), 0)


def _peak(groups: Groups, dtype: DTypeLike) -> jax.Array:
    return groups.max(lax.stop_gradient(jnp.real(select(groups, -jnp.inf, dtype))))


def _root(x: jax.Array, order: float) -> jax.Array:
    """x ** (1 / order), with derivative 0 where x is 0."""
    root = jnp.sqrt if order == 2 else lambda x: x ** (1 / order)
    return applied_where(x != 0, root, x, 0 if order > 0 else jnp.inf)


# --- order -------------------------------------------------------------------------------


@jax.custom_jvp
def _with_slope_of(value: jax.Array, like: jax.Array) -> jax.Array:
    return value


@_with_slope_of.defjvp
def _with_slope_of_jvp(primals: JvpArgs, tangents: JvpArgs) -> tuple[jax.Array, jax.Array]:
    # The function itself and not `primals[0]`, which the next derivative takes for a constant.
    return _with_slope_of(*primals), tangents[1]


def _extremum(groups: Groups, which: str) -> Results:
    result, ties = _ties(groups, which)
    if jnp.issubdtype(result.dtype, jnp.floating):
        # The mean of the ties is the result, but for rounding, and has the derivative
        # wanted; the derivative of a maximum would be shared with equal fills.
        number = groups.spread(jnp.maximum(groups.count(ties), 1)).astype(result.dtype)
        tied = jnp.where(ties, select(groups, 0) / number, 0)
        result = _with_slope_of(result, groups.sum(tied))
    return result, groups.any(groups.valid)


def _first_index(groups: Groups, which: str) -> Results:
    _, ties = _ties(groups, which)
    positions = groups.positions()
    nowhere = jnp.iinfo(positions.dtype).max
    exists = groups.any(groups.valid)
    first = groups.min(jnp.where(ties, positions, nowhere))
    return jnp.where(exists, first, 0), exists


def _ties(groups: Groups, which: str) -> tuple[jax.Array, jax.Array]:
    """Return the extremum of each group, a constant, and which valid entries equal it."""
    dtype = groups.values.dtype
    _refuse_complex(dtype)
    identity = least(dtype) if which == "max" else greatest(dtype)
    x = lax.stop_gradient(select(groups, identity))
    result = groups.max(x) if which == "max" else groups.min(x)
    extremum = groups.spread(result)
    both_nan = (x != x) & (extremum != extremum)
    return result, groups.valid & ((x == extremum) | both_nan)


maximum, minimum = (functools.partial(_extremum, which=which) for which in ("max", "min"))
argmax, argmin = (functools.partial(_first_index, which=which) for which in ("max", "min"))
maximum_of_all = with_zeros(
    maximum, lambda x, missing: jnp.where(missing, jnp.maximum(x, 0).astype(x.dtype), x)
)
minimum_of_all = with_zeros(
    minimum, lambda x, missing: jnp.where(missing, jnp.minimum(x, 0).astype(x.dtype), x)
)
product_of_all = with_zeros(
    product, lambda x, missing: jnp.where(missing, jnp.zeros_like(x), x)
)
every_of_all = with_zeros(every, lambda x, missing: x & ~missing)


def _refuse_complex(dtype: DTypeLike) -> None:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"`x` has dtype {dtype}, and complex numbers have no order: use their absolute "
            "values or a part of them, jmask.numpy.abs(x), real(x) or imag(x)."
        )


def quantile(groups: Groups, dtype: DTypeLike, rank: _Rank, method: str = "linear") -> Results:
    """Return quantiles of a dense array's entries, before they are cast to `dtype`.

    The entries are found by sorting and then read, so that the derivative is that of entries.

    Args:
        rank: of the number of the last entry: the rank wanted, rounded down, and the rest.
        method: what to read between two entries, as in `jnp.quantile`.
    """
    values, axes = groups.values, groups.axes
    shape = tuple(1 if a in axes else n for a, n in enumerate(values.shape))
    rest = tuple(a for a in range(values.ndim) if a not in axes)
    sizes = tuple(values.shape[a] for a in rest)
    number = math.prod(values.shape[a] for a in axes)

    def flat(x: jax.Array) -> jax.Array:
        x = jnp.transpose(x, rest + axes).reshape(*sizes, number)
        # One more, so that there is always something to read.
        return jnp.pad(x, [(0, 0)] * len(sizes) + [(0, 1)])

    _refuse_complex(values.dtype)
    valid = flat(groups.valid)
    # Booleans have no half where dtypes are not promoted; integers have.
    values = values.astype(jnp.int8) if values.dtype == jnp.dtype(bool) else values
    x = jnp.where(valid, flat(values), 0)
    position = typed_like(lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1), jax.typeof(x))
    keys = (~valid, lax.stop_gradient(x), position)
    order = lax.sort(keys, dimension=-1, num_keys=2)[2]
    count = jnp.sum(valid, -1, keepdims=True)
    last = jnp.maximum(count - 1, 0)
    bad = jnp.any(x != x, -1, keepdims=True)  # nan sorts last

    def entry(rank: jax.Array) -> jax.Array:
        rank = jnp.where(bad, last, jnp.minimum(rank, last))
        entries = jnp.take_along_axis(x, jnp.take_along_axis(order, rank, -1), -1)
        return entries.astype(wide(inexact(x.dtype)))

    below, between = rank(last)
    weight = _WEIGHTS[method](between)
    # A neighbour without weight is not read: it may be infinite.
    low, high = (
        jnp.where(weight == 1, 0, entry(below)),
        jnp.where(weight == 0, 0, entry(below + 1)),
    )
    result = low * (1 - weight).astype(low.dtype) + high * weight.astype(low.dtype)
    result = jnp.where(jnp.isnan(between), jnp.nan, result)
    return result.reshape(shape), (count > 0).reshape(shape)


# The weight of the higher entry, by how far the quantile is from the lower one: 0 to 1.
_WEIGHTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda between: between,
    "lower": jnp.zeros_like,
    "higher": lambda between: jnp.where(between > 0, 1.0, 0.0),
    "midpoint": lambda between: jnp.where(between > 0, 0.5, 0.0),
    "nearest": lambda between: jnp.where(between > 0.5, 1.0, 0.0),
}
QUANTILE_METHODS = tuple(_WEIGHTS)
