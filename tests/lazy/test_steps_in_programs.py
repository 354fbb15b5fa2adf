"""Lazy transformations inside of others: `apply_gradients` is `update` and `apply_updates`.

Where nothing else looks at the updates of a table it is updated in one pass, whatever the
transformation is part of. Programs are drawn at random; what each kind of them takes is in a
table.
"""

import functools
import random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.compilations import no_tracer_is_kept
from tests.compiled_step import with_optax
from tests.expressions import functions
from tests.oracle import assert_close
from tests.stored_tables import STEPS

pytestmark = [pytest.mark.sampled, pytest.mark.dtype_promotion]

V, D = 40, 6
SHAPES = {"t": (V, D), "u": (V, D), "w": (D,)}


def gradient(kind, shape, dtype, rng, sizes=(1, 5, 60)):
    ids = rng.integers(-1, V + 1, rng.choice(sizes))
    values = jnp.asarray(rng.normal(size=(len(ids), *shape[1:])), dtype)
    if kind == "rows":
        return jmask.RowSparse(ids, values, shape)
    if kind == "masked":
        ids = np.unique(np.clip(ids, 0, V - 1))
        rows = jmask.RowSparse(ids, values[: len(ids)], shape, coalesced=True)
        return jmask.MaskedTensor(rows, jnp.asarray(rng.random(rows.values.shape) < 0.7))
    if kind == "stack":
        return jmask.RowSparse(ids, values, (4, V // 4, *shape[1:]), leading=2)
    return jnp.asarray(rng.normal(size=shape), dtype)


# What is lifted, and what is made of others.
EACH = functions("", {**vars(jmask), **globals()})("""
    adam(0.1); adagrad(0.1); sgd(0.1); sgd(0.1, momentum=0.9); rowwise_adagrad(0.1); ftrl(0.1);
    rowwise_adam(0.1); lazy(optax.adamw(0.1)); lazy(optax.lion(0.1)); lazy(optax.scale(0.5));
    lazy(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)));
    optax.inject_hyperparams(adam)(learning_rate=0.1);
    optax.inject_hyperparams(sgd)(learning_rate=optax.linear_schedule(0.1, 0.01, 5))
""")
# It looks at updates, and it at a parameter.
halved = optax.stateless(lambda u, p: jmask.tree.scale(0.5, u))
reading = optax.stateless(
    lambda u, p: jmask.tree.map(lambda x, y: jmask.tree.scale(1 + 0 * y.sum(), x), u, p)
)
CLIP = jmask.lazy(optax.clip_by_global_norm(0.5))
OF_OTHERS = functions("x, y, labels", {**vars(jmask), **globals()})("""
    optax.chain(x, ema(0.9)); optax.chain(x, touched()); optax.chain(x, max_row_norm(1.0));
    optax.chain(clip_by_row_norm(0.5), x); optax.chain(drop_nonfinite_rows(), x);
    optax.chain(x, lazy(optax.scale(0.5))); optax.chain(x, CLIP);
    optax.named_chain(("x", x), ("y", y));
    optax.partition({"a": x, "b": y}, labels); skip_nonfinite(x);
    optax.partition({"a": x, "b": optax.set_to_zero()}, labels); optax.chain(x, halved);
    optax.chain(x, reading); optax.masked(x, {"t": True, "u": True, "w": True})
""")


def drawn(draw, depth, labels):
    if not depth:
        return EACH[draw.choice(sorted(EACH))]()
    x, y = (drawn(draw, depth - 1, labels) for _ in range(2))
    return OF_OTHERS[draw.choice(sorted(OF_OTHERS))](x, y, labels)


@pytest.mark.parametrize("seed", range(120))
def test_random_programs(seed):
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    kinds = {"t": "rows", "u": "rows", "w": "dense"}
    if draw.random() < 0.5:
        kinds |= {name: draw.choice(["rows", "dense", "masked", "stack"]) for name in "tu"}
    dtype = draw.choice([jnp.float32] * 5 + [jnp.bfloat16])
    grads = [
        {name: gradient(kinds[name], shape, dtype, rng) for name, shape in SHAPES.items()}
        for _ in range(2)
    ]
    rows_of = lambda g: [x.shape for x in jax.tree.leaves(g)]
    most = max(grads, key=rows_of)
    if any(rows_of(g) != rows_of(most) for g in grads):
        grads = [most, most]  # for `multi_steps`
    params = jmask.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), dtype), grads[0])
    labels = {name: draw.choice("ab") for name in SHAPES}
    tx = drawn(draw, draw.choice([1, 2, 3]), labels)
    if draw.random() < 0.2:
        tx = jmask.multi_steps(tx, 2, like=most)
    start = params, tx.init(params)
    both = []
    for way in STEPS.values():
        new, state = start
        step = jax.jit(lambda g, state, params, way=way: way(tx, g, state, params))
        for g in grads:
            new, state = step(g, state, new)
        both.append((new, state))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == jnp.float32 else {"rtol": 2e-2}
    chex.assert_trees_all_equal_shapes_and_dtypes(*both)
    assert_close(*both, **tolerance)


