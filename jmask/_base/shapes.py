"""Shapes: of arrays beside those of more dimensions, and of programs for any size.

    trailing([1, 2], ndim=3)     ->  [[[1]], [[2]]]      one number for each row
    is_known(b, 5)               ->  False               b of `jax.export.symbolic_shape("b")`

Where a size is not known, no way can be chosen by it: the one that is right for all is taken.
"""

from typing import Any

import jax
import numpy as np


def trailing(x: jax.Array, ndim: int) -> jax.Array:
    """`x` with dimensions of size 1 appended, `ndim` in all."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def is_known(*sizes: Any) -> bool:
    """Whether all sizes are numbers, by which one way of several can be chosen."""
    return all(isinstance(x, int | np.integer) for x in sizes)
