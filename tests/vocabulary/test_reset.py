"""Recycled rows start anew, beside runs in which all arrays with these rows are written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask import vocabulary
from tests.oracle import assert_close
from tests.sampling import chosen

V, D = 37, 3
NORMAL = jax.nn.initializers.normal(1.0)

LAZY = {
    "adam": jmask.adam(0.1),
    "adagrad": jmask.adagrad(0.1, initial_accumulator_value=0.7),
    "rowwise adagrad": jmask.rowwise_adagrad(0.1),
    "ftrl": jmask.ftrl(0.1),
    "sgd with momentum": jmask.sgd(0.1, momentum=0.9),
    "optax.adamw": jmask.lazy(optax.adamw(0.1)),
    "optax.adagrad": jmask.lazy(optax.adagrad(0.1)),
    "optax.amsgrad": jmask.lazy(optax.amsgrad(0.1)),
    "optax.rprop": jmask.lazy(optax.rprop(0.1)),
    "chain": jmask.lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))),
    "injected": jmask.lazy(optax.inject_hyperparams(optax.adam)(0.1)),
    "ema": optax.chain(jmask.adam(0.1), jmask.ema(0.5)),
    "guarded": jmask.skip_nonfinite(jmask.adam(0.1)),
    "schedule free": jmask.lazy(optax.contrib.schedule_free_sgd(0.1)),
    "partition": jmask.lazy(
        optax.partition(
            {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"table": "a", "other": "b", "w": "b"}
        )
    ),
}


def loss(params, ids, y):
    rows = params["table"][ids] @ params["w"] + params["other"][ids].sum(1, keepdims=True)
    return jnp.mean((rows - y) ** 2)


def start(key):
    a, b, c = jax.random.split(key, 3)
    return {
        "table": NORMAL(a, (V, D), jnp.float32),
        "other": NORMAL(b, (V, 2), jnp.float32),
        "w": NORMAL(c, (D, 1), jnp.float32),
    }


def batches(count=12):
    rng = np.random.default_rng(0)
    for _ in range(count):
        recycled = np.where(rng.random(5) < 0.5, rng.integers(0, V, 5), V)
        yield rng.integers(0, V, 8), recycled.astype(np.int32), rng.random((8, 1), np.float32)


def anew(tree, first, ids):
    """Write rows of `first` into all arrays with V rows."""
    ids = ids[ids < V]

    def written(x, y):
        is_table = jnp.shape(x)[:1] == (V,)
        return jnp.asarray(x).at[ids].set(jnp.asarray(y)[ids]) if is_table else x

    return jax.tree.map(written, tree, first)


def started(params, key):
    """All rows as `reset` starts them."""
    new = dict(params)
    for k, name in enumerate(sorted(params)):
        if name != "w":
            keys = [jax.random.fold_in(jax.random.fold_in(key, k), r) for r in range(V)]
            row = (1, params[name].shape[1])
            new[name] = jnp.concatenate([NORMAL(x, row, jnp.float32) for x in keys])
    return new


def run(tx, step, reset):
    params = start(jax.random.key(1))
    state = tx.init(params)
    for i, (ids, recycled, y) in enumerate(batches()):
        params, state = reset(tx, params, state, recycled, jax.random.key(i % 3))
        params, state = step(params, state, jnp.asarray(ids), jnp.asarray(y))
    return params, state


def by_hand(tx, params, state, ids, key):
    first = started(params, key)
    return anew(params, first, ids), anew(state, tx.init(first), ids)


def by_reset(tx, params, state, ids, key):
    rows = {"table": jnp.asarray(ids), "other": jnp.asarray(ids)}
    return jitted(tx)(params, state, rows, key)


@functools.cache
def jitted(tx):
    function = lambda params, state, rows, key: vocabulary.reset(
        tx, params, state, rows, NORMAL, key=key
    )
    return jax.jit(function, donate_argnums=(0, 1))


def step_of(tx, value_and_grad=jmask.value_and_grad):
    @jax.jit
    def step(params, state, ids, y):
        if hasattr(tx, "catch_up"):
            params, state = tx.catch_up(params, state, {"table": ids, "other": ids})
        _, grads = value_and_grad(loss)(params, ids, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def assert_same(have, want):
    for x, y in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", chosen(["adagrad", "ema"], LAZY))
@pytest.mark.dtype_promotion
def test_a_run_in_which_rows_start_anew(name):
    """Bit for bit: parameters, and every array of the state."""
    tx = LAZY[name]
    step = step_of(tx)
    assert_same(run(tx, step, by_reset), run(tx, step, by_hand))


@pytest.mark.parametrize("name", ["adam", "adagrad", "momentum"])
@pytest.mark.dtype_promotion
def test_deferred(name):
    """The trajectory of the dense optimizer, whose rows start anew in the same steps."""
    inner = {"adam": optax.adamw(0.1), "adagrad": optax.adagrad(0.1)}
    inner = inner.get(name, optax.sgd(0.1, momentum=0.9))
    tx = jmask.deferred(inner)
    params, state = run(tx, step_of(tx), by_reset)
    params, state = tx.catch_up(params, state)
    expected = run(inner, step_of(inner, jax.value_and_grad), by_hand)
    for x, y in zip(
        jax.tree.leaves((params, state.inner)), jax.tree.leaves(expected), strict=True
    ):
        assert_close(x, y, rtol=1e-4, atol=1e-5)
