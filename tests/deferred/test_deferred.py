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
from tests.expressions import named
from tests.optimizers import OPTIMIZERS
from tests.sampling import chosen
from tests.stored_tables import STEPS
from tests.tables.test_tools import restored

pytestmark = pytest.mark.dtype_promotion

V, D, COUNT = 13, 3, 12
START = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
# Row 4 is never read, row 12 only in the first step; ids come twice and are padding.
IDS = np.random.default_rng(1).choice([0, 1, 2, 3, 5, 6, 7, -1], (COUNT, 4))
IDS[0] = [12, 12, 3, 11]
IDS[5] = -1
injected_adam = optax.inject_hyperparams(optax.adam)
ADAM, ADAMW = optax.adam(0.1), optax.adamw(0.1, weight_decay=0.1)


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


def step(tx, params, state, ids, which="rows", way="apply_gradients"):
    loss, _, places = LOSSES[which]
    params, state = tx.catch_up(params, state, places(ids))
    value, grads = jmask.value_and_grad(loss)(params, ids)
    return *STEPS[way](tx, grads, state, params), value


def dense_step(tx, params, state, ids, loss=loss):
    value, grads = jax.value_and_grad(loss)(params, ids)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def run(take, params, state, ids=IDS, how="jit"):
    """Parameters, state and losses after some steps."""
    if how in ("jit", "eager"):
        take, losses = jax.jit(take) if how == "jit" else take, []
        for x in ids:
            params, state, value = take(params, state, jnp.asarray(x))
            losses.append(float(value))
        return params, state, np.array(losses)

    def body(carried, ids):
        params, state, value = take(*carried, ids)
        return (params, state), value

    scanned = lambda carried: jax.lax.scan(body, carried, jnp.asarray(ids))
    if how == "scan":
        (params, state), losses = jax.jit(scanned)((params, state))
        return params, state, losses
    two = jax.tree.map(lambda x: jnp.stack([0 * x, x]), (params, state))
    (params, state), losses = jax.tree.map(lambda x: x[1], jax.jit(jax.vmap(scanned))(two))
    return params, state, losses


def both(inner, which="rows", dense=None, how="jit", **given):
    """A deferred run, all rows caught up, and the dense one."""
    tx, params = jmask.deferred(inner), parameters(LOSSES[which][1])
    take = functools.partial(step, tx, which=which, **given)
    params, state, losses = run(take, params, tx.init(params), how=how)
    ours = *tx.catch_up(params, state), losses
    return ours, dense_run(inner if dense is None else dense, which)


def dense_run(tx, which="rows"):
    loss, table, _ = LOSSES[which]
    params = parameters(table)
    return run(functools.partial(dense_step, tx, loss=loss), params, tx.init(params))


def assert_close(x, y, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=5e-6)


# --- whose trajectory ----------------------------------------------------------------------


def delayed(grads, state, params=None):
    """A step by the momentum of a momentum, as it was before the gradient."""
    second, first = state
    later = jax.tree.map(lambda x, y: 0.9 * x + y, second, first)
    later = later, jax.tree.map(lambda x, g: 0.8 * x + g, first, grads)
    return jax.tree.map(lambda x: -0.1 * x, second), later


zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
DELAYED = optax.GradientTransformation(lambda params: (zeros(params), zeros(params)), delayed)
mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
LABELS = {"t": "a", "u": "b", "w": "a"}
INNER = named("", {**vars(jmask), **globals()})("""
    adam | ADAM
    masked decay | optax.adamw(0.1, weight_decay=0.1, mask=mask)
    global norm | optax.chain(optax.clip_by_global_norm(0.5), ADAM)
    clip | optax.chain(optax.clip(0.1), ADAM)
    row norm | optax.chain(clip_by_row_norm(0.3), ADAM)
    no bad rows | optax.chain(drop_nonfinite_rows(), ADAM)
    lifted | lazy(ADAMW)
    lion | optax.lion(0.01)
    rprop | optax.rprop(0.01)
    schedule free | optax.contrib.schedule_free_adamw(0.1)
    labels | optax.partition({"a": ADAM, "b": optax.sgd(0.1, momentum=0.9)}, LABELS)
    not only tables | optax.partition(
        {"rows": ADAM, "all": optax.adafactor(0.1)}, {"t": "rows", "u": "rows", "w": "all"})
    momentum of momentum | DELAYED
    injected | injected_adam(0.1)
    injected, b1 and b2 that are close | injected_adam(0.1, b1=0.8, b2=0.95)
    a schedule of b1 | injected_adam(0.1, b1=lambda t: 0.8 + 0.01 * t)
    rates that are hardly numbers | optax.adamw(optax.exponential_decay(0.1, 5, 0.7))
    steps that are not taken | optax.conditionally_mask(ADAM, lambda step: step < 6)
    eps that hardly changes | injected_adam(0.1, eps=lambda t: 1e-3 * (1 + 1e-3 * t))
""")
INNER = {name: make() for name, make in INNER.items()}
# What these are in a dense run.
DENSE = {"no bad rows": ADAM, "lifted": ADAMW}
for _name in ("adam", "adagrad", "rowwise_adam", "rowwise_adagrad"):
    INNER["jmask." + _name] = getattr(jmask, _name)(0.1)
    DENSE["jmask." + _name] = getattr(jmask, _name)(0.1, lazy_update=False)

# The optimizer, the kind of lookup, and how to step.
RUNS = [
    *((name, "rows", {}) for name in INNER),
    *((name, kind, {}) for name in ("masked decay", "adam", "global norm") for kind in LOSSES),
    *(("adam", "rows", {"how": how}) for how in ("eager", "scan", "vmap")),
    ("adam", "rows", {"way": "update"}),
]
BY_DEFAULT = [x for x in RUNS if x[0] in ("adam", "global norm", "jmask.rowwise_adam")]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "which", "given"), chosen(BY_DEFAULT, RUNS), ids=str)
def test_trajectory(name, which, given):
    """Parameters and losses, and a state of optax's layout."""
    ours, theirs = both(INNER[name], which, DENSE.get(name), **given)
    assert_close((ours[0], ours[2]), (theirs[0], theirs[2]))
    if name not in DENSE:
        assert_close(ours[1].inner, theirs[1])


