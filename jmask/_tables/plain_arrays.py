"""Tensors as plain arrays, for checkpoints, and back.

    {"t": RowSparse}       ->   {"t": {"indices": (n,), "values": (n, *row)}}

The ids of a `RowSparse` travel through pytrees in an opaque dtype, which libraries that store
arrays do not know.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.row_ids import canonical, hide, reveal, widen, wrap
from jmask._base.types import KeyPath, PyTree, PyTreeDef
from jmask._base.validation import abstract_leaf, leaf_name, not_an_array
from jmask._tensors.checks import check_coalesced
from jmask._tensors.row_sparse import RowSparse, is_row_sparse


def to_arrays(tree: PyTree) -> PyTree:
    """Return the tree in plain arrays alone.

    A `RowSparse` becomes a dict of its `indices` and `values`. Arrays, sharded ones too, are
    returned as they are.

    Args:
        tree: any; or of shapes, as `jax.eval_shape` makes them, for shapes in return.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> grads = {"t": jmask.RowSparse([1], jnp.ones((1, 2)), (3, 2))}
        >>> sorted(jmask.to_arrays(grads)["t"])
        ['indices', 'values']
    """

    def arrays(x: PyTree) -> PyTree:
        if not is_row_sparse(x):
            return x
        # All padding is V: a greater number would be a row of a larger table.
        is_shape = isinstance(x.indices, jax.ShapeDtypeStruct)
        ids = x.indices if is_shape else canonical(x.indices, x.row_count)
        return {"indices": ids, "values": x.values}

    return jax.tree.map(arrays, tree, is_leaf=is_row_sparse)


def from_arrays(arrays: PyTree, like: PyTree) -> PyTree:
    """Return a tree of arrays that were stored and loaded, in the form of `like`.

    Args:
        arrays: what `to_arrays` made, or the leaves of the tree itself under their names, as
            orbax restores a tree without being told its types: mappings for named tuples.
        like: a tree of the structure that is wanted; of its arrays only the shapes and dtypes
            count, so that it may come from `jax.eval_shape`.

    Raises:
        ValueError: if the structures or shapes differ, a row-sparse leaf is something else, or
            has an index beyond the rows of `like`, or is not in the order that it promises.
        TypeError: if dtypes differ in kind, as floating and integer ones do.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> grads = {"t": jmask.RowSparse([1], jnp.ones((1, 2)), (3, 2))}
        >>> jmask.from_arrays(jmask.to_arrays(grads), like=grads)
        {'t': RowSparse(float32[3, 2], nse=1)}
    """
    structure: PyTreeDef
    nodes, structure = jax.tree.flatten_with_path(like, is_leaf=is_row_sparse)
    leaves: list[tuple[KeyPath, PyTree]]
    leaves = jax.tree.leaves_with_path(arrays, is_leaf=lambda x: x is None or is_row_sparse(x))
    given = {_names(path): x for path, x in leaves}
    places = [
        [(*_names(path), part) for part in ("indices", "values")]
        if is_row_sparse(x) and _names(path) not in given
        else [_names(path)]
        for path, x in nodes
    ]
    wanted = {names for place in places for names in place}
    if not {names for names, x in given.items() if x is not None} <= wanted <= given.keys():
        raise ValueError(
            f"`arrays` must have the structure of `like`, {jax.tree.structure(like)}, with a "
            'mapping {"indices": ..., "values": ...} for each RowSparse, got '
            f"{jax.tree.structure(arrays)}."
        )
    restored = []
    for (path, x), place in zip(nodes, places, strict=True):
        of = _rows if is_row_sparse(x) else _array
        restored.append(of(leaf_name("arrays", path), x, *(given[names] for names in place)))
    return structure.unflatten(restored)


def _names(path: KeyPath) -> tuple[str, ...]:
    """Return the keys, names and indices of a path: nodes may be mappings in another tree."""
    kinds = ("key", "name", "idx")
    return tuple(str(next(getattr(key, x) for x in kinds if hasattr(key, x))) for key in path)


def _array(name: str, like: PyTree, given: PyTree) -> jax.Array:
    if abstract_leaf(like) is None:
        raise not_an_array(name.replace("arrays", "like", 1), like, "give arrays or shapes")
    array, shape = _checked_kind(name, given, like), jnp.shape(like)
    if jnp.shape(array) != shape:
        raise ValueError(f"{name} has shape {jnp.shape(array)}, and `like` has {shape} there.")
    return array


def _rows(name: str, like: RowSparse, ids: PyTree, *others: PyTree) -> RowSparse:
    """Return rows like these from their ids and values."""
    if not others:
        raise ValueError(
            f"{name} must be what jmask.to_arrays makes of a RowSparse, "
            f'{{"indices": ..., "values": ...}}, got {type(ids).__name__}.'
        )
    (values,), name = others, name[1:-1]
    values = _checked_kind(f"`{name}['values']`", values, like)
    if getattr(ids, "dtype", None) == jnp.uint32 and jnp.ndim(ids) == 2:  # as orbax stores them
        ids = reveal(wrap(ids))
    ids = _checked_kind(f"`{name}['indices']`", ids, jnp.zeros((), jnp.int32))
    if jnp.shape(values)[1:] != like.row or jnp.shape(ids) != jnp.shape(values)[:1]:
        raise ValueError(
            f"`{name}['values']` of shape {jnp.shape(values)} and `{name}['indices']` of "
            f"shape {jnp.shape(ids)} do not fit `like`, {like!r}: expected (n, "
            f"*{like.row}) and (n,)."
        )
    if not isinstance(ids, jax.core.Tracer) and np.any(np.asarray(ids) > like.row_count):
        raise ValueError(
            f"`{name}['indices']` holds {np.max(ids)}, which is no row of `like`, {like!r}: "
            "is it of a larger table?"
        )
    if like.coalesced and not isinstance(ids, jax.core.Tracer):
        check_coalesced(np.asarray(ids), like.row_count)
    return like.with_leaves(hide(widen(ids, like.row_count)), values)


def _checked_kind(name: str, given: PyTree, like: PyTree) -> jax.Array:
    """Return `given` as an array of the kind of `like`."""
    if abstract_leaf(given) is None:
        raise not_an_array(name, given, "give what jmask.to_arrays made")
    dtype, expected = (np.dtype(jnp.result_type(x)) for x in (given, like))
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    same = [jnp.issubdtype(dtype, kind) == jnp.issubdtype(expected, kind) for kind in kinds]
    if not all(same):
        raise TypeError(f"{name} is {dtype}, and `like` has {expected} there.")
    return given
