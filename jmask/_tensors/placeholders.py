"""Phantom primals: a place for the gradient at entries that are not there.

JAX keeps a sparse tensor as its stored values, so a gradient has numbers for those alone. A
function that reads the tensor as zeros elsewhere depends on the other entries too, and that
part of its gradient has nowhere to live. The phantom of a tensor is a dense array of zeros of
its shape, added by operations for which every entry counts:

    x = BCOO of [[-, 3], [4, -]]        - is not stored

    todense(x)                     stored values + phantom   its gradient: at every entry
    todense(x, masked_grad=True)   stored values             its gradient: zero

The derivative in the stored values is the same with and without a phantom, and the one in the
phantom is read at the other entries only. So the two together are the gradient at every entry,
zero exactly where no operation let the entry count.

A tensor with a phantom *is* a BCOO, BCSR, `RowSparse` or `MaskedTensor`. Functions that do not
know of phantoms use the stored values and return tensors without one, which is what their
gradients say: nothing at other entries.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR

from jmask._tensors.masked_tensor import MaskedTensor, is_tensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import is_sparse, stored_values, with_stored_values

_PHANTOM = jax.tree_util.GetAttrKey("phantom")


class _WithPhantom:
    """A tensor with one more leaf, its phantom. Comes before the type of the tensor."""

    __slots__ = ()

    phantom: Any

    def tree_flatten_with_keys(self) -> Any:
        leaves, static = super().tree_flatten_with_keys()  # type: ignore[misc]
        return (*leaves, (_PHANTOM, self.phantom)), static

    def tree_flatten(self) -> Any:
        leaves, static = super().tree_flatten()  # type: ignore[misc]
        return (*leaves, self.phantom), static

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> Any:
        *leaves, phantom = leaves
        node = super().tree_unflatten(static, leaves)  # type: ignore[misc]
        node.phantom = phantom
        return node


@jax.tree_util.register_pytree_node_class
class PhantomBCOO(_WithPhantom, BCOO):
    """A BCOO with a phantom."""


@jax.tree_util.register_pytree_node_class
class PhantomBCSR(_WithPhantom, BCSR):
    """A BCSR with a phantom."""


@jax.tree_util.register_pytree_with_keys_class
class PhantomRowSparse(_WithPhantom, RowSparse):
    """A `RowSparse` with a phantom."""

    __slots__ = ("phantom",)


@jax.tree_util.register_pytree_with_keys_class
class PhantomMaskedTensor(_WithPhantom, MaskedTensor):
    """A `MaskedTensor` with a phantom."""

    __slots__ = ("phantom",)


_KINDS = (
    (BCOO, PhantomBCOO),
    (BCSR, PhantomBCSR),
    (RowSparse, PhantomRowSparse),
    (MaskedTensor, PhantomMaskedTensor),
)


def values_of(x: Any) -> Any:
    """Return the stored values of a sparse or masked tensor; of an array, the array."""
    return stored_values(x.storage if isinstance(x, MaskedTensor) else x)


def with_values_of(x: Any, values: Any) -> Any:
    """Return the tensor, without a phantom, with other stored values at the same positions."""
    if isinstance(x, MaskedTensor):
        storage = with_stored_values(x.storage, values)
        return joined(storage, x.valid)
    x = without_phantom(x)
    if is_sparse(x):
        # Unlike a constructor this keeps the type and everything else it says of itself.
        leaves, static = x.tree_flatten()
        number = 1 if isinstance(x, RowSparse) else 0
        leaves = (*leaves[:number], values, *leaves[number + 1 :])
        return type(x).tree_unflatten(static, leaves)
    return values


def with_phantom(x: Any, phantom: Any) -> Any:
    """Return the sparse or masked tensor `x` with this phantom in place of its own."""
    x = without_phantom(x)
    leaves, static = x.tree_flatten()
    kind = next(kind for base, kind in _KINDS if isinstance(x, base))
    return kind.tree_unflatten(static, (*leaves, phantom))


def phantom_of(x: Any) -> Any | None:
    """Return the phantom of `x`, None if it has none."""
    return getattr(x, "phantom", None) if is_tensor(x) else None


def zero_phantom(x: Any) -> jax.Array:
    """Return a phantom that says nothing yet: zeros of the shape and dtype of `x`."""
    return jnp.zeros(tuple(x.shape), x.dtype)


def without_phantom(x: Any) -> Any:
    """Return `x` without a phantom."""
    if phantom_of(x) is None:
        return x
    leaves, static = x.tree_flatten()
    kind = next(base for base, _ in _KINDS if isinstance(x, base))
    return kind.tree_unflatten(static, leaves[:-1])
