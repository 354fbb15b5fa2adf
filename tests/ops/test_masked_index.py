"""Indexing and `.at` against NumPy on data and mask, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.moved_entries import (
    DTYPES,
    MASK,
    assert_masked,
    example,
    gradient,
    moved_by_numpy,
    numbered,
    valid_sum,
)

pytestmark = pytest.mark.sampled

X = example()
INDICES = {
    "integer": 1,
    "negative": -1,
    "two integers": (2, 1),
    "slice": slice(1, None),
    "step": (slice(None), slice(None, None, -2)),
    "none": (None, 0),
    "ellipsis": (..., 2),
    "array": np.array([2, 0, 2]),
    "list": [2, 0, 2],
    "two arrays": (np.array([2, 0]), np.array([[1], [3]])),
    "array after slice": (slice(None), np.array([[3, 0]])),
    "mask": MASK,
    "row mask": np.array([True, False, True]),
    "empty": slice(3, None),
    "scalar array": np.int32(1),
}


@pytest.fixture(scope="module")
def compiled():
    """Every index under jit, its gradient, and updates, in one compilation."""

    def run(x, index):
        return {
            "getitem": x[index],
            "gradient": gradient(lambda x: x[index], x),
            "get": x.at[index].get(),
            "set": x.at[index].set(7),
            "set masked": x.at[index].set(x[index]),
            "add": x.at[index].add(1),
        }

    everything = jax.jit(lambda x: {k: run(x, index) for k, index in INDICES.items()})
    return everything(X)


@pytest.mark.parametrize("name", INDICES)
def test_getitem(name, compiled):
    index = INDICES[name]
    places = numbered(X)[index]
    expected = moved_by_numpy(places, X)
    for result in (X[index], compiled[name]["getitem"], compiled[name]["get"]):
        assert_masked(result, *expected)
    expected = np.zeros(13)
    np.add.at(expected, np.ravel(places), np.arange(1, places.size + 1))
    expected = np.where(MASK, expected[1:].reshape(3, 4), 0)
    np.testing.assert_array_equal(compiled[name]["gradient"], expected)


@pytest.mark.parametrize("name", INDICES)
def test_updates_everywhere(name, compiled):
    index, data, mask = INDICES[name], np.array(X.data), MASK.copy()
    data[index], mask[index] = 7, True
    assert_masked(compiled[name]["set"], data, mask)
    assert_masked(compiled[name]["set masked"], X.data, MASK)
    data = np.array(X.data)
    np.add.at(data, index, 1)
    assert_masked(compiled[name]["add"], data, MASK)


def test_out_of_range_reads_the_border():
    for index in (7, -9, np.array([7, -9])):
        assert_masked(X[index], X.data[index], jnp.asarray(MASK)[index])
    beyond = X.at[jnp.array([1, 7])].get(mode="fill")
    assert_masked(beyond, X.data[np.array([1, 1])], [MASK[1], [False] * 4])
    filled = X.at[jnp.array([1, 7])].get(mode="fill", fill_value=5)
    assert filled[1].tolist() == [5.0] * 4


INDEX = jmask.masked_tensor(jnp.array([2, 0, -1, 9]), [True, False, True, True])
KNOWN = np.array([True, False, True, True])


def test_masked_index():
    rows, exists = np.array([2, 0, 2, 2]), KNOWN[:, None]
    read = jax.jit(lambda x, i: (x[i], x[:, i], x[i, 1], x[None, ..., i], x[i, :, None]))
    for results in (read(X, INDEX), read.__wrapped__(X, INDEX)):
        by_row, by_column, with_integer, last, newaxis = results
        assert_masked(by_row, X.data[rows], MASK[rows] & exists)
        columns = np.array([2, 0, 3, 3])
        assert_masked(by_column, X.data[:, columns], MASK[:, columns] & KNOWN)
        assert_masked(with_integer, X.data[rows, 1], MASK[rows, 1] & KNOWN)
        assert_masked(last, X.data[None, :, columns], (MASK[:, columns] & KNOWN)[None])
        assert_masked(newaxis, X.data[rows][..., None], (MASK[rows] & exists)[..., None])
    expected = np.zeros((3, 4))
    np.add.at(expected, rows[KNOWN], np.arange(1, 17).reshape(4, 4)[KNOWN])
    actual = gradient(lambda x: x[INDEX], X)
    np.testing.assert_array_equal(actual, np.where(MASK, expected, 0))
    narrow = jmask.masked_tensor(jnp.array([1, 2], jnp.int8), [True, False])
    assert jmask.masked_tensor(jnp.arange(300))[narrow].tolist() == [1, None]


def test_masked_index_writes_nothing():
    data = np.array(X.data)
    data[[2]] = 7
    mask = MASK.copy()
    mask[[2]] = True
    assert_masked(X.at[INDEX].set(7), data, mask)
    data[2], mask[2] = 7, True
    assert_masked(X.at[INDEX].set(7, mode="clip"), data, mask)
    assert_masked(X.at[INDEX].get(mode="fill")[3], np.zeros(4), [False] * 4)
    assert_masked(X.at[INDEX].get(), X[INDEX].data, X[INDEX].mask)


def test_rows_are_iterated_over():
    for row, data, mask in zip(X, X.data, MASK, strict=True):
        assert_masked(row, data, mask)
    assert [entry.item() for entry in X[0]] == [5.0, None, 3.0, 8.0]


# --- updates with values -----------------------------------------------------------------

OPERATIONS = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "mul": np.multiply,
    "divide": np.divide,
    "power": lambda a, b: np.abs(a) ** b,
    "min": np.minimum,
    "max": np.maximum,
}
VALUES = jmask.masked_tensor(jnp.array([2.0, 3.0, jnp.nan, 4.0]), [True, True, False, True])


@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_leaves_masked_entries_masked(name):
    x = X.with_values(jnp.abs(X.data))

    def updates(data, values):
        x_ = x.with_values(data)
        plain = getattr(x_.at[1], name)(values, unique_indices=True)
        v = VALUES.with_values(values)
        return plain, getattr(x_.at[0], name)(v, unique_indices=True)

    values = jnp.array([jnp.inf, 3.0, jnp.nan, 4.0])
    plain, masked = updates(x.data, values)
    data = np.array(x.data)
    with np.errstate(all="ignore"):
        data[1] = OPERATIONS[name](data[1], values)
        assert_masked(plain, data, MASK)
        data = np.array(x.data)
        data[0] = OPERATIONS[name](data[0], np.asarray(values))
    mask = MASK.copy()
    mask[0] &= np.asarray(VALUES.mask)
    assert_masked(masked, data, mask)

    weigh = lambda d, v: sum(valid_sum(t) for t in updates(d, v))
    to_data, to_values = jax.jit(jax.grad(weigh, (0, 1)))(x.data, values.at[0].set(2.0))
    assert np.isfinite(to_data).all()
    assert np.isfinite(to_values).all()
    assert not to_data[~MASK].any()
    assert to_values[2] == 0


def test_set_with_masked_and_repeated_positions():
    x = X.at[0].set(VALUES)
    assert x[0].tolist() == [2.0, 3.0, None, 4.0]
    repeated = X[0].at[jnp.array([1, 1, 3])].set(VALUES[1:])
    assert repeated.tolist() == [5.0, None, 3.0, 4.0]
    added = X[0].at[jnp.array([0, 0, 3])].add(VALUES[1:])
    assert added.tolist() == [None, None, 3.0, 12.0]
    dropped = X[0].at[jnp.array([9, 0])].set(1)
    assert dropped.tolist() == [1.0, None, 3.0, 8.0]
    grads = jax.grad(lambda v: valid_sum(X.at[0].set(VALUES.with_values(v))))(VALUES.data)
    np.testing.assert_array_equal(grads, [1, 2, 0, 4])


def test_apply():
    assert_masked(
        X.at[0].apply(jnp.exp), np.concatenate([np.exp(X.data[:1]), X.data[1:]]), MASK
    )
    repeated = X[0].at[jnp.array([0, 0])].apply(jnp.negative)
    assert repeated.tolist() == [-5.0, None, 3.0, 8.0]
    roots = gradient(lambda x: x.at[:].apply(jnp.log), X.with_values(jnp.abs(X.data)))
    expected = np.where(MASK, numbered(X) / np.abs(X.data), 0)
    np.testing.assert_allclose(roots, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    x = example(dtype)
    result = jax.jit(lambda x: x.at[0, 1].set(x[0, 0]).at[1, :].min(x[2, :]))(x)
    assert result.dtype == dtype
    data, mask = np.array(x.data), MASK.copy()
    data[0, 1], mask[0, 1] = data[0, 0], True
    data[1] = np.asarray(jnp.minimum(x.data[1], x.data[2]))
    mask[1] &= mask[2]
    assert_masked(result, data, mask)


def test_vmap_and_repr():
    rows = jax.vmap(lambda row, i: row.at[i].add(1)[::-1])(X, jnp.array([0, 1, 2]))
    data = np.array(X.data)
    data[[0, 1, 2], [0, 1, 2]] += 1
    assert_masked(rows, data[:, ::-1], MASK[:, ::-1])
    assert repr(X[0].at).startswith("At(MaskedTensor(")
    assert repr(X[0].at[1]).startswith("Positions(MaskedTensor(")
