"""Steps on TPUs, read from programs compiled without one: in place, at the cost of the rows.

libtpu compiles for the devices of a topology that is only described. For rows of whole
128-lane lines every table and every state array shares its buffer with the one that comes
out, no copy of a table is made, and the temporaries are a few times the rows of the batch.

A table may be streamed in place without temporaries, so steps on 10**6 and on 10**7 rows are
compared: no scatter moves a whole table, no array with an entry for each row is made, and what
the compiler says the instructions cost is the same. `make test-tpu` runs these; `make tpu-cost`
prints estimates of whole steps.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask._kernels.lines import LANES
from tests import compiled_step as steps
from tests.compiled_step import IN_PLACE, Step, whole_table_operations
from tests.kernels.test_in_place import STACKED_UPDATES
from tests.lookup_programs import BATCH, STACKED
from tests.optimizers import OPTIMIZERS
from tests.sampling import chosen

pytestmark = [pytest.mark.needs(what="libtpu"), pytest.mark.dtype_promotion]


# Three float32 arrays (10**7, 128) are 14.3 GiB, which the 16 GiB of a v5e just hold.
ROWS, LOOKUPS, WIDTH = (10**6, 10**7), 512, 128
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")

wide = functools.partial(Step, row=(WIDTH,), lookups=LOOKUPS)
passed = functools.partial(wide, apply=jmask.apply_gradients)
packed = functools.partial(
    passed, row=(64,), table=jmask.packed, loss=functools.partial(steps.squares_of_lines, D=64)
)
# Few lookups and one array: compiling takes seconds for each bfloat16 scatter.
narrow = functools.partial(wide, dtype=jnp.bfloat16, lookups=64)
STEPS = {
    "sgd": passed(jmask.sgd(0.1)),
    "sgd in two steps": wide(jmask.sgd(0.1)),
    "decayed sgd": passed(jmask.sgd(0.1, weight_decay=0.1)),
    "momentum": passed(jmask.sgd(0.1, momentum=0.9)),
    "adagrad, several": passed(jmask.adagrad(), loss=steps.squares_of_several_lookups),
    "adagrad unless not finite": wide(jmask.skip_nonfinite(jmask.adagrad())),
    "adam": passed(jmask.adam()),
    "adam in two steps": wide(jmask.adam()),
    "adam, bags": passed(jmask.adam(), loss=steps.squares_of_bags),
    "adam, casts": passed(jmask.adam(), loss=steps.squares_of_casts),
    "adam of rows": passed(jmask.adam(count="per_row")),
    "rowwise": passed(jmask.rowwise_adagrad()),
    "rowwise in two steps": wide(jmask.rowwise_adagrad(), loss=steps.squares_of_bags),
    "ftrl": passed(jmask.ftrl()),
    "optax.adam": wide(jmask.lazy(optax.adam(0.1))),
    "optax.adamw": wide(jmask.lazy(optax.adamw(0.1))),
    "optax.lion": passed(jmask.lazy(optax.lion(0.1))),
    "optax.rmsprop": wide(jmask.lazy(optax.rmsprop(0.1)), loss=steps.squares_of_bags),
    "packed adam": packed(jmask.adam()),
    "linear loss": wide(jmask.sgd(0.1), loss=steps.linear),
    "bfloat16": narrow(jmask.sgd(0.1)),
    "float16": passed(jmask.adam(), dtype=jnp.float16),
    "bfloat16 in one pass": passed(jmask.adagrad(), dtype=jnp.bfloat16),
    "bfloat16, rounded stochastically": narrow(
        jmask.adagrad(state_dtype=jnp.float32), apply=steps.rounded_stochastically
    ),
}


def devices(topology):
    needs = "libtpu is needed, run these tests with `make test-tpu`"
    return steps.described(needs, platform="tpu", topology_name=topology)


@functools.cache
def device(topology):
    """The sharding that places all on one device of the topology."""
    return jax.sharding.SingleDeviceSharding(devices(topology)[0])


# Each step for one of them.
SOME = [(TOPOLOGIES[i % 3], name) for i, name in enumerate(STEPS)]


def check_flat(programs, loops=0):
    """Such steps on 10**6 and on 10**7 rows cost the rows of the batch, not the table."""
    for compiled, rows in zip(programs, ROWS, strict=True):
        assert not steps.streaming_scatters(compiled, rows)
        assert whole_table_operations(compiled, rows) <= IN_PLACE
        assert len(steps.rounds_of_loops(compiled)) == loops
    small, large = map(steps.costed_cycles, programs)
    assert large <= 1.02 * small + 2000


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("topology", "name"), chosen(SOME, itertools.product(TOPOLOGIES, STEPS))
)
def test_in_place(topology, name):
    step, temporary = STEPS[name], []
    programs = [step.compile(rows, device(topology)) for rows in ROWS]
    check_flat(programs)
    for compiled, rows in zip(programs, ROWS, strict=True):
        temporary.append(steps.temporary_bytes(compiled, step.table_bytes(rows)))
    # The rows of the batch, the random bits for them, and buffers of a fixed size.
    assert max(temporary) <= 10 * step.batch_bytes() + 2**20
    bits = 2**20 if step.apply is steps.rounded_stochastically else 0
    grown = temporary[1] - temporary[0]
    assert grown <= max(temporary[0] // 100, 3 * step.batch_bytes(), bits)


# Their numbers are traced: what is made of them alone, as a power of a decay, has no place in a
# kernel.
INJECTED = {
    f"injected {name}": jmask.lazy(optax.inject_hyperparams(getattr(optax, name))(0.1))
    for name in (
        "adabelief adadelta adagrad adam adamax adamw adan amsgrad lion nadam novograd radam "
        "rmsprop rprop sgd yogi".split()
    )
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", chosen(["injected adamw", "injected adamax"], [*OPTIMIZERS, *INJECTED])
)
def test_every_optimizer_is_compiled(name):
    step = passed((OPTIMIZERS | INJECTED)[name])
    compiled = step.compile(ROWS[0], device("v5e:2x2"))
    assert whole_table_operations(compiled, ROWS[0]) <= IN_PLACE
    temporary = steps.temporary_bytes(compiled, step.table_bytes(ROWS[0]))
    assert temporary <= 20 * step.batch_bytes() + 2**20


@pytest.mark.parametrize("name", ["adam", "adam per row", "with averages"])
def test_stacked_tables_in_place(name):
    """With V a multiple of 128, the state of one number for each row is in place too."""
    tx, loss = STACKED_UPDATES[name], STACKED["pairs"]
    table, sharding = jax.ShapeDtypeStruct((3, 51_200, 128), jnp.float32), device("v5e:2x2")
    compiled = steps.compiled_step(loss, tx, table, BATCH, sharding=sharding)
    state = jax.tree.leaves(jax.eval_shape(tx.init, table))
    for entries in {x.size for x in (table, *state) if x.size > 1}:
        assert steps.temporary_bytes(compiled, entries=entries) < 2**20


@pytest.mark.parametrize("name", chosen(["optax.adamw"], ["adam", "momentum"]))
def test_deferred_tables_in_place(name):
    steps.check_deferred_in_place(OPTIMIZERS[name], device("v5e:2x2"))


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "ways"), [*zip(TOPOLOGIES, (16, 64, 32), strict=True)])
def test_a_vocabulary_in_place(topology, ways):
    """Its lines move one by one: nothing of 32 MB is made, and no loop is over keys."""
    capacity = 10**6
    compiled = steps.vocabulary_in_place(capacity, device(topology), ways=ways)
    assert not steps.streaming_scatters(compiled, 8 * capacity)
    assert not steps.rounds_of_loops(compiled)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_control_tables_are_seen(topology):
    steps.check_that_tables_are_seen(STEPS["adam"], device(topology))


# --- a step costs the rows, not the table -----------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adam, bags", "rowwise"])
def test_batches_of_many_rows_are_flat(name, monkeypatch):
    """Their one loop is over the rows of ids that come again."""
    monkeypatch.setattr("jmask._kernels.tuning.LARGE_SUMS", 0)
    topology = TOPOLOGIES[list(STEPS).index(name) % 3]
    check_flat([STEPS[name].compile(rows, device(topology)) for rows in ROWS], loops=1)


@pytest.mark.parametrize(
    ("topology", "tx"), [("v5e:2x2", jmask.adam()), ("v6e:2x2", jmask.rowwise_adagrad())]
)
def test_sharded_tables_are_flat(topology, tx):
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.Mesh(np.array(devices(topology)), "x", axis_types=explicit)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    programs = []
    for rows in ROWS:
        shape = jax.ShapeDtypeStruct((4 * rows, WIDTH), "float32")
        table = jmask.sharded(shape, mesh)
        state = jax.eval_shape(tx.init, table)
        by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        state = jax.tree.map(lambda x: steps.shapes(x, by_rows if x.ndim else whole), state)  # noqa: B023
        ids = jax.ShapeDtypeStruct((LOOKUPS,), "int32", sharding=whole)
        loss = lambda t, ids: jnp.sum(jmask.embedding_lookup(t, ids) ** 2)
        lowered = steps.training_step(loss, tx).lower(table, state, ids)
        assert "jmask_update_rows" in lowered.as_text()
        programs.append(lowered.compile())
    check_flat(programs)


def step_on(mesh, rows, batch, shape, tx, count=10**6):
    """A step of a table of rows over these axes, by ids placed so; its mesh is set."""
    P = jax.sharding.PartitionSpec
    placed = lambda shape, dtype, *axes: jax.ShapeDtypeStruct(
        shape, dtype, sharding=jax.sharding.NamedSharding(mesh, P(*axes))
    )
    loss = lambda t, ids: jnp.sum(jmask.embedding_lookup(t, ids) ** 2)
    with jax.set_mesh(mesh):
        table, ids = placed((count, WIDTH), "float32", rows), placed(shape, "int32", *batch)
        state = jax.tree.map(
            lambda x: placed(x.shape, x.dtype, *[rows][: x.shape[:1] == (count,)]),
            jax.eval_shape(tx.init, table),
        )
        return steps.training_step(loss, tx).lower(table, state, ids)


def mesh_of_two_axes():
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    places = np.array(devices("v5e:4x4")).reshape(4, 4)
    return jax.sharding.Mesh(places, ("data", "table"), axis_types=explicit)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_for_devices_that_are_only_described(name):
    """Nothing is computed while they are traced: the mesh that is set has no such devices."""
    lowered = step_on(mesh_of_two_axes(), "table", ["data"], (64,), OPTIMIZERS[name])
    assert "jmask" in lowered.as_text()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rows", ["table", ("data", "table")], ids=str)
@pytest.mark.parametrize("batch", [("data",), ("data", "table"), (None, "table")], ids=str)
def test_large_batches_over_any_axes(rows, batch):
    """No device has room for the rows of the whole batch, wherever its ids lie."""
    shape = (256, 512)
    lowered = step_on(mesh_of_two_axes(), rows, batch, shape, jmask.adam())
    memory = lowered.compile().memory_analysis()
    whole = shape[0] * shape[1] * WIDTH * 4
    assert memory.temp_size_in_bytes < whole / 3


@pytest.mark.parametrize("name", ["sgd", "rowwise"])
def test_control_scatters_of_xla_stream(name, monkeypatch):
    """With the promise of sorted ids they do: what the tests above would see."""
    monkeypatch.setenv("JMASK_KERNELS", "0")
    monkeypatch.setattr("jmask._kernels.tuning.SORTED_PAYS", 10**9)
    compiled = STEPS[name].compile(ROWS[0], device("v5e:2x2"))
    assert steps.streaming_scatters(compiled, ROWS[0])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_without_the_kernel_no_table_streams(topology, monkeypatch):
    monkeypatch.setenv("JMASK_KERNELS", "0")
    for name in ("sgd", "decayed sgd", "optax.adam"):
        compiled = STEPS[name].compile(ROWS[1], device(topology))
        assert not steps.streaming_scatters(compiled, ROWS[1])


# --- what the compiler takes -------------------------------------------------------------

ELEMENTWISE = {
    "clamp": lambda x: jnp.clip(x, -1.0, 1.0),
    "copysign": lambda x: jnp.sign(x) * jnp.abs(x),
    "pow": lambda x: jnp.abs(x) ** 1.5 + x**3,
    "roots": lambda x: jnp.sqrt(jnp.abs(x)) + jax.lax.rsqrt(x * x + 1),
    "exponentials": lambda x: jnp.exp(x) + jnp.exp2(x) + jnp.log(x) + jnp.log1p(x * x),
    "sigmoids": lambda x: jnp.tanh(x) + jax.nn.sigmoid(x) + jnp.sin(x) + jnp.cos(x),
    "angles": lambda x: jnp.tan(x) + jnp.arctan2(x, x + 1),
    "rounding": lambda x: jnp.floor(x) + jnp.ceil(x) + jnp.round(x) + jax.lax.rem(x, x + 2),
    "next": lambda x: jnp.nextafter(x, 2 * x),
    "masks": lambda x: jnp.where((x > 0) & (x < 1) | ~jnp.isfinite(x), x, 0.0),
    "more masks": lambda x: jnp.where(
        (x >= 0) ^ (x != 1), jnp.maximum(x, 2), jnp.minimum(x, 0)
    ),
    "integers": lambda x: (x.astype(jnp.int32) % 7).astype(x.dtype),
    "bfloat16": lambda x: (x.astype(jnp.bfloat16) * 2).astype(x.dtype),
    "reduced": lambda x: jax.lax.reduce_precision(x, 8, 7),
}


@pytest.mark.parametrize("names", [tuple(ELEMENTWISE)[i::3] for i in range(3)])
def test_arithmetic_that_is_lowered(names):
    topology = TOPOLOGIES[len(names) % 3]

    change = lambda g, p: -sum(ELEMENTWISE[name](g + 0.1 * p) for name in names)
    inner = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda g, s, p: (jax.tree.map(change, g, p), jax.tree.map(jnp.add, s, g)),
    )
    compiled = passed(jmask.lazy(inner)).compile(ROWS[0], device(topology))
    assert "jmask_update_rows" in compiled.as_text()


# --- packed tables: no padding and no copies ---------------------------------------------

# An optimizer, and how many tables it trains.
PACKED = {"adagrad": (jmask.adagrad(0.1), 2), "adam": (jmask.adam(), 3)}


@functools.cache
def memory_of(topology, optimizer, columns, rows, packed=True, lookups=8192):
    """The memory analysis of a donated step, and the bytes of the numbers it trains."""
    tx, tables = PACKED[optimizer]
    table = jmask.packed if packed else lambda x: x
    loss = functools.partial(steps.squares_of_lines, D=columns) if packed else steps.squares
    how = {"loss": loss, "apply": jmask.apply_gradients, "table": table}
    step = Step(tx, (columns,), lookups=lookups, **how)
    compiled = step.compile(rows, device(topology))
    width = 128 if packed and columns == 100 else columns
    return compiled.memory_analysis(), 4 * rows * tables * width


def check_arguments(memory, numbers):
    """Nothing is padded, and all tables come out in the buffers in which they came."""
    assert memory.argument_size_in_bytes <= 1.03 * numbers
    assert memory.alias_size_in_bytes >= numbers


# A topology, the entries of a row, an optimizer, and lookups.
PACKED_CASES = """
    v5e:2x2 8 adagrad 8192; v5e:2x2 64 adam 8192; v5e:2x2 100 adagrad 8192;
    v6e:2x2 8 adam 4096; v6e:2x2 16 adagrad 8192; v6e:2x2 32 adam 8192; v6e:2x2 100 adam 8192;
    v5p:2x2x1 8 adagrad 4096; v5p:2x2x1 8 adam 4096; v5p:2x2x1 16 adagrad 8192;
    v5p:2x2x1 16 adam 8192; v5p:2x2x1 32 adagrad 8192; v5p:2x2x1 32 adam 8192;
    v5p:2x2x1 64 adam 8192; v5p:2x2x1 100 adam 8192
