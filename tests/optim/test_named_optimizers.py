"""The named optimizers follow their formulas: 20 steps against float64 NumPy."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests import numpy_optimizers
from tests.expressions import functions
from tests.oracle import assert_close
from tests.stored_tables import STEPS as APPLY
from tests.stored_tables import stepped

pytestmark = pytest.mark.sampled

V, STEPS = 13, 20  # more rows than lookups by half, or whole tables would be updated
NEVER = 4  # the row no gradient touches

MODELS = {
    "sgd": (jmask.sgd, numpy_optimizers.Sgd),
    "adam": (jmask.adam, numpy_optimizers.Adam),
    "adamw": (jmask.adamw, numpy_optimizers.AdamW),
    "adagrad": (jmask.adagrad, numpy_optimizers.Adagrad),
    "rowwise_adam": (jmask.rowwise_adam, numpy_optimizers.RowwiseAdam),
    "rowwise_adagrad": (jmask.rowwise_adagrad, numpy_optimizers.RowwiseAdagrad),
    "ftrl": (jmask.ftrl, numpy_optimizers.Ftrl),
}


def schedule(count):
    """Written so that it has float64 accuracy; optax's own have float32's."""
    return 0.2 / (1 + 0.1 * (count.astype(float) if isinstance(count, jax.Array) else count))


def case(name):
    return lambda learning_rate=0.1, **hyper: (name, {"learning_rate": learning_rate, **hyper})


DECOUPLED = {"weight_decay": 0.5, "decay_mode": "decoupled"}
_CASES = """
    sgd(); sgd(momentum=0.9); sgd(momentum=0.9, nesterov=True); sgd(weight_decay=0.1);
    sgd(schedule, momentum=0.5, weight_decay=0.1); sgd(clip_gradient=0.5, rescale_grad=0.7);
    sgd(maximize=True); sgd(momentum=0.9, weight_decay=0.1, maximize=True);
    adam(); adam(schedule, b1=0.5, b2=0.9, eps=1e-3); adam(b1=0.0, maximize=True);
    adam(eps=0.0, eps_root=1e-6); adam(weight_decay=0.5, clip_gradient=0.5);
    adam(rescale_grad=1e-3); adam(schedule, weight_decay=0.5, count="per_row");
    rowwise_adam(eps=1e-3, count="per_row"); adamw();
    adamw(schedule, b1=0.5, b2=0.9, weight_decay=0.5);
    adamw(eps=0.0, eps_root=1e-6, nesterov=True); adamw(weight_decay=0.5, mask=False);
    adagrad(); adagrad(eps=0.0, initial_accumulator_value=1.0);
    rowwise_adagrad(eps=0, initial_accumulator_value=1.0); adagrad(lr_decay=0.1, maximize=True);
    adagrad(schedule, initial_accumulator_value=0.5); adagrad(eps=0.0, eps_root=1e-7);
    adagrad(weight_decay=0.5, clip_gradient=0.5); sgd(schedule, momentum=0.5, **DECOUPLED);
    adam(schedule, **DECOUPLED); adagrad(lr_decay=0.1, **DECOUPLED); rowwise_adam(eps=1e-3);
    rowwise_adam(schedule, **DECOUPLED); rowwise_adagrad();
    rowwise_adagrad(eps=0.0, eps_root=1e-5); rowwise_adagrad(schedule, weight_decay=0.5);
    ftrl(l1=0.5); ftrl(schedule, weight_decay=0.5, clip_gradient=0.5);
    ftrl(beta=0.0, rescale_grad=0.7)
