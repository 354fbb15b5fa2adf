"""`jax.test_util.check_grads` of jmask's differentiable functions, in both modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jmask
import jmask.nn as jnn
import jmask.numpy as jnm

pytestmark = [pytest.mark.slow, pytest.mark.rank_promotion, pytest.mark.dtype_promotion]

MASK = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [1, 0, 1, 1]], bool)
X = np.where(MASK, np.random.default_rng(0).uniform(0.2, 0.8, (3, 4)), np.nan)
Y = np.where(MASK.T, np.random.default_rng(1).uniform(0.2, 0.8, (4, 3)), np.nan).T

ONE = (
    "abs acos asin asinh atan atanh cbrt cos cosh digamma erf erfc erfinv exp exp2 expm1 "
    "gammaln log log10 log1p log2 logit negative positive reciprocal rsqrt sigmoid sin sinc "
    "sinh sqrt square tan tanh"
).split()
TWO = "add arctan2 divide hypot logaddexp multiply power subtract".split()
OF_ROWS = "mean prod std sum var cumsum cumprod".split()
SECOND_ORDER_ELSEWHERE = "max min".split()  # kinks: first order here, see test_reduction_rules
NN = "log_softmax logsumexp normalize softmax softmin gelu silu softplus".split()


def masked(x):
    return jmask.masked_tensor(x, MASK)


def dense(x):
    return x.to_tensor(0) if isinstance(x, jmask.MaskedTensor) else x


def check(function, *args, order=2):
    with jax.enable_x64(True):
        args = tuple(jnp.asarray(x) for x in args)
        # What lies under the mask does not move: it has no derivative, and no number.
        at = tuple(jnp.where(MASK, x, 0.5) for x in args)
        run = lambda *xs: dense(function(*(masked(x) for x in xs)))
        check_grads(run, at, order=order, modes=("fwd", "rev"), atol=1e-3, rtol=1e-3)
        under = jax.grad(lambda x: jnp.nansum(run(x, *at[1:])))(args[0])
        assert (np.asarray(under)[~MASK] == 0).all()


@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_operand(name):
    check(getattr(jnm, name), X)


@pytest.mark.parametrize("name", TWO)
def test_functions_of_two_operands(name):
    check(getattr(jnm, name), X, Y)


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("axis", [0, 1])
def test_reductions(name, axis):
    check(lambda x: getattr(jnm, name)(x, axis=axis), X)


@pytest.mark.parametrize("name", SECOND_ORDER_ELSEWHERE)
def test_reductions_with_kinks(name):
    check(lambda x: getattr(jnm, name)(x, axis=1), X, order=1)


@pytest.mark.parametrize("name", NN)
def test_functions_of_networks(name):
    function = getattr(jnn, name, None)
    takes_axis = name not in ("gelu", "silu", "softplus")
    check((lambda x: function(x, axis=1)) if takes_axis else function, X)


@pytest.mark.parametrize("mode", ["lookup", "bag", "dot"])
def test_gradients_of_tables(mode):
    """`jmask.grad` is what is differentiated again, and must be differentiable."""
    ids = jnp.array([[1, 0], [2, 1]])

    def loss(table):
        if mode == "bag":
            return jnp.sum(jnp.sin(jmask.embedding_bag(table, ids, combiner="mean")))
        if mode == "dot":
            features = jmask.RowSparse([0, 2], jnp.ones((2, 3)), (3, 3))
            return jnp.sum(jnp.sin(jmask.dot(features, table).todense()))
        return jnp.sum(jnp.sin(table[ids]))

    with jax.enable_x64(True):
        table = jnp.asarray(np.random.default_rng(2).normal(size=(3, 4)))
        gradient = lambda table: jmask.todense(jmask.grad(loss)(table))
        check_grads(gradient, (table,), order=1, modes=("fwd", "rev"), atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(gradient(table), jax.grad(loss)(table), rtol=1e-12)
