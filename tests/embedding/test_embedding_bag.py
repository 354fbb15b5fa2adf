"""`embedding_bag` against NumPy loops: values, and gradients of table and weights."""

import functools
import math
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

import jmask
from tests.embedding_oracle import (
    MODES,
    OUTSIDE,
    PADDED,
    combined,
    looked_up,
    normal,
    sources,
    strictness,
    table_gradient,
)
from tests.expressions import functions
from tests.oracle import dense_twin

pytestmark = pytest.mark.sampled

V, D, N, B, L = 6, 3, 12, 4, 3
FORMS = ("lines", "offsets", "last offset", "segments")
COMBINERS = ("sum", "mean", "sqrtn", "max")
PADDINGS = (None, -1, 2)
# Small integers, so that the maximum is often attained more than once.
TABLE = np.random.default_rng(1).integers(-2, 3, (V, D)).astype(np.float32)
COTANGENT = normal(B, D)
NONE = np.zeros((2, 2), np.float32)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

forms = pytest.mark.parametrize("form", FORMS)
combiners = pytest.mark.parametrize("combiner", COMBINERS)


Case = namedtuple("Case", "form combiner weighted padding mode")  # the options of a call
Data = namedtuple("Data", "ids places weights")  # its arrays: `places` are offsets or segments


def drawn(form, rng, outside):
    """Ids in the table, or also outside it, and bags of which some are empty."""
    ids = rng.integers(-2, V + 2, N) if outside else rng.integers(0, V, N)
    offsets = np.sort(rng.integers(0, N + 1, B + 1))
    offsets[0] = 0
    places = {
        "lines": np.arange(N) // L,
        "offsets": offsets[:B],
        "last offset": offsets,
        "segments": rng.integers(-2, B + 1, N),
    }[form]
    weights = rng.normal(size=N).astype(np.float32)
    if rng.random() < 0.3:  # bags whose weights sum to 0
        weights = rng.integers(-1, 2, N).astype(np.float32)
    if rng.random() < 0.2:  # bags of padding alone
        ids[:] = 2
    return Data(ids.astype(np.int32), places.astype(np.int32), weights)


def call(case, table, weights, ids, places):
    options = {"combiner": case.combiner, "padding_id": case.padding, "mode": case.mode}
    if case.form == "lines":
        ids, weights = ids.reshape(B, L), weights.reshape(B, L)
    elif case.form == "segments":
        options |= {"segment_ids": places, "num_segments": B}
    else:
        options |= {"offsets": places, "include_last_offset": case.form == "last offset"}
    return jmask.embedding_bag(
        table, ids, weights=weights if case.weighted else None, **options
    )


def differentiated(case):
    """(table, weights, ids, places) -> gradients of table and weights, and the bags."""

    def loss(table, weights, ids, places):
        out = call(case, table, weights, ids, places)
        return jnp.sum(out * COTANGENT), out

    return jmask.grad(loss, (0, 1), has_aux=True)


def bag_of(form, places):
    """The bag of each entry, B or -1 for none."""
    if form in ("lines", "segments"):
        return places
    ends = places if form == "last offset" else np.append(places, N)
    return np.repeat(np.arange(B + 1), np.diff(np.append(ends, N)))


def sources_and_bags(case, data):
    """The row that each entry reads, and its bag; PADDED and -1 where it takes no part."""
    bag, source = bag_of(case.form, data.places), sources(data.ids, case.padding, case.mode, V)
    if case.mode == "raise":
        source[source == OUTSIDE] = PADDED
    source[(bag < 0) | (bag >= B)] = PADDED
    return source, np.where(source == PADDED, -1, bag)


def poisoned(case, data):
    """The table with nan in the row of padding, and entries with such weights."""
    table, absent = TABLE.copy(), sources_and_bags(case, data)[1] < 0
    if case.padding == 2:
        table[2] = math.nan, math.inf, -math.inf
    poison = np.resize(np.float32([math.nan, math.inf]), N)
    return table, data._replace(weights=np.where(absent, poison, data.weights))


def check(case, data, in_table, in_weights, out):
    source, bag = sources_and_bags(case, data)
    rows = looked_up(TABLE, source, case.mode)
    weights = data.weights if case.weighted else np.ones(N)
    expected = combined(rows, bag, weights, case.combiner, COTANGENT)
    np.testing.assert_allclose(out, expected.out, **CLOSE)
    np.testing.assert_array_equal(in_table.indices, np.where(source < 0, V, source))
    gradient = table_gradient(expected.in_rows, source, V)
    np.testing.assert_allclose(dense_twin(in_table), gradient, **CLOSE)
    if case.weighted:
        np.testing.assert_allclose(in_weights, expected.in_weights, **CLOSE)


