"""Every elementwise function of `jmask.numpy`, on every storage, against its valid entries.

The functions are found, not listed, so that none is left out. The oracle is the JAX
function on the compressed valid entries alone: no mask and no poison ever reaches it.
"""

import functools
import gc
import inspect
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
from tests.expressions import functions
from tests.sparse_arrays import csr
from tests.torch_names import REFERENCE_BINARY, REFERENCE_UNARY, TORCH_NAMES, name_here

pytestmark = pytest.mark.sampled

SHAPE = (2, 3)
MASKS = {
    "random": np.array([[1, 0, 1], [0, 0, 1]], bool),
    "empty": np.zeros(SHAPE, bool),
    "full": np.ones(SHAPE, bool),
}
OTHER = np.array([[1, 1, 0], [0, 1, 1]], bool)
POISON = np.array([[np.nan, np.inf, -np.inf], [1e30, -5.0, np.nan]], np.float32)

INTEGER = {
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "invert"),
    *("left_shift", "right_shift", "bitwise_left_shift", "bitwise_right_shift"),
}
# Values at which each function and its derivatives are finite and not at a jump.
DOMAINS = {"acosh": (1.2, 1.8), "arccosh": (1.2, 1.8)}
_LIFTED = jnm.elementwise(jnp.sin).__code__
FUNCTIONS = {
    name: function
    for name, function in vars(jnm).items()
    if name[0] != "_" and getattr(function, "__code__", None) is _LIFTED
}


def takes_one(function):
    """Whether a function takes one operand."""
    if isinstance(function.__wrapped__, jnp.ufunc):
        return function.__wrapped__.nin == 1
    try:
        inspect.signature(function.__wrapped__).bind(0)
    except TypeError:
        return False
    return True


UNARY = sorted(name for name, f in FUNCTIONS.items() if takes_one(f))
BINARY = sorted(set(FUNCTIONS) - set(UNARY))
# JAX has no derivative of nextafter.
DIFFERENTIABLE = [n for n in FUNCTIONS if n not in {*INTEGER, "nextafter"}]
STORAGES = ("default", "row_sparse", "coo", "csr")


def test_all_functions_of_the_reference_are_there():
    assert set(map(name_here, REFERENCE_UNARY)) <= set(UNARY)
    assert set(map(name_here, REFERENCE_BINARY)) <= set(BINARY)
    assert TORCH_NAMES.keys() <= {*REFERENCE_UNARY, *REFERENCE_BINARY} - set(FUNCTIONS)


def numbers(name, seed=0):
    rng = np.random.default_rng(seed)
    if name in INTEGER:
        return rng.integers(0, 5, SHAPE).astype(np.int32)
    low, high = DOMAINS.get(name, (0.2, 0.8))
    return rng.uniform(low, high, SHAPE).astype(np.float32)


def poisoned(values, mask):
    poison = POISON if values.dtype == np.float32 else np.full(SHAPE, 31, np.int32)
    return np.where(mask, values, poison).astype(values.dtype)


@functools.partial(jax.jit, static_argnums=2)
def stored(values, mask, storage):
    """The masked tensor on a storage; differentiable in `values`."""
    if storage == "default":
        return jmask.masked_tensor(values, mask)
    if storage == "row_sparse":  # all rows, in order, and padding
        values = jnp.concatenate([jnp.asarray(values), jnp.asarray(values)[:1]])
        rows = jmask.RowSparse([0, 1, 2], values, SHAPE)
        return jmask.masked_tensor(rows, jnp.concatenate([mask, mask[:1]]))
    everywhere = np.argwhere(np.ones(SHAPE))
    if storage == "coo":
        data = BCOO((jnp.ravel(values), jnp.asarray(everywhere)), shape=SHAPE)
    else:
        pattern = csr(np.ones(SHAPE))
        data = BCSR((jnp.ravel(values), pattern.indices, pattern.indptr), shape=SHAPE)
    return jmask.masked_tensor(data, mask.ravel())


to_dense = jax.jit(jmask.MaskedTensor.to_dense)


