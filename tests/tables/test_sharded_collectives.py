"""What crosses the network in a step on a sharded table, read from the compiled program.

A step needs n ids and n rows of D numbers there and back, whatever the size of the table:

    forward     n + n D numbers        backward    n + n D numbers

The bytes of a program are those that its collectives move, per device: of an all-gather the
result, of a reduce-scatter and an all-to-all the operand, of a permute what is sent, and of
an all-reduce twice its size, a reduce-scatter and an all-gather.

Rows of large batches go to their owners alone, in as many rounds as their ids need.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from benchmarks.collectives import collectives
from jmask._kernels import tuning
from tests.compiled_step import training_step
from tests.optimizers import NOT_LAZY, OPTIMIZERS
from tests.oracle import assert_close
from tests.sampling import chosen
from tests.stored_tables import LAYOUTS, STEPS, batch_of, mesh_of, sharded

pytestmark = pytest.mark.sampled(15)


V, D, N = 3000, 32, 512
ROUTED = (N * D + N) * 4  # bytes of the ids and rows of a batch


def forward_bytes(layout):
    """At most: ids and rows, and rows once more where shards lie across the batch's axes."""
    sizes, rows, batch, _ = LAYOUTS[layout]
    sizes = dict(zip(("data", "table") if len(sizes) == 2 else ("x",), sizes, strict=True))
    as_tuple = lambda x: (x,) if isinstance(x, str) else tuple(x)
    rows, batch = as_tuple(rows or sizes), as_tuple(batch or ())
    if not (set(rows) & set(batch) and set(rows) - set(batch)):
        return ROUTED + ROUTED * (not set(rows) & set(batch))
    # A reduce-scatter over the shared axes, and an all-reduce of what is left.
    return ROUTED + 2 * N * D * 4 // math.prod(sizes[axis] for axis in batch)


bytes_moved = lambda compiled: sum(size for _, size in collectives(compiled))
EXPLICIT = [x for x in LAYOUTS if LAYOUTS[x][3] == "explicit" and x != "1 device"]
AUTOMATIC = [x for x in LAYOUTS if LAYOUTS[x][3] != "explicit"]
loss = lambda table, ids: jnp.sum(jnp.sin(jmask.embedding_lookup(table, ids)))
loss_of_a_cast = lambda table, ids: loss(jnp.exp(table.astype(jnp.bfloat16)), ids)
IDS = np.random.default_rng(0).integers(0, V, N).astype(np.int32)


def compiled_step(layout, optimizer, step, rows=V, loss=loss):
    """The step, its table, and the forward pass alone."""
    table, ids = sharded(jnp.zeros((rows, D)), layout), batch_of(IDS, layout)
    tx = (OPTIMIZERS | NOT_LAZY)[optimizer]
    state = tx.init(table)
    train = training_step(loss, tx, STEPS[step])
    forward = jax.jit(loss).lower(table, ids).compile()
    return train.lower(table, state, ids).compile(), (table, state), forward


def assert_in_place(compiled, tables, layout):
    sizes, rows, *_ = LAYOUTS[layout]
    shards = math.prod(sizes) if rows is None or isinstance(rows, tuple) else sizes[-1]
    arrays = sum(x.nbytes for x in jax.tree.leaves(tables) if x.ndim)
    assert compiled.memory_analysis().alias_size_in_bytes >= arrays / shards


COLLECTED = ("sgd", "adam", "adagrad", "rowwise adagrad")
CASES = [
    *(("8 devices", name, step) for name in COLLECTED for step in STEPS),
    *((layout, "adam", "update") for layout in EXPLICIT),
]
ALL = [(x, name, step) for x in EXPLICIT for name in COLLECTED for step in STEPS]


@pytest.mark.parametrize(("layout", "optimizer", "step"), chosen(CASES, ALL))
def test_step(layout, optimizer, step):
    compiled, tables, forward = compiled_step(layout, optimizer, step)
    assert max(size for _, size in collectives(compiled)) < tables[0].nbytes / 2
    assert 0 < bytes_moved(forward) <= 1.2 * forward_bytes(layout)
    assert bytes_moved(compiled) - bytes_moved(forward) <= 1.2 * ROUTED
    assert_in_place(compiled, tables, layout)
    if layout == "8 devices":  # rows cross once in each direction
        moved = [kind for kind, size in collectives(compiled) if size > N * 4]
        assert moved == ["reduce-scatter", "all-gather"]


