"""Packed tables: narrow rows side by side in lines of 128, the width of a TPU's registers.

On a TPU an array (V, 64) is kept transposed or padded to 128 columns, so a step copies whole
tables or holds twice what it needs. An array (V / 2, 128) is kept as it is:

    rows of 64      line 0:  row 0 | row 1       line 1:  row 2 | row 3       ...
    rows of 100     = 64 + 32 + 4: three arrays, with 2, 4 and 32 rows in a line

The columns are split into powers of two (and what is left of them in multiples of 128), so
that no row straddles two lines and nothing is padded but the last line.

How a row is read from its line, and written into it without a change to its neighbours, is in
`jmask._kernels.lines`.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmask._base.shardings import explicit_sharding
from jmask._base.types import DType, Numbers, PyTree, Scalar, Shaped, Table
from jmask._base.validation import as_table, checked_choice
from jmask._kernels.lines import LANES, entries_and_mask, inserted, per_line, picked, placed
from jmask._kernels.rows import gather_rows, set_rows
from jmask._kernels.scatter_update import Combiner, update_elementwise
from jmask._kernels.update_rows import updated
from jmask._tables.stored_table import Placeholder, StoredTable, differentiable
from jmask._tensors.row_sparse import RowSparse

PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")


@jax.tree_util.register_pytree_with_keys_class
class PackedTable(StoredTable):
    """A table (V, *row) whose narrow rows lie side by side in lines of 128 entries.

    Made by `jmask.packed`; used like an array by lookups, gradients and optimizers.

    Attributes:
        parts: arrays (lines, 128), or (V, a multiple of 128), one for each group of columns.
        shape: (V, *row).

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> table = jmask.packed(jnp.ones((1000, 100)), platform="tpu")
        >>> table
        PackedTable(float32[1000, 100])
        >>> [part.shape for part in table.parts]
        [(500, 128), (250, 128), (32, 128)]
        >>> table[jnp.array([7, 7])].shape
        (2, 100)
    """

    __slots__ = ("parts",)

    _ARRAYS = ("parts", "placeholder")
    _STATIC = ("shape",)

    def __init__(
        self,
        parts: Sequence[jax.Array],
        shape: Sequence[int],
        placeholder: Placeholder | None = None,
    ):
        self.parts, self.shape, self.placeholder = tuple(parts), tuple(shape), placeholder

    @classmethod
    def pack(cls, x: Table) -> "PackedTable":
        """Return the array `x` (V, *row), packed."""
        x = checked_floating(as_table(x))
        if explicit_sharding(x) is not None:
            raise ValueError(
                f"`x` is sharded, {jax.typeof(x)}, and a PackedTable is on one device: use "
                "jmask.sharded(x, mesh, packed=True)."
            )
        return cls.from_array(x)

    @classmethod
    def from_array(cls, x: jax.Array) -> "PackedTable":
        """Return an array (V, *row) of any dtype, packed."""
        columns = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        return cls([_packed(group) for group in _groups(columns)], x.shape)

    @property
    def dtype(self) -> DType:
        return self.parts[0].dtype

    def is_stack(self) -> bool:
        return jnp.ndim(self.parts[0]) > 2

    def todense(self) -> jax.Array:
        self.check_single()
        return differentiable(
            jnp.concatenate(self.entries(), axis=1).reshape(self.shape), self.placeholder
        )

    def full(self, row: Sequence[int], value: Scalar, dtype: DTypeLike) -> "PackedTable":
        shape = (self.shape[0], *row)
        parts = [jnp.full(part_shape, value, dtype) for part_shape in part_shapes(shape)]
        return PackedTable(parts, shape)

    def read(self, ids: jax.Array) -> jax.Array:
        columns: list[jax.Array] = []
        for part, width in self._with_widths():
            ids = _after(columns, ids)
            count = per_line(width)
            line = gather_rows(part, ids // count)
            columns.append(picked(line, ids % count, width))
        return jnp.concatenate(columns, axis=1).reshape(ids.shape[0], *self.shape[1:])

    def entries(self) -> list[jax.Array]:
        rows = self.shape[0]
        return [part.reshape(-1, width)[:rows] for part, width in self._with_widths()]

    def fitted(self, gradient: RowSparse) -> RowSparse:
        return gradient.coalesce()

    def rows(self, gradient: RowSparse) -> jax.Array:
        return self.read(gradient.row_ids())

    def set_rows(self, gradient: RowSparse, rows: jax.Array) -> "PackedTable":
        return self.write(gradient.row_ids(), rows)

    def add_rows(self, gradient: RowSparse, rows: jax.Array) -> "PackedTable":
        return self.add(gradient.row_ids(), rows)

    def add(self, ids: jax.Array, rows: jax.Array) -> "PackedTable":
        """Return the table plus rows (n, *row) at ids (n,), sorted and unique."""
        return self.updated(lambda row, step: [row + step], [], ids, rows, [])[0]

    def write(self, ids: jax.Array, rows: jax.Array) -> "PackedTable":
        """Return the table with other rows (n, *row) at ids (n,), sorted and unique."""
        rows = rows.astype(self.dtype)
        if math.prod(self.shape[1:]) != 1:
            return self.updated(lambda _, row: [row], [], ids, rows, [])[0]
        # These lines have been read for `rows`: writing them needs no second read and no mask.
        (part,) = self.parts
        lines = gather_rows(part, ids // LANES)
        line, lines = inserted(lines, ids, rows.reshape(ids.shape), self.shape[0])
        return PackedTable([set_rows(part, line, lines, "unique")], self.shape)

    def updated(
        self,
        combiner: Combiner,
        slots: Sequence["PackedTable"],
        ids: jax.Array,
        rows: jax.Array,
        scalars: Sequence[ArrayLike],
    ) -> list["PackedTable"]:
        """Apply `combiner`, as of `update_elementwise`, to rows of sorted unique ids.

        The slots have the shape of this table, and are kept in the same way.
        """
        tables = (self, *slots)
        count = len(tables)  # JAX may remember the function, which must not keep the tables
        dtype = rows.dtype

        def where_placed(*entries: jax.Array) -> list[jax.Array]:
            old, (line, *rest) = entries[:count], entries[count:]
            grad, is_placed = entries_and_mask(line, dtype)
            made = combiner(*old, grad, *rest)
            return [
                jnp.where(is_placed, x.astype(y.dtype), y)
                for x, y in zip(made, old, strict=True)
            ]

        columns = rows.reshape(ids.shape[0], math.prod(self.shape[1:]))
        new: list[list[jax.Array]] = []
        for i, group in enumerate(_groups(columns)):
            ids = _after(new, ids)
            target, lines = placed(ids, group, self.shape[0], self.parts[i].shape[0])
            parts = [table.parts[i] for table in tables]
            update = update_elementwise(where_placed, parts, target, lines, scalars, "unique")
            new += updated([update])
        return [PackedTable(parts, self.shape) for parts in zip(*new, strict=True)]

    @staticmethod
    def widths(shape: Sequence[int]) -> list[int]:
        """Return how many columns each part of a table of this shape has."""
        return _widths(math.prod(shape[1:]))

    def _with_widths(self) -> list[tuple[jax.Array, int]]:
        return list(zip(self.parts, _widths(math.prod(self.shape[1:])), strict=True))


def packed(table: Numbers, platform: str | None = None) -> Table:
    """Return the table in the form in which a step updates it in place on the given platform.

    On a TPU a floating table whose rows are not a multiple of 128 entries becomes a
    `PackedTable`: XLA lays it out by columns, which some widths pay for with padding and
    others (64, 100) with a copy of the table in every step. Elsewhere, and where rows are
    whole lines already, it is returned as it is.

    Args:
        table (V, *row): an array.
        platform: "tpu", "cpu", "gpu", "cuda" or "rocm"; `jax.default_backend()` if None.

    Returns:
        A `PackedTable`, whose `todense()` is the array, or the array itself.

    Raises:
        TypeError: if `table` is no array.
        ValueError: if it is not floating (V, *row), or `platform` is not known.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.packed(jnp.ones((1000, 64)), platform="tpu")
        PackedTable(float32[1000, 64])
        >>> jmask.packed(jnp.ones((1000, 128)), platform="tpu").shape
        (1000, 128)
    """
    array = checked_floating(as_table(table))
    platform = jax.default_backend() if platform is None else platform
    checked_choice(platform, "platform", PLATFORMS)
    fits = math.prod(array.shape[1:]) % LANES == 0
    return array if platform != "tpu" or fits else PackedTable.pack(array)


def checked_floating(table: Shaped) -> Table:
    """Return an array, or the shape of one, that can be a table: its rows have entries."""
    rows_have_entries = table.ndim and math.prod(table.shape[1:])
    if not rows_have_entries or not jnp.issubdtype(table.dtype, jnp.inexact):
        raise ValueError(
            "`table` must be a floating or complex array (V, *row), got "
            f"{table.dtype}{list(table.shape)}."
        )
    return table


def part_shapes(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Return shapes of the arrays that hold a packed table of the given shape."""
    return [
        (-(-shape[0] // per_line(width)), max(width, LANES))
        for width in _widths(math.prod(shape[1:]))
    ]


# --- columns -----------------------------------------------------------------------------


def _widths(columns: int) -> list[int]:
    """Split a width into 128 * k and powers of two, widest first."""
    whole, rest = columns - columns % LANES, columns % LANES
    powers = [1 << bit for bit in reversed(range(7)) if rest >> bit & 1]
    return [whole, *powers] if whole else powers


def _groups(columns: jax.Array) -> list[jax.Array]:
    """Split columns (n, D) into the groups that are kept together."""
    ends = list(itertools.accumulate(_widths(columns.shape[1])))
    return jnp.split(columns, ends[:-1], axis=1)


# --- lines -------------------------------------------------------------------------------


def _packed(columns: jax.Array) -> jax.Array:
    rows, width = columns.shape
    missing = -rows % per_line(width)
    return jnp.pad(columns, ((0, missing), (0, 0))).reshape(-1, max(width, LANES))


def _after(done: list[PyTree], ids: jax.Array) -> jax.Array:
    """Make ids wait for the last of `done`: one part at a time has its lines in memory."""
    if done:
        done[-1], ids = lax.optimization_barrier((done[-1], ids))
    return ids
