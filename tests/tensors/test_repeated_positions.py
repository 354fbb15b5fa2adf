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


def made(storage, which, index, seed=0):
    """A function that makes data and a mask at its positions, its arguments, and the oracle."""
    at = positions(storage, which)
    values, valid = values_for(storage, at, seed)
    of_data, of_mask = index_arrays(storage, at), index_arrays(storage, at)

    def make(values, valid, of_data, of_mask):
        mask = tensor(storage, valid, of_data if index == "shared" else of_mask)
        return jmask.MaskedTensor(tensor(storage, values, of_data), mask)

    args = (jnp.array(values), jnp.array(valid), of_data, of_mask)
    return make, args, masked(values, valid, at)


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")  # other positions
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("index", ["shared", "equal"])
@pytest.mark.parametrize("which", ["repeated", "none"])
@pytest.mark.parametrize("storage", STORAGES)
def test_masked_tensor(storage, which, index, way):
    """Entries, reductions, binary functions, gradients: from one index array, or from two."""
    make, args, x = made(storage, which, index)
    others = [made(storage, w, index, seed=1) for w in ROWS]
    plain = np.arange(12.0, dtype=np.float32).reshape(SHAPE)
    reductions = list(itertools.product(REDUCTIONS.values(), (None, 0, 1)))

    def results(args, of_others, plain):
        x = make(*args)
        ys = [f(*a) for (f, *_), a in zip(others, of_others, strict=True)]
        reduced = [f(x, axis=axis) for (f, _), axis in reductions]
        functions = [*(x * y for y in ys), *(y - x for y in ys), x + plain]
        loss = lambda values: jnm.sum(make(values, *args[1:]) ** 3).to_tensor(0)
        return [entries(x), *map(entries, reduced + functions)], jax.grad(loss)(args[0])

    found, gradient = called(way, results, args, [a for _, a, _ in others], jnp.array(plain))
    ys = [y for *_, y in others]
    with np.errstate(all="ignore"):
        reduced = [np.ma.asarray(f(x, axis=axis)) for (_, f), axis in reductions]
    functions = [*(x * y for y in ys), *(y - x for y in ys), x + plain]
    for result, expected in zip(found, [x, *reduced, *functions], strict=True):
        check(result, expected)
    at = positions(storage, which)
    inside, wanted = at[:, 0] < SHAPE[0], np.zeros(gradient.shape)
    wanted[inside] = (3 * np.ma.getdata(x) ** 2)[tuple(at[inside].T)]
    wanted[~np.asarray(args[1])] = 0
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of_mask", ROWS)
@pytest.mark.parametrize("of_data", ROWS)
@pytest.mark.parametrize("storage", ["row_sparse", "coo", "csr"])
def test_positions_of_masks(storage, of_data, of_mask, way):
    """A mask, a `where=`, or another operand, that stores other positions than the data."""
    at, mask_at = positions(storage, of_data), positions(storage, of_mask)
    values = np.nan_to_num(values_for(storage, at, 0)[0], nan=2.0)
    others = np.nan_to_num(values_for(storage, mask_at, 5)[0], nan=3.0)
    _, flags = values_for(storage, mask_at, 3)
    array = np.arange(12.0, dtype=np.float32).reshape(SHAPE)
    kinds = ("row_sparse",) if storage == "row_sparse" else ("coo", "csr")
    kinds = () if of_data == of_mask else kinds  # the mask speaks of stored values then

    def results(values, indices, flags, others, of_mask, array):
        x = tensor(storage, values, indices)
        where, y = (tensor(storage, v, of_mask[storage]) for v in (flags, others))
        full = jmask.todense(x)
        masks = [tensor(kind, flags, of_mask[kind]) for kind in kinds]
        made = [jmask.MaskedTensor(x, mask) for mask in masks]
        assert [z.stype for z in made] == list(kinds)
        out = [jnm.multiply(x, y), jnm.add(x, y), jnm.maximum(x, y), jnm.subtract(x, y)]
        return (
            [jnm.sum(x, where=where), jnm.sum(full, where=where), jnm.norm(x, where=where)],
            [*map(jmask.todense, [*out, jmask.sparse_mask(x, y)])],
            [
                entries(jnm.max(jmask.MaskedTensor(x), axis=0, where=where)),
                entries(jnm.mean(jmask.MaskedTensor(full), axis=0, where=where)),
                entries(jmask.MaskedTensor(array, where)),
                *map(entries, made),
            ],
        )

    indices = {kind: index_arrays(kind, mask_at) for kind in {storage, *kinds}}
    args = map(jnp.array, (values, flags, others, array))
    values_, flags_, others_, array_ = args
    found = called(
        way, results, values_, index_arrays(storage, at), flags_, others_, indices, array_
    )
    x, stored = dense(values, at), dense(np.ones_like(values), at) > 0
    y, kept = dense(others, mask_at), dense(np.ones_like(others), mask_at) > 0
    chosen = dense(flags, mask_at) > 0
    numbers = [(x * chosen).sum(), (x * chosen).sum(), np.linalg.norm(x * chosen)]
    np.testing.assert_allclose(found[0], numbers, rtol=1e-6)
    arrays = [x * y, x + y, np.maximum(x, y), x - y, np.where(kept, x, 0)]
    np.testing.assert_allclose(found[1], arrays, rtol=1e-6)
    maskeds = [
        np.ma.MaskedArray(x, ~(chosen & stored)).max(axis=0),
        np.ma.MaskedArray(x, ~chosen).mean(axis=0),
        np.ma.MaskedArray(array, ~chosen),
        *[np.ma.MaskedArray(x, ~(chosen & stored)) for _ in kinds],
    ]
    for result, expected in zip(found[2], maskeds, strict=True):
        check(result, expected)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
