"""Tables of functions, written as the expressions that they return.

functions("x, y", globals())("x + y; -x")   {"x + y": lambda x, y: x + y, "-x": lambda x, y: -x}
"""

import re
from collections.abc import Callable
from typing import Any

Table = dict[str, Callable[..., Any]]


def functions(arguments, names):
    """A reader of tables: a function for each expression between semicolons, by its text.

    `names` are the globals of the test module, to which warnings point. What is imported for
    such a text alone must stand in them by name: a linter does not see its use.
    """

    def read(text):
        lines = (" ".join(line.split()) for line in text.split(";"))
        code = {line: f"lambda {arguments}: {line}" for line in lines}
        return {k: eval(compile(x, names["__file__"], "eval"), names) for k, x in code.items()}

    return read


def rows(text):
    """The parts of each row, between bars; what is indented more goes on with a row."""
    found = re.split(r"\n    (?=\S)", text.rstrip())[1:]
    return [[part.strip() for part in re.split(r" \|\s", row)] for row in found]


def named(arguments, names):
    """A reader of tables of rows, a name and an expression: the functions by their names."""
    read = functions(arguments, names)
    return lambda text: {name: f for name, code in rows(text) for f in read(code).values()}
