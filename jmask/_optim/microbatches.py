"""Accumulate the gradients of k microbatches, then one step: `optax.MultiSteps` for rows.

    microbatch 1    rows 3, 7          kept          no update
    microbatch 2    rows 7, 9          kept          no update
    microbatch 3    rows 1             kept          one step with the mean over rows 1 3 7 9

Dense gradients are added up. The rows of sparse ones are put side by side, in buffers with the
capacity of k microbatches, so that none is lost: inside `lazy`, `optax.MultiSteps` would forget
the rows that the last microbatch does not touch, and is refused. Masked gradients add
up their valid entries: an entry is valid in the sum where it is in any microbatch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmask._base.array_types import on_every_device, real_dtype, typed_like, wide
from jmask._base.row_ids import id_dtype
from jmask._base.types import (
    DType,
    Gradient,
    Gradients,
    OptState,
    Params,
    PyTree,
    PyTreeDef,
    Value,
)
from jmask._base.validation import check_flag, leaf_name
from jmask._lazy.one_pass import OnePassTransformation
from jmask._optim.guards import guarded
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._updates.apply import noticed_as
from jmask._updates.checks import (
    as_gradients,
    check_gradients,
    check_transformation,
    gradient_and_valid,
    is_gradient_leaf,
)
from jmask._updates.state_rows import check_state_type


class StoredRows(NamedTuple):
    """The rows of the microbatches so far: ids (k n,), values (k n, *row), padding after."""

    ids: jax.Array
    values: jax.Array


class StoredEntries(NamedTuple):
    """The masked gradients of the microbatches so far: as unmasked ones, and what is valid."""

    gradient: Value
    valid: jax.Array


class MultiStepsState(NamedTuple):
    """State of `multi_steps`.

    Attributes:
        mini_step: microbatches since the last step, int32.
        accumulated: their gradients: sums, `StoredRows`, or `StoredEntries` of these.
        inner_state: of the transformation.
    """

    mini_step: jax.Array
    accumulated: PyTree
    inner_state: OptState


def multi_steps(
    inner: optax.GradientTransformation,
    every_k: int,
    like: Gradients | None = None,
    *,
    use_grad_mean: bool = True,
) -> OnePassTransformation:
    """Take one step of `inner` for every k gradients, with their mean: larger batches in parts.

    Args:
        inner: any transformation, `jmask.adam(...)` or `jmask.lazy(...)`.
        every_k: k, the number of microbatches.
        like: the gradient of one microbatch or its shapes, from
            `jax.eval_shape(jmask.grad(loss), params, batch)`: which leaves are row-sparse
            or masked, and how many rows a microbatch has at most.
        use_grad_mean: step with the mean of the k gradients rather than their sum. Where a
            gradient is masked it counts as zero, and an entry that is masked in all k of
            them is masked in the mean.

    Returns:
        A transformation that returns no update (padding rows, zeros) but for every k-th
        gradient. Its state holds k times the rows of a microbatch, and a sum for each dense
        gradient.

    Raises:
        TypeError: if `like` is not given.
        ValueError: if `every_k` is not positive; from `update`, if a gradient has more rows
            than `like`, or is dense where that is sparse, or masked where that is not, or
            the other way round; or if the state has rows for another `every_k`. (Of dense
            gradients it may come from another: the step is then taken with what is there.)

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
    like = jax.eval_shape(as_gradients, like)

    def empty() -> PyTree:
        return jax.tree.map(lambda x: _empty(x, every_k), like, is_leaf=is_gradient_leaf)

    def init(params: optax.Params) -> MultiStepsState:
        return MultiStepsState(jnp.zeros((), jnp.int32), empty(), inner.init(params))

    def accumulate(
        gradients: Gradients, state: OptState, params: Params
    ) -> tuple[jax.Array, Gradients, OptState]:
        """Return whether to step, with the gradient so far, and the new state."""
        gradients = as_gradients(gradients)
        check_state_type(state, MultiStepsState)
        _check_structure(gradients, like)
        _check_buffers(state.accumulated, jax.eval_shape(empty))
        accumulated = jax.tree.map(
            lambda x, kept, new: _added(x, kept, new, state.mini_step),
            like,
            state.accumulated,
            gradients,
            is_leaf=is_gradient_leaf,
        )
        # A state may come from a run with a larger k, whose microbatches are to count alike.
        last = state.mini_step >= every_k - 1
        number = jnp.where(last, state.mini_step + 1, every_k)
        number = number if use_grad_mean else jnp.ones_like(number)
        total = jax.tree.map(
            lambda x, kept: _as_gradient(x, kept, number),
            like,
            accumulated,
            is_leaf=is_gradient_leaf,
        )
        kept = jax.tree.map(
            lambda x, zero: jnp.where(last, typed_like(zero, jax.typeof(x)), x),
            accumulated,
            empty(),
        )
        mini_step = jnp.where(last, 0, state.mini_step + 1)
        return last, noticed_as(gradients, total), MultiStepsState(mini_step, kept, None)

    return guarded(inner, init, accumulate)


def _split(gradient: Gradient, shapes_only: bool = False) -> tuple[Gradient, Value]:
    """Return rows or an array, and the valid entries if the gradient is masked, else None."""
    if not isinstance(gradient, MaskedTensor):
        return gradient, None
    if shapes_only:
        return jax.eval_shape(gradient_and_valid, gradient)
    return gradient_and_valid(gradient)


