"""Guard an optimizer: steps that are not taken, rows left out, bounds on the norms of rows.

skip_nonfinite          gradient nan: no update, and the state bit for bit as it was
drop_nonfinite_rows     rows  3: [1, 2],   7: [nan, 0]   ->   3: [1, 2], and dropped = 1
clip_by_row_norm(1)     rows of the gradient:  [3, 4] -> [.6, .8],    [.3, .4] stays
max_row_norm(1)         rows of the table, in the same way

A step that is not taken is a step of padding: it has no control flow, and copies no table.

    gradient        ids become padding, all values zero
    state           arrays that are not written in rows alone: jnp.where(take, new, old)
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmask._base.array_types import added, fewer, joint_dtype, minus_zero, trailing, wide
from jmask._base.row_ids import hide
from jmask._base.shardings import varying_axes
from jmask._base.types import Function, Gradient, PyTree, Scalar
from jmask._kernels.coalesce import unique_slots
from jmask._kernels.sharded_rows import summed_over_rows
from jmask._lazy.checks import (
    Fit,
    check_transformation,
    coalesced,
    gradient_and_valid,
    has_gradients,
    is_entries,
    is_gradient_leaf,
    with_wide_rows,
)
from jmask._lazy.lazy import advising_lazy, lazy, noticed_as
from jmask._lazy.programs import tells_all
from jmask._lazy.row_local import RowWise
from jmask._lazy.state_rows import check_state_type
from jmask._lazy.step import is_written_in_rows
from jmask._ops.formulas import shortened
from jmask._optim.row_rule import check_numbers, in_floats
from jmask._tables.rows_at import exchange_for
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.row_sparse import is_row_sparse
from jmask._tensors.storage import stored_values, with_stored_values

# --- a step under a predicate ------------------------------------------------------------

Decide = Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, PyTree, PyTree]]


class Guard(optax.GradientTransformationExtraArgs):
    """A transformation that takes a step of another one only where predicates hold."""

    # Of this guard, and then of those in it: (gradients, state, params) -> (whether to take a
    # step, the gradients for it, the new state but for `inner_state`).
    decisions: Sequence[Decide]
    guarded: optax.GradientTransformationExtraArgs  # the other one, which is no guard


def guarded(inner: optax.GradientTransformation, init: Function, decide: Decide) -> Guard:
    """Return a transformation that takes a step of `inner` where `decide` says so.

    Guards of guards decide first, and then there is one step. A step of the outer guard
    without rows would still have the rows that an inner `multi_steps` keeps.

    Args:
        init: makes a named tuple with an `inner_state`.
        decide: see `Guard`.
    """
    decisions, tx = [decide], optax.with_extra_args_support(inner)
    if isinstance(tx, Guard):
        decisions, tx = [decide, *tx.decisions], tx.guarded

    def update(updates, state, params=None, **extra_args):
        # --- all guards decide, the outermost first
        gradients, take = updates, jnp.ones((), bool)
        states: list[PyTree] = []
        for decide in decisions:
            wanted, gradients, new = decide(gradients, state, params)
            if states:  # an inner guard counts the steps that outer ones take
                kept = functools.partial(_where, take)
                new = jax.tree.map(kept, new, state._replace(inner_state=None))
            states.append(new)
            take, state = take & wanted, state.inner_state
        gradients = noticed_as(gradients, _at_leaves(lambda x: _kept(take, x), gradients))

        # --- the step of what they guard, of padding where it is not taken
        with advising_lazy("inner", gradients, state):
            updates, new_state = tx.update(gradients, state, params, **extra_args)

        def selected(new: jax.Array, old: jax.Array) -> jax.Array:
            # Padding has changed no row of a table: it is not copied.
            return new if is_written_in_rows(new, old) else _where(take, new, old)

        state = jax.tree.map(selected, new_state, state)
        for outer in reversed(states):
            state = outer._replace(inner_state=state)
        # -0.0 changes nothing: -0.0 + 0.0 would be 0.0. Rows that are padding are not added.
        unmoved = lambda x: x if is_row_sparse(x) else _kept(take, x, is_update=True)
        return _at_leaves(unmoved, updates), state

    guard = Guard(init, update)
    guard.decisions, guard.guarded = decisions, tx
    return guard


def _at_leaves(function: Function, *trees: PyTree) -> PyTree:
    return jax.tree.map(function, *trees, is_leaf=is_gradient_leaf)


def _kept(keep: jax.Array, x: Gradient, *, is_update: bool = False) -> Gradient:
    """Return a gradient where `keep`, elsewhere padding, masked entries, or zero.

    Args:
        keep: a scalar, or one for each row; of a masked gradient, for each entry.
        is_update: whether zero is `minus_zero`, which changes nothing.
    """
    values = stored_values(x.storage if isinstance(x, MaskedTensor) else x)
    zero = minus_zero if is_update else functools.partial(jnp.zeros, ())
    other = zero(jnp.result_type(values))
    values = jnp.where(trailing(keep, values.ndim) if keep.ndim else keep, values, other)
    if isinstance(x, MaskedTensor):
        return x.with_values(values, x.valid & keep)
    if not is_row_sparse(x):
        return values
    ids = jnp.where(keep, x.flat().row_ids(), x.row_count)
    in_order = not keep.ndim or x.order == "routed"
    return x.with_leaves(hide(ids), values, order=x.order if in_order else "any")


def _where(take: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return `new` where `take`, else `old` in the dtype that the step has made of it."""
    new, old = jnp.asarray(new), jnp.asarray(old)
    return jnp.where(take, new, old if old.dtype == new.dtype else old.astype(new.dtype))


