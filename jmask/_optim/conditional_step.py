"""Steps that are taken or not, as a value under jit decides: all finite, every k-th.

    take True     update and state of the inner transformation
    take False    no update: padding rows and zeros; the state bit for bit as it was

A step is the only round of a loop, or the loop has none: a step not taken costs nothing of the
inner transformation, and no table is copied. Of `lax.cond` XLA copies what goes through it on
GPUs; where derivatives are taken it is used nevertheless, as a loop has none backwards.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import Jaxpr

from jmask._base.array_types import typed_like
from jmask._base.jaxprs import lifted
from jmask._lazy.one_pass import OnePassTransformation
from jmask._lazy.spread_sums import agreed
from jmask._lazy.state_rows import check_state_type
from jmask._tables.deferred_table import is_deferred
from jmask._tables.stored_table import NewTable, fitted, is_stored_table
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import is_entry, is_sparse, stored_values
from jmask._updates.apply import Fit, advising_lazy, apply_gradients
from jmask._updates.checks import check_transformation, is_gradient_leaf, summed, with_wide_rows
from jmask._updates.eager import compiled_outside_jit


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`.

    Attributes:
        skipped: how many steps were not taken, int32.
        inner_state: of the transformation.
    """

    skipped: jax.Array
    inner_state: Any


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

    def update(updates, state, params=None, **extra_args):
        check_state_type(state, SkipNonfiniteState)
        fit = Fit.of(updates, params)
        updates = summed_rows(fit.gradients, fit.params)
        finite = agreed(all_finite(updates), updates, params)
        updates, inner_state = update_if(
            finite, inner, updates, state.inner_state, params, extra_args
        )
        return updates, SkipNonfiniteState(_counted(state.skipped, finite), inner_state)

    def apply(grads, state, params):
        check_state_type(state, SkipNonfiniteState)
        grads = summed_rows(grads, params)
        finite = agreed(all_finite(grads), grads, params)
        params, inner_state = apply_if(finite, inner, grads, state.inner_state, params)
        return params, SkipNonfiniteState(_counted(state.skipped, finite), inner_state)

    transformation = OnePassTransformation(init, compiled_outside_jit(update))
    transformation.apply_gradients = compiled_outside_jit(apply)
    transformation.inner = inner
    return transformation


def _counted(skipped: jax.Array, finite: jax.Array) -> jax.Array:
    return skipped + (~finite).astype(skipped.dtype)


def all_finite(gradients: Any) -> jax.Array:
    """Whether no entry of a gradient, padding and masked ones apart, is nan or infinite."""
    finite = jnp.ones((), bool)
    for leaf in jax.tree.leaves(gradients, is_leaf=is_gradient_leaf):
        ignored: Any = False
        storage = leaf.storage if isinstance(leaf, MaskedTensor) else leaf
        values = jnp.asarray(stored_values(storage))
        if isinstance(leaf, MaskedTensor):
            ignored = ~leaf.valid
        elif is_sparse(storage):
            ignored = ~is_entry(storage.flat() if is_row_sparse(storage) else storage)
        if jnp.issubdtype(values.dtype, jnp.inexact):
            finite &= jnp.all(jnp.isfinite(values) | ignored)
    return finite


def summed_rows(gradients: Any, params: Any) -> Any:
    """Gradients with the rows of equal ids summed: finite ones may have an infinite sum.

    Sums of 16-bit rows are in float32, as the optimizer takes them. Rows of stored tables are
    as these take them, nan where they do not fit.
    """

    def taken(param: Any, gradient: Any) -> Any:
        return fitted(param, gradient) if is_stored_table(param) else gradient

    gradients = with_wide_rows(gradients)
    if any(map(is_stored_table, jax.tree.leaves(params, is_leaf=is_stored_table))):
        gradients = jax.tree.map(taken, params, gradients, is_leaf=is_stored_table)

    def leaf(gradient: Any) -> Any:
        return summed(gradient) if is_row_sparse(gradient) else gradient

    return jax.tree.map(leaf, gradients, is_leaf=is_gradient_leaf)


