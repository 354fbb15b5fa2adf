"""`pad_bags`: the bags are those that were given, and their sizes are few."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jmask

V, D = 7, 3
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
BAGS = st.lists(st.lists(st.integers(0, V - 1), max_size=5), max_size=6)


def flat(bags):
    """Ids and offsets as torch has them."""
    ids = np.concatenate([np.zeros(0, np.int64), *map(np.asarray, bags)]).astype(np.int64)
    return ids, np.cumsum([0, *map(len, bags)])


def weights_of(bags):
    return [[0.5 * (i + 1) for i in range(len(bag))] for bag in bags]


def summed(bags, weights):
    """A model: the sum of each bag."""
    table = np.asarray(TABLE, np.float64)
    return [
        sum((w * table[i] for i, w in zip(*pair, strict=True)), np.zeros(D))
        for pair in zip(bags, weights, strict=True)
    ]


@settings(max_examples=10)  # each of its shapes is compiled
@given(BAGS, st.booleans(), st.sampled_from(["lists", "arrays", "offsets", "last offset"]))
def test_same_bags(bags, weighted, form):
    weights = weights_of(bags) if weighted else None
    if form == "lists":
        padded = jmask.pad_bags(bags, weights=weights)
    elif form == "arrays":
        arrays = [np.asarray(bag, np.int32) for bag in bags]
        padded = jmask.pad_bags(arrays, weights=weights)
    else:
        ids, offsets = flat(bags)
        given_weights = None if weights is None else np.concatenate([np.zeros(0), *weights])
        last = form == "last offset"
        if not last and not bags:
            return  # no offsets say nothing
        padded = jmask.pad_bags(
            ids,
            offsets if last else offsets[:-1],
            include_last_offset=last,
            weights=given_weights,
        )
    ones = [[1.0] * len(bag) for bag in bags]
    expected = summed(bags, weights or ones)
    result = jmask.embedding_bag(TABLE, padded)
    assert result.shape == (len(bags), D)
    np.testing.assert_allclose(result, np.reshape(expected, (len(bags), D)), atol=1e-5)
    gradient = jmask.grad(lambda t: jnp.sum(jmask.embedding_bag(t, padded)))(TABLE)
    assert isinstance(gradient, jmask.RowSparse)
    counts = np.zeros(V)
    for bag, of_bag in zip(bags, weights or ones, strict=True):
        np.add.at(counts, np.asarray(bag, int), of_bag)
    np.testing.assert_allclose(gradient.todense()[:, 0], counts, atol=1e-5)


def test_a_run_compiles_a_handful_of_times():
    traced = []

    @jax.jit
    def step(table, bags):
        traced.append(bags.ids.shape)
        return jmask.embedding_bag(table, bags)

    rng = np.random.default_rng(0)
    for count in range(100, 10_000, 301):
        offsets = np.sort(rng.integers(0, count, 15))
        bags = jmask.pad_bags(rng.integers(0, V, count), [0, *offsets])
        assert count <= bags.ids.size <= 1.42 * count
        step(TABLE, bags)
    assert len(traced) == len(set(traced)) <= 14


@pytest.mark.parametrize("form", ["lists", "offsets"])
@pytest.mark.parametrize("weighted", [False, True])
def test_several_tables_of_one_size(form, weighted):
    tables = {"a": [[0, 1], [2]], "b": [[3], [4, 5, 6, 0, 1]], "none": []}
    weights = {name: weights_of(bags) for name, bags in tables.items()} if weighted else None
    arguments = (tables,)
    if form == "offsets":
        ids, offsets = ({k: flat(bags)[i] for k, bags in tables.items()} for i in (0, 1))
        arguments = (ids, offsets)
        if weighted:
            weights = {k: np.concatenate([np.zeros(0), *x]) for k, x in weights.items()}
    last = form == "offsets"
    padded = jmask.pad_bags(*arguments, include_last_offset=last, weights=weights)
    for name, bags in tables.items():
        of_one = jmask.pad_bags(
            bags, at_least=6, weights=weights_of(bags) if weighted else None
        )
        assert padded[name].ids.size == 6
        for x, y in zip(jax.tree.leaves(padded[name]), jax.tree.leaves(of_one), strict=True):
            np.testing.assert_array_equal(x, y)
    assert jmask.pad_bags({}) == {}


def in_the_program(bags):
    def looked_up(table, bags):
        return jmask.value_and_grad(lambda t: jnp.sum(jmask.embedding_bag(t, bags) ** 2))(table)

    return jax.jit(looked_up).lower(TABLE, bags).as_text()


@pytest.mark.of_cpus
def test_the_bag_of_each_entry_is_found_on_the_host():
    """And in the program where bags are made by hand, or changed."""
    padded = jmask.pad_bags([[2, 0], [], [1, 1, 3]], num_bags=4)
    np.testing.assert_array_equal(padded.bag_of_entry, [0, 0, 2, 2, 2, 4])
    again = jax.tree.map(jnp.asarray, padded)
    np.testing.assert_array_equal(again.bag_of_entry, padded.bag_of_entry)
    by_hand = jmask.PaddedBags(padded.ids, padded.offsets)
    changed = dataclasses.replace(padded, offsets=np.array([0, 1, 2, 5, 5]))
    assert by_hand.bag_of_entry is None is changed.bag_of_entry
    summed_up = [jax.jit(jmask.embedding_bag)(TABLE, bags) for bags in (padded, by_hand)]
    np.testing.assert_array_equal(*summed_up)
    counts = jmask.embedding_bag(jnp.ones(V), changed)
    np.testing.assert_array_equal(counts, [1, 1, 3, 0])
    assert "reduce_window" not in in_the_program(padded)
    assert "reduce_window" in in_the_program(by_hand)


def test_batches_of_bags():
    batches = [
        jmask.pad_bags(x, num_bags=3, at_least=3) for x in ([[2, 0], [1]], [[3], [], [4]])
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    found = jax.vmap(lambda bags: jmask.embedding_bag(TABLE, bags))(stacked)
    for one, bags in zip(found, batches, strict=True):
        np.testing.assert_allclose(one, jmask.embedding_bag(TABLE, bags), rtol=1e-6)


def test_ids_keep_their_numbers():
    assert jmask.pad_bags(np.array([5], np.int64), [0]).ids.dtype == np.int32
    assert jmask.pad_bags(np.array([2**40], np.int64), [0]).ids.tolist() == [2**40]
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
