"""Clipping every row of a gradient by its own norm.

max_norm 1:   row [3, 4] -> [.6, .8],    row [.3, .4] stays
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmask._lazy import lazy


def clip_by_row_norm(
    max_norm: Any,
    ord: Any = 2,  # noqa: A002
) -> optax.GradientTransformationExtraArgs:
    """A transformation that scales down rows whose norm exceeds `max_norm`.

    One example with a huge loss then moves the rows it looked up by a bounded amount and no
    others, which clipping by the global norm cannot do. Rows are those of axis 0 of every
    leaf; of a `RowSparse`, equal indices are added first.

    Args:
        max_norm: positive; a number or a (traced) scalar.
        ord: the order of the norm, 1, 2 or inf.

    Returns:
        A transformation to chain before any other, inside `jmask.lazy` or outside.

    Raises:
        ValueError: if `max_norm` is a number that is not positive, or `ord` is below 1.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> tx = jmask.clip_by_row_norm(1.0)
        >>> grads = jmask.RowSparse([1, 2], jnp.array([[3., 4.], [.3, .4]]), (5, 2))
        >>> tx.update(grads, tx.init(jnp.zeros((5, 2))))[0].values
        Array([[0.6, 0.8],
               [0.3, 0.4]], dtype=float32)
    """
    if isinstance(max_norm, int | float) and not max_norm > 0:
        raise ValueError(f"`max_norm` must be positive, got {max_norm}.")
    if not ord >= 1:
        raise ValueError(f"`ord` must be at least 1, got {ord}.")

    def clipped(rows: jax.Array) -> jax.Array:
        if rows.ndim == 0:
            return rows
        wide = jnp.promote_types(rows.dtype, jnp.float32)
        flat = rows.reshape(rows.shape[0], -1).astype(wide)
        size = jnp.linalg.vector_norm(flat, ord=ord, axis=1)
        factor = jnp.where(size > max_norm, max_norm / size, 1)
        factor = factor.reshape((-1,) + (1,) * (rows.ndim - 1))
        return (rows * factor).astype(rows.dtype)

    def clip(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        return jax.tree.map(clipped, updates)

    return lazy(optax.stateless(clip))
