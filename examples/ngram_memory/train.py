"""A language model with a memory of n-grams: a table of 10^5 to 10^8 rows in a transformer.

    python examples/ngram_memory/train.py                  the Python sources here
    python examples/ngram_memory/train.py book.txt ...     text files instead
    python examples/ngram_memory/train.py --rows 1e5 1e8   other sizes of the memory

Each token looks up eight rows of one large table, found by hashes of the last two and three
tokens, and a gate decides how much of them is added to the transformer's hidden states (see
model.py). Which rows are read depends on the text alone, so that the memory may have any
size at the cost of the rows read, if its gradient and its optimizer are sparse too:

    jmask.value_and_grad        where jax.value_and_grad was
    jmask.lazy(optax.adamw)     where optax.adamw was: the embedding of tokens is a table too
    jmask.rowwise_adagrad       for the memory: 4 bytes of state beside the 64 of a row

The run trains the transformer without memory, with it, and with it and stock optax, in turns,
until each has had the same time, and measures bits per byte of files that none has seen. Then
it times a step for each size of the memory. With `--checkpoint FOLDER` a run that was stopped
goes on where it was.

References:
    Engram, arXiv 2601.07372; its layer in MaxText; the 2-gram embeddings of nanochat.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules are imported from examples/

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmask
from common.checkpoints import Checkpoints
from common.program import Arguments, Program, rows_from
from common.python_corpus import CorpusError
from ngram_memory.free_memory import free_bytes
from ngram_memory.model import Sizes, init_params, loss_fn
from ngram_memory.pieces import Text, read_text
from ngram_memory.results import Curve, Seconds, save_plot, step_table, training_table

WITHOUT, WITH, STOCK = "without memory", "with memory, jmask", "with memory, stock optax"

LEARNING_RATE, MEMORY_RATE = 2e-3, 0.3
BATCH = 8  # texts
TURN = 1.0  # seconds that a model trains before another takes its turn
POINTS = 8  # of each curve
KEEP_EVERY = 60  # turns
SETTINGS = ("memory", "width", "row", "dtype", "seed")
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
    """Return a model with a memory of `rows` rows of `dtype`, or without.

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


def random_batches(text: Text, sizes: Sizes, seed: int, start: int = 0) -> Iterator[np.ndarray]:
    """Yield batches from a step on, the same for the same step."""
    for step in count(start):
        rng = np.random.default_rng((seed, step))
        starts = rng.integers(len(text.train) - sizes.length, size=(BATCH, 1))
        yield text.train[starts + np.arange(sizes.length + 1)]


def bits_per_byte(model: Model, text: Text, sizes: Sizes) -> float:
    """Return the bits per byte of the text held out, or of its first part."""
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
    args: argparse.Namespace,
    checkpoints: Checkpoints,
    program: Program,
) -> dict[str, Curve]:
    """Train models in turns until each has had `args.seconds`, measuring them not counted."""
    curves = {name: Curve([], [], []) for name in models}
    state = {name: model.state for name, model in models.items()}
    record = {"spent": dict.fromkeys(models, 0.0), "steps": dict.fromkeys(models, 0)}
    turns, state, record = checkpoints.restore(state, record | {"curves": curves})
    spent, steps = record["spent"], record["steps"]
    curves = {name: Curve(*curve) for name, curve in record["curves"].items()}
    models.update({name: models[name]._replace(state=state[name]) for name in models})
    del state  # or two runs would be in memory
    batches = {name: random_batches(text, sizes, args.seed, steps[name]) for name in models}

    def one_step(name: str) -> None:
        state, _ = models[name].step(models[name].state, next(batches[name]))
        models[name] = models[name]._replace(state=jax.block_until_ready(state))
        steps[name] += 1

    def measure(name: str) -> None:
        bits = bits_per_byte(models[name], text, sizes)
        for values, value in zip(curves[name], (spent[name], bits, steps[name]), strict=True):
            values.append(value)

    def turn() -> Iterator[str]:
        """Yield whose turn it is: who has had least, until all have had enough."""
        while (name := min(spent, key=spent.__getitem__)) and spent[name] < args.seconds:
            yield name

    def save() -> None:
        state = {name: model.state for name, model in models.items()}
        checkpoints.save(turns, state, {"spent": spent, "steps": steps, "curves": curves})

    with program.bar("training", args.seconds * len(models), "{bits} bits per byte") as show:
        for name in models:
            one_step(name)  # compiles
            if not curves[name].bits:
                measure(name)
        for name in program.until_stopped(turn()):
            turns += 1
            start = time.perf_counter()
            while (taken := time.perf_counter() - start) < min(TURN, args.seconds):
                one_step(name)
                if program.stopped:
                    break
            spent[name] += taken
            if spent[name] >= min(1, len(curves[name].bits) / POINTS) * args.seconds:
                measure(name)
            bits = ", ".join(f"{curve.bits[-1]:.2f}" for curve in curves.values())
            show(sum(spent.values()), bits=bits)
            if turns % KEEP_EVERY == 0:
                save()
        save()
    return curves


