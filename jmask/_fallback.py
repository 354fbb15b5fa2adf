"""Leaving sparse storage is never silent.

Some operations have no row-sparse form. jmask then computes the dense result, which is
always correct but costs O(table) instead of O(rows touched), and says so: a
[`StorageFallbackWarning`][jmask.StorageFallbackWarning] names the operation and the line
of user code it came from. Under `jmask.strict()` the same object is raised instead.
"""

import contextlib
import contextvars
import os
import sys
import warnings
from collections.abc import Iterator

import jax

_strict = contextvars.ContextVar("jmask_strict", default=False)
_muted = contextvars.ContextVar("jmask_muted", default=False)
# `warnings.warn_explicit` keeps its once-per-place memory in the registry it is given.
_registry: dict = {}
_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (__file__, jax.__file__))


class StorageFallbackWarning(UserWarning):
    """A sparse value was made dense, which costs O(table) instead of O(rows touched).

    Raised as an exception under [`jmask.strict`][jmask.strict].
    """


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Context in which leaving sparse storage raises instead of warning.

    It acts while a function is traced: a step that was already compiled is not traced
    again, so enter `strict()` before the first call.

    Raises:
        StorageFallbackWarning: from the operation that would have made a sparse value
            dense.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> def tied(table, ids):
        ...     return jnp.sum(table[ids] @ table.T)
        >>> with jmask.strict():
        ...     jmask.grad(tied)(jnp.ones((4, 2)), jnp.array([1]))
        Traceback (most recent call last):
            ...
        jmask.StorageFallbackWarning: ...
    """
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Context for trial traces, whose fallbacks are reported by the real trace."""
    token = _muted.set(True)
    try:
        yield
    finally:
        _muted.reset(token)


def report_fallback(message: str, place: tuple[str, int] | None = None) -> None:
    """Warn that sparse storage was left, once per place; raise under `strict()`.

    Args:
        message: what became dense and why.
        place: (file, line) of the user's code; that which called jmask by default.
    """
    if _muted.get():
        return
    if place is not None:
        message = f"{message} (at {place[0]}:{place[1]})"
    if _strict.get():
        raise StorageFallbackWarning(message)
    if place is None:
        file, line, registry = _callers_line()
    else:
        (file, line), registry = place, _registry
    warnings.warn_explicit(message, StorageFallbackWarning, file, line, registry=registry)


def _callers_line() -> tuple[str, int, dict]:
    """File and line of the innermost call that is the user's, and its registry."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return frame.f_code.co_filename, frame.f_lineno, registry
