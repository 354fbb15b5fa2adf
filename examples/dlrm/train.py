"""A DLRM-style ranker on click logs in Criteo's format, with row-sparse gradients.

    python examples/dlrm/train.py                       on made-up logs
    python examples/dlrm/train.py --values 10           ... with 1 to 10 values in a category
    python examples/dlrm/train.py --data train.txt      on Criteo's, or day_0.gz

26 tables of embeddings, 2.6 million rows together: a step costs what the rows of its batch
cost. A category may have several values in a line, a bag, whose rows are added. The tables
learn with row-wise Adagrad and the layers with Adam, which `optax.partition` tells apart; see
model.py.

Each line is read once. The model first says how likely a click is and then learns from the
line, so that loss and AUC are those on lines it has not seen ("progressive validation").
With `--checkpoint FOLDER` a run that was stopped goes on where it was, in the data too, and
ends with the same bits as one that was not.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules are imported from examples/

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import jax
import numpy as np
from sklearn.metrics import roc_auc_score

from common.checkpoints import Checkpoints
from common.learning_curve import save_curves
from common.program import Arguments, Program
from dlrm import model
from dlrm.criteo import BATCH, Batch, DataError, batches, lines_of_file
from dlrm.stand_in import StandIn

STAND_IN = "made-up logs"
STEPS_ON_STAND_IN = 300
MEASURE_EVERY = 20
KEEP_EVERY = 200

Point = tuple[int, float, float]  # step, loss and AUC since the last one


def train(
    args: argparse.Namespace, lines: Iterator[bytes], checkpoints: Checkpoints, program: Program
) -> list[Point]:
    """Train to the end of the data or `args.steps`, from where the run was before."""
    state = model.create(args.rows, args.dim, args.seed)
    start, state, curve = checkpoints.restore(state, [])
    step, seen, begin = start, [], time.perf_counter()
    fields = "loss {loss:.4f}  AUC {auc:.4f}  {rate:>7,.0f} lines/s"
    more = batches(lines, args.rows, start, str(args.data or STAND_IN))
    more = islice(more, None if args.steps is None else max(args.steps - start, 0))
    with program.bar("training", args.steps, fields, start) as show:

        def measure() -> None:
            nonlocal seen
            curve.append(measured(step, seen))
            rate = (step - start) * BATCH / (time.perf_counter() - begin)
            show(step, loss=curve[-1][1], auc=curve[-1][2], rate=rate)
            seen = []

        for step, batch in enumerate(program.until_stopped(more), start + 1):
            state, loss, scores = model.train_step(state, batch)
            seen.append((loss, scores, batch))
            if step % MEASURE_EVERY == 0:
                measure()
            else:
                show(step)
            if step % KEEP_EVERY == 0:
                checkpoints.save(step, state, curve)
        if seen:
            measure()
    if step > start:
        checkpoints.save(step, state, curve)
    return curve


def measured(step: int, seen: list[tuple[jax.Array, jax.Array, Batch]]) -> Point:
    """Return step, mean loss and AUC of some batches; nan where there is no AUC."""
    losses, scores, some = zip(*seen, strict=True)
    labels = np.concatenate([batch["labels"] for batch in some])
    one_class = labels.min() == labels.max()
    auc = np.nan if one_class else roc_auc_score(labels, np.concatenate(scores))
    return step, float(np.mean(losses)), float(auc)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Arguments("dlrm", __doc__, checkpoint=True)
    parser.add_argument(
        "--data", metavar="FILE", type=Path, help=f"in Criteo's format; .gz too ({STAND_IN})"
    )
    parser.number("--rows", 100_000, "of each of the 26 tables")
    parser.number("--dim", 16, "length of an embedding")
    steps = f"batches of {BATCH} lines ({STAND_IN}: {STEPS_ON_STAND_IN}; a file: all)"
    parser.number("--steps", None, steps)
    parser.number("--values", 1, f"most values in a category of {STAND_IN}")
    args = parser.parse_args(argv)
    if args.data is None and args.steps is None:
        args.steps = STEPS_ON_STAND_IN
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    of_values = f", 1 to {args.values} values" if args.values > 1 else ""
    data = args.data.name if args.data else STAND_IN + of_values
    settings = {"data": data, "rows": args.rows, "dim": args.dim, "seed": args.seed}
    stand_in = StandIn(args.seed, args.values)
    with Program("dlrm") as program:
        lines = lines_of_file(args.data) if args.data else stand_in.lines()
        with Checkpoints(args.checkpoint, settings, program) as checkpoints:
            curve = train(args, lines, checkpoints, program)
        if not curve:
            raise DataError(f"{args.data} has fewer than the {BATCH} lines of a batch")
        marks = {} if args.data else {"who knows the odds": stand_in.best_auc()}
        save_curves(args.plot, *zip(*curve, strict=True), "AUC", marks)
        program.wrote("learning curve", args.plot)
        last = curve[-5:]
        loss, auc = (np.mean([row[i] for row in last]) for i in (1, 2))
        program.print(f"{curve[-1][0]:,} steps: loss {loss:.4f}, AUC {auc:.4f}")
        for who, best in marks.items():
            program.print(f"{who}: AUC {best:.4f}")


if __name__ == "__main__":
    main()
