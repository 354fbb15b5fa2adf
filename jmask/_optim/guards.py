"""Guard an optimizer: steps that are not taken, rows left out, bounds on the norms of rows.

skip_nonfinite          gradient nan: no update, and the state bit for bit as it was
drop_nonfinite_rows     rows  3: [1, 2],   7: [nan, 0]   ->   3: [1, 2], and dropped = 1
clip_by_row_norm(1)     rows of the gradient:  [3, 4] -> [.6, .8],    [.3, .4] stays
max_row_norm(1)         rows of the table, in the same way
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmask._base.array_types import added, joint_dtype, trailing, typed_like, wide
from jmask._base.jaxprs import lifted
from jmask._base.types import (
    Function,
    Gradient,
    Gradients,
    JvpArgs,
    OptState,
    Params,
    PyTree,
    PyTreeDef,
    Scalar,
    Table,
)
from jmask._deferred.step import has_deferred
from jmask._lazy.lazy import lazy
from jmask._lazy.one_pass import OnePassTransformation
from jmask._lazy.over_shards import agreed, counted
from jmask._ops.norms import shortened
from jmask._optim.hyperparameters import POSITIVE, check_number
from jmask._tables.deferral import is_deferred
from jmask._tables.sharded import RoutedRows
from jmask._tables.stored_table import NewTable, fitted, is_stored_table
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import is_entry, is_sparse, stored_values
from jmask._updates.apply import Fit, advising_lazy, apply_gradients, noticed_as
from jmask._updates.checks import (
    as_gradients,
    check_transformation,
    is_gradient_leaf,
    masked_as,
    summed,
    with_wide_rows,
)
from jmask._updates.state_rows import check_state_type

# --- an inner update under a predicate ---------------------------------------------------
#
# A step is the only round of a `while_loop`, or the loop has none. A step that is not taken
# costs nothing of the inner transformation, and no table is copied: on GPUs XLA copies the
# operands of a `lax.cond`. A `while_loop` has no reverse-mode derivative, so derivatives are
# taken of a `lax.cond` (`_derivative`).


def guarded(
    inner: optax.GradientTransformationExtraArgs,
    init: optax.TransformInitFn,
    decide: Callable[[Gradients, OptState, Params], tuple[jax.Array, Gradients, PyTree]],
    finish: Callable[[OptState, OptState, jax.Array, PyTree], OptState],
) -> OnePassTransformation:
    """Return a transformation that takes a step of `inner` only where a predicate holds.

    Elsewhere there is no update (padding rows and zeros), and the state of `inner` keeps its
    bits.

    Args:
        init: makes a state with `inner_state`.
        decide: (gradients, state, params) -> (whether to take a step, the gradients for it,
            anything for `finish`).
        finish: (state, new inner state, whether, anything) -> new state.
    """

    def update(updates, state, params=None, **extra_args):
        take, gradients, extra = decide(updates, state, params)

        def run(state: OptState) -> tuple[Gradients, OptState]:
            with advising_lazy("inner", gradients):
                return inner.update(gradients, state, params, **extra_args)

        unchanged = functools.partial(_no_update, params=params)
        updates, inner_state = _step_if(take, run, (state.inner_state,), unchanged)
        return updates, finish(state, inner_state, take, extra)

    def apply(grads, state, params):
        take, gradients, extra = decide(grads, state, params)

        def run(params: Params, state: OptState) -> tuple[Params, OptState]:
            return apply_gradients(inner, gradients, state, params)

        carried = (params, state.inner_state)
        params, inner_state = _step_if(take, run, carried, lambda _: params)
        return params, finish(state, inner_state, take, extra)

    transformation = OnePassTransformation(init, update)
    transformation.apply_gradients = apply
    transformation.inner = inner
    return transformation


def _step_if(
    take: jax.Array,
    run: Function,
    carried: tuple[PyTree, ...],
    unchanged: Callable[[PyTree], PyTree],
) -> tuple[PyTree, OptState]:
    """Return `run(*carried)`, a result and a state, where `take`.

    Elsewhere the result is `unchanged(its shapes)`, and the state the last one carried.
    """
    if not isinstance(take, jax.core.Tracer):  # a loop would be compiled in each step
        if take:
            return run(*carried)
        return unchanged(jax.eval_shape(run, *carried)[0]), carried[-1]
    program, shapes = jax.make_jaxpr(run, return_shape=True)(*carried)
    jaxpr, count = lifted(program), len(carried)
    structure: PyTreeDef = jax.tree.structure(shapes)

    # JAX keeps this function: it closes over no tracer, and what `run` does is an argument.
    def run_alone(kept: PyTree, state: OptState, closed_over: Sequence[jax.Array]) -> PyTree:
        arguments = jax.tree.leaves((kept, state)[-count:])
        return structure.unflatten(jax.core.eval_jaxpr(jaxpr, (), *closed_over, *arguments))

    return _run_if(run_alone, take, unchanged(shapes[0]), carried[-1], program.consts)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run_if(
    run: Function, take: jax.Array, kept: PyTree, state: OptState, closed_over: PyTree
) -> tuple[PyTree, OptState]:
    """Return `run(kept, state, closed_over)` where `take`, else `kept` and the state."""

    def once(carried: PyTree) -> PyTree:
        return jnp.zeros_like(take), *run(*carried[1:], closed_over)

    return lax.while_loop(lambda carried: carried[0], once, (take, kept, state))[1:]


@_run_if.defjvp
def _derivative(run: Function, primals: JvpArgs, tangents: JvpArgs) -> tuple[PyTree, PyTree]:
    def chosen(take: jax.Array, kept: PyTree, state: OptState, closed_over: PyTree) -> PyTree:
        return lax.cond(take, lambda: run(kept, state, closed_over), lambda: (kept, state))

    return jax.jvp(chosen, primals, tangents)


def _no_update(shapes: Gradients, params: Params) -> Gradients:
    tables = filter(is_deferred, jax.tree.leaves(params, is_leaf=is_stored_table))

    def nothing(x: Gradient) -> Gradient:
        if isinstance(x, NewTable):
            return NewTable(next(tables))
        if not is_row_sparse(x):
            # -0.0, which changes nothing when added: -0.0 + 0.0 would be 0.0.
            return typed_like(-jnp.zeros(x.shape, x.dtype), x)
        padding = RowSparse.zeros(x.flat().shape, x.dtype, x.nse).stacked_as(x)
        leaves, structure = jax.tree.flatten(x)
        return jax.tree.unflatten(structure, map(typed_like, jax.tree.leaves(padding), leaves))

    def is_leaf(x: object) -> bool:
        return is_row_sparse(x) or isinstance(x, NewTable)

    return jax.tree.map(nothing, shapes, is_leaf=is_leaf)


# --- steps that are not taken ------------------------------------------------------------


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`.

    Attributes:
        skipped: how many steps were not taken, int32.
        inner_state: of the transformation.
    """

    skipped: jax.Array
    inner_state: OptState


