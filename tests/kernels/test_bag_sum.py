"""Sums of rows in blocks: what reading all rows gives, and so do derivatives.

And lookups of rows of some widths, which are spelled differently: lookups bit for bit.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import jmask
from jmask._kernels import tuning
from jmask._kernels.gathered_rows import BagSum, bag_sum
from jmask._kernels.rows import Gather
from tests.expressions import functions
from tests.oracle import assert_close, densified
from tests.stored_tables import bits

pytestmark = pytest.mark.sampled


V, D, BAGS = 9, 64, 4  # rows of 64 have a gather of their own
by_parts = lambda *arguments: BagSum(*arguments).by_parts()


def problem(seed, equal, weighted, count=24, row=(D,)):
    rng = np.random.default_rng(seed)
    table = jnp.asarray(rng.normal(size=(V, *row)), jnp.float32)
    of_entries = (BAGS, count // BAGS) if equal else (count,)
    positions = jnp.asarray(rng.integers(0, V + 1, of_entries), jnp.int32)
    bag = None if equal else jnp.asarray(rng.integers(0, BAGS + 1, count), jnp.int32)
    weights = jnp.asarray(rng.normal(size=of_entries), jnp.float32) if weighted else None
    return table, positions, bag, weights


def in_blocks_of(size, patch, columns=0):
    patch.setattr(tuning, "SMALL_ROWS", 0)
    patch.setattr(tuning, "COLUMNS", columns)
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
    columns=st.sampled_from([0, 64]),
    equal=st.booleans(),
    weighted=st.booleans(),
    fill=st.sampled_from([0, math.nan]),
    row=st.sampled_from([(), (2, 3), (100,), (D,)]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_the_sums(seed, size, columns, equal, weighted, fill, row, dtype):
    table, *others = problem(seed, equal, weighted, row=row)
    given_arrays = table.at[(0,) * table.ndim].set(jnp.inf).astype(dtype), *others
    with pytest.MonkeyPatch.context() as patch:
        in_blocks_of(size, patch, columns)
        found = jax.jit(lambda: bag_sum(*given_arrays, BAGS, fill))()
    np.testing.assert_allclose(found, model(*given_arrays, fill), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["ragged", "equal", "by column"])
def test_derivatives_are_those_of_the_definition(monkeypatch, form, weighted):
    in_blocks_of(5, monkeypatch, 64 if form == "by column" else 0)
    table, positions, bag, weights = problem(3, form != "ragged", weighted)

    def loss(sums, table, weights):
        return jnp.sum(jnp.sin(sums(table, positions, bag, weights, BAGS, 0)))

    def both(sums):
        numbers = (1, 2) if weighted else 1
        first = jax.grad(loss, numbers)
        second = jax.grad(lambda *x: jnp.sum(jnp.cos(jax.grad(loss, 1)(*x))), 1)
        return first(sums, table, weights), second(sums, table, weights)

    assert_close(both(bag_sum), both(by_parts), rtol=1e-5, atol=1e-5)


@pytest.mark.of_cpus
def test_rows_are_read_once_and_not_written():
    """Bags of 5 are summed for two users of the sums, by one loop."""
    width, bags = 64, 2000

    def squares(table, ids):
        sums = bag_sum(table, ids, None, None, bags, 0)
        return jnp.sum(sums * sums), 2 * sums

    table = jax.ShapeDtypeStruct((10**5, width), jnp.float32)
    ids = jax.ShapeDtypeStruct((bags, 5), jnp.int32)
    program = jax.jit(squares).lower(table, ids).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2e6  # the sums; all rows are 2.6 MB
    assert len(re.findall(r" gather\(", program.as_text())) == 5  # one for each column


# --- gathers --------------------------------------------------------------------------

ROWS = 7
IDS = np.array([3, 0, -1, 6, 3, 7, -9, 2**31 - 1], np.int32)


def table_of(row, dtype):
    table = jax.random.normal(jax.random.key(0), (ROWS, *row)).astype(dtype)
    table = table.at[3].set(-0.0).at[0].set(jnp.nan).at[6].set(1e-40)
    return table.at[(2,) + (0,) * len(row)].set(jnp.inf)


@pytest.mark.parametrize(
    ("mode", "fill"),
    [("clip", None), ("promise_in_bounds", None), ("fill", None), ("fill", 2.5), ("fill", 0)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("row", [(64,), (8, 8), (32,), (50,), (3, 15)])
def test_the_same_bits(row, dtype, mode, fill):
    table = table_of(row, dtype)
    ids = IDS % ROWS if mode == "promise_in_bounds" else IDS
    gather = Gather.rows_of(table.shape, lax.GatherScatterMode.from_any(mode), fill_value=fill)
    assert gather.is_slow_copy(table)
    expected = bits(gather(table, ids[:, None], plain=True))
    numbers = gather.dimension_numbers._replace(offset_dims=tuple(range(2, 2 + len(row))))
    in_pairs = dataclasses.replace(gather, dimension_numbers=numbers)
    for found in (
        gather(table, ids[:, None]),
        jax.jit(gather)(table, ids[:, None]),
        jax.jit(in_pairs)(table, ids.reshape(2, -1, 1)),
        jax.vmap(gather, in_axes=(None, 0))(table, ids[:, None, None]),
    ):
        np.testing.assert_array_equal(bits(found).reshape(expected.shape), expected)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32])
def test_ids_of_other_dtypes_and_rows_that_come_first(dtype):
    """Entries (32, n) instead of (n, 32)."""
    table = jnp.arange(300 * 32.0).reshape(300, 32)
    ids = jnp.asarray(np.arange(-150, 150).astype(dtype))[:, None]
    modes = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP)
    gathers = [Gather.rows_of(table.shape, mode) for mode in modes]
    numbers = lax.GatherDimensionNumbers((0,), (0,), (0,))
    for gather in (*gathers, Gather(numbers, (1, 32), modes[0])):
        assert gather.is_slow_copy(table)
        np.testing.assert_array_equal(gather(table, ids), gather(table, ids, plain=True))


LOOKUPS = functions("t, i", globals())("""
    t[i]; jnp.take(t, i, axis=0); t.at[i].get(mode="fill", fill_value=1.0);
    jax.vmap(lambda j: t[j])(i); jmask.embedding_lookup(t, i, mode="zero");
    jax.jit(lambda t, i: jnp.tanh(t[i]))(t, i)
