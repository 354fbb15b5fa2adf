"""Whether the update programs for two numbers of rows differ in their sizes only.

A mean over a table divides by its number of rows:

    for V = 1000 rows       c = div b 1000.0
    for n = 8 rows          c = div b 8.0            another number: not the same program

Run on the touched rows, such a program computes something else than on the table.
"""

from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal, jaxprs_in_params

from jmask._row_kinds import mixed


def difference(x: Jaxpr, y: Jaxpr) -> str | None:
    """Why two programs differ in more than array sizes, or None if they do not."""
    if [eqn.primitive for eqn in x.eqns] != [eqn.primitive for eqn in y.eqns]:
        return "it chooses other operations for tables of another size"
    for left, right in zip(x.eqns, y.eqns, strict=True):
        for a, b in zip(left.invars, right.invars, strict=True):
            both = isinstance(a, Literal) and isinstance(b, Literal)
            if both and not _same_number(a.val, b.val):  # type: ignore[union-attr]
                return mixed(left, "computes with the number of rows").why
        inner = jaxprs_in_params(left.params), jaxprs_in_params(right.params)
        for one, other in zip(*inner, strict=True):
            why = difference(one, other)
            if why is not None:
                return why
    return None


def _same_number(x: Any, y: Any) -> bool:
    return bool(np.all((x == y) | ((x != x) & (y != y))))
