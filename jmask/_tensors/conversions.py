"""Masked tensors from one storage to another: every valid entry is stored.

    data  [[1, nan, 2],     coo   indices [0,0] [0,2] [1,1]   values [1, 2, 5]
           [0,   5, 0]]     csr   indices  0 2 1, indptr 0 2 3, values [1, 2, 5]
    mask  [[T,   F, T],
           [F,   T, F]]     row_sparse  indices 0 1, values as data, mask as mask

Coordinate and compressed row storage hold the valid entries and nothing else. Row-sparse
storage holds the rows with a valid entry; their other entries stay masked. Sizes are
static: what `nse` leaves over is padding, which is never valid.
"""

import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.array_types import is_nonzero, joint_dtype, trailing
from jmask._base.types import HostArray, MaskedHostArray, Options, Tensor, TensorLike
from jmask._base.validation import checked_array, checked_choice, checked_path
from jmask._kernels.rows import gather_rows
from jmask._tensors.checks import checked_capacity, fit_or_poison
from jmask._tensors.masked_tensor import MaskedTensor, as_masked_tensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import (
    as_dense,
    compressed,
    coordinates,
    entry_indices,
    is_entry,
    is_sparse,
    stored_values,
    unique_positions,
)
from jmask._tensors.storage import stype as stype_of