def update_if(
    take: jax.Array,
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, Any]:
    """`inner.update` where `take`, else no update and the state as it was."""

    def run(state: Any) -> tuple[Any, Any]:
        with advising_lazy("inner", updates):
            return inner.update(updates, state, params, **extra_args)

    if _is_known(take):
        return (
            run(state) if take else (_no_update(jax.eval_shape(run, state)[0], params), state)
        )
    program, shapes = jax.make_jaxpr(run, return_shape=True)(state)
    jaxpr = lifted(program)

    def run_alone(_: Any, state: Any, given: Sequence[Any]) -> Any:
        return _results(jaxpr, shapes, given, state)

    return _run_if(run_alone, take, _no_update(shapes[0], params), state, program.consts)


def apply_if(
    take: jax.Array, inner: optax.GradientTransformation, grads: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """Parameters and state after `jmask.apply_gradients` where `take`, else as they were."""

    def run(params: Any, state: Any) -> tuple[Any, Any]:
        return apply_gradients(inner, grads, state, params)

    if _is_known(take):
        return run(params, state) if take else (params, state)
    program, shapes = jax.make_jaxpr(run, return_shape=True)(params, state)
    jaxpr = lifted(program)

    def run_alone(params: Any, state: Any, given: Sequence[Any]) -> Any:
        return _results(jaxpr, shapes, given, (params, state))

    return _run_if(run_alone, take, params, state, program.consts)


def _is_known(take: jax.Array) -> bool:
    """Whether a step is outside jit, where a loop would be compiled for each step."""
    return not isinstance(take, jax.core.Tracer)


def _results(jaxpr: Jaxpr, shapes: Any, given: Sequence[Any], arguments: Any) -> Any:
    """What a program returns, in the structure of `shapes`.

    Args:
        jaxpr: of the function, and of what it closed over before its arguments.
        shapes: of its results.
        given: what it closed over: `custom_jvp` takes functions of their arguments alone.
        arguments: of the function that was traced.
    """
    structure: Any = jax.tree.structure(shapes)
    outputs = jax.core.eval_jaxpr(jaxpr, (), *given, *jax.tree.leaves(arguments))
    return structure.unflatten(outputs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run_if(run: Callable[..., Any], take: jax.Array, kept: Any, state: Any, given: Any) -> Any:
    """`run(kept, state, given)` where `take`, else `kept` and the state."""

    def once(carried: Any) -> Any:
        return jnp.zeros_like(take), *run(*carried[1:], given)

    return lax.while_loop(lambda carried: carried[0], once, (take, kept, state))[1:]


@_run_if.defjvp
def _derivative(run: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    def chosen(take: jax.Array, kept: Any, state: Any, given: Any) -> Any:
        return lax.cond(take, lambda: run(kept, state, given), lambda: (kept, state))

    return jax.jvp(chosen, primals, tangents)


def _no_update(shapes: Any, params: Any) -> Any:
    tables = filter(is_deferred, jax.tree.leaves(params, is_leaf=is_stored_table))

    def nothing(x: Any) -> Any:
        if isinstance(x, NewTable):
            return NewTable(next(tables))
        if not is_row_sparse(x):
            # -0.0, which changes nothing when added: -0.0 + 0.0 would be 0.0.
            return typed_like(-jnp.zeros(x.shape, x.dtype), x)
        padding = RowSparse.zeros(x.flat().shape, x.dtype, x.nse).stacked_as(x)
        structure: Any
        leaves, structure = jax.tree.flatten(x)
        return structure.unflatten(map(typed_like, jax.tree.leaves(padding), leaves))

    def is_leaf(x: Any) -> bool:
        return is_row_sparse(x) or isinstance(x, NewTable)

    return jax.tree.map(nothing, shapes, is_leaf=is_leaf)
