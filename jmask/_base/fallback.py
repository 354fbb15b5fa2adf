"""Leaving sparse storage is never silent.

Some operations have no row-sparse form. jmask then computes the dense result, which is
always correct but costs O(table) instead of O(rows touched), and says so: a
[`StorageFallbackWarning`][jmask.StorageFallbackWarning] names the operation and the line
of user code it came from. Under `jmask.strict()` the same object is raised instead.
"""

import contextlib
import contextvars
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import jax

from jmask._base.array_types import is_known
from jmask._base.side_table import SideTable

_T = TypeVar("_T")

_strict = contextvars.ContextVar("jmask_strict", default=False)
_collected: contextvars.ContextVar["list[Fallback] | None"] = contextvars.ContextVar(
    "jmask_collected", default=None
)
# `warnings.warn_explicit` keeps its once-per-line memory in the registry of a file.
_registries: dict[str, dict[str | tuple[str, type[Warning], int], int]] = {}
# Dense gradients that were returned as such.
_expected = SideTable[bool]()
# Bytes from which a table is reported that is used as a whole.
LARGE = 2**20
_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), jax.__file__)
)
_INSTALLED = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


class Place(NamedTuple):
    """A line of the user's code, and the line of an installed package (flax) that it led to."""

    file: str
    line: int
    through: tuple[str, int] | None = None

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}"
        return f"{at}, in {self.through[0]}:{self.through[1]}" if self.through else at


class Fallback(NamedTuple):
    """A report that sparse storage was left."""

    message: str  # what became dense and why
    place: Place | None  # where
    remedy: str = ""  # what to write instead, a sentence, or nothing


class StorageFallbackWarning(UserWarning):
    """A sparse value was made dense, which costs O(table) instead of O(rows touched).

    Raised as an exception under [`jmask.strict`][jmask.strict].
    """


@contextlib.contextmanager
def setting(variable: contextvars.ContextVar[_T], value: _T) -> Iterator[_T]:
    """Context in which a variable has a value."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


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
    with setting(_strict, True):
        yield


@contextlib.contextmanager
def collected() -> Iterator[list[Fallback]]:
    """Context in which fallbacks are neither warned of nor raised: yields a list of them.

    For a trial trace: the real one reports them.
    """
    reports: list[Fallback] = []
    with setting(_collected, reports):
        yield reports


def report_fallback(message: str, place: Place | None = None, remedy: str = "") -> None:
    """Warn that sparse storage was left, once per place; raise under `strict()`.

    See `Fallback` for the arguments; the place is that which called jmask by default.
    """
    reports = _collected.get()
    if reports is not None:
        reports.append(Fallback(message, place or _callers_line(), remedy))
        return
    if place is not None:
        message = f"{message} (at {place})"
    if remedy:
        message = f"{message}. {remedy}"
    if _strict.get():
        raise StorageFallbackWarning(message)
    file, line, _ = place or _callers_line()
    registry = _registries.setdefault(file, {})
    warnings.warn_explicit(message, StorageFallbackWarning, file, line, registry=registry)


def expect_dense(x: jax.Array) -> None:
    """Note that jmask returned `x`, the dense gradient of a table, and has reported it."""
    _expected.note(x, True)


def is_expected_dense(x: jax.Array) -> bool:
    """Decide whether `x` itself was noted by `expect_dense`."""
    return bool(_expected.of(x))


def place_among(lines: Iterable[tuple[str, int]]) -> Place | None:
    """Return the user's line among the (file, line) of a call stack, innermost first.

    It is the innermost that is neither in an installed package nor in jmask. If everything
    is installed, the innermost that is not in jax or jmask.
    """
    outside = [at for at in lines if not at[0].startswith(_LIBRARIES)]
    if not outside:
        return None
    packages = r"[/\\](site|dist)-packages[/\\]"
    own = (
        (file, line)
        for file, line in outside
        if not (re.search(packages, file) or file.startswith((*_INSTALLED, "<frozen ")))
    )
    place = next(own, outside[0])
    return Place(*place, None if place == outside[0] else outside[0])


def in_bytes(size: int) -> str:
    """Return a number of bytes as one reads it: 256 B, 25.6 MB; a symbolic one as it is."""
    if not is_known(size):
        return f"{size} B"
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= factor:
            number = size / factor
            return f"{number:.1f} {unit}" if number < 100 else f"{number:,.0f} {unit}"
    return f"{size} B"


def _callers_line() -> Place:
    """Return the innermost line of the user's code that is being run."""
    stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
    lines = [(call.filename, call.lineno or 0) for call in stack]
    return place_among(lines) or Place(*lines[-1])