def check(result, expected, mask):
    dense = to_dense(result)
    np.testing.assert_array_equal(dense.mask, mask)
    assert dense.dtype == expected.dtype
    np.testing.assert_allclose(
        np.asarray(dense.data)[mask], np.asarray(expected)[mask], rtol=1e-6, atol=1e-7
    )


def operands(name):
    """Clean numbers and masks of the operands of a function."""
    count = 1 if name in UNARY else 2
    return [numbers(name, seed) for seed in range(count)], [MASKS["random"], OTHER][:count]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")  # traced index arrays
def test_values(name):
    """On each storage, eagerly, under jit and under vmap."""
    function, (xs, masks) = FUNCTIONS[name], operands(name)
    expected = function.__wrapped__(*xs)
    for first in MASKS.values():
        masks, valid = [first, *masks[1:]], np.logical_and.reduce([first, *masks[1:]])
        for storage in STORAGES:
            tensors = [
                stored(poisoned(x, m), m, storage) for x, m in zip(xs, masks, strict=True)
            ]
            result = function(*tensors)
            assert result.stype == storage
            check(result, expected, valid)
        check(jax.jit(function)(*tensors), expected, valid)
    batches = [jnp.stack([x, y]) for x, y in zip(xs, map(poisoned, xs, masks), strict=True)]
    result = jax.vmap(lambda *xs: function(*map(jmask.masked_tensor, xs, masks)))(*batches)
    check(jax.tree.map(lambda leaf: leaf[1], result), expected, valid)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.rank_promotion
@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
def test_operands_of_different_kinds(name):
    """Masks broadcast with their data; an array has none."""
    function, ((x, y), (mask, _)) = FUNCTIONS[name], operands(name)
    expected, row = function.__wrapped__(x, y), function.__wrapped__(x, y[0])
    right = jmask.masked_tensor(poisoned(y, OTHER), OTHER)
    for storage in STORAGES:
        masked = stored(poisoned(x, mask), mask, storage)
        check(function(masked, right), expected, mask & OTHER)
        check(function(masked, y), expected, mask)
        check(function(x, stored(right.data, OTHER, storage)), expected, OTHER)
        check(function(masked, y[0]), row, mask)
        check(function(masked, right[0]), row, mask & OTHER[0])


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name):
    """Exact at valid entries, exactly 0 at masked ones, never nan: both modes, twice."""
    function, (xs, masks) = FUNCTIONS[name], operands(name)
    if function.__wrapped__(*xs).dtype != np.float32:
        return  # comparisons and tests: booleans have no derivative
    weights = np.arange(1, 7, dtype=np.float32).reshape(SHAPE)

    def derivatives(function, xs):
        total = lambda *xs: jnp.sum(function(*xs) * weights)
        both = jax.value_and_grad(total, tuple(range(len(xs))))
        return jax.jvp(both, tuple(xs), tuple(map(np.ones_like, xs)))

    valid = np.logical_and.reduce(masks)
    of_clean = lambda *xs: jnp.where(valid, function.__wrapped__(*xs), 0)
    expected = derivatives(of_clean, xs)
    for storage in ("default", "coo", "row_sparse"):

        def of_poisoned(*xs, storage=storage):
            tensors = [stored(x, m, storage) for x, m in zip(xs, masks, strict=True)]
            return function(*tensors).to_tensor(0)

        found = derivatives(of_poisoned, list(map(poisoned, xs, masks)))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, found, expected)
        for gradients in (found[0][1], found[1][1]):
            assert not any(
                np.asarray(g)[~m].any() for g, m in zip(gradients, masks, strict=True)
            )


@pytest.mark.parametrize("name", UNARY)
def test_storage_is_kept_where_zero_is(name):
    """f(0) = 0 decides, and equal rows are summed before a nonlinear function."""
    function = FUNCTIONS[name]
    x = jmask.RowSparse([2, 0, 2], jnp.array([[1.0, -2], [3, 4], [1, 1]]), (4, 2))
    x = x.astype(jnp.int32) if name in INTEGER else x
    with np.errstate(all="ignore"):
        expected = np.asarray(function.__wrapped__(x.todense()))
        keeps = not np.any(np.asarray(function.__wrapped__(np.zeros((), x.dtype))))
    with warnings.catch_warnings(record=True, action="always") as caught:
        result = function(x)
    assert isinstance(result, jmask.RowSparse) == keeps
    assert bool(caught) != keeps
    np.testing.assert_allclose(jmask.todense(result), expected, rtol=1e-6)


