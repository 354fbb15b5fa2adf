"""Creation and conversion: `cast_storage`, `.npz` and orbax files, NumPy, copies."""

import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jmask
import jmask.numpy as jnm
from tests.sparse_arrays import csr

STORAGES = ("default", "row_sparse", "coo", "csr")
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


def kind(x):
    return "default" if isinstance(x, jax.Array) else jmask.MaskedTensor(x).stype


def dense(x):
    return x if isinstance(x, jax.Array) else x.todense()


@pytest.mark.parametrize(("start", "end"), PAIRS)
class TestEveryDirection:
    @pytest.mark.sampled
    def test_eagerly_exact(self, start, end):
        x = PADDED[start]
        y = jmask.cast_storage(x, end)
        assert kind(y) == end
        np.testing.assert_array_equal(dense(y), MATRIX)
        assert (y is x) == (start == end)
        if start != end and end != "default":
            assert y.nse == EXACT[end]

    @pytest.mark.sampled
    def test_traced(self, start, end):
        x = PADDED[start]
        for nse in (EXACT[end], None):
            if nse is None and start == "default" and end != "default":
                continue
            cast = jax.jit(lambda x, nse=nse: jmask.cast_storage(x, end, nse=nse))
            y = cast(x)
            assert kind(y) == end
            np.testing.assert_array_equal(dense(y), MATRIX)

    @pytest.mark.sampled
    def test_gradient(self, start, end):
        """Every stored entry gets its own."""

        def loss(values):
            x = jmask.RowSparse(PADDED["row_sparse"].indices, values, MATRIX.shape)
            y = jmask.cast_storage(jmask.cast_storage(x, start), end)
            return jnp.sum(jnp.nan_to_num(dense(y)) ** 2)

        values = jnp.nan_to_num(PADDED["row_sparse"].values, nan=5.0)
        gradient = jax.jit(jax.grad(loss))(values) if start != "default" else None
        gradient = jax.grad(loss)(values) if gradient is None else gradient
        total = np.nan_to_num(MATRIX, nan=5.0)
        expected = 2 * total[[4, 1, 3, 3, 0, 0]] * [[1], [1], [1], [1], [0], [1]]
        stored = total[[4, 1, 3, 3, 0, 0]] != 0
        np.testing.assert_allclose(np.where(stored, gradient, 0), np.where(stored, expected, 0))


class TestCapacity:
    def test_too_small(self):
        for end, number in (("row_sparse", 3), ("coo", 4), ("csr", 4)):
            with pytest.raises(ValueError, match=f"is too small: {number}"):
                jmask.cast_storage(MATRIX, end, nse=2)
            cast = jax.jit(lambda x, end=end: jmask.cast_storage(x, end, nse=2))
            assert np.isnan(dense(cast(np.nan_to_num(MATRIX)))).any()
            with pytest.raises(ValueError, match=r"may be too small|too small"):
                cast(np.nan_to_num(MATRIX).astype(np.int32))


def test_dense_dimensions_and_higher_ranks():
    cube = np.zeros((4, 2, 3), np.float32)
    cube[2, 1] = 1
    for x in (cube, BCOO.fromdense(cube), BCOO.fromdense(cube, n_dense=1)):
        for end in ("row_sparse", "coo", "default"):
            np.testing.assert_array_equal(dense(jmask.cast_storage(x, end)), cube)


class TestCreation:
    def test_from_lists_and_arrays(self):
        for values in ([[1.0, 2], [3, 4]], np.array([[1.0, 2], [3, 4]], np.float32)):
            x = jmask.RowSparse([1, 4], values)
            assert x.shape == (5, 2)
            np.testing.assert_array_equal(x[4], [3, 4])
        assert jmask.RowSparse([], np.zeros((0, 2))).shape == (0, 2)
        assert jmask.RowSparse([-1], [[1.0]]).shape == (0, 1)
        assert jmask.RowSparse([0], np.ones((1, 2, 3), np.float16)).dtype == jnp.float16

    def test_random(self):
        x = jmask.RowSparse.random(jax.random.key(0), (50, 2), 20)
        x.validate()
        assert x.coalesced
        assert len(set(x.indices.tolist())) == 20
        other = jmask.RowSparse.random(
            jax.random.key(1), (50, 2), 20, sampler=jax.random.uniform
        )
        assert other.indices.tolist() != x.indices.tolist()
        assert (other.values >= 0).all()


class TestOut:
    x = PADDED["row_sparse"]

    @pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
    def test_numpy(self):
        array = np.asarray(self.x)
        assert isinstance(array, np.ndarray)
        np.testing.assert_array_equal(array, MATRIX)
        assert np.asarray(self.x, np.float64).dtype == np.float64
        np.testing.assert_array_equal(jnp.asarray(np.array(self.x)), MATRIX)
        with pytest.raises(ValueError, match="`copy`=False"):
            np.asarray(self.x, copy=False)

    @pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, np.linalg.norm])
    def test_becoming_an_array_by_itself_is_reported(self, convert):
        with pytest.warns(jmask.StorageFallbackWarning, match=r"write x.todense\(\)"):
            convert(self.x)
        with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning):
            convert(self.x)

    def test_copies(self):
        for y in (copy.copy(self.x), copy.deepcopy(self.x), self.x.copy(), jnm.copy(self.x)):
            assert y is not self.x
            np.testing.assert_array_equal(y.todense(), MATRIX)
        again = pickle.loads(pickle.dumps(self.x))
        np.testing.assert_array_equal(again.indices, self.x.indices)

    def test_length_and_iteration(self):
        assert len(self.x) == 5
        np.testing.assert_array_equal(np.stack(list(self.x)), MATRIX)

    @pytest.mark.sampled
    @pytest.mark.parametrize("storage", STORAGES)
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
    def test_npz(self, storage, masked, dtype, tmp_path):
        x = jmask.cast_storage(jnp.asarray(np.nan_to_num(MATRIX), dtype), storage)
        x = jmask.masked_tensor(x, MATRIX > 0) if masked else x
        jmask.save_npz(tmp_path / "x", x)
        assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]
        y = jmask.load_npz(tmp_path / "x.npz")
        assert jax.tree.structure(x) == jax.tree.structure(y)
        assert y.dtype == dtype
        back = [a.to_tensor(0) if masked else dense(a) for a in (x, y)]
        np.testing.assert_array_equal(*back)

    def test_npz_of_something_else(self, tmp_path):
        np.savez(tmp_path / "a.npz", a=np.ones(2))
        with pytest.raises(ValueError, match=r"not written by jmask\.save_npz"):
            jmask.load_npz(tmp_path / "a.npz")
        with pytest.raises(TypeError, match="is not a storage"):
            jmask.save_npz(tmp_path / "b.npz", object())
        assert not (tmp_path / "b.npz").exists()

    def test_npz_is_written_whole_or_not_at_all(self, tmp_path, monkeypatch):
        path = tmp_path / "x.npz"
        jmask.save_npz(path, jnp.ones(2))

        def fails(stream, **contents):
            stream.write(b"half")
            raise OSError("no space left")

        monkeypatch.setattr(np, "savez", fails)
        with pytest.raises(OSError, match="no space"):
            jmask.save_npz(path, jnp.zeros(2))
        assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]
        np.testing.assert_array_equal(jmask.load_npz(path), [1, 1])

    def test_from_arrays_of_tables(self):
        mesh = jax.make_mesh((1,), ("x",))
        table = jmask.sharded(jnp.ones((4, 2)), mesh)
        same = jmask.from_arrays({"t": table}, {"t": table})
        np.testing.assert_array_equal(same["t"], np.ones((4, 2)))
