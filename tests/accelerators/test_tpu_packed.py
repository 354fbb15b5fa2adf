"""Packed tables on TPUs, read from programs compiled without one: no padding and no copies.

A step on an array (V, 64) copies it and its state, into lines of 128 half of which is padding;
packed, the arguments of a step are the numbers themselves, and its temporaries are those of
the batch. `make test-tpu` runs these.
"""

import functools

import pytest

import jmask
from jmask._tables.packed import LANES
from tests.accelerators.test_tpu import device
from tests.compiled_step import Step

pytestmark = pytest.mark.needs(what="libtpu")

LOOKUPS = 8192
TABLES = {"adagrad": (jmask.adagrad(0.1), 2), "adam": (jmask.adam(), 3)}


@functools.cache
def memory_of(topology, optimizer, columns, rows, packed=True, lookups=LOOKUPS):
    """The memory analysis of a donated step, and the bytes of the numbers it trains."""
    tx, tables = TABLES[optimizer]
    table = jmask.PackedTable.pack if packed else lambda x: x
    step = Step(tx, (columns,), lookups=lookups, apply=jmask.apply_gradients, table=table)
    compiled = step.compile(rows, device(topology))
    return compiled.memory_analysis(), tables * rows * columns * 4


def check_arguments(memory, numbers):
    """Nothing is padded, and all tables come out in the buffers in which they came."""
    assert memory.argument_size_in_bytes <= 1.1 * numbers
    assert memory.alias_size_in_bytes >= numbers


CASES = """
    v5e:2x2 8 adagrad; v5e:2x2 64 adam; v5e:2x2 100 adagrad; v6e:2x2 16 adagrad;
    v6e:2x2 32 adam; v6e:2x2 100 adam; v5p:2x2x1 16 adagrad; v5p:2x2x1 16 adam;
    v5p:2x2x1 32 adagrad; v5p:2x2x1 100 adam
""".split(";")


@pytest.mark.parametrize("case", [case.strip() for case in CASES])
def test_a_million_rows(case):
    topology, columns, optimizer = case.split()
    memory, numbers = memory_of(topology, optimizer, int(columns), 10**6)
    check_arguments(memory, numbers)
    # A v5p keeps the lines of the batch in HBM, and the kernel takes them whole where a scatter
    # is fused with what makes them: up to five arrays of them.
    lines = 5 * LOOKUPS * LANES * 4 if topology.startswith("v5p") else 0
    assert memory.temp_size_in_bytes <= max(0.05 * numbers, lines)


@pytest.mark.parametrize(
    ("topology", "optimizer"),
    [("v5p:2x2x1", "adagrad"), ("v5p:2x2x1", "adam"), ("v6e:2x2", "adam")],
)
def test_narrowest_rows(topology, optimizer):
    """A million rows of 8 are 32 MB: lines of 4096 lookups are 5 % of table and state."""
    memory, numbers = memory_of(topology, optimizer, 8, 10**6, lookups=4096)
    check_arguments(memory, numbers)
    assert memory.temp_size_in_bytes <= 0.05 * numbers


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_narrowest_rows_on_v5p(optimizer):
    """Of 8192 lookups they are more: there they are in memory, not on the core.

    But no more than two arrays of them, for any number of rows.
    """
    small, numbers = memory_of("v5p:2x2x1", optimizer, 8, 10**6)
    check_arguments(small, numbers)
    large, numbers = memory_of("v5p:2x2x1", optimizer, 8, 10**7)
    check_arguments(large, numbers)
    lines = LOOKUPS * LANES * 4
    assert small.temp_size_in_bytes <= 2.5 * lines
    assert large.temp_size_in_bytes <= small.temp_size_in_bytes + lines / 2
    assert large.temp_size_in_bytes <= 0.05 * numbers


@pytest.mark.filterwarnings("ignore:on a TPU a step copies")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_control_an_array_is_copied(topology):
    memory, numbers = memory_of(topology, "adagrad", 64, 10**6, packed=False)
    assert memory.temp_size_in_bytes >= numbers
