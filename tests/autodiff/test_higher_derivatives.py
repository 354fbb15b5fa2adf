"""Second and third derivatives of every public differentiable function.

The oracle is the function itself in float64: along a line x + t v, the derivative of order n is
that of differences of the derivative of order n - 1. A rule that is right once and then a
constant (a `custom_jvp` that returns what it was given) fails here at the second order.

    order   ways to take it
    1       reverse
    2       forward over reverse, reverse over reverse, forward over forward
    3       forward over forward over reverse, reverse over reverse over reverse

Derivatives of `jmask.grad` by `jmask.grad` are compared with the dense twin.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
import jmask.numpy as jnm
from jmask import nn
from tests.autodiff import test_semantics_of_gradients as semantics
from tests.expressions import functions
from tests.sampling import chosen

Function = Callable[[Any], Any]
ignores_fallbacks = pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")


# Compiled, so that the ways below share what they have in common: it is traced once.
forward = lambda f: jax.jit(lambda t: jax.jvp(f, (t,), (jnp.ones_like(t),))[1])
reverse = lambda f: jax.jit(jax.grad(f))
WAYS = {
    "reverse": (reverse,),
    "forward over reverse": (reverse, forward),
    "reverse over reverse": (reverse, reverse),
    "forward over forward": (forward, forward),
    "forward over forward over reverse": (reverse, forward, forward),
    "reverse over reverse over reverse": (reverse, reverse, reverse),
}
normalized = lambda x: [nn.normalize(x, ord=p) for p in (np.inf, 1, 3)]


def norms(x):
    orders = (np.inf, -np.inf, 0, 1, 2, 3, -2)
    return [jnm.norm(x, ord=p, axis=axis) for p in orders for axis in (None, 1)]


def extrema(x):
    functions = (jnm.max, jnm.min, jnm.amax, jnm.amin)
    return [f(x, axis=axis) for f in functions for axis in (None, 1)]


with_where = lambda x: (
    [f(x, axis=1, where=semantics.MASK) for f in (jnm.max, jnm.min, jnm.norm, nn.softmax)]
)
ARRAY, SHIFT, on = jnp.asarray(semantics.OTHER), jnp.asarray(semantics.SHIFT), semantics.on
# Of the functions of the table of semantics, settings that have rules of their own.
SETTINGS = {
    f"{name} of {kind}": on(x)(function)
    for kind, x in {
        "masked": semantics.X, "coo": semantics.MASKED_COO, "rows": semantics.MASKED_ROWS,
        "RowSparse": semantics.COALESCED,
    }.items()
    for name, function in {"norms": norms, "extrema": extrema}.items()
} | {
    f"normalize of {kind}": on(x)(normalized)
    for kind, x in {"masked": semantics.X, "coo": semantics.MASKED_COO, "array": ARRAY}.items()
} | {
    "norms of an array": on(ARRAY)(norms),
    "extrema of an array": on(ARRAY)(extrema),
    "where": on(ARRAY)(with_where),
    "lower median": on(semantics.X)(lambda x: jnm.median(x, averaged=False)),
    "embedding_lookup, max_norm": on(SHIFT, jnp.float32(2))(
        lambda t, bound: [
            jmask.embedding_lookup(t, [1, 3, 1, 0], max_norm=bound, norm_type=p)
            for p in (1.0, 2.0, 3.5, 0.5, np.inf)
        ]
    ),
    "embedding_bag, means": on(SHIFT, jnp.array([0.5, 2.0, 1.0]))(
        lambda t, w: [
            jmask.embedding_bag(t, jnp.array([[2, 0, 2]]), weights=w[None], combiner=c)
            for c in ("sum", "mean", "sqrtn")
        ]
    ),
    "a row of 64 entries": on(jnp.linspace(0.1, 0.9, 192).reshape(3, 64))(
        lambda t: (jmask.embedding_lookup(t, [2, 0, 2]), jmask.embedding_bag(t, [[1, 1, 0]]))
    ),
    "skip_nonfinite": on(ARRAY)(
        lambda x: jmask.apply_gradients(
            (tx := jmask.skip_nonfinite(jmask.adam(0.1))), jnp.sin(x), tx.init(x), x
        )[0]
    ),
    "lazy": on(semantics.COALESCED)(
        lambda g: jmask.apply_gradients(
            (tx := jmask.adam(0.1)), g, tx.init(SHIFT), SHIFT
        )[0]
    ),
}  # fmt: skip

CASES = {**SETTINGS, **semantics.OPERATIONS}

# One of each kind of what has a rule of its own.
DEFAULT = [
    *("norms of masked", "extrema of masked", "normalize of array", "lower median"),
    *("a row of 64 entries", "lazy"),
]


def along_a_line(operation):
    """The sum over results of sin(w result), at x + t v, as a function of t."""
    leaves, structure = jax.tree.flatten(operation.args)
    leaves = [np.asarray(x) if _moves(x) else x for x in leaves]
    rng = np.random.default_rng(0)
    steps = [rng.uniform(-1, 1, x.shape) if _moves(x) else None for x in leaves]

    def function(t):
        moved = [
            x if v is None else jnp.asarray(x, jnp.float64) + t * v
            for x, v in zip(leaves, steps, strict=True)
        ]
        results = operation.function(*jax.tree.unflatten(structure, moved))
        results = semantics.one_vector(results).to_tensor(0).astype(jnp.float64)
        weights = np.cos(np.arange(results.size))
        finite = jnp.where(jnp.isfinite(results), results, 0)  # a logarithm of nothing
        return jnp.sum(jnp.sin(weights * finite))

    return function


_moves = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
# Of a first derivative; exact for polynomials of degree 8.
STENCIL = np.array([1 / 280, -4 / 105, 1 / 5, -4 / 5, 0, 4 / 5, -1 / 5, 4 / 105, -1 / 280])
STEP = 2e-3
# Where two entries change places a maximum has no derivative: one of these is far from that.
PLACES = (0.0, 0.013, 0.05, 0.11, 0.19)


def _converged(lower, place):
    """The place and the derivatives of each order there, or None if they do not converge."""
    wide, narrow = (
        STENCIL @ np.array([lower(place + i * step) for i in range(-4, 5)]) / step
        for step in (STEP, STEP / 2)
    )
    if not np.allclose(wide, narrow, rtol=1e-7, atol=1e-7):
        return None
    return place, dict(enumerate(narrow, 1))


@ignores_fallbacks
@pytest.mark.parametrize("name", chosen(DEFAULT, CASES))
@pytest.mark.dtype_promotion
def test_derivatives(name):
    with jax.enable_x64(True):
        derivative = {(): jax.jit(along_a_line(CASES[name]))}
        for steps in WAYS.values():
            for n in range(len(steps)):
                if steps[: n + 1] not in derivative:
                    derivative[steps[: n + 1]] = steps[n](derivative[steps[:n]])
        found = jax.jit(lambda t: [derivative[steps](t) for steps in ((), *WAYS.values())])
        # The derivative of each order is the oracle of the next one's.
        lower = lambda t: found(jnp.asarray(t))[:3]
        place, differences = next(filter(None, (_converged(lower, at) for at in PLACES)))
        for (way, steps), value in zip(
            WAYS.items(), found(jnp.asarray(place))[1:], strict=True
        ):
            expected = differences[len(steps)]
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6, err_msg=way)


# --- derivatives of `jmask.grad` by `jmask.grad` -----------------------------------------

WEIGHT = np.cos(np.arange(8.0)).reshape(4, 2)
cubes = lambda dense: jnp.sum((dense + 1.5) ** 4 * np.resize(WEIGHT, dense.shape))


def nested(grad, f, order, dense):
    """The gradient of the sum of the gradient, with weights, and so on."""
    for _ in range(order - 1):
        before = grad(f)
        f = lambda x, before=before: jnp.sum(
            jnp.sin(dense(before(x)) * np.resize(WEIGHT[::-1], x.shape))
        )
    return grad(f)


TENSORS = {
    "coo": semantics.COO,
    "csr": semantics.CSR,
    "rows": semantics.ROWS,
    "masked": jmask.masked_tensor(
        jnp.asarray(np.where(semantics.MASK, semantics.X.data, 0)), semantics.MASK
    ),
    "masked coo": semantics.MASKED_COO,
    "a table": jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)), jnp.float32),
}
todense, PAIRS = jmask.todense, jnp.array([[1, 1], [1, 0]])
READ = functions("x", globals())("""
    todense(x); jax.jit(todense)(x);
    jax.lax.scan(lambda c, k: (c + k * todense(x), k), jnp.zeros(x.shape), jnp.arange(2.))[0];
    jmask.embedding_lookup(todense(x), [1, 0, 1]);
    jmask.embedding_lookup(todense(x), [1, 0, 1, -1], padding_id=-1);
    jmask.embedding_bag(todense(x), [[1, 0, 1], [0, 0, 1]]);
    jmask.embedding_bag(todense(x), [[1, 0, 1]], combiner="max");
    jax.jit(lambda t: jmask.embedding_lookup(t, [1, 0, 1]))(todense(x));
    jax.lax.scan(lambda c, i: (c, jmask.embedding_lookup(todense(x), i)), 0, PAIRS)[1];
    jax.lax.cond(
        jnp.sum(jmask.embedding_lookup(todense(x), [1])) > -9,
        lambda: jmask.embedding_lookup(todense(x), [0, 1]), lambda: jnp.ones((2, x.shape[1]))
    )
""")


@pytest.mark.sampled
@ignores_fallbacks
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", TENSORS)
def test_grad_of_grad_at_every_entry(kind, name, order):
    x, loss = TENSORS[kind], lambda x: cubes(READ[name](x))
    function = nested(jmask.grad, loss, order, todense)
    expected = nested(jax.grad, loss, order, lambda x: x)(todense(x))
    for run in (function, jax.jit(function)):
        np.testing.assert_allclose(todense(run(x)), expected, rtol=2e-4, atol=1e-4)
