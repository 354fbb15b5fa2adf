"""Products: `dot` of two matrices on any storage, and products of masked tensors.

A sparse operand contributes a term for each value that it stores, and nothing else:

    X (3, 3)       W (3, d)       X W
    [0, 2, 0]      [w0]           [2 w1      ]
    [0, 0, 0]      [w1]           [0         ]
    [3, 4, 0]      [w2]           [3 w0 + 4 w1]

So a product of entries is an embedding bag: its bags are the rows of X, its ids their columns,
its weights their values, and the gradient of W is row-sparse. As in MXNet's storage inference
Xᵀ Y has a row for each column that X uses, and a row_sparse matrix times anything has its rows.

A masked entry contributes nothing, and an entry of the result exists if one of its terms does:

    [1, --]   [5, 6]     [1*5, 1*6]     [ 5,  6]        row 0: one term each
    [--, --] @ [7, 8]  =  [no term]    =  [--, --]        row 1: none

Padding has the value 0, whatever was stored there, and meets a row of zeros: no inf or nan of
the other operand reaches a sum or a derivative through it. No index is read unchecked.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.experimental.sparse import BCOO, BCSR
from jax.typing import DTypeLike

from jmask._base.array_types import joint_dtype, shapes_from, sum_dtype, trailing, wide
from jmask._base.fallback import report_fallback
from jmask._base.row_ids import canonical
from jmask._base.types import Argument, Axis, Dense, Function, Storage, Tensor, TensorLike
from jmask._base.validation import check_flag, checked_array, checked_choice
from jmask._kernels.gathered_rows import bag_sum, is_bag_sum
from jmask._kernels.rows import add_rows, rows_or_fill
from jmask._ops.lift import adopted, by_name, contracts, dense, existing, extends, filled
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    any_masked,
    is_tensor,
    joined,
    with_values_of,
)
from jmask._tensors.methods import library
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import (
    coordinates,
    is_sparse,
    sparse_sizes,
    stored_at,
    stored_values,
    stype,
    summed_before_cast,
    with_stored_values,
)

# --- operands: an array, or one of these -------------------------------------------------


class Entries(NamedTuple):
    """`values` (n,) at `rows` (n,) and `columns` (n,) of a matrix; padding is zero."""

    rows: jax.Array
    columns: jax.Array
    values: jax.Array
    shape: tuple[int, int]

    @property
    def T(self) -> Entries:  # noqa: N802
        return Entries(self.columns, self.rows, self.values, self.shape[::-1])


class Rows(NamedTuple):
    """A `RowSparse` with zeros at padding; transposed, its rows are columns."""

    matrix: RowSparse
    transposed: bool = False

    @property
    def T(self) -> Rows:  # noqa: N802
        return Rows(self.matrix, not self.transposed)


Operand = jax.Array | Entries | Rows
_Product = TypeVar("_Product", bound=jax.Array | RowSparse)


def operand(x: Storage, transposed: bool, dtype: DTypeLike) -> Operand:
    """Return the operand for a tensor of one or two dimensions; a vector is a column.

    Equal positions are summed where casts to `dtype` do not add.
    """
    matrix: Operand
    x = summed_before_cast(x, dtype)
    if x.ndim == 1 and not isinstance(x, BCOO | BCSR):
        x = _on_rows(lambda values: values[:, None], x)
    if isinstance(x, RowSparse):
        matrix = Rows(_without_padding(x))
    elif isinstance(x, BCOO | BCSR):
        height, width = x.shape
        rows, columns = map(canonical, coordinates(x), x.shape)
        inside = (rows < height) & (columns < width)
        rows, columns = jnp.where(inside, rows, height), jnp.where(inside, columns, width)
        values = jnp.where(inside, x.data, jnp.zeros_like(x.data))
        matrix = Entries(rows, columns, values, (height, width))
    else:
        matrix = x
    return matrix.T if transposed else matrix


def _without_padding(x: RowSparse) -> RowSparse:
    exists = trailing(x.row_ids() < x.shape[0], x.values.ndim)
    return x.with_values(jnp.where(exists, x.values, jnp.zeros_like(x.values)))


# --- the product of each pair ------------------------------------------------------------


def _product(a: Operand, b: Operand, dtype: DTypeLike, sparse: bool) -> Argument:
    """Return the product in `dtype`; row-sparse if `a` is `Rows`, or `Entries` and `sparse`."""
    if isinstance(a, Rows) and not a.transposed:
        rows = _on_rows(lambda values: _product(values, b, dtype, False), a.matrix)
        # Zeros in the place of padding, times inf, are nan.
        return _without_padding(rows) if rows.coalesced else rows.coalesce()
    if isinstance(a, jax.Array) and isinstance(b, jax.Array):
        if a.dtype != b.dtype or a.dtype == jnp.dtype(bool):
            a, b = a.astype(dtype), b.astype(dtype)
        return jnp.matmul(a, b, preferred_element_type=dtype)
    if isinstance(a, jax.Array) or (isinstance(a, Rows) and isinstance(b, Entries)):
        # The transposed product has the sparse operand on the left.
        return _product(b.T, a.T, dtype, sparse=False).T

    # --- rows of `b`, read at the columns that `a` stores --------------------------------
    positions = a.matrix.row_ids() if isinstance(a, Rows) else a.columns
    if isinstance(b, Rows):
        b, positions = stored_at(b.matrix.with_values(b.matrix.values.astype(dtype)), positions)
    if isinstance(b, Entries):
        zeros, values = jnp.zeros(b.shape, dtype), b.values.astype(dtype)
        b = zeros.at[b.rows, b.columns].add(values, mode="drop")
    table: jax.Array = b
    if isinstance(a, Rows):
        return _product(a.matrix.values.T, _rows_at(table, positions, dtype), dtype, False)
    bags, weights = a.shape[0], a.values.astype(dtype)
    # A bag sum is in its table's own wide dtype.
    is_wide = wide(table.dtype) == dtype
    if not sparse and is_wide and is_bag_sum(table, positions, weights, bags):
        return bag_sum(table, positions, a.rows, weights, bags, 0)
    terms = weights[:, None] * _rows_at(table, positions, dtype)
    if sparse:
        return RowSparse(a.rows, terms, (bags, *terms.shape[1:])).coalesce()
    return add_rows(jnp.zeros((bags, *terms.shape[1:]), dtype), a.rows, terms)


def _rows_at(table: jax.Array, positions: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the rows of a matrix at `positions`, zeros at padding."""
    if 0 in table.shape:
        return jnp.zeros((*positions.shape, *table.shape[1:]), dtype)
    return rows_or_fill(table, positions).astype(dtype)


