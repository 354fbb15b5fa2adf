"""Lifted optimizers update rows in the ways in which named ones do: whole tables, packed ones.

The oracle is `update` and `apply_updates`, which gather, compute and scatter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.oracle import assert_close
from tests.stored_tables import update_and_apply

pytestmark = pytest.mark.dtype_promotion

V, D, N = 20, 64, 16  # a batch that touches most rows
TABLE = jax.random.normal(jax.random.key(0), (V, D))


def keeping():
    """A state of which nothing is computed: the last gradient, twice, and the one before."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return zeros, zeros, zeros

    def update(updates, state, params=None):
        steps = jax.tree.map(lambda g, last: -0.1 * (2 * g - last), updates, state[0])
        return steps, (updates, updates, state[0])

    return optax.GradientTransformation(init, update)


LIFTED = {
    "adam": jmask.lazy(optax.adam(0.1)),
    "adagrad": jmask.lazy(optax.adagrad(0.1)),
    "momentum": jmask.lazy(optax.sgd(0.1, momentum=0.9)),
    "lion": jmask.lazy(optax.lion(0.1, weight_decay=0.1)),
    "clipped": jmask.lazy(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))),
    "keeping": jmask.lazy(keeping()),
    "schedule": jmask.lazy(optax.adagrad(optax.linear_schedule(0.1, 0.2, 10))),
}
IDS = ([0, 3, 3, 7, 1, 2, 4, 5, 6, 8, 9, 19, 19, 11, 12, -1], [V] * N, list(range(4, 20)))


def gradient(ids):
    values = jax.random.normal(jax.random.key(sum(ids)), (len(ids), D))
    return jmask.RowSparse(ids, values, (V, D))


def traced(tx, *args):
    """The program of `jmask.apply_gradients`."""
    return str(jax.make_jaxpr(functools.partial(jmask.apply_gradients, tx))(*args))


def dense(tree):
    is_packed = lambda x: isinstance(x, jmask.PackedTable)
    return jax.tree.map(lambda x: x.todense() if is_packed(x) else x, tree, is_leaf=is_packed)


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["array", "packed"])
@pytest.mark.parametrize("name", LIFTED)
def test_same_result(name, layout):
    tx, table = LIFTED[name], TABLE
    if layout == "packed":
        table = jmask.PackedTable.pack(table)
    one = jax.jit(functools.partial(jmask.apply_gradients, tx))
    two = jax.jit(functools.partial(update_and_apply, tx))
    actual = expected = table
    state = other = tx.init(table)
    for ids in IDS:
        before = dense(actual)
        expected, state = two(gradient(ids), state, expected)
        actual, other = one(gradient(ids), other, actual)
        untouched = np.setdiff1d(np.arange(V), ids)
        np.testing.assert_array_equal(dense(actual)[untouched], before[untouched])
    assert jax.tree.structure((actual, other)) == jax.tree.structure((expected, state))
    assert_close(dense((actual, other)), dense((expected, state)), rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("name", LIFTED)
def test_whole_tables(name):
    """No scatter into table or state: of 16 lookups in 20 rows the whole table is as fast."""
    tx = LIFTED[name]
    program = traced(tx, gradient(IDS[0]), tx.init(TABLE), TABLE)
    assert "jmask_update_rows" not in program
    large = jnp.zeros((20 * V, D))
    grads = jmask.RowSparse(IDS[0], jnp.ones((N, D)), large.shape)
    program = traced(tx, grads, tx.init(large), large)
    assert "jmask_update_rows" in program


# Those of Adam and of a schedule take their scalars and which entries are touched: no room.
@pytest.mark.parametrize("name", ["adagrad", "momentum", "lion"])
def test_packed_tables(name):
    """One scatter for each part of the table, as named optimizers have it."""
    tx, table = LIFTED[name], jmask.PackedTable.pack(TABLE)
    program = traced(tx, gradient(IDS[0]), tx.init(table), table)
    assert program.count("jmask_update_rows[") == len(table.parts)
