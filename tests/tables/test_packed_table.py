"""A packed table is its array in lines of 128: bits, gradients and trajectories agree."""

import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask._kernels.lines import LANES, masked_lines
from tests.compiled_step import compiled_step, temporary_bytes, training_step
from tests.expressions import functions
from tests.sampling import chosen
from tests.stored_tables import STEPS, bits, numbers

pytestmark = pytest.mark.sampled(15)

# How many columns, and the shape of the lines of 21 rows of them.
LINES = {
    1: (1, 128), 8: (2, 128), 12: (3, 128), 32: (6, 128), 48: (11, 128), 64: (11, 128),
    65: (21, 128), 100: (21, 128), 128: (21, 128), 200: (21, 256),
}  # fmt: skip
DTYPES = ["float32", "bfloat16", "float64", "complex64"]
V = 21


def table_of(columns, dtype=jnp.float32):
    """Numbers of all kinds: nan, infinities and zeros of both signs among them."""
    x = np.random.default_rng(0).normal(size=(V, columns))
    special = [np.nan, -0.0, np.inf, 0.0, -np.inf, -0.0]
    x.reshape(-1)[np.linspace(0, x.size - 1, len(special)).astype(int)] = special
    return jnp.asarray(x, dtype)


def rows_of(lines, columns):
    return jmask.embedding_lookup(lines, jnp.arange(V), width=columns)


# --- the form ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "dtype"),
    chosen(
        [(columns, DTYPES[i % len(DTYPES)]) for i, columns in enumerate(LINES)],
        itertools.product(LINES, DTYPES),
    ),
)
@pytest.mark.dtype_promotion
def test_bits(columns, dtype):
    """Packed, looked up, updated as the array: other rows have every bit where it was."""
    with jax.enable_x64(dtype == "float64"):
        x = table_of(columns, dtype)
        lines = jmask.packed(x)
        assert (lines.shape, lines.dtype) == (LINES[columns], x.dtype)
        np.testing.assert_array_equal(bits(rows_of(lines, columns)), bits(x))
        # Rows 3 and 4 share a line where rows are narrow; the last line is not full.
        touched = np.array([0, 3, 4, 11, V - 1])
        look = lambda t: jmask.embedding_lookup(t, touched, width=columns)
        for tx in (jmask.sgd(1.0), jmask.lazy(optax.adam(1.0)), jmask.adagrad(1.0)):
            step = training_step(lambda t: jnp.sum(jnp.real(look(t))), tx)
            after = rows_of(step(jnp.copy(lines), tx.init(lines))[0], columns)
            others = np.setdiff1d(np.arange(V), touched)
            np.testing.assert_array_equal(bits(after)[others], bits(x)[others])
            expected = step(jnp.copy(x), tx.init(x))[0]
            np.testing.assert_allclose(after[touched], expected[touched], rtol=1e-2)
            assert (after != x)[touched][np.isfinite(x[touched])].all()


@pytest.mark.parametrize("width", [1, 8, 64])
def test_masked_lines(width):
    """What rows write to their lines, the nan that stands for no row there among them."""
    each = LANES // width
    ids = jnp.array([0, 1, each, 3 * each - 1, 4 * each, 4 * each], jnp.int32)
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(6, width)), jnp.float32)
    rows = rows.at[0].set(-0.0).at[1].set(jnp.int32(0x7FC00001).view(jnp.float32))
    line, values, mask = jax.jit(masked_lines, static_argnums=2)(ids, rows, 4)
    expected = np.full((4, each, width), 7.0, np.float32)
    expected.reshape(-1, width)[ids[:4]] = rows[:4]
    kept = np.full((4, LANES), 7.0, np.float32)
    for i in range(6):
        if line[i] < 4:
            kept[line[i]] = np.where(mask[i], values[i], kept[line[i]])
    assert sorted(x for x in line.tolist() if x < 4) == [0, 1, 2]
    np.testing.assert_array_equal(kept, expected.reshape(4, LANES))
    np.testing.assert_array_equal(np.signbit(kept[0, :width]), True)


