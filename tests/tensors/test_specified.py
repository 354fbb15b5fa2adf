"""`todense`, and gradients in sparse arguments: at every entry, or at those specified.

Which entries `sparse_mask` keeps is tested with other positions: `test_repeated_positions`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
from tests import masked_cases as cases
from tests.masked_cases import KINDS, PATTERNS, SHAPE
from tests.sparse_arrays import coo, csr

pytestmark = pytest.mark.sampled

RNG = np.random.default_rng(0)
VALUES, WEIGHTS = np.float32(RNG.normal(size=(2, *SHAPE)))
MASK, KEPT, OTHER = cases.MASKS[2:5]
DENSE = np.where(KEPT, VALUES, 0)


def rows(dense):
    """Row 2 in two parts, one row of zeros, padding."""
    values = [dense[2] / 4, dense[0], dense[1], dense[2] * 3 / 4, dense[3], dense[0]]
    return jmask.RowSparse([2, 0, 1, 2, 3, 4], jnp.asarray(np.stack(values)), SHAPE)


PLAIN = {
    "array": jnp.asarray,
    "coo": lambda dense: coo(dense, nse=11),
    "csr": lambda dense: csr(dense, nse=11),
    "rows": rows,
}


def case(kind):
    """A tensor, its entries, and which of these are specified."""
    if kind in PLAIN:
        return PLAIN[kind](DENSE), DENSE, KEPT | (kind in ("array", "rows"))
    kind = kind.removeprefix("masked ")
    data, exists = np.where(MASK, VALUES, np.nan), MASK & PATTERNS[kind]
    x = cases.build(kind, jnp.asarray(data), jnp.asarray(MASK))
    return x, np.where(exists, VALUES, 0), exists


EVERY_KIND = (*PLAIN, *(f"masked {kind}" for kind in KINDS))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_todense(kind):
    x, dense, _ = case(kind)
    both = lambda x: [jmask.todense(x, masked_grad=masked) for masked in (False, True)]
    for result in jax.jit(both)(x):
        np.testing.assert_allclose(result, dense, rtol=1e-6)


total = lambda x: jnp.sum(x * WEIGHTS)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("terms", [{False: 1}, {True: 2}, {False: 1, True: 2}], ids=str)
def test_gradients_of_terms(kind, terms):
    """A plain term counts at every entry, a masked one adds at those that are specified."""
    x, _, specified = case(kind)
    term = lambda x, masked: terms[masked] * total(jmask.todense(x, masked_grad=masked))
    g = jax.jit(jmask.grad(lambda x: sum(term(x, masked) for masked in terms)))(x)
    assert isinstance(g, jax.Array if False in terms else type(x))
    factors = terms.get(False, 0) + np.where(specified, terms.get(True, 0), 0)
    np.testing.assert_allclose(jmask.todense(g), WEIGHTS * factors, rtol=1e-6)


TWICE = BCOO((jnp.ones(2), jnp.array([[0, 1], [0, 1]])), shape=SHAPE)
CSR_TWICE = BCSR((jnp.ones(2), jnp.array([1, 1]), jnp.array([0, 2, 2, 2, 2])), shape=SHAPE)
ROWS_TWICE = jmask.RowSparse([2, 0, 2], jnp.ones((3, 3)), SHAPE)
ARRAY, SECOND = jnp.asarray(VALUES), np.arange(12).reshape(SHAPE) == 1
OTHERS, HOLES = OTHER * 7.0, jmask.masked_tensor(jnp.ones(SHAPE), OTHER)
EACH = np.broadcast_to(WEIGHTS.sum(0), SHAPE)
# A function, x, the type of its gradient, the gradient: dense where every entry counts.
GRADIENTS = """
    total(todense(sparse_mask(x, coo(OTHERS)))) | ARRAY | RowSparse | WEIGHTS * OTHER
    total(todense(sparse_mask(x, rows(OTHERS)))) | ARRAY | RowSparse | WEIGHTS
    total(todense(sparse_mask(x, HOLES))) | ARRAY | Array | WEIGHTS * OTHER
    total(todense(sparse_mask(x, OTHER))) | ARRAY | Array | WEIGHTS * OTHER
    total(todense(sparse_mask(x, coo(OTHERS)))) | coo(DENSE) | Array | WEIGHTS * OTHER
    total(todense(sparse_mask(x, OTHER))) | coo(DENSE) | Array | WEIGHTS * OTHER
    total(todense(sparse_mask(x, x))) | coo(DENSE) | BCOO | WEIGHTS * KEPT
    jnp.sum(x @ WEIGHTS.T) | coo(DENSE) | BCOO | EACH * KEPT
    jnp.sum(todense(x) @ WEIGHTS.T) | coo(DENSE) | Array | EACH
    total(x.todense()) | ROWS_TWICE | RowSparse | WEIGHTS * [[1], [0], [1], [0]]
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


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("mask", PLAIN)
def test_booleans_stay_booleans(mask):
    rows = jmask.RowSparse([2, 0, 9], jnp.asarray(KEPT[[2, 0, 1]]), SHAPE)
    entries = BCOO((jnp.ones(2, bool), jnp.array([[0, 1], [2, 2]])), shape=SHAPE)
    for x in (jnp.asarray(KEPT), rows, entries):
        masked = jmask.sparse_mask(x, jnp.asarray(KEPT) if mask == "array" else case(mask)[0])
        expected = jmask.todense(x) & (KEPT | (mask == "rows"))
        assert masked.dtype == bool
        np.testing.assert_array_equal(jmask.todense(masked), expected)
