"""TransE: entities and relations of a knowledge graph as vectors, h + r near t.

    python examples/knowledge_graph/train.py                  UMLS: 135 entities
    python examples/knowledge_graph/train.py --graph kinships
    python examples/knowledge_graph/train.py --graph FOLDER   train.txt, valid.txt, test.txt

A triple that is known should be nearer than one with another head or tail. The vectors of
entities have length one. Both, Adam and the length, are inside `jmask.lazy`: only entities of
the batch are moved, and only these have to be made one long again. The run prints the mean
reciprocal rank (MRR) and hits@10 of triples that were held out, filtered and of heads and
tails alike, saves a learning curve, and times the same step on a graph of a million entities.

References:
    Bordes et al., "Translating Embeddings for Modeling Multi-relational Data", 2013.

The graphs are in the package pykeen: `pip install --no-deps pykeen`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules are imported from examples/

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmask
from common.learning_curve import save_curves
from common.program import Arguments, Program
from common.step_timing import Step, compare, timing_table
from knowledge_graph.triples import Graph, ranks, read_graph

BATCH, NEGATIVES, MARGIN = 256, 10, 1.0
MEASURE_EVERY = 500
OURS, STOCK = "jmask: row-sparse gradients", "stock optax: dense gradients"

Params = dict[str, jax.Array]
Batch = dict[str, np.ndarray]


def distance(heads: jax.Array, relations: jax.Array, tails: jax.Array) -> jax.Array:
    return jnp.sum(jnp.abs(heads + relations - tails), axis=-1)


def loss_fn(params: Params, batch: Batch) -> jax.Array:
    """Return the margin loss: wrong triples should be farther away by `MARGIN`."""
    entities, relation = params["entities"], params["relations"][batch["relation"]]
    head, tail = entities[batch["head"]], entities[batch["tail"]]
    other = entities[batch["other"]]
    right = distance(head, relation, tail)[:, None]
    with_head = distance(other, relation[:, None], tail[:, None])
    with_tail = distance(head[:, None], relation[:, None], other)
    wrong = jnp.where(batch["is_head"], with_head, with_tail)
    return jnp.mean(jax.nn.relu(MARGIN + right - wrong))


def unit_rows() -> optax.GradientTransformation:
    """Return updates after which each row has length one; this is row-local."""

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
    """Yield known triples, and for each some with a random entity as head or as tail."""
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
    """Return MRR and hits@10."""
    entities, relations = params["entities"], params["relations"][triples[:, 1]]
    ends = entities[triples[:, 0]] + relations
    starts = entities[triples[:, 2]] - relations
    near = jax.jit(lambda x: -jnp.sum(jnp.abs(x[:, None] - entities), axis=-1))
    found = ranks(graph, triples, near(ends), near(starts))
    return float(np.mean(1 / found)), float(np.mean(found <= 10))


def train(
    args: argparse.Namespace, graph: Graph, program: Program
) -> tuple[Params, list[tuple[int, float, float]]]:
    """Return the parameters, and the curve of steps, mean losses and MRR."""
    tx = jmask.lazy(optimizer(args.rate))
    step = make_step(tx, jmask.value_and_grad)
    params = init_params(len(graph.entities), len(graph.relations), args.dim, args.seed)
    opt_state = tx.init(params)
    losses, curve, number = [], [], 0

    def measure() -> None:
        nonlocal losses
        mrr, _ = measured(params, graph, graph.valid)
        curve.append((number, float(np.mean(losses)), mrr))
        show(number, loss=curve[-1][1], mrr=mrr)
        losses = []

    batches = islice(random_batches(graph.train, len(graph.entities), args.seed), args.steps)
    with program.bar("training", args.steps, "loss {loss:.3f}  MRR {mrr:.3f}") as show:
        for number, batch in enumerate(program.until_stopped(batches), 1):
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(loss)
            if number % MEASURE_EVERY == 0:
                measure()
            elif number % 20 == 0:
                show(number)
        if losses:
            measure()
    return params, curve


def time_many(args: argparse.Namespace, program: Program) -> None:
    """Time the same step where the graph has `args.many` entities."""
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
    program.print(timing_table(title, seconds, STOCK, BATCH))
    program.print(f"[bold]{seconds[STOCK] / seconds[OURS]:.1f}x[/] as fast as stock optax")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments("knowledge_graph", __doc__)
    parser.add_argument("--graph", default="umls", help="umls, kinships, nations or a folder")
    parser.number("--dim", 64, "length of a vector")
    parser.number("--steps", 4000, f"batches of {BATCH} triples")
    parser.number("--many", 1_000_000, "entities of the graph that is timed")
    parser.number("--rate", 0.01, "learning rate")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    with Program("knowledge_graph") as program:
        graph = read_graph(args.graph)
        program.print(
            f"{args.graph}: {len(graph.entities):,} entities, {len(graph.relations)} "
            f"relations, {len(graph.train):,} triples"
        )
        params, curve = train(args, graph, program)
        save_curves(args.plot, *zip(*curve, strict=True), "MRR")
        program.wrote("learning curve", args.plot)
        mrr, hits = measured(params, graph, graph.test)
        program.print(f"held out: MRR {mrr:.3f}, hits@10 {hits:.1%}\n")
        time_many(args, program)


if __name__ == "__main__":
    main()
