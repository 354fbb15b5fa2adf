"""Averages: what they cost, and what they count. Values are in test_steps_of_all_kinds.py."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmask
from tests.compiled_step import Step, temporary_bytes
from tests.expressions import functions


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


CHAINS = functions("ema", {**vars(jmask), **globals()})("""
    ema; optax.chain(adam(0.1), ema); lazy(optax.chain(optax.adam(0.1), ema))
""")


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.dtype_promotion
def test_a_step_costs_its_rows(chain):
    """The rows of the parameters are read for the average alone, and written by the update."""
    rows, tx = 10**6, CHAINS[chain](jmask.ema(0.999))
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
    average = ema.average(state, table)
    assert average.dtype == jnp.float32
    assert average.tolist() == [256, 256]


def test_the_average_of_a_model_is_one():
    """What is no parameter is returned as it was, and tensors as tensors."""
    rows = jmask.RowSparse([0, 1], jnp.ones((2, 1)), (2, 1))
    model = {"t": jnp.ones(3), "rows": rows, "activation": jnp.tanh}
    ema = jmask.ema(0.5)
    average = ema.average(ema.init(model), model)
    assert average["activation"] is jnp.tanh
    assert isinstance(average["rows"], jmask.RowSparse)
    assert average["rows"].todense().tolist() == [[1], [1]]
