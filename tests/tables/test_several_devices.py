"""Data-parallel programs: the gradient of a replicated table crosses the network as rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jmask
from tests.compiled_step import training_step
from tests.lookup_programs import PROGRAMS, VALID
from tests.lookup_programs import TABLE as LOOKED_UP
from tests.optimizers import OPTIMIZERS
from tests.oracle import assert_close, dense_twin, is_row_sparse
from tests.stored_tables import need_devices

V, D, DEVICES = 64, 4, 4
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
IDS = jnp.asarray(np.random.default_rng(1).integers(0, V, 8))
over_data = functools.partial(jax.shard_map, in_specs=(P(), P("data")), out_specs=P())
local_loss = lambda table, ids: jax.lax.pmean(jnp.sum(jnp.sin(table[ids])), "data")


@pytest.fixture(scope="module")
def mesh():
    need_devices(DEVICES)
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((DEVICES,), ("data",), axis_types=auto)


def expected():
    loss = lambda table: jnp.sum(jnp.sin(table[IDS])) / DEVICES
    return jax.value_and_grad(loss)(TABLE)


def table_collectives(compiled):
    """Collectives of the compiled program that move a table."""
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute")
    return [
        line
        for line in compiled.as_text().splitlines()
        if any(f" {name}" in line for name in names) and f"[{V},{D}]" in line
    ]


NAMES = ("sgd", "momentum", "adam", "optax.sgd with momentum", "optax.adam")


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.dtype_promotion
def test_a_batch_that_is_spread(mesh, name, lines):
    """A plain jitted step of a table that every device has: rows of the batch are moved."""
    tx, ids = OPTIMIZERS[name], np.concatenate([IDS, IDS]).reshape(-1, 2 if lines else 1)

    def loss(table, ids):
        rows = table[ids]
        return jnp.sum(jnp.sin(rows.sum(1) if lines else rows))

    run = training_step(loss, tx)
    everywhere, spread = (jax.NamedSharding(mesh, spec) for spec in (P(), P("data")))
    alone = lambda: (jnp.copy(TABLE), tx.init(TABLE))  # both are donated
    given = *jax.device_put(alone(), everywhere), jax.device_put(ids, spread)
    compiled = run.lower(*given).compile()
    assert not table_collectives(compiled)
    assert_close(compiled(*given), run(*alone(), ids))


def taken_inside(check_vma):
    """value_and_grad in the mapped function; the same RowSparse comes out of every device."""

    def step(table, ids):
        loss = local_loss if check_vma else lambda t, i: jnp.sum(jnp.sin(t[i])) / DEVICES
        value, gradient = jmask.value_and_grad(loss)(table, ids)
        if not check_vma:  # then nothing is summed over devices by itself
            gather = lambda x: jax.lax.all_gather(x, "data", tiled=True)
            gradient = jax.tree.map(gather, gradient)
            value = jax.lax.psum(value, "data")
        return value, gradient

    return lambda mesh: over_data(step, mesh=mesh, check_vma=check_vma)


GRADIENTS = {
    "inside": taken_inside(True),
    "inside, unchecked": taken_inside(False),
    "of the mapped function": lambda mesh: jmask.value_and_grad(
        over_data(local_loss, mesh=mesh)
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradient(mesh, name):
    """Rows of the batch cross the network; a dense gradient would be a table."""
    take = jax.jit(GRADIENTS[name](mesh))
    with jmask.strict():
        value, gradient = take(TABLE, IDS)
    assert is_row_sparse(gradient)
    assert gradient.nse == IDS.size
    np.testing.assert_allclose(value, expected()[0], rtol=1e-6)
    np.testing.assert_allclose(dense_twin(gradient), expected()[1], rtol=1e-5, atol=1e-7)
    assert not table_collectives(take.lower(TABLE, IDS).compile())
    stock = jax.jit(jax.grad(over_data(local_loss, mesh=mesh)))
    assert table_collectives(stock.lower(TABLE, IDS).compile()), (
        "the check sees what it forbids"
    )


@pytest.mark.dtype_promotion
def test_training_step_inside(mesh):
    """Every device updates its replica with all rows: they stay equal, others untouched."""
    tx = jmask.lazy(optax.adam(0.1))

    def step(table, state, ids):
        value, gradient = jmask.value_and_grad(local_loss)(table, ids)
        updates, state = tx.update(gradient, state, table)
        return optax.apply_updates(table, updates), state, value

    mapped = jax.jit(over_data(step, mesh=mesh, in_specs=(P(), P(), P("data"))))
    table, _, _ = mapped(TABLE, tx.init(TABLE), IDS)
    single = jmask.RowSparse.fromdense(expected()[1])
    alone, _ = jmask.apply_gradients(tx, single, tx.init(TABLE), TABLE)
    np.testing.assert_allclose(table, alone, rtol=1e-4, atol=1e-6)
    others = np.setdiff1d(np.arange(V), IDS)
    np.testing.assert_array_equal(table[others], TABLE[others])


def test_devices_in_different_branches(mesh):
    """Each looks up another number of rows, and has as many taps as the others."""
    ids = jnp.arange(2 * DEVICES).reshape(DEVICES, 2)

    def loss(table, ids):
        large = lambda: jnp.sum(jnp.sin(table[ids]) ** 2)
        small = lambda: jnp.sum(jnp.sin(2 * table[ids[:, :1]]) ** 2)
        return jax.lax.cond(ids[0, 0] > 3, large, small)

    def gradient(take):
        return over_data(lambda table, ids: take(loss)(table, ids), mesh=mesh)

    expected = jax.jit(gradient(jax.grad))(TABLE, ids)
    with jmask.strict():
        found = jax.jit(gradient(jmask.grad))(TABLE, ids).todense()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def summed_in_a_scan(table):
    """A carry that begins as different on each device, as JAX asks of what it will be."""
    first = 0 * jnp.sum(table[VALID])
    add = lambda total, i: (total + jnp.sum(jnp.sin(table[i])), None)
    return jax.lax.scan(add, first, VALID)[0]


# Of the programs what makes zeros, keeps numbers apart or is traced twice.
EACH = ("take, default", "checkpoint", "checkpoint of jit", "columns", "entries")


@pytest.mark.parametrize(
    "loss", [*(PROGRAMS[name].loss for name in EACH), summed_in_a_scan], ids=[*EACH, "scan"]
)
@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
def test_a_table_of_each_device(mesh, loss):
    tables = jnp.stack([LOOKED_UP * (1 + i) for i in range(DEVICES)])

    def gradient(table):
        found = jmask.grad(loss)(table[0])
        return (found.todense() if is_row_sparse(found) else found)[None]

    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    expected = jax.vmap(jax.grad(loss))(tables)
    np.testing.assert_allclose(jax.jit(mapped)(tables), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [32, 64])
def test_spread_columns_stay_where_they_are(mesh, width):
    """Of widths that one CPU reads by windows or as integers: parts of rows are looked up."""
    by_columns = jax.NamedSharding(mesh, P(None, "data"))
    table = jax.ShapeDtypeStruct((V, width), jnp.float32, sharding=by_columns)
    tx = jmask.sgd(0.1)

    def step(table):
        _, gradient = jmask.value_and_grad(lambda table: jnp.sum(jnp.sin(table[IDS])))(table)
        return jmask.apply_gradients(tx, gradient, tx.init(table), table)[0]

    compiled = jax.jit(step, out_shardings=by_columns).lower(table).compile().as_text()
    assert "all-reduce" in compiled  # the loss
    assert "all-gather" not in compiled
