"""Products of masked tensors: matmul, einsum, attention; and MXNet's sums of tensors.

Masked entries contribute nothing, and an entry of the result exists where at least one of
its terms does:

    [1, --]   [5, 6]     [1*5, 1*6]     [ 5,  6]        row 0: one term each
    [--, --] @ [7, 8]  =  [no term]    =  [--, --]        row 1: none

This is the sum of masked semantics over the products that exist, like `sum` of `a * b`. Two
other definitions are possible and are one line each: a masked operand taken for zeros is
`x.to_tensor(0) @ y`; a result that exists only where *all* its terms do has the mask
`matmul(x.mask, y.mask).data == x.shape[-1]`, for masks as integers.

A valid inf or nan meets masked entries as zeros, and inf * 0 is nan.

    add_n([x, y, z])        x + y + z
    square_sum(x, axis=1)   sum(x * x, axis=1), at the cost of the rows stored
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.types import Argument, Axis, Function, Mask, Numbers, Tensor, TensorLike
from jmask._base.validation import check_flag, checked_array, refuse_scipy
from jmask._ops.elementwise import elementwise
from jmask._ops.products import dot as _sparse_dot
from jmask._ops.reductions import sum as sum_of
from jmask._ops.shape import dense
from jmask._tensors.masked_tensor import MaskedTensor, any_masked, as_tensor, is_tensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import is_sparse, stored_values, with_stored_values

_add, _square = elementwise(jnp.add), elementwise(jnp.square)


def matmul(x: TensorLike, y: TensorLike) -> Tensor:
    """Return the matrix product `x @ y`; masked entries contribute nothing.

    Args:
        x (..., n, k), y (..., k, m): arrays or `MaskedTensor`s, as in `jnp.matmul`. A masked
            BCOO or BCSR matrix times a dense operand is not made dense. For ordinary sparse
            matrices it is `jmask.dot`.

    Returns:
        An array if both are, or the result of `jmask.dot`; otherwise a `MaskedTensor`, masked
        where no term exists.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> mask = jnp.array([[True, False], [False, False]])
        >>> x = jmask.masked_tensor(jnp.array([[1., jnp.nan], [2., 3.]]), mask)
        >>> jmask.numpy.matmul(x, jnp.array([[5., 6.], [7., 8.]])).to_tensor(0)
        Array([[5., 6.],
               [0., 0.]], dtype=float32)
    """
    if not any_masked(x, y):
        return _product(jnp.matmul, x, y)
    if _is_sparse_matrix(x) and not _is_sparse_matrix(y):
        return _combined(lambda a, b: a @ b, x, _dense(y, "matmul"))
    return _contracted(jnp.matmul, x, y)


def dot(x: TensorLike, y: TensorLike) -> Tensor:
    """Do as `jnp.dot` with masked operands; masked entries contribute nothing. See `matmul`."""
    return _contracted(jnp.dot, x, y) if any_masked(x, y) else _product(jnp.dot, x, y)


def einsum(subscripts: str, *operands: TensorLike) -> Tensor:
    """Do as `jnp.einsum` with masked operands; masked entries contribute nothing.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.ones((2, 3)), jnp.array([True, False, True]))
        >>> jmask.numpy.einsum("ij,ij->i", x, jnp.ones((2, 3))).to_tensor(0)
        Array([2., 2.], dtype=float32)
    """
    return _contracted(functools.partial(jnp.einsum, subscripts), *operands, name="einsum")


def contraction(function: Function) -> Function:
    """Lift a sum of products of two arrays: masked entries contribute nothing."""

    @functools.wraps(function)
    def lifted(a: TensorLike, b: TensorLike, *args: Argument, **kwargs: Argument) -> Tensor:
        product = lambda a, b: function(a, b, *args, **kwargs)
        return _contracted(product, a, b, name=function.__name__)

    return lifted


outer = contraction(jnp.outer)


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


def dot_product_attention(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    bias: TensorLike | None = None,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Numbers | None = None,
    key_value_seq_lengths: Numbers | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Do as `jax.nn.dot_product_attention` with masked operands.

    A query attends to the keys with which it has a score: at least one term of their product
    exists, and the bias, if it is masked. Masked entries of values contribute nothing to the
    sum. All else is computed by the function of JAX, which also serves arrays.

    Args:
        query ([batch,] queries, heads, depth): array or `MaskedTensor`.
        key ([batch,] keys, key heads, depth): the same; heads are a multiple of key heads.
        value ([batch,] keys, key heads, depth): the same.
        bias: added to the scores; up to (batch, heads, queries, keys), to which it broadcasts.
        mask: booleans that broadcast to it too, True for keys to attend to; a masked entry
            is False.
        scale: of the scores; by default 1 over the root of the depth.
        is_causal: whether a query attends to no later key.
        query_seq_lengths (batch,): the result is masked from there on.
        key_value_seq_lengths (batch,): keys from there on take no part.
        local_window_size: how many keys before and after, as an int or two.
        implementation: as in JAX.

    Returns:
        An array if all are; otherwise a `MaskedTensor` of the shape of `query`, masked where
        no value takes part: a query without a key sends derivative 0.

    Raises:
        ValueError: for shapes that do not fit, as in JAX.
        TypeError: for complex numbers.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> key = jmask.masked_tensor(jnp.ones((2, 1, 1)), jnp.array([[[True]], [[False]]]))
        >>> value = jnp.array([3., jnp.nan]).reshape(2, 1, 1)
        >>> value = jmask.masked_tensor(value, key.mask)
        >>> jmask.nn.dot_product_attention(jnp.ones((1, 1, 1)), key, value)
        MaskedTensor([[[3.0]]], dtype=float32)
    """
    attention: Function = nn.dot_product_attention
    options = {"scale": scale, "implementation": implementation}
    for name, x in (("query", query), ("key", key), ("value", value), ("bias", bias)):
        if jnp.iscomplexobj(x):
            raise TypeError(
                f"`{name}` is complex, and JAX's attention drops the imaginary part: use "
                "jmask.nn.softmax of scores that are real, jmask.numpy.real(scores)."
            )
    operands = [_dense(x, "dot_product_attention") for x in (query, key, value)]
    if not any_masked(*operands, bias, mask):
        return attention(
            *operands,
            bias,
            mask,
            is_causal=is_causal,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
            **options,
        )
    jax.eval_shape(attention, *map(_filled, operands))  # refuses shapes that do not fit
    existing = [_four(_existing(x)) for x in operands]
    groups = existing[0].shape[2] // max(existing[1].shape[2], 1)
    on_query, on_key, on_value = (
        x if x is existing[0] else jnp.repeat(x, groups, axis=2) for x in existing
    )
    allowed = jnp.einsum("btnh,bsnh->bnts", on_query, on_key) > 0.5
    shape = (1, 1, *allowed.shape[2:])
    queries, keys = (lax.broadcasted_iota(jnp.int32, shape, i) for i in (2, 3))
    if isinstance(bias, MaskedTensor):
        allowed &= _four(_existing(_dense(bias, "dot_product_attention"))) > 0.5
        bias = bias.to_tensor(0)
    if mask is not None:
        allowed &= _four(mask.to_tensor(False) if isinstance(mask, MaskedTensor) else mask)
    if is_causal:
        allowed &= keys <= queries
    if local_window_size is not None:
        before, after = jnp.broadcast_to(jnp.asarray(local_window_size), 2)
        allowed &= (keys >= queries - before) & (keys <= queries + after)
    for lengths, numbers in ((query_seq_lengths, queries), (key_value_seq_lengths, keys)):
        if lengths is not None:
            allowed &= numbers < jnp.asarray(lengths)[:, None, None, None]
    values = attention(*map(_filled, operands), bias, allowed, **options)
    terms = jnp.einsum("bnts,bsnh->btnh", allowed.astype(on_value.dtype), on_value)
    return joined(values, (terms > 0.5).reshape(values.shape))


