"""`huge_pages` moves memory and changes nothing that is in it."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from jmask._tables import huge_pages as _huge_pages
from tests.compiled_step import training_step

ROWS = 2**15
TABLE = np.random.default_rng(0).normal(size=(ROWS, 32)).astype(np.float32)  # 4 MiB


@pytest.mark.of_cpus
@pytest.mark.skipif(sys.platform != "linux", reason="the call is of Linux")
def test_counts_the_large_arrays_and_keeps_them():
    tree = {"table": jnp.array(TABLE), "small": jnp.ones(7), "name": "x", "none": None}
    granted = jmask.huge_pages(tree)
    # All but the two ends, where the array shares a page with others.
    assert TABLE.nbytes - 2 * 4096 * 16 <= granted <= TABLE.nbytes
    np.testing.assert_array_equal(tree["table"], TABLE)
    np.testing.assert_array_equal(tree["small"], np.ones(7))


def test_a_donated_step_stays_in_them():
    tx, table = jmask.adam(0.1), jnp.array(TABLE)
    state = tx.init(table)
    jmask.huge_pages((table, state))
    step = training_step(lambda t: jnp.sum(t[jnp.array([3, 5])]), tx)
    before = [x.unsafe_buffer_pointer() for x in (table, state.mu, state.nu)]
    table, state, _ = step(table, state)
    assert [x.unsafe_buffer_pointer() for x in (table, state.mu, state.nu)] == before
    np.testing.assert_array_equal(np.delete(table, [3, 5], 0), np.delete(TABLE, [3, 5], 0))


def test_what_has_no_memory_here(monkeypatch):
    gradient = jmask.RowSparse([1], jnp.ones((1, 2)), (3, 2))
    deleted = jnp.array(TABLE)
    deleted.delete()
    assert jmask.huge_pages((gradient, deleted, jnp.zeros((0, 4)), 3.0, TABLE)) == 0
    monkeypatch.setattr(_huge_pages.sys, "platform", "darwin")
    assert jmask.huge_pages(jnp.array(TABLE)) == 0
