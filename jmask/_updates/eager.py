"""Optimizers called outside jit: compiled at the first call, and run from memory after it.

    tx.update(grads, state, params)        first call: traced and compiled
    tx.update(grads, state, params)        shapes as before: the program runs

An optimizer is a pure function of its arguments, so nothing can tell. It pays because a lazy
update is found by analysis, and is many small operations. (A loss function is not remembered:
it may close over anything, and what it closes over may have changed.)

`optax.inject_hyperparams` makes an optimizer anew in each step, of rates that are arrays. Those
of one constructor that differ in arrays alone share programs, which take these as arguments.

Where a fallback is reported the function itself is called each time, so that each call warns,
or raises under `strict()`, as it would have.
"""

import functools
import inspect
from typing import TypeVar, cast

import jax
import numpy as np

from jmask._base.fallback import collected
from jmask._base.types import Function, Gradients, OptState, Params, PyTree

Constructor = TypeVar("Constructor", bound=Function)


def compiled_outside_jit(function: Function) -> Function:
    """Run `function`, which is pure, from a compiled program where all leaves are arrays.

    It is called as it is with keyword arguments, inside a trace, and with other leaves.
    """
    compiled = jax.jit(function)
    has_fallback = False

    @functools.wraps(function)
    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
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


def sharing_programs(constructor: Constructor) -> Constructor:
    """Wrap a constructor, so that its `OnePassTransformation`s use `compiled_outside_jit`."""
    signature = inspect.signature(constructor)

    @functools.lru_cache(_PROGRAMS)
    def program(method: str, fixed: tuple[tuple[str, object], ...]) -> Function:
        def run(arrays: dict[str, jax.Array], *args: PyTree) -> PyTree:
            return getattr(constructor(**dict(fixed), **arrays), method)(*args)

        return compiled_outside_jit(run)

    @functools.wraps(constructor)
    def construct(*args: PyTree, **kwargs: PyTree) -> PyTree:
        made = constructor(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        # NumPy's arrays are looked at when an optimizer is made: see `is_known`.
        arrays = {
            n: x for n, x in given.items() if isinstance(x, jax.Array) and _is_concrete(x)
        }
        fixed = tuple((name, x) for name, x in given.items() if name not in arrays)
        if not arrays or not _is_hashable(fixed) or not hasattr(made, "apply_gradients"):
            return made

        def update(
            updates: Gradients,
            state: OptState,
            params: Params | None = None,
            **extra_args: PyTree,
        ) -> tuple[Gradients, OptState]:
            if extra_args:
                return made.update(updates, state, params, **extra_args)
            return program("update", fixed)(arrays, updates, state, params)

        shared = type(made)(made.init, update)
        shared.rule = made.rule
        shared.apply_gradients = functools.partial(program("apply_gradients", fixed), arrays)
        return shared

    return cast(Constructor, construct)


# How many compiled programs a constructor remembers, one for each set of its numbers that are
# no arrays. A sweep in a notebook makes some dozens; a rate that is a Python number and changes
# in each step would otherwise keep a program for each step of a run.
_PROGRAMS = 64


def _is_hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _is_concrete(leaf: object) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSUMm"
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
