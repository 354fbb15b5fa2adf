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
KNOWN = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0], [1, 0, 0]], bool)
WEIGHTS = ma.array(OTHER, mask=~KNOWN)
_float = lambda x: jnp.asarray(x, jnp.result_type(float))
_weights = lambda: jmask.masked_tensor(_float(np.where(KNOWN, OTHER, np.nan)), KNOWN)

# --- models ------------------------------------------------------------------------------


def along(function, axis=None, keepdims=False, entries=ma.compressed):
    """`function` of the valid entries of each slice, masked where there is none."""

    def of_slices(x):
        whole = axis is None or isinstance(axis, tuple)
        slices = [x.ravel()] if whole else (x if axis else x.T)
        results = [function(entries(s)) if s.count() else 0 for s in slices]
        result = ma.array(results, mask=[not s.count() for s in slices])
        if keepdims:
            return np.expand_dims(result, axis) if not whole else result.reshape(1, 1)
        return result.reshape(()) if whole else result

    return of_slices


def over(function, axis):
    """`function` of the valid entries of each slice, at their places."""

    def of_slices(x):
        result = x.copy()
        for s in [result.reshape(-1)] if axis is None else (result if axis else result.T):
            if s.count():
                s[~ma.getmaskarray(s)] = function(s.compressed())
        return result

    return of_slices


_but_nan = lambda model: lambda x: model(ma.masked_where(np.isnan(x.data) | x.mask, x))


def _attention_of_ma(x):
    """Every row is a query, a key and a value of depth 3."""
    exists, values = ~x.mask, x.filled(0)
    scores = np.where(exists @ exists.T, values @ values.T / 3**0.5, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True, initial=-1e9))
    weights = weights / np.maximum(weights.sum(1, keepdims=True), 1e-300)
    terms = (exists.astype(int) @ exists.T > 0).astype(int) @ exists
    return ma.array(weights @ values, mask=terms == 0)


def _products(function, x, y):
    """A product of numpy.ma, masked where no term exists."""
    terms = function(*((~ma.getmaskarray(a)).astype(int) for a in (x, y)))
    return ma.array(function(ma.filled(x, 0), ma.filled(y, 0)), mask=terms == 0)


_product = functools.partial(_products, np.matmul)


def _sorted(x, order, axis):
    """What `order` takes of the data; masked entries come last."""
    places = np.indices(x.shape)[axis]
    return ma.array(np.take_along_axis(x.data, order, axis), mask=places >= x.count(axis, True))


def _updated(x, index, operation, values):
    """Arithmetic keeps masks, and `set` makes entries valid; masked values make them masked."""
    data, mask = x.data.copy(), ma.getmaskarray(x).copy()
    if operation == "set":
        data[index], mask[index] = ma.getdata(values), ma.getmaskarray(values)
    else:
        getattr(np, operation).at(data, index, ma.getdata(values))
        np.logical_or.at(mask, index, ma.getmaskarray(values))
    return ma.array(data, mask=mask)


# --- tables ------------------------------------------------------------------------------


def _pairs(text):
    """Read by name what jmask computes of `x`, and what NumPy computes of a masked array."""
    read = functions("x", globals())
    return {
        name: tuple(f for code in codes for f in read(code).values())
        for name, *codes in rows(text)
    }


def _alike(text):
    """Read what jmask and numpy.ma write in the same way, of `x` and an array `d`."""
    return {
        code: (
            lambda x, f=f: f(jnm, x, _float(OTHER)),
            lambda x, f=f: f(ma, x, ma.array(OTHER)),
        )
        for code, f in functions("m, x, d", globals())(text).items()
    }


def _moved(text):
    """Read what moves entries: the data and the flags of masked entries, in NumPy."""

    def model(function):
        parts = lambda x: (function(np, x.data, OTHER), function(np, x.mask, np.isnan(OTHER)))
        return lambda x: jax.tree.map(lambda a, b: ma.array(a, mask=b), *parts(x))

    read = functions("m, x, d", globals())(text)
    return {
        code: (lambda x, f=f: f(jnm, x, _float(OTHER)), model(f)) for code, f in read.items()
    }


def _softmax(x):
    powers = np.exp(x - x.max())
    return powers / powers.sum()


# Where derivatives are taken, and of these numbers the equal ones: differences to them are 0.
POINT = cases.clean_numbers(5) + 0.01 * np.arange(1, 13, dtype=np.float32).reshape(SHAPE)
AT = np.where(np.isin(np.arange(12), [0, 4, 5, 11]).reshape(SHAPE), POINT, 0)
_quantile = lambda q: lambda v: np.quantile(v, q)
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
    for p in (0, 1, np.inf, -np.inf, 3.5, -1)
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
    of_ma = [over(model, axis) for axis in (-1, 0, None)]
    every = [{"axis": axis} for axis in (-1, 0, None)]
    return _each(function, every), lambda x: tuple(one(x) for one in of_ma)


