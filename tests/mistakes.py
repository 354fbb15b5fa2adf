"""What the tables of mistakes share: small things to make mistakes with, and the check."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import pytest

import jmask

# What is done, the type of the error, words of its message in their order.
Mistake = tuple[Callable[[], object], type[Exception], tuple[str, ...]]

TABLE = jnp.ones((6, 2))
IDS = jnp.array([1, 3, 1])
ROWS = jmask.RowSparse([1, 3], jnp.ones((2, 2)), (6, 2))
PARAMS, GRADS = {"t": TABLE}, {"t": ROWS}
LAZY = jmask.lazy(optax.adam(0.1))


def packed():
    return jmask.packed(TABLE, platform="tpu")


def mesh():
    return jax.make_mesh((1,), ("x",))


def sharded():
    return jmask.sharded(TABLE, mesh())


def looked_up(table):
    return jnp.sum(table[IDS])


def step(tx, grads=GRADS, params=PARAMS):
    """One step as a training loop takes it, from shapes alone."""

    def run(grads, params):
        updates, state = tx.update(grads, tx.init(params), params)
        return jmask.apply_updates(params, updates), state

    return jax.eval_shape(run, grads, params)


def check(mistake: Mistake) -> None:
    """The error is of the type and has the words."""
    run, error, words = mistake
    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, words))):
        run()
