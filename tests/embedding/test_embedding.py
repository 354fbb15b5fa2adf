"""`embedding_lookup` and `renormalize` against NumPy, with the gradient that is wanted."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify

import jmask
from tests.embedding_oracle import MODES, looked_up, normal, sources, strictness, table_gradient
from tests.oracle import dense_twin

pytestmark = pytest.mark.sampled

V, D, N = 6, 3, 8
TABLE, WEIGHTS = normal(V, D), normal(N, D)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

modes = pytest.mark.parametrize("mode", MODES)
cotangents = lambda rows: 2 * WEIGHTS.reshape(rows.shape) * np.nan_to_num(rows)
_second = lambda function, *args: function(*args)[1]


def weighed(rows):
    """A loss whose cotangents are `2 * WEIGHTS * rows`, where there are rows."""
    weights = WEIGHTS.reshape(*rows.shape)
    return jnp.sum(jnp.where(jnp.isnan(rows), 0, rows) ** 2 * weights)


@functools.cache
def compiled(padding, mode):
    """Gradients of both kinds, with the rows, under jit; "raise" with its error."""

    def loss(table, ids):
        rows = jmask.embedding_lookup(table, ids, padding_id=padding, mode=mode)
        return weighed(rows), rows

    functions = {
        "dense": jax.jit(jax.grad(loss, has_aux=True)),
        "sparse": jax.jit(jmask.grad(loss, has_aux=True)),
    }
    if mode == "raise":
        functions = {name: checkify.checkify(f) for name, f in functions.items()}
        return {name: functools.partial(_second, f) for name, f in functions.items()}
    return functions


@pytest.mark.parametrize(
    ("mode", "padding"), [*itertools.product(MODES, (None, 2)), ("fill", -1)]
)
@given(ids=st.lists(st.integers(-4, V + 3), min_size=N, max_size=N))
def test_values_and_gradients(mode, padding, ids):
    functions, source = compiled(padding, mode), sources(ids, padding, mode, V)
    expected = looked_up(TABLE, source, mode)
    gradient = table_gradient(cotangents(expected), source, V)
    ids = jnp.asarray(ids, jnp.int32)
    dense, rows = functions["dense"](TABLE, ids)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(dense, gradient, **CLOSE)
    with strictness():
        sparse, rows = functions["sparse"](TABLE, ids)
    np.testing.assert_array_equal(rows, expected)
    assert sparse.nse == N
    # A row that is trained is one that was looked up, duplicates and all.
    np.testing.assert_array_equal(sparse.indices, np.where(source < 0, V, source))
    np.testing.assert_allclose(dense_twin(sparse), gradient, **CLOSE)


# --- ids of every kind -------------------------------------------------------------------

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["NumPy", "JAX"])
def test_ids_of_every_dtype(dtype, kind):
    """The ends of each dtype are outside, and never wrap onto a row."""
    limits = np.iinfo(dtype)
    wide = [2**32 + 3, 2**31] if limits.bits == 64 else []
    ids = np.array([0, 1, 1, limits.min, limits.max, limits.max // 2 + 1, *wide], dtype)
    with jax.enable_x64(kind == "JAX" and limits.bits == 64):
        given = ids if kind == "NumPy" else jnp.asarray(ids)
        for mode in ("fill", "clip"):
            found = jmask.embedding_lookup(TABLE, given, padding_id=1, mode=mode)
            expected = looked_up(TABLE, sources(ids, 1, mode, V), mode)
            np.testing.assert_array_equal(found, expected)
        found = jmask.embedding_lookup(TABLE, given[:3], padding_id=1, mode="raise")
        np.testing.assert_array_equal(found, expected[:3])


def test_a_table_with_more_rows_than_a_narrow_dtype_counts():
    table, ids = np.arange(300.0), np.array([0, 255, 7], np.uint8)
    for mode in MODES:
        found = jmask.embedding_lookup(table, ids, mode=mode, padding_id=-1)
        np.testing.assert_array_equal(found, [0, 255, 7])


@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("ids", [[], 3, [[3, 1]], np.zeros((2, 0, 3), int)], ids=str)
def test_ids_of_every_shape(mode, ids):

    def loss(table):
        rows = jmask.embedding_lookup(table, ids, mode=mode, padding_id=0)
        return jnp.sum(rows**2), rows

    with jmask.strict():
        gradient, rows = jax.jit(jmask.grad(loss, has_aux=True))(TABLE)
    np.testing.assert_array_equal(rows, TABLE[np.asarray(ids, int)])
    np.testing.assert_array_equal(gradient.indices, np.ravel(ids))
    np.testing.assert_allclose(gradient.values, 2 * TABLE[gradient.indices], rtol=1e-6)


# --- tables of every kind ----------------------------------------------------------------


@modes
@pytest.mark.parametrize("shape", [(V,), (V, 2, 2), (V, 0)])
def test_rows_of_every_shape(mode, shape):
    table = normal(*shape)
    ids = [2, 0, 5] if mode == "raise" else [2, -1, 17]
    expected = looked_up(table, sources(ids, 0, mode, V), mode)
    found = jmask.embedding_lookup(table, ids, mode=mode, padding_id=0)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "dtype", [bool, "int8", "uint8", "int32", "float16", jnp.bfloat16, "complex64"]
)
def test_tables_of_every_dtype(dtype):
    """A row that does not exist is what `jnp.take` gives."""
    table = jnp.asarray(np.arange(6).reshape(3, 2) % 5, dtype)
    ids = np.array([1, 3, 2])
    lookup = jax.jit(jmask.embedding_lookup, static_argnames=("padding_id", "mode"))
    filled = np.asarray(lookup(table, ids, padding_id=2))
    expected = np.array(jnp.take(table, ids, axis=0, mode="fill"))
    expected[2] = 0
    assert filled.dtype == table.dtype
    assert filled.tobytes() == expected.tobytes()
    expected[1] = 0
    assert (lookup(table, ids, padding_id=2, mode="zero") == expected).all()


@pytest.mark.parametrize("mode", ["fill", "zero"])
def test_a_table_without_rows(mode):
    found = jmask.embedding_lookup(np.zeros((0, 2)), [0, 3, -1], mode=mode, padding_id=3)
    other = math.nan if mode == "fill" else 0
    np.testing.assert_array_equal(found, [[other] * 2, [0, 0], [other] * 2])


@pytest.mark.parametrize(
    ("mode", "padding"), [("fill", 2), ("clip", V), ("zero", None), ("raise", 2)]
)
def test_row_sparse_table(mode, padding):
    """Rows that are not stored are zeros; the gradient of the stored ones is exact."""
    stored = np.array([4, 0, V, 4, -1, 1])  # duplicates, padding, not in order
    values = normal(6, D)
    ids = np.array([4, 3, 0, 4, 2, 1, 5, 0])
    if mode != "raise":
        ids[:2] = [-3, V]
    source = sources(ids, padding, mode, V)
    dense = dense_twin(jmask.RowSparse(stored, values, (V, D)))

    @functools.partial(jax.grad, has_aux=True)
    def gradient_and_rows(values):
        table = jmask.RowSparse(stored, values, (V, D))
        rows = jmask.embedding_lookup(table, ids, padding_id=padding, mode=mode)
        return weighed(rows), rows

    expected = looked_up(dense, source, mode)
    found, rows = jax.jit(gradient_and_rows)(values)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    gradient = np.zeros((6, D))
    real = (stored >= 0) & (stored < V)
    gradient[real] = table_gradient(cotangents(expected), source, V)[stored[real]]
    np.testing.assert_allclose(found, gradient, rtol=1e-5)


def test_row_sparse_table_with_nothing_stored():
    table = jmask.RowSparse.zeros((V, 2))
    found = jmask.embedding_lookup(table, [0, V, 3], padding_id=3)
    np.testing.assert_array_equal(found, [[0, 0], [math.nan] * 2, [0, 0]])


def test_padding_of_a_row_sparse_table_is_no_row():
    """Whatever its values are."""
    values = np.array([[1.0, 2], [math.nan, 7]])
    table = jmask.RowSparse([1, V], values, (V, 2), coalesced=True)
    found = jmask.embedding_lookup(table, [1, -1, V], padding_id=-1, mode="zero")
    np.testing.assert_array_equal(found, [[1, 2], [0, 0], [0, 0]])


# --- what lies in a padded row -----------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "max_norm"), [*((mode, None) for mode in MODES), ("fill", 0.5), ("clip", 0.5)]
)
def test_nothing_leaks_from_a_padded_row(mode, max_norm):
    poisoned, clean = TABLE.copy(), TABLE.copy()
    poisoned[2], clean[2] = (math.nan, math.inf, -math.inf), 0
    options = {"padding_id": 2, "mode": mode, "max_norm": max_norm}
    loss = lambda t: jnp.sum(jmask.embedding_lookup(t, [2, 0, 2, 5], **options) ** 2)
    both = jax.jit(jmask.value_and_grad(loss))
    value, gradient = both(poisoned)
    expected, other = both(clean)
    assert value == expected
    np.testing.assert_array_equal(gradient.indices, [V, 0, V, 5])
    np.testing.assert_array_equal(gradient.values, other.values)


# --- inside other transformations --------------------------------------------------------

IDS = np.array([[1, 2], [3, 3]])

scanned = lambda loss: (
    lambda t, ids: jax.lax.scan(lambda c, i: (c + loss(t, i), None), 0.0, ids)[0]
)
vmapped = lambda loss: lambda t, ids: jax.vmap(lambda i: loss(t, i))(ids).sum()
branched = lambda loss: (
    lambda t, ids: jax.lax.cond(ids[0, 0] == 1, loss, lambda t, ids: 0.0, t, ids)
)
PROGRAMS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": scanned,
    "vmap": vmapped,
    "cond": branched,
    "scan of remat": lambda loss: scanned(jax.checkpoint(loss)),
    "scan of scan": lambda loss: scanned(lambda t, i: scanned(loss)(t, i[None])),
    "vmap of scan": lambda loss: vmapped(lambda t, i: scanned(loss)(t, i[:, None])),
}


def plain_loss(mode):
    return lambda t, ids: jnp.sum(
        jnp.sin(jmask.embedding_lookup(t, ids, padding_id=3, mode=mode)) ** 2
    )


# All ids in the table, or padding: there the modes are the same.
ZERO_GRADIENT = jax.jit(jax.grad(plain_loss("zero")))


# --- mode "raise" ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "differentiate"),
    [(name, jmask.value_and_grad) for name in PROGRAMS]
    + [("jit", jax.value_and_grad), ("scan", jax.value_and_grad)],
)
def test_raise_under_checkify(name, differentiate):
    """Also of a scan that is differentiated, where JAX drops a check that stands alone."""
    step = differentiate(PROGRAMS[name](plain_loss("raise")))
    wrong, others = IDS.copy(), IDS.copy()
    wrong[1, 1], others[1, 1] = 40, 3  # 3 is padding
    checked = checkify.checkify(jax.jit(step))
    error, _ = checked(TABLE, IDS)
    assert error.get() is None
    error, (_, gradient) = checked(TABLE, wrong)
    with pytest.raises(checkify.JaxRuntimeError, match=r"`ids\[.*\]` is 40, .*\(6, 3\)"):
        error.throw()
    # The id that is wrong trains nothing, nor does it spoil the gradient of the others.
    if isinstance(gradient, jmask.RowSparse):
        assert set(np.asarray(gradient.indices).tolist()) <= {1, 2, 3, V}
        gradient = dense_twin(gradient)
    expected = ZERO_GRADIENT(TABLE, others)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("ids", "position", "value", "number"),
    [
        (7, "", 7, 1),
        ([0, -1, 9], r"\[1\]", -1, 2),
        ([[0, 3], [1, 2**40]], r"\[1, 1\]", 2**40, 1),
        (np.array([[0], [200]], np.uint8), r"\[1, 0\]", 200, 1),
    ],
)
def test_raise_for_concrete_ids(ids, position, value, number):
    message = rf"`ids{position}` is {value}, which is no row .* \(6, 3\) \({number} such"
    lookup = lambda t: jnp.sum(jmask.embedding_lookup(t, ids, mode="raise", padding_id=V))
    for function in (lookup, jax.jit(lookup), jax.grad(lookup), jmask.grad(lookup)):
        with pytest.raises(IndexError, match=message):
            function(TABLE)


def test_raise_for_ids_that_the_loss_computes():
    """Outside jit no checkify is needed: the check runs, and raises, by itself."""
    loss = lambda t, ids: jnp.sum(jmask.embedding_lookup(t, ids + 4, mode="raise"))
    ids = jnp.array([0, 3])
    for differentiate in (jax.grad, jmask.grad):
        with pytest.raises((IndexError, checkify.JaxRuntimeError), match=r"`ids\[1\]` is 7"):
            differentiate(loss)(TABLE, ids)


@pytest.mark.parametrize("position", [(), (2,), (1, 2)])
def test_raise_names_the_position(position):
    ids = np.zeros(tuple(i + 1 for i in position), np.int32)
    ids[position] = -5
    lookup = jax.jit(lambda t, ids: jmask.embedding_lookup(t, ids, mode="raise"))
    error, rows = checkify.checkify(lookup)(TABLE, ids)
    at = str(list(position)) if position else ""
    assert f"`ids{at}` is -5, which is no row of the table" in error.get()
    np.testing.assert_array_equal(rows[position], np.zeros(D))


def test_checkify_inside_jit():
    step = jax.jit(checkify.checkify(jmask.grad(plain_loss("raise"))))
    assert step(TABLE, IDS)[0].get() is None
    assert "`ids[0, 1]` is 11" in step(TABLE, np.array([[1, 11], [3, 3]]))[0].get()
