"""The proof of `lazy`: an update that counts the rows of a table, in whatever way, is refused.

Run on the touched rows it would compute with their number in place of that of the table.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmask
from jmask._lazy.row_local import _EXACT
from tests.expressions import functions

pytestmark = pytest.mark.sampled

V, N = 12, 2
TABLE = jax.ShapeDtypeStruct((V, 3), jnp.float32)
ROWS = jax.eval_shape(lambda: jmask.RowSparse.zeros((V, 3), nse=N))
KEY = np.zeros(2, np.uint32)
NUMBER = "`dim_as_value` depends on the number of rows"
count = lambda x: x.shape[0]
is_large = lambda x: count(x) > 5
looped = lambda x: lax.while_loop(lambda c: c < count(x), lambda c: c + 1.0, 0.0)


def called_back(x):
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.pure_callback(lambda: np.float32(count(x)), scalar)


def chosen_operand(x):
    one, other = jnp.sum(x), jnp.sum(x * x)
    return one if is_large(x) else other


chosen_axis = lambda x: lax.transpose(jnp.tri(2), (0, 1) if is_large(x) else (1, 0))[0, 1]


def solved(number):
    """Solve by programs that are parameters of the equation."""
    scaled = lambda x: lax.cond(x[0] > 0, lambda: x * number, lambda: x)
    return lax.custom_linear_solve(scaled, jnp.ones(3), lambda _, b: b / number, symmetric=True)


@jax.custom_jvp
def by_its_own_rule(x):
    return x * count(x)


by_its_own_rule.defjvp(lambda primals, tangents: (by_its_own_rule(*primals), *tangents))

# What an update multiplies a gradient by, and what the error says of it.
COUNTING = {
    "weighted mean": (lambda x: jnp.average(x, weights=jnp.ones_like(x)), "reduce_sum"),
    "mean where": (lambda x: jnp.mean(x, where=jnp.ones_like(x, bool)), "reduce_sum"),
    "sum of ones": (lambda x: 1 / jnp.sum(jnp.ones_like(x)), "reduce_sum"),
    "ones where": (lambda x: jnp.sum(jnp.where(jnp.ones_like(x) > 0, 1, 0)), "reduce_sum"),
    "product of ones": (lambda x: jnp.ones(count(x)) @ jnp.ones(count(x)), "dot_general"),
    "sum of half as many": (lambda x: jnp.ones(count(x) // 2).sum(), "reduce_sum"),
    "half as many": (lambda x: jnp.zeros(count(x) // 2).sum(), "an array of floordiv"),
    "running sum": (lambda x: jnp.cumsum(jnp.ones(count(x)))[-1], "`cumsum` mixes rows"),
    "array": (lambda x: jnp.asarray([count(x)]), NUMBER),
    "scalar of numpy": (lambda x: np.float32(count(x)), "depends on the number of rows"),
    "jitted literal": (lambda x: jax.jit(lambda y: y * count(x))(2.0), NUMBER),
    "checkpoint": (jax.checkpoint(lambda x: 1.0 / x.size), NUMBER),
    "custom rule": (by_its_own_rule, NUMBER),
    "branch": (lambda x: lax.cond(x.sum() > 0, lambda: 1.0 / count(x), lambda: 1.0), NUMBER),
    "branch by platform": (
        lambda x: lax.platform_dependent(x, rocm=lambda x: 1.0 / count(x), default=jnp.sum),
        NUMBER,
    ),
    "fori_loop": (lambda x: lax.fori_loop(0, count(x), lambda _, c: c + 1.0, 0.0), NUMBER),
    "while_loop": (looped, NUMBER),
    "scan": (lambda x: lax.scan(lambda c, _: (c + 1, None), 0, jnp.zeros(count(x)))[0], "scan"),
    "callback": (called_back, "`pure_callback` calls Python, which may count rows"),
    "callback of no rows": (
        lambda _: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((), "f"), 2.0),
        "`pure_callback` calls Python",
    ),
    "positions": (lambda x: jnp.arange(count(x)).sum(), "apart by position"),
    "last position": (lambda x: jnp.linspace(0, 1, count(x))[1], "the number of rows"),
    "number of keys": (
        lambda x: jax.random.split(KEY, count(x))[0, 0],
        "random_split|position",
    ),
    "seed": (lambda x: jax.random.normal(jax.random.key(count(x))), NUMBER),
    "noise": (lambda x: jax.random.normal(KEY, x.shape), "apart by position"),
    "power": (lambda x: (2 * x) ** (count(x) % 7), "depends on the number of rows"),
    "solution": (lambda x: solved(count(x)), "depends on the number"),
    "dtype": (lambda x: x.astype("float16" if is_large(x) else "bfloat16"), "'rows0' > '5'"),
    "index": (lambda x: lax.slice(jnp.arange(20.0), (count(x),), (count(x) + 1,)), "number"),
    "axis": (chosen_axis, "'rows0' > '5'"),
    "operand": (chosen_operand, "'rows0' > '5'"),
    "operation": (lambda x: x + x if is_large(x) else x * x, "'rows0' > '5'"),
    "equal": (lambda x: 2.0 if count(x) == V else 1.0, "a table of this size"),
    "shape": (lambda x: x if x.shape == (V, 3) else 1.0, "a table of this size"),
    "square": (lambda x: 2 * x if count(x) == 4 * x.shape[1] else x, "a table of this size"),
    "fixed rows": (lambda x: jnp.ones((V, 3)) * np.arange(V)[:, None], "incompatible shapes"),
}


def traced(update, gradient, init=optax.init_empty_state):
    tx = jmask.lazy(optax.GradientTransformation(init, update))
    return jax.eval_shape(lambda g: tx.update(g, tx.init(TABLE), None), gradient)


def times(factor):
    def update(updates, state, params=None):
        return jax.tree.map(lambda x: (x * factor(x)).astype(x.dtype), updates), state

    return update


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.rank_promotion
@pytest.mark.dtype_promotion
def test_counting_rows_is_refused(name):
    factor, reason = COUNTING[name]
    with pytest.raises(ValueError, match=rf"jmask\.lazy cannot wrap.*{reason}"):
        traced(times(factor), ROWS)


# The state is two scalars.
NEW_STATES = functions("x, s", globals())("""
    (jnp.float32(count(x)), s[1]); (jnp.ones(count(x)).sum(), s[1]);
    s if is_large(x) else s[::-1]; (jnp.ones(count(x)), s[1])
