"""`gradcheck`: what it accepts, what it refuses, and what it says.

First four products of a sparse matrix in both semantics. x = [[-, 1], [2, 3]], where entry
(0, 0) is not specified, on every storage. The functions are those of pytorch/pytorch#95405, and
its definition of a masked function.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
from tests.expressions import functions, rows
from tests.sparse_arrays import coo, csr

pytestmark = pytest.mark.sampled(15)


DENSE = np.array([[0.0, 1.0], [2.0, 3.0]], np.float32)
ENTRIES = jmask.RowSparse([1, 2, 3], jnp.array([1.0, 2.0, 3.0]), (4,))  # x, row by row
STORAGES = {
    "coo": coo(DENSE),
    "csr": csr(DENSE),
    "rows": ENTRIES,
    "masked": jmask.masked_tensor(np.where(DENSE, DENSE, np.nan), DENSE != 0),
    "masked coo": jmask.masked_tensor(coo(DENSE)),
}
matrix = lambda x, masked_grad: jmask.todense(x, masked_grad=masked_grad).reshape(2, 2)
# The product with the gradient of an ordinary tensor.
mm = lambda x, y: matrix(x, False) @ matrix(y, False)


def sparse_mm(x, y):
    """The product with a gradient at specified entries."""
    if isinstance(x, BCOO):
        return x @ matrix(y, True)
    return matrix(x, True) @ matrix(y, True)


def products(mm, sparse_mm):
    return {
        "mixed": lambda x: mm(sparse_mm(x, x), x),
        "all masked": lambda x: sparse_mm(sparse_mm(x, x), x),
        "all plain": lambda x: mm(mm(x, x), x),
    }


PRODUCTS = products(mm, sparse_mm)
# The verdicts in masked and in plain semantics, and what to try where they are False.
VERDICTS = {
    "mixed": (False, False),
    "mixed, after sparse_mask": (True, True),
    "all masked": (True, False),
    "all plain": (False, True),
}
TABLE = {name: (None, None, *verdicts) for name, verdicts in VERDICTS.items()}  # beside torch
ADVICE = {True: "treats unspecified.*masked=False.*sparse_mask", False: "todense.*masked=True"}


def product(name, x):
    if name == "mixed, after sparse_mask":
        return lambda y: PRODUCTS["mixed"](jmask.sparse_mask(y, x))
    return PRODUCTS[name]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", VERDICTS)
def test_example(name, storage):
    x = STORAGES[storage]
    function = product(name, x)
    for masked, passes in zip((True, False), VERDICTS[name], strict=True):
        how = {"masked": masked, "fast": True, "raise_exception": False}
        assert jmask.gradcheck(function, x, **how) == passes
        if passes:
            assert jmask.gradcheck(function, x, masked=masked)
            continue
        with pytest.raises(jmask.GradcheckError, match=ADVICE[masked]) as caught:
            jmask.gradcheck(function, x, masked=masked)
        assert "which is not specified\n  output      output, entry (" in str(caught.value)
        assert f"masked={masked}" in str(caught.value)
    # A product of MaskedTensors knows of the valid entries alone.
    if storage != "masked coo":
        is_masked = "sparse_mask" in name or (name, storage) == ("all masked", "masked")
        assert jmask.is_masked_function(function, x) == is_masked


def test_message_in_full():
    def function(params):
        return {"loss": jmask.todense(params["layer"]["w"], masked_grad=True) @ jnp.ones(2)}

    with pytest.raises(jmask.GradcheckError) as caught:
        jmask.gradcheck(function, ({"layer": {"w": STORAGES["csr"]}},), modes="fwd")
    assert str(caught.value).splitlines() == [
        "the gradient is wrong: 1 of the 2 derivatives of this output at entries that are "
        "not specified of this input. The worst:",
        "  input       args[0]['layer']['w'], entry (0, 0), which is not specified",
        "  output      output['loss'], entry (0,)",
        "  numerical   1",
        "  analytical  0",
        "  semantics   plain (masked=False): every entry counts, unspecified ones are zeros",
        "  mode        forward (jvp), order 1",
        "  to try      read the input by jmask.todense(x) for a gradient everywhere, or check "
        "with masked=True; a function that mixes both needs jmask.sparse_mask on its input",
    ]


# --- what it accepts ---------------------------------------------------------------------

COO, ROWS, MASKED = (STORAGES[storage] for storage in ("coo", "rows", "masked"))
W = jnp.array([[2.0, -1.0], [0.5, 1.0]])
Z = np.array([1 + 2j, -0.5 + 0.3j], np.complex64)
COMPLEX = coo(np.array([[0, 1 + 1j], [2j, 0]], np.complex64))
NUMBERS = np.arange(24.0, dtype=np.float32).reshape(2, 3, 2, 2)
NUMBERS *= NUMBERS % 3 == 1
WEIGHTS = np.random.default_rng(0).normal(size=NUMBERS.shape)
LAYOUTS = [
    *(coo(NUMBERS[0, 0], 4), csr(NUMBERS[0, 0], 4), csr(NUMBERS[0, 0])),
    *(
        kind.fromdense(jnp.asarray(dense), n_batch=1, n_dense=dense.ndim - 3)
        for kind in (BCOO, BCSR)
        for dense in (NUMBERS, NUMBERS[0])
    ),
    *(jmask.RowSparse(at, NUMBERS[[1, 0, 0]], NUMBERS.shape) for at in ([1, 7, 0], [1, 0, 1])),
    jmask.masked_tensor(coo(NUMBERS[0, 0], 4)),
]
WRAPS = BCOO((jnp.array([1.0, 9, 9]), jnp.array([[0, 1], [-1, 0], [2, 0]])), shape=(2, 2))
EMPTY, ALL_MASKED = jmask.RowSparse.zeros((3, 2)), jmask.masked_tensor([jnp.nan], [False])
TREE = (
    {"w": np.float32([[1, 2], [3, 4]]), "ids": jnp.array([1, 0]), "flag": True},
    [COO, ROWS],
    (MASKED, 2.0, 3, None),
)


def of_a_tree(params, sparse, others):
    masked, scale, power, _ = others
    assert params["flag"] is True
    assert power == 3
    rows = params["w"][params["ids"]] ** power * scale
    totals = rows @ (sparse[0] @ jnp.ones((2, 2)))
    return {
        "total": totals,
        "squares": jnm.square(sparse[1]),
        "x": [jnm.exp(masked) * scale, 3],
    }


def of_complex(z, x):
    product = jmask.todense(x) @ z
    return product * z.conj(), jnp.abs(product) ** 2


@jax.jit
def under_transformations(x):
    total = jax.checkpoint(lambda x: jmask.todense(x) ** 2)(x)
    step = lambda carry, w: (carry + jmask.todense(x) @ w, None)
    total, _ = jax.lax.scan(step, total, jnp.ones((2, 2, 2)))
    return jax.vmap(lambda w: jmask.todense(x) @ w)(total)


def at_its_positions(x):
    if x.nse != COO.nse:
        raise ValueError("other positions")
    return jmask.todense(x, masked_grad=True)


@jax.custom_vjp
def of_a_structure(x):
    """Its rule cannot take a placeholder: the gradient is that of the stored values."""
    return x.data.sum()


def _structured(x, c):
    zeros = np.zeros(x.indices.shape, jax.dtypes.float0)
    return (jax.tree.unflatten(jax.tree.structure(x), [jnp.full_like(x.data, c), zeros]),)


of_a_structure.defvjp(lambda x: (of_a_structure(x), x), _structured)
STRUCTURED = BCOO(COO.tree_flatten()[0], shape=(2, 2))
in_float32 = lambda x: jnp.sin(x.astype(jnp.float32))
tensors = lambda x: {"x": x, "y": jnm.multiply(jnm.sin(x), 2)}
weighed = lambda x, **how: jmask.todense(x, **how).ravel() @ WEIGHTS.ravel()[: np.prod(x.shape)]
reads_itself = lambda x: x[np.asarray(jax.lax.stop_gradient(x)) >= 1.0]


def cases(*calls):
    """check(function, args, **options), from each text of its arguments."""
    read = lambda function, args, **options: (function, args, options)
    return [eval(f"read({call})", globals(), {"read": read}) for call in calls]


RIGHT = cases(
    "of_a_tree, TREE, masked=True",
    "of_complex, (Z, COMPLEX)",
    "lambda z: z**2 * z.conj(), Z, order=2",
    "under_transformations, COO",
    "lambda a, b: a**2 * b, (2.0, 3.0)",
    "lambda params: params[0] * params[1], [2.0, 3.0]",
    "lambda x: x**2, jnp.array([1e8, 1e-8])",
    "lambda x, y: (jmask.todense(x), y), (EMPTY, jnp.zeros(0))",
    "jnm.log, ALL_MASKED, masked=True",
    "lambda x: jnp.where(jnp.array([True, False]), x, -jnp.inf), jnp.array([0.5, 2.0])",
    "in_float32, 0.5, eps=1e-2, atol=1e-2",
    "at_its_positions, COO, masked=True",
    "of_a_structure, STRUCTURED, masked=True, modes=('rev',)",
    "lambda x, w: jmask.dot(x, w), (WRAPS, W), masked=True",
    *(f"lambda x: x, STORAGES['{storage}']" for storage in ("coo", "csr", "rows")),
    *(f"tensors, STORAGES['{storage}'], masked=True" for storage in STORAGES),
    *(f"tensors, {x}, masked=True, order=2" for x in ("ROWS", "MASKED")),
    *(
        f"lambda x, w: jmask.todense(x, masked_grad={m}) ** 2 @ w**3, (COO, W), order=2, "
        f"masked={m}, modes='{mode}'"
        for m in (False, True)
        for mode in ("rev", "fwd")
    ),
    *(f"weighed, LAYOUTS[{i}], modes='rev'" for i in range(len(LAYOUTS))),
    *(
        f"lambda x: weighed(x, masked_grad=True), LAYOUTS[{i}], modes='rev', masked=True"
        for i in range(len(LAYOUTS))
    ),
)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("case", range(len(RIGHT)))
def test_right_gradient(case, fast):
    function, args, options = RIGHT[case]
    assert jmask.gradcheck(function, args, fast=fast, **options)


def test_double_precision_is_local():
    seen = set()
    assert jmask.gradcheck(lambda x: seen.add(x.dtype) or jnp.sin(x), jnp.float32(0.5))
    assert seen == {jnp.dtype("float64")}
    assert jnp.asarray(1.0).dtype == jnp.float32


# --- what it refuses ---------------------------------------------------------------------

REFUSED = {
    r"output, entry \(1,\) is nan": "jnp.log, jnp.array([1.0, -1.0])",
    r"args\[0\], entry \(1,\)\n.*\n.*0\.5\n.*0\n": "jax.nn.relu, jnp.array([1.0, 0.0])",
    "casts .with float32": "in_float32, 0.5",
    "which is not specified": "lambda x: weighed(x, masked_grad=True), LAYOUTS[3], modes='rev'",
    r"real part of entry \(0, 0\), which": "of_complex, (Z, COMPLEX), masked=True, modes='rev'",
    r"changed the mask of output.*\n.*plain.*\n.*masked=True": "jnm.sin, MASKED",
    "tells an unspecified entry from a zero": "jnm.mean, MASKED",
    "changed the structure": "lambda x: {'a': x} if x > 1 else [x], 1.0",
    "changed the shape": "reads_itself, jnp.array([1.0, 2.0])",
    "made the function raise ValueError": "at_its_positions, COO",
    r"modes=\('rev',\)": "of_a_structure, STRUCTURED, masked=True",
}


@pytest.mark.parametrize("says", REFUSED)
def test_refused(says):
    ((function, args, options),) = cases(REFUSED[says])
    with pytest.raises(jmask.GradcheckError, match=says):
        jmask.gradcheck(function, args, **options)


def test_errors_of_the_function_are_its_own():
    with pytest.raises(KeyError, match="mine"):
        jmask.gradcheck(lambda x: {}["mine"], 0.5, raise_exception=False)


# --- masked functions --------------------------------------------------------------------

ARGS = {"x": ROWS, "w": jnp.ones(4)}
of_args = lambda p: jmask.todense(jmask.sparse_mask(p["x"], ROWS)) @ p["w"]
# Whether a function of `x` is one.
IS_MASKED = """
    MASKED | True | jnm.sin(x); jnm.sum(x); jmask.nn.softmax(x); x @ x; x.to_tensor(0)
    MASKED | False | jmask.todense(x); x.data.sum()
    COO | False | x; jnp.sum(jmask.todense(x) ** 2)
    COO | True | jmask.sparse_mask(x, COO); jmask.sparse_mask(x, MASKED);
        jmask.sparse_mask(x, STORAGES['csr']); jmask.sparse_mask(x, DENSE != 0)
    ARGS | True | of_args(x)
    ARGS | False | of_args(x) + jnp.sum(jmask.todense(x['x']) ** 3)
    W | True | jnp.sin(x)
"""


@pytest.mark.filterwarnings("ignore::jmask.StorageFallbackWarning")  # csr beside coo
@pytest.mark.parametrize("row", rows(IS_MASKED), ids=" ".join)
def test_is_masked_function(row):
    x, is_masked, code = row
    for function in functions("x", globals())(code).values():
        assert jmask.is_masked_function(function, eval(x)) == eval(is_masked)
