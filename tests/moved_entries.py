"""A masked tensor whose entries are moved, and what NumPy makes of its positions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmask

MASK = np.array([[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]], bool)
UNDER_MASK = (np.nan, np.inf, -np.inf, 1e30)
DTYPES = ("bool", "int8", "int16", "int32", "float16", "bfloat16", "float32", "complex64")


def example(dtype: Any = np.float32) -> jmask.MaskedTensor:
    """A tensor (3, 4) with distinct entries and, if inexact, nan and inf under the mask."""
    data = np.array([[5, -1, 3, 8], [2, 11, -4, 7], [6, 1, 9, -2]], np.float32)
    if jnp.issubdtype(dtype, jnp.inexact):
        data[~MASK] = np.resize(UNDER_MASK, (~MASK).sum())
    data = data > 2 if dtype == "bool" else data
    return jmask.masked_tensor(jnp.asarray(data).astype(dtype), MASK)


def assert_masked(x: Any, data: Any, valid: Any) -> None:
    """`x` is the masked tensor of `data` and `valid`, whatever lies under the mask."""
    assert isinstance(x, jmask.MaskedTensor)
    x, valid = _to_dense(x), np.asarray(valid, bool)
    assert x.shape == valid.shape
    np.testing.assert_array_equal(np.asarray(x.mask), valid)
    actual, data = np.asarray(x.data), np.broadcast_to(np.asarray(data), valid.shape)
    np.testing.assert_array_equal(actual[valid], data[valid])


_to_dense = jax.jit(jmask.MaskedTensor.to_dense)


def moved_by_numpy(positions: Any, x: jmask.MaskedTensor) -> tuple[np.ndarray, np.ndarray]:
    """Data and mask from the numbers 1, 2, ... of entries; 0 is a zero that is valid."""
    data = np.concatenate([[0], np.asarray(x.data).ravel()])
    valid = np.concatenate([[True], np.asarray(x.mask).ravel()])
    return data[positions], valid[positions]


def numbered(x: Any) -> np.ndarray:
    """1, 2, ... in place of the entries."""
    return np.arange(1, x.size + 1).reshape(x.shape)


def is_masked(x: Any) -> bool:
    """The `is_leaf` of trees of masked tensors."""
    return isinstance(x, jmask.MaskedTensor)


def valid_sum(tree: Any) -> jax.Array:
    """The sum of 1, 2, ... times the entries of each masked tensor, where valid."""
    total = jnp.float32(0)
    for x in jax.tree.leaves(tree, is_leaf=is_masked):
        total += (x.to_tensor(0) * numbered(x).astype(np.float32)).sum()
    return total


def gradient(function: Any, x: jmask.MaskedTensor) -> jax.Array:
    """The gradient of `valid_sum(function(x))` to the data."""
    return jax.grad(lambda data: valid_sum(function(x.with_values(data))))(x.data)


def case_id(case: tuple) -> str:
    """The name of a function and its arguments."""
    return "-".join(str(part).replace("\n", "") for part in case)
