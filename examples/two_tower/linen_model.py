"""Two towers in flax linen: a `TrainState`, whose `apply_gradients` stays as it is."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jmask
from two_tower.retrieval import Batch, in_batch_softmax

tx = jmask.lazy(optax.adam(1e-2))  # was: optax.adam(1e-2)


class Tower(nn.Module):
    rows: int
    dim: int

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        rows = nn.Embed(self.rows, self.dim, name="embed")(ids)
        return rows + nn.Dense(self.dim, name="dense")(nn.relu(rows))


class TwoTower(nn.Module):
    users: int
    items: int
    dim: int

    @nn.compact
    def __call__(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        user = Tower(self.users, self.dim, name="user")
        item = Tower(self.items, self.dim, name="item")
        return user(batch["users"]), item(batch["items"])


def create(users: int, items: int, dim: int, seed: int) -> TrainState:
    model, ids = TwoTower(users, items, dim), jnp.zeros(1, jnp.int32)
    params = model.init(jax.random.key(seed), {"users": ids, "items": ids})
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
    def loss_fn(params):
        return in_batch_softmax(*state.apply_fn(params, batch), batch)

    loss, grads = jmask.value_and_grad(loss_fn)(state.params)  # was: jax.value_and_grad
    return state.apply_gradients(grads=grads), loss


@jax.jit
def vectors(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the vectors of some users and items."""
    return state.apply_fn(state.params, batch)
