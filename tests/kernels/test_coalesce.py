"""The ways to sum rows of equal ids agree bit for bit; what is known of rows goes with them."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmask._kernels import coalesce
from jmask._kernels.gathered_rows import GATHERED, GatheredRows, as_array


@pytest.mark.of_cpus
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "count", "row"),
    [(1000, 200, (3,)), (50, 7, (2, 2)), (10_000, 300, ()), (8, 1, (1,)), (2000, 100, (4,))],
)
def test_in_order_and_by_slots(rows: int, count: int, row: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, rows, count)
    ids[: count // 2] = rng.integers(0, 5, count // 2)  # many that are equal
    ids[count // 2 :: 3] = rows  # and padding among them
    values = jnp.asarray(rng.normal(size=(count, *row)), dtype)
    slots = min(count, rows)
    given = jnp.asarray(ids, jnp.int32), values
    for first, second in zip(
        jax.jit(coalesce._summed_in_order, static_argnums=(0, 1))(slots, rows, *given),
        jax.jit(coalesce._summed_by_slots, static_argnums=(0, 1))(slots, rows, *given),
        strict=True,
    ):
        assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


@pytest.mark.parametrize("count", [1, 2, 37, 400])
def test_slots_of_each_device(count: int) -> None:
    """On a CPU entries search their slots; on GPUs they are scattered back, on TPUs sorted."""
    rng, rows = np.random.default_rng(0), 3000
    ids = rng.integers(0, rows + 300, count).clip(0, rows)
    exists = ids < rows
    distinct = np.unique(ids[exists])
    expected = np.searchsorted(distinct, ids)
    given = jnp.asarray(ids, jnp.int32)
    entry = jnp.arange(count, dtype=jnp.int32)
    came_from = jnp.lexsort((entry, given)).astype(jnp.int32)
    slot = coalesce._slots(coalesce._starts(given[came_from]))
    for find in (coalesce._by_searching, coalesce._by_sending_back):
        slot_ids, slot_of_entry = jax.jit(find, static_argnums=(0, 1))(count, rows, given)
        np.testing.assert_array_equal(slot_ids[: len(distinct)], distinct)
        assert (slot_ids[len(distinct) :] == rows).all()
        np.testing.assert_array_equal(slot_of_entry[exists], expected[exists])
    for back in (coalesce._sorted_back, coalesce._scattered_back):
        np.testing.assert_array_equal(back(came_from, slot)[exists], expected[exists])


D = 3


def noted(x):
    """The rows of a part as an array, of which it is known what makes it."""
    array = as_array(x)
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
