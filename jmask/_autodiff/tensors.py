"""Sparse and masked tensors among the arguments that are differentiated.

A tensor is differentiated in its stored values and in its placeholder, and which of the two a
program uses decides about the storage of the gradient:

    fun(x)                              gradient in x, a BCOO
    sum(x @ y)                          BCOO, the positions of x
    sum(todense(x, masked_grad=True))   BCOO, the positions of x
    sum(todense(x))                     array: entries that are not stored count too

Equal positions are one entry: a tensor that may hold some is coalesced first, and so is its
gradient.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from jmask._base.fallback import expect_dense
from jmask._base.types import Argument, PyTree, PyTreeDef, Tensor, TensorLike
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor
from jmask._tensors.specified import (
    placeholder_of,
    with_placeholder,
    with_values_of,
    without_placeholder,
)
from jmask._tensors.storage import (
    is_sparse,
    stored_values,
    unique_positions,
    with_stored_values,
)


class Leaves:
    """The arrays in which arguments are differentiated: of a tensor two.

    Attributes:
        given: arrays, in the order of the arguments; the shape of a placeholder that nobody
            gave.
        placeholders: the numbers of placeholders.
        of_tensors: the numbers of arrays that are of tensors, which are no tables.
        everywhere: whether tensors have their placeholders: at first only those that have
            them of a gradient program around this one.
    """

    def __init__(self, arguments: Sequence[PyTree]) -> None:
        self._tree: PyTreeDef
        leaves, self._tree = jax.tree.flatten(list(arguments), is_leaf=is_tensor)
        self._leaves = [_coalesced(x) for x in leaves]
        self.given: list[Argument] = []
        self.placeholders, self.of_tensors = set[int](), set[int]()
        self.owners: list[int] = []
        self.everywhere = any(placeholder_of(x) is not None for x in self._leaves)
        for number, x in enumerate(self._leaves):
            if not is_tensor(x):
                self._add(number, x if np.ndim(x) == 0 else jnp.asarray(x))
                continue
            self.of_tensors |= {len(self.given), len(self.given) + 1}
            self._add(number, stored_values(x))
            self.placeholders.add(len(self.given))
            # One that has a placeholder is of a gradient program around this one.
            placeholder = placeholder_of(x)
            shape = jax.ShapeDtypeStruct(tuple(x.shape), x.dtype)
            self._add(number, shape if placeholder is None else placeholder)

    def _add(self, number: int, x: Argument) -> None:
        self.owners.append(number)
        self.given.append(x)

    def rebuilt(self, arrays: Sequence[jax.Array]) -> list[PyTree]:
        """Return the arguments with other arrays."""
        rest, leaves = iter(arrays), []
        for x in self._leaves:
            if is_tensor(x):
                tensor: Argument = with_values_of(x, next(rest))
                placeholder = next(rest)
                leaves.append(
                    with_placeholder(tensor, placeholder) if self.everywhere else tensor
                )
            else:
                leaves.append(next(rest))
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
        """Return the gradient of each argument; None is that of what has none."""
        rest, leaves = iter(of_arrays), []
        for x in self._leaves:
            gradient = next(rest)
            if is_tensor(x):
                gradient = _of_tensor(x, gradient, next(rest))
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


def _coalesced(x: TensorLike) -> TensorLike:
    if not is_sparse(x):
        return x
    placeholder = placeholder_of(x)
    x = unique_positions(without_placeholder(x))
    return x if placeholder is None else with_placeholder(x, placeholder)


def _of_tensor(x: Tensor, of_values: jax.Array, everywhere: jax.Array | None) -> Tensor:
    """Return the gradient of a tensor, from those in its stored values and its placeholder."""
    if everywhere is None:
        return with_values_of(x, of_values)
    # At all entries it is that in the stored values where they are specified.
    storage = x.storage if isinstance(x, MaskedTensor) else x
    kept = x.valid if isinstance(x, MaskedTensor) else jnp.ones(of_values.shape, bool)
    if not is_sparse(storage):
        return jnp.where(kept, of_values, everywhere)
    stored = with_stored_values(storage, kept.astype(of_values.dtype)).todense().real
    total = with_stored_values(storage, jnp.where(kept, of_values, 0)).todense()
    # Of an entry stored twice, which BCSR may hold, each part has the whole derivative.
    return jnp.where(stored > 0, total / jnp.maximum(stored, 1), everywhere)
