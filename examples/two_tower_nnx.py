"""Two towers in flax nnx: an `nnx.Optimizer`, whose `update` stays as it is."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx
from retrieval import Batch, in_batch_softmax

import jmask

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


def value_and_grad(fun: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, Any]]:
    """`nnx.value_and_grad` with row-sparse gradients, for any module.

    Only what is an `nnx.Param` is differentiated. What else the module holds, counters of
    random numbers or statistics of batch norm, is written back as the function left it.
    """

    def value_and_grad_of_fun(model: nnx.Module, *args: Any) -> tuple[jax.Array, Any]:
        graph, params, others = nnx.split(model, nnx.Param, ...)

        def of_params(params: Any) -> tuple[jax.Array, Any]:
            merged = nnx.merge(graph, params, others, copy=True)
            return fun(merged, *args), nnx.state(merged, nnx.Not(nnx.Param))

        (value, others), grads = jmask.value_and_grad(of_params, has_aux=True)(params)
        nnx.update(model, others)
        return value, grads

    return value_and_grad_of_fun


def create(users: int, items: int, dim: int, seed: int) -> State:
    model = TwoTower(users, items, dim, nnx.Rngs(seed))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_fn(model: TwoTower, batch: Batch) -> jax.Array:
    return in_batch_softmax(*model(batch), batch)


# Donated, or every step copies the tables.
@partial(nnx.jit, donate_argnums=(0, 1))
def update(model: TwoTower, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    loss, grads = value_and_grad(loss_fn)(model, batch)  # was: nnx.value_and_grad
    optimizer.update(model, grads)
    return loss


def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    return state, update(*state, batch)


@nnx.jit
def vectors(state: State, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The vectors of some users and items."""
    return state[0](batch)
