"""Sharded tables whose rows go to their owners alone: as on one device, or nan, never less.

Their trajectories are in test_sharded_table.py.
"""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmask
from benchmarks.collectives import collectives
from tests.compiled_step import training_step
from tests.stored_tables import bits, mesh_of, numbers, sharded

pytestmark = pytest.mark.sampled(15)

V = 21


def exchanged(x: Any, name: str = "8 devices", factor: float = 4.0, **how: Any) -> Any:
    how = {"placement": "mod", "packed": False} | how
    return sharded(x, name, capacity_factor=factor, **how)


def loss(table: Any, ids: Any) -> Any:
    rows = jmask.embedding_lookup(table, ids, padding_id=-1, mode="zero")
    return jnp.sum(jnp.sin(rows)), rows


@functools.cache
def everything(factor: float, name: str) -> Any:
    """Lookup, gradient and an update of a table that is exchanged, compiled."""

    @jax.jit
    def run(x, ids):
        table = exchanged(x, name, factor=factor)
        (_, rows), gradient = jmask.value_and_grad(loss, has_aux=True)(table, ids)
        tx = jmask.sgd(1.0)
        new, _ = jmask.apply_gradients(tx, gradient, tx.init(table), table)
        return rows, new.todense()

    return run


@hypothesis.given(
    ids=st.lists(st.integers(-3, V + 3), min_size=32, max_size=32),
    name=st.sampled_from(["8 devices", "rows over table, batch over both"]),
)
def test_any_ids(ids, name):
    """However unevenly ids fall on shards, lookups are exact: in more rounds, or in one.

    With eight times its share a shard has room for all there is.
    """
    x, ids = numbers(), jnp.array(ids)
    rows, new = everything(8.0, name)(x, ids)
    gradient, expected = jax.grad(loss, has_aux=True)(x, ids)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(new, x - gradient, rtol=1e-5, atol=1e-6)


@hypothesis.given(st.lists(st.integers(-1, V - 1), min_size=32, max_size=32))
def test_what_does_not_fit_is_nan(ids):
    """A shard with more entries than it has room for has nan in some of their rows."""
    x = numbers()
    rows, new = everything(1.0, "8 devices")(x, jnp.array(ids))
    gradient, expected = jax.grad(loss, has_aux=True)(x, jnp.array(ids))
    np.testing.assert_array_equal(rows, expected)
    # Four ids on each of eight devices: an id counts once for each device.
    sent = [i for part in np.reshape(ids, (8, 4)) for i in set(part) if i >= 0]
    entries = np.bincount(np.array(sent, int) % 8, minlength=8)
    new, is_nan, shard = np.asarray(new), np.isnan(new).all(axis=1), np.arange(V) % 8
    for number, count in enumerate(entries):
        if count > 4:
            assert is_nan[shard == number].any()
            changed = (bits(new) != bits(x)).any(axis=1)
            np.testing.assert_array_equal((changed & ~is_nan)[shard == number], False)
        else:
            exact = np.asarray(x - gradient)[shard == number]
            np.testing.assert_allclose(new[shard == number], exact, rtol=1e-5, atol=1e-6)


def test_a_step_that_does_not_fit_is_skipped():
    table = exchanged(numbers(), factor=1.0)
    tx = jmask.skip_nonfinite(jmask.adagrad(0.1))
    step, before = training_step(lambda t, ids: loss(t, ids)[0], tx), np.asarray(table)
    after, state, _ = step(table, tx.init(table), jnp.tile(jnp.array([0, 8, 16, 5]), 8))
    np.testing.assert_array_equal(bits(after), bits(before))
    after, state, _ = step(after, state, jnp.arange(32) % 8)
    assert np.isfinite(after).all()
    assert (np.asarray(after) != before)[:8].any(axis=1).all()


def test_other_programs():
    """Bags and scans, and jax.grad, whose gradient is as large as the table."""
    x, ids = numbers((3, 4)), jnp.array([[1, 3, 3], [20, 7, 2]])

    def both(table):
        bags = jmask.embedding_bag(table, ids, combiner="mean")
        add = lambda total, i: (total + jnp.sum(jnp.sin(table[i])), None)
        return jnp.sum(bags**2) + jax.lax.scan(add, jnp.float32(0), ids)[0]

    table = exchanged(x)
    for gradient in (jax.jit(jmask.grad(both))(table), jax.jit(jax.grad(both))(table)):
        np.testing.assert_allclose(gradient.todense(), jax.grad(both)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("name", ["8 devices", "rows over table, batch over both"])
def test_inside_a_shard_map(name, checked):
    """A step of a program that is written for each device, its types checked or not."""
    x, tx = numbers(), jmask.adam(0.1)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, V, 32))
    table = exchanged(x, name, factor=8.0)
    state, layout = tx.init(table), table.layout
    spread = jax.tree.map(lambda leaf: P(layout.rows) if leaf.ndim else P(), (table, state))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=layout.mesh,
        in_specs=(*spread, P(layout.batch)),
        out_specs=(*spread, P()),
        check_vma=checked,
    )
    def step(table, state, ids):
        gradient = jmask.grad(lambda t: loss(t, ids)[0])(table)
        table, state = jmask.apply_gradients(tx, gradient, state, table)
        return table, state, jax.lax.psum(loss(table, ids)[0], layout.batch)

    table, state, value = step(table, state, ids)
    dense = jax.grad(lambda t: loss(t, ids)[0])(x)
    new, _ = jmask.apply_gradients(tx, jmask.RowSparse.fromdense(dense), tx.init(x), x)
    np.testing.assert_allclose(table, new, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(value, loss(new, ids)[0], rtol=1e-5)


def test_what_crosses_the_network():
    """With as many lookups on each device the same bytes, on two devices or on eight."""
    rows, width, lookups, factor = 4000, 32, 512, 2.0

    def bytes_of(devices: int) -> tuple[int, int]:
        mesh = mesh_of(devices)
        x = jnp.zeros((rows, width))
        table = jmask.sharded(x, mesh, capacity_factor=factor, packed=False)
        ids = np.random.default_rng(0).integers(0, rows, lookups * devices).astype(np.int32)
        ids = jax.device_put(ids, NamedSharding(mesh, P("x")))
        tx, of_sines = jmask.adam(0.1), lambda t, ids: jnp.sum(jnp.sin(t[ids]))
        compiled = training_step(of_sines, tx).lower(table, tx.init(table), ids).compile()
        moved = collectives(compiled)
        assert {kind for kind, _ in moved} <= {"all-to-all", "all-reduce"}
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= 3 * x.nbytes / devices
        return sum(size for _, size in moved), memory.temp_size_in_bytes

    (of_two, _), (of_eight, temporaries) = bytes_of(2), bytes_of(8)
    room = factor * lookups * (width + 1) * 4
    assert 0 < of_two <= 1.1 * 2 * room
    assert of_eight <= 1.1 * of_two
    assert temporaries <= 12 * room


def test_another_placement_keeps_the_factor():
    table = exchanged(numbers(), factor=3.0).with_placement("div")
    assert (table.layout.placement, table.layout.capacity_factor) == ("div", 3.0)
