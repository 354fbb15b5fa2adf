"""Leaving bad rows out of a gradient, instead of the whole step.

rows  3: [1, 2],   7: [nan, 0]   ->   3: [1, 2]      and dropped = 1
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmask._base.array_types import trailing
from jmask._lazy.spread_sums import counted
from jmask._lazy.state_rows import check_state_type
from jmask._optim.conditional_step import summed_rows
from jmask._tables.sharded import RoutedRows
from jmask._tensors.masked_tensor import MaskedTensor
from jmask._tensors.row_sparse import RowSparse, is_row_sparse
from jmask._tensors.storage import stored_values
from jmask._updates.apply import Fit, noticed_as
from jmask._updates.checks import is_gradient_leaf


class DropNonfiniteState(NamedTuple):
    """State of `drop_nonfinite_rows`: how many rows were left out so far, int32."""

    dropped: jax.Array


def drop_nonfinite_rows() -> optax.GradientTransformation:
    """A transformation that leaves rows with a nan or an infinity out of the gradient.

    One bad example then costs the rows it looked up their step, and nothing else. In a
    `RowSparse` such a row counts as not touched: parameter and state keep their bits. In a
    dense gradient its entries become zero, and in a `MaskedTensor` bad entries are masked.

    Returns:
        A transformation to chain before an optimizer, outside of `jmask.lazy`, whose state
        counts the rows (of a masked gradient, the entries) left out. In a `shard_map` those
        of all devices count; of an array whose type does not say whether it is the same on
        all of them (`check_vma=False`), the most that one device leaves out.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.drop_nonfinite_rows()
        >>> grads = jmask.RowSparse([1, 2], jnp.array([[1.], [jnp.inf]]), (3, 1))
        >>> grads, state = tx.update(grads, tx.init(jnp.ones((3, 1))))
        >>> grads.todense().ravel(), state.dropped
        (Array([0., 1., 0.], dtype=float32), Array(1, dtype=int32))
    """

    def init(params: optax.Params) -> DropNonfiniteState:
        return DropNonfiniteState(jnp.zeros((), jnp.int32))

    def update(updates, state, params=None):
        check_state_type(state, DropNonfiniteState)
        fit = Fit.of(updates, params)
        updates = summed_rows(fit.gradients, fit.params)
        leaves, structure = jax.tree.flatten(updates, is_leaf=is_gradient_leaf)
        dropped, kept = state.dropped, []
        for leaf in leaves:
            rows, number = _finite(leaf)
            kept.append(rows)
            dropped += counted(number, leaf, updates, params)
        kept = noticed_as(leaves, kept)
        return structure.unflatten(kept), DropNonfiniteState(dropped)

    return optax.GradientTransformation(init, update)


def _finite(x: Any) -> tuple[Any, jax.Array]:
    """The gradient without what is not finite, and the number of rows left out."""
    if isinstance(x, MaskedTensor):
        values = stored_values(x.storage)
        bad = x.valid & ~jnp.isfinite(values)
        return x.with_values(values, x.valid & ~bad), bad.sum(dtype=jnp.int32)
    if not is_row_sparse(x):
        x = jnp.asarray(x)
        bad = _bad_rows(x)
        kept = jnp.where(trailing(bad, x.ndim), jnp.zeros((), x.dtype), x)
        return kept, bad.sum(dtype=jnp.int32)
    ids, bad = x.flat().row_ids(), _bad_rows(x.values)
    number = jnp.sum(bad & (ids < x.row_count), dtype=jnp.int32)
    if isinstance(x, RoutedRows):
        return x.without(bad), number
    ids = jnp.where(bad, x.row_count, ids)
    return RowSparse(ids, x.values, x.shape, leading=x.leading), number


def _bad_rows(x: jax.Array) -> jax.Array:
    return ~jnp.all(jnp.isfinite(x), axis=tuple(range(1, x.ndim)))