# Name: function, and what it is in NumPy. All are differentiable where they are in JAX.
# One function of each word is enough: which functions move entries, and how, is compared with
# JAX and on storages in `test_every_function`.
MOVES = _moved("""
    m.diag(x[0]); m.flip(x, 1); m.roll(x, 2, 1); m.triu(x, -1); m.delete(x, 1, 0);
    m.split(x, [1, 2], 1); m.unstack(x); m.atleast_3d(x); m.concatenate([x, d, x]);
    m.stack([d, x], -1); m.column_stack([x, d]); m.broadcast_arrays(x, d[None]);
    x.T; x.mT; x.ravel(); x.flatten(); x.repeat(2); x.copy(); x.diagonal(); x[:1].squeeze(0);
    x.reshape(-1, 2); x.reshape((6, 2)); x.swapaxes(0, 1); x.transpose(); x.transpose(1, 0);
    x.transpose((1, 0)); m.take(x, np.array([2, 0, -1]), 0); m.take(x, np.array([[5, 1]]));
    x.take(np.array([1]), 1); m.where(KNOWN, x, d); m.pad(x, 1, "reflect"); m.pad(x, 1);
    m.take_along_axis(x, np.array([[2, 0], [1, 1], [2, -1], [0, 0]]), 1);
    m.pad(x, ((0, 1), (2, 0)), "edge"); m.pad(x, 1, "symmetric"); m.pad(x, 1, "wrap");
    x[1]; x[-1]; x[2, 1]; x[1:]; x[:, ::-2]; x[None, 0]; x[..., 2]; x[np.array([2, 0, 2])];
    x[[2, 0, 2]]; x[np.array([2, 0]), np.array([[1], [2]])]; x[:, np.array([[2, 0]])];
    x[KNOWN]; x[np.array([True, False, True, True])]; x[4:]; x[np.int32(1)]
""")
ALIKE = _alike("""
    x + 1; 1 + x; 2 - x; d * x; x - d; x / 3; 2.0 / (x + 5); x**2; 2.0**x; -x; +x; abs(x);
    x - np.float32(2); x.clip(-0.3, 0.6); m.diff(x); m.diff(x, 2, axis=0); m.cov(x);
    m.cov(x, rowvar=False, bias=True); m.cov(x, d, ddof=0); m.cov(x[0]); m.outer(x, d[0]);
    m.outer(x[0], x[1]); m.average(x, 1, d * d + 1);
    m.masked_greater(x, 0.5); m.masked_where(x < 0, x)
""")
SMOOTH = {
    **{name: _reduced(*row) for name, row in REDUCTIONS.items()},
    **{name: _normalized(*row) for name, row in NORMALIZED.items()},
    **_pairs("""
    prod of zeros | jnm.prod(x - _float(AT), axis=1) | along(np.prod, 1)(x - AT)
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
    diff appended | jnm.diff(x, axis=0, prepend=1.0, append=_float(OTHER)) |
        ma.diff(ma.concatenate([np.ones((1, 3)), x, OTHER]), axis=0)
    trace | x.trace() | along(np.sum)(x.diagonal())
    trace above | jnm.trace(x, 1) | along(np.sum)(x.diagonal(1))
    inner | jnm.inner(x, _float(OTHER)) | _products(np.inner, x, OTHER)
    tensordot | jnm.tensordot(x, _float(OTHER), axes=([0], [0])) | _product(x.T, OTHER)
    vdot | jnm.vdot(x, _float(OTHER)) | _products(np.vdot, x, OTHER)
    dot | x.dot(_float(OTHER.T)) | _product(x, OTHER.T)
    matmul | x @ _float(OTHER.T) | _product(x, OTHER.T)
    matmul from the left | _float(OTHER.T) @ x | _product(OTHER.T, x)
    matmul of masked | jnm.matmul(x, _weights().T) | _product(x, WEIGHTS.T)
    matmul of itself | jnm.matmul(x.T, x) | _product(x.T, x)
    einsum | jnm.einsum("bij,kj->bik", jnm.reshape(x, (1, 4, 3)), _weights()) |
        _product(x, WEIGHTS.T)[None]
    linear | tuple(nn.linear(x, _weights(), b) for b in (None, _float(OTHER[:, 0]))) |
        tuple(_product(x, WEIGHTS.T) + b for b in (0, OTHER[:, 0]))
    select | jnm.select([x < 0, x > 1], [-x, _float(OTHER)], 7.0) |
        ma.array(np.select([x.data < 0, x.data > 1], [-x.data, OTHER], 7.0), mask=x.mask)
    where masked | jnm.where(_weights() > 0, x, 2.0) |
        ma.array(np.where(OTHER > 0, x.data, 2),
        mask=np.maximum(np.where(OTHER > 0, x.mask, False), ~KNOWN))
    masked_fill | jnm.masked_fill(x, KNOWN, _weights()[:1]) |
        ma.where(KNOWN, WEIGHTS[:1] + 0 * OTHER, x)
    slopes | nn.leaky_relu(x, negative_slope=_weights()) |
        ma.array(np.where(x.data < 0, x.data * OTHER, x.data), mask=x.mask + ~KNOWN)
    sort | jnm.sort(x) | _sorted(x, np.argsort(x.filled(9), 1), 1)
    sort columns | jnm.sort(x, 0, descending=True) | _sorted(x, np.argsort(-x.filled(-9), 0), 0)
    sort all | jnm.sort(x, None) | _sorted(x.ravel(), np.argsort(x.ravel().filled(9)), 0)
    top_k | jnm.top_k(x, 2)[0] | _sorted(x, np.argsort(-x.filled(-9), 1), 1)[:, :2]
    standardize | nn.standardize(x) |
        (x - x.mean(1, keepdims=True)) / ma.sqrt(x.var(1, keepdims=True) + 1e-5)
    standardize by |
        nn.standardize(x, mean=_float(2.0), epsilon=1.0, axis=0, variance=_float(3.0)) |
        (x - 2) / 2
    glu | nn.glu(x, axis=0) | x[:2] / (1 + ma.exp(-x[2:]))
    set | x.at[[2, 0]].set(7.0) | _updated(x, [2, 0], "set", 7.0)
    set masked | x.at[1:3].set(_weights()[2:]) | _updated(x, slice(1, 3), "set", WEIGHTS[2:])
    set itself | x.at[:2].set(x[2:]) | _updated(x, slice(2), "set", x[2:])
    add | x.at[[2, 0, 2], 1].add(3.0) | _updated(x, ([2, 0, 2], 1), "add", 3.0)
    power | x.at[1].power(2.0) | _updated(x, 1, "power", 2.0)
    apply | x.at[[0, 0]].apply(jnp.tanh) | _updated(x, 0, "set", np.tanh(x[0]))
    """),
    **{
        f"at {name}": (
            lambda x, name=name: getattr(x.at[1:], name)(_weights()[:3]),
            lambda x, of=of: _updated(x, slice(1, None), of, WEIGHTS[:3]),
        )
        for name, of in {
            "add": "add", "subtract": "subtract", "multiply": "multiply", "divide": "divide",
            "mul": "multiply", "min": "minimum", "max": "maximum",
        }.items()
    },
} | ALIKE | MOVES  # fmt: skip
STEPS = {
    **{name: _reduced(*row) for name, row in (COUNTS | PLACES).items()},
    **_pairs("""
    attention | nn.dot_product_attention(*[jnm.reshape(x, (4, 1, 3))] * 3)[:, 0] |
        _attention_of_ma(x)
    top_k places | jnm.top_k(x, 3, axis=0)[1] |
        ma.array(np.argsort(-x.filled(-1e9), axis=0, kind="stable")[:3],
        mask=np.arange(3)[:, None] >= x.count(0))
    argsort | jnm.argsort(x) |
        ma.array(np.argsort(x.filled(9), 1, "stable"), mask=np.arange(3) >= x.count(1, True))
    corrcoef | jnm.masked_invalid(jnm.corrcoef(x)) | ma.corrcoef(x)
    corrcoef of columns | jnm.masked_invalid(jnm.corrcoef(x, rowvar=False)) |
        ma.corrcoef(x, rowvar=False)
    masks that broadcast | jnm.not_equal(x, _weights()[:1]) | x != WEIGHTS[:1]
    heaviside | jnm.heaviside(x, 0.5) | ma.array(np.heaviside(x.data, 0.5), mask=x.mask)
    copysign | jnm.copysign(2.0, x) | ma.array(np.copysign(2.0, x.data), mask=x.mask)
    isclose | jnm.isclose(x, 0.5, atol=0.3) | abs(x - 0.5) <= 0.3 + 0.5e-5
    allclose | jnm.allclose(x, _float(OTHER), atol=5.0) | ma.allclose(x, OTHER, atol=5.0)
    allclose, masked differ | jnm.allclose(x, x, masked_equal=False) |
        ma.allclose(x, x, masked_equal=False)
    array_equal | jnm.array_equal(x, x) | ma.allequal(x, x)
    """),
    **_alike("x.count(axis=1); m.count(x); x.filled(7)"),
}
# Complex numbers have none of these.
ROUNDED = _alike("""
    x // 2; 3 // x; x % 2; 5.0 % x; x == 0.5; x > 0.5; x <= d; d < x; x != 0.5; x.round(1);
    ~(x < 0.5) & (x > -1); (x <= -0.5) | (x >= 0.5)
""") | {
    f"masked_{name}": (
        lambda x, f=f"masked_{name}", v=values: getattr(jnm, f)(x, *v),
        lambda x, f=f"masked_{name}", v=values: getattr(ma, f)(x, *v, copy=True),
    )
    for name, values in {
        **dict.fromkeys("equal not_equal greater_equal less less_equal values".split(), (0.5,)),
        "inside": (0.5, -1.0),
        "outside": (-1.0, 0.5),
        "invalid": (),
    }.items()
}
# With nan among the valid entries.
NAN = {
    f"nan{name} {axis}": (
        functools.partial(getattr(jnm, f"nan{name}"), axis=axis, **options),
        _but_nan(along(functools.partial(getattr(np, name), **options), axis)),
    )
    for name, options in {
        **{key: {} for key in "sum prod mean max min std var median".split()},
        "quantile": {"q": 0.3},
        "percentile": {"q": 70},
    }.items()
    for axis in (None, 1)
} | _pairs("""
    nancumsum | jnm.nancumsum(x, 1) | _but_nan(over(np.cumsum, 1))(x)
    nancumprod | jnm.nancumprod(x, 0) | _but_nan(over(np.cumprod, 0))(x)
""")
# Their size depends on the data.
SIZED = _alike("m.unique(x); x.compressed(); m.nonzero(x)")
EVERY = SMOOTH | STEPS | ROUNDED | NAN | SIZED


