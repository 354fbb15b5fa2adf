"""How a step gains from more cores: jmask, torch and FBGEMM, each on one core and on all.

    make bench-cores                     four works, about ten minutes on two cores

Every contender is a process of its own that is given its cores before it starts (Linux's
`taskset`), and all take turns. "gain" is the time on one core over that on all, the median of
the rounds: 1 is nothing, and the number of cores the most there can be. The last line is
the memory's own: where cores share what a core may wait for, as two threads of one do, work
that waits for memory gains nothing. What of a step of jmask runs on one core is in
docs/performance.md. The table goes to `benchmarks/results/cores.md`.
"""

import argparse
import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from batches import bag_batches, batches
from c_loop import seconds_of_random_reads
from contenders import RemoteContender, worker_of
from other_interpreter import Interpreter
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from side_by_side import alternate, mean_of_steps
from works import BAGS, DLRM, OFFERS, Task, title

_OPTIMIZERS = ("SGD", "Adagrad", "row-wise Adagrad", "Adam")
_STEPS = 4
_WARM_UP = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help="default: 6")
    parser.add_argument("--only", default="", help="works whose names hold this, as 'DLRM'")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    works = [Task(), Task(lookups=65_536), BAGS, DLRM]
    works = [replace(x, optimizer=optimizer) for x in works for optimizer in _OPTIMIZERS]
    works = [x for x in works if args.only in title(x)]

    table = Table("work", "who", "ms on one core", f"on {os.cpu_count()}", "gain")
    for work in track(works, "measuring"):
        for who in ("jmask", "torch", "FBGEMM"):
            if who == "jmask" or work.optimizer in OFFERS[who]:
                one, every = _seconds(replace(work, who=who), args.rounds)
                cells = (1e3 * np.median(one), 1e3 * np.median(every), np.median(one / every))
                table.add_row(title(work), who, *(f"{x:.3g}" for x in cells))
    with contextlib.suppress(ImportError):  # without a C compiler
        one, every = (seconds_of_random_reads(x) for x in (1, os.cpu_count() or 1))
        cells = (f"{x:.3g}" for x in (1e3 * one, 1e3 * every, one / every))
        table.add_row("a million random lines of memory", "C loop", *cells)
    Console(width=120).print(table)
    table.box = box.MARKDOWN
    with (args.out / "cores.md").open("w") as file:
        Console(file=file, width=160).print(table)


def _seconds(task: Task, rounds: int) -> list[np.ndarray]:
    """Of each round: on one core, and on all."""
    interpreters = [
        Interpreter(None, "jmask_worker.py", cores)
        if task.who == "jmask"
        else worker_of(task.who, cores)
        for cores in (1, os.cpu_count())
    ]
    return seconds_of_steps(task, interpreters, rounds)


def seconds_of_steps(
    task: Task, interpreters: Sequence[Interpreter], rounds: int
) -> list[np.ndarray]:
    """Of each round, for each of several workers, which take turns and are closed."""
    runs = [RemoteContender(interpreter, task) for interpreter in interpreters]
    count = (rounds + _WARM_UP) * _STEPS
    draw = partial(batches, task.ids, task.rows)
    if task.bags:
        draw = partial(bag_batches, task.rows, task.tables, task.bags)
    ids = draw(task.lookups, count)
    turns = {
        number: lambda k, run=run: mean_of_steps(run, ids[k * _STEPS :][:_STEPS], run.pause)
        for number, run in enumerate(runs)
    }
    seconds = alternate(turns, range(rounds + _WARM_UP), _WARM_UP)
    for interpreter in interpreters:
        interpreter.close()
    return list(seconds.values())


if __name__ == "__main__":
    main()
