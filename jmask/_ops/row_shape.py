"""Changes of shape that leave rows rows, for `RowSparse`.

    reshape(x, (V, 2, 3))       on the values: (n, 6) -> (n, 2, 3)
    transpose(x, (0, 2, 1))     on the values
    concatenate([x, y])         the indices of y count on from those of x
    concatenate([x, y], 1)      on the union of the rows

Each rule returns None where the result is not row-sparse: it then becomes dense, and says so.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.row_ids import widen
from jmask._ops.zero_semantics import on_union_of_rows
from jmask._tensors.row_sparse import RowSparse, is_row_sparse


def reshaped_rows(function: Callable, x: Any, others: tuple, kwargs: dict) -> Any:
    """For functions that keep the order of entries."""
    if not is_row_sparse(x) or "F" in (*others, *kwargs.values()):
        return None
    x.check_single()
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    shape = jax.eval_shape(lambda a: function(a, *others, **kwargs), like).shape
    if not shape or shape[0] != x.shape[0] or 0 in shape:
        return None
    return _with_rows(x, x.values.reshape(-1, *shape[1:]), shape)


def permuted_rows(function: Callable, x: Any, others: tuple, kwargs: dict) -> Any:
    """For functions that permute dimensions."""
    if not is_row_sparse(x):
        return None
    x.check_single()
    # Permuting an empty array of shape (0, 1, 2, ...) tells where each dimension goes.
    numbered = np.empty(tuple(range(x.ndim)))
    axes = getattr(np, function.__name__)(numbered, *others, **kwargs).shape
    if axes[0] != 0:
        return None
    shape = tuple(x.shape[axis] for axis in axes)
    return _with_rows(x, x.values.transpose(axes), shape)


def joined_rows(function: Callable, tensors: Any, others: tuple, kwargs: dict) -> Any:
    """For functions that join tensors along an axis that there is."""
    tensors = list(tensors)
    if not all(map(is_row_sparse, tensors)):
        return None
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in tensors]
    result = jax.eval_shape(lambda a: function(a, *others, **kwargs), like)
    if result.ndim != tensors[0].ndim:
        return None
    tensors = [x.astype(result.dtype) for x in tensors]
    if all(x.shape[1:] == result.shape[1:] for x in tensors) and (
        result.shape[0] == sum(x.shape[0] for x in tensors)
    ):
        return _one_below_the_other(tensors, result.shape)
    if any(x.shape[0] != result.shape[0] for x in tensors):
        return None
    rows = on_union_of_rows(tensors)
    # Of the functions that join, the axis is where the sizes add up.
    return _with_rows(
        rows[0], function([x.values for x in rows], *others, **kwargs), result.shape
    )


def _one_below_the_other(tensors: list[RowSparse], shape: tuple[int, ...]) -> RowSparse:
    indices, start = [], 0
    for x in tensors:
        ids = widen(x.row_ids(), shape[0])
        indices.append(jnp.where(ids < x.shape[0], ids + start, shape[0]))
        start += x.shape[0]
    values = jnp.concatenate([x.values for x in tensors])
    return RowSparse(jnp.concatenate(indices), values, shape)


def _with_rows(x: RowSparse, values: jax.Array, shape: tuple[int, ...]) -> RowSparse:
    return x.with_leaves(x.index_leaf, values, shape=tuple(shape))
