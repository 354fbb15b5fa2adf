"""What README and docs say is so: code prints what it says, targets, files and links exist.

The pages of the API have every public name, and docstrings the arguments that there are.
"""

import ast
import contextlib
import inspect
import io
import itertools
import re
from pathlib import Path

import pytest

import jmask
from jmask._base import types
from scripts import docs_pages
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
    namespace = {}
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
def test_heads_of_tables(page):
    """Each column says what it holds."""
    lines = page.read_text().splitlines()
    for head, below in itertools.pairwise(lines):
        if head.startswith("|") and re.fullmatch(r"\|(:?-+:?\|)+", below):
            assert all(cell.strip() for cell in head.strip("|").split("|")), head


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links(page):
    text = re.sub(r"`[^`\n]*`", "", _FENCE.sub("", page.read_text()))
    for target in re.findall(r"\]\(([^)\s#]+)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_code_fits_the_page():
    """What a program prints, in comments at the end of a block, may be longer."""
    for page in PAGES:
        for _, block in _FENCE.findall(page.read_text()):
            assert all(len(x) <= 86 or x.startswith("# ") for x in block.splitlines()), page


def test_readme_is_short():
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


# --- pages of the API -----------------------------------------------------------------

MODULES = (jmask, *(getattr(jmask, name) for name in docs_pages.MODULES))


def test_every_public_name_has_an_entry():
    """Or an anchor."""
    text = "\n".join(docs_pages.api_pages().values())
    found = set(re.findall(r"^::: (\S+)$", text, re.M)) | set(re.findall(r"\{ #(\S+) \}", text))
    public = {f"{m.__name__}.{name}" for m in MODULES for name in docs_pages.public_names(m)}
    assert public - {f"jmask.{name}" for name in docs_pages.MODULES} <= found


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_nothing_else_is_public(module):
    """No module that is imported, and no helper: what completion shows is what is offered."""
    shown = {name for name in vars(module) if not name.startswith("_")}
    assert shown - set(docs_pages.public_names(module)) == set()


def _documented_objects():
    for module in MODULES:
        for name in docs_pages.public_names(module):
            found = getattr(module, name)
            if not getattr(found, "__module__", "").startswith("jmask"):
                continue
            yield f"{module.__name__}.{name}", found
            for key in vars(found) if isinstance(found, type) else ():
                if not key.startswith("_") and callable(getattr(found, key)):
                    yield f"{module.__name__}.{name}.{key}", getattr(found, key)


FUNCTIONS = dict(_documented_objects())


@pytest.mark.parametrize("path", FUNCTIONS)
def test_arguments_in_docstrings(path):
    """A section Args says something of every argument, and of no other."""
    function = FUNCTIONS[path]
    section = re.search(
        r"^Args:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(function) or "", re.S | re.M
    )
    if section is None:
        return
    entries = re.findall(r"^    (\S(?:[^:`]|\n {5,})*):", section[1], re.M)
    assert entries, "the section Args describes no argument"
    entries = [re.sub(r"\(.*?\)( or \(.*?\))*", "", entry, flags=re.S) for entry in entries]
    named = {name.strip(" *\n") for entry in entries for name in entry.split(",")}
    assert named == set(inspect.signature(function).parameters) - {"self"}


@pytest.mark.parametrize("path", FUNCTIONS)
def test_help_names_types(path):
    """As they are written: a union of all that becomes an array fills a page of `help`."""
    try:
        parameters = inspect.signature(FUNCTIONS[path]).parameters.values()
    except ValueError:  # of an exception, made by the interpreter
        assert issubclass(FUNCTIONS[path], Exception)
        return
    assert [str(x) for x in parameters if len(str(x)) > 100] == []


def test_names_of_types_have_an_entry():
    """Of those in signatures: each that `_base.types` defines has a docstring below it."""
    page = docs_pages.api_pages()["api/types.md"]
    defined = (x for x in ast.parse(inspect.getsource(types)).body if isinstance(x, ast.Assign))
    names = {ast.unparse(node.targets[0]) for node in defined}
    public = {name for name in names if not name.startswith("_")}
    assert public == set(re.findall(r"^\| `(\w+)` \| \S", page, re.M))
