"""Loops over blocks of rows: what all rows give at once, whatever their lengths.

All ways to sum rows of equal ids give the same bits; what is known of rows goes with them.
"""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from jmask._kernels import coalesce, tuning
from jmask._kernels.coalesce import summed_where_first
from jmask._kernels.gathered_rows import GATHERED, GatheredRows
from tests.compiled_step import compiled_step, temporary_bytes
from tests.optimizers import OPTIMIZERS
from tests.oracle import assert_close, is_row_sparse


def test_ids_of_64_bits():
    with jax.enable_x64(True):
        ids = jnp.array([2**40, 3, 2**40, -5, 2**50])
        ordered, entry = coalesce.in_order(ids)
        assert ordered.tolist() == [-5, 3, 2**40, 2**40, 2**50]
        assert entry.tolist() == [3, 1, 0, 2, 4]


def test_blocks_are_smaller_where_rows_are_longer():
    assert tuning.block_size(0) == tuning.block_size(256) == 4096
    assert tuning.block_size(2**14) == 512
    assert tuning.block_size(2**30) == 256


dense = functools.partial(jax.tree.map, jmask.todense, is_leaf=is_row_sparse)
summed = functools.partial(jax.tree.map, jmask.RowSparse.coalesce, is_leaf=is_row_sparse)
SIZES = {"a": (40, 30), "b": (40, 30), "c": (25, 9), "d": (7, 3), "e": (60, 60)}  # V, bags


def tables_and_ids(seed=0):
    rng = np.random.default_rng(seed)
    tables = {
        k: jnp.asarray(rng.normal(size=(v, 6)), jnp.float32) for k, (v, _) in SIZES.items()
    }
    ids = {k: jnp.asarray(rng.integers(-1, v, (b, 4))) for k, (v, b) in SIZES.items()}
    return tables, ids


