"""`jmask.dot` on every pair of storages against the sum over what they store, in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
from jmask import RowSparse, dot
from jmask._kernels import tuning
from jmask._tensors.storage import stype, with_stored_values
from tests.expressions import functions
from tests.oracle import densified
from tests.product_cases import COO, CSR, FEATURES, ROWS, STORED, Case, M, V, forms
from tests.sparse_arrays import coo, csr


def multiplied(lhs, rhs, a, b):
    return dot(a, b, transpose_a=lhs.transposed, transpose_b=rhs.transposed)


def falls_back(lhs, rhs):
    columns = rhs.kind == "row_sparse" and rhs.transposed
    return columns or (lhs.is_entries and rhs.is_entries)


def allowed(lhs, rhs):
    """The context in which a pair must be multiplied."""
    if falls_back(lhs, rhs):
        return pytest.warns(jmask.StorageFallbackWarning, match="`rhs`")
    return jmask.strict()


def is_row_sparse(lhs):
    by_rows = lhs.kind == "row_sparse" and lhs.summed == 1
    return by_rows or (lhs.is_entries and lhs.transposed)


todense = lambda x: x.todense() if isinstance(x, RowSparse) else x


@functools.cache
def program(lhs):
    """Results, gradients and tangents of the products with every right operand, of a batch."""

    def one(rhs, a, b, ct, dots):
        def f(va, vb):
            result = multiplied(lhs, rhs, lhs.build(va, a[1]), rhs.build(vb, b[1]))
            stored = (result.indices, result.values) if is_row_sparse(lhs) else ()
            return todense(result), stored

        with allowed(lhs, rhs):
            dense, forward, stored = jax.linearize(f, a[0], b[0], has_aux=True)
        back = jax.linear_transpose(forward, a[0], b[0])
        return stored, dense, back(ct.reshape(dense.shape)), forward(*dots)

    def run(arguments):
        return [one(rhs, *x) for rhs, x in zip(forms(False), arguments, strict=True)]

    return jax.jit(run), jax.jit(jax.vmap(run))


def check(found, lhs, case):
    """Values, gradients and tangents of one product; rows that are stored, and their order."""
    stored, dense, gradients, tangent = found
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    close(dense, case.product(case.a.values, case.b.values).reshape(dense.shape))
    jax.tree.map(close, tuple(gradients), tuple(case.gradients()))
    close(tangent, case.tangent().reshape(dense.shape))
    if is_row_sparse(lhs):
        ids, values = map(np.asarray, stored)
        assert len(ids) == min(M, STORED[lhs.kind])
        assert (np.diff(ids[ids < M]) > 0).all()
        assert not values[ids == M].any()


arguments_of = lambda c: ((c.a.values, c.a.indices), (c.b.values, c.b.indices), c.ct, c.dots)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(0, 10, 2))
@pytest.mark.parametrize("lhs", forms(True), ids=str)
def test_every_pair(lhs, seed):
    cases = [
        [Case(lhs, rhs, seed + 10 * i + j) for j in (0, 1)]
        for i, rhs in enumerate(forms(False))
    ]
    alone, together = program(lhs)
    batch = [jax.tree.map(lambda *x: np.stack(x), *map(arguments_of, pair)) for pair in cases]
    for found, (case, _) in zip(alone([arguments_of(c) for c, _ in cases]), cases, strict=True):
        check(found, lhs, case)
    for found, pair in zip(together(batch), cases, strict=True):
        for lane, case in enumerate(pair):
            check(jax.tree.map(lambda x, lane=lane: x[lane], found), lhs, case)


@pytest.mark.sampled
@pytest.mark.parametrize("rhs", forms(False), ids=str)
@pytest.mark.parametrize("lhs", forms(True), ids=str)
def test_eagerly(lhs, rhs):
    case = Case(lhs, rhs, 0)
    (va, ia), (vb, ib), *_ = arguments_of(case)
    with allowed(lhs, rhs):
        result = multiplied(lhs, rhs, lhs.build(va, ia), rhs.build(vb, ib))
    expected = case.product(va, vb)
    dense = todense(result)
    np.testing.assert_allclose(dense, expected.reshape(dense.shape), rtol=1e-4, atol=1e-5)
    assert isinstance(result, RowSparse) == is_row_sparse(lhs)
    if isinstance(result, RowSparse):
        assert result.coalesced
        result.validate()


FAR = 2_000_000_000
FAR_ENTRIES = {
    "csr": BCSR((jnp.ones(3), jnp.array([0, FAR, -FAR]), jnp.array([0, 2, 3])), shape=(2, 3),
                unique_indices=True),
    "coo": BCOO((jnp.ones(4), jnp.array([[0, 0], [0, FAR], [-FAR, 1], [FAR, -FAR]])),
                shape=(2, 3), unique_indices=True),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAR_ENTRIES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_entries_far_out_of_range(wrap, kind):
    """In masked products JAX's kernel for csr read their rows: a segmentation fault."""
    x = FAR_ENTRIES[kind]
    expected, masked = np.zeros((2, 16)), jmask.masked_tensor(x, jnp.ones(x.nse, bool))
    expected[0] = 1
    for product in (dot, jnm.dot, jnm.matmul):
        np.testing.assert_array_equal(wrap(product)(x, jnp.ones((3, 16))), expected)
    back = wrap(lambda x: dot(x, jnp.ones((2, 16)), transpose_a=True).todense())(x)
    np.testing.assert_array_equal(back, np.eye(3, 1) * np.ones(16))
    result = wrap(lambda x: x @ jnp.ones((3, 16)))(masked)
    np.testing.assert_array_equal(result.to_tensor(0), expected)
    np.testing.assert_array_equal(result.to_dense().mask, expected > 0)


