"""`jmask.touched`: the rows that moved since a step make the new tables of the old ones."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jmask
from tests.compiled_step import Step, temporary_bytes, training_step
from tests.expressions import named
from tests.sampling import chosen
from tests.stored_tables import STEPS

pytestmark = pytest.mark.dtype_promotion

V, D = 50, 4
CHAINS = named("", {**vars(jmask), **globals()})("""
    adam | optax.chain(adam(0.1), touched())
    lazy | optax.chain(lazy(optax.adamw(0.1)), touched())
    one lazy | lazy(optax.chain(optax.adam(0.1), touched()))
    clipped sgd | optax.chain(clip_by_row_norm(1.0), sgd(0.1), touched())
    rowwise | optax.chain(rowwise_adagrad(0.1), touched())
    dense | optax.chain(densify(), optax.adam(0.1), touched())
    guarded | skip_nonfinite(optax.chain(adam(0.1), touched()))
    behind a guard | optax.chain(skip_nonfinite(adam(0.1)), touched())
""")
CHAINS = {name: make() for name, make in CHAINS.items()}
BATCHES = np.random.default_rng(0).integers(0, V, (9, 3))


def loss(params, ids):
    rows = jmask.embedding_lookup(params["table"], ids) * params["scale"]
    return jnp.sum(jnp.square(rows @ params["w"]))


def start():
    a, b = jax.random.split(jax.random.key(0))
    table, w = jax.random.normal(a, (V, D)), jax.random.normal(b, (D, 2))
    return {"table": table, "w": w, "scale": jnp.float32(1.5)}


def train(tx, params, step="apply_gradients"):
    """Parameters and state before the first step, and after each, which are donated."""
    run, results = training_step(loss, tx, STEPS[step]), [(params, tx.init(params))]
    for ids in BATCHES:
        *now, _ = run(*jax.tree.map(jnp.copy, results[-1]), jnp.asarray(ids))
        results.append(tuple(now))
    return results


def moved(old, new):
    return sorted(set(BATCHES[old:new].ravel().tolist()))


def assert_same(have, want):
    for x, y in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("name", chosen(["adam", "one lazy"], CHAINS))
@pytest.mark.parametrize("step", STEPS)
def test_the_rows_make_the_new_tables_of_the_old(name, step):
    results = train(CHAINS[name], start(), step)
    for old, new in ((0, 3), (0, 9), (3, 3), (3, 9), (9, 9)):
        params, state = results[new]
        expected = moved(old, new)
        expected = list(range(V)) if name == "dense" and expected else expected
        padded = jax.jit(lambda s, old=old: jmask.rows_since(s, old, size=40))(state)
        kept = expected[:40]
        assert padded["table"].tolist() == kept + [V] * (40 - len(kept))
        exact = jmask.rows_since(state, old)
        assert exact["table"].tolist() == expected
        for ids in (exact, padded)[: 1 + (len(expected) <= 40)]:
            rows = jmask.tree.take(params, ids)
            assert rows["table"].nse == len(ids["table"])
            assert_same(jax.jit(jmask.tree.put)(results[old][0], rows), params)


def test_scan():
    tx, params = CHAINS["lazy"], start()

    def body(carry, ids):
        return jmask.apply_gradients(tx, jmask.grad(loss)(carry[0], ids), *carry[::-1]), None

    (_, state), _ = jax.lax.scan(body, (params, tx.init(params)), jnp.asarray(BATCHES))
    assert jmask.rows_since(state, 4)["table"].tolist() == moved(4, 9)


def test_rows_travel_as_files():
    results = train(CHAINS["adam"], start())
    rows = jmask.tree.take(results[9][0], jmask.rows_since(results[9][1], 6))
    file = io.BytesIO()
    np.savez(file, **jmask.to_arrays(rows)["table"])
    file.seek(0)
    read = np.load(file)
    old = np.array(results[6][0]["table"])
    old[read["indices"]] = read["values"]  # a server without JAX
    np.testing.assert_array_equal(old, results[9][0]["table"])


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_sharded(kind):
    mesh, params = jax.make_mesh((5,), ("x",), (kind,)), start()
    params["table"] = jmask.sharded(params["table"], mesh)
    results = train(CHAINS["adam"], params)
    (touched,) = [x for x in results[0][1] if hasattr(x, "last")]
    assert touched.last["table"].sharding.spec[0] == "x"
    ids = jmask.rows_since(results[9][1], 0)
    assert ids["table"].tolist() == moved(0, 9)
    new = results[9][0]
    have = jmask.tree.put(params, jmask.tree.take(new, ids))
    assert_same(have["table"], new["table"])
    assert have["table"].sharding.is_equivalent_to(new["table"].sharding, 2)


def test_in_place():
    step, size = Step(CHAINS["lazy"], apply=jmask.apply_gradients), 10**6
    compiled = step.compile(size)
    assert temporary_bytes(compiled, step.table_bytes(size), step.entries(size)) < 10**6
    table = jax.ShapeDtypeStruct((size, 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((512,), jnp.int32)
    put = lambda old, new, ids: jmask.tree.put(old, jmask.tree.take(new, ids))
    compiled = jax.jit(put, donate_argnums=0).lower(table, table, ids).compile()
    temporary_bytes(compiled, size * 64, size * 16)


def test_tables_without_rows_or_columns():
    tx = CHAINS["adam"]
    for shape in ((0, 2), (3, 0), (2, 0, 3)):
        state = tx.init(jnp.zeros(shape))
        assert jmask.rows_since(state, 0).tolist() == []
        assert jmask.rows_since(state, 0, size=1).tolist() == [shape[0]]


def test_a_model_with_functions():
    model, tx = {"table": jnp.ones((5, 2)), "activation": jax.nn.relu}, CHAINS["adam"]
    loss = lambda model: jnp.sum(model["activation"](model["table"][jnp.array([1, 3])]))
    new, state = jmask.apply_gradients(tx, jmask.grad(loss)(model), tx.init(model), model)
    rows = jmask.tree.take(new, jmask.rows_since(state, 0))
    assert rows["activation"] is None
    have = jmask.tree.put(model, rows)
    assert have["activation"] is jax.nn.relu
    assert_same(have["table"], new["table"])


def test_parameters_that_are_not_followed():
    """As empty rows they would stay as they were exported, whatever the steps make of them."""
    followed = optax.chain(jmask.adam(0.1), jmask.touched())
    groups = {"table": "followed", "w": "other", "scale": "other"}
    tx = optax.partition({"followed": followed, "other": optax.sgd(1.0)}, groups)
    params = start()
    with pytest.raises(ValueError, match=r"`ids\['scale'\]` .* chain it behind"):
        jmask.tree.take(params, jmask.rows_since(tx.init(params), 0))


@pytest.mark.parametrize("inside", [False, True])
def test_steps_that_are_not_taken(inside):
    """Behind a guard all are counted; inside, a step of the loop is not one of `touched`."""
    inner = optax.chain(jmask.adam(0.1), jmask.touched()) if inside else jmask.adam(0.1)
    guard = jmask.skip_nonfinite(inner)
    tx = guard if inside else optax.chain(guard, jmask.touched())
    params, results = start(), []
    state = tx.init(params)
    for i, ids in enumerate(BATCHES):
        scale = jnp.float32(jnp.nan if i in (1, 2) else 1)
        grads = jmask.grad(lambda p, ids=ids, x=scale: loss(p, ids) * x)(params)
        params, state = jmask.apply_gradients(tx, grads, state, params)
        results.append(params)
    if inside:
        assert jmask.rows_since(state, 7)["table"].tolist() == []
        with pytest.raises(ValueError, match=r"`step` is 8, and jmask\.touched has counted 7"):
            jmask.rows_since(state, 8)
        return
    for old in range(1, 10):
        rows = jmask.tree.take(params, jmask.rows_since(state, old))
        assert_same(jmask.tree.put(results[old - 1], rows), params)


def test_what_is_refused():
    tx, params = CHAINS["adam"], start()
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"`opt_state` must hold one state of jmask.touched"):
        jmask.rows_since(jmask.adam(0.1).init(params), 0)
    with pytest.raises(ValueError, match="`size` must be given under jit"):
        jax.jit(lambda s: jmask.rows_since(s, 0))(state)
    with pytest.raises(TypeError, match="`step` must be an integer"):
        jmask.rows_since(state, "0")
    rows = jmask.tree.take(params, jmask.rows_since(state, 0))
    with pytest.raises(ValueError, match=r"`rows\['table'\]` has shape \(50, 4\), and `tree`"):
        jmask.tree.put(params | {"table": jnp.ones((3, 4))}, rows)
    with pytest.raises(ValueError, match="added to every row in each step"):
        jmask.deferred(optax.chain(optax.adam(0.1), jmask.touched())).init(params)
