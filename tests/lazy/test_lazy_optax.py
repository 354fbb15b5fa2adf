"""`lazy(inner)` for all of optax: exact on touched rows, nothing else moves, or refused.

Also: un-lifted transformations beside `lazy` are exact or raise, never silently wrong."""

import functools
import inspect
import itertools
import warnings

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings

import jmask
from tests import optax_cases as cases
from tests.compiled_step import with_optax
from tests.expressions import functions
from tests.oracle import assert_close, densified, is_row_sparse, other_rows, touched_rows
from tests.sampling import few_or_many
from tests.stored_tables import bits

pytestmark = [
    pytest.mark.dtype_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

# Numbers of rows that tell the tables apart, and from every other dimension.
SHAPES = {"table": (12, 3), "other": (9, 2, 2), "dense": (3, 2)}
IDS = {"table": [3, 1, 3, 7, -1, 12], "other": [8, 0]}
# More ids than rows: these tables are updated densely.
MOST = {"table": [*range(1, 12), *range(1, 12), 12], "other": [8, 0] * 4}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()
    }


def random_gradient(seed, ids=IDS):
    rng = np.random.default_rng(seed)
    gradient = random_tree(seed)
    for name, rows in ids.items():
        values = rng.normal(size=(len(rows), *SHAPES[name][1:]))
        gradient[name] = jmask.RowSparse(rows, jnp.float32(values), SHAPES[name])
    return gradient


PARAMS = random_tree(0)


def table_of(leaf):
    """Which table a state array holds rows of, by its number of rows."""
    sizes = {SHAPES[name][0]: name for name in IDS}
    return sizes.get(leaf.shape[0]) if leaf.ndim else None


def assert_near(actual, expected, name):
    """As far as float32 agrees where a chain is ill-conditioned."""
    expected = np.asarray(expected, np.float64)
    scale = np.max(np.abs(expected[np.isfinite(expected)]), initial=1e-3)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, 2e-3, 2e-4 * scale, err_msg=name
    )


def assert_exact(actual, expected, name):
    """To some digits; jit keeps more of bfloat16 intermediates than eager operations do."""
    is_low = any(x.dtype == jnp.bfloat16 for x in (actual, expected))
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    rtol = 1e-2 if is_low else 5e-6
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=2e-7, err_msg=name)


def compare(new, dense, old, gradient, near):
    """Touched rows as in the dense step, the others bit for bit as before; else as dense."""
    assert jax.tree.structure(new) == jax.tree.structure(dense)
    others = map(jax.tree.leaves, (dense, old))
    for (path, x), y, before in zip(jax.tree.leaves_with_path(new), *others, strict=True):
        table, name = table_of(x), jax.tree_util.keystr(path)
        assert x.dtype == jnp.asarray(before).dtype
        if table is None or not is_row_sparse(gradient[table]):
            near(x, y, name)
            continue
        touched, untouched = touched_rows(gradient[table]), other_rows(gradient[table])
        near(x[touched], y[touched], name)
        np.testing.assert_array_equal(bits(x)[untouched], bits(before)[untouched], name)


def check(inner, near, gradients, wrap=jax.jit, **extra):
    """Steps of `lazy`, by `update` and `apply_gradients`, beside dense steps; the same state.

    A dense step comes first: no state is at its initial value, and runs can switch.
    """
    lifted, inner = jmask.lazy(inner), optax.with_extra_args_support(inner)
    dense_step = wrap(functools.partial(with_optax, inner, **extra))
    lazy_steps = [
        wrap(functools.partial(step, lifted, **extra))
        for step in (with_optax, jmask.apply_gradients)
    ]
    state = lifted.init(PARAMS)
    assert jax.tree.structure(state) == jax.tree.structure(inner.init(PARAMS))
    params, state = dense_step(random_tree(5), state, PARAMS)
    # Bit for bit: adding an update of zeros would turn -0.0 into 0.
    params["table"] = params["table"].at[5].set(-0.0)
    for gradient in gradients:
        expected = dense_step(densified(gradient), state, params)
        for step in lazy_steps:
            result = step(gradient, state, params)
            compare(result, expected, (params, state), gradient, near)
        params, state = result
    dense_step(random_tree(6), state, params)


