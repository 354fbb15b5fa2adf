"""`RowSparse`: definition, pytree behaviour, coalescing, arithmetic, conversions.

And rows as they should not come. MXNet gives wrong sums for unsorted rows, two updates for
duplicates, and writes outside the array for negative indices: here no case reads or writes a
wrong row.
"""

import copy
import functools
import pickle

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

import jmask
from tests.oracle import dense_twin, densified, touched_rows

pytestmark = pytest.mark.sampled

ROWS = 7
IDS = st.integers(-3, ROWS + 3) | st.sampled_from([-(2**31), -129, 250, 2**31 - 1])


@st.composite
def row_sparse(draw, row=None):
    """A random tensor with duplicates, padding of every kind, and any row shape.

    Few distinct sizes, since each is compiled.
    """
    row = draw(st.sampled_from([(), (3,), (2, 3)])) if row is None else row
    size = draw(st.sampled_from([0, 1, 5, 12]))
    ids = draw(st.lists(IDS, min_size=size, max_size=size))
    seed = draw(st.integers(0, 2**16))
    # Small integers: sums are exact in every order. Garbage under padding.
    values = np.random.default_rng(seed).integers(-8, 9, (len(ids), *row)).astype(np.float32)
    dtype = draw(st.sampled_from([np.int8, np.uint8, np.int32, np.int64]))
    ids = np.array(ids, np.int64).clip(np.iinfo(dtype).min, np.iinfo(dtype).max).astype(dtype)
    values[(ids < 0) | (ids >= ROWS)] = np.nan
    return jmask.RowSparse(ids, jnp.asarray(values, jnp.float32), (ROWS, *row))


compiled = functools.cache(jax.jit)
fromdense_with_room = lambda dense: jmask.RowSparse.fromdense(dense, nse=ROWS)


def both_ways(function, *args):
    """The result of a function, the same for all examples, eagerly and under jit, in turn."""
    yield function(*args)
    yield compiled(function)(*args)


class TestDefinition:
    @given(row_sparse())
    def test_todense(self, x):
        for dense in both_ways(jmask.RowSparse.todense, x):
            np.testing.assert_array_equal(dense, dense_twin(x))

    @pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32"])
    def test_wide_ids_never_wrap(self, dtype):
        far = np.array([3, 2**32 - 1 if dtype == "uint32" else 2**32 + 3], dtype)
        with jax.enable_x64(True):
            x = jmask.RowSparse(far, jnp.ones(2), (5,))
            np.testing.assert_array_equal(x.todense(), [0, 0, 0, 1, 0])

    def test_more_rows_than_int32_have_int64_ids(self):
        with jax.enable_x64(True):
            x = jmask.RowSparse(np.array([2**33, 5]), jnp.ones((2, 4), jnp.float32), (2**34, 4))
            assert x.indices.dtype == jnp.int64
            assert x.coalesce().indices.tolist() == [5, 2**33]
            assert repr(x) == "RowSparse(float32[17179869184, 4], nse=2)"


