"""Note when rows moved, and return those that moved since a step as a tree that travels.

step        1    2    3    4          rows_since(state, 2)     ids [5, 7]
row 5       x         x               take(params, ids)        RowSparse(rows 5, 7)
row 7            x         x          put(old, rows)           the params of step 4
last 5      1    1    3    3
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmask._base.row_ids import id_dtype
from jmask._base.shardings import with_whole_rows
from jmask._base.types import (
    Argument,
    Function,
    Index,
    KeyPath,
    Numbers,
    PyTree,
    PyTreeDef,
    Table,
)
from jmask._base.validation import (
    Model,
    abstract_leaf,
    as_table,
    check_leaves,
    checked_integer,
    leaf_name,
    not_an_array,
)
from jmask._embedding.lookup import checked_integers, embedding_lookup
from jmask._kernels.rows import set_rows
from jmask._lazy.state_rows import only_state
from jmask._optim.row_rule import Slot, row_rule, watching
from jmask._tensors.row_sparse import RowSparse, is_row_sparse


class TouchedState(NamedTuple):
    """State of `touched`: steps done, and the last step of each row, (V, 1) of (V, D)."""

    count: jax.Array  # type: ignore[assignment]  # shadows tuple.count, as in optax
    last: PyTree

    def with_start(self, first: "TouchedState") -> "TouchedState":
        """Return the initial state of rows that start now: the next step has moved them."""
        now = lambda x: jnp.full_like(x, self.count + 1)
        return first._replace(last=jax.tree.map(now, first.last))


def touched() -> optax.GradientTransformationExtraArgs:
    """Keep for each row the step that last moved it, for `jmask.rows_since`.

    Last in a chain, it passes updates on. A row of a row-sparse update has moved, and so has
    each row of a dense one. It costs an int32 for each row.

    Returns:
        A transformation to chain behind others, inside of `jmask.lazy` or outside. Its steps
        are calls of its `update`, counted from 1: inside `skip_nonfinite` or `multi_steps`
        those that are taken, behind them in a chain all. `jmask.deferred` refuses it; do not
        chain it behind one either: `catch_up` moves rows that it does not see.

    Example:
        >>> import jax.numpy as jnp, optax, jmask
        >>> tx, table = optax.chain(jmask.sgd(1.0), jmask.touched()), jnp.zeros((5, 2))
        >>> state = tx.init(table)
        >>> for row in [3, 1, 4]:
        ...     grads = jmask.RowSparse([row], jnp.ones((1, 2)), (5, 2))
        ...     table, state = jmask.apply_gradients(tx, grads, state, table)
        >>> jmask.rows_since(state, 1)
        Array([1, 4], dtype=int32)
    """

    def rule(grad, param, last, count):
        return grad, jnp.full_like(last, count + 1)

    slots = {"last": Slot(0, per_row=True, dtype=jnp.int32)}
    steps = row_rule(TouchedState, slots, rule, lambda count: (count,))

    return watching(steps.init, lambda *args, **extra: steps.update(*args, **extra)[1])


def rows_since(opt_state: PyTree, step: Index, *, size: int | None = None) -> PyTree:
    """Return the ids of the rows that have moved after a step.

    Args:
        opt_state: a state that holds one of `jmask.touched`, as the state of a chain does.
        step: how many steps `touched` had counted when the parameters were last exported; may
            be traced.
        size: how many ids to return for each parameter, which under jit must be given: those
            left over are padding, V, and of more rows than that the first are returned.

    Returns:
        A tree like the parameters of ids (n,) along the first axis, sorted; of a scalar [0],
        or [] if it has not moved.

    Raises:
        TypeError: if `step` is no integer.
        ValueError: if `opt_state` holds no state of `touched`, or several; if it is traced and
            there is no `size`; or if `step` is beyond those that were counted.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx, table = jmask.touched(), jnp.zeros((4, 2))
        >>> grads = jmask.RowSparse([2, 1], jnp.ones((2, 2)), (4, 2))
        >>> _, state = tx.update(grads, tx.init(table), table)
        >>> jmask.rows_since(state, 0), jmask.rows_since(state, 0, size=3)
        (Array([1, 2], dtype=int32), Array([1, 2, 4], dtype=int32))
    """
    state = only_state(TouchedState, "opt_state", opt_state, "jmask.touched")
    if not isinstance(step, jax.core.Tracer):
        step = checked_integer("step", step)
        if not isinstance(state.count, jax.core.Tracer) and step > np.min(state.count):
            raise ValueError(
                f"`step` is {step}, and jmask.touched has counted {np.min(state.count)} steps: "
                "inside jmask.skip_nonfinite or jmask.multi_steps it counts those that are "
                "taken. Chain it behind them to count all."
            )
    if size is not None and checked_integer("size", size) < 0:
        raise ValueError(f"`size` must be 0 or more, got {size}.")

    def moved(last: jax.Array) -> jax.Array:
        # All rows of a table of a stack, or of a line, have moved where one has.
        last = jnp.atleast_1d(with_whole_rows(last))
        count, dtype = last.shape[0], id_dtype(last.shape[0])
        has_moved = jnp.any(last > step, range(1, last.ndim))
        if size is not None:
            (ids,) = jnp.nonzero(has_moved, size=size, fill_value=count)
            return ids.astype(dtype)
        if isinstance(has_moved, jax.core.Tracer):
            raise ValueError(
                "`size` must be given under jit, where the number of rows is not known."
            )
        return jnp.asarray(np.flatnonzero(has_moved).astype(dtype))

    return jax.tree.map(moved, state.last)


def take(tree: PyTree, ids: PyTree) -> PyTree:
    """Return rows of the tables of a tree, as `RowSparse`.

    Args:
        tree: arrays, or a model with functions, whose place is None in the result; tables may
            be sharded.
        ids: a tree of the same structure, of ids (n,), as `jmask.rows_since` returns it. Those
            that are no row are padding.

    Returns:
        A tree of `RowSparse`, with a scalar as it is. `jmask.to_arrays` makes arrays of it
        that any file holds.

    Raises:
        TypeError: if a leaf is no array, or ids are no integers.
        ValueError: if the structures differ, or `touched` was not there for a parameter.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> rows = jmask.tree.take({"t": jnp.array([1., 2., 3.])}, {"t": [2]})
        >>> jmask.tree.put({"t": jnp.zeros(3)}, rows)
        {'t': Array([0., 0., 3.], dtype=float32)}
    """

    def rows(path: KeyPath, x: Table, ids: Numbers) -> PyTree:
        if isinstance(ids, optax.MaskedNode):  # an empty tuple, which would be no rows
            raise ValueError(
                f"{leaf_name('ids', path)} is an optax.MaskedNode, since jmask.touched was not "
                "there for it: chain it behind optax.partition or optax.masked, not in them."
            )
        if not np.ndim(x):
            return x
        table = as_table(x)
        ids = checked_integers(leaf_name("ids", path)[1:-1], ids, "zero", "take(tree, ids)")
        values = embedding_lookup(table, ids, mode="zero")
        return RowSparse(ids, values, table.shape)

    return _mapped(rows, Model(tree, is_row_sparse), "ids", ids)


def put(tree: PyTree, rows: PyTree) -> PyTree:
    """Return a tree in which rows are replaced, bit for bit; in place where it is donated.

    Args:
        tree: arrays, or a model with functions.
        rows: a tree of the same structure, as `take` returns it: each `RowSparse` replaces the
            rows that it stores, each array all of its leaf.

    Raises:
        ValueError: if structures or shapes differ.

    Example:
        See `take`.
    """

    def replaced(path: KeyPath, old: Table, new: Argument) -> jax.Array:
        name = leaf_name("rows", path)
        if not is_row_sparse(new) and abstract_leaf(new) is None:
            raise not_an_array(name, new, "give what jmask.tree.take returned")
        if jnp.shape(new) != jnp.shape(old):
            raise ValueError(
                f"{name} has shape {jnp.shape(new)}, and `tree` has {jnp.shape(old)} there."
            )
        if not is_row_sparse(new):
            return jnp.asarray(new)
        return set_rows(jnp.asarray(old), new.row_ids(), new.values, new.order)

    model = Model(tree, is_row_sparse)
    return model.with_parameters(_mapped(replaced, model, "rows", rows))


def _mapped(function: Function, model: Model, name: str, others: PyTree) -> PyTree:
    """Return function(path, parameter, what the argument `name` has there), as a tree."""
    tree = model.parameters
    structure: PyTreeDef = jax.tree.structure(tree)
    leaves = jax.tree.leaves_with_path(tree)
    check_leaves("tree", tree)
    try:
        beside = structure.flatten_up_to(others)
    except ValueError as error:
        raise ValueError(f"`{name}` must have the structure of `tree`: {error}") from error
    pairs = zip(leaves, beside, strict=True)
    return structure.unflatten([function(path, x, y) for (path, x), y in pairs])
