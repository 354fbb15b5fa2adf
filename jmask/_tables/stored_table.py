"""Tables that are kept otherwise than as one array (V, *row), and are used as if they were.

    table[ids], jmask.embedding_lookup(table, ids), jmask.embedding_bag(table, ids, ...)
    jmask.value_and_grad(loss)(table)        the gradient is a RowSparse of shape (V, *row)
    tx.init(table)                           state that is kept in the same way
    jmask.apply_gradients, jmask.apply_updates

A storage says how rows are read and written; lookups, gradients and optimizers know no more
of it than the methods of `StoredTable`.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Self, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmask._base.array_types import added, is_complex, is_narrow, joint_dtype, trailing, wide
from jmask._base.row_ids import Order, hide, id_dtype
from jmask._base.shardings import spec_of
from jmask._base.shards import Shards
from jmask._base.types import (
    DType,
    Gradient,
    HostArray,
    Ids,
    JvpArgs,
    Numbers,
    PyTree,
    Scalar,
    Static,
    Table,
    TensorLike,
)
from jmask._kernels.gather import Gather
from jmask._kernels.rows import add_rows, gather_unique_rows, is_routed, set_rows
from jmask._kernels.sharded_rows import routed
from jmask._kernels.stochastic_rounding import stochastic_round
from jmask._kernels.update_rows import add_to_rows
from jmask._tensors.masked_tensor import is_tensor
from jmask._tensors.methods import is_comparable, library
from jmask._tensors.row_sparse import RowSparse, is_row_sparse


class StoredTable(abc.ABC):
    """A table of shape (V, *row) that is kept in some other form: a pytree of its arrays.

    A subclass names its attributes: those with arrays in `_ARRAYS`, the others in `_STATIC`;
    `_NAMES`, if the arrays have other names in key paths.

    Attributes:
        shape: (V, *row).
        placeholder: a `Placeholder` in a gradient program, or None; see `looked_up`.
    """

    __slots__ = ("placeholder", "shape")

    _ARRAYS: tuple[str, ...]
    _NAMES: tuple[str, ...] = ()
    _STATIC: tuple[str, ...]

    shape: tuple[int, ...]
    placeholder: "Placeholder | None"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[object, PyTree]], Static]:
        names = map(jax.tree_util.GetAttrKey, self._NAMES or self._ARRAYS)
        arrays = (getattr(self, x) for x in self._ARRAYS)
        return list(zip(names, arrays, strict=True)), self._static()

    @classmethod
    def tree_unflatten(cls, static: Static, children: Sequence[PyTree]) -> Self:
        node = object.__new__(cls)
        for name, x in zip((*cls._ARRAYS, *cls._STATIC), (*children, *static), strict=True):
            setattr(node, name, x)
        return node

    def tree_flatten(self) -> tuple[list[PyTree], Static]:
        return [getattr(self, x) for x in self._ARRAYS], self._static()

    def _static(self) -> Static:
        return tuple(getattr(self, x) for x in self._STATIC)

    def _with(self, **parts: PyTree) -> Self:
        """Return the same table with other attributes."""
        node = self.__copy__()
        for name, x in parts.items():
            setattr(node, name, x)
        return node

    def __copy__(self) -> Self:
        return self.tree_unflatten(self._static(), [getattr(self, x) for x in self._ARRAYS])

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return jax.tree.map(jnp.copy, self)

    @property
    @abc.abstractmethod
    def dtype(self) -> DType:
        """The dtype of the entries."""

    @abc.abstractmethod
    def is_stack(self) -> bool:
        """Decide whether `jax.vmap` made this: its arrays have a leading axis then."""

    def check_single(self) -> None:
        """Raise ValueError if this is a stack of tables."""
        if self.is_stack():
            raise ValueError(
                f"{self!r} is a stack of tables, as jax.vmap makes them, and not one: use "
                "jax.vmap for the whole of what follows, as in jax.vmap(tx.init)(tables) and "
                "jax.vmap(step)(tables, states), or take one by "
                "jax.tree.map(lambda leaf: leaf[i], tables)."
            )

    @abc.abstractmethod
    def read(self, ids: jax.Array) -> jax.Array:
        """Return rows (n, *row) of canonical ids (n,); what padding reads is undefined."""

    @abc.abstractmethod
    def fitted(self, gradient: Gradient) -> RowSparse:
        """Route a `RowSparse` gradient, equal ids summed, as `rows` and `set_rows` take it."""

    @abc.abstractmethod
    def rows(self, gradient: Gradient) -> jax.Array:
        """Return the rows of a `fitted` gradient: of the shape of its values."""

    @abc.abstractmethod
    def set_rows(self, gradient: Gradient, rows: jax.Array) -> Self:
        """Return the table with other rows where a `fitted` gradient has them."""

    def add_rows(self, gradient: Gradient, rows: jax.Array) -> Self:
        """Return the table plus rows of its dtype where a `fitted` gradient has them."""
        return self.set_rows(gradient, self.rows(gradient) + rows)

    @abc.abstractmethod
    def full(self, row: Sequence[int], value: Scalar, dtype: DTypeLike) -> Table:
        """Return a table kept in the same way, with rows of another shape, all of one value."""

    @abc.abstractmethod
    def todense(self) -> jax.Array:
        """Return the array (V, *row)."""

    def with_placeholder(self, placeholder: "Placeholder | None") -> Self:
        """Return the same table with another placeholder."""
        return self._with(placeholder=placeholder)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of entries: V times the entries of a row, without padding."""
        return math.prod(self.shape)

    @abc.abstractmethod
    def entries(self) -> list[jax.Array]:
        """Return arrays of the entries in any order, and of zeros."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, ids: Numbers) -> jax.Array:
        """Return rows of `ids`, integers of any shape; from the end if negative, as of arrays.

        Ids outside the table give nan, and `jmask.embedding_lookup` takes negative ones for
        such.
        """
        if isinstance(ids, slice | tuple) or ids is None or ids is Ellipsis:
            raise TypeError(
                f"`ids` must be integers, got {ids!r}: a {type(self).__name__} is indexed by "
                "row ids alone, and columns are taken from rows, `table[ids][:, j]`. Make one "
                "table of stacked ones, `stack.reshape(-1, D)`, and look row `i` of table `m` "
                "up as `m * V + i`. For anything else use its array, `table.todense()`."
            )
        return library().embedding_lookup(self, from_the_end(ids, self.shape[0]))

    def __iter__(self) -> NoReturn:
        # Without it Python would look up row after row, for ever: ids past the end give nan.
        raise TypeError(
            f"a {type(self).__name__} is not iterated over, row by row: look up the rows "
            "that are needed, `table[ids]`, or use its array, `table.todense()`."
        )

    @property
    def at(self) -> NoReturn:
        raise AttributeError(
            f"a {type(self).__name__} has no `at`: it is read by `table[ids]` or "
            "`jmask.embedding_lookup(table, ids)`, and written by jmask.apply_gradients."
        )

    @property
    def astype(self) -> NoReturn:
        raise AttributeError(
            f"a {type(self).__name__} has no `astype`: cast rows, `table[ids].astype(dtype)`."
        )

    def __contains__(self, x: object) -> bool:
        """Decide whether an entry equals `x`, as `in` does of arrays; text never does."""
        return is_comparable(x) and bool(jnp.any(self.todense() == x))

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> HostArray:
        if copy is False:
            raise ValueError(f"`copy`=False: a {type(self).__name__} is no array to share.")
        return np.asarray(self.todense(), dtype)

    def __repr__(self) -> str:
        try:
            dtype: object = self.dtype
        except (AttributeError, IndexError):  # a tree of something else than arrays
            dtype = "?"
        return f"{type(self).__name__}({dtype}[{', '.join(map(str, self.shape))}])"


def from_the_end(ids: Numbers, rows: int) -> Ids:
    """Count negative ids from the end; NumPy integers stay NumPy's."""
    numbers: Ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if not jnp.issubdtype(numbers.dtype, jnp.signedinteger):
        return ids
    if isinstance(numbers, np.ndarray):
        numbers = numbers.astype(np.int64)
        return np.where(numbers < 0, numbers + rows, numbers)
    numbers = numbers.astype(joint_dtype(numbers, id_dtype(rows)))
    return jnp.where(numbers < 0, numbers + rows, numbers)


