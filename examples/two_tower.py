"""A two-tower recommender with row-sparse gradients, in the framework of your choice.

    python examples/two_tower.py --framework nnx        or linen, equinox, plain
    python examples/two_tower.py --help

A tower makes a vector of a user, another one of an item: a row of an embedding table and a
layer. A user is shown the items whose vectors are nearest. The model and its training step
are in a file of their own for each framework, written as always there, but for two names:

    two_tower_plain.py       functions, a dict of arrays, optax
    two_tower_linen.py       flax linen and its TrainState
    two_tower_nnx.py         flax nnx and its Optimizer
    two_tower_equinox.py     equinox

The interactions are made up (see interactions.py): which items are alike has to be found from
who took them. The run prints how often an item that was held out is among the 50 that its
user is shown, saves a learning curve, and with `--checkpoint FOLDER` goes on where it ended.

Needs the packages of `pip install 'jmask[examples]'`.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from checkpoints import CheckpointError, Checkpoints
from interactions import BATCH, Interactions, make_interactions
from learning_curve import save_curves
from retrieval import recall
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

FRAMEWORKS = ("plain", "linen", "nnx", "equinox")
SHOWN = 50  # items to a user
ASKED = 2000  # users, for the recall
MEASURE_EVERY = 100
SETTINGS = ("framework", "users", "items", "groups", "dim", "seed")

Point = tuple[int, float, float]  # step, mean loss since the last one, recall


def recall_of(framework: ModuleType, state: Any, data: Interactions) -> float:
    """How often the item held out is among those that its user is shown."""
    asked = np.arange(min(ASKED, len(data.held_out)), dtype=np.int32)
    every_item = np.arange(len(data.frequency), dtype=np.int32)
    users, items = framework.vectors(state, {"users": asked, "items": every_item})
    return recall(users, items, data.held_out[asked], SHOWN)


def train(
    args: argparse.Namespace, data: Interactions, checkpoints: Checkpoints, console: Console
) -> list[Point]:
    """Train up to `args.steps` steps, from where the run was if it was there before."""
    framework = import_module(f"two_tower_{args.framework}")
    state = framework.create(args.users, args.items, args.dim, args.seed)
    start, state, curve = checkpoints.restore(state, [])
    if start:
        console.print(f"{args.checkpoint}: going on after step {start}", soft_wrap=True)
    else:
        curve = [(0, float("nan"), recall_of(framework, state, data))]
    progress = Progress(
        TextColumn(args.framework),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]:.3f}  recall {task.fields[recall]:.1%}"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    with progress:
        _, loss, found = curve[-1]
        bar = progress.add_task("", total=args.steps, completed=start, loss=loss, recall=found)
        losses = []
        for step in range(start + 1, args.steps + 1):
            state, loss = framework.train_step(state, data.batch(args.seed, step))
            losses.append(loss)
            if step % MEASURE_EVERY == 0 or step == args.steps:
                mean, found = float(np.mean(losses)), recall_of(framework, state, data)
                curve.append((step, mean, found))
                checkpoints.save(step, state, curve)
                losses = []
                progress.update(bar, completed=step, loss=mean, recall=found)
    return curve


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A two-tower recommender with row-sparse gradients."
    )
    parser.add_argument("--framework", choices=FRAMEWORKS, default="plain", help="(plain)")
    add = partial(parser.add_argument, metavar="N", type=int)
    add("--users", default=50_000, help="(50000)")
    add("--items", default=10_000, help="(10000)")
    add("--groups", default=50, help="of users and items (50)")
    add("--dim", default=32, help="length of a vector (32)")
    add("--steps", default=1000, help=f"batches of {BATCH} interactions (1000)")
    add("--seed", default=0, help="seed of the random numbers (0)")
    add = partial(parser.add_argument, metavar="PATH", type=Path)
    add("--plot", default=Path("two_tower.png"), help="learning curve (two_tower.png)")
    add("--checkpoint", help="folder to keep the run in, and to go on from")
    args = parser.parse_args(argv)
    for name in ("users", "groups", "dim", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name}: {getattr(args, name)} is not positive")
    if args.items < SHOWN * args.groups:
        parser.error(
            f"argument --items: {args.items} items are too few for {args.groups} groups: "
            f"{SHOWN} of each are shown"
        )
    if args.plot.is_dir() or not args.plot.parent.is_dir():
        parser.error(f"argument --plot: {args.plot} is not a file in a directory")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args, console = parse_arguments(argv), Console(highlight=False)
    settings = {name: getattr(args, name) for name in SETTINGS}
    data = make_interactions(args.users, args.items, args.groups, SHOWN, args.seed)
    try:
        with Checkpoints(args.checkpoint, settings) as checkpoints:
            curve = train(args, data, checkpoints, console)
    except CheckpointError as error:
        raise SystemExit(f"two_tower: {error}") from error

    popular = np.argsort(-data.frequency)[:SHOWN]
    chance = SHOWN / args.items
    of_popular = float(np.isin(data.held_out, popular).mean())
    best = float((data.best == data.held_out[:, None]).any(1).mean())
    step, loss, found = curve[-1]
    console.print(
        f"{args.framework}, {step:,} steps: loss {loss:.3f}, recall@{SHOWN} {found:.1%}"
    )
    console.print(
        f"by chance {chance:.1%}; the most popular items {of_popular:.1%}; "
        f"knowing all groups {best:.1%}"
    )
    lines = {"knowing all groups": best, "the most popular items": of_popular}
    save_curves(args.plot, *zip(*curve, strict=True), f"recall@{SHOWN}", lines)
    console.print(f"learning curve: {args.plot}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
