"""MXNet's functions of row-sparse tensors: `retain`, `add_n`, `square_sum`.

retain(x, [0, 3])       the rows 0 and 3 of x; the others are zero
add_n([x, y, z])        x + y + z
square_sum(x, axis=1)   sum(x * x, axis=1), at the cost of the rows stored
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jmask._base.validation import check_flag, checked_array
from jmask._ops.elementwise import elementwise
from jmask._ops.reductions import sum as sum_of
from jmask._tensors.masked_tensor import is_tensor
from jmask._tensors.row_sparse import RowSparse

_square = elementwise(jnp.square)


def retain(x: RowSparse, rows: Any) -> RowSparse:
    """Only the rows of `x` whose index is among `rows` (m,); the others become zero.

    Raises:
        TypeError: if `x` is not a `RowSparse`, or `rows` are not integers.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.RowSparse([0, 2, 3], jnp.array([1., 3., 5.]), (5,))
        >>> jmask.retain(x, [0, 1]).todense()
        Array([1., 0., 0., 0., 0.], dtype=float32)
    """
    if not isinstance(x, RowSparse):
        raise TypeError(
            f"`x` must be a RowSparse, got {type(x).__name__}: use "
            'jmask.cast_storage(x, "row_sparse") first.'
        )
    return x.retain(rows)


def add_n(*tensors: Any) -> Any:
    """The sum of tensors: row-sparse if all are, with the rows of all of them.

    Args:
        *tensors: tensors of one shape on any storage, or one sequence of them. The rows of
            `RowSparse` tensors are put side by side: equal indices add.

    Raises:
        ValueError: if there is none, or the shapes differ.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.RowSparse([1], jnp.array([2.]), (3,))
        >>> jmask.add_n(x, x, x)
        RowSparse(float32[3], nse=3)
        >>> jmask.add_n(x, jnp.ones(3))
        Array([1., 3., 1.], dtype=float32)
    """
    if len(tensors) == 1 and isinstance(tensors[0], Sequence):
        tensors = tuple(tensors[0])
    if not tensors:
        raise ValueError("`tensors` must hold at least one tensor, got none.")
    tensors = tuple(x if is_tensor(x) else checked_array("tensors", x) for x in tensors)
    shapes = {tuple(x.shape) for x in tensors}
    if len(shapes) > 1:
        raise ValueError(f"`tensors` must have one shape, got {sorted(shapes)}.")
    # Sparse ones first, so that they meet a dense one once.
    order = sorted(tensors, key=lambda x: not isinstance(x, RowSparse))
    return functools.reduce(operator.add, order)


def square_sum(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """The sum of the squares of the entries; of a `RowSparse`, of its stored rows.

    Args:
        x: a tensor on any storage.
        axis: an int, a tuple of ints or None, which is all axes.
        keepdims: whether reduced axes stay, with size 1.

    Returns:
        A dense tensor; for a `RowSparse` of which axis 0 is kept, a `RowSparse`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.RowSparse([1], jnp.array([[3., 4.]]), (3, 2))
        >>> jmask.square_sum(x, axis=1, keepdims=True)
        RowSparse(float32[3, 1], nse=1)
        >>> jmask.square_sum(x)
        Array(25., dtype=float32)
    """
    check_flag("keepdims", keepdims)
    if not is_tensor(x):
        x = checked_array("x", x)
    return sum_of(_square(x), axis, keepdims=keepdims)
