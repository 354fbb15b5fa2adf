"""Reductions of sparse storages: by segments, without becoming dense, zeros included.

Their values and derivatives, beside those of dense storage, are in `test_masked_functions.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jmask
import jmask.numpy as jnm
from jmask import MaskedTensor, RowSparse
from tests import sparse_arrays
from tests.masked_cases import SHAPE, build, masks


def test_row_sparse_keeps_its_storage():
    x = build("row_sparse", jnp.ones(SHAPE), jnp.asarray(masks()[2]))
    with jmask.strict():
        for name in ("sum", "mean", "max", "argmin", "var", "norm", "logsumexp", "all"):
            assert getattr(jnm, name)(x, axis=1).stype == "row_sparse"
            assert getattr(jnm, name)(x, axis=-1, keepdims=True).shape == (4, 1)
        assert jnm.sum(x, axis=0).stype == "default"
    result = jnm.sum(x, axis=1)
    np.testing.assert_array_equal(result.to_tensor(-1), [1, -1, 2, 2])


def test_large_sparse_tensors_are_never_dense():
    table = MaskedTensor(RowSparse([5, 10**8], jnp.ones((2, 64)), (10**9, 64)))
    square = BCOO((jnp.arange(1.0, 4), jnp.array([[7, 8], [0, 9], [7, 99_999]])),
                  shape=(100_000, 100_000), unique_indices=True)  # fmt: skip
    with jmask.strict():
        assert jnm.sum(table).storage == 128
        assert jnm.mean(table, axis=1).stype == "row_sparse"
        for name in ("prod", "std", "max", "logsumexp"):
            for axis in (0, None):
                assert getattr(jnm, name)(MaskedTensor(square), axis=axis).valid.any()
        result = jnm.argmax(MaskedTensor(square), axis=1)
        assert result.storage[7] == 99_999
        assert jnm.sum(square, axis=1)[7] == 4
        assert jnm.transpose(MaskedTensor(square)).shape == square.shape


def test_sparse_with_dense_dimensions():
    rng = np.random.default_rng(0)
    indices = np.array([[0, 1], [2, 0], [2, 3], [1, 1]])
    values, mask = rng.normal(size=(4, 2, 3)), rng.random((4, 2, 3)) < 0.7
    data, valid = np.zeros((3, 4, 2, 3)), np.zeros((3, 4, 2, 3), bool)
    data[tuple(indices.T)], valid[tuple(indices.T)] = values, mask
    stored = BCOO(
        (jnp.asarray(values, jnp.float32), jnp.asarray(indices)),
        shape=data.shape, unique_indices=True,
    )  # fmt: skip
    sparse, dense = MaskedTensor(stored, jnp.asarray(mask)), MaskedTensor(data, valid)
    axes = (0, 3, (0, 2), (1, 3), (0, 1), (2, 3), ())

    @jax.jit
    def run(x):
        return [
            getattr(jnm, name)(x, axis=axis, keepdims=name == "max").to_dense()
            for name in ("sum", "prod", "max")
            for axis in axes
        ] + [jnm.argmax(x, axis=axis).to_dense() for axis in range(4)]

    for one, other in zip(run(sparse), run(dense), strict=True):
        assert one.shape == other.shape
        np.testing.assert_array_equal(one.valid, other.valid)
        got, expected = one.to_tensor(9), other.to_tensor(9)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_nothing_stored():
    empty = MaskedTensor(RowSparse.zeros((4, 3)))
    none = BCOO((jnp.zeros(0), jnp.zeros((0, 2), int)), shape=(4, 3), unique_indices=True)
    names = ("sum", "prod", "std", "argmax", "norm", "logsumexp")
    run = jax.jit(
        lambda x: [getattr(jnm, n)(x, axis=a).to_dense() for n in names for a in (0, 1)]
    )
    for x in (empty, MaskedTensor(none), MaskedTensor(jnp.zeros((4, 0)))):
        for result in run(x):
            assert not np.asarray(result.valid).any()
    assert not jnm.median(MaskedTensor(jnp.zeros((4, 0))), axis=1).valid.any()
    assert jnm.median(MaskedTensor(jnp.zeros((4, 0))), axis=0).shape == (0,)


def test_ordinary_sparse_tensors():
    densify = lambda x: x.todense() if isinstance(x, RowSparse) else x
    rows = RowSparse([2, 0, 2, 4], jnp.array([[1.0, 2], [3, 4], [5, -6], [9, 9]]), (4, 2))
    coo = BCOO((jnp.array([1.0, 2, 3]), jnp.array([[0, 1], [2, 0], [0, 1]])), shape=(4, 2))
    csr = sparse_arrays.csr(np.float32([[0, 1], [2, 0], [3, 4], [0, 0]]))

    def run(functions, x):
        return [densify(f(x, axis=axis)) for f in functions for axis in (None, 0, -1)]

    shared = ("sum", "mean", "prod", "max", "min", "any", "all", "count_nonzero")
    ours = jax.jit(lambda x: run([getattr(jnm, n) for n in (*shared, "norm")], x))
    for x in (rows, coo, csr):
        dense = x.todense()
        with jmask.strict():
            results = ours(x)
        of_jax = run([*(getattr(jnp, n) for n in shared), jnp.linalg.vector_norm], dense)
        for result, expected in zip(results, of_jax, strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-6)
        with pytest.warns(jmask.StorageFallbackWarning, match="`var` made a sparse"):
            np.testing.assert_allclose(jnm.var(x, axis=1), dense.var(1))
        where = dense > 1
        np.testing.assert_array_equal(jnm.sum(x, where=where), dense.sum(where=where))
