"""Texts with labels: functions of the Python packages on this machine, or lines of a file.

The packages are the standard library and the largest ones installed, each with about as many
functions as the others. What names a package is left out: lines that import, and the names and
usual abbreviations of all packages, wherever they occur. What a package calls its own things
stays. Functions are held out by file, so that no file is on both sides, and so are equal lines.
"""

import re
import sysconfig
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.program import ExampleError
from common.python_corpus import python_files

MOST_OF_A_PACKAGE = 3000
MOST_OF_A_FILE = 20
CHARACTERS = 2000  # of a text, at most
HELD_OUT = 5  # one in so many files, or lines

# A line with `def`, and what is indented more, up to the last line that is.
_FUNCTION = re.compile(
    r"^([ \t]*)(?:async[ ]+)?def[ ]+\w.*\n(?:(?:\1[ \t]+\S.*|\1\).*|[ \t]*)\n){4,}",
    re.MULTILINE,
)
_IMPORT = re.compile(r"^.*\bimport\b.*$", re.MULTILINE)
_ABBREVIATIONS = r"scikit|\b(?:np|sp|plt|mpl|jnp)\b"
_COPIES = re.compile("vendor|extern|third_party")


class TextError(ExampleError):
    """A file that cannot be learned from; the message says why."""


class Texts(NamedTuple):
    """Texts, the number of the label of each, and which are for the test."""

    texts: list[str]
    labels: np.ndarray
    held_out: np.ndarray
    names: list[str]


def texts_from_python(packages: int) -> Texts:
    """Read functions of the largest packages on this machine."""
    files = _files_of_packages()
    size = Counter({name: sum(f.stat().st_size for f in files[name]) for name in files})
    names = [name for name, _ in size.most_common(packages)]
    forbidden = re.compile("|".join([*map(re.escape, names), _ABBREVIATIONS]), re.IGNORECASE)
    found = [
        (forbidden.sub("", _IMPORT.sub("", text)), number, _is_held_out(str(file)))
        for number, name in enumerate(names)
        for file, text in _functions(files[name])
    ]
    return _checked(found, names, "the Python packages on this machine")


def texts_from_file(path: Path) -> Texts:
    """Read lines of a file: a label, a tab, a text."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise TextError(f"cannot read {path}: {error.strerror}") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        label, _, text = (part.strip() for part in line.partition("\t"))
        if not label or not text:
            raise TextError(f"{path}, line {number}: expected a label, a tab and a text")
        pairs.append((label, text))
    if not pairs:
        raise TextError(f"{path} is empty: there are no texts in it")
    names = sorted({label for label, _ in pairs})
    found = [(text, names.index(label), _is_held_out(text)) for label, text in pairs]
    return _checked(found, names, str(path))


def _checked(found: list[tuple[str, int, bool]], names: list[str], source: str) -> Texts:
    texts, labels, held_out = zip(*found, strict=True) if found else ((), (), ())
    result = Texts(
        [text[:CHARACTERS] for text in texts],
        np.array(labels, np.int32),
        np.array(held_out, bool),
        names,
    )
    different = len(np.unique(result.labels))
    if different < 2:
        raise TextError(f"{source}: texts with two labels or more are needed, got {different}")
    learned = result.labels[~result.held_out]
    if len(np.unique(learned)) < 2 or len(learned) == len(texts):
        raise TextError(f"{source}: {len(texts)} texts are too few to hold some out")
    return result


def _is_held_out(key: str) -> bool:
    # By a hash: the same in every run, and the same for equal texts.
    return zlib.crc32(key.encode()) % HELD_OUT == 0


def _files_of_packages() -> dict[str, list[Path]]:
    paths = sysconfig.get_paths()
    installed = [Path(paths[name]) for name in ("purelib", "platlib")]
    files = defaultdict(list)
    for file in python_files():
        within = next((file.relative_to(p) for p in installed if file.is_relative_to(p)), None)
        # A copy of another package would be a text with two labels.
        if within is None:
            files["the standard library"].append(file)
        elif len(within.parts) > 1 and not _COPIES.search(str(within)):
            files[within.parts[0]].append(file)
    return files


def _functions(files: list[Path]) -> Iterator[tuple[Path, str]]:
    """Yield functions of at least five lines, of files always in one order."""
    count = 0
    for file in sorted(files, key=lambda file: zlib.crc32(str(file).encode())):
        try:
            source = file.read_text(encoding="utf-8", errors="ignore")
        except OSError:
            continue
        functions = [match.group() for match in _FUNCTION.finditer(source)]
        for text in functions[:MOST_OF_A_FILE]:
            yield file, text
        count += len(functions[:MOST_OF_A_FILE])
        if count >= MOST_OF_A_PACKAGE:
            break
