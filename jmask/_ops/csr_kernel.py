"""X W for a matrix X in compressed rows, by the kernel that JAX has for it on CPU.

    sum of terms      v W[j] is made for each entry, (n, d) numbers, and then summed by row
    kernel            v W[j] is added to its row, entry by entry: nothing is made in between

For 8 to 63 columns of W the kernel takes a quarter to a half of the time, for others it is no
faster. It reads what is not in W at a column that W does not have, so that it runs only where
every column is in range, which is decided at run time. Derivatives and batches are those of
the sum of terms. Elsewhere than on CPU, JAX makes a sum of terms of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.sparse import BCSR

from jmask._ops.product_operands import Dense, entries, sum_of_terms

_WIDTHS = range(8, 64)
_DTYPES = (jnp.float32, jnp.float64)


def suits_kernel(x: Any, dense: Any) -> bool:
    """Whether the kernel can take X W, and is the faster way."""
    return (
        isinstance(x, BCSR)
        and isinstance(dense, jax.Array)
        and dense.ndim == 2
        and dense.shape[1] in _WIDTHS
        and x.dtype == dense.dtype
        and x.dtype in _DTYPES
        and x.indices.dtype == x.indptr.dtype
        and 0 not in (*x.shape, x.nse)
    )


def product_by_kernel(x: BCSR, dense: jax.Array) -> jax.Array:
    """X W (m, d) for a W (k, d)."""
    return _product(x.data, x.indices, x.indptr, dense)


@jax.custom_jvp
def _product(*arrays: jax.Array) -> jax.Array:
    return _kernel_or_terms(*arrays)


@_product.defjvp
def _product_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    values, columns, pointers, dense = primals
    terms = lambda values, dense: _terms(values, columns, pointers, dense)
    _, tangent = jax.jvp(terms, (values, dense), (tangents[0], tangents[-1]))
    return _product(*primals), tangent


@custom_vmap
def _kernel_or_terms(*arrays: jax.Array) -> jax.Array:
    _, columns, pointers, dense = arrays
    # Entries after the last row are padding that the kernel does not read.
    read = jnp.arange(columns.shape[0], dtype=pointers.dtype) < pointers[-1]
    in_range = (columns >= 0) & (columns < dense.shape[0])
    return lax.cond(jnp.all(in_range | ~read), _kernel, _terms, *arrays)


@_kernel_or_terms.def_vmap
def _terms_of_batch(_: int, batched: list[bool], *arrays: jax.Array) -> tuple[Any, bool]:
    axes = [0 if is_batched else None for is_batched in batched]
    return jax.vmap(_terms, axes)(*arrays), True


def _kernel(
    values: jax.Array, columns: jax.Array, pointers: jax.Array, dense: jax.Array
) -> jax.Array:
    pointers = jnp.clip(pointers, 0, columns.shape[0])
    return _matrix(values, columns, pointers, dense) @ dense


def _terms(
    values: jax.Array, columns: jax.Array, pointers: jax.Array, dense: jax.Array
) -> jax.Array:
    x = entries(_matrix(values, columns, pointers, dense))
    return sum_of_terms(x, Dense(dense).rows_at(x.columns, dense.dtype))


def _matrix(
    values: jax.Array, columns: jax.Array, pointers: jax.Array, dense: jax.Array
) -> BCSR:
    shape = (pointers.shape[0] - 1, dense.shape[0])
    return BCSR((values, columns, pointers), shape=shape)
