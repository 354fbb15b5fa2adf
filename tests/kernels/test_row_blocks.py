"""Rows of equal ids in blocks: exactly what sorting and summing all of them gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmask._kernels import row_blocks, tuning
from jmask._kernels.coalesce import coalesce_rows
from jmask._kernels.gathered_rows import GatheredRows
from jmask._kernels.row_blocks import run_side_by_side, sums_in_blocks
from jmask._kernels.update_rows import RowUpdate, Update, add_to_rows, updated

V, M = 12, 4


def entries(seed, count, row=(2,), dtype=jnp.float32, weighted=False):
    """Ids of which one is padding, and factored rows of which one is zeros."""
    rng = np.random.default_rng(seed)
    source = jnp.asarray(rng.normal(size=(M, *row)), dtype)
    index = jnp.asarray(rng.integers(0, M + 1, count), jnp.int32)
    weight = jnp.asarray(rng.normal(size=count), dtype) if weighted else None
    ids = jnp.asarray(rng.integers(0, V + 1, count), jnp.int32)
    return ids, GatheredRows(source, index, weight, jnp.dtype(dtype))


def model(rows):
    """The rows in float64, one by one."""
    source = np.concatenate([rows.source, np.zeros((1, *rows.source.shape[1:]))], dtype=float)
    weight = np.ones(rows.index.shape) if rows.weight is None else np.float64(rows.weight)
    return np.stack([source[i] * w for i, w in zip(rows.index, weight, strict=True)])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("row", [(), (3,), (2, 2)])
def test_the_rows_that_factors_stand_for(row, weighted):
    _, rows = entries(0, 9, row, weighted=weighted)
    np.testing.assert_allclose(rows.array(), model(rows), rtol=1e-6)
    np.testing.assert_array_equal(rows.take(jnp.array([3, 0])), rows.array()[jnp.array([3, 0])])
    np.testing.assert_allclose(
        rows.scaled(lambda x: -2 * x).array(), -2 * model(rows), rtol=1e-6
    )


def seen(tables, ids, rows):
    """Sets the rows, counts how often each is set, and where padding begins."""
    table, times = tables
    return [table.at[ids].set(rows, mode="drop"), times.at[ids].add(1, mode="drop")]


@functools.partial(jax.jit, static_argnums=3)
def summed(start, ids, rows, size):
    (found,) = run_side_by_side([sums_in_blocks(seen, start, ids, rows, size)])
    return found


COUNTS_AND_SIZES = [(1, 3), (6, 6), (14, 7), (20, 1), (20, 3)]


@pytest.mark.of_cpus
@given(
    seed=st.integers(0, 10**6),
    count_and_size=st.sampled_from(COUNTS_AND_SIZES),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_every_id_once_with_its_sum(seed, count_and_size, dtype):
    count, size = count_and_size
    ids, rows = entries(seed, count, dtype=dtype)
    start = [jnp.zeros((V, 2), dtype), jnp.zeros(V, jnp.int32)]
    table, times = summed(start, ids, rows, size)
    expected = start[0].at[coalesce_rows(ids, rows.array(), V)[0]]
    expected = expected.set(coalesce_rows(ids, rows.array(), V)[1], mode="drop")
    np.testing.assert_array_equal(times, np.bincount(ids, minlength=V + 1)[:V] > 0)
    # In the same order, so to the last bit.
    np.testing.assert_array_equal(table, expected)


def test_ids_of_blocks_are_sorted_and_each_comes_once():
    ids, rows = entries(1, 30)
    blocks = []

    def look(tables, ids, rows):
        jax.debug.callback(lambda x: blocks.append(np.asarray(x)), ids)
        return tables

    run_side_by_side([sums_in_blocks(look, [jnp.zeros((V, 2))], ids, rows, 4)])
    jax.effects_barrier()
    assert blocks
    for block in blocks:
        assert (np.diff(block[block < V]) > 0).all()
    every = np.concatenate(blocks)
    np.testing.assert_array_equal(np.sort(every[every < V]), np.unique(ids[ids < V]))


@given(seed=st.integers(0, 10**6), count_and_size=st.sampled_from(COUNTS_AND_SIZES))
def test_one_by_one(seed, count_and_size):
    count, size = count_and_size
    ids, rows = entries(seed, count, weighted=True)
    table = jnp.ones((V, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "BLOCK_ROWS", (size, size))
        found = jax.jit(lambda: add_to_rows(table, ids, rows))()
    expected = np.ones((V + 1, 2))
    np.add.at(expected, np.asarray(ids), model(rows))
    np.testing.assert_allclose(found, expected[:V], rtol=1e-5, atol=1e-6)


def test_ids_of_64_bits():
    with jax.enable_x64(True):
        ids = jnp.array([2**40, 3, 2**40, -5, 2**50])
        ordered, entry = row_blocks.in_order(ids)
        assert ordered.tolist() == [-5, 3, 2**40, 2**40, 2**50]
        assert entry.tolist() == [3, 1, 0, 2, 4]


def test_update_rows_under_vmap_and_derivatives():
    """They take the definition, which is no loop."""
    ids, rows = entries(2, 15)
    tables = jnp.stack([jnp.ones((V, 2)), 2 * jnp.ones((V, 2))])

    def update(x):
        (table,), (rate,) = x.tables, x.scalars
        return [table.at[x.ids].add(-rate * x.rows, mode="drop")]

    def step(table, source, rate):
        values = GatheredRows(source, rows.index, None, rows.dtype)
        of_rows = RowUpdate(Update(update), [table], ids, values, [rate], "any")
        return updated([of_rows])[0][0]

    each = [step(table, rows.source, 0.5) for table in tables]
    together = jax.vmap(step, in_axes=(0, None, None))(tables, rows.source, 0.5)
    np.testing.assert_allclose(together, jnp.stack(each), rtol=1e-6)
    slope = jax.grad(lambda rate: step(tables[0], rows.source, rate).sum())(0.5)
    valid = np.asarray(ids) < V
    np.testing.assert_allclose(slope, -model(rows)[valid].sum(), rtol=1e-5)
