"""Masked tensors of shape (4, 3) on every storage, and what they are in NumPy.

`build(kind, data, mask)` stores some positions, padding too; `PATTERNS[kind]` says which
exist, so that the entries of the model are those where mask and pattern are true.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR

import jmask
from jmask import MaskedTensor, RowSparse

SHAPE = (4, 3)
KINDS = ("dense", "row_sparse", "coo", "csr")
POISON = (np.nan, np.inf, -np.inf, 1e30)

_FAR = 2_000_000_000  # a column of padding: no array may be read there
_ROWS = np.array([3, 0, 2, 4, 4])  # 4: padding
_ENTRIES = np.array([[0, 2], [1, 1], [0, 0], [3, 2], [3, 0], [1, 2], [2, 1], [4, _FAR]])
_POINTERS = np.array([0, 2, 4, 5, 7])  # of the columns below; the last is padding
_COLUMNS = np.array([0, 2, 1, 2, 1, 0, 2, _FAR])


def _pattern(rows, columns=slice(None)):
    pattern = np.zeros(SHAPE, bool)
    pattern[rows, columns] = True
    return pattern


_CSR_ROWS = np.repeat(np.arange(4), np.diff(_POINTERS))
PATTERNS = {
    "dense": np.ones(SHAPE, bool),
    "row_sparse": _pattern(_ROWS[:3]),
    "coo": _pattern(*_ENTRIES[:-1].T),
    "csr": _pattern(_CSR_ROWS, _COLUMNS[:-1]),
}


def build(kind, data, mask):
    """The masked tensor of dense data and mask on a storage; may be traced."""
    if kind == "dense":
        return MaskedTensor(data, mask)
    if kind == "row_sparse":
        rows = jnp.asarray(_ROWS % 4)
        return MaskedTensor(RowSparse(jnp.asarray(_ROWS), data[rows], SHAPE), mask[rows])
    if kind == "coo":
        at = tuple(_ENTRIES.T % np.array(SHAPE)[:, None])
        parts = data[at], jnp.asarray(_ENTRIES)
        return MaskedTensor(BCOO(parts, shape=SHAPE, unique_indices=True), mask[at])
    at = (np.append(_CSR_ROWS, 0), _COLUMNS % 3)
    entries = BCSR((data[at], jnp.asarray(_COLUMNS), jnp.asarray(_POINTERS)), shape=SHAPE)
    return MaskedTensor(entries, mask[at])


def masks(seed=0, number=3):
    """Full, empty, with a row and a column fully masked, and random ones (m, 4, 3)."""
    rng = np.random.default_rng(seed)
    some = np.ones(SHAPE, bool)
    some[1], some[:, 2], some[0, 0] = False, False, False
    random = [rng.random(SHAPE) < 0.6 for _ in range(number)]
    return np.stack([np.ones(SHAPE, bool), np.zeros(SHAPE, bool), some, *random])


def slope_of(model, data, at, h=1e-6):
    """The derivative of a number that `model` makes of `data`, by central differences."""
    result = np.zeros(data.shape)
    for place in zip(*np.nonzero(at), strict=True):
        step = np.zeros(data.shape)
        step[place] = h
        result[place] = (model(data + step) - model(data - step)) / (2 * h)
    return result


MASKS = masks()


def clean_numbers(seed=0):
    """Distinct numbers, and some that are equal."""
    rng = np.random.default_rng(seed)
    clean = rng.normal(size=SHAPE).astype(np.float32)
    clean[0, 0] = clean[3, 2] = clean[2, 0] = 0.5
    return clean


def compare(result, expected, name="", rtol=2e-5):
    if isinstance(result, tuple | list):
        for r, e in zip(result, expected, strict=True):
            compare(r, e, name, rtol)
        return
    if isinstance(result, MaskedTensor):
        result = result.to_dense()
        mask = ~np.ma.getmaskarray(expected)
        assert result.shape == mask.shape, name
        np.testing.assert_array_equal(result.valid, mask, err_msg=name)
        expected, result = np.ma.getdata(expected)[mask], np.asarray(result.storage)[mask]
    np.testing.assert_allclose(result, np.asarray(expected), rtol, atol=rtol / 10, err_msg=name)


# --- entries that are moved -----------------------------------------------------------

MASK = np.array([[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]], bool)
DTYPES = ("bool", "int8", "int16", "int32", "float16", "bfloat16", "float32", "complex64")


def example(dtype=np.float32):
    """A tensor (3, 4) with distinct entries and, if inexact, nan and inf under the mask."""
    data = np.array([[5, -1, 3, 8], [2, 11, -4, 7], [6, 1, 9, -2]], np.float32)
    if jnp.issubdtype(dtype, jnp.inexact):
        data[~MASK] = np.resize(POISON, (~MASK).sum())
    data = data > 2 if dtype == "bool" else data
    return jmask.masked_tensor(jnp.asarray(data).astype(dtype), MASK)


def assert_masked(x, data, valid):
    """`x` is the masked tensor of `data` and `valid`, whatever lies under the mask."""
    assert isinstance(x, jmask.MaskedTensor)
    x, valid = _to_dense(x), np.asarray(valid, bool)
    assert x.shape == valid.shape
    np.testing.assert_array_equal(np.asarray(x.mask), valid)
    actual, data = np.asarray(x.data), np.broadcast_to(np.asarray(data), valid.shape)
    np.testing.assert_array_equal(actual[valid], data[valid])


_to_dense = jax.jit(jmask.MaskedTensor.to_dense)


# 1, 2, ... in place of the entries.
numbered = lambda x: np.arange(1, x.size + 1).reshape(x.shape)
# The `is_leaf` of trees of masked tensors.
is_masked = lambda x: isinstance(x, jmask.MaskedTensor)


def valid_sum(tree):
    """The sum of 1, 2, ... times the entries of each masked tensor, where valid."""
    total = jnp.float32(0)
    for x in jax.tree.leaves(tree, is_leaf=is_masked):
        total += (x.to_tensor(0) * numbered(x).astype(np.float32)).sum()
    return total


def gradient(function, x):
    """The gradient of `valid_sum(function(x))` to the data."""
    return jax.grad(lambda data: valid_sum(function(x.with_values(data))))(x.data)
