"""Products of masked tensors against the sum over the terms that exist, written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
from tests.sparse_arrays import coo, csr

RNG = np.random.default_rng(0)
X = np.float32(RNG.normal(size=(3, 4)))
Y = np.float32(RNG.normal(size=(4, 2)))
MX = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], bool)
MY = np.array([[1, 0], [1, 1], [0, 0], [1, 0]], bool)
POISON = np.float32([np.nan, np.inf, -np.inf, 1e30])


def poisoned(x, mask):
    poison = np.resize(POISON, x.shape)
    return np.where(mask, x, poison)


def masked(x, mask, storage="default"):
    if storage == "default":
        return jmask.masked_tensor(poisoned(x, mask), mask)
    stored = {"coo": coo, "csr": csr}[storage](np.ones(x.shape))
    values = jnp.ravel(poisoned(x, mask))
    if storage == "coo":
        data = BCOO((values, stored.indices), shape=x.shape)
    else:
        data = BCSR((values, stored.indices, stored.indptr), shape=x.shape)
    return jmask.masked_tensor(data, mask.ravel())


def product(x, mx, y, my):
    """sum_j x_ij y_jk over the j at which both exist, and whether there is one."""
    terms = mx[:, :, None] & my[None]
    values = np.where(terms, x[:, :, None].astype(float) * y[None], 0).sum(1)
    return values, terms.any(1)


def check(result, expected):
    values, mask = expected
    np.testing.assert_array_equal(result.mask, mask)
    np.testing.assert_allclose(result.to_tensor(0), np.where(mask, values, 0), rtol=1e-5)


@pytest.mark.parametrize("storage", ["default", "coo", "csr"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_matmul(wrap, storage):
    matmul = wrap(jnm.matmul)
    full_x, full_y = np.ones_like(MX), np.ones_like(MY)
    x = masked(X, MX, storage)
    with jmask.strict():
        check(matmul(x, masked(Y, MY)), product(X, MX, Y, MY))
        check(matmul(x, Y), product(X, MX, Y, full_y))
    check(matmul(X, masked(Y, MY)), product(X, full_x, Y, MY))
    check(x @ masked(Y, MY), product(X, MX, Y, MY))
    check(X @ masked(Y, MY), product(X, full_x, Y, MY))


def test_einsum_dot_and_linear():
    x, y = masked(X, MX), masked(Y, MY)
    expected = product(X, MX, Y, MY)
    check(jnm.einsum("ij,jk->ik", x, y), expected)
    check(jnm.dot(x, y), expected)
    transposed = jmask.masked_tensor(y.data.T, y.mask.T)
    check(jmask.nn.linear(x, transposed), expected)
    values, mask = expected
    bias = np.float32([1, 2])
    check(jmask.nn.linear(x, transposed, bias), (values + bias, mask))
    batched = jnm.einsum("bij,jk->bik", jmask.masked_tensor(x.data[None], MX[None]), y)
    np.testing.assert_array_equal(batched.mask[0], mask)


def test_plain_arrays():
    np.testing.assert_allclose(jnm.matmul(X, Y), X @ Y, rtol=1e-6)
    np.testing.assert_allclose(jnm.einsum("ij,jk", X, Y), X @ Y, rtol=1e-6)


@pytest.mark.parametrize("storage", ["default", "coo"])
def test_gradients(storage):
    """Those of the terms that exist; 0 at masked entries; never nan."""

    def loss(x, y):
        left = jmask.masked_tensor(x, MX)
        if storage == "coo":
            stored = coo(np.ones(X.shape))
            data = BCOO((jnp.ravel(x), stored.indices), shape=X.shape)
            left = jmask.masked_tensor(data, MX.ravel())
        return jnp.sum(jnm.matmul(left, jmask.masked_tensor(y, MY)).to_tensor(0) ** 2)

    def reference(x, y):
        return jnp.sum((jnp.where(MX, x, 0) @ jnp.where(MY, y, 0)) ** 2)

    gradients = jax.grad(loss, (0, 1))(poisoned(X, MX), poisoned(Y, MY))
    expected = jax.grad(reference, (0, 1))(X, Y)
    for gradient, exact, mask in zip(gradients, expected, (MX, MY), strict=True):
        np.testing.assert_allclose(gradient, exact, rtol=1e-4, atol=1e-6)
        assert not np.asarray(gradient)[~mask].any()


def test_sparse_operands_that_must_become_dense_warn():
    x = jmask.masked_tensor(coo(Y))
    with pytest.warns(jmask.StorageFallbackWarning, match="in a product"):
        jnm.matmul(X, x)
