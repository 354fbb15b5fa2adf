"""Which package is a function from? Logistic regression on 4,194,304 hashed features.

    python examples/sparse_linear.py                the Python sources on this machine
    python examples/sparse_linear.py FILE           lines of: label, tab, text

The features of a text are its words, pairs of words and sequences of four characters, each
hashed to one of 2**22 columns: some hundred entries in a row of a sparse matrix X. The model
is the softmax of X W + b, and W has 2**22 rows. Two names make the cost of a training step
that of the entries of X, and not that of W:

    jmask.value_and_grad        where jax.value_and_grad was
    jmask.lazy(optimizer)       where optimizer was

The run trains with SGD, Adagrad and Adam and prints how many texts of files that were held
out are recognised. Then it times the same step with 2**16 to 2**24 columns, and stock optax.

References:
    Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", 2009.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.table import Table

import jmask
from common.hashed_texts import MOST_COLUMNS, ROWS, Batch, Batches, hashed
from common.labelled_texts import Texts, texts_from_file, texts_from_python
from common.program import Arguments, Program
from common.step_timing import Step, compare

OPTIMIZERS = {
    "SGD": optax.sgd(50.0),
    "Adagrad": optax.adagrad(0.3, initial_accumulator_value=1e-6),
    "Adam": optax.adam(0.02),
}
TIMED = "Adagrad"  # with it, lazy and dense steps give the same parameters
RECENT = 20  # steps, of which the mean loss is shown

Params = dict[str, jax.Array]


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


def train(
    name: str, texts: Texts, batches: Batches, args: argparse.Namespace, program: Program
) -> tuple[Params, list[float]]:
    """Train with an optimizer; return the parameters, and the loss of each step."""
    tx, params = OPTIMIZERS[name], init_params(args.columns, len(texts.names))
    step, opt_state = make_step(jmask.lazy(tx), jmask.value_and_grad), tx.init(params)
    rng, learned = np.random.default_rng(args.seed), np.flatnonzero(~texts.held_out)
    order = np.concatenate([rng.permutation(learned) for _ in range(args.epochs)])
    losses, done = [], 0
    with program.bar(f"{name:<8}", len(order), "loss {loss:.3f}") as show:
        for batch in program.until_stopped(batches.of(order, args.columns)):
            params, opt_state, loss = step(params, opt_state, batch)
            losses.append(float(loss))
            done += int(batch["is_text"].sum())
            show(done, loss=np.mean(losses[-RECENT:]))
    return params, losses


def step_times(
    texts: Texts, batches: Batches, args: argparse.Namespace, table: Table
) -> dict[int, dict[str, float]]:
    """Time a step for different numbers of columns."""
    tx, times, largest = OPTIMIZERS[TIMED], {}, args.largest
    ours = make_step(jmask.lazy(tx), jmask.value_and_grad)
    stock = make_step(tx, jax.value_and_grad)
    learned = np.flatnonzero(~texts.held_out)
    for columns in (2**n for n in range(max(largest - 8, 4), largest + 1, 2)):
        some = list(islice(batches.of(learned, columns), 6))
        steps = {"jmask": ours} | ({"stock optax": stock} if columns <= args.dense else {})
        params = init_params(columns, len(texts.names))
        times[columns], apart = compare(steps, params, tx.init(params), some, rounds=2)
        ms = [f"{1e3 * seconds:.1f} ms" for seconds in times[columns].values()]
        table.add_row(f"{columns:,}", *ms, *([f"{apart:.0g}"] if len(ms) == 2 else []))
    return times


def save_plot(
    path: Path, losses: dict[str, list[float]], times: dict[int, dict[str, float]]
) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for name, values in losses.items():
        left.plot(np.convolve(values, np.ones(RECENT) / RECENT, "valid"), label=name)
    for name in ("jmask", "stock optax"):
        some = [(columns, 1e3 * t[name]) for columns, t in times.items() if name in t]
        if some:
            right.plot(*zip(*some, strict=True), "o-", label=name)
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="columns", ylabel="ms a step", xscale="log", yscale="log")
    for axes in (left, right) if times else (left,):
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments("sparse_linear", __doc__)
    lines = "lines of: label, tab, text (the Python sources here)"
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help=lines)
    parser.number("--columns", 2**22, "of the features", most=MOST_COLUMNS)
    parser.number("--dense", 2**22, "columns, the most that are timed with stock optax")
    parser.number("--epochs", 2, "how often each text is seen")
    parser.number("--packages", 8, "how many, the largest first")
    parser.number("--largest", 24, "2**N columns, the most that are timed", least=4, most=24)
    args = parser.parse_args(argv)
    with Program("sparse_linear") as program:
        with program.console.status("reading"):
            texts = (
                texts_from_file(args.file) if args.file else texts_from_python(args.packages)
            )
            batches = Batches(hashed(texts.texts), texts.labels)
        held_out, losses = np.flatnonzero(texts.held_out), {}
        program.print(
            f"{len(texts.texts):,} texts, {len(held_out):,} of them held out; "
            f"labels: {', '.join(texts.names)}"
        )
        table = Table("optimizer", "accuracy", "loss", title="Recognised, of those held out")
        for name in OPTIMIZERS:
            params, losses[name] = train(name, texts, batches, args, program)
            if program.stopped:
                break
            test = batches.of(held_out, args.columns)
            right = sum(int(count_right(params, batch)) for batch in test) / len(held_out)
            table.add_row(name, f"{right:.1%}", f"{np.mean(losses[name][-RECENT:]):.3f}")
        save_plot(args.plot, losses, {})
        program.wrote("losses", args.plot)
        program.print(table)
        title = f"A step of {TIMED}: {ROWS} texts, {batches.capacity:,} entries"
        table = Table("columns", "jmask", "stock optax", "parameters differ by", title=title)
        with program.console.status("timing"):
            times = step_times(texts, batches, args, table)
        program.print(table)
        save_plot(args.plot, losses, times)
        program.print(f"losses and times: {args.plot}")


if __name__ == "__main__":
    main()
