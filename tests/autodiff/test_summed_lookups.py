"""Lookups that are only summed: rows are read as a bag's are, gradients keep their cotangents.

One equation sums the rows as it reads them, and its gradient is the cotangents of the sums, of
which rows are gathered. Both are what they are as arrays of all rows.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from jmask._base.forms import within
from jmask._kernels import gathered_rows, tuning
from jmask._kernels.gathered_rows import GATHERED
from tests.compilations import no_tracer_is_kept
from tests.compiled_step import compiled_step
from tests.expressions import functions

V, D, B, L = 50, 4, 6, 5
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.normal(size=(V, D)), jnp.float32)
OTHER, PLANES, SQUARE, MIXED, OUT = (
    jnp.asarray(RNG.normal(size=shape), jnp.float32)
    for shape in ((V, D), (V, 2, D), (D, D), (B, B * L), (B, D))
)
IDS = RNG.integers(0, V, (B, L))
IDS[2] = IDS[2, 0]
PADDING = int(IDS[0, 0])
BEYOND = IDS.copy()  # of ids outside the table; no line wraps to its end
BEYOND[0, 1], BEYOND[3, 3] = V, -V - 3
WEIGHTS = jnp.asarray(RNG.normal(size=(B, L)), jnp.float32)
MASK = RNG.random((B, L)) < 0.7
MASK[0, 1] = False
OFFSETS = jnp.array([0, 3, 3, 10, 20, 28])
BAGS = jnp.repeat(jnp.arange(B), L)


class Batch(NamedTuple):
    """An argument of each program, so that nothing in it is known."""

    ids: jax.Array
    beyond: jax.Array
    weights: jax.Array
    wild: jax.Array  # with zeros and infinity
    mask: jax.Array


BATCH = Batch(
    *map(jnp.asarray, (IDS, BEYOND)),
    WEIGHTS,
    WEIGHTS.at[1].set(0).at[4, 4].set(jnp.inf),
    jnp.asarray(MASK),
)


where = lambda rows, x: jnp.where(x.mask[..., None], rows, 0)
weighted = lambda rows, x: rows * x.wild[..., None]
take = lambda table, x, **mode: jnp.take(table, x.beyond, axis=0, **mode)
bag = lambda table, x, **how: jmask.embedding_bag(table, x.ids, **how)
flat_bag = lambda table, x, **how: jmask.embedding_bag(table, x.ids.reshape(-1), **how)


def beside(rows, count, x):
    """Dot products of the first rows of each line, their sum, with the others."""
    first = rows[:, :count].sum(1, keepdims=True) if count > 1 else rows[:, :1]
    return jnp.sin((first * rows[:, count:]).sum(2)) * x.weights[:, count:]


helper = jax.jit(lambda table, ids, w: jnp.sum(table[ids] * w[..., None], axis=-2))
# In a jitted step the arrays that a jitted function makes are seen as well.
pooled = jax.jit(lambda rows, w: (rows * w[..., None]).sum(1) / w.sum(1)[:, None])
read = functions("t, x", globals())
# Summed by one equation, and gathered backwards.
SUMMED = read("""
    t[x.ids].sum(1); t[x.ids].mean(-2); t[x.ids.T].sum(0);
    t[x.ids.reshape(B, L, 1)].sum((1, 2)); t[x.ids.reshape(L, B, 1)].sum((0, 2));
    t[x.ids].sum(1, keepdims=True)[:, 0]; t[x.ids.reshape(-1)].reshape(B, L, D).sum(1);
    t[x.beyond].sum(1); jnp.take(t, x.ids, axis=0).sum(1); take(t, x).sum(1);
    take(t, x, mode="fill", fill_value=0).mean(1); weighted(t[x.ids], x).sum(1);
    (x.wild[..., None] * t[x.ids]).sum(1); weighted(take(t, x), x).sum(1);
    where(t[x.ids], x).sum(1); where(take(t, x), x).sum(1);
    weighted(where(t[x.ids], x), x).sum(1); weighted(weighted(t[x.ids], x), x).sum(1);
    (t[x.ids] * x.mask[..., None].astype(t.dtype)).sum(1);
    jnp.einsum("bld,bl->bd", t[x.ids], x.wild); jnp.einsum("bl,bld->bd", x.weights, t[x.ids]);
    jnp.einsum("bl,bld->bd", x.wild, where(take(t, x), x));
    jnp.einsum("lb,lbd->db", x.wild.T, t[x.ids.T]).T; (x.wild[:, None, :] @ t[x.ids])[:, 0];
    jax.vmap(lambda w, i: w @ t[i])(x.wild, x.ids); helper(t, x.ids, x.wild); t[x.ids,].sum(1);
    t.at[x.ids].get(mode="promise_in_bounds").sum(1);
    t[x.ids].sum(1).astype(jnp.bfloat16).astype(jnp.float32); bag(t, x);
    bag(t, x, padding_id=PADDING, combiner="mean");
    bag(t, x, weights=x.weights, combiner="sqrtn"); flat_bag(t, x, offsets=OFFSETS);
    flat_bag(t, x, offsets=OFFSETS, weights=x.weights.reshape(-1));
    flat_bag(t, x, segment_ids=BAGS, num_segments=B, combiner="mean");
    (t[x.ids].mean(1), t[x.ids[:, 0]]); (weighted(t[x.ids], x).sum(1), t[x.ids[:, 0]]);
    (jnp.take(t, x.ids, axis=0).sum(1), t[:B]); pooled(t[x.ids], x.weights ** 2);
    jax.jit(jax.jit(pooled))(t[x.ids], 1 + x.weights ** 2)
