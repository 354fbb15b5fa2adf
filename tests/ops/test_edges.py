"""Functions of masked tensors at their edges: ties, zeros, nothing, sizes, indices, arguments.

One table of expressions and what they are, eagerly and under jit. Values and derivatives on
every storage are in `test_masked_functions`.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO
from jax.sharding import PartitionSpec

import jmask
import jmask.numpy as jnm
from jmask import MaskedTensor, RowSparse, nn
from jmask._tensors.masked_tensor import is_tensor
from tests import masked_cases as cases
from tests.expressions import functions, rows
from tests.masked_cases import KINDS, PATTERNS, SHAPE, build, compare
from tests.sparse_arrays import coo, csr

pytestmark = pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")

masked = lambda data, mask=True: MaskedTensor(jnp.asarray(data), np.array(mask, bool))
T, F, nan, inf = True, False, np.nan, np.inf
X = masked([[5.0, nan, 3.0, 8.0], [nan, 2.0, inf, 7.0]], [[T, F, T, T], [F, T, F, T]])
ROW, TIES = X[0], masked([2.0, 1.0, 9.0, 1.0, 2.0], [T, T, F, T, T])
INTEGERS, FLAGS = masked([4, 9, 1], [T, F, T]), masked([T, T, F], [T, T, F])
INDEX, SHORT = masked([1, 0, -1, 9], [T, F, T, T]), masked([1, 0, 9, -1], [T, F, T, T])
VALUES = masked([2.0, 3.0, nan, 4.0], [T, T, F, T])
PAIRS = masked([[1, 2], [1, 9], [1, 7]], [[T, T], [T, F], [T, F]])
MANY = masked([[2.0, 7, nan], [7, nan, 2]], [[T, F, T], [T, T, F]])
COMPLEX, EMPTY = masked([1j, 2.0, 3 + 1j], [T, F, T]), masked(np.zeros((3, 0), np.float32))
QUARTERS = masked([1.0, inf, 4.0, -3.0, 2.0], [T, F, T, T, T])
HALVES = masked(jnp.array([0.5, 1.0, 2.0], jnp.bfloat16))
BYTES, NOTHING = jnp.arange(3, dtype=jnp.int8), np.zeros(3, bool)
LIKE, NO_SPARSE = coo(np.eye(2, dtype=np.float32)), BCOO.fromdense(jnp.ones((2, 3)), n_dense=2)
NO_ROWS = jmask.RowSparse.zeros((3, 2), nse=0)
WITH_ROWS = MaskedTensor(BCOO((jnp.ones((2, 2)), jnp.array([[0], [2]])), shape=(3, 2)))
PADDING = lambda values: BCOO((values, jnp.array([[3, 0], [3, 0]])), shape=(3, 0))
ENDS, METHODS = jnp.array([-inf, 1.0, inf]), ("linear", "lower", "higher", "nearest")

EDGES = """
    ROW.compressed(size=2) | [5.0, 3.0]
    jax.jit(lambda x: x.compressed(size=4, fill_value=-9))(ROW) | [5.0, 3.0, 8.0, -9.0]
    jax.jit(lambda x: x.nonzero(size=6, fill_value=9))(X) |
        ([0, 0, 0, 1, 1, 9], [0, 2, 3, 1, 3, 9])
    jnm.nonzero(NO_ROWS, size=2) | ([0, 0], [0, 0])
    jnm.compressed(NO_ROWS, size=1) | [0.0]
    jax.jit(lambda x: jnm.unique(x, size=4))(TIES) | [1.0, 2.0, None, None]
    jnm.unique(TIES, size=4, fill_value=3) | [1.0, 2.0, None, 3.0]
    jnm.unique(MANY, True, True, True, size=4)[1:] |
        ([0, 3, 2, 1], [[0, 3, 2], [1, 2, 3]], [1, 1, 2, 2])
    jnm.unique(MANY, size=5, equal_nan=False).count() | 4
    jnm.unique(PAIRS, axis=0, size=2) | [[1, 2], [1, None]]
    jnm.unique(PAIRS.T, axis=1, size=2) | [[1, 1], [2, None]]
    jnm.unique(masked(np.zeros(0)), size=0) | []
    jnm.unique(masked([T, F, T]), size=2) | [F, T]
    jnm.median(masked([[1.0, 2.0, 5.0, 3.0], [nan, 1.0, inf, -inf]]), axis=1) | [2.5, nan]
    jnm.median(masked(np.ones((0, 3))), axis=1) | []
    jnm.quantile(ENDS, jnp.array([0.0, 0.25, 0.5, 1.0])) | [-inf, -inf, 1.0, inf]
    jnm.quantile(QUARTERS, 0.5, method="midpoint") | 1.5
    [jnm.quantile(QUARTERS, 0.4, method=how) for how in METHODS] |
        [np.quantile(np.float32([1, 4, -3, 2]), 0.4, method=how) for how in METHODS]
    jax.jit(jnm.quantile)(QUARTERS, 1.5) | nan
    jnm.quantile(X, jnp.zeros((2, 0))).shape | (2, 0)
    jnm.quantile(EMPTY, 0.5, axis=1) | [None, None, None]
    jnm.cov(EMPTY) | [[None] * 3] * 3
    [jnm.norm(ENDS, n, where=NOTHING) for n in (-1, 2)] | [inf, 0.0]
    jnm.diff(EMPTY).shape | (3, 0)
    jnm.allclose(EMPTY, EMPTY, masked_equal=False) | T
    [f(masked(2.5, F)) for f in (jnm.ptp, jnm.cov, jnm.nanmax, jnm.var)] | [None] * 4
    [jnm.ptp(masked(2.5)), jnm.nanmax(masked(2.5)), jnm.outer(X[1, 1], ROW[:2])] |
        [0.0, 2.5, [[10.0, None]]]
    jnm.argsort(TIES) | [1, 3, 0, 4, None]
    jnm.argsort(TIES, descending=True, dtype=None) | [0, 4, 1, 3, None]
    jnm.argsort(TIES, dtype=None).dtype.name | "int32"
    jnm.argsort(TIES, dtype=jnp.int8).dtype.name | "int8"
    jnm.sort(masked([inf, 1.0, nan, nan], [T, T, F, T])) | [1.0, inf, nan, None]
    cases.gradient(jnm.sort, TIES) | [3.0, 1.0, 0.0, 2.0, 4.0]
    jnm.argmax(masked([inf, -inf, 9.0], [F, T, F])) | 1
    jnm.argmax(masked([3.0, nan, 9.0, nan])) | 1
    cases.gradient(jnm.max, masked([inf, -inf, 9.0], [F, T, F])) | [0.0, 1.0, 0.0]
    cases.gradient(jnm.max, masked([-inf, -inf, 9.0], [T, T, F])) | [0.5, 0.5, 0.0]
    cases.gradient(lambda x: nn.normalize(x, eps=0.5), masked([0.0, 0.0], [T, F])) | [2.0, 0.0]
    jnm.max(BYTES, where=NOTHING) | -128
    jnm.min(BYTES, where=NOTHING) | 127
    jnm.max(BYTES.astype(jnp.uint8), where=NOTHING) | 0
    jnm.sum(masked(jnp.ones(1000, jnp.bfloat16), np.arange(1000) < 996)) | 996.0
    jnm.sum(jnp.full(20, 100, jnp.int8), where=np.arange(20) < 19) | 1900
    [jnm.var(X[1:, :2], axis=0, ddof=1), jnm.var(X[1], correction=1)] | [[None, None], 12.5]
    jnm.var(ROW[1:], mean=5.0) | 6.5
    jnm.std(X.data, 1, where=np.array([[F, F, T, F]] * 2), ddof=1) | [nan, nan]
    jnm.sum(masked(jnp.arange(4.0), [T, T, F, T]), where=np.array([F, T, T, T])) | 4.0
    jnm.average(ROW, 0, jnp.array([1.0, 2.0, 3.0, 4.0]), returned=True) | (5.75, 8.0)
    jnm.average(ROW, 0, VALUES) | 7.0
    jnm.average(X, 1, masked(np.zeros(4, np.float32), F)) | [None, None]
    jnm.max(X, 0, None, True) | [[5.0, 2.0, 3.0, 8.0]]
    jnm.max(jnp.eye(2), 0, None, True) | [[1.0, 1.0]]
    [jnm.sum(ROW, initial=3.0), jnm.prod(ROW, initial=2.0), jnm.max(ROW, initial=9.0)] |
        [19.0, 240.0, 9.0]
    [WITH_ROWS @ jnp.ones(2), WITH_ROWS @ jnp.ones((2, 2)), WITH_ROWS @ jnp.ones((1, 2, 1))] |
        [[2.0, None, 2.0], [[2.0] * 2, [None] * 2, [2.0] * 2], [[[2.0], [None], [2.0]]]]
    [jax.grad(lambda v: f(PADDING(v)).sum())(jnp.ones(2)) for f in (
        jmask.todense, lambda x: MaskedTensor(x).to_tensor(0), jnm.transpose,
        lambda x: jmask.cast_storage(x, "row_sparse", nse=2).values)] | [[0.0] * 2] * 4
    jnm.einsum("ij,kj", X, X, precision="highest") | [[98.0, 56.0], [56.0, 53.0]]
    jnm.matmul(X, X.T, precision="highest", preferred_element_type=float) |
        [[98.0, 56.0], [56.0, 53.0]]
    jnm.matmul(csr(np.int8([[100]])), jnp.int8([[3]]), preferred_element_type=int) | [[300]]
    jnm.matmul(WITH_ROWS, jnp.ones(2), preferred_element_type=int) | [2, None, 2]
    jnm.reshape(a=ROW, shape=(2, 2)) | [[5.0, None], [3.0, 8.0]]
    jnm.concatenate(arrays=[ROW[:2], ROW[:1]]) | [5.0, None, 5.0]
    jnm.logsumexp(masked([0.0, nan], [T, F]), b=jnp.ones(2)) | 0.0
    jnm.logsumexp(masked([1e3, 2.0], [T, T]), b=jnp.arange(2.0)) | 2.0
    jnm.logsumexp(masked([inf, 2.0], [T, T]), b=jnp.arange(2.0)) | 2.0
    [x.dtype.name for x in (jnm.logsumexp(HALVES, b=jnp.ones(3)),
        jnm.logsumexp(HALVES, b=2.0), jnm.cov(HALVES, aweights=jnp.ones(3)))] |
        ["float32", "bfloat16", "float32"]
    [f(masked([0.5, 0.6, nan], [T, T, F]), dtype=int) for f in (jnm.sum, jnm.nansum)] | [0, 0]
    jnm.sum(jmask.RowSparse([1, 1], [[0.75], [0.75]]), axis=0, dtype=int) | [1]
    jnm.prod(masked(jnp.array([64, 4], jnp.int8)), dtype=bool) | T
    [f(masked(BYTES), initial=2.5) for f in (jnm.max, jnm.min, jnm.sum, jnm.prod)] |
        [2, 0, 5, 0]
    jnm.sum(BYTES, initial=2.5, where=NOTHING).dtype.name | "int32"
    jmask.todense(jnm.sum(LIKE, axis=(), dtype=int)) | [[1, 0], [0, 1]]
    jmask.todense(jnm.sum(csr(np.eye(2, dtype=np.float32)), axis=())) | [[1.0, 0.0], [0.0, 1.0]]
    [f(jnp.full(2, nan), initial=3.0) for f in (
        jnm.nanmax, jnm.nanmin, jnm.nansum, jnm.nanprod)] | [3.0] * 4
    jnm.concatenate([ROW, ROW[:1]], dtype=int) | [5, None, 3, 8, 5]
    jnm.hstack([ROW[:2]], dtype=np.float16) | [5.0, None]
    jnm.einsum(X, [0, 1], X, [2, 1], [0, 2]) | [[98.0, 56.0], [56.0, 53.0]]
    [jnm.tensordot(a=ROW, b=ROW, axes=1), jnm.matmul(ROW, b=ROW), jnm.vdot(b=ROW, a=ROW)] |
        [98.0] * 3
    jnm.norm(masked([inf + 0j, 1.0])) | inf
    jnm.take(INTEGERS, jnp.array([2, 0]), 0, None, "clip") | [1, 4]
    nn.standardize([1.0, 9.0, 3.0], where=[T, F, T], mean=2.0)[1] | 0.0
    jnm.sum(NO_SPARSE, axis=0) + jnm.sqrt(NO_SPARSE)[0] | [3.0, 3.0, 3.0]
    jnm.sum(MaskedTensor(NO_SPARSE, np.array([[T], [F]])), axis=1) | [3.0, None]
    sum(jmask.cast_storage(NO_SPARSE, x).todense() for x in ("coo", "csr", "row_sparse")) |
        [[3.0, 3.0, 3.0]] * 2
    jmask.sparse_mask(np.full((2, 3), 4.0), NO_SPARSE).todense() | [[4.0, 4.0, 4.0]] * 2
    jmask.gradcheck(jmask.todense, NO_SPARSE) | T
    jnm.quantile(INTEGERS, 0.5) | 2.5
    jnm.cumlogsumexp(masked([0, 9], [T, F])) | [0.0, None]
    jnm.masked_values(jnp.array([100000, 100001]), 100000) | [None, 100001]
    jnm.diff(FLAGS) | [F, None]
    jnm.isclose(masked(3), 3) | T
    [X[7], X[-9]] | [[None, 2.0, None, 7.0], [5.0, None, 3.0, 8.0]]
    X.at[jnp.array([1, 7])].get(mode="fill") | [[None, 2.0, None, 7.0], [None] * 4]
    ROW.at[jnp.array([0, 7])].get(mode="fill", fill_value=5) | [5.0, 5.0]
    jax.jit(lambda x, i: x[i])(ROW, INDEX) | [None, None, 8.0, 8.0]
    X[:, INDEX] | [[None, None, 8.0, 8.0], [2.0, None, 7.0, 7.0]]
    X[None, 0, INDEX, None] | [[[None], [None], [8.0], [8.0]]]
    cases.gradient(lambda x: x[INDEX], ROW) | [0.0, 0.0, 0.0, 7.0]
    masked(jnp.arange(300))[masked(jnp.array([1, 2], jnp.int8), [T, F])] | [1, None]
    ROW.at[INDEX].set(7) | [5.0, 7.0, 3.0, 7.0]
    ROW.at[SHORT].set(7, mode="clip") | [5.0, 7.0, 3.0, 7.0]
    ROW.at[INDEX].get(mode="fill") | [None, None, 8.0, None]
    ROW.at[:].set(VALUES) | [2.0, 3.0, None, 4.0]
    ROW.at[np.array([1, 1, 3])].set(VALUES[1:]) | [5.0, None, 3.0, 4.0]
    ROW.at[np.array([0, 0, 3])].add(VALUES[1:]) | [None, None, 3.0, 12.0]
    ROW.at[np.array([9, 0])].set(1) | [1.0, None, 3.0, 8.0]
    ROW.at[np.array([0, 0])].apply(jnp.negative) | [-5.0, None, 3.0, 8.0]
    cases.gradient(lambda x: x / 0.0, masked([2.0, nan], F)) | [0.0, 0.0]
    cases.gradient(lambda v: ROW.at[:].set(v), VALUES) | [1.0, 2.0, 0.0, 4.0]
    jax.vmap(lambda row, i: row.at[i].add(1)[::-1])(X, jnp.array([0, 1])) |
        [[8.0, 3.0, None, 6.0], [7.0, None, 3.0, None]]
    [repr(ROW.at)[:16], repr(ROW.at[1])[:23]] | ["At(MaskedTensor(", "Positions(MaskedTensor("]
    [int(masked(3)), len(ROW), X.nbytes, ROW.get_mask()] | [3, 4, 40, [T, F, T, T]]
    jnm.diff(ROW, n=0) | [5.0, None, 3.0, 8.0]
    jnm.array_equal(jnp.ones(2), jnp.ones(3)) | F
    jnm.cumsum(jnp.ones(3), where=np.array([T, F, T])) | [1.0, 1.0, 2.0]
    [list(row) for row in X] | [[5.0, None, 3.0, 8.0], [None, 2.0, None, 7.0]]
    jnm.pad(ROW[:2], 1, constant_values=7) | [7.0, 5.0, None, 7.0]
    jnm.pad(ROW[:2], 1, "empty") | [None, 5.0, None, None]
    jnm.atleast_2d(ROW, 3.0) | [[[5.0, None, 3.0, 8.0]], [[3.0]]]
    [jnm.zeros_like(ROW), jnm.ones_like(ROW), jnm.full_like(ROW, 3)] |
        [[v, None, v, v] for v in (0.0, 1.0, 3.0)]
    [jnm.zeros_like(X, dtype="int8").dtype.name, jnm.empty_like(X).shape] | ["int8", (2, 4)]
    [jnm.take(jnp.arange(4), SHORT, 0), jnm.take_along_axis(jnp.arange(4), SHORT, 0)] |
        [[1, None, None, 3]] * 2
    jnm.take(masked(jnp.arange(4)), jnp.array([1, 9]), 0, fill_value=5) | [1, 5]
    cases.gradient(lambda x: jnm.take(x, SHORT, 0), masked(np.ones(4, np.float32))) |
        [0.0, 1.0, 0.0, 4.0]
    jnm.take(jnp.arange(6).reshape(1, 3, 2), masked([[2, 0]], [[T, F]]), -2) |
        [[[[4, 5], [None, None]]]]
    [COMPLEX.real, COMPLEX.imag, COMPLEX.conj().imag] |
        [[0, None, 3], [1, None, 1], [-1, None, -1]]
    [ROW[0].item(), ROW[1].item(), X.item(0, 2), ROW[1].tolist()] | [5.0, None, 3.0, None]
    nn.leaky_relu(masked([-2.0, nan], [T, F]), 0.5) | [-1.0, None]
    nn.gelu(masked([0.0, nan], [T, F]), approximate=False) | [0.0, None]
    nn.attention_weights(jnp.zeros((2, 1, 3)), np.array([T, T, F])) | [[[0.5, 0.5, None]]] * 2
    nn.attention_weights(X[:, 2:], np.array([T, F])) | [[1.0, None], [None, None]]
    masked([-2.0, 3, nan], [T, T, F]).clip(None, 1.0) | [-2.0, 1.0, None]
    jnm.masked_where(masked([F, F, T], [T, F, T]), jnp.ones(3)) | [1.0, None, None]
    jnm.where(masked([T, T, F], [T, F, T]), 1, 0) | [1, None, 0]
    jnm.diag(ROW[:2]) | [[5.0, 0.0], [0.0, None]]
