"""Embeddings that are sharded over devices, and over processes, with row-sparse gradients.

    python examples/sharded_embedding.py                    one process
    python examples/sharded_embedding.py --processes 2      two, which share the devices
    python examples/sharded_embedding.py --checkpoint run   goes on where it was stopped

Skip-gram with negative sampling on made-up words. Word w belongs to group w % GROUPS, its
contexts are of the same group, and words are as frequent as Zipf says.

Two tables (V, D) and Adam's moments of both have their rows sharded over all devices of all
processes; see `jmask.sharded`. Every process has its part of each batch. A step sends ids and
rows, and moves neither tables nor moments. Batches are drawn from the seed and the number of
the step, and tables are arrays of as many rows on any number of devices (`hashed=True`): so a
run can go on with more devices or fewer.

On several machines, start it on each with the address of process 0:

    python examples/sharded_embedding.py --processes 2 --coordinator HOST:PORT --process 0

If a process dies the others stop, with an error; the same command goes on from the last
checkpoint, in a folder that all machines must see.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from common import processes
from common.checkpoints import Checkpoints
from common.learning_curve import save_curves
from common.program import Arguments, ExampleError, Program

GROUPS, NEGATIVES, TX = 10, 4, jmask.adam(0.02)
lookup = partial(jmask.embedding_lookup, hashed=True)  # frequent words are on all devices

State = tuple[dict[str, Any], Any]  # parameters, the optimizer's state
Batch = dict[str, jax.Array]


def batch_of_step(step: int, args: argparse.Namespace, mesh: Mesh, stop: bool) -> Batch:
    """Return the batch of a step; each process brings a part of it.

    In "stop" each says whether it was told to stop, so that all stop after the same step.
    """
    rng, V = np.random.default_rng([args.seed, step]), args.words
    frequency = np.cumsum(1 / np.arange(1, V + 1))
    draws = rng.random((args.batch, 2 + NEGATIVES)) * frequency[-1]
    ids = np.searchsorted(frequency, draws).astype(np.int32)
    words, contexts = ids[:, 0], ids[:, 1]
    contexts += words % GROUPS - contexts % GROUPS
    contexts -= GROUPS * (contexts >= V)
    size, process = args.batch // jax.process_count(), jax.process_index()
    part = slice(size * process, size * (process + 1))
    put = partial(jax.make_array_from_process_local_data, NamedSharding(mesh, P("devices")))
    stops = np.full(args.batch, stop)
    batch = {"words": words, "contexts": contexts, "negatives": ids[:, 2:], "stop": stops}
    return {name: put(x[part]) for name, x in batch.items()}


def create(args: argparse.Namespace, mesh: Mesh) -> State:
    """Return parameters and state; compiled, so that each device makes its own rows."""

    @jax.jit
    def create() -> State:
        rows = jax.random.normal(jax.random.key(args.seed), (2, args.words, args.dim))
        shard = lambda x: jmask.sharded(x * args.dim**-0.5, mesh, hashed=True)
        params = {"words": shard(rows[0]), "contexts": shard(rows[1]), "bias": jnp.zeros(())}
        everywhere = NamedSharding(mesh, P())
        put = lambda x: x if x.ndim else jax.sharding.reshard(x, everywhere)
        return jax.tree.map(put, (params, TX.init(params)))

    return create()


def scores(params: dict[str, Any], batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Score contexts (B,) and others (B, NEGATIVES) of words."""
    words = lookup(params["words"], batch["words"])
    right = jnp.einsum("bd,bd->b", words, lookup(params["contexts"], batch["contexts"]))
    wrong = jnp.einsum("bd,bnd->bn", words, lookup(params["contexts"], batch["negatives"]))
    return right + params["bias"], wrong + params["bias"]


def loss_fn(params: dict[str, Any], batch: Batch) -> jax.Array:
    right, wrong = scores(params, batch)
    return jnp.mean(jax.nn.softplus(-right)) + jnp.mean(jax.nn.softplus(wrong).sum(1))


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, batch: Batch) -> tuple[State, jax.Array, jax.Array]:
    params, opt_state = state
    loss, grads = jmask.value_and_grad(loss_fn)(params, batch)
    params, opt_state = jmask.apply_gradients(TX, grads, opt_state, params)
    return (params, opt_state), loss, batch["stop"].any()


