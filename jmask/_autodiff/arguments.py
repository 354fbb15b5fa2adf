"""Check a function that is differentiated, take its arguments apart, order its gradients.

    lambda p: p[ids]                    float32 of shape (3, 2): take its mean or its sum
    lambda model: model(ids).mean()     writes to `model.norm.mean`: lost

JAX says that the result is no scalar, but not what to do. And JAX is silent when a module of
flax nnx (any object that is a pytree) writes to itself: the function gets a copy, whose new
batch statistics nobody sees.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal, Var

from jmask._autodiff.values import Filled, RowSum, dense
from jmask._autodiff.views import makes_view
from jmask._base.fallback import collected, report_fallback
from jmask._base.jaxprs import forwarded
from jmask._base.lowering import lower, primitive
from jmask._base.row_ids import mapped_words
from jmask._base.shardings import explicit_sharding, varying_axes
from jmask._base.types import (
    Function,
    Gradient,
    Gradients,
    Options,
    PyTree,
    PyTreeDef,
    TensorLike,
    Value,
)
from jmask._base.validation import leaf_name
from jmask._kernels.gathered_rows import GATHERED
from jmask._kernels.rows import plus_zero, zero_after_reading
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor
from jmask._tensors.row_sparse import is_row_sparse
from jmask._tensors.specified import (
    placeholder_of,
    values_of,
    with_placeholder,
    with_values_of,
    without_placeholder,
)
from jmask._tensors.storage import is_sparse, unique_positions


def checked_loss(fun: Function, numbers: Sequence[int], has_aux: bool) -> Function:
    """Return `fun` with errors if its result is no scalar, or if it writes to an argument."""

    @functools.wraps(fun, assigned=())
    def checked(*args: PyTree, **kwargs: PyTree) -> PyTree:
        # Nobody expects to see what is written to containers: they are copied.
        plain = (Mapping, list, tuple, jax.Array)
        objects = {n: args[n] for n in numbers if not isinstance(args[n], plain)}
        before = {n: jax.tree.leaves_with_path(x) for n, x in objects.items()}
        result = fun(*args, **kwargs)
        for number, leaves in before.items():
            after = jax.tree.leaves(objects[number])
            if any(old is not new for (_, old), new in zip(leaves, after, strict=False)):
                _check_not_written(fun, number, args, kwargs)
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not has_aux or is_pair:  # JAX's error says what is expected with `has_aux`
            _check_scalar(result[0] if has_aux else result)
        return result

    return checked


def _check_not_written(
    fun: Function, number: int, args: tuple[PyTree, ...], kwargs: Options
) -> None:
    """Raise TypeError if `fun` changes an argument: what it writes would be lost.

    `nnx.remat` writes back what it was given: another tracer, but no other value, which a trace
    of `fun` alone shows.
    """

    def after(argument: PyTree) -> list[PyTree]:
        given = [argument if i == number else x for i, x in enumerate(args)]
        fun(*given, **kwargs)
        return jax.tree.leaves(argument)

    sources = forwarded(jax.make_jaxpr(after)(args[number]).jaxpr)
    paths = [path for path, _ in jax.tree.leaves_with_path(args[number])]
    for i, (path, source) in enumerate(zip(paths, sources, strict=False)):
        if source != i:
            name = leaf_name(argument_name(fun, number), path)
            raise TypeError(
                f"`fun` writes to {name}, which is lost, as under "
                "jax.value_and_grad: jmask.nnx.value_and_grad writes it back; or differentiate "
                "the parameters alone, nnx.split(model, nnx.Param, ...), and return the rest "
                "as aux."
            )


def _check_scalar(loss: object) -> None:
    if loss is None:
        advice = "got None: is its `return` missing?"
    elif isinstance(loss, MaskedTensor):
        advice = "got a MaskedTensor: end with `.to_tensor(0)`."
    elif isinstance(loss, tuple | list | dict):
        advice = (
            f"got a {type(loss).__name__}: with auxiliary data beside it, return "
            "(loss, aux) and give has_aux=True."
        )
    elif isinstance(loss, jax.Array | np.ndarray) and loss.shape:
        advice = f"got {loss.dtype} of shape {loss.shape}: take its mean or its sum."
    else:
        return
    raise TypeError(f"`fun` must return a scalar (a scalar-output function), {advice}")


def argument_name(fun: Function, number: int) -> str:
    """Return the name that `fun` gives a positional argument, or the number of it."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in by_position]
    return names[number] if number < len(names) else f"args[{number}]"


# --- tensors -------------------------------------------------------------------------------
#
# Sparse and masked tensors as arguments that `jmask.value_and_grad` differentiates.
#
# A tensor is differentiated in its stored values and in its placeholder, and which of
# the two got a gradient decides about the storage of the result:
#
#     fun(x)                              gradient in x, a BCOO
#     sum(x @ y)                          BCOO, the positions of x
#     sum(todense(x, masked_grad=True))   BCOO, the positions of x
#     sum(todense(x))                     array: entries that are not stored count too
#
# Equal positions are one entry: a tensor that may hold some is coalesced first, and so is its
# gradient.