def time_steps(
    kinds: Sequence[tuple[str, int]],
    make: Callable[[str, int], Model],
    batches: Iterator[np.ndarray],
    seconds: float,
    program: Program,
) -> Seconds:
    """Return the median seconds of a step of each (kind, rows), and without memory.

    What else the machine does changes from minute to minute. So each takes turns with the
    model without memory, and its time is that of this model times the ratio in these turns.
    """
    ratios: Seconds = {(WITHOUT, 0): 1.0}
    base, of_base = make(WITHOUT, 0), []

    def timed(model: Model) -> tuple[Model, float]:
        start = time.perf_counter()
        state, _ = jax.block_until_ready(model.step(model.state, next(batches)))
        return model._replace(state=state), time.perf_counter() - start

    with program.console.status("timing") as status:
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
    """Estimate the memory of a step; stock optax makes arrays of the table's size."""
    if kind == STOCK:
        return 5 * 4 * rows * row
    return rows * (jnp.dtype(dtype).itemsize * row + 4)


# --- command line -----------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments("ngram_memory", __doc__, checkpoint=True)
    add = parser.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="text (the Python sources here)")
    parser.number("--seconds", 45.0, "training of each model")
    add("--memory", metavar="N", type=rows_from(100), default=10**7, help="rows trained (1e7)")
    sizes = [10**5, 10**6, 10**7, 10**8]
    timed = "sizes to time (1e5 to 1e8)"
    add("--rows", metavar="N", type=rows_from(100), nargs="*", default=sizes, help=timed)
    parser.number("--timing", 6.0, "seconds to time each size")
    parser.number("--vocabulary", 4096, "of the model", least=257)
    parser.number("--width", 128, "of the transformer")
    parser.number("--row", 16, "numbers in a row of the memory")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the memory")
    args = parser.parse_args(argv)
    if args.width % 8:
        parser.error(f"argument --width: {args.width} is not a multiple of 8")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    with Program("ngram_memory") as program:
        run(args, program)


def run(args: argparse.Namespace, program: Program) -> None:
    with program.console.status("reading"):
        text = read_text(args.files, MOST_TEXT, args.vocabulary)
    sizes = Sizes(text.vocabulary, width=args.width, row=args.row)
    if min(len(text.train), len(text.held_out) // BATCH) <= sizes.length:
        raise CorpusError(f"{len(text.train):,} tokens are too little text to learn from")
    program.print(
        f"{len(text.train):,} tokens of {text.vocabulary:,} different ones to learn from, "
        f"{text.held_out_bytes:,} bytes held out"
    )

    def make(kind: str, rows: int) -> Model:
        dtype = jnp.float32 if kind == STOCK else jnp.dtype(args.dtype)
        return make_model(kind, sizes, rows, args.seed, dtype)

    def fits(kind: str, rows: int, room: float) -> bool:
        needed = needed_bytes(kind, rows, args.row, args.dtype)
        if needed >= 0.9 * room:
            program.print(f"{kind}, {rows:,} rows: left out, it needs {needed / 1e9:.0f} GB")
        return needed < 0.9 * room

    wanted = [(WITHOUT, 0), (WITH, args.memory), (STOCK, args.memory)]
    room = free_bytes() - needed_bytes(WITH, args.memory, args.row, args.dtype)
    models = {kind: make(kind, n) for kind, n in wanted if kind != STOCK or fits(kind, n, room)}
    settings = {"models": list(models), "vocabulary": text.vocabulary}
    settings |= {name: getattr(args, name) for name in SETTINGS}
    with Checkpoints(args.checkpoint, settings, program) as checkpoints:
        curves = train(models, text, sizes, args, checkpoints, program)
    models.clear()
    save_plot(args.plot, curves, {})
    program.wrote("bits per byte", args.plot)
    program.print(training_table(f"A memory of {args.memory:,} rows", curves))

    room = free_bytes()
    kinds = [(kind, n) for n in args.rows for kind in (WITH, STOCK) if fits(kind, n, room)]
    batches = random_batches(text, sizes, args.seed)
    seconds = time_steps(kinds, make, batches, args.timing, program)
    program.print(step_table(f"A step of {BATCH * sizes.length:,} tokens", seconds))
    save_plot(args.plot, curves, seconds)
    program.print(f"bits per byte, and times: {args.plot}")


if __name__ == "__main__":
    main()