def test_ids_outside_the_table():
    """The last line is filled up: what comes after the table is zeros as far as that goes."""
    x = table_of(48)
    ids = jnp.array([[V - 1, V + 1, -1], [V + 500, 2, 1]])
    for mode, wanted in (("fill", x), ("clip", jnp.pad(x, ((0, 1), (0, 0)))), ("zero", x)):
        lookup = functools.partial(jmask.embedding_lookup, ids=ids, mode=mode, padding_id=-1)
        np.testing.assert_array_equal(lookup(jmask.packed(x), width=48), lookup(wanted))


@pytest.mark.parametrize("count", [0, 1])
def test_few_rows(count):
    x = jnp.ones((count, 20))
    lines, ids = jmask.packed(x), jnp.array([0, 0])
    lookup = functools.partial(jmask.embedding_lookup, mode="zero", width=20)
    np.testing.assert_array_equal(lookup(lines, ids), lookup(x, ids))
    assert lookup(lines, jnp.zeros((0, 2), int)).shape == (0, 2, 20)
    for tx in (jmask.sgd(1.0), jmask.adam(1.0)):
        for where in (ids, ids[:0]):
            step = training_step(lambda t: jnp.sum(lookup(t, where)), tx)  # noqa: B023
            after = step(jnp.copy(lines), tx.init(lines))[0]
            assert (after.sum() < lines.sum()) == (len(where) > 0 and count > 0)


def test_tables_that_are_not_packed():
    """`width` is taken of them too, so that one program runs with both."""
    for columns in (1, 12, 64, 100, 300):
        x = jnp.arange(4.0 * columns).reshape(4, columns)
        rows = jmask.embedding_lookup(x, [3, 1], width=columns)
        np.testing.assert_array_equal(rows, x[3::-2])


# --- gradients ---------------------------------------------------------------------------

IDS = jnp.array([[1, 3, 3], [20, 7, 2]])
RNG = np.random.default_rng(1)
BAG_WEIGHTS = jnp.array([[1.0, 2.0, -1.0], [0.5, 1.0, 1.0]])
look = functools.partial(jmask.embedding_lookup, width=16)
bag = functools.partial(jmask.embedding_bag, width=16)


def in_scan(table, wrap=lambda f: f):
    @wrap
    def body(total, ids):
        return total + jnp.sum(jnp.sin(look(table, ids))), None

    return jax.lax.scan(body, jnp.float32(0), IDS)[0]


LOSSES = functions("t", globals())("""
    jnp.sum(jnp.sin(look(t, IDS))); in_scan(t); in_scan(t, wrap=jax.checkpoint);
    jnp.sum(look(t, IDS, padding_id=3, mode="clip", max_norm=1.0) ** 3);
    jnp.sum(jnp.sin(bag(t, IDS, weights=BAG_WEIGHTS, combiner="mean")));
    jnp.sum(jnp.sin(bag(t, IDS, combiner="max"))); jnp.sum(jnp.sin(t.reshape(-1, 16)[IDS]));
    jnp.sum(jnp.sin(look(t, IDS))) + jnp.sum(t[jnp.array([2, 0, 2])] ** 2);
    jnp.sum(jax.vmap(lambda ids: jnp.sin(look(t, ids)).prod(0))(IDS));
    jnp.sum(jnp.sin(look(t, IDS)) * look(t, IDS[::-1])) + jnp.sum(t.reshape(-1, 16)[4] ** 2);
    jax.lax.cond(IDS[0, 0] > 0, lambda: jnp.sum(look(t, IDS) ** 2), lambda: 0.0)
""")


@pytest.mark.parametrize("name", LOSSES)
def test_gradient(name):
    """That of the array, in rows of 16 of its lines; `jax.grad` gives all lines."""
    loss, x = LOSSES[name], jnp.asarray(RNG.normal(size=(24, 16)), jnp.float32)
    lines = jmask.packed(x)

    @jax.jit
    def both(lines):
        value, gradient = jmask.value_and_grad(loss)(lines)
        return value, gradient, gradient.todense(), jax.grad(loss)(lines)

    with jmask.strict():
        value, gradient, *dense = both(lines)
    assert (gradient.shape, gradient.width) == (lines.shape, 16)
    # A line that is looked up whole is all of its 8 rows.
    assert gradient.nse <= IDS.size + 3 * 8
    expected = jax.jit(jax.value_and_grad(loss))(lines)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5, atol=1e-6)
    for found in dense:
        np.testing.assert_allclose(found, expected[1], rtol=1e-5, atol=1e-6)


