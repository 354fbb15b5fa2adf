"""Reductions over the entries that exist, on every storage.

    x = MaskedTensor([1, nan, 3], [T, F, T])
    sum(x) = 4,  mean(x) = 2,  norm(x) = 3.16;   masked where no entry is valid

    x = MaskedTensor([3, inf, 1, 3], [T, F, T, T])
    max(x) = 3,  argmax(x) = 0,  median(x) = 3,  count(x) = 3,  cumsum(x) = [3, --, 4, 7]

| input                 | reduces                     | where there is no entry           |
|-----------------------|-----------------------------|-----------------------------------|
| `MaskedTensor`        | its valid entries           | masked                            |
| array with `where=`   | the entries there           | the identity: sum 0, prod 1, norm |
|                       |                             | 0, max -inf, argmax 0; mean nan   |
| array                 | all entries, as `jax.numpy` | as `jax.numpy`                    |
| RowSparse, BCOO, BCSR | all entries, zeros included |                                   |

Masked tensors on sparse storage are reduced by segments of their stored values and never
made dense, except by `median`, `cumsum` and `cumprod`. The result is dense; where all axes
reduced are stored densely (the columns of a RowSparse) it keeps its storage. For ordinary
sparse tensors `sum`, `mean`, `norm`, `prod`, `max` and `min` need the stored values and how
many there are.

The derivative at a masked entry is exactly 0. It is 0, too, where a formula has none: `std`
and `norm` at 0, everything without entries. An index is never that of a masked entry, also if
the valid ones are -inf or nan. The derivative of `max` and `min` is shared evenly among the
valid entries that are equal to it.
"""

import builtins
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.scipy import special

from jmask._base.doors import check_flag, checked_array, refuse_scipy
from jmask._base.fallback import report_fallback
from jmask._ops import kernels
from jmask._ops.elementwise import elementwise
from jmask._ops.groups import grouped
from jmask._ops.shape import dense
from jmask._tensors.mask_positions import as_booleans
from jmask._tensors.masked_tensor import MaskedTensor, as_tensor, is_tensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import (
    as_dense,
    is_entry,
    is_sparse,
    same_positions,
    sampled,
    stored_values,
    unique_positions,
    values_at,
)