def tensor_gradients(
    fun: Function,
    numbers: Sequence[int],
    args: Sequence[PyTree],
    differentiate: Function,
    finished: Callable[[PyTree], PyTree],
) -> tuple[PyTree, Sequence[Gradients]]:
    """Differentiate in the stored values of tensors, and in placeholders where those count.

    Args:
        numbers: positions to differentiate, which hold tensors.
        differentiate: (function, positions, arguments) -> value, gradients as the gradient
            program leaves them.
        finished: makes gradients in arrays what users get.
    """
    tree: PyTreeDef
    leaves, tree = jax.tree.flatten([args[n] for n in numbers], is_leaf=is_tensor)
    leaves = [_coalesced(x) for x in leaves]
    tensors = {i: x for i, x in enumerate(leaves) if is_tensor(x)}

    def with_leaves(args: Sequence[PyTree], leaves: Sequence[Value]) -> list[PyTree]:
        new = dict(zip(numbers, tree.unflatten(leaves), strict=True))
        return [new.get(i, x) for i, x in enumerate(args)]

    def function_of_parts(*parts: PyTree, **kwargs: PyTree) -> PyTree:
        *args, placeholders = parts
        leaves = tree.flatten_up_to([args[n] for n in numbers])
        for (i, x), placeholder in zip(tensors.items(), placeholders, strict=True):
            leaves[i] = _rebuilt(x, leaves[i], placeholder)
        return fun(*with_leaves(args, leaves), **kwargs)

    def results(placeholders: list[Value]) -> tuple[PyTree, Sequence[Gradients]]:
        parts = (*with_leaves(args, list(map(values_of, leaves))), placeholders)
        value, (*gradients, placeholder_gradients) = differentiate(
            function_of_parts, (*numbers, len(args)), parts
        )
        gradients = tree.flatten_up_to(finished(gradients))
        for (i, x), gradient in zip(tensors.items(), placeholder_gradients, strict=True):
            gradients[i] = _gradient(x, gradients[i], gradient)
        return value, tree.unflatten(gradients)

    placeholders = {i: _placeholder_of(x) for i, x in tensors.items()}
    try:
        with collected() as reports:
            value, gradients = results(list(placeholders.values()))
    except Exception:
        # A `custom_vjp` in `fun` may insist on the structure of tensors without placeholders
        # (its backward rule returns one of the same structure): then it has no gradient
        # at other entries. A fault of `fun` itself comes up again in this
        # second run, with its own traceback, so nothing is hidden by catching all.
        return results([None] * len(placeholders))
    for report in reports:
        report_fallback(*report)
    # Tensors that `fun` returns have no placeholder any more, unless a gradient program around
    # this one takes the derivative of it.
    if all(placeholder_of(x) is None for x in leaves):
        value = jax.tree.map(without_placeholder, value, is_leaf=is_tensor)
    return value, gradients


def _placeholder_of(x: TensorLike) -> Value:
    """Return the placeholder of a tensor: zeros that are not made unless something reads them.

    A tensor that has one is of a gradient program around this one, which takes the derivative
    of this gradient: it stays at its placeholder.
    """
    placeholder = placeholder_of(x)
    zeros = Filled(tuple(x.shape), jnp.zeros((), x.dtype))
    return zeros if placeholder is None else placeholder


def _coalesced(x: TensorLike) -> TensorLike:
    if not is_sparse(x):
        return x
    placeholder = placeholder_of(x)
    x = unique_positions(without_placeholder(x))
    return x if placeholder is None else with_placeholder(x, placeholder)


def _rebuilt(x: TensorLike, values: Value, placeholder: Value) -> TensorLike:
    result = with_values_of(x, values)
    return result if placeholder is None else with_placeholder(result, placeholder)


def _gradient(x: TensorLike, value_gradient: Gradient, everywhere: Value) -> Gradient:
    """Return the gradient of a tensor, from those in its stored values and its placeholder."""
    # The stored values are no table: looked up or not, their gradient is an array.
    if is_row_sparse(value_gradient):
        value_gradient = value_gradient.todense()
    if everywhere is None or (isinstance(everywhere, RowSum) and everywhere.is_zero):
        return with_values_of(x, value_gradient)
    # At all entries it is that in the stored values where they are specified.
    everywhere = dense(everywhere)
    storage = x.storage if isinstance(x, MaskedTensor) else x
    kept = x.valid if isinstance(x, MaskedTensor) else jnp.ones(value_gradient.shape, bool)
    if not is_sparse(storage):
        return jnp.where(kept, value_gradient, everywhere)
    stored = with_values_of(storage, kept.astype(value_gradient.dtype)).todense().real
    total = with_values_of(storage, jnp.where(kept, value_gradient, 0)).todense()
    # Of an entry stored twice, which BCSR may hold, each part has the whole derivative.
    return jnp.where(stored > 0, total / jnp.maximum(stored, 1), everywhere)