def skip_nonfinite(inner: optax.GradientTransformation) -> OnePassTransformation:
    """Take no step where a gradient is nan or infinite: parameters and state keep their bits.

    Args:
        inner: any transformation, `jmask.adam(...)` or `jmask.lazy(...)`.

    Returns:
        A transformation whose state counts in `skipped` the steps not taken; a skipped step
        does not advance the count of `inner` either. It looks at the rows of the batch, those
        of equal ids summed, not at tables. `jmask.apply_gradients` keeps the one pass of a
        named optimizer.

        In a `shard_map` no device takes the step where one has such a gradient. Only where
        all parameters are arrays that differ from device to device, by their types
        (`check_vma=True`), each device decides for its own.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx, table = jmask.skip_nonfinite(jmask.sgd(0.5)), jnp.ones((3, 1))
        >>> grads = jmask.RowSparse([1], jnp.array([[jnp.nan]]), (3, 1))
        >>> table, state = jmask.apply_gradients(tx, grads, tx.init(table), table)
        >>> table.ravel(), state.skipped
        (Array([1., 1., 1.], dtype=float32), Array(1, dtype=int32))
    """
    check_transformation("inner", inner, "jmask.skip_nonfinite(jmask.adam(1e-3))")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> SkipNonfiniteState:
        return SkipNonfiniteState(jnp.zeros((), jnp.int32), inner.init(params))

    def decide(updates, state, params):
        check_state_type(state, SkipNonfiniteState)
        fit = Fit.of(updates, params)
        gradients = summed_rows(fit.gradients, fit.params)
        return agreed(all_finite(gradients), gradients, params), gradients, None

    def finish(state, inner_state, finite, _):
        skipped = state.skipped + (~finite).astype(state.skipped.dtype)
        return SkipNonfiniteState(skipped, inner_state)

    return guarded(inner, init, decide, finish)


