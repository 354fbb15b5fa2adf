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
import functools
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from jmask._base.array_types import added, is_known, is_narrow, joint_dtype, wide
from jmask._base.fallback import (
    LARGE,
    collected,
    expect_dense,
    in_bytes,
    is_expected_dense,
    report_fallback,
)
from jmask._base.shardings import on_explicit_mesh
from jmask._base.types import Argument, Function, Gradient, PyTree, Transformation
from jmask._base.validation import leaf_name
from jmask._kernels.stochastic_rounding import check_key, stochastic_round
from jmask._lazy.checks import (
    Fit,
    NotRowLocalError,
    check_transformation,
    dense_gradient,
    gradient_and_valid,
    has_gradients,
    is_gradient_leaf,
    unchanged_where_masked,
)
from jmask._lazy.one_pass import Replaced, applied
from jmask._lazy.programs import taken, taking, with_steps_applied
from jmask._lazy.row_local import RowWise
from jmask._lazy.state_rows import check_made_by, check_nothing_held_back, held_back
from jmask._lazy.step import LazyStep, step_of
from jmask._tables.rows_at import add_to_dense
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import is_row_sparse
from jmask._tensors.storage import stored_values, with_stored_values


class Lifted(optax.GradientTransformationExtraArgs):
    """A transformation whose update is a step of another one on rows.

    Code that copies it as a pair of functions, as Keras does, drops `inner`.
    """

    is_a_step = True  # so `apply_gradients` need not look for steps in it
    inner: optax.GradientTransformationExtraArgs | None = None


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


# --- apply updates; and gradients, by the lazy steps of any transformation in one pass -------


@jax.named_scope("jmask.apply_updates")
def apply_updates(params: PyTree, updates: PyTree, *, key: jax.Array | None = None) -> PyTree:
    """Apply updates as `optax.apply_updates`, sparse and masked ones too.

    Stock `optax.apply_updates` does the same. This one also checks shapes by name, and
    takes trees that optax's tree mapping does not.

    Args:
        params: a tree of arrays, or a model; None leaves are kept, and so is what is no
            floating array in a tree that holds functions.
        updates: updates of the same structure; a None update leaves its parameter alone.
        key: of `jax.random`, a new one in each step. With it 16-bit parameters are rounded
            stochastically (see `stochastic_round`), so that updates too small to change
            them change them on average. The others are rounded to nearest as always.

    Returns:
        The updated parameters, dtypes kept.

    Raises:
        TypeError: if a parameter is sparse or masked (a `RowSparse` with all its rows is
            taken, and returned, as one), an update is complex and its parameter is not, or
            `key` is no key.
        ValueError: if an update does not fit its parameter, or the structures differ.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> u = jmask.RowSparse([1], jnp.array([0.5]), (3,))
        >>> jmask.apply_updates({"t": jnp.ones(3)}, {"t": u})
        {'t': Array([1. , 1.5, 1. ], dtype=float32)}
    """
    if key is not None:
        check_key(key)
    fit = _fit_of_updates(updates, params)
    return fit.as_given(with_updates(fit.params, fit.gradients, key))


def _fit_of_updates(updates: PyTree, params: PyTree) -> Fit:
    return Fit.of(updates, params, "apply_updates(params, updates)", partial=True)


def with_updates(params: PyTree, updates: PyTree, key: jax.Array | None = None) -> PyTree:
    """Return parameters with updates added, which fit them."""
    keys = (None if key is None else jax.random.fold_in(key, i) for i in itertools.count())

    def apply(update: Gradient | None, param: jax.Array | None) -> jax.Array | None:
        leaf_key = next(keys)
        if update is None or param is None:
            return param
        if isinstance(update, Replaced):
            return update.param
        if isinstance(update, MaskedTensor):
            step, valid = gradient_and_valid(update)
            step = with_stored_values(step, unchanged_where_masked(stored_values(step), valid))
        else:
            step = update
        if is_row_sparse(step):
            return add_to_dense(param, step, leaf_key)
        param = jnp.asarray(param)
        if leaf_key is None or not is_narrow(param.dtype):
            return added(param, step).astype(param.dtype)
        exact = added(param.astype(wide(joint_dtype(param, step))), step)
        return stochastic_round(exact, param.dtype, leaf_key)

    is_leaf = lambda x: x is None or is_gradient_leaf(x)
    return jax.tree.map(apply, updates, params, is_leaf=is_leaf)


