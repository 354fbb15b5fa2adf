"""Estimates of training steps on TPUs, compiled ahead of time: nothing runs.

    python benchmarks/tpu_cost.py                                  every step (make tpu-cost)
    python benchmarks/tpu_cost.py --generations v5e --steps adam --lookups 8192

For each generation, step, table and batch: the estimated time (see `tpu_schedule`), the limit
that the bytes set which must move, their ratio, the kernel that takes longest, the memory of
temporaries, and how long compiling took. Needs libtpu.
"""

import argparse
import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import tpu_schedule

FOLDER = Path(tempfile.mkdtemp(prefix="jmask_tpu_"))
tpu_schedule.dump_to(FOLDER)
# As the Makefile sets it, so that no device is looked for.
for name, value in (
    ("JAX_PLATFORMS", "cpu"),
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
):
    os.environ.setdefault(name, value)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import jmask  # noqa: E402

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1"}
WIDTH = 128
PACKED_WIDTH = 64


def in_two_steps(tx: Any, grads: Any, state: Any, params: Any) -> Any:
    """`tx.update` and `optax.apply_updates`."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


# Optimizer, how it is applied, and the arrays of the table's shape that it reads and writes.
STEPS = {
    "sgd": (jmask.sgd(0.1), jmask.apply_gradients, 1),
    "adagrad": (jmask.adagrad(0.1), jmask.apply_gradients, 2),
    "adam": (jmask.adam(), jmask.apply_gradients, 3),
    "rowwise": (jmask.rowwise_adagrad(0.1), jmask.apply_gradients, 1),
    "lazy(optax.adam)": (jmask.lazy(optax.adam(1e-3)), in_two_steps, 3),
    "packed adam": (jmask.adam(), jmask.apply_gradients, 3),
    "bfloat16 adagrad": (jmask.adagrad(0.1), jmask.apply_gradients, 2),
}


def dtype_of(name: str) -> str:
    return "bfloat16" if name.startswith("bfloat16") else "float32"


def compiled_step(name: str, rows: int, lookups: int, generation: str) -> Any:
    """The donated step for one device."""
    tx, apply, _ = STEPS[name]
    is_packed = name.startswith("packed")
    table: Any = jax.ShapeDtypeStruct(
        (rows, PACKED_WIDTH if is_packed else WIDTH), dtype_of(name)
    )
    if is_packed:
        table = jax.eval_shape(jmask.packed, table)
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=TOPOLOGIES[generation]
    )
    sharding = jax.sharding.SingleDeviceSharding(described.devices[0])
    arguments = table, jax.eval_shape(tx.init, table), jax.ShapeDtypeStruct((lookups,), "int32")
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
    )

    def step(table: Any, state: Any, ids: jax.Array) -> Any:
        def loss(t: Any) -> jax.Array:
            rows = jmask.embedding_lookup(t, ids, width=PACKED_WIDTH) if is_packed else t[ids]
            return jnp.sum(rows**2)

        value, grads = jmask.value_and_grad(loss)(table)
        return *apply(tx, grads, state, table), value

    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()


def limit(name: str, rows: int, lookups: int, generation: str) -> float:
    """Return the least milliseconds: each lookup reads a row, each update reads and writes it.

    A packed row moves with its line of 128 entries.
    """
    unique = rows * (1 - (1 - 1 / rows) ** lookups)
    line = WIDTH * jnp.dtype(dtype_of(name)).itemsize
    bytes_moved = lookups * (4 + line) + unique * line * 2 * STEPS[name][2]
    if name.endswith("rowwise"):
        bytes_moved += unique * 2 * 4
    return bytes_moved / (tpu_schedule.GENERATIONS[generation][1] * 1e9) * 1e3


def report(name: str, rows: int, lookups: int, generation: str) -> str:
    for path in FOLDER.iterdir():
        path.unlink()
    start = time.perf_counter()
    compiled = compiled_step(name, rows, lookups, generation)
    seconds = time.perf_counter() - start
    kernels = tpu_schedule.times(compiled, FOLDER, generation)
    total, least = sum(ms for ms, _ in kernels), limit(name, rows, lookups, generation)
    longest, kernel = kernels[0]
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return (
        f"| {generation} | {name} | {rows:.0e} | {lookups:,} | {total:.3f} | {least:.3f} "
        f"| {total / least:.0f} | {kernel} {longest:.3f} | {temporary / 1e6:.1f} "
        f"| {seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generations", nargs="+", default=list(TOPOLOGIES))
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--rows", nargs="+", type=float, default=[1e6, 1e7])
    parser.add_argument("--lookups", nargs="+", type=int, default=[8192, 65536])
    given = parser.parse_args()
    print(f"jax {jax.__version__}; estimates in ms, nothing was run\n")
    print("| | step | rows | lookups | estimate | limit | ratio | longest kernel | temp MB "
          "| compiled s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    cases = itertools.product(given.generations, given.steps, given.lookups, given.rows)
    for generation, name, lookups, rows in cases:
        print(report(name, int(rows), lookups, generation), flush=True)


if __name__ == "__main__":
    main()