""")


@pytest.mark.parametrize("name", NEW_STATES)
def test_counting_rows_in_the_state_is_refused(name):
    update = lambda updates, state, params=None: (updates, NEW_STATES[name](updates, state))
    with pytest.raises(ValueError, match=r"number of rows|would count"):
        traced(update, ROWS, lambda _: (jnp.zeros(()), jnp.zeros(())))


ACCEPTED = functions("x", globals())("""
    jnp.ones_like(x); 1 / (1 + jnp.zeros((count(x), 1))); jnp.sqrt(jnp.sum(x * x));
    jax.random.normal(KEY, (3,)); 2.0 if count(x) == N else 1.0; 2.0 if count(x) > 0 else 1.0;
    jnp.linalg.solve(jnp.eye(2) * jnp.sum(x * x), jnp.ones(2))[0];
    lax.fori_loop(0, 3, lambda _, c: c * 0.5, 1.0); solved(3.0);
    lax.while_loop(lambda c: c > 0.1, lambda c: c * 0.5, jnp.sum(x));
    jnp.mean(x, axis=1, keepdims=True)
""")


@pytest.mark.parametrize("name", ACCEPTED)
@pytest.mark.rank_promotion
def test_what_does_not_count_rows_is_accepted(name):
    updates, _ = traced(times(ACCEPTED[name]), ROWS)
    assert updates.nse == N


# Functions of a gradient, a parameter of its shape, that merge rows with other axes.
MERGING = functions("u, p", globals())("""
    u / (1 + jnp.vdot(u, u)); u * optax.tree.vdot(u, p); u / (1 + jnp.linalg.vector_norm(u));
    (2 * u.ravel() + u.ravel()).reshape(u.shape);
    jnp.concatenate(jnp.split(u, [1], 1)[::-1], 1);
    jnp.stack([u, p], 1).max(1); jnp.stack([p, u]).sum(0); jnp.stack([u, 2 * u], -1)[..., 1];
    sum(jnp.split(jnp.concatenate([u, p], 1), 2, 1));
    (u[None, :, None] * 2).reshape(-1, 1).reshape(u.shape);
    u if u.shape[0] == 4 else u; 2 * u if u.shape[0] == 9 else u; u.at[..., 0].multiply(-1);
    u.at[..., 0].set(p[..., 0]); u.at[:, 0].add(u[:, -1]); u.at[..., :1].min(p[..., :1]);
    u.at[:, jnp.array([0, -1])].apply(jnp.sin); u.T.at[:1].add(p.T[:1]).T;
    u.at[..., 0].multiply(-1) / optax.tree.norm(u)
