"""A language model with a memory of n-grams: tables of 10^5 to 10^8 rows in a transformer.

    python examples/ngram_memory.py                  the Python sources on this machine
    python examples/ngram_memory.py book.txt ...     text files instead
    python examples/ngram_memory.py --rows 1e5 1e8   other sizes of the memory
    python examples/ngram_memory.py --help

Each token looks up eight rows of one large table, found by hashes of the last two and three
tokens, and a gate decides how much of them is added to the transformer's hidden states (see
ngram_model.py). Which rows are read depends on the text alone, so the model gets a memory of
any size at the cost of the rows read, if its gradient and its optimizer are sparse too:

    jmask.value_and_grad        where jax.value_and_grad was
    jmask.rowwise_adagrad       one accumulator for each row: 4 bytes beside a row's 64
    jmask.lazy(optax.adamw)     for the rest, whose token embedding is a table as well

The run trains the same transformer with and without memory, in turns, until each has had the
same time, and measures bits per byte of files that neither has seen. Then it times a step for
each size of the memory, and of stock optax with its dense gradients for those that it can.

Needs the packages of `pip install 'jmask[examples]'`.

References:
    Engram, arXiv 2601.07372; its layer in MaxText; the 2-gram embeddings of nanochat.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from ngram_model import Sizes, init_memory, init_params, loss_fn
from python_corpus import CorpusError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from source_pieces import Text, read_text

import jmask

LEARNING_RATE, MEMORY_RATE = 2e-3, 0.3
BATCH = 8
TURN = 10  # steps that a model takes before the other takes its own
MOST_TEXT = 8_000_000  # bytes, read in a second

WITHOUT, WITH, STOCK = "without memory", "with memory", "stock optax"

Step = Callable[..., tuple[Any, jax.Array]]


class Model(NamedTuple):
    """A model in training.

    Attributes:
        step: (state, tokens, key) -> new state and loss.
        state: parameters, memory, and the optimizers' states.
        sizes, rows: of the model, and of its memory: 0 without.
    """

    step: Step
    state: Any
    sizes: Sizes
    rows: int


# --- training steps ---------------------------------------------------------------------


def sparse_model(sizes: Sizes, rows: int, seed: int, dtype: Any = jnp.float32) -> Model:
    """With a memory of `rows` rows, or without; a step costs what the rows read cost."""
    tx, memory_tx = jmask.lazy(optax.adamw(LEARNING_RATE)), jmask.rowwise_adagrad(MEMORY_RATE)
    params = init_params(sizes, seed, memory=rows > 0)
    memory = init_memory(sizes, rows, dtype) if rows else None
    if dtype != jnp.float32:
        memory_tx = jmask.rowwise_adagrad(MEMORY_RATE, state_dtype=jnp.float32)

    @partial(jax.jit, donate_argnums=0)
    def step(state, tokens, key):
        params, opt_state, memory, memory_state = state
        if memory is None:
            loss, grads = jmask.value_and_grad(loss_fn)(params, None, tokens, sizes, rows)
        else:
            gradients = jmask.value_and_grad(loss_fn, (0, 1))
            loss, (grads, of_memory) = gradients(params, memory, tokens, sizes, rows)
            # A 16-bit memory is rounded stochastically, or small steps would be lost.
            memory, memory_state = jmask.apply_gradients(
                memory_tx,
                of_memory,
                memory_state,
                memory,
                key=None if dtype == jnp.float32 else key,
            )
        params, opt_state = jmask.apply_gradients(tx, grads, opt_state, params)
        return (params, opt_state, memory, memory_state), loss

    memory_state = memory_tx.init(memory) if rows else ()
    return Model(step, (params, tx.init(params), memory, memory_state), sizes, rows)


def stock_model(sizes: Sizes, rows: int, seed: int) -> Model:
    """The same with JAX and optax alone: dense gradients, Adagrad entry by entry."""
    tx = optax.adamw(LEARNING_RATE)
    memory_tx = optax.adagrad(MEMORY_RATE, initial_accumulator_value=0.0)

    @partial(jax.jit, donate_argnums=0)
    def step(state, tokens, key):
        params, opt_state, memory, memory_state = state
        gradients = jax.value_and_grad(loss_fn, (0, 1))
        loss, (grads, of_memory) = gradients(params, memory, tokens, sizes, rows)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        updates, memory_state = memory_tx.update(of_memory, memory_state, memory)
        return (params, opt_state, optax.apply_updates(memory, updates), memory_state), loss

    params, memory = init_params(sizes, seed, memory=True), init_memory(sizes, rows)
    state = (params, tx.init(params), memory, memory_tx.init(memory))
    return Model(step, state, sizes, rows)


# --- data and evaluation ----------------------------------------------------------------


def random_batch(text: Text, sizes: Sizes, rng: np.random.Generator) -> np.ndarray:
    starts = rng.integers(len(text.train) - sizes.length, size=(BATCH, 1))
    return text.train[starts + np.arange(sizes.length + 1)]


class Evaluation:
    """Bits per byte of the held-out text, or of its first part."""

    def __init__(self, text: Text, sizes: Sizes, most: int):
        lines = min((len(text.held_out) - 1) // sizes.length, most)
        lines -= lines % BATCH
        if not lines:
            raise CorpusError(f"the text held out, {text.held_out_bytes} bytes, is too short")
        starts = np.arange(0, lines * sizes.length, sizes.length)[:, None]
        tokens = text.held_out[starts + np.arange(sizes.length + 1)]
        self.batches = tokens.reshape(-1, BATCH, sizes.length + 1)
        share = lines * sizes.length / len(text.held_out)
        self.bits = lines * sizes.length / np.log(2) / (share * text.held_out_bytes)

    def __call__(self, model: Model) -> float:
        params, _, memory, _ = model.state
        losses = [
            float(_loss(params, memory, tokens, model.sizes, model.rows))
            for tokens in self.batches
        ]
        return float(np.mean(losses)) * self.bits


_loss = partial(jax.jit, static_argnums=(3, 4))(loss_fn)


# --- training ---------------------------------------------------------------------------


class Curve(NamedTuple):
    """Bits per byte of the held-out text after so many seconds of training, and the steps."""

    seconds: list[float]
    bits: list[float]
    steps: list[int]


def train(
    models: dict[str, Model],
    text: Text,
    evaluation: Evaluation,
    seconds: float,
    points: int,
    seed: int,
    console: Console,
) -> dict[str, Curve]:
    """Train models in turns until each has had `seconds`, evaluation not counted."""
    rng = np.random.default_rng(seed)
    spent, steps = dict.fromkeys(models, 0.0), dict.fromkeys(models, 0)
    curves = {name: Curve([], [], []) for name in models}
    for name, model in models.items():  # compiles
        state, _ = model.step(model.state, random_batch(text, model.sizes, rng), _key(0))
        models[name] = model._replace(state=jax.block_until_ready(state))

    def evaluate(name: str) -> None:
        curve = curves[name]
        curve.seconds.append(spent[name])
        curve.bits.append(evaluation(models[name]))
        curve.steps.append(steps[name])

    for name in models:
        evaluate(name)
    progress = Progress(
        TextColumn("training"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[bits]}"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    with progress:
        bar = progress.add_task("", total=seconds * len(models), bits="")
        while (name := min(spent, key=spent.__getitem__)) and spent[name] < seconds:
            model, state = models[name], models[name].state
            batches = [random_batch(text, model.sizes, rng) for _ in range(TURN)]
            start = time.perf_counter()
            for batch in batches:
                state, loss = model.step(state, batch, _key(steps[name]))
                steps[name] += 1
            loss.block_until_ready()
            spent[name] += time.perf_counter() - start
            models[name] = model._replace(state=state)
            if spent[name] >= seconds * len(curves[name].bits) / points:
                evaluate(name)
            bits = " ".join(f"{name} {curve.bits[-1]:.3f}" for name, curve in curves.items())
            progress.update(bar, completed=sum(spent.values()), bits=f"bits per byte: {bits}")
    return curves


def _key(number: int) -> jax.Array:
    return jax.random.key(number)


# --- the time of a step -----------------------------------------------------------------


def time_steps(
    makers: dict[str, Callable[[], Model]], text: Text, rounds: int, console: Console
) -> dict[str, float]:
    """Median seconds of a step: two models at a time, each beside the first, in turns.

    What else the machine does changes from minute to minute, so that times of different minutes
    do not compare. Each is given as the time of the first, times the ratio to it.
    """
    (reference, make), *others = makers.items()
    base = make()
    rng = np.random.default_rng(1)
    ratios: dict[str, float] = {reference: 1.0}
    of_base: list[float] = []

    def timed(model: Model, times: list[float]) -> Model:
        batch = random_batch(text, model.sizes, rng)
        start = time.perf_counter()
        state = jax.block_until_ready(model.step(model.state, batch, _key(0))[0])
        times.append(time.perf_counter() - start)
        return model._replace(state=state)

    with console.status("timing") as status:
        for name, make in others:
            status.update(f"timing a step {name}")
            model, pairs = make(), ([], [])
            for _ in range(rounds + 1):  # one more, which compiles
                base, model = timed(base, pairs[0]), timed(model, pairs[1])
            firsts, seconds = (np.array(times[1:]) for times in pairs)
            ratios[name] = float(np.median(seconds / firsts))
            of_base.extend(firsts)
            del model
    reference_seconds = float(np.median(of_base))
    return {name: ratio * reference_seconds for name, ratio in ratios.items()}


# --- results ----------------------------------------------------------------------------


def results_table(seconds: dict[str, float]) -> Table:
    table = Table(title=f"A step of {BATCH} texts", title_justify="left")
    table.add_column("model")
    for column in ("time", "to that without memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, time_of_step in seconds.items():
        ratio = time_of_step / seconds[WITHOUT]
        table.add_row(name, f"{1e3 * time_of_step:.1f} ms", f"{ratio:.2f}")
    return table


def named(kind: str, rows: int) -> str:
    return f"{kind}, {rows:,} rows"


def save_plot(path: Path, curves: dict[str, Curve], seconds: dict[str, float]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name, curve in curves.items():
        left.plot(curve.seconds[1:], curve.bits[1:], "o-", markersize=3, label=name)
    left.set(xlabel="seconds of training", ylabel="bits per byte, held out")
    left.legend(frameon=False)
    for kind, style in ((WITH, "o-"), (STOCK, "s--")):
        sizes = [
            (float(name.split(", ")[1].split(" ")[0].replace(",", "")), time_of_step)
            for name, time_of_step in seconds.items()
            if name.startswith(f"{kind}, ")
        ]
        if sizes:
            rows, times = zip(*sorted(sizes), strict=True)
            right.plot(rows, 1e3 * np.array(times), style, label=kind)
    right.axhline(1e3 * seconds[WITHOUT], linestyle=":", color="grey", label=WITHOUT)
    right.set(xscale="log", yscale="log", xlabel="rows of the memory", ylabel="ms for a step")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


# --- command line -----------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A small language model with and without a memory of n-grams.",
        epilog="Without files: the Python sources on this machine.",
    )
    add = partial(parser.add_argument, metavar="N")
    add("files", nargs="*", type=Path, metavar="FILE", help="text to learn from")
    add("--seconds", type=_positive, default=75.0, help="training of each model (75)")
    add("--memory", type=_rows, default=10**6, help="rows of the one trained (1e6)")
    add("--rows", type=_rows, nargs="*", default=[10**5, 10**6, 10**7], help="sizes to time")
    add("--dense", type=_rows, default=10**6, help="most rows for stock optax (1e6)")
    add("--rounds", type=int, default=15, help="steps to time, of each (15)")
    add("--vocabulary", type=int, default=4096, help="of the model (4096)")
    add("--width", type=int, default=128, help="of the transformer (128)")
    add("--row", type=int, default=16, help="numbers in a row of the memory (16)")
    add("--seed", type=int, default=0, help="seed of the random numbers (0)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--plot", type=Path, default=Path("ngram_memory.png"), metavar="PATH")
    args = parser.parse_args(argv)
    if args.plot.is_dir() or not args.plot.parent.is_dir():
        parser.error(f"argument --plot: {args.plot} is not a file in a directory")
    if args.vocabulary <= 256 or args.width % 8 or args.rounds < 1 or args.row < 1:
        parser.error(
            "--vocabulary must be > 256, --width a multiple of 8, --rounds, --row >= 1"
        )
    return args


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _rows(text: str) -> int:
    rows = float(text)
    if not 100 <= rows <= 2**31 - 1e6 or rows != int(rows):
        raise argparse.ArgumentTypeError(f"{text} is no number of rows from 100 to 2e9")
    return int(rows)


def main(argv: Sequence[str] | None = None) -> None:
    args, console = parse_arguments(argv), Console(highlight=False)
    dtype = jnp.dtype(args.dtype)
    try:
        with console.status("reading"):
            text = read_text(args.files, MOST_TEXT, args.vocabulary)
        sizes = Sizes(text.vocabulary, width=args.width, row=args.row)
        if len(text.train) <= sizes.length:
            raise CorpusError(f"{len(text.train)} tokens are too little text")
        evaluation = Evaluation(text, sizes, most=192)
    except CorpusError as error:
        raise SystemExit(f"ngram_memory: {error}") from error
    console.print(
        f"{len(text.train):,} tokens of {text.vocabulary:,} to learn from, "
        f"{text.held_out_bytes:,} bytes held out"
    )
    make = partial(sparse_model, sizes, seed=args.seed, dtype=dtype)
    models = {WITHOUT: make(0), WITH: make(args.memory)}
    curves = train(models, text, evaluation, args.seconds, 12, args.seed, console)
    models.clear()
    for name, curve in curves.items():
        console.print(
            f"{name}: {curve.steps[-1]:,} steps in {curve.seconds[-1]:.0f} s, "
            f"[bold]{curve.bits[-1]:.3f}[/] bits per byte"
        )
    makers: dict[str, Callable[[], Model]] = {WITHOUT: partial(make, 0)}
    for rows in args.rows:
        makers[named(WITH, rows)] = partial(make, rows)
        if rows <= args.dense:
            makers[named(STOCK, rows)] = partial(stock_model, sizes, rows, args.seed)
    seconds = time_steps(makers, text, args.rounds, console)
    console.print(results_table(seconds))
    save_plot(args.plot, curves, seconds)
    console.print(f"plot: {args.plot}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
