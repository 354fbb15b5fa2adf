"""Masked gradients as optimizers take them: rows or an array, and which entries are valid.

    MaskedTensor on                     gradient                 valid
    dense storage (V, D)                array, 0 where masked    (V, D)
    RowSparse with n rows               RowSparse, coalesced     (n, D)
    BCOO, BCSR with nse entries         RowSparse of their rows  (min(nse, V), D)

A plain BCOO is one of these whose entries are all valid: it updates the entries of a table that
it stores, as a RowSparse does the rows.

A parameter, and the state that belongs to it, moves where an entry is valid. Elsewhere the
update is -0.0, the one number that changes nothing when added: -0.0 + 0.0 would be 0.0.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.leaves import abstract_leaf, leaf_name, not_an_array
from jmask._base.precision import is_narrow
from jmask._kernels.coalesce import unique_slots
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import coordinates, is_sparse, stored_values
from jmask._updates.not_row_local import NotRowLocalError


def is_gradient_leaf(x: Any) -> bool:
    """Whether `x` is a sparse or masked gradient: one leaf, not a subtree."""
    return isinstance(x, RowSparse | MaskedTensor | BCOO | BCSR)


def check_gradients(updates: Any, name: str = "updates") -> None:
    """Refuse leaves that are no arrays.

    Raises:
        TypeError: naming the first.
    """
    for path, x in jax.tree.leaves_with_path(updates, is_leaf=is_gradient_leaf):
        if not is_gradient_leaf(x) and abstract_leaf(x) is None:
            advice = "gradients are those of jmask.grad or jax.grad"
            raise not_an_array(leaf_name(name, path), x, advice)


def as_gradients(updates: Any) -> Any:
    """The tree with each BCOO as masked rows, of which the entries that it stores exist.

    Their ids refuse arithmetic, which optax maps over the indices of a BCOO without a word.

    Raises:
        TypeError: if a leaf is a BCSR, or something mapped arithmetic over the indices of a
            BCOO.
    """

    check_gradients(updates)

    def entries(path: Any, x: Any) -> Any:
        if not isinstance(x, BCOO | BCSR):
            return x
        if isinstance(x, BCSR):
            raise TypeError(
                f"{leaf_name('updates', path)} is a BCSR: of sparse gradients optimizers take "
                "RowSparse, MaskedTensor and BCOO, `x.to_bcoo()`."
            )
        if not jnp.issubdtype(x.indices.dtype, jnp.integer):
            raise TypeError(
                f"{leaf_name('updates', path)} is a BCOO with indices of {x.indices.dtype}: "
                "something mapped arithmetic over its leaves. Put the optax transformation "
                "inside jmask.lazy(...)."
            )
        masked = MaskedTensor(x)
        if not x.n_sparse:
            return masked
        rows = _entries_as_rows(masked.storage, stored_values(masked.storage), masked.valid)
        return MaskedTensor.tree_unflatten(None, rows)

    return jax.tree.map_with_path(entries, updates, is_leaf=is_gradient_leaf)


def gradient_and_valid(gradient: Any) -> tuple[Any, jax.Array | None]:
    """A gradient leaf as array or coalesced `RowSparse`, and its valid entries if masked."""
    if is_row_sparse(gradient):
        return summed(gradient), None
    if not isinstance(gradient, MaskedTensor):
        return gradient, None
    storage, valid = gradient.storage, gradient.valid
    if not gradient.ndim:
        raise ValueError(
            "a MaskedTensor gradient needs at least one dimension, got a scalar: use a "
            "plain array for the gradient of a scalar parameter."
        )
    values = jnp.where(valid, stored_values(storage), 0)
    if not is_sparse(storage):
        return values, valid
    if is_row_sparse(storage):
        return storage.with_values(values), valid
    return _entries_as_rows(storage, values, valid)


def with_wide_rows(gradients: Any) -> Any:
    """Return gradients with 16-bit rows in float32 where rows of equal ids are to be summed.

    An optimizer computes with the sums, and what it makes of them is rounded once, where it is
    stored: a sum that is rounded first loses what is left of 1 - 1.003 in bfloat16. Unique rows
    keep their dtype, and optax's optimizers return updates of the same.
    """
    return jax.tree.map(
        lambda x: x.widened() if _is_16_bit_sum(x) else x, gradients, is_leaf=is_gradient_leaf
    )


def has_16_bit_sums(gradients: Any) -> bool:
    """Whether `with_wide_rows` has something to do."""
    return any(map(_is_16_bit_sum, jax.tree.leaves(gradients, is_leaf=is_gradient_leaf)))


def _is_16_bit_sum(gradient: Any) -> bool:
    return is_row_sparse(gradient) and gradient.order == "any" and is_narrow(gradient.dtype)


def summed(gradient: RowSparse) -> RowSparse:
    """The gradient with the rows of equal ids summed."""
    return gradient.coalesce() if gradient.order == "any" else gradient


def masked_as(gradient: Any, result: Any) -> Any:
    """An array or rows computed from a gradient leaf, masked where the gradient is."""
    if not isinstance(gradient, MaskedTensor):
        return result
    return joined(result, gradient_and_valid(gradient)[1])


def unchanged_where_masked(update: Any, valid: jax.Array | None) -> Any:
    """The update of a parameter, -0.0 where the gradient is masked."""
    return keep_valid(update, jnp.asarray(-0.0, jnp.result_type(update)), valid)


def keep_valid(new: Any, old: Any, valid: jax.Array | None) -> Any:
    """`new` where valid, `old` elsewhere.

    Args:
        new: of the shape of `valid`, or with one entry for each of its rows: (n,), (n, 1).
        old: of the shape of `new`.
        valid (n, *row): which entries of the gradient are valid, or None for all.
    """
    if valid is None:
        return new
    shape = jnp.shape(new)
    valid = valid.any(tuple(range(len(shape), valid.ndim)))
    merged = tuple(d for d, size in enumerate(shape) if size == 1 != valid.shape[d])
    valid = valid.any(merged, keepdims=True)
    if valid.shape != shape:
        raise NotRowLocalError(
            f"its state of shape {shape} matches neither the entries nor the rows of a "
            "masked gradient"
        )
    return jnp.where(valid, new, old)


def _entries_as_rows(
    storage: Any, values: jax.Array, valid: jax.Array
) -> tuple[RowSparse, jax.Array]:
    """Entries (nse,) at coordinates (row, ...) as coalesced rows and their valid entries."""
    rows, row = storage.shape[0], tuple(storage.shape[1:])
    values = jnp.where(_in_promised_order(storage), values, jnp.nan).astype(values.dtype)
    first, *others = coordinates(storage)
    slots = min(values.shape[0], rows)
    if slots == 0:
        return RowSparse.zeros(storage.shape, values.dtype), jnp.zeros((0, *row), bool)
    entry = valid.reshape(valid.shape[0], -1).any(1)
    ids, slot = unique_slots(jnp.where(entry, first, rows), slots, rows)
    places = (slot, *others)
    gradient = jnp.zeros((slots, *row), values.dtype).at[places].set(values, mode="drop")
    kept = jnp.zeros((slots, *row), bool).at[places].set(valid, mode="drop")
    return RowSparse(ids, gradient, storage.shape, coalesced=True), kept


def _in_promised_order(storage: Any) -> jax.Array | bool:
    """Whether positions are as they were: arithmetic mapped over them may leave integers."""
    if not (isinstance(storage, BCOO) and storage.indices_sorted and storage.unique_indices):
        return True
    before, after = storage.indices[:-1], storage.indices[1:]
    first = jnp.argmax(before != after, axis=1)[:, None]
    grows = jnp.take_along_axis(before < after, first, axis=1)[:, 0]
    is_padding = (after >= jnp.asarray(storage.shape[: storage.n_sparse])[None]).any(1)
    return jnp.all(grows | is_padding)
