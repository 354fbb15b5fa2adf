"""Arrays of fewer dimensions beside those of more.

trailing([1, 2], ndim=3)  ->  [[[1]], [[2]]]      one number for each row
"""

import jax


def trailing(x: jax.Array, ndim: int) -> jax.Array:
    """`x` with dimensions of size 1 appended, `ndim` in all."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))
