"""Define what the proof of row-locality knows of a value: an abstract domain, and its joins.

Replicated(uniform)         the same in the dense program and in the one for a few rows; does
                            not vary along the axes in `uniform`, which may be longer in one
RowWise(axis, off_support)  one slice per row along `axis`; in untouched rows it is the constant
                            `off_support`, where that is known (0 for the gradient itself)
RowWise(.., merged)         the same where the axis of rows was merged with others: a ravelled
                            table (V * D,) has merged=(1, D)
NotRowLocal(why)            may differ between the two programs
"""

import dataclasses
from collections.abc import Sequence

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from jmask._base.types import Scalar


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A value both programs agree on.

    Attributes:
        uniform: axes along which it does not vary.
        constant: the scalar it is everywhere, if that is known while tracing, else None.
    """

    uniform: frozenset[int] = frozenset()
    constant: Scalar | None = None


@dataclasses.dataclass(frozen=True)
class RowWise:
    """A value with one slice for each row of a table.

    Attributes:
        table: which table the rows belong to.
        axis: the axis of the rows.
        off_support: the scalar it is in every row the gradient does not touch, or None.
        merged: the sizes of the axes that were merged with the axis of rows, before and
            after it: `axis` is (merged[0], rows, merged[1]) ravelled. Sums over it are still
            known, and splitting it gives the axis of the rows back.
    """

    table: int
    axis: int
    off_support: Scalar | None = None
    merged: tuple[int, int] = (1, 1)

    # The invariant of `merged`: for a table of V rows the axis has merged[0] * V * merged[1]
    # entries, entry (o * V + r) * merged[1] + i being of row r. A reshape may split the axis at
    # these two places and nowhere else; a sum over all of it is a sum over rows all the same.

    def is_aligned(self, other: "RowWise") -> bool:
        """Decide whether the same places along the same axis belong to the same rows."""
        place = (self.table, self.axis, self.merged)
        return place == (other.table, other.axis, other.merged)

    def at(self, axis: int, off_support: Scalar | None) -> "RowWise":
        """Return the same rows along another axis."""
        return dataclasses.replace(self, axis=axis, off_support=off_support)

    def is_off_support(self, value: Scalar) -> bool:
        """Decide whether it is known to be `value` in untouched rows."""
        return self.off_support is not None and bool(self.off_support == value)


@dataclasses.dataclass(frozen=True)
class NotRowLocal:
    """A value that may depend on rows the gradient does not touch."""

    why: str


Kind = Replicated | RowWise | NotRowLocal


def not_row_local(eqn: JaxprEqn, what: str) -> NotRowLocal:
    """Return `NotRowLocal` because of what an equation does, with its source line."""
    place = source_info_util.summarize(eqn.source_info)
    at = f" (at {place})" if place else ""
    return NotRowLocal(f"`{eqn.primitive.name}` {what}{at}")


def join(x: Kind, y: Kind) -> Kind:
    """Return what is known of a value that is one of two."""
    if isinstance(x, NotRowLocal):
        return x
    if isinstance(y, NotRowLocal):
        return y
    if isinstance(x, Replicated) and isinstance(y, Replicated):
        return Replicated(x.uniform & y.uniform, _common(x.constant, y.constant))
    if isinstance(x, RowWise) and isinstance(y, RowWise):
        if not x.is_aligned(y):
            return NotRowLocal("control flow chooses between rows of two tables")
        return x.at(x.axis, _common(x.off_support, y.off_support))
    rows, other = (x, y) if isinstance(x, RowWise) else (y, x)
    assert isinstance(rows, RowWise)
    assert isinstance(other, Replicated)
    if rows.axis not in other.uniform:
        return NotRowLocal("control flow chooses between rows and fixed numbers")
    return rows.at(rows.axis, _common(rows.off_support, other.constant))


def joined(xs: Sequence[Kind], ys: Sequence[Kind]) -> list[Kind]:
    """Join two sequences item by item."""
    return [join(x, y) for x, y in zip(xs, ys, strict=True)]


def _common(x: Scalar | None, y: Scalar | None) -> Scalar | None:
    # By identity first: a nan is in common with itself.
    return x if x is y or (x is not None and y is not None and x == y) else None
