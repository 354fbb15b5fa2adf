"""The part of a DLRM that all contenders have alike: sizes, first numbers, dense features.

[(w, b), ...] below: 13 -> 512 -> 256 -> D        above: D + pairs -> 512 -> 256 -> 1
"""

import itertools

import numpy as np

DENSE, HIDDEN = 13, (512, 256)
RATE_OF_LAYERS = 0.01


def start_of_tables(work):
    """The number in all tables: in a DLRM a small one, or plain SGD runs away."""
    return 0.01 if work == "DLRM" else 1.0


def start_of_layers(tables, width):
    """Weights and biases of the layers below and above the interactions, the same for all."""
    rng = np.random.default_rng(0)
    pairs = (tables + 1) * tables // 2
    sizes = (DENSE, *HIDDEN, width), (width + pairs, *HIDDEN, 1)
    return [
        [
            (rng.normal(size=(m, n), scale=m**-0.5).astype(np.float32), np.zeros(n, np.float32))
            for m, n in itertools.pairwise(part)
        ]
        for part in sizes
    ]


def examples(count):
    """Dense features (count, 13) and clicks (count,)."""
    rng = np.random.default_rng(1)
    dense = rng.normal(size=(count, DENSE)).astype(np.float32)
    return dense, (rng.uniform(size=count) < 0.25).astype(np.float32)


def split(batch, tables, bags):
    """Lengths (tables, bags) and the ids of each table, of a batch of `batches.bag_batches`."""
    lengths = batch[: tables * bags].reshape(tables, bags)
    ends = np.cumsum(lengths.sum(1))
    return lengths, np.split(batch[tables * bags :], ends[:-1])
