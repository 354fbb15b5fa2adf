"""Two towers in equinox: `eqx.partition`, and `jmask.apply_updates` for that of equinox."""

from functools import partial

import equinox as eqx
import jax
import optax

import jmask
from two_tower.retrieval import Batch, in_batch_softmax

tx = jmask.lazy(optax.adam(1e-2))  # was: optax.adam(1e-2)


class Tower(eqx.Module):
    embed: eqx.nn.Embedding
    dense: eqx.nn.Linear

    def __init__(self, rows: int, dim: int, key: jax.Array):
        of_embed, of_dense = jax.random.split(key)
        weight = dim**-0.5 * jax.random.normal(of_embed, (rows, dim))
        self.embed = eqx.nn.Embedding(weight=weight)
        self.dense = eqx.nn.Linear(dim, dim, key=of_dense)

    def __call__(self, id_: jax.Array) -> jax.Array:
        row = self.embed(id_)
        return row + self.dense(jax.nn.relu(row))


class TwoTower(eqx.Module):
    user: Tower
    item: Tower

    def __call__(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        return jax.vmap(self.user)(batch["users"]), jax.vmap(self.item)(batch["items"])


State = tuple[TwoTower, optax.OptState]


def create(users: int, items: int, dim: int, seed: int) -> State:
    of_user, of_item = jax.random.split(jax.random.key(seed))
    model = TwoTower(Tower(users, dim, of_user), Tower(items, dim, of_item))
    return model, tx.init(eqx.filter(model, eqx.is_inexact_array))


# The batch is donated too, which comes from NumPy and is not used again.
@partial(eqx.filter_jit, donate="all")
def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    model, opt_state = state
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params: TwoTower) -> jax.Array:
        return in_batch_softmax(*eqx.combine(params, static)(batch), batch)

    loss, grads = jmask.value_and_grad(loss_fn)(params)  # was: eqx.filter_value_and_grad
    updates, opt_state = tx.update(grads, opt_state, params)
    return (jmask.apply_updates(model, updates), opt_state), loss  # was: eqx.apply_updates


@eqx.filter_jit
def vectors(state: State, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return the vectors of some users and items."""
    return state[0](batch)
