"""Weights that are row-sparse, gradients that store entries, as the sources have them.

MXNet's tutorial has a `row_sparse` weight with all of its rows; torch's Adagrad takes a COO
gradient as it is. What they print is what comes out here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import jmask
from tests.compiled_step import with_optax
from tests.optimizers import NOT_LAZY, OPTIMIZERS
from tests.sparse_arrays import coo
from tests.stored_tables import STEPS

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

GRADIENT = jmask.RowSparse([1, 2], [[1.0, 2], [4, 5]], (4, 2))


@functools.cache
def all_rows():
    """The weight of the tutorial."""
    return jmask.cast_storage(jnp.ones((4, 2)), "row_sparse")


OTHERS = {
    "not lazy": NOT_LAZY["not lazy"],
    "densify": optax.chain(jmask.densify(), jmask.sgd(0.1)),
    "every other step": jmask.multi_steps(jmask.adam(0.1), 2, like=GRADIENT),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *OTHERS])
def test_a_weight_that_stores_all_its_rows(name, wrap, step):
    """Steps are those of its array; it comes back as the storage that it was, of one size."""
    tx = (OPTIMIZERS | OTHERS)[name]
    run = wrap(lambda g, s, w: step(tx, g, s, w))
    weight, dense = all_rows(), all_rows().todense()
    state, expected = tx.init(weight), tx.init(dense)
    for scale in (1.0, -0.5):
        grads = jmask.tree.scale(scale, GRADIENT)
        weight, state = run(grads, state, weight)
        dense, expected = run(grads, expected, dense)
    assert repr(weight) == "RowSparse(float32[4, 2], nse=4)"
    weight.validate()
    np.testing.assert_allclose(weight.todense(), dense, rtol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), state, expected)


def test_the_tutorial_of_mxnet():
    tx = jmask.sgd(0.01, momentum=0.01)
    weight, state = jmask.apply_gradients(tx, GRADIENT, tx.init(all_rows()), all_rows())
    np.testing.assert_allclose(
        weight.todense(), [[1, 1], [0.99, 0.98], [0.96, 0.95], [1, 1]], rtol=1e-6
    )
    momentum = [[0, 0], [-0.01, -0.02], [-0.04, -0.05], [0, 0]]
    np.testing.assert_allclose(state.momentum, momentum, rtol=1e-6)


def test_a_weight_with_zero_rows_is_full_where_it_has_room():
    dense = jnp.array([[0.0, 0], [1, 1], [0, 0], [2, 2]])
    weight = jmask.cast_storage(dense, "row_sparse", nse=4)
    new, _ = jmask.apply_gradients(
        jmask.sgd(0.1), GRADIENT, jmask.sgd(0.1).init(weight), weight
    )
    np.testing.assert_allclose(new.todense(), dense - 0.1 * GRADIENT.todense(), rtol=1e-6)
    short = jmask.cast_storage(dense, "row_sparse")
    with pytest.raises(TypeError, match=r"`params` is a RowSparse.*all rows stored"):
        jmask.sgd(0.1).init(short)


PARAM = jnp.arange(8.0).reshape(2, 4)
INDICES = jnp.array([[0, 2], [1, 0], [1, 2]])
ENTRIES = BCOO((jnp.array([3.0, 4, 5]), INDICES), shape=(2, 4))


def test_adagrad_of_a_coo_gradient():
    """The numbers that torch's tutorial on masked tensors prints, after one step and two."""
    tx, param = jmask.adagrad(0.1, initial_accumulator_value=0.5), PARAM
    state = tx.init(param)
    for expected in (
        [[0, 1, 1.9027, 3], [3.9015, 5, 5.9010, 7]],
        [[0, 1, 1.8329, 3], [3.8314, 5, 5.8306, 7]],
    ):
        param, state = jmask.apply_gradients(tx, ENTRIES, state, param)
        np.testing.assert_allclose(param, expected, atol=1e-4)
    sums = [[0.5, 0.5, 18.5, 0.5], [32.5, 0.5, 50.5, 0.5]]
    np.testing.assert_allclose(state.sum_of_squares, sums)


