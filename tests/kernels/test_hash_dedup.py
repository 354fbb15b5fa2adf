"""Equal ids found by hashing: exact whatever the hash does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmask._kernels import hash_dedup

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


def check(tables, summed):
    for (ids, values, rows), (unique, sums) in zip(tables, summed, strict=True):
        assert unique.dtype == ids.dtype
        assert sums.dtype == values.dtype
        ids, values = np.asarray(ids), np.asarray(values, np.float64)
        _, first = np.unique(ids, return_index=True)
        is_first = np.isin(np.arange(ids.size), first) & (ids < rows)
        np.testing.assert_array_equal(unique, np.where(is_first, ids, rows))
        for i in np.flatnonzero(is_first):
            total = values[ids == ids[i]].sum(0)
            np.testing.assert_array_equal(sums[i], total.astype(sums.dtype))


@pytest.mark.parametrize("seed", range(4))
def test_several_tables(seed):
    tables = list(tables_of(seed))
    rows = [rows for *_, rows in tables]

    @jax.jit
    def summed(arrays):
        return hash_dedup.summed_into_first(
            [(*x, n) for x, n in zip(arrays, rows, strict=True)]
        )

    check(tables, summed([x[:2] for x in tables]))


@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_whatever_the_hash_does(monkeypatch, buckets):
    # Each round finds one id of a bucket.
    monkeypatch.setattr(
        hash_dedup, "_hash", lambda ids, number: ids.astype("int32") & (buckets - 1)
    )
    tables = list(tables_of(0))
    check(tables, hash_dedup.summed_into_first(tables))


def test_few_rounds():
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2**31 - 1, 100_000), jnp.int32)
    hashes = [np.asarray(hash_dedup._hash(ids, jnp.int32(number))) for number in range(3)]
    buckets = [np.unique(x & (2**19 - 1)).size for x in hashes]
    # As many as of random numbers: 2**19 * (1 - exp(-100_000 / 2**19)).
    np.testing.assert_allclose(buckets, 91_000, rtol=0.02)