def _on_rows(function: Callable[[jax.Array], jax.Array], x: _Product) -> _Product:
    """Apply `function` to an array, or to the rows that a `RowSparse` stores."""
    values: jax.Array = function(stored_values(x))
    return with_stored_values(x, values, (x.shape[0], *values.shape[1:]))


# --- dot ---------------------------------------------------------------------------------


def dot(
    lhs: TensorLike,
    rhs: TensorLike,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    forward_stype: str | None = None,
) -> jax.Array | RowSparse:
    """Return the matrix product of two operands on any storage; MXNet's function of this name.

    What an operand does not store contributes nothing, even where the other one is inf or
    nan; equal positions add; out-of-range positions are padding. float16 and bfloat16 are
    summed in float32 and rounded once. With `jmask.value_and_grad` the gradient of a dense
    `rhs` of a sparse `lhs` is a `RowSparse`.

    Args:
        lhs (m, k): array, `RowSparse`, BCSR or BCOO. An array or `RowSparse` may also be a
            vector (k,).
        rhs (k, n): the same.
        transpose_a: `lhs` is given as (k, m). A vector stays one.
        transpose_b: `rhs` is given as (n, k).
        forward_stype: "default" for a dense result; "row_sparse" for a row-sparse one, of
            an `lhs` that stores rows or entries. By default as in the table:

            | lhs                    | rhs                 | result     |
            |------------------------|---------------------|------------|
            | csr, coo               | default, row_sparse | default    |
            | csr, coo, transposed   | default, row_sparse | row_sparse |
            | row_sparse             | any                 | row_sparse |
            | row_sparse, transposed | any                 | default    |
            | default                | any                 | default    |

    Returns:
        (m, n), without the dimension of a vector. A `RowSparse` is coalesced, and stores no
        more rows than `lhs` has entries or rows.

    Raises:
        TypeError: if an operand is none of these (of a `MaskedTensor` it is
            `jmask.numpy.matmul`).
        ValueError: if the shapes do not fit, an operand does not have one or two
            dimensions, or `lhs` cannot give the `forward_stype`.

    Warns:
        StorageFallbackWarning: if both are csr or coo, or a row_sparse `rhs` is transposed.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> from jax.experimental.sparse import BCSR
        >>> x = BCSR.fromdense(jnp.array([[0., 2., 0.], [3., 4., 0.]]))
        >>> jmask.dot(x, jnp.array([[1., 1.], [2., 0.], [5., 5.]]))
        Array([[ 4.,  0.],
               [11.,  3.]], dtype=float32)
        >>> jmask.grad(lambda w: jmask.dot(x, w).sum())(jnp.ones((3, 2)))
        RowSparse(float32[3, 2], nse=3)
    """
    check_flag("transpose_a", transpose_a)
    check_flag("transpose_b", transpose_b)
    lhs, rhs = _checked(lhs, "lhs"), _checked(rhs, "rhs")
    left_axis = 0 if transpose_a or lhs.ndim == 1 else 1
    right_axis = 1 if transpose_b and rhs.ndim == 2 else 0
    if lhs.shape[left_axis] != rhs.shape[right_axis]:
        raise ValueError(
            f"`lhs` of shape {tuple(lhs.shape)} and `rhs` of shape {tuple(rhs.shape)} do not "
            f"fit with transpose_a={transpose_a} and transpose_b={transpose_b}: dimension "
            f"{left_axis} of `lhs` and dimension {right_axis} of `rhs` must have one size."
        )
    checked_choice("forward_stype", forward_stype, (None, "default", "row_sparse"))
    is_rows = isinstance(lhs, RowSparse) and lhs.ndim == 2
    has_rows = isinstance(lhs, BCOO | BCSR) or (is_rows and not transpose_a)
    sparse = forward_stype == "row_sparse"
    if forward_stype is None:
        sparse = has_rows and (is_rows or bool(transpose_a))
    elif sparse and not has_rows:
        raise ValueError(
            "`forward_stype` cannot be 'row_sparse': with `lhs` "
            f"{stype(lhs)}{', transposed,' if transpose_a else ''} of shape "
            f"{tuple(lhs.shape)} no row of the result is known to be zero. Use "
            "jmask.RowSparse.fromdense on the result, with its `nse`."
        )
    if isinstance(rhs, RowSparse) and rhs.ndim == 2 and transpose_b:
        report_fallback(
            f"the product with a transposed row_sparse `rhs` of shape {rhs.shape} stores "
            f"all of its {rhs.shape[0]} columns: no storage has sparse columns"
        )
    if isinstance(lhs, BCOO | BCSR) and isinstance(rhs, BCOO | BCSR):
        report_fallback(
            f"`rhs`, {stype(rhs)} of shape {tuple(rhs.shape)}, became dense in a product, at "
            "O(size) cost: two matrices of entries have no sparse product"
        )
    return _product_of(lhs, rhs, bool(transpose_a), bool(transpose_b), sparse)