def wide(values, w, columns):
    """A product with 9 columns; two entries are after the last row."""
    return dot(BCSR((values, columns, jnp.array([0, 3, 3, 6])), shape=(3, 4)), w)


def check_derivatives(function, values, w, others, dots, ct, expected, tolerance):
    """A product of stored values and a matrix, its derivatives, gradients and batches."""
    out, *_, of_w = expected

    @jax.jit
    def run(values, w, others):
        product = lambda values, w: function(values, w, others)
        out, forward = jax.linearize(product, values, w)
        gradients = jax.linear_transpose(forward, values, w)(ct)
        rows = jmask.grad(lambda w: jnp.vdot(ct, product(values, w)))(w)
        two = jnp.stack([values, 2 * values])
        one = jax.vmap(product)(two, jnp.stack([w, w]))
        other = jax.vmap(product, (0, None))(two, w)
        return out, forward(*dots), *gradients, one, other, rows

    with jmask.strict():
        *results, rows = run(values, w, others)
    check = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    both = np.stack([out, 2 * out])
    for x, y in zip((*results, densified(rows)), (*expected, both, both, of_w), strict=True):
        check(x, y)
    return check


@pytest.mark.parametrize("stray", [False, True])
def test_wide_products(stray):
    """A column that is none is not read, and nan nowhere; second derivatives, too."""
    rng = np.random.default_rng(0)
    rows = np.array([0, 0, 0, 2, 2, 2, 0, 0])
    columns = np.array([0, 2, 1, 2, -1 if stray else 0, 7 if stray else 2, 9, -5])
    inside = (columns >= 0) & (columns < 4) & (np.arange(8) < 6)
    values, dv, w, dw, ct = (
        np.float32(rng.normal(size=size)) for size in (8, 8, (4, 9), (4, 9), (3, 9))
    )
    values[~inside], w[3] = np.nan, np.nan

    def dense(values):
        x = np.zeros((3, 4))
        np.add.at(x, (rows[inside], columns[inside]), values[inside])
        return x

    at_values = lambda x: np.where(inside, x[rows, columns % 4], 0)
    used = np.nan_to_num(w)
    expected = (
        dense(values) @ used, dense(dv) @ used + dense(values) @ dw, at_values(ct @ used.T),
        dense(values).T @ ct,
    )  # fmt: skip
    check = check_derivatives(wide, values, w, columns, (dv, dw), ct, expected, 1e-5)
    squares = lambda v, columns: jnp.vdot(ct, wide(v, w, columns) ** 2)
    of_second = jax.jit(jax.jacobian(jax.grad(squares)))
    pairs = np.einsum("mn,kn,ln->mkl", ct, used, used)[rows[:, None], columns[:, None] % 4]
    second = np.take_along_axis(pairs[:, 0], columns[None] % 4, 1) * 2
    both = inside[:, None] & inside & (rows[:, None] == rows)
    check(of_second(values, columns), np.where(both, second, 0))


