"""`jmask.dot` on every pair of storages against the sum over what they store, in NumPy."""

import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.sparse import BCOO, BCSR

import jmask
from jmask import RowSparse
from jmask._tensors.storage import stype, with_stored_values
from tests.oracle import densified
from tests.product_cases import COO, CSR, FEATURES, ROWS, STORED, Case, M, V, forms
from tests.sampling import chosen
from tests.sparse_arrays import coo, csr


def dot(lhs, rhs, a, b, **options):
    return jmask.dot(a, b, transpose_a=lhs.transposed, transpose_b=rhs.transposed, **options)


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
    """Results, gradients and tangents of the products with every right operand."""

    def one(rhs, a, b, ct, dots):
        def f(va, vb):
            result = dot(lhs, rhs, lhs.build(va, a[1]), rhs.build(vb, b[1]))
            return todense(result), result

        with allowed(lhs, rhs):
            dense, forward, result = jax.linearize(f, a[0], b[0], has_aux=True)
        back = jax.linear_transpose(forward, a[0], b[0])
        return result, dense, back(ct.reshape(dense.shape)), forward(*dots)

    @jax.jit
    def run(arguments):
        return [one(rhs, *x) for rhs, x in zip(forms(False), arguments, strict=True)]

    return run


@pytest.mark.sampled
@pytest.mark.parametrize("lhs", forms(True), ids=str)
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_pair(lhs, seed):
    cases = [Case(lhs, rhs, seed + i) for i, rhs in enumerate(forms(False))]
    arguments = [
        ((c.a.values, c.a.indices), (c.b.values, c.b.indices), c.ct, c.dots) for c in cases
    ]
    for rhs, case, results in zip(forms(False), cases, program(lhs)(arguments), strict=True):
        result, dense, gradients, tangent = results
        check = functools.partial(
            np.testing.assert_allclose, rtol=1e-4, atol=1e-5, err_msg=str(rhs)
        )
        expected = case.product(case.a.values, case.b.values)
        check(dense, expected.reshape(dense.shape))
        for gradient, exact in zip(gradients, case.gradients(), strict=True):
            check(gradient, exact)
        check(tangent, case.tangent().reshape(dense.shape))
        assert isinstance(result, RowSparse) == is_row_sparse(lhs), rhs
        if isinstance(result, RowSparse):
            check_coalesced(result, lhs)


def check_coalesced(x, lhs):
    assert x.coalesced
    assert x.nse == min(M, STORED[lhs.kind])
    x.validate()
    padding = np.asarray(x.indices) == M
    assert not np.asarray(x.values)[padding].any()


RIGHT = {str(form): form for form in forms(False)}
LEFT = {str(form): form for form in forms(True)}
PAIRS = [
    *[("csr", "dense"), ("coo", "row_sparse"), ("csr_T", "dense_T"), ("coo_T", "row_sparse")],
    *[("row_sparse", "csr"), ("row_sparse_T", "dense"), ("dense_T", "row_sparse")],
    *[("dense", "coo_T"), ("csr", "dense_vector"), ("row_sparse_vector", "dense")],
]
arguments_of = lambda case: (case.a.values, case.a.indices, case.b.values, case.b.indices)


@pytest.mark.slow
@pytest.mark.parametrize(("lhs", "rhs"), PAIRS[::2])
def test_eagerly(lhs, rhs):
    lhs, rhs = LEFT[lhs], RIGHT[rhs]
    case = Case(lhs, rhs, 0)
    va, ia, vb, ib = arguments_of(case)
    with jmask.strict():
        result = dot(lhs, rhs, lhs.build(va, ia), rhs.build(vb, ib))
    expected = case.product(va, vb)
    dense = todense(result)
    np.testing.assert_allclose(dense, expected.reshape(dense.shape), rtol=1e-4, atol=1e-5)
    assert isinstance(result, RowSparse) == is_row_sparse(lhs)


def test_vmap():
    """Over values and indices of both operands: as one at a time."""
    cases = {
        pair: [Case(LEFT[pair[0]], RIGHT[pair[1]], seed) for seed in (1, 2)]
        for pair in PAIRS[1::2]
    }

    def products(arguments):
        results = {}
        for (lhs, rhs), (va, ia, vb, ib) in arguments.items():
            a, b = LEFT[lhs].build(va, ia), RIGHT[rhs].build(vb, ib)
            results[lhs, rhs] = todense(dot(LEFT[lhs], RIGHT[rhs], a, b))
        return results

    stacked = {
        pair: jax.tree.map(lambda *x: np.stack(x), *map(arguments_of, two))
        for pair, two in cases.items()
    }
    with jmask.strict():
        results = jax.jit(jax.vmap(products))(stacked)
    for pair, two in cases.items():
        for result, case in zip(results[pair], two, strict=True):
            expected = case.product(case.a.values, case.b.values).reshape(result.shape)
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5, err_msg=pair)


