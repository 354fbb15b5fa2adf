"""Data and mask moved together: every function that only moves entries, by one mechanism.

    data     [1, nan, 3]                flip      [3, nan, 1]
    masked   [F,   T, F]                flip      [F,   T, F]

The function is applied to the data and, in the same way, to the flags of what is masked.
The flags say "masked", not "valid", so that zeros a function brings in (`triu`, `diag`)
come out as entries that are valid.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

from jmask._base.fallback import report_fallback
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor, joined
from jmask._tensors.row_sparse import is_row_sparse
from jmask._tensors.storage import as_dense, is_sparse


def moved(
    function: Callable[..., Any],
    *,
    variadic: bool = False,
    coo: Callable | None = None,
    rows: Callable | None = None,
) -> Callable[..., Any]:
    """Lift a function of `jax.numpy` that moves entries to masked tensors.

    Args:
        function: its first argument is an array or a sequence of arrays; it returns arrays
            of their entries (and zeros).
        variadic: all positional arguments are arrays.
        coo: computes the result for a masked tensor on coordinate storage, or returns None.
        rows: the same for tensors among which there is a `RowSparse`.

    Returns:
        A function that takes a `MaskedTensor` in place of any array, and returns a
        `MaskedTensor` in place of every array if it was given one.
    """

    @functools.wraps(function)
    def lifted(*args: Any, **kwargs: Any) -> Any:
        operands, others = (args, ()) if variadic else (args[:1], args[1:])
        leaves = jax.tree.leaves(operands, is_leaf=is_tensor)
        if not any(map(is_tensor, leaves)):
            return function(*args, **kwargs)
        if coo is not None and is_masked_coo(args[0]):
            result = coo(function, args[0], others, kwargs)
            if result is not None:
                return result
        if rows is not None and any(map(is_row_sparse, leaves)):
            result = rows(function, args[0], others, kwargs)
            if result is not None:
                return result
        operands = jax.tree.map(
            lambda x: dense(x, function.__name__), operands, is_leaf=is_tensor
        )
        data = jax.tree.map(data_of, operands, is_leaf=is_tensor)
        result = function(*data, *others, **kwargs)
        if not any(isinstance(x, MaskedTensor) for x in leaves):
            return result
        masked = jax.tree.map(masked_of, operands, is_leaf=is_tensor)
        masked = function(*masked, *others, **kwargs)
        return jax.tree.map(lambda x, flags: joined(x, ~flags), result, masked)

    return lifted


def data_of(x: Any) -> Any:
    """The data of a dense masked tensor; anything else as it is."""
    return x.storage if isinstance(x, MaskedTensor) else x


def masked_of(x: Any) -> jax.Array:
    """Where a dense masked tensor is masked; nowhere for anything else."""
    return ~x.valid if isinstance(x, MaskedTensor) else jnp.zeros(jnp.shape(x), bool)


def dense(x: Any, name: str) -> Any:
    """`x` on dense storage, with a warning that names the operation if it was sparse."""
    storage = data_of(x)
    if not is_sparse(storage):
        return x
    report_fallback(
        f"`{name}` made a sparse tensor of shape {tuple(x.shape)} dense, at O(size) cost"
    )
    return x.to_dense() if isinstance(x, MaskedTensor) else as_dense(x)


def is_masked_coo(x: Any) -> bool:
    """Whether `x` is a masked tensor that stores a position for each single entry."""
    return isinstance(x, MaskedTensor) and isinstance(x.storage, BCOO) and not x.storage.n_dense


def reshaped_coo(function: Callable, x: Any, others: tuple, kwargs: dict) -> Any:
    """For functions that keep the order of entries: only the positions are computed."""
    if "F" in (*others, *kwargs.values()):
        return None
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    shape = jax.eval_shape(lambda a: function(a, *others, **kwargs), like).shape
    indices = x.storage.indices
    if not shape or 0 in shape:
        return None
    if math.prod(shape) > jnp.iinfo(indices.dtype).max:
        raise ValueError(
            f"`{function.__name__}` of a coordinate tensor of shape {x.shape}: positions in "
            f"{math.prod(shape)} entries do not fit into its {indices.dtype} indices."
        )
    inside = (indices < jnp.array([x.shape], indices.dtype)).all(axis=1)
    flat = jnp.ravel_multi_index(tuple(indices.T), x.shape, mode="clip")
    moved = jnp.stack(jnp.unravel_index(flat, shape), axis=1).astype(indices.dtype)
    moved = jnp.where(inside[:, None], moved, jnp.array([shape], indices.dtype))
    return _at_indices(x, moved, shape, x.storage.indices_sorted)


def permuted_coo(function: Callable, x: Any, others: tuple, kwargs: dict) -> Any:
    """For functions that permute dimensions: the columns of the indices are permuted."""
    # Permuting an empty array of shape (0, 1, 2, ...) tells where each dimension goes.
    numbered = np.empty(tuple(range(x.ndim)))
    axes = getattr(np, function.__name__)(numbered, *others, **kwargs).shape
    shape = tuple(x.shape[axis] for axis in axes)
    return _at_indices(x, x.storage.indices[:, jnp.array(axes)], shape, False)


def _at_indices(x: MaskedTensor, indices: Any, shape: Any, is_sorted: bool) -> MaskedTensor:
    storage = BCOO(
        (x.storage.data, indices),
        shape=tuple(shape),
        indices_sorted=is_sorted,
        unique_indices=x.storage.unique_indices,
    )
    return joined(storage, x.valid)
