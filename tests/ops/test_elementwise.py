"""Elementwise functions of `jmask.numpy`: which there are, and what holds of all.

The functions are found, not listed, so that none is left out. Their values are tested with
those of all others, in `test_every_function`.
"""

import gc
import inspect
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
import jmask.numpy as jnm
from tests import masked_cases as cases
from tests.expressions import functions, rows
from tests.masked_cases import SHAPE
from tests.torch_names import REFERENCE_BINARY, REFERENCE_UNARY, TORCH_NAMES, name_here

pytestmark = pytest.mark.sampled

MASKS = {"random": cases.MASKS[3]}
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
# By `gradcheck`, of each: `tests/autodiff/test_semantics_of_gradients.py`. What lifts them is
# differentiated under every poison in `test_masked_functions`. JAX has none of nextafter.
DIFFERENTIABLE = [n for n in FUNCTIONS if n not in {*INTEGER, "nextafter"}]


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


masked = jmask.masked_tensor


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
# Of a number that is traced, and what they are of 2.
CLOSURES = """
    jnm.elementwise(lambda v: v * y)(MASKED).to_tensor(0) | [[2, 0], [6, 8]]
    MASKED.at[0].apply(lambda v: v * y).to_tensor(0) | [[2, 0], [3, 4]]
    jmask.todense(jnm.elementwise(lambda v: v * y)(ROWS)) | [[0, 0], [6, 2]]
    jnm.elementwise(lambda v, w: v * w)(MASKED, MASKED * 0 + y).to_tensor(0) | [[2, 0], [6, 8]]
"""


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("row", rows(CLOSURES), ids=" ".join)
def test_closures_hold_tracers(row):
    function, expected = (f for text in row for f in functions("y", globals())(text).values())
    with jax.checking_leaks():
        np.testing.assert_array_equal(jax.jit(function)(2.0), expected(2.0))
        np.testing.assert_array_equal(jax.vmap(function)(jnp.ones(2) * 2)[1], expected(2.0))
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
