"""Check a function that is differentiated, take its arguments apart, order its gradients.

    lambda p: p[ids]                    float32 of shape (3, 2): take its mean or its sum
    lambda model: model(ids).mean()     writes to `model.norm.mean`: lost

JAX says that the result is no scalar, but not what to do. And JAX is silent when a module of
flax nnx (any object that is a pytree) writes to itself: the function gets a copy, whose new
batch statistics nobody sees.
"""

import inspect
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal, Primitive
from jax.interpreters import batching

from jmask._base.array_types import is_complex
from jmask._base.fallback import expect_dense
from jmask._base.jaxprs import forwarded
from jmask._base.lowering import lower, primitive
from jmask._base.row_ids import wrap
from jmask._base.shardings import explicit_mesh, varying_axes
from jmask._base.types import Argument, Function, Options, PyTree, PyTreeDef, Tensor
from jmask._base.validation import (
    KEEP_ARRAYS,
    abstract_leaf,
    is_on_host,
    leaf_name,
    not_an_array,
    not_on_device,
    shown,
)
from jmask._kernels.gathered_rows import GATHERED
from jmask._kernels.rows import BITS, plus_zero, zero_after_reading, zero_of
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor, with_values_of
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.specified import placeholder_of, with_placeholder, without_placeholder
from jmask._tensors.storage import (
    is_sparse,
    stored_values,
    unique_positions,
    with_stored_values,
)

_KEEP_ARRAYS = (
    f"{KEEP_ARRAYS}; jmask.nnx.value_and_grad and jmask.nnx.grad take a whole model of flax nnx"
)
_CALL = ": write jmask.value_and_grad(loss_fn)(params, batch)"


def check_argnums(argnums: int | Sequence[int]) -> None:
    """Refuse what are no positions, as arguments of the loss are."""
    numbers: Sequence[Argument] = argnums if isinstance(argnums, Sequence) else (argnums,)
    for number in numbers:
        if not isinstance(number, int | np.integer):
            # Of flax.nnx: a position, and a filter of what is differentiated there.
            is_filter = hasattr(number, "argnum") and hasattr(number, "filter")
            instead = "; jmask.nnx.value_and_grad takes it" if is_filter else _CALL
            raise TypeError(f"`argnums` must be integers, got {shown(argnums)}{instead}.")


def argument_positions(
    argnums: int | Sequence[int], args: tuple[PyTree, ...]
) -> tuple[int, ...]:
    """Return the positions from 0 of the arguments to differentiate."""
    numbers = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise ValueError(
                f"`argnums` names argument {number}, but the function was called with "
                f"{len(args)} positional arguments."
            )
    positions = tuple(int(number) % len(args) for number in numbers)
    repeated = [n for n in positions if positions.count(n) > 1]
    if repeated:
        raise ValueError(f"`argnums` names argument {repeated[0]} twice, got {argnums!r}.")
    return positions


def check_argument(fun: Function, number: int, argument: PyTree) -> None:
    """Refuse a differentiated argument with leaves that have no gradient, by name."""
    for path, leaf in jax.tree.leaves_with_path(argument, is_leaf=is_tensor):
        if is_tensor(leaf):
            continue
        array = abstract_leaf(leaf)
        name = lambda path=path: leaf_name(argument_name(fun, number), path)
        if is_on_host(array):
            raise not_on_device(name())
        if array is None:
            raise not_an_array(name(), leaf, _KEEP_ARRAYS)
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            raise TypeError(
                f"{name()} is {array.dtype}, and grad requires real- or complex-valued inputs: "
                f"pass it as another argument, or {_KEEP_ARRAYS}."
            )
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{name()} is a ShapeDtypeStruct, which holds no numbers: use jmask.explain, "
                "or jax.eval_shape(jmask.grad(f), ...)."
            )


def checked_result(
    fun: Function,
    args: Sequence[PyTree],
    kwargs: Options,
    numbers: Sequence[int],
    has_aux: bool,
) -> PyTree:
    """Call `fun`; refuse a result that is no scalar, and writes to numbered arguments."""
    # Nobody expects to see what is written to containers: they are copied.
    plain = (Mapping, list, tuple, jax.Array)
    before = {n: jax.tree.leaves(args[n]) for n in numbers if not isinstance(args[n], plain)}
    result = fun(*args, **kwargs)
    for number, leaves in before.items():
        after = jax.tree.leaves(args[number])
        if any(old is not new for old, new in zip(leaves, after, strict=False)):
            _check_not_written(fun, number, args, kwargs)
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            "with has_aux=True `fun` must return a two-element tuple (loss, aux), got "
            f"{shown(result)}."
        )
    _check_scalar(result[0] if has_aux else result)
    return result


