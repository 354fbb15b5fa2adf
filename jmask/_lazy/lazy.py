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

import dataclasses
import functools
import math

import jax
import optax

from jmask._base.array_types import is_known
from jmask._base.fallback import (
    LARGE,
    collected,
    expect_dense,
    in_bytes,
    is_expected_dense,
    report_fallback,
)
from jmask._base.shardings import on_explicit_mesh
from jmask._base.types import Function, PyTree
from jmask._base.validation import leaf_name
from jmask._lazy.apply import Lifted
from jmask._lazy.checks import (
    Fit,
    NotRowLocalError,
    check_transformation,
    dense_gradient,
    has_gradients,
    is_gradient_leaf,
)
from jmask._lazy.programs import taken
from jmask._lazy.row_local import RowWise
from jmask._lazy.state_rows import check_made_by, check_nothing_held_back
from jmask._lazy.step import LazyStep, step_of


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
        state = inner.init(Fit.alone(params).params)
        check_nothing_held_back(state)
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
        if has_gradients(fit.gradients):
            with on_explicit_mesh((state, params)):  # a gradient may be of no mesh
                return taken(step_of(inner, fit.gradients, state, fit.params, extra_args))
        check_nothing_held_back(state)
        if isinstance(inner, RowWise):
            check_made_by(inner.init, state, fit.params)
        return inner.update(fit.gradients, state, fit.params, **extra_args)

    lifted = Lifted(init, noticing_dense_tables(update))
    lifted.inner = inner
    return lifted


def densify() -> optax.GradientTransformation:
    """Return a transformation that makes sparse and masked gradients dense: zero semantics.

    Chained before an optimizer it gives exactly what the optimizer does with the dense
    gradient of `jax.grad` (MXNet's `lazy_update=False`): momentum and weight decay act on
    every row. It costs O(table).

    Example:
        >>> import jax.numpy as jnp, optax, jmask
        >>> tx = optax.chain(jmask.densify(), optax.sgd(1.0))
        >>> params = jnp.ones((3, 1))
        >>> grads = jmask.RowSparse([1, 1], jnp.ones((2, 1)), (3, 1))
        >>> updates, _ = tx.update(grads, tx.init(params))
        >>> updates.ravel()
        Array([-0., -2., -0.], dtype=float32)
    """

    def update(updates, state, params=None):
        # The gradient is of the fast parameters of a pair.
        fast = params.fast if isinstance(params, optax.LookaheadParams) else params
        return Fit.of(updates, fast).dense(), state

    return optax.GradientTransformation(optax.init_empty_state, update)


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
        gradients = fit.dense(but_stacks=True)  # which are one table
        if has_gradients(gradients):
            step = LazyStep.of(tx, gradients, state, fit.params, extra_args, by_lines=False)
            whole = lambda x: dataclasses.replace(x, given=dense_gradient(x.given), table=None)
            return dataclasses.replace(step, leaves=list(map(whole, step.leaves))).update()
        return tx.update(gradients, state, fit.params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


# --- dense tables -------------------------------------------------------------------------
#
# Warn when a lazy optimizer gets the dense gradients of `jax.grad`: the user switched the
# optimizer, and not the gradient function.
#
#     jmask.lazy(optax.adam(1e-3)) with jax.value_and_grad        dense, and right: but O(table)
#
# Gradients that `jmask.grad` itself made dense are not reported: it has said why.

# A large array is a table, and no weight of a layer, if it has so many rows, and so many rows
# for each entry of a row.
_ROWS, _ROWS_FOR_EACH_ENTRY = 1000, 8


def noticing_dense_tables(step: Function) -> Function:
    """Wrap `step(grads, ...)` of a lazy optimizer: it reports dense gradients of large tables.

    If a gradient is sparse or masked, the gradient function was switched: nothing is reported.
    Reports are muted inside `step`, where transformations get no gradients of the user's.
    """

    @functools.wraps(step)
    def noticing(grads: PyTree, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        for path, x in [] if has_gradients(grads) else jax.tree.leaves_with_path(grads):
            if is_table(x) and not is_expected_dense(x):
                report_fallback(
                    f"a lazy optimizer got a dense gradient {leaf_name('updates', path)} for a "
                    f"{x.dtype}{list(x.shape)} table ({in_bytes(x.size * x.dtype.itemsize)}) "
                    "and no row-sparse one, and updates all of it: take gradients with "
                    "jmask.value_and_grad in place of jax.value_and_grad, or the optimizer "
                    "without jmask.lazy"
                )
        with collected():
            result, state = step(grads, *args, **kwargs)
        # The next lazy optimizer of a chain gets updates: these are no gradients to notice.
        for x in filter(is_table, jax.tree.leaves(result, is_leaf=is_gradient_leaf)):
            expect_dense(x)
        return result, state

    return noticing


def noticed_as(gradients: PyTree, updates: PyTree) -> PyTree:
    """Mark dense tables in `updates` as reported where they were in the gradients."""
    given, new = (jax.tree.leaves(x, is_leaf=is_gradient_leaf) for x in (gradients, updates))
    for gradient, update in zip(given, new, strict=True):
        if is_expected_dense(gradient) and is_table(update):
            expect_dense(update)
    return updates


def is_table(x: object) -> bool:
    """Decide whether an array is large and has many rows, long against a row."""
    if not isinstance(x, jax.Array) or x.ndim < 2 or not is_known(*x.shape):
        return False
    rows, entries = x.shape[0], math.prod(x.shape[1:])
    return (
        rows * entries * x.dtype.itemsize >= LARGE
        and rows >= _ROWS
        and rows >= _ROWS_FOR_EACH_ENTRY * entries
    )
