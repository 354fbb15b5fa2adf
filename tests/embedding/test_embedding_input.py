"""Arguments of `embedding_lookup` and `renormalize` that do not fit: refused, and why."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmask
from tests.embedding_oracle import normal
from tests.sparse_arrays import coo, csr

V, D, N = 6, 3, 8
TABLE, WEIGHTS = normal(V, D), normal(N, D)

# --- bad input ---------------------------------------------------------------------------

INTEGERS = np.arange(V)
COO, CSR = coo(TABLE), csr(TABLE)

BAD: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "float ids": (
        lambda t: jmask.embedding_lookup(t, [0.0]),
        TypeError,
        "`ids` must be integers, got float64",
    ),
    "bool ids": (
        lambda t: jmask.embedding_lookup(t, jnp.array([True])),
        TypeError,
        "`ids` must be integers, got bool",
    ),
    "masked ids": (
        lambda t: jmask.embedding_lookup(t, jmask.masked_tensor(INTEGERS, INTEGERS > 2)),
        TypeError,
        r"`ids` is a MaskedTensor: .* `ids\.to_tensor\(-1\)`.* `padding_id`",
    ),
    "scalar table": (
        lambda t: jmask.embedding_lookup(t[0, 0], [0]),
        ValueError,
        "`table` must have a dimension of rows, got a scalar",
    ),
    "BCOO": (
        lambda t: jmask.embedding_lookup(COO, [0]),
        TypeError,
        r"`table` must be an array or a jmask\.RowSparse, got BCOO: pass `table\.todense",
    ),
    "BCSR": (
        lambda t: jmask.embedding_lookup(CSR, [0]),
        TypeError,
        "`table` must be .* got BCSR",
    ),
    "masked table": (
        lambda t: jmask.embedding_lookup(jmask.masked_tensor(TABLE, TABLE > 0), [0]),
        TypeError,
        r"got MaskedTensor: pass `table\.to_tensor\(0\)`",
    ),
    "mode": (
        lambda t: jmask.embedding_lookup(t, [0], mode="wrap"),
        ValueError,
        "`mode` must be one of 'fill', 'clip', 'zero', 'raise', got 'wrap'",
    ),
    "clip to nothing": (
        lambda t: jmask.embedding_lookup(t[:0], [0], mode="clip"),
        ValueError,
        r"`mode` 'clip' has no row to clip to in a table of shape \(0, 3\)",
    ),
    "float padding": (
        lambda t: jmask.embedding_lookup(t, [0], padding_id=0.5),
        TypeError,
        "`padding_id` must be an integer .* got 0.5",
    ),
    "traced padding": (
        lambda t: jmask.embedding_lookup(t, [0], padding_id=jnp.argmax(t)),
        TypeError,
        "`padding_id` must be an integer that is known while tracing",
    ),
    "bool padding": (
        lambda t: jmask.embedding_lookup(t, [0], padding_id=True),
        TypeError,
        "`padding_id` must be an integer .* got True",
    ),
    "max_norm 0": (
        lambda t: jmask.embedding_lookup(t, [0], max_norm=0),
        ValueError,
        "`max_norm` must be positive and finite, got 0",
    ),
    "max_norm < 0": (
        lambda t: jmask.embedding_lookup(t, [0], max_norm=np.float32(-1)),
        ValueError,
        "`max_norm` must be positive",
    ),
    "max_norm nan": (
        lambda t: jmask.renormalize(t, [0], math.nan),
        ValueError,
        "`max_norm` must be positive",
    ),
    "max_norm of several numbers": (
        lambda t: jmask.embedding_lookup(t, [0], max_norm=np.ones(V)),
        TypeError,
        "`max_norm` must be a number",
    ),
    "max_norm of integers": (
        lambda t: jmask.embedding_lookup(INTEGERS, [0], max_norm=1),
        TypeError,
        "`max_norm` needs a real, floating `table`, got int32",
    ),
    "norm_type 0": (
        lambda t: jmask.embedding_lookup(t, [0], max_norm=1, norm_type=0),
        ValueError,
        "`norm_type` must be positive, got 0",
    ),
    "norm_type in words": (
        lambda t: jmask.embedding_lookup(t, [0], norm_type="fro"),
        TypeError,
        "`norm_type` must be a Python number, got 'fro'",
    ),
    "renormalize to None": (
        lambda t: jmask.renormalize(t, [0], None),
        ValueError,
        "`max_norm` must be a positive number, got None",
    ),
    "renormalize float ids": (
        lambda t: jmask.renormalize(t, [0.5], 1),
        TypeError,
        "`ids` must be integers",
    ),
    "renormalize a RowSparse": (
        lambda t: jmask.renormalize(jmask.RowSparse.zeros((V, D)), [0], 1),
        TypeError,
        r"`table` must be an array, got RowSparse: pass `table\.todense\(\)`",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_bad_input(call: Any, error: type[Exception], message: str, traced: bool) -> None:
    if call is BAD["traced padding"][0] and not traced:
        assert call(TABLE).shape == (1, D)
        return
    with pytest.raises(error, match=message):
        jax.eval_shape(call, TABLE) if traced else call(TABLE)
