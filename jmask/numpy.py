"""Functions with the names of `jax.numpy`, for masked, sparse and ordinary tensors alike.

    jmask.numpy.sqrt(x)             x: MaskedTensor on any storage, RowSparse, BCOO, array
    jmask.numpy.mean(x, axis=0)     over the valid entries
    jmask.numpy.mean(a, where=m)    an array and a mask in place of a MaskedTensor

A function has JAX's arguments in JAX's order. What it does with masks and storages is one word
of its line: *entrywise*, *reduces*, *moves* or *contracts* (`_ops/lift.py`, `_ops/reduce.py`);
what it does with zeros that are not stored is said beside it (`_ops/rows.py`).

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

import jax.numpy as _jnp
import jax.scipy.special as _special
from jax import lax as _lax
from jax import nn as _nn
from jax.typing import DTypeLike as _DTypeLike

from jmask._base.types import Axis as _Axis
from jmask._base.types import Mask as _Mask
from jmask._base.types import Tensor as _Tensor
from jmask._base.types import TensorLike as _TensorLike
from jmask._ops import formulas as _formulas
from jmask._ops.contractions import dot as dot
from jmask._ops.contractions import einsum as einsum
from jmask._ops.contractions import matmul as matmul
from jmask._ops.lift import contracts as _contracts
from jmask._ops.lift import elementwise as elementwise
from jmask._ops.lift import entrywise as _entrywise
from jmask._ops.lift import moves as _moves
from jmask._ops.order import accumulates as _accumulates
from jmask._ops.order import argsort as argsort
from jmask._ops.order import compressed as compressed
from jmask._ops.order import cumlogsumexp as _cumlogsumexp
from jmask._ops.order import nonzero as nonzero
from jmask._ops.order import sort as sort
from jmask._ops.order import top_k as top_k
from jmask._ops.order import unique as unique
from jmask._ops.reduce import ZEROS_CHANGE_NOTHING as _NOTHING
from jmask._ops.reduce import greatest as _greatest
from jmask._ops.reduce import least as _least
from jmask._ops.reduce import reduces as _reduces
from jmask._ops.selection import likened as _likened
from jmask._ops.selection import masked_fill as masked_fill
from jmask._ops.selection import masked_where as masked_where
from jmask._ops.selection import masks_where as _masks_where
from jmask._ops.selection import pad as pad
from jmask._ops.selection import select as select
from jmask._ops.selection import take as take
from jmask._ops.selection import take_along_axis as take_along_axis
from jmask._ops.selection import where as where
from jmask._ops.statistics import allclose as allclose
from jmask._ops.statistics import array_equal as array_equal
from jmask._ops.statistics import corrcoef as corrcoef
from jmask._ops.statistics import cov as cov
from jmask._ops.statistics import diff as diff
from jmask._ops.statistics import skips_nan as _skips_nan
from jmask._ops.statistics import weighted_average as _weighted_average

# --- entrywise ---------------------------------------------------------------------------

# One operand.
abs = absolute = _entrywise(_jnp.abs)
acos = arccos = _entrywise(_jnp.arccos)
acosh = arccosh = _entrywise(_jnp.arccosh, safe=1.5)
angle = _entrywise(_jnp.angle)
asin = arcsin = _entrywise(_jnp.arcsin)
asinh = arcsinh = _entrywise(_jnp.arcsinh)
atan = arctan = _entrywise(_jnp.arctan)
atanh = arctanh = _entrywise(_jnp.arctanh)
bitwise_not = invert = _entrywise(_jnp.bitwise_not)
cbrt = _entrywise(_jnp.cbrt)
ceil = _entrywise(_jnp.ceil)
clip = _entrywise(_jnp.clip)
conj = conjugate = _entrywise(_jnp.conj, scales=((0,),))
cos = _entrywise(_jnp.cos)
cosh = _entrywise(_jnp.cosh)
deg2rad = radians = _entrywise(_jnp.deg2rad, scales=((0,),))
digamma = _entrywise(_special.digamma)
erf = _entrywise(_special.erf)
erfc = _entrywise(_special.erfc)
erfinv = _entrywise(_special.erfinv)
exp = _entrywise(_jnp.exp)
exp2 = _entrywise(_jnp.exp2)
expm1 = _entrywise(_jnp.expm1)
fix = trunc = _entrywise(_jnp.trunc)
floor = _entrywise(_jnp.floor)
frac = _entrywise(lambda x: x - _jnp.trunc(x))
i0 = _entrywise(_special.i0)
imag = _entrywise(_jnp.imag, scales=((0,),))
isfinite = _entrywise(_jnp.isfinite)
isinf = _entrywise(_jnp.isinf)
isnan = _entrywise(_jnp.isnan)
gammaln = _entrywise(_special.gammaln)
log = _entrywise(_jnp.log)
log10 = _entrywise(_jnp.log10)
log1p = _entrywise(_jnp.log1p)
log2 = _entrywise(_jnp.log2)
logical_not = _entrywise(_jnp.logical_not)
logit = _entrywise(_special.logit)
nan_to_num = _entrywise(_jnp.nan_to_num)
negative = _entrywise(_jnp.negative, scales=((0,),))
positive = _entrywise(_jnp.positive, scales=((0,),))
rad2deg = degrees = _entrywise(_jnp.rad2deg, scales=((0,),))
real = _entrywise(_jnp.real, scales=((0,),))
reciprocal = _entrywise(_jnp.reciprocal)
rint = _entrywise(_jnp.rint)
round = around = _entrywise(_jnp.round)
rsqrt = _entrywise(_lax.rsqrt)
sigmoid = _entrywise(_nn.sigmoid)
sign = _entrywise(_jnp.sign)
signbit = _entrywise(_jnp.signbit)
sin = _entrywise(_jnp.sin)
sinc = _entrywise(_jnp.sinc)
sinh = _entrywise(_jnp.sinh)
sqrt = _entrywise(_jnp.sqrt)
square = _entrywise(_jnp.square)
tan = _entrywise(_jnp.tan)
tanh = _entrywise(_jnp.tanh)

# Two operands.
add = _entrywise(_jnp.add, adds=True)
atan2 = arctan2 = _entrywise(_jnp.arctan2)
bitwise_and = _entrywise(_jnp.bitwise_and)
bitwise_left_shift = left_shift = _entrywise(_jnp.left_shift)
bitwise_or = _entrywise(_jnp.bitwise_or)
bitwise_right_shift = right_shift = _entrywise(_jnp.right_shift)
bitwise_xor = _entrywise(_jnp.bitwise_xor)
copysign = _entrywise(_jnp.copysign)
divide = true_divide = _entrywise(_jnp.true_divide, scales=((0,),), by_arrays=False)
equal = _entrywise(_jnp.equal)
floor_divide = _entrywise(_jnp.floor_divide)
fmax = _entrywise(_jnp.fmax)
fmin = _entrywise(_jnp.fmin)
fmod = _entrywise(_jnp.fmod)
greater = _entrywise(_jnp.greater)
greater_equal = _entrywise(_jnp.greater_equal)
heaviside = _entrywise(_jnp.heaviside)
hypot = _entrywise(_jnp.hypot)
isclose = _entrywise(_jnp.isclose)
less = _entrywise(_jnp.less)
less_equal = _entrywise(_jnp.less_equal)
logaddexp = _entrywise(_jnp.logaddexp)
logaddexp2 = _entrywise(_jnp.logaddexp2)
logical_and = _entrywise(_jnp.logical_and)
logical_or = _entrywise(_jnp.logical_or)
logical_xor = _entrywise(_jnp.logical_xor)
maximum = _entrywise(_jnp.maximum)
minimum = _entrywise(_jnp.minimum)
multiply = _entrywise(_jnp.multiply, scales=((0,), (1,)))
nextafter = _entrywise(_jnp.nextafter)
not_equal = _entrywise(_jnp.not_equal)
power = pow = _entrywise(_jnp.power)
remainder = mod = _entrywise(_jnp.remainder)
subtract = _entrywise(_jnp.subtract, adds=True)

# --- reduces -----------------------------------------------------------------------------

_nan = _jnp.nan

sum = _reduces(_formulas.total, _jnp.sum, zeros=_NOTHING, like=_jnp.sum, initial=add)
prod = _reduces(
    _formulas.product, _jnp.prod, empty=1, zeros=_formulas.product_of_all, like=_jnp.prod,
    initial=multiply,
)  # fmt: skip
mean = _reduces(
    _formulas.mean, _jnp.mean, empty=_nan, zeros=_formulas.mean_of_all, like=_jnp.mean
)
var = _reduces(_formulas.variance, _jnp.var, empty=_nan, like=_jnp.var)
std = _reduces(_formulas.deviation, _jnp.std, empty=_nan, like=_jnp.std)
max = amax = _reduces(
    _formulas.maximum, _jnp.max, empty=_least, zeros=_formulas.maximum_of_all, initial=maximum
)
min = amin = _reduces(
    _formulas.minimum,
    _jnp.min,
    empty=_greatest,
    zeros=_formulas.minimum_of_all,
    initial=minimum,
)
all = _reduces(_formulas.every, _jnp.all, empty=True, zeros=_formulas.every_of_all)
any = _reduces(_formulas.some, _jnp.any, zeros=_NOTHING)
count_nonzero = _reduces(_formulas.number_of_nonzero, _jnp.count_nonzero, zeros=_NOTHING)
argmax = _reduces(_formulas.first_maximum, _jnp.argmax, one_axis=True)
argmin = _reduces(_formulas.first_minimum, _jnp.argmin, one_axis=True)
ptp = _reduces(_formulas.spread, _jnp.ptp)
logsumexp = _reduces(_formulas.logsumexp, _special.logsumexp, empty=-_jnp.inf, like=_jnp.mean)
# By sorting, also for arrays: an infinite neighbour without weight is not read.
quantile = _reduces(_formulas.quantile, _jnp.quantile, empty=_nan, arrays_too=True)
percentile = _reduces(_formulas.percentile, _jnp.percentile, empty=_nan, arrays_too=True)
median = _reduces(_formulas.median, _jnp.median, empty=_nan, arrays_too=True)
_count = _reduces(_formulas.number, empty=0)

cumlogsumexp = _accumulates(_cumlogsumexp, -_jnp.inf)
cumprod = _accumulates(_jnp.cumprod, 1)
cumsum = _accumulates(_jnp.cumsum, 0)

nanargmax = _skips_nan(argmax, _jnp.nanargmax, -1)
nanargmin = _skips_nan(argmin, _jnp.nanargmin, -1)
nancumprod = _skips_nan(cumprod, _jnp.nancumprod, None)
nancumsum = _skips_nan(cumsum, _jnp.nancumsum, None)
nanmax = _skips_nan(max, _jnp.nanmax, _nan)
nanmean = _skips_nan(mean, _jnp.nanmean, _nan)
nanmedian = _skips_nan(median, _jnp.nanmedian, _nan)
nanmin = _skips_nan(min, _jnp.nanmin, _nan)
nanpercentile = _skips_nan(percentile, _jnp.nanpercentile, _nan)
nanprod = _skips_nan(prod, _jnp.nanprod, 1)
nanquantile = _skips_nan(quantile, _jnp.nanquantile, _nan)
nanstd = _skips_nan(std, _jnp.nanstd, _nan)
nansum = _skips_nan(sum, _jnp.nansum, 0)
nanvar = _skips_nan(var, _jnp.nanvar, _nan)


# An entry that is zero makes a norm of negative order zero, stored or not.
_size = lambda x: _jnp.abs(_jnp.mean(x))
_norm = _reduces(_formulas.norm, zeros=_NOTHING, like=_size)
_negative_norm = _reduces(_formulas.norm, like=_size)


def norm(
    x: _TensorLike,
    ord: float | None = 2,  # noqa: A002
    axis: _Axis = None,
    keepdims: bool = False,
    where: _Mask | None = None,
) -> _Tensor:
    """Return the vector norm of the valid entries: the `ord`-th root of the sum of |x| ** ord.

    Always of the entries as one vector, also over two axes. The derivative is 0 where the
    norm is 0. A norm of negative order of nothing is inf.

    Args:
        x: `MaskedTensor` on any storage, RowSparse, BCOO, BCSR or array.
        ord: any number, not traced; inf is the largest |x|, -inf the smallest, 0 the number
            of entries that are not 0, None is 2.
        axis: an int, a tuple of ints or None, which is all axes.
        keepdims: whether reduced axes stay, with size 1.
        where: booleans that broadcast to `x`; other entries take no part.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.norm(jnp.array([3., 9., 4.]), where=jnp.array([True, False, True]))
        Array(5., dtype=float32)
    """
    order = _formulas.checked_order(ord)
    reduction = _norm if order >= 0 else _negative_norm
    return reduction(x, axis, keepdims, order, where=where)


def average(
    a: _TensorLike,
    axis: _Axis = None,
    weights: _TensorLike | None = None,
    returned: bool = False,
    keepdims: bool = False,
    *,
    where: _Mask | None = None,
) -> _Tensor | tuple[_Tensor, _Tensor]:
    """Return the mean of the valid entries, each counted by its weight.

    Args:
        a: `MaskedTensor` on any storage, RowSparse, BCOO, BCSR or array.
        axis: an int, a tuple of ints or None, which is all axes.
        weights: an array that broadcasts to `a`, or (n,) for the n entries along one axis;
            all 1 by default. Where those of valid entries sum to 0, the result is nan or
            inf. Entries with a masked weight take no part, as masked ones.
        returned: whether to return the sums of weights too.
        keepdims: whether reduced axes stay, with size 1.
        where: booleans that broadcast to `a`; other entries take no part.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.numpy.masked_invalid(jnp.array([1., jnp.nan, 3.]))
        >>> jmask.numpy.average(x, weights=jnp.array([1., 1., 3.])).to_tensor(0)
        Array(2.5, dtype=float32)
    """
    if weights is None and not returned:
        return mean(a, axis, keepdims=keepdims, where=where)
    weights = _jnp.ones(()) if weights is None else weights
    result, sums = _weighted_average(a, axis, weights, keepdims, where)
    return (result, sums) if returned else result


def count(
    a: _TensorLike, axis: _Axis = None, keepdims: bool = False, where: _Mask | None = None
) -> _Tensor:
    """Count the valid entries: an ordinary tensor, as there always is a number.

    All entries of an ordinary tensor are valid.

    Args:
        a: `MaskedTensor` on any storage, or another tensor.
        axis: an int, a tuple of ints or None, which is all axes.
        keepdims: whether reduced axes stay, with size 1.
        where: booleans that broadcast to `a`; other entries do not count.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.ones((2, 2)), jnp.array([[True], [False]]))
        >>> jmask.numpy.count(x, axis=1)
        Array([2, 0], dtype=int32)
    """
    result = _count(a, axis=axis, keepdims=keepdims, where=where)
    return result.storage if hasattr(result, "storage") else result


# --- moves -------------------------------------------------------------------------------

array_split = _moves(_jnp.array_split)
atleast_1d = _moves(_jnp.atleast_1d, variadic=True)
atleast_2d = _moves(_jnp.atleast_2d, variadic=True)
atleast_3d = _moves(_jnp.atleast_3d, variadic=True)
broadcast_arrays = _moves(_jnp.broadcast_arrays, variadic=True)
broadcast_to = _moves(_jnp.broadcast_to)
column_stack = _moves(_jnp.column_stack)
concat = concatenate = _moves(_jnp.concatenate)
delete = _moves(_jnp.delete)
diag = _moves(_jnp.diag)
diagonal = _moves(_jnp.diagonal)
dsplit = _moves(_jnp.dsplit)
dstack = _moves(_jnp.dstack)
expand_dims = _moves(_jnp.expand_dims)
flip = _moves(_jnp.flip)
fliplr = _moves(_jnp.fliplr)
flipud = _moves(_jnp.flipud)
hsplit = _moves(_jnp.hsplit)
hstack = _moves(_jnp.hstack)
matrix_transpose = _moves(_jnp.matrix_transpose)
moveaxis = _moves(_jnp.moveaxis)
permute_dims = _moves(_jnp.permute_dims)
ravel = _moves(_jnp.ravel)
repeat = _moves(_jnp.repeat)
reshape = _moves(_jnp.reshape)
roll = _moves(_jnp.roll)
rollaxis = _moves(_jnp.rollaxis)
rot90 = _moves(_jnp.rot90)
split = _moves(_jnp.split)
squeeze = _moves(_jnp.squeeze)
stack = _moves(_jnp.stack)
swapaxes = _moves(_jnp.swapaxes)
tile = _moves(_jnp.tile)
transpose = _moves(_jnp.transpose)
tril = _moves(_jnp.tril)
triu = _moves(_jnp.triu)
unstack = _moves(_jnp.unstack)
vsplit = _moves(_jnp.vsplit)
vstack = _moves(_jnp.vstack)

# Made like another tensor, whose mask they have.
copy = _likened(_jnp.copy)
empty_like = _likened(_jnp.empty_like)
full_like = _likened(_jnp.full_like)
ones_like = _likened(_jnp.ones_like)
zeros_like = _likened(_jnp.zeros_like)


def trace(
    a: _TensorLike,
    offset: int = 0,
    axis1: int = 0,
    axis2: int = 1,
    dtype: _DTypeLike | None = None,
    out: None = None,
) -> _Tensor:
    """Sum the valid entries of diagonals as `jax.numpy.trace`, masked where there are none.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.ones((2, 2)), jnp.array([[True, True], [True, False]]))
        >>> jmask.numpy.trace(x).to_tensor(0)
        Array(1., dtype=float32)
    """
    return sum(diagonal(a, offset, axis1, axis2), -1, dtype, out)


# --- contracts ---------------------------------------------------------------------------

inner = _contracts(_jnp.inner)
outer = _contracts(_jnp.outer)
tensordot = _contracts(_jnp.tensordot)
vdot = _contracts(_jnp.vdot)

# --- masks what a condition holds of, as numpy.ma ----------------------------------------

masked_equal = _masks_where("masked_equal", "equal `value`", lambda x, value: x == value)
masked_greater = _masks_where("masked_greater", "exceed `value`", lambda x, value: x > value)
masked_greater_equal = _masks_where(
    "masked_greater_equal", "are `value` or greater", lambda x, value: x >= value
)
masked_inside = _masks_where(
    "masked_inside",
    "lie from `v1` to `v2`",
    lambda x, v1, v2: (x >= _jnp.minimum(v1, v2)) & (x <= _jnp.maximum(v1, v2)),
)
masked_invalid = _masks_where(
    "masked_invalid", "are nan or infinite", lambda x: ~_jnp.isfinite(x)
)
masked_less = _masks_where("masked_less", "are less than `value`", lambda x, value: x < value)
masked_less_equal = _masks_where(
    "masked_less_equal", "are `value` or less", lambda x, value: x <= value
)
masked_not_equal = _masks_where(
    "masked_not_equal", "differ from `value`", lambda x, value: x != value
)
masked_outside = _masks_where(
    "masked_outside",
    "lie outside `v1` to `v2`",
    lambda x, v1, v2: (x < _jnp.minimum(v1, v2)) | (x > _jnp.maximum(v1, v2)),
)
masked_values = _masks_where(
    "masked_values",
    "are close to `value`",
    lambda x, value, rtol=1e-5, atol=1e-8: (
        _jnp.isclose(x, value, rtol, atol)
        if _jnp.issubdtype(_jnp.result_type(x), _jnp.floating)
        else x == value
    ),
)
