"""Guard an optimizer: steps that are not taken, rows left out, bounds on the norms of rows.

skip_nonfinite          gradient nan: no update, and the state bit for bit as it was
drop_nonfinite_rows     rows  3: [1, 2],   7: [nan, 0]   ->   3: [1, 2], and dropped = 1
clip_by_row_norm(1)     rows of the gradient:  [3, 4] -> [.6, .8],    [.3, .4] stays
max_row_norm(1)         rows of the table, in the same way

A step that is not taken is a step of padding: it has no control flow, and copies no table.

    gradient        ids become padding, all values zero
    state           arrays that a step without rows changes: jnp.where(take, new, old)
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Var

from jmask._base.array_types import added, joint_dtype, trailing, wide
from jmask._base.fallback import muted
from jmask._base.types import (
    Atom,
    Function,
    Gradient,
    Gradients,
    Options,
    OptState,
    Params,
    PyTree,
    Scalar,
)
from jmask._lazy.lazy import lazy
from jmask._lazy.one_pass import OnePassTransformation
from jmask._lazy.over_shards import agreed, counted
from jmask._ops.norms import shortened
from jmask._optim.hyperparameters import POSITIVE, check_number
from jmask._tables.deferral import is_deferred
from jmask._tables.sharded import RoutedRows
from jmask._tables.stored_table import NewTable, fitted, is_stored_table
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import stored_values, with_stored_values
from jmask._updates.apply import Fit, advising_lazy, apply_gradients, noticed_as
from jmask._updates.checks import (
    check_transformation,
    gradient_and_valid,
    is_gradient_leaf,
    summed,
    with_wide_rows,
)
from jmask._updates.state_rows import check_state_type

# --- a step under a predicate ------------------------------------------------------------


class Guard(OnePassTransformation):
    """A transformation that takes a step of an inner one only where a predicate holds.

    Attributes:
        step_if: (predicate, gradients, state, params, extra arguments or None to apply) ->
            (updates or new parameters, state).
    """

    step_if: Function


def guarded(
    inner: optax.GradientTransformation,
    init: optax.TransformInitFn,
    decide: Callable[[Gradients, OptState, Params], tuple[jax.Array, Gradients, OptState]],
) -> Guard:
    """Return a transformation that takes a step of `inner` where `decide` says so.

    Args:
        inner: elsewhere it gives no update, and its state keeps its bits.
        init: makes a named tuple with an `inner_state`.
        decide: (gradients, state, params) -> (whether to take a step, the gradients for it,
            the new state but for `inner_state`).
    """
    inner = optax.with_extra_args_support(inner) if not isinstance(inner, Guard) else inner

    def step_if(taken, gradients, state, params, extra):
        here, gradients, outer = decide(gradients, state, params)
        result, inner_state = _step_if(
            taken & here, inner, gradients, state.inner_state, params, extra
        )
        new, old = (x._replace(inner_state=None) for x in (outer, state))
        new = jax.tree.map(functools.partial(_where, taken), new, old)
        return result, new._replace(inner_state=inner_state)

    def update(updates, state, params=None, **extra_args):
        return step_if(True, updates, state, params, extra_args)

    guard = Guard(init, update)
    guard.step_if = step_if
    guard.apply_gradients = lambda *args: step_if(True, *args, None)
    guard.inner = inner
    return guard


def _step_if(
    take: jax.Array,
    inner: optax.GradientTransformationExtraArgs,
    gradients: Gradients,
    state: OptState,
    params: Params,
    extra: Options | None,
) -> tuple[PyTree, OptState]:
    """Take a step of any transformation where `take`; see `Guard.step_if`."""
    if isinstance(inner, Guard):
        return inner.step_if(take, gradients, state, params, extra)

    def step(gradients: Gradients, params: Params, state: OptState) -> tuple[PyTree, OptState]:
        if extra is None:
            return apply_gradients(inner, gradients, state, params)
        with advising_lazy("inner", gradients):
            return inner.update(gradients, state, params, **extra)

    is_leaf = lambda x: is_gradient_leaf(x) or isinstance(x, NewTable)
    at_leaves = functools.partial(jax.tree.map, is_leaf=is_leaf)
    padded = noticed_as(gradients, at_leaves(lambda x: _padded(take, x, 0.0), gradients))
    result, new_state = step(padded, params, state)
    # Containers have no such shapes, and are changed in the rows of a gradient alone.
    tables = jax.tree.leaves((params, state), is_leaf=is_stored_table)
    bare = padded if any(map(is_stored_table, tables)) else at_leaves(_without_rows, padded)
    if extra is None:
        step_of_none = functools.partial(step, bare)
        return _selected(take, (result, new_state), (params, state), step_of_none)
    (new_state,) = _selected(take, (new_state,), (state,), lambda x: step(bare, params, x)[1])
    deferred = filter(is_deferred, tables)

    def update(x: Gradient) -> Gradient:
        if isinstance(x, NewTable):
            return NewTable(
                jax.tree.map(functools.partial(_where, take), x.table, next(deferred))
            )
        return _padded(take, x, -0.0)  # changes nothing when added: -0.0 + 0.0 would be 0.0

    return at_leaves(update, result), new_state


def _padded(take: jax.Array, x: Gradient, zero: float) -> Gradient:
    """Return a gradient where `take`, elsewhere one of padding, masked entries, or `zero`."""
    if not is_gradient_leaf(x):
        return jnp.where(take, x, jnp.asarray(zero, jnp.result_type(x)))
    storage = x.storage if isinstance(x, MaskedTensor) else x
    values = stored_values(storage)
    values = jnp.where(take, values, jnp.zeros_like(values))
    if isinstance(x, MaskedTensor):
        return x.with_values(values, x.valid & take)
    ids = jnp.where(take, x.flat().row_ids(), x.row_count)
    return _rows_like(x, ids, values, coalesced=x.coalesced)


def _without_rows(x: Gradient) -> Gradient:
    if isinstance(x, MaskedTensor) and is_row_sparse(x.storage):
        return joined(_without_rows(x.storage), x.valid[:0])
    if not is_row_sparse(x):
        return x
    return _rows_like(x, x.flat().row_ids()[:0], x.values[:0], coalesced=x.coalesced)


def _rows_like(
    x: RowSparse, ids: jax.Array, values: jax.Array, *, coalesced: bool
) -> RowSparse:
    return RowSparse.from_rows(ids, values, x.shape, coalesced=coalesced, leading=x.leading)


def _selected(take: jax.Array, new: PyTree, old: PyTree, bare: Function) -> PyTree:
    """Return `new` where `take`, and `old` elsewhere, at the cost of what is no table.

    Args:
        bare: `old` -> what becomes of it in a step without rows. Arrays that come out as they
            are, but for reshapes, are changed in the rows of a gradient alone. A padded
            gradient changes none, so that these are `new` in any case.
    """
    with muted():
        jaxpr = jax.make_jaxpr(bare)(*old).jaxpr
    made_of = {
        eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "reshape"
    }

    def origin(v: Atom) -> Atom:
        while isinstance(v, Var) and v in made_of:
            v = made_of[v]
        return v

    outputs = jaxpr.outvars[-len(jaxpr.invars) :] if jaxpr.invars else ()
    are_tables = [origin(v) is x for x, v in zip(jaxpr.invars, outputs, strict=True)]
    start = 0
    for x in jax.tree.leaves(old, is_leaf=is_stored_table):
        count = len(jax.tree.leaves(x))
        if is_stored_table(x) and not is_deferred(x):
            are_tables[start : start + count] = [True] * count
        start += count
    leaves, structure = jax.tree.flatten(new)
    leaves = [
        x if is_table else _where(take, x, y)
        for is_table, x, y in zip(are_tables, leaves, jax.tree.leaves(old), strict=True)
    ]
    return structure.unflatten(leaves)


def _where(take: jax.Array | bool, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return `new` where `take`, else `old`, in the dtype that holds both."""
    if take is True:
        return new
    if jnp.result_type(new) == jnp.result_type(old):
        return jnp.where(take, new, old)
    dtype = joint_dtype(new, old)
    return jnp.where(take, jnp.asarray(new, dtype), jnp.asarray(old, dtype))


