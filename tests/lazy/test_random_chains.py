"""Random chains of optax: lifted they are exact on the touched rows, or refused.

A chain is a list of parts: those of optax with some settings, and functions of gradients and
parameters drawn from a table that has what is row-local and what is not. Whether a chain is
row-local is not known here: what `lazy` accepts must equal the dense update, `apply_gradients`
too, and what it refuses must be refused by name.
"""

import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax import lax

import jmask
from tests.lazy.test_lazy_optax import PARAMS, SHAPES, random_gradient, random_tree, table_of
from tests.oracle import densified, is_row_sparse, other_rows, touched_rows

pytestmark = pytest.mark.dtype_promotion

# Functions of the update u, the parameter p of a leaf, and a scalar s of the whole gradient.
LEAVES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "scaled": lambda u, p, s: 0.5 * u,
    "times a scalar": lambda u, p, s: u * s,
    "divided by a scalar": lambda u, p, s: u / (1 + s * s),
    "square": lambda u, p, s: u * jnp.abs(u),
    "bounded": lambda u, p, s: jnp.tanh(u),
    "by the parameter": lambda u, p, s: u * jnp.cos(p),
    "decayed": lambda u, p, s: u + 0.1 * p,
    "mean of each row": lambda u, p, s: u - jnp.mean(u, tuple(range(1, u.ndim)), keepdims=True),
    "norm of each row": lambda u, p, s: (
        u / (1 + jnp.sum(u * u, tuple(range(1, u.ndim)), keepdims=True))
    ),
    "sum of the leaf": lambda u, p, s: u * jnp.sum(u),
    "dot of the leaf": lambda u, p, s: u / (1 + jnp.vdot(u, u)),
    "dot with the parameter": lambda u, p, s: u * (1 + jnp.vdot(u, p)),
    "norm of the parameter": lambda u, p, s: u * jnp.linalg.norm(p.ravel()),
    "mean of the leaf": lambda u, p, s: u - jnp.mean(u),
    "greatest of the leaf": lambda u, p, s: u / (1 + jnp.max(jnp.abs(u))),
    "size": lambda u, p, s: u / u.size,
    "position": lambda u, p, s: u * jnp.arange(u.shape[0]).reshape(-1, *[1] * (u.ndim - 1)),
    "running sum": lambda u, p, s: jnp.cumsum(u, 0),
    "sorted": lambda u, p, s: jnp.sort(u, 0),
    "reversed": lambda u, p, s: u[::-1],
    "reversed columns": lambda u, p, s: jnp.flip(u, -1),
    "columns behind columns": lambda u, p, s: jnp.concatenate(jnp.split(u, [1], -1)[::-1], -1),
    "rows behind rows": lambda u, p, s: jnp.concatenate(jnp.split(u, [1], 0)[::-1], 0),
    "columns of the parameter": lambda u, p, s: jnp.concatenate(
        [jnp.split(u, [1], -1)[0], jnp.split(p, [1], -1)[1]], -1
    ),
    "a number for all": lambda u, p, s: (
        u + jnp.full((u.shape[0], 1), 0.5, u.dtype).reshape(-1, *[1] * (u.ndim - 1))
    ),
    "columns of numbers": lambda u, p, s: (
        u * jnp.concatenate([jnp.ones_like(u), 2 * jnp.ones_like(p)], -1).sum(-1, keepdims=True)
    ),
    "ravelled": lambda u, p, s: (u.ravel() * p.ravel()).reshape(u.shape),
    "transposed": lambda u, p, s: (u.T * p.T).T,
    "matrix": lambda u, p, s: u @ jnp.ones((u.shape[-1], u.shape[-1])),
    "outer product": lambda u, p, s: jnp.tensordot(jnp.tensordot(u, u, u.ndim), u, 0),
    "noise": lambda u, p, s: u + jax.random.normal(jax.random.key(0), u.shape),
    "noise for all": lambda u, p, s: u * jax.random.uniform(jax.random.key(0)),
    "loop": lambda u, p, s: u * lax.fori_loop(0, 3, lambda i, c: c * 0.9, 1.0),
    "loop over u": lambda u, p, s: lax.fori_loop(0, 3, lambda i, c: c * 0.9 + u, u),
    "branch": lambda u, p, s: lax.cond(s > 0, lambda: u, lambda: 2 * u),
    "branch by the parameter": lambda u, p, s: lax.cond(p.sum() > 0, lambda: u, lambda: -u),
    "where": lambda u, p, s: jnp.where(u > 0, u, 0.1 * p),
    "constant": lambda u, p, s: jnp.ones_like(u),
    "low precision": lambda u, p, s: u.astype(jnp.bfloat16).astype(u.dtype),
    "jit": jax.jit(lambda u, p, s: u * jnp.abs(p) + s * u),
}
SCALARS: dict[str, Callable[[Any], Any]] = {
    "one": lambda u: jnp.float32(1),
    "norm": optax.tree.norm,
    "dot": lambda u: optax.tree.vdot(u, u),
    "sum": optax.tree.sum,
    "leaves": lambda u: sum(jnp.sum(jnp.tanh(x)) for x in jax.tree.leaves(u)),
    "greatest": lambda u: optax.tree.max(u),
}


