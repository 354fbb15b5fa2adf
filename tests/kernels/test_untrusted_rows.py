"""Rows as they should not come: each is handled exactly, or refused with a clear error.

MXNet gives wrong sums for unsorted rows, two updates for duplicates, and writes outside the
array for negative indices. Here no case reads or writes a wrong row.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask

ROWS = 4
TABLE = jnp.arange(1.0, 9).reshape(ROWS, 2)


class Case(NamedTuple):
    """Indices, and what `validate()` says of them; None: nothing."""

    indices: Any
    complaint: str | None


CASES = {
    "sorted": Case([0, 2], None),
    "unsorted": Case([3, 0, 2], None),
    "duplicates": Case([2, 1, 2, 2], None),
    "padding V": Case([1, ROWS], None),
    "padding first": Case([ROWS, 1], None),
    "more rows than the tensor": Case([0, 1, 2, 3, 3, 2, 1, 0], None),
    "none": Case(np.zeros(0, np.int32), None),
    "negative": Case([1, -1], r"`indices\[1\]` is -1"),
    "very negative": Case([-(2**31), 1], r"`indices\[0\]` is -2147483648"),
    "out of range": Case([5, 1], r"`indices\[0\]` is 5"),
    "far out of range": Case([2**31 - 1, 1], r"`indices\[0\]` is 2147483647"),
    "unsigned": Case(np.array([1, 250], np.uint8), r"`indices\[1\]` is 250"),
}


def tensor(indices):
    count = len(indices)
    return jmask.RowSparse(indices, jnp.arange(1.0, 2 * count + 1).reshape(count, 2), (ROWS, 2))


@pytest.mark.parametrize("name", CASES)
def test_validate(name):
    indices, complaint = CASES[name]
    if complaint is None:
        tensor(indices).validate()
    else:
        with pytest.raises(ValueError, match=complaint):
            tensor(indices).validate()


def test_values_that_were_replaced_by_others():
    x = tensor([0, 2])
    wrong = jax.tree.unflatten(jax.tree.structure(x), [x.index_leaf, jnp.ones((3, 2))])
    with pytest.raises(ValueError, match=r"`values` of shape \(3, 2\) do not fit a tensor"):
        wrong.validate()


class TestIndexing:
    x = tensor([3, 0, 3])

    def test_out_of_range(self):
        read = self.x[jnp.array([4, -5, 3])]
        assert np.isnan(read[:2]).all()
        np.testing.assert_array_equal(read[2], self.x.todense()[3])
        counts = jmask.RowSparse([1], jnp.ones((1, 2), jnp.int32), (ROWS, 2))
        assert (counts[jnp.array([4])] == np.iinfo(np.int32).min).all()

    def test_traced_keys(self):
        row = jax.jit(lambda x, i: x[i])(self.x, 3)
        np.testing.assert_array_equal(row, self.x.todense()[3])


def test_functions_of_rows():
    x = tensor([3, 0, 3])
    np.testing.assert_array_equal(jmask.add_n(TABLE, x, x), TABLE + 2 * x.todense())
    np.testing.assert_array_equal(
        jmask.square_sum(x, axis=1, keepdims=True).todense(), (x.todense() ** 2).sum(1)[:, None]
    )


@pytest.mark.sampled
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8])
@pytest.mark.parametrize("make", [jmask.sharded, jmask.packed], ids=["sharded", "packed"])
def test_stored_tables_count_from_the_end(make, dtype, wrap):
    """As arrays do; beyond the first row is outside, as beyond the last. Gradients agree."""
    how = {"platform": "tpu"} if make is jmask.packed else {"mesh": jax.make_mesh((1,), ("x",))}
    table, first = make(TABLE, **how), np.iinfo(dtype).min
    ids = np.array([0, 3, *([-1, -4, -5] if first else [4])], dtype)
    expected = [
        row if -4 <= i < 4 else [np.nan] * 2 for i in ids for row in TABLE[i % 4 : i % 4 + 1]
    ]
    np.testing.assert_array_equal(wrap(lambda t, i: t[i])(table, jnp.asarray(ids)), expected)
    np.testing.assert_array_equal(table[ids.tolist()], expected)
    np.testing.assert_array_equal(table[-1], TABLE[-1])
    if first:
        gradient = jmask.grad(lambda t: jnp.nansum(t[jnp.asarray(ids[2:4])]))(table)
        np.testing.assert_array_equal(gradient.todense()[:, 0], [1, 0, 0, 1])


def test_numpy_functions_of_tensors():
    """`np.sum(x)` is `x.sum()`, to which NumPy passes `out=None`."""
    x = tensor([3, 0, 3])
    masked = jmask.masked_tensor(TABLE, TABLE > 2)
    assert np.sum(x) == np.sum(x.todense())
    np.testing.assert_allclose(np.mean(x, axis=0), np.mean(x.todense(), axis=0))
    assert float(np.max(masked)) == 8
    assert float(np.prod(masked)) == 40320 / 2