class TestPytree:
    x = jmask.RowSparse([2, 0, 2], jnp.arange(6.0).reshape(3, 2), (4, 2))

    def test_flattening_looks_at_the_object_alone(self):
        """Whoever asks, leaves are the same; plain numbers in the place of ids are refused."""
        leaves, structure = jax.tree.flatten(self.x)
        named = {jax.tree_util.keystr(k): v for k, v in jax.tree.leaves_with_path(self.x)}
        assert list(named) == [".indices", ".values"]
        assert all(x is y for x, y in zip(leaves, named.values(), strict=True))
        words = jax.random.key_data(leaves[0])
        again = structure.unflatten([words, leaves[1]])  # as orbax and callbacks give them
        np.testing.assert_array_equal(again.indices, self.x.indices)
        shapes = structure.unflatten(jax.eval_shape(lambda *x: x, words, leaves[1]))
        assert (shapes.indices.shape, shapes.indices.dtype) == ((3,), jnp.int32)
        for plain in (self.x.indices, np.ones(3), jnp.ones((3, 1)), words[:, 0]):
            with pytest.raises(TypeError, match=r"came back as plain .*inside jmask\.lazy"):
                structure.unflatten([plain, leaves[1]])

    def test_pickles(self):
        again = pickle.loads(pickle.dumps(self.x.coalesce()))
        np.testing.assert_array_equal(again.todense(), self.x.todense())
        assert again.coalesced
        stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), self.x)
        for again in (pickle.loads(pickle.dumps(stack)), copy.deepcopy(stack)):
            assert repr(again) == repr(stack)
            merged = jmask.tree.merge(again)
            np.testing.assert_array_equal(merged.todense(), 2 * self.x.todense())
        shapes = jax.eval_shape(lambda: stack)
        for again in (pickle.loads(pickle.dumps(shapes)), copy.deepcopy(shapes)):
            assert jax.tree.leaves(again) == jax.tree.leaves(shapes)
        copied = jax.jit(copy.deepcopy)(self.x)
        np.testing.assert_array_equal(copied.todense(), self.x.todense())


class TestCoalesce:
    @given(row_sparse())
    def test_sorted_unique_and_equal(self, x):
        for y in both_ways(jmask.RowSparse.coalesce, x):
            y.validate()
            assert y.coalesced
            assert y.coalesce() is y
            assert y.nse == min(x.nse, ROWS)
            rows = touched_rows(x)
            np.testing.assert_array_equal(y.indices[: rows.size], rows)
            assert (y.indices[rows.size :] == ROWS).all()
            assert (y.values[rows.size :] == 0).all()
            np.testing.assert_array_equal(dense_twin(y), dense_twin(x))

    def test_capacity(self):
        x = jmask.RowSparse([2, 0, 2], jnp.ones((3, 1)), (5, 1))
        assert x.coalesce(nse=2).indices.tolist() == [0, 2]
        assert x.coalesce(nse=4).indices.tolist() == [0, 2, 5, 5]
        assert x.coalesce().coalesce(nse=2).nse == 2
        traced = jax.jit(lambda x: x.coalesce(nse=1))(x)
        assert jnp.isnan(traced.values).all()
        fits = jax.jit(lambda x: x.coalesce(nse=2))(x)
        np.testing.assert_array_equal(fits.todense(), x.todense())


class TestConversion:
    @given(row_sparse())
    def test_fromdense_round_trip(self, x):
        dense = dense_twin(x)
        stored = jmask.RowSparse.fromdense(dense)
        assert stored.nse == (dense.reshape(ROWS, -1) != 0).any(1).sum()
        stored.validate()
        np.testing.assert_array_equal(stored.todense(), dense)
        traced = compiled(fromdense_with_room)(dense)
        np.testing.assert_array_equal(traced.todense(), dense)

    @given(row_sparse(), st.just([]) | st.lists(IDS, min_size=4, max_size=4))
    def test_retain(self, x, rows):
        kept = np.isin(np.arange(ROWS), rows)
        kept = kept.reshape((-1,) + (1,) * (x.ndim - 1))
        rows = np.array(rows, np.int32)
        for y in both_ways(jmask.RowSparse.retain, x, rows):
            np.testing.assert_array_equal(dense_twin(y), dense_twin(x) * kept)

    @pytest.mark.parametrize(
        "rows", [[True, True], [200, 100], [0.6, 0.6], [1.0, -1.0]], ids=str
    )
    @pytest.mark.dtype_promotion
    def test_equal_rows_are_summed_before_a_cast_that_does_not_add(self, rows):
        values = np.array(rows, np.uint8) if 200 in rows else np.array(rows)
        x = jmask.RowSparse([0, 0], values[:, None], (2, 1))
        dense, other = x.todense(), jnp.ones((2, 1))
        for dtype in (bool, jnp.int32, jnp.float32, jnp.complex64):
            y = x.astype(dtype)
            assert y.dtype == dtype
            np.testing.assert_array_equal(y.todense(), dense.astype(dtype))
        for code in ("x * 1.5", "x * other", "x @ other[:1]", "other.T @ x"):
            function = lambda x, code=code: eval(code, {"x": x, "other": other})
            np.testing.assert_array_equal(densified(function(x)), function(dense))
        floats = jmask.RowSparse([0, 0], jnp.ones(2), (2,)).astype(jnp.float16)
        assert (floats.nse, floats.coalesced, floats.dtype) == (2, False, jnp.float16)


