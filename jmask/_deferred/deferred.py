"""Make tables that follow a dense optimizer's trajectory at the cost of the rows touched.

dense        every row moves in every step                   O(V) a step
lazy         a row moves when it has a gradient              O(rows touched)
deferred     every row moves in every step, and is caught up
             when it is read                                 O(rows touched)
"""

import jax
import jax.numpy as jnp
import optax

from jmask._base.types import Gradient, Gradients, OptState, Params, PyTree, PyTreeDef, Table
from jmask._base.validation import as_table, check_flag
from jmask._deferred.step import fingerprint, rows_in_state
from jmask._deferred.table import DeferredTable
from jmask._tables.deferral import is_deferred
from jmask._tables.packed import checked_floating
from jmask._tables.stored_table import is_stored_table
from jmask._tensors.row_sparse import RowSparse
from jmask._updates.checks import check_parameters, check_transformation


def deferred(table: Table, tx: optax.GradientTransformation) -> DeferredTable:
    """Return the table as one whose inactive rows follow the dense optimizer `tx`.

    A dense optimizer moves every row in every step, also those that have no gradient: by their
    momentum, their moments, their decay. What it does to them is known in advance. So rows
    can wait for it until they are read, and lookups, gradients and `todense()` give what they
    would be now. A step costs the rows of the batch, and at most about √V others.

    The table holds what `tx` keeps of each row; `tx.init` of it has arrays (1, *row) in the
    place of that. It is a pytree: donate it, scan over it, save it as any other. For the
    dense trajectory defer every table that is looked up: arrays stay lazy.

    Args:
        table (V, *row): a floating array, or a `PackedTable`.
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

    References:
        Lipton and Elkan, "Efficient Elastic Net Regularization for Sparse Linear Models", 2015,
        for the decay of weights; moments are derived in `jmask/_deferred/closed_form.py`.

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
    inner = optax.with_extra_args_support(_innermost(tx))
    leaf: PyTreeDef = jax.tree.structure(0)
    try:
        state = inner.init(table)
    except (TypeError, ValueError):
        fingerprint(inner.init, inner.update)  # refuses what cannot update a single array
        raise
    slots, _, places = rows_in_state(inner.init, [table], leaf, state, [True])
    before = DeferredTable.before(table, [slots[k] for k in places[0]])
    try:
        stepped = jax.eval_shape(lambda t: _first_step(t, inner, inner.init(t)), before)
        # Once more with the numbers that the state holds, which may be refused as others are.
        state = inner.init(before)
        jax.eval_shape(lambda table: _first_step(table, inner, state), before)
    except (TypeError, ValueError) as error:
        error.add_note(
            "If `tx` calculates with the table or its gradient as with arrays, put all of it "
            "into jmask.lazy, as in jmask.deferred(table, jmask.lazy(optax.adam(1e-3)))."
        )
        raise
    return before.begun(stepped.table.form, stepped.table.made_for)


def to_deferred(
    tx: optax.GradientTransformation, opt_state: OptState, params: Params, tables: PyTree
) -> tuple[Params, OptState]:
    """Take a run on arrays on with some of them deferred: the next step is the dense one.

    Args:
        tx: of `params`, as `deferred` takes it.
        opt_state: its state for `params`.
        params: arrays, or table containers.
        tables: a tree of booleans of the structure of `params`: which are to be deferred.

    Returns:
        Parameters and state: the tables hold what the state kept of them, bit for bit.

    Raises:
        ValueError: if the structure of `tables` differs, the state does not belong to `tx`
            for `params`, and as `deferred` does.
        TypeError: as `deferred` does.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.sgd(1.0, momentum=0.5)
        >>> params, which = {"t": jnp.zeros((3, 1)), "w": jnp.ones(2)}, {"t": True, "w": False}
        >>> params, state = jmask.to_deferred(tx, tx.init(params), params, which)
        >>> params["t"], state.momentum["t"].shape
        (DeferredTable(float32[3, 1]), (1, 1))
    """
    check_transformation("tx", tx, "jmask.to_deferred(tx, opt_state, params, tables)")
    check_parameters(params)
    leaves = jax.tree.leaves(params, is_leaf=is_stored_table)
    tree: PyTreeDef = jax.tree.structure(params, is_leaf=is_stored_table)
    which, tables_tree = jax.tree.flatten(tables)
    if tables_tree != tree:
        raise ValueError(
            f"`tables` must have the structure of `params`, {tree}, got {tables_tree}: True "
            "for each table that is to be deferred, and False elsewhere."
        )
    for x in which:
        check_flag("tables", x)
    likes = {i: deferred(leaves[i], tx) for i, chosen in enumerate(which) if chosen}
    state, state_tree, places = rows_in_state(tx.init, leaves, tree, opt_state, which)
    for i, like in likes.items():
        before = DeferredTable.before(leaves[i], [state[k] for k in places[i]])
        assert like.form is not None
        assert like.made_for is not None
        leaves[i] = before.begun(like.form, like.made_for)
        for k in places[i]:
            state[k] = jnp.zeros((1, *state[k].shape[1:]), state[k].dtype)
    return tree.unflatten(leaves), state_tree.unflatten(state)


def from_deferred(
    tx: optax.GradientTransformation, opt_state: OptState, params: Params
) -> tuple[Params, OptState]:
    """Take a run on deferred tables on with the arrays of a dense or a lazy one.

    Args:
        tx: of `params`.
        opt_state: its state.
        params: of which some are deferred tables.

    Returns:
        Parameters and state as of a dense run at this step, every row caught up.

    Raises:
        ValueError: if the state does not belong to `tx` for `params`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.sgd(1.0, momentum=0.5)
        >>> table = jmask.deferred(jnp.zeros((3, 1)), tx)
        >>> table, state = jmask.from_deferred(tx, tx.init(table), table)
        >>> table.shape, state.momentum.shape
        ((3, 1), (3, 1))
    """
    check_transformation("tx", tx, "jmask.from_deferred(tx, opt_state, params)")
    check_parameters(params)
    leaves = jax.tree.leaves(params, is_leaf=is_stored_table)
    tree: PyTreeDef = jax.tree.structure(params, is_leaf=is_stored_table)
    which = list(map(is_deferred, leaves))
    state, state_tree, places = rows_in_state(tx.init, leaves, tree, opt_state, which)
    for i, slots in places.items():
        leaves[i], *parts = leaves[i].parts()
        for k, x in zip(slots, parts, strict=True):
            state[k] = x
    return tree.unflatten(leaves), state_tree.unflatten(state)


def _innermost(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the transformation that takes the steps, without the guards around it."""
    inner = getattr(tx, "inner", None)
    return tx if inner is None else _innermost(inner)


def _first_step(
    table: DeferredTable, tx: optax.GradientTransformationExtraArgs, state: OptState
) -> Gradients:
    """Return the updates for the table before its first step, for no rows."""
    ids = jnp.full((1,), table.shape[0], jnp.int32)
    values = jnp.zeros((1, *table.shape[1:]), table.dtype)
    gradient: Gradient = RowSparse.from_rows(ids, values, table.shape, coalesced=True)
    updates, _ = tx.update(gradient, state, table)
    return updates
