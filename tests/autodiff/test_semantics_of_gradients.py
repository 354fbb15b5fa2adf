"""Every differentiable operation has the gradients that its semantics say, by `gradcheck`.

A table of operations: to add one, add a line. Functions of `jmask.numpy` and `jmask.nn` are
found, so that one without a line fails here. Masked tensors hold nan under the mask and
sparse tensors hold duplicates and padding: `masked=True` shows that no gradient reaches them,
and that none is at entries that are not there.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
from jmask import nn
from tests.expressions import functions
from tests.ops.test_elementwise import DIFFERENTIABLE, DOMAINS, FUNCTIONS, UNARY

MASK = np.array([[1, 0, 1], [0, 1, 1]], bool)
DATA = np.array([[0.3, np.nan, 0.7], [np.nan, 0.45, 0.6]], np.float32)
OTHER = np.array([[0.5, 0.25, 0.8], [0.35, 0.65, 0.9]], np.float32)


def numbers(low=0.2, high=0.8):
    """A masked tensor (2, 3) of numbers between two, nan under the mask."""
    return jmask.masked_tensor(jnp.asarray(low + (high - low) * DATA), MASK)


X, Y = numbers(0, 1), jnp.asarray(OTHER)
NUMBERS = {name: numbers(*domain) for name, domain in DOMAINS.items()}
ROWS = jmask.RowSparse(
    [2, 0, 2, 4], jnp.array([[0.3, 0.5], [0.7, 0.2], [0.1, 0.4], [0.9, 0.9]]), (4, 2)
)
COALESCED = jmask.RowSparse([0, 2], jnp.array([[0.3, 0.5], [0.7, 0.2]]), (4, 2), coalesced=True)
COO = BCOO(
    (jnp.array([0.3, 0.5, 0.7, 0.9]), jnp.array([[0, 1], [1, 0], [1, 2], [2, 3]])),
    shape=(2, 3),
    unique_indices=True,
    indices_sorted=True,
)
CSR = BCSR(
    (jnp.array([0.3, 0.5, 0.7]), jnp.array([1, 0, 2]), jnp.array([0, 1, 3])), shape=(2, 3)
)
MASKED_COO = jmask.masked_tensor(COO, np.array([True, False, True, True]))
MASKED_ROWS = jmask.masked_tensor(
    ROWS, ROWS.with_values(jnp.array([[1, 0], [1, 1], [1, 1], [1, 1]], bool))
)
COMPLEX = jmask.masked_tensor(jnp.asarray(DATA + 1j * DATA[::-1]), MASK & MASK[::-1])
IDS = jnp.array([2, 0, 2])
SHIFT = np.arange(8.0).reshape(4, 2)
VECTOR, MATRIX = jnp.array([0.5, 2.0, -1.0]), jnp.asarray(OTHER.T)


BOTH = ("rev", "fwd")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation and the semantics of its gradient.

    Attributes:
        function, args: what is checked.
        masked: the semantics its documentation states.
        order: of the derivatives checked.
        modes: of the check; forward mode is the rule that reverse mode transposes.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = (X,)
    masked: bool = True
    order: int = 1
    modes: tuple[str, ...] = ("rev",)


def elementwise():
    """All elementwise functions with derivatives, aliases once, on masked tensors."""
    found = {}
    for name in DIFFERENTIABLE:
        function, count = FUNCTIONS[name], 1 if name in UNARY else 2
        if jax.eval_shape(function.__wrapped__, *[jnp.float32(1)] * count).dtype == jnp.float32:
            args = (NUMBERS.get(name, X), Y)[:count]
            found.setdefault(function, (name, Operation(function, args)))
    return dict(found.values())


def activations():
    """The elementwise functions of `jmask.nn`."""
    code = jnm.sin.__code__
    found = {n: f for n, f in vars(nn).items() if getattr(f, "__code__", None) is code}
    unique = {f: n for n, f in sorted(found.items(), reverse=True) if not n.startswith("_")}
    return {f"nn.{name}": Operation(f) for f, name in unique.items()}


# Makes operations of functions of these arguments.
on = lambda x, *others, **options: lambda function: Operation(function, (x, *others), **options)
# A reduction over everything and along an axis.
along_axes = lambda function: lambda x: (function(x), function(x, axis=0))
KEEPING_ZEROS = "abs cbrt deg2rad expm1 imag negative real sin sqrt square tanh".split()
REDUCTIONS = """
    amax amin average cumlogsumexp cumprod cumsum logsumexp max mean median min nancumprod
    nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar norm prod ptp std sum
    var
