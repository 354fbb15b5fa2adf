"""Rows that are scattered as windows of an odd width, which one CPU does faster.

XLA's CPU compiler makes vectors of as many entries of a row as the greatest power of 2, of up
to 8, that divides its width: of 2 entries for rows of 50, which then take twice as long as rows
of 48. Rows of odd width it leaves to LLVM, which makes vectors of 8 and does the rest singly:

    table (V, 50), ids [3, 0]         windows (2 V, 25), ids [6, 7, 0, 1]

Where vectors of 4 are too short only long arithmetic gains (jaxlib 0.10.0 to 0.12.0).
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._kernels.rows import add_rows

# Entries of the windows that gain, by the vectors that rows are made of.
_LEAST = {2: 9, 4: 25}
_LEAST_OF_SUMS = {2: 9}
_BYTES = 4  # of an entry


def window_of(table: jax.Array, adds_only: bool) -> int:
    """The width of the windows that rows are scattered as: their own if as a whole.

    Args:
        table (V, *row): what is scattered into.
        adds_only: whether nothing else is done to its rows.
    """
    width = math.prod(table.shape[1:])
    vector = width & -width
    least = (_LEAST_OF_SUMS if adds_only else _LEAST).get(vector)
    if least is None or table.dtype.itemsize != _BYTES:
        return width
    window = width // vector
    fits = table.size // window <= np.iinfo(np.int32).max
    return window if fits and window >= least else width


def in_windows(
    update: Callable[..., list[jax.Array]],
    tables: Sequence[jax.Array],
    ids: jax.Array,
    arrays: Sequence[jax.Array],
    adds_only: bool = False,
) -> list[jax.Array]:
    """`update(tables, ids, arrays)` of windows, if it is faster so.

    Args:
        update: what it does to an entry depends on this entry alone.
        tables: arrays (V, *row) of one shape and dtype.
        ids (n,): canonical.
        arrays: rows (n, *row), and scalars.
        adds_only: whether it adds rows and no more.
    """
    table = tables[0]
    window, width = window_of(table, adds_only), math.prod(table.shape[1:])
    if window == width:
        return update(list(tables), ids, list(arrays))
    count = width // window
    places = ids[:, None] * count + lax.broadcasted_iota(ids.dtype, (ids.size, count), 1)
    rows = (x.reshape(-1, window) if jnp.ndim(x) else x for x in arrays)
    new = update([x.reshape(-1, window) for x in tables], places.reshape(-1), list(rows))
    return [x.reshape(table.shape) for x in new]


def add_in_windows(table: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """`table` with `table[ids] += rows`, as `add_rows`."""

    def added(
        tables: Sequence[jax.Array], ids: jax.Array, arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        return [add_rows(tables[0], ids, arrays[0], coalesced=False)]

    return in_windows(added, [table], ids, [rows], adds_only=True)[0]
