"""Reductions at their edges: ties, zeros, one entry, complex numbers; no nan is computed.

Their values and derivatives are in test_masked_functions.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask.numpy as jnm
from jmask import MaskedTensor
from tests.masked_cases import PATTERNS, SHAPE, build, slope_of


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
