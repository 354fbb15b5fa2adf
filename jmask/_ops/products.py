"""`dot` of two matrices on any storage.

A sparse operand contributes a term for each value that it stores, and nothing else:

    X (3, 3)       W (3, d)       X W
    [0, 2, 0]      [w0]           [2 w1      ]
    [0, 0, 0]      [w1]           [0         ]
    [3, 4, 0]      [w2]           [3 w0 + 4 w1]

So a product of entries is an embedding bag: its bags are the rows of X, its ids their columns,
its weights their values, and the gradient of W is row-sparse. As in MXNet's storage inference
Xᵀ Y has a row for each column that X uses, and a row_sparse matrix times anything has its rows.

Padding has the value 0, whatever was stored there, and meets a row of zeros: no inf or nan of
the other operand reaches a sum or a derivative through it. No index is read unchecked.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jmask._base.array_types import adds_when_cast, sum_dtype, trailing, wide
from jmask._base.fallback import report_fallback
from jmask._base.row_ids import canonical
from jmask._base.shardings import explicit_sharding, spec_of, without_repetition
from jmask._base.types import Argument, Function, Storage, TensorLike
from jmask._base.validation import check_flag, checked_choice
from jmask._kernels.gathered_rows import bag_sum
from jmask._kernels.rows import add_rows
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.specified import jmask_everywhere, placeholder_of, todense
from jmask._tensors.storage import coordinates, is_sparse, stored_at, stype, unique_positions

# --- operands: an array, or one of these -------------------------------------------------


class Entries(NamedTuple):
    """`values` (n,) at `rows` (n,) and `columns` (n,) of a matrix; padding is zero."""

    rows: jax.Array
    columns: jax.Array
    values: jax.Array
    shape: tuple[int, int]

    @property
    def T(self) -> "Entries":  # noqa: N802
        return Entries(self.columns, self.rows, self.values, self.shape[::-1])

    def to_dense(self, dtype: DTypeLike) -> jax.Array:
        zeros, values = jnp.zeros(self.shape, dtype), self.values.astype(dtype)
        return zeros.at[self.rows, self.columns].add(values, mode="drop")


class Rows(NamedTuple):
    """A `RowSparse` with zeros at padding; transposed, its rows are columns."""

    matrix: RowSparse
    transposed: bool = False

    @property
    def T(self) -> "Rows":  # noqa: N802
        return Rows(self.matrix, not self.transposed)


Operand = jax.Array | Entries | Rows
_Product = TypeVar("_Product", jax.Array, RowSparse)


def operand(x: Storage, transposed: bool) -> Operand:
    """Return the operand for an array, RowSparse, BCOO or BCSR of two dimensions."""
    matrix: Operand
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
    """Return the product in `dtype`: rows for a `RowSparse`, if `sparse` for `Entries`."""
    if isinstance(b, Rows) and b.transposed:
        like, height = b.matrix, b.matrix.shape[0]

        def as_columns(values: jax.Array) -> jax.Array:
            zeros = jnp.zeros((height, values.shape[0]), values.dtype)
            return add_rows(zeros, like.row_ids(), values.T, like.order).T

        return _on_values(_product(a, like.values.T, dtype, sparse), as_columns)
    if isinstance(a, Entries):
        b = b.to_dense(dtype) if isinstance(b, Entries) else b
        if not sparse:
            return _bags(a, b, dtype)
        terms = _terms(a, b, dtype)
        return RowSparse(a.rows, terms, (a.shape[0], *terms.shape[1:])).coalesce()
    if isinstance(a, Rows) and not a.transposed:
        rows = _on_values(a.matrix, lambda values: _product(values, b, dtype, False))
        # Zeros in the place of padding, times inf, are nan.
        return _without_padding(rows) if rows.coalesced else rows.coalesce()
    if isinstance(a, Rows) and not isinstance(b, Entries):
        return _matmul(a.matrix.values.T, _rows_at(b, a.matrix.row_ids(), dtype), dtype)
    if isinstance(a, jax.Array) and isinstance(b, jax.Array):
        return _matmul(a, b, dtype)
    # Sparse on the right only: one of the cases above if that is on the left.
    return _product(b.T, a.T, dtype, sparse=False).T


def _matmul(x: jax.Array, y: jax.Array, dtype: DTypeLike) -> jax.Array:
    if x.dtype != y.dtype or x.dtype == jnp.dtype(bool):
        x, y = x.astype(dtype), y.astype(dtype)
    return jnp.matmul(x, y, preferred_element_type=dtype)


def _bags(a: Entries, b: jax.Array | Rows, dtype: DTypeLike) -> jax.Array:
    """Return the product (m, d) in `dtype`: an embedding bag of rows of `b`."""
    table, positions = _table(b, a.columns, dtype)
    bags, weights = a.shape[0], a.values.astype(dtype)
    # A bag sum is floating, in its table's own wide dtype, not empty, and on one device: where
    # arrays are sharded by their type, or inside `shard_map`, XLA places the terms.
    if (
        jnp.issubdtype(table.dtype, jnp.floating)
        and wide(table.dtype) == dtype
        and 0 not in (bags, *positions.shape, *table.shape)
        and explicit_sharding(table, positions, weights) is None
        and not jax.sharding.get_abstract_mesh().manual_axes
    ):
        return bag_sum(table, positions, a.rows, weights, None, bags, 0)
    return add_rows(jnp.zeros((bags, *table.shape[1:]), dtype), a.rows, _terms(a, b, dtype))


def _terms(a: Entries, b: jax.Array | Rows, dtype: DTypeLike) -> jax.Array:
    return a.values.astype(dtype)[:, None] * _rows_at(b, a.columns, dtype)


def _table(
    b: jax.Array | Rows, ids: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Return an array that holds the rows of `b`, and the positions of `ids` in it."""
    if isinstance(b, Rows):
        return stored_at(b.matrix.with_values(b.matrix.values.astype(dtype)), ids)
    return b, ids