# All are run under jit; eagerly, which compiles every operation by itself, every sixth.
LIFTED = [*cases.ROW_LOCAL, *cases.CHAINS]
RUNS = [pytest.param(name, jax.jit, id=f"{name}, jit") for name in LIFTED]
RUNS += [
    pytest.param(name, lambda f: f, marks=pytest.mark.slow, id=f"{name}, eager")
    for name in LIFTED[::6]
]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "wrap"), RUNS)
def test_equals_the_dense_update_on_touched_rows(name, wrap):
    gradients = random_gradient(1), random_gradient(2), random_gradient(3, MOST)
    inner, extra = (cases.ROW_LOCAL | cases.CHAINS)[name](), cases.extra_args(name, None)
    check(inner, assert_exact, gradients, wrap, **extra)


def first_update(tx, gradient, **extra):
    return tx.update(gradient, tx.init(PARAMS), PARAMS, **extra)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*cases.REFUSED, *cases.REFUSED_CHAINS])
def test_refused_with_the_reason(name):
    build, reason = (cases.REFUSED | cases.REFUSED_CHAINS)[name]
    gradient = random_gradient(1)
    extra = cases.extra_args(name, gradient)
    with pytest.raises(ValueError, match=reason) as error:
        first_update(jmask.lazy(build()), gradient, **extra)
    if name not in cases.REFUSED_BY_OPTAX:
        assert "jmask.lazy" in str(error.value)


def public_transformations():
    """Names of all functions of optax that say they return a transformation."""
    for module, prefix in ((optax, ""), (optax.contrib, "contrib.")):
        for name, member in inspect.getmembers(module, inspect.isfunction):
            returned = str(inspect.signature(member).return_annotation)
            if "GradientTransformation" in returned and not name.startswith("_"):
                yield prefix + name


def test_tables_are_complete():
    listed = {*cases.ROW_LOCAL, *cases.REFUSED, *cases.UNLIFTED, *cases.NOT_PLACED}
    assert set(public_transformations()) <= listed


PLACED = (
    cases.UNLIFTED
    | cases.ROW_LOCAL
    | {name: build for name, (build, _) in cases.REFUSED.items()}
)


# One for all: it is compiled once.
MOMENTUM = optax.sgd(0.1, momentum=0.9)
LIFTED_MOMENTUM = jmask.lazy(MOMENTUM)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "side"), list(itertools.product(PLACED, ["before", "after"])))
def test_unlifted_is_exact_or_raises(name, side):
    """Two steps of a chain with the transformation outside `lazy`."""
    order = (lambda a, b: (a, b)) if side == "before" else (lambda a, b: (b, a))
    chain = optax.chain(*order(PLACED[name](), LIFTED_MOMENTUM))
    gradient, params = random_gradient(1), PARAMS
    extra = cases.extra_args(name, gradient)
    raised = None
    try:
        state = chain.init(params)
        for _ in range(2):
            updates, state = chain.update(gradient, state, params, **extra)
            params = optax.apply_updates(params, updates)
    except Exception as error:
        raised = error
    if name not in cases.EXACT_UNLIFTED + cases.DENSE_UNLIFTED:
        assert raised is not None, "silently accepted"
        # Raised by jmask's checks or JAX's, not by some accident of this test.
        told = ("RowSparse", "jmask.lazy", "structure", "abstract method", "per_example")
        assert any(word in str(raised) for word in told), raised
        return
    assert raised is None
    reference = optax.chain(*order(PLACED[name](), MOMENTUM))
    dense, state = PARAMS, reference.init(PARAMS)
    for _ in range(2):
        updates, state = reference.update(densified(gradient), state, dense)
        dense = optax.apply_updates(dense, updates)
    for key in SHAPES:
        if is_row_sparse(gradient[key]) and name in cases.EXACT_UNLIFTED:
            touched, untouched = touched_rows(gradient[key]), other_rows(gradient[key])
            assert_exact(params[key][touched], dense[key][touched], key)
            np.testing.assert_array_equal(params[key][untouched], PARAMS[key][untouched])
        else:
            np.testing.assert_allclose(params[key], dense[key], rtol=1e-5)


