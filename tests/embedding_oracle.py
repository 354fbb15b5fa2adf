"""Embedding lookups and bags in NumPy loops and float64, with their gradients.

`sources` says for each id which row it reads: a row of the table, `OUTSIDE` or `PADDED`.
"""

import contextlib
import math
from typing import NamedTuple

import jax
import numpy as np

import jmask

MODES = ("fill", "clip", "zero", "raise")
OUTSIDE, PADDED = -1, -2
normal = lambda *shape: np.random.default_rng(0).normal(size=shape).astype(np.float32)


@contextlib.contextmanager
def strictness():
    """Nothing becomes dense, and no dtype or rank is promoted silently."""
    with jmask.strict(), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def sources(ids, padding, mode, rows):
    """For each id the row it reads, or OUTSIDE or PADDED."""
    ids = np.asarray(ids, object)
    inside = (ids >= 0) & (ids < rows)
    clipped = np.clip(ids, 0, rows - 1) if mode == "clip" else np.where(inside, ids, OUTSIDE)
    return np.where(ids == padding, PADDED, clipped).astype(int)


def looked_up(table, source, mode):
    """The rows of a floating table."""
    rows = table.astype(np.float64)[np.maximum(source, 0)]
    rows[source == PADDED] = 0
    rows[source == OUTSIDE] = math.nan if mode == "fill" else 0
    return rows


def table_gradient(cotangents, source, rows):
    """What a loss with these cotangents of the rows sends to the table."""
    gradient = np.zeros((rows, *cotangents.shape[source.ndim :]))
    np.add.at(gradient, source[source >= 0], cotangents[source >= 0])
    return gradient


class Combined(NamedTuple):
    """The rows of bags (b, D), and the derivative of their product with a cotangent.

    Attributes:
        out (b, D): the combined rows.
        in_rows (n, D): in the row of each entry.
        in_weights (n,): in the weight of each entry.
    """

    out: np.ndarray
    in_rows: np.ndarray
    in_weights: np.ndarray


def combined(rows, bag, weights, combiner, cotangent):
    """Rows (n, D) of which `bag` (n,) says where they belong; any other number is nowhere."""
    result = Combined(np.zeros(cotangent.shape), np.zeros(rows.shape), np.zeros(bag.shape))
    for number, ct in enumerate(cotangent):
        members = np.flatnonzero(bag == number)
        r, w = rows[members], weights[members].astype(np.float64)
        if not members.size:
            continue
        if combiner == "max":
            columns, first = np.arange(r.shape[1]), r.argmax(0)
            result.out[number] = r[first, columns]
            result.in_rows[members[first], columns] = ct
            continue
        out = (w[:, None] * r).sum(0)
        r = np.nan_to_num(r, nan=0)  # what is not read is a constant
        total = (w[:, None] * r).sum(0)
        if combiner == "sum":
            scale, in_scale = 1, 0
        else:
            scale = w.sum() if combiner == "mean" else np.sqrt((w * w).sum())
            if scale == 0:
                result.out[number] = 0 * out  # a nan is not hidden
                continue
            of_scale = 1 if combiner == "mean" else w / scale
            in_scale = -(total * ct).sum() / scale**2 * of_scale
        result.out[number] = out / scale
        result.in_rows[members] = w[:, None] * ct / scale
        result.in_weights[members] = r @ ct / scale + in_scale
    return result