@pytest.mark.parametrize("layout", EXPLICIT)
def test_what_is_made_of_a_table_moves_no_more(layout):
    moved = (
        collectives(compiled_step(layout, "adam", "apply_gradients", loss=each)[0])
        for each in (loss, loss_of_a_cast)
    )
    assert next(moved) == next(moved)


@pytest.mark.parametrize("optimizer", COLLECTED)
@pytest.mark.parametrize("layout", AUTOMATIC)
def test_step_on_automatic_axes(layout, optimizer):
    """XLA partitions it: rows are summed over devices, and no array as large as the table."""
    rows = 40_000
    compiled, tables, _ = compiled_step(layout, optimizer, "apply_gradients", rows)
    assert max(size for _, size in collectives(compiled)) <= 2 * N * D * 4
    assert bytes_moved(compiled) <= 6 * ROUTED
    assert_in_place(compiled, tables, layout)
    assert compiled.memory_analysis().temp_size_in_bytes < tables[0].nbytes / 8


@pytest.mark.parametrize("optimizer", NOT_LAZY)
@pytest.mark.parametrize("layout", EXPLICIT)
@pytest.mark.dtype_promotion
def test_no_device_has_all_of_a_dense_gradient(layout, optimizer):
    compiled, tables, _ = compiled_step(layout, optimizer, "apply_gradients", 40_000)
    assert max(size for _, size in collectives(compiled)) <= 2 * N * D * 4
    assert compiled.memory_analysis().temp_size_in_bytes < tables[0].nbytes
    assert_in_place(compiled, tables, layout)


def test_control_the_parser_sees_what_moves():
    mesh = mesh_of(8)

    def of(function, outputs):
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=P("x"), out_specs=outputs, check_vma=False
        )
        return collectives(jax.jit(mapped).lower(jnp.zeros((64, 10))).compile())

    block = 8 * 10 * 4
    gather = lambda x: jax.lax.all_gather(x, "x", tiled=True)
    assert of(gather, P()) == [("all-gather", 8 * block)]
    assert of(lambda x: jax.lax.psum(x, "x"), P()) == [("all-reduce", 2 * block)]
    scatter = lambda x: jax.lax.psum_scatter(x, "x", tiled=True)
    assert sum(size for _, size in of(scatter, P("x"))) >= block
    shift = lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)])
    assert of(shift, P("x")) == [("collective-permute", block)]


def test_control_the_dense_step_moves_tables():
    table = jax.device_put(jnp.zeros((V, D)), NamedSharding(mesh_of(8), P()))
    ids = jax.device_put(jnp.zeros(N, jnp.int32), NamedSharding(mesh_of(8), P("x")))
    compiled = jax.jit(jax.grad(loss)).lower(table, ids).compile()
    assert bytes_moved(compiled) > V * D * 4


def test_ids_beyond_int32():
    """A step on five billion rows, from shapes alone: an eighth of them on each device."""
    rows, columns, mesh = 5 * 10**9, 8, mesh_of(8, axes="explicit")
    with jax.enable_x64(True):
        table = jmask.sharded(jax.ShapeDtypeStruct((rows, columns), jnp.float32), mesh)
        tx = jmask.adagrad(0.1)
        typed = jax.typeof(table)
        state = jax.eval_shape(tx.init, table)
        state = jax.tree.map(lambda x: table if x.shape == table.shape else x, state)
        ids = jax.ShapeDtypeStruct((N,), jnp.int64, sharding=NamedSharding(mesh, P("x")))
        row_ids = lambda table, ids: jmask.grad(loss)(table, ids).row_ids()
        assert jax.eval_shape(row_ids, table, ids).dtype == jnp.int64
        compiled = training_step(loss, tx).lower(table, state, ids).compile()
    assert typed.shape == (rows, columns)
    memory, of_a_device = compiled.memory_analysis(), 2 * rows // 8 * columns * 4
    assert of_a_device <= memory.argument_size_in_bytes <= of_a_device + 2**20
    assert memory.alias_size_in_bytes >= of_a_device
    assert memory.temp_size_in_bytes <= 2**22
    # Ids have 8 bytes each here.
    assert bytes_moved(compiled) <= 1.2 * 2 * (N * columns * 4 + N * 8)