def all_finite(gradients: Gradients) -> jax.Array:
    """Decide whether all entries of a gradient but padding and masked ones are finite."""
    finite = jnp.ones((), bool)
    for leaf in jax.tree.leaves(gradients, is_leaf=is_gradient_leaf):
        ignored: jax.Array | bool = False
        storage = leaf.storage if isinstance(leaf, MaskedTensor) else leaf
        values = jnp.asarray(stored_values(storage))
        if isinstance(leaf, MaskedTensor):
            ignored = ~leaf.valid
        elif is_sparse(storage):
            ignored = ~is_entry(storage.flat() if is_row_sparse(storage) else storage)
        if jnp.issubdtype(values.dtype, jnp.inexact):
            finite &= jnp.all(jnp.isfinite(values) | ignored)
    return finite


def summed_rows(gradients: Gradients, params: Params) -> Gradients:
    """Return gradients with the rows of equal ids summed: finite ones may have an infinite sum.

    Sums of 16-bit rows are in float32, as the optimizer takes them. Rows of table containers
    are as these take them, nan where they do not fit.
    """

    def taken(gradient: Gradient, table: Table = None) -> Gradient:
        if is_stored_table(table):
            return fitted(table, gradient)
        return summed(gradient) if is_row_sparse(gradient) else gradient

    trees = [with_wide_rows(gradients)]
    if any(map(is_stored_table, jax.tree.leaves(params, is_leaf=is_stored_table))):
        trees.append(params)
    return jax.tree.map(taken, *trees, is_leaf=is_gradient_leaf)


# --- rows left out -----------------------------------------------------------------------


class DropNonfiniteState(NamedTuple):
    """State of `drop_nonfinite_rows`: how many rows were left out so far, int32."""

    dropped: jax.Array


def drop_nonfinite_rows() -> optax.GradientTransformation:
    """Leave rows with a nan or an infinity out of the gradient.

    One bad example then costs the rows it looked up their step, and nothing else. In a
    `RowSparse` such a row counts as not touched: parameter and state keep their bits. In a
    dense gradient its entries become zero, and in a `MaskedTensor` bad entries are masked.

    Returns:
        A transformation to chain before an optimizer, outside of `jmask.lazy`, whose state
        counts the rows (of a masked gradient, the entries) left out. In a `shard_map` those
        of all devices count; of an array whose type does not say whether it is the same on
        all of them (`check_vma=False`), the most that one device leaves out.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.drop_nonfinite_rows()
        >>> grads = jmask.RowSparse([1, 2], jnp.array([[1.], [jnp.inf]]), (3, 1))
        >>> grads, state = tx.update(grads, tx.init(jnp.ones((3, 1))))
        >>> grads.todense().ravel(), state.dropped
        (Array([0., 1., 0.], dtype=float32), Array(1, dtype=int32))
    """

    def init(params: optax.Params) -> DropNonfiniteState:
        return DropNonfiniteState(jnp.zeros((), jnp.int32))

    def update(updates, state, params=None):
        check_state_type(state, DropNonfiniteState)
        fit = Fit.of(updates, params)
        updates = summed_rows(fit.gradients, fit.params)
        leaves, structure = jax.tree.flatten(updates, is_leaf=is_gradient_leaf)
        dropped, kept = state.dropped, []
        for leaf in leaves:
            rows, number = _finite(leaf)
            kept.append(rows)
            dropped += counted(number, leaf, updates, params)
        kept = noticed_as(leaves, kept)
        return structure.unflatten(kept), DropNonfiniteState(dropped)

    return optax.GradientTransformation(init, update)