@functools.cache
def called(case, way):
    function = differentiated(case)
    if way == "eager":
        return function
    if way == "vmap":
        function = jax.vmap(function, (None, 0, 0, 0))
    if case.mode != "raise":
        return jax.jit(function)
    checked = checkify.checkify(jax.jit(function))
    return lambda *args: checked(*args)[1]


@forms
@combiners
@pytest.mark.parametrize("way", ["eager", "jit", "vmap"])
@settings(max_examples=5)
@given(st.booleans(), st.sampled_from(PADDINGS), st.sampled_from(MODES), st.integers(0, 10**6))
def test_values_and_gradients(way, combiner, form, weighted, padding, mode, seed):
    """Nothing leaks from padding: neither the row that it reads nor its weight."""
    case = Case(form, combiner, weighted and combiner != "max", padding, mode)
    rng, number = np.random.default_rng(seed), 2 if way == "vmap" else 1
    outside = way != "eager" or mode != "raise"  # where an id that is none is an error
    draws = [drawn(form, rng, outside) for _ in range(number)]
    tables, given = zip(*(poisoned(case, one) for one in draws), strict=True)
    data = Data(*map(np.stack, zip(*given, strict=True))) if way == "vmap" else given[0]
    with strictness():
        gradients, out = called(case, way)(tables[0], data.weights, data.ids, data.places)
    for i, one in enumerate(draws):
        found = *gradients, out
        check(case, one, *(jax.tree.map(lambda x, i=i: x[i], found) if number > 1 else found))


# --- combiners ---------------------------------------------------------------------------


@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_total_weight_of_zero(combiner):
    """Zeros, with derivatives of zero, as above; but a nan in such a bag is not hidden."""
    bags = lambda t: jmask.embedding_bag(t, [[0, V], [0, 1]], weights=NONE, combiner=combiner)
    np.testing.assert_array_equal(bags(TABLE), [[math.nan] * D, [0] * D])


@pytest.mark.parametrize("form", [{}, {"segment_ids": np.repeat(range(3), 4)}], ids=len)
def test_max_of_what_is_not_finite(form):
    table = np.array([[-math.inf, 1], [-math.inf, math.nan], [5, 0], [-math.inf, math.nan]])
    ids = np.array([[2, 0, 1, 3], [0, 2, 2, 0], [2, 2, 2, 2]])  # 2 is padding
    ids = ids.ravel() if form else ids

    def loss(table):
        out = jmask.embedding_bag(table, ids, combiner="max", padding_id=2, **form)
        return jnp.sum(out), out

    gradient, out = jmask.grad(loss, has_aux=True)(table)
    np.testing.assert_array_equal(out, [[-math.inf, math.nan], [-math.inf, 1], [0, 0]])
    expected = np.zeros((12, 2))
    expected[1] = 1, 0  # the first -inf that is not padding
    expected[2] = 0, 1  # the first nan
    expected[4] = 1, 1
    np.testing.assert_array_equal(gradient.values, expected)


@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize("form", [{}, {"segment_ids": np.repeat(range(512), 8)}], ids=len)
def test_max_of_thousands(form, place):
    """In which XLA for CPUs loses a nan: of an id out of range."""
    ids = np.arange(512 * 8).reshape(512, 8) % V
    ids[3, place] = V
    ids = ids.ravel() if form else ids
    bags = jmask.embedding_bag(TABLE, ids, combiner="max", **form)
    assert np.isnan(bags).any(1).nonzero()[0].tolist() == [3]
    assert np.isnan(bags[3]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", [{}, {"offsets": [0]}], ids=len)
@pytest.mark.parametrize(("combiner", "sum_of"), [("sum", 4096), ("mean", 1), ("sqrtn", 64)])
def test_narrow_tables_are_summed_in_float32(combiner, sum_of, form, dtype):
    """Summed in bfloat16, ones stay at 256; in float16, at 2048."""
    ids = np.zeros(4096 if form else (1, 4096), np.int32)
    out = jmask.embedding_bag(jnp.ones((2, 2), dtype), ids, combiner=combiner, **form)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, sum_of)


def test_segments_of_unsigned_integers_are_counted():
    out = jmask.embedding_bag(jnp.eye(3), [2, 0, 1], segment_ids=np.uint8([0, 2, 2]))
    np.testing.assert_array_equal(out, [[0, 0, 1], [0, 0, 0], [1, 1, 0]])


# --- shapes ------------------------------------------------------------------------------


def of_no_ids(number, ids=(), **bags):
    """How many bags there are of ids."""
    return number, np.asarray(ids, int), bags


