"""Bag sums: rows are read as they are summed, and gradients keep the cotangents of the sums.

That both are what they are as arrays of all rows is tested with all other programs, in
`test_value_and_grad`; here is which programs are so, and what they save.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from jmask._base.forms import within
from jmask._kernels import tuning
from jmask._kernels.gathered_rows import BAG_SUM, GATHERED
from tests.compiled_step import compiled_step
from tests.lookup_programs import BAG_SUMS, BAGS, BOTH, SUMMED, B, D, L, where
from tests.lookup_programs import MANY_ROWS as TABLE
from tests.oracle import assert_close

WITH_ROOTS = 'bag(t, x, weights=x.weights, combiner="sqrtn")'


@pytest.fixture(autouse=True)
def _even_few_rows_are_many(monkeypatch):
    monkeypatch.setattr(tuning, "SMALL_ROWS", 0)


def seen(grad, *args):
    """What is known of the rows of a gradient, while it is traced."""
    found = []

    def trace(*args):
        gradient = grad(*args)
        found.append(GATHERED.of(gradient.values))
        return gradient.todense()

    jax.eval_shape(trace, *args)
    return found[0]


def count_of_sums(function, *args):
    equations = within(jax.make_jaxpr(function)(*args).eqns)
    return sum(eqn.primitive.name == BAG_SUM.primitive.name for eqn in equations)


@pytest.mark.parametrize("name", SUMMED)
def test_what_is_summed(name):
    """Forwards by one equation, and backwards by what is known of the rows."""
    loss, is_sum = SUMMED[name], name in BAG_SUMS
    twice = 2 if "checkpoint" in name else 1
    with_value = jax.jit(jmask.value_and_grad(loss))
    assert count_of_sums(with_value, TABLE, BAGS) == twice * (is_sum or name in BOTH)
    assert (seen(jmask.grad(loss), TABLE, BAGS) is not None) == is_sum


def test_small_arrays_are_arrays(monkeypatch):
    grad = jmask.grad(SUMMED[WITH_ROOTS])
    monkeypatch.setattr(tuning, "SMALL_ROWS", 4 * B * L * D + 1)
    assert seen(grad, TABLE, BAGS) is None


@pytest.mark.of_cpus
@pytest.mark.parametrize(
    "mean",
    [lambda t, ids: jmask.embedding_bag(t, ids, combiner="mean"), lambda t, i: t[i].mean(1)],
)
def test_no_row_of_a_bag_is_written_out(monkeypatch, mean):
    """A step has less beside its table than the rows of the bags would take."""
    monkeypatch.undo()
    means = lambda t, ids: jnp.sum(jnp.sin(mean(t, ids)))
    table = jax.ShapeDtypeStruct((200_000, 64), "float32")
    ids = jax.ShapeDtypeStruct((10_000, 5), "int32")
    memory = compiled_step(means, jmask.sgd(0.1), table, ids).memory_analysis()
    assert memory.temp_size_in_bytes < 50_000 * 64 * 4 / 1.5


@pytest.mark.parametrize("bag", [jmask.embedding_bag, lambda t, ids: t[ids].sum(1)])
def test_in_a_shard_map_rows_are_arrays(bag):
    """A caller may put those of devices side by side, where an index is that of a device."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    loss = lambda t, ids: jnp.sum(jnp.sin(bag(t, ids)))
    how = {"mesh": mesh, "in_specs": (spec(), spec("x")), "out_specs": spec("x")}
    grad = jax.shard_map(jmask.grad(loss), **how, check_vma=False)
    assert seen(grad, TABLE, BAGS.ids) is None
    expected = jax.grad(loss)(TABLE, BAGS.ids)
    assert_close(jax.jit(grad)(TABLE, BAGS.ids).todense(), expected)


@pytest.mark.of_cpus
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_tables(dtype):
    table, loss = TABLE.astype(dtype), SUMMED[WITH_ROOTS]
    with_value = jax.jit(jmask.value_and_grad(loss))
    assert count_of_sums(with_value, table, BAGS) == 1
    assert seen(jmask.grad(loss), table, BAGS).dtype == dtype
    value, gradient = with_value(table, BAGS)
    expected, dense = jax.value_and_grad(loss)(table, BAGS)
    np.testing.assert_allclose(value, expected, rtol=1e-3)
    assert gradient.values.dtype == dtype
    wide = (x.astype(jnp.float32) for x in (gradient.todense(), dense))
    np.testing.assert_allclose(*wide, 2e-2, 1e-2)
    # As it is summed for an array: each row is rounded, and their sums are wide.
    step = jax.jit(lambda *args: jmask.grad(loss)(*args).todense())
    summed = jmask.grad(loss)(table, BAGS).coalesce().todense()
    np.testing.assert_array_equal(step(table, BAGS), summed)


@pytest.mark.parametrize("trains_weights", [False, True])
def test_rows_of_two_dimensions_and_weights_that_have_a_gradient(trains_weights):
    table = jnp.stack([TABLE, jnp.cos(TABLE)], 1)

    def loss(params, x):
        w = params["w"] if trains_weights else jax.lax.stop_gradient(params["w"])
        by_hand = jnp.einsum("blcd,bl->bcd", params["t"][x.ids], w)
        return jnp.sum(jnp.sin(by_hand) * jmask.embedding_bag(params["t"], x.ids, weights=w))

    params = {"t": table, "w": BAGS.weights}
    gradient = jax.jit(jmask.grad(loss))(params, BAGS)
    dense = jax.grad(loss)(params, BAGS)
    assert_close(gradient["t"].todense(), dense["t"])
    assert_close(gradient["w"], dense["w"])


def test_infinite_rows_under_a_mask():
    first_bag = lambda t, x: jnp.sum(where(t[x.ids], x).sum(1)[0])
    table = TABLE.at[BAGS.ids[0, 1]].set(jnp.inf)  # the first bag leaves it out
    value, _ = jax.jit(jmask.value_and_grad(first_bag))(table, BAGS)
    assert_close(value, first_bag(TABLE, BAGS))
