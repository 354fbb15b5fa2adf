"""Two towers in flax nnx: an `nnx.Optimizer`, whose `update` stays as it is."""

from functools import partial

import jax
import optax
from flax import nnx

import jmask
from two_tower.retrieval import Batch, in_batch_softmax

tx = jmask.lazy(optax.adam(1e-2))  # was: optax.adam(1e-2)

State = tuple["TwoTower", nnx.Optimizer]


class Tower(nnx.Module):
    def __init__(self, rows: int, dim: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(rows, dim, rngs=rngs)
        self.dense = nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        rows = self.embed(ids)
        return rows + self.dense(nnx.relu(rows))


class TwoTower(nnx.Module):
    def __init__(self, users: int, items: int, dim: int, rngs: nnx.Rngs):
        self.user, self.item = Tower(users, dim, rngs), Tower(items, dim, rngs)

    def __call__(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return self.user(batch["users"]), self.item(batch["items"])


def create(users: int, items: int, dim: int, seed: int) -> State:
    model = TwoTower(users, items, dim, nnx.Rngs(seed))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_fn(model: TwoTower, batch: Batch) -> jax.Array:
    return in_batch_softmax(*model(batch), batch)


# Donated, or every step copies the tables.
@partial(nnx.jit, donate_argnums=(0, 1))
def update(model: TwoTower, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    loss, grads = jmask.nnx.value_and_grad(loss_fn)(model, batch)  # was: nnx.value_and_grad
    optimizer.update(model, grads)
    return loss


def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    return state, update(*state, batch)


@nnx.jit
def vectors(state: State, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the vectors of some users and items."""
    return state[0](batch)
