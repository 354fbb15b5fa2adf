"""Arithmetic over the leaves of a table, by JAX and by optax: right, or refused."""

import copy
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask

pytestmark = [pytest.mark.sampled(15), pytest.mark.dtype_promotion]

V, D = 13, 3
TX = jmask.adam(0.1)
START = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)


TABLES = {
    "packed": lambda: jmask.PackedTable.pack(START),
}


def of_floating(function):
    """What maps over floating leaves alone, as `eqx.filter` does."""
    return lambda t: jax.tree.map(
        lambda x: function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, t
    )


# The table that comes of it, and what it is of the array.
MAPS = {
    "twice": (lambda t: jax.tree.map(lambda x: x * 2, t), lambda x: x * 2),
    "zeros_like": (lambda t: jax.tree.map(jnp.zeros_like, t), jnp.zeros_like),
    "add": (lambda t: jax.tree.map(jnp.add, t, t), lambda x: x + x),
    "negative": (lambda t: jax.tree.map(jnp.negative, t), jnp.negative),
    "half of floating": (of_floating(lambda x: x / 2), lambda x: x / 2),
    "zeros of floating": (of_floating(jnp.zeros_like), jnp.zeros_like),
    "incremental_update": (lambda t: optax.incremental_update(t, t, 0.1), lambda x: x),
    "optax.tree.add": (lambda t: optax.tree.add(t, t), lambda x: x + x),
    "optax.tree.scale": (lambda t: optax.tree.scale(2.0, t), lambda x: x * 2),
    "optax.tree.zeros_like": (optax.tree.zeros_like, jnp.zeros_like),
    "jmask.tree.add": (lambda t: jmask.tree.add(t, t), lambda x: x + x),
    "jmask.tree.scale": (lambda t: jmask.tree.scale(2.0, t), lambda x: x * 2),
    "jmask.tree.mean": (lambda t: jmask.tree.mean([t, t]), lambda x: x),
    "copy": (lambda t: jax.tree.map(jnp.copy, t), lambda x: x),
    "copy.copy": (copy.copy, lambda x: x),
    "copy.deepcopy": (copy.deepcopy, lambda x: x),
}
NUMBERS = {
    "jmask.tree.norm": (jmask.tree.norm, jnp.linalg.norm),
    "optax.global_norm": (optax.global_norm, jnp.linalg.norm),
    "optax.tree.norm": (optax.tree.norm, jnp.linalg.norm),
    "squares": (
        lambda t: sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(t)),
        lambda x: jnp.sum(x * x),
    ),
    "optax.tree.sum": (optax.tree.sum, jnp.sum),
    "jmask.tree.size": (jmask.tree.size, jnp.size),
    "size": (lambda t: t.size, jnp.size),
}


# It is what people have in their programs, whatever newer versions of optax say of the name.
@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
@pytest.mark.sampled
@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("case", [*MAPS, *NUMBERS])
@pytest.mark.parametrize("table", TABLES)
def test_right_or_refused(table, case, is_jitted):
    function, wanted = (MAPS | NUMBERS)[case]
    x = TABLES[table]()
    is_map = case in MAPS
    result = lambda t: function(t).todense() if is_map else function(t)
    found = np.asarray((jax.jit(result) if is_jitted else result)(x))
    expected = np.asarray(wanted(x.todense()))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


# --- in the loss ---------------------------------------------------------------------------

