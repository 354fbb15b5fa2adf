"""The same tensor on another storage: `cast_storage`.

    [[0, 0],     "row_sparse"    indices [1]          values [[0, 5]]
     [0, 5],     "coo"           indices [[1, 1]]     values [5]
     [0, 0]]     "csr"           indices [1]          values [5], indptr [0, 0, 1, 1]

A cast stores what is not zero: rows with an entry that is not zero (nan is not), or such
entries. For masked tensors it stores the valid entries, zero or not.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCSR

from jmask._base.array_types import is_nonzero
from jmask._tensors.masked_storage import check_stype, to_storage
from jmask._tensors.masked_tensor import MaskedTensor, joined
from jmask._tensors.storage import (
    as_dense,
    is_entry,
    is_sparse,
    stored_values,
    unique_positions,
)
from jmask._tensors.storage import stype as stype_of


def cast_storage(x: Any, stype: str, *, nse: int | None = None) -> Any:
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
    check_stype(stype)
    if isinstance(x, MaskedTensor):
        return to_storage(x, stype, nse)
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
        nse = _most(x, entries, stype)
    masked = joined(x, entries)
    return to_storage(masked, stype, nse).storage


def _check_castable(x: Any, stype: str) -> None:
    if x.ndim == 0 or (stype == "csr" and x.ndim != 2):
        needed = "two dimensions" if stype == "csr" else "at least one dimension"
        raise ValueError(f"{stype} storage needs {needed}, got `x` of shape {x.shape}.")
    if getattr(x, "n_batch", 0) or (isinstance(x, BCSR) and x.n_dense):
        raise ValueError(
            f"`x` has {x.n_batch} batch and {x.n_dense} dense dimensions, which other "
            "storages do not: use x.update_layout(n_batch=0), or vmap over batches."
        )


def _most(x: Any, entries: jax.Array, stype: str) -> int:
    """Return how many rows or entries a sparse tensor can need at most."""
    if not is_sparse(x):
        raise ValueError(
            "`nse`, the number of rows or entries to store, must be given for a traced "
            "dense `x` (under jit, vmap or grad)."
        )
    return min(x.shape[0], entries.shape[0]) if stype == "row_sparse" else entries.size
