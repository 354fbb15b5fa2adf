"""Functions of masked tensors against numpy.ma, or NumPy on the valid entries.

One table: what jmask computes of a masked tensor, and what NumPy does of the masked array in
float64. Its derivative is taken by central differences. Under the mask lie nan, inf and 1e30.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jmask
import jmask.numpy as jnm
from jmask import nn
from jmask._tensors.masked_tensor import is_tensor
from tests import masked_cases as cases
from tests.expressions import functions, rows
from tests.masked_cases import KINDS, MASKS, SHAPE

# numpy.ma computes with what lies under the mask, and says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning"),
]
ma = np.ma
OTHER = np.arange(12.0).reshape(SHAPE) - 5


def along(function, axis=None, keepdims=False, nan=False, entries=ma.compressed):
    """`function` of the valid entries of each slice, masked where there is none."""

    def of_slices(x):
        x = ma.masked_where(np.isnan(x.data) & ~ma.getmaskarray(x), x) if nan else x
        whole = axis is None or isinstance(axis, tuple)
        slices = [x.ravel()] if whole else (x if axis else x.T)
        results = [function(entries(s)) if s.count() else 0 for s in slices]
        result = ma.array(results, mask=[not s.count() for s in slices])
        if keepdims:
            return np.expand_dims(result, axis) if not whole else result.reshape(1, 1)
        return result.reshape(()) if whole else result

    return of_slices


def over(function, axis, nan=False):
    """`function` of the valid entries of each slice, at their places."""

    def of_slices(x):
        result = ma.masked_where(np.isnan(x.data), x) if nan else x.copy()
        for s in [result.reshape(-1)] if axis is None else (result if axis else result.T):
            if s.count():
                s[~ma.getmaskarray(s)] = function(s.compressed())
        return result

    return of_slices


def _attention(x):
    """Every row is a query, a key and a value of depth 3."""
    y = jnm.reshape(x, (4, 1, 3))
    return jnm.reshape(nn.dot_product_attention(y, y, y, scale=0.5), (4, 3))


def _attention_of_ma(x):
    exists = ~ma.getmaskarray(x)
    values = x.filled(0)
    scores = np.where(exists @ exists.T, values @ values.T * 0.5, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True, initial=-1e9))
    weights = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)
    terms = (exists.astype(int) @ exists.T > 0).astype(int) @ exists
    return ma.array(weights @ values, mask=terms == 0)


def _of_products(function, dense=OTHER):
    """A product of numpy.ma, masked where no term exists."""

    def of_ma(x):
        count = function((~ma.getmaskarray(x)).astype(float), np.ones_like(dense))
        return ma.array(function(x.filled(0), dense), mask=count == 0)

    return of_ma


def _product(x, y):
    terms = (~ma.getmaskarray(x)).astype(int) @ ~ma.getmaskarray(y)
    return ma.array(x.filled(0) @ y.filled(0), mask=terms == 0)


KNOWN = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [1, 0, 0]], bool)
WEIGHTS = ma.array(OTHER, mask=~KNOWN)
_weights = lambda: jmask.masked_tensor(_float(np.where(KNOWN, OTHER, np.nan)), KNOWN)


def _select(x):
    hidden = ma.getmaskarray(x)
    return ma.array(np.select([x.data < 0, x.data > 1], [-x.data, OTHER], 7.0), mask=hidden)


_float = lambda x: jnp.asarray(x, jnp.result_type(float))
_quantile = lambda q: lambda v: np.quantile(v, q)


def _pairs(text):
    """Read by name what jmask computes of `x`, and what NumPy computes of a masked array."""
    read = functions("x", globals())
    return {
        name: tuple(f for code in codes for f in read(code).values())
        for name, *codes in rows(text)
    }


def _softmax(x):
    powers = np.exp(x - x.max())
    return powers / powers.sum()


# Reductions, and their models of the valid entries of a slice: over all, columns and rows.
AXES = ((None, True), (0, False), (-1, True), ((-2, 1), False))
REDUCTIONS = {
    **{
        name: (getattr(jnm, name), getattr(np, name))
        for name in "sum prod mean var std max amin median".split()
    },
    "norm": (jnm.norm, np.linalg.norm),
    "logsumexp": (jnm.logsumexp, np.logaddexp.reduce),
    "lower median": (
        functools.partial(jnm.median, averaged=False),
        lambda v: np.sort(v)[(v.size - 1) // 2],
    ),
} | {
    f"norm {p}": (functools.partial(jnm.norm, ord=p), functools.partial(np.linalg.norm, ord=p))
    for p in (1, np.inf, -np.inf, 3.5, -1)
}
COUNTS = {
    "all": (lambda x, **axes: jnm.all(x > 0, **axes), lambda v: (v > 0).all()),
    "any": (lambda x, **axes: jnm.any(x > 0, **axes), lambda v: (v > 0).any()),
    "count_nonzero": (jnm.count_nonzero, np.count_nonzero),
}
PLACES = {
    "argmax": (jnm.argmax, np.argmax, lambda s: s.filled(-np.inf)),
    "argmin": (jnm.argmin, np.argmin, lambda s: s.filled(np.inf)),
}
# Of the entries of a row, a column, or all.
NORMALIZED = {
    "softmax": (nn.softmax, _softmax),
    "softmin": (nn.softmin, lambda v: _softmax(-v)),
    "log_softmax": (nn.log_softmax, lambda v: np.log(_softmax(v))),
    "normalize": (nn.normalize, lambda v: v / np.linalg.norm(v)),
    "normalize 3": (functools.partial(nn.normalize, ord=3), lambda v: v / np.linalg.norm(v, 3)),
}
_each = lambda function, every: lambda x: tuple(function(x, **options) for options in every)


def _reduced(function, model, entries=ma.compressed):
    every = [{"axis": axis, "keepdims": keepdims} for axis, keepdims in AXES]
    every = every if entries is ma.compressed else every[:3]  # places are along one axis
    of_ma = [along(model, **options, entries=entries) for options in every]
    return _each(function, every), lambda x: tuple(one(x) for one in of_ma)


def _normalized(function, model):
    axes = (-1, 0, None)
    of_ma = [over(model, axis) for axis in axes]
    every = [{"axis": axis} for axis in axes]
    return _each(function, every), lambda x: tuple(one(x) for one in of_ma)


# Name: function, and what it is in NumPy. All are differentiable where they are in JAX.
SMOOTH = {
    **{name: _reduced(*row) for name, row in REDUCTIONS.items()},
    **{name: _normalized(*row) for name, row in NORMALIZED.items()},
    **_pairs("""
    quantile | jnm.quantile(x, q=0.3) | along(_quantile(0.3))(x)
    quantile rows | jnm.quantile(x, q=0.6, axis=1) | along(_quantile(0.6), 1)(x)
    quantiles | jnm.quantile(x, jnp.array([0.0, 0.25, 1.0]), axis=0) |
        ma.stack([along(_quantile(q), 0)(x) for q in (0, 0.25, 1)])
    percentile | jnm.percentile(x, q=80, axis=0) | along(lambda v: np.percentile(v, 80), 0)(x)
    ptp | x.ptp() | along(np.ptp)(x)
    ptp columns | jnm.ptp(x, axis=0) | along(np.ptp, 0)(x)
    logmeanexp | nn.logmeanexp(x, axis=1) | along(lambda v: np.log(np.mean(np.exp(v))), 1)(x)
    cumlogsumexp | jnm.cumlogsumexp(x, axis=1) | over(np.logaddexp.accumulate, 1)(x)
    cumsum | jnm.cumsum(x, axis=0) | over(np.cumsum, 0)(x)
    cumsum of all | jnm.cumsum(x) | over(np.cumsum, None)(x).ravel()
    cumprod | jnm.cumprod(x, axis=-1) | over(np.cumprod, -1)(x)
    cumprod of zeros | jnm.cumprod(jnm.where(x < 0.4, x, 0.0), axis=1) |
        over(np.cumprod, 1)(ma.where(ma.getdata(x) < 0.4, x, 0 * x))
    diff | jnm.diff(x) | ma.diff(x)
    diff twice | jnm.diff(x, 2, axis=0) | ma.diff(x, 2, axis=0)
    diff appended | jnm.diff(x, axis=0, prepend=1.0, append=_float(OTHER)) |
        ma.diff(ma.concatenate([np.ones((1, 3)), x, OTHER]), axis=0)
    cov | jnm.cov(x) | ma.cov(x)
    cov columns | jnm.cov(x, rowvar=False, bias=True) | ma.cov(x, rowvar=False, bias=True)
    cov of two | jnm.cov(x, _float(OTHER), ddof=0) | ma.cov(x, ma.array(OTHER), ddof=0)
    cov of one | jnm.cov(x[0]) | ma.cov(x[0])
    trace | x.trace() | along(np.sum)(x)
    trace above | jnm.trace(x, 1) | along(np.sum)(x)
    outer | jnm.outer(x, _float(OTHER[0])) | ma.outer(x, OTHER[0])
    outer of two | jnm.outer(x[0], x[1]) | ma.outer(x[0], x[1])
    inner | jnm.inner(x, _float(OTHER)) | _of_products(np.inner)(x)
    tensordot | jnm.tensordot(x, _float(OTHER), axes=([0], [0])) |
        _of_products(lambda x, y: np.tensordot(x, y, axes=([0], [0])))(x)
    vdot | jnm.vdot(x, _float(OTHER)) | _of_products(np.vdot)(x)
    dot | x.dot(_float(OTHER.T)) | _of_products(np.dot, OTHER.T)(x)
    matmul | x @ _float(OTHER.T) | _of_products(np.matmul, OTHER.T)(x)
    matmul from the left | _float(OTHER.T) @ x | _product(ma.array(OTHER.T), x)
    matmul of masked | jnm.matmul(x, _weights().T) | _product(x, WEIGHTS.T)
    matmul of itself | jnm.matmul(x.T, x) | _product(x.T, x)
    einsum | jnm.einsum("bij,kj->bik", jnm.reshape(x, (1, 4, 3)), _weights()) |
        _product(x, WEIGHTS.T)[None]
    linear | tuple(nn.linear(x, _weights(), b) for b in (None, _float(OTHER[:, 0]))) |
        tuple(_product(x, WEIGHTS.T) + b for b in (0, OTHER[:, 0]))
    select | jnm.select([x < 0, x > 1], [-x, _float(OTHER)], 7.0) | _select(x)
    top_k | jnm.top_k(x, 2)[0] | ma.array([ma.sort(-r, endwith=True)[:2] * -1 for r in x])
    standardize | nn.standardize(x) |
        (x - x.mean(1, keepdims=True)) / ma.sqrt(x.var(1, keepdims=True) + 1e-5)
    standardize by |
        nn.standardize(x, mean=_float(2.0), epsilon=1.0, axis=0, variance=_float(3.0)) |
        (x - 2) / 2
    glu | nn.glu(x, axis=0) | x[:2] / (1 + ma.exp(-x[2:]))
    masked_greater | jnm.masked_greater(x, 0.5) | ma.masked_greater(x, 0.5)
