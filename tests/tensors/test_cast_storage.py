"""Creation and conversion, plain and masked: `cast_storage`, NumPy, copies."""

import copy
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jmask
import jmask.numpy as jnm
from jmask._tensors.conversions import from_numpy_ma, to_numpy_ma
from jmask._tensors.storage import stored_values, stype, with_stored_values
from tests.masked_cases import DTYPES, assert_masked, example
from tests.sparse_arrays import csr

pytestmark = pytest.mark.sampled

STORAGES = ("default", "coo", "csr", "row_sparse")
MATRIX = np.array([[0, 0, 0], [1, 0, np.nan], [0, 0, 0], [0, -2, 0], [0, 0, 3]], np.float32)
WEIGHTS = np.arange(1, 16, dtype=np.float32).reshape(MATRIX.shape)
PLAIN = {
    "default": jnp.asarray(MATRIX),
    # Duplicates, padding, explicit zeros, out of order.
    "row_sparse": jmask.RowSparse(
        [4, 1, 3, 3, -1, 0],
        jnp.array([[0, 0, 3], [1, 0, np.nan], [0, -5, 0], [0, 3, 0], [9, 9, 9], [0, 0, 0]]),
        MATRIX.shape,
    ),
    "coo": BCOO(
        (
            jnp.array([3.0, -1, 1, np.nan, -1, 9]),
            jnp.array([[4, 2], [3, 1], [1, 0], [1, 2], [3, 1], [5, 3]]),
        ),
        shape=MATRIX.shape,
    ),
    "csr": csr(MATRIX, nse=7),
}
MASK = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 0, 0], [0, 0, 0]], bool)
DATA = np.where(MASK, np.arange(1, 16).reshape(5, 3), np.nan).astype(np.float32)
X = jmask.masked_tensor(DATA, MASK)
# What it takes to store them.
EXACT = {
    False: {"row_sparse": 3, "coo": 4, "csr": 4},
    True: {"row_sparse": 3, "coo": 5, "csr": 5},
}
UNSORTED = BCOO(
    (
        jnp.array([10.0, 1, 3, 8, 99, 9]),
        jnp.array([[3, 0], [0, 0], [0, 2], [2, 1], [5, 3], [2, 2]]),
    ),
    shape=(5, 3),
)


@functools.cache
def source(kind, masked):
    """The same tensor in every storage."""
    if masked and kind == "coo":
        return jmask.masked_tensor(UNSORTED)
    return jmask.cast_storage(X, kind) if masked else PLAIN[kind]


def assert_same(y, data=None, mask=MASK):
    """`y` has the entries of the source."""
    if not isinstance(y, jmask.MaskedTensor):
        np.testing.assert_array_equal(jmask.todense(y), MATRIX if data is None else data)
        return
    data = DATA if data is None else data
    assert_masked(y, data, mask)
    np.testing.assert_array_equal(y.to_tensor(-1), np.where(mask, data, -1))


storage_of = lambda x: x.storage if isinstance(x, jmask.MaskedTensor) else x
rebuilt = lambda x, values: (
    x.with_values(values)
    if isinstance(x, jmask.MaskedTensor)
    else with_stored_values(x, values)
)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("start", "end"), list(itertools.product(STORAGES, STORAGES)))
def test_from_each_to_each(start, end, masked):
    """Eagerly exact, and traced with a capacity or, if there is one, that of the source."""
    x, exact = source(start, masked), EXACT[masked].get(end)
    cast = lambda x, nse=None: jmask.cast_storage(x, end, nse=nse)
    y = cast(x)
    assert stype(storage_of(y)) == end
    assert y.dtype == np.float32
    assert (y is x) == (start == end and x is not source("coo", True))
    assert_same(y)
    if start != "default":
        assert_same(jax.jit(cast)(x))
    if end == "default" or (start == end and not masked):
        return
    assert storage_of(y).nse == exact
    if end == "row_sparse":  # which keeps masked entries of a row
        storage_of(y).validate()
    if end == "csr":
        expected = csr(MASK if masked else np.nan_to_num(MATRIX, nan=5.0))
        np.testing.assert_array_equal(storage_of(y).indptr, expected.indptr)
        np.testing.assert_array_equal(storage_of(y).indices, expected.indices)
    with pytest.raises(ValueError, match=rf"`nse`=2 is too small: {exact}"):
        cast(x, 2)
    # Room to spare: padding, which is not valid. Too small: nan in all that is left.
    roomy, short = jax.jit(lambda x: (cast(x, exact + 2), cast(x, 2)))(x)
    assert storage_of(roomy).nse == exact + 2
    assert_same(roomy)
    assert np.isnan(jmask.todense(short)).any()
    if masked:
        assert not np.asarray(roomy.valid)[exact:].any()
        assert np.isnan(np.asarray(stored_values(short.storage))[np.asarray(short.valid)]).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("start", "end"), list(itertools.product(STORAGES, STORAGES)))
