"""The two classes of docs/keras.md train as Keras does, and touch no other rows."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optax
import pytest

import jmask

# Keras promotes dtypes and ranks.
pytestmark = [pytest.mark.sampled(15), pytest.mark.rank_promotion, pytest.mark.dtype_promotion]

V, D = 200, 4
PAGE = Path(__file__).parents[2] / "docs" / "keras.md"
RNG = np.random.default_rng(0)
X = RNG.integers(0, V // 2, (64, 5), dtype=np.int32)
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
    rows = layers.GlobalAveragePooling1D()(layers.Embedding(V, D)(words))
    model = kind(words, layers.Dense(1)(layers.Dropout(0.1)(rows)))
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fitted(model, **more):
    history = model.fit(X, Y, batch_size=16, verbose=0, shuffle=False, **more)
    return history.history


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
    more = {"epochs": 3, "validation_split": 0.25}
    with jmask.strict():
        found = fitted(sparse, **more)
    expected = fitted(dense, **more)
    assert found.keys() == expected.keys() == {"loss", "mae", "val_loss", "val_mae"}
    for metric, numbers in expected.items():
        np.testing.assert_allclose(found[metric], numbers, rtol=1e-4)
    rows = np.asarray(sparse.layers[1].embeddings.value)
    np.testing.assert_allclose(rows, dense.layers[1].embeddings.value, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(rows[V // 2 :], before[V // 2 :])
    assert int(sparse.optimizer.iterations.value) == 9


def test_optimizers_of_keras_do_not_take_rows(page):
    model = compiled(page, page.SparseModel, page.keras.optimizers.Adam(0.1))
    with pytest.raises(TypeError, match="RowSparse"):
        fitted(model)
