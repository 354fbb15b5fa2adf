"""A deferred table is one more layout: whatever reads and trains arrays reads and trains it.

Each run is compared with that of the dense optimizer on dense gradients, in which all rows
move in every step.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jmask
from tests.compilations import compilations
from tests.compiled_step import compiled_step, temporary_bytes
from tests.optimizers import OPTIMIZERS
from tests.sampling import chosen
from tests.stored_tables import STEPS, stored
from tests.tables.test_checkpoints import restored

pytestmark = pytest.mark.dtype_promotion


V, D, COUNT = 13, 3, 12
START = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
# Row 4 is never read, row 12 only in the first step; ids come twice and are padding.
IDS = np.random.default_rng(1).choice([0, 1, 2, 3, 5, 6, 7, -1], (COUNT, 4))
IDS[0] = [12, 12, 3, 11]
IDS[5] = -1
ADAM, DENSE_ADAM = jmask.adam(0.1), jmask.adam(0.1, lazy_update=False)
ADAMW = optax.adamw(0.1, weight_decay=0.1)
parameters = lambda table=START: {"t": table, "u": table, "w": jnp.linspace(0.5, 1.5, D)}


def loss(params, ids):
    rows = jmask.embedding_lookup(params["t"], ids, padding_id=-1)
    bags = jmask.embedding_bag(params["u"], ids[None] // 2, padding_id=-1)
    return jnp.sum(jnp.sin(rows) * params["w"][None] * jnp.cos(bags))


def step(tx, params, state, ids, loss=loss, way="apply_gradients"):
    value, grads = jmask.value_and_grad(loss)(params, ids)
    return *STEPS[way](tx, grads, state, params), value


def dense_step(tx, params, state, ids, loss=loss):
    value, grads = jax.value_and_grad(loss)(params, ids)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


@functools.cache
def jitted(one_step, tx):
    """A step that is compiled once for all its runs."""
    return jax.jit(functools.partial(one_step, tx))


def run(one_step, tx, params, ids=IDS, state=None):
    """Parameters, state, and the losses and tables after each step."""
    state = tx.init(params) if state is None else state
    losses, tables = [], []
    for x in ids:
        params, state, value = jitted(one_step, tx)(params, state, jnp.asarray(x))
        losses.append(float(value))
        tables.append(np.asarray(params["t"]))
    return params, state, np.array(losses), np.array(tables)


def assert_close(x, y, rtol=2e-5):
    np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=2e-6)


def assert_same_run(ours, theirs):
    for i in (2, 3):
        assert_close(ours[i], theirs[i])
    assert_close(ours[0]["w"], theirs[0]["w"])


def deferred_run(tx, of=None, table=START, **given):
    params = parameters(jmask.deferred(table, tx if of is None else of))
    return run(step, tx, params, **given)


# --- wrapped optimizers --------------------------------------------------------------------

CLIPPED = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
CLIPPED_ENTRIES = optax.chain(optax.clip(0.1), optax.adam(0.1))
WRAPPED = {
    "lazy": (ADAM, DENSE_ADAM),
    "not lazy": (DENSE_ADAM, DENSE_ADAM),
    "optax": (jmask.lazy(ADAMW), ADAMW),
    "global norm": (jmask.lazy(CLIPPED), CLIPPED),
    "clip": (jmask.lazy(CLIPPED_ENTRIES), CLIPPED_ENTRIES),
    "row norm": (
        optax.chain(jmask.clip_by_row_norm(0.3), ADAM),
        optax.chain(jmask.clip_by_row_norm(0.3), DENSE_ADAM),
    ),
    "injected": (
        jmask.lazy(optax.inject_hyperparams(optax.adam)(0.1)),
        optax.inject_hyperparams(optax.adam)(0.1),
    ),
    "no bad rows": (optax.chain(jmask.drop_nonfinite_rows(), ADAM), DENSE_ADAM),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", chosen(["lazy", "global norm", "row norm"], WRAPPED))
def test_trajectory_and_losses(name):
    tx, dense_tx = WRAPPED[name]
    assert_same_run(deferred_run(tx), run(dense_step, dense_tx, parameters()))


def test_update_and_apply_updates():
    params = parameters(jmask.deferred(START, ADAM))
    ours = run(functools.partial(step, way="update"), ADAM, params)
    assert_same_run(ours, deferred_run(ADAM))


@pytest.mark.slow
def test_skipped_steps_do_not_count():
    """A step that is not taken is none, for rows that are away as well."""

    def sometimes_nan(params, ids):
        return loss(params, ids) * jnp.where(ids[0] == ids[1], jnp.nan, 1.0)

    for eager in (False, True):
        tx, dense_tx = map(jmask.skip_nonfinite, (ADAM, DENSE_ADAM))
        ours, theirs = ((functools.partial(f, loss=sometimes_nan)) for f in (step, dense_step))
        with jax.disable_jit(eager):
            table = jmask.deferred(START, tx)
            found = run(ours, tx, parameters(table), IDS[:3] if eager else IDS)
        wanted = run(theirs, dense_tx, parameters(), IDS[:3] if eager else IDS)
        assert int(found[1].skipped) == int(wanted[1].skipped) > 0
        assert_close(found[3], wanted[3])


def test_updates_of_skipped_steps_keep_the_table():
    tx = jmask.skip_nonfinite(ADAM)
    params = parameters(jmask.deferred(START, tx))

    @jax.jit
    def update(params, state, scale):
        grads = jmask.grad(lambda p: scale * loss(p, jnp.array([1, 2, 2, 3])))(params)
        updates, state = tx.update(grads, state, params)
        return jmask.apply_updates(params, updates), state

    params, state = update(params, tx.init(params), 1.0)
    kept, state = update(params, state, jnp.nan)
    kept, params = (jax.tree.leaves(jmask.to_arrays(p["t"])) for p in (kept, params))
    for x, y in zip(kept, params, strict=True):
        np.testing.assert_array_equal(x, y)
    assert int(state.skipped) == 1


def test_multi_steps():
    grads = jax.eval_shape(lambda p: jmask.grad(loss)(p, jnp.asarray(IDS[0])), parameters())
    tx = jmask.multi_steps(ADAM, 3, grads)
    dense_tx = optax.MultiSteps(optax.GradientTransformation(*DENSE_ADAM), 3)
    assert_same_run(deferred_run(tx), run(dense_step, dense_tx, parameters()))


# --- reading -------------------------------------------------------------------------------


@functools.cache
def trained():
    return deferred_run(ADAM)[0]["t"]


READS = {
    "table[ids]": lambda t: t[jnp.array([[0, 4], [-1, 12]])],
    "one": lambda t: t[jnp.array(4)],
    "none": lambda t: t[jnp.zeros((0,), jnp.int32)],
    "lookup": lambda t: jmask.embedding_lookup(t, jnp.array([3, 3, 11, -1]), padding_id=-1),
    "sums": lambda t: jmask.embedding_bag(t, jnp.array([[0, 1], [4, 4]]), combiner="sum"),
    "means": lambda t: jmask.embedding_bag(
        t, jnp.array([0, 1, 12, 4]), segment_ids=jnp.array([0, 2, 2, 2]), num_segments=3
    ),
    "vmap": lambda t: jax.vmap(lambda i: t[i] * 2)(jnp.arange(V)),
    "array": lambda t: jnp.asarray(np.asarray(t)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", READS)
def test_reads(name):
    read = READS[name]
    expected = read(trained().todense())
    assert_close(read(trained()), expected)
    if name != "array":
        assert_close(jax.jit(read)(trained()), expected)


def test_outside():
    rows = trained()[jnp.array([V, 2, 99])]
    assert np.isnan(rows[0]).all()
    assert np.isnan(rows[2]).all()
    assert_close(rows[1], trained().todense()[2])


def test_up_to_date():
    """It changes no row, and makes every row as new as the table."""
    table, before = trained().up_to_date(), trained().todense()
    np.testing.assert_array_equal(table.todense(), before)
    np.testing.assert_array_equal(table.last, np.full(V, COUNT))
    assert (np.asarray(trained().last) < COUNT).any()
    assert table[jnp.arange(V)].shape == (V, D)


# --- transformations of JAX ----------------------------------------------------------------


def test_scan_over_steps():
    params = parameters(jmask.deferred(START, ADAM))

    def body(carried, ids):
        params, state, value = step(ADAM, *carried, ids)
        return (params, state), value

    @jax.jit
    def scanned(params, state):
        return jax.lax.scan(body, (params, state), jnp.asarray(IDS))

    (new, _), losses = scanned(params, ADAM.init(params))
    expected = deferred_run(ADAM)
    assert_close(losses, expected[2])
    assert_close(new["t"].todense(), expected[3][-1])


def test_vmap_over_models():
    starts = jnp.stack([START, 2 * START])

    @jax.vmap
    def trained(start):
        params = parameters(jmask.deferred(start, ADAM))
        state = ADAM.init(params)
        for ids in IDS[:4]:
            params, state, _ = step(ADAM, params, state, jnp.asarray(ids))
        return params["t"].todense()

    found = jax.jit(trained)(starts)
    for start, table in zip(starts, found, strict=True):
        expected = run(dense_step, DENSE_ADAM, parameters(start), IDS[:4])
        assert_close(table, expected[3][-1])


LAZY_ADAMW = jmask.lazy(ADAMW)


@jax.jit
def both_steps(gradient, carried):
    table, state, dense, dense_state = carried
    table, state = jmask.apply_gradients(LAZY_ADAMW, gradient, state, table)
    updates, dense_state = ADAMW.update(gradient.todense(), dense_state, dense)
    return table, state, optax.apply_updates(dense, updates), dense_state


@settings(max_examples=3)
@given(st.integers(0, 2**16), st.sampled_from([(1,), (2, 2), (40,)]), st.integers(0, 5))
def test_random_ids(seed, shape, empty):
    """Tables of all sizes; ids that come twice or are none; a step in which all are none."""
    rng = np.random.default_rng(seed)
    start = jnp.asarray(rng.normal(size=shape), jnp.float32)
    table = jmask.deferred(start, LAZY_ADAMW)
    carried = table, LAZY_ADAMW.init(table), start, ADAMW.init(start)
    for number in range(5):
        ids = rng.integers(-1, shape[0] + 1, 3) if number != empty else np.full(3, -1)
        values = jnp.asarray(rng.normal(size=(3, *shape[1:])), jnp.float32)
        carried = both_steps(jmask.RowSparse(ids, values, shape), carried)
        assert_close(carried[0].todense(), carried[2])


def test_compiled_once():
    jitted = jax.jit(functools.partial(step, ADAM))
    params = parameters(jmask.deferred(START, ADAM))
    state = ADAM.init(params)
    with compilations() as compiled:
        for ids in IDS:
            params, state, _ = jitted(params, state, jnp.asarray(ids))
    assert compiled.count("jit(step)") == 1


# --- checkpoints, and runs from arrays and back --------------------------------------------


def test_orbax(tmp_path):
    """A run that is resumed in the middle has the bits of one that is not."""
    params, state, *_ = deferred_run(ADAM, ids=IDS[:6])
    fresh = parameters(jmask.deferred(jnp.zeros_like(START), ADAM))
    params, state = restored((params, state), tmp_path, (fresh, ADAM.init(fresh)))
    resumed = run(step, ADAM, params, IDS[6:], state)
    whole = deferred_run(ADAM)
    np.testing.assert_array_equal(resumed[3], whole[3][6:])
    np.testing.assert_array_equal(resumed[2], whole[2][6:])


TURNS = {name: WRAPPED[name] for name in ("lazy", "optax", "global norm")}
TURNS["rowwise"] = jmask.rowwise_adam(0.1), jmask.rowwise_adam(0.1, lazy_update=False)


@pytest.mark.sampled
@pytest.mark.parametrize("name", TURNS)
def test_from_dense_to_deferred_to_dense(name):
    tx, dense_tx = TURNS[name]
    which = {"t": True, "u": True, "w": False}
    params, state, losses, tables = run(dense_step, dense_tx, parameters(), IDS[:4])
    params, state = jmask.to_deferred(tx, state, params, which)
    np.testing.assert_array_equal(params["t"].todense(), tables[-1])
    params, state, more, later = run(step, tx, params, IDS[4:8], state)
    losses, tables = np.append(losses, more), np.append(tables, later, axis=0)
    params, state = jmask.from_deferred(tx, state, params)
    np.testing.assert_array_equal(params["t"], tables[-1])
    dense = run(dense_step, dense_tx, params, IDS[8:], state)
    wanted = run(dense_step, dense_tx, parameters())
    assert_close(np.append(losses, dense[2]), wanted[2])
    assert_close(np.append(tables, dense[3], axis=0), wanted[3])
    for x, y in zip(jax.tree.leaves(dense[1]), jax.tree.leaves(wanted[1]), strict=True):
        assert_close(x, y)


# --- other storages ------------------------------------------------------------------------


@pytest.mark.sampled(15)
@pytest.mark.parametrize("form", ["packed"])
def test_other_storages(form):
    table = stored(form, START)
    ours, theirs = deferred_run(ADAM, table=table), run(dense_step, DENSE_ADAM, parameters())
    assert_same_run(ours, theirs)
    params, _ = jmask.from_deferred(ADAM, ours[1], ours[0])
    assert type(params["t"]) is type(table)
    assert_close(params["t"].todense(), theirs[3][-1])


# --- in place, at the cost of one count a row; or refused -----------------------------


def loss_in_place(params, ids):
    rows = jmask.embedding_lookup(params["t"], ids, padding_id=-1)
    return jnp.sum(jnp.sin(rows) * params["w"][None])


OF_EACH_KIND = chosen(["optax.adamw", "rowwise adagrad"], ["adam", "momentum"])


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_in_place(name):
    """No temporary of the size of the table; the loss and the update read rows once."""
    tx = OPTIMIZERS[name]
    temporary = []
    for rows in (10**5, 10**7):
        like = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
        table = jax.eval_shape(lambda x: jmask.deferred(x, tx), like)
        params = {"t": table, "w": jax.ShapeDtypeStruct((8,), jnp.float32)}
        ids = jax.ShapeDtypeStruct((512,), jnp.int32)
        compiled = compiled_step(loss_in_place, tx, params, ids)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(table))
        temporary.append(temporary_bytes(compiled, size, rows))
        read = rf" = f32\[512,(1,)?{table.main.shape[1]}\]\S* gather\("
        assert len(re.findall(read, compiled.as_text())) == 1
    # With the root of V grow the lines, and the rows that are brought up to date besides.
    assert temporary[1] <= 24 * 2**20
    assert temporary[1] - temporary[0] < 10**7


READ_ONCE = {
    "ids of any shape": lambda t, ids: t[ids],
    "bags": jmask.embedding_bag,
    "two lookups": lambda t, ids: t[ids[:, 0]] * jnp.sum(t[ids[:, 1:]], axis=1),
}


@pytest.mark.of_cpus  # a GPU fuses a lookup into each of its consumers
@pytest.mark.parametrize("read", READ_ONCE.values(), ids=READ_ONCE)
def test_rows_of_every_lookup_are_read_once(read):
    table = jax.eval_shape(
        lambda x: jmask.deferred(x, ADAM), jax.ShapeDtypeStruct((10**5, 8), jnp.float32)
    )
    loss = lambda t, ids: jnp.sum(jnp.sin(read(t, ids)))
    compiled = compiled_step(loss, ADAM, table, jax.ShapeDtypeStruct((128, 4), jnp.int32))
    read = re.findall(r" = f32\[(\d+),(?:1,)?24\]\S* gather\(", compiled.as_text())
    brought_up_to_date = -(-(10**5) // (table.lines.shape[0] - 1))
    assert sum(map(int, read)) == 128 * 4 + brought_up_to_date


def test_catch_up_in_place():
    like = jax.ShapeDtypeStruct((10**7, 16), jnp.float32)
    table = jax.eval_shape(lambda x: jmask.deferred(x, ADAM), like)
    compiled = jax.jit(lambda t: t.up_to_date(), donate_argnums=0).lower(table).compile()
    assert temporary_bytes(compiled, 10**7 * 16 * 4 * 3) <= 64 * 2**20


def test_memory_is_one_int32_for_each_row_beside_the_moments():
    like = jax.ShapeDtypeStruct((10**6, 64), jnp.float32)
    table = jax.eval_shape(lambda x: jmask.deferred(x, ADAM), like)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(table))
    assert 0 <= size - 10**6 * (3 * 64 * 4 + 4) < 2**20


TABLE = jnp.ones((6, 2))
grads_of = lambda params: jmask.grad(lambda p: jnp.sum(p[jnp.array([0, 3, 3])]))(params)
OTHERS = {
    "another rate": jmask.adam(0.2),
    "another b1": jmask.adam(0.1, b1=0.8),
    "another optimizer": jmask.sgd(0.1),
    "of optax": jmask.lazy(optax.adam(0.1)),
    "a schedule": jmask.adam(optax.linear_schedule(0.1, 0.0, 10)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_transformation_than_it_was_made_for(name):
    table = jmask.deferred(TABLE, ADAM)
    for tx in (OTHERS[name], jmask.skip_nonfinite(OTHERS[name])):
        with pytest.raises(ValueError, match="another optimizer"):
            jmask.apply_gradients(tx, grads_of(table), tx.init(table), table)
    with pytest.raises(ValueError, match="another optimizer"):
        OTHERS[name].update(grads_of(table), OTHERS[name].init(table), table)


def test_the_same_transformation_made_anew():
    """It is known by what it does."""
    table = jmask.deferred(TABLE, ADAM)
    for tx in (jmask.adam(0.1), jmask.adam(0.1, lazy_update=False), jmask.skip_nonfinite(ADAM)):
        new, _ = jmask.apply_gradients(tx, grads_of(table), tx.init(table), table)
        assert float(new.todense()[0, 0]) < 1