# Complex numbers have no order; numpy.ma takes the real part first. `jmask.numpy.sort` is as
# JAX's. Of others numpy.ma drops the imaginary part, or has nothing like it.
NO_ORDER = {
    *("max", "amin", "median", "lower median", "quantile", "quantile rows", "quantiles"),
    *("percentile", "ptp", "ptp columns", "argmax", "argmin"),
    *("heaviside", "copysign", "x.clip(-0.3, 0.6)"),
    *(name for name in NAN if name[3:6] in ("max", "min", "med", "qua", "per")),
}
REAL = {
    "cumlogsumexp",
    "logsumexp",
    "logmeanexp",
    "attention",
    *(n for n in EVERY if "m.cov" in n or "corrcoef" in n),
}
COMPLEX = (SMOOTH | STEPS | NAN | SIZED).keys() - REAL - MOVES.keys()

# What is not made dense; products are not of these storages but `row_sparse`.
SPARSE = {*REDUCTIONS, *COUNTS, *PLACES, *NORMALIZED} - {"median", "lower median"}
PRODUCTS = {"matmul", "matmul of masked"}


def _poisoned(clean):
    """Data and masks: of each number of `clean`, every mask with every poison under it."""
    number = len(cases.POISON)
    mask = np.repeat(MASKS, number, 0)
    poison = np.tile(cases.POISON, len(MASKS))[:, None, None]
    poison = poison * (1 + 1j) if np.iscomplexobj(clean) else poison
    data = np.where(mask, np.repeat(clean, number, 0), poison)
    return jnp.asarray(data, clean.dtype), jnp.asarray(mask)


