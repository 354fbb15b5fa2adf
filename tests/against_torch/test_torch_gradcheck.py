"""`jmask.gradcheck` gives the verdicts of `torch.autograd.gradcheck` where torch has one.

The four products of the example, in both semantics, for COO tensors; and rules of dense
functions, right and wrong. Sparse outputs, masked tensors and forward mode torch cannot
check, and its fast mode accepts some gradients that its slow mode refuses.
"""

import jax
import numpy as np
import pytest

import jmask
from tests.gradcheck.test_gradcheck import DENSE, product
from tests.sparse_arrays import coo

pytestmark = pytest.mark.needs(what="torch")


def of_torch(torch, name):
    """A product of the examples, in torch."""
    mm, sparse_mm = torch.mm, torch.sparse.mm
    mask = torch.tensor(DENSE != 0).to_sparse()
    mixed = lambda x: mm(sparse_mm(x, x), x).to_dense()
    return {
        "mixed": mixed,
        "mixed, after sparse_mask": lambda x: mixed(x.sparse_mask(mask)),
        "all masked": lambda x: sparse_mm(sparse_mm(x, x), x).to_dense(),
        "all plain": lambda x: mm(mm(x, x), x).to_dense(),
    }[name]


NAMES = ("mixed", "mixed, after sparse_mask", "all masked", "all plain")


def accepts(torch, function, x, **options):
    try:
        return torch.autograd.gradcheck(function, x, **options)
    except RuntimeError as error:
        if "Jacobian mismatch" not in str(error):
            raise
        return False


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_verdicts_on_sparse_products(torch, name, masked):
    x = torch.tensor(DENSE, dtype=torch.float64).to_sparse().requires_grad_()
    theirs = accepts(torch, of_torch(torch, name), x, masked=masked)
    mine = coo(DENSE)
    ours = jmask.gradcheck(product(name, mine), mine, masked=masked, raise_exception=False)
    assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_sparse_products(torch, name):
    mine = coo(DENSE)
    for at in np.ndindex(2, 2):
        x = torch.tensor(DENSE, dtype=torch.float64).to_sparse().requires_grad_()
        of_torch(torch, name)(x)[at].backward()
        ours = jmask.grad(lambda x, at=at: product(name, mine)(x)[at])(mine)
        np.testing.assert_allclose(jmask.todense(ours), x.grad.to_dense().numpy(), rtol=1e-6)


# Forward and backward of functions, in terms of the namespace: right ones and wrong ones.
RULES = {
    "sine": (lambda xp, x: xp.sin(x), lambda xp, x, c: xp.cos(x) * c, True),
    "sign": (lambda xp, x: xp.sin(x), lambda xp, x, c: -xp.cos(x) * c, False),
    "factor": (lambda xp, x: x**2, lambda xp, x, c: x * c, False),
    "term": (lambda xp, x: x**2 + xp.sin(x), lambda xp, x, c: 2 * x * c, False),
    "exchanged": (
        lambda xp, x: xp.sin(x),
        lambda xp, x, c: (xp.cos(x) * c)[np.array([1, 0, 2])],
        False,
    ),
    "shifted": (lambda xp, x: x * 1, lambda xp, x, c: c[np.array([1, 2, 0])], False),
    "nearly right": (lambda xp, x: x**2, lambda xp, x, c: 2.001 * x * c, True),
    "not quite right": (lambda xp, x: x**2, lambda xp, x, c: 2.01 * x * c, False),
}
X = np.array([0.5, 1.0, -1.5])


def verdicts(torch, forward, backward):
    """Whether torch accepts a rule, slowly, and whether jmask does, slowly and fast."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(torch, x)

        @staticmethod
        def backward(ctx, c):
            return backward(torch, *ctx.saved_tensors, c)

    mine = jax.custom_vjp(lambda x: forward(jax.numpy, x))
    mine.defvjp(lambda x: (forward(jax.numpy, x), x), lambda x, c: (backward(jax.numpy, x, c),))
    x = torch.tensor(X, requires_grad=True)
    how = {"modes": "rev", "raise_exception": False}
    ours = [jmask.gradcheck(mine, X, fast=fast, **how) for fast in (False, True)]
    return [accepts(torch, Function.apply, x), *ours]


@pytest.mark.parametrize("name", RULES)
def test_verdicts_on_rules(torch, name):
    forward, backward, right = RULES[name]
    assert verdicts(torch, forward, backward) == [right] * 3
