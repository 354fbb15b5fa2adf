"""`RowSparse`: a tensor that stores some of its rows; all other rows are zero.

    dense = zeros(shape);  dense[indices[i]] += values[i]   for every i

    RowSparse(indices=[2, 0, 2], values=[[1, 1], [5, 5], [3, 3]], shape=(4, 2))
        row 0:  5 5
        row 1:  0 0
        row 2:  4 4        equal indices add
        row 3:  0 0

It is the exact gradient of an embedding lookup: `indices` are the ids looked up, `values` the
cotangents of their rows. The number of stored rows n ("nse", as in `jax.experimental.sparse`)
is static; an index outside [0, shape[0]) is padding and its row is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmask._base.array_types import adds_when_cast, is_narrow, shapes_from, wide
from jmask._base.row_ids import Order, canonical, hide, id_dtype, is_opaque, reveal, widen
from jmask._base.types import DType, Function, Ids, Numbers, PyTree, Shape, TypeIs
from jmask._base.validation import check_flag, checked_array, checked_dtype, checked_integer
from jmask._kernels.coalesce import coalesce_rows
from jmask._kernels.gathered_rows import Rows, cast, gathered
from jmask._kernels.rows import split_rows
from jmask._kernels.update_rows import add_to_rows
from jmask._tensors import checks
from jmask._tensors.flax_state import register_in_flax
from jmask._tensors.methods import RowSparseMethods, library


class Static(NamedTuple):
    """Hold the static data of a node of a pytree; see the arguments of `RowSparse`."""

    shape: Shape
    order: Order
    leading: int
    width: int | None


_INDICES, _VALUES = map(jax.tree_util.GetAttrKey, ("indices", "values"))


@jax.tree_util.register_pytree_with_keys_class
class RowSparse(RowSparseMethods):
    """A tensor of shape (V, *row) given by n of its rows; the other rows are zero.

    Args:
        indices (n,): integers of any dtype, which row each value belongs to. Equal
            indices add; an index outside [0, V) (-1, or V by convention) is padding.
        values (n, *row): the rows.
        shape: (V, *row), static. By default V is the largest index + 1, for which the
            indices must be concrete.
        leading: how many leading dimensions the indices number, in row-major order: 1 of a
            table, 2 of stacked tables (M, V, *row), where an index is m * V + id and
            `x.flat()` has the shape (M * V, *row).
        coalesced: promise that the indices are sorted, unique apart from padding, and
            that padding comes last. Checked for concrete indices; otherwise as
            `unique_indices` in JAX.

    Raises:
        TypeError: if `indices` are not integers, or `values` no numbers.
        ValueError: if the shapes of `indices`, `values` and `shape` do not fit, if `shape`
            needs 64-bit indices and they are disabled, or if `coalesced` does not hold.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.RowSparse([2, 0, 2], jnp.array([[1.], [5.], [3.]]), (4, 1))
        >>> x, x.todense().tolist()
        (RowSparse(float32[4, 1], nse=3), [[5.0], [0.0], [4.0], [0.0]])
    """

    __slots__ = ("index_leaf", "leading", "order", "shape", "values", "width")

    stype = "row_sparse"

    values: jax.Array
    shape: Shape
    order: Order
    leading: int
    width: int | None

    def __init__(
        self,
        indices: Numbers,
        values: Numbers,
        shape: Sequence[int] | None = None,
        *,
        coalesced: bool = False,
        leading: int = 1,
    ):
        indices = checks.checked_indices("indices", indices)
        values = checked_array("values", values)
        if shape is None:
            if isinstance(indices, jax.core.Tracer):
                raise ValueError(
                    "`shape` must be given while `indices` are traced: the number of rows is "
                    "static."
                )
            last = int(indices.max()) if indices.size else -1
            shape = (max(last + 1, 0), *values.shape[1:])
        shape = checks.checked_shape(shape)
        check_flag("coalesced", coalesced)
        leading = checked_integer("leading", leading)
        if not 1 <= leading <= len(shape):
            raise ValueError(
                f"`leading` must be from 1 to {len(shape)} for {shape}, got {leading}."
            )
        self.shape, self.leading, self.width = shape, leading, None
        self.order = "sorted" if coalesced else "any"
        checks.check_values(indices, values, (self.row_count, *self.row))
        if coalesced and not isinstance(indices, jax.core.Tracer):
            checks.check_coalesced(np.asarray(indices), self.row_count)
        register_in_flax(RowSparse)
        self.index_leaf, self.values = hide(widen(indices, self.row_count)), values

    # --- pytree: leaves are the opaque ids and the values -------------------------------

    def tree_flatten_with_keys(self) -> tuple[Sequence[tuple[object, PyTree]], Static]:
        return ((_INDICES, self.index_leaf), (_VALUES, self.values)), self._static

    def tree_flatten(self) -> tuple[Sequence[PyTree], Static]:
        return (self.index_leaf, self.values), self._static

    @classmethod
    def tree_unflatten(cls, static: Static, leaves: Sequence[PyTree]) -> Self:
        register_in_flax(cls)
        node = object.__new__(cls)
        node.shape, node.order, node.leading, node.width = static
        leaf, node.values = leaves
        # JAX also builds nodes of axes, masks and objects. Opaque dtypes are not NumPy's.
        if isinstance(getattr(leaf, "dtype", None), np.dtype):
            leaf = checks.leaf_from_words(leaf, node.values, len(node.row))
        node.index_leaf = leaf
        return node

    @property
    def _static(self) -> Static:
        return Static(self.shape, self.order, self.leading, self.width)

    def with_leaves(
        self, index_leaf: jax.Array, values: jax.Array, **changes: Shape | Order | int | None
    ) -> RowSparse:
        """Replace leaves, unchecked, and `shape`, `order`, `leading`, `width` where given."""
        static = self._static._replace(**changes)  # type: ignore[arg-type]
        return RowSparse.tree_unflatten(static, (index_leaf, values))

    @classmethod
    def from_rows(
        cls,
        ids: Ids,
        values: jax.Array,
        shape: Shape,
        *,
        coalesced: bool,
        leading: int = 1,
        width: int | None = None,
    ) -> RowSparse:
        """Make a tensor of ids (n,) and values (n, *row) that are known to fit, unchecked."""
        static = Static(shape, "sorted" if coalesced else "any", leading, width)
        node = cls.tree_unflatten(static, (None, values))
        node.index_leaf = hide(widen(ids, node.row_count))
        return node

    # --- description --------------------------------------------------------------------

    @property
    def indices(self) -> jax.Array:
        """The row index of each value (n,), int32 (int64 for more than 2**31-1 rows)."""
        self._check_ids()
        return reveal(self.index_leaf) if is_opaque(self.index_leaf) else self.index_leaf

    @property
    def dtype(self) -> DType:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def row_count(self) -> int:
        """The number of rows, stored or not: V, or M * V of stacked tables."""
        count = math.prod(self.shape[: self.leading])
        return math.prod(self.shape) // self.width if self.width else count

    @property
    def row(self) -> Shape:
        """The shape of a row."""
        return (self.width,) if self.width else self.shape[self.leading :]

    @property
    def nse(self) -> int:
        """The number of stored rows, padding included: static."""
        self._check_ids()
        return self.index_leaf.shape[-1]

    def _check_ids(self) -> None:
        if self.index_leaf is None:
            raise ValueError(
                "this RowSparse has no row ids: what keeps floating arrays alone, as "
                "`eqx.filter(grads, eqx.is_inexact_array)` or `eqx.partition`, has dropped "
                "them. Filter the model, and give its gradient as it is."
            )

    def __repr__(self) -> str:
        try:
            batch = self.index_leaf.shape[:-1]
            described = f"{self.dtype}[{', '.join(map(str, self.shape))}], nse={self.nse}"
        except (AttributeError, IndexError):  # transformations put anything into leaves
            return f"RowSparse({self.index_leaf!r}, {self.values!r}, shape={self.shape})"
        described += f", batch={batch}" if batch else ""
        name = "width" if self.width else "leading"
        return f"RowSparse({described}{f', {name}={getattr(self, name)}' * (self.leading > 1)})"

    def __reduce__(self) -> tuple[Function, tuple[object, ...]]:
        return _unpickle, (self.indices, self.values, *self._static)

    # --- conversion ---------------------------------------------------------------------

    @classmethod
    def zeros(
        cls, shape: Sequence[int], dtype: DTypeLike = jnp.float32, nse: int = 0
    ) -> RowSparse:
        """Return the zero tensor, with capacity for `nse` rows, which are padding.

        Example:
            >>> import jax.numpy as jnp, jmask
            >>> jmask.RowSparse.zeros((4, 2))
            RowSparse(float32[4, 2], nse=0)
        """
        shape, nse = checks.checked_shape(shape), checks.checked_capacity(nse)
        ids = jnp.full((nse,), shape[0], id_dtype(shape[0]))
        return cls.from_rows(ids, jnp.zeros((nse, *shape[1:]), dtype), shape, coalesced=True)

    @classmethod
    def fromdense(cls, x: Numbers, nse: int | None = None) -> RowSparse:
        """Return the rows of `x` that are not all zero (a nan is not zero), in order.

        Args:
            x (V, *row): a dense array.
            nse: the capacity, static. By default the exact number of non-zero rows, which
                cannot be known while `x` is traced.

        Raises:
            ValueError: if `nse` is needed and missing, negative, or too small. If it may be
                for a traced `x`, the values are nan then (integers: `nse` must be V).

        Example:
            >>> import jax.numpy as jnp, jmask
            >>> jmask.RowSparse.fromdense(jnp.array([[0., 0.], [1., 2.]]))
            RowSparse(float32[2, 2], nse=1)
        """
        return library().cast_storage(checked_array("x", x), "row_sparse", nse=nse)

    def todense(self) -> jax.Array:
        """Return the dense array (V, *row): zeros, with the stored rows added."""
        if self.dtype == jnp.dtype(bool):  # booleans add as `or`, which no scatter does
            return self.with_values(self.values.astype(jnp.int32)).todense() != 0
        flat = self.flat()
        rows = flat.coalesce() if is_narrow(self.dtype) else flat  # each sum is rounded once
        zeros = jnp.zeros(flat.shape, self.dtype)
        dense = add_to_rows(zeros, rows.row_ids(), rows.rows(), rows.order)
        return dense.reshape(self.shape)

    def flat(self) -> RowSparse:
        """Return the gradient of stacked or packed tables in the shape (rows, *row) of one.

        Example:
            >>> import jax.numpy as jnp, jmask
            >>> tables = jnp.ones((2, 5, 3))
            >>> jmask.grad(lambda t: jnp.sum(t[1, jnp.array([0, 4])]))(tables).flat()
            RowSparse(float32[10, 3], nse=2)
        """
        if self.leading == 1:
            return self
        static = self._static._replace(shape=(self.row_count, *self.row), leading=1, width=None)
        return RowSparse.tree_unflatten(static, (self.index_leaf, self.values))

    def stacked_as(self, like: RowSparse) -> RowSparse:
        """Undo `flat`: return the tensor with the shape of `like`."""
        return like.with_leaves(self.index_leaf, self.values, order=self.order)

    def with_rows_of(self, like: RowSparse) -> RowSparse:
        """Split each row into the smaller ones of `like`, of the same shape."""
        if self.row == like.row:
            return self
        each = like.row_count // self.row_count if self.row_count else 1
        ids = self.flat().row_ids()
        ids, values = split_rows(ids, self.values, each, like.row_count, like.row)
        return like.with_leaves(hide(ids), values, order=self.order)

    @property
    def coalesced(self) -> bool:
        """True if the indices are sorted and unique, with padding last."""
        return self.order == "sorted"

    def coalesce(self, nse: int | None = None) -> RowSparse:
        """Return the same tensor with sorted unique indices, duplicates summed, padding last.

        Args:
            nse: the capacity of the result, static; min(n, V), which suffices, by default.

        Raises:
            ValueError: if `nse` is negative or too small. If it may be for traced indices,
                floating values are nan then, and integers refused.

        Example:
            >>> import jax.numpy as jnp, jmask
            >>> x = jmask.RowSparse([2, 0, 2], jnp.array([1., 5, 3]), (4,)).coalesce()
            >>> x.indices, x.values
            (Array([0, 2, 4], dtype=int32), Array([5., 4., 0.], dtype=float32))
        """
        self.check_single()
        if self.coalesced and nse is None:
            return self
        rows = self.row_count
        ids, values = coalesce_rows(self.flat().row_ids(), self.values, rows)
        if nse is not None:
            extra = max(checks.checked_capacity(nse) - ids.shape[0], 0)
            needed, most = jnp.sum(ids < rows), min(rows, self.nse)
            ids = jnp.pad(ids, (0, extra), constant_values=rows)[:nse]
            values = jnp.pad(values, [(0, extra)] + [(0, 0)] * len(self.row))[:nse]
            values = checks.fit_or_poison(values, needed, nse, most)
        return self.with_leaves(hide(ids), values, order="sorted")

    def retain(self, rows: Numbers) -> RowSparse:
        """Keep the stored rows whose index is among `rows` (m,); the others become zero.

        Example:
            >>> import jax.numpy as jnp, jmask
            >>> x = jmask.RowSparse([0, 2, 3], jnp.array([1., 3., 5.]), (5,))
            >>> x.retain([0, 1]).todense()
            Array([1., 0., 0., 0., 0.], dtype=float32)
        """
        ids = self.row_ids()
        kept = jnp.isin(ids, widen(checks.checked_indices("rows", rows), self.shape[0]))
        ids = jnp.where(kept, ids, self.shape[0])
        return self.with_leaves(hide(ids), self.values, order="any")

    def astype(self, dtype: DTypeLike) -> RowSparse:
        """Cast to `dtype`; rows with equal indices are summed first if need be."""
        dtype = checked_dtype("dtype", dtype)
        summed = self if adds_when_cast(self.dtype, jnp.dtype(dtype)) else self.coalesce()
        return summed.with_values(summed.values.astype(dtype))

    def widened(self) -> RowSparse:
        """Return the tensor in float32 if it is of 16 bits, to sum its rows exactly."""
        dtype = wide(self.dtype)
        return self if dtype == self.dtype else self.with_values(cast(self.values, dtype))

    def validate(self) -> None:
        """Check the stored indices, which needs them concrete (outside jit).

        Raises:
            ValueError: if an index is neither a row nor the padding V, if the values have not
                one row for each, or if the tensor claims to be coalesced and is not.
        """
        self.check_single()
        ids, rows = np.asarray(self.indices), self.row_count
        checks.check_values(ids, self.values, (rows, *self.row))
        bad = np.flatnonzero((ids < 0) | (ids > rows))
        if bad.size:
            raise ValueError(
                f"`indices[{bad[0]}]` is {ids[bad[0]]}, which is neither one of {rows} rows "
                f"nor the padding {rows} ({bad.size} such in all; they are dropped)."
            )
        if self.coalesced:
            checks.check_coalesced(ids, rows)

    def check_single(self) -> None:
        """Raise ValueError if this is a stack of tensors, as `jax.vmap` and loops make them."""
        self._check_ids()
        if jnp.ndim(self.index_leaf) > 1:
            raise ValueError(
                f"{self!r} is a stack of tensors, as jax.vmap and jax.lax.map return them, and "
                "not one: use jax.vmap for what follows (jmask.tree.norm, jmask.tree.scale for "
                "gradients of single examples), add them up by jmask.tree.merge(x), or take "
                "one by jax.tree.map(lambda leaf: leaf[i], x)."
            )

    def row_ids(self) -> jax.Array:
        """Return the indices in canonical form (n,): every one that is no row is V."""
        self.check_single()
        if self.leading > 1:
            kind = "packed" if self.width else "stacked"
            raise ValueError(
                f"{self!r} is the gradient of {kind} tables, whose rows are no positions in "
                f"dimension 0: use x.flat(), of shape {(self.row_count, *self.row)}, or "
                "x.todense()."
            )
        if self.index_leaf.dtype == jax.dtypes.float0:
            raise TypeError(
                "this RowSparse is a tangent, as jax.jvp returns it, and has no indices: they "
                "are those of the tensor x that it is a tangent of. Use "
                "x.with_values(tangent.values)."
            )
        return canonical(self.indices, self.shape[0])

    def with_values(self, values: jax.Array) -> RowSparse:
        """Return the tensor with the same indices and other values (n, *row)."""
        values = checks.checked_replacement(values, self.values)
        return self.with_leaves(self.index_leaf, values)

    def rows(self) -> Rows:
        """Return the values as `Rows`, which kernels may read block by block."""
        return gathered(self.values)


def is_row_sparse(x: object) -> TypeIs[RowSparse]:
    """Decide whether `x` is a `RowSparse`: the `is_leaf` of every tree that may hold one."""
    return isinstance(x, RowSparse)


def _unpickle(indices: PyTree, values: PyTree, *static: PyTree) -> RowSparse:
    """Return the tensor of arrays, or of their shapes."""
    x = RowSparse.tree_unflatten(Static(*(*static, None)[:4]), (None, None))  # older: no width
    leaves = lambda ids, values: (hide(widen(ids, x.row_count)), jnp.asarray(values))
    make = shapes_from if isinstance(values, jax.ShapeDtypeStruct) else lambda f, *x: f(*x)
    return x.with_leaves(*make(leaves, indices, values))
