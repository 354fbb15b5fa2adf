"""Timing side by side: alternating rounds in one process, ratios of the rounds.

A shared machine is slow and fast in turns. Contenders that take turns meet the same turns,
so that the ratio of two of them in one round means something where a time does not.
"""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

WARM_UP = 3


def alternate(
    contenders: dict[str, Callable[[Any], None]], inputs: Iterable[Any]
) -> dict[str, np.ndarray]:
    """Seconds of each contender on each input after the first few, which warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number, x in enumerate(inputs):
        for name, run in contenders.items():
            start = time.perf_counter()
            run(x)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return {name: np.array(times) for name, times in seconds.items()}


class Report:
    """A table of medians and ratios, and the same figures for a file."""

    def __init__(self, what: str, title: str | None = None):
        self.table = Table(
            what, "against", "jmask, ms", "theirs, ms", "ours / theirs (quartiles)", title=title
        )
        self.figures: dict[str, float] = {}

    def add(self, name: str, seconds: dict[str, np.ndarray]) -> None:
        """Rows for one piece of work; the contender "jmask" is compared with each other."""
        ours = seconds["jmask"]
        for peer, theirs in seconds.items():
            if peer == "jmask":
                continue
            low, middle, high = np.percentile(ours / theirs, [25, 50, 75])
            self.figures[f"{name} / {peer}"] = round(float(middle), 3)
            self.table.add_row(
                name,
                peer,
                f"{1e3 * np.median(ours):.2f}",
                f"{1e3 * np.median(theirs):.2f}",
                f"{middle:.2f}  ({low:.2f} to {high:.2f})",
            )

    def show(self, path: Path | None) -> None:
        """Print the table; write the ratios to `path` if there is one."""
        Console(width=110).print(self.table)
        if path is not None:
            path.write_text(json.dumps(self.figures, indent=1) + "\n")
