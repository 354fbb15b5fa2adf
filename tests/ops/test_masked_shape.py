"""Shape operations and indexing: data and mask against NumPy, jit, vmap, and gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
import jmask.numpy as jn
from tests import masked_cases as cases
from tests.masked_cases import MASK, assert_masked, example

pytestmark = pytest.mark.sampled


X = example()
ROW = np.array([True, False, True])

# Function, and the arguments that follow the tensor: the same call for NumPy.
MOVES = [
    ("broadcast_to", (2, 3, 4)), ("delete", 1, 0), ("diagonal",), ("diagonal", 1),
    ("expand_dims", 1), ("flip",), ("flip", 1), ("fliplr",), ("flipud",), ("matrix_transpose",),
    ("moveaxis", 0, 1), ("permute_dims", (1, 0)), ("ravel",), ("repeat", 2, 1), ("repeat", 2),
    ("reshape", (2, 6)), ("reshape", (-1, 2)), ("roll", 1), ("roll", 2, 1), ("rollaxis", 1),
    ("rot90",), ("squeeze",), ("swapaxes", 0, 1), ("tile", (2, 1)), ("transpose",),
    ("transpose", (1, 0)), ("tril",), ("tril", 1), ("triu",), ("triu", -1),
    ("array_split", 2, 1), ("hsplit", 2), ("split", 2, 1), ("split", [1, 3], 1), ("vsplit", 3),
    ("unstack",), ("atleast_1d",), ("atleast_2d",), ("atleast_3d",),
    ("take", np.array([2, 0, -1]), 0), ("take", np.array([[5, 1]])),
    ("take_along_axis", np.array([[3, 0], [1, 1], [2, -1]]), 1), ("pad", 1),
    ("pad", ((0, 1), (2, 0)), "edge"), ("pad", 1, "reflect"), ("pad", 1, "symmetric"),
    ("pad", 1, "wrap"),
]  # fmt: skip


def compiled_once(named):
    """Every function under jit, for a batch, and its gradient: in one compilation."""

    @jax.jit
    def run(x, y):
        both = jax.tree.map(lambda *a: jnp.stack(a), x, y)
        return {
            name: (function(x), jax.vmap(function)(both), cases.gradient(function, x))
            for name, function in named.items()
        }

    return run(X, OTHER)


OTHER = X.with_values(X.data + 100)
move = lambda name, *args: lambda x: getattr(jn, name)(x, *args)


@pytest.fixture(scope="module")
def compiled_moves():
    return compiled_once({cases.case_id(case): move(*case) for case in MOVES})


@pytest.mark.parametrize("case", MOVES, ids=cases.case_id)
def test_moves(case, compiled_moves):
    name, *args = case
    positions = getattr(np, name)(cases.numbered(X), *args)
    several = isinstance(positions, list | tuple)
    positions = positions if several else [positions]
    expected_gradient = np.zeros(X.size + 1)
    eager = move(*case)(X)
    jitted, both, actual_gradient = compiled_moves[cases.case_id(case)]
    for i, places in enumerate(positions):
        pick = lambda tree, i=i: tree[i] if several else tree
        expected = cases.moved_by_numpy(places, X)
        assert_masked(pick(eager), *expected)
        assert_masked(pick(jitted), *expected)
        lanes = pick(both)
        for lane, source in enumerate((X, OTHER)):
            result = lanes.with_values(*(np.asarray(a)[lane] for a in jax.tree.leaves(lanes)))
            assert_masked(result, *cases.moved_by_numpy(places, source))
        np.add.at(expected_gradient, places.ravel(), np.arange(1, places.size + 1))
    expected_gradient = np.where(MASK, expected_gradient[1:].reshape(MASK.shape), 0)
    np.testing.assert_array_equal(actual_gradient, expected_gradient)


# Function of several arrays, and its other arguments.
JOINS = [
    ("concatenate",), ("concatenate", 1), ("concat", 1), ("stack",), ("stack", -1), ("vstack",),
    ("hstack",), ("dstack",), ("column_stack",),
]  # fmt: skip


PLAIN = np.arange(12, dtype=np.float32).reshape(3, 4)
join = lambda name, *args: lambda x: getattr(jn, name)([x, PLAIN, x], *args)


@pytest.fixture(scope="module")
def compiled_joins():
    return compiled_once({cases.case_id(case): join(*case) for case in JOINS})


@pytest.mark.parametrize("case", JOINS, ids=cases.case_id)
def test_joins_of_masked_and_plain(case, compiled_joins):
    name, *args = case
    by_numpy = lambda x, plain: getattr(np, name)([x, plain, x], *args)
    data, mask = by_numpy(np.asarray(X.data), PLAIN), by_numpy(MASK, np.ones((3, 4), bool))
    jitted, both, actual_gradient = compiled_joins[cases.case_id(case)]
    for result in (join(*case)(X), jitted):
        assert_masked(result, data, mask)
    assert both.shape == (2, *data.shape)
    weights = np.arange(1, data.size + 1).reshape(data.shape)
    parts = by_numpy(cases.numbered(X), np.zeros((3, 4), int))
    expected = np.zeros(13)
    np.add.at(expected, parts.ravel(), weights.ravel())
    expected = np.where(MASK, expected[1:].reshape(3, 4), 0)
    np.testing.assert_array_equal(actual_gradient, expected)


def test_several_arrays_at_once():
    x, y = jn.broadcast_arrays(X, jnp.arange(4.0))
    assert_masked(x, X.data, MASK)
    assert_masked(y, np.tile(np.arange(4.0), (3, 1)), np.ones((3, 4), bool))
    x, y = jn.atleast_2d(X[0], 3.0)
    assert_masked(x, X.data[:1], MASK[:1])
    assert_masked(y, [[3.0]], [[True]])


def test_plain_arrays_pass_through():
    a = jnp.arange(12.0).reshape(3, 4)
    for name, *args in MOVES:
        chex.assert_trees_all_equal(getattr(jn, name)(a, *args), getattr(jnp, name)(a, *args))
    for name in ("sort", "argsort", "copy", "zeros_like", "ones_like"):
        chex.assert_trees_all_equal(getattr(jn, name)(a), getattr(jnp, name)(a))
    chex.assert_trees_all_equal(jn.where(a > 3, a, 0), jnp.where(a > 3, a, 0))
    chex.assert_trees_all_equal(jn.where(a > 3), jnp.where(a > 3))
    chex.assert_trees_all_equal(jn.full_like(a, 2, shape=(2,)), jnp.full_like(a, 2, shape=(2,)))
    chex.assert_trees_all_equal(jn.masked_fill(a, a > 3, 0), jnp.where(a > 3, 0, a))


def test_pad():
    assert_masked(
        jn.pad(X, ((0, 1), (0, 0)), constant_values=7),
        np.pad(X.data, ((0, 1), (0, 0)), constant_values=7),
        np.pad(MASK, ((0, 1), (0, 0)), constant_values=True),
    )
    assert_masked(jn.pad(X, 1, "empty"), np.pad(X.data, 1), np.pad(MASK, 1))


def test_diag_of_a_vector_has_valid_zeros():
    assert_masked(jn.diag(X[0]), np.diag(X.data[0]), np.diag(MASK[0]) | ~np.eye(4, dtype=bool))


@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.parametrize("descending", [False, True])
def test_sort(axis, descending):
    x = X.with_values(X.data.at[0, 0].set(jnp.nan))  # a valid nan stays where JAX puts it
    data, mask = (a.ravel() if axis is None else a for a in (np.asarray(x.data), MASK))
    along = axis or 0
    expected, valid = np.zeros_like(data), np.zeros_like(mask)
    lines = zip(
        np.moveaxis(data, along, 0).reshape(data.shape[along], -1).T,
        np.moveaxis(mask, along, 0).reshape(data.shape[along], -1).T,
        strict=True,
    )
    columns = []
    for line, exists in lines:
        entries = np.asarray(jnp.sort(line[exists], descending=descending))
        count = len(line) - len(entries)
        columns.append(np.concatenate([entries, np.zeros(count)]))
    shape = np.moveaxis(data, along, 0).shape
    expected = np.moveaxis(np.array(columns).T.reshape(shape), 0, along)
    valid = np.flip(np.sort(mask, along), along)
    function = lambda x: jn.sort(x, axis, descending=descending)
    for result in (function(x), jax.jit(function)(x)):
        assert_masked(result, expected, valid)
    order = jn.argsort(x, axis, descending=descending)
    flat = jn.ravel(x) if axis is None else x
    assert_masked(jn.take_along_axis(flat, order, along), expected, valid)


def test_sort_is_stable_and_differentiable():
    x = jmask.masked_tensor([2.0, 1.0, 9.0, 1.0, 2.0], [True, True, False, True, True])
    assert jn.argsort(x).tolist() == [1, 3, 0, 4, None]
    assert jn.argsort(x, descending=True).tolist() == [0, 4, 1, 3, None]
    np.testing.assert_array_equal(cases.gradient(jn.sort, x), [3, 1, 0, 2, 4])
    extremes = jmask.masked_tensor([jnp.inf, 1.0, jnp.nan], [True, True, False])
    assert jn.sort(extremes).tolist() == [1.0, np.inf, None]
    assert_masked(jn.argsort(x, dtype=jnp.int8), [1, 3, 0, 4, 0], [1, 1, 1, 1, 0])


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_dtypes(dtype):
    """One compilation for each dtype; values, masks and dtypes as NumPy moves them."""
    x = example(dtype)

    def function(x):
        return {
            "reshape": x.reshape(2, 6),
            "concatenate": jn.concatenate([x, x]),
            "take": jn.take(x, jnp.array([0, 7]), 0),
            "where": jn.where(ROW[:, None], x, jn.flip(x)),
            "triu": jn.triu(x),
            "pad": jn.pad(x, 1),
            "set": x.at[0].set(x[1]),
            "sort": jn.sort(x),
            "zeros_like": jn.zeros_like(x),
            "getitem": x[:, 1:],
            "updates": x.at[0, 1].set(x[0, 0]).at[1, :].min(x[2, :]),
        }

    results, data = jax.jit(function)(x), np.asarray(x.data)
    assert all(result.dtype == dtype for result in results.values())
    assert_masked(results["reshape"], data.reshape(2, 6), MASK.reshape(2, 6))
    assert_masked(results["concatenate"], np.tile(data, (2, 1)), np.tile(MASK, (2, 1)))
    assert_masked(results["take"], data[[0, 0]], [MASK[0], [False] * 4])
    chosen = np.where(ROW[:, None], data, np.flip(data))
    assert_masked(results["where"], chosen, np.where(ROW[:, None], MASK, np.flip(MASK)))
    assert_masked(results["triu"], np.triu(data), MASK | ~np.triu(np.ones((3, 4), bool)))
    assert_masked(results["pad"], np.pad(data, 1), np.pad(MASK, 1, constant_values=True))
    assert_masked(results["set"], data[[1, 1, 2]], MASK[[1, 1, 2]])
    assert_masked(results["getitem"], data[:, 1:], MASK[:, 1:])
    assert_masked(results["zeros_like"], np.zeros_like(data), MASK)
    for row, result, exists in zip(data, results["sort"], MASK, strict=True):
        entries = np.asarray(jnp.sort(row[exists]))
        valid = np.arange(4) < len(entries)
        assert_masked(result, np.resize(entries, 4), valid)
    data, mask = np.array(data), MASK.copy()
    data[0, 1], mask[0, 1] = data[0, 0], True
    data[1] = np.asarray(jnp.minimum(x.data[1], x.data[2]))
    mask[1] &= mask[2]
    assert_masked(results["updates"], data, mask)


# --- indexing and `.at`: data, masks and gradients ------------------------------------

INDICES = {
    "integer": 1,
    "negative": -1,
    "two integers": (2, 1),
    "slice": slice(1, None),
    "step": (slice(None), slice(None, None, -2)),
    "none": (None, 0),
    "ellipsis": (..., 2),
    "array": np.array([2, 0, 2]),
    "list": [2, 0, 2],
    "two arrays": (np.array([2, 0]), np.array([[1], [3]])),
    "array after slice": (slice(None), np.array([[3, 0]])),
    "mask": MASK,
    "row mask": np.array([True, False, True]),
    "empty": slice(3, None),
    "scalar array": np.int32(1),
}


@pytest.fixture(scope="module")
def compiled():
    """Every index under jit, its gradient, and updates, in one compilation."""

    def run(x, index):
        return {
            "getitem": x[index],
            "gradient": cases.gradient(lambda x: x[index], x),
            "get": x.at[index].get(),
            "set": x.at[index].set(7),
            "set masked": x.at[index].set(x[index]),
            "add": x.at[index].add(1),
        }

    everything = jax.jit(lambda x: {k: run(x, index) for k, index in INDICES.items()})
    return everything(X)


@pytest.mark.parametrize("name", INDICES)
def test_getitem(name, compiled):
    index = INDICES[name]
    places = cases.numbered(X)[index]
    expected = cases.moved_by_numpy(places, X)
    for result in (X[index], compiled[name]["getitem"], compiled[name]["get"]):
        assert_masked(result, *expected)
    expected = np.zeros(13)
    np.add.at(expected, np.ravel(places), np.arange(1, places.size + 1))
    expected = np.where(MASK, expected[1:].reshape(3, 4), 0)
    np.testing.assert_array_equal(compiled[name]["gradient"], expected)


@pytest.mark.parametrize("name", INDICES)
def test_updates_everywhere(name, compiled):
    index, data, mask = INDICES[name], np.array(X.data), MASK.copy()
    data[index], mask[index] = 7, True
    assert_masked(compiled[name]["set"], data, mask)
    assert_masked(compiled[name]["set masked"], X.data, MASK)
    data = np.array(X.data)
    np.add.at(data, index, 1)
    assert_masked(compiled[name]["add"], data, MASK)


def test_out_of_range_reads_the_border():
    for index in (7, -9, np.array([7, -9])):
        assert_masked(X[index], X.data[index], jnp.asarray(MASK)[index])
    beyond = X.at[jnp.array([1, 7])].get(mode="fill")
    assert_masked(beyond, X.data[np.array([1, 1])], [MASK[1], [False] * 4])
    filled = X.at[jnp.array([1, 7])].get(mode="fill", fill_value=5)
    assert filled[1].tolist() == [5.0] * 4


INDEX = jmask.masked_tensor(jnp.array([2, 0, -1, 9]), [True, False, True, True])
KNOWN = np.array([True, False, True, True])


def test_masked_index():
    rows, exists = np.array([2, 0, 2, 2]), KNOWN[:, None]
    read = jax.jit(lambda x, i: (x[i], x[:, i], x[i, 1], x[None, ..., i], x[i, :, None]))
    for results in (read(X, INDEX), read.__wrapped__(X, INDEX)):
        by_row, by_column, with_integer, last, newaxis = results
        assert_masked(by_row, X.data[rows], MASK[rows] & exists)
        columns = np.array([2, 0, 3, 3])
        assert_masked(by_column, X.data[:, columns], MASK[:, columns] & KNOWN)
        assert_masked(with_integer, X.data[rows, 1], MASK[rows, 1] & KNOWN)
        assert_masked(last, X.data[None, :, columns], (MASK[:, columns] & KNOWN)[None])
        assert_masked(newaxis, X.data[rows][..., None], (MASK[rows] & exists)[..., None])
    expected = np.zeros((3, 4))
    np.add.at(expected, rows[KNOWN], np.arange(1, 17).reshape(4, 4)[KNOWN])
    actual = cases.gradient(lambda x: x[INDEX], X)
    np.testing.assert_array_equal(actual, np.where(MASK, expected, 0))
    narrow = jmask.masked_tensor(jnp.array([1, 2], jnp.int8), [True, False])
    assert jmask.masked_tensor(jnp.arange(300))[narrow].tolist() == [1, None]


def test_masked_index_writes_nothing():
    data = np.array(X.data)
    data[[2]] = 7
    mask = MASK.copy()
    mask[[2]] = True
    assert_masked(X.at[INDEX].set(7), data, mask)
    data[2], mask[2] = 7, True
    assert_masked(X.at[INDEX].set(7, mode="clip"), data, mask)
    assert_masked(X.at[INDEX].get(mode="fill")[3], np.zeros(4), [False] * 4)
    assert_masked(X.at[INDEX].get(), X[INDEX].data, X[INDEX].mask)


def test_rows_are_iterated_over():
    for row, data, mask in zip(X, X.data, MASK, strict=True):
        assert_masked(row, data, mask)
    assert [entry.item() for entry in X[0]] == [5.0, None, 3.0, 8.0]


# --- updates with values -----------------------------------------------------------------

OPERATIONS = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "mul": np.multiply,
    "divide": np.divide,
    "power": lambda a, b: np.abs(a) ** b,
    "min": np.minimum,
    "max": np.maximum,
}
VALUES = jmask.masked_tensor(jnp.array([2.0, 3.0, jnp.nan, 4.0]), [True, True, False, True])


@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_leaves_masked_entries_masked(name):
    x = X.with_values(jnp.abs(X.data))

    def updates(data, values):
        x_ = x.with_values(data)
        plain = getattr(x_.at[1], name)(values, unique_indices=True)
        v = VALUES.with_values(values)
        return plain, getattr(x_.at[0], name)(v, unique_indices=True)

    values = jnp.array([jnp.inf, 3.0, jnp.nan, 4.0])
    plain, masked = updates(x.data, values)
    data = np.array(x.data)
    with np.errstate(all="ignore"):
        data[1] = OPERATIONS[name](data[1], values)
        assert_masked(plain, data, MASK)
        data = np.array(x.data)
        data[0] = OPERATIONS[name](data[0], np.asarray(values))
    mask = MASK.copy()
    mask[0] &= np.asarray(VALUES.mask)
    assert_masked(masked, data, mask)

    weigh = lambda d, v: sum(cases.valid_sum(t) for t in updates(d, v))
    to_data, to_values = jax.jit(jax.grad(weigh, (0, 1)))(x.data, values.at[0].set(2.0))
    assert np.isfinite(to_data).all()
    assert np.isfinite(to_values).all()
    assert not to_data[~MASK].any()
    assert to_values[2] == 0


def test_set_with_masked_and_repeated_positions():
    x = X.at[0].set(VALUES)
    assert x[0].tolist() == [2.0, 3.0, None, 4.0]
    repeated = X[0].at[jnp.array([1, 1, 3])].set(VALUES[1:])
    assert repeated.tolist() == [5.0, None, 3.0, 4.0]
    added = X[0].at[jnp.array([0, 0, 3])].add(VALUES[1:])
    assert added.tolist() == [None, None, 3.0, 12.0]
    dropped = X[0].at[jnp.array([9, 0])].set(1)
    assert dropped.tolist() == [1.0, None, 3.0, 8.0]
    grads = jax.grad(lambda v: cases.valid_sum(X.at[0].set(VALUES.with_values(v))))(VALUES.data)
    np.testing.assert_array_equal(grads, [1, 2, 0, 4])


def test_apply():
    assert_masked(
        X.at[0].apply(jnp.exp), np.concatenate([np.exp(X.data[:1]), X.data[1:]]), MASK
    )
    repeated = X[0].at[jnp.array([0, 0])].apply(jnp.negative)
    assert repeated.tolist() == [-5.0, None, 3.0, 8.0]
    roots = cases.gradient(lambda x: x.at[:].apply(jnp.log), X.with_values(jnp.abs(X.data)))
    expected = np.where(MASK, cases.numbered(X) / np.abs(X.data), 0)
    np.testing.assert_allclose(roots, expected, rtol=1e-6)


def test_vmap_and_repr():
    rows = jax.vmap(lambda row, i: row.at[i].add(1)[::-1])(X, jnp.array([0, 1, 2]))
    data = np.array(X.data)
    data[[0, 1, 2], [0, 1, 2]] += 1
    assert_masked(rows, data[:, ::-1], MASK[:, ::-1])
    assert repr(X[0].at).startswith("At(MaskedTensor(")
    assert repr(X[0].at[1]).startswith("Positions(MaskedTensor(")
