"""Norms without overflow: entries are brought near 1 before they are squared.

    [3e38, 4e38]       times 2**-80 their squares are near 2**96
                       norm inf, as float32 has no 5e38; direction [.6, .8]

Three ranges of numbers have one fixed factor each, as in LAPACK's `nrm2` (Anderson, Algorithm
978, 2017). A quotient by the greatest entry would not do: XLA multiplies by the reciprocal, and
the reciprocal of 1e38 is subnormal, for which it takes 0.
"""

import math
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.types import Function, Scalar
from jmask._ops.lift import data_of, entrywise
from jmask._ops.reduce import Kind, count, extremum, on_values, reduced
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.storage import stored_values

_multiply, _divide = entrywise(jnp.multiply), entrywise(jnp.true_divide)


class Norm(NamedTuple, Generic[Kind]):
    """Norms of groups in parts: `size / factor`, where `size` neither overflows nor vanishes.

    Attributes:
        entries: the tensor, times the factor of each entry's group.
        size: the norms of `entries`; reduced axes have size 1.
        factor: powers of two, of the shape of `size`.
    """

    entries: Kind
    size: Kind
    factor: Kind


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


def squared(x: jax.Array) -> jax.Array:
    """Square the absolute values; the derivative at 0 is 0."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


def where_nonzero(function: Function, otherwise: float = 0) -> Function:
    """Return the function where entries are not 0, and `otherwise` there, with derivative 0."""

    def guarded(x: jax.Array) -> jax.Array:
        one = jnp.ones((), x.dtype)
        result = function(jnp.where(x != 0, x, one))
        return jnp.where(x != 0, result, jnp.asarray(otherwise, result.dtype))

    return guarded


def norm_in_parts(x: Kind, axis: tuple[int, ...], order: float) -> Norm[Kind]:
    """Return the norms of an array, or of valid entries, along `axis`, kept from overflow.

    Args:
        x: floating or complex, of 32 bits at least.
        order: p of the p-norm, of any sign; inf and -inf too.
    """
    size: Kind = _size(x)
    nonzero = stored_values(data_of(size)) != 0
    if order == 0:
        number: Kind = on_values(lambda a: a.astype(size.dtype), _count(x, axis, nonzero))
        return Norm(x, number, on_values(jnp.ones_like, number))

    # --- the greatest power, near which all are brought ----------------------------------
    # Powers of negative order are greatest where the entry is least.
    taken = size if order > 0 else _masked_where_zero(size)
    extreme = "max" if order > 0 else "min"
    usable = lambda a: jnp.where(jnp.isfinite(a) & (a > 0), a, jnp.ones_like(a))
    pivot = on_values(usable, reduced(on_values(lax.stop_gradient, taken), axis, extreme))
    if isinstance(pivot, MaskedTensor):
        pivot = joined(pivot.storage, jnp.ones_like(pivot.valid))  # 1 where all entries are 0
    factor = on_values(factor_for, pivot)
    x = _multiply(x, factor.astype(x.dtype))
    size = _multiply(size, factor)

    # --- the norm of what they are then --------------------------------------------------
    if math.isinf(order):
        exact: Function = extremum if isinstance(size, MaskedTensor) else reduced
        result = exact(size, axis, extreme)
    elif order == 2:
        result = _root(reduced(_squared(x), axis, "sum"))
    else:
        pivot = on_values(jnp.ones_like, pivot) if order == 1 else _multiply(pivot, factor)
        powers = entrywise(where_nonzero(lambda a: a**order))(_divide(size, pivot))
        total = reduced(powers, axis, "sum")
        root = where_nonzero(lambda a: a ** (1 / order), 0 if order > 0 else jnp.inf)
        result = _multiply(entrywise(root)(total), pivot)
    if order < 0:  # a single 0 makes the sum infinite and the norm 0
        has_zero = _count(x, axis, ~nonzero)
        result = _where(entrywise(lambda number: number > 0)(has_zero), result)
    return Norm(x, result, factor)


def _masked_where_zero(size: Kind) -> Kind:
    if not isinstance(size, MaskedTensor):
        return jnp.where(size != 0, size, jnp.inf)
    return joined(size.storage, size.valid & (stored_values(size) != 0))


def norm(
    x: MaskedTensor, axis: tuple[int, ...], keepdims: bool = True, order: float = 2
) -> MaskedTensor:
    """Return the norms of the valid entries along `axis`, which stays with size 1."""
    parts = norm_in_parts(x, axis, order)
    return _divide(parts.size, parts.factor)


_count: Function = count  # of masked tensors: rows of an array have orders above 0
_size, _squared = entrywise(where_nonzero(jnp.abs)), entrywise(squared)
_root = entrywise(where_nonzero(jnp.sqrt))
_where = entrywise(lambda zero, x: jnp.where(zero, jnp.zeros_like(x), x))


def shortened(
    rows: jax.Array, max_norm: Scalar, order: float, batch: int = 1, eps: float = 0.0
) -> jax.Array:
    """Scale rows longer than `max_norm` by max_norm / (norm + eps); keep all others.

    Args:
        rows: floating or complex, after `batch` axes of entries.
        max_norm: a positive scalar of the dtype of `rows`, or a Python number.
        order: p of the p-norm, above 0; may be inf.
        eps: added to the norm.
    """
    entries, norm, factor = norm_in_parts(rows, tuple(range(batch, rows.ndim)), order)
    size = norm + eps * factor
    # A row that is short enough may be 0, by which its direction is divided.
    exceeds = norm / factor > max_norm
    direction = entries / jnp.where(exceeds, size, jnp.ones_like(size)).astype(rows.dtype)
    return jnp.where(exceeds, direction * jnp.asarray(max_norm, rows.dtype), rows)
