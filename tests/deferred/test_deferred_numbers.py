"""Deferred rows are at most twice as far from the float64 trajectory as dense float32 ones.

Ten thousand steps with Zipf ids: rows are away for one step and for all of them. Both runs are
scans over steps, compared with the model in NumPy after every hundredth. By default some of the
optimizers take the first thousand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask._deferred import measured, missed_steps
from tests import numpy_optimizers as models
from tests.deferred.test_deferred import START, both
from tests.expressions import functions, rows
from tests.sampling import chosen

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]


ROWS, COLUMNS, IDS, STEPS, PART = 60, 2, 3, 10_000, 100
RATE = 0.01
WARM_UP = optax.warmup_cosine_decay_schedule(0.0, RATE, 500, STEPS, RATE / 100)


def warm_up(t):
    """`WARM_UP` in float64."""
    if t < 500:
        return RATE * t / 500
    done = min((t - 500) / (STEPS - 500), 1.0)
    return RATE * ((1 - 0.01) * 0.5 * (1 + np.cos(np.pi * done)) + 0.01)


injected = lambda t: RATE * (1.5 + np.sin(t / 7.0)) * (0.1 if t % 3 else 1.0)
DECOUPLED = {"weight_decay": 0.1, "decay_mode": "decoupled"}
NAMED_STATIC = ("b1", "b2", "eps", "eps_root", "weight_decay")

# The dense optimizer, the model and its settings.
CASES = {}


def case(name, make, model, settings=(), of_model=()):
    """An optimizer with these settings, under a constant rate and under a schedule."""
    named = {"lazy_update": False} if make.__module__.startswith("jmask") else {}
    for of_rate, rate, exact in (("", RATE, RATE), (" by schedule", WARM_UP, warm_up)):
        exactly = {"learning_rate": exact} | dict(settings) | dict(of_model)
        CASES[name + of_rate] = (make(rate, **dict(settings), **named), model, exactly)


# The name, the optimizer, its model, settings of both, and settings of the model.
for _name, _make, _model, *_settings in rows("""
    sgd | jmask.sgd | Sgd
    momentum | jmask.sgd | Sgd | {"momentum": 0.9}
    nesterov, decoupled | jmask.sgd | Sgd | {"momentum": 0.9, "nesterov": True, **DECOUPLED}
    momentum, l2 | jmask.sgd | Sgd | {"momentum": 0.9, "weight_decay": 0.1}
    adam | jmask.adam | Adam
    adam, decoupled | jmask.adam | Adam | DECOUPLED
    adam, eps | jmask.adam | Adam | {"eps": 1e-3}
    adam, b1 and b2 that are close | jmask.adam | Adam | {"b1": 0.95, "b2": 0.98}
    adam, b1 = 0 | jmask.adam | Adam | {"b1": 0.0}
    adamw | jmask.adamw | AdamW | {"weight_decay": 0.1}
    rowwise adam | jmask.rowwise_adam | RowwiseAdam
    adagrad | jmask.adagrad | Adagrad
    adagrad, decoupled | jmask.adagrad | Adagrad | DECOUPLED
    rowwise adagrad | jmask.rowwise_adagrad | RowwiseAdagrad
    optax.adam | optax.adam | AdamW | {} | {"weight_decay": 0.0}
    optax.adamw | optax.adamw | AdamW | {"weight_decay": 0.1}
    optax.nadam | optax.nadam | AdamW | {} | {"weight_decay": 0.0, "nesterov": True}
    optax.rmsprop | optax.rmsprop | RmsProp
    optax.rmsprop, momentum | optax.rmsprop | RmsProp | {"momentum": 0.9}
    optax.lion | optax.lion | Lion
    optax.sgd | optax.sgd | OptaxSgd | {"momentum": 0.9, "nesterov": True}
    optax.adagrad | optax.adagrad | Adagrad | {} |
        {"initial_accumulator_value": 0.1, "eps": 0.0, "eps_root": 1e-7}
