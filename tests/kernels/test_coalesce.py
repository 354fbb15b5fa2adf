"""The ways to sum rows of equal ids agree bit for bit: which is taken depends on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmask._kernels import coalesce


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
def test_slots_by_sorts_alone(count: int) -> None:
    rng, rows = np.random.default_rng(0), 3000
    ids = jnp.asarray(rng.integers(0, rows + 300, count).clip(0, rows), jnp.int32)
    entry = jnp.arange(count, dtype=jnp.int32)
    ordered, came_from = coalesce._sorted_with_payload(ids, entry)
    starts, slot = coalesce._starts(ordered)
    by_sorts = (
        coalesce._starts_sorted(count, rows, ordered, starts, slot),
        coalesce._sorted_back(ids, ordered, came_from, slot),
    )
    expected = coalesce._by_sorting(ids, count, rows)
    np.testing.assert_array_equal(by_sorts[0], expected[0])
    exists = np.asarray(ids) < rows
    np.testing.assert_array_equal(by_sorts[1][exists], np.asarray(expected[1])[exists])
