"""Bounds on the norms of rows: of the gradient before an optimizer, of the table after it.

max_norm 1:   row [3, 4] -> [.6, .8],    row [.3, .4] stays
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmask._base.array_types import added, joint_dtype, wide
from jmask._base.norms import shortened
from jmask._lazy.deferred_step import has_deferred
from jmask._lazy.lazy import lazy
from jmask._optim.hyperparameters import check_number, check_positive
from jmask._updates.checks import as_gradients, is_gradient_leaf, masked_as


def clip_by_row_norm(
    max_norm: Any,
    ord: Any = 2,  # noqa: A002
) -> optax.GradientTransformationExtraArgs:
    """A transformation that scales down rows of the gradient whose norm exceeds `max_norm`.

    One example with a huge loss then moves the rows it looked up by a bounded amount and no
    others, which clipping by the global norm cannot do. Rows are those of axis 0 of every
    leaf; of a `RowSparse`, equal indices are added first.

    Args:
        max_norm: positive; a number or a (traced) scalar.
        ord: the order of the norm, 1, 2 or inf.

    Returns:
        A transformation to chain before any other, inside `jmask.lazy` or outside. What is
        masked in a gradient counts as zero in the norm of its row, and stays masked.

    Raises:
        ValueError: if `max_norm` is a number that is not positive, or `ord` is below 1.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.clip_by_row_norm(1.0)
        >>> grads = jmask.RowSparse([1, 2], jnp.array([[3., 4.], [.3, .4]]), (5, 2))
        >>> tx.update(grads, tx.init(jnp.zeros((5, 2))))[0].values
        Array([[0.6, 0.8],
               [0.3, 0.4]], dtype=float32)
    """
    _check(max_norm, ord)

    def clip(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        return jax.tree.map(lambda g: _clipped(g, max_norm, ord), updates)

    lifted = lazy(optax.stateless(clip))

    def update(updates, state, params=None, **extra_args):
        updates = as_gradients(updates)
        # Of a deferred table only the optimizer takes a step: what is clipped is its gradient.
        params = None if has_deferred(params) else params
        clipped, state = lifted.update(updates, state, params, **extra_args)
        return jax.tree.map(masked_as, updates, clipped, is_leaf=is_gradient_leaf), state

    return optax.GradientTransformationExtraArgs(lifted.init, update)


def max_row_norm(
    max_norm: Any,
    ord: Any = 2,  # noqa: A002
) -> optax.GradientTransformationExtraArgs:
    """A transformation that keeps the rows of the parameters within `max_norm`.

    Last in a chain, it changes the updates so that the rows they touch come out with at most
    that norm. Rows that are not touched stay, whatever their norm.

    The updates of a masked gradient are arrays or rows without a mask, -0.0 where it was: of
    these every entry is touched. With masked gradients put the optimizer and this into one
    `jmask.lazy`, which knows the mask: `jmask.lazy(optax.chain(optax.sgd(1.0), ...))`.

    Args:
        max_norm: positive; a number or a (traced) scalar.
        ord: the order of the norm, 1, 2 or inf.

    Returns:
        A transformation that needs `params`. Restrict it to tables by `optax.masked`: of a
        parameter of one dimension every entry is a row.

    Raises:
        ValueError: if `max_norm` is a number that is not positive, or `ord` is below 1.

    References:
        The `max_norm` of torch's Embedding, which acts before the lookup instead.

    Example:
        >>> import jax.numpy as jnp, optax, jmask
        >>> tx = optax.chain(jmask.sgd(1.0), jmask.max_row_norm(1.0))
        >>> table = jnp.ones((3, 2))
        >>> grads = jmask.RowSparse([1], jnp.array([[-2., -3.]]), (3, 2))
        >>> updates, _ = tx.update(grads, tx.init(table), table)
        >>> optax.apply_updates(table, updates)
        Array([[1. , 1. ],
               [0.6, 0.8],
               [1. , 1. ]], dtype=float32)
    """
    _check(max_norm, ord)

    def project(update: jax.Array, param: jax.Array) -> jax.Array:
        param = jnp.asarray(param, wide(joint_dtype(update, param)))
        return _bounded(added(param, update), max_norm, ord) - param

    def within(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        if params is None:
            raise ValueError("`params` must be given to update(): max_row_norm bounds them.")
        return jax.tree.map(project, updates, params)

    return lazy(optax.stateless(within))


def _clipped(gradient: Any, max_norm: Any, order: Any) -> jax.Array:
    gradient = jnp.asarray(gradient)
    return _bounded(gradient, max_norm, order).astype(gradient.dtype)


def _check(max_norm: Any, order: Any) -> None:
    check_positive("max_norm", max_norm)
    check_number("ord", order)
    if not order >= 1:
        raise ValueError(f"`ord` must be at least 1, got {order}.")


def _bounded(rows: jax.Array, max_norm: Any, order: Any) -> jax.Array:
    """Rows (n, *row), in float32 at least, scaled to a norm of at most `max_norm`."""
    rows = rows.astype(wide(rows.dtype))
    if rows.ndim == 0:
        return jnp.clip(rows, -max_norm, max_norm)
    return shortened(rows, max_norm, order)
