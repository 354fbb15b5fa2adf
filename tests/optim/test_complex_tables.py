"""Complex tables: each number is the pair of its real and its imaginary part.

complex64 (V, D), optimizer of a name     float32 (V, 2 D), real parts first, as torch has it
complex64 (V, D), lifted by `lazy`        what optax makes of the dense complex gradient
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.stored_tables import STEPS, mesh_of

NAMED = {
    "sgd": jmask.sgd(0.1),
    "decayed": jmask.sgd(0.1, weight_decay=0.1, clip_gradient=0.5),
    "momentum": jmask.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": jmask.adam(0.1),
    "decoupled": jmask.adam(0.1, weight_decay=0.1, decay_mode="decoupled"),
    "adam per row": jmask.adam(0.1, count="per_row"),
    "adam in float32": jmask.adam(0.1, state_dtype=jnp.float32),
    "adagrad": jmask.adagrad(0.1, weight_decay=0.1),
    "rowwise adagrad": jmask.rowwise_adagrad(0.1),
    "rowwise adam": jmask.rowwise_adam(0.1, rescale_grad=0.5),
    "ftrl": jmask.ftrl(0.1),
    "shorter rows": optax.chain(jmask.clip_by_row_norm(0.7), jmask.adam(0.1)),
    "skipping": jmask.skip_nonfinite(jmask.adam(0.1)),
    "bounded": optax.chain(jmask.adam(0.1), jmask.max_row_norm(0.5)),
    "guarded": optax.chain(jmask.drop_nonfinite_rows(), jmask.adam(0.1)),
}
LIFTED = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1, weight_decay=0.1),
    "rmsprop": optax.rmsprop(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "pairs": optax.contrib.split_real_and_imaginary(optax.adam(0.1)),
}
# 9 rows are updated densely, 500 by their ids.
SHAPES = [(9, 3), (500, 3), (500, 2, 2), (500,)]
STORAGES = {
    "array": lambda x: x,
    "packed": jmask.PackedTable.pack,
    "sharded": lambda x: jmask.sharded(x, mesh_of(2)),
}
IDS = [[1, 3, 3, 8, -1], [3, 0, 8, 8, 2]]


def numbers(shape: tuple[int, ...], seed: int) -> jax.Array:
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape), jnp.complex64)


def pairs(x: Any) -> Any:
    """Complex rows as real ones, twice as long; what is real stays."""
    if not jnp.iscomplexobj(x):
        return x.reshape(len(x), -1) if x.ndim else x
    return jnp.concatenate([x.real.reshape(len(x), -1), x.imag.reshape(len(x), -1)], 1)


def gradients(shape: tuple[int, ...]) -> list[jmask.RowSparse]:
    values = (numbers((5, *shape[1:]), seed) for seed in (1, 2))
    return [jmask.RowSparse(ids, x, shape) for ids, x in zip(IDS, values, strict=True)]


def trained(tx: Any, table: Any, grads: list[Any], step: Any, jit: bool) -> Any:
    step = functools.partial(step, tx)
    params, state = {"t": table}, tx.init({"t": table})
    for gradient in grads:
        params, state = (jax.jit(step) if jit else step)({"t": gradient}, state, params)
    is_table = lambda x: isinstance(x, jmask.PackedTable | jmask.ShardedTable)
    return jax.tree.map(
        lambda x: x.todense() if is_table(x) else x, (params["t"], state), is_leaf=is_table
    )


@pytest.mark.sampled
@pytest.mark.parametrize(("step", "jit"), [("apply_gradients", True), ("update", False)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("optimizer", NAMED)
def test_optimizers_of_a_name_see_pairs(optimizer, storage, shape, step, jit):
    tx, table, grads = NAMED[optimizer], numbers(shape, 0), gradients(shape)
    params, state = trained(tx, STORAGES[storage](table), grads, STEPS[step], jit)
    expected, expected_state = trained(
        tx,
        pairs(table),
        [jmask.RowSparse(g.row_ids(), pairs(g.values), pairs(table).shape) for g in grads],
        jmask.apply_gradients,
        True,
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    assert params.dtype == table.dtype
    close(pairs(params), expected)
    for x, y in zip(*map(jax.tree.leaves, (state, expected_state)), strict=True):
        # A row of several dimensions has its number as often as its last dimension comes.
        close(pairs(x), np.broadcast_to(pairs(y), pairs(x).shape))
    untouched = np.setdiff1d(np.arange(shape[0]), np.ravel(IDS))
    np.testing.assert_array_equal(params[untouched], table[untouched])


@pytest.mark.sampled
@pytest.mark.parametrize(("step", "jit"), [("apply_gradients", True), ("update", False)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("optimizer", LIFTED)
@pytest.mark.dtype_promotion
def test_lifted_ones_do_what_optax_does(optimizer, storage, shape, step, jit):
    if optimizer == "pairs" and storage != "array":
        pytest.skip("this wrapper of optax makes two arrays of each, and none of a table")
    tx, table, grads = LIFTED[optimizer], numbers(shape, 0), gradients(shape)[:1]
    params, _ = trained(jmask.lazy(tx), STORAGES[storage](table), grads, STEPS[step], jit)
    expected, _ = trained(tx, table, [grads[0].todense()], STEPS["update"], True)
    touched = np.setdiff1d(np.ravel(IDS[0]), [-1])
    untouched = np.setdiff1d(np.arange(shape[0]), touched)
    np.testing.assert_allclose(params[touched], expected[touched], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(params[untouched], table[untouched])


@pytest.mark.parametrize("optimizer", ["adam", "rowwise adam"])
def test_dense_parameters_are_pairs_too(optimizer):
    tx, weights, gradient = NAMED[optimizer], numbers((4, 3), 0), numbers((4, 3), 1)
    updates, _ = tx.update(gradient, tx.init(weights), weights)
    expected, _ = tx.update(pairs(gradient), tx.init(pairs(weights)), pairs(weights))
    np.testing.assert_allclose(pairs(updates), expected, rtol=1e-5)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("max_norm", [None, 0.9])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
def test_bags(combiner, max_norm, weighted, storage):
    table, ids = numbers((40, 3), 0), jnp.array([[1, 7, 7], [39, 1, 40], [-1, -1, -1]])
    weights = jnp.array([[1.0, 2, 3], [0.5, 0, 1], [1, 1, 1]]) if weighted else None

    def bags(table, weights):
        return jmask.embedding_bag(
            table, ids, combiner=combiner, weights=weights, max_norm=max_norm, padding_id=-1
        )

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

    stored = STORAGES[storage](table)
    result = jax.jit(bags)(stored, weights)
    np.testing.assert_allclose(result[::2], expected(table, weights)[::2], rtol=1e-5)
    assert jnp.isnan(result[1]).all()

    def loss(function):
        return lambda table, weights: jnp.sum(jnp.abs(function(table, weights)[::2]) ** 2)

    if max_norm is None:
        gradient = jmask.grad(loss(bags))(stored, weights)
        dense = jax.grad(loss(expected))(table, weights)
        assert isinstance(gradient, jmask.RowSparse)
        np.testing.assert_allclose(gradient.todense(), dense, rtol=1e-5, atol=1e-6)


def test_a_real_gradient_moves_the_real_parts():
    table = numbers((9, 2), 0)
    gradient = jmask.RowSparse([1, 1], jnp.ones((2, 2)), (9, 2))
    for tx in (jmask.sgd(0.1), jmask.adam(0.1), jmask.rowwise_adagrad(0.1)):
        new, _ = jmask.apply_gradients(tx, gradient, tx.init(table), table)
        np.testing.assert_array_equal(new.imag, table.imag)
        assert (new.real[1] < table.real[1]).all()


def test_bits_of_rows_are_kept_in_lines():
    """-0.0, and nan in one part of a number, survive a write to a neighbour."""
    table = (
        numbers((9, 2), 0).at[4].set(jax.lax.complex(jnp.full(2, -0.0), jnp.full(2, jnp.nan)))
    )
    packed = jmask.PackedTable.pack(table)
    gradient = jmask.RowSparse([3, 5], jnp.ones((2, 2), jnp.complex64), (9, 2))
    tx = jmask.adam(0.1)
    new, _ = jmask.apply_gradients(tx, gradient, tx.init(packed), packed)
    np.testing.assert_array_equal(
        np.asarray(new.todense())[4].view(np.int32), np.asarray(table)[4].view(np.int32)
    )
