"""`jmask.numpy` and `jmask.nn` give the numbers of `torch.masked`, but for its faults.

The functional `torch.masked` takes a tensor and a mask, as functions here take `where=`.
`make test-torch` runs these. Known faults of torch are the cases of the second half: there
the number wanted is that of NumPy on the valid entries.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
import jmask.numpy as jnm
from jmask import MaskedTensor, nn
from tests.ops.test_elementwise import FUNCTIONS, INTEGER, MASKS, numbers
from tests.torch_names import REFERENCE_BINARY, REFERENCE_UNARY, name_here

pytestmark = pytest.mark.needs(what="torch")


DATA = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
MASK = np.random.default_rng(1).random((5, 4)) < 0.6
MASK[2] = False  # a slice of nothing
MASK[0] = True


# Name in torch.masked; function here; arguments there.
CASES = {
    "sum": (jnm.sum, (), {}),
    "prod": (jnm.prod, (), {}),
    "amax": (jnm.amax, (), {}),
    "amin": (jnm.amin, (), {}),
    "mean": (jnm.mean, (), {}),
    "median": (functools.partial(jnm.median, averaged=False), (), {}),
    "logsumexp": (jnm.logsumexp, (), {}),
    "argmax": (jnm.argmax, (), {}),
    "argmin": (jnm.argmin, (), {}),
    "var": (jnm.var, (), {"unbiased": False}),
    "std": (jnm.std, (), {"unbiased": False}),
    "norm": (jnm.norm, (2.0,), {}),
    "softmax": (nn.softmax, (), {}),
    "log_softmax": (nn.log_softmax, (), {}),
    "softmin": (nn.softmin, (), {}),
    "normalize": (functools.partial(nn.normalize, ord=2), (2.0,), {}),
    "cumsum": (jnm.cumsum, (), {}),
    "cumprod": (jnm.cumprod, (), {}),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_values(torch, name, axis):
    function, before, options = CASES[name]
    x, mask = torch.tensor(DATA), torch.tensor(MASK)
    expected = getattr(torch.masked, name)(x, *before, dim=axis, mask=mask, **options)
    result = function(jnp.asarray(DATA), axis=axis, where=jnp.asarray(MASK))
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [0.0, 1.0, 3.0, float("inf"), float("-inf")])
def test_norms(torch, order):
    expected = torch.masked.norm(torch.tensor(DATA), order, dim=1, mask=torch.tensor(MASK))
    result = jnm.norm(jnp.asarray(DATA), order, axis=1, where=jnp.asarray(MASK))
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-5)


@pytest.mark.parametrize("name", ["sum", "prod", "amax", "mean", "logsumexp", "norm"])
def test_gradients(torch, name):
    function, before, options = CASES[name]
    x = torch.tensor(DATA, requires_grad=True)
    mask = torch.tensor(MASK)
    result = getattr(torch.masked, name)(x, *before, dim=1, mask=mask, **options)
    weights = np.where(MASK.any(1), np.arange(1.0, 6), 0).astype(np.float32)
    kept = torch.tensor(MASK.any(1))
    (result[kept] * torch.tensor(weights)[kept]).sum().backward()

    def loss(data):
        result = function(MaskedTensor(data, MASK), axis=1)
        return jnp.sum(result.to_tensor(0) * weights)

    gradient = jax.grad(loss)(jnp.asarray(DATA))
    np.testing.assert_allclose(
        np.asarray(gradient)[MASK], x.grad.numpy()[MASK], rtol=1e-4, atol=1e-6
    )


# --- faults of torch ----------------------------------------------------------------------


def _of_torch(torch, name, data, mask, **options):
    x = torch.tensor(data, requires_grad=True)
    result = getattr(torch.masked, name)(x, dim=1, mask=torch.tensor(mask), **options)
    if result.requires_grad:
        result[torch.isfinite(result)].sum().backward()
    return result.detach().numpy(), None if x.grad is None else x.grad.numpy()


@pytest.mark.parametrize("name", ["var", "std"])
def test_nan_under_the_mask_reaches_valid_gradients_of_torch(torch, name):
    """torch computes x - mean of all entries, and multiplies the nan by 0."""
    data = np.where(MASK, DATA, np.nan)
    _, gradient = _of_torch(torch, name, data, MASK, unbiased=False)
    assert np.isnan(gradient[MASK]).any()
    function = getattr(jnm, name)
    loss = lambda d: jnp.sum(function(MaskedTensor(d, MASK), axis=1).to_tensor(0))
    clean = jax.grad(loss)(jnp.asarray(DATA))
    np.testing.assert_array_equal(jax.grad(loss)(jnp.asarray(data)), clean)
    assert np.isfinite(clean).all()


def test_torch_chooses_a_masked_index(torch):
    """torch fills masked entries with -inf, and the first -inf is masked."""
    data = np.array([[9.0, -np.inf]], np.float32)
    mask = np.array([[False, True]])
    index, _ = _of_torch(torch, "argmax", data, mask)
    assert index[0] == 0
    assert jnm.argmax(jnp.asarray(data), axis=1, where=jnp.asarray(mask))[0] == 1


def test_torch_shares_the_gradient_with_fills(torch):
    """torch's amax of a valid -inf is equal to its fills, which take their part."""
    data = np.array([[9.0, -np.inf]], np.float32)
    mask = np.array([[False, True]])
    x = torch.tensor(data, requires_grad=True)
    torch.masked.amax(x, dim=1, mask=torch.tensor(mask)).sum().backward()
    assert x.grad[0, 1] == 0.5
    loss = lambda d: jnp.sum(jnm.amax(MaskedTensor(d, mask), axis=1).to_tensor(0))
    np.testing.assert_array_equal(jax.grad(loss)(jnp.asarray(data)), [[0, 1]])


