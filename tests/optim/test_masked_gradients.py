"""Gradients with masks and with entries, and weights that are row-sparse, as their sources do.

MXNet has a `row_sparse` weight with all of its rows, torch's Adagrad takes a COO gradient as it
is. All optimizers take all of them: test_steps_of_all_kinds.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.sparse import BCOO

import jmask
import jmask.numpy as jnm
from tests.expressions import functions
from tests.optimizers import OPTIMIZERS
from tests.oracle import densified
from tests.sparse_arrays import coo
from tests.stored_tables import STEPS, bits
from tests.table_kinds import MASKED, drawn

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

PARAM = np.random.default_rng(9).normal(size=(24, 12)).astype(np.float32)
PARAM[-1, 2] = -0.0


@pytest.mark.of_cpus
@pytest.mark.parametrize("name", ["momentum", "adam with weight decay", "adagrad"])
def test_masked_rows_take_one_pass(name):
    """The mask is one operand of the scatter whose combiner is the optimizer."""
    tx, table = OPTIMIZERS[name], jnp.ones((50, 3))
    rows = jmask.RowSparse([4, 7], jnp.ones((2, 3)), (50, 3), coalesced=True)
    gradient = jmask.masked_tensor(
        rows, rows.with_values(jnp.array([[1, 0, 1], [0, 0, 1]]) > 0)
    )
    step = jax.jit(lambda g, s, p: jmask.apply_gradients(tx, g, s, p))
    text = step.lower(gradient, tx.init(table), table).as_text()
    assert text.count('"stablehlo.scatter"') == 1
    assert "stablehlo.gather" not in text


BOUNDED = optax.chain(optax.sgd(0.1), jmask.max_row_norm(0.5))


# On whole arrays nothing must be row-local; and a norm is that of the whole row.
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("inner", "kind"),
    [(optax.lamb(0.1), "masked"), (BOUNDED, "masked"), (BOUNDED, "masked coo")],
)
def test_valid_entries_are_those_of_a_dense_step(inner, kind, step):
    draw, tx, param = drawn(kind, PARAM, 0), jmask.lazy(inner), jnp.asarray(PARAM)
    new, _ = STEPS[step](tx, draw.gradient, tx.init(param), param)
    dense = jnp.asarray(draw.dense, jnp.float32)
    updates, _ = inner.update(dense, inner.init(param), param)
    np.testing.assert_allclose(new[draw.touched], (param + updates)[draw.touched], 1e-5)
    np.testing.assert_array_equal(bits(new)[~draw.touched], bits(PARAM)[~draw.touched])


@pytest.mark.parametrize("kind", MASKED[:4])
def test_apply_updates(kind):
    draw = drawn(kind, PARAM, 0)
    new = jmask.apply_updates({"t": jnp.asarray(PARAM)}, {"t": draw.gradient})["t"]
    np.testing.assert_allclose(new, PARAM + draw.dense, 1e-5, 1e-6)
    np.testing.assert_array_equal(bits(new)[~draw.touched], bits(PARAM)[~draw.touched])


@pytest.mark.parametrize("kind", MASKED[:4])
def test_gradient_in_a_masked_tensor(kind):
    """jmask.grad takes a MaskedTensor as an argument and returns one with its mask."""
    draw = drawn(kind, PARAM, 0)
    x, data, mask = draw.gradient, draw.dense, draw.touched
    loss = lambda params, w: jnm.sum(jnm.sin(params["x"]) * w).to_tensor(0.0)
    gradient, of_w = jmask.grad(loss, (0, 1))({"x": x}, jnp.asarray(PARAM))
    assert gradient["x"].stype == x.stype
    expected = np.where(mask, np.cos(data) * PARAM, 0)
    np.testing.assert_allclose(gradient["x"].to_tensor(0), expected, rtol=1e-5, atol=1e-6)
    # Sampled at stored rows, w is a table that was looked up.
    of_w = densified(of_w)
    np.testing.assert_allclose(of_w, np.where(mask, np.sin(data), 0), rtol=1e-5, atol=1e-6)
    value, alone = jax.jit(jmask.value_and_grad(lambda x: jnm.sum(x).to_tensor(0.0)))(x)
    np.testing.assert_allclose(alone.to_tensor(0), mask * 1.0)
    np.testing.assert_allclose(value, data[mask].sum(), rtol=1e-5)


# --- weights that are row-sparse, gradients that store entries --------------------------

GRADIENT = jmask.RowSparse([1, 2], [[1.0, 2], [4, 5]], (4, 2))


def test_the_tutorial_of_mxnet():
    tx, weight = (
        jmask.sgd(0.01, momentum=0.01),
        jmask.cast_storage(jnp.ones((4, 2)), "row_sparse"),
    )
    weight, state = jmask.apply_gradients(tx, GRADIENT, tx.init(weight), weight)
    assert repr(weight) == "RowSparse(float32[4, 2], nse=4)"
    weight.validate()
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


MATRIX = jnp.arange(8.0).reshape(2, 4)
INDICES = jnp.array([[0, 2], [1, 0], [1, 2]])
ENTRIES = BCOO((jnp.array([3.0, 4, 5]), INDICES), shape=(2, 4))


def test_adagrad_of_a_coo_gradient():
    """The numbers that torch's tutorial on masked tensors prints, after one step and two."""
    tx, param = jmask.adagrad(0.1, initial_accumulator_value=0.5), MATRIX
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
    param = MATRIX - 0.1 * (masked_grad / std).to_tensor(0)
    assert std.storage.nse == 3
    np.testing.assert_allclose(param, [[0, 1, 1.9027, 3], [3.9015, 5, 5.9010, 7]], atol=1e-4)


# With the last one indices stay integers, and ascend.
UNLIFTED = functions("", vars(optax) | globals())("""
    scale(-0.5); clip(1.0); trace(0.9); scale_by_schedule(lambda count: 0.5);
    scale_by_schedule(lambda count: 2.0)
""")


@pytest.mark.parametrize("entries", [ENTRIES, coo(ENTRIES.todense())])
@pytest.mark.parametrize("name", UNLIFTED)
def test_arithmetic_over_the_leaves_of_a_coo_gradient(name, entries):
    """A transformation of optax that is not lifted maps over the indices: never silently."""
    chain = optax.chain(UNLIFTED[name](), jmask.sgd(0.1))
    with pytest.raises((TypeError, ValueError), match=r"put it inside jmask\.lazy"):
        jmask.apply_gradients(chain, entries, chain.init(MATRIX), MATRIX)


def test_indices_of_a_coo_gradient_that_optax_has_changed():
    """Where jmask is not asked before optax: an error, or nan for what breaks a promise."""
    chain = optax.chain(optax.clip(1.0), jmask.sgd(0.1))
    with pytest.raises(TypeError, match=r"optax transformation inside jmask\.lazy"):
        chain.update(ENTRIES, chain.init(MATRIX), MATRIX)
    chain = optax.chain(optax.scale_by_schedule(lambda count: 0.5), jmask.sgd(0.1))
    updates, _ = chain.update(coo(ENTRIES.todense()), chain.init(MATRIX), MATRIX)
    assert np.isnan(jmask.todense(updates)).any()
