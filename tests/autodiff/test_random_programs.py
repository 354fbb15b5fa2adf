"""Random programs of lookups: `value_and_grad` made dense equals `jax.value_and_grad`.

A program is a sum of terms. Each term looks one of the tables up in some way, goes through
some nonlinearity, and runs under a random stack of transformations.
"""

import warnings

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax

import jmask
from tests.oracle import assert_close, densified

V, D = 6, 2
TABLES = {
    "a": jnp.asarray(np.random.default_rng(1).normal(size=(V, D)), jnp.float32),
    "b": jnp.asarray(np.random.default_rng(2).normal(size=(V, D)), jnp.float32),
}

# Each takes a table (V, D) and ids (3,) and returns rows (3, D).
LOOKUPS = {
    "index": lambda t, i: t[i],
    "take clip": lambda t, i: jnp.take(t, i, axis=0, mode="clip"),
    "take fill": lambda t, i: jnp.nan_to_num(jnp.take(t, i, axis=0, mode="fill")),
    "vmap": lambda t, i: jax.vmap(lambda k: t[k])(i),
    "vmap take": lambda t, i: jax.vmap(lambda k: jnp.take(t, k, axis=0, mode="clip"))(i),
    "scalars": lambda t, i: jnp.stack([t[i[0]], t[i[1]], t[i[2]]]),
    "slice": lambda t, i: lax.dynamic_slice_in_dim(t, i[0], 3),
    "scaled": lambda t, i: (2.5 * t)[i] / 2,
    "low precision": lambda t, i: t.astype(jnp.bfloat16)[i].astype(jnp.float32),
    "scan": lambda t, i: lax.scan(lambda c, k: (c + t[k], c * t[k]), jnp.ones(D), i)[1],
    "cond": lambda t, i: lax.cond(i[0] > 2, lambda: t[i], lambda: jnp.sin(t[i[:1]]) + t[:3]),
    "bounded slice": lambda t, i: t[1:4],
    "tied": lambda t, i: t[i] @ t.T @ t,
    "no lookup": lambda t, i: jnp.full((3, D), t.sum()),
}

# Each takes a function of (table, ids) and returns another.
WRAPPERS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda t, i: lax.cond(i[1] > 1, f, lambda t, i: 0.5 * f(t, i), t, i),
    "cond without": lambda f: (
        lambda t, i: lax.cond(i[1] > 1, f, lambda t, i: jnp.ones((3, D)), t, i)
    ),
    "scan": lambda f: (
        lambda t, i: lax.scan(
            lambda c, k: (c + f(t, (i + k) % V), None), jnp.zeros((3, D)), jnp.arange(2)
        )[0]
    ),
    "scan of tables": lambda f: (
        lambda t, i: lax.scan(
            lambda c, k: ((c[0] + f(c[1], i), c[1]), k), (jnp.zeros((3, D)), t), jnp.arange(2)
        )[0][0]
    ),
    "vmap": lambda f: (
        lambda t, i: jax.vmap(f, in_axes=(None, 0))(t, jnp.stack([i, i[::-1]])).sum(0)
    ),
    "sine": lambda f: lambda t, i: jnp.sin(f(t, i)),
}


@st.composite
def terms(draw):
    return (
        draw(st.sampled_from(sorted(TABLES))),
        draw(st.sampled_from(sorted(LOOKUPS))),
        draw(st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3)),
        draw(st.lists(st.integers(-V - 2, V + 2), min_size=3, max_size=3)),
    )


def build(program):
    def loss(tables):
        total = 0.0
        for table, lookup, wrappers, ids in program:
            function = LOOKUPS[lookup]
            for wrapper in wrappers:
                function = WRAPPERS[wrapper](function)
            total += jnp.sum(jnp.cos(function(tables[table], jnp.array(ids))))
        return total

    return loss


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(terms(), min_size=1, max_size=3))
def test_random_program(program):
    loss = build(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jmask.StorageFallbackWarning)
        result = jax.jit(jmask.value_and_grad(loss))(TABLES)
    expected = jax.jit(jax.value_and_grad(loss))(TABLES)
    # Low precision is rounded at other places: sums of rows once instead of each time.
    low = any(lookup == "low precision" for _, lookup, _, _ in program)
    tolerance = 5e-2 if low else 1e-4
    assert_close(densified(result), expected, rtol=tolerance, atol=tolerance / 10)
