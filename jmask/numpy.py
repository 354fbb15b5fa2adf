"""Functions with the names of `jax.numpy`, for masked, sparse and ordinary tensors alike.

    jmask.numpy.sqrt(x)             x: MaskedTensor on any storage, RowSparse, BCOO, array
    jmask.numpy.mean(x, axis=0)     over the valid entries
    jmask.numpy.mean(a, where=m)    an array and a mask in place of a MaskedTensor

Functions that are JAX's, lifted to other storages, are the tables below: elementwise ones,
sums of products, and what moves entries.
"""

import jax.numpy as _jnp
import jax.scipy.special as _special
from jax import lax as _lax
from jax import nn as _nn

from jmask._ops.elementwise import elementwise as elementwise


def _fraction(x):
    return x - _jnp.trunc(x)


# One operand.
abs = absolute = elementwise(_jnp.abs)
acos = arccos = elementwise(_jnp.arccos)
acosh = arccosh = elementwise(_jnp.arccosh)
angle = elementwise(_jnp.angle)
asin = arcsin = elementwise(_jnp.arcsin)
asinh = arcsinh = elementwise(_jnp.arcsinh)
atan = arctan = elementwise(_jnp.arctan)
atanh = arctanh = elementwise(_jnp.arctanh)
bitwise_not = invert = elementwise(_jnp.bitwise_not)
cbrt = elementwise(_jnp.cbrt)
ceil = elementwise(_jnp.ceil)
clip = elementwise(_jnp.clip)
conj = conjugate = elementwise(_jnp.conj)
cos = elementwise(_jnp.cos)
cosh = elementwise(_jnp.cosh)
deg2rad = radians = elementwise(_jnp.deg2rad)
digamma = elementwise(_special.digamma)
erf = elementwise(_special.erf)
erfc = elementwise(_special.erfc)
erfinv = elementwise(_special.erfinv)
exp = elementwise(_jnp.exp)
exp2 = elementwise(_jnp.exp2)
expm1 = elementwise(_jnp.expm1)
fix = trunc = elementwise(_jnp.trunc)
floor = elementwise(_jnp.floor)
frac = elementwise(_fraction)
i0 = elementwise(_special.i0)
imag = elementwise(_jnp.imag)
isfinite = elementwise(_jnp.isfinite)
isinf = elementwise(_jnp.isinf)
isnan = elementwise(_jnp.isnan)
gammaln = elementwise(_special.gammaln)
log = elementwise(_jnp.log)
log10 = elementwise(_jnp.log10)
log1p = elementwise(_jnp.log1p)
log2 = elementwise(_jnp.log2)
logical_not = elementwise(_jnp.logical_not)
logit = elementwise(_special.logit)
nan_to_num = elementwise(_jnp.nan_to_num)
negative = elementwise(_jnp.negative)
positive = elementwise(_jnp.positive)
rad2deg = degrees = elementwise(_jnp.rad2deg)
real = elementwise(_jnp.real)
reciprocal = elementwise(_jnp.reciprocal)
rint = elementwise(_jnp.rint)
round = around = elementwise(_jnp.round)
rsqrt = elementwise(_lax.rsqrt)
sigmoid = elementwise(_nn.sigmoid)
sign = elementwise(_jnp.sign)
signbit = elementwise(_jnp.signbit)
sin = elementwise(_jnp.sin)
sinc = elementwise(_jnp.sinc)
sinh = elementwise(_jnp.sinh)
sqrt = elementwise(_jnp.sqrt)
square = elementwise(_jnp.square)
tan = elementwise(_jnp.tan)
tanh = elementwise(_jnp.tanh)