def _checked(x: TensorLike, name: str) -> Storage:
    if isinstance(x, MaskedTensor):
        raise TypeError(
            f"`{name}` is a MaskedTensor: use jmask.numpy.matmul, or .to_tensor(0) for zeros "
            "where it is masked."
        )
    stype(x, name)  # refuses what is no storage
    x = x if is_sparse(x) else jnp.asarray(x)
    if isinstance(x, BCOO) and x.n_sparse == 1 and not x.n_batch:
        return RowSparse(x.indices[:, 0], x.data, x.shape)
    if isinstance(x, BCOO | BCSR) and (x.n_batch or x.n_dense or x.n_sparse != 2):
        raise ValueError(
            f"`{name}` has {x.n_batch} batch and {x.n_dense} dense dimensions; a product "
            "takes matrices: use .update_layout(n_batch=0, n_dense=0), or jax.vmap over "
            "a batch."
        )
    if x.ndim not in (1, 2):
        raise ValueError(
            f"`{name}` must have one or two dimensions, got shape {tuple(x.shape)}: reshape "
            "it to a matrix, or use jnp.tensordot for arrays."
        )
    return x


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _product_of(
    lhs: Storage, rhs: Storage, transpose_a: bool, transpose_b: bool, sparse: bool
) -> jax.Array | RowSparse:
    dtype = jnp.result_type(lhs.dtype, rhs.dtype)
    if isinstance(rhs, RowSparse) and rhs.ndim == 2 and transpose_b:
        rhs = rhs.todense()
    is_row, is_column = lhs.ndim == 1, rhs.ndim == 1
    dtype_of_sums = sum_dtype(dtype)
    a = operand(lhs, transpose_a or is_row, dtype_of_sums)
    b = operand(rhs, transpose_b and not is_column, dtype_of_sums)
    result = _product(a, b, dtype_of_sums, sparse)
    if isinstance(result, RowSparse) and not sparse:
        result = result.todense()
    result = _on_rows(lambda values: values.astype(dtype), result)
    result = result[0] if is_row else result
    return _on_rows(lambda values: values[..., 0], result) if is_column else result