"""):
    case(_name, eval(_make), getattr(models, _model), *map(eval, _settings))
CASES["optax.adam, injected"] = (
    optax.inject_hyperparams(optax.adam)(RATE),
    models.AdamW,
    {"learning_rate": injected, "weight_decay": 0.0},
)
CASES["adam, injected"] = (
    optax.inject_hyperparams(jmask.adam, static_args=NAMED_STATIC)(RATE, lazy_update=False),
    models.Adam,
    {"learning_rate": injected},
)


def gradients():
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


def with_rate(state, rate):
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


# In all runs one whose rate begins at 0, so that its first step moves nothing.
WARMED_UP = pytest.param("optax.adamw by schedule", SHORT, marks=pytest.mark.each)


@pytest.mark.parametrize(
    ("name", "steps"),
    [WARMED_UP, *chosen([(x, SHORT) for x in BY_DEFAULT], [(x, LONG) for x in CASES])],
)
def test_as_near_to_float64_as_dense(name, steps):
    dense_tx, model_type, settings = CASES[name]
    tx = jmask.deferred(dense_tx)
    ids, values = (x[:steps] for x in gradients())
    start = np.random.default_rng(3).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    rate = settings["learning_rate"]
    rates = np.float32([rate(t) if callable(rate) else rate for t in range(steps)])

    def step(carried, given):
        table, state, dense, dense_state = carried
        ids, values, rate = given
        gradient = jmask.RowSparse(ids, values, (ROWS, COLUMNS))
        state = state._replace(inner=with_rate(state.inner, rate))
        table, state = tx.catch_up(table, state, ids)
        table, state = jmask.apply_gradients(tx, gradient, state, table)
        dense_state = with_rate(dense_state, rate)
        updates, dense_state = dense_tx.update(gradient.todense(), dense_state, dense)
        dense = optax.apply_updates(dense, updates)
        return (table, state, dense, dense_state), None

    def part(carried, given):
        carried, _ = jax.lax.scan(step, carried, given)
        return carried, (tx.catch_up(*carried[:2])[0], carried[2])

    table = dense = jnp.asarray(start)
    carried = (table, tx.init(table), dense, dense_tx.init(dense))
    given = [x.reshape(steps // PART, PART, *x.shape[1:]) for x in (ids, values, rates)]
    given[0] = given[0].astype(np.int32)
    carried, (deferred, dense) = jax.jit(lambda *x: jax.lax.scan(part, *x))(
        carried, list(map(jnp.asarray, given))
    )
    model = model_type(start, settings, lazy=False)
    errors = []
    for t in range(steps):
        model.step(ids[t], values[t])
        if t % PART == PART - 1:
            at = t // PART
            errors.append([np.abs(np.asarray(x[at]) - model.param) for x in (deferred, dense)])
    ours, theirs = np.moveaxis(np.array(errors), 1, 0)
    scale = np.finfo(np.float32).eps * np.abs(start).max()
    assert ours.max() <= 2 * theirs.max() + scale
    assert np.sqrt((ours**2).mean()) <= 2 * np.sqrt((theirs**2).mean()) + scale


# --- what is measured, and what counts as exact ---------------------------------------------


def test_an_e_that_cannot_be_measured_is_nan():
    """Not a wrong one: rounding is all that is left of a structure's e beside a large one."""
    form = missed_steps.Form(3, ((0, 0), (1, 1), (2, 2)), (1, 2), terms=4, e=1e-9)
    probes = measured.Probes(form, [(4,)] * 3)
    _, m, v = probes.rows
    for e in 10.0 ** np.random.default_rng(0).uniform(-12, 0, 60).astype(np.float32):
        new = [-0.1 * m / (np.sqrt(v) + e), 0.9 * m, 0.999 * v]
        step = probes.step([jnp.asarray(x, jnp.float32) for x in new])
        assert np.isnan(step.e) or abs(step.e / e - 1) < 2e-5, e
        assert not np.isnan(step.e) or e > 1e-8, e


@pytest.mark.parametrize("t", [1, 7, 1000])
def test_what_counts_as_exact(t):
    """The bound on the error of sums holds, of factors and steps drawn at random."""
    rng = np.random.default_rng(t)
    for _ in range(20):
        b1, b2 = 1 - 10.0 ** rng.uniform(-2, 0), 1 - 10.0 ** rng.uniform(-4, -0.2)
        terms = missed_steps.terms_for(b1, b2)
        if terms is None:
            continue
        j = np.arange(1, 400)
        e = 1e-8 * np.sqrt(1 - b2 ** (t + j))
        shift = missed_steps._spread(b1, b2, np.float64(t)) * e[0]
        nodes = (1 + missed_steps._nodes(terms))[None] / 2
        at_nodes = nodes / (1 - nodes) * shift
        f, root = b1 ** j[:, None], b2 ** (j[:, None] / 2)
        values = np.sum(f * (at_nodes + shift) / (root * at_nodes + e[:, None]), axis=0)
        x = np.concatenate([[0], np.logspace(-12, 0, 100)])
        zeta = 1 - 2 * shift / (x + shift)
        series = missed_steps._dct(terms) @ values
        found = np.polynomial.chebyshev.chebval(zeta, series) / (x + shift)
        exact = np.sum(f / (root * x + e[:, None]), axis=0)
        np.testing.assert_allclose(found, exact, rtol=16 * missed_steps.ACCEPTED)


