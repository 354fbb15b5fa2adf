"""For the site generator: docstrings of jmask in the form that its parser of them knows.

- That of a function is taken as it is once jmask is imported: some are completed then.
- `Example:` becomes `Examples:`, a section of doctests.
- Names that share a description come to stand on one line: `a, b, c: finite.`
"""

import importlib
import inspect
import operator
import re
from typing import Any

import griffe

_NAMES = re.compile(r"^( +)((?:\w+,\s+)+\w+):", re.M)


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = _when_imported(obj) if obj.is_function else obj.docstring.value
        text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)
        text = _NAMES.sub(lambda match: f"{match[1]}{' '.join(match[2].split())}:", text)
        obj.docstring.value = text


def _when_imported(obj: griffe.Object) -> str:
    module = obj.module.path
    imported = operator.attrgetter(obj.path.removeprefix(f"{module}."))
    return inspect.getdoc(imported(importlib.import_module(module))) or ""
