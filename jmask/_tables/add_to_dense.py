"""`dense + rows`: the one sum of a table and rows of it that does not cost O(table).

zeros(4, 1) + RowSparse([2, 2], [[1.], [1.]])      rows 2 gets 2; rows 0, 1, 3 keep their bits
"""

from typing import Any

import jax
import jax.numpy as jnp

from jmask._base.precision import is_narrow, joint_dtype, wide
from jmask._kernels.stochastic_rounding import stochastic_round
from jmask._kernels.update_rows import add_to_rows
from jmask._tables.stored_table import fitted, is_stored_table, rows_of, with_rows
from jmask._tensors.row_sparse import RowSparse


def add_to_dense(dense: Any, rows: RowSparse, key: jax.Array | None = None) -> Any:
    """`dense + rows`, touching only the rows stored: what `optax.apply_updates` needs.

    Floating arrays keep their dtype, as in `dense.at[ids].add(...)`: a bfloat16 table plus
    float32 updates is added in float32 on the touched rows and rounded once to bfloat16.
    Otherwise the dtypes promote as in JAX.

    Args:
        dense (V, *row): an array or a stored table, which is what is returned.
        rows: of the same shape.
        key: of `jax.random`; sums are then rounded stochastically to a 16-bit dtype.

    Raises:
        ValueError: if the shapes differ.
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
    if rows.leading > 1:  # stacked tables are one table
        flat = rows.flat()
        return add_to_dense(dense.reshape(flat.shape), flat, key).reshape(dense.shape)
    both_float = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (dense, rows))
    dtype = joint_dtype(dense.dtype if stored else dense, rows.values)
    if not both_float:
        dense = dense.astype(dtype)
    key = key if is_narrow(dense.dtype) else None
    if not stored and dense.dtype == dtype and key is None:
        return add_to_rows(dense, rows.row_ids(), rows.rows(), rows.order)
    rows = rows if stored else rows.coalesce()
    dtype = dtype if key is None else wide(dtype)
    new = rows_of(dense, rows).astype(dtype) + rows.values.astype(dtype)
    if key is not None:
        new = stochastic_round(new, dense.dtype, key)
    return with_rows(dense, rows, new)
