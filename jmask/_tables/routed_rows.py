"""`RoutedRows`: a row-sparse gradient of which each shard of a table has its own rows.

shards of 2      entries of shard 0 | of shard 1        equal ids summed, in order
ids              0  1  V            | 2  V  V           V is padding
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmask._base.row_ids import Order
from jmask._kernels.coalesce import coalesce_rows
from jmask._tables.shard_layout import Layout
from jmask._tensors.row_sparse import RowSparse


@jax.tree_util.register_pytree_with_keys_class
class RoutedRows(RowSparse):
    """A gradient of which each shard has the rows that live there, equal ids summed.

    Entries [s m, (s + 1) m) belong to shard s and are sorted; it is a true `RowSparse`.
    """

    __slots__ = ("layout",)

    layout: Layout

    @property
    def order(self) -> Order:
        return "unique"

    @classmethod
    def of_shards(
        cls, ids: jax.Array, values: jax.Array, shape: Sequence[int], layout: Layout
    ) -> "RoutedRows":
        """The rows (S m, *row) that the shards have."""
        rows = RowSparse.of_rows(ids, values, tuple(shape), coalesced=False)
        leaves, static = rows.tree_flatten()
        return cls.tree_unflatten((static, layout), leaves)

    def tree_flatten(self) -> Any:
        leaves, static = super().tree_flatten()
        return leaves, (static, self.layout)

    def tree_flatten_with_keys(self) -> Any:
        leaves, static = super().tree_flatten_with_keys()
        return leaves, (static, self.layout)

    @classmethod
    def tree_unflatten(cls, static: Any, leaves: Any) -> "RoutedRows":
        of_rows, layout = static
        node: Any = super().tree_unflatten(of_rows, leaves)
        node.layout = layout
        return node

    def with_values(self, values: jax.Array) -> "RoutedRows":
        (leaf, _), static = self.tree_flatten()
        return RoutedRows.tree_unflatten(static, (leaf, values))

    def without(self, rows: jax.Array) -> "RoutedRows":
        """The gradient without the entries where `rows` (S m,) is True."""
        layout = self.layout

        def others(ids: jax.Array, values: jax.Array, rows: jax.Array) -> Any:
            shard = layout.shard()
            places = layout.local(jnp.where(rows, layout.count, ids), shard)
            places, values = coalesce_rows(places, values, layout.block)
            return layout.ids(places, shard), values

        over = (layout.rows,) * 4
        ids, values = layout.run(others, self.row_ids(), self.values, rows, over=over)
        return RoutedRows.of_shards(ids, values, self.shape, layout)
