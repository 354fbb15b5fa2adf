"""Functions of masked tensors: sizes, ordinary tensors, storages, dtypes, attention.

Their values and derivatives on every storage are in test_masked_functions.py, as is what
normalizes rows and columns.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jmask
import jmask.numpy as jnm
from jmask import MaskedTensor, RowSparse, nn
from tests.expressions import functions
from tests.masked_cases import KINDS, MASKS, POISON, SHAPE, build, clean_numbers, compare

# numpy.ma computes with what lies under the mask, and says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning"),
]
ma = np.ma


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_under_jit(kind):
    clean, mask = clean_numbers(2), MASKS[2]
    exact = build(kind, jnp.asarray(clean), jnp.asarray(mask))
    x = jax.tree.map(jnp.asarray, exact)
    values = np.asarray(exact.compressed())
    for size in (len(values) + 2, 2):
        found = jax.jit(lambda x, n=size: x.compressed(size=n, fill_value=-9))(x)
        expected = np.append(values, [-9.0] * 9)[:size]
        np.testing.assert_array_equal(found, expected)
        found = jax.jit(lambda x, n=size: x.nonzero(size=n, fill_value=9))(x)
        for place, eager in zip(found, exact.nonzero(), strict=True):
            np.testing.assert_array_equal(place, np.append(eager, [9] * 9)[:size])
    unique = jnm.unique(exact)
    padded = jax.jit(lambda x: jnm.unique(x, size=9))(x)
    assert padded.tolist() == (unique.tolist() + [None] * 9)[:9]
    filled = jax.jit(lambda x: jnm.unique(x, size=9, fill_value=3))(x)
    assert filled.tolist() == (unique.tolist() + [3.0] * 9)[:9]


def test_unique_says_where_and_how_often():
    data = np.array([[2.0, 7, np.nan], [7, np.nan, 2]], np.float32)
    mask = np.array([[True, False, True], [True, True, False]])
    x = jmask.masked_tensor(data, mask)
    values, index, inverse, counts = jnm.unique(x, True, True, True)
    assert values.filled(-1).tolist()[:2] == [2.0, 7.0]
    assert np.isnan(values.tolist()[2])
    assert values.tolist()[3] is None
    assert index.tolist() == [0, 3, 2, 1]
    assert inverse.tolist() == [[0, 3, 2], [1, 2, 3]]
    assert counts.tolist() == [1, 1, 2, 2]
    assert len(jnm.unique(x, equal_nan=False)) == 5
    rows = jmask.masked_tensor(
        jnp.array([[1, 2], [1, 9], [1, 7]]), np.array([[1, 1], [1, 0], [1, 0]]) > 0
    )
    assert jnm.unique(rows, axis=0).tolist() == [[1, 2], [1, None]]
    assert jnm.unique(rows.T, axis=1).tolist() == [[1, 1], [2, None]]
    assert jnm.unique(jmask.masked_tensor(jnp.zeros((0,)))).shape == (0,)
    assert jnm.unique(jmask.masked_tensor(np.array([True, False, True]))).tolist() == [
        False,
        True,
    ]


_CALLS = functions("np, x", globals())("""
    np.quantile(x, 0.3, axis=0); np.ptp(x, axis=1); np.trace(x); np.outer(x, x);
    np.inner(x, x); np.tensordot(x, x); np.vdot(x, x); np.matmul(x, COSINES);
    np.einsum("ij,kj", x, COSINES); np.cov(x); np.corrcoef(x, x[::-1]); np.diff(x, append=x);
    np.unique(x, return_counts=True); np.nonzero(x); np.allclose(x, x);
    np.array_equal(x, np.abs(x)); np.select([x < 0], [x * 2], x * 0);
    np.heaviside(x, np.abs(x)); np.copysign(np.abs(x), x)
