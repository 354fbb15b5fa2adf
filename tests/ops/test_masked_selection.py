"""Selection, methods, sparse storage and transformations of masked tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO
from jax.sharding import PartitionSpec

import jmask
import jmask.numpy as jn
from tests import masked_cases as cases
from tests.masked_cases import MASK, assert_masked, example
from tests.sparse_arrays import coo

pytestmark = pytest.mark.sampled

X = example()
ROW = np.array([True, False, True])

# --- where and its relatives -------------------------------------------------------------


def test_where_takes_the_mask_of_what_it_takes():
    choose = np.array([[True], [False], [True]])
    plain = jnp.arange(4.0)
    for result in (jn.where(choose, X, plain), jax.jit(jn.where)(choose, X, plain)):
        expected = np.where(choose, X.data, plain), np.where(choose, MASK, True)
        assert_masked(result, *expected)
    assert_masked(jn.where(choose, 1, X), np.where(choose, 1, X.data), choose | MASK)
    condition = jmask.masked_tensor(choose[:, 0], ROW)[:, None]
    valid = np.where(choose, True, MASK) & ROW[:, None]
    assert_masked(jn.where(condition, 1, X), np.where(choose, 1, X.data), valid)
    assert_masked(jn.where(condition, 1, 0), [[1], [0], [1]], ROW[:, None])
    np.testing.assert_array_equal(
        cases.gradient(lambda x: jn.where(choose, x, 0), X),
        np.where(choose & MASK, cases.numbered(X), 0),
    )


@pytest.mark.rank_promotion
def test_masked_where_and_masked_fill():
    negative = np.nan_to_num(np.asarray(X.data)) < 0
    assert_masked(jn.masked_where(negative, X), X.data, MASK & ~negative)
    assert_masked(jn.masked_where(ROW[:, None], jnp.ones(4)), 1, ~ROW[:, None] & MASK.any(0))
    hidden = jmask.masked_tensor(jnp.zeros(4, bool), MASK[0])
    assert_masked(jn.masked_where(hidden, X), X.data, MASK & MASK[0])
    filled = jn.masked_fill(X, negative | ~MASK, 7)
    assert filled.dtype == np.float32
    assert_masked(filled, np.where(negative | ~MASK, 7, X.data), np.ones((3, 4), bool))
    part = jn.masked_fill(X, ROW[:, None], jmask.masked_tensor(7, False))
    assert_masked(part, X.data, MASK & ~ROW[:, None])


def test_like():
    for result, value in ((jn.zeros_like(X), 0), (jn.ones_like(X), 1), (jn.full_like(X, 3), 3)):
        assert_masked(result, value, MASK)
    assert jn.zeros_like(X, dtype=jnp.int8).dtype == np.int8
    assert jn.empty_like(X).shape == X.shape
    assert_masked(jn.copy(X), X.data, MASK)


@pytest.mark.parametrize("name", ["take", "take_along_axis"])
def test_take_of_unknown_entries_is_masked(name):
    index = jmask.masked_tensor(jnp.array([1, 0, 9, -1]), [True, False, True, True])
    function = lambda a: getattr(jn, name)(a, index, 0)
    a = jnp.arange(4.0)
    for source in (a, jmask.masked_tensor(a)):
        assert_masked(jax.jit(function)(source), [1, 0, 0, 3], [1, 0, 0, 1])
    grads = jax.grad(lambda a: cases.valid_sum(function(a)))(a)
    np.testing.assert_array_equal(grads, [0, 1, 0, 4])
    filled = getattr(jn, name)(jmask.masked_tensor(a), jnp.array([1, 9]), 0, fill_value=5)
    assert_masked(filled, [1, 5], [1, 1])


def test_take_along_a_middle_axis_with_masked_indices():
    a = jnp.arange(24.0).reshape(2, 3, 4)
    index = jmask.masked_tensor(jnp.array([[2, 0], [1, 1]]), [[True, False], [True, True]])
    valid = np.broadcast_to(index.mask[None, :, :, None], (2, 2, 2, 4))
    assert_masked(jn.take(a, index, 1), jnp.take(a, index.data, 1), valid)
    assert_masked(jn.take(a, index, -2), jnp.take(a, index.data, 1), valid)
    assert_masked(jn.take(a, index), jnp.take(a, index.data), index.mask)


# --- methods -----------------------------------------------------------------------------


@pytest.mark.dtype_promotion
def test_methods():
    data, y = np.asarray(X.data), jmask.masked_tensor(jnp.arange(3) * 1j, ROW)
    for result, function in (
        (X.reshape(4, 3), lambda a: a.reshape(4, 3)),
        (X.reshape((4, -1)), lambda a: a.reshape(4, 3)),
        (X.ravel(), np.ravel),
        (X.flatten(), np.ravel),
        (X.transpose(), np.transpose),
        (X.transpose(1, 0), np.transpose),
        (X.transpose((1, 0)), np.transpose),
        (X.T, np.transpose),
        (X.mT, np.transpose),
        (X.swapaxes(0, 1), np.transpose),
        (X[:1].squeeze(0), lambda a: a[0]),
        (X.repeat(2, 0), lambda a: np.repeat(a, 2, 0)),
        (X.take(jnp.array([1]), 1), lambda a: a[:, [1]]),
        (X.diagonal(), np.diagonal),
        (X.copy(), np.copy),
    ):
        assert_masked(result, function(data), function(MASK))
    assert_masked(y.real, np.zeros(3), ROW)
    assert_masked(y.imag, np.arange(3.0), ROW)
    assert_masked(y.conj(), np.arange(3) * -1j, ROW)
    assert_masked(X.clip(0, 3), np.clip(data, 0, 3), MASK)
    assert_masked((X / 3).round(1), np.round(data / np.float32(3), 1), MASK)
    assert X[0].sort().tolist() == [3.0, 5.0, 8.0, None]
    assert X[0].argsort().tolist() == [2, 0, 3, None]
    assert X[0].tolist() == [5.0, None, 3.0, 8.0]
    assert X[0, 0].item() == 5.0
    assert X[0, 1].item() is None
    assert X.item(0, 2) == 3.0
    assert X[0, 1].tolist() is None


# --- sparse storage ----------------------------------------------------------------------

PADDED = BCOO(
    (jnp.ones(4), jnp.array([[0, 0], [1, 1], [2, 2], [3, 4]])),
    shape=(3, 4),
    indices_sorted=True,
    unique_indices=True,
)
COO = jmask.masked_tensor(PADDED, [True, False, True, True])


def test_other_sparse_operations_say_so():
    for operation in (
        jn.flip,
        lambda x: x[0],
        lambda x: x.at[0].set(1),
        jn.sort,
        lambda x: jn.reshape(x, (2, 6), "F"),
        lambda x: jn.where(x > 0, x, 0),
    ):
        with pytest.warns(jmask.StorageFallbackWarning, match="3, 4"):
            result = operation(COO)
        assert result.stype == "default"
        with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning):
            operation(COO)
    with pytest.warns(jmask.StorageFallbackWarning, match="flip"):
        flipped = jn.flip(coo(np.eye(2, dtype=np.float32)))
    np.testing.assert_array_equal(flipped, np.eye(2))
    for shape in ((), (0, 2)):
        x = jmask.masked_tensor(coo(np.ones(shape or (1, 1), np.float32)))
        with pytest.warns(jmask.StorageFallbackWarning, match="reshape"):
            assert jn.reshape(x, shape).shape == shape


@pytest.mark.rank_promotion
def test_sparse_selection_stays_sparse():
    doubled = COO * 2
    chosen = jn.where(jnp.arange(4) < 2, COO, doubled)
    assert chosen.stype == "coo"
    expected = np.where(np.arange(4) < 2, np.eye(3, 4), 2 * np.eye(3, 4))
    assert_masked(chosen, expected, COO.to_dense().mask)
    hidden = jn.masked_where(jnp.arange(4) == 0, COO)
    assert hidden.stype == "coo"
    assert_masked(hidden, np.eye(3, 4), COO.to_dense().mask & (np.arange(4) != 0))
    ones = jn.full_like(COO, 7)
    assert ones.stype == "coo"
    assert_masked(ones, 7, COO.to_dense().mask)


# --- transformations ---------------------------------------------------------------------


def test_shard_map():
    mesh = jax.make_mesh((1,), ("rows",))
    spec = PartitionSpec("rows")
    x = jax.device_put(X, jax.NamedSharding(mesh, spec))
    flipped = jax.shard_map(jn.fliplr, mesh=mesh, in_specs=spec, out_specs=spec)(x)
    assert_masked(flipped, np.fliplr(X.data), np.fliplr(MASK))


def test_forward_mode():
    function = lambda data: jn.sort(jn.triu(X.with_values(data))).T.to_tensor(0)
    tangent = jnp.where(MASK, cases.numbered(X) * 1.0, jnp.nan)
    value, pushed = jax.jvp(function, (X.data,), (tangent,))
    assert jnp.isfinite(value).all()
    assert jnp.isfinite(pushed).all()
    pulled = jax.vjp(function, X.data)[1](jnp.ones((4, 3)))[0]
    np.testing.assert_allclose(
        jnp.where(MASK, tangent, 0).ravel() @ pulled.ravel(), pushed.sum()
    )
    np.testing.assert_array_equal(np.asarray(pulled)[~MASK], 0)
