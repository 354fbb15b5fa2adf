"""What crosses the network in a step on a sharded table, read from the compiled program.

A step needs n ids and n rows of D numbers there and back, whatever the size of the table:

    forward     n + n D numbers        backward    n + n D numbers

The bytes of a program are those that its collectives move, per device: of an all-gather the
result, of a reduce-scatter and an all-to-all the operand, of a permute what is sent, and of
an all-reduce twice its size, a reduce-scatter and an all-gather.

Tables whose rows go to their owners alone are as on one device, or nan, never less.
"""

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from benchmarks.collectives import collectives
from jmask._tables.shard_layout import layout_of
from tests.compiled_step import training_step
from tests.optimizers import OPTIMIZERS
from tests.sampling import chosen
from tests.stored_tables import STEPS, bits, mesh_of, numbers, replicated, sharded

pytestmark = pytest.mark.sampled(15)


V, D, N = 3000, 32, 512
ROUTED = (N * D + N) * 4  # bytes of the ids and rows of a batch


def forward_bytes(table):
    """At most: ids and rows, and rows once more where shards lie across the batch's axes."""
    layout, sizes = table.layout, table.layout.mesh.shape
    shared = [axis for axis in layout.batch if axis in layout.rows]
    others = [axis for axis in layout.rows if axis not in layout.batch]
    if not (shared and others):
        return ROUTED
    # A reduce-scatter over the shared axes, and an all-reduce of what is left.
    return ROUTED + 2 * N * D * 4 // math.prod(sizes[axis] for axis in layout.batch)


bytes_moved = lambda compiled: sum(size for _, size in collectives(compiled))
NAMES = ["8 devices", "rows over table, batch over data", "rows over table, batch over both"]
NAMES += ["rows over both, batch over data", "explicit axis", "explicit axes, rows over table"]
loss = lambda table, ids: jnp.sum(jnp.sin(table[ids]))
table_of = lambda layout, packed=False: sharded(jnp.zeros((V, D)), layout, packed=packed)


def ids_for(table):
    ids = np.random.default_rng(0).integers(0, V, N).astype(np.int32)
    return jax.device_put(ids, NamedSharding(table.layout.mesh, P(table.layout.batch)))


def assert_no_table_moves(compiled, table):
    largest = max((size for _, size in collectives(compiled)), default=0)
    assert largest < min(leaf.nbytes for leaf in jax.tree.leaves(table)) / 2


@pytest.mark.parametrize("layout", NAMES)
def test_forward(layout):
    table = table_of(layout)
    compiled = jax.jit(loss).lower(table, ids_for(table)).compile()
    assert_no_table_moves(compiled, table)
    assert 0 < bytes_moved(compiled) <= 1.2 * forward_bytes(table)


COLLECTED = ("sgd", "adam", "adagrad", "rowwise adagrad")
CASES = [
    *(("8 devices", name, "apply_gradients", name == "adam") for name in COLLECTED),
    *(("8 devices", name, "update", name == "adagrad") for name in COLLECTED),
    ("rows over table, batch over data", "adam", "update", False),
    ("rows over table, batch over both", "rowwise adagrad", "apply_gradients", False),
    ("rows over both, batch over data", "adagrad", "update", False),
    ("explicit axis", "adam", "apply_gradients", False),
    ("explicit axis", "rowwise adagrad", "update", True),
    ("explicit axes, rows over table", "sgd", "update", False),
]
ALL = itertools.product(NAMES, COLLECTED, STEPS, (False, True))


@pytest.mark.parametrize(("layout", "optimizer", "step", "packed"), chosen(CASES, ALL))
def test_step(layout, optimizer, step, packed):
    table, tx = table_of(layout, packed), OPTIMIZERS[optimizer]
    state = replicated(tx.init(table), table)
    train = training_step(loss, tx, STEPS[step])
    compiled = train.lower(table, state, ids_for(table)).compile()
    assert_no_table_moves(compiled, table)
    assert bytes_moved(compiled) <= 1.2 * (forward_bytes(table) + ROUTED)
    forward = jax.jit(loss).lower(table, ids_for(table)).compile()
    assert bytes_moved(compiled) - bytes_moved(forward) <= 1.2 * ROUTED
    tables = sum(x.nbytes for x in jax.tree.leaves((table, state)) if x.ndim)
    assert compiled.memory_analysis().alias_size_in_bytes >= tables / table.layout.shards


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


