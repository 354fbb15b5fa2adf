"""Which updates of a zero array write whole rows of it, and which rows.

The transpose of a lookup `t[ids]` is an equation that writes cotangents into zeros of the
table's shape. It is a *row pattern* when it writes whole rows and addresses them by their
position in dimension 0:

    scatter-add(zeros(V, D), ids (3, 1), ct (3, D))         3 rows, at ids
    scatter-add(zeros(V, D), ids (3, 2), ct (3, 1, D))      the same, CLIP mode only: the
                                                            window is as wide as the row,
                                                            so its second start clips to 0
    dynamic_update_slice(zeros(V, D), ct (k, D), (i, _))    k rows, from clip(i)
    pad(ct (k, D), (low, high), (0, 0))                     k rows, from low
    bcoo_dot_general(X, ct), X (m, V) sparse, over m        one row for each entry of X

Out-of-range ids do exactly what they do in the dense gradient: CLIP clamps them, every
other mode drops them.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._base.forms import aval_of, parameter
from jmask._base.row_ids import canonical, id_dtype, widen
from jmask._base.shapes import trailing
from jmask._kernels.rows import gather_rows

IdsAndRows = tuple[jax.Array, jax.Array]
"""Canonical ids (n,) and the rows to be added there (n, *row)."""


def scatter_add_rows(
    eqn: JaxprEqn, indices: jax.Array, updates: jax.Array
) -> IdsAndRows | None:
    """The rows that a `scatter-add` equation adds, or None if it is not a row pattern.

    Args:
        eqn: the equation; its operand has shape (V, *row).
        indices (..., k): the start indices.
        updates: the values added.
    """
    numbers = parameter(eqn, "dimension_numbers")
    shape = aval_of(eqn.outvars[0]).shape
    clips = parameter(eqn, "mode") == lax.GatherScatterMode.CLIP
    addressed = numbers.scatter_dims_to_operand_dims
    if (
        numbers.operand_batching_dims
        or 0 not in addressed
        or numbers.inserted_window_dims not in ((), (0,))
        or (addressed != (0,) and not clips)
    ):
        return None
    window_dims = numbers.update_window_dims
    batch_dims = [d for d in range(updates.ndim) if d not in window_dims]
    window = tuple(updates.shape[d] for d in window_dims)
    if numbers.inserted_window_dims:
        window = (1, *window)
    if window[1:] != shape[1:]:
        return None
    length = window[0]
    rows = lax.transpose(updates, [*batch_dims, *window_dims])
    starts = lax.index_in_dim(indices, addressed.index(0), -1, keepdims=False)
    starts = lax.reshape(starts, (starts.size,))
    # The number of starts is given, not inferred with -1: rows may have no entries.
    rows = lax.reshape(rows, (starts.size * length, *shape[1:]))
    return _window_ids(starts, length, shape[0], clips), rows


def dynamic_update_rows(
    eqn: JaxprEqn, update: jax.Array, starts: Sequence[Any]
) -> IdsAndRows | None:
    """The rows that `dynamic_update_slice` writes, or None if not whole rows."""
    shape = aval_of(eqn.outvars[0]).shape
    if update.shape[1:] != shape[1:]:
        return None
    start = jnp.asarray(starts[0]).reshape(1)
    return _window_ids(start, update.shape[0], shape[0], clips=True), update


def padded_rows(eqn: JaxprEqn, operand: jax.Array) -> IdsAndRows | None:
    """The rows that `pad` places among zeros, or None if it does more than that.

    The gradient of `table[start:stop:step]`: rows `start`, `start + step`, ...
    """
    (low, high, interior), *others = parameter(eqn, "padding_config")
    if low < 0 or high < 0 or any(any(config) for config in others):
        return None
    rows, step = aval_of(eqn.outvars[0]).shape[0], interior + 1
    ids = np.arange(low, low + step * operand.shape[0], step, dtype=id_dtype(rows))
    return jnp.asarray(ids), operand


def sparse_product_rows(
    eqn: JaxprEqn, data: jax.Array, indices: jax.Array, dense: jax.Array
) -> IdsAndRows | None:
    """The rows of `X.T @ dense` for a sparse X: one for each of its stored entries.

    This is the gradient of W in `X @ W`: entry X[i, j] adds X[i, j] * dense[i] to row j. With
    batch dimensions, which the product sums over too, i is a position in all of them.
    """
    (contract, contract_dense), batch = parameter(eqn, "dimension_numbers")
    shape = parameter(eqn, "lhs_spinfo").shape
    kept = [d for d in range(len(shape)) if d not in contract]
    batched, sparse = indices.ndim - 2, indices.shape[-1]
    if any(batch) or len(kept) != 1 or kept[0] < batched or batched + sparse < len(shape):
        return None
    entries = (*shape[:batched], indices.shape[-2])
    places = [lax.broadcasted_iota(indices.dtype, entries, d) for d in range(batched)]
    places += [jnp.broadcast_to(indices[..., d], entries) for d in range(sparse)]
    inside = jnp.ones(entries, bool)
    number = jnp.zeros(entries, indices.dtype)  # of dense[i], counted in row-major order
    for d in contract:
        inside &= (places[d] >= 0) & (places[d] < shape[d])
        number = number * shape[d] + places[d]
    sizes = [shape[d] for d in contract]
    dense = jnp.moveaxis(dense, contract_dense, range(len(contract)))
    dense = dense.reshape(math.prod(sizes), *dense.shape[len(contract) :])
    ids = jnp.where(inside, places[kept[0]], shape[kept[0]]).reshape(-1)
    rows = gather_rows(dense, canonical(number.reshape(-1), dense.shape[0]))
    scale = trailing(jnp.broadcast_to(data, entries).reshape(-1), rows.ndim)
    return canonical(ids, shape[kept[0]]), (scale * rows).astype(aval_of(eqn.outvars[0]).dtype)


def _window_ids(starts: jax.Array, length: int, rows: int, clips: bool) -> jax.Array:
    """Ids (m * length,) of windows of `length` rows at `starts` (m,)."""
    last = rows - length
    starts = widen(starts, rows)
    if clips:
        starts = jnp.clip(starts, 0, last)
    elif length == 1:
        return canonical(starts, rows)
    else:  # a window that does not fit is dropped whole
        starts = jnp.where((starts < 0) | (starts > last), rows, starts)
    offsets = np.arange(length, dtype=starts.dtype)
    ids = starts[:, None] + offsets[None]
    return canonical(ids.reshape(-1), rows)
