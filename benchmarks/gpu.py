"""Training steps on one GPU, measured, beside torch, dense optax and what memory allows.

    python benchmarks/gpu.py                       every case, on the GPU that JAX finds
    python benchmarks/gpu.py --cases adam --rounds 3

Contenders take turns on batches of ids that are on the device already. A turn is a number of
steps that are dispatched one after the other, and one wait for the last of them: a step takes
the longer of what Python needs to dispatch it and what the device needs to compute it. "Device"
is the sum of its kernels in a profile, which Python's time is no part of. The limit is what a
copy of memory would take for the bytes that must move: each row of parameter and slots that is
in the batch, read once and written once. torch takes part where it is installed, with CUDA.
Results go to `benchmarks/results/gpu.md`.
"""

import argparse
import collections
import importlib.util
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too

import jax
import jax.numpy as jnp
import numpy as np
import optax
from batches import batches
from jax_contenders import JMASK, OPTAX
from works import OFFERS

import jmask

RESULTS = Path(__file__).parent / "results" / "gpu.md"
RATE = 0.01
LIFTED, DEFERRED = "lazy(optax.adam)", "deferred Adam"
OURS = {**JMASK, LIFTED: lambda rate: jmask.lazy(optax.adam(rate)), DEFERRED: JMASK["Adam"]}
# The tables of D columns that each reads and writes.
TABLES = {"SGD": 1, "Adagrad": 2, "row-wise Adagrad": 1, "Adam": 3, LIFTED: 3, DEFERRED: 3}


@dataclass(frozen=True)
class Case:
    optimizer: str = "Adam"
    rows: int = 5_000_000
    width: int = 128
    lookups: int = 65_536
    ids: str = "uniform"
    bag: int = 0

    def __str__(self) -> str:
        bags = f" in bags of {self.bag}" if self.bag else ""
        table = f"{self.rows:.0e} x {self.width}".replace("e+0", "e")
        return f"{self.optimizer}, {table}, {self.lookups:,} {self.ids} ids{bags}"


CASES = [
    *(Case(name) for name in TABLES),
    Case(lookups=8_192),
    Case(DEFERRED, lookups=8_192),
    Case(lookups=1_048_576),
    Case(ids="Zipf"),
    Case(lookups=1_048_576, ids="Zipf"),
    Case("SGD", lookups=1_048_576, ids="Zipf"),
    Case(width=32),
    Case(bag=32),
    Case("SGD", bag=32),
]


def loss(case: Case, table: jax.Array, ids: jax.Array) -> jax.Array:
    """A sum of squares of rows or of sums of rows."""
    if case.bag:
        return jnp.sum(jmask.embedding_bag(table, ids.reshape(-1, case.bag)) ** 2)
    return jnp.sum(table[ids] ** 2)


def dense_loss(case: Case, table: jax.Array, ids: jax.Array) -> jax.Array:
    """The same without jmask."""
    rows = table[ids]
    return jnp.sum((rows.reshape(-1, case.bag, case.width).sum(1) if case.bag else rows) ** 2)


class JaxStep:
    """A jitted, donated step; `run` returns what to wait for."""

    def __init__(self, case: Case, tx: Any, value_and_grad: Callable, of: Callable):
        table: Any = jnp.full((case.rows, case.width), 0.5)
        tx = jmask.deferred(tx) if case.optimizer == DEFERRED else tx
        self.place = (table, tx.init(table))

        @partial(jax.jit, donate_argnums=0)
        def step(place: Any, ids: jax.Array) -> Any:
            table, state = place
            if case.optimizer == DEFERRED:
                table, state = tx.catch_up(table, state, ids)
            value, grads = value_and_grad(partial(of, case))(table, ids)
            if value_and_grad is jmask.value_and_grad:
                return jmask.apply_gradients(tx, grads, state, table), value
            updates, state = tx.update(grads, state, table)
            return (optax.apply_updates(table, updates), state), value

        ids = jax.ShapeDtypeStruct((case.lookups,), jnp.int32)
        self.step = step.lower(self.place, ids).compile()

    def run(self, ids: list[jax.Array]) -> None:
        for x in ids:
            self.place, value = self.step(self.place, x)
        jax.block_until_ready((self.place, value))

    def put(self, ids: np.ndarray) -> jax.Array:
        return jnp.asarray(ids)


class TorchStep:
    """torch's sparse gradients and optimizers."""

    def __init__(self, case: Case, name: str):
        import torch

        self.case, self.torch = case, torch
        start = torch.full((case.rows, case.width), 0.5, device="cuda")
        kind = torch.nn.EmbeddingBag if case.bag else torch.nn.Embedding
        more = {"mode": "sum"} if case.bag else {}
        self.embedding = kind.from_pretrained(start, freeze=False, sparse=True, **more)
        self.rule = getattr(torch.optim, name)([self.embedding.weight], lr=RATE)

    def run(self, ids: list[Any]) -> None:
        for x in ids:
            self.rule.zero_grad()
            self.embedding(x).square().sum().backward()
            self.rule.step()
        self.torch.cuda.synchronize()

    def put(self, ids: np.ndarray) -> Any:
        x = self.torch.from_numpy(ids.astype(np.int64)).cuda()
        return x.reshape(-1, self.case.bag) if self.case.bag else x


