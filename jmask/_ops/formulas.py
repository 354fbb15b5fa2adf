"""Formulas of reductions, in functions that keep masks and storages; `reduces` lifts them.

Each takes a `MaskedTensor` and the axes to reduce, which stay with size 1, and is masked where
no entry is valid. The derivative is 0 where a formula has none: `std` and `norm` at 0.

Norms do not overflow: entries are brought near 1 before they are squared. [3e38, 4e38] times
2**-80 has squares near 2**96: its norm is inf, as float32 has no 5e38, its direction [.6, .8].
Three ranges of numbers have one fixed factor each, as in LAPACK's `nrm2` (Anderson, Algorithm
978, 2017). A quotient by the greatest entry would not do: XLA multiplies by the reciprocal, and
the reciprocal of 1e38 is subnormal, for which it takes 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmask._base.array_types import is_nonzero, joint_dtype, wide
from jmask._base.types import (
    Argument,
    ArrayFunction,
    ArraysFunction,
    Function,
    Numbers,
    Scalar,
    StorageLike,
    TensorLike,
)
from jmask._base.validation import checked_choice
from jmask._ops.lift import data_of, dense, entrywise, filled
from jmask._ops.reduce import (
    Values,
    count_valid,
    divide,
    extremum,
    first_index,
    least,
    on_values,
    reduced,
    result_dtype,
    with_zeros,
)
from jmask._ops.statistics import sort
from jmask._tensors.masked_tensor import MaskedTensor, as_masked_tensor, as_tensor, joined
from jmask._tensors.storage import as_dense, stored_values

Axes = tuple[int, ...]


def _limit_and_power(dtype: DTypeLike) -> tuple[float, float]:
    """Return the number beyond which entries are scaled, and the power of two that does it."""
    # In float32: numbers beyond 2**51 times 2**-80, those below 2**-51 times 2**80.
    bits = jnp.finfo(dtype).maxexp
    return 2.0 ** (2 * bits // 5), 2.0 ** (5 * bits // 8)


def factor_for(greatest: jax.Array) -> jax.Array:
    """Return the power of two by which squares neither overflow nor vanish near `greatest`."""
    # A constant: the derivative of a norm does not depend on what it is computed with.
    greatest = lax.stop_gradient(greatest)
    limit, power = _limit_and_power(greatest.dtype)
    small = jnp.where(greatest < 1 / limit, power, 1)
    return jnp.where(greatest > limit, 1 / power, small).astype(greatest.dtype)


def sums_of_squares(values: jax.Array) -> list[jax.Array]:
    """Return three sums of squares, of entries that are small, large, or neither.

    Small ones are multiplied by the power of two before, large ones divided by it; all are
    squared in float32 at least.
    """
    size = jnp.abs(values)
    size = size.astype(joint_dtype(size, jnp.float32))
    factor = factor_for(size)
    scaled, chosen = size * factor, (factor > 1, factor < 1, factor == 1)
    return [jnp.sum(jnp.square(jnp.where(are, scaled, 0))) for are in chosen]


def root_of_sums(sums: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Add up what `sums_of_squares` returns; return the sum and its root, derivative 0 at 0."""
    small, large, medium = sums
    _, power = _limit_and_power(small.dtype)
    # Factors depend on the sums, and are no divisors: of two constant factors, or two divisors,
    # XLA computes the product first, and the square of this power is infinite.
    if_any = lambda sums, factor: jnp.where(sums == 0, 1, factor).astype(small.dtype)
    up, down = if_any(large, power), if_any(large, 1 / power)
    with_large = large + medium * down * down
    from_small = if_any(small, 1 / power)
    with_medium = medium + small * from_small * from_small
    root = where_nonzero(jnp.sqrt)
    without_large = jnp.where(medium != 0, root(with_medium), root(small) * from_small)
    total = large * up * up + with_medium
    return total, jnp.where(large != 0, root(with_large) * up, without_large)


