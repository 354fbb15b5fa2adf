"""The order of a step: a table is read for the loss before it is written.

XLA knows what depends on what, and nothing else. Where an update depends on the loss by its
ids, all reads of the loss come first, and the table is written in place:

    ids of the gradient = ids that "depend" on the value of the loss
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmask._base.array_types import explicit_sharding, varying_axes
from jmask._base.row_ids import mapped_words
from jmask._kernels.gathered_rows import GATHERED
from jmask._kernels.rows import plus_zero, zero_after_reading
from jmask._tables.deferral import is_deferred
from jmask._tables.stored_table import is_stored_table
from jmask._tensors.row_sparse import is_row_sparse


def after_reading(value: Any, gradients: Any, params: Any) -> Any:
    """Gradients whose ids XLA takes to depend on the value of the loss.

    So all that the value needs of a table is read before the table is written. Where nothing
    else orders the two (in a linear loss, or where XLA fuses the lookup into the loss a second
    time, as it does for GPUs), it would read from a copy of the whole table.

    Of deferred tables the values depend on it: a step reads at the ids of the loss, so that
    XLA sees that it is the same, and reads once.
    """
    zero = zero_after_reading(value) if isinstance(value, jax.core.Tracer) else None
    if zero is None:
        return gradients
    leaves = jax.tree.leaves(gradients, is_leaf=is_row_sparse)
    tree: Any = jax.tree.structure(gradients, is_leaf=is_row_sparse)
    tables = list(map(is_deferred, jax.tree.leaves(params, is_leaf=is_stored_table)))
    if len(tables) != len(leaves):  # a model, which has no tables of other forms
        tables = [False] * len(leaves)
    ordered = (_ordered(x, value, zero, waits) for x, waits in zip(leaves, tables, strict=True))
    return tree.unflatten(ordered)


def after_all_reads(results: Sequence[Any]) -> list[Any]:
    """Return the results of a program, of which the first depends on all dense gradients.

    What waits for the value of the loss (`after_reading`) then waits for all of the program.
    """
    value, *others = results
    # An optimization barrier would say the same; XLA of JAX 0.10 removes it before it orders.
    zero = jnp.zeros((), jnp.int32)
    for x in others:
        is_array = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) and x.size
        if is_array and explicit_sharding(x) is None and varying_axes(x) <= varying_axes(value):
            own = zero_after_reading(x.reshape(-1)[0])
            zero = zero if own is None else plus_zero(zero, own)
    return [value + zero.astype(value.dtype), *others]


def _ordered(gradient: Any, value: jax.Array, zero: jax.Array, waits: bool) -> Any:
    """One of them; `zero` depends on the value, and of a deferred table the values wait."""
    leaf = gradient.index_leaf if is_row_sparse(gradient) else None
    if not isinstance(leaf, jax.core.Tracer) or varying_axes(value) - varying_axes(leaf):
        return gradient
    shardings = [explicit_sharding(x) for x in (leaf, value)]
    if len({None if x is None else x.mesh for x in shardings}) > 1:
        return gradient
    if waits:
        one = plus_zero(jnp.ones((), jnp.int32), zero)
        return gradient.scaled(lambda x: x * one.astype(x.dtype))
    known = GATHERED.of(gradient.values)
    if known is None or known.index is None:
        leaf = mapped_words(leaf, lambda words: plus_zero(words, zero))
        return gradient.with_leaves(leaf, gradient.values)
    # The ids are sorted meanwhile; of the rows that nothing reads nothing is left.
    rows = gradient.values * plus_zero(jnp.ones((), jnp.int32), zero).astype(gradient.dtype)
    GATHERED.note(rows, dataclasses.replace(known, index=plus_zero(known.index, zero)))
    return gradient.with_values(rows)
