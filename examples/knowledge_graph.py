"""TransE: entities and relations of a knowledge graph as vectors, h + r near t.

    python examples/knowledge_graph.py                  UMLS: 135 entities, 46 relations
    python examples/knowledge_graph.py --graph kinships
    python examples/knowledge_graph.py --graph FOLDER   train.txt, valid.txt and test.txt
    python examples/knowledge_graph.py --help

A triple that is known should be nearer than one with another head or tail. The vectors of
entities have length one. Both, Adam and the length, are inside `jmask.lazy`: only entities of
the batch are moved, and only these have to be made one long again. The run prints the mean
reciprocal rank (MRR) and hits@10 of triples that were held out, filtered and of heads and
tails alike, saves a learning curve, and times the same step on a graph of a million entities.

References:
    Bordes et al., "Translating Embeddings for Modeling Multi-relational Data", 2013.

Needs the packages of `pip install 'jmask[examples]'` and `pip install --no-deps pykeen`, which
has the graphs.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from learning_curve import save_curves
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from step_timing import Step, compare, timing_table
from triples import Graph, GraphError, ranks, read_graph

import jmask

BATCH, NEGATIVES, MARGIN = 256, 10, 1.0
MEASURE_EVERY = 500
OURS, STOCK = "jmask: row-sparse gradients", "stock optax: dense gradients"

Params = dict[str, jax.Array]
Batch = dict[str, np.ndarray]


def distance(heads: jax.Array, relations: jax.Array, tails: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(heads + relations - tails), axis=-1)


def loss_fn(params: Params, batch: Batch) -> jax.Array:
    """How much less than a margin farther away wrong triples are, on the average."""
    entities, relation = params["entities"], params["relations"][batch["relation"]]
    head, tail = entities[batch["head"]], entities[batch["tail"]]
    other = entities[batch["other"]]
    right = distance(head, relation, tail)[:, None]
    with_head = distance(other, relation[:, None], tail[:, None])
    with_tail = distance(head[:, None], relation[:, None], other)
    wrong = jnp.where(batch["is_head"], with_head, with_tail)
    return jnp.mean(jax.nn.relu(MARGIN + right - wrong))


def unit_rows() -> optax.GradientTransformation:
    """Updates after which each row has length one. Rows are moved apart: it is row-local."""

    def to_unit(update: jax.Array, rows: jax.Array) -> jax.Array:
        moved = rows + update
        return moved / jnp.linalg.norm(moved, axis=-1, keepdims=True) - rows

    return optax.stateless(lambda updates, params: jax.tree.map(to_unit, updates, params))


def optimizer(rate: float) -> optax.GradientTransformation:
    return optax.partition(
        {"entities": optax.chain(optax.adam(rate), unit_rows()), "relations": optax.adam(rate)},
        {"entities": "entities", "relations": "relations"},
    )


def make_step(tx: optax.GradientTransformation, value_and_grad: Callable[..., Any]) -> Step:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, opt_state: Any, batch: Batch) -> tuple[Params, Any, jax.Array]:
        loss, grads = value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def init_params(entities: int, relations: int, dim: int, seed: int) -> Params:
    of_entities, of_relations = jax.random.split(jax.random.key(seed))
    rows = jax.random.normal(of_entities, (entities, dim))
    return {
        "entities": rows / jnp.linalg.norm(rows, axis=1, keepdims=True),
        "relations": jax.random.normal(of_relations, (relations, dim)) * dim**-0.5,
    }


def random_batches(triples: np.ndarray, entities: int, seed: int) -> Iterator[Batch]:
    """Known triples, and for each some with a random entity as head or as tail."""
    rng = np.random.default_rng(seed)
    while True:
        head, relation, tail = triples[rng.integers(len(triples), size=BATCH)].T
        yield {
            "head": head,
            "relation": relation,
            "tail": tail,
            "other": rng.integers(entities, size=(BATCH, NEGATIVES), dtype=np.int32),
            "is_head": rng.random((BATCH, NEGATIVES)) < 0.5,
        }


def measured(params: Params, graph: Graph, triples: np.ndarray) -> tuple[float, float]:
    """MRR and hits@10."""
    entities, relations = params["entities"], params["relations"][triples[:, 1]]
    ends = entities[triples[:, 0]] + relations
    starts = entities[triples[:, 2]] - relations
    near = jax.jit(lambda x: -jnp.sum(jnp.abs(x[:, None] - entities), axis=-1))
    found = ranks(graph, triples, near(ends), near(starts))
    return float(np.mean(1 / found)), float(np.mean(found <= 10))


def train(
    args: argparse.Namespace, graph: Graph, console: Console
) -> tuple[Params, list[tuple[int, float, float]]]:
    """The parameters, and steps, mean losses and MRR on the way, of triples for validation."""
    tx = jmask.lazy(optimizer(args.rate))
    step = make_step(tx, jmask.value_and_grad)
    params = init_params(len(graph.entities), len(graph.relations), args.dim, args.seed)
    opt_state = tx.init(params)
    progress = Progress(
        TextColumn("training"),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]:.3f}  MRR {task.fields[mrr]:.3f}"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    losses, curve = [], []
    with progress:
        mrr, _ = measured(params, graph, graph.valid)
        bar = progress.add_task("", total=args.steps, loss=np.nan, mrr=mrr)
        batches = random_batches(graph.train, len(graph.entities), args.seed)
        for number, batch in enumerate(islice(batches, args.steps), 1):
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(loss)
            if number % MEASURE_EVERY == 0 or number == args.steps:
                mrr, _ = measured(params, graph, graph.valid)
                curve.append((number, float(np.mean(losses)), mrr))
                progress.update(bar, completed=number, loss=curve[-1][1], mrr=mrr)
                losses = []
    return params, curve


def time_many(args: argparse.Namespace, console: Console) -> None:
    """The same step where the graph has `args.many` entities."""
    rng = np.random.default_rng(args.seed)
    triples = rng.integers(args.many, size=(50 * BATCH, 3), dtype=np.int32)
    triples[:, 1] %= 100
    batches = list(islice(random_batches(triples, args.many, args.seed), 4))
    params = init_params(args.many, 100, args.dim, args.seed)
    tx = optimizer(args.rate)
    steps = {
        OURS: make_step(jmask.lazy(tx), jmask.value_and_grad),
        STOCK: make_step(tx, jax.value_and_grad),
    }
    seconds, _ = compare(steps, params, tx.init(params), batches)
    title = f"The same step with {args.many:,} entities of {args.dim} numbers"
    console.print(timing_table(title, seconds, STOCK, BATCH))
    console.print(f"[bold]{seconds[STOCK] / seconds[OURS]:.1f}x[/] as fast as stock optax")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="TransE with row-sparse gradients.")
    parser.add_argument("--graph", default="umls", help="umls, kinships, nations or a folder")
    add = partial(parser.add_argument, metavar="N", type=int)
    add("--dim", default=64, help="length of a vector (64)")
    add("--steps", default=4000, help=f"batches of {BATCH} triples (4000)")
    add("--many", default=1_000_000, help="entities of the graph that is timed (1000000)")
    add("--seed", default=0, help="seed of the random numbers (0)")
    parser.add_argument("--rate", metavar="X", type=float, default=0.01, help="(0.01)")
    parser.add_argument(
        "--plot",
        metavar="PATH",
        type=Path,
        default=Path("knowledge_graph.png"),
        help="learning curve (knowledge_graph.png)",
    )
    args = parser.parse_args(argv)
    for name in ("dim", "steps", "many", "rate"):
        if not getattr(args, name) > 0:
            parser.error(f"argument --{name}: {getattr(args, name)} is not positive")
    if args.plot.is_dir() or not args.plot.parent.is_dir():
        parser.error(f"argument --plot: {args.plot} is not a file in a directory")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args, console = parse_arguments(argv), Console(highlight=False)
    try:
        graph = read_graph(args.graph)
    except GraphError as error:
        raise SystemExit(f"knowledge_graph: {error}") from error
    console.print(
        f"{args.graph}: {len(graph.entities):,} entities, {len(graph.relations)} relations, "
        f"{len(graph.train):,} triples"
    )
    params, curve = train(args, graph, console)
    mrr, hits = measured(params, graph, graph.test)
    console.print(f"held out: MRR {mrr:.3f}, hits@10 {hits:.1%}")
    save_curves(args.plot, *zip(*curve, strict=True), "MRR")
    console.print(f"learning curve: {args.plot}\n", soft_wrap=True, markup=False)
    time_many(args, console)


if __name__ == "__main__":
    main()
