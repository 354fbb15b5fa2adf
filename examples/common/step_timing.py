"""Training steps that do the same in different ways, timed side by side."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

Step = Callable[[Any, Any, Any], tuple[Any, Any, jax.Array]]


class Comparison(NamedTuple):
    """The median seconds of each step, and how far apart their parameters ended."""

    seconds: dict[str, float]
    difference: float


def compare(
    steps: dict[str, Step], params: Any, opt_state: Any, batches: Sequence[Any], rounds: int = 3
) -> Comparison:
    """Run steps from the same state on the same batches, in alternating rounds."""
    copy = partial(jax.tree.map, jnp.copy)
    # The optimizer state fits both: `jmask.lazy` keeps the layout that optax gives it.
    states = {name: copy((params, opt_state)) for name in steps}
    times: dict[str, list[float]] = {name: [] for name in steps}
    # A round more, for the warm-up.
    for round_number in range(rounds + 1):
        for name, step in steps.items():
            for batch in batches:
                start = time.perf_counter()
                params, opt_state, _ = step(*states[name], batch)
                states[name] = jax.block_until_ready((params, opt_state))
                if round_number > 0:
                    times[name].append(time.perf_counter() - start)
    first, *others = (params for params, _ in states.values())
    apart = [
        jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), first, other) for other in others
    ]
    seconds = {name: float(np.median(t)) for name, t in times.items()}
    return Comparison(seconds, difference=max(jax.tree.leaves(apart), default=0.0))


def timing_table(title: str, seconds: dict[str, float], reference: str, examples: int) -> Table:
    """Make a row for each step; ratios are to the step called `reference`."""
    table = Table(title=title, title_justify="left")
    table.add_column("step")
    for column in ("time", "examples/s", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, time_of_step in seconds.items():
        table.add_row(
            name,
            f"{1e3 * time_of_step:.2f} ms",
            f"{examples / time_of_step:,.0f}",
            f"{seconds[reference] / time_of_step:.1f}x",
        )
    return table
