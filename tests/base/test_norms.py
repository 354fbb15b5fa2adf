"""Norms near the ends of the range of floats, wherever the library has one: float64 NumPy."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
import jmask.numpy as jnm
from tests.compiled_step import temporary_bytes
from tests.embedding_oracle import normal
from tests.oracle import dense_twin

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


read = lambda table, bound, order: jmask.embedding_lookup(
    table, jnp.arange(len(table)), max_norm=bound, norm_type=order
)
written = lambda table, bound, order: jmask.renormalize(
    table, jnp.arange(len(table)), bound, norm_type=order
)


def by_update(make, dense=False):
    """A bound of gradients, or of what they make of a table of zeros."""

    def shortened(table, bound, order):
        tx, zeros = make(bound, ord=order), jnp.zeros_like(table)
        # Duplicates are one row, and padding is none.
        ids = jnp.concatenate([jnp.arange(len(table)), jnp.arange(len(table)), jnp.array([-1])])
        half = table / 2
        rows = jmask.RowSparse(ids, jnp.concatenate([half, half, 9 + half[:1]]), table.shape)
        gradient = table if dense else rows
        return jmask.todense(tx.update(gradient, tx.init(zeros), zeros)[0])

    return shortened


lifted = lambda bound, **how: jmask.lazy(
    optax.chain(jmask.clip_by_row_norm(bound, **how), optax.identity())
)
# How rows are shortened to a bound.
SHORTENED = {
    "read": read,
    "written": written,
    "clipped": by_update(jmask.clip_by_row_norm),
    "clipped array": by_update(jmask.clip_by_row_norm, dense=True),
    "clipped in a lifted chain": by_update(lifted),
    "projected": by_update(jmask.max_row_norm),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("order", ORDERS)
def test_rows_shortened_to_a_bound(order, wrap):
    for name, shorten in SHORTENED.items():
        p = order if name in ("read", "written") else max(order, 1)  # as `ord` must be
        eps = 1e-7 if name == "written" else 0.0
        for bound in BOUNDS:
            run = functools.partial(shorten, bound=bound, order=p)
            result = wrap(run)(jnp.array(ROWS))
            check(result, shortened(ROWS, bound, p, eps), rtol=1e-5)
            short = norms(ROWS, p)[:, 0] <= bound / 2
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
    gradient = jax.grad(lambda x: read(x, 1.0, 2).sum())(zeros)
    np.testing.assert_array_equal(gradient, jnp.ones_like(zeros))
    np.testing.assert_array_equal(jax.grad(jmask.tree.norm)(zeros), zeros)
    np.testing.assert_array_equal(jax.grad(lambda x: jnm.norm(x))(zeros), zeros)


# --- `max_norm` of lookups and `renormalize` ---------------------------------------------

V, D = 6, 3


LONG = np.array([[3, -4, 0], [0.1, 0, 0.2], [0, 0, 0], [0, 2, 0], [1, 1, 1], [-9, 1, 0]])


@pytest.mark.parametrize("p", [1, 2.0, 3, 0.5, math.inf])
def test_max_norm(p):
    """Through ties, zeros and a row of zeros the derivative passes as through short rows."""
    ids, weights = np.array([0, 1, 2, 3, 4, 5, 0]), normal(7, D)

    def loss(table, bound):
        rows = jmask.embedding_lookup(table, ids, max_norm=bound, norm_type=p)
        return jnp.sum(rows * weights), rows

    with jmask.strict():
        (sparse, in_bound), rows = jax.jit(jmask.grad(loss, (0, 1), has_aux=True))(LONG, 1.5)
    np.testing.assert_allclose(rows, shortened(LONG[ids], 1.5, p), rtol=1e-6)
    assert np.isfinite(sparse.values).all()
    np.testing.assert_allclose(sparse.values[2], weights[2], rtol=1e-6)
    dense = jax.grad(loss, (0, 1), has_aux=True)(jnp.asarray(LONG, jnp.float32), 1.5)[0]
    np.testing.assert_allclose(dense_twin(sparse), dense[0], rtol=1e-5, atol=1e-6)
    numpy_loss = lambda bound: (shortened(LONG[ids], bound, p) * weights).sum()
    slope = numpy_loss(1.5 + 1e-6) - numpy_loss(1.5 - 1e-6)
    assert in_bound == pytest.approx(slope / 2e-6, rel=1e-4)


LINES = np.array([[0, 3, 0], [-1, V, 1], [3, 2, 4]])  # 5 is not among them
STACKED = LONG.reshape(V, 1, D)


# A table, ids, the id of padding, and the order of the norm.
RENORMALIZED = [
    *((LONG, LINES, *how) for how in ((None, 2), (3, 1), (-1, math.inf), (3, 2))),
    *((LONG, [], None, 2), (LONG[:0], [3], None, 2), (LONG, [-1, V], None, 2)),
    (LONG, np.tile(np.arange(-1, V + 1), 3), None, 2),  # more ids than rows
    *((LONG[:, 0], LINES, None, 2), (STACKED, LINES, None, 2)),
]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_renormalize(dtype):
    """Rows that are named and long are shortened, all others keep their bits."""
    for table, ids, padding, p in RENORMALIZED:
        table, ids = table.astype(dtype), np.array(ids, np.int32)
        rows = table.reshape(len(table), -1) if table.size else np.zeros((0, 1), dtype)
        named = {i for i in ids.ravel().tolist() if 0 <= i < len(table)} - {padding}
        is_long = np.isin(np.arange(len(table)), list(named)) & (norms(rows, p)[:, 0] > 1.5)
        expected = np.where(is_long[:, None], shortened(rows, 1.5, p, 1e-7), rows)
        how = {"max_norm": 1.5, "norm_type": p, "padding_id": padding}
        renormalize = functools.partial(jmask.renormalize, **how)
        for run in (renormalize, jax.jit(renormalize)):
            found = np.asarray(run(table, ids))
            assert found.dtype == dtype
            rtol = 1e-6 if dtype == "float32" else 1e-3
            np.testing.assert_allclose(found, expected.reshape(table.shape), rtol=rtol)
            assert found[~is_long].tobytes() == table[~is_long].tobytes()


def renormalized(table, ids):
    return jmask.renormalize(table, ids, 1.0)


def renormalized_step(table, ids):
    table, tx = renormalized(table, ids), jmask.sgd(0.1)
    loss = lambda t: jnp.sum(jmask.embedding_lookup(t, ids, padding_id=0) ** 2)
    return jmask.apply_gradients(tx, jmask.grad(loss)(table), tx.init(table), table)[0]


@pytest.mark.parametrize("step", [renormalized, renormalized_step])
def test_renormalize_in_place(step):
    """A donated table is the one that comes out, and nothing else is as large."""
    rows, row, count = 10**7, 16, 512
    table = jax.ShapeDtypeStruct((rows, row), jnp.float32)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(table, ids).compile()
    assert temporary_bytes(compiled, rows * row * 4, rows * row) < 16 * count * row * 4
