"""Functions of sparse tensors: which storage the result has, values, gradients, vmap.

The table of MXNet's storage inference, and what goes past it, in one table of cases. Each is
compared with its dense twin on random rows: under jit and vmap, with its gradients, eagerly.
"""

import functools
import warnings

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
from jmask import nn
from tests.expressions import functions
from tests.sparse_arrays import coo

pytestmark = pytest.mark.sampled

ROWS, WIDTH = 6, 3
NUMBERS = np.random.default_rng(0)
X_IDS, Y_IDS = [4, 1, 4, -1, 9], [1, 0, 0]  # duplicates, padding of two kinds
X = jnp.asarray(NUMBERS.uniform(0.2, 0.9, (5, WIDTH)), jnp.float32)
Y = jnp.asarray(NUMBERS.uniform(-0.9, -0.2, (3, WIDTH)), jnp.float32)
DENSE = jnp.asarray(NUMBERS.normal(size=(ROWS, WIDTH)), jnp.float32)


# Expressions of a namespace `m`, tensors `x` and `y`, and an array `d`, by the storage of the
# result: "rows", "dense" where it is dense by right, "fallback" where that is announced.
EXPRESSIONS = {
    "rows": """
        x * 3; 3.0 * x; x / 3; x * d[0, 0]; x / d[0, 0]; -x; +x; abs(x); x + 0; x - 0; 0 - x;
        x > 0; x < 0; x != 0; x ** 2; x // 0.3; x % 0.3; m.maximum(x, 0); m.clip(x, -0.3, 0.3);
        x.clip(-0.3, 0.3); m.clip(x, None, 0.3); m.maximum(x, 0.0); x + y; x - y; x * y; x * x;
        m.maximum(x, y); m.hypot(x, y + x); x < y; (x > 0.5) | (y < -0.5); x * d; d * x;
        x * d[0]; x * d[:, :1]; x[:, :1] * d; x * d * y; m.where(d > 0, x, 0);
        m.where(d > 0, x, y); m.where(x > 0.5, d, 0); m.zeros_like(x) + x; m.copy(x);
        m.sum(x, axis=1); m.sum(x, axis=1, keepdims=True); m.mean(x, axis=-1);
        m.max(x + y, axis=1); m.prod(x, axis=1); m.sum(m.square(x), axis=1); x[...]; x[:, 1];
        x[..., -1]; x[:, 1:]; x[:, jnp.array([2, 0])]; x[:, None]; x[:, ::-1]; x[..., None, 1];
        x @ d[:WIDTH]; m.matmul(x, d[0]); nn.leaky_relu(x, d);
        nn.leaky_relu(x, negative_slope=d[:, :1])
    """,
    "dense": """
        x + d; d + x; x - d; d - x; m.sum(x); m.sum(x, axis=0); m.mean(x); m.mean(x, axis=0);
        m.max(-x); m.max(x, axis=0); x.min(); m.prod(x); x[4]; x[-2]; x[4, 2]; x[4, ..., 1:];
        x[jnp.array([[4, 0], [-2, 4]])]; x[[4, 1], 1:]; d.T @ x; m.dot(d.T, x)
    """,
    "fallback": """
        m.clip(x, max=d); x + 2; 1 - x; x + d[0, 0]; m.where(x > 0, 2 / x, 0); x == 0; x >= 0;
        m.clip(x, 0.1, 0.3); m.power(x, 0); m.nan_to_num(x / (y + x + d)); x + d[0];
        m.maximum(x, d); x / d; m.where(x > 0.5, 0, d); m.where(d > 0, x, 1);
        m.ones_like(x) * x; m.std(x); x[None]; x[[4, 1], [0, 2]]; m.concatenate([x, d]);
        m.stack([x, y]); x.ravel(); m.einsum('ij,ij->i', x, d); x.T; x[1:5]; x[::-1];
        x[np.arange(ROWS) > 2]; x[..., 1, 2]; x[4, [0, 2]]; m.concatenate([x, y, x]);
        m.concatenate([x, y], axis=1); x.reshape(ROWS, WIDTH, 1); m.expand_dims(x, 1);
        m.transpose(x[:, None], (0, 2, 1))
    """,
}


CASES = {
    code: (function, kind)
    for kind, text in EXPRESSIONS.items()
    for code, function in functions("m, x, y, d", globals())(text).items()
}
dense = lambda x: x.todense() if isinstance(x, jmask.RowSparse) else x


def tensors(x, y, x_ids=X_IDS, y_ids=Y_IDS):
    shape = (ROWS, WIDTH)
    return jmask.RowSparse(x_ids, x, shape), jmask.RowSparse(y_ids, y, shape)


def results(function, ids, x, y, d, twin):
    """The dense result, and the gradient of a number made of it."""

    def result(x, y, d):
        x, y = tensors(x, y, *ids)
        if twin:
            return function(jnp, x.todense(), y.todense(), d)
        return dense(function(jnm, x, y, d))

    number = lambda x, y, d: jnp.sum(jnp.cos(result(x, y, d) * 1.7))
    return result(x, y, d), jax.grad(number, argnums=(0, 1, 2))(x, y, d)


