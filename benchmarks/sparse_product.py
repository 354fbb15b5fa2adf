"""Sparse features times dense weights: jmask.dot beside JAX's own product.

    python benchmarks/sparse_product.py [--columns 4194304] [--rows 256] [--entries 100]

Work: X W for a matrix X with `entries` random entries in each row, on csr and coo storage, and
the gradient of the sum of its squares with respect to W, which is row-sparse for both. Times
are taken in alternating rounds of one process; the table shows medians, and ratios of the
rounds with their quartiles.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR
from side_by_side import WARM_UP, Report, alternate

import jmask

PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "jmask": jmask.dot,
    "X @ W of JAX": lambda x, w: x @ w,
}


def features(rows: int, columns: int, entries: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    index = np.sort(rng.integers(0, columns, (rows, entries)), 1).astype(np.int32)
    places = np.stack([np.repeat(np.arange(rows, dtype=np.int32), entries), index.ravel()], 1)
    data = jnp.asarray(rng.normal(size=index.size), jnp.float32)
    pointers = jnp.arange(rows + 1, dtype=jnp.int32) * entries
    shape = (rows, columns)
    return {
        "csr": BCSR((data, jnp.asarray(index.ravel()), pointers), shape=shape),
        "coo": BCOO((data, jnp.asarray(places)), shape=shape, indices_sorted=True),
    }


def forward(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return product


def gradient(product: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, w: jmask.grad(lambda w: jnp.sum(jnp.square(product(x, w))))(w)


def contenders(work: Callable, x: Any, w: jax.Array) -> dict[str, Callable[[Any], None]]:
    compiled = {name: jax.jit(work(product)) for name, product in PRODUCTS.items()}
    return {
        name: lambda _, run=run: jax.block_until_ready(run(x, w))
        for name, run in compiled.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--columns", type=int, default=2**22, help="of X (4194304)")
    parser.add_argument("--rows", type=int, default=256, help="of X (256)")
    parser.add_argument("--entries", type=int, default=100, help="of a row of X (100)")
    parser.add_argument("--dims", type=int, nargs="+", default=[1, 8, 16, 64], help="of W")
    parser.add_argument("--rounds", type=int, default=60, help="rounds (60)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()

    report = Report("product", f"W: {args.columns:,} rows; X: {args.rows} x {args.entries}")
    for dim in args.dims:
        w = jnp.ones((args.columns, dim))
        for storage, x in features(args.rows, args.columns, args.entries).items():
            for what, work in (("X W", forward), ("gradient of W", gradient)):
                seconds = alternate(contenders(work, x, w), range(args.rounds + WARM_UP))
                report.add(f"{what}, {storage}, D = {dim}", seconds)
    report.show(args.json)


if __name__ == "__main__":
    main()
