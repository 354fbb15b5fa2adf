"""JAX arrays in the host's memory, given to functions of jmask: the error says where to go."""

import jax
import jax.numpy as jnp
import pytest

import jmask

IDS = jnp.array([1, 2])


def loss(params):
    return jnp.sum(params["table"][IDS] ** 2)


def on_host(x):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.device_put(x, sharding)


def gradients(params):
    return {"table": jmask.RowSparse([1], jnp.ones((1, 2)), params["table"].shape)}


CALLS = {
    "embedding_lookup": (lambda p, s: jmask.embedding_lookup(p["table"], IDS), "`table`"),
    "embedding_bag": (lambda p, s: jmask.embedding_bag(p["table"], IDS[None]), "`table`"),
    "renormalize": (lambda p, s: jmask.renormalize(p["table"], IDS, 1.0), "`table`"),
    "value_and_grad": (lambda p, s: jmask.value_and_grad(loss)(p), r"`params\['table'\]`"),
    "apply_gradients": (
        lambda p, s: jmask.apply_gradients(jmask.adam(0.1), gradients(p), s, p),
        r"`params\['table'\]`",
    ),
    "update": (lambda p, s: jmask.adam(0.1).update(gradients(p), s, p), r"`params\['table'\]`"),
    "apply_updates": (
        lambda p, s: jmask.apply_updates(p, gradients(p)),
        r"`params\['table'\]`",
    ),
    "init": (lambda p, s: jmask.adam(0.1).init(p), r"`params\['table'\]`"),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CALLS)
def test_tables_in_pinned_host_memory_are_refused_by_name(name, jit):
    call, argument = CALLS[name]
    params = {"table": jnp.ones((4, 2))}
    state = jmask.adam(0.1).init(params)
    call(params, state)
    with pytest.raises(ValueError, match=f"{argument} is in the host's memory.*jmask.host"):
        (jax.jit(call) if jit else call)({"table": on_host(params["table"])}, state)


def test_states_in_pinned_host_memory_are_refused_by_name():
    params = {"table": jnp.ones((4, 2))}
    state = jax.tree.map(on_host, jmask.adam(0.1).init(params))
    with pytest.raises(ValueError, match=r"`state.*` is in the host's memory.*jmask.host"):
        jmask.apply_gradients(jmask.adam(0.1), gradients(params), state, params)


def test_memory_that_is_the_devices_is_taken():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    table = jax.device_put(jnp.ones((4, 2)), sharding)
    jmask.embedding_lookup(table, IDS)

    @jax.jit
    def moved(table):
        return jmask.embedding_lookup(jax.device_put(table, jax.memory.Space.Device), IDS)

    assert moved(on_host(table)).shape == (2, 2)
