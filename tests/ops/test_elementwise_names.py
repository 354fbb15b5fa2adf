"""Arrays given by name to elementwise functions are operands like those given by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
import jmask.numpy as jnm
from tests.ops.test_elementwise import OTHER, check, stored

SLOPES = np.array([[2.0, 3, 4], [5, 6, 7]], np.float32)
NUMBERS = np.array([[-1.0, 0, 1], [0, -1, 0]], np.float32)
EXPECTED = np.where(NUMBERS < 0, NUMBERS * SLOPES, NUMBERS)


@pytest.mark.parametrize("storage", ["default", "row_sparse", "coo", "csr"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_arrays_are_sampled(storage, wrap):
    x = jmask.cast_storage(NUMBERS, storage)
    masked = jmask.masked_tensor(x)
    function = wrap(lambda x, a: jmask.nn.leaky_relu(x, negative_slope=a))
    by_row = np.where(NUMBERS < 0, NUMBERS * SLOPES[:, :1], NUMBERS)
    with jmask.strict():
        for slopes, expected in ((SLOPES, EXPECTED), (SLOPES[:, :1], by_row)):
            result = jmask.cast_storage(function(x, slopes), "default")
            np.testing.assert_array_equal(result, expected)
            result = function(masked, slopes)
            assert result.stype == storage
            np.testing.assert_array_equal(result.to_tensor(0), expected)


@pytest.mark.parametrize("storage", ["default", "coo"])
def test_masks_intersect(storage):
    mask = np.array([[True, False, True], [True, True, False]])
    slopes = stored(np.where(mask, SLOPES, np.nan), mask, storage)
    data = stored(NUMBERS, OTHER, storage)
    check(jmask.nn.leaky_relu(data, negative_slope=slopes), EXPECTED, mask & OTHER)
    only_slopes = jmask.nn.leaky_relu(x=NUMBERS, negative_slope=slopes)
    check(only_slopes, EXPECTED, mask)
    slope = jax.grad(lambda a: jnm.sum(data.clip(max=a)).to_tensor(0))(jnp.ones(3) / 2)
    np.testing.assert_array_equal(slope, ((NUMBERS > 0.5) & OTHER).sum(0))


def test_no_bound():
    x = jmask.masked_tensor(jnp.array([-2.0, 3, jnp.nan]), jnp.array([True, True, False]))
    assert x.clip(None, 1.0).to_tensor(0).tolist() == [-2, 1, 0]
    assert jnm.clip(x, 1.0, None).to_tensor(0).tolist() == [1, 3, 0]