# --- masked tensors ----------------------------------------------------------------------


def multiplies(function: Function) -> Function:
    """Lift a product of two tensors that is `jmask.dot` of ordinary sparse matrices."""
    contracted = contracts(function)

    @by_name(function, 2)
    def lifted(a: Argument, b: Argument, **kwargs: Argument) -> Tensor:
        x, y = adopted(a), adopted(b)
        wanted = kwargs.get("preferred_element_type")

        def product(*operands: Argument) -> Argument:
            if wanted is None:
                return dot(*operands)
            dtype = jnp.zeros((), wanted).dtype
            cast = lambda x, dtype: with_values_of(x, jnp.asarray(stored_values(x), dtype))
            return cast(dot(*(cast(x, joint_dtype(x, dtype)) for x in operands)), dtype)

        if not any_masked(x, y):
            is_product = is_sparse(x) or is_sparse(y)
            return product(x, y) if is_product else function(x, y, **kwargs)
        if _has_entries(x) and not _has_entries(y) and function is jnp.matmul and y.ndim < 3:
            y = dense(y, "matmul")
            terms = dot(existing(x), existing(y))
            return joined(product(filled(x), filled(y)), terms > 0.5)
        return contracted(x, y, **kwargs)

    return lifted


def _has_entries(x: TensorLike) -> bool:
    """Decide whether `x` is a masked matrix that stores entries, and not rows of them."""
    return isinstance(x, MaskedTensor) and x.ndim == 2 and sparse_sizes(x.storage) == x.shape


@functools.wraps(nn.dot_product_attention)
def _attend(*args: Argument, **kwargs: Argument) -> jax.Array:
    for name, x in inspect.signature(_attend).bind(*args, **kwargs).arguments.items():
        if hasattr(x, "dtype") and jnp.iscomplexobj(x):
            raise TypeError(
                f"`{name}` is complex, and JAX's attention drops the imaginary part: use "
                "jmask.nn.softmax of scores that are real, jmask.numpy.real(scores)."
            )
    result: jax.Array = nn.dot_product_attention(*args, **kwargs)
    return result


@extends(_attend, "query", "key", "value", "bias", "mask")
def dot_product_attention(
    query: Dense,
    key: Dense,
    value: Dense,
    bias: Dense | None,
    mask: Dense | None,
    **options: Argument,
) -> MaskedTensor:
    """Attend to the keys with which a query has a score.

    A score exists if a term of the product of query and key does, and the bias. A masked entry
    of `mask` is False. The result is masked where no value takes part: a query without a key
    sends derivative 0. Complex numbers are a TypeError.
    """
    arrays = query, key, value
    on_query, on_key, on_value = (_four(existing(x)) for x in arrays)
    clean = [filled(x) for x in arrays]
    shapes_from(_attend, *clean)  # refuses shapes that do not fit

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

    values = _attend(*clean, bias, allowed, **options)
    terms = jnp.einsum("bnts,bsnh->btnh", allowed.astype(on_value.dtype), on_value)
    return joined(values, (terms > 0.5).reshape(values.shape))


def _four(x: TensorLike) -> jax.Array:
    x = jnp.asarray(x)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


# --- sums of tensors ---------------------------------------------------------------------


def add_n(*tensors: TensorLike) -> Tensor:
    """Sum tensors: row-sparse if all are, with the rows of all of them.

    Args:
        *tensors: tensors of one shape on any storage, or one sequence of them. The rows of
            `RowSparse` tensors are concatenated: equal indices add.

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
    return functools.reduce(library().numpy.add, order)


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
    functions = library().numpy
    return functions.sum(functions.square(x), axis, keepdims=keepdims)
