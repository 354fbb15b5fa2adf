"""Every reduction over the valid entries only: values, masks, derivatives, storages.

The model is NumPy in float64 on the valid entries of each slice; its derivative is taken by
central differences. Under the mask lie nan, inf and 1e30.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
import jmask.numpy as jnm
from jmask import MaskedTensor
from tests.masked_cases import KINDS, PATTERNS, POISON, SHAPE, build, masks, sliced, slope

pytestmark = pytest.mark.sampled

AXES = ((None, True), (0, False), (-1, True))
BOTH = (((0, 1), False),)


def _norm(p):
    return lambda x, m: np.linalg.norm(x[m], p)


def _index(function):
    return lambda x, m: np.flatnonzero(m)[function(x[m])]


def _lower_median(x, m):
    return np.sort(x[m])[(m.sum() - 1) // 2]


def _log_sum_exp(x, m):
    return np.log(np.exp(x[m]).sum())


def _entries(function, **options):
    return lambda x, m: function(x[m], **options)


def _with(function, **options):
    return functools.partial(function, **options)


# Half the time of compiling small functions for a CPU is spent on optimizing them.
_compiled = _with(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

# Reduction, and its model: of the entries of a slice and which are valid.
SMOOTH = {
    "sum": (jnm.sum, _entries(np.sum)),
    "prod": (jnm.prod, _entries(np.prod)),
    "mean": (jnm.mean, _entries(np.mean)),
    "var": (jnm.var, _entries(np.var)),
    "std": (jnm.std, _entries(np.std)),
    "max": (jnm.max, _entries(np.max)),
    "amin": (jnm.amin, _entries(np.min)),
    "norm": (jnm.norm, _norm(2)),
    "norm 1": (_with(jnm.norm, ord=1), _norm(1)),
    "norm inf": (_with(jnm.norm, ord=np.inf), _norm(np.inf)),
    "norm -inf": (_with(jnm.norm, ord=-np.inf), _norm(-np.inf)),
    "norm 3.5": (_with(jnm.norm, ord=3.5), _norm(3.5)),
    "norm -1": (_with(jnm.norm, ord=-1), _norm(-1)),
    "logsumexp": (jnm.logsumexp, _log_sum_exp),
    "median": (jnm.median, _entries(np.median)),
    "lower median": (_with(jnm.median, averaged=False), _lower_median),
}
STEPS = {
    "argmax": (jnm.argmax, _index(np.argmax)),
    "argmin": (jnm.argmin, _index(np.argmin)),
    "all": (lambda x, **axes: jnm.all(x > 0, **axes), lambda x, m: (x[m] > 0).all()),
    "any": (lambda x, **axes: jnm.any(x > 0, **axes), lambda x, m: (x[m] > 0).any()),
    "count_nonzero": (jnm.count_nonzero, _entries(np.count_nonzero)),
}
DENSIFY = ("median", "lower median")


def _expected_fallback(name, kind):
    if name in DENSIFY and kind != "dense":
        return pytest.warns(jmask.StorageFallbackWarning)
    return contextlib.nullcontext()


def _batch(seed=1):
    """Data and masks (n, 4, 3): every mask with every poison under it."""
    rng = np.random.default_rng(seed)
    clean = rng.normal(size=SHAPE)
    every = masks()
    mask = np.repeat(every, len(POISON), 0)
    poison = np.tile(POISON, len(every))[:, None, None]
    return clean, jnp.asarray(np.where(mask, clean, poison), jnp.float32), mask


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in SMOOTH for kind in KINDS])
def test_values_and_derivatives(name, kind):
    function, model = SMOOTH[name]
    clean, data, mask = _batch()
    axes = AXES + BOTH if kind == "dense" else AXES[1:]

    def run(data, mask, axis, keepdims):
        def loss(data):
            result = function(build(kind, data, mask), axis=axis, keepdims=keepdims)
            result = result.to_dense()
            return jnp.sum(result.to_tensor(0)), result

        return jax.grad(loss, has_aux=True)(data)

    @_compiled
    @jax.vmap
    def all_axes(data, mask):
        return [run(data, mask, axis, keepdims) for axis, keepdims in axes]

    with _expected_fallback(name, kind):
        results = jax.tree.map(np.asarray, all_axes(data, jnp.asarray(mask)))
    for (axis, keepdims), (gradients, values) in zip(axes, results, strict=True):
        for i in range(len(mask)):
            valid = mask[i] & PATTERNS[kind]
            first = i // len(POISON) * len(POISON)
            if i == first:
                expected = sliced(model, clean, valid, axis, keepdims)
                derivative = slope(model, clean, valid, axis)
            assert values.shape[1:] == expected.shape
            np.testing.assert_array_equal(values.valid[i], ~np.isnan(expected))
            assert not np.isnan(values.storage[i]).any()
            got = np.where(values.valid[i], values.storage[i], np.nan)
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)
            np.testing.assert_allclose(gradients[i], derivative, rtol=2e-4, atol=2e-5)
            assert (gradients[i][~valid] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_indices_truth_and_counts(kind):
    clean, data, mask = _batch()

    @_compiled
    @jax.vmap
    def run(data, mask):
        x = build(kind, data, mask)
        return [
            function(x, axis=axis, keepdims=keepdims).to_dense()
            for name, (function, _) in STEPS.items()
            for axis, keepdims in AXES
        ]

    results = iter(jax.tree.map(np.asarray, run(data, jnp.asarray(mask))))
    for name, (_, model) in STEPS.items():
        for axis, keepdims in AXES:
            values = next(results)
            for i in range(len(mask)):
                valid = mask[i] & PATTERNS[kind]
                expected = sliced(model, clean, valid, axis, keepdims)
                np.testing.assert_array_equal(values.valid[i], ~np.isnan(expected))
                got = np.where(values.valid[i], values.storage[i], np.nan)
                np.testing.assert_array_equal(got, expected, err_msg=f"{name} {axis}")


@pytest.mark.parametrize("kind", ["dense", "csr"])
@pytest.mark.parametrize("name", SMOOTH)
def test_forward_mode_and_second_order(name, kind):
    function, _ = SMOOTH[name]
    _, data, mask = _batch()
    data, mask = data[8:], mask[8:]  # fully masked row and column, and random ones

    def loss(data, mask):
        return jnp.sum(function(build(kind, data, mask), axis=1).to_tensor(0) ** 2)

    @_compiled
    @jax.vmap
    def run(data, mask):
        direction = jnp.linspace(-1, 1, data.size).reshape(data.shape)
        of = lambda data: loss(data, mask)
        _, forward = jax.jvp(of, (data,), (direction,))
        reverse, second = jax.jvp(jax.grad(of), (data,), (direction,))
        return forward, jnp.sum(reverse * direction), second

    with _expected_fallback(name, kind):
        forward, reverse, second = run(data, jnp.asarray(mask))
    np.testing.assert_allclose(forward, reverse, rtol=1e-4, atol=1e-5)
    assert np.isfinite(second).all()
    assert (np.asarray(second)[~(mask & PATTERNS[kind])] == 0).all()


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
    run = _compiled(lambda d: [jax.grad(loss)(d, axis) for axis in axes])
    for axis, gradient in zip(axes, run(jnp.asarray(data, jnp.float32)), strict=True):
        expected = slope(_entries(np.prod), data, valid, axis)
        np.testing.assert_allclose(gradient, expected, atol=1e-4)


def test_derivative_zero_by_convention():
    mask = jnp.array([[True, True], [True, False], [False, False]])
    norms = [_with(jnm.norm, ord=p) for p in (2, 3, 0.5, np.inf)]
    spreads = [jnm.std, jnm.var, _with(jnm.std, ddof=1)]

    @_compiled
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
        (_with(jnm.norm, ord=1), _with(jnp.linalg.norm, ord=1)),
    )  # fmt: skip

    @_compiled
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
