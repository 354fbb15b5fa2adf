"""What a mask costs: masked arithmetic beside unmasked jax.numpy and torch.masked.

    python benchmarks/masked_elementwise.py [--size 10000000]

Each operation is timed in alternating rounds on float32 arrays with half of the entries
masked; the table shows medians and ratios with their quartiles. torch is left out where
`make .venv-torch/ready.stamp` has not made an environment for it.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from masked_operations import OPERATIONS, operands
from other_interpreter import PAUSE, Interpreter
from side_by_side import WARM_UP, Report, alternate, mean_of_steps

import jmask
import jmask.numpy as jnm

# Steps of a turn, of which the first does not count.
_STEPS = 2

Turn = Callable[[Any], float]


def contenders(name: str, size: int, torch: Interpreter | None) -> dict[str, Turn]:
    *data, mask = operands(size)
    arrays = [jnp.asarray(x) for x in data]
    tensors = [jmask.masked_tensor(x, jnp.asarray(mask)) for x in arrays]
    masked, unmasked = (
        jax.jit(lambda x, y, f=f: OPERATIONS[name](f, x, y)) for f in (jnm, jnp)
    )
    turns = {
        "jmask": _turn(lambda _: jax.block_until_ready(masked(*tensors))),
        "jax.numpy, no mask": _turn(lambda _: jax.block_until_ready(unmasked(*arrays))),
    }
    if torch is not None:
        torch.build(operation=name, size=size)
        turns["torch.masked"] = _turn(lambda _: torch.run(np.zeros(1, np.int32))[0], PAUSE)
    return turns


def _turn(run: Callable[[Any], Any], pause: float = 0.0) -> Turn:
    return lambda _: mean_of_steps(run, range(_STEPS), pause)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=10_000_000, help="entries (10000000)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (15)")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    args = parser.parse_args()
    has_torch = (Path(__file__).parents[1] / ".venv-torch").exists()
    torch = Interpreter(".venv-torch", "torch_masked_worker.py") if has_torch else None

    report = Report("operation")
    for name in OPERATIONS:
        turns = contenders(name, args.size, torch)
        report.add(name, alternate(turns, range(args.rounds + WARM_UP)))
    report.show(args.json)
    if torch is not None:
        torch.close()


if __name__ == "__main__":
    main()
