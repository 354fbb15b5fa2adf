"""Statistics made of other functions: without nan, of pairs, of bins; and comparisons.

    x = MaskedTensor([1, nan, 3, 7], [T, T, T, F])
    nansum(x) = 4,  nanmean(x) = 2                       nan takes no part, as masked entries
    diff(x) = [nan, nan, --],  allclose(x, x) = False    a pair exists where both do

    cov([[1, 2, --], [1, 4, 5]])                         of each two variables, over the
      = [[0.5, 1.5], [1.5, 4.33]]                        observations that both have

Results that count (`histogram`, `bincount`) or decide (`allclose`, `array_equal`) always exist,
so they are arrays.
"""

import inspect
from collections.abc import Sequence
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmask._base.array_types import wide
from jmask._base.types import Argument, Function, Scalar, Tensor, TensorLike
from jmask._ops import kernels, order, reductions
from jmask._ops.contractions import outer
from jmask._ops.elementwise import elementwise
from jmask._ops.groups import checked_axes
from jmask._ops.shape import became_dense, broadcast_to, concatenate, dense, diagonal
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    any_masked,
    as_masked_tensor,
    as_tensor,
    joined,
    read_at,
)
from jmask._tensors.storage import stored_values

# --- without nan -------------------------------------------------------------------------

_Reduction = TypeVar("_Reduction", bound=Function)


