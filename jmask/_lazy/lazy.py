"""Lift any row-local optax transformation to the cost of the rows touched.

    gradient  RowSparse(ids, g)            ids coalesced first
    rows of   the parameter and of every state array with one row per table row: gathered
    update    inner.update(g, state rows, parameter rows)      all other leaves as they are
    result    RowSparse(ids, updates); state rows scattered back; other rows not touched

Semantics are masked: a row that is not in the gradient keeps its parameter and its state
bit for bit, as in torch's SparseAdam and MXNet's `lazy_update=True`; with a `MaskedTensor`
gradient, on any storage, so does every entry that is masked. On the rows of
the gradient the result equals `inner` on the dense gradient. That is proved when `inner` is
first traced (see `row_local`); an `inner` without a proof is refused.

Which state arrays hold rows is found from the shapes that `inner.init` gives them; see
`state_rows`.
"""

import functools
import math
from typing import TypeGuard

import jax
import jax.numpy as jnp
import optax

from jmask._base.types import (
    Function,
    Gradients,
    OptState,
    Params,
    PyTree,
    PyTreeDef,
    Table,
)
from jmask._deferred.step import deferred_step, has_deferred, without_rows
from jmask._lazy.one_pass import OnePassTransformation, applied_in_one_pass
from jmask._lazy.proved_update import LazyCall, ProvedUpdate, proved
from jmask._tables.stored_table import as_one_table, is_stored_table, shape_of
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._updates.apply import (
    Fit,
    apply_updates,
    dense_parameters,
    densify,
    noticing_dense_tables,
)
from jmask._updates.checks import (
    NotRowLocalError,
    check_parameters,
    check_transformation,
    has_16_bit_sums,
    has_gradients,
    is_gradient_leaf,
    naming_structures,
    with_wide_rows,
)

# What transformations hold back until a later step, by their states, and what to do instead. A
# row held back need not be among the rows that the later step touches: it would be lost.
_ACCUMULATE = "Use jmask.multi_steps(...), or jmask.tree.add and one update."
_HELD_BACK: dict[type, tuple[str, str]] = {
    optax.MultiStepsState: ("gradients", _ACCUMULATE),
    optax.ApplyEvery: ("gradients", _ACCUMULATE),
    optax.contrib.SAMState: (
        "the way back from where it takes the second gradient",
        "Take both gradients in one step, of the same rows, and give the second to jmask.lazy.",
    ),
    optax.LookaheadState: (
        "slow parameters",
        "Use jmask.densify() before it, or jmask.ema for averages of parameters.",
    ),
}


