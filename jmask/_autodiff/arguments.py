"""Check a function that is differentiated, take its arguments apart, order its gradients.

    lambda p: p[ids]                    float32 of shape (3, 2): take its mean or its sum
    lambda model: model(ids).mean()     writes to `model.norm.mean`: lost

JAX says that the result is no scalar, but not what to do. And JAX is silent when a module of
flax nnx (any object that is a pytree) writes to itself: the function gets a copy, whose new
batch statistics nobody sees.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.jaxprs import forwarded
from jmask._base.lowering import lower, primitive
from jmask._base.row_ids import mapped_words
from jmask._base.shardings import explicit_sharding, varying_axes
from jmask._base.types import Function, Gradient, Options, PyTree
from jmask._base.validation import leaf_name, shown
from jmask._kernels.gathered_rows import GATHERED
from jmask._kernels.rows import plus_zero, zero_after_reading
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import is_row_sparse


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
        if has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                "with has_aux=True `fun` must return a two-element tuple (loss, aux), got "
                f"{shown(result)}."
            )
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


def after_reading(value: jax.Array, gradients: PyTree) -> PyTree:
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


def _ordered(gradient: Gradient, value: jax.Array, zero: jax.Array) -> Gradient:
    """Order one gradient; `zero` depends on the value."""
    if not is_row_sparse(gradient):
        return gradient
    leaf = gradient.index_leaf
    if not isinstance(leaf, jax.core.Tracer) or varying_axes(value) - varying_axes(leaf):
        return gradient
    shardings = [explicit_sharding(x) for x in (leaf, value)]
    if len({None if x is None else x.mesh for x in shardings}) > 1:
        return gradient
    waiting = mapped_words(leaf, lambda words: plus_zero(words, zero))
    return gradient.with_leaves(waiting, gradient.values)
