"""Sums of bags that are equally long: of all first entries, all second ones, and so on.

    bags  2 0     sums  row 2 + row 0
          1 3           row 1 + row 3

XLA makes one loop over the sums of it, which reads the rows of all columns, writes none of
them, and runs on all cores: a scatter of rows into their bags runs on one.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.precision import wide
from jmask._base.shapes import trailing
from jmask._kernels.gather import Gather

# Columns of one sum, and of all sums of a program: each takes a millisecond to compile.
_MOST, _MOST_OF_ALL = 64, 512


def most_columns(tables: int) -> int:
    """How long the bags of so many tables may be."""
    return min(_MOST, _MOST_OF_ALL // tables)


def sum_columns(
    table: jax.Array,
    positions: jax.Array,
    weights: jax.Array | None,
    start: jax.Array,
    fill: float,
) -> jax.Array:
    """`start` (bags, *row) and the rows of each bag, in the order of its entries.

    Args:
        table (V, *row): floating.
        positions (bags, k): canonical ids; V reads `fill`.
        weights (bags, k): of the entries, or None for ones.
        fill: 0 or nan.
    """
    columns = positions.shape[1]
    # With more columns than two there is enough in the loop for LLVM, see `gather`.
    read = Gather.on_bits_if_slow if columns <= 2 else Gather.plain
    if math.isnan(fill):  # whatever its weight; once for a bag instead of for each number
        outside = (positions == table.shape[0]).any(1)
        start = start + trailing(
            jnp.where(outside, jnp.asarray(fill, start.dtype), 0), start.ndim
        )
    for k in range(columns):
        of_entries = None if weights is None else weights[:, k]
        start = start + read_rows(table, positions[:, k], of_entries, 0, read)
    return start


def read_rows(
    table: jax.Array,
    positions: jax.Array,
    weights: jax.Array | None,
    fill: float,
    read: Callable[[Gather, jax.Array, jax.Array], jax.Array] = Gather.__call__,
) -> jax.Array:
    """Rows (*entries, *row) in float32 at least, times their weights; V reads `fill`."""
    fills = lax.GatherScatterMode.FILL_OR_DROP
    gather = Gather.of_rows(table.shape, fills, positions.ndim, fill_value=fill)
    rows = read(gather, table, positions[..., None]).astype(wide(table.dtype))
    return rows if weights is None else rows * trailing(weights, rows.ndim)
