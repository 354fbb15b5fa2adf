"""`jmask.touched`: the rows that moved since a step make the new tables of the old ones."""

import functools
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jmask
from tests.compiled_step import IN_PLACE, Step, temporary_bytes
from tests.sampling import chosen

pytestmark = pytest.mark.dtype_promotion

V, D = 50, 4


def chained(tx):
    return optax.chain(tx, jmask.touched())


CHAINS = {
    "adam": chained(jmask.adam(0.1)),
    "lazy": chained(jmask.lazy(optax.adamw(0.1))),
    "one lazy": jmask.lazy(optax.chain(optax.adam(0.1), jmask.touched())),
    "clipped sgd": optax.chain(jmask.clip_by_row_norm(1.0), jmask.sgd(0.1), jmask.touched()),
    "rowwise": chained(jmask.rowwise_adagrad(0.1)),
    "dense": optax.chain(jmask.densify(), optax.adam(0.1), jmask.touched()),
    "guarded": jmask.skip_nonfinite(chained(jmask.adam(0.1))),
}
APPLY = {
    "one call": jmask.apply_gradients,
    "two calls": lambda tx, grads, state, params: _two(tx, grads, state, params),
}


def _two(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return jmask.apply_updates(params, updates), state


def loss(params, ids):
    rows = params["table"][ids] * params["scale"]
    return jnp.sum(jnp.square(rows @ params["w"]))


def start():
    a, b = jax.random.split(jax.random.key(0))
    table, w = jax.random.normal(a, (V, D)), jax.random.normal(b, (D, 2))
    return {"table": table, "w": w, "scale": jnp.float32(1.5)}


def batches(count=9):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(0, V, 3)) for _ in range(count)]


def train(tx, apply, params, scanned=False):
    """States after each step, and the parameters."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, ids):
        return apply(tx, jmask.grad(loss)(params, ids), state, params)

    state, results = tx.init(params), [(params, tx.init(params))]
    if scanned:
        body = lambda carry, ids: (step(carry[1], carry[0], ids)[::-1], None)
        (state, params), _ = jax.lax.scan(body, (state, params), jnp.stack(batches()))
        return [*results, *[None] * 8, (params, state)]
    params = jax.tree.map(jnp.copy, params)
    for ids in batches():
        params, state = step(params, state, ids)
        results.append(jax.tree.map(jnp.copy, (params, state)))
    return results


def assert_same(have, want):
    for x, y in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("name", chosen(["adam", "one lazy"], CHAINS))
@pytest.mark.parametrize("apply", APPLY)
def test_the_rows_make_the_new_tables_of_the_old(name, apply):
    results = train(CHAINS[name], APPLY[apply], start())
    for old in (0, 3, 9):
        for new in (3, 9):
            if new < old:
                continue
            ids = jmask.rows_since(results[new][1], old)
            moved = {int(i) for x in batches()[old:new] for i in x}
            expected = range(V) if name == "dense" and new > old else sorted(moved)
            assert ids["table"].tolist() == list(expected)
            rows = jmask.tree.take(results[new][0], ids)
            assert rows["table"].nse == len(expected)
            have = jax.jit(jmask.tree.put)(results[old][0], rows)
            assert_same(have, results[new][0])
            padded = jax.jit(lambda s, old=old: jmask.rows_since(s, old, size=40))(
                results[new][1]
            )
            kept = sorted(expected)[:40]
            assert padded["table"].tolist() == kept + [V] * (40 - len(kept))
            if len(expected) <= 40:
                again = jmask.tree.put(
                    results[old][0], jmask.tree.take(results[new][0], padded)
                )
                assert_same(again, results[new][0])


def test_scan():
    tx = CHAINS["lazy"]
    scanned = train(tx, jmask.apply_gradients, start(), scanned=True)[-1]
    looped = train(tx, jmask.apply_gradients, start())[-1]
    np.testing.assert_array_equal(
        jmask.rows_since(scanned[1], 4)["table"], jmask.rows_since(looped[1], 4)["table"]
    )


def test_rows_travel_as_files():
    results = train(CHAINS["adam"], jmask.apply_gradients, start())
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
    mesh = jax.make_mesh((5,), ("x",), (kind,))
    tx, params = CHAINS["adam"], start()
    sharded = params | {"table": jmask.sharded(params["table"], mesh)}
    step = jax.jit(
        lambda params, state, ids: jmask.apply_gradients(
            tx, jmask.grad(looked_up)(params, ids), state, params
        ),
        donate_argnums=(0, 1),
    )
    old, state = sharded, tx.init(sharded)
    (touched,) = [x for x in state if hasattr(x, "last")]
    assert touched.last["table"].sharding.spec[0] == "x"
    new = jax.tree.map(jnp.copy, old)
    for ids in batches():
        new, state = step(new, state, ids)
    ids = jmask.rows_since(state, 0)
    assert ids["table"].tolist() == sorted({int(i) for x in batches() for i in x})
    rows = jmask.tree.take(new, ids)
    have = jmask.tree.put(old, rows)
    assert_same(have["table"], new["table"])
    assert have["table"].sharding.is_equivalent_to(new["table"].sharding, 2)


def looked_up(params, ids):
    rows = jmask.embedding_lookup(params["table"], ids) * params["scale"]
    return jnp.sum(jnp.square(rows @ params["w"]))


def test_in_place():
    step = Step(CHAINS["lazy"], apply=jmask.apply_gradients)
    size = 10**6
    compiled = step.compile(size)
    assert temporary_bytes(compiled, step.table_bytes(size), step.entries(size)) < 10**6
    old, new = (jax.ShapeDtypeStruct((size, 16), jnp.float32) for _ in range(2))
    ids = jax.ShapeDtypeStruct((512,), jnp.int32)
    put = lambda old, new, ids: jmask.tree.put(old, jmask.tree.take(new, ids))
    compiled = jax.jit(put, donate_argnums=0).lower(old, new, ids).compile()
    temporary_bytes(compiled, size * 64, size * 16, IN_PLACE)


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
