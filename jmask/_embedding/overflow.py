"""`jmask.exchange_overflow`: whether rows of a large batch went to their owners alone."""

import jax
import jax.numpy as jnp

from jmask._base.shardings import Shards, flat
from jmask._base.types import Numbers
from jmask._base.validation import as_table
from jmask._embedding.lookup import (
    Entries,
    checked_integers,
    is_padding,
    numbered_by,
    positions_of,
)
from jmask._kernels.sharded_rows import excess_of


def exchange_overflow(
    table: jax.Array, ids: Numbers, *, padding_id: int | None = None, hashed: bool = False
) -> jax.Array:
    """Count the ids of a lookup beyond what devices have room for when they exchange rows.

    Rows of large batches go to the shards that own them alone, each of which has room for its
    share of a batch and five standard deviations. A lookup that exceeds it anywhere, and the
    update of its rows, sends all rows to all devices instead: as exact, and slower. Where that
    happens often, `hashed=True` spreads frequent ids over all shards.

    Args:
        table, ids, padding_id, hashed: as in `embedding_lookup`. In a program that makes this
            lookup as well XLA sorts the ids once.

    Returns:
        A scalar, int32: 0 where all ids fit, and where rows are not exchanged: in batches of
        less than 65,536 ids, and in tables that are not sharded by their types.

    Raises:
        TypeError: if `table` is no array, or `ids` are no integers.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> table = jmask.sharded(jnp.ones((8, 2)), jax.make_mesh((1,), ("x",)))
        >>> int(jmask.exchange_overflow(table, jnp.array([3, 3])))
        0
    """
    table = as_table(table)
    ids = checked_integers(ids, "ids", "zero", "exchange_overflow(table, ids)")
    count = table.shape[0]
    positions = positions_of(ids, is_padding(ids, padding_id), count)
    positions = numbered_by(hashed, Entries(positions, None, None), count).positions
    shards = Shards.of(table, positions)
    if shards is None:
        return jnp.zeros((), jnp.int32)
    return excess_of(shards, flat(positions), count)
