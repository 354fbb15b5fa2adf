"""jmask.host: a step whose table and slots are files of any size, its rows in the page cache.

The loop of `host.steps` is turned inside out, so that steps take turns with those of others: a
call hands over the ids of the next step, and makes the one before, while the rows of the next
are read.
"""

import queue
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax_contenders import JMASK
from works import Task

import jmask

# Rows that are looked up, all over the files: each is on a page of its own, 800 MB in a file of
# 10^8 rows. All rows would be more than the dirty pages that Linux keeps in memory.
_HOT = 200_000


def host_step(task: Task, rate: float) -> Callable[[np.ndarray], float | None]:
    """A step of lookups, loss, backward and update, with the table on the host."""
    folder = tempfile.TemporaryDirectory()
    shape, stride = (task.rows, task.width), max(task.rows // _HOT, 1)
    table = np.memmap(f"{folder.name}/table.bin", np.float32, "w+", shape=shape)
    tx, ids = JMASK[task.optimizer](rate), queue.SimpleQueue[np.ndarray | None]()
    host = jmask.host.offload({"table": table}, tx)
    table[::stride] = 1.0
    for slot in jax.tree.leaves(host.state):
        if isinstance(slot, np.memmap):
            slot[::stride] = slot[0]

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        loss_of = lambda params: jnp.sum(params["table"][ids] ** 2)
        loss, grads = jmask.value_and_grad(loss_of)(params)
        return *jmask.apply_gradients(tx, grads, state, params), loss

    def loader() -> Iterator[np.ndarray]:
        while (batch := ids.get()) is not None:
            yield batch

    steps = host.steps(loader(), ids={"table": lambda batch: batch})
    ids.put(np.arange(task.lookups) * stride)

    def run(batch: np.ndarray) -> float:
        ids.put(batch % (task.rows // stride) * stride)
        positions, params, state = next(steps)
        params, state, loss = step(params, state, positions)
        host.commit(params, state)
        return float(loss)

    # With the contender its thread ends, and its files go.
    weakref.finalize(run, ids.put, None)
    weakref.finalize(run, folder.cleanup)
    return run
