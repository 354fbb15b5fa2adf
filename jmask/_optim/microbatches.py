"""Accumulate the gradients of k microbatches, then one step: `optax.MultiSteps` for rows.

    microbatch 1    rows 3, 7          kept          no update
    microbatch 2    rows 7, 9          kept          no update
    microbatch 3    rows 1             kept          one step with the mean over rows 1 3 7 9

Dense gradients, and their valid entries, are added up. Rows are put side by side.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

from jmask._base.array_types import real_dtype, shapes_from, wide
from jmask._base.row_ids import hide
from jmask._base.shardings import (
    explicit_mesh,
    on_every_device,
    on_explicit_mesh,
    rows_in_any_order,
    typed_like,
)
from jmask._base.types import Gradient, PyTree, PyTreeDef, Table
from jmask._base.validation import check_flag, checked_integer, leaf_name
from jmask._lazy.checks import (
    as_gradients,
    check_gradients,
    check_transformation,
    gradient_and_valid,
    has_gradients,
    is_gradient_leaf,
    with_wide_rows,
)
from jmask._lazy.lazy import noticed_as
from jmask._lazy.state_rows import check_state_type, states_of
from jmask._optim.guards import guarded
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import stored_values, with_stored_values


class Accumulated(NamedTuple):
    """Hold a sum, or rows (k, n, *row) with their ids; and of masked ones what is valid."""

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
) -> optax.GradientTransformationExtraArgs:
    """Take one step of `inner` for every k gradients, with their mean: larger batches in parts.

    Args:
        inner: any transformation, `jmask.adam(...)` or `jmask.lazy(...)`.
        every_k: k, the number of microbatches.
        like: the gradient of the largest microbatch or its shapes,
            `jax.eval_shape(jmask.grad(loss), params, batch)`. Rows are kept with the
            sharding that the types of `like` say.
        use_grad_mean: step with the mean of the k gradients rather than their sum. A masked
            entry counts as zero, and one that is masked in all k is masked in the mean.

    Returns:
        A transformation that returns no update (padding rows, zeros) but for every k-th
        gradient. Its state holds k times the rows of a microbatch.

    Raises:
        TypeError: if `every_k` is no integer, or `like` is not given.
        ValueError: if `every_k` is not positive; from `update`, if a gradient has another kind
            or a wider dtype than `like`, of whose rows 16 bits are kept as float32, or more
            rows, or if the state has rows for another `every_k`.

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
    every_k = checked_integer("every_k", every_k)
    if every_k < 1:
        raise ValueError(f"`every_k` must be a positive integer, got {every_k}.")
    check_flag("use_grad_mean", use_grad_mean)
    check_transformation("inner", inner, "jmask.multi_steps(jmask.adam(1e-3), 4, like=grads)")
    if like is None:
        raise TypeError(
            "`like` must be given, the gradient of one microbatch or its shapes: write "
            f"jmask.multi_steps(tx, {every_k}, "
            "like=jax.eval_shape(jmask.grad(loss_fn), params, batch))."
        )
    check_gradients("like", like)
    tree: PyTreeDef
    # What sums rows of equal ids before, as `skip_nonfinite` does, hands them on in float32.
    like = shapes_from(lambda x: with_wide_rows(as_gradients(x)), like)
    likes, tree = jax.tree.flatten(like, is_leaf=is_gradient_leaf)
    parts = [shapes_from(_parts, x) for x in likes]

    # In one program, so that outside of jit each device makes its own part.
    @functools.partial(jax.jit, inline=True)
    def empty() -> list[Accumulated]:
        return [_empty(x, part, every_k) for x, part in zip(likes, parts, strict=True)]

    def init(params: optax.Params) -> MultiStepsState:
        return MultiStepsState(jnp.zeros((), jnp.int32), empty(), inner.init(params))

    def accumulate(updates, state):
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
            new = shapes_from(_parts, x)
            # Rows of a table and entries of it have values of other numbers of dimensions.
            ndims, expected = jax.tree.map(jnp.ndim, (new, part))
            is_like = x.shape == y.shape and ndims == expected
            is_narrower = jnp.promote_types(x.dtype, y.dtype) == y.dtype
            has_more_rows = new.values.shape[:1] > part.values.shape[:1]
            if not is_like or not is_narrower or has_more_rows:
                raise ValueError(
                    f"{leaf_name('updates', path)} is {_described(x)}, but `like` has "
                    f"{_described(y)} there: make multi_steps with the gradient of a "
                    "microbatch, as it is given, and of the largest one."
                )
        have, expected = jax.tree.map(jnp.shape, (state.accumulated, shapes_from(empty)))
        if have != expected:
            raise ValueError(
                "`state.accumulated` was made for another `every_k` or `like`. Change them "
                "where `state.mini_step` is 0, and take `inner_state` over: "
                "tx.init(params)._replace(inner_state=state.inner_state)."
            )
        step, leaves = state.mini_step, [x for _, x in gradients]
        new = [_added(*x, step) for x in zip(state.accumulated, leaves, strict=True)]
        # A state may come from a run with a larger k, whose microbatches are to count alike.
        last = step >= every_k - 1
        divisor = step + 1 if use_grad_mean else jnp.ones_like(step)
        mean = tree.unflatten([_mean(*x, divisor) for x in zip(likes, new, strict=True)])
        reset = lambda x, zero: jnp.where(last, typed_like(zero, x), x)
        kept = jax.tree.map(reset, new, empty())
        state = MultiStepsState(jnp.where(last, 0, step + 1), kept, None)
        return last, noticed_as(updates, mean), state

    def accumulate_on_mesh(updates, state, params):
        with on_explicit_mesh(updates):
            return accumulate(updates, state)

    return guarded(inner, init, accumulate_on_mesh)


