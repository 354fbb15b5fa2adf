"""`lazy(inner)` for all of optax: exact on touched rows, nothing else moves, or refused.

Also: un-lifted transformations beside `lazy` are exact or raise, never silently wrong."""

import functools
import inspect
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests import optax_cases as cases
from tests.compiled_step import with_optax
from tests.oracle import assert_close, densified, is_row_sparse, other_rows, touched_rows
from tests.stored_tables import bits

pytestmark = [
    pytest.mark.dtype_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]

# Numbers of rows that tell the tables apart, and from every other dimension.
SHAPES = {"table": (12, 3), "other": (9, 2, 2), "dense": (3, 2)}
IDS = {"table": [3, 1, 3, 7, -1, 12], "other": [8, 0]}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()
    }


def random_gradient(seed):
    rng = np.random.default_rng(seed)
    gradient = random_tree(seed)
    for name, ids in IDS.items():
        values = rng.normal(size=(len(ids), *SHAPES[name][1:]))
        gradient[name] = jmask.RowSparse(ids, jnp.float32(values), SHAPES[name])
    return gradient


PARAMS = random_tree(0)


def table_of(leaf):
    """Which table a state array holds rows of, by its number of rows."""
    sizes = {SHAPES[name][0]: name for name in IDS}
    return sizes.get(leaf.shape[0]) if leaf.ndim else None


def assert_rows(new, dense, old, gradient, name):
    """Touched rows as in the dense update, the others bit for bit as before."""
    assert new.dtype == old.dtype
    # jit keeps more digits of bfloat16 intermediates than eager operations do.
    low = any(x.dtype == jnp.bfloat16 for x in (new, dense))
    touched, others = touched_rows(gradient), other_rows(gradient)
    np.testing.assert_array_equal(bits(new)[others], bits(old)[others], err_msg=name)
    new, dense, old = (np.asarray(x, np.float64) for x in (new, dense, old))
    np.testing.assert_allclose(
        new[touched], dense[touched], rtol=1e-2 if low else 2e-6, atol=1e-7, err_msg=name
    )


def steps_of(inner, wrap, **extra):
    """The lazy and the dense step of a transformation, each to be compiled once."""
    lifted = jmask.lazy(inner)
    inner = optax.with_extra_args_support(inner)

    def lazy_step(gradient, state, params):
        updates, state = lifted.update(gradient, state, params, **extra)
        return optax.apply_updates(params, updates), state, updates

    return wrap(lazy_step), wrap(functools.partial(with_optax, inner, **extra))


def check_step(steps, gradient, state, params):
    """One lazy step against one dense step from the same place; returns the lazy one."""
    lazy_step, dense_step = steps
    new, new_state, updates = lazy_step(gradient, state, params)
    dense, dense_state = dense_step(densified(gradient), state, params)

    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    for name in SHAPES:
        if is_row_sparse(gradient[name]):
            assert is_row_sparse(updates[name])
            assert_rows(new[name], dense[name], params[name], gradient[name], name)
        else:
            np.testing.assert_allclose(new[name], dense[name], rtol=2e-6, atol=1e-7)
    others = map(jax.tree.leaves, (dense_state, state))
    leaves = zip(jax.tree.leaves_with_path(new_state), *others, strict=True)
    for (path, leaf), dense_leaf, old in leaves:
        name = f"state{jax.tree_util.keystr(path)}"
        table = table_of(leaf)
        if table is not None and is_row_sparse(gradient[table]):
            assert_rows(leaf, dense_leaf, old, gradient[table], name)
        else:
            np.testing.assert_allclose(leaf, dense_leaf, rtol=1e-5, err_msg=name)
    return new, new_state


# All are run under jit; eagerly, which compiles every operation by itself, every sixth.
LIFTED = [*cases.ROW_LOCAL, *cases.CHAINS]
RUNS = [(name, jax.jit) for name in LIFTED]
RUNS += [pytest.param(name, lambda f: f, marks=pytest.mark.slow) for name in LIFTED[::6]]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "wrap"),
    RUNS,
    ids=[f"{name}, jit" for name in LIFTED] + [f"{name}, eager" for name in LIFTED[::6]],
)
def test_equals_the_dense_update_on_touched_rows(name, wrap):
    inner = (cases.ROW_LOCAL | cases.CHAINS)[name]()
    extra = cases.extra_args(name, None)
    params = PARAMS
    state = jmask.lazy(inner).init(params)
    assert jax.tree.structure(state) == jax.tree.structure(inner.init(params))
    # A dense step first: no state is at its initial value, and runs can switch.
    dense = optax.with_extra_args_support(inner)
    updates, state = dense.update(random_tree(5), state, params, **extra)
    params = optax.apply_updates(params, updates)
    # Bit for bit: adding an update of zeros would turn -0.0 into 0.
    params["table"] = params["table"].at[5].set(-0.0)
    steps = steps_of(inner, wrap, **extra)
    for seed in (1, 2):
        params, state = check_step(steps, random_gradient(seed), state, params)
    # And back to dense gradients.
    dense.update(random_tree(6), state, params, **extra)


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
            assert_rows(params[key], dense[key], PARAMS[key], gradient[key], key)
        else:
            np.testing.assert_allclose(params[key], dense[key], rtol=1e-5)


