"""A step with a deferred table works in place on TPUs and GPUs, compiled without one.

Every array of the table shares its buffer with the one that comes out, and the temporaries are
those of the batch and of the lines, some thousand rows, not those of a table.
"""

import functools

import pytest

import jmask
from tests.accelerators.test_gpu import gpu
from tests.accelerators.test_tpu import device
from tests.compiled_step import IN_PLACE, Step, whole_table_operations
from tests.optimizers import OPTIMIZERS

pytestmark = pytest.mark.dtype_promotion

LOOKUPS, ROW = 512, 128
NAMES = ("adam", "momentum", "optax.adamw")


def check_in_place(tx, sharding):
    deferred = functools.partial(jmask.deferred, tx=tx)
    step = Step(tx, (ROW,), lookups=LOOKUPS, apply=jmask.apply_gradients, table=deferred)
    temporary = []
    for rows in (10**6, 4 * 10**6):
        compiled = step.compile(rows, sharding)
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= step.table_bytes(rows)
        assert whole_table_operations(compiled, step.entries(rows)) <= IN_PLACE
        temporary.append(memory.temp_size_in_bytes)
    assert temporary[1] <= 40 * LOOKUPS * ROW * 4 + 2**24
    # The root of V has doubled.
    assert temporary[1] <= 2 * temporary[0] + 2**20


@pytest.mark.needs(what="libtpu")
@pytest.mark.parametrize("name", NAMES)
def test_in_place_on_tpus(name):
    check_in_place(OPTIMIZERS[name], device("v5e:2x2"))


@pytest.mark.needs(what="jax_cuda12_plugin")
@pytest.mark.parametrize("name", NAMES)
def test_in_place_on_gpus(name):
    check_in_place(OPTIMIZERS[name], gpu("H100"))
