"""For the site generator: docstrings of jmask in the form that its parser of them knows.

- That of a function is taken as it is once jmask is imported: some are completed then.
- `Example:` becomes `Examples:`, a section of doctests.
- A function that another one has made (`nansum`) has the docstring it was given.
- Names that share a description come to stand on one line: `a, b, c: finite.`
"""

import importlib
import inspect
import operator
import re
import types
from typing import Any

import griffe

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
        is_made = obj.is_function or not obj.docstring.value
        text = _when_imported(obj) if is_made else obj.docstring.value
        text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)
        text = _NAMES.sub(lambda match: f"{match[1]}{' '.join(match[2].split())}:", text)
        obj.docstring.value = text


def _when_imported(obj: griffe.Object) -> str:
    module = obj.module.path
    imported = operator.attrgetter(obj.path.removeprefix(f"{module}."))
    return inspect.getdoc(imported(importlib.import_module(module))) or ""
