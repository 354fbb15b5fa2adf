"""Every elementwise function of the reference gives torch's numbers at valid entries."""

from typing import Any

import jax
import numpy as np
import pytest

import jmask
from tests.ops.test_elementwise import FUNCTIONS, INTEGER, MASKS, numbers
from tests.torch_names import REFERENCE_BINARY, REFERENCE_UNARY, name_here

pytestmark = pytest.mark.needs(what="torch")

MASK = MASKS["random"]
# Without a kernel for two masked tensors, or for one, in torch 2.13: compared unmasked.
UNMASKED = {"clip", "clamp", "conj_physical", "fix", "pow"}
BOUNDS = {"clip": (0.3, 0.6), "clamp": (0.3, 0.6)}


def compare(torch: Any, name: str, xs: list[np.ndarray]) -> None:
    bounds = BOUNDS.get(name, ())
    ours = FUNCTIONS[name_here(name)](*(jmask.masked_tensor(x, MASK) for x in xs), *bounds)
    operands = [torch.from_numpy(x) for x in xs]
    if name not in UNMASKED:
        valid = torch.from_numpy(MASK)
        operands = [torch.masked.masked_tensor(x, valid) for x in operands]
    theirs = getattr(torch, name)(*operands, *bounds)
    theirs = theirs.numpy() if name in UNMASKED else theirs.get_data().numpy()
    np.testing.assert_array_equal(ours.mask, MASK)
    np.testing.assert_allclose(np.asarray(ours.data)[MASK], theirs[MASK], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFERENCE_UNARY)
def test_unary(torch: Any, name: str) -> None:
    values = numbers(name)
    if name not in INTEGER and name not in UNMASKED:
        values = np.where(MASK, values, np.nan).astype(np.float32)
    compare(torch, name, [values])


# torch.equal is one boolean for two whole tensors; `eq` is the elementwise one.
@pytest.mark.parametrize("name", [name for name in REFERENCE_BINARY if name != "equal"])
def test_binary(torch: Any, name: str) -> None:
    compare(torch, name, [numbers(name, 1), numbers(name, 2)])


def test_gradients_that_torch_cannot_take(torch: Any) -> None:
    """A fault of torch: backward of maximum fails there, and here it is exact."""
    x, y = numbers("maximum", 1), numbers("maximum", 2)
    valid = torch.from_numpy(MASK)
    a, b = (torch.masked.masked_tensor(torch.from_numpy(v), valid, True) for v in (x, y))
    with pytest.raises((RuntimeError, TypeError)):
        torch.maximum(a, b).sum().backward()
    loss = lambda x: jmask.numpy.maximum(jmask.masked_tensor(x, MASK), y).to_tensor(0).sum()
    np.testing.assert_array_equal(jax.grad(loss)(x), MASK & (x > y))
