"""jmask, and stock JAX with optax: steps with row-sparse and with dense gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from programs import PROGRAMS, START, Program
from tricks import left_out
from works import Task

import jmask

Step = Callable[[np.ndarray], float | None]

JMASK: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "SGD": jmask.sgd,
    "momentum": lambda rate: jmask.sgd(rate, momentum=0.9),
    "Adagrad": jmask.adagrad,
    "row-wise Adagrad": jmask.rowwise_adagrad,
    "Adam": jmask.adam,
}
OPTAX: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "SGD": optax.sgd,
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9),
    "Adagrad": lambda rate: optax.adagrad(rate, initial_accumulator_value=0.0),
    "Adam": optax.adam,
}


def compiled_step(
    tx: optax.GradientTransformation, value_and_grad: Callable, program: Program | None = None
) -> Callable:
    """Jitted: (table, state), ids -> (table, state), loss; a sum of squares or of a program."""

    def loss_of(table: jax.Array, ids: jax.Array) -> jax.Array:
        if program is not None:
            return program.loss(table[ids.reshape(-1, program.entries)])
        return jnp.sum(table[ids] ** 2)

    @partial(jax.jit, donate_argnums=0)
    def step(place, ids):
        table, state = place
        if hasattr(tx, "catch_up"):
            table, state = tx.catch_up(table, state, ids)
        # Without the loss among the results XLA would not compute it.
        loss, grads = value_and_grad(loss_of)(table, ids)
        return jmask.apply_gradients(tx, grads, state, table), loss

    return step


def _step(tx: optax.GradientTransformation, task: Task, value_and_grad: Callable) -> Step:
    step = compiled_step(tx, value_and_grad, PROGRAMS.get(task.work))
    place = _table_and_state(tx, task)

    def run(ids: np.ndarray) -> float:
        nonlocal place
        with left_out(task.without):
            place, loss = step(place, ids)
        jax.block_until_ready(place)
        return float(loss)

    return run


def _table_and_state(tx: optax.GradientTransformation, task: Task) -> Any:
    start = START if task.work in PROGRAMS else 1.0
    table = jnp.full((task.rows, task.width), start)
    return table, tx.init(table)


def jmask_step(task: Task, rate: float) -> Step:
    """A full step with row-sparse gradients."""
    return _step(JMASK[task.optimizer](rate), task, jmask.value_and_grad)


def jmask_deferred_step(task: Task, rate: float) -> Step:
    """The same of the dense trajectory."""
    return _step(jmask.deferred(JMASK[task.optimizer](rate)), task, jmask.value_and_grad)


def optax_step(task: Task, rate: float) -> Step:
    """A full step of stock JAX and optax, with dense gradients."""
    return _step(OPTAX[task.optimizer](rate), task, jax.value_and_grad)


def jmask_update(task: Task, rate: float) -> Step:
    """The update alone, with a gradient of ones at ids that are sorted and unique."""
    tx = JMASK[task.optimizer](rate)
    place, values = _table_and_state(tx, task), jnp.ones((task.lookups, task.width))

    @partial(jax.jit, donate_argnums=0)
    def update(place, ids, values):
        table, state = place
        grads = jmask.RowSparse(ids, values, table.shape, coalesced=True)
        return jmask.apply_gradients(tx, grads, state, table)

    def run(ids: np.ndarray) -> None:
        nonlocal place
        place = jax.block_until_ready(update(place, ids, values))

    return run
