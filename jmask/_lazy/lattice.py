"""What row locality knows of a value: it is shared, per row, or mixed.

Shared(uniform)     the same in the dense program and in the one for a few rows; does
                    not vary along the axes in `uniform`, which may be longer in one
PerRow(axis, rest)  one slice per row along `axis`; in untouched rows it is the
                    constant `rest`, where that is known (0 for the gradient itself)
PerRow(.., merged)  the same where the axis was made of that of rows and of others, as a
                    ravelled table (V * D,) is with merged=(1, D)
Mixed(why)          may differ between the two programs
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn


@dataclasses.dataclass(frozen=True)
class Shared:
    """A value both programs agree on.

    Attributes:
        uniform: axes along which it does not vary.
        constant: the scalar it is everywhere, if that is known while tracing, else None.
    """

    uniform: frozenset[int] = frozenset()
    constant: Any = None


@dataclasses.dataclass(frozen=True)
class PerRow:
    """A value with one slice for each row of a table.

    Attributes:
        table: which table the rows belong to.
        axis: the axis of the rows.
        rest: the scalar it is in every row the gradient does not touch, or None.
        merged: how many entries the axes have that were merged with that of the rows, before
            it and after it. Of what is merged sums are known, and its parts if it is split.
    """

    table: int
    axis: int
    rest: Any = None
    merged: tuple[int, int] = (1, 1)

    def is_aligned(self, other: "PerRow") -> bool:
        """Whether the same places along the axes belong to the same rows."""
        return (self.table, self.merged) == (other.table, other.merged)

    def at(self, axis: int, rest: Any) -> "PerRow":
        """The same rows along another axis."""
        return dataclasses.replace(self, axis=axis, rest=rest)

    def rests_at(self, value: Any) -> bool:
        """Whether it is known to be `value` in untouched rows."""
        return self.rest is not None and bool(self.rest == value)


@dataclasses.dataclass(frozen=True)
class Mixed:
    """A value that may depend on rows the gradient does not touch."""

    why: str


Kind = Shared | PerRow | Mixed


def mixed(eqn: JaxprEqn, what: str) -> Mixed:
    """`Mixed` because of what an equation does, with its place in the source."""
    place = source_info_util.summarize(eqn.source_info)
    at = f" (at {place})" if place else ""
    return Mixed(f"`{eqn.primitive.name}` {what}{at}")


def join(x: Kind, y: Kind) -> Kind:
    """What is known of a value that is one of two."""
    if isinstance(x, Mixed):
        return x
    if isinstance(y, Mixed):
        return y
    if isinstance(x, Shared) and isinstance(y, Shared):
        return Shared(x.uniform & y.uniform, _common(x.constant, y.constant))
    if isinstance(x, PerRow) and isinstance(y, PerRow):
        if x.axis != y.axis or not x.is_aligned(y):
            return Mixed("control flow chooses between rows of two tables")
        return x.at(x.axis, _common(x.rest, y.rest))
    rows, shared = (x, y) if isinstance(x, PerRow) else (y, x)
    assert isinstance(rows, PerRow)
    assert isinstance(shared, Shared)
    if rows.axis not in shared.uniform:
        return Mixed("control flow chooses between rows and fixed numbers")
    return rows.at(rows.axis, _common(rows.rest, shared.constant))


def joined(xs: Sequence[Kind], ys: Sequence[Kind]) -> list[Kind]:
    """`join` of two sequences, item by item."""
    return [join(x, y) for x, y in zip(xs, ys, strict=True)]


def _common(x: Any, y: Any) -> Any:
    # By identity first: a nan is in common with itself.
    return x if x is y or (x is not None and y is not None and x == y) else None
