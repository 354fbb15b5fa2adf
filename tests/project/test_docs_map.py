"""The map of the code in CONTRIBUTING.md has every file, and imports point up in it."""

import ast
import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    path.stem: path for path in sorted((ROOT / "jmask").glob("*.py")) if path.stem != "__init__"
}


def _tables():
    """The names and patterns of files in each table of the map, from the top."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (the_map,) = re.findall(r"^## The map\n(.*?)^## ", text, re.S | re.M)
    for table in the_map.split("\n### ")[1:]:
        places = re.findall(r"^\|[^|]*\|([^|]*)\|$", table, re.M)
        yield re.findall(r"`([\w*]+)`", " ".join(places))


TABLES = list(_tables())


def _place(file):
    """The number of the table that has a file."""
    found = [i for i, names in enumerate(TABLES) for n in names if fnmatch.fnmatch(file, n)]
    assert found, f"jmask/{file}.py is not on the map in CONTRIBUTING.md"
    return found[0]


@pytest.mark.parametrize("file", FILES)
def test_imports_point_up(file):
    """Those at the top of a file; a function may import what is below when it is called."""
    for node in ast.parse(FILES[file].read_text()).body:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("jmask"):
            continue
        path = [part for part in (node.module or "").split(".")[1:] if part]
        for other in path or [alias.name for alias in node.names]:
            assert _place(other) <= _place(file), f"{file} imports {other}"


def test_the_map_has_no_other_files():
    for name in (name for names in TABLES for name in names):
        assert fnmatch.filter(FILES, name), name
