"""Tensors from one storage to another, to NumPy, and to text.

    data  [[1, nan, 2],     coo   indices [0,0] [0,2] [1,1]   values [1, 2, 5]
           [0,   5, 0]]     csr   indices  0 2 1, indptr 0 2 3, values [1, 2, 5]
    mask  [[T,   F, T],
           [F,   T, F]]     row_sparse  indices 0 1, values as data, mask as mask

A cast stores the valid entries, or the rows with one. Of a tensor that is not masked it stores
the entries, or rows, that are not zero; nan is not zero. Sizes are static: `nse` is filled up
with padding, which is never valid.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.array_types import is_nonzero, joint_dtype, trailing
from jmask._base.types import Argument, HostArray, Tensor, TensorLike
from jmask._base.validation import checked_array, checked_choice
from jmask._kernels.rows import gather_rows
from jmask._tensors.checks import checked_capacity, fit_or_poison
from jmask._tensors.masked_tensor import MaskedTensor, as_masked_tensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import (
    array_if_none_sparse,
    as_dense,
    coordinates,
    entry_indices,
    is_entry,
    is_sparse,
    stored_values,
    to_bcsr,
    unique_positions,
)
from jmask._tensors.storage import stype as stype_of


def to_coo(x: MaskedTensor, nse: int | None = None) -> MaskedTensor:
    """Return the tensor on coordinate (BCOO) storage, without dense dimensions."""
    values, valid = stored_values(x).reshape(-1), x.valid.reshape(-1)
    picked, inside, values = _chosen(values, valid, nse, "entries")
    pairs = zip(entry_indices(x.storage, picked), x.shape, strict=True)
    indices = [jnp.where(inside, index, size) for index, size in pairs]
    dtype, rows_are_sorted = joint_dtype(*indices), getattr(x.storage, "coalesced", True)
    storage = BCOO(
        (values, jnp.stack([index.astype(dtype) for index in indices], axis=1)),
        shape=x.shape,
        indices_sorted=getattr(x.storage, "indices_sorted", rows_are_sorted),
        unique_indices=True,
    )
    return joined(storage, inside)


def to_csr(x: MaskedTensor, nse: int | None = None) -> MaskedTensor:
    """Return the tensor of two dimensions on compressed row (BCSR) storage."""
    entries: Argument = to_coo(x, nse)
    # Sorted or not, padding comes last.
    valid = jnp.arange(entries.valid.shape[0]) < entries.valid.sum()
    return joined(to_bcsr(entries.storage), valid)


def to_row_sparse(x: MaskedTensor, nse: int | None = None) -> MaskedTensor:
    """Return the tensor on row-sparse storage: the rows with a valid entry, in order."""
    stored = x.storage if x.size else x.to_dense().storage
    if isinstance(stored, BCOO | BCSR):
        return _assembled_rows(x, stored, nse)
    ids = stored.row_ids() if isinstance(stored, RowSparse) else jnp.arange(x.shape[0])
    picked, inside, values = _chosen(stored_values(stored), _has_valid(x), nse, "rows")
    ids = jnp.where(inside, _picked(ids, picked), x.shape[0])
    storage = RowSparse.from_rows(ids, values, x.shape, coalesced=True)
    return joined(storage, _picked(x.valid, picked) & trailing(inside, x.valid.ndim))


def from_numpy_ma(x: np.ma.MaskedArray) -> MaskedTensor:
    """Make a masked tensor from a NumPy masked array, where True means masked.

    Example:
        >>> import numpy as np, jmask
        >>> from_numpy_ma(np.ma.masked_array([1, 2, 3], mask=[False, True, False]))
        MaskedTensor([1, --, 3], dtype=int32)
    """
    data = checked_array("x", np.ma.getdata(x) if isinstance(x, np.ma.MaskedArray) else x)
    return MaskedTensor(data, ~np.ma.getmaskarray(x))


def to_numpy_ma(x: TensorLike) -> np.ma.MaskedArray:
    """Return a NumPy masked array, True = masked; entries that are not stored are masked.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1, 2]), jnp.array([True, False]))
        >>> to_numpy_ma(x).mask
        array([False,  True])
    """
    x = as_masked_tensor(x).to_dense()
    return np.ma.MaskedArray(np.array(x.storage), mask=~np.asarray(x.valid))


def _capacity(flags: jax.Array, nse: int | None, what: str) -> int:
    """Return `nse`, by default the number of True in `flags`."""
    if nse is not None:
        return checked_capacity(nse)
    if isinstance(flags, jax.core.Tracer):
        raise ValueError(
            f"`nse`, the number of {what} to store, must be given for a traced dense `x` "
            "(under jit, vmap or grad)."
        )
    return int(flags.sum())


def _picked(values: jax.Array, picked: jax.Array) -> jax.Array:
    return gather_rows(values, picked.astype(jnp.int32), coalesced=True)


def _chosen(
    values: jax.Array, flags: jax.Array, nse: int | None, what: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose the values (n, ...) whose flag (n,) is True, in order.

    Returns:
        Their indices, padded to `nse`; which of these are no padding; and the values, zeros
        at padding.
    """
    nse = _capacity(flags, nse, what)
    picked = jnp.flatnonzero(flags, size=nse, fill_value=flags.size)
    inside = picked < flags.size
    kept = trailing(inside, values.ndim)
    values = jnp.where(kept, _picked(values, picked), jnp.zeros((), values.dtype))
    return picked, inside, fit_or_poison(values, flags.sum(), nse, flags.size, what)


