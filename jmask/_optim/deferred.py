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
from jmask._tables.deferred_table import DeferredTable, is_deferred
from jmask._tables.packed import checked_floating
from jmask._tables.stored_table import is_stored_table, shape_of
from jmask._tensors.row_sparse import RowSparse
from jmask._updates.checks import check_transformation


def deferred(table: Any, tx: optax.GradientTransformation) -> DeferredTable:
    """The table as one whose rows follow the dense optimizer `tx` while they are away.

    A dense optimizer moves every row in every step, also those that have no gradient: by their
    momentum, their moments, their decay. What it does to them is known in advance. So rows
    can wait for it until they are read, and lookups, gradients and `todense()` give what they
    would be now. A step costs the rows of the batch, and at most about √V others.

    The table holds what `tx` keeps of each row; `tx.init` of it keeps arrays (0, *row). It is a
    pytree: donate it, scan over it, save it as any other.

    Args:
        table (V, *row): a floating array, or a `PackedTable` or `ShardedTable`.
        tx: what will update it: a named optimizer, with `lazy_update` True or False, or
            `jmask.lazy` of one of optax; `multi_steps` and `skip_nonfinite` of these. All that
            depends on the parameter or the state of a row must be in one of them:
            `jmask.lazy(optax.chain(...))`. Rates may follow schedules or be injected.

    Returns:
        A `DeferredTable` (V, *row) of the table's dtype, with one int32 for each row besides.

    Raises:
        TypeError: if `table` is no floating array or table or is deferred already, or `tx` is
            no transformation.
        ValueError: if what `tx` does to rows without a gradient has no closed form, with the
            reason: L2 decay in an adaptive optimizer, noise, what is not row-local.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> tx = jmask.adam(0.1)
        >>> params = {"table": jmask.deferred(jnp.ones((4, 2)), tx)}
        >>> state = tx.init(params)
        >>> for ids in ([0, 1], [0, 2], [0, 3]):
        ...     loss = lambda params: params["table"][jnp.array(ids)].sum()
        ...     grads = jmask.grad(loss)(params)
        ...     params, state = jmask.apply_gradients(tx, grads, state, params)
        >>> print(params["table"].todense()[:, 0].round(2))   # row 1 has moved on by itself
        [0.7  0.78 0.87 0.94]
    """
    if is_deferred(table):
        raise TypeError("`table` is deferred already: use it as it is.")
    if not is_stored_table(table):
        table = checked_floating(as_table(table))
    check_transformation("tx", tx, "jmask.deferred(table, jmask.adam(1e-3))")
    while getattr(tx, "inner", None) is not None:
        tx = tx.inner  # type: ignore[attr-defined]
    tx = optax.with_extra_args_support(tx)
    state = tx.init(table)
    leaves = jax.tree.leaves(state, is_leaf=is_stored_table)
    owners = tables_of_state(tx, [shape_of(table)], [True], jax.tree.structure(0), state)
    slots = [x for x, owner in zip(leaves, owners, strict=True) if owner is not None]
    before = DeferredTable.before(table, slots)
    found = jax.eval_shape(lambda table: _first_step(table, tx), before)
    return before.begun(found.table.form, found.table.made_for)


def _first_step(table: DeferredTable, tx: Any) -> Any:
    """What `update` returns for the table before its first step, for no rows."""
    ids = jnp.full((1,), table.shape[0], jnp.int32)
    values = jnp.zeros((1, *table.shape[1:]), table.dtype)
    gradient = RowSparse.of_rows(ids, values, table.shape, coalesced=True)
    updates, _ = tx.update(gradient, tx.init(table), table)
    return updates
