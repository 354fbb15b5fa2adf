"""Creation and conversion, plain and masked: `cast_storage`, NumPy, copies."""

import copy
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jmask
import jmask.numpy as jnm
from jmask._tensors.conversions import from_numpy_ma, to_numpy_ma
from jmask._tensors.storage import stored_values
from tests.masked_cases import DTYPES, assert_masked, example
from tests.sparse_arrays import csr

pytestmark = pytest.mark.sampled


STORAGES = ("default", "coo", "csr", "row_sparse")
MATRIX = np.array([[0, 0, 0], [1, 0, np.nan], [0, 0, 0], [0, -2, 0], [0, 0, 3]], np.float32)
PADDED = {
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
EXACT = {"default": None, "row_sparse": 3, "coo": 4, "csr": 4}
PAIRS = list(itertools.product(STORAGES, STORAGES))
kind = lambda x: "default" if isinstance(x, jax.Array) else jmask.MaskedTensor(x).stype
dense = lambda x: x if isinstance(x, jax.Array) else x.todense()


@pytest.mark.parametrize(("start", "end"), PAIRS)
def test_plain_tensors(start, end):
    """Eagerly exact, and traced with a capacity or, if there is one, that of the source."""
    x, has_capacity = PADDED[start], start != "default" or end == "default"
    cast = lambda x, nse=None: jmask.cast_storage(x, end, nse=nse)
    known = jax.jit(lambda x: cast(x, EXACT[end]))
    for run in (cast, known, *[jax.jit(cast)] * has_capacity):
        y = run(x)
        assert kind(y) == end
        np.testing.assert_array_equal(dense(y), MATRIX)
    y = cast(x)
    assert (y is x) == (start == end)
    if start != end and end != "default":
        assert y.nse == EXACT[end]

    def loss(values):  # every stored entry gets its own gradient
        x = jmask.RowSparse(PADDED["row_sparse"].indices, values, MATRIX.shape)
        y = jmask.cast_storage(jmask.cast_storage(x, start), end)
        return jnp.sum(jnp.nan_to_num(dense(y)) ** 2)

    values = jnp.nan_to_num(PADDED["row_sparse"].values, nan=5.0)
    gradient = (jax.grad(loss) if start == "default" else jax.jit(jax.grad(loss)))(values)
    total = np.nan_to_num(MATRIX, nan=5.0)[[4, 1, 3, 3, 0, 0]]
    expected = 2 * total * [[1], [1], [1], [1], [0], [1]]
    np.testing.assert_allclose(np.where(total, gradient, 0), np.where(total, expected, 0))


def test_a_capacity_that_is_too_small():
    for end in STORAGES[1:]:
        with pytest.raises(ValueError, match=f"is too small: {EXACT[end]}"):
            jmask.cast_storage(MATRIX, end, nse=2)
        cast = jax.jit(lambda x, end=end: jmask.cast_storage(x, end, nse=2))
        assert np.isnan(dense(cast(np.nan_to_num(MATRIX)))).any()
        with pytest.raises(ValueError, match="too small"):
            cast(np.nan_to_num(MATRIX).astype(np.int32))


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
    x = PADDED["row_sparse"]
    for y in (np.asarray(x), copy.copy(x), copy.deepcopy(x), x.copy(), jnm.copy(x), list(x)):
        assert y is not x
        np.testing.assert_array_equal(np.stack(y) if isinstance(y, list) else y, MATRIX)
    assert np.asarray(x, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="`copy`=False"):
        np.asarray(x, copy=False)


# --- masked tensors ---------------------------------------------------------------------


MASK = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 0, 0]], bool)
DATA = np.where(MASK, np.arange(1, 13).reshape(4, 3), np.nan).astype(np.float32)
X = jmask.masked_tensor(DATA, MASK)
METHODS = {
    "coo": jmask.MaskedTensor.to_sparse,
    "csr": jmask.MaskedTensor.to_sparse_csr,
    "row_sparse": jmask.MaskedTensor.to_row_sparse,
}
NEEDED = {"coo": 5, "csr": 5, "row_sparse": 3}
UNSORTED = BCOO(
    (
        jnp.array([7.0, 1, 3, 8, 99, 9]),
        jnp.array([[3, 0], [0, 0], [0, 2], [2, 1], [4, 3], [2, 2]]),
    ),
    shape=(4, 3),
)


@pytest.fixture(scope="module")
def sources():
    """The same tensor in every storage."""
    return {kind: jmask.cast_storage(X, kind) for kind in STORAGES}