# Two operands.
add = elementwise(_jnp.add)
atan2 = arctan2 = elementwise(_jnp.arctan2)
bitwise_and = elementwise(_jnp.bitwise_and)
bitwise_left_shift = left_shift = elementwise(_jnp.left_shift)
bitwise_or = elementwise(_jnp.bitwise_or)
bitwise_right_shift = right_shift = elementwise(_jnp.right_shift)
bitwise_xor = elementwise(_jnp.bitwise_xor)
copysign = elementwise(_jnp.copysign)
divide = true_divide = elementwise(_jnp.true_divide)
equal = elementwise(_jnp.equal)
floor_divide = elementwise(_jnp.floor_divide)
fmax = elementwise(_jnp.fmax)
fmin = elementwise(_jnp.fmin)
fmod = elementwise(_jnp.fmod)
greater = elementwise(_jnp.greater)
greater_equal = elementwise(_jnp.greater_equal)
heaviside = elementwise(_jnp.heaviside)
hypot = elementwise(_jnp.hypot)
isclose = elementwise(_jnp.isclose)
less = elementwise(_jnp.less)
less_equal = elementwise(_jnp.less_equal)
logaddexp = elementwise(_jnp.logaddexp)
logaddexp2 = elementwise(_jnp.logaddexp2)
logical_and = elementwise(_jnp.logical_and)
logical_or = elementwise(_jnp.logical_or)
logical_xor = elementwise(_jnp.logical_xor)
maximum = elementwise(_jnp.maximum)
minimum = elementwise(_jnp.minimum)
multiply = elementwise(_jnp.multiply)
nextafter = elementwise(_jnp.nextafter)
not_equal = elementwise(_jnp.not_equal)
power = pow = elementwise(_jnp.power)
remainder = mod = elementwise(_jnp.remainder)
subtract = elementwise(_jnp.subtract)

# Products.
from jmask._ops.contractions import contraction as _contraction
from jmask._ops.contractions import dot as dot
from jmask._ops.contractions import einsum as einsum
from jmask._ops.contractions import matmul as matmul
from jmask._ops.contractions import outer as outer

inner = _contraction(_jnp.inner)
tensordot = _contraction(_jnp.tensordot)
vdot = _contraction(_jnp.vdot)

# Masks.
from jmask._ops.masking import masked_equal as masked_equal
from jmask._ops.masking import masked_fill as masked_fill
from jmask._ops.masking import masked_greater as masked_greater
from jmask._ops.masking import masked_greater_equal as masked_greater_equal
from jmask._ops.masking import masked_inside as masked_inside
from jmask._ops.masking import masked_invalid as masked_invalid
from jmask._ops.masking import masked_less as masked_less
from jmask._ops.masking import masked_less_equal as masked_less_equal
from jmask._ops.masking import masked_not_equal as masked_not_equal
from jmask._ops.masking import masked_outside as masked_outside
from jmask._ops.masking import masked_values as masked_values
from jmask._ops.masking import masked_where as masked_where
from jmask._ops.masking import select as select

# Order.
from jmask._ops.order import argsort as argsort
from jmask._ops.order import compressed as compressed
from jmask._ops.order import cumlogsumexp as cumlogsumexp
from jmask._ops.order import cumprod as cumprod
from jmask._ops.order import cumsum as cumsum
from jmask._ops.order import median as median
from jmask._ops.order import nonzero as nonzero
from jmask._ops.order import percentile as percentile
from jmask._ops.order import quantile as quantile
from jmask._ops.order import sort as sort
from jmask._ops.order import top_k as top_k
from jmask._ops.order import unique as unique

# Reductions.
from jmask._ops.reductions import all as all
from jmask._ops.reductions import amax as amax
from jmask._ops.reductions import amin as amin
from jmask._ops.reductions import any as any
from jmask._ops.reductions import argmax as argmax
from jmask._ops.reductions import argmin as argmin
from jmask._ops.reductions import average as average
from jmask._ops.reductions import count as count
from jmask._ops.reductions import count_nonzero as count_nonzero
from jmask._ops.reductions import logsumexp as logsumexp
from jmask._ops.reductions import max as max
from jmask._ops.reductions import mean as mean
from jmask._ops.reductions import min as min
from jmask._ops.reductions import norm as norm
from jmask._ops.reductions import prod as prod
from jmask._ops.reductions import ptp as ptp
from jmask._ops.reductions import std as std
from jmask._ops.reductions import sum as sum
from jmask._ops.reductions import var as var

