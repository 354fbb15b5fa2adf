"""Bags with learned weights: jmask.embedding_bag beside the einsum that it stands for.

    python benchmarks/weighted_bags.py [--bags 1024] [--length 32] [--dim 64]

Work: a step of Adam on a table and on the scores of a softmax over each bag, which pools its
rows as attention does. Times are taken in alternating rounds of one process; the table shows
medians, and ratios of the rounds with their quartiles.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from side_by_side import WARM_UP, Report, alternate

import jmask

POOLED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "jmask": lambda table, ids, w: jmask.embedding_bag(table, ids, weights=w),
    "einsum": lambda table, ids, w: jnp.einsum("bl,bld->bd", w, table[ids]),
}


def contender(pooled: Callable[[Any, Any, Any], Any], rows: int, dim: int) -> Callable:
    """Return a step on a batch of ids (bags, length)."""
    tx = jmask.adam(1e-3)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(params["scores"][ids])
        return jnp.mean(jnp.square(pooled(params["table"], ids, weights) - 1))

    def step(params: Any, state: Any, ids: jax.Array) -> Any:
        return jmask.apply_gradients(tx, jmask.grad(loss)(params, ids), state, params)

    step = jax.jit(step, donate_argnums=(0, 1))
    params = {"table": jnp.full((rows, dim), 0.01), "scores": jnp.zeros(rows)}
    place = params, tx.init(params)

    def run(ids: np.ndarray) -> None:
        nonlocal place
        place = jax.block_until_ready(step(*place, ids))

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=int, default=1_000_000, help="rows (1000000)")
    parser.add_argument("--bags", type=int, default=1024, help="bags (1024)")
    parser.add_argument("--length", type=int, default=32, help="of a bag (32)")
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64], help="of a row")
    parser.add_argument("--rounds", type=int, default=40, help="rounds (40)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()

    work = f"{args.table:,} rows, {args.bags} bags of {args.length}"
    report = Report("weighted bags", work)
    rng = np.random.default_rng(0)
    shape = (args.rounds + WARM_UP, args.bags, args.length)
    batches = rng.integers(0, args.table, shape).astype(np.int32)
    for dim in args.dims:
        runs = {name: contender(pooled, args.table, dim) for name, pooled in POOLED.items()}
        report.add(f"step of Adam, D = {dim}", alternate(runs, batches))
    report.show(args.json)


if __name__ == "__main__":
    main()
