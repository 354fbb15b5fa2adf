"""Accumulate the gradients of k microbatches, then one step: `optax.MultiSteps` for rows.

    microbatch 1    rows 3, 7          kept          no update
    microbatch 2    rows 7, 9          kept          no update
    microbatch 3    rows 1             kept          one step with the mean over rows 1 3 7 9

Dense gradients, and their valid entries, are added up. Rows are put side by side.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmask._base.array_types import real_dtype, shapes_from, wide
from jmask._base.row_ids import hide
from jmask._base.shardings import on_every_device, typed_like
from jmask._base.types import Gradient, PyTree, PyTreeDef, Table
from jmask._base.validation import check_flag, leaf_name
from jmask._lazy.checks import (
    as_gradients,
    check_gradients,
    check_transformation,
    gradient_and_valid,
    has_gradients,
    is_gradient_leaf,
)
from jmask._lazy.lazy import noticed_as
from jmask._lazy.one_pass import OnePassTransformation
from jmask._lazy.state_rows import check_state_type, states_of
from jmask._optim.guards import guarded
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import stored_values, with_stored_values


class Accumulated(NamedTuple):
    """Hold a sum, or rows (k n, *row) with their ids; and of masked ones what is valid."""

    values: jax.Array
    ids: jax.Array | None
    valid: jax.Array | None


class MultiStepsState(NamedTuple):
    """Hold microbatches since the last step, their gradients leaf by leaf, the inner state."""

    mini_step: jax.Array
    accumulated: PyTree
    inner_state: PyTree


def holds_gradients(state: PyTree) -> bool:
    """Decide whether a state keeps gradients for a later step."""
    return bool(states_of(MultiStepsState, state)) or has_gradients(state)


def multi_steps(
    inner: optax.GradientTransformation,
    every_k: int,
    like: PyTree | None = None,
    *,
    use_grad_mean: bool = True,
) -> OnePassTransformation:
    """Take one step of `inner` for every k gradients, with their mean: larger batches in parts.

    Args:
        inner: any transformation, `jmask.adam(...)` or `jmask.lazy(...)`.
        every_k: k, the number of microbatches.
        like: the gradient of the largest microbatch or its shapes,
            `jax.eval_shape(jmask.grad(loss), params, batch)`.
        use_grad_mean: step with the mean of the k gradients rather than their sum. A masked
            entry counts as zero, and one that is masked in all k is masked in the mean.

    Returns:
        A transformation that returns no update (padding rows, zeros) but for every k-th
        gradient. Its state holds k times the rows of a microbatch.

    Raises:
        TypeError: if `like` is not given.
        ValueError: if `every_k` is not positive; from `update`, if a gradient has another kind
            or dtype than `like`, or more rows, or if the state has rows for another `every_k`.

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
    if isinstance(every_k, bool) or not isinstance(every_k, int) or every_k < 1:
        raise ValueError(f"`every_k` must be a positive integer, got {every_k!r}.")
    check_flag("use_grad_mean", use_grad_mean)
    check_transformation("inner", inner, "jmask.multi_steps(jmask.adam(1e-3), 4, like=grads)")
    if like is None:
        raise TypeError(
            "`like` must be given, the gradient of one microbatch or its shapes: write "
            f"jmask.multi_steps(tx, {every_k}, "
            "like=jax.eval_shape(jmask.grad(loss_fn), params, batch))."
        )
    check_gradients(like, "like")
    tree: PyTreeDef
    likes, tree = jax.tree.flatten(shapes_from(as_gradients, like), is_leaf=is_gradient_leaf)
    parts = [shapes_from(_parts, x) for x in likes]

    def empty() -> list[Accumulated]:
        return [_empty(x, part, every_k) for x, part in zip(likes, parts, strict=True)]

    def init(params: optax.Params) -> MultiStepsState:
        return MultiStepsState(jnp.zeros((), jnp.int32), empty(), inner.init(params))

    def accumulate(updates, state, params):
        check_state_type(state, MultiStepsState)
        updates = as_gradients(updates)
        given: PyTreeDef = jax.tree.structure(updates, is_leaf=is_gradient_leaf)
        if given != tree:
            raise ValueError(
                "`updates` must have the structure of `like`, the gradient multi_steps was "
                f"made for: got {given}, expected {tree}. (nnx.Optimizer gives the "
                "transformation nnx.as_pure(nnx.state(grads)): give that as `like`.)"
            )
        gradients = jax.tree.leaves_with_path(updates, is_leaf=is_gradient_leaf)
        for (path, x), y, part in zip(gradients, likes, parts, strict=True):
            _check_fits(leaf_name("updates", path), x, y, part)
        have, expected = jax.tree.map(jnp.shape, (state.accumulated, shapes_from(empty)))
        if have != expected:
            raise ValueError(
                "`state.accumulated` was made for another `every_k` or `like`. Change them "
                "where `state.mini_step` is 0, and take `inner_state` over: "
                "tx.init(params)._replace(inner_state=state.inner_state)."
            )
        step, leaves = state.mini_step, [x for _, x in gradients]
        new = [_added(*x, step) for x in zip(state.accumulated, leaves, parts, strict=True)]
        # A state may come from a run with a larger k, whose microbatches are to count alike.
        last = step >= every_k - 1
        divisor = step + 1 if use_grad_mean else jnp.ones_like(step)
        mean = tree.unflatten([_mean(*x, divisor) for x in zip(likes, new, strict=True)])
        reset = lambda x, zero: jnp.where(last, typed_like(zero, x), x)
        kept = jax.tree.map(reset, new, empty())
        state = MultiStepsState(jnp.where(last, 0, step + 1), kept, None)
        return last, noticed_as(updates, mean), state

    return guarded(inner, init, accumulate)


