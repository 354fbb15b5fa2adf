"""Products of masked tensors: matmul, linear, attention; and MXNet's sums of tensors.

Masked entries contribute nothing, and an entry of the result exists where at least one of
its terms does:

    [1, --]   [5, 6]     [1*5, 1*6]     [ 5,  6]        row 0: one term each
    [--, --] @ [7, 8]  =  [no term]    =  [--, --]        row 1: none

A masked operand taken for zeros is `x.to_tensor(0) @ y`; a result that exists only where *all*
its terms do has the mask `matmul(x.mask, y.mask).data == x.shape[-1]`, for masks as integers.
"""

import functools
import inspect
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.types import Argument, Axis, Function, Tensor, TensorLike
from jmask._base.validation import check_flag, checked_array
from jmask._ops.formulas import total
from jmask._ops.lift import adopted, contracts, dense, entrywise, existing, filled
from jmask._ops.products import dot as sparse_dot
from jmask._ops.reduce import ZEROS_CHANGE_NOTHING, reduces
from jmask._tensors.masked_tensor import MaskedTensor, any_masked, is_tensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import is_sparse

_add, _square = entrywise(jnp.add, adds=True), entrywise(jnp.square)
_sum = reduces(total, jnp.sum, zeros=ZEROS_CHANGE_NOTHING, like=jnp.sum)
einsum = contracts(jnp.einsum, 1, None)


def multiplies(function: Function) -> Function:
    """Lift a product of two tensors that is `jmask.dot` of ordinary sparse matrices."""
    contracted = contracts(function)

    @functools.wraps(function)
    def lifted(x: Argument, y: Argument, **kwargs: Argument) -> Tensor:
        x, y = adopted(x), adopted(y)
        if not any_masked(x, y):
            is_product = is_sparse(x) or is_sparse(y)
            return sparse_dot(x, y) if is_product else function(x, y, **kwargs)
        if _is_sparse_matrix(x) and not _is_sparse_matrix(y) and function is jnp.matmul:
            y = dense(y, "matmul")
            terms = sparse_dot(existing(x), existing(y))
            return joined(sparse_dot(filled(x), filled(y)), terms > 0.5)
        return contracted(x, y, **kwargs)

    return lifted


matmul, dot = multiplies(jnp.matmul), multiplies(jnp.dot)


def _is_sparse_matrix(x: TensorLike) -> bool:
    return isinstance(x, MaskedTensor) and isinstance(x.storage, BCOO | BCSR)


