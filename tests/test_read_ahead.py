"""Rows read ahead of their update: the same as without, in place, on one device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask import _fused_update, _read_ahead
from tests.compiled_step import rounds_of_loops
from tests.sampling import sampled

pytestmark = pytest.mark.of_cpus

V = 1000
OPTIMIZERS = {
    "adam": jmask.adam(0.1),
    "adagrad": jmask.adagrad(0.1),
    "momentum by schedule": jmask.sgd(lambda count: 0.1 / (1 + count), momentum=0.9),
    "optax": jmask.lazy(optax.adamw(0.1)),
}
# Of a line and less, of lines that begin anywhere, of many, of two dimensions; 16 bits.
ROWS = {
    "1": ((), jnp.float32),
    "3": ((3,), jnp.float32),
    "64": ((64,), jnp.float32),
    "100": ((100,), jnp.float32),
    "300": ((300,), jnp.float32),
    "5 x 8": ((5, 8), jnp.float32),
    "64 bfloat16": ((64,), jnp.bfloat16),
}


@pytest.fixture
def in_chunks_of_64(monkeypatch):
    monkeypatch.setattr(_fused_update, "rows_read_ahead", lambda *given: 64)


def compiled_update(tx, table, nse):
    def update(table, state, ids, values):
        gradient = jmask.RowSparse(ids, values, table.shape, coalesced=True)
        return jmask.apply_gradients(tx, gradient, state, table)

    ids = jax.ShapeDtypeStruct((nse,), jnp.int32)
    values = jax.ShapeDtypeStruct((nse, *table.shape[1:]), table.dtype)
    lowered = jax.jit(update, donate_argnums=(0, 1)).lower(table, tx.init(table), ids, values)
    return lowered.compile()


def batch(nse, row, dtype, seed=0, valid=None):
    """Sorted unique ids, from some place on padding, and rows."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.choice(V, nse, replace=False))
    if valid is not None:
        ids[valid:] = V
    return jnp.asarray(ids, jnp.int32), jnp.asarray(rng.normal(size=(nse, *row)), dtype)


def in_chunks(compiled):
    # The loop around a single scatter does not say how many rounds it has.
    return any(rounds_of_loops(compiled))


@pytest.mark.parametrize(
    ("name", "row"), sampled(list(itertools.product(OPTIMIZERS, ROWS)), every=3)
)
def test_same_as_without(in_chunks_of_64, monkeypatch, name, row):
    row, dtype = ROWS[row]
    tx = OPTIMIZERS[name]
    start = jnp.asarray(np.random.default_rng(1).normal(size=(V, *row)), dtype)
    # The last chunk is not whole, and more than it may be padding.
    nse = 300
    update = compiled_update(tx, start, nse)
    # A rate of 32 bits has no room in a scatter of 16.
    assert in_chunks(update) or dtype == jnp.bfloat16
    tolerance = 1e-5 if dtype == jnp.float32 else 1e-2
    monkeypatch.setattr(_fused_update, "rows_read_ahead", lambda *given: None)
    plain = compiled_update(tx, start, nse)
    assert not in_chunks(plain)

    new = other = (start, tx.init(start))
    touched = np.zeros(V + 1, bool)
    for seed, valid in enumerate((None, 299, 150, 0)):
        ids, values = batch(nse, row, dtype, seed, valid)
        touched[np.asarray(ids)] = True
        new, other = (
            f(*jax.tree.map(jnp.copy, x), ids, values)
            for f, x in ((update, new), (plain, other))
        )
        # Fused and vectorized otherwise, it may be rounded otherwise.
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(
                np.float32(x), np.float32(y), rtol=tolerance, atol=tolerance / 10
            ),
            new,
            other,
        )
    np.testing.assert_array_equal(new[0][~touched[:V]], start[~touched[:V]])
    assert not touched.all()


@pytest.mark.parametrize("nse", [256, 257, 319, 320])
def test_each_row_once(nse):
    def count(tables, ids, rows):
        return [x.at[ids].add(rows[0] * rows[1], mode="drop") for x in tables]

    ids, _ = batch(nse, (4,), jnp.float32)
    table, rows = jnp.zeros((V, 4)), jnp.ones((nse, 4))
    (counts,) = jax.jit(
        lambda *given: _read_ahead.in_chunks(count, [given[0]], *given[1:], 64)
    )(table, ids, [rows, jnp.float32(2.0)])
    np.testing.assert_array_equal(counts, jnp.zeros((V, 4)).at[ids].set(2.0))


def test_nan_and_inf_elsewhere(in_chunks_of_64):
    tx, row = OPTIMIZERS["adam"], (64,)
    ids, values = batch(300, row, jnp.float32)
    start = jnp.full((V, *row), jnp.nan).at[ids].set(1.0).at[0].set(jnp.inf)
    table, state = compiled_update(tx, start, 300)(start + 0, tx.init(start), ids, values)
    rows = np.setdiff1d(ids, [0])
    assert np.isfinite(table[rows]).all()
    assert np.isfinite(state.mu).all()


def test_in_place_at_full_size():
    table = jnp.ones((100_000, 64))
    compiled = compiled_update(jmask.adam(0.1), table, 4096)
    assert in_chunks(compiled)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * table.nbytes
    # A chunk of the gradient, and one of the rate: not even the batch.
    assert memory.temp_size_in_bytes < 4096 * 64 * 4 / 2


@pytest.mark.parametrize(
    ("rows", "width", "nse", "why"),
    [
        (10_000, 64, 4096, "tables that fit into a cache"),
        (100_000, 64, 256, "few rows"),
        (1_000_000, 4, 100_000, "little work"),
        (100_000, 1024, 4096, "long rows"),
        (2**29, 64, 4096, "addresses that do not fit"),
    ],
)
def test_not_where_it_does_not_pay(rows, width, nse, why):
    tables = [jax.ShapeDtypeStruct((rows, width), jnp.float32)] * 3
    ids = jax.ShapeDtypeStruct((nse,), jnp.int32)
    program = jax.make_jaxpr(lambda x: jnp.sqrt(x) + 1)(1.0).jaxpr
    assert _read_ahead.rows_read_ahead(tables, ids, program, True) is None, why


@pytest.mark.devices
def test_not_on_several_devices(in_chunks_of_64):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    table = jax.device_put(jnp.ones((V, 64)), by_rows)
    assert not in_chunks(compiled_update(OPTIMIZERS["adam"], table, 300))


def test_under_vmap(in_chunks_of_64):
    tx, row = OPTIMIZERS["adam"], (8,)
    tables = jax.random.normal(jax.random.key(0), (2, V, *row))
    ids, values = batch(300, row, jnp.float32)

    def update(table):
        gradient = jmask.RowSparse(ids, values, table.shape, coalesced=True)
        return jmask.apply_gradients(tx, gradient, tx.init(table), table)[0]

    expected = jnp.stack([update(table) for table in tables])
    np.testing.assert_allclose(jax.vmap(update)(tables), expected, rtol=1e-6)
