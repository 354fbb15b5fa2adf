"""Texts as rows of a sparse matrix: words and sequences of characters, hashed to columns."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.experimental.sparse import BCSR
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.preprocessing import normalize

ROWS = 128  # texts of a batch,
ROOM = 1.1  # with space for so many entries, by what the texts have on average
MOST_COLUMNS = 2**24  # what is hashed to; fewer columns are these numbers modulo

Batch = dict[str, Any]


def hashed(texts: Sequence[str]) -> csr_matrix:
    """Return the features of each text: a row of length one, with MOST_COLUMNS columns."""
    settings = {"n_features": MOST_COLUMNS, "norm": None, "binary": True}
    words = HashingVectorizer(ngram_range=(1, 2), token_pattern=r"\w+|[^\w\s]", **settings)
    fours = HashingVectorizer(ngram_range=(4, 4), analyzer="char", **settings)
    return normalize(words.transform(texts) + fours.transform(texts))


class Batches:
    """Texts in batches of one size and capacity, so that nothing compiles twice."""

    def __init__(self, features: csr_matrix, labels: np.ndarray):
        self.features, self.labels = features, labels
        self.entries = np.diff(features.indptr)
        self.capacity = int(max(ROOM * ROWS * self.entries.mean(), self.entries.max()))

    def of(self, texts: np.ndarray, columns: int) -> Iterator[Batch]:
        """Yield texts by number; a batch ends where its rows or entries are full."""
        ends = np.cumsum(self.entries[texts])
        start = before = 0
        while start < len(texts):
            fitting = int(np.searchsorted(ends, before + self.capacity, "right"))
            stop = min(start + ROWS, fitting)
            yield self._batch(texts[start:stop], columns)
            start, before = stop, ends[stop - 1]

    def _batch(self, texts: np.ndarray, columns: int) -> Batch:
        x, missing = self.features[texts], ROWS - len(texts)
        # Entries after the last row belong to no row: they are padding.
        room = self.capacity - x.nnz
        parts = (
            np.pad(x.data, (0, room)).astype(np.float32),
            np.pad(x.indices, (0, room)) % columns,
            np.pad(x.indptr, (0, missing), "edge"),
        )
        return {
            "x": BCSR(parts, shape=(ROWS, columns)),
            "labels": np.pad(self.labels[texts], (0, missing)),
            "is_text": np.arange(ROWS) < len(texts),
        }
