"""Under `jax_numpy_dtype_promotion="strict"`: what jmask promotes it promotes in words.

The optimizers of optax that pass under it are lifted under it. That no rank and no dtype is
promoted silently holds for all tests that are not marked: see `conftest`.
"""

import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmask
from tests.optax_cases import NEEDS_VALUE, ROW_LOCAL
from tests.optimizers import NAMED, OPTIMIZERS
from tests.stored_tables import STEPS, stepped

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:optax"),
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", [n for n in ROW_LOCAL if n not in NEEDS_VALUE])
def test_lifted_optimizers(name, step):
    """What optax refuses under strict promotion is refused, and nothing else."""
    inner, params = ROW_LOCAL[name](), jnp.ones((50, 3))
    try:
        inner.update(params, inner.init(params), params)
        expected = contextlib.nullcontext()
    except ValueError:
        expected = pytest.raises(ValueError, match="promotion")
    rows = jmask.RowSparse([1, 7, 1, -1], jnp.ones((4, 3)), (50, 3))
    for wrap in (lambda f: f, jax.jit):
        with expected:
            stepped(jmask.lazy(inner), params, [rows] * 2, step, wrap)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", STEPS)
def test_64_bits_reach_no_table(step, dtype):
    """A schedule or a count may be wider than a table and its state, which stay as they are."""
    loss = lambda table: jnp.sum(table[jnp.array([1, 7], jnp.int32)])
    scheduled = jmask.adam(optax.linear_schedule(0.1, 0.2, 10))
    with jax.enable_x64(True):
        for tx in (*NAMED.values(), scheduled, jmask.deferred(scheduled)):
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


def test_a_tangent_has_no_indices():
    x = jmask.RowSparse([1, 7, 1, -1], jnp.ones((4, 3)), (50, 3))
    _, tangent = jax.jvp(lambda v: x.with_values(2.0 * v), (x.values,), (x.values,))
    with pytest.raises(TypeError, match=r"tangent.*x\.with_values\(tangent\.values\)"):
        tangent.todense()
    np.testing.assert_array_equal(x.with_values(tangent.values).todense(), 2 * x.todense())


NARROW = (
    "sgd", "momentum", "adagrad", "rowwise adagrad", "adam", "rowwise adam", "ftrl",
    "optax.sgd with momentum", "optax.adam",
)  # fmt: skip


@pytest.mark.dtype_promotion
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_tables_step_as_in_float32_and_are_rounded_once(name, dtype):
    table = jnp.linspace(-1, 1, 24).reshape(6, 4).astype(dtype)
    rows = jnp.linspace(0.5, 1, 12).reshape(3, 4).astype(dtype)
    tx, steps = OPTIMIZERS[name], []
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
