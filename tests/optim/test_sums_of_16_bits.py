"""16-bit gradients with duplicates: summed exactly, then the rule, and rounded once.

To nearest, or stochastically, so that small updates add up.
The model is float64; what is stored may be off by the one rounding to 16 bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.optim.test_named_optimizers import CASES, MODELS, NAMES
from tests.optimizers import OPTAX
from tests.oracle import assert_close
from tests.stored_tables import STEPS as APPLY
from tests.stored_tables import of_lines, stored, unpacked

pytestmark = pytest.mark.sampled


DTYPES = [jnp.bfloat16, jnp.float16]
V, D = 40, 3
# Row 7 three times and row 2 twice; padding; rows that share packed lines with others.
IDS = np.array([7, 2, 7, 30, -1, 2, 7, 11], np.int32)
TOUCHED = np.unique(IDS[IDS >= 0])


LIFTED = OPTAX | {
    "lion": optax.lion(0.1),
    "clipped": optax.chain(optax.clip(0.5), optax.sgd(1.0)),
}


def lookups_of(dtype, seed=0):
    """A table (V, D) and values (n, D) whose sums need more bits than the dtype has."""
    rng = np.random.default_rng(seed)
    table = jnp.asarray(rng.normal(size=(V, D)), dtype)
    values = (
        rng.normal(size=(len(IDS), D)) * np.array([1, 1, 3e-3, 1, 1, 3e-3, 5e-3, 1])[:, None]
    )
    return table, jnp.asarray(values, dtype)


def check_rounded_once(actual, exact, scale=1.0):
    """Half a unit in the last place away, and what float32 arithmetic may add."""
    exact = np.asarray(exact, np.float64)
    info = jnp.finfo(actual.dtype)
    half = float(info.eps) / 2 * np.abs(exact) + float(info.smallest_subnormal) / 2
    error = np.abs(np.asarray(actual, np.float64) - exact)
    assert (error <= half * 1.001 + 2e-6 * scale).all(), (error / half).max()


in_16_bits = pytest.mark.parametrize("dtype", DTYPES)
in_both_ways = pytest.mark.parametrize("apply", APPLY)


# The state of `adamw` is that of optax, which is among the lifted ones.
@in_both_ways
@in_16_bits
@pytest.mark.parametrize(
    ("name", "hyper"),
    [x for x in CASES if x[0] != "adamw"],
    ids=[x for x in NAMES if not x.startswith("adamw")],
)
@pytest.mark.parametrize("state_dtype", [None, jnp.float32])
def test_named(name, hyper, state_dtype, dtype, apply):
    """The state is as narrow as the parameters, or wide; no dtype is promoted silently."""
    build, kind = MODELS[name]
    table, values = lookups_of(dtype)
    model = kind(np.asarray(table, np.float64), hyper)
    tx = build(**hyper, state_dtype=state_dtype)
    gradient = jmask.RowSparse(IDS, values, (V, D))
    state = tx.init(table)
    new, new_state = jax.jit(lambda *a: APPLY[apply](tx, *a))(gradient, state, table)
    model.step(IDS, np.asarray(values, np.float64))
    check_rounded_once(new[TOUCHED], model.param[TOUCHED])
    for slot, expected in model.state.items():
        kept = getattr(new_state, slot)
        if jnp.issubdtype(kept.dtype, jnp.floating):
            check_rounded_once(kept[TOUCHED], expected[TOUCHED])
    others = np.setdiff1d(np.arange(V), TOUCHED)
    np.testing.assert_array_equal(new[others], table[others])


@in_both_ways
@in_16_bits
@pytest.mark.parametrize("name", LIFTED)
@pytest.mark.dtype_promotion
def test_lifted(name, dtype, apply):
    tx, (table, values) = LIFTED[name], lookups_of(dtype)
    lifted = jmask.lazy(tx)
    gradient = jmask.RowSparse(IDS, values, (V, D))
    state = lifted.init(table)
    new, new_state = jax.jit(lambda *a: APPLY[apply](lifted, *a))(gradient, state, table)
    with jax.enable_x64(True):
        dense = np.zeros((V, D))
        np.add.at(dense, IDS[IDS >= 0], np.asarray(values, np.float64)[IDS >= 0])
        wide = jax.tree.map(lambda x: x.astype(float) if x.ndim else x, (table, state))
        updates, expected_state = tx.update(jnp.asarray(dense), wide[1], wide[0])
        expected = np.asarray(optax.apply_updates(wide[0], updates))
        slots = [np.asarray(x) for x in jax.tree.leaves(expected_state)]
    check_rounded_once(new[TOUCHED], expected[TOUCHED])
    for kept, slot in zip(jax.tree.leaves(new_state), slots, strict=True):
        if kept.ndim:
            check_rounded_once(kept[TOUCHED], slot[TOUCHED])


@in_both_ways
@pytest.mark.parametrize(("form", "rows"), [("array", V), ("array", 2), ("packed", V)])
@pytest.mark.parametrize(
    "tx",
    [jmask.sgd(1.0), jmask.sgd(1.0, momentum=0.5), jmask.lazy(optax.sgd(1.0))],
    ids=["ours", "momentum", "lazy"],
)
def test_what_is_left_of_a_difference(tx, form, rows, apply):
    """1 - 1.00293, where the sum rounded to bfloat16 is 1; also of as many ids as rows."""
    values = jnp.array([[1.0], [0.00293]], jnp.bfloat16)
    gradient = jmask.RowSparse(jnp.array([1, 1]), values, (rows, 1))
    table = stored(form, jnp.ones((rows, 1), jnp.bfloat16))
    gradient = of_lines(gradient, table) if form == "packed" else gradient
    new, _ = APPLY[apply](tx, gradient, tx.init(table), table)
    assert new.dtype == jnp.bfloat16
    assert new.reshape(-1)[1] == jnp.bfloat16(-float(values[1, 0]))


# A cond whose branches have the dtypes of state and gradient; a running scale of them all.
STATES = {
    "novograd": optax.novograd(0.1),
    "a number for each parameter": optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros((), p.dtype), params),
        lambda g, s, p=None: (g, jax.tree.map(lambda g, s: s + jnp.vdot(g, g), g, s)),
    ),
}


@pytest.mark.dtype_promotion
@pytest.mark.parametrize("apply", APPLY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STATES)
def test_a_state_stays_in_16_bits(name, dtype, apply):
    """With a gradient in float32 these fail, or make numbers of the state float32."""
    table, values = lookups_of(dtype)
    tx = jmask.lazy(STATES[name])
    gradient = jmask.RowSparse(IDS, values, (V, D))
    state = tx.init(table)
    new, new_state = jax.jit(lambda *a: APPLY[apply](tx, *a))(gradient, state, table)
    updates, _ = tx.update(gradient.coalesce(), state, table)
    assert updates.dtype == dtype
    types = [[x.dtype for x in jax.tree.leaves(tree)] for tree in (state, new_state)]
    assert types[0] == types[1]
    summed = jnp.zeros((V, D)).at[IDS[IDS >= 0]].add(values[IDS >= 0].astype(jnp.float32))
    updates, expected = STATES[name].update(summed.astype(dtype), state, table)
    bits = float(jnp.finfo(dtype).eps)
    touched = lambda x: x[np.unique(IDS[IDS >= 0])] if x.ndim else x
    expected = jax.tree.map(touched, (optax.apply_updates(table, updates), expected))
    assert_close(
        jax.tree.map(touched, (new, new_state)), expected, rtol=2 * bits, atol=2 * bits
    )


@pytest.mark.parametrize("apply", APPLY)
def test_a_sum_beyond_float16_that_is_rescaled(apply):
    values = jnp.full((2, 1), 60_000, jnp.float16)
    gradient = jmask.RowSparse(jnp.array([1, 1]), values, (V, 1))
    table, tx = jnp.ones((V, 1), jnp.float16), jmask.sgd(1.0, rescale_grad=1e-4)
    new, _ = APPLY[apply](tx, gradient, tx.init(table), table)
    assert new[1, 0] == 1 - 12


@pytest.mark.dtype_promotion
@pytest.mark.parametrize("wide", [False, True])
def test_updates_with_duplicates_are_added_exactly(wide):
    values = jnp.array([[-1.0], [-0.00293]], jnp.bfloat16)
    updates = jmask.RowSparse([1, 1], values.astype(jnp.float32) if wide else values, (V, 1))
    table = jnp.ones((V, 1), jnp.bfloat16)
    for new in (jmask.apply_updates(table, updates), optax.apply_updates(table, updates)):
        assert new.dtype == table.dtype
        assert new[1, 0] == values[1, 0]


# --- stochastic rounding on the way back ----------------------------------------------


def neighbours(x, dtype):
    """The largest number of `dtype` not above each x and the smallest not below, by NumPy."""
    near = np.asarray(jnp.asarray(x).astype(dtype))
    wide = near.astype(np.float64)
    step = [np.asarray(jnp.nextafter(near, jnp.asarray(s, dtype))) for s in (-np.inf, np.inf)]
    below = np.where(wide > x, step[0].astype(np.float64), wide)
    above = np.where(wide < x, step[1].astype(np.float64), wide)
    return below, above


@in_16_bits
def test_a_neighbour_and_right_on_average(dtype):
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=40) * 10.0 ** rng.integers(-3, 3, 40))
    below, above = neighbours(x, dtype)
    draws = 20_000
    many = jnp.broadcast_to(x, (draws, 40))
    y = jax.jit(lambda k: jmask.stochastic_round(many, dtype, k))(jax.random.key(1))
    assert y.dtype == dtype
    y = np.asarray(y, np.float64)
    assert ((y == below) | (y == above)).all()
    assert ((y == below).any(0) & (y == above).any(0)).mean() > 0.9
    # Within five standard errors of the mean, for each of the 40 numbers.
    error = np.abs(y.mean(0) - x)
    assert (error <= 5 * y.std(0) / np.sqrt(draws) + 1e-12).all()
    # Rounding to nearest is off by much more.
    nearest = np.abs(np.asarray(jnp.asarray(x).astype(dtype), np.float64) - x)
    assert nearest.sum() > 10 * error.sum()


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2"])
def test_to_8_bits(dtype, source):
    """Where there is no infinity, too, up to the largest number, and below the smallest."""
    grid = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64)
    grid = np.unique(grid[np.isfinite(grid)])
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    x = jnp.array([1.3 * smallest, 0.3, 1.04, -5.1, 0.99 * grid[-1]], source)
    check_rounded(x, grid, dtype)


def test_from_16_bits_to_16():
    grid = np.array([-1.5, 1.0, 1.0078125])
    check_rounded(jnp.array([1.002, 1.006, -1.5], jnp.float16), grid, "bfloat16")


def check_rounded(x, grid, dtype):
    """To a neighbour in the sorted numbers of `grid`, with x as the mean."""
    draws, exact = 20_000, np.asarray(x, np.float64)
    y = jmask.stochastic_round(jnp.broadcast_to(x, (draws, *x.shape)), dtype, jax.random.key(1))
    assert y.dtype == dtype
    y = np.asarray(y, np.float64)
    below = grid[np.searchsorted(grid, exact, "right") - 1]
    above = grid[np.searchsorted(grid, exact)]
    assert ((y == below) | (y == above)).all()
    assert (np.abs(y.mean(0) - exact) <= 5 * y.std(0) / np.sqrt(draws) + 1e-12).all()


@in_16_bits
def test_what_needs_no_rounding(dtype):
    """And the same key gives the same."""
    largest = float(jnp.finfo(dtype).max)
    x = jnp.array([0.0, -0.0, 1, -2.5, jnp.nan, jnp.inf, -jnp.inf, largest, 3.4e38, 1e-30])
    for seed in range(3):
        y = jmask.stochastic_round(x, dtype, jax.random.key(seed))
        np.testing.assert_array_equal(np.float32(y[:8]), np.float32(x[:8].astype(dtype)))
        assert y[8] >= largest
        assert np.signbit(np.float32(y[1]))
        assert 0 <= float(y[9]) <= 1e-7
    keys = map(jax.random.key, (0, 0, 1))
    one, two, other = (jmask.stochastic_round(jnp.linspace(0, 1, 99), dtype, k) for k in keys)
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()


@pytest.mark.parametrize("form", ["array", "packed"])
@in_16_bits
def test_small_updates_add_up(dtype, form):
    """1 - 1e-4 is 1 in these dtypes: to nearest nothing ever moves."""
    tx, table = jmask.sgd(0.02), stored(form, jnp.ones((6, 4), dtype))
    values = jnp.array([[1e-3] * 4, [2e-3] * 4, [3e-3] * 4, [9.0] * 4])
    gradient = jmask.RowSparse(jnp.array([3, 1, 3, -1]), values, (6, 4))
    gradient = of_lines(gradient, table) if form == "packed" else gradient
    grads = {"t": gradient, "w": jnp.full(4, 1e-3), "wide": jnp.full(4, 1e-3)}
    start = {"t": table, "w": jnp.ones(4, dtype), "wide": jnp.ones(4)}

    @jax.jit
    def train(keys):
        def body(carry, key):
            return jmask.apply_gradients(tx, grads, carry[1], carry[0], key=key), None

        params = jax.lax.scan(body, (start, tx.init(start)), keys, length=3000)[0][0]
        rows = unpacked(params["t"], table, (6, 4)) if form == "packed" else params["t"]
        return {**params, "t": rows}

    to_nearest, at_random = train(None), train(jax.random.split(jax.random.key(0), 3000))
    assert (to_nearest["t"] == 1).all()
    for name, row, moved in (("t", 1, 2e-3), ("t", 3, 4e-3), ("w", slice(None), 1e-3)):
        expected = 1 - 3000 * 0.02 * moved
        mean = np.asarray(at_random[name][row], np.float64).mean()
        assert abs(mean - expected) < 0.05, (name, row)
    np.testing.assert_array_equal(at_random["wide"], to_nearest["wide"])
    others = np.array([0, 2, 4, 5])
    np.testing.assert_array_equal(at_random["t"][others], jnp.ones((4, 4), dtype))