def kind_of(function, x, y, d):
    with warnings.catch_warnings(record=True, action="always") as caught:
        result = function(jnm, *tensors(x, y), d)
    if caught:
        assert all(w.category is jmask.StorageFallbackWarning for w in caught)
        assert {w.filename for w in caught} == {__file__}
        return "fallback"
    return "rows" if isinstance(result, jmask.RowSparse) else "dense"


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.rank_promotion
def test_storage_of_the_result(name):
    """Under a trace and eagerly; the values are those of the dense twin eagerly, too."""
    function, expected = CASES[name]
    kinds = [kind_of(function, X, Y, DENSE)]

    def noted(x, y, d):
        kinds.append(kind_of(function, x, y, d))
        return d

    jax.eval_shape(noted, X, Y, DENSE)
    assert kinds == [expected] * 2
    if expected == "fallback":
        with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match="dense"):
            function(jnm, *tensors(X, Y), DENSE)
    eager = dense(function(jnm, *tensors(X, Y), DENSE))
    twin = function(jnp, *(x.todense() for x in tensors(X, Y)), DENSE)
    np.testing.assert_allclose(eager, twin, rtol=2e-5, atol=1e-6)


@functools.cache
def compiled(name):
    """Both results, under jit and vmap, for ids and numbers to come."""

    def both(x_ids, y_ids, x, y, d):
        ids, (function, _) = (x_ids, y_ids), CASES[name]
        return [results(function, ids, x, y, d, twin) for twin in (False, True)]

    return jax.jit(jax.vmap(both, in_axes=(None, None, 0, 0, 0)))


