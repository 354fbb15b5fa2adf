"""`embedding_lookup`, `embedding_bag` and functions along an axis beside those of torch.

Values and gradients of a table and of per-sample weights in float64. The functional
`torch.masked` takes a tensor and a mask, as functions here take `where=`. Where the two differ
on purpose a test says so. `make test-torch` runs these; elementwise functions are compared on
torch's own samples, in `tests/peers`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
import jmask.numpy as jnm
from jmask import MaskedTensor, nn
from tests.oracle import dense_twin

pytestmark = pytest.mark.needs(what="torch")


V, D, N = 9, 4, 12
RNG = np.random.default_rng(0)
# Small integers, so that a maximum is often attained more than once.
TABLE = RNG.integers(-3, 4, (V, D)).astype(float)
IDS = RNG.integers(0, V, N)
LINES = IDS.reshape(4, 3)
WEIGHTS = RNG.normal(size=N)
PADDING = int(IDS[1])

paddings = pytest.mark.parametrize("padding", [None, PADDING])
combiners = pytest.mark.parametrize("combiner", ["sum", "mean", "max"])


@pytest.fixture(autouse=True)
def _in_float64():
    with jax.enable_x64(True):
        yield


parameter = lambda torch, x: torch.tensor(x, requires_grad=True)
cotangent = lambda shape: np.random.default_rng(1).normal(size=shape)


def check_gradient(torch, theirs, weight, ours, table):
    """Equal values of `theirs` and `ours(table)`, and equal gradients of the table."""
    value = theirs.detach().numpy()
    ct = cotangent(value.shape)
    theirs.backward(torch.tensor(ct))
    np.testing.assert_allclose(ours(table), value, rtol=1e-12, atol=1e-12)
    loss = lambda table: jnp.sum(ours(table) * ct)
    expected = weight.grad.numpy()
    np.testing.assert_allclose(jax.grad(loss)(table), expected, rtol=1e-12, atol=1e-12)
    with jmask.strict():
        sparse = jax.jit(jmask.grad(loss))(table)
    np.testing.assert_allclose(dense_twin(sparse), expected, rtol=1e-12, atol=1e-12)


@paddings
@pytest.mark.parametrize("ids", [IDS, LINES, IDS[:0]], ids=["1-D", "2-D", "none"])
def test_embedding(torch, padding, ids):
    """With zeros in the padded row, as `nn.Embedding` makes it."""
    table = TABLE.copy()
    if padding is not None:
        table[padding] = 0
    weight = parameter(torch, table)
    theirs = torch.nn.functional.embedding(torch.tensor(ids), weight, padding_idx=padding)
    ours = lambda table: jmask.embedding_lookup(table, ids, padding_id=padding)
    check_gradient(torch, theirs, weight, ours, table)


def test_a_padded_row_that_is_not_zero(torch):
    """torch reads it, jmask reads zeros; neither trains it."""
    theirs = torch.nn.functional.embedding(
        torch.tensor(IDS), torch.tensor(TABLE), padding_idx=PADDING
    )
    np.testing.assert_array_equal(theirs[1], TABLE[PADDING])
    ours = jmask.embedding_lookup(TABLE, IDS, padding_id=PADDING)
    np.testing.assert_array_equal(ours[1], np.zeros(D))


@pytest.mark.dtype_promotion
def test_scale_grad_by_freq(torch):
    """Each row's gradient over how often it is looked up, as docs/embeddings.md has it."""
    weight = parameter(torch, TABLE)
    theirs = torch.nn.functional.embedding(torch.tensor(IDS), weight, scale_grad_by_freq=True)
    ct = cotangent((N, D))
    theirs.backward(torch.tensor(ct))
    gradient = jmask.grad(lambda t: jnp.sum(jmask.embedding_lookup(t, IDS) * ct))(TABLE)
    ordered = jnp.sort(gradient.indices)
    first, last = (
        jnp.searchsorted(ordered, gradient.indices, side=s) for s in ("left", "right")
    )
    values = gradient.values / (last - first)[:, None]
    scaled = jmask.RowSparse(gradient.indices, values, gradient.shape)
    np.testing.assert_allclose(dense_twin(scaled), weight.grad.numpy(), rtol=1e-12)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, np.inf])
