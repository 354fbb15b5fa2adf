"""`todense` and `sparse_mask` against dense twins, and gradients in sparse arguments."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
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


@pytest.mark.parametrize("mask_kind", ["array", "coo", "rows", "masked", "masked csr"])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_sparse_mask(kind, mask_kind):
    """The entries of x where the mask has some: zeros if x does not store them."""
    x = tensor(kind, DENSE)
    mask = tensor(mask_kind, np.where(OTHER, 7.0, 0)) if mask_kind != "array" else OTHER
    specified = OTHER
    if mask_kind == "rows":
        specified = np.ones(SHAPE, bool)  # whole rows
    expected = np.where(specified, DENSE, 0)
    masked = "masked" in kind + mask_kind
    eager = (EVERY_KIND.index(kind) + EVERY_KIND.index(mask_kind)) % 3 == 0
    function = jmask.sparse_mask if eager else jax.jit(lambda *a: jmask.sparse_mask(*a))
    are_arrays = [k in ("array", "masked") for k in (kind, mask_kind)]
    with contextlib.ExitStack() as stack:  # only positions of two sparse tensors may differ
        if any(are_arrays):
            stack.enter_context(jmask.strict())
        else:
            stack.enter_context(
                pytest.warns(jmask.StorageFallbackWarning, match="`sparse_mask`")
            )
        result = function(x, mask)
    np.testing.assert_allclose(jmask.todense(result), expected, rtol=1e-6)
    assert isinstance(result, jmask.MaskedTensor) == masked
    if masked:
        exists = specified & (KEPT if "masked" in kind else True)
        np.testing.assert_array_equal(result.to_dense().mask, exists)
    pattern = x if mask_kind == "array" else mask
    storage = pattern.storage if isinstance(pattern, jmask.MaskedTensor) else pattern
    found = result.storage if masked else result
    assert isinstance(found, type(storage))


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")  # other positions
def test_nothing_stored():
    empty = jmask.RowSparse.zeros(SHAPE)
    mask = rows(DENSE)
    assert not jmask.todense(jmask.sparse_mask(empty, mask)).any()
    assert jmask.sparse_mask(mask, empty).nse == 0
    assert jmask.sparse_mask(VALUES, empty).nse == 0


class TestGradients:
    """In a sparse argument of `jmask.grad`: dense where every entry counts."""

    @staticmethod
    def of(function, x):
        return jax.jit(jmask.grad(function))(x)

    @pytest.mark.parametrize("kind", EVERY_KIND)
    @pytest.mark.parametrize("terms", [{False: 1}, {True: 2}, {False: 1, True: 2}], ids=str)
    def test_terms(self, kind, terms):
        """A plain term counts at every entry, a masked one adds at those that are specified."""
        x, has_all = tensor(kind, DENSE), kind in ("array", "rows")
        total = lambda x, masked: jnp.sum(jmask.todense(x, masked_grad=masked) * WEIGHTS)
        g = self.of(lambda x: sum(c * total(x, masked) for masked, c in terms.items()), x)
        assert isinstance(g, jax.Array if False in terms else type(x))
        factors = terms.get(False, 0) + np.where(KEPT | has_all, terms.get(True, 0), 0)
        np.testing.assert_allclose(jmask.todense(g), WEIGHTS * factors, rtol=1e-6)

    @pytest.mark.parametrize("mask_kind", ["coo", "rows", "masked", "array"])
    def test_sparse_mask_of_an_array(self, mask_kind):
        mask = tensor(mask_kind, np.where(OTHER, 7.0, 0)) if mask_kind != "array" else OTHER
        function = lambda x: jnp.sum(jmask.todense(jmask.sparse_mask(x, mask)) * WEIGHTS)
        stored = np.ones(SHAPE, bool) if mask_kind == "rows" else OTHER
        expected = np.where(stored, WEIGHTS, 0)
        found = self.of(function, jnp.asarray(VALUES))
        np.testing.assert_allclose(jmask.todense(found), expected)

    @pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")  # other positions
    def test_sparse_mask_of_a_sparse_tensor(self):
        """At the entries of the mask, whether x stores them or not."""
        x, mask = coo(DENSE), coo(OTHER * 1.0)
        function = lambda x: jnp.sum(jmask.todense(jmask.sparse_mask(x, mask)) * WEIGHTS)
        np.testing.assert_allclose(self.of(function, x), np.where(OTHER, WEIGHTS, 0))
        booleans = lambda x: jnp.sum(jmask.todense(jmask.sparse_mask(x, OTHER)) * WEIGHTS)
        np.testing.assert_allclose(self.of(booleans, x), np.where(OTHER, WEIGHTS, 0))
        of_itself = lambda x: jnp.sum(jmask.todense(jmask.sparse_mask(x, x)) * WEIGHTS)
        g = jmask.grad(of_itself)(x)
        assert isinstance(g, BCOO)  # every entry of the mask is stored
        np.testing.assert_allclose(g.todense(), np.where(KEPT, WEIGHTS, 0))

    def test_products_keep_the_storage(self):
        x = coo(DENSE)
        g = self.of(lambda x: jnp.sum(x @ WEIGHTS.T), x)
        assert isinstance(g, BCOO)
        expected = np.broadcast_to(WEIGHTS.sum(0), SHAPE)
        np.testing.assert_allclose(g.todense(), np.where(KEPT, expected, 0), rtol=1e-5)
        plain = self.of(lambda x: jnp.sum(jmask.todense(x) @ WEIGHTS.T), x)
        np.testing.assert_allclose(plain, expected, rtol=1e-5)

    def test_equal_positions_are_one_entry(self):
        """The gradient is coalesced: its entries are derivatives, not parts of them."""
        x = jmask.RowSparse([2, 0, 2], jnp.ones((3, 4)), SHAPE)
        function = lambda x: jnp.sum(x.todense() * WEIGHTS)
        g = self.of(function, x)
        np.testing.assert_allclose(g.todense(), WEIGHTS * np.array([[1], [0], [1]]))
        assert g.coalesced
        twice = BCOO((jnp.ones(2), jnp.array([[0, 1], [0, 1]])), shape=SHAPE)
        g = self.of(lambda x: jnp.sum(jmask.todense(x, masked_grad=True) * WEIGHTS), twice)
        np.testing.assert_allclose(g.todense()[0, 1], WEIGHTS[0, 1])

    def test_nothing_stored_and_batches(self):
        empty = jmask.RowSparse.zeros(SHAPE)
        function = lambda x: jnp.sum(jmask.todense(x) * WEIGHTS)
        np.testing.assert_allclose(jmask.grad(function)(empty), WEIGHTS)
        batch = BCOO.fromdense(DENSE, n_batch=1)
        np.testing.assert_allclose(jmask.grad(function)(batch), WEIGHTS)
        twice = BCSR((jnp.ones(2), jnp.array([1, 1]), jnp.array([0, 2, 2, 2])), shape=SHAPE)
        np.testing.assert_allclose(jmask.grad(function)(twice), WEIGHTS)

    def test_in_trees_beside_arrays_with_aux(self):
        params = {
            "x": coo(DENSE),
            "y": rows(DENSE),
            "w": jnp.ones((6, 4)),
            "m": tensor("masked", DENSE),
        }
        ids = jnp.array([1, 1, 5])

        def loss(params, scale):
            lookup = jnp.sum(params["w"][ids]) + jnp.sum(jmask.todense(params["x"]))
            total = scale * (lookup + jnp.sum(params["y"].todense()) + jnm.sum(params["m"]))
            return total.to_tensor(0), {"n": 3}

        (value, aux), (g, of_scale) = jmask.value_and_grad(loss, (0, 1), has_aux=True)(
            params, 2.0
        )
        assert aux == {"n": 3}
        np.testing.assert_allclose(value, 2.0 * of_scale, rtol=1e-6)
        assert isinstance(g["x"], jax.Array)
        assert isinstance(g["y"], jmask.RowSparse)
        assert isinstance(g["w"], jmask.RowSparse)  # a table that is only looked up
        np.testing.assert_array_equal(g["x"], np.full(SHAPE, 2.0))
        np.testing.assert_array_equal(g["y"].todense(), np.full(SHAPE, 2.0))
        np.testing.assert_array_equal(g["m"].to_tensor(0), np.where(KEPT, 2.0, 0))
