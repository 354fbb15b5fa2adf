"""A table on disk: a language model that looks up n-grams of bytes in a file of 10^7 rows.

    python examples/table_on_disk.py                    the Python sources here
    python examples/table_on_disk.py book.txt           a text file instead
    python examples/table_on_disk.py --rows 1e8         a table of 6.4 GB, as much for Adagrad
    python examples/table_on_disk.py --folder run       keep table and run in it, and go on

The next byte is predicted from the n-grams before it, of 1 to 6 bytes: each is hashed to a row
of one table, and a matrix makes logits of their sum. A step never sees the files that table and
slots are: it gets the rows of its batch, and those of the next are read meanwhile. Four lines
differ from a loop with the table on the device:

    host = jmask.host.offload({"table": np.memmap(...), "logits": matrix}, tx)
    for batch, params, state in host.steps(batches, ids={"table": lambda batch: batch["ids"]}):
        host.commit(params, state)
    host.checkpoint(folder)

The run prints bits per byte of text that it has not seen, and how much memory it takes beside
the size of the files.

References:
    Joulin et al., "Bag of Tricks for Efficient Text Classification", 2017, for hashed n-grams.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.table import Table

import jmask
from common.program import Arguments, ExampleError, Program, rows_from
from common.python_corpus import python_files

ORDERS = 6
BATCH = 2048  # bytes that are predicted
WIDTH = 16
MOST_TEXT = 20_000_000
POINTS = 12  # of the curve
IDS = {"table": lambda batch: batch["ids"]}


# --- text ---------------------------------------------------------------------------------


def read_text(files: Sequence[Path]) -> np.ndarray:
    """Read text as bytes."""
    parts, size = [], 0
    for path in files or python_files():
        try:
            parts.append(path.read_bytes())
        except OSError as error:
            raise ExampleError(f"cannot read {path}: {error.strerror}") from error
        size += len(parts[-1])
        if size > MOST_TEXT:
            break
    if size < 1000:
        raise ExampleError(f"{size} bytes are too little text to learn from")
    return np.frombuffer(b"".join(parts), np.uint8)


def example(text: np.ndarray, at: np.ndarray, rows: int) -> dict[str, np.ndarray]:
    """Return the bytes at some places, and the rows of the n-grams before them."""
    hashed = np.zeros(len(at), np.uint64)
    ids = np.empty((len(at), ORDERS), np.int64)
    for order in range(ORDERS):
        hashed = (hashed + text[at - order - 1] + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        ids[:, order] = (hashed ^ (hashed >> np.uint64(29))) % np.uint64(rows)
    return {"ids": ids, "next": text[at].astype(np.int32)}


def batches(text: np.ndarray, rows: int, seed: int, start: int) -> Iterator[dict[str, Any]]:
    """Yield batches from a step on, the same for the same step."""
    for step in count(start):
        at = np.random.default_rng((seed, step)).integers(ORDERS, len(text), BATCH)
        yield example(text, at, rows)


# --- the model ----------------------------------------------------------------------------


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = params["table"][batch["ids"]].sum(1)
    logits = jnp.tanh(hidden) @ params["logits"] + params["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"])
    return losses.mean() / np.log(2)


def optimizer() -> optax.GradientTransformation:
    """Adagrad for the table, Adam for the rest."""
    parts = {"table": jmask.adagrad(0.2), "rest": jmask.lazy(optax.adam(5e-3))}
    return optax.partition(parts, {"table": "table", "logits": "rest", "bias": "rest"})


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params: Any, state: Any, batch: Any) -> Any:
    loss, grads = jmask.value_and_grad(loss_fn)(params, batch)
    params, state = jmask.apply_gradients(optimizer(), grads, state, params)
    return params, state, loss


def held_out_bits(params: Any, batch: dict[str, np.ndarray]) -> float:
    """Return bits per byte, of rows that NumPy reads."""
    rows = params["table"][batch["ids"].ravel()]
    ids = np.arange(len(rows)).reshape(batch["ids"].shape)
    return float(jax.jit(loss_fn)({**params, "table": rows}, {**batch, "ids": ids}))


# --- command line -------------------------------------------------------------------------


def memory_megabytes() -> float:
    """Return what the process has of its own: pages of files are not counted."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(int(x.split()[1]) / 1024 for x in lines if x.startswith("RssAnon"))


def save_plot(path: Path, steps: list[int], bits: list[float], sizes: dict[str, float]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(steps, bits, "o-", markersize=3)
    left.set(xlabel="step", ylabel="bits per byte, held out")
    right.barh(list(sizes), list(sizes.values()), color=["tab:orange", "tab:blue"])
    right.set(xlabel="MB")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Arguments("table_on_disk", __doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="text")
    parser.add_argument(
        "--rows", metavar="N", type=rows_from(1000), default=10**7, help="rows (1e7)"
    )
    parser.number("--steps", 4000, "batches")
    parser.add_argument("--folder", metavar="FOLDER", type=Path, help="keep the run in it")
    args = parser.parse_args(argv)
    with Program("table_on_disk") as program, tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run(args, folder, program)


def run(args: argparse.Namespace, folder: Path, program: Program) -> None:
    with program.console.status("reading"):
        text = read_text(args.files)
    learned, held_out = np.split(text, [len(text) * 19 // 20])
    probe = example(held_out, np.arange(ORDERS, min(len(held_out), 20_000)), args.rows)
    table = np.memmap(folder / "table.bin", np.float32, "w+", shape=(args.rows, WIDTH))
    logits = 0.1 * jax.random.normal(jax.random.key(args.seed), (WIDTH, 256))
    params = {"table": table, "logits": logits, "bias": jnp.zeros((1, 256))}
    host = jmask.host.offload(params, optimizer())
    if args.folder and (folder / "run").exists():
        host.restore(folder / "run")
        program.print(f"{folder}: going on after step {host.count:,}")
    steps, bits = [host.count], [held_out_bits(host.params, probe)]
    loader = batches(learned, args.rows, args.seed, host.count)
    with program.bar("training", args.steps, "{bits:.2f} bits per byte") as show:
        for batch, params, state in program.until_stopped(host.steps(loader, ids=IDS)):
            params, state, _ = train_step(params, state, batch)
            host.commit(params, state)
            is_last = host.count >= args.steps
            if host.count % max(args.steps // POINTS, 1) == 0 or is_last:
                steps.append(host.count)
                bits.append(held_out_bits(host.params, probe))
            show(host.count, bits=bits[-1])
            if is_last:
                break
    if args.folder:
        host.checkpoint(folder / "run")
        program.wrote_checkpoint(folder / "run")
    sizes = {"memory of the process": memory_megabytes(), "files": 2 * table.nbytes / 1e6}
    save_plot(args.plot, steps, bits, sizes)
    program.wrote("bits per byte", args.plot)
    report = Table("", "steps", "bits per byte", *sizes)
    cells = [f"{x:,.0f} MB" for x in sizes.values()]
    report.add_row(f"{args.rows:,} rows", str(host.count), f"{bits[-1]:.2f}", *cells)
    program.print(report)


if __name__ == "__main__":
    main()