PENALTIES = {
    "jmask.tree.norm": lambda p: jmask.tree.norm(p, squared=True),
    "todense": lambda p: jnp.sum(jnp.square(p["t"].todense())) + jnp.sum(p["w"] ** 2),
}
OF_LEAVES = {
    "optax.tree.norm": lambda p: optax.tree.norm(p, squared=True),
    "leaves": lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(p)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("penalty", [*PENALTIES, *OF_LEAVES])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
def test_penalty_over_all_parameters(table, penalty, is_jitted):
    ids = jnp.array([1, 1, 12])
    params = {"t": TABLES[table](), "w": jnp.ones(2)}
    loss = lambda p: jnp.sum(jnp.sin(p["t"][ids])) + (PENALTIES | OF_LEAVES)[penalty](p)
    gradient = jmask.value_and_grad(loss)
    gradient = jax.jit(gradient) if is_jitted else gradient
    if penalty in OF_LEAVES:
        told = (
            r"leaves of `p\['t'\]`, a \w+Table|stands for a table.*jmask\.tree\.norm|key<fry>"
        )
        with pytest.raises(TypeError, match=told):
            gradient(params)
        return
    value, grads = gradient(params)
    arrays = {"t": params["t"].todense(), "w": params["w"]}
    dense = lambda p: jnp.sum(jnp.sin(p["t"][ids])) + sum(jnp.sum(x**2) for x in p.values())
    expected, dense_grads = jax.value_and_grad(dense)(jax.tree.map(np.asarray, arrays))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grads["t"].todense(), dense_grads["t"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads["w"], dense_grads["w"], rtol=1e-5)


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


# --- stacks --------------------------------------------------------------------------------

IDS = jnp.array([1, 12])
OVER_A_TABLE = {
    "vmap": lambda t: jax.vmap(lambda table: table[IDS])(t),
    "vmap, by argument": lambda t: jax.vmap(lambda table, i: table[i], (0, None))(t, IDS),
    "vmap of a tree": lambda t: jax.vmap(lambda p: p["t"][IDS])({"t": t}),
    "scan": lambda t: jax.lax.scan(lambda c, table: (c, table[IDS]), 0, t),
    "map": lambda t: jax.lax.map(lambda table: table[IDS], t),
}


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize("case", OVER_A_TABLE)
@pytest.mark.parametrize("table", TABLES)
def test_what_maps_over_a_table_is_refused(table, case, has_gradient):
    function = OVER_A_TABLE[case]
    if has_gradient:
        function = jmask.grad(lambda t: jnp.sum(jax.tree.leaves(OVER_A_TABLE[case](t))[-1]))
    with pytest.raises((IndexError, TypeError, ValueError)):
        function(TABLES[table]())


@pytest.mark.parametrize("table", TABLES)
def test_tables_beside_what_is_mapped(table):
    t, ids = TABLES[table](), jnp.array([[1, 2], [12, 1]])
    mapped = jax.vmap(lambda t, i: t[i], (None, 0))(t, ids)
    _, scanned = jax.lax.scan(lambda t, i: (t, t[i]), t, ids)
    np.testing.assert_allclose(mapped, np.asarray(t.todense())[ids], rtol=1e-6)
    np.testing.assert_array_equal(mapped, scanned)


MAKE = {"packed": jmask.PackedTable.pack}
OF_ONE_TABLE = {
    "lookup": lambda t: t[IDS],
    "todense": lambda t: t.todense(),
    "init": TX.init,
    "grad": jmask.grad(lambda t: jnp.sum(jax.vmap(lambda table: table[IDS])(t))),
}


@pytest.mark.parametrize("case", OF_ONE_TABLE)
@pytest.mark.parametrize("make", MAKE)
def test_a_stack_that_vmap_made(make, case):
    """A whole step under `vmap` is right; what takes one table says so."""
    stack = jnp.stack([START, 2 * START, -START])
    tables = jax.vmap(MAKE[make])(stack)
    with pytest.raises(ValueError, match=r"is a stack of tables.*jax\.vmap\(tx\.init\)"):
        OF_ONE_TABLE[case](tables)

    def step(table, state):
        gradient = jmask.grad(lambda t: jnp.sum(jnp.sin(t[IDS])))(table)
        return jmask.apply_gradients(TX, gradient, state, table)

    found, _ = jax.vmap(step)(tables, jax.vmap(TX.init)(tables))
    found = jax.vmap(lambda t: t.todense())(found)
    for x, old in zip(found, stack, strict=True):
        np.testing.assert_allclose(x, step(old, TX.init(old))[0], rtol=1e-5, atol=1e-6)
