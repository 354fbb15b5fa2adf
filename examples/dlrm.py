"""A DLRM-style ranker on click logs in Criteo's format, with row-sparse gradients.

    python examples/dlrm.py                         on made-up logs
    python examples/dlrm.py --values 10             ... with 1 to 10 values in a category
    python examples/dlrm.py --data train.txt        on Criteo's, or day_0.gz
    python examples/dlrm.py --help

26 tables of embeddings, 2.6 million rows together: a step costs what the rows of its batch
cost. A category may have several values in a line, a bag, whose rows are added. The tables
learn with row-wise Adagrad and the layers with Adam, which `optax.partition` tells apart; see
dlrm_model.py.

Each line is read once. The model first says how likely a click is and then learns from the
line, so that loss and AUC are those on lines it has not seen ("progressive validation").
With `--checkpoint FOLDER` a run that was stopped goes on where it was, in the data too, and
ends with the same bits as one that was not.

Needs the packages of `pip install 'jmask[examples]'`.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import dlrm_model
import jax
import numpy as np
from checkpoints import CheckpointError, Checkpoints
from criteo import BATCH, Batch, DataError, batches, lines_of_file
from criteo_stand_in import StandIn
from learning_curve import save_curves
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.metrics import roc_auc_score

STAND_IN = "made-up logs"
STEPS_ON_STAND_IN = 300
MEASURE_EVERY = 20
KEEP_EVERY = 200

Point = tuple[int, float, float]  # step, loss and AUC since the last one


def train(
    args: argparse.Namespace, lines: Iterator[bytes], checkpoints: Checkpoints, console: Console
) -> list[Point]:
    """Train to the end of the data or `args.steps`, from where the run was before."""
    state = dlrm_model.create(args.rows, args.dim, args.seed)
    start, state, curve = checkpoints.restore(state, [])
    if start:
        # Paths are long: broken into lines they could not be copied.
        console.print(f"{args.checkpoint}: going on after step {start:,}", soft_wrap=True)
    progress = Progress(
        TextColumn("step {task.completed:,}"),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]:.4f}  AUC {task.fields[auc]:.4f}"),
        TextColumn("{task.fields[rate]:>7,.0f} lines/s"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
    )
    step, seen, begin = start, [], time.perf_counter()

    def measure() -> None:
        nonlocal seen
        curve.append(measured(step, seen))
        rate = (step - start) * BATCH / (time.perf_counter() - begin)
        progress.update(bar, completed=step, loss=curve[-1][1], auc=curve[-1][2], rate=rate)
        seen = []

    with progress:
        _, loss, auc = curve[-1] if curve else (0, np.nan, np.nan)
        bar = progress.add_task(
            "", total=args.steps, completed=start, loss=loss, auc=auc, rate=0
        )
        more = batches(lines, args.rows, start, str(args.data or STAND_IN))
        more = islice(more, None if args.steps is None else max(args.steps - start, 0))
        for step, batch in enumerate(more, start + 1):
            state, loss, scores = dlrm_model.train_step(state, batch)
            seen.append((loss, scores, batch))
            if step % MEASURE_EVERY == 0:
                measure()
            if step % KEEP_EVERY == 0:
                checkpoints.save(step, state, curve)
        if seen:
            measure()
    if step > start:
        checkpoints.save(step, state, curve)
    return curve


def measured(step: int, seen: list[tuple[jax.Array, jax.Array, Batch]]) -> Point:
    """Step, mean loss and AUC of some batches; nan where there is no AUC."""
    losses, scores, some = zip(*seen, strict=True)
    labels = np.concatenate([batch["labels"] for batch in some])
    one_class = labels.min() == labels.max()
    auc = np.nan if one_class else roc_auc_score(labels, np.concatenate(scores))
    return step, float(np.mean(losses)), float(auc)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="A DLRM-style ranker on click logs, with row-sparse gradients."
    )
    add = partial(parser.add_argument, metavar="PATH", type=Path)
    add("--data", help="lines in Criteo's format; .gz too (made-up logs)")
    add("--checkpoint", help="folder to keep the run in, and to go on from")
    add("--plot", default=Path("dlrm.png"), help="learning curve (dlrm.png)")
    add = partial(parser.add_argument, metavar="N", type=int)
    add("--rows", default=100_000, help="of each of the 26 tables (100000)")
    add("--dim", default=16, help="length of an embedding (16)")
    add(
        "--steps",
        help=f"batches of {BATCH} lines (made-up logs: {STEPS_ON_STAND_IN}; a file: all)",
    )
    add("--values", default=1, help="most values in a category, made-up logs (1)")
    add("--seed", default=0, help="seed of the random numbers (0)")
    args = parser.parse_args(argv)
    if args.data is None and args.steps is None:
        args.steps = STEPS_ON_STAND_IN
    for name in ("rows", "dim", "steps", "values"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name}: {value} is not positive")
    if args.plot.is_dir() or not args.plot.parent.is_dir():
        parser.error(f"argument --plot: {args.plot} is not a file in a directory")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args, console = parse_arguments(argv), Console(highlight=False)
    of_values = f", 1 to {args.values} values" if args.values > 1 else ""
    data = args.data.name if args.data else STAND_IN + of_values
    settings = {"data": data, "rows": args.rows, "dim": args.dim, "seed": args.seed}
    stand_in = StandIn(args.seed, args.values)
    try:
        lines = lines_of_file(args.data) if args.data else stand_in.lines()
        with Checkpoints(args.checkpoint, settings) as checkpoints:
            curve = train(args, lines, checkpoints, console)
    except (CheckpointError, DataError) as error:
        raise SystemExit(f"dlrm: {error}") from error
    if not curve:
        raise SystemExit(f"dlrm: {args.data} has fewer than the {BATCH} lines of a batch")

    last = curve[-5:]
    loss, auc = (np.mean([row[i] for row in last]) for i in (1, 2))
    console.print(f"{curve[-1][0]:,} steps: loss {loss:.4f}, AUC {auc:.4f}")
    marks = {} if args.data else {"who knows the odds": stand_in.best_auc()}
    for who, best in marks.items():
        console.print(f"{who}: AUC {best:.4f}")
    save_curves(args.plot, *zip(*curve, strict=True), "AUC", marks)
    console.print(f"learning curve: {args.plot}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
