"""What jmask does only since XLA does it slowly on CPUs, each of which can be left out here.

    with left_out("fast gather"):
        step(place, ids)                traced and compiled in here: without it

So a new XLA says by itself which of them it needs no more: the line "jmask, without fast
gather" of the report then has a ratio of 1.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jmask._autodiff import taps as _taps
from jmask._kernels import gathered_rows as _gathered_rows
from jmask._kernels import rows as _rows
from jmask._kernels import update_rows as _update_rows
from jmask._lazy import one_pass as _one_pass

# The name in a `works.Task`: what holds the decision, its name there, and what it is without.
TRICKS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "fast gather": (_rows.Gather, "is_slow_copy", lambda *_: False),
    "gathered gradients": (_taps, "pays", lambda *_: False),
    "bags in blocks": (_gathered_rows, "has_many_rows", lambda *_: False),
    "bags by column": (_gathered_rows, "has_few_columns", lambda *_: False),
    "hashed ids": (_update_rows, "is_hashed", lambda *_: False),
    "tables side by side": (
        _one_pass,
        "updated_together",
        lambda updates: list(map(_update_rows.updated, updates)),
    ),
    "whole small tables": (_one_pass, "is_saturated", lambda *_: False),
}
# The tricks that some program has been made without.
_asked: set[str] = set()
# What is jitted inside jmask is traced once for each name, and not taken from a cache.
_traced_without = jax.make_user_context("")


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    """Make the programs that are traced and compiled inside without this; "" is nothing.

    Raises:
        ValueError: if no program that was traced inside so far asked for the decision.
    """
    if not name:
        yield
        return
    holder, decision, otherwise = TRICKS[name]
    usual = getattr(holder, decision)

    def without(*args: Any) -> Any:
        _asked.add(name)
        return otherwise(*args)

    setattr(holder, decision, without)
    try:
        with _traced_without(name):
            yield
    finally:
        setattr(holder, decision, usual)
    if name not in _asked:
        raise ValueError(f"{name!r} decides nothing in this program: is it {decision!r} still?")
