"""Python sources as numbers for a language model: pieces of text, bytes where they are rare.

    if x == 10:         pieces "if", " x", " ==", " 10", ":", ...
    naïve_name          not among the pieces: its bytes, one by one

Nothing is lost: the text can be put together again, so that a model's loss over all pieces is
its bits per byte of text, whatever the vocabulary.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.python_corpus import CorpusError, python_files

BYTES = 256
HELD_OUT = 40  # one file of so many is not trained on
_PIECE = re.compile(r" ?[^\W\d_]+|_+|\d| ?[^\w\s]+|\n[ \t]*|\s")


class Text(NamedTuple):
    """A text as numbers: those below 256 are bytes, the others pieces.

    Attributes:
        pieces: what the numbers from 256 on stand for.
        train, held_out: the numbers of two texts.
        held_out_bytes: how long the second is.
    """

    pieces: list[str]
    train: np.ndarray
    held_out: np.ndarray
    held_out_bytes: int

    @property
    def vocabulary(self) -> int:
        return BYTES + len(self.pieces)


def read_text(files: list[Path], most_bytes: int, vocabulary: int) -> Text:
    """Read Python sources of this machine, or the files given.

    Raises:
        CorpusError: if there is too little text.
    """
    train: list[str] = []
    held_out: list[str] = []
    size = 0
    for number, source in enumerate(_sources(files)):
        (held_out if number % HELD_OUT == HELD_OUT - 1 else train).append(source)
        size += len(source)
        if size >= most_bytes:
            break
    if not held_out:  # of a few files the last tenth
        text = "".join(train)
        train, held_out = [text[: -len(text) // 10]], [text[-len(text) // 10 :]]
    if size < 1000:
        raise CorpusError(f"{size} characters are too little text to learn from")
    split = [
        [piece for text in texts for piece in split_text(text)] for texts in (train, held_out)
    ]
    common = Counter(split[0]).most_common(vocabulary - BYTES)
    pieces = [piece for piece, count in common if count > 1]
    number_of = {piece: BYTES + i for i, piece in enumerate(pieces)}
    numbers = [_numbers(found, number_of) for found in split]
    return Text(pieces, *numbers, sum(len(text.encode()) for text in held_out))


def split_text(text: str) -> list[str]:
    """Return the pieces of a text, which put together are the text."""
    return _PIECE.findall(text)


def _sources(files: list[Path]) -> Iterator[str]:
    for path in files or python_files():
        try:
            yield path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            if files:
                raise CorpusError(f"cannot read {path}: {error.strerror}") from error


def _numbers(found: list[str], number_of: dict[str, int]) -> np.ndarray:
    numbers: list[int] = []
    for piece in found:
        number = number_of.get(piece)
        if number is None:
            numbers.extend(piece.encode())
        else:
            numbers.append(number)
    return np.array(numbers, np.int32)