@pytest.mark.parametrize("kind", [coo, csr])
def test_products_of_many_entries(monkeypatch, kind):
    """Their terms are never materialised: rows are summed in bags. nan is read nowhere."""
    monkeypatch.setattr(tuning, "SMALL_ROWS", 4096)
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(70, 90)) * (rng.random((70, 90)) < 0.8))
    x[:, 5], x[7] = 0, 0
    w, dw, ct = np.float32(rng.normal(size=(3, 90, 4)))
    w[5], ct = np.nan, ct[:70]
    stored = kind(x)
    dv = np.float32(rng.normal(size=stored.data.shape))
    dx, used = np.asarray(with_stored_values(stored, dv).todense()), np.nan_to_num(w)
    assert "bag_sum" in str(jax.make_jaxpr(dot)(stored, w))
    product = lambda values, w, x: dot(with_stored_values(x, values), w)
    of_values = np.asarray(kind(np.where(x != 0, ct @ used.T, 0)).data)
    expected = x @ used, dx @ used + x @ dw, of_values, x.T @ ct
    check = check_derivatives(product, stored.data, w, stored, (dv, dw), ct, expected, 1e-4)
    order = rng.permutation(90)
    check(dot(stored, RowSparse(order, w[order], w.shape)), x @ used)


# --- special cases -----------------------------------------------------------------------


def test_rows_stored_by_coo_are_row_sparse():
    """A BCOO with one sparse dimension is a `RowSparse` in other clothes."""
    values, ids = jnp.array([[1.0, 2], [3, 4]]), jnp.array([[2], [0]])
    result = dot(BCOO((values, ids), shape=(3, 2)), jnp.eye(2))
    assert isinstance(result, RowSparse)
    np.testing.assert_array_equal(densified(result), [[3, 4], [0, 0], [1, 2]])


NONE, NO_ROWS = np.zeros((3, 4), np.float32), RowSparse.zeros((4, 2))
NAN, ONES = np.full((4, 2), np.nan, np.float32), np.ones((3, 2), np.float32)
of_size = lambda m, k: BCOO((jnp.ones(2), jnp.zeros((2, 2), jnp.int32)), shape=(m, k))
# Products with nothing stored, or of no size, and their shapes.
EMPTY = {
    code: (function, shape)
    for shape, text in {
        (3, 2): "dot(coo(NONE), NAN); dot(csr(NONE), NAN); dot(csr(NONE), NO_ROWS)",
        (4, 2): "dot(coo(NONE), ONES, transpose_a=True); dot(of_size(4, 0), ONES[:0])",
        (4, 3): "dot(NO_ROWS, ONES.T)", (2, 2): "dot(NO_ROWS, NAN, transpose_a=True)",
        (0, 2): "dot(of_size(0, 4), NAN); dot(of_size(0, 0), ONES[:0])",
        (4,): "dot(of_size(4, 0), ONES[:0, 0])",
    }.items()
    for code, function in functions("", globals())(text).items()
}  # fmt: skip