def _skipping_nan(function: _Reduction, empty: float | None, example: str) -> _Reduction:
    """Return the function of the entries that are not nan.

    Args:
        function: a reduction, or a running one.
        empty: the result of an array where there are no such entries. None keeps what is
            under the mask.
        example: the arguments after the first, and the result for [1, nan, 3].
    """
    name = f"nan{function.__name__}"

    def skipping(x: TensorLike, *args: Argument, **kwargs: Argument) -> Tensor:
        x = as_tensor(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return function(x, *args, **kwargs)
        masked = isinstance(x, MaskedTensor)
        x = x if masked else MaskedTensor(dense(x, name))
        is_nan = jnp.isnan(stored_values(x.storage))
        result = function(joined(x.storage, x.valid & ~is_nan), *args, **kwargs)
        if masked:
            return result
        return result.storage if empty is None else result.to_tensor(empty)

    vars(skipping)["__signature__"] = inspect.signature(function)
    text = f"""Do as `{function.__name__}` with nan as a masked entry.

    Arguments and errors are those of `jmask.numpy.{function.__name__}`. Where nothing but nan
    is there, a `MaskedTensor` gives a masked entry, and an array what `jax.numpy.{name}`
    gives. Ordinary sparse tensors become dense.
    """
    arguments, result = example.split(" -> ")
    example = f"jnp.array([1., jnp.nan, 3.]){arguments} -> Array({result})"
    return reductions.named(cast(_Reduction, skipping), name, text, example)


nansum = _skipping_nan(reductions.sum, 0, " -> 4., dtype=float32")
nanprod = _skipping_nan(reductions.prod, 1, " -> 3., dtype=float32")
nanmean = _skipping_nan(reductions.mean, np.nan, " -> 2., dtype=float32")
nanvar = _skipping_nan(reductions.var, np.nan, ", ddof=1 -> 2., dtype=float32")
nanstd = _skipping_nan(reductions.std, np.nan, " -> 1., dtype=float32")
nanmax = _skipping_nan(reductions.max, np.nan, " -> 3., dtype=float32")
nanmin = _skipping_nan(reductions.min, np.nan, " -> 1., dtype=float32")
nanargmax = _skipping_nan(reductions.argmax, -1, " -> 2, dtype=int32")
nanargmin = _skipping_nan(reductions.argmin, -1, " -> 0, dtype=int32")
nanmedian = _skipping_nan(order.median, np.nan, " -> 2., dtype=float32")
nanquantile = _skipping_nan(order.quantile, np.nan, ", 0.25 -> 1.5, dtype=float32")
nanpercentile = _skipping_nan(order.percentile, np.nan, ", 25 -> 1.5, dtype=float32")
nancumsum = _skipping_nan(order.cumsum, None, " -> [1., 1., 4.], dtype=float32")
nancumprod = _skipping_nan(order.cumprod, None, " -> [1., 1., 3.], dtype=float32")


# --- of pairs ----------------------------------------------------------------------------

_subtract, _differ = elementwise(jnp.subtract), elementwise(jnp.not_equal)
_divide = elementwise(jnp.true_divide)
_root = elementwise(lambda x: jnp.sqrt(jnp.real(x)))


def cov(
    m: TensorLike,
    y: TensorLike | None = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: TensorLike | None = None,
    aweights: TensorLike | None = None,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Return the covariances of variables, each over the observations that both have.

    As in `numpy.ma.cov`, the mean of a variable is that of all its entries, and the divisor
    counts the observations that exist for both variables. Sparse storage becomes dense.

    Args:
        m (variables, observations): `MaskedTensor`, sparse tensor or array; (observations,)
            for one variable.
        y: further variables and observations, of the same form. Where its shape is that of
            `m`, an observation that one of them lacks is masked in both.
        rowvar: False for (observations, variables).
        bias: whether to divide by the number of observations, not by one less.
        ddof: what to subtract from their number instead.
        fweights (observations,): integers, how often each observation was made.
        aweights (observations,): weights of observations.
        dtype: of the result.

    Returns:
        (variables, variables), without dimensions for one; a `MaskedTensor`, if an operand
        is, masked where not more than `ddof` observations are there.

    Raises:
        ValueError: if `m` or `y` has more than two dimensions, or weights are not as many as
            observations.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([[1., 3., jnp.nan], [1., 4., 7.]])
        >>> jmask.numpy.cov(jmask.numpy.masked_invalid(x)).to_tensor(0)
        Array([[2., 3.],
               [3., 9.]], dtype=float32)
    """
    m, y = (a if a is None else dense(as_tensor(a), "cov") for a in (m, y))
    if not any_masked(m, y):
        return jnp.cov(m, y, rowvar, bias, ddof, fweights, aweights, dtype=dtype)
    tensors = [m] if y is None else [m, y]
    if max(x.ndim for x in tensors) > 2:
        raise ValueError(
            f"`m` and `y` have 2 dimensions at most, got {[x.shape for x in tensors]}."
        )
    tensors = [as_masked_tensor(x) for x in tensors]
    if len(tensors) == 2 and tensors[0].shape == tensors[1].shape:
        both = tensors[0].valid & tensors[1].valid
        tensors = [joined(x.storage, both) for x in tensors]
    rows = [x.reshape(1, -1) if x.ndim < 2 else x if rowvar else x.T for x in tensors]
    x = concatenate(rows)
    kind = kernels.inexact(x.dtype if dtype is None else dtype)
    work = wide(kind)
    values, valid = jnp.where(x.valid, x.storage, 0).astype(work), x.valid.astype(work)

    def weighing(name: str, weights: TensorLike) -> jax.Array:
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


def corrcoef(
    x: TensorLike,
    y: TensorLike | None = None,
    rowvar: bool = True,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Return the correlations of variables: their covariances, by their standard deviations.

    Args:
        x, y, rowvar, dtype: as `m`, `y`, `rowvar` and `dtype` of `cov`, and so are the
            errors. Where variables lack different observations a correlation may exceed 1,
            as in `numpy.ma.corrcoef`: each deviation is that of all entries of a variable.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([[1., 3., jnp.nan], [1., 4., 7.]])
        >>> jmask.numpy.corrcoef(jmask.numpy.masked_invalid(x)).shape
        (2, 2)
    """
    x, y = (a if a is None else dense(as_tensor(a), "corrcoef") for a in (x, y))
    if not any_masked(x, y):
        return jnp.corrcoef(x, y, rowvar, dtype=dtype)
    c = cov(x, y, rowvar, dtype=dtype)
    deviation = _root(diagonal(c) if c.ndim else c)
    return _divide(c, outer(deviation, deviation).reshape(c.shape))


def diff(
    a: TensorLike,
    n: int = 1,
    axis: int = -1,
    prepend: TensorLike | None = None,
    append: TensorLike | None = None,
) -> Tensor:
    """Return the n-th differences of neighbours along an axis; both must exist.

    Args:
        a: `MaskedTensor` on any storage, or an array (a sparse tensor becomes one).
        n: how many times to take differences.
        axis: the dimension along which entries are neighbours.
        prepend: entries put before those of `a`, masked or not: a number or a tensor.
        append: the same, put after them.

    Raises:
        ValueError: if `n` is negative, or `axis` out of bounds.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> mask = jnp.array([True, True, False, True])
        >>> x = jmask.masked_tensor(jnp.array([1., 3., 5., 2.]), mask)
        >>> jmask.numpy.diff(x, append=0.)
        MaskedTensor([2.0, --, --, -2.0], dtype=float32)
    """
    prepend, a, append = (
        x if x is None else dense(as_tensor(x), "diff") for x in (prepend, a, append)
    )
    pieces = [x for x in (prepend, a, append) if x is not None]
    if not any_masked(*pieces):
        return jnp.diff(a, n, axis, prepend, append)
    (axis,) = checked_axes((axis,), a.ndim)
    if n < 0:
        raise ValueError(f"`n` must be 0 or more, got {n}.")
    if n == 0:
        return a
    before = (slice(None),)
    edge = (*a.shape[:axis], 1, *a.shape[axis + 1 :])
    x = concatenate([x if x.ndim else broadcast_to(x, edge) for x in pieces], axis)
    for _ in range(n):
        last, first = x[before * axis + (slice(1, None),)], x[before * axis + (slice(-1),)]
        x = (_differ if x.dtype == jnp.dtype(bool) else _subtract)(last, first)
    return x


def trace(
    a: TensorLike,
    offset: int = 0,
    axis1: int = 0,
    axis2: int = 1,
    dtype: DTypeLike | None = None,
) -> Tensor:
    """Return the sum of the valid entries of diagonals, masked where there are none.

    Args:
        a: `MaskedTensor` on any storage, or an array (a sparse tensor becomes one).
        offset: of the diagonal from the main one.
        axis1: the first dimension of the matrices.
        axis2: the second.
        dtype: of the result; as `jnp.trace` by default.

    Raises:
        ValueError: if `a` has fewer than two dimensions.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.ones((2, 2)), jnp.array([[True, True], [True, False]]))
        >>> jmask.numpy.trace(x).to_tensor(0)
        Array(1., dtype=float32)
    """
    return reductions.sum(diagonal(as_tensor(a), offset, axis1, axis2), -1, dtype)


# --- comparisons -------------------------------------------------------------------------


def _unlike(a: TensorLike, b: TensorLike, equal_nan: bool) -> Tensor:
    differ = jnp.not_equal(a, b)
    return differ & ~(jnp.isnan(a) & jnp.isnan(b)) if equal_nan else differ


# True where entries are no match: the zeros of two sparse tensors stay False, so sparse.
_is_other = elementwise(_unlike)
_is_far = elementwise(lambda a, b, **options: ~jnp.isclose(a, b, **options))


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

    Args:
        a: `MaskedTensor` on any storage, sparse tensor or array.
        b: the same; they broadcast.
        rtol: relative to the size of entries of `b`.
        atol: an absolute tolerance.
        equal_nan: whether nan are close to each other.
        masked_equal: whether an entry that is masked in one of them counts as close.

    Raises:
        ValueError: if the shapes do not broadcast.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., 5.]), jnp.array([True, False]))
        >>> jmask.numpy.allclose(x, jnp.ones(2))
        Array(True, dtype=bool)
        >>> jmask.numpy.allclose(x, jnp.ones(2), masked_equal=False)
        Array(False, dtype=bool)
    """
    far = _is_far(a, b, rtol=rtol, atol=atol, equal_nan=equal_nan)
    return _none(far, masked_equal)


def array_equal(
    a1: TensorLike, a2: TensorLike, equal_nan: bool = False, *, masked_equal: bool = True
) -> jax.Array:
    """Decide whether two tensors have one shape and the same entries.

    Args:
        a1: `MaskedTensor` on any storage, sparse tensor or array.
        a2: the same.
        equal_nan: whether nan are equal.
        masked_equal: whether an entry that is masked in one of them counts as equal.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., 5.]), jnp.array([True, False]))
        >>> jmask.numpy.array_equal(x, jnp.ones(2)), jmask.numpy.array_equal(x, jnp.ones(3))
        (Array(True, dtype=bool), Array(False, dtype=bool))
    """
    a1, a2 = as_tensor(a1), as_tensor(a2)
    if a1.shape != a2.shape:
        return jnp.array(False)
    return _none(_is_other(a1, a2, equal_nan=equal_nan), masked_equal)


def _none(differs: TensorLike, masked_equal: bool) -> jax.Array:
    """Decide whether no entry differs; and, if masked entries do not count, that all exist."""
    some = reductions.any(differs)
    if not isinstance(some, MaskedTensor):
        return ~some
    none = ~some.to_tensor(False)
    return none if masked_equal else none & (reductions.count(differs) == differs.size)


# --- of bins -----------------------------------------------------------------------------


def histogram(
    a: TensorLike,
    bins: ArrayLike = 10,
    range: Sequence[Scalar] | None = None,  # noqa: A002
    weights: TensorLike | None = None,
    density: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return how many valid entries lie in each bin, and the edges of the bins.

    Args:
        a: `MaskedTensor` on any storage, of whose stored values those that are valid count,
            or an array (a sparse tensor becomes one).
        bins: how many, or their edges.
        range: the first and the last edge; by default the smallest and largest valid entry.
        weights: of the shape of `a`; entries with a masked weight do not count.
        density: whether to divide by the sum and by the widths of bins.

    Raises:
        ValueError: if `weights` has another shape.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> mask = jnp.array([True, True, False, True])
        >>> x = jmask.masked_tensor(jnp.array([0., 1., 9., 2.]), mask)
        >>> jmask.numpy.histogram(x, bins=2)
        (Array([1., 2.], dtype=float32), Array([0., 1., 2.], dtype=float32))
    """
    a = as_tensor(a)
    if not any_masked(a, weights):
        return jnp.histogram(dense(a, "histogram"), bins, range, weights, density)
    values, weight, valid = _weighted(a, weights, "histogram")
    values = values.astype(kernels.inexact(values.dtype))
    counted = MaskedTensor(values, valid)
    least = reductions.min(counted).to_tensor(0)
    if range is None:
        range = (least, reductions.max(counted).to_tensor(1))  # noqa: A001
    weight = valid.astype(values.dtype) if weight is None else jnp.where(valid, weight, 0)
    return jnp.histogram(jnp.where(valid, values, least), bins, range, weight, density)


