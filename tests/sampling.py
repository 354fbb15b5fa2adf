"""Large tables of cases: some of them by default, all of them with `-m exhaustive`.

    @pytest.mark.sampled                                        # two of its cases by default
    @pytest.mark.parametrize("name", CASES)

    @pytest.mark.parametrize("name", chosen(["adam"], CASES))   # these by default

What a test must have of each kind is chosen; which others it has does not matter.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

_CASES = 2


def chosen(default: list[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters of which those in `default` are run by default, of `every` the rest not."""
    rest = (case for case in every if case not in default)
    return [*default, *(pytest.param(*_values(x), marks=pytest.mark.exhaustive) for x in rest)]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def leave_the_rest(items: list[pytest.Item]) -> None:
    """Mark as exhaustive all but some cases of each test that is marked as sampled.

    Checksums of their names choose them: at random, for each test otherwise, the same always.
    """
    of_test = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("exhaustive"):
            of_test[item.nodeid.partition("[")[0]].append(item)
    for cases in of_test.values():
        cases.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in cases[_CASES:]:
            item.add_marker(pytest.mark.exhaustive)