"""
_read = functions("", globals())
EDGES = {
    code: [f for part in (code, *more) for f in _read(part).values()]
    for code, *more in rows(EDGES)
}


def plain(tree):
    listed = lambda x: x.tolist() if hasattr(x, "tolist") else x
    return jax.tree.map(listed, tree, is_leaf=lambda x: is_tensor(x) or x is None)


@pytest.mark.parametrize("code", EDGES)
def test_edges(code):
    found, expected = (plain(function()) for function in EDGES[code])
    np.testing.assert_equal(found, expected)


# --- derivatives and results where there is nothing --------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [0, 1, None])
def test_derivatives_of_ties(axis, kind):
    """Entries that are the greatest together have equal parts, also where they are -inf."""
    of_data = lambda data: build(kind, data, jnp.ones(SHAPE, bool))
    valid, data = PATTERNS[kind], jnp.full(SHAPE, -inf)
    for function in (jnm.max, jnm.min):
        total = lambda d, f=function: jnp.sum(f(of_data(d), axis).to_tensor(0))
        expected = valid / np.maximum(valid.sum(axis, keepdims=True), 1)
        np.testing.assert_allclose(jax.grad(total)(data), expected, rtol=1e-6)


def test_derivatives_are_zero_by_convention():
    """Of deviations and norms at 0, and of deviations of equal numbers; without nan."""
    mask = jnp.array([[T, T], [T, F], [F, F]])
    norms = [functools.partial(jnm.norm, ord=p) for p in (2, 3, 0.5, inf)]
    spreads = [jnm.std, jnm.var, functools.partial(jnm.std, ddof=1)]
    for value, number in ((0.0, None), (2.0, len(spreads))):
        data = jnp.where(mask, value, nan)
        for f in [*spreads, *norms][:number]:
            gradient = jax.grad(
                lambda d, f=f: jnp.sum(f(MaskedTensor(d, mask), axis=1).to_tensor(0))
            )
            slope, second = jax.jvp(gradient, (data,), (jnp.ones_like(data),))
            assert (slope == 0).all()
            assert jnp.isfinite(second).all()


def test_complex_derivatives():
    data, kept = jnp.array([1 + 2j, nan, 3 - 1j]), jnp.array([0, 2])
    pairs = [(getattr(jnm, n), getattr(jnp, n)) for n in ("sum", "prod", "mean", "var")]
    norms = [[functools.partial(f, ord=p) for f in (jnm.norm, jnp.linalg.norm)] for p in (1, 2)]
    for f, g in pairs + norms:
        found = jax.grad(lambda d, f=f: f(masked(d, [T, F, T])).to_tensor(0).real)(data)
        expected = jax.grad(lambda d, g=g: g(d).real)(data[kept])
        np.testing.assert_allclose(found, [expected[0], 0, expected[1]], rtol=1e-5)


def test_no_nan_is_computed():
    mask = jnp.array([[F, T], [F, F]])
    names = ("sum", "mean", "std", "max", "norm", "logsumexp", "median", "prod")
    loss = lambda d, name: jnp.sum(getattr(jnm, name)(MaskedTensor(d, mask), 1).to_tensor(0))
    with jax.debug_nans(True):  # of every operation, as nothing is compiled
        for name in names:
            for poison in (inf, 1e30):
                data = jnp.array([[poison, 1.0], [-poison, poison]])
                assert jnp.isfinite(jax.grad(loss)(data, name)).all()


NOTHING_IS = {
    **dict.fromkeys("max amax logsumexp logmeanexp".split(), -inf), "min": inf, "amin": inf,
    **dict.fromkeys("sum norm argmax argmin any count count_nonzero normalize".split(), 0),
    **dict.fromkeys("mean var std median average softmax softmin log_softmax".split(), nan),
    "nanmax": nan, "standardize": nan, "prod": 1, "all": T,
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("name", NOTHING_IS)
def test_arrays_with_where(name):
    """As masked tensors of that mask, with a number where there is nothing."""
    function = getattr(jnm if hasattr(jnm, name) else nn, name)
    x, where = jnp.array([[1.0, nan, 3.0], [inf, nan, 2.0]]), jnp.array([[T, F, T], [F, F, F]])
    result = function(x, axis=1, where=where)
    of_masked = function(MaskedTensor(x, where), axis=1)
    assert isinstance(result, jax.Array)
    np.testing.assert_array_equal(result[1], np.full(result.shape[1:], NOTHING_IS[name]))
    left_out = -inf if name == "log_softmax" else 0
    of_masked = of_masked if name == "count" else of_masked.to_tensor(left_out)
    np.testing.assert_allclose(of_masked[0], result[0], rtol=1e-6)
    gradient = jax.grad(lambda x: function(x, axis=1, where=where)[0].astype(float).max())
    assert (gradient(x)[~where] == 0).all()
    y = jnp.array([[1.0, -2.0, 0.5], [4.0, 0.25, 2.0]])
    everything = function(y, axis=1, where=jnp.ones((1, 3), bool))
    np.testing.assert_allclose(function(y, axis=1), everything, rtol=1e-5)


AMONG_THOUSANDS = functions("x, axis", globals())("""
    jnm.max(x, axis); jnm.min(x, axis); jnm.ptp(x, axis); jnm.sum(x, axis); jnm.median(x, axis);
    nn.logsumexp(x, axis); jnm.norm(x, inf, axis or 0); jnm.norm(x, -inf, axis or 0)