def to_coo(x: MaskedTensor, nse: int | None = None) -> MaskedTensor:
    """Return the tensor on coordinate (BCOO) storage, without dense dimensions."""
    if nse is None and x.stype == "coo" and not x.storage.n_dense:
        return x
    values, valid = stored_values(x.storage).reshape(-1), x.valid.reshape(-1)
    picked, inside, values = _chosen(values, valid, nse, "entries")
    indices = [
        jnp.where(inside, index, size)
        for index, size in zip(entry_indices(x.storage, picked), x.shape, strict=True)
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
    """Return the tensor of two dimensions on compressed row (BCSR) storage."""
    if nse is None and x.stype == "csr":
        return x
    x = to_coo(x, _capacity(x.valid.reshape(-1), nse, "entries"))
    # Sorted or not, padding comes last.
    valid = jnp.arange(x.valid.shape[0]) < x.valid.sum()
    return joined(compressed(x.storage), valid)


def to_row_sparse(x: MaskedTensor, nse: int | None = None) -> MaskedTensor:
    """Return the tensor on row-sparse storage: the rows with a valid entry, in order."""
    if nse is None and x.stype == "row_sparse":
        return x
    if not is_sparse(x.storage):
        return _stored_rows(x, jnp.arange(x.shape[0]), nse)
    if isinstance(x.storage, RowSparse):
        return _stored_rows(x, x.storage.row_ids(), nse)
    return _assembled_rows(x, nse)


def from_numpy_ma(x: MaskedHostArray) -> MaskedTensor:
    """Make a masked tensor from a NumPy masked array, where True means masked.

    Example:
        >>> import numpy as np, jmask
        >>> from_numpy_ma(np.ma.masked_array([1, 2, 3], mask=[False, True, False]))
        MaskedTensor([1, --, 3], dtype=int32)
    """
    data = checked_array("x", np.ma.getdata(x) if isinstance(x, np.ma.MaskedArray) else x)
    return MaskedTensor(data, ~np.ma.getmaskarray(x))


def to_numpy_ma(x: TensorLike) -> MaskedHostArray:
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
    """Return `nse`, by default the number of True in `valid`."""
    traced = isinstance(valid, jax.core.Tracer)
    if nse is None:
        if traced:
            raise ValueError(
                f"`nse`, the number of {what} to store, must be given while the mask is "
                "traced (under jit, vmap or grad)."
            )
        return int(valid.sum())
    nse = checked_capacity(nse)
    if traced and nse == 0 < valid.size:
        raise ValueError(
            f"`nse`=0 leaves no room for any of {valid.size} {what}, which cannot be checked "
            "while the mask is traced."
        )
    return nse


def _picked(values: jax.Array, picked: jax.Array) -> jax.Array:
    return gather_rows(values, picked.astype(jnp.int32), coalesced=True)


def _chosen(
    values: jax.Array, flags: jax.Array, nse: int | None, what: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose the values (n, ...) whose flag (n,) is True, in order.

    Returns:
        Their numbers, padded to `nse`; which of these are no padding; and the values, zeros
        at padding.
    """
    nse = _capacity(flags, nse, what)
    picked = jnp.flatnonzero(flags, size=nse, fill_value=flags.size)
    inside = picked < flags.size
    kept = trailing(inside, values.ndim)
    values = jnp.where(kept, _picked(values, picked), jnp.zeros((), values.dtype))
    return picked, inside, fit_or_poison(values, flags.sum(), nse, flags.size, what)


def _is_sorted(storage: Tensor) -> bool:
    if isinstance(storage, BCOO | BCSR):
        return storage.indices_sorted
    return not isinstance(storage, RowSparse) or storage.coalesced


def _stored_rows(x: MaskedTensor, ids: jax.Array, nse: int | None) -> MaskedTensor:
    """Store the rows that have a valid entry, of rows in order."""
    touched = x.valid.any(axis=tuple(range(1, x.valid.ndim)))
    picked, inside, values = _chosen(stored_values(x.storage), touched, nse, "rows")
    ids = jnp.where(inside, _picked(ids, picked), x.shape[0])
    storage = RowSparse.from_rows(ids, values, x.shape, coalesced=True)
    return joined(storage, _picked(x.valid, picked) & trailing(inside, x.valid.ndim))


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


# --- cast storage -------------------------------------------------------------------------
#
# The same tensor on another storage: `cast_storage`.
#
#     [[0, 0],     "row_sparse"    indices [1]          values [[0, 5]]
#      [0, 5],     "coo"           indices [[1, 1]]     values [5]
#      [0, 0]]     "csr"           indices [1]          values [5], indptr [0, 0, 1, 1]
#
# A cast stores what is not zero: rows with an entry that is not zero (nan is not), or such
# entries. For masked tensors it stores the valid entries, zero or not.


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
        if it has that storage and `nse` is not given.

    Raises:
        ValueError: if `stype` is none of these, the storage does not suit the shape, or
            `nse` is missing or too small. Where that cannot be known, under jit, floating
            values are nan and others are refused: nothing is lost silently.
        TypeError: if `x` is none of these.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.cast_storage(jnp.array([[0., 0.], [0., 5.]]), "row_sparse")
        >>> x
        RowSparse(float32[2, 2], nse=1)
        >>> jmask.cast_storage(x, "csr")
        BCSR(float32[2, 2], nse=1)
        >>> jmask.cast_storage(x, "default")
        Array([[0., 0.],
               [0., 5.]], dtype=float32)
    """
    checked_choice(stype, "stype", ("default", *_TO_SPARSE))
    if isinstance(x, MaskedTensor):
        if stype == "default":
            return x.to_dense()
        _check_castable(x, stype)
        return _TO_SPARSE[stype](x, nse)
    current = stype_of(x)
    x = x if is_sparse(x) else jnp.asarray(x)
    if current == stype and (nse is None or stype == "default"):
        return x
    if stype == "default":
        return as_dense(x)
    _check_castable(x, stype)
    if is_sparse(x):
        x = unique_positions(x)
        entries = is_entry(x) & is_nonzero(stored_values(x))
    else:
        entries = is_nonzero(x)
    if nse is None and isinstance(entries, jax.core.Tracer):
        if not is_sparse(x):
            raise ValueError(
                "`nse`, the number of rows or entries to store, must be given for a traced "
                "dense `x` (under jit, vmap or grad)."
            )
        # As many as a sparse tensor can need.
        rows = min(x.shape[0], entries.shape[0])
        nse = rows if stype == "row_sparse" else entries.size
    return _TO_SPARSE[stype](joined(x, entries), nse).storage


_TO_SPARSE = {"row_sparse": to_row_sparse, "coo": to_coo, "csr": to_csr}


def _check_castable(x: TensorLike, stype: str) -> None:
    if x.ndim == 0 or (stype == "csr" and x.ndim != 2):
        needed = "two dimensions" if stype == "csr" else "at least one dimension"
        raise ValueError(f"{stype} storage needs {needed}, got `x` of shape {x.shape}.")
    if getattr(x, "n_batch", 0) or (isinstance(x, BCSR) and x.n_dense):
        raise ValueError(
            f"`x` has {x.n_batch} batch and {x.n_dense} dense dimensions, which other "
            "storages do not: use x.update_layout(n_batch=0), or vmap over batches."
        )


# --- npz ----------------------------------------------------------------------------------
#
# Tensors in NumPy's `.npz` files, on any storage.
#
# x.npz of a RowSparse      stype "row_sparse", shape, values, indices, coalesced

# The arrays of each storage, in the order in which it is made of them.
_FIELDS = {
    "default": (),
    "row_sparse": ("indices", "values"),
    "coo": ("data", "indices"),
    "csr": ("data", "indices", "indptr"),
}
_FLAGS = ("coalesced", "indices_sorted", "unique_indices")


def save_npz(file: str | os.PathLike, x: TensorLike) -> None:
    """Store a tensor in NumPy's `.npz` format: readable by NumPy alone, and written whole.

    Args:
        file: a path; ".npz" is appended if it is missing. A file that is there is replaced,
            once the new one is complete.
        x: `RowSparse`, BCOO, BCSR, array, or `MaskedTensor` on any of them. Dtypes that
            NumPy's format lacks (bfloat16) are stored as integers of their size.

    Raises:
        TypeError: if `x` is none of these.
        ValueError: if `x` is a stack of row-sparse tensors.

    Example:
        >>> import jax.numpy as jnp, jmask, tempfile
        >>> path = tempfile.mkdtemp() + "/x.npz"
        >>> jmask.save_npz(path, jmask.RowSparse([1], jnp.ones((1, 2)), (3, 2)))
        >>> jmask.load_npz(path)
        RowSparse(float32[3, 2], nse=1)
    """
    masked = isinstance(x, MaskedTensor)
    storage = x.storage if masked else x
    kind = stype_of(storage)
    if isinstance(storage, RowSparse):
        storage.check_single()
    fields = {name: getattr(storage, name) for name in _FIELDS[kind]} or {"data": storage}
    if masked:
        fields["valid"] = x.valid
    contents: Options = {"stype": kind, "shape": np.shape(storage)}
    if kind != "default":
        contents["shape"] = tuple(storage.shape)
        contents |= {flag: getattr(storage, flag) for flag in _FLAGS if hasattr(storage, flag)}
    for name, array in fields.items():
        array = np.asarray(array)
        if array.dtype.isbuiltin != 1:
            contents[f"{name}_dtype"] = array.dtype.name
            array = array.view(f"u{array.dtype.itemsize}")
        contents[name] = array
    path = Path(checked_path("file", file))
    path = path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")
    handle, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, **contents)
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)


