"""Averages of the parameters: each case beside the dense average in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.compiled_step import Step, temporary_bytes
from tests.expressions import named
from tests.stored_tables import STEPS, of_lines, stored

DECAY = 0.8
CHAINS = named("ema", {**vars(jmask), **globals()})("""
    adam | optax.chain(adam(0.1), ema)
    lifted together | lazy(optax.chain(optax.adam(0.1), ema))
    bounded | optax.chain(clip_by_row_norm(0.5), sgd(0.5, momentum=0.9), max_row_norm(1), ema)
    masked | optax.chain(sgd(0.1), optax.masked(ema, {"table": True, "dense": True}))
""")
# 11 rows are updated densely, 700 by their ids.
TABLES = [
    ((11, 3), "float32"),
    ((11, 2, 2), "complex64"),
    ((700, 3), "bfloat16"),
    ((700, 3), "complex64"),
    ((700,), "float32"),
]
# Rows come again after 1, 2 and more steps, twice in a step, and not at all.
STEPS_OF_IDS = [[1, 3, 3], [3, -1, -1], [-1, -1, -1], [5, 1, 0], [3, 3, 3], [0, 8, 9]]


def gradients(shape, dtype, k):
    rng = np.random.default_rng(k)
    values = jnp.asarray(rng.normal(size=(3, *shape[1:])), dtype)
    return {
        "table": jmask.RowSparse(STEPS_OF_IDS[k], values, shape),
        "dense": jnp.asarray(rng.normal(size=4), jnp.float32),
    }


@pytest.mark.sampled
@pytest.mark.parametrize(("step", "jit"), [("apply_gradients", True), ("update", False)])
@pytest.mark.parametrize(("shape", "dtype"), TABLES, ids=str)
@pytest.mark.parametrize("storage", ["array", "packed"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.dtype_promotion
def test_the_average_is_the_dense_one(chain, storage, shape, dtype, step, jit):
    if dtype == "complex64" and chain == "lifted together":
        pytest.skip("optax.adam of complex numbers is in test_complex_tables.py")
    if storage == "packed" and chain in ("bounded", "lifted together"):
        pytest.skip("norms of rows, and the step of each, are not those of lines")
    ema = jmask.ema(DECAY)
    tx = CHAINS[chain](ema)
    table = jnp.asarray(np.random.default_rng(9).normal(size=shape), dtype)
    params = {"table": stored(storage, table), "dense": jnp.zeros(4)}
    state = tx.init(params)
    wide = np.complex128 if dtype == "complex64" else np.float64
    expected = {name: np.asarray(x, wide) for name, x in params.items()}
    run = functools.partial(STEPS[step], tx)
    run = jax.jit(run) if jit else run
    for k in range(len(STEPS_OF_IDS)):
        grads = gradients(shape, dtype, k)
        if storage == "packed":
            grads["table"] = of_lines(grads["table"], params["table"])
        params, state = run(grads, state, params)
        for name, x in params.items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * np.asarray(x, wide)
        average = ema.average(state, params)
        for name, x in expected.items():
            np.testing.assert_allclose(average[name], x, 1e-5, 1e-5)
    assert type(average["table"]) is type(params["table"])
    assert average["table"].dtype == (jnp.float32 if dtype == "bfloat16" else dtype)


def test_many_steps_without_a_row():
    """The count of steps is exact beyond what float32 can count."""
    ema, table = jmask.ema(0.5), jnp.ones((3, 1))
    updates = jmask.RowSparse([1], jnp.ones((1, 1)), table.shape)
    state = ema.init(table)._replace(
        count=jnp.asarray(2**25 + 1, jnp.int32),
        last=jnp.full((3, 1), 2**25, jnp.int32),
        average=jnp.zeros((3, 1)),
    )
    _, state = jax.jit(ema.update)(updates, state, table)
    # Row 1 missed one step, which gives 0.5, and is moved to 2: 0.25 + 1.
    assert state.average[1, 0] == 1.25
    assert state.last[1, 0] == 2**25 + 2
    assert ema.average(state, table)[0, 0] == 0.75


@pytest.mark.parametrize("chain", ["alone", "adam", "lifted together"])
@pytest.mark.dtype_promotion
def test_a_step_costs_its_rows(chain):
    """The rows of the parameters are read for the average alone, and written by the update."""
    rows, ema = 10**6, jmask.ema(0.999)
    tx = ema if chain == "alone" else CHAINS[chain](ema)
    compiled = Step(tx, row=(16,), lookups=64).compile(rows)
    with_steps_of_rows = rows * (2 * 16 + 1) * 4
    assert temporary_bytes(compiled, with_steps_of_rows, rows * 16) < rows


def test_what_is_averaged_is_what_is_stored():
    """Half a unit in the last place of bfloat16 never moves the parameter, nor its average."""
    ema, table = jmask.ema(0.5), jnp.full(2, 256.0, jnp.bfloat16)
    tx = optax.chain(jmask.sgd(1.0), ema)
    state = tx.init(table)
    for _ in range(5):
        gradient = jmask.RowSparse([0], jnp.array([-0.5], jnp.bfloat16), (2,))
        table, state = jmask.apply_gradients(tx, gradient, state, table)
    assert ema.average(state, table).tolist() == [256, 256]
