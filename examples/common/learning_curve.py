"""A picture of how a run went: its loss and its metric over the steps."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt


def save_curves(
    path: Path,
    steps: Sequence[int],
    loss: Sequence[float],
    metric: Sequence[float],
    name: str,
    lines: dict[str, float] | None = None,
) -> None:
    """Draw loss and metric side by side.

    Args:
        path: the PNG to write.
        steps, loss, metric: as many of each.
        name: of the metric.
        lines: heights at which to draw a line beside the metric, by what they mean.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(steps, loss, color="tab:blue")
    left.set(xlabel="step", ylabel="loss")
    right.plot(steps, metric, color="tab:orange")
    right.set(xlabel="step", ylabel=name)
    for label, height in (lines or {}).items():
        right.axhline(height, linestyle=":", color="grey")
        right.annotate(
            label,
            (0.99, height),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            color="grey",
        )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
