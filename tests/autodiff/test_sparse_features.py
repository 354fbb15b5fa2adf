"""The gradient of W in X W is row-sparse, for `jmask.dot` and for JAX's own product."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from jmask import RowSparse
from jmask._tensors.storage import with_stored_values
from tests.oracle import densified, touched_rows
from tests.product_cases import BATCHED, COO, CSR, FEATURES, ROWS, V

_RNG = np.random.default_rng(1)
_compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def rescaled(x: Any, factor: Any) -> Any:
    return with_stored_values(x, factor * x.data)


def scanned(w: jax.Array) -> jax.Array:
    step = lambda total, factor: (total + loss(jmask.dot(rescaled(CSR, factor), w)), None)
    return jax.lax.scan(step, 0.0, jnp.arange(1.0, 3))[0]


def loss(scores: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(scores))


USED = np.flatnonzero(FEATURES.any(0)).tolist()
# A function of w (V,) or (V, 2), how many rows its gradient stores, and which.
LOSSES = {
    "dot, csr": (lambda w: loss(jmask.dot(CSR, w)), 30, USED),
    "dot, coo": (lambda w: loss(jmask.dot(COO, w)), 30, USED),
    "@, csr": (lambda w: loss(CSR @ w), 30, USED),
    "@, coo": (lambda w: loss(COO @ w), 30, USED),
    "transposed twice": (
        lambda w: loss(jmask.dot(COO.T, w, transpose_a=True, forward_stype="default")),
        30,
        USED,
    ),
    "w on the left": (
        lambda w: loss(jmask.dot(w, CSR, transpose_a=True, transpose_b=True)),
        30,
        USED,
    ),
    "row_sparse features": (lambda w: loss(jmask.dot(ROWS, w, transpose_a=True)), 4, [3, 39]),
    "@, vmap": (lambda w: loss(jax.vmap(lambda x: x @ w)(BATCHED)), 36, USED),
    "jit": (jax.jit(lambda w: loss(jmask.dot(CSR, w))), 30, USED),
    "jit, @": (jax.jit(lambda w: loss(CSR @ w)), 30, USED),
    "remat": (jax.checkpoint(lambda w: loss(jmask.dot(CSR, w))), 30, USED),
    "scan": (scanned, 60, USED),
    "vmap": (lambda w: loss(jax.vmap(lambda x: jmask.dot(x, w))(BATCHED)), 36, USED),
    "dot and lookup": (
        lambda w: loss(jmask.dot(CSR, w)) + loss(w[jnp.array([0, V - 1])]),
        32,
        [0, *USED, V - 1],
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_of_dense_weights_is_row_sparse(name):
    function, nse, touched = LOSSES[name]
    weights = [np.float32(_RNG.normal(size=shape)) for shape in ((V,), (V, 2))]

    @_compiled
    def both(weights: Any) -> Any:
        return [(jmask.grad(function)(w), jax.grad(function)(w)) for w in weights]

    with jmask.strict():
        gradients = both(weights)
    for gradient, exact in gradients:
        assert isinstance(gradient, RowSparse)
        assert gradient.nse == nse
        assert touched_rows(gradient).tolist() == touched
        np.testing.assert_allclose(densified(gradient), exact, rtol=1e-4, atol=1e-6)
