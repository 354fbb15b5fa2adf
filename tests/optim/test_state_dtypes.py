"""A state of another dtype than `init` makes is refused, in every way of stepping."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmask
from tests.stored_tables import STEPS, stored

pytestmark = pytest.mark.dtype_promotion

V, D = 6, 4
NARROW, WIDE = jnp.bfloat16, jnp.float32
NAMED = {
    "sgd": (jmask.sgd, {"momentum": 0.9}),
    "adam": (jmask.adam, {}),
    "rowwise_adam": (jmask.rowwise_adam, {}),
    "adagrad": (jmask.adagrad, {}),
    "rowwise_adagrad": (jmask.rowwise_adagrad, {}),
    "ftrl": (jmask.ftrl, {}),
}
OPTIMIZERS = {
    name: lambda dtype, f=f, given=given: f(0.1, state_dtype=dtype, **given)
    for name, (f, given) in NAMED.items()
} | {
    "mu of adam": lambda dtype: jmask.adam(0.1, mu_dtype=dtype),
    "mu of rowwise_adam": lambda dtype: jmask.rowwise_adam(0.1, mu_dtype=dtype),
    "adamw": lambda dtype: jmask.adamw(0.1, mu_dtype=dtype),
    "not lazy": lambda dtype: jmask.adam(0.1, state_dtype=dtype, lazy_update=False),
    "optax.adam": lambda dtype: jmask.lazy(optax.adam(0.1, mu_dtype=dtype)),
    "chain": lambda dtype: jmask.lazy(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, mu_dtype=dtype))
    ),
    "several steps": lambda dtype: jmask.multi_steps(
        jmask.adam(0.1, state_dtype=dtype), 1, like={"t": jmask.RowSparse.zeros((V, D), nse=2)}
    ),
    "finite": lambda dtype: jmask.skip_nonfinite(jmask.adam(0.1, state_dtype=dtype)),
}


GRADIENT = jmask.RowSparse([2, 4], jnp.ones((2, D)), (V, D))


@pytest.mark.sampled
@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer, step, is_jitted):
    tx, before = OPTIMIZERS[optimizer](WIDE), OPTIMIZERS[optimizer](NARROW)
    params = {"t": jnp.ones((V, D))}
    call = lambda state: STEPS[step](tx, {"t": GRADIENT}, state, params)
    call = jax.jit(call) if is_jitted else call
    with pytest.raises(ValueError, match=r"`state\S*` is bfloat16, and `init`.* float32"):
        call(before.init(params))
    cast = jax.tree.map(lambda x, y: x.astype(y.dtype), before.init(params), tx.init(params))
    _, state = call(cast)
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, cast)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("table", ["packed", "div 2"])
def test_stored_tables(table, step):
    params = stored(table, jnp.ones((V, D)))
    for optimizer in ("adam", "optax.adam"):
        tx, before = OPTIMIZERS[optimizer](WIDE), OPTIMIZERS[optimizer](NARROW)
        with pytest.raises(ValueError, match="is bfloat16, and `init`"):
            STEPS[step](tx, GRADIENT, before.init(params), params)


def test_dense_gradients_of_named_optimizers():
    """They write slots in the dtype that they have; optax' own go on in the new one."""
    params = jnp.ones((V, D))
    for optimizer in NAMED:
        tx, before = OPTIMIZERS[optimizer](WIDE), OPTIMIZERS[optimizer](NARROW)
        for step in STEPS.values():
            with pytest.raises(ValueError, match="is bfloat16, and `init`"):
                step(tx, params, before.init(params), params)


def test_what_a_step_promotes_is_no_error():
    """Optax's moments of a bfloat16 parameter are float32 after gradients of float32."""
    tx = jmask.lazy(optax.adam(0.1))
    params = {"t": jnp.ones((V, D), NARROW), "w": jnp.ones(3, NARROW)}
    state = tx.init(params)
    for _ in range(2):
        grads = {"t": GRADIENT, "w": jnp.ones(3, WIDE)}
        params, state = jmask.apply_gradients(tx, grads, state, params)
    assert state[0].mu["t"].dtype == NARROW
