"""The distinct rows of a batch, and its ids as positions among them.

    ids        [[7, -1], [9, 7]]        a leaf of the batch; -1 is padding
    rows       [7, 9]                   of the table, ascending
    positions  [[0, -1], [1, 0]]        in place of the ids

A leaf that several tables look up, and the leaves of one table, are numbered together.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.types import Function, HostArray, KeyPath, PyTree
from jmask._base.validation import checked_integer, leaf_name, shown
from jmask._deferred.row_numbers import child
from jmask._embedding.pad_bags import PaddedBags, rounded_up
from jmask._host.host_rows import HostRows


class BatchRows(NamedTuple):
    """Ids (n,) of the rows that a batch looks up, ascending; how many rows the step gets."""

    ids: HostArray
    capacity: int


class Finder(NamedTuple):
    """A table, the function that finds its ids in a batch, and the id that is padding."""

    table: HostRows
    find: Function
    padding_id: int | None

    def places(self, batch: PyTree, leaves: Sequence[PyTree]) -> frozenset[int]:
        """Return which leaves of the batch hold ids of the table."""
        result = self.find(batch)
        places: list[int] = []
        for x in result if isinstance(result, list) else [result]:
            array = x.ids if isinstance(x, PaddedBags) else x
            same = [k for k, leaf in enumerate(leaves) if leaf is array]
            if not isinstance(array, jax.Array | np.ndarray) or len(same) != 1:
                raise ValueError(
                    f"the function in `ids` for {self.table.name} must return an array that is "
                    f"one leaf of the batch, or a list of such, got {shown(array)}, which is "
                    f"{len(same)} leaves: compute ids in the loader; copy those that stay ids."
                )
            places += same
        return frozenset(places)

    def check(self, ids: HostArray) -> None:
        """Refuse what is no row of the table and no padding."""
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"the ids of {self.table.name} must be integers, got {ids.dtype}.")
        if _are_rows(ids, len(self.table)):
            return
        outside = (ids < 0) | (ids >= len(self.table))
        outside &= True if self.padding_id is None else ids != self.padding_id
        for first in np.argwhere(outside)[:1]:
            raise IndexError(
                f"the ids of {self.table.name} hold {ids[tuple(first)]} at {first.tolist()}, "
                f"which is none of its {len(self.table):,} rows ({outside.sum()} such in all). "
                f"Ids that are padding can be `padding_id`, which is {self.padding_id}."
            )


def _are_rows(ids: HostArray, count: int) -> bool:
    return not ids.size or (ids.min() >= 0 and ids.max() < count)


def finders(
    ids: PyTree, tables: Sequence[HostRows], paths: Sequence[KeyPath], padding_id: object
) -> list[Finder]:
    """Check the arguments of `steps`."""
    padding = None if padding_id is None else checked_integer("padding_id", padding_id)
    most = max(map(len, tables))
    if padding is not None and (0 <= padding < most or not -(2**31) <= padding < 2**31):
        raise ValueError(
            f"`padding_id` must be no row of a table, and fit in 32 bits, got {padding}: in a "
            "step ids are positions. Write -1 for padding, in batches and in the step."
        )
    functions = [functools.reduce(child, path, ids) for path in paths]
    for function, table, path in zip(functions, tables, paths, strict=True):
        if not callable(function):
            raise ValueError(
                f"{leaf_name('ids', path)} must be a function that returns the leaf of the "
                f"batch with the ids of {table.name}, got {shown(function)}: lambda batch: [] "
                "for none. A NumPy leaf that is no table belongs on the device, jnp.asarray."
            )
    if len(jax.tree.leaves(ids)) != len(tables):
        names = ", ".join(table.name for table in tables)
        raise ValueError(f"`ids` must have functions for {names}, on the host, and no others.")
    return [Finder(x, find, padding) for x, find in zip(tables, functions, strict=True)]


def positions_in(batch: PyTree, found: Sequence[Finder]) -> tuple[PyTree, list[BatchRows]]:
    """Return the batch with positions in place of ids, and the rows of each table."""
    leaves, tree = jax.tree.leaves(batch), jax.tree.structure(batch)
    places = [finder.places(batch, leaves) for finder in found]
    groups: list[tuple[frozenset[int], frozenset[int]]] = []  # tables, and leaves they share
    for i, own in enumerate(places):
        joined = [x for x in groups if x[1] & own]
        tables = frozenset({i}).union(*(x[0] for x in joined))
        groups = [x for x in groups if x not in joined]
        groups.append((tables, own.union(*(x[1] for x in joined))))
    rows: dict[int, BatchRows] = {}
    for tables, shared in groups:
        most = max(len(found[i].table) for i in tables)
        dtype = np.int32 if most < 2**31 else np.int64  # NumPy sorts 32 bits twice as fast
        arrays = {k: np.asarray(leaves[k]) for k in shared}
        for i in tables:
            for k in places[i]:
                found[i].check(arrays[k])
        flat = {k: x.reshape(-1) for k, x in arrays.items()}
        # What is not inside is padding.
        inside = {
            k: slice(None) if _are_rows(x, most) else (x >= 0) & (x < most)
            for k, x in flat.items()
        }
        parts = [flat[k][inside[k]].astype(dtype) for k in shared]
        joint = np.concatenate([np.zeros(0, dtype), *parts])
        distinct, numbers = np.unique(joint, return_inverse=True)
        ends = np.cumsum([len(x) for x in parts])
        for k, part in zip(shared, np.split(numbers, ends), strict=False):
            positions = np.full(flat[k].shape, found[0].padding_id or -1, np.int32)
            positions[inside[k]] = part
            leaves[k] = positions.reshape(arrays[k].shape)
        for i in tables:
            # Others of the group may have rows behind the last one of this table.
            own_ids = distinct[: np.searchsorted(distinct, len(found[i].table))]
            # At most as many as there are rows: a padding id behind them stays outside.
            rows[i] = BatchRows(own_ids, min(rounded_up(len(distinct)), most))
    return jax.tree.unflatten(tree, leaves), [rows[i] for i in range(len(found))]


def source_of(rows: BatchRows, before: BatchRows) -> HostArray:
    """Return, for each row of a batch, which row of the batch before it is, or -1."""
    source = np.full(rows.capacity, -1, np.int32)
    if len(before.ids):
        at = np.searchsorted(before.ids, rows.ids).clip(max=len(before.ids) - 1)
        source[: len(rows.ids)] = np.where(before.ids[at] == rows.ids, at, -1)
    return source