# --- which take one pass -------------------------------------------------------------------

stepped = lambda tx: functools.partial(jmask.apply_gradients, tx)


def inside(call):
    """A transformation whose step is traced in `call`."""

    def build(tx):
        return optax.GradientTransformation(
            tx.init, lambda g, s, p: call(lambda g: tx.update(g, s, p), g)
        )

    return build


in_jit = inside(lambda f, g: jax.jit(f)(g))
in_branch = inside(lambda f, g: jax.lax.cond(g["w"][0] > 0, f, f, g))
in_pairs = inside(
    lambda f, g: jax.tree.map(lambda x: x[0], jax.vmap(lambda _: f(g))(jnp.ones(2)))
)
twice = optax.GradientTransformation(
    jmask.adam(0.1).init, lambda g, s, p: (g, jmask.adam(0.1).update(g, s, p)[1])
)


def and_then(change):
    """The optimizer BOTH, whose updates are changed."""

    def update(updates, state, params=None):
        updates, new = BOTH.update(updates, state[0], params)
        return change(updates, params), (new, updates["t"].values.sum())

    return optax.GradientTransformation(lambda p: (BOTH.init(p), jnp.zeros(())), update)


plus = jmask.lazy(
    optax.GradientTransformationExtraArgs(
        lambda params: (),
        lambda updates, state, params, *, more: (
            jax.tree.map(lambda x: x + more, updates),
            state,
        ),
    )
)


class Halving:
    """An update that is no function and has no hash, as a module with arrays."""

    __hash__ = None

    def __eq__(self, other):
        raise AssertionError

    def __call__(self, updates, state, params=None, **extra_args):
        return jax.tree.map(lambda x: 0.5 * x, updates), state


halving = optax.GradientTransformationExtraArgs(optax.init_empty_state, Halving())
factors = []
by_the_last = jmask.lazy(optax.stateless(lambda u, p: optax.tree.scale(factors[-1], u)))


def by_factors(updates, state, params=None):
    """The optimizer BOTH behind two steps of one that reads what Python changes."""
    for factor in (2.0, 0.1):
        factors.append(factor)
        updates, _ = by_the_last.update(updates, optax.EmptyState(), params)
    return BOTH.update(updates, state, params)


def by_the_count(updates, state, params=None):
    """The optimizer BOTH, and a step that reads its new state."""
    updates, new = BOTH.update(updates, state, params)
    return plus.update(updates, (), params, more=new.count)[0], new