def _finite(x: Gradient) -> tuple[Gradient, jax.Array]:
    """Return the gradient without what is not finite, and the number of rows left out."""
    if isinstance(x, MaskedTensor):
        values = stored_values(x.storage)
        bad = x.valid & ~jnp.isfinite(values)
        return x.with_values(values, x.valid & ~bad), bad.sum(dtype=jnp.int32)
    if not is_row_sparse(x):
        x = jnp.asarray(x)
        bad = _bad_rows(x)
        kept = jnp.where(trailing(bad, x.ndim), jnp.zeros((), x.dtype), x)
        return kept, bad.sum(dtype=jnp.int32)
    ids, bad = x.flat().row_ids(), _bad_rows(x.values)
    number = jnp.sum(bad & (ids < x.row_count), dtype=jnp.int32)
    if isinstance(x, RoutedRows):
        return x.without(bad), number
    ids = jnp.where(bad, x.row_count, ids)
    return RowSparse(ids, x.values, x.shape, leading=x.leading), number


def _bad_rows(x: jax.Array) -> jax.Array:
    return ~jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))


# --- bounds on the norms of rows ---------------------------------------------------------


def clip_by_row_norm(
    max_norm: Scalar,
    ord: float = 2,  # noqa: A002
) -> optax.GradientTransformationExtraArgs:
    """Scale down rows of the gradient whose norm exceeds `max_norm`.

    One example with a huge loss then moves the rows it looked up by a bounded amount and no
    others, which clipping by the global norm cannot do. Rows are along axis 0 of every
    leaf; equal indices of a `RowSparse` are added first.

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
        return jax.tree.map(clip_rows, updates)

    def clip_rows(gradient: Gradient) -> jax.Array:
        gradient = jnp.asarray(gradient)
        return _bounded(gradient, max_norm, ord).astype(gradient.dtype)

    lifted = lazy(optax.stateless(clip))

    def update(updates, state, params=None, **extra_args):
        updates = as_gradients(updates)
        # Only the optimizer takes a step of a deferred table: its gradient is clipped here.
        params = None if has_deferred(params) else params
        clipped, state = lifted.update(updates, state, params, **extra_args)
        return jax.tree.map(masked_as, updates, clipped, is_leaf=is_gradient_leaf), state

    return optax.GradientTransformationExtraArgs(lifted.init, update)


def max_row_norm(
    max_norm: Scalar,
    ord: float = 2,  # noqa: A002
) -> optax.GradientTransformationExtraArgs:
    """Keep the rows of the parameters within `max_norm`.

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


def _check(max_norm: Scalar, order: float) -> None:
    check_number("max_norm", max_norm, POSITIVE)
    check_number("ord", order)
    if not order >= 1:
        raise ValueError(f"`ord` must be at least 1, got {order}.")


def _bounded(rows: jax.Array, max_norm: Scalar, order: float) -> jax.Array:
    """Return rows (n, *row), in float32 at least, scaled to a norm of at most `max_norm`."""
    rows = rows.astype(wide(rows.dtype))
    if rows.ndim == 0:
        return jnp.clip(rows, -max_norm, max_norm)
    return shortened(rows, max_norm, order)
