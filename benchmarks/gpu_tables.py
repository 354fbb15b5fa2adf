"""Ten tables on one GPU, beside FBGEMM's table-batched operator with its own benchmark's work.

    python benchmarks/gpu_tables.py                 needs torch with CUDA and fbgemm-gpu
    python benchmarks/gpu_tables.py --cases SGD --rounds 3

The work: 1,048,570 ids of ten tables of 1.68·10⁶ x 128, some 350,000 of them distinct (a power
law of exponent 1.05), forwards, backwards and the update. What comes back to the rows is given,
so that no loss is computed: the step returns all rows, or sums of bags, and takes a gradient of
their shape. Both sides start from the same tables, and one step of each is compared before
they are timed, in turns, on batches that are on the device already.
"""

import argparse
import collections
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too

import jax
import jax.numpy as jnp
import numpy as np
import torch
from gpu import profiled
from jax_contenders import JMASK

import jmask

RESULTS = Path(__file__).parent / "results" / "gpu_tables.md"
TABLES, ROWS, WIDTH, BATCHES = 10, 1_680_000, 128, 8
RATE = 0.01
THEIRS = {
    "SGD": "EXACT_SGD",
    "Adam": "ADAM",
    "Adagrad": "EXACT_ADAGRAD",
    "row-wise Adagrad": "EXACT_ROWWISE_ADAGRAD",
}
# Lookups, each a bag of its own, and bags of 32.
CASES = [(name, bag) for name in THEIRS for bag in (1, 32)]


def batches(lookups: int) -> list[np.ndarray]:
    """Ids (tables, lookups): the k-th most frequent one as (k + 0.3)^-1.05, in any order."""
    rng = np.random.default_rng(0)
    cumulated = np.cumsum((np.arange(1, ROWS + 1) + 0.3) ** -1.05)
    scattered = rng.permutation(ROWS).astype(np.int32)

    def draw() -> np.ndarray:
        ranks = np.searchsorted(cumulated, cumulated[-1] * rng.random((TABLES, lookups)))
        return scattered[np.minimum(ranks, ROWS - 1)]

    return [draw() for _ in range(BATCHES)]


class Jmask:
    """A jitted, donated step on ten arrays, or on one stack (tables, rows, width)."""

    def __init__(self, name: str, bag: int, stacked: bool):
        tx = JMASK[name](RATE)
        tables: Any = jnp.full((TABLES, ROWS, WIDTH), 0.5)
        tables = tables if stacked else [tables[k] for k in range(TABLES)]

        def rows_and_gradients(tables: Any, ids: jax.Array, back: Any) -> Any:
            if bag > 1:
                bags = ids.reshape(TABLES, -1, bag)

                def loss(tables: Any) -> Any:
                    if stacked:
                        sums = jax.vmap(jmask.embedding_bag)(tables, bags)
                    else:
                        pairs = zip(tables, bags, strict=True)
                        sums = [jmask.embedding_bag(t, x) for t, x in pairs]
                    return sum(jnp.vdot(x, y) for x, y in zip(sums, back, strict=True)), sums

                grads, sums = jmask.grad(loss, has_aux=True)(tables)
                return sums, grads
            # A gradient that is given needs no loss; the barrier has rows read before any is
            # written, as `jmask.grad` does.
            if stacked:
                rows = tables[jnp.arange(TABLES)[:, None], ids]
                rows, ids = jax.lax.optimization_barrier((rows, ids))
                flat = (jnp.arange(TABLES, dtype=jnp.int32)[:, None] * ROWS + ids).ravel()
                values = back.reshape(-1, WIDTH)
                return rows, jmask.RowSparse(flat, values, (TABLES, ROWS, WIDTH), leading=2)
            rows = [t[x] for t, x in zip(tables, ids, strict=True)]
            rows, ids = jax.lax.optimization_barrier((rows, ids))
            pairs = zip(ids, back, strict=True)
            return rows, [jmask.RowSparse(x, y, (ROWS, WIDTH)) for x, y in pairs]

        @partial(jax.jit, donate_argnums=0)
        def step(place: Any, ids: jax.Array, back: Any) -> Any:
            tables, state = place
            rows, grads = rows_and_gradients(tables, ids, back)
            return jmask.apply_gradients(tx, grads, state, tables), rows

        self.place, self.step, self.bag = (tables, tx.init(tables)), step, bag
        shape = TABLES, lookups_of(bag) // bag, WIDTH
        given = jax.random.normal(jax.random.key(0), shape)
        self.back = given if stacked else list(given)

    def run(self, ids: list[Any]) -> None:
        for x in ids:
            self.place, rows = self.step(self.place, x, self.back)
        jax.block_until_ready((self.place, rows))

    def put(self, ids: np.ndarray) -> Any:
        return jnp.asarray(ids)

    def rows(self, table: int, ids: np.ndarray) -> np.ndarray:
        return np.asarray(self.place[0][table][ids])


