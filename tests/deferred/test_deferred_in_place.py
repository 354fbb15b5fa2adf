"""Deferred tables are updated where they are, at the cost of one count a row; or refused."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jmask
from tests.compiled_step import IN_PLACE, compiled_step, whole_table_operations
from tests.sampling import chosen

pytestmark = pytest.mark.dtype_promotion

ADAM = jmask.adam(0.1)
OPTIMIZERS = {
    "optax.adamw": jmask.lazy(optax.adamw(0.1, weight_decay=0.1)),
    "adam": ADAM,
    "rowwise adagrad": jmask.rowwise_adagrad(0.1),
    "momentum": jmask.sgd(0.1, momentum=0.9),
}


def loss(params: Any, ids: Any) -> jax.Array:
    rows = jmask.embedding_lookup(params["t"], ids, padding_id=-1)
    return jnp.sum(jnp.sin(rows) * params["w"][None])


@pytest.mark.parametrize("name", chosen(["optax.adamw", "rowwise adagrad"], OPTIMIZERS))
def test_in_place(name: str) -> None:
    """No temporary of the size of the table, and every array is updated where it is."""
    tx = OPTIMIZERS[name]
    temporary = []
    for rows in (10**5, 10**7):
        like = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
        table = jax.eval_shape(lambda x: jmask.deferred(x, tx), like)
        params = {"t": table, "w": jax.ShapeDtypeStruct((16,), jnp.float32)}
        compiled = compiled_step(loss, tx, params, jax.ShapeDtypeStruct((512,), jnp.int32))
        memory = compiled.memory_analysis()
        sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(table)]
        assert memory.alias_size_in_bytes >= sum(sizes)
        assert whole_table_operations(compiled, rows) <= IN_PLACE
        temporary.append(memory.temp_size_in_bytes)
    # With the root of V grow the lines, and the rows that are brought up to date besides.
    assert temporary[1] <= 24 * 2**20
    assert temporary[1] - temporary[0] < 10**7


def test_catch_up_in_place() -> None:
    like = jax.ShapeDtypeStruct((10**7, 16), jnp.float32)
    table = jax.eval_shape(lambda x: jmask.deferred(x, ADAM), like)
    jitted = jax.jit(lambda t: t.up_to_date(), donate_argnums=0)
    memory = jitted.lower(table).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 10**7 * 16 * 4 * 3
    assert memory.temp_size_in_bytes <= 64 * 2**20


def test_memory_is_one_int32_for_each_row_beside_the_moments() -> None:
    like = jax.ShapeDtypeStruct((10**6, 64), jnp.float32)
    table = jax.eval_shape(lambda x: jmask.deferred(x, ADAM), like)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(table))
    assert 0 <= size - 10**6 * (3 * 64 * 4 + 4) < 2**20


TABLE = jnp.ones((6, 2))


def grads_of(params: Any) -> Any:
    return jmask.grad(lambda p: jnp.sum(p[jnp.array([0, 3, 3])]))(params)


OTHERS: dict[str, Any] = {
    "another rate": jmask.adam(0.2),
    "another b1": jmask.adam(0.1, b1=0.8),
    "another optimizer": jmask.sgd(0.1),
    "of optax": jmask.lazy(optax.adam(0.1)),
    "a schedule": jmask.adam(optax.linear_schedule(0.1, 0.0, 10)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_transformation_than_it_was_made_for(name: str) -> None:
    table = jmask.deferred(TABLE, ADAM)
    for tx in (OTHERS[name], jmask.skip_nonfinite(OTHERS[name])):
        with pytest.raises(ValueError, match="another optimizer"):
            jmask.apply_gradients(tx, grads_of(table), tx.init(table), table)
    with pytest.raises(ValueError, match="another optimizer"):
        OTHERS[name].update(grads_of(table), OTHERS[name].init(table), table)


def test_the_same_transformation_made_anew() -> None:
    """It is known by what it does."""
    table = jmask.deferred(TABLE, ADAM)
    for tx in (jmask.adam(0.1), jmask.adam(0.1, lazy_update=False), jmask.skip_nonfinite(ADAM)):
        new, _ = jmask.apply_gradients(tx, grads_of(table), tx.init(table), table)
        assert float(new.todense()[0, 0]) < 1