def lazy(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Lift an optax transformation to row-sparse gradients, touching only their rows.

    `init` is `inner.init`, so the optimizer state has optax's standard layout: a run can
    switch between `inner` and `lazy(inner)` at any step, and checkpoints are the same.
    Leaves of the gradient that are not `RowSparse` are updated by `inner` as usual, in the
    same call, so that for example a global norm covers them all. With donated arguments
    under jit, tables and state are updated in place.

    Args:
        inner: a row-local transformation or chain: the result for a row may depend on that
            row of gradient, state and parameter, on scalars, and on sums over the gradient
            (global norm). Checked by analysis when first traced.

    Returns:
        A transformation whose updates are `RowSparse` where the gradient was, and arrays
        (or `RowSparse`) that are -0.0 under the mask where it was masked. Apply them with
        `optax.apply_updates` or `jmask.apply_updates`.

    Raises:
        ValueError: from `update`, if `inner` is not row-local (LARS, LAMB, Adafactor, ...),
            naming the operation that mixes or counts rows; or if a gradient does not fit its
            parameter or the state was not made by this `init`.
        TypeError: if a parameter is sparse (but for a `RowSparse` with all its rows).

    Example:
        >>> import jax.numpy as jnp, optax, jmask
        >>> tx = jmask.lazy(optax.sgd(0.5, momentum=0.9))
        >>> params = {"table": jnp.ones((4, 2))}
        >>> state = tx.init(params)
        >>> grads = {"table": jmask.RowSparse([2], jnp.ones((1, 2)), (4, 2))}
        >>> updates, state = tx.update(grads, state, params)
        >>> optax.apply_updates(params, updates)["table"]
        Array([[1. , 1. ],
               [1. , 1. ],
               [0.5, 0.5],
               [1. , 1. ]], dtype=float32)
    """
    check_transformation("inner", inner, "jmask.lazy(optax.adam(1e-3))")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> optax.OptState:
        check_parameters(params)
        state = inner.init(without_rows(dense_parameters(params)))
        _check_not_deferring(state)
        return state

    @jax.named_scope("jmask.lazy.update")
    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: PyTree,
    ) -> tuple[optax.Updates, optax.OptState]:
        _check_not_deferring(state)
        check_parameters(params)
        fit = Fit.of(updates, params)
        updates, params = fit.gradients, fit.params
        if not (has_gradients(updates) or has_deferred(params)):
            with naming_structures(updates, params):
                return inner.update(updates, state, params, **extra_args)
        for name, value in extra_args.items():
            if has_gradients(value):
                raise NotRowLocalError(
                    f"the extra argument `{name}` holds a row-sparse gradient, and what takes "
                    "whole gradients (a line search) is not row-local"
                )
        return update_tables(updates, state, params, **extra_args)

    def update_rows_of(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        **extra_args: PyTree,
    ) -> tuple[optax.Updates, optax.OptState]:
        return prepared(updates, state, params, extra_args).update()

    update_tables = on_every_table(init, update, update_rows_of)

    def prepared(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None,
        extra_args: dict[str, PyTree],
    ) -> LazyCall | ProvedUpdate:
        """Return the call, proved if `inner` is to run on rows.

        Rows of 16 bits are summed in float32. An `inner` that does not take gradients wider
        than its state gets the sums in 16 bits, as from JAX: one branch of the `lax.cond` in
        `optax.novograd` has the dtype of the state, the other has the gradient's.
        """
        if has_16_bit_sums(updates):
            call = LazyCall.of(inner, with_wide_rows(updates), state, params, extra_args)
            try:
                return proved(call, same_dtypes=True)
            except TypeError:
                pass
        call = LazyCall.of(inner, updates, state, params, extra_args)
        return proved(call) if call.has_rows() else call

    def apply_rows_of(
        grads: optax.Updates, state: optax.OptState, params: optax.Params
    ) -> tuple[optax.Params, optax.OptState]:
        # Without rows there is nothing to gain from one pass, and nothing to prove.
        if not any(map(is_row_sparse, jax.tree.leaves(grads, is_leaf=is_gradient_leaf))):
            updates, state = update(grads, state, params)
            return apply_updates(params, updates), state
        _check_not_deferring(state)
        step = prepared(grads, state, params, {})
        assert isinstance(step, ProvedUpdate), "a RowSparse is among the gradients"
        result = applied_in_one_pass(step)
        if result is None:
            updates, state = step.update()
            return apply_updates(params, updates), state
        return result

    lifted = OnePassTransformation(init, noticing_dense_tables(update))
    apply_tables = on_every_table(init, update, apply_rows_of, applies=True)
    lifted.apply_gradients = noticing_dense_tables(apply_tables)
    return lifted


def densified(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` for row-sparse gradients, which become dense: all rows are updated.

    The state is that of `tx`, and not of a chain, so that a run can switch.
    """
    to_dense, init = densify(), lazy(tx).init

    def update(updates, state, params=None, **extra_args):
        updates, _ = to_dense.update(updates, to_dense.init(params), params)
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, on_every_table(init, update, update))


def _check_not_deferring(state: optax.OptState) -> None:
    for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, tuple(_HELD_BACK))):
        for kind, (what, remedy) in _HELD_BACK.items():
            if isinstance(node, kind):
                raise NotRowLocalError(
                    f"{kind.__name__} holds {what} back for a later step, and a row that is "
                    "not among those touched then would lose them",
                    remedy,
                )


# --- every kind of table -----------------------------------------------------------------
#
# Run a step of plain tables on stacked and deferred ones; stacked tables are one table.
#
#     gradient   RowSparse (M, V, D), leading=2        x.flat(), of shape (M * V, D)
#     parameter  (M, V, D)                             reshaped to (M * V, D)
#     state      of `init` for (M, V, D)               reshaped to `init` for (M * V, D)
#
# A reshape moves nothing. The results of the step get the old shapes again. What deferred
# tables are for a step is in `_deferred.step`.


def on_every_table(
    init: optax.TransformInitFn, update: Function, step: Function, *, applies: bool = False
) -> Function:
    """Return `step`, which takes plain tables, for stacked and deferred ones too.

    Args:
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
        again = functools.partial(run, **extra_args)
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
    restored = tree.flatten_up_to(results)
    for i, (x, g) in enumerate(zip(restored, gradients, strict=True)):
        if _is_stacked(g):
            restored[i] = x.stacked_as(g) if is_row_sparse(x) else jnp.reshape(x, g.shape)
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
