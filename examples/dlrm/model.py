"""DLRM: a table for each category, the dot products of what was looked up, and two MLPs.

    counts (13)  --log, bottom MLP-->  a vector  --+
    26 bags      --26 tables------->  26 vectors  -+-- all dot products --top MLP--> log-odds

References:
    Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems", 2019.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmask
from dlrm.criteo import CATEGORIES, COUNTS, Batch

BOTTOM, TOP = (64,), (128, 64)  # widths of hidden layers
PAIRS = np.triu_indices(CATEGORIES + 1, 1)

Params = dict[str, Any]
State = tuple[Params, optax.OptState]

# One number of state for each row of a table, two for each weight of the layers.
tx = optax.partition(
    {"tables": jmask.rowwise_adagrad(0.02, eps=1e-8), "layers": optax.adam(3e-3)},
    {"tables": "tables", "bottom": "layers", "top": "layers"},
)


def create(rows: int, dim: int, seed: int) -> State:
    """Return parameters, and the state of their optimizer."""
    of_tables, of_bottom, of_top = jax.random.split(jax.random.key(seed), 3)
    keys = jax.random.split(of_tables, CATEGORIES)
    params = {
        "tables": {f"C{i}": _table(key, rows, dim) for i, key in enumerate(keys, 1)},
        "bottom": _layers(of_bottom, (COUNTS, *BOTTOM, dim)),
        "top": _layers(of_top, (dim + len(PAIRS[0]), *TOP, 1)),
    }
    return params, tx.init(params)


def log_odds(params: Params, batch: Batch) -> jax.Array:
    """Return the log-odds of a click, for each line (b,)."""
    counts = jnp.log1p(jnp.maximum(batch["counts"], 0))
    of_counts = _mlp(params["bottom"], counts)
    names = [f"C{i}" for i in range(1, CATEGORIES + 1)]
    bags = [jmask.embedding_bag(params["tables"][name], batch["bags"][name]) for name in names]
    vectors = jnp.stack([of_counts, *bags], axis=1)
    products = vectors @ vectors.transpose(0, 2, 1)
    features = jnp.concatenate([of_counts, products[:, *PAIRS]], axis=1)
    return _mlp(params["top"], features)[:, 0]


def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    scores = log_odds(params, batch)
    return optax.sigmoid_binary_cross_entropy(scores, batch["labels"]).mean(), scores


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, batch: Batch) -> tuple[State, jax.Array, jax.Array]:
    """Return the new state, and loss and log-odds of the batch before the step."""
    params, opt_state = state
    (loss, scores), grads = jmask.value_and_grad(loss_fn, has_aux=True)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss, scores


def _table(key: jax.Array, rows: int, dim: int) -> jax.Array:
    return jax.random.uniform(key, (rows, dim), minval=-0.03, maxval=0.03)


def _layers(key: jax.Array, widths: tuple[int, ...]) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {
            "kernel": jax.random.normal(key, (before, after)) * (2 / before) ** 0.5,
            "bias": jnp.zeros(after),
        }
        for key, before, after in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def _mlp(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    *hidden, last = layers
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]
