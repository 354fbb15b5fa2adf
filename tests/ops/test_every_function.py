"""Every public function of masked tensors, on every storage, of real and complex numbers.

    arrays, and masked tensors without a masked entry      as JAX computes
    the same, with options and at special numbers          as JAX computes
    arrays of numpy.ma                                     as masked tensors
    masked tensors on row-sparse, COO and CSR storage      as on dense storage
    RowSparse, BCOO, BCSR                                  as of the array that they are

Masked tensors on dense storage are held against numpy.ma in `test_masked_functions`. The names
of `jmask.numpy` and `jmask.nn` are found, not listed: a new one is called as f(x), or needs a
call.
"""

import contextlib
import functools
import inspect
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
from jmask import nn
from jmask._tensors.masked_tensor import is_tensor
from tests import masked_cases as cases
from tests.expressions import functions, rows
from tests.masked_cases import KINDS, MASKS, SHAPE, clean_numbers
from tests.ops.test_elementwise import BINARY, FUNCTIONS, INTEGER, UNARY

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning"),
    pytest.mark.dtype_promotion,
    pytest.mark.rank_promotion,
]
OTHER = (np.arange(12.0).reshape(SHAPE) - 4.2) / 3
other = lambda x: jnp.asarray(OTHER, x.dtype)
heads = lambda x: [jnm.reshape(x, (4, 1, 3))] * 3  # every row is a query, a key and a value
ATTENTION = (
    *({}, {"is_causal": True}, {"local_window_size": (1, 0)}),
    {"key_value_seq_lengths": np.array([3], np.int32), "query_seq_lengths": np.array([4])},
    {"scale": 0.1, "bias": np.linspace(0, 1, 16, dtype=np.float32).reshape(1, 1, 4, 4)},
    {"mask": np.tile([True, True, False, True], (1, 1, 4, 1))},
)
# Calls of what takes more than a tensor: of the function, and the tensor.
CALLS = {
    name: call
    for names, code in rows("""
    masked_equal masked_greater masked_greater_equal masked_less masked_less_equal
        masked_not_equal masked_values | f(x, 0.5)
    quantile nanquantile | [f(x, 0.3, axis=axis) for axis in (0, 1)]
    percentile nanpercentile | [f(x, 30, axis=axis) for axis in (0, 1)]
    inner outer vdot array_equal | f(x, x)
    column_stack concat concatenate dstack hstack stack vstack | [f([x, x]), f([x, other(x)])]
    array_split hsplit | f(x, 3)
    split vsplit repeat top_k | f(x, 2)
    roll rollaxis pad expand_dims | f(x, 1)
    moveaxis swapaxes | f(x, 0, 1)
    masked_inside masked_outside | f(x, -0.5, 0.5)
    compressed nonzero | f(x, size=12)
    unique | f(x, size=12, fill_value=1)
    tile | f(x, (1, 2))
    reshape | f(x, (3, 4))
    broadcast_to | f(x, (2, *SHAPE))
    full_like | f(x, 7)
    allclose | f(x, other(x), atol=3.0)
    broadcast_arrays | f(x, other(x)[None])
    clip | [f(x, -0.3, 0.3), f(x, None, other(x)), f(x, max=jnm.abs(x).astype(x.dtype))]
    leaky_relu | [f(x), f(x, other(x)), f(x, negative_slope=x)]
    delete | f(x, 1, axis=0)
    dot | f(x, other(x).T)
    dsplit | f(jnm.expand_dims(x, 2), 1)
    einsum | f("ij,kj->ik", x, other(x))
    masked_fill | f(x, OTHER > 0, 2.0)
    masked_where | f(OTHER > 0, x)
    matmul | [f(x, other(x).T), f(other(x).T, x)]
    permute_dims | f(x, (1, 0))
    select | f([OTHER > 0, OTHER > -1], [x, jnm.multiply(2, x)])
    squeeze | f(x[None])
    average | [f(x), f(x, 1, OTHER**2), f(x, 0, jnm.abs(x))]
    take | f(x, jnp.array([2, 0, 2]), axis=1)
    take_along_axis | f(x, jnp.array([[1], [2], [0], [1]]), 1)
    tensordot | f(x, other(x), axes=([0], [0]))
    where | [f(OTHER > 0, x, other(x)), f(jnm.equal(x, 0.5), x, 1)]
    cov | [f(x), f(x, rowvar=False), f(x, bias=True)]
    corrcoef | [f(x), f(x, rowvar=False)]
    dot_product_attention | [f(*heads(x), **how) for how in ATTENTION]
    glu | f(x, axis=0)
    linear | f(x, other(x))
    """)
    for call in functions("f, x", globals())(code).values()
    for name in names.split()
}


