"""`embedding_bag` of ids and weights of every dtype, what only a run can tell, and exports.

And `pad_bags`: the bags are those that were given, and their sizes are few.
"""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export
from jax.experimental import checkify

import jmask
from tests.embedding.test_embedding_bag import TABLE, D
from tests.embedding_oracle import combined, normal, table_gradient
from tests.expressions import functions
from tests.oracle import dense_twin

# --- numbers of every dtype --------------------------------------------------------------


FAR, T = 2**32 + 1, TABLE
MANY = normal(300, 2)
u8 = lambda *numbers: np.array(numbers, np.uint8)
weighted = lambda dtype: jmask.embedding_bag(T, [[0, 1]], weights=np.array([[0.5, 2]], dtype))
segments = lambda ids, places, number=None, table=T, **options: jmask.embedding_bag(
    table, ids, segment_ids=places, num_segments=number, **options
)
# Calls, and their bags by number: those that are not named are empty.
CALLS = functions("", globals())("""
    (segments(u8(255, 3, 3), u8(255, 0, 0), 300, MANY), {255: MANY[255], 0: 2 * MANY[3]});
    (segments([FAR, 1, 1], [0, 0, -FAR], 2, padding_id=FAR), {0: T[1]});
    (segments([1, 2, 3], [0, 2, 1], 2), {0: T[1], 1: T[3]});
    (jax.jit(segments, static_argnums=2)(u8(0, 1, 2), u8(0, 7, 1), 2), {0: T[0], 1: T[2]});
    (segments([0, 1, 4], [2, 0, 2]), {0: T[1], 2: T[0] + T[4]});
    (weighted(jnp.float16), {0: T[0] / 2 + T[1] * 2});
    (weighted(jnp.bfloat16), {0: T[0] / 2 + T[1] * 2});
    (weighted(np.float64), {0: T[0] / 2 + T[1] * 2})
""")


@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_every_dtype(name):
    """They never wrap; of segments that are no bag, traced ones are padding."""
    found, bags = CALLS[name]()
    expected = np.zeros(found.shape)
    for number, row in bags.items():
        expected[number] = row
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_bag_that_is_not_there():
    with pytest.raises(ValueError, match=r"`segment_ids` hold 7.*`num_segments`=2"):
        segments([1, 2, 3], np.array([0, 7, 1]), 2)


# --- what only a run can tell ------------------------------------------------------------


# Offsets of bags of 4 ids, and whether they are well formed; and with the last one.
OFFSETS = """0 2 2|ok; 0 2 4|ok; 1 2 3|; 0 3 2|; 0 2 5|; -1 2 3|; 0 1 3|ok last; 0 1 5|last"""


@pytest.mark.parametrize("row", OFFSETS.split("; "))
def test_traced_offsets(row):
    """Bags that are not well formed are nan where an error is not possible."""
    offsets, _, how = row.partition("|")
    offsets = np.array(offsets.split(), int)
    run = lambda o: jmask.embedding_bag(
        TABLE, [0, 1, 3, 4], offsets=o, include_last_offset="last" in how
    )
    out = jax.jit(run)(offsets)
    if "ok" in how:
        np.testing.assert_array_equal(out, run(offsets))
        return
    assert np.isnan(out).all()
    with pytest.raises(ValueError, match="`offsets`"):
        run(offsets)


def test_raise_under_checkify():
    """An id outside that is padding, or in no bag, is no error; any other is left out."""
    how = {"num_segments": 2, "combiner": "mean", "padding_id": -1, "mode": "raise"}

    def run(ids, places, table=TABLE):
        return jmask.embedding_bag(table, ids, segment_ids=places, **how)

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


# --- models exported for any size of the batch ----------------------------------------

NINE_ROWS = jnp.asarray(np.random.default_rng(0).normal(size=(9, 3)), jnp.float32)
MANY_IDS = np.random.default_rng(1).integers(-1, 10, (5000, 2)).astype(np.int32)


def stepped(tx, t, ids, two_steps=False):
    """A table of many rows after a training step."""
    t = jnp.tile(t, (1000, 1))
    gradient, state = jmask.grad(lambda t: jnp.sum(jnp.tanh(t[ids])))(t), tx.init(t)
    if two_steps:
        return optax.apply_updates(t, tx.update(gradient, state, t)[0])
    return jmask.apply_gradients(tx, gradient, state, t)[0]


