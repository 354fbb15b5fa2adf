"""Lines of Criteo's click logs, and batches of them.

A line is a label, 0 or 1, then 13 counts and 26 categories in hexadecimal, with tabs between
them. Counts and categories may be missing. Criteo's own logs have one value in a category;
here it may be a list, with commas, as pages that a user has seen:

    0 <tab> 1 <tab> <tab> 5 ... <tab> 68fd1e64,05db9164 <tab> <tab> fb936136 ...

Lines are read as they are needed: a file may be larger than the memory. That of Criteo's
Kaggle challenge is `train.txt`, those of the Terabyte data set are `day_0.gz` to `day_23.gz`.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

import jmask
from common.program import ExampleError

COUNTS, CATEGORIES = 13, 26
BATCH = 1024

Batch = dict[str, Any]

_COUNT = rb"(?:-?\d{1,18})?"
_CATEGORY = rb"(?:[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{1,8})*)?"
_LINE = re.compile(
    b"[01]" + (b"\t" + _COUNT) * COUNTS + (b"\t" + _CATEGORY) * CATEGORIES + b"\r?\n?"
)


class DataError(ExampleError):
    """Data that cannot be learned from; the message says why."""


def lines_of_file(path: Path) -> Iterator[bytes]:
    """Return the lines of a file, which gzip may have compressed (`.gz`)."""
    with _readable(path), path.open("rb"):
        pass  # a file that is not there is an error now, not at the first line
    return _lines(path)


def _lines(path: Path) -> Iterator[bytes]:
    opened = gzip.open if path.suffix == ".gz" else open
    with _readable(path), opened(path, "rb") as file:
        yield from file


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {reason}") from error


def batches(lines: Iterable[bytes], rows: int, start: int, name: str) -> Iterator[Batch]:
    """Yield batches of `BATCH` lines each, without those left over at the end.

    Args:
        lines: of the data, from its beginning.
        rows: of a table; categories are hashed to ids below it.
        start: how many batches to pass over.
        name: what the lines are from, for messages.

    Yields:
        "labels" (b,) and "counts" (b, 13), float32; and "bags", the ids of each category,
        "C1" to "C26", as `jmask.PaddedBags` of b bags.
    """
    rest = islice(lines, start * BATCH, None)
    for first in count(start * BATCH + 1, BATCH):
        some = list(islice(rest, BATCH))
        for number, line in enumerate(some, first):
            if not _LINE.fullmatch(line):
                raise DataError(f"{name}, line {number}: {_fault(line)}")
        if len(some) < BATCH:
            return
        yield _batch(some, rows)


def _batch(lines: list[bytes], rows: int) -> Batch:
    fields = [line.rstrip(b"\r\n").split(b"\t") for line in lines]
    return {
        "labels": np.array([f[0] == b"1" for f in fields], np.float32),
        "counts": np.array(
            [[int(x or 0) for x in f[1 : 1 + COUNTS]] for f in fields], np.float32
        ),
        "bags": jmask.pad_bags(
            {
                f"C{i + 1}": [_ids(f[1 + COUNTS + i], rows) for f in fields]
                for i in range(CATEGORIES)
            }
        ),
    }


def _ids(category: bytes, rows: int) -> list[int]:
    # These numbers are hashes already.
    return [int(value, 16) % rows for value in category.split(b",")] if category else []


def _fault(line: bytes) -> str:
    """Say what is wrong with a line."""
    label, *rest = line.rstrip(b"\r\n").split(b"\t")
    expected = COUNTS + CATEGORIES
    if len(rest) != expected:
        return f"expected {1 + expected} fields with tabs between them, got {1 + len(rest)}"
    if label not in (b"0", b"1"):
        return f"expected the label 0 or 1, got {_shown(label)}"
    for number, field in enumerate(rest):
        is_count = number < COUNTS
        if not re.fullmatch(_COUNT if is_count else _CATEGORY, field):
            wanted = "an integer" if is_count else "hexadecimal numbers of up to 8 digits"
            return f"expected {wanted} in field {number + 2}, got {_shown(field)}"
    return f"expected a line feed at the end, got {_shown(line[-2:])}"


def _shown(field: bytes) -> str:
    text = field.decode(errors="backslashreplace")
    return repr(text if len(text) <= 20 else f"{text[:20]}...")