# --- running a reduction -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction on every storage: arguments checked, groups made, results wrapped.

    Attributes:
        name: in messages.
        kernel: takes groups and options; returns results and where there is one. With `like`
            it takes the dtype of the results as `dtype`.
        plain: the function of JAX for arrays without `where`, with the same options; None if
            the kernel serves them.
        like: the function of JAX that has results of the same dtype; None if the kernel
            decides it.
        empty: the result of an array where there is none, if the kernel gives another.
        stored: the kernel for ordinary sparse storage, where entries that are not stored are
            zeros. `kernel` itself if zeros change nothing; None if it needs a dense array.
        dense: whether the kernel needs all entries in one array, whatever the storage.
    """

    name: str
    kernel: Callable[..., tuple[Any, Any]]
    plain: Callable[..., Any] | None = None
    like: Callable[..., Any] | None = None
    empty: float | None = None
    stored: Callable[..., tuple[Any, Any]] | None = None
    dense: bool = False

    def __call__(
        self,
        x: Any,
        axis: Any,
        keepdims: bool,
        where: Any,
        dtype: Any = None,
        **options: Any,
    ) -> Any:
        x = as_tensor(x)
        axes = checked_axes(axis, len(x.shape))
        masked, kernel = isinstance(x, MaskedTensor), self.kernel
        if not masked and is_sparse(x):
            # Only kernels that zeros do not change know which zeros `where` leaves out.
            counts_zeros = where is None or self.stored is self.kernel
            nothing = builtins.any(x.shape[axis] == 0 for axis in axes)
            if self.stored and counts_zeros and not nothing and not getattr(x, "n_batch", 0):
                kernel = self.stored
            else:
                if not nothing:
                    report_fallback(became_dense(self.name, x))
                x = as_dense(x)
        elif masked and self.dense and is_sparse(x.storage):
            report_fallback(became_dense(self.name, x))
            x = x.to_dense()

        if masked:
            storage, valid = x.storage, x.valid & where_at(where, x.storage)
        elif is_sparse(x):
            storage = unique_positions(x)
            valid = is_entry(storage) & where_at(where, storage)
        elif where is None and self.plain is not None:
            axis = tuple(axis) if isinstance(axis, Sequence) else axis
            given = options if dtype is None else {**options, "dtype": dtype}
            return self.plain(x, axis=axis, keepdims=keepdims, **given)
        else:
            storage, valid = x, where_at(where, x)

        groups = grouped(storage, valid, axes, keepdims)
        if self.like is not None:
            options["dtype"] = result_dtype(self.like, x, dtype)
        result, exists = kernel(groups, **options)
        if self.like is not None:
            result = result.astype(options["dtype"])
        if masked:
            node = (groups.stored(result), groups.shaped(exists))
            return MaskedTensor.tree_unflatten(None, node)
        if self.empty is not None and not is_sparse(x):
            result = jnp.where(exists, result, self.empty)
        return groups.stored(result)


def result_dtype(function: Callable[..., Any], x: Any, dtype: Any = None) -> Any:
    """Return the dtype that a function of JAX, such as `jnp.sum`, gives for `x`."""
    kind = as_tensor(x).dtype
    if dtype is not None:
        function = functools.partial(function, dtype=dtype)
    return jax.eval_shape(function, jax.ShapeDtypeStruct((1,), kind)).dtype


def checked_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return `axis` as ascending axes that are not negative.

    Raises:
        TypeError: if it is neither an int, a sequence of ints nor None.
        ValueError: if one is out of bounds, or is there twice.
    """
    if axis is None:
        return tuple(range(ndim))
    given = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    try:
        axes = [operator.index(a) for a in given]
    except TypeError:
        raise TypeError(
            f"`axis` must be an int, a tuple of ints or None, got {axis!r}."
        ) from None
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(f"`axis` {a} is out of bounds for a tensor of {ndim} dimensions.")
    axes = sorted(a % ndim for a in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"`axis` {axis} names an axis twice.")
    return tuple(axes)


def single_axis(axis: Any, name: str) -> Any:
    """Return `axis`, or raise TypeError if it is a tuple."""
    if isinstance(axis, Sequence):
        raise TypeError(f"`axis` of {name} must be an int or None, got {axis!r}.")
    return axis


def where_at(where: Any, storage: Any) -> Any:
    """Return the booleans `where` at the stored values of a storage; True for None.

    Raises:
        TypeError: if it is not boolean.
        ValueError: if it does not broadcast to the shape of the tensor.
    """
    if where is None:
        return jnp.ones(stored_values(storage).shape, bool)
    refuse_scipy("where", where)
    masked = isinstance(where, MaskedTensor)
    if is_sparse(where):
        where = as_booleans(where)
    elif not masked:
        where = jnp.asarray(where)
    if masked or not jnp.issubdtype(where.dtype, jnp.bool_):
        kind = "a MaskedTensor" if masked else where.dtype
        raise TypeError(
            f"`where` must be a boolean array, True where an entry takes part, got {kind}."
        )
    if is_sparse(where):
        if same_positions(where, storage):
            return stored_values(where)
        if is_sparse(storage):
            # Repeated positions of `where` are one entry, which takes part if any is True.
            at_positions = values_at(unique_positions(where), storage)
            if at_positions is not None:
                taken = functools.reduce(operator.and_, at_positions)
                return jnp.broadcast_to(taken, stored_values(storage).shape)
        where = as_dense(where)
    shape = tuple(storage.shape)
    try:
        where = jnp.broadcast_to(where, shape)
    except ValueError:
        raise ValueError(
            f"`where` of shape {where.shape} does not broadcast to `x` of shape {shape}."
        ) from None
    return sampled(where, storage) if is_sparse(storage) else where


def became_dense(name: str, x: Any) -> str:
    kind = "a masked" if isinstance(x, MaskedTensor) else "a sparse"
    return (
        f"`{name}` made {kind} tensor of shape {tuple(x.shape)} dense, at O(size) cost: it "
        "does not decompose into results of its stored values"
    )


