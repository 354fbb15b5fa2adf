"""Which package is a function from? Logistic regression on 4,194,304 hashed features.

    python examples/sparse_linear.py                the Python sources on this machine
    python examples/sparse_linear.py FILE           lines of: label, tab, text
    python examples/sparse_linear.py --help

The features of a text are its words, pairs of words and sequences of four characters, each
hashed to one of 2**22 columns: some hundred entries in a row of a sparse matrix X. The model
is the softmax of X W + b, and W has 2**22 rows. Two names make the cost of a training step
that of the entries of X, and not that of W:

    jmask.value_and_grad        where jax.value_and_grad was
    jmask.lazy(optimizer)       where optimizer was

The run trains with SGD, Adagrad and Adam and prints how many texts of files that were held
out are recognised. Then it times the same step with 2**16 to 2**24 columns, and stock optax.

Needs the packages of `pip install 'jmask[examples]'`.

References:
    Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", 2009.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCSR
from labelled_texts import TextError, Texts, texts_from_file, texts_from_python
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.preprocessing import normalize
from step_timing import Step

import jmask

ROWS = 128  # texts of a batch,
ROOM = 1.1  # with room for so many entries, by what the texts have on average
MOST_COLUMNS = 2**24  # what is hashed to; fewer columns are these numbers modulo

OPTIMIZERS = {
    "SGD": optax.sgd(50.0),
    "Adagrad": optax.adagrad(0.3, initial_accumulator_value=1e-6),
    "Adam": optax.adam(0.02),
}
TIMED = "Adagrad"  # with it, lazy and dense steps give the same parameters
MOST_DENSE = 2**22  # columns; more would take long with dense gradients

RECENT = 20  # steps, of which the mean loss is shown
FREQUENT_WORDS, ENOUGH = 5000, 10  # most words to choose from, in so many texts or more
WORD = r"\w+|[^\w\s]"

Params = dict[str, jax.Array]
Batch = dict[str, Any]


# --- the model and its training step ----------------------------------------------------


def init_params(columns: int, labels: int) -> Params:
    return {"weights": jnp.zeros((columns, labels)), "bias": jnp.zeros(labels)}


def scores(params: Params, batch: Batch) -> jax.Array:
    return jmask.dot(batch["x"], params["weights"]) + params["bias"]


def loss_fn(params: Params, batch: Batch) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        scores(params, batch), batch["labels"]
    )
    return jnp.average(losses, weights=batch["is_text"])


def make_step(tx: optax.GradientTransformation, value_and_grad: Callable) -> Step:
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, grads = value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


@jax.jit
def count_right(params: Params, batch: Batch) -> jax.Array:
    right = scores(params, batch).argmax(1) == batch["labels"]
    return jnp.sum(right & batch["is_text"])


# --- data -------------------------------------------------------------------------------


def vectorizers() -> list[HashingVectorizer]:
    """Words and pairs of words, and sequences of four characters."""
    settings = {"n_features": MOST_COLUMNS, "norm": None, "binary": True}
    return [
        HashingVectorizer(ngram_range=(1, 2), token_pattern=WORD, **settings),
        HashingVectorizer(ngram_range=(4, 4), analyzer="char", **settings),
    ]


def hashed(texts: Sequence[str]) -> csr_matrix:
    """The features of each text: a row of length one, with MOST_COLUMNS columns."""
    return normalize(sum(vectorizer.transform(texts) for vectorizer in vectorizers()))


class Batches:
    """Texts in batches of one size and capacity, so that nothing compiles twice."""

    def __init__(self, features: csr_matrix, labels: np.ndarray):
        self.features, self.labels = features, labels
        self.entries = np.diff(features.indptr)
        self.capacity = int(max(ROOM * ROWS * self.entries.mean(), self.entries.max()))

    def of(self, texts: np.ndarray, columns: int) -> Iterator[Batch]:
        """The texts with these numbers; a batch ends where its rows or entries are full."""
        ends = np.cumsum(self.entries[texts])
        start = before = 0
        while start < len(texts):
            fitting = int(np.searchsorted(ends, before + self.capacity, "right"))
            stop = min(start + ROWS, fitting)
            yield self._batch(texts[start:stop], columns)
            start, before = stop, ends[stop - 1]

    def _batch(self, texts: np.ndarray, columns: int) -> Batch:
        x, missing = self.features[texts], ROWS - len(texts)
        # Entries after the last row belong to no row: they are padding.
        room = self.capacity - x.nnz
        parts = (
            np.pad(x.data, (0, room)).astype(np.float32),
            np.pad(x.indices, (0, room)) % columns,
            np.pad(x.indptr, (0, missing), "edge"),
        )
        return {
            "x": BCSR(parts, shape=(ROWS, columns)),
            "labels": np.pad(self.labels[texts], (0, missing)),
            "is_text": np.arange(ROWS) < len(texts),
        }


# --- training ---------------------------------------------------------------------------


class Trained(NamedTuple):
    params: Params
    losses: list[float]
    seconds: float


def train(
    tx: optax.GradientTransformation,
    params: Params,
    batches: Iterator[Batch],
    show: Callable[[float, int], None],
) -> Trained:
    """Train on all batches; `show` is told the loss, and how many texts were in each."""
    step, opt_state = make_step(jmask.lazy(tx), jmask.value_and_grad), tx.init(params)
    # The first step compiles, and is not timed.
    params, opt_state, loss = step(params, opt_state, next(batches))
    losses, start = [float(loss)], time.perf_counter()
    for batch in batches:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
        show(np.mean(losses[-RECENT:]), int(batch["is_text"].sum()))
    return Trained(params, losses, time.perf_counter() - start)


def train_all(
    texts: Texts, batches: Batches, args: argparse.Namespace, console: Console
) -> Params:
    """Train with each optimizer and print how good it is; the parameters of the last."""
    rng = np.random.default_rng(args.seed)
    learned, held_out = np.flatnonzero(~texts.held_out), np.flatnonzero(texts.held_out)
    order = np.concatenate([rng.permutation(learned) for _ in range(args.epochs)])
    table = Table(title="Recognised among the texts held out", title_justify="left")
    table.add_column("optimizer")
    for column in ("accuracy", "loss", "steps", "time of a step"):
        table.add_column(column, justify="right", no_wrap=True)
    most = np.bincount(texts.labels[held_out]).max() / len(held_out)
    table.add_row("(the most frequent label)", f"{most:.1%}", "", "", "")
    progress = Progress(
        TextColumn("{task.description:8}"),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    params: Params = {}
    with progress:
        for name, tx in OPTIMIZERS.items():
            bar = progress.add_task(name, total=len(order), loss=np.log(len(texts.names)))
            show = lambda loss, count, bar=bar: progress.update(bar, loss=loss, advance=count)
            params = init_params(args.columns, len(texts.names))
            trained = train(tx, params, batches.of(order, args.columns), show)
            progress.update(bar, completed=len(order))
            params, steps = trained.params, len(trained.losses)
            test = batches.of(held_out, args.columns)
            right = sum(int(count_right(params, batch)) for batch in test)
            table.add_row(
                name,
                f"{right / len(held_out):.1%}",
                f"{np.mean(trained.losses[-RECENT:]):.3f}",
                f"{steps:,}",
                f"{1e3 * trained.seconds / max(steps - 1, 1):.1f} ms",
            )
    console.print(table)
    return params


# --- results ----------------------------------------------------------------------------


def telling_words(params: Params, texts: Texts) -> Table:
    """For each label, the frequent words that speak for it most."""
    vectorizer = vectorizers()[0]
    words_of = vectorizer.build_tokenizer()
    counts = Counter(word for text in texts.texts for word in {*words_of(text)})
    frequent = counts.most_common(FREQUENT_WORDS)
    words = np.array([word for word, count in frequent if count >= ENOUGH] or ["-"])
    x, columns = vectorizer.transform(words), len(params["weights"])
    parts = np.float32(x.data), x.indices % columns, x.indptr
    votes = np.array(jmask.dot(BCSR(parts, shape=(len(words), columns)), params["weights"]))
    votes -= votes.mean(1, keepdims=True)
    table = Table(title="Words that speak for a label", title_justify="left")
    table.add_column("label", style="bold cyan", no_wrap=True)
    table.add_column("most telling first")
    for name, of_label in zip(texts.names, votes.T, strict=True):
        table.add_row(name, "  ".join(words[np.argsort(-of_label)[:8]]))
    return table


def timed(step: Step, params: Params, batches: Sequence[Batch]) -> tuple[float, Params]:
    """The median time of a step, and the parameters after all of them."""
    opt_state, seconds = OPTIMIZERS[TIMED].init(params), []
    for batch in batches:
        start = time.perf_counter()
        params, opt_state, _ = jax.block_until_ready(step(params, opt_state, batch))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[1:])), params  # the first one compiled


def size_table(texts: Texts, batches: Batches, exponents: Sequence[int]) -> Table:
    """The time of the same step for different numbers of columns."""
    tx, labels = OPTIMIZERS[TIMED], len(texts.names)
    ours = make_step(jmask.lazy(tx), jmask.value_and_grad)
    stock = make_step(tx, jax.value_and_grad)
    learned = np.flatnonzero(~texts.held_out)
    title = f"A step of {TIMED}: {ROWS} texts, {batches.capacity:,} entries"
    table = Table(title=title, title_justify="left")
    for column in ("columns", "jmask", "stock optax", "ratio", "parameters differ by"):
        table.add_column(column, justify="right", no_wrap=True)
    for columns in (2**exponent for exponent in exponents):
        some = list(islice(batches.of(learned, columns), 13))
        time_of_ours, params = timed(ours, init_params(columns, labels), some)
        row = [f"{columns:,}", f"{1e3 * time_of_ours:.1f} ms"]
        if columns <= MOST_DENSE:
            time_of_stock, other = timed(stock, init_params(columns, labels), some)
            apart = jnp.abs(params["weights"] - other["weights"]).max()
            row += [
                f"{1e3 * time_of_stock:.1f} ms",
                f"{time_of_stock / time_of_ours:.1f}x",
                f"{float(apart):.0g}",
            ]
        table.add_row(*row)
    return table


# --- command line -----------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Logistic regression on hashed features, with row-sparse gradients.",
        epilog="Without a file: functions of the Python packages on this machine.",
    )
    add = partial(parser.add_argument, metavar="N")
    add("file", nargs="?", type=Path, metavar="FILE", help="lines of: label, tab, text")
    add("--columns", type=_columns, default=2**22, help="of the features (4194304)")
    add("--epochs", type=_positive, default=4, help="how often each text is seen (4)")
    add("--packages", type=_positive, default=8, help="how many, the largest first (8)")
    add("--largest", type=_exponent, default=24, help="the last table ends at 2**N (24)")
    add("--seed", type=int, default=0, help="seed of the random numbers (0)")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _columns(text: str) -> int:
    value = _positive(text)
    if value > MOST_COLUMNS:
        raise argparse.ArgumentTypeError(f"{text} is more than {MOST_COLUMNS}")
    return value


def _exponent(text: str) -> int:
    value = int(text)
    if not 4 <= value <= MOST_COLUMNS.bit_length() - 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 4 and 24")
    return value


def read_texts(args: argparse.Namespace, console: Console) -> tuple[Texts, csr_matrix]:
    with console.status("reading"):
        texts = texts_from_file(args.file) if args.file else texts_from_python(args.packages)
    console.print(
        f"{len(texts.texts):,} texts, {texts.held_out.sum():,} of them held out; "
        f"labels: {', '.join(texts.names)}"
    )
    with console.status("hashing"):
        features = hashed(texts.texts)
    used = len(np.unique(features.indices % args.columns))
    console.print(
        f"{features.nnz / len(texts.texts):.0f} features in a text; "
        f"{used:,} of {args.columns:,} columns are used\n"
    )
    return texts, features


def main(argv: Sequence[str] | None = None) -> None:
    args, console = parse_arguments(argv), Console(highlight=False)
    try:
        texts, features = read_texts(args, console)
    except TextError as error:
        raise SystemExit(f"sparse_linear: {error}") from error
    batches = Batches(features, texts.labels)
    params = train_all(texts, batches, args, console)
    console.print(telling_words(params, texts))
    exponents = range(max(args.largest - 8, 4), args.largest + 1, 2)
    with console.status("timing"):
        table = size_table(texts, batches, exponents)
    console.print(table)


if __name__ == "__main__":
    main()