""")


@pytest.mark.parametrize("width", [32, 65, 64])
@pytest.mark.parametrize("name", LOOKUPS)
def test_values_and_derivatives(name, width):
    """As those of the same program with rows of a width that is not special."""
    lookup = LOOKUPS[name]
    table = jax.random.normal(jax.random.key(1), (ROWS, width))
    weights = jnp.arange(IDS.size * width, dtype=jnp.float32).reshape(-1, width) / 100
    loss = lambda t: jnp.sum(lookup(t, IDS % ROWS) ** 2 * weights, where=weights > 0.5)
    plain = jax.value_and_grad(loss)(table)
    for run in (jmask.value_and_grad(loss), jax.jit(jmask.value_and_grad(loss))):
        assert_close(densified(run(table)), plain, rtol=1e-5, atol=1e-5)
    # The value is differentiated again, through what the lookup became.
    value = lambda t: jmask.value_and_grad(loss)(t)[0]
    assert_close(jax.grad(value)(table), plain[1], rtol=1e-5, atol=1e-5)
    forward = jax.jvp(value, (table,), (jnp.ones_like(table),))[1]
    np.testing.assert_allclose(forward, jnp.sum(plain[1]), rtol=1e-4)


@pytest.mark.of_cpus
@pytest.mark.parametrize("width", [32, 50, 64])
def test_a_lookup_is_not_left_a_copying_loop(width):
    """The forward gather that runs reads integers; also inside a call."""
    step = jax.jit(
        jmask.value_and_grad(lambda t: jnp.sum(jnp.take(t, IDS % ROWS, axis=0) ** 2))
    )
    text = step.lower(jnp.ones((ROWS, width))).as_text()
    gathers = [line for line in text.splitlines() if "stablehlo.gather" in line]
    assert any("xi32>" in line.split("->")[1] for line in gathers)
