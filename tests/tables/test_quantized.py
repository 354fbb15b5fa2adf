"""Tables in 8 and 4 bits, beside float64 in NumPy; reading makes no table-sized temporary."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType

import jmask
from tests.compiled_step import whole_table_operations
from tests.expressions import functions
from tests.later import later

serialization = later("flax.serialization")

lookup, bag = jmask.embedding_lookup, jmask.embedding_bag
KINDS = ("int8", "int4", "float8_e4m3fn")
LARGEST = {"int8": 127, "int4": 7, "float8_e4m3fn": 448}
FLOAT8 = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def table_of(shape=(40, 9), dtype=np.float32):
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.integers(-6, 6, shape[0])
    x = rng.normal(size=shape) * scale.reshape(-1, *[1] * (len(shape) - 1))
    x[3] = 0
    return x.astype(dtype)


def half_a_step(x, kind):
    """Half of the distance between the two numbers around each entry, in float64."""
    largest = np.abs(x).max(tuple(range(1, x.ndim)), keepdims=True)
    scale = largest / LARGEST[kind]
    if kind != "float8_e4m3fn":
        return np.broadcast_to(scale / 2, x.shape)
    sizes = np.sort(FLOAT8[np.isfinite(FLOAT8) & (FLOAT8 >= 0)])
    ratio = np.abs(x) / np.where(scale > 0, scale, 1)
    above = np.clip(np.searchsorted(sizes, ratio * (1 - 1e-6), "right"), 1, sizes.size - 1)
    return (sizes[above] - sizes[above - 1]) / 2 * scale


@pytest.mark.parametrize("shape", [(40, 9), (40, 16), (40, 2, 3), (40, 1)])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float64])
def test_within_half_a_step(kind, shape, dtype):
    with jax.enable_x64(dtype == np.float64):
        x = table_of(shape, dtype)
        q = jmask.quantize_rows(x, kind)
        exact, ids = x.astype(np.float64), np.arange(40)
        wide = np.float64 if dtype == np.float64 else np.float32
        assert (q.shape, q.ndim, q.dtype) == (shape, len(shape), wide)
        # Under jit what lies between two steps may go to the other one.
        jitted = jax.jit(lambda x: jmask.quantize_rows(x, jnp.dtype(kind)))(x)
        for made in (q, jitted):
            have = np.asarray(jmask.embedding_lookup(made, ids), np.float64)
            bound, error = half_a_step(exact, kind), np.abs(have - exact)
            assert (error <= bound * (1 + 1e-5) + 1e-6 * np.abs(exact)).all()
            assert (error > 0.2 * bound)[np.abs(exact) > 0].any() or shape[1:] == (1,)
            assert not have[3].any()


@pytest.mark.parametrize("shape", [(40, 5), (40, 130)])
def test_rows_that_are_not_finite_read_as_nan(kind, shape):
    x = table_of(shape)
    x[5, 2], x[7, 0], x[8, 1] = np.nan, np.inf, -np.inf
    rows = np.asarray(jmask.embedding_lookup(jmask.quantize_rows(x, kind), np.arange(40)))
    assert np.isnan(rows).all(1).nonzero()[0].tolist() == [5, 7, 8]


BAGS = jnp.array([[3, 0, 1], [1, 39, 0]])
READS = functions("t", globals())("""
    lookup(t, IDS); lookup(t, IDS, mode="zero"); lookup(t, IDS, mode="clip");
    lookup(t, IDS, padding_id=0); lookup(t, IDS, padding_id=-1, max_norm=2.0);
    bag(t, BAGS); bag(t, BAGS, combiner="mean"); bag(t, BAGS, combiner="sqrtn");
    bag(t, BAGS, combiner="max"); bag(t, BAGS, weights=jnp.ones((2, 3)) / 3);
    bag(t, jmask.pad_bags([[1, 2], [], [3]]))
