"""Calls as users write them: run here, and checked by mypy in `make lint`.

`user_code.py` is checked against the wheel.
"""

from typing import TYPE_CHECKING, Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmask


def test_tensors() -> None:
    rows = jmask.RowSparse([3], [2.0], (1000,))
    assert rows.dtype.itemsize == 4
    assert jmask.retain(rows, [1, 3]).shape == (1000,)
    x = jmask.masked_tensor(jnp.array([1.0, 2.0]), [True, False])
    assert x.astype(np.float16).to_tensor(0)[1] == 0
    assert jmask.cast_storage(jnp.eye(3), "row_sparse").nse == 3
    assert jmask.stochastic_round(jnp.ones(2), jnp.bfloat16, jax.random.key(0)).shape == (2,)


def test_functions() -> None:
    x = jmask.masked_tensor(jnp.array([1.0, 2.0]), jnp.array([True, False]))
    where = np.array([True, True, False])
    assert jmask.numpy.mean(x, axis=0, dtype="float32").to_tensor(0) == 1
    assert jmask.numpy.sum(np.ones(3, np.float32), axis=(0,), where=where) == 2
    assert jmask.numpy.unique(x).shape == (2,)
    different, counts = jmask.numpy.unique(x, return_counts=True)
    assert different.shape == counts.shape
    assert jmask.numpy.quantile(x, jnp.array([0.1, 0.9])).shape == (2,)
    assert jmask.numpy.histogram(x, bins=3, range=(0, 1))[0].shape == (3,)
    assert jmask.numpy.pad(x, ((1, 1),)).shape == (4,)


def test_tables() -> None:
    table = jnp.ones((10, 4))
    assert jmask.embedding_lookup(table, [1, 2]).shape == (2, 4)
    assert jmask.embedding_lookup(jmask.packed(table, "tpu"), np.array([1])).shape == (1, 4)
    padded = jmask.pad_bags([1, 2], [0, 1])
    assert jmask.embedding_bag(table, padded).shape[1] == 4
    bags = jmask.embedding_bag(
        table, np.array([1, 2]), offsets=[0, 1], weights=[1.0, 2.0], max_norm=1
    )
    assert bags.shape == (2, 4)


def test_gradients() -> None:
    def loss(table: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = table[jnp.array([1])]
        return jnp.sum(rows), rows

    table = jnp.ones((10, 4))
    assert_type(jmask.grad(lambda table: loss(table)[0])(table), Any)
    gradient, rows = assert_type(jmask.grad(loss, has_aux=True)(table), tuple[Any, Any])
    (value, _), same = jmask.value_and_grad(loss, has_aux=True)(table)
    assert assert_type(value, jax.Array) == jnp.sum(rows)
    if TYPE_CHECKING:  # a gradient has the arguments of its function
        jmask.grad(loss, has_aux=True)("a name")  # type: ignore[arg-type]
        jmask.numpy.nanvar(table, ddof="a name")  # type: ignore[arg-type]
    assert gradient.shape == same.shape == (10, 4)


def test_a_step() -> None:
    params = {"table": jmask.packed(jnp.ones((10, 4)), "tpu")}
    tx = jmask.adam(
        optax.constant_schedule(1e-3),
        b1=np.float32(0.9),
        weight_decay=jnp.array(0.1),
        state_dtype=jnp.bfloat16,
    )
    state = tx.init(params)
    _, gradients = jmask.value_and_grad(lambda p: jnp.sum(p["table"][jnp.array([1])]))(params)
    params, state = jmask.apply_gradients(tx, gradients, state, params)
    assert params["table"].shape == (10, 4)
    rows = {"table": jmask.RowSparse([3], [[2.0] * 4], (10, 4))}
    params, _ = jmask.apply_gradients(jmask.sgd(0.1), rows, jmask.sgd(0.1).init(params), params)
    assert jmask.tree.norm(jmask.tree.add(rows, rows)) == 8
