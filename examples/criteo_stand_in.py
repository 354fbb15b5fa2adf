"""Made-up click logs in the format of Criteo's, with a signal to be found.

The categories of a column follow Zipf's law, over 3 to 10,000 different ones. Whether there
is a click depends on a score: a weight for each category, products of what two of them have
in common, and the logarithms of the counts. Categories are known by their hashes alone, most
of them are rare, and some are missing, as in the real logs.
"""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
from criteo import CATEGORIES, COUNTS
from sklearn.metrics import roc_auc_score

FACTORS = 4
ABSENT, HOW_OFTEN = -2, 0.1  # what is missing, of counts and of categories

_SIZES = np.geomspace(3, 10_000, CATEGORIES).astype(int)
_LINES = 1024  # made at once


class _Block(NamedTuple):
    clicks: np.ndarray
    scores: np.ndarray
    counts: np.ndarray
    categories: np.ndarray


class StandIn:
    """Endless click logs, the same for the same seed."""

    def __init__(self, seed: int):
        self.seed = seed
        rng = np.random.default_rng(seed)
        self.weights = [rng.normal(0, 0.3, size) for size in _SIZES]
        self.factors = [rng.normal(0, 0.08, (size, FACTORS)) for size in _SIZES]
        self.slopes = rng.normal(0, 0.15, COUNTS)
        shares = [1 / np.arange(1, size + 1) for size in _SIZES]
        self.cumulated = [np.cumsum(share) / share.sum() for share in shares]

    def lines(self) -> Iterator[bytes]:
        """Lines as they are in a file of Criteo's."""
        for number in count():
            block = self._block(number)
            hashes = (block.categories * 2_654_435_761 + np.arange(CATEGORIES)) % 2**32
            hashes[block.categories == ABSENT] = ABSENT
            for click, counts, some in zip(
                block.clicks.tolist(), block.counts.tolist(), hashes.tolist(), strict=True
            ):
                fields = [str(x) if x != ABSENT else "" for x in counts]
                fields += [f"{x:08x}" if x != ABSENT else "" for x in some]
                yield ("\t".join([str(int(click)), *fields]) + "\n").encode()

    def best_auc(self) -> float:
        """The AUC of whoever knows the scores."""
        blocks = [self._block(number) for number in range(50)]
        clicks = np.concatenate([block.clicks for block in blocks])
        return float(roc_auc_score(clicks, np.concatenate([block.scores for block in blocks])))

    def _block(self, number: int) -> _Block:
        rng = np.random.default_rng((self.seed, number))
        counts = np.floor(np.exp(rng.normal(1, 1.3, (_LINES, COUNTS)))).astype(int) - 1
        counts[rng.random(counts.shape) < HOW_OFTEN] = ABSENT
        drawn = rng.random((CATEGORIES, _LINES))
        ranks = [np.searchsorted(c, x) for c, x in zip(self.cumulated, drawn, strict=True)]
        categories = np.stack(ranks, axis=1)
        categories[rng.random(categories.shape) < HOW_OFTEN] = ABSENT

        scores = np.log1p(np.maximum(counts, 0)) @ self.slopes - 1
        common = np.zeros((_LINES, FACTORS))
        for ids, weights, factors in zip(categories.T, self.weights, self.factors, strict=True):
            there = ids != ABSENT
            scores += np.where(there, weights[ids], 0)
            mine = np.where(there[:, None], factors[ids], 0)
            # The products with all columns before.
            scores += np.sum(common * mine, axis=1)
            common += mine
        clicks = rng.random(_LINES) < 1 / (1 + np.exp(-scores))
        return _Block(clicks, scores, counts, categories)
