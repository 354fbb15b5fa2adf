"""Sharded training at pod scale, on paper: compiled for TPUs that are only described.

    python benchmarks/scaling.py                      the table of docs/scaling.md
    python benchmarks/scaling.py --topology v5p:4x4x4 --rows 10_000_000

Each line compiles a full training step of `jmask.rowwise_adagrad` or `jmask.adam` on a table
spread over all chips of a topology and reads from the program what a chip holds, what it
allocates, and which collectives it runs on how many bytes. From these and the published
bandwidths follows the least time a step can take. Rows of the batch go to all chips, or to
those that own them, as from 8,192 lookups on. Needs libtpu (`make scaling`); nothing runs.
"""

import argparse
import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from collectives import collectives
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jmask
from jmask._kernels import tuning

# Memory of a chip (GB), its bandwidth and that of its links to other chips (GB/s), as the
# Cloud TPU documentation gives them for each generation.
CHIPS = {"v5e": (16, 819, 200), "v5p": (95, 2765, 600), "v6e": (32, 1640, 448)}

OPTIMIZERS = {"rowwise_adagrad": jmask.rowwise_adagrad(0.01), "adam": jmask.adam(0.01)}

CASES = [
    ("v5e:2x2", "rowwise_adagrad", 10_000_000),
    ("v5e:4x4", "rowwise_adagrad", 10_000_000),
    ("v5e:16x16", "rowwise_adagrad", 10_000_000),
    ("v5p:4x4x4", "adam", 10_000_000),
    ("v5p:8x8x8", "adam", 10_000_000),
    ("v6e:16x16", "adam", 10_000_000),
]
WAYS = ("all", "owners")  # where rows go
WIDTH = 128
LOOKUPS = 4096  # of a chip


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compiled step says of one chip."""

    chips: int
    arguments: int
    temporaries: int
    collectives: dict[str, int]

    def seconds(self, generation: str, slots: int) -> tuple[float, float]:
        """Least seconds in memory and on the links: rows read and written, bytes received."""
        _, memory, links = CHIPS[generation]
        moved = sum(self.collectives.values())
        # Rows of the batch are written and read as they are gathered, summed and applied.
        in_memory = 2 * moved + 2 * slots * LOOKUPS * WIDTH * 4
        return in_memory / memory / 1e9, moved / links / 1e9


def compiled_step(topology: str, optimizer: str, rows: int, way: str) -> Any:
    """The step, for tables of `rows` rows on each chip and LOOKUPS lookups from each."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    types = (AxisType.Explicit,)
    mesh, chips = Mesh(np.array(devices), ("chips",), axis_types=types), len(devices)
    tuning.EXCHANGED_IDS = 2**10 if way == "owners" else 2**40
    tx, shape = OPTIMIZERS[optimizer], (rows * chips, WIDTH)
    shapes = jax.ShapeDtypeStruct(shape, jnp.float32)
    table = jmask.sharded(shapes, mesh)
    state = jax.tree.map(partial(_placed, mesh), jax.eval_shape(tx.init, table))
    dtype = jnp.int32 if rows * chips < 2**31 else jnp.int64
    ids = jax.ShapeDtypeStruct(
        (LOOKUPS * chips,), dtype, sharding=NamedSharding(mesh, P("chips"))
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state: optax.OptState, ids):
        squares = lambda t: jnp.sum(jmask.embedding_lookup(t, ids) ** 2)
        loss, grads = jmask.value_and_grad(squares)(table)
        table, state = jmask.apply_gradients(tx, grads, state, table)
        return table, state, loss

    return chips, step.lower(table, state, ids).compile()


def _placed(mesh: Mesh, x: Any) -> Any:
    spec = P("chips") if x.ndim else P()
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def report(topology: str, optimizer: str, rows: int, way: str) -> Report:
    # Rows that int32 does not count need x64, with which no kernel is used.
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    with jax.enable_x64(rows * len(devices) >= 2**31):
        chips, compiled = compiled_step(topology, optimizer, rows, way)
    memory = compiled.memory_analysis()
    moved: dict[str, int] = {}
    for kind, size in collectives(compiled):
        moved[kind] = moved.get(kind, 0) + size
    return Report(chips, memory.argument_size_in_bytes, memory.temp_size_in_bytes, moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", help="such as v5e:4x4")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="rowwise_adagrad")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows on each chip")
    args = parser.parse_args()
    cases = [(args.topology, args.optimizer, args.rows)] if args.topology else CASES
    table = Table(
        "topology", "chips", "optimizer", "rows", "rows go to", "GB on a chip",
        "temporaries, MB", "collectives, MB a chip", "least ms: memory", "least ms: links",
        title=f"rows of {WIDTH} float32, {LOOKUPS:,} lookups a chip",
    )  # fmt: skip
    for (topology, optimizer, rows), way in itertools.product(cases, WAYS):
        found = report(topology, optimizer, rows, way)
        generation = topology.split(":")[0]
        slots = {"rowwise_adagrad": 1, "adam": 3}[optimizer]
        in_memory, on_links = found.seconds(generation, slots)
        table.add_row(
            topology,
            str(found.chips),
            optimizer,
            f"{rows * found.chips:.1e}",
            way,
            f"{found.arguments / 1e9:.1f} of {CHIPS[generation][0]}",
            f"{found.temporaries / 1e6:.0f}",
            ", ".join(
                f"{k} {v / 1e6:.0f}" for k, v in sorted(found.collectives.items()) if v > 1e5
            ),
            f"{1e3 * in_memory:.2f}",
            f"{1e3 * on_links:.2f}",
        )
        Console(width=160).print(f"{topology} {optimizer} {way} done", style="dim")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
