"""Rows in factors, joined: the rows of all parts, one after the other."""

import gc

import jax
import jax.numpy as jnp

from jmask._kernels.gathered_rows import GATHERED, GatheredRows, as_array

D = 3


def noted(x):
    """The rows of a part as an array, of which it is known what makes it."""
    array = as_array(x)
    if isinstance(x, GatheredRows):
        GATHERED.note(array, x)
    return array


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