def _storage(name, kind):
    sparse = name in SPARSE or (name in PRODUCTS and kind != "row_sparse")
    return jmask.strict() if sparse else contextlib.nullcontext()


def _on_storages(table):
    """Cases of every storage; what moves entries is made dense, and one is enough."""
    return [(n, kind) for n in table for kind in (KINDS[:1] if n in MOVES else KINDS)]


def _dense(results):
    return jax.tree.map(lambda x: jmask.cast_storage(x, "default"), results, is_leaf=is_tensor)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dtype", "name", "kind"),
    [("float32", *case) for case in _on_storages(EVERY)]
    + [("complex64", *case) for case in _on_storages(sorted(COMPLEX))],
)
def test_against_numpy(dtype, name, kind):
    function, reference = EVERY[name]
    clean = np.stack([cases.clean_numbers(i) for i in range(len(MASKS))])
    if dtype == "complex64":
        clean = clean + np.complex64(1j) * clean[::-1]
    if name in NAN:
        clean[:, 1, 1], clean[:, 2, 0] = np.nan, np.nan
    data, mask = _poisoned(clean)
    if dtype == "complex64" and name in NO_ORDER:
        with pytest.raises((TypeError, ValueError), match=r"[Cc]omplex"):
            function(cases.build(kind, data[0], mask[0]))
        return
    if dtype == "complex64" and name == "log_softmax":  # logarithms are 2 pi apart
        function = lambda x: tuple(map(jnm.exp, EVERY[name][0](x)))
        reference = lambda x: tuple(map(ma.exp, EVERY[name][1](x)))
    # Of complex and real operands JAX says what comes.
    exact, promotion = (
        (np.complex128, "standard") if dtype == "complex64" else (float, "strict")
    )

    def run(data, mask):
        x = cases.build(kind, data, mask)
        results = function(x)
        if name in NORMALIZED:
            assert {result.stype for result in results} == {x.stype}
        return _dense(results)

    with _storage(name, kind), jax.numpy_dtype_promotion(promotion):
        if name not in SIZED:
            results = jax.tree.map(np.asarray, jax.jit(jax.vmap(run))(data, mask))
        if name in REDUCTIONS:
            assert not any(np.isnan(result.storage).any() for result in results)
        for i in range(len(mask)):
            seed = i // len(cases.POISON)
            hidden = ~(MASKS[seed] & cases.PATTERNS[kind])
            expected = reference(ma.array(clean[seed], mask=hidden, dtype=exact))
            if name in SIZED or i == 9:
                cases.compare(run(data[i], mask[i]), expected, name)
            if name not in SIZED:
                cases.compare(jax.tree.map(lambda a, i=i: a[i], results), expected, name)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "kind"), _on_storages(SMOOTH))
