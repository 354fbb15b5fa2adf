"""A table spread over devices trains as on one, wherever its rows and its batch are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from jmask._base.row_ids import id_of, position_of
from jmask._kernels import tuning
from tests.compilations import compilations
from tests.compiled_step import training_step
from tests.optimizers import OF_ALL_TABLES as OPTIMIZERS
from tests.oracle import assert_close
from tests.sampling import chosen
from tests.stored_tables import LAYOUTS, STEPS, batch_of, bits, mesh_of, numbers, sharded

pytestmark = pytest.mark.sampled(15)

V, D = 21, 12  # 21 rows divide by none of the numbers of devices but 1

# --- trajectories ------------------------------------------------------------------------

# Ids come twice; the last is padding.
IDS = np.array([[1, 3, 3], [20, 9, 2], [5, 20, -1]])
DEFAULT = [
    (layout, list(OPTIMIZERS)[i % len(OPTIMIZERS)], list(STEPS)[(i + i // 3) % 2])
    for i, layout in enumerate([*LAYOUTS, *LAYOUTS])
]
EVERY = [(x, name, step) for x in LAYOUTS for name in OPTIMIZERS for step in STEPS]


def loss(params, ids):
    rows = jmask.embedding_lookup(params["table"], ids, padding_id=-1)
    return jnp.sum(jnp.sin(rows) * params["dense"])


def trained(table, ids, optimizer, step):
    """Parameters, state and losses after three steps; how often they were compiled."""
    tx = OPTIMIZERS[optimizer]
    run, losses = training_step(loss, tx, STEPS[step]), []
    params = {"table": jnp.copy(table), "dense": jnp.linspace(0.5, 1.5, D)[None, None]}
    state = tx.init(params)
    mesh = getattr(table.sharding, "mesh", None)
    if mesh is not None:  # as a step returns it, so that the second is not compiled anew
        everywhere = lambda x: isinstance(x.sharding, NamedSharding)
        put = lambda x: x if everywhere(x) else jax.device_put(x, NamedSharding(mesh, P()))
        params, state = jax.tree.map(put, (params, state))
    with compilations() as compiled:
        for _ in range(3):
            donated = params["table"]
            params, state, value = run(params, state, ids)
            losses.append(float(value))
    cut = lambda x: np.asarray(x)[:V] if jnp.shape(x)[:1] == table.shape[:1] else np.asarray(x)
    found = jax.tree.map(cut, (params, state, losses))
    return found, (params["table"], state), compiled.count("jit(step)"), donated


@functools.cache
def trained_array(optimizer):
    return trained(numbers(), IDS, optimizer, "apply_gradients")[0]


@pytest.mark.parametrize(("layout", "optimizer", "step"), chosen(DEFAULT, EVERY))
@pytest.mark.dtype_promotion
def test_trajectory(layout, optimizer, step):
    """As on one device; sharded before, between and after; compiled once; in place."""
    table, ids = sharded(numbers(), layout), batch_of(IDS, layout)
    found, tables, programs, donated = trained(table, ids, optimizer, step)
    assert_close(found, trained_array(optimizer), rtol=2e-5, atol=2e-6)
    assert_sharded_alike(tables, table)
    assert programs <= 1 + ("automatic" in layout)
    assert donated.is_deleted() or LAYOUTS[layout][3] != "explicit"
    others = np.setdiff1d(np.arange(V), IDS)
    np.testing.assert_array_equal(bits(found[0]["table"])[others], bits(numbers())[others])


def assert_sharded_alike(tree, table):
    """All arrays with a row for each row of the table lie on the shards, one block each."""
    arrays = [x for x in jax.tree.leaves(tree) if x.shape[:1] == table.shape[:1]]
    assert arrays
    for x in arrays:
        spec = P(*table.sharding.spec[:1])
        assert x.sharding.is_equivalent_to(NamedSharding(table.sharding.mesh, spec), x.ndim)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_is_sharded_alike(optimizer):
    table = sharded(numbers(), "rows over table, batch over data")
    assert_sharded_alike((table, OPTIMIZERS[optimizer].init(table)), table)


@pytest.mark.parametrize("layout", ["8 devices", "rows over table, batch over both"])
@pytest.mark.parametrize("count", [8, 16])
@pytest.mark.dtype_promotion
def test_update_without_parameters(layout, count):
    """The rows of the state are found where they live."""
    tx, ids = jmask.sgd(0.1, 0.9), np.arange(count) * 2 % V

    @jax.jit
    def run(table, ids):
        look = lambda t: jnp.sum(jnp.sin(jmask.embedding_lookup(t, ids)))
        updates, state = tx.update(jmask.grad(look)(table), tx.init(table))
        return jmask.apply_updates(table, updates), state

    ours = run(sharded(numbers(), layout), batch_of(ids, layout))
    ours = jax.tree.map(lambda x: np.asarray(x)[:V] if x.ndim else x, ours)
    assert_close(ours, run(numbers(), jnp.asarray(ids)), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["adam", "rowwise adagrad"])
@pytest.mark.parametrize("spec", [("x",), (None, "x"), (None, None, "x")], ids=str)
@pytest.mark.parametrize("axes", ["automatic", "explicit"])
@pytest.mark.dtype_promotion
def test_stacks_over_a_mesh(axes, spec, name):
    """Explicit axes over the rows of each table are refused; all else is the same."""
    mesh, tx, table = (
        mesh_of(4, axes=axes),
        OPTIMIZERS[name],
        numbers((32,))[:4].reshape(4, 8, 4),
    )
    out = NamedSharding(mesh, P(None, None)) if axes == "explicit" else None

    def step(table, out):
        at = jnp.array([0, 2, 0]), jnp.array([1, 3, 1])
        loss = lambda t: jnp.sum(jnp.sin(t.at[at].get(out_sharding=out)))
        return jmask.apply_gradients(tx, jmask.grad(loss)(table), tx.init(table), table)

    spec = P(*spec, *(None,) * (3 - len(spec)))
    with jax.set_mesh(mesh):
        placed = jax.device_put(table, NamedSharding(mesh, spec))
        if axes == "explicit" and spec[1]:
            with pytest.raises(ValueError, match=r"by the rows of each.*`tables\.reshape"):
                step(placed, out)
            return
        found = jax.jit(step, static_argnums=1)(placed, out)
    assert_close(found, step(table, None), rtol=1e-5, atol=1e-6)


# --- where rows are ----------------------------------------------------------------------


@pytest.mark.parametrize("row", [(), (5,), (3, 5)])
@pytest.mark.parametrize("layout", ["8 devices", "rows over table, batch over data"])
@pytest.mark.parametrize("hashed", [False, True])
def test_conversion_is_exact(row, layout, hashed):
    x = numbers(row).at[3].set(-0.0).at[4].set(jnp.nan)
    table = sharded(x, layout, hashed=hashed)
    shards = 8 if layout == "8 devices" else 4
    assert table.shape[0] == (1024 if hashed else -(-V // shards) * shards)
    places = np.asarray(position_of(jnp.arange(V), 1024)) if hashed else np.arange(V)
    np.testing.assert_array_equal(bits(table)[places], bits(x))
    assert not np.delete(np.asarray(table), places, 0).any()


@pytest.mark.parametrize("hashed", [False, True])
def test_made_where_it_lives(hashed):
    """Under jit, of arrays that lie anywhere, and of shapes."""
    x = numbers()
    other = NamedSharding(mesh_of(2), P())
    make = functools.partial(sharded, layout="8 devices", hashed=hashed)
    expected = make(x)
    for source in (
        np.asarray(x),
        jax.device_put(x, jax.devices()[3]),
        jax.device_put(x, other),
    ):
        np.testing.assert_array_equal(bits(make(source)), bits(expected))
    under_jit = jax.jit(make)(x)
    np.testing.assert_array_equal(bits(under_jit), bits(expected))
    shape = make(jax.ShapeDtypeStruct(x.shape, x.dtype))
    for y in (under_jit, shape):
        assert (y.shape, y.dtype) == (expected.shape, x.dtype)
        assert y.sharding.is_equivalent_to(expected.sharding, y.ndim)


@pytest.mark.parametrize("rows", [1024, 5120, 1024 * 1001, 1024 * 2**22])
def test_the_permutation_is_one_to_one(rows):
    with jax.enable_x64(rows > 2**31):
        some = np.random.default_rng(0).integers(0, rows, 2000)
        ids = np.unique(some) if rows > 10**5 else np.arange(rows)
        ids = jnp.asarray(ids, jnp.int64 if rows > 2**31 else jnp.int32)
        places = position_of(ids, rows)
        assert len(np.unique(places)) == len(ids)
        assert (np.asarray(places) >= 0).all()
        assert (np.asarray(places) < rows).all()
        np.testing.assert_array_equal(id_of(places, rows), ids)
        np.testing.assert_array_equal(position_of(jnp.asarray([-1, rows]), rows), [-1, rows])


@pytest.mark.parametrize("shards", [2, 8, 64, 512, 12])
@pytest.mark.parametrize("factor", [1, 8, 12, 64, 100, 4096])
def test_hashed_ids_fill_all_shards_alike(shards, factor):
    """Multiples of a number, and the first ids of a table: as many as if drawn at random."""
    rows = np.lcm(shards, 1024) * (2**22 // np.lcm(shards, 1024))
    ids = np.arange(0, rows, factor)[:16384]
    places = np.asarray(position_of(jnp.asarray(ids, jnp.int32), rows))
    counts = np.bincount(places * shards // rows, minlength=shards)
    mean = len(ids) / shards
    assert np.abs(counts - mean).max() < 5 * np.sqrt(mean) + 1


# --- lookups -----------------------------------------------------------------------------

SHAPES_OF_IDS = [(8,), (16,), (8, 5), (0,), (64,)]
SOME_LAYOUTS = ["8 devices", "rows over table, batch over data", "automatic axis"]
ANY = [(shape, x, h) for shape in SHAPES_OF_IDS for x in SOME_LAYOUTS for h in (False, True)]


@pytest.mark.parametrize(("shape", "layout", "hashed"), chosen(ANY[::4], ANY))
def test_any_ids(shape, layout, hashed):
    """Lookups, bags, gradients and a step, with ids outside the table and padding."""
    x = numbers()
    table = sharded(x, layout, hashed=hashed)
    sharded_like = jnp.pad(x, ((0, table.shape[0] - V), (0, 0)))
    ids = np.random.default_rng(3).integers(-3, V, shape)
    ids[ids == -2] = 1000

    def loss(table, ids, how):
        rows = jmask.embedding_lookup(table, ids, padding_id=-1, mode="zero", **how)
        bags = 0.0
        if len(shape) > 1:
            bags = jmask.embedding_bag(table, ids, mode="zero", combiner="mean", **how)
        return jnp.sum(jnp.sin(rows)) + jnp.sum(bags), rows

    def all_of_it(table, ids, **how):
        gradient_of = jmask.value_and_grad(functools.partial(loss, how=how), has_aux=True)
        (value, rows), gradient = gradient_of(table, ids)
        tx = jmask.sgd(1.0)
        new, _ = jmask.apply_gradients(tx, gradient, tx.init(table), table)
        filled = jmask.embedding_lookup(table, ids, **how)
        return value, rows, filled, gradient.todense(), new

    ours = jax.jit(functools.partial(all_of_it, hashed=hashed))(table, batch_of(ids, layout))
    wanted = all_of_it(sharded_like, jnp.asarray(ids))
    places = position_of(jnp.arange(table.shape[0]), table.shape[0]) if hashed else slice(None)
    *ours, gradient, new = map(np.asarray, ours)
    for x, y in zip([*ours, gradient[places], new[places]], wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["ids", "table", "both"])
def test_vmapped_lookups(what):
    """A vmap over ids alone is one lookup still."""
    ids = np.random.default_rng(3).integers(0, V, (3, 8))
    axes = (None if what == "ids" else 0, None if what == "table" else 0)

    def loss(table, ids):
        table = table if what == "ids" else jnp.stack([table, 2 * table, jnp.sin(table)])
        rows = jax.vmap(jmask.embedding_lookup, axes)(table, ids if axes[1] == 0 else ids[0])
        return jnp.sum(jnp.sin(rows))

    table = sharded(numbers(), "8 devices")
    given = jax.device_put(ids, NamedSharding(mesh_of(8, axes="explicit"), P()))
    found = jax.jit(jmask.grad(loss))(table, given)
    wanted = jax.grad(loss)(jnp.pad(numbers(), ((0, len(table) - V), (0, 0))), jnp.asarray(ids))
    assert isinstance(found, jmask.RowSparse) or what != "ids"
    np.testing.assert_allclose(jmask.todense(found), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "complex64"])
def test_dtypes(dtype):
    x = (np.asarray(numbers()) * (3 + 2j if dtype == "complex64" else 3)).astype(dtype)
    x = np.pad(x, ((0, 3), (0, 0)))
    table = jax.device_put(x, NamedSharding(mesh_of(8, axes="explicit"), P("x")))
    ids = np.arange(16) % V
    rows = jmask.embedding_lookup(table, batch_of(ids, "8 devices"))
    assert rows.dtype == x.dtype
    np.testing.assert_array_equal(rows, x[ids])


def test_rows_without_entries(monkeypatch):
    """Which would be exchanged, if they had any."""
    monkeypatch.setattr(tuning, "EXCHANGED_IDS", 0)
    like = NamedSharding(mesh_of(8, axes="explicit"), P("x"))
    table, ids = (
        jax.device_put(jnp.zeros((24, 0)), like),
        batch_of(np.arange(2048), "8 devices"),
    )
    loss = lambda table: jmask.embedding_lookup(table, ids).sum()
    value, gradient = jmask.value_and_grad(loss)(table)
    assert (value, gradient.shape) == (0, (24, 0))


@pytest.mark.parametrize("order", [1, 2])
def test_derivatives(order):
    """Of any order, by jax.grad too."""
    table, ids = sharded(numbers(), "8 devices"), batch_of(np.arange(8), "8 devices")
    function = lambda t, ids: jnp.sum(jnp.sin(jmask.embedding_lookup(t, ids)))
    for _ in range(order):
        inner = function
        function = lambda t, ids, inner=inner: jnp.sum(jax.grad(inner)(t, ids) ** 2)
    wanted = jax.grad(function)(numbers(), jnp.arange(8))
    ours = jax.jit(jax.grad(function))(table, ids)
    np.testing.assert_allclose(np.asarray(ours)[:V], wanted, rtol=1e-5, atol=1e-6)