def wide(values, w, columns):
    """A product with 9 columns, which a kernel computes; two entries are after the last row."""
    return jmask.dot(BCSR((values, columns, jnp.array([0, 3, 3, 6])), shape=(3, 4)), w)


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


@pytest.mark.of_cpus
@pytest.mark.parametrize("stray", [False, True])
def test_wide_products_by_a_kernel(stray):
    """It must not see a column that is none, and nan nowhere."""
    rng = np.random.default_rng(0)
    rows = np.array([0, 0, 0, 2, 2, 2, 0, 0])
    columns = np.array([0, 2, 1, 2, -1 if stray else 0, 7 if stray else 2, 9, -5])
    inside = (columns >= 0) & (columns < 4) & (np.arange(8) < 6)
    values, dv, w, dw, ct = (
        np.float32(rng.normal(size=size)) for size in (8, 8, (4, 9), (4, 9), (3, 9))
    )
    values[~inside], w[3] = np.nan, np.nan
    assert "csr_sparse_dense" in jax.jit(wide).lower(values, w, columns).as_text()

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
def test_products_of_many_entries(kind):
    """Their terms are never materialised: rows are summed in bags. nan is read nowhere."""
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(70, 90)) * (rng.random((70, 90)) < 0.8))
    x[:, 5], x[7] = 0, 0
    w, dw, ct = np.float32(rng.normal(size=(3, 90, 4)))
    w[5], ct = np.nan, ct[:70]
    stored = kind(x)
    dv = np.float32(rng.normal(size=stored.data.shape))
    dx, used = np.asarray(with_stored_values(stored, dv).todense()), np.nan_to_num(w)
    assert stored.nse > 4096
    assert "bag_sum" in str(jax.make_jaxpr(jmask.dot)(stored, w))
    product = lambda values, w, x: jmask.dot(with_stored_values(x, values), w)
    of_values = np.asarray(kind(np.where(x != 0, ct @ used.T, 0)).data)
    expected = x @ used, dx @ used + x @ dw, of_values, x.T @ ct
    check = check_derivatives(product, stored.data, w, stored, (dv, dw), ct, expected, 1e-4)
    order = rng.permutation(90)
    check(jmask.dot(stored, RowSparse(order, w[order], w.shape)), x @ used)


# --- special cases -----------------------------------------------------------------------


def test_rows_stored_by_coo_are_row_sparse():
    """A BCOO with one sparse dimension is a `RowSparse` in other clothes."""
    values, ids = jnp.array([[1.0, 2], [3, 4]]), jnp.array([[2], [0]])
    result = jmask.dot(BCOO((values, ids), shape=(3, 2)), jnp.eye(2))
    assert isinstance(result, RowSparse)
    np.testing.assert_array_equal(densified(result), [[3, 4], [0, 0], [1, 2]])


def test_nothing_stored_and_no_size():
    none, rows = np.zeros((3, 4), np.float32), RowSparse.zeros((4, 2))
    nan, ones = np.full((4, 2), np.nan, np.float32), np.ones((3, 2), np.float32)

    @jax.jit
    def run(rows, *features):
        by_features = [
            (jmask.dot(x, nan), jmask.dot(x, rows), jmask.dot(x, ones, transpose_a=True))
            for x in features
        ]
        by_rows = jmask.dot(rows, ones.T), jmask.dot(rows, nan, transpose_a=True)
        sizes = []
        for m, k in ((0, 4), (4, 0), (0, 0)):
            x = BCOO((jnp.ones(2), jnp.zeros((2, 2), jnp.int32)), shape=(m, k))
            sizes.append((jmask.dot(x, jnp.ones((k, 2))), np.zeros((m, 2))))
            sizes.append((jmask.dot(x, jnp.ones(k)), np.zeros(m)))
        return by_features, by_rows, sizes

    with jmask.strict():
        by_features, (rows_dot, rows_transposed), sizes = run(rows, coo(none), csr(none))
    for product, with_rows, transposed in by_features:
        assert not np.asarray(product).any()
        assert not np.asarray(with_rows).any()
        assert (transposed.nse, transposed.shape) == (0, (4, 2))
    assert (rows_dot.nse, rows_dot.shape) == (0, (4, 3))
    np.testing.assert_array_equal(rows_transposed, np.zeros((2, 2)))
    for result, expected in sizes:
        np.testing.assert_array_equal(result, expected)


RNG = np.random.default_rng(1)

# --- dtypes ------------------------------------------------------------------------------