def test_lazy_after_lazy():
    two = optax.chain(jmask.lazy(optax.clip(0.1)), jmask.lazy(optax.sgd(0.1)))
    one = jmask.lazy(optax.chain(optax.clip(0.1), optax.sgd(0.1)))
    results = [densified(first_update(tx, random_gradient(1))[0]) for tx in (two, one)]
    chex.assert_trees_all_equal(*results)


def test_without_params():
    gradient, tx = random_gradient(1), jmask.lazy(optax.adam(0.1))
    with_params, _ = first_update(tx, gradient)
    without, _ = tx.update(gradient, tx.init(PARAMS))
    chex.assert_trees_all_equal(densified(with_params), densified(without))


def test_dense_gradients_go_to_inner():
    inner, gradient = optax.lamb(0.1), random_tree(1)
    updates = (first_update(tx, gradient)[0] for tx in (jmask.lazy(inner), inner))
    chex.assert_trees_all_equal(*updates)


@pytest.mark.parametrize(
    ("inner", "params"),
    [
        (optax.adamw(0.1), PARAMS),
        (optax.lookahead(optax.adam(0.1), 1, 0.5), optax.LookaheadParams(PARAMS, PARAMS)),
    ],
)
def test_densify_equals_optax_on_the_dense_gradient(inner, params):
    tx, gradient = optax.chain(jmask.densify(), inner), random_gradient(1)
    updates, _ = tx.update(gradient, tx.init(params), params)
    expected, _ = inner.update(densified(gradient), inner.init(params), params)
    assert_close(updates, expected, rtol=1e-6)


def test_apply_updates_keeps_none():
    params = {"a": jnp.ones((3, 1)), "b": None, "c": jnp.ones(2)}
    updates = {"a": jmask.RowSparse([1], jnp.ones((1, 1)), (3, 1)), "b": None, "c": None}
    new = jmask.apply_updates(params, updates)
    assert new["a"].ravel().tolist() == [1, 2, 1]
    assert new["b"] is None
    assert new["c"].tolist() == [1, 1]


# --- random chains ------------------------------------------------------------------------
#
# A chain is a list of parts: those of optax with some settings, and functions of gradients and
# parameters drawn from a table that has what is row-local and what is not. Whether a chain is
# row-local is not known here: what `lazy` accepts must equal the dense update, and the step of
# `apply_gradients`, and what it refuses must be refused by name.

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
    jax.lax.platform_dependent(u, rocm=lambda u: u, default=lambda u: 2 * u);
    jnp.where(u > 0, u, 0.1 * p); jnp.ones_like(u); u.astype(jnp.bfloat16).astype(u.dtype);
    jax.jit(lambda u, p, s: u * jnp.abs(p) + s * u)(u, p, s);
    u * jnp.concatenate([jnp.ones_like(u), 2 * jnp.ones_like(p)], -1).sum(-1, keepdims=True)
""")
# Where rows mix; columns of numbers are as many as there are rows.
REFUSED = functions("u, p, s", globals())("""
    u * jnp.linalg.norm(p.ravel()); u - jnp.mean(u); u / (1 + jnp.max(jnp.abs(u))); u / u.size;
    u * column(jnp.arange(u.shape[0]), u); jnp.cumsum(u, 0); jnp.sort(u, 0); u[::-1];
    u[:1] * u; u * u[1:].sum(); jnp.concatenate(jnp.split(u, [1], 0)[::-1], 0);
    u + jax.random.normal(jax.random.key(0), u.shape);
    jax.lax.cond(p.max() > 0, lambda: u, lambda: -u)
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


def is_accepted(parts):
    """Whether `lazy` takes the chain; if so it is exact."""
    try:
        with warnings.catch_warnings(action="ignore", category=jmask.StorageFallbackWarning):
            check(built(parts), assert_near, [random_gradient(1)])
    except ValueError as error:
        if "jmask.lazy cannot wrap" not in str(error):
            raise
        return False
    return True


@few_or_many(4, 120)
def test_random_chains(count):
    @settings(max_examples=count)
    @given(chains())
    def run(parts):
        is_accepted(parts)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAVES)
def test_each_alone(name):
    """What is row-local alone must not be refused, and what mixes rows must be."""
    assert is_accepted([(name, "optax.tree.norm(u)")]) == (name in ACCEPTED)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_each_part_alone(name):
    assert is_accepted([(name,)]) == (name != "scale_by_trust_ratio()")
