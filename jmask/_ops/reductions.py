"""Reductions over the entries that exist, on every storage.

    x = MaskedTensor([1, nan, 3], [T, F, T])
    sum(x) = 4,  mean(x) = 2,  norm(x) = 3.16;   masked where no entry is valid

    x = MaskedTensor([3, inf, 1, 3], [T, F, T, T])
    max(x) = 3,  argmax(x) = 0,  ptp(x) = 2,  count(x) = 3

| input                 | reduces                     | where there is no entry           |
|-----------------------|-----------------------------|-----------------------------------|
| `MaskedTensor`        | its valid entries           | masked                            |
| array with `where=`   | the entries there           | the identity: sum 0, prod 1, norm |
|                       |                             | 0, max -inf, argmax 0; mean nan   |
| array                 | all entries, as `jax.numpy` | as `jax.numpy`                    |
| RowSparse, BCOO, BCSR | all entries, zeros included |                                   |

Masked tensors on sparse storage are reduced by segments of their stored values and never
made dense. The result is dense; where all axes reduced are stored densely (the columns of a
RowSparse) it keeps its storage. For ordinary sparse tensors `sum`, `mean`, `norm`, `prod`,
`max` and `min` need the stored values and how many there are.

The derivative at a masked entry is exactly 0. It is 0, too, where a formula has none: `std`
and `norm` at 0, everything without entries. An index is never that of a masked entry, also if
the valid ones are -inf or nan. The derivative of `max` and `min` is shared evenly among the
valid entries that are equal to it.
"""

import dataclasses
import inspect
from typing import Protocol, TypeVar

import jax.numpy as jnp
from jax.scipy import special
from jax.typing import DTypeLike

from jmask._base.types import Axis, Function, Mask, Tensor, TensorLike
from jmask._ops import kernels
from jmask._ops.elementwise import elementwise
from jmask._ops.groups import Reduction, checked_axes
from jmask._ops.shape import broadcast_to, expand_dims
from jmask._tensors.masked_tensor import MaskedTensor, as_tensor, read_at

# --- reductions that a function calls ----------------------------------------------------

_NORM = Reduction(
    "norm", kernels.norm, like=lambda x: jnp.abs(jnp.mean(x)), stored=kernels.norm
)
# An entry that is zero makes a norm of negative order zero, stored or not.
_NEGATIVE_NORM = dataclasses.replace(_NORM, stored=None)
_LOGMEANEXP = Reduction("logmeanexp", kernels.log_mean_exp, like=jnp.mean)
_COUNT = Reduction("count", kernels.number_of)

_divide, _multiply = elementwise(jnp.true_divide), elementwise(jnp.multiply)
_subtract = elementwise(jnp.subtract)


# --- docstrings ---------------------------------------------------------------------------

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
_F = TypeVar("_F", bound=Function)


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


def named(function: _F, name: str, text: str, *examples: str) -> _F:
    """Give a function that another one made its name and its docstring.

    Args:
        text: what it does.
        *examples: arguments, " -> ", and the result.
    """
    function.__name__ = function.__qualname__ = name
    lines = ["\n\nExample:", "    >>> import jax.numpy as jnp, jmask"]
    for example in examples:
        arguments, result = example.split(" -> ")
        lines += [f"    >>> jmask.numpy.{name}({arguments})", f"    {result}"]
    function.__doc__ = inspect.cleandoc(text) + "\n".join(lines)
    return function


# --- the table ---------------------------------------------------------------------------


class _Reduce(Protocol):
    def __call__(
        self,
        x: TensorLike,
        axis: Axis = None,
        keepdims: bool = False,
        where: Mask | None = None,
    ) -> Tensor: ...


class _ReduceTo(Protocol):
    def __call__(
        self,
        x: TensorLike,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        keepdims: bool = False,
        where: Mask | None = None,
    ) -> Tensor: ...


class _ReduceFromMean(Protocol):
    def __call__(
        self,
        x: TensorLike,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        ddof: float = 0,
        keepdims: bool = False,
        where: Mask | None = None,
        *,
        correction: float | None = None,
    ) -> Tensor: ...


def _reduction(reduction: Reduction, text: str, *examples: str) -> _Reduce:
    """Return a reduction without arguments of its own."""

    def reduce(
        x: TensorLike, axis: Axis = None, keepdims: bool = False, where: Mask | None = None
    ) -> Tensor:
        return reduction(x, axis, keepdims, where)

    return described(named(reduce, reduction.name, text, *examples))


