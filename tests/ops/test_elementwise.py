"""Every elementwise function of `jmask.numpy`, on every storage, against its valid entries.

The functions are found, not listed, so that none is left out. The oracle is the JAX
function on the compressed valid entries alone: no mask and no poison ever reaches it.
"""

import functools
import inspect
import warnings

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
# Functions of whose result there is no derivative.
FLAT = {
    *("ceil", "fix", "floor", "rint", "round", "around", "sign", "trunc", "angle"),
    *("floor_divide", "imag"),
}
elementwise_code = lambda: jnm.elementwise(jnp.sin).__code__


def lifted_functions():
    """Name -> lifted function, for all elementwise functions of the namespace."""
    found = {name: getattr(jnm, name) for name in dir(jnm) if not name.startswith("_")}
    kept = elementwise_code()
    return {n: f for n, f in found.items() if getattr(f, "__code__", None) is kept}


def takes_one(function):
    """Whether a function takes one operand."""
    if isinstance(function.__wrapped__, jnp.ufunc):
        return function.__wrapped__.nin == 1
    try:
        inspect.signature(function.__wrapped__).bind(0)
    except TypeError:
        return False
    return True


FUNCTIONS = lifted_functions()
UNARY = sorted(name for name, f in FUNCTIONS.items() if takes_one(f))
BINARY = sorted(set(FUNCTIONS) - set(UNARY))
SMOOTH = [n for n in FUNCTIONS if n not in INTEGER | FLAT]


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


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    function, values = FUNCTIONS[name], numbers(name)
    expected = function.__wrapped__(values)
    jitted = jax.jit(function)
    for mask in MASKS.values():
        for storage in ("default", "row_sparse", "coo", "csr"):
            x = stored(poisoned(values, mask), mask, storage)
            result = function(x)
            assert result.stype == storage
            check(result, expected, mask)
        check(jitted(stored(poisoned(values, mask), mask, "coo")), expected, mask)
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), stored(values, mask, "default"))
    check(jax.tree.map(lambda leaf: leaf[1], jax.vmap(function)(batch)), expected, mask)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.rank_promotion
@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")  # traced index arrays
def test_binary(name):
    function, x, y = FUNCTIONS[name], numbers(name, 1), numbers(name, 2)
    expected = function.__wrapped__(x, y)
    mask = MASKS["random"]
    left, right = poisoned(x, mask), poisoned(y, OTHER)
    for storage in ("default", "row_sparse", "coo", "csr"):
        masked = stored(left, mask, storage)
        check(function(masked, stored(right, OTHER, storage)), expected, mask & OTHER)
        check(function(masked, stored(right, OTHER, "default")), expected, mask & OTHER)
        check(function(masked, y), expected, mask)
        check(function(x, stored(right, OTHER, storage)), expected, OTHER)
        row = function.__wrapped__(x, y[0])
        check(function(masked, y[0]), row, mask)
    check(jax.jit(function)(masked, stored(right, OTHER, storage)), expected, mask & OTHER)
    # Masks broadcast with their data.
    first = jmask.masked_tensor(right[0], OTHER[0])
    result = function(stored(left, mask, "default"), first)
    check(result, function.__wrapped__(x, y[0]), mask & OTHER[0])


def derivatives(name, xs):
    """The derivative of a function in each operand, entry by entry."""
    function = FUNCTIONS[name].__wrapped__
    total = lambda *xs: jnp.sum(function(*xs).astype(jnp.float32))
    return list(jax.grad(total, argnums=tuple(range(len(xs))))(*xs))


# JAX has no derivative of nextafter.
DIFFERENTIABLE = [n for n in FUNCTIONS if n not in {*INTEGER, "nextafter"}]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name):
    """Exact at valid entries, exactly 0 at masked ones, never nan: both modes, twice."""
    function = FUNCTIONS[name]
    count = 1 if name in UNARY else 2
    xs = [numbers(name, seed) for seed in range(count)]
    masks = [MASKS["random"], OTHER][:count]
    both = np.logical_and.reduce(masks)
    poison = [poisoned(x, mask) for x, mask in zip(xs, masks, strict=True)]
    numbers_out = function.__wrapped__(*xs).dtype == np.float32
    if not numbers_out:
        return  # comparisons and tests: booleans have no derivative
    expected = [np.where(both, d, 0) for d in derivatives(name, xs)]

    for storage in ("default", "coo", "row_sparse"):

        def result(*xs, storage=storage):
            masked = [stored(x, m, storage) for x, m in zip(xs, masks, strict=True)]
            return function(*masked).to_tensor(0)

        argnums = tuple(range(count))
        gradients = jax.grad(lambda *xs: jnp.sum(result(*xs)), argnums)(*poison)
        for gradient, exact, mask in zip(gradients, expected, masks, strict=True):
            np.testing.assert_allclose(gradient, exact, rtol=1e-5, atol=1e-6)
            assert not np.asarray(gradient)[~mask].any()
        if storage != "default":
            continue
        ones = tuple(map(np.ones_like, poison))
        _, tangent = jax.jvp(result, tuple(poison), ones)
        np.testing.assert_allclose(tangent, sum(expected), rtol=1e-5, atol=1e-6)
        if name in SMOOTH:
            slope = lambda *xs: jnp.sum(jax.grad(lambda *xs: jnp.sum(result(*xs)))(*xs))
            second = jax.grad(slope)(*poison)
            curved = jax.grad(lambda *xs: jnp.sum(derivatives(name, xs)[0]))(*xs)
            np.testing.assert_allclose(second, np.where(both, curved, 0), 1e-5, 1e-5)
            assert not np.asarray(second)[~masks[0]].any()