def test_narrow_floats_are_summed_in_float32():
    """In bfloat16 a sum of ones ends at 256."""
    count, dtype = 4096, "bfloat16"
    ones = jnp.ones((2048, 1), dtype)
    parts = jnp.ones(count, dtype), jnp.arange(count) % 2048, jnp.array([0, count])

    @jax.jit
    def run(parts, few, ones):
        x = BCSR(parts, shape=(1, 2048))
        rows = RowSparse(0 * parts[1], parts[0][:, None], (3, 1))
        one = ones[:1]
        return {
            "csr": jmask.dot(x, ones),
            "csr, row_sparse": jmask.dot(few, rows),
            "transposed": jmask.dot(
                BCSR((parts[0], 0 * parts[1], parts[2]), shape=(1, 2)), one, transpose_a=True
            ).values,
            "row_sparse": jmask.dot(rows, one).values,
            "row_sparse, transposed": jmask.dot(rows, ones[:3], transpose_a=True),
            "rhs": jmask.dot(ones[:3].T, rows),
            "dense": jmask.dot(ones.T, 2 * ones),
        }

    for name, result in run(parts, csr(np.ones((1, 3), dtype)), ones).items():
        assert result.dtype == dtype, name
        assert float(jnp.ravel(result)[0]) == count, name


@pytest.mark.parametrize("dtypes", [("bool", "bool"), ("int8", "int32"), ("bool", "float16")])
@pytest.mark.dtype_promotion
def test_dtypes_promote_as_in_jax(dtypes):
    a = (RNG.random((3, 4)) < 0.6).astype(dtypes[0])
    b = (RNG.integers(0, 3, (4, 2))).astype(dtypes[1])
    every_row = lambda x: RowSparse(np.arange(len(x)), x, x.shape)

    @jax.jit
    def run(lefts, rights):
        return [jmask.dot(x, y) for x, y in zip(lefts, rights, strict=True)]

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
            (storage, transposed): jmask.dot(
                x, ct if transposed else w, transpose_a=transposed, forward_stype=storage
            )
            for transposed in (False, True)
            for storage in ("default", "row_sparse")
        }

    with jmask.strict():
        results = run(CSR)
        rows, dense = (
            jmask.dot(ROWS, jnp.ones((2, 3)), forward_stype=storage)
            for storage in ("row_sparse", "default")
        )
    for (storage, transposed), result in results.items():
        assert stype(result) == storage
        np.testing.assert_allclose(densified(result), exact[transposed], rtol=1e-4, atol=1e-5)
    assert (rows.nse, rows.shape) == (4, (V, 3))
    np.testing.assert_array_equal(dense, densified(rows))


TRANSPOSED = [(False, False), (True, False), (False, True)]
MAKERS = [coo, csr, jmask.RowSparse.fromdense]


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize(
    ("stored", "transposed"),
    chosen([(csr, (True, False))], itertools.product(MAKERS, TRANSPOSED)),
)
def test_the_gradient_of_an_ordinary_tensor(stored, transposed):
    """`masked_grad=False`: every entry of a sparse operand has a gradient, to second order."""
    lhs, rhs = np.array([[0, 0, 3.0], [4, 0, 5]]), np.arange(6.0).reshape(3, 2) + 0.5
    lhs, rhs = (x.T if t else x for x, t in zip((lhs, rhs), transposed, strict=True))
    how = dict(zip(("transpose_a", "transpose_b"), transposed, strict=True))
    plain = functools.partial(jmask.dot, **how, masked_grad=False)
    for args in ((stored(lhs), rhs), (lhs, stored(rhs))):
        assert jmask.gradcheck(jax.jit(plain), args, order=2)
    sparse = stored(jnp.asarray(lhs, jnp.float32))
    product = plain(sparse, jnp.asarray(rhs, jnp.float32))
    np.testing.assert_allclose(product, jmask.todense(jmask.dot(sparse, rhs, **how)), rtol=1e-6)
    found = jmask.grad(lambda x: jnp.sum(plain(x, rhs)))(sparse)
    dense = lambda x: jnp.sum((x.T if transposed[0] else x) @ (rhs.T if transposed[1] else rhs))
    np.testing.assert_allclose(found, jax.grad(dense)(sparse.todense()), rtol=1e-6)
    with pytest.raises(ValueError, match="`forward_stype` cannot be 'row_sparse' with"):
        plain(sparse, rhs, forward_stype="row_sparse")


def test_fallbacks_warn_and_raise():
    messages = {
        "became dense in a product": lambda: jmask.dot(CSR, COO, transpose_b=True),
        "stores all of its 40 columns": lambda: jmask.dot(jnp.ones(2), ROWS, transpose_b=True),
    }
    for message, call in messages.items():
        with pytest.warns(jmask.StorageFallbackWarning, match=message) as caught:
            call()
        assert caught[0].filename == __file__
        with jmask.strict(), pytest.raises(jmask.StorageFallbackWarning, match=message):
            call()
