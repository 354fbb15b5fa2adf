"""`todense`, and gradients in sparse arguments: at every entry, or at those specified.

Which entries `sparse_mask` keeps is tested with other positions: `test_repeated_positions`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
from tests.sparse_arrays import coo, csr

pytestmark = pytest.mark.sampled

SHAPE = (3, 4)
RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=SHAPE).astype(np.float32)
KEPT = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]], bool)
WEIGHTS = np.float32(RNG.normal(size=SHAPE))


def rows(dense):
    """Row 2 in two parts, one row of zeros, padding."""
    values = np.stack([dense[2] / 4, dense[0], dense[1], dense[2] * 3 / 4, dense[0]])
    return jmask.RowSparse([2, 0, 1, 2, 3], jnp.asarray(values), SHAPE)


def with_padding(dense):
    x = coo(dense)
    data = jnp.append(x.data, 99.0)
    indices = jnp.append(x.indices, jnp.array([SHAPE], x.indices.dtype), axis=0)
    return BCOO((data, indices), shape=SHAPE, unique_indices=True)


KINDS = {"array": jnp.asarray, "coo": with_padding, "csr": csr, "rows": rows}


def tensor(kind, dense):
    """A tensor with these entries: of the masked ones those that are not 0 exist."""
    if not kind.startswith("masked"):
        return KINDS[kind](dense)
    if kind == "masked":
        return jmask.masked_tensor(np.where(dense, dense, np.nan), dense != 0)
    x = KINDS[kind.removeprefix("masked ")](dense)
    if isinstance(x, jmask.RowSparse):
        x = x.coalesce()
        return jmask.masked_tensor(x, x.with_values(x.values != 0))
    return jmask.masked_tensor(x)


MASKED = ("masked", "masked coo", "masked csr", "masked rows")
EVERY_KIND = (*KINDS, *MASKED)
DENSE = np.where(KEPT, VALUES, 0)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_todense(kind):
    both = lambda x: [jmask.todense(x, masked_grad=masked) for masked in (False, True)]
    for result in jax.jit(both)(tensor(kind, DENSE)):
        np.testing.assert_allclose(result, DENSE, rtol=1e-6)


OTHER = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 1]], bool)


total = lambda x: jnp.sum(x * WEIGHTS)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("terms", [{False: 1}, {True: 2}, {False: 1, True: 2}], ids=str)
def test_gradients_of_terms(kind, terms):
    """A plain term counts at every entry, a masked one adds at those that are specified."""
    x, has_all = tensor(kind, DENSE), kind in ("array", "rows")
    term = lambda x, masked: terms[masked] * total(jmask.todense(x, masked_grad=masked))
    g = jax.jit(jmask.grad(lambda x: sum(term(x, masked) for masked in terms)))(x)
    assert isinstance(g, jax.Array if False in terms else type(x))
    factors = terms.get(False, 0) + np.where(KEPT | has_all, terms.get(True, 0), 0)
    np.testing.assert_allclose(jmask.todense(g), WEIGHTS * factors, rtol=1e-6)


TWICE = BCOO((jnp.ones(2), jnp.array([[0, 1], [0, 1]])), shape=SHAPE)
CSR_TWICE = BCSR((jnp.ones(2), jnp.array([1, 1]), jnp.array([0, 2, 2, 2])), shape=SHAPE)
ROWS_TWICE = jmask.RowSparse([2, 0, 2], jnp.ones((3, 4)), SHAPE)
ARRAY, SECOND = jnp.asarray(VALUES), np.arange(12).reshape(SHAPE) == 1
OTHERS, EACH = OTHER * 7.0, np.broadcast_to(WEIGHTS.sum(0), SHAPE)
# A function, x, the type of its gradient, the gradient: dense where every entry counts.
GRADIENTS = """
    total(todense(sparse_mask(x, coo(OTHERS)))) | ARRAY | RowSparse | WEIGHTS * OTHER
    total(todense(sparse_mask(x, rows(OTHERS)))) | ARRAY | RowSparse | WEIGHTS
    total(todense(sparse_mask(x, tensor("masked", OTHERS)))) | ARRAY | Array | WEIGHTS * OTHER
    total(todense(sparse_mask(x, OTHER))) | ARRAY | Array | WEIGHTS * OTHER
    total(todense(sparse_mask(x, coo(OTHERS)))) | coo(DENSE) | Array | WEIGHTS * OTHER
    total(todense(sparse_mask(x, OTHER))) | coo(DENSE) | Array | WEIGHTS * OTHER
    total(todense(sparse_mask(x, x))) | coo(DENSE) | BCOO | WEIGHTS * KEPT
    jnp.sum(x @ WEIGHTS.T) | coo(DENSE) | BCOO | EACH * KEPT
    jnp.sum(todense(x) @ WEIGHTS.T) | coo(DENSE) | Array | EACH
    total(x.todense()) | ROWS_TWICE | RowSparse | WEIGHTS * [[1], [0], [1]]
    total(todense(x)) | RowSparse.zeros(SHAPE) | Array | WEIGHTS
    total(todense(x)) | BCOO.fromdense(DENSE, n_batch=1) | Array | WEIGHTS
    total(todense(x, masked_grad=True)) | TWICE | BCOO | WEIGHTS * SECOND
    total(todense(x)) | CSR_TWICE | Array | WEIGHTS
"""


@pytest.mark.parametrize("line", GRADIENTS.strip().splitlines())
def test_gradients(line):
    """At equal positions it is coalesced: the derivative of an entry, not of its parts."""
    names = {**vars(jmask), "Array": jax.Array, **globals()}
    code, x, kind, expected = line.split(" | ")
    x, kind, expected = (eval(text, names) for text in (x, kind, expected))
    g = jax.jit(jmask.grad(lambda x: eval(code, names | {"x": x})))(x)
    assert isinstance(g, kind)
    assert not isinstance(x, jmask.RowSparse) or getattr(g, "coalesced", True)
    np.testing.assert_allclose(jmask.todense(g), expected, rtol=1e-5)