""")


@pytest.mark.parametrize("shape", [(12, 3), (2, 3), (3, 2), (1, 3), (4, 1), (2, 2), (4, 2, 2)])
@pytest.mark.parametrize("name", MERGING)
def test_rows_merged_with_other_axes(name, shape):
    tx = optax.stateless(lambda u, p: jax.tree.map(MERGING[name], u, p))
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=shape), jnp.float32)
    rows = jnp.asarray(rng.normal(size=(4, *shape[1:])), jnp.float32)
    gradient = jmask.RowSparse([0, shape[0] - 1, 0, -1], rows, shape)
    updates, _ = jmask.lazy(tx).update(gradient, optax.EmptyState(), table)
    expected, _ = tx.update(gradient.todense(), optax.EmptyState(), table)
    touched = [0, shape[0] - 1]
    result = updates.todense()
    np.testing.assert_allclose(result[np.array(touched)], expected[np.array(touched)], 1e-5)


# By the reason.
MERGING_OTHERS = {
    "would count in it": "u * jnp.vdot(p, p)",
    "merges rows with other axes": """
        (u.T.ravel() * u.ravel()).reshape(u.shape); u.ravel().reshape(u.shape[::-1]).T;
        u * jnp.vdot(u.T.ravel(), u.ravel()); u * jnp.sum(u.T.reshape(-1) * p.T.reshape(-1));
        (u.T.ravel() * p.T.ravel()).reshape(u.shape[::-1]).T
    """,
    "moves rows": "u.ravel()[:, None] * jnp.ones((1, 3))",
    "writes to rows": "u.at[0].set(0.0); u.at[1, :2].multiply(2.0)",
    "mixes rows": "jnp.cumsum(u.ravel()).reshape(u.shape)",
    "joins them to others": "jnp.split(jnp.concatenate([u, p]), 2)[0]",
    "parts rows": "u * jnp.split(u, [1])[0]; u[1:]; u * u[:1]; u[:2]; jnp.flip(u * 2)",
    "by position|number of rows": """
        u[::2]; u[::-1];
        jnp.concatenate([u, jnp.arange(u.size, dtype=u.dtype).reshape(u.shape)], 1)[:, :3]
    """,
    "combines rows": "u * jnp.max(u.ravel())",
}


@pytest.mark.parametrize("shape", [(12, 3), (3, 3), (4, 4)])
@pytest.mark.parametrize("reason", MERGING_OTHERS)
def test_what_is_made_of_merged_rows_is_refused(reason, shape):
    gradient = jmask.RowSparse([0, 1, 1], jnp.ones((3, *shape[1:])), shape)
    for function in functions("u, p", globals())(MERGING_OTHERS[reason]).values():
        tx = jmask.lazy(optax.stateless(lambda u, p, f=function: jax.tree.map(f, u, p)))
        with pytest.raises(ValueError, match=rf"jmask\.lazy cannot wrap.*({reason})"):
            tx.update(gradient, optax.EmptyState(), jnp.ones(shape))


@pytest.mark.parametrize(("rows", "size"), [(0, 0), (0, 2), (1, 0), (1, 2), (12, 1)])
@pytest.mark.dtype_promotion
def test_tables_of_few_rows(rows, size):
    """Of arrays with an axis of 0 or 1 JAX leaves operations out."""
    table = jax.ShapeDtypeStruct((rows, 3), jnp.float32)
    ids, values = jnp.zeros(size, int), jnp.zeros((size, 3))
    gradient = jax.eval_shape(lambda: jmask.RowSparse(ids, values, (rows, 3)))
    for inner in (optax.radam(0.1), optax.adagrad(0.1), optax.centralize()):
        tx = jmask.lazy(inner)
        jax.eval_shape(lambda g, p, tx=tx: tx.update(g, tx.init(p), p), gradient, table)


def test_a_dense_leaf_may_be_as_large_as_the_table():
    """One jitted function, read for rows of a table and for an array of the same shape."""
    norm = jax.jit(lambda x: jnp.sqrt(jnp.sum(x * x)))

    def update(updates, state, params=None):
        table, dense = updates
        return (table / norm(table), dense / norm(dense) * jnp.mean(dense)), state

    tx = jmask.lazy(optax.GradientTransformation(optax.init_empty_state, update))
    jax.eval_shape(lambda g: tx.update(g, optax.EmptyState(), None), (ROWS, TABLE))


SCALE = np.float32(2)
# Accepted, refused, and the number of rows in the gradient: V, or the slots would not fit.
EXTRA_ARGS = {
    "for each slot": ({"scale": SCALE}, {"scale": np.ones((V, 1), np.float32)}, V),
    "more": ({"scale": SCALE, "more": ()}, {"scale": SCALE, "more": (SCALE,)}, N),
    "a flag": ({"scale": SCALE, "more": False}, {"scale": SCALE, "more": True}, N),
}


@pytest.mark.parametrize("name", EXTRA_ARGS)
def test_what_is_verified_is_so_for_its_extra_arguments(name):
    def update(updates, state, params=None, *, scale, more=()):
        size = jnp.float32(count(updates)) if more else 1.0
        return updates * scale * size, state

    tx = jmask.lazy(optax.GradientTransformationExtraArgs(optax.init_empty_state, update))
    accepted, refused, size = EXTRA_ARGS[name]
    rows = jax.eval_shape(lambda: jmask.RowSparse.zeros((V, 3), nse=size))
    for _ in range(2):
        jax.eval_shape(lambda g: tx.update(g, optax.EmptyState(), None, **accepted), rows)
        with pytest.raises(ValueError, match=r"jmask\.lazy cannot wrap"):
            jax.eval_shape(lambda g: tx.update(g, optax.EmptyState(), None, **refused), rows)


@pytest.mark.dtype_promotion
def test_the_proof_transfers_nothing_implicitly():
    tx = jmask.lazy(optax.adam(0.1))
    with jax.transfer_guard("disallow"):
        jax.eval_shape(lambda g, p: tx.update(g, tx.init(p), p), ROWS, TABLE)


UNARY = {
    "abs": jnp.abs,
    "convert_element_type": lambda x: x.astype(jnp.float16),
    "is_finite": lax.is_finite,
    "neg": lax.neg,
    "not": lax.bitwise_not,
    "sign": lax.sign,
    "sqrt": lax.sqrt,
    "square": lax.square,
}
OF_BITS = {"and": lax.bitwise_and, "not": lax.bitwise_not, "or": lax.bitwise_or}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *(("bool", name) for name in OF_BITS),
        *itertools.product(["float32", "bfloat16"], sorted(_EXACT.keys() - OF_BITS.keys())),
    ],
)
def test_numpy_rounds_as_xla_does(dtype, name):
    """What is known of untouched rows is computed without compiling anything."""
    values = np.array([0, -0.0, 1, 3, 0.1, -7e-3, 1e20, np.inf, np.nan])
    function = (UNARY | OF_BITS).get(name) or getattr(lax, name)
    with np.errstate(all="ignore"):
        operands = [x.astype(dtype).ravel() for x in np.meshgrid(values, values)]
        operands = operands[:1] if name in UNARY else operands
        expected = function(*map(jnp.asarray, operands))
        found = [expected.dtype.type(_EXACT[name](*x)) for x in zip(*operands, strict=True)]
    np.testing.assert_array_equal(np.array(found, np.float32), np.float32(expected))


@pytest.mark.parametrize(
    ("wrap", "most"),
    [
        (jmask.lazy, 2),
        (lambda tx: jmask.skip_nonfinite(jmask.lazy(tx)), 2),
        (jmask.deferred, 2),
    ],
)
def test_a_step_traces_the_optimizer_twice_at_most(wrap, most):
    """Once as it is, and once with the number of rows open."""
    calls = []

    def update(updates, state, params=None):
        calls.append(updates)
        return jax.tree.map(lambda x: -x, updates), state

    tx = wrap(optax.GradientTransformation(optax.init_empty_state, update))
    params, rows = jnp.ones((V, 3)), jmask.RowSparse([1, 2], jnp.ones((2, 3)), (V, 3))
    state = tx.init(params)
    calls.clear()
    jax.eval_shape(lambda g, s, p: jmask.apply_gradients(tx, g, s, p), rows, state, params)
    assert len(calls) == most
