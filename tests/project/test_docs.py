"""What README and docs say is so: code prints what it says, targets, files and links exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest

import jmask
from scripts.docs_pages import site_pages

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + DOCS
PAGES.append(ROOT / "examples" / "README.md")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def _name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.sampled(15)
@pytest.mark.rank_promotion
@pytest.mark.parametrize("page", PAGES, ids=_name)
@pytest.mark.dtype_promotion
def test_python_blocks(page):
    """Comments at the end of a block are its output."""
    namespace: dict = {}
    for language, block in _FENCE.findall(page.read_text()):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, str(page), "exec"), namespace)
        lines = block.rstrip().splitlines()
        expected = []
        while lines and lines[-1].startswith("# "):
            expected.insert(0, lines.pop()[2:])
        assert printed.getvalue().splitlines() == expected


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands(page):
    """The other blocks are commands, or programs of others: of libraries, `py`, or for XLA.

    Targets of make and files of the repository are there.
    """
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.M)
    targets = {target for rule in rules for target in rule.split()}
    text = page.read_text()
    assert {language for language, _ in _FENCE.findall(text)} <= {
        "python",
        "console",
        "py",
        "mlir",
    }
    commands = [block for language, block in _FENCE.findall(text) if language == "console"]
    commands += re.findall(r"`([^`\n]+)`", text)
    for command in commands:
        for target in re.findall(r"(?:^|[\s$&])make ([a-z][\w-]*)", command):
            assert target in targets, target
        for file in re.findall(
            r"(?:jmask|tests|examples|benchmarks|scripts)/[\w/]+\.py", command
        ):
            assert (ROOT / file).exists(), file


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links(page):
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))
    for target in re.findall(r"\]\(([^)\s#]+)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_readme_is_short():
    """What is longer has a page in docs."""
    assert len((ROOT / "README.md").read_bytes()) <= 6000


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(site_pages())


def test_version():
    """Changelog and citation are those of this version."""
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    cited = re.search(r'^version: "?([^"\n]+)', (ROOT / "CITATION.cff").read_text(), re.M)
    assert newest is not None
    assert cited is not None
    assert newest[1] == cited[1] == jmask.__version__
