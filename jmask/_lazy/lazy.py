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

import contextlib
import dataclasses

import jax
import optax
from jax.core import Tracer

from jmask._base.types import PyTree
from jmask._lazy.one_pass import (
    OnePassTransformation,
    applied_in_one_pass,
    tables_by_rows,
    tables_whose_rows_mix,
)
from jmask._lazy.row_local import RowWise
from jmask._lazy.step import LazyStep, has_entries, with_whole_rows
from jmask._tensors.row_sparse import is_row_sparse
from jmask._updates.apply import Fit, dense_parameters, noticing_dense_tables, with_updates
from jmask._updates.checks import (
    NotRowLocalError,
    check_parameters,
    check_transformation,
    dense_gradient,
    has_16_bit_sums,
    has_gradients,
    in_lines,
    is_gradient_leaf,
    with_wide_rows,
)
from jmask._updates.state_rows import check_made_by, states_of

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


def lazy(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
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

    def init(params):
        check_parameters(params)
        state = inner.init(dense_parameters(params))
        _check_not_deferring(state)
        return state

    @jax.named_scope("jmask.lazy.update")
    def update(updates, state, params=None, **extra_args):
        fit = Fit.of(updates, params)
        for name, value in extra_args.items():
            if has_gradients(value):
                raise NotRowLocalError(
                    f"the extra argument `{name}` holds a row-sparse gradient, and what takes "
                    "whole gradients (a line search) is not row-local"
                )
        _check_not_deferring(state)
        if has_gradients(fit.gradients):
            return step_of(inner, fit.gradients, state, fit.params, extra_args).update()
        if isinstance(inner, RowWise):
            check_made_by(inner.init, state, fit.params)
        return inner.update(fit.gradients, state, fit.params, **extra_args)

    def apply(grads, state, params):
        if has_gradients(grads):
            _check_not_deferring(state)
            return applied(step_of(inner, grads, state, params, {}), params)
        updates, state = update(grads, state, params)
        return with_updates(params, updates), state

    lifted = OnePassTransformation(init, noticing_dense_tables(update))
    lifted.apply_gradients = noticing_dense_tables(apply)
    lifted.inner = inner
    return lifted


def step_of(
    inner: optax.GradientTransformationExtraArgs,
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    extra_args: dict[str, PyTree],
) -> LazyStep:
    """Return the step of `inner` on rows, proved.

    Single entries of a table are rows of one entry where `inner` works entry by entry, else
    they are rows of zeros but for an entry.

    Rows of 16 bits are summed in float32. An `inner` that does not take gradients wider than
    its state gets the sums in 16 bits, as from JAX: one branch of the `lax.cond` in
    `optax.novograd` has the dtype of the state, the other has the gradient's.
    """

    def proved(updates: PyTree, same_dtypes: bool) -> LazyStep:
        updates = jax.tree.map(in_lines, updates, is_leaf=is_gradient_leaf)
        return LazyStep.of(inner, updates, state, params, extra_args).proved(
            same_dtypes=same_dtypes
        )

    def of_entries_or_rows(updates: PyTree, same_dtypes: bool) -> LazyStep:
        if has_entries(updates):
            # Refused may be a state with one number for each row.
            with contextlib.suppress(NotRowLocalError):
                step = proved(updates, same_dtypes)
                if not tables_by_rows(step):
                    return step
        step = proved(with_whole_rows(updates), same_dtypes)
        lines = {i for i, x in enumerate(step.gradients) if x.has_lines()}
        if lines and lines & tables_whose_rows_mix(step):
            raise NotRowLocalError(
                "it works row by row, and the table is packed: it would take lines of several "
                "rows for rows",
                "Leave the table unpacked, `jmask.embedding_lookup(lines, jnp.arange(V), "
                "width=D)`, or use an optimizer that works entry by entry.",
            )
        return step

    if has_16_bit_sums(updates):
        with contextlib.suppress(TypeError):
            return of_entries_or_rows(with_wide_rows(updates), True)
    return of_entries_or_rows(updates, False)


def applied(step: LazyStep, params: PyTree) -> tuple[PyTree, PyTree]:
    """Return new parameters and state, in one pass where there is one."""
    # Outside jit a scatter with the optimizer inside would be compiled anew in each step.
    is_traced = any(
        isinstance(x, Tracer) for x in jax.tree.leaves([x.value for x in step.leaves])
    )
    result = applied_in_one_pass(step) if is_traced else None
    if result is None:
        updates, state = step.update()
        result = with_updates(params, updates), state
    return result


def densified(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return `tx` for row-sparse gradients, which become dense: all rows are updated.

    It has the state of `tx`, and not of a chain, so that a run can switch.
    """
    init = lazy(tx).init

    def update(updates, state, params=None, **extra_args):
        fit = Fit.of(updates, params)
        check_made_by(tx.init, state, fit.params, dtypes=isinstance(tx, RowWise))
        is_stack = lambda x: is_row_sparse(x) and x.leading > 1  # which is one table
        dense = lambda x: x if is_stack(x) else dense_gradient(x)
        gradients = jax.tree.map(dense, fit.gradients, is_leaf=is_gradient_leaf)
        if has_gradients(gradients):
            step = LazyStep.of(tx, gradients, state, fit.params, extra_args)
            whole = lambda x: dataclasses.replace(x, value=dense_gradient(x.value), table=None)
            return dataclasses.replace(step, leaves=list(map(whole, step.leaves))).update()
        return tx.update(gradients, state, fit.params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_not_deferring(state: PyTree) -> None:
    for node in states_of(tuple(_HELD_BACK), state):
        what, remedy = next(x for kind, x in _HELD_BACK.items() if isinstance(node, kind))
        raise NotRowLocalError(
            f"{type(node).__name__} holds {what} back for a later step, and a row that is not "
            "among those touched then would lose them",
            remedy,
        )
