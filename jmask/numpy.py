"""Functions with the names of `jax.numpy`, for masked, sparse and ordinary tensors alike.

    jmask.numpy.sqrt(x)             x: MaskedTensor on any storage, RowSparse, BCOO, array
    jmask.numpy.mean(x, axis=0)     over the valid entries
    jmask.numpy.mean(a, where=m)    an array and a mask in place of a MaskedTensor

A function has JAX's arguments in JAX's order. Each line below lifts functions of JAX by one of
four words, which say how masks combine: `entrywise`, `reduces`, `moves` or `contracts`
(`_ops/lift.py`, `_ops/reduce.py`). Its keywords say what becomes of zeros that are not stored
(`_ops/rows.py`).

    >>> import jax.numpy as jnp, jmask
    >>> x = jmask.masked_tensor(jnp.array([1., jnp.nan, 3.]), jnp.array([True, False, True]))
    >>> jmask.numpy.sum(x), jmask.numpy.argmax(x)
    (MaskedTensor(4.0, dtype=float32), MaskedTensor(2, dtype=int32))
    >>> jmask.numpy.std(jnp.array([1., 9., 5.]), where=jnp.array([True, False, True]))
    Array(2., dtype=float32)
    >>> jmask.numpy.logsumexp(jnp.array([1000., 1e30]), where=jnp.array([True, False]))
    Array(1000., dtype=float32)
    >>> jmask.numpy.nanquantile(jnp.array([1., jnp.nan, 3.]), 0.25)
    Array(1.5, dtype=float32)
    >>> jmask.numpy.masked_greater(jnp.array([1., 2., 3.]), 1)
    MaskedTensor([1.0, --, --], dtype=float32)
"""

from __future__ import annotations as _annotations

import functools as _functools

import jax.numpy as _jnp
import jax.scipy.special as _special
from jax import lax as _lax
from jax import nn as _nn
from jax.typing import DTypeLike as _DTypeLike

from jmask._base import types as _types
from jmask._base.array_types import joint_dtype as _joint_dtype
from jmask._base.array_types import wide as _wide
from jmask._ops import formulas as _of
from jmask._ops import selection as _selection
from jmask._ops import statistics as _statistics
from jmask._ops.lift import adopted as _adopted
from jmask._ops.lift import contracts as _contracts
from jmask._ops.lift import data_of as _data_of
from jmask._ops.lift import each as _each
from jmask._ops.lift import elementwise as elementwise
from jmask._ops.lift import entrywise as _entrywise
from jmask._ops.lift import extends as _extends
from jmask._ops.lift import moves as _moves
from jmask._ops.products import multiplies as _multiplies
from jmask._ops.reduce import ZEROS_CHANGE_NOTHING as _NO_CHANGE
from jmask._ops.reduce import checked_axes as _checked_axes
from jmask._ops.reduce import greatest as _greatest
from jmask._ops.reduce import least as _least
from jmask._ops.reduce import reduces as _reduces
from jmask._ops.reduce import result_dtype as _result_dtype
from jmask._ops.selection import masked_fill as masked_fill
from jmask._ops.selection import masked_where as masked_where
from jmask._ops.selection import where as where
from jmask._ops.statistics import allclose as allclose
from jmask._ops.statistics import array_equal as array_equal
from jmask._ops.statistics import compressed as compressed
from jmask._ops.statistics import nonzero as nonzero
from jmask._ops.statistics import top_k as top_k
from jmask._tensors.masked_tensor import as_tensor as _as_tensor

# --- entrywise ---------------------------------------------------------------------------

_linear = _functools.partial(_entrywise, scales=((0,),))

