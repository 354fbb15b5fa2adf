"""Random backward rules: whatever one does to a cotangent, `jmask.grad` is `jax.grad`.

A rule is a list of steps, each of which makes an array of another one, of any shape and dtype:

    cotangent (6, 2)  ->  sum over axis 1, kept  ->  int32  ->  times ones (1, 2)  ->  gradient

The numbers are small multiples of powers of two, so that sums are exact in any order, and what
makes jumps of them (integers, fewer bits) jumps at the same places.
"""

import warnings
from collections.abc import Callable

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jmask
from jmask._autodiff.rules import EQUATION_RULES
from jmask._base.forms import names_in
from tests.sampling import few_or_many

# --- steps: functions of an array and a number, which says how --------------------------

Step = Callable[[jax.Array, int], jax.Array]
FACTORS = (2.0, -1.0, 0.5)
INTEGERS = ("int32", "int16", "int8", "uint8", "bool")


def factor(x, n):
    """A scalar, or ones and twos whose axes have the size of those of `x` or 1."""
    if n % 3 == 0:
        return jnp.asarray(FACTORS[n % len(FACTORS)], x.dtype)
    shape = tuple(k if n >> d & 1 else 1 for d, k in enumerate(x.shape, 2))
    if n % 3 == 1:
        return jnp.full(shape, 2, x.dtype)
    return jnp.asarray(1 + np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2, x.dtype)


def wider(x, n):
    """Ones that are wider than `x` along its axes of size 1."""
    return jnp.ones(
        tuple(1 + n % 2 if k == 1 else (k, 1)[n >> 2 & 1] for k in x.shape), x.dtype
    )


