"""Elementwise functions of ordinary tensors on sparse storage: zeros are zeros.

    sin(x)       the storage of x: sin on the stored values
    x * 2 - y    RowSparse both: on the union of their rows
    x * d        at the positions of x; d is sampled there
    d + x        d with the rows of x added
    cos(x)       cos(0) is not 0: dense, with a warning

The function itself decides which it is (see `zero_preserving`). Equal positions are summed
before a function that is not affine, and kept apart by one that is.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.array_types import trailing
from jmask._base.fallback import report_fallback
from jmask._ops.safe_numbers import safe_numbers, varies
from jmask._ops.zero_preserving import Operand, Sparse, behaviour_at_zero, role
from jmask._tables.stored_table import add_to_dense
from jmask._tensors.masked_tensor import common_shape
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import (
    as_dense,
    compressed,
    is_sparse,
    is_stored,
    same_positions,
    sampled,
    stored_values,
    summed,
    unique_positions,
    with_stored_values,
)


def zero_semantics(function: Callable, operands: Sequence[Any], kwargs: dict) -> Any:
    """An elementwise function of which at least one operand is sparse, none masked."""
    operands = [x if is_sparse(x) or _is_number(x) else jnp.asarray(x) for x in operands]
    if any(isinstance(x, RowSparse) and x.leading > 1 for x in operands):
        return _of_stacked_tables(function, operands, kwargs)
    shape = common_shape([jnp.shape(x) if not is_sparse(x) else x.shape for x in operands])
    sparse = [x for x in operands if is_sparse(x)]
    for x in sparse:
        if isinstance(x, RowSparse):
            x.check_single()
    if _one_layout(sparse, operands, shape):
        roles = [Sparse(jnp.dtype(x.dtype)) if is_sparse(x) else role(x) for x in operands]
        behaviour = behaviour_at_zero(function, roles, kwargs)
        call = _Call(function, operands, kwargs, shape)
        if behaviour.keeps_zero():
            return call.on_positions(behaviour.affine)
        full = [i for i, x in enumerate(operands) if not is_sparse(x) and jnp.ndim(x)]
        sizes = jnp.broadcast_shapes(*(operands[i].shape for i in full))
        if behaviour.sums and sizes == shape and isinstance(sparse[0], RowSparse):
            rows = call.with_zeros(full).on_rows(affine=True)
            unchanged = isinstance(behaviour.value, Operand)
            base = operands[full[0]] if unchanged else call.without_rows()
            return add_to_dense(base, rows)
    name = getattr(function, "__name__", "a function")
    report_fallback(
        f"`{name}` made a sparse tensor of shape {tuple(sparse[0].shape)} dense, at "
        "O(size) cost: it does not keep zeros, or combines storages"
    )
    return function(*(as_dense(x) if is_sparse(x) else x for x in operands), **kwargs)


def _of_stacked_tables(function: Callable, operands: Sequence[Any], kwargs: dict) -> Any:
    """The function of tensors (M, V, *row), of which some store rows of (M * V, *row)."""
    rows = [x for x in operands if isinstance(x, RowSparse)]
    finest = max(rows, key=lambda x: x.leading)
    flat = finest.flat().shape

    def flattened(x: Any) -> Any:
        if not _is_number(x) and jnp.ndim(x) and x.shape != finest.shape:
            raise ValueError(
                f"{finest!r} of stacked tables takes numbers and tensors of its shape, got "
                f"shape {tuple(x.shape)}: broadcast that first, or use x.flat() or x.todense()."
            )
        if isinstance(x, RowSparse):
            return x.with_leading(finest.leading).flat()
        return x.reshape(flat) if not _is_number(x) and jnp.ndim(x) else x

    result = zero_semantics(function, list(map(flattened, operands)), kwargs)
    if isinstance(result, RowSparse):
        return result.stacked_as(finest)
    return result.reshape(finest.shape)


def _is_number(x: Any) -> bool:
    # A Python number keeps its weak type, and one of NumPy is known under jit too.
    known = isinstance(x, bool | int | float | complex | np.generic)
    return known or (isinstance(x, np.ndarray) and x.ndim == 0)


def _one_layout(sparse: list[Any], operands: list[Any], shape: tuple[int, ...]) -> bool:
    """Whether the result can have the layout of the sparse operands."""
    if all(isinstance(x, RowSparse) for x in sparse):
        return all(len(x.shape) == len(shape) and x.shape[0] == shape[0] for x in sparse)
    if not all(isinstance(x, BCOO | BCSR) and x.shape == shape for x in sparse):
        return False
    if any(x.n_batch for x in sparse):
        return len(sparse) == 1 and all(is_sparse(x) or not jnp.ndim(x) for x in operands)
    return len({x.n_dense for x in sparse}) == 1


class _Call:
    """A function with its operands, to be applied to stored values."""

    def __init__(
        self, function: Callable, operands: list[Any], kwargs: dict, shape: tuple[int, ...]
    ):
        self.function, self.operands, self.kwargs = function, operands, kwargs
        self.shape = shape
        self.sparse = [x for x in operands if is_sparse(x)]

    def with_zeros(self, numbers: Sequence[int]) -> "_Call":
        """The call with zeros in place of some operands."""
        operands = list(self.operands)
        for number in numbers:
            operands[number] = jnp.zeros((), operands[number].dtype)
        return _Call(self.function, operands, self.kwargs, self.shape)

    def without_rows(self) -> jax.Array:
        """The result if the sparse operands were zero."""
        operands = [jnp.zeros((), x.dtype) if is_sparse(x) else x for x in self.operands]
        return self.function(*operands, **self.kwargs)

    def on_positions(self, affine: bool) -> Any:
        """The result, which is zero where no operand stores a value."""
        if isinstance(self.sparse[0], RowSparse):
            return self.on_rows(affine)
        if len(self.sparse) == 1:
            (x,) = self.sparse
            if affine:
                return with_stored_values(x, self._apply(x, [stored_values(x)]))
            return self._aligned([x])
        first, *others = self.sparse
        if all(same_positions(first, x) for x in others):
            return self._aligned(self.sparse)
        every_csr = all(isinstance(x, BCSR) for x in self.sparse)
        result = self._aligned(_on_union_of_entries(self.sparse))
        return compressed(result) if every_csr else result

    def on_rows(self, affine: bool) -> RowSparse:
        """The result as rows."""
        first, *others = self.sparse
        if affine and others:
            parts = [self._part(number) for number in range(len(self.sparse))]
            ids = jnp.concatenate([x.row_ids() for x in self.sparse])
            return RowSparse(ids, jnp.concatenate(parts), self.shape)
        if affine:
            return self._rows(first, self._apply(first, [first.values]))
        if all(same_positions(first, x) for x in others):
            rows = [x.coalesce() for x in self.sparse]
        else:
            rows = on_union_of_rows(self.sparse)
        return self._rows(rows[0], self._guarded(rows[0], [x.values for x in rows]))

    def _part(self, number: int) -> jax.Array:
        """What the rows of one operand add to the result of an affine function."""
        x = self.sparse[number]
        values = [
            x.values if i == number else jnp.zeros((), y.dtype)
            for i, y in enumerate(self.sparse)
        ]
        result = self._apply(x, values)
        return jnp.broadcast_to(result, (x.nse, *self.shape[1:]))

    def _rows(self, like: RowSparse, values: jax.Array) -> RowSparse:
        values = jnp.broadcast_to(values, (*values.shape[:1], *self.shape[1:]))
        return like.with_leaves(like.index_leaf, values, shape=self.shape)

    def _aligned(self, sparse: list[Any]) -> Any:
        sparse = [unique_positions(x) for x in sparse]
        values = self._guarded(sparse[0], [stored_values(x) for x in sparse])
        return with_stored_values(sparse[0], values)

    def _guarded(self, pattern: Any, values: Sequence[Any]) -> jax.Array:
        """`_apply` with a harmless number at padding, where the slope may be infinite."""
        if getattr(pattern, "n_batch", 0):
            return self._apply(pattern, values)
        stored = is_stored(pattern)
        operands = list(self._at_positions(pattern, iter(values)))
        kinds = tuple(x.dtype if varies(x) else x for x in operands)
        safe = safe_numbers(self.function, kinds, self.kwargs)
        operands = [
            jnp.where(trailing(stored, x.ndim), x, number) if jnp.ndim(x) else x
            for x, number in zip(operands, safe, strict=True)
        ]
        result = self.function(*operands, **self.kwargs)
        zero = jnp.zeros((), result.dtype)
        return jnp.where(trailing(stored, result.ndim), result, zero)

    def _apply(self, pattern: Any, values: Sequence[Any]) -> jax.Array:
        """The function of the stored values; arrays are sampled at the same positions."""
        stored = iter(values)
        return self.function(*self._at_positions(pattern, stored), **self.kwargs)

    def _at_positions(self, pattern: Any, stored: Iterator[Any]) -> Iterator[Any]:
        for x in self.operands:
            if is_sparse(x):
                yield next(stored)
            else:
                yield sampled(x, pattern, self.shape) if jnp.ndim(x) else x


def on_union_of_rows(sparse: Sequence[RowSparse]) -> list[RowSparse]:
    """The tensors, coalesced, each storing the rows that any of them stores."""
    ids = jnp.concatenate([x.row_ids() for x in sparse])
    result = []
    for number, x in enumerate(sparse):
        values = [
            x.values if i == number else jnp.zeros((y.nse, *x.shape[1:]), x.dtype)
            for i, y in enumerate(sparse)
        ]
        result.append(RowSparse(ids, jnp.concatenate(values), x.shape).coalesce())
    return result


def _on_union_of_entries(sparse: Sequence[Any]) -> list[BCOO]:
    """The tensors in coordinates, each storing what any of them stores."""
    entries = [x.to_bcoo() if isinstance(x, BCSR) else x for x in sparse]
    indices = jnp.concatenate([x.indices for x in entries])
    traced = isinstance(indices, jax.core.Tracer)
    result = []
    for number, x in enumerate(entries):
        values = [
            x.data if i == number else jnp.zeros(y.data.shape, x.dtype)
            for i, y in enumerate(entries)
        ]
        union = BCOO((jnp.concatenate(values), indices), shape=x.shape)
        nse = indices.shape[0] if traced else None
        result.append(summed(union, nse))
    return result
