"""Rows of equal ids summed into the first: exact whatever the hash does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmask._kernels import tuning, unique_rows
from jmask._kernels.unique_rows import RowsOfTable, summed_by_hashing, summed_by_sorting

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


FORMS = {
    "hashing": summed_by_hashing,
    "sorting": lambda tables: list(map(summed_by_sorting, tables)),
}


@pytest.mark.parametrize("block", [1, 7, 256])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", FORMS)
def test_several_tables(monkeypatch, form, seed, block):
    monkeypatch.setattr(tuning, "LATER_ROWS", block)
    tables = list(tables_of(seed))
    rows = [rows for *_, rows in tables]

    @jax.jit
    def summed(arrays):
        return FORMS[form]([RowsOfTable(*x, n) for x, n in zip(arrays, rows, strict=True)])

    check(tables, summed([x[:2] for x in tables]))


@pytest.mark.parametrize("form", FORMS)
def test_sums_are_in_order(form):
    """The first value is added to, in the order in which others came."""
    values = jnp.asarray([1e8, 3, -1e8, 5e8, 1e-3])[:, None]
    ids = jnp.asarray([7, 7, 7, 2, 7], jnp.int32)
    ((_, sums),) = FORMS[form]([RowsOfTable(ids, values, V)])
    expected = np.float32(0)
    for x in np.asarray(values)[[0, 1, 2, 4], 0]:
        expected += x
    assert sums[0, 0] == expected


@pytest.mark.parametrize("buckets", [1, 2, 4])
def test_whatever_the_hash_does(monkeypatch, buckets):
    # Each round finds one id of a bucket.
    monkeypatch.setattr(
        unique_rows, "_hash", lambda ids, number: ids.astype("int32") & (buckets - 1)
    )
    tables = list(tables_of(0))
    check(tables, summed_by_hashing([RowsOfTable(*x) for x in tables]))


def test_few_rounds():
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2**31 - 1, 100_000), jnp.int32)
    hashes = [np.asarray(unique_rows._hash(ids, jnp.int32(number))) for number in range(3)]
    buckets = [np.unique(x & (2**19 - 1)).size for x in hashes]
    # As many as of random numbers: 2**19 * (1 - exp(-100_000 / 2**19)).
    np.testing.assert_allclose(buckets, 91_000, rtol=0.02)


def test_ids_of_64_bits():
    with jax.enable_x64(True):
        ids = jnp.asarray([2**40, 5, 2**40 + 2**32, 5, 2**40, 2**41])
        tables = [(ids, jnp.ones((6, 2), "float32"), 2**41), (ids[:2] % 7, jnp.ones((2, 1)), 7)]
        for summed in FORMS.values():
            check(tables, summed([RowsOfTable(*x) for x in tables]))