@jax.named_scope("jmask.apply_gradients")
def apply_gradients(
    tx: Transformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    *,
    key: jax.Array | None = None,
    **extra_args: PyTree,
) -> tuple[PyTree, PyTree]:
    """Take one optimizer step: `tx.update` and `apply_updates`, in one pass where possible.

    For `jmask.sgd`, `adam`, `adagrad` and `ftrl`, and for `jmask.lazy` of an elementwise optax
    optimizer (Adam, AdamW, Adagrad, RMSProp, Lion, momentum ...), also behind
    `optax.clip_by_global_norm`, parameter and state of the touched rows are read and written
    by a single scatter with the optimizer as its combiner (on CPU and TPU). That copies no
    rows of them: on a CPU a step is half to nine tenths of the work. They may be anywhere in
    `tx`, as in `optax.partition` or a chain, where nothing else looks at their updates or the
    table.

    Args:
        tx: a transformation, for example `jmask.lazy(optax.adam(1e-3))`.
        grads: gradients as from `jmask.grad`; a BCOO counts as masked where it stores
            nothing.
        opt_state: the state of `tx`.
        params: the parameters, or the model that holds them together with functions.
        key: for stochastic rounding of 16-bit parameters, as in `apply_updates`.
        **extra_args: passed on to `tx.update`.

    Returns:
        The new parameters and the new state.

    Raises:
        TypeError: if `tx` is no transformation, or a plain one of optax that cannot take
            row-sparse gradients; if `opt_state` holds gradients, or `key` is no key.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx, params = jmask.sgd(0.5), jnp.ones((3, 1))
        >>> grads = jmask.RowSparse([1], jnp.ones((1, 1)), (3, 1))
        >>> params, state = jmask.apply_gradients(tx, grads, tx.init(params), params)
        >>> params.ravel()
        Array([1. , 0.5, 1. ], dtype=float32)
    """
    order = "jmask.apply_gradients(tx, grads, opt_state, params)"
    check_transformation("tx", tx, f"tx = jmask.adam(1e-3); {order}")
    if key is not None:
        check_key(key)
    if has_gradients(opt_state):
        # optax makes moments of the kind of a parameter.
        advice = "`params` does, too: use `jmask.lazy(tx)`, whose state is dense"
        advice = advice if has_gradients(params) else f"the order is {order}"
        raise TypeError(f"`opt_state` holds gradients: {advice}.")
    fit = Fit.of(grads, params)
    given: PyTree = (fit.gradients, opt_state, fit.params)

    def update() -> tuple[PyTree, PyTree]:
        with advising_lazy("tx", fit.gradients, opt_state):
            inner: Argument = tx
            with_extra = optax.with_extra_args_support(inner)
            return with_extra.update(*given, **extra_args)

    def update_that_fits() -> tuple[PyTree, PyTree]:
        updates, state = update()
        return _fit_of_updates(updates, fit.params).gradients, state

    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(given))
    if not is_traced or key is not None or not has_gradients(fit.gradients):
        updates, opt_state = update_that_fits()
    elif getattr(tx, "is_a_step", False):
        with taking(applied):
            updates, opt_state = update()
    else:
        updates, opt_state = with_steps_applied(update_that_fits, fit.params)
    return fit.as_given(with_updates(fit.params, updates, key)), opt_state


# --- plain optax --------------------------------------------------------------------------
#
# Optax maps arithmetic over the leaves of a gradient, and the ids of a `RowSparse` refuse it
# (see `_base.row_ids`). Where jmask calls the transformation, a note below JAX's error says
# what to do instead.


@contextlib.contextmanager
def advising_lazy(name: str, gradients: PyTree, state: PyTree) -> Iterator[None]:
    """Add the way out to errors of the transformation `name`, which gets sparse gradients."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        if has_gradients(gradients):
            advice = (
                "If a transformation of optax raised this, put it inside jmask.lazy, as in "
                "jmask.lazy(optax.adam(1e-3)), with all that is chained to it"
            )
            for kind, what, remedy in held_back(state):  # which `lazy` refuses
                advice = f"Its {kind} holds {what} back, of whole tables. {remedy[:-1]}"
            error.add_note(
                f"`{name}` got sparse gradients. {advice}: docs/errors.md says what such "
                "errors mean."
            )
        raise


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