def calls():
    """The call of each public name."""
    found = {}
    for module in (jnm, nn):
        for name, function in vars(module).items():
            if name[0] == "_" or name == "elementwise":
                continue
            call = CALLS.get(name, lambda f, x: f(x))
            if function is FUNCTIONS.get(name) and name in BINARY:
                call = lambda f, x: [f(x, other(x)), f(other(x), x), f(x, x)]
            found[name] = functools.partial(call, function)
    return found


EVERY = calls()
DTYPES = ("float32", "complex64")


def test_names_are_functions_of_ours():
    for module in (jnm, nn):
        for name, x in vars(module).items():
            if name[0] != "_":
                assert callable(x), name
                assert x.__module__.startswith("jmask.") or hasattr(x, "__wrapped__"), name
    assert CALLS.keys() <= EVERY.keys()


def numbers(dtype, seed):
    clean = clean_numbers(seed)
    if dtype == "complex64":
        return (clean + 1j * clean_numbers(seed + 10)).astype(dtype)
    return clean if dtype == "float32" else np.asarray(jnp.asarray(3 * clean).astype(dtype))


def masked(kind, dtype, seed):
    """A masked tensor with poison under its mask."""
    poison = cases.POISON[seed % 4] * (1 if dtype == "float32" else 1 + 1j)
    data = np.where(MASKS[seed], numbers(dtype, seed), np.asarray(poison, dtype))
    return cases.build(kind, jnp.asarray(data), jnp.asarray(MASKS[seed]))


def dense(x):
    if isinstance(x, jmask.MaskedTensor):
        return jmask.to_numpy_ma(x)
    return jmask.todense(x) if is_tensor(x) else x


def outcome(function, x):
    """What comes of a call, as arrays; or the error, for which no dtype of a call fits."""
    try:
        result = jax.tree.leaves(function(x), is_leaf=is_tensor)
    except (TypeError, ValueError) as error:
        return error
    return [dense(x) for x in result]


def check(found, expected, rtol=2e-5):
    if isinstance(expected, Exception):
        assert isinstance(found, type(expected)), found
        assert str(found)
        return
    assert not isinstance(found, Exception), found
    for x, y in zip(found, expected, strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(np.ma.getmaskarray(x), np.ma.getmaskarray(y))
        x, y = (np.ma.filled(v, 0) for v in (x, y))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol / 10)


# --- arrays --------------------------------------------------------------------------------

# JAX's functions, by their names.
JAX = {n: f for module in (jax.scipy.special, jax.nn, jnp) for n, f in vars(module).items()}
# Complex numbers have no order, and a function that needs one refuses them. JAX orders them by
# the real part in `max` and its like, and so does jmask for arrays.
ORDERED = {"max", "amax", "min", "amin", "ptp"}
REFUSED = {
    *("median", "quantile", "percentile", "nanmax", "nanmin", "nanmedian", "nanquantile"),
    "nanpercentile",
    "dot_product_attention",  # of which JAX drops the imaginary part
}
# JAX refuses these, and jmask does not: `test_against_numpy` holds them against numpy.ma.
EXTENDED = {"top_k", "standardize"}
# Computed in 32 bits at least. JAX computes covariances and variances of 16 bits in 16 bits, by
# a difference of squares in `standardize`: 3 % off, and jmask 0.3 %, which is one rounding.
# JAX has no difference of booleans, whose softmax jmask takes as that of 0 and 1.
WIDE = {
    **dict.fromkeys(("cov", "standardize"), ("float16", "bfloat16")),
    **dict.fromkeys(("softmax", "log_softmax"), ("bool",)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "float16", "bfloat16", *DTYPES])
@pytest.mark.parametrize("name", EVERY)
def test_arrays(name, dtype):
    """Values and dtypes are those of JAX, also where a mask is True everywhere."""
    x, function = jnp.asarray(numbers(dtype, 3)), EVERY[name]
    rtol = 2e-2 if dtype in ("float16", "bfloat16") else 2e-5
    expected, of_masked = outcome(function, x), outcome(function, jmask.masked_tensor(x))
    if dtype == "complex64" and name in REFUSED | ORDERED:
        assert "complex" in str(of_masked).lower()
        if name in REFUSED:
            assert isinstance(of_masked, TypeError)
            return
    if dtype == "complex64" and name in EXTENDED:
        assert not isinstance(of_masked, Exception)
        return
    if name in JAX:
        check(expected, outcome(functools.partial(function.func, JAX[name]), x), rtol)
    if dtype in WIDE.get(name, ()):
        dtype = jnp.float32 if dtype == "bool" else dtype
        wide = outcome(function, x.astype(jnp.float32))
        check(of_masked, [y.astype(dtype) for y in wide], 4e-3)
    elif not (dtype == "complex64" and name in ORDERED):
        check(of_masked, expected, rtol)