def _real_mean(x: Any) -> Any:
    return jnp.abs(jnp.mean(x))


# --- the table ---------------------------------------------------------------------------

_SUM = Reduction("sum", kernels.total, jnp.sum, like=jnp.sum, stored=kernels.total)
_PROD = Reduction(
    "prod", kernels.product, jnp.prod, like=jnp.prod, stored=kernels.product_of_all
)
_MEAN = Reduction(
    "mean", kernels.mean, jnp.mean, like=jnp.mean, empty=jnp.nan, stored=kernels.mean_of_all
)
_VAR = Reduction("var", kernels.variance, jnp.var, like=jnp.var, empty=jnp.nan)
_STD = Reduction("std", kernels.deviation, jnp.std, like=jnp.std, empty=jnp.nan)
_NORM = Reduction("norm", kernels.norm, like=_real_mean, stored=kernels.norm)
# An entry that is zero makes a norm of negative order zero, stored or not.
_NEGATIVE_NORM = dataclasses.replace(_NORM, stored=None)
_LOGSUMEXP = Reduction("logsumexp", kernels.log_sum_exp, special.logsumexp, like=jnp.mean)
_MAX = Reduction("max", kernels.maximum, jnp.max, stored=kernels.maximum_of_all)
_MIN = Reduction("min", kernels.minimum, jnp.min, stored=kernels.minimum_of_all)
_ARGMAX = Reduction("argmax", kernels.argmax, jnp.argmax)
_ARGMIN = Reduction("argmin", kernels.argmin, jnp.argmin)
_ALL = Reduction("all", kernels.every, jnp.all, stored=kernels.every_of_all)
_ANY = Reduction("any", kernels.some, jnp.any, stored=kernels.some)
_COUNT = Reduction("count", kernels.number_of)
_COUNT_NONZERO = Reduction(
    "count_nonzero",
    kernels.number_of_nonzero,
    jnp.count_nonzero,
    stored=kernels.number_of_nonzero,
)
_MEDIAN = Reduction("median", kernels.median, like=jnp.mean, empty=jnp.nan, dense=True)


_divide, _multiply = elementwise(jnp.true_divide), elementwise(jnp.multiply)
_square = elementwise(jnp.square)


# --- the functions -----------------------------------------------------------------------

_KEEPDIMS = "    keepdims: whether reduced axes stay, with size 1.\n"
_ARGUMENTS = """
Args:
    x: `MaskedTensor` on any storage, RowSparse, BCOO, BCSR or array, of any shape.
    axis: an int, a tuple of ints or None, which is all axes; may be negative.
    keepdims: whether reduced axes stay, with size 1.
    where: booleans that broadcast to the shape of `x`; other entries take no part. A
        `MaskedTensor` intersects them with its mask.
"""
_RAISES = """
Raises:
    TypeError: if `axis` is no int or tuple of ints, or `where` is not boolean.
    ValueError: if `axis` is out of bounds or there twice, or `where` does not
        broadcast.
"""
_F = TypeVar("_F", bound=Callable[..., Any])


def described(function: _F) -> _F:
    """Add the arguments of every reduction to the docstring."""
    # Without indentation, as the compiler has it since Python 3.13; none under `python -OO`.
    doc = inspect.cleandoc(function.__doc__ or "")
    text, example_follows, example = doc.partition("\nExample:")
    text, _, extra = text.partition("\nArgs:\n")
    arguments = _ARGUMENTS
    if "keepdims" not in inspect.signature(function).parameters:
        arguments = arguments.replace(_KEEPDIMS, "")
    function.__doc__ = f"{text}{arguments}{extra}{_RAISES}{example_follows}{example}"
    return function


@described
def sum(  # noqa: A001
    x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False, where: Any = None
) -> Any:
    """Sum the valid entries.

    Args:
        dtype: of the result; as `jnp.sum` by default.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., jnp.nan]), jnp.array([True, False]))
        >>> jmask.numpy.sum(x).to_tensor(0)
        Array(1., dtype=float32)
        >>> jmask.numpy.sum(jnp.arange(3), where=jnp.array([True, False, True]))
        Array(2, dtype=int32)
    """
    return _SUM(x, axis, keepdims, where, dtype)


