"""Every public function of masked tensors, on every storage, of real and complex numbers.

    masked tensors on row-sparse, COO and CSR storage      as on dense storage
    RowSparse, BCOO, BCSR                                  as of the array that they are
    complex masked tensors                                 as numpy.ma computes, or refused

Masked tensors on dense storage are held against numpy.ma in `test_masked_functions` and
`test_elementwise`. The names of `jmask.numpy` and `jmask.nn` are found, not listed: a new one
is called as f(x), or needs a call.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
from jmask import nn
from jmask._tensors.masked_tensor import is_tensor
from tests.masked_cases import KINDS, MASKS, POISON, SHAPE, build, clean_numbers, compare
from tests.ops.test_elementwise import BINARY, FUNCTIONS, INTEGER
from tests.ops.test_masked_functions import NAN, SIZED, SMOOTH, STEPS, _counted

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning"),
    pytest.mark.dtype_promotion,
    pytest.mark.rank_promotion,
]
OTHER = (np.arange(12.0).reshape(SHAPE) - 4.2) / 3
other = lambda x: jnp.asarray(OTHER, x.dtype)
also = lambda argument: lambda f, x: f(x, argument)
along = lambda argument: lambda f, x: [f(x, argument, axis=axis) for axis in (0, 1)]
# Calls of what takes more than a tensor: of the function, and the tensor.
CALLS = {
    **{name: also(0.5) for name in (
        "masked_equal masked_greater masked_greater_equal masked_less masked_less_equal "
        "masked_not_equal masked_values"
    ).split()},
    **{name: along(q) for name, q in {
        "quantile": 0.3, "percentile": 30, "nanquantile": 0.3, "nanpercentile": 30
    }.items()},
    **dict.fromkeys("inner outer vdot".split(), lambda f, x: f(x, x)),
    **dict.fromkeys(
        "column_stack concat concatenate dstack hstack stack vstack".split(),
        lambda f, x: [f([x, x]), f([x, other(x)])],
    ),
    **{name: also(n) for name, n in {
        "array_split": 3, "split": 2, "vsplit": 2, "hsplit": 3, "repeat": 2, "tile": (1, 2),
        "roll": 1, "rollaxis": 1, "pad": 1, "expand_dims": 1, "top_k": 2, "reshape": (3, 4),
        "broadcast_to": (2, *SHAPE), "full_like": 7,
    }.items()},
    "array_equal": lambda f, x: f(x, x),
    "allclose": lambda f, x: f(x, other(x), atol=3.0),
    "broadcast_arrays": lambda f, x: f(x, other(x)[None]),
    "compressed": lambda f, x: f(x, size=12),
    "delete": lambda f, x: f(x, 1, axis=0),
    "dot": lambda f, x: f(x, other(x).T),
    "dsplit": lambda f, x: f(jnm.expand_dims(x, 2), 1),
    "einsum": lambda f, x: f("ij,kj->ik", x, other(x)),
    "masked_fill": lambda f, x: f(x, OTHER > 0, 2.0),
    "masked_inside": lambda f, x: f(x, -0.5, 0.5),
    "masked_outside": lambda f, x: f(x, -0.5, 0.5),
    "masked_where": lambda f, x: f(OTHER > 0, x),
    "matmul": lambda f, x: [f(x, other(x).T), f(other(x).T, x)],
    "moveaxis": lambda f, x: f(x, 0, 1),
    "nonzero": lambda f, x: f(x, size=12),
    "permute_dims": lambda f, x: f(x, (1, 0)),
    "select": lambda f, x: f([OTHER > 0, OTHER > -1], [x, jnm.multiply(2, x)]),
    "squeeze": lambda f, x: f(x[None]),
    "swapaxes": lambda f, x: f(x, 0, 1),
    "take": lambda f, x: f(x, jnp.array([2, 0, 2]), axis=1),
    "take_along_axis": lambda f, x: f(x, jnp.array([[1], [2], [0], [1]]), 1),
    "tensordot": lambda f, x: f(x, other(x), axes=([0], [0])),
    "unique": lambda f, x: f(x, size=12),
    "where": lambda f, x: [f(OTHER > 0, x, other(x)), f(jnm.equal(x, 0.5), x, 1)],
    "dot_product_attention": lambda f, x: f(
        *[jnm.reshape(x, (4, 1, 3))] * 3
    ),
    "glu": lambda f, x: f(x, axis=0),
    "linear": lambda f, x: f(x, other(x)),
}  # fmt: skip


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
    return (
        clean if dtype == "float32" else (clean + 1j * clean_numbers(seed + 10)).astype(dtype)
    )


def masked(kind, dtype, seed):
    """A masked tensor with poison under its mask."""
    poison = POISON[seed % 4] * (1 if dtype == "float32" else 1 + 1j)
    data = np.where(MASKS[seed], numbers(dtype, seed), np.asarray(poison, dtype))
    return build(kind, jnp.asarray(data), jnp.asarray(MASKS[seed]))


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


def check(found, expected):
    if isinstance(expected, Exception):
        assert isinstance(found, type(expected)), found
        assert str(found)
        return
    assert not isinstance(found, Exception), found
    for x, y in zip(found, expected, strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(np.ma.getmaskarray(x), np.ma.getmaskarray(y))
        x, y = (np.ma.filled(v, 0) for v in (x, y))
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EVERY)
def test_storages(name, dtype, kind):
    for seed in (1, 3):
        x = masked(kind, dtype, seed)
        if name in INTEGER:
            x = jnm.abs(x).astype(jnp.int32)
        expected = outcome(EVERY[name], x.to_dense())
        assert dtype == "complex64" or not isinstance(expected, Exception), expected
        check(outcome(EVERY[name], x), expected)


def repeated(x):
    """Half of each entry in two places, and padding."""
    x = BCOO.fromdense(x * (OTHER > 0), nse=9)
    return BCOO((jnp.repeat(x.data / 2, 2), jnp.repeat(x.indices, 2, 0)), shape=SHAPE)


PLAIN = {
    "row_sparse": lambda x: jmask.RowSparse([2, 0, 2, 4], x[jnp.array([1, 0, 3, 2])], SHAPE),
    "coo": repeated,
    "csr": lambda x: BCSR.fromdense(x * (OTHER > 0), nse=9),
}


# What is not stored does not exist for what makes a masked tensor of it.
OF_STORED = {name for name in EVERY if name.startswith("masked_")} | {
    "attention_weights",
    "compressed",
}
# JAX's are of complex arrays by the real part first.
ORDERED = {"max", "amax", "min", "amin", "ptp"}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("name", [name for name in EVERY if name not in OF_STORED])
def test_zeros_that_are_not_stored(name, kind):
    dtype = "float32" if name in ORDERED else "complex64"
    x = PLAIN[kind](jnp.asarray(numbers(dtype, 3)))
    check(outcome(EVERY[name], x), outcome(EVERY[name], jmask.todense(x)))


# --- complex numbers beside NumPy ----------------------------------------------------------

# They have no order; NumPy takes the real part first. `jmask.numpy.sort` is as JAX's.
NO_ORDER = {
    *("max", "amin", "median", "lower median", "quantile", "quantile rows", "quantiles"),
    *("percentile", "ptp", "ptp columns", "logsumexp", "logmeanexp", "argmax", "argmin"),
    *("heaviside", "copysign"),
    *(
        name
        for name in NAN
        if any(x in name for x in ("max", "min", "median", "quant", "perc"))
    ),
}
# numpy.ma drops the imaginary part, or has nothing like it.
WITHOUT_MODEL = {"cov", "cov columns", "cov of two", "cov of one", "cumlogsumexp", "attention"}
COMPLEX = SMOOTH | STEPS | NAN | SIZED
is_ma = lambda x: isinstance(x, np.ma.MaskedArray)
as_tensor = lambda x: jmask.masked_tensor(x.data, ~np.ma.getmaskarray(x)) if is_ma(x) else x


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in COMPLEX if name not in WITHOUT_MODEL])
def test_complex_numbers(name, kind):
    function, reference = COMPLEX[name]
    for seed in (0, 3):
        x = masked(kind, "complex64", seed)
        if name in NO_ORDER:
            with pytest.raises(TypeError, match=r"complex(64|-valued)"):
                function(x)
            continue
        found = jax.tree.map(dense, function(x), is_leaf=is_tensor)
        if name == "log_softmax":  # of which there are several, 2 pi apart
            found = jax.tree.map(np.ma.exp, found)
        valid = np.ma.array(numbers("complex64", seed), np.complex128, mask=True)
        _, counted = _counted(name, MASKS[seed], kind)
        valid.mask = ~counted
        expected = reference(valid)
        if name == "log_softmax":
            expected = jax.tree.map(np.ma.exp, expected)
        compare(jax.tree.map(as_tensor, found, is_leaf=is_ma), expected, name)


def test_covariances_of_complex_numbers():
    x = numbers("complex64", 3)
    for options in ({}, {"rowvar": False}, {"bias": True}):
        for name in ("cov", "corrcoef"):
            if options and name == "corrcoef":
                continue
            found = getattr(jnm, name)(jmask.masked_tensor(jnp.asarray(x)), **options)
            expected = getattr(np, name)(x, **options)
            np.testing.assert_allclose(found.to_tensor(0), expected, rtol=1e-4, atol=1e-5)