@pytest.mark.parametrize("function", ["embedding", "embedding_bag"])
def test_max_norm(torch, norm_type, function):
    """torch shortens rows of the weight itself: that is `renormalize` before the loss."""
    weight, ids = parameter(torch, TABLE), LINES[:3]
    options = {"mode": "sum"} if function == "embedding_bag" else {}
    options |= {"max_norm": 2.5, "norm_type": norm_type}
    theirs = getattr(torch.nn.functional, function)(torch.tensor(ids), weight, **options)
    table = jax.jit(lambda t: jmask.renormalize(t, ids, 2.5, norm_type=norm_type))(TABLE)
    np.testing.assert_allclose(table, weight.detach().numpy(), rtol=1e-12)
    assert (np.asarray(table) != TABLE).any()
    name = "embedding_lookup" if function == "embedding" else "embedding_bag"
    ours = lambda t: getattr(jmask, name)(t, ids)
    check_gradient(torch, theirs, weight, ours, np.asarray(table))
    # Shortened while they are read, the rows are the same up to torch's epsilon.
    read = getattr(jmask, name)(TABLE, ids, max_norm=2.5, norm_type=norm_type)
    np.testing.assert_allclose(read, theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


FORMS = {
    "lines": {},
    "offsets, nothing but padding": {"offsets": [0, 1, 2, 2]},
    "offsets, empty ends": {"offsets": [0, 0, 7, 12]},
    "last offset": {"offsets": [0, 5, 5, 12], "include_last_offset": True},
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def torch_bag(torch, form, weight, **options):
    form = {**form, "offsets": torch.tensor(form["offsets"])} if form else {}
    ids = torch.tensor(IDS if form else LINES)
    return torch.nn.functional.embedding_bag(ids, weight, **form, **options)


@forms
@combiners
@paddings
def test_embedding_bag(torch, form, combiner, padding):
    weight = parameter(torch, TABLE)
    theirs = torch_bag(torch, form, weight, mode=combiner, padding_idx=padding)
    ours = lambda table: jmask.embedding_bag(
        table, IDS if form else LINES, combiner=combiner, padding_id=padding, **form
    )
    check_gradient(torch, theirs, weight, ours, TABLE)


@forms
@paddings
def test_per_sample_weights(torch, form, padding):
    weights = WEIGHTS if form else WEIGHTS.reshape(LINES.shape)
    weight, samples = parameter(torch, TABLE), parameter(torch, weights)
    theirs = torch_bag(
        torch, form, weight, mode="sum", padding_idx=padding, per_sample_weights=samples
    )
    ours = lambda table, weights: jmask.embedding_bag(
        table, IDS if form else LINES, weights=weights, padding_id=padding, **form
    )
    check_gradient(torch, theirs, weight, lambda table: ours(table, weights), TABLE)
    ct = cotangent(theirs.shape)
    gradient = jax.grad(lambda weights: jnp.sum(ours(TABLE, weights) * ct))(weights)
    np.testing.assert_allclose(gradient, samples.grad.numpy(), rtol=1e-12, atol=1e-12)


# --- masked tensors ---------------------------------------------------------------------


DATA = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
MASK = np.random.default_rng(1).random((5, 4)) < 0.6
MASK[2] = False  # a slice of nothing
MASK[0] = True


# Name in torch.masked; function here; arguments there.
NAMES = (
    "sum prod amax amin mean logsumexp argmax argmin cumsum cumprod softmax log_softmax softmin"
)
CASES = {
    **{n: (getattr(jnm if hasattr(jnm, n) else nn, n), (), {}) for n in NAMES.split()},
    "median": (functools.partial(jnm.median, averaged=False), (), {}),
    "var": (jnm.var, (), {"unbiased": False}),
    "std": (jnm.std, (), {"unbiased": False}),
    "norm": (jnm.norm, (2.0,), {}),
    "normalize": (functools.partial(nn.normalize, ord=2), (2.0,), {}),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_values(torch, name, axis):
    function, before, options = CASES[name]
    x, mask = torch.tensor(DATA), torch.tensor(MASK)
    expected = getattr(torch.masked, name)(x, *before, dim=axis, mask=mask, **options)
    result = function(jnp.asarray(DATA), axis=axis, where=jnp.asarray(MASK))
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-5, atol=1e-6)


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
