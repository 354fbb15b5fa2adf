"""Mistakes with sparse and masked tensors; see test_mistakes.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.mistakes import GRADS, ROWS, TABLE, Mistake, check

MISTAKES: dict[str, Mistake] = {
    "todense of a tree": (
        lambda: jmask.todense(GRADS),
        TypeError,
        ("dict is not a storage", "RowSparse"),
    ),
    "todense of nothing": (
        lambda: jmask.todense(None),
        TypeError,
        ("NoneType is not a storage", "expected an array"),
    ),
    "an unknown storage": (
        lambda: jmask.cast_storage(TABLE, "csc"),
        ValueError,
        ("`stype` must be one of 'default', 'row_sparse', 'coo', 'csr'",),
    ),
    "numbers for a mask": (
        lambda: jmask.masked_tensor(TABLE, TABLE),
        TypeError,
        ("`mask` must be boolean", "`mask != 0`"),
    ),
    "a mask of another shape": (
        lambda: jmask.sparse_mask(TABLE, TABLE[:2] > 0),
        ValueError,
        ("`mask` must have the shape of `x`, (6, 2)",),
    ),
    "a masked tensor into NumPy": (
        lambda: np.asarray(jmask.masked_tensor(TABLE, TABLE > 0)),
        TypeError,
        ("masked entries have no values", "to_tensor(fill)", "to_numpy_ma"),
    ),
    "if of a sparse tensor": (
        lambda: bool(ROWS),
        TypeError,
        ("no truth value", "jmask.numpy.any"),
    ),
    "an index that is True": (
        lambda: ROWS[True],
        TypeError,
        ("not indexed by a single boolean, got True", "None", "array of booleans"),
    ),
    "room for fewer rows": (
        lambda: ROWS.coalesce(nse=1),
        ValueError,
        ("`nse`=1 is too small: 2 rows",),
    ),
    "rows to be counted under jit": (
        lambda: jax.jit(jmask.RowSparse.fromdense)(TABLE),
        ValueError,
        ("`nse`", "must be given for a traced `x`"),
    ),
    "a product that does not fit": (
        lambda: jmask.dot(ROWS, TABLE),
        ValueError,
        ("`lhs` of shape (6, 2) and `rhs` of shape (6, 2) do not fit", "transpose_a"),
    ),
    "ids that are numbers": (
        lambda: jmask.RowSparse([1.0], jnp.ones((1, 2)), (6, 2)),
        TypeError,
        ("`indices` must be integers, the numbers of rows, got float64",),
    ),
    "indices and values in the wrong order": (
        lambda: jmask.RowSparse(jnp.ones((1, 2)), [1], (6, 2)),
        TypeError,
        ("`indices` must be integers, the numbers of rows, got float32",),
    ),
    "a number of rows for a shape": (
        lambda: jmask.RowSparse([1], jnp.ones(1), 6),
        TypeError,
        ("`shape` must be a tuple of integers, got 6",),
    ),
    "rows of another width": (
        lambda: jmask.RowSparse([1], jnp.ones((1, 3)), (6, 2)),
        ValueError,
        ("`values` of shape (1, 3) do not fit `shape` (6, 2)",),
    ),
    "isfinite of the leaves": (
        lambda: jax.tree.map(jnp.isfinite, GRADS),
        TypeError,
        ("plain bool numbers", "inside jmask.lazy"),
    ),
    "a RowSparse taken apart": (
        lambda: jax.tree.map(lambda x: jnp.ones(x.shape, jnp.uint32), GRADS),
        TypeError,
        ("taken apart into plain uint32", "orbax", "jmask.to_arrays(x)"),
    ),
    "a sum of gradients of different parameters": (
        lambda: jmask.tree.add(GRADS, {"u": ROWS}),
        ValueError,
        ("trees of one structure are expected", "'t'", "'u'", "different parameters"),
    ),
    "arguments of stochastic_round in the wrong order": (
        lambda: jmask.stochastic_round(jax.random.key(0), TABLE, jnp.bfloat16),
        TypeError,
        ("`x` must be floating, got key<fry>", "(x, dtype, key)"),
    ),
    "a seed for a key": (
        lambda: jmask.stochastic_round(TABLE, jnp.bfloat16, 0),
        TypeError,
        ("`key` must be a key of jax.random, such as jax.random.key(0), got int",),
    ),
    "a file of something else": (
        lambda: jmask.load_npz(__file__),
        ValueError,
        ("is no .npz file", "jmask.save_npz"),
    ),
    "arrays of something else": (
        lambda: jmask.from_arrays({"t": TABLE}, like=GRADS),
        ValueError,
        ("`arrays['t']` must be what jmask.to_arrays makes", "got ArrayImpl"),
    ),
    "a tree in a file": (
        lambda: jmask.save_npz("gradients.npz", GRADS),
        TypeError,
        ("dict is not a storage", "RowSparse"),
    ),
    "tensors in a file": (
        lambda: jmask.save_npz("gradients.npz", [TABLE, ROWS]),
        TypeError,
        ("a list that holds a RowSparse is not a storage", "expected an array"),
    ),
    "the number of a masked entry": (
        lambda: float(jmask.masked_tensor(jnp.float32(1), jnp.array(False))),
        ValueError,
        ("a masked entry is not a number", "to_tensor(fill_value)"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name):
    check(MISTAKES[name])