# By what they are of 4 and 9.
OPERATORS = {
    code: (operator, expected)
    for expected, text in {
        (5, 10): "x + 1; 1 + x", (-2, -7): "2 - x; np.float32(2) - x",
        (8, 18): "np.full(3, 2, np.float32) * x; jnp.full(3, 2.0) * x", (9, 4): "36 / x",
        (2, 4): "x // 2", (2, 1): "10 // x; 10 % x", (16, 81): "x**2", (1, 0): "x == 4",
        (16, 512): "2**x", (-4, -9): "-x", (4, 9): "+x; abs(-x)",
        (2, 7): "x - np.float32(2)",
        (0, 1): "x % 4; x > 5; x != 4; ~(x < 5) & (x > 0)", (1, 1): "(x <= 4) | (x >= 9)",
    }.items()
    for code, operator in functions("x", globals())(text).items()
}  # fmt: skip


@pytest.mark.parametrize("code", OPERATORS)
def test_operator(code):
    operator, expected = OPERATORS[code]
    x = jmask.masked_tensor(np.array([4.0, np.nan, 9.0], np.float32), [True, False, True])
    for result in (operator(x), jax.jit(operator)(x)):
        assert result.mask.tolist() == [True, False, True]
        np.testing.assert_allclose(np.asarray(result.data)[[0, 2]], expected)


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


class TestKnownCases:
    """Gradients that are nan elsewhere; the masked answer."""

    @pytest.mark.parametrize(
        ("function", "x", "expected"),
        [
            (lambda x: jnm.exp(masked(x, x < 0)), [-1.0, 50, 100], [np.exp(-1), 0, 0]),
            (lambda x: masked(x, False) / 0.0, [2.0], [0]),
            (lambda x: 1 / masked(x, x != 0), [0.0, 2.0], [0, -0.25]),
        ],
    )
    def test_gradient(self, function, x, expected):
        gradient = jax.grad(lambda x: function(x).to_tensor(1.0).sum())(jnp.array(x))
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)

    def test_debug_nans_stays_silent(self):
        mask = MASKS["random"]
        with jax.debug_nans(True):
            x = jnp.where(mask, 0.5, -1.0)
            loss = lambda x: jnm.log(jmask.masked_tensor(x, mask)).to_tensor(0).sum()
            np.testing.assert_allclose(jax.jit(jax.grad(loss))(x)[mask], 2)

    @pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
    def test_debug_nans_of_what_is_tried(self, wrap):
        """Numbers are tried where a function may have none: that is no mistake of the user."""
        x, y = jnp.array([1.5, 0.5]), jnp.array([True, False])
        rows = jmask.RowSparse([1], jnp.array([[3.0]]), (2, 1))
        with jax.debug_nans(True), jax.debug_infs(True):
            for function in (lambda x: jnp.arccosh(x + 0.0), lambda x: jnp.log(x - 1)):
                found = wrap(jnm.elementwise(function, safe=1.5))(jmask.masked_tensor(x, y))
                np.testing.assert_allclose(found.to_tensor(0)[0], function(1.5), rtol=1e-6)
            assert wrap(jnm.arccosh)(jmask.masked_tensor(x, y)).to_tensor(0)[1] == 0
            quotient = wrap(jnm.elementwise(lambda x: x * (1 / (1 + x))))(rows)
            np.testing.assert_allclose(quotient.todense(), [[0], [0.75]])


def test_lifting_any_function():
    lifted = jnm.elementwise(lambda x, y: jnp.sqrt(x - y) / y)
    x = jmask.masked_tensor(jnp.array([5.0, 0.0]), jnp.array([True, False]))
    y = jnp.array([1.0, 1.0])
    result = lifted(x, y)
    assert result.to_tensor(0).tolist() == [2, 0]
    g = jax.grad(lambda y: lifted(x, y).to_tensor(0).sum())(y)
    assert g.tolist() == [-2.25, 0]


FUSED = functions("x, y", globals())("""
    (jnm.tanh(jnm.exp(x) * 2 + x) / x).data; (x * y + x).to_tensor(0)
""")


@pytest.mark.parametrize("name", FUSED)
def test_masked_arithmetic_is_one_fused_kernel(name):
    x = masked(jnp.ones(1000), jnp.ones(1000, bool))
    text = jax.jit(FUSED[name]).lower(x, x).compile().as_text()
    assert text[text.index("ENTRY") :].count(" fusion(") == 1
