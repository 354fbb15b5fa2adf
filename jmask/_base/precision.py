"""Which dtype to compute in: float32 at least.

wide(bfloat16)   float32        wide(float64)  float64       wide(int8)   int8
sum_dtype(bool)  int32          otherwise as wide

adds_when_cast(float32, bfloat16)        cast(a + b) = cast(a) + cast(b), but for rounding
not of integers, whose sums wrap:        uint8 200 + 100 = 44, float32 200 + 100 = 300
"""

from typing import Any

import jax
import jax.numpy as jnp


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is floating and of fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def wide(dtype: Any) -> Any:
    """The dtype to compute in with numbers of `dtype`."""
    return jnp.dtype(jnp.float32) if is_narrow(dtype) else jnp.dtype(dtype)


def sum_dtype(dtype: Any) -> Any:
    """The dtype to sum in; booleans are counted, and add as `or` when they are cast back."""
    return jnp.dtype(jnp.int32) if dtype == jnp.dtype(bool) else wide(dtype)


def adds_when_cast(old: Any, new: Any) -> bool:
    """Whether a sum that is cast is the sum of what is cast, but for rounding."""
    return old == new or all(jnp.issubdtype(dtype, jnp.inexact) for dtype in (old, new))


def joint_dtype(*arrays: Any) -> Any:
    """The dtype of a sum of arrays, also where `jax_numpy_dtype_promotion` refuses one."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*arrays)


def is_nonzero(x: Any) -> Any:
    """x != 0, where `x` may be boolean: strict promotion compares those with no number."""
    return x if x.dtype == jnp.dtype(bool) else x != 0


def added(x: Any, y: Any) -> jax.Array:
    """x + y in their joint dtype."""
    dtype = joint_dtype(x, y)
    return jnp.asarray(x, dtype) + jnp.asarray(y, dtype)


def as_float(count: Any) -> jax.Array:
    """A count as a number that takes on the precision of what it meets, as Python's do."""
    with jax.numpy_dtype_promotion("standard"):
        return count * 1.0
