"""Optimizers and rates for each table, frozen tables; and runs that are the same twice."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

V, D = 8, 2
PARAMS = {"users": jnp.ones((V, D)), "items": 2 * jnp.ones((V, D)), "w": jnp.ones(D)}
IDS = {"users": jnp.array([1, 3, 1]), "items": jnp.array([0, 5, 5])}


def loss(params, ids):
    rows = params["users"][ids["users"]] * params["items"][ids["items"]] @ params["w"]
    return jnp.sum(jnp.tanh(rows - 1))


def run(tx, rates):
    """A step of each rate: of the schedule, or as it is put into the state."""
    params, state, traces = PARAMS, tx.init(PARAMS), []

    @jax.jit
    def step(params, state, rate):
        traces.append(1)
        if hasattr(state, "hyperparams"):
            state.hyperparams["learning_rate"] = rate
        updates, state = tx.update(jmask.grad(loss)(params, IDS), state, params)
        return optax.apply_updates(params, updates), state

    for rate in rates:
        params, state = step(params, state, rate)
    assert len(traces) == 1
    return params


BUILDERS = [
    jmask.sgd, jmask.adam, jmask.adamw, jmask.adagrad, jmask.rowwise_adam,
    jmask.rowwise_adagrad, jmask.ftrl,
]  # fmt: skip


@pytest.mark.parametrize("build", BUILDERS, ids=lambda b: b.__name__)
def test_schedules(build):
    """A schedule is what it says in each step, by the count of the state."""
    rates = jnp.array([0.1, 0.1, 0.02, 0.02])
    scheduled = run(build(optax.piecewise_constant_schedule(0.1, {2: 0.2})), rates)
    injected = run(optax.inject_hyperparams(build)(learning_rate=0.1), rates)
    for name in PARAMS:
        np.testing.assert_allclose(injected[name], scheduled[name], rtol=2e-5)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, jmask
rng = np.random.default_rng(0)
table = jnp.asarray(rng.normal(size=(500, 8)), jnp.float32)
tx = jmask.adam(0.1)
step = jax.jit(lambda g, s, p: jmask.apply_gradients(tx, g, s, p))
state = tx.init(table)
for _ in range(5):
    ids = rng.zipf(1.2, 3000) % 500
    rows = jmask.RowSparse(ids, jnp.asarray(rng.normal(size=(3000, 8)), jnp.float32), (500, 8))
    table, state = step(rows, state, table)
print(np.asarray(table).tobytes().hex(), np.asarray(state.nu).tobytes().hex())
"""


@pytest.mark.of_cpus
def test_two_processes_give_the_same_bits(capsys):
    """Hot rows, with hundreds of duplicates each, are summed in one order."""
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True
    )
    exec(PROGRAM, {})  # this process is the second
    assert capsys.readouterr().out == other.stdout
    assert len(other.stdout) > 4000


@pytest.mark.of_cpus
def test_duplicates_are_summed_in_their_order():
    rng = np.random.default_rng(0)
    values = np.float32(rng.normal(size=400) * 10.0 ** rng.integers(-6, 6, 400))
    x = jmask.RowSparse(rng.permutation(400) % 3, values, (3,))
    total = jax.jit(lambda x: x.coalesce())(x).values
    for row in range(3):
        expected = np.float32(0)
        for value in values[np.asarray(x.indices) == row]:
            expected += value
        assert total[row] == expected
