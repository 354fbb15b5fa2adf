"""The rows that a gradient touches, updated in the way that is fastest for their table.

| table                        | way                                                    |
|------------------------------|--------------------------------------------------------|
| `PackedTable`                | its lines, with one scatter for each part              |
| few rows for each lookup     | the whole table, kept where no row is touched          |
| any other array              | one scatter with the update as its combiner            |

With V = 10 rows and 8 lookups a dense update does little more than one of rows, on all cores
and without looking for equal ids. Made lazy it is

    table' = where(touched, new(table, gradient), table)        touched (V, 1)

bit for bit the old table in the rows that no id names.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from jmask._base.array_types import explicit_sharding, is_narrow, trailing
from jmask._base.jaxprs import bound, interpret
from jmask._kernels import tuning
from jmask._kernels.scatter_update import Combiner, entry_by_entry, update_elementwise
from jmask._kernels.update_rows import RowUpdate
from jmask._tables.packed import PackedTable
from jmask._tensors.row_sparse import RowSparse


def update_entries(
    combiner: Combiner, tables: Sequence[Any], gradient: RowSparse, scalars: Sequence[Any]
) -> RowUpdate | list[Any]:
    """Make an elementwise update of the rows of a gradient; `updated` runs it.

    Args:
        combiner: (*table entries, gradient entry, *scalars) -> new table entries.
        tables: of one shape and kept in one way: arrays, or each a `PackedTable`.
        gradient: of such a table; rows of equal ids are summed first.
        scalars: what else the combiner takes.
    """
    table, *others = tables
    array_combiner = entry_by_entry(combiner)
    if isinstance(table, PackedTable):
        return table.updated(array_combiner, others, gradient.coalesce(), scalars)
    whole = updated_whole(array_combiner, tables, gradient, scalars)
    if whole is not None:
        return whole
    return update_elementwise(
        combiner, tables, gradient.row_ids(), gradient.rows(), scalars, gradient.order
    )


def is_saturated(gradient: RowSparse, tables: Sequence[jax.Array]) -> bool:
    """Decide whether to update whole tables, arrays of which the gradient touches most rows."""
    # 16-bit gradients are summed in float32, which `todense` has no reason to do.
    return (
        gradient.shape[0] <= tuning.DENSE_ROWS_FOR_EACH_LOOKUP * gradient.nse
        and not is_narrow(gradient.dtype)
        and explicit_sharding(*tables) is None
    )


def updated_whole(
    new_entries: Callable[..., Any],
    tables: Sequence[jax.Array],
    gradient: RowSparse,
    scalars: Sequence[Any],
) -> list[jax.Array] | None:
    """Update whole tables in the rows of a gradient; return None unless it touches most rows.

    Args:
        new_entries: (*tables, dense gradient, *scalars) -> new tables of the same dtypes,
            row by row.
        tables: arrays (V, ...).
        gradient: of a table.
        scalars: what else `new_entries` takes.
    """
    if not is_saturated(gradient, tables):
        return None
    touched = jnp.zeros(gradient.shape[:1], bool).at[gradient.row_ids()].set(True, mode="drop")
    touched = trailing(touched, gradient.ndim)
    given = [*tables, gradient.todense(), *scalars]
    program = jax.make_jaxpr(new_entries)(*given)
    jaxpr = program.jaxpr
    # What is computed from a new table is computed from the one that is kept. In rows that are
    # touched they are the same, and XLA would copy the old one, which it needs to the end.
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    outputs = jaxpr.outvars
    alone = [isinstance(v, Var) and v in made and outputs.count(v) == 1 for v in outputs]
    places = zip(outputs, tables, alone, strict=True)
    old = {v: table for v, table, is_alone in places if is_alone}

    def kept(x: jax.Array, table: jax.Array) -> jax.Array:
        return jnp.where(touched, x, table)

    def kept_elsewhere(eqn: JaxprEqn, inputs: list[Any]) -> list[Any]:
        results = zip(eqn.outvars, bound(eqn, inputs), strict=True)
        return [kept(x, old[v]) if v in old else x for v, x in results]

    # No equation makes an output that is an input or a number, as where the state is the last
    # gradient; and one that is two outputs is kept in two ways.
    results = interpret(jaxpr, program.consts, given, kept_elsewhere)
    found = zip(results, tables, alone, strict=True)
    return [x if is_alone else kept(x, table) for x, table, is_alone in found]
