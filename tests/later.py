"""Modules that take long to import, imported when a test first uses one.

    nnx = later("flax.nnx")      # imported by `nnx.Embed`

So that collecting the tests, which each process does, imports none of them.
"""

import importlib


class later:  # noqa: N801
    """The module of a name, for a test module to use in its functions."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("__"):  # pytest looks for some in all that a module has
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
