"""Random chains of optax: lifted they are exact on the touched rows, or refused.

A chain is a list of parts: those of optax with some settings, and functions of gradients and
parameters drawn from a table that has what is row-local and what is not. Whether a chain is
row-local is not known here: what `lazy` accepts must equal the dense update, `apply_gradients`
too, and what it refuses must be refused by name.
"""

import functools
import warnings

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

import jmask
from tests.compiled_step import with_optax
from tests.expressions import functions
from tests.lazy.test_lazy_optax import PARAMS, SHAPES, random_gradient, random_tree, table_of
from tests.oracle import densified, is_row_sparse, other_rows, touched_rows
from tests.sampling import few_or_many

pytestmark = pytest.mark.dtype_promotion

# Functions of the update u, the parameter p of a leaf, and a scalar s of the whole gradient.
ACCEPTED = functions("u, p, s", globals())("""
    0.5 * u; u * s; u / (1 + s * s); u * jnp.abs(u); jnp.tanh(u); u * jnp.cos(p); u + 0.1 * p;
    u - jnp.mean(u, in_rows(u), keepdims=True);
    u / (1 + jnp.sum(u * u, in_rows(u), keepdims=True)); u * jnp.sum(u);
    u / (1 + jnp.vdot(u, u)); u * (1 + jnp.vdot(u, p));
    jnp.concatenate(jnp.split(u, [1], -1)[::-1], -1);
    jnp.stack([u, p]).max(0); jnp.stack([u, p], -1).min(-1); jnp.stack([p, u], 1)[:, 1];
    jnp.flip(u, -1); jnp.concatenate([u[..., 1:], u[..., :1]], -1);
    u * u[..., ::-2][..., :1];
    jnp.concatenate([jnp.split(u, [1], -1)[0], jnp.split(p, [1], -1)[1]], -1);
    u + column(jnp.full((u.shape[0], 1), 0.5, u.dtype), u);
    (u.ravel() * p.ravel()).reshape(u.shape); (u.T * p.T).T;
    u @ jnp.ones((u.shape[-1], u.shape[-1]));
    jnp.tensordot(jnp.tensordot(u, u, u.ndim), u, 0);
    u * jax.random.uniform(jax.random.key(0));
    u * jax.lax.fori_loop(0, 3, lambda i, c: c * 0.9, 1.0);
    jax.lax.fori_loop(0, 3, lambda i, c: c * 0.9 + u, u);
    jax.lax.cond(s > 0, lambda: u, lambda: 2 * u);
    jnp.where(u > 0, u, 0.1 * p); jnp.ones_like(u); u.astype(jnp.bfloat16).astype(u.dtype);
    jax.jit(lambda u, p, s: u * jnp.abs(p) + s * u)(u, p, s)
""")
# Where rows mix; columns of numbers are as many as there are rows.
REFUSED = functions("u, p, s", globals())("""
    u * jnp.linalg.norm(p.ravel()); u - jnp.mean(u); u / (1 + jnp.max(jnp.abs(u))); u / u.size;
    u * column(jnp.arange(u.shape[0]), u); jnp.cumsum(u, 0); jnp.sort(u, 0); u[::-1];
    u[:1] * u; u * u[1:].sum(); jnp.concatenate(jnp.split(u, [1], 0)[::-1], 0);
    u * jnp.concatenate([jnp.ones_like(u), 2 * jnp.ones_like(p)], -1).sum(-1, keepdims=True);
    u + jax.random.normal(jax.random.key(0), u.shape);
    jax.lax.cond(p.sum() > 0, lambda: u, lambda: -u)
""")
LEAVES = ACCEPTED | REFUSED
SCALARS = functions("u", globals())("""
    jnp.float32(1); optax.tree.norm(u); optax.tree.vdot(u, u); optax.tree.sum(u);
    sum(jnp.sum(jnp.tanh(x)) for x in jax.tree.leaves(u)); optax.tree.max(u)
""")
in_rows = lambda x: tuple(range(1, x.ndim))
# A number for each row, of the rank of an array.
column = lambda x, like: x.reshape(-1, *[1] * (like.ndim - 1))


