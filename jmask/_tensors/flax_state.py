"""State dicts of flax: `flax.serialization.to_bytes` and `from_bytes` of tensors.

    RowSparse        {"indices": ids, "values": rows}         ids as integers
    MaskedTensor     {"data": array, "mask": booleans}

flax looks types up in a registry, and jmask does not import flax: a type is registered when one
of its objects is made after flax was imported.
"""

import sys

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmask._base.row_ids import hide, is_opaque, reveal
from jmask._base.types import Tensor

_registered: set[type] = set()


def register_in_flax(kind: type) -> None:
    """Let flax store objects of this type, if flax is there."""
    if kind in _registered:
        return
    serialization = sys.modules.get("flax.serialization")
    register = getattr(serialization, "register_serialization_state", None)
    if register is not None:  # None while flax is being imported
        _registered.add(kind)
        register(kind, _to_state, _from_state)


def _named(x: Tensor) -> dict[str, jax.Array]:
    leaves = jax.tree.leaves_with_path(x)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _to_state(x: Tensor) -> dict[str, jax.Array]:
    named = _named(x)
    return {name: reveal(leaf) if is_opaque(leaf) else leaf for name, leaf in named.items()}


def _from_state(like: Tensor, state: dict[str, ArrayLike]) -> Tensor:
    named = _named(like)
    if sorted(named) != sorted(state):
        raise ValueError(
            f"the state of a {type(like).__name__} has {sorted(state)}, expected "
            f"{sorted(named)}: give a tensor on the same storage as target."
        )
    arrays = {name: jnp.asarray(state[name]) for name in named}
    leaves = [hide(arrays[x]) if is_opaque(leaf) else arrays[x] for x, leaf in named.items()]
    result = jax.tree.unflatten(jax.tree.structure(like), leaves)
    storage = getattr(result, "storage", result)
    if hasattr(storage, "validate"):  # what was stored may not be what `like` promises
        storage.validate()
    return result