class Fbgemm:
    """FBGEMM's operator, which updates while it goes backwards."""

    def __init__(self, name: str, bag: int, back: list[jax.Array]):
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            EmbeddingLocation,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.bag = bag
        self.embedding = SplitTableBatchedEmbeddingBagsCodegen(
            [(ROWS, WIDTH, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * TABLES,
            optimizer=EmbOptimType[THEIRS[name]],
            learning_rate=RATE,
            eps=1e-8,
            pooling_mode=PoolingMode.SUM,
        )
        for weights in self.embedding.split_embedding_weights():
            weights.fill_(0.5)
        given = np.concatenate(back, axis=1)
        self.back = torch.from_numpy(given.copy()).cuda()
        count = TABLES * given.shape[0]
        self.offsets = torch.arange(count + 1, device="cuda") * bag

    def run(self, ids: list[Any]) -> None:
        for x in ids:
            self.embedding(x, self.offsets).backward(self.back)
        torch.cuda.synchronize()

    def put(self, ids: np.ndarray) -> Any:
        return torch.from_numpy(ids.astype(np.int64).ravel()).cuda()

    def rows(self, table: int, ids: np.ndarray) -> np.ndarray:
        weights = self.embedding.split_embedding_weights()[table]
        return weights[torch.from_numpy(ids.astype(np.int64)).cuda()].detach().cpu().numpy()

    def kernels(self, ids: list[Any]) -> dict[str, float]:
        """Milliseconds of each kernel in one step, the longest first."""
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA]) as profile:
            self.run(ids)
        times: dict[str, float] = collections.Counter()
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                times[event.name.split("<")[0][-60:]] += event.device_time / 1e3 / len(ids)
        return dict(sorted(times.items(), key=lambda pair: -pair[1]))


def lookups_of(bag: int) -> int:
    return 104_857 if bag == 1 else 3_277 * bag


def turns(steps: dict[str, Any], inputs: dict[str, list[Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of a step: the median of the rounds, in which the contenders take turns."""
    times = collections.defaultdict(list)
    for k in range(rounds + 1):  # the first round is the warm-up
        for name, step in steps.items():
            start = time.perf_counter()
            step.run(inputs[name] * 3)
            if k:
                times[name].append((time.perf_counter() - start) / (3 * len(inputs[name])))
    return {name: 1e3 * float(np.median(t)) for name, t in times.items()}


def show(kernels: dict[str, dict[str, float]]) -> None:
    """Print the longest kernels of each contender."""
    for kind, times in kernels.items():
        listed = ", ".join(f"{k} {1e3 * t:.0f}" for k, t in list(times.items())[:14])
        print(f"    {kind}, microseconds: {listed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="", help="a word that the optimizer has to have")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of each step")
    args = parser.parse_args()
    ids = {bag: batches(lookups_of(bag)) for bag in (1, 32)}
    distinct = sum(np.unique(x).size for x in ids[1][0])
    lines = [
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}; {ids[1][0].size:,} ids, "
        f"{distinct:,} of them distinct.",
        'Milliseconds of a step; "device" is the sum of its kernels.',
        "",
        "| step | ten arrays | device | a stack | device | FBGEMM | device | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    cases = [(name, bag) for name, bag in CASES if args.cases.lower() in name.lower()]
    figures: dict[tuple[str, int], list[float]] = {}
    for name, bag in cases:
        steps: dict[str, Any] = {}  # so that the tables of the last case are gone
        steps = {kind: Jmask(name, bag, kind == "stack") for kind in ("arrays", "stack")}
        steps["FBGEMM"] = Fbgemm(name, bag, steps["arrays"].back)
        inputs = {kind: [step.put(x) for x in ids[bag]] for kind, step in steps.items()}
        for kind, step in steps.items():
            step.run(inputs[kind][:1])
        some = ids[bag][0][3][:1000]
        found = {kind: step.rows(3, some) for kind, step in steps.items()}
        apart = max(
            float(np.abs(found[k] - found["FBGEMM"]).max()) for k in ("arrays", "stack")
        )
        ms = turns(steps, inputs, args.rounds)
        kernels = {kind: profiled(steps[kind], ids[bag]) for kind in ("arrays", "stack")}
        device = {kind: sum(times.values()) for kind, times in kernels.items()}
        figures[name, bag] = [
            *(x for kind in device for x in (ms[kind], device[kind])),
            ms["FBGEMM"],
            apart,
        ]
        print(name, bag, figures[name, bag], flush=True)
        if args.kernels:
            show(kernels)
        del steps["FBGEMM"]
        torch.cuda.empty_cache()
    # torch's profiler keeps JAX from profiling after it.
    for name, bag in cases:
        again = Fbgemm(name, bag, Jmask(name, bag, stacked=False).back)
        put = [again.put(x) for x in ids[bag]]
        again.run(put)
        times = again.kernels(put)
        if args.kernels:
            show({f"FBGEMM {name} {bag}": times})
        *ours, apart = figures[name, bag]
        cells = [f"{x:.3f}" for x in (*ours, sum(times.values()))]
        bags = f", bags of {bag}" if bag > 1 else ""
        lines.append(f"| {name}{bags} | {' | '.join(cells)} | {apart:.1e} |")
        print(lines[-1], flush=True)
        del again
        torch.cuda.empty_cache()
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
