"""Half a change is said: dense gradients in a lazy optimizer, arrays made of sparse ones.

And a state of another dtype than `init` makes is refused, in every way of stepping.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.expressions import functions, named
from tests.stored_tables import STEPS

pytestmark = pytest.mark.dtype_promotion


IDS = jnp.array([1, 7, 1])
TABLE = jnp.ones((50_000, 16))  # 3.2 MB
PARAMS = {"table": TABLE, "w": jnp.ones((16,)), "layer": jnp.ones((512, 512))}
loss = lambda params: jnp.sum(params["table"][IDS] @ params["w"]) + jnp.sum(params["layer"])
tied = lambda params: jnp.sum(params["table"][IDS] @ params["table"].T)


def notices(run):
    with warnings.catch_warnings(record=True, action="always") as found:
        run()
    return [str(x.message) for x in found if x.category is jmask.StorageFallbackWarning]


CONVERSIONS = (np.asarray, np.array, jnp.asarray, jnp.array, np.linalg.norm)


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_an_array_of_a_sparse_gradient(convert):
    """As Keras' `stateless_apply` makes one. Under jit it has no numbers: an error."""
    gradient = jmask.grad(loss)(PARAMS)["table"]
    (notice,) = notices(lambda: convert(gradient))
    assert "write x.todense()" in notice
    with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match="plain array"):
        convert(gradient)
    with pytest.raises(TypeError, match=r"write x.todense\(\)"):
        jax.eval_shape(lambda g: convert(g), gradient)


LABELS = {"table": "a", "w": "b", "layer": "b"}
# Optimizers around and inside each other: transformations inside `lazy` get arrays.
NESTINGS = functions("like", {**vars(jmask), **globals()})("""
    adam(0.1); lazy(optax.adam(0.1)); lazy(adagrad(0.1)); lazy(rowwise_adagrad(0.1));
    lazy(optax.chain(optax.clip_by_global_norm(1.0), adagrad(0.1)));
    lazy(lazy(optax.adam(0.1)));
    lazy(optax.partition({"a": adam(0.1), "b": optax.sgd(0.1)}, LABELS));
    optax.partition({"a": lazy(adam(0.1)), "b": optax.sgd(0.1)}, LABELS);
    lazy(optax.inject_hyperparams(adagrad)(learning_rate=0.1));
    optax.inject_hyperparams(lambda rate: lazy(adagrad(rate)))(rate=0.1);
    skip_nonfinite(lazy(adagrad(0.1)));
    optax.chain(drop_nonfinite_rows(), lazy(adagrad(0.1)));
    optax.chain(clip_by_row_norm(1.0), lazy(adagrad(0.1)));
    multi_steps(lazy(adagrad(0.1)), 1, like=like);
    skip_nonfinite(multi_steps(lazy(adagrad(0.1)), 1, like=like))
""")


def many(params):
    """As many lookups as a table has rows: rows of the batch look like a table themselves."""
    return jnp.sum(params["table"][jnp.arange(40_000)] @ params["w"]) + jnp.sum(params["layer"])


def masked(params):
    gradient = jmask.grad(loss)(params)
    rows = gradient["table"].todense()
    return gradient | {"table": jmask.masked_tensor(rows, rows != 0)}


def notices_of(name, gradient, like, step):
    """Those of a step, eagerly and under jit, with an optimizer of its own each time."""
    for is_compiled in (False, True):
        tx = NESTINGS[name](like)
        take = lambda params, tx=tx: STEPS[step](tx, gradient(params), tx.init(params), params)
        call = functools.partial(jax.eval_shape, take) if is_compiled else take
        yield notices(lambda call=call: call(PARAMS))


@pytest.mark.sampled
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "gradient", [jmask.grad(loss), jmask.grad(many), masked], ids=["few", "many", "masked"]
)
@pytest.mark.parametrize("name", NESTINGS)
def test_no_notice_from_inside(name, gradient, step):
    like = jax.eval_shape(gradient, PARAMS)
    assert [*notices_of(name, gradient, like, step)] == [[], []]


# The table, its size and what to call. What jmask has made dense it does not report once more.
OF_JAX = r"a lazy optimizer got.*\['table'\]`.*\(3\.2 MB\).*jmask\.value_and_grad"
NOTICED = (jax.grad(loss), OF_JAX), (jmask.grad(tied), "`dot_general` needs all of it")


