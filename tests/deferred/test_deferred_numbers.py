"""Deferred rows are at most twice as far from the float64 trajectory as dense float32 ones.

Ten thousand steps with Zipf ids: rows are away for one step and for all of them. Both runs are
scans over steps, compared with the model in NumPy after every hundredth. By default some of the
optimizers take the first thousand.

Arrays, injected hyperparameters and schedules come with a step, and are not known when a state
is made. Where the sums of steps are not exact with them, rows that missed such a step are nan.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask._deferred import measured, missed_steps
from jmask._deferred.missed_steps import Form, Step, advanced, caught_up
from tests import numpy_optimizers as models
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


@pytest.mark.parametrize(
    ("name", "steps"), chosen([(x, SHORT) for x in BY_DEFAULT], [(x, LONG) for x in CASES])
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


# --- numbers that come with a step ----------------------------------------------------

START = jnp.asarray(np.random.default_rng(0).normal(size=(13, 3)), jnp.float32)
# Row 12 is read in the first step alone, and rows 4 and 8 to 10 never.
BATCHES = np.random.default_rng(1).choice([0, 1, 2, 3, 5, 6, 7], (14, 4))
BATCHES[0] = [12, 12, 3, 11]
CHANGED_AT = 6
jump = lambda before, after: lambda count: jnp.where(count < CHANGED_AT, before, after)


def injected_adam(**numbers):
    return optax.inject_hyperparams(optax.adam)(0.1, **numbers)


def run(tx, set_between=lambda t, state: None):
    """The table after all steps, of a dense or a deferred run."""

    @jax.jit
    def step(table, state, ids):
        loss = lambda t: jnp.sum(jnp.sin(t[ids]))
        if hasattr(tx, "catch_up"):
            table, state = tx.catch_up(table, state, ids)
            return jmask.apply_gradients(tx, jmask.grad(loss)(table), state, table)
        updates, state = tx.update(jax.grad(loss)(table), state, table)
        return optax.apply_updates(table, updates), state

    table, state = START, tx.init(START)
    for t, ids in enumerate(BATCHES):
        set_between(t, state)
        table, state = step(table, state, jnp.asarray(ids))
    return np.asarray(tx.catch_up(table, state)[0] if hasattr(tx, "catch_up") else table)


def of_both(inner):
    return run(jmask.deferred(inner)), run(inner)


EXACT = {
    "numbers": {},
    "b1 and b2 that are close": {"b1": 0.8, "b2": 0.95},
    "a schedule of b1": {"b1": lambda count: 0.8 + 0.01 * count},
    "eps that hardly changes": {"eps": lambda count: 1e-3 * (1 + 1e-3 * count)},
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    ours, dense = of_both(injected_adam(**EXACT[name]))
    np.testing.assert_allclose(ours, dense, rtol=2e-5, atol=2e-6)


# Of some numbers rows that were away over the change are nan, of others all.
NAN_OR_EXACT = {
    "b2": {"b2": jump(0.999, 0.7)},
    "b1": {"b1": jump(0.9, 0.9995)},
    "eps": {"eps": jump(1e-8, 0.1)},
    "eps back to less": {"eps": jump(0.1, 1e-8)},
}


@pytest.mark.parametrize("name", NAN_OR_EXACT)
def test_schedules_out_of_range(name):
    ours, dense = of_both(injected_adam(**NAN_OR_EXACT[name]))
    is_nan = np.isnan(ours)
    assert is_nan[12].all()
    np.testing.assert_allclose(ours[~is_nan], dense[~is_nan], rtol=2e-5, atol=2e-6)


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


def test_a_number_that_is_set_between_steps():
    def set_b2(t, state):
        if t == 2:
            state.inner.hyperparams["b2"] = jnp.float32(0.5)

    assert np.isnan(run(jmask.deferred(injected_adam()), set_b2)[12]).all()


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


def test_a_cast_to_a_floating_dtype_is_a_rounding():
    ours, dense = of_both(of_moment(lambda g, m: m.astype(jnp.bfloat16).astype(m.dtype)))
    np.testing.assert_allclose(ours, dense, rtol=0.01, atol=0.01)


# --- coefficients of skipped steps, against the steps one by one -------------------------

RING, LATEST = 16, 40
B1, B2, EPS = 0.9, 0.999, 1e-4

# For each kind of step: its form, and its scalars at a rate and the number of the step.
FORMS = {
    "momentum": (
        Form(2, ((0, 1), (1, 1))),
        lambda rate, t: Step({(1, 1): B1 - 1, (0, 1): -rate * B1}),
    ),
    "decay": (Form(1, ((0, 0),)), lambda rate, t: Step({(0, 0): -rate})),
    "sign": (
        Form(2, ((0, 0), (1, 1)), sign=1),
        lambda rate, t: Step({(0, 0): -rate / 2, (1, 1): B1 - 1}, sign=-rate),
    ),
    "quotient": (
        Form(3, ((0, 0), (1, 1), (2, 2)), quotient=(1, 2), terms=6),
        lambda rate, t: Step(
            {(0, 0): -rate, (1, 1): B1 - 1, (2, 2): B2 - 1},
            -rate * B1 / (1 - B1 ** (t + 1)) * ((1 - B2 ** (t + 1)) / B2) ** 0.5,
            EPS * ((1 - B2 ** (t + 1)) / B2) ** 0.5,
        ),
    ),
}
rate_of = lambda t: 0.1 / (1 + t / 10)


def one_step(form, step, entries):
    """A step without a gradient, in NumPy."""
    new = [x.copy() for x in entries]
    for (row, column), change in step.changes.items():
        new[row] += change * entries[column]
    if form.quotient is not None:
        a, b = form.quotient
        new[0] += step.c * entries[a] / (np.sqrt(entries[b]) + step.e)
    if form.sign is not None:
        new[0] += step.sign * np.sign(entries[form.sign])
    return new


@pytest.mark.parametrize("name", FORMS)
def test_steps_taken_together(name):
    """From each start step that the ring has, for entries of many sizes."""
    form, step_at = FORMS[name]
    lines = jnp.tile(form.line(jnp.float32), (RING, 1))
    carry = jnp.zeros((RING, form.sums), jnp.float32)

    @jax.jit
    def advance(lines, carry, t):
        rate = rate_of(t.astype(jnp.float32))
        return advanced(form, lines, carry, t, step_at(rate, t.astype(jnp.float32)))

    for t in range(LATEST):
        lines, carry = advance(lines, carry, jnp.int32(t))
    start = [
        np.logspace(-6, 1, 24).reshape(8, 3) * (2.0 if i == 2 else (-1.0) ** i)
        for i in range(form.width)
    ]
    for since in range(LATEST - RING + 1, LATEST + 1):
        expected = start
        for t in range(since, LATEST):
            expected = one_step(form, step_at(rate_of(t), t), expected)
        of_rows = jnp.tile(lines[since % RING], (8, 1))
        found = caught_up(form, of_rows, [jnp.asarray(x, jnp.float32) for x in start])
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)