def linear(x: TensorLike, weight: TensorLike, bias: TensorLike | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, each of them masked or not.

    Args:
        x (..., k): inputs.
        weight (m, k): as in torch, one row for each output.
        bias (m,): added where the product exists.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., jnp.inf]), jnp.array([True, False]))
        >>> jmask.nn.linear(x, jnp.array([[2., 3.]]), jnp.array([1.])).to_tensor(0)
        Array([3.], dtype=float32)
    """
    product = einsum("...k,mk->...m", x, weight)
    return product if bias is None else _add(product, bias)


_ATTENTION = inspect.signature(nn.dot_product_attention)


@functools.wraps(nn.dot_product_attention)
def dot_product_attention(*args: Argument, **kwargs: Argument) -> Tensor:
    """Attend as `jax.nn.dot_product_attention`, to keys with which a query has a score.

    It has one if a term of their product exists, and the bias, if it is masked; where the mask
    is masked it is False. The result is masked where no value takes part: a query without a
    key sends derivative 0. Arguments and errors are JAX's; complex numbers are a TypeError.
    """
    attend: Function = nn.dot_product_attention
    options = _ATTENTION.bind(*args, **kwargs).arguments
    names = ("query", "key", "value", "bias", "mask")
    operands: list[Argument] = [options.pop(name, None) for name in names]
    for name, x in zip(names, operands, strict=True):
        if x is not None and jnp.iscomplexobj(x):
            raise TypeError(
                f"`{name}` is complex, and JAX's attention drops the imaginary part: use "
                "jmask.nn.softmax of scores that are real, jmask.numpy.real(scores)."
            )
    operands = [x if x is None else dense(adopted(x), attend.__name__) for x in operands]
    if not any_masked(*operands):
        return attend(*operands, **options)
    *arrays, bias, mask = operands
    on_query, on_key, on_value = (_four(existing(x)) for x in arrays)
    arrays = [filled(x) for x in arrays]
    jax.eval_shape(attend, *arrays)  # refuses shapes that do not fit

    # --- where there is a score ----------------------------------------------------------
    groups = on_query.shape[2] // max(on_key.shape[2], 1)
    on_key, on_value = (jnp.repeat(x, groups, axis=2) for x in (on_key, on_value))
    allowed = jnp.einsum("btnh,bsnh->bnts", on_query, on_key) > 0.5
    queries, keys = (
        lax.broadcasted_iota(jnp.int32, (1, 1, *allowed.shape[2:]), i) for i in (2, 3)
    )
    if isinstance(bias, MaskedTensor):
        allowed &= _four(bias.valid)
        bias = bias.to_tensor(0)
    if mask is not None:
        allowed &= _four(mask.to_tensor(False) if isinstance(mask, MaskedTensor) else mask)
    if options.pop("is_causal", False):
        allowed &= keys <= queries
    window = options.pop("local_window_size", None)
    if window is not None:
        before, after = jnp.broadcast_to(jnp.asarray(window), 2)
        allowed &= (keys >= queries - before) & (keys <= queries + after)
    for name, numbers in (("query_seq_lengths", queries), ("key_value_seq_lengths", keys)):
        lengths = options.pop(name, None)
        if lengths is not None:
            allowed &= numbers < jnp.asarray(lengths)[:, None, None, None]

    values = attend(*arrays, bias, allowed, **options)
    terms = jnp.einsum("bnts,bsnh->btnh", allowed.astype(on_value.dtype), on_value)
    return joined(values, (terms > 0.5).reshape(values.shape))


def _four(x: TensorLike) -> jax.Array:
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def add_n(*tensors: TensorLike) -> Tensor:
    """Sum tensors: row-sparse if all are, with the rows of all of them.

    Args:
        *tensors: tensors of one shape on any storage, or one sequence of them. The rows of
            `RowSparse` tensors are put side by side: equal indices add.

    Raises:
        ValueError: if there is none, or the shapes differ.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.RowSparse([1], jnp.array([2.]), (3,))
        >>> jmask.add_n(x, x, x), jmask.add_n(x, jnp.ones(3))
        (RowSparse(float32[3], nse=3), Array([1., 3., 1.], dtype=float32))
    """
    if len(tensors) == 1 and isinstance(tensors[0], Sequence):
        tensors = tuple(tensors[0])
    if not tensors:
        raise ValueError("`tensors` must hold at least one tensor, got none.")
    terms = [x if is_tensor(x) else checked_array("tensors", x) for x in tensors]
    shapes = {tuple(x.shape) for x in terms}
    if len(shapes) > 1:
        raise ValueError(f"`tensors` must have one shape, got {sorted(shapes)}.")
    # Sparse ones first, so that they meet a dense one once.
    order: list[Argument] = sorted(terms, key=lambda x: not isinstance(x, RowSparse))
    return functools.reduce(operator.add, order)


def square_sum(x: TensorLike, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """Sum the squares of the entries, at the cost of the rows that a `RowSparse` stores.

    Args:
        x: a tensor on any storage.
        axis, keepdims: as of `jmask.numpy.sum`.

    Returns:
        A dense tensor; for a `RowSparse` of which axis 0 is kept, a `RowSparse`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.square_sum(jmask.RowSparse([1], jnp.array([[3., 4.]]), (3, 2)), axis=1)
        RowSparse(float32[3], nse=1)
    """
    check_flag("keepdims", keepdims)
    x = x if is_tensor(x) else checked_array("x", x)
    return _sum(_square(x), axis, keepdims=keepdims)
