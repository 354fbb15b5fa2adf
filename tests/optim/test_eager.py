"""Optimizers outside jit run from a compiled program: traced once for equal shapes."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmask
from jmask._base.fallback import report_fallback
from jmask._updates.eager import compiled_outside_jit
from tests.autodiff.test_semantics_of_gradients import OPERATIONS
from tests.compilations import compilations
from tests.expressions import functions
from tests.optim.test_promotion import NAMED
from tests.oracle import assert_close
from tests.stored_tables import STEPS

pytestmark = pytest.mark.dtype_promotion


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

    def gradient(i):
        table = jmask.RowSparse([i, 5], jnp.full((2, 2), float(i + 1)), (6, 2))
        return {"table": table, "dense": jnp.full(3, float(i))}

    new = STEPS[step](tx, gradient(0), tx.init(params), params)
    traces = len(calls)
    assert traces
    for i in range(1, 4):
        new = STEPS[step](tx, gradient(i), *reversed(new))
    assert len(calls) == traces
    more = gradient(0) | {"table": jmask.RowSparse([1], jnp.ones((1, 2)), (6, 2))}
    STEPS[step](tx, more, *reversed(new))
    assert len(calls) > traces, "other shapes are traced anew"


rows = lambda i, width=3: jmask.RowSparse([i, 7, i], jnp.ones((3, width)), (50, width))
OPTIMIZERS = {
    **NAMED,
    "lazy": jmask.lazy(optax.adamw(0.1)),
    "skip_nonfinite of lazy": jmask.skip_nonfinite(jmask.lazy(optax.adam(0.1))),
    "multi_steps": jmask.multi_steps(jmask.ftrl(0.1), 2, rows(0)),
    "multi_steps of all": jmask.multi_steps(jmask.skip_nonfinite(jmask.sgd(0.1)), 2, rows(0)),
    "injected": optax.inject_hyperparams(jmask.adam)(learning_rate=0.1),
}


def with_value(tx, grads, state, params):
    """An update with an argument by name, which is run as it is."""
    tx = optax.with_extra_args_support(tx)
    updates, state = tx.update(grads, state, params, value=jnp.float32(2))
    return jmask.apply_updates(params, updates), state


# Rows of 64 entries are read in another way; every other gradient is bad, if that is skipped.
@pytest.mark.sampled
@pytest.mark.parametrize("step", [*STEPS, "with_value"])
@pytest.mark.parametrize(("name", "width"), [("adam", 64), *((name, 3) for name in OPTIMIZERS)])
def test_optimizers_compile_nothing_the_third_time(name, width, step):
    tx, table = OPTIMIZERS[name], jnp.ones((50, width))
    take = STEPS.get(step, with_value)
    state = tx.init(table)
    with compilations() as compiled:
        for i in range(6):
            bad = hasattr(state, "skipped") and i % 2
            grads = rows(i, width).with_values(jnp.full((3, width), jnp.nan if bad else 1.0))
            table, state = take(tx, grads, state, table)
            if i == 3:  # after two steps of every kind
                jax.block_until_ready(table)
                compiled.clear()
        jax.block_until_ready(table)
    assert not compiled
    assert getattr(state, "skipped", 3) == 3


loss = lambda table, ids: jnp.sum(
    jnp.sin(jmask.embedding_lookup(table, ids)) * jnp.take(table, ids, axis=0)
)
FUNCTIONS = functions("i", globals())("""
    jmask.value_and_grad(loss)(NARROW, ids_of(i));
    jmask.grad(loss)(jnp.ones((50, 64)), ids_of(i));
    jmask.grad(lambda t: jnp.sum(jmask.grad(loss)(t, ids_of(i)).values ** 2))(NARROW);
    jmask.grad(lambda x: jnp.sum(jmask.todense(x) ** 2))(rows(i));
    jmask.embedding_lookup(jnp.ones((50, 64)), ids_of(i), max_norm=1.0, padding_id=2);
    jmask.embedding_bag(NARROW, ids_of(i), offsets=jnp.array([0, 1]), combiner="max");
    jmask.renormalize(jnp.ones((50, 64)), ids_of(i), 1.0); PACKED[ids_of(i)];
    jmask.apply_gradients(ADAM, rows(i), ADAM.init(PACKED), PACKED)[0].parts;
    jmask.stochastic_round(jnp.full(3, 0.1 * i), jnp.bfloat16, jax.random.key(i));
    jmask.apply_updates(jnp.ones((50, 3), jnp.bfloat16), rows(i), key=jax.random.key(i));
    jmask.tree.norm(rows(i)); jmask.tree.mean([rows(i), rows(i + 1)]);
    jmask.tree.scale(2.0, rows(i))
""")
NARROW, ADAM = jnp.ones((50, 3)), OPTIMIZERS["adam"]
PACKED = jmask.PackedTable.pack(NARROW)
ids_of = lambda i: jnp.array([i, 3, i])


def compiled_the_third_time(function):
    with compilations() as compiled:
        for i in range(3):
            compiled.clear()
            jax.block_until_ready(jax.tree.leaves(function(i)))
        return len(compiled)


@pytest.mark.sampled
@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_compile_nothing_the_third_time(name):
    assert not compiled_the_third_time(FUNCTIONS[name])


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::jmask.StorageFallbackWarning", "ignore:Explicitly requested"
)
def test_operations_compile_nothing_the_third_time():
    counts = {
        name: compiled_the_third_time(lambda i, o=operation: o.function(*o.args))
        for name, operation in OPERATIONS.items()
    }
    assert {name for name, count in counts.items() if count} == set()


@pytest.mark.parametrize(
    ("build", "rates", "step"),
    [
        (
            jmask.adam,
            {"learning_rate": 0.1, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1},
            "apply_gradients",
        ),
        (jmask.sgd, {"learning_rate": 0.1, "momentum": 0.9}, "update"),
    ],
)
def test_injected_rates_are_arguments_of_one_program(build, rates, step):
    """Made anew in each step, by `inject_hyperparams` or by hand."""
    table = jnp.ones((50, 3))
    gradient = jmask.RowSparse([4, 7], jnp.ones((2, 3)), (50, 3))
    for scale in (1.0, 0.5):
        numbers = {name: scale * rate for name, rate in rates.items()}
        tx = build(**{name: jnp.asarray(x) for name, x in numbers.items()})
        state = tx.init(table)
        with compilations() as compiled:
            new = STEPS[step](tx, gradient, state, table)
        assert bool(compiled) == (scale == 1)
    expected = STEPS[step](build(**numbers), gradient, state, table)
    assert_close(new, expected, rtol=1e-6)


def test_fallbacks_are_reported_at_each_call():
    @compiled_outside_jit
    def update(x):
        report_fallback("x became dense")
        return 2 * x

    for _ in range(2):
        with pytest.warns(jmask.StorageFallbackWarning):  # which shows all
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
