"""Which cotangents of rows repeat those of a smaller array, read from the gradient program.

    ct_bags (2, D)                          of bags
    ct = gather ct_bags [0 0 1]             of their entries: one cotangent for several
    g = scatter-add zeros(V, D) ids ct      FactoredRows(ct_bags, [0, 0, 1])

Then the gradient of the table keeps the cotangents of the bags, and the bag of each entry. What
a program may do between the two: gather or broadcast along the entries, weight each of them, by
an einsum too, leave some out, scale, reshape, cast. Of anything else the rows are an array, as
always.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jmask._base.array_types import explicit_sharding
from jmask._base.forms import CALLS, aval_of, called, name_of, parameter
from jmask._base.precision import joint_dtype
from jmask._base.row_ids import canonical
from jmask._kernels.factored_rows import FactoredRows, pays


@dataclasses.dataclass(frozen=True)
class Repeated:
    """An array, and the variable of a program by which to ask for its factors."""

    array: jax.Array
    origins: "Origins"
    variable: Var


def plain(x: Any) -> Any:
    """The array of a `Repeated`, anything else as it is."""
    return x.array if isinstance(x, Repeated) else x


@dataclasses.dataclass(frozen=True)
class Origins:
    """Where the arrays of a program come from, while it is run.

    Attributes:
        definitions: the equation that makes a variable.
        values: what has been computed, `Repeated` for some inputs.
    """

    definitions: dict[Var, JaxprEqn]
    values: dict[Var, Any]

    def repeated(self, v: Any, value: Any) -> Any:
        """The value of a variable, with what is known of its factors."""
        if not isinstance(value, jax.Array) or isinstance(v, Literal) or not value.ndim:
            return value
        return Repeated(value, self, v)

    def read(self, v: Any) -> Any:
        """The array of a variable or literal; None if it is not there, or in another form."""
        value = v.val if isinstance(v, Literal) else plain(self.values.get(v))
        return value if isinstance(value, jax.Array | np.ndarray | np.generic) else None

    def factors(self, v: Any, row_ndim: int) -> FactoredRows | None:
        """The factors of a variable (*entries, *row), with an index for each entry."""
        origins, eqn = self.maker(v)
        rule = None if eqn is None else _RULES.get(name_of(eqn))
        if eqn is None or rule is None or len(aval_of(v).shape) <= row_ndim:
            return None
        return rule(eqn, origins, row_ndim)

    def maker(self, v: Any) -> "tuple[Origins, JaxprEqn | None]":
        """The equation that makes a variable, in a function that is called or outside of it."""
        eqn = None if isinstance(v, Literal) else self.definitions.get(v)
        if eqn is not None and name_of(eqn) in CALLS:
            output = called(eqn)[0].outvars[eqn.outvars.index(v)]
            return self._inside(eqn).maker(output)
        value = None if isinstance(v, Literal) or eqn is not None else self.values.get(v)
        if isinstance(value, Repeated):
            return value.origins.maker(value.variable)
        return self, eqn

    def _inside(self, eqn: JaxprEqn) -> "Origins":
        jaxpr, consts = called(eqn)
        definitions = {v: inner for inner in jaxpr.eqns for v in inner.outvars}
        given = [self.repeated(v, self.read(v)) for v in eqn.invars]
        inputs = zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *given), strict=True)
        return Origins(definitions, dict(inputs))


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
    if not isinstance(updates, Repeated) or not whole_rows or _is_placed(updates.array):
        return None
    rows = updates.origins.factors(updates.variable, row_ndim)
    if rows is None or rows.dtype != aval_of(eqn.outvars[0]).dtype:
        return None
    count = rows.index.size
    if 0 in updates.array.shape or not pays(rows.source.shape[0], count):
        return None
    weight = None if rows.weight is None else rows.weight.reshape(count)
    return FactoredRows(rows.source, rows.index.reshape(count), weight, rows.dtype)


def _is_placed(x: jax.Array) -> bool:
    """Whether an array lies on several devices by its type, or is the part of one of them.

    Of parts a caller may make a whole, and the factors of a part are of that part alone.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return bool(manual) or explicit_sharding(x) is not None


# --- rules -------------------------------------------------------------------------------

_Factors = FactoredRows | None


def _entries(eqn: JaxprEqn, row_ndim: int) -> tuple[int, ...]:
    shape = aval_of(eqn.outvars[0]).shape
    return shape[: len(shape) - row_ndim]


