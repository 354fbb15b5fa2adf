"""Tensors in NumPy's `.npz` files, on any storage.

x.npz of a RowSparse      stype "row_sparse", shape, values, indices, coalesced
"""

import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.validation import checked_path
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import stype

# The arrays of each storage, in the order in which `_rebuilt` takes them.
_FIELDS = {
    "default": (),
    "row_sparse": ("values", "indices"),
    "coo": ("data", "indices"),
    "csr": ("data", "indices", "indptr"),
}
_FLAGS = ("coalesced", "indices_sorted", "unique_indices")


def save_npz(file: str | os.PathLike, x: Any) -> None:
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
    kind = stype(storage)
    if isinstance(storage, RowSparse):
        storage.check_single()
    fields = {name: getattr(storage, name) for name in _FIELDS[kind]} or {"data": storage}
    if masked:
        fields["valid"] = x.valid
    contents: dict[str, Any] = {"stype": kind, "shape": np.shape(storage)}
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


def load_npz(file: str | os.PathLike) -> Any:
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
        flags = {name: bool(contents[name]) for name in _FLAGS if name in contents}
        arrays = [_loaded(contents, name) for name in _FIELDS[kind] or ("data",)]
        storage = _rebuilt(kind, arrays, shape, flags)
        if "valid" not in contents:
            return storage
        return joined(storage, _loaded(contents, "valid"))


def _loaded(contents: Any, name: str) -> jax.Array:
    array = contents[name]
    if f"{name}_dtype" in contents:
        array = array.view(jnp.dtype(str(contents[f"{name}_dtype"])))
    return jnp.asarray(array)


def _rebuilt(kind: str, arrays: Any, shape: tuple[int, ...], flags: dict[str, bool]) -> Any:
    if kind == "default":
        return arrays[0]
    if kind == "row_sparse":
        values, indices = arrays
        return RowSparse(indices, values, shape, **flags)
    return (BCOO if kind == "coo" else BCSR)(tuple(arrays), shape=shape, **flags)