# --- ids beyond int32 ---------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["div", "mod"])
def test_ids_beyond_int32(placement):
    """A step on five billion rows, from shapes alone: an eighth of them on each device."""
    rows, columns = 5 * 10**9, 8
    with jax.enable_x64(True):
        layout = layout_of((rows, columns), mesh_of(8), placement=placement, packed=False)
        block = jax.eval_shape(
            layout.stored,
            jax.ShapeDtypeStruct((layout.shards * layout.block, columns), jnp.float32),
        )
        spread = lambda x: x.update(sharding=layout.sharding(x.ndim) if x.ndim else None)
        table = jmask.ShardedTable(spread(block), layout, (rows, columns))
        tx = jmask.adagrad(0.1)
        state = jax.eval_shape(tx.init, table)
        assert [x.shape for x in jax.tree.leaves(state)] == [(), block.shape]
        state = jax.tree.map(spread, state)
        ids = jax.ShapeDtypeStruct((N,), jnp.int64, sharding=NamedSharding(mesh_of(8), P("x")))
        row_ids = lambda table, ids: jmask.grad(loss)(table, ids).row_ids()
        assert jax.eval_shape(row_ids, table, ids).dtype == jnp.int64
        compiled = training_step(loss, tx).lower(table, state, ids).compile()
    memory = compiled.memory_analysis()
    of_a_device = 2 * layout.block * columns * 4
    assert of_a_device <= memory.argument_size_in_bytes <= of_a_device + 2**20
    assert memory.alias_size_in_bytes >= of_a_device
    assert memory.temp_size_in_bytes <= 2**22
    # Ids have 8 bytes each here.
    assert bytes_moved(compiled) <= 1.2 * 2 * (N * columns * 4 + N * 8)


def test_real_ids_beyond_int32():
    """The rows of a layout of 5e9 rows that are looked at, on shards that are real."""
    with jax.enable_x64(True):
        ids = jnp.asarray([0, 2**31 - 1, 2**31, 2**32 + 3, 5 * 10**9 - 1, 5 * 10**9])
        for placement in ("div", "mod"):
            layout = layout_of((5 * 10**9, 8), mesh_of(8), placement=placement)
            shards = (
                np.asarray(ids) // layout.block if placement == "div" else np.asarray(ids) % 8
            )
            for i, shard in zip(ids[:-1], shards, strict=False):
                place = layout.local(i[None], int(shard))
                assert 0 <= int(place[0]) < layout.block
                assert int(layout.ids(place, int(shard))[0]) == int(i)
                assert int(layout.local(i[None], (int(shard) + 1) % 8)[0]) == layout.block


def test_without_x64_it_is_refused():
    layout = layout_of((5 * 10**9, 8), mesh_of(8), packed=False)
    block = jax.ShapeDtypeStruct((layout.shards * layout.block, 8), jnp.float32)
    table = jmask.ShardedTable(block, layout, (5 * 10**9, 8))
    with pytest.raises(ValueError, match="jax_enable_x64"):
        jax.eval_shape(loss, table, jax.ShapeDtypeStruct((N,), jnp.int32))


# --- rows that go to their owners alone: as on one device, or nan ---------------------

COUNT = 21


def exchanged(x, name="8 devices", factor=4.0, **how):
    how = {"placement": "mod", "packed": False} | how
    return sharded(x, name, capacity_factor=factor, **how)


def loss_and_rows(table, ids):
    rows = jmask.embedding_lookup(table, ids, padding_id=-1, mode="zero")
    return jnp.sum(jnp.sin(rows)), rows


@functools.cache
def everything(factor, name):
    """Lookup, gradient and an update of a table that is exchanged, compiled."""

    @jax.jit
    def run(x, ids):
        table = exchanged(x, name, factor=factor)
        (_, rows), gradient = jmask.value_and_grad(loss_and_rows, has_aux=True)(table, ids)
        tx = jmask.sgd(1.0)
        new, _ = jmask.apply_gradients(tx, gradient, tx.init(table), table)
        return rows, new.todense()

    return run


@hypothesis.given(
    ids=st.lists(st.integers(-3, COUNT + 3), min_size=32, max_size=32),
    name=st.sampled_from(["8 devices", "rows over table, batch over both"]),
)
def test_any_ids(ids, name):
    """However unevenly ids fall on shards, lookups are exact: in more rounds, or in one.

    With eight times its share a shard has room for all there is.
    """
    x, ids = numbers(), jnp.array(ids)
    rows, new = everything(8.0, name)(x, ids)
    gradient, expected = jax.grad(loss_and_rows, has_aux=True)(x, ids)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(new, x - gradient, rtol=1e-5, atol=1e-6)