""".split()
ALONG = ("softmax", "softmin", "log_softmax", "normalize", "logsumexp", "attention_weights")
ALONG += ("logmeanexp", "standardize")
NN = {*ALONG, "linear", *(n for n, f in vars(nn).items() if hasattr(f, "__wrapped__"))}
# Attention takes no sparse tensors.
NN = {n for n in NN - {"dot_product_attention"} if not n.startswith("_")}


def calls(text):
    """Functions of `x`, written as calls of `jmask.numpy`, by the name that is called."""
    found = functions("x", {**vars(jnm), **globals()})(text)
    return {call.partition("(")[0]: function for call, function in found.items()}


PLAIN_MOVES = """
    atleast_1d atleast_3d copy diagonal flip fliplr flipud matrix_transpose ravel rot90 sort
    transpose tril triu unstack
""".split()
MOVES = {name: getattr(jnm, name) for name in PLAIN_MOVES} | calls("""
    array_split(x, 2, axis=1); atleast_2d(x[0]); broadcast_arrays(x, x[0]);
    broadcast_to(x, (2, 2, 3)); column_stack([x, x]); concat([x, x]); concatenate([x, OTHER]);
    delete(x, 1, axis=1); diag(x[0]); dsplit(x[None], 3); dstack([x, x]); expand_dims(x, 1);
    hsplit(x, 3); hstack([x, x]); masked_fill(x, OTHER > 0.6, 2.0);
    masked_where(OTHER > 0.6, x); moveaxis(x, 0, 1); pad(x, 1); permute_dims(x, (1, 0));
    repeat(x, 2, axis=0); reshape(x, (3, 2)); roll(x, 1, axis=1); rollaxis(x, 1);
    split(x, 3, axis=1); squeeze(x[None]); stack([x, x]); swapaxes(x, 0, 1);
    take(x, jnp.array([2, 0, 2]), axis=1); take_along_axis(x, jnp.array([[1], [2]]), axis=1);
    tile(x, (1, 2)); vsplit(x, 2); vstack([x, x]); where(OTHER > 0.6, x, OTHER.astype(x.dtype))
""")

MASKS = {name: getattr(jnm, name) for name in dir(jnm) if re.match("masked_[^fw]", name)}
BOUNDS = dict.fromkeys(MASKS, (0.4,))
BOUNDS |= {"masked_invalid": (), "masked_inside": (0.4, 0.5), "masked_outside": (0.4, 0.5)}

STATISTICS = calls("""
    compressed(x, size=5); corrcoef(x, SHIFT[:3].T); cov(x); diff(x);
    nanpercentile(x, 30, axis=1); nanquantile(x, 0.3); percentile(x, 30);
    quantile(x, jnp.array([0.3, 1.0]), axis=1); select([x > 0.65, x > 0.42], [x, 2 * x]);
    top_k(x, 2)[0]; trace(x); unique(x, size=5)
