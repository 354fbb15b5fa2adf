"""The border of `_deferred`: recognise a deferred table, and put it in the place of an update.

`_deferred` is imported after gradients and updates, which meet deferred tables as well. They
need no more than this of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.row_ids import hide
from jmask._tables.stored_table import StoredTable


class Deferred(StoredTable):
    """The base of `DeferredTable`."""

    __slots__ = ()


def is_deferred(x: Any) -> bool:
    """Decide whether `x` is a `DeferredTable`."""
    return isinstance(x, Deferred)


@jax.tree_util.register_pytree_node_class
class NewTable:
    """Hold a deferred table after a step, as `update` returns it.

    `jmask.apply_updates` puts it in place of the old one. An optimizer that is chained behind
    maps arithmetic over its leaves; one of them refuses that, as the ids of a `RowSparse` do.
    """

    def __init__(self, table: Any):
        self.table = table

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape

    @property
    def dtype(self) -> Any:
        return self.table.dtype

    def tree_flatten(self) -> Any:
        return (hide(jnp.zeros((1,), jnp.int32)), self.table), None

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "NewTable":
        node = object.__new__(cls)
        node.table = children[1]
        return node


def is_new_table(x: Any) -> bool:
    """Decide whether `x` is a `NewTable`."""
    return isinstance(x, NewTable)


# In the second word of a clock. A tree map that fills leaves with zeros leaves none.
_SEAL = np.uint32(0x6A6D6173)


def sealed(clock: jax.Array) -> jax.Array:
    """Return a clock (...,) as a leaf on which arithmetic is a TypeError: a random key of JAX.

    A norm or an average over the leaves of a `DeferredTable` would be wrong without a word. The
    dtype is one of JAX's own, for orbax, `jax.export` and pickle know those.
    """
    words = lax.bitcast_convert_type(clock, np.uint32)
    words = jnp.stack([words, jnp.full_like(words, _SEAL)], axis=-1)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def unsealed(leaf: Any) -> tuple[jax.Array, jax.Array]:
    """Return the clock, and whether the leaf is one.

    Raises:
        TypeError: if it is a number, as arithmetic or an older version made it.
    """
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"the clock of this DeferredTable came back as {leaf.dtype}: its leaves are no "
            "numbers to calculate with, use `table.todense()`. Checkpoints of other versions "
            "are restored by jmask.from_arrays(arrays, like=...)."
        )
    words = jax.random.key_data(leaf)
    return lax.bitcast_convert_type(words[..., 0], np.int32), words[..., 1] == _SEAL