"""),
}
STEPS = {
    **{name: _reduced(*row) for name, row in (COUNTS | PLACES).items()},
    **_pairs("""
    attention | _attention(x) | _attention_of_ma(x)
    top_k places | jnm.top_k(x, 3, axis=0)[1] |
        ma.array(np.argsort(-x.filled(-1e9), axis=0, kind="stable")[:3],
        mask=np.arange(3)[:, None] >= x.count(0))
    heaviside | jnm.heaviside(x, 0.5) | ma.array(np.heaviside(x.data, 0.5), mask=x.mask)
    copysign | jnm.copysign(2.0, x) | ma.array(np.copysign(2.0, x.data), mask=x.mask)
    isclose | jnm.isclose(x, 0.5, atol=0.3) | abs(x - 0.5) <= 0.3 + 0.5e-5
    allclose | jnm.allclose(x, _float(OTHER), atol=5.0) | ma.allclose(x, OTHER, atol=5.0)
    allclose, masked differ | jnm.allclose(x, x, masked_equal=False) |
        ma.allclose(x, x, masked_equal=False)
    array_equal | jnm.array_equal(x, x) | ma.allequal(x, x)
    count | x.count(axis=1) | x.count(axis=1)
    count of all | jnm.count(x) | x.count()
    filled | x.filled(7) | x.filled(7)
