"""What Python costs: calling a compiled step, and tracing a large model.

dispatch    jitted steps of a tiny table, where arithmetic is nothing
tracing     value_and_grad of a model of 50 dense layers and 20 tables, each time anew
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_contenders import JMASK, OPTAX, compiled_step
from works import Task

import jmask

_CALLS, _LAYERS, _TABLES, _WIDTH, _BATCH = 100, 50, 20, 16, 8


def _dispatch(tx: optax.GradientTransformation, task: Task, value_and_grad: Callable) -> Any:
    step = compiled_step(tx, value_and_grad)
    table = jnp.ones((task.rows, task.width))
    place: Any = (table, tx.init(table))

    def run(ids: np.ndarray) -> None:
        nonlocal place
        for _ in range(_CALLS):
            place, loss = step(place, ids)
        jax.block_until_ready((place, loss))

    return run


def jmask_dispatch(task: Task, rate: float) -> Callable[[np.ndarray], None]:
    """Steps whose state has as many buffers as those of `optax_dispatch`."""
    return _dispatch(JMASK[task.optimizer](rate), task, jmask.value_and_grad)


def optax_dispatch(task: Task, rate: float) -> Callable[[np.ndarray], None]:
    return _dispatch(OPTAX[task.optimizer](rate), task, jax.value_and_grad)


def _tracing(value_and_grad: Callable) -> Callable[[np.ndarray], None]:
    shape = jax.ShapeDtypeStruct
    parameters = {
        "tables": [shape((1000 + i, _WIDTH), jnp.float32) for i in range(_TABLES)],
        "layers": [shape((_WIDTH, _WIDTH), jnp.float32) for _ in range(_LAYERS)],
    }
    ids = shape((_TABLES, _BATCH), jnp.int32)

    def run(_: np.ndarray) -> None:
        # A new function each time: JAX remembers what it has traced.
        def loss_of(parameters, ids):
            x = sum(table[i] for table, i in zip(parameters["tables"], ids, strict=True))
            for layer in parameters["layers"]:
                x = jnp.tanh(x @ layer)
            return jnp.sum(x**2)

        jax.eval_shape(value_and_grad(loss_of), parameters, ids)

    return run


def jmask_tracing(task: Task, rate: float) -> Callable[[np.ndarray], None]:
    return _tracing(jmask.value_and_grad)


def jax_tracing(task: Task, rate: float) -> Callable[[np.ndarray], None]:
    return _tracing(jax.value_and_grad)
