"""`table[ids].sum(1)` in a loss: rows that are only summed are read as a bag's are."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from jmask._autodiff import gathered_rows
from jmask._base.forms import within
from jmask._kernels import bag_sum, tuning
from tests.leaks import no_tracer_is_kept

V, D, B, L = 50, 4, 6, 5
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.normal(size=(V, D)), jnp.float32)
PLANES = jnp.asarray(RNG.normal(size=(V, 2, D)), jnp.float32)
IDS = RNG.integers(0, V, (B, L))
IDS[2] = IDS[2, 0]
BEYOND = IDS.copy()  # of ids outside the table; no line wraps to its end
BEYOND[0, 1], BEYOND[3, 3] = V, -V - 3
WEIGHTS = jnp.asarray(RNG.normal(size=(B, L)), jnp.float32)
WEIGHTS = WEIGHTS.at[1].set(0).at[4, 4].set(jnp.inf)
MASK = RNG.random((B, L)) < 0.7
MASK[0, 1] = False


class Batch(NamedTuple):
    """An argument of each program, so that nothing in it is known."""

    ids: jax.Array
    beyond: jax.Array
    weights: jax.Array
    mask: jax.Array


BATCH = Batch(jnp.asarray(IDS), jnp.asarray(BEYOND), WEIGHTS, jnp.asarray(MASK))


def where(rows, x):
    return jnp.where(x.mask[..., None], rows, 0)


def weighted(rows, x):
    return rows * x.weights[..., None]


def take(table, x, **mode):
    return jnp.take(table, x.beyond, axis=0, **mode)


def interactions(rows):
    return rows.sum(1) ** 2 - (rows**2).sum(1)


@jax.jit
def helper(table, ids, weights):
    return jnp.sum(table[ids] * weights[..., None], axis=-2)


POOLED = {
    "sum": lambda t, x: t[x.ids].sum(1),
    "mean": lambda t, x: t[x.ids].mean(-2),
    "of the first dimension": lambda t, x: t[x.ids.T].sum(0),
    "of two dimensions": lambda t, x: t[x.ids.reshape(B, L, 1)].sum((1, 2)),
    "of the dimensions around": lambda t, x: t[x.ids.reshape(L, B, 1)].sum((0, 2)),
    "kept": lambda t, x: t[x.ids].sum(1, keepdims=True)[:, 0],
    "flat ids": lambda t, x: t[x.ids.reshape(-1)].reshape(B, L, D).sum(1),
    "clipped": lambda t, x: t[x.beyond].sum(1),
    "take": lambda t, x: jnp.take(t, x.ids, axis=0).sum(1),
    "take of ids outside": lambda t, x: take(t, x).sum(1),
    "ids outside read zeros": lambda t, x: take(t, x, mode="fill", fill_value=0).mean(1),
    "weights": lambda t, x: weighted(t[x.ids], x).sum(1),
    "weights first": lambda t, x: (x.weights[..., None] * t[x.ids]).sum(1),
    "weights of ids outside": lambda t, x: weighted(take(t, x), x).sum(1),
    "mask": lambda t, x: where(t[x.ids], x).sum(1),
    "mask of ids outside": lambda t, x: where(take(t, x), x).sum(1),
    "mask, then weights": lambda t, x: weighted(where(t[x.ids], x), x).sum(1),
    "weighted twice": lambda t, x: weighted(weighted(t[x.ids], x), x).sum(1),
    "mask of what is weighted": lambda t, x: where(weighted(t[x.ids], x), x).sum(1),
    "product with a mask": lambda t, x: (t[x.ids] * x.mask[..., None].astype(t.dtype)).sum(1),
    "einsum": lambda t, x: jnp.einsum("bld,bl->bd", t[x.ids], x.weights),
    "einsum of ids outside": lambda t, x: jnp.einsum(
        "bl,bld->bd", x.weights, where(take(t, x), x)
    ),
    "einsum, lines last": lambda t, x: jnp.einsum("lb,lbd->bd", x.weights.T, t[x.ids.T]),
    "matmul": lambda t, x: (x.weights[:, None, :] @ t[x.ids])[:, 0],
    "vmapped": lambda t, x: jax.vmap(lambda w, i: w @ t[i])(x.weights, x.ids),
    "a function that is jitted": lambda t, x: helper(t, x.ids, x.weights),
    "a tuple of ids": lambda t, x: t[(x.ids,)].sum(1),
    "at[].get()": lambda t, x: t.at[x.ids].get(mode="promise_in_bounds").sum(1),
    "a cast of the sum": lambda t, x: t[x.ids].sum(1).astype(jnp.bfloat16).astype(jnp.float32),
}
# Rows that are needed for more than one sum, or are computed on.
AS_THEY_ARE = {
    "two sums": lambda t, x: (lambda rows: rows.sum(1) + rows.max(1))(t[x.ids]),
    "squares": lambda t, x: (t[x.ids] ** 2).sum(1),
    "factorization machine": lambda t, x: interactions(t[x.ids]),
    "weights of numbers in rows": lambda t, x: (
        t[x.ids] * jnp.arange(1.0, D + 1)[None, None]
    ).sum(1),
    "no zeros beside a mask": lambda t, x: jnp.where(x.mask[..., None], t[x.ids], 1.0).sum(1),
    "another fill": lambda t, x: take(t, x, mode="fill", fill_value=2.0).sum(1),
    "columns": lambda t, x: t[x.ids].sum(2)[:, :D],
    "all rows": lambda t, x: t[x.ids].sum((0, 1))[None],
    "a lookup of columns": lambda t, x: t.T[:, x.ids].sum(2).T,
    "a narrow product": lambda t, x: weighted(
        t.astype(jnp.bfloat16)[x.ids], x._replace(weights=x.weights.astype(jnp.bfloat16))
    ).sum(1),
    "a sum of narrow numbers": lambda t, x: jax.lax.reduce(
        t.astype(jnp.bfloat16)[x.ids], jnp.bfloat16(0), jax.lax.add, (1,)
    ),
}


def loss_of(pooled):
    def loss(table, batch=BATCH):
        return jnp.sum(jnp.sin(pooled(table, batch).astype(jnp.float32)))

    return loss


def count_of_sums(function, *args):
    equations = within(jax.make_jaxpr(function)(*args).eqns)
    return sum(eqn.primitive.name == bag_sum.BAG_SUM.primitive.name for eqn in equations)


@pytest.fixture(autouse=True)
def _even_few_rows_are_many(monkeypatch):
    monkeypatch.setattr(tuning, "MATERIALISED_ROWS", 0)


def assert_close(x, y):
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("name", POOLED)
def test_the_sums(name):
    def loss(table, batch):
        sums = POOLED[name](table, batch)
        return jnp.sum(jnp.where(jnp.isfinite(sums), jnp.sin(sums), 0)), sums

    found = jax.jit(jmask.value_and_grad(loss, has_aux=True))
    assert count_of_sums(found, TABLE, BATCH) == 1
    (value, sums), gradient = found(TABLE, BATCH)
    (expected, of_rows), dense = jax.jit(jax.value_and_grad(loss, has_aux=True))(TABLE, BATCH)
    assert_close(value, expected)
    assert_close(sums, of_rows)
    assert_close(gradient.todense(), dense)


@pytest.mark.sampled
@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_what_is_left_as_it_is(name):
    loss = loss_of(AS_THEY_ARE[name])
    grad = jax.jit(jmask.value_and_grad(loss))
    assert count_of_sums(grad, TABLE, BATCH) == 0
    value, gradient = grad(TABLE, BATCH)
    expected, dense = jax.jit(jax.value_and_grad(loss))(TABLE, BATCH)
    rtol = 2e-2 if "narrow" in name else 2e-5  # sums of equal ids are wide
    np.testing.assert_allclose(value, expected, rtol)
    np.testing.assert_allclose(jmask.todense(gradient), dense, rtol, atol=rtol / 10)


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


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_rows_are_summed_wide(dtype):
    table, loss = TABLE.astype(dtype), loss_of(POOLED["mask"])
    grad = jax.jit(jmask.value_and_grad(loss))
    assert count_of_sums(grad, table, BATCH) == 1
    value, gradient = grad(table, BATCH)
    expected, dense = jax.value_and_grad(loss)(table, BATCH)
    np.testing.assert_allclose(value, expected, rtol=1e-3)
    dense = dense.astype(jnp.float32)
    np.testing.assert_allclose(gradient.todense().astype(jnp.float32), dense, 2e-2, 1e-2)


def test_rows_of_two_dimensions():
    loss = loss_of(lambda t, x: jnp.einsum("blcd,bl->bcd", t[x.ids], x.weights)[1:4])
    grad = jax.jit(jmask.grad(loss))
    assert count_of_sums(grad, PLANES, BATCH) == 1
    assert_close(grad(PLANES, BATCH).todense(), jax.grad(loss)(PLANES, BATCH))


def test_infinite_rows_under_a_mask():
    table = TABLE.at[IDS[0, 1]].set(jnp.inf)  # the first bag leaves it out
    found = jax.jit(jmask.value_and_grad(_first_bag))(table, BATCH)
    assert np.isfinite(found[0])
    assert_close(found[0], _first_bag(table, BATCH))


def _first_bag(table, batch):
    return jnp.sum(where(table[batch.ids], batch).sum(1)[0])


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["sum", "take of ids outside", "weights", "einsum", "mask"])
def test_inside_other_programs(name):
    loss = loss_of(lambda t, x: POOLED[name](t, x)[1:3])  # these are finite
    dense, tables = jax.jit(jax.grad(loss)), jnp.stack([TABLE, 2 * TABLE])
    expected = sum(dense(table, BATCH) for table in tables)
    stacked = jax.jit(jax.vmap(jmask.grad(loss), (0, None)))(tables, BATCH)
    assert_close(jmask.tree.merge(stacked).todense(), expected)
    in_turn = lambda batch, table: (batch, jmask.grad(loss)(table, batch))
    _, scanned = jax.lax.scan(in_turn, BATCH, tables)
    assert_close(jmask.tree.merge(scanned).todense(), expected)
    along = jnp.cos(TABLE)
    rows = lambda t, x: jnp.sum(jmask.grad(loss)(t, x).todense() * along)
    of_dense = jax.jvp(lambda t: dense(t, BATCH), (TABLE,), (along,))[1]
    assert_close(jax.jit(jax.grad(rows))(TABLE, BATCH), of_dense)


def test_outside_jit_rows_are_read_once(monkeypatch):
    """There they have been read when their sum comes."""
    calls = []
    counted = lambda *args: calls.append(args) or bag_sum.bag_sum(*args)
    monkeypatch.setattr(gathered_rows, "bag_sum", counted)
    loss = loss_of(POOLED["mask"])
    gradient = jmask.grad(loss)(TABLE)
    assert not calls
    assert_close(gradient.todense(), jax.grad(loss)(TABLE))
    jax.jit(jmask.grad(loss))(TABLE, BATCH)
    assert len(calls) == 1


def test_parts_of_arrays_are_summed_as_they_are():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def of_device(table, ids):
        return jmask.grad(lambda t: jnp.sum(jnp.sin(t[ids].sum(1))))(table)

    how = {"mesh": mesh, "in_specs": (spec(), spec("x")), "out_specs": spec("x")}
    grad = jax.jit(jax.shard_map(of_device, **how, check_vma=False))
    assert count_of_sums(grad, TABLE, BATCH.ids) == 0
    expected = jax.grad(lambda t: jnp.sum(jnp.sin(t[IDS].sum(1))))(TABLE)
    assert_close(grad(TABLE, BATCH.ids).todense(), expected)


def test_no_tracer_is_kept():
    with no_tracer_is_kept():
        for name in ("weights of ids outside", "einsum", "a function that is jitted"):
            jax.jit(jmask.grad(loss_of(POOLED[name])))(TABLE, BATCH)


def test_no_row_of_a_bag_is_written_out():
    """Read from the compiled step: less beside its table than its rows would take."""
    table = jax.ShapeDtypeStruct((200_000, 64), jnp.float32)
    ids = jax.ShapeDtypeStruct((10_000, 5), jnp.int32)
    tx = jmask.sgd(0.1)

    def step(table, state, ids):
        loss, grad = jmask.value_and_grad(lambda t: jnp.sum(jnp.sin(t[ids].mean(1))))(table)
        return *jmask.apply_gradients(tx, grad, state, table), loss

    state = jax.eval_shape(tx.init, table)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(table, state, ids).compile()
    rows = 50_000 * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < rows / 1.5
