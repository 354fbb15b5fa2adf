"""`jmask.nn` over the valid entries only: activations, attention, arrays, dtypes.

What normalizes rows and columns is in test_masked_functions.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from jmask import MaskedTensor, RowSparse, nn

ACTIVATIONS = (
    "celu", "elu", "gelu", "hard_sigmoid", "hard_silu", "hard_swish", "hard_tanh",
    "leaky_relu", "log_sigmoid", "mish", "relu", "relu6", "selu", "sigmoid", "silu",
    "soft_sign", "softplus", "squareplus", "swish", "tanh",
)  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    function, of_jax = getattr(nn, name), getattr(jax.nn, name)
    x = jnp.array([-7.0, -0.5, 0.25, 7.0])
    np.testing.assert_array_equal(function(x), of_jax(x))
    loss = lambda data: jnp.sum(function(MaskedTensor(data, jnp.isfinite(data))).to_tensor(0))

    @jax.jit
    def run(data):
        second = jax.grad(lambda data: jnp.sum(jax.grad(loss)(data)))(data)
        slopes = [jax.vmap(f)(x) for f in (jax.grad(of_jax), jax.grad(jax.grad(of_jax)))]
        return jax.value_and_grad(loss)(data), second, slopes

    data = jnp.concatenate([x, jnp.array([jnp.nan, jnp.inf])])
    (value, gradient), second, expected = run(data)
    np.testing.assert_allclose(value, of_jax(x).sum(), rtol=1e-5)
    for found, slope, atol in zip((gradient, second), expected, (2e-5, 2e-4), strict=True):
        np.testing.assert_allclose(found[:4], slope, rtol=1e-5, atol=atol)
        assert (found[4:] == 0).all()


def test_activations_take_options():
    x = MaskedTensor(jnp.array([-2.0, jnp.nan]), jnp.array([True, False]))
    assert nn.leaky_relu(x, 0.5).to_tensor(0)[0] == -1
    assert nn.gelu(x, approximate=False).valid.sum() == 1
    rows = RowSparse([1], jnp.array([[-1.0, 2.0]]), (3, 2))
    np.testing.assert_array_equal(nn.relu(rows).todense()[1], [0, 2])


@pytest.mark.rank_promotion
def test_attention_weights():
    scores = jnp.array([[1.0, 2.0, jnp.nan], [jnp.inf, jnp.nan, 3.0]])
    mask = jnp.array([[True, True, False], [False, False, False]])

    def loss(scores):
        weights = nn.attention_weights(scores, mask)
        return jnp.sum(weights.to_tensor(0) * jnp.arange(3.0)), weights

    gradient, weights = jax.grad(loss, has_aux=True)(scores)
    np.testing.assert_array_equal(weights.valid, mask)
    np.testing.assert_allclose(weights.storage[0, :2], jax.nn.softmax(scores[0, :2]), rtol=1e-6)
    assert jnp.isfinite(gradient).all()
    assert (gradient[1] == 0).all()
    # Masks broadcast over heads; a MaskedTensor of scores keeps its own.
    heads = nn.attention_weights(jnp.zeros((2, 2, 3)), mask[None])
    np.testing.assert_allclose(heads.to_tensor(0)[:, 0], [[0.5, 0.5, 0]] * 2)
    own = nn.attention_weights(MaskedTensor(scores, mask), jnp.array([True, False, True]))
    assert own.valid.sum() == 1


def test_arrays_with_where():
    x = jnp.array([[1.0, jnp.inf, 1.0], [jnp.nan, 2.0, 3.0]])
    where = jnp.array([[True, False, True], [False, False, False]])
    nans = [jnp.nan] * 3
    half = np.log(0.5)
    for function, expected in (
        (nn.softmax, [[0.5, 0, 0.5], nans]),
        (nn.softmin, [[0.5, 0, 0.5], nans]),
        (nn.log_softmax, [[half, -np.inf, half], nans]),
        (nn.normalize, [[0.5**0.5, 0, 0.5**0.5], [0, 0, 0]]),
    ):
        np.testing.assert_allclose(function(x, where=where), expected, rtol=1e-6)
        gradient = jax.grad(lambda x, f=function: f(x, where=where)[0, 0])(x)
        assert jnp.isfinite(gradient).all()
        assert (gradient[~where] == 0).all()
    y = x[:, 2:]
    np.testing.assert_array_equal(nn.softmax(y), jax.nn.softmax(y))
    assert nn.logsumexp is jmask.numpy.logsumexp


def test_dtypes_and_zero_norm():
    mask = jnp.array([True, False])
    for dtype in (jnp.int32, jnp.bfloat16, jnp.float16):
        x = MaskedTensor(jnp.ones(2, dtype), mask)
        for function in (nn.softmax, nn.log_softmax, nn.normalize):
            assert function(x).dtype == jax.nn.softmax(x.storage).dtype
    zero = jnp.zeros(2)
    gradient = jax.grad(lambda d: nn.normalize(MaskedTensor(d, mask), eps=0.5).to_tensor(0)[0])
    np.testing.assert_array_equal(gradient(zero), [2, 0])


@pytest.mark.parametrize("storage", ["default", "row_sparse", "coo"])
def test_complex_numbers(storage):
    data = jnp.array([[1 + 2j, 3 - 1j, jnp.nan], [3j, 1.5 + 3j, -1 - 2j]])
    mask = jnp.array([[True, True, False], [True, True, True]])
    x = jmask.cast_storage(MaskedTensor(data, mask), storage)
    expected = jax.nn.softmax(jnp.where(mask, data, -jnp.inf))
    np.testing.assert_allclose(nn.softmax(x).to_tensor(0), expected, rtol=1e-5)
    # A logarithm is one of many.
    powers = jnp.exp(nn.log_softmax(x).to_tensor(-jnp.inf))
    np.testing.assert_allclose(powers, expected, rtol=1e-5)


def test_ordinary_sparse_tensors_become_dense():
    x = RowSparse([0], jnp.ones((1, 2)), (2, 2))
    with pytest.warns(jmask.StorageFallbackWarning, match="softmax"):
        np.testing.assert_array_equal(nn.softmax(x), jnp.full((2, 2), 0.5))