axes_of = lambda x, n: tuple(d for d in range(x.ndim) if n >> d & 1)
summed = lambda x, n: x.sum(axes_of(x, n // 2), keepdims=bool(n % 2), dtype=x.dtype)


def converted(x, n):
    kinds = ("float32", "int32")
    if jnp.issubdtype(x.dtype, jnp.integer):
        kinds = ("float32", *INTEGERS)
    return x.astype(kinds[n % len(kinds)])


def reshaped(x, n):
    shapes = [(x.size,), (1, *x.shape), (*x.shape, 1), x.shape[::-1]]
    if x.ndim > 1:
        shapes += [(x.shape[0], x.size // x.shape[0]), (x.shape[0], 1, *x.shape[1:])]
    return x.reshape(shapes[n % len(shapes)])


turned = lambda x, n: lax.reshape(x, x.shape, tuple(range(x.ndim))[::-1]) if n % 2 else x.T


def broadcast(x, n):
    axis = n % (x.ndim + 1)
    dims = [d for d in range(x.ndim + 1) if d != axis]
    shape = list(x.shape)
    shape.insert(axis, 1 + n % 2)
    return lax.broadcast_in_dim(x, shape, dims)


def sliced(x, n):
    axis = n % x.ndim
    size = max(1, x.shape[axis] - 1)
    start = jnp.int32(n % 3)  # clipped
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def sliced_by_steps(x, n):
    axis, step = n % x.ndim, 1 + n % 3
    return lax.slice_in_dim(x, min(n % 2, x.shape[axis] - 1), None, step, axis)


def split_and_joined(x, n):
    """The parts of `x` in another order, or one of them among others."""
    axis = n % x.ndim
    parts = jnp.split(x, [x.shape[axis] // 2], axis)
    return jnp.concatenate([parts[1], x, parts[0]][n % 2 :], axis)


stacked = lambda x, n: jnp.stack([x, x, x][: 1 + n % 3], n % (x.ndim + 1))


def unstacked(x, n):
    """The parts of `x` along an axis in reverse order, or the first of them."""
    parts = jnp.unstack(x, axis=n % x.ndim)
    return jnp.stack(parts[::-1], 0) if n % 2 else parts[0]


def put_back(x, n):
    wide = jnp.zeros((x.shape[0] + n % 2, *x.shape[1:]), x.dtype)
    return lax.dynamic_update_slice_in_dim(wide, x, n % 3, 0)


def scattered(x, n):
    ids = jnp.arange(x.shape[0]) // 2 + n % 2
    return jnp.zeros_like(x).at[ids].add(x)


def padded(x, n):
    config = [(0, 0, 0)] * x.ndim
    config[n % x.ndim] = (n % 3 - 1 if x.shape[n % x.ndim] > 1 else 0, 1, n % 2)
    return lax.pad(x, jnp.asarray(n // 4 % 2, x.dtype), config)


def chosen(x, n):
    which = jnp.asarray(n) > 3 if n % 2 else (jnp.arange(x.size) % 2 == 0).reshape(x.shape)
    return lax.select_n(which, x, jnp.zeros_like(x) if n % 3 else x + x)


PARTS = (jnp.real, jnp.imag, lambda z: jnp.conj(z).imag)
quotient = lambda x, n: lax.div(x, jnp.asarray(2, x.dtype)) if x.dtype != bool else x


def without(x, n):
    """`x` less a sum of it, or the other way round."""
    if x.dtype == bool:
        return x
    total = x.sum(axes_of(x, n // 2), keepdims=True, dtype=x.dtype)
    return x - total if n % 2 else total - x


def matrix(x, n):
    if x.ndim < 2 or x.dtype != np.float32:
        return x
    return x @ jnp.ones((x.shape[-1], 1 + n % 2)) if n % 3 else x.at[..., 0].multiply(2)


STEPS = {
    "times": lambda x, n: x * factor(x, n),
    "times a wider": lambda x, n: x * wider(x, n),
    "plus": lambda x, n: x + factor(x, n),
    "plus a wider": lambda x, n: wider(x, n) + x,
    "plus itself": lambda x, n: x + x * factor(x, n),
    "minus": lambda x, n: factor(x, n) - x if x.dtype != bool else x,
    "without": without,
    "divided": lambda x, n: (x / factor(x, n)).astype(x.dtype),
    "quotient": quotient,
    "negative": lambda x, n: -x if x.dtype != bool else x,
    "converted": converted,
    "fewer bits": lambda x, n: (
        lax.reduce_precision(x, 5 + n % 3, 1 + n % 4) if x.dtype == np.float32 else x
    ),
    "summed": summed,
    "reshaped": reshaped,
    "turned": turned,
    "broadcast": broadcast,
    "squeezed": lambda x, n: jnp.squeeze(x) if n % 2 else jnp.expand_dims(x, n % (x.ndim + 1)),
    "expanded": lambda x, n: lax.expand_dims(x, (n % (x.ndim + 1),)),
    "sliced": sliced,
    "sliced by steps": sliced_by_steps,
    "split and joined": split_and_joined,
    "stacked": stacked,
    "unstacked": unstacked,
    "put back": put_back,
    "scattered": scattered,
    "padded": padded,
    "chosen": chosen,
    "copied": lambda x, n: checkpoint_name(jnp.copy(x), "x"),
    "behind a barrier": lambda x, n: lax.optimization_barrier((x, n * x[:1]))[0],
    "constrained": lambda x, n: lax.with_sharding_constraint(x, _one_device(x)),
    "reversed": lambda x, n: jnp.flip(x, n % x.ndim),
    "matrix": matrix,
    "positive": lambda x, n: jnp.abs(x) if x.dtype != bool else x,
    "part": lambda x, n: PARTS[n % 3](lax.complex(x, -x)) if x.dtype == np.float32 else x,
    "low": lambda x, n: x.astype(("f2", "bfloat16")[n % 2]) if x.dtype == np.float32 else x,
}
# What turns a small difference into a large one: not after numbers of few bits.
JUMPS = ("converted", "fewer bits", "quotient")
_one_device = lambda x: jax.sharding.SingleDeviceSharding(jax.devices()[0])


def around(function, how):
    """The function inside of something."""
    if how == "jit":
        return jax.jit(function)
    if how == "checkpoint":
        return jax.checkpoint(function)
    if how == "cond":
        return lambda x: lax.cond(x.size > 1, function, lambda x: function(x) * 0, x)
    if how == "scan":  # of what keeps shape and dtype

        def twice(x):
            like = jax.eval_shape(function, x)
            if (like.shape, like.dtype) != (x.shape, x.dtype):
                return function(x)
            return lax.scan(lambda x, _: (function(x), None), x, None, length=2)[0]

        return twice
    return function


SHAPES = ((6, 2), (1, 2), (6, 1), (1, 1), (2, 2), (4, 1, 2), (4, 2, 1), (3,), (1,))


@st.composite
def rules(draw):
    steps = []
    names = sorted(STEPS)
    for _ in range(draw(st.integers(1, 4))):
        if any(name == "low" for name, _, _ in steps):
            names = [name for name in names if name not in JUMPS]
        how = draw(st.sampled_from(("", "", "", "jit", "checkpoint", "cond", "scan")))
        steps.append((draw(st.sampled_from(names)), draw(st.integers(0, 11)), how))
    return draw(st.sampled_from(SHAPES)), steps


def rule_of(shape, steps):
    """The steps as a rule, whose result is brought to the shape of the table."""

    def rule(g):
        for name, number, how in steps:
            if not g.ndim:
                break
            step = STEPS[name]
            g = around(lambda x, step=step, n=number: step(x, n), how)(g)
        g = g.astype(jnp.float32)
        if g.shape == shape:
            return g
        if g.shape[:1] == shape[:1]:
            rows = g.sum(tuple(range(1, g.ndim)))
            return rows.reshape(-1, *[1] * (len(shape) - 1)) * jnp.ones(shape)
        flat = jnp.resize(g.reshape(-1), (int(np.prod(shape)),))
        return flat.reshape(shape)

    return rule


def loss_of(rule):
    """Lookups of a table through an identity that has the rule backwards."""

    @jax.custom_vjp
    def passed(table):
        return table

    passed.defvjp(lambda table: (table, None), lambda _, g: (rule(g),))

    def loss(table, ids):
        rows = passed(table)[ids]
        weights = np.resize([1.5, -0.5, 2.0, -1.0, 0.5], rows.shape)
        return jnp.sum(rows * weights)

    return loss


IDS = jnp.array([1, 3, 1, 0, 1, -9, 40])


def check(shape, *rules):
    """The gradients by some rules, all in one program."""
    losses = [loss_of(rule_of(shape, steps)) for steps in rules]
    table = jnp.asarray(np.arange(np.prod(shape)).reshape(shape), jnp.float32)

    @jax.jit
    def gradients(table, ids):
        return [(jmask.grad(f)(table, ids), jax.grad(f)(table, ids)) for f in losses]

    with warnings.catch_warnings(action="ignore", category=jmask.StorageFallbackWarning):
        pairs = gradients(table, IDS)
    for steps, (result, expected) in zip(rules, pairs, strict=True):
        low = any(name == "low" for name, _, _ in steps)
        finite = np.where(np.isfinite(expected), expected, 0)
        scale = float(np.max(np.abs(finite), initial=1))
        tolerance = 4e-2 * scale if low else 1e-5 * scale
        np.testing.assert_allclose(
            jmask.todense(result), expected, rtol=1e-5, atol=tolerance, err_msg=str(steps)
        )


@few_or_many(8, 300)
def test_random_rules(count):
    settings(max_examples=count)(given(rules())(lambda rule: check(*rule)))()


# --- every step and every rule -----------------------------------------------------------


@pytest.mark.parametrize("number", [np.inf, np.nan, -np.inf])
@pytest.mark.parametrize("shape", [(), (1, 1), (6, 2)])
def test_numbers_that_make_nan_of_zeros(number, shape):
    """What is known when the program is written: 0 times infinity, and 0 divided by 0."""
    rules = (
        lambda g: g * jnp.full(shape, number),
        lambda g: jnp.full(shape, number) * g,
        lambda g: g / jnp.zeros(shape),
        lambda g: (g / np.float32(0)) * 0.0 if shape == () else g * number,
    )
    for rule in rules:
        loss, table = loss_of(rule), jnp.ones((6, 2))
        with warnings.catch_warnings(action="ignore", category=jmask.StorageFallbackWarning):
            result = jmask.todense(jmask.grad(loss)(table, IDS))
        np.testing.assert_array_equal(result, jax.grad(loss)(table, IDS))


@pytest.mark.sampled
@pytest.mark.parametrize("name", STEPS)
def test_step(name):
    for shape, number in (((6, 2), 1), ((4, 2, 1), 2), ((1, 2), 7)):
        check(shape, [(name, number, "")])


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_step_on_every_shape(name):
    for shape in SHAPES:
        rules = {}  # numbers that give the same program are one
        for steps in ([(name, number, "")] for number in range(12)):
            program = jax.make_jaxpr(rule_of(shape, steps))(jnp.ones(shape))
            rules.setdefault(str(program), steps)
        check(shape, *rules.values())


def test_every_rule_is_met():
    found = set()
    for name in STEPS:
        for number in range(12):
            rule = rule_of((6, 1), [(name, number, "")])
            found |= names_in(jax.make_jaxpr(rule)(jnp.ones((6, 1))).jaxpr)
    # Of a sparse matrix; of the sum of two cotangents, which JAX writes; by version; of rows
    # that are sharded, as in tests/tables.
    elsewhere = {"bcoo_dot_general", "add_any", "copy", "copy_p", "stack", "unstack"}
    elsewhere.add("jmask_add_on_shards")
    assert set(EQUATION_RULES) - elsewhere <= found
