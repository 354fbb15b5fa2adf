"""Recognise a deferred table, and its clock among its leaves.

`_deferred` is imported after gradients and updates, which meet deferred tables as well: they
need no more than this.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.types import Table
from jmask._tables.stored_table import StoredTable


class Deferred(StoredTable):
    """The base of `DeferredTable`.

    Attributes:
        main: the array or table container that holds the rows.
    """

    __slots__ = ()

    main: Table


def is_deferred(x: object) -> bool:
    """Decide whether `x` is a `DeferredTable`."""
    return isinstance(x, Deferred)


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


def unsealed(leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the clock, and whether the leaf is one; refuse numbers, as arithmetic makes."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"the clock of this DeferredTable came back as {leaf.dtype}: its leaves are no "
            "numbers to calculate with, use `table.todense()`. Checkpoints of other versions "
            "are restored by jmask.from_arrays(arrays, like=...)."
        )
    words = jax.random.key_data(leaf)
    return lax.bitcast_convert_type(words[..., 0], np.int32), words[..., 1] == _SEAL