# --- steps that are not taken, and rows left out -----------------------------------------


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

    def init(params: optax.Params) -> SkipNonfiniteState:
        return SkipNonfiniteState(jnp.zeros((), jnp.int32), inner.init(params))

    def decide(updates, state, params):
        check_state_type(state, SkipNonfiniteState)
        gradients = _summed(updates, params)
        bad = [jnp.any(_not_finite(x)) for x in _leaves(gradients)]
        finite = ~functools.reduce(operator.or_, bad, jnp.zeros((), bool))
        finite = agreed(finite, gradients, params)
        if any(isinstance(x, RoutedRows) for x in _leaves(gradients)):
            gradients = updates  # rows are routed to the shards once more
        skipped = state.skipped + (~finite).astype(state.skipped.dtype)
        return finite, gradients, SkipNonfiniteState(skipped, None)

    return guarded(inner, init, decide)


def _summed(updates: Gradients, params: Params) -> Gradients:
    """Return gradients with the rows of equal ids summed: finite ones may have an infinite sum.

    Sums of 16-bit rows are in float32, as the optimizer takes them. Rows of table containers
    are as these take them, nan where they do not fit.
    """
    fit = Fit.of(updates, params)
    gradients, structure = jax.tree.flatten(
        with_wide_rows(fit.gradients), is_leaf=is_gradient_leaf
    )
    tables = [None] * len(gradients)
    if any(map(is_stored_table, jax.tree.leaves(fit.params, is_leaf=is_stored_table))):
        tables = structure.flatten_up_to(fit.params)
    for i, (x, table) in enumerate(zip(gradients, tables, strict=True)):
        x = fitted(table, x) if is_stored_table(table) else x
        gradients[i] = summed(x) if is_row_sparse(x) else x
    return structure.unflatten(gradients)