def _check_not_written(
    fun: Function, number: int, args: Sequence[PyTree], kwargs: Options
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


# --- sparse and masked tensors among the arguments --------------------------------------------
#
# A tensor is differentiated in its stored values and in its placeholder, and which of the two a
# program uses decides about the storage of the gradient:
#
#     fun(x)                              gradient in x, a BCOO
#     sum(x @ y)                          BCOO, the positions of x
#     sum(todense(x, masked_grad=True))   BCOO, the positions of x
#     sum(todense(x))                     array: entries that are not stored count too
#
# Equal positions are one entry: a tensor that may hold some is coalesced first, and so is its
# gradient.


class Leaves:
    """The arrays in which arguments are differentiated: of a tensor its values and placeholder.

    Attributes:
        given: arrays, in the order of the arguments; the shape of a placeholder that nobody
            gave.
        owners: the number of the leaf that each is of.
        of_tensors: the numbers of arrays that belong to tensors, which are no tables.
        placeholders: the numbers of placeholders among them.
        everywhere: whether tensors get placeholders. At first only where a gradient program
            around this one has given them some.
    """

    def __init__(self, arguments: Sequence[PyTree]) -> None:
        self._tree: PyTreeDef
        self._leaves, self._tree = jax.tree.flatten(list(arguments), is_leaf=is_tensor)
        parts: list[list[Argument]] = []
        for i, x in enumerate(self._leaves):
            if not is_tensor(x):
                parts.append([x if np.ndim(x) == 0 else jnp.asarray(x)])
                continue
            placeholder = placeholder_of(x)
            if is_sparse(x):
                x = unique_positions(without_placeholder(x))
                x = x if placeholder is None else with_placeholder(x, placeholder)
                self._leaves[i] = x
            shape = jax.ShapeDtypeStruct(tuple(x.shape), x.dtype)
            parts.append([stored_values(x), shape if placeholder is None else placeholder])
        self.given = [x for part in parts for x in part]
        self.owners = [number for number, part in enumerate(parts) for _ in part]
        self.of_tensors = {i for i, n in enumerate(self.owners) if len(parts[n]) > 1}
        second = (i for i, n in enumerate(self.owners) if i and n == self.owners[i - 1])
        self.placeholders = set(second)
        self.everywhere = any(placeholder_of(x) is not None for x in self._leaves)

    def rebuilt(self, arrays: Sequence[jax.Array]) -> list[PyTree]:
        """Return the arguments with other arrays."""
        rest, leaves = iter(arrays), []
        for x in self._leaves:
            new: Argument = next(rest)
            if is_tensor(x):
                new, placeholder = with_values_of(x, new), next(rest)
                new = with_placeholder(new, placeholder) if self.everywhere else new
            leaves.append(new)
        return self._tree.unflatten(leaves)

    def arrays(self, jaxpr: Jaxpr) -> list[jax.Array]:
        """Return the arrays that a program runs on: zeros for placeholders that it reads."""
        if not self.placeholders:
            return self.given
        read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)}
        read |= {v for v in jaxpr.outvars if not isinstance(v, Literal)}
        return [
            jnp.zeros(x.shape if v in read else (), x.dtype)
            if isinstance(x, jax.ShapeDtypeStruct)
            else x
            for v, x in zip(jaxpr.invars, self.given, strict=True)
        ]

    def gradients(self, of_arrays: Sequence[Argument]) -> list[PyTree]:
        """Return the gradient of each argument; None for an argument without one."""
        rest, leaves = iter(of_arrays), []
        for x in self._leaves:
            gradient = next(rest)
            if is_tensor(x):
                gradient = _tensor_gradient(x, gradient, next(rest))
            elif isinstance(gradient, jax.Array) and gradient.ndim > 1:
                expect_dense(gradient)
            leaves.append(gradient)
        return self._tree.unflatten(leaves)

    def without_placeholders(self, value: PyTree) -> PyTree:
        """Return results with tensors as users know them.

        Unless a gradient program around this one takes the derivative of their placeholders.
        """
        if not self.of_tensors or any(placeholder_of(x) is not None for x in self._leaves):
            return value
        return jax.tree.map(without_placeholder, value, is_leaf=is_tensor)


