"""`RowSparse`: a tensor that stores some of its rows; all other rows are zero.

    dense = zeros(shape);  dense[indices[i]] += values[i]   for every i

    RowSparse(indices=[2, 0, 2], values=[[1, 1], [5, 5], [3, 3]], shape=(4, 2))
        row 0:  5 5
        row 1:  0 0
        row 2:  4 4        equal indices add
        row 3:  0 0

It is the exact gradient of an embedding lookup: `indices` are the ids looked up and
`values` the cotangents of the rows. The number of stored rows n ("nse", number of stored
elements, as in `jax.experimental.sparse`) is static; an index outside [0, shape[0]) is
padding and its row is dropped. `coalesced` is a static promise: indices sorted, unique
apart from padding, padding last.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._coalesce import coalesce_rows
from jmask._row_ids import canonical, hide, is_opaque, reveal, widen
from jmask._row_sparse_checks import (
    checked_capacity,
    checked_indices,
    checked_shape,
    fit_or_poison,
    refuse_plain_ids,
)
from jmask._rows import add_rows, gather_rows, set_rows


@jax.tree_util.register_pytree_with_keys_class
class RowSparse:
    """A tensor of shape (V, *row) given by n of its rows; the other rows are zero.

    Args:
        indices (n,): integers of any dtype, which row each value belongs to. Equal
            indices add; an index outside [0, V) (-1, or V by convention) is padding.
        values (n, *row): the rows.
        shape: (V, *row), static.
        coalesced: promise that the indices are sorted, unique apart from padding, and
            that padding comes last. Not checked here; `validate()` checks it.

    Raises:
        TypeError: if `indices` are not integers.
        ValueError: if the shapes of `indices`, `values` and `shape` do not fit, or if
            `shape` needs 64-bit indices and they are disabled.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.RowSparse([2, 0, 2], jnp.array([[1., 1], [5, 5], [3, 3]]), (4, 2))
        >>> x
        RowSparse(float32[4, 2], nse=3)
        >>> x.todense()
        Array([[5., 5.],
               [0., 0.],
               [4., 4.],
               [0., 0.]], dtype=float32)
    """

    __slots__ = ("coalesced", "index_leaf", "shape", "values")

    # NumPy arrays must leave `array + row_sparse` to `__radd__`.
    __array_ufunc__ = None

    stype = "row_sparse"

    values: Any
    shape: tuple[int, ...]
    coalesced: bool

    def __init__(
        self,
        indices: Any,
        values: Any,
        shape: Sequence[int],
        *,
        coalesced: bool = False,
    ):
        shape = checked_shape(shape)
        indices, values = checked_indices(indices), jnp.asarray(values)
        if values.ndim == 0 or values.shape[0] != indices.shape[0]:
            raise ValueError(
                f"`values` must have one row for each of the {indices.shape[0]} "
                f"`indices`, got values of shape {values.shape}."
            )
        if values.shape[1:] != shape[1:]:
            raise ValueError(
                f"`values` of shape {values.shape} do not fit `shape` {shape}: expected "
                f"rows of shape {shape[1:]}, got {values.shape[1:]}."
            )
        self.index_leaf = hide(widen(indices, shape[0]))
        self.values = values
        self.shape = shape
        self.coalesced = bool(coalesced)

    # --- pytree: leaves are the opaque ids and the values -------------------------------

    def tree_flatten_with_keys(self):
        keys = (
            jax.tree_util.GetAttrKey("indices"),
            jax.tree_util.GetAttrKey("values"),
        )
        leaves = (self.index_leaf, self.values)
        return tuple(zip(keys, leaves, strict=True)), (self.shape, self.coalesced)

    def tree_flatten(self):
        return (self.index_leaf, self.values), (self.shape, self.coalesced)

    @classmethod
    def tree_unflatten(cls, static, leaves):
        # JAX also builds nodes of shapes, axes and masks, so only a leaf that is surely a
        # number in the place of ids is refused.
        leaf, values = leaves
        if isinstance(leaf, jax.Array | np.ndarray) and not is_opaque(leaf):
            leaf = refuse_plain_ids(leaf)
        node = object.__new__(cls)
        node.index_leaf, node.values = leaf, values
        node.shape, node.coalesced = static
        return node

    # --- description --------------------------------------------------------------------

    @property
    def indices(self) -> Any:
        """The row index of each value (n,), int32 (int64 for more than 2**31-1 rows)."""
        return reveal(self.index_leaf) if is_opaque(self.index_leaf) else self.index_leaf

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions of the tensor."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of entries of the tensor, stored or not."""
        return math.prod(self.shape)

    @property
    def nse(self) -> int:
        """The number of stored rows, padding included: static."""
        return self.index_leaf.shape[-1]

    def __repr__(self) -> str:
        row = ", ".join(map(str, self.shape))
        try:
            batch = self.index_leaf.shape[:-1]
            of = f"{self.dtype}[{row}], nse={self.nse}"
        except (AttributeError, IndexError):
            return f"RowSparse({self.index_leaf!r}, {self.values!r}, shape={self.shape})"
        return f"RowSparse({of}{f', batch={batch}' if batch else ''})"

    def __reduce__(self):
        indices, values = np.asarray(self.indices), np.asarray(self.values)
        return _unpickle, (indices, values, self.shape, self.coalesced)

    # --- conversion ---------------------------------------------------------------------

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: Any = jnp.float32) -> "RowSparse":
        """The zero tensor, with no stored rows.

        Example:
            >>> import jax.numpy as jnp, jmask
            >>> jmask.RowSparse.zeros((4, 2))
            RowSparse(float32[4, 2], nse=0)
        """
        shape = checked_shape(shape)
        values = jnp.zeros((0, *shape[1:]), dtype)
        return cls(jnp.zeros((0,), jnp.int32), values, shape, coalesced=True)

    @classmethod
    def fromdense(cls, x: Any, nse: int | None = None) -> "RowSparse":
        """The rows of `x` that are not all zero (a nan is not zero), in order.

        Args:
            x (V, *row): a dense array.
            nse: the capacity, static. By default the exact number of non-zero rows, which
                cannot be known while `x` is traced.

        Raises:
            ValueError: if `nse` is needed and missing, negative, or too small for a
                concrete `x`. For a traced `x` with too many non-zero rows the values are
                nan (integer values: `nse` must be V).

        Example:
            >>> import jax.numpy as jnp, jmask
            >>> jmask.RowSparse.fromdense(jnp.array([[0., 0.], [1., 2.]]))
            RowSparse(float32[2, 2], nse=1)
        """
        x = jnp.asarray(x)
        shape = checked_shape(x.shape)
        touched = jnp.any(x != 0, axis=tuple(range(1, x.ndim)))
        if nse is None:
            if isinstance(x, jax.core.Tracer):
                raise ValueError(
                    "RowSparse.fromdense: `nse`, the number of rows to store, must be "
                    "given for a traced `x` (under jit, vmap or grad)."
                )
            nse = int(touched.sum())
        nse = checked_capacity(nse)
        needed = touched.sum()
        ids = jnp.flatnonzero(touched, size=nse, fill_value=shape[0])
        values = gather_rows(x, ids.astype(widen(ids, shape[0]).dtype))
        mask = (ids < shape[0]).reshape((-1,) + (1,) * (x.ndim - 1))
        values = fit_or_poison(jnp.where(mask, values, 0), needed, nse, shape[0])
        return cls(ids, values, shape, coalesced=True)

    def todense(self) -> jax.Array:
        """The dense array (V, *row): zeros, with the stored rows added."""
        if self.dtype == jnp.dtype(bool):  # booleans add as `or`, which no scatter does
            return self.astype(jnp.int32).todense() != 0
        zeros = jnp.zeros(self.shape, self.dtype)
        return add_rows(zeros, self.row_ids(), self.values, coalesced=self.coalesced)

    def coalesce(self, nse: int | None = None) -> "RowSparse":
        """The same tensor with sorted unique indices, duplicates summed, padding last.

        Args:
            nse: the capacity of the result, static; min(n, V) by default, which always
                suffices.

        Raises:
            ValueError: if `nse` is negative or, for concrete indices, too small. For
                traced indices that do not fit, floating values are nan and integer
                values are refused: rows are never dropped silently.

        Example:
            >>> import jax.numpy as jnp, jmask
            >>> x = jmask.RowSparse([2, 0, 2], jnp.array([1., 5, 3]), (4,)).coalesce()
            >>> x.indices, x.values
            (Array([0, 2, 4], dtype=int32), Array([5., 4., 0.], dtype=float32))
        """
        if self.coalesced and nse is None:
            return self
        rows = self.shape[0]
        ids, values = coalesce_rows(self.row_ids(), self.values, rows)
        if nse is not None:
            nse = checked_capacity(nse)
            needed = jnp.sum(ids < rows)
            extra = max(nse - ids.shape[0], 0)
            ids = jnp.pad(ids, (0, extra), constant_values=rows)[:nse]
            widths = [(0, extra)] + [(0, 0)] * (values.ndim - 1)
            values = jnp.pad(values, widths)[:nse]
            values = fit_or_poison(values, needed, nse, min(rows, self.nse))
        return RowSparse(ids, values, self.shape, coalesced=True)

    def retain(self, rows: Any) -> "RowSparse":
        """Only the stored rows whose index is among `rows` (m,); the others become zero.

        Example:
            >>> import jax.numpy as jnp, jmask
            >>> x = jmask.RowSparse([0, 2, 3], jnp.array([1., 3., 5.]), (5,))
            >>> x.retain([0, 1]).todense()
            Array([1., 0., 0., 0., 0.], dtype=float32)
        """
        ids = self.row_ids()
        kept = jnp.isin(ids, widen(checked_indices(rows, "rows"), self.shape[0]))
        ids = jnp.where(kept, ids, self.shape[0])
        return RowSparse(ids, self.values, self.shape)

    def astype(self, dtype: Any) -> "RowSparse":
        """The tensor with its values cast to `dtype`."""
        return self.with_values(self.values.astype(dtype))

    def validate(self) -> None:
        """Check the stored indices, which needs them concrete (outside jit).

        Raises:
            ValueError: if an index is neither a row nor the padding V, or if the tensor
                claims to be coalesced and is not.
        """
        if isinstance(self.index_leaf, jax.core.Tracer):
            raise ValueError(
                "RowSparse.validate() reads the indices and cannot run while they are "
                "traced: call it outside jit."
            )
        ids, rows = np.asarray(self.indices), self.shape[0]
        bad = np.flatnonzero((ids < 0) | (ids > rows))
        if bad.size:
            raise ValueError(
                f"`indices[{bad[0]}]` is {ids[bad[0]]}, which is neither a row of a "
                f"tensor of shape {self.shape} nor the padding {rows} ({bad.size} such "
                "in all; they are dropped)."
            )
        valid = ids[ids < rows]
        in_order = (np.diff(valid) > 0).all() and (ids[: valid.size] < rows).all()
        if self.coalesced and not in_order:
            raise ValueError(
                "`coalesced` was promised, but `indices` are not sorted and unique with "
                "padding last: leave the promise out and call coalesce()."
            )

    def row_ids(self) -> jax.Array:
        """The indices in canonical form (n,): every one that is no row is V."""
        return canonical(self.indices, self.shape[0])

    def with_values(self, values: jax.Array) -> "RowSparse":
        """The tensor with the same indices and other values (n, *row)."""
        return RowSparse.tree_unflatten((self.shape, self.coalesced), (self.index_leaf, values))

    # --- arithmetic that is exact on stored rows ----------------------------------------

    def __add__(self, other: Any) -> Any:
        if isinstance(other, RowSparse):
            _check_same_shape(self, other)
            dtype = jnp.result_type(self.values, other.values)
            ids = jnp.concatenate([self.row_ids(), other.row_ids()])
            values = jnp.concatenate([self.values.astype(dtype), other.values.astype(dtype)])
            return RowSparse(ids, values, self.shape)
        if _is_scalar(other):
            if isinstance(other, int | float) and other == 0:  # sum() starts from 0
                return self
            raise TypeError(
                "adding a scalar to a RowSparse changes every row and makes it dense: "
                "write x.todense() + scalar if that is meant."
            )
        return add_to_dense(other, self)

    __radd__ = __add__

    def __neg__(self) -> "RowSparse":
        return self.with_values(-self.values)

    def __sub__(self, other: Any) -> Any:
        return self + operator.neg(other)

    def __rsub__(self, other: Any) -> Any:
        return (-self) + other

    def __mul__(self, scalar: Any) -> "RowSparse":
        if not _is_scalar(scalar):
            return NotImplemented
        return self.with_values(self.values * scalar)

    __rmul__ = __mul__

    def __truediv__(self, scalar: Any) -> "RowSparse":
        if not _is_scalar(scalar):
            return NotImplemented
        return self.with_values(self.values / scalar)