def _has_valid(x: MaskedTensor) -> jax.Array:
    """Return for each row (or entry) that is stored whether something in it is valid."""
    return x.valid.any(axis=tuple(range(1, x.valid.ndim)))


def _assembled_rows(x: MaskedTensor, stored: BCOO | BCSR, nse: int | None) -> MaskedTensor:
    """Return the rows of a tensor that stores entries, O(stored entries + stored rows)."""
    first, *others = coordinates(stored)
    rows, count, touched = x.shape[0], first.shape[0], _has_valid(x)
    # The padding id is the largest, so it never takes the place of a row.
    first = jnp.where(touched, first, rows)
    ids, slots = jnp.unique(first, size=count, fill_value=rows, return_inverse=True)
    nse = _capacity(ids < rows, nse, "rows")
    at = (jnp.where(touched, slots, nse), *others)
    zeros = lambda dtype: jnp.zeros((nse, *x.shape[1:]), dtype).at[at]
    values = zeros(x.dtype).set(stored.data, mode="drop")
    valid = zeros(bool).set(x.valid, mode="drop")
    values = fit_or_poison(values, jnp.sum(ids < rows), nse, min(rows, count))
    ids = jnp.pad(ids, (0, max(nse - count, 0)), constant_values=rows)[:nse]
    storage = RowSparse.from_rows(ids, values, x.shape, coalesced=True)
    return joined(storage, valid)


def cast_storage(x: TensorLike, stype: str, *, nse: int | None = None) -> Tensor:
    """Return the tensor on another storage; MXNet's function of this name.

    Args:
        x: array, `RowSparse`, BCOO, BCSR, or `MaskedTensor` on any of them.
        stype: "default", "row_sparse", "coo" or "csr" (of two dimensions).
        nse: the number of rows ("row_sparse") or entries to store, static. By default the
            exact number; while `x` is traced, as many as a sparse `x` can need. For a
            traced dense `x` it must be given.

    Returns:
        An array, `RowSparse`, BCOO or BCSR; a `MaskedTensor` on it if `x` is one. `x` itself
        if it has that storage, `nse` is not given, and no entry (row) that it stores is masked.

    Raises:
        ValueError: if `stype` is none of these, the storage does not suit the shape, or
            `nse` is missing or too small. Where that cannot be known, under jit, floating
            values are nan and others are refused.
        TypeError: if `x` is none of these.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.cast_storage(jnp.array([[0., 0.], [0., 5.]]), "row_sparse")
        >>> x, jmask.cast_storage(x, "csr")
        (RowSparse(float32[2, 2], nse=1), BCSR(float32[2, 2], nse=1))
    """
    checked_choice("stype", stype, ("default", *_TO_SPARSE))
    if not isinstance(x, MaskedTensor):
        current = stype_of(x)
        storage = x if is_sparse(x) else jnp.asarray(x)
        if stype == "default":
            return as_dense(storage)
        if current == stype and nse is None:
            return storage
        _check_castable(storage, stype)
        storage = unique_positions(array_if_none_sparse(storage))
        valid = is_entry(storage) & is_nonzero(stored_values(storage))
        return _cast(joined(storage, valid), stype, nse).storage
    if stype == "default":
        return x.to_dense()
    _check_castable(x, stype)
    return _cast(x, stype, nse)


