"""Four products of a sparse matrix in both semantics: exact Jacobians and verdicts.

x = [[-, 1], [2, 3]], where entry (0, 0) is not specified, on every storage. The functions and
numbers are those of pytorch/pytorch#95405, and its definition of a masked function.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

import jmask
from jmask._gradcheck import jacobian as jacobians
from jmask._gradcheck.message import Setting
from jmask._gradcheck.problem import Problem
from tests.sparse_arrays import coo, csr

pytestmark = pytest.mark.sampled(15)

DENSE = np.array([[0.0, 1.0], [2.0, 3.0]], np.float32)
ENTRIES = jmask.RowSparse([1, 2, 3], jnp.array([1.0, 2.0, 3.0]), (4,))  # x, row by row
STORAGES: dict[str, Any] = {
    "coo": coo(DENSE),
    "csr": csr(DENSE),
    "rows": ENTRIES,
    "masked": jmask.masked_tensor(np.where(DENSE, DENSE, np.nan), DENSE != 0),
    "masked coo": jmask.masked_tensor(coo(DENSE)),
}


def matrix(x: Any, masked_grad: bool) -> jax.Array:
    return jmask.todense(x, masked_grad=masked_grad).reshape(2, 2)


def mm(x: Any, y: Any) -> jax.Array:
    """The product with the gradient of an ordinary tensor."""
    return matrix(x, False) @ matrix(y, False)


def sparse_mm(x: Any, y: Any) -> jax.Array:
    """The product with a gradient at specified entries."""
    if isinstance(x, BCOO):
        return x @ matrix(y, True)
    return matrix(x, True) @ matrix(y, True)


PRODUCTS = {
    "mixed": lambda x: mm(sparse_mm(x, x), x),
    "all masked": lambda x: sparse_mm(sparse_mm(x, x), x),
    "all plain": lambda x: mm(mm(x, x), x),
}
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


def product(name: str, x: Any) -> Any:
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
        blocks = [block for block in problem.blocks if block.kind != "hidden"]
        assert [block.kind for block in blocks] == ["specified", "unspecified"]
        for mode in rules.modes:
            jacobian = rules.jacobian(mode)
            for block, rows in zip(blocks, (SPECIFIED, [analytical]), strict=True):
                np.testing.assert_array_equal(jacobian[block.rows], rows)
        differences = jacobians.numerical(problem)
        for block, rows in zip(blocks, (SPECIFIED, [numerical]), strict=True):
            np.testing.assert_allclose(differences[block.rows], rows, rtol=1e-8, atol=1e-8)


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
