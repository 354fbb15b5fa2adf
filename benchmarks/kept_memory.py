"""What `jmask.keep_memory` gains, and bags that are written by hand beside `embedding_bag`.

    python benchmarks/kept_memory.py

Steps of a table of 10^6 rows of 64. Each runs in two processes, one of which called
`keep_memory` first, since what glibc keeps is a matter of a process. They take turns; times are
medians, in milliseconds.
"""

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from programs import PROGRAMS
from rich.console import Console
from rich.table import Table

import jmask

ROWS, WIDTH, ROUNDS, WARM = 1_000_000, 64, 30, 6
SKIP_GRAM = PROGRAMS["skip-gram"]
# Ids, and the loss of a table and ids.
STEPS: dict[str, tuple[tuple[int, ...], Callable[[Any, Any], Any]]] = {
    "skip-gram, 4,096 examples of 12": ((4096, 12), lambda t, ids: SKIP_GRAM.loss(t[ids])),
    "100,000 lookups": ((100_000,), lambda t, ids: (t[ids] ** 2).sum()),
    "20,480 bags of 5, by hand": ((20_480, 5), lambda t, ids: (t[ids].sum(1) ** 2).sum()),
    "20,480 bags of 5, `embedding_bag`": (
        (20_480, 5),
        lambda t, ids: (jmask.embedding_bag(t, ids) ** 2).sum(),
    ),
}
OPTIMIZERS = {"SGD": jmask.sgd, "Adagrad": jmask.adagrad, "Adam": jmask.adam}


def serve(pipe: Connection, name: str, optimizer: str, is_kept: bool) -> None:
    """Take a step whenever asked, and send how long it took, until there is no more."""
    if is_kept:
        jmask.keep_memory()
    import jax  # makes nothing before

    jnp = jax.numpy
    (shape, loss), tx = STEPS[name], OPTIMIZERS[optimizer](1e-3)
    rng = np.random.default_rng(0)
    batches = [jnp.asarray(rng.integers(0, ROWS, shape), jnp.int32) for _ in range(4)]

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(table: Any, state: Any, ids: Any) -> Any:
        value, gradient = jmask.value_and_grad(loss)(table, ids)
        return *jmask.apply_gradients(tx, gradient, state, table), value

    table = jnp.full((ROWS, WIDTH), 0.01)
    state = tx.init(table)
    ids = itertools.cycle(batches)
    while pipe.recv():
        begun = time.perf_counter()
        table, state, _ = jax.block_until_ready(step(table, state, next(ids)))
        pipe.send(time.perf_counter() - begun)


def medians(name: str, optimizer: str) -> list[float]:
    """Milliseconds of a step as it is, and where memory is kept."""
    context = multiprocessing.get_context("spawn")
    pipes, times = [], [list[float](), list[float]()]
    for is_kept in (False, True):
        ours, theirs = context.Pipe()
        arguments = theirs, name, optimizer, is_kept
        context.Process(target=serve, args=arguments, daemon=True).start()
        pipes.append(ours)
    for _, (pipe, found) in itertools.product(range(ROUNDS), zip(pipes, times, strict=True)):
        pipe.send(True)
        found.append(pipe.recv())
    for pipe in pipes:
        pipe.send(False)
    return [1e3 * statistics.median(x[WARM:]) for x in times]


def main() -> None:
    table = Table("step", "optimizer", "as it is", "kept", "kept ÷ as it is")
    for name, optimizer in itertools.product(STEPS, OPTIMIZERS):
        before, after = medians(name, optimizer)
        row = f"{before:.0f}", f"{after:.0f}", f"{after / before:.2f}"
        table.add_row(name, optimizer, *row)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
