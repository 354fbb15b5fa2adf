"""Numbers that come with a step: a deferred table is right with them, nan, or refused.

Arrays, injected hyperparameters and schedules are not known when a table is made. Where the
sums of steps are not exact with them, rows that missed such a step are nan.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask._deferred import closed_form

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

START = jnp.asarray(np.random.default_rng(0).normal(size=(13, 3)), jnp.float32)
# Row 12 is read in the first step alone, and rows 4 and 8 to 10 never.
IDS = np.random.default_rng(1).choice([0, 1, 2, 3, 5, 6, 7], (14, 4))
IDS[0] = [12, 12, 3, 11]
CHANGED_AT = 6


def jump(before: float, after: float) -> Callable[[Any], Any]:
    return lambda count: jnp.where(count < CHANGED_AT, before, after)


def injected(**numbers: Any) -> optax.GradientTransformation:
    return optax.inject_hyperparams(optax.adam)(0.1, **numbers)


def trained(tx: Any, table: Any) -> Any:
    """The table after all steps, of a dense or a deferred one."""

    @jax.jit
    def step(table: Any, state: Any, ids: Any) -> Any:
        loss = lambda t: jnp.sum(jnp.sin(t[ids]))
        if isinstance(table, jmask.DeferredTable):
            return jmask.apply_gradients(tx, jmask.grad(loss)(table), state, table)
        updates, state = tx.update(jax.grad(loss)(table), state, table)
        return optax.apply_updates(table, updates), state

    state = tx.init(table)
    for ids in IDS:
        table, state = step(table, state, jnp.asarray(ids))
    return np.asarray(table)


def of_both(inner: Any) -> tuple[np.ndarray, np.ndarray]:
    tx = jmask.lazy(inner)
    return trained(tx, jmask.deferred(START, tx)), trained(inner, START)


EXACT = {
    "numbers": {},
    "b1 and b2 that are close": {"b1": 0.8, "b2": 0.95},
    "a schedule of b1": {"b1": lambda count: 0.8 + 0.01 * count},
    "eps that hardly changes": {"eps": lambda count: 1e-3 * (1 + 1e-3 * count)},
    "eps_root": {"eps_root": 1e-3},
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    ours, dense = of_both(injected(**EXACT[name]))
    np.testing.assert_allclose(ours, dense, rtol=2e-5, atol=2e-6)


# Of some numbers rows that were away over the change are nan, of others all.
NAN_OR_EXACT = {
    "b2": {"b2": jump(0.999, 0.7)},
    "b1": {"b1": jump(0.9, 0.9995)},
    "eps": {"eps": jump(1e-8, 0.1)},
    "eps back to less": {"eps": jump(0.1, 1e-8)},
    "eps_root": {"eps_root": jump(1e-3, 0.1)},
}


@pytest.mark.parametrize("name", NAN_OR_EXACT)
def test_schedules_out_of_range(name: str) -> None:
    ours, dense = of_both(injected(**NAN_OR_EXACT[name]))
    is_nan = np.isnan(ours)
    assert is_nan[12].all()
    np.testing.assert_allclose(ours[~is_nan], dense[~is_nan], rtol=2e-5, atol=2e-6)


def test_a_number_that_is_set_between_steps() -> None:
    tx = jmask.lazy(injected())
    table = jmask.deferred(START, tx)
    state = tx.init(table)
    for i, ids in enumerate(IDS[:4]):
        if i == 2:
            state.hyperparams["b2"] = jnp.float32(0.5)
        grads = jmask.grad(lambda t, ids=ids: jnp.sum(jnp.sin(t[ids])))(table)
        table, state = jmask.apply_gradients(tx, grads, state, table)
    assert np.isnan(table[jnp.array([12])]).all()


@pytest.mark.parametrize("numbers", [{"b2": 0.7}, {"b1": 0.99, "b2": 0.5}])
@pytest.mark.parametrize("make", [injected, lambda **given: optax.adam(0.1, **given)])
def test_refused_where_it_is_known(make: Any, numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="b2 has to be nearer to 1 than b1"):
        jmask.deferred(START, jmask.lazy(make(**numbers)))


@pytest.mark.parametrize("b1", [0.15, 0.6, 0.85, 0.9, 0.93, 0.965, 0.985, 0.99])
def test_what_counts_as_proved(b1: float) -> None:
    """At the greatest 1 - b2 of numbers that are not known."""
    most = np.interp(b1, closed_form._B1, closed_form._MOST_BY_B1)
    errors = dict(closed_form._errors(b1, 1 - most * (1 - b1), True))
    assert errors[closed_form._TERMS_IF_UNKNOWN] <= closed_form._ACCEPTED


# --- what a row without a gradient is divided by, or cast to --------------------------------


def of_moment(step: Callable[[Any, Any], Any]) -> optax.GradientTransformation:
    """An optimizer whose step is computed from the gradient and a moment."""

    def update(grads: Any, moment: Any, params: Any = None) -> Any:
        moment = jax.tree.map(lambda m, g: 0.9 * m + g, moment, grads)
        return jax.tree.map(lambda g, m: -0.1 * step(g, m), grads, moment), moment

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


DIVISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "g / g": lambda g, m: g / g,
    "m / g": lambda g, m: m / g,
    "1 / g": lambda g, m: 1 / g,
    "m / abs(g)": lambda g, m: m / jnp.abs(g),
    "m / sqrt(g)": lambda g, m: m / jnp.sqrt(g),
    "m * rsqrt(g)": lambda g, m: m * jax.lax.rsqrt(g),
    "m / 0": lambda g, m: m / (0 * g),
    "g / sqrt(m)": lambda g, m: g / jnp.sqrt(m),
    "g * rsqrt(m)": lambda g, m: g * jax.lax.rsqrt(m),
    "atan2": lambda g, m: jnp.atan2(m, g),
    "remainder": lambda g, m: jnp.remainder(m, g),
}
CASTS = {
    str(jnp.dtype(dtype)): lambda g, m, dtype=dtype: m.astype(dtype).astype(m.dtype)
    for dtype in (jnp.int8, jnp.int32, jnp.bool_, jnp.float8_e4m3fn)
}


@pytest.mark.parametrize("name", [*DIVISIONS, *CASTS])
def test_refused(name: str) -> None:
    tx = jmask.lazy(of_moment((DIVISIONS | CASTS)[name]))
    with pytest.raises(ValueError, match=r"jmask\.deferred cannot take this `tx`"):
        jmask.deferred(START, tx)


def test_a_cast_to_a_floating_dtype_is_a_rounding() -> None:
    ours, dense = of_both(of_moment(lambda g, m: m.astype(jnp.bfloat16).astype(m.dtype)))
    np.testing.assert_allclose(ours, dense, rtol=0.01, atol=0.01)