def _cast(x: MaskedTensor, stype: str, nse: int | None) -> MaskedTensor:
    is_traced = isinstance(x.valid, jax.core.Tracer)
    if nse is None and is_traced and is_sparse(x.storage):  # as many as it can need
        rows = min(x.shape[0], x.valid.shape[0])
        nse = rows if stype == "row_sparse" else x.valid.size
    if nse is None and x.stype == stype and not getattr(x.storage, "n_dense", 0):
        kept = _has_valid(x) if stype == "row_sparse" else x.valid
        if kept.all():
            return x
    return _TO_SPARSE[stype](x, nse)


_TO_SPARSE = {"row_sparse": to_row_sparse, "coo": to_coo, "csr": to_csr}


def _check_castable(x: Tensor, stype: str) -> None:
    if x.ndim == 0 or (stype == "csr" and x.ndim != 2):
        needed = "two dimensions" if stype == "csr" else "at least one dimension"
        raise ValueError(f"{stype} storage needs {needed}, got `x` of shape {x.shape}.")
    if isinstance(x, BCOO | BCSR) and (x.n_batch or (isinstance(x, BCSR) and x.n_dense)):
        raise ValueError(
            f"`x` has {x.n_batch} batch and {x.n_dense} dense dimensions, which other "
            "storages do not: use x.update_layout(n_batch=0), or vmap over batches."
        )


def representation(x: MaskedTensor) -> str:
    """Return a masked tensor as text, laid out like NumPy's; while traced, type and shape.

    MaskedTensor([1.0, --, 3.0], dtype=float32)
    MaskedTensor(coo, float32[2, 4], nse=3, values=[3.0, --, 5.0])
    MaskedTensor(float32[2, 4])
    """
    # A repr that raises hides the error somebody is looking for: transformations put
    # anything into the leaves, and buffers may be donated or live on other hosts.
    try:
        described = f"{x.dtype}[{', '.join(map(str, x.shape))}]"
        head, tail = "MaskedTensor(", f", dtype={x.dtype})"
        if is_sparse(x.storage):
            described = f"{x.stype}, {described}, nse={x.storage.nse}"
            head, tail = f"MaskedTensor({described}, values=", ")"
        elif x.size == 0 and x.ndim > 1:
            tail = f", shape={x.shape}{tail}"
    except Exception:
        return f"MaskedTensor({x.storage!r}, {x.valid!r})"
    try:
        return head + _entries(stored_values(x), x.valid, head) + tail
    except Exception:
        return f"MaskedTensor({described})"


def _entries(values: jax.Array | HostArray, valid: jax.Array | HostArray, head: str) -> str:
    """Return the entries as text whose lines after the first are indented as after `head`."""
    if values.size == 0:
        return "[]"
    options = np.get_printoptions()
    edge, is_large = options["edgeitems"], values.size > options["threshold"]
    # Only what is shown is read: both ends of an axis, and one entry that NumPy leaves out.
    cut = [is_large and n > 2 * edge for n in values.shape]
    ends = [
        np.r_[:edge, 0, n - edge : n] if is_cut else np.arange(n)
        for n, is_cut in zip(values.shape, cut, strict=True)
    ]
    if valid.dtype == jax.dtypes.float0:  # a tangent or gradient of JAX has no mask
        valid = np.ones(values.shape, bool)
    with jax.ensure_compile_time_eval():  # a constant may be printed while tracing
        values, valid = (np.asarray(x[np.ix_(*ends)]) for x in (values, valid))
    if jnp.issubdtype(values.dtype, jnp.floating) and values.dtype.kind != "f":
        values = values.astype(np.float32)  # bfloat16 and smaller: 1 must print as 1.0
    pairs = zip(values.ravel(), valid.ravel(), strict=True)
    words = [str(value) if exists else "--" for value, exists in pairs]
    width = max(map(len, words)) if values.ndim > 1 else 0  # columns stand below each other
    return np.array2string(
        np.array([word.rjust(width) for word in words]).reshape(values.shape),
        separator=", ",
        prefix=head,
        formatter={"all": str},
        threshold=0 if any(cut) else len(words),
    )
