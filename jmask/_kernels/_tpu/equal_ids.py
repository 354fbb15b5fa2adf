"""Rows of equal ids summed where the first of them is, for updates that need no order.

    ids    [4, 1, 4, V]            ids    [4, 1, V, V]
    values [a, b, c, -]            values [a + c, b, -, -]

Most ids of a batch come once: their rows stay where they are.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import sum_dtype
from jmask._base.shardings import varying_alike
from jmask._kernels import tuning
from jmask._kernels.coalesce import Runs, in_stable_order
from jmask._kernels.rows import add_rows, entries_of, gather_rows, sorted_with


def summed_where_first(
    ids: jax.Array, values: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Sum rows of equal ids into the first, in blocks of those that come again.

    XLA's scatter for TPUs takes as long for rows that it drops as for others (libtpu 0.0.50):
    it is given no more than there are.

    Args:
        ids, values, rows: as of `coalesce_rows`; n > 0.

    Returns:
        ids (n,), `rows` but for the first entry of each id, and values (n, *row), of no meaning
        there.
    """
    count, entries = ids.shape[0], entries_of(ids)
    runs = Runs.of(*in_stable_order(ids))
    again = ~runs.starts & (runs.ids < rows)
    # The place at which the run of each begins.
    start = lax.cummax(jnp.where(runs.starts, entries, 0))
    # The places of those that come again, one after the other, then padding.
    later = lax.sort(jnp.where(again, entries, count), is_stable=False)
    size = max(tuning.LATER_ROWS, count // tuning.LATER_ROUNDS)
    later = jnp.pad(later, (0, size), constant_values=count)
    left = jnp.sum(again, dtype=jnp.int32)

    def block(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin, sums = carried
        places = lax.dynamic_slice_in_dim(later, begin, size)
        first = gather_rows(runs.entries, gather_rows(start, places))
        into = jnp.where(places < count, first, count)
        rows = gather_rows(sums, gather_rows(runs.entries, places))
        return begin + size, add_rows(sums, into, rows)

    sums = values.astype(sum_dtype(values.dtype))
    begin = varying_alike(jnp.int32(0), ids)[0]
    _, sums = lax.while_loop(lambda carried: carried[0] < left, block, (begin, sums))
    unique = jnp.where(again, rows, runs.ids)
    _, unique = sorted_with(runs.entries, unique)
    return unique, sums.astype(values.dtype)
