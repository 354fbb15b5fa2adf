"""The rooms: imports point to rooms above, and every file is on the list of its room."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "jmask").rglob("*.py"))
ROOMS = re.findall(r"^\| `(_\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)


def _level(module):
    """The number of the room of a module, as its path or its dotted name; faces come last."""
    parts = re.split(r"[./]", str(module))
    return ROOMS.index(parts[1]) if len(parts) > 1 and parts[1] in ROOMS else len(ROOMS)


def test_the_table_has_every_room():
    folders = (path.name for path in (ROOT / "jmask").iterdir() if path.is_dir())
    assert sorted(ROOMS) == sorted(name for name in folders if name != "__pycache__")


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_point_up(file):
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jmask."):
            assert _level(node.module) <= _level(file), f"{file} imports {node.module}"


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_is_on_the_list_of_its_room(room):
    """Lines of the docstring: names of files, at least two spaces, and what they are."""
    tree = ast.parse((ROOT / "jmask" / room / "__init__.py").read_text())
    doc = ast.get_docstring(tree) or ""
    lines = re.findall(r"^ *((?:\w+, )*\w+)  ", doc, re.M)
    listed = [name for line in lines for name in line.split(", ")]
    files = [path.stem for path in (ROOT / "jmask" / room).glob("*.py")]
    assert sorted([*listed, "__init__"]) == sorted(files)