""")
# By two equations.
TWICE = read("""
    jax.checkpoint(lambda t: jnp.sin(t[x.ids].mean(1)))(t);
    (jnp.einsum("bl,bld->bd", x.weights, t[x.ids]), where(t[x.ids], x).sum(1), t[x.ids[:, 1]])
""")
# No sums of rows alone: rows are read as they are, and their cotangents written.
WRITTEN = read("""
    jax.ops.segment_sum(t[x.ids.reshape(-1)], BAGS, B);
    jax.ops.segment_sum(-t[x.ids.reshape(-1)] * x.weights.reshape(-1, 1), BAGS, B) / 3;
    jnp.einsum("blx,bx->bl", t[x.ids], OUT) * x.weights; jnp.sum(t[x.ids]);
    t[x.ids].astype(jnp.bfloat16).sum(1).astype(jnp.float32); beside(t[x.ids], 1, x);
    beside(t[x.ids[:, ::-1]], 4, x); t[x.ids][:, 1:].mean(1);
    (t[x.ids][:, :2].sum(1), (t[x.ids] * x.weights[..., None])[:, 2:].sum(1));
    t[x.ids].sum(-1) * x.weights; jnp.where(x.mask[..., None], t[x.ids], 1.0).sum(1);
    take(t, x, mode="fill", fill_value=2.0).sum(1); t[x.ids].sum(2)[:, :D];
    t[x.ids].sum((0, 1))[None]; where(weighted(t[x.ids], x), x).sum(1)
""")
# Rows that are needed for more than one sum, or are computed on.
NARROW = read("""
    (t.astype(jnp.bfloat16)[x.ids] * x.weights[..., None].astype(jnp.bfloat16)).sum(1);
    jax.lax.reduce(t.astype(jnp.bfloat16)[x.ids], jnp.bfloat16(0), jax.lax.add, (1,))
""")
ARRAYS = (
    NARROW
    | WRITTEN
    | read("""
    (lambda rows: rows.sum(1) + rows.max(1))(t[x.ids]); (t[x.ids] ** 2).sum(1);
    (lambda rows: rows.sum(1) ** 2 - (rows ** 2).sum(1))(t[x.ids]);
    (t[x.ids] * jnp.arange(1.0, D + 1)[None, None]).sum(1);
    jnp.einsum("blx,blx->bx", t[x.ids], t[x.ids] * 0.5); MIXED @ t[x.ids.reshape(-1)];
    (t[x.ids] @ SQUARE).sum(1); jnp.sin(t[x.ids]).sum(1); t[x.ids[:, 0]];
    bag(t, x, combiner="max");
    (lambda rows: (rows[:, :3].mean(1), rows[:, 2:].mean(1)))(t[x.ids]);
    t[x.ids][:, ::2].mean(1); t[x.ids][..., 1:].mean((1, 2))[:, None]
""")
)
# Summed, and no more than rows backwards.
SUMMED_ALONE = read("""
    (t[x.ids].mean(1), jnp.sin(t[x.ids.reshape(-1)]))
