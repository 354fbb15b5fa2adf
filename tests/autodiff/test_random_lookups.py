"""Random programs between a lookup and a loss, where sizes coincide and thresholds are drawn.

A table is looked up, under some transformations, the rows go through some operations, and the
loss is a sum: the gradient, and a step of SGD and Adam, are those of the dense gradient. Sizes
are 1, 2 or 3, so that a dimension of ids, of bags and of rows is often as long as another; what
decides which way is taken for large arrays is drawn too, so that every way is taken here.
"""

import contextlib
import warnings
from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax import lax

import jmask
from jmask._kernels import tuning
from tests.compilations import work
from tests.expressions import functions
from tests.oracle import assert_close, densified
from tests.sampling import few_or_many

# --- programs ----------------------------------------------------------------------------

# Each takes a table (V, D) and ids (B, L), and gives rows (B, L, D).
LOOKUPS = functions("t, ids", globals())("""
    t[ids]; jnp.nan_to_num(jnp.take(t, ids, axis=0));
    jnp.take(t, ids, axis=0, mode="fill", fill_value=0); jnp.take(t, ids, axis=0, mode="clip");
    t[ids.reshape(-1)].reshape(*ids.shape, t.shape[1]); jax.vmap(lambda i: t[i])(ids);
    t[ids.T].swapaxes(0, 1); jnp.stack([t[ids[:, i]] for i in range(ids.shape[1])], 1);
    jax.vmap(jax.vmap(lambda i: lax.dynamic_slice_in_dim(t, i, 1)[0]))(ids);
    (2.5 * t)[ids] / 2; t.astype(jnp.bfloat16)[ids].astype(jnp.float32);
    lax.scan(lambda c, i: (c + t[i], c * t[i]), 1 + t[ids[0]], ids)[1];
    lax.cond(ids[0, 0] > 0, lambda: t[ids], lambda: jnp.sin(t[ids[:1]]) + 0 * t[ids[::-1]])
""")
NEEDING_ALL = functions("t, ids", globals())("""
    t[ids] * t[None, :1]; t[ids] @ t.T @ t; jnp.full((*ids.shape, t.shape[1]), t.sum())
""")
LOOKUPS |= NEEDING_ALL
# Each takes a function of a table and ids, and gives such a function.
WRAPPERS = {"jit": jax.jit, "checkpoint": jax.checkpoint} | functions("f", globals())("""
    lambda t, ids: lax.cond(ids[0, 0] > 1, f, lambda t, ids: 0.5 * f(t, ids), t, ids);
    lambda t, ids: lax.cond(ids[0, 0] > 1, f, lambda t, ids: 0 * f(0 * t, ids) + 1, t, ids);
    lambda t, ids: lax.scan(
        lambda c, k: (c + f(t, ids + k), None), jnp.zeros(f(t, ids).shape), jnp.arange(2)
    )[0];
    lambda t, ids: lax.scan(
        lambda c, k: ((c[0] + f(c[1], ids), c[1]), k), (f(t, ids), t), jnp.arange(2)
    )[0][0];
    lambda t, ids: jax.vmap(f, in_axes=(None, 0))(t, jnp.stack([ids, ids[::-1]])).sum(0)
""")
slices_again = lambda x, w: jnp.concatenate([x[:, :1] * w[:, :1, None], x[:, 1:]], 1)
# Each takes rows (B, L, D) and weights (B, L), and gives such rows.
LAYERS = functions("x, w", globals())("""
    x * w[..., None]; w[..., None] * x; -1.5 * x / 2; x * w.sum(); -x;
    jnp.where(w[..., None] > 0, x, 0); jnp.where((w > 0)[:, :, None], 0, x);
    jnp.where(w[0, 0] > 0, x, 0); x * x; jnp.sin(x); jax.nn.gelu(x);
    x * jnp.arange(1.0, x.shape[2] + 1)[None, None]; x + x.sum(1, keepdims=True);
    x * x.sum(1, keepdims=True); x * x[..., :1]; x - x.mean((0, 1), keepdims=True);
    slices_again(x, w); (x.swapaxes(0, 1) * w.T[..., None]).swapaxes(0, 1);
    (x.reshape(-1, x.shape[2]) * w.reshape(-1, 1)).reshape(x.shape); jnp.roll(x, 1, axis=1);
    x @ jnp.ones((x.shape[2], x.shape[2])); x.astype(jnp.float16).astype(jnp.float32);
    jax.checkpoint(lambda x: x * w[..., None])(x);
    jax.jit(lambda x: jnp.cos(x) * w[..., None])(x);
    lax.scan(lambda c, r: (c, r * 2.0), 0, x)[1]
""")
# Each takes rows and weights, and gives what is summed.
ENDS = functions("x, w", globals())("""
    x; x.sum(1); x.mean(1); x.sum(0); x.sum((0, 1)); x.sum(-1); x.sum(-1) * w;
    jnp.einsum('bld,bl->bd', x, w); jnp.einsum('bld,bl->ld', x, w); (w[:, None] @ x)[:, 0];
    jnp.einsum('bld,bmd->blm', x, x); (x[:, :1] * x[:, 1:]).sum(-1); x.max(1);
    jnp.linalg.norm(x + 1.0, axis=-1);
    x[:, 0] + jmask.embedding_bag(x[0], jnp.zeros((2, 2), int))[:1]
""")
# The same of rows and a layer (1, D), as the last of a model.
HEADS = functions("x, head", globals())("""
    x.sum(1) @ head.T; head @ x[0].mean(0); head @ jnp.tanh(x[0, 0]);
    jnp.ones((1, 2)) @ jnp.tanh(jnp.concatenate([head, 2 * head]) @ x[0, 0]);
    head[0] @ x[0, 0]; head @ x[0, 0] + head[:, 0]; x.sum(1) @ head.T + head[:, :1];
    x[0] + head
""")
# Each takes what an end gives. That of a sum has a cotangent which is one number everywhere.
LOSSES = functions("y", globals())(
    "jnp.sum(jnp.sin(y)); jnp.sum(y); jnp.mean(y); 3.0 * jnp.sum(y) / 2"
)