@jax.jit
def accuracy(params: dict[str, Any], batch: Batch) -> jax.Array:
    """Return how often the context of a word scores higher than another word."""
    right, wrong = scores(params, batch)
    return jnp.mean(right[:, None] > wrong)


def train(args: argparse.Namespace, program: Program) -> None:
    devices = jax.device_count()
    if args.batch % devices:
        raise ExampleError(f"--batch {args.batch} is no multiple of {devices} devices")
    mesh = jax.make_mesh((devices,), ("devices",), axis_types=(AxisType.Explicit,))
    state = create(args, mesh)
    here = max(len(shard.data) for shard in state[0]["words"].addressable_shards)
    count = f"processes: {jax.process_count()}  devices: {devices}"
    program.print(f"{count}  rows on each: {here:,}")
    settings = {name: getattr(args, name) for name in ("words", "dim", "batch", "seed")}
    unseen, begin = batch_of_step(args.steps + 1, args, mesh, False), time.perf_counter()
    with (
        Checkpoints(args.checkpoint, settings, program) as checkpoints,
        program.bar("training", args.steps, "loss {loss:.3f}") as show,
        program.uninterrupted(),
    ):
        start, curve = 0, []
        if args.checkpoint:
            start, state, curve = checkpoints.restore(state, curve)
        for step in range(start + 1, args.steps + 1):
            batch = batch_of_step(step, args, mesh, program.stopped)
            state, loss, stop = train_step(state, batch)
            # Read at every step: when another process is gone, this is where it is noticed.
            loss, stop = float(loss), bool(stop)
            show(step, loss=loss)
            is_last = stop or step == args.steps
            if step % args.print_every == 0 or is_last:
                rate = (step - start) * args.batch / (time.perf_counter() - begin)
                curve.append((step, loss, float(accuracy(state[0], unseen))))
                program.print(f"step {step:>6,}  loss {loss:.6f}  {rate:>9,.0f} pairs/s")
            if args.checkpoint and (step % args.keep_every == 0 or is_last):
                checkpoints.save(step, state, curve)
            if stop:
                program.stopped = True
                break
    if curve and jax.process_index() == 0:
        save_curves(args.plot, *zip(*curve, strict=True), "accuracy")
    program.wrote("learning curve", args.plot)
    program.print(f"accuracy {curve[-1][2]:.3f}  (chance is about 0.5)")


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parsed(arguments)
    if args.processes > 1 and args.process is None:
        try:
            processes.run([__file__, *arguments], args.processes)
        except processes.ProcessError as error:
            goes_on = error.code < 0 and args.checkpoint
            again = ". The same command goes on from the last checkpoint."
            raise SystemExit(f"{error}{again * bool(goes_on)}") from None
        return
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices // args.processes)
    joined = processes.member(args.coordinator, args.processes, args.process)
    program, alone = Program("sharded_embedding"), args.processes == 1
    with nullcontext() if alone else joined, program:
        program.console.quiet = jax.process_index() > 0
        train(args, program)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Arguments("sharded_embedding", __doc__, checkpoint=True)
    add, number = parser.add_argument, parser.number
    number("--processes", 1, "started here if --process is not given")
    number("--devices", 8, "CPU devices in all; 0: all that there are", least=0)
    add("--coordinator", metavar="HOST:PORT", help="address of process 0")
    number("--process", None, "the number of this process", least=0)
    number("--words", 50_003, "rows of the tables", least=GROUPS)
    number("--dim", 32, "entries of a row")
    number("--batch", 4096, "pairs of words in a step")
    number("--steps", 500, "of training")
    number("--keep-every", 100, "steps from checkpoint to checkpoint")
    number("--print-every", 50, "steps from line to line")
    args = parser.parse_args(arguments)
    if args.devices % args.processes:
        parser.error(f"{args.devices} devices are not for {args.processes} processes alike")
    if (args.process is None) != (args.coordinator is None):
        parser.error("--process and --coordinator belong together")
    if args.process is not None and args.process >= args.processes:
        parser.error(f"--process {args.process} is not one of {args.processes}")
    return args


if __name__ == "__main__":
    main()
