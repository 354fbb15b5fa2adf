"""A language model with a memory of n-grams: a table of 10^5 to 10^8 rows in a transformer.

    python examples/ngram_memory.py                  the Python sources on this machine
    python examples/ngram_memory.py book.txt ...     text files instead
    python examples/ngram_memory.py --rows 1e5 1e8   other sizes of the memory
    python examples/ngram_memory.py --help

Each token looks up eight rows of one large table, found by hashes of the last two and three
tokens, and a gate decides how much of them is added to the transformer's hidden states (see
ngram_model.py). Which rows are read depends on the text alone, so that the memory may have any
size at the cost of the rows read, if its gradient and its optimizer are sparse too:

    jmask.value_and_grad        where jax.value_and_grad was
    jmask.lazy(optax.adamw)     where optax.adamw was: the embedding of tokens is a table too
    jmask.rowwise_adagrad       for the memory: 4 bytes of state beside the 64 of a row

The run trains the transformer without memory, with it, and with it and stock optax, in turns,
until each has had the same time, and measures bits per byte of files that none has seen. Then
it times a step for each size of the memory.

Needs the packages of `pip install 'jmask[examples]'`.

References:
    Engram, arXiv 2601.07372; its layer in MaxText; the 2-gram embeddings of nanochat.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from free_memory import free_bytes
from ngram_model import Sizes, init_params, loss_fn
from ngram_results import Curve, Seconds, save_plot, step_table, training_table
from python_corpus import CorpusError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from source_pieces import Text, read_text

import jmask

WITHOUT, WITH, STOCK = "without memory", "with memory, jmask", "with memory, stock optax"

LEARNING_RATE, MEMORY_RATE = 2e-3, 0.3
BATCH = 8  # texts
TURN = 1.0  # seconds that a model trains before another takes its turn
POINTS = 8  # of each curve
MEASURED = 96  # held-out texts for a point
MOST_TEXT = 8_000_000  # bytes, read in some seconds


class Model(NamedTuple):
    """A model in training.

    Attributes:
        step: (state, tokens) -> new state and loss.
        bits: (state, tokens) -> mean loss of a token, in bits.
        state: parameters, the optimizer's state and the number of the step.
    """

    step: Callable[..., tuple[Any, jax.Array]]
    bits: Callable[..., jax.Array]
    state: Any


# --- the training step ------------------------------------------------------------------


def make_model(
    kind: str, sizes: Sizes, rows: int, seed: int = 0, dtype: Any = jnp.float32
) -> Model:
    """A model with a memory of `rows` rows of `dtype`, or without.

    The memory of stock optax has Adagrad's sum for each of its numbers. The gradients of single
    rows are small, and so must be its epsilon, which is under the root.
    """
    if kind == STOCK:
        value_and_grad = jax.value_and_grad
        adamw = optax.adamw(LEARNING_RATE)
        adagrad = optax.adagrad(MEMORY_RATE, initial_accumulator_value=0.0, eps=1e-20)
    else:
        value_and_grad = jmask.value_and_grad
        adamw = jmask.lazy(optax.adamw(LEARNING_RATE))
        adagrad = jmask.rowwise_adagrad(MEMORY_RATE, state_dtype=jnp.float32)
    tx = optax.partition({"memory": adagrad, "rest": adamw}, _labels)
    loss = partial(loss_fn, sizes=sizes, rows=rows)

    @partial(jax.jit, donate_argnums=0)
    def step(state, tokens):
        params, opt_state, number = state
        value, grads = value_and_grad(loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        if dtype == jnp.float32:
            params = optax.apply_updates(params, updates)
        else:  # rounded to nearest, a 16-bit memory would lose small updates
            params = jmask.apply_updates(params, updates, key=jax.random.key(number))
        return (params, opt_state, number + 1), value

    params = init_params(sizes, rows, seed, dtype)
    bits = jax.jit(lambda state, tokens: loss(state[0], tokens) / np.log(2))
    return Model(step, bits, (params, tx.init(params), jnp.int32(0)))


def _labels(params: Any) -> dict[str, str]:
    return {name: "memory" if name == "memory" else "rest" for name in params}


# --- text -------------------------------------------------------------------------------


def random_batches(text: Text, sizes: Sizes, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(text.train) - sizes.length, size=(BATCH, 1))
        yield text.train[starts + np.arange(sizes.length + 1)]


def bits_per_byte(model: Model, text: Text, sizes: Sizes) -> float:
    """Of the text held out, or of its first part."""
    lines = min((len(text.held_out) - 1) // sizes.length, MEASURED) // BATCH * BATCH
    starts = np.arange(0, lines * sizes.length, sizes.length)[:, None]
    tokens = text.held_out[starts + np.arange(sizes.length + 1)]
    bits = [model.bits(model.state, t) for t in tokens.reshape(-1, BATCH, sizes.length + 1)]
    return float(np.mean(bits)) * len(text.held_out) / text.held_out_bytes


# --- training and timing ----------------------------------------------------------------


def train(
    models: dict[str, Model],
    text: Text,
    sizes: Sizes,
    seconds: float,
    seed: int,
    console: Console,
) -> dict[str, Curve]:
    """Train models in turns until each has had `seconds`, measuring them not counted."""
    batches = {name: random_batches(text, sizes, seed) for name in models}
    curves = {name: Curve([], [], []) for name in models}
    spent, steps = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0)
    progress = Progress(
        TextColumn("training"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[bits]} bits per byte"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )

    def one_step(name: str) -> None:
        state, _ = models[name].step(models[name].state, next(batches[name]))
        models[name] = models[name]._replace(state=jax.block_until_ready(state))
        steps[name] += 1

    def measure(name: str) -> None:
        bits = bits_per_byte(models[name], text, sizes)
        for values, value in zip(curves[name], (spent[name], bits, steps[name]), strict=True):
            values.append(value)

    with progress:
        bar = progress.add_task("", total=seconds * len(models), bits="...")
        for name in models:
            one_step(name)  # compiles
            measure(name)
        while (name := min(spent, key=spent.__getitem__)) and spent[name] < seconds:
            start = time.perf_counter()
            while (taken := time.perf_counter() - start) < min(TURN, seconds):
                one_step(name)
            spent[name] += taken
            if spent[name] >= min(1, len(curves[name].bits) / POINTS) * seconds:
                measure(name)
            bits = ", ".join(f"{curve.bits[-1]:.2f}" for curve in curves.values())
            progress.update(bar, completed=sum(spent.values()), bits=bits)
    return curves


def time_steps(
    kinds: Sequence[tuple[str, int]],
    make: Callable[[str, int], Model],
    batches: Iterator[np.ndarray],
    seconds: float,
    console: Console,
) -> Seconds:
    """Median seconds of a step of each (kind, rows), and without memory.

    What else the machine does changes from minute to minute. So each takes turns with the
    model without memory, and its time is that of this model times the ratio in these turns.
    """
    ratios: Seconds = {(WITHOUT, 0): 1.0}
    base, of_base = make(WITHOUT, 0), []

    def timed(model: Model) -> tuple[Model, float]:
        start = time.perf_counter()
        state, _ = jax.block_until_ready(model.step(model.state, next(batches)))
        return model._replace(state=state), time.perf_counter() - start

    with console.status("timing") as status:
        for kind, rows in kinds:
            status.update(f"timing a step {kind}, {rows:,} rows")
            model, pairs = make(kind, rows), []
            while len(pairs) < 4 or np.sum(pairs[1:]) < seconds:
                base, first = timed(base)
                model, second = timed(model)
                pairs.append((first, second))
            del model  # before the next one is made
            firsts, others = np.transpose(pairs[1:])  # the first of all compiles
            ratios[kind, rows] = float(np.median(others / firsts))
            of_base.extend(firsts)
    return {name: ratio * float(np.median(of_base)) for name, ratio in ratios.items()}


def needed_bytes(kind: str, rows: int, row: int, dtype: Any) -> int:
    """Memory for a step: stock optax makes a gradient and an update of the table's size."""
    if kind == STOCK:
        return 5 * 4 * rows * row
    return rows * (jnp.dtype(dtype).itemsize * row + 4)


