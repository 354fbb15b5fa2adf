"""`todense` and `sparse_mask`: from the specified entries of a tensor to all, and back.

    x = BCOO of [[-, 3],      todense(x)          sparse_mask([[5, 6],     [[-, 6],
                 [4, -]]      [[0, 3], [4, 0]]                 [7, 8]], x) = [7, -]]

An entry that is not specified counts for zero in the first, and is left out of the second.
`todense(x)` sends a gradient to every entry of x, `todense(x, masked_grad=True)` to those that
are specified, `sparse_mask(x, mask)` to those that `mask` specifies. Other functions of sparse
tensors compute with stored values, and their gradients go there: `x @ y` is the matrix product
with masked gradient, `todense(x) @ y` with an ordinary tensor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR
from jax.extend.core import Jaxpr

from jmask._base.fallback import report_fallback
from jmask._base.forms import calls
from jmask._base.types import PyTree, Sparse, Storage, Tensor, TensorLike
from jmask._base.validation import check_flag
from jmask._tensors.masked_tensor import MaskedTensor, checked_mask, is_tensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import (
    as_dense,
    is_entry,
    is_sparse,
    read_at_positions,
    same_positions,
    sampled,
    sparse_sizes,
    stored_values,
    stype,
    unique_positions,
    with_stored_values,
)

_Tensor = TypeVar("_Tensor", bound=Tensor)


def todense(x: TensorLike, *, masked_grad: bool = False) -> jax.Array:
    """Return the dense array of a tensor, 0 at entries that are not specified.

    Args:
        x: an array, `RowSparse`, BCOO, BCSR or `MaskedTensor`.
        masked_grad: whether the gradient goes to the specified entries of `x` only. By
            default it goes to every entry, and with `jmask.grad` a sparse `x` has a dense
            gradient. JAX's own transformations keep the stored part of it.

    Returns:
        An array of the shape of `x`.

    Raises:
        TypeError: if `x` is none of these.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.RowSparse([1], jnp.array([3.]), (3,))
        >>> jmask.grad(lambda x: jnp.sum(jmask.todense(x)))(x)
        Array([1., 1., 1.], dtype=float32)
        >>> jmask.grad(lambda x: jnp.sum(jmask.todense(x, masked_grad=True)))(x)
        RowSparse(float32[3], nse=1)
    """
    check_flag("masked_grad", masked_grad)
    if not is_tensor(x):
        stype(x)  # refuses what is no tensor
        return jnp.asarray(x)
    dense = x.to_tensor(0) if isinstance(x, MaskedTensor) else as_dense(without_placeholder(x))
    # The placeholder is an array of zeros, through which the gradient reaches entries that are
    # not stored.
    if masked_grad:
        return dense
    placeholder = placeholder_of(x)
    dense = jmask_everywhere(dense)
    return dense if placeholder is None else dense + placeholder


@jax.jit
def jmask_everywhere(dense: jax.Array) -> jax.Array:
    """Return the array. In a jaxpr, the name of this call marks that every entry counts."""
    return dense


def counts_everywhere(jaxpr: Jaxpr) -> bool:
    """Decide whether entries that are not specified count in a program, by `todense`."""
    return calls(jaxpr, "jmask_everywhere")


def sparse_mask(x: TensorLike, mask: TensorLike) -> Tensor:
    """Return the entries of `x` that `mask` specifies; the gradient goes to these alone.

    Args:
        x: an array, `RowSparse`, BCOO, BCSR or `MaskedTensor`. Entries that a sparse `x`
            does not store are zeros; those that a masked `x` does not have stay masked.
        mask: of the same shape. A `RowSparse`, BCOO or BCSR specifies what it stores, a
            `MaskedTensor` its valid entries, whatever their values. A boolean array
            specifies where it is True.

    Returns:
        A tensor with the storage and the positions of `mask`, coalesced; for a boolean
        array the storage of `x`, 0 elsewhere. A `MaskedTensor` if `x` or `mask` is one.

    Raises:
        TypeError: if `x` is no tensor, or `mask` no tensor and not boolean.
        ValueError: if the shapes differ.

    Warns:
        StorageFallbackWarning: if one of `x` and `mask` stores rows and the other entries, so
            that `x` had to be made dense.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> from jax.experimental.sparse import BCOO
        >>> mask = BCOO.fromdense(jnp.array([[0., 1.], [1., 0.]]))
        >>> jmask.sparse_mask(jnp.array([[5., 6.], [7., 8.]]), mask).todense().tolist()
        [[0.0, 6.0], [7.0, 0.0]]
    """
    x = x if is_tensor(x) else todense(x)
    mask = without_placeholder(mask if is_tensor(mask) else checked_mask(mask))
    if getattr(mask, "n_batch", 0) or getattr(x, "n_batch", 0):
        raise ValueError(
            "`x` and `mask` may not have batch dimensions: use vmap over tensors without them."
        )
    if tuple(x.shape) != tuple(mask.shape):
        raise ValueError(
            f"`mask` must have the shape of `x`, {tuple(x.shape)}, got shape "
            f"{tuple(mask.shape)}."
        )
    placeholder, x = placeholder_of(x), without_placeholder(x)
    storage = x.storage if isinstance(x, MaskedTensor) else x
    if isinstance(mask, MaskedTensor):
        pattern, specified = mask.storage, mask.valid
    elif is_sparse(mask):
        pattern = unique_positions(mask)
        specified = is_entry(pattern)
    else:
        pattern, specified = storage, sampled(mask, storage)
    values, exists = stored_values(x), getattr(x, "valid", jnp.ones((), bool))
    if not same_positions(storage, pattern):
        values = jnp.where(exists, values, jnp.zeros((), values.dtype))
        values = _at_positions_of(pattern, storage, values)
        if isinstance(x, MaskedTensor):
            exists = _at_positions_of(pattern, storage, exists)
        elif placeholder is not None:
            values += sampled(placeholder, pattern)
    valid = specified & exists
    result = with_stored_values(pattern, jnp.where(valid, values, jnp.zeros_like(values)))
    if isinstance(x, MaskedTensor) or isinstance(mask, MaskedTensor):
        return joined(result, valid)
    if is_sparse(mask) or placeholder is None or not is_sparse(result):
        return result
    return with_placeholder(result, jnp.where(mask, placeholder, 0))


def _at_positions_of(pattern: Storage, storage: Storage, values: jax.Array) -> jax.Array:
    """Read `values`, which `storage` stores at its positions, at the positions of `pattern`."""
    if is_sparse(storage) and is_sparse(pattern):
        if sparse_sizes(storage) == sparse_sizes(pattern):
            return read_at_positions(storage, values, pattern)
        report_fallback(  # a dense mask asks for a dense result
            f"`sparse_mask` made a {stype(storage)} tensor of shape {tuple(storage.shape)} "
            "dense, at O(size) cost: its positions are laid out otherwise than those of the "
            f"{stype(pattern)} mask"
        )
    return sampled(as_dense(with_stored_values(storage, values)), pattern)


# --- placeholders --------------------------------------------------------------------------
#
# JAX keeps a sparse tensor as its stored values, so a gradient has numbers for those alone. The
# tangent placeholder is a dense array of zeros that `todense` adds, so that its gradient has
# the derivatives at the other entries. A tensor with a placeholder *is* a BCOO, BCSR,
# `RowSparse` or `MaskedTensor`; functions that do not know of it return tensors without one,
# which is what their gradients say: nothing at other entries.


class _WithPlaceholder:
    """A tensor with one more leaf, its placeholder. Comes before the type of the tensor."""

    __slots__ = ()

    placeholder: jax.Array | None

    def tree_flatten(self) -> tuple[Sequence[PyTree], PyTree]:
        leaves, static = super().tree_flatten()  # type: ignore[misc]
        return (*leaves, self.placeholder), static

    @classmethod
    def tree_unflatten(cls, static: PyTree, leaves: Sequence[PyTree]) -> Self:
        *leaves, placeholder = leaves
        node = super().tree_unflatten(static, leaves)  # type: ignore[misc]
        node.placeholder = placeholder
        return node


def _subclass(base: type) -> PyTree:
    kind = type(f"{base.__name__}WithPlaceholder", (_WithPlaceholder, base), {})
    return jax.tree_util.register_pytree_node_class(kind)


_KINDS: dict[type, PyTree] = {x: _subclass(x) for x in (BCOO, BCSR, RowSparse, MaskedTensor)}
_BASES: dict[type, PyTree] = {kind: base for base, kind in _KINDS.items()}


def with_placeholder(x: Sparse | MaskedTensor, placeholder: jax.Array | None) -> Tensor:
    """Return the sparse or masked tensor `x` with this placeholder in place of its own."""
    x = without_placeholder(x)
    leaves, static = x.tree_flatten()
    return _KINDS[type(x)].tree_unflatten(static, (*leaves, placeholder))


def placeholder_of(x: object) -> jax.Array | None:
    return getattr(x, "placeholder", None) if is_tensor(x) else None


def without_placeholder(x: _Tensor) -> _Tensor:
    base = _BASES.get(type(x))
    if base is None or not is_tensor(x):
        return x
    leaves, static = x.tree_flatten()
    return base.tree_unflatten(static, leaves[:-1])
