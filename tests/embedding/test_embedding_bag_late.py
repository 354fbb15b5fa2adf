"""`embedding_bag` of ids and weights of every dtype, what only a run can tell, and exports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import checkify

import jmask
from tests.embedding_oracle import CLOSE, COTANGENT, TABLE, B, D, L, V, normal
from tests.expressions import functions
from tests.oracle import dense_twin

# --- numbers of every dtype --------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
def test_narrow_integers(traced):
    """300 bags, counted by bytes."""
    table, number = normal(300, 2), 300
    ids, places = np.array([255, 3, 3], np.uint8), np.array([255, 0, 0], np.uint8)

    def run(ids, places):
        return jmask.embedding_bag(table, ids, segment_ids=places, num_segments=number)

    out = (jax.jit(run) if traced else run)(ids, places)
    expected = np.zeros((number, 2))
    expected[255], expected[0] = table[255], 2 * table[3]
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_wide_integers_never_wrap():
    beyond = 2**32 + 1
    options = {"segment_ids": [0, 0, -beyond], "num_segments": 2, "padding_id": beyond}
    out = jmask.embedding_bag(TABLE, [beyond, 1, 1], **options)
    np.testing.assert_array_equal(out, [TABLE[1], np.zeros(D)])


def test_a_bag_that_is_not_there():
    """Where it is known it is an error; traced it is padding."""
    bags = lambda places: jmask.embedding_bag(
        TABLE, [1, 2, 3], segment_ids=places, num_segments=2
    )
    places = np.array([0, 7, 1])
    with pytest.raises(ValueError, match=r"`segment_ids` hold 7.*`num_segments`=2"):
        bags(places)
    np.testing.assert_array_equal(jax.jit(bags)(places), TABLE[[1, 3]])
    np.testing.assert_array_equal(bags(np.array([0, 2, 1])), TABLE[[1, 3]])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, np.float64])
def test_weights_of_every_dtype(dtype):
    weights = np.array([[0.5, 2]], dtype)
    out = jmask.embedding_bag(TABLE, [[0, 1]], weights=weights)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out[0], TABLE[0] / 2 + TABLE[1] * 2)


# --- what only a run can tell ------------------------------------------------------------


@pytest.mark.parametrize(
    ("offsets", "last", "valid"),
    [
        ([0, 2, 2], False, True),
        ([0, 2, 4], False, True),
        ([1, 2, 3], False, False),
        ([0, 3, 2], False, False),
        ([0, 2, 5], False, False),
        ([-1, 2, 3], False, False),
        ([0, 1, 3], True, True),
        ([0, 1, 5], True, False),
    ],
)
def test_traced_offsets(offsets, last, valid):
    """Bags that are not well formed are nan where an error is not possible."""
    run = lambda o: jmask.embedding_bag(
        TABLE, [0, 1, 3, 4], offsets=o, include_last_offset=last
    )
    out = jax.jit(run)(np.array(offsets))
    if valid:
        np.testing.assert_array_equal(out, run(offsets))
    else:
        assert np.isnan(out).all()
        with pytest.raises(ValueError, match="`offsets`"):
            run(offsets)


def test_raise_under_checkify():
    """An id outside that is padding, or in no bag, is no error; any other is left out."""

    def run(ids, places, table=TABLE):
        return jmask.embedding_bag(
            table,
            ids,
            segment_ids=places,
            num_segments=2,
            combiner="mean",
            padding_id=-1,
            mode="raise",
        )

    checked = checkify.checkify(jax.jit(run))
    ids, places = np.array([-1, 2, 77, 4]), np.array([0, 0, 2, 1])
    error, out = checked(ids, places)
    assert error.get() is None
    np.testing.assert_array_equal(out, TABLE[[2, 4]])
    np.testing.assert_array_equal(run(ids, places), out)
    places[2] = 1
    error, out = checked(ids, places)
    assert "`ids[2]` is 77, which is no row of the table of shape (6, 3)" in error.get()
    np.testing.assert_array_equal(out, TABLE[[2, 4]])
    for function in (run, lambda *args: jmask.grad(lambda t: jnp.sum(run(*args, t)))(TABLE)):
        with pytest.raises(IndexError, match=r"`ids\[2\]` is 77"):
            function(ids, places)
    # Concrete ids, of which it depends on traced numbers whether they are looked up.
    late = checkify.checkify(jax.jit(lambda places: run([-1, 2, 2**40, 4], places)))
    assert late(np.array([0, 0, 2, 1]))[0].get() is None
    assert "`ids[2]` is" in late(places)[0].get()


def test_number_of_segments():
    out = jmask.embedding_bag(TABLE, [0, 1, 4], segment_ids=[2, 0, 2])
    np.testing.assert_array_equal(out, [TABLE[1], np.zeros(D), TABLE[0] + TABLE[4]])


@pytest.mark.parametrize(
    ("combiner", "program"), [("sqrtn", "scan"), ("max", "scan"), ("mean", "remat")]
)
def test_row_sparse_inside(combiner, program):
    ids = np.random.default_rng(0).integers(0, V, (2, B, L))
    loss = lambda t, ids: jnp.sum(
        jmask.embedding_bag(t, ids, combiner=combiner, padding_id=0) * COTANGENT
    )
    if program == "scan":
        whole = lambda t: jax.lax.scan(lambda c, i: (c + loss(t, i), None), 0.0, ids)[0]
    else:
        again = jax.checkpoint(loss)
        whole = lambda t: again(t, ids[0]) + again(t, ids[1])
    with jmask.strict():
        gradient = jax.jit(jmask.grad(whole))(TABLE)
    expected = sum(jax.grad(loss)(TABLE, i) for i in ids)
    np.testing.assert_allclose(dense_twin(gradient), expected, **CLOSE)


# --- models exported for any size of the batch ----------------------------------------

NINE_ROWS = jnp.asarray(np.random.default_rng(0).normal(size=(9, 3)), jnp.float32)
MANY_IDS = np.random.default_rng(1).integers(-1, 10, (5000, 2)).astype(np.int32)

SGD = jmask.sgd(0.1)
MODELS = functions("t, ids", {**vars(jmask), **globals()})("""
    embedding_lookup(t, ids); embedding_lookup(t, ids, max_norm=1.0);
    embedding_lookup(t, ids, mode="clip"); PackedTable.pack(t)[ids]; embedding_bag(t, ids);
    embedding_bag(t, ids, combiner="mean", padding_id=-1);
    embedding_bag(t, ids, combiner="sqrtn", weights=ids.astype(np.float32));
    embedding_bag(t, ids, combiner="max", padding_id=-1);
    embedding_bag(t, ids[:, 0], segment_ids=ids[:, 1], num_segments=9, mode="zero");
    grad(lambda t: jnp.sum(jnp.tanh(t[ids])))(t).values;
    grad(lambda t: jnp.sum(embedding_bag(t, ids) ** 2))(t).values;
    apply_gradients(SGD, grad(lambda t: jnp.sum(t[ids] ** 3))(t), SGD.init(t), t)[0]
""")


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_any_batch(name):
    model = MODELS[name]
    ids = jax.ShapeDtypeStruct(export.symbolic_shape("b, 2"), np.int32)
    exported = export.export(jax.jit(model))(NINE_ROWS, ids)
    for size in (3, 5000):  # rows of many bags are summed in blocks where the size is known
        result = exported.call(NINE_ROWS, MANY_IDS[:size])
        np.testing.assert_allclose(
            result, model(NINE_ROWS, MANY_IDS[:size]), rtol=1e-4, atol=1e-4
        )