@pytest.mark.parametrize("code", EMPTY)
def test_nothing_stored_and_no_size(code):
    function, shape = EMPTY[code]
    with jmask.strict():
        np.testing.assert_array_equal(densified(jax.jit(function)()), np.zeros(shape))


RNG = np.random.default_rng(1)

# --- dtypes ------------------------------------------------------------------------------

COUNT = 4096
SOME = np.ones((2048, 1), "bfloat16")
WIDE = BCSR(
    (jnp.ones(COUNT, "bfloat16"), jnp.arange(COUNT) % 2048, [0, COUNT]), shape=(1, 2048)
)
TALL = BCSR((jnp.ones(COUNT, "bfloat16"), jnp.zeros(COUNT, int), [0, COUNT]), shape=(1, 2))
ONE_ROW = RowSparse(np.zeros(COUNT, int), jnp.ones((COUNT, 1), "bfloat16"), (3, 1))
SUMS = functions("", globals())("""
    dot(WIDE, SOME); dot(csr(SOME[:3].T), ONE_ROW); dot(ONE_ROW, SOME[:1]).values;
    dot(TALL, SOME[:1], transpose_a=True).values; dot(SOME[:3].T, ONE_ROW);
    dot(ONE_ROW, SOME[:3], transpose_a=True); dot(SOME.T, 2 * SOME)
""")


@pytest.mark.parametrize("code", SUMS)
def test_narrow_floats_are_summed_in_float32(code):
    """In bfloat16 a sum of ones ends at 256."""
    result = jax.jit(SUMS[code])()
    assert result.dtype == SOME.dtype
    assert float(jnp.ravel(result)[0]) == COUNT


@pytest.mark.parametrize("dtypes", [("bool", "bool"), ("int8", "int32"), ("bool", "float16")])
@pytest.mark.dtype_promotion
def test_dtypes_promote_as_in_jax(dtypes):
    a = (RNG.random((3, 4)) < 0.6).astype(dtypes[0])
    b = (RNG.integers(0, 3, (4, 2))).astype(dtypes[1])
    every_row = lambda x: RowSparse(np.arange(len(x)), x, x.shape)

    @jax.jit
    def run(lefts, rights):
        return [dot(x, y) for x, y in zip(lefts, rights, strict=True)]

    exact = jnp.dot(a, b)
    for result in run(
        [a, coo(a, 13), csr(a, 13), every_row(a)], [every_row(b), b, every_row(b), b]
    ):
        assert result.dtype == exact.dtype
        np.testing.assert_array_equal(todense(result), exact)


def test_forward_stype():
    ct, w = (np.float32(RNG.normal(size=(size, 2))) for size in (6, V))
    exact = {False: FEATURES @ w, True: FEATURES.T @ ct}

    @jax.jit
    def run(x):
        return {
            (storage, transposed): dot(
                x, ct if transposed else w, transpose_a=transposed, forward_stype=storage
            )
            for transposed in (False, True)
            for storage in ("default", "row_sparse")
        }

    with jmask.strict():
        results = run(CSR)
        rows, dense = (
            dot(ROWS, jnp.ones((2, 3)), forward_stype=storage)
            for storage in ("row_sparse", "default")
        )
    for (storage, transposed), result in results.items():
        assert stype(result) == storage
        np.testing.assert_allclose(densified(result), exact[transposed], rtol=1e-4, atol=1e-5)
    assert (rows.nse, rows.shape) == (4, (V, 3))
    np.testing.assert_array_equal(dense, densified(rows))


def test_fallbacks_warn_and_raise():
    messages = {
        "became dense in a product": lambda: dot(CSR, COO, transpose_b=True),
        "stores all of its 40 columns": lambda: dot(jnp.ones(2), ROWS, transpose_b=True),
    }
    for message, call in messages.items():
        with pytest.warns(jmask.StorageFallbackWarning, match=message) as caught:
            call()
        assert caught[0].filename == __file__
        with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match=message):
            call()