def squared(x: jax.Array) -> jax.Array:
    """Square the absolute values; the derivative at 0 is 0."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


def where_nonzero(function: Function, otherwise: float = 0) -> Function:
    """Return the function where entries are not 0, and `otherwise` there, with derivative 0."""

    def guarded(x: jax.Array) -> jax.Array:
        one = jnp.ones((), x.dtype)
        result = function(jnp.where(x != 0, x, one))
        return jnp.where(x != 0, result, jnp.asarray(otherwise, result.dtype))

    return guarded


def norm_in_parts(x: Values, axis: Axes, order: float) -> tuple[Values, Values, Values]:
    """Return the norms of an array, or of valid entries, along `axis`, as `size / factor`.

    Returns:
        x times the factor of each entry's group; the norms of that, which neither overflow nor
        vanish, where reduced axes have size 1; and the factors, powers of two, of their shape.

    Args:
        x: floating or complex, of 32 bits at least.
        order: p of the p-norm, of any sign; inf and -inf too.
    """
    size: Values = _size(x)
    nonzero = stored_values(data_of(size)) != 0
    if order == 0:
        counts: Values = on_values(lambda a: a.astype(size.dtype), _count(x, axis, nonzero))
        return x, counts, on_values(jnp.ones_like, counts)

    # --- scaled by the entry whose power is the greatest ---------------------------------
    # For a negative order that is the least entry, zeros apart.
    candidates = size
    if order < 0 and isinstance(size, MaskedTensor):
        candidates = joined(size.storage, size.valid & nonzero)
    extreme = "max" if order > 0 else "min"
    usable = lambda a: jnp.where(jnp.isfinite(a) & (a > 0), a, jnp.ones_like(a))
    entry = on_values(usable, reduced(on_values(lax.stop_gradient, candidates), axis, extreme))
    if isinstance(entry, MaskedTensor):
        entry = joined(entry.storage, jnp.ones_like(entry.valid))  # 1 where all entries are 0
    factor = on_values(factor_for, entry)
    x, size = _scaled(x, factor), _multiply(size, factor)

    # --- the norm of the scaled entries --------------------------------------------------
    if math.isinf(order):
        exact: Function = extremum if isinstance(size, MaskedTensor) else reduced
        result = exact(size, axis, extreme)
    elif order == 2:
        result = _root(reduced(_squared(x), axis, "sum"))
    else:
        # Divided by that entry no power overflows; with order 1 none does anyway.
        unit = on_values(jnp.ones_like, entry) if order == 1 else _multiply(entry, factor)
        powers = entrywise(where_nonzero(lambda a: a**order))(divide(size, unit))
        root = where_nonzero(lambda a: a ** (1 / order), 0 if order > 0 else jnp.inf)
        result = _multiply(entrywise(root)(reduced(powers, axis, "sum")), unit)
    if order < 0:  # a single 0 makes the sum infinite and the norm 0
        result = _zero_where(_count(x, axis, ~nonzero), result)
    return x, result, factor


def norm(x: MaskedTensor, axis: Axes, keepdims: bool = True, order: float = 2) -> MaskedTensor:
    """Return the norms of the valid entries along `axis`, which stays with size 1."""
    _, size, factor = norm_in_parts(x, axis, order)
    return divide(size, factor)


def shortened(
    rows: jax.Array, max_norm: Scalar, order: float, batch: int = 1, eps: float = 0.0
) -> jax.Array:
    """Scale rows longer than `max_norm` by max_norm / (norm + eps); keep all others.

    Rows come after `batch` axes of entries; `order` is the p of the norm, above 0.
    """
    entries, norm, factor = norm_in_parts(rows, tuple(range(batch, rows.ndim)), order)
    size = norm + eps * factor
    # A row that is kept may have norm 0: it is not divided by that.
    exceeds = norm / factor > max_norm
    direction = entries / jnp.where(exceeds, size, jnp.ones_like(size)).astype(rows.dtype)
    # Nor multiplied by an infinite bound, whose derivative would be 0 * inf.
    bound = jnp.where(exceeds, jnp.asarray(max_norm, rows.dtype), jnp.ones((), rows.dtype))
    return jnp.where(exceeds, direction * bound, rows)


def _times(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiply by a real factor; of complex numbers each part, as inf * (2 + 0j) is nan."""
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x * factor
    return lax.complex(x.real * factor, x.imag * factor)


