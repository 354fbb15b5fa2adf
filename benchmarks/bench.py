"""jmask beside its peers and beside the limit, in alternating rounds of one process.

    python benchmarks/bench.py --quick              under two minutes
    python benchmarks/bench.py --out benchmarks/results

A table of ratios (medians of the rounds, with quartiles), the same as JSON, and three plots:
the time of a step against the number of rows, against the number of lookups, and the share
of the limit. Ratios of one run mean something; times of a shared machine do not.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import contenders
import jax
import matplotlib.pyplot as plt
import numpy as np
from c_loop import LOOPS, c_update, copy_bandwidth
from side_by_side import WARM_UP, Report, alternate

V, D, N = 1_000_000, 64, 8192
PEERS = {
    "torch": (contenders.torch_step, contenders.TORCH),
    "FBGEMM": (contenders.fbgemm_step, contenders.FBGEMM),
}


def uniform(rows: int, count: int, rounds: int) -> Iterable[np.ndarray]:
    rng = np.random.default_rng(0)
    return (rng.integers(0, rows, count).astype(np.int32) for _ in range(rounds + WARM_UP))


def zipf(rows: int, count: int, rounds: int) -> Iterable[np.ndarray]:
    """Hot rows first: the id k in proportion to 1 / k, spread over the table."""
    rng = np.random.default_rng(0)
    scattered = rng.permutation(rows).astype(np.int32)
    for _ in range(rounds + WARM_UP):
        rank = np.exp(rng.uniform(0, np.log(rows), count)).astype(np.int64) - 1
        yield scattered[np.clip(rank, 0, rows - 1)]


def unique(rows: int, count: int, rounds: int) -> Iterable[np.ndarray]:
    rng = np.random.default_rng(0)
    for _ in range(rounds + WARM_UP):
        yield np.sort(rng.choice(rows, count, replace=False)).astype(np.int32)


class Bench:
    """The sections of the benchmark; each adds rows to the report."""

    def __init__(self, rounds: int, quick: bool):
        self.rounds, self.quick = rounds, quick
        self.report = Report("work", f"V = {V:,}, D = {D}, n = {N:,} unless said otherwise")
        self.missing: set[str] = set()

    def available(self, name: str, build: Callable, *args) -> dict[str, Callable]:
        try:
            return {name: build(*args)}
        except ImportError as error:
            self.missing.add(f"{name}: {error}")
            return {}

    def against_peers(self) -> None:
        for optimizer in contenders.JMASK:
            steps = {"jmask": contenders.jmask_step(optimizer, V, D)}
            for peer, (build, known) in PEERS.items():
                if optimizer in known:
                    name = f"{peer} {known[optimizer]}"
                    steps |= self.available(name, build, optimizer, V, D)
            if len(steps) > 1:
                batches = uniform(V, N, self.rounds)
                self.report.add(f"step, {optimizer}", alternate(steps, batches))

    def against_the_limit(self) -> None:
        for optimizer in LOOPS:
            steps = {"jmask": contenders.jmask_update(optimizer, V, D)}
            steps |= self.available("C loop", c_update, optimizer, V, D)
            batches = unique(V, N, self.rounds)
            self.report.add(f"update, {optimizer}", alternate(steps, batches))

    def against_dense(self) -> None:
        rows = 10_000
        steps = {
            "jmask": contenders.jmask_step("Adam", rows, D),
            "optax, dense": contenders.optax_step("Adam", rows, D),
        }
        times = alternate(steps, unique(rows, N, self.rounds))
        self.report.add("step, Adam, V = 10,000, 82 % touched", times)

    def growth(self) -> dict[str, dict[int, float]]:
        """Milliseconds of an Adam step against V."""
        sizes = (10_000, 100_000, V) if self.quick else (10_000, 100_000, V, 10 * V)
        curves: dict[str, dict[int, float]] = {}
        for rows in sizes:
            steps = {"jmask": contenders.jmask_step("Adam", rows, D)}
            if rows <= V:  # two tables of 10^7 rows with their moments are 15 GB
                steps |= self.available("torch", contenders.torch_step, "Adam", rows, D)
            if rows <= 100_000:
                steps["optax, dense"] = contenders.optax_step("Adam", rows, D)
            times = alternate(steps, uniform(rows, N, self.rounds))
            for name, seconds in times.items():
                curves.setdefault(name, {})[rows] = 1e3 * float(np.median(seconds))
        ours = curves["jmask"]
        self.report.figures["Adam step, largest V / V = 10^6"] = round(
            ours[sizes[-1]] / ours[V], 3
        )
        return curves

    def lookups(self) -> dict[str, dict[int, float]]:
        """Milliseconds of an Adam step against n."""
        curves: dict[str, dict[int, float]] = {}
        for count in (1_000, 10_000) if self.quick else (1_000, 10_000, 100_000):
            steps = {"jmask": contenders.jmask_step("Adam", V, D)}
            steps |= self.available("torch", contenders.torch_step, "Adam", V, D)
            for name, seconds in alternate(steps, uniform(V, count, self.rounds)).items():
                curves.setdefault(name, {})[count] = 1e3 * float(np.median(seconds))
        return curves

    def hot_rows(self) -> None:
        """The same step on Zipf and on uniform ids, in turns."""
        step = contenders.jmask_step("Adam", V, D)
        batches = zip(zipf(V, N, self.rounds), uniform(V, N, self.rounds), strict=True)
        steps = {
            "jmask": lambda pair: step(pair[0]),
            "jmask, uniform ids": lambda pair: step(pair[1]),
        }
        self.report.add("step, Adam, Zipf ids", alternate(steps, batches))


def save_plots(curves: dict, lookups: dict, figures: dict[str, float], folder: Path) -> None:
    for name, label, lines in (
        ("step_against_rows", "rows of the table", curves),
        ("step_against_lookups", "lookups in a batch", lookups),
    ):
        figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
        for contender, points in lines.items():
            axes.loglog(list(points), list(points.values()), "o-", label=contender)
        axes.set(xlabel=label, ylabel="ms for a step (Adam)")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)
    limits = {
        k.split(",")[1].split("/")[0].strip(): 1 / v
        for k, v in figures.items()
        if "C loop" in k
    }
    if limits:
        figure, axes = plt.subplots(figsize=(5, 2.2), layout="constrained")
        axes.barh(list(limits), [100 * share for share in limits.values()])
        axes.axvline(100, color="black", linewidth=1)
        axes.set(xlabel="update alone: % of the speed of a fused C loop")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / "share_of_the_limit.png", dpi=150)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--rounds", type=int, help="default: 30, or 10 with --quick")
    parser.add_argument("--out", type=Path, help="folder for bench.json and the plots")
    args = parser.parse_args()
    bench = Bench(args.rounds or (10 if args.quick else 30), args.quick)
    bench.against_peers()
    bench.against_the_limit()
    bench.against_dense()
    bench.hot_rows()
    curves, lookups = bench.growth(), bench.lookups()
    figures = bench.report.figures
    figures["copy bandwidth, GB/s"] = round(copy_bandwidth() / 1e9, 1)
    bench.report.show(None)
    for line in sorted(bench.missing):
        print("left out:", line)
    print("largest V against V = 10^6:", figures["Adam step, largest V / V = 10^6"])
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        contents = {
            "jax": jax.__version__,
            "ratios": figures,
            "ms": {"V": curves, "n": lookups},
        }
        (args.out / "bench.json").write_text(json.dumps(contents, indent=1) + "\n")
        save_plots(curves, lookups, figures, args.out)


if __name__ == "__main__":
    main()