@st.composite
def programs(draw):
    size = st.integers(1, 3)
    sizes = draw(st.tuples(size, size, size, size))
    wrapped = st.tuples(
        st.sampled_from(sorted(LOOKUPS)),
        st.just([]) | st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=3),
    )
    lookups = draw(st.lists(wrapped, min_size=1, max_size=2))
    layers = draw(st.lists(st.sampled_from(sorted(LAYERS)), max_size=3))
    end, loss = (draw(st.sampled_from(sorted(table))) for table in (ENDS | HEADS, LOSSES))
    return sizes, lookups, layers, end, loss, draw(st.integers(0, 99))


def build(program):
    (v, b, n, d), lookups, layers, end, total_of, seed = program
    rng = np.random.default_rng(seed)
    table = jnp.asarray(rng.normal(size=(v, d)), jnp.float32)
    ids = jnp.asarray(rng.integers(-v - 1, v + 2, (b, n)))
    weights = jnp.asarray(rng.normal(size=(b, n)), jnp.float32)

    head = jnp.asarray(rng.normal(size=(1, d)), jnp.float32)

    def loss(t, weights, head):
        total = 0.0
        for lookup, wrappers in lookups:
            of_ids = LOOKUPS[lookup]
            for wrapper in wrappers:
                of_ids = WRAPPERS[wrapper](of_ids)
            x = of_ids(t, ids)
            for layer in layers:
                x = LAYERS[layer](x, weights)
            end_of = HEADS[end] if end in HEADS else ENDS[end]
            total += LOSSES[total_of](end_of(x, head if end in HEADS else weights))
        return total

    return loss, table, weights, head


# --- thresholds --------------------------------------------------------------------------

THRESHOLDS = {
    "REPEATS": (1, 2),
    "SMALL_ROWS": (0, 2**21),
    "BLOCK_ROWS": ((2, 2), (7, 7)),
    "COLUMNS": (0, 64),
    "DENSE_ROWS_FOR_EACH_LOOKUP": (0, 1.5),
}
thresholds = st.tuples(*map(st.sampled_from, THRESHOLDS.values()))