_add, _subtract = entrywise(jnp.add), entrywise(jnp.subtract)
_scaled = entrywise(_times)
_multiply = entrywise(jnp.multiply)
_exp, _squared = entrywise(jnp.exp), entrywise(squared)
_log, _root = entrywise(jnp.log), entrywise(where_nonzero(jnp.sqrt))
_size = entrywise(where_nonzero(jnp.abs))
_minus_inf_where_0 = entrywise(lambda a, b: jnp.where(b == 0, -jnp.inf, a))
_zero_where = entrywise(lambda counts, x: jnp.where(counts > 0, jnp.zeros_like(x), x))
_count: Function = count_valid  # typed for masked tensors; arrays have orders above 0 only

total = functools.partial(reduced, kind="sum")
product = functools.partial(reduced, kind="prod")
product_of_all = with_zeros(product, jnp.zeros_like)


def mean(x: MaskedTensor, axis: Axes) -> MaskedTensor:
    return divide(total(x, axis), count_valid(x, axis).astype(x.dtype))


def mean_of_all(x: MaskedTensor, axis: Axes) -> MaskedTensor:
    """Return the mean of all entries of an ordinary sparse tensor."""
    return on_values(lambda a: a / math.prod(x.shape[i] for i in axis), total(x, axis))


def variance(
    x: MaskedTensor,
    axis: Axes,
    ddof: float = 0,
    correction: float | None = None,
    mean: TensorLike | None = None,
) -> MaskedTensor:
    """Return the mean square distance from the mean, masked for `ddof` entries or fewer."""
    if correction is not None:
        if ddof != 0:
            raise ValueError("give `ddof` or `correction`, not both: they mean the same.")
        ddof = correction
    # Two passes: the mean of squares less the square of the mean cancels.
    squares = total(_squared(_subtract(x, _center(x, axis, mean))), axis)
    left = on_values(lambda n: n - ddof, count_valid(x, axis)).astype(squares.dtype)
    return divide(squares, joined(left.storage, left.valid & (stored_values(left) > 0)))


def _center(x: MaskedTensor, axis: Axes, mean: TensorLike | None) -> TensorLike:
    return _mean(x, axis) if mean is None else _tensor(mean).astype(x.dtype)


def deviation(x: MaskedTensor, axis: Axes, **options: Argument) -> MaskedTensor:
    return _root(variance(x, axis, **options))


def count_nonzero(x: MaskedTensor, axis: Axes) -> MaskedTensor:
    return count_valid(x, axis, is_nonzero(stored_values(x)))


def count(a: MaskedTensor, axis: Axes = (), keepdims: bool = True) -> MaskedTensor:
    return count_valid(a, axis)


def some(x: MaskedTensor, axis: Axes) -> MaskedTensor:
    return on_values(lambda n: n > 0, count_nonzero(x, axis))


def every(x: MaskedTensor, axis: Axes) -> MaskedTensor:
    return on_values(lambda n: n == 0, count_valid(x, axis, ~is_nonzero(stored_values(x))))


every_of_all = with_zeros(every, jnp.zeros_like)


maximum, minimum = (functools.partial(extremum, kind=kind) for kind in ("max", "min"))
maximum_of_all = with_zeros(maximum, lambda x: jnp.maximum(x, jnp.zeros_like(x)))
minimum_of_all = with_zeros(minimum, lambda x: jnp.minimum(x, jnp.zeros_like(x)))
first_maximum, first_minimum = (
    functools.partial(first_index, kind=kind) for kind in ("max", "min")
)


def peak_to_peak(x: MaskedTensor, axis: Axes) -> MaskedTensor:
    return _subtract(maximum(x, axis), minimum(x, axis))


def _peak(x: MaskedTensor, axis: Axes) -> MaskedTensor:
    """Return the greatest (real part of an) entry as a constant."""
    real = on_values(lambda a: lax.stop_gradient(jnp.real(a)), x)
    return reduced(real, axis, "max").astype(x.dtype)


