"""Complex tables in optimizers of optax, and in bags of rows.

Optimizers of a name see pairs of real and imaginary parts: test_steps_of_all_kinds.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.optimizers import OPTAX
from tests.stored_tables import STEPS, of_lines, stepped, stored, unpacked

LIFTED = OPTAX | {"pairs": optax.contrib.split_real_and_imaginary(OPTAX["adam"])}
STORAGES = ("array", "packed")


def numbers(*shape):
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape), jnp.complex64)


# 9 rows are updated densely, 500 by their ids.
@pytest.mark.sampled
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", [(9, 3), (500, 2, 2), (500,)], ids=str)
@pytest.mark.parametrize("optimizer", LIFTED)
@pytest.mark.dtype_promotion
def test_lifted_ones_do_what_optax_does(optimizer, shape, storage, step):
    tx, table, ids = LIFTED[optimizer], numbers(*shape), np.array([1, 3, 3, 8, -1])
    gradient = jmask.RowSparse(ids, numbers(5, *shape[1:]), shape)
    kept = stored(storage, table)
    rows = of_lines(gradient, kept) if storage == "packed" else gradient
    new, _ = stepped(jmask.lazy(tx), kept, [rows], step)
    new = unpacked(new, kept, shape) if storage == "packed" else new
    expected, _ = stepped(tx, table, [gradient.todense()], "update")
    touched, untouched = ids[1:4], np.setdiff1d(np.arange(shape[0]), ids)
    np.testing.assert_allclose(new[touched], expected[touched], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new[untouched], table[untouched])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("max_norm", [None, 0.9])
@pytest.mark.parametrize("storage", STORAGES)
def test_bags(combiner, max_norm, storage):
    """Weighted, with an id that is out of range; and their gradient, in rows."""
    table, ids = numbers(40, 3), jnp.array([[1, 7, 7], [39, 1, 400], [-1, -1, -1]])
    weights = jnp.array([[1.0, 2, 3], [0.5, 0, 1], [1, 1, 1]])

    def bags(table):
        how = {"max_norm": max_norm, "padding_id": -1, "width": 3}
        return jmask.embedding_bag(table, ids, combiner=combiner, weights=weights, **how)

    @jax.numpy_dtype_promotion("standard")
    def expected(table):
        rows = table.at[ids].get(mode="fill", wrap_negative_indices=False)
        norms = jnp.linalg.norm(rows, axis=-1, keepdims=True)
        rows = rows * (max_norm / jnp.maximum(norms, max_norm) if max_norm else 1)
        w = jnp.where(ids == -1, 0, weights)
        total = jnp.einsum("bl,bld->bd", w, jnp.where(ids[..., None] == -1, 0, rows))
        size = {"sum": jnp.ones(3), "mean": w.sum(1), "sqrtn": jnp.sqrt((w * w).sum(1))}
        return total / jnp.maximum(size[combiner], 1e-30)[:, None]

    kept = stored(storage, table)
    result = jax.jit(bags)(kept)
    np.testing.assert_allclose(result[::2], expected(table)[::2], rtol=1e-5)
    assert jnp.isnan(result[1]).all()
    loss = lambda function: lambda table: jnp.sum(jnp.abs(function(table)[::2]) ** 2)
    gradient = jmask.grad(loss(bags))(kept)
    assert isinstance(gradient, jmask.RowSparse)
    found = gradient.todense()
    found = unpacked(found, kept, table.shape) if storage == "packed" else found
    np.testing.assert_allclose(found, jax.grad(loss(expected))(table), rtol=1e-5, atol=1e-6)


def test_a_real_gradient_moves_the_real_parts():
    table = numbers(9, 2)
    gradient = jmask.RowSparse([1, 1], jnp.ones((2, 2)), (9, 2))
    for tx in (jmask.sgd(0.1), jmask.adam(0.1), jmask.rowwise_adagrad(0.1)):
        new, _ = jmask.apply_gradients(tx, gradient, tx.init(table), table)
        np.testing.assert_array_equal(new.imag, table.imag)
        assert (new.real[1] < table.real[1]).all()