""")
IDS = jnp.array([[3, 0, 41], [-1, 39, 0]])


def test_lookups_and_bags(kind):
    """As of the table that it reads as: modes, padding, bounds, bags of all combiners."""
    q = jmask.quantize_rows(table_of(), kind)
    table = lookup(q, jnp.arange(40))
    for read in READS.values():
        np.testing.assert_allclose(jax.jit(read)(q), jax.jit(read)(table), rtol=1e-5)
    with pytest.raises(IndexError, match="`ids"):
        lookup(q, IDS, mode="raise")


def test_only_the_rows_looked_up_are_dequantized(kind):
    x = jnp.ones((1000, 64))
    assert jmask.quantize_rows(x, kind).nbytes == 1000 * ((32 if kind == "int4" else 64) + 4)
    rows = 10**6
    q = jax.eval_shape(lambda: jmask.quantize_rows(jnp.zeros((rows, 16), jnp.float32), kind))
    ids = jax.ShapeDtypeStruct((64, 8), jnp.int32)
    for function in (lookup, bag):
        compiled = jax.jit(function).lower(q, ids).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 10**6
        assert whole_table_operations(compiled, rows) <= {"parameter", "bitcast"}


def test_lookups_of_nothing(kind):
    for rows in (40, 0):
        q = jmask.quantize_rows(table_of()[:rows], kind)
        for ids in ([], np.zeros((3, 0), int)):
            assert lookup(q, ids).shape == (*np.shape(ids), 9)
        np.testing.assert_array_equal(bag(q, np.zeros((3, 0), int)), np.zeros((3, 9)))


@pytest.mark.parametrize("axis", [AxisType.Explicit, AxisType.Auto])
def test_sharded_by_columns(kind, axis):
    mesh, x = jax.make_mesh((2,), ("x",), (axis,)), table_of((40, 16))
    columns = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "x")))
    q, expected = jmask.quantize_rows(columns, kind), jmask.quantize_rows(x, kind)
    np.testing.assert_array_equal(q.values, expected.values)
    rows = lookup(q, jnp.array([3, 0, 7]))
    np.testing.assert_array_equal(rows, lookup(expected, jnp.array([3, 0, 7])))
    assert rows.sharding.shard_shape(rows.shape) == (3, 8)


@pytest.mark.parametrize("axis", [AxisType.Explicit, AxisType.Auto])
def test_sharded(kind, axis):
    mesh = jax.make_mesh((8,), ("x",), (axis,))
    x = table_of()
    q = jmask.quantize_rows(jmask.sharded(x, mesh), kind)
    for array in jax.tree.leaves(q):
        assert array.sharding.shard_shape(array.shape)[0] == 5
    expected = jmask.quantize_rows(x, kind)
    ids = jnp.array([[3, 0, 7], [39, 39, 0]])
    for function in (lookup, bag):
        np.testing.assert_allclose(
            jax.jit(function)(q, ids), function(expected, ids), rtol=1e-6
        )


def test_gradients_are_refused(kind):
    """With the way out; beside a quantized table that is closed over all is as always."""
    q, w, ids = jmask.quantize_rows(table_of(), kind), jnp.ones(9), jnp.array([1, 2])
    loss = lambda params: jnp.sum(jmask.embedding_lookup(params["q"], ids) @ params["w"])
    params = {"q": q, "w": w}
    with pytest.raises(TypeError, match=r"`params\['q'\]` is a quantized table.*quantize_rows"):
        jmask.grad(loss)(params)
    by_scales = lambda scales: loss({"q": type(q)(q.values, scales, q.kind, q.row), "w": w})
    with pytest.raises(TypeError, match="a quantized table has no gradient"):
        jax.grad(by_scales)(q.scales)

    def both(params):
        rows = jmask.embedding_lookup(q, ids) * params["table"][ids]
        return jnp.sum(rows @ params["w"])

    params = {"table": jnp.ones((40, 9)), "w": w}
    have, want = jax.jit(jmask.grad(both))(params), jax.grad(both)(params)
    assert isinstance(have["table"], jmask.RowSparse)
    np.testing.assert_allclose(have["table"].todense(), want["table"], rtol=1e-6)
    np.testing.assert_allclose(have["w"], want["w"], rtol=1e-6)
    # As `eqx.partition` leaves it of a model, in the half that is trained.
    filtered = params | {"q": jax.tree.map(lambda _: None, q)}
    assert isinstance(jmask.grad(both)(filtered)["table"], jmask.RowSparse)


def test_served_with_batches_of_any_size(kind):
    """From a file; pickled; and as flax stores it."""
    q, (size,) = jmask.quantize_rows(table_of(), kind), export.symbolic_shape("b")
    ids = jax.ShapeDtypeStruct((size, 3), jnp.int32)
    for function in (lookup, bag):
        file = export.export(jax.jit(function))(q, ids).serialize()
        read, few = export.deserialize(file), jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
        expected = function(q, few)
        np.testing.assert_allclose(read.call(q, few), expected, rtol=1e-6)
        np.testing.assert_array_equal(function(pickle.loads(pickle.dumps(q)), few), expected)
        like = jax.eval_shape(lambda: q)
        again = serialization.from_bytes({"q": like}, serialization.to_bytes({"q": q}))["q"]
        np.testing.assert_array_equal(function(again, few), expected)


def test_arguments():
    x = jnp.ones((4, 2))
    with pytest.raises(ValueError, match="`dtype` must be one of 'int8', 'int4', 'float8"):
        jmask.quantize_rows(x, "int2")
    for wrong in (jnp.ones(3), x.astype(jnp.int32), x.astype(jnp.complex64), jnp.ones((3, 0))):
        with pytest.raises(ValueError, match="`table` must be real and floating"):
            jmask.quantize_rows(wrong, "int8")
    with pytest.raises(TypeError, match="`table` must be an array, got QuantizedRows"):
        jmask.renormalize(jmask.quantize_rows(x, "int8"), [1], 1.0)
    with pytest.raises(ValueError, match="`width`=2"):
        jmask.embedding_lookup(jmask.quantize_rows(x, "int8"), [1], width=2)
