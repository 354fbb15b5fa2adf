"""Run a step of plain tables on stacked and deferred ones; stacked tables are one table.

    gradient   RowSparse (M, V, D), leading=2        x.flat(), of shape (M * V, D)
    parameter  (M, V, D)                             reshaped to (M * V, D)
    state      of `init` for (M, V, D)               reshaped to `init` for (M * V, D)

A reshape moves nothing. The results of the step get the old shapes again. What deferred tables
are for a step is in `_deferred.step`.
"""

import functools
import math
from typing import TypeGuard

import jax
import jax.numpy as jnp
import optax

from jmask._base.types import (
    Function,
    Gradient,
    Gradients,
    OptState,
    Params,
    PyTree,
    PyTreeDef,
    Table,
)
from jmask._deferred.step import deferred_step, has_deferred
from jmask._tables.stored_table import as_one_table, is_stored_table, shape_of
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._updates.checks import check_parameters, is_gradient_leaf


def on_every_table(
    init: optax.TransformInitFn, update: Function, step: Function, *, applies: bool = False
) -> Function:
    """Return `step`, which takes plain tables, for stacked and deferred ones too.

    Args:
        init, update: of the transformation.
        step: (gradients, state, params, **extra_args) -> (updates or new parameters, state).
        applies: whether it returns new parameters.
    """

    def run(
        updates: Gradients,
        state: OptState,
        params: Params | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, OptState]:
        check_parameters(params)
        return on_tables(updates, state, params, **extra_args)

    def on_tables(
        updates: Gradients, state: OptState, params: Params | None, **extra_args: PyTree
    ) -> tuple[PyTree, OptState]:
        again = functools.partial(on_tables, **extra_args)
        if any(map(_is_stacked, jax.tree.leaves(updates, is_leaf=is_gradient_leaf))):
            return _stacked_step(init, again, updates, state, params)
        if has_deferred(params):
            update_of = functools.partial(update, **extra_args)
            return deferred_step(init, update_of, again, updates, state, params, applies)
        return step(updates, state, params, **extra_args)

    return run


def _is_stacked(x: object) -> TypeGuard[RowSparse]:
    """Decide whether `x` is the row-sparse gradient of stacked tables."""
    return is_row_sparse(x) and x.leading > 1


def _stacked_step(
    init: optax.TransformInitFn,
    run: Function,
    updates: Gradients,
    state: OptState,
    params: Params | None,
) -> tuple[PyTree, OptState]:
    """Run a step on the tables (M * V, *row) that stacked tables are.

    Args:
        init: of the transformation.
        run: the step of plain tables.
        updates, state, params: of the step; the parameters may be None.

    Raises:
        ValueError: if the state has one entry for each of the M tables: what is computed for
            a row has none of its own then.
    """
    tree: PyTreeDef = jax.tree.structure(updates, is_leaf=is_gradient_leaf)
    gradients = jax.tree.leaves(updates, is_leaf=is_gradient_leaf)
    leaves = gradients if params is None else tree.flatten_up_to(params)
    shapes = list(map(shape_of, leaves))

    def state_for(shapes: list[jax.ShapeDtypeStruct]) -> PyTree:
        return jax.eval_shape(init, tree.unflatten(shapes))

    usual, flat = state_for(shapes), list(shapes)
    for i, (x, g) in enumerate(zip(shapes, gradients, strict=True)):
        if not _is_stacked(g):
            continue
        flat[i] = x.update(shape=g.flat().shape)
        # The rows of a gradient of entries are finer than those that have a number each.
        if g.leading == g.ndim and _sizes(state_for(flat)) != _sizes(usual):
            gradients[i] = _whole_rows(g)
            flat[i] = x.update(shape=gradients[i].flat().shape)
    wanted = state_for(flat)
    if params is not None:
        params = tree.unflatten(
            as_one_table(x, g) if _is_stacked(g) else x
            for x, g in zip(leaves, gradients, strict=True)
        )
    results, new_state = run(
        tree.unflatten([g.flat() if _is_stacked(g) else g for g in gradients]),
        _state_as(state, usual, wanted),
        params,
    )
    restored = [
        _restored(x, g) if _is_stacked(g) else x
        for x, g in zip(tree.flatten_up_to(results), gradients, strict=True)
    ]
    return tree.unflatten(restored), _state_as(new_state, wanted, usual)


def _sizes(shapes: PyTree) -> list[int]:
    return [x.size for x in jax.tree.leaves(shapes)]


def _whole_rows(gradient: RowSparse) -> RowSparse:
    """Return a gradient of entries (V, D) as rows, of zeros but for an entry each."""
    size = gradient.shape[-1]
    ids = gradient.flat().row_ids()
    place = jax.lax.broadcasted_iota(ids.dtype, (gradient.nse, size), 1)
    values = jnp.where(place == (ids % size)[:, None], gradient.values[:, None], 0)
    return RowSparse.from_rows(
        ids // size, values, gradient.shape, coalesced=False, leading=gradient.leading - 1
    )


def _restored(x: Gradient | Table, gradient: RowSparse) -> Gradient | Table:
    """Return an update or a new parameter in the shape of the gradient of stacked tables."""
    return x.stacked_as(gradient) if is_row_sparse(x) else jnp.reshape(x, gradient.shape)


def _state_as(state: OptState, old: PyTree, new: PyTree) -> OptState:
    """Return the state with each array that has a shape of `old` in the shape of `new`."""
    old, new = ([x.shape for x in jax.tree.leaves(shapes)] for shapes in (old, new))
    leaves: list[Table] = jax.tree.leaves(state, is_leaf=is_stored_table)
    tree: PyTreeDef = jax.tree.structure(state, is_leaf=is_stored_table)
    if len(leaves) != len(old):  # not the state of `init`, as `run` will say
        return state
    moved = []
    for x, before, after in zip(leaves, old, new, strict=True):
        if before == after:
            moved.append(x)
            continue
        if jnp.shape(x) != before:
            raise ValueError(
                f"`state` holds an array of shape {jnp.shape(x)}, expected {before} for these "
                "stacked tables."
            )
        if math.prod(before) != math.prod(after):
            raise ValueError(
                f"`state` holds an array of shape {before} for stacked tables, one entry for "
                "each table and none for each of its rows: make one table of them, "
                "`table.reshape(-1, table.shape[-1])`, and number its rows."
            )
        moved.append(jnp.reshape(x, after))
    return tree.unflatten(moved)
