"""Reductions at their edges (ties, zeros, nothing, dtypes), with `where=`, of sparse storages.

Their values and derivatives are in test_masked_functions.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jmask
import jmask.numpy as jnm
from jmask import MaskedTensor, RowSparse
from tests import sparse_arrays
from tests.masked_cases import KINDS, PATTERNS, SHAPE, build, masks, slope_of
from tests.sparse_arrays import coo


@pytest.mark.parametrize("kind", ["dense", "coo"])
def test_extrema_never_choose_a_masked_entry(kind):
    data = jnp.array([[jnp.inf, -jnp.inf, 9], [jnp.nan, jnp.nan, 1]] * 2)
    mask = jnp.array([[False, True, False], [False, True, True]] * 2)
    x = build(kind, data, mask)
    valid = np.asarray(mask) & PATTERNS[kind]
    for function in (jnm.argmax, jnm.argmin):
        result = function(x, axis=1)
        for row in range(4):
            if result.valid[row]:
                assert valid[row, int(result.storage[row])]
    ties = MaskedTensor(data[0], jnp.array([False, True, False]))
    gradient = jax.grad(lambda d: jnm.max(MaskedTensor(d, ties.valid)).to_tensor(0))
    np.testing.assert_array_equal(gradient(data[0]), [0, 1, 0])
    assert jnm.argmax(MaskedTensor(data[1], jnp.array([False, True, True]))).storage == 1


@pytest.mark.parametrize("kind", ["dense", "csr"])
def test_ties_share_the_derivative(kind):
    mask = np.ones(SHAPE, bool)
    mask[3, 0] = False
    valid = mask & PATTERNS[kind]
    for function in (jnm.max, jnm.min):
        loss = lambda d, f=function: jnp.sum(
            f(build(kind, d, jnp.asarray(mask)), 1).to_tensor(0)
        )
        gradient = jax.grad(loss)(jnp.full(SHAPE, -jnp.inf))
        np.testing.assert_allclose(gradient, valid / valid.sum(1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "csr", "coo"])
def test_product_of_zeros(kind):
    data = np.array([[0.0, 2, 3], [0, 0, 5], [1, 0, 2], [0, 3, 4]])
    valid = PATTERNS[kind]
    loss = lambda d, axis: jnp.sum(
        jnm.prod(build(kind, d, jnp.ones(SHAPE, bool)), axis).to_tensor(0)
    )
    axes = (0, 1, None)
    run = jax.jit(lambda d: [jax.grad(loss)(d, axis) for axis in axes])
    for axis, gradient in zip(axes, run(jnp.asarray(data, jnp.float32)), strict=True):
        model = lambda x, axis=axis: np.sum(np.prod(x, axis, where=valid))
        expected = slope_of(model, data, valid)
        np.testing.assert_allclose(gradient, expected, atol=1e-4)


def test_derivative_zero_by_convention():
    mask = jnp.array([[True, True], [True, False], [False, False]])
    norms = [functools.partial(jnm.norm, ord=p) for p in (2, 3, 0.5, np.inf)]
    spreads = [jnm.std, jnm.var, functools.partial(jnm.std, ddof=1)]

    @jax.jit
    def run(data):
        results = []
        for function in (*spreads, *norms):
            loss = lambda d, f=function: jnp.sum(f(MaskedTensor(d, mask), axis=1).to_tensor(0))
            direction = jnp.ones_like(data)
            forward = jax.jvp(loss, (data,), (direction,))[1]
            gradient, second = jax.jvp(jax.grad(loss), (data,), (direction,))
            results.append((forward, gradient, second))
        return results

    for value, number in ((0.0, None), (2.0, len(spreads))):
        results = run(jnp.where(mask, value, jnp.nan))
        for forward, gradient, second in results[:number]:
            assert forward == 0
            assert (gradient == 0).all()
            assert jnp.isfinite(second).all()


def test_complex_derivatives():
    data = jnp.array([1 + 2j, jnp.nan, 3 - 1j])
    mask = jnp.array([True, False, True])
    kept = jnp.array([0, 2])
    pairs = (
        (jnm.sum, jnp.sum), (jnm.prod, jnp.prod), (jnm.mean, jnp.mean),
        (jnm.var, jnp.var), (jnm.norm, jnp.linalg.norm),
        (functools.partial(jnm.norm, ord=1), functools.partial(jnp.linalg.norm, ord=1)),
    )  # fmt: skip

    @jax.jit
    def run(data):
        return [
            (
                jax.grad(lambda d, f=f: f(MaskedTensor(d, mask)).to_tensor(0).real)(data),
                jax.grad(lambda d, g=g: g(d).real)(data[kept]),
            )
            for f, g in pairs
        ]

    for one, other in run(data):
        np.testing.assert_allclose(one[kept], other, rtol=1e-5)
        assert one[1] == 0


def test_no_nan_is_computed():
    mask = jnp.array([[False, True], [False, False]])
    names = ("sum", "mean", "std", "max", "norm", "logsumexp", "median", "prod")

    def loss(data, name):
        return jnp.sum(getattr(jnm, name)(MaskedTensor(data, mask), 1).to_tensor(0))

    for poison in (jnp.inf, -jnp.inf, 1e30):
        data = jnp.array([[poison, 1.0], [poison, poison]])
        with jax.debug_nans(True):  # of every operation, as nothing is compiled
            for name in names if poison == jnp.inf else ("std", "logsumexp"):
                assert jnp.isfinite(jax.grad(loss)(data, name)).all()


def test_row_sparse_keeps_its_storage():
    x = build("row_sparse", jnp.ones(SHAPE), jnp.asarray(masks()[2]))
    with jmask.strict():
        for name in ("sum", "mean", "max", "argmin", "var", "norm", "logsumexp", "all"):
            assert getattr(jnm, name)(x, axis=1).stype == "row_sparse"
            assert getattr(jnm, name)(x, axis=-1, keepdims=True).shape == (4, 1)
        assert jnm.sum(x, axis=0).stype == "default"
    result = jnm.sum(x, axis=1)
    np.testing.assert_array_equal(result.to_tensor(-1), [1, -1, 2, 2])


def test_large_sparse_tensors_are_never_dense():
    table = MaskedTensor(RowSparse([5, 10**8], jnp.ones((2, 64)), (10**9, 64)))
    square = BCOO((jnp.arange(1.0, 4), jnp.array([[7, 8], [0, 9], [7, 99_999]])),
                  shape=(100_000, 100_000), unique_indices=True)  # fmt: skip
    with jmask.strict():
        assert jnm.sum(table).storage == 128
        assert jnm.mean(table, axis=1).stype == "row_sparse"
        for name in ("prod", "std", "max", "logsumexp"):
            for axis in (0, None):
                assert getattr(jnm, name)(MaskedTensor(square), axis=axis).valid.any()
        result = jnm.argmax(MaskedTensor(square), axis=1)
        assert result.storage[7] == 99_999
        assert jnm.sum(square, axis=1)[7] == 4


def test_sparse_with_dense_dimensions():
    rng = np.random.default_rng(0)
    indices = np.array([[0, 1], [2, 0], [2, 3], [1, 1]])
    values, mask = rng.normal(size=(4, 2, 3)), rng.random((4, 2, 3)) < 0.7
    data, valid = np.zeros((3, 4, 2, 3)), np.zeros((3, 4, 2, 3), bool)
    data[tuple(indices.T)], valid[tuple(indices.T)] = values, mask
    stored = BCOO(
        (jnp.asarray(values, jnp.float32), jnp.asarray(indices)),
        shape=data.shape, unique_indices=True,
    )  # fmt: skip
    sparse, dense = MaskedTensor(stored, jnp.asarray(mask)), MaskedTensor(data, valid)
    axes = (0, 3, (0, 2), (1, 3), (0, 1), (2, 3), ())

    @jax.jit
    def run(x):
        return [
            getattr(jnm, name)(x, axis=axis, keepdims=name == "max").to_dense()
            for name in ("sum", "prod", "max")
            for axis in axes
        ] + [jnm.argmax(x, axis=axis).to_dense() for axis in range(4)]

    for one, other in zip(run(sparse), run(dense), strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_equal(one.valid, other.valid)
        got, expected = one.to_tensor(9), other.to_tensor(9)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_ordinary_sparse_tensors():
    densify = lambda x: x.todense() if isinstance(x, RowSparse) else x
    rows = RowSparse([2, 0, 2, 4], jnp.array([[1.0, 2], [3, 4], [5, -6], [9, 9]]), (4, 2))
    coo = BCOO((jnp.array([1.0, 2, 3]), jnp.array([[0, 1], [2, 0], [0, 1]])), shape=(4, 2))
    csr = sparse_arrays.csr(np.float32([[0, 1], [2, 0], [3, 4], [0, 0]]))

    def run(functions, x):
        return [densify(f(x, axis=axis)) for f in functions for axis in (None, 0, -1)]

    shared = ("sum", "mean", "prod", "max", "min", "any", "all", "count_nonzero")
    ours = jax.jit(lambda x: run([getattr(jnm, n) for n in (*shared, "norm")], x))
    for x in (rows, coo, csr):
        dense = x.todense()
        with jmask.strict():
            results = ours(x)
        of_jax = run([*(getattr(jnp, n) for n in shared), jnp.linalg.vector_norm], dense)
        for result, expected in zip(results, of_jax, strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-6)
        with pytest.warns(jmask.StorageFallbackWarning, match="`var` made a sparse"):
            np.testing.assert_allclose(jnm.var(x, axis=1), dense.var(1))
        where = dense > 1
        np.testing.assert_array_equal(jnm.sum(x, where=where), dense.sum(where=where))


# --- where=, nothing, dtypes, and bad arguments ---------------------------------------

IDENTITIES = {
    "sum": 0, "prod": 1, "max": -np.inf, "min": np.inf, "amax": -np.inf, "amin": np.inf,
    "logsumexp": -np.inf, "norm": 0, "argmax": 0, "argmin": 0, "mean": np.nan,
    "var": np.nan, "std": np.nan, "median": np.nan, "all": True, "any": False, "count": 0,
    "count_nonzero": 0, "average": np.nan,
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", IDENTITIES)
def test_arrays_with_where(name):
    function = getattr(jnm, name)
    x = jnp.array([[1.0, jnp.nan, 3.0], [jnp.inf, jnp.nan, 2.0]])
    where = jnp.array([[True, False, True], [False, False, False]])
    result = function(x, axis=1, where=where)
    assert isinstance(result, jax.Array)
    np.testing.assert_array_equal(result[1], IDENTITIES[name])
    masked = function(MaskedTensor(x, where), axis=1)
    masked = masked if name == "count" else masked.storage
    assert masked[0] == result[0]
    assert not jnp.isnan(masked).any()
    # Without where=, and with one that is all true.
    y = jnp.array([[1.0, -2.0, 0.5], [4.0, 0.25, 2.0]])
    everything = function(y, axis=1, where=jnp.ones(3, bool))
    np.testing.assert_allclose(function(y, axis=1), everything, rtol=1e-6)
    if name not in ("norm", "logsumexp", "count"):
        np.testing.assert_allclose(getattr(jnp, name)(y, axis=1), function(y, axis=1))


def test_integers_of_nothing():
    x, nothing = jnp.arange(3, dtype=jnp.int8), jnp.zeros(3, bool)
    assert jnm.max(x, where=nothing) == -128
    assert jnm.min(x, where=nothing) == 127
    assert jnm.max(x.astype(jnp.uint8), where=nothing) == 0


@pytest.mark.dtype_promotion
def test_where_intersects_the_mask():
    x = MaskedTensor(jnp.arange(4.0), jnp.array([True, True, False, True]))
    where = jnp.array([False, True, True, True])
    assert jnm.sum(x, where=where).storage == 4
    for kind in KINDS[1:]:
        y = build(kind, jnp.ones(SHAPE), jnp.ones(SHAPE, bool))
        dense = np.arange(12).reshape(SHAPE) % 2 == 0
        expected = (PATTERNS[kind] & dense).sum()
        assert jnm.sum(y, where=jnp.asarray(dense)).storage == expected
        assert jnm.sum(y, where=y.mask).storage == PATTERNS[kind].sum()


def test_divisor_of_the_variance():
    data = jnp.array([[1.0, 5.0, jnp.nan], [4.0, jnp.nan, jnp.nan]])
    mask = ~jnp.isnan(data)
    for options in ({"ddof": 1}, {"correction": 1}):
        result = jnm.var(MaskedTensor(data, mask), axis=1, **options)
        assert result.storage[0] == 8
        np.testing.assert_array_equal(result.valid, [True, False])
        np.testing.assert_array_equal(jnm.std(data, 1, where=mask, **options)[1], np.nan)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "bfloat16", "float16", "complex64"])
def test_dtypes_are_those_of_jax(dtype):
    x = jnp.array([[1, 0, 2], [3, 1, 1]]).astype(dtype)
    mask = jnp.array([[True, False, True], [True, True, False]])
    places = coo(np.ones(mask.shape)).indices
    sparse = BCOO((x.ravel(), places), shape=(2, 3), unique_indices=True)
    names = ["sum", "prod", "mean", "var", "std"]
    if dtype != "complex64":
        names += ["max", "min", "argmax", "median", "cumsum", "cumprod", "all", "any"]
    if dtype == "bool":
        names = [n for n in names if n not in ("cumprod", "var", "std")]
    forms = (
        lambda f: f(MaskedTensor(x, mask), axis=1),
        lambda f: f(x, axis=1, where=mask),
        lambda f: f(MaskedTensor(sparse, mask.ravel()), axis=1),
    )
    for name in names:
        expected = jax.eval_shape(functools.partial(getattr(jnp, name), axis=1), x).dtype
        for form in forms[: 2 if name in ("median", "cumsum", "cumprod") else 3]:
            run = functools.partial(form, getattr(jnm, name))
            assert jax.eval_shape(run).dtype == expected, name
    norm = jax.eval_shape(lambda: forms[0](jnm.norm))
    assert norm.dtype == jnp.finfo(jnp.mean(x).dtype).dtype
    expected = np.mean(np.asarray(x, np.complex64), axis=1, where=np.asarray(mask))
    for form in forms:
        result = form(jnm.mean)
        result = result.storage if isinstance(result, MaskedTensor) else result
        np.testing.assert_allclose(np.asarray(result, np.complex64), expected, rtol=1e-2)


def test_accumulates_in_more_bits():
    x = jnp.ones(1000, jnp.bfloat16)
    assert jnm.sum(MaskedTensor(x, jnp.arange(1000) < 999)).storage == jnp.bfloat16(999)
    where = jnp.arange(20) < 19
    total = jnm.sum(jnp.full(20, 100, jnp.int8), where=where)
    assert total == 1900


def test_average():
    x = jnp.array([[1.0, jnp.nan, 3.0], [5.0, 6.0, jnp.inf]])
    mask = jnp.isfinite(x)
    weights = jnp.array([1.0, 2.0, 3.0])
    result = jnm.average(MaskedTensor(x, mask), axis=1, weights=weights)
    np.testing.assert_allclose(result.storage, [10 / 4, 17 / 3], rtol=1e-6)
    np.testing.assert_allclose(
        jnm.average(x, 1, weights, where=mask), [10 / 4, 17 / 3], rtol=1e-6
    )
    known = np.array([True, False, True])
    both = mask & known[None]
    for given in (MaskedTensor(x, mask), x):
        result = jnm.average(given, axis=1, weights=MaskedTensor(weights, known), where=mask)
        expected = np.ma.average(
            np.ma.array(x, mask=~both), 1, np.ma.array(np.tile(weights, (2, 1)), mask=~both)
        )
        np.testing.assert_allclose(result.storage, expected, rtol=1e-6)
    nothing = jnm.average(MaskedTensor(x, mask), 1, MaskedTensor(weights, np.zeros(3, bool)))
    assert not nothing.valid.any()
    rows = MaskedTensor(RowSparse([0, 1], x, (5, 3)), mask)
    result = jnm.average(rows, axis=1, weights=weights)
    assert result.stype == "row_sparse"
    np.testing.assert_allclose(result.to_tensor(0)[:2], [10 / 4, 17 / 3], rtol=1e-6)


def test_median_is_that_of_jax():
    x = jnp.array([[1.0, 2.0, 5.0, 3.0], [jnp.nan, 1.0, jnp.inf, -jnp.inf]])
    np.testing.assert_array_equal(jnm.median(x, axis=1), jnp.median(x, axis=1))
    masked = MaskedTensor(x, x > 1.5)
    np.testing.assert_array_equal(masked.median(axis=1).storage, [3, np.inf])


def test_median_of_no_groups():
    x = MaskedTensor(jnp.ones((0, 3)))
    assert jnm.median(x, axis=1).shape == (0,)
    assert jnm.median(x, axis=0, keepdims=True).valid.sum() == 0
