"""How the rows that a gradient touches are updated: a table of ways, read from the top.

| way     | where                                    | what is done                            |
|---------|------------------------------------------|-----------------------------------------|
| ADD     | linear in the gradient, and of its dtype | an accumulating scatter                 |
| DENSE   | few rows for each lookup                 | the table, kept where no row is touched |
| ROWS    | not entry by entry                       | gather, compute, scatter of unique rows |
| SCATTER | anything else                            | one scatter, the update its combiner    |

How a device does ADD, ROWS and SCATTER is found in `_kernels.update_rows`.

With V = 10 rows and 8 lookups a dense update does little more than one of rows, on all cores
and without looking for equal ids. Made lazy it is

    table' = where(touched, new(table, gradient), table)        touched (V, 1)

bit for bit the old table in the rows that no id names.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jmask._base.array_types import (
    added,
    is_complex,
    is_known,
    is_narrow,
    joint_dtype,
    trailing,
)
from jmask._base.shardings import explicit_sharding
from jmask._kernels import tuning
from jmask._kernels.gathered_rows import gathered, scaled
from jmask._kernels.lines import marked, unmarked
from jmask._kernels.rows import add_rows, gather_unique_rows, set_rows
from jmask._kernels.scatter_update import Combiner, entry_by_entry, update_elementwise
from jmask._kernels.update_rows import ADDITION, RowUpdate, Update, add_to_rows
from jmask._tensors.row_sparse import RowSparse
from jmask._updates.checks import keep_valid, unchanged_where_masked


def update_rows(
    combiner: Combiner,
    tables: Sequence[jax.Array],
    gradient: RowSparse,
    scalars: Sequence[jax.Array],
    *,
    are_steps: Sequence[bool],
    is_elementwise: bool = True,
    linear: Callable[[jax.Array], jax.Array] | None = None,
    valid: jax.Array | None = None,
) -> RowUpdate | list[jax.Array]:
    """Make an update of the rows of a gradient; `updated` runs it.

    Args:
        combiner: (*tables, gradient, *scalars) -> one array for each table: entries to entries
            if it is elementwise, rows (n, ...) to rows if not.
        tables: with the same rows.
        gradient: of such a table; rows of equal ids are summed first.
        scalars: what else the combiner takes.
        are_steps: of which tables the combiner returns what is added; else what is put there.
        is_elementwise: whether entries of all tables correspond one to one.
        linear: rows of the gradient -> what is added to the only table, if that is all.
        valid (n, *row): which entries of a masked gradient exist; its ids are unique. The
            others keep what they have.
    """
    table, count = tables[0], len(tables)
    # The gradient is opened once: what follows takes canonical ids, rows, and their order.
    ids, rows, order = gradient.row_ids(), gradient.rows(), gradient.order
    if linear is not None and table.dtype == gradient.dtype and not is_narrow(table.dtype):
        steps = unchanged_where_masked(scaled(gradient.values, linear), valid)
        return RowUpdate(ADDITION, tables, ids, gathered(steps), [], order)

    def new_entries(*entries: jax.Array) -> list[jax.Array]:
        made = zip(entries, combiner(*entries), are_steps, strict=False)
        return [(added(x, y) if is_step else y).astype(x.dtype) for x, y, is_step in made]

    if valid is None and is_saturated(gradient, tables):
        function = entry_by_entry(new_entries) if is_elementwise else new_entries
        dense = add_to_rows(jnp.zeros_like(table, gradient.dtype), ids, rows, order)
        touched = jnp.zeros(table.shape[:1], bool).at[ids].set(True, mode="drop")
        made = zip(function(*tables, dense, *scalars), tables, strict=True)
        return [jnp.where(trailing(touched, x.ndim), new, x) for new, x in made]

    def new_rows(x: RowUpdate) -> list[jax.Array]:
        *others, mask = x.scalars if valid is not None else (*x.scalars, None)
        old = [gather_unique_rows(table, x.ids, x.order) for table in x.tables]
        new = []
        made = zip(x.tables, old, combiner(*old, x.rows, *others), are_steps, strict=True)
        for table, before, y, is_step in made:
            y = unchanged_where_masked(y, mask) if is_step else keep_valid(y, before, mask)
            if is_step and table.dtype == joint_dtype(table, y):
                # Without reading the old rows.
                new.append(add_rows(table, x.ids, y, x.order) if x.ids.shape[0] else table)
            else:
                y = added(before, y) if is_step else y
                new.append(set_rows(table, x.ids, y, x.order))
        return new

    if not is_elementwise:
        others = [*scalars] if valid is None else [*scalars, valid]
        return RowUpdate(Update(new_rows), tables, ids, rows, others, order)
    if valid is None:
        return update_elementwise(new_entries, tables, ids, rows, scalars, order)

    def new_valid_entries(*entries: jax.Array) -> list[jax.Array]:
        *given, mask = entries
        pairs = zip(new_entries(*given), given, strict=False)
        return [jnp.where(mask != 0, x, y) for x, y in pairs]

    def new_marked_entries(*entries: jax.Array) -> list[jax.Array]:
        values, mask = unmarked(entries[count])
        others = entries[count + 1 :]
        return new_valid_entries(*entries[:count], values, *others, mask.astype(jnp.int32))

    if order == "unique" and not is_complex(gradient):  # lines, with the mask in their bits
        lines = marked(gradient.values, valid)
        return update_elementwise(new_marked_entries, tables, ids, lines, scalars, order)
    # A number, as a scatter takes arrays of one dtype.
    others = [*scalars, valid.astype(gradient.dtype)]
    return update_elementwise(new_valid_entries, tables, ids, rows, others, order)


def is_saturated(gradient: RowSparse, tables: Sequence[jax.Array]) -> bool:
    """Decide whether to update whole tables, arrays of which the gradient touches most rows."""
    # 16-bit gradients are summed in float32, which `todense` has no reason to do.
    return (
        is_known(gradient.shape[0], gradient.nse)
        and gradient.shape[0] <= tuning.DENSE_ROWS_FOR_EACH_LOOKUP * gradient.nse
        and not is_narrow(gradient.dtype)
        and explicit_sharding(*tables) is None
    )
