"""LightGCN: what a file imports, from what files like it import.

    python examples/light_gcn/train.py              the Python sources on this machine

Files and modules are vectors; a file should import the modules whose vectors fit best. With
the graph, a vector is a row of a table plus the rows of its neighbours, scaled. What that
makes of the gradient depends on how it is written:

    factorization      rows of the batch                              row-sparse
    all of the graph   all vectors first, then those of the batch     dense: every row is read
    8 neighbours       rows of the batch, and of 8 neighbours each    row-sparse

Nothing is to be saved where every row is read, so the second way trains with stock JAX and
optax. The last one draws neighbours at random and weights them so that their sum is right on
the average: a weighted bag. The run trains all three, prints how often a held-out import is
among the 20 best (recall@20) and what a step takes, here and with a million files, and draws
the curves. Adagrad does the same to both kinds of gradient.

References:
    He et al., "LightGCN: Simplifying and Powering Graph Convolution Network for
    Recommendation", 2020.
    Rendle et al., "BPR: Bayesian Personalized Ranking from Implicit Feedback", 2009.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules are imported from examples/

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.table import Table

import jmask
from common.program import Arguments, Program
from light_gcn.graph import Imports, imports_of, neighbours, random_imports, read_imports

BATCH, DRAWN, SHOWN = 1024, 8, 20
MEASURE_EVERY = 250
SIDES = ("files", "modules")

Params = dict[str, jax.Array]
Batch = dict[str, Any]
Vectors = Callable[[Params, Batch, str, int], jax.Array]

DENSE = optax.adagrad(0.1, initial_accumulator_value=0.1)


def factorized(params: Params, batch: Batch, name: str, side: int) -> jax.Array:
    """Return the rows of the nodes `batch[name]`."""
    return params[SIDES[side]][batch[name]]


def sampled(params: Params, batch: Batch, name: str, side: int) -> jax.Array:
    """Return half of each row and half of the sum of some neighbours."""
    ids, weights = batch[f"near {name}"]
    near = jmask.embedding_bag(params[SIDES[1 - side]], ids, weights=weights)
    return (params[SIDES[side]][batch[name]] + near) / 2


class WholeGraph:
    """The same with all neighbours of all nodes."""

    def __init__(self, graph: Imports):
        self.edges = graph.edges
        degrees = [
            np.bincount(ids, minlength=n)
            for ids, n in zip(graph.edges.T, graph[:2], strict=True)
        ]
        of_edges = [d[ids] for d, ids in zip(degrees, graph.edges.T, strict=True)]
        self.scales = np.sqrt(1 / (of_edges[0] * of_edges[1])).astype(np.float32)

    def all_vectors(self, params: Params, side: int) -> jax.Array:
        own, other = params[SIDES[side]], params[SIDES[1 - side]]
        rows = other[self.edges[:, 1 - side]] * self.scales[:, None]
        return (own + jax.ops.segment_sum(rows, self.edges[:, side], len(own))) / 2

    def __call__(self, params: Params, batch: Batch, name: str, side: int) -> jax.Array:
        return self.all_vectors(params, side)[batch[name]]


def loss_of(vectors: Vectors) -> Callable[[Params, Batch], jax.Array]:
    def loss_fn(params: Params, batch: Batch) -> jax.Array:
        """Return a loss: a module that is imported should fit better than another."""
        file = vectors(params, batch, "file", 0)
        right = jnp.sum(file * vectors(params, batch, "module", 1), axis=1)
        wrong = jnp.sum(file * vectors(params, batch, "other", 1), axis=1)
        return jnp.sum(jax.nn.softplus(wrong - right))

    return loss_fn


def make_step(vectors: Vectors) -> Callable[..., Any]:
    loss_fn, is_dense = loss_of(vectors), isinstance(vectors, WholeGraph)
    tx = DENSE if is_dense else jmask.lazy(DENSE)
    value_and_grad = jax.value_and_grad if is_dense else jmask.value_and_grad

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, opt_state: Any, batch: Batch) -> tuple[Params, Any, jax.Array]:
        loss, grads = value_and_grad(loss_fn)(params, batch)
        params, opt_state = jmask.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss

    return step


def random_batches(graph: Imports, seed: int) -> Iterator[Batch]:
    """Yield imports, each with a module drawn at random, and some neighbours of all."""
    rng = np.random.default_rng(seed)
    near = [neighbours(graph, side) for side in (0, 1)]
    degrees = [np.diff(begins) for _, begins in near]

    def drawn(nodes: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
        ids, begins = near[side]
        own = degrees[side][nodes][:, None]
        places = begins[nodes][:, None] + rng.integers(
            np.maximum(own, 1), size=(len(nodes), DRAWN)
        )
        found = ids[np.minimum(places, len(ids) - 1)]
        # Each stands for degree / DRAWN neighbours.
        weights = np.sqrt(own / np.maximum(degrees[1 - side][found], 1)) / DRAWN
        return found, weights.astype(np.float32)

    while True:
        file, module = graph.edges[rng.integers(len(graph.edges), size=BATCH)].T
        batch: Batch = {"file": file, "module": module}
        batch["other"] = rng.integers(graph.modules, size=BATCH, dtype=np.int32)
        for name, side in (("file", 0), ("module", 1), ("other", 1)):
            batch[f"near {name}"] = drawn(batch[name], side)
        yield batch


def init_params(graph: Imports, dim: int, seed: int) -> Params:
    keys = jax.random.split(jax.random.key(seed))
    return {
        name: 0.1 * jax.random.normal(key, (size, dim))
        for name, key, size in zip(SIDES, keys, graph[:2], strict=True)
    }


def recall(params: Params, graph: Imports, propagate: bool) -> float:
    """Return how often the import held out is among the best new ones for its file."""
    files, modules = (params[name] for name in SIDES)
    if propagate:
        whole = WholeGraph(graph)
        files, modules = (
            jax.jit(whole.all_vectors, static_argnums=1)(params, i) for i in (0, 1)
        )
    known, found = imports_of(graph), []
    for begin in range(0, graph.files, 2000):
        scores = np.array(files[begin : begin + 2000] @ modules.T)
        for line, file in zip(scores, range(begin, graph.files), strict=False):
            line[known[file]] = -np.inf
            found.append((line > line[graph.held_out[file]]).sum() < SHOWN)
    return float(np.mean(found))


def train(
    name: str, vectors: Vectors, graph: Imports, args: argparse.Namespace, program: Program
) -> list[tuple[int, float]]:
    """Train, and return the curve of recall over steps."""
    params = init_params(graph, args.dim, args.seed)
    opt_state, step = DENSE.init(params), make_step(vectors)
    curve, number = [], 0

    def measure() -> None:
        curve.append((number, recall(params, graph, vectors is not factorized)))
        show(number, recall=curve[-1][1])

    batches = islice(random_batches(graph, args.seed), args.steps)
    with program.bar(f"{name:<16}", args.steps, "recall {recall:.1%}") as show:
        measure()
        for number, batch in enumerate(program.until_stopped(batches), 1):
            params, opt_state, _ = step(params, opt_state, batch)
            if number % MEASURE_EVERY == 0:
                measure()
            elif number % 10 == 0:
                show(number)
        if number > curve[-1][0]:
            measure()
    return curve


def milliseconds(vectors: Vectors, graph: Imports, args: argparse.Namespace) -> float:
    """Return the median time of a step."""
    params, step = init_params(graph, args.dim, args.seed), make_step(vectors)
    state, times = (params, DENSE.init(params)), []
    for batch in islice(random_batches(graph, args.seed), 6):
        begin = time.perf_counter()
        *state, _ = jax.block_until_ready(step(*state, batch))
        times.append(1e3 * (time.perf_counter() - begin))
    return float(np.median(times[1:]))


def gradient_of(vectors: Vectors, graph: Imports, args: argparse.Namespace) -> str:
    """Say which rows of the table of files have a gradient."""
    if isinstance(vectors, WholeGraph):
        return "dense"
    params, batch = init_params(graph, args.dim, 0), next(random_batches(graph, 0))
    return f"{jmask.grad(loss_of(vectors))(params, batch)['files'].nse:,} rows"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments("light_gcn", __doc__)
    parser.number("--dim", 32, "length of a vector")
    parser.number("--steps", 2000, f"batches of {BATCH} imports, for each way")
    parser.number("--most", 20_000, "files that are read")
    parser.number("--many", 1_000_000, "files of the graph that is timed")
    return parser.parse_args(argv)


def save_plot(path: Path, curves: dict[str, list[tuple[int, float]]]) -> None:
    figure, axes = plt.subplots(figsize=(5, 3.5), layout="constrained")
    for name, curve in curves.items():
        axes.plot(*zip(*curve, strict=True), label=name)
    axes.set(xlabel="step", ylabel="recall@20")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    ways: dict[str, Callable[[Imports], Vectors]] = {
        "factorization": lambda _: factorized,
        "all of the graph": WholeGraph,
        f"{DRAWN} neighbours": lambda _: sampled,
    }
    with Program("light_gcn") as program:
        with program.console.status("reading"):
            graph = read_imports(most=args.most)
        program.print(
            f"{graph.files:,} files, {graph.modules:,} modules, {len(graph.edges):,} imports"
        )
        curves = {}
        for name, way in ways.items():
            curves[name] = train(name, way(graph), graph, args, program)
            if program.stopped:
                break
        save_plot(args.plot, curves)
        program.wrote("recall over steps", args.plot)
        large = random_imports(args.many, max(args.many // 10, 2), 5, args.seed)
        table = Table("", "gradient", "recall@20", "ms a step", f"... of {args.many:,} files")
        for name, way in ways.items():
            times = [f"{milliseconds(way(x), x, args):.1f}" for x in (graph, large)]
            gradient = gradient_of(way(graph), graph, args)
            table.add_row(name, gradient, f"{curves[name][-1][1]:.1%}", *times)
        program.print(table)


if __name__ == "__main__":
    main()
