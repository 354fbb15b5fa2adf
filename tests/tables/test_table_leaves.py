"""Gradients and steps on explicit axes, in a process that has seen no mesh."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask

pytestmark = [pytest.mark.sampled(15), pytest.mark.dtype_promotion]

V, D = 13, 3
TX = jmask.adam(0.1)
START = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)


def check_gradients_on_explicit_axes():
    table = jmask.sharded(START, jax.make_mesh((4,), ("x",)))
    look = lambda t: jmask.embedding_lookup(t, jnp.array([1, 1, 12]))
    for loss in (lambda t: jnp.sum(look(t)), lambda t: jnp.sum(jnp.sin(look(t)))):
        value, gradient = jmask.value_and_grad(loss)(table)
        expected, dense = jax.value_and_grad(loss)(START)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient.todense()[:V], dense, rtol=1e-6)
        new, _ = jmask.apply_gradients(TX, gradient, TX.init(table), table)
        array, _ = jmask.apply_gradients(TX, jmask.grad(loss)(START), TX.init(START), START)
        np.testing.assert_allclose(np.asarray(new)[:V], array, rtol=1e-5)
    assert jax.sharding.get_abstract_mesh().empty


def test_gradients_on_explicit_axes_outside_jit():
    """Which `jax.make_mesh` gives, and without a mesh that is set."""
    # In an interpreter of its own: behind a thousand other tests `jnp.zeros` was on a mesh of
    # theirs, with automatic axes.
    module = "tests.tables.test_table_leaves"
    check = "check_gradients_on_explicit_axes()"
    code = f"import tests.conftest, {module} as t; t.{check}"
    root, cpus = pathlib.Path(__file__).parents[2], {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], cwd=root, env=cpus, check=True)
