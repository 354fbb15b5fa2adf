"""Reading and writing a few rows of a large array: the only scatters in jmask.

With `ids` in canonical form (padding = number of rows) and T of shape (V, *row):

    gather_rows(T, ids)      (n, *row): T[ids]; padding reads some valid row
    set_rows(T, ids, rows)   T with T[ids] = rows; padding writes nothing
    add_rows(T, ids, rows)   T with T[ids] += rows; padding writes nothing

A padding id reads an existing row, not zeros: arithmetic on what it reads is then the
arithmetic of an ordinary row, so it cannot raise a division by zero that no row has.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.array_types import is_complex, is_known, real_dtype
from jmask._base.lowering import lower, primitive
from jmask._base.row_ids import Order, widen
from jmask._base.shardings import (
    explicit_sharding,
    is_ambiguous,
    placed_like,
    spec_of,
    varying_alike,
)
from jmask._base.shards import Shards, all_gathered, entry
from jmask._kernels.gather import BITS, Gather, zero_of

_CLIP = lax.GatherScatterMode.CLIP
_DROP = lax.GatherScatterMode.FILL_OR_DROP


def gather_rows(table: jax.Array, ids: jax.Array, *, coalesced: bool = False) -> jax.Array:
    """Gather `table[ids]` (n, *row); padding ids read an arbitrary existing row.

    Args:
        table (V, *row): any array with at least one row.
        ids (n,): canonical ids.
        coalesced: the ids are sorted, and unique but for padding.
    """
    if table.shape[0] == 0:
        return jnp.zeros((ids.shape[0], *table.shape[1:]), table.dtype)
    gather = Gather.rows_of(table.shape, _CLIP, indices_are_sorted=coalesced)
    return gather(table, ids[:, None])


def ids_after_reading(ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Make ids (n,) depend on rows (n, *row) that were read, or on a scalar made of them.

    XLA orders a read before a write in place only where the write depends on the read.
    Otherwise it copies the table and reads from the copy.
    """
    read = None if explicit_sharding(ids, rows) is not None else zero_after_reading(rows)
    return ids if read is None else plus_zero(ids, read)


def zero_after_reading(rows: jax.Array) -> jax.Array | None:
    """Return integer zeros (n,) that depend on rows (n, *row), as far as XLA can tell.

    None if there are no rows, or no integers of their size.
    """
    bits = BITS.get(real_dtype(rows.dtype).itemsize)
    if bits is None or not rows.size:
        return None
    entry = lax.stop_gradient(rows)
    entry = entry.reshape(rows.shape[0], -1)[:, 0] if rows.ndim else entry
    entry = entry.real if is_complex(entry) else entry
    return zero_of(lax.bitcast_convert_type(entry, bits))


def plus_zero(ids: jax.Array, zero: jax.Array) -> jax.Array:
    """Add integer zeros, one for each id or one for all, on which the ids then depend."""
    zeros = jnp.broadcast_to(lax.convert_element_type(zero, ids.dtype), ids.shape)
    return lax.add(*varying_alike(ids, placed_like(zeros, ids)))