# One operand.
abs, square, sign, signbit = _each(_entrywise, _jnp.abs, _jnp.square, _jnp.sign, _jnp.signbit)
negative, positive = _each(_linear, _jnp.negative, _jnp.positive)
conj, real, imag = _each(_linear, _jnp.conj, _jnp.real, _jnp.imag)
deg2rad, rad2deg = _each(_linear, _jnp.deg2rad, _jnp.rad2deg)
ceil, floor, rint, trunc = _each(_entrywise, _jnp.ceil, _jnp.floor, _jnp.rint, _jnp.trunc)
clip, round, nan_to_num = _each(_entrywise, _jnp.clip, _jnp.round, _jnp.nan_to_num)
sin, cos, tan, sinc = _each(_entrywise, _jnp.sin, _jnp.cos, _jnp.tan, _jnp.sinc)
asin, acos, atan = _each(_entrywise, _jnp.arcsin, _jnp.arccos, _jnp.arctan)
sinh, cosh, tanh = _each(_entrywise, _jnp.sinh, _jnp.cosh, _jnp.tanh)
asinh, atanh = _each(_entrywise, _jnp.arcsinh, _jnp.arctanh)
acosh = _entrywise(_jnp.arccosh, safe=1.5)
exp, exp2, expm1 = _each(_entrywise, _jnp.exp, _jnp.exp2, _jnp.expm1)
log, log2, log10, log1p = _each(_entrywise, _jnp.log, _jnp.log2, _jnp.log10, _jnp.log1p)
sqrt, cbrt, rsqrt = _each(_entrywise, _jnp.sqrt, _jnp.cbrt, _lax.rsqrt)
erf, erfc, erfinv = _each(_entrywise, _special.erf, _special.erfc, _special.erfinv)
digamma, gammaln, i0 = _each(_entrywise, _special.digamma, _special.gammaln, _special.i0)
sigmoid, logit = _each(_entrywise, _nn.sigmoid, _special.logit)
reciprocal, angle = _each(_entrywise, _jnp.reciprocal, _jnp.angle)
frac = _entrywise(lambda x: x - _jnp.trunc(x))
isfinite, isinf, isnan = _each(_entrywise, _jnp.isfinite, _jnp.isinf, _jnp.isnan)
bitwise_not, logical_not = _each(_entrywise, _jnp.bitwise_not, _jnp.logical_not)

# Two operands.
add, subtract = (_entrywise(f, adds=True) for f in (_jnp.add, _jnp.subtract))
multiply = _entrywise(_jnp.multiply, scales=((0,), (1,)))
divide = _entrywise(_jnp.true_divide, scales=((0,),), by_arrays=False)
floor_divide, remainder, fmod = _each(_entrywise, _jnp.floor_divide, _jnp.remainder, _jnp.fmod)
power, hypot, atan2 = _each(_entrywise, _jnp.power, _jnp.hypot, _jnp.arctan2)
logaddexp, logaddexp2 = _each(_entrywise, _jnp.logaddexp, _jnp.logaddexp2)
maximum, minimum = _each(_entrywise, _jnp.maximum, _jnp.minimum)
fmax, fmin = _each(_entrywise, _jnp.fmax, _jnp.fmin)
copysign, nextafter = _each(_entrywise, _jnp.copysign, _jnp.nextafter)
heaviside, isclose = _each(_entrywise, _jnp.heaviside, _jnp.isclose)
equal, not_equal = _each(_entrywise, _jnp.equal, _jnp.not_equal)
greater, greater_equal = _each(_entrywise, _jnp.greater, _jnp.greater_equal)
less, less_equal = _each(_entrywise, _jnp.less, _jnp.less_equal)
logical_and, logical_or = _each(_entrywise, _jnp.logical_and, _jnp.logical_or)
logical_xor, bitwise_xor = _each(_entrywise, _jnp.logical_xor, _jnp.bitwise_xor)
bitwise_and, bitwise_or = _each(_entrywise, _jnp.bitwise_and, _jnp.bitwise_or)
left_shift, right_shift = _each(_entrywise, _jnp.left_shift, _jnp.right_shift)

