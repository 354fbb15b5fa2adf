"""Masked tensors from one storage to another: every valid entry is stored.

    data  [[1, nan, 2],     coo   indices [0,0] [0,2] [1,1]   values [1, 2, 5]
           [0,   5, 0]]     csr   indices  0 2 1, indptr 0 2 3, values [1, 2, 5]
    mask  [[T,   F, T],
           [F,   T, F]]     row_sparse  indices 0 1, values as data, mask as mask

Coordinate and compressed row storage hold the valid entries and nothing else. Row-sparse
storage holds the rows with a valid entry; their other entries stay masked. Sizes are
static: what `nse` leaves over is padding, which is never valid.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.array_types import joint_dtype, trailing
from jmask._base.validation import checked_array, checked_choice
from jmask._kernels.rows import gather_rows
from jmask._tensors.checks import checked_capacity, fit_or_poison
from jmask._tensors.masked_tensor import MaskedTensor, as_masked_tensor, joined
from jmask._tensors.methods import install
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import compressed, coordinates, is_sparse, stored_values


def to_storage(x: Any, stype: str, nse: int | None = None) -> MaskedTensor:
    """Return the same masked tensor on another storage.

    Args:
        x: a masked tensor, or data all of whose (stored) entries are valid.
        stype: "default", "row_sparse", "coo" or "csr".
        nse: the number of stored entries (rows for "row_sparse"), static; the exact number
            by default, which needs a concrete mask.

    Raises:
        ValueError: for an unknown `stype`, or as the methods `to_sparse`, `to_sparse_csr`
            and `to_row_sparse`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., 2.]), jnp.array([False, True]))
        >>> to_storage(x, "coo")
        MaskedTensor(coo, float32[2], nse=1, values=[2.0])
    """
    x = as_masked_tensor(x)
    check_stype(stype)
    if stype == "default":
        return x.to_dense()
    return {"row_sparse": to_row_sparse, "coo": to_coo, "csr": to_csr}[stype](x, nse)


def check_stype(stype: Any) -> None:
    """Raise ValueError if it is not the name of a storage."""
    names = ("default", "row_sparse", "coo", "csr")
    checked_choice(stype, "stype", names)


def to_coo(x: MaskedTensor, nse: int | None = None) -> MaskedTensor:
    """Return the tensor on coordinate (BCOO) storage, without dense dimensions.

    Args:
        x: a masked tensor on any storage, with at least one dimension.
        nse: the number of stored entries, static; the exact number by default.

    Raises:
        ValueError: if `nse` is needed and missing, or too small for a concrete mask. For a
            traced mask with more valid entries floating values are nan, and other values
            are refused.
    """
    if nse is None and x.stype == "coo" and not x.storage.n_dense:
        return x
    if not x.shape:
        raise ValueError("a MaskedTensor without dimensions has no sparse storage.")
    valid = x.valid.reshape(-1)
    nse = _capacity(valid, nse, "entries")
    picked = jnp.flatnonzero(valid, size=nse, fill_value=valid.size)
    inside = picked < valid.size
    values = _picked(stored_values(x.storage).reshape(-1), picked)
    values = fit_or_poison(
        _zero_where(~inside, values), valid.sum(), nse, valid.size, "entries"
    )
    indices = [
        jnp.where(inside, index, size)
        for index, size in zip(_coordinates_at(x.storage, picked), x.shape, strict=True)
    ]
    dtype = joint_dtype(*indices)
    storage = BCOO(
        (values, jnp.stack([index.astype(dtype) for index in indices], axis=1)),
        shape=x.shape,
        indices_sorted=_is_sorted(x.storage),
        unique_indices=True,
    )
    return joined(storage, inside)


def to_csr(x: MaskedTensor, nse: int | None = None) -> MaskedTensor:
    """Return the tensor of two dimensions on compressed row (BCSR) storage; see `to_coo`.

    Raises:
        ValueError: as `to_coo`, and if `x` does not have two dimensions.
    """
    if x.ndim != 2:
        raise ValueError(f"csr storage needs two dimensions, got shape {x.shape}.")
    if nse is None and x.stype == "csr":
        return x
    x = to_coo(x, _capacity(x.valid.reshape(-1), nse, "entries"))
    order = jnp.arange(x.valid.shape[0])
    if not x.storage.indices_sorted:
        order = jnp.lexsort(tuple(x.storage.indices.T[::-1]))
    return joined(compressed(x.storage), x.valid[order])


def to_row_sparse(x: MaskedTensor, nse: int | None = None) -> MaskedTensor:
    """Return the tensor on row-sparse storage: the rows with a valid entry, in order.

    Args:
        x: a masked tensor on any storage, with at least one dimension.
        nse: the number of stored rows, static; the exact number by default.

    Raises:
        ValueError: as `to_coo`.
    """
    if nse is None and x.stype == "row_sparse":
        return x
    if not x.shape:
        raise ValueError("a MaskedTensor without dimensions has no sparse storage.")
    if not is_sparse(x.storage):
        ids = jnp.arange(x.shape[0])
        return _stored_rows(x.shape, ids, x.storage, x.valid, nse)
    if isinstance(x.storage, RowSparse):
        return _stored_rows(x.shape, x.storage.row_ids(), x.storage.values, x.valid, nse)
    return _assembled_rows(x, nse)


def from_numpy_ma(x: Any) -> MaskedTensor:
    """Make a masked tensor from a NumPy masked array, where True means masked.

    Example:
        >>> import numpy as np, jmask
        >>> from_numpy_ma(np.ma.masked_array([1, 2, 3], mask=[False, True, False]))
        MaskedTensor([1, --, 3], dtype=int32)
    """
    data = checked_array("x", np.ma.getdata(x) if isinstance(x, np.ma.MaskedArray) else x)
    return MaskedTensor(data, ~np.ma.getmaskarray(x))


def to_numpy_ma(x: Any) -> np.ma.MaskedArray:
    """Return a NumPy masked array, True = masked; entries that are not stored are masked.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1, 2]), jnp.array([True, False]))
        >>> to_numpy_ma(x).mask
        array([False,  True])
    """
    x = as_masked_tensor(x).to_dense()
    return np.ma.MaskedArray(np.array(x.storage), mask=~np.asarray(x.valid))


def _capacity(valid: jax.Array, nse: int | None, what: str) -> int:
    """Return `nse`, by default the number of True in `valid`; refuse what cannot fit."""
    traced = isinstance(valid, jax.core.Tracer)
    if nse is None:
        if traced:
            raise ValueError(
                f"`nse`, the number of {what} to store, must be given while the mask is "
                "traced (under jit, vmap or grad)."
            )
        return int(valid.sum())
    nse = checked_capacity(nse)
    if traced:
        if nse == 0 < valid.size:
            raise ValueError(
                f"`nse`=0 leaves no room for any of {valid.size} {what}, which cannot be "
                "checked while the mask is traced."
            )
    elif valid.sum() > nse:
        raise ValueError(f"`nse`={nse} is too small: {valid.sum()} {what} must be stored.")
    return nse


def _picked(values: jax.Array, picked: jax.Array) -> jax.Array:
    return gather_rows(values, picked.astype(jnp.int32), coalesced=True)


def _zero_where(padding: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.where(padding, jnp.zeros((), values.dtype), values)


def _coordinates_at(storage: Any, picked: jax.Array) -> Sequence[jax.Array]:
    """Return the index in every dimension of stored values, given by their number."""
    if not is_sparse(storage):
        return jnp.unravel_index(picked, storage.shape)
    shape = stored_values(storage).shape
    entry, *rest = jnp.unravel_index(picked, shape)
    return [*(_picked(index, entry) for index in coordinates(storage)), *rest]


def _is_sorted(storage: Any) -> bool:
    if isinstance(storage, BCOO | BCSR):
        return storage.indices_sorted
    return not isinstance(storage, RowSparse) or storage.coalesced


def _stored_rows(
    shape: tuple[int, ...], ids: jax.Array, values: Any, valid: jax.Array, nse: int | None
) -> MaskedTensor:
    """Store the rows that have a valid entry, of rows in order."""
    rows = ids.shape[0]
    touched = valid.any(axis=tuple(range(1, valid.ndim)))
    nse = _capacity(touched, nse, "rows")
    picked = jnp.flatnonzero(touched, size=nse, fill_value=rows)
    inside = picked < rows
    kept = trailing(inside, valid.ndim)
    values = _zero_where(~kept, _picked(values, picked))
    storage = RowSparse.from_rows(
        jnp.where(inside, _picked(ids, picked), shape[0]),
        fit_or_poison(values, touched.sum(), nse, rows),
        shape,
        coalesced=True,
    )
    return joined(storage, _picked(valid, picked) & kept)


def _assembled_rows(x: MaskedTensor, nse: int | None) -> MaskedTensor:
    """Return the rows of a tensor that stores entries, O(stored entries + stored rows)."""
    first, *others = coordinates(x.storage)
    rows = x.shape[0]
    touched = x.valid.any(axis=tuple(range(1, x.valid.ndim)))
    first = jnp.where(touched, first, rows)
    starts = jnp.sort(first)
    starts = (starts < rows) & (starts != jnp.roll(starts, 1).at[:1].set(rows))
    nse = _capacity(starts, nse, "rows")
    # The padding id is the largest, so it never takes the place of a row.
    ids = jnp.unique(first, size=nse, fill_value=rows)
    slot = jnp.where(touched, jnp.searchsorted(ids, first), nse)
    at = (slot, *others)
    empty = jnp.zeros((nse, *x.shape[1:]), x.dtype)
    values = empty.at[at].set(stored_values(x.storage), mode="drop")
    valid = jnp.zeros(empty.shape, bool).at[at].set(x.valid, mode="drop")
    values = fit_or_poison(values, starts.sum(), nse, min(rows, first.shape[0]))
    storage = RowSparse.from_rows(ids, values, x.shape, coalesced=True)
    return joined(storage, valid)


install(to_coo=to_coo, to_csr=to_csr, to_row_sparse=to_row_sparse, to_numpy_ma=to_numpy_ma)
