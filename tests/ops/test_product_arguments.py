"""`jmask.dot`: the storage asked for, what is refused, and what becomes dense."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from jmask._tensors.storage import stype
from tests.oracle import densified
from tests.product_cases import COO, CSR, FEATURES, ROWS, V
from tests.sampling import chosen
from tests.sparse_arrays import coo, csr

_RNG = np.random.default_rng(1)


def test_forward_stype():
    ct = np.float32(_RNG.normal(size=(6, 2)))
    w = np.float32(_RNG.normal(size=(V, 2)))
    exact = {False: FEATURES @ w, True: FEATURES.T @ ct}

    @jax.jit
    def run(x: Any) -> Any:
        return {
            (storage, transposed): jmask.dot(
                x, ct if transposed else w, transpose_a=transposed, forward_stype=storage
            )
            for transposed in (False, True)
            for storage in ("default", "row_sparse")
        }

    with jmask.strict():
        results = run(CSR)
        rows, dense = (
            jmask.dot(ROWS, jnp.ones((2, 3)), forward_stype=storage)
            for storage in ("row_sparse", "default")
        )
    for (storage, transposed), result in results.items():
        assert stype(result) == storage
        np.testing.assert_allclose(densified(result), exact[transposed], rtol=1e-4, atol=1e-5)
    assert (rows.nse, rows.shape) == (4, (V, 3))
    np.testing.assert_array_equal(dense, densified(rows))


TRANSPOSED = [(False, False), (True, False), (False, True)]
STORED = [coo, csr, jmask.RowSparse.fromdense]


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize(
    ("stored", "transposed"),
    chosen([(csr, (True, False))], itertools.product(STORED, TRANSPOSED)),
)
def test_the_gradient_of_an_ordinary_tensor(stored, transposed):
    """`masked_grad=False`: every entry of a sparse operand has a gradient, to second order."""
    lhs, rhs = np.array([[0, 0, 3.0], [4, 0, 5]]), np.arange(6.0).reshape(3, 2) + 0.5
    lhs, rhs = (x.T if t else x for x, t in zip((lhs, rhs), transposed, strict=True))
    how = dict(zip(("transpose_a", "transpose_b"), transposed, strict=True))
    plain = functools.partial(jmask.dot, **how, masked_grad=False)
    for args in ((stored(lhs), rhs), (lhs, stored(rhs))):
        assert jmask.gradcheck(jax.jit(plain), args, order=2)
    sparse = stored(jnp.asarray(lhs, jnp.float32))
    product = plain(sparse, jnp.asarray(rhs, jnp.float32))
    np.testing.assert_allclose(product, jmask.todense(jmask.dot(sparse, rhs, **how)), rtol=1e-6)
    found = jmask.grad(lambda x: jnp.sum(plain(x, rhs)))(sparse)
    dense = lambda x: jnp.sum((x.T if transposed[0] else x) @ (rhs.T if transposed[1] else rhs))
    np.testing.assert_allclose(found, jax.grad(dense)(sparse.todense()), rtol=1e-6)
    with pytest.raises(ValueError, match="`forward_stype` cannot be 'row_sparse' with"):
        plain(sparse, rhs, forward_stype="row_sparse")


def test_fallbacks_warn_and_raise():
    messages = {
        "became dense in a product": lambda: jmask.dot(CSR, COO, transpose_b=True),
        "stores all of its 40 columns": lambda: jmask.dot(jnp.ones(2), ROWS, transpose_b=True),
    }
    for message, call in messages.items():
        with pytest.warns(jmask.StorageFallbackWarning, match=message) as caught:
            call()
        assert caught[0].filename == __file__
        with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match=message):
            call()