def _parts(x: Gradient) -> Accumulated:
    rows, valid = gradient_and_valid(x) if isinstance(x, MaskedTensor) else (x, None)
    ids = rows.flat().row_ids() if is_row_sparse(rows) else None
    return Accumulated(jnp.asarray(stored_values(rows)), ids, valid)


def _empty(like: Gradient, part: Accumulated, every_k: int) -> Accumulated:
    """Return zeros, and padding for the rows of k microbatches, with the sharding of one."""
    if part.ids is None:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), part)

    def placed(x: jax.Array, value: int = 0) -> jax.Array:
        filled, mesh = jnp.full((every_k, *x.shape), value, x.dtype), explicit_mesh(x)
        # A mesh that was set where `like` was made need not be set here.
        is_there = isinstance(mesh, Mesh) or not jax.sharding.get_abstract_mesh().empty
        return typed_like(filled, x) if is_there else filled

    zeros = jax.tree.map(placed, part)
    return zeros._replace(ids=placed(part.ids, _row_count(like)))


def _row_count(like: Gradient) -> int:
    """Return the id that is padding."""
    return like.row_count if is_row_sparse(like) else like.shape[0]


def _added(kept: Accumulated, gradient: Gradient, step: jax.Array) -> Accumulated:
    new = _parts(gradient)
    if kept.ids is None:
        add = lambda x, y: x | y if y.dtype == bool else x + y.astype(x.dtype)
        return jax.tree.map(add, kept, new)
    assert new.ids is not None
    missing = kept.ids.shape[1] - new.ids.shape[0]
    if missing:  # padding behind rows that may be on several devices
        fill = lambda x, value: jnp.pad(
            on_every_device(x), [(0, missing)] + [(0, 0)] * (x.ndim - 1), constant_values=value
        )
        zeros = jax.tree.map(lambda x: fill(x, 0), new)
        new = zeros._replace(ids=fill(new.ids, _row_count(gradient)))

    def put(kept: jax.Array, new: jax.Array) -> jax.Array:
        # What `init` or a loss made outside of a mesh is on none.
        kept = typed_like(kept, new) if explicit_mesh(kept) is None else kept
        new = typed_like(new.astype(kept.dtype), jax.typeof(kept[0]))
        return lax.dynamic_update_index_in_dim(kept, new, step, 0)

    return jax.tree.map(put, kept, new)


def _mean(like: Gradient, kept: Accumulated, divisor: jax.Array) -> Gradient:
    """Return what has accumulated as a gradient, divided in float32 at least."""
    x: Table = kept.values
    if kept.ids is not None:
        ids, values = rows_in_any_order(kept.ids, kept.values)
        if is_row_sparse(like):
            x = like.with_leaves(hide(ids), values, order="any").widened()
        else:
            x = RowSparse.from_rows(ids, values, like.shape, coalesced=False).widened()
    inverse = (1 / divisor.astype(wide(real_dtype(x.dtype)))).astype(x.dtype)
    x = with_stored_values(x, stored_values(x) * inverse)
    if kept.valid is None:
        return x
    if kept.ids is None or not is_row_sparse(x):
        return joined(x, kept.valid)
    _, valid = rows_in_any_order(kept.ids, kept.valid)
    often = x.with_values(valid.astype(jnp.int32)).coalesce()
    return joined(x.coalesce(), often.values > 0)


def _described(x: Gradient) -> str:
    if is_row_sparse(x):
        return repr(x)
    kind = f"a MaskedTensor on {x.stype} storage" if isinstance(x, MaskedTensor) else "dense"
    return f"{kind}, {x.dtype}{list(x.shape)}"
