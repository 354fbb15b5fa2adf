"""What every test compares with: the dense twin of a tree that may hold `RowSparse`."""

import jax
import numpy as np

import jmask

is_row_sparse = lambda x: isinstance(x, jmask.RowSparse)


def densified(tree):
    """The tree with every `RowSparse` made dense by NumPy alone, in float64 sums."""
    return jax.tree.map(
        lambda x: dense_twin(x) if is_row_sparse(x) else x, tree, is_leaf=is_row_sparse
    )


def dense_twin(x):
    """The definition of a `RowSparse`, written out."""
    wide = np.complex128 if np.iscomplexobj(x.values) else np.float64
    dense = np.zeros((x.row_count, *x.row), wide)
    values = np.asarray(x.values)
    for index, row in zip(np.asarray(x.indices).tolist(), values, strict=True):
        if 0 <= index < x.row_count:
            dense[index] += row
    return dense.reshape(x.shape).astype(values.dtype)


def touched_rows(x):
    """The sorted unique rows that are stored, padding apart."""
    ids = np.unique(np.asarray(x.indices))
    return ids[(ids >= 0) & (ids < x.shape[0])]


# The rows that are not stored.
other_rows = lambda x: np.setdiff1d(np.arange(x.shape[0]), touched_rows(x))


def assert_close(actual, expected, **tolerance):
    """Trees are close, leaf by leaf, and of the same structure and dtypes.

    To `rtol=1e-5, atol=1e-6` where no tolerance is given.
    """
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-6}
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert np.asarray(x).dtype == np.asarray(y).dtype, name
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), err_msg=name, **tolerance
        )