""")
COSINES = jnp.cos(jnp.arange(9.0)).reshape(3, 3)
PLAIN = {call.partition("(")[0].removeprefix("np."): f for call, f in _CALLS.items()} | {
    f"nan{name}": lambda np, x, name=name: getattr(np, f"nan{name}")(x, axis=1)
    for name in "sum prod mean max min std var median cumsum cumprod argmax argmin".split()
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", PLAIN)
def test_arrays_are_as_in_jax(name):
    """What sparse tensors give is compared with it in test_every_function.py."""
    x = jnp.array([[1.0, 0, 2], [0, 0, 0], [-3, np.nan if name[:3] == "nan" else 0, 1]])
    result, expected = PLAIN[name](jnm, x), PLAIN[name](jnp, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), result, expected)
    assert bool(jnm.array_equal(x, x, equal_nan=True))


def test_products_of_arrays():
    x = jnp.arange(4.0).reshape(2, 2)
    masked = jmask.masked_tensor(x, x > 0)
    for function, of_jax in (
        (jnm.matmul, jnp.matmul),
        (jnm.dot, jnp.dot),
        (nn.linear, lambda x, y: x @ y.T),
        (functools.partial(jnm.einsum, "ij,jk"), functools.partial(jnp.einsum, "ij,jk")),
    ):
        np.testing.assert_array_equal(function(x, x), of_jax(x, x))
        result = function(masked, x)  # without a term that is 0
        np.testing.assert_array_equal(result.to_tensor(-1), of_jax(x, x))


def test_dense_is_said():
    """What has no sparse form warns; what has one does not."""
    x = build("row_sparse", jnp.asarray(clean_numbers()), jnp.ones(SHAPE, bool))
    silent = (
        jnm.ptp, jnm.compressed, jnm.nonzero, nn.standardize, nn.logmeanexp,
        jnm.masked_invalid, functools.partial(jnm.masked_less, value=0.0), jnm.nansum,
        lambda x: jnm.allclose(x, x), lambda x: jnm.isclose(x, 1.0),
        lambda x: jnm.masked_where(x > 0, x), lambda x: jnm.nanvar(x, axis=0),
    )  # fmt: skip
    with jmask.strict():
        for function in silent:
            function(x)
        assert jnm.masked_less(x, 0.0).stype == "row_sparse"
    loud = (
        jnm.cov, jnm.corrcoef, jnm.diff, jnm.trace, jnm.unique, jnm.cumlogsumexp, jnm.cumsum,
        jnm.cumprod, jnm.nanmedian,
        functools.partial(jnm.quantile, q=0.5), functools.partial(jnm.top_k, k=1),
        lambda x: jnm.outer(x, x), lambda x: jnm.vdot(x, x), functools.partial(nn.glu, axis=0),
        jnm.median, lambda x: jnm.matmul(jnp.ones((2, 4)), jmask.cast_storage(x, "coo")),
        lambda x: nn.softmax(x.storage),
    )  # fmt: skip
    for function in loud:
        with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match="dense"):
            function(x)


def test_quantile_methods_and_infinities():
    data = np.array([1.0, np.inf, 4.0, -3.0, 2.0], np.float32)
    mask = np.array([True, False, True, True, True])
    x = jmask.masked_tensor(data, mask)
    for method in ("linear", "lower", "higher", "nearest"):
        for q in (0.0, 1 / 3, 0.4, 0.7, 1.0):
            expected = np.quantile(data[mask], q, method=method)
            compare(jnm.quantile(x, q, method=method), ma.array(expected), (method, q))
    assert jnm.quantile(x, 0.5, method="midpoint").to_tensor(0) == 1.5
    # A neighbour of weight 0 is not read; NumPy has nan there.
    ends = jnp.array([-jnp.inf, 1.0, jnp.inf])
    found = jnm.quantile(ends, jnp.array([0.0, 0.25, 0.5, 1.0]))
    np.testing.assert_array_equal(found, [-np.inf, -np.inf, 1.0, np.inf])
    assert jnp.isnan(jax.jit(jnm.quantile)(x, 1.5).to_tensor(0))
    assert jnm.quantile(x, jnp.zeros((2, 0))).shape == (2, 0)


@pytest.mark.slow
def test_the_median_of_more_entries_than_float32_counts():
    many = jnp.arange(2**24 + 3, dtype=jnp.int32)
    assert jnm.median(many, averaged=False) == 2**23 + 1


def test_weights_of_observations():
    """Without masks as in NumPy; masked ones are as if they had weight 0."""
    rng = np.random.default_rng(3)
    data = rng.normal(size=(3, 6))
    repeats, weights = np.array([1, 2, 3, 1, 2, 1]), rng.random(6) + 0.5
    x = jmask.masked_tensor(jnp.asarray(data, jnp.float32))
    for f, a in ((repeats, None), (None, weights), (repeats, weights)):
        expected = np.cov(data, fweights=f, aweights=a)
        compare(jnm.cov(x, fweights=f, aweights=a), ma.array(expected))
        last = np.arange(6) < 4
        hidden = jmask.masked_tensor(jnp.where(last, x.storage, jnp.nan), last[None])
        fewer = [w if w is None else w[:4] for w in (f, a)]
        expected = np.cov(data[:, :4], fweights=fewer[0], aweights=fewer[1])
        compare(jnm.cov(hidden, fweights=f, aweights=a), ma.array(expected))


@pytest.mark.parametrize("case", range(4))
def test_correlations(case):
    clean, mask = clean_numbers(case), MASKS[case]
    data = jnp.asarray(np.where(mask, clean, POISON[case]), jnp.float32)
    x, expected = jmask.masked_tensor(data, mask), ma.array(clean, mask=~mask, dtype=float)
    for rowvar in (True, False):
        with warnings.catch_warnings(action="ignore"):
            reference = ma.corrcoef(expected, rowvar=rowvar)
        result = jax.jit(jnm.corrcoef, static_argnames="rowvar")(x, rowvar=rowvar)
        # numpy.ma masks what has deviation 0, where the quotient is nan.
        nan = np.isnan(result.storage)
        np.testing.assert_array_equal(result.valid & ~nan, ~ma.getmaskarray(reference))
        kept = ~ma.getmaskarray(reference)
        np.testing.assert_allclose(
            result.storage[kept], reference.data[kept], rtol=1e-3, atol=1e-4
        )


def _attention_arguments(rng, batch=2, queries=3, keys=4, heads=4, key_heads=2, depth=5):
    sizes = ((queries, heads), (keys, key_heads), (keys, key_heads))
    return [jnp.asarray(rng.normal(size=(batch, *s, depth)), jnp.float32) for s in sizes]


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (1, 0)},
    "lengths": {"key_value_seq_lengths": np.array([2, 4], np.int32)},
    "scale": {
        "scale": 0.1,
        "bias": np.linspace(0, 1, 12, dtype=np.float32).reshape(1, 1, 3, 4),
    },
    "mask": {"mask": np.tile([True, True, False, True], (1, 1, 3, 1))},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_without_masks_is_that_of_jax(name):
    options = OPTIONS[name]
    operands = _attention_arguments(np.random.default_rng(0))
    expected = jax.nn.dot_product_attention(*operands, **options)
    masked = [jmask.masked_tensor(x) for x in operands]
    np.testing.assert_array_equal(nn.dot_product_attention(*operands, **options), expected)
    result = jax.jit(lambda *xs: nn.dot_product_attention(*xs, **options))(*masked)
    compare(result, ma.array(expected))


def test_attention_with_a_masked_bias_or_mask():
    """Where they are masked there is no score."""
    operands = _attention_arguments(np.random.default_rng(2))
    allowed = np.tile([True, False, True, True], (1, 1, 3, 1))
    expected = ma.array(jax.nn.dot_product_attention(*operands, mask=jnp.asarray(allowed)))
    bias = jmask.masked_tensor(jnp.where(allowed, 0.0, jnp.nan), allowed)
    compare(nn.dot_product_attention(*operands, bias), expected)
    mask = jmask.masked_tensor(jnp.ones_like(allowed), allowed)
    compare(nn.dot_product_attention(*operands, mask=mask), expected)


def test_attention_leaves_out_keys_that_do_not_exist():
    query, key, value = _attention_arguments(np.random.default_rng(1))
    exists = np.array([[True, True, False, True], [False] * 4])[:, :, None, None]
    expected = jax.nn.dot_product_attention(
        query, key, value, mask=exists[:, None, None, :, 0, 0]
    )

    def attend(query, key, value):
        key, value = (
            jmask.masked_tensor(jnp.where(exists, x, jnp.nan), exists) for x in (key, value)
        )
        return nn.dot_product_attention(
            query, key, value, query_seq_lengths=np.array([2, 3], np.int32)
        )

    result = attend(query, key, value)
    np.testing.assert_allclose(result.storage[0, :2], expected[0, :2], rtol=1e-6)
    assert result.valid[0, :2].all()
    assert not result.valid[0, 2:].any()
    assert not result.valid[1].any()
    loss = lambda *xs: jnm.sum(jnm.square(attend(*xs))).to_tensor(0)
    slopes = jax.grad(loss, (0, 1, 2))(query, key, value)

    def of_jax(*xs):
        attended = jax.nn.dot_product_attention(*xs, mask=exists[:, None, None, :, 0, 0])
        return jnp.sum(jnp.square(attended[0, :2]))

    for slope, expected in zip(
        slopes, jax.grad(of_jax, (0, 1, 2))(query, key, value), strict=True
    ):
        np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-6)


def test_scalars_and_nothing():
    for valid in (True, False):
        x = jmask.masked_tensor(jnp.array(2.5), jnp.array(valid))
        assert jnm.quantile(x, 0.5).tolist() == (2.5 if valid else None)
        assert x.ptp().tolist() == (0 if valid else None)
        assert x.compressed().tolist() == [2.5] * valid
        assert jnm.unique(x).tolist() == [2.5 if valid else None]
        assert jnm.masked_equal(x, 2.5).tolist() is None
        assert jnm.outer(x, x).tolist() == [[6.25 if valid else None]]
        assert jnm.nanmax(x).tolist() == (2.5 if valid else None)
        assert jnm.cov(x).tolist() is None
    empty = jmask.masked_tensor(jnp.zeros((3, 0)))
    assert jnm.quantile(empty, 0.5, axis=1).tolist() == [None] * 3
    assert jnm.cov(empty).tolist() == [[None] * 3] * 3
    assert jnm.diff(empty).shape == (3, 0)
    assert empty.nbytes == 0
    assert bool(jnm.allclose(empty, empty, masked_equal=False))


def test_integers_and_booleans_keep_their_kind():
    x = jmask.masked_tensor(jnp.array([4, 9, 1]), jnp.array([True, False, True]))
    for function in (jnm.nansum, jnm.nanmax, jnm.ptp, jnm.compressed, jnm.trace):
        y = jnm.outer(x, x) if function is jnm.trace else x
        assert function(y).dtype == jnp.dtype(jnp.int32)
    assert jnm.quantile(x, 0.5).dtype == jnp.float32
    assert jnm.cumlogsumexp(x).dtype == jnp.float32
    assert jnm.masked_values(jnp.array([100000, 100001]), 100000).tolist() == [None, 100001]
    for dtype in (jnp.bfloat16, jnp.int8, jnp.complex64):
        y = jnm.unique(jnm.concatenate([x, x]).astype(dtype))
        assert y.dtype == jnp.dtype(dtype)
        assert y.tolist() == [1, 4, None]
    flags = jmask.masked_tensor(jnp.array([True, True, False]), jnp.array([True, True, False]))
    assert jnm.diff(flags).tolist() == [False, None]
    assert jnm.cov(x).dtype == jnp.float32


def test_what_a_tree_maps():
    table = jmask.packed(jnp.ones((8, 2)), platform="tpu")
    tree = {
        "a": jmask.RowSparse([1], jnp.ones((1, 2)), (5, 2)),
        "b": [jmask.masked_tensor(jnp.ones(3)), None, jnp.ones(2)],
        "c": (
            BCOO.fromdense(jnp.eye(2)),
            table,
            jmask.deferred(jnp.ones((4, 2)), jmask.sgd(0.1)),
        ),
    }
    found = jmask.tree.leaves(tree)
    kinds = ["RowSparse", "MaskedTensor", "ArrayImpl", "BCOO", "PackedTable", "DeferredTable"]
    assert [type(x).__name__ for x in found] == kinds
    assert jmask.tree.leaves(tree, is_leaf=lambda x: isinstance(x, list))[1] is tree["b"]
    shapes = jmask.tree.map(lambda x: x.shape, tree)
    assert shapes == {"a": (5, 2), "b": [(3,), None, (2,)], "c": ((2, 2), (8, 2), (4, 2))}
    dense = {**tree, "a": jnp.ones((5, 2))}
    product = jmask.tree.map(
        lambda x, y: x * y if x.ndim == 2 and len(x) == 5 else x, tree, dense
    )
    assert isinstance(product["a"], jmask.RowSparse)
    with pytest.raises(ValueError, match="list"):
        jmask.tree.map(lambda x, y: x, tree, {**tree, "b": ()})


# --- `jmask.nn` over the valid entries only ----------------------------------------------

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
