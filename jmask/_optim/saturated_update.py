"""Tables most of whose rows are touched: updated whole, in one pass, where a row is touched.

With V = 10 rows and 8 lookups a dense update does little more than one of rows, on all cores
and without looking for equal ids. Made lazy it is

    table' = where(touched, new(table, gradient), table)        touched (V, 1)

bit for bit the old table in the rows that no id names.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmask._base.jaxprs import outputs_of, read
from jmask._base.precision import is_narrow
from jmask._tensors.row_sparse import RowSparse

# Rows for each lookup.
_FEW_ROWS = 1.5


def is_saturated(gradient: RowSparse) -> bool:
    """Whether to update the whole table."""
    # 16-bit gradients are summed in float32, which `todense` has no reason to do.
    return gradient.shape[0] <= _FEW_ROWS * gradient.nse and not is_narrow(gradient.dtype)


def update_where_touched(
    new_entries: Callable[..., Any],
    tables: Sequence[jax.Array],
    gradient: RowSparse,
    scalars: Sequence[Any],
) -> list[jax.Array]:
    """Tables with `new_entries` in the rows of the gradient.

    Args:
        new_entries: (*tables, dense gradient, *scalars) -> new tables of the same dtypes,
            row by row.
        tables: arrays (V, ...).
        gradient: of a table.
        scalars: what else `new_entries` takes.
    """
    touched = jnp.zeros(gradient.shape[:1], bool).at[gradient.row_ids()].set(True, mode="drop")
    touched = touched.reshape((-1,) + (1,) * (gradient.ndim - 1))
    given = [*tables, gradient.todense(), *scalars]
    program = jax.make_jaxpr(new_entries)(*given)
    jaxpr = program.jaxpr
    # What is computed from a new table is computed from the one that is kept. In rows that are
    # touched they are the same, and XLA would copy the old one, which it needs to the end.
    old = dict(zip(jaxpr.outvars, tables, strict=True))
    values = dict(zip(jaxpr.invars, given, strict=True))
    values.update(zip(jaxpr.constvars, program.consts, strict=True))
    for eqn in jaxpr.eqns:
        for v, x in outputs_of(eqn, [read(values, v) for v in eqn.invars]).items():
            values[v] = jnp.where(touched, x, old[v]) if v in old else x
    return [read(values, v) for v in jaxpr.outvars]