def _tensor_gradient(x: Tensor, of_values: jax.Array, everywhere: jax.Array | None) -> Tensor:
    """Return the gradient of a tensor, from those in its stored values and its placeholder."""
    if everywhere is None:
        return with_values_of(x, of_values)
    # At stored entries the gradient in the stored values, at all others in the placeholder.
    storage = x.storage if isinstance(x, MaskedTensor) else x
    kept = x.valid if isinstance(x, MaskedTensor) else jnp.ones(of_values.shape, bool)
    if not is_sparse(storage):
        return jnp.where(kept, of_values, everywhere)
    stored = with_stored_values(storage, kept.astype(of_values.dtype)).todense().real
    total = with_stored_values(storage, jnp.where(kept, of_values, 0)).todense()
    # Of an entry stored twice, which BCSR may hold, each part has the whole derivative.
    return jnp.where(stored > 0, total / jnp.maximum(stored, 1), everywhere)


# --- after reading ------------------------------------------------------------------------
#
# The order of a step: a table is read for the loss and the gradients before it is written. XLA
# knows what depends on what, and nothing else: where an update depends on the loss by its ids,
# all reads of the loss come first, and the table is written in place, and not copied.
#
# XLA for GPUs fuses a lookup into each of its consumers, so that a gradient may read the table
# on its own. There a barrier computes the loss, all gradients and the parts of `aux` that read
# tables before anything that depends on one of them. XLA for CPUs removes barriers: there the
# loss is made to depend on these parts of `aux`.


def _in_order(*arrays: jax.Array, beside: int) -> list[jax.Array]:
    """Return the arrays, so that the first, the loss, depends on the next `beside` of them."""
    loss, *others = arrays
    bits = BITS.get(loss.dtype.itemsize)
    if bits is None or not jnp.issubdtype(loss.dtype, jnp.floating):
        return list(arrays)
    number = lax.bitcast_convert_type(loss, bits)
    for x in others[:beside]:
        number = plus_zero(number, _zero_of_all(x))
    return [lax.bitcast_convert_type(number, loss.dtype), *others]


def _zero_of_all(x: jax.Array) -> jax.Array:
    """Return an integer zero () that depends on all entries of an array, as XLA sees it."""
    x = x.real if is_complex(x) else x
    bits = BITS.get(x.dtype.itemsize) if jnp.issubdtype(x.dtype, jnp.floating) else None
    if bits is None:
        x = lax.convert_element_type(x, jnp.int32)
    else:
        x = lax.bitcast_convert_type(x, bits)
    return zero_of(lax.reduce(x, np.zeros((), x.dtype), lax.bitwise_xor, range(x.ndim)))


_TOGETHER = primitive(
    "jmask_computed_together",
    lambda *arrays, beside: list(arrays),
    lambda *avals, beside: list(avals),
    Primitive,
)
lower(_TOGETHER, lambda *arrays, beside: lax.optimization_barrier(list(arrays)), platform="gpu")
# Over several devices the order would cost a sum over all of them.
lower(_TOGETHER, _in_order, lambda *arrays, beside: list(arrays), platform="cpu")
# What has no batch dimension stays so: in `aux` there may be whole tables.
batching.primitive_batchers[_TOGETHER] = lambda arrays, dims, **how: (
    _TOGETHER.bind(*arrays, **how),
    dims,
)


def after_reading(
    loss: jax.Array,
    beside: dict[int, jax.Array],
    dense: dict[int, jax.Array],
    sparse: dict[int, RowSparse],
) -> tuple[dict[int, jax.Array], dict[int, jax.Array], dict[int, RowSparse]]:
    """Make the ids of gradients depend on the loss, and on what `aux` reads of tables.

    Args:
        beside: those parts of `aux` that read tables, by position.
        dense, sparse: gradients, by the numbers of their parameters.

    Returns:
        `beside`, `dense` and `sparse` with the same values.
    """
    if not isinstance(loss, jax.core.Tracer) or not sparse:
        return beside, dense, sparse
    # Rows that are not written out (`GATHERED`) are left out: those the update computes.
    rows = {i: x.values for i, x in sparse.items() if GATHERED.of(x.values) is None}
    tree: PyTreeDef
    arrays, tree = jax.tree.flatten((beside, dense, rows))
    loss, *arrays = _TOGETHER.bind(loss, *arrays, beside=len(beside))
    beside, dense, rows = tree.unflatten(arrays)
    zero = zero_after_reading(loss)

    def ordered(gradient: RowSparse, values: jax.Array) -> RowSparse:
        leaf = gradient.index_leaf
        is_here = explicit_mesh(leaf) == explicit_mesh(loss)
        is_typed = is_here and not varying_axes(loss) - varying_axes(leaf)
        if zero is not None and is_typed and isinstance(leaf, jax.core.Tracer):
            leaf = wrap(plus_zero(jax.random.key_data(leaf), zero))
        return gradient.with_leaves(leaf, values)

    return beside, dense, {i: ordered(x, rows.get(i, x.values)) for i, x in sparse.items()}
