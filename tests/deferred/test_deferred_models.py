"""Models that are trained with deferred tables have the losses of dense training.

Every read is up to date: a loss is a function of the rows that the dense optimizer has.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask

pytestmark = pytest.mark.dtype_promotion

WORDS, USERS, ITEMS, D, STEPS = 60, 40, 50, 8, 150


def table(seed: int, rows: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, D)) * 0.3, jnp.float32)


def word2vec() -> tuple[Any, Any, Any]:
    """Skip-grams with negative sampling: parameters, loss and batches with Zipf words."""
    rng = np.random.default_rng(0)
    words = np.minimum(rng.zipf(1.3, (STEPS, 16, 2)) - 1, WORDS - 1)
    negatives = rng.integers(0, WORDS, (STEPS, 16, 4))

    def loss(params: Any, batch: Any) -> jax.Array:
        words, negatives = batch
        center = params["in"][words[:, 0]]
        context, others = params["out"][words[:, 1]], params["out"][negatives]
        near = jnp.sum(center * context, axis=-1)
        far = jnp.sum(center[:, None] * others, axis=-1)
        return -jnp.mean(jax.nn.log_sigmoid(near)) - jnp.mean(jax.nn.log_sigmoid(-far))

    params = {"in": table(1, WORDS), "out": table(2, WORDS)}
    return params, loss, (words.astype(np.int32), negatives.astype(np.int32))


def two_tower() -> tuple[Any, Any, Any]:
    """Users and bags of items, with a dense layer between: a softmax over the batch."""
    rng = np.random.default_rng(3)
    users = np.minimum(rng.zipf(1.3, (STEPS, 12)) - 1, USERS - 1)
    bags = (users[..., None] * 3 + rng.integers(0, 4, (STEPS, 12, 3))) % ITEMS

    def loss(params: Any, batch: Any) -> jax.Array:
        users, bags = batch
        rows = jmask.embedding_lookup(params["users"], users)
        found = jmask.embedding_bag(params["items"], bags, combiner="mean")
        logits = jnp.tanh(rows @ params["layer"]) @ found.T
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))

    layer = jnp.eye(D) + 0.1 * table(4, D)
    params = {"users": table(5, USERS), "items": table(6, ITEMS), "layer": layer}
    return params, loss, (users.astype(np.int32), bags.astype(np.int32))


def losses(tx: Any, params: Any, loss: Any, batches: Any, value_and_grad: Any) -> Any:
    def step(carried: Any, batch: Any) -> Any:
        params, state = carried
        value, grads = value_and_grad(loss)(params, batch)
        return jmask.apply_gradients(tx, grads, state, params), value

    carried = params, tx.init(params)
    (params, _), found = jax.jit(lambda c, b: jax.lax.scan(step, c, b))(carried, batches)
    return params, np.asarray(found)


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.05, 20, STEPS)
MODELS = {"word2vec": word2vec, "two towers": two_tower}
OPTIMIZERS = {
    "adam": (jmask.adam(0.05), jmask.adam(0.05, lazy_update=False)),
    "adamw by schedule": (jmask.lazy(optax.adamw(SCHEDULE)), optax.adamw(SCHEDULE)),
}


@pytest.mark.parametrize(
    ("model", "optimizer"), [("word2vec", "adam"), ("two towers", "adamw by schedule")]
)
def test_losses_of_dense_training(model: str, optimizer: str) -> None:
    params, loss, batches = MODELS[model]()
    tx, dense_tx = OPTIMIZERS[optimizer]
    deferred = {
        name: jmask.deferred(x, tx) if name != "layer" else x for name, x in params.items()
    }
    ours, found = losses(tx, deferred, loss, batches, jmask.value_and_grad)
    theirs, wanted = losses(dense_tx, params, loss, batches, jax.value_and_grad)
    _, lazy = losses(tx, params, loss, batches, jmask.value_and_grad)
    np.testing.assert_allclose(found, wanted, rtol=2e-4)
    assert wanted[-20:].mean() < 0.9 * wanted[:20].mean()
    # A control: lazy training is another training.
    assert np.abs(lazy - wanted).max() > 20 * np.abs(found - wanted).max()
    for name, x in ours.items():
        rows = x.todense() if name != "layer" else x
        np.testing.assert_allclose(rows, theirs[name], atol=2e-4)
