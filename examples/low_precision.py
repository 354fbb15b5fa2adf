"""A bfloat16 table that learns as a float32 one does: stochastic rounding.

    python examples/low_precision.py

bfloat16 keeps 8 bits of a number. A step smaller than 1/512 of a weight is lost when the
result is rounded to nearest, in this step and in all that follow: training stalls. Rounded
stochastically, up or down with the exact sum as the mean, no step is lost on average.

Every row of a table is to become a target vector, from noisy observations of a few rows in
each step. The same run is made three times: with a float32 table, with a bfloat16 table
rounded to nearest, and with one rounded stochastically, which takes one more argument:

    jmask.apply_gradients(tx, grads, opt_state, params, key=key)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from rich.table import Table

import jmask
from common.program import Arguments, Program

ROWS, WIDTH, BATCH = 2_000, 16, 1024
NOISE = 0.3
RATE = 0.003  # of a row's own error
LEARNING_RATE = RATE * BATCH * WIDTH / 2  # of the mean of all
MEASURE_EVERY = 50

RUNS = {
    "float32": (jnp.float32, False),
    "bfloat16, to nearest": (jnp.bfloat16, False),
    "bfloat16, stochastic": (jnp.bfloat16, True),
}


def train(label: str, steps: int, seed: int, program: Program) -> list[float]:
    """Return the distance to the targets (root mean square), before and during the run."""
    dtype, stochastic = RUNS[label]
    of_targets, of_start = jax.random.split(jax.random.key(seed))
    targets = 1 + 0.5 * jax.random.normal(of_targets, (ROWS, WIDTH))
    table = (1 + 0.5 * jax.random.normal(of_start, (ROWS, WIDTH))).astype(dtype)
    tx = jmask.sgd(LEARNING_RATE)

    def loss(table: jax.Array, ids: jax.Array, observed: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(table[ids].astype(jnp.float32) - observed))

    @jax.jit
    def step(table: jax.Array, state: Any, number: jax.Array) -> tuple[jax.Array, Any]:
        of_ids, of_noise, of_rounding = jax.random.split(jax.random.key(number), 3)
        ids = jax.random.randint(of_ids, (BATCH,), 0, ROWS)
        observed = targets[ids] + NOISE * jax.random.normal(of_noise, (BATCH, WIDTH))
        grads = jmask.grad(loss)(table, ids, observed)
        key = of_rounding if stochastic else None
        return jmask.apply_gradients(tx, grads, state, table, key=key)

    @jax.jit
    def distance(table: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.mean(jnp.square(table.astype(jnp.float32) - targets)))

    state, distances = tx.init(table), [float(distance(table))]
    with program.bar(f"{label:<20}", steps, "distance {distance:.3f}") as show:
        for number in program.until_stopped(range(steps)):
            table, state = step(table, state, jnp.int32(number))
            if (number + 1) % MEASURE_EVERY == 0:
                distances.append(float(distance(table)))
                show(number + 1, distance=distances[-1])
    return distances


def save_plot(curves: dict[str, list[float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for (name, distances), style in zip(curves.items(), ("-", "-", "--"), strict=False):
        axes.plot(MEASURE_EVERY * np.arange(len(distances)), distances, style, label=name)
    axes.set(xlabel="step", ylabel="distance to the targets (RMS)", ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Arguments("low_precision", __doc__)
    parser.number("--steps", 3000, "of each run", least=MEASURE_EVERY)
    args = parser.parse_args(arguments)
    curves = {}
    with Program("low_precision") as program:
        for name in RUNS:
            curves[name] = train(name, args.steps, args.seed, program)
            if program.stopped:
                break
        save_plot(curves, args.plot)
        program.wrote("distances", args.plot)
        table = Table(title=f"Distance to the targets after {args.steps} steps")
        table.add_column("table")
        table.add_column("start", justify="right")
        table.add_column("end", justify="right")
        for name, distances in curves.items():
            table.add_row(name, f"{distances[0]:.3f}", f"{distances[-1]:.3f}")
        program.print(table)


if __name__ == "__main__":
    main()