masked = jmask.masked_tensor


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (lambda x: jnm.exp(masked(x, x < 0)), [-1.0, 50, 100], [np.exp(-1), 0, 0]),
        (lambda x: masked(x, False) / 0.0, [2.0], [0]),
        (lambda x: 1 / masked(x, x != 0), [0.0, 2.0], [0, -0.25]),
    ],
)
def test_gradients_that_are_nan_elsewhere(function, x, expected):
    gradient = jax.grad(lambda x: function(x).to_tensor(1.0).sum())(jnp.array(x))
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_debug_nans_of_what_is_tried(wrap):
    """Numbers are tried where a function may have none: that is no mistake of the user."""
    x, y = jnp.array([1.5, 0.5]), jnp.array([True, False])
    rows = jmask.RowSparse([1], jnp.array([[3.0]]), (2, 1))
    with jax.debug_nans(True), jax.debug_infs(True):
        for function in (lambda x: jnp.arccosh(x + 0.0), lambda x: jnp.log(x - 1)):
            found = wrap(jnm.elementwise(function, safe=1.5))(jmask.masked_tensor(x, y))
            np.testing.assert_allclose(found.to_tensor(0)[0], function(1.5), rtol=1e-6)
        assert wrap(jnm.arccosh)(jmask.masked_tensor(x, y)).to_tensor(0)[1] == 0
        loss = lambda x: jnm.log(jmask.masked_tensor(x, y)).to_tensor(0).sum()
        np.testing.assert_allclose(wrap(jax.grad(loss))(jnp.array([0.5, -1.0])), [2, 0])
        quotient = wrap(jnm.elementwise(lambda x: x * (1 / (1 + x))))(rows)
        np.testing.assert_allclose(quotient.todense(), [[0], [0.75]])


MASKED = masked(
    jnp.array([[1.0, jnp.nan], [3.0, 4.0]]), jnp.array([[True, False], [True, True]])
)
ROWS = jmask.RowSparse([1], jnp.array([[3.0, 1.0]]), (2, 2))
CLOSURES = {
    code: (function, expected)
    for code, expected in {
        "jnm.elementwise(lambda v: v * y)(MASKED).to_tensor(0)": [[2, 0], [6, 8]],
        "MASKED.at[0].apply(lambda v: v * y).to_tensor(0)": [[2, 0], [3, 4]],
        "jmask.todense(jnm.elementwise(lambda v: v * y)(ROWS))": [[0, 0], [6, 2]],
        "jnm.elementwise(lambda v, w: v * w)(MASKED, MASKED * 0 + y).to_tensor(0)": [
            [2, 0],
            [6, 8],
        ],
    }.items()
    for function in functions("y", globals())(code).values()
}


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("code", CLOSURES)
def test_closures_hold_tracers(code):
    function, expected = CLOSURES[code]
    with jax.checking_leaks():
        np.testing.assert_array_equal(jax.jit(function)(2.0), expected)
        np.testing.assert_array_equal(jax.vmap(function)(jnp.array([1.0, 2.0]))[1], expected)
        slope = jax.grad(lambda y: function(y).sum())(2.0)
    np.testing.assert_allclose(slope, function(3.0).sum() - function(2.0).sum())


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("x", [MASKED, ROWS], ids=["masked", "rows"])
def test_captured_arrays_are_freed(x):
    captured = jnp.ones(3)
    alive = weakref.ref(captured)
    jnm.elementwise(lambda v, y=captured: v * y[0])(x)
    del captured
    gc.collect()
    assert alive() is None


FUSED = functions("x, y", globals())("""
    (jnm.tanh(jnm.exp(x) * 2 + x) / x).data; (x * y + x).to_tensor(0)
""")


@pytest.mark.parametrize("name", FUSED)
def test_masked_arithmetic_is_one_fused_kernel(name):
    x = masked(jnp.ones(1000), jnp.ones(1000, bool))
    text = jax.jit(FUSED[name]).lower(x, x).compile().as_text()
    assert text[text.index("ENTRY") :].count(" fusion(") == 1
