"""Kinds of tables and of gradients, for each of which the same holds as for rows of an array.

    kept("packed", x)                   the table (R, 12), packed
    draw = drawn("packed", x, seed=0)   a gradient of it, and the same in rows of an array
    in_rows("packed", tree, x)          parameters or state of a step, as arrays (R, 12)

A gradient of numbers that are entries of the table moves these entries alone: each is a row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO

import jmask
from tests.oracle import is_row_sparse
from tests.sparse_arrays import coo, csr
from tests.stored_tables import LAYOUTS, batch_of, of_lines, sharded, unpacked

SHARDED = ("8 devices", "automatic axis", "rows over table, batch over both")
OF_ROWS = (
    "array", "matrices", "stack", "stack of stacks", "packed", "complex", "packed complex",
    "complex matrices", "complex stack", "row-sparse weight", *SHARDED,
)  # fmt: skip
MASKED = ("masked", "masked rows", "masked coo", "masked csr", "coo")
OF_ENTRIES = ("vector", "entries", "entries of a stack", *MASKED)
KINDS = OF_ROWS + OF_ENTRIES
# The shape of the table, and how many of its dimensions the ids number.
_SHAPES = {
    "matrices": ((-1, 3, 4), 1),
    "stack": ((3, -1, 12), 2),
    "stack of stacks": ((2, 3, -1, 12), 3),
    "complex matrices": ((-1, 3, 2), 1),
    "complex stack": ((3, -1, 6), 2),
    "vector": ((-1,), 1),
    "entries": ((-1, 12), 2),
    "entries of a stack": ((3, -1, 12), 3),
}


def kept(kind, x):
    """The table (R, 12) as one of this kind."""
    if kind in LAYOUTS:
        return sharded(x, kind)
    if kind == "row-sparse weight":
        return jmask.cast_storage(x, "row_sparse", nse=len(x))
    x = jnp.asarray(paired(x) if "complex" in kind else x)
    return jmask.packed(x) if "packed" in kind else x.reshape(_SHAPES.get(kind, [x.shape])[0])


def in_rows(kind, tree, x):
    """Arrays like the table as arrays like `x`; those with one number for each row stay."""
    # A weight that stores all rows has them in order.
    rows_of = lambda leaf: leaf.values if is_row_sparse(leaf) else leaf
    tree = jax.tree.map(rows_of, tree, is_leaf=is_row_sparse)
    if "packed" in kind:
        columns = 6 if "complex" in kind else 12
        tree = unpacked(tree, kept(kind, x), (len(x), columns))

    def in_pairs(leaf):
        is_table = np.iscomplexobj(leaf) and np.size(leaf) == x.size // 2
        return pairs(np.reshape(leaf, (len(x), -1)) if is_table else leaf)

    return jax.tree.map(in_pairs, tree)


def pairs(x):
    """Complex rows as real ones, twice as long; what is real stays."""
    x = np.asarray(x)
    return np.concatenate([x.real, x.imag], -1) if np.iscomplexobj(x) else x


def paired(x):
    """Rows of real numbers as complex ones, half as long."""
    real, imaginary = np.split(np.asarray(x), 2, -1)
    return jax.lax.complex(real, imaginary)


class Draw(NamedTuple):
    """A gradient of a kind of table, and what it is of an array (R, 12).

    Attributes:
        gradient: of the kind.
        of_array: the same, a `RowSparse` of rows (R, 12) or of entries (12 R, 1).
        dense, touched: the sum for each entry, and whether a step moves it; (R, 12).
    """

    gradient: Any
    of_array: jmask.RowSparse
    dense: np.ndarray
    touched: np.ndarray


def drawn(kind, x, seed, *, has_nan=False, count=24):
    """A gradient with equal ids and padding, of all but the last row of `x`."""
    rng, size = np.random.default_rng(seed), 1 if kind in OF_ENTRIES else x.shape[1]
    rows = x.size // size
    # Not always of the first rows, of which padding must not take any.
    ids, values = rng.integers(seed % 3, 16, count), rng.normal(size=(count, size))
    ids[1], ids[4:9] = ids[0], rows
    values[2, 0] = np.nan if has_nan else values[2, 0]
    values[4:9] = np.nan  # padding
    values = values.astype(np.float32)
    dense, touched = np.zeros((rows + 1, size)), np.zeros((rows + 1, size), bool)
    np.add.at(dense, ids, values)
    touched[ids] = True
    dense, touched = dense[:-1].reshape(x.shape), touched[:-1].reshape(x.shape)
    of_array = jmask.RowSparse(ids, jnp.asarray(values), (rows, size))
    if kind in MASKED:
        gradient = _of_entries(kind, x, ids, values, np.float32(dense), touched)
    else:
        gradient = _of_rows(kind, x, of_array)
    return Draw(gradient, of_array, dense, touched)


def _of_rows(kind, x, of_array):
    ids, values = of_array.indices, of_array.values
    if kind in LAYOUTS:
        return jmask.RowSparse(batch_of(ids, kind), batch_of(values, kind), x.shape)
    values = paired(values) if "complex" in kind else values
    if "packed" in kind:
        return of_lines(jmask.RowSparse(ids, values, (len(x), values.shape[1])), kept(kind, x))
    shape, leading = kept(kind, x).shape, _SHAPES.get(kind, (0, 1))[1]
    return jmask.RowSparse(
        ids, values.reshape(len(ids), *shape[leading:]), shape, leading=leading
    )


def _of_entries(kind, x, ids, values, dense, touched):
    """Entries that are stored, or that have a mask and poison under it."""
    if kind == "coo":
        places = np.stack(np.divmod(ids, x.shape[1]), 1)
        places[ids == x.size] = x.shape
        return BCOO((jnp.asarray(values[:, 0]), jnp.asarray(places)), shape=x.shape)
    if kind == "masked coo":
        return jmask.masked_tensor(coo(np.where(touched, dense, 0), len(ids)))
    if kind == "masked csr":
        return jmask.masked_tensor(csr(np.where(touched, dense, 0), len(ids)))
    poisoned = np.where(touched, dense, np.float32([np.nan, np.inf, 1e30] * 4))
    if kind == "masked":
        return jmask.masked_tensor(jnp.asarray(poisoned), jnp.asarray(touched))
    rows = ids // x.shape[1]  # some of them twice, some padding
    times, at = np.bincount(rows)[rows, None], np.minimum(rows, len(x) - 1)
    data = jmask.RowSparse(rows, jnp.asarray(poisoned[at] / np.float32(times)), x.shape)
    return jmask.masked_tensor(data, data.with_values(jnp.asarray(touched[at])))
