"""Turn the ids that a user gives to `catch_up` into row numbers.

{"table": ids}                  along the first dimension of table (V, D)
{"tables": (m, ids)}            of tables (M, V, D), as in `tables[m, ids]`
{"table": [ids, others]}        both
"""

import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jmask._base.row_ids import id_dtype
from jmask._base.types import KeyPath, Numbers, PyTree, Shape
from jmask._base.validation import leaf_name


def chosen_rows(
    paths: Sequence[KeyPath], leaves: Sequence[jax.Array], ids: PyTree
) -> dict[int, jax.Array | None]:
    """Return the numbers (n,) of the rows of each parameter that `ids` names; None for all."""
    if ids is None:
        return dict.fromkeys(range(len(leaves)))
    chosen: dict[int, jax.Array | None] = {}
    for i, node in named_parts("ids", paths, ids).items():
        name = leaf_name("ids", paths[i])
        places = [
            _numbers(name, x, leaves[i].shape)
            for x in (node if isinstance(node, list) else [node])
        ]
        chosen[i] = jnp.concatenate(places) if places else jnp.zeros((0,), jnp.int32)
    return chosen


def named_parts(
    name: str, paths: Sequence[KeyPath], tree: PyTree, owners: str = "the parameters"
) -> dict[int, PyTree]:
    """Return what the argument `name`, a part of a tree like the parameters, has for each."""
    parts = {i: functools.reduce(_child, path, tree) for i, path in enumerate(paths)}
    parts = {i: node for i, node in parts.items() if node is not None}
    if sum(len(jax.tree.leaves(node)) for node in parts.values()) != len(jax.tree.leaves(tree)):
        names = sorted(leaf_name("params", path) for path in paths)
        raise ValueError(
            f"`{name}` names rows of something else than {owners}, {', '.join(names)}: it is a "
            f'tree like `params` with some of these and no others, as {{"table": {name}}}.'
        )
    return parts


def _child(node: PyTree, key: object) -> PyTree:
    """Return what a tree has under the key of a path, or None."""
    if isinstance(node, Mapping):
        return node.get(getattr(key, "key", None))
    index = getattr(key, "idx", None)
    if isinstance(node, list | tuple) and index is not None:
        return node[index] if index < len(node) else None
    return getattr(node, getattr(key, "name", ""), None)


def _numbers(name: str, ids: Numbers | tuple[Numbers, ...], shape: Shape) -> jax.Array:
    """Return the numbers (n,) of rows in a table of `shape`, whose rows are its last dimension.

    Args:
        ids: an array of numbers along the first dimension, or a tuple of such along several.
    """
    sizes = shape[:-1] if len(shape) > 1 else shape
    parts = [jnp.asarray(x) for x in (ids if isinstance(ids, tuple) else (ids,))][: len(sizes)]
    for x in parts:
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} must be row numbers, integers, got {x.dtype}.")
    dtype = id_dtype(math.prod(sizes))
    number = jnp.zeros((), dtype)
    for size, x in zip(sizes, parts, strict=False):
        # Rows outside are rows of the edge, which it does no harm to catch up.
        place = jnp.clip(jnp.where(x < 0, x + size, x), 0, size - 1).astype(dtype)
        number = number * size + place
    each = math.prod(sizes[len(parts) :])
    return (number.reshape(-1, 1) * each + jnp.arange(each, dtype=dtype)[None]).reshape(-1)