NOTHING = functions("", globals())("""
    of_no_ids(0, np.zeros((0, L))); of_no_ids(B, np.zeros((B, 0))); of_no_ids(0, offsets=[]);
    of_no_ids(2, offsets=[0, 0]); of_no_ids(0, offsets=[0], include_last_offset=True);
    of_no_ids(0, [1, 2], offsets=[0], include_last_offset=True); of_no_ids(0, segment_ids=[]);
    of_no_ids(2, segment_ids=[], num_segments=2); of_no_ids(0, [1, 2], segment_ids=[-1, -3]);
    of_no_ids(0, [1, 2], segment_ids=[0, -1], num_segments=0)
""")


@pytest.mark.parametrize("combiner", ["mean", "max"])
@pytest.mark.parametrize("name", NOTHING)
def test_nothing(combiner, name):
    """No bags, or nothing in them: zeros, and a row-sparse gradient."""
    number, ids, bags = NOTHING[name]()

    def loss(table):
        out = jmask.embedding_bag(table, ids, combiner=combiner, padding_id=0, **bags)
        return jnp.sum(out), out

    gradient, out = jmask.grad(loss, has_aux=True)(TABLE)
    np.testing.assert_array_equal(out, np.zeros((number, D)))
    assert gradient.nse == np.size(ids)
    assert (np.asarray(gradient.indices) == V).all()


CUBE = np.random.default_rng(0).integers(-1, V, (2, 2, L))
WIDE, ROWS = 9 * normal(V, 2, 2), jmask.RowSparse([4, 1, V, 4], normal(4, D), (V, D))
SHORT = jmask.embedding_lookup(WIDE, np.arange(V), max_norm=1.5, norm_type=1)
SEGMENTS = {"segment_ids": [0, 2, 1, 1, -1, 2, 4, 0, 0, 2, 3, 1], "num_segments": B}


def bag(combiner, table, ids, **options):
    weights = None if combiner == "max" else normal(12).reshape(ids.shape)
    options |= {"weights": weights, "combiner": combiner, "padding_id": -1}
    return jmask.embedding_bag(table, ids, **options)


SAME = functions("c", globals())("""
    (bag(c, TABLE, CUBE), bag(c, TABLE, CUBE.reshape(4, L)).reshape(2, 2, D));
    (bag(c, ROWS, CUBE), bag(c, ROWS.todense(), CUBE));
    (bag(c, ROWS, CUBE.ravel(), **SEGMENTS), bag(c, ROWS.todense(), CUBE.ravel(), **SEGMENTS));
    (bag(c, WIDE, CUBE, max_norm=1.5, norm_type=1), bag(c, SHORT, CUBE));
    (bag(c, WIDE, CUBE).reshape(2, 2, 4), bag(c, WIDE.reshape(V, 4), CUBE));
    (bag(c, WIDE[:, 0, 0], CUBE), bag(c, WIDE, CUBE)[..., 0, 0]);
    (bag(c, WIDE, CUBE.ravel(), **SEGMENTS)[:, 1], bag(c, WIDE[:, 1], CUBE.ravel(), **SEGMENTS))
""")


@combiners
@pytest.mark.parametrize("name", SAME)
def test_the_same_bags(combiner, name):
    """Lines of more dimensions, rows of every shape, row-sparse tables and bounded rows."""
    found, expected = SAME[name](combiner)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [{}, {"segment_ids": [0, 0, 1, 1, 1, 1]}])
def test_bags_of_integers_are_summed_in_32_bits(form):
    ids = np.array([0, 1, 1, 1, -9, -9] if form else [[0, 1, -9], [1, 1, -9]])
    bag_sum = lambda table, **how: jmask.embedding_bag(table, ids, padding_id=-9, **form, **how)
    table = np.array([[100, -100], [100, 7]], np.int8)
    for wrap in (lambda f: f, jax.jit):
        sums = wrap(bag_sum)(jnp.asarray(table))
        assert sums.dtype == np.int32
        np.testing.assert_array_equal(sums, [[200, -93], [200, 14]])
        greatest = wrap(functools.partial(bag_sum, combiner="max"))(jnp.asarray(table))
        np.testing.assert_array_equal(greatest, np.array([[100, 7], [100, 7]], np.int8))
    flags = bag_sum(jnp.asarray(table > 0))
    np.testing.assert_array_equal(flags, [[2, 1], [2, 2]])
    greatest = bag_sum(jnp.asarray(table > 0), combiner="max")
    np.testing.assert_array_equal(greatest, [[True, True], [True, True]])
    nothing = jmask.embedding_bag(jnp.asarray(table), [[0, 5]])
    np.testing.assert_array_equal(nothing, [[np.iinfo(np.int32).min] * 2])
    with pytest.raises(TypeError, match=r"`combiner`='mean' .*astype\(jnp.float32\)"):
        bag_sum(jnp.asarray(table), combiner="mean")
    float8 = jnp.asarray(table).astype(jnp.float8_e4m3fn)
    assert bag_sum(float8).dtype == float8.dtype