@contextlib.contextmanager
def set_to(values):
    with mock.patch.multiple(tuning, **dict(zip(THRESHOLDS, values, strict=True))):
        yield


OPTIMIZERS = jmask.sgd(0.5), jmask.adam(0.5), jmask.lazy(optax.adagrad(0.5))
stepped = lambda tx, gradient, table: jmask.apply_gradients(
    tx, gradient, tx.init(table), table
)[0]


def compare(program, values):
    loss, table, *layers = build(program)
    expected = jax.value_and_grad(loss, (0, 1, 2))(table, *layers)
    low = "float16" in str(program[1:3])
    tolerance = {"rtol": 2e-2 if low else 1e-4, "atol": 2e-3 if low else 1e-5}
    with set_to(values):
        result = jmask.value_and_grad(loss, (0, 1, 2))(table, *layers)
        assert_close(densified(result), expected, **tolerance)

        @jax.jit
        def steps(table):
            value, gradient = jmask.value_and_grad(loss)(table, *layers)
            new = [stepped(tx, gradient, table) for tx in OPTIMIZERS]
            return value, gradient, jmask.todense(gradient), new

        value, gradient, dense, new = steps(table)
    value_and_gradient = expected[0], expected[1][0]
    assert_close((value, densified(gradient)), value_and_gradient, **tolerance)
    assert_close(dense, expected[1][0], **tolerance)
    if not isinstance(gradient, jmask.RowSparse):
        return
    # The same step of the same rows as an array: what is known of them changes nothing.
    values, leading = gradient.values, gradient.leading
    rows = jmask.RowSparse(gradient.indices, values, gradient.shape, leading=leading)
    for tx, table_after in zip(OPTIMIZERS, new, strict=True):
        after = stepped(tx, rows, table)
        # A gradient of 0 up to rounding has a sign, and so has the first step of Adam.
        sure = np.abs(rows.todense()) > 1e-4
        np.testing.assert_allclose(
            np.where(sure, table_after, 0), np.where(sure, after, 0), rtol=2e-2, atol=1e-3
        )


def check(program, values):
    """Programs of lookups alone must not become dense; others may, and say so."""
    with warnings.catch_warnings():
        if any(wrappers or lookup in NEEDING_ALL for lookup, wrappers in program[1]):
            warnings.simplefilter("ignore", jmask.StorageFallbackWarning)
        compare(program, values)


@pytest.mark.dtype_promotion
@few_or_many(3, 80)
def test_random_lookups(count):
    settings(max_examples=count)(given(programs(), thresholds)(check))()


@pytest.mark.dtype_promotion
@pytest.mark.sampled
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (3, 1, 2, 2), (3, 2, 2, 1)], ids=str)
@pytest.mark.parametrize("total", LOSSES)
@pytest.mark.parametrize("end", ENDS | HEADS)
def test_each_end(end, total, sizes):
    """Every end before every loss, which random programs of three layers seldom meet."""
    check(
        (sizes, [("t[ids]", [])], [], end, total, 0),
        [small for small, _ in THRESHOLDS.values()],
    )


# --- the time of a trace -----------------------------------------------------------------

shape = jax.ShapeDtypeStruct
DEEP = functions("x, w", globals())("""
    jax.nn.gelu(x); jax.nn.silu(x); x * x * 0.5; x * w[:, None];
    jnp.where(w[:, None] > 0, x, 0); jax.nn.relu(x @ jnp.ones((64, 64)) + 1.0);
    jax.jit(lambda x: jnp.tanh(x) * x)(x);
    (x - x.mean(-1, keepdims=True)) / (1 + x.var(-1, keepdims=True));
    (x.astype(jnp.bfloat16) * 2).astype(jnp.float32);
    jnp.concatenate([x[:, :32] * 2, x[:, 32:]], 1);
    x + x.reshape(-1, 16, 64).sum(1).repeat(16, 0)
""")


def deep(layer, depth, ids):
    def loss(t, ids, w):
        x = t[ids]
        for _ in range(depth):
            x = layer(x, w)
        return jnp.sum(x)

    return loss, shape((1000, 64), "float32"), shape((ids,), "int32"), shape((ids,), "float32")