def _parts(x: Gradient) -> Accumulated:
    rows, valid = gradient_and_valid(x) if isinstance(x, MaskedTensor) else (x, None)
    ids = rows.flat().row_ids() if is_row_sparse(rows) else None
    return Accumulated(jnp.asarray(stored_values(rows)), ids, valid)


def _empty(like: Gradient, part: Accumulated, every_k: int) -> Accumulated:
    """Return zeros, and padding for the rows of k microbatches."""
    if part.ids is None:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), part)
    zero = lambda x: jnp.zeros((every_k * x.shape[0], *x.shape[1:]), x.dtype)
    zeros = jax.tree.map(zero, part)
    return zeros._replace(ids=jnp.full_like(zeros.ids, _rows(like, zeros).row_count))


def _rows(like: Gradient, kept: Accumulated) -> RowSparse:
    """Return what has accumulated as rows of a tensor like this one."""
    assert kept.ids is not None
    if is_row_sparse(like):
        return like.with_leaves(hide(kept.ids), kept.values, order="any")
    return RowSparse.from_rows(kept.ids, kept.values, like.shape, coalesced=False)


def _added(
    kept: Accumulated, gradient: Gradient, part: Accumulated, step: jax.Array
) -> Accumulated:
    def put(kept: jax.Array, new: jax.Array) -> jax.Array:
        if part.ids is None:
            return kept | new if new.dtype == bool else kept + new.astype(kept.dtype)
        # What `init` or a loss made outside of a mesh is on none.
        new = new.astype(kept.dtype)
        new, kept = on_every_device(new, kept), on_every_device(kept, new)
        return lax.dynamic_update_slice_in_dim(kept, new, step * part.ids.shape[0], 0)

    return jax.tree.map(put, kept, _parts(gradient))


def _mean(like: Gradient, kept: Accumulated, divisor: jax.Array) -> Gradient:
    """Return what has accumulated as a gradient, divided in float32 at least."""
    x: Table = kept.values if kept.ids is None else _rows(like, kept).widened()
    inverse = (1 / divisor.astype(wide(real_dtype(x.dtype)))).astype(x.dtype)
    x = with_stored_values(x, stored_values(x) * inverse)
    if kept.valid is None:
        return x
    if not is_row_sparse(x):
        return joined(x, kept.valid)
    often = x.with_values(kept.valid.astype(jnp.int32)).coalesce()
    return joined(x.coalesce(), often.values > 0)


def _check_fits(name: str, x: Gradient, like: Gradient, old: Accumulated) -> None:
    """Refuse a gradient that is not as `like`, or has more rows."""
    new = shapes_from(_parts, x)
    # Rows of a table and entries of it have values of other numbers of dimensions.
    is_like = x.shape == like.shape and jax.tree.map(jnp.ndim, new) == jax.tree.map(
        jnp.ndim, old
    )
    fits = is_like and jnp.promote_types(x.dtype, like.dtype) == like.dtype
    if not fits or new.values.shape[:1] > old.values.shape[:1]:
        raise ValueError(
            f"{name} is {_described(x)}, but `like` has {_described(like)} there: make "
            "multi_steps with the gradient of a microbatch, as it is given, and of the largest "
            "one."
        )


def _described(x: Gradient) -> str:
    if is_row_sparse(x):
        return repr(x)
    kind = f"a MaskedTensor on {x.stype} storage" if isinstance(x, MaskedTensor) else "dense"
    return f"{kind}, {x.dtype}{list(x.shape)}"
