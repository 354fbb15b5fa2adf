"""Batches of ids: uniform, with hot rows as in text or clicks, and without duplicates."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=4)
def batches(ids: str, rows: int, lookups: int, count: int) -> list[np.ndarray]:
    """`count` batches of `lookups` int32 ids below `rows`, the same ones in every call."""
    draw = _DISTRIBUTIONS[ids](rows, np.random.default_rng(0))
    return [draw(lookups).astype(np.int32) for _ in range(count)]


@lru_cache(maxsize=4)
def bag_batches(
    rows: int, tables: int, bags: int, lookups: int, count: int
) -> list[np.ndarray]:
    """`count` batches of bags: the lengths (tables, bags), then all ids, in one array.

    One table has bags of equal length. Those of several have lengths of equal frequency, from
    1 on, and the lookups are those of a batch on the average.
    """
    rng = np.random.default_rng(0)
    mean = lookups / tables / bags

    def batch() -> np.ndarray:
        lengths = np.full((1, bags), round(mean))
        if tables > 1:
            lengths = rng.integers(1, round(2 * mean), (tables, bags))
        ids = rng.integers(0, rows, lengths.sum())
        return np.concatenate([lengths.ravel(), ids]).astype(np.int32)

    return [batch() for _ in range(count)]


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
