"""Elementwise functions of tensors that store different positions, or in another storage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.ops.test_elementwise import check
from tests.sparse_arrays import coo, csr

BOTH = [
    (coo(np.float32([1, 0, 2, 4])), coo(np.float32([0, 3, 4, 5]), nse=5), [0, 0, 6, 9]),
    (csr(np.float32([[1, 0], [2, 3]])), coo(np.float32([[1, 5], [0, 7]])), [[2, 0], [0, 10]]),
    (
        jmask.RowSparse([3, 1], jnp.array([1.0, 2.0]), (5,)),
        jmask.RowSparse([4, 3, -1], jnp.array([3.0, 4, 5]), (5,)),
        [0, 0, 0, 5, 0],
    ),
]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("x", "y", "expected"), BOTH, ids=["coo", "csr and coo", "row_sparse"])
def test_positions_that_differ(x, y, expected, wrap):
    """Entries exist in the result where both operands store them; nothing becomes dense."""
    x, y = jmask.masked_tensor(x), jmask.masked_tensor(y)
    with jmask.strict():
        result = wrap(lambda x, y: x + y)(x, y)
    assert result.stype == x.stype
    np.testing.assert_array_equal(result.to_tensor(0), expected)


@pytest.mark.parametrize("storage", ["row_sparse", "coo", "csr"])
@pytest.mark.rank_promotion
def test_broadcast_to_a_larger_shape(storage):
    column = np.array([[1.0], [0], [2]], np.float32)
    x = jmask.masked_tensor(jmask.cast_storage(column, storage))
    row = jnp.arange(2.0)
    with pytest.warns(
        jmask.StorageFallbackWarning, match=rf"{storage} .*\(3, 1\) became dense"
    ):
        result = x + row
    check(result, column + row, np.broadcast_to(column != 0, (3, 2)))


def test_storages_that_differ_warn():
    x = jmask.masked_tensor(coo(np.eye(3)))
    y = jmask.masked_tensor(jmask.RowSparse([1], jnp.ones((1, 3)), (3, 3)))
    with pytest.warns(jmask.StorageFallbackWarning, match="became dense"):
        result = x + y
    np.testing.assert_array_equal(result.to_tensor(0), 2 * jnp.zeros((3, 3)).at[1, 1].set(1))


X, Y = np.float32([[1, 0], [2, 3], [0, 0]]), np.float32([[4, 5], [0, 6], [0, 7]])
STORAGES = ["default", "row_sparse", "coo", "csr"]
READERS = {
    "sparse_mask": lambda x, y: jmask.sparse_mask(x, y),
    "masked_where": lambda x, y: jmask.numpy.masked_where(jmask.numpy.greater(x, 1.5), y),
    "where": lambda x, y: jmask.numpy.where(jmask.numpy.greater(x, 1.5), y, y * 2),
    "average": lambda x, y: jmask.numpy.average(y, 1, x),
    "histogram": lambda x, y: jmask.numpy.histogram(y, jnp.arange(9.0), weights=x)[0],
    "sum": lambda x, y: jmask.numpy.sum(y, 1, where=jmask.numpy.greater(x, 1.5)),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("stype", STORAGES)
@pytest.mark.parametrize("like", STORAGES[1:])
@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
def test_a_tensor_is_read_where_another_one_stores(like, stype, name, wrap):
    """What is read at the stored positions of `y` does not depend on the storages."""
    x, y = jmask.cast_storage(X, stype), jmask.masked_tensor(jmask.cast_storage(Y, like))
    dense = jmask.masked_tensor(y.to_tensor(0), y.to_dense().mask)
    got, expected = (wrap(READERS[name])(x, y), READERS[name](jnp.array(X), dense))
    if not isinstance(expected, jmask.MaskedTensor):
        np.testing.assert_allclose(got, expected)
        return
    np.testing.assert_array_equal(got.to_dense().mask, expected.mask)
    np.testing.assert_allclose(got.to_tensor(0), expected.to_tensor(0))


@pytest.mark.parametrize("name", ["sparse_mask", "masked_where", "where", "histogram", "sum"])
@pytest.mark.parametrize(("like", "stype"), [("coo", "csr"), ("csr", "coo"), ("coo", "coo")])
def test_entries_are_read_by_their_positions(like, stype, name):
    """Nothing becomes dense where both store entries, in other places or another order."""
    x, y = jmask.cast_storage(X, stype), jmask.masked_tensor(jmask.cast_storage(Y, like))
    with jmask.strict():
        READERS[name](x, y)
