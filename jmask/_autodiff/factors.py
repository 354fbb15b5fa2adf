"""Which cotangents of rows repeat those of a smaller array, read from the gradient program.

    ct_bags (2, D)                          of bags
    ct = gather ct_bags [0 0 1]             of their entries: one cotangent for several
    g = scatter-add zeros(V, D) ids ct      FactoredRows(ct_bags, [0, 0, 1])

Then the gradient of the table keeps the cotangents of the bags, and the bag of each entry. What
a program may do between the two: gather or broadcast along the entries, weight each of them, by
an einsum too, leave some out, scale, reshape, cast, put slices side by side. Of anything else
the rows are an array, as always; but where they are many, and an array that is there already
times a number for each row, as in the gradient of a dot product, these two are kept:

    ct = mul rows_of_other (n, D) w (n, 1)        FactoredRows(rows_of_other, None, w)
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._autodiff.origins import Made, Origins
from jmask._autodiff.row_entries import entries_of, gathered, is_placed, kept_where, of_entries
from jmask._autodiff.slices_of_rows import rows_of_slices
from jmask._base.forms import aval_of, name_of, parameter
from jmask._base.precision import joint_dtype
from jmask._base.shapes import is_known
from jmask._kernels.factored_rows import FactoredRows, pays

# Bytes of rows above which one array less is worth more than their hashing: glibc gives what is
# twice as large back to the system after each step.
_LARGE = 2**24
# The same of slices that are put together: their ids are sorted then, and not hashed.
_LARGE_SLICES = 2**23


_Factors = FactoredRows | None


def factors(origins: Origins, v: Any, row_ndim: int) -> _Factors:
    """The factors of a variable (*entries, *row).

    Index and weight are for each entry, a weight without index for each of them in a row.
    """
    if len(aval_of(v).shape) <= row_ndim:
        return None
    found, eqn = origins.maker(v)
    rules = _SCALING if origins.scaled_only else _RULES
    rule = None if eqn is None else rules.get(name_of(eqn))
    rows = None if eqn is None or rule is None else rule(eqn, found, row_ndim)
    return _itself(origins, v, row_ndim) if rows is None and origins.scaled_only else rows


def _itself(origins: Origins, v: Any, row_ndim: int) -> _Factors:
    x = origins.read(v)
    if x is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    rows = x if x.ndim == row_ndim + 1 else x.reshape(-1, *x.shape[x.ndim - row_ndim :])
    return FactoredRows(rows, None, None, rows.dtype)


def updates_of_rows(updates: Any, eqn: JaxprEqn) -> FactoredRows | None:
    """The factors of what a `scatter-add` of whole rows adds, one index for each of the rows.

    Args:
        updates: the value of its last operand.
        eqn: the equation.
    """
    numbers = parameter(eqn, "dimension_numbers")
    shape, ndim = aval_of(eqn.outvars[0]).shape, len(aval_of(eqn.invars[2]).shape)
    row_ndim = len(shape) - 1
    whole_rows = (
        numbers.scatter_dims_to_operand_dims == (0,)
        and numbers.inserted_window_dims == (0,)
        and not numbers.operand_batching_dims
        and numbers.update_window_dims == tuple(range(ndim - row_ndim, ndim))
    )
    if not isinstance(updates, Made) or not whole_rows or is_placed(updates.array):
        return None
    count = math.prod(updates.array.shape[: ndim - row_ndim])
    if 0 in updates.array.shape:
        return None
    rows = factors(updates.origins, updates.variable, row_ndim)
    if rows is None or not pays(rows.source.shape[0], count):
        rows = _of_many(updates, row_ndim)
    if rows is None or rows.dtype != aval_of(eqn.outvars[0]).dtype:
        return None
    index, weight = (None if x is None else x.reshape(count) for x in (rows.index, rows.weight))
    return FactoredRows(rows.source, index, weight, rows.dtype)


def _of_many(updates: Made, row_ndim: int) -> FactoredRows | None:
    """Rows that are those of an array times a number each, if another array would be large."""
    if not is_known(updates.array.nbytes) or updates.array.nbytes < _LARGE:
        return None
    origins = dataclasses.replace(updates.origins, scaled_only=True)
    rows = factors(origins, updates.variable, row_ndim)
    return None if rows is None or rows.weight is None else rows


# --- rules -------------------------------------------------------------------------------


def _gather(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    found = gathered(eqn, origins, row_ndim)
    if found is None or (found.fill is not None and found.fill != 0):
        return None
    return FactoredRows(found.table, found.positions, None, found.table.dtype)


def _broadcast(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    entries, shape = entries_of(eqn, row_ndim), aval_of(eqn.outvars[0]).shape
    (operand, *_), dimensions = eqn.invars, parameter(eqn, "broadcast_dimensions")
    given = dict(zip(dimensions, aval_of(operand).shape, strict=True))
    sizes = tuple(given.get(d, 1) for d in range(len(entries)))
    if sizes == entries:
        return _reshape(eqn, origins, row_ndim)
    x = origins.read(operand)
    if x is None or not jnp.issubdtype(x.dtype, jnp.inexact):
        return None
    source = lax.broadcast_in_dim(x, (*sizes, *shape[len(entries) :]), dimensions)
    return _repeated_rows(source.reshape(-1, *shape[len(entries) :]), sizes, entries)


def _reshape(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    old, new = (aval_of(v).shape for v in (eqn.invars[0], eqn.outvars[0]))
    entries = entries_of(eqn, row_ndim)
    kept = len(old) - row_ndim
    if kept <= 0 or old[kept:] != new[len(entries) :]:
        return None
    rows = factors(origins, eqn.invars[0], row_ndim)
    if rows is None or rows.index is None:
        return rows
    weight = None if rows.weight is None else rows.weight.reshape(entries)
    return dataclasses.replace(rows, index=rows.index.reshape(entries), weight=weight)


def _same(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    return factors(origins, eqn.invars[0], row_ndim)


def _negate(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    rows = factors(origins, eqn.invars[0], row_ndim)
    return None if rows is None else rows.scaled(jnp.negative)


def _convert(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    rows, dtype = factors(origins, eqn.invars[0], row_ndim), parameter(eqn, "new_dtype")
    if rows is None or not jnp.issubdtype(dtype, jnp.floating) or not _is_exact(rows):
        return None
    source = rows.source.astype(dtype) if rows.weight is None else rows.source
    return dataclasses.replace(rows, source=source, dtype=jnp.dtype(dtype))


def _is_exact(rows: FactoredRows) -> bool:
    """Whether rows are in the dtype in which they are computed."""
    arrays = [x for x in (rows.source, rows.weight) if x is not None]
    return rows.dtype == joint_dtype(*arrays)


def _add(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    """The sum of the same rows, each times one number and times another, as of x * x."""
    first, second = (factors(origins, v, row_ndim) for v in eqn.invars)
    if first is None or second is None or first.source is not second.source:
        return None
    if first.weight is None or second.weight is None or first.dtype != second.dtype:
        return None
    return dataclasses.replace(first, weight=first.weight + second.weight)


def _multiply(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    entries = entries_of(eqn, row_ndim)
    for v, other in (eqn.invars, eqn.invars[::-1]):
        rows = _operand(v, eqn, origins, row_ndim)
        if rows is None or not _is_exact(rows):
            continue
        if aval_of(other).shape == ():
            factor = origins.read(other)
            return None if factor is None else rows.scaled(functools.partial(_times, factor))
        weight = of_entries(other, entries, origins, row_ndim)
        if weight is not None:
            weight = weight if rows.index is not None else weight.reshape(-1)
            weight = weight if rows.weight is None else rows.weight * weight
            return dataclasses.replace(rows, weight=weight)
    return None


def _sliced(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    size = aval_of(eqn.outvars[0]).size
    if not is_known(size) or size * aval_of(eqn.outvars[0]).dtype.itemsize < _LARGE_SLICES:
        return None
    return rows_of_slices(eqn, origins, row_ndim, factors)


def _transpose(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    origins, maker = origins.maker(eqn.invars[0])
    if maker is None or name_of(maker) != "dot_general":
        return None
    permutation = parameter(eqn, "permutation")
    return _outer_product(maker, origins, row_ndim, permutation)


def _dot_general(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    permutation = tuple(range(len(aval_of(eqn.outvars[0]).shape)))
    return _outer_product(eqn, origins, row_ndim, permutation)


def _outer_product(
    eqn: JaxprEqn, origins: Origins, row_ndim: int, permutation: tuple[int, ...]
) -> _Factors:
    """Rows times weights by `dot_general`, as in the backward pass of an einsum of both."""
    operands = [origins.read(v) for v in eqn.invars]
    contracted, batch = parameter(eqn, "dimension_numbers")
    shape, dtype = aval_of(eqn.outvars[0]).shape, aval_of(eqn.outvars[0]).dtype
    order = [shape[d] for d in permutation]
    entries, count = tuple(order[: len(order) - row_ndim]), len(batch[0])
    free = []  # the dimensions of the result that each operand has alone
    begin = count
    for x, sums, shared in zip(operands, contracted, batch, strict=True):
        if x is None or x.dtype != dtype or any(x.shape[d] != 1 for d in sums):
            return None
        free.append(list(range(begin, begin + x.ndim - len(sums) - len(shared))))
        begin += len(free[-1])
    of_rows, of_entries = list(permutation[len(entries) :]), permutation[: len(entries)]
    if of_rows not in free:
        return None
    which = free.index(of_rows)

    def placed(number: int, dimensions: list[int]) -> jax.Array:
        """An operand with these dimensions of the result."""
        x, sums, shared = (group[number] for group in (operands, contracted, batch))
        alone = [d for d in range(x.ndim) if d not in (*sums, *shared)]
        its = dict(zip((*range(count), *free[number]), (*shared, *alone), strict=True))
        return jnp.transpose(x, [*(its[d] for d in dimensions), *sums]).reshape(
            [shape[d] for d in dimensions]
        )

    of_both = [d for d in of_entries if d < count]
    source = placed(which, [*of_both, *of_rows])
    source = source.reshape(-1, *order[len(entries) :])
    weight = placed(1 - which, list(of_entries))
    sizes = tuple(shape[d] if d < count else 1 for d in of_entries)
    if not origins.scaled_only:
        return dataclasses.replace(_repeated_rows(source, sizes, entries), weight=weight)
    is_scaled = sizes == entries
    return FactoredRows(source, None, weight.reshape(-1), dtype) if is_scaled else None


def _operand(v: Any, eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    """The factors of an operand, which may have size 1 where the result has more entries."""
    entries, shape = entries_of(eqn, row_ndim), aval_of(eqn.outvars[0]).shape
    given = aval_of(v).shape
    if given == shape:
        return factors(origins, v, row_ndim)
    x = origins.read(v)
    if x is None or len(given) != len(shape) or given[len(entries) :] != shape[len(entries) :]:
        return None
    sizes = given[: len(entries)]
    return _repeated_rows(x.reshape(-1, *shape[len(entries) :]), sizes, entries)


def _repeated_rows(
    source: jax.Array, sizes: tuple[int, ...], entries: tuple[int, ...]
) -> FactoredRows:
    """Rows (prod(sizes), *row) repeated along those of the entries where the size is 1."""
    index = lax.iota(jnp.int32, source.shape[0]).reshape(sizes)
    return FactoredRows(source, jnp.broadcast_to(index, entries), None, source.dtype)


def _times(factor: Any, x: jax.Array) -> jax.Array:
    return x * factor


def _select(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    """Rows where a condition of their entry holds, zeros elsewhere."""
    for v, there in kept_where(eqn, origins, row_ndim):
        rows = factors(origins, v, row_ndim)
        if rows is None or rows.index is None or rows.weight is not None:
            continue
        if _is_exact(rows):
            index = jnp.where(there, rows.index, rows.source.shape[0])
            return dataclasses.replace(rows, index=index)
    return None


_RULES: dict[str, Callable[[JaxprEqn, Origins, int], _Factors]] = {
    "gather": _gather,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "convert_element_type": _convert,
    "dot_general": _dot_general,
    "mul": _multiply,
    "add_any": _sliced,
    "neg": _negate,
    "pad": _sliced,
    "select_n": _select,
    "transpose": _transpose,
    "copy": _same,
    "copy_p": _same,
    "name": _same,
}
_SCALING = {
    "add_any": _add,
    **{
        name: _RULES[name]
        for name in (
            *("copy", "copy_p", "dot_general", "expand_dims", "mul"),
            *("name", "neg", "reshape", "squeeze", "transpose"),
        )
    },
}
