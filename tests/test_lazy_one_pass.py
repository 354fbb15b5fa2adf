"""`jmask.apply_gradients` of a lifted optax optimizer is `update` and `apply_updates`.

Where the optimizer is elementwise it is done by one scatter with the optimizer inside.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.optax_cases import ROW_LOCAL
from tests.sampling import sampled

V, D = 50, 6


def nothing_if_not_finite(updates):
    bad = [jnp.any(~jnp.isfinite(x)) for x in jax.tree.leaves(updates)]
    return jax.tree.map(lambda x: jnp.where(jnp.any(jnp.stack(bad)), 0, x), updates)


def forgetful():
    """Its state, of the shape of the parameters, is zero after each step."""

    def zeros(tree):
        return jax.tree.map(jnp.zeros_like, tree)

    return optax.GradientTransformation(zeros, lambda u, state, params=None: (u, zeros(u)))


# Elementwise, and with no more changing scalars than a scatter has room for.
IN_ONE_PASS = {
    "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "amsgrad", "lion",
    "rmsprop", "rprop", "sgd", "sign_sgd", "signum", "yogi",
}  # fmt: skip
OTHERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clipped by value": optax.chain(optax.clip(0.5), optax.adamw(0.1)),
    "clipped by norm": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "clipped by norm, sgd": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "clipped by value and by norm": optax.chain(
        optax.clip(0.3), optax.clip_by_global_norm(0.5), optax.adamw(0.1)
    ),
    "clipped by norm, if finite": optax.chain(
        optax.stateless(lambda updates, _: nothing_if_not_finite(updates)),
        optax.clip_by_global_norm(0.5),
        optax.adagrad(0.1),
    ),
    "state filled anew": optax.chain(optax.trace(0.9), forgetful(), optax.scale(-0.1)),
    "rate by schedule": optax.adagrad(optax.linear_schedule(0.1, 0.2, 10)),
    "rate and momentum injected": optax.inject_hyperparams(optax.sgd)(
        learning_rate=0.1, momentum=0.9
    ),
    "weights masked": optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), {"table": True, "w": False}),
        optax.adam(0.1),
    ),
    "by parameter": optax.partition(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"table": "a", "w": "b"}
    ),
}
# Deprecated, and in need of the value of the loss.
LEFT_OUT = ("optimistic_adam", "polyak_sgd")
SIMPLE = {
    name: build()
    for name, build in ROW_LOCAL.items()
    if "contrib" not in name and name not in LEFT_OUT
}


def gradient(params, ids):
    return jmask.grad(lambda p: jnp.sum(jnp.sin(p["table"][ids] @ p["w"])))(params)


def in_two(tx):
    def step(params, state, ids):
        updates, state = tx.update(gradient(params, ids), state, params)
        return jmask.apply_updates(params, updates), state

    return step


def in_one(tx):
    def step(params, state, ids):
        return jmask.apply_gradients(tx, gradient(params, ids), state, params)

    return step


def parameters():
    table = jax.random.normal(jax.random.key(0), (V, D))
    return {"table": table, "w": jax.random.normal(jax.random.key(1), (D, 3))}


@pytest.mark.parametrize("name", sampled([*SIMPLE, *OTHERS], every=6))
def test_same_result(name):
    tx = jmask.lazy(({**SIMPLE, **OTHERS})[name])
    params = parameters()
    expected, state = params, tx.init(params)
    actual, other = expected, state
    one, two = jax.jit(in_one(tx)), jax.jit(in_two(tx))
    for ids in ([3, 3, 7, V - 1], [7, -1, 8, 3], [V, V, V, V]):
        expected, state = two(expected, state, jnp.array(ids))
        actual, other = one(actual, other, jnp.array(ids))
    assert jax.tree.structure((actual, other)) == jax.tree.structure((expected, state))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-6, atol=1e-6),
        (actual, other),
        (expected, state),
    )
    untouched = np.r_[0:3, 9 : V - 1]
    np.testing.assert_array_equal(actual["table"][untouched], params["table"][untouched])


@pytest.mark.parametrize("name", [*SIMPLE, *OTHERS])
def test_which_take_one_pass(name):
    tx = jmask.lazy(({**SIMPLE, **OTHERS})[name])
    params = parameters()
    program = str(jax.make_jaxpr(in_one(tx))(params, tx.init(params), jnp.array([1, 2])))
    expected = IN_ONE_PASS | {
        "momentum", "clipped by value", "clipped by norm", "clipped by norm, sgd",
        "clipped by value and by norm", "clipped by norm, if finite",
        "rate by schedule", "weights masked", "by parameter",
    }  # fmt: skip
    assert ("jmask_update_rows" in program) == (name in expected)


def test_what_the_loss_is_needed_for_still_gets_it():
    tx = jmask.lazy(optax.polyak_sgd())
    params = parameters()
    grads = gradient(params, jnp.array([1, 2]))
    state = tx.init(params)
    new, _ = jmask.apply_gradients(tx, grads, state, params, value=jnp.float32(3.0))
    updates, _ = tx.update(grads, state, params, value=jnp.float32(3.0))
    expected = jmask.apply_updates(params, updates)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), new, expected)
