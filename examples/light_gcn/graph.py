"""Who imports what: the graph of the Python sources on this machine, for `light_gcn.py`.

    import numpy as np                 this file -- numpy
    from scipy.sparse import csr       this file -- scipy.sparse

Files on one side, modules on the other. Files with few imports and modules that few import
are left out, and of each file one import is held out.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.program import ExampleError
from common.python_corpus import python_files

FEWEST = 5  # imports of a file, and files of a module

_IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+import|import\s+([^\n#;()]+))", re.MULTILINE)


class Imports(NamedTuple):
    """A graph of two sides, in the order of its files.

    Attributes:
        files, modules: how many.
        edges (m, 2): file and module, int32, sorted by file.
        held_out (files,): a module that each file imports too.
    """

    files: int
    modules: int
    edges: np.ndarray
    held_out: np.ndarray


class GraphError(ExampleError):
    """A graph that is too small to learn from."""


def read_imports(paths: Iterable[Path] | None = None, most: int = 20_000) -> Imports:
    """Read the graph of these files, or of those on this machine, at most `most`."""
    found = []
    for path in python_files() if paths is None else paths:
        names = imported(path.read_text(encoding="utf-8", errors="ignore"))
        if len(names) >= FEWEST:
            found.append(names)
        if len(found) == most:
            break
    counts = Counter(name for names in found for name in names)
    number = {name: i for i, name in enumerate(sorted(counts)) if counts[name] >= FEWEST}
    number = {name: i for i, name in enumerate(number)}
    rng = np.random.default_rng(0)
    edges, held_out = [], []
    for names in found:
        ids = [number[name] for name in sorted(names) if name in number]
        if len(ids) < 2:
            continue
        held_out.append(ids.pop(rng.integers(len(ids))))
        edges += [(len(held_out) - 1, i) for i in ids]
    if len(held_out) < FEWEST:
        raise GraphError(f"{len(held_out)} files with imports are too few to learn from")
    return Imports(
        len(held_out), len(number), np.array(edges, np.int32), np.array(held_out, np.int32)
    )


def imported(source: str) -> set[str]:
    """Return the modules that a source imports, relative ones left out."""
    names = set()
    for module, several in _IMPORT.findall(source):
        for name in [module] if module else several.split(","):
            words = name.split()
            if words and re.fullmatch(r"\w[\w.]*", words[0]):
                names.add(words[0])
    return names


def random_imports(files: int, modules: int, each: int, seed: int) -> Imports:
    """Make a graph of any size, to time a step with."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(modules, size=(files, each), dtype=np.int32)
    edges = np.stack([np.repeat(np.arange(files, dtype=np.int32), each), ids.ravel()], 1)
    return Imports(files, modules, edges, ids[:, 0])


def neighbours(graph: Imports, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the neighbours of all nodes of a side, and where those of each begin."""
    order = np.argsort(graph.edges[:, side], kind="stable")
    size = (graph.files, graph.modules)[side]
    begins = np.searchsorted(graph.edges[order, side], np.arange(size + 1))
    return graph.edges[order, 1 - side], begins


def imports_of(graph: Imports) -> dict[int, list[int]]:
    """Return the modules that each file is known to import."""
    known = defaultdict(list)
    for file, module in graph.edges.tolist():
        known[file].append(module)
    return known
