"""Made-up click logs in the format of Criteo's, with a signal to be found.

The categories of a column follow Zipf's law, over 3 to 10,000 different ones. Whether there
is a click depends on a score: a weight for each category, products of what two of them have
in common, and the logarithms of the counts. Categories are known by their hashes alone, most
of them are rare, and some are missing, as in the real logs. There may be several in a column,
a list, each of which counts.
"""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
from sklearn.metrics import roc_auc_score

from dlrm.criteo import CATEGORIES, COUNTS

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
    """Endless click logs, the same for the same seed.

    A category that is not missing has 1 to `most` values.
    """

    def __init__(self, seed: int, most: int = 1):
        self.seed, self.most = seed, most
        rng = np.random.default_rng(seed)
        # A line with more values says no more of a click than one with fewer.
        share = ((1 + most) / 2) ** -0.5
        self.weights = [share * rng.normal(0, 0.3, size) for size in _SIZES]
        self.factors = [share * rng.normal(0, 0.08, (size, FACTORS)) for size in _SIZES]
        self.slopes = rng.normal(0, 0.15, COUNTS)
        shares = [1 / np.arange(1, size + 1) for size in _SIZES]
        self.cumulated = [np.cumsum(share) / share.sum() for share in shares]

    def lines(self) -> Iterator[bytes]:
        """Yield lines as they are in a file of Criteo's."""
        for number in count():
            block = self._block(number)
            columns = np.arange(CATEGORIES)[:, None]
            hashes = (block.categories * 2_654_435_761 + columns) % 2**32
            hashes[block.categories == ABSENT] = ABSENT
            for click, counts, some in zip(
                block.clicks.tolist(), block.counts.tolist(), hashes.tolist(), strict=True
            ):
                fields = [str(x) if x != ABSENT else "" for x in counts]
                fields += [",".join(f"{x:08x}" for x in c if x != ABSENT) for c in some]
                yield ("\t".join([str(int(click)), *fields]) + "\n").encode()

    def best_auc(self) -> float:
        """Return the AUC of whoever knows the scores."""
        blocks = [self._block(number) for number in range(50)]
        clicks = np.concatenate([block.clicks for block in blocks])
        return float(roc_auc_score(clicks, np.concatenate([block.scores for block in blocks])))

    def _block(self, number: int) -> _Block:
        rng = np.random.default_rng((self.seed, number))
        counts = np.floor(np.exp(rng.normal(1, 1.3, (_LINES, COUNTS)))).astype(int) - 1
        counts[rng.random(counts.shape) < HOW_OFTEN] = ABSENT
        drawn = rng.random((CATEGORIES, _LINES, self.most))
        ranks = [np.searchsorted(c, x) for c, x in zip(self.cumulated, drawn, strict=True)]
        categories = np.stack(ranks, axis=1)
        lengths = rng.integers(1, self.most + 1, categories.shape[:2])
        lengths[rng.random(lengths.shape) < HOW_OFTEN] = 0
        categories[np.arange(self.most) >= lengths[..., None]] = ABSENT

        scores = np.log1p(np.maximum(counts, 0)) @ self.slopes - 1
        common = np.zeros((_LINES, FACTORS))
        columns = categories.swapaxes(0, 1)
        for ids, weights, factors in zip(columns, self.weights, self.factors, strict=True):
            there = ids != ABSENT
            scores += np.where(there, weights[ids], 0).sum(1)
            mine = np.where(there[..., None], factors[ids], 0).sum(1)
            # The products with all columns before.
            scores += np.sum(common * mine, axis=1)
            common += mine
        clicks = rng.random(_LINES) < 1 / (1 + np.exp(-scores))
        return _Block(clicks, scores, counts, categories)
