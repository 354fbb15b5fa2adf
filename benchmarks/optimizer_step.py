"""A training step of an embedding: jmask beside torch's sparse optimizers and stock optax.

    python benchmarks/optimizer_step.py [--rows 1000000] [--dim 64] [--lookups 8192]

Work: look up `lookups` uniform random rows, sum of squares, backward, update in place. Times
are taken in alternating rounds of one process; the table shows medians, and ratios of the
rounds with their quartiles. torch is optional.
"""

import argparse
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from side_by_side import WARM_UP, Report, alternate

import jmask

RATE = 0.01
OPTIMIZERS: dict[str, tuple[Callable, Callable, str | None]] = {
    # (jmask's, stock optax, torch's name)
    "SGD": (lambda: jmask.sgd(RATE), lambda: optax.sgd(RATE), "SGD"),
    "momentum": (
        lambda: jmask.sgd(RATE, momentum=0.9),
        lambda: optax.sgd(RATE, momentum=0.9),
        None,  # torch's momentum moves every row ever touched
    ),
    "Adagrad": (lambda: jmask.adagrad(RATE), lambda: optax.adagrad(RATE), "Adagrad"),
    "Adam": (lambda: jmask.adam(RATE), lambda: optax.adam(RATE), "SparseAdam"),
}


def loss_fn(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.sum(table[ids] ** 2)


def jax_step(tx: Any, rows: int, dim: int, value_and_grad: Callable) -> Callable:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, ids):
        _, grads = value_and_grad(loss_fn)(table, ids)
        return jmask.apply_gradients(tx, grads, state, table)

    table = jnp.ones((rows, dim))
    place = [table, tx.init(table)]

    def run(ids: np.ndarray) -> None:
        place[:] = step(*place, ids)
        jax.block_until_ready(place)

    return run


def torch_step(name: str, rows: int, dim: int) -> Callable:
    import torch

    embedding = torch.nn.Embedding(rows, dim, sparse=True)
    optimizer = getattr(torch.optim, name)(embedding.parameters(), lr=RATE)

    def run(ids: np.ndarray) -> None:
        optimizer.zero_grad()
        embedding(torch.from_numpy(ids)).square().sum().backward()
        optimizer.step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--lookups", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dense", action="store_true", help="stock optax too (slow)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    shape = (args.rounds + WARM_UP, args.lookups)
    batches = np.random.default_rng(0).integers(0, args.rows, shape).astype(np.int32)

    title = f"V = {args.rows:,}, D = {args.dim}, {args.lookups:,} lookups"
    report = Report("optimizer", title)
    for name, (ours, dense, torch_name) in OPTIMIZERS.items():
        make = partial(jax_step, rows=args.rows, dim=args.dim)
        steps = {"jmask": make(ours(), value_and_grad=jmask.value_and_grad)}
        if torch_name is not None:
            with contextlib.suppress(ImportError):
                steps[f"torch {torch_name}"] = torch_step(torch_name, args.rows, args.dim)
        if args.dense:
            steps["optax, dense"] = make(dense(), value_and_grad=jax.value_and_grad)
        report.add(name, alternate(steps, batches))
    report.show(args.json)


if __name__ == "__main__":
    main()
