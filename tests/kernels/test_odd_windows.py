"""Rows that are scattered as windows of odd width: the same rows, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmask._kernels.gathered_rows import GatheredRows
from jmask._kernels.odd_windows import add_in_windows, window_of
from jmask._kernels.scatter_update import update_elementwise
from jmask._kernels.update_rows import ADDITION, RowUpdate, updated

V, N, RATE = 7, 12, 0.5
WINDOWS = {  # of a row, for arithmetic and for additions
    (50,): (25, 25),
    (2, 9): (9, 9),
    (100,): (25, 100),
    (52,): (52, 52),
    (10,): (10, 10),
    (20,): (20, 20),
    (64,): (64, 64),
    (25,): (25, 25),
    (): (1, 1),
}


@pytest.mark.parametrize("row", WINDOWS)
def test_which_rows(row):
    table = jax.ShapeDtypeStruct((V, *row), jnp.float32)
    assert (window_of(table, adds_only=False), window_of(table, adds_only=True)) == WINDOWS[row]


def test_rows_that_stay_whole():
    """Of 16 bits, and of tables whose windows 32-bit ids do not count."""
    assert window_of(jax.ShapeDtypeStruct((V, 50), jnp.bfloat16), adds_only=True) == 50
    assert window_of(jax.ShapeDtypeStruct((2**30, 50), jnp.float32), adds_only=True) == 50


def momentum(param, trace, grad, rate):
    trace = 0.9 * trace + grad
    return param - rate * trace, trace


def expected(tables, ids, grad):
    """Momentum in float64, row by row."""
    param, trace = (np.array(x, np.float64) for x in tables)
    for i in set(np.asarray(ids)) - {V}:
        trace[i] = 0.9 * trace[i] + np.asarray(grad, np.float64)[ids == i].sum(0)
        param[i] -= RATE * trace[i]
    return param, trace


@jax.jit
def stepped(tables, ids, grad):
    rate = jnp.float32(RATE)
    return updated([update_elementwise(momentum, tables, ids, grad, [rate], "any")])[0]


@jax.jit
def added(table, ids, grad):
    of_sgd = RowUpdate(ADDITION, [table], ids, grad, [], "any")
    return updated([of_sgd])[0][0], add_in_windows(table, ids, grad)


@given(
    seed=st.integers(0, 10**6),
    row=st.sampled_from([(50,), (2, 9), (100,)]),
    factored=st.booleans(),
)
def test_updates(seed, row, factored):
    rng = np.random.default_rng(seed)
    tables = [jnp.asarray(rng.normal(size=(V, *row)), jnp.float32) for _ in range(2)]
    ids = jnp.asarray(rng.integers(0, V + 1, N), jnp.int32)
    grad = rows = jnp.asarray(rng.normal(size=(N, *row)), jnp.float32)
    if factored:
        index = jnp.asarray(rng.integers(0, N, N), jnp.int32)
        rows = GatheredRows(grad, index, None, grad.dtype)
        grad = grad[index]
    touched = np.isin(np.arange(V), ids)
    for new, old, wanted in zip(
        stepped(tables, ids, rows), tables, expected(tables, ids, grad), strict=True
    ):
        np.testing.assert_allclose(new, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(new[~touched], old[~touched])
    total = np.zeros((V + 1, *row))
    np.add.at(total, np.asarray(ids), np.asarray(grad, np.float64))
    for new in added(tables[0], ids, grad):
        np.testing.assert_allclose(new, tables[0] + total[:V], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(new[~touched], tables[0][~touched])
