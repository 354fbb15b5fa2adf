"""Repeated and missing positions in data, masks and `where=`, on every storage.

The oracle is dense, in float64 NumPy, and knows positions alone:

    an entry of plain data       the sum of what is stored at its position
    an entry of masked data      the sum of what is stored there and valid, if anything is
    a mask of other positions    True where one of the values stored there is True
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm

pytestmark = pytest.mark.sampled

SHAPE = (4, 3)
# Of rows, and of entries: repeated ones, none at all, and one that is padding.
ROWS = {"repeated": [3, 1, 1, 3, 1, 4], "none": [], "unique": [0, 3, 4]}
ENTRIES = {
    "repeated": [(0, 2), (1, 0), (1, 0), (1, 2), (3, 1), (3, 1), (3, 1)],
    "none": [],
    "unique": [(0, 0), (1, 0), (3, 1)],
}
STORAGES = ["row_sparse", "rows_of_coo", "coo", "csr"]
WAYS = ["eager", "jit", "vmap"]


def positions(storage, which):
    if storage in ("row_sparse", "rows_of_coo"):
        return np.array(ROWS[which], np.int32).reshape(-1, 1)
    return np.array(ENTRIES[which], np.int32).reshape(-1, 2)


def index_arrays(storage, at):
    """New index arrays in each call."""
    if storage != "csr":
        return (jnp.array(at[:, 0] if storage == "row_sparse" else at),)
    pointers = np.searchsorted(at[:, 0], np.arange(SHAPE[0] + 1))
    return jnp.array(at[:, 1]), jnp.array(pointers, jnp.int32)


def tensor(storage, values, indices):
    if storage == "row_sparse":
        return jmask.RowSparse(indices[0], values, SHAPE)
    return (BCSR if storage == "csr" else BCOO)((values, *indices), shape=SHAPE)


def values_for(storage, at, seed):
    """Values, nan where they are masked, and the mask."""
    generator = np.random.default_rng(seed)
    shape = (len(at), *SHAPE[at.shape[1] :])
    values = generator.integers(1, 9, shape).astype(np.float32)
    valid = generator.random(shape) < 0.5
    return np.where(valid, values, np.nan).astype(np.float32), valid


def dense(values, at):
    """Float64 sums over the positions, padding apart."""
    out = np.zeros(SHAPE)
    for index, value in zip(at, values, strict=True):
        if index[0] < SHAPE[0]:
            out[tuple(index)] += value
    return out


def masked(values, valid, at):
    exists = dense(valid, at) > 0
    return np.ma.MaskedArray(dense(np.where(valid, values, 0), at), ~exists)


def called(way, function, *args):
    """The result of the function, which is that of each of two equal examples under vmap."""
    if way == "eager":
        return function(*args)
    if way == "jit":
        return jax.jit(function)(*args)
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), args)
    out = jax.jit(jax.vmap(function))(*twice)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x[0], x[1]), out)
    return jax.tree.map(lambda x: x[0], out)


# The entries and the mask as arrays, which every way of calling can return.
entries = lambda x: (x.to_tensor(0), x.to_dense().mask)


def check(result, expected):
    values, valid = map(np.asarray, result)
    hidden = np.ma.getmaskarray(expected)
    np.testing.assert_array_equal(valid, ~hidden)
    np.testing.assert_allclose(values, np.where(hidden, 0, np.ma.getdata(expected)), rtol=1e-6)


REDUCTIONS = {
    "sum": (jnm.sum, np.ma.sum),
    "mean": (jnm.mean, np.ma.mean),
    "max": (jnm.max, np.ma.max),
    "prod": (jnm.prod, np.ma.prod),
    "norm": (jnm.norm, lambda x, axis: np.ma.sqrt((x * x).sum(axis))),
    "var": (jnm.var, np.ma.var),
}


@pytest.mark.parametrize(
    ("storage", "which", "index", "way"),
    list(itertools.product(STORAGES, ["repeated", "none"], ["shared", "equal"], WAYS)),
)
class TestMaskedTensor:
    """`MaskedTensor` of data and a mask at its positions, from one index array or from two."""

    @staticmethod
    def made(storage, which, index, seed=0):
        """A function that makes the tensor, its arguments, and what it should be."""
        at = positions(storage, which)
        values, valid = values_for(storage, at, seed)
        of_data, of_mask = index_arrays(storage, at), index_arrays(storage, at)

        def make(values, valid, of_data, of_mask):
            of_mask = of_data if index == "shared" else of_mask
            mask = tensor(storage, valid, of_mask)
            return jmask.MaskedTensor(tensor(storage, values, of_data), mask)

        args = (jnp.array(values), jnp.array(valid), of_data, of_mask)
        return make, args, masked(values, valid, at)

    def test_entries(self, storage, which, index, way):
        make, args, expected = self.made(storage, which, index)
        check(called(way, lambda *a: entries(make(*a)), *args), expected)

    def test_reductions(self, storage, which, index, way):
        make, args, expected = self.made(storage, which, index)

        cases = list(itertools.product(REDUCTIONS, (None, 0, 1)))

        def reduced(*args):
            x = make(*args)
            return [entries(REDUCTIONS[name][0](x, axis=axis)) for name, axis in cases]

        with np.errstate(all="ignore"):
            results = called(way, reduced, *args)
            for (name, axis), result in zip(cases, results, strict=True):
                theirs = np.ma.asarray(REDUCTIONS[name][1](expected, axis=axis))
                check(result, theirs)

    def test_binary_functions(self, storage, which, index, way):
        make, args, x = self.made(storage, which, index)
        others = [self.made(storage, w, index, seed=1) for w in ROWS]
        plain = np.arange(12.0, dtype=np.float32).reshape(SHAPE)

        def results(args, others, plain):
            x = make(*args)
            ys = [f(*a) for (f, *_), a in zip(made, others, strict=True)]
            return [
                *(entries(x * y) for y in ys),
                *(entries(y - x) for y in ys),
                entries(x + plain),
                entries(x * tensor(storage, args[0], args[2])),
            ]

        made = others
        out = called(way, results, args, [a for _, a, _ in others], jnp.array(plain))
        ys = [y for *_, y in others]
        for result, expected in zip(
            out[:-1], [*(x * y for y in ys), *(y - x for y in ys), x + plain], strict=True
        ):
            check(result, expected)

    def test_gradient(self, storage, which, index, way):
        make, args, expected = self.made(storage, which, index)

        def loss(values, *others):
            x = make(values, *others)
            return jnm.sum(x * x * x).to_tensor(0)

        gradient = called(way, jax.grad(loss), *args)
        at = positions(storage, which)
        slope = 3 * np.ma.getdata(expected) ** 2
        inside = at[:, 0] < SHAPE[0]
        wanted = np.zeros(gradient.shape)
        wanted[inside] = slope[tuple(at[inside].T)]
        wanted[~np.asarray(args[1])] = 0
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("storage", "of_data", "of_mask", "way"),
    list(itertools.product(["row_sparse", "coo", "csr"], ROWS, ROWS, WAYS)),
)
class TestPositionsOfMasks:
    """A mask, or `where=`, that stores other positions than the data."""

    @staticmethod
    def made(storage, of_data, of_mask):
        at, mask_at = positions(storage, of_data), positions(storage, of_mask)
        values, _ = values_for(storage, at, 0)
        values = np.nan_to_num(values, nan=2.0)
        _, chosen = values_for(storage, mask_at, 3)
        args = (
            jnp.array(values),
            index_arrays(storage, at),
            jnp.array(chosen),
            index_arrays(storage, mask_at),
        )
        return at, values, dense(chosen, mask_at) > 0, args

    def test_mask_of_stored_data(self, storage, of_data, of_mask, way):
        if of_data == of_mask:
            pytest.skip("a mask with the index arrays of the data speaks of stored values")
        at, values, chosen, args = self.made(storage, of_data, of_mask)
        stored = dense(np.ones_like(values), at) > 0
        expected = np.ma.MaskedArray(dense(values, at), ~(stored & chosen))
        for kind in ("row_sparse",) if storage == "row_sparse" else ("coo", "csr"):

            def make(values, indices, chosen, of_chosen, kind=kind):
                mask = tensor(kind, chosen, of_chosen)
                x = jmask.MaskedTensor(tensor(storage, values, indices), mask)
                assert x.stype == kind
                return entries(x)

            of_chosen = index_arrays(kind, positions(kind, of_mask))
            check(called(way, make, *args[:3], of_chosen), expected)

    def test_mask_of_an_array(self, storage, of_data, of_mask, way):
        _, _, chosen, args = self.made(storage, of_data, of_mask)
        array = np.arange(12.0, dtype=np.float32).reshape(SHAPE)

        def make(array, chosen, of_chosen):
            return entries(jmask.MaskedTensor(array, tensor(storage, chosen, of_chosen)))

        expected = np.ma.MaskedArray(array, ~chosen)
        check(called(way, make, jnp.array(array), *args[2:]), expected)

    def test_where(self, storage, of_data, of_mask, way):
        at, values, chosen, args = self.made(storage, of_data, of_mask)
        data, stored = dense(values, at), dense(np.ones_like(values), at) > 0

        def sums(values, indices, chosen, of_chosen):
            x, where = tensor(storage, values, indices), tensor(storage, chosen, of_chosen)
            array = jmask.todense(x)
            return (
                jnm.sum(x, where=where),
                jnm.sum(array, where=where),
                jnm.norm(x, where=where),
                entries(jnm.max(jmask.MaskedTensor(x), axis=0, where=where)),
                entries(jnm.mean(jmask.MaskedTensor(array), axis=0, where=where)),
            )

        results = called(way, sums, *args)
        np.testing.assert_allclose(results[0], (data * chosen).sum(), rtol=1e-6)
        np.testing.assert_allclose(results[1], (data * chosen).sum(), rtol=1e-6)
        np.testing.assert_allclose(results[2], np.linalg.norm(data * chosen), rtol=1e-6)
        check(results[3], np.ma.MaskedArray(data, ~(chosen & stored)).max(axis=0))
        check(results[4], np.ma.MaskedArray(data, ~chosen).mean(axis=0))

    def test_plain_binary_functions(self, storage, of_data, of_mask, way):
        at, values, _, args = self.made(storage, of_data, of_mask)
        mask_at = positions(storage, of_mask)
        others, _ = values_for(storage, mask_at, 5)
        others = np.nan_to_num(others, nan=3.0)

        def results(values, indices, others, of_others):
            x, y = tensor(storage, values, indices), tensor(storage, others, of_others)
            out = [jnm.multiply(x, y), jnm.add(x, y), jnm.maximum(x, y), jnm.subtract(x, y)]
            return [*map(jmask.todense, out), jmask.todense(jmask.sparse_mask(x, y))]

        x, y = dense(values, at), dense(others, mask_at)
        kept = np.where(dense(np.ones_like(others), mask_at) > 0, x, 0)
        expected = [x * y, x + y, np.maximum(x, y), x - y, kept]
        out = called(way, results, *args[:2], jnp.array(others), args[3])
        for result, wanted in zip(out, expected, strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-6)


@pytest.mark.parametrize("way", ["eager", "jit"])
@pytest.mark.parametrize("storage", ["row_sparse", "coo"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
@pytest.mark.parametrize("name", ["sum", "mean", "prod", "norm", "any", "all", "max", "min"])
def test_reductions_of_an_axis_without_entries(name, shape, storage, way):
    if storage == "row_sparse":
        x = jmask.RowSparse(
            jnp.arange(min(shape[0], 1)), jnp.zeros((min(shape[0], 1), shape[1])), shape
        )
    else:
        x = BCOO((jnp.zeros(0), jnp.zeros((0, 2), jnp.int32)), shape=shape)
    reduction, plain = getattr(jnm, name), getattr(jnp, name, jnp.linalg.norm)
    for axis in (0, 1):
        call = lambda x, axis=axis: jmask.todense(reduction(x, axis=axis))
        call = call if way == "eager" else jax.jit(call)
        try:
            expected = plain(jnp.zeros(shape), axis=axis)
        except ValueError:
            with pytest.raises(ValueError, match="zero-size"):
                call(x)
            continue
        np.testing.assert_array_equal(call(x), expected)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_positions_that_no_32_bit_number_counts(wrap):
    """A matrix of 10^12 entries is joined by rows and columns."""
    at = np.array([[5, 999_999], [5, 999_999], [999_999, 7]], np.int32)

    def total(values, valid, indices, of_mask):
        data = BCOO((values, indices), shape=(10**6, 10**6))
        mask = BCOO((valid, of_mask), shape=(10**6, 10**6))
        return jnm.sum(jmask.MaskedTensor(data, mask)).to_tensor(0)

    args = jnp.array([1.0, jnp.nan, 4.0]), jnp.array([True, False, True])
    with jmask.strict():
        assert wrap(total)(*args, jnp.array(at), jnp.array(at)) == 5


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", [BCOO, BCSR])
def test_rows_of_entries(kind, wrap):
    """Stored values that are rows themselves, of a tensor of three dimensions."""
    values = jnp.array([[1.0, jnp.nan], [2.0, 3.0], [4.0, 5.0]])
    at = [[0, 0], [0, 0], [1, 2]]
    parts = (at,) if kind is BCOO else ([0, 0, 2], [0, 2, 3])

    def dense(values, *parts):
        data = kind((values, *parts), shape=(2, 3, 2))
        mask = kind((jnp.isfinite(values), *parts), shape=(2, 3, 2))
        return entries(jmask.MaskedTensor(data, mask))

    expected, hidden = np.zeros((2, 3, 2)), np.ones((2, 3, 2), bool)
    expected[0, 0], expected[1, 2] = [3, 3], [4, 5]
    hidden[0, 0] = hidden[1, 2] = False
    check(wrap(dense)(values, *map(jnp.array, parts)), np.ma.MaskedArray(expected, hidden))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
def test_16_bit_sums_are_rounded_once(storage, dtype):
    at = positions(storage, "repeated")
    values = np.random.default_rng(0).normal(size=(len(at), *SHAPE[at.shape[1] :]))
    values = jnp.asarray(
        np.where(np.arange(len(at)) % 2, 1, 1e-2).reshape(-1, *[1] * (values.ndim - 1))
        * values,
        dtype,
    )
    x = tensor(storage, values, index_arrays(storage, at))
    result = jmask.cast_storage(x, "default")
    assert result.dtype == dtype
    expected = dense(np.asarray(values, np.float64), at).astype(dtype)
    np.testing.assert_array_equal(result, expected)
