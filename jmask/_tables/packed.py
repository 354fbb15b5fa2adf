"""Packed tables: narrow rows side by side in lines of 128, the width of a TPU's registers.

On a TPU an array (V, 64) is kept transposed or padded to 128 columns, so a step copies whole
tables or holds twice what it needs. An array (V / 2, 128) is kept as it is:

    rows of 64      line 0:  row 0 | row 1       line 1:  row 2 | row 3       ...
    rows of 48      the same, each with 16 zeros behind it
    rows of 100     one in a line, with 28 zeros

Each row takes a power of two of entries, or a multiple of 128, so that none straddles two
lines. A lookup names the `width` of rows; its gradient has rows of that width, which optimizers
take as lines of which some entries exist: see `jmask._kernels.lines`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jmask._base.shardings import spec_of
from jmask._base.types import Numbers, Shaped
from jmask._base.validation import as_table
from jmask._kernels.lines import LANES


def packed(table: Numbers) -> jax.Array:
    """Return the table as an array of lines, which a step on a TPU updates in place.

    Narrow rows lie side by side: XLA lays an array whose rows are not a multiple of 128
    entries out by columns, which some widths pay for with padding and others (64, 100) with a
    copy of the table in every step. On other devices lines gain nothing.

    Rows are read by `jmask.embedding_lookup(lines, ids, width=D)` and `jmask.embedding_bag`, or
    by `lines.reshape(-1, D)[ids]` if D is a power of two. Optimizers update the rows that are
    looked up, and no others of their lines, if they work entry by entry, as Adam does. One that
    works row by row, as `jmask.rowwise_adagrad` or `jmask.max_row_norm` does, would see lines
    in place of rows: it is refused where a line has several, and counts the zeros behind a row
    that has a line to itself. `jmask.deferred` takes lines, too: its `catch_up` is given the
    numbers of lines, `ids // k`.

    Args:
        table (V, D): an array.

    Returns:
        The array (V / k, 128), where D up to 64 is rounded up to the power of two 128 / k, and
        the last line is filled up with zeros; for wider rows k is 1, and D is rounded up to a
        multiple of 128. `jmask.embedding_lookup(lines, jnp.arange(V), width=D)` is the table
        again.

    Raises:
        TypeError: if `table` is no array.
        ValueError: if it is not floating or complex, of two dimensions, with columns; or if
            it is sharded by its type.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> lines = jmask.packed(jnp.arange(6.).reshape(3, 2))
        >>> lines.shape
        (1, 128)
        >>> jmask.embedding_lookup(lines, [2, 0], width=2)
        Array([[4., 5.],
               [0., 1.]], dtype=float32)
    """
    array = as_table(table)
    check_floating(array)
    if array.ndim != 2:
        raise ValueError(
            f"`table` must be (V, D), got shape {array.shape}: pack "
            "`table.reshape(-1, table.shape[-1])`, or `table.reshape(len(table), -1)`, and "
            "reshape the rows that are looked up."
        )
    if any(spec_of(array)):
        raise ValueError(
            f"`table` is sharded, {jax.typeof(array)}, and lines hold several rows: leave it "
            "as it is, or pack one that every device has."
        )
    rows, columns = array.shape
    slot = slot_of(columns)
    missing = -rows % max(LANES // slot, 1)
    padded = jnp.pad(array, ((0, missing), (0, slot - columns)))
    return padded.reshape(-1, max(slot, LANES))


def slot_of(width: int) -> int:
    """Return how many entries of a line a row of this width takes."""
    return 1 << (width - 1).bit_length() if width <= LANES else -(-width // LANES) * LANES


def check_floating(table: Shaped) -> None:
    """Refuse an array, or the shape of one, that is no table: its rows have entries."""
    rows_have_entries = table.ndim and 0 not in table.shape[1:]
    if not rows_have_entries or not jnp.issubdtype(table.dtype, jnp.inexact):
        raise ValueError(
            "`table` must be a floating or complex array (V, *row), got "
            f"{table.dtype}{list(table.shape)}."
        )
