"""`embedding_lookup` and `renormalize` against NumPy, with the gradient that is wanted."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify

import jmask
from tests.embedding_oracle import MODES, looked_up, normal, sources, strictness, table_gradient
from tests.oracle import dense_twin, densified

pytestmark = pytest.mark.sampled

V, D, N = 6, 3, 8
TABLE = normal(V, D)


def weighed(rows):
    """A loss of the rows that are there."""
    return jnp.sum(jnp.where(jnp.isnan(rows), 0, rows) ** 2 * normal(*rows.shape))


def check(source, mode, table, rows, gradient):
    """The rows of such sources, and the gradient of their loss: a row for each that is read."""
    expected = looked_up(table, source, mode)
    cotangents = 2 * normal(*expected.shape) * np.nan_to_num(expected)
    in_table = table_gradient(cotangents, source, len(table))
    np.testing.assert_array_equal(rows, expected)
    if isinstance(gradient, jmask.RowSparse):
        trained = np.where(source < 0, len(table), source)
        np.testing.assert_array_equal(gradient.indices, trained.ravel())
        gradient = dense_twin(gradient)
    np.testing.assert_allclose(gradient, in_table, rtol=1e-5, atol=1e-6)


POISONED = np.where(
    np.arange(V)[:, None] == 2, np.float32([math.nan, math.inf, -math.inf]), TABLE
)


@functools.cache
def compiled(padding, mode):
    """Gradients of both kinds, with the rows, under jit; "raise" with its error."""

    def loss(table, ids):
        rows = jmask.embedding_lookup(table, ids, padding_id=padding, mode=mode)
        return weighed(rows), rows

    functions = [jax.jit(grad(loss, has_aux=True)) for grad in (jax.grad, jmask.grad)]
    if mode == "raise":
        return [lambda *args, f=f: checkify.checkify(f)(*args)[1] for f in functions]
    return functions


@pytest.mark.parametrize(
    ("mode", "padding"), [*itertools.product(MODES, (None, 2)), ("fill", -1)]
)
@given(ids=st.lists(st.integers(-4, V + 3), min_size=N, max_size=N))
def test_values_and_gradients(mode, padding, ids):
    """Nothing leaks from the row that padding reads."""
    table = POISONED if padding == 2 else TABLE
    source, ids = sources(ids, padding, mode, V), jnp.asarray(ids, jnp.int32)
    for function in compiled(padding, mode):
        with strictness():
            gradient, rows = function(table, ids)
        check(source, mode, table, rows, gradient)


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_nothing_leaks_from_a_row_that_is_shortened(mode):
    loss = lambda t: weighed(
        jmask.embedding_lookup(t, [2, 0, 2, 5], padding_id=2, mode=mode, max_norm=0.5)
    )
    both = jax.jit(jmask.value_and_grad(loss))
    found, expected = densified(both(POISONED)), densified(both(TABLE))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_bound_that_is_infinite_keeps_all_rows():
    """Traced, where it is no error: rows have their derivative, and not nan."""
    lookup = lambda t, bound: jmask.embedding_lookup(t, [2, 0], max_norm=bound)
    shorten = lambda t, bound: jmask.renormalize(t, [2, 0], bound)[jnp.array([2, 0])]
    for rows in (lookup, shorten):
        both = jax.value_and_grad(lambda *args, rows=rows: weighed(rows(*args)), (0, 1))
        value, (in_table, in_bound) = jax.jit(both)(TABLE, jnp.float32(math.inf))
        source = np.array([2, 0])
        np.testing.assert_allclose(value, weighed(TABLE[source]), rtol=1e-6)
        cotangents = 2 * normal(2, D) * TABLE[source]
        np.testing.assert_allclose(in_table, table_gradient(cotangents, source, V), rtol=1e-6)
        assert in_bound == 0


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


SHAPES = [
    *((TABLE, ids) for ids in ([], 3, [[3, 1]], np.zeros((2, 0, 3), int))),
    *((normal(V, *row), [2, -1, 17]) for row in ((), (2, 2), (0,))),
    (normal(300), np.array([0, 255, 7], np.uint8)),  # more rows than the dtype counts
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("table", "ids"), SHAPES, ids=lambda x: str(np.shape(x)))
def test_shapes(table, ids, mode):

    def loss(table):
        rows = jmask.embedding_lookup(table, ids, mode=mode, padding_id=0)
        return weighed(rows), rows

    if mode == "raise":
        ids = np.clip(np.asarray(ids, int), 0, len(table) - 1)
    with jmask.strict():
        gradient, rows = jax.jit(jmask.grad(loss, has_aux=True))(table)
    check(sources(ids, 0, mode, len(table)), mode, table, rows, gradient)


# --- tables of every kind ----------------------------------------------------------------


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


@pytest.mark.parametrize(("mode", "row"), [("fill", math.nan), ("zero", 0)])
def test_a_table_without_rows(mode, row):
    found = jmask.embedding_lookup(np.zeros((0, 2)), [0, 3], mode=mode, padding_id=3)
    np.testing.assert_array_equal(found, [[row, row], [0, 0]])


STORED = {
    "nothing": (np.zeros(0, int), np.zeros((0, D)), False),
    "duplicates": ([4, 0, V, 4, -1, 1], normal(6, D), False),
    "nan in padding": ([1, V], [[1.0, 2, 3], [math.nan, 7, math.inf]], True),
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("mode", "padding"), [("fill", 2), ("clip", V), ("zero", None), ("raise", 2)]
)
def test_row_sparse_table(mode, padding, stored):
    """Rows that are not stored are zeros; the gradient of the stored ones is exact."""
    indices, values, coalesced = STORED[stored]
    indices, values = np.array(indices), np.array(values, np.float32)
    ids = np.array([4, 3, 0, 4, 2, 1, 5, 0] if mode == "raise" else [-3, V, 0, 4, 2, 1, 5, 0])
    real, source = (indices >= 0) & (indices < V), sources(ids, padding, mode, V)
    dense = np.zeros((V, D), np.float32)
    np.add.at(dense, indices[real], values[real])

    @functools.partial(jax.grad, has_aux=True)
    def gradient_and_rows(values):
        table = jmask.RowSparse(indices, values, (V, D), coalesced=coalesced)
        rows = jmask.embedding_lookup(table, ids, padding_id=padding, mode=mode)
        return weighed(rows), rows

    found, rows = jax.jit(gradient_and_rows)(values)
    expected = looked_up(dense, source, mode)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    cotangents = 2 * normal(*expected.shape) * np.nan_to_num(expected)
    gradient = np.zeros(values.shape)
    gradient[real] = table_gradient(cotangents, source, V)[indices[real]]
    np.testing.assert_allclose(found, gradient, rtol=1e-5)


# --- mode "raise" ------------------------------------------------------------------------

IDS = np.array([[1, 2], [3, 3]])

scanned = lambda loss: (
    lambda t, ids: jax.lax.scan(lambda c, i: (c + loss(t, i), None), 0.0, ids)[0]
)
vmapped = lambda loss: lambda t, ids: jax.vmap(lambda i: loss(t, i))(ids).sum()
branched = lambda loss: (
    lambda t, ids: jax.lax.cond(ids[0, 0] == 1, loss, lambda t, ids: 0.0, t, ids)
)
one_by_one = lambda loss: lambda t, ids: sum(loss(t, i) for i in ids.ravel())
# Programs, and where the error says that the id is.
PROGRAMS = {
    "jit": (jax.jit, "[1, 1]"),
    "remat": (jax.checkpoint, "[1, 1]"),
    "scan": (scanned, "[1]"),
    "one by one": (one_by_one, ""),
    "vmap": (vmapped, "["),
    "cond": (branched, "[1, 1]"),
    "scan of remat": (lambda loss: scanned(jax.checkpoint(loss)), "[1]"),
    "scan of scan": (lambda loss: scanned(lambda t, i: scanned(loss)(t, i[None])), "[1]"),
    "vmap of scan": (lambda loss: vmapped(lambda t, i: scanned(loss)(t, i[:, None])), "["),
}


def plain_loss(mode):
    return lambda t, ids: jnp.sum(
        jnp.sin(jmask.embedding_lookup(t, ids, padding_id=3, mode=mode)) ** 2
    )


# All ids in the table, or padding: there the modes are the same.
ZERO_GRADIENT = jax.jit(jax.value_and_grad(plain_loss("zero")))


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("name", "differentiate"),
    [(name, jmask.value_and_grad) for name in PROGRAMS]
    + [("jit", jax.value_and_grad), ("scan", jax.value_and_grad)],
)
def test_raise_under_checkify(name, differentiate, inside):
    """Also of a scan that is differentiated, where JAX drops a check that stands alone."""
    program, position = PROGRAMS[name]
    step = differentiate(program(plain_loss("raise")))
    wrong, others = IDS.copy(), IDS.copy()
    wrong[1, 1], others[1, 1] = 40, 3  # 3 is padding
    checked = jax.jit(checkify.checkify(step)) if inside else checkify.checkify(jax.jit(step))
    assert checked(TABLE, IDS)[0].get() is None
    error, (value, gradient) = checked(TABLE, wrong)
    assert re.search(rf"`ids{re.escape(position)}.*` is 40, .*\(6, 3\)", error.get())
    # The id that is wrong trains nothing, nor does it spoil the gradient of the others.
    if isinstance(gradient, jmask.RowSparse):
        assert set(np.asarray(gradient.indices).tolist()) <= {1, 2, 3, V}
        gradient = dense_twin(gradient)
    expected = ZERO_GRADIENT(TABLE, others)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), (value, gradient), expected
    )


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (7, "`ids` is 7 ... (1 such"),
        ([0, -1, 9], "`ids[1]` is -1 ... (2 such"),
        ([[0, 3], [1, 2**40]], f"`ids[1, 1]` is {2**40} ... (1 such"),
        (np.array([[0], [200]], np.uint8), "`ids[1, 0]` is 200 ... (1 such"),
    ],
)
def test_raise_for_concrete_ids(ids, words):
    words = words.replace(" ...", ", which is no row of the table of shape (6, 3)")
    lookup = lambda t: jnp.sum(jmask.embedding_lookup(t, ids, mode="raise", padding_id=V))
    for function in (lookup, jax.jit(lookup), jax.grad(lookup), jmask.grad(lookup)):
        with pytest.raises(IndexError, match=re.escape(words)):
            function(TABLE)


def test_raise_for_ids_that_the_loss_computes():
    """Outside jit no checkify is needed: the check runs, and raises, by itself."""
    loss = lambda t, ids: jnp.sum(jmask.embedding_lookup(t, ids + 4, mode="raise"))
    ids = jnp.array([0, 3])
    for differentiate in (jax.grad, jmask.grad):
        with pytest.raises((IndexError, checkify.JaxRuntimeError), match=r"`ids\[1\]` is 7"):
            differentiate(loss)(TABLE, ids)
