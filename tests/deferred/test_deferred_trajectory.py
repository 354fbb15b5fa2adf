"""A deferred table is at most twice as far from the float64 trajectory as a dense float32 one.

Ten thousand steps with Zipf ids: rows are away for one step and for all of them. Both runs are
scans over steps, compared with the twin in NumPy after every hundredth. By default some of the
optimizers take the first thousand.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests import dense_twins as twins
from tests.sampling import chosen

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

ROWS, COLUMNS, IDS, STEPS, PART = 60, 2, 3, 10_000, 100
RATE = 0.01
WARM_UP = optax.warmup_cosine_decay_schedule(0.0, RATE, 500, STEPS, RATE / 100)


def warm_up(t: int) -> float:
    """`WARM_UP` in float64."""
    if t < 500:
        return RATE * t / 500
    done = min((t - 500) / (STEPS - 500), 1.0)
    return RATE * ((1 - 0.01) * 0.5 * (1 + np.cos(np.pi * done)) + 0.01)


def constant(t: int) -> float:
    return RATE


def injected(t: int) -> float:
    return RATE * (1.5 + np.sin(t / 7.0)) * (0.1 if t % 3 else 1.0)


DECOUPLED: dict[str, Any] = {"weight_decay": 0.1, "decay_mode": "decoupled"}
NAMED_STATIC = ("b1", "b2", "eps", "eps_root", "weight_decay")

# A transformation for rows, one for dense gradients, the twin, its rate and its settings.
CASES: dict[str, tuple[Any, Any, Any, Any, dict[str, Any]]] = {}


def named(name: str, make: Any, twin: Any, settings: Any, **of_twin: Any) -> None:
    """The named optimizer under a constant rate and under a schedule."""
    for of_rate, rate, exact in (("", RATE, constant), (" by schedule", WARM_UP, warm_up)):
        txs = [make(rate, **settings, lazy_update=lazy) for lazy in (True, False)]
        CASES[name + of_rate] = (*txs, twin, exact, of_twin)


def of_optax(name: str, make: Any, twin: Any, **of_twin: Any) -> None:
    for of_rate, rate, exact in (("", RATE, constant), (" by schedule", WARM_UP, warm_up)):
        CASES[name + of_rate] = (jmask.lazy(make(rate)), make(rate), twin, exact, of_twin)


named("sgd", jmask.sgd, twins.sgd, {})
named("momentum", jmask.sgd, twins.sgd, {"momentum": 0.9}, momentum=0.9)
named(
    "nesterov, decoupled", jmask.sgd, twins.sgd,
    {"momentum": 0.9, "nesterov": True, **DECOUPLED},
    momentum=0.9, nesterov=True, decoupled=0.1,
)  # fmt: skip
named(
    "momentum, l2", jmask.sgd, twins.sgd, {"momentum": 0.9, "weight_decay": 0.1},
    momentum=0.9, l2=0.1,
)  # fmt: skip
named("adam", jmask.adam, twins.adam, {})
named("adam, decoupled", jmask.adam, twins.adam, DECOUPLED, decay=0.1)
named(
    "adam, eps and eps_root", jmask.adam, twins.adam, {"eps": 1e-3, "eps_root": 1e-5},
    eps=1e-3, eps_root=1e-5,
)  # fmt: skip
named("adam, b1 = 0", jmask.adam, twins.adam, {"b1": 0.0}, b1=0.0)
named("adamw", jmask.adamw, twins.adam, {"weight_decay": 0.1}, first=False, decay=0.1)
named("rowwise adam", jmask.rowwise_adam, twins.adam, {}, rows=True)
named("adagrad", jmask.adagrad, twins.adagrad, {})
named("adagrad, decoupled", jmask.adagrad, twins.adagrad, DECOUPLED, decoupled=0.1)
named("rowwise adagrad", jmask.rowwise_adagrad, twins.adagrad, {}, rows=True)
of_optax("optax.adam", optax.adam, twins.adam, first=False)
of_optax(
    "optax.adam, eps_root", functools.partial(optax.adam, eps=1e-4, eps_root=1e-6), twins.adam,
    first=False, eps=1e-4, eps_root=1e-6,
)  # fmt: skip
of_optax(
    "optax.adamw", functools.partial(optax.adamw, weight_decay=0.1), twins.adam,
    first=False, decay=0.1,
)  # fmt: skip
of_optax("optax.nadam", optax.nadam, twins.adam, first=False, nesterov=True)
of_optax("optax.rmsprop", optax.rmsprop, twins.rmsprop)
of_optax(
    "optax.rmsprop, momentum", functools.partial(optax.rmsprop, momentum=0.9), twins.rmsprop,
    momentum=0.9,
)  # fmt: skip
of_optax("optax.lion", optax.lion, twins.lion)
of_optax(
    "optax.sgd", functools.partial(optax.sgd, momentum=0.9, nesterov=True), twins.optax_sgd,
    momentum=0.9, nesterov=True,
)  # fmt: skip
of_optax("optax.adagrad", optax.adagrad, twins.adagrad, initial=0.1, eps=0.0, root=1e-7)
CASES["optax.adam, injected"] = (
    jmask.lazy(optax.inject_hyperparams(optax.adam)(RATE)),
    optax.inject_hyperparams(optax.adam)(RATE),
    twins.adam,
    injected,
    {"first": False},
)
CASES["adam, injected"] = (
    optax.inject_hyperparams(jmask.adam, static_args=NAMED_STATIC)(learning_rate=RATE),
    optax.inject_hyperparams(jmask.adam, static_args=NAMED_STATIC)(
        learning_rate=RATE, lazy_update=False
    ),
    twins.adam,
    injected,
    {},
)


def gradients() -> tuple[np.ndarray, np.ndarray]:
    """Ids (STEPS, IDS), some of them twice, and rows of very different sizes."""
    rng = np.random.default_rng(7)
    ids = np.minimum(rng.zipf(1.15, (STEPS, IDS)) - 1, ROWS - 1)
    ids = np.where(ids == ROWS - 1, rng.integers(0, ROWS, ids.shape), ids)
    ids[:, -1] = np.where(ids[:, -1] > 50, ids[:, 0], ids[:, -1])
    ids = np.where((ids == 7) & (np.arange(STEPS) > 0)[:, None], 6, ids)
    ids[0, 0], ids[-50, 0] = 7, 7  # away for nearly all steps
    size = 10.0 ** rng.integers(-5, 1, (STEPS, IDS, 1))
    size[:, :, 0] = np.where(ids % 3 == 0, 1.0, size[:, :, 0])
    return ids, (size * rng.normal(size=(STEPS, IDS, COLUMNS))).astype(np.float32)


def with_rate(state: Any, rate: Any) -> Any:
    if hasattr(state, "hyperparams"):
        hyperparams = {**state.hyperparams, "learning_rate": rate}
        return state._replace(hyperparams=hyperparams)
    return state


SHORT, LONG = 1_000, STEPS
# One of each kind of program: products of matrices, sums of quotients, signs, nothing.
BY_DEFAULT = (
    "nesterov, decoupled by schedule", "adam, decoupled by schedule", "adam, injected",
    "optax.rmsprop, momentum", "optax.lion by schedule", "optax.adagrad",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "steps"), chosen([(x, SHORT) for x in BY_DEFAULT], [(x, LONG) for x in CASES])
)
def test_as_near_to_float64_as_dense(name: str, steps: int) -> None:
    tx, dense_tx, twin, rate, settings = CASES[name]
    ids, values = (x[:steps] for x in gradients())
    start = np.random.default_rng(3).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    rates = np.array([rate(t) for t in range(steps)], np.float32)

    def step(carried: Any, given: Any) -> Any:
        table, state, dense, dense_state = carried
        ids, values, rate = given
        gradient = jmask.RowSparse(ids, values, (ROWS, COLUMNS))
        table, state = jmask.apply_gradients(tx, gradient, with_rate(state, rate), table)
        dense_state = with_rate(dense_state, rate)
        updates, dense_state = dense_tx.update(gradient.todense(), dense_state, dense)
        dense = optax.apply_updates(dense, updates)
        return (table, state, dense, dense_state), None

    def part(carried: Any, given: Any) -> Any:
        carried, _ = jax.lax.scan(step, carried, given)
        return carried, (carried[0].todense(), carried[2])

    table, dense = jmask.deferred(jnp.asarray(start), tx), jnp.asarray(start)
    carried = (table, tx.init(table), dense, dense_tx.init(dense))
    given = [x.reshape(steps // PART, PART, *x.shape[1:]) for x in (ids, values, rates)]
    given[0] = given[0].astype(np.int32)
    carried, (deferred, dense) = jax.jit(lambda *x: jax.lax.scan(part, *x))(
        carried, list(map(jnp.asarray, given))
    )
    model = twins.started(twin, start, rate, **settings)
    errors = []
    for t in range(steps):
        gradient = np.zeros((ROWS, COLUMNS))
        np.add.at(gradient, ids[t], values[t].astype(np.float64))
        exact = model.send(gradient)
        if t % PART == PART - 1:
            at = t // PART
            errors.append([np.abs(np.asarray(x[at]) - exact) for x in (deferred, dense)])
    ours, theirs = np.moveaxis(np.array(errors), 1, 0)
    scale = np.finfo(np.float32).eps * np.abs(start).max()
    assert ours.max() <= 2 * theirs.max() + scale
    assert np.sqrt((ours**2).mean()) <= 2 * np.sqrt((theirs**2).mean()) + scale
