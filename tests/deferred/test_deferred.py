"""A deferred run is that of the dense optimizer, in which all rows move in every step."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmask
from tests.compilations import compilations
from tests.compiled_step import check_deferred_in_place, temporary_bytes
from tests.optimizers import OPTIMIZERS
from tests.sampling import chosen
from tests.stored_tables import STEPS
from tests.tables.test_checkpoints import restored

pytestmark = pytest.mark.dtype_promotion

V, D, COUNT = 13, 3, 12
START = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
# Row 4 is never read, row 12 only in the first step; ids come twice and are padding.
IDS = np.random.default_rng(1).choice([0, 1, 2, 3, 5, 6, 7, -1], (COUNT, 4))
IDS[0] = [12, 12, 3, 11]
IDS[5] = -1
ADAM, ADAMW = optax.adam(0.1), optax.adamw(0.1, weight_decay=0.1)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), ADAM)


def parameters(table=START):
    return {"t": table, "u": table, "w": jnp.linspace(0.5, 1.5, D)}


def loss(params, ids):
    """Lookups, bags, and a dense parameter."""
    rows = jmask.embedding_lookup(params["t"], ids, padding_id=-1)
    bags = jmask.embedding_bag(params["u"], ids[None] // 2, padding_id=-1)
    return jnp.sum(jnp.sin(rows) * params["w"][None] * jnp.cos(bags))


def of_entries(params, ids):
    """Single entries of one table, and a lookup of another."""
    entries = params["t"][ids, jnp.abs(ids) % D]
    return jnp.sum(jnp.sin(entries)) * jnp.sum(jnp.cos(params["u"][ids]) * params["w"][None])


def of_stacks(params, ids):
    """Rows of two tables at a time, of a stack."""
    rows = params["t"][jnp.arange(2)[:, None], jnp.stack([ids, ids // 2])]
    return jnp.sum(jnp.sin(rows)) * jnp.sum(jnp.cos(params["u"][1, ids]) * params["w"][None])


def of_matrices(params, ids):
    """Rows that are matrices."""
    return jnp.sum(jnp.sin(params["t"][ids])) * jnp.sum(params["w"]) + jnp.sum(params["u"][ids])


LOSSES = {  # the loss, its table, and the ids to catch up
    "rows": (loss, START, lambda ids: {"t": ids, "u": [ids // 2]}),
    "entries": (of_entries, START, lambda ids: {"t": (ids, ids), "u": ids}),
    "stacks": (
        of_stacks,
        jnp.stack([START, -START]),
        lambda ids: {
            "t": [(jnp.zeros_like(ids), ids), (jnp.ones_like(ids), ids // 2)],
            "u": (jnp.int32(1), ids),
        },
    ),
    "matrices": (of_matrices, jnp.stack([START, -START], 1), lambda ids: {"t": ids, "u": ids}),
}


def step(tx, params, state, ids, loss=loss, which=LOSSES["rows"][2], way="apply_gradients"):
    params, state = tx.catch_up(params, state, which(ids))
    value, grads = jmask.value_and_grad(loss)(params, ids)
    return *STEPS[way](tx, grads, state, params), value


def dense_step(tx, params, state, ids, loss=loss):
    value, grads = jax.value_and_grad(loss)(params, ids)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def run(take, params, state, ids=IDS, *, jit=jax.jit):
    """Parameters, state and losses after some steps."""
    take, losses = jit(take), []
    for x in ids:
        params, state, value = take(params, state, jnp.asarray(x))
        losses.append(float(value))
    return params, state, np.array(losses)


def both(inner, which="rows", ids=IDS, dense=None, **given):
    """A deferred run, all rows caught up, and the dense one."""
    loss, table, places = LOSSES[which]
    tx, params = jmask.deferred(inner), parameters(table)
    take = functools.partial(step, tx, loss=loss, which=places, **given)
    params, state, losses = run(take, params, tx.init(params), ids)
    ours = *tx.catch_up(params, state), losses
    return ours, dense_run(inner if dense is None else dense, which, ids)


def dense_run(tx, which="rows", ids=IDS):
    loss, table, _ = LOSSES[which]
    params = parameters(table)
    return run(functools.partial(dense_step, tx, loss=loss), params, tx.init(params), ids)


def assert_close(x, y, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=5e-6)


def assert_same_run(ours, theirs):
    """Parameters, state of optax's layout, and losses."""
    (params, state, losses), (dense, dense_state, dense_losses) = ours, theirs
    assert_close((params, state.inner, losses), (dense, dense_state, dense_losses))


