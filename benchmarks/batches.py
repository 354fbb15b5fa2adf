"""Batches of ids: uniform, with hot rows as in text or clicks, and without duplicates."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def batches(ids: str, rows: int, lookups: int, count: int) -> list[np.ndarray]:
    """`count` batches of `lookups` int32 ids below `rows`, the same ones in every call."""
    draw = _DISTRIBUTIONS[ids](rows, np.random.default_rng(0))
    return [draw(lookups).astype(np.int32) for _ in range(count)]


def _uniform(rows: int, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    return lambda lookups: rng.integers(0, rows, lookups)


def _zipf(rows: int, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """The k-th most frequent id in proportion to 1 / k, spread over the table."""
    scattered = rng.permutation(rows)

    def draw(lookups: int) -> np.ndarray:
        rank = np.exp(rng.uniform(0, np.log(rows), lookups)).astype(np.int64) - 1
        return scattered[np.clip(rank, 0, rows - 1)]

    return draw


def _unique(rows: int, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    return lambda lookups: np.sort(rng.choice(rows, lookups, replace=False, shuffle=False))


_DISTRIBUTIONS = {"uniform": _uniform, "Zipf": _zipf, "unique": _unique}
