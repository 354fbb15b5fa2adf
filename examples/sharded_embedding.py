"""Embeddings that are spread over devices, and over processes, with row-sparse gradients.

    python examples/sharded_embedding.py                    one process
    python examples/sharded_embedding.py --processes 2      two, which share the devices
    python examples/sharded_embedding.py --checkpoint run   goes on where it was stopped
    python examples/sharded_embedding.py --help

Skip-gram with negative sampling on made-up words. Word w belongs to group w % GROUPS, the
context of a word is of its group, and words are as frequent as Zipf says; there is nothing
else to be learned, so that the loss and the score at the end tell whether it was.

Two tables (V, D) and Adam's moments of both have their rows spread over all devices of all
processes; see `jmask.sharded`. Every process has its part of each batch. A step sends ids
and rows, and moves neither tables nor moments.

    the same             for every number of processes and devices
    batches              drawn from the seed and the number of the step, nothing else
    checkpoints          rows in the order of their ids, V rounded up to a multiple of PARTS

The second is why a run can go on with more devices or fewer: blocks of ceil(V / S) rows, in
which a table is kept on S devices, have another shape for every S. All processes write
checkpoints, each the rows that it has, and none ever holds a whole table.

On several machines, start it on each with the address of the first, which is process 0:

    python examples/sharded_embedding.py --processes 2 --coordinator HOST:PORT --process 0

If a process dies the others stop, with an error; the same command goes on from the last
checkpoint, and ends with the parameters of a run that nothing happened to. The folder must
be one that all machines see.

Needs the packages of `pip install 'jmask[examples]'`.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import processes
from checkpoints import CheckpointError, Checkpoints
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmask

GROUPS = 10
NEGATIVES = 4
PARTS = 256
LEARNING_RATE = 0.02
TX = jmask.adam(LEARNING_RATE)


class State(NamedTuple):
    """What training changes."""

    params: Any
    opt_state: Any


class Batch(NamedTuple):
    """Ids of words (B,), of their contexts (B,) and of others (B, NEGATIVES)."""

    words: Any
    contexts: Any
    negatives: Any


# --- data ----------------------------------------------------------------------------------


def batch_of_step(step: int, size: int, V: int, seed: int) -> Batch:
    """The whole batch of a step."""
    rng = np.random.default_rng([seed, step])
    frequency = np.cumsum(1 / np.arange(1, V + 1))
    ids = np.searchsorted(frequency, rng.random((size, 2 + NEGATIVES)) * frequency[-1])
    words, contexts = ids[:, 0], ids[:, 1]
    contexts += words % GROUPS - contexts % GROUPS
    contexts -= GROUPS * (contexts >= V)
    return Batch(*(x.astype(np.int32) for x in (words, contexts, ids[:, 2:])))


def placed(batch: Batch, mesh: Mesh) -> Batch:
    """A batch on the devices. This process brings its part, others bring theirs."""
    size = len(batch.words) // jax.process_count()
    part = slice(size * jax.process_index(), size * (jax.process_index() + 1))
    put = partial(jax.make_array_from_process_local_data, NamedSharding(mesh, P("devices")))
    return Batch(*(put(x[part]) for x in batch))


# --- model ---------------------------------------------------------------------------------


def create(V: int, D: int, seed: int, mesh: Mesh, placement: str) -> State:
    """Compiled, so that each device makes the rows that it has."""

    @jax.jit
    def create() -> State:
        rows = jax.random.normal(jax.random.key(seed), (2, V, D)) * D**-0.5
        spread = partial(jmask.sharded, mesh=mesh, placement=placement)
        params = {
            "words": spread(rows[0]),
            "contexts": spread(rows[1]),
            "bias": jnp.zeros(()),
        }
        return State(params, TX.init(params))

    return create()


def scores(params: dict[str, Any], batch: Batch) -> tuple[jax.Array, jax.Array]:
    """How well contexts (B,) and others (B, NEGATIVES) go with words."""
    words = params["words"][batch.words]
    right = jnp.einsum("bd,bd->b", words, params["contexts"][batch.contexts])
    wrong = jnp.einsum("bd,bnd->bn", words, params["contexts"][batch.negatives])
    return right + params["bias"], wrong + params["bias"]


def loss_of(params: dict[str, Any], batch: Batch) -> jax.Array:
    right, wrong = scores(params, batch)
    return jnp.mean(jax.nn.softplus(-right)) + jnp.mean(jax.nn.softplus(wrong).sum(1))


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
    loss, grads = jmask.value_and_grad(loss_of)(state.params, batch)
    params, opt_state = jmask.apply_gradients(TX, grads, state.opt_state, state.params)
    return State(params, opt_state), loss


@jax.jit
def accuracy(params: dict[str, Any], batch: Batch) -> jax.Array:
    """How often the context of a word goes better with it than another word does."""
    right, wrong = scores(params, batch)
    return jnp.mean(right[:, None] > wrong)


# --- what is kept --------------------------------------------------------------------------


def is_table(x: Any) -> bool:
    return isinstance(x, jmask.ShardedTable)


def in_order_of_ids(state: State, mesh: Mesh) -> State:
    """Each table as rows (M, D), M = V rounded up to a multiple of PARTS, spread evenly."""

    def rows_of(table: Any) -> Any:
        if not is_table(table):
            return table
        rows = table.todense()
        rows = jnp.pad(rows, [(0, -len(rows) % PARTS), (0, 0)])
        return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, P("devices")))

    return jax.jit(partial(jax.tree.map, rows_of, is_leaf=is_table))(state)


def as_tables(rows: State, like: State) -> State:
    """Tables from rows in the order of their ids, kept as those of another state are."""

    def table_of(table: Any, rows: Any) -> Any:
        if not is_table(table):
            return rows
        layout = table.layout
        return jmask.sharded(rows[: len(table)], layout.mesh, placement=layout.placement)

    return jax.jit(lambda rows: jax.tree.map(table_of, like, rows, is_leaf=is_table))(rows)


def export(path: Path, params: dict[str, Any], mesh: Mesh) -> None:
    """Write the parameters as plain arrays, rows in the order of their ids."""
    whole = lambda x: x.todense() if is_table(x) else x
    arrays = jax.jit(
        lambda params: jax.tree.map(whole, params, is_leaf=is_table),
        out_shardings=NamedSharding(mesh, P()),
    )(params)
    if jax.process_index() == 0:
        np.savez(path, **arrays)


# --- training ------------------------------------------------------------------------------


def train(args: argparse.Namespace, say: Callable[[str], None]) -> None:
    devices = jax.device_count()
    if PARTS % devices or args.batch % devices:
        raise SystemExit(
            f"{devices} devices cannot share {PARTS} parts of the tables and batches of "
            f"{args.batch} evenly: choose other numbers with --devices and --batch."
        )
    mesh = jax.make_mesh((devices,), ("devices",), axis_types=(AxisType.Auto,))
    state = create(args.words, args.dim, args.seed, mesh, args.placement)
    here = max(len(shard.data) for shard in state.params["words"].blocks.addressable_shards)
    say(f"processes: {jax.process_count()}  devices: {devices}  rows on each: {here:,}")
    settings = {name: getattr(args, name) for name in ("words", "dim", "batch", "seed")}
    with Checkpoints(args.checkpoint, settings) as checkpoints:
        start = 0
        if args.checkpoint:
            start, rows, _ = checkpoints.restore(in_order_of_ids(state, mesh), {})
            state = as_tables(rows, state)
        if start:
            say(f"{args.checkpoint}: going on after step {start:,}")
        draw = partial(batch_of_step, size=args.batch, V=args.words, seed=args.seed)
        begin = time.perf_counter()
        for step in range(start + 1, args.steps + 1):
            state, loss = train_step(state, placed(draw(step), mesh))
            # Read at every step: when another process is gone, this is where it is noticed.
            loss = float(loss)
            if step % args.print_every == 0 or step == args.steps:
                rate = (step - start) * args.batch / (time.perf_counter() - begin)
                say(f"step {step:>6,}  loss {loss:.6f}  {rate:>9,.0f} pairs/s")
            if args.checkpoint and (step % args.keep_every == 0 or step == args.steps):
                checkpoints.save(step, in_order_of_ids(state, mesh), {})
    unseen = placed(draw(args.steps + 1), mesh)
    say(f"accuracy {float(accuracy(state.params, unseen)):.3f}  (chance is about 0.5)")
    if args.export:
        export(args.export, state.params, mesh)


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parsed(arguments)
    if args.processes > 1 and args.process is None:
        try:
            processes.run([__file__, *arguments], args.processes)
        except processes.ProcessError as error:
            again = ". The same command goes on from the last checkpoint."
            kept = error.code < 0 and args.checkpoint
            raise SystemExit(f"{error}{again if kept else ''}") from None
        return
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices // args.processes)
    alone = args.processes == 1
    first = alone or args.process == 0
    say = partial(print, flush=True) if first else lambda line: None
    joined = processes.member(args.coordinator, args.processes, args.process)
    with nullcontext() if alone else joined:
        try:
            train(args, say)
        except CheckpointError as error:
            raise SystemExit(str(error)) from error


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Embeddings spread over devices and processes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--processes", type=positive, default=1, help="started here if --process is not given")
    add("--devices", type=natural, default=8, help="CPU devices in all; 0: all that there are")
    add("--coordinator", metavar="HOST:PORT", help="address of process 0")
    add("--process", type=natural, help="the number of this process")
    add("--words", type=positive, default=50_003, help="rows of the tables")
    add("--dim", type=positive, default=32, help="entries of a row")
    add("--batch", type=positive, default=4096, help="pairs of words in a step")
    add("--steps", type=natural, default=500)
    add("--seed", type=natural, default=0)
    add("--placement", choices=("div", "mod"), default="mod", help="see jmask.sharded")
    add("--checkpoint", type=Path, metavar="FOLDER", help="keep the run there")
    add("--keep-every", type=positive, default=100, help="steps from checkpoint to checkpoint")
    add("--print-every", type=positive, default=50, help="steps from line to line")
    add(
        "--export",
        type=new_file,
        metavar="FILE",
        help="write the parameters there at the end, as .npz",
    )
    args = parser.parse_args(arguments)
    if args.devices % args.processes:
        parser.error(f"{args.devices} devices are not for {args.processes} processes alike")
    if (args.process is None) != (args.coordinator is None):
        parser.error("--process and --coordinator belong together")
    if args.process is not None and args.process >= args.processes:
        parser.error(f"--process {args.process} is not one of {args.processes}")
    if args.words < GROUPS:
        parser.error(f"--words {args.words} is less than one for each of {GROUPS} groups")
    return args


def new_file(text: str) -> Path:
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent} is not a folder")
    return path


def natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


if __name__ == "__main__":
    main()
