"""Sums of looked up rows in a program, `table[ids].sum(1)`, as sums of bags.

    rows = gather table ids (b, L)         not written out
    sums = reduce_sum rows axes=(1,)       bag_sum(table, ids, b bags of L)

Between the two a program may weight each entry, by an einsum too, leave some out by `where`,
reshape, cast from a narrow dtype. Rows that something else needs too are there anyway, and are
summed as they are.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jmask._autodiff.origins import Origins
from jmask._autodiff.row_entries import entries_of, gathered, is_placed, kept_where, of_entries
from jmask._base.forms import aval_of, name_of, parameter
from jmask._base.precision import wide
from jmask._base.shapes import is_known, trailing
from jmask._kernels.bag_columns import most_columns
from jmask._kernels.bag_sum import are_many, bag_sum


@dataclasses.dataclass(frozen=True)
class _Lookup:
    """Rows (*entries, *row) of a table, each times a number.

    Attributes:
        table (V, *row): floating.
        positions (*entries,): int32, canonical; V reads zeros.
        weights (*entries,): in the dtype of the sums; None for ones.
        outside (*entries,): whose rows are nan; None if no row is.
    """

    table: jax.Array
    positions: jax.Array
    weights: jax.Array | None = None
    outside: jax.Array | None = None

    def mapped(self, function: Callable[[jax.Array], jax.Array]) -> "_Lookup":
        """With `function` of each array of the entries."""
        weights, outside = (
            None if x is None else function(x) for x in (self.weights, self.outside)
        )
        return _Lookup(self.table, function(self.positions), weights, outside)


class _Sum(NamedTuple):
    """A sum of rows over some dimensions of an array.

    Attributes:
        rows: a variable.
        kept: its dimensions that the sum has, before those of a row.
        summed: the dimensions of the entries of one sum.
        weights (*kept, *summed): of the entries; None for ones.
    """

    rows: Any
    kept: tuple[int, ...]
    summed: tuple[int, ...]
    weights: jax.Array | None = None


def sum_of_lookups(eqn: JaxprEqn, origins: Origins) -> jax.Array | None:
    """What an equation makes, if it sums rows that nothing else needs; None of another.

    Outside jit the rows have been read when their sum comes: then it is None, too.
    """
    sums_of = SUMS.get(name_of(eqn))
    for summed in () if sums_of is None else sums_of(eqn, origins):
        shape = aval_of(summed.rows).shape
        if not is_known(*shape) or 0 in shape or not summed.kept:
            continue
        bags, length = (math.prod(shape[d] for d in x) for x in (summed.kept, summed.summed))
        if length > most_columns(1) or not are_many(bags * length):
            continue
        result = aval_of(eqn.outvars[0])
        row_ndim = len(shape) - len(summed.kept) - len(summed.summed)
        rows = _lookup(origins, summed.rows, row_ndim)
        if rows is not None and result.dtype == wide(rows.table.dtype):
            sums = _sum(rows, summed, bags)
            return None if sums is None else sums.reshape(result.shape)
    return None


def _sum(rows: _Lookup, summed: _Sum, bags: int) -> jax.Array | None:
    if not any(isinstance(x, jax.core.Tracer) for x in (rows.table, rows.positions)):
        return None
    order = (*summed.kept, *summed.summed)
    rows = rows.mapped(lambda x: x.transpose(order).reshape(bags, -1))
    weights = rows.weights
    if summed.weights is not None:
        if weights is not None:
            return None
        weights = summed.weights.reshape(bags, -1).astype(wide(rows.table.dtype))
    sums = bag_sum(rows.table, rows.positions, None, weights, None, bags, 0)
    if rows.outside is None:
        return sums
    outside = trailing(rows.outside.any(1), sums.ndim)
    return jnp.where(outside, jnp.asarray(math.nan, sums.dtype), sums)


# --- which sums --------------------------------------------------------------------------


def _reduce_sum(eqn: JaxprEqn, origins: Origins) -> Iterator[_Sum]:
    """How many dimensions its rows have is not said: one at least."""
    (v,), axes = eqn.invars, tuple(sorted(parameter(eqn, "axes")))
    ndim = len(aval_of(v).shape)
    for entries in range(max(axes, default=ndim) + 1, ndim):
        yield _Sum(v, tuple(d for d in range(entries) if d not in axes), axes)


def _dot_general(eqn: JaxprEqn, origins: Origins) -> Iterator[_Sum]:
    """Rows and a weight of each entry, as of `jnp.einsum("bld,bl->bd", rows, weights)`."""
    contracted, batch = parameter(eqn, "dimension_numbers")
    for which in (0, 1):
        v, other = eqn.invars[which], eqn.invars[1 - which]
        kept, summed = batch[which], contracted[which]
        theirs = (*batch[1 - which], *contracted[1 - which])
        sizes = dict(enumerate(aval_of(other).shape))
        free = [d for d in sizes if d not in theirs]
        entries = sorted((*kept, *summed))
        if not kept or entries != list(range(len(entries))):
            continue
        if any(sizes[d] != 1 for d in free):
            continue
        weights = origins.read(other)
        if weights is not None and len(entries) < len(aval_of(v).shape):
            yield _Sum(v, kept, summed, jnp.transpose(weights, (*theirs, *free)))


SUMS = {"reduce_sum": _reduce_sum, "dot_general": _dot_general}


# --- what is summed ----------------------------------------------------------------------


def _lookup(origins: Origins, v: Any, row_ndim: int) -> _Lookup | None:
    """The rows that a variable (*entries, *row) is, if one equation alone needs them."""
    if len(aval_of(v).shape) <= row_ndim:
        return None
    found, eqn = origins.maker(v, for_one=True)
    rule = None if eqn is None else _RULES.get(name_of(eqn))
    return None if eqn is None or rule is None else rule(eqn, found, row_ndim)


def _gather(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Lookup | None:
    found = gathered(eqn, origins, row_ndim)
    if found is None or not jnp.issubdtype(found.table.dtype, jnp.floating):
        return None
    if is_placed(found.table) or is_placed(found.positions):
        return None
    if found.fill is None or found.fill == 0:
        return _Lookup(found.table, found.positions)
    outside = found.positions == found.table.shape[0]
    is_nan = found.fill != found.fill
    return _Lookup(found.table, found.positions, None, outside) if is_nan else None


def _reshape(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Lookup | None:
    old, new = (aval_of(v).shape for v in (eqn.invars[0], eqn.outvars[0]))
    entries = entries_of(eqn, row_ndim)
    if old[len(old) - row_ndim :] != new[len(entries) :]:
        return None
    rows = _lookup(origins, eqn.invars[0], row_ndim)
    return None if rows is None else rows.mapped(lambda x: x.reshape(entries))


def _same(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Lookup | None:
    return _lookup(origins, eqn.invars[0], row_ndim)


def _convert(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Lookup | None:
    rows = _lookup(origins, eqn.invars[0], row_ndim)
    is_summed_in = rows is not None and parameter(eqn, "new_dtype") == wide(rows.table.dtype)
    return rows if is_summed_in else None


def _multiply(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Lookup | None:
    entries, dtype = entries_of(eqn, row_ndim), aval_of(eqn.outvars[0]).dtype
    for v, other in (eqn.invars, eqn.invars[::-1]):
        if aval_of(v).shape != aval_of(eqn.outvars[0]).shape:
            continue
        rows = _lookup(origins, v, row_ndim)
        # Products of narrow numbers are rounded before they are added.
        if rows is None or rows.weights is not None or dtype != wide(rows.table.dtype):
            continue
        weights = of_entries(other, entries, origins, row_ndim)
        if weights is not None:
            return dataclasses.replace(rows, weights=weights)
    return None


def _select(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Lookup | None:
    """Rows where a condition of their entry holds, zeros elsewhere."""
    for v, there in kept_where(eqn, origins, row_ndim):
        rows = _lookup(origins, v, row_ndim)
        if rows is not None and rows.weights is None:
            outside = None if rows.outside is None else rows.outside & there
            positions = jnp.where(there, rows.positions, rows.table.shape[0])
            return _Lookup(rows.table, positions, None, outside)
    return None


_RULES: dict[str, Callable[[JaxprEqn, Origins, int], _Lookup | None]] = {
    "gather": _gather,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "convert_element_type": _convert,
    "mul": _multiply,
    "select_n": _select,
    "copy": _same,
    "copy_p": _same,
    "name": _same,
}
