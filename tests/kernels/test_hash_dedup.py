"""Equal ids by hashing: exactly what sorting finds, whatever the hash does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmask._kernels import hash_dedup as hash_dedup
from jmask._kernels.coalesce import coalesce_rows
from jmask._kernels.hash_dedup import (
    deduplicated_rows,
    deduplicated_tables,
    first_entries,
)

V = 40


@pytest.fixture(params=["at once", "in blocks", "some in blocks"], name="sums")
def _sums(request, monkeypatch):
    """How rows are summed; the limits are those of bytes."""
    limits = {
        "at once": (2**20, 2**24),
        "in blocks": (2**20, 0),
        "some in blocks": (700, 2**24),
    }
    for name, limit in zip(("_FEW", "_FEW_OF_ALL"), limits[request.param], strict=True):
        monkeypatch.setattr(hash_dedup, name, limit)


def find_eagerly(ids, rows):
    (first,) = first_entries([(ids, rows)])
    return first


find_first = jax.jit(find_eagerly, static_argnums=1)


def model(ids):
    """The first entry with the same id; padding is its own."""
    return [i if x >= V else list(ids).index(x) for i, x in enumerate(ids)]


def test_several_tables(sums):
    """More than run side by side, of other sizes, dtypes and widths."""
    rng = np.random.default_rng(0)
    tables = []
    for i in range(11):
        count, width = [1, 690, 260][i % 3], i % 2 + 1
        ids = jnp.asarray(rng.integers(0, V + 1, count), [jnp.int32, jnp.uint32][i % 2])
        values = jnp.asarray(
            rng.normal(size=(count, width)), [jnp.float32, jnp.bfloat16][i % 2]
        )
        tables.append((ids, values))
    found = jax.jit(lambda x: deduplicated_tables([(*y, V) for y in x]))(tables)
    for (ids, values), table in zip(found, tables, strict=True):
        expected_ids, expected = deduplicated_rows(*table, V)
        np.testing.assert_array_equal(ids, expected_ids)
        valid = np.asarray(ids) < V
        np.testing.assert_array_equal(np.asarray(values)[valid], np.asarray(expected)[valid])


@given(st.sampled_from([1, 4, 12]), st.integers(0, 10**6), st.booleans())
def test_first_entries(count, seed, jit):
    find = find_first if jit else find_eagerly
    ids = np.random.default_rng(seed).integers(0, [3, V][seed % 2] + 1, count, np.int32)
    np.testing.assert_array_equal(find(jnp.asarray(ids), V), model(ids))


@pytest.mark.parametrize("worst", [0, 1, 3])
def test_whatever_the_hash_does(monkeypatch, worst):
    # All ids in a few buckets: each round is done with one id of a bucket.
    monkeypatch.setattr(hash_dedup, "_hash", lambda ids, number: ids & worst)
    ids = np.random.default_rng(0).integers(0, V + 1, 50).astype(np.int32)
    np.testing.assert_array_equal(find_eagerly(jnp.asarray(ids), V), model(ids))


def test_a_second_round_is_rare():
    """As many entries as promised have a bucket to themselves or share it with equal ids."""
    for start, step in ((0, 1), (0, 64), (10**6, 4096), (7, 99_991)):
        ids = jnp.arange(start, start + step * 8192, step, dtype=jnp.int32)
        buckets = 2 ** (hash_dedup._BUCKETS * 8192 - 1).bit_length()
        taken = np.unique(np.asarray(hash_dedup._hash(ids, jnp.int32(0)) & (buckets - 1)))
        assert 1 - taken.size / 8192 < 0.14


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("row", [(), (5,), (2, 3)])
@pytest.mark.parametrize("count", [1, 2, 100])
def test_same_sums_as_by_sorting(dtype, row, count, sums):
    # A function of its own: what was compiled for other limits is not taken.
    deduplicated = jax.jit(lambda *x: deduplicated_rows(*x), static_argnums=2)
    rng = np.random.default_rng(count)
    for _ in range(3):
        ids = jnp.asarray(rng.integers(0, V + 1, count), jnp.int32)
        values = jnp.asarray(rng.normal(size=(count, *row)), dtype)
        # What stands beside padding means nothing.
        values = values.at[jnp.where(ids == V)[0]].set(jnp.nan)
        expected_ids, expected = coalesce_rows(ids, values, V)
        found_ids, found = deduplicated(ids, values, V)
        assert (found_ids.dtype, found.dtype) == (ids.dtype, dtype)
        by_id = np.argsort(found_ids, stable=True)
        kept = int((found_ids < V).sum())
        np.testing.assert_array_equal(found_ids[by_id][:kept], expected_ids[:kept])
        np.testing.assert_array_equal(found[by_id][:kept], expected[:kept])


def test_ids_of_64_bits():
    with jax.enable_x64(True):
        high, rows = 2**40, 2**50
        ids = jnp.asarray([high, 5, high + 2**32, high, 5], jnp.int64)
        assert find_eagerly(ids, rows).tolist() == [0, 1, 2, 0, 1]
        found_ids, found = deduplicated_rows(ids, jnp.arange(5.0), rows)
        assert found_ids.tolist() == [high, 5, high + 2**32, rows, rows]
        assert found[:3].tolist() == [3, 5, 2]


@pytest.mark.parametrize("count", [256, 257, 513, 1000])
def test_hot_ids(count, sums):
    """With more equal ids than are summed at a time, at its multiples and beside them."""
    ids = jnp.zeros(count, jnp.int32)
    found_ids, found = deduplicated_rows(ids, jnp.ones((count, 2)), V)
    assert found_ids.tolist() == [0] + [V] * (count - 1)
    assert found[0].tolist() == [count, count]


def test_no_copy_of_the_values():
    """Which has n x D numbers: a gradient that nobody needs any more is summed in place."""
    count, width = 8192, 64
    ids, values = (
        jax.ShapeDtypeStruct((count,), jnp.int32),
        jax.ShapeDtypeStruct((count, width), jnp.float32),
    )
    summed = jax.jit(deduplicated_rows, static_argnums=2, donate_argnums=1)
    memory = summed.lower(ids, values, 10**6).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * count * width / 2


def test_under_vmap():
    ids = jnp.asarray(np.random.default_rng(0).integers(0, V, (3, 50)), jnp.int32)
    first = jax.vmap(lambda ids: find_eagerly(ids, V))(ids)
    np.testing.assert_array_equal(first, [model(x) for x in np.asarray(ids)])