def recurrent(depth):
    def loss(params, ids):
        def cell(h, i):
            for w in params[1:]:
                h = jnp.tanh(h @ w + params[0][i])
            return h, None

        return jnp.sum(lax.scan(cell, jnp.zeros(64), ids)[0])

    return loss, [shape((n, 64), "f4") for n in (1000, *[64] * depth)], shape((16,), "i4")


def weights(depth):
    """Layers whose weights are as large as tables, and are none."""

    def loss(params, ids):
        x = params[0][ids]
        for w in params[1:]:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    many = [shape((1024, 1024), "f4")] * depth
    return loss, [shape((10_000, 1024), "f4"), *many], shape((16,), "i4")


def tied(depth):
    """Tables that are looked up, and of which all is needed: each is warned of."""

    def loss(tables, ids):
        return sum(jnp.sum(t[ids] ** 2) + jnp.sum(t) for t in tables)

    return loss, [shape((10_000, 64), "f4")] * depth, shape((16,), "i4")


def work_of_a_trace(grad, loss, *shapes):
    run = jax.jit(lambda *args: jax.tree.leaves(grad(loss)(*args)))
    return work(run.trace, *shapes)


def check_that_a_trace_is_linear(program, depth, times=2.0):
    for grad in (jax.grad, jmask.grad):  # what is imported and cached at the first call
        work_of_a_trace(grad, *program(2))
    ours, twice = (work_of_a_trace(jmask.grad, *program(n)) for n in (depth, 2 * depth))
    assert twice < 2.3 * ours
    assert ours < times * work_of_a_trace(jax.grad, *program(depth))


@pytest.mark.sampled
@pytest.mark.parametrize("ids", [16, 2**16])
@pytest.mark.parametrize("name", DEEP)
def test_a_trace_is_linear_and_no_more_than_twice_that_of_jax(name, ids):
    check_that_a_trace_is_linear(lambda depth: deep(DEEP[name], depth, ids), 50)


def test_a_scan_that_carries_many_gradients_is_traced_in_linear_time():
    check_that_a_trace_is_linear(recurrent, 20)


def test_many_large_weights_are_traced_in_linear_time():
    check_that_a_trace_is_linear(weights, 100)


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
def test_many_warnings_are_found_in_linear_time():
    check_that_a_trace_is_linear(tied, 30, times=3.0)


def test_600_products_are_no_recursion():
    work_of_a_trace(jmask.grad, *deep(lambda x, w: x * w[:, None], 600, 16))


# --- one structure -----------------------------------------------------------------------


def test_gradients_of_one_table_have_one_structure():
    """Those of bags, of rows and of dot products meet in cond, scan and tree.map."""
    table, ids = jnp.ones((50, 4)), jnp.arange(12).reshape(3, 4)
    losses = [
        lambda t: jnp.sum(jnp.sin(t[ids].mean(1))),
        lambda t: jnp.sum(jnp.sin(t[ids])),
        lambda t: jnp.sum(jmask.embedding_bag(t, ids) ** 2),
        lambda t: jnp.sum(t[ids].sum(-1)),
    ]
    grads = [jmask.grad(loss) for loss in losses]
    ways = lambda grad: (grad(table), jax.jit(grad)(table), jax.eval_shape(grad, table))
    assert len({jax.tree.structure(x) for grad in grads for x in ways(grad)}) == 1
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(grads[0](table))]
    assert paths == [".indices", ".values"]

    @jax.jit
    def run(table, which):
        one = lax.switch(which, grads, table)
        first, second = (grad(table) for grad in grads[:2])
        mixed = jax.tree.map(lambda x, y: jnp.where(which > 0, x, y), first, second)
        carried, _ = lax.scan(lambda g, _: (grads[0](table), None), second, None, 2)
        return [jmask.todense(x) for x in (one, mixed, carried)]

    expected = [jax.grad(loss)(table) for loss in losses]
    for which in range(len(losses)):
        found = run(table, which)
        meant = [expected[i] for i in (which, 0 if which else 1, 0)]
        assert_close(found, meant, rtol=1e-6)
