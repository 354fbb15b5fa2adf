"""`deferred(table, tx)`: a table with the dense optimizer's trajectory, for its rows' cost.

dense        every row moves in every step                   O(V) a step
lazy         a row moves when it has a gradient              O(rows touched)
deferred     every row moves in every step, and is moved
             when it is read                                 O(rows touched)
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmask._base.leaves import as_table
from jmask._lazy.state_rows import tables_of_state
from jmask._tables.deferred_table import DeferredTable, NewTable, is_deferred
from jmask._tables.packed import checked_floating
from jmask._tables.stored_table import is_stored_table, shape_of
from jmask._tensors.row_sparse import RowSparse
from jmask._updates.checks import check_transformation


def deferred(table: Any, tx: optax.GradientTransformation) -> DeferredTable:
    """The table as one whose rows follow the dense optimizer `tx` while they are away.

    Args:
        table (V, *row): a floating array, or a `PackedTable` or `ShardedTable`.
        tx: what will update it.

    Returns:
        A `DeferredTable`.
    """
    if is_deferred(table):
        raise TypeError("`table` is deferred already: use it as it is.")
    if not is_stored_table(table):
        table = checked_floating(as_table(table))
    check_transformation("tx", tx, "jmask.deferred(table, jmask.adam(1e-3))")
    while getattr(tx, "inner", None) is not None:
        tx = tx.inner
    tx = optax.with_extra_args_support(tx)
    state = tx.init(table)
    leaves = jax.tree.leaves(state, is_leaf=is_stored_table)
    owners = tables_of_state(tx, [shape_of(table)], [True], jax.tree.structure(0), state)
    slots = [x for x, owner in zip(leaves, owners, strict=True) if owner is not None]
    before = DeferredTable.before(table, slots)
    found = jax.eval_shape(lambda table: _first_step(table, tx), before)
    return before.begun(found.table.form, found.table.made_for)


def _first_step(table: DeferredTable, tx: optax.GradientTransformationExtraArgs) -> NewTable:
    ids = jnp.full((1,), table.shape[0], jnp.int32)
    values = jnp.zeros((1, *table.shape[1:]), table.dtype)
    gradient = RowSparse.of_rows(ids, values, table.shape, coalesced=True)
    updates, _ = tx.update(gradient, tx.init(table), table)
    return updates
