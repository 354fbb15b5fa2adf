"""Optimizers take gathered rows of bags as they take the same rows in an array.

And of a step of a large batch of bags, read from the compiled program: nothing as large as
all rows is made.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from jmask._kernels import tuning
from jmask._kernels.gathered_rows import GATHERED, GatheredRows
from tests.compiled_step import compiled_step, with_optax
from tests.optimizers import NOT_LAZY, OPTIMIZERS

pytestmark = pytest.mark.dtype_promotion

V, D, B, L = 40, 24, 8, 5  # row D is one that no id names
LIKE = jmask.RowSparse.zeros((V, D), nse=B * L)

EVERY = {
    **OPTIMIZERS,
    **NOT_LAZY,
    "every other step": jmask.multi_steps(jmask.adam(0.1), 2, like={"t": LIKE}),
}


def gradients(seed, repeats=True):
    """A gradient with equal ids and padding, and what makes its rows, with weights.

    Its rows are those of bags, or rows that do not repeat.
    """
    rng = np.random.default_rng(seed)
    source = jnp.asarray(rng.normal(size=(B if repeats else B * L, D)), jnp.float32)
    index = jnp.repeat(jnp.arange(B, dtype=jnp.int32), L) if repeats else None
    weight = jnp.asarray(rng.normal(size=B * L), jnp.float32)
    ids = jnp.asarray(rng.integers(0, V // 2, B * L), jnp.int32).at[7].set(V)
    rows = GatheredRows(source, index, weight, jnp.dtype(jnp.float32))
    return jmask.RowSparse(ids, rows.array(), (V, D)), rows


@pytest.mark.sampled
@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("apply", [jmask.apply_gradients, with_optax], ids=["one", "two"])
@pytest.mark.parametrize("name", EVERY)
def test_as_rows_in_an_array(monkeypatch, name, apply, repeats):
    monkeypatch.setattr(tuning, "MATERIALISED_ROWS", 0)
    monkeypatch.setattr(tuning, "DENSE_ROWS_FOR_EACH_LOOKUP", 0)
    monkeypatch.setattr(tuning, "BLOCK_ROWS", (3, 3))
    tx = EVERY[name]
    start = {"t": jnp.asarray(np.random.default_rng(9).normal(size=(V, D)), jnp.float32)}

    @jax.jit
    def run(gradient, known, state, params):
        if known is not None:
            GATHERED.note(gradient.values, known)
        return apply(tx, {"t": gradient}, state, params)

    results = []
    for kind in (0, 1):
        params, state = start, tx.init(start)
        for seed in range(3):
            gradient, known = gradients(seed, repeats)
            params, state = run(gradient, known if kind else None, state, params)
        results.append((params, state))
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)
    # Rows that no id names keep their bits.
    if name not in NOT_LAZY:
        np.testing.assert_array_equal(results[0][0]["t"][V // 2 :], start["t"][V // 2 :])


LARGE = ("sgd", "adam", "adagrad", "rowwise adagrad", "ftrl", "optax.adam")


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [10**6, 2000])
@pytest.mark.parametrize("name", LARGE)
def test_a_step_of_bags_writes_no_row_out(name, rows):
    count, width = 102_400, 64
    loss = lambda table, ids: jnp.sum(jmask.embedding_bag(table, ids.reshape(-1, 5)) ** 2)
    table = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    memory = compiled_step(loss, OPTIMIZERS[name], table, ids).memory_analysis()
    # Bags are 5 MB, and all rows would be 26. XLA of JAX 0.10 keeps the bags once more.
    assert memory.temp_size_in_bytes < (12.5e6 if jax.__version_info__ >= (0, 12) else 18e6)
    assert memory.alias_size_in_bytes >= rows * width * 4


def pooled_with_weights(params, ids):
    return jnp.sum(jmask.embedding_bag(params["t"], ids, weights=params["w"]) ** 2)


def recomputed(params, ids):
    return jax.checkpoint(lambda p: jnp.sum(jnp.sin(p["t"][ids]).sum(-1) * p["w"]))(params)


def pooled_by_scores(params, ids):
    weights = jax.nn.softmax(params["scores"][ids])
    return jnp.sum(jmask.embedding_bag(params["t"], ids, weights=weights) ** 2)


def of_two_tables(params, ids):
    return jnp.sum(params["t"][ids].sum(1) * params["u"][ids].mean(1))


def bags_of_two_tables(params, ids):
    bags = (jmask.embedding_bag(params[name], ids) for name in ("t", "u"))
    return jnp.sum(jnp.sin(sum(bags)))


def linear(params, ids):
    return jnp.sum(params["t"][ids] * params["w"][..., None])


# With the parameters that each has.
LATE = {
    pooled_with_weights: "t w",
    recomputed: "t w",
    pooled_by_scores: "t scores",
    of_two_tables: "t u",
    bags_of_two_tables: "t u",
    linear: "t w",
}


def late_step(loss, tx, with_value, sharding=None):
    """Bytes of temporaries of a donated step, compiled, and of a table."""
    rows, width, bags, length = 400_000, 64, 512, 32
    shaped = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    params = {
        "t": shaped((rows, width), jnp.float32),
        "u": shaped((rows, width), jnp.float32),
        "w": shaped((bags, length), jnp.float32),
        "scores": shaped((rows,), jnp.float32),
    }
    params = {x: params[x] for x in LATE[loss].split()}
    state = jax.tree.map(lambda x: shaped(x.shape, x.dtype), jax.eval_shape(tx.init, params))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        if not with_value:
            return jmask.apply_gradients(tx, jmask.grad(loss)(params, ids), state, params)
        value, gradients = jmask.value_and_grad(loss)(params, ids)
        return *jmask.apply_gradients(tx, gradients, state, params), value

    compiled = step.lower(params, state, shaped((bags, length), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes, rows * width * 4


@pytest.mark.parametrize("with_value", [True, False], ids=["value_and_grad", "grad"])
@pytest.mark.parametrize("name", ["sgd", "adam", "optax.adam"])
@pytest.mark.parametrize("loss", LATE)
def test_tables_that_are_read_for_gradients_alone_are_written_after(loss, name, with_value):
    """A gradient of weights reads the rows again: not from a copy of the table."""
    temporaries, table = late_step(loss, OPTIMIZERS[name], with_value)
    assert temporaries < table / 2
