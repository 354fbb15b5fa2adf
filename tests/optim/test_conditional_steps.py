"""Steps skipped, rows left out, microbatches accumulated: exact, and bit-equal otherwise."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.compilations import no_tracer_is_kept
from tests.compiled_step import with_optax
from tests.expressions import functions
from tests.oracle import assert_close, densified, is_row_sparse

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

V, D = 9, 3
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
PARAMS = {"t": TABLE, "w": jnp.ones(4)}


def decaying(shift):
    """A transformation whose state changes in all rows, and counts in no dtype of its own."""

    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda x: 0.5 * x + shift, state)

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.ones_like, p), update)


# The names of those whose state holds more than rows and a count.
INNER = functions("", {**vars(jmask), **globals()})("""
    adam(0.1); rowwise_adagrad(0.1, weight_decay=0.1); lazy(optax.adamw(0.1));
    optax.chain(clip_by_row_norm(0.5), adagrad(0.1), ema(0.9));
    lazy(optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 9)));
    optax.partition({"a": adam(0.1), "b": optax.adam(0.1)}, {"t": "a", "w": "b"});
    optax.chain(sgd(0.1), decaying(1.0)); optax.chain(densify(), optax.adam(0.1));
    lazy(optax.chain(optax.ema(0.9), optax.scale_by_belief(), optax.scale(-0.1)))
""")
INNER = {name: tx() for name, tx in INNER.items()}
ADAM = INNER["adam(0.1)"]
IN_PLACE = [name for name in INNER if "decaying" not in name and "densify" not in name]


def gradient(seed, size=4):
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, V + 1, size)
    rows = jmask.RowSparse(ids, jnp.asarray(rng.normal(size=(size, D)), jnp.float32), (V, D))
    return {"t": rows, "w": jnp.asarray(rng.normal(size=4), jnp.float32)}


# A step is compiled once for all tests of an optimizer.
jitted = lambda step: functools.cache(lambda tx: jax.jit(functools.partial(step, tx)))
with_updates, in_one_pass = jitted(with_optax), jitted(jmask.apply_gradients)
in_both_ways = pytest.mark.parametrize("how", [with_updates, in_one_pass], ids=["two", "one"])
assert_equal = chex.assert_trees_all_equal


@in_both_ways
@pytest.mark.parametrize("name", INNER)
def test_only_finite_steps_are_taken(name, how):
    """The others keep all bits: of rows, of what has no rows, of what moves in all rows."""
    inner, tx = INNER[name], jmask.skip_nonfinite(INNER[name])
    step, expected_step = how(tx), how(inner)
    params, state = PARAMS, tx.init(PARAMS)
    expected, expected_state = PARAMS, inner.init(PARAMS)
    bad = {
        1: lambda g: {**g, "w": g["w"].at[2].set(jnp.nan)},
        2: lambda g: {**g, "t": g["t"].with_values(g["t"].values.at[0, 1].set(-jnp.inf))},
        3: lambda g: {**g, "t": jmask.RowSparse([3, 3], jnp.full((2, D), 3e38), (V, D))},
    }
    for number in range(5):
        grads = gradient(number + 2)
        if number in bad:
            before = (params, state.inner_state)
            params, state = step(bad[number](grads), state, params)
            assert_equal((params, state.inner_state), before)
        else:
            params, state = step(grads, state, params)
            expected, expected_state = expected_step(grads, expected_state, expected)
    assert state.skipped == 3
    assert_close((params, state.inner_state), (expected, expected_state))


GUARDS = functions("inner, like", {**vars(jmask), **globals()})("""
    skip_nonfinite(inner); multi_steps(inner, 4, like);
    skip_nonfinite(multi_steps(inner, 4, like)); multi_steps(skip_nonfinite(inner), 4, like)
