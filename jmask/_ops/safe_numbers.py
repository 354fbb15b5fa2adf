"""Numbers to put where an operand of an elementwise function does not exist.

    log      0.5        log, its slope and its curvature are finite there
    sqrt     0.5        and not 0, where the slope is infinite

What is selected away after the function must be harmless in it: 0 times an infinite slope is
nan. The number is found by trying.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# To try in turn, for floating and for integer operands.
_CANDIDATES = ((0.5, 1), (1.5, 0), (0.25, 2), (2.5, 3), (-0.5, -1))


def safe_numbers(
    function: Callable, kinds: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """For each operand a number to put where it is masked.

    Found by trying, so that it serves functions never seen before: value, first and second
    derivative must be finite there.

    Args:
        function: elementwise.
        kinds: for each operand its dtype, or its value if it is a Python number.
        kwargs: keyword arguments of the function.
    """
    try:
        return _safe_numbers(function, kinds, tuple(sorted(kwargs.items())))
    except TypeError:  # something that cannot be hashed
        return _safe_numbers.__wrapped__(function, kinds, tuple(kwargs.items()))


@functools.lru_cache(maxsize=4096)
def _safe_numbers(
    function: Callable, kinds: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]
) -> tuple[Any, ...]:
    fixed, numbers = dict(kwargs), ()
    for candidate in _CANDIDATES:
        numbers = tuple(_number(candidate, kind) for kind in kinds)
        if _is_safe(lambda *xs: function(*xs, **fixed), numbers):
            return numbers
    return numbers


def _number(candidate: tuple[float, int], kind: Any) -> Any:
    if not varies(kind):
        return kind
    inexact, integer = candidate
    return np.array(inexact if jnp.issubdtype(kind, jnp.inexact) else integer).astype(kind)


def _is_safe(function: Callable, numbers: tuple[Any, ...]) -> bool:
    varying = [i for i, x in enumerate(numbers) if _is_inexact(x)]

    def of_varying(*xs: Any) -> Any:
        arguments = list(numbers)
        for i, x in zip(varying, xs, strict=True):
            arguments[i] = x
        return function(*arguments)

    def slope(*xs: Any) -> Any:
        return jax.jvp(of_varying, xs, tuple(map(np.ones_like, xs)))

    xs = tuple(numbers[i] for i in varying)
    with trial():
        try:
            results = jax.jvp(slope, xs, tuple(map(np.ones_like, xs)))
        except (TypeError, NotImplementedError):
            results = of_varying(*xs)  # not differentiable: then its value decides
        return all(_is_finite(x) for x in jax.tree.leaves(results))


@contextlib.contextmanager
def trial() -> Iterator[None]:
    """Context in which a function is tried on numbers, also while something is traced.

    What comes out may be nan, and `jax_debug_nans` is not to take it for a mistake.
    """
    with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
        yield


def _is_inexact(x: Any) -> bool:
    return isinstance(x, np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)


def _is_finite(x: Any) -> bool:
    return x.dtype == jax.dtypes.float0 or bool(jnp.isfinite(x).all())


def varies(x: Any) -> bool:
    """Whether an operand is an array, and not a Python number."""
    # A Python number keeps its weak type, and static arguments must stay static.
    return not isinstance(x, bool | int | float | complex)
