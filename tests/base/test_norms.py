"""Norms near the ends of the range of floats, wherever the library has one: float64 NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
import jmask.numpy as jnm

pytestmark = pytest.mark.sampled

# Rows whose squares overflow or vanish in float32, mixed ones, and none at all.
ROWS = np.array(
    [
        [3e38, 2e38, 1e38],
        [1e38, 1e38, 0.0],
        [2e19, 1e19, -3e19],
        [3.0, -4.0, 12.0],
        [1e-3, 0.0, 2e-3],
        [3e-20, 4e-20, -1e-20],
        [2e-37, 3e-37, 1e-36],
        [1e38, 1e-38, 1e5],
        [0.0, 0.0, 0.0],
    ],
    np.float32,
)
SUBNORMAL = np.float32([[1e-40, 2e-40, 0.0]])
ORDERS = [1, 2, 3, 0.5, 100, math.inf]
BOUNDS = [1e-30, 1e-3, 1.0, 1e25, 1e38]


def norms(rows, order):
    rows = np.abs(np.asarray(rows, np.float64))
    greatest = rows.max(-1, keepdims=True)
    ratios = rows / np.where(greatest > 0, greatest, 1)
    if order == math.inf:
        return greatest
    return greatest * (ratios**order).sum(-1, keepdims=True) ** (1 / order)


def shortened(rows, bound, order, eps=0.0):
    size = norms(rows, order)
    exact = np.asarray(rows, np.float64)
    factor = bound / (np.where(size > bound, size, bound) + eps)
    return np.where(size > bound, exact * factor, exact)


def check(actual, expected, rtol=3e-6):
    """Close; a number that is subnormal in float32, or beside the greatest, may be 0."""
    expected = np.asarray(expected)
    tiny = float(jnp.finfo(actual.dtype).tiny)
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=rtol, atol=2 * tiny
    )


# 4 names: how rows are shortened to a bound.
read = lambda table, bound, order: jmask.embedding_lookup(
    table, jnp.arange(len(table)), max_norm=bound, norm_type=order
)
written = lambda table, bound, order: jmask.renormalize(
    table, jnp.arange(len(table)), bound, norm_type=order
)


def clipped(table, bound, order):
    tx = jmask.clip_by_row_norm(bound, ord=order)
    gradient = jmask.RowSparse(jnp.arange(len(table)), table, table.shape)
    return tx.update(gradient, tx.init(table))[0].todense()


def projected(table, bound, order):
    tx = jmask.max_row_norm(bound, ord=order)
    gradient = jmask.RowSparse(jnp.arange(len(table)), table, table.shape)
    zeros = jnp.zeros_like(table)
    return tx.update(gradient, tx.init(zeros), zeros)[0].todense()


SHORTENED = {"read": read, "written": written, "clipped": clipped, "projected": projected}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SHORTENED)
def test_rows_shortened_to_a_bound(name, order, wrap):
    if order < 1 and name in ("clipped", "projected"):
        pytest.skip("`ord` must be at least 1")
    eps = 1e-7 if name == "written" else 0.0
    for bound in BOUNDS:
        result = wrap(lambda x: SHORTENED[name](x, bound, order))(jnp.array(ROWS))  # noqa: B023
        check(result, shortened(ROWS, bound, order, eps), rtol=1e-5)
        short = norms(ROWS, order)[:, 0] <= bound / 2
        np.testing.assert_array_equal(result[short], ROWS[short])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", SHORTENED)
@pytest.mark.dtype_promotion
def test_16_bit_rows(name, dtype):
    rows = jnp.asarray(np.clip(ROWS, -6e4, 6e4), dtype)
    result = SHORTENED[name](rows, 1.0, 2)
    exact = shortened(np.asarray(rows, np.float64), 1.0, 2, 1e-7 if name == "written" else 0)
    np.testing.assert_allclose(np.asarray(result, np.float64), exact, rtol=0.01, atol=1e-7)


@pytest.mark.parametrize("name", SHORTENED)
def test_rows_that_are_not_finite(name):
    rows = jnp.array([[jnp.inf, 1.0], [jnp.nan, 1.0], [3e38, jnp.inf], [3.0, 4.0]])
    result = SHORTENED[name](rows, 1.0, 2)
    np.testing.assert_allclose(result[3], [0.6, 0.8], rtol=1e-6)
    if name in ("read", "written"):
        np.testing.assert_array_equal(result[:3], rows[:3])
        slopes = jax.grad(lambda x: jnp.sum(read(x, 1.0, 2)[:3]))(rows)
        np.testing.assert_array_equal(slopes[:3], jnp.ones((3, 2)))
    else:  # a gradient that is not finite is not made one
        assert not np.isfinite(np.asarray(result[:3])).all(1).any()


@pytest.mark.parametrize("name", SHORTENED)
def test_subnormal_rows_are_short(name):
    result = np.asarray(SHORTENED[name](jnp.array(SUBNORMAL), 1e-3, 2))
    assert ((result == SUBNORMAL) | (result == 0)).all()  # which XLA may take for 0


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("storage", ["array", "masked", "row_sparse", "coo"])
@pytest.mark.parametrize("order", [*ORDERS, -1, -2])
def test_norms_of_reductions(order, storage, wrap):
    rows = ROWS if order > 0 else ROWS[[0, 2, 3, 4, 5, 6]][:, [0, 2]]
    x = jnp.array(rows)
    if storage == "masked":
        hidden = jnp.full((len(rows), 1), jnp.inf)
        x = jnp.concatenate([x, hidden], 1)
        x = jmask.MaskedTensor(x, jnp.isfinite(x))
    elif storage != "array":
        if order < 0:
            pytest.skip("of negative order, zeros that are not stored make it 0: dense")
        x = jmask.cast_storage(x, storage)
    result = wrap(lambda x: jmask.todense(jnm.norm(x, ord=order, axis=1)))(x)
    exact = np.float64(np.abs(rows))
    if order < 0:
        least = exact.min(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            expected = least * ((exact / least) ** float(order)).sum(-1, keepdims=True) ** (
                1 / order
            )
    else:
        expected = norms(rows, order)
    check(result, expected[:, 0], rtol=1e-5)


@pytest.mark.parametrize("order", [1, 2, 3, math.inf])
def test_normalized(order):
    rows = ROWS[:-1]
    expected = np.float64(rows) / np.maximum(norms(rows, order), 1e-12)
    check(jmask.nn.normalize(jnp.array(rows), ord=order), expected, rtol=1e-5)
    masked = jmask.MaskedTensor(jnp.array(rows), jnp.ones(rows.shape, bool))
    check(jmask.nn.normalize(masked, ord=order).to_tensor(0), expected, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e38, 1e20, 1.0, 1e-20, 3e-36])
def test_global_norm(scale):
    rows = np.float32([[1, 2], [2, 0.5]]) * np.float32(scale)
    tree = {"t": jmask.RowSparse([1, 1], rows / 4, (9, 2)), "w": jnp.array(rows[0] / 4)}
    exact = np.append(np.float64(rows).sum(0), np.float64(rows[0])) / 4
    check(jmask.tree.norm(tree), np.linalg.norm(exact))
    with np.errstate(over="ignore"):
        check(jmask.tree.norm(tree, squared=True), (exact**2).sum())
    gradient = jax.grad(lambda w: jmask.tree.norm({"w": w}))(tree["w"])
    check(gradient, exact[2:] / np.linalg.norm(exact[2:]), rtol=1e-5)


def test_gradients_at_zero_are_finite():
    zeros = jnp.zeros((2, 3))
    for name in ("read",):
        gradient = jax.grad(lambda x: SHORTENED[name](x, 1.0, 2).sum())(zeros)  # noqa: B023
        np.testing.assert_array_equal(gradient, jnp.ones_like(zeros))
    np.testing.assert_array_equal(jax.grad(jmask.tree.norm)(zeros), zeros)
    np.testing.assert_array_equal(jax.grad(lambda x: jnm.norm(x))(zeros), zeros)


def test_the_step_of_a_chain_with_rows_near_the_largest_float():
    """All of it in a lifted chain, as it is used."""
    tx = jmask.lazy(optax.chain(jmask.clip_by_row_norm(1.0), optax.sgd(1.0)))
    table = jnp.zeros((4, 2))
    gradient = jmask.RowSparse([2], jnp.array([[3e38, 4e37]]), (4, 2))
    new, _ = jmask.apply_gradients(tx, gradient, tx.init(table), table)
    np.testing.assert_allclose(new[2], -np.array([3, 0.4]) / np.hypot(3, 0.4), rtol=1e-6)