SGD = jmask.sgd(0.1)
MODELS = functions("t, ids", {**vars(jmask), **globals()})("""
    embedding_lookup(t, ids); embedding_lookup(t, ids, max_norm=1.0);
    embedding_lookup(t, ids, mode="clip"); embedding_bag(t, ids);
    embedding_lookup(packed(t), ids, width=t.shape[1]);
    embedding_bag(t, ids, combiner="mean", padding_id=-1);
    embedding_bag(t, ids, combiner="sqrtn", weights=ids.astype(np.float32));
    embedding_bag(t, ids, combiner="max", padding_id=-1);
    embedding_bag(t, ids[:, 0], segment_ids=ids[:, 1], num_segments=9, mode="zero");
    grad(lambda t: jnp.sum(jnp.tanh(t[ids])))(t).values;
    grad(lambda t: jnp.sum(jnp.tanh(t[ids])))(jnp.tile(t, (1000, 1))).values;
    grad(lambda t: jnp.sum(jnp.cos(t.sum(1)[ids])))(jnp.tile(t, (1000, 1))).values;
    grad(lambda t: jnp.sum(embedding_bag(t, ids) ** 2))(t).values;
    apply_gradients(SGD, grad(lambda t: jnp.sum(t[ids] ** 3))(t), SGD.init(t), t)[0];
    stepped(adam(), t, ids); stepped(rowwise_adagrad(0.1), t, ids); stepped(adamw(0.1), t, ids);
    stepped(SGD, t, ids, True); stepped(adam(), t, ids, True);
    stepped(lazy(optax.rmsprop(0.1)), t, ids); stepped(lazy(optax.lion(0.1)), t, ids, True)
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


def test_any_width():
    exported = export.export(jax.jit(jmask.embedding_bag))(
        jax.ShapeDtypeStruct(export.symbolic_shape("9, d"), np.float32), MANY_IDS
    )
    expected = jmask.embedding_bag(NINE_ROWS, MANY_IDS)
    np.testing.assert_allclose(exported.call(NINE_ROWS, MANY_IDS), expected, rtol=1e-6)


# --- padded bags ------------------------------------------------------------------------


ROWS = 7
NUMBERS = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, D)), jnp.float32)
BAGS = st.lists(st.lists(st.integers(0, ROWS - 1), max_size=5), max_size=6)
weights_of = lambda bags: [[0.5 * (i + 1) for i in range(len(bag))] for bag in bags]


def flat(bags):
    """Ids and offsets as torch has them."""
    ids = np.concatenate([np.zeros(0, np.int64), *map(np.asarray, bags)]).astype(np.int64)
    return ids, np.cumsum([0, *map(len, bags)])


@settings(max_examples=10)  # each of its shapes is compiled
@given(BAGS, st.booleans(), st.sampled_from(["lists", "arrays", "offsets", "last offset"]))
def test_same_bags(bags, weighted, form):
    weights, (ids, offsets) = weights_of(bags) if weighted else None, flat(bags)
    of_entries = np.concatenate([np.zeros(0), *weights]) if weighted else np.ones(len(ids))
    if form in ("lists", "arrays"):
        given = bags if form == "lists" else [np.asarray(bag, np.int32) for bag in bags]
        padded = jmask.pad_bags(given, weights=weights)
    else:
        if form == "offsets" and not bags:  # no offsets say nothing
            return
        padded = jmask.pad_bags(
            ids,
            offsets if form == "last offset" else offsets[:-1],
            include_last_offset=form == "last offset",
            weights=of_entries if weighted else None,
        )
    bag, cotangent = np.repeat(np.arange(len(bags)), np.diff(offsets)), np.ones((len(bags), D))
    expected = combined(np.asarray(NUMBERS)[ids], bag, of_entries, "sum", cotangent)
    result = jmask.embedding_bag(NUMBERS, padded)
    np.testing.assert_allclose(result, expected.out, atol=1e-5)
    gradient = jmask.grad(lambda t: jnp.sum(jmask.embedding_bag(t, padded)))(NUMBERS)
    in_table = table_gradient(expected.in_rows, ids, ROWS)
    np.testing.assert_allclose(dense_twin(gradient), in_table, atol=1e-5)


def test_a_run_compiles_a_handful_of_times():
    traced = []

    @jax.jit
    def step(table, bags):
        traced.append(bags.ids.shape)
        return jmask.embedding_bag(table, bags)

    rng = np.random.default_rng(0)
    for count in range(100, 10_000, 301):
        offsets = np.sort(rng.integers(0, count, 15))
        bags = jmask.pad_bags(rng.integers(0, ROWS, count), [0, *offsets])
        assert count <= bags.ids.size <= 1.42 * count
        step(NUMBERS, bags)
    assert len(traced) == len(set(traced)) <= 14


@pytest.mark.parametrize("form", ["lists", "offsets"])
@pytest.mark.parametrize("weighted", [False, True])
def test_several_tables_of_one_size(form, weighted):
    tables = {"a": [[0, 1], [2]], "b": [[3], [4, 5, 6, 0, 1]], "none": []}
    weights = {name: weights_of(bags) if weighted else None for name, bags in tables.items()}
    alone = {k: jmask.pad_bags(x, at_least=6, weights=weights[k]) for k, x in tables.items()}
    arguments = (tables,)
    if form == "offsets":
        arguments = [{k: flat(bags)[i] for k, bags in tables.items()} for i in (0, 1)]
        if weighted:
            weights = {k: np.concatenate([np.zeros(0), *x]) for k, x in weights.items()}
    last, weights = form == "offsets", weights if weighted else None
    together = jmask.pad_bags(*arguments, include_last_offset=last, weights=weights)
    assert jax.tree.structure(together) == jax.tree.structure(alone)
    jax.tree.map(np.testing.assert_array_equal, together, alone)
    assert together["a"].ids.size == 6
    assert jmask.pad_bags({}) == {}


def in_the_program(bags):
    def looked_up(table, bags):
        return jmask.value_and_grad(lambda t: jnp.sum(jmask.embedding_bag(t, bags) ** 2))(table)

    return jax.jit(looked_up).lower(NUMBERS, bags).as_text()


@pytest.mark.of_cpus
def test_the_bag_of_each_entry_is_found_on_the_host():
    """And in the program where bags are made by hand, or changed."""
    padded = jmask.pad_bags([[2, 0], [], [1, 1, 3]], num_bags=4)
    np.testing.assert_array_equal(padded.bag_of_entry, [0, 0, 2, 2, 2, 4])
    again = jax.tree.map(jnp.asarray, padded)
    np.testing.assert_array_equal(again.bag_of_entry, padded.bag_of_entry)
    assert padded == padded != again  # by identity: equal arrays are no boolean
    by_hand = jmask.PaddedBags(padded.ids, padded.offsets)
    changed = dataclasses.replace(padded, offsets=np.array([0, 1, 2, 5, 5]))
    assert by_hand.bag_of_entry is None is changed.bag_of_entry
    summed_up = [jax.jit(jmask.embedding_bag)(NUMBERS, bags) for bags in (padded, by_hand)]
    np.testing.assert_array_equal(*summed_up)
    counts = jmask.embedding_bag(jnp.ones(ROWS), changed)
    np.testing.assert_array_equal(counts, [1, 1, 3, 0])
    assert "reduce_window" not in in_the_program(padded)
    assert "reduce_window" in in_the_program(by_hand)


def test_batches_of_bags():
    batches = [[[2, 0], [1]], [[3], [], [4]]]
    padded = [jmask.pad_bags(bags, num_bags=3, at_least=3) for bags in batches]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *padded)
    found = jax.vmap(lambda bags: jmask.embedding_bag(NUMBERS, bags))(stacked)
    expected = [jmask.embedding_bag(NUMBERS, bags) for bags in padded]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_ids_keep_their_numbers():
    assert jmask.pad_bags(np.array([5], np.int64), [0]).ids.dtype == np.int32
    # Under jit JAX would take the lower 32 bits, which may be a row.
    wide = np.array([2**32 + 1, -(2**40), 3], np.int64)
    assert jmask.pad_bags(wide, [0]).ids.tolist() == [2**31 - 1, -(2**31), 3]
    bags, table = jmask.pad_bags(wide, [0, 1, 2]), jnp.arange(4.0)
    result = jax.jit(lambda bags: jmask.embedding_bag(table, bags, mode="zero"))(bags)
    np.testing.assert_array_equal(result, [0, 0, 3])
    with jax.enable_x64(True):
        assert jmask.pad_bags(wide, [0]).ids.tolist() == wide.tolist()
    padded = jmask.pad_bags(np.array([255, 1, 2, 3, 4], np.uint8), [0])
    assert padded.ids.tolist() == [255, 1, 2, 3, 4, -1]


def test_a_new_size_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, "jmask"):
        for _ in range(3):
            jmask.pad_bags([[1] * 3001], num_bags=17)
    (record,) = caplog.records
    assert record.getMessage() == (
        "pad_bags: room for 4096 ids in 17 bags. A step is compiled for it."
    )