@pytest.mark.parametrize("name", EVERY)
def test_arrays_of_numpy_ma(name):
    x = masked("dense", "float32", 3)
    x = jnm.abs(x).astype(jnp.int32) if name in INTEGER else x
    check(outcome(EVERY[name], jmask.to_numpy_ma(x)), outcome(EVERY[name], x))


@pytest.mark.parametrize("kind", KINDS)
def test_operators_take_arrays_of_numpy_ma(kind):
    x, y = masked(kind, "float32", 2), masked("dense", "float32", 3)
    for name in "add sub mul truediv floordiv mod pow eq ne lt le gt ge".split():
        function = functools.partial(getattr(operator, name), x)
        check(outcome(function, jmask.to_numpy_ma(y)), outcome(function, y))
    for function in (lambda y: x @ y.T, lambda y: x.at[1:].set(y[1:])):
        check(outcome(function, jmask.to_numpy_ma(y)), outcome(function, y))


# --- options at the edges of numbers -------------------------------------------------------

inf, nan = np.inf, np.nan
SPECIAL = {
    "huge": [[3e38, 3e38, 1], [-3e38, 2, 1e20]],
    "halves": [[0.75, -0.75, 0.75], [0.75, 2, -1.5]],
    "zeros": [[0, -0.0, 0], [1, -0.0, 0]],
    "nan": [[nan, nan, nan], [1, nan, 2]],
    "inf": [[inf, 1, -inf], [1000, -1000, 89]],
    "int8": np.array([[127, -128, 2], [64, 4, 0]], np.int8),
    "bool": [[True, False, True], [True, True, True]],
}
AXES = (None, 0, 1)
WEIGHTS = np.array([[0, 1, 0], [1, 0.5, -1], [1e30, 1, 0], [0, 0, 0]], np.float32)
OPTIONS = {
    name: call
    for names, code in rows("""
    sum prod nansum nanprod | [f(x, a, d) for d in (int, bool, "int8") for a in AXES]
        + [f(x, a, initial=i) for i in (0, -3.5, 2) for a in AXES]
    max min nanmax nanmin | [f(x, a, None, True, i) for i in (0, -3.5, 2, inf) for a in AXES]
    mean nanmean | [f(x, a, "float32", keepdims=True) for a in AXES]
    var std | [f(x, 0, ddof=0.5), f(x, 1, correction=1), f(x, 0, mean=np.float32(1))]
    logsumexp | [f(x, a, b=b) for b in (0.0, 2, *WEIGHTS) for a in AXES]
    average | [f(x, 1, w, r) for w in WEIGHTS for r in (True, False)]
    softmax log_softmax | [f(x.astype("float32"), a) for a in ((0, 1), 0, -1)]
    sort argsort | [f(x, a, descending=d) for d in (True, False) for a in AXES]
    cumsum cumprod | [f(x, a, d) for d in (int, bool, "float32") for a in AXES]
    take | [f(x, np.array([1, -1, 5]), a, mode=m) for m in ("clip", "wrap") for a in AXES]
    clip | [f(x, a, b) for a in (None, -1, 0.5) for b in (0.5, 2, inf)]
    concatenate | [f([x, x], a, d) for d in (None, int, bool, "float16") for a in AXES]
    hstack stack | [f([x, x], dtype=d) for d in (int, bool, "complex64")]
    full_like | [f(x, n, d) for n in (0, 7.5, True) for d in (None, "int8", float)]
    inner vdot outer | f(b=x, a=x)
    tensordot | [f(x, x, n) for n in (0, 2)] + [f(a=x, b=x, axes=((1,), (1,)))]
    matmul dot | [f(x, b=x.T), f(a=x, b=x.T, precision="highest")]
    einsum | [f(x, [0, 1], x, [2, 1], [0, 2]), f("ij,kj", x, x), f("ij->j", x)]
    """)
    for call in functions("f, x", globals())(code).values()
    for name in names.split()
}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_at_special_numbers(name, kind):
    """A tensor of which nothing is masked gives what JAX gives, whatever the option."""
    x, call = np.asarray(SPECIAL[kind]), OPTIONS[name]
    x = jnp.asarray(x, jnp.float32 if x.dtype == np.float64 else x.dtype)
    expected = outcome(functools.partial(call, JAX[name]), x)
    # nan is masked there, and of arrays it is not.
    tensor = x if name.startswith("nan") else jmask.masked_tensor(x)
    check(outcome(functools.partial(call, *EVERY[name].args), tensor), expected)
    assert not isinstance(expected, Exception)


# --- arguments -----------------------------------------------------------------------------


