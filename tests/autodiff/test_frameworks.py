"""Models of flax, linen and nnx, equinox and Keras, as people write them.

What is no floating array of a model of equinox has no gradient, and stays.
"""

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.autodiff.test_nnx import models
from tests.later import later
from tests.optimizers import NOT_LAZY, OPTIMIZERS
from tests.oracle import assert_close, densified, is_row_sparse

nn = later("flax.linen")
nnx = later("flax.nnx")
eqx = later("equinox")

pytestmark = pytest.mark.dtype_promotion  # of optimizers of optax

V, D = 20, 4
IDS = jnp.array([[3, 5], [3, 19]])
ITEMS = jnp.array([1, 2, 1])


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


@functools.cache
def model_class():
    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        out: eqx.nn.MLP
        dropout: eqx.nn.Dropout
        activation: object
        counts: jax.Array
        name: str
        nothing = None

        def __call__(self, i):
            return self.out(self.activation(self.embed(i)))[0]

    return Model


def model(dtype=jnp.float32):
    Model = model_class()
    keys = jax.random.split(jax.random.key(0))
    embed = eqx.nn.Embedding(20, 4, dtype=dtype, key=keys[0])
    out = eqx.nn.MLP(4, 1, 8, 2, dtype=dtype, key=keys[1])
    return Model(embed, out, eqx.nn.Dropout(0.5), jax.nn.relu, jnp.arange(3), "model")


loss = lambda model, ids: jnp.mean((jax.vmap(model)(ids).astype(jnp.float32) - 1) ** 2)
MODELS = {
    "linen": linen_model,
    "nnx": nnx_model,
    "equinox": lambda dtype: (model(dtype), lambda model, ids: loss(model, ids.reshape(-1))),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient(name, dtype):
    """Rows for the table; None for what of a model of equinox is no floating array."""
    params, loss = MODELS[name](dtype)
    value, grads = jmask.value_and_grad(loss)(params, IDS)
    (table,) = filter(is_row_sparse, jax.tree.leaves(grads, is_leaf=is_row_sparse))
    assert (table.shape, table.nse, table.dtype) == ((V, D), 4, dtype)
    dense = eqx.filter_value_and_grad if name == "equinox" else jax.value_and_grad
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    expected = dense(loss)(params, IDS)
    assert_close(densified((value, grads)), expected, rtol=tolerance, atol=tolerance)
    explained = jmask.explain(loss, params, IDS).parameters
    assert [x.nse for x in explained if x.is_sparse] == [4]


@pytest.mark.sampled(15)
@pytest.mark.parametrize("jit", [False, True])
def test_a_model_that_writes_back_what_it_was_given(jit):
    """`nnx.remat` returns the state of a module through `jax.checkpoint`: no other value."""
    loss = lambda model: jnp.mean(jnp.sin(model(IDS)))

    def changes(model):
        model.dense.kernel[...] = model.dense.kernel[...] * 1.0
        return loss(model)

    model = models()["Rematerialised"](nnx.Rngs(0))
    grad = jax.jit(jmask.grad(loss)) if jit else jmask.grad(loss)
    found, expected = grad(model), jax.grad(loss)(model)
    assert is_row_sparse(found.embed.embedding[...])
    dense = found.embed.embedding[...].todense()
    np.testing.assert_allclose(dense, expected.embed.embedding[...], rtol=1e-6)
    np.testing.assert_allclose(found.dense.kernel[...], expected.dense.kernel[...], rtol=1e-6)
    lost = r"writes to `model\.dense\.kernel.*which is lost.*jmask\.nnx\.value_and_grad"
    with pytest.raises(TypeError, match=lost):
        jmask.grad(changes)(model)
    jax.grad(changes)(model)  # which says nothing


arrays = lambda tree: [x for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)]
NAMES = ("optax.adamw", "adam", "clipped optax.adam", "adam unless not finite")


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*NAMES, "densify"])
def test_training(name):
    """All ways to step agree with each other, and with parameters parted by hand."""
    tx, before = (OPTIMIZERS | NOT_LAZY)[name], model()
    params = eqx.filter(before, eqx.is_inexact_array)
    grads = jmask.grad(loss)(before, ITEMS)
    state = tx.init(params)
    if name in OPTIMIZERS:  # optax's own make no state of a whole model
        assert jax.tree.structure(tx.init(before)) == jax.tree.structure(state)
    by_hand, _ = tx.update(grads, state, params)
    updates, _ = tx.update(grads, state, before)
    ways = [
        jmask.apply_updates(before, updates),
        jmask.apply_gradients(tx, grads, state, before)[0],
        eqx.filter_jit(lambda m, s: jmask.apply_gradients(tx, grads, s, m)[0])(before, state),
    ]
    expected = arrays(jmask.apply_updates(params, by_hand))
    for after in ways:
        assert after.activation is jax.nn.relu
        assert (after.name, after.dropout.p, after.nothing) == ("model", 0.5, None)
        np.testing.assert_array_equal(after.counts, before.counts)
        assert_close(arrays(after), expected)
        assert loss(after, ITEMS) < loss(before, ITEMS)