# --- command line -----------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A small language model with and without a memory of n-grams.",
        epilog="Without files: the Python sources on this machine.",
    )
    add = partial(parser.add_argument, metavar="N")
    add("files", nargs="*", type=Path, metavar="FILE", help="text to learn from")
    add("--seconds", type=_positive, default=45.0, help="training of each model (45)")
    add("--memory", type=_rows, default=10**7, help="rows of the memory trained (1e7)")
    sizes = [10**5, 10**6, 10**7, 10**8]
    add("--rows", type=_rows, nargs="*", default=sizes, help="sizes to time (1e5 to 1e8)")
    add("--timing", type=_positive, default=6.0, help="seconds to time each size (6)")
    add("--vocabulary", type=int, default=4096, help="of the model (4096)")
    add("--width", type=int, default=128, help="of the transformer (128)")
    add("--row", type=int, default=16, help="numbers in a row of the memory (16)")
    add("--seed", type=int, default=0, help="seed of the random numbers (0)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of the memory (float32)",
    )
    add("--plot", type=Path, metavar="PATH", help="where to draw (ngram_memory.png)")
    parser.set_defaults(plot=Path("ngram_memory.png"))
    args = parser.parse_args(argv)
    if args.plot.is_dir() or not args.plot.parent.is_dir():
        parser.error(f"argument --plot: {args.plot} is not a file in a directory")
    if args.vocabulary <= 256:
        parser.error(f"argument --vocabulary: {args.vocabulary} is not more than 256 bytes")
    if args.width < 8 or args.width % 8:
        parser.error(f"argument --width: {args.width} is not a multiple of 8")
    if args.row < 1:
        parser.error(f"argument --row: {args.row} is not positive")
    return args


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _rows(text: str) -> int:
    rows = float(text)
    if not 100 <= rows <= 2e9 or rows != int(rows):
        raise argparse.ArgumentTypeError(f"{text} is no number of rows from 100 to 2e9")
    return int(rows)


