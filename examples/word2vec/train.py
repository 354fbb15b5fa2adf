"""word2vec with row-sparse gradients: an embedding of the names in Python code.

    python examples/word2vec/train.py                     the Python sources here
    python examples/word2vec/train.py book.txt ...        text files instead

A step of skip-gram with negative sampling looks up a few thousand rows of two tables of
131,072 rows. The training step below is the usual one of JAX and optax; two names in it
make its cost that of the rows looked up, and not that of the tables:

    jmask.value_and_grad        where jax.value_and_grad was
    jmask.lazy(optimizer)       where optimizer was

The end of the run times both on the same batches. Adagrad does not move a row whose
gradient is zero, so that both compute the same parameters, too.

With `--checkpoint FOLDER` a run that was stopped goes on where it was.

References:
    Mikolov et al., "Distributed Representations of Words and Phrases and their
    Compositionality", 2013.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules are imported from examples/

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

import jmask
from common.checkpoints import Checkpoints
from common.program import Arguments, Program
from common.python_corpus import Corpus, corpus_from_files, corpus_from_python
from common.step_timing import Step, compare, timing_table
from word2vec.map import save_map

LEARNING_RATE = 0.05
CENTRES = 1024  # words of a batch,
NEIGHBOURS = 4  # each with this many words found near it,
WINDOW = 3  # at most so far away;
NEGATIVES = 10  # and random words to tell each pair from,
SHARED_NEGATIVES = 64  # estimated with these, drawn once for the batch
EXAMPLES = CENTRES * NEIGHBOURS
FREQUENT = 1e-3  # words more frequent than this are thinned out

MAPPED = 600  # words in the map
LOOK_EVERY, KEEP_EVERY = 25, 2000  # steps

OURS = "jmask: row-sparse gradients"
STOCK = "stock optax: dense gradients"

QUERIES = (
    "append", "split", "sin", "ValueError", "float32", "width", "socket", "thread",
    "json", "numpy", "red", "assertEqual",
)  # fmt: skip

Params = dict[str, jax.Array]
Batch = dict[str, np.ndarray]


# --- the model and its training step ----------------------------------------------------


def init_params(vocabulary: int, dim: int, seed: int) -> Params:
    uniform = jax.random.uniform(jax.random.key(seed), (vocabulary, dim))
    return {"words": (uniform - 0.5) / dim, "contexts": jnp.zeros((vocabulary, dim))}


def loss_fn(params: Params, batch: Batch) -> jax.Array:
    """Return a loss: words near each other should score high, random pairs low."""
    centres = params["words"][batch["centres"]]
    contexts = params["contexts"][batch["contexts"]]
    negatives = params["contexts"][batch["negatives"]]

    scores = jnp.einsum("bd,bnd->bn", centres, contexts)
    random_scores = centres @ negatives.T
    found = jax.nn.softplus(-scores).sum()
    confused = jax.nn.softplus(random_scores).sum()
    return found + confused * NEIGHBOURS * NEGATIVES / SHARED_NEGATIVES


def make_step(tx: optax.GradientTransformation, value_and_grad: Callable) -> Step:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


# --- data -------------------------------------------------------------------------------


def random_batches(corpus: Corpus, seed: int) -> Callable[[int], Iterator[Batch]]:
    """Return a function: the batches from a step on, which are the same for each run.

    Batches of words, words near them, and random words to tell them from.
    """
    rng = np.random.default_rng(seed)
    share = corpus.counts / corpus.counts.sum()
    kept = rng.random(len(corpus.tokens)) < np.sqrt(FREQUENT / share)[corpus.tokens]
    tokens = corpus.tokens[kept] if kept.any() else corpus.tokens

    # To draw from uniformly: near offsets and frequent words are in there more often.
    offsets = np.repeat(np.arange(1, WINDOW + 1), np.arange(WINDOW, 0, -1))
    offsets = np.concatenate([-offsets, offsets])
    weights = corpus.counts**0.75
    repeats = np.ceil(4e6 * weights / weights.sum()).astype(int)
    noise = np.repeat(np.arange(len(repeats), dtype=np.int32), repeats)

    def batches(start: int) -> Iterator[Batch]:
        for step in count(start):
            rng = np.random.default_rng((seed, step))
            places = rng.integers(len(tokens), size=(CENTRES, 1))
            nearby = places + rng.choice(offsets, (CENTRES, NEIGHBOURS))
            yield {
                "centres": tokens[places[:, 0]],
                "contexts": tokens.take(nearby, mode="wrap"),
                "negatives": rng.choice(noise, SHARED_NEGATIVES),
            }

    return batches


# --- training ---------------------------------------------------------------------------


class Trained(NamedTuple):
    params: Params
    opt_state: Any
    steps: int
    seconds: float
    losses: list[float]


def train(
    step: Step,
    params: Params,
    opt_state: Any,
    batches: Callable[[int], Iterator[Batch]],
    args: argparse.Namespace,
    checkpoints: Checkpoints,
    program: Program,
) -> Trained:
    """Train for `args.steps` steps or, if None, `args.seconds`, which compiling is not of."""
    state, record = (params, opt_state), {"losses": [], "seconds": 0.0}
    done, state, record = checkpoints.restore(state, record)
    losses, before = record["losses"], record["seconds"]
    fields, total = "loss {loss:.3f} {rate:>9,.0f} examples/s", args.steps or args.seconds
    smooth, at_first, elapsed, start = np.nan, done + 1, before, None
    with program.bar("training", total, fields) as show:
        for batch in program.until_stopped(batches(done)):
            if done >= args.steps if args.steps else elapsed >= args.seconds:
                break
            *state, loss = step(*state, batch)
            done += 1
            # One look at the loss for many steps: reading it waits for the device.
            if done % LOOK_EVERY and done not in (at_first, args.steps):
                continue
            losses.append(float(loss) / EXAMPLES)
            start = start or time.perf_counter()
            elapsed = before + time.perf_counter() - start
            smooth = losses[-1] if np.isnan(smooth) else 0.9 * smooth + 0.1 * losses[-1]
            rate = (done - at_first) * EXAMPLES / max(elapsed - before, 1e-9)
            show(done if args.steps else elapsed, loss=smooth, rate=rate)
            if done % KEEP_EVERY == 0:
                checkpoints.save(done, tuple(state), {"losses": losses, "seconds": elapsed})
    checkpoints.save(done, tuple(state), {"losses": losses, "seconds": elapsed})
    return Trained(*state, done, elapsed, losses)


# --- results ----------------------------------------------------------------------------


def unit_vectors(table: jax.Array, count: int) -> np.ndarray:
    vectors = np.asarray(table[:count])
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)


def neighbour_table(vectors: np.ndarray, words: Sequence[str]) -> Table:
    number = {word: i for i, word in enumerate(words[: len(vectors)])}
    queries = [word for word in QUERIES if word in number] or words[: len(QUERIES)]
    table = Table(title="Nearest neighbours (cosine)", title_justify="left")
    table.add_column("word", style="bold cyan", no_wrap=True)
    table.add_column("most similar first")
    for query in queries:
        nearest = np.argsort(-(vectors @ vectors[number[query]]))
        others = [words[i] for i in nearest[:8] if words[i] != query]
        table.add_row(query, ", ".join(others[:7]))
    return table


# --- command line -----------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments("word2vec", __doc__, checkpoint=True)
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="text (the Python sources here)"
    )
    parser.number("--seconds", 60.0, "how long to train")
    parser.number("--steps", None, "train for so many steps instead")
    parser.number("--vocabulary", 131_072, "most words")
    parser.number("--dim", 128, "length of a word vector")
    return parser.parse_args(argv)


def read_corpus(args: argparse.Namespace, program: Program) -> Corpus:
    with program.console.status("reading"):
        if args.files:
            corpus = corpus_from_files(args.files, args.vocabulary)
        else:
            corpus = corpus_from_python(args.vocabulary)
    program.print(
        f"{len(corpus.tokens):,} words of text, {corpus.distinct:,} different ones; "
        f"vocabulary: the {len(corpus.words):,} most frequent"
    )
    return corpus


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    optimizer = optax.adagrad(LEARNING_RATE, initial_accumulator_value=0.01)
    sparse_step = make_step(jmask.lazy(optimizer), jmask.value_and_grad)
    dense_step = make_step(optimizer, jax.value_and_grad)
    with Program("word2vec") as program:
        corpus = read_corpus(args, program)
        words, batches = corpus.words, random_batches(corpus, args.seed)
        params = init_params(len(words), args.dim, args.seed)
        settings = {"words": len(words), "dim": args.dim, "seed": args.seed}
        with Checkpoints(args.checkpoint, settings, program) as checkpoints:
            opt_state = optimizer.init(params)
            trained = train(sparse_step, params, opt_state, batches, args, checkpoints, program)
        vectors = unit_vectors(trained.params["words"], 15_000)
        mapped = min(MAPPED, len(vectors))
        title = f"The {mapped} most frequent of {len(words):,} words"
        save_map(args.plot, vectors[:mapped], words[:mapped], title)
        program.wrote("map", args.plot)

        first, last = trained.losses[0], np.mean(trained.losses[-10:])
        program.print(
            f"{trained.steps:,} steps in {trained.seconds:.0f} s: "
            f"loss {first:.3f} -> {last:.3f}\n"
        )
        program.print(neighbour_table(vectors, words))
        steps, some = {OURS: sparse_step, STOCK: dense_step}, list(islice(batches(0), 8))
        seconds, difference = compare(steps, trained.params, trained.opt_state, some)
        title = f"The same steps on two tables of {len(words):,} x {args.dim}"
        program.print(timing_table(title, seconds, STOCK, EXAMPLES))
        program.print(
            f"[bold]{seconds[STOCK] / seconds[OURS]:.1f}x[/] as fast as stock optax; "
            f"the parameters differ by at most {difference:.0e}"
        )


if __name__ == "__main__":
    main()
