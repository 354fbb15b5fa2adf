"""For the site generator: docstrings of jmask in the form that its parser of them knows.

- That of a function is taken as it is once jmask is imported: some are completed then.
- `Example:` becomes `Examples:`, a section of doctests.
- A function that another one has made (`nansum`) has the docstring it was given, below its
  signature.
- Names that share a description come to stand on one line: `a, b, c: finite.`
- `ids (n,): integers` is `ids: shape (n,), integers`: a shape is no type.
- Below it comes a link to the source.
"""

import importlib
import inspect
import operator
import re
import types
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parent.parent
REPOSITORY = "https://github.com/jmask/jmask"
_SHAPES = re.compile(r"^( +\w+) (\([^():]*\)(?: or \([^():]*\))*):", re.M)
_NAMES = re.compile(r"^( +)((?:\w+,\s+)+\w+):", re.M)


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None and obj.is_attribute and obj.parent.is_module:
            made = getattr(importlib.import_module(obj.module.path), obj.name, None)
            if isinstance(made, types.FunctionType) and made.__module__ == obj.module.path:
                obj.docstring = griffe.Docstring("", parent=obj)
                obj.value = None
        if obj.docstring is None:
            return
        is_made = not obj.docstring.value
        text = _when_imported(obj) if is_made or obj.is_function else obj.docstring.value
        if is_made:
            text = f"`{obj.name}{_without_annotations(made)}`\n\n{text}"
        text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)
        text = _NAMES.sub(lambda match: f"{match[1]}{' '.join(match[2].split())}:", text)
        text = _SHAPES.sub(lambda match: f"{match[1]}: shape `{match[2]}`,", text)
        obj.docstring.value = text + _source_link(obj)


def _without_annotations(function: types.FunctionType) -> inspect.Signature:
    parameters = inspect.signature(function).parameters.values()
    return inspect.Signature([x.replace(annotation=x.empty) for x in parameters])


def _source_link(obj: griffe.Object) -> str:
    """A link to the lines that define a function or a class, after its docstring."""
    if not (obj.is_function or obj.is_class) or obj.lineno is None:
        return ""
    path = Path(str(obj.filepath)).resolve().relative_to(ROOT.resolve()).as_posix()
    lines = f"L{obj.lineno}-L{obj.endlineno}"
    return f"\n\n[Source]({REPOSITORY}/blob/main/{path}#{lines}){{ .jmask-source }}\n"


def _when_imported(obj: griffe.Object) -> str:
    module = obj.module.path
    imported = operator.attrgetter(obj.path.removeprefix(f"{module}."))
    return inspect.getdoc(imported(importlib.import_module(module))) or ""
