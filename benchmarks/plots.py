"""Three plots of what was measured; every axis is a ratio, none a time."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from works import OPTIMIZERS, REFERENCE, Task

mpl.use("Agg")
# The same colour for the same library in every plot.
_COLORS = {
    who: f"C{i}" for i, who in enumerate(("jmask", "torch", "optax", "TensorFlow", "MXNet"))
}

Seconds = dict[Task, np.ndarray]
Curves = dict[str, dict[int, float]]


def curves(measured: Iterable[Seconds], field: str) -> Curves:
    """Time of a step over that of `REFERENCE` in its rounds, where only `field` differs."""
    found: Curves = {}
    for seconds in measured:
        for task in seconds if REFERENCE in seconds else ():
            usual = {"who": REFERENCE.who, field: getattr(REFERENCE, field)}
            if replace(task, **usual) == REFERENCE:
                ratio = float(np.median(seconds[task] / seconds[REFERENCE]))
                found.setdefault(task.who, {})[getattr(task, field)] = round(ratio, 3)
    return {who: dict(sorted(points.items())) for who, points in found.items()}


def shares(measured: Iterable[Seconds], limit: str) -> dict[str, float]:
    """For each optimizer the time of the limit over ours, in percent, for the usual update.

    From the first comparison of both: a later one has larger tables beside them.
    """
    found: dict[str, float] = {}
    for seconds in measured:
        for task, times in seconds.items():
            ours = replace(task, who="jmask")
            if task.who == limit and replace(ours, work="step", ids="uniform") == replace(
                REFERENCE, optimizer=task.optimizer
            ):
                share = 100 * float(np.median(times / seconds[ours]))
                found.setdefault(task.optimizer, share)
    return {optimizer: found[optimizer] for optimizer in OPTIMIZERS if optimizer in found}


def save_plots(measured: list[Seconds], folder: Path) -> None:
    for name, field, label in (
        ("step_against_rows", "rows", "rows of the table"),
        ("step_against_lookups", "lookups", "lookups in a batch"),
    ):
        figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
        for who, points in curves(measured, field).items():
            if len(points) > 1:
                line = {"label": who, "color": _COLORS[who]}
                axes.loglog(list(points), list(points.values()), "o-", **line)
        usual = getattr(REFERENCE, field)
        axes.set(xlabel=label, ylabel=f"time of an Adam step\n(jmask at {usual:,} = 1)")
        axes.legend(frameon=False)
        _save(figure, folder / f"{name}.png")

    figure, axes = plt.subplots(figsize=(5, 2.8), layout="constrained")
    for i, limit in enumerate(("C loop", "memory copy")):
        found = shares(measured, limit)
        places = [OPTIMIZERS.index(optimizer) + 0.38 * i for optimizer in found]
        axes.barh(places, list(found.values()), height=0.36, label=f"of a {limit}")
    axes.set_yticks(np.arange(len(OPTIMIZERS)) + 0.19, OPTIMIZERS)
    axes.invert_yaxis()
    axes.axvline(100, color="black", linewidth=1)
    axes.set(xlabel="update alone: % of the speed")
    figure.legend(frameon=False, loc="outside upper right", ncols=2)
    _save(figure, folder / "share_of_the_limit.png")


def _save(figure: plt.Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
