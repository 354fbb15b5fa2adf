"""Two towers as plain functions on a dict of arrays, with optax."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmask
from two_tower.retrieval import Batch, in_batch_softmax

tx = jmask.lazy(optax.adam(1e-2))  # was: optax.adam(1e-2)

Params = dict[str, dict[str, jax.Array]]
State = tuple[Params, optax.OptState]


def tower(params: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
    rows = params["embedding"][ids]
    return rows + jax.nn.relu(rows) @ params["kernel"] + params["bias"]


def towers(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    return tower(params["user"], batch["users"]), tower(params["item"], batch["items"])


def create(users: int, items: int, dim: int, seed: int) -> State:
    normal, zeros = jax.nn.initializers.normal(dim**-0.5), jnp.zeros
    keys = iter(jax.random.split(jax.random.key(seed), 4))
    params = {
        name: {
            "embedding": normal(next(keys), (rows, dim)),
            "kernel": normal(next(keys), (dim, dim)),
            "bias": zeros(dim),
        }
        for name, rows in (("user", users), ("item", items))
    }
    return params, tx.init(params)


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    params, opt_state = state

    def loss_fn(params: Params) -> jax.Array:
        return in_batch_softmax(*towers(params, batch), batch)

    loss, grads = jmask.value_and_grad(loss_fn)(params)  # was: jax.value_and_grad
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


@jax.jit
def vectors(state: State, batch: Batch) -> tuple[Any, Any]:
    """Return the vectors of some users and items."""
    return towers(state[0], batch)
