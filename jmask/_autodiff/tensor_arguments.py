"""Sparse and masked tensors as arguments that `jmask.value_and_grad` differentiates.

A tensor is differentiated in its stored values and in its placeholder, and which of
the two got a gradient decides about the storage of the result:

    fun(x)                              gradient in x, a BCOO
    sum(x @ y)                          BCOO, the positions of x
    sum(todense(x, masked_grad=True))   BCOO, the positions of x
    sum(todense(x))                     array: entries that are not stored count too

Equal positions are one entry: a tensor that may hold some is coalesced first, and so is its
gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jmask._autodiff.values import Filled, RowSum, dense
from jmask._base.array_types import explicit_sharding
from jmask._base.types import Gradient, PyTree, TensorLike, Value
from jmask._tables.stored_table import Placeholder, is_stored_table
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.specified import (
    placeholder_of,
    values_of,
    with_placeholder,
    with_values_of,
    without_placeholder,
)
from jmask._tensors.storage import Storage, is_sparse, unique_positions


class TensorArguments:
    """The tensors in some arguments of a call. False if there are none.

    Args:
        args: all positional arguments of the call.
        numbers: which of them are differentiated.

    Attributes:
        tensors: the differentiated sparse and masked tensors, in the order of the leaves.
    """

    def __init__(self, args: tuple[Any, ...], numbers: tuple[int, ...]):
        self.numbers = numbers
        self.args = list(args)
        for number in numbers:
            self.args[number] = _mapped(_coalesced, args[number])
        leaves = jax.tree.leaves([self.args[n] for n in numbers], is_leaf=_has_placeholder)
        self.tensors = [x for x in leaves if _has_placeholder(x)]

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def only_tables(self) -> bool:
        """Decide whether all are tables whose placeholders are known to count."""
        return all(map(is_stored_table, self.tensors))

    def are_nested(self) -> bool:
        """Decide whether one is a table that an outer gradient program differentiates."""
        return any(is_stored_table(x) and x.placeholder is not None for x in self.tensors)

    def placeholders(self, tables_only: bool = False) -> list[Any]:
        """Return a placeholder for every tensor, or None where it needs none.

        A tensor that has one is of a gradient program around this one, which takes the
        derivative of this gradient: it stays at its placeholder.
        """
        return [
            None if tables_only and not is_stored_table(x) else _placeholder_of(x)
            for x in self.tensors
        ]

    def left_behind(self, value: PyTree) -> PyTree:
        """Return the results of the function, with tensors that have no placeholder any more.

        Unless a gradient program around this one takes the derivative of it.
        """
        if any(placeholder_of(x) is not None for x in self.tensors):
            return value
        return jax.tree.map(without_placeholder, value, is_leaf=is_tensor)

    def parts(self, placeholders: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Return arguments with stored values for tensors, and placeholders at the end."""
        args = list(self.args)
        for number in self.numbers:
            args[number] = _mapped(_parts, args[number])
        return (*args, list(placeholders)), (*self.numbers, len(args))

    def function_of_parts(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fun` as a function of `parts`."""

        def part_function(*parts: Any, **kwargs: Any) -> Any:
            *args, placeholders = parts
            remaining = iter(placeholders)
            for number in self.numbers:
                args[number] = _mapped(
                    lambda x, values: _rebuilt(x, values, remaining),
                    self.args[number],
                    args[number],
                )
            return fun(*args, **kwargs)

        return part_function

    def gradients(
        self, gradients: Sequence[Any], placeholder_gradients: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Return gradients in the arguments, given the gradients in their parts."""
        remaining = iter(placeholder_gradients)
        return tuple(
            _mapped(lambda x, g: _gradient(x, g, remaining), self.args[number], gradient)
            for number, gradient in zip(self.numbers, gradients, strict=True)
        )


def _placeholder_of(x: TensorLike) -> Any:
    """Return the placeholder of a tensor: zeros that are not made unless something reads them.

    Nothing reads the placeholder of a table: its shape is enough. Where axes are explicit the
    shape says that they are not used.
    """
    if not is_stored_table(x):
        placeholder = placeholder_of(x)
        zeros = Filled(tuple(x.shape), jnp.zeros((), x.dtype))
        return zeros if placeholder is None else placeholder
    if x.placeholder is not None:
        return x.placeholder.array
    sharding = explicit_sharding(*jax.tree.leaves(x))
    if sharding is not None:
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(tuple(x.shape), x.dtype, sharding=sharding)


def _mapped(function: Callable[..., Any], *trees: Any) -> PyTree:
    return jax.tree.map(function, *trees, is_leaf=_has_placeholder)


def _has_placeholder(x: object) -> bool:
    return is_tensor(x) or is_stored_table(x)


def _parts(x: TensorLike) -> Any:
    return () if is_stored_table(x) else values_of(x)


def _coalesced(x: TensorLike) -> TensorLike:
    if not is_sparse(x):
        return x
    placeholder = placeholder_of(x)
    x = unique_positions(without_placeholder(x))
    return x if placeholder is None else with_placeholder(x, placeholder)


def _rebuilt(x: TensorLike, values: Value, placeholders: Iterator[Any]) -> TensorLike:
    if is_stored_table(x):
        return x.with_placeholder(Placeholder.above(x.placeholder, next(placeholders)))
    if not is_tensor(x):
        return values
    result, placeholder = with_values_of(x, values), next(placeholders)
    return result if placeholder is None else with_placeholder(result, placeholder)


def _gradient(
    x: TensorLike, value_gradient: Gradient, placeholder_gradients: Iterator[Any]
) -> Gradient:
    if is_stored_table(x):
        return _rows_of(next(placeholder_gradients))
    if not is_tensor(x):
        return value_gradient
    # The stored values are no table: looked up or not, their gradient is an array.
    value_gradient = (
        value_gradient.todense() if is_row_sparse(value_gradient) else value_gradient
    )
    everywhere = next(placeholder_gradients)
    if everywhere is None or (isinstance(everywhere, RowSum) and everywhere.is_zero):
        return with_values_of(x, value_gradient)
    everywhere = dense(everywhere)
    storage = x.storage if isinstance(x, MaskedTensor) else x
    valid = x.valid if isinstance(x, MaskedTensor) else None
    return at_every_entry(storage, valid, value_gradient, everywhere)


def _rows_of(gradient: Gradient) -> RowSparse:
    """Return the gradient of a table: of one that is looked up, or not used, its rows."""
    if isinstance(gradient, RowSum):
        return gradient.to_row_sparse()
    gradient = dense(gradient)
    return RowSparse(jnp.arange(gradient.shape[0]), gradient, gradient.shape, coalesced=True)


def at_every_entry(
    storage: Storage,
    valid: jax.Array | None,
    value_gradient: Gradient,
    placeholder_gradient: Gradient,
) -> jax.Array:
    """Return the gradient at all entries: that in the stored values where they are specified.

    Args:
        storage: sparse, or an array.
        valid: which of its stored values are specified, None for all.
        value_gradient: the gradient in the stored values, of their shape.
        placeholder_gradient: the gradient in the placeholder, of the shape of the tensor.
    """
    if not is_sparse(storage):
        return (
            placeholder_gradient
            if valid is None
            else jnp.where(valid, value_gradient, placeholder_gradient)
        )
    kept = jnp.ones(value_gradient.shape, bool) if valid is None else valid
    stored = with_values_of(storage, kept.astype(value_gradient.dtype)).todense().real
    total = with_values_of(storage, jnp.where(kept, value_gradient, 0)).todense()
    # Of an entry stored twice, which BCSR may hold, each part has the whole derivative.
    return jnp.where(stored > 0, total / jnp.maximum(stored, 1), placeholder_gradient)