@pytest.mark.parametrize("name", ["sum", "mean", "prod", "norm", "any", "all", "max", "min"])
def test_reductions_of_an_axis_without_entries(name, shape):
    rows = min(shape[0], 1)
    tensors = (
        jmask.RowSparse(jnp.arange(rows), jnp.zeros((rows, shape[1])), shape),
        BCOO((jnp.zeros(0), jnp.zeros((0, 2), jnp.int32)), shape=shape),
    )
    reduction, plain = getattr(jnm, name), getattr(jnp, name, jnp.linalg.norm)
    for x, axis, wrap in itertools.product(tensors, (0, 1), (lambda f: f, jax.jit)):
        call = wrap(lambda x, axis=axis: jmask.todense(reduction(x, axis=axis)))
        if name in ("max", "min") and not shape[axis]:
            with pytest.raises(ValueError, match="zero-size"):
                call(x)
        else:
            np.testing.assert_array_equal(call(x), plain(jnp.zeros(shape), axis=axis))


def test_positions_that_no_32_bit_number_counts():
    """A matrix of 10^12 entries is joined by rows and columns."""
    at = np.array([[5, 999_999], [5, 999_999], [999_999, 7]], np.int32)

    def total(values, valid, indices, of_mask):
        data = BCOO((values, indices), shape=(10**6, 10**6))
        mask = BCOO((valid, of_mask), shape=(10**6, 10**6))
        return jnm.sum(jmask.MaskedTensor(data, mask)).to_tensor(0)

    args = jnp.array([1.0, jnp.nan, 4.0]), jnp.array([True, False, True])
    with jmask.strict():
        for wrap in (lambda f: f, jax.jit):
            assert wrap(total)(*args, jnp.array(at), jnp.array(at)) == 5


@pytest.mark.parametrize("kind", [BCOO, BCSR])
def test_rows_of_entries(kind):
    """Stored values that are rows themselves, of a tensor of three dimensions."""
    values = jnp.array([[1.0, jnp.nan], [2.0, 3.0], [4.0, 5.0]])
    at = ([[0, 0], [0, 0], [1, 2]],) if kind is BCOO else ([0, 0, 2], [0, 2, 3])
    parts = tuple(map(jnp.array, at))

    def sums(values, *parts):
        data, mask = (
            kind((x, *parts), shape=(2, 3, 2)) for x in (values, jnp.isfinite(values))
        )
        return entries(jmask.MaskedTensor(data, mask))

    expected = np.zeros((2, 3, 2))
    expected[0, 0], expected[1, 2] = [3, 3], [4, 5]
    for wrap in (lambda f: f, jax.jit):
        check(wrap(sums)(values, *parts), np.ma.masked_equal(expected, 0))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
def test_16_bit_sums_are_rounded_once(storage, dtype):
    at = positions(storage, "repeated")
    values = np.random.default_rng(0).normal(size=(len(at), *SHAPE[at.shape[1] :]))
    values[::2] /= 100
    values = jnp.asarray(values, dtype)
    result = jmask.cast_storage(tensor(storage, values, index_arrays(storage, at)), "default")
    assert result.dtype == dtype
    expected = dense(np.asarray(values, np.float64), at).astype(dtype)
    np.testing.assert_array_equal(result, expected)
