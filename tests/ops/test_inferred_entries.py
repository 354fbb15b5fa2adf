"""Which storage functions of BCOO and BCSR tensors have, of positions that differ, of names."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
from tests.expressions import functions
from tests.ops.test_elementwise import OTHER, check, stored
from tests.sparse_arrays import coo, csr

KEPT = functions("m, x, y, d", {"__file__": __file__})("""
    m.sin(x); m.multiply(x, d); m.multiply(x, d[0]); m.add(x, y); m.subtract(x, x);
    m.maximum(x, m.multiply(y, y)); m.where(d > 0, x, y)
""")


class TestEntries:
    a = np.array([[0.0, 2, 0], [3, 0, -1]], np.float32)
    b = np.array([[1.0, 4, 0], [0, 0, 5]], np.float32)
    pairs: ClassVar = {"coo": (coo(a, nse=5), coo(b)), "csr": (csr(a), csr(b))}

    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", pairs)
    @pytest.mark.parametrize("name", KEPT)
    @pytest.mark.rank_promotion
    def test_kept(self, kind, name):
        function, (x, y) = KEPT[name], self.pairs[kind]
        d = jnp.asarray(self.b - 2)
        expected = function(jnp, self.a, self.b, d)
        with jmask.strict():
            for wrap in (lambda f: f, jax.jit):
                result = wrap(lambda x, y, d: function(jnm, x, y, d))(x, y, d)
                assert type(result) is type(x)
                np.testing.assert_allclose(result.todense(), expected, rtol=1e-6)

    def test_equal_positions_are_summed_before_a_nonlinear_function(self):
        x = BCOO((jnp.array([1.0, 2]), jnp.array([[1, 1], [1, 1]])), shape=(2, 2))
        np.testing.assert_array_equal(jnm.square(x).todense(), [[0, 0], [0, 9]])

    @pytest.mark.parametrize("kind", ["coo", "csr"])
    @pytest.mark.dtype_promotion
    def test_booleans_add_as_or(self, kind):
        """Equal positions are summed, and dense arrays made, also where JAX cannot add."""
        twice = (jnp.array([True, True, False]), jnp.array([[0, 1], [0, 1], [1, 0]]))
        x = BCOO(twice, shape=(2, 2))
        if kind == "csr":
            x = BCSR((twice[0], twice[1][:, 1], jnp.array([0, 2, 3])), shape=(2, 2))
        dense = np.array([[False, True], [False, False]])
        np.testing.assert_array_equal(jmask.todense(jnm.abs(x)), dense)
        np.testing.assert_array_equal(jmask.cast_storage(x, "row_sparse").todense(), dense)
        np.testing.assert_array_equal(jnm.multiply(x, 3).todense(), dense * 3)
        np.testing.assert_array_equal(jnm.sum(x, axis=1), [1, 0])
        np.testing.assert_array_equal(jmask.dot(x, jnp.eye(2)), dense)
        with pytest.warns(jmask.StorageFallbackWarning):
            np.testing.assert_array_equal(jnm.logical_not(x), ~dense)


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
    x, y = coo(np.eye(3)), jmask.RowSparse([1], jnp.ones((1, 3)), (3, 3))
    with pytest.warns(jmask.StorageFallbackWarning, match="`add` made"):
        np.testing.assert_array_equal(jnm.add(x, y), jnp.eye(3).at[1].add(1))
    with pytest.warns(jmask.StorageFallbackWarning, match="became dense"):
        result = jmask.masked_tensor(x) + jmask.masked_tensor(y)
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


# --- arrays given by name are operands as well ----------------------------------------

SLOPES = np.array([[2.0, 3, 4], [5, 6, 7]], np.float32)
NUMBERS = np.array([[-1.0, 0, 1], [0, -1, 0]], np.float32)
EXPECTED = np.where(NUMBERS < 0, NUMBERS * SLOPES, NUMBERS)


@pytest.mark.parametrize("storage", ["default", "row_sparse", "coo", "csr"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_arrays_are_sampled(storage, wrap):
    x = jmask.cast_storage(NUMBERS, storage)
    masked = jmask.masked_tensor(x)
    function = wrap(lambda x, a: jmask.nn.leaky_relu(x, negative_slope=a))
    by_row = np.where(NUMBERS < 0, NUMBERS * SLOPES[:, :1], NUMBERS)
    with jmask.strict():
        for slopes, expected in ((SLOPES, EXPECTED), (SLOPES[:, :1], by_row)):
            result = jmask.cast_storage(function(x, slopes), "default")
            np.testing.assert_array_equal(result, expected)
            result = function(masked, slopes)
            assert result.stype == storage
            np.testing.assert_array_equal(result.to_tensor(0), expected)


@pytest.mark.parametrize("storage", ["default", "coo"])
def test_masks_intersect(storage):
    mask = np.array([[True, False, True], [True, True, False]])
    slopes = stored(np.where(mask, SLOPES, np.nan), mask, storage)
    data = stored(NUMBERS, OTHER, storage)
    check(jmask.nn.leaky_relu(data, negative_slope=slopes), EXPECTED, mask & OTHER)
    only_slopes = jmask.nn.leaky_relu(x=NUMBERS, negative_slope=slopes)
    check(only_slopes, EXPECTED, mask)
    slope = jax.grad(lambda a: jnm.sum(data.clip(max=a)).to_tensor(0))(jnp.ones(3) / 2)
    np.testing.assert_array_equal(slope, ((NUMBERS > 0.5) & OTHER).sum(0))


def test_no_bound():
    x = jmask.masked_tensor(jnp.array([-2.0, 3, jnp.nan]), jnp.array([True, True, False]))
    assert x.clip(None, 1.0).to_tensor(0).tolist() == [-2, 1, 0]
    assert jnm.clip(x, 1.0, None).to_tensor(0).tolist() == [1, 3, 0]
