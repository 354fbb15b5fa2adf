"""Sums, means, norms and clipping of gradients that mix dense and row-sparse leaves.

And gradients in tensors: traced once, without zeros of their size where none are read.
"""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import assume, example, given, settings
from jax.sharding import AxisType, PartitionSpec

import jmask
from tests.oracle import assert_close, densified
from tests.sparse_arrays import coo
from tests.tensors.test_row_sparse import ROWS, both_ways, row_sparse

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 3)), jnp.float32)
tree_of = lambda x: {"t": x, "w": jnp.arange(4.0), "skipped": None}


def results(a, b, scalar):
    x, y = a["t"], b["t"]
    return {
        "add": jmask.tree.add(a, b, a),
        "scale": jmask.tree.scale(scalar, a),
        "mean": jmask.tree.mean([a, b]),
        "norm": jmask.tree.norm(a),
        "squared": jmask.tree.norm(b, squared=True),
        "operators": (x * 2 - y, -x / 3, x.astype(jnp.float16)),
        "with an array": (x - jnp.ones(x.shape), jmask.tree.add(jnp.ones(x.shape), y)),
    }


@settings(max_examples=5)
@given(
    row_sparse(row=(3,)),
    row_sparse(row=(3,)),
    st.floats(-2, 2, width=32),
    st.sampled_from([(ROWS, 3), (1, ROWS, 3)]),
)
def test_sum_mean_scale_norm(x, y, scalar, shape):
    """Of tables, and of stacks of them, whose rows have two ids."""
    x, y = (jmask.RowSparse(z.indices, z.values, shape, leading=len(shape) - 1) for z in (x, y))
    assert repr(x).endswith(f"nse={x.nse}{', leading=2' * (len(shape) == 3)})")
    a, b = tree_of(x), tree_of(y)
    p, q = np.asarray(densified(a)["t"], np.float64), np.asarray(densified(b)["t"], np.float64)
    w = np.arange(4.0)
    expected = {
        "add": {"t": 2 * p + q, "w": 3 * w, "skipped": None},
        "scale": {"t": scalar * p, "w": scalar * w, "skipped": None},
        "mean": {"t": (p + q) / 2, "w": w, "skipped": None},
        "norm": np.sqrt((p**2).sum() + (w**2).sum()),
        "squared": (q**2).sum() + (w**2).sum(),
        "operators": (2 * p - q, -p / 3, p),
        "with an array": (p - 1, q + 1),
    }
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for outcome in both_ways(results, a, b, scalar):
        jax.tree.map(close, densified(outcome), expected)
        assert all(isinstance(x, jmask.RowSparse) for x in outcome["operators"])


@given(st.integers(0, 2**32 - 1), st.floats(-37, 37), st.floats(-37, 37))
@example(0, 17, 15)
@example(0, -15, -16)
def test_norms_of_entries_of_all_sizes(seed, exponent, other):
    """Also where squares do not exist in float32, and where a few of the entries are larger."""
    sizes = 10.0 ** np.array([exponent] * 5 + [other] * 3)
    x = jnp.asarray(np.random.default_rng(seed).normal(size=8) * sizes, jnp.float32)
    y = np.asarray(x, np.float64)
    y[abs(y) < np.finfo(np.float32).tiny] = 0
    norm = np.sqrt((y**2).sum())
    assume(np.finfo(np.float32).tiny < norm < np.finfo(np.float32).max)
    for value, gradient in both_ways(jax.value_and_grad(lambda x: jmask.tree.norm([x])), x):
        np.testing.assert_allclose(value, norm, 1e-6)
        np.testing.assert_allclose(gradient, y / norm, 1e-6, 1e-6)
    for squared in both_ways(functools.partial(jmask.tree.norm, squared=True), [x]):
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(squared, np.float32(norm**2), 1e-6, 1e-37)


loss = lambda table, ids: jnp.sum(jnp.tanh(table[ids]) ** 2)
BATCHES = jnp.array([[1, 2, 1], [6, 0, 2], [1, 1, 1], [5, 0, 3]])


