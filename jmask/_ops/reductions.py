"""Reductions over the entries that exist, on every storage: those made of sums.

    x = MaskedTensor([1, nan, 3], [T, F, T])
    sum(x) = 4,  mean(x) = 2,  norm(x) = 3.16;   of nothing: masked

| given                 | reduces                     | of nothing                        |
|-----------------------|-----------------------------|-----------------------------------|
| `MaskedTensor`        | its valid entries           | masked                            |
| array with `where=`   | the entries there           | the identity: sum 0, prod 1, norm |
|                       |                             | 0, max -inf, argmax 0; mean nan   |
| array                 | all entries, as `jax.numpy` | as `jax.numpy`                    |
| RowSparse, BCOO, BCSR | all entries, zeros included |                                   |

Masked tensors on sparse storage are reduced by segments of their stored values and never
made dense, except by `median`, `cumsum` and `cumprod`. The result is dense; where all axes
reduced are stored densely (the columns of a RowSparse) it keeps its storage. Of ordinary
sparse tensors `sum`, `mean`, `norm`, `prod`, `max` and `min` need the stored values and how
many there are.

The derivative at a masked entry is exactly 0. It is 0, too, where a formula has none: `std`
and `norm` at 0, everything of nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special

from jmask._ops import reduction_kernels as kernels
from jmask._ops.elementwise import elementwise
from jmask._ops.masked_moves import dense
from jmask._ops.reduce import checked_axes, described, reduce, result_dtype, where_at
from jmask._tensors.masked_tensor import MaskedTensor, as_tensor
from jmask._tensors.storage import is_sparse, sampled

_multiply = elementwise(jnp.multiply)
_divide = elementwise(jnp.true_divide)


@described
def sum(  # noqa: A001
    x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False, where: Any = None
) -> Any:
    """The sum of the valid entries.

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
    out = result_dtype(jnp.sum, x, dtype)
    kernel = functools.partial(kernels.total, dtype=out)
    plain = functools.partial(jnp.sum, dtype=dtype)
    return reduce(
        kernel,
        x,
        axis,
        keepdims,
        where,
        name="sum",
        dtype=out,
        plain=plain,
        of_stored=kernel,
    )


@described
def prod(
    x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False, where: Any = None
) -> Any:
    """The product of the valid entries.

    Args:
        dtype: of the result; as `jnp.prod` by default.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.prod(jnp.array([2, 3, 5]), where=jnp.array([True, False, True]))
        Array(10, dtype=int32)
    """
    out = result_dtype(jnp.prod, x, dtype)
    kernel = functools.partial(kernels.product, dtype=out)
    plain = functools.partial(jnp.prod, dtype=dtype)
    of_all = functools.partial(kernels.product_of_all, dtype=out) if where is None else None
    return reduce(
        kernel, x, axis, keepdims, where,
        name="prod", dtype=out, plain=plain, of_stored=of_all,
    )  # fmt: skip


@described
def mean(
    x: Any, axis: Any = None, dtype: Any = None, keepdims: bool = False, where: Any = None
) -> Any:
    """The mean of the valid entries: their sum by their number.

    Args:
        dtype: of the result; as `jnp.mean` by default.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.numpy.mean(jnp.array([1., 9., 3.]), where=jnp.array([True, False, True]))
        Array(2., dtype=float32)
    """
    out = result_dtype(jnp.mean, x, dtype)
    kernel = functools.partial(kernels.mean, dtype=out)
    plain = functools.partial(jnp.mean, dtype=dtype)
    of_all = functools.partial(kernels.mean_of_all, dtype=out) if where is None else None
    return reduce(
        kernel, x, axis, keepdims, where,
        name="mean", dtype=out, plain=plain, empty=jnp.nan, of_stored=of_all,
    )  # fmt: skip


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
    """The variance of the valid entries: mean square distance from their mean.

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
    return _spread("var", jnp.var, x, axis, dtype, ddof, correction, keepdims, where)


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
    """The standard deviation of the valid entries: the root of `var`.

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
    return _spread("std", jnp.std, x, axis, dtype, ddof, correction, keepdims, where)


def _spread(
    name: str,
    function: Any,
    x: Any,
    axis: Any,
    dtype: Any,
    ddof: float,
    correction: float | None,
    keepdims: bool,
    where: Any,
) -> Any:
    if correction is not None:
        if ddof != 0:
            raise ValueError("give `ddof` or `correction`, not both: they mean the same.")
        ddof = correction
    out = result_dtype(function, x, dtype)
    kernel = {"var": kernels.variance, "std": kernels.deviation}[name]
    return reduce(
        functools.partial(kernel, dtype=out, ddof=ddof),
        x, axis, keepdims, where,
        name=name, dtype=out, plain=functools.partial(function, dtype=dtype, ddof=ddof),
        empty=jnp.nan,
    )  # fmt: skip


@described
def norm(
    x: Any,
    ord: float | None = 2,  # noqa: A002
    axis: Any = None,
    keepdims: bool = False,
    where: Any = None,
) -> Any:
    """The vector norm of the valid entries: the `ord`-th root of the sum of |x| ** ord.

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
    out = jnp.finfo(result_dtype(jnp.mean, x)).dtype
    kernel = functools.partial(kernels.norm, dtype=out, ord=order)
    of_stored = kernel if order >= 0 else None
    return reduce(kernel, x, axis, keepdims, where, name="norm", dtype=out, of_stored=of_stored)


@described
def logsumexp(x: Any, axis: Any = None, keepdims: bool = False, where: Any = None) -> Any:
    """log of the sum of exp of the valid entries, without overflow.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([1000., 1e30])
        >>> jmask.numpy.logsumexp(x, where=jnp.array([True, False]))
        Array(1000., dtype=float32)
    """
    out = result_dtype(jnp.mean, x)
    kernel = functools.partial(kernels.log_sum_exp, dtype=out)
    return reduce(
        kernel, x, axis, keepdims, where,
        name="logsumexp", dtype=out, plain=special.logsumexp,
    )  # fmt: skip


@described
def average(
    x: Any, axis: Any = None, weights: Any = None, keepdims: bool = False, where: Any = None
) -> Any:
    """The mean of the valid entries, each counted by its weight.

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