# --- rows that go to their owners alone ------------------------------------------------------

MANY = 2048  # ids of a batch, of which each of 8 devices has 256


@pytest.fixture
def exchanged(monkeypatch):
    monkeypatch.setattr(tuning, "EXCHANGED_IDS", 1024)


def loss_and_rows(table, ids):
    rows = jmask.embedding_lookup(table, ids, padding_id=-1, mode="zero")
    return jnp.sum(jnp.sin(rows)), rows


@functools.cache
def everything(layout, optimizer, step):
    """Lookup, gradient, update and what does not fit, compiled."""
    tx = (OPTIMIZERS | NOT_LAZY)[optimizer]

    @jax.jit
    def run(table, ids):
        (_, rows), gradient = jmask.value_and_grad(loss_and_rows, has_aux=True)(table, ids)
        new = STEPS[step](tx, gradient, tx.init(table), table)
        excess = jmask.exchange_overflow(table, ids, padding_id=-1)
        return rows, new, excess

    return run


BATCHES = {
    "even": lambda rng: rng.integers(0, 4000, MANY),
    "padding": lambda rng: np.where(rng.random(MANY) < 0.5, -1, rng.integers(0, 4000, MANY)),
    "out of range": lambda rng: rng.integers(-3, 4003, MANY),
    "one id": lambda rng: np.full(MANY, 7),
    "frequent ones first": lambda rng: 4000 * rng.random(MANY) ** 3,
    "of one shard": lambda rng: rng.integers(0, 400, MANY),
    "of one shard on one device": lambda rng: np.where(
        np.arange(MANY) < 256, rng.integers(0, 400, MANY), rng.integers(0, 4000, MANY)
    ),
}
OVERFLOWS = {"frequent ones first", "of one shard", "of one shard on one device"}
LAYOUTS_OF_MANY = EXPLICIT
WITH_A_SUM = ("clipped optax.adam", "adam unless not finite")  # of all rows, before the first
SPREAD = ("8 devices", "rows over both, batch over data")
CASES_OF_MANY = [
    *(("8 devices", name, "sgd", "apply_gradients") for name in BATCHES),
    *((layout, "even", "rowwise adagrad", "update") for layout in LAYOUTS_OF_MANY),
    ("8 devices", "of one shard", "clipped optax.adam", "update"),
    *((x, "of one shard", name, "apply_gradients") for x in SPREAD for name in WITH_A_SUM),
]
EVERY_OF_MANY = [
    (layout, batch, name, step)
    for layout in LAYOUTS_OF_MANY
    for batch in BATCHES
    for name in ("sgd", "adam", "rowwise adagrad", *WITH_A_SUM)
    for step in STEPS
]


@pytest.mark.parametrize(
    ("layout", "batch", "optimizer", "step"), chosen(CASES_OF_MANY, EVERY_OF_MANY)
)
@pytest.mark.usefixtures("exchanged")
@pytest.mark.dtype_promotion
def test_large_batches(layout, batch, optimizer, step):
    """As on one device, however unevenly ids fall on shards; what does not fit is counted."""
    x = np.random.default_rng(2).normal(size=(4000, 8)).astype(np.float32)
    ids = BATCHES[batch](np.random.default_rng(3)).astype(np.int32)
    run = everything(layout, optimizer, step)
    *ours, excess = run(sharded(x, layout), batch_of(ids, layout))
    *wanted, none = run(jnp.asarray(x), jnp.asarray(ids))
    np.testing.assert_array_equal(ours[0], wanted[0])
    assert_close(ours[1], wanted[1], rtol=1e-4, atol=2e-5)
    assert (excess > 0) == (batch in OVERFLOWS)
    assert none == 0


# How often rows cross: looked up and updated, and before that summed, where a sum decides.
CROSSINGS = {"adam": 2, "clipped optax.adam": 3, "adam unless not finite": 3}
CROSSINGS |= {"averaged optax.adam": 2, "optax.adam within norms": 2}
CROSSINGS |= {"partition": 2, "adam, averaged": 2, "rows clipped": 2, "adam, injected": 2}
CROSSINGS["one not finite, in parts"] = 3
CROSSINGS["microbatches"] = 3  # the rows of two
PARTS = optax.partition({"rows": jmask.adam(0.1), "rest": optax.adam(0.1)}, "rows")
IN_OTHERS = {
    "partition": PARTS,
    "adam, averaged": optax.chain(jmask.adam(0.1), jmask.ema(0.9)),
    "adam, injected": optax.inject_hyperparams(jmask.adam)(learning_rate=0.1),
    "rows clipped": optax.chain(jmask.clip_by_row_norm(1.0), jmask.adam(0.1)),
    "one not finite, in parts": jmask.skip_nonfinite(PARTS),
}


