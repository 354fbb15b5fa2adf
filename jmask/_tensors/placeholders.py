"""Tangent placeholders: where the gradient at entries that are not stored is collected.

JAX keeps a sparse tensor as its stored values, so a gradient has numbers for those alone. A
function that reads the tensor as zeros elsewhere depends on the other entries too, and that
part of its gradient has nowhere to live. The placeholder of a tensor is a dense array of zeros
of its shape, added by operations for which every entry counts:

    x = BCOO of [[-, 3], [4, -]]        - is not stored

    todense(x)                     stored values + placeholder    its gradient: at every entry
    todense(x, masked_grad=True)   stored values                  its gradient: zero

The derivative in the stored values is the same with and without a placeholder, and the one in
the placeholder is read at the other entries only. So the two together are the gradient at
every entry, zero exactly where no operation let the entry count.

A tensor with a placeholder *is* a BCOO, BCSR, `RowSparse` or `MaskedTensor`. Functions that do
not know of placeholders use the stored values and return tensors without one, which is what
their gradients say: nothing at other entries.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.types import Tensor, TensorLike
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import stored_values, with_stored_values

_PLACEHOLDER = jax.tree_util.GetAttrKey("placeholder")


class _WithPlaceholder:
    """A tensor with one more leaf, its placeholder. Comes before the type of the tensor."""

    __slots__ = ()

    placeholder: Any

    def tree_flatten_with_keys(self) -> Any:
        leaves, static = super().tree_flatten_with_keys()  # type: ignore[misc]
        return (*leaves, (_PLACEHOLDER, self.placeholder)), static

    def tree_flatten(self) -> Any:
        leaves, static = super().tree_flatten()  # type: ignore[misc]
        return (*leaves, self.placeholder), static

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Sequence[Any]) -> Any:
        *leaves, placeholder = leaves
        node = super().tree_unflatten(static, leaves)  # type: ignore[misc]
        node.placeholder = placeholder
        return node


@jax.tree_util.register_pytree_node_class
class BCOOWithPlaceholder(_WithPlaceholder, BCOO):
    """A BCOO with a placeholder."""


@jax.tree_util.register_pytree_node_class
class BCSRWithPlaceholder(_WithPlaceholder, BCSR):
    """A BCSR with a placeholder."""


@jax.tree_util.register_pytree_with_keys_class
class RowSparseWithPlaceholder(_WithPlaceholder, RowSparse):
    """A `RowSparse` with a placeholder."""

    __slots__ = ("placeholder",)


@jax.tree_util.register_pytree_with_keys_class
class MaskedTensorWithPlaceholder(_WithPlaceholder, MaskedTensor):
    """A `MaskedTensor` with a placeholder."""

    __slots__ = ("placeholder",)


_KINDS = (
    (BCOO, BCOOWithPlaceholder),
    (BCSR, BCSRWithPlaceholder),
    (RowSparse, RowSparseWithPlaceholder),
    (MaskedTensor, MaskedTensorWithPlaceholder),
)


def values_of(x: TensorLike) -> jax.Array:
    """Return the stored values of a sparse or masked tensor; of an array, the array."""
    return stored_values(x.storage if isinstance(x, MaskedTensor) else x)


def with_values_of(x: TensorLike, values: jax.Array) -> Tensor:
    """Replace the stored values, at the same positions; the result has no placeholder."""
    if isinstance(x, MaskedTensor):
        return joined(with_stored_values(x.storage, values), x.valid)
    return with_stored_values(x, values)


def with_placeholder(x: TensorLike, placeholder: jax.Array | None) -> Tensor:
    """Return the sparse or masked tensor `x` with this placeholder in place of its own."""
    x = without_placeholder(x)
    leaves, static = x.tree_flatten()
    kind = next(kind for base, kind in _KINDS if isinstance(x, base))
    return kind.tree_unflatten(static, (*leaves, placeholder))


def placeholder_of(x: TensorLike) -> Any | None:
    """Return the placeholder of `x`, None if it has none."""
    return getattr(x, "placeholder", None) if is_tensor(x) else None


def zero_placeholder(x: TensorLike) -> jax.Array:
    """Return a placeholder that says nothing yet: zeros of the shape and dtype of `x`."""
    return jnp.zeros(tuple(x.shape), x.dtype)


def without_placeholder(x: TensorLike) -> Tensor:
    """Return `x` without a placeholder."""
    if placeholder_of(x) is None:
        return x
    leaves, static = x.tree_flatten()
    kind = next(base for base, _ in _KINDS if isinstance(x, base))
    return kind.tree_unflatten(static, leaves[:-1])