"""
_BUILT = functions("", globals() | {name: case(name) for name in MODELS})(_CASES)
NAMES, CASES = list(_BUILT), [build() for build in _BUILT.values()]
# One of each optimizer, which all runs have.
FIRST = [next(x for x in NAMES if x.startswith(f"{name}(")) for name in MODELS]


def gradients():
    """Steps of ids and values: duplicates, padding, none, a single one, rows that cancel."""
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        size = {7: 0, 9: 1}.get(step, 8)
        ids = rng.integers(-1, V + 1, size)
        ids[ids == NEVER] = 3
        values = rng.normal(size=(size, 3))
        if step == 5:
            ids[:2], values[1] = 2, -values[0]
        values[(ids < 0) | (ids >= V)] = np.nan  # which reaches nothing
        yield ids, values


def compare(param, state, model, tolerance):
    state = state if hasattr(state, "_fields") else state[0]  # of optax.adamw
    assert state.count == model.steps
    np.testing.assert_allclose(param, model.param, rtol=tolerance, atol=tolerance)
    for slot, expected in model.state.items():
        np.testing.assert_allclose(
            getattr(state, slot), expected, rtol=tolerance, atol=tolerance, err_msg=slot
        )


@pytest.mark.parametrize("step", APPLY)
@pytest.mark.parametrize(
    ("name", "hyper", "lazy"),
    [
        pytest.param(
            *case,
            lazy,
            id=f"{name} {'lazy' if lazy else 'dense'}",
            marks=[pytest.mark.each] if lazy and name in FIRST else [],
        )
        for case, name in zip(CASES, NAMES, strict=True)
        for lazy in (True, False)
        if lazy or "count" not in case[1]
    ],
)
def test_formulas(name, hyper, lazy, step):
    """By `update`, and by `apply_gradients` in one scatter; no dtype is promoted silently."""
    with jax.enable_x64(True):
        build, model_type = MODELS[name]
        start = np.random.default_rng(9).normal(size=(V, 3))
        model, tx = model_type(start, hyper, lazy), build(**hyper, lazy_update=lazy)
        param = jnp.asarray(start)
        state, take = tx.init(param), jax.jit(functools.partial(APPLY[step], tx))
        for ids, values in gradients():
            param, state = take(jmask.RowSparse(ids, values, param.shape), state, param)
            model.step(ids, values)
        compare(param, state, model, 1e-12)
        if lazy:
            np.testing.assert_array_equal(param[NEVER], start[NEVER])


@pytest.mark.of_cpus
@pytest.mark.parametrize(("name", "hyper"), CASES, ids=NAMES)
def test_one_scatter(name, hyper):
    tx = MODELS[name][0](**hyper)
    table = jnp.ones((V, 3))
    gradient = jmask.RowSparse([3, 5], jnp.ones((2, 3)), (V, 3), coalesced=True)
    step = jax.jit(lambda g, s, p: jmask.apply_gradients(tx, g, s, p))
    program = step.lower(gradient, tx.init(table), table).as_text()
    # A traced learning rate is an update of its own, and one table has room for none.
    alone = name == "sgd" and callable(hyper["learning_rate"]) and "momentum" not in hyper
    slots = 2 * ("adam" in name) + ("rowwise" in name) * ("adagrad" in name)
    if name.startswith("rowwise") or "count" in hyper:
        # What there is one of for each row is set, and entries are added to.
        assert program.count('"stablehlo.scatter"') == 1 + slots + ("count" in hyper)
        return
    if name == "adamw" and (callable(hyper["learning_rate"]) or "nesterov" in hyper):
        # Two corrections of bias beside a rate, or a third: there is room for two numbers.
        assert program.count('"stablehlo.scatter"') == 3
        return
    assert program.count('"stablehlo.scatter"') == 1
    assert ("stablehlo.gather" in program) == alone


@pytest.mark.parametrize("step", APPLY)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_finite(name, step):
    """A nan is never taken for a number, such as the zero of a threshold."""
    table, rows = (
        jnp.ones((V, 2)),
        lambda x: jmask.RowSparse([1, 2], [[1.0, x], [1, 1]], (V, 2)),
    )
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        tx = MODELS[name][0](0.1)
        new, state = table, tx.init(table)
        for _ in range(2):
            new, state = APPLY[step](tx, rows(bad), state, new)
        assert not np.isfinite(new[1, 1])
        assert np.isfinite(new[2]).all()
    tx = MODELS[name][0](lambda count: jnp.float32(jnp.nan))
    new, _ = APPLY[step](tx, rows(1.0), tx.init(table), table)
    assert np.isnan(new[1:3]).all()
    assert np.isfinite(np.delete(new, [1, 2], 0)).all()


@pytest.mark.dtype_promotion
@pytest.mark.parametrize("name", MODELS)
def test_a_rate_that_is_injected(name):
    """It is set between steps, which are compiled once, and does as a schedule does."""
    rates, tables = optax.piecewise_constant_schedule(0.1, {2: 0.2}), []
    gradient = jmask.RowSparse([1, 3, 1], jnp.ones((3, 2)), (V, 2))
    build = MODELS[name][0]
    for tx in (build(rates), optax.inject_hyperparams(build)(learning_rate=0.1)):
        take = jax.jit(functools.partial(jmask.apply_gradients, tx))
        table, state = jnp.ones((V, 2)), tx.init(jnp.ones((V, 2)))
        for count in range(4):
            if hasattr(state, "hyperparams"):
                state.hyperparams["learning_rate"] = jnp.asarray(rates(count), jnp.float32)
            table, state = take(gradient, state, table)
        tables.append(table)
    np.testing.assert_allclose(*tables, rtol=2e-5)


# Options that are 0 have no term, and those that are 1 none, where that is known.
LIKE = jmask.RowSparse([1, 3, 1], jnp.ones((3, 2)), (V, 2))
OF_ANY_TYPE = functions("of", {**vars(jmask), **globals()})("""
    sgd(of(0.5), of(0), weight_decay=of(0.5), rescale_grad=of(1), clip_gradient=of(0.25));
    sgd(of(1), of(0.5), weight_decay=of(0), decay_mode="decoupled");
    adam(of(0.5), of(0), of(0), of(1)); adam(of(0.5), of(0.5), of(0.75), eps_root=of(0.25));
    adam(of(1), of(0), of(0.5), weight_decay=of(0), count="per_row");
    adamw(of(0.5), of(0), of(0.75), of(1), of(0), weight_decay=of(0)); adamw(of(1));
    sgd(of(1), clip_gradient=of(1)); adagrad(of(1));
    rowwise_adagrad(of(1), clip_gradient=of(1));
    adagrad(of(0.5), of(0), of(0), of(0.5), of(0), of(0.25));
    rowwise_adagrad(of(1), of(0.5), eps=of(0.25)); rowwise_adam(of(1), of(0.75), of(0));
    ftrl(of(0.5), of(0), of(0), of(0)); ftrl(of(1), of(0.25), of(1), of(0.5));
    optax.chain(clip_by_row_norm(of(0.5), of(1)), sgd(1.0), max_row_norm(of(1), of(2)));
    multi_steps(sgd(1.0), of(2), LIKE); optax.chain(sgd(1.0), ema(of(0)))