@pytest.mark.parametrize(
    ("n", "times", "optimizer"),
    [*((2**17, 1.2, name) for name in CROSSINGS), (tuning.EXCHANGED_IDS, 1.6, "adam")],
)
@pytest.mark.dtype_promotion
def test_what_large_batches_move(n, times, optimizer):
    """Little more than the bytes of a device's rows, there and back, and room for no more."""
    columns = 64
    table = sharded(jnp.zeros((40_000, columns)), "8 devices")
    tx = (OPTIMIZERS | IN_OTHERS).get(optimizer)
    ids = batch_of(np.zeros(n, np.int32), "8 devices")
    if tx is None:
        like = jax.eval_shape(jmask.grad(loss), table, ids)
        tx = jmask.multi_steps(jmask.adam(0.1), 2, like=like)
    compiled = training_step(loss, tx).lower(table, tx.init(table), ids).compile()
    share, memory = n // 8 * columns * 4, compiled.memory_analysis()
    moved = collectives(compiled)
    exchanged = sum(size for kind, size in moved if kind == "all-to-all")
    assert 0 < exchanged <= times * CROSSINGS[optimizer] * share
    assert sum(size for kind, size in moved if kind != "all-to-all") < share / 50
    assert memory.alias_size_in_bytes >= 3 * table.nbytes / 8
    batches = 2 if optimizer == "microbatches" else 1
    assert memory.temp_size_in_bytes <= (4 + CROSSINGS[optimizer]) * batches * share


norm_of = jax.jit(lambda table, ids: jmask.tree.norm(jmask.grad(loss)(table, ids)))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("layout", LAYOUTS_OF_MANY)
@pytest.mark.usefixtures("exchanged")
def test_a_norm_of_many_rows(layout, batch):
    """Of what equal ids sum to, also where the shards do not divide the rows."""
    x = np.random.default_rng(2).normal(size=(4000, 8)).astype(np.float32)
    ids = BATCHES[batch](np.random.default_rng(3)).astype(np.int32)
    found = norm_of(jnp.asarray(x[:3999]), batch_of(ids, layout))
    found_of_shards = norm_of(sharded(x, layout), batch_of(ids, layout))
    for rows, norm in ((x[:3999], found), (x, found_of_shards)):
        assert_close(norm, norm_of(jnp.asarray(rows), jnp.asarray(ids)), rtol=1e-5)


def test_what_a_norm_moves():
    """The rows once, after their lookup, and no device has more than its share of them."""
    table = sharded(jnp.zeros((40_000, 64)), "8 devices")
    ids, share = batch_of(np.zeros(2**17, np.int32), "8 devices"), 2**14 * 64 * 4
    compiled = norm_of.lower(table, ids).compile()
    moved = collectives(compiled)
    assert sum(size for kind, size in moved if kind == "all-to-all") <= 1.2 * 2 * share
    assert sum(size for kind, size in moved if kind != "all-to-all") < share / 50
    assert compiled.memory_analysis().temp_size_in_bytes <= 6 * share