def test_derivatives(name, kind):
    """Forward and reverse mode, and of the second order; nothing of masked entries."""
    function, reference = SMOOTH[name]
    clean = POINT
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
        results = reference(ma.array(values, mask=~valid))
        results = results if isinstance(results, tuple | list) else (results,)
        return sum(ma.sum(x.filled(0) * weights(x)) for x in results)

    direction = cases.clean_numbers(6)
    with _storage(name, kind):
        found = run(*_poisoned(np.stack([clean] * len(MASKS))), jnp.asarray(direction))
    for i, (forward, slope, second) in enumerate(zip(*map(np.asarray, found), strict=True)):
        if i % len(cases.POISON) == 0:
            valid = MASKS[i // len(cases.POISON)] & cases.PATTERNS[kind]
            at, step = clean.astype(float), 1e-3 * direction
            expected, after, before = (
                cases.slope_of(model, x, valid) for x in (at, at + step, at - step)
            )
        np.testing.assert_allclose(slope, expected, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(forward, np.sum(slope * direction), rtol=2e-4, atol=2e-5)
        assert (slope[~valid] == 0).all()
        assert (second[~valid] == 0).all()
        np.testing.assert_allclose(second, (after - before) / 2e-3, rtol=2e-3, atol=2e-3)


EXTREMA = {
    "max": lambda x, m: jnm.max(jmask.masked_tensor(x, m), axis=1).to_tensor(0),
    "min where": lambda x, m: jnm.min(x, axis=1, where=m, initial=9.0),
    "norm": lambda x, m: jnm.norm(x, ord=jnp.inf, axis=1, where=m),
    "argmax": lambda x, m: jnp.take(x, jnm.argmax(x, axis=1, where=m), axis=1),
    "bags": lambda x, m: jmask.embedding_bag(
        x, jnp.where(m, jnp.arange(3), -1), combiner="max"
    ),
}


@pytest.mark.parametrize("name", EXTREMA)
def test_extrema_of_what_is_computed(name):
    """XLA may round a product and a sum in two ways where it computes them twice."""
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        for _ in range(8):
            x, step = rng.uniform(0, 1, SHAPE), rng.uniform(-1, 1, SHAPE)
            valid, factor = rng.random(SHAPE) < 0.8, rng.uniform(0, 0.1)
            total = lambda t: jnp.sum(jnp.sin(EXTREMA[name](x + t * step, valid)))  # noqa: B023
            both = lambda t: (total(t), jax.grad(total)(t))  # noqa: B023
            with jax.disable_jit():
                expected = both(factor)
            np.testing.assert_allclose(jax.jit(both)(factor), expected, rtol=1e-9, atol=1e-9)
