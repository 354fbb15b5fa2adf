"""jmask on bags: many tables, ids as they come, and the rest of a DLRM."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dlrm_layers import RATE_OF_LAYERS, examples, split, start_of_layers, start_of_tables
from jax_contenders import JMASK
from tricks import left_out
from works import Task

import jmask

Step = Callable[[np.ndarray], float | None]


def jmask_bags(task: Task, rate: float) -> Step:
    """A step of `task.tables` tables with `task.bags` bags of each; padding is timed too."""
    start = jnp.full((task.rows, task.width), start_of_tables(task.work), jnp.float32)
    params: Any = {"tables": [jnp.copy(start) for _ in range(task.tables)]}
    params["layers"] = start_of_layers(task.tables, task.width) if task.work == "DLRM" else []
    tables, layers = JMASK[task.optimizer](rate), optax.sgd(RATE_OF_LAYERS)
    place = params, (tables.init(params["tables"]), layers.init(params["layers"]))
    loss_of = _loss(task)

    @partial(jax.jit, donate_argnums=0)
    def step(place, padded):
        params, (of_tables, of_layers) = place
        loss, grads = jmask.value_and_grad(loss_of)(params, padded)
        new, of_tables = jmask.apply_gradients(
            tables, grads["tables"], of_tables, params["tables"]
        )
        updates, of_layers = layers.update(grads["layers"], of_layers)
        new = {"tables": new, "layers": optax.apply_updates(params["layers"], updates)}
        return (new, (of_tables, of_layers)), loss

    def run(batch: np.ndarray) -> float:
        nonlocal place
        lengths, ids = split(batch, task.tables, task.bags)
        with left_out(task.without):
            place, loss = step(place, _as_users_write(lengths, ids))
        jax.block_until_ready(place)
        return float(loss)

    return run


# Bags with learned weights, as attention pools them: ours, and the einsum that it stands for.
_POOLED = {
    "jmask": lambda table, ids, w: jmask.embedding_bag(table, ids, weights=w),
    "einsum": lambda table, ids, w: jnp.einsum("bl,bld->bd", w, table[ids]),
}


def weighted_bags(task: Task, rate: float) -> Step:
    """A step of a table and of scores, a softmax of which weights the rows of each bag."""
    tx, pooled = JMASK[task.optimizer](rate), _POOLED[task.who]
    start = jnp.full((task.rows, task.width), start_of_tables(task.work), jnp.float32)
    params = {"table": start, "scores": jnp.zeros(task.rows)}
    place = params, tx.init(params)

    def loss_of(params, ids):
        weights = jax.nn.softmax(params["scores"][ids])
        return jnp.sum(jnp.square(pooled(params["table"], ids, weights) - 1))

    @partial(jax.jit, donate_argnums=0)
    def step(place, ids):
        params, state = place
        loss, grads = jmask.value_and_grad(loss_of)(params, ids)
        return jmask.apply_gradients(tx, grads, state, params), loss

    def run(batch: np.ndarray) -> float:
        nonlocal place
        _, (ids,) = split(batch, task.tables, task.bags)
        place, loss = step(place, ids.reshape(task.bags, -1))
        jax.block_until_ready(place)
        return float(loss)

    return run


def _as_users_write(lengths: np.ndarray, ids: list[np.ndarray]) -> list[Any]:
    """Lines of ids for one table, whose bags are equally long; ragged bags for several."""
    if len(ids) == 1:
        return [ids[0].reshape(len(lengths[0]), -1)]
    offsets = [np.cumsum(n) - n for n in lengths]
    of_tables = jmask.pad_bags(dict(enumerate(ids)), dict(enumerate(offsets)))
    return list(of_tables.values())


def _loss(task: Task) -> Callable[[Any, Any], jax.Array]:
    def bags_of(params: Any, padded: Any) -> list[jax.Array]:
        pairs = zip(params["tables"], padded, strict=True)
        if task.work == "plain bags":
            return [table[x].sum(1) for table, x in pairs]
        return [jmask.embedding_bag(table, x)[: task.bags] for table, x in pairs]

    def squares(params: Any, padded: Any) -> jax.Array:
        return sum((jnp.sum(x**2) for x in bags_of(params, padded)), jnp.float32(0))

    dense, clicks = examples(task.bags)
    below = np.tril_indices(task.tables + 1, -1)

    def clicks_loss(params: Any, padded: Any) -> jax.Array:
        first, second = params["layers"]
        x = _through(first, jnp.asarray(dense), jax.nn.relu)
        rows = jnp.stack([x, *bags_of(params, padded)], 1)
        products = rows @ rows.mT
        features = jnp.concatenate([x, products[:, below[0], below[1]]], 1)
        logits = _through(second, features, lambda x: x)[:, 0]
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, jnp.asarray(clicks)))

    return clicks_loss if task.work == "DLRM" else squares


def _through(layers: Any, x: jax.Array, last: Callable[[jax.Array], jax.Array]) -> jax.Array:
    for number, (w, b) in enumerate(layers):
        x = x @ w + b
        x = last(x) if number == len(layers) - 1 else jax.nn.relu(x)
    return x
