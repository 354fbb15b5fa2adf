"""Recycled rows start anew, beside runs in which all arrays with these rows are written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jmask
from jmask import vocabulary
from jmask._vocabulary import reset as reset_module
from tests.compilations import work
from tests.compiled_step import temporary_bytes
from tests.optimizers import OPTAX, OPTIMIZERS
from tests.oracle import assert_close
from tests.sampling import chosen

V, D = 37, 3
NORMAL = jax.nn.initializers.normal(1.0)

LAZY = {
    **{
        name: OPTIMIZERS[name]
        for name in (
            *("adam", "momentum", "ftrl", "rowwise adagrad", "optax.adamw", "optax.adagrad"),
            *("clipped optax.adam", "injected optax.adam", "adam unless not finite"),
        )
    },
    "slots that start at 0.7": jmask.adagrad(0.1, initial_accumulator_value=0.7),
    "optax.amsgrad": jmask.lazy(optax.amsgrad(0.1)),
    "optax.rprop": jmask.lazy(optax.rprop(0.1)),
    "ema": optax.chain(jmask.adam(0.1), jmask.ema(0.5)),
    "schedule free": jmask.lazy(optax.contrib.schedule_free_sgd(0.1)),
    "partition": jmask.lazy(
        optax.partition(
            {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"table": "a", "other": "b", "w": "b"}
        )
    ),
}


def loss(params, ids, y):
    rows = params["table"][ids] @ params["w"] + params["other"][ids].sum(1, keepdims=True)
    return jnp.mean((rows - y) ** 2)


def start(key):
    a, b, c = jax.random.split(key, 3)
    return {
        "table": NORMAL(a, (V, D), jnp.float32),
        "other": NORMAL(b, (V, 2), jnp.float32),
        "w": NORMAL(c, (D, 1), jnp.float32),
    }


def batches(count=12):
    rng = np.random.default_rng(0)
    for _ in range(count):
        recycled = np.where(rng.random(5) < 0.5, rng.integers(0, V, 5), V)
        yield rng.integers(0, V, 8), recycled.astype(np.int32), rng.random((8, 1), np.float32)


def anew(tree, first, ids):
    """Write rows of `first` into all arrays with V rows."""
    ids = ids[ids < V]

    def written(x, y):
        if np.shape(x)[:1] == (V,):
            x = np.array(x)
            x[ids] = np.asarray(y)[ids]
        return x

    return jax.tree.map(written, tree, first)


@functools.cache
def started(seed):
    """All rows of both tables as `reset` starts them."""
    new = {}
    for k, (name, columns) in enumerate((("other", 2), ("table", D))):
        key = jax.random.fold_in(jax.random.key(seed), k)
        rows = [NORMAL(jax.random.fold_in(key, r), (1, columns), jnp.float32) for r in range(V)]
        new[name] = jnp.concatenate(rows)
    return new


def run(tx, step, reset):
    params = start(jax.random.key(1))
    state = tx.init(params)
    for i, (ids, recycled, y) in enumerate(batches()):
        params, state = reset(tx, params, state, recycled, i % 3)
        params, state = step(params, state, jnp.asarray(ids), jnp.asarray(y))
    return params, state


def by_hand(tx, params, state, ids, seed):
    first = params | started(seed)
    return anew(params, first, ids), anew(state, tx.init(first), ids)


def by_reset(tx, params, state, ids, seed):
    rows = {"table": jnp.asarray(ids), "other": jnp.asarray(ids)}
    return jitted(tx)(params, state, rows, jax.random.key(seed))


@functools.cache
def jitted(tx):
    function = lambda params, state, rows, key: vocabulary.reset(
        tx, params, state, rows, NORMAL, key=key
    )
    return jax.jit(function, donate_argnums=(0, 1))


def step_of(tx, value_and_grad=jmask.value_and_grad):
    @jax.jit
    def step(params, state, ids, y):
        if hasattr(tx, "catch_up"):
            params, state = tx.catch_up(params, state, {"table": ids, "other": ids})
        _, grads = value_and_grad(loss)(params, ids, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def assert_same(have, want):
    for x, y in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(params=[2, 512])
def block(request, monkeypatch):
    """So many rows are written together."""
    monkeypatch.setattr(reset_module, "_BLOCK", request.param)
    jitted.cache_clear()


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("name", chosen(["slots that start at 0.7", "ema"], LAZY))
@pytest.mark.dtype_promotion
def test_a_run_in_which_rows_start_anew(name):
    """Bit for bit: parameters, and every array of the state."""
    tx = LAZY[name]
    step = step_of(tx)
    assert_same(run(tx, step, by_reset), run(tx, step, by_hand))


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("name", ["adamw", "adagrad", "momentum"])
@pytest.mark.dtype_promotion
def test_deferred(name):
    """The trajectory of the dense optimizer, whose rows start anew in the same steps."""
    inner = OPTAX[name]
    tx = jmask.deferred(inner)
    params, state = run(tx, step_of(tx), by_reset)
    params, state = tx.catch_up(params, state)
    expected = run(inner, step_of(inner, jax.value_and_grad), by_hand)
    for x, y in zip(
        jax.tree.leaves((params, state.inner)), jax.tree.leaves(expected), strict=True
    ):
        assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.dtype_promotion
def test_rows_that_moved():
    """A row that starts anew is among those of the next step, whether that moves it or not."""
    tx = optax.chain(jmask.adam(0.1), jmask.touched())
    params = start(jax.random.key(1))
    state = tx.init(params)
    ids, y = jnp.array([1, 2]), jnp.zeros((2, 1))
    step = step_of(tx)
    params, state = step(params, state, ids, y)
    rows = {"table": jnp.array([5, V])}
    params, state = vocabulary.reset(tx, params, state, rows, NORMAL)
    assert jmask.rows_since(state, 1)["table"].tolist() == [5]
    params, state = step(params, state, ids, y)
    assert jmask.rows_since(state, 1)["table"].tolist() == [1, 2, 5]
    assert jmask.rows_since(state, 2)["table"].tolist() == []


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_what_a_row_starts_from(dtype):
    """Each row from its own key: not of the others, nor of how often it is named."""
    init = lambda key, shape, dtype: jax.random.normal(key, shape).astype(dtype)
    tx, params = jmask.adam(0.1), {"a": jnp.zeros((4, 2)), "table": jnp.zeros((9, 3), dtype)}
    key = jax.random.key(7)
    rows = jnp.array([9, 4, 0, 4, 9, -1])
    state = tx.init(params)
    new, after = vocabulary.reset(tx, params, state, {"table": rows}, init, key=key)
    expected = np.zeros((9, 3), params["table"].dtype)
    for r in (0, 4):
        row = jax.random.fold_in(jax.random.fold_in(key, 1), r)
        expected[r] = init(row, (1, 3), dtype)[0]
    np.testing.assert_array_equal(new["table"], expected)
    assert_same((new["a"], after), (params["a"], state))
    nothing = ([], jnp.zeros(0, jnp.int32), jnp.full(3, 9))
    for empty in ({}, *({"table": x} for x in nothing)):
        assert_same(vocabulary.reset(tx, params, state, empty, init), (params, state))


@pytest.mark.parametrize("name", ["optax.adamw", "rowwise adagrad"])
@pytest.mark.dtype_promotion
def test_in_place(name):
    """A whole step: keys, rows that start anew, the optimizer; nothing of a table's size."""
    tx, temporary = LAZY[name], []

    def step(params, state, vocab, keys, key):
        rows, vocab, recycled = vocabulary.rows_of(vocab, keys)
        named = {"table": recycled}
        params, state = vocabulary.reset(tx, params, state, named, NORMAL, key=key, vocab=vocab)
        loss = lambda params: jnp.sum(jnp.square(params["table"][rows]))
        grads = jmask.grad(loss)(params)
        return *jmask.apply_gradients(tx, grads, state, params), vocab

    for capacity in (10**5, 10**6):
        vocab = jax.eval_shape(lambda c=capacity: vocabulary.create(c))
        params = {"table": jax.ShapeDtypeStruct((vocab.table_rows, 16), jnp.float32)}
        state = jax.eval_shape(tx.init, params)
        keys = jax.ShapeDtypeStruct((700, 2), jnp.uint32)
        given = (params, state, vocab, keys, jax.eval_shape(lambda: jax.random.key(0)))
        compiled = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*given).compile()
        arrays = jax.tree.leaves((params, state, vocab))
        aliased = sum(x.size * x.dtype.itemsize for x in arrays)
        entries = vocab.table_rows * 16
        temporary.append(temporary_bytes(compiled, aliased, entries))
    assert temporary[1] < 1.1 * temporary[0] < 2 * 10**6


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.dtype_promotion
def test_sharded(kind):
    """Tables and slots over a mesh start anew as on one device, and stay where they are."""
    mesh, tx = jax.make_mesh((8,), ("x",), (kind,)), LAZY["optax.adamw"]
    alone = {"table": start(jax.random.key(0))["table"]}
    params = {"table": jmask.sharded(alone["table"], mesh)}
    states, rows = [tx.init(alone), tx.init(params)], {"table": jnp.array([3, 36, 8, 37])}
    reset = jax.jit(
        lambda params, state: vocabulary.reset(tx, params, state, rows, NORMAL),
        donate_argnums=(0, 1),
    )
    where = params["table"].sharding
    # Moments that are not zero.
    states = [jax.tree.map(lambda x: x + jnp.ones_like(x), state) for state in states]
    expected, made = reset(alone, states[0]), reset(params, states[1])
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[:V] if x.ndim else x, y)
        assert not x.ndim or x.sharding.is_equivalent_to(where, 2)