def logsumexp(
    a: MaskedTensor, axis: Axes, b: TensorLike | None = None, return_sign: bool = False
) -> MaskedTensor:
    """Return the log of the sum of exp, without overflow; the derivative of log(0) is 0."""
    if return_sign:
        raise TypeError("`return_sign` is not supported for masked entries: take `b` positive.")
    finite = lambda p: jnp.where(jnp.isfinite(p), p, jnp.zeros_like(p))
    if b is None:
        peak = on_values(finite, _peak(a, axis))
        powers = _exp(_subtract(a, peak))
    else:
        if np.ndim(b) > a.ndim:
            raise ValueError(
                f"`b` has {np.ndim(b)} dimensions and `a` {a.ndim}: broadcast `a` first."
            )
        # What counts 0 times is no peak, and its power, times 0, is no nan.
        peak = on_values(finite, _peak(_minus_inf_where_0(a, b), axis))
        most = math.log(jnp.finfo(a.dtype).max) / 2
        is_beyond = lambda x, b: (b == 0) & ~(jnp.real(x) <= most)
        power = entrywise(lambda x, b: jnp.exp(jnp.where(is_beyond(x, b), most, x)) * b)
        powers = power(_subtract(a, peak), b)
    log = entrywise(where_nonzero(jnp.log, -jnp.inf))
    return _add(log(total(powers, axis)), peak)


def softmax(x: MaskedTensor, axis: Axes) -> MaskedTensor:
    powers = _exp(_subtract(x, _peak(x, axis)))
    return divide(powers, total(powers, axis))


def log_softmax(x: MaskedTensor, axis: Axes) -> MaskedTensor:
    shifted = _subtract(x, _peak(x, axis))
    return _subtract(shifted, _log(total(_exp(shifted), axis)))


def logmeanexp(x: MaskedTensor, axis: Axes) -> MaskedTensor:
    return _subtract(logsumexp(x, axis), _log(count_valid(x, axis).astype(x.dtype)))


def normalize(
    x: MaskedTensor,
    ord: float | None = 2,  # noqa: A002
    axis: Axes = (-1,),
    eps: float = 1e-12,
    where: StorageLike | None = None,
) -> MaskedTensor:
    """Return x divided by the norm of the valid entries of each slice, or by `eps` if less.

    Ordinary sparse tensors become dense.

    Args:
        x: `MaskedTensor` on any storage, or array.
        ord: of the norm, as in `jmask.numpy.norm`.
        axis: the axes of a slice.
        eps: the least number to divide by.
        where: booleans that broadcast to `x`; other entries take no part.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.nn.normalize(jnp.array([3., 9., 4.]), where=jnp.array([True, False, True]))
        Array([0.6, 0. , 0.8], dtype=float32)
    """
    # The norm comes with a power of two, so that squares neither overflow nor vanish; `eps` is
    # scaled by it too.
    entries, size, factor = norm_in_parts(x, axis, checked_order(ord))
    at_least = entrywise(lambda size, least: jnp.where(size < least, least, size))
    size = at_least(size, on_values(lambda factor: factor * eps, factor))
    return divide(entries, size.astype(x.dtype))


def checked_order(order: float | None) -> float:
    order = 2 if order is None else order
    if not isinstance(order, int | float):
        raise TypeError(f"`ord` must be a number that is not traced, got {order!r}.")
    return order


def standardize(
    x: MaskedTensor,
    axis: Axes,
    mean: TensorLike | None = None,
    variance: TensorLike | None = None,
    epsilon: float = 1e-5,
    algorithm: str = "fast",
) -> MaskedTensor:
    """Return (x - mean) / sqrt(variance + epsilon); mean and variance may be given."""
    center = _center(x, axis, mean)
    if variance is not None:
        variance = _tensor(variance).astype(x.dtype)
    elif mean is None:
        variance = _variance(x, axis).astype(x.dtype)
    else:
        # E[x**2] - mean**2 about the mean that was given, as in jax.nn.standardize; it is cut
        # at 0, which rounding may cross.
        less_square = entrywise(lambda x, mean: jnp.maximum(x - jnp.square(mean), 0))
        variance = less_square(_mean(entrywise(jnp.square)(x), axis), center)
    scaled = entrywise(lambda x, mean, v: (x - mean) * lax.rsqrt(v + epsilon))
    return scaled(x, center, variance)


_tensor: Function = as_tensor
_mean, _variance = mean, variance


