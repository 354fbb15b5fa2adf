"""What crosses the network in a step on a sharded table, read from the compiled program.

A step needs n ids and n rows of D numbers there and back, whatever the size of the table:

    forward     n + n D numbers        backward    n + n D numbers

The bytes of a program are those that its collectives move, per device: of an all-gather the
result, of a reduce-scatter and an all-to-all the operand, of a permute what is sent, and of
an all-reduce twice its size, a reduce-scatter and an all-gather.
"""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from benchmarks.collectives import collectives
from jmask._tables.shard_layout import layout_of
from tests.compiled_step import training_step
from tests.optimizers import OPTIMIZERS
from tests.sampling import chosen
from tests.stored_tables import STEPS, mesh_of, replicated, sharded

pytestmark = pytest.mark.sampled(15)

V, D, N = 3000, 32, 512
ROUTED = (N * D + N) * 4  # bytes of the ids and rows of a batch


def forward_bytes(table: Any) -> int:
    """At most: ids and rows, and rows once more where shards lie across the batch's axes."""
    layout, sizes = table.layout, table.layout.mesh.shape
    shared = [axis for axis in layout.batch if axis in layout.rows]
    others = [axis for axis in layout.rows if axis not in layout.batch]
    if not (shared and others):
        return ROUTED
    # A reduce-scatter over the shared axes, and an all-reduce of what is left.
    return ROUTED + 2 * N * D * 4 // math.prod(sizes[axis] for axis in layout.batch)


def bytes_moved(compiled: Any) -> int:
    return sum(size for _, size in collectives(compiled))


NAMES = ["8 devices", "rows over table, batch over data", "rows over table, batch over both"]
NAMES += ["rows over both, batch over data", "explicit axis", "explicit axes, rows over table"]


def loss(table: Any, ids: Any) -> jax.Array:
    return jnp.sum(jnp.sin(table[ids]))


def table_of(layout: str, packed: bool = False) -> Any:
    return sharded(jnp.zeros((V, D)), layout, packed=packed)


def ids_for(table: Any) -> jax.Array:
    ids = np.random.default_rng(0).integers(0, V, N).astype(np.int32)
    return jax.device_put(ids, NamedSharding(table.layout.mesh, P(table.layout.batch)))


def assert_no_table_moves(compiled: Any, table: Any) -> None:
    largest = max((size for _, size in collectives(compiled)), default=0)
    assert largest < min(leaf.nbytes for leaf in jax.tree.leaves(table)) / 2


@pytest.mark.parametrize("layout", NAMES)
def test_forward(layout):
    table = table_of(layout)
    compiled = jax.jit(loss).lower(table, ids_for(table)).compile()
    assert_no_table_moves(compiled, table)
    assert 0 < bytes_moved(compiled) <= 1.2 * forward_bytes(table)


COLLECTED = ("sgd", "adam", "adagrad", "rowwise adagrad")
CASES = [
    *(("8 devices", name, "apply_gradients", name == "adam") for name in COLLECTED),
    *(("8 devices", name, "update", name == "adagrad") for name in COLLECTED),
    ("rows over table, batch over data", "adam", "update", False),
    ("rows over table, batch over both", "rowwise adagrad", "apply_gradients", False),
    ("rows over both, batch over data", "adagrad", "update", False),
    ("explicit axis", "adam", "apply_gradients", False),
    ("explicit axis", "rowwise adagrad", "update", True),
    ("explicit axes, rows over table", "sgd", "update", False),
]
ALL = itertools.product(NAMES, COLLECTED, STEPS, (False, True))


@pytest.mark.parametrize(("layout", "optimizer", "step", "packed"), chosen(CASES, ALL))
def test_step(layout, optimizer, step, packed):
    table, tx = table_of(layout, packed), OPTIMIZERS[optimizer]
    state = replicated(tx.init(table), table)
    train = training_step(loss, tx, STEPS[step])
    compiled = train.lower(table, state, ids_for(table)).compile()
    assert_no_table_moves(compiled, table)
    assert bytes_moved(compiled) <= 1.2 * (forward_bytes(table) + ROUTED)
    forward = jax.jit(loss).lower(table, ids_for(table)).compile()
    assert bytes_moved(compiled) - bytes_moved(forward) <= 1.2 * ROUTED
    tables = sum(x.nbytes for x in jax.tree.leaves((table, state)) if x.ndim)
    assert compiled.memory_analysis().alias_size_in_bytes >= tables / table.layout.shards


