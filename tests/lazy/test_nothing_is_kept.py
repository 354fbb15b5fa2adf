"""What a transformation captures lives as long as it does; calls leave nothing behind."""

import gc
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest

import jmask
from tests.optimizers import NOT_LAZY, OPTIMIZERS

pytestmark = pytest.mark.dtype_promotion

TABLE = jnp.ones((10, 3))
GRADIENT = jmask.RowSparse([1, 2], jnp.ones((2, 3)), TABLE.shape)


def by_arithmetic(captured):
    return lambda x: x * captured.array[0]


def by_rows(captured):
    return lambda x: x * captured.array.sum() * jnp.mean(x * x, axis=-1, keepdims=True)


def behind_jit(captured):
    return jax.jit(by_arithmetic(captured))


def with_a_derivative_of_its_own(captured):
    """An equation holds the rule of its derivative, also where nothing takes it.

    The rule does not call the function: JAX would keep both until its caches are cleared.
    """

    @jax.custom_jvp
    def scaled(x):
        return 1.5 * x

    @scaled.defjvp
    def scaled_jvp(primals, tangents):
        return 1.5 * primals[0], tangents[0] * captured.array[0]

    return jax.jit(lambda x: scaled(x) + x)


def in_a_loop(captured):
    return lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y * captured.array[0], x)


def scaled_by(function):
    scale = optax.stateless(lambda updates, params: jax.tree.map(function, updates))
    return optax.chain(scale, optax.sgd(1.0))


def eagerly(tx, state):
    return tx.update(GRADIENT, state, TABLE)


def applied(tx, state):
    return jmask.apply_gradients(tx, GRADIENT, state, TABLE)


def in_a_program(tx, state):
    return jax.jit(lambda grads, *args: jmask.apply_gradients(tx, grads, *args))(
        GRADIENT, state, TABLE
    )


LIFTS = {
    "lazy": jmask.lazy,
    "skip_nonfinite": lambda tx: jmask.skip_nonfinite(jmask.lazy(tx)),
    "multi_steps": lambda tx: jmask.multi_steps(jmask.lazy(tx), 2, like=GRADIENT),
    "deferred": jmask.deferred,
}


class Captured:
    """An object that a closure holds, and that JAX looks into nowhere."""

    def __init__(self):
        self.array = jnp.full(1, 0.5)


@pytest.mark.parametrize("run", [eagerly, applied, in_a_program])
@pytest.mark.parametrize(
    "formula", [by_arithmetic, by_rows, behind_jit, with_a_derivative_of_its_own, in_a_loop]
)
@pytest.mark.parametrize("lift", LIFTS)
def test_what_is_captured_is_freed(lift, formula, run):
    captured = Captured()
    alive = [weakref.ref(captured), weakref.ref(captured.array)]
    tx = LIFTS[lift](scaled_by(formula(captured)))
    run(tx, tx.init(TABLE))
    del captured, tx
    gc.collect()
    assert [x() for x in alive] == [None, None]


# --- outside jit ---------------------------------------------------------------------------

VOCABULARY = jmask.vocabulary.create(64, ways=4)
STEPPED = {name: lift(optax.adam(0.1)) for name, lift in LIFTS.items()} | {
    "not lazy": jmask.adam(0.1, lazy_update=False),
    "ema": optax.chain(jmask.adam(0.1), jmask.ema(0.9)),
    "touched": optax.chain(jmask.adam(0.1), jmask.touched()),
}
FUNCTIONS = {
    "rows of keys": lambda: jmask.vocabulary.rows_of(VOCABULARY, jnp.array([1, 2])),
    "ids of shapes": lambda: jax.eval_shape(lambda: GRADIENT).indices,
}


def objects_left(call):
    def number():
        gc.collect()
        return len(gc.get_objects())

    for _ in range(4):
        call()
    before = number()
    for _ in range(10):
        call()
    return number() - before


@pytest.mark.parametrize("run", [eagerly, applied])
@pytest.mark.parametrize("name", STEPPED)
def test_steps_leave_nothing(name, run):
    """An epoch of steps outside jit must not fill the memory."""
    tx = STEPPED[name]
    state = tx.init(TABLE)
    assert objects_left(lambda: run(tx, state)) < 20


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_leave_nothing(name):
    assert objects_left(FUNCTIONS[name]) < 20


# --- no array waits for Python to collect garbage ------------------------------------------
#
# Many training loops turn its collection off. Where frames or closures refer to each other, and
# one of them to a table, the table stays until then.


def arrays_left(call):
    """How many arrays are alive after a call, and were not before, though none is returned."""
    call()  # what is made once
    gc.collect()
    gc.disable()
    try:
        before = len(jax.live_arrays())
        call()
        return len(jax.live_arrays()) - before
    finally:
        gc.enable()


def explained():
    jmask.explain(lambda t: jnp.sum(t[jnp.array([1, 2])]), jnp.ones((10, 3)))


def differentiated():
    """By a loss with loops and branches, in which programs are nested."""
    ids, table = jnp.array([[1, 2], [2, 3]]), jnp.ones((10, 3))

    def loss(table, ids):
        _, rows = jax.lax.scan(jax.checkpoint(lambda c, i: (c, jnp.sin(table)[i])), 0, ids)
        bags = jmask.embedding_bag(table, ids)
        other = jax.lax.cond(ids[0, 0] > 1, lambda: table[ids[0]], lambda: 2 * table[ids[1]])
        return jnp.sum(rows) + jnp.sum(bags) + jnp.sum(other), (rows, table)

    jmask.grad(loss, has_aux=True)(table, ids)
    jax.jit(jmask.value_and_grad(loss, has_aux=True))(table, ids)


@pytest.mark.sampled
@pytest.mark.parametrize("run", [eagerly, applied, in_a_program])
@pytest.mark.parametrize("name", STEPPED | OPTIMIZERS | NOT_LAZY)
def test_no_array_of_a_step_waits_for_the_garbage_collector(name, run):
    if name == "deferred" and run is eagerly:
        pytest.skip("rows of jmask.deferred are updated by apply_gradients alone")
    tx = (STEPPED | OPTIMIZERS | NOT_LAZY)[name]
    assert arrays_left(lambda: run(tx, tx.init(jnp.ones((10, 3))))) == 0


@pytest.mark.parametrize("call", [differentiated, explained])
def test_no_array_of_a_gradient_waits_for_the_garbage_collector(call):
    assert arrays_left(call) == 0