def test_lines_that_are_computed_are_dense():
    """They are said to be: rows are looked up first, `look(t, ids) * 2`."""
    lines = jmask.packed(jnp.asarray(RNG.normal(size=(2**18, 1)), jnp.float32))
    loss = lambda t: jnp.sum(jnp.sin(jmask.embedding_lookup(t * 2.0, IDS, width=1)))
    with pytest.warns(jmask.StorageFallbackWarning, match="Look rows up first"):
        gradient = jmask.grad(loss)(lines)
    np.testing.assert_allclose(gradient, jax.grad(loss)(lines), rtol=1e-6)


def test_gradient_vmapped():
    """The whole of value_and_grad under vmap: other ids for each, or other tables."""
    x = jnp.asarray(RNG.normal(size=(2, 24, 16)), jnp.float32)
    lines = jax.vmap(jmask.packed)(x)
    loss = lambda t, ids: jnp.sum(look(t, ids) ** 2)
    for axes in ((None, 0), (0, None), (0, 0)):
        args = [a[0] if axis is None else a for a, axis in zip((lines, IDS), axes, strict=True)]
        ours = jax.vmap(lambda t, ids: jmask.grad(loss)(t, ids).todense(), axes)(*args)
        np.testing.assert_allclose(ours, jax.vmap(jax.grad(loss), axes)(*args), rtol=1e-5)


def test_sums_of_gradients():
    """Rows of other lines add to those of these, as rows of tables do."""
    lines = jmask.packed(jnp.asarray(RNG.normal(size=(24, 16)), jnp.float32))
    one, two = (jmask.grad(lambda t: jnp.sum(look(t, i) ** 2))(lines) for i in IDS)  # noqa: B023
    expected = one.todense() + two.todense()
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), one, two)
    for total in (one + two, jmask.tree.add(one, two), jmask.tree.merge(stacked)):
        assert total.width == 16
        np.testing.assert_allclose(total.todense(), expected, rtol=1e-6)
    again = pickle.loads(pickle.dumps(one))
    assert repr(again) == repr(one) == "RowSparse(float32[3, 128], nse=3, width=16)"
    again = jmask.from_arrays(jmask.to_arrays(one), like=one)
    np.testing.assert_array_equal(again.todense(), one.todense())


# --- optimizers --------------------------------------------------------------------------


def test_what_works_by_rows_is_refused():
    """As optimizers with a number for each row are: test_steps_of_all_kinds.py."""
    unit = lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True)
    tx = jmask.lazy(optax.stateless(lambda u, _: jax.tree.map(unit, u)))
    lines = jmask.packed(numbers())
    gradient = jmask.grad(lambda t: jnp.sum(look(t, IDS) ** 2))(lines)
    for step in STEPS.values():
        with pytest.raises(ValueError, match="row by row, and the table is packed"):
            step(tx, gradient, tx.init(lines), lines)


@pytest.mark.parametrize("columns", [8, 64, 100])
@pytest.mark.parametrize("step", STEPS)
def test_written_in_place(columns, step):
    tx, x = jmask.adam(0.1), jax.ShapeDtypeStruct((10**5, columns), jnp.float32)
    lines, ids = jax.eval_shape(jmask.packed, x), jax.ShapeDtypeStruct((8,), jnp.int32)
    loss = lambda t, ids: jnp.sum(jmask.embedding_lookup(t, ids, width=columns) ** 2)
    compiled = compiled_step(loss, tx, lines, ids, apply=STEPS[step])
    size = lines.size * 4
    assert temporary_bytes(compiled, 3 * size) < size / 10
