"""A two-tower recommender with row-sparse gradients, in the framework of your choice.

    python examples/two_tower/train.py --framework nnx        or linen, equinox, plain

A tower makes a vector of a user, another one of an item: a row of an embedding table and a
layer. A user is shown the items whose vectors are nearest. The model and its training step
are in a file of their own for each framework, written as always there, but for two names:

    plain_model.py       functions, a dict of arrays, optax
    linen_model.py       flax linen and its TrainState
    nnx_model.py         flax nnx and its Optimizer
    equinox_model.py     equinox

The interactions are made up (see common/interactions.py): which items are alike has to be
found from who took them. The run prints how often an item that was held out is among the 50
that its user is shown, draws a learning curve, and with `--checkpoint FOLDER` goes on where it
ended. At the end the vectors of the items are those of `jmask.quantize_rows`, as for serving.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules are imported from examples/

import argparse
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

import jmask
from common.checkpoints import Checkpoints
from common.interactions import BATCH, Interactions, make_interactions
from common.learning_curve import save_curves
from common.program import Arguments, Program
from two_tower.retrieval import recall

FRAMEWORKS = ("plain", "linen", "nnx", "equinox")
SHOWN = 50  # items to a user
ASKED = 2000  # users, for the recall
MEASURE_EVERY = 100
SERVED = ("int8", "float8_e4m3fn", "int4")
SETTINGS = ("framework", "users", "items", "groups", "dim", "seed")

Point = tuple[int, float, float]  # step, mean loss since the last one, recall


def recall_of(
    framework: ModuleType, state: Any, data: Interactions, dtype: str | None = None
) -> float:
    """Return how often the item held out is among those that its user is shown.

    Args:
        dtype: in which the vectors of the items are kept; float32 if None.
    """
    asked = np.arange(min(ASKED, len(data.held_out)), dtype=np.int32)
    every_item = np.arange(len(data.frequency), dtype=np.int32)
    users, items = framework.vectors(state, {"users": asked, "items": every_item})
    if dtype is not None:
        quantized = jmask.quantize_rows(jnp.asarray(items), dtype)
        items = jmask.embedding_lookup(quantized, every_item)
    return recall(users, items, data.held_out[asked], SHOWN)


def train(
    args: argparse.Namespace, data: Interactions, checkpoints: Checkpoints, program: Program
) -> tuple[list[Point], dict[str, float]]:
    """Train up to `args.steps` steps, from where the run was if it was there before.

    Returns:
        the learning curve, and the recall with the vectors of items in each dtype.
    """
    framework = import_module(f"two_tower.{args.framework}_model")
    state = framework.create(args.users, args.items, args.dim, args.seed)
    start, state, curve = checkpoints.restore(state, [])
    if not start:
        curve = [(0, float("nan"), recall_of(framework, state, data))]
    losses, step = [], start

    def measure() -> None:
        nonlocal losses
        curve.append((step, float(np.mean(losses)), recall_of(framework, state, data)))
        checkpoints.save(step, state, curve)
        show(step, loss=curve[-1][1], recall=curve[-1][2])
        losses = []

    fields = "loss {loss:.3f}  recall {recall:.1%}"
    with program.bar(args.framework, args.steps, fields, start) as show:
        show(start, loss=curve[-1][1], recall=curve[-1][2])
        for step in program.until_stopped(range(start + 1, args.steps + 1)):
            state, loss = framework.train_step(state, data.batch(args.seed, step))
            losses.append(loss)
            if step % MEASURE_EVERY == 0:
                measure()
            elif step % 10 == 0:
                show(step)
        if losses:
            measure()
    return curve, {dtype: recall_of(framework, state, data, dtype) for dtype in SERVED}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments("two_tower", __doc__, checkpoint=True)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="plain", help="(plain)")
    parser.number("--users", 50_000, "who take items")
    parser.number("--items", 10_000, "of which they take some")
    parser.number("--groups", 50, "of users and items")
    parser.number("--dim", 32, "length of a vector")
    parser.number("--steps", 1000, f"batches of {BATCH} interactions")
    args = parser.parse_args(argv)
    if args.items < SHOWN * args.groups:
        parser.error(
            f"argument --items: {args.items} items are too few for {args.groups} groups: "
            f"{SHOWN} of each are shown"
        )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    settings = {name: getattr(args, name) for name in SETTINGS}
    data = make_interactions(args.users, args.items, args.groups, SHOWN, args.seed)
    popular = np.argsort(-data.frequency)[:SHOWN]
    of_popular = float(np.isin(data.held_out, popular).mean())
    best = float((data.best == data.held_out[:, None]).any(1).mean())
    lines = {"knowing all groups": best, "the most popular items": of_popular}
    with Program("two_tower") as program:
        with Checkpoints(args.checkpoint, settings, program) as checkpoints:
            curve, served = train(args, data, checkpoints, program)
        save_curves(args.plot, *zip(*curve, strict=True), f"recall@{SHOWN}", lines)
        program.wrote("learning curve", args.plot)
        step, loss, found = curve[-1]
        program.print(
            f"{args.framework}, {step:,} steps: loss {loss:.3f}, recall@{SHOWN} {found:.1%}\n"
            f"by chance {SHOWN / args.items:.1%}; the most popular items {of_popular:.1%}; "
            f"knowing all groups {best:.1%}"
        )
        quantized = ", ".join(f"{dtype} {found:.1%}" for dtype, found in served.items())
        program.print(f"with the vectors of items in 8 and 4 bits: {quantized}")


if __name__ == "__main__":
    main()
