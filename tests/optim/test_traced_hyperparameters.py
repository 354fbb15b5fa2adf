"""Hyperparameters of named optimizers that are arrays, injected or traced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmask


def test_inject():
    """Every number may be an array in the state; changing it does not retrace."""
    traces = []

    def build(learning_rate, b1, b2, eps, weight_decay):
        traces.append(None)
        return jmask.adam(learning_rate, b1, b2, eps, weight_decay=weight_decay)

    tx = optax.inject_hyperparams(build)(
        learning_rate=0.1, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0
    )
    table = jnp.ones((3, 1))
    gradient = jmask.RowSparse([1], jnp.ones((1, 1)), (3, 1))
    state = tx.init(table)
    step = jax.jit(tx.update)
    updates, state = step(gradient, state, table)
    np.testing.assert_allclose(updates.values, -0.1, rtol=1e-5)
    count = len(traces)
    state.hyperparams["learning_rate"] = jnp.float32(0.2)
    updates, _ = step(gradient, state, table)
    np.testing.assert_allclose(updates.values, -0.2, rtol=1e-4)
    assert len(traces) == count


def test_traced_momentum():
    table = jnp.ones((3, 1))
    gradient = jmask.RowSparse([1], jnp.ones((1, 1)), (3, 1))

    @jax.jit
    def two_steps(momentum):
        tx = jmask.sgd(1.0, momentum=momentum)
        state, param = tx.init(table), table
        for _ in range(2):
            param, state = jmask.apply_gradients(tx, gradient, state, param)
        return param[1, 0]

    assert two_steps(0.5) == 1 - 1 - 1.5
