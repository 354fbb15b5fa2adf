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
