"""Gradients of slices with fixed bounds: rows, where they are few rows of a large table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask

LARGE = jnp.linspace(-1, 1, 8000 * 64, dtype=jnp.float32).reshape(8000, 64)
IDS = jnp.array([3, 9, 3])

# Slices, and the rows of a `RowSparse` gradient, or None where it is dense.
SLICES = {
    "a row": (lambda t: t[3], [3]),
    "the last row": (lambda t: t[-1], [7999]),
    "the first rows": (lambda t: t[:512], range(512)),
    "the last rows": (lambda t: t[-5:], range(7995, 8000)),
    "with steps": (lambda t: t[5:50:3], range(5, 50, 3)),
    "lax.slice": (lambda t: jax.lax.slice_in_dim(t, 2, 9), range(2, 9)),
    "two of them": (lambda t: t[:2] * t[4:6], [0, 1, 4, 5]),
    "as many as may be": (lambda t: t[:1000], range(1000)),
    "too many": (lambda t: t[:1001], None),
    "all of it in parts": (lambda t: jnp.concatenate(jnp.split(t, 16)), None),
    "columns": (lambda t: t[:, :3], None),
}


def squares(f):
    return lambda t: jnp.sum(f(t) ** 2)


@pytest.mark.sampled
@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("jit", [False, True])
def test_slice(name, jit):
    f, rows = SLICES[name]
    gradient = jmask.grad(squares(f))
    gradient = (jax.jit(gradient) if jit else gradient)(LARGE)
    dense = jax.grad(squares(f))(LARGE)
    assert isinstance(gradient, jmask.RowSparse) == (rows is not None)
    if rows is not None:
        assert sorted(set(np.asarray(gradient.indices).tolist())) == list(rows)
        gradient = gradient.todense()
    np.testing.assert_allclose(gradient, dense, rtol=1e-6)


def test_small_tables_and_stacks_of_weights_stay_dense():
    """So does a slice of what has few rows, however large they are."""
    for shape in ((500, 4), (16, 40_000)):
        gradient = jmask.grad(lambda t: jnp.sum(t[0] ** 2))(jnp.ones(shape))
        assert isinstance(gradient, jax.Array)


def test_with_lookups():
    f = squares(lambda t: t[3][None] + t[IDS])
    gradient = jmask.grad(f)(LARGE)
    assert gradient.nse == 4
    np.testing.assert_allclose(gradient.todense(), jax.grad(f)(LARGE), rtol=1e-6)


def test_explain_says_the_same():
    found = jmask.explain(squares(SLICES["the first rows"][0]), LARGE)
    assert found.parameters[0].nse == 512
    found = jmask.explain(squares(SLICES["too many"][0]), LARGE)
    assert not found.parameters[0].is_sparse
