"""The pages of the API have every public name, and docstrings the arguments that there are."""

import inspect
import re

import pytest

import jmask
from jmask._base import types
from scripts import docs_pages

MODULES = (jmask, *(getattr(jmask, name) for name in docs_pages.MODULES))


def _missing(pages):
    """Public names without an entry or an anchor on these pages."""
    text = "\n".join(pages.values())
    found = set(re.findall(r"^::: (\S+)$", text, re.M)) | set(re.findall(r"\{ #(\S+) \}", text))
    public = {f"{m.__name__}.{name}" for m in MODULES for name in docs_pages.public_names(m)}
    return public - {f"jmask.{name}" for name in docs_pages.MODULES} - found


def test_every_public_name_has_an_entry():
    assert _missing(docs_pages.api_pages()) == set()


def test_a_name_that_is_left_out_is_named(monkeypatch):
    title, names = docs_pages.PAGES["embeddings"]
    fewer = names.replace(" renormalize", " renormalise")
    monkeypatch.setitem(docs_pages.PAGES, "embeddings", (title, fewer))
    with pytest.raises(ValueError, match=r"\['renormalize'\] .* \['renormalise'\]"):
        docs_pages.api_pages()


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_public_names(module):
    names = docs_pages.public_names(module)
    assert all(hasattr(module, name) for name in names)


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


def test_names_of_types_have_an_entry():
    """Of those in signatures: each that `_base.types` defines has a docstring below it."""
    page = docs_pages.api_pages()["api/types.md"]
    names = {name for name in vars(types) if name[0].isupper()} - {"Any", "Protocol", "Shaped"}
    imported = {"ArrayLike", "Callable", "Literal", "PyTreeDef", "Sequence", "Var"}
    assert names - imported == set(re.findall(r"^\| `(\w+)` \| \w", page, re.M))