@pytest.mark.sampled
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", NESTINGS)
def test_one_notice_from_outside(name, step):
    """Dense gradients are noticed once, however many lazy optimizers there are."""
    grads = jax.grad(loss)(PARAMS)
    for gradient, words in NOTICED:
        for found in notices_of(name, gradient, grads, step):
            (notice,) = found
            assert re.search(words, notice, re.S), notice
    tx = NESTINGS[name](grads)
    with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match="MB"):
        jax.eval_shape(lambda g, p: STEPS[step](tx, g, tx.init(p), p), grads, PARAMS)


def test_no_notice():
    """Of small tables, and by optax itself."""
    small, tx = {"table": jnp.ones((50, 16)), "layer": PARAMS["layer"]}, jmask.adam(0.1)
    assert not notices(lambda: tx.update(small, tx.init(small), small))
    tx, dense = optax.adam(0.1), jax.grad(loss)(PARAMS)
    assert not notices(lambda: tx.update(dense, tx.init(PARAMS), PARAMS))


# --- states of another dtype ------------------------------------------------------------


V, D = 6, 4
NARROW, WIDE = jnp.bfloat16, jnp.float32
GRADIENT = jmask.RowSparse([2, 4], jnp.ones((2, D)), (V, D))
read = named("dtype", {**vars(jmask), **globals()})
NAMED = read("""
    sgd | sgd(0.1, momentum=0.9, state_dtype=dtype)
    adam | adam(0.1, state_dtype=dtype)
    rowwise_adam | rowwise_adam(0.1, state_dtype=dtype)
    adagrad | adagrad(0.1, state_dtype=dtype)
    rowwise_adagrad | rowwise_adagrad(0.1, state_dtype=dtype)
    ftrl | ftrl(0.1, state_dtype=dtype)
""")
OPTIMIZERS = NAMED | read("""
    mu of adam | adam(0.1, mu_dtype=dtype)
    mu of rowwise_adam | rowwise_adam(0.1, mu_dtype=dtype)
    adamw | adamw(0.1, mu_dtype=dtype)
    not lazy | adam(0.1, state_dtype=dtype, lazy_update=False)
    optax.adam | lazy(optax.adam(0.1, mu_dtype=dtype))
    chain | lazy(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, mu_dtype=dtype)))
    several steps | multi_steps(adam(0.1, state_dtype=dtype), 1, like={"t": GRADIENT})
    finite | skip_nonfinite(adam(0.1, state_dtype=dtype))
""")


@pytest.mark.sampled
@pytest.mark.parametrize("is_jitted", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer, step, is_jitted):
    tx, before = OPTIMIZERS[optimizer](WIDE), OPTIMIZERS[optimizer](NARROW)
    params = {"t": jnp.ones((V, D))}
    call = lambda state: STEPS[step](tx, {"t": GRADIENT}, state, params)
    call = jax.jit(call) if is_jitted else call
    with pytest.raises(ValueError, match=r"`state\S*` is bfloat16, and `init`.* float32"):
        call(before.init(params))
    cast = jax.tree.map(lambda x, y: x.astype(y.dtype), before.init(params), tx.init(params))
    _, state = call(cast)
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, cast)


def test_dense_gradients_of_named_optimizers():
    """They write slots in the dtype that they have; optax' own go on in the new one."""
    params = jnp.ones((V, D))
    for make in NAMED.values():
        for step in STEPS.values():
            with pytest.raises(ValueError, match="is bfloat16, and `init`"):
                step(make(WIDE), params, make(NARROW).init(params), params)


def test_what_a_step_promotes_is_no_error():
    """Optax's moments of a bfloat16 parameter are float32 after gradients of float32."""
    tx = jmask.lazy(optax.adam(0.1))
    params = {"t": jnp.ones((V, D), NARROW), "w": jnp.ones(3, NARROW)}
    state = tx.init(params)
    for _ in range(2):
        grads = {"t": GRADIENT, "w": jnp.ones(3, WIDE)}
        params, state = jmask.apply_gradients(tx, grads, state, params)
    assert state[0].mu["t"].dtype == NARROW
