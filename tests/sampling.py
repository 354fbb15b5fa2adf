"""Large tables of cases: some of them by default, all of them with `-m exhaustive`."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Parameters of which one in `every` is run by default; a tuple is several of a case."""
    return [
        case if i % every == 0 else pytest.param(*_values(case), marks=pytest.mark.exhaustive)
        for i, case in enumerate(cases)
    ]


def chosen(default: list[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters of which those in `default` are run by default, of `every` the rest not."""
    rest = (case for case in every if case not in default)
    return [*default, *(pytest.param(*_values(x), marks=pytest.mark.exhaustive) for x in rest)]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
