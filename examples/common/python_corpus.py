"""Text for the word2vec example: the identifiers of the Python sources on this machine.

The standard library and the installed packages are a few million words long. Comments
and strings are left out, and so are the keywords:

    for row in rows:  # all of them
        table.append(int(row[0], base=10))

    row rows table append int row base
"""

import itertools
import keyword
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.program import ExampleError

MAX_WORDS = 6_000_000  # read in a few seconds

_PYTHON = re.compile(
    r"""
      \#.*                                          # a comment
    | \"{3} (?s:.*?) \"{3} | '{3} (?s:.*?) '{3}     # a string of many lines
    | " (?: [^"\\\n] | \\[\s\S] )*+ "
    | ' (?: [^'\\\n] | \\[\s\S] )*+ '
    | ( [^\W\d]\w+ )                                # an identifier of 2 letters or more
    | \w+                                           # a number, a one-letter name
    """,
    re.VERBOSE,
)
_TEXT = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_GENERATED = re.compile(r"^#.*(?:generated|do not edit)", re.IGNORECASE | re.MULTILINE)

# Besides the keywords: words that stand next to everything, and prefixes of strings.
_DROPPED = frozenset([*keyword.kwlist, "self", "cls", "rb", "br", "rf", "fr"])


class CorpusError(ExampleError):
    """A text that cannot be used; the message names it."""


class Corpus(NamedTuple):
    """A text as numbers: word i is the i-th most frequent one.

    Attributes:
        words: the vocabulary.
        counts: how often each word occurs.
        tokens: the text, rare words left out.
        distinct: the number of different words before rare ones were left out.
    """

    words: list[str]
    counts: np.ndarray
    tokens: np.ndarray
    distinct: int


def corpus_from_python(vocabulary: int) -> Corpus:
    """Read the identifiers of the Python sources on this machine."""
    sources = map(_source, python_files())
    return _corpus(map(identifiers, sources), vocabulary)


def corpus_from_files(paths: Iterable[Path], vocabulary: int) -> Corpus:
    """Read the words of text files, in lower case."""
    return _corpus(map(_words_of_file, paths), vocabulary)


def python_files() -> Iterator[Path]:
    """Yield the files of the standard library, then of packages, always in one order."""
    paths = sysconfig.get_paths()
    for root in dict.fromkeys(paths[name] for name in ("stdlib", "purelib", "platlib")):
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = sorted(set(subfolders) - {"site-packages", "dist-packages"})
            yield from (Path(folder, n) for n in sorted(names) if n.endswith(".py"))


def identifiers(source: str) -> list[str]:
    """Return the identifiers of a Python source, in order."""
    return [word for word in _PYTHON.findall(source) if word and word not in _DROPPED]


def _source(path: Path) -> str:
    try:
        source = path.read_text(encoding="utf-8", errors="ignore")
    except OSError:
        return ""
    # Generated files repeat a few lines thousands of times and would drown the rest.
    return "" if _GENERATED.search(source[:500]) else source


def _words_of_file(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror}") from error
    words = _TEXT.findall(text.lower())
    if not words:
        raise CorpusError(f"{path} is empty: there are no words in it")
    return words


def _corpus(texts: Iterable[list[str]], vocabulary: int) -> Corpus:
    number: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    chunks, total = [], 0
    for text in texts:
        chunks.append(np.fromiter(map(number.__getitem__, text), np.int32, len(text)))
        total += len(text)
        if total >= MAX_WORDS:
            break
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
    if len(number) < 2:
        raise CorpusError(f"{len(number)} different words are too few to learn from")

    counts = np.bincount(tokens)
    by_count = np.argsort(-counts, kind="stable")
    rank = np.empty_like(by_count)
    rank[by_count] = np.arange(len(by_count))
    tokens = rank[tokens].astype(np.int32)

    words = list(number)
    kept = by_count[:vocabulary]
    return Corpus(
        words=[words[i] for i in kept],
        counts=counts[kept],
        tokens=tokens[tokens < vocabulary],
        distinct=len(words),
    )