# Aliases.
absolute, conjugate, fix, around = abs, conj, trunc, round
arcsin, arccos, arctan, arctan2 = asin, acos, atan, atan2
arcsinh, arccosh, arctanh = asinh, acosh, atanh
degrees, radians, invert = rad2deg, deg2rad, bitwise_not
true_divide, mod, pow = divide, remainder, power
bitwise_left_shift, bitwise_right_shift = left_shift, right_shift

# --- reduces -----------------------------------------------------------------------------

_nan = _jnp.nan

sum = _reduces(_of.total, _jnp.sum, zeros=_NO_CHANGE, like=_jnp.sum, initial=add)
prod = _reduces(
    _of.product, _jnp.prod, empty=1, zeros=_of.product_of_all, like=_jnp.prod, initial=multiply
)
mean = _reduces(_of.mean, _jnp.mean, empty=_nan, zeros=_of.mean_of_all, like=_jnp.mean)
var = _reduces(_of.variance, _jnp.var, empty=_nan, like=_jnp.var)
std = _reduces(_of.deviation, _jnp.std, empty=_nan, like=_jnp.std)
max = amax = _reduces(
    _of.maximum, _jnp.max, empty=_least, zeros=_of.maximum_of_all, initial=maximum
)
min = amin = _reduces(
    _of.minimum, _jnp.min, empty=_greatest, zeros=_of.minimum_of_all, initial=minimum
)
all = _reduces(_of.every, _jnp.all, empty=True, zeros=_of.every_of_all)
any = _reduces(_of.some, _jnp.any, zeros=_NO_CHANGE)
count_nonzero = _reduces(_of.count_nonzero, _jnp.count_nonzero, zeros=_NO_CHANGE)
argmax = _reduces(_of.first_maximum, _jnp.argmax, one_axis=True)
argmin = _reduces(_of.first_minimum, _jnp.argmin, one_axis=True)
ptp = _reduces(_of.peak_to_peak, _jnp.ptp)
logsumexp = _reduces(_of.logsumexp, _special.logsumexp, empty=-_jnp.inf, like=_jnp.mean)
# Arrays too: jnp.quantile of [1, inf] at 1 is nan, the product of inf and a weight of 0.
quantile = _reduces(_of.quantile, _jnp.quantile, empty=_nan, arrays_too=True)
percentile = _reduces(_of.percentile, _jnp.percentile, empty=_nan, arrays_too=True)
median = _reduces(_of.median, _jnp.median, empty=_nan, arrays_too=True)
_count = _reduces(_of.count)

cov, corrcoef, diff = _statistics.cov, _statistics.corrcoef, _statistics.diff
cumlogsumexp = _statistics.accumulates(_statistics.cumlogsumexp, -_jnp.inf)
cumprod = _statistics.accumulates(_jnp.cumprod, 1)
cumsum = _statistics.accumulates(_jnp.cumsum, 0)

_skips = _statistics.skips_nan
nanmax, nanmin, nanmean, nanmedian = (_skips(f, _nan) for f in (max, min, mean, median))
nanstd, nanvar, nanquantile = (_skips(f, _nan) for f in (std, var, quantile))
nanpercentile, nansum, nanprod = _skips(percentile, _nan), _skips(sum, 0), _skips(prod, 1)
nanargmax, nanargmin = (_skips(f, -1) for f in (argmax, argmin))
nancumsum, nancumprod = (_skips(f, None) for f in (cumsum, cumprod))

_weighed = _entrywise(lambda x, weight, dtype: x.astype(dtype) * weight.astype(dtype))

# Zeros change no norm of positive order; one zero makes a norm of negative order zero.
_norm_dtype = lambda x: _jnp.abs(_jnp.mean(x))
_norm = _reduces(_of.norm, zeros=_NO_CHANGE, like=_norm_dtype)
_negative_norm = _reduces(_of.norm, empty=_jnp.inf, like=_norm_dtype)


