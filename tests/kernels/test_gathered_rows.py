"""Rows in factors, joined: the rows of all parts, one after the other."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jmask._kernels.gathered_rows import GATHERED, GatheredRows, as_array, joined

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
    return GatheredRows(source, index, weight, jnp.dtype(jnp.float32))


def noted(x):
    """The rows of a part as an array, of which it is known what makes it."""
    array = as_array(x)
    if isinstance(x, GatheredRows):
        GATHERED.note(array, x)
    return array


def known(parts):
    """What is known of parts that are joined, while they are traced, and the array."""

    @jax.jit
    def trace(parts):
        rows = joined(list(map(noted, parts)))
        found.append(GATHERED.of(rows))
        return rows, found[-1] and as_array(found[-1])

    found = []
    return found, trace(parts)


@given(st.lists(parts_of_rows(), min_size=1, max_size=4))
def test_joined(parts):
    expected = np.concatenate([as_array(x) for x in parts])
    np.testing.assert_array_equal(joined(list(map(as_array, parts))), expected)
    (rows,), (array, of_known) = known(parts)
    np.testing.assert_array_equal(array, expected)
    if rows is not None:
        np.testing.assert_array_equal(of_known, expected)
        assert len(parts) == 1 or 2 * rows.source.shape[0] <= len(expected)


def test_what_stays_known():
    source = jnp.ones((2, D), jnp.float32)
    rows = GatheredRows(source, jnp.array([0, 0, 1, 1, 2]), None, source.dtype)
    half = rows.scaled(lambda x: x.astype(jnp.float16))
    assert known([rows, rows])[0][0] is not None
    assert known([rows, jnp.zeros((1, D))])[0][0] is not None
    assert known([rows, jnp.zeros((4, D))])[0][0] is None
    assert known([rows, half])[0][0] is None


def test_facts_go_with_their_arrays():
    def trace(x):
        rows = noted(GatheredRows(x, jnp.array([0, 0, 1]), None, x.dtype))
        assert GATHERED.of(rows) is not None
        assert GATHERED.of(jax.tree.map(lambda leaf: leaf, [rows])[0]) is not None
        assert GATHERED.of(jax.jit(jnp.sin)(rows)) is None
        return rows

    before = len(GATHERED)
    jax.jit(trace)(jnp.ones((2, D)))
    gc.collect()
    assert len(GATHERED) <= before
