"""Which storage functions of BCOO and BCSR tensors have, by the mechanism of `RowSparse`."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
from tests.sparse_arrays import coo, csr


class TestEntries:
    a = np.array([[0.0, 2, 0], [3, 0, -1]], np.float32)
    b = np.array([[1.0, 4, 0], [0, 0, 5]], np.float32)
    pairs: ClassVar = {"coo": (coo(a, nse=5), coo(b)), "csr": (csr(a), csr(b))}

    @pytest.mark.sampled
    @pytest.mark.parametrize("kind", pairs)
    @pytest.mark.parametrize(
        "function",
        [
            lambda m, x, y, d: m.sin(x),
            lambda m, x, y, d: m.multiply(x, d),
            lambda m, x, y, d: m.multiply(x, d[0]),
            lambda m, x, y, d: m.add(x, y),
            lambda m, x, y, d: m.subtract(x, x),
            lambda m, x, y, d: m.maximum(x, m.multiply(y, y)),
            lambda m, x, y, d: m.where(d > 0, x, y),
        ],
    )
    @pytest.mark.rank_promotion
    def test_kept(self, kind, function):
        x, y = self.pairs[kind]
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

    def test_storages_that_differ(self):
        x = self.pairs["coo"][0]
        with pytest.warns(jmask.StorageFallbackWarning, match="`add` made"):
            result = jnm.add(x, jmask.RowSparse.fromdense(self.b))
        np.testing.assert_array_equal(result, self.a + self.b)