def norm(
    x: _types.TensorLike,
    ord: float | None = 2,  # noqa: A002
    axis: _types.Axis = None,
    keepdims: bool = False,
    where: _types.StorageLike | None = None,
) -> _types.Tensor:
    """Return the vector norm of the valid entries: the `ord`-th root of the sum of |x| ** ord.

    Over two axes it is the norm of their entries as one vector, and no matrix norm. The
    derivative is 0 where the norm is 0. Of an array without valid entries the norm is 0, or inf
    for a negative order.

    Args:
        ord: any number, not traced; inf is the largest |x|, -inf the smallest, 0 the number
            of entries that are not 0, None is 2.
        x, axis, keepdims, where: as of `jmask.numpy.sum`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.norm(jnp.array([3., 9., 4.]), where=jnp.array([True, False, True]))
        Array(5., dtype=float32)
    """
    order = _of.checked_order(ord)
    reduction = _norm if order >= 0 else _negative_norm
    return reduction(x, axis, keepdims, order, where=where)


def average(
    a: _types.TensorLike,
    axis: _types.Axis = None,
    weights: _types.TensorLike | None = None,
    returned: bool = False,
    keepdims: bool = False,
    *,
    where: _types.StorageLike | None = None,
) -> _types.Tensor | tuple[_types.Tensor, _types.Tensor]:
    """Return the mean of the valid entries, each counted by its weight.

    Args:
        a, axis, keepdims, where: as of `jmask.numpy.sum`.
        weights: an array that broadcasts to `a`, or (n,) for the n entries along one axis;
            all 1 by default. Where the weights of valid entries sum to 0, the result is nan or
            inf. Entries with a masked weight count as masked.
        returned: whether to return the sums of weights too.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.numpy.masked_invalid(jnp.array([1., jnp.nan, 3.]))
        >>> jmask.numpy.average(x, weights=jnp.array([1., 1., 3.])).to_tensor(0)
        Array(2.5, dtype=float32)
    """
    if weights is None and not returned:
        return mean(a, axis, keepdims=keepdims, where=where)
    x, w = (_as_tensor(_adopted(y)) for y in (a, 1.0 if weights is None else weights))
    axes, ndim = _checked_axes(axis, len(x.shape)), len(x.shape)
    if len(w.shape) == 1 < ndim and len(axes) == 1:
        w = expand_dims(w, [i for i in range(ndim) if i != axes[0]])
    dtype = _result_dtype(_jnp.mean, _joint_dtype(x, w))
    products = [_weighed(y, w, _wide(dtype)) for y in (x, ones_like(x))]
    total, sums = (sum(y, axes, keepdims=keepdims, where=where) for y in products)
    result, sums = divide(total, sums).astype(dtype), sums.astype(dtype)
    return (result, sums) if returned else result


def count(
    a: _types.TensorLike,
    axis: _types.Axis = None,
    keepdims: bool = False,
    where: _types.StorageLike | None = None,
) -> _types.Tensor:
    """Count the valid entries; the result is an array, as a count of 0 is not masked.

    Takes the arguments of `jmask.numpy.sum`. All entries of an ordinary tensor are valid.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.ones((2, 2)), jnp.array([[True], [False]]))
        >>> jmask.numpy.count(x, axis=1)
        Array([2, 0], dtype=int32)
    """
    return _data_of(_count(a, axis=axis, keepdims=keepdims, where=where))


# --- moves -------------------------------------------------------------------------------

_all_move = _functools.partial(_moves, variadic=True)

