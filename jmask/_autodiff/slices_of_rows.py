"""Cotangents of slices of looked up rows, `x[:, :1]` and `x[:, 1:]`, put side by side.

    ce  = pad  a (b, 1, D)   to (b, k, D)          slices that
    cj  = pad  b (b, k-1, D) to (b, k, D)          do not overlap
    ck  = add_any ce cj                            a beside b

Where one of them has factors, the whole has: of another the rows are those of its array.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._autodiff.origins import Origins
from jmask._autodiff.row_entries import entries_of, is_zero
from jmask._base.forms import aval_of, name_of, parameter
from jmask._kernels.factored_rows import FactoredRows, joined

_Rows = FactoredRows | None
_Slice = tuple[Origins, Any, tuple[int, ...]]
"""Where a variable is from, the variable, and its first entry in the whole."""


def rows_of_slices(
    eqn: JaxprEqn,
    origins: Origins,
    row_ndim: int,
    factors: Callable[[Origins, Any, int], _Rows],
) -> _Rows:
    """The factors of what a `pad` or an `add_any` of such makes.

    Args:
        eqn: the equation; its result is (*entries, *row).
        origins: of its operands.
        row_ndim: the dimensions of a row.
        factors: of a variable.
    """
    entries = entries_of(eqn, row_ndim)
    slices = _slices(eqn, origins, len(entries))
    if slices is None or _overlap(slices, len(entries)):
        return None
    found = [factors(origins, v, row_ndim) for origins, v, _ in slices]
    if all(rows is None for rows in found):
        return None
    parts = [
        _of_array(origins.read(v), row_ndim) if rows is None else rows
        for rows, (origins, v, _) in zip(found, slices, strict=True)
    ]
    in_factors = [x for x in parts if x is not None and x.index is not None]
    kinds = {(x.dtype, x.source.dtype) for x in in_factors}
    if len(in_factors) < len(parts) or len(kinds) > 1:
        return None
    whole = joined(list(map(_flat, in_factors)))
    if not isinstance(whole, FactoredRows) or whole.index is None:
        return None
    index = jnp.full(entries, whole.source.shape[0], jnp.int32)
    weight = None if whole.weight is None else jnp.ones(entries, whole.weight.dtype)
    begin = 0
    for _, v, first in slices:
        size = aval_of(v).shape[: len(entries)]
        end = begin + math.prod(size)
        index = lax.dynamic_update_slice(index, whole.index[begin:end].reshape(size), first)
        if weight is not None and whole.weight is not None:
            its = whole.weight[begin:end].reshape(size)
            weight = lax.dynamic_update_slice(weight, its, first)
        begin = end
    return FactoredRows(whole.source, index, weight, whole.dtype)


def _of_array(x: jax.Array | None, row_ndim: int) -> _Rows:
    if x is None:
        return None
    rows = x.reshape(-1, *x.shape[x.ndim - row_ndim :])
    return FactoredRows(rows, lax.iota(jnp.int32, rows.shape[0]), None, rows.dtype)


def _flat(rows: FactoredRows) -> FactoredRows:
    index, weight = (None if x is None else x.reshape(-1) for x in (rows.index, rows.weight))
    return FactoredRows(rows.source, index, weight, rows.dtype)


def _slices(eqn: JaxprEqn, origins: Origins, entries: int) -> list[_Slice] | None:
    """What is added, each padded along the entries; None if there is something else."""
    if name_of(eqn) == "pad":
        v, padding = eqn.invars
        config = parameter(eqn, "padding_config")
        is_slice = all(low >= 0 and high >= 0 and not step for low, high, step in config)
        if (
            not is_slice
            or any(any(x) for x in config[entries:])
            or not is_zero(padding, origins)
        ):
            return None
        return [(origins, v, tuple(int(low) for low, *_ in config[:entries]))]
    if name_of(eqn) != "add_any":
        return None
    found: list[_Slice] = []
    for v in eqn.invars:
        origins_of, maker = origins.maker(v)
        slices = None if maker is None else _slices(maker, origins_of, entries)
        if slices is None:
            return None
        found += slices
    return found


def _overlap(slices: list[_Slice], entries: int) -> bool:
    def span(x: _Slice, d: int) -> tuple[int, int]:
        _, v, first = x
        return first[d], first[d] + aval_of(v).shape[d]

    def apart(x: _Slice, y: _Slice) -> bool:
        pairs = ((span(x, d), span(y, d)) for d in range(entries))
        return any(a[1] <= b[0] or b[1] <= a[0] for a, b in pairs)

    return not all(apart(x, y) for x, y in itertools.combinations(slices, 2))
