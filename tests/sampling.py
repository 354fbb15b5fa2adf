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


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
