"""What an equation does to arrays (*entries, *row), entry by entry.

    rows = gather table ids           Gathered(table, ids, fill)      gathered
    m    = broadcast_in_dim mask      mask, of the entries alone      of_entries
    z    = broadcast_in_dim 0.0       zero                            is_zero
    x    = select_n m z rows          rows, where m holds             kept_where

Both who reads rows forwards and who adds them backwards ask here.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jmask._autodiff.origins import Origins
from jmask._base.array_types import explicit_sharding
from jmask._base.forms import aval_of, name_of, parameter
from jmask._base.row_ids import canonical

# Operations that keep the number an array is everywhere, if it is 0.
_THE_SAME_NUMBER = ("broadcast_in_dim", "convert_element_type")


class Gathered(NamedTuple):
    """Rows of a table, one for each entry.

    Attributes:
        table (V, *row): floating or complex.
        positions (*entries,): int32, canonical.
        fill: what V reads; None if all positions are in the table.
    """

    table: jax.Array
    positions: jax.Array
    fill: Any


def entries_of(eqn: JaxprEqn, row_ndim: int) -> tuple[int, ...]:
    """The dimensions of the result of an equation before those of its rows."""
    shape = aval_of(eqn.outvars[0]).shape
    return shape[: len(shape) - row_ndim]


def gathered(eqn: JaxprEqn, origins: Origins, row_ndim: int) -> Gathered | None:
    """What a `gather` of whole rows reads; None of another."""
    numbers, mode = parameter(eqn, "dimension_numbers"), parameter(eqn, "mode")
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    entries = entries_of(eqn, row_ndim)
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
    ):
        return None
    rows = operand.shape[0]
    index = lax.index_in_dim(indices, 0, -1, keepdims=False)
    index = canonical(index, rows) if fills else jnp.clip(index, 0, rows - 1)
    fill = parameter(eqn, "fill_value")
    fill = np.nan if fills and fill is None else fill
    return Gathered(operand, index.astype(jnp.int32), fill if fills else None)


def is_placed(x: jax.Array) -> bool:
    """Whether an array lies on several devices by its type, or is the part of one of them.

    Of parts a caller may make a whole, and the factors of a part are of that part alone.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return bool(manual) or explicit_sharding(x) is not None


def is_zero(v: Any, origins: Origins) -> bool:
    """Whether a variable or literal is 0 everywhere, as the program says."""
    if isinstance(v, Literal):
        return not np.any(v.val)
    value = origins.values.get(v)
    if isinstance(value, bool | int | float | np.generic | np.ndarray):
        return not np.any(value)
    origins, maker = origins.maker(v)
    if maker is None or name_of(maker) not in _THE_SAME_NUMBER:
        return False
    return is_zero(maker.invars[0], origins)


def of_entries(
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
    if maker is not None and name_of(maker) == "convert_element_type":  # of weak types, too
        x = of_entries(maker.invars[0], entries, origins, row_ndim)
        return None if x is None else x.astype(parameter(maker, "new_dtype"))
    if maker is None or name_of(maker) != "broadcast_in_dim":
        return None
    (operand, *_), dimensions = maker.invars, parameter(maker, "broadcast_dimensions")
    given = dict(zip(dimensions, aval_of(operand).shape, strict=True))
    x = origins.read(operand)
    if x is None or any(given.get(d, 1) != 1 for d in range(len(entries), len(shape))):
        return None
    sizes = tuple(given.get(d, 1) for d in range(len(entries)))
    return jnp.broadcast_to(x.reshape(sizes), entries)


def kept_where(
    eqn: JaxprEqn, origins: Origins, row_ndim: int
) -> Iterator[tuple[Any, jax.Array]]:
    """The operands of a `select_n` beside zeros, and the entries (*entries,) that it keeps."""
    which, *cases = eqn.invars
    chosen = of_entries(which, entries_of(eqn, row_ndim), origins, row_ndim)
    if chosen is None or len(cases) != 2 or chosen.dtype != jnp.dtype(bool):
        return
    for v, other, there in ((cases[0], cases[1], ~chosen), (cases[1], cases[0], chosen)):
        if is_zero(other, origins):
            yield v, there