# Its step is of no use.
forgotten = optax.stateless(
    lambda g, p: (jmask.sgd(0.1).update(g, jmask.sgd(0.1).init(p), p), g)[1]
)
BOTH, LABELS = jmask.adam(0.1), {"t": "a", "u": "a", "w": "b"}
IN_ONE_PASS = functions("", {**vars(jmask), **globals()})("""
    optax.partition({"a": BOTH, "b": optax.adam(0.1)}, LABELS); optax.chain(BOTH, ema(0.9));
    optax.partition({"a": optax.chain(BOTH, touched()), "b": optax.adam(0.1)}, LABELS);
    optax.chain(BOTH, ema(0.9), touched()); optax.chain(lazy(optax.trace(0.9)), BOTH);
    optax.chain(clip_by_row_norm(0.5), BOTH); optax.chain(BOTH, max_row_norm(1.0));
    type(BOTH)(*BOTH); skip_nonfinite(BOTH);
    optax.inject_hyperparams(adam)(learning_rate=0.1); optax.chain(forgotten, BOTH);
    skip_nonfinite(optax.inject_hyperparams(adagrad)(learning_rate=0.1));
    optax.chain(optax.inject_hyperparams(adam)(learning_rate=0.1), ema(0.9));
    optax.inject_hyperparams(lambda rate: optax.chain(sgd(rate), ema(rate)))(rate=0.1);
    optax.inject_hyperparams(lambda b: lazy(optax.adam(0.1, b, 1 - b)))(b=0.8);
    optax.partition({"a": deferred(optax.adamw(0.1)), "b": optax.adam(0.1)}, LABELS);
    skip_nonfinite(optax.partition({"a": BOTH, "b": optax.adam(0.1)}, LABELS));
    optax.chain(lazy(halving), BOTH); optax.GradientTransformation(BOTH.init, by_factors);
    optax.chain(optax.identity(), optax.masked(BOTH, {"t": True, "u": True, "w": True}))
""")
# Updates, or a table, are looked at; or the step is part of something else.
IN_SEVERAL = functions("", {**vars(jmask), **globals()})("""
    optax.chain(BOTH, halved); optax.chain(BOTH, reading); in_jit(BOTH); in_branch(BOTH);
    in_pairs(BOTH); optax.chain(BOTH, twice); and_then(lambda u, p: u);
    and_then(lambda u, p: {**u, "u": u["t"]}); and_then(lambda u, p: {**u, "t": u["u"]});
    and_then(lambda u, p: {**u, "t": u["u"], "u": u["t"]});
    and_then(lambda u, p: plus.update(u, (), p, more=u["t"].values.sum())[0]);
    optax.GradientTransformation(BOTH.init, by_the_count)
""")


def example():
    kinds, rng = {"t": "rows", "u": "rows", "w": "dense"}, np.random.default_rng(0)
    grads = {k: gradient(kinds[k], x, "float32", rng, [5]) for k, x in SHAPES.items()}
    return grads, {name: jnp.ones(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("name", IN_ONE_PASS | IN_SEVERAL)
def test_which_take_one_pass(name):
    tx, (grads, params) = (IN_ONE_PASS | IN_SEVERAL)[name](), example()
    step = stepped(tx)
    given = grads, tx.init(params), params
    found = str(jax.make_jaxpr(step)(*given)).count("jmask_update_rows[")
    assert found == (2 if name in IN_ONE_PASS else 0)
    assert_close(jax.jit(step)(*given), jax.jit(lambda *given: with_optax(tx, *given))(*given))


@pytest.mark.parametrize("name", IN_ONE_PASS | IN_SEVERAL)
def test_no_tracer_is_kept(name):
    tx, (grads, params) = (IN_ONE_PASS | IN_SEVERAL)[name](), example()
    with no_tracer_is_kept():
        jax.jit(lambda *given: jmask.apply_gradients(tx, *given))(
            grads, tx.init(params), params
        )


def test_a_state_with_functions():
    """Of a module, which comes and goes where the step is part of a program."""
    grads, params = example()

    def update(updates, state, params=None):
        updates, new = BOTH.update(updates, state["adam"], params)
        return updates | {"w": state["function"](updates["w"])}, state | {"adam": new}

    def stepped_once(step):
        init = lambda params: {"function": jnp.tanh, "adam": BOTH.init(params), "name": "w"}
        tx = optax.GradientTransformation(init, update)
        params_now, state = step(tx, grads, tx.init(params), params)
        assert (state["function"], state["name"]) == (jnp.tanh, "w")
        return params_now, state["adam"]

    assert_close(*(jax.jit(functools.partial(stepped_once, way))() for way in STEPS.values()))


def test_updates_that_do_not_fit_are_refused_by_name():
    tx = optax.stateless(lambda u, p: {**u, "w": u["w"][:2]})
    grads, params = example()
    with pytest.raises(ValueError, match=r"updates\['w'\].* of shape \(2,\) does not fit"):
        jax.jit(lambda *given: jmask.apply_gradients(tx, *given))(
            grads, tx.init(params), params
        )


def test_scopes_of_users_are_kept():
    """What an operation is called in a profile is what it is called where it was traced."""

    def scoped(updates, state, params=None):
        with jax.named_scope("ours"):
            return BOTH.update(updates, state, params)

    tx, (grads, params) = optax.GradientTransformation(BOTH.init, scoped), example()
    given = grads, tx.init(params), params
    program = jax.jit(stepped(tx)).lower(*given).as_text(debug_info=True)
    assert "jmask.apply_gradients/ours/jmask.lazy.update/jmask_update_rows" in program
