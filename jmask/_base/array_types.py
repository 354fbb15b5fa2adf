"""Ask for types of arrays: shapes, which may have unknown sizes, and dtypes.

    trailing([1, 2], ndim=3)     ->  [[[1]], [[2]]]      one number for each row
    is_known(b, 5)               ->  False               b of `jax.export.symbolic_shape("b")`

Where a size is symbolic, code that chooses a way by sizes takes the one that is always right.
Sums are computed in float32 at least:

    wide(bfloat16)   float32        wide(float64)  float64       wide(int8)   int8
    sum_dtype(bool)  int32          otherwise as wide

    adds_when_cast(float32, bfloat16)        cast(a + b) = cast(a) + cast(b), but for rounding
    not of integers, whose sums wrap:        uint8 200 + 100 = 44, float32 200 + 100 = 300
"""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jmask._base.side_table import SideTable
from jmask._base.types import Argument, DType, Function, PyTree, Shaped

# --- shapes -------------------------------------------------------------------------------


def trailing(x: jax.Array, ndim: int) -> jax.Array:
    """Return `x` with dimensions of size 1 appended, `ndim` in all."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


# Each function under `jax.jit`.
_JITTED = SideTable[Argument]()


def shapes_from(function: Function, *args: PyTree) -> PyTree:
    """Return the abstract results of a function, as `jax.eval_shape`.

    `jax.eval_shape` keeps 19 objects of each call as long as the function lives (jax 0.12),
    which steps outside of jit would add up.
    """
    jitted = _JITTED.of(function)
    if jitted is None:
        call: Function = weakref.ref(function)  # or `jitted` would keep its own note alive
        jitted = jax.jit(lambda *args: call()(*args))
        _JITTED.note(function, jitted)
    return jitted.eval_shape(*args)


def is_known(*sizes: object) -> bool:
    """Decide whether all sizes are numbers, by which one way of several can be chosen."""
    return all(isinstance(x, int | np.integer) for x in sizes)


def at_most(count: int, size: float) -> bool:
    """Decide whether a size is at most another one; a symbolic one is taken for a large one."""
    return is_known(count) and (not is_known(size) or count <= size)


def minus_zero(dtype: DTypeLike) -> jax.Array:
    """Return what changes nothing when it is added: -0.0, in both parts of a complex number."""
    return -jnp.zeros((), dtype)


def fewer(count: int, limit: int) -> int:
    """Return the smaller of two sizes; the first where a program is for any size."""
    return min(count, limit) if is_known(count, limit) else count


# --- dtypes -------------------------------------------------------------------------------


def is_narrow(dtype: DTypeLike) -> bool:
    """Decide whether a dtype is floating and of fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def is_complex(x: Shaped | None) -> bool:
    """Decide whether an array, or what has a dtype, is complex; None is not."""
    return x is not None and jnp.issubdtype(x.dtype, jnp.complexfloating)


def real_dtype(dtype: DTypeLike) -> DType:
    """Return the dtype of the real part of numbers of `dtype`."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.finfo(dtype).dtype if is_complex else jnp.dtype(dtype)


def complex_dtype(dtype: DTypeLike) -> DType:
    """Return the dtype of pairs of `dtype`: complex64 for two numbers of float32."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(dtype)
    if jnp.dtype(dtype).itemsize < 4 or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"the state of a complex parameter cannot be {jnp.dtype(dtype)}: leave out "
            "`state_dtype` and `mu_dtype`, or take float32."
        )
    return joint_dtype(dtype, jnp.complex64)


def wide(dtype: DTypeLike) -> DType:
    """Return the dtype to compute in with numbers of `dtype`."""
    return jnp.dtype(jnp.float32) if is_narrow(dtype) else jnp.dtype(dtype)


def sum_dtype(dtype: DTypeLike) -> DType:
    """Return the dtype to sum in: int32 counts booleans, which add as `or` when cast back."""
    return jnp.dtype(jnp.int32) if dtype == jnp.dtype(bool) else wide(dtype)


def adds_when_cast(old: DTypeLike, new: DTypeLike) -> bool:
    """Decide whether a sum that is cast is the sum of what is cast, but for rounding."""
    return old == new or all(jnp.issubdtype(dtype, jnp.inexact) for dtype in (old, new))


def joint_dtype(*arrays: ArrayLike | DTypeLike) -> DType:
    """Return dtype of a sum of arrays, also where `jax_numpy_dtype_promotion` refuses one.

    8-bit floating numbers, which JAX promotes to nothing, count as bfloat16 with others.
    """
    with jax.numpy_dtype_promotion("standard"):
        kinds = {dtype for x in arrays if (dtype := getattr(x, "dtype", x)) is not None}
        if len(kinds) > 1:
            arrays = tuple(jnp.bfloat16 if has_8_bits(x) else x for x in arrays)
        return jnp.result_type(*arrays)


def has_8_bits(x: object) -> bool:
    """Decide whether an array, or a dtype, is floating and of 8 bits."""
    dtype: Argument = getattr(x, "dtype", x)
    is_dtype = isinstance(dtype, np.dtype | type)
    return is_dtype and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 8


def is_nonzero(x: jax.Array) -> jax.Array:
    """Return x != 0 of numbers or booleans, which strict promotion compares with no number."""
    return x if x.dtype == jnp.dtype(bool) else x != 0


def added(x: ArrayLike, y: ArrayLike) -> jax.Array:
    dtype = joint_dtype(x, y)
    return jnp.asarray(x, dtype) + jnp.asarray(y, dtype)


def as_float(count: jax.Array) -> jax.Array:
    """Return count as a number that takes on the precision of what it meets, as Python's do."""
    with jax.numpy_dtype_promotion("standard"):
        return count * 1.0