""")
# Those that tests name.
TAKE = "jnp.take(t, x.ids, axis=0).sum(1)"
MASKED = "where(t[x.ids], x).sum(1)"
OUTSIDE = "weighted(take(t, x), x).sum(1)"
JITTED = "helper(t, x.ids, x.wild)"
LINES = 'bag(t, x, weights=x.weights, combiner="sqrtn")'
FIRST = "beside(t[x.ids], 1, x)"
CAST = "t[x.ids].astype(jnp.bfloat16).sum(1).astype(jnp.float32)"
CHECKPOINT = "jax.checkpoint(lambda t: jnp.sin(t[x.ids].mean(1)))(t)"
FACTORED = SUMMED | TWICE
PROGRAMS = FACTORED | ARRAYS | SUMMED_ALONE


@functools.cache
def loss_of(name):
    """The sum of sines of what a program gives, with weights, where it is finite."""

    def loss(table, batch=BATCH):
        total = jnp.float32(0)
        for result in jax.tree.leaves(PROGRAMS[name](table, batch)):
            result = result.astype(jnp.float32)
            weights = np.resize(OUT, result.shape)
            total += jnp.sum(jnp.where(jnp.isfinite(result), jnp.sin(result), 0) * weights)
        return total

    return loss


@pytest.fixture(autouse=True)
def _even_few_rows_are_many(monkeypatch):
    monkeypatch.setattr(tuning, "SMALL_ROWS", 0)


def test_small_arrays_are_arrays(monkeypatch):
    loss = loss_of(LINES)
    assert seen(jmask.grad(loss), TABLE, BATCH) is not None
    monkeypatch.setattr(tuning, "SMALL_ROWS", 4 * B * L * D + 1)
    assert seen(jmask.grad(loss), TABLE, BATCH) is None


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


def count_of_sums(function, *args):
    equations = within(jax.make_jaxpr(function)(*args).eqns)
    return sum(eqn.primitive.name == gathered_rows.BAG_SUM.primitive.name for eqn in equations)


def assert_close(x, y, rtol=2e-5):
    np.testing.assert_allclose(x, y, rtol, atol=rtol / 10)


@pytest.mark.sampled
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_gradient(name):
    loss = loss_of(name)
    rtol = 2e-2 if name in NARROW else 2e-5  # sums of equal ids are wide
    value, expected = jax.jit(jax.value_and_grad(loss))(TABLE, BATCH)
    with_value = jax.jit(jmask.value_and_grad(loss))
    assert (seen(jmask.value_and_grad(loss), TABLE, BATCH) is not None) == (name in FACTORED)
    sums = 2 * (name in TWICE) + (name in SUMMED | SUMMED_ALONE)
    assert count_of_sums(with_value, TABLE, BATCH) == sums
    assert_close(with_value(TABLE, BATCH)[0], value, rtol)
    step = jax.jit(lambda *args: jmask.grad(loss)(*args).todense())  # what is known is used
    assert_close(step(TABLE, BATCH), expected, rtol)
    if name in NARROW:
        return  # XLA rounds fewer of its sums than operations that are run one by one
    for grad in (jmask.grad(loss), jax.jit(jmask.grad(loss)), lambda *x: with_value(*x)[1]):
        gradient = grad(TABLE, BATCH)
        assert_close(gradient.todense(), expected, rtol)
        assert_close(gradient.coalesce().todense(), expected, rtol)
        assert gradient.values.shape == (gradient.nse, D)
        assert gradient.dtype == TABLE.dtype
        rows = jmask.RowSparse(gradient.indices, gradient.values, gradient.shape)
        assert_close(rows.todense(), expected, rtol)


def temporaries(loss, tx, rows, ids):
    """Temporary bytes of a compiled step on a table (rows, 64)."""
    table, ids = (jax.ShapeDtypeStruct(*x) for x in (((rows, 64), "float32"), (ids, "int32")))
    return compiled_step(loss, tx, table, ids).memory_analysis().temp_size_in_bytes


def test_no_row_of_a_bag_is_written_out(monkeypatch):
    """Less beside its table than the rows of the bags would take."""
    monkeypatch.undo()
    means = lambda t, ids: jnp.sum(jnp.sin(t[ids].mean(1)))
    assert temporaries(means, jmask.sgd(0.1), 200_000, (10_000, 5)) < 50_000 * 64 * 4 / 1.5


@pytest.mark.sampled
@pytest.mark.parametrize("name", FACTORED)
def test_inside_other_programs(name):
    loss, dense = loss_of(name), dense_gradient(loss_of(name))
    tables = jnp.stack([TABLE, 2 * TABLE])
    expected, of_other = (dense(table, BATCH) for table in tables)
    stacked = jax.jit(jax.vmap(jmask.grad(loss), (0, None)))(tables, BATCH)
    assert_close(jmask.tree.merge(stacked).todense(), expected + of_other)
    one = jax.tree.map(lambda leaf: leaf[1], stacked)
    assert_close(one.todense(), of_other)
    in_turn = lambda batch, table: (batch, jmask.grad(loss)(table, batch))
    _, scanned = jax.lax.scan(in_turn, BATCH, tables)
    assert_close(jmask.tree.merge(scanned).todense(), expected + of_other)
    branches = jax.jit(
        jmask.grad(lambda t, on: jax.lax.cond(on, loss, loss_of(TAKE), t, BATCH))
    )
    assert_close(branches(TABLE, True).todense(), expected)


# An id outside of the table is clamped forwards and dropped backwards: no symmetric Hessian.
@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", [n for n in FACTORED if not re.search(r"beyond|take\(t, x", n)]
)
def test_second_derivatives(name):
    loss, along = loss_of(name), jnp.cos(TABLE)
    expected = dense_derivative(loss)
    found = jax.grad(lambda t: jnp.sum(jmask.grad(loss)(t).todense() * along))(TABLE)
    # A cast back is one of a row here, and of each of its copies there.
    assert_close(found, expected, 1e-2 if name == CAST else 2e-5)
    _, forward = jax.jvp(lambda t: jmask.grad(loss)(t).todense(), (TABLE,), (along,))
    assert_close(forward, expected)


def test_in_a_shard_map_rows_are_arrays():
    """A caller may put those of devices side by side, where an index is that of a device."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    loss = lambda t, ids: jnp.sum(jnp.sin(t[ids].mean(1)))
    how = {"mesh": mesh, "in_specs": (spec(), spec("x")), "out_specs": spec("x")}
    grad = jax.shard_map(jmask.grad(loss), **how, check_vma=False)
    assert seen(grad, TABLE, BATCH.ids) is None
    assert count_of_sums(jax.jit(grad), TABLE, BATCH.ids) == 0
    found = jax.jit(grad)(TABLE, BATCH.ids)
    assert_close(found.todense(), jax.grad(loss)(TABLE, BATCH.ids))


