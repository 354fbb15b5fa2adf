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
from jmask._tensors.storage import stype

pytestmark = pytest.mark.sampled

SHAPE = (4, 3)
# Of rows, and of entries: repeated ones, none at all, and as many others; 4 is padding.
ROWS = {"repeated": [3, 1, 1, 3, 1, 4], "none": [], "unique": [0, 3, 4, 4, 4, 4]}
ENTRIES = {
    "repeated": [(0, 2), (1, 0), (1, 0), (1, 2), (3, 1), (3, 1), (3, 1)],
    "none": [],
    "unique": [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 2), (3, 1)],
}
STORAGES = ["row_sparse", "rows_of_coo", "coo", "csr"]
# Arrays, and sparse tensors at positions of each kind.
SIDES = [("default", "all"), *itertools.product(["row_sparse", "coo", "csr"], ROWS)]
WAYS = ["eager", "jit", "vmap"]


def positions(storage, which):
    if storage == "default":
        return np.argwhere(np.ones(SHAPE))
    if storage in ("row_sparse", "rows_of_coo"):
        return np.array(ROWS[which], np.int32).reshape(-1, 1)
    return np.array(ENTRIES[which], np.int32).reshape(-1, 2)


def index_arrays(storage, at):
    """New index arrays in each call."""
    if storage == "default":
        return ()
    if storage != "csr":
        return (jnp.array(at[:, 0] if storage == "row_sparse" else at),)
    pointers = np.searchsorted(at[:, 0], np.arange(SHAPE[0] + 1))
    return jnp.array(at[:, 1]), jnp.array(pointers, jnp.int32)


def tensor(storage, values, indices):
    if storage == "default":
        return values.reshape(SHAPE)
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
    """Entries, sums, binary functions, gradients: from one index array, or from two."""
    make, args, x = made(storage, which, index)
    others = [made(storage, w, index, seed=1) for w in ROWS]
    plain = np.arange(12.0, dtype=np.float32).reshape(SHAPE)

    def results(args, of_others, plain):
        x = make(*args)
        ys = [f(*a) for (f, *_), a in zip(others, of_others, strict=True)]
        functions = [*(x * y for y in ys), *(y - x for y in ys), x + plain]
        loss = lambda values: jnm.sum(make(values, *args[1:]) ** 3).to_tensor(0)
        found = [x, jnm.sum(x), jnm.var(x, 0), jnm.max(x, 1), *functions]
        return list(map(entries, found)), jax.grad(loss)(args[0])

    found, gradient = called(way, results, args, [a for _, a, _ in others], jnp.array(plain))
    ys = [y for *_, y in others]
    functions = [*(x * y for y in ys), *(y - x for y in ys), x + plain]
    for result, expected in zip(
        found, [x, x.sum(), x.var(0), x.max(1), *functions], strict=True
    ):
        check(result, expected)
    at = positions(storage, which)
    inside, wanted = at[:, 0] < SHAPE[0], np.zeros(gradient.shape)
    wanted[inside] = (3 * np.ma.getdata(x) ** 2)[tuple(at[inside].T)]
    wanted[~np.asarray(args[1])] = 0
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other", SIDES, ids="-".join)
@pytest.mark.parametrize("data", SIDES, ids="-".join)
def test_positions_of_another(data, other, way):
    """Data beside a mask, a `where=`, or an operand that stores other positions."""
    (storage, of_data), (other_storage, of_other) = data, other
    at, other_at = positions(storage, of_data), positions(other_storage, of_other)
    values = np.nan_to_num(values_for(storage, at, 0)[0], nan=2.0)
    others = np.nan_to_num(values_for(other_storage, other_at, 5)[0], nan=3.0)
    _, flags = values_for(other_storage, other_at, 3)
    sparse = [s for s in (storage, other_storage) if s != "default"]
    are_alike = len({s == "row_sparse" for s in sparse}) < 2

    def results(values, indices, flags, others, of_others):
        x = tensor(storage, values, indices)
        where, y = (tensor(other_storage, v, of_others) for v in (flags, others))
        pattern = where if other_storage == "default" else y
        with jmask.strict() if are_alike else pytest.warns(jmask.StorageFallbackWarning):
            kept = jmask.sparse_mask(x, pattern)
        assert stype(kept) == (storage if pattern is where else other_storage)
        plain = [f(x, y) for f in (jnm.multiply, jnm.add, jnm.maximum, jnm.subtract)]
        if storage == other_storage:  # which is kept, wherever its entries are
            assert {stype(z) for z in plain} == {storage}
        elif len(sparse) == 1:
            assert stype(plain[0]) == sparse[0]
        m = jmask.MaskedTensor(x)
        maskeds = [
            *(jnm.add(y, m), jnm.masked_where(where, m), jnm.where(where, m, m * 2)),
            *(jnm.average(m, 1, y), jnm.sum(m, 1, where=where), jnm.max(m, 0, where=where)),
            *(jmask.sparse_mask(m, pattern), jmask.sparse_mask(y, m)),
        ]
        if not are_alike:
            with pytest.raises(ValueError, match=r"`mask`.*store positions"):
                jmask.MaskedTensor(x, where)
        elif of_data != of_other:  # at the same positions it speaks of values one by one
            maskeds.append(jmask.MaskedTensor(x, where))
        sums = jnm.sum(x, where=where), jnm.norm(x, where=where)
        return sums, list(map(jmask.todense, [*plain, kept])), list(map(entries, maskeds))

    args = (
        values,
        index_arrays(storage, at),
        flags,
        others,
        index_arrays(other_storage, other_at),
    )
    sums, plain, maskeds = called(way, results, *jax.tree.map(jnp.array, args))
    x, stored = dense(values, at), dense(np.ones_like(values), at) > 0
    y, kept = dense(others, other_at), dense(np.ones_like(others), other_at) > 0
    chosen = dense(flags, other_at) > 0
    kept = chosen if other_storage == "default" else kept
    np.testing.assert_allclose(
        sums, [(x * chosen).sum(), np.linalg.norm(x * chosen)], rtol=1e-6
    )
    expected = [x * y, x + y, np.maximum(x, y), x - y, np.where(kept, x, 0)]
    np.testing.assert_allclose(plain, expected, rtol=1e-6)
    where_stored = lambda data, *more: np.ma.array(
        data, mask=~np.logical_and.reduce([stored, *more])
    )
    both = where_stored(x, chosen)
    weights = np.where(stored, y, 0)
    average = np.ma.array((x * weights).sum(1) / weights.sum(1), mask=~stored.any(1))
    expected = [
        *(
            where_stored(x + y),
            where_stored(x, ~chosen),
            where_stored(np.where(chosen, x, 2 * x)),
        ),
        *(average, both.sum(1), both.max(0), where_stored(x, kept), where_stored(y), both),
    ]
    for result, one in zip(maskeds, expected[: len(maskeds)], strict=True):
        check(result, one)


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
