"""`embedding_lookup` and `renormalize` against NumPy, with the gradient that is wanted."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import checkify
from jax.experimental.sparse import BCOO, BCSR

import jmask
from tests.compiled_step import IN_PLACE, whole_table_operations
from tests.embedding_oracle import MODES, looked_up, normal, sources, strictness, table_gradient
from tests.oracle import dense_twin

V, D, N = 6, 3, 8
TABLE, WEIGHTS = normal(V, D), normal(N, D)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

modes = pytest.mark.parametrize("mode", MODES)


def weighed(rows: jax.Array) -> jax.Array:
    """A loss whose cotangents are `2 * WEIGHTS * rows`, where there are rows."""
    weights = WEIGHTS.reshape(*rows.shape)
    return jnp.sum(jnp.where(jnp.isnan(rows), 0, rows) ** 2 * weights)


def cotangents(rows: np.ndarray) -> np.ndarray:
    return 2 * WEIGHTS.reshape(rows.shape) * np.nan_to_num(rows)


@functools.cache
def compiled(padding: int | None, mode: str) -> dict[str, Callable[..., Any]]:
    """Gradients of both kinds, with the rows, under jit; "raise" with its error."""

    def loss(table: Any, ids: Any) -> tuple[jax.Array, jax.Array]:
        rows = jmask.embedding_lookup(table, ids, padding_id=padding, mode=mode)
        return weighed(rows), rows

    functions = {
        "dense": jax.jit(jax.grad(loss, has_aux=True)),
        "sparse": jax.jit(jmask.grad(loss, has_aux=True)),
    }
    if mode == "raise":
        functions = {name: checkify.checkify(f) for name, f in functions.items()}
        return {name: functools.partial(_second, f) for name, f in functions.items()}
    return functions


def _second(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)[1]


@pytest.mark.parametrize(
    ("mode", "padding"), [*itertools.product(MODES, (None, 2)), ("fill", -1)]
)
@given(ids=st.lists(st.integers(-4, V + 3), min_size=N, max_size=N))
def test_values_and_gradients(mode: str, padding: int | None, ids: list[int]) -> None:
    functions, source = compiled(padding, mode), sources(ids, padding, mode, V)
    expected = looked_up(TABLE, source, mode)
    gradient = table_gradient(cotangents(expected), source, V)
    ids = jnp.asarray(ids, jnp.int32)
    dense, rows = functions["dense"](TABLE, ids)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_allclose(dense, gradient, **CLOSE)
    with strictness():
        sparse, rows = functions["sparse"](TABLE, ids)
    np.testing.assert_array_equal(rows, expected)
    assert sparse.nse == N
    # A row that is trained is one that was looked up, duplicates and all.
    np.testing.assert_array_equal(sparse.indices, np.where(source < 0, V, source))
    np.testing.assert_allclose(dense_twin(sparse), gradient, **CLOSE)


@modes
@pytest.mark.parametrize("padding", [None, V])
def test_eager(mode: str, padding: int | None) -> None:
    ids = np.array([2, 0, 5, 2, 1, 0, 2, 4])
    if mode != "raise":
        ids[1:4] = [-1, V, 17]
    source = sources(ids, padding, mode, V)
    expected = looked_up(TABLE, source, mode)
    options: dict[str, Any] = {"padding_id": padding, "mode": mode}
    with jmask.strict():
        rows = jmask.embedding_lookup(TABLE, ids, **options)
        sparse = jmask.grad(lambda t: weighed(jmask.embedding_lookup(t, ids, **options)))(TABLE)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(sparse.indices, np.where(source < 0, V, source))
    gradient = table_gradient(cotangents(expected), source, V)
    np.testing.assert_allclose(dense_twin(sparse), gradient, **CLOSE)


# --- ids of every kind -------------------------------------------------------------------

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["NumPy", "JAX"])
def test_ids_of_every_dtype(dtype: str, kind: str) -> None:
    """The ends of each dtype are outside, and never wrap onto a row."""
    limits = np.iinfo(dtype)
    wide = [2**32 + 3, 2**31] if limits.bits == 64 else []
    ids = np.array([0, 1, 1, limits.min, limits.max, limits.max // 2 + 1, *wide], dtype)
    with jax.enable_x64(kind == "JAX" and limits.bits == 64):
        given = ids if kind == "NumPy" else jnp.asarray(ids)
        for mode in ("fill", "clip"):
            found = jmask.embedding_lookup(TABLE, given, padding_id=1, mode=mode)
            expected = looked_up(TABLE, sources(ids, 1, mode, V), mode)
            np.testing.assert_array_equal(found, expected)
        found = jmask.embedding_lookup(TABLE, given[:3], padding_id=1, mode="raise")
        np.testing.assert_array_equal(found, expected[:3])


def test_a_table_with_more_rows_than_a_narrow_dtype_counts() -> None:
    table, ids = np.arange(300.0), np.array([0, 255, 7], np.uint8)
    for mode in MODES:
        found = jmask.embedding_lookup(table, ids, mode=mode, padding_id=-1)
        np.testing.assert_array_equal(found, [0, 255, 7])


@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("ids", [[], 3, [[3, 1]], np.zeros((2, 0, 3), int)], ids=str)
def test_ids_of_every_shape(mode: str, ids: Any) -> None:

    def loss(table: Any) -> tuple[jax.Array, jax.Array]:
        rows = jmask.embedding_lookup(table, ids, mode=mode, padding_id=0)
        return jnp.sum(rows**2), rows

    with jmask.strict():
        gradient, rows = jax.jit(jmask.grad(loss, has_aux=True))(TABLE)
    np.testing.assert_array_equal(rows, TABLE[np.asarray(ids, int)])
    np.testing.assert_array_equal(gradient.indices, np.ravel(ids))
    np.testing.assert_allclose(gradient.values, 2 * TABLE[gradient.indices], rtol=1e-6)


# --- tables of every kind ----------------------------------------------------------------


@modes
@pytest.mark.parametrize("shape", [(V,), (V, 2, 2), (V, 0)])
def test_rows_of_every_shape(mode: str, shape: tuple[int, ...]) -> None:
    table = normal(*shape)
    ids = [2, 0, 5] if mode == "raise" else [2, -1, 17]
    expected = looked_up(table, sources(ids, 0, mode, V), mode)
    found = jmask.embedding_lookup(table, ids, mode=mode, padding_id=0)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "dtype", [bool, "int8", "uint8", "int32", "float16", jnp.bfloat16, "complex64"]
)
def test_tables_of_every_dtype(dtype: Any) -> None:
    """A row that does not exist is what `jnp.take` gives."""
    table = jnp.asarray(np.arange(6).reshape(3, 2) % 5, dtype)
    ids = np.array([1, 3, 2])
    lookup = jax.jit(jmask.embedding_lookup, static_argnames=("padding_id", "mode"))
    filled = np.asarray(lookup(table, ids, padding_id=2))
    expected = np.array(jnp.take(table, ids, axis=0, mode="fill"))
    expected[2] = 0
    assert filled.dtype == table.dtype
    assert filled.tobytes() == expected.tobytes()
    expected[1] = 0
    assert (lookup(table, ids, padding_id=2, mode="zero") == expected).all()


@pytest.mark.parametrize("mode", ["fill", "zero"])
def test_a_table_without_rows(mode: str) -> None:
    found = jmask.embedding_lookup(np.zeros((0, 2)), [0, 3, -1], mode=mode, padding_id=3)
    other = math.nan if mode == "fill" else 0
    np.testing.assert_array_equal(found, [[other] * 2, [0, 0], [other] * 2])


@pytest.mark.parametrize(
    ("mode", "padding"),
    [("fill", 2), ("clip", V), ("zero", None), ("raise", 2)],
)
def test_row_sparse_table(mode: str, padding: int | None) -> None:
    """Rows that are not stored are zeros; the gradient of the stored ones is exact."""
    stored = np.array([4, 0, V, 4, -1, 1])  # duplicates, padding, not in order
    values = normal(6, D)
    ids = np.array([4, 3, 0, 4, 2, 1, 5, 0])
    if mode != "raise":
        ids[:2] = [-3, V]
    source = sources(ids, padding, mode, V)
    dense = dense_twin(jmask.RowSparse(stored, values, (V, D)))

    @functools.partial(jax.grad, has_aux=True)
    def gradient_and_rows(values: Any) -> tuple[jax.Array, jax.Array]:
        table = jmask.RowSparse(stored, values, (V, D))
        rows = jmask.embedding_lookup(table, ids, padding_id=padding, mode=mode)
        return weighed(rows), rows

    expected = looked_up(dense, source, mode)
    found, rows = jax.jit(gradient_and_rows)(values)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
    gradient = np.zeros((6, D))
    real = (stored >= 0) & (stored < V)
    gradient[real] = table_gradient(cotangents(expected), source, V)[stored[real]]
    np.testing.assert_allclose(found, gradient, rtol=1e-5)


def test_row_sparse_table_with_nothing_stored() -> None:
    table = jmask.RowSparse.zeros((V, 2))
    found = jmask.embedding_lookup(table, [0, V, 3], padding_id=3)
    np.testing.assert_array_equal(found, [[0, 0], [math.nan] * 2, [0, 0]])


def test_padding_of_a_row_sparse_table_is_no_row() -> None:
    """Whatever its values are."""
    values = np.array([[1.0, 2], [math.nan, 7]])
    table = jmask.RowSparse([1, V], values, (V, 2), coalesced=True)
    found = jmask.embedding_lookup(table, [1, -1, V], padding_id=-1, mode="zero")
    np.testing.assert_array_equal(found, [[1, 2], [0, 0], [0, 0]])


# --- what lies in a padded row -----------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "max_norm"), [*((mode, None) for mode in MODES), ("fill", 0.5), ("clip", 0.5)]
)
def test_nothing_leaks_from_a_padded_row(mode: str, max_norm: Any) -> None:
    poisoned, clean = TABLE.copy(), TABLE.copy()
    poisoned[2], clean[2] = (math.nan, math.inf, -math.inf), 0
    options: dict[str, Any] = {"padding_id": 2, "mode": mode, "max_norm": max_norm}
    loss = lambda t: jnp.sum(jmask.embedding_lookup(t, [2, 0, 2, 5], **options) ** 2)
    both = jax.jit(jmask.value_and_grad(loss))
    value, gradient = both(poisoned)
    expected, other = both(clean)
    assert value == expected
    np.testing.assert_array_equal(gradient.indices, [V, 0, V, 5])
    np.testing.assert_array_equal(gradient.values, other.values)


# --- inside other transformations --------------------------------------------------------

IDS = np.array([[1, 2], [3, 3]])

Loss = Callable[[Any, Any], Any]


def scanned(loss: Loss) -> Loss:
    return lambda t, ids: jax.lax.scan(lambda c, i: (c + loss(t, i), None), 0.0, ids)[0]


def vmapped(loss: Loss) -> Loss:
    return lambda t, ids: jax.vmap(lambda i: loss(t, i))(ids).sum()


def branched(loss: Loss) -> Loss:
    return lambda t, ids: jax.lax.cond(ids[0, 0] == 1, loss, lambda t, ids: 0.0, t, ids)


PROGRAMS: dict[str, Callable[[Loss], Loss]] = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": scanned,
    "vmap": vmapped,
    "cond": branched,
    "scan of remat": lambda loss: scanned(jax.checkpoint(loss)),
    "scan of scan": lambda loss: scanned(lambda t, i: scanned(loss)(t, i[None])),
    "vmap of scan": lambda loss: vmapped(lambda t, i: scanned(loss)(t, i[:, None])),
}


def plain_loss(mode: str) -> Loss:
    return lambda t, ids: jnp.sum(
        jnp.sin(jmask.embedding_lookup(t, ids, padding_id=3, mode=mode)) ** 2
    )


# All ids in the table, or padding: there the modes are the same.
ZERO_GRADIENT = jax.jit(jax.grad(plain_loss("zero")))


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "fill") for name in PROGRAMS]
    + [("scan", "clip"), ("vmap", "clip"), ("vmap", "zero")],
)
def test_row_sparse_inside(name: str, mode: str) -> None:
    loss = PROGRAMS[name](plain_loss(mode))
    with jmask.strict():
        gradient = jax.jit(jmask.grad(loss))(TABLE, IDS)
    assert isinstance(gradient, jmask.RowSparse)
    expected = ZERO_GRADIENT(TABLE, IDS)
    np.testing.assert_allclose(dense_twin(gradient), expected, rtol=1e-5)


# --- mode "raise" ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "differentiate"),
    [(name, jmask.value_and_grad) for name in PROGRAMS]
    + [("jit", jax.value_and_grad), ("scan", jax.value_and_grad)],
)
def test_raise_under_checkify(name: str, differentiate: Any) -> None:
    """Also of a scan that is differentiated, where JAX drops a check that stands alone."""
    step = differentiate(PROGRAMS[name](plain_loss("raise")))
    wrong, others = IDS.copy(), IDS.copy()
    wrong[1, 1], others[1, 1] = 40, 3  # 3 is padding
    checked = checkify.checkify(jax.jit(step))
    error, _ = checked(TABLE, IDS)
    assert error.get() is None
    error, (_, gradient) = checked(TABLE, wrong)
    with pytest.raises(checkify.JaxRuntimeError, match=r"`ids\[.*\]` is 40, .*\(6, 3\)"):
        error.throw()
    # The id that is wrong trains nothing, nor does it spoil the gradient of the others.
    if isinstance(gradient, jmask.RowSparse):
        assert set(np.asarray(gradient.indices).tolist()) <= {1, 2, 3, V}
        gradient = dense_twin(gradient)
    expected = ZERO_GRADIENT(TABLE, others)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("ids", "position", "value", "number"),
    [
        (7, "", 7, 1),
        ([0, -1, 9], r"\[1\]", -1, 2),
        ([[0, 3], [1, 2**40]], r"\[1, 1\]", 2**40, 1),
        (np.array([[0], [200]], np.uint8), r"\[1, 0\]", 200, 1),
    ],
)
def test_raise_for_concrete_ids(ids: Any, position: str, value: int, number: int) -> None:
    message = rf"`ids{position}` is {value}, which is no row .* \(6, 3\) \({number} such"
    lookup = lambda t: jnp.sum(jmask.embedding_lookup(t, ids, mode="raise", padding_id=V))
    for function in (lookup, jax.jit(lookup), jax.grad(lookup), jmask.grad(lookup)):
        with pytest.raises(IndexError, match=message):
            function(TABLE)


def test_raise_for_ids_that_the_loss_computes() -> None:
    """Outside jit no checkify is needed: the check runs, and raises, by itself."""
    loss = lambda t, ids: jnp.sum(jmask.embedding_lookup(t, ids + 4, mode="raise"))
    ids = jnp.array([0, 3])
    for differentiate in (jax.grad, jmask.grad):
        with pytest.raises((IndexError, checkify.JaxRuntimeError), match=r"`ids\[1\]` is 7"):
            differentiate(loss)(TABLE, ids)


@pytest.mark.parametrize("position", [(), (2,), (1, 2)])
def test_raise_names_the_position(position: tuple[int, ...]) -> None:
    ids = np.zeros(tuple(i + 1 for i in position), np.int32)
    ids[position] = -5
    lookup = jax.jit(lambda t, ids: jmask.embedding_lookup(t, ids, mode="raise"))
    error, rows = checkify.checkify(lookup)(TABLE, ids)
    at = str(list(position)) if position else ""
    assert f"`ids{at}` is -5, which is no row of the table" in error.get()
    np.testing.assert_array_equal(rows[position], np.zeros(D))


def test_checkify_inside_jit() -> None:
    step = jax.jit(checkify.checkify(jmask.grad(plain_loss("raise"))))
    assert step(TABLE, IDS)[0].get() is None
    assert "`ids[0, 1]` is 11" in step(TABLE, np.array([[1, 11], [3, 3]]))[0].get()


def test_raise_without_checkify_says_what_is_missing() -> None:
    step = jax.jit(lambda t, ids: jmask.embedding_lookup(t, ids, mode="raise"))
    with pytest.raises(ValueError, match=r"functionalizing it through `checkify\.checkify`"):
        step(TABLE, IDS)


# --- max_norm ----------------------------------------------------------------------------

NORMS = (1, 2.0, 3, 0.5, math.inf)
LONG = np.array([[3, -4, 0], [0.1, 0, 0.2], [0, 0, 0], [0, 2, 0], [1, 1, 1], [-9, 1, 0]])


def row_norms(table: np.ndarray, p: float) -> np.ndarray:
    if p == math.inf:
        return np.abs(table).max(-1, keepdims=True)
    return (np.abs(table) ** p).sum(-1, keepdims=True) ** (1 / p)


def bounded(rows: np.ndarray, bound: float, p: float) -> np.ndarray:
    return rows * np.minimum(1, bound / np.maximum(row_norms(rows, p), 1e-9))


@pytest.mark.parametrize("p", NORMS)
def test_max_norm(p: float) -> None:
    """The derivative, too, is that of the scaled row: in the table and in the bound."""
    ids = np.array([0, 1, 2, 3, 4, 5, 0])
    weights = normal(7, D)

    def loss(table: Any, bound: Any) -> tuple[jax.Array, jax.Array]:
        rows = jmask.embedding_lookup(table, ids, max_norm=bound, norm_type=p)
        return jnp.sum(rows * weights), rows

    gradient = jax.jit(jmask.grad(loss, (0, 1), has_aux=True))
    smooth = LONG + np.where(LONG.any(1, keepdims=True), 0.01, 0) * np.arange(1, 19).reshape(
        V, D
    )
    with jmask.strict():
        (sparse, in_bound), rows = gradient(smooth, 1.5)
    np.testing.assert_allclose(rows, bounded(smooth[ids], 1.5, p), rtol=1e-6)
    in_table = dense_twin(sparse)
    numpy_loss = lambda t, m: (bounded(t[ids], m, p) * weights).sum()
    for at in np.ndindex(V, D):
        step = np.zeros((V, D))
        step[at] = 1e-6
        slope = numpy_loss(smooth + step, 1.5) - numpy_loss(smooth - step, 1.5)
        assert in_table[at] == pytest.approx(slope / 2e-6, rel=1e-4, abs=1e-4)
    slope = numpy_loss(smooth, 1.5 + 1e-6) - numpy_loss(smooth, 1.5 - 1e-6)
    assert in_bound == pytest.approx(slope / 2e-6, rel=1e-4)

    # Ties, zeros, and a row of zeros, through which the derivative passes as through others
    # that are short enough.
    (sparse, in_bound), rows = gradient(LONG, 1.5)
    np.testing.assert_allclose(rows, bounded(LONG[ids], 1.5, p), rtol=1e-6)
    assert np.isfinite(sparse.values).all()
    assert np.isfinite(in_bound)
    np.testing.assert_allclose(sparse.values[2], weights[2], rtol=1e-6)


def test_max_norm_at_the_ends_of_the_range() -> None:
    table = np.array([[3e30, 4e30], [3e-30, 4e-30], [math.inf, 1], [math.nan, 9]], np.float32)
    lookup = jax.jit(lambda t, m: jmask.embedding_lookup(t, np.arange(4), max_norm=m))
    np.testing.assert_allclose(lookup(table, 5.0)[:2], [[3, 4], table[1]], rtol=1e-6)
    np.testing.assert_allclose(lookup(table, 5e-31)[1], [3e-31, 4e-31], rtol=1e-6)
    np.testing.assert_array_equal(lookup(table, 5.0)[2:], table[2:])
    gradient = jax.grad(lambda t: jnp.sum(lookup(t, 5.0)[2:]))(table)
    np.testing.assert_array_equal(gradient[2:], np.ones((2, 2)))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_max_norm_of_narrow_tables(dtype: Any) -> None:
    """The norm is that of float32: 300² is beyond float16."""
    table = jnp.asarray([[300, 400], [1, 2]], dtype)
    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(lambda t: jmask.embedding_lookup(t, [0, 1], max_norm=5.0))(table)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found.astype(np.float32), [[3, 4], [1, 2]])


# --- renormalize -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "padding", "p"),
    [(jax.jit, None, 2), (jax.jit, 3, 1), (jax.jit, -1, math.inf), (lambda f: f, 3, 2)],
)
def test_renormalize(wrap: Any, padding: int | None, p: float) -> None:
    ids = np.array([[0, 3, 0], [-1, V, 1], [3, 2, 4]])  # 5 is not among them
    expected = LONG.copy()
    for row in {0, 1, 2, 3, 4} - {padding}:
        norm = row_norms(LONG[row], p)
        if norm > 1.5:
            expected[row] = LONG[row] * 1.5 / (norm + 1e-7)
    table = LONG.astype(np.float32)
    renormalize = lambda t, i: jmask.renormalize(t, i, 1.5, norm_type=p, padding_id=padding)
    found = np.asarray(wrap(renormalize)(table, ids))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    same = (expected == LONG).all(1)
    assert found[same].tobytes() == table[same].tobytes()


@pytest.mark.parametrize(("table", "ids"), [(LONG, []), (LONG[:0], [3]), (LONG, [-1, V])])
def test_renormalize_nothing(table: np.ndarray, ids: list[int]) -> None:
    table = table.astype(np.float32)
    found = jax.jit(jmask.renormalize)(table, np.array(ids, np.int32), 1.0)
    np.testing.assert_array_equal(found, table)


def test_renormalize_more_ids_than_rows() -> None:
    ids = np.tile(np.arange(-1, V + 1), 3)
    found = jax.jit(jmask.renormalize)(LONG, ids, 1.0)
    np.testing.assert_allclose(found, bounded(LONG, 1.0, 2), rtol=1e-6)


@pytest.mark.parametrize("table", [LONG[:, 0], LONG.reshape(V, 1, D).astype(np.float16)])
def test_renormalize_rows_of_every_shape(table: np.ndarray) -> None:
    found = jax.jit(jmask.renormalize)(table, np.array([0, 5]), 1.5)
    assert found.dtype == jnp.asarray(table).dtype
    axes = tuple(range(1, table.ndim))
    norms = np.sqrt((np.asarray(found, np.float64) ** 2).sum(axes))
    np.testing.assert_allclose(norms[[0, 5]], 1.5, rtol=1e-3)
    np.testing.assert_array_equal(found[1:5], np.asarray(jnp.asarray(table))[1:5])


def renormalized(table: Any, ids: Any) -> Any:
    return jmask.renormalize(table, ids, 1.0)


def renormalized_step(table: Any, ids: Any) -> Any:
    table, tx = renormalized(table, ids), jmask.sgd(0.1)
    loss = lambda t: jnp.sum(jmask.embedding_lookup(t, ids, padding_id=0) ** 2)
    return jmask.apply_gradients(tx, jmask.grad(loss)(table), tx.init(table), table)[0]


@pytest.mark.parametrize("step", [renormalized, renormalized_step])
def test_renormalize_in_place(step: Any) -> None:
    """A donated table is the one that comes out, and nothing else is as large."""
    rows, row, count = 10**7, 16, 512
    table = jax.ShapeDtypeStruct((rows, row), jnp.float32)
    ids = jax.ShapeDtypeStruct((count,), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(table, ids).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= rows * row * 4
    assert memory.temp_size_in_bytes < 16 * count * row * 4
    assert whole_table_operations(compiled, rows * row) <= IN_PLACE


# --- bad input ---------------------------------------------------------------------------

INTEGERS = np.arange(V)
COO, CSR = BCOO.fromdense(TABLE), BCSR.fromdense(TABLE)

BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "float ids": (
        lambda t: jmask.embedding_lookup(t, [0.0]),
        TypeError,
        "`ids` must be integers, got float64",
    ),
    "bool ids": (
        lambda t: jmask.embedding_lookup(t, jnp.array([True])),
        TypeError,
        "`ids` must be integers, got bool",
    ),
    "masked ids": (
        lambda t: jmask.embedding_lookup(t, jmask.masked_tensor(INTEGERS, INTEGERS > 2)),
        TypeError,
        r"`ids` is a MaskedTensor: .* `ids\.to_tensor\(-1\)`.* `padding_id`",
    ),
    "scalar table": (
        lambda t: jmask.embedding_lookup(t[0, 0], [0]),
        ValueError,
        "`table` must have a dimension of rows, got a scalar",
    ),
    "BCOO": (
        lambda t: jmask.embedding_lookup(COO, [0]),
        TypeError,
        r"`table` must be an array or a jmask\.RowSparse, got BCOO: pass `table\.todense",
    ),
    "BCSR": (
        lambda t: jmask.embedding_lookup(CSR, [0]),
        TypeError,
        "`table` must be .* got BCSR",
    ),
    "masked table": (
        lambda t: jmask.embedding_lookup(jmask.masked_tensor(TABLE, TABLE > 0), [0]),
        TypeError,
        r"got MaskedTensor: pass `table\.to_tensor\(0\)`",
    ),
    "mode": (
        lambda t: jmask.embedding_lookup(t, [0], mode="wrap"),
        ValueError,
        "`mode` must be one of 'fill', 'clip', 'zero', 'raise', got 'wrap'",
    ),
    "clip to nothing": (
        lambda t: jmask.embedding_lookup(t[:0], [0], mode="clip"),
        ValueError,
        r"`mode` 'clip' has no row to clip to in a table of shape \(0, 3\)",
    ),
    "float padding": (
        lambda t: jmask.embedding_lookup(t, [0], padding_id=0.5),
        TypeError,
        "`padding_id` must be an integer .* got 0.5",
    ),
    "traced padding": (
        lambda t: jmask.embedding_lookup(t, [0], padding_id=jnp.argmax(t)),
        TypeError,
        "`padding_id` must be an integer that is known while tracing",
    ),
    "bool padding": (
        lambda t: jmask.embedding_lookup(t, [0], padding_id=True),
        TypeError,
        "`padding_id` must be an integer .* got True",
    ),
    "max_norm 0": (
        lambda t: jmask.embedding_lookup(t, [0], max_norm=0),
        ValueError,
        "`max_norm` must be positive and finite, got 0",
    ),
    "max_norm < 0": (
        lambda t: jmask.embedding_lookup(t, [0], max_norm=np.float32(-1)),
        ValueError,
        "`max_norm` must be positive",
    ),
    "max_norm nan": (
        lambda t: jmask.renormalize(t, [0], math.nan),
        ValueError,
        "`max_norm` must be positive",
    ),
    "max_norm of several numbers": (
        lambda t: jmask.embedding_lookup(t, [0], max_norm=np.ones(V)),
        TypeError,
        "`max_norm` must be a number",
    ),
    "max_norm of integers": (
        lambda t: jmask.embedding_lookup(INTEGERS, [0], max_norm=1),
        TypeError,
        "`max_norm` needs a real, floating `table`, got int32",
    ),
    "norm_type 0": (
        lambda t: jmask.embedding_lookup(t, [0], max_norm=1, norm_type=0),
        ValueError,
        "`norm_type` must be positive, got 0",
    ),
    "norm_type in words": (
        lambda t: jmask.embedding_lookup(t, [0], norm_type="fro"),
        TypeError,
        "`norm_type` must be a Python number, got 'fro'",
    ),
    "renormalize to None": (
        lambda t: jmask.renormalize(t, [0], None),
        ValueError,
        "`max_norm` must be a positive number, got None",
    ),
    "renormalize float ids": (
        lambda t: jmask.renormalize(t, [0.5], 1),
        TypeError,
        "`ids` must be integers",
    ),
    "renormalize a RowSparse": (
        lambda t: jmask.renormalize(jmask.RowSparse.zeros((V, D)), [0], 1),
        TypeError,
        r"`table` must be an array, got RowSparse: pass `table\.todense\(\)`",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_bad_input(call: Any, error: type[Exception], message: str, traced: bool) -> None:
    if call is BAD["traced padding"][0] and not traced:
        assert call(TABLE).shape == (1, D)
        return
    with pytest.raises(error, match=message):
        jax.eval_shape(call, TABLE) if traced else call(TABLE)
