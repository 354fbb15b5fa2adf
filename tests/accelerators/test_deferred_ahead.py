"""A step with a deferred table works in place on TPUs and GPUs, compiled without one.

Every array of the table shares its buffer with the one that comes out, and the temporaries are
those of the batch and of the lines, some thousand rows, not those of a table.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jmask
from tests.accelerators.test_gpu import gpu
from tests.accelerators.test_tpu import device
from tests.compiled_step import IN_PLACE, whole_table_operations

pytestmark = pytest.mark.dtype_promotion

LOOKUPS, ROW = 512, 128
OPTIMIZERS = {
    "adam": jmask.adam(0.1),
    "optax.adamw": jmask.lazy(optax.adamw(0.1)),
    "momentum": jmask.sgd(0.1, momentum=0.9),
}


def step(tx: Any, params: Any, state: Any, ids: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        return jnp.sum(jnp.square(params["t"][ids] * params["w"][None]))

    value, grads = jmask.value_and_grad(loss)(params)
    return *jmask.apply_gradients(tx, grads, state, params), value


def compiled_step(tx: Any, rows: int, sharding: Any) -> tuple[Any, int]:
    """The step, and how many bytes its table has."""
    like = jax.ShapeDtypeStruct((rows, ROW), jnp.float32)
    table = jax.eval_shape(lambda x: jmask.deferred(x, tx), like)
    params = {"t": table, "w": jax.ShapeDtypeStruct((ROW,), jnp.float32)}
    given = params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((LOOKUPS,), jnp.int32)
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), given
    )
    jitted = jax.jit(functools.partial(step, tx), donate_argnums=(0, 1))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(table))
    return jitted.lower(*given).compile(), size


def check_in_place(tx: Any, sharding: Any) -> None:
    temporary = []
    for rows in (10**6, 4 * 10**6):
        compiled, size = compiled_step(tx, rows, sharding)
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= size
        assert whole_table_operations(compiled, rows * ROW) <= IN_PLACE
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[1] <= 40 * LOOKUPS * ROW * 4 + 2**24
    # The root of V has doubled.
    assert temporary[1] <= 2 * temporary[0] + 2**20


@pytest.mark.needs(what="libtpu")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_place_on_tpus(name: str) -> None:
    check_in_place(OPTIMIZERS[name], device("v5e:2x2"))


@pytest.mark.needs(what="jax_cuda12_plugin")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_place_on_gpus(name: str) -> None:
    check_in_place(OPTIMIZERS[name], gpu("H100"))