def split_rows(
    ids: jax.Array, rows: jax.Array, each: int, count: int, row: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Split each row into `each` rows of shape `row`, of `count` in all, with canonical ids."""
    first = widen(ids, count)
    if each != 1:
        first = first[:, None] * each + np.arange(each, dtype=first.dtype)[None]
        first = jnp.minimum(first, count).reshape(-1)
    return first, rows.reshape(first.shape[0], *row)


def entries_of(ids: jax.Array) -> jax.Array:
    """Number the entries (n,) of ids, int32."""
    return varying_alike(lax.iota(jnp.int32, ids.shape[0]), ids)[0]


def sorted_with(ids: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sort ids (n,) and carry numbers (n,) along; equal ids may have them in any order."""
    ordered, moved = lax.sort((ids, x), num_keys=1, is_stable=False)
    return ordered, moved


def set_rows(
    table: jax.Array, ids: jax.Array, rows: jax.Array, order: Order = "any"
) -> jax.Array:
    """Return `table` with `table[ids] = rows`, in place when its buffer may be reused."""
    return _write("set", table, ids, rows, order)


def add_rows(
    table: jax.Array, ids: jax.Array, rows: jax.Array, order: Order = "any"
) -> jax.Array:
    """Return `table` with `table[ids] += rows`, duplicates summed, in place when possible."""
    return _write("add", table, ids, rows, order)


Kind = Literal["set", "add"]
_SCATTERS = {"set": lax.scatter, "add": lax.scatter_add}


def _write(
    kind: Kind, table: jax.Array, ids: jax.Array, rows: jax.Array, order: Order
) -> jax.Array:
    # There is no row, or no id. A sum without terms still depends on them, as a gradient.
    if table.shape[0] == 0 or (kind == "set" and 0 in ids.shape):
        return table
    shards = Shards.of(table, ids, rows)
    rows = rows.astype(table.dtype)
    if shards is not None and is_ambiguous(table, ids, rows):
        return _written_on_shards(shards, kind, table, ids, rows, order)
    if order == "any" or shards is not None or not ids.shape[0]:
        return scattered(table, ids, rows, kind, order)
    written: jax.Array
    (written,) = WRITE.bind(*varying_alike(table, ids, rows), kind=kind, order=order)
    return written


def is_routed(shards: Shards, ids: jax.Array, order: Order) -> bool:
    """Decide whether ids (n,) are on the shards that have their rows."""
    return order == "routed" and spec_of(ids)[0] == entry(shards.rows)


def _written_on_shards(
    shards: Shards,
    kind: Kind,
    table: jax.Array,
    ids: jax.Array,
    rows: jax.Array,
    order: Order,
) -> jax.Array:
    """Return the table with rows written by each shard where they live."""
    is_there = is_routed(shards, ids, order)
    batch = entry(shards.rows) if is_there else shards.batch(ids)

    def written(block: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
        ids, rows = all_gathered(None if is_there else batch, ids, rows)
        places = shards.local(ids, block.shape[0])
        return _write(kind, block, places, rows, order if order == "any" else "unique")

    specs = [shards.spec, (batch,), shards.spec_of_rows(batch)]
    return shards.run(written, table, ids, rows, specs=specs, out=shards.spec)


def scattered(
    table: jax.Array, ids: jax.Array, rows: jax.Array, kind: Kind, order: Order
) -> jax.Array:
    """Bind one scatter.

    Args:
        table, ids, rows: as in `set_rows`.
        kind: a key of `_SCATTERS`.
        order: what to promise of the ids.
    """
    ids, rows = never_alone(table.shape[0], ids, rows)
    is_unique = order != "any"
    if is_unique:
        ids, is_unique = _unique_padding(ids, table.shape[0])
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, table.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    return _SCATTERS[kind](
        table,
        ids[:, None],
        rows,
        dimensions,
        indices_are_sorted=is_unique and order == "sorted",
        unique_indices=is_unique,
        mode=_DROP,
    )


def never_alone(rows: int, ids: jax.Array, *values: jax.Array) -> list[jax.Array]:
    """Add padding to a single id (1,) and its rows.

    XLA makes slices of a gather and a scatter of one row, reads the one again where it is
    needed, and keeps a copy of the table for that (CPU compiler of jaxlib 0.10.0 to 0.12.0).
    """
    if ids.shape[0] != 1:
        return [ids, *values]
    padded = (jnp.concatenate([x, jnp.zeros_like(x)]) for x in values)
    return [jnp.concatenate([ids, jnp.full_like(ids, rows)]), *padded]


def _unique_padding(ids: jax.Array, rows: int) -> tuple[jax.Array, bool]:
    """Replace padding V, V, V by V, V+1, V+2, so that unique ids can be promised to XLA.

    Returns the ids and whether the promise can be made (V + n must fit the dtype).
    """
    if not is_known(*ids.shape) or rows + ids.shape[0] > jnp.iinfo(ids.dtype).max:
        return ids, False
    position = lax.iota(ids.dtype, ids.shape[0])
    return jnp.where(ids >= rows, rows + position, ids), True


# --- unique ids --------------------------------------------------------------------------


WRITE = primitive(
    "jmask_write_rows",
    lambda *arrays, **how: [scattered(*arrays, **how)],
    shapes=lambda table, ids, rows, **_: [table],
)


def _written_on_gpus(
    table: jax.Array, ids: jax.Array, rows: jax.Array, *, kind: Kind, order: Order
) -> list[jax.Array]:
    # XLA fuses the lookup of the old rows into the scatter that writes the new ones, and where
    # it does not see that both are of one buffer (stacked tables) it reads from a copy of it.
    return [scattered(table, ids, lax.optimization_barrier(rows), kind, order)]


lower(WRITE, _written_on_gpus, platform="gpu")


def gather_unique_rows(table: jax.Array, ids: jax.Array, order: Order) -> jax.Array:
    """Gather rows as `gather_rows`, in O(n) on a TPU for tables of one entry a row too."""
    if ids.shape[0] == 1:
        (ids,) = never_alone(table.shape[0], ids)
        return gather_unique_rows(table, ids, order)[:1]
    shards = Shards.of(table, ids)
    if shards is not None and is_routed(shards, ids, order):

        def own(block: jax.Array, ids: jax.Array) -> jax.Array:
            return gather_unique_rows(block, shards.local(ids, block.shape[0]), "unique")

        here = entry(shards.rows)
        specs = [shards.spec, (here,)]
        return shards.run(own, table, ids, specs=specs, out=shards.spec_of_rows(here))
    has_lines = table.ndim > 1 and table.size == table.shape[0] > 0 and ids.shape[0]
    if not has_lines or shards is not None:
        return gather_rows(table, ids, coalesced=order == "sorted")
    table, ids = varying_alike(table, ids)
    return READ.bind(table, ids, order=order)[0]


def read_rows(table: jax.Array, ids: jax.Array, *, order: Order) -> list[jax.Array]:
    return [gather_rows(table, ids, coalesced=order == "sorted")]


READ = primitive(
    "jmask_read_rows",
    read_rows,
    shapes=lambda table, ids, **_: [
        table.update(shape=(*ids.shape, *table.shape[1:]), weak_type=False)
    ],
)