def test_two_optimizers_for_one_model():
    """The tree of labels is a model, and callable: it needs a function around it."""
    before = model()
    params = eqx.filter(before, eqx.is_inexact_array)
    is_table = lambda path, _: "embed" in jax.tree_util.keystr(path)
    labels = jax.tree.map_with_path(is_table, params)
    dense = {True: optax.sgd(0.1), False: optax.adam(0.1)}
    lazy = {True: jmask.sgd(0.1), False: optax.adam(0.1)}
    steps = []
    for transforms, grad in ((dense, eqx.filter_grad(loss)), (lazy, jmask.grad(loss))):
        tx = optax.partition(transforms, lambda _: labels)
        step = eqx.filter_jit(lambda g, s, m, tx=tx: jmask.apply_gradients(tx, g, s, m)[0])
        steps.append(step(grad(before, ITEMS), tx.init(params), before))
    assert_close(*map(arrays, steps))


# --- the two classes of docs/keras.md ---------------------------------------------------------

# Keras promotes dtypes and ranks.
keras = lambda test: pytest.mark.sampled(15)(pytest.mark.rank_promotion(test))


WORDS = 200
PAGE = Path(__file__).parents[2] / "docs" / "keras.md"
RNG = np.random.default_rng(0)
X = RNG.integers(0, WORDS // 2, (64, 5), dtype=np.int32)
Y = np.asarray(X % 7, np.float32).mean(1)


@pytest.fixture(scope="module")
def page():
    block = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.S | re.M)
    names = {}
    exec(compile(block[1], str(PAGE), "exec"), names)
    assert names["keras"].backend.backend() == "jax"
    return SimpleNamespace(**names)


def compiled(page, kind, optimizer):
    layers = page.keras.layers
    page.keras.utils.set_random_seed(1)
    words = page.keras.Input((5,), dtype="int32")
    rows = layers.GlobalAveragePooling1D()(layers.Embedding(WORDS, D)(words))
    model = kind(words, layers.Dense(1)(layers.Dropout(0.1)(rows)))
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


@keras
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_as_keras_optimizers(page, name):
    """Where lazy and dense are the same: losses, metrics, validation, rows."""
    optimizers = page.keras.optimizers
    ours, theirs = {
        "sgd": (jmask.lazy(optax.sgd(0.1)), optimizers.SGD(0.1)),
        "adagrad": (
            jmask.adagrad(0.1, initial_accumulator_value=0.1, eps=1e-7),
            optimizers.Adagrad(0.1),
        ),
    }[name]
    dense = compiled(page, page.keras.Model, theirs)
    sparse = compiled(page, page.SparseModel, page.Transformation(ours))
    before = np.array(sparse.layers[1].embeddings.value)
    more = {"batch_size": 16, "epochs": 3, "verbose": 0, "shuffle": False}
    more["validation_split"] = 0.25
    with jmask.strict():
        found = sparse.fit(X, Y, **more).history
    expected = dense.fit(X, Y, **more).history
    assert found.keys() == expected.keys() == {"loss", "mae", "val_loss", "val_mae"}
    for metric, numbers in expected.items():
        np.testing.assert_allclose(found[metric], numbers, rtol=1e-4)
    rows = np.asarray(sparse.layers[1].embeddings.value)
    np.testing.assert_allclose(rows, dense.layers[1].embeddings.value, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(rows[WORDS // 2 :], before[WORDS // 2 :])
    assert int(sparse.optimizer.iterations.value) == 9


@keras
def test_optimizers_of_keras_do_not_take_rows(page):
    model = compiled(page, page.SparseModel, page.keras.optimizers.Adam(0.1))
    with pytest.raises(TypeError, match="RowSparse"):
        model.fit(X, Y, verbose=0)
