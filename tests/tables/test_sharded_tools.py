"""Sharded tables are arrays: frameworks, optimizers and files take them as such."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from tests.later import later
from tests.oracle import assert_close
from tests.stored_tables import batch_of, mesh_of, numbers, sharded
from tests.tables.test_checkpoints import restored

pytestmark = [pytest.mark.sampled(15), pytest.mark.dtype_promotion]

export = later("jax.export")
linen, train_state, nnx = (
    later("flax.linen"),
    later("flax.training.train_state"),
    later("flax.nnx"),
)

V, D = 24, 12
TX = jmask.adam(0.1)
IDS = np.array([1, 3, 3, 20, 9, 2, 5, 20], np.int32)
LAYOUTS = ("8 devices", "automatic axis")


def loss(params, ids):
    return jnp.sum(jnp.sin(jmask.embedding_lookup(params["t"], ids))) + jnp.sum(params["w"])


def gradients(params, ids):
    return jax.jit(jmask.grad(loss))(params, ids)


def by_optax(params, ids):
    updates, _ = TX.update(gradients(params, ids), TX.init(params), params)
    return optax.apply_updates(params, updates)


def by_incremental_update(params, ids):
    new, _ = jmask.apply_gradients(TX, gradients(params, ids), TX.init(params), params)
    return optax.incremental_update(new, params, 0.1)


def by_train_state(params, ids):
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=TX)
    return state.apply_gradients(grads=gradients(params, ids)).params


def by_nnx_optimizer(params, ids):
    class Model(nnx.Module):
        def __init__(self):
            self.t, self.w = nnx.Param(params["t"]), nnx.Param(params["w"])

    model, grads = Model(), gradients(params, ids)
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    optimizer.update(model, nnx.State({name: nnx.Param(x) for name, x in grads.items()}))
    return {"t": model.t[...], "w": model.w[...]}


def by_pickle(params, ids):
    del ids
    return pickle.loads(pickle.dumps(params))


def by_export(params, ids):
    pytest.importorskip("flatbuffers")

    def step(params, ids):
        return jmask.apply_gradients(TX, jmask.grad(loss)(params, ids), TX.init(params), params)

    exported = export.export(jax.jit(step))(params, ids)
    again = export.deserialize(exported.serialize())
    return jax.jit(again.call)(params, ids)[0]


TOOLS = {
    name.removeprefix("by_"): function
    for name, function in list(globals().items())
    if name.startswith("by_")
}


def parameters(layout=None):
    """A table and what every device has; on one device, or as a layout has them."""
    x = jnp.pad(numbers(), ((0, V - 21), (0, 0)))
    if layout is None:
        return {"t": x, "w": jnp.ones(2)}, jnp.asarray(IDS)
    table, ids = sharded(x, layout), batch_of(IDS, layout)
    w = jax.device_put(jnp.ones(2), NamedSharding(table.sharding.mesh, P()))
    return {"t": table, "w": w}, ids


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_tools(tool, layout):
    params, ids = parameters(layout)
    with jax.set_mesh(params["t"].sharding.mesh):
        new = TOOLS[tool](params, ids)
    assert_close(
        jax.tree.map(np.asarray, new), TOOLS[tool](*parameters()), rtol=1e-5, atol=1e-6
    )
    if tool != "pickle":
        assert new["t"].sharding.is_equivalent_to(params["t"].sharding, 2)


def linen_embed(table, ids):
    return linen.Embed(V, D).apply({"params": {"embedding": table}}, ids)


def nnx_embed(table, ids):
    layer = nnx.Embed(V, D, rngs=nnx.Rngs(0))
    layer.embedding[...] = table
    return layer(ids)


@pytest.mark.parametrize("layer", [linen_embed, nnx_embed])
def test_layers(layer):
    """On automatic axes, where a plain lookup is partitioned: row-sparse, and nothing moved."""
    params, ids = parameters("automatic axis")
    look = lambda table, ids: jnp.sum(jnp.sin(layer(table, ids)))

    def step(table, ids):
        gradient = jmask.grad(look)(table, ids)
        return jmask.apply_gradients(TX, gradient, TX.init(table), table)[0]

    with jmask.strict():
        new = jax.jit(step)(params["t"], ids)
    plain, ids = parameters()
    np.testing.assert_allclose(new, step(plain["t"], ids), rtol=1e-5, atol=1e-6)
    assert new.sharding.is_equivalent_to(params["t"].sharding, 2)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("axes", ["explicit", "automatic"])
def test_orbax_on_another_mesh(devices, axes, tmp_path):
    """What orbax restores to the sharding that it is asked for, the state of a step as well."""
    params, ids = parameters("8 devices")
    tree = jmask.apply_gradients(TX, gradients(params, ids), TX.init(params), params)
    mesh = mesh_of(devices, axes=axes)

    def elsewhere(x):
        spec = P("x") if x.shape[:1] == (V,) else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    again = restored(tree, tmp_path, jax.tree.map(elsewhere, tree))
    jax.tree.map(np.testing.assert_array_equal, again, tree)
    assert again[0]["t"].sharding.is_equivalent_to(NamedSharding(mesh, P("x")), 2)
    ids = jax.device_put(IDS, NamedSharding(mesh, P("x")))
    step = jax.jit(lambda p, s, ids: jmask.apply_gradients(TX, jmask.grad(loss)(p, ids), s, p))
    wanted = step(*tree, batch_of(IDS, "8 devices"))
    assert_close(step(*again, ids), wanted, rtol=1e-5, atol=1e-6)
