"""`is_masked_function`: whether a function knows of the specified entries only.

The definition: for all dx in a neighbourhood of 0,

    f(x + dx) = f(sparse_mask(x + dx, x))

What dx adds at entries that x does not specify changes nothing. So a product `x @ y` of a
sparse x is no masked function, although its gradient in JAX has entries where x has: stored
zeros are the same to it as no entries. After `sparse_mask` it is one.

For sparse x the sum x + dx stores every entry. A `MaskedTensor` keeps its mask in x + dx: dx
moves what lies under the mask, and what `todense` takes for zeros.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.validation import check_leaves, shown
from jmask._gradcheck.entries import Input, numbers_of, random_reals
from jmask._gradcheck.message import Setting
from jmask._gradcheck.problem import Problem, mask_of
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor
from jmask._tensors.placeholders import with_phantom, with_values_of
from jmask._tensors.specified import todense

_SIZES = (1e-2, 1e-4)


def is_masked_function(fun: Callable[[Any], Any], x: Any) -> bool:
    """Whether f(x + dx) = f(sparse_mask(x + dx, x)) for small dx, by trying.

    Args:
        fun: takes `x`, returns any pytree.
        x: a sparse or masked tensor, or a pytree with some; floating or complex.

    Returns:
        False if a random dx of size 0.01 or 0.0001 shows a difference. Entries that do not
        exist in either result are not compared.

    Raises:
        ValueError: if `x` or the result holds no floating or complex numbers.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> from jax.experimental.sparse import BCOO
        >>> x = BCOO.fromdense(jnp.array([[0., 1.], [2., 3.]]))
        >>> jmask.is_masked_function(lambda y: y @ jnp.ones(2), x)
        False
        >>> jmask.is_masked_function(lambda y: jmask.sparse_mask(y, x) @ jnp.ones(2), x)
        True

    References:
        Nikita Vedeneev's definition in pytorch/pytorch#95405.
    """
    if not callable(fun):
        raise TypeError(
            f"`fun` must be a function, got {shown(fun)}: write "
            "jmask.is_masked_function(fun, x)."
        )
    check_leaves("x", x)
    setting = Setting(False, 1.0, 0.0, 0.0, 1, lambda: False)
    with jax.enable_x64(True):
        problem = Problem(fun, (x,), setting)
        rng = np.random.default_rng(0)
        return all(_agree(problem, rng, size) for size in _SIZES for _ in range(2))


def _agree(problem: Problem, rng: np.random.Generator, size: float) -> bool:
    near, projected = zip(*(_points(x, rng, size) for x in problem.inputs), strict=True)
    pairs = [
        jax.tree.leaves(problem.run(tensors), is_leaf=is_tensor)
        for tensors in (near, projected)
    ]
    return all(_equal(pairs[0][y.number], pairs[1][y.number]) for y in problem.outputs)


def _points(x: Input, rng: np.random.Generator, size: float) -> tuple[Any, Any]:
    """x + dx, and its entries where x is specified."""

    def steps(kind: str) -> np.ndarray:
        return size * random_reals(rng, (len(getattr(x, kind)), x.parts))

    projected = x.moved(steps("specified"))
    if not is_tensor(x.tensor):
        return projected, projected
    moved = Input(x.path, projected)
    if not isinstance(x.tensor, MaskedTensor):
        return moved.full(steps("unspecified")), projected
    values = moved.values.copy()
    values[x.hidden] = numbers_of(steps("hidden"))
    _, phantom = x.tangent("unspecified", steps("unspecified"), with_phantom=True)
    near = with_values_of(projected, jnp.asarray(values.reshape(x.positions.shape)))
    return with_phantom(near, phantom), projected


def _equal(x: Any, y: Any) -> bool:
    masks = mask_of(x, False), mask_of(y, False)
    if (masks[0] is None) != (masks[1] is None):
        return False
    if masks[0] is not None and (masks[0] != masks[1]).any():
        return False
    first, second = (np.asarray(todense(z)) for z in (x, y))
    if masks[0] is not None:
        first, second = first[masks[0]], second[masks[0]]
    scale = np.max(np.abs(second), initial=1, where=np.isfinite(second))
    return bool(np.allclose(first, second, rtol=1e-11, atol=1e-12 * scale, equal_nan=True))
