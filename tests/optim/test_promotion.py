"""Under `jax_numpy_dtype_promotion="strict"`: what jmask promotes it promotes in words.

The optimizers of optax that pass under it are lifted under it, those of jmask all pass, on
tables of 16 bits too; so do lookups, their gradients and the operations of jmask.
That no rank is promoted holds for all tests: see `conftest`.
"""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.autodiff.test_semantics_of_gradients import OPERATIONS
from tests.expressions import functions
from tests.optax_cases import NEEDS_VALUE, ROW_LOCAL
from tests.optimizers import NAMED as OPTIMIZERS
from tests.optimizers import NOT_LAZY
from tests.oracle import assert_close
from tests.stored_tables import STEPS, stepped

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]
rows = lambda dtype: jmask.RowSparse([1, 7, 1, -1], jnp.ones((4, 3), dtype), (50, 3))
COMMON = {"weight_decay": 0.1, "clip_gradient": 0.5, "rescale_grad": 0.5}
SCHEDULE = optax.linear_schedule(0.1, 0.2, 10)
MORE = functions("", {**vars(jmask), **globals()})("""
    sgd(0.1, **COMMON); adam(0.1, **COMMON, maximize=True); adam(SCHEDULE);
    adam(jnp.float32(0.1)); adam(0.1, mu_dtype=jnp.bfloat16); adamw(SCHEDULE, nesterov=True);
    adamw(0.1, lazy_update=False); rowwise_adam(0.1, **COMMON);
    adagrad(0.1, lr_decay=0.1, **COMMON); adagrad(0.1, lazy_update=False);
    rowwise_adagrad(0.1, lr_decay=0.1); ftrl(0.1, l1=0.1);
    optax.chain(densify(), optax.sgd(0.1))
""")
NAMED = OPTIMIZERS | {"not lazy": NOT_LAZY["not lazy"]}
NAMED |= {name: make() for name, make in MORE.items()}


def run(step, tx, dtype):
    """Two steps, eagerly and under jit."""
    params, grads = jnp.ones((50, 3), dtype), [rows(dtype)] * 2
    return [stepped(tx, params, grads, step, wrap)[0] for wrap in (lambda f: f, jax.jit)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", NAMED)
def test_named_optimizers(name, step, dtype):
    for params in run(step, NAMED[name], dtype):
        assert params.dtype == dtype
        with jax.numpy_dtype_promotion("standard"):
            (expected, _) = run(step, NAMED[name], dtype)
        assert_close(params, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", STEPS)
def test_64_bits_reach_no_table(step, dtype):
    """A schedule or a count may be wider than a table and its state, which stay as they are."""
    loss = lambda table: jnp.sum(table[jnp.array([1, 7], jnp.int32)])
    with jax.enable_x64(True):
        for tx in (*NAMED.values(), jmask.deferred(jmask.adam(SCHEDULE))):
            table = jnp.ones((50, 3), dtype)
            state = tx.init(table)
            take = lambda table, state, tx=tx: STEPS[step](
                tx, jmask.grad(loss)(table), state, table
            )
            chex.assert_trees_all_equal_shapes_and_dtypes(
                jax.eval_shape(take, table, state), (table, state)
            )


def test_counts_of_64_bits():
    """Where 64-bit numbers are enabled NumPy's and JAX's counts are of two dtypes."""
    with jax.enable_x64(True):
        x = jmask.masked_tensor(jnp.arange(6.0).reshape(3, 2), jnp.arange(6).reshape(3, 2) > 2)
        expected = x.to_tensor(0.0)
        sparse = ("coo", "csr", "row_sparse")
        for y in (x, *(jmask.cast_storage(x, source) for source in sparse)):
            for target in sparse:
                result = jmask.cast_storage(y, target).to_tensor(0.0)
                np.testing.assert_array_equal(result, expected)
        sparse = jmask.cast_storage(expected, "csr")
        product = jmask.numpy.dot(sparse, jnp.ones((2, 8)))
        np.testing.assert_array_equal(product, expected @ jnp.ones((2, 8)))

        def bags(offsets):
            return jmask.embedding_bag(
                expected, [0, 1, 2], offsets=offsets, include_last_offset=True
            )

        np.testing.assert_array_equal(jax.jit(bags)(np.array([0, 1, 3])), bags([0, 1, 3]))


def as_refused(stock):
    """What must be raised where the stock function is refused; nothing otherwise."""
    try:
        stock()
    except ValueError:
        return pytest.raises(ValueError, match="promotion")
    return contextlib.nullcontext()


def test_multi_steps():
    for step in STEPS:
        run(step, jmask.multi_steps(jmask.adagrad(0.1), 2, like=rows("float32")), "float32")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", [n for n in ROW_LOCAL if n not in NEEDS_VALUE])
def test_lifted_optimizers(name, step):
    inner, params = ROW_LOCAL[name](), jnp.ones((50, 3))
    with as_refused(lambda: inner.update(params, inner.init(params), params)):
        run(step, jmask.lazy(inner), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning", "ignore:Explicitly")
def test_operations(name):
    OPERATIONS[name].function(*OPERATIONS[name].args)


def test_a_tangent_has_no_indices():
    x = rows("float32")
    _, tangent = jax.jvp(lambda v: x.with_values(2.0 * v), (x.values,), (x.values,))
    with pytest.raises(TypeError, match=r"tangent.*x\.with_values\(tangent\.values\)"):
        tangent.todense()
    np.testing.assert_array_equal(x.with_values(tangent.values).todense(), 2 * x.todense())


TRANSFORMATIONS = {
    "sgd": lambda: jmask.sgd(0.1),
    "momentum": lambda: jmask.sgd(0.1, momentum=0.9),
    "adagrad": lambda: jmask.adagrad(0.1),
    "rowwise_adagrad": lambda: jmask.rowwise_adagrad(0.1),
    "adam": lambda: jmask.adam(0.1),
    "rowwise_adam": lambda: jmask.rowwise_adam(0.1),
    "ftrl": lambda: jmask.ftrl(0.1),
    "lazy sgd": lambda: jmask.lazy(optax.sgd(0.1)),
    "lazy adam": lambda: jmask.lazy(optax.adam(0.1)),
}


@pytest.mark.dtype_promotion
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_narrow_tables_step_as_in_float32_and_are_rounded_once(name, dtype):
    table = jnp.linspace(-1, 1, 24).reshape(6, 4).astype(dtype)
    rows = jnp.linspace(0.5, 1, 12).reshape(3, 4).astype(dtype)
    tx, steps = TRANSFORMATIONS[name](), []
    for kind in (dtype, "float32"):
        params = table.astype(kind)
        grads = jmask.RowSparse([1, 3, 9], rows.astype(kind), table.shape)
        new, _ = jmask.apply_gradients(tx, grads, tx.init(params), params)
        updates, _ = tx.update(grads, tx.init(params), params)
        steps.append((new, jmask.apply_updates(params, updates)))
        assert new.dtype == kind
        rounded = jmask.apply_updates(params, updates, key=jax.random.key(0))
        assert rounded.dtype == kind
        close = np.abs(np.float32(rounded) - np.float32(steps[-1][1]))
        assert (close <= np.float32(jnp.finfo(kind).eps)).all()
    for narrow, wide in zip(*steps, strict=True):
        np.testing.assert_array_equal(np.float32(narrow), np.float32(wide.astype(dtype)))
        untouched = np.array([0, 2, 4, 5])
        np.testing.assert_array_equal(narrow[untouched], table[untouched])
