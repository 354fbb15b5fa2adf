"""Steps on the rows of a batch are the steps on the table: `jmask.host` beside the device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.host_runs import (
    OPTIMIZERS,
    ROWS,
    STEPS,
    assert_same,
    batches,
    new_params,
    on_device,
    on_host,
    step_of,
)


@pytest.mark.sampled(3)
@pytest.mark.dtype_promotion
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trajectory_is_that_of_the_device(name):
    """Parameters, state and losses; several tables, bags, padding, leaves that are shared."""
    tx, given = OPTIMIZERS[name], new_params()
    params, state, expected = on_device(tx, given, batches())
    untouched = np.setdiff1d(
        np.arange(ROWS),
        np.concatenate(
            [np.concatenate([x["ids"].ravel(), x["bags"].ids, x["both"]]) for x in batches()]
        ),
    )
    assert len(untouched)
    start = given["table"][untouched].copy()
    host, losses = on_host(tx, given, batches())
    assert_same(host, params, state)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert host.count == STEPS
    assert start.tobytes() == given["table"][untouched].tobytes()
    assert all(isinstance(x, np.ndarray) for k, x in host.params.items() if k != "w")


@pytest.mark.dtype_promotion
def test_tables_of_16_bits():
    tx, given = jmask.lazy(optax.sgd(0.1, momentum=0.9)), new_params(jnp.bfloat16)
    params, state, _ = on_device(tx, given, batches())
    host, _ = on_host(tx, given, batches())
    assert_same(host, params, state, 1e-2)


def test_beside_parameters_over_several_devices():
    """The rest of the model is sharded; rows of tables follow it to its devices."""
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    tx, ids = jmask.adam(0.1), {"table": lambda batch: batch}
    loss = lambda params, ids: jnp.mean((params["table"][ids] * params["w"][None] - 1) ** 2)
    given = {"table": np.full((20, 8), 0.5, np.float32), "w": np.ones(8, np.float32)}
    loader = [np.array([1, 5, 5, 7]), np.array([5, 2, 1, 0]), np.array([5, 7, 19, 1])]
    params, state, expected = on_device(tx, given, loader, loss)
    w = jax.device_put(given["w"], sharding)
    host, step = jmask.host.offload(given | {"w": w}, tx), step_of(tx, loss)
    losses = []
    for batch, rows, state_of_rows in host.steps(loader, ids=ids):
        rows, state_of_rows, loss_of_step = step(rows, state_of_rows, batch)
        host.commit(rows, state_of_rows)
        losses.append(float(loss_of_step))
    assert host.params["w"].sharding.is_equivalent_to(sharding, 1)
    assert_same(host, params, state)
    assert losses == pytest.approx(expected, rel=1e-5)
