"""What the benchmark leaves out to show what it gains is left out, and there again after it."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.sparse import BCSR

import jmask
from benchmarks.tricks import TRICKS, left_out
from tests.compiled_step import training_step

pytestmark = pytest.mark.of_cpus

LOOKUPS, WIDTH = 64, 64
squares = lambda table, ids: jnp.sum(table[ids] ** 2)


def program_of_a_step(rows):
    tx, table = jmask.adam(0.1), jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    step, ids = training_step(squares, tx), jax.ShapeDtypeStruct((LOOKUPS,), jnp.int32)
    return step.lower(table, jax.eval_shape(tx.init, table), ids).as_text()


def program_of_a_product():
    x = BCSR((jnp.ones(2), jnp.array([0, 3]), jnp.array([0, 1, 2])), shape=(2, 5))
    return jax.jit(lambda x, w: jmask.dot(x, w)).lower(x, jnp.ones((5, 16))).as_text()


def program_of_bags():
    ids, table = jnp.zeros((1000, 5), jnp.int32), jnp.ones((10, WIDTH))
    return jax.jit(jmask.embedding_bag).lower(table, ids).as_text()


def program_of_plain_bags():
    ids, table = jnp.zeros((1000, 5), jnp.int32), jnp.ones((10, WIDTH))
    loss = lambda table, ids: jnp.sum(table[ids].sum(1) ** 2)
    return jax.jit(jmask.value_and_grad(loss)).lower(table, ids).as_text()


PROGRAMS = {
    "bags by column": program_of_bags,
    "sums of lookups": program_of_plain_bags,
    "fast gather": lambda: program_of_a_step(1000),
    "hashing": lambda: program_of_a_step(1000),
    "whole small tables": lambda: program_of_a_step(LOOKUPS),
    "kernel for CSR": program_of_a_product,
}


@pytest.mark.parametrize("name", TRICKS)
def test_left_out(name):
    program = PROGRAMS[name]
    usual = program()
    with left_out(name):
        assert program() != usual
    with left_out(""):
        assert program() == usual
