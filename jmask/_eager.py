"""Optimizers called outside jit: compiled at the first call, and run from memory after it.

    tx.update(grads, state, params)        first call: traced and compiled
    tx.update(grads, state, params)        shapes as before: the program runs

An optimizer is a pure function of its arguments, so nothing can tell. It pays because a lazy
update is found by analysis, and is many small operations. (A loss function is not remembered:
it may close over anything, and what it closes over may have changed.)

Where a fallback is reported the function itself is called each time, so that each call warns,
or raises under `strict()`, as it would have.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jmask._fallback import collected


def compiled_outside_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run from a compiled program where all leaves of the arguments are arrays.

    Args:
        function: pure, of trees. Called as it is with keyword arguments, inside a trace, and
            with leaves of other types.
    """
    compiled = jax.jit(function)
    has_fallback = False

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_fallback
        if has_fallback or kwargs or not all(map(_is_concrete, jax.tree.leaves(args))):
            return function(*args, **kwargs)
        with collected() as reports:
            result = compiled(*args)
        if not reports:
            return result
        has_fallback = True
        return function(*args)

    return call


def _is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray) and not isinstance(leaf, jax.core.Tracer)
