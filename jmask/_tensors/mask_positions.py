"""Data and mask brought to one storage: which stored values are valid entries.

    data    positions 1 1 4, values 2 3 5      mask    positions 1 4 6, all True
    entries                                    1: 2 + 3,   4: 5,   6 is not stored

An entry exists where the data stores it and the mask is True. Equal positions are one entry:
the sum of those that exist, if any does.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR

from jmask._tensors.storage import (
    Storage,
    equal_positions,
    has_unique_positions,
    is_entry,
    is_sparse,
    same_positions,
    sampled,
    stored_values,
    stype,
    unique_positions,
    values_at,
    with_stored_values,
)


def on_dense(data: Any, mask: Any) -> tuple[jax.Array, jax.Array]:
    """Return an array and a mask that broadcast against each other, in one shape."""
    data = jnp.asarray(data)
    if mask is None:
        return data, jnp.ones(data.shape, bool)
    _check_boolean(mask)
    mask = jnp.asarray(mask)
    try:
        shape = jnp.broadcast_shapes(data.shape, mask.shape)
    except ValueError:
        raise ValueError(
            f"`mask` of shape {mask.shape} does not broadcast with `data` of shape "
            f"{data.shape}."
        ) from None
    return jnp.broadcast_to(data, shape), jnp.broadcast_to(mask, shape)


def on_sparse(data: Storage, mask: Any) -> tuple[Any, jax.Array]:
    """Bring sparse data and a mask, sparse or not, to unique positions; say what is valid."""
    _check_layout(data)
    if is_sparse(mask):
        return _at_positions_of(booleans(mask), data)
    valid = jnp.ones(stored_values(data).shape, bool)
    if mask is not None:
        _check_boolean(mask)
        valid = _stored_mask(data, jnp.asarray(mask))
    return _merged(data, valid)


def _merged(data: Storage, valid: jax.Array) -> tuple[Any, jax.Array]:
    """Make equal positions one entry: the sum of what is valid, if anything is."""
    if has_unique_positions(data):
        return data, valid & is_entry(data)
    return _summed(data, valid)


# Some fifty operations, which outside jit would each be called from Python.
@functools.partial(jax.jit, inline=True)
def _summed(data: Storage, valid: jax.Array) -> tuple[Any, jax.Array]:
    values = stored_values(data)
    existing = with_stored_values(data, jnp.where(valid, values, jnp.zeros_like(values)))
    number = unique_positions(with_stored_values(data, valid.astype(jnp.int32)))
    merged = unique_positions(existing)
    return merged, (stored_values(number) > 0) & is_entry(merged)


def _at_positions_of(mask: Any, data: Storage) -> tuple[Any, jax.Array]:
    """Return the data that a sparse mask has positions for, and which of it is valid.

    A mask with the index arrays of the data says of each stored value whether it is valid,
    any other one of each position. Whether traced arrays are equal is known to the program.
    """
    if same_positions(data, mask):
        return _merged(data, stored_values(mask))
    positions = unique_positions(mask)
    at_positions = values_at(positions, data)
    if at_positions is None:
        raise ValueError(
            f"`data` ({type(data).__name__} of shape {tuple(data.shape)}) and `mask` "
            f"({type(mask).__name__} of shape {tuple(mask.shape)}) must have one shape and "
            "store positions in the same way: entries, or rows. Pass the mask as a dense "
            "array, or the booleans of the stored values, of shape "
            f"{stored_values(data).shape}."
        )
    valid = functools.reduce(operator.and_, at_positions)
    # Without repeated positions the two readings are one.
    if not (has_unique_positions(data) or has_unique_positions(mask)):
        alike = equal_positions(data, mask)
        valid = valid if alike is False else jnp.where(alike, stored_values(mask), valid)
    data, valid = _merged(data, valid)
    stored, values, valid = values_at(data, positions, valid)  # type: ignore[misc]
    return with_stored_values(positions, values), valid & stored


def _stored_mask(data: Any, mask: jax.Array) -> jax.Array:
    shape = stored_values(data).shape
    fits_entries, fits_stored = mask.shape == tuple(data.shape), mask.shape == shape
    if fits_entries and fits_stored:
        raise ValueError(
            f"`mask` of shape {mask.shape} may be meant for the entries of the tensor or for "
            f"its stored values, which are as many: pass it as a {type(data).__name__} with "
            "the index arrays of `data`."
        )
    if fits_entries:
        return sampled(mask, data)
    if fits_stored:
        return mask
    raise ValueError(
        f"`mask` of shape {mask.shape} fits neither the tensor of shape "
        f"{tuple(data.shape)} nor its stored values of shape {shape}."
    )


def booleans(mask: Any) -> Any:
    """Return a sparse mask of booleans.

    Raises:
        TypeError: if it is none.
    """
    mask = as_booleans(mask)
    _check_boolean(mask)
    return mask


def as_booleans(x: Any) -> Any:
    """Undo what JAX does to booleans in storages of entries, which it makes int32."""
    if isinstance(x, BCOO | BCSR) and jnp.issubdtype(x.dtype, jnp.integer):
        return with_stored_values(x, x.data != 0)
    return x


def _check_boolean(mask: Any) -> None:
    stype(mask, "mask")  # refuses what is no storage
    dtype = stored_values(mask).dtype if is_sparse(mask) else jnp.result_type(mask)
    if dtype != jnp.dtype(bool):
        raise TypeError(
            f"`mask` must be boolean, True where an entry is valid, got {dtype}. Write "
            "`mask != 0` if that is meant."
        )


def _check_layout(data: Any) -> None:
    batch = getattr(data, "n_batch", 0)
    if batch:
        raise ValueError(
            f"`data` is a {type(data).__name__} with {batch} batch dimensions: use "
            "vmap over tensors without them."
        )