def _four(x: TensorLike) -> jax.Array:
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _product(dense_product: Function, x: TensorLike, y: TensorLike) -> Tensor:
    refuse_scipy("x", x)
    refuse_scipy("y", y)
    return _sparse_dot(x, y) if is_sparse(x) or is_sparse(y) else dense_product(x, y)


def _contracted(product: Function, *operands: TensorLike, name: str = "") -> Tensor:
    """Return a product of arrays, or of masked tensors, on dense storage."""
    operands = tuple(_dense(x, name or product.__name__) for x in operands)
    return _combined(product, *operands) if any_masked(*operands) else product(*operands)


def _combined(product: Function, *operands: TensorLike) -> MaskedTensor:
    """Return a product of values with zeros where masked, and how many of its terms exist."""
    values = product(*map(_filled, operands))
    terms = product(*map(_existing, operands))
    return joined(values, terms > 0.5)


def _filled(x: TensorLike) -> Tensor:
    if not isinstance(x, MaskedTensor):
        return x
    values = stored_values(x.storage)
    return with_stored_values(x.storage, jnp.where(x.valid, values, jnp.zeros_like(values)))


def _existing(x: TensorLike) -> Tensor:
    if isinstance(x, MaskedTensor):
        return with_stored_values(x.storage, x.valid.astype(jnp.float32))
    return jnp.ones(jnp.shape(x), jnp.float32)


def _is_sparse_matrix(x: TensorLike) -> bool:
    return isinstance(x, MaskedTensor) and isinstance(x.storage, BCOO | BCSR)


def _dense(x: TensorLike, name: str) -> Tensor:
    if isinstance(x, MaskedTensor):
        why = "in a product only a BCOO or BCSR matrix on the left stays sparse"
    else:
        why = "a product of two matrices, of which one is sparse, is jmask.dot"
    return dense(as_tensor(x), name, why)


# --- MXNet's sums --------------------------------------------------------------------


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


def square_sum(x: TensorLike, axis: Axis = None, keepdims: bool = False) -> Tensor:
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
    return sum_of(_square(x), axis, keepdims=keepdims)
