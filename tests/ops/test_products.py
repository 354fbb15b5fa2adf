"""`jmask.dot` on every pair of storages against the sum over what they store, in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
from jmask import RowSparse, dot
from jmask._kernels import tuning
from jmask._tensors.storage import stype
from tests.expressions import functions
from tests.oracle import densified
from tests.product_cases import STORED, Case, M, N, forms
from tests.sparse_arrays import coo, csr


def multiplied(lhs, rhs, a, b, **how):
    return dot(a, b, transpose_a=lhs.transposed, transpose_b=rhs.transposed, **how)


def falls_back(lhs, rhs):
    columns = rhs.kind == "row_sparse" and rhs.transposed
    return columns or (lhs.is_entries and rhs.is_entries)


def allowed(lhs, rhs):
    """The context in which a pair must be multiplied."""
    if not falls_back(lhs, rhs):
        return jmask.strict()
    columns = f"stores all of its {N} columns" if rhs.kind == "row_sparse" else "became dense"
    return pytest.warns(jmask.StorageFallbackWarning, match=f"`rhs`.*{columns}")


def is_row_sparse(lhs):
    by_rows = lhs.kind == "row_sparse" and lhs.summed == 1
    return by_rows or (lhs.is_entries and lhs.transposed)


todense = lambda x: x.todense() if isinstance(x, RowSparse) else x


@functools.cache
def program(lhs, in_blocks):
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
@pytest.mark.parametrize("in_blocks", [False, True])
def test_every_pair(in_blocks, lhs, seed, monkeypatch):
    """Also where entries have so many terms that these are summed in blocks."""
    if in_blocks:
        monkeypatch.setattr(tuning, "SMALL_ROWS", 0)
        if not lhs.is_entries:
            return
    cases = [
        [Case(lhs, rhs, seed + 10 * i + j) for j in (0, 1)]
        for i, rhs in enumerate(forms(False))
    ]
    alone, together = program(lhs, in_blocks)
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
    """On the storage by default, and on each that is asked for."""
    case = Case(lhs, rhs, 0)
    (va, ia), (vb, ib), *_ = arguments_of(case)
    has_rows = lhs.is_entries or (lhs.kind == "row_sparse" and lhs.summed == 1)
    for storage in (None, "default", "row_sparse")[: 2 + has_rows]:
        with allowed(lhs, rhs):
            operands = lhs.build(va, ia), rhs.build(vb, ib)
            result = multiplied(lhs, rhs, *operands, forward_stype=storage)
        expected, dense = case.product(va, vb), todense(result)
        np.testing.assert_allclose(dense, expected.reshape(dense.shape), rtol=1e-4, atol=1e-5)
        if storage is None:
            assert isinstance(result, RowSparse) == is_row_sparse(lhs)
        else:
            assert stype(result) == storage
        if isinstance(result, RowSparse):
            assert result.coalesced
            result.validate()


@pytest.mark.parametrize("kind", [coo, csr])
def test_terms_of_many_entries_are_not_written(kind):
    """They are summed as bags, of which `tests/kernels` reads the programs."""
    assert "bag_sum" in str(jax.make_jaxpr(dot)(kind(np.ones((700, 900))), np.ones((900, 4))))


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
    rng = np.random.default_rng(1)
    a = (rng.random((3, 4)) < 0.6).astype(dtypes[0])
    b = (rng.integers(0, 3, (4, 2))).astype(dtypes[1])
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