def main(argv: Sequence[str] | None = None) -> None:
    args, console = parse_arguments(argv), Console(highlight=False)
    try:
        with console.status("reading"):
            text = read_text(args.files, MOST_TEXT, args.vocabulary)
        sizes = Sizes(text.vocabulary, width=args.width, row=args.row)
        if min(len(text.train), len(text.held_out) // BATCH) <= sizes.length:
            raise CorpusError(f"{len(text.train):,} tokens are too little text to learn from")
    except CorpusError as error:
        raise SystemExit(f"ngram_memory: {error}") from error
    console.print(
        f"{len(text.train):,} tokens of {text.vocabulary:,} different ones to learn from, "
        f"{text.held_out_bytes:,} bytes held out"
    )

    def make(kind: str, rows: int) -> Model:
        dtype = jnp.float32 if kind == STOCK else jnp.dtype(args.dtype)
        return make_model(kind, sizes, rows, args.seed, dtype)

    def fits(kind: str, rows: int, room: float) -> bool:
        needed = needed_bytes(kind, rows, args.row, args.dtype)
        if needed >= 0.9 * room:
            console.print(f"{kind}, {rows:,} rows: left out, it needs {needed / 1e9:.0f} GB")
        return needed < 0.9 * room

    wanted = [(WITHOUT, 0), (WITH, args.memory), (STOCK, args.memory)]
    room = free_bytes() - needed_bytes(WITH, args.memory, args.row, args.dtype)
    models = {kind: make(kind, n) for kind, n in wanted if kind != STOCK or fits(kind, n, room)}
    curves = train(models, text, sizes, args.seconds, args.seed, console)
    models.clear()
    console.print(training_table(f"A memory of {args.memory:,} rows", curves))

    room = free_bytes()
    kinds = [(kind, n) for n in args.rows for kind in (WITH, STOCK) if fits(kind, n, room)]
    batches = random_batches(text, sizes, args.seed)
    seconds = time_steps(kinds, make, batches, args.timing, console)
    console.print(step_table(f"A step of {BATCH * sizes.length:,} tokens", seconds))
    save_plot(args.plot, curves, seconds)
    console.print(f"plot: {args.plot}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
