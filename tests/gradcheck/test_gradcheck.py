"""`gradcheck`: what it accepts, what it refuses, and what it says.

First four products of a sparse matrix in both semantics: exact Jacobians and verdicts.

x = [[-, 1], [2, 3]], where entry (0, 0) is not specified, on every storage. The functions and
numbers are those of pytorch/pytorch#95405, and its definition of a masked function.
"""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.sparse import BCOO, BCSR

import jmask
import jmask.numpy as jnm
from jmask._gradcheck import jacobian as jacobians
from jmask._gradcheck.entries import Input
from jmask._gradcheck.message import Setting
from jmask._gradcheck.problem import Problem
from tests.gradcheck.test_gradcheck_wrong import with_jvp
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
SPECIFIED = [[6, 13, 4, 12], [3, 1, 13, 6], [2, 6, 12, 31]]
NOTHING, EVERYTHING = [0, 0, 0, 0], [4, 3, 6, 2]
# The derivatives along entry (0, 0): numerical if every entry counts, and analytical; then
# the verdicts in masked and in plain semantics.
TABLE = {
    "mixed": (EVERYTHING, [2, 0, 6, 0], False, False),
    "mixed, after sparse_mask": (NOTHING, NOTHING, True, True),
    "all masked": (EVERYTHING, NOTHING, True, False),
    "all plain": (EVERYTHING, EVERYTHING, False, True),
}


def product(name, x):
    if name == "mixed, after sparse_mask":
        return lambda y: PRODUCTS["mixed"](jmask.sparse_mask(y, x))
    return PRODUCTS[name]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", TABLE)
def test_example(name, storage):
    x = STORAGES[storage]
    function = product(name, x)
    numerical, analytical, passes_masked, passes_plain = TABLE[name]
    for masked, passes in ((True, passes_masked), (False, passes_plain)):
        for fast in (False, True) if storage in ("coo", "rows") else (True,):
            check = functools.partial(jmask.gradcheck, masked=masked, fast=fast)
            assert check(function, x, raise_exception=False) == passes
    setting = Setting(False, 1e-6, 1e-5, 1e-3, 1, lambda: True)
    with jax.enable_x64(True):
        problem = Problem(function, (x,), setting)
        rules = jacobians.Rules(problem, ("rev", "fwd"))
        kinds = [problem.kinds[rows[0]] for rows in problem.blocks]
        assert [kind for kind in kinds if kind != "hidden"] == ["specified", "unspecified"]
        blocks = problem.blocks[:2]
        for mode in rules.modes:
            jacobian = rules.jacobian(mode)
            for block, rows in zip(blocks, (SPECIFIED, [analytical]), strict=True):
                np.testing.assert_array_equal(jacobian[block], rows)
        differences = jacobians.numerical(problem)
        for block, rows in zip(blocks, (SPECIFIED, [numerical]), strict=True):
            np.testing.assert_allclose(differences[block], rows, rtol=1e-8, atol=1e-8)


def test_is_masked_function_of_the_example():
    found = {
        (name, storage): jmask.is_masked_function(product(name, x), x)
        for name in TABLE
        for storage, x in STORAGES.items()
        if storage in ("coo", "csr", "rows", "masked")
    }
    masked = {key for key, value in found.items() if value}
    after = {("mixed, after sparse_mask", s) for s in ("coo", "csr", "rows", "masked")}
    # A product of MaskedTensors knows of the valid entries alone.
    assert masked == after | {("all masked", "masked")}


# --- what `gradcheck` accepts, refuses and says ---------------------------------------


@pytest.mark.parametrize(
    ("name", "masked", "advice"),
    [
        ("all plain", True, "treats unspecified entries as zeros.*masked=False.*sparse_mask"),
        ("mixed", True, "treats unspecified entries as zeros"),
        ("all masked", False, "specified entries only.*masked=True.*todense"),
        ("mixed", False, "mixes operations"),
    ],
)
def test_what_to_try(name, masked, advice):
    with pytest.raises(jmask.GradcheckError, match=advice) as caught:
        jmask.gradcheck(PRODUCTS[name], STORAGES["coo"], masked=masked)
    message = str(caught.value)
    assert "args[0], entry (0, 0), which is not specified" in message
    assert "output, entry (1, 0)" in message or name != "all plain"
    assert f"masked={masked}" in message
    assert "reverse (vjp), order 1" in message


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
        "  all outputs numerical  [1. 0.]",
        "              analytical [0. 0.]",
        "  to try      the gradient of this function goes to specified entries only: check "
        "it with masked=True, or read the input by jmask.todense(x) for a gradient everywhere",
    ]