def is_stored_table(x: object) -> TypeGuard[StoredTable]:
    """Decide whether `x` is a `StoredTable`: one leaf of the parameters."""
    return isinstance(x, StoredTable)


def is_tensor_or_table(x: object) -> bool:
    """Decide whether `x` is a sparse or masked tensor or a table: no array, and one leaf."""
    return is_tensor(x) or is_stored_table(x)


def fitted(table: Table, gradient: Gradient) -> RowSparse:
    """Return a `RowSparse` gradient as the table takes it, equal ids summed.

    Where the rows of an array are sharded by its type, each shard has its own rows of it.
    """
    if isinstance(table, jax.Array) and is_row_sparse(gradient):
        shards = Shards.of(table)
        if shards is None or not shards.rows or gradient.leading > 1:
            return gradient.coalesce() if gradient.order == "any" else gradient
        if is_routed(shards, gradient.row_ids(), gradient.order):
            return gradient
        ids, values = routed(table, gradient.row_ids(), gradient.values)
        return gradient.with_leaves(hide(ids), values, order="routed")
    if not is_row_sparse(gradient):
        raise TypeError(
            f"the gradient of a {type(table).__name__} must be a RowSparse, as jmask.grad "
            f"gives it, got {type(gradient).__name__}."
        )
    return table.fitted(gradient)