def test_adagrad_written_with_masked_tensors():
    """The four lines of the tutorial, on a state that stores more than the mask."""
    mask = BCOO.fromdense(ENTRIES.todense() != 0)
    masked_grad = jmask.masked_tensor(ENTRIES, mask)
    state_sum = 0.5 + (masked_grad**2).to_tensor(0)
    std = jmask.masked_tensor(coo(state_sum), mask)
    std = jmask.numpy.sqrt(std) + 1e-10
    param = PARAM - 0.1 * (masked_grad / std).to_tensor(0)
    assert std.storage.nse == 3
    np.testing.assert_allclose(param, [[0, 1, 1.9027, 3], [3.9015, 5, 5.9010, 7]], atol=1e-4)


@pytest.mark.parametrize("step", [jmask.apply_gradients, with_optax], ids=["one", "two"])
@pytest.mark.parametrize("name", [*OPTIMIZERS, *NOT_LAZY])
def test_a_coo_gradient_is_a_masked_one(name, step):
    """Equal positions summed, padding left out; the state keeps the bits of other entries."""
    tx = (OPTIMIZERS | NOT_LAZY)[name]
    twice = jnp.concatenate([INDICES, INDICES[:1], jnp.array([[2, 4]])])
    entries = BCOO((jnp.array([1.0, 4, 5, 2, jnp.nan]), twice), shape=(2, 4))
    masked = jmask.masked_tensor(ENTRIES.todense(), ENTRIES.todense() != 0)
    results = [step(tx, g, tx.init(PARAM), PARAM) for g in (entries, masked)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), *results)


def test_microbatches_of_entries():
    tx = jmask.multi_steps(jmask.sgd(0.1), 2, like=ENTRIES)
    param, state = PARAM, tx.init(PARAM)
    for scale in (1.0, 2.0):
        entries = jmask.tree.scale(scale, ENTRIES)
        param, state = jmask.apply_gradients(tx, entries, state, param)
    np.testing.assert_allclose(param, PARAM - 0.15 * ENTRIES.todense(), rtol=1e-6)


@pytest.mark.parametrize("entries", [ENTRIES, coo(ENTRIES.todense())])
@pytest.mark.parametrize(
    "tx",
    [
        optax.scale(-0.5),
        optax.clip(1.0),
        optax.trace(0.9),
        optax.scale_by_schedule(lambda count: 0.5),
        optax.scale_by_schedule(lambda count: 2.0),  # indices stay integers, and ascend
    ],
    ids=["scale", "clip", "trace", "half", "twice"],
)
def test_arithmetic_over_the_leaves_of_a_coo_gradient(tx, entries):
    """A transformation of optax that is not lifted maps over the indices: never silently."""
    chain = optax.chain(tx, jmask.sgd(0.1))
    with pytest.raises(TypeError, match=r"put it inside jmask\.lazy"):
        jmask.apply_gradients(chain, entries, chain.init(PARAM), PARAM)


@pytest.mark.parametrize("tx", [optax.scale(-0.5), optax.clip(1.0)], ids=["scale", "clip"])
def test_indices_of_a_coo_gradient_that_are_no_integers(tx):
    chain = optax.chain(tx, jmask.sgd(0.1))
    with pytest.raises(TypeError, match=r"optax transformation inside jmask\.lazy"):
        chain.update(ENTRIES, chain.init(PARAM), PARAM)


def test_indices_of_a_coo_gradient_out_of_order():
    """Where jmask is not asked before optax, what breaks a promise is nan."""
    chain = optax.chain(optax.scale_by_schedule(lambda count: 0.5), jmask.sgd(0.1))
    entries = coo(ENTRIES.todense())
    updates, _ = chain.update(entries, chain.init(PARAM), PARAM)
    assert np.isnan(jmask.todense(updates)).any()
