"""Row-sparse tensors as plain arrays, for checkpoints, and back.

    {"t": RowSparse}   ->   {"t": {"indices": (n,), "values": (n, *row)}}

The ids of a `RowSparse` travel through pytrees in an opaque dtype, which libraries that
store arrays do not know.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.leaves import abstract_leaf, is_about_structure, leaf_name, not_an_array
from jmask._tables.stored_table import is_stored_table
from jmask._tensors.row_sparse import RowSparse, is_row_sparse


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
        ValueError: if the structures, shapes or placements of sharded tables differ, a
            row-sparse leaf is something else, or has an index beyond the rows of `like`, or
            is not in the order that it promises.
        TypeError: if dtypes differ in kind, as floating and integer ones do.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> grads = {"t": jmask.RowSparse([1], jnp.ones((1, 2)), (3, 2))}
        >>> jmask.from_arrays(jmask.to_arrays(grads), like=grads)
        {'t': RowSparse(float32[3, 2], nse=1)}
    """

    def rebuilt(path: Any, x: Any, given: Any) -> Any:
        if not is_row_sparse(x):
            return _as_like(leaf_name("arrays", path), given, x)
        if not isinstance(given, Mapping) or not {"indices", "values"} <= given.keys():
            raise ValueError(
                f"{leaf_name('arrays', path)} must be what jmask.to_arrays makes of a "
                f'RowSparse, {{"indices": ..., "values": ...}}, got {type(given).__name__}.'
            )
        name = leaf_name("arrays", path)[1:-1]
        values = _of_kind(f"`{name}['values']`", given["values"], x)
        ids = _of_kind(f"`{name}['indices']`", given["indices"], jnp.zeros((), jnp.int32))
        if jnp.shape(values)[1:] != x.shape[1:] or jnp.shape(ids) != jnp.shape(values)[:1]:
            raise ValueError(
                f"`{name}['values']` of shape {jnp.shape(values)} and `{name}['indices']` of "
                f"shape {jnp.shape(ids)} do not fit `like`, {x!r}: expected (n, "
                f"*{x.shape[1:]}) and (n,)."
            )
        if not isinstance(ids, jax.core.Tracer) and np.any(np.asarray(ids) > x.shape[0]):
            raise ValueError(
                f"`{name}['indices']` holds {np.max(ids)}, which is no row of `like`, {x!r}: "
                "is it of a larger table?"
            )
        return RowSparse(ids, values, x.shape, coalesced=x.coalesced)

    try:
        return jax.tree.map_with_path(rebuilt, like, arrays, is_leaf=is_row_sparse)
    except ValueError as error:
        if str(error).startswith("`") or not is_about_structure(error):
            raise
        _check_placed_alike(arrays, like)
        raise ValueError(
            f"`arrays` must have the structure of `like`, {jax.tree.structure(like)}, with a "
            'mapping {"indices": ..., "values": ...} for each RowSparse, got '
            f"{jax.tree.structure(arrays)}."
        ) from error


def _check_placed_alike(arrays: Any, like: Any) -> None:
    tables, expected = (
        jax.tree.leaves_with_path(x, is_leaf=is_stored_table) for x in (arrays, like)
    )
    for (path, x), (other, y) in zip(tables, expected, strict=False):
        structures: list[Any] = [jax.tree.structure(x), jax.tree.structure(y)]
        alike = path != other or structures[0] == structures[1]
        if is_stored_table(x) and is_stored_table(y) and not alike:
            raise ValueError(
                f"{leaf_name('arrays', path)} is a {x!r} that is placed otherwise than `like` "
                "has it: restore it as it was saved, and convert it then, with "
                "`table.with_placement(...)` or by `table.todense()`."
            )


def _as_like(name: str, given: Any, like: Any) -> Any:
    if abstract_leaf(like) is None:
        raise not_an_array(name.replace("arrays", "like", 1), like, "give arrays or shapes")
    shape = jnp.shape(like)
    given = _of_kind(name, given, like)
    if jnp.shape(given) != tuple(shape):
        raise ValueError(f"{name} has shape {jnp.shape(given)}, and `like` has {shape} there.")
    return given


def _of_kind(name: str, given: Any, like: Any) -> Any:
    """`given`, an array of numbers of the kind of `like`."""
    if abstract_leaf(given) is None:
        raise not_an_array(name, given, "give what jmask.to_arrays made")
    found, expected = (np.dtype(jnp.result_type(x)) for x in (given, like))
    kinds = [_kind(x) for x in (found, expected)]
    if kinds[0] != kinds[1]:
        raise TypeError(f"{name} is {found}, and `like` has {expected} there.")
    return given


def _kind(dtype: Any) -> Any:
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), dtype)
