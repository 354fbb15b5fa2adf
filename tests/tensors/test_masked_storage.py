"""Storages: from each to each, sizes, padding, gradients, NumPy; and what is refused."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jmask
from jmask._tensors.conversions import from_numpy_ma, to_numpy_ma
from jmask._tensors.storage import stored_values
from tests.masked_cases import DTYPES, assert_masked, example

pytestmark = pytest.mark.sampled

KINDS = ("default", "coo", "csr", "row_sparse")
MASK = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 0, 0]], bool)
DATA = np.where(MASK, np.arange(1, 13).reshape(4, 3), np.nan).astype(np.float32)
X = jmask.masked_tensor(DATA, MASK)
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
    return {kind: jmask.cast_storage(X, kind) for kind in KINDS}


def assert_same(x, data=DATA, mask=MASK):
    assert_masked(x, data, mask)
    np.testing.assert_array_equal(x.to_tensor(-1), np.where(mask, data, -1))


@pytest.mark.parametrize(("source", "target"), [*itertools.product(KINDS, KINDS)])
def test_from_each_to_each(source, target, sources):
    x = sources[source]
    y = jmask.cast_storage(x, target)
    assert y.stype == target
    assert y.dtype == np.float32
    assert_same(y)
    if target == "default":
        return
    assert y.storage.nse == NEEDED[target]
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
    with pytest.raises(ValueError, match=r"`nse`=2 is too small: \d"):
        jmask.cast_storage(x, target, nse=2)
    # The size must be known.
    if source != target:
        with pytest.raises(ValueError, match="`nse`"):
            jax.jit(lambda x: jmask.cast_storage(x, target))(x)
    with pytest.raises(ValueError, match="nse"):
        jmask.cast_storage(x, target, nse=-1)
    with pytest.raises(ValueError, match="`nse`=0"):
        jax.jit(lambda x: jmask.cast_storage(x, target, nse=0))(x)
    whole = x.astype(jnp.int32)
    with pytest.raises(ValueError, match="nse"):
        jax.jit(lambda x: jmask.cast_storage(x, target, nse=2))(whole)


@pytest.mark.parametrize("target", KINDS[1:])
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


@pytest.mark.parametrize("target", KINDS)
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
    blocks = BCOO.fromdense(jnp.nan_to_num(X.data)[:, :, None] * jnp.ones(2), n_dense=1)
    x = jmask.masked_tensor(blocks)
    mask = np.repeat(MASK[..., None], 2, -1)
    data = np.repeat(DATA[..., None], 2, -1)
    for target in ("coo", "row_sparse"):
        assert_same(jmask.cast_storage(x, target), data, mask)
    vector = jmask.masked_tensor(jnp.arange(3.0), [False, True, True])
    for target in ("coo", "row_sparse"):
        y = jmask.cast_storage(vector, target)
        assert y.storage.nse == 2
        assert_masked(y, np.arange(3.0), [False, True, True])


def test_row_sparse_keeps_masked_entries_of_a_row():
    x = X.to_row_sparse()
    np.testing.assert_array_equal(x.storage.indices, [0, 2, 3])
    np.testing.assert_array_equal(x.valid, MASK[[0, 2, 3]])
    x.storage.validate()
    assert X.to_sparse().stype == "coo"
    assert X.to_sparse_csr().stype == "csr"
    same = X.to_sparse()
    assert same.to_sparse() is same


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
def test_empty(shape):
    x = jmask.masked_tensor(jnp.zeros(shape))
    for target in KINDS:
        if target != "csr" or len(shape) == 2:
            y = jmask.cast_storage(x, target)
            assert y.shape == shape
            assert y.to_dense().shape == shape
    nothing = jmask.masked_tensor(jnp.ones((2, 3)), False)
    for target in KINDS:
        assert not jmask.cast_storage(nothing, target).to_dense().mask.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_numpy_ma(dtype):
    x = example(dtype)
    everything = jax.jit(lambda x: [jmask.cast_storage(x, target, nse=12) for target in KINDS])
    for y in everything(x):
        assert y.dtype == dtype
        assert_masked(y, x.data, x.mask)
        array = to_numpy_ma(y)
        assert isinstance(array, np.ma.MaskedArray)
        np.testing.assert_array_equal(array.mask, ~np.asarray(x.mask))
        back = from_numpy_ma(array)
        assert back.dtype == dtype
        assert_masked(back, x.data, x.mask)


def test_numpy_ma():
    array = np.ma.masked_array([1.0, 2.0], mask=[True, False])
    assert from_numpy_ma(array).tolist() == [None, 2.0]
    assert from_numpy_ma(np.arange(2)).tolist() == [0, 1]
    assert to_numpy_ma(jnp.arange(2)).sum() == 1
    array = to_numpy_ma(X)
    array[0, 0] = 5  # a copy that may be written to
    assert X[0, 0].item() == 1
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(to_numpy_ma)(X)


def test_scan_carries_every_storage(sources):
    for x in sources.values():
        total, _ = jax.lax.scan(
            lambda x, _: (x.with_values(stored_values(x.storage) + 1), None), x, length=2
        )
        assert_same(total, DATA + 2)
