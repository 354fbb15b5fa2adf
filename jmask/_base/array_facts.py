"""What is known of traced arrays, kept next to them and not in any tree.

FACTS.note(x, "rows of y")       x is a tracer
FACTS.of(x)                      "rows of y", in the same trace
FACTS.of(jax.jit(f)(x))          None: what a call returns is another array
"""

import weakref
from typing import Generic, TypeVar

import jax

Fact = TypeVar("Fact")


class ArrayFacts(Generic[Fact]):
    """One fact for each traced array, by the identity of the array.

    It goes with its array, and keeps neither the array nor its trace alive.
    """

    # Tracers have no hash, and `==` of arrays is elementwise, so this is no WeakKeyDictionary:
    # the key is the address, which the callback of the weak reference removes before it is used
    # again.

    def __init__(self) -> None:
        self._facts: dict[int, tuple[weakref.ref[jax.Array], Fact]] = {}

    def note(self, x: jax.Array, fact: Fact) -> None:
        """Keep a fact about a traced array, in place of what was known of it."""
        if isinstance(x, jax.core.Tracer):
            key, facts = id(x), self._facts
            facts[key] = (weakref.ref(x, lambda _: facts.pop(key, None)), fact)

    def of(self, x: jax.Array) -> Fact | None:
        """Return the fact about an array, or None."""
        reference, fact = self._facts.get(id(x), (None, None))
        return fact if reference is not None and reference() is x else None

    def __len__(self) -> int:
        return len(self._facts)