def by_position(function):
    """The names of parameters, or None where the name is none of the caller's business."""
    names = {inspect.Parameter.POSITIONAL_ONLY: None, inspect.Parameter.VAR_POSITIONAL: None}
    of_kind = lambda p: names.get(p.kind, p.name)
    given = inspect.signature(function).parameters.values()
    return {of_kind(p): p.default for p in given if p.kind != inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.each
@pytest.mark.parametrize("name", [n for n in vars(jnm) if n in EVERY and hasattr(jnp, n)])
def test_arguments_have_the_order_of_jax(name):
    function, of_jax = getattr(jnm, name), by_position(getattr(jnp, name))
    if None not in of_jax:
        assert list(by_position(function))[: len(of_jax)] == list(of_jax)
    # They are taken in this order, too, of masked tensors.
    x, (_, *defaults) = masked("dense", "float32", 3), of_jax.values()
    if inspect.Parameter.empty not in defaults and name not in {*CALLS, *BINARY}:
        check(outcome(lambda x: function(x, *defaults), x), outcome(EVERY[name], x))


# --- storages ------------------------------------------------------------------------------


# What makes masked tensors dense, and says so; nothing else does.
DENSE = set(
    """
    argsort array_split atleast_1d atleast_2d atleast_3d broadcast_arrays broadcast_to
    column_stack concat concatenate corrcoef cov cumlogsumexp cumprod cumsum delete diag
    diagonal diff dot dot_product_attention dsplit dstack einsum expand_dims flip fliplr flipud
    glu hsplit hstack inner linear masked_fill matmul matrix_transpose median moveaxis
    nancumprod nancumsum nanmedian nanpercentile nanquantile outer pad percentile permute_dims
    quantile ravel repeat reshape roll rollaxis rot90 select sort split squeeze stack swapaxes
    take take_along_axis tensordot tile top_k trace transpose tril triu unique unstack vdot
    vsplit vstack where
""".split()
)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EVERY)
def test_storages(name, dtype, kind):
    """As on dense storage; entries of functions of entries are those of clean data."""
    for seed in (1, 3):
        x, clean = masked(kind, dtype, seed), jnp.asarray(numbers(dtype, seed))
        if name in INTEGER:
            x, clean = (jnm.abs(y).astype(jnp.int32) for y in (x, clean))
        expected = outcome(EVERY[name], x.to_dense())
        if name in FUNCTIONS and not isinstance(expected, Exception):
            on_clean = functools.partial(EVERY[name].func, FUNCTIONS[name].__wrapped__)
            hidden = ~(MASKS[seed] & cases.PATTERNS[kind])
            check(
                expected, [np.ma.array(y, mask=hidden) for y in outcome(on_clean, clean)], 1e-6
            )
        if dtype == "complex64":
            check(outcome(EVERY[name], x), expected)
            continue
        assert not isinstance(expected, Exception), expected
        is_said = pytest.warns(jmask.StorageFallbackWarning, match="dense")
        with is_said if name in DENSE else jmask.strict():
            check(outcome(EVERY[name], x), expected)


def repeated(x):
    """Half of each entry in two places, and padding."""
    x = BCOO.fromdense(x * (OTHER > 0), nse=9)
    return BCOO(
        (jnp.repeat((x.data / 2).astype(x.dtype), 2), jnp.repeat(x.indices, 2, 0)), shape=SHAPE
    )


PLAIN = {
    "row_sparse": lambda x: jmask.RowSparse([2, 0, 2, 4], x[jnp.array([1, 0, 3, 2])], SHAPE),
    "coo": repeated,
    "csr": lambda x: BCSR.fromdense(x * (OTHER > 0), nse=9),
}
# What is not stored does not exist for what makes a masked tensor of it.
MASKING = {name for name in EVERY if name.startswith("masked_")}
OF_STORED = {*MASKING, "attention_weights", "compressed"}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("name", [name for name in EVERY if name not in OF_STORED])
def test_zeros_that_are_not_stored(name, kind):
    """Functions of one number keep the storage if f(0) = 0, and announce that they do not."""
    is_real = name in ORDERED or (name in UNARY and name not in CALLS)
    dtype = "float32" if is_real else "complex64"
    x = PLAIN[kind](jnp.asarray(numbers("int32" if name in INTEGER else dtype, 3)))
    expected = outcome(EVERY[name], jmask.todense(x))
    context = contextlib.nullcontext()
    if name in UNARY and name not in CALLS:
        keeps = not np.any(FUNCTIONS[name].__wrapped__(np.zeros((), x.dtype)))
        context = jmask.strict() if keeps else pytest.warns(jmask.StorageFallbackWarning)
    with context:
        check(outcome(EVERY[name], x), expected)
