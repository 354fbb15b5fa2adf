"""Embedding layers of flax, linen and nnx, as people use them; equinox is in test_models.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.later import later
from tests.oracle import assert_close, densified, is_row_sparse

nn = later("flax.linen")
nnx = later("flax.nnx")

pytestmark = [pytest.mark.sampled(15), pytest.mark.dtype_promotion]

V, D = 20, 4
IDS = jnp.array([[3, 5], [3, 19]])


def linen_model(dtype):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            rows = nn.Embed(V, D, dtype=dtype, param_dtype=dtype)(ids)
            return nn.Dense(1, dtype=dtype, param_dtype=dtype)(jnp.tanh(rows))

    model = Model()
    params = model.init(jax.random.key(0), IDS)
    loss = lambda params, ids: jnp.mean(model.apply(params, ids).astype(jnp.float32) ** 2)
    return params, loss


def nnx_model(dtype):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(V, D, dtype=dtype, param_dtype=dtype, rngs=rngs)
            self.dense = nnx.Linear(D, 1, dtype=dtype, param_dtype=dtype, rngs=rngs)

        def __call__(self, ids):
            return self.dense(jnp.tanh(self.embed(ids)))

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    loss = lambda params, ids: jnp.mean(nnx.merge(graph, params)(ids).astype(jnp.float32) ** 2)
    return params, loss


MODELS = {"linen": linen_model, "nnx": nnx_model}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient(name, dtype):
    params, loss = MODELS[name](dtype)
    result = jmask.value_and_grad(loss)(params, IDS)
    (table,) = filter(is_row_sparse, jax.tree.leaves(result[1], is_leaf=is_row_sparse))
    assert (table.shape, table.nse, table.dtype) == ((V, D), 4, dtype)
    expected = jax.value_and_grad(loss)(params, IDS)
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    assert_close(densified(result), expected, rtol=tolerance, atol=tolerance)


def test_a_dict_is_a_copy():
    """What a function puts into a dict is its own affair, as in JAX."""

    def loss(params):
        params["table"] = 2 * params["table"]
        return jnp.sum(params["table"][IDS])

    params = {"table": jnp.ones((V, D))}
    assert is_row_sparse(jmask.grad(loss)(params)["table"])
    assert_close(params["table"], jnp.ones((V, D)))


@pytest.mark.parametrize("jit", [False, True])
def test_a_model_that_writes_back_what_it_was_given(jit):
    """`nnx.remat` returns the state of a module through `jax.checkpoint`: no other value."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.dense = nnx.Linear(D, 1, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros(()))

        def __call__(self, ids):
            return nnx.remat(lambda model, ids: model.dense(model.embed(ids)))(self, ids)

    loss = lambda model: jnp.mean(jnp.sin(model(IDS)))

    def changes(model):
        model.dense.kernel[...] = model.dense.kernel[...] * 1.0
        return loss(model)

    model = Model(nnx.Rngs(0))
    grad = jax.jit(jmask.grad(loss)) if jit else jmask.grad(loss)
    found, expected = grad(model), jax.grad(loss)(model)
    assert is_row_sparse(found.embed.embedding[...])
    dense = found.embed.embedding[...].todense()
    np.testing.assert_allclose(dense, expected.embed.embedding[...], rtol=1e-6)
    np.testing.assert_allclose(found.dense.kernel[...], expected.dense.kernel[...], rtol=1e-6)
    with pytest.raises(TypeError, match=r"writes to `model\.dense\.kernel.*lost"):
        jmask.grad(changes)(model)
