"""Every way to look rows up in stacked tables (M, V, D): row-sparse, or dense and said.

Each lookup is held against `jax.grad`: eagerly, under jit and vmap, in a scan and a cond; sizes
coincide, ids repeat, are negative and out of range. Every optimizer takes such a gradient as it
takes that of the one table (M * V, D).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax  # noqa: F401 (of the tables)

import jmask
from tests.compiled_step import compiled_step, temporary_bytes
from tests.expressions import named
from tests.optimizers import OPTIMIZERS
from tests.oracle import assert_close, densified
from tests.stored_tables import STEPS

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

RNG = np.random.default_rng(0)


class Batch(NamedTuple):
    """Ids of rows, some out of range, and ids of tables."""

    ids: jax.Array
    beyond: jax.Array
    tables: jax.Array


BATCH = Batch(jnp.array([1, 2, 1]), jnp.array([1, -2, 9]), jnp.array([0, 2, 1]))
take = lambda t, ids, **how: jnp.nan_to_num(jnp.take(t, ids, **how))
ROW_SPARSE = named("t, x", globals())("""
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
""")
DENSE = named("t, x", globals())("""
    transposed | t[0].T[x.ids % t.shape[2]]
    columns | t[..., x.ids % t.shape[2]]
    columns of all rows | t[0][:, x.ids % 2]
    slices of columns |
        jax.vmap(lambda i: lax.dynamic_slice_in_dim(t[0], i, 1, axis=1))(x.ids % 2)
    a reference | jax.new_ref(t)[x.ids % 3]
""")


def stack(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


STACKS = {"(3, 7, 2)": stack(3, 7, 2), "all alike": stack(3, 3, 3)}


def loss_of(lookup):
    def loss(t, x=BATCH):
        return sum(jnp.sum(jnp.sin(rows)) for rows in jax.tree.leaves(lookup(t, x)))

    return loss


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("name", ROW_SPARSE)
def test_row_sparse(name, stack):
    loss, t = loss_of(ROW_SPARSE[name]), STACKS[stack]
    expected = jax.grad(loss)(t)
    tolerance = {"rtol": 1e-2 if name == "cast" else 1e-5, "atol": 1e-5}
    with jmask.strict():
        for grad in (jmask.grad(loss), jax.jit(jmask.grad(loss))):
            gradient = grad(t, BATCH)
            assert isinstance(gradient, jmask.RowSparse)
            assert gradient.shape == t.shape
            gradient.validate()
            assert_close(densified(gradient), np.asarray(expected), **tolerance)
            assert_close(gradient.todense(), expected, **tolerance)
            assert_close(gradient.coalesce().todense(), expected, **tolerance)
            assert_close(gradient.flat().todense().reshape(t.shape), expected, **tolerance)
        both = jax.vmap(jmask.grad(loss), (0, None))(jnp.stack([t, 2 * t]), BATCH)
    assert_close(
        jmask.tree.merge(both).todense(), expected + jax.grad(loss)(2 * t), **tolerance
    )


@pytest.mark.parametrize("name", DENSE)
def test_dense_and_said(name):
    if name == "a reference" and jax.__version_info__ < (0, 11):
        pytest.skip("this JAX has no references with a gradient")
    loss, t = loss_of(DENSE[name]), jnp.ones((3, 3000, 32))
    with pytest.warns(
        jmask.StorageFallbackWarning, match=r"(?s)looked up.*table\[ids\]"
    ) as said:
        gradient = jmask.grad(loss)(t, BATCH)
    assert len(said) == 1
    assert f"{__file__}:" in str(said[0].message)
    assert_close(gradient, jax.grad(loss)(t, BATCH), rtol=1e-6)
    with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning):
        jmask.grad(loss)(t, BATCH)


def test_slices_used_densely_are_no_lookups():
    loss = lambda w: jnp.sum(jnp.tanh(w[0] @ w[1].T) @ w[2])
    with jmask.strict():
        jmask.grad(loss)(jnp.ones((3, 600, 600)))


# --- arithmetic on such gradients --------------------------------------------------------


def test_arithmetic():
    t = STACKS["(3, 7, 2)"]
    x, y = (jmask.grad(loss_of(ROW_SPARSE[n]))(t) for n in ("pairs", "whole tables"))
    p, q = np.asarray(x.todense()), np.asarray(y.todense())
    for result, expected in [
        (x * 2, 2 * p),
        (-x / 3, -p / 3),
        (x + y, p + q),
        (y - x, q - p),
        (t + x, t + p),
        (t - y, t - q),
        (x.astype(jnp.float16), p.astype(np.float16)),
        (jmask.tree.add(x, y, x), 2 * p + q),
        (jmask.tree.scale(3.0, x), 3 * p),
        (jmask.tree.mean([x, y]), (p + q) / 2),
    ]:
        np.testing.assert_allclose(jmask.todense(result), expected, rtol=1e-3, atol=1e-6)
        assert isinstance(result, jmask.RowSparse) == (
            result.shape == t.shape and result is not t
        ) or (isinstance(result, jax.Array))
    norm = np.sqrt((p**2).sum() + (q**2).sum())
    np.testing.assert_allclose(jmask.tree.norm({"a": x, "b": y}), norm, rtol=1e-6)
    assert repr(x) == "RowSparse(float32[3, 7, 2], nse=3, leading=2)"


# --- in place ----------------------------------------------------------------------------

UPDATES = {
    **{name: OPTIMIZERS[name] for name in ("sgd", "adam", "optax.adamw", "adam per row")},
    "with averages": optax.chain(OPTIMIZERS["rowwise adagrad"], jmask.ema(0.5)),
}


@pytest.mark.parametrize("way", STEPS)
@pytest.mark.parametrize(
    "lookup",
    [
        *("vmap over tables", "pairs", "a table, then rows", "a scan over tables"),
        *("some columns", "table by table", "stacked", "reversed rows"),
    ],
)
@pytest.mark.parametrize("name", UPDATES)
def test_in_place(name, lookup, way):
    """Read from the compiled step: tables are aliased, and no array is as large as one."""
    tx, table = UPDATES[name], jax.ShapeDtypeStruct((3, 50_000, 16), jnp.float32)
    compiled = compiled_step(loss_of(ROW_SPARSE[lookup]), tx, table, BATCH, apply=STEPS[way])
    state = jax.eval_shape(tx.init, table)
    tables = sum(x.size == table.size for x in (table, *jax.tree.leaves(state)))
    assert temporary_bytes(compiled, 4 * tables * table.size, table.size) < table.size