# --- what it accepts --------------------------------------------------------------------------


class TestRightGradients:
    def test_double_precision_is_local(self):
        seen = []

        def function(x):
            seen.append(x.dtype)
            return jnp.sin(x)

        assert jmask.gradcheck(function, jnp.float32(0.5))
        assert set(seen) == {jnp.dtype("float64")}
        assert jnp.asarray(1.0).dtype == jnp.float32

    @pytest.mark.parametrize("fast", [False, True])
    def test_any_tree(self, fast):
        args = (
            {"w": np.float32([[1, 2], [3, 4]]), "ids": jnp.array([1, 0]), "flag": True},
            [STORAGES["coo"], STORAGES["rows"]],
            (STORAGES["masked"], 2.0, 3, None),
        )

        def function(params, sparse, others):
            masked, scale, power, _ = others
            assert params["flag"] is True
            assert power == 3
            rows = params["w"][params["ids"]] ** power * scale
            return {
                "total": rows @ (sparse[0] @ jnp.ones((2, 2))),
                "squares": jnm.square(sparse[1]),
                "masked": [jnm.exp(masked) * scale, jnp.arange(3)],
            }

        assert jmask.gradcheck(function, args, masked=True, fast=fast)

    @pytest.mark.parametrize("modes", ["rev", "fwd"])
    @pytest.mark.parametrize("masked", [False, True])
    def test_second_order(self, modes, masked):
        x, w = STORAGES["coo"], jnp.array([[2.0, -1.0], [0.5, 1.0]])
        function = lambda x, w: jmask.todense(x, masked_grad=masked) ** 2 @ w**3
        options = {"masked": masked, "modes": modes, "order": 2}
        assert jmask.gradcheck(function, (x, w), **options)
        assert jmask.gradcheck(function, (x, w), fast=True, **options)

    def test_complex(self):
        z = np.array([1 + 2j, -0.5 + 0.3j], np.complex64)
        x = BCOO.fromdense(jnp.array([[0, 1 + 1j], [2j, 0]]))

        def function(z, x):
            product = jmask.todense(x) @ z
            return product * z.conj(), jnp.abs(product) ** 2

        assert jmask.gradcheck(function, (z, x))
        squares = lambda z: z**2 * z.conj()
        assert jmask.gradcheck(squares, z, order=2)
        assert jmask.gradcheck(squares, z, order=2, fast=True)
        with pytest.raises(jmask.GradcheckError, match=r"real part of entry \(0, 0\), which"):
            jmask.gradcheck(function, (z, x), masked=True, modes="rev")

    def test_batch_and_dense_dimensions(self):
        values = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2) % 5
        values[:, 1] = 0
        x = BCSR.fromdense(jnp.asarray(values), n_batch=1, n_dense=1)
        weights = np.random.default_rng(0).normal(size=values.shape)
        plain = lambda x: jnp.vdot(jmask.todense(x), weights)
        masked = lambda x: jnp.vdot(jmask.todense(x, masked_grad=True), weights)
        check = functools.partial(jmask.gradcheck, modes="rev")
        assert check(plain, x)
        assert check(masked, x, masked=True)
        assert not check(masked, x, raise_exception=False)

    @pytest.mark.parametrize("storage", STORAGES)
    def test_tensors_as_outputs(self, storage):
        x = STORAGES[storage]
        function = lambda x: {"x": x, "y": jnm.multiply(jnm.sin(x), 2)}
        order = 2 if storage in ("rows", "masked") else 1
        assert jmask.gradcheck(function, x, masked=True, order=order, fast=True)
        if not isinstance(x, jmask.MaskedTensor):
            assert jmask.gradcheck(lambda x: x, x)  # the identity, at every entry

    def test_under_transformations(self):
        x = STORAGES["coo"]

        def function(x):
            total = jax.checkpoint(lambda x: jmask.todense(x) ** 2)(x)
            step = lambda carry, w: (carry + jmask.todense(x) @ w, None)
            total, _ = jax.lax.scan(step, total, jnp.ones((2, 2, 2)))
            return jax.vmap(lambda w: jmask.todense(x) @ w)(total)

        assert jmask.gradcheck(jax.jit(function), x)

    def test_numbers_and_one_argument_that_is_no_tuple(self):
        assert jmask.gradcheck(lambda a, b: a**2 * b, (2.0, 3.0))
        assert jmask.gradcheck(lambda params: params[0] * params[1], [2.0, 3.0])
        assert jmask.gradcheck(jnp.sin, 0.5)

    def test_large_numbers_and_empty_ones(self):
        assert jmask.gradcheck(lambda x: x**2, jnp.array([1e8, 1e-8]))
        empty = jmask.RowSparse.zeros((3, 2))
        assert jmask.gradcheck(lambda x, y: (jmask.todense(x), y), (empty, jnp.zeros(0)))
        nothing = jmask.masked_tensor(jnp.array([jnp.nan]), jnp.array([False]))
        assert jmask.gradcheck(jnm.log, nothing, masked=True)

    def test_infinite_entries_that_do_not_move(self):
        function = lambda x: jnp.where(jnp.array([True, False]), x, -jnp.inf)
        assert jmask.gradcheck(function, jnp.array([0.5, 2.0]))
        assert jmask.gradcheck(function, jnp.array([0.5, 2.0]), fast=True)

    def test_rule_that_knows_the_structure_of_its_argument(self):
        """It cannot be given a placeholder: its gradient is that of the stored values."""

        @jax.custom_vjp
        def total(x):
            return x.data.sum()

        def pullback(x, c):
            zeros = np.zeros(x.indices.shape, jax.dtypes.float0)
            _, structure = jax.tree.flatten(x)
            return (jax.tree.unflatten(structure, [jnp.full_like(x.data, c), zeros]),)

        total.defvjp(lambda x: (total(x), x), pullback)
        x = BCOO(STORAGES["coo"].tree_flatten()[0], shape=(2, 2))
        assert jmask.gradcheck(total, x, masked=True, modes=("rev",))
        assert jmask.grad(total)(x).data.tolist() == [1, 1, 1]
        with pytest.raises(jmask.GradcheckError, match=r"modes=\('rev',\)"):
            jmask.gradcheck(total, x, masked=True)


