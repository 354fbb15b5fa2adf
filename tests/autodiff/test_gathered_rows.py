"""Gradients of bags keep the cotangents of the bags, and are what they are as arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from jmask._kernels import tuning
from jmask._kernels.gathered_rows import GATHERED
from tests.leaks import no_tracer_is_kept

V, D, B, L = 50, 4, 6, 5
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.normal(size=(V, D)), jnp.float32)
IDS = jnp.asarray(RNG.integers(0, V, (B, L)))
FLAT = IDS.reshape(-1)
WEIGHTS = jnp.asarray(RNG.normal(size=(B, L)), jnp.float32)
PADDING = int(IDS[0, 0])
OUT = jnp.asarray(RNG.normal(size=(B, D)), jnp.float32)
SQUARE = jnp.asarray(RNG.normal(size=(D, D)), jnp.float32)
MIXED = jnp.asarray(RNG.normal(size=(B, B * L)), jnp.float32)
OFFSETS = jnp.array([0, 3, 3, 10, 20, 28])
BAGS = jnp.repeat(jnp.arange(B), L)
EVERY_OTHER = jnp.arange(B * L).reshape(B, L, 1) % 2 == 0


def squares(bags):
    return jnp.sum(jnp.sin(bags) * OUT)


def beside(rows, count):
    """Dot products of the first rows of each line, their sum, with the others."""
    first = rows[:, :count].sum(1, keepdims=True) if count > 1 else rows[:, :1]
    return jnp.sum(jnp.sin((first * rows[:, count:]).sum(2)) * WEIGHTS[:, count:])


def recomputed(table):
    return jax.checkpoint(lambda table: squares(table[IDS].mean(1)))(table)


FACTORED = {
    "mean of a slice": lambda t: squares(t[IDS].mean(1)),
    "jnp.take": lambda t: squares(jnp.take(t, IDS, axis=0).sum(1)),
    "segment_sum": lambda t: squares(jax.ops.segment_sum(t[FLAT], BAGS, B)),
    "weights": lambda t: squares((t[IDS] * WEIGHTS[..., None]).sum(1)),
    "weights, flat": lambda t: squares(
        jax.ops.segment_sum(-t[FLAT] * WEIGHTS.reshape(-1, 1), BAGS, B) / 3
    ),
    "einsum": lambda t: squares(jnp.einsum("blx,bl->bx", t[IDS], WEIGHTS)),
    "einsum, weights first": lambda t: squares(jnp.einsum("bl,blx->bx", WEIGHTS, t[IDS])),
    "einsum, lines last": lambda t: squares(jnp.einsum("lb,lbx->xb", WEIGHTS.T, t[IDS.T]).T),
    "matmul": lambda t: squares((WEIGHTS[:, None, :] @ t[IDS])[:, 0]),
    "dot products": lambda t: jnp.sum(jnp.einsum("blx,bx->bl", t[IDS], OUT) * WEIGHTS),
    "vmapped": lambda t: squares(jax.vmap(lambda w, i: w @ t[i])(WEIGHTS, IDS)),
    "a mask by where": lambda t: squares(jnp.where(EVERY_OTHER, t[IDS], 0).sum(1)),
    "a mask by product": lambda t: squares((t[IDS] * EVERY_OTHER.astype(jnp.float32)).sum(1)),
    "the sum of all": lambda t: 2 * jnp.sum(t[IDS]),
    "a cast": lambda t: squares(t[IDS].astype(jnp.bfloat16).sum(1).astype(jnp.float32)),
    "checkpoint": recomputed,
    "lines": lambda t: squares(jmask.embedding_bag(t, IDS)),
    "lines with padding": lambda t: squares(
        jmask.embedding_bag(t, IDS, padding_id=PADDING, combiner="mean")
    ),
    "lines with weights": lambda t: squares(
        jmask.embedding_bag(t, IDS, weights=WEIGHTS, combiner="sqrtn")
    ),
    "offsets": lambda t: squares(jmask.embedding_bag(t, FLAT, offsets=OFFSETS)),
    "offsets with weights": lambda t: squares(
        jmask.embedding_bag(t, FLAT, offsets=OFFSETS, weights=WEIGHTS.reshape(-1))
    ),
    "segments": lambda t: squares(
        jmask.embedding_bag(t, FLAT, segment_ids=BAGS, num_segments=B, combiner="mean")
    ),
}

FACTORED |= {
    "two lookups": lambda t: squares(t[IDS].mean(1)) + squares(t[IDS[:, 0]]),
    "two lookups, weights": lambda t: FACTORED["weights"](t) + squares(t[IDS[:, 0]]),
    "three lookups": lambda t: (
        FACTORED["weights"](t) + FACTORED["a mask by where"](t) + squares(t[IDS[:, 1]])
    ),
    "a row and the others": lambda t: beside(t[IDS], 1),
    "the others and a row": lambda t: beside(t[IDS[:, ::-1]], 4),
    "only the others": lambda t: squares(t[IDS][:, 1:].mean(1)),
    "bags side by side": lambda t: (
        squares(t[IDS][:, :2].sum(1)) + squares((t[IDS] * WEIGHTS[..., None])[:, 2:].sum(1))
    ),
    "sums over columns": lambda t: jnp.sum(t[IDS].sum(-1) * WEIGHTS),
    "a slice with them": lambda t: FACTORED["jnp.take"](t) + squares(t[:B]),
}

ARRAYS = {
    "einsum of two rows": lambda t: squares(jnp.einsum("blx,blx->bx", t[IDS], t[IDS] * 0.5)),
    "matmul of all bags": lambda t: squares(MIXED @ t[FLAT]),
    "a layer": lambda t: squares((t[IDS] @ SQUARE).sum(1)),
    "a function of each row": lambda t: squares(jnp.sin(t[IDS]).sum(1)),
    "no bags": lambda t: squares(t[IDS[:, 0]]),
    "bags of one": lambda t: squares(t[IDS[:, :1]].mean(1)),
    "two lookups, most entries alone": lambda t: (
        squares(t[IDS].mean(1)) + 5 * jnp.sum(jnp.sin(t[FLAT]))
    ),
    "max": lambda t: squares(jmask.embedding_bag(t, IDS, combiner="max")),
    "slices that overlap": lambda t: (
        lambda x: squares(x[:, :3].mean(1)) + squares(x[:, 2:].mean(1))
    )(t[IDS]),
    "every other row": lambda t: squares(t[IDS][:, ::2].mean(1)),
    "slices of rows": lambda t: squares(t[IDS][..., 1:].mean((1, 2))[:, None]),
}

# Gradients that are an array that is there times a number for each row: kept so if it is large.
OTHER = jnp.asarray(RNG.normal(size=(V, D)), jnp.float32)
SCALED = {
    "squares": lambda t: jnp.sum(t[FLAT] ** 2),
    "dot products": lambda t: jnp.sum(jnp.sin(jnp.sum(t[FLAT] * OTHER[FLAT], -1))),
    "dot products of lines": lambda t: jnp.sum(jnp.cos(jnp.sum(t[IDS] * OTHER[IDS], -1))),
    "einsum": lambda t: jnp.sum(jnp.sin(jnp.einsum("blx,blx->bl", t[IDS], OTHER[IDS]))),
    "vmapped": lambda t: jnp.sum(jnp.exp(jax.vmap(jnp.vdot)(t[FLAT], OTHER[FLAT]))),
    "negative, scaled": lambda t: -3 * jnp.mean(jnp.sum(-t[FLAT] * OTHER[FLAT], -1) ** 2),
    "products": lambda t: jnp.sum(jnp.sin(jnp.sum((x := t[FLAT]) * x, -1))),
    "jitted": lambda t: jax.jit(SCALED["dot products"])(t),
    "recomputed": lambda t: jax.checkpoint(SCALED["dot products"])(t),
}
# Helpers that are jitted: in a jitted step the arrays that they make are seen as well.
_POOLED = jax.jit(lambda rows, w: (rows * w[..., None]).sum(1) / w.sum(1)[:, None])
JITTED = {
    "weighted means": lambda t: jnp.sum(_POOLED(t[IDS], WEIGHTS**2) ** 2),
    "in a jitted helper": lambda t: jnp.sum(jax.jit(jax.jit(_POOLED))(t[IDS], WEIGHTS) ** 3),
}
PROGRAMS = FACTORED | ARRAYS | JITTED


@pytest.fixture(autouse=True)
def _slices_are_large(monkeypatch):
    monkeypatch.setattr(tuning, "LARGE_SLICES", 0)


def test_small_slices_are_arrays(monkeypatch):
    loss = FACTORED["a row and the others"]
    assert seen(jmask.grad(loss), TABLE) is not None
    monkeypatch.setattr(tuning, "LARGE_SLICES", 4 * B * L * D + 1)
    assert seen(jmask.grad(loss), TABLE) is None


@functools.cache
def dense_gradient(loss):
    """The gradient of a program by JAX, compiled once for all tests of it."""
    return jax.jit(jax.grad(loss))


@functools.cache
def dense_derivative(loss):
    """Of that gradient along the cosines; of either mode, since the Hessian is symmetric."""
    along = lambda t: jax.jvp(dense_gradient(loss), (t,), (jnp.cos(t),))[1]
    return jax.jit(along)(TABLE)


def seen(grad, *args):
    """What is known of the rows of a gradient, while it is traced."""
    found = []

    def trace(*args):
        gradient = grad(*args)
        gradient = gradient[1] if isinstance(gradient, tuple) else gradient
        found.append(GATHERED.of(gradient.values))
        return gradient.todense()

    jax.eval_shape(trace, *args)
    return found[0]


def assert_close(x, y):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gradient(name):
    loss, expected = PROGRAMS[name], dense_gradient(PROGRAMS[name])(TABLE)
    known = seen(jmask.value_and_grad(loss), TABLE)
    assert (known is not None) == (name in FACTORED or name in JITTED)
    step = jax.jit(lambda t: jmask.grad(loss)(t).todense())  # what is known is used
    assert_close(step(TABLE), expected)
    with_value = jax.jit(lambda t: jmask.value_and_grad(loss)(t)[1])
    for grad in (jmask.grad(loss), jax.jit(jmask.grad(loss)), with_value):
        gradient = grad(TABLE)
        assert_close(gradient.todense(), expected)
        assert_close(gradient.coalesce().todense(), expected)
        assert gradient.values.shape == (gradient.nse, D)
        assert gradient.dtype == TABLE.dtype
        rows = jmask.RowSparse(gradient.indices, gradient.values, gradient.shape)
        assert_close(rows.todense(), expected)


def test_norms_of_a_large_array(monkeypatch):
    """They are computed in a function of JAX's that is jitted."""
    monkeypatch.setattr(tuning, "LARGE_ROWS", 0)

    def loss(t):
        return jnp.sum(WEIGHTS.reshape(-1) * jnp.linalg.norm(t[FLAT] - OTHER[FLAT], axis=-1))

    assert seen(jmask.grad(loss), TABLE) is not None
    step = jax.jit(lambda t: jmask.grad(loss)(t).todense())
    assert_close(step(TABLE), jax.grad(loss)(TABLE))


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCALED)
def test_scaled_rows_of_a_large_array(monkeypatch, name):
    assert seen(jmask.grad(SCALED[name]), TABLE) is None
    monkeypatch.setattr(tuning, "LARGE_ROWS", 0)
    loss, expected = SCALED[name], dense_gradient(SCALED[name])(TABLE)
    assert seen(jmask.grad(loss), TABLE).index is None

    @jax.jit
    def results(table):
        gradient = jmask.value_and_grad(loss)(table)[1]
        assert gradient.values.shape == (gradient.nse, D)
        twice = jmask.tree.add(gradient, gradient)
        return [x.todense() for x in (gradient, (gradient * 2).coalesce(), twice)]

    for result, factor in zip(results(TABLE), (1, 2, 2), strict=True):
        assert_close(result, factor * expected)
    tables = jnp.stack([TABLE, 2 * TABLE])
    stacked = jax.vmap(jmask.grad(loss))(tables)
    assert_close(jmask.tree.merge(stacked).todense(), sum(map(dense_gradient(loss), tables)))
    along = jnp.cos(TABLE)
    found = jax.grad(lambda t: jnp.sum(jmask.grad(loss)(t).todense() * along))(TABLE)
    assert_close(found, dense_derivative(loss))