def function(leaf: str, scalar: str) -> optax.GradientTransformation:
    def update(updates: Any, params: Any) -> Any:
        s = SCALARS[scalar](updates)
        return jax.tree.map(lambda u, p: LEAVES[leaf](u, p, s), updates, params)

    return optax.stateless(update)


def accumulated(leaf: str) -> optax.GradientTransformation:
    """A state of the shape of the parameters that is what a function makes of it."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        of_leaf = LEAVES[leaf]
        state = jax.tree.map(
            lambda m, u: 0.5 * of_leaf(m, u, jnp.float32(1)) + u, state, updates
        )
        return state, state

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


PARTS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "clip": lambda: optax.clip(0.5),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.5),
    "scale_by_adam": lambda: optax.scale_by_adam(),
    "scale_by_rms": lambda: optax.scale_by_rms(),
    "scale_by_belief": lambda: optax.scale_by_belief(),
    "scale_by_lion": lambda: optax.scale_by_lion(),
    "trace": lambda: optax.trace(0.9),
    "nesterov": lambda: optax.trace(0.9, nesterov=True),
    "decay": lambda: optax.add_decayed_weights(0.1),
    "schedule": lambda: optax.scale_by_schedule(lambda count: 1 / (1 + count)),
    "centralize": optax.centralize,
    "zero_nans": optax.zero_nans,
    "ema": lambda: optax.ema(0.9),
    "trust": lambda: optax.scale_by_trust_ratio(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.trace(0.5), 2),
    "masked": lambda: optax.masked(
        optax.scale_by_adam(), {"table": True, "other": False, "dense": True}
    ),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.5),
}


@st.composite
def chains(draw: Any) -> tuple[Any, ...]:
    part = st.one_of(
        st.tuples(st.sampled_from(sorted(PARTS))),
        st.tuples(st.sampled_from(sorted(LEAVES)), st.sampled_from(sorted(SCALARS))),
        st.tuples(st.just("accumulated"), st.sampled_from(sorted(LEAVES)), st.none()),
    )
    return tuple(draw(st.lists(part, min_size=1, max_size=4)))


def built(parts: Any) -> optax.GradientTransformation:
    made = []
    for part in parts:
        if len(part) == 1:
            made.append(PARTS[part[0]]())
        elif len(part) == 2:
            made.append(function(*part))
        else:
            made.append(accumulated(part[1]))
    return optax.chain(*made)


def assert_close(actual: Any, expected: Any, name: str) -> None:
    expected = np.asarray(expected, np.float64)
    scale = np.max(np.abs(expected[np.isfinite(expected)]), initial=1e-3)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, 2e-3, 2e-4 * scale, err_msg=name
    )


def check(parts: Any) -> bool:
    """Whether the chain is accepted; if so it is exact."""
    inner, gradient = built(parts), random_gradient(1)
    lifted = jmask.lazy(inner)

    @jax.jit
    def dense_step(gradient: Any, state: Any, params: Any) -> Any:
        updates, state = inner.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def lazy_steps(gradient: Any, state: Any, params: Any) -> Any:
        """By `update`, and in one pass."""
        updates, new = lifted.update(gradient, state, params)
        in_one = jmask.apply_gradients(lifted, gradient, state, params)
        return (optax.apply_updates(params, updates), new), in_one

    params, state = dense_step(random_tree(5), inner.init(PARAMS), PARAMS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jmask.StorageFallbackWarning)
            new, in_one = lazy_steps(gradient, state, params)
    except ValueError as error:
        if "jmask.lazy cannot wrap" not in str(error):
            raise
        return False
    expected = dense_step(densified(gradient), state, params)
    assert jax.tree.structure(new) == jax.tree.structure(expected)
    for result in (new, in_one):
        compare(result, expected, (params, state), gradient)
    return True


def compare(new: Any, dense: Any, old: Any, gradient: Any) -> None:
    """Touched rows as in the dense step, the others as before; all else as dense."""
    leaves = zip(
        jax.tree.leaves_with_path(new),
        jax.tree.leaves(dense),
        jax.tree.leaves(old),
        strict=True,
    )
    for (path, x), y, before in leaves:
        table, name = table_of(x), jax.tree_util.keystr(path)
        if table is None or not is_row_sparse(gradient[table]):
            assert_close(x, y, name)
            continue
        touched, others = touched_rows(gradient[table]), other_rows(gradient[table])
        assert_close(np.asarray(x)[touched], np.asarray(y)[touched], name)
        np.testing.assert_array_equal(np.asarray(x)[others], np.asarray(before)[others], name)


@settings(max_examples=10)
@given(chains())
def test_random_chain(parts):
    check(parts)


@pytest.mark.slow
@settings(max_examples=120)
@given(chains())
def test_random_chains_at_length(parts):
    check(parts)


# What is row-local alone must not be refused, and what mixes rows must be.
REFUSED = {
    *("norm of the parameter", "mean of the leaf", "greatest of the leaf", "size", "position"),
    *("running sum", "sorted", "reversed", "noise", "branch by the parameter"),
    *("reversed columns",),  # a reverse has no rule
    *("rows behind rows", "columns of numbers"),  # as many numbers as there are rows
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAVES)
def test_each_alone(name):
    assert check([(name, "norm")]) == (name not in REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_each_part_alone(name):
    assert check([(name,)]) == (name != "trust")


def test_shapes_tell_tables_apart():
    assert len({shape[0] for shape in SHAPES.values()}) == len(SHAPES)
