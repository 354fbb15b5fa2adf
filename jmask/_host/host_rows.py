"""Rows of NumPy arrays, in memory or in files, read and written by their numbers.

arrays  table (V, 16) float32, sum of squares (V, 1) float32      each a list of V items
read    ids [2, 7], capacity 3     ->     (3, 16), (3, 1): rows 2 and 7, and one of zeros
"""

import math
import mmap
from collections.abc import Iterator, Sequence

import numpy as np

from jmask._base.types import HostArray, KeyPath

# Bytes of a block where all rows are gone through: resident memory stays small.
_BLOCK = 1 << 24


def as_items(array: HostArray) -> HostArray:
    """View an array (V, *row) as (V,) items of bytes.

    `np.put` of items is four times as fast as `array[ids] = rows`, which copies each row by a
    loop over its numbers: 0.3 and 1.2 ms for 8,192 rows of 64 bytes (NumPy 2.4).
    """
    count, width = array.shape[0], math.prod(array.shape[1:])
    item = f"V{width * array.dtype.itemsize}"
    return np.asarray(array).reshape(count, width).view(item).reshape(count)


def blocks(count: int, array: HostArray) -> Iterator["slice[int, int]"]:
    """Yield slices of `count` rows of an array (V, *row), each of some megabytes."""
    size = max(_BLOCK * array.shape[0] // array.nbytes, 1)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def advise(array: HostArray, advice: str) -> None:
    """Tell the operating system how an array is read, if it is in a file.

    Linux reads up to some megabytes around each page that is touched (`read_ahead_kb`): for
    "MADV_RANDOM" rows it does not, else 200,000 rows of a table had all its 6.4 GB read.
    """
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, advice):
        base.madvise(getattr(mmap, advice))


def copy_rows(source: HostArray, target: HostArray) -> None:
    """Copy an array block by block; what is equal is not written, so that files stay sparse."""
    old, new = as_items(target), as_items(source)
    advise(source, "MADV_NORMAL")
    advise(target, "MADV_NORMAL")
    for rows in blocks(len(new), source):
        # Compared as bytes: -0.0 equals 0.0, and nan not itself.
        if new[rows].tobytes() != old[rows].tobytes():
            old[rows] = new[rows]
    advise(source, "MADV_RANDOM")
    advise(target, "MADV_RANDOM")


class HostRows:
    """The rows of one table on the host.

    Attributes:
        path: of the table among the parameters.
        names, arrays: of parameter and slots, NumPy arrays (V, *row), C-contiguous.
        changed (V,): which rows were written since the last checkpoint; None before the first.
    """

    def __init__(self, path: KeyPath, names: Sequence[str], arrays: Sequence[HostArray]):
        self.path, self.names, self.arrays = path, names, arrays
        self.changed: HostArray | None = None
        self._items = [as_items(x) for x in arrays]
        for x in arrays:
            advise(x, "MADV_RANDOM")

    def __len__(self) -> int:
        return len(self.arrays[0])

    def read(self, ids: HostArray, capacity: int) -> list[HostArray]:
        """Return the rows `ids` of each array, with zeros behind them: (capacity, *row)."""
        rows = [np.zeros((capacity, *x.shape[1:]), x.dtype) for x in self.arrays]
        for items, out in zip(self._items, rows, strict=True):
            np.take(items, ids, out=as_items(out)[: len(ids)], mode="clip")
        return rows

    def write(self, ids: HostArray, rows: Sequence[HostArray]) -> None:
        """Write the first len(ids) rows of each array to the rows `ids`."""
        if self.changed is not None:
            self.changed[ids] = True
        for items, new in zip(self._items, rows, strict=True):
            np.put(items, ids, as_items(np.ascontiguousarray(new))[: len(ids)])