def bincount(
    x: TensorLike,
    weights: TensorLike | None = None,
    minlength: int = 0,
    *,
    length: int | None = None,
) -> jax.Array:
    """Return how often each integer from 0 is among the valid entries.

    Args:
        x (n,): integers: `MaskedTensor` on any storage, or an array (a sparse tensor becomes
            one).
        weights (n,): what each counts; entries with a masked weight do not.
        minlength: the least length of the result.
        length: its length, static; greater integers are dropped. Needed under jit.

    Raises:
        TypeError: if `x` is not of integers.
        ValueError: if it is not of one dimension, or `length` is missing and it is traced.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> mask = jnp.array([True, False, True, True])
        >>> x = jmask.masked_tensor(jnp.array([1, 3, 0, 1]), mask)
        >>> jmask.numpy.bincount(x)
        Array([1, 2], dtype=int32)
    """
    x = as_tensor(x)
    if len(x.shape) != 1:
        raise ValueError(f"`x` of bincount() must have one dimension, got shape {x.shape}.")
    if not any_masked(x, weights):
        return jnp.bincount(dense(x, "bincount"), weights, minlength, length=length)
    values, weight, valid = _weighted(x, weights, "bincount")
    values = values.astype(jnp.int32) if values.dtype == jnp.dtype(bool) else values
    if length is None:
        if isinstance(values, jax.core.Tracer) or isinstance(valid, jax.core.Tracer):
            raise ValueError(
                "`length` of bincount() must be given while the tensor is traced (under jit, "
                "vmap or grad): its greatest entry is not known."
            )
        greatest = jnp.max(jnp.where(valid, values, 0), initial=0)
        length = max(minlength, int(greatest) + int(valid.any()))
    weight = (
        valid.astype(jnp.result_type(int)) if weight is None else jnp.where(valid, weight, 0)
    )
    return jnp.bincount(jnp.where(valid, values, 0), weight, length=length)


def _weighted(
    x: TensorLike, weights: TensorLike, name: str
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Return the stored values of a tensor, their weights, if any, and which of them count."""
    x = x if isinstance(x, MaskedTensor) else MaskedTensor(dense(x, name))
    values, valid = stored_values(x.storage), x.valid
    if weights is None:
        return values, None, valid
    weights = as_tensor(weights)
    if weights.shape != x.shape:
        raise ValueError(
            f"`weights` of shape {weights.shape} must have that of the tensor, {x.shape}."
        )
    weight, exists = read_at(weights, x.storage, became_dense(weights, name))
    return values, weight, valid & exists
