"""One pass beside several: `jmask.apply_gradients`, and `tx.update` with `apply_updates`.

    python benchmarks/one_pass.py

Steps of a table of 10^6 rows, alternating in one run. Each line divides the median of the steps
in one pass by that of the steps in several, by the clock and by what all cores worked. "in
parts" is an `optax.partition` of the table and a dense layer.
"""

import itertools
import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jmask

ROWS, ROUNDS, WARM = 1_000_000, 40, 10
LABELS = {"table": "rows", "layer": "rest"}
OPTIMIZERS = {
    "sgd": jmask.sgd(1e-3),
    "adagrad": jmask.adagrad(1e-3),
    "adam": jmask.adam(1e-3),
    "adam, in parts": optax.partition(
        {"rows": jmask.adam(1e-3), "rest": optax.adamw(1e-3)}, LABELS
    ),
}


def in_several(tx: Any, grads: Any, state: Any, params: Any) -> Any:
    updates, state = tx.update(grads, state, params)
    return jmask.apply_updates(params, updates), state


def ratios(tx: Any, width: int, lookups: int) -> tuple[float, float]:
    """One pass by several: time by the clock, and of all cores."""
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, ROWS, lookups), jnp.int32)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(params["table"][ids] * params["layer"]))

    def step(way: Any, carried: Any, ids: jax.Array) -> Any:
        params, state = carried
        return way(tx, jmask.grad(loss)(params, ids), state, params)

    places, times = [], [[], []]
    for way in (jmask.apply_gradients, in_several):
        params = {"table": jnp.zeros((ROWS, width)), "layer": jnp.ones(width)}
        carried = params, tx.init(params)
        run = jax.jit(partial(step, way), donate_argnums=0).lower(carried, ids).compile()
        places.append((run, carried))
    for _, i in itertools.product(range(ROUNDS), range(2)):
        run, carried = places[i]
        begun, worked = time.perf_counter(), time.process_time()
        carried = jax.block_until_ready(run(carried, ids))
        times[i].append((time.perf_counter() - begun, time.process_time() - worked))
        places[i] = run, carried
    one, several = ([statistics.median(x) for x in zip(*t[WARM:], strict=True)] for t in times)
    return one[0] / several[0], one[1] / several[1]


def main() -> None:
    jmask.keep_memory()
    table = Table("columns", "lookups", *OPTIMIZERS, title="one pass ÷ several: clock, cores")
    for width, lookups in itertools.product((16, 64, 128), (1024, 8192, 32768)):
        found = (ratios(tx, width, lookups) for tx in OPTIMIZERS.values())
        table.add_row(str(width), f"{lookups:,}", *(f"{a:.2f}, {b:.2f}" for a, b in found))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
