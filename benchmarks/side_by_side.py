"""Timing side by side: alternating rounds, ratios of the rounds.

A shared machine is slow and fast in turns. Contenders that take turns meet the same turns,
so that the ratio of two of them in one round means something where a time does not. pyperf and
asv run each benchmark to its end before the next one begins (asv can interleave processes, not
steps), and know no ratio of rounds.
"""

import io
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

WARM_UP = 3
# Seconds before each run: threads of the one before it that still spin would be in its way.
_PAUSE = 0.005

Name = TypeVar("Name")


def alternate(
    contenders: Mapping[Name, Callable[[Any], Any]],
    inputs: Iterable[Any],
    warm_up: int = WARM_UP,
) -> dict[Name, np.ndarray]:
    """Seconds of each contender on each input after the first `warm_up`."""
    seconds: dict[Name, list[float]] = {name: [] for name in contenders}
    for number, x in enumerate(inputs):
        for name, run in contenders.items():
            time.sleep(_PAUSE)
            taken = seconds_of(run, x)
            if number >= warm_up:
                seconds[name].append(taken)
    return {name: np.array(times) for name, times in seconds.items()}


def mean_of_steps(run: Callable[[Any], Any], inputs: Sequence[Any], pause: float) -> float:
    """The seconds of a step in a turn of several, of which the first does not count.

    Training makes one step after the other, and the first finds threads asleep and caches that
    others have filled. After the turn comes a pause of so many seconds.
    """
    seconds = [seconds_of(run, x) for x in inputs]
    time.sleep(pause)
    return float(np.mean(seconds[1:]))


def seconds_of(run: Callable[[Any], Any], x: Any) -> float:
    """How long `run(x)` takes. One that measures itself returns its seconds, as a float."""
    start = time.perf_counter()
    own = run(x)
    elapsed = time.perf_counter() - start
    return own if isinstance(own, float) else elapsed


class Report:
    """A table of medians and ratios, and the same figures for a file.

    Args:
        what: heading of the first column.
        title: of the table.

    Attributes:
        rows: a dictionary of figures for each line of the table.
    """

    def __init__(self, what: str, title: str | None = None):
        self._what, self._title = what, title
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        seconds: dict[str, np.ndarray],
        goals: Mapping[str, float] | None = None,
    ) -> None:
        """Rows for one piece of work; the contender "jmask" is compared with each other.

        Args:
            name: of the work.
            seconds: from `alternate`.
            goals: for some of the others, the ratio that ours / theirs should not exceed.
        """
        ours = seconds["jmask"]
        for peer, theirs in seconds.items():
            if peer != "jmask":
                quartiles = np.percentile(ours / theirs, [25, 50, 75])
                low, middle, high = (round(float(q), 3) for q in quartiles)
                self.rows.append(
                    {
                        "work": name,
                        "against": peer,
                        "ratio": middle,
                        "quartiles": [low, high],
                        "rounds": len(ours),
                        "goal": (goals or {}).get(peer),
                        "ours_ms": round(1e3 * float(np.median(ours)), 4),
                        "theirs_ms": round(1e3 * float(np.median(theirs)), 4),
                    }
                )

    def table(self, **style: Any) -> Table:
        """The rows for rich; a column of goals if there are any."""
        heading = (
            self._what,
            "against",
            "jmask, ms",
            "theirs, ms",
            "ours / theirs (quartiles)",
        )
        goals = any(row["goal"] is not None for row in self.rows)
        table = Table(*heading, *(["goal"] if goals else []), **style)
        for row in self.rows:
            low, high = row["quartiles"]
            cells = [
                row["work"],
                row["against"],
                f"{row['ours_ms']:.2f}",
                f"{row['theirs_ms']:.2f}",
                f"{row['ratio']:.2f}  ({low:.2f} to {high:.2f})",
            ]
            if goals and row["goal"] is not None:
                verdict = "met" if row["ratio"] <= row["goal"] else "missed"
                cells.append(f"{row['goal']:g}, {verdict}")
            table.add_row(*cells)
        return table

    def show(self, path: Path | None) -> None:
        """Print the table; write the ratios to `path` if there is one."""
        Console(width=140).print(self.table(title=self._title))
        if path is not None:
            ratios = {f"{row['work']} / {row['against']}": row["ratio"] for row in self.rows}
            path.write_text(json.dumps(ratios, indent=1) + "\n")

    def save_markdown(self, path: Path, note: str = "") -> None:
        """Write the table as Markdown, with a note above it."""
        text = io.StringIO()
        Console(file=text, width=200).print(self.table(box=box.MARKDOWN))
        lines = [line.strip() for line in text.getvalue().splitlines()]
        head = [x for text in (self._title, note) if text for x in (text, "")]
        path.write_text("\n".join([*head, *filter(None, lines)]) + "\n")