@pytest.mark.dtype_promotion
def test_before_tables_on_the_host():
    """The loader numbers the keys; the run is that of the table on the device."""
    tx, init = jmask.lazy(optax.adam(0.1)), jax.nn.initializers.constant(0.5)
    rng = np.random.default_rng(0)
    every = [vocabulary.words_of(keys) for keys in rng.zipf(1.4, (20, 40))]
    vocab = vocabulary.create(32, 4, shared_rows=3)
    table = rng.normal(size=(vocab.table_rows, D)).astype(np.float32)
    rows_of = jax.jit(vocabulary.rows_of)

    def numbered(vocab):
        for keys in every:
            rows, vocab, recycled = rows_of(vocab, keys)
            is_new = np.asarray(recycled) < vocab.table_rows
            yield {"rows": np.asarray(rows), "is_new": is_new}

    @jax.jit
    def step(params, state, batch):
        new = jnp.where(batch["is_new"], batch["rows"], len(params["table"]))
        params, state = vocabulary.reset(tx, params, state, {"table": new}, init)
        loss = lambda params: jnp.sum(jnp.square(params["table"][batch["rows"]]))
        return jmask.apply_gradients(tx, jmask.grad(loss)(params), state, params)

    params = {"table": jnp.asarray(table)}
    state = tx.init(params)
    for batch in numbered(vocab):
        params, state = step(params, state, batch)
    kept = {"table": table.copy()}
    host = jmask.host.offload(kept, tx)
    ids = {"table": lambda batch: batch["rows"]}
    for batch, rows, rows_state in host.steps(numbered(vocab), ids=ids):
        host.commit(*step(rows, rows_state, batch))
    host.flush()
    np.testing.assert_allclose(kept["table"], params["table"], rtol=1e-5, atol=1e-6)


def test_it_is_traced_in_time_linear_in_the_tables():
    def traced(tables):
        sizes = {f"table {i}": 100 * tables + i for i in range(tables)}
        params = {k: jax.ShapeDtypeStruct((n, 8), "float32") for k, n in sizes.items()}
        rows = {k: jax.ShapeDtypeStruct((1000,), "int32") for k in sizes}
        tx = jmask.adam(0.1)
        state = jax.eval_shape(tx.init, params)
        step = jax.jit(lambda p, s, rows: vocabulary.reset(tx, p, s, rows, NORMAL))
        return work(step.trace, params, state, rows)

    traced(2)  # what is imported and cached at the first call
    assert traced(24) < 2.3 * traced(12)
