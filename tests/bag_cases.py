"""Calls of `embedding_bag` in every form: their options, ids drawn for them, and gradients."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.embedding_oracle import MODES, normal

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


def drawn(form: str, rng: np.random.Generator, outside: bool) -> Data:
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


def call(case: Case, table: Any, weights: Any, ids: Any, places: Any) -> jax.Array:
    options: dict[str, Any] = {
        "combiner": case.combiner,
        "padding_id": case.padding,
        "mode": case.mode,
    }
    if case.form == "lines":
        ids, weights = ids.reshape(B, L), weights.reshape(B, L)
    elif case.form == "segments":
        options |= {"segment_ids": places, "num_segments": B}
    else:
        options |= {"offsets": places, "include_last_offset": case.form == "last offset"}
    return jmask.embedding_bag(
        table, ids, weights=weights if case.weighted else None, **options
    )


def differentiated(case: Case) -> Callable[..., Any]:
    """(table, weights, ids, places) -> gradients of table and weights, and the bags."""

    def loss(table: Any, weights: Any, ids: Any, places: Any) -> Any:
        out = call(case, table, weights, ids, places)
        return jnp.sum(out * COTANGENT), out

    return jmask.grad(loss, (0, 1), has_aux=True)