def _leaves(gradients: Gradients) -> list[Gradient]:
    return jax.tree.leaves(gradients, is_leaf=is_gradient_leaf)


def _not_finite(x: Gradient) -> jax.Array:
    """Find the stored values that are nan or infinite, but those of padding and masked ones."""
    if isinstance(x, MaskedTensor):
        return x.valid & ~jnp.isfinite(stored_values(x.storage))
    if not is_row_sparse(x):
        return ~jnp.isfinite(x)
    exists = x.flat().row_ids() < x.row_count
    return trailing(exists, x.values.ndim) & ~jnp.isfinite(x.values)


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
        updates, dropped, kept = _summed(updates, params), state.dropped, []
        for x in _leaves(updates):
            rows, number = _dropped(x)
            kept.append(rows)
            dropped += counted(number, x, updates, params)
        structure = jax.tree.structure(updates, is_leaf=is_gradient_leaf)
        kept = noticed_as(_leaves(updates), kept)
        return structure.unflatten(kept), DropNonfiniteState(dropped)

    return optax.GradientTransformation(init, update)


def _dropped(x: Gradient) -> tuple[Gradient, jax.Array]:
    """Return the gradient without what is not finite, and the number of rows left out."""
    bad = _not_finite(x)
    if isinstance(x, MaskedTensor):
        kept = x.with_values(stored_values(x.storage), x.valid & ~bad)
        return kept, bad.sum(dtype=jnp.int32)
    bad = bad.any(axis=tuple(range(1, bad.ndim)))
    number = bad.sum(dtype=jnp.int32)
    if isinstance(x, RoutedRows):
        return x.without(bad), number
    if is_row_sparse(x):
        ids = jnp.where(bad, x.row_count, x.flat().row_ids())
        return _rows_like(x, ids, x.values, coalesced=False), number
    x = jnp.asarray(x)
    return jnp.where(trailing(bad, x.ndim), jnp.zeros((), x.dtype), x), number


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

    def update(updates, state, params=None, **extra_args):
        gradients = _summed(updates, params)
        clipped = [_clipped(x, max_norm, ord) for x in _leaves(gradients)]
        structure = jax.tree.structure(gradients, is_leaf=is_gradient_leaf)
        return structure.unflatten(noticed_as(_leaves(gradients), clipped)), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _clipped(x: Gradient, max_norm: Scalar, order: float) -> Gradient:
    rows, valid = gradient_and_valid(x)
    values = jnp.asarray(stored_values(rows))
    clipped = with_stored_values(rows, _bounded(values, max_norm, order).astype(values.dtype))
    return clipped if valid is None else joined(clipped, valid)


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
