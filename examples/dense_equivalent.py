"""One model trained three ways: dense, lazy, and deferred, which is dense at the cost of lazy.

    python examples/dense_equivalent.py
    python examples/dense_equivalent.py --rows 200000 --steps 4000

Who likes what is to be learned from Zipf users and items: a hundred of them are in every
batch, and most are seen a few times. A dense Adam goes on moving inactive rows; a lazy one
leaves them; those of `jmask.deferred` are, when they are read, where the dense one has them.

The picture has the loss on pairs that are held out, and how far the tables are from the dense
ones. Each way is timed on the same batches.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.table import Table

import jmask
from common.program import Arguments, Program

PAIRS = 1024  # of a batch
HELD_OUT = 8192
TASTES = 8  # numbers that make up who likes what
MEASUREMENTS = 40  # points of a curve

Params = dict[str, Any]


class Data(NamedTuple):
    """Users, items and whether they like each other: batches (steps, n), and held out (n,)."""

    batches: tuple[jax.Array, jax.Array, jax.Array]
    held_out: tuple[jax.Array, jax.Array, jax.Array]


class Run(NamedTuple):
    """Losses and tables at each measurement, and the median seconds of a step."""

    losses: list[float]
    tables: list[np.ndarray]
    seconds: float


def make_data(rows: int, steps: int, seed: int) -> Data:
    """Draw pairs of Zipf users and items, liked by a model that is not known."""
    rng = np.random.default_rng(seed)
    tastes = rng.normal(size=(2, rows, TASTES)) * 1.2 / TASTES**0.25

    def pairs(count: int) -> tuple[np.ndarray, ...]:
        found = [np.minimum(rng.zipf(1.1, count) - 1, rows - 1) for _ in range(2)]
        scores = np.sum(tastes[0][found[0]] * tastes[1][found[1]], axis=1)
        liked = rng.random(count) < 1 / (1 + np.exp(-scores))
        return found[0].astype(np.int32), found[1].astype(np.int32), liked.astype(np.float32)

    batches = pairs(steps * PAIRS)
    return Data(
        tuple(jnp.asarray(x.reshape(steps, PAIRS)) for x in batches),
        tuple(map(jnp.asarray, pairs(HELD_OUT))),
    )


def loss_fn(params: Params, batch: Sequence[jax.Array]) -> jax.Array:
    """Return the mean cross entropy of who likes what."""
    users, items, liked = batch
    scores = jnp.sum(params["users"][users] * params["items"][items], axis=1)
    return jnp.mean(jax.nn.softplus(scores) - liked * scores)


def make_step(tx: optax.GradientTransformation, value_and_grad: Callable) -> Callable:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, batch: Any) -> Any:
        if hasattr(tx, "catch_up"):
            users, items, _ = batch
            params, state = tx.catch_up(params, state, {"users": users, "items": items})
        loss, grads = value_and_grad(loss_fn)(params, batch)
        return *jmask.apply_gradients(tx, grads, state, params), loss

    return step


def ways(rate: float) -> dict[str, tuple[Any, Any, bool]]:
    """Return for each way transformation, gradient, and whether rows are caught up."""
    tx = optax.adam(rate)
    return {
        "dense": (tx, jax.value_and_grad, False),
        "lazy": (jmask.lazy(tx), jmask.value_and_grad, False),
        "deferred": (jmask.deferred(tx), jmask.value_and_grad, True),
    }


def train(
    name: str, tables: Params, data: Data, every: int, rate: float, program: Program
) -> Run:
    """Train on all batches, and measure after every so many steps."""
    tx, value_and_grad, is_deferred = ways(rate)[name]
    params = jax.tree.map(jnp.copy, tables)
    step, evaluated, state = make_step(tx, value_and_grad), jax.jit(loss_fn), tx.init(params)
    losses, measured, seconds, steps = [], [], [], len(data.batches[0])
    with program.bar(f"{name:<8}", steps, "loss {loss:.4f}") as show:
        for number in program.until_stopped(range(steps)):
            if number % every == 0:
                if is_deferred:
                    params, state = tx.catch_up(params, state)
                losses.append(float(evaluated(params, data.held_out)))
                measured.append(np.concatenate([np.asarray(x) for x in params.values()]))
            batch = [x[number] for x in data.batches]
            start = time.perf_counter()
            params, state, _ = jax.block_until_ready(step(params, state, batch))
            seconds.append(time.perf_counter() - start)
            show(number + 1, loss=losses[-1])
    return Run(losses, measured, float(np.median(seconds)))


def distances(run: Run, dense: Run) -> list[float]:
    """Return the distance from the dense tables, relative to their way from the start."""
    start = dense.tables[0]
    return [
        float(np.linalg.norm(x - y) / max(np.linalg.norm(y - start), 1e-30))
        for x, y in zip(run.tables[1:], dense.tables[1:], strict=False)
    ]


def save_plot(runs: dict[str, Run], every: int, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    styles = {
        "dense": {"color": "tab:blue", "linewidth": 5, "alpha": 0.4},
        "lazy": {"color": "tab:orange"},
        "deferred": {"color": "tab:green", "linestyle": "--"},
    }
    for name, run in runs.items():
        steps = every * np.arange(len(run.losses))
        label = f"{name}, {1e3 * run.seconds:.1f} ms a step"
        left.plot(steps, run.losses, label=label, **styles[name])
        if name != "dense":
            apart = distances(run, runs["dense"])
            right.plot(steps[1 : 1 + len(apart)], apart, label=name, **styles[name])
    left.set(xlabel="step", ylabel="loss, held out")
    right.set(xlabel="step", ylabel="distance from the dense tables", yscale="log")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:  # after Ctrl-C there may be the dense way alone
            axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def summary(runs: dict[str, Run]) -> Table:
    table = Table(title="One model, three ways", title_justify="left")
    table.add_column("way")
    for column in ("time of a step", "loss, held out", "distance from dense"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, run in runs.items():
        distance = distances(run, runs["dense"])[-1]
        table.add_row(
            name, f"{1e3 * run.seconds:.2f} ms", f"{run.losses[-1]:.5f}", f"{distance:.1e}"
        )
    return table


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments("dense_equivalent", __doc__)
    parser.number("--rows", 50_000, "of each table", least=2)
    parser.number("--dim", 32, "numbers in a row")
    parser.number("--steps", 800, "of each way", least=2)
    parser.number("--rate", 0.01, "learning rate")
    args = parser.parse_args(argv)
    data = make_data(args.rows, args.steps, args.seed)
    keys = jax.random.split(jax.random.key(args.seed))
    tables = {
        name: 0.1 * jax.random.normal(key, (args.rows, args.dim))
        for name, key in zip(("users", "items"), keys, strict=True)
    }
    every, runs = max(args.steps // MEASUREMENTS, 1), {}
    with Program("dense_equivalent") as program:
        for name in ways(args.rate):
            runs[name] = train(name, tables, data, every, args.rate, program)
            if program.stopped:
                break
        save_plot(runs, every, args.plot)
        program.wrote("loss and distance", args.plot)
        program.print(summary(runs))


if __name__ == "__main__":
    main()
