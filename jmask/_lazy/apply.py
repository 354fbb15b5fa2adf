"""Apply updates; and gradients, by the lazy steps of any transformation in one pass."""

import contextlib
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from jmask._base.array_types import added, is_narrow, joint_dtype, wide
from jmask._base.types import Argument, Gradient, PyTree, Transformation
from jmask._kernels.stochastic_rounding import check_key, stochastic_round
from jmask._lazy.checks import (
    Fit,
    check_transformation,
    gradient_and_valid,
    has_gradients,
    is_gradient_leaf,
    unchanged_where_masked,
)
from jmask._lazy.one_pass import Replaced, applied
from jmask._lazy.programs import taking, with_steps_applied
from jmask._lazy.state_rows import held_back
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
