"""A recommender whose items come and go: rows for keys that are not known beforehand.

    python examples/open_vocabulary.py
    python examples/open_vocabulary.py --rows 1024 --alive 50000

New items come with every step, others are gone for good, and a few of them are in every batch.
Their keys are strings. Whether a user likes an item is to be learned, in three ways:

    open vocabulary     jmask.vocabulary: a row of its own for an item that comes often, in
                        place of one that no longer comes
    hashed              as many rows, which items share by the hash of their key
    a row for each      all that ever come are known beforehand: more rows than there may be

The picture has the loss on each batch before it is learned, and how many of its keys have a row
of their own.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.table import Table

import jmask
from common.program import Arguments, Program

LIKES = 512  # of a batch
TASTES = 8  # numbers that make up who likes what
NEW = 20  # items in each step
RECENT = 50  # steps, of which a mean is shown
INIT = jax.nn.initializers.zeros

Batch = dict[str, Any]
Find = Callable[[Any, Batch], tuple[jax.Array, Any, jax.Array]]


class Way(NamedTuple):
    """How items get rows: what is kept of them, and (kept, batch) -> (rows, kept, recycled)."""

    table_rows: int
    kept: Any
    find: Find


def batches(args: argparse.Namespace) -> Iterator[Batch]:
    """Draw users, items by Zipf's law among those that are alive, and who likes what."""
    rng = np.random.default_rng(args.seed)
    tastes = rng.normal(size=(args.alive + NEW * args.steps, TASTES)).astype(np.float32)
    # Each item has one popularity as long as it lives.
    place_of_rank = rng.permutation(args.alive)
    weights = 1 / np.arange(1, args.alive + 1)
    shares = np.cumsum(weights / weights.sum())
    for step in range(args.steps):
        places = place_of_rank[np.searchsorted(shares, rng.random(LIKES))]
        first = NEW * step
        items = first + (places - first) % args.alive
        users = rng.normal(size=(LIKES, TASTES)).astype(np.float32)
        scores = 2 * np.sum(users * tastes[items], 1)
        likes = rng.random(LIKES) < 1 / (1 + np.exp(-scores))
        keys = jmask.vocabulary.hash_strings(f"item {i}" for i in items.tolist())
        yield {"keys": keys, "items": items.astype(np.int32), "users": users, "likes": likes}


def ways(args: argparse.Namespace) -> dict[str, Way]:
    vocab = jmask.vocabulary.create(args.rows, args.ways, args.admit_after, args.evict)
    nothing = jnp.zeros(0, jnp.int32)

    def open_vocabulary(vocab, batch):
        return jmask.vocabulary.rows_of(vocab, batch["keys"])

    def by_hash(_, batch):
        hashes = batch["keys"][:, 1] % np.uint32(vocab.table_rows)
        return hashes.astype(jnp.int32), (), nothing

    def of_its_own(_, batch):
        return batch["items"], (), nothing

    return {
        "open vocabulary": Way(vocab.table_rows, vocab, open_vocabulary),
        "hashed": Way(vocab.table_rows, (), by_hash),
        "a row for each": Way(args.alive + NEW * args.steps, (), of_its_own),
    }


def loss_fn(params: dict[str, jax.Array], rows: jax.Array, batch: Batch) -> jax.Array:
    scores = jnp.sum(params["table"][rows] * batch["users"], 1)
    return optax.sigmoid_binary_cross_entropy(scores, batch["likes"].astype(jnp.float32)).mean()


def make_step(tx: optax.GradientTransformation, find: Find) -> Callable:
    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, kept, batch):
        rows, kept, recycled = find(kept, batch)
        params, state = jmask.vocabulary.reset(tx, params, state, {"table": recycled}, INIT)
        loss, grads = jmask.value_and_grad(loss_fn)(params, rows, batch)
        params, state = jmask.apply_gradients(tx, grads, state, params)
        return params, state, kept, loss, rows

    return step


def train(
    name: str, way: Way, args: argparse.Namespace, program: Program
) -> tuple[list[float], list[float]]:
    """Return the loss of each batch before its step, and the share of keys with own rows."""
    tx, kept = jmask.adagrad(args.rate, initial_accumulator_value=0.1), way.kept
    params = {"table": jnp.zeros((way.table_rows, TASTES))}
    state, step, losses, shares = tx.init(params), make_step(tx, way.find), [], []
    with program.bar(f"{name:<15}", args.steps, "loss {loss:.3f}") as show:
        for number, batch in enumerate(program.until_stopped(batches(args)), 1):
            params, state, kept, loss, rows = step(params, state, kept, batch)
            own = np.asarray(rows) < kept.capacity if kept else np.ones(1, bool)
            losses.append(float(loss))
            shares.append(float(own.mean()) if name != "hashed" else 0.0)
            show(number, loss=np.mean(losses[-RECENT:]))
    return losses, shares


def save_plot(path: Path, losses: dict[str, list[float]], shares: list[float]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    recent = lambda x: np.convolve(x, np.ones(RECENT) / RECENT, "valid")
    for name, values in losses.items():
        left.plot(recent(values), label=name)
    right.plot(recent(shares), color="tab:blue")
    left.set(xlabel="step", ylabel="loss of the next batch")
    right.set(xlabel="step", ylabel="keys with a row of their own", ylim=(0, 1))
    left.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments("open_vocabulary", __doc__)
    parser.number("--rows", 512, "of the table, but for the last")
    parser.number("--alive", 20_000, "items at the same time")
    parser.number("--steps", 2000, f"batches of {LIKES} likes", least=RECENT)
    parser.number("--ways", 16, "rows of a set", most=128)
    parser.number("--admit-after", 2, "how often an item is seen before it has a row")
    parser.add_argument("--evict", choices=("lru", "lfu"), default="lru", help="(lru)")
    parser.add_argument("--rate", type=float, default=0.3, help="of learning (0.3)")
    args = parser.parse_args(argv)
    if args.rows < args.ways:
        parser.error(f"argument --rows: {args.rows} is less than the {args.ways} ways of a set")
    with Program("open_vocabulary") as program:
        losses, own = {}, []
        table = Table(
            "items", "rows", "loss", title=f"Mean of the last {args.steps // 2} steps"
        )
        for name, way in ways(args).items():
            rows = way.table_rows
            losses[name], shares = train(name, way, args, program)
            own = own or shares
            if program.stopped:
                break
            table.add_row(name, f"{rows:,}", f"{np.mean(losses[name][args.steps // 2 :]):.4f}")
        save_plot(args.plot, losses, own)
        program.wrote("losses", args.plot)
        program.print(table)
        program.print(f"keys with a row of their own: {np.mean(own[args.steps // 2 :]):.1%}")


if __name__ == "__main__":
    main()