def assert_same(x, data=DATA, mask=MASK):
    assert_masked(x, data, mask)
    np.testing.assert_array_equal(x.to_tensor(-1), np.where(mask, data, -1))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_from_each_to_each(source, target, sources):
    x = sources[source]
    y = jmask.cast_storage(x, target)
    assert y.stype == target
    assert y.dtype == np.float32
    assert_same(y)
    if target == "default":
        return
    assert y.storage.nse == NEEDED[target]
    if target == "row_sparse":  # which keeps masked entries of a row
        y.storage.validate()
    # Room to spare: padding, which is not valid. Too small: nan in all that is left.
    sizes = (NEEDED[target] + 2, 2) if source in ("default", "coo") else (NEEDED[target] + 2,)
    roomy, *short = jax.jit(lambda x: [jmask.cast_storage(x, target, nse=n) for n in sizes])(x)
    assert roomy.storage.nse == sizes[0]
    assert_same(roomy)
    assert not np.asarray(roomy.valid)[NEEDED[target] :].any()
    for y in short:
        left = np.asarray(stored_values(y.storage))[np.asarray(y.valid)]
        assert left.size
        assert np.isnan(left).all()
    if source != "default":  # traced, as many as it can need
        assert_same(jax.jit(lambda x: jmask.cast_storage(x, target))(x))
    with pytest.raises(ValueError, match=r"`nse`=2 is too small: \d"):
        jmask.cast_storage(x, target, nse=2)


@pytest.mark.parametrize("target", STORAGES[1:])
def test_gradients_and_batches(target, sources):
    weights = np.arange(1, 13, dtype=np.float32).reshape(4, 3)
    other = jmask.masked_tensor(DATA[::-1], MASK[::-1])
    both = jax.tree.map(lambda *a: np.stack(a), X, other)

    def loss(values, x):
        y = jmask.cast_storage(x.with_values(values), target, nse=6)
        return (y.to_tensor(0) * weights).sum()

    @jax.jit
    def compiled(sources, both):
        grads = {k: jax.grad(loss)(stored_values(x.storage), x) for k, x in sources.items()}
        return grads, jax.vmap(lambda x: jmask.cast_storage(x, target, nse=6).to_dense())(both)

    # One source whose entries are found by their number, and one by their indices.
    sources = {kind: sources[kind] for kind in ("default", "coo")}
    grads, batch = compiled(sources, both)
    for kind, x in sources.items():
        assert_same(x.with_values(grads[kind]), np.where(MASK, weights, 0))
        assert not np.asarray(grads[kind])[~np.asarray(x.valid)].any()
    assert_masked(batch, both.data, both.mask)
    # The mask is known although the data is traced.
    convert = lambda data: jmask.cast_storage(jmask.masked_tensor(data, MASK), target).storage
    exact = jax.grad(lambda data: stored_values(convert(data))[0].sum())(X.data)
    assert exact[0, 0] == 1


@pytest.mark.parametrize("target", STORAGES)
def test_unsorted_padded_source(target):
    x = jmask.masked_tensor(UNSORTED)
    y = jmask.cast_storage(x, target, nse=6)
    data = np.where(MASK, np.asarray(UNSORTED.todense()), 0)
    assert_same(y, data)
    if target == "csr":
        starts, columns = np.asarray(y.storage.indptr), np.asarray(y.storage.indices)
        assert starts.tolist() == [0, 2, 2, 4, 5]
        assert columns[:5].tolist() == [0, 2, 1, 2, 0]


@pytest.mark.rank_promotion
def test_dense_dimensions_and_vectors():
    cube = np.zeros((4, 2, 3), np.float32)
    cube[2, 1] = 1
    blocks = jmask.masked_tensor(BCOO.fromdense(jnp.asarray(cube), n_dense=1))
    vector = jmask.masked_tensor(jnp.arange(3.0), [False, True, True])
    for target in ("coo", "row_sparse", "default"):
        for x in (cube, BCOO.fromdense(cube), BCOO.fromdense(cube, n_dense=1)):
            np.testing.assert_array_equal(dense(jmask.cast_storage(x, target)), cube)
        assert_same(
            jmask.cast_storage(blocks, target),
            cube,
            np.repeat(cube.any(-1), 3, -1).reshape(cube.shape),
        )
        assert_masked(jmask.cast_storage(vector, target), np.arange(3.0), [False, True, True])


@pytest.mark.parametrize("target", STORAGES[1:])
def test_nothing_else_is_stored(target, sources):
    """On the same storage too: masked entries go, under jit into padding."""
    first = np.arange(12).reshape(4, 3) < 6  # one row of two, and two entries of five
    x = jmask.sparse_mask(sources[target], first)
    for cast in (lambda x: jmask.cast_storage(x, target), METHODS[target]):
        for y in (cast(x), jax.jit(cast)(x)):
            assert y.stype == target
            assert_same(y, DATA, MASK & first)
            assert (y.storage is x.storage) is False
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
