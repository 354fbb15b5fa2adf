"""Losses that look a table up in every way that JAX programs do, and what is expected."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.sparse import BCOO

import jmask
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


class Program(NamedTuple):
    """A loss of one table; `nse` is the capacity expected, None for a dense gradient."""

    loss: Callable[[jax.Array], jax.Array]
    nse: int | None
    falls_back: bool = False


def square(x):
    return jnp.sum(jnp.sin(x) ** 2)


def rnn(table, ids=VALID, wrap=lambda f: f):
    @wrap
    def cell(hidden, i):
        hidden = jnp.tanh(hidden + table[i])
        return hidden, hidden.sum()

    return lax.scan(cell, jnp.zeros(D), ids)[1].sum()


def double_rows(table, ids):
    return 2 * table[ids]


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


def take(mode):
    def loss(table):
        rows = jnp.take(table, IDS, axis=0, mode=mode)
        return square(jnp.where(jnp.isnan(rows), 0, rows))

    return Program(loss, 6)


PROGRAMS: dict[str, Program] = {
    "index": Program(lambda t: square(t[IDS]), 6),
    "index, 2-D ids": Program(lambda t: square(t[IDS.reshape(2, 3)]), 6),
    "index, narrow ids": Program(lambda t: square(t[VALID.astype(jnp.int8)]), 3),
    "index, unsigned ids": Program(lambda t: square(t[VALID.astype(jnp.uint32)]), 3),
    "index, NumPy ids": Program(lambda t: square(t[np.array([1, 2, 1])]), 3),
    # jax.numpy drops a lookup of nothing, so to JAX the table is not used at all.
    "index, no ids": Program(lambda t: square(t[IDS[:0]]), None),
    "index with slice": Program(lambda t: square(t[IDS, :]), 6),
    "take, default": take(None),
    "take, clip": take("clip"),
    "take, wrap": take("wrap"),
    "take, fill": take("fill"),
    "at.get, clip": Program(lambda t: square(t.at[IDS].get(mode="clip")), 6),
    "at.get, fill": Program(lambda t: square(t.at[IDS].get(mode="fill", fill_value=0)), 6),
    "at.get, drop": Program(lambda t: square(t.at[IDS].get(mode="promise_in_bounds")), 6),
    "scalar": Program(lambda t: square(t[IDS[0]]), 1),
    "scalar, out of range": Program(lambda t: square(t[IDS[4]]), 1),
    "dynamic_slice": Program(lambda t: square(lax.dynamic_slice_in_dim(t, IDS[4], 3)), 3),
    "vmapped dynamic_slice": Program(
        lambda t: square(jax.vmap(lambda i: lax.dynamic_slice_in_dim(t, i, 3))(IDS)), 18
    ),
    "vmapped scalar": Program(lambda t: square(jax.vmap(lambda i: t[i])(IDS)), 6),
    "vmapped index": Program(lambda t: square(jax.vmap(lambda i: t[i])(IDS.reshape(2, 3))), 6),
    "vmapped twice": Program(
        lambda t: square(jax.vmap(jax.vmap(lambda i: t[i]))(IDS.reshape(2, 3))), 6
    ),
    "two lookups": Program(lambda t: square(t[IDS] * t[IDS[::-1]]), 12),
    "lookup and slice": Program(lambda t: square(t[IDS]) + square(t[2:4]), 8),
    "slice alone": Program(lambda t: square(t[2:4]) + square(t[0]), None),
    "row of the result": Program(lambda t: square(t[IDS][0]), 6),
    "masked rows": Program(lambda t: square(jnp.where((IDS > 1)[:, None], t[IDS], 0)), 6),
    "scaled table": Program(lambda t: square((3.0 * t * VALID[1].astype(t.dtype))[IDS] / 2), 6),
    "negated table": Program(lambda t: square((1 - t - 1)[IDS]), 6),
    "converted table": Program(
        lambda t: jnp.sum(t.astype(jnp.bfloat16)[VALID].astype(jnp.float32)), 3
    ),
    "reshaped table": Program(lambda t: square(t.reshape(V, 2, 2)[IDS]), 6),
    "reversed table": Program(lambda t: square(t[::-1][IDS]), 6),
    "stacked table": Program(lambda t: square(jnp.stack([t, 2 * t])[1, IDS]), 12),
    "unstacked table": Program(
        lambda t: square(sum(x[VALID] for x in t.reshape(2, V // 2, D))), 6
    ),
    "scanned table": Program(
        lambda t: square(lax.map(lambda x: x[VALID], t.reshape(2, V // 2, D))), 6
    ),
    "some columns": Program(lambda t: square(t[IDS, 1:3]), 6),
    "expanded table": Program(lambda t: square(t[:, None, :][IDS]), 6),
    "jit": Program(jax.jit(lambda t: square(t[IDS])), 6),
    "jit in jit": Program(jax.jit(lambda t: square(jax.jit(double_rows)(t, IDS))), 6),
    "checkpoint": Program(jax.checkpoint(lambda t: square(t[IDS])), 6),
    "checkpoint of jit": Program(jax.checkpoint(jax.jit(lambda t: square(t[IDS]))), 6),
    "scan": Program(rnn, 3),
    "scan of checkpoint": Program(lambda t: rnn(t, wrap=jax.checkpoint), 3),
    "checkpoint of scan": Program(jax.checkpoint(rnn), 3),
    "scan in scan": Program(
        lambda t: lax.scan(lambda c, i: (c + rnn(t + 0), i), 0.0, VALID)[0], 9
    ),
    "reverse unrolled scan": Program(
        lambda t: square(
            lax.scan(
                lambda c, i: (jnp.cos(c + t[i]), c), t[0] * 0, VALID, reverse=True, unroll=2
            )[1]
        ),
        4,
    ),
    "lookup before and in scan": Program(lambda t: rnn(t) + square(t[IDS]), 9),
    "fori_loop": Program(
        lambda t: square(lax.fori_loop(0, 3, lambda k, c: c * t[VALID[k]], jnp.ones(D))), 3
    ),
    "cond": Program(
        lambda t: lax.cond(IDS[0] > 0, lambda t: square(t[IDS]), lambda t: t[IDS[:2]].sum(), t),
        6,
    ),
    "cond, other branch": Program(
        lambda t: lax.cond(IDS[0] < 0, lambda t: square(t[IDS]), lambda t: t[IDS[:2]].sum(), t),
        6,
    ),
    "cond, one branch without": Program(
        lambda t: lax.cond(IDS[0] < 0, lambda t: square(t[IDS]), lambda t: 1.0, t), 6
    ),
    "switch": Program(
        lambda t: lax.switch(
            VALID[1], [lambda t, n=n: square(t[IDS[:n]]) for n in (1, 2, 4)], t
        ),
        4,
    ),
    "scan in cond": Program(
        lambda t: lax.cond(IDS[0] > 0, rnn, lambda t: square(t[IDS]), t), 6
    ),
    "cond in scan": Program(
        lambda t: lax.scan(
            lambda c, i: (lax.cond(i > 1, lambda: c + square(t[i]), lambda: c * t[0, 0]), None),
            1.0,
            VALID,
        )[0],
        None,
        falls_back=True,
    ),
    "cond in scan, rows": Program(
        lambda t: lax.scan(
            lambda c, i: (lax.cond(i > 1, lambda: c + square(t[i]), lambda: c), None),
            1.0,
            VALID,
        )[0],
        3,
    ),
    "sparse features, coo": Program(lambda t: square(COO @ t), 6),
    "sparse features, padded": Program(lambda t: square(PADDED @ t), 9),
    "sparse features, csr": Program(lambda t: square(CSR @ t), 6),
    "sparse features, a column": Program(lambda t: square(COO @ t[:, 0]), 6),
    "sparse features, transposed": Program(lambda t: square(TRANSPOSED.T @ t), 6),
    "sparse features, @ under vmap": Program(
        lambda t: square(jax.vmap(lambda x: x @ t)(BATCHED)), 9
    ),
    "sparse features, dot": Program(lambda t: square(jmask.dot(CSR, t)), 6),
    "sparse features, dot of a column": Program(lambda t: square(jmask.dot(COO, t[:, 0])), 6),
    "sparse features, dot of transposed": Program(
        lambda t: square(jmask.dot(TRANSPOSED, t, transpose_a=True, forward_stype="default")), 6
    ),
    "sparse features, dot from the left": Program(
        lambda t: square(jmask.dot(t, CSR, transpose_a=True, transpose_b=True)), 6
    ),
    "sparse features, dot of rows": Program(
        lambda t: square(jmask.dot(FEATURES_IN_ROWS, t, transpose_a=True)), 7
    ),
    "sparse features, dot in scan": Program(
        lambda t: lax.scan(
            lambda c, k: (c + square(k * jmask.dot(CSR, t)), None), 0.0, jnp.arange(1.0, 3)
        )[0],
        12,
    ),
    "sparse features, dot under vmap": Program(
        lambda t: square(jax.vmap(lambda x: jmask.dot(x, t))(BATCHED)), 9
    ),
    "sparse features, recomputed": Program(
        jax.checkpoint(lambda t: square(jmask.dot(CSR, t))), 6
    ),
    "custom_vjp": Program(lambda t: square(custom_lookup(t, VALID)), 3),
    "custom_jvp": Program(lambda t: jnp.sum(custom_square(t[IDS])), 6),
    "relu and softmax": Program(
        lambda t: square(jax.nn.relu(t[IDS])) + square(jax.nn.softmax(t[IDS])), 12
    ),
    "grad inside": Program(lambda t: square(jax.grad(lambda x: square(x))(t[IDS])), 6),
    "second order": Program(
        lambda t: square(jax.grad(lambda t: square(t[VALID]))(t)[VALID]), 3
    ),
    "tied": Program(lambda t: square(t[IDS] @ t.T), None, falls_back=True),
    "tied in scan": Program(
        lambda t: square(
            lax.scan(lambda c, i: (jnp.tanh(t[i] + t.T @ (t @ c)), None), jnp.zeros(D), VALID)[
                0
            ]
        ),
        None,
        falls_back=True,
    ),
    "penalised": Program(lambda t: square(t[IDS]) + jnp.sum(t**2), None, falls_back=True),
    "scaled by a dense array": Program(
        lambda t: square((t * jnp.arange(V, dtype=t.dtype)[:, None])[IDS]), None
    ),
    "transposed lookup": Program(lambda t: square(t.T[:, IDS]), None),
    "columns": Program(lambda t: square(t[:, VALID]), None),
    "entries": Program(lambda t: square(t[VALID, VALID]), 3),
    "carried through scan": Program(
        lambda t: lax.scan(
            lambda c, i: ((c[0] + square(c[1][i]), c[1]), None), (0.0, t), VALID
        )[0][0],
        3,
    ),
    "changed in scan": Program(
        lambda t: lax.scan(
            lambda c, i: ((c[0] + square(c[1][i]), 2 * c[1]), None), (0.0, t), VALID
        )[0][0],
        None,
        falls_back=True,
    ),
    "dense only": Program(lambda t: square(t), None),
    "dense only, in scan": Program(
        lambda t: lax.scan(lambda c, i: (c * square(t), None), 1.0, VALID)[0], None
    ),
    "unused": Program(lambda t: square(IDS.astype(jnp.float32)), None),
    "scatter of the model": Program(
        lambda t: square(t * jnp.zeros((V, D)).at[VALID].add(jnp.ones((3, D)))), None
    ),
}