def quantile(
    a: MaskedTensor, axis: Axes, q: Numbers, method: str = "linear", weights: None = None
) -> MaskedTensor:
    """Return the entry below which a part `q` of the valid entries lies; nan if one is nan."""
    checked_choice("method", method, tuple(_WEIGHTS))
    if weights is not None:
        raise NotImplementedError(
            "`weights` of quantiles are not supported: give JAX weights, 0 where masked, "
            "jnp.quantile(x.to_tensor(jnp.inf), q, weights=weights * x.mask, "
            'method="inverted_cdf").'
        )
    _check_part(q, 1)
    a = as_masked_tensor(dense(a, "quantile"))

    def rank(q: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        place = jnp.where((q >= 0) & (q <= 1), q, jnp.nan) * last.astype(q.dtype)
        below = jnp.floor(place)
        return below.astype(last.dtype), place - below

    q = jnp.asarray(q)
    one: Function = lambda q: _at_rank(a, axis, functools.partial(rank, q), method)
    for _ in range(q.ndim):
        one = jax.vmap(one)
    return one(q.astype(joint_dtype(q, jnp.float32)))


def _check_part(q: Numbers, most: int) -> None:
    """Raise ValueError unless `q` is from 0 to `most`, where it is known."""
    if isinstance(q, jax.core.Tracer):
        return
    if not np.all((np.asarray(q) >= 0) & (np.asarray(q) <= most)):
        raise ValueError(f"`q` must be from 0 to {most}, got {q}.")


def percentile(a: MaskedTensor, axis: Axes, q: Numbers, **options: Argument) -> MaskedTensor:
    _check_part(q, 100)
    return quantile(
        a, axis, (q if isinstance(q, jax.Array) else np.asarray(q)) / 100, **options
    )


def median(a: MaskedTensor, axis: Axes, averaged: bool = True) -> MaskedTensor:
    """Return the middle valid entry; of two the mean, or if not `averaged` the lower one."""
    rank = lambda last: (last // 2, (last % 2) / 2)
    a = as_masked_tensor(dense(a, "median"))
    return _at_rank(a, axis, rank, "linear" if averaged else "lower")


# The weight of the higher entry, by how far the quantile is from the lower one: 0 to 1.
_WEIGHTS: dict[str, ArrayFunction] = {
    "linear": lambda between: between,
    "lower": jnp.zeros_like,
    "higher": lambda between: jnp.where(between > 0, 1.0, 0.0),
    "midpoint": lambda between: jnp.where(between > 0, 0.5, 0.0),
    "nearest": lambda between: jnp.where(between > 0.5, 1.0, 0.0),
}


def _at_rank(x: MaskedTensor, axis: Axes, rank: ArraysFunction, method: str) -> MaskedTensor:
    """Interpolate between the sorted entries next to a rank.

    `rank` takes the rank of the last valid entry, and returns a rank rounded down and the rest.
    """
    least(x.dtype)  # refuses complex numbers, which have no order
    dtype = result_dtype(jnp.mean, x.dtype)
    # Booleans have no half where dtypes are not promoted; integers have.
    x = x.astype(jnp.int8) if x.dtype == jnp.dtype(bool) else x
    rest = tuple(a for a in range(x.ndim) if a not in axis)
    size = math.prod(x.shape[a] for a in axis)
    if size == 0:
        return total(x.astype(dtype), axis)
    shape = (*(x.shape[a] for a in rest), size)
    pair = as_dense(x.storage), x.valid
    entries = joined(*(jnp.transpose(a, rest + axis).reshape(shape) for a in pair))
    counts = jnp.sum(entries.valid, -1, keepdims=True)
    last = jnp.maximum(counts - 1, 0)
    # Masked entries come last, and are 0 where they are read.
    ordered = sort(joined(filled(entries), entries.valid)).storage
    # nan is the greatest of the valid entries.
    greatest = jnp.take_along_axis(ordered, last, -1)
    bad = greatest != greatest

    def entry(rank: jax.Array) -> jax.Array:
        rank = jnp.where(bad, last, jnp.minimum(rank, last))
        return jnp.take_along_axis(ordered, rank, -1).astype(wide(dtype))

    below, between = rank(last)
    weight = _WEIGHTS[method](between)
    # A neighbour without weight is not read: it may be infinite.
    low = jnp.where(weight == 1, 0, entry(below))
    high = jnp.where(weight == 0, 0, entry(below + 1))
    result = low * (1 - weight).astype(low.dtype) + high * weight.astype(low.dtype)
    result = jnp.where(jnp.isnan(between), jnp.nan, result).astype(dtype)
    shape = tuple(1 if a in axis else n for a, n in enumerate(x.shape))
    return joined(result.reshape(shape), (counts > 0).reshape(shape))
