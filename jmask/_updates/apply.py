"""Putting gradients and updates to use: `densify`, `apply_updates`, `apply_gradients`."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmask._base.leaves import leaf_name
from jmask._base.precision import added, is_narrow, joint_dtype, wide
from jmask._kernels.stochastic_rounding import check_key, stochastic_round
from jmask._tables.add_to_dense import add_to_dense
from jmask._tables.deferral import NewTable
from jmask._tables.stored_table import is_stored_table
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import is_row_sparse
from jmask._updates.checks import (
    check_fits,
    check_transformation,
    naming_structures,
)
from jmask._updates.fit import Fit
from jmask._updates.masked_gradient import (
    gradient_and_valid,
    is_gradient_leaf,
    unchanged_where_masked,
)
from jmask._updates.plain_optax import advising_lazy


def densify() -> optax.GradientTransformation:
    """A transformation that makes sparse and masked gradients dense: zero semantics.

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
        gradients = Fit.of(updates, params).gradients
        _refuse_stored_tables(params)
        return jax.tree.map(_dense, gradients, is_leaf=is_gradient_leaf), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _refuse_stored_tables(params: Any) -> None:
    for table in jax.tree.leaves(params, is_leaf=is_stored_table):
        if is_stored_table(table):
            raise ValueError(
                f"a {type(table).__name__} has no dense gradient: leave out `densify()` (and "
                "`lazy_update=False`), or make the table an array, `table.todense()`."
            )


def _dense(gradient: Any) -> Any:
    if isinstance(gradient, MaskedTensor):
        return gradient.to_tensor(0)
    return gradient.todense() if is_row_sparse(gradient) else gradient


@jax.named_scope("jmask.apply_updates")
def apply_updates(
    params: optax.Params, updates: optax.Updates, *, key: jax.Array | None = None
) -> optax.Params:
    """`optax.apply_updates` for trees that may hold sparse or masked updates.

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
    keys = _key_of_each_leaf(key)
    fit = Fit.unchecked(updates, params)
    updates, params = fit.gradients, fit.params

    def apply(path: Any, update: Any, param: Any) -> Any:
        leaf_key = next(keys)
        if update is None or param is None:
            return param
        if is_gradient_leaf(param):
            raise TypeError(
                f"{leaf_name('params', path)} is a {type(param).__name__}: parameters are "
                "dense, or store all rows, and the order is apply_updates(params, updates)."
            )
        check_fits(path, update, param)
        if isinstance(update, NewTable):
            return update.table
        if is_stored_table(param):
            return add_to_dense(param, update, leaf_key)
        if isinstance(update, MaskedTensor):
            update, valid = gradient_and_valid(update)
            if is_row_sparse(update):
                update = update.with_values(unchanged_where_masked(update.values, valid))
            else:
                update = unchanged_where_masked(update, valid)
        if is_row_sparse(update):
            return add_to_dense(param, update, leaf_key)
        param = jnp.asarray(param)
        if leaf_key is None or not is_narrow(param.dtype):
            return added(param, update).astype(param.dtype)
        exact = added(param.astype(wide(joint_dtype(param, update))), update)
        return stochastic_round(exact, param.dtype, leaf_key)

    def is_leaf(x: Any) -> bool:
        return x is None or is_gradient_leaf(x) or isinstance(x, NewTable)

    with naming_structures(updates, params, "apply_updates(params, updates)"):
        new = jax.tree.map_with_path(apply, updates, params, is_leaf=is_leaf)
    return fit.as_given(new)


def _key_of_each_leaf(key: jax.Array | None) -> Iterator[jax.Array | None]:
    return (None if key is None else jax.random.fold_in(key, i) for i in itertools.count())


@jax.named_scope("jmask.apply_gradients")
def apply_gradients(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    *,
    key: jax.Array | None = None,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """One optimizer step: `tx.update` and `apply_updates`, in one pass where possible.

    For `jmask.sgd`, `adam`, `adagrad` and `ftrl`, and for `jmask.lazy` of an elementwise optax
    optimizer (Adam, AdamW, Adagrad, RMSProp, Lion, momentum ...), also behind
    `optax.clip_by_global_norm`, parameter and state of the touched rows are read and written
    by a single scatter with the optimizer as its combiner (on CPU and TPU). That copies no
    rows of them and takes half to three quarters of the time of a step on a CPU.

    Args:
        tx: a transformation, for example `jmask.lazy(optax.adam(1e-3))`.
        grads: gradients as from `jmask.grad`; a BCOO counts as masked where it stores
            nothing.
        opt_state: the state of `tx`.
        params: the parameters, or the model that holds them and functions beside them.
        key: for stochastic rounding of 16-bit parameters, as in `apply_updates`.
        **extra_args: passed on to `tx.update`.

    Returns:
        The new parameters and the new state.

    Raises:
        TypeError: if `tx` is no transformation, or a plain one of optax that cannot take
            row-sparse gradients; if `opt_state` holds gradients.

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
    if any(map(is_gradient_leaf, jax.tree.leaves(opt_state, is_leaf=is_gradient_leaf))):
        raise TypeError(f"`opt_state` holds gradients: the order is {order}.")
    fit = Fit.of(grads, params)
    one_pass = getattr(tx, "apply_gradients", None)
    if one_pass is not None and key is None and not extra_args:
        new, opt_state = one_pass(fit.gradients, opt_state, fit.params)
        return fit.as_given(new), opt_state
    tx, stored = optax.with_extra_args_support(tx), fit.model.parameters
    with advising_lazy("tx", fit.gradients, stored):
        updates, opt_state = tx.update(fit.gradients, opt_state, stored, **extra_args)
    return apply_updates(params, updates, key=key), opt_state
