"""word2vec with row-sparse gradients: an embedding of the names in Python code.

    python examples/word2vec.py                     the Python sources on this machine
    python examples/word2vec.py book.txt ...        text files instead
    python examples/word2vec.py --help

A step of skip-gram with negative sampling looks up a few thousand rows of two tables of
131,072 rows. The training step below is the usual one of JAX and optax; two names in it
make its cost that of the rows looked up, and not that of the tables:

    jmask.value_and_grad        where jax.value_and_grad was
    jmask.lazy(optimizer)       where optimizer was

The end of the run times both on the same batches. Adagrad does not move a row whose
gradient is zero, so that both compute the same parameters, too.

Needs the packages of `pip install 'jmask[examples]'`.

References:
    Mikolov et al., "Distributed Representations of Words and Phrases and their
    Compositionality", 2013.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from embedding_map import save_map
from python_corpus import Corpus, CorpusError, corpus_from_files, corpus_from_python
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from step_timing import Step, compare, timing_table

import jmask

LEARNING_RATE = 0.05
CENTRES = 1024  # words of a batch,
NEIGHBOURS = 4  # each with this many words found near it,
WINDOW = 3  # at most so far away;
NEGATIVES = 10  # and random words to tell each pair from,
SHARED_NEGATIVES = 64  # estimated with these, drawn once for the batch
EXAMPLES = CENTRES * NEIGHBOURS
FREQUENT = 1e-3  # words more frequent than this are thinned out

MAPPED = 600  # words in the map

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
    return {
        "words": (uniform - 0.5) / dim,
        "contexts": jnp.zeros((vocabulary, dim)),
    }


def loss_fn(params: Params, batch: Batch) -> jax.Array:
    """Words found near each other should score high, random pairs low."""
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


def random_batches(corpus: Corpus, seed: int) -> Iterator[Batch]:
    """Endless batches of words, words near them, and random words to tell them from."""
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

    while True:
        places = rng.integers(len(tokens), size=(CENTRES, 1))
        nearby = places + rng.choice(offsets, (CENTRES, NEIGHBOURS))
        yield {
            "centres": tokens[places[:, 0]],
            "contexts": tokens.take(nearby, mode="wrap"),
            "negatives": rng.choice(noise, SHARED_NEGATIVES),
        }


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
    batches: Iterator[Batch],
    steps: int | None,
    seconds: float,
    console: Console,
) -> Trained:
    """Train for some steps or, if None, some seconds; the first step compiles."""
    params, opt_state, loss = step(params, opt_state, next(batches))
    losses, smooth = [float(loss) / EXAMPLES], float(loss) / EXAMPLES
    progress = Progress(
        TextColumn("training"),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[rate]:>9,.0f} examples/s"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    done, start = 1, time.perf_counter()
    elapsed = 0.0
    with progress:
        bar = progress.add_task("", total=steps or seconds, loss=smooth, rate=0)
        while done < steps if steps else elapsed < seconds:
            # One look at the loss for many steps: reading it waits for the device.
            chunk = min(25, steps - done) if steps else 25
            for batch in islice(batches, chunk):
                params, opt_state, loss = step(params, opt_state, batch)
            losses.append(float(loss) / EXAMPLES)
            done, elapsed = done + chunk, time.perf_counter() - start
            smooth += 0.1 * (losses[-1] - smooth)
            rate = (done - 1) * EXAMPLES / elapsed
            progress.update(bar, completed=done if steps else elapsed, loss=smooth, rate=rate)
    return Trained(params, opt_state, done, elapsed, losses)


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
    parser = argparse.ArgumentParser(
        description="Skip-gram with negative sampling and row-sparse gradients.",
        epilog="Without files: the names in the Python sources on this machine.",
    )
    add = partial(parser.add_argument, metavar="N")
    add("files", nargs="*", type=Path, metavar="FILE", help="text to learn from")
    add("--seconds", type=_positive(float), default=60.0, help="how long to train (60)")
    add("--steps", type=_positive(int), help="train for so many steps instead")
    add("--vocabulary", type=_positive(int), default=131_072, help="most words (131072)")
    add("--dim", type=_positive(int), default=128, help="length of a word vector (128)")
    add("--seed", type=int, default=0, help="seed of the random numbers (0)")
    add("--map", type=Path, metavar="PATH", help="where to write the map (word2vec.png)")
    parser.set_defaults(map=Path("word2vec.png"))
    args = parser.parse_args(argv)
    if args.map.is_dir() or not args.map.parent.is_dir():
        parser.error(f"argument --map: {args.map} is not a file in a directory")
    return args


def _positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def positive_number(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return value

    return positive_number


def read_corpus(args: argparse.Namespace, console: Console) -> Corpus:
    with console.status("reading"):
        if args.files:
            corpus = corpus_from_files(args.files, args.vocabulary)
        else:
            corpus = corpus_from_python(args.vocabulary)
    console.print(
        f"{len(corpus.tokens):,} words of text, {corpus.distinct:,} different ones; "
        f"vocabulary: the {len(corpus.words):,} most frequent"
    )
    return corpus


def main(argv: Sequence[str] | None = None) -> None:
    args, console = parse_arguments(argv), Console(highlight=False)
    try:
        corpus = read_corpus(args, console)
    except CorpusError as error:
        raise SystemExit(f"word2vec: {error}") from error
    batches = random_batches(corpus, args.seed)
    params = init_params(len(corpus.words), args.dim, args.seed)

    optimizer = optax.adagrad(LEARNING_RATE, initial_accumulator_value=0.01)
    sparse_step = make_step(jmask.lazy(optimizer), jmask.value_and_grad)
    dense_step = make_step(optimizer, jax.value_and_grad)

    opt_state = optimizer.init(params)
    trained = train(sparse_step, params, opt_state, batches, args.steps, args.seconds, console)
    first, last = trained.losses[0], np.mean(trained.losses[-10:])
    console.print(
        f"{trained.steps:,} steps in {trained.seconds:.0f} s: loss {first:.3f} -> {last:.3f}\n"
    )
    vectors = unit_vectors(trained.params["words"], 15_000)
    console.print(neighbour_table(vectors, corpus.words))
    mapped = min(MAPPED, len(vectors))
    title = f"The {mapped} most frequent of {len(corpus.words):,} words"
    save_map(args.map, vectors[:mapped], corpus.words[:mapped], title)
    console.print(f"map: {args.map}\n", soft_wrap=True, markup=False)

    steps = {OURS: sparse_step, STOCK: dense_step}
    seconds, difference = compare(
        steps, trained.params, trained.opt_state, list(islice(batches, 8))
    )
    title = f"The same steps on two tables of {len(corpus.words):,} x {args.dim}"
    console.print(timing_table(title, seconds, STOCK, EXAMPLES))
    console.print(
        f"[bold]{seconds[STOCK] / seconds[OURS]:.1f}x[/] as fast as stock optax; "
        f"the parameters differ by at most {difference:.0e}"
    )


if __name__ == "__main__":
    main()