"""),
}
CONDITIONS = dict.fromkeys(
    "equal not_equal greater_equal less less_equal values".split(), (0.5,)
) | {"inside": (0.5, -1.0), "outside": (-1.0, 0.5), "invalid": ()}
for _name, _values in CONDITIONS.items():
    STEPS[f"masked_{_name}"] = (
        lambda x, f=f"masked_{_name}", v=_values: getattr(jnm, f)(x, *v),
        lambda x, f=f"masked_{_name}", v=_values: getattr(ma, f)(x, *v, copy=True),
    )
# With nan among the valid entries.
NAN = {
    f"nan{name} {axis}": (
        functools.partial(getattr(jnm, f"nan{name}"), axis=axis, **options),
        along(functools.partial(getattr(np, name), **options), axis, nan=True),
    )
    for name, options in {
        **{key: {} for key in "sum prod mean max min std var median".split()},
        "quantile": {"q": 0.3},
        "percentile": {"q": 70},
    }.items()
    for axis in (None, 1)
} | {
    "nancumsum": (lambda x: jnm.nancumsum(x, 1), over(np.cumsum, 1, nan=True)),
    "nancumprod": (lambda x: jnm.nancumprod(x, 0), over(np.cumprod, 0, nan=True)),
}
# Their size depends on the data.
SIZED = _pairs("""
    unique | jnm.unique(x) | ma.unique(x)
    compressed | x.compressed() | x.compressed()
    nonzero | x.nonzero() | ma.nonzero(x)