@hypothesis.given(st.lists(st.integers(-1, COUNT - 1), min_size=32, max_size=32))
def test_what_does_not_fit_is_nan(ids):
    """A shard with more entries than it has room for has nan in some of their rows."""
    x = numbers()
    rows, new = everything(1.0, "8 devices")(x, jnp.array(ids))
    gradient, expected = jax.grad(loss_and_rows, has_aux=True)(x, jnp.array(ids))
    np.testing.assert_array_equal(rows, expected)
    # Four ids on each of eight devices: an id counts once for each device.
    sent = [i for part in np.reshape(ids, (8, 4)) for i in set(part) if i >= 0]
    entries = np.bincount(np.array(sent, int) % 8, minlength=8)
    new, is_nan, shard = np.asarray(new), np.isnan(new).all(axis=1), np.arange(COUNT) % 8
    for number, count in enumerate(entries):
        if count > 4:
            assert is_nan[shard == number].any()
            changed = (bits(new) != bits(x)).any(axis=1)
            np.testing.assert_array_equal((changed & ~is_nan)[shard == number], False)
        else:
            exact = np.asarray(x - gradient)[shard == number]
            np.testing.assert_allclose(new[shard == number], exact, rtol=1e-5, atol=1e-6)


def test_a_step_that_does_not_fit_is_skipped():
    table = exchanged(numbers(), factor=1.0)
    tx = jmask.skip_nonfinite(jmask.adagrad(0.1))
    step, before = training_step(lambda t, ids: loss_and_rows(t, ids)[0], tx), np.asarray(table)
    after, state, _ = step(table, tx.init(table), jnp.tile(jnp.array([0, 8, 16, 5]), 8))
    np.testing.assert_array_equal(bits(after), bits(before))
    after, state, _ = step(after, state, jnp.arange(32) % 8)
    assert np.isfinite(after).all()
    assert (np.asarray(after) != before)[:8].any(axis=1).all()


def test_other_programs():
    """Bags and scans, and jax.grad, whose gradient is as large as the table."""
    x, ids = numbers((3, 4)), jnp.array([[1, 3, 3], [20, 7, 2]])

    def both(table):
        bags = jmask.embedding_bag(table, ids, combiner="mean")
        add = lambda total, i: (total + jnp.sum(jnp.sin(table[i])), None)
        return jnp.sum(bags**2) + jax.lax.scan(add, jnp.float32(0), ids)[0]

    table = exchanged(x)
    for gradient in (jax.jit(jmask.grad(both))(table), jax.jit(jax.grad(both))(table)):
        np.testing.assert_allclose(gradient.todense(), jax.grad(both)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", ["8 devices", "rows over table, batch over both"])
def test_inside_a_shard_map(name, checked):
    """A step of a program that is written for each device, its types checked or not."""
    x, tx = numbers(), jmask.adam(0.1)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, COUNT, 32))
    table = exchanged(x, name, factor=8.0)
    state, layout = tx.init(table), table.layout
    spread = jax.tree.map(lambda leaf: P(layout.rows) if leaf.ndim else P(), (table, state))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=layout.mesh,
        in_specs=(*spread, P(layout.batch)),
        out_specs=(*spread, P()),
        check_vma=checked,
    )
    def step(table, state, ids):
        gradient = jmask.grad(lambda t: loss_and_rows(t, ids)[0])(table)
        table, state = jmask.apply_gradients(tx, gradient, state, table)
        return table, state, jax.lax.psum(loss_and_rows(table, ids)[0], layout.batch)

    table, state, value = step(table, state, ids)
    dense = jax.grad(lambda t: loss_and_rows(t, ids)[0])(x)
    new, _ = jmask.apply_gradients(tx, jmask.RowSparse.fromdense(dense), tx.init(x), x)
    np.testing.assert_allclose(table, new, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(value, loss_and_rows(new, ids)[0], rtol=1e-5)


def test_what_crosses_the_network():
    """With as many lookups on each device the same bytes, on two devices or on eight."""
    rows, width, lookups, factor = 4000, 32, 512, 2.0

    def bytes_of(devices):
        mesh = mesh_of(devices)
        x = jnp.zeros((rows, width))
        table = jmask.sharded(x, mesh, capacity_factor=factor, packed=False)
        ids = np.random.default_rng(0).integers(0, rows, lookups * devices).astype(np.int32)
        ids = jax.device_put(ids, NamedSharding(mesh, P("x")))
        tx, of_sines = jmask.adam(0.1), lambda t, ids: jnp.sum(jnp.sin(t[ids]))
        compiled = training_step(of_sines, tx).lower(table, tx.init(table), ids).compile()
        moved = collectives(compiled)
        assert {kind for kind, _ in moved} <= {"all-to-all", "all-reduce"}
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= 3 * x.nbytes / devices
        return sum(size for _, size in moved), memory.temp_size_in_bytes

    (of_two, _), (of_eight, temporaries) = bytes_of(2), bytes_of(8)
    room = factor * lookups * (width + 1) * 4
    assert 0 < of_two <= 1.1 * 2 * room
    assert of_eight <= 1.1 * of_two
    assert temporaries <= 12 * room


def test_another_placement_keeps_the_factor():
    table = exchanged(numbers(), factor=3.0).with_placement("div")
    assert (table.layout.placement, table.layout.capacity_factor) == ("div", 3.0)