def _reduction_to(reduction: Reduction, text: str, *examples: str) -> _ReduceTo:
    """Return a reduction whose results have a dtype that can be chosen."""

    def reduce(
        x: TensorLike,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        keepdims: bool = False,
        where: Mask | None = None,
    ) -> Tensor:
        return reduction(x, axis, keepdims, where, dtype)

    name = reduction.name
    text = f"{text}\n\nArgs:\n    dtype: of the result; as `jnp.{name}` by default."
    return described(named(reduce, name, text, *examples))


def _reduction_from_mean(reduction: Reduction, text: str, *examples: str) -> _ReduceFromMean:
    """Return a reduction of distances from the mean, whose divisor can be chosen."""

    def reduce(
        x: TensorLike,
        axis: Axis = None,
        dtype: DTypeLike | None = None,
        ddof: float = 0,
        keepdims: bool = False,
        where: Mask | None = None,
        *,
        correction: float | None = None,
    ) -> Tensor:
        if correction is not None:
            if ddof != 0:
                raise ValueError("give `ddof` or `correction`, not both: they mean the same.")
            ddof = correction
        return reduction(x, axis, keepdims, where, dtype, ddof=ddof)

    name = reduction.name
    arguments = f"""

Args:
    dtype: of the result; as `jnp.{name}` by default.
    ddof: what is subtracted from their number in the divisor; 1 is unbiased.
    correction: another name of `ddof`."""
    return described(named(reduce, name, text + arguments, *examples))


sum = _reduction_to(  # noqa: A001
    Reduction("sum", kernels.total, jnp.sum, like=jnp.sum, stored=kernels.total),
    "Sum the valid entries.",
    "jmask.masked_tensor(jnp.array([1., jnp.nan]), jnp.array([True, False]))"
    " -> MaskedTensor(1.0, dtype=float32)",
    "jnp.arange(3), where=jnp.array([True, False, True]) -> Array(2, dtype=int32)",
)
prod = _reduction_to(
    Reduction("prod", kernels.product, jnp.prod, like=jnp.prod, stored=kernels.product_of_all),
    "Return the product of the valid entries.",
    "jnp.array([2, 3, 5]), where=jnp.array([True, False, True]) -> Array(10, dtype=int32)",
)
mean = _reduction_to(
    Reduction(
        "mean", kernels.mean, jnp.mean, like=jnp.mean, empty=jnp.nan, stored=kernels.mean_of_all
    ),
    "Return the mean of the valid entries: their sum by their number.",
    "jnp.array([1., 9., 3.]), where=jnp.array([True, False, True]) -> Array(2., dtype=float32)",
)
logsumexp = _reduction(
    Reduction("logsumexp", kernels.log_sum_exp, special.logsumexp, like=jnp.mean),
    "Return the log of the sum of exp of the valid entries, without overflow.",
    "jnp.array([1000., 1e30]), where=jnp.array([True, False]) -> Array(1000., dtype=float32)",
)
max = _reduction(  # noqa: A001
    Reduction("max", kernels.maximum, jnp.max, stored=kernels.maximum_of_all),
    "Return the largest valid entry; nan if one is nan.",
    "jnp.array([1., 9., 3.]), where=jnp.array([True, False, True]) -> Array(3., dtype=float32)",
)
min = _reduction(  # noqa: A001
    Reduction("min", kernels.minimum, jnp.min, stored=kernels.minimum_of_all),
    "Return the smallest valid entry; nan if one is nan.",
    "jnp.array([4., 0., 3.]), where=jnp.array([True, False, True]) -> Array(3., dtype=float32)",
)
var = _reduction_from_mean(
    Reduction("var", kernels.variance, jnp.var, like=jnp.var, empty=jnp.nan),
    "Return the variance of the valid entries: mean square distance from their mean.\n\n"
    "Masked (nan for an array with `where=`) where not more than `ddof` entries are valid.",
    "jnp.array([1., 9., 3.]), where=jnp.array([True, False, True]) -> Array(1., dtype=float32)",
)
std = _reduction_from_mean(
    Reduction("std", kernels.deviation, jnp.std, like=jnp.std, empty=jnp.nan),
    "Return the standard deviation of the valid entries: the root of `var`.\n\n"
    "The derivative where it is 0, as for equal entries, is 0.",
    "jnp.array([1., 9., 5.]), where=jnp.array([True, False, True]) -> Array(2., dtype=float32)",
)
_FLAT = "\n\nWith axis None the tensor is flattened; a tuple of axes is refused."
argmax = _reduction(
    Reduction("argmax", kernels.argmax, jnp.argmax, one_axis=True),
    f"Return the index of the first largest valid entry along `axis`.{_FLAT}",
    "jnp.array([jnp.nan, -jnp.inf]), where=jnp.array([False, True]) -> Array(1, dtype=int32)",
)
argmin = _reduction(
    Reduction("argmin", kernels.argmin, jnp.argmin, one_axis=True),
    f"Return the index of the first smallest valid entry along `axis`.{_FLAT}",
    "jnp.array([0., 1.]), where=jnp.array([False, True]) -> Array(1, dtype=int32)",
)
all = _reduction(  # noqa: A001
    Reduction("all", kernels.every, jnp.all, stored=kernels.every_of_all),
    "Decide whether no valid entry is 0 or False.",
    "jnp.array([1, 0]), where=jnp.array([True, False]) -> Array(True, dtype=bool)",
)
any = _reduction(  # noqa: A001
    Reduction("any", kernels.some, jnp.any, stored=kernels.some),
    "Decide whether a valid entry is neither 0 nor False.",
    "jnp.array([0, 1]), where=jnp.array([True, False]) -> Array(False, dtype=bool)",
)
count_nonzero = _reduction(
    Reduction(
        "count_nonzero",
        kernels.number_of_nonzero,
        jnp.count_nonzero,
        stored=kernels.number_of_nonzero,
    ),
    "Count the valid entries that are not 0.",
    "jnp.array([0, 2]), where=jnp.array([True, False]) -> Array(0, dtype=int32)",
)
amax, amin = max, min


