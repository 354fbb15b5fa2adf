"""What a run of ngram_memory.py found, as tables and as a picture."""

from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from rich.table import Table

Seconds = dict[tuple[str, int], float]
"""Of a step, by the kind of model and the rows of its memory; without memory comes first."""


class Curve(NamedTuple):
    """Bits per byte of the held-out text after so many seconds and steps of training."""

    seconds: list[float]
    bits: list[float]
    steps: list[int]


def training_table(title: str, curves: dict[str, Curve]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for column in ("trained", "steps", "bits per byte"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, curve in curves.items():
        seconds, bits, steps = (values[-1] for values in curve)
        table.add_row(name, f"{seconds:.0f} s", f"{steps:,}", f"{bits:.3f}")
    return table


def step_table(title: str, seconds: Seconds) -> Table:
    base = next(iter(seconds.values()))
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for column in ("rows", "time", "to that without"):
        table.add_column(column, justify="right", no_wrap=True)
    for (name, rows), time in seconds.items():
        size = f"{rows:,}" if rows else ""
        table.add_row(name, size, f"{1e3 * time:.1f} ms", f"{time / base:.2f}")
    return table


def save_plot(path: Path, curves: dict[str, Curve], seconds: Seconds) -> None:
    """Draw bits per byte over the time of training, and the time of a step over rows."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name, curve in curves.items():
        left.plot(curve.seconds[1:], curve.bits[1:], "o-", markersize=3, label=name)
    left.set(xlabel="seconds of training", ylabel="bits per byte, held out")
    left.legend(frameon=False)
    for number, name in enumerate(curves):
        style = {"color": f"C{number}", "label": name}
        sizes = sorted((rows, 1e3 * time) for (n, rows), time in seconds.items() if n == name)
        if number == 0 and sizes:
            right.axhline(sizes[0][1], linestyle=":", **style)
        elif sizes:
            right.plot(*zip(*sizes, strict=True), "o-", markersize=3, **style)
    right.set(xscale="log", xlabel="rows of the memory", ylabel="ms for a step")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