def loss(tables, ids):
    """Bags of one table need those of another; one is read in two places."""
    bag = functools.partial(jmask.embedding_bag, padding_id=-1)
    bags = {k: bag(tables[k], ids[k]) for k in tables}
    again = bag(tables["a"] * 2, ids["a"] // (1 + 0 * ids["a"]))
    total = sum(jnp.sum(jnp.sin(x)) for x in bags.values()) + jnp.sum(again**2)
    scale = jnp.mean(bags["d"])
    # With a gradient of the weights the rows would be read for both, and no bag sum be left.
    weights = jax.lax.stop_gradient(jnp.full(ids["c"].shape, scale))
    return total + jnp.sum(bag(tables["c"], ids["c"], weights=weights) ** 2)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(tuning, "BLOCK_ROWS", (8, 8))
    monkeypatch.setattr(tuning, "SMALL_ROWS", 0)
    monkeypatch.setattr(tuning, "DENSE_ROWS_FOR_EACH_LOOKUP", 0)  # no table is updated whole


def test_gradients_of_several_tables(small_blocks):
    tables, ids = tables_and_ids()
    value, found = jax.jit(jmask.value_and_grad(loss))(tables, ids)
    expected_value, expected = jax.jit(jax.value_and_grad(loss))(tables, ids)
    assert np.isfinite(value)
    assert_close((value, dense(found)), (expected_value, expected), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled
@pytest.mark.dtype_promotion  # of optax
@pytest.mark.parametrize(
    "name", ["sgd", "adagrad", "rowwise adagrad", "optax.adam", "clipped optax.adagrad"]
)
def test_steps_are_those_of_each_table_alone(small_blocks, name):
    """What is known of the gradients' rows is known in the program that makes them."""
    tx, (tables, _) = OPTIMIZERS[name], tables_and_ids()

    def step(as_one, params, state, ids):
        gradient = jmask.grad(loss)(params, ids)
        return jmask.apply_gradients(tx, as_one(gradient), state, params)

    places = []
    for as_one in (lambda gradient: gradient, summed):
        run, params, state = jax.jit(functools.partial(step, as_one)), tables, tx.init(tables)
        for seed in range(3):
            params, state = run(params, state, tables_and_ids(seed)[1])
        places.append((params, state))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(places))
    assert_close(*places, rtol=1e-4, atol=1e-5)


def test_second_derivatives_and_vmap_of_several(small_blocks):
    tables, ids = tables_and_ids()

    def steepness(grad):
        def of(tables):
            found = dense(grad(loss)(tables, ids))
            return sum(jnp.sum(jnp.cos(x)) for x in found.values())

        return jax.jit(jax.grad(of))

    found, expected = steepness(jmask.grad)(tables), steepness(jax.grad)(tables)
    assert_close(found, expected, rtol=1e-3, atol=1e-3)
    both = jax.tree.map(lambda x: jnp.stack([x, -x]), tables)
    mapped = jax.jit(jax.vmap(lambda t: dense(jmask.grad(loss)(t, ids))))(both)
    alone = jax.jit(jax.grad(loss))(jax.tree.map(jnp.negative, tables), ids)
    assert_close(jax.tree.map(lambda x: x[1], mapped), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tx", [jmask.sgd(0.1), jmask.rowwise_adagrad(0.1), jmask.adam(0.1)])
def test_tables_are_updated_in_place(tx):
    rows, width = 10**6, 64
    tables = {k: jax.ShapeDtypeStruct((rows, width), jnp.float32) for k in "abc"}
    ids = {k: jax.ShapeDtypeStruct((6000, 5), jnp.int32) for k in "abc"}

    def squares(tables, ids):
        return sum(jnp.sum(jmask.embedding_bag(tables[k], ids[k]) ** 2) for k in tables)

    trained = jax.tree.leaves((tables, jax.eval_shape(tx.init, tables)))
    large = sum(4 * x.size for x in trained if x.size > 1)
    # Of the bags and their cotangents 1.5 MB each; all rows would be 23 MB.
    assert temporary_bytes(compiled_step(squares, tx, tables, ids), large) < 20e6


# --- rows of equal ids ----------------------------------------------------------------


@pytest.fixture(params=["cpu", "tpu", "cuda"])
def as_on(request, monkeypatch):
    """Each device sorts, numbers and sends back in a form of its own: all of them run here."""

    def chosen(*operands, default, **forms):
        return forms.get(request.param, default)(*operands)

    monkeypatch.setattr(coalesce.lax, "platform_dependent", chosen)


@pytest.mark.usefixtures("as_on")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("rows", "count", "row"),
    [(1000, 200, (3,)), (50, 7, (2, 2)), (10_000, 300, ()), (8, 1, (1,)), (200, 100, (4,))],
)
def test_rows_summed_into_slots(monkeypatch, rows, count, row, large, dtype):
    """Bit by bit as one after the other, in whatever form."""
    monkeypatch.setattr(tuning, "LARGE_SUMS", 0 if large else 2**24)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, rows, count)
    ids[: count // 2] = rng.integers(0, 5, count // 2)  # many that are equal
    ids[count // 2 :: 3] = rows  # and padding among them
    values = jnp.asarray(rng.normal(size=(count, *row)), dtype)
    slots = min(count, rows)
    summed = jax.jit(lambda *x: coalesce.coalesce_rows(*x, rows))
    unique, sums = summed(jnp.asarray(ids, jnp.int32), values)
    distinct = np.unique(ids[ids < rows])
    expected_ids = np.full(slots, rows)
    expected_ids[: len(distinct)] = distinct
    np.testing.assert_array_equal(unique, expected_ids)
    expected = np.zeros((slots, *row), np.float32)
    for i, value in zip(ids, np.asarray(values, np.float32), strict=True):
        if i < rows:
            expected[np.searchsorted(distinct, i)] += value
    np.testing.assert_array_equal(sums, np.asarray(jnp.asarray(expected).astype(dtype)))


@pytest.mark.usefixtures("as_on")
@pytest.mark.parametrize("count", [1, 2, 37, 400])
def test_slots_of_entries(count):
    rng, rows = np.random.default_rng(0), 3000
    ids = rng.integers(0, rows + 300, count).clip(0, rows)
    exists = ids < rows
    distinct = np.unique(ids[exists])
    slot_ids, slot = coalesce.unique_slots(jnp.asarray(ids, jnp.int32), count, rows)
    np.testing.assert_array_equal(slot_ids[: len(distinct)], distinct)
    assert (slot_ids[len(distinct) :] == rows).all()
    expected = np.where(exists, np.searchsorted(distinct, ids), count)
    np.testing.assert_array_equal(slot, expected)


D = 3


def noted(x):
    """The rows of a part as an array, of which it is known what makes it."""
    array = x.array()
    if isinstance(x, GatheredRows):
        GATHERED.note(array, x)
    return array


def test_facts_go_with_their_arrays():
    def trace(x):
        rows = noted(GatheredRows(x, jnp.array([0, 0, 1]), None, x.dtype))
        assert GATHERED.of(rows) is not None
        assert GATHERED.of(jax.tree.map(lambda leaf: leaf, [rows])[0]) is not None
        assert GATHERED.of(jax.jit(jnp.sin)(rows)) is None
        return rows

    before = len(GATHERED)
    jax.jit(trace)(jnp.ones((2, D)))
    gc.collect()
    assert len(GATHERED) <= before


# --- rows of equal ids summed into the first -----------------------------------------

V = 40


def tables_of(seed):
    """Several tables that differ in their rows, ids, dtypes and widths, with padding."""
    rng = np.random.default_rng(seed)
    for dtype, count, rows in (
        ("int32", 1, V),
        ("int32", 690, V),
        ("uint32", 260, 3),
        ("int16", 33, 10_000),
        ("int32", 12, 2**31 - 2),
    ):
        ids = rng.integers(max(rows - V, 0), rows + 1, count)
        values = rng.integers(-9, 9, (count, count % 3 + 1))
        yield (
            jnp.asarray(ids, dtype),
            jnp.asarray(values, "bfloat16" if seed % 2 else "float32"),
            rows,
        )


def check(ids, values, rows):
    summed = jax.jit(lambda *x: summed_where_first(*x, rows))
    unique, sums = summed(ids, values)
    assert unique.dtype == ids.dtype
    assert sums.dtype == values.dtype
    ids, values = np.asarray(ids), np.asarray(values, np.float64)
    _, first = np.unique(ids, return_index=True)
    is_first = np.isin(np.arange(ids.size), first) & (ids < rows)
    np.testing.assert_array_equal(unique, np.where(is_first, ids, rows))
    for i in np.flatnonzero(is_first):
        total = values[ids == ids[i]].sum(0)
        np.testing.assert_array_equal(sums[i], total.astype(sums.dtype))


@pytest.mark.parametrize("block", [1, 7, 256])
@pytest.mark.parametrize("seed", range(4))
def test_rows_summed_into_the_first(monkeypatch, seed, block):
    monkeypatch.setattr(tuning, "LATER_ROWS", block)
    for ids, values, rows in tables_of(seed):
        check(ids, values, rows)


def test_sums_are_in_order():
    """The first value is added to, in the order in which others came."""
    values = jnp.asarray([1e8, 3, -1e8, 5e8, 1e-3])[:, None]
    ids = jnp.asarray([7, 7, 7, 2, 7], jnp.int32)
    _, sums = summed_where_first(ids, values, V)
    expected = np.float32(0)
    for x in np.asarray(values)[[0, 1, 2, 4], 0]:
        expected += x
    assert sums[0, 0] == expected


def test_ids_of_64_bits_summed_into_the_first():
    with jax.enable_x64(True):
        ids = jnp.asarray([2**40, 5, 2**40 + 2**32, 5, 2**40, 2**41])
        check(ids, jnp.ones((6, 2), "float32"), 2**41)
