"""Which parameters of a program are tables is read from it, by leaf; what is dense is said."""

import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.experimental.sparse import BCOO

import jmask
from tests.lookup_programs import PROGRAMS, TABLE

IDS = jnp.array([3, 1, 3, 7])
square = lambda x: jnp.sum(x * x)


def said_of(loss, *args):
    """The gradient, and what was said of it."""
    with warnings.catch_warnings(record=True, action="always") as found:
        gradient = jmask.grad(loss)(*args)
    return gradient, [
        str(x.message) for x in found if issubclass(x.category, jmask.StorageFallbackWarning)
    ]


def test_each_of_two_tables_of_one_shape_is_reported():
    loss = lambda p: square(p["a"][IDS] @ p["a"].T) + square(p["b"][IDS] @ p["b"].T)
    for rows in (1000, 999):
        params = {"a": jnp.ones((1000, 8)), "b": jnp.ones((rows, 8))}
        _, said = said_of(loss, params)
        assert len(said) == 2
        for name, text in zip("ab", said, strict=True):
            assert f"`p['{name}']`" in text
            for word in ("logits", "sampled", "jmask.densify"):
                assert word in text


def test_rows_beside_a_dense_table_of_one_shape():
    loss = lambda p: square(p["a"][IDS]) + square(p["b"])
    params = {"a": jnp.ones((9, 2)), "b": jnp.ones((9, 2))}
    gradient, said = said_of(loss, params)
    assert isinstance(gradient["a"], jmask.RowSparse)
    assert isinstance(gradient["b"], jax.Array)
    assert not said


def on_the_host(table):
    if jax.__version_info__ < (0, 12):
        with compute_on("device_host"):
            return jax.jit(lambda t: t[IDS])(table)
    where = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Device}
    return compute_on(lambda t: t[IDS], **where)(table)


def of_a_root(table):
    solve = lambda f, start: start + f(start)
    return lax.custom_root(lambda x: table[IDS] - x, jnp.zeros((4, 8)), solve, lambda f, y: -y)


@pytest.mark.parametrize("function", [on_the_host, of_a_root])
def test_lookups_inside_of_other_equations_are_rows_or_said(function):
    table = jnp.ones((40_000, 8))
    gradient, said = said_of(lambda t: square(function(t)), table)
    assert isinstance(gradient, jmask.RowSparse) or len(said) == 1
    dense = gradient.todense() if isinstance(gradient, jmask.RowSparse) else gradient
    np.testing.assert_allclose(dense, jax.grad(lambda t: square(function(t)))(table))


@pytest.mark.parametrize("jit", [False, True])
def test_arguments_without_leaves(jit):
    run = lambda x: jmask.value_and_grad(lambda p, x: jnp.sum(x))({}, x)
    value, gradient = (jax.jit(run) if jit else run)(jnp.ones(3))
    assert (value, gradient) == (3, {})


def test_padded_tables_with_64_bits():
    with jax.enable_x64(True):
        table = jnp.asarray(np.random.default_rng(0).normal(size=(9, 2)))
        loss = lambda t: square(jnp.pad(t, ((1, 2), (0, 1)))[jnp.array([0, 1, 5, 11])])
        gradient = jmask.grad(loss)(table)
        assert isinstance(gradient, jmask.RowSparse)
        np.testing.assert_allclose(gradient.todense(), jax.grad(loss)(table))


def test_what_is_printed_is_no_use():
    def loss(table):
        jax.debug.callback(lambda *given: None, table, 2 * table)
        return square(table[IDS])

    with jmask.strict():
        assert jmask.grad(loss)(TABLE).nse == len(IDS)


def test_a_loop_over_rows_of_a_cast_table_does_not_make_it():
    def loss(table, ids):
        cell = lambda c, i: (jnp.tanh(c + table.astype(jnp.bfloat16)[i]), None)
        return lax.scan(cell, jnp.zeros(64, jnp.bfloat16), ids)[0].sum().astype(jnp.float32)

    shapes = [jax.ShapeDtypeStruct(*x) for x in (((50_000, 64), "float32"), ((8,), "int32"))]
    step = jax.jit(lambda *x: jmask.grad(loss)(*x).values)
    memory = step.lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 50_000 * 64


def test_entries_of_more_rows_than_32_bits_number():
    shape = jax.ShapeDtypeStruct((50_000_000, 64), "float32")
    grad = jmask.grad(lambda t, i: t[i, i % 64].sum())
    gradient = jax.eval_shape(grad, shape, jax.ShapeDtypeStruct((5,), "int32"))
    assert (gradient.nse, gradient.leading) == (5, 1)


def test_rows_of_entries_that_32_bits_do_not_number(monkeypatch):
    monkeypatch.setattr("jmask._autodiff.views.most_rows", lambda: 12)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)), jnp.float32)
    loss = lambda t: jnp.sum(jnp.sin(t[IDS, IDS % 4])) + square(jnp.exp(t)[IDS, 1])
    gradient = jmask.grad(loss)(table)
    assert gradient.leading == 1
    np.testing.assert_allclose(gradient.todense(), jax.grad(loss)(table), rtol=1e-5)


def test_errors_of_users_are_left_alone():
    def loss(table):
        raise TypeError("ShapeDtypeStruct is what I expected")

    with pytest.raises(TypeError, match="is what I expected"):
        jmask.grad(loss)(TABLE)


def test_entries_of_a_sparse_tensor_that_are_not_stored_are_not_lost():
    """Behind a `cond` that rebuilds the tensor, or where the function raises once."""
    x = BCOO.fromdense(jnp.array([[0.0, 2.0], [3.0, 0.0]]))
    weights, raised = jnp.array([[1.0, 2.0], [3.0, 4.0]]), []

    def raises_once(x):
        if not raised:
            raised.append(True)
            raise RuntimeError("once")
        return jnp.sum(jmask.todense(x) * weights)

    with pytest.raises(RuntimeError, match="once"):
        jmask.grad(raises_once)(x)
    np.testing.assert_array_equal(jmask.grad(raises_once)(x), weights)

    def rebuilt(x):
        is_so = {"indices_sorted": x.indices_sorted, "unique_indices": x.unique_indices}
        other = lambda x: BCOO((x.data * 1, x.indices), shape=x.shape, **is_so)
        x = lax.cond(x.data[0] > 0, lambda x: x, other, x)
        return jnp.sum(jmask.todense(x) * weights)

    with pytest.raises(TypeError, match="masked_grad=True"):
        jmask.grad(rebuilt)(x)


@pytest.mark.parametrize("name", ["tied", "penalised", "cond in scan", "checkpoint of scan"])
def test_nothing_is_kept_of_a_call(name):
    """Neither arrays nor traces live longer than the gradient that is returned."""
    table = TABLE + 0
    with warnings.catch_warnings(action="ignore"):
        gradient = jmask.grad(PROGRAMS[name].loss)(table)
    del gradient
    alive = weakref.ref(table)
    del table
    gc.collect()
    assert alive() is None
