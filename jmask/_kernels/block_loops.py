"""Loops over blocks of rows, side by side in one loop.

    loop 1   A A A          one loop of three rounds:  A B,  A B,  A
    loop 2   B B

XLA's CPU runtime gives the operations of a loop's body to several cores where none needs what
another computes. Two loops it runs one after the other, though they are of different tables:
their temporaries lie in the same memory (jaxlib 0.10.0 to 0.12.0).
"""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax

_Item = TypeVar("_Item")

# How many loops are in one.
_TOGETHER = min(max(os.cpu_count() or 1, 4), 32)
# Bytes of the rows that are in work at a time, and rows of a block: many enough to be worth
# the overhead of operations, and few enough for caches.
_IN_WORK = 2**23
_SIZES = 256, 4096


@dataclasses.dataclass(frozen=True)
class BlockLoop:
    """A loop over blocks, which are as many as are needed.

    Attributes:
        start: what is carried: (results, anything else).
        block: (number, carried) -> carried. Blocks from `count` on are empty: they change no
            result.
        count: of blocks, a number or a scalar.
        at_most: the greatest count that there can be.
    """

    start: tuple[Any, Any]
    block: Callable[[Any, tuple[Any, Any]], tuple[Any, Any]]
    count: Any
    at_most: int


def block_size(bytes_of_rows: Sequence[int]) -> int:
    """How many rows a block has.

    Args:
        bytes_of_rows: the bytes of a row, of each loop.
    """
    least, most = _SIZES
    in_work = sum(sorted(bytes_of_rows)[-_TOGETHER:])
    return min(max(_IN_WORK // max(in_work, 1), least), most)


def together(items: Sequence[_Item]) -> list[Sequence[_Item]]:
    """The items in groups of as many as run side by side."""
    return [items[i : i + _TOGETHER] for i in range(0, len(items), _TOGETHER)]


def run_side_by_side(loops: Sequence[BlockLoop]) -> list[Any]:
    """The results of each loop. Those of similar lengths run together."""
    order = sorted(range(len(loops)), key=lambda i: -loops[i].at_most)
    results: list[Any] = [None] * len(loops)
    while order:
        longest = loops[order[0]].at_most
        chosen = [i for i in order[:_TOGETHER] if 2 * loops[i].at_most >= longest]
        order = order[len(chosen) :]
        for i, result in zip(chosen, _run([loops[i] for i in chosen]), strict=True):
            results[i] = result
    return results


def _run(loops: Sequence[BlockLoop]) -> list[Any]:
    def blocks(number: Any, carried: list[Any]) -> list[Any]:
        return [loop.block(number, x) for loop, x in zip(loops, carried, strict=True)]

    count = loops[0].count
    for loop in loops[1:]:
        count = jnp.maximum(count, loop.count)
    carried = lax.fori_loop(0, count, blocks, [loop.start for loop in loops])
    return [result for result, _ in carried]
