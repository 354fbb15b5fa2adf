"""Stochastic rounding: to one of the two neighbours in a narrow dtype, right on average.

    bfloat16 has 256 and 258 and nothing between:
    256.5   to nearest: always 256        stochastically: 258 one time in four, else 256

Rounded to nearest, a bfloat16 weight of 256 never moves if each step adds 0.5; rounded
stochastically its mean moves by 0.5 a step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmask._base.array_types import wide
from jmask._base.validation import abstract_leaf, checked_dtype

_DRAWS = 2**16


def check_key(key: object) -> None:
    """Refuse what is no key of `jax.random`, of the new or the old style.

    Raises:
        TypeError: with what `key` is.
    """
    dtype = key.dtype if isinstance(key, jax.Array | np.ndarray) else None
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return
    if dtype != jnp.uint32:
        raise TypeError(
            f"`key` must be a key of jax.random, such as jax.random.key(0), got "
            f"{type(key).__name__}."
        )


def stochastic_round(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Round `x` to a narrower dtype, up or down at random with `x` as the mean.

    A number between two neighbours a < x < b becomes b with probability (x - a) / (b - a).
    That is exact for float32 to bfloat16 and float16 (16 random bits decide, and no more are
    lost). For subnormal results of float16, and dtypes of 8 bits, it is off by less than
    2**-16.

    Args:
        x: floating.
        dtype: the dtype of the result.
        key: of `jax.random`; the same key gives the same result. Keys of the "rbg"
            implementation are the fastest.

    Returns:
        An array of `dtype`. What `dtype` represents stays as it is; nan, inf and what
        overflows are rounded to nearest.

    Raises:
        TypeError: if `x` or `dtype` is not floating, or `key` is no key.

    References:
        Gupta et al., "Deep Learning with Limited Numerical Precision", 2015.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> x = jnp.full(10_000, 256.5)
        >>> y = jmask.stochastic_round(x, jnp.bfloat16, jax.random.key(0))
        >>> sorted(set(y.tolist()))
        [256.0, 258.0]
        >>> bool(abs(y.astype(jnp.float32).mean() - 256.5) < 0.05)
        True
    """
    abstract = abstract_leaf(x)
    if abstract is None or not jnp.issubdtype(abstract.dtype, jnp.floating):
        kind = type(x).__name__ if abstract is None else abstract.dtype
        raise TypeError(f"`x` must be floating, got {kind}: the order is (x, dtype, key).")
    x = jnp.asarray(x)
    check_key(key)
    dtype = checked_dtype("dtype", dtype, floating=True)
    x = x.astype(wide(x.dtype))  # 2**16 is no number of float16, nor the draws of bfloat16
    nearest = _nearest(x, dtype)
    near, error = nearest.astype(dtype), x - nearest
    largest = jnp.finfo(dtype).max  # some dtypes of 8 bits have no infinity
    other = jnp.nextafter(near, jnp.where(error > 0, largest, -largest))
    gap = other.astype(x.dtype) - nearest
    # Where nothing was lost, or x is not finite, the quotient is 0 or nan: near stays.
    draw = jax.random.bits(key, x.shape, jnp.uint16).astype(x.dtype)
    return jnp.where(draw < error / gap * _DRAWS, other, near)


def _nearest(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round to what `dtype` represents, and keep the dtype of `x`.

    XLA takes a cast to fewer digits and back for nothing (`xla_allow_excess_precision`, which
    holds on GPUs): by two casts the error of the rounding would be 0. It keeps
    `reduce_precision`, which makes subnormal numbers of fewer exponents 0.
    """
    own, narrow = jnp.finfo(x.dtype), jnp.finfo(dtype)
    # Dtypes without an infinity use the greatest exponent for numbers: one bit more holds it.
    bits = min(narrow.nexp + 1, own.nexp)
    nearest = lax.reduce_precision(x, bits, narrow.nmant)
    if narrow.nexp >= own.nexp:
        return nearest
    overflows = jnp.abs(nearest) > float(narrow.max)
    nearest = jnp.where(overflows, jnp.copysign(jnp.inf, x), nearest)
    unit = float(narrow.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(narrow.tiny), jnp.round(x / unit) * unit, nearest)
