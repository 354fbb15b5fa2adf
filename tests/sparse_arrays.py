"""BCOO and BCSR arrays made by NumPy: nothing is traced or compiled for them.

They hold what `fromdense` of JAX would give, with ones in padding, and may be made while test
modules are imported.
"""

import jax
import numpy as np
from jax.experimental.sparse import BCOO, BCSR


def coo(dense, nse=None):
    """`BCOO.fromdense`: the entries that are not zero, then padding."""
    values, indices = _entries(np.asarray(dense), nse)
    parts = jax.device_put((values, indices))
    return BCOO(parts, shape=np.shape(dense), indices_sorted=True, unique_indices=True)


def csr(dense, nse=None):
    """`BCSR.fromdense` of a matrix."""
    dense = np.asarray(dense)
    values, indices = _entries(dense, nse)
    ends = np.cumsum(np.count_nonzero(dense, 1), dtype=np.int32)
    pointers = np.concatenate([np.zeros(1, np.int32), ends])
    parts = jax.device_put((values, indices[:, 1], pointers))
    return BCSR(parts, shape=dense.shape)


def _entries(dense, nse):
    """Values (nse,) and indices (nse, n); padding has the shape as index, and ones."""
    indices = np.argwhere(dense).astype(np.int32)
    values = dense[tuple(indices.T)]
    padding = 0 if nse is None else nse - len(values)
    beyond = np.full((padding, dense.ndim), dense.shape, np.int32)
    return np.append(values, np.ones(padding, dense.dtype)), np.append(indices, beyond, 0)