""")


@in_both_ways
@pytest.mark.parametrize("leading", [1, 2])
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("guard", GUARDS)
def test_in_place(guard, name, leading, how):
    """Donated tables and their state are written where they are, taken or not."""
    rows, width, lookups = 10**5, 16, 64
    shape = (rows, width) if leading == 1 else (2, rows // 2, width)
    params = {"t": jax.ShapeDtypeStruct(shape, jnp.float32), "w": jnp.ones(4)}
    ids, values = jnp.zeros(lookups, jnp.int32), jnp.zeros((lookups, width))
    like = {"t": jmask.RowSparse(ids, values, shape, leading=leading), "w": params["w"]}
    tx = GUARDS[guard](INNER[name], like)
    state, step = jax.eval_shape(tx.init, params), how(tx).__wrapped__
    # JAX gives donated buffers to results of the same shape in their order.
    in_order = jax.jit(lambda p, s, g: step(g, s, p), donate_argnums=(0, 1))
    memory = in_order.lower(params, state, like).compile().memory_analysis()
    tables = [x for x in jax.tree.leaves((params, state)) if x.size >= rows]
    assert memory.alias_size_in_bytes >= sum(4 * x.size for x in tables)
    assert memory.temp_size_in_bytes < min(40 * 4 * 4 * lookups * width, rows * width)


@in_both_ways
@pytest.mark.parametrize(("value", "expected"), [(0.5, -0.1), (np.inf, 0.0)])
def test_derivatives_backwards(how, value, expected):
    tx = jmask.skip_nonfinite(jmask.lazy(optax.sgd(0.1, momentum=0.9)))

    def after(value):
        gradient = jmask.RowSparse([2], jnp.array([[value, 1.0, 1.0]]), (V, D))
        return how(tx)(gradient, tx.init(TABLE), TABLE)[0][2, 0]

    np.testing.assert_allclose(jax.jit(jax.grad(after))(value), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(after, (value,), (1.0,))[1], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_what_is_not_moved_keeps_the_sign_of_zero(dtype):
    params = jnp.zeros(2, dtype).at[0].set(-jnp.zeros((), dtype))
    gradient, parts = jnp.array([jnp.nan, 1.0]).astype(dtype), (jnp.real, jnp.imag)
    masked = jmask.masked_tensor(gradient, jnp.zeros(2, bool))
    for tx, updates in (
        (jmask.skip_nonfinite(jmask.sgd(1.0)), gradient),
        (jmask.lazy(optax.sgd(1.0)), masked),
    ):
        updates, _ = tx.update(updates, tx.init(params), params)
        kept = optax.apply_updates(params, updates)
        for part in parts[: 1 + jnp.iscomplexobj(params)]:
            np.testing.assert_array_equal(jnp.signbit(part(kept)), [True, False])


# --- microbatches --------------------------------------------------------------------------


def test_a_third_in_float64():
    """1 / k has the dtype of the gradient."""
    with jax.enable_x64(True):
        grads = jmask.RowSparse([1], jnp.ones((1, 1)), (3, 1))
        tx, table = jmask.multi_steps(jmask.sgd(1.0), 3, grads), jnp.zeros((3, 1))
        state = tx.init(table)
        for _ in range(3):
            table, state = jmask.apply_gradients(tx, jmask.tree.scale(0.1, grads), state, table)
        assert abs(float(table[1, 0]) + 0.1) < 1e-16


def test_a_state_of_another_k():
    """Saved after 3 of 8 microbatches: the next one is the last of 4, and of 2 as well."""
    grads = [densified(gradient(i)) for i in range(6)]
    tx = lambda k: jmask.multi_steps(ADAM, k, grads[0])
    state = tx(8).init(PARAMS)
    for g in grads[:3]:
        params, state = in_one_pass(tx(8))(g, state, PARAMS)
    for k in (2, 4):
        new, after = in_one_pass(tx(k))(grads[3], state, params)
        mean = jmask.tree.mean(grads[:4])
        once, inner_state = in_one_pass(ADAM)(mean, ADAM.init(PARAMS), PARAMS)
        assert_close((new, after.inner_state), (once, inner_state))
        assert after.mini_step == 0
    of_four, of_two = (jmask.multi_steps(ADAM, k, gradient(0)) for k in (4, 2))
    with pytest.raises(ValueError, match=r"`state\.accumulated` was made for another `every"):
        of_two.update(gradient(0), of_four.init(PARAMS), PARAMS)


SUMMED_FIRST = functions("tx", {**vars(jmask), **globals()})("""
    skip_nonfinite(tx); skip_nonfinite(optax.chain(tx, ema(0.9)));
    optax.chain(drop_nonfinite_rows(), tx); optax.chain(clip_by_row_norm(1e6), tx)
""")


@in_both_ways
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", SUMMED_FIRST)
def test_microbatches_of_16_bits_behind_what_sums_them(name, dtype, how):
    """What looks at sums hands them on in float32: they are kept, and rounded in the step."""
    halves = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree, is_leaf=is_row_sparse)
    grads, params = [halves(gradient(seed)) for seed in range(4)], halves(PARAMS)
    alone = jmask.multi_steps(jmask.sgd(0.5), 2, like=jax.eval_shape(lambda: grads[0]))
    results = []
    for tx in (alone, SUMMED_FIRST[name](alone)):
        new, state = params, tx.init(params)
        for g in grads:
            new, state = how(tx)(g, state, new)
        results.append(new)
    assert_equal(*results)


# What looks at rows, their size or whether they are finite.
LOOKING = functions("", {**vars(jmask), **globals()})("""
    skip_nonfinite(sgd(0.5)); optax.chain(drop_nonfinite_rows(), sgd(0.5));
    optax.chain(clip_by_row_norm(0.5), sgd(0.5)); optax.chain(sgd(0.5), max_row_norm(0.5));
    sgd(0.5, clip_gradient=0.25); adagrad(0.1, clip_gradient=0.25); rowwise_adam(0.1);
    lazy(optax.chain(optax.clip(0.25), optax.adam(0.1)));
    lazy(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)));
    lazy(optax.chain(optax.zero_nans(), optax.sgd(0.1)));
    optax.stateless(lambda g, p: jax.tree.map(lambda x: 0 * x + jmask.tree.norm(g["t"]), p))
""")


@in_both_ways
@pytest.mark.parametrize("name", LOOKING)
def test_equal_ids_are_summed_before_they_are_looked_at(name, how):
    """In float32, where float16 has no such sum: what the optimizer takes decides."""
    rows = jnp.asarray(6e4 * np.array([[1, -1, 0.5], [0.25, 1, -1]]), jnp.float16)
    halves = jmask.RowSparse([7, 2, 7, 2], jnp.concatenate([rows, rows]), (V, D))
    sums = 2 * rows[::-1].astype(jnp.float32)
    whole = jmask.RowSparse([2, 7], sums, (V, D), coalesced=True)
    params = {"t": TABLE.astype(jnp.float16), "w": jnp.ones(4)}
    tx, results = LOOKING[name](), []
    for rows in (halves, whole):
        new, state = how(tx)({"t": rows, "w": jnp.ones(4)}, tx.init(params), params)
        results.append(jax.tree.leaves((new, jax.tree.map(jnp.asarray, state))))
    assert_equal(*results)
    assert getattr(state, "skipped", 0) == 0


@pytest.mark.parametrize("name", GUARDS)
def test_no_tracer_is_kept(name):
    """`jax_check_tracer_leaks` refuses what a trace leaves behind."""
    tx = GUARDS[name](ADAM, gradient(0))
    for how in (with_updates, in_one_pass):
        with no_tracer_is_kept():
            how(tx).lower(gradient(1), tx.init(PARAMS), PARAMS)
