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
from jmask._kernels.coalesce import summed_by_hashing, summed_where_first
from jmask._kernels.gathered_rows import GATHERED, GatheredRows
from tests.compiled_step import compiled_step, temporary_bytes
from tests.optimizers import OPTIMIZERS
from tests.oracle import assert_close, is_row_sparse


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


@pytest.fixture(params=[1, 3])
def small_blocks(request, monkeypatch):
    monkeypatch.setattr(tuning, "LOOPS_TOGETHER", request.param)
    monkeypatch.setattr(tuning, "BLOCK_ROWS", (8, 8))
    monkeypatch.setattr(tuning, "SMALL_ROWS", 0)
    monkeypatch.setattr(tuning, "DENSE_ROWS_FOR_EACH_LOOKUP", 0)  # no table is updated whole


def test_gradients_of_several_tables(small_blocks):
    """And second derivatives, and those of several of each."""
    tables, ids = tables_and_ids()
    value, found = jax.jit(jmask.value_and_grad(loss))(tables, ids)
    expected = jax.jit(jax.value_and_grad(loss))(tables, ids)
    assert_close((value, dense(found)), expected, rtol=1e-4, atol=1e-4)
    both = jax.tree.map(lambda x: jnp.stack([-x, x]), tables)
    mapped = jax.jit(jax.vmap(lambda t: dense(jmask.grad(loss)(t, ids))))(both)
    assert_close(jax.tree.map(lambda x: x[1], mapped), expected[1], rtol=1e-4, atol=1e-4)

    def steepness(grad):
        of_gradient = lambda t: sum(
            jnp.sum(jnp.cos(x)) for x in dense(grad(loss)(t, ids)).values()
        )
        return jax.jit(jax.grad(of_gradient))(tables)

    assert_close(steepness(jmask.grad), steepness(jax.grad), rtol=1e-3, atol=1e-3)


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


def test_blocks_of_several_tables_are_one_equation(small_blocks):
    (tables, ids), tx = tables_and_ids(), jmask.adam(0.1)
    bag = functools.partial(jmask.embedding_bag, padding_id=-1)
    squares = lambda tables: sum(jnp.sum(bag(x, ids[k]) ** 2) for k, x in tables.items())
    step = lambda x, state: jmask.apply_gradients(tx, jmask.grad(squares)(x), state, x)
    program = str(jax.make_jaxpr(step)(tables, tx.init(tables)))
    assert program.count("jmask_update_rows[") == 1


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


def test_facts_go_with_their_arrays():
    """What is known of the rows of an array is forgotten with it, and is not of another's."""

    def trace(x):
        known = GatheredRows(x, jnp.array([0, 0, 1]), None, x.dtype)
        rows = known.array()
        GATHERED.note(rows, known)
        assert GATHERED.of(jax.tree.map(lambda leaf: leaf, [rows])[0]) is not None
        assert GATHERED.of(jax.jit(jnp.sin)(rows)) is None
        return rows

    before = len(GATHERED)
    jax.jit(trace)(jnp.ones((2, 3)))
    gc.collect()
    assert len(GATHERED) <= before


# --- rows of equal ids ----------------------------------------------------------------

# How many rows a table has, how many ids, and the shape of a row.
BATCHES = [(1000, 200, (3,)), (50, 7, (2, 2)), (10_000, 300, ()), (8, 1, (1,)), (3, 260, (2,))]
BATCHES += [(3000, 690, (1,)), (2**31 - 2, 12, (2,))]


