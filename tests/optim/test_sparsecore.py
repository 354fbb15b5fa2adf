"""Optimizers and tables as SparseCore takes them; the compiled update where libtpu is."""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies

import jmask
from jmask import sparsecore

V, D = 20, 8
OPTIMIZERS = {
    "sgd": jmask.sgd(0.1),
    "momentum": jmask.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": jmask.adam(0.1),
    "adam, scheduled": jmask.adam(optax.linear_schedule(0.1, 0.5, 10), weight_decay=0.1),
    "adagrad": jmask.adagrad(0.1, initial_accumulator_value=0.1),
    "ftrl": jmask.ftrl(0.1),
}
every_optimizer = pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


@every_optimizer
def test_rows_move_as_those_of_a_table(tx):
    """What the core would compute for each row, with equal ids summed before."""
    rule = sparsecore.row_optimizer(tx)
    table = expected = jax.random.normal(jax.random.key(0), (V, D))
    slots = [jnp.full((V, D), value) for value in rule.slots.values()]
    state = tx.init(table)
    for count, ids in enumerate(([3, 3, 7], [7, 0, 19], [3, 19, 19])):
        values = jax.random.normal(jax.random.key(count + 1), (3, D))
        gradient = jmask.RowSparse(ids, values, (V, D))
        expected, state = jmask.apply_gradients(tx, gradient, state, expected)
        hyper = [jnp.full((1, D), x) for x in rule.hyperparameters(count)]
        dense = gradient.todense()
        for i in set(ids):
            row = [x[i : i + 1] for x in (dense, table, *slots)]
            table_row, *slot_rows = rule.computation(*row, *hyper)
            table = table.at[i].set(table_row[0])
            slots = [x.at[i].set(y[0]) for x, y in zip(slots, slot_rows, strict=True)]
    np.testing.assert_allclose(table, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(slots, state[1:], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 1), (16, 8), (37, 12), (1, 3)])
@pytest.mark.parametrize("cores", [1, 4, 8])
def test_tables_come_back(shape, cores):
    table = jax.random.normal(jax.random.key(0), shape)
    blocks = sparsecore.to_cores(table, cores)
    assert blocks.shape[0] == cores
    assert blocks.shape[1] % 8 == blocks.shape[2] % 8 == 0
    for i in range(shape[0]):
        np.testing.assert_array_equal(blocks[i % cores, i // cores, : shape[1]], table[i])
    np.testing.assert_array_equal(sparsecore.from_cores(blocks, shape), table)


def test_a_spec_whose_parameters_have_another_order(monkeypatch):
    """jax-tpu-embedding 0.2 has one more, between those of 0.1."""

    class Newer:
        def __init__(
            self,
            learning_rate=0.001,
            custom_computation_fn=None,
            stablehlo=None,
            slot_variable_initializers_tuple=(),
            short_name_str="custom",
        ):
            self.others = learning_rate, stablehlo, short_name_str
            self.computation = custom_computation_fn
            self.initializers = slot_variable_initializers_tuple

    home = "jax_tpu_embedding.sparsecore.lib.nn"
    module = types.SimpleNamespace(CustomOptimizerSpec=Newer)
    monkeypatch.setitem(sys.modules, home, types.SimpleNamespace(embedding_spec=module))
    spec = sparsecore.optimizer_spec(jmask.adam(0.1), "ours")
    assert spec.others == (0.0, None, "ours")
    assert callable(spec.computation)
    key = jax.random.key(0)
    assert [x(key, (1,), jnp.float32).item() for x in spec.initializers] == [0, 0]


@pytest.mark.needs(what="libtpu")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_update_compiles(optimizer):
    """The primitive of jax-tpu-embedding, with our rule inside, for one device."""
    of_v5p = ("sgd", "adam, scheduled", "ftrl")
    topology = "v5p:2x2x1" if optimizer in of_v5p else "v6e:2x2"
    spec = sparsecore.optimizer_spec(OPTIMIZERS[optimizer])
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    cores = {"v5p": 4, "v6e": 2}[topology.split(":")[0]]
    rows, ids, partition = 1024 * cores, 4096, 256
    shape = lambda dims, dtype: jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)
    hyper = spec.get_hyperparameters(0)
    variables = 1 + len(spec.slot_variables_initializers())
    row = jax.ShapeDtypeStruct((1, D), jnp.float32)
    program = jax.make_jaxpr(spec.custom_computation_fn)(*[row] * (1 + variables + len(hyper)))
    update = functools.partial(
        spec.get_optimizer_primitive().bind,
        num_hyperparameters=len(hyper),
        jaxpr=program,
        max_ids_per_partition=partition,
        max_unique_ids_per_partition=partition,
        computation_name="jmask_update",
    )
    compiled = (
        jax.jit(update)
        .lower(
            shape((cores * 8,), jnp.int32),
            shape((ids,), jnp.int32),
            shape((ids,), jnp.int32),
            shape((ids,), jnp.float32),
            shape((), jnp.int32),
            shape((64, D), jnp.float32),
            *(shape((), jnp.float32) for _ in hyper),
            *(shape((rows, D), jnp.float32) for _ in range(variables)),
        )
        .compile()
    )
    assert "sparse_dense_matmul_optimizer_grad" in compiled.as_text()