""".split(";")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [case.strip() for case in PACKED_CASES])
def test_a_million_rows(case):
    """A million rows of 8 are 32 MB: lines of 4096 lookups are 5 % of table and state."""
    topology, columns, optimizer, lookups = case.split()
    how = int(columns), 10**6, True, int(lookups)
    memory, numbers = memory_of(topology, optimizer, *how)
    check_arguments(memory, numbers)
    # The SparseCores of a v5p write the lines of the batch to HBM, where two arrays of them are
    # at once: those of the batch, and of the gradient.
    lines = int(lookups) * LANES * 4
    allowed = (2.75 if columns == "100" else 1.5) * lines if topology.startswith("v5p") else 0
    assert memory.temp_size_in_bytes <= max(0.05 * numbers, allowed)


@pytest.mark.parametrize("optimizer", chosen(["adagrad"], ["adam"]))
def test_lines_of_a_batch_on_v5p(optimizer):
    """No more than two arrays of them, for any number of rows."""
    (small, _), (large, numbers) = (memory_of("v5p:2x2x1", optimizer, 8, n) for n in ROWS)
    check_arguments(large, numbers)
    lines = 8192 * LANES * 4
    assert small.temp_size_in_bytes <= 2.5 * lines
    assert large.temp_size_in_bytes <= small.temp_size_in_bytes + lines / 2
    assert large.temp_size_in_bytes <= 0.05 * numbers


@pytest.mark.filterwarnings("ignore:on a TPU a step copies")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_control_an_array_is_copied(topology):
    memory, numbers = memory_of(topology, "adagrad", 64, 10**6, packed=False)
    assert memory.temp_size_in_bytes >= numbers
