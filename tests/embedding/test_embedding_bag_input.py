"""Arguments of `embedding_bag` that do not fit: each is refused, and the error says why."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.sparse_arrays import coo

V, D, N, B, L = 6, 3, 12, 4, 3
TABLE = np.random.default_rng(1).integers(-2, 3, (V, D)).astype(np.float32)

FLAT, LINES = np.array([0, 1, 2]), np.array([[0, 1, 2], [3, 4, 5]])
COO = coo(TABLE)

Bad = tuple[Callable[[Any], Any], type[Exception], str]

BAD: dict[str, Bad] = {
    "float ids": (
        lambda t: jmask.embedding_bag(t, LINES + 0.5),
        TypeError,
        "`ids` must be integers, got float",
    ),
    "bool ids": (
        lambda t: jmask.embedding_bag(t, LINES > 1),
        TypeError,
        "`ids` must be integers, got bool",
    ),
    "no bags": (
        lambda t: jmask.embedding_bag(t, FLAT),
        ValueError,
        r"`ids` of shape \(3,\) are no bags yet: give `offsets` or `segment_ids`",
    ),
    "scalar ids": (
        lambda t: jmask.embedding_bag(t, 3),
        ValueError,
        r"`ids` of shape \(\) are no bags yet",
    ),
    "both": (
        lambda t: jmask.embedding_bag(t, FLAT, offsets=[0], segment_ids=FLAT),
        ValueError,
        "`offsets` .* and `segment_ids` .* are two ways to give the bags",
    ),
    "offsets and num_segments": (
        lambda t: jmask.embedding_bag(t, FLAT, offsets=[0], num_segments=1),
        ValueError,
        "two ways to give the bags",
    ),
    "last offset and segments": (
        lambda t: jmask.embedding_bag(t, FLAT, include_last_offset=True, segment_ids=FLAT),
        ValueError,
        "two ways to give the bags",
    ),
    "last of no offsets": (
        lambda t: jmask.embedding_bag(t, LINES, include_last_offset=True),
        ValueError,
        "`include_last_offset` is about `offsets`, and they are missing",
    ),
    "number of no segments": (
        lambda t: jmask.embedding_bag(t, LINES, num_segments=2),
        ValueError,
        "`num_segments` is about `segment_ids`, and they are missing",
    ),
    "offsets of lines": (
        lambda t: jmask.embedding_bag(t, LINES, offsets=[0, 1]),
        ValueError,
        r"`offsets` of shape \(2,\) and `ids` of shape \(2, 3\)",
    ),
    "2-D offsets": (
        lambda t: jmask.embedding_bag(t, FLAT, offsets=[[0, 1]]),
        ValueError,
        r"`offsets` of shape \(1, 2\)",
    ),
    "float offsets": (
        lambda t: jmask.embedding_bag(t, FLAT, offsets=[0.0]),
        TypeError,
        "`offsets` must be integers",
    ),
    "offsets not from 0": (
        lambda t: jmask.embedding_bag(t, FLAT, offsets=[1, 2]),
        ValueError,
        "`offsets` must begin with 0, got 1",
    ),
    "offsets that fall": (
        lambda t: jmask.embedding_bag(t, FLAT, offsets=[0, 2, 1]),
        ValueError,
        "`offsets` must be ascending, got 2 at 1 and 1 at 2",
    ),
    "offsets beyond the ids": (
        lambda t: jmask.embedding_bag(t, FLAT, offsets=[0, 4]),
        ValueError,
        "`offsets` end with 4, beyond the 3 entries of `ids`",
    ),
    "no offsets for some ids": (
        lambda t: jmask.embedding_bag(t, FLAT, offsets=[]),
        ValueError,
        "`offsets` are empty, and `ids` has 3 entries",
    ),
    "not even the last offset": (
        lambda t: jmask.embedding_bag(t, [], offsets=[], include_last_offset=True),
        ValueError,
        "`offsets` are empty",
    ),
    "segments of another shape": (
        lambda t: jmask.embedding_bag(t, FLAT, segment_ids=[0, 1]),
        ValueError,
        r"`segment_ids` of shape \(2,\) and `ids` of shape \(3,\)",
    ),
    "segments of lines": (
        lambda t: jmask.embedding_bag(t, LINES, segment_ids=LINES),
        ValueError,
        r"`segment_ids` of shape \(2, 3\) and `ids` of shape \(2, 3\)",
    ),
    "float segments": (
        lambda t: jmask.embedding_bag(t, FLAT, segment_ids=FLAT + 0.5),
        TypeError,
        "`segment_ids` must be integers",
    ),
    "traced segments, number unknown": (
        lambda t: jmask.embedding_bag(t, FLAT, segment_ids=jnp.argsort(t[:3, 0])),
        ValueError,
        "`num_segments`, the number of bags, must be given for traced `segment_ids`",
    ),
    "negative number of segments": (
        lambda t: jmask.embedding_bag(t, FLAT, segment_ids=FLAT, num_segments=-1),
        ValueError,
        "`num_segments` must be >= 0, got -1",
    ),
    "float number of segments": (
        lambda t: jmask.embedding_bag(t, FLAT, segment_ids=FLAT, num_segments=3.0),
        TypeError,
        "`num_segments` must be an integer .* got 3.0",
    ),
    "combiner": (
        lambda t: jmask.embedding_bag(t, LINES, combiner="min"),
        ValueError,
        "`combiner` must be one of 'sum', 'mean', 'sqrtn', 'max', got 'min'",
    ),
    "mode": (
        lambda t: jmask.embedding_bag(t, LINES, mode="mean"),
        ValueError,
        "`mode` says what an id outside the table gives, got 'mean': .* `combiner`='mean'",
    ),
    "weights of max": (
        lambda t: jmask.embedding_bag(t, LINES, weights=LINES + 0.5, combiner="max"),
        ValueError,
        "`weights` have no meaning for `combiner` 'max'",
    ),
    "weights of another shape": (
        lambda t: jmask.embedding_bag(t, LINES, weights=np.ones(6)),
        ValueError,
        r"`weights` of shape \(6,\) must have the shape of `ids`, \(2, 3\)",
    ),
    "integer weights": (
        lambda t: jmask.embedding_bag(t, LINES, weights=LINES),
        TypeError,
        "`weights` must be floating, got int32",
    ),
    "integer table": (
        lambda t: jmask.embedding_bag(t.astype(np.int8), LINES),
        TypeError,
        r"`table` must be real and floating, got int8: pass `table\.astype",
    ),
    "complex table": (
        lambda t: jmask.embedding_bag(t.astype(np.complex64), LINES),
        TypeError,
        "`table` must be real and floating, got complex64",
    ),
    "scalar table": (
        lambda t: jmask.embedding_bag(t[0, 0], LINES),
        ValueError,
        "`table` must have a dimension of rows",
    ),
    "BCOO table": (
        lambda t: jmask.embedding_bag(COO, LINES),
        TypeError,
        r"`table` must be an array or a jmask\.RowSparse, got BCOO",
    ),
    "max_norm": (
        lambda t: jmask.embedding_bag(t, LINES, max_norm=-1.0),
        ValueError,
        "`max_norm` must be positive",
    ),
    "padding": (
        lambda t: jmask.embedding_bag(t, LINES, padding_id="a"),
        TypeError,
        "`padding_id` must be an integer .* got 'a'",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_bad_input(call: Any, error: type[Exception], message: str, traced: bool) -> None:
    if call is BAD["traced segments, number unknown"][0] and not traced:
        assert call(TABLE).shape[1] == D
        return
    with pytest.raises(error, match=message):
        jax.eval_shape(call, TABLE) if traced else call(TABLE)