def load_npz(file: str | os.PathLike) -> Tensor:
    """Return the tensor that `save_npz` stored.

    Raises:
        ValueError: if the file was not written by `save_npz`.

    Example:
        >>> import jax.numpy as jnp, jmask, tempfile
        >>> path = tempfile.mkdtemp() + "/x.npz"
        >>> jmask.save_npz(path, jmask.masked_tensor(jnp.ones(2), jnp.array([True, False])))
        >>> jmask.load_npz(path)
        MaskedTensor([1.0, --], dtype=float32)
    """
    if not zipfile.is_zipfile(checked_path("file", file)):
        Path(file).stat()  # the error of a file that is not there
        raise ValueError(
            f"`file` {os.fspath(file)!r} is no .npz file: it was not written by jmask.save_npz."
        )
    with np.load(file, allow_pickle=False) as contents:
        if "stype" not in contents:
            raise ValueError(
                f"`file` {os.fspath(file)!r} holds {sorted(contents)}, and no `stype`: it was "
                "not written by jmask.save_npz."
            )
        kind = str(contents["stype"])
        shape = tuple(contents["shape"].tolist())
        flags: Options = {name: bool(contents[name]) for name in _FLAGS if name in contents}
        arrays = tuple(_loaded(contents, name) for name in _FIELDS[kind] or ("data",))
        storage: Tensor = arrays[0]
        if kind == "row_sparse":
            storage = RowSparse(arrays[0], arrays[1], shape, **flags)
        elif kind != "default":
            storage = (BCOO if kind == "coo" else BCSR)(arrays, shape=shape, **flags)
        return joined(storage, _loaded(contents, "valid")) if "valid" in contents else storage