@pytest.mark.parametrize("is_corrected", [True, False])
def test_what_is_accepted_stays_exact(is_corrected):
    """No step makes coefficients nan: also not the first ones, of rows never touched."""
    rng = np.random.default_rng(2)
    drawn = 1 - 10.0 ** rng.uniform([-2.2, -5], [-0.3, -1], (40, 2))
    take, accepted = jax.jit(missed_steps.advanced, static_argnums=0), 0
    for b1, b2 in [(0.99, 0.999), (0.99, 0.9999), (0.9, 0.95), *drawn.tolist()]:
        terms = missed_steps.terms_for(b1, b2)
        if terms is None:
            continue
        form = missed_steps.Form(3, ((0, 0), (1, 1), (2, 2)), (1, 2), terms=terms)
        lines = jnp.tile(form.line(jnp.float32), (64, 1))
        carry = jnp.zeros((64, form.sums))
        changes = {(0, 0): 0.0, (1, 1): jnp.float32(b1 - 1), (2, 2): jnp.float32(b2 - 1)}
        for t in range(60):
            e = 1e-8 * (1 - b2 ** (t + 1)) ** 0.5 if is_corrected else 1e-8
            step = missed_steps.Step(changes, jnp.float32(-0.1), jnp.float32(e))
            lines, carry = take(form, lines, carry, jnp.int32(t), step)
            assert np.isfinite(lines).all(), (b1, b2, t)
        accepted += 1
    assert accepted > 20


# --- what a row without a gradient is divided by, or cast to --------------------------------


def of_moment(step):
    """An optimizer whose step is computed from the gradient and a moment."""

    def update(grads, moment, params=None):
        moment = jax.tree.map(lambda m, g: 0.9 * m + g, moment, grads)
        return jax.tree.map(lambda g, m: -0.1 * step(g, m), grads, moment), moment

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


DIVISIONS = functions("g, m", globals())("""
    g / g; m / g; 1 / g; m / jnp.abs(g); m / jnp.sqrt(g); m * jax.lax.rsqrt(g); m / (0 * g);
    g / jnp.sqrt(m); g * jax.lax.rsqrt(m); jnp.remainder(m, g); jnp.abs(m); jnp.maximum(m, 0)
""")
CASTS = {
    str(jnp.dtype(dtype)): lambda g, m, dtype=dtype: m.astype(dtype).astype(m.dtype)
    for dtype in (jnp.int8, jnp.int32, jnp.bool_, jnp.float8_e4m3fn)
}


@pytest.mark.parametrize("name", [*DIVISIONS, *CASTS])
def test_refused(name):
    tx = jmask.deferred(of_moment((DIVISIONS | CASTS)[name]))
    with pytest.raises(ValueError, match=r"jmask\.deferred cannot take this `inner`"):
        tx.init(START)


@pytest.mark.parametrize("eps", [1e-8, 1e-15, 3e-17, 1e-18, 1e-25])
def test_the_square_of_eps_is_a_number_or_it_is_refused(eps):
    inner = optax.adam(0.1, eps=eps)
    if eps < 2e-18:
        with pytest.raises(ValueError, match=r"`eps`=1e-.* too small for its square"):
            jmask.deferred(inner).init(START)
        return
    (params, *_), (dense, *_) = both(inner)
    np.testing.assert_allclose(params["t"], dense["t"], rtol=1e-5, atol=1e-6)


def test_a_cast_to_a_floating_dtype_is_a_rounding():
    inner = of_moment(lambda g, m: m.astype(jnp.bfloat16).astype(m.dtype))
    (params, *_), (dense, *_) = both(inner)
    np.testing.assert_allclose(params["t"], dense["t"], rtol=0.01, atol=0.01)