by_name = lambda tree: {name: "b" if name == "dense" else "a" for name in tree}


class TestComposition:
    def test_lazy_inside_partition_and_masked(self):
        labels = {"table": "sparse", "other": "sparse", "dense": "dense"}
        for param_labels in (labels, lambda tree: labels):
            tx = optax.partition(
                {"sparse": jmask.lazy(optax.adam(0.1)), "dense": optax.sgd(0.1)}, param_labels
            )
            self.check_first_step(tx)
        mask = {"table": True, "other": True, "dense": False}
        self.check_first_step(
            optax.chain(
                optax.masked(jmask.lazy(optax.adam(0.1)), mask),
                optax.masked(optax.sgd(0.1), jax.tree.map(lambda keep: not keep, mask)),
            )
        )

    def test_partition_by_leaves_belongs_inside(self):
        """A label function mapped over gradients sees inside their nodes: it raises."""
        label = lambda tree: jax.tree.map(lambda _: "all", tree)
        gradient = random_gradient(1)
        outside = optax.partition({"all": jmask.lazy(optax.adam(0.1))}, label)
        with pytest.raises(ValueError, match="RowSparse"):
            outside.update(gradient, outside.init(PARAMS), PARAMS)
        self.check_first_step(
            jmask.lazy(optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, by_name))
        )

    @staticmethod
    def check_first_step(tx):
        gradient = random_gradient(1)
        updates, _ = jax.jit(tx.update)(gradient, tx.init(PARAMS), PARAMS)
        new = optax.apply_updates(PARAMS, updates)
        for name in IDS:
            moved = (new[name] != PARAMS[name]).reshape(SHAPES[name][0], -1).any(1)
            assert np.flatnonzero(moved).tolist() == touched_rows(gradient[name]).tolist()
        np.testing.assert_allclose(
            new["dense"], PARAMS["dense"] - 0.1 * gradient["dense"], rtol=1e-6
        )

    def test_lazy_after_lazy(self):
        two = optax.chain(jmask.lazy(optax.clip(0.1)), jmask.lazy(optax.sgd(0.1)))
        one = jmask.lazy(optax.chain(optax.clip(0.1), optax.sgd(0.1)))
        results = [densified(first_update(tx, random_gradient(1))[0]) for tx in (two, one)]
        chex.assert_trees_all_equal(*results)

    def test_inject_hyperparams_around_lazy(self):
        """The learning rate is a number in the state that the caller may set."""
        tx = optax.inject_hyperparams(
            lambda learning_rate: jmask.lazy(optax.sgd(learning_rate))
        )(learning_rate=0.1)
        gradient, state = random_gradient(1), tx.init(PARAMS)
        state.hyperparams["learning_rate"] = jnp.float32(0.5)
        updates, _ = tx.update(gradient, state, PARAMS)
        expected = -0.5 * gradient["table"].coalesce().values
        np.testing.assert_allclose(updates["table"].values, expected)

    def test_without_params(self):
        gradient, tx = random_gradient(1), jmask.lazy(optax.adam(0.1))
        with_params, _ = first_update(tx, gradient)
        without, _ = tx.update(gradient, tx.init(PARAMS))
        chex.assert_trees_all_equal(densified(with_params), densified(without))


def test_dense_gradients_go_to_inner():
    inner, gradient = optax.lamb(0.1), random_tree(1)
    updates = (first_update(tx, gradient)[0] for tx in (jmask.lazy(inner), inner))
    chex.assert_trees_all_equal(*updates)


def test_densify_equals_optax_on_the_dense_gradient():
    inner, gradient = optax.adamw(0.1), random_gradient(1)
    updates, _ = first_update(optax.chain(jmask.densify(), inner), gradient)
    expected, _ = first_update(inner, densified(gradient))
    assert_close(updates, expected, rtol=1e-6)


def test_apply_updates_keeps_none():
    params = {"a": jnp.ones((3, 1)), "b": None, "c": jnp.ones(2)}
    updates = {"a": jmask.RowSparse([1], jnp.ones((1, 1)), (3, 1)), "b": None, "c": None}
    new = jmask.apply_updates(params, updates)
    assert new["a"].ravel().tolist() == [1, 2, 1]
    assert new["b"] is None
    assert new["c"].tolist() == [1, 1]