# --- what it refuses --------------------------------------------------------------------------


def at_its_positions(x):
    if x.nse != STORAGES["coo"].nse:
        raise ValueError("other positions")
    return jmask.todense(x, masked_grad=True)


in_float32 = lambda x: jnp.sin(x.astype(jnp.float32))
reads_itself = lambda x: x[np.asarray(jax.lax.stop_gradient(x)) >= 1.0]


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (jnp.log, jnp.array([1.0, -1.0]), r"output, entry \(1,\) is nan"),
        (jax.nn.relu, jnp.array([1.0, 0.0]), "kink here .slope 0 on the left, 1 on the right"),
        (in_float32, 0.5, "the output is float32 although"),
        (with_jvp(jnp.square, lambda x, t: 3 * x * t), 2.0, r"factor of 1\.5 is too muc"),
        (jnm.sin, STORAGES["masked"], r"changed the mask of output.*\n.*\n.*True"),
        (jnm.mean, STORAGES["masked"], "tells an unspecified entry from a zero"),
        (lambda x: {"a": x} if x > 1 else [x], 1.0, "changed the structure"),
        (reads_itself, jnp.array([1.0, 2.0]), "changed the shape"),
        (at_its_positions, STORAGES["coo"], "made the function raise ValueError"),
    ],
)
def test_refused(function, args, message):
    with pytest.raises(jmask.GradcheckError, match=message):
        jmask.gradcheck(function, args)


def test_accepted_with_other_settings():
    assert jmask.gradcheck(in_float32, 0.5, eps=1e-2, atol=1e-2)
    assert jmask.gradcheck(at_its_positions, STORAGES["coo"], masked=True)