def _empty(like: Gradient, every_k: int) -> PyTree:
    like, valid = _split(like, shapes_only=True)
    count = every_k if is_row_sparse(like) else 1
    kept: PyTree
    if is_row_sparse(like):
        ids = jnp.full((count * like.nse,), like.row_count, id_dtype(like.row_count))
        kept = StoredRows(ids, jnp.zeros((*ids.shape, *like.row), like.dtype))
    else:
        kept = jnp.zeros(like.shape, like.dtype)
    if valid is None:
        return kept
    return StoredEntries(kept, jnp.zeros((count * valid.shape[0], *valid.shape[1:]), bool))


def _added(like: Gradient, kept: PyTree, gradient: Gradient, mini_step: jax.Array) -> PyTree:
    like, _ = _split(like, shapes_only=True)
    gradient, valid = _split(gradient)

    def put(kept: jax.Array, new: jax.Array) -> jax.Array:
        """Put the rows of a microbatch into the buffer at its place."""
        # What `init` made outside jit is on no mesh, and knows no sharding of a table.
        like_new = jax.typeof(new)
        new, kept = (on_every_device(x, like_new) for x in (new.astype(kept.dtype), kept))
        return lax.dynamic_update_slice_in_dim(kept, new, mini_step * like.nse, 0)

    def added(kept: PyTree) -> PyTree:
        if not is_row_sparse(like):
            return kept + gradient.astype(kept.dtype)
        ids = gradient.flat().row_ids()
        return StoredRows(put(kept.ids, ids), put(kept.values, gradient.values))

    if valid is None:
        return added(kept)
    valid = put(kept.valid, valid) if is_row_sparse(like) else kept.valid | valid
    return StoredEntries(added(kept.gradient), valid)


def _as_gradient(like: Gradient, kept: PyTree, number: jax.Array) -> Gradient:
    """Return what `number` microbatches have accumulated, divided by it."""
    like, valid = _split(like, shapes_only=True)
    if valid is not None:
        kept, valid = kept
    if not is_row_sparse(like):
        total = kept * _inverse(number, kept.dtype)
        return total if valid is None else joined(total, valid)
    rows = RowSparse(kept.ids, kept.values, like.shape, leading=like.leading).widened()
    rows = rows.with_values(rows.values * _inverse(number, rows.dtype))
    if valid is None:
        return rows
    often = rows.with_values(valid.astype(jnp.int32)).coalesce()
    return joined(rows.coalesce(), often.values > 0)


def _inverse(number: jax.Array, dtype: DType) -> jax.Array:
    # In float32 at least, and in float64 for float64.
    return (1 / number.astype(wide(real_dtype(dtype)))).astype(dtype)


def _check_structure(gradients: Gradients, like: Gradients) -> None:
    leaves = jax.tree.leaves_with_path(gradients, is_leaf=is_gradient_leaf)
    expected = jax.tree.leaves_with_path(like, is_leaf=is_gradient_leaf)
    if [path for path, _ in leaves] != [path for path, _ in expected]:
        names = [
            ", ".join(leaf_name(tree, path) for path, _ in nodes)
            for tree, nodes in (("updates", leaves), ("like", expected))
        ]
        raise ValueError(
            "`updates` must have the structure of `like`, the gradient multi_steps was made "
            f"for: got {names[0]}, expected {names[1]}. (nnx.Optimizer gives the "
            "transformation nnx.as_pure(nnx.state(grads)): give that as `like`.)"
        )
    for (path, x), (_, y) in zip(leaves, expected, strict=True):
        name = f"`updates{jax.tree_util.keystr(path)}`"
        rows, room = (_split(gradient, shapes_only=True)[0] for gradient in (x, y))
        kinds = [
            (isinstance(gradient, MaskedTensor), getattr(stored, "leading", None), x.shape)
            for gradient, stored in ((x, rows), (y, room))
        ]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"{name} is {_described(x)}, but `like` has {_described(y)} there: make "
                "multi_steps with the gradient of a microbatch."
            )
        if jnp.promote_types(x.dtype, y.dtype) != y.dtype:
            raise ValueError(
                f"{name} is {x.dtype}, but `like` has {y.dtype} there, which would round what "
                "comes together: make multi_steps with the gradient as it is given."
            )
        if is_row_sparse(rows) and rows.nse > room.nse:
            raise ValueError(
                f"{name} has {rows.nse} rows, but `like` has room for {room.nse} in a "
                "microbatch: give the `like` of the largest one."
            )


def _check_buffers(kept: PyTree, expected: PyTree) -> None:
    shapes = [[x.shape for x in jax.tree.leaves(tree)] for tree in (kept, expected)]
    trees: list[PyTreeDef] = [jax.tree.structure(tree) for tree in (kept, expected)]
    if trees[0] != trees[1] or shapes[0] != shapes[1]:
        raise ValueError(
            "`state.accumulated` was made for another `every_k` or another `like`: it has "
            f"arrays of shapes {shapes[0]}, expected {shapes[1]}. Change them where "
            "`state.mini_step` is 0, and take `inner_state` over: "
            "tx.init(params)._replace(inner_state=state.inner_state)."
        )


def _described(gradient: Gradient) -> str:
    if is_row_sparse(gradient):
        return repr(gradient)
    kind = "dense"
    if isinstance(gradient, MaskedTensor):
        kind = f"a MaskedTensor on {gradient.stype} storage"
    return f"{kind}, {gradient.dtype}{list(gradient.shape)}"
