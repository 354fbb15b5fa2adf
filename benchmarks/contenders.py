"""Who trains an embedding: a contender for each `works.Task`.

    step = build(Task("optax", optimizer="Adagrad"), interpreters={})
    step(ids)           looks the rows up, sums their squares, differentiates, updates in place
    step.loss           the sum, which every contender gives back: so none can leave it out

Tables start as ones, so that contenders that do the same work have the same losses. One that
is not installed raises ImportError.
"""

from collections.abc import Callable

import bag_contenders
import c_loop
import host_contender
import jax_contenders
import numpy as np
import overhead
from other_interpreter import PAUSE, Interpreter
from programs import PROGRAMS
from works import Task

# The same for all; small enough for the hottest rows of a Zipf batch to stay finite.
RATE = 1e-3

Step = Callable[[np.ndarray], float | None]

_BUILDERS: dict[tuple[str, str], Callable[[Task, float], Step]] = {
    ("jmask", "step"): jax_contenders.jmask_step,
    ("jmask", "deferred step"): jax_contenders.jmask_deferred_step,
    ("jmask", "step on files"): host_contender.host_step,
    ("jmask", "update"): jax_contenders.jmask_update,
    ("jmask", "bags"): bag_contenders.jmask_bags,
    ("jmask", "plain bags"): bag_contenders.jmask_bags,
    ("jmask", "weighted bags"): bag_contenders.weighted_bags,
    ("einsum", "weighted bags"): bag_contenders.weighted_bags,
    **{("jmask", name): jax_contenders.jmask_step for name in PROGRAMS},
    ("jmask", "DLRM"): bag_contenders.jmask_bags,
    ("optax", "step"): jax_contenders.optax_step,
    ("C loop", "update"): c_loop.c_update,
    ("memory copy", "update"): c_loop.memory_copy,
    ("jmask", "dispatch"): overhead.jmask_dispatch,
    ("optax", "dispatch"): overhead.optax_dispatch,
    ("jmask", "small step"): overhead.jmask_small_step,
    ("optax", "small step"): overhead.optax_small_step,
    ("jmask", "eager"): overhead.jmask_eager,
    ("optax", "eager"): overhead.optax_eager,
    ("jmask", "tracing"): overhead.jmask_tracing,
    ("JAX", "tracing"): overhead.jax_tracing,
    ("jmask", "compiling"): overhead.jmask_compiling,
    ("optax", "compiling"): overhead.optax_compiling,
}
# Those that live in an interpreter of their own: the script it runs, and the environment that
# `make bench` makes for it.
WORKERS = {
    "torch": ("torch_worker.py", ".venv-torch"),
    "FBGEMM": ("fbgemm_worker.py", ".venv-torch"),
    "TensorFlow": ("tensorflow_worker.py", ".venv-tensorflow"),
    "MXNet": ("mxnet_worker.py", ".venv-mxnet"),
}


def worker_of(who: str, cores: int | None = None) -> Interpreter:
    """The worker of a library, on so many cores."""
    script, environment = WORKERS[who]
    return Interpreter(environment, script, cores)


class Contender:
    """`contender(ids)` does the work once; `close` gives its memory back.

    Attributes:
        loss: of the last step.
        pause: seconds to wait after its turn.
    """

    pause = 0.0

    def __init__(self, step: Step):
        self._step: Step | None = step
        self.loss: float | None = None

    def __call__(self, ids: np.ndarray) -> None:
        assert self._step is not None
        self.loss = self._step(ids)

    def close(self) -> None:
        self._step = None


class RemoteContender:
    """The same in another interpreter, which tells how many seconds its step took."""

    pause = PAUSE

    def __init__(self, interpreter: Interpreter, task: Task):
        self._interpreter = interpreter
        self.loss: float | None = None
        interpreter.build(
            work=task.work,
            optimizer=task.optimizer,
            rows=task.rows,
            width=task.width,
            rate=RATE,
            **({"tables": task.tables, "bags": task.bags} if task.bags else {}),
        )

    def __call__(self, ids: np.ndarray) -> float:
        seconds, self.loss = self._interpreter.run(ids)
        return seconds

    def close(self) -> None:
        self._interpreter.drop()


def build(task: Task, workers: dict[str, Interpreter]) -> Contender | RemoteContender:
    """The contender for a task.

    Args:
        task: of the table in `works`.
        workers: of `WORKERS`, by name.

    Raises:
        ImportError: if what the contender needs is not there.
    """
    if task.who not in WORKERS:
        return Contender(_BUILDERS[task.who, task.work](task, RATE))
    return RemoteContender(workers[task.who], task)