# --- rows as they should not come --------------------------------------------------------

FOUR = 4
TABLE = jnp.arange(1.0, 9).reshape(FOUR, 2)


def tensor(indices):
    count = len(indices)
    return jmask.RowSparse(indices, jnp.arange(1.0, 2 * count + 1).reshape(count, 2), (FOUR, 2))


def test_what_is_valid():
    """Sorted, unsorted, duplicates, padding, none; others are in the table of wrong calls."""
    for indices in ([0, 2], [3, 0, 2], [2, 1, 2, 2], [FOUR, 1, FOUR], [0, 1, 2, 3, 3, 2], []):
        tensor(indices).validate()
    nothing = jmask.RowSparse(jnp.zeros((2,), int), jnp.ones((2, 3)), (0, 3))
    assert nothing.todense().shape == (0, 3)
    assert nothing.coalesce().nse == 0


def test_indexing_out_of_range():
    x, ids = tensor([3, 0, 3]), jnp.array([4, -5, 3])
    for take in (lambda x, i: x[i], jax.jit(lambda x, i: x[i])):
        assert np.isnan(take(x, ids)[:2]).all()
        for row in (take(x, ids)[2], take(x, 3)):
            np.testing.assert_array_equal(row, x.todense()[3])
    counts = jmask.RowSparse([1], jnp.ones((1, 2), jnp.int32), (FOUR, 2))
    assert (counts[jnp.array([4])] == np.iinfo(np.int32).min).all()


def test_numpy_functions_of_tensors():
    """`np.sum(x)` is `x.sum()`, to which NumPy passes `out=None`."""
    x = tensor([3, 0, 3])
    masked = jmask.masked_tensor(TABLE, TABLE > 2)
    assert np.sum(x) == np.sum(x.todense())
    np.testing.assert_allclose(np.mean(x, axis=0), np.mean(x.todense(), axis=0))
    assert float(np.max(masked)) == 8
    assert float(np.prod(masked)) == 40320 / 2


# What keeps floating arrays alone drops the ids, as levanter does in each step.
ADAM, LAZY = jmask.adam(0.1), jmask.lazy(optax.adam(0.1))
WITHOUT_IDS = """
    g.todense() | g.coalesce() | g.indices.shape | jmask.tree.add(g, g) | jmask.tree.norm(g) |
    jmask.apply_updates(TABLE, g) | TABLE + g | ADAM.update(g, ADAM.init(TABLE), TABLE) |
    jmask.apply_gradients(ADAM, g, ADAM.init(TABLE), TABLE) |
    LAZY.update(g, LAZY.init(TABLE), TABLE)
"""


@pytest.mark.dtype_promotion  # of optax
@pytest.mark.parametrize("code", WITHOUT_IDS.replace("\n", " ").split(" | "))
def test_a_gradient_that_lost_its_ids_says_so(code):
    gradient = jmask.RowSparse([1], jnp.ones((1, 2)), (4, 2))
    lost = eqx.filter(gradient, eqx.is_inexact_array)
    names = {**globals(), "g": lost, "TABLE": jnp.ones((4, 2))}
    with pytest.raises(ValueError, match="no row ids: what keeps floating arrays"):
        eval(code.strip(), names)
