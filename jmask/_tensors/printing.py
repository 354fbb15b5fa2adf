"""How tensors and tables print: masked entries as `--`, laid out as NumPy lays out arrays.

    MaskedTensor([1.0, --, 3.0], dtype=float32)
    MaskedTensor(coo, float32[2, 4], nse=3, values=[3.0, --, 5.0])
    MaskedTensor(float32[2, 4])                                        while traced

Printing never raises, whatever leaves the pytree node holds, and never moves more of a
large tensor than the entries it shows.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.methods import install
from jmask._tensors.storage import is_sparse, stored_values, stype

_MASKED = "--"


def representation(x: MaskedTensor) -> str:
    """Print `MaskedTensor([1.0, --, 3.0], dtype=float32)`; its type and shape while traced."""
    # A repr that raises hides the error somebody is looking for: transformations put
    # anything into the leaves, and buffers may be donated or live on other hosts.
    for attempt in (_with_values, _without_values):
        try:
            return attempt(x)
        except Exception:
            continue
    return f"MaskedTensor({x.storage!r}, {x.valid!r})"


def _with_values(x: MaskedTensor) -> str:
    values, valid = stored_values(x.storage), x.valid
    if not all(map(_is_concrete, (values, valid))) or values.shape != valid.shape:
        return _without_values(x)
    if is_sparse(x.storage):
        head, tail = f"MaskedTensor({_described(x)}, values=", ")"
    else:
        head, tail = "MaskedTensor(", f", dtype={x.dtype})"
        if x.size == 0 and x.ndim > 1:
            tail = f", shape={x.shape}{tail}"
    return head + _entries(values, valid, head) + tail


def _without_values(x: MaskedTensor) -> str:
    return f"MaskedTensor({_described(x)})"


def _described(x: MaskedTensor) -> str:
    shape = ", ".join(map(str, x.shape))
    described = f"{x.dtype}[{shape}]"
    if not is_sparse(x.storage):
        return described
    return f"{stype(x.storage)}, {described}, nse={x.storage.nse}"


def _is_concrete(x: object) -> bool:
    return isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer)


def _entries(values: jax.Array | np.ndarray, valid: jax.Array | np.ndarray, head: str) -> str:
    """Return the entries as text whose lines after the first are indented as after `head`."""
    if values.size == 0:
        return "[]"
    options = np.get_printoptions()
    edge, is_large = options["edgeitems"], values.size > options["threshold"]
    cut = [axis for axis, n in enumerate(values.shape) if is_large and n > 2 * edge]
    for axis in cut:
        values, valid = (_edges(a, axis, edge) for a in (values, valid))
    values, valid = np.asarray(values), np.asarray(valid)
    if jnp.issubdtype(values.dtype, jnp.floating) and values.dtype.kind != "f":
        values = values.astype(np.float32)  # bfloat16 and smaller: 1 must print as 1.0
    pairs = zip(values.ravel(), valid.ravel(), strict=True)
    flat = [str(value) if exists else _MASKED for value, exists in pairs]
    if values.ndim > 1:  # columns stand below each other
        width = max(map(len, flat))
        flat = [word.rjust(width) for word in flat]
    words = np.array(flat).reshape(values.shape)
    for axis in cut:  # one between both ends, which NumPy leaves out
        words = np.insert(words, edge, "", axis)
    return np.array2string(
        words,
        separator=", ",
        prefix=head,
        formatter={"all": str},
        threshold=0 if cut else words.size,
    )


def _edges(x: jax.Array | np.ndarray, axis: int, edge: int) -> Any:
    at, last = (slice(None),) * axis, x.shape[axis] - edge
    module = jnp if isinstance(x, jax.Array) else np
    with jax.ensure_compile_time_eval():  # a constant may be printed while tracing
        parts = [x[(*at, slice(edge))], x[(*at, slice(last, None))]]
        return module.concatenate(parts, axis)


install(representation=representation)