def test_large_batches_hold_one_array_of_rows():
    """Of a step of dot products, read from the compiled program: no gradient of all rows."""
    n, table = 70_000, jax.ShapeDtypeStruct((200_000, D * 16), jnp.float32)
    ids = jax.ShapeDtypeStruct((n,), jnp.int32)
    at_most = 1.4 if jax.__version_info__ >= (0, 12) else 2.1  # XLA copied what it had read
    for tx in (jmask.sgd(0.1), jmask.adam(0.1), jmask.lazy(optax.adagrad(0.1))):

        def step(table, state, ids, tx=tx):
            loss, grad = jmask.value_and_grad(lambda t: jnp.sum(t[ids] ** 2))(table)
            return *jmask.apply_gradients(tx, grad, state, table), loss

        state = jax.eval_shape(tx.init, table)
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(table, state, ids).compile()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        assert temporaries < at_most * n * table.shape[1] * table.dtype.itemsize


@pytest.mark.sampled
@pytest.mark.parametrize("name", FACTORED)
def test_inside_other_programs(name):
    loss = FACTORED[name]
    tables = jnp.stack([TABLE, 2 * TABLE])
    expected, of_other = map(dense_gradient(loss), tables)
    stacked = jax.vmap(jmask.grad(loss))(tables)
    assert_close(jmask.tree.merge(stacked).todense(), expected + of_other)
    one = jax.tree.map(lambda leaf: leaf[1], stacked)
    assert_close(one.todense(), of_other)
    _, scanned = jax.lax.scan(lambda c, t: (c, jmask.grad(loss)(t)), 0, tables)
    assert_close(jmask.tree.merge(scanned).todense(), expected + of_other)
    branches = jax.jit(
        jmask.grad(lambda t, on: jax.lax.cond(on, loss, FACTORED["jnp.take"], t))
    )
    assert_close(branches(TABLE, True).todense(), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("name", FACTORED)
def test_second_derivatives(name):
    loss, along = FACTORED[name], jnp.cos(TABLE)
    expected = dense_derivative(loss)
    found = jax.grad(lambda t: jnp.sum(jmask.grad(loss)(t).todense() * along))(TABLE)
    # A cast back is one of a row here, and of each of its copies there.
    rtol = 1e-2 if name == "a cast" else 2e-5
    np.testing.assert_allclose(found, expected, rtol, atol=rtol / 10)
    _, forward = jax.jvp(lambda t: jmask.grad(loss)(t).todense(), (TABLE,), (along,))
    assert_close(forward, expected)


def test_operations_on_it():
    """All that takes a RowSparse takes one in factors."""
    loss = FACTORED["weights"]
    gradient, dense = jmask.grad(loss)(TABLE), jax.grad(loss)(TABLE)
    assert_close((gradient * 2).todense(), 2 * dense)
    np.testing.assert_array_equal(
        gradient.astype(jnp.float16).values, gradient.values.astype(jnp.float16)
    )
    assert_close(gradient.retain([1, 2, 3]).todense()[1:4], dense[1:4])
    assert_close(jmask.tree.norm(gradient), jnp.linalg.norm(dense))
    assert_close(jmask.tree.add(gradient, gradient).todense(), 2 * dense)
    assert_close(gradient[3], dense[3])
    assert_close(gradient.sum(1).todense(), dense.sum(1))
    arrays = jmask.to_arrays({"t": gradient})
    shapes = jax.eval_shape(lambda: {"t": jmask.grad(loss)(TABLE)})
    assert shapes["t"].values.shape == gradient.values.shape
    assert_close(jmask.from_arrays(arrays, like=shapes)["t"].todense(), dense)
    assert repr(gradient) == f"RowSparse(float32[{V}, {D}], nse={B * L})"
    gradient.validate()


def test_in_a_shard_map_rows_are_arrays():
    """A caller may put those of devices side by side, where an index is that of a device."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def of_device(table, ids):
        return jmask.grad(lambda t: jnp.sum(t[ids].mean(1) ** 2))(table)

    how = {"mesh": mesh, "in_specs": (spec(), spec("x")), "out_specs": spec("x")}
    grad = jax.shard_map(of_device, **how, check_vma=False)
    assert seen(grad, TABLE, IDS) is None
    found = jax.jit(grad)(TABLE, IDS)
    expected = jax.grad(lambda t: jnp.sum(t[IDS].mean(1) ** 2))(TABLE)
    assert_close(found.todense(), expected)


def test_no_tracer_is_kept():
    with no_tracer_is_kept():
        for name in ("jnp.take", "a mask by where", "checkpoint"):
            jax.jit(jmask.grad(FACTORED[name]))(TABLE)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_tables(dtype):
    table = TABLE.astype(dtype)

    def loss(table):
        bags = jmask.embedding_bag(table, IDS, weights=WEIGHTS)
        return jnp.sum(jnp.sin(bags.astype(jnp.float32)) * OUT)

    assert seen(jmask.grad(loss), table).dtype == dtype
    gradient = jmask.grad(loss)(table)
    assert gradient.values.dtype == dtype
    step = jax.jit(lambda t: jmask.grad(loss)(t).todense())
    # As it is summed for an array: each row is rounded, and their sums are wide.
    np.testing.assert_array_equal(step(table), gradient.coalesce().todense())
