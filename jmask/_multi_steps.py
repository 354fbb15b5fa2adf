"""Accumulating the gradients of k microbatches, then one step: `optax.MultiSteps` for rows.

    microbatch 1    rows 3, 7          kept          no update
    microbatch 2    rows 7, 9          kept          no update
    microbatch 3    rows 1             kept          one step with the mean over rows 1 3 7 9

Dense gradients are added up. The rows of sparse ones are put side by side, in buffers with
room for k microbatches, so that none is lost: inside `lazy`, `optax.MultiSteps` would forget
the rows that the last microbatch does not touch, and is refused.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmask._array_leaves import leaf_name
from jmask._conditional_step import apply_if, update_if
from jmask._lazy_one_pass import OnePassTransformation
from jmask._parameters import check_transformation
from jmask._row_ids import id_dtype
from jmask._row_sparse import RowSparse, is_row_sparse


class StoredRows(NamedTuple):
    """The rows of the microbatches so far: ids (k n,), values (k n, *row), padding after."""

    ids: jax.Array
    values: jax.Array


class MultiStepsState(NamedTuple):
    """State of `multi_steps`.

    Attributes:
        mini_step: microbatches since the last step, int32.
        accumulated: their gradients: sums, or `StoredRows`.
        inner_state: of the transformation.
    """

    mini_step: jax.Array
    accumulated: Any
    inner_state: Any


def multi_steps(
    inner: optax.GradientTransformation,
    every_k: int,
    like: Any,
    *,
    use_grad_mean: bool = True,
) -> OnePassTransformation:
    """One step of `inner` for every k gradients, with their mean: larger batches in parts.

    Args:
        inner: any transformation, `jmask.adam(...)` or `jmask.lazy(...)`.
        every_k: k, the number of microbatches.
        like: the gradient of one microbatch or its shapes, from
            `jax.eval_shape(jmask.grad(loss), params, batch)`: which leaves are row-sparse,
            and how many rows a microbatch has at most.
        use_grad_mean: step with the mean of the k gradients rather than their sum.

    Returns:
        A transformation that returns no update (padding rows, zeros) but for every k-th
        gradient. Its state holds k times the rows of a microbatch, and a sum for each dense
        gradient.

    Raises:
        ValueError: if `every_k` is not positive; from `update`, if a gradient has more rows
            than `like`, or is dense where that is sparse, or the other way round.

    References:
        `optax.MultiSteps`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> g = jmask.RowSparse([1], jnp.ones((1, 1)), (3, 1))
        >>> h = jmask.RowSparse([2], jnp.ones((1, 1)), (3, 1))
        >>> tx, table = jmask.multi_steps(jmask.sgd(1.0), 2, like=g), jnp.ones((3, 1))
        >>> state = tx.init(table)
        >>> for gradient in (g, h):
        ...     table, state = jmask.apply_gradients(tx, gradient, state, table)
        ...     print(table.ravel())
        [1. 1. 1.]
        [1.  0.5 0.5]
    """
    if not (isinstance(every_k, int) and every_k > 0):
        raise ValueError(f"`every_k` must be a positive integer, got {every_k!r}.")
    check_transformation("inner", inner, "jmask.multi_steps(jmask.adam(1e-3), 4, like=grads)")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> MultiStepsState:
        empty = jax.tree.map(lambda x: _empty(x, every_k), like, is_leaf=is_row_sparse)
        return MultiStepsState(jnp.zeros((), jnp.int32), empty, inner.init(params))

    def accumulate(gradients: Any, state: MultiStepsState) -> tuple[Any, Any, jax.Array]:
        """What has come together with these gradients, as a gradient, and whether to step."""
        _check_structure(gradients, like)
        accumulated = jax.tree.map(
            lambda x, kept, new: _added(x, kept, new, state.mini_step),
            like,
            state.accumulated,
            gradients,
            is_leaf=is_row_sparse,
        )
        factor = 1 / every_k if use_grad_mean else 1
        total = jax.tree.map(
            lambda x, kept: _as_gradient(x, kept, factor),
            like,
            accumulated,
            is_leaf=is_row_sparse,
        )
        return accumulated, total, state.mini_step == every_k - 1

    def finished(accumulated: Any, inner_state: Any, state: Any, last: Any) -> MultiStepsState:
        empty = jax.tree.map(lambda x: _empty(x, every_k), like, is_leaf=is_row_sparse)
        accumulated = jax.tree.map(lambda x, zero: jnp.where(last, zero, x), accumulated, empty)
        mini_step = jnp.where(last, 0, state.mini_step + 1)
        return MultiStepsState(mini_step, accumulated, inner_state)

    def update(updates, state, params=None, **extra_args):
        accumulated, total, last = accumulate(updates, state)
        updates, inner_state = update_if(
            last, inner, total, state.inner_state, params, extra_args
        )
        return updates, finished(accumulated, inner_state, state, last)

    def apply(grads, state, params):
        accumulated, total, last = accumulate(grads, state)
        params, inner_state = apply_if(last, inner, total, state.inner_state, params)
        return params, finished(accumulated, inner_state, state, last)

    transformation = OnePassTransformation(init, update)
    transformation.apply_gradients = apply
    return transformation


def _empty(like: Any, every_k: int) -> Any:
    if not is_row_sparse(like):
        return jnp.zeros(like.shape, like.dtype)
    rows = every_k * like.nse
    ids = jnp.full((rows,), like.shape[0], id_dtype(like.shape[0]))
    return StoredRows(ids, jnp.zeros((rows, *like.shape[1:]), like.dtype))


def _added(like: Any, kept: Any, gradient: Any, mini_step: jax.Array) -> Any:
    if not is_row_sparse(like):
        return kept + gradient.astype(kept.dtype)
    start = mini_step * like.nse
    ids = lax.dynamic_update_slice_in_dim(kept.ids, gradient.row_ids(), start, 0)
    values = gradient.values.astype(kept.values.dtype)
    return StoredRows(ids, lax.dynamic_update_slice_in_dim(kept.values, values, start, 0))


def _as_gradient(like: Any, kept: Any, factor: float) -> Any:
    if not is_row_sparse(like):
        return kept * jnp.asarray(factor, kept.dtype)
    values = kept.values * jnp.asarray(factor, kept.values.dtype)
    return RowSparse(kept.ids, values, like.shape)


def _check_structure(gradients: Any, like: Any) -> None:
    given: Any = jax.tree.leaves_with_path(gradients, is_leaf=is_row_sparse)
    expected: Any = jax.tree.leaves_with_path(like, is_leaf=is_row_sparse)
    if [path for path, _ in given] != [path for path, _ in expected]:
        names = [
            ", ".join(leaf_name(tree, path) for path, _ in leaves)
            for tree, leaves in (("updates", given), ("like", expected))
        ]
        raise ValueError(
            "`updates` must have the structure of `like`, the gradient multi_steps was made "
            f"for: got {names[0]}, expected {names[1]}. (nnx.Optimizer gives the "
            "transformation nnx.as_pure(nnx.state(grads)): give that as `like`.)"
        )
    for (path, x), (_, y) in zip(given, expected, strict=True):
        name = f"`updates{jax.tree_util.keystr(path)}`"
        if is_row_sparse(x) != is_row_sparse(y) or tuple(x.shape) != tuple(y.shape):
            given_kind, expected_kind = (
                repr(z) if is_row_sparse(z) else f"dense, {z.dtype}{list(z.shape)}"
                for z in (x, y)
            )
            raise ValueError(
                f"{name} is {given_kind}, but `like` has {expected_kind} there: make "
                "multi_steps with the gradient of a microbatch."
            )
        if is_row_sparse(x) and x.nse > y.nse:
            raise ValueError(
                f"{name} has {x.nse} rows, but `like` has room for {y.nse} in a microbatch: "
                "give the `like` of the largest one."
            )