# --- steps that are not taken, and rows left out -----------------------------------------


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`: how many steps were not taken, int32, and the inner state."""

    skipped: jax.Array
    inner_state: PyTree


def skip_nonfinite(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Take no step where a gradient is nan or infinite: parameters and state keep their bits.

    Args:
        inner: any transformation, `jmask.adam(...)` or `jmask.lazy(...)`.

    Returns:
        A transformation whose state counts in `skipped` the steps not taken. It looks at the
        rows of the batch, equal ids summed, and a step stays one pass. In a
        `shard_map` no device takes the step where one has such a gradient; only where all
        parameters differ from device to device, by their types, each decides for its own.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx, table = jmask.skip_nonfinite(jmask.sgd(0.5)), jnp.ones((3, 1))
        >>> grads = jmask.RowSparse([1], jnp.array([[jnp.nan]]), (3, 1))
        >>> table, state = jmask.apply_gradients(tx, grads, tx.init(table), table)
        >>> table.ravel(), state.skipped
        (Array([1., 1., 1.], dtype=float32), Array(1, dtype=int32))
    """
    check_transformation("inner", inner, "jmask.skip_nonfinite(jmask.adam(1e-3))")

    def init(params: PyTree) -> SkipNonfiniteState:
        return SkipNonfiniteState(jnp.zeros((), jnp.int32), inner.init(params))

    def decide(updates, state, params):
        check_state_type(state, SkipNonfiniteState)
        fit, are_bad = Fit.of(updates, params), [jnp.zeros((), bool)]
        tables = () if params is None else (fit.params,)

        def checked(x: Gradient, table: jax.Array | None = None) -> Gradient:
            """Return a gradient, rows of equal ids summed, and note whether a sum is bad."""
            if table is not None and is_row_sparse(x) and x.leading == 1:
                exchange = exchange_for(table, x)
                if exchange is not None:
                    # Rows that go to the shards of their table in rounds are summed there.
                    number = lambda rows: [jnp.sum(~jnp.isfinite(rows), dtype=jnp.int32)]
                    ids, values, count = x.row_ids(), x.values, x.shape[0]
                    (bad,) = summed_over_rows(exchange, ids, values, count, number)
                    are_bad.append(bad > 0)
                    return x
            x = coalesced(x)
            are_bad.append(jnp.any(_not_finite(x)))
            return x

        gradients = _at_leaves(checked, with_wide_rows(fit.gradients), *tables)
        is_bad = functools.reduce(jnp.logical_or, are_bad)
        finite = counted(is_bad.astype(jnp.int32), gradients, params) == 0
        skipped = state.skipped + (~finite).astype(state.skipped.dtype)
        return finite, gradients, SkipNonfiniteState(skipped, None)

    return guarded(inner, init, decide)


def _not_finite(x: Gradient) -> jax.Array:
    """Find stored values that are nan or infinite, and neither padding nor masked."""
    if isinstance(x, MaskedTensor):
        return x.valid & ~jnp.isfinite(stored_values(x))
    if not is_row_sparse(x):
        return ~jnp.isfinite(x)
    exists = x.flat().row_ids() < x.row_count
    return trailing(exists, x.values.ndim) & ~jnp.isfinite(x.values)


def _coalesced(updates: PyTree, params: PyTree) -> PyTree:
    """Return gradients with the rows of equal ids summed: finite ones may have an infinite sum.

    Sums of 16-bit rows are in float32, as the optimizer takes them.
    """
    gradients = with_wide_rows(Fit.of(updates, params).gradients)
    return _at_leaves(coalesced, gradients)


class DropNonfiniteState(NamedTuple):
    """State of `drop_nonfinite_rows`: how many rows were left out so far, int32."""

    dropped: jax.Array


def drop_nonfinite_rows() -> optax.GradientTransformation:
    """Leave rows with a nan or an infinity out of the gradient.

    One bad example then costs the rows it looked up their step, and nothing else: a row of a
    `RowSparse` counts as not touched, one of a dense gradient becomes zero, and entries of a
    `MaskedTensor` are masked.

    Returns:
        A transformation to chain before an optimizer, outside of `jmask.lazy`, whose state
        counts the rows (of a masked gradient, the entries) left out, in a `shard_map` on all
        devices; without `check_vma`, the most that one device leaves out.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.drop_nonfinite_rows()
        >>> grads = jmask.RowSparse([1, 2], jnp.array([[1.], [jnp.inf]]), (3, 1))
        >>> grads, state = tx.update(grads, tx.init(jnp.ones((3, 1))))
        >>> grads.todense().ravel(), state.dropped
        (Array([0., 1., 0.], dtype=float32), Array(1, dtype=int32))
    """

    def init(params: PyTree) -> DropNonfiniteState:
        return DropNonfiniteState(jnp.zeros((), jnp.int32))

    def update(updates, state, params=None):
        check_state_type(state, DropNonfiniteState)
        gradients, dropped = _coalesced(updates, params), [state.dropped]

        def kept(x: Gradient) -> Gradient:
            bad = _not_finite(x)
            if not isinstance(x, MaskedTensor):
                bad = bad.any(axis=tuple(range(1, bad.ndim)))
            dropped.append(counted(bad.sum(dtype=jnp.int32), gradients, params))
            return _kept(~bad, x)

        kept_rows = noticed_as(gradients, _at_leaves(kept, gradients))
        return kept_rows, DropNonfiniteState(sum(dropped[1:], dropped[0]))

    return optax.GradientTransformation(init, update)


# --- devices of a `shard_map` --------------------------------------------------------------
#
# Devices that take a step together must all skip it or none, since dense parameters are copies.
#
#     values of device 0: nan     of device 1: finite     skip_nonfinite: both skip the step


def counted(
    number: jax.Array, gradients: Sequence[Gradient], params: Sequence[jax.Array]
) -> jax.Array:
    """Sum a number over the devices that take a step together: parameters are the same there.

    Without parameters these are taken to be sharded as their gradients are. Where a
    `shard_map` does not track what differs (check_vma=False), the most that one device has.
    """
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not axes:
        return number
    # The index of a device differs on all axes: if its type does not say so, no type does.
    if not varying_axes(lax.axis_index(axes)):
        return lax.pmax(number, axes)
    leaves = jax.tree.leaves(gradients if params is None else params)
    copies = varying_axes(number) - frozenset.intersection(*map(varying_axes, leaves))
    return lax.psum(number, tuple(copies)) if copies else number


# --- bounds on the norms of rows ---------------------------------------------------------


def clip_by_row_norm(
    max_norm: Scalar,
    ord: float = 2,  # noqa: A002
) -> optax.GradientTransformationExtraArgs:
    """Scale down rows of the gradient whose norm exceeds `max_norm`.

    One example with a huge loss then moves the rows it looked up by a bounded amount and no
    others. Rows are along axis 0 of every leaf; rows of equal ids are added first.

    Args:
        max_norm: positive; a number or a (traced) scalar.
        ord: the order of the norm, 1, 2 or inf.

    Returns:
        A transformation to chain before any other, inside `jmask.lazy` or outside. Masked
        entries count as zero in the norm of their row, and stay masked.

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
    check_numbers(max_norm=max_norm, ord=ord)
    ord = float(ord)  # noqa: A001 - of an array, which is constant

    def bounded(rows: jax.Array) -> jax.Array:
        return _bounded(rows, max_norm, ord).astype(rows.dtype)

    def clipped(x: Gradient) -> Gradient:
        if is_entries(x):  # scaled by what clips the rows that they are part of
            size, count, ids = x.shape[-1], x.row_count // x.shape[-1], x.flat().row_ids()
            slots = fewer(x.nse, count)
            _, slot = unique_slots(ids // size, slots, count)
            entries = jnp.zeros((slots, size), x.dtype).at[slot, ids % size]
            scaled = bounded(entries.set(x.values, mode="drop"))
            return x.with_values(scaled.at[slot, ids % size].get(mode="fill", fill_value=0))
        rows, valid = gradient_and_valid(x)
        rows = with_stored_values(rows, bounded(jnp.asarray(stored_values(rows))))
        return rows if valid is None else joined(rows, valid)

    # On whole rows it is a lazy step, which `apply_gradients` joins with the optimizer's.
    of_rows = lazy(
        RowWise(
            optax.init_empty_state,
            lambda updates, state, params=None: (jax.tree.map(bounded, updates), state),
        )
    )

    def update(updates, state, params=None, **extra_args):
        leaves = jax.tree.leaves(updates, is_leaf=is_gradient_leaf)
        if has_gradients(updates) and all(map(tells_all, leaves)):
            return of_rows.update(updates, state, params)
        gradients = _coalesced(updates, params)
        return noticed_as(gradients, _at_leaves(clipped, gradients)), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def max_row_norm(
    max_norm: Scalar,
    ord: float = 2,  # noqa: A002
) -> optax.GradientTransformationExtraArgs:
    """Keep the rows of the parameters within `max_norm`.

    Last in a chain, it changes the updates so that the rows they touch come out with at most
    that norm. Updates of a masked gradient have no mask, so that it would touch every entry:
    put the optimizer and this into one `jmask.lazy(optax.chain(...))`, which knows the mask.

    Args:
        max_norm, ord: as in `clip_by_row_norm`.

    Returns:
        A transformation that needs `params`. Restrict it to tables by `optax.masked`: of a
        parameter of one dimension every entry is a row.

    Raises:
        ValueError: as `clip_by_row_norm`.

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
    check_numbers(max_norm=max_norm, ord=ord)
    ord = float(ord)  # noqa: A001 - of an array, which is constant

    def project(update: jax.Array, param: jax.Array) -> jax.Array:
        param = jnp.asarray(param, wide(joint_dtype(update, param)))
        return _bounded(added(param, update), max_norm, ord) - param

    def within(updates: optax.Updates, params: PyTree | None) -> optax.Updates:
        if params is None:
            raise ValueError("`params` must be given to update(): max_row_norm bounds them.")
        return jax.tree.map(project, updates, params)

    return lazy(optax.stateless(within))


def _bounded(rows: jax.Array, max_norm: Scalar, order: float) -> jax.Array:
    """Return rows (n, *row), in float32 at least, scaled to a norm of at most `max_norm`."""
    rows = rows.astype(wide(rows.dtype))
    if not rows.ndim:
        max_norm = in_floats(max_norm)
        return jnp.clip(rows, -max_norm, max_norm)
    return shortened(rows, max_norm, order)