# --- with more arguments, or made of others ----------------------------------------------


@described
def norm(
    x: TensorLike,
    ord: float | None = 2,  # noqa: A002
    axis: Axis = None,
    keepdims: bool = False,
    where: Mask | None = None,
) -> Tensor:
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
def logmeanexp(
    x: TensorLike, axis: Axis = None, where: Mask | None = None, keepdims: bool = False
) -> Tensor:
    """Return the log of the mean of exp of the valid entries, without overflow.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([1000., 1000., 1e30])
        >>> jmask.nn.logmeanexp(x, where=jnp.array([True, True, False]))
        Array(1000., dtype=float32)
    """
    return _LOGMEANEXP(x, axis, keepdims, where)


@described
def average(
    x: TensorLike,
    axis: Axis = None,
    weights: TensorLike | None = None,
    keepdims: bool = False,
    where: Mask | None = None,
) -> Tensor:
    """Return the mean of the valid entries, each counted by its weight.

    Args:
        weights: an array that broadcasts to `x`, or (n,) for the n entries along one axis;
            all 1 by default. Where those of valid entries sum to 0, the result is nan or
            inf. Entries with a masked weight take no part, as masked ones.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.numpy.masked_invalid(jnp.array([1., jnp.nan, 3.]))
        >>> jmask.numpy.average(x, weights=jnp.array([1., 1., 3.])).to_tensor(0)
        Array(2.5, dtype=float32)
    """
    if weights is None:
        return mean(x, axis, None, keepdims, where)
    x, weights = as_tensor(x), as_tensor(weights)
    ndim = len(x.shape)
    axes = checked_axes(axis, ndim)
    if len(weights.shape) == 1 < ndim and len(axes) == 1:
        weights = expand_dims(weights, [a for a in range(ndim) if a != axes[0]])
    weights = broadcast_to(weights, tuple(x.shape))
    product = _multiply(x, weights)
    if isinstance(product, MaskedTensor):
        weights = product.with_values(read_at(weights, product.storage)[0])
    above = sum(product, axis, None, keepdims, where)
    below = sum(weights, axis, None, keepdims, where)
    return _divide(above, below)


@described
def ptp(
    x: TensorLike, axis: Axis = None, keepdims: bool = False, where: Mask | None = None
) -> Tensor:
    """Return the difference between the largest and the smallest valid entry.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.ptp(jnp.array([4., 0., 1.]), where=jnp.array([True, False, True]))
        Array(3., dtype=float32)
    """
    return _subtract(max(x, axis, keepdims, where), min(x, axis, keepdims, where))


@described
def count(
    x: TensorLike, axis: Axis = None, keepdims: bool = False, where: Mask | None = None
) -> Tensor:
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
