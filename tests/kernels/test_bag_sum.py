"""Sums of rows by column and in blocks: what reading all rows gives, and so do derivatives."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmask._kernels import bag_sum as module
from jmask._kernels import tuning
from jmask._kernels.bag_sum import BagSum, bag_sum
from tests.oracle import assert_close

pytestmark = pytest.mark.sampled

V, D, BAGS = 9, 64, 4  # rows of 64 have a gather of their own


def problem(seed, equal, weighted, count=24, row=(D,)):
    rng = np.random.default_rng(seed)
    table = jnp.asarray(rng.normal(size=(V, *row)), jnp.float32)
    of_entries = (BAGS, count // BAGS) if equal else (count,)
    positions = jnp.asarray(rng.integers(0, V + 1, of_entries), jnp.int32)
    bag = None if equal else jnp.asarray(rng.integers(0, BAGS + 1, count), jnp.int32)
    weights = jnp.asarray(rng.normal(size=of_entries), jnp.float32) if weighted else None
    return table, positions, bag, weights


def by_parts(*arguments):
    return BagSum(*arguments).by_parts()


def in_blocks_of(size, patch, by_column=False):
    patch.setattr(tuning, "MATERIALISED_ROWS", 0)
    patch.setattr(tuning, "COLUMNS", 64 if by_column else 0)
    patch.setattr(tuning, "BLOCK_ROWS", (size, size))


def model(table, positions, bag, weights, fill):
    row = table.shape[1:]
    table = np.concatenate([np.float64(table), np.full((1, *row), fill)])
    bag = np.indices(positions.shape)[0] if bag is None else np.asarray(bag)
    weights = np.ones(positions.shape) if weights is None else np.float64(weights)
    sums = np.zeros((BAGS + 1, *row))
    with np.errstate(invalid="ignore"):
        np.add.at(sums, bag, (table[np.asarray(positions)].T * weights.T).T)
    return sums[:BAGS]


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 5, 23]),
    equal=st.booleans(),
    weighted=st.booleans(),
    fill=st.sampled_from([0, math.nan]),
    by_column=st.booleans(),
    row=st.sampled_from([(), (2, 3), (100,), (D,)]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_the_sums(seed, size, equal, weighted, fill, by_column, row, dtype):
    table, *others = problem(seed, equal, weighted, row=row)
    given_arrays = table.at[(0,) * table.ndim].set(jnp.inf).astype(dtype), *others
    with pytest.MonkeyPatch.context() as patch:
        in_blocks_of(size, patch, by_column)
        found = jax.jit(lambda: bag_sum(*given_arrays, None, BAGS, fill))()
    np.testing.assert_allclose(found, model(*given_arrays, fill), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["ragged", "equal", "by column"])
def test_derivatives_are_those_of_the_definition(monkeypatch, form, weighted):
    in_blocks_of(5, monkeypatch, form == "by column")
    table, positions, bag, weights = problem(3, form != "ragged", weighted)

    def loss(sums, table, weights):
        return jnp.sum(jnp.sin(sums(table, positions, bag, weights, None, BAGS, 0)))

    def both(sums):
        numbers = (1, 2) if weighted else 1
        first = jax.grad(loss, numbers)
        second = jax.grad(lambda *x: jnp.sum(jnp.cos(jax.grad(loss, 1)(*x))), 1)
        return first(sums, table, weights), second(sums, table, weights)

    assert_close(both(bag_sum), both(by_parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("equal", [False, True])
def test_all_is_nan_where_bags_are_not_valid(monkeypatch, equal, few):
    in_blocks_of(5, monkeypatch, by_column=True)
    monkeypatch.setattr(tuning, "MATERIALISED_ROWS", few)
    arrays = problem(5, equal, False)
    sums = jax.jit(lambda valid: bag_sum(*arrays, valid, BAGS, 0))
    np.testing.assert_allclose(sums(True), model(*arrays, 0), rtol=1e-5, atol=1e-5)
    assert np.isnan(sums(False)).all()


@pytest.mark.of_cpus
def test_rows_are_read_once_and_not_written():
    """Bags of 5 are summed for two users of the sums, by one loop that reads each column."""
    width, bags = 64, 2000

    def squares(table, ids):
        sums = bag_sum(table, ids, None, None, None, bags, 0)
        return jnp.sum(sums * sums), 2 * sums

    table = jax.ShapeDtypeStruct((10**5, width), jnp.float32)
    ids = jax.ShapeDtypeStruct((bags, 5), jnp.int32)
    program = jax.jit(squares).lower(table, ids).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2e6  # the sums; all rows are 2.6 MB
    assert len(re.findall(r" gather\(", program.as_text())) == 5


def test_bags_that_are_too_long_are_summed_in_blocks():
    assert module.most_columns(1) == 64
    assert module.most_columns(26) == 19
    assert module.most_columns(1000) == 0
    equal = lambda k: BagSum(None, jnp.zeros((2, k)), None, None, None, 2, 0)
    assert module.is_short(equal(3), 3)
    assert not module.is_short(equal(4), 3)
    ragged = BagSum(None, jnp.zeros(6), jnp.zeros(6), None, None, 2, 0)
    assert not module.is_short(ragged, 3)
