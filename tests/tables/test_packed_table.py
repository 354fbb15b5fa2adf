"""A packed table is its array in another form: bits, gradients and trajectories agree."""

import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from jmask._kernels.lines import LANES, entries_and_mask
from jmask._tables.packed import part_shapes
from tests import stored_tables
from tests.compiled_step import compiled_step, temporary_bytes, training_step
from tests.expressions import functions
from tests.optimizers import OF_ALL_TABLES as OPTIMIZERS
from tests.sampling import chosen
from tests.stored_tables import STEPS, bits, numbers

pytestmark = pytest.mark.sampled(15)

ROWS = [(1,), (8,), (16,), (32,), (64,), (100,), (128,), (200,), (3, 5), ()]
DTYPES = ["float32", "bfloat16", "float64"]
V = 21


def table_of(row, dtype=jnp.float32):
    """Numbers of all kinds: nan, infinities and zeros of both signs among them."""
    x = np.random.default_rng(0).normal(size=(V, *row))
    special = [np.nan, -0.0, np.inf, 0.0, -np.inf, -0.0]
    x.reshape(-1)[np.linspace(0, x.size - 1, len(special)).astype(int)] = special
    return jnp.asarray(x, dtype)


# --- the form ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "dtype"),
    chosen(
        [(row, DTYPES[i % len(DTYPES)]) for i, row in enumerate(ROWS)],
        itertools.product(ROWS, DTYPES),
    ),
)
def test_bits(row, dtype):
    """Packed, read, written and unpacked, every bit is where it was in the array."""
    with jax.enable_x64(dtype == "float64"):
        x = table_of(row, dtype)
        # Rows 3 and 4 share a line where rows are narrow; the last line is not full.
        touched = np.array([0, 3, 4, 11, V - 1])
        new = x[::-1][touched].at[1].set(-0.0).at[2].set(jnp.nan)
        gradient = jmask.RowSparse(np.append(touched, V), jnp.zeros((6, *row)), x.shape)
        ids = jnp.array([V - 1, 3, 0, 3, 11, 4])

        @jax.jit
        def moved(x, new):
            table = jmask.PackedTable.pack(x)
            rows = jnp.concatenate([new, new[:1]])  # what padding holds is not written
            written = table.set_rows(table.fitted(gradient), rows)
            return table, table.todense(), table.read(ids), written, written.todense()

        table, dense, read, written, after = moved(x, new)
        assert [part.shape for part in table.parts] == part_shapes(x.shape)
        assert table.dtype == x.dtype
        assert all(part.shape[1] % LANES == 0 for part in written.parts)
        expected = np.array(x)
        expected[touched] = new
        for actual, wanted in ((dense, x), (read, x[ids]), (after, expected)):
            np.testing.assert_array_equal(bits(actual), bits(wanted))