def add_to_dense(dense: Any, rows: RowSparse) -> jax.Array:
    """`dense + rows`, touching only the rows stored: what `optax.apply_updates` needs.

    Floating arrays keep their dtype, as in `dense.at[ids].add(...)`: a bfloat16 table plus
    float32 updates is added in float32 on the touched rows and rounded once to bfloat16.
    Otherwise the dtypes promote as in JAX.

    Raises:
        ValueError: if the shapes differ.
    """
    dense = jnp.asarray(dense)
    _check_same_shape(dense, rows)
    both_float = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (dense, rows))
    dtype = jnp.result_type(dense, rows.values)
    if not both_float:
        dense = dense.astype(dtype)
    if dense.dtype == dtype:
        return add_rows(dense, rows.row_ids(), rows.values, coalesced=rows.coalesced)
    rows = rows.coalesce()
    ids = rows.row_ids()
    old = gather_rows(dense, ids, coalesced=True).astype(dtype)
    return set_rows(dense, ids, old + rows.values.astype(dtype), coalesced=True)


def is_row_sparse(x: Any) -> bool:
    """Whether `x` is a `RowSparse`: the `is_leaf` of every tree that may hold one."""
    return isinstance(x, RowSparse)


def _unpickle(indices, values, shape, coalesced):
    return RowSparse(indices, values, shape, coalesced=coalesced)


def _is_scalar(x: Any) -> bool:
    return isinstance(x, int | float | complex) or getattr(x, "shape", None) == ()


def _check_same_shape(x: Any, y: Any) -> None:
    if tuple(x.shape) != tuple(y.shape):
        raise ValueError(
            f"cannot combine tensors of different shapes {tuple(x.shape)} and "
            f"{tuple(y.shape)}: a RowSparse does not broadcast."
        )