def function(leaf, scalar):
    def update(updates, params):
        s = SCALARS[scalar](updates)
        return jax.tree.map(lambda u, p: LEAVES[leaf](u, p, s), updates, params)

    return optax.stateless(update)


def accumulated(leaf):
    """A state of the shape of the parameters that is what a function makes of it."""

    def update(updates, state, params=None):
        of_leaf = LEAVES[leaf]
        state = jax.tree.map(
            lambda m, u: 0.5 * of_leaf(m, u, jnp.float32(1)) + u, state, updates
        )
        return state, state

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


PARTS = functions("", {**vars(optax), **globals()})("""
    clip(0.5); clip_by_global_norm(0.5); scale_by_adam(); scale_by_rms(); scale_by_belief();
    scale_by_lion(); trace(0.9); trace(0.9, nesterov=True); add_decayed_weights(0.1);
    scale_by_schedule(lambda count: 1 / (1 + count)); centralize(); zero_nans(); ema(0.9);
    scale_by_trust_ratio(); apply_if_finite(trace(0.5), 2);
    masked(scale_by_adam(), {"table": True, "other": False, "dense": True});
    inject_hyperparams(sgd)(learning_rate=0.1, momentum=0.5)
""")


@st.composite
def chains(draw):
    part = st.one_of(
        st.tuples(st.sampled_from(sorted(PARTS))),
        st.tuples(st.sampled_from(sorted(LEAVES)), st.sampled_from(sorted(SCALARS))),
        st.tuples(st.just("accumulated"), st.sampled_from(sorted(LEAVES)), st.none()),
    )
    return tuple(draw(st.lists(part, min_size=1, max_size=4)))


def built(parts):
    made = []
    for part in parts:
        if len(part) == 1:
            made.append(PARTS[part[0]]())
        elif len(part) == 2:
            made.append(function(*part))
        else:
            made.append(accumulated(part[1]))
    return optax.chain(*made)


def assert_close(actual, expected, name):
    expected = np.asarray(expected, np.float64)
    scale = np.max(np.abs(expected[np.isfinite(expected)]), initial=1e-3)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, 2e-3, 2e-4 * scale, err_msg=name
    )


def check(parts):
    """Whether the chain is accepted; if so it is exact."""
    inner, gradient = built(parts), random_gradient(1)
    lifted = jmask.lazy(inner)

    dense_step = jax.jit(functools.partial(with_optax, inner))
    lazy_steps = jax.jit(
        lambda *args: [step(lifted, *args) for step in (with_optax, jmask.apply_gradients)]
    )

    params, state = dense_step(random_tree(5), inner.init(PARAMS), PARAMS)
    try:
        with warnings.catch_warnings(action="ignore", category=jmask.StorageFallbackWarning):
            results = lazy_steps(gradient, state, params)
    except ValueError as error:
        if "jmask.lazy cannot wrap" not in str(error):
            raise
        return False
    expected = dense_step(densified(gradient), state, params)
    for result in results:
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        compare(result, expected, (params, state), gradient)
    return True


def compare(new, dense, old, gradient):
    """Touched rows as in the dense step, the others as before; all else as dense."""
    others = map(jax.tree.leaves, (dense, old))
    for (path, x), y, before in zip(jax.tree.leaves_with_path(new), *others, strict=True):
        table, name = table_of(x), jax.tree_util.keystr(path)
        if table is None or not is_row_sparse(gradient[table]):
            assert_close(x, y, name)
            continue
        touched, others = touched_rows(gradient[table]), other_rows(gradient[table])
        assert_close(np.asarray(x)[touched], np.asarray(y)[touched], name)
        np.testing.assert_array_equal(np.asarray(x)[others], np.asarray(before)[others], name)


@few_or_many(10, 120)
def test_random_chains(count):
    @settings(max_examples=count)
    @given(chains())
    def run(parts):
        check(parts)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAVES)
def test_each_alone(name):
    """What is row-local alone must not be refused, and what mixes rows must be."""
    assert check([(name, "optax.tree.norm(u)")]) == (name in ACCEPTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_each_part_alone(name):
    assert check([(name,)]) == (name != "scale_by_trust_ratio()")


def test_shapes_tell_tables_apart():
    assert len({shape[0] for shape in SHAPES.values()}) == len(SHAPES)