def test_control_the_parser_sees_what_moves():
    mesh = mesh_of(8)

    def of(function: Any, outputs: Any) -> list[tuple[str, int]]:
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=P("x"), out_specs=outputs, check_vma=False
        )
        return collectives(jax.jit(mapped).lower(jnp.zeros((64, 10))).compile())

    block = 8 * 10 * 4
    gather = lambda x: jax.lax.all_gather(x, "x", tiled=True)
    assert of(gather, P()) == [("all-gather", 8 * block)]
    assert of(lambda x: jax.lax.psum(x, "x"), P()) == [("all-reduce", 2 * block)]
    scatter = lambda x: jax.lax.psum_scatter(x, "x", tiled=True)
    assert sum(size for _, size in of(scatter, P("x"))) >= block
    shift = lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)])
    assert of(shift, P("x")) == [("collective-permute", block)]


def test_control_the_dense_step_moves_tables():
    table = jax.device_put(jnp.zeros((V, D)), NamedSharding(mesh_of(8), P()))
    ids = jax.device_put(jnp.zeros(N, jnp.int32), NamedSharding(mesh_of(8), P("x")))
    compiled = jax.jit(jax.grad(loss)).lower(table, ids).compile()
    assert bytes_moved(compiled) > V * D * 4


# --- ids beyond int32 ---------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["div", "mod"])
def test_ids_beyond_int32(placement):
    """A step on five billion rows, from shapes alone: an eighth of them on each device."""
    rows, columns = 5 * 10**9, 8
    with jax.enable_x64(True):
        layout = layout_of((rows, columns), mesh_of(8), placement=placement, packed=False)
        block = jax.eval_shape(
            layout.stored,
            jax.ShapeDtypeStruct((layout.shards * layout.block, columns), jnp.float32),
        )
        spread = lambda x: x.update(sharding=layout.sharding(x.ndim) if x.ndim else None)
        table = jmask.ShardedTable(spread(block), layout, (rows, columns))
        tx = jmask.adagrad(0.1)
        state = jax.eval_shape(tx.init, table)
        assert [x.shape for x in jax.tree.leaves(state)] == [(), block.shape]
        state = jax.tree.map(spread, state)
        ids = jax.ShapeDtypeStruct((N,), jnp.int64, sharding=NamedSharding(mesh_of(8), P("x")))
        assert jax.eval_shape(jmask.grad(loss), table, ids).row_ids().dtype == jnp.int64
        compiled = training_step(loss, tx).lower(table, state, ids).compile()
    memory = compiled.memory_analysis()
    of_a_device = 2 * layout.block * columns * 4
    assert of_a_device <= memory.argument_size_in_bytes <= of_a_device + 2**20
    assert memory.alias_size_in_bytes >= of_a_device
    assert memory.temp_size_in_bytes <= 2**22
    # Ids have 8 bytes each here.
    assert bytes_moved(compiled) <= 1.2 * 2 * (N * columns * 4 + N * 8)


def test_real_ids_beyond_int32():
    """The rows of a layout of 5e9 rows that are looked at, on shards that are real."""
    with jax.enable_x64(True):
        ids = jnp.asarray([0, 2**31 - 1, 2**31, 2**32 + 3, 5 * 10**9 - 1, 5 * 10**9])
        for placement in ("div", "mod"):
            layout = layout_of((5 * 10**9, 8), mesh_of(8), placement=placement)
            shards = (
                np.asarray(ids) // layout.block if placement == "div" else np.asarray(ids) % 8
            )
            for i, shard in zip(ids[:-1], shards, strict=False):
                place = layout.local(i[None], int(shard))
                assert 0 <= int(place[0]) < layout.block
                assert int(layout.ids(place, int(shard))[0]) == int(i)
                assert int(layout.local(i[None], (int(shard) + 1) % 8)[0]) == layout.block


def test_without_x64_it_is_refused():
    layout = layout_of((5 * 10**9, 8), mesh_of(8), packed=False)
    block = jax.ShapeDtypeStruct((layout.shards * layout.block, 8), jnp.float32)
    table = jmask.ShardedTable(block, layout, (5 * 10**9, 8))
    with pytest.raises(ValueError, match="jax_enable_x64"):
        jax.eval_shape(loss, table, jax.ShapeDtypeStruct((N,), jnp.int32))
