"""Losses that look a table up in every way that JAX programs do, and what is expected."""

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
from tests.expressions import functions, rows
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
    some columns | 6 | square(t[IDS, 1:3])
    padded table | 6 | square(jnp.pad(t, ((1, 2), (0, 1)))[IDS])
    cut and padded table | 6 | square(lax.pad(t, 0.5, ((-1, 2, 0), (1, -1, 0)))[IDS])
    expanded table | 6 | square(t[:, None, :][IDS])
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
    second order | 3 | square(jax.grad(lambda t: square(t[VALID]))(t)[VALID])
    tied | falls back | square(t[IDS] @ t.T)
    tied in scan | falls back |
        square(lax.scan(lambda c, i: (jnp.tanh(t[i] + t.T @ (t @ c)), None), jnp.zeros(D),
        VALID)[0])
    penalised | falls back | square(t[IDS]) + jnp.sum(t ** 2)
    scaled by a dense array | 6 | square((t * jnp.arange(V, dtype=t.dtype)[:, None])[IDS])
    transposed lookup | dense | square(t.T[:, IDS])
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