""")


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("code", AMONG_THOUSANDS)
def test_a_nan_among_thousands(code, axis):
    """XLA for CPUs loses it in the maximum of an array (jaxlib 0.10 to 0.12)."""
    x, along = np.ones((64, 256), np.float32), axis or 0 if "norm" in code else axis
    for place, is_valid in (((0, 0), T), ((63, 255), T), ((5, 7), F)):
        data, mask = x.copy(), np.ones(x.shape, bool)
        data[place], mask[place] = nan, is_valid
        result = AMONG_THOUSANDS[code](MaskedTensor(data, mask), axis).to_tensor(0)
        expected = (np.isnan(data) & mask).any(along)
        np.testing.assert_array_equal(np.isnan(result), expected)


@pytest.mark.slow
def test_the_median_of_more_entries_than_float32_counts():
    assert jnm.median(jnp.arange(2**24 + 3, dtype=jnp.int32), averaged=False) == 2**23 + 1


@pytest.mark.parametrize("name", "sort argsort cumsum cumprod cumlogsumexp".split())
def test_scalars_have_no_axis(name):
    with pytest.raises(ValueError, match=r"`axis` -1 is out of bounds"):
        getattr(jnm, name)(masked(2.0), axis=-1)


# --- storages ----------------------------------------------------------------------------

ON = {
    kind: build(kind, jnp.asarray(cases.clean_numbers()), jnp.ones(SHAPE, bool))
    for kind in KINDS
}
FALLBACK = jmask.StorageFallbackWarning
# Of functions by their names this is said in `test_every_function`.
KEPT = """
    jnm.max(x.storage, axis=0); jnm.mean(x.storage); jnm.norm(x.storage, axis=1);
    jnm.any(x.storage); jnm.sum(x, where=x.mask, axis=0); jnm.where(x > 0, x, x * 2).storage.nse