def test_a_table_that_is_dense_in_some_steps():
    """A step with a dense gradient moves all rows, and none waits for it."""
    tx, params = jmask.deferred(ADAM), parameters()
    state = tx.init(params)
    for number, ids in enumerate(jnp.asarray(IDS)):
        is_dense = number % 3 == 1
        places = [] if is_dense else [{"t": ids, "u": ids // 2}]
        params, state = tx.catch_up(params, state, *places)
        grads = (jax.grad if is_dense else jmask.grad)(loss)(params, ids)
        params, state = jmask.apply_gradients(tx, grads, state, params)
    params, state = tx.catch_up(params, state)
    assert_close((params, state.inner), dense_run(ADAM)[:2])


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.apply_if_finite(tx, 3)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_moments_of_16_bits(dtype, wrap):
    """A run is as near to one of float32 as the dense one is, up to a factor."""
    (params, *_), (dense, *_) = both(wrap(optax.adam(0.1, mu_dtype=dtype)))
    exact = dense_run(ADAM)[0]
    error = [max(float(jnp.abs(x[k] - exact[k]).max()) for k in x) for x in (params, dense)]
    assert error[0] <= 4 * error[1]


def test_sent_to_another_process():
    """As a whole, with what is known of the steps of its optimizer."""
    cloudpickle = pytest.importorskip("cloudpickle")
    tx, params = jmask.deferred(ADAM), parameters()
    state = tx.init(params)
    again = cloudpickle.loads(cloudpickle.dumps(tx))
    assert_close(again.catch_up(params, again.init(params)), tx.catch_up(params, state))


@settings(max_examples=3)
@given(st.integers(0, 2**16), st.sampled_from([(1,), (2, 2), (40,)]), st.integers(0, 5))
def test_random_ids(seed, shape, empty):
    """Tables of all sizes; ids that come twice or are none; a step in which all are none."""
    rng = np.random.default_rng(seed)
    table = dense = jnp.asarray(rng.normal(size=shape), jnp.float32)
    tx = jmask.deferred(ADAMW)
    state, dense_state = tx.init(table), ADAMW.init(table)
    for number in range(5):
        ids = rng.integers(-1, shape[0] + 1, 3) if number != empty else np.full(3, -1)
        values = jnp.asarray(rng.normal(size=(3, *shape[1:])), jnp.float32)
        gradient = jmask.RowSparse(ids, values, shape)
        table, state = tx.catch_up(table, state, ids)
        table, state = jmask.apply_gradients(tx, gradient, state, table)
        updates, dense_state = ADAMW.update(gradient.todense(), dense_state, dense)
        dense = optax.apply_updates(dense, updates)
        assert_close(tx.catch_up(table, state)[0], dense)


def sometimes_nan(params, ids):
    return loss(params, ids) * jnp.where(ids[0] == ids[1], jnp.nan, 1.0)


@pytest.mark.parametrize("how", ["jit", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("guard", ["skip_nonfinite", "multi_steps"])
def test_guards(guard, how):
    """A step that is not taken is none, for rows that wait as well; the clock counts steps."""
    tx, ids = jmask.deferred(ADAM), IDS[:6]
    if guard == "skip_nonfinite":
        loss_of, guarded = sometimes_nan, jmask.skip_nonfinite(tx)
        dense_tx, count = jmask.skip_nonfinite(ADAM), None
    else:
        like = jax.eval_shape(lambda p: jmask.grad(loss)(p, jnp.asarray(IDS[0])), parameters())
        loss_of, guarded = loss, jmask.multi_steps(tx, 3, like)
        dense_tx, count = optax.MultiSteps(ADAM, 3), len(ids) // 3

    def take(params, state, ids):
        params, inner = tx.catch_up(params, state.inner_state, {"t": ids, "u": ids // 2})
        value, grads = jmask.value_and_grad(loss_of)(params, ids)
        state = state._replace(inner_state=inner)
        return *jmask.apply_gradients(guarded, grads, state, params), value

    params, state, losses = run(take, parameters(), guarded.init(parameters()), ids, how)
    params, inner = tx.catch_up(params, state.inner_state)
    dense = functools.partial(dense_step, dense_tx, loss=loss_of)
    dense, dense_state, theirs = run(dense, parameters(), dense_tx.init(parameters()), ids)
    assert_close((params, losses), (dense, theirs))
    skipped = int(getattr(dense_state, "skipped", 0))
    assert getattr(state, "skipped", 0) == skipped
    assert int(inner.clock) == (len(ids) - skipped if count is None else count) < len(ids)


def test_orbax_and_on_as_dense_and_back(tmp_path):
    """A run goes on from a checkpoint with the same bits, and as a dense run and back."""
    tx, take = jmask.deferred(ADAM), functools.partial(step, jmask.deferred(ADAM))
    with compilations() as compiled:
        params, state, _ = run(take, parameters(), tx.init(parameters()), IDS[:6])
    assert compiled.count("jit(step)") == 1
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


AXES = itertools.product(["adam", "global norm"], [AxisType.Explicit, AxisType.Auto])


@pytest.mark.parametrize(("name", "axes"), chosen([("global norm", AxisType.Explicit)], AXES))
def test_on_eight_devices(name, axes):
    """Rows and what is kept of them lie on the shards of the table, padded to a multiple."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axes,))
    tx = jmask.deferred(INNER[name])

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


# --- rows that wait ------------------------------------------------------------------------

NOTHING = jmask.RowSparse([V], jnp.zeros((1, D)), (V, D))


def test_a_model_that_holds_functions():
    """What is no parameter is returned as it was."""
    model = {"t": START, "w": jnp.ones(D), "activation": jnp.sin, "train": True}
    loss = lambda model, ids: jnp.sum(model["activation"](model["t"][ids]) * model["w"][None])
    tx = jmask.deferred(ADAM)
    state = tx.init(model)
    params = {"t": START, "w": jnp.ones(D)}
    expected = ADAM.init(params)
    for ids in jnp.asarray(IDS[:4]):
        model, state = tx.catch_up(model, state, {"t": ids})
        grads = jmask.grad(loss)(model, ids)
        model, state = jmask.apply_gradients(tx, grads, state, model)
        dense = lambda params, ids=ids: loss(params | {"activation": jnp.sin}, ids)
        updates, expected = ADAM.update(jax.grad(dense)(params), expected)
        params = optax.apply_updates(params, updates)
    model, state = tx.catch_up(model, state)
    assert (model.pop("activation"), model.pop("train")) == (jnp.sin, True)
    assert_close((model, state.inner), (params, expected))


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


def test_a_table_without_rows():
    tx, params = jmask.deferred(ADAM), {"none": jnp.zeros((0, 3)), "some": START}
    ids = {"none": np.zeros(0, int), "some": [1]}
    params, state = tx.catch_up(params, tx.init(params), ids)
    assert_close(tx.catch_up(params, state)[0], {"none": jnp.zeros((0, 3)), "some": START})


def test_longer_than_the_window_is_nan():
    tx, table = jmask.deferred(ADAM, window=4), START
    state = tx.init(table)
    for _ in range(5):
        table, state = jmask.apply_gradients(tx, NOTHING, state, table)
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
    for number in range(7):
        table, state = jmask.apply_gradients(tx, NOTHING, state, table)
        assert np.isnan(tx.catch_up(table, state)[0]).all() == (number >= 5)


jump = lambda before, after: lambda count: jnp.where(count < COUNT // 2, before, after)
# Of some numbers rows that were away over the change are nan, of others all.
NAN_OR_EXACT = {
    "b2": {"b2": jump(0.999, 0.7)},
    "b1": {"b1": jump(0.9, 0.9995)},
    "eps": {"eps": jump(1e-8, 0.1)},
    "eps back to less": {"eps": jump(0.1, 1e-8)},
}


@pytest.mark.parametrize("name", NAN_OR_EXACT)
def test_schedules_out_of_range(name):
    """Arrays and schedules come with a step, and are not known when a state is made."""
    inner = injected_adam(0.1, **NAN_OR_EXACT[name])
    (params, *_), (dense, *_) = both(inner)
    is_nan = np.isnan(params["t"])
    assert is_nan[12].all()
    np.testing.assert_allclose(params["t"][~is_nan], dense["t"][~is_nan], 2e-5, 2e-6)


def test_a_number_that_is_set_between_steps():
    tx = jmask.deferred(injected_adam(0.1))
    take, params = functools.partial(step, tx), parameters()
    params, state, _ = run(take, params, tx.init(params), IDS[:2])
    state.inner.hyperparams["b2"] = jnp.float32(0.5)
    params, state, _ = run(take, params, state, IDS[2:])
    assert np.isnan(tx.catch_up(params, state)[0]["t"][12]).all()


# --- in place; or refused --------------------------------------------------------------------

OF_EACH_KIND = chosen(["optax.adamw", "rowwise adagrad"], ["adam", "momentum"])


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_in_place(name):
    check_deferred_in_place(OPTIMIZERS[name])


def test_catch_up_in_place():
    """And one int32 for each row is kept beside the moments."""
    tx, rows = jmask.deferred(ADAM), 10**7
    like = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    state = jax.eval_shape(tx.init, like)
    compiled = jax.jit(tx.catch_up, donate_argnums=(0, 1)).lower(like, state).compile()
    assert temporary_bytes(compiled, rows * 16 * 4 * 3) <= 64 * 2**20
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert 0 <= size - rows * (2 * 16 * 4 + 4) < 2**20


def test_an_optimizer_that_counts_rows_is_refused_where_it_is_given_rows():
    tx = jmask.deferred(
        optax.partition({"a": ADAM, "b": optax.lamb(0.1)}, {"t": "a", "u": "b"})
    )
    params = {"t": START, "u": START}
    grads = jmask.grad(lambda p: jnp.sum(p["u"][jnp.array([0])]))(params)
    with pytest.raises(ValueError, match="`reduce_sum` combines rows"):
        jmask.apply_gradients(tx, grads, tx.init(params), params)