def test_errors_of_the_function_are_its_own():
    def function(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jmask.gradcheck(function, 0.5, raise_exception=False)


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["rev", "fwd"]))
def test_fast_decides_as_slow_does(seed, mode):
    """A Jacobian with one wrong entry, by more or less than the tolerances."""
    rng = np.random.default_rng(seed)
    jacobian = rng.normal(size=(3, 4)) * 10.0 ** rng.integers(-3, 4, (3, 4))
    wrong = jacobian.copy()
    at = tuple(rng.integers(0, (3, 4)))
    wrong[at] += rng.choice([-1, 1]) * 10.0 ** rng.uniform(-7, 1) * (1e-2 + abs(wrong[at]))

    if mode == "rev":
        function = jax.custom_vjp(lambda x: jacobian @ x)
        function.defvjp(lambda x: (jacobian @ x, None), lambda _, c: (c @ wrong,))
    else:
        function = jax.custom_jvp(lambda x: jacobian @ x)
        function.defjvp(lambda x, t: (jacobian @ x[0], wrong @ t[0]))
    check = functools.partial(
        jmask.gradcheck, function, rng.normal(size=4), modes=(mode,), raise_exception=False
    )
    allowed = 1e-5 + 1e-3 * abs(jacobian[at])
    exact = abs(wrong[at] - jacobian[at]) <= allowed
    assert check() == exact
    assert check(fast=True) == exact


NUMBERS = np.arange(24.0, dtype=np.float32).reshape(2, 3, 2, 2)
NUMBERS *= NUMBERS % 3 == 1
LAYOUTS = {
    f"{kind.__name__}, {batch} batch, {trailing} dense": (
        functools.partial(kind.fromdense, n_batch=batch, n_dense=trailing),
        dense,
    )
    for kind in (BCOO, BCSR)
    for batch, trailing, dense in ((0, 0, NUMBERS[0, 0]), (1, 1, NUMBERS), (1, 0, NUMBERS[0]))
}
LAYOUTS["RowSparse with padding"] = (
    lambda x: jmask.RowSparse([1, 7, 0], x[jnp.array([1, 0, 0])], x.shape),
    NUMBERS,
)
LAYOUTS["masked"] = lambda x: jmask.masked_tensor(x, x > 0), NUMBERS[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_entries_of_stored_values(name):
    """`Input` knows which entry each stored value is, and the tensor with every entry."""
    build, dense = LAYOUTS[name]
    x = build(jnp.asarray(dense))
    entries = Input("x", x)
    at = entries.positions.ravel()[entries.specified]
    np.testing.assert_array_equal(entries.values[entries.specified], dense.ravel()[at])
    assert not dense.ravel()[entries.unspecified].any()
    covered = np.union1d(at, entries.unspecified)
    np.testing.assert_array_equal(covered, np.arange(dense.size))
    if name == "RowSparse with padding":
        assert np.flatnonzero(entries.kinds == "hidden").tolist() == list(range(12, 24))
    expected = dense.copy()
    expected.ravel()[entries.unspecified] = 1
    full = entries.full((entries.kinds == "unspecified").astype(float))
    assert type(full) is type(x)
    np.testing.assert_array_equal(jmask.todense(full), expected)
    assert len(Input("x", full).specified) == dense.size


class TestIsMaskedFunction:
    def test_masked_tensors(self):
        x = STORAGES["masked"]
        for function in (jnm.sin, jnm.sum, jmask.nn.softmax, lambda x: x @ x):
            assert jmask.is_masked_function(function, x)
        assert jmask.is_masked_function(lambda x: x.to_tensor(0), x)
        assert not jmask.is_masked_function(jmask.todense, x)
        assert not jmask.is_masked_function(lambda x: x.data.sum(), x)

    def test_sparse_tensors(self):
        x = STORAGES["coo"]
        assert not jmask.is_masked_function(lambda x: x, x)
        assert not jmask.is_masked_function(lambda x: jnp.sum(jmask.todense(x) ** 2), x)
        for mask in (x, STORAGES["csr"], STORAGES["masked"], DENSE != 0):
            assert jmask.is_masked_function(lambda y, m=mask: jmask.sparse_mask(y, m), x)

    def test_trees_and_nonlinear_dependence(self):
        args = {"x": STORAGES["rows"], "w": jnp.ones(4)}
        masked = lambda p: jmask.todense(jmask.sparse_mask(p["x"], STORAGES["rows"])) @ p["w"]
        assert jmask.is_masked_function(masked, args)
        cube = lambda p: masked(p) + jnp.sum(jmask.todense(p["x"]) ** 3)
        assert not jmask.is_masked_function(cube, args)

    def test_functions_of_arrays_are(self):
        assert jmask.is_masked_function(jnp.sin, jnp.ones(3))
