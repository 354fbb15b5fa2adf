"""Norms without overflow: the entries are brought near 1 before they are squared.

    [3e38, 4e38]       times 2**-80 their squares are near 2**96
                       norm inf, as float32 has no 5e38; direction [.6, .8]

Three ranges of numbers have one fixed factor each, as in LAPACK's `nrm2` (Anderson, Algorithm
978, 2017). A quotient by the greatest entry would not do: XLA multiplies by the reciprocal, and
the reciprocal of 1e38 is subnormal, for which it takes 0.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.types import Scalar


class Norm(NamedTuple):
    """Norms of rows in parts: `size / factor`, where `size` neither overflows nor vanishes.

    Attributes:
        entries: the rows times the factor.
        size: the norms of `entries`; the axes that are reduced have size 1.
        factor: powers of two, of the shape of `size`.
    """

    entries: jax.Array
    size: jax.Array
    factor: jax.Array


def factor_for(greatest: jax.Array) -> jax.Array:
    """Return the power of two that brings entries up to `greatest` where they can be squared.

    It is a constant: the derivative of a norm does not depend on what it is computed with.
    """
    greatest = lax.stop_gradient(greatest)
    # In float32: numbers beyond 2**51 times 2**-80, those below 2**-51 times 2**80.
    bits = jnp.finfo(greatest.dtype).maxexp
    limit, power = 2.0 ** (2 * bits // 5), 2.0 ** (5 * bits // 8)
    small = jnp.where(greatest < 1 / limit, power, 1)
    return jnp.where(greatest > limit, 1 / power, small).astype(greatest.dtype)


def row_norm(rows: jax.Array, order: float, batch: int = 1) -> Norm:
    """Return the norms of rows in float32 at least, after `batch` axes of entries.

    Args:
        rows: floating or complex.
        order: p of the p-norm, above 0; may be inf.
        batch: the number of leading axes.
    """
    axes = tuple(range(batch, rows.ndim))
    factor = factor_for(jnp.max(jnp.abs(rows), axes, keepdims=True, initial=0))
    entries = rows * factor.astype(rows.dtype)
    sizes = jnp.abs(entries)
    if order == math.inf:
        return Norm(entries, jnp.max(sizes, axes, keepdims=True, initial=0), factor)
    if order == 2:
        squares = jnp.sum(squared(entries), axes, keepdims=True)
        return Norm(entries, jnp.sqrt(squares), factor)
    if order == 1:
        return Norm(entries, jnp.sum(sizes, axes, keepdims=True), factor)
    # No power of a number up to 1 overflows.
    greatest = lax.stop_gradient(jnp.max(sizes, axes, keepdims=True, initial=0))
    greatest = jnp.where(greatest > 0, greatest, 1)
    ratios = sizes / greatest
    positive = ratios > 0
    powers = jnp.where(positive, jnp.where(positive, ratios, 1) ** order, 0)
    size = greatest * jnp.sum(powers, axes, keepdims=True) ** (1 / order)
    return Norm(entries, size, factor)


def squared(x: jax.Array) -> jax.Array:
    """Square the absolute values; the derivative at 0 is 0."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


def shortened(
    rows: jax.Array, max_norm: Scalar, order: float, batch: int = 1, eps: float = 0.0
) -> jax.Array:
    """Scale rows longer than `max_norm` by max_norm / (norm + eps); keep all others.

    Args:
        rows, order, batch: as in `row_norm`.
        max_norm: a positive scalar of the dtype of `rows`, or a Python number.
        eps: added to the norm.
    """
    norm = row_norm(lax.stop_gradient(rows), order, batch)
    exceeds = norm.size / norm.factor > max_norm
    # A row that is short enough must reach no square root, whose derivative at
    # 0 is infinite.
    norm = row_norm(jnp.where(exceeds, rows, 1), order, batch)
    size = norm.size + eps * norm.factor
    direction = norm.entries / size.astype(rows.dtype)
    bound = jnp.asarray(max_norm, rows.dtype)
    return jnp.where(exceeds, direction * bound, rows)
