"""Half a change is said: a lazy optimizer that gets the dense gradients of `jax.grad`.

    jmask.lazy(optax.adam(1e-3)) with jax.value_and_grad        dense, and right: but O(table)

Nothing is wrong then and nothing is gained, so there is a notice for each large table. Not for
gradients that `jmask.grad` has made dense: it has said why.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax

from jmask._base.fallback import LARGE, in_bytes, is_expected_dense, report_fallback
from jmask._base.leaves import leaf_name
from jmask._updates.masked_gradient import is_gradient_leaf

# What is a table, and no weight of a layer: many rows, and long against a row.
_ROWS, _ROWS_FOR_EACH_ENTRY = 1000, 8


def notice_dense_tables(updates: Any) -> None:
    """Report each large table among gradients none of which is sparse or masked.

    Raises:
        StorageFallbackWarning: under `strict()`.
    """
    leaves: Any = jax.tree.leaves_with_path(updates, is_leaf=is_gradient_leaf)
    if any(is_gradient_leaf(x) for _, x in leaves):
        return
    for path, gradient in leaves:
        if not is_table(gradient) or is_expected_dense(gradient):
            continue
        size = math.prod(gradient.shape) * gradient.dtype.itemsize
        report_fallback(
            f"a lazy optimizer got a dense gradient {leaf_name('updates', path)} for a "
            f"{gradient.dtype}{list(gradient.shape)} table ({in_bytes(size)}) and no "
            "row-sparse one, and updates all of it: take gradients with jmask.value_and_grad "
            "in place of jax.value_and_grad, or the optimizer without jmask.lazy"
        )


def noticing_dense_tables(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
    """`apply_gradients` of a lazy optimizer that notices dense tables first."""

    @functools.wraps(apply_gradients)
    def noticing(grads: Any, state: Any, params: Any) -> Any:
        notice_dense_tables(grads)
        return apply_gradients(grads, state, params)

    return noticing


def is_table(x: Any) -> bool:
    """Whether an array is large and has many rows, long against a row."""
    if not isinstance(x, jax.Array) or x.ndim < 2:
        return False
    rows, entries = x.shape[0], math.prod(x.shape[1:])
    return (
        rows * entries * x.dtype.itemsize >= LARGE
        and rows >= _ROWS
        and rows >= _ROWS_FOR_EACH_ENTRY * entries
    )