@described
def prod(
    x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False, where: Any = None
) -> Any:
    """Return the product of the valid entries.

    Args:
        dtype: of the result; as `jnp.prod` by default.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.prod(jnp.array([2, 3, 5]), where=jnp.array([True, False, True]))
        Array(10, dtype=int32)
    """
    return _PROD(x, axis, keepdims, where, dtype)


@described
def mean(
    x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False, where: Any = None
) -> Any:
    """Return the mean of the valid entries: their sum by their number.

    Args:
        dtype: of the result; as `jnp.mean` by default.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.mean(jnp.array([1., 9., 3.]), where=jnp.array([True, False, True]))
        Array(2., dtype=float32)
    """
    return _MEAN(x, axis, keepdims, where, dtype)


@described
def var(
    x: Any,
    axis: Any = None,
    dtype: Any = None,
    ddof: float = 0,
    keepdims: bool = False,
    where: Any = None,
    *,
    correction: float | None = None,
) -> Any:
    """Return the variance of the valid entries: mean square distance from their mean.

    Masked (nan for an array with `where=`) where not more than `ddof` entries are valid.

    Args:
        dtype: of the result; as `jnp.var` by default.
        ddof: what is subtracted from their number in the divisor; 1 is unbiased.
        correction: another name of `ddof`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.var(jnp.array([1., 9., 3.]), where=jnp.array([True, False, True]))
        Array(1., dtype=float32)
    """
    return _VAR(x, axis, keepdims, where, dtype, ddof=_ddof(ddof, correction))


@described
def std(
    x: Any,
    axis: Any = None,
    dtype: Any = None,
    ddof: float = 0,
    keepdims: bool = False,
    where: Any = None,
    *,
    correction: float | None = None,
) -> Any:
    """Return the standard deviation of the valid entries: the root of `var`.

    The derivative where it is 0, as for equal entries, is 0.

    Args:
        dtype: of the result; as `jnp.std` by default.
        ddof: what is subtracted from their number in the divisor; 1 is unbiased.
        correction: another name of `ddof`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.std(jnp.array([1., 9., 5.]), where=jnp.array([True, False, True]))
        Array(2., dtype=float32)
    """
    return _STD(x, axis, keepdims, where, dtype, ddof=_ddof(ddof, correction))


def _ddof(ddof: float, correction: float | None) -> float:
    if correction is None:
        return ddof
    if ddof != 0:
        raise ValueError("give `ddof` or `correction`, not both: they mean the same.")
    return correction