def test_norm_of_negative_order(torch):
    """torch fills masked entries with 0, which make every norm of negative order 0."""
    data, mask = np.array([[1.0, 2.0, 4.0]], np.float32), np.array([[True, True, False]])
    x = torch.tensor(data)
    assert torch.masked.norm(x, -1.0, dim=1, mask=torch.tensor(mask))[0] == 0
    result = jnm.norm(jnp.asarray(data), -1, axis=1, where=jnp.asarray(mask))
    np.testing.assert_allclose(result, [2 / 3], rtol=1e-6)


def test_mean_of_a_masked_tensor(torch):
    """torch.masked.mean of a MaskedTensor divides by the number of all entries."""
    data, mask = np.array([1.0, 5.0, 3.0], np.float32), np.array([True, False, True])
    with pytest.warns(UserWarning, match="prototype"):
        x = torch.masked.masked_tensor(torch.tensor(data), torch.tensor(mask))
    theirs = torch.masked.mean(x, dim=0)
    assert not np.isclose(float(theirs), 2)
    assert jnm.mean(MaskedTensor(data, mask), axis=0).storage == 2


# --- elementwise functions at valid entries -------------------------------------------

SOME = MASKS["random"]
# Without a kernel for two masked tensors, or for one, in torch 2.13: compared unmasked.
UNMASKED = {"clip", "clamp", "conj_physical", "fix", "pow"}
BOUNDS = {"clip": (0.3, 0.6), "clamp": (0.3, 0.6)}


def compare(torch, name, xs):
    bounds = BOUNDS.get(name, ())
    ours = FUNCTIONS[name_here(name)](*(jmask.masked_tensor(x, SOME) for x in xs), *bounds)
    operands = [torch.from_numpy(x) for x in xs]
    if name not in UNMASKED:
        valid = torch.from_numpy(SOME)
        operands = [torch.masked.masked_tensor(x, valid) for x in operands]
    theirs = getattr(torch, name)(*operands, *bounds)
    theirs = theirs.numpy() if name in UNMASKED else theirs.get_data().numpy()
    np.testing.assert_array_equal(ours.mask, SOME)
    np.testing.assert_allclose(np.asarray(ours.data)[SOME], theirs[SOME], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFERENCE_UNARY)
def test_unary(torch, name):
    values = numbers(name)
    if name not in INTEGER and name not in UNMASKED:
        values = np.where(SOME, values, np.nan).astype(np.float32)
    compare(torch, name, [values])


# torch.equal is one boolean for two whole tensors; `eq` is the elementwise one.
@pytest.mark.parametrize("name", [name for name in REFERENCE_BINARY if name != "equal"])
def test_binary(torch, name):
    compare(torch, name, [numbers(name, 1), numbers(name, 2)])


def test_gradients_that_torch_cannot_take(torch):
    """A fault of torch: backward of maximum fails there, and here it is exact."""
    x, y = numbers("maximum", 1), numbers("maximum", 2)
    valid = torch.from_numpy(SOME)
    a, b = (torch.masked.masked_tensor(torch.from_numpy(v), valid, True) for v in (x, y))
    with pytest.raises((RuntimeError, TypeError)):
        torch.maximum(a, b).sum().backward()
    loss = lambda x: jmask.numpy.maximum(jmask.masked_tensor(x, SOME), y).to_tensor(0).sum()
    np.testing.assert_array_equal(jax.grad(loss)(x), SOME & (x > y))
