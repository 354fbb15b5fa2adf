"""Keep facts about objects that take no attributes: tracers, and the functions of a user.

names = SideTable[str]()
names.note(x, "weights")        x is not kept
names.of(x)                     "weights", as long as x lives
"""

import weakref
from typing import Generic, TypeVar

_Fact = TypeVar("_Fact")


class SideTable(Generic[_Fact]):
    """Facts about objects, by identity, that keep no object alive."""

    # Not all of them have a hash, and `==` of arrays is elementwise, so this is no
    # WeakKeyDictionary: the key is the address, which the callback of the weak reference
    # removes before it is used again.

    def __init__(self) -> None:
        self._facts: dict[int, tuple[weakref.ref[object], _Fact]] = {}

    def note(self, x: object, fact: _Fact) -> None:
        """Keep a fact about an object, in place of what was known of it."""
        key, facts = id(x), self._facts
        facts[key] = weakref.ref(x, lambda _: facts.pop(key, None)), fact

    def of(self, x: object) -> _Fact | None:
        """Return what is known of an object, or None."""
        reference, fact = self._facts.get(id(x), (None, None))
        return fact if reference is not None and reference() is x else None

    def __len__(self) -> int:
        return len(self._facts)
