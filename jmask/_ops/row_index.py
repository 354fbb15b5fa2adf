"""Indexing a `RowSparse`, as `jax.Array` is indexed.

    x[3]            the row: dense, zero if it is not stored
    x[[3, 3, 7]]    the rows: dense, (3, *row)
    x[10:20]        some of the rows: RowSparse
    x[:, 0]         a column: RowSparse
    x[10:20, 1:3]   both

An integer beside an index array is an index array too: what they select comes first if a
slice is between them, x[1, :, [0, 2]]. An index array out of range reads as in `jnp.take`:
nan, or the extreme of an integer dtype.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.fallback import report_fallback
from jmask._tables.stored_table import from_the_end
from jmask._tensors.methods import call, install
from jmask._tensors.row_sparse import RowSparse


def getitem(x: RowSparse, key: Any) -> Any:
    """`x[key]`: dense where single rows are picked, otherwise row-sparse.

    Args:
        x: a row-sparse tensor of shape (V, *row).
        key: integers, slices, integer arrays, Ellipsis, None, or boolean arrays that are
            concrete; a tuple of them.

    Raises:
        IndexError: for too many indices, or an integer that is no row.
        TypeError: for what is no index, or a slice with traced bounds.

    Warns:
        StorageFallbackWarning: for index arrays in several dimensions, what such an array
            moves before the rows, or None before them, which make the tensor dense.
    """
    x.check_single()
    first, rest = _split(x, key)
    if _is_integer(first):
        return _rows_at(x, _row_numbers(x, first)[None])[(0, *rest)]
    several = sum(map(_is_array, rest)) > (not _is_array(first))
    if first is None or several or (isinstance(first, slice) and _moves_to_front(rest)):
        report_fallback(
            f"indexing a RowSparse of shape {x.shape} made it dense, at O(size) cost: index "
            "its rows and one further dimension at most"
        )
        return x.todense()[key]
    if isinstance(first, slice):
        return _columns(_slice(x, first), rest)
    rows = _rows_at(x, _row_numbers(x, first))
    return rows[(slice(None),) * (rows.ndim - x.ndim + 1) + rest]


def _rows_at(x: RowSparse, ids: jax.Array) -> jax.Array:
    """The rows `ids` of `x`: (*ids.shape, *row); negative ids count from the end."""
    return call("lookup", x, from_the_end(ids, x.shape[0]))


def _split(x: RowSparse, key: Any) -> tuple[Any, tuple[Any, ...]]:
    """The index of the rows, and those of the other dimensions."""
    key = key if isinstance(key, tuple) else (key,)
    key = tuple(_checked(k) for k in key)
    used = sum(_dimensions(k) for k in key if k is not None and k is not Ellipsis)
    ellipses = [i for i, k in enumerate(key) if k is Ellipsis]
    if used > x.ndim or len(ellipses) > 1:
        raise IndexError(
            f"too many indices for a RowSparse of shape {x.shape}: {used}, and "
            f"{len(ellipses)} of `...`."
        )
    if ellipses and (used < x.ndim or len(key) == 1):
        at = ellipses[0]
        key = (*key[:at], *(slice(None),) * (x.ndim - used), *key[at + 1 :])
    elif ellipses and key[0] is Ellipsis:
        key = key[1:]
    return (key[0], key[1:]) if key else (slice(None), ())


def _checked(k: Any) -> Any:
    if k is None or k is Ellipsis or isinstance(k, slice):
        return k
    if isinstance(k, list | np.ndarray):
        k = np.asarray(k)
        k = k.astype(int) if k.size == 0 and k.dtype == float else k
    if isinstance(k, bool) or (_is_boolean(k) and k.ndim == 0):
        raise TypeError(
            f"a RowSparse is not indexed by a single boolean, got {k!r}: use None for a new "
            "dimension, or an array of booleans."
        )
    dtype = getattr(k, "dtype", None)
    if dtype is not None and (jnp.issubdtype(dtype, jnp.integer) or _is_boolean(k)):
        return k
    try:
        return operator.index(k)
    except TypeError:
        raise TypeError(
            f"a RowSparse is indexed by integers, slices and integer arrays, got {k!r}."
        ) from None


def _is_array(k: Any) -> bool:
    return getattr(k, "ndim", 0) > 0


def _is_integer(k: Any) -> bool:
    return not (k is None or k is Ellipsis or isinstance(k, slice) or _is_array(k))


def _moves_to_front(rest: tuple[Any, ...]) -> bool:
    """Whether index arrays are apart, so that what they select comes before all else."""
    places = [i for i, k in enumerate(rest) if _is_array(k) or _is_integer(k)]
    return any(map(_is_array, rest)) and places[-1] - places[0] >= len(places)


def _dimensions(k: Any) -> int:
    return k.ndim if _is_boolean(k) else 1


def _is_boolean(k: Any) -> bool:
    return getattr(k, "dtype", None) == jnp.dtype(bool)


def _row_numbers(x: RowSparse, k: Any) -> jax.Array:
    if _is_boolean(k):
        if isinstance(k, jax.core.Tracer):
            raise TypeError(
                "a traced boolean index has no static size: use x.retain(rows), or "
                "jmask.numpy.where(mask, x, 0)."
            )
        if k.shape != x.shape[:1]:
            raise IndexError(
                f"a boolean index of shape {k.shape} does not fit {x.shape[0]} rows."
            )
        return jnp.asarray(np.flatnonzero(k))
    if isinstance(k, int):
        if not -x.shape[0] <= k < x.shape[0]:
            raise IndexError(f"index {k} is no row of a RowSparse of shape {x.shape}.")
        return jnp.asarray(k, x.indices.dtype)
    return jnp.asarray(k)


def _slice(x: RowSparse, rows: slice) -> RowSparse:
    if rows == slice(None):
        return x
    try:
        start, stop, step = rows.indices(x.shape[0])
    except TypeError:
        raise TypeError(
            f"the bounds of a slice of rows must be known, got {rows}: use "
            "jax.lax.dynamic_slice on x.todense(), or x.retain(rows)."
        ) from None
    number = len(range(start, stop, step))
    distance = x.row_ids() - start
    ids = distance // step
    kept = (distance % step == 0) & (ids >= 0) & (ids < number)
    ids = jnp.where(kept & (x.row_ids() < x.shape[0]), ids, number)
    return RowSparse(ids, x.values, (number, *x.shape[1:]))


def _columns(x: RowSparse, rest: tuple[Any, ...]) -> RowSparse:
    if not rest:
        return x
    key = (slice(None), *rest)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    shape = jax.eval_shape(lambda a: a[key], like).shape
    return x.with_leaves(x.index_leaf, x.values[key], shape=shape)


install(row_getitem=getitem)
