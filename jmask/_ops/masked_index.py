"""Indexing: `x[...]`, with the meaning it has in JAX, and masked indices.

    x               [1, --, 3]          x[1:]                    [--, 3]
    i               [2, --]             x[i]                     [3, --]
    x[numpy.array([True, False, True])]                          [1, 3]

As everywhere in JAX an index out of range reads the entry at the border; a masked index
reads a masked entry.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._ops.masked_moves import data_of, dense, masked_of
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.methods import install


def getitem(x: MaskedTensor, index: Any) -> MaskedTensor:
    """`x[index]`: integers, slices, None, Ellipsis, arrays, masked integers; a list of numbers.

    Raises:
        TypeError: for an index that is a boolean masked tensor.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1, 2, 3]), jnp.array([True, False, True]))
        >>> x[jmask.masked_tensor(jnp.array([2, 0]), jnp.array([True, False]))]
        MaskedTensor([3, --], dtype=int32)
    """
    x = dense(x, "indexing")
    index = with_array(index)
    if not has_masked(index):
        return joined(x.storage[index], x.valid[index])
    places = known_places(index, x.shape, clip=True)
    return joined(
        x.storage.at[places].get(mode="fill", fill_value=0),
        x.valid.at[places].get(mode="fill", fill_value=False),
    )


def with_array(index: Any) -> Any:
    """The index, an array in place of a list: NumPy takes one and JAX none."""
    if not isinstance(index, list):
        return index
    return np.asarray(index) if index else np.zeros(0, np.int32)


def has_masked(index: Any) -> bool:
    """Whether a part of the index is a `MaskedTensor`."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, MaskedTensor) for part in parts)


def known_places(index: Any, shape: tuple[int, ...], *, clip: bool) -> tuple[Any, ...]:
    """The index with masked integers out of range, where nothing is read or written.

    Args:
        index: has masked integers.
        shape: of the tensor that is indexed.
        clip: integers that are out of range and not masked become those at the border.
    """
    parts = index if isinstance(index, tuple) else (index,)
    consumed = [_dimensions(part) for part in parts]
    places, axis = [], 0
    for part, dimensions in zip(parts, consumed, strict=True):
        if part is Ellipsis:
            axis += len(shape) - sum(consumed)
        places.append(_place(part, shape[axis], clip) if dimensions == 1 else part)
        axis += dimensions
    return tuple(places)


def _dimensions(part: Any) -> int:
    """How many dimensions of the tensor a part of an index stands for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    is_mask = getattr(part, "dtype", None) == np.bool_
    return part.ndim if is_mask and not isinstance(part, MaskedTensor) else 1


def _place(part: Any, size: int, clip: bool) -> Any:
    if not isinstance(part, MaskedTensor | int | np.integer | np.ndarray | jax.Array):
        return part
    part = dense(part, "indexing")
    place = jnp.asarray(data_of(part))
    if not jnp.issubdtype(place.dtype, jnp.integer):
        if isinstance(part, MaskedTensor):
            raise TypeError(
                f"a MaskedTensor of {place.dtype} is no index: whether its masked entries "
                "are selected is not known. Use where(), or to_tensor(False) outside jit."
            )
        return part
    # A narrow integer may not hold the size.
    place = place.astype(jnp.int64 if place.dtype.itemsize == 8 else jnp.int32)
    if clip:
        place = jnp.clip(jnp.where(place < 0, place + size, place), 0, max(size - 1, 0))
    return jnp.where(masked_of(part), size, place)


install(masked_getitem=getitem)
