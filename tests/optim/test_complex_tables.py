"""Complex tables: each number is the pair of its real and its imaginary part.

complex64 (V, D), optimizer of a name     float32 (V, 2 D), real parts first, as torch has it
complex64 (V, D), lifted by `lazy`        what optax makes of the dense complex gradient
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.optimizers import NAMED, OPTAX
from tests.oracle import assert_close
from tests.stored_tables import bits, of_lines, stepped, stored, unpacked

# The mask of "adamw" differs for (V,) and (V, 2).
OF_PAIRS = {name: tx for name, tx in NAMED.items() if name != "adamw"} | {
    "adam in float32": jmask.adam(0.1, state_dtype=jnp.float32),
    "bounded": optax.chain(jmask.adam(0.1), jmask.max_row_norm(0.5)),
}
LIFTED = OPTAX | {"pairs": optax.contrib.split_real_and_imaginary(OPTAX["adam"])}
# 9 rows are updated densely, 500 by their ids.
SHAPES = [(9, 3), (500, 3), (500, 2, 2), (500,)]
STORAGES = ("array", "packed")
IDS = [[1, 3, 3, 8, -1], [3, 0, 8, 8, 2]]
# Of row 4, which no id names: also beside touched rows of its line it keeps these bits.
SPECIAL = jax.lax.complex(jnp.float32(-0.0), jnp.float32(jnp.nan))


def numbers(shape, seed):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape), jnp.complex64)


def pairs(x):
    """Complex rows as real ones, twice as long; what is real stays."""
    if not jnp.iscomplexobj(x):
        return x.reshape(len(x), -1) if x.ndim else x
    return jnp.concatenate([x.real.reshape(len(x), -1), x.imag.reshape(len(x), -1)], 1)


def gradients(shape):
    values = (numbers((5, *shape[1:]), seed) for seed in (1, 2))
    return [jmask.RowSparse(ids, x, shape) for ids, x in zip(IDS, values, strict=True)]


def run_of(tx, storage, table, grads, way):
    """Parameters and state of a run on a table in one of the storages, as arrays."""
    kept = stored(storage, table)
    if storage == "packed":
        grads = [of_lines(g, kept) for g in grads]
    run = stepped(tx, kept, grads, *way)
    run = unpacked(run, kept, table.shape) if storage == "packed" else run
    return jax.tree.map(np.asarray, run)


def on_storages(test):
    for name, values in (("storage", STORAGES), ("shape", SHAPES)):
        test = pytest.mark.parametrize(name, values, ids=str)(test)
    ways = [("apply_gradients", jax.jit), ("update", lambda f: f)]
    return pytest.mark.sampled(pytest.mark.parametrize("way", ways, ids=["jit", "eager"])(test))


@on_storages
@pytest.mark.parametrize("optimizer", OF_PAIRS)
def test_optimizers_of_a_name_see_pairs(optimizer, storage, shape, way):
    tx, table, grads = (
        OF_PAIRS[optimizer],
        numbers(shape, 0).at[4].set(SPECIAL),
        gradients(shape),
    )
    by_rows = "rowwise" in optimizer or optimizer in ("bounded", "adam within norms")
    if storage == "packed" and (by_rows or "per row" in optimizer):
        pytest.skip("what works row by row takes no lines")
    params, state = run_of(tx, storage, table, grads, way)
    of_pairs = [
        jmask.RowSparse(g.row_ids(), pairs(g.values), pairs(table).shape) for g in grads
    ]
    expected = jax.tree.leaves(stepped(tx, pairs(table), of_pairs))
    assert params.dtype == table.dtype
    for x, y in zip(jax.tree.leaves((params, state)), expected, strict=True):
        # A row of several dimensions has its number as often as its last dimension comes.
        assert_close(pairs(x), np.broadcast_to(pairs(y), pairs(x).shape))
    untouched = np.setdiff1d(np.arange(shape[0]), np.ravel(IDS))
    np.testing.assert_array_equal(bits(params)[untouched], bits(table)[untouched])


@on_storages
@pytest.mark.parametrize("optimizer", LIFTED)
@pytest.mark.dtype_promotion
def test_lifted_ones_do_what_optax_does(optimizer, storage, shape, way):
    tx, table, grads = LIFTED[optimizer], numbers(shape, 0), gradients(shape)[:1]
    params, _ = run_of(jmask.lazy(tx), storage, table, grads, way)
    expected, _ = stepped(tx, table, [grads[0].todense()], "update")
    touched = np.setdiff1d(np.ravel(IDS[0]), [-1])
    untouched = np.setdiff1d(np.arange(shape[0]), touched)
    np.testing.assert_allclose(params[touched], expected[touched], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(params[untouched], table[untouched])


@pytest.mark.parametrize("optimizer", ["adam", "rowwise adam"])
def test_dense_parameters_are_pairs_too(optimizer):
    tx, weights, gradient = OF_PAIRS[optimizer], numbers((4, 3), 0), numbers((4, 3), 1)
    updates, _ = tx.update(gradient, tx.init(weights), weights)
    expected, _ = tx.update(pairs(gradient), tx.init(pairs(weights)), pairs(weights))
    np.testing.assert_allclose(pairs(updates), expected, rtol=1e-5)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("max_norm", [None, 0.9])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
def test_bags(combiner, max_norm, weighted, storage):
    table, ids = numbers((40, 3), 0), jnp.array([[1, 7, 7], [39, 1, 400], [-1, -1, -1]])
    weights = jnp.array([[1.0, 2, 3], [0.5, 0, 1], [1, 1, 1]]) if weighted else None

    def bags(table, weights):
        how = {"max_norm": max_norm, "padding_id": -1, "width": 3}
        return jmask.embedding_bag(table, ids, combiner=combiner, weights=weights, **how)

    @jax.numpy_dtype_promotion("standard")
    def expected(table, weights):
        rows = table.at[ids].get(mode="fill", wrap_negative_indices=False)
        if max_norm:
            norms = jnp.linalg.norm(rows, axis=-1, keepdims=True)
            # The norm is no part of the derivative, as in `jmask.embedding_lookup`.
            longer = jnp.where(norms > max_norm, norms, max_norm)
            rows = rows * (max_norm / longer)
        w = jnp.where(ids == -1, 0, 1 if weights is None else weights)
        total = jnp.einsum("bl,bld->bd", w, jnp.where(ids[..., None] == -1, 0, rows))
        size = {"sum": jnp.ones(3), "mean": w.sum(1), "sqrtn": jnp.sqrt((w * w).sum(1))}
        return total / jnp.maximum(size[combiner], 1e-30)[:, None]

    kept = stored(storage, table)
    result = jax.jit(bags)(kept, weights)
    np.testing.assert_allclose(result[::2], expected(table, weights)[::2], rtol=1e-5)
    assert jnp.isnan(result[1]).all()

    def loss(function):
        return lambda table, weights: jnp.sum(jnp.abs(function(table, weights)[::2]) ** 2)

    if max_norm is None:
        gradient = jmask.grad(loss(bags))(kept, weights)
        dense = jax.grad(loss(expected))(table, weights)
        assert isinstance(gradient, jmask.RowSparse)
        found = gradient.todense()
        found = unpacked(found, kept, table.shape) if storage == "packed" else found
        np.testing.assert_allclose(found, dense, rtol=1e-5, atol=1e-6)


def test_a_real_gradient_moves_the_real_parts():
    table = numbers((9, 2), 0)
    gradient = jmask.RowSparse([1, 1], jnp.ones((2, 2)), (9, 2))
    for tx in (jmask.sgd(0.1), jmask.adam(0.1), jmask.rowwise_adagrad(0.1)):
        new, _ = jmask.apply_gradients(tx, gradient, tx.init(table), table)
        np.testing.assert_array_equal(new.imag, table.imag)
        assert (new.real[1] < table.real[1]).all()
