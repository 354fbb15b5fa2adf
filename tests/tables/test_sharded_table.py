"""A table spread over devices trains as on one, wherever its rows and its batch are."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from jmask._tables.shard_layout import layout_of
from tests import stored_tables
from tests.optimizers import OF_ALL_TABLES as OPTIMIZERS
from tests.oracle import assert_close
from tests.sampling import chosen
from tests.stored_tables import LAYOUTS, STEPS, bits, is_table, mesh_of, numbers, sharded

pytestmark = pytest.mark.sampled(15)

V, D = 21, 12  # 21 rows divide by none of the numbers of devices but 1

# --- trajectories ------------------------------------------------------------------------

# And with rows that go to their owners alone, of which there are at most so many times a share.
EXCHANGED = [
    *("1 device", "8 devices", "rows and batch over both axes", "rows and batch over table"),
    *("rows over table, batch over both", "in the other order", "explicit axis"),
    "explicit axes, batch over both",
]
PLACES = [(name, None) for name in LAYOUTS if name != "explicit axes, batch over both"]
PLACES += [(name, 4.0) for name in EXCHANGED]
# Every value of every parameter in a few cases by default.
DEFAULT = [
    (place, list(OPTIMIZERS)[i % len(OPTIMIZERS)], ("div", "mod")[i % 2], i // 2 % 2 == 1, step)
    for i, place in enumerate(PLACES)
    for step in [list(STEPS)[(i + i // 3) % 2]]
]
EVERY = [
    (place, optimizer, placement, packed, list(STEPS)[i % 2])
    for place in PLACES
    for i, optimizer in enumerate(OPTIMIZERS)
    for placement in ("div", "mod")
    for packed in (False, True)
]


@pytest.mark.parametrize(
    ("place", "optimizer", "placement", "packed", "step"), chosen(DEFAULT, EVERY)
)
@pytest.mark.dtype_promotion
def test_trajectory(place, optimizer, placement, packed, step):
    """As on one device; sharded before, between and after; compiled once; in place."""
    x, (name, factor) = numbers(), place
    table = sharded(x, name, placement, packed=packed, capacity_factor=factor)
    run = stored_tables.trained(table, OPTIMIZERS[optimizer], STEPS[step])
    stored_tables.assert_same_run(run, stored_tables.trained_array(optimizer))
    stored_tables.assert_other_rows_untouched(run, x)
    assert run.programs == 1
    assert_sharded_alike((run.params, run.state), table.layout)
    assert all(old.is_deleted() for old in run.donated)


def assert_sharded_alike(tree, layout):
    """All arrays of all tables lie on the shards of the layout, one block each."""
    tables = [x for x in jax.tree.leaves(tree, is_leaf=is_table) if is_table(x)]
    assert tables
    for table in tables:
        assert isinstance(table, jmask.ShardedTable)
        assert table.layout == layout
        for block in jax.tree.leaves(table.blocks):
            whole = layout.sharding(block.ndim)
            assert block.sharding.is_equivalent_to(whole, block.ndim)
            if layout.shards > 1:  # on one device JAX leaves out the axes
                assert block.sharding.spec[0] in (layout.rows, layout.rows[0])
            pieces = {shard.data.shape[0] for shard in block.addressable_shards}
            assert pieces == {block.shape[0] // layout.shards}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("optimizer", "packed"), [(name, packed) for name in OPTIMIZERS for packed in (False, True)]
)
def test_state_is_sharded_alike(optimizer, packed):
    table = sharded(numbers(), "rows over table, batch over data", packed=packed)
    assert_sharded_alike((table, OPTIMIZERS[optimizer].init(table)), table.layout)


@pytest.mark.parametrize(("optimizer", "count"), [("momentum", 8), ("lazy", 9)])
@pytest.mark.dtype_promotion
def test_update_without_parameters(optimizer, count):
    """The rows of the state are found where they live, whatever their number."""
    tx = jmask.lazy(optax.adam(0.1)) if optimizer == "lazy" else jmask.sgd(0.1, 0.9)
    ids = jnp.arange(count) * 2 % V

    @jax.jit
    def run(table):
        gradient = jmask.grad(lambda t: jnp.sum(jnp.sin(t[ids])))(table)
        updates, state = tx.update(gradient, tx.init(table))
        return jmask.apply_updates(table, updates), state

    actual = stored_tables.as_arrays(run(sharded(numbers(), "8 devices")))
    assert_close(actual, stored_tables.as_arrays(run(numbers())), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["8 devices", "explicit axis"])
def test_microbatches(name, step):
    """Two microbatches of eight lookups are one of sixteen."""
    inner, table = jmask.adam(0.1), sharded(numbers(), name)
    spread = NamedSharding(table.layout.mesh, P("x"))
    batches = [jax.device_put((jnp.arange(8) + 3 * i) % V, spread) for i in range(2)]
    loss = lambda t, ids: jnp.sum(jnp.sin(t[ids]))
    like = jax.eval_shape(jmask.grad(loss), table, batches[0])
    tx = jmask.multi_steps(inner, 2, like)

    @jax.jit
    def run(table, state, ids):
        return STEPS[step](tx, jmask.grad(loss)(table, ids), state, table)

    first, state = run(table, tx.init(table), batches[0])
    np.testing.assert_array_equal(bits(first), bits(table))
    second, _ = run(first, state, batches[1])
    x, ids = numbers(), jnp.concatenate([np.asarray(ids) for ids in batches])
    gradient = jmask.grad(lambda t: loss(t, ids) / 2)(x)
    expected, _ = jmask.apply_gradients(inner, gradient, inner.init(x), x)
    np.testing.assert_allclose(second, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["8 devices", "explicit axis"])
def test_a_step_that_may_not_be_taken(name, step):
    """Taken or not, it returns tables that are where they were."""
    tx, table = jmask.skip_nonfinite(jmask.adam(0.1)), sharded(numbers(), name)
    ids = jax.device_put(jnp.arange(8), NamedSharding(table.layout.mesh, P("x")))

    @jax.jit
    def run(table, state, scale):
        gradient = jmask.grad(lambda t: jnp.sum(scale * t[ids] ** 2))(table)
        return STEPS[step](tx, gradient, state, table)

    kept, state = run(table, tx.init(table), jnp.nan)
    np.testing.assert_array_equal(bits(kept), bits(table))
    taken, state = run(kept, state, 1.0)
    assert (np.asarray(taken) != np.asarray(table))[:8].all()
    assert state.skipped == 1
    assert_sharded_alike((taken, state), table.layout)


def test_state_placed_otherwise_is_refused():
    """Rows routed to the shards of the parameter are not those of such a state."""
    tx, table = jmask.adam(), sharded(numbers(), "8 devices")
    state = tx.init(table)
    moved = table.with_placement("mod")
    gradient = jmask.grad(lambda t: jnp.sum(t[jnp.arange(8)]))(moved)
    for step in STEPS.values():
        with pytest.raises(ValueError, match="placed"):
            step(tx, gradient, state, moved)


# --- placement ---------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("row", "name", "packed"),
    [
        (row, name, packed)
        for row in ((), (5,), (3, 5))
        for name in stored_tables.SPREAD
        for packed in (False, True)
    ],
)
def test_conversions_are_exact(row, name, packed):
    x = numbers(row).at[3].set(-0.0).at[4].set(jnp.nan)
    div, mod = (sharded(x, name, placement, packed=packed) for placement in ("div", "mod"))
    for table in (div, mod, div.with_placement("mod"), mod.with_placement("div")):
        np.testing.assert_array_equal(bits(table), bits(x))
        assert_sharded_alike(table, table.layout)
    for table, expected in ((div.with_placement("mod"), mod), (mod.with_placement("div"), div)):
        assert table.layout == expected.layout
        for ours, theirs in zip(*map(jax.tree.leaves, (table, expected)), strict=True):
            np.testing.assert_array_equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("placement", ["div", "mod"])
def test_rows_live_where_the_layout_says(placement):
    table = sharded(jnp.arange(V, dtype=jnp.float32), "8 devices", placement)
    layout = table.layout
    assert (layout.shards, layout.block) == (8, 3)
    owners = np.arange(V) // 3 if placement == "div" else np.arange(V) % 8
    for shard, piece in enumerate(table.blocks.addressable_shards):
        rows = np.flatnonzero(owners == shard)
        np.testing.assert_array_equal(piece.data[: len(rows)], rows)


@pytest.mark.parametrize("placement", ["div", "mod"])
@pytest.mark.parametrize("count", [1, 21, 64, 3 * 2**30])
@pytest.mark.parametrize("packed", [False, True])
def test_layout_is_one_to_one(placement, count, packed):
    """Every id has one place on one shard, and comes back from it; also beyond int32."""
    with jax.enable_x64(count > 2**31):
        layout = layout_of((count, 8), mesh_of(8), placement=placement, packed=packed)
        some = np.random.default_rng(0).integers(0, count, 50)
        ids = np.unique([*some, 0, count - 1, count // 2, count])
        ids = jnp.asarray(ids, jnp.int64 if count > 2**31 else jnp.int32)
        owned = np.zeros(len(ids), int)
        for shard in range(layout.shards):
            places = layout.local(ids, shard)
            assert places.dtype == jnp.int32
            there = np.asarray(places) < layout.block
            back = layout.ids(places, shard)
            assert back.dtype == ids.dtype
            np.testing.assert_array_equal(back, np.where(there, ids, count))
            owned += there
        np.testing.assert_array_equal(owned, np.asarray(ids) < count)


@pytest.mark.parametrize("packed", [False, True])
def test_made_under_jit(packed):
    """A table too large for one device is made where it will live."""
    make = lambda key: sharded(jax.random.normal(key, (V, D)), "8 devices", packed=packed)
    table = jax.jit(make)(jax.random.key(0))
    np.testing.assert_array_equal(table, jax.random.normal(jax.random.key(0), (V, D)))
    assert_sharded_alike(table, table.layout)


@pytest.mark.parametrize("packed", [False, True])
def test_made_from_arrays_that_lie_anywhere(packed):
    x = numbers()
    other = NamedSharding(mesh_of(2), P())
    for source in (
        np.asarray(x),
        jax.device_put(x, jax.devices()[3]),
        jax.device_put(x, other),
    ):
        table = sharded(source, "8 devices", packed=packed)
        np.testing.assert_array_equal(bits(table), bits(x))
        assert_sharded_alike(table, table.layout)


# --- lookups -----------------------------------------------------------------------------

SHAPES_OF_IDS = [(7,), (), (0,), (16,), (3, 5), (2, 0), (1,)]


ALL_IDS = list(itertools.product(SHAPES_OF_IDS, stored_tables.SPREAD, (False, True)))
# 7 ids on 2 devices, in a program that also makes the gradient dense; and others.
SOME_IDS = [((7,), "rows over table, batch over data", False), *ALL_IDS[::5]]


@pytest.mark.parametrize(("shape", "name", "packed"), chosen(SOME_IDS, ALL_IDS))
def test_any_number_of_ids(shape, name, packed):
    """Lookups, gradients and a step, with ids outside the table and padding."""
    x = numbers()
    ids = np.random.default_rng(3).integers(-3, V + 4, shape)

    def loss(table):
        rows = jmask.embedding_lookup(table, ids, padding_id=-1, mode="zero")
        return jnp.sum(jnp.sin(rows)), rows

    @jax.jit
    def all_of_it(table):
        (value, rows), gradient = jmask.value_and_grad(loss, has_aux=True)(table)
        tx = jmask.sgd(1.0)
        new, _ = jmask.apply_gradients(tx, gradient, tx.init(table), table)
        filled = jmask.embedding_lookup(table, ids)
        return value, rows, filled, gradient.todense(), new

    value, rows, filled, gradient, new = all_of_it(sharded(x, name, packed=packed))
    (expected, wanted), dense = jax.value_and_grad(loss, has_aux=True)(x)
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_array_equal(filled, jmask.embedding_lookup(x, ids))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, dense, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new, x - dense, rtol=1e-5, atol=1e-6)


# --- as a tree, and what is refused -------------------------------------------------------


def test_tree():
    table = sharded(numbers(), "8 devices", packed=True)
    leaves, structure = jax.tree.flatten(table)
    assert len(leaves) == 2  # 12 columns are 8 and 4
    again = structure.unflatten(leaves)
    assert repr(again) == "ShardedTable(float32[21, 12])"
    assert again.layout == table.layout
    assert jax.tree.structure(again) == jax.tree.structure(jax.tree.map(jnp.copy, table))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(np.asarray(table))), numbers())


def test_a_shard_of_too_many_rows_is_refused():
    """Places on a shard are int32."""
    with pytest.raises(ValueError, match="more devices"):
        layout_of((5 * 10**9, 8), mesh_of(2))
