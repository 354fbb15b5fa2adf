"""The operands of a product of matrices, each with its transpose.

| operand   | made from          | holds                                            |
|-----------|--------------------|--------------------------------------------------|
| `Dense`   | array              | the array, and whether it is read transposed     |
| `StoredRows`    | RowSparse          | the rows stored and their ids                    |
| `StoredColumns` | its transpose      | the same, as columns                             |
| `Coordinates` | BCOO, BCSR         | row, column and value of each stored entry       |

What a product needs of its right operand are some of its rows. Those of padding are zero:

    rows_at([[1, 2], [3, 4]], ids [1, 0, V])  ->  [[3, 4], [1, 2], [0, 0]]

Padding has the value 0, whatever was stored there. As it meets a row of zeros, no inf or nan
of the other operand reaches a sum or a derivative through it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.array_types import trailing
from jmask._base.row_ids import canonical
from jmask._kernels.rows import add_rows
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import row_of_each


@dataclasses.dataclass(frozen=True)
class Dense:
    """An array (m, n). It is transposed where it is used, so that rows of it are looked up."""

    array: jax.Array
    transposed: bool = False

    @property
    def T(self) -> "Dense":  # noqa: N802
        return Dense(self.array, not self.transposed)

    @property
    def matrix(self) -> jax.Array:
        return self.array.T if self.transposed else self.array

    def rows_at(self, ids: jax.Array, dtype: Any) -> jax.Array:
        return _rows_or_zeros(self.matrix, ids).astype(dtype)


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """`values` (n, d) in the rows `ids` (n,) of a matrix of `height` rows; padding is zero."""

    ids: jax.Array
    values: jax.Array
    height: int
    coalesced: bool

    @property
    def T(self) -> "StoredColumns":  # noqa: N802
        return StoredColumns(self)

    def coalesced_as(self, dtype: Any) -> RowSparse:
        """The rows with equal ids summed in `dtype`, and zeros at padding."""
        shape = (self.height, *self.values.shape[1:])
        values = self.values.astype(dtype)
        if not self.coalesced:
            return RowSparse(self.ids, values, shape).coalesce()
        values = zeros_at_padding(self.ids, values, self.height)
        return RowSparse(self.ids, values, shape, coalesced=True)

    def rows_at(self, ids: jax.Array, dtype: Any) -> jax.Array:
        stored = self.coalesced_as(dtype)
        if not stored.nse:
            return jnp.zeros((*ids.shape, *self.values.shape[1:]), dtype)
        place = jnp.minimum(jnp.searchsorted(stored.indices, ids), stored.nse - 1)
        found = stored.indices[place] == ids  # or both are padding, with zeros stored
        return _rows_or_zeros(stored.values, jnp.where(found, place, stored.nse))


@dataclasses.dataclass(frozen=True)
class StoredColumns:
    """The transpose of `rows`."""

    rows: StoredRows

    @property
    def T(self) -> StoredRows:  # noqa: N802
        return self.rows


@dataclasses.dataclass(frozen=True)
class Coordinates:
    """`values` (n,) at `rows` (n,) and `columns` (n,) of a matrix; padding is zero."""

    rows: jax.Array
    columns: jax.Array
    values: jax.Array
    shape: tuple[int, int]

    @property
    def T(self) -> "Coordinates":  # noqa: N802
        return Coordinates(self.columns, self.rows, self.values, self.shape[::-1])

    def to_dense(self, dtype: Any) -> jax.Array:
        zeros, values = jnp.zeros(self.shape, dtype), self.values.astype(dtype)
        return zeros.at[self.rows, self.columns].add(values, mode="drop")


Operand = Dense | StoredRows | StoredColumns | Coordinates


def operand(x: Any, transposed: bool) -> Operand:
    """The operand for an array, RowSparse, BCOO or BCSR of two dimensions."""
    if isinstance(x, RowSparse):
        made: Operand = _rows(x)
    elif isinstance(x, BCOO | BCSR):
        made = entries(x)
    else:
        made = Dense(x)
    return made.T if transposed else made


def _rows(x: RowSparse) -> StoredRows:
    ids = x.row_ids()
    return StoredRows(ids, zeros_at_padding(ids, x.values, x.shape[0]), x.shape[0], x.coalesced)


def entries(x: BCOO | BCSR) -> Coordinates:
    """The stored entries of a matrix, with padding at (m, k)."""
    height, width = x.shape
    if isinstance(x, BCOO):
        rows, columns = x.indices[:, 0], x.indices[:, 1]
    else:
        rows, columns = row_of_each(x.indptr, x.indices.shape[0]), x.indices
    rows, columns = canonical(rows, height), canonical(columns, width)
    inside = (rows < height) & (columns < width)
    rows, columns = jnp.where(inside, rows, height), jnp.where(inside, columns, width)
    return Coordinates(rows, columns, zeros_at_padding(rows, x.data, height), (height, width))


def _rows_or_zeros(table: jax.Array, ids: jax.Array) -> jax.Array:
    """StoredRows `table[ids]` (n, d), zeros for padding: unlike in `gather_rows`.

    Its transpose drops padding, so that the gradient of a table does not touch a row that
    was not looked up.
    """
    if 0 in table.shape:
        return jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype)
    return table.at[ids].get(mode="fill", fill_value=0)


def sum_of_terms(x: Coordinates, found: jax.Array) -> jax.Array:
    """The sums (m, d), by row of `x`, of its values times the rows `found` (n, d)."""
    zeros = jnp.zeros((x.shape[0], *found.shape[1:]), found.dtype)
    terms = x.values.astype(found.dtype)[:, None] * found
    return add_rows(zeros, x.rows, terms, coalesced=False)


def zeros_at_padding(ids: jax.Array, values: jax.Array, height: int) -> jax.Array:
    """`values` (n, ...) where `ids` (n,) are rows, zeros where they are padding."""
    return jnp.where(trailing(ids < height, values.ndim), values, jnp.zeros_like(values))
