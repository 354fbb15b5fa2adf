"""Masked gradients in optimizers: valid entries move as in the dense update, others do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
import jmask.numpy as jnm
from jmask._tensors.storage import stored_values
from tests import sparse_arrays
from tests.optax_cases import CHAINS, ROW_LOCAL, extra_args
from tests.oracle import densified

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

V, D = 6, 3
RNG = np.random.default_rng(0)
PARAM = jnp.asarray(RNG.normal(size=(V, D)), jnp.float32).at[5, 2].set(-0.0)
DATA = np.float32(RNG.normal(size=(V, D)))
MASK = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=bool)
POISON = np.where(MASK, DATA, np.array([np.nan, np.inf, 1e30], np.float32))


def row_sparse():
    """Rows out of order, one row twice, padding, and a stored row that is all masked."""
    ids = [4, 0, 2, 0, 3, -1]
    values = POISON[[4, 0, 2, 0, 3, 0]]
    values[1], values[3] = POISON[0] / 2, POISON[0] / 2
    data = jmask.RowSparse(ids, values, (V, D))
    return jmask.masked_tensor(data, data.with_values(jnp.asarray(MASK[[4, 0, 2, 0, 3, 0]])))


def coo():
    stored = sparse_arrays.coo(np.where(MASK, DATA, 0), MASK.sum() + 2)
    return jmask.masked_tensor(stored)


def csr():
    return jmask.masked_tensor(sparse_arrays.csr(np.where(MASK, DATA, 0)))


GRADIENTS = {
    "default": lambda: jmask.masked_tensor(POISON, MASK),
    "row_sparse": row_sparse,
    "coo": coo,
    "csr": csr,
}


def compare(new, dense, old):
    np.testing.assert_allclose(np.asarray(new)[MASK], np.asarray(dense)[MASK], rtol=5e-6)
    same = np.asarray(new).view(np.uint32)[~MASK] == np.asarray(old).view(np.uint32)[~MASK]
    assert same.all(), "a masked entry changed"


def check(tx, reference, storage, **extra):
    """A warm-up step with a dense gradient, then one masked step against a dense one."""
    gradient = GRADIENTS[storage]()
    reference = optax.with_extra_args_support(reference)
    warm = jnp.full_like(PARAM, 0.3)
    updates, state = reference.update(warm, reference.init(PARAM), PARAM, **extra)
    param = optax.apply_updates(PARAM, updates).at[5, 2].set(-0.0)

    @jax.jit
    def masked_step(gradient, state, param):
        updates, state = tx.update(gradient, state, param, **extra)
        return optax.apply_updates(param, updates), state

    new, new_state = masked_step(gradient, state, param)
    dense = jnp.asarray(np.where(MASK, DATA, 0))
    updates, dense_state = jax.jit(lambda *a: reference.update(*a, **extra))(
        dense, state, param
    )
    compare(new, optax.apply_updates(param, updates), param)
    for x, y, old in zip(*map(jax.tree.leaves, (new_state, dense_state, state)), strict=True):
        if x.shape == (V, D):
            compare(x, y, old)
        else:
            np.testing.assert_allclose(x, y, rtol=1e-5)


NAMED = {
    "sgd": lambda **k: jmask.sgd(0.1, momentum=0.9, weight_decay=0.1, **k),
    "adam": lambda **k: jmask.adam(0.1, weight_decay=0.1, **k),
    "adagrad": lambda **k: jmask.adagrad(0.1, initial_accumulator_value=0.5, **k),
}


@pytest.mark.parametrize("storage", GRADIENTS)
@pytest.mark.parametrize("name", NAMED)
def test_named_optimizers(name, storage):
    check(NAMED[name](), NAMED[name](lazy_update=False), storage)


CLIPPED = "chain(clip_by_global_norm(0.1), adam(0.1))"
LIFTED = {name: (ROW_LOCAL | CHAINS)[name] for name in ("adamw", "lion", "rmsprop", CLIPPED)}


@pytest.mark.parametrize("storage", GRADIENTS)
@pytest.mark.parametrize("name", LIFTED)
def test_lifted_optax(name, storage):
    inner = LIFTED[name]()
    check(jmask.lazy(inner), inner, storage, **extra_args(name, None))


def test_any_optimizer_on_dense_storage():
    """On whole arrays nothing must be row-local."""
    check(jmask.lazy(optax.lamb(0.1)), optax.lamb(0.1), "default")


@pytest.mark.parametrize("storage", GRADIENTS)
def test_microbatches(storage):
    """The mean has what is valid in any of them; nothing under a mask is ever added."""
    whole = GRADIENTS[storage]()
    place = jnp.arange(whole.valid.size).reshape(whole.valid.shape)
    values = stored_values(whole.storage)
    parts = [
        whole.with_values(jnp.where(keep, values, jnp.nan), whole.valid & keep)
        for keep in (place % 3 > 0, place % 4 > 0)
    ]
    arrays = list(map(jmask.to_numpy_ma, parts))
    mask = ~np.ma.getmaskarray(arrays[0]) | ~np.ma.getmaskarray(arrays[1])
    mean = jmask.masked_tensor(sum(x.filled(0) for x in arrays) / 2, mask)
    inner = jmask.lazy(optax.sgd(0.1, momentum=0.9))
    expected = jmask.apply_gradients(inner, mean, inner.init(PARAM), PARAM)
    tx = jmask.multi_steps(inner, 2, like=jax.eval_shape(lambda: parts[0]))
    new, state = PARAM, tx.init(PARAM)
    for part in parts:
        new, state = jmask.apply_gradients(tx, part, state, new)
    assert 0 < mask.sum() < MASK.sum()
    old = jax.tree.leaves((PARAM, inner.init(PARAM)))
    leaves = map(jax.tree.leaves, ((new, state.inner_state), expected))
    for x, y, before in zip(*leaves, old, strict=True):
        np.testing.assert_allclose(x[mask], y[mask], rtol=5e-6)
        np.testing.assert_array_equal(
            np.asarray(x)[~mask].view(np.uint32), np.asarray(before)[~mask].view(np.uint32)
        )


@pytest.mark.parametrize("storage", ["default", "coo"])
def test_row_norms_keep_the_mask(storage):
    """Bounded before the optimizer, or after it in the same `lazy`."""
    before, dense = (
        optax.chain(jmask.clip_by_row_norm(0.5), jmask.adam(0.1, lazy_update=is_lazy))
        for is_lazy in (True, False)
    )
    check(before, dense, storage)
    after = optax.chain(optax.sgd(0.1), jmask.max_row_norm(0.5))
    check(jmask.lazy(after), after, storage)


@pytest.mark.parametrize("storage", GRADIENTS)
def test_zero_semantics(storage):
    """`densify` takes masked entries for zeros: momentum moves them."""
    gradient = GRADIENTS[storage]()
    tx = optax.chain(jmask.densify(), optax.adamw(0.1))
    updates, _ = tx.update(gradient, tx.init(PARAM), PARAM)
    expected, _ = optax.adamw(0.1).update(
        jnp.asarray(np.where(MASK, DATA, 0)), optax.adamw(0.1).init(PARAM), PARAM
    )
    np.testing.assert_allclose(updates, expected, rtol=1e-6)


@pytest.mark.parametrize("storage", GRADIENTS)
def test_apply_updates(storage):
    new = jmask.apply_updates({"t": PARAM}, {"t": GRADIENTS[storage]()})["t"]
    compare(new, np.asarray(PARAM) + DATA, PARAM)


def test_beside_other_gradients():
    params = {"masked": PARAM, "rows": PARAM, "dense": PARAM}
    gradient = {
        "masked": GRADIENTS["default"](),
        "rows": jmask.RowSparse([1], jnp.ones((1, D)), (V, D)),
        "dense": jnp.ones((V, D)),
    }
    tx = jmask.lazy(optax.adam(0.1))
    new, _ = jmask.apply_gradients(tx, gradient, tx.init(params), params)
    moved = {name: np.asarray(new[name] != PARAM) for name in params}
    np.testing.assert_array_equal(moved["masked"], MASK)
    assert moved["rows"].any(1).tolist() == [False, True] + 4 * [False]
    assert moved["dense"].all()


@pytest.mark.parametrize("storage", GRADIENTS)
def test_gradient_in_a_masked_tensor(storage):
    """jmask.grad takes a MaskedTensor as an argument and returns one with its mask."""
    x = GRADIENTS[storage]()

    def loss(params, w):
        return jnm.sum(jnm.sin(params["x"]) * w).to_tensor(0.0)

    gradient, of_w = jmask.grad(loss, (0, 1))({"x": x}, PARAM)
    assert gradient["x"].stype == x.stype
    expected = np.where(MASK, np.cos(DATA) * np.asarray(PARAM), 0)
    np.testing.assert_allclose(gradient["x"].to_tensor(0), expected, rtol=1e-5, atol=1e-6)
    # Sampled at stored rows, w is a table that was looked up.
    of_w = densified(of_w)
    np.testing.assert_allclose(of_w, np.where(MASK, np.sin(DATA), 0), rtol=1e-5, atol=1e-6)
    value, alone = jax.jit(jmask.value_and_grad(lambda x: jnm.sum(x).to_tensor(0.0)))(x)
    np.testing.assert_allclose(alone.to_tensor(0), MASK * 1.0)
    np.testing.assert_allclose(value, DATA[MASK].sum(), rtol=1e-5)
