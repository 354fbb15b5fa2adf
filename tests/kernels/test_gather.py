"""Lookups of rows of some widths, which are spelled differently, are lookups bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmask
from jmask._kernels.gather import Gather
from tests.stored_tables import bits

pytestmark = pytest.mark.sampled

V = 7
IDS = np.array([3, 0, -1, 6, 3, 7, -9, 2**31 - 1], np.int32)


def table_of(row: tuple[int, ...], dtype: str) -> jax.Array:
    table = jax.random.normal(jax.random.key(0), (V, *row)).astype(dtype)
    table = table.at[3].set(-0.0).at[0].set(jnp.nan).at[6].set(1e-40)
    return table.at[(2,) + (0,) * len(row)].set(jnp.inf)


def two_batches(gather: Gather, rank: int) -> lax.GatherDimensionNumbers:
    offsets = tuple(range(2, 2 + rank))
    return gather.dimension_numbers._replace(offset_dims=offsets)


@pytest.mark.parametrize(
    ("mode", "fill"),
    [("clip", None), ("promise_in_bounds", None), ("fill", None), ("fill", 2.5), ("fill", 0)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("row", [(64,), (8, 8), (32,), (50,), (3, 15)])
def test_the_same_bits(row: tuple[int, ...], dtype: str, mode: str, fill: float | None) -> None:
    table = table_of(row, dtype)
    ids = IDS % V if mode == "promise_in_bounds" else IDS
    gather = Gather.rows_of(table.shape, lax.GatherScatterMode.from_any(mode), fill_value=fill)
    assert gather.is_slow_copy(table)
    expected = gather.plain(table, ids[:, None])
    for run in (gather, jax.jit(gather)):
        np.testing.assert_array_equal(bits(run(table, ids[:, None])), bits(expected))
    pairs = dataclasses.replace(gather, dimension_numbers=two_batches(gather, len(row)))
    by_two = jax.jit(pairs)(table, ids.reshape(2, -1, 1))
    np.testing.assert_array_equal(bits(by_two).reshape(expected.shape), bits(expected))
    by_one = jax.vmap(gather, in_axes=(None, 0))(table, ids[:, None, None])
    np.testing.assert_array_equal(bits(by_one[:, 0]), bits(expected))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint32])
@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_ids_of_other_dtypes(mode: str, dtype: type) -> None:
    table = jnp.arange(300 * 32.0).reshape(300, 32)
    ids = jnp.asarray(np.arange(-150, 150).astype(dtype))[:, None]
    gather = Gather.rows_of(table.shape, lax.GatherScatterMode.from_any(mode))
    assert gather.is_slow_copy(table)
    np.testing.assert_array_equal(gather(table, ids), gather.plain(table, ids))


def test_rows_that_come_first() -> None:
    """Entries (32, n) instead of (n, 32)."""
    table = table_of((32,), "float32")
    numbers = lax.GatherDimensionNumbers((0,), (0,), (0,))
    gather = Gather(numbers, (1, 32), lax.GatherScatterMode.CLIP)
    assert gather.is_slow_copy(table)
    np.testing.assert_array_equal(
        gather(table, IDS[:, None]), gather.plain(table, IDS[:, None])
    )


@pytest.mark.parametrize("width", [32, 65, 64])
@pytest.mark.parametrize(
    "lookup",
    [
        lambda t, i: t[i],
        lambda t, i: jnp.take(t, i, axis=0),
        lambda t, i: t.at[i].get(mode="fill", fill_value=1.0),
        lambda t, i: jax.vmap(lambda j: t[j])(i),
        lambda t, i: jmask.embedding_lookup(t, i, mode="zero"),
        lambda t, i: jax.jit(lambda t, i: jnp.tanh(t[i]))(t, i),
    ],
    ids=["index", "take", "fill", "vmap", "embedding_lookup", "in a jit"],
)
def test_values_and_derivatives(lookup, width: int) -> None:
    """As those of the same program with rows of a width that is not special."""
    table = jax.random.normal(jax.random.key(1), (V, width))
    weights = jnp.arange(IDS.size * width, dtype=jnp.float32).reshape(-1, width) / 100

    def loss(t: jax.Array) -> jax.Array:
        return jnp.sum(lookup(t, IDS % V) ** 2 * weights, where=weights > 0.5)

    plain = jax.value_and_grad(loss)(table)
    for run in (jmask.value_and_grad(loss), jax.jit(jmask.value_and_grad(loss))):
        value, gradient = run(table)
        np.testing.assert_allclose(value, plain[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradient.todense(), plain[1], rtol=1e-5, atol=1e-5)
    # The value is differentiated again, through what the lookup became.
    again = jax.grad(lambda t: jmask.value_and_grad(loss)(t)[0])(table)
    np.testing.assert_allclose(again, plain[1], rtol=1e-5, atol=1e-5)
    tangent = jnp.ones_like(table)
    forward = jax.jvp(lambda t: jmask.value_and_grad(loss)(t)[0], (table,), (tangent,))[1]
    np.testing.assert_allclose(forward, jnp.sum(plain[1]), rtol=1e-4)


@pytest.mark.of_cpus
@pytest.mark.parametrize("width", [32, 50, 64])
def test_a_lookup_is_not_left_a_copying_loop(width: int) -> None:
    """The forward gather that runs reads integers; also inside a call."""
    step = jax.jit(jmask.value_and_grad(lambda t: jnp.sum(jnp.take(t, IDS % V, axis=0) ** 2)))
    text = step.lower(jnp.ones((V, width))).as_text()
    gathers = [line for line in text.splitlines() if "stablehlo.gather" in line]
    assert any("xi32>" in line.split("->")[1] for line in gathers)
