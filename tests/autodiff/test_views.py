"""Lookups in what is made of tables: the numbers of JAX, and nothing as large as a table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax  # noqa: F401 (of the tables)

import jmask
from tests.expressions import functions
from tests.sampling import chosen

pytestmark = [
    pytest.mark.dtype_promotion,
    pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning"),
]

# Each makes an array of a table (V, D) or (V, F, D), V even, and of another one like it.
MOVES = functions("t, u", globals())("""
    t.astype(jnp.bfloat16).astype(jnp.float32); -t * 2.5 / 3; t + 1.5; t + u; t[1:]; t[1::2];
    t[..., 1:3]; jnp.split(t, 2, 0)[1]; t[::-1]; jnp.flip(t, -1); t[:, None];
    jnp.squeeze(t[None], 0); jnp.pad(t, [(2, 1)] + [(0, 0)] * (t.ndim - 1));
    jnp.pad(t, [(0, 0)] * (t.ndim - 1) + [(1, 0)]); jnp.concatenate([t, u], -1);
    jnp.concatenate([t, jnp.zeros((1, *t.shape[1:])), u]); jnp.stack([u, t]);
    jnp.stack([u, t], 1); t.reshape(t.shape[0] // 2, 2 * t.shape[1], *t.shape[2:]);
    t.reshape(2, t.shape[0] // 2, *t.shape[1:]); t.reshape(-1, t.shape[-1]);
    t.reshape(2, -1, *t.shape[1:]).swapaxes(0, 1);
    t.reshape(2, -1, *t.shape[1:])[jnp.argmax(u[0, ..., 0])];
    lax.dynamic_slice_in_dim(t, u.size % 5, t.shape[0] - 2); jax.jit(lambda t: 2 * t[::-1])(t);
    lax.complex(t, u).real; lax.complex(t, u).conj().imag
""")
# Each looks up ids (B, L), some out of range, in such an array.
IN_PLACE = functions("y, ids", globals())("""
    y[ids % y.shape[0]]; y[ids[:, 0] % y.shape[0], ids[:, 1] % y.shape[1]];
    jax.vmap(lambda t, i: t[i])(y[:2], ids[:2] % y.shape[1]); y[ids[0, 0]]; y[3:5];
    jmask.embedding_bag(y, ids % y.shape[0]); lax.scan(lambda c, i: (c, y[i]), 0, ids)[1];
    lax.map(lambda i: (2 * y)[i], ids); lax.stop_gradient(y)[ids] * y[ids];
    lax.cond(ids[0, 0] > 3, lambda: y[ids], lambda: -y[ids]);
    jax.checkpoint(lambda y, i: jnp.sin((2 * y)[i]))(y, ids);
    lax.scan(lambda c, i: (c, lax.cond(c > 1, lambda: y[i], lambda: y[i + 1])), 0, ids)[1]
""")
LOOKUPS = IN_PLACE | functions("y, ids", globals())("""
    y[-1 - ids % y.shape[0]]; y.at[ids].get(mode="fill", fill_value=7.0);
    jnp.nan_to_num(jnp.take(y, ids, axis=0)); y.at[ids].get(mode="clip");
    jnp.take(y, ids, axis=0, mode="wrap"); y[ids % y.shape[0]].mean(1);
    y[:, ids[0] % y.shape[1]] if y.ndim > 2 else y[ids];
    jmask.embedding_lookup(y, ids % y.shape[0])
""")
# Arrays that are needed as a whole, of a table that has no gradient there.
ARRAYS = functions("t, w", globals())("""
    lax.stop_gradient(t); lax.stop_gradient(2 * t) * w[None];
    lax.stop_gradient(t)[::2] * w[None];
    jnp.concatenate([lax.stop_gradient(t), w[None]]); lax.stop_gradient(t * w[None])
""")
PROGRAMS = [(m, n, look) for m in MOVES for n in (None, *MOVES) for look in LOOKUPS]
SILENT = [x for x in PROGRAMS if x[-1] in IN_PLACE]


@pytest.mark.parametrize("name", ARRAYS)
def test_array_without_gradient(name):
    """It is made as it is, and not read row by row; other gradients go through it."""
    made = ARRAYS[name]
    loss = lambda t, w, ids: jnp.sum(jnp.sin(made(t, w)), 0).prod() * jnp.sum(t[ids] ** 2)
    t, w = jnp.arange(24.0).reshape(8, 3) / 7, jnp.array([0.3, 2.0, 0.7])
    args = t, w, jnp.array([3, 1, 3])
    gradients = jmask.grad(loss, (0, 1))(*args)
    assert isinstance(gradients[0], jmask.RowSparse)
    for gradient, expected in zip(gradients, jax.grad(loss, (0, 1))(*args), strict=True):
        np.testing.assert_allclose(jmask.todense(gradient), expected, rtol=1e-5)
    assert str(jax.make_jaxpr(jmask.grad(loss, (0, 1)))(*args)).count("gather[") == 1


def program(first, second, look):
    """The rows that are looked up, and the loss of them."""

    def loss(tables, ids):
        made = MOVES[first](*tables)
        made = made if second is None else MOVES[second](made, made)
        rows = LOOKUPS[look](made, ids)
        return jnp.sum(jnp.sin(rows)), rows

    return loss


@pytest.mark.parametrize(("first", "second", "look"), chosen(PROGRAMS[::1301], PROGRAMS[::41]))
@pytest.mark.parametrize("shape", [(40, 4), (44, 6, 4)])
def test_numbers_of_jax(first, second, look, shape):
    """The same bits where nothing is computed, and the same gradients."""
    rng = np.random.default_rng(0)
    if "bfloat16" in f"{first} {second}" and jax.default_backend() == "gpu":
        pytest.skip("of JAX's program XLA for GPUs drops the cast to 16 bits and back")
    tables = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    ids = jnp.asarray(rng.integers(-3, 50, (3, 2)))
    loss = program(first, second, look)
    try:
        (value, rows), dense = jax.jit(jax.value_and_grad(loss, has_aux=True))(tables, ids)
    except (TypeError, ValueError, IndexError):
        pytest.skip("a program that JAX does not take")
    (found, found_rows), grads = jax.jit(jmask.value_and_grad(loss, has_aux=True))(tables, ids)
    np.testing.assert_array_equal(found_rows, rows)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    # The cotangents of equal ids are summed in float32, and in bfloat16 by JAX.
    tolerance = 1e-2 if "bfloat16" in f"{first} {second}" else 1e-5
    for gradient, expected in zip(map(jmask.todense, grads), dense, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=tolerance)


# An array that is used twice in each of so many steps is reached in 2**12 ways.
steps = lambda step, t: [t := step(t) for _ in range(12)][-1]
SCALED = functions("t, s, w", globals())("""
    (s * t)[IDS]; (t / s - s)[IDS]; jnp.where(s > 0, t, s * t)[IDS]; (t[0, 0] * t)[IDS];
    jnp.pad(t, ((1, 0), (0, 0)), constant_values=s)[IDS]; (t.ravel()[5] + t)[IDS];
    steps(lambda x: x + x / 8, t)[IDS]; steps(lambda x: x + jnp.roll(x, 1, 0) / 8, s * t)[IDS];
    (t @ w)[IDS]; (w[None] * t)[IDS]; (t / w[None] - w[None])[IDS];
    jnp.where(w[None] > 2, w[None] * t, t)[IDS];
    jnp.einsum("m,mvd->vd", w, t.reshape(4, 10, 4))[IDS];
    (t.T * jnp.arange(40.0)[None]).T[IDS];
    (jnp.ones((40, 9)) + t @ jnp.outer(w, jnp.arange(9.0)))[IDS]
""")
IDS = jnp.array([1, 2, 1, 70, -90])  # of rows outside nothing has a gradient


@pytest.mark.parametrize("name", SCALED)
def test_parameters_that_scale_tables(name):
    """They are dense, and the table has rows all the same."""
    loss = lambda *args: jnp.sum(jnp.sin(SCALED[name](*args)))
    table = jnp.asarray(np.random.default_rng(0).normal(size=(40, 4)))
    args = table, jnp.array(2.0), jnp.arange(1.0, 5.0)
    traced = jax.jit(jmask.grad(loss, (0, 1, 2))).trace(*args)
    assert len(traced.jaxpr.eqns) < 5000
    found = traced.lower().compile()(*args)
    assert "steps" in name or isinstance(found[0], jmask.RowSparse)
    for gradient, expected in zip(found, jax.grad(loss, (0, 1, 2))(*args), strict=True):
        np.testing.assert_allclose(jmask.todense(gradient), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("first", "second", "look"), chosen(SILENT[::997], SILENT[::29]))
def test_nothing_is_as_large_as_a_table(first, second, look):
    """Read from the compiled step; programs with a dense gradient say so."""
    shape, loss = (2**16, 6, 8), program(first, second, look)
    tables = (jax.ShapeDtypeStruct(shape, jnp.float32),) * 2
    ids = jax.ShapeDtypeStruct((64, 2), jnp.int32)
    try:
        rows = jax.eval_shape(loss, tables, ids)[1]
    except (TypeError, ValueError, IndexError):
        pytest.skip("a program that JAX does not take")
    with jmask.strict():
        try:
            jax.eval_shape(jmask.grad(loss, has_aux=True), tables, ids)
        except jmask.StorageFallbackWarning:
            pytest.skip("its gradient is dense, which is said")
    if rows.size > 2**16:
        pytest.skip("what is looked up is itself as large")
    step = jax.jit(lambda tables, ids: jmask.grad(loss, has_aux=True)(tables, ids)[0])
    memory = step.lower(tables, ids).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**21