""")


def unsigned(x):
    """-np.uint8(1) is 255."""
    return np.uint8(x) if isinstance(x, int) else np.float32(x)


@pytest.mark.dtype_promotion
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray, unsigned])
@pytest.mark.parametrize("name", OF_ANY_TYPE)
def test_options_of_any_type(name, of):
    """A number of Python, NumPy and JAX does the same."""
    found, expected = (
        stepped(OF_ANY_TYPE[name](of), jnp.ones((V, 2)), [LIKE] * 3, "update")
        for of in (of, lambda x: x)
    )
    if of is jnp.asarray:  # whose value is not known, so that there is a buffer of momentum
        found, expected = found[0], expected[0]
    assert_close(found, expected)


def test_dense_and_sparse_leaves_together():
    params = {"table": jnp.ones((4, 2)), "w": jnp.ones(3)}
    gradient = {"table": jmask.RowSparse([2], jnp.ones((1, 2)), (4, 2)), "w": jnp.ones(3)}
    for build, _ in MODELS.values():
        tx = build(0.1)
        new, _ = jmask.apply_gradients(tx, gradient, tx.init(params), params)
        np.testing.assert_allclose(new["w"], new["table"][2, 0], rtol=1e-6)
        assert (new["w"] < 1).all()


@pytest.mark.parametrize("build", [jmask.adam, jmask.rowwise_adam])
def test_a_row_begins_when_it_is_first_seen(build):
    """With a count of its own its path is that of a table that begins then."""
    tx, table = build(0.1, count="per_row", state_dtype=jnp.bfloat16), jnp.ones((3, 2))
    seen = jmask.RowSparse([0, 2], jnp.ones((2, 2)), (3, 2))
    new = jmask.RowSparse([1], jnp.full((1, 2), 1e-3), (3, 2))
    params, state = table, tx.init(table)
    step = jax.jit(functools.partial(jmask.apply_gradients, tx))
    for _ in range(300):
        params, state = step(seen, state, params)
    late, state = step(new, state, params)
    first, _ = step(new, tx.init(table), table)
    np.testing.assert_array_equal(late[1], first[1])
    np.testing.assert_allclose(late[1], 0.9, rtol=1e-4)
    assert state.row_count.dtype == jnp.int32
    np.testing.assert_array_equal(state.row_count, [[300], [1], [300]])


@pytest.mark.of_cpus
def test_one_pass_lowers_for_every_platform():
    """One scatter; on GPUs before JAX 0.12 gather, compute, scatter. One export holds all."""
    tx, table = jmask.adam(0.1), jnp.ones((V, 3))
    of_gpus = 1 if jax.__version_info__ >= (0, 12) else 3
    gradient = jmask.RowSparse([3, 5], jnp.ones((2, 3)), (V, 3), coalesced=True)

    def step(values, state, table):
        return jmask.apply_gradients(tx, gradient.with_values(values), state, table)

    arguments = (gradient.values, tx.init(table), table)
    for platform, scatters in (("cpu", 1), ("tpu", 1), ("cuda", of_gpus)):
        exported = jax.export.export(jax.jit(step), platforms=[platform])(*arguments)
        assert exported.mlir_module().count('"stablehlo.scatter"') == scatters
    everywhere = jax.export.export(jax.jit(step), platforms=["cpu", "tpu", "cuda"])
    assert_close(everywhere(*arguments).call(*arguments), step(*arguments), rtol=1e-6)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, jmask
rng = np.random.default_rng(0)
table = jnp.asarray(rng.normal(size=(500, 8)), jnp.float32)
tx = jmask.adam(0.1)
step = jax.jit(lambda g, s, p: jmask.apply_gradients(tx, g, s, p))
state = tx.init(table)
for _ in range(5):
    ids = rng.zipf(1.2, 3000) % 500
    rows = jmask.RowSparse(ids, jnp.asarray(rng.normal(size=(3000, 8)), jnp.float32), (500, 8))
    table, state = step(rows, state, table)
print(np.asarray(table).tobytes().hex(), np.asarray(state.nu).tobytes().hex())
"""


@pytest.mark.of_cpus
def test_two_processes_give_the_same_bits(capsys):
    """Hot rows, with hundreds of duplicates each, are summed in one order."""
    other = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True
    )
    exec(PROGRAM, {})  # this process is the second
    assert capsys.readouterr().out == other.stdout
    assert len(other.stdout) > 4000


def test_torch_has_no_optimizer_with_a_number_for_each_row():
    state = jmask.rowwise_adam(0.1).init(jnp.ones((4, 3)))
    with pytest.raises(ValueError, match=r"one number for each row, as jmask\.rowwise_adam"):
        jmask.to_torch_state(state)
    with pytest.raises(ValueError, match="one number for each row"):
        jmask.from_torch_state(state, {0: {"step": 1}})
