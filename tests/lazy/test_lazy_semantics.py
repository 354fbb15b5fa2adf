"""What `lazy` means: rows without a gradient are those without a stored row, nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask

pytestmark = pytest.mark.dtype_promotion


def test_more_lookups_than_rows():
    """Density does not change semantics: row 2 of 4 is not touched by 100 lookups."""
    ids = np.tile([0, 1, 3, 1], 25)
    table = jnp.ones((4, 2))
    tx = jmask.lazy(optax.adamw(0.1))
    state = tx.init(table)
    step = jax.jit(tx.update)
    for _ in range(3):
        grad = jmask.grad(lambda t: jnp.sum(jnp.sin(t[ids])))(table)
        updates, state = step(grad, state, table)
        table = optax.apply_updates(table, updates)
    assert table[2].tolist() == [1, 1]
    assert state[0].mu[2].tolist() == [0, 0]
    assert (table[jnp.array([0, 1, 3])] != 1).all()


def test_negative_zero_stays():
    """Bit for bit: adding a zero update would turn -0. into 0."""
    table = jnp.array([[-0.0], [1.0]])
    grad = jmask.RowSparse([1], jnp.ones((1, 1)), (2, 1))
    tx = jmask.lazy(optax.sgd(0.1))
    updates, _ = tx.update(grad, tx.init(table), table)
    assert np.signbit(optax.apply_updates(table, updates)[0, 0])


def test_empty_gradient_advances_the_count_only():
    tx = jmask.lazy(optax.adam(0.1))
    empty = jmask.RowSparse.zeros((4, 2))
    state = tx.init(jnp.ones((4, 2)))
    updates, new = jax.jit(tx.update)(empty, state, jnp.ones((4, 2)))
    assert updates.nse == 0
    assert new[0].count == 1
    np.testing.assert_array_equal(new[0].mu, state[0].mu)


def test_rows_that_cancel_are_touched():
    tx = jmask.lazy(optax.add_decayed_weights(1.0))
    grad = jmask.RowSparse([1, 1], jnp.array([[1.0], [-1.0]]), (3, 1))
    updates, _ = tx.update(grad, tx.init(jnp.ones((3, 1))), jnp.ones((3, 1)))
    assert updates.todense().ravel().tolist() == [0, 1, 0]
