"""The Python blocks of README and docs run, and print what they say they print."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks(page):
    """Comments at the end of a block are its output."""
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, str(page), "exec"), namespace)
        lines = block.rstrip().splitlines()
        expected = []
        while lines and lines[-1].startswith("# "):
            expected.insert(0, lines.pop()[2:])
        assert printed.getvalue().splitlines() == expected
