"""Optimizers outside jit run from a compiled program: traced once for equal shapes."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask._eager import compiled_outside_jit
from jmask._fallback import report_fallback
from tests.stored_tables import STEPS


def counting(inner):
    """The transformation, and a list with one entry for each time its update is traced."""
    calls = []

    def update(updates, state, params=None):
        calls.append(None)
        return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update), calls


@pytest.mark.parametrize("step", STEPS)
def test_traced_once(step):
    inner, calls = counting(optax.adam(0.1))
    tx, params = jmask.lazy(inner), {"table": jnp.ones((6, 2)), "dense": jnp.ones(3)}
    state = tx.init(params)

    def gradient(i):
        table = jmask.RowSparse([i, 5], jnp.full((2, 2), float(i + 1)), (6, 2))
        return {"table": table, "dense": jnp.full(3, float(i))}

    @jax.jit
    def jitted(grads, state, params):
        return STEPS[step](jmask.lazy(optax.adam(0.1)), grads, state, params)

    expected = jitted(gradient(0), state, params)
    new = STEPS[step](tx, gradient(0), state, params)
    traces = len(calls)
    assert traces
    for i in range(1, 4):
        expected = jitted(gradient(i), *reversed(expected))
        new = STEPS[step](tx, gradient(i), *reversed(new))
    assert len(calls) == traces
    for ours, theirs in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    more = gradient(0) | {"table": jmask.RowSparse([1], jnp.ones((1, 2)), (6, 2))}
    STEPS[step](tx, more, *reversed(new))
    assert len(calls) > traces, "other shapes are traced anew"


@pytest.mark.parametrize("tx", [jmask.adam(0.1), jmask.rowwise_adagrad(0.1), jmask.sgd(0.1)])
@pytest.mark.parametrize("step", STEPS)
def test_named_optimizers_compile_nothing_the_second_time(tx, step):
    table = jnp.ones((50, 3))
    state = tx.init(table)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    for i in range(3):
        gradient = jmask.RowSparse([i, 7], jnp.ones((2, 3)), (50, 3))
        table, state = STEPS[step](tx, gradient, state, table)
        if i == 0:
            jax.block_until_ready(table)
            compiled.clear()
    assert not compiled
    jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize(
    ("build", "rates", "step"),
    [
        (jmask.adam, {"learning_rate": 0.1, "weight_decay": 0.1}, "apply_gradients"),
        (jmask.sgd, {"learning_rate": 0.1, "momentum": 0.9}, "update"),
    ],
)
def test_injected_rates_are_arguments_of_one_program(build, rates, step):
    """Made anew in each step, by `inject_hyperparams` or by hand."""
    table = jnp.ones((50, 3))
    gradient = jmask.RowSparse([4, 7], jnp.ones((2, 3)), (50, 3))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    for scale in (1.0, 0.5):
        numbers = {name: scale * rate for name, rate in rates.items()}
        tx = build(**{name: jnp.asarray(x) for name, x in numbers.items()})
        state = tx.init(table)
        compiled.clear()
        new = STEPS[step](tx, gradient, state, table)
        assert bool(compiled) == (scale == 1)
    expected = STEPS[step](build(**numbers), gradient, state, table)
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    jax.monitoring.clear_event_listeners()


def test_fallbacks_are_reported_at_each_call():
    @compiled_outside_jit
    def update(x):
        report_fallback("x became dense")
        return 2 * x

    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            with pytest.warns(jmask.StorageFallbackWarning):
                assert update(jnp.ones(())) == 2
        with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning):
            update(jnp.ones(()))


def test_what_is_no_array_is_passed_on():
    seen = []

    @compiled_outside_jit
    def update(x, more=None):
        seen.append(type(x))
        return x

    update(3.0)
    update("text")
    jax.jit(update)(jnp.ones(()))
    update(jnp.ones(()), more=len)
    assert seen[:2] == [float, str]
    assert issubclass(seen[2], jax.core.Tracer)
    assert not issubclass(seen[3], jax.core.Tracer)
