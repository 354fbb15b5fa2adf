"""jmask beside its peers and beside the limit, in alternating rounds of one invocation.

    make bench                                         about twenty minutes on two cores
    make bench ARGS=--quick                           about four minutes

`works.py` is the table of what is measured. A line of the report reads: this work takes jmask
"ours / theirs" of the time it takes the other, the median of the rounds, with the quartiles of
the rounds in parentheses. In each round everybody makes some steps, one after the other. Below
1 jmask is faster. Where there is a goal the ratio should not be above it. In particular

    a library          the same work, on the same ids, to the same loss
    jmask, without ... one of the ways around what XLA does slowly on CPUs: below 1 it pays
    C loop             the update alone beside what is possible: 1 is the limit of one core
    memory copy        the update alone beside a copy of as many bytes
    jmask, V = ...     what a larger table, a larger batch or hot rows cost: 1 is nothing

Read ratios, not milliseconds: times of a shared machine mean little, and quartiles far apart
say that even the ratio was disturbed: on a busy machine (the load before is printed and kept)
libraries whose threads wait for each other lose more than we do. Contenders that are not there
are named and left out. `bench.json`, `bench.md` and three plots go to `benchmarks/results`,
those of --quick and --only to folders of these names in it.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from batches import bag_batches, batches
from c_loop import copy_bandwidth
from contenders import WORKERS, Contender, RemoteContender, build, worker_of
from other_interpreter import Interpreter
from plots import Seconds, curves, save_plots
from rich.progress import track
from side_by_side import Report, alternate, mean_of_steps
from works import GOALS, REFERENCE, Comparison, Task, comparisons, opponent, title

import jmask

RESULTS = Path(__file__).parent / "results"
_SIZES = f"V = {REFERENCE.rows:,}, D = {REFERENCE.width}, n = {REFERENCE.lookups:,} uniform ids"

# Rounds that do not count, and steps of a turn.
_WARM_UP = 1
_STEPS = 4


class Bench:
    """Measures comparisons and reports them; says what is left out, and what does not fit."""

    def __init__(self, workers: dict[str, Interpreter]):
        self._workers = workers
        self._load = os.getloadavg()[0]
        self.report = Report("work", f"{_SIZES}, float32, unless said otherwise")
        self.measured: list[Seconds] = []
        self.missing: dict[str, str] = {}
        self.different: list[str] = []

    def measure(self, comparison: Comparison) -> None:
        ours, count = comparison.ours, comparison.rounds + _WARM_UP
        if comparison.is_large:
            # They keep what they have freed to themselves.
            for worker in self._workers.values():
                worker.close()
        with contextlib.ExitStack() as stack:
            found = {}
            for task in (ours, *comparison.theirs):
                if task.who not in self.missing:
                    try:
                        found[task] = build(task, self._workers)
                    except ImportError as error:
                        self.missing[task.who] = str(error)
                    else:
                        stack.callback(found[task].close)
            if len(found) == 1:
                return
            turns = {task: _turns(run, task, count) for task, run in found.items()}
            seconds = alternate(turns, range(count), _WARM_UP)
            self._check_losses(ours, {task: run.loss for task, run in found.items()})
        gc.collect()  # tables of gigabytes must not wait
        self.measured.append(seconds)
        names = {task: opponent(task, ours) for task in seconds if task != ours}
        self.report.add(
            title(ours),
            {"jmask": seconds[ours], **{name: seconds[task] for task, name in names.items()}},
            {name: GOALS[ours, task] for task, name in names.items() if (ours, task) in GOALS},
        )

    def _check_losses(self, ours: Task, losses: dict[Task, float | None]) -> None:
        """Those that do the same work from the same start have the same last loss.

        Not optax, whose dense updates also move the rows that are not in the batch.
        """
        for task, loss in losses.items():
            how = {"who": ours.who, "without": ours.without}
            same_work = replace(task, **how) == ours and task.who != "optax"
            if not same_work or losses[ours] is None:
                continue
            # Sums of millions of float32 differ in the third digit.
            if loss is None or not np.isclose(loss, losses[ours], rtol=5e-3):
                self.different.append(f"{title(ours)}: {task.who} {loss}, jmask {losses[ours]}")

    def contents(self) -> dict:
        """What goes into the JSON file."""
        versions: dict[str, str | None] = {"Python": platform.python_version()}
        for package in ("jax", "jaxlib", "optax", "numpy"):
            versions[package] = importlib.metadata.version(package)
        versions |= {name: worker.version for name, worker in self._workers.items()}
        return {
            "machine": {
                "cores": os.cpu_count(),
                "architecture": platform.machine(),
                "load_before": round(self._load, 2),
            },
            "copy_gigabytes_per_second": round(copy_bandwidth() / 1e9, 1),
            "versions": versions,
            "left_out": self.missing,
            "ratios": self.report.rows,
            "step_over_reference": {
                field: curves(self.measured, field) for field in ("rows", "lookups")
            },
        }


def _turns(run: Contender | RemoteContender, task: Task, count: int) -> Callable[[int], float]:
    """The seconds of a step in turn k."""
    if task.bags:
        ids = bag_batches(task.rows, task.tables, task.bags, task.lookups, count * _STEPS)
    else:
        ids = batches(task.ids, task.rows, task.lookups, count * _STEPS)

    def turn(k: int) -> float:
        return mean_of_steps(run, ids[k * _STEPS : (k + 1) * _STEPS], run.pause)

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no matrix")
    parser.add_argument("--only", default="", help="works whose names hold this, as 'DLRM'")
    parser.add_argument("--rounds", type=int, help="default: 20, or 4 with --quick")
    parser.add_argument("--out", type=Path, help="folder of the results")
    args = parser.parse_args()
    part = "only" if args.only else "quick" if args.quick else ""
    folder = args.out or RESULTS / part

    jmask.keep_memory()  # as torch does
    workers = {who: worker_of(who) for who in WORKERS}
    bench = Bench(workers)
    every = comparisons(args.quick, args.rounds or (4 if args.quick else 20))
    wanted = [x for x in every if args.only in title(x.ours)]
    for comparison in track(wanted, "measuring"):
        bench.measure(comparison)

    folder.mkdir(parents=True, exist_ok=True)
    bench.report.show(None)
    contents = bench.contents()
    versions = [
        f"{name} {version}" for name, version in contents["versions"].items() if version
    ]
    bench.report.save_markdown(folder / "bench.md", f"With {'; '.join(versions)}.")
    (folder / "bench.json").write_text(json.dumps(contents, indent=1) + "\n")
    save_plots(bench.measured, folder)
    if folder == RESULTS:  # the first picture of the documentation
        shutil.copy(folder / "step_against_rows.png", RESULTS.parents[1] / "docs" / "images")
    for who, reason in bench.missing.items():
        print(f"left out: {who}: {reason}")
    for line in bench.different:
        print("NOT THE SAME WORK:", line)
    print(f"machine: {contents['machine']}")
    print(f"copy bandwidth: {contents['copy_gigabytes_per_second']} GB/s; results in {folder}")
    for worker in workers.values():
        worker.close()


if __name__ == "__main__":
    main()
