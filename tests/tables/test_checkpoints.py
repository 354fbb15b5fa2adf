"""Checkpoints of tables: restored, each row is its own."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.later import later
from tests.stored_tables import bits, numbers, stored

ocp, eqx = later("orbax.checkpoint"), later("equinox")

pytestmark = [
    pytest.mark.sampled(15),
    pytest.mark.dtype_promotion,
]

TX = jmask.adam(0.1)
LAYOUTS = ["array", "packed"]
dense = lambda tree: [bits(np.asarray(x)) for x in jax.tree.leaves(tree)]


def run_of(layout, x=None):
    """Parameters and state after a step, and a state of rows that are not floating."""
    params = {"t": stored(layout, numbers() if x is None else x), "w": jnp.ones(2)}
    tx, ids = jmask.adam(0.1), jnp.array([3, 20, 7])
    look = lambda p: jmask.embedding_lookup(p["t"], ids, width=12)
    grads = jmask.grad(lambda p: jnp.sum(jnp.sin(look(p))))(params)
    return jmask.apply_gradients(tx, grads, tx.init(params), params)


@functools.cache
def saved(layout):
    return run_of(layout)


@functools.cache
def target(layout):
    return run_of(layout, jnp.zeros_like(numbers()))


def restored(tree, path, *shapes):
    """What orbax gives of a tree that it saved."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "run", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "run", *shapes)


def by_orbax(tree, like, path):
    return restored(tree, path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


def by_equinox(tree, like, path):
    eqx.tree_serialise_leaves(path / "run.eqx", tree)
    return eqx.tree_deserialise_leaves(path / "run.eqx", like)


def by_hand(tree, like, path):
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


ROUTES = {"orbax": by_orbax, "equinox": by_equinox, "by hand": by_hand}


@pytest.mark.sampled
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_leaves_are_restored(layout, route, tmp_path):
    """By whatever stores the leaves of a tree."""
    tree, like = saved(layout), target(layout)
    again = dense(ROUTES[route](tree, like, tmp_path))
    for x, y in zip(again, dense(tree), strict=True):
        np.testing.assert_array_equal(x, y)


# --- plain arrays ---------------------------------------------------------------------------


from_arrays_of = lambda tree, like, path: jmask.from_arrays(jmask.to_arrays(tree), like)


def from_plain_arrays_of_orbax(tree, like, path):
    shapes = jmask.to_arrays(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
    return jmask.from_arrays(restored(jmask.to_arrays(tree), path, shapes), like)


# A checkpoint of the tree as it is, restored without its types.
from_leaves_of_orbax = lambda tree, like, path: jmask.from_arrays(restored(tree, path), like)
from_equinox = lambda tree, like, path: jmask.from_arrays(
    by_equinox(jmask.to_arrays(tree), jmask.to_arrays(like), path), like
)
CALLS = {
    "arrays": from_arrays_of,
    "orbax": from_plain_arrays_of_orbax,
    "orbax, leaves": from_leaves_of_orbax,
    "equinox": from_equinox,
}


@pytest.mark.sampled
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_from_arrays(layout, call, tmp_path):
    tree, like = saved(layout), target(layout)
    again = CALLS[call](tree, like, tmp_path)
    assert jax.tree.structure(again) == jax.tree.structure(like)
    for x, y in zip(dense(again), dense(tree), strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(like), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


# --- pickle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pickle(layout):
    tree = run_of(layout)
    again = pickle.loads(pickle.dumps(tree))
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for x, y in zip(dense(again), dense(tree), strict=True):
        np.testing.assert_array_equal(x, y)