@pytest.mark.dtype_promotion
def test_what_deferred_rows_take():
    """A device catches up its own rows of the batch, in blocks, and updates no others."""
    table = sharded(jnp.zeros((160_000, 64)), "8 devices")
    ids, share = batch_of(np.zeros(2**17, np.int32), "8 devices"), 2**14 * 64 * 4
    tx = jmask.deferred(optax.adam(0.1))
    state = tx.init(table)
    for step in (tx.catch_up, lambda t, state, ids: training_step(loss, tx)(t, state, ids)[:2]):
        program = jax.jit(step, donate_argnums=(0, 1)).lower(table, state, ids).compile()
        memory, moved = program.memory_analysis(), collectives(program)
        assert memory.alias_size_in_bytes >= 3 * table.nbytes / 8
        assert memory.temp_size_in_bytes <= 8 * share
        assert sum(size for kind, size in moved if kind != "all-to-all") < share / 4


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "clipped optax.adam"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.usefixtures("exchanged")
@pytest.mark.dtype_promotion
def test_derivatives_of_a_step_that_exchanges_rows(optimizer, step):
    """In a rate of the loss, forwards and in reverse, as on one device."""
    x = np.random.default_rng(2).normal(size=(4000, 8)).astype(np.float32)
    ids = BATCHES["of one shard"](np.random.default_rng(3)).astype(np.int32)
    tx = OPTIMIZERS[optimizer]

    def derivatives(table, ids):
        def after(rate):
            gradient = jmask.grad(lambda table: rate * loss(table, ids))(table)
            return loss(STEPS[step](tx, gradient, tx.init(table), table)[0], ids)

        return jax.grad(after)(0.1), jax.jvp(after, (0.1,), (1.0,))[1]

    ours = jax.jit(derivatives)(sharded(x, "8 devices"), batch_of(ids, "8 devices"))
    wanted = jax.jit(derivatives)(jnp.asarray(x), jnp.asarray(ids))
    assert_close(ours, wanted, rtol=1e-3, atol=1e-3)


# --- ids of several dimensions, any of which may be sharded ----------------------------------

PLACES = [P(None, "data"), P(None, ("data", "table")), P("table", "data"), P("data", "table")]
LOSSES = {
    "lookup": loss,
    "bags": lambda table, ids: jnp.sum(jnp.sin(jmask.embedding_bag(table, ids))),
    "microbatches": lambda table, ids: jax.lax.scan(
        lambda total, ids: (total + loss(table, ids), None), 0.0, ids
    )[0],
}


def merged(table, ids):
    """The gradients of microbatches, stacked by a scan and merged."""
    one = lambda ids: jmask.grad(loss)(table, ids)
    return jmask.tree.merge(jax.lax.scan(lambda c, i: (c, one(i)), None, ids)[1])


GRADIENTS = {name: jmask.grad(function) for name, function in LOSSES.items()}
GRADIENTS["merged"] = merged


@pytest.mark.parametrize("rows", [("data", "table"), "table"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.usefixtures("exchanged")
def test_ids_sharded_over_any_dimension(name, place, rows):
    """A step is that of one device, and no device gets the rows of the whole batch."""
    if name in ("microbatches", "merged") and place[0] is not None:
        pytest.skip("a loop goes over its whole first dimension")
    x = np.random.default_rng(2).normal(size=(4000, 32)).astype(np.float32)
    ids = np.random.default_rng(3).integers(0, 4000, (16, 1024)).astype(np.int32)
    mesh, tx = mesh_of(2, 4, axes="explicit"), OPTIMIZERS["momentum"]
    table = jmask.sharded(x, mesh, axis=rows)

    @jax.jit
    def step(table, state, ids):
        return jmask.apply_gradients(tx, GRADIENTS[name](table, ids), state, table)

    state, placed = tx.init(table), jax.device_put(ids, NamedSharding(mesh, place))
    compiled = step.lower(table, state, placed).compile()
    wanted = step(jnp.asarray(x), tx.init(jnp.asarray(x)), ids)
    assert_close(compiled(table, state, placed), wanted, rtol=1e-4, atol=2e-5)
    whole = ids.size * 32 * 4
    assert max(size for _, size in collectives(compiled)) < whole


@pytest.mark.parametrize("value", [jnp.nan, 3e38])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.usefixtures("exchanged")
def test_a_sum_that_is_not_finite_on_one_shard(step, value):
    """Found by all devices, also where all that is summed is finite."""
    tx, ids = OPTIMIZERS["adam unless not finite"], np.arange(MANY, dtype=np.int32) % 4000
    ids[[5, 1500]] = 7  # on two devices
    scales = jnp.ones(MANY).at[jnp.array([5, 1500])].set(value)
    table = sharded(jnp.zeros((4000, 8)), "8 devices")
    loss = lambda t, ids: jnp.sum(jmask.embedding_lookup(t, ids) * scales[:, None])

    @jax.jit
    def run(table, ids):
        return STEPS[step](tx, jmask.grad(loss)(table, ids), tx.init(table), table)

    new, state = run(table, batch_of(ids, "8 devices"))
    assert state.skipped == 1
    np.testing.assert_array_equal(new, table)