def _gather(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    numbers, mode = parameter(eqn, "dimension_numbers"), parameter(eqn, "mode")
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    entries = _entries(eqn, row_ndim)
    operand, indices = map(origins.read, eqn.invars)
    if (
        operand is None
        or indices is None
        or operand.ndim != row_ndim + 1
        or numbers.start_index_map != (0,)
        or numbers.collapsed_slice_dims != (0,)
        or numbers.operand_batching_dims
        or numbers.offset_dims != tuple(range(len(entries), len(entries) + row_ndim))
        or parameter(eqn, "slice_sizes") != (1, *operand.shape[1:])
        or not jnp.issubdtype(operand.dtype, jnp.inexact)
        or (fills and parameter(eqn, "fill_value") != 0)
    ):
        return None
    rows = operand.shape[0]
    index = lax.index_in_dim(indices, 0, -1, keepdims=False)
    index = canonical(index, rows) if fills else jnp.clip(index, 0, rows - 1)
    return FactoredRows(operand, index.astype(jnp.int32), None, operand.dtype)


def _broadcast(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    entries, shape = _entries(eqn, row_ndim), aval_of(eqn.outvars[0]).shape
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
    entries = _entries(eqn, row_ndim)
    kept = len(old) - row_ndim
    if kept <= 0 or old[kept:] != new[len(entries) :]:
        return None
    rows = origins.factors(eqn.invars[0], row_ndim)
    if rows is None:
        return None
    weight = None if rows.weight is None else rows.weight.reshape(entries)
    return dataclasses.replace(rows, index=rows.index.reshape(entries), weight=weight)


def _same(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    return origins.factors(eqn.invars[0], row_ndim)


def _negate(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    rows = origins.factors(eqn.invars[0], row_ndim)
    return None if rows is None else rows.map(jnp.negative)


def _convert(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    rows, dtype = origins.factors(eqn.invars[0], row_ndim), parameter(eqn, "new_dtype")
    if rows is None or not jnp.issubdtype(dtype, jnp.floating) or not _is_exact(rows):
        return None
    source = rows.source.astype(dtype) if rows.weight is None else rows.source
    return dataclasses.replace(rows, source=source, dtype=jnp.dtype(dtype))


def _is_exact(rows: FactoredRows) -> bool:
    """Whether rows are in the dtype in which they are computed."""
    arrays = [x for x in (rows.source, rows.weight) if x is not None]
    return rows.dtype == joint_dtype(*arrays)


def _multiply(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    entries = _entries(eqn, row_ndim)
    for v, other in (eqn.invars, eqn.invars[::-1]):
        rows = _operand(v, eqn, origins, row_ndim)
        if rows is None or not _is_exact(rows):
            continue
        if aval_of(other).shape == ():
            factor = origins.read(other)
            return None if factor is None else rows.map(functools.partial(_times, factor))
        weight = _of_entries(other, entries, origins, row_ndim)
        if weight is not None:
            weight = weight if rows.weight is None else rows.weight * weight
            return dataclasses.replace(rows, weight=weight)
    return None


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
    sizes = tuple(shape[d] if d < count else 1 for d in of_entries)
    rows = _repeated_rows(source.reshape(-1, *order[len(entries) :]), sizes, entries)
    return dataclasses.replace(rows, weight=placed(1 - which, list(of_entries)))


def _operand(v: Any, eqn: JaxprEqn, origins: Origins, row_ndim: int) -> _Factors:
    """The factors of an operand, which may have size 1 where the result has more entries."""
    entries, shape = _entries(eqn, row_ndim), aval_of(eqn.outvars[0]).shape
    given = aval_of(v).shape
    if given == shape:
        return origins.factors(v, row_ndim)
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
    which, *cases = eqn.invars
    chosen = _of_entries(which, _entries(eqn, row_ndim), origins, row_ndim)
    if chosen is None or len(cases) != 2 or chosen.dtype != jnp.dtype(bool):
        return None
    for v, other, there in ((cases[0], cases[1], ~chosen), (cases[1], cases[0], chosen)):
        rows = origins.factors(v, row_ndim) if _is_zero(other, origins) else None
        if rows is not None and _is_exact(rows) and rows.weight is None:
            index = jnp.where(there, rows.index, rows.source.shape[0])
            return dataclasses.replace(rows, index=index)
    return None


def _is_zero(v: Any, origins: Origins) -> bool:
    if isinstance(v, Literal):
        return not np.any(v.val)
    maker = origins.definitions.get(v)
    made_of = [] if maker is None or name_of(maker) != "broadcast_in_dim" else maker.invars[:1]
    return any(isinstance(x, Literal) and not np.any(x.val) for x in made_of)


def _of_entries(
    v: Any, entries: tuple[int, ...], origins: Origins, row_ndim: int
) -> jax.Array | None:
    """The number that each entry of an array (*entries, *row) has in all of its row."""
    shape = aval_of(v).shape
    if len(shape) != len(entries) + row_ndim:
        return None
    if all(size == 1 for size in shape[len(entries) :]):
        x = origins.read(v)
        return (
            None if x is None else jnp.broadcast_to(x.reshape(shape[: len(entries)]), entries)
        )
    origins, maker = origins.maker(v)
    if maker is None or name_of(maker) != "broadcast_in_dim":
        return None
    (operand, *_), dimensions = maker.invars, parameter(maker, "broadcast_dimensions")
    given = dict(zip(dimensions, aval_of(operand).shape, strict=True))
    x = origins.read(operand)
    if x is None or any(given.get(d, 1) != 1 for d in range(len(entries), len(shape))):
        return None
    sizes = tuple(given.get(d, 1) for d in range(len(entries)))
    return jnp.broadcast_to(x.reshape(sizes), entries)


_RULES: dict[str, Callable[[JaxprEqn, Origins, int], _Factors]] = {
    "gather": _gather,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "convert_element_type": _convert,
    "dot_general": _dot_general,
    "mul": _multiply,
    "neg": _negate,
    "select_n": _select,
    "transpose": _transpose,
    "copy": _same,
    "copy_p": _same,
    "name": _same,
}
