"""A language model's layers with a memory of rows: on the GPU, and in the host's memory.

    python benchmarks/gpu_host.py
    python benchmarks/gpu_host.py --rows 100_000 --width 16      a small one, on a CPU

8,192 tokens look up eight rows each, and what they read goes through layers of matrix products
in bfloat16, forwards and backwards. The table is trained by Adagrad or row-wise Adagrad. Three
steps take turns: the layers with the rows of one array of the batch's size in place of a
table, which is what they cost; with a table on the device; and with a table in the host's
memory, whose rows `jmask.host` fetches a batch ahead. Ids are uniform or Zipf's.
"""

import argparse
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from batches import batches
from jax_contenders import JMASK

import jmask

RESULTS = Path(__file__).parent / "results" / "gpu_host.md"
TOKENS, LOOKUPS, HIDDEN = 8_192, 8, 4_096
RATE = 0.01


def layers_of(width: int, layers: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    return {
        "read": normal(keys[0], (LOOKUPS * width, HIDDEN)) * (LOOKUPS * width) ** -0.5,
        "layers": normal(keys[1], (layers, HIDDEN, HIDDEN)) * HIDDEN**-0.5,
    }


def loss_of(rows: jax.Array, model: dict[str, jax.Array]) -> jax.Array:
    """Layers with residuals over the rows (tokens, lookups, width) that tokens have read."""
    x = rows.reshape(rows.shape[0], -1).astype(jnp.bfloat16) @ model["read"]
    for weight in model["layers"]:
        x = x + jax.nn.relu(x @ weight)
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def train_step(tx: Any, params: Any, state: Any, ids: jax.Array) -> tuple[Any, Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        return loss_of(params["table"][ids], params["model"])

    value, grads = jmask.value_and_grad(loss)(params)
    return *jmask.apply_gradients(tx, grads, state, params), value


def optimizer(name: str) -> optax.GradientTransformation:
    labels = {"table": "table", "model": "model"}
    return optax.multi_transform({"table": JMASK[name](RATE), "model": optax.sgd(RATE)}, labels)


class OnDevice:
    """The table is an array on the device."""

    def __init__(self, name: str, rows: int, width: int, layers: int):
        tx = optimizer(name)
        params = {"table": jnp.full((rows, width), 0.5), "model": layers_of(width, layers)}
        self.place = params, tx.init(params)
        self.step = jax.jit(partial(train_step, tx), donate_argnums=(0, 1))

    def run(self, ids: list[np.ndarray]) -> None:
        for x in ids:
            *self.place, value = self.step(*self.place, x)
        jax.block_until_ready((self.place, value))


class Alone:
    """The layers alone: the rows are an array that the optimizer does not know."""

    def __init__(self, name: str, rows: int, width: int, layers: int):
        tx = optax.sgd(RATE)
        self.place = [layers_of(width, layers), jnp.full((TOKENS, LOOKUPS, width), 0.5)]
        state = tx.init(self.place[0])

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(model: Any, read: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
            value, (rows, grads) = jax.value_and_grad(loss_of, (0, 1))(read, model)
            updates, _ = tx.update(grads, state, model)
            return optax.apply_updates(model, updates), read - RATE * rows, value

        self.step = step

    def run(self, ids: list[np.ndarray]) -> None:
        for _ in ids:
            *self.place, value = self.step(*self.place)
        jax.block_until_ready((self.place, value))


class OnHost:
    """The table is an array of NumPy."""

    def __init__(self, name: str, rows: int, width: int, layers: int):
        self.tx = optimizer(name)
        table = np.full((rows, width), 0.5, np.float32)
        params = {"table": table, "model": layers_of(width, layers)}
        self.host = jmask.host.offload(params, self.tx)
        self.step = jax.jit(partial(train_step, self.tx), donate_argnums=(0, 1))

    def run(self, ids: list[np.ndarray]) -> None:
        finders = {"table": lambda batch: batch, "model": None}
        for x, params, state in self.host.steps(iter(ids), ids=finders):
            params, state, _ = self.step(params, state, x)
            self.host.commit(params, state)
        self.host.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--width", type=int, nargs="*", default=[16, 128])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    lines = [
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {os.cpu_count()} CPU cores; "
        f"{args.rows:.0e} rows, {TOKENS * LOOKUPS:,} lookups.",
        "Milliseconds of a step.",
        "",
        "| optimizer, width, ids | layers alone | table on the device | in the host's memory |",
        "|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name, width, ids in cases(args.width):
        steps: dict[str, Any] = {}  # so that the tables of the last case are gone
        steps = {
            kind.__name__: kind(name, args.rows, width, args.layers)
            for kind in (Alone, OnDevice, OnHost)
        }
        drawn = [
            x.reshape(TOKENS, LOOKUPS) for x in batches(ids, args.rows, TOKENS * LOOKUPS, 20)
        ]
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for step in steps.values():
            step.run(drawn[:3])
        for _ in range(args.rounds):
            for kind, step in steps.items():
                start = time.perf_counter()
                step.run(drawn)
                times[kind].append((time.perf_counter() - start) / len(drawn))
        cells = [f"{1e3 * float(np.median(t)):.2f}" for t in times.values()]
        lines.append(f"| {name}, {width}, {ids} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


def cases(widths: list[int]) -> Iterator[tuple[str, int, str]]:
    for width in widths:
        for name in ("row-wise Adagrad", "Adagrad"):
            for ids in ("uniform", "Zipf"):
                yield name, width, ids


if __name__ == "__main__":
    main()