# --- after reading ------------------------------------------------------------------------
#
# The order of a step: a table is read for the loss and the gradients before it is written.
#
# XLA knows what depends on what, and nothing else. Where an update depends on the loss by its
# ids, all reads of the loss come first, and the table is written in place:
#
#     ids of the gradient = ids that "depend" on the value of the loss
#
# XLA for GPUs fuses a lookup into each of its consumers, so that a gradient may read the table
# on its own, where the loss has read it already. There a barrier has the loss and all gradients
# computed before anything that depends on one of them.


_TOGETHER = primitive(
    "jmask_computed_together", lambda *arrays: list(arrays), lambda *avals: list(avals)
)
lower(_TOGETHER, lambda *arrays: lax.optimization_barrier(list(arrays)), platform="gpu")


def after_reading(value: jax.Array, gradients: Gradients) -> Gradients:
    """Make ids of gradients depend on the value of the loss, as far as XLA can tell.

    So all that the value needs of a table is read before the table is written. Where nothing
    else orders the two (in a linear loss, or where XLA fuses the lookup into the loss a second
    time, as it does for GPUs), it would read from a copy of the whole table.

    On a GPU nothing uses one of them before all of them are computed.
    """
    if not isinstance(value, jax.core.Tracer):
        return gradients
    if any(map(is_row_sparse, jax.tree.leaves(gradients, is_leaf=is_row_sparse))):
        leaves, tree = jax.tree.flatten(gradients)
        # Rows that are not written out (`GATHERED`) are left out: those the update computes.
        places = [
            i
            for i, x in enumerate(leaves)
            if isinstance(x, jax.core.Tracer)
            and jnp.issubdtype(x.dtype, jnp.inexact)
            and GATHERED.of(x) is None
        ]
        value, *computed = _TOGETHER.bind(value, *(leaves[i] for i in places))
        for i, x in zip(places, computed, strict=True):
            leaves[i] = x
        gradients = jax.tree.unflatten(tree, leaves)
    zero = zero_after_reading(value)
    if zero is None:
        return gradients
    return jax.tree.map(lambda x: _ordered(x, value, zero), gradients, is_leaf=is_row_sparse)


def reads_late(program: Jaxpr, results: Sequence[Value]) -> bool:
    """Decide whether a table with a row-sparse gradient is read for gradients alone.

    `after_reading` orders a table's update after what the value of the loss reads. A loss that
    is recomputed in the backward pass, or weights of a bag that have a gradient, read it again.
    """
    rows = [isinstance(x, RowSum) and x.is_rows for x in results[-len(program.invars) :]]
    tables = {v for v, is_rows in zip(program.invars, rows, strict=True) if is_rows}
    for eqn in program.eqns:  # what is made of tables is read from them
        if any(v in tables for v in eqn.invars if isinstance(v, Var)) and makes_view(eqn):
            tables.update(eqn.outvars)
    needed = {program.outvars[0]}
    for eqn in reversed(program.eqns):
        if any(v in needed for v in eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
        elif any(not isinstance(v, Literal) and v in tables for v in eqn.invars):
            return True
    return False


def after_all_reads(results: Sequence[Value]) -> list[Value]:
    """Return the results of a program, of which the first depends on all gradients.

    What waits for the value of the loss (`after_reading`) then waits for all of the program.
    """
    value, *others = results
    # Rows of another table may be made of this one: they are read before it is written. Those
    # that are not written out are read in the update itself.
    rows = [x for sums in others if isinstance(sums, RowSum) for _, x in sums.parts]
    # An optimization barrier would say the same; XLA of JAX 0.10 removes it before it orders.
    zero = jnp.zeros((), jnp.int32)
    for x in (*others, *(x for x in rows if GATHERED.of(x) is None)):
        is_array = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) and x.size
        if is_array and explicit_sharding(x) is None and varying_axes(x) <= varying_axes(value):
            # All of it: for one entry XLA would read a few rows of the table again.
            own = zero_after_reading(jnp.sum(x))
            zero = zero if own is None else plus_zero(zero, own)
    return [value + zero.astype(value.dtype), *others]


def _ordered(gradient: Gradient, value: jax.Array, zero: jax.Array) -> Gradient:
    """Order one gradient; `zero` depends on the value."""
    leaf = gradient.index_leaf if is_row_sparse(gradient) else None
    if not isinstance(leaf, jax.core.Tracer) or varying_axes(value) - varying_axes(leaf):
        return gradient
    shardings = [explicit_sharding(x) for x in (leaf, value)]
    if len({None if x is None else x.mesh for x in shardings}) > 1:
        return gradient
    known = GATHERED.of(gradient.values)
    if known is None or known.index is None:
        waiting = mapped_words(leaf, lambda words: plus_zero(words, zero))
        return gradient.with_leaves(waiting, gradient.values)
    # The ids are sorted meanwhile; of the rows that nothing reads nothing is left.
    rows = gradient.values * plus_zero(jnp.ones((), jnp.int32), zero).astype(gradient.dtype)
    GATHERED.note(rows, dataclasses.replace(known, index=plus_zero(known.index, zero)))
    return gradient.with_values(rows)
