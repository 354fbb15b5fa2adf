"""Bags of equal lengths, summed by column: the rows of each, in the order of its entries."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmask._kernels import bag_sum as module
from jmask._kernels.bag_columns import most_columns, sum_columns
from jmask._kernels.bag_sum import bag_sum

V, BAGS = 11, 6


def problem(row, dtype, length, weighted):
    rng = np.random.default_rng(length)
    table = jnp.asarray(rng.normal(size=(V, *row)), dtype)
    positions = rng.integers(0, V + 1, (BAGS, length)).astype(np.int32)
    positions[0] = 3  # a bag of one row only, and one that reads nothing
    positions[1] = V
    weights = jnp.asarray(rng.normal(size=(BAGS, length)), jnp.float32) if weighted else None
    return table, jnp.asarray(positions), weights


def in_turn(table, positions, weights, start, fill):
    """In float32 too: the same sums in the same order."""
    rows = np.concatenate([np.float32(table), np.full((1, *table.shape[1:]), fill, np.float32)])
    total = np.array(start)
    for bag, k in np.ndindex(*positions.shape):
        weight = np.float32(1 if weights is None else weights[bag, k])
        total[bag] += weight * rows[positions[bag, k]]
    return total


@pytest.mark.parametrize("fill", [0, math.nan])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("row", "dtype", "length"),
    [
        *[((), "float32", 3), ((1,), "float32", 1), ((2, 3), "bfloat16", 5)],
        *[((48,), "float32", 1), ((48,), "float32", 2), ((64,), "bfloat16", 2)],
        *[((64,), "float32", 7), ((100,), "float16", 2)],
    ],
)
def test_the_sums(row, dtype, length, weighted, fill):
    arrays = problem(row, dtype, length, weighted)
    start = jnp.linspace(-1, 1, BAGS * math.prod(row)).reshape(BAGS, *row)
    found = jax.jit(functools.partial(sum_columns, fill=fill))(*arrays, start)
    # LLVM may round a product and a sum once.
    tolerance = 1e-6 if weighted else 0
    np.testing.assert_allclose(found, in_turn(*arrays, start, fill), tolerance, tolerance)


def test_infinite_rows_and_weights_of_what_reads_nothing():
    table = jnp.array([[1.0, math.inf], [math.nan, 2.0]])
    positions, start = jnp.array([[0, 2], [1, 1], [2, 2]]), jnp.zeros((3, 2))
    sums = jax.jit(sum_columns, static_argnums=4)(table, positions, None, start, 0)
    np.testing.assert_array_equal(sums, [[1, math.inf], [math.nan, 4], [0, 0]])


def compiled(tables):
    """The sums of squares of bags of 5, and the gradients for the bags."""
    width, bags = 64, 2000

    def squares(tables, ids):
        args = None, None, None, bags, 0
        sums = [bag_sum(t, i, *args) for t, i in zip(tables, ids, strict=True)]
        return sum(jnp.sum(x * x) for x in sums), [2 * x for x in sums]

    shapes = (
        [jax.ShapeDtypeStruct((10**5, width), jnp.float32)] * tables,
        [jax.ShapeDtypeStruct((bags, 5), jnp.int32)] * tables,
    )
    return jax.jit(squares).lower(*shapes).compile()


@pytest.mark.of_cpus
def test_rows_are_read_once_and_not_written():
    program = compiled(tables=1)
    assert program.memory_analysis().temp_size_in_bytes < 2e6  # the sums; all rows are 2.6 MB
    # One for each column, in one loop: neither of the two users of the sums has its own.
    gathers = re.findall(r" gather\(", program.as_text())
    assert len(gathers) == 5


def test_what_is_too_long_is_summed_in_blocks():
    assert most_columns(1) == 64
    assert most_columns(26) == 19
    assert most_columns(1000) == 0
    assert module.is_short(module._Part(None, 2, 0), (None, jnp.zeros((2, 3)), None), 3)
    assert not module.is_short(module._Part(None, 2, 0), (None, jnp.zeros((2, 4)), None), 3)
    ragged = (None, jnp.zeros(6), jnp.zeros(6))
    assert not module.is_short(module._Part(None, 2, 0), ragged, 3)
