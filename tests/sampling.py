"""Large tables of cases: some of them by default, the rest `slow`.

    @pytest.mark.sampled                                        # one of its cases by default
    @pytest.mark.parametrize("name", CASES)

    pytestmark = pytest.mark.sampled                            # the same for a whole file
    pytestmark = pytest.mark.sampled(15)                        # one in 15 of its tests

    @pytest.mark.parametrize("name", chosen(["adam"], CASES))   # these by default

Cases that come first are chosen; a sample takes any. Of the tests in `smoke_tests.txt` these
are the default tier, for which a newcomer waits; all others are slow. What no run leaves out,
though it has no time for everything, is marked `each`.
"""

import os
import zlib
from collections import defaultdict
from pathlib import Path

import pytest

# A run that has no time for everything: at most so many slow cases of each test, and a quarter
# of the random ones.
_MOST = int(os.environ.get("JMASK_CASES") or 10**9)
# Cases of a test that are in the default tier.
_SMOKE_CASES = 2


def smoke_tests():
    """Return the names of the tests in the default tier: "tests/base/test_norms.py::test_x"."""
    lines = (Path(__file__).parent / "smoke_tests.txt").read_text().splitlines()
    pairs = [line.split(":") for line in lines if ":" in line and not line.startswith("#")]
    return {f"tests/{file}::{name}" for file, names in pairs for name in names.split()}


def chosen(default, every):
    """Return the parameters `default`, and all others of `every` as slow ones."""
    rest = (case for case in every if case not in default)
    return [*default, *(pytest.param(*_values(x), marks=pytest.mark.slow) for x in rest)]


def few_or_many(few, many):
    """Give a test a `count` of examples, a few by default and many among the slow ones."""
    many = many if "JMASK_CASES" not in os.environ else max(few, many // 4)
    return pytest.mark.parametrize("count", chosen([few], [many]))


def _values(case):
    return case if isinstance(case, tuple) else (case,)


def mark_the_rest_slow(items):
    """Mark as slow all but a sample of the tests that are marked as sampled.

    Returns:
        slow cases that are more than `JMASK_CASES` of a test, not to be run.
    """
    of_test, of_file, slow = defaultdict(list), defaultdict(list), defaultdict(list)
    for item in items:
        marks = {mark.args for mark in item.iter_markers("sampled")}
        if () in marks and not item.get_closest_marker("slow"):
            of_test[_test(item)].append(item)
        for (one_in,) in marks - {()}:
            of_file[item.path, one_in].append(item)
    for cases in of_test.values():
        for item in _shuffled(cases)[1:]:
            item.add_marker(pytest.mark.slow)
    for (_, one_in), tests in of_file.items():
        fast = [item for item in tests if not item.get_closest_marker("slow")]
        for item in set(fast) - set(fast[::one_in]):
            item.add_marker(pytest.mark.slow)
    first, smoke = defaultdict(list), smoke_tests()
    for item in items:
        if not (item.get_closest_marker("slow") or item.get_closest_marker("needs")):
            first[_test(item)].append(item)
    rest_of_default = set()
    for test, cases in first.items():
        is_doctest = not test.startswith("tests/")
        is_smoke = is_doctest or "::".join(test.split("::")[:2]) in smoke
        for item in _shuffled(cases)[_SMOKE_CASES if is_smoke else 0 :]:
            item.add_marker(pytest.mark.slow)
            rest_of_default.add(item)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("each"):
            slow[_test(item)].append(item)
    # Those first of which the default tier has none.
    by_tier = lambda items: sorted(_shuffled(items), key=rest_of_default.__contains__)
    return [item for cases in slow.values() for item in by_tier(cases)[_MOST:]]


def all_but_a_sample(items):
    """Return all but one in `JMASK_ONE_IN`, if it is set: not to be run."""
    one_in = int(os.environ.get("JMASK_ONE_IN") or 1)
    return [item for item in items if _checksum(item) % one_in]


def _test(item):
    return item.nodeid.partition("[")[0]


def _shuffled(cases):
    """Order by checksums of names: at random, for each test otherwise, the same always."""
    return sorted(cases, key=_checksum)


def _checksum(item):
    return zlib.crc32(item.nodeid.encode())
