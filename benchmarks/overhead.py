"""What Python and the compiler cost: calling a step, an eager update, tracing, compiling.

dispatch    calls of a jitted function of the arguments and results of a step, that adds one
small step  jitted steps of a tiny table, where arithmetic is little
eager       updates outside jit, of a tiny table
tracing     value_and_grad of a model of 50 dense layers and 20 tables, each time anew
compiling   the steps of all `PROGRAMS`, traced, lowered and compiled each time anew
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_contenders import JMASK, OPTAX, compiled_step
from programs import PROGRAMS
from works import Task

import jmask

_CALLS, _LAYERS, _TABLES, _WIDTH, _BATCH = 100, 50, 20, 16, 8
_EXAMPLES = 1024  # of a batch of a program

Run = Callable[[np.ndarray], None]


@partial(jax.jit, donate_argnums=0)
def _add_one(place: Any, ids: jax.Array) -> tuple[Any, jax.Array]:
    place = jax.tree.map(lambda x: x + 1, place)
    return place, jax.tree.leaves(place)[0][0, 0]


def _repeated(step: Callable[..., Any], tx: optax.GradientTransformation, task: Task) -> Run:
    table = jnp.ones((task.rows, task.width))
    place: Any = (table, tx.init(table))

    def run(ids: np.ndarray) -> None:
        nonlocal place
        for _ in range(_CALLS):
            place, result = step(place, ids)
        jax.block_until_ready((place, result))

    return run


def jmask_dispatch(task: Task, rate: float) -> Run:
    return _repeated(_add_one, JMASK[task.optimizer](rate), task)


def optax_dispatch(task: Task, rate: float) -> Run:
    return _repeated(_add_one, OPTAX[task.optimizer](rate), task)


def jmask_small_step(task: Task, rate: float) -> Run:
    tx = JMASK[task.optimizer](rate)
    return _repeated(compiled_step(tx, jmask.value_and_grad), tx, task)


def optax_small_step(task: Task, rate: float) -> Run:
    tx = OPTAX[task.optimizer](rate)
    return _repeated(compiled_step(tx, jax.value_and_grad), tx, task)


def jmask_eager(task: Task, rate: float) -> Run:
    values = jnp.ones((task.lookups, task.width))
    rows = jmask.RowSparse(jnp.arange(task.lookups), values, (task.rows, task.width))
    return _eager(JMASK[task.optimizer](rate), task, rows)


def optax_eager(task: Task, rate: float) -> Run:
    return _eager(OPTAX[task.optimizer](rate), task, jnp.ones((task.rows, task.width)))


def _eager(tx: optax.GradientTransformation, task: Task, gradient: Any) -> Run:
    table = jnp.ones((task.rows, task.width))
    state = tx.init(table)

    def run(_: np.ndarray) -> None:
        nonlocal state
        for _ in range(_CALLS):
            updates, state = tx.update(gradient, state, table)
        jax.block_until_ready((updates, state))

    return run


def _tracing(value_and_grad: Callable) -> Run:
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


def jmask_tracing(task: Task, rate: float) -> Run:
    return _tracing(jmask.value_and_grad)


def jax_tracing(task: Task, rate: float) -> Run:
    return _tracing(jax.value_and_grad)


def _compiling(tx: optax.GradientTransformation, value_and_grad: Callable, task: Task) -> Run:
    table = jax.ShapeDtypeStruct((task.rows, task.width), jnp.float32)
    place = (table, jax.eval_shape(tx.init, table))

    def run(_: np.ndarray) -> None:
        for program in PROGRAMS.values():
            ids = jax.ShapeDtypeStruct((_EXAMPLES * program.entries,), jnp.int32)
            compiled_step(tx, value_and_grad, program=program).lower(place, ids).compile()

    return run


def jmask_compiling(task: Task, rate: float) -> Run:
    return _compiling(JMASK[task.optimizer](rate), jmask.value_and_grad, task)


def optax_compiling(task: Task, rate: float) -> Run:
    return _compiling(OPTAX[task.optimizer](rate), jax.value_and_grad, task)