# Shapes and selection.
from jmask._ops.shape import broadcast_to as broadcast_to
from jmask._ops.shape import concatenate as concatenate
from jmask._ops.shape import diagonal as diagonal
from jmask._ops.shape import expand_dims as expand_dims
from jmask._ops.shape import joined_rows as _joined_rows
from jmask._ops.shape import like as _like
from jmask._ops.shape import moved as _moved
from jmask._ops.shape import pad as pad
from jmask._ops.shape import permuted as _permuted
from jmask._ops.shape import reshaped as _reshaped
from jmask._ops.shape import split as split
from jmask._ops.shape import take as take
from jmask._ops.shape import take_along_axis as take_along_axis
from jmask._ops.shape import where as where

array_split = _moved(_jnp.array_split)
atleast_1d = _moved(_jnp.atleast_1d, variadic=True)
atleast_2d = _moved(_jnp.atleast_2d, variadic=True)
atleast_3d = _moved(_jnp.atleast_3d, variadic=True)
broadcast_arrays = _moved(_jnp.broadcast_arrays, variadic=True)
column_stack = _moved(_jnp.column_stack, rule=_joined_rows)
concat = concatenate
copy = _like(_jnp.copy)
delete = _moved(_jnp.delete)
diag = _moved(_jnp.diag)
dsplit = _moved(_jnp.dsplit)
dstack = _moved(_jnp.dstack)
empty_like = _like(_jnp.empty_like)
flip = _moved(_jnp.flip)
fliplr = _moved(_jnp.fliplr)
flipud = _moved(_jnp.flipud)
full_like = _like(_jnp.full_like)
hsplit = _moved(_jnp.hsplit)
hstack = _moved(_jnp.hstack, rule=_joined_rows)
matrix_transpose = _moved(_jnp.matrix_transpose, rule=_permuted)
moveaxis = _moved(_jnp.moveaxis, rule=_permuted)
ones_like = _like(_jnp.ones_like)
permute_dims = _moved(_jnp.permute_dims, rule=_permuted)
ravel = _moved(_jnp.ravel, rule=_reshaped)
repeat = _moved(_jnp.repeat)
reshape = _moved(_jnp.reshape, rule=_reshaped)
roll = _moved(_jnp.roll)
rollaxis = _moved(_jnp.rollaxis, rule=_permuted)
rot90 = _moved(_jnp.rot90)
squeeze = _moved(_jnp.squeeze, rule=_reshaped)
stack = _moved(_jnp.stack)
swapaxes = _moved(_jnp.swapaxes, rule=_permuted)
tile = _moved(_jnp.tile)
transpose = _moved(_jnp.transpose, rule=_permuted)
tril = _moved(_jnp.tril)
triu = _moved(_jnp.triu)
unstack = _moved(_jnp.unstack)
vsplit = _moved(_jnp.vsplit)
vstack = _moved(_jnp.vstack, rule=_joined_rows)
zeros_like = _like(_jnp.zeros_like)

# Statistics and comparisons.
from jmask._ops.statistics import allclose as allclose
from jmask._ops.statistics import array_equal as array_equal
from jmask._ops.statistics import bincount as bincount
from jmask._ops.statistics import corrcoef as corrcoef
from jmask._ops.statistics import cov as cov
from jmask._ops.statistics import diff as diff
from jmask._ops.statistics import histogram as histogram
from jmask._ops.statistics import nanargmax as nanargmax
from jmask._ops.statistics import nanargmin as nanargmin
from jmask._ops.statistics import nancumprod as nancumprod
from jmask._ops.statistics import nancumsum as nancumsum
from jmask._ops.statistics import nanmax as nanmax
from jmask._ops.statistics import nanmean as nanmean
from jmask._ops.statistics import nanmedian as nanmedian
from jmask._ops.statistics import nanmin as nanmin
from jmask._ops.statistics import nanpercentile as nanpercentile
from jmask._ops.statistics import nanprod as nanprod
from jmask._ops.statistics import nanquantile as nanquantile
from jmask._ops.statistics import nanstd as nanstd
from jmask._ops.statistics import nansum as nansum
from jmask._ops.statistics import nanvar as nanvar
from jmask._ops.statistics import trace as trace

# What the operators and methods of tensors are.
from jmask._tensors.methods import install as _install

_install(**{name: x for name, x in globals().items() if callable(x) and name[0] != "_"})