"""
DENSE = """
    nn.softmax(x.storage); jnm.var(x.storage, axis=1); jnm.flip(x.storage); x[0];
    x.at[0].set(1.0)
"""
SPARSE = {
    code: (function, text is KEPT)
    for text in (KEPT, DENSE)
    for code, function in functions("x", globals())(text).items()
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("code", SPARSE)
def test_sparse_is_kept(code, kind):
    """Or made dense, which is said."""
    function, is_kept = SPARSE[code]
    is_said = contextlib.nullcontext() if is_kept else pytest.raises(FALLBACK, match="dense")
    with jmask.strict(), is_said:
        function(ON[kind])


def test_large_sparse_tensors_are_never_dense():
    table = MaskedTensor(RowSparse([5, 10**8], jnp.ones((2, 64)), (10**9, 64)))
    square = BCOO((jnp.arange(1.0, 4), jnp.array([[7, 8], [0, 9], [7, 99_999]])),
                  shape=(100_000, 100_000), unique_indices=True)  # fmt: skip
    with jmask.strict():
        assert jnm.sum(table).storage == 128
        assert jnm.mean(table, axis=1).stype == "row_sparse"
        for name in ("prod", "std", "max", "logsumexp"):
            for axis in (0, None):
                assert getattr(jnm, name)(MaskedTensor(square), axis=axis).valid.any()
        assert jnm.argmax(MaskedTensor(square), axis=1).storage[7] == 99_999
        assert jnm.sum(square, axis=1)[7] == 4


def test_sparse_with_dense_dimensions():
    rng = np.random.default_rng(0)
    indices = np.array([[0, 1], [2, 0], [2, 3], [1, 1]])
    values, mask = np.float32(rng.normal(size=(4, 2, 3))), rng.random((4, 2, 3)) < 0.7
    stored = BCOO((values, jnp.asarray(indices)), shape=(3, 4, 2, 3), unique_indices=True)
    sparse = MaskedTensor(stored, jnp.asarray(mask))

    @jax.jit
    def run(x):
        return [
            getattr(jnm, name)(x, axis=axis, keepdims=name == "max").to_dense()
            for name in ("sum", "prod", "max")
            for axis in (0, 3, (0, 2), (1, 3), (0, 1), (2, 3), ())
        ] + [jnm.argmax(x, axis=axis).to_dense() for axis in range(4)]

    for one, other in zip(run(sparse), run(sparse.to_dense()), strict=True):
        compare(one, jmask.to_numpy_ma(other))


# --- statistics, attention, trees --------------------------------------------------------


def test_weights_of_observations():
    """Masked observations are as if they had weight 0, and NumPy gets the others."""
    rng = np.random.default_rng(3)
    data, repeats, weights = rng.normal(size=(3, 6)), np.arange(6) % 3 + 1, rng.random(6) + 0.5
    known = np.arange(6) < 4
    x = masked(np.float32(np.where(known, data, nan)), known[None])
    for f, a in ((repeats, None), (None, weights), (repeats, weights)):
        fewer = [w if w is None else w[:4] for w in (f, a)]
        expected = np.cov(data[:, :4], fweights=fewer[0], aweights=fewer[1])
        compare(jnm.cov(x, fweights=f, aweights=a), np.ma.array(expected))


def _attention_operands(seed):
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.normal(size=(2, *s, 5)), jnp.float32) for s in ((3, 4), (4, 2), (4, 2))
    ]


def test_attention_with_a_masked_bias_or_mask():
    """Where they are masked there is no score."""
    operands, allowed = _attention_operands(2), np.tile([T, F, T, T], (1, 1, 3, 1))
    expected = np.ma.array(jax.nn.dot_product_attention(*operands, mask=jnp.asarray(allowed)))
    bias = masked(np.where(allowed, np.float32(0), np.float32(nan)), allowed)
    for hidden in ({"bias": bias}, {"mask": masked(np.ones_like(allowed), allowed)}):
        compare(nn.dot_product_attention(*operands, **hidden), expected)


def test_attention_leaves_out_keys_that_do_not_exist():
    operands = _attention_operands(1)
    exists = np.array([[T, T, F, T], [F] * 4])[:, :, None, None]
    lengths = np.array([2, 3], np.int32)

    def ours(query, *keys):
        keys = [masked(jnp.where(exists, x, nan), exists) for x in keys]
        result = nn.dot_product_attention(query, *keys, query_seq_lengths=lengths)
        return jnm.sum(jnm.square(result)).to_tensor(0), result.valid

    def of_jax(*xs):
        result = jax.nn.dot_product_attention(*xs, mask=exists[:, None, None, :, 0, 0])
        return jnp.sum(jnp.square(result[0, :2]))

    (value, valid), slopes = jax.value_and_grad(ours, (0, 1, 2), has_aux=True)(*operands)
    np.testing.assert_array_equal(valid.all((2, 3)), [[T, T, F], [F, F, F]])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (value, slopes), jax.value_and_grad(of_jax, (0, 1, 2))(*operands))


def test_what_a_tree_maps():
    rows = RowSparse([1], jnp.ones((1, 2)), (5, 2))
    tree = {"a": rows, "b": [ROW, None, jnp.ones(2)], "c": (LIKE, csr(np.eye(2)))}
    shapes = jmask.tree.map(lambda x: (type(x).__name__, x.shape), tree)
    assert shapes == {
        "a": ("RowSparse", (5, 2)),
        "b": [("MaskedTensor", (4,)), None, ("ArrayImpl", (2,))],
        "c": (("BCOO", (2, 2)), ("BCSR", (2, 2))),
    }
    assert jmask.tree.leaves(tree, is_leaf=lambda x: isinstance(x, list))[1] is tree["b"]
    product = jmask.tree.map(lambda x, y: x * y, {"a": rows}, {"a": jnp.ones((5, 2))})
    assert isinstance(product["a"], RowSparse)
    with pytest.raises(ValueError, match="list"):
        jmask.tree.map(lambda x, y: x, tree, {**tree, "b": ()})


def test_shard_map():
    mesh, spec = jax.make_mesh((1,), ("rows",)), PartitionSpec("rows")
    x = jax.device_put(X, jax.NamedSharding(mesh, spec))
    flipped = jax.shard_map(jnm.fliplr, mesh=mesh, in_specs=spec, out_specs=spec)(x)
    assert flipped.tolist() == jnm.fliplr(X).tolist()
