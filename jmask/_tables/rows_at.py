"""Rows of a gradient in the arrays that have them.

tables (M, V, D)              are one table (M * V, D)
packed table (L, 128)         rows are entries of its lines
table sharded by its type     each shard has its own rows of the gradient
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmask._base.array_types import is_complex, is_narrow, joint_dtype, minus_zero, wide
from jmask._base.row_ids import hide, id_dtype
from jmask._base.shardings import Shards, spec_of
from jmask._base.types import Ids, Numbers
from jmask._kernels.lines import masked_lines, picked, writer_of_each
from jmask._kernels.rows import gather_rows, gather_unique_rows, ids_after_reading, set_rows
from jmask._kernels.sharded_rows import Exchange, routed
from jmask._kernels.stochastic_rounding import stochastic_round
from jmask._kernels.update_rows import add_to_rows
from jmask._tensors.row_sparse import RowSparse


def from_the_end(ids: Numbers, rows: int) -> Ids:
    """Count negative ids from the end; NumPy integers stay NumPy's."""
    numbers: Ids = ids if isinstance(ids, jax.Array) else np.asarray(ids)
    if not jnp.issubdtype(numbers.dtype, jnp.signedinteger):
        return numbers
    if isinstance(numbers, np.ndarray):
        numbers = numbers.astype(np.int64)
        return np.where(numbers < 0, numbers + rows, numbers)
    numbers = numbers.astype(joint_dtype(numbers, id_dtype(rows)))
    return jnp.where(numbers < 0, numbers + rows, numbers)


def routed_to_shards(table: jax.Array, gradient: RowSparse) -> RowSparse:
    """Return a gradient of which each shard has its own rows, if a table is sharded by type."""
    shards = Shards.of(table)
    if not _is_to_be_sent(shards, gradient):
        return gradient
    ids, values = routed(shards, table.shape[0], gradient.row_ids(), gradient.values)
    return gradient.with_leaves(hide(ids), values, order="routed")


def exchange_for(table: jax.Array, gradient: RowSparse) -> Exchange | None:
    """Return how many rows go to the shards of a table, none of which gets all; or None."""
    shards = Shards.of(table)
    if any(shards.columns) or not _is_to_be_sent(shards, gradient):
        return None
    return Exchange.of(shards, gradient.row_ids())


def _is_to_be_sent(shards: Shards, gradient: RowSparse) -> bool:
    return bool(shards.rows) and not shards.routed_over(gradient.row_ids(), gradient.order)


def shape_of(x: ArrayLike | RowSparse) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a leaf: array, number or `RowSparse`."""
    values = x.values if isinstance(x, RowSparse) else x
    return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(values))


# --- packed tables ------------------------------------------------------------------------


def in_lines(gradient: RowSparse) -> tuple[RowSparse, jax.Array]:
    """Return the gradient of a packed table as lines (n, 128), and which entries exist.

    Their ids are unique, one of them for each line that is written.
    """
    if gradient.ndim != 2:
        raise ValueError(
            f"{gradient!r} is the gradient of stacked packed tables: make one table of them, "
            "`lines.reshape(-1, 128)`, and look row `i` of table `m` up as `m * V + i`."
        )
    rows, shape = gradient.coalesce(), gradient.shape
    if not rows.nse:
        return RowSparse.zeros(shape, rows.dtype), jnp.zeros((0, shape[1]), bool)
    ids, values, valid = masked_lines(rows.flat().row_ids(), rows.values, shape[0])
    lines = RowSparse.from_rows(ids, values, shape, coalesced=False)
    return lines.with_leaves(lines.index_leaf, values, order="unique"), valid


def from_lines(lines: RowSparse, like: RowSparse) -> RowSparse:
    """Undo `in_lines`: return the rows of `like`, coalesced, as the lines have them."""
    target, ids = lines.row_ids(), like.flat().row_ids()
    # Like the ids of the lines, those of the rows are known after what was read.
    ids = ids_after_reading(ids, target)
    writer = writer_of_each(target, lines.row_count)
    width, (_, columns) = like.row[0], lines.shape
    rows = picked(gather_rows(lines.values, writer), ids % (columns // width), width)
    rows = jnp.where((ids < like.row_count)[:, None], rows, jnp.zeros_like(rows))
    return like.with_leaves(hide(ids), rows, order="sorted")


# --- add to dense -------------------------------------------------------------------------
#
# `dense + rows`: the one sum of a table and rows of it that does not cost O(table).
#
# zeros(4, 1) + RowSparse([2, 2], [[1.], [1.]])      rows 2 gets 2; rows 0, 1, 3 keep their bits


def add_to_dense(dense: jax.Array, rows: RowSparse, key: jax.Array | None = None) -> jax.Array:
    """Return `dense + rows`, touching only the rows stored, as `optax.apply_updates` adds.

    Floating and complex arrays keep their dtype, as in `dense.at[ids].add(...)`: a bfloat16
    table plus float32 updates is added in float32 on the touched rows and rounded once to
    bfloat16. Otherwise the dtypes promote as in JAX.

    With a `key` of `jax.random`, sums are rounded stochastically to a 16-bit dtype.
    """
    dense = jnp.asarray(dense)
    if dense.shape != rows.shape:
        raise ValueError(
            f"cannot add rows of a tensor of shape {rows.shape} to an array of shape "
            f"{dense.shape}: a RowSparse does not broadcast."
        )
    if rows.leading > 1 and not rows.width:
        check_one_table(dense, rows)
        table = jnp.reshape(dense, rows.flat().shape)
        return add_to_dense(table, rows.flat(), key).reshape(dense.shape)
    both_inexact = all(jnp.issubdtype(x.dtype, jnp.inexact) for x in (dense, rows))
    if not both_inexact or is_complex(dense) < is_complex(rows):
        dense = dense.astype(joint_dtype(dense, rows.values))
    # Duplicates of 16-bit rows are summed in float32, and rounded once, in the table.
    rows = rows if rows.order == "sorted" else rows.widened()
    if rows.width:  # a TPU would copy the lines to reshape them
        rows, valid = in_lines(rows)
        rows = rows.with_values(jnp.where(valid, rows.values, minus_zero(rows.dtype)))
    dtype = joint_dtype(dense, rows.values)
    key = key if is_narrow(dense.dtype) else None
    if dense.dtype == dtype and key is None:
        return add_to_rows(dense, rows.row_ids(), rows.rows(), rows.order)
    rows = rows.coalesce() if rows.order == "any" else rows
    dtype = dtype if key is None else wide(dtype)
    ids, order = rows.row_ids(), rows.order
    new = gather_unique_rows(dense, ids, order).astype(dtype) + rows.values.astype(dtype)
    if key is not None:
        new = stochastic_round(new, dense.dtype, key)
    return set_rows(dense, ids, new, order)


def check_one_table(tables: jax.Array, gradient: RowSparse) -> None:
    """Refuse stacked tables (M, V, *row) that cannot be reshaped to one where they are."""
    if any(spec_of(tables)[1 : gradient.leading]):
        raise ValueError(
            f"stacked tables {jax.typeof(tables)} are sharded by the rows of each: shard them "
            "over dimension 0, or make one table of them, `tables.reshape(-1, D)`, and shard "
            "its rows."
        )