atleast_1d, atleast_2d = _each(_all_move, _jnp.atleast_1d, _jnp.atleast_2d)
atleast_3d, broadcast_arrays = _each(_all_move, _jnp.atleast_3d, _jnp.broadcast_arrays)
broadcast_to, reshape, ravel = _each(_moves, _jnp.broadcast_to, _jnp.reshape, _jnp.ravel)
expand_dims, squeeze = _each(_moves, _jnp.expand_dims, _jnp.squeeze)
transpose, permute_dims = _each(_moves, _jnp.transpose, _jnp.permute_dims)
matrix_transpose, swapaxes = _each(_moves, _jnp.matrix_transpose, _jnp.swapaxes)
moveaxis, rollaxis = _each(_moves, _jnp.moveaxis, _jnp.rollaxis)
flip, fliplr, flipud = _each(_moves, _jnp.flip, _jnp.fliplr, _jnp.flipud)
roll, rot90, tile, repeat = _each(_moves, _jnp.roll, _jnp.rot90, _jnp.tile, _jnp.repeat)
concatenate, stack, unstack = _each(_moves, _jnp.concatenate, _jnp.stack, _jnp.unstack)
concat = concatenate
vstack, hstack, dstack = _each(_moves, _jnp.vstack, _jnp.hstack, _jnp.dstack)
column_stack, delete = _each(_moves, _jnp.column_stack, _jnp.delete)
split, array_split = _each(_moves, _jnp.split, _jnp.array_split)
vsplit, hsplit, dsplit = _each(_moves, _jnp.vsplit, _jnp.hsplit, _jnp.dsplit)
sort, argsort, unique = _statistics.sort, _statistics.argsort, _statistics.unique
select, take, pad = _selection.select, _selection.take, _selection.pad
take_along_axis = _selection.take_along_axis
diag, diagonal, tril, triu = _each(_moves, _jnp.diag, _jnp.diagonal, _jnp.tril, _jnp.triu)

# Like another tensor, and with its mask.
copy, zeros_like = _each(_selection.likened, _jnp.copy, _jnp.zeros_like)
ones_like, full_like = _each(_selection.likened, _jnp.ones_like, _jnp.full_like)
empty_like = _selection.likened(_jnp.empty_like)


@_extends(_jnp.trace)
def trace(
    a: _types.TensorLike,
    offset: int = 0,
    axis1: int = 0,
    axis2: int = 1,
    dtype: _DTypeLike | None = None,
) -> _types.Tensor:
    """Sum the valid entries of diagonals, masked where there are none."""
    return sum(diagonal(a, offset, axis1, axis2), -1, dtype)


# --- contracts ---------------------------------------------------------------------------

dot, matmul = _each(_multiplies, _jnp.dot, _jnp.matmul)
# einsum("ij,jk", x, y), or einsum(x, [0, 1], y, [1, 2]).
einsum = _contracts(
    _jnp.einsum,
    lambda args: (
        range(1, len(args)) if isinstance(args[0], str) else range(0, len(args) - 1, 2)
    ),
)
inner, outer = _each(_contracts, _jnp.inner, _jnp.outer)
tensordot, vdot = _each(_contracts, _jnp.tensordot, _jnp.vdot)

# --- mask by a condition, as numpy.ma ----------------------------------------------------

_masks = _selection.masks_where

masked_equal = _masks("masked_equal", lambda x, value: x == value)
masked_greater = _masks("masked_greater", lambda x, value: x > value)
masked_greater_equal = _masks("masked_greater_equal", lambda x, value: x >= value)
masked_inside = _masks(
    "masked_inside", lambda x, v1, v2: (x >= _jnp.minimum(v1, v2)) & (x <= _jnp.maximum(v1, v2))
)
masked_invalid = _masks("masked_invalid", lambda x: ~_jnp.isfinite(x))
masked_less = _masks("masked_less", lambda x, value: x < value)
masked_less_equal = _masks("masked_less_equal", lambda x, value: x <= value)
masked_not_equal = _masks("masked_not_equal", lambda x, value: x != value)
masked_outside = _masks(
    "masked_outside", lambda x, v1, v2: (x < _jnp.minimum(v1, v2)) | (x > _jnp.maximum(v1, v2))
)
masked_values = _masks(
    "masked_values",
    lambda x, value, rtol=1e-5, atol=1e-8: (
        _jnp.isclose(x, value, rtol, atol)
        if _jnp.issubdtype(_jnp.result_type(x), _jnp.floating)
        else x == value
    ),
)
