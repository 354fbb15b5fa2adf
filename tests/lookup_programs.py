"""Losses that look a table up in every way that JAX programs do, and what is expected.

PROGRAMS    of a table (10, 4), by the capacity of the gradient, or dense
STACKED     of a stack of tables (M, V, D) and a batch of ids
SUMMED      of a table (50, 4), of which bags of rows are summed
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.sparse import BCOO
from jax.extend.core import Primitive
from jax.interpreters import ad

import jmask
from tests.expressions import functions, named, rows
from tests.sparse_arrays import coo, csr

V, D = 10, 4
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
IDS = jnp.array([1, 2, 1, -3, 15, -40])  # duplicates, wrapping and out-of-range ids
VALID = jnp.array([1, 2, 1])
# None in the first and last column, where padding would go if it were clamped.
ENTRIES = ([0, 0, 1, 2, 2, 2], [1, 7, 1, 2, 8, 3])
FEATURES = np.zeros((3, V), np.float32)
FEATURES[ENTRIES] = np.arange(1.0, 7)
COO, CSR = coo(FEATURES), csr(FEATURES)
PADDED, TRANSPOSED = coo(FEATURES, nse=9), coo(FEATURES.T)
_PARTS = [coo(row[None], nse=3) for row in FEATURES]
BATCHED = BCOO(
    (jnp.stack([x.data for x in _PARTS]), jnp.stack([x.indices for x in _PARTS])),
    shape=(3, 1, V),
)
FEATURES_IN_ROWS = jmask.RowSparse(
    [1, 7, 1, 2, 8, 3, -1], FEATURES.T[[1, 7, 1, 2, 8, 3, 0]] / 2, (V, 3)
)
square = lambda x: jnp.sum(jnp.sin(x) ** 2)
double_rows = lambda table, ids: 2 * table[ids]
norms = lambda x: jnp.linalg.norm(x, axis=1, keepdims=True)
# `vmap` copies what the branches of a `cond` read, also inside a scan.
branch = lambda f: lambda i, x: lax.cond(i > 5, f, lambda _: jnp.zeros(D), x)
either = lambda f, x: jax.vmap(branch(f))(IDS, x)
steps = lambda f, x: jax.vmap(lambda *pair: lax.map(lambda p: branch(f)(*p), pair))(
    IDS[None], x[None]
)


class Program(NamedTuple):
    """A loss of one table; `nse` is the capacity expected, None for a dense gradient."""

    loss: Callable[[jax.Array], jax.Array]
    nse: int | None
    falls_back: bool = False


def rnn(table, ids=VALID, wrap=lambda f: f):
    @wrap
    def cell(hidden, i):
        hidden = jnp.tanh(hidden + table[i])
        return hidden, hidden.sum()

    return lax.scan(cell, jnp.zeros(D), ids)[1].sum()


def referred(table, run):
    """Rows are summed in a reference; `run` calls what adds one."""
    total = jax.new_ref(jnp.zeros(D))

    def add(i):
        total[...] = jnp.sin(total[...]) + table[i]

    run(add)
    return square(total[...])


@jax.custom_vjp
def custom_lookup(table, ids):
    return table[ids]


custom_lookup.defvjp(
    lambda table, ids: (table[ids], (table, ids)),
    lambda saved, ct: (jnp.zeros_like(saved[0]).at[saved[1]].add(2 * ct), None),
)


@jax.custom_jvp
def custom_square(x):
    return x * x


custom_square.defjvp(lambda x, t: (x[0] * x[0], 3 * x[0] * t[0]))


# It is compiled for no platform: one whose branch it is in is not the one that runs.
_elsewhere = Primitive("elsewhere")
_elsewhere.def_abstract_eval(lambda x: x)
ad.deflinear(_elsewhere, lambda ct: [_elsewhere.bind(ct)])


def only_on_rocm(table):
    return square(_elsewhere.bind(table[IDS[:2]]))


def taken(table, mode):
    rows = jnp.take(table, IDS, axis=0, mode=mode)
    return square(jnp.where(jnp.isnan(rows), 0, rows))


# A name, what its gradient is (the capacity, dense, or dense and said so), and a loss of `t`.
# jax.numpy drops a lookup of nothing, so to JAX the table is not used at all.
_ROWS = """
    index | 6 | square(t[IDS])
    index, 2-D ids | 6 | square(t[IDS.reshape(2, 3)])
    index, narrow ids | 3 | square(t[VALID.astype(jnp.int8)])
    index, unsigned ids | 3 | square(t[VALID.astype(jnp.uint32)])
    index, NumPy ids | 3 | square(t[np.array([1, 2, 1])])
    index, no ids | dense | square(t[IDS[:0]])
    index with slice | 6 | square(t[IDS, :])
    take, default | 6 | taken(t, None)
    take, clip | 6 | taken(t, 'clip')
    take, wrap | 6 | taken(t, 'wrap')
    take, fill | 6 | taken(t, 'fill')
    at.get, clip | 6 | square(t.at[IDS].get(mode="clip"))
    at.get, fill | 6 | square(t.at[IDS].get(mode="fill", fill_value=0))
    at.get, drop | 6 | square(t.at[IDS].get(mode="promise_in_bounds"))
    scalar | 1 | square(t[IDS[0]])
    scalar, out of range | 1 | square(t[IDS[4]])
    dynamic_slice | 3 | square(lax.dynamic_slice_in_dim(t, IDS[4], 3))
    vmapped dynamic_slice | 18 |
        square(jax.vmap(lambda i: lax.dynamic_slice_in_dim(t, i, 3))(IDS))
    vmapped scalar | 6 | square(jax.vmap(lambda i: t[i])(IDS))
    vmapped index | 6 | square(jax.vmap(lambda i: t[i])(IDS.reshape(2, 3)))
    vmapped twice | 6 | square(jax.vmap(jax.vmap(lambda i: t[i]))(IDS.reshape(2, 3)))
    two lookups | 12 | square(t[IDS] * t[IDS[::-1]])
    lookup and slice | 8 | square(t[IDS]) + square(t[2:4])
    slice alone | dense | square(t[2:4]) + square(t[0])
    row of the result | 6 | square(t[IDS][0])
    masked rows | 6 | square(jnp.where((IDS > 1)[:, None], t[IDS], 0))
    scaled table | 6 | square((3.0 * t * VALID[1].astype(t.dtype))[IDS] / 2)
    negated table | 6 | square((1 - t - 1)[IDS])
    converted table | 3 | jnp.sum(t.astype(jnp.bfloat16)[VALID].astype(jnp.float32))
    reshaped table | 6 | square(t.reshape(V, 2, 2)[IDS])
    reversed table | 6 | square(t[::-1][IDS])
    stacked table | 12 | square(jnp.stack([t, 2 * t])[1, IDS])
    unstacked table | 6 | square(sum((x[VALID] for x in t.reshape(2, V // 2, D))))
    scanned table | 6 | square(lax.map(lambda x: x[VALID], t.reshape(2, V // 2, D)))
    scanned table and a number of all of it | 6 |
        square(lax.map(lambda x: x[VALID] * jnp.argmax(x).astype(x.dtype),
        t.reshape(2, V // 2, D)))
    some columns | 6 | square(t[IDS, 1:3])
    padded table | 6 | square(jnp.pad(t, ((1, 2), (0, 1)))[IDS])
    cut and padded table | 6 | square(lax.pad(t, 0.5, ((-1, 2, 0), (1, -1, 0)))[IDS])
    table padded inside | dense | square(lax.pad(t, 0.0, ((0, 0, 1), (0, 0, 0)))[IDS])
    expanded table | 6 | square(t[:, None, :][IDS])
    behind a barrier | 6 | square(lax.optimization_barrier(t)[IDS])
    behind a barrier, with an array | 4 |
        (lambda both: square(both[0][VALID] + both[1][None]))(
        lax.optimization_barrier((t, jnp.cos(t[3]))))
    row of padding | 6 | square(t.at[0].set(0)[IDS])
    rows set and moved | 12 | square(jnp.sin(t.at[IDS[1]].set(t[3]).at[-1].set(0.5))[IDS])
    row set out of range | 6 | square(t.at[V].set(jnp.nan)[IDS])
    several rows set | dense | square(t.at[VALID].set(0)[IDS])
    jit | 6 | jax.jit(lambda t: square(t[IDS]))(t)
    jit in jit | 6 | jax.jit(lambda t: square(jax.jit(double_rows)(t, IDS)))(t)
    checkpoint | 6 | jax.checkpoint(lambda t: square(t[IDS]))(t)
    checkpoint of jit | 6 | jax.checkpoint(jax.jit(lambda t: square(t[IDS])))(t)
    scan | 3 | rnn(t)
    scan of checkpoint | 3 | rnn(t, wrap=jax.checkpoint)
    checkpoint of scan | 3 | jax.checkpoint(rnn)(t)
    scan in scan | 9 | lax.scan(lambda c, i: (c + rnn(t + 0), i), 0.0, VALID)[0]
    reverse unrolled scan | 4 |
        square(lax.scan(lambda c, i: (jnp.cos(c + t[i]), c), t[0] * 0, VALID, reverse=True,
        unroll=2)[1])
    lookup before and in scan | 9 | rnn(t) + square(t[IDS])
    fori_loop | 3 | square(lax.fori_loop(0, 3, lambda k, c: c * t[VALID[k]], jnp.ones(D)))
    cond | 6 | lax.cond(IDS[0] > 0, lambda t: square(t[IDS]), lambda t: t[IDS[:2]].sum(), t)
    cond, other branch | 6 |
        lax.cond(IDS[0] < 0, lambda t: square(t[IDS]), lambda t: t[IDS[:2]].sum(), t)
    cond, one branch without | 6 |
        lax.cond(IDS[0] < 0, lambda t: square(t[IDS]), lambda t: 1.0, t)
    switch | 4 | lax.switch(VALID[1], [lambda t, n=n: square(t[IDS[:n]]) for n in (1, 2, 4)], t)
    branches by platform | 6 |
        lax.platform_dependent(t, rocm=only_on_rocm, default=lambda t: square(t[IDS]))
    scan in cond | 6 | lax.cond(IDS[0] > 0, rnn, lambda t: square(t[IDS]), t)
    cond in scan | 3 |
        lax.scan(lambda c, i: (lax.cond(i > 1, lambda: c + square(t[i]), lambda: c * t[0, 0]),
        None), 1.0, VALID)[0]
    cond in scan, rows | 3 |
        lax.scan(lambda c, i: (lax.cond(i > 1, lambda: c + square(t[i]), lambda: c), None), 1.0,
        VALID)[0]
    sparse features, coo | 6 | square(COO @ t)
    sparse features, padded | 9 | square(PADDED @ t)
    sparse features, csr | 6 | square(CSR @ t)
    sparse features, a column | 6 | square(COO @ t[:, 0])
    sparse features, transposed | 6 | square(TRANSPOSED.T @ t)
    sparse features, @ under vmap | 9 | square(jax.vmap(lambda x: x @ t)(BATCHED))
    sparse features, dot | 6 | square(jmask.dot(CSR, t))
    sparse features, dot of a column | 6 | square(jmask.dot(COO, t[:, 0]))
    sparse features, dot of transposed | 6 |
        square(jmask.dot(TRANSPOSED, t, transpose_a=True, forward_stype="default"))
    sparse features, dot from the left | 6 |
        square(jmask.dot(t, CSR, transpose_a=True, transpose_b=True))
    sparse features, dot of rows | 7 | square(jmask.dot(FEATURES_IN_ROWS, t, transpose_a=True))
    sparse features, dot in scan | 12 |
        lax.scan(lambda c, k: (c + square(k * jmask.dot(CSR, t)), None), 0.0, jnp.arange(1.0,
        3))[0]
    sparse features, dot under vmap | 9 | square(jax.vmap(lambda x: jmask.dot(x, t))(BATCHED))
    sparse features, recomputed | 6 | jax.checkpoint(lambda t: square(jmask.dot(CSR, t)))(t)
    custom_vjp | falls back | square(custom_lookup(t, VALID))
    custom_jvp | 6 | jnp.sum(custom_square(t[IDS]))
    relu and softmax | 12 | square(jax.nn.relu(t[IDS])) + square(jax.nn.softmax(t[IDS]))
    grad inside | 6 | square(jax.grad(lambda x: square(x))(t[IDS]))
    grad of a checkpoint inside | 3 |
        square(jax.grad(jax.checkpoint(lambda x: square(t[VALID] * x)))(jnp.ones((1, D))))
    second order | 3 | square(jax.grad(lambda t: square(t[VALID]))(t)[VALID])
    tied | falls back | square(t[IDS] @ t.T)
    tied in scan | falls back |
        square(lax.scan(lambda c, i: (jnp.tanh(t[i] + t.T @ (t @ c)), None), jnp.zeros(D),
        VALID)[0])
    penalised | falls back | square(t[IDS]) + jnp.sum(t ** 2)
    scaled by a dense array | 6 | square((t * jnp.arange(V, dtype=t.dtype)[:, None])[IDS])
    transposed lookup | 6 | square(t.T[:, IDS])
    transposed lookup, filled | 6 | square(jnp.nan_to_num(jnp.take(t.T, IDS, axis=1)))
    transposed lookup, columns by themselves | 6 | square(jax.vmap(lambda x: x[IDS], 1)(t))
    transposed lookup, columns of all rows | dense | square(t.T[VALID])
    columns | dense | square(t[:, VALID])
    entries | 3 | square(t[VALID, VALID])
    carried through scan | 3 |
        lax.scan(lambda c, i: ((c[0] + square(c[1][i]), c[1]), None), (0.0, t), VALID)[0][0]
    changed in scan | falls back |
        lax.scan(lambda c, i: ((c[0] + square(c[1][i]), 2 * c[1]), None), (0.0, t), VALID)[0][0]
    reference | 2 | referred(t, lambda add: [add(i) for i in VALID[:2]])
    reference in scan | 3 |
        referred(t, lambda add: lax.scan(lambda c, i: (c, add(i)), 0, VALID))
    reference in jit and cond | 1 |
        referred(t, lambda add: jax.jit(lambda i: lax.cond(i > 0, add, lambda i: None, i))(2))
    dense only | dense | square(t)
    dense only, in scan | dense | lax.scan(lambda c, i: (c * square(t), None), 1.0, VALID)[0]
    layers of a scan | dense |
        square(lax.scan(lambda c, w: (jnp.cos(c * w[None]), None), jnp.ones((2, D)), t)[0])
    layers of a checkpointed scan | dense |
        square(lax.scan(jax.checkpoint(lambda c, w: (jnp.cos(c + w), c)), jnp.ones(D), t)[1])
    layers of a scan, computed | dense | square(lax.map(lambda w: jnp.sin(w) * w, 2 * t))
    layers of a scan, looked up | falls back |
        square(lax.map(lambda w: jnp.sin(w) * w, t)) + square(t[IDS])
    parts of a scan, looked up | falls back |
        square(lax.map(lambda w: jnp.sin(w) @ w.T, t.reshape(5, 2, D))) + square(t[IDS])
    computed, each entry | 6 | square(jax.nn.sigmoid(t)[IDS])
    computed, a column | 6 | square(jnp.exp(t[:, :1])[IDS])
    computed, each row | 12 | square((t / norms(t))[IDS] + 1)
    computed, softmax | 12 | square(jax.nn.softmax(t)[IDS])
    computed, centered | 12 | square((t - t.mean(-1, keepdims=True))[IDS])
    computed, by a layer | 6 | square((t @ jnp.linspace(-1, 1, D * 3).reshape(D, 3))[IDS])
    computed, by a layer that is mapped | 6 |
        square(jax.vmap(lambda x: jnp.linspace(-1, 1, D * 3).reshape(3, D) @ x)(t)[IDS])
    computed, by layers that are mapped | 6 |
        square(jax.vmap(lambda x: jnp.eye(2, D) @ jnp.tanh(jnp.eye(D) @ x))(t)[IDS])
    computed, of columns | 6 | square((2 * jnp.exp(t.T)).T[IDS])
    computed, with other rows | 12 | square((t + jnp.flip(t, 0))[IDS])
    computed, of parts | 12 |
        square(jnp.einsum("m,mvd->vd", jnp.array([0.5, -2]), t.reshape(2, V // 2, D))[IDS])
    computed, entries | 6 | square(jnp.exp(t.reshape(-1))[IDS])
    repeated | 6 | square(jnp.repeat(t, 2, 0)[IDS])
    broadcast | 6 | square(jnp.broadcast_to(t, (2, V, D))[1][IDS])
    broadcast along rows | 6 | square(jnp.broadcast_to(t[:, None], (V, 2, D))[IDS])
    broadcast, a column | 6 | square(jnp.broadcast_to(t[:, 0], (2, V))[1][IDS])
    tiled | 6 | square(jnp.tile(t, (2, 1))[IDS])
    tiled columns | 6 | square(jnp.tile(t, (1, 2))[IDS])
    tiled in front | 6 | square(jnp.tile(t, (2, 1, 1))[1][IDS])
    transposed twice | 6 | square(t.T.T[IDS])
    frozen rows | 6 |
        square(jnp.where(jnp.arange(V)[:, None] < 5, lax.stop_gradient(t), t)[IDS])
    vmapped cond | 6 | square(either(lambda i: t[i], IDS))
    vmapped cond in scan | 6 | square(steps(lambda i: t[i], IDS))
    unused | dense | square(IDS.astype(jnp.float32))
    scatter of the model | dense | square(t * jnp.zeros((V, D)).at[VALID].add(jnp.ones((3, D))))
"""


def read(text):
    programs = {}
    for name, kind, code in rows(text):
        ((_, loss),) = functions("t", globals())(code).items()
        nse = int(kind) if kind.isdigit() else None
        programs[name] = Program(loss, nse, kind == "falls back")
    return programs


PROGRAMS = read(_ROWS)


# --- stacks of tables ---------------------------------------------------------------------


class Batch(NamedTuple):
    """Ids of rows, some out of range, and ids of tables."""

    ids: jax.Array
    beyond: jax.Array
    tables: jax.Array


BATCH = Batch(jnp.array([1, 2, 1]), jnp.array([1, -2, 9]), jnp.array([0, 2, 1]))
# Sizes that differ, and sizes that coincide.
STACKS = [
    jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    for shape in ((3, 7, 2), (3, 3, 3))
]
take = lambda t, ids, **how: jnp.nan_to_num(jnp.take(t, ids, **how))


def sum_of_sines(lookup, batch=BATCH):
    """The sum of the sines, with weights, of what is finite among all that is looked up."""

    def loss(t, x=batch):
        total = jnp.float32(0)
        for y in jax.tree.leaves(lookup(t, x)):
            y = y.astype(jnp.float32)
            weights = 1 + jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
            total += jnp.sum(jnp.where(jnp.isfinite(y), jnp.sin(y), 0) * weights)
        return total

    return loss


# Each has a gradient by rows of the stack.
_STACKED = """
    pairs | t[x.tables, x.ids]
    pairs beyond | t[x.tables, x.beyond]
    an outer product of ids | t[x.tables[:, None], x.ids[None]]
    one table | t[1, x.ids]
    the last table | t[-1, x.beyond]
    one row of some tables | t[x.tables, 1]
    a table, then rows | t[1][x.ids]
    a table that is traced, then rows | t[x.tables[1]][x.ids]
    dynamic_index_in_dim | lax.dynamic_index_in_dim(t, x.ids[0], 0, False)[x.ids]
    the same rows of all | t[:, x.ids]
    take along 1 | jnp.take(t, x.ids, axis=1)
    take, clipped | take(t, x.beyond, axis=1, mode="clip")
    take, filled | take(t, x.beyond, axis=1, mode="fill")
    take_along_axis | jnp.take_along_axis(t, jnp.broadcast_to(x.ids[None, :2, None],
        (t.shape[0], 2, t.shape[2])), 1)
    vmap over tables | jax.vmap(lambda table: table[x.ids])(t)
    vmap over both | jax.vmap(lambda table, i: table[i])(t, jnp.stack([x.ids] * 3))
    vmap of take | jax.vmap(lambda a: take(a, x.beyond, axis=0))(t)
    vmap over ids | jax.vmap(lambda i: t[1, i])(x.ids)
    one table of all | t.reshape(-1, t.shape[2])[x.ids * 2]
    swapped | t.swapaxes(0, 1)[x.ids]
    entries | t[x.tables, x.ids, x.ids % 2]
    columns, then rows | t[0][:, :1][x.ids]
    split, then rows | jnp.split(t[0], t.shape[2], 1)[0][x.ids]
    rows, then rows | t[0][1:][x.ids]
    every other row, then rows | t[:, ::2][:, x.ids % 2]
    another axis, then rows | t[0][None][0][x.ids]
    tables end to end | jnp.concatenate([t[0], t[1]])[x.ids * 2]
    reversed | t[::-1][x.tables]
    reversed rows | t[:, ::-1][1, x.ids]
    reversed columns | t[..., ::-1][x.tables, x.ids]
    stacked | jnp.stack([t[0], t[1]])[x.tables % 2, x.ids]
    stacked behind | jnp.stack([t[0], 2 * t[1]], 1)[x.ids, 1]
    stacked last | jnp.stack([t[0], t[1]], 2)[x.beyond]
    table by table | [table[x.ids] for table in t]
    unstacked along 1 | jnp.unstack(t, axis=1)[1][x.tables]
    some columns | t[1, x.ids, :1]
    some columns beyond | t[x.tables, x.beyond, 1:]
    some columns of all | t[:, x.ids, -1:]
    some columns of a row | t[1, x.ids[0], :1]
    some columns of a traced row | t[x.tables[1], x.ids[1], 1:]
    some columns, filled | t[1].at[x.beyond, 1:].get(mode="fill", fill_value=0)
    some columns, clipped | t.at[x.tables, x.beyond, 1:].get(mode="clip")
    some rows and columns | t[x.tables, 1:3, :1]
    windows | jax.vmap(lambda i: lax.dynamic_slice(t[1], (i, 1), (1, 1)))(x.beyond)
    a scan over tables | lax.scan(lambda c, a: (c, a[x.ids]), 0, t)[1]
    a scan over tables, reversed | lax.scan(lambda c, a: (jnp.sin(c + a[x.beyond]), c),
        jnp.zeros((3, t.shape[2])), t, reverse=True)[0]
    a scan over tables and ids |
        lax.scan(lambda c, a: (c + jnp.sum(a[0][a[1]]), a[0][a[1], :1]), 0.0, (t, x.tables))
    a map over tables | lax.map(lambda a: a[x.ids] * a[x.beyond], t)
    a checkpointed scan over tables |
        lax.scan(jax.checkpoint(lambda c, a: (c, jnp.sin(a[x.ids]))), 0, t)[1]
    scans over tables | lax.scan(lambda c, a: (c, lax.map(lambda b: b[x.ids % 2], a)), 0,
        jnp.stack([t, 2 * t]))[1]
    a scan over tables and rows of all | (lax.map(lambda a: a[x.ids], t), t[:, x.ids])
    a scan over tables in a cond |
        lax.cond(x.ids[0] > 0, lambda: lax.map(lambda a: a[x.ids], t), lambda: t[:, x.tables])
    a scan | lax.scan(lambda c, i: (c, t[1, i]), 0, x.ids)[1]
    a cond | lax.cond(x.ids[0] > 0, lambda: t[1, x.ids], lambda: t[2][x.beyond])
    a cond of different rows |
        lax.cond(x.ids[0] > 0, lambda: t[1, x.ids], lambda: t[x.tables][:, 0])
    checkpoint | jax.checkpoint(lambda t: jnp.sin(t[x.tables, x.ids]))(t)
    several | (t[1][x.ids], t[:, x.ids], t[x.tables], t[x.tables, x.ids])
    whole tables | t[x.tables]
    cast | t.astype(jnp.bfloat16)[x.tables, x.ids].astype(jnp.float32)
    scaled | (2 * t)[x.tables, x.ids] / 3
"""
STACKED = {
    name: sum_of_sines(lookup) for name, lookup in named("t, x", globals())(_STACKED).items()
}


# --- sums of rows ------------------------------------------------------------------------

B, L = 6, 5  # bags, and rows in each
_rng = np.random.default_rng(0)
MANY_ROWS, MIXED = (
    jnp.asarray(_rng.normal(size=shape), jnp.float32) for shape in ((50, D), (B, B * L))
)
_ids = _rng.integers(0, 50, (B, L))
_ids[2] = _ids[2, 0]
PADDING = int(_ids[0, 0])
_beyond = _ids.copy()  # ids outside of the table; none in a line wraps to the line's others
_beyond[0, 1], _beyond[3, 3] = 50, -53
_weights = jnp.asarray(_rng.normal(size=(B, L)), jnp.float32)
_mask = _rng.random((B, L)) < 0.7
_mask[0, 1] = False
OFFSETS, SEGMENTS = jnp.array([0, 3, 3, 10, 20, 28]), jnp.repeat(jnp.arange(B), L)


class Bags(NamedTuple):
    """An argument of each program, so that nothing in it is known."""

    ids: jax.Array
    beyond: jax.Array
    weights: jax.Array
    wild: jax.Array  # with zeros and infinity
    mask: jax.Array


BAGS = Bags(
    *map(jnp.asarray, (_ids, _beyond)),
    _weights,
    _weights.at[1].set(0).at[4, 4].set(jnp.inf),
    jnp.asarray(_mask),
)
where = lambda rows, x: jnp.where(x.mask[..., None], rows, 0)
weighted = lambda rows, x: rows * x.wild[..., None]
beyond = lambda table, x, **mode: jnp.take(table, x.beyond, axis=0, **mode)
bag = lambda table, x, **how: jmask.embedding_bag(table, x.ids, **how)
flat_bag = lambda table, x, **how: jmask.embedding_bag(table, x.ids.reshape(-1), **how)


def beside(rows, count, x):
    """Dot products of the first rows of each line, their sum, with the others."""
    first = rows[:, :count].sum(1, keepdims=True) if count > 1 else rows[:, :1]
    return jnp.sin((first * rows[:, count:]).sum(2)) * x.weights[:, count:]


helper = jax.jit(lambda table, ids, w: jnp.sum(table[ids] * w[..., None], axis=-2))
# In a jitted step the arrays that a jitted function makes are seen as well.
pooled = jax.jit(lambda rows, w: (rows * w[..., None]).sum(1) / w.sum(1)[:, None])
_in_bags = functions("t, x", globals())
# Summed by one equation; backwards rows are known as those of the sums.
BAG_SUMS = _in_bags("""
    bag(t, x); bag(t, x, padding_id=PADDING, combiner="mean");
    bag(t, x, weights=x.weights, combiner="sqrtn"); flat_bag(t, x, offsets=OFFSETS);
    flat_bag(t, x, offsets=OFFSETS, weights=x.weights.reshape(-1));
    flat_bag(t, x, segment_ids=SEGMENTS, num_segments=B, combiner="mean");
    jax.checkpoint(lambda t: jnp.sin(bag(t, x)))(t)
""")
# Written by hand, the same.
BAG_SUMS |= _in_bags("""
    t[x.ids].sum(1); t[x.ids].mean(-2); t[x.ids].sum((0, 1))[None]; t[x.ids,].sum(1);
    t[x.ids.reshape(B, L, 1)].sum((1, 2)); t[x.ids].sum(1, keepdims=True)[:, 0];
    t[x.beyond].sum(1); jnp.take(t, x.ids, axis=0).sum(1); beyond(t, x).sum(1);
    beyond(t, x, mode="fill", fill_value=0).mean(1); weighted(t[x.ids], x).sum(1);
    (x.wild[..., None] * t[x.ids]).sum(1); weighted(beyond(t, x), x).sum(1);
    (t[x.ids] * x.mask[..., None].astype(t.dtype)).sum(1); helper(t, x.ids, x.wild);
    t.at[x.ids].get(mode="promise_in_bounds").sum(1); t.at[x.beyond].get(mode="clip").sum(1);
    t[x.ids].sum(1).astype(jnp.bfloat16).astype(jnp.float32);
    (t[x.ids].mean(1), t[x.ids[:, 0]]); (weighted(t[x.ids], x).sum(1), t[x.ids[:, 0]]);
    (jnp.take(t, x.ids, axis=0).sum(1), t[:B]); jax.vmap(lambda i: t[i].mean(0))(x.ids);
    jax.checkpoint(lambda t: jnp.sin(t[x.ids].mean(1)))(t);
    (jax.lax.convert_element_type(t[x.ids], jnp.float32) * x.weights[..., None]).sum(1)
""")
# Rows that are read as they are, and whose cotangents are written.
SUMS_OF_ROWS = _in_bags("""
    t[x.ids.T].sum(0); t[x.ids.reshape(L, B, 1)].sum((0, 2));
    t[x.ids.reshape(-1)].reshape(B, L, D).sum(1);
    where(t[x.ids], x).sum(1); where(beyond(t, x), x).sum(1);
    weighted(where(t[x.ids], x), x).sum(1); weighted(weighted(t[x.ids], x), x).sum(1);
    jnp.einsum("bld,bl->bd", t[x.ids], x.wild); jnp.einsum("bl,bld->bd", x.weights, t[x.ids]);
    jnp.einsum("bl,bld->bd", x.wild, where(beyond(t, x), x));
    jnp.einsum("lb,lbd->db", x.wild.T, t[x.ids.T]).T; (x.wild[:, None, :] @ t[x.ids])[:, 0];
    jax.vmap(lambda w, i: w @ t[i])(x.wild, x.ids); pooled(t[x.ids], x.weights ** 2);
    jax.jit(jax.jit(pooled))(t[x.ids], 1 + x.weights ** 2);
    (jnp.einsum("bl,bld->bd", x.weights, t[x.ids]), where(t[x.ids], x).sum(1), t[x.ids[:, 1]]);
    t[x.ids[:, 0]]; (t[x.ids][:, :2].sum(1), (t[x.ids] * x.weights[..., None])[:, 2:].sum(1));
    (lambda rows: rows.sum(1) + rows.max(1))(t[x.ids]); MIXED @ t[x.ids.reshape(-1)];
    (lambda rows: rows.sum(1) ** 2 - (rows ** 2).sum(1))(t[x.ids]);
    jnp.einsum("blx,blx->bx", t[x.ids], t[x.ids] * 0.5); bag(t, x, combiner="max");
    (lambda rows: (rows[:, :3].mean(1), rows[:, 2:].mean(1)))(t[x.ids]);
    t[x.ids][..., 1:].mean((1, 2))[:, None];
    jax.ops.segment_sum(t[x.ids.reshape(-1)], SEGMENTS, B);
    jax.ops.segment_sum(-t[x.ids.reshape(-1)] * x.weights.reshape(-1, 1), SEGMENTS, B) / 3;
    jnp.einsum("blx,bx->bl", t[x.ids], MIXED[:, :D]) * x.weights; t[x.ids][:, 1:].mean(1);
    t[x.ids].astype(jnp.bfloat16).sum(1).astype(jnp.float32); beside(t[x.ids], 1, x);
    beside(t[x.ids[:, ::-1]], 4, x); jnp.where(x.mask[..., None], t[x.ids], 1.0).sum(1);
    beyond(t, x, mode="fill", fill_value=2.0).sum(1); where(weighted(t[x.ids], x), x).sum(1);
    jax.lax.cond(x.mask[0, 0], lambda: t[x.ids].sum(1), lambda: t[x.ids[:, :2]].mean(1))
""")
# Rows of one lookup are summed, of another they are written: as many as the sums need.
BOTH = _in_bags("(t[x.ids].mean(1), jnp.sin(t[x.ids.reshape(-1)]))")
# Sums of 16 bits, which XLA rounds less often than operations that are run one by one.
NARROW = _in_bags("""
    (t.astype(jnp.bfloat16)[x.ids] * x.weights[..., None].astype(jnp.bfloat16)).sum(1);
    jax.lax.reduce(t.astype(jnp.bfloat16)[x.ids], jnp.bfloat16(0), jax.lax.add, (1,))
""")
SUMMED = {
    name: sum_of_sines(lookup, BAGS)
    for table in (BAG_SUMS, SUMS_OF_ROWS, NARROW, BOTH)
    for name, lookup in table.items()
}
