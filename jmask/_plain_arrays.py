"""Row-sparse tensors as plain arrays, for checkpoints, and back.

    {"t": RowSparse}   ->   {"t": {"indices": (n,), "values": (n, *row)}}

The ids of a `RowSparse` travel through pytrees in an opaque dtype, which libraries that
store arrays do not know.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jmask._array_leaves import leaf_name
from jmask._row_sparse import RowSparse, is_row_sparse


def to_arrays(tree: Any) -> Any:
    """The tree with every `RowSparse` replaced by a dict of its `indices` and `values`.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> grads = {"t": jmask.RowSparse([1], jnp.ones((1, 2)), (3, 2))}
        >>> sorted(jmask.to_arrays(grads)["t"])
        ['indices', 'values']
    """

    def arrays(x: Any) -> Any:
        return {"indices": x.indices, "values": x.values} if is_row_sparse(x) else x

    return jax.tree.map(arrays, tree, is_leaf=is_row_sparse)


def from_arrays(arrays: Any, like: Any) -> Any:
    """The tree that `to_arrays` was given.

    Args:
        arrays: what `to_arrays` returned, stored and loaded.
        like: a tree of the original structure; of its `RowSparse` only the shapes count, so
            that it may come from `jax.eval_shape`.

    Raises:
        ValueError: if the structures differ, or a row-sparse leaf is something else.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> grads = {"t": jmask.RowSparse([1], jnp.ones((1, 2)), (3, 2))}
        >>> jmask.from_arrays(jmask.to_arrays(grads), like=grads)
        {'t': RowSparse(float32[3, 2], nse=1)}
    """

    def rebuilt(path: Any, x: Any, given: Any) -> Any:
        if not is_row_sparse(x):
            return given
        if not isinstance(given, Mapping) or not {"indices", "values"} <= given.keys():
            raise ValueError(
                f"{leaf_name('arrays', path)} must be what jmask.to_arrays makes of a "
                f'RowSparse, {{"indices": ..., "values": ...}}, got {type(given).__name__}.'
            )
        return RowSparse(given["indices"], given["values"], x.shape, coalesced=x.coalesced)

    return jax.tree.map_with_path(rebuilt, like, arrays, is_leaf=is_row_sparse)