def _loaded(contents: Mapping[str, HostArray], name: str) -> Tensor:
    array = contents[name]
    if f"{name}_dtype" in contents:
        array = array.view(jnp.dtype(str(contents[f"{name}_dtype"])))
    return jnp.asarray(array)


# --- printing ------------------------------------------------------------------------------
#
# How masked tensors print: masked entries as `--`, laid out as NumPy lays out arrays.
#
#     MaskedTensor([1.0, --, 3.0], dtype=float32)
#     MaskedTensor(coo, float32[2, 4], nse=3, values=[3.0, --, 5.0])
#     MaskedTensor(float32[2, 4])                                        while traced
#
# Printing never raises, whatever leaves the pytree node holds, and never moves more of a
# large tensor than the entries it shows.

_MASKED = "--"


def representation(x: MaskedTensor) -> str:
    """Print `MaskedTensor([1.0, --, 3.0], dtype=float32)`; its type and shape while traced."""
    # A repr that raises hides the error somebody is looking for: transformations put
    # anything into the leaves, and buffers may be donated or live on other hosts.
    for attempt in (_with_values, _without_values):
        try:
            return attempt(x)
        except Exception:
            continue
    return f"MaskedTensor({x.storage!r}, {x.valid!r})"


def _with_values(x: MaskedTensor) -> str:
    values, valid = stored_values(x.storage), x.valid
    if not all(map(_is_concrete, (values, valid))) or values.shape != valid.shape:
        return _without_values(x)
    if is_sparse(x.storage):
        head, tail = f"MaskedTensor({_described(x)}, values=", ")"
    else:
        head, tail = "MaskedTensor(", f", dtype={x.dtype})"
        if x.size == 0 and x.ndim > 1:
            tail = f", shape={x.shape}{tail}"
    return head + _entries(values, valid, head) + tail


def _without_values(x: MaskedTensor) -> str:
    return f"MaskedTensor({_described(x)})"


def _described(x: MaskedTensor) -> str:
    shape = ", ".join(map(str, x.shape))
    described = f"{x.dtype}[{shape}]"
    if not is_sparse(x.storage):
        return described
    return f"{x.stype}, {described}, nse={x.storage.nse}"


def _is_concrete(x: object) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer)


def _entries(values: jax.Array | HostArray, valid: jax.Array | HostArray, head: str) -> str:
    """Return the entries as text whose lines after the first are indented as after `head`."""
    if values.size == 0:
        return "[]"
    options = np.get_printoptions()
    edge, is_large = options["edgeitems"], values.size > options["threshold"]
    cut = [axis for axis, n in enumerate(values.shape) if is_large and n > 2 * edge]
    for axis in cut:
        values, valid = (_edges(a, axis, edge) for a in (values, valid))
    values, valid = np.asarray(values), np.asarray(valid)
    if jnp.issubdtype(values.dtype, jnp.floating) and values.dtype.kind != "f":
        values = values.astype(np.float32)  # bfloat16 and smaller: 1 must print as 1.0
    pairs = zip(values.ravel(), valid.ravel(), strict=True)
    flat = [str(value) if exists else _MASKED for value, exists in pairs]
    if values.ndim > 1:  # columns stand below each other
        width = max(map(len, flat))
        flat = [word.rjust(width) for word in flat]
    words = np.array(flat).reshape(values.shape)
    for axis in cut:  # one between both ends, which NumPy leaves out
        words = np.insert(words, edge, "", axis)
    return np.array2string(
        words,
        separator=", ",
        prefix=head,
        formatter={"all": str},
        threshold=0 if cut else words.size,
    )


def _edges(x: jax.Array | HostArray, axis: int, edge: int) -> jax.Array | HostArray:
    at, last = (slice(None),) * axis, x.shape[axis] - edge
    module = jnp if isinstance(x, jax.Array) else np
    with jax.ensure_compile_time_eval():  # a constant may be printed while tracing
        parts = [x[(*at, slice(edge))], x[(*at, slice(last, None))]]
        return module.concatenate(parts, axis)