@pytest.mark.parametrize("columns", [1, 8, 100, 128])
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8", "int64", "bool"])
def test_integers(dtype, columns):
    """A state may have them: all their bits are written, those of nan too."""
    with jax.enable_x64(dtype == "int64"):
        info = None if dtype == "bool" else np.iinfo(dtype)
        some = [0, 1] if info is None else [info.min, info.max, 0, 1, 5]
        some += [0x7FC00001, 0x7FF8000000000001][: info.bits // 32] if info else []
        rng = np.random.default_rng(0)
        x = rng.choice(np.array(some).astype(dtype), (V, columns))
        new = rng.choice(np.array(some).astype(dtype), (3, columns))
        gradient = jmask.RowSparse(np.array([3, 4, 11]), jnp.zeros((3, columns)), x.shape)
        table = jmask.PackedTable.from_array(jnp.asarray(x))
        after = jax.jit(lambda t, y: t.set_rows(t.fitted(gradient), y))(table, jnp.asarray(new))
        assert after.dtype == x.dtype
        x[[3, 4, 11]] = new
        np.testing.assert_array_equal(after.todense(), x)


@pytest.mark.parametrize("columns", [1, 8, 64])
def test_an_entry_with_the_bits_that_stand_for_no_row(columns):
    """It is a nan, and written as one."""
    x = table_of((columns,))
    reserved = int(entries_and_mask(jnp.zeros(()), x.dtype)[0].view(jnp.int32))
    rows = jnp.full((1, columns), reserved, jnp.int32).view(x.dtype)
    gradient = jmask.RowSparse([3], rows, x.shape)
    table = jmask.PackedTable.pack(x)
    after = table.set_rows(table.fitted(gradient), rows).todense()
    assert jnp.isnan(after[3]).all()
    np.testing.assert_array_equal(bits(jnp.delete(after, 3, 0)), bits(jnp.delete(x, 3, 0)))


def test_size_is_that_of_the_array():
    for columns in (1, 8, 64, 100, 200):
        shapes = part_shapes((10**6, columns))
        assert sum(a * b for a, b in shapes) <= 10**6 * columns + LANES * len(shapes)


@pytest.mark.parametrize("row", [(8,), (100,), (3, 5)])
def test_full(row):
    like = jmask.PackedTable.pack(table_of(row))
    for shape, value, dtype in (((1,), 0.5, jnp.float32), (row, -1.0, jnp.bfloat16)):
        full = like.full(shape, value, dtype)
        assert full.dtype == dtype
        np.testing.assert_array_equal(full, np.full((V, *shape), value))


def test_ids_outside_the_table():
    x = table_of((100,))
    table = jmask.PackedTable.pack(x)
    ids = jnp.array([[V - 1, V, -1], [V + 500, 2, 1]])
    for mode in ("fill", "clip", "zero"):
        lookup = functools.partial(jmask.embedding_lookup, mode=mode, padding_id=-1)
        np.testing.assert_array_equal(lookup(table, ids), lookup(x, ids))


@pytest.mark.parametrize("count", [0, 1])
def test_few_rows(count):
    x = jnp.ones((count, 20))
    table, ids = jmask.PackedTable.pack(x), jnp.array([0, 0])
    lookup = functools.partial(jmask.embedding_lookup, mode="zero")
    np.testing.assert_array_equal(lookup(table, ids), lookup(x, ids))
    np.testing.assert_array_equal(table.todense(), x)
    assert table[jnp.zeros((0, 2), int)].shape == (0, 2, 20)

    tx = jmask.sgd(1.0)
    step = training_step(lambda t: jnp.sum(lookup(t, ids)), tx)
    np.testing.assert_array_equal(step(table, tx.init(table))[0], x - 2)


def test_packed_is_for_tpus():
    narrow, wide = jnp.ones((10, 64)), jnp.ones((10, 256))
    assert isinstance(jmask.packed(narrow, platform="tpu"), jmask.PackedTable)
    for platform in ("cpu", "gpu", None):
        assert jmask.packed(narrow, platform) is narrow
    assert jmask.packed(wide, platform="tpu") is wide


# --- as a tree ---------------------------------------------------------------------------


def test_tree():
    table = jmask.PackedTable.pack(table_of((100,)))
    leaves, structure = jax.tree.flatten(table)
    assert [leaf.shape for leaf in leaves] == part_shapes(table.shape)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(table)]
    assert paths == [".parts[0]", ".parts[1]", ".parts[2]"]
    for copy in (
        structure.unflatten(leaves),
        jax.jit(lambda t: t)(table),
        pickle.loads(pickle.dumps(table)),
    ):
        assert repr(copy) == "PackedTable(float32[21, 100])"
        assert len(copy) == V
        assert copy.ndim == 2
        np.testing.assert_array_equal(bits(copy), bits(table_of((100,))))
    assert repr(jax.tree.map(lambda _: None, table)) == "PackedTable(?[21, 100])"
    with pytest.raises(ValueError, match="no array to share"):
        np.array(table, copy=False)


def test_donated_parts_are_written_in_place():
    tx, table = jmask.adam(0.1), jmask.PackedTable.pack(jnp.ones((10**4, 100)))
    compiled = compiled_step(lambda t, ids: jnp.sum(t[ids] ** 2), tx, table, jnp.arange(8))
    assert temporary_bytes(compiled, 3 * 10**4 * 100 * 4) < 10**4 * 100 * 4 / 10
    old = table.parts
    compiled(table, tx.init(table), jnp.arange(8))
    assert all(part.is_deleted() for part in old)


# --- gradients ---------------------------------------------------------------------------

IDS = jnp.array([[1, 3, 3], [20, 7, 2]])
RNG = np.random.default_rng(1)
BAG_WEIGHTS = jnp.array([[1.0, 2.0, -1.0], [0.5, 1.0, 1.0]])


