"""Functions and optimizers outside jit compile nothing from the third call on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.autodiff.test_semantics_of_gradients import OPERATIONS
from tests.compilations import compilations
from tests.expressions import functions
from tests.optimizers import NAMED
from tests.stored_tables import STEPS, of_lines, sharded

pytestmark = pytest.mark.dtype_promotion


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
    jmask.renormalize(jnp.ones((50, 64)), ids_of(i), 1.0);
    jmask.embedding_lookup(PACKED, ids_of(i), width=3);
    jmask.apply_gradients(ADAM, packed_rows(i), ADAM.init(PACKED), PACKED)[0];
    jmask.stochastic_round(jnp.full(3, 0.1 * i), jnp.bfloat16, jax.random.key(i));
    jmask.apply_updates(jnp.ones((50, 3), jnp.bfloat16), rows(i), key=jax.random.key(i));
    jmask.tree.norm(rows(i)); jmask.tree.mean([rows(i), rows(i + 1)]);
    jmask.tree.scale(2.0, rows(i)); jmask.quantize_rows(NARROW + i, "int8");
    DEFERRED.catch_up(NARROW, DEFERRED.init(NARROW), ids_of(i));
    DEFERRED.catch_up(NARROW, DEFERRED.init(NARROW));
    jmask.vocabulary.rows_of(jmask.vocabulary.create(64, ways=4), ids_of(i));
    jmask.vocabulary.rows_of(spread_keys(), ids_of(i));
    jmask.embedding_lookup(spread(), ids_of(i)); jmask.exchange_overflow(spread(), ids_of(i));
    DEFERRED.catch_up(spread(), DEFERRED.init(spread()), ids_of(i));
    jmask.apply_updates(spread(), jmask.RowSparse([i, 7, i], jnp.ones((3, 12)), (56, 12)))
""")
NARROW, ADAM = jnp.ones((50, 3)), OPTIMIZERS["adam"]
PACKED, DEFERRED = jmask.packed(NARROW), jmask.deferred(optax.adam(0.1), window=8)
# Explicit axes: what each device does is a program of its own.
spread = functools.cache(lambda: sharded(jnp.ones((56, 12)), "8 devices"))
spread_keys = lambda: jmask.vocabulary.create(64, ways=4, mesh=spread().sharding.mesh)
packed_rows = lambda i: of_lines(rows(i), PACKED)
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


def test_a_schedule_may_read_what_changes():
    """Outside jit an optimizer is called in each step, as optax's are."""
    rate = [0.1]
    tx, table = jmask.sgd(lambda count: rate[0]), jnp.ones((50, 3))
    gradient = jmask.RowSparse([4], jnp.ones((1, 3)), (50, 3))
    for rate[0] in (0.1, 1.0):
        new, _ = jmask.apply_gradients(tx, gradient, tx.init(table), table)
        np.testing.assert_allclose(new[4], 1 - rate[0], rtol=1e-6)
