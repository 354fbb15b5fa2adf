"""Reductions of arrays with `where=`, of nothing, of every dtype, and bad arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jmask.numpy as jnm
from jmask import MaskedTensor, RowSparse
from tests.masked_cases import KINDS, PATTERNS, SHAPE, build
from tests.sparse_arrays import coo

pytestmark = pytest.mark.sampled

IDENTITIES = {
    "sum": 0, "prod": 1, "max": -np.inf, "min": np.inf, "amax": -np.inf, "amin": np.inf,
    "logsumexp": -np.inf, "norm": 0, "argmax": 0, "argmin": 0, "mean": np.nan,
    "var": np.nan, "std": np.nan, "median": np.nan, "all": True, "any": False, "count": 0,
    "count_nonzero": 0, "average": np.nan,
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis": 2}, ValueError, "`axis` 2 is out of bounds"),
        ({"axis": -3}, ValueError, "`axis` -3 is out"),
        ({"axis": 1.5}, TypeError, "`axis` must be an int"),
        ({"where": jnp.ones(3)}, TypeError, "`where` must be a boolean"),
        ({"where": jnp.ones(5, bool)}, ValueError, "`where` of shape"),
    ],
)
def test_bad_arguments(options, error, message):
    x = jnp.ones((2, 3))
    functions = [jnm.sum, jnm.std, jnm.max, jnm.any, jnm.median, jnm.cumsum]
    for function in functions:
        for tensor in (x, MaskedTensor(x)):
            with pytest.raises(error, match=message):
                function(tensor, **options)


def test_median_is_that_of_jax():
    x = jnp.array([[1.0, 2.0, 5.0, 3.0], [jnp.nan, 1.0, jnp.inf, -jnp.inf]])
    np.testing.assert_array_equal(jnm.median(x, axis=1), jnp.median(x, axis=1))
    masked = MaskedTensor(x, x > 1.5)
    np.testing.assert_array_equal(masked.median(axis=1).storage, [3, np.inf])


def test_median_of_no_groups():
    x = MaskedTensor(jnp.ones((0, 3)))
    assert jnm.median(x, axis=1).shape == (0,)
    assert jnm.median(x, axis=0, keepdims=True).valid.sum() == 0