@contextmanager
def kernels_off() -> Any:
    """Lower with jmask's second form: see docs/tpu.md."""
    os.environ["JMASK_KERNELS"] = "0"
    try:
        yield
    finally:
        del os.environ["JMASK_KERNELS"]


def contenders(case: Case, peers: list[str]) -> dict[str, Any]:
    ours = OURS[case.optimizer](RATE)
    dense, torch_name = OPTAX.get(case.optimizer), OFFERS["torch"].get(case.optimizer)
    steps: dict[str, Any] = {"jmask": JaxStep(case, ours, jmask.value_and_grad, loss)}
    if "second form" in peers and case.optimizer != "SGD":  # a scatter-add has one form
        with kernels_off():
            steps["second form"] = JaxStep(case, ours, jmask.value_and_grad, loss)
    # The dense step costs the table, whatever the batch.
    if "optax" in peers and dense and case.lookups == Case.lookups and case.ids == Case.ids:
        steps["optax"] = JaxStep(case, dense(RATE), jax.value_and_grad, dense_loss)
    if "torch" in peers and torch_name and importlib.util.find_spec("torch"):
        steps["torch"] = TorchStep(case, torch_name)
    return steps


def measured(steps: dict[str, Any], ids: list[np.ndarray], rounds: int) -> dict[str, float]:
    """Milliseconds of a step: the median of the rounds, in which the contenders take turns."""
    inputs = {name: [step.put(x) for x in ids] for name, step in steps.items()}
    counts = {}
    for name, step in steps.items():
        step.run(inputs[name][:2])
        start = time.perf_counter()
        step.run(inputs[name][:2])
        one = (time.perf_counter() - start) / 2
        counts[name] = max(2, min(len(ids), int(0.02 / one)))
    times = collections.defaultdict(list)
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step.run(inputs[name][: counts[name]])
            times[name].append((time.perf_counter() - start) / counts[name])
    return {name: 1e3 * float(np.median(t)) for name, t in times.items()}


def profiled(step: JaxStep, ids: list[np.ndarray]) -> dict[str, float]:
    """Milliseconds of each kernel in one step, the longest first."""
    inputs = [step.put(x) for x in ids]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step.run(inputs)
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    times: dict[str, float] = collections.Counter()
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    for event in line.events:
                        name = re.sub(r"[<(].*", "", event.name)
                        times[name] += event.duration_ns / 1e6 / len(ids)
    return dict(sorted(times.items(), key=lambda pair: -pair[1]))


def copy_bandwidth() -> float:
    """Bytes per millisecond, read and written, of a copy of 4 GB."""
    x = jnp.zeros(2**30)
    one = jnp.float32(1)
    plus = jax.jit(jnp.add, donate_argnums=0)
    for _ in range(2):  # the first turn is the warm-up
        start = time.perf_counter()
        for _ in range(10):
            x = plus(x, one)
        x.block_until_ready()
        seconds = time.perf_counter() - start
    return 10 * 2 * x.nbytes / (1e3 * seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default="", help="words that a case has to have")
    parser.add_argument("--peers", nargs="*", default=["torch", "optax", "second form"])
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each step")
    args = parser.parse_args()
    device = jax.devices()[0]
    bandwidth = copy_bandwidth()
    lines = [
        f"{device.device_kind}, jax {jax.__version__}; a copy has {bandwidth / 1e9:.2f} TB/s.",
        'Milliseconds of a step; "device" is the sum of its kernels.',
        "",
        "| step | jmask | device | limit | second form | device | torch | dense optax |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for case in CASES:
        if args.cases.lower() not in str(case).lower():
            continue
        steps: dict[str, Any] = {}  # so that the tables of the last case are gone
        steps = contenders(case, args.peers)
        ids = batches(case.ids, case.rows, case.lookups, min(40, 8_388_608 // case.lookups))
        ms = measured(steps, ids, args.rounds)
        kernels = {
            name: profiled(steps[name], ids[:5])
            for name in ("jmask", "second form")
            if name in steps
        }
        unique = np.mean([np.unique(x).size for x in ids[:5]])
        limit = 2 * TABLES[case.optimizer] * unique * case.width * 4 / bandwidth
        figures = [
            ms["jmask"],
            sum(kernels["jmask"].values()),
            limit,
            ms.get("second form"),
            sum(kernels["second form"].values()) if "second form" in kernels else None,
            ms.get("torch"),
            ms.get("optax"),
        ]
        cells = ["" if x is None else f"{x:.3f}" for x in figures]
        lines.append(f"| {case} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
        if args.kernels:
            for name, times in kernels.items():
                listed = ", ".join(f"{k} {1e3 * t:.0f}" for k, t in list(times.items())[:9])
                print(f"    {name}, microseconds: {listed}", flush=True)
        if "torch" in steps:
            steps["torch"].torch.cuda.empty_cache()
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
