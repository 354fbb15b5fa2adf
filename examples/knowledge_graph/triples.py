"""Knowledge graphs: triples of names in files, as numbers, and how well they are predicted.

    virus <tab> causes <tab> disease            head, relation, tail

The graphs are those in the package pykeen, of which the files alone are read: torch, which
pykeen computes with, is not needed. `pip install --no-deps pykeen` brings them.
"""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.program import ExampleError

GRAPHS = ("umls", "kinships", "nations")


class GraphError(ExampleError):
    """A graph that cannot be read; the message says why."""


class Graph(NamedTuple):
    """A graph in three parts, each (n, 3) int32: the ids of head, relation and tail."""

    entities: list[str]
    relations: list[str]
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray


def read_graph(source: str) -> Graph:
    """Return the graph of this name, or in a folder with train.txt, valid.txt and test.txt."""
    parts = {part: _triples(_path(source, part)) for part in ("train", "valid", "test")}
    every = [triple for part in parts.values() for triple in part]
    entities = sorted({name for head, _, tail in every for name in (head, tail)})
    relations = sorted({relation for _, relation, _ in every})
    number = {name: i for i, name in enumerate(entities)}
    kind = {name: i for i, name in enumerate(relations)}
    ids = {
        part: np.array([(number[h], kind[r], number[t]) for h, r, t in triples], np.int32)
        for part, triples in parts.items()
    }
    return Graph(entities, relations, **ids)


def _path(source: str, part: str) -> Path:
    if source not in GRAPHS:
        return Path(source) / f"{part}.txt"
    try:
        found = files("pykeen") or []
    except PackageNotFoundError:
        raise GraphError(
            "the graphs are in the package pykeen: pip install --no-deps pykeen"
        ) from None
    wanted = f"pykeen/datasets/{source}/{part}.txt"
    return Path(str(next(x for x in found if x.as_posix() == wanted).locate()))


def _triples(path: Path) -> list[list[str]]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise GraphError(f"cannot read {path}: {error.strerror}") from error
    triples = [line.split("\t") for line in lines]
    for number, triple in enumerate(triples, 1):
        if len(triple) != 3:
            raise GraphError(
                f"{path}, line {number}: expected head, relation and tail with tabs between "
                f"them, got {len(triple)} fields"
            )
    if not triples:
        raise GraphError(f"{path} is empty")
    return triples


def ranks(
    graph: Graph, triples: np.ndarray, as_tail: np.ndarray, as_head: np.ndarray
) -> np.ndarray:
    """Return the ranks, from 1 on, of the right tail and head of each triple (2, n).

    Other entities that are right too do not count ("filtered"), and those with the same score
    count half.

    Args:
        graph: of all triples that are known.
        triples (n, 3): which to look at.
        as_tail, as_head (n, entities): the score of each entity in the place of it.
    """
    known = np.concatenate([graph.train, graph.valid, graph.test])
    result = []
    for scores, given, wanted in ((as_tail, (0, 1), 2), (as_head, (1, 2), 0)):
        found = np.array(scores)
        of_wanted = found[np.arange(len(triples)), triples[:, wanted]]
        right: dict[tuple[int, ...], list[int]] = {}
        for triple in known:
            right.setdefault(tuple(triple[list(given)]), []).append(triple[wanted])
        for line, triple in zip(found, triples, strict=True):
            line[right[tuple(triple[list(given)])]] = -np.inf
        better = (found > of_wanted[:, None]).sum(1)
        equal = (found == of_wanted[:, None]).sum(1)
        result.append(1 + better + equal / 2)
    return np.array(result)
