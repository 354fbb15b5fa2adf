"""Rows in factors, joined: the rows of all parts, one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jmask._kernels.factored_rows import FactoredRows, as_array, joined

D = 3


@st.composite
def parts_of_rows(draw):
    """An array, or factors with or without weights, some of whose entries are zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    entries = draw(st.sampled_from([0, 1, 4, 9]))
    kind = draw(st.sampled_from(["array", "factors", jnp.float16, jnp.float32]))
    if kind == "array":
        return jnp.asarray(rng.normal(size=(entries, D)), jnp.float32)
    source = jnp.asarray(rng.normal(size=(2, D)), jnp.float32)
    weight = None if kind == "factors" else jnp.asarray(rng.normal(size=entries), kind)
    index = jnp.asarray(rng.integers(0, 3, entries), jnp.int32)
    return FactoredRows(source, index, weight, jnp.dtype(jnp.float32))


@given(st.lists(parts_of_rows(), min_size=1, max_size=4))
def test_joined(parts):
    expected = np.concatenate([as_array(x) for x in parts])
    for join in (joined, jax.jit(joined)):
        rows = join(parts)
        np.testing.assert_array_equal(as_array(rows), expected)
        if isinstance(rows, FactoredRows) and len(parts) > 1:
            assert 2 * rows.source.shape[0] <= len(expected)


def test_factors_stay_factors():
    source = jnp.ones((2, D), jnp.float32)
    rows = FactoredRows(source, jnp.array([0, 0, 1, 1, 2]), None, source.dtype)
    assert isinstance(joined([rows, rows]), FactoredRows)
    assert isinstance(joined([rows, jnp.zeros((1, D))]), FactoredRows)
    assert isinstance(joined([rows, jnp.zeros((4, D))]), jax.Array)
    assert isinstance(joined([rows, rows.scaled(lambda x: x.astype(jnp.float16))]), jax.Array)