def in_scan(table, wrap=lambda f: f):
    @wrap
    def body(total, ids):
        return total + jnp.sum(jnp.sin(table[ids])), None

    return jax.lax.scan(body, jnp.float32(0), IDS)[0]


NOT_USED = "jnp.float32(3)"
LOSSES = functions("t", globals())("""
    jnp.sum(jnp.sin(t[IDS])); in_scan(t); in_scan(t, wrap=jax.checkpoint);
    jnp.sum(jmask.embedding_lookup(t, IDS, padding_id=3, mode="clip", max_norm=1.0) ** 3);
    jnp.sum(jnp.sin(jmask.embedding_bag(t, IDS, weights=BAG_WEIGHTS, combiner="mean")));
    jnp.sum(jnp.sin(jmask.embedding_bag(t, IDS, combiner="max")));
    jnp.sum(jax.vmap(lambda ids: jnp.sin(t[ids]).prod(0))(IDS));
    jax.lax.cond(IDS[0, 0] > 0, lambda: jnp.sum(t[IDS] ** 2), lambda: 0.0); jnp.float32(3)
""")


@pytest.mark.parametrize("name", LOSSES)
def test_gradient(name):
    """That of the array; `jax.grad` gives all rows, and is right."""
    loss, x = LOSSES[name], jnp.asarray(RNG.normal(size=(V, 12)), jnp.float32)
    table = jmask.PackedTable.pack(x)

    @jax.jit
    def both(table):
        value, gradient = jmask.value_and_grad(loss)(table)
        return value, gradient, gradient.todense(), jax.grad(loss)(table).todense()

    with jmask.strict():
        value, gradient, *dense = both(table)
    assert isinstance(gradient, jmask.RowSparse)
    assert gradient.nse <= max(IDS.size, 1) or name == NOT_USED
    expected = jax.jit(jax.value_and_grad(loss))(x)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5, atol=1e-6)
    for found in dense:
        np.testing.assert_allclose(found, expected[1], rtol=1e-5, atol=1e-6)


def test_gradient_vmapped():
    """The whole of value_and_grad under vmap, one batch of ids for each."""
    x, loss = (
        jnp.asarray(RNG.normal(size=(V, 12)), jnp.float32),
        lambda t, ids: jnp.sum(t[ids] ** 2),
    )
    ours, stock = (
        jax.vmap(lambda ids: jmask.todense(grad(loss)(table, ids)))(IDS)  # noqa: B023
        for grad, table in ((jmask.grad, jmask.PackedTable.pack(x)), (jax.grad, x))
    )
    np.testing.assert_allclose(ours, stock, rtol=1e-5, atol=1e-6)


# --- optimizers --------------------------------------------------------------------------


RUNS = [((12,), name, step) for name in OPTIMIZERS for step in STEPS]
OTHER_ROWS = itertools.product([(100,), (3, 5), (128,)], OPTIMIZERS, ["apply_gradients"])


@pytest.mark.parametrize(("row", "name", "step"), chosen(RUNS[::3], [*RUNS, *OTHER_ROWS]))
@pytest.mark.dtype_promotion
def test_trajectory(row, name, step):
    """That of the array, and rows not touched keep their bits, also beside touched ones."""
    tx, x = OPTIMIZERS[name], numbers(row)
    expected = stored_tables.trained_array(name, row)
    actual = stored_tables.trained(jmask.PackedTable.pack(x), tx, STEPS[step])
    stored_tables.assert_same_run(actual, expected)
    stored_tables.assert_other_rows_untouched(actual, x)


def test_bfloat16_rounded_stochastically():
    x, tx = numbers().astype(jnp.bfloat16), jmask.sgd(1e-5)
    gradient = jmask.RowSparse([2, 3], jnp.ones((2, 12)), x.shape)
    table = jmask.PackedTable.pack(x)
    keys = jax.random.split(jax.random.key(0), 200)

    @jax.jit
    def mean_step(keys):
        step = lambda key: jmask.apply_gradients(tx, gradient, tx.init(table), table, key=key)
        new = jax.vmap(lambda key: step(key)[0].todense())(keys)
        return jnp.mean(new.astype(jnp.float32) - x[None].astype(jnp.float32), axis=0)

    moved = mean_step(keys)
    assert moved[2:4].mean() == pytest.approx(-1e-5, rel=0.5)
    assert not moved[:2].any()
    assert not moved[4:].any()