def test_no_tracer_is_kept():
    names = (OUTSIDE, MASKED, JITTED, CHECKPOINT)
    with no_tracer_is_kept():
        for name in names:
            jax.jit(jmask.grad(loss_of(name)))(TABLE, BATCH)


@pytest.mark.of_cpus
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_tables(dtype):
    table = TABLE.astype(dtype)
    for name in (LINES, MASKED):
        loss = loss_of(name)
        with_value = jax.jit(jmask.value_and_grad(loss))
        assert count_of_sums(with_value, table, BATCH) == 1
        assert seen(jmask.grad(loss), table, BATCH).dtype == dtype
        value, gradient = with_value(table, BATCH)
        expected, dense = jax.value_and_grad(loss)(table, BATCH)
        np.testing.assert_allclose(value, expected, rtol=1e-3)
        assert gradient.values.dtype == dtype
        wide = (x.astype(jnp.float32) for x in (gradient.todense(), dense))
        np.testing.assert_allclose(*wide, 2e-2, 1e-2)
        # As it is summed for an array: each row is rounded, and their sums are wide.
        step = jax.jit(lambda *args, loss=loss: jmask.grad(loss)(*args).todense())
        summed = jmask.grad(loss)(table, BATCH).coalesce().todense()
        np.testing.assert_array_equal(step(table, BATCH), summed)


def test_weights_that_have_a_gradient_need_the_rows():
    def loss(params, batch):
        rows = params["t"][batch.ids]
        return jnp.sum(jnp.sin(jnp.einsum("bld,bl->bd", rows, params["w"])))

    params = {"t": TABLE, "w": jnp.cos(jnp.arange(B * L, dtype=jnp.float32)).reshape(B, L)}
    grad = jax.jit(jmask.grad(loss))
    assert count_of_sums(grad, params, BATCH) == 0
    gradient, dense = grad(params, BATCH), jax.grad(loss)(params, BATCH)
    assert_close(gradient["t"].todense(), dense["t"])
    assert_close(gradient["w"], dense["w"])


def test_rows_of_two_dimensions():
    loss = lambda t, x: jnp.sum(jnp.sin(jnp.einsum("blcd,bl->bcd", t[x.ids], x.weights)))
    grad = jax.jit(jmask.value_and_grad(loss))
    assert count_of_sums(grad, PLANES, BATCH) == 1
    assert_close(grad(PLANES, BATCH)[1].todense(), jax.grad(loss)(PLANES, BATCH))


def test_infinite_rows_under_a_mask():
    first_bag = lambda t, x: jnp.sum(where(t[x.ids], x).sum(1)[0])
    table = TABLE.at[IDS[0, 1]].set(jnp.inf)  # the first bag leaves it out
    assert_close(
        jax.jit(jmask.value_and_grad(first_bag))(table, BATCH)[0], first_bag(TABLE, BATCH)
    )