""")


# What is not made dense; products are not of these storages but `row_sparse`.
SPARSE = {*REDUCTIONS, *COUNTS, *PLACES, *NORMALIZED} - {"median", "lower median"}
PRODUCTS = {"matmul", "matmul of masked"}


def _poisoned(clean):
    """Data and masks: of each number of `clean`, every mask with every poison under it."""
    number = len(cases.POISON)
    mask = np.repeat(MASKS, number, 0)
    poison = np.tile(cases.POISON, len(MASKS))[:, None, None]
    data = np.where(mask, np.repeat(clean, number, 0), poison)
    return jnp.asarray(data, jnp.float32), jnp.asarray(mask)


def _counted(name, mask, kind):
    """The valid entries, and of them those that are summed by `trace`."""
    offset = {"trace": 0, "trace above": 1}.get(name)
    valid = mask & cases.PATTERNS[kind]
    diagonal = offset is None or np.arange(3) - np.arange(4)[:, None] == offset
    return valid, valid & diagonal


def _storage(name, kind):
    sparse = name in SPARSE or (name in PRODUCTS and kind != "row_sparse")
    return jmask.strict() if sparse else contextlib.nullcontext()


def _dense(results):
    return jax.tree.map(lambda x: jmask.cast_storage(x, "default"), results, is_leaf=is_tensor)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*SMOOTH, *STEPS, *NAN, *SIZED])
def test_against_numpy(name, kind):
    function, reference = (SMOOTH | STEPS | NAN | SIZED)[name]
    clean = np.stack([cases.clean_numbers(i) for i in range(len(MASKS))])
    if name in NAN:
        clean[:, 1, 1], clean[:, 2, 0] = np.nan, np.nan
    data, mask = _poisoned(clean)

    def run(data, mask):
        x = cases.build(kind, data, mask)
        results = function(x)
        if name in NORMALIZED:
            assert {result.stype for result in results} == {x.stype}
        return _dense(results)

    with _storage(name, kind):
        if name not in SIZED:
            results = jax.tree.map(np.asarray, jax.jit(jax.vmap(run))(data, mask))
        if name in REDUCTIONS:
            assert not any(np.isnan(result.storage).any() for result in results)
        for i in range(len(mask)):
            seed = i // len(cases.POISON)
            _, counted = _counted(name, MASKS[seed], kind)
            expected = reference(ma.array(clean[seed], mask=~counted, dtype=np.float64))
            if name in SIZED or i == 9:
                cases.compare(run(data[i], mask[i]), expected, name)
            if name not in SIZED:
                cases.compare(jax.tree.map(lambda a, i=i: a[i], results), expected, name)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives(name, kind):
    """Forward and reverse mode, and of the second order; nothing of masked entries."""
    function, reference = SMOOTH[name]
    clean = cases.clean_numbers(5) + 0.01 * np.arange(1, 13, dtype=np.float32).reshape(SHAPE)
    weights = lambda x: 1 + np.arange(x.size).reshape(x.shape) / x.size

    def loss(data, mask):
        results = _dense(function(cases.build(kind, data, mask)))
        leaves = jax.tree.leaves(results, is_leaf=is_tensor)
        return sum(jnp.sum(x.to_tensor(0) * weights(x)) for x in leaves)

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, 0, None))
    def run(data, mask, direction):
        forward = jax.jvp(lambda data: loss(data, mask), (data,), (direction,))[1]
        return forward, *jax.jvp(lambda d: jax.grad(loss)(d, mask), (data,), (direction,))

    def model(values):
        results = reference(ma.array(values, mask=~counted))
        results = results if isinstance(results, tuple) else (results,)
        return sum(ma.sum(x.filled(0) * weights(x)) for x in results)

    direction = cases.clean_numbers(6)
    with _storage(name, kind):
        found = run(*_poisoned(np.stack([clean] * len(MASKS))), jnp.asarray(direction))
    for i, (forward, slope, second) in enumerate(zip(*map(np.asarray, found), strict=True)):
        if i % len(cases.POISON) == 0:
            valid, counted = _counted(name, MASKS[i // len(cases.POISON)], kind)
            at, step = clean.astype(float), 1e-3 * direction
            expected, after, before = (
                cases.slope_of(model, x, counted) for x in (at, at + step, at - step)
            )
        np.testing.assert_allclose(slope, expected, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(forward, np.sum(slope * direction), rtol=2e-4, atol=2e-5)
        assert (slope[~valid] == 0).all()
        assert (second[~valid] == 0).all()
        np.testing.assert_allclose(second, (after - before) / 2e-3, rtol=2e-3, atol=2e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*SMOOTH, *STEPS, *SIZED])
def test_repeated_positions_are_one_entry(name):
    """Masked tensors that store a position twice, once masked, and padding."""
    function, _ = (SMOOTH | STEPS | SIZED)[name]
    rng = np.random.default_rng(4)
    ids, places = np.array([1, 3, 1, 4, 0]), np.array([[0, 2], [3, 1], [0, 2], [4, 3], [2, 0]])
    rows = jmask.RowSparse(ids, jnp.asarray(rng.normal(size=(5, 3)), jnp.float32), SHAPE)
    coo = BCOO((jnp.asarray(rng.normal(size=5), jnp.float32), jnp.asarray(places)), shape=SHAPE)
    for x in (rows, coo):
        stored = x.values if x is rows else x.data
        x = jmask.masked_tensor(x, jnp.asarray(rng.random(stored.shape) < 0.7))
        found, expected = function(x), function(x.to_dense())
        as_ma = lambda y: jmask.to_numpy_ma(y) if isinstance(y, jmask.MaskedTensor) else y
        cases.compare(found, jax.tree.map(as_ma, expected, is_leaf=is_tensor), name)