""")

PRODUCTS = {
    "inner": on(X, Y)(jnm.inner),
    "outer": on(X, VECTOR)(jnm.outer),
    "tensordot": on(X, MATRIX)(lambda x, y: jnm.tensordot(x, y, 1)),
    "vdot": on(X, Y)(jnm.vdot),
    "nn.glu": Operation(lambda x: nn.glu(x, axis=0)),
    "matmul": on(X, MATRIX)(jnm.matmul),
    "matmul of masked": on(X, numbers())(lambda x, y: x @ y.T),
    "matmul of masked coo": on(MASKED_COO, MATRIX)(jnm.matmul),
    "matmul of rows": on(ROWS, MATRIX[:2])(jnm.matmul),
    "matmul of coo": on(COO, MATRIX)(lambda x, y: x @ y),
    "matmul of csr": on(CSR, MATRIX)(lambda x, y: x @ y),
    "matmul, plain": on(COO, MATRIX, masked=False)(lambda x, y: jmask.todense(x) @ y),
    "dot": on(X, VECTOR)(jnm.dot),
    "einsum": on(X, MATRIX)(lambda x, y: jnm.einsum("ij,jk->ik", x, y)),
    "nn.linear": on(X, MATRIX.T, VECTOR[:2])(nn.linear),
}

TENSORS = {
    "x[...]": Operation(lambda x: (x[1], x[:, ::2], x[np.array([1, 0, 1])])),
    "x.at": Operation(
        lambda x: (
            x.at[0].set(2.0), x.at[0].add(OTHER[0]), x.at[:, 1].multiply(3.0),
            x.at[1].divide(OTHER[1]), x.at[0].power(2.0), x.at[0].max(0.5), x.at[1].get(),
        )
    ),
    "get_data": Operation(lambda x: x.get_data().at[~MASK].set(0)),
    "to_tensor": Operation(lambda x: x.to_tensor(2.0)),
    "astype": Operation(lambda x: x.astype(jnp.float64)),
    "to_dense": on(MASKED_COO)(lambda x: x.to_dense()),
    "to_sparse": Operation(lambda x: x.to_sparse(nse=5)),
    "to_sparse_csr": Operation(lambda x: x.to_sparse_csr(nse=5)),
    "to_row_sparse": Operation(lambda x: x.to_row_sparse(nse=2)),
    "masked_tensor": on(Y, masked=False)(lambda x: jmask.masked_tensor(x, MASK)),
    "masked_tensor of coo": on(COO)(jmask.masked_tensor),
    "masked_tensor of rows": on(ROWS)(jmask.as_masked_tensor),
    "complex": on(COMPLEX)(lambda x: (jnm.exp(x), x.real * x.imag, jnm.sum(x * x.conj()))),
    "RowSparse.todense": on(ROWS)(lambda x: x.todense()),
    "RowSparse.coalesce": on(ROWS)(lambda x: x.coalesce()),
    "RowSparse.retain": on(ROWS)(lambda x: x.retain([0, 1])),
    "RowSparse.astype": on(ROWS)(lambda x: x.astype(jnp.float64)),
    "RowSparse arithmetic": on(ROWS)(
        lambda x: (x + 2 * x.coalesce(), x - 1 * x, x / 3.0, x**2, x * SHIFT, x + SHIFT)
    ),
    "RowSparse.fromdense": on(Y, masked=False)(
        lambda x: jmask.RowSparse.fromdense(x, nse=2)
    ),
}  # fmt: skip

ROW_OPERATIONS = {
    "jmask.dot": on(COO, MATRIX)(jmask.dot),
    "jmask.dot of csr, transposed": on(CSR, MATRIX[:2])(
        lambda x, y: jmask.dot(x, y, transpose_a=True)
    ),
    "jmask.dot of rows": on(ROWS, MATRIX[:2])(jmask.dot),
    "add_n": on(ROWS)(lambda x: jmask.add_n(x, x, x)),
    "retain": on(ROWS)(lambda x: jmask.retain(x, jnp.array([2, 3]))),
    "square_sum": on(ROWS)(lambda x: jmask.square_sum(x, axis=1)),
    "embedding_lookup": on(SHIFT, masked=False)(lambda t: jmask.embedding_lookup(t, IDS)),
    "embedding_lookup of rows": on(COALESCED)(lambda t: jmask.embedding_lookup(t, IDS)),
    "embedding_bag": on(SHIFT, jnp.array([0.5, 2.0, 1.0]), masked=False, modes=BOTH)(
        lambda t, w: (
            jmask.embedding_bag(t, IDS, offsets=jnp.array([0, 2]), weights=w),
            jmask.embedding_bag(t, IDS, offsets=jnp.array([0, 2]), combiner="max"),
        )
    ),
}

CONVERSIONS = {
    f"{name}, {kind}": operation
    for kind, x in {"coo": COO, "csr": CSR, "rows": ROWS, "masked": X}.items()
    for name, operation in {
        "todense": on(x, masked=False)(jmask.todense),
        "todense, masked_grad": on(x)(functools.partial(jmask.todense, masked_grad=True)),
        "sparse_mask": on(x)(lambda y, x=x: jmask.sparse_mask(y, x)),
        "sparse_mask of an array": on(jnp.ones(x.shape), masked=False)(
            lambda y, x=x: jmask.todense(jmask.sparse_mask(y, x))
        ),
        "cast_storage": on(x)(lambda x: jmask.cast_storage(x, "default")),
    }.items()
}

OPERATIONS = {
    **elementwise(),
    **activations(),
    **{f"{name} of rows": on(COALESCED)(FUNCTIONS[name]) for name in KEEPING_ZEROS},
    **{f"{name} of duplicates": on(ROWS)(FUNCTIONS[name]) for name in ("sin", "negative")},
    **{f"{name} of coo": on(COO)(FUNCTIONS[name]) for name in ("sin", "square", "negative")},
    **{name: Operation(f) for name, f in (MOVES | STATISTICS).items()},
    **{
        name: Operation(lambda x, f=f, name=name: f(x, *BOUNDS[name]))
        for name, f in MASKS.items()
    },
    **{name: Operation(along_axes(getattr(jnm, name))) for name in REDUCTIONS},
    **{
        f"reductions of {kind}": on(x, modes=BOTH)(
            lambda x: {
                name: getattr(jnm, name)(x, axis=1) for name in ("sum", "mean", "norm", "max")
            }
        )
        for kind, x in {"coo": MASKED_COO, "rows": MASKED_ROWS, "RowSparse": ROWS}.items()
    },
    **{f"nn.{name}": Operation(getattr(nn, name)) for name in ALONG},
    "nn.softmax of coo": on(MASKED_COO)(nn.softmax),
    "second order": Operation(lambda x: (nn.softmax(x), jnm.std(x)), order=2),
    "nn.softmax of rows": on(MASKED_ROWS)(lambda x: nn.softmax(x, axis=0)),
    **PRODUCTS,
    **TENSORS,
    **ROW_OPERATIONS,
    **CONVERSIONS,
}

# Functions without derivatives, and what is in the namespaces and is no operation.
WITHOUT = """
    all allclose any argmax argmin argsort array_equal count count_nonzero elementwise
    empty_like full_like nanargmax nanargmin nonzero ones_like zeros_like
