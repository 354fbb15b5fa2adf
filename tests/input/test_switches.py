"""What jmask computes under JAX's switches for finding mistakes, as without them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.expressions import functions
from tests.optimizers import OPTIMIZERS

SWITCHES = {
    # Not `debug_infs`: the greatest of no numbers, where reductions begin, is -inf.
    "nan": lambda: jax.debug_nans(True),
    "leaks": jax.checking_leaks,
    "no jit": jax.disable_jit,
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "keys": lambda: jax.debug_key_reuse(True),  # row ids are keys to JAX
}

TABLE = jnp.asarray(np.random.default_rng(0).uniform(0.5, 2.0, (40, 8)), jnp.float32)
IDS = jnp.array([1, 2, 2])
ROWS = jmask.RowSparse(IDS, jnp.ones((3, 8)), TABLE.shape)
MASKED = jmask.masked_tensor(TABLE, TABLE > 1)
FEATURES = jmask.cast_storage(jnp.where(TABLE > 1, TABLE, 0), "csr")
# They are asked what they make of rows without a gradient.
DEFERRED = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "adagrad": optax.adagrad(0.1),
    "rmsprop": optax.rmsprop(0.1),
    "lion": optax.lion(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "jmask.adam": jmask.adam(0.1),
}


def trained(tx, wrap, catch_up=lambda params, state, ids=None: (params, state)):
    """The table after three steps."""

    def step(params, state, ids):
        params, state = catch_up(params, state, ids)
        grads = jmask.grad(lambda t: jnp.sum(t[ids] ** 2))(params)
        return jmask.apply_gradients(tx, grads, state, params)

    params, state, take = TABLE, tx.init(TABLE), wrap(step)
    for i in range(3):
        params, state = take(params, state, IDS + i)
    return catch_up(params, state)[0]


def deferred(name, wrap):
    tx = jmask.deferred(DEFERRED[name], window=8)
    return trained(tx, wrap, tx.catch_up)


FUNCTIONS = functions("t", globals())("""
    jmask.grad(lambda t: jnp.exp(t)[IDS].sum())(t).todense();
    jmask.grad(lambda t: jax.lax.scan(lambda c, i: (c * t[i], None), t[0], IDS)[0].sum())(
        t).todense();
    jmask.grad(jax.checkpoint(lambda t: jnp.sin(t[IDS]).sum()))(t).todense();
    jmask.grad(lambda t: jmask.embedding_bag(t, IDS[None]).sum())(t).todense();
    jmask.embedding_bag(t, IDS[None], combiner="mean", weights=jnp.ones((1, 3)));
    jmask.embedding_bag(t, IDS, offsets=jnp.array([0, 1]), padding_id=2, combiner="sqrtn");
    jmask.dot(FEATURES, t.T); FEATURES @ t[0]; ROWS.coalesce().values;
    jmask.numpy.sum(MASKED, 0).to_tensor(0); jmask.numpy.std(MASKED, 1).to_tensor(0);
    jmask.numpy.sort(MASKED, 0).to_tensor(0); jmask.numpy.log(MASKED).to_tensor(0);
    jmask.nn.softmax(MASKED).to_tensor(0);
    jmask.embedding_lookup(jmask.packed(t), IDS, width=8);
    jmask.embedding_lookup(jmask.quantize_rows(t, "int8"), IDS);
    jmask.vocabulary.rows_of(jmask.vocabulary.create(64, ways=4), IDS)[0];
    jmask.gradcheck(lambda x: (x * x).sum(), (t[0],))
""")
STEPS = OPTIMIZERS | {
    "several": optax.chain(jmask.adagrad(0.1), jmask.ema(0.9), jmask.touched())
}
UNDER_JIT = {"eager": lambda f: f, "jit": jax.jit}
pytestmark = [
    pytest.mark.dtype_promotion,
    pytest.mark.parametrize("switch", SWITCHES),
    pytest.mark.parametrize("wrap", UNDER_JIT.values(), ids=UNDER_JIT),
]


def assert_the_same(switch, program):
    expected = program()
    with SWITCHES[switch]():
        found = program()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", STEPS)
def test_steps(switch, wrap, name):
    assert_the_same(switch, lambda: trained(STEPS[name], wrap))


def test_steps_of_a_table_on_the_host(switch, wrap):
    def program():
        tx = jmask.adagrad(0.1)
        table = np.array(TABLE)
        host = jmask.host.offload(table, tx)

        def step(table, state, ids):
            grads = jmask.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
            return jmask.apply_gradients(tx, grads, state, table)

        batches = [np.array([1, 2, 2]), np.array([2, 3, 7])]
        for ids, *given in host.steps(batches, lambda batch: batch):
            host.commit(*wrap(step)(*given, ids))
        host.flush()
        return table

    assert_the_same(switch, program)


@pytest.mark.parametrize("name", DEFERRED)
def test_deferred_steps(switch, wrap, name):
    assert_the_same(switch, lambda: deferred(name, wrap))


@pytest.mark.parametrize("code", FUNCTIONS)
def test_functions(switch, wrap, code):
    wrap = UNDER_JIT["eager"] if "gradcheck" in code else wrap  # it reads the numbers
    assert_the_same(switch, lambda: wrap(FUNCTIONS[code])(TABLE))