@described
def norm(
    x: Any,
    ord: float | None = 2,  # noqa: A002
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """Return the vector norm of the valid entries: the `ord`-th root of the sum of |x| ** ord.

    Always of the entries as one vector, also over two axes. The derivative is 0 where the
    norm is 0. A norm of negative order of nothing is inf.

    Args:
        ord: any number, not traced; inf is the largest |x|, -inf the smallest, 0 the number
            of entries that are not 0, None is 2.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.norm(jnp.array([3., 9., 4.]), where=jnp.array([True, False, True]))
        Array(5., dtype=float32)
    """
    order = 2 if ord is None else ord
    if not isinstance(order, int | float):
        raise TypeError(f"`ord` must be a number that is not traced, got {ord!r}.")
    reduction = _NORM if order >= 0 else _NEGATIVE_NORM
    return reduction(x, axis, keepdims, where, ord=order)


@described
def logsumexp(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:
    """Return the log of the sum of exp of the valid entries, without overflow.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([1000., 1e30])
        >>> jmask.numpy.logsumexp(x, where=jnp.array([True, False]))
        Array(1000., dtype=float32)
    """
    return _LOGSUMEXP(x, axis, keepdims, where)


@described
def average(
    x: Any, axis: Any = None, weights: Any = None, keepdims: bool = False, where: Any = None
) -> Any:
    """Return the mean of the valid entries, each counted by its weight.

    Args:
        weights: an array that broadcasts to `x`, or (n,) for the n entries along one axis;
            all 1 by default. Where those of valid entries sum to 0, the result is nan or
            inf. Entries with a masked weight take no part, as masked ones.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> mask = jnp.array([True, False, True])
        >>> x = jmask.masked_tensor(jnp.array([1., jnp.nan, 3.]), mask)
        >>> jmask.numpy.average(x, weights=jnp.array([1., 1., 3.])).to_tensor(0)
        Array(2.5, dtype=float32)
    """
    if weights is None:
        return mean(x, axis, None, keepdims, where)
    x = as_tensor(x)
    shape = tuple(x.shape)
    axes = checked_axes(axis, len(shape))

    def spread(weights: Any) -> jax.Array:
        weights = jnp.asarray(weights)
        if weights.ndim == 1 < len(shape) and len(axes) == 1:
            weights = jnp.expand_dims(weights, [a for a in range(len(shape)) if a != axes[0]])
        return jnp.broadcast_to(weights, shape)

    if isinstance(weights, MaskedTensor):
        if not isinstance(x, MaskedTensor):
            x = MaskedTensor(dense(x, "average"))
        known, weights = spread(weights.to_dense().mask), weights.to_tensor(0)
        where = known if where is None else known & where_at(where, jnp.empty(shape))
    weight: Any = spread(weights)
    if isinstance(x, MaskedTensor):
        sparse = is_sparse(x.storage)
        weight = x.with_values(sampled(weight, x.storage) if sparse else weight)
    above = sum(_multiply(x, weight), axis, None, keepdims, where)
    below = sum(weight, axis, None, keepdims, where)
    return _divide(above, below)


@described
def max(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:  # noqa: A001
    """Return the largest valid entry; nan if one is nan.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.max(jnp.array([1., 9., 3.]), where=jnp.array([True, False, True]))
        Array(3., dtype=float32)
    """
    return _MAX(x, axis, keepdims, where)


@described
def min(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:  # noqa: A001
    """Return the smallest valid entry; nan if one is nan.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.min(jnp.array([4., 0., 3.]), where=jnp.array([True, False, True]))
        Array(3., dtype=float32)
    """
    return _MIN(x, axis, keepdims, where)


amax, amin = max, min


@described
def argmax(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:
    """Return the index of the first largest valid entry along `axis`.

    With axis None the tensor is flattened; a tuple of axes is refused.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([jnp.nan, -jnp.inf])
        >>> jmask.numpy.argmax(x, where=jnp.array([False, True]))
        Array(1, dtype=int32)
    """
    return _ARGMAX(x, single_axis(axis, "argmax"), keepdims, where)


@described
def argmin(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:
    """Return the index of the first smallest valid entry along `axis`.

    With axis None the tensor is flattened; a tuple of axes is refused.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.argmin(jnp.array([0., 1.]), where=jnp.array([False, True]))
        Array(1, dtype=int32)
    """
    return _ARGMIN(x, single_axis(axis, "argmin"), keepdims, where)


@described
def all(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:  # noqa: A001
    """Decide whether no valid entry is 0 or False.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.all(jnp.array([1, 0]), where=jnp.array([True, False]))
        Array(True, dtype=bool)
    """
    return _ALL(x, axis, keepdims, where)


@described
def any(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:  # noqa: A001
    """Decide whether a valid entry is neither 0 nor False.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.any(jnp.array([0, 1]), where=jnp.array([True, False]))
        Array(False, dtype=bool)
    """
    return _ANY(x, axis, keepdims, where)


@described
def count(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:
    """Count the valid entries: an ordinary tensor, as there always is a number.

    All entries of an ordinary tensor are valid.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.ones((2, 2)), jnp.array([[True], [False]]))
        >>> jmask.numpy.count(x, axis=1)
        Array([2, 0], dtype=int32)
    """
    result = _COUNT(x, axis, keepdims, where)
    return result.storage if isinstance(result, MaskedTensor) else result


@described
def count_nonzero(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:
    """Count the valid entries that are not 0.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.count_nonzero(jnp.array([0, 2]), where=jnp.array([True, False]))
        Array(0, dtype=int32)
    """
    return _COUNT_NONZERO(x, axis, keepdims, where)


@described
def median(
    x: Any,
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
    *,
    averaged: bool = True,
) -> Any:
    """Return the middle valid entry, or the mean of the two in the middle; nan if one is nan.

    The derivative is that of the entries. Sparse storage becomes dense.

    Args:
        averaged: whether, of an even number, it is the mean of the two in the middle, as
            `jnp.median` has it. False gives the lower of them, as torch.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> mask = jnp.array([True, True, False])
        >>> x = jmask.masked_tensor(jnp.array([4., 1., jnp.nan]), mask)
        >>> jmask.numpy.median(x).to_tensor(0)
        Array(2.5, dtype=float32)
        >>> jmask.numpy.median(x, averaged=False).to_tensor(0)
        Array(1., dtype=float32)
    """
    return _MEDIAN(x, axis, keepdims, where, averaged=averaged)


@described
def cumsum(x: Any, axis: Any = None, dtype: Any = None, where: Any = None) -> Any:
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
def cumprod(x: Any, axis: Any = None, dtype: Any = None, where: Any = None) -> Any:
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


def _running(
    name: str, function: Any, identity: int, x: Any, axis: Any, dtype: Any, where: Any
) -> Any:
    masked = isinstance(x, MaskedTensor)
    if is_sparse(x.storage if masked else x):
        report_fallback(became_dense(name, x))
        x = x.to_dense() if masked else as_dense(x)
    values = x.storage if masked else jnp.asarray(x)
    checked_axes(single_axis(axis, name), values.ndim)
    taken = where_at(where, values)
    if masked:
        taken &= x.valid
    safe = jnp.where(taken, values, jnp.asarray(identity, values.dtype))
    result = function(safe, axis=axis, dtype=dtype)
    if not masked:
        return result
    return joined(result, taken.reshape(result.shape))


# --- MXNet's sums --------------------------------------------------------------------


def add_n(*tensors: Any) -> Any:
    """Sum tensors: row-sparse if all are, with the rows of all of them.

    Args:
        *tensors: tensors of one shape on any storage, or one sequence of them. The rows of
            `RowSparse` tensors are put side by side: equal indices add.

    Raises:
        ValueError: if there is none, or the shapes differ.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.RowSparse([1], jnp.array([2.]), (3,))
        >>> jmask.add_n(x, x, x)
        RowSparse(float32[3], nse=3)
        >>> jmask.add_n(x, jnp.ones(3))
        Array([1., 3., 1.], dtype=float32)
    """
    if len(tensors) == 1 and isinstance(tensors[0], Sequence):
        tensors = tuple(tensors[0])
    if not tensors:
        raise ValueError("`tensors` must hold at least one tensor, got none.")
    tensors = tuple(x if is_tensor(x) else checked_array("tensors", x) for x in tensors)
    shapes = {tuple(x.shape) for x in tensors}
    if len(shapes) > 1:
        raise ValueError(f"`tensors` must have one shape, got {sorted(shapes)}.")
    # Sparse ones first, so that they meet a dense one once.
    order = sorted(tensors, key=lambda x: not isinstance(x, RowSparse))
    return functools.reduce(operator.add, order)


def square_sum(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Sum the squares of the entries, at the cost of the rows that a `RowSparse` stores.

    Args:
        x: a tensor on any storage.
        axis: an int, a tuple of ints or None, which is all axes.
        keepdims: whether reduced axes stay, with size 1.

    Returns:
        A dense tensor; for a `RowSparse` of which axis 0 is kept, a `RowSparse`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.RowSparse([1], jnp.array([[3., 4.]]), (3, 2))
        >>> jmask.square_sum(x, axis=1, keepdims=True)
        RowSparse(float32[3, 1], nse=1)
        >>> jmask.square_sum(x)
        Array(25., dtype=float32)
    """
    check_flag("keepdims", keepdims)
    if not is_tensor(x):
        x = checked_array("x", x)
    return sum(_square(x), axis, keepdims=keepdims)