""".split()


def test_every_function_is_in_the_table():
    names = {n for n in dir(jnm) if not n.startswith("_")} - set(FUNCTIONS) - set(WITHOUT)
    assert names <= set(OPERATIONS)
    checked = {id(operation.function) for operation in OPERATIONS.values()}
    public = {n: f for n, f in vars(nn).items() if getattr(f, "__doc__", None) and n in NN}
    assert {n for n, f in public.items() if id(f) not in checked} == set()


# --- the check ------------------------------------------------------------------------------


def one_vector(tree):
    """All entries of the tensors in a tree, their real and imaginary parts."""
    leaves = jax.tree.leaves(tree, is_leaf=is_tensor)
    entries = [jmask.as_masked_tensor(x).to_dense().ravel() for x in leaves]
    parts = [x if jnp.isrealobj(x.data) else jnm.hstack([x.real, x.imag]) for x in entries]
    return jnm.concatenate(parts)


is_tensor = lambda x: isinstance(x, jmask.MaskedTensor | jmask.RowSparse | BCOO | BCSR)


# Each case takes one in eight, of all kinds.
NAMES = {f"{i} of 8": list(OPERATIONS)[i::8] for i in range(8)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")
@pytest.mark.parametrize("part", NAMES)
@pytest.mark.dtype_promotion
def test_gradients(part):
    for name in NAMES[part]:
        operation = OPERATIONS[name]
        jmask.gradcheck(
            lambda *args, x=operation, name=name: {name: one_vector(x.function(*args))},
            operation.args,
            masked=operation.masked,
            order=operation.order,
            modes=operation.modes,
            fast=True,
        )
