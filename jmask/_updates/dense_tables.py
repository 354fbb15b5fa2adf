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

from jmask._base.fallback import (
    LARGE,
    expect_dense,
    in_bytes,
    is_expected_dense,
    muted,
    report_fallback,
)
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


def noticing_dense_tables(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return `step` of a lazy optimizer, of gradients first, that notices dense tables.

    The transformations inside it get arrays in place of rows: whole tables where `lazy` traces
    its proof, the rows of a batch where it runs. What they would notice is no user's gradient.
    """

    @functools.wraps(step)
    def noticing(grads: Any, *args: Any, **kwargs: Any) -> Any:
        notice_dense_tables(grads)
        with muted():
            result, state = step(grads, *args, **kwargs)
        # The next lazy optimizer of a chain gets updates: these are no gradients to notice.
        for x in jax.tree.leaves(result, is_leaf=is_gradient_leaf):
            if is_table(x):
                expect_dense(x)
        return result, state

    return noticing


def noticed_as(gradients: Any, updates: Any) -> Any:
    """Return `updates` made of gradients; dense tables that were reported are so in them."""
    pairs: Any = zip(
        *(jax.tree.leaves(x, is_leaf=is_gradient_leaf) for x in (gradients, updates)),
        strict=True,
    )
    for gradient, update in pairs:
        if is_expected_dense(gradient) and is_table(update):
            expect_dense(update)
    return updates


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
