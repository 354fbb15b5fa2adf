"""The distinct rows of a batch, and its ids as positions among them.

    ids        [[7, -1], [9, 7]]        a leaf of the batch; -1 is padding
    rows       [7, 9]                   of the table, ascending
    positions  [[0, -1], [1, 0]]        in place of the ids

A leaf that several tables look up, and the leaves of one table, are numbered together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.types import Function, HostArray, PyTree
from jmask._base.validation import checked_integer, leaf_name, named_parts, shown
from jmask._embedding.pad_bags import PaddedBags, rounded_up
from jmask._host.host_rows import HostRows


class BatchRows(NamedTuple):
    """Hold ids (n,) of the rows of a batch, ascending, and how many rows its step gets."""

    ids: HostArray
    capacity: int


class Finder(NamedTuple):
    """A table, the function that finds its ids in a batch, and the id that is padding."""

    table: HostRows
    find: Function
    padding_id: int | None

    def places(self, batch: PyTree, leaves: Sequence[PyTree]) -> set[int]:
        """Return which leaves of the batch hold ids of the table."""
        name, result, places = self.table.names[0], self.find(batch), set[int]()
        for x in result if isinstance(result, list) else [result]:
            array = x.ids if isinstance(x, PaddedBags) else x
            same = [k for k, leaf in enumerate(leaves) if leaf is array]
            is_array = isinstance(array, jax.Array | np.ndarray)
            if not is_array or len(same) != 1:
                count = f", which is {len(same)} leaves" if is_array else ""
                advice = "compute ids in the loader; copy those that stay ids"
                advice = advice if is_array else "make an array of a list, np.asarray(ids)"
                raise ValueError(
                    f"the function in `ids` for {name} must return an array that is one leaf "
                    f"of the batch, or a list of such, got {shown(array)}{count}: {advice}."
                )
            places.update(same)
        return places

    def check(self, ids: HostArray) -> None:
        """Refuse ids that are neither a row of the table nor padding."""
        name, count = self.table.names[0], len(self.table)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"the ids of {name} must be integers, got {ids.dtype}.")
        out_of_range = ~_is_row(ids, count)
        if self.padding_id is not None:
            out_of_range &= ids != self.padding_id
        for first in np.argwhere(out_of_range)[:1]:
            raise IndexError(
                f"the ids of {name} hold {ids[tuple(first)]} at {first.tolist()}, which is "
                f"none of its {count:,} rows ({out_of_range.sum()} such in all). Ids that are "
                f"padding can be `padding_id`, which is {self.padding_id}."
            )


def _is_row(ids: HostArray, count: int) -> HostArray:
    return (ids >= 0) & (ids < count)


def checked_finders(
    ids: PyTree, tables: Sequence[HostRows], padding_id: object
) -> list[Finder]:
    """Check the arguments of `steps`."""
    padding = None if padding_id is None else checked_integer("padding_id", padding_id)
    most = max(map(len, tables))
    if padding is not None and (0 <= padding < most or not -(2**31) <= padding < 2**31):
        raise ValueError(
            f"`padding_id` must be no row of a table, and fit in 32 bits, got {padding}: in a "
            "step ids are positions. Write -1 for padding, in batches and in the step."
        )
    functions = named_parts("ids", [x.path for x in tables], ids, "the tables on the host")
    for i, table in enumerate(tables):
        if not callable(functions.get(i)):
            raise ValueError(
                f"{leaf_name('ids', table.path)} must be a function that returns the leaf of "
                f"the batch with the ids of {table.names[0]}, got {shown(functions.get(i))}: "
                "lambda batch: [] for none. A NumPy leaf that is no table belongs on the "
                "device, jnp.asarray."
            )
    return [Finder(x, functions[i], padding) for i, x in enumerate(tables)]


def positions_in(batch: PyTree, finders: Sequence[Finder]) -> tuple[PyTree, list[BatchRows]]:
    """Return the batch with positions in place of ids, and the rows of each table."""
    leaves, tree = jax.tree.leaves(batch), jax.tree.structure(batch)
    groups: list[tuple[list[int], set[int]]] = []  # tables, and leaves of which they share some
    for i, finder in enumerate(finders):
        tables, places = [i], finder.places(batch, leaves)
        for k in places:
            finder.check(_in_numpy(leaves[k]))
        for group in [x for x in groups if x[1] & places]:
            groups.remove(group)
            tables, places = tables + group[0], places | group[1]
        groups.append((tables, places))
    rows: dict[int, BatchRows] = {}
    for tables, places in groups:
        most = max(len(finders[i].table) for i in tables)
        arrays = [_in_numpy(leaves[k]) for k in places]
        positions, distinct = _numbered(arrays, most, finders[0].padding_id or -1)
        for k, x in zip(places, positions, strict=True):
            leaves[k] = x
        for i in tables:
            # Others of the group may have rows behind the last one of this table.
            own_ids = distinct[: np.searchsorted(distinct, len(finders[i].table))]
            # At most as many as the table has, so that no padding id becomes a row.
            rows[i] = BatchRows(own_ids, min(rounded_up(len(distinct)), most))
    return jax.tree.unflatten(tree, leaves), [rows[i] for i in range(len(finders))]


def _in_numpy(ids: PyTree) -> HostArray:
    """Return ids in a dtype that NumPy compares with any number: int4 is none of its own."""
    array = np.asarray(ids)
    return array.astype(np.int8) if array.dtype.kind == "V" else array


def _numbered(
    arrays: Sequence[HostArray], count: int, padding: int
) -> tuple[list[HostArray], HostArray]:
    """Return for each id its position among the distinct rows, or padding; and these rows."""
    dtype = np.int32 if count < 2**31 else np.int64  # NumPy sorts 32 bits twice as fast
    flat = [np.zeros(0, dtype), *(x.reshape(-1) for x in arrays)]
    is_row = np.concatenate([_is_row(x, count) for x in flat])
    ids = np.concatenate([x.astype(dtype) for x in flat])
    positions = np.full(ids.shape, padding, np.int32)
    distinct, positions[is_row] = np.unique(ids[is_row], return_inverse=True)
    parts = np.split(positions, np.cumsum([x.size for x in flat]))[1:-1]
    return [x.reshape(y.shape) for x, y in zip(parts, arrays, strict=True)], distinct


def source_of(rows: BatchRows, before: BatchRows | None) -> HostArray:
    """Return for each row of a batch its position in the batch before, or -1."""
    source = np.full(rows.capacity, -1, np.int32)
    if before is not None and len(before.ids):
        at = np.searchsorted(before.ids, rows.ids).clip(max=len(before.ids) - 1)
        source[: len(rows.ids)] = np.where(before.ids[at] == rows.ids, at, -1)
    return source