def batch(rows, count, row, dtype):
    """Ids of the last rows, many of them equal and some of them padding, and values."""
    rng = np.random.default_rng(count)
    ids = rng.integers(max(rows - 3000, 0), rows, count)
    ids[: count // 2] = rng.integers(max(rows - 5, 0), rows, count // 2)
    ids[count // 2 + 1 :: 3] = rows
    return ids, jnp.asarray(rng.normal(size=(count, *row)), dtype)


def sums_in_order(ids, values, rows):
    """For each id, in its order, the float32 sum of its values one after the other."""
    sums = {i: np.zeros(values.shape[1:], np.float32) for i in np.unique(ids) if i < rows}
    for i, value in zip(ids.tolist(), np.asarray(values, np.float32), strict=True):
        if i < rows:
            sums[i] += value
    as_given = lambda x: np.asarray(jnp.asarray(x).astype(values.dtype))
    return {i: as_given(x) for i, x in sums.items()}


@pytest.fixture(params=["cpu", "tpu", "cuda"])
def as_on(request, monkeypatch):
    """Each device sorts, numbers and sends back in a form of its own: all of them run here."""

    def chosen(*operands, default, **forms):
        return forms.get(request.param, default)(*operands)

    monkeypatch.setattr(coalesce.lax, "platform_dependent", chosen)


@pytest.mark.usefixtures("as_on")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_summed_into_slots(dtype):
    """Bit by bit as one after the other, in whatever form; and the slot of each id."""
    for rows, count, row in BATCHES:
        ids, values = batch(rows, count, row, dtype)
        expected = sums_in_order(ids, values, rows)
        slots = min(count, rows)
        summed = jax.jit(lambda *x, rows=rows: coalesce.coalesce_rows(*x, rows))
        unique, sums = summed(jnp.asarray(ids, jnp.int32), values)
        padding = [rows] * (slots - len(expected))
        assert unique.tolist() == [*expected, *padding]
        for found, total in zip(sums[: len(expected)], expected.values(), strict=True):
            np.testing.assert_array_equal(found, total)
        assert not sums[len(expected) :].any()
        slot_ids, slot = coalesce.unique_slots(jnp.asarray(ids, jnp.int32), count, rows)
        assert slot_ids.tolist() == [*expected, *[rows] * (count - len(expected))]
        number = {i: k for k, i in enumerate(expected)}
        assert slot.tolist() == [number.get(i, count) for i in ids.tolist()]


def check_the_first(way, ids, values, rows):
    unique, sums = jax.jit(lambda *x: way(*x, rows))(ids, values)
    assert (unique.dtype, sums.dtype) == (ids.dtype, values.dtype)
    ids = np.asarray(ids)
    expected = sums_in_order(ids, values, rows)
    _, first = np.unique(ids, return_index=True)
    is_first = np.isin(np.arange(ids.size), first) & (ids < rows)
    np.testing.assert_array_equal(unique, np.where(is_first, ids, rows))
    for k in np.flatnonzero(is_first):
        np.testing.assert_array_equal(sums[k], expected[ids[k]])


def check_ids_of_each_dtype(way, dtype):
    for rows, count, row in BATCHES:
        ids, values = batch(rows, count, row, dtype)
        for kind in ("int16", "uint32", "int32"):
            if rows <= np.iinfo(kind).max:
                check_the_first(way, jnp.asarray(ids, kind), values, rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [1, 7, 256])
def test_rows_summed_into_the_first(monkeypatch, block, dtype):
    """The first value is added to, in the order in which others came; ids of each dtype."""
    monkeypatch.setattr(tuning, "LATER_ROWS", block)
    check_ids_of_each_dtype(summed_where_first, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("buckets", [1, 4])
@pytest.mark.parametrize("block", [1, 7, 4096])
def test_rows_summed_by_hashing(monkeypatch, buckets, block, dtype):
    monkeypatch.setattr(tuning, "HASH_BUCKETS", buckets)
    monkeypatch.setattr(tuning, "BLOCK_ROWS", (1, block))
    # Its trace is kept, with the numbers of the case before.
    summed_by_hashing.clear_cache()
    check_ids_of_each_dtype(summed_by_hashing, dtype)
    summed_by_hashing.clear_cache()


def test_ids_of_64_bits():
    with jax.enable_x64(True):
        ids = jnp.array([2**40, 3, 2**40, -5, 2**50])
        ordered, entry = coalesce.in_order(ids)
        assert ordered.tolist() == [-5, 3, 2**40, 2**40, 2**50]
        assert entry.tolist() == [3, 1, 0, 2, 4]
        ids = jnp.asarray([2**40, 5, 2**40 + 2**32, 5, 2**40, 2**41])
        for way in (summed_where_first, summed_by_hashing):
            check_the_first(way, ids, jnp.ones((6, 2), "float32"), 2**41)
