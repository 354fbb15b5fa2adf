"""A table after a step, in the place of its update: what is not added but put there."""

from typing import Any

import jax
import jax.numpy as jnp

from jmask._base.row_ids import hide


@jax.tree_util.register_pytree_node_class
class NewTable:
    """What `update` returns for a deferred table: the table after the step.

    `jmask.apply_updates` puts it in place of the old one. An optimizer that is chained behind
    maps arithmetic over its leaves; one of them refuses that, as the ids of a `RowSparse` do.
    """

    def __init__(self, table: Any):
        self.table = table

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape

    @property
    def dtype(self) -> Any:
        return self.table.dtype

    def tree_flatten(self) -> Any:
        return (hide(jnp.zeros((1,), jnp.int32)), self.table), None

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> "NewTable":
        node = object.__new__(cls)
        node.table = children[1]
        return node


def is_new_table(x: Any) -> bool:
    """Whether `x` is a `NewTable`."""
    return isinstance(x, NewTable)
