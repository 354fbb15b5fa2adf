"""Embedding lookups and bags in NumPy loops and float64, with their gradients.

`sources` says for each id which row it reads: a row of the table, `OUTSIDE` or `PADDED`.
"""

import contextlib
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
        total = (w[:, None] * r).sum(0)
        if combiner == "sum":
            scale, in_scale = 1, 0
        else:
            scale = w.sum() if combiner == "mean" else np.sqrt((w * w).sum())
            if scale == 0:
                continue
            of_scale = 1 if combiner == "mean" else w / scale
            in_scale = -(total * ct).sum() / scale**2 * of_scale
        result.out[number] = total / scale
        result.in_rows[members] = w[:, None] * ct / scale
        result.in_weights[members] = r @ ct / scale + in_scale
    return result


# --- bags -----------------------------------------------------------------------------

V, D, N, B, L = 6, 3, 12, 4, 3
FORMS = ("lines", "offsets", "last offset", "segments")
COMBINERS = ("sum", "mean", "sqrtn", "max")
PADDINGS = (None, -1, 2)
# Small integers, so that the maximum is often attained more than once.
TABLE = np.random.default_rng(1).integers(-2, 3, (V, D)).astype(np.float32)
COTANGENT = normal(B, D)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

forms = pytest.mark.parametrize("form", FORMS)
combiners = pytest.mark.parametrize("combiner", COMBINERS)


class Case(NamedTuple):
    """The options of a call."""

    form: str
    combiner: str
    weighted: bool
    padding: int | None
    mode: str


CASES = [
    Case(*options)
    for options in itertools.product(FORMS, COMBINERS, (False, True), PADDINGS, MODES)
    if not (options[1] == "max" and options[2])
]


class Data(NamedTuple):
    """The arrays of a call: `places` are offsets or segment ids."""

    ids: np.ndarray
    places: np.ndarray
    weights: np.ndarray


def drawn(form, rng, outside):
    """Ids in the table, or also outside it, and bags of which some are empty."""
    ids = rng.integers(-2, V + 2, N) if outside else rng.integers(0, V, N)
    offsets = np.sort(rng.integers(0, N + 1, B + 1))
    offsets[0] = 0
    places = {
        "lines": np.arange(N) // L,
        "offsets": offsets[:B],
        "last offset": offsets,
        "segments": rng.integers(-2, B + 1, N),
    }[form]
    weights = rng.normal(size=N).astype(np.float32)
    return Data(ids.astype(np.int32), places.astype(np.int32), weights)


def call(case, table, weights, ids, places):
    options = {"combiner": case.combiner, "padding_id": case.padding, "mode": case.mode}
    if case.form == "lines":
        ids, weights = ids.reshape(B, L), weights.reshape(B, L)
    elif case.form == "segments":
        options |= {"segment_ids": places, "num_segments": B}
    else:
        options |= {"offsets": places, "include_last_offset": case.form == "last offset"}
    return jmask.embedding_bag(
        table, ids, weights=weights if case.weighted else None, **options
    )


def differentiated(case):
    """(table, weights, ids, places) -> gradients of table and weights, and the bags."""

    def loss(table, weights, ids, places):
        out = call(case, table, weights, ids, places)
        return jnp.sum(out * COTANGENT), out

    return jmask.grad(loss, (0, 1), has_aux=True)