@functools.cache
def total_gradient():
    return sum(jax.grad(loss)(TABLE, ids) for ids in BATCHES)


class TestMicrobatches:
    def test_stacked(self):
        @jax.jit
        def run(table, batches):
            stacked = jax.lax.map(lambda ids: jmask.grad(loss)(table, ids), batches)
            return jmask.tree.merge({"t": stacked, "w": jnp.ones((4, 2))})

        merged = run(TABLE, BATCHES)
        assert merged["t"].nse == 12
        np.testing.assert_allclose(merged["t"].todense(), total_gradient(), rtol=1e-5)
        np.testing.assert_array_equal(merged["w"], [4, 4])
        vmapped = jax.vmap(lambda ids: jmask.grad(loss)(TABLE, ids))(BATCHES)
        np.testing.assert_allclose(
            jmask.tree.merge(vmapped).todense(), total_gradient(), rtol=1e-5
        )
        table = jax.ShapeDtypeStruct((100_000, 3), jnp.float32)
        memory = run.lower(table, BATCHES).compile().memory_analysis()
        assert memory.temp_size_in_bytes < table.size * 4 / 100

    def test_carried_from_a_gradient(self):
        """Whose rows are in any order, where those of a sum are sorted."""
        body = lambda total, ids: (
            jmask.tree.add(total, jmask.grad(loss)(TABLE, ids), like=total),
            None,
        )
        same = jnp.broadcast_to(BATCHES[0], BATCHES.shape)
        first = jmask.grad(loss)(TABLE, same[0])
        total, _ = jax.lax.scan(body, first, same[1:])
        np.testing.assert_allclose(
            total.todense(), len(same) * np.asarray(first.todense()), rtol=1e-5
        )

    @pytest.mark.parametrize(("capacity", "fits"), [(ROWS, True), (6, True), (5, False)])
    def test_carried_at_a_static_capacity(self, capacity, fits):
        zeros = jmask.RowSparse.zeros(TABLE.shape, nse=capacity)

        def body(total, ids):
            return jmask.tree.add(total, jmask.grad(loss)(TABLE, ids), like=total), None

        total, _ = jax.lax.scan(body, zeros, BATCHES)
        assert total.nse == capacity
        if fits:
            np.testing.assert_allclose(total.todense(), total_gradient(), rtol=1e-5)
        else:
            assert np.isnan(total.values).all()
            for ids in BATCHES[:3]:
                zeros, _ = body(zeros, ids)
            with pytest.raises(ValueError, match="too small: 6 rows"):
                body(zeros, BATCHES[3])


class TestMappedAxis:
    def step(self, table, ids):
        gradient = {"t": jmask.grad(loss)(table, ids), "w": jnp.ones(2)}
        return jmask.tree.psum(gradient, "i"), jmask.tree.pmean(gradient, "i")

    def check(self, total, average):
        np.testing.assert_allclose(total["t"].todense(), total_gradient(), rtol=1e-5)
        np.testing.assert_allclose(average["t"].todense(), total_gradient() / 4, rtol=1e-5)
        np.testing.assert_array_equal(total["w"], [4, 4])
        np.testing.assert_array_equal(average["w"], [1, 1])

    def test_vmap(self):
        results = jax.vmap(self.step, (None, 0), axis_name="i")(TABLE, BATCHES)
        for device in range(4):
            self.check(*jax.tree.map(lambda x, device=device: x[device], results))

    @pytest.mark.parametrize("checked", [True, False])
    def test_devices(self, checked):
        mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))

        def step(table, ids):
            if checked:  # or JAX sums the gradients of devices by itself
                table = jax.lax.pcast(table, "i", to="varying")
            return self.step(table, ids[0])

        specs = {
            "in_specs": (PartitionSpec(), PartitionSpec("i")),
            "out_specs": PartitionSpec(),
        }
        run = jax.jit(jax.shard_map(step, mesh=mesh, **specs, check_vma=checked))
        self.check(*run(TABLE, BATCHES))
        # JAX has summed the gradient of a table that is typed the same on all devices.
        again = jax.shard_map(
            lambda table, ids: jmask.tree.pmean(jmask.grad(loss)(table, ids[0]), "i"),
            mesh=mesh,
            **specs,
        )
        np.testing.assert_allclose(again(TABLE, BATCHES).todense(), total_gradient(), rtol=1e-5)
        # What crosses: the rows and ids of the batch, and the dense leaves.
        text = run.lower(jnp.ones((5_000, 3)), BATCHES).compile().as_text()
        moved = [line for line in text.splitlines() if " all-gather(" in line]
        assert moved
        assert not any("5000" in line for line in moved)