def _rows_at(b: jax.Array | Rows, ids: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the rows `ids` of a matrix (n, d), zeros at padding."""
    # Unlike in `gather_rows` the transpose drops padding, so that the gradient of a table does
    # not touch a row that was not looked up.
    table, positions = _table(b, ids, dtype)
    if 0 in table.shape:
        return jnp.zeros((*positions.shape, *table.shape[1:]), dtype)
    sharding = explicit_sharding(table, positions)
    if sharding is not None:  # rows go where their positions are, as in lookups
        spec = without_repetition((*spec_of(positions), *spec_of(table)[1:]))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    rows = table.at[positions].get(mode="fill", fill_value=0, out_sharding=sharding)
    return rows.astype(dtype)


def _on_values(x: _Product, function: Callable[[jax.Array], jax.Array]) -> _Product:
    """Apply `function` to an array, or to the rows that a `RowSparse` stores."""
    if not isinstance(x, RowSparse):
        return function(x)
    values: jax.Array = function(x.values)
    shape = (x.shape[0], *values.shape[1:])
    return RowSparse(x.indices, values, shape, coalesced=x.coalesced)


# --- dot ---------------------------------------------------------------------------------


def dot(
    lhs: TensorLike,
    rhs: TensorLike,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    forward_stype: str | None = None,
    masked_grad: bool = True,
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
        masked_grad: whether the gradient of a sparse operand goes to what it stores only.
            False: to every entry, as of `jmask.todense(x)`; the result is then dense, and so
            is the product where such a gradient is taken.
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
    check_flag("masked_grad", masked_grad)
    if not masked_grad:
        if forward_stype == "row_sparse":
            raise ValueError(
                "`forward_stype` cannot be 'row_sparse' with `masked_grad`=False: rows that it "
                "does not store have derivatives, too."
            )
        forward_stype = "default"
        lhs, rhs = (todense(x) if placeholder_of(x) is not None else x for x in (lhs, rhs))
    lhs, rhs = _checked(lhs, "lhs"), _checked(rhs, "rhs")
    over = 0 if transpose_a or lhs.ndim == 1 else 1, 1 if transpose_b and rhs.ndim == 2 else 0
    if lhs.shape[over[0]] != rhs.shape[over[1]]:
        raise ValueError(
            f"`lhs` of shape {tuple(lhs.shape)} and `rhs` of shape {tuple(rhs.shape)} do not "
            f"fit with transpose_a={transpose_a} and transpose_b={transpose_b}: dimension "
            f"{over[0]} of `lhs` and dimension {over[1]} of `rhs` must have one size."
        )
    sparse = _is_result_sparse(lhs, transpose_a, forward_stype)
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
    result = _product_of(lhs, rhs, bool(transpose_a), bool(transpose_b), sparse)
    return result if masked_grad else jmask_everywhere(result)


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


def _is_result_sparse(lhs: Storage, transpose_a: bool, forward_stype: str | None) -> bool:
    checked_choice(forward_stype, "forward_stype", (None, "default", "row_sparse"))
    entries, rows = isinstance(lhs, BCOO | BCSR), isinstance(lhs, RowSparse) and lhs.ndim == 2
    by_rows = entries or (rows and not transpose_a)
    if forward_stype is None:
        return by_rows and (rows or transpose_a)
    if forward_stype == "row_sparse" and not by_rows:
        raise ValueError(
            "`forward_stype` cannot be 'row_sparse': with `lhs` "
            f"{stype(lhs)}{', transposed,' if transpose_a else ''} of shape "
            f"{tuple(lhs.shape)} no row of the result is known to be zero. Use "
            "jmask.RowSparse.fromdense on the result, with its `nse`."
        )
    return forward_stype == "row_sparse"


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _product_of(
    lhs: Storage, rhs: Storage, transpose_a: bool, transpose_b: bool, sparse: bool
) -> jax.Array | RowSparse:
    dtype = jnp.result_type(lhs.dtype, rhs.dtype)
    is_row, is_column = lhs.ndim == 1, rhs.ndim == 1
    dtype_of_sums = sum_dtype(dtype)
    a = operand(_matrix(lhs, dtype_of_sums), transpose_a or is_row)
    b = operand(_matrix(rhs, dtype_of_sums), transpose_b and not is_column)
    result = _product(a, b, dtype_of_sums, sparse)
    if isinstance(result, RowSparse) and not sparse:
        result = result.todense()
    result = _on_values(result, lambda values: values.astype(dtype))
    result = result[0] if is_row else result
    return _on_values(result, lambda values: values[..., 0]) if is_column else result


def _matrix(x: Storage, dtype: DTypeLike) -> Storage:
    """Return a vector as a column; sum equal positions where casts to `dtype` do not add."""
    x = x if adds_when_cast(x.dtype, dtype) else unique_positions(x)
    if x.ndim == 2 or isinstance(x, BCOO | BCSR):
        return x
    column: Function = lambda values: values[:, None]
    return _on_values(x, column) if isinstance(x, RowSparse) else column(x)
