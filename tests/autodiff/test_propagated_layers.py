"""Layers that pass rows on through a graph: what is said of the gradient is what it is.

neighbours = zeros.at[to].add(table[from])          LightGCN
((table + neighbours) / 2)[ids]
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask

V, D = 5000, 64
SOURCES, TARGETS = np.random.default_rng(0).integers(0, V, (2, 2 * V))
IDS = jnp.array([1, 7, 7])
TABLE = jax.random.normal(jax.random.key(0), (V, D))


def passed_on(table):
    return jnp.zeros_like(table).at[TARGETS].add(table[SOURCES])


LAYERS = {
    "neighbours alone": lambda t: passed_on(t),
    "one layer": lambda t: (t + passed_on(t)) / 2,
    "two layers": lambda t: t + passed_on(t) + passed_on(passed_on(t)),
    "segments": lambda t: t + jax.ops.segment_sum(t[SOURCES], TARGETS, V),
    "dense": lambda t: t @ jnp.ones((D, D)) + passed_on(t),
}


@pytest.mark.parametrize("name", LAYERS)
def test_one_truth(name):
    """The gradient, what `grad` warns of and what `explain` says agree."""

    def loss(table):
        return jnp.sum(LAYERS[name](table)[IDS] ** 2)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        gradient = jmask.grad(loss)(TABLE)
    said = [str(x.message) for x in found]
    is_sparse = isinstance(gradient, jmask.RowSparse)
    explained = jmask.explain(loss, TABLE).parameters[0]
    dense = gradient.todense() if is_sparse else gradient
    np.testing.assert_allclose(dense, jax.grad(loss)(TABLE), rtol=2e-4, atol=1e-4)
    assert explained.is_sparse == is_sparse
    assert len(said) <= 1
    for text in said:
        assert ("became dense" in text) == (not is_sparse)
        assert ("came from an array as large as the table" in text) == is_sparse
        assert not is_sparse or f"{gradient.nse:,} rows" in text
    assert bool(said) == ("needs all of it" in explained.note)
    if is_sparse:
        assert explained.nse == gradient.nse > V
        assert "`jmask.densify()`" in explained.note


def test_strict_raises():
    with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match="needs all of it"):
        jmask.grad(lambda t: jnp.sum(LAYERS["one layer"](t)[IDS]))(TABLE)
