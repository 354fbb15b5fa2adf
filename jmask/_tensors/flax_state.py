"""Tensors in the state dicts of flax, `flax.serialization.to_bytes`.

    RowSparse        {"indices": ids, "values": rows}         ids as integers
    MaskedTensor     {"data": array, "mask": booleans}

flax looks types up in a registry, and jmask does not import flax: a type is registered when
one of its objects is made after flax was imported.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp

from jmask._base.row_ids import hide, is_opaque, reveal
from jmask._base.types import Tensor

_registered: set[type] = set()


def register_in_flax(kind: type) -> None:
    """Let flax store objects of this type, if flax is there."""
    if kind in _registered:
        return
    serialization = sys.modules.get("flax.serialization")
    register = getattr(serialization, "register_serialization_state", None)
    if register is not None:
        _registered.add(kind)
        register(kind, _to_state, _from_state)


def _named(x: Tensor) -> dict[str, Any]:
    """Return the leaves of a tensor by name."""
    leaves = jax.tree.leaves_with_path(x)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def _to_state(x: Tensor) -> dict[str, Any]:
    named = _named(x)
    return {name: reveal(leaf) if is_opaque(leaf) else leaf for name, leaf in named.items()}


def _from_state(like: Tensor, state: dict[str, Any]) -> Any:
    named = _named(like)
    if sorted(named) != sorted(state):
        raise ValueError(
            f"the state of a {type(like).__name__} has {sorted(state)}, expected "
            f"{sorted(named)}: give a tensor on the same storage as target."
        )
    leaves = [
        hide(jnp.asarray(state[name])) if is_opaque(leaf) else jnp.asarray(state[name])
        for name, leaf in named.items()
    ]
    result = jax.tree.unflatten(jax.tree.structure(like), leaves)
    storage = getattr(result, "storage", result)
    if hasattr(storage, "validate"):  # what was stored may not be what `like` promises
        storage.validate()
    return result
