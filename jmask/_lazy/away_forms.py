"""What a value is in a row that has no gradient: a form in the entries of the row.

    0.9 m                   entries {m: 0.9}
    p - 0.1 m / (√v + e)    entries {p: 1}, quotients (m, -0.1, √v + e)
    √v + e                  root
    tanh(m)                 unknown

An entry is the parameter of a row or a number of its state; factors are numbers that all rows
share. A form is a sum of entries, quotients and signs, or a root, or unknown.
"""

import dataclasses
from typing import Any, NamedTuple

# The number of a table, and 0 for its parameter or 1, 2, ... for its state.
Entry = tuple[int, int]


class Factor(NamedTuple):
    """`ones` + `rest`: what is near 1 keeps its digits."""

    ones: int
    rest: Any

    def times(self, x: Any) -> "Factor":
        if isinstance(self.rest, int | float):  # in Python's digits
            return Factor(0, _times(x, self.ones + self.rest))
        return Factor(0, _times(x, self.ones) + _times(x, self.rest))

    def plus(self, other: "Factor") -> "Factor":
        return Factor(self.ones + other.ones, self.rest + other.rest)

    def value(self) -> Any:
        return self.rest if self.ones == 0 else self.ones + self.rest


@dataclasses.dataclass(frozen=True)
class Root:
    """√(y s_b + e0), plus e1 if it is not None; `e0` is None if it is 0."""

    b: Entry
    y: Any
    e0: Any
    e1: Any


@dataclasses.dataclass(frozen=True)
class Away:
    """The form of a value in a row that has no gradient.

    Attributes:
        entries: factors of entries.
        constant: what all rows share, added; None for 0.
        quotients: factors of s_a / root, by a and b.
        signs: factors of signs of entries.
        root: the value is this root; all else is empty then.
        inverse: it is 1 / this root.
        unknown: it is none of these, and why.
    """

    entries: dict[Entry, Factor] = dataclasses.field(default_factory=dict)
    constant: Any = None
    quotients: tuple[tuple[Entry, Any, Root], ...] = ()
    signs: dict[Entry, Any] = dataclasses.field(default_factory=dict)
    root: Root | None = None
    inverse: Root | None = None
    unknown: str | None = None

    @property
    def is_zero(self) -> bool:
        return self.is_constant and self.constant is None

    @property
    def is_constant(self) -> bool:
        kinds = (self.entries, self.quotients, self.signs, self.root, self.inverse)
        return self.unknown is None and not any(kinds)

    @property
    def is_sum(self) -> bool:
        return self.unknown is None and self.root is None and self.inverse is None

    def single(self) -> tuple[Entry, Any] | None:
        """An entry and its factor, if that is all there is."""
        alone = self.is_sum and not self.quotients and not self.signs and self.constant is None
        if not alone or len(self.entries) != 1:
            return None
        ((entry, factor),) = self.entries.items()
        return entry, factor.value()

    def times(self, x: Any) -> "Away":
        if not self.is_sum:
            return unknown("a root is multiplied")
        return Away(
            {entry: factor.times(x) for entry, factor in self.entries.items()},
            None if self.constant is None else _times(x, self.constant),
            tuple((a, _times(x, c), root) for a, c, root in self.quotients),
            {entry: _times(x, sign) for entry, sign in self.signs.items()},
        )

    def plus(self, other: "Away") -> "Away":
        entries = dict(self.entries)
        for entry, factor in other.entries.items():
            entries[entry] = entries[entry].plus(factor) if entry in entries else factor
        signs = dict(self.signs)
        for entry, sign in other.signs.items():
            signs[entry] = signs[entry] + sign if entry in signs else sign
        constants = [x for x in (self.constant, other.constant) if x is not None]
        constant = sum(constants) if constants else None
        return Away(entries, constant, self.quotients + other.quotients, signs)


ZERO = Away()


def entry(table: int, number: int) -> Away:
    """The form of an entry as it is before the step."""
    return Away({(table, number): Factor(1, 0.0)})


def unknown(why: str) -> Away:
    return Away(unknown=why)


def is_known_zero(x: Any) -> bool:
    return isinstance(x, int | float) and x == 0


def _times(x: Any, y: Any) -> Any:
    if is_known_zero(x) or is_known_zero(y):
        return 0.0
    return y if _is_one(x) else x if _is_one(y) else x * y


def _is_one(x: Any) -> bool:
    return isinstance(x, int | float) and x == 1