def has_sharded_rows(x: Table) -> bool:
    """Decide whether the type of an array says that its rows are sharded."""
    shards = Shards.of(x) if isinstance(x, jax.Array) else None
    return shards is not None and bool(shards.rows)


def shape_of(x: TensorLike) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf: array, number, `RowSparse` or table container."""
    if isinstance(x, StoredTable):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    values = x.values if isinstance(x, RowSparse) else x
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(values))


class RowsAt(NamedTuple):
    """The rows of a gradient without equal ids, and access to the same rows of its tables.

    The tables are arrays, or containers of one kind, with the same rows.

    Attributes:
        values: the rows (n, *row).
        read: table -> its rows there.
        write: (table, rows) -> the table with other rows there, in its dtype.
        add: (table, rows) -> the table with rows of its dtype added.
    """

    values: jax.Array
    read: Callable[[Table], jax.Array]
    write: Callable[[Table, jax.Array], Table]
    add: Callable[[Table, jax.Array], Table]

    @classmethod
    def of(cls, table: Table, gradient: RowSparse) -> "RowsAt":
        """Return access to the rows of a gradient, as the table has `fitted` it."""
        if not is_stored_table(table):
            return cls.in_arrays(gradient.row_ids(), gradient.values, gradient.order)
        return cls(
            gradient.values,
            lambda table: table.rows(gradient),
            lambda table, rows: table.set_rows(gradient, rows),
            lambda table, rows: table.add_rows(gradient, rows),
        )

    @classmethod
    def in_arrays(cls, ids: jax.Array, values: jax.Array, order: Order) -> "RowsAt":
        return cls(
            values,
            lambda table: gather_unique_rows(table, ids, order),
            lambda table, rows: set_rows(table, ids, rows, order),
            lambda table, rows: add_rows(table, ids, rows, order) if ids.shape[0] else table,
        )

    def with_step(self, table: Table, step: jax.Array) -> Table:
        """Return the table plus rows, which are rounded once to its dtype."""
        if table.dtype == joint_dtype(table, step):
            return self.add(table, step)
        return self.write(table, added(self.read(table), step))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placeholder:
    """A placeholder for the array (V, *row) of a table in a gradient program.

    Attributes:
        array: (V, *row), which nothing reads but further derivatives.
        order: how many gradient programs this one is inside of, each of which may take a
            further derivative. The outermost array is no more than its shape.
    """

    array: jax.Array
    order: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def above(cls, placeholder: "Placeholder | None", array: jax.Array) -> "Placeholder":
        """Return the placeholder of a gradient program around `placeholder`, or around none."""
        return cls(array, 0 if placeholder is None else placeholder.order + 1)


def looked_up(table: StoredTable, ids: jax.Array) -> jax.Array:
    """Return rows (n, *row) of canonical ids (n,), zeros for padding, differentiable.

    A gradient in the arrays of a table would be as large as the table. In a gradient program
    the table has a placeholder, an array (V, *row) that nothing reads, with the derivative of
    the lookup: its gradient is a sum of rows, as for any table.
    """
    table.check_single()
    exists = trailing(ids < table.shape[0], table.ndim)
    rows = jnp.where(exists, table.read(ids), 0)
    return differentiable(rows, table.placeholder, ids)


def differentiable(
    rows: jax.Array, placeholder: Placeholder | None, ids: jax.Array | None = None
) -> jax.Array:
    """Return rows (n, *row) of a table, or all (V, *row), with the derivative of a lookup."""
    if placeholder is None:
        return rows
    return _with_placeholder(placeholder.order, rows, placeholder.array, ids)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_placeholder(
    order: int, values: jax.Array, placeholder: jax.Array, ids: jax.Array | None
) -> jax.Array:
    return values


@_with_placeholder.defjvp
def _derivative(order: int, primals: JvpArgs, tangents: JvpArgs) -> tuple[jax.Array, jax.Array]:
    values, placeholder, ids = primals
    value_tangent, placeholder_tangent, _ = tangents
    if ids is not None:
        fills = lax.GatherScatterMode.FILL_OR_DROP
        gather = Gather.rows_of(placeholder_tangent.shape, fills, fill_value=0)
        placeholder_tangent = gather.plain(placeholder_tangent, ids[:, None])
    # For the next derivative the values depend on the placeholder too.
    again = _with_placeholder(order - 1, values, placeholder, ids) if order else values
    return again, value_tangent + placeholder_tangent


# --- add to dense -------------------------------------------------------------------------
#
# `dense + rows`: the one sum of a table and rows of it that does not cost O(table).
#
# zeros(4, 1) + RowSparse([2, 2], [[1.], [1.]])      rows 2 gets 2; rows 0, 1, 3 keep their bits


def add_to_dense(dense: Table, rows: RowSparse, key: jax.Array | None = None) -> Table:
    """Return `dense + rows`, touching only the rows stored, as `optax.apply_updates` adds.

    Floating and complex arrays keep their dtype, as in `dense.at[ids].add(...)`: a bfloat16
    table plus float32 updates is added in float32 on the touched rows and rounded once to
    bfloat16. Otherwise the dtypes promote as in JAX.

    With a `key` of `jax.random`, sums are rounded stochastically to a 16-bit dtype.
    """
    stored = is_stored_table(dense)
    dense = dense if stored else jnp.asarray(dense)
    # Rows of 16 bits may be many of one id: what is rounded is their sum, in the table.
    rows = rows if rows.order == "sorted" else rows.widened()
    rows = fitted(dense, rows) if stored else rows
    if dense.shape != rows.shape:
        raise ValueError(
            f"cannot add rows of a tensor of shape {rows.shape} to an array of shape "
            f"{dense.shape}: a RowSparse does not broadcast."
        )
    if rows.leading > 1:
        return add_to_dense(as_one_table(dense, rows), rows.flat(), key).reshape(dense.shape)
    both_inexact = all(jnp.issubdtype(x.dtype, jnp.inexact) for x in (dense, rows))
    dtype = joint_dtype(dense.dtype if stored else dense, rows.values)
    if not both_inexact or is_complex(dense) < is_complex(rows):
        dense = dense.astype(dtype)
    key = key if is_narrow(dense.dtype) else None
    if not stored and dense.dtype == dtype and key is None:
        return add_to_rows(dense, rows.row_ids(), rows.rows(), rows.order)
    rows = rows if stored else rows.coalesce()
    dtype = dtype if key is None else wide(dtype)
    at = RowsAt.of(dense, rows)
    new = at.read(dense).astype(dtype) + at.values.astype(dtype)
    if key is not None:
        new = stochastic_round(new, dense.dtype, key)
    return at.write(dense, new)


def as_one_table(tables: Table, gradient: RowSparse) -> jax.Array:
    """Reshape stacked tables (M, V, *row) to the table (M * V, *row) of their flat gradient."""
    if is_stored_table(tables):
        raise ValueError(
            f"{tables!r} is one table, and {gradient!r} the gradient of stacked ones: look its "
            "rows up by their ids alone."
        )
    if any(spec_of(tables)[1 : gradient.leading]):
        raise ValueError(
            f"stacked tables {jax.typeof(tables)} are sharded by the rows of each: shard them "
            "over dimension 0, or make one table of them, `tables.reshape(-1, D)`, and shard "
            "its rows."
        )
    return jnp.reshape(tables, gradient.flat().shape)