def ids_of(size):
    """Row numbers with duplicates, padding and none of some rows."""
    return st.lists(st.integers(-2, ROWS + 1), min_size=size, max_size=size)


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=5)
@given(ids_of(len(X_IDS)), ids_of(len(Y_IDS)), st.integers(0, 999))
@pytest.mark.rank_promotion
@pytest.mark.dtype_promotion
def test_equals_its_dense_twin(name, x_ids, y_ids, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.uniform(0.2, 0.9, (2, 5, WIDTH)), -rng.uniform(0.2, 0.9, (2, 3, WIDTH))
    d = rng.normal(size=(2, ROWS, WIDTH))
    x_ids, y_ids = jnp.array(x_ids), jnp.array(y_ids)
    batch = [jnp.asarray(a, jnp.float32) for a in (x, y, d)]
    (ours, gradients), (twin, of_twin) = compiled(name)(x_ids, y_ids, *batch)
    assert ours.dtype == twin.dtype
    np.testing.assert_allclose(ours, twin, rtol=2e-5, atol=1e-6)
    # Padding gets no gradient: its rows were never in the tensor.
    for ours, twin in zip(gradients, of_twin, strict=True):
        np.testing.assert_allclose(ours, twin, rtol=2e-4, atol=1e-5)


def test_once_for_each_place():
    x, _ = tensors(X, Y)
    with warnings.catch_warnings(record=True, action="default") as caught:
        for _ in range(3):
            jnm.cos(x)
            jmask.grad(lambda table: jnp.sum(table[jnp.array([1])] @ table.T))(DENSE)
        x + 1.0
    assert [str(w.message).split("`")[1] for w in caught] == ["cos", "table", "add"]


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("number", [np.inf, np.nan, 0.0, 2.0])
@pytest.mark.parametrize("kind", [float, np.float32, np.array, jnp.float32])
def test_scalars_that_are_known(kind, number, wrap):
    """0 times infinity is nan, and under jit too where it can be told."""
    x, scalar = jmask.RowSparse([1], jnp.ones((1, 2)), (3, 2)), kind(number)
    for function in (lambda x: x * scalar, lambda x: scalar * x, lambda x: x - scalar):
        result = wrap(function)(x)
        assert isinstance(result, jmask.RowSparse) == (not np.any(function(jnp.zeros(1)) != 0))
        np.testing.assert_array_equal(jmask.todense(result), function(x.todense()))


def test_infinite_slopes_at_padding_are_not_met():
    def total(values):
        rows = jmask.RowSparse([1, 1, 4], values, (4,))
        entries = BCOO((values, jnp.array([[1], [2], [4]])), shape=(4,))
        return jnm.sqrt(rows).todense().sum() + jnm.arcsin(entries).todense().sum()

    gradient = jax.jit(jax.grad(total))(jnp.array([0.5, 0.5, 0.0]))
    slope = 0.5 + 1 / np.sqrt(1 - 0.25)
    np.testing.assert_allclose(gradient, [slope, slope, 0], rtol=1e-5)


# --- entries of BCOO and BCSR ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["coo", "csr"])
@pytest.mark.dtype_promotion
def test_booleans_add_as_or(kind):
    """Equal positions are summed, and dense arrays made, also where JAX cannot add."""
    twice = (jnp.array([True, True, False]), jnp.array([[0, 1], [0, 1], [1, 0]]))
    x = BCOO(twice, shape=(2, 2))
    if kind == "csr":
        x = BCSR((twice[0], twice[1][:, 1], jnp.array([0, 2, 3])), shape=(2, 2))
    dense = np.array([[False, True], [False, False]])
    for result, expected in (
        (jnm.abs(x), dense), (jmask.cast_storage(x, "row_sparse"), dense),
        (jnm.multiply(x, 3), dense * 3), (jnm.sum(x, axis=1), [1, 0]),
        (jmask.dot(x, jnp.eye(2)), dense),
    ):  # fmt: skip
        np.testing.assert_array_equal(jmask.todense(result), expected)
    with pytest.warns(jmask.StorageFallbackWarning):
        np.testing.assert_array_equal(jnm.logical_not(x), ~dense)
    rows = jmask.cast_storage(x, "row_sparse")
    with pytest.warns(jmask.StorageFallbackWarning):
        np.testing.assert_array_equal(jnm.add(~dense, rows), dense | ~dense)


def test_positions_that_differ_are_said():
    """Masked tensors of one pattern keep their storage; others are dense, with the warning."""
    eye = jmask.masked_tensor(coo(np.eye(3)))
    with jmask.strict():
        assert (eye * 2 + eye).stype == "coo"
        assert jnm.where(eye > 0, eye, eye * 2).stype == "coo"
    column = jmask.masked_tensor(coo(np.ones((3, 1), np.float32)))
    row = jmask.masked_tensor(jmask.RowSparse([1], jnp.ones((1, 3)), (3, 3)))
    for other in (jmask.masked_tensor(coo(np.ones((3, 3)))), column, row):
        with pytest.warns(jmask.StorageFallbackWarning, match="`add` made a sparse"):
            result = eye + other
        assert result.stype == "default"


@pytest.mark.parametrize("other", [jnp.ones((3, 3)), jmask.masked_tensor(jnp.ones((3, 3)))])
def test_sums_of_entries_and_others(other):
    """`add_n` adds as `jmask.numpy.add`: JAX's operators of BCOO take no masked tensor."""
    for terms in ((coo(np.eye(3)), other), (other, coo(np.eye(3)))):
        with pytest.warns(jmask.StorageFallbackWarning, match="`add` made a sparse"):
            result = jmask.add_n(*terms)
        assert isinstance(result, type(other))
        np.testing.assert_array_equal(jmask.todense(result), np.eye(3) + 1)


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("leading", [2, 3])
def test_indices_of_stacked_tables(leading, wrap):
    """Columns are rows still; what picks tables, or rows of each, is dense."""
    shape = (2, 5, 3)
    values = jnp.arange(1.0, 1 + 4 * 3 ** (3 - leading)).reshape(4, *shape[leading:])
    x = jmask.RowSparse([1, 1, 9, 7], values, shape, leading=leading)
    s = np.s_
    columns = s[:], s[...], s[..., 0], s[..., None, 1], s[..., 1:]
    for index in (
        *columns,
        s[:, 1],
        s[:, 1:],
        s[:, :, 0],
        s[:, np.array([3, 1])],
        s[..., 1, 0],
    ):
        result = wrap(lambda x, index=index: jmask.todense(x[index]))(x)
        np.testing.assert_array_equal(result, x.todense()[index])
        is_sparse = isinstance(x[index], jmask.RowSparse)
        assert is_sparse == any(index is i for i in columns[: 5 if leading == 2 else 2])


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("dtype", ["uint8", "bool", "int16"])
@pytest.mark.dtype_promotion
def test_integers_wrap_before_they_meet_others(dtype):
    """Rows of equal ids are summed in their own dtype first: 200 + 100 is 44 in uint8."""
    values = np.array([200, 100]) * (200 if dtype == "int16" else 1)
    x = jmask.RowSparse([1, 1], values.astype(dtype), (3,))
    for function in (jnp.add, jnp.subtract, jnp.multiply):
        ours = getattr(jnm, function.__name__)
        for other in (jnp.full(3, 1.5), 1.5):
            for wrap in (lambda f: f, jax.jit):
                result = jmask.todense(wrap(ours)(other, x))
                np.testing.assert_array_equal(result, function(other, x.todense()))


@pytest.mark.parametrize("ids", [[1, 1], [0, 1]])
@pytest.mark.dtype_promotion
def test_sums_of_16_bits_and_whole_numbers(ids):
    """Have JAX's dtype, whatever the rows are added in."""
    for dtype in ("bfloat16", "float16"):
        x = jmask.RowSparse(ids, jnp.ones(2, dtype), (3,), coalesced=ids == [0, 1])
        for dense in (jnp.arange(3), jnp.zeros(3, bool)):
            for result in (x + dense, dense - x):
                assert result.dtype == dtype


def test_operands_by_name():
    """A function is 0 where its slope is only where its `x` is, too."""
    slope = jmask.RowSparse([1], jnp.ones((1, 3)), (ROWS, WIDTH))
    with pytest.warns(jmask.StorageFallbackWarning):
        result = nn.leaky_relu(x=DENSE, negative_slope=slope)
    np.testing.assert_array_equal(result, jax.nn.leaky_relu(DENSE, slope.todense()))
