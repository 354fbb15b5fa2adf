"""What a mask costs: masked arithmetic beside unmasked jax.numpy and torch.masked.

    python benchmarks/masked_elementwise.py [--size 10000000] [--rounds 15]

Each operation is timed in alternating rounds on float32 arrays with half of the entries
masked; the table shows medians and ratios with their quartiles. torch is optional.
"""

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from side_by_side import WARM_UP, Report, alternate

import jmask
import jmask.numpy as jnm

OPERATIONS: dict[str, tuple[Callable, Callable, Callable]] = {
    # (masked, unmasked, torch): the same expression in three namespaces
    "exp(x)": (jnm.exp, jnp.exp, lambda t, x, y: t.exp(x)),
    "sqrt(x)": (jnm.sqrt, jnp.sqrt, lambda t, x, y: t.sqrt(x)),
    "x * x + x": (lambda x: x * x + x, lambda x: x * x + x, lambda t, x, y: x * x + x),
    "x + y": (lambda x, y: x + y, lambda x, y: x + y, lambda t, x, y: x + y),
    "x * y": (lambda x, y: x * y, lambda x, y: x * y, lambda t, x, y: x * y),
    "tanh(x) / y": (
        lambda x, y: jnm.tanh(x) / y,
        lambda x, y: jnp.tanh(x) / y,
        lambda t, x, y: t.tanh(x) / y,
    ),
}


def contenders(name: str, data: list[np.ndarray], mask: np.ndarray) -> dict[str, Callable]:
    masked, unmasked, in_torch = OPERATIONS[name]
    count = 2 if "y" in name else 1
    arrays = [jnp.asarray(x) for x in data[:count]]
    tensors = [jmask.masked_tensor(x, jnp.asarray(mask)) for x in arrays]
    masked, unmasked = jax.jit(masked), jax.jit(unmasked)
    calls: dict[str, Callable[[Any], Any]] = {
        "jmask": lambda _: jax.block_until_ready(masked(*tensors)),
        "jax.numpy, no mask": lambda _: jax.block_until_ready(unmasked(*arrays)),
    }
    with contextlib.suppress(ImportError):
        import torch

        valid = torch.from_numpy(mask)
        x, y = (torch.masked.masked_tensor(torch.from_numpy(d), valid) for d in data)
        calls["torch.masked"] = lambda _: in_torch(torch, x, y)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=10_000_000, help="entries (10000000)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (15)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    data = [rng.uniform(0.5, 2, args.size).astype(np.float32) for _ in range(2)]
    mask = rng.random(args.size) < 0.5

    report = Report("operation")
    for name in OPERATIONS:
        calls = contenders(name, data, mask)
        report.add(name, alternate(calls, range(args.rounds + WARM_UP)))
    report.show(args.json)


if __name__ == "__main__":
    main()