def test_gradients(start, end, masked):
    """Every stored entry has its own, as when it is read without a conversion."""
    x = source(start, masked)
    values = jnp.nan_to_num(stored_values(storage_of(x)), nan=5.0)
    entries = lambda x: x.to_tensor(0) if masked else jmask.todense(x)

    def loss(cast, values):
        return jnp.sum(jnp.nan_to_num(entries(cast(rebuilt(x, values)))) * WEIGHTS)

    cast = lambda x: jmask.cast_storage(x, end, nse=None if end == "default" else 7)
    found = jax.jit(jax.grad(functools.partial(loss, cast)))(values)
    expected = jax.grad(functools.partial(loss, lambda x: x))(values)
    # Zeros of a plain tensor are not stored, and have no derivative then.
    total = jax.grad(lambda values: jnp.sum(entries(rebuilt(x, values)) ** 2))(values)
    np.testing.assert_array_equal(np.where(total, found, 0), np.where(total, expected, 0))
    if masked:
        assert not np.asarray(found)[~np.asarray(x.valid)].any()


@pytest.mark.parametrize("target", STORAGES[1:])
def test_batches_and_known_masks(target):
    other = jmask.masked_tensor(DATA[::-1], MASK[::-1])
    both = jax.tree.map(lambda *a: np.stack(a), X, other)
    cast = lambda x: jmask.cast_storage(x, target, nse=6).to_dense()
    assert_masked(jax.jit(jax.vmap(cast))(both), both.data, both.mask)
    # The mask is known although the data is traced.
    convert = lambda data: jmask.cast_storage(jmask.masked_tensor(data, MASK), target).storage
    exact = jax.grad(lambda data: stored_values(convert(data))[0].sum())(X.data)
    assert exact[0, 0] == 1


def test_integers_have_no_nan_for_a_capacity_that_is_too_small():
    for end in STORAGES[1:]:
        with pytest.raises(ValueError, match="too small"):
            jax.jit(lambda x, end=end: jmask.cast_storage(x, end, nse=2))(np.int32(MASK))


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
def test_lists_arrays_and_copies():
    x = jmask.RowSparse([1, 4], [[1.0, 2], [3, 4]])
    assert x.shape == (5, 2)
    np.testing.assert_array_equal(x[4], [3, 4])
    for indices, values, shape in (
        ([], np.zeros((0, 2)), (0, 2)),
        ([-1], [[1.0]], (0, 1)),
        ([0], np.ones((1, 2, 3)), (1, 2, 3)),
    ):
        assert jmask.RowSparse(indices, values).shape == shape
    assert jmask.RowSparse([0], np.ones((1, 2), np.float16)).dtype == jnp.float16
    x = PLAIN["row_sparse"]
    for y in (np.asarray(x), copy.copy(x), copy.deepcopy(x), x.copy(), jnm.copy(x), list(x)):
        assert y is not x
        np.testing.assert_array_equal(np.stack(y) if isinstance(y, list) else y, MATRIX)
    assert np.asarray(x, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="`copy`=False"):
        np.asarray(x, copy=False)


@pytest.mark.rank_promotion
def test_dense_dimensions_and_vectors():
    cube = np.zeros((4, 2, 3), np.float32)
    cube[2, 1] = 1
    blocks = jmask.masked_tensor(BCOO.fromdense(jnp.asarray(cube), n_dense=1))
    vector = jmask.masked_tensor(jnp.arange(3.0), [False, True, True])
    exists = np.repeat(cube.any(-1), 3, -1).reshape(cube.shape)
    for target in ("coo", "row_sparse", "default"):
        for x in (cube, BCOO.fromdense(cube), BCOO.fromdense(cube, n_dense=1)):
            assert_same(jmask.cast_storage(x, target), cube)
        assert_same(jmask.cast_storage(blocks, target), cube, exists)
        assert_masked(jmask.cast_storage(vector, target), np.arange(3.0), [False, True, True])


@pytest.mark.parametrize("target", STORAGES[1:])
def test_nothing_else_is_stored(target):
    """On the same storage too: masked entries go, under jit into padding."""
    first = np.arange(15).reshape(5, 3) < 6  # one row of two, and two entries of five
    x = jmask.sparse_mask(source(target, True), first)
    method = {"coo": "to_sparse", "csr": "to_sparse_csr", "row_sparse": "to_row_sparse"}[target]
    for cast in (lambda x: jmask.cast_storage(x, target), lambda x: getattr(x, method)()):
        for y in (cast(x), jax.jit(cast)(x)):
            assert y.stype == target
            assert_same(y, DATA, MASK & first)
            assert y.storage is not x.storage
        y = cast(x)
        assert y.storage.nse == {"row_sparse": 1}.get(target, 2)
        assert cast(y) is y


def test_empty():
    nothing = jmask.masked_tensor(jnp.ones((2, 3)), False)
    for target in STORAGES:
        assert not jmask.cast_storage(nothing, target).to_dense().mask.any()
        for shape in [(0, 3), (3, 0), (0,)][: 2 if target == "csr" else 3]:
            y = jmask.cast_storage(jmask.masked_tensor(jnp.zeros(shape)), target)
            assert y.shape == y.to_dense().shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_numpy_ma(dtype):
    x = example(dtype)
    everything = jax.jit(
        lambda x: [jmask.cast_storage(x, target, nse=12) for target in STORAGES]
    )
    for y in everything(x):
        assert y.dtype == dtype
        assert_masked(y, x.data, x.mask)
        array = to_numpy_ma(y)
        assert isinstance(array, np.ma.MaskedArray)
        np.testing.assert_array_equal(array.mask, ~np.asarray(x.mask))
        back = from_numpy_ma(array)
        assert back.dtype == dtype
        assert_masked(back, x.data, x.mask)
        array[0] = 5  # a copy that may be written to
    assert_masked(y, x.data, x.mask)
    assert from_numpy_ma(np.arange(2)).tolist() == [0, 1]