@pytest.mark.parametrize(("rows", "count"), [(4, 0), (0, 2)])
@pytest.mark.parametrize("bound", [jmask.clip_by_row_norm, jmask.max_row_norm])
def test_clipping_no_rows(bound, rows, count):
    table, tx = jnp.ones((rows, 3)), bound(1.0)
    gradient = jmask.RowSparse(jnp.zeros(count, int), jnp.ones((count, 3)), (rows, 3))
    updates, _ = tx.update(gradient, tx.init(table), table)
    assert (updates.shape, updates.nse) == ((rows, 3), 0)


@pytest.mark.parametrize(
    "tx",
    [
        jmask.sgd(0.1, momentum=0.9, weight_decay=0.1),
        optax.chain(jmask.sgd(0.1), jmask.max_row_norm(0.1)),
        pytest.param(jmask.lazy(optax.adam(0.1)), marks=pytest.mark.dtype_promotion),
    ],
)
def test_parameters_that_are_numbers(tx):
    """Outside jit they come as they are."""
    rows = jmask.RowSparse([1], jnp.ones((1, 2)), (5, 2))
    grads = {"table": rows, "bias": jnp.ones(()), "array": jnp.ones(3)}
    results = []
    for bias in (0.5, jnp.float32(0.5)):
        params = {"table": jnp.ones((5, 2)), "bias": bias, "array": np.ones(3, np.float32)}
        new, state = jmask.apply_gradients(tx, grads, tx.init(params), params)
        updates, state = tx.update(grads, state, {**new, "bias": bias})
        results.append(jmask.apply_updates({**new, "bias": bias}, updates))
    assert_close(*results, rtol=1e-6)


# --- functions of tensors are traced once ---------------------------------------------

DENSE = np.array([[0.0, 3.0], [4.0, 0.0]], np.float32)
TENSORS = {
    "BCOO": coo(DENSE),
    "RowSparse": jmask.RowSparse([1], [[4.0, 0.0]], (2, 2), coalesced=True),
    "masked": jmask.masked_tensor(DENSE, DENSE > 0),
}
# What the function reads, and whether entries that are not stored count.
READ = {
    "stored entries": (lambda x: jmask.todense(x, masked_grad=True), False),
    "all entries": (jmask.todense, True),
}


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("name", TENSORS)
def test_traced_once_or_twice(name, read):
    """Twice where entries count that are not stored: the first time says so.

    What is returned beside the loss is the tensor, whatever stands for it in the trace.
    """
    function, all_count = READ[read]
    calls = []

    def loss(x):
        calls.append(x)
        return jnp.sum(function(x) ** 2), x

    x = TENSORS[name]
    gradient, aux = jmask.grad(loss, has_aux=True)(x)
    assert len(calls) == 1 + all_count
    assert isinstance(gradient, jax.Array) == all_count
    expected = 2 * np.asarray(jmask.todense(x))
    np.testing.assert_array_equal(jmask.todense(gradient), expected)
    assert type(aux) is type(x)
    assert jax.tree.structure(aux) == jax.tree.structure(x)


@pytest.mark.parametrize("rows", [10**3, 10**7])
def test_no_array_of_the_size_of_the_tensor(rows):
    """10⁷ rows of 16 would be 640 MB: the program has nothing but the stored rows."""

    def gradient(ids, values):
        x = jmask.RowSparse(ids, values, (rows, 16))
        return jmask.grad(lambda x: jnp.sum((x * 2).values ** 2))(x).values

    compiled = jax.jit(gradient).lower(jnp.arange(4), jnp.ones((4, 16))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1e5