# --- whose trajectory ----------------------------------------------------------------------

mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
NAMED = {
    name: (make(0.1), make(0.1, lazy_update=False))
    for name, make in [
        (x, getattr(jmask, x)) for x in ("adam", "adagrad", "rowwise_adam", "rowwise_adagrad")
    ]
}
INNER = {
    "adam": (ADAM, ADAM),
    "masked decay": (optax.adamw(0.1, weight_decay=0.1, mask=mask),) * 2,
    "global norm": (CLIPPED, CLIPPED),
    "clip": (optax.chain(optax.clip(0.1), ADAM),) * 2,
    "row norm": (optax.chain(jmask.clip_by_row_norm(0.3), ADAM),) * 2,
    "injected": (optax.inject_hyperparams(optax.adam)(0.1),) * 2,
    "no bad rows": (optax.chain(jmask.drop_nonfinite_rows(), ADAM), ADAM),
    "lifted": (jmask.lazy(ADAMW), ADAMW),
    "lion": (optax.lion(0.01),) * 2,
    "rprop": (optax.rprop(0.01),) * 2,
    "schedule free": (optax.contrib.schedule_free_adamw(0.1),) * 2,
    "of labels": (
        optax.partition(
            {"a": ADAM, "b": optax.sgd(0.1, momentum=0.9)}, {"t": "a", "u": "b", "w": "a"}
        ),
    )
    * 2,
    **NAMED,
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", chosen(["adam", "global norm", "rowwise_adam"], INNER))
def test_trajectory(name):
    inner, dense = INNER[name]
    ours, theirs = both(inner, dense=dense)
    if inner is dense:
        assert_same_run(ours, theirs)
    else:
        assert_close((ours[0], ours[2]), (theirs[0], theirs[2]))


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("name", chosen(["masked decay"], ["adam", "global norm"]))
def test_kinds_of_lookups(name, which):
    assert_same_run(*both(INNER[name][0], which))


def test_by_update():
    assert_same_run(*both(ADAM, way="update"))


def test_a_table_that_is_dense_in_some_steps():
    """A step with a dense gradient moves all rows, and none waits for it."""
    tx, params, dense = jmask.deferred(ADAM), parameters(), parameters()
    state, dense_state = tx.init(params), ADAM.init(dense)
    for number, ids in enumerate(jnp.asarray(IDS)):
        params, state = tx.catch_up(params, state, {"t": ids, "u": ids // 2})
        kind = jax.grad if number % 3 == 1 else jmask.grad
        if number % 3 == 1:
            params, state = tx.catch_up(params, state)
        grads = kind(loss)(params, ids)
        params, state = jmask.apply_gradients(tx, grads, state, params)
        dense, dense_state, _ = dense_step(ADAM, dense, dense_state, ids)
    params, state = tx.catch_up(params, state)
    assert_close((params, state.inner), (dense, dense_state))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_moments_of_16_bits(dtype):
    """A run is as near to one of float32 as the dense one is, up to a factor."""
    inner = optax.adam(0.1, mu_dtype=dtype)
    (params, *_), (dense, *_) = both(inner)
    exact = dense_run(ADAM)[0]
    error = [max(float(jnp.abs(x[k] - exact[k]).max()) for k in x) for x in (params, dense)]
    assert error[0] <= 4 * error[1]


# --- rows that wait ------------------------------------------------------------------------


def test_a_row_that_was_not_caught_up_is_nan():
    tx, table = jmask.deferred(ADAM), START
    state = tx.init(table)
    for ids in ([1], [2], [3, 2]):
        grads = jmask.grad(lambda t, ids=ids: jnp.sum(t[jnp.array(ids)] ** 2))(table)
        table, state = jmask.apply_gradients(tx, grads, state, table)
    is_nan = np.isnan(tx.catch_up(table, state)[0]).all(axis=1)
    assert is_nan.tolist() == [x in (2, 3) for x in range(V)]
    table, _ = jmask.apply_gradients(tx, jnp.ones_like(table), state, table)
    assert np.isnan(table).all()


@pytest.mark.parametrize("window", [2, 3, 8])
def test_no_row_waits_for_longer_than_the_window(window):
    tx, table, dense = jmask.deferred(ADAM, window=window), START, START
    state, dense_state = tx.init(table), ADAM.init(dense)
    for number in range(20):
        ids = jnp.array([number % 3])
        table, state = tx.catch_up(table, state, ids)
        grads = jmask.grad(lambda t, ids=ids: jnp.sum(t[ids] ** 2))(table)
        table, state = jmask.apply_gradients(tx, grads, state, table)
        updates, dense_state = ADAM.update(grads.todense(), dense_state, dense)
        dense = optax.apply_updates(dense, updates)
        assert int(jnp.max(state.clock - state.tables.last)) < window
    assert_close(tx.catch_up(table, state)[0], dense)


def test_longer_than_the_window_is_nan():
    tx, table = jmask.deferred(ADAM, window=4), START
    state = tx.init(table)
    gradient = jmask.RowSparse([V], jnp.zeros((1, D)), (V, D))
    for _ in range(5):
        table, state = jmask.apply_gradients(tx, gradient, state, table)
    assert np.isnan(tx.catch_up(table, state)[0]).all()


def test_steps_without_the_structure_are_nan():
    """What is not seen when a state is made is seen when it happens."""

    def update(grads, count, params):
        rate = jnp.where(count == 5, 0.1, 0.0)
        return jax.tree.map(lambda g, p: -g - rate * jnp.abs(p), grads, params), count + 1

    tx = jmask.deferred(
        optax.GradientTransformation(lambda p: jnp.zeros((), jnp.int32), update)
    )
    table, state = START, tx.init(START)
    gradient = jmask.RowSparse([V], jnp.zeros((1, D)), (V, D))
    for number in range(7):
        table, state = jmask.apply_gradients(tx, gradient, state, table)
        assert np.isnan(tx.catch_up(table, state)[0]).all() == (number >= 5)


# --- transformations of JAX, guards, checkpoints --------------------------------------------


def test_scan_and_one_compilation():
    tx, params = jmask.deferred(ADAM), parameters()

    def body(carried, ids):
        params, state, value = step(tx, *carried, ids)
        return (params, state), value

    scanned = jax.jit(lambda p, s, x: jax.lax.scan(body, (p, s), x))
    (params, state), losses = scanned(params, tx.init(params), jnp.asarray(IDS))
    assert_same_run((*tx.catch_up(params, state), losses), dense_run(ADAM))
    with compilations() as compiled:
        run(functools.partial(step, tx), parameters(), tx.init(parameters()))
    assert compiled.count("jit(step)") == 1


def test_vmap_over_models():
    tx, starts = jmask.deferred(ADAM), jnp.stack([START, 2 * START])

    @jax.vmap
    def trained(start):
        params = parameters(start)
        state = tx.init(params)
        for ids in IDS[:4]:
            params, state, _ = step(tx, params, state, jnp.asarray(ids))
        return tx.catch_up(params, state)[0]["t"]

    for start, table in zip(starts, jax.jit(trained)(starts), strict=True):
        take = functools.partial(dense_step, ADAM)
        expected = run(take, parameters(start), ADAM.init(parameters(start)), IDS[:4])
        assert_close(table, expected[0]["t"])


@settings(max_examples=3)
@given(st.integers(0, 2**16), st.sampled_from([(1,), (2, 2), (40,)]), st.integers(0, 5))
def test_random_ids(seed, shape, empty):
    """Tables of all sizes; ids that come twice or are none; a step in which all are none."""
    rng = np.random.default_rng(seed)
    start = jnp.asarray(rng.normal(size=shape), jnp.float32)
    tx = jmask.deferred(ADAMW)
    table = dense = start
    state, dense_state = tx.init(start), ADAMW.init(start)
    for number in range(5):
        ids = rng.integers(-1, shape[0] + 1, 3) if number != empty else np.full(3, -1)
        values = jnp.asarray(rng.normal(size=(3, *shape[1:])), jnp.float32)
        gradient = jmask.RowSparse(ids, values, shape)
        table, state = tx.catch_up(table, state, ids)
        table, state = jmask.apply_gradients(tx, gradient, state, table)
        updates, dense_state = ADAMW.update(gradient.todense(), dense_state, dense)
        dense = optax.apply_updates(dense, updates)
        assert_close(tx.catch_up(table, state)[0], dense)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_skipped_steps_do_not_count(jit):
    """A step that is not taken is none, for rows that wait as well."""

    def sometimes_nan(params, ids):
        return loss(params, ids) * jnp.where(ids[0] == ids[1], jnp.nan, 1.0)

    tx, dense_tx, ids = jmask.deferred(ADAM), jmask.skip_nonfinite(ADAM), IDS[:4]
    guarded = jmask.skip_nonfinite(tx)

    def take(params, state, ids):
        params, inner = tx.catch_up(params, state.inner_state, {"t": ids, "u": ids // 2})
        state = state._replace(inner_state=inner)
        value, grads = jmask.value_and_grad(sometimes_nan)(params, ids)
        return *jmask.apply_gradients(guarded, grads, state, params), value

    params, state, _ = run(take, parameters(), guarded.init(parameters()), ids, jit=jit)
    params, inner = tx.catch_up(params, state.inner_state)
    dense = functools.partial(dense_step, dense_tx, loss=sometimes_nan)
    dense, dense_state, _ = run(dense, parameters(), dense_tx.init(parameters()), ids)
    assert int(state.skipped) == int(dense_state.skipped) > 0
    assert_close((params, inner.inner), (dense, dense_state.inner_state))


@pytest.mark.slow
def test_microbatches():
    """Rows are caught up in each microbatch, and the clock goes on with each step."""
    like = jax.eval_shape(lambda p: jmask.grad(loss)(p, jnp.asarray(IDS[0])), parameters())
    tx, dense_tx = jmask.deferred(ADAM), optax.MultiSteps(ADAM, 3)
    guarded = jmask.multi_steps(tx, 3, like)

    def take(params, state, ids):
        params, inner = tx.catch_up(params, state.inner_state, {"t": ids, "u": ids // 2})
        state = state._replace(inner_state=inner)
        value, grads = jmask.value_and_grad(loss)(params, ids)
        return *jmask.apply_gradients(guarded, grads, state, params), value

    params, state, losses = run(take, parameters(), guarded.init(parameters()))
    dense = functools.partial(dense_step, dense_tx)
    dense, _, dense_losses = run(dense, parameters(), dense_tx.init(parameters()))
    params, inner = tx.catch_up(params, state.inner_state)
    assert int(inner.clock) == COUNT // 3
    assert_close((params, losses), (dense, dense_losses))


def test_orbax_and_on_as_dense_and_back(tmp_path):
    """A run goes on from a checkpoint with the same bits, and as a dense run and back."""
    tx, take = jmask.deferred(ADAM), functools.partial(step, jmask.deferred(ADAM))
    params, state, _ = run(take, parameters(), tx.init(parameters()), IDS[:6])
    like = jax.tree.map(jnp.zeros_like, (params, state))
    resumed = run(take, *restored((params, state), tmp_path, like), IDS[6:])
    whole = run(take, params, state, IDS[6:])
    for x, y in zip(jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(x, y)
    params, state = tx.catch_up(params, state)
    params, inner, _ = run(functools.partial(dense_step, ADAM), params, state.inner, IDS[6:9])
    state = tx.init(params)._replace(inner=inner)
    params, state, _ = run(take, params, state, IDS[9:])
    params, state = tx.catch_up(params, state)
    assert_close((params, state.inner), dense_run(ADAM)[:2])


@pytest.mark.parametrize(
    ("name", "axes"),
    chosen(
        [("adam", AxisType.Auto), ("global norm", AxisType.Explicit)],
        itertools.product(["adam", "global norm"], [AxisType.Explicit, AxisType.Auto]),
    ),
)
def test_on_eight_devices(name, axes):
    """Rows and what is kept of them lie on the shards of the table, padded to a multiple."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axes,))
    tx = jmask.deferred(INNER[name][0])

    @jax.jit
    def take(table, state, ids):
        table, state = tx.catch_up(table, state, ids)
        loss = lambda t: jnp.sum(jnp.sin(jmask.embedding_lookup(t, ids)))
        value, gradient = jmask.value_and_grad(loss)(table)
        return *jmask.apply_gradients(tx, gradient, state, table), value

    found = []
    for table in (START, jmask.sharded(START, mesh)):
        state, losses = tx.init(table), []
        for ids in IDS[:4]:
            ids = jnp.asarray(np.tile(ids, 2))
            if len(losses) < 2:
                ids = jax.device_put(ids, NamedSharding(mesh, PartitionSpec("x")))
            table, state, value = take(table, state, ids)
            losses.append(float(value))
        table, state = jax.jit(tx.catch_up)(table, state)
        found.append((np.asarray(table)[:V], np.asarray(state.tables.last)[:V], losses))
    assert_close(*found)


# --- in place; or refused --------------------------------------------------------------------

OF_EACH_KIND = chosen(["optax.adamw", "rowwise adagrad"], ["adam", "momentum"])


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_in_place(name):
    check_deferred_in_place(OPTIMIZERS[name])


def test_catch_up_in_place():
    tx, like = jmask.deferred(ADAM), jax.ShapeDtypeStruct((10**7, 16), jnp.float32)
    state = jax.eval_shape(tx.init, like)
    compiled = jax.jit(tx.catch_up, donate_argnums=(0, 1)).lower(like, state).compile()
    assert temporary_bytes(compiled, 10**7 * 16 * 4 * 3) <= 64 * 2**20


def test_memory_is_one_int32_for_each_row_beside_the_moments():
    like = jax.ShapeDtypeStruct((10**6, 64), jnp.float32)
    state = jax.eval_shape(jmask.deferred(ADAM).init, like)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert 0 <= size - 10**6 * (2 * 64 * 4 + 4) < 2**20


def test_parameters_that_are_no_tables_may_have_any_optimizer():
    """One that counts rows is refused where it is given rows, and not before."""
    inner = optax.partition(
        {"rows": ADAM, "all": optax.adafactor(0.1)}, {"t": "rows", "u": "rows", "w": "all"}
    )
    assert_same_run(*both(inner))
    tx = jmask.deferred(
        optax.partition({"a": ADAM, "b": optax.lamb(0.1)}, {"t": "a", "u": "b"})
    )
    params = {"t": START, "u": START}
    grads = jmask.grad(lambda p: jnp.sum(p["u"][jnp.array([0])]))(params)
    with pytest.raises(ValueError, match="`reduce_sum` combines rows"):
        jmask.apply_gradients(tx, grads, tx.init(params), params)
