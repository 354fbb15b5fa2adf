"""A donated step works in place on TPUs, read from programs compiled without one.

libtpu compiles for the devices of a topology that is only described. For rows of whole
128-lane lines every table and every state array shares its buffer with the one that comes
out, no copy of a table is made, and the temporaries are a few times the rows of the batch.
`make test-tpu` runs these.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import topologies

import jmask
from tests.autodiff import test_stacked_lookups as stacked
from tests.compiled_step import (
    IN_PLACE,
    Step,
    linear,
    rounded_stochastically,
    rounds_of_loops,
    whole_table_operations,
)
from tests.sampling import chosen

pytestmark = [pytest.mark.needs(what="libtpu"), pytest.mark.dtype_promotion]

# Three float32 arrays (10**7, 128) are 14.3 GiB, which the 16 GiB of a v5e just hold.
SMALL, LARGE = 10**5, 10**7

# XLA may do a step on a table that fits the on-chip memory there, and moves it in and out.
STAGING = {"copy-start", "copy-done", "slice-start", "slice-done", "custom-call"}

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")

LAZY_ADAMW = jmask.lazy(optax.adamw(1e-3))

STEPS = {
    "sgd": Step(jmask.sgd(0.1), row=(128,)),
    "momentum": Step(jmask.sgd(0.1, momentum=0.9), row=(128,)),
    "adam": Step(jmask.adam(), row=(128,)),
    "adagrad": Step(jmask.adagrad(), row=(128,)),
    "optax.adamw": Step(LAZY_ADAMW, row=(128,)),
    "adam in one pass": Step(jmask.adam(), row=(128,), apply=jmask.apply_gradients),
    "rowwise adagrad": Step(jmask.rowwise_adagrad(), row=(128,)),
    "ftrl": Step(jmask.ftrl(), row=(128,), apply=jmask.apply_gradients),
    "adagrad unless not finite": Step(jmask.skip_nonfinite(jmask.adagrad()), row=(128,)),
    "linear loss": Step(jmask.sgd(0.1), row=(128,), loss=linear),
    # Few lookups and one array: compiling takes seconds for each bfloat16 scatter.
    "bfloat16": Step(jmask.sgd(0.1), row=(128,), dtype=jnp.bfloat16, lookups=64),
    "bfloat16, rounded stochastically": Step(
        jmask.adagrad(state_dtype=jnp.float32),
        row=(128,),
        dtype=jnp.bfloat16,
        lookups=64,
        apply=rounded_stochastically,
    ),
}

# The only round of a step that is taken or not.
WITH_A_LOOP = ("adagrad unless not finite",)


@functools.cache
def device(topology):
    """The sharding that places all on one device of the topology."""
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:
        pytest.fail(
            f"the TPU topology {topology} cannot be described; libtpu is needed, run "
            f"these tests with `make test-tpu`: {error}",
            pytrace=False,
        )
    return jax.sharding.SingleDeviceSharding(described.devices[0])


# Each step for one of them, row-wise Adagrad for a v5p.
SOME = [(TOPOLOGIES[(i + 1) % 3], name) for i, name in enumerate(STEPS)]


@pytest.mark.parametrize(
    ("topology", "name"), chosen(SOME, itertools.product(TOPOLOGIES, STEPS))
)
def test_in_place(topology, name):
    step, temporary = STEPS[name], []
    # The random bits of the batch.
    bits = 2**20 if step.apply is rounded_stochastically else 0
    for rows, allowed in ((SMALL, IN_PLACE | STAGING), (LARGE, IN_PLACE)):
        compiled = step.compile(rows, device(topology))
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= step.table_bytes(rows)
        assert whole_table_operations(compiled, step.entries(rows)) <= allowed
        assert len(rounds_of_loops(compiled)) <= (name in WITH_A_LOOP)
        temporary.append(memory.temp_size_in_bytes)
    # The same within 1 %, or a few rows of the batch that XLA keeps in on-chip memory,
    # which is not counted, for the small table and not for the large one (Adam).
    # Besides the rows of the batch there are buffers of a fixed size.
    assert max(temporary) <= 10 * step.batch_bytes() + 2**20
    grown = temporary[1] - temporary[0]
    assert grown <= max(temporary[0] // 100, 3 * step.batch_bytes(), bits)


@pytest.mark.parametrize("name", ["adam", "adam per row", "with averages"])
def test_stacked_tables_in_place(name):
    """With V a multiple of 128, the state of one number for each row is in place too."""
    tx, lookup = stacked.UPDATES[name], stacked.ROW_SPARSE["pairs"]
    shaped = functools.partial(jax.ShapeDtypeStruct, sharding=device("v5e:2x2"))
    as_tpu = functools.partial(jax.tree.map, lambda x: shaped(x.shape, x.dtype))
    table = shaped((3, 51_200, 128), jnp.float32)
    state, batch = as_tpu(jax.eval_shape(tx.init, table)), as_tpu(stacked.BATCH)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(table, state, batch):
        gradient = jmask.grad(stacked.loss_of(lookup))(table, batch)
        return jmask.apply_gradients(tx, gradient, state, table)

    compiled = step.lower(table, state, batch).compile()
    for entries in {x.size for x in (table, *jax.tree.leaves(state)) if x.size > 1}:
        assert whole_table_operations(compiled, entries) <= IN_PLACE
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_control_a_dense_step_makes_tables(topology):
    step = Step(optax.adam(1e-3), row=(128,), value_and_grad=jax.value_and_grad)
    rows = 10**6
    compiled = step.compile(rows, device(topology))
    assert not whole_table_operations(compiled, step.entries(rows)) <= IN_PLACE


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_control_without_donation_tables_are_copied(topology):
    step, rows = STEPS["adam"], 10**6
    compiled = step.compile(rows, device(topology), donate=False)
    assert compiled.memory_analysis().alias_size_in_bytes == 0
    assert not whole_table_operations(compiled, step.entries(rows)) <= IN_PLACE
