"""`max_norm` of lookups and `renormalize`, against NumPy loops; in place."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.compiled_step import temporary_bytes
from tests.embedding_oracle import normal
from tests.oracle import dense_twin

V, D = 6, 3


# --- max_norm ----------------------------------------------------------------------------

NORMS = (1, 2.0, 3, 0.5, math.inf)
LONG = np.array([[3, -4, 0], [0.1, 0, 0.2], [0, 0, 0], [0, 2, 0], [1, 1, 1], [-9, 1, 0]])


def row_norms(table, p):
    if p == math.inf:
        return np.abs(table).max(-1, keepdims=True)
    return (np.abs(table) ** p).sum(-1, keepdims=True) ** (1 / p)


def bounded(rows, bound, p):
    return rows * np.minimum(1, bound / np.maximum(row_norms(rows, p), 1e-9))


@pytest.mark.parametrize("p", NORMS)
def test_max_norm(p):
    """The derivative, too, is that of the scaled row: in the table and in the bound."""
    ids = np.array([0, 1, 2, 3, 4, 5, 0])
    weights = normal(7, D)

    def loss(table, bound):
        rows = jmask.embedding_lookup(table, ids, max_norm=bound, norm_type=p)
        return jnp.sum(rows * weights), rows

    gradient = jax.jit(jmask.grad(loss, (0, 1), has_aux=True))
    smooth = LONG + np.where(LONG.any(1, keepdims=True), 0.01, 0) * np.arange(1, 19).reshape(
        V, D
    )
    with jmask.strict():
        (sparse, in_bound), rows = gradient(smooth, 1.5)
    np.testing.assert_allclose(rows, bounded(smooth[ids], 1.5, p), rtol=1e-6)
    in_table = dense_twin(sparse)
    numpy_loss = lambda t, m: (bounded(t[ids], m, p) * weights).sum()
    for at in np.ndindex(V, D):
        step = np.zeros((V, D))
        step[at] = 1e-6
        slope = numpy_loss(smooth + step, 1.5) - numpy_loss(smooth - step, 1.5)
        assert in_table[at] == pytest.approx(slope / 2e-6, rel=1e-4, abs=1e-4)
    slope = numpy_loss(smooth, 1.5 + 1e-6) - numpy_loss(smooth, 1.5 - 1e-6)
    assert in_bound == pytest.approx(slope / 2e-6, rel=1e-4)

    # Ties, zeros, and a row of zeros, through which the derivative passes as through others
    # that are short enough.
    (sparse, in_bound), rows = gradient(LONG, 1.5)
    np.testing.assert_allclose(rows, bounded(LONG[ids], 1.5, p), rtol=1e-6)
    assert np.isfinite(sparse.values).all()
    assert np.isfinite(in_bound)
    np.testing.assert_allclose(sparse.values[2], weights[2], rtol=1e-6)


# --- renormalize -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "padding", "p"),
    [(jax.jit, None, 2), (jax.jit, 3, 1), (jax.jit, -1, math.inf), (lambda f: f, 3, 2)],
)
def test_renormalize(wrap, padding, p):
    ids = np.array([[0, 3, 0], [-1, V, 1], [3, 2, 4]])  # 5 is not among them
    expected = LONG.copy()
    for row in {0, 1, 2, 3, 4} - {padding}:
        norm = row_norms(LONG[row], p)
        if norm > 1.5:
            expected[row] = LONG[row] * 1.5 / (norm + 1e-7)
    table = LONG.astype(np.float32)
    renormalize = lambda t, i: jmask.renormalize(t, i, 1.5, norm_type=p, padding_id=padding)
    found = np.asarray(wrap(renormalize)(table, ids))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    same = (expected == LONG).all(1)
    assert found[same].tobytes() == table[same].tobytes()


@pytest.mark.parametrize(("table", "ids"), [(LONG, []), (LONG[:0], [3]), (LONG, [-1, V])])
def test_renormalize_nothing(table, ids):
    table = table.astype(np.float32)
    found = jax.jit(jmask.renormalize)(table, np.array(ids, np.int32), 1.0)
    np.testing.assert_array_equal(found, table)


def test_renormalize_more_ids_than_rows():
    ids = np.tile(np.arange(-1, V + 1), 3)
    found = jax.jit(jmask.renormalize)(LONG, ids, 1.0)
    np.testing.assert_allclose(found, bounded(LONG, 1.0, 2), rtol=1e-6)


@pytest.mark.parametrize("table", [LONG[:, 0], LONG.reshape(V, 1, D).astype(np.float16)])
def test_renormalize_rows_of_every_shape(table):
    found = jax.jit(jmask.renormalize)(table, np.array([0, 5]), 1.5)
    assert found.dtype == jnp.asarray(table).dtype
    axes = tuple(range(1, table.ndim))
    norms = np.sqrt((np.asarray(found, np.float64) ** 2).sum(axes))
    np.testing.assert_allclose(norms[[0, 5]], 1.5, rtol=1e-3)
    np.testing.assert_array_equal(found[1:5], np.asarray(jnp.asarray(table))[1:5])


def renormalized(table, ids):
    return jmask.renormalize(table, ids, 1.0)


def renormalized_step(table, ids):
    table, tx = renormalized(table, ids), jmask.sgd(0.1)
    loss = lambda t: jnp.sum(jmask.embedding_lookup(t, ids, padding_id=0) ** 2)
    return jmask.apply_gradients(tx, jmask.grad(loss)(table), tx.init(table), table)[0]


@pytest.mark.parametrize("step", [renormalized, renormalized_step])
def test_renormalize_in_place(step):
    """A donated table is the one that comes out, and nothing else is as large."""
    rows, row, count = 10**7, 16, 512
    table = jax.ShapeDtypeStruct((rows, row), jnp.float32)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(table, ids).compile()
    assert temporary_bytes(compiled, rows * row * 4, rows * row) < 16 * count * row * 4
