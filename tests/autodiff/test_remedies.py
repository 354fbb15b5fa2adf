"""Dense gradients of looked-up tables name what to write instead, and that is row-sparse."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask

IDS = jnp.array([7, 2, 7, 30])
V, D = 40_000, 8  # more than a megabyte
LOOK_UP_FIRST = "Look rows up first"
KEEP_ROWS = "Keep rows last, ids first"
PENALTY = "A penalty is on the rows that are looked up"


def square(x):
    return jnp.sum(x * x)


# name: (dense, words of the remedy, written as it says; None where a function has no other)
REWRITES = {
    "sigmoid": (
        lambda t: square(jax.nn.sigmoid(t)[IDS]),
        LOOK_UP_FIRST,
        lambda t: square(jax.nn.sigmoid(t[IDS])),
    ),
    "exp of a column": (
        lambda t: square(jnp.exp(t[:, :1])[IDS]),
        LOOK_UP_FIRST,
        lambda t: square(jnp.exp(t[:, :1][IDS])),
    ),
    "normalized": (
        lambda t: square((t / jnp.linalg.norm(t, axis=1, keepdims=True))[IDS] + 1),
        LOOK_UP_FIRST,
        lambda t: square(t[IDS] / jnp.linalg.norm(t[IDS], axis=1, keepdims=True) + 1),
    ),
    "all of it penalised": (
        lambda t: square(t[IDS]) + 1e-3 * square(t),
        PENALTY,
        lambda t: square(t[IDS]) + 1e-3 * square(t[IDS]),
    ),
    "transposed": (lambda t: square(t.reshape(D, V)[:, IDS]), KEEP_ROWS, None),
}
OF_VECTORS = {
    "exp": (
        lambda t: square(jnp.exp(t)[IDS]),
        LOOK_UP_FIRST,
        lambda t: square(jnp.exp(t[IDS])),
    ),
    "softplus, scaled": (
        lambda t: square(2 * jax.nn.softplus(t)[IDS]),
        LOOK_UP_FIRST,
        lambda t: square(2 * jax.nn.softplus(t[IDS])),
    ),
}
CASES = [
    *((name, (V, D), *case) for name, case in REWRITES.items()),
    *((f"{name} of a vector", (V * D,), *case) for name, case in OF_VECTORS.items()),
]


@pytest.mark.parametrize(
    ("shape", "dense", "words", "rewritten"), [x[1:] for x in CASES], ids=[x[0] for x in CASES]
)
def test_the_remedy_is_named_and_row_sparse(shape, dense, words, rewritten):
    table = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    with pytest.warns(jmask.StorageFallbackWarning, match=words) as said:
        gradient = jmask.grad(dense)(table)
    assert isinstance(gradient, jax.Array)
    assert len(said) == 1
    with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match=words):
        jmask.grad(dense)(table)
    if rewritten is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(jmask.grad(rewritten)(table), jmask.RowSparse)


@pytest.mark.parametrize(
    "loss",
    [
        lambda v: square(jnp.sort(v)[IDS]),  # the greatest, say, of all
        lambda v: square(v * 2),
        lambda v: square(jnp.cumsum(v)[IDS]),
    ],
)
def test_vectors_that_are_no_tables_are_not_reported(loss):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmask.grad(loss)(jnp.ones(V * D))
