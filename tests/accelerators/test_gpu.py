"""A donated step works in place on GPUs and without loops, read from compiled programs.

XLA compiles for a GPU that is only described. Every table and every state array shares its
buffer with the one that comes out, no copy of a table is made, the temporaries are a few times
the rows of the batch, and nothing is done row after row. `make test-gpu test-gpu-slow` runs
these; what the rows then hold is tested by `make test-lowered`.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jmask
from benchmarks.collectives import collectives
from jmask._kernels import scatter_update
from tests.compiled_step import (
    Step,
    check_deferred_in_place,
    check_that_tables_are_seen,
    compiled_step,
    described,
    rounds_of_loops,
    shapes,
    temporary_bytes,
    training_step,
    vocabulary_in_place,
)
from tests.kernels.test_in_place import STACKED_UPDATES, STEPS
from tests.lookup_programs import BATCH, STACKED
from tests.optim.test_inside_programs import AUX, BESIDE, LATE, LINEAR, late_step, step_with_aux
from tests.optimizers import OPTIMIZERS
from tests.sampling import chosen
from tests.stored_tables import STEPS as WAYS

pytestmark = [pytest.mark.needs(what="jax_cuda12_plugin"), pytest.mark.dtype_promotion]

ROWS = 10**7

# What XLA asks of a GPU: compute capability, multiprocessors, and bytes of shared memory for a
# block, of the second-level cache and of memory, the latter's bytes for each second, and the
# clock in GHz.
GPUS = {
    "A100": (8, 0, 108, 166_912, 41_943_040, 85_899_345_920, 2_039_000_000_000, 1.41),
    "H100": (9, 0, 132, 232_448, 52_428_800, 85_899_345_920, 3_352_320_000_000, 1.98),
}

DESCRIPTION = """
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {cores}
  shared_memory_per_block_optin: {shared}
  l2_cache_size: {cache}
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  clock_rate_ghz: {clock}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  fpus_per_core: 64
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
"""

ADAM = Step(jmask.adam(), row=(128,), apply=jmask.apply_gradients)

# Of these rows XLA makes other kernels.
WIDE = {
    "wide rows, adam": ADAM,
    "wide rows, sgd": Step(jmask.sgd(0.1), row=(128,)),
    "wide rows, rowwise adagrad": Step(jmask.rowwise_adagrad(), row=(128,)),
    "wide rows, bfloat16": Step(
        jmask.adagrad(state_dtype=jnp.float32), row=(128,), dtype=jnp.bfloat16
    ),
}

ALL_STEPS = {**STEPS, **WIDE}

# How often the loops of a step run: the scan of a loss, forwards and backwards, and the only
# round of a step that is taken or not.
LOOPS = {"lookups in scan": [4, 4]}
sum_of_squares = lambda table, ids: jnp.sum(table[ids] ** 2)
# The sharding that places all on one GPU.
gpu = lambda name: SingleDeviceSharding(gpus(name)[0])


@functools.cache
def gpus(name, count=1):
    """Devices of a host with so many GPUs that are only described."""
    keys = "major minor cores shared cache memory bandwidth clock".split()
    config = DESCRIPTION.format(name=name, **dict(zip(keys, GPUS[name], strict=True)))
    needs = "JAX's CUDA plugin is needed, run these tests with `make test-gpu`"
    return described(needs, platform="cuda", target_config=config, topology=f"1x1x{count}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "step_name"),
    # What may differ from one generation to the next is how rows are added.
    [*(("H100", step_name) for step_name in ALL_STEPS), *(("A100", name) for name in WIDE)],
)
def test_in_place(name, step_name):
    step = ALL_STEPS[step_name]
    compiled = step.compile(ROWS, gpu(name))
    temporary = temporary_bytes(compiled, step.table_bytes(ROWS), step.entries(ROWS))
    assert temporary <= 10 * step.batch_bytes() + 2**20
    assert rounds_of_loops(compiled) == LOOPS.get(step_name, [])


@pytest.mark.parametrize("optimizer", ["adam", "rowwise adagrad", "sgd"])
def test_sharded_over_eight(optimizer):
    """What is exchanged is ids and rows of the batch; each GPU updates its rows in place."""
    tx = OPTIMIZERS[optimizer]
    rows, row, lookups = ROWS, 64, 4096
    mesh = Mesh(np.array(gpus("H100", 8)), ("gpus",), axis_types=(AxisType.Explicit,))

    def placed(x):
        spec = P("gpus") if x.ndim else P()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    shape = jax.ShapeDtypeStruct((rows, row), jnp.float32)
    table = jmask.sharded(shape, mesh)
    state = jax.tree.map(placed, jax.eval_shape(tx.init, table))
    ids = placed(jax.ShapeDtypeStruct((lookups,), jnp.int32))

    loss = lambda t, ids: jnp.sum(jmask.embedding_lookup(t, ids) ** 2)
    compiled = training_step(loss, tx).lower(table, state, ids).compile()
    batch = lookups * row * 4
    tables = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((table, state)))
    assert temporary_bytes(compiled, tables // 8) <= 10 * batch + 2**20
    assert sum(size for _, size in collectives(compiled)) <= 3 * batch
    assert rounds_of_loops(compiled) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["adam", "with averages"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "lookup", ["vmap over tables", "pairs", "a table, then rows", "stacked"]
)
def test_stacked_tables_in_place(lookup, way, name):
    """They are written as one table of rows, of which XLA does not see that they are it."""
    table = jax.ShapeDtypeStruct((3, 50_000, 16), jnp.float32)
    how = {"sharding": gpu("H100"), "apply": WAYS[way]}
    compiled = compiled_step(STACKED[lookup], STACKED_UPDATES[name], table, BATCH, **how)
    assert temporary_bytes(compiled) < table.size


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lookups", [2**16, 2**20])
@pytest.mark.parametrize("name", ["sgd", "adam", "optax.adamw"])
def test_in_place_for_large_batches(name, lookups):
    """XLA schedules the lookup after the update, or not, by what each of them holds."""
    table = jax.ShapeDtypeStruct((5_000_000, 128), jnp.float32)
    ids = jax.ShapeDtypeStruct((lookups,), jnp.int32)
    compiled = compiled_step(sum_of_squares, OPTIMIZERS[name], table, ids, sharding=gpu("H100"))
    # Cotangents, which are read before the table is written, and their sums: SGD needs none.
    arrays = 1.1 if name == "sgd" else 2.1
    assert temporary_bytes(compiled) < arrays * lookups * 128 * 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("with_value", [True, False], ids=["value_and_grad", "grad"])
@pytest.mark.parametrize(
    ("loss", "name"), [*((loss, "sgd") for loss in LATE), (LINEAR, "adam")]
)
def test_tables_are_written_after_the_last_lookup(loss, name, with_value):
    """XLA fuses a lookup into each of its consumers, and the update into its scatter."""
    temporaries, table = late_step(loss, OPTIMIZERS[name], with_value, gpu("H100"))
    assert temporaries < table / 2


@pytest.mark.parametrize("aux", AUX)
@pytest.mark.parametrize("loss", BESIDE)
def test_tables_are_written_after_what_the_loss_returns_beside_its_value(loss, aux):
    temporaries, table = step_with_aux(loss, aux, gpu("H100"))
    assert temporaries < table / 2


# The last operation of these updates is a negation, or XLA may make it one.
ADDED = {name: OPTIMIZERS[name] for name in ("sgd", "adam", "momentum", "rowwise adagrad")} | {
    "sgd, a schedule": jmask.sgd(optax.linear_schedule(0.1, 0.01, 100)),
    "lazy sgd": jmask.lazy(optax.sgd(0.1)),
    "negated last": jmask.lazy(optax.chain(optax.scale(0.1), optax.scale(-1.0))),
}


@pytest.mark.parametrize("columns", [64, 3])
@pytest.mark.parametrize("name", ADDED)
def test_equal_ids_are_added_by_the_hardware(name, columns, tmp_path):
    """Not by compare and swap: with frequent ids a step takes a hundred times as long."""
    table = jax.ShapeDtypeStruct((100_000, columns), jnp.float32)
    arguments = table, jax.eval_shape(ADDED[name].init, table)
    ids = jax.ShapeDtypeStruct((4096,), jnp.int32)
    step = training_step(lambda t, ids: -jnp.sum(t[ids] ** 2), ADDED[name])
    lowered = step.lower(*shapes((*arguments, ids), gpu("H100")))
    lowered.compile({"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": ".*"})
    text = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    atomic = re.findall(r"\b(?:atom|red)\.[\w.:]*(add|cas)\b", text)
    assert "add" in atomic
    assert "cas" not in atomic


@pytest.mark.parametrize("of", ["sum", "mean", "weights", "padding"])
def test_bags_are_summed_as_they_are_read(of):
    """XLA writes rows before it sums them where a mask of bags (bags, k) hides some."""
    how = {"combiner": "mean"} if of == "mean" else {"padding_id": 0} if of == "padding" else {}
    table, ids, weights = shapes(
        (
            jax.ShapeDtypeStruct((100_000, 128), jnp.float32),
            jax.ShapeDtypeStruct((4096, 32), jnp.int32),
            jax.ShapeDtypeStruct((4096, 32), jnp.float32),
        ),
        gpu("H100"),
    )

    def bags(table, ids, weights):
        how_weighted = {"weights": weights} if of == "weights" else {}
        return jmask.embedding_bag(table, ids, **how, **how_weighted)

    compiled = jax.jit(bags).lower(table, ids, weights).compile()
    assert temporary_bytes(compiled) < 2**21  # all rows are 64 MB


@pytest.mark.parametrize("name", ["adam", "clipped optax.adam", "sgd with all terms"])
def test_slots_of_zeros_are_buffers_of_their_own(name):
    """XLA makes one array of equal ones, and one kernel writes both: the numbers are wrong."""
    tx = OPTIMIZERS[name]

    def first(ids, rows, table):
        gradient = jmask.RowSparse(ids, rows, table.shape)
        return jmask.apply_gradients(tx, gradient, tx.init(table), table)

    shapes = [((8,), jnp.int32), ((8, 4), jnp.float32), ((100, 4), jnp.float32)]
    arguments = [jax.ShapeDtypeStruct(*x, sharding=gpu("H100")) for x in shapes]
    text = jax.jit(first).lower(*arguments).compile().as_text()
    scatters = re.findall(r" = \(([^=]*)\) scatter\((.*?)\), ", text)
    updates = [operands.split(", ")[: types.count("f32[")] for types, operands in scatters]
    assert updates or jax.__version_info__ < (0, 12)
    assert all(len({*tables}) == len(tables) for tables in updates)


@pytest.mark.parametrize("name", chosen(["optax.adamw"], ["adam", "momentum"]))
def test_deferred_tables_in_place(name):
    check_deferred_in_place(OPTIMIZERS[name], gpu("H100"))


@pytest.mark.parametrize("ways", [16, 64])
def test_a_vocabulary_in_place(ways):
    assert rounds_of_loops(vocabulary_in_place(10**6, gpu("H100"), ways=ways)) == []


def test_what_is_lost_in_rounding_is_known():
    """XLA drops a cast to fewer digits and back: then nothing is ever rounded up."""
    x = jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=gpu("H100"))
    round_it = jax.jit(lambda x: jmask.stochastic_round(x, jnp.bfloat16, jax.random.key(0)))
    assert "reduce-precision" in round_it.lower(x).compile().as_text()


def test_control_tables_are_seen():
    check_that_tables_are_seen(ADAM, gpu("H100"))


def test_control_a_scatter_of_several_tables_is_a_loop_over_rows():
    """Why the one pass is not given to GPUs before JAX 0.12, with which it is one kernel."""
    tables = [jax.ShapeDtypeStruct((ROWS, 16), jnp.float32, sharding=gpu("H100"))] * 2
    ids = jax.ShapeDtypeStruct((512,), jnp.int32, sharding=gpu("H100"))
    rows = jax.ShapeDtypeStruct((512, 16), jnp.float32, sharding=gpu("H100"))
    combiner = lambda x, y, grad: (x - grad, y + grad)

    def update(tables, ids, grad):
        x = scatter_update.update_elementwise(combiner, tables, ids, grad, [], "unique")
        return x.update.fused(x)

    compiled = jax.jit(update, donate_argnums=0).lower(tables, ids, rows).compile()
    one_kernel = jax.__version_info__ >= (0, 12)
    assert rounds_of_loops(compiled) == ([] if one_kernel else [512])
    if one_kernel:
        assert compiled.memory_analysis().temp_size_in_bytes == 0
