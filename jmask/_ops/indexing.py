"""Indexing with the meaning it has in JAX: `x[...]` and `x.at[...]`, masked and row-sparse.

    x MaskedTensor             [1, --, 3]          x[1:]                    [--, 3]
    i                          [2, --]             x[i]                     [3, --]
    x[numpy.array([True, False, True])]                                     [1, 3]

    x.at[1].set(5)             [1,  5, 3]      a plain value makes entries valid
    x.at[:2].add(5)            [6, --, 3]      arithmetic leaves masked entries masked
    x.at[0].set(masked)        [--, --, 3]     a masked value masks

As everywhere in JAX an index out of range reads the entry at the border; a masked index
reads a masked entry, and writes nothing. Where positions repeat and one of the values written
there is masked, so is the result.

    x RowSparse
    x[3]            the row: dense, zero if it is not stored
    x[[3, 3, 7]]    the rows: dense, (3, *row)
    x[10:20]        some of the rows: RowSparse
    x[:, 0]         a column: RowSparse
    x[10:20, 1:3]   both

An integer beside an index array is an index array too: what they select comes first if a
slice is between them, x[1, :, [0, 2]]. An index array out of range reads as in `jnp.take`:
nan, or the extreme of an integer dtype.
"""

import operator

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.fallback import report_fallback
from jmask._base.types import (
    Argument,
    ArrayFunction,
    Function,
    IndexLike,
    Numbers,
    Options,
    Shape,
    Tensor,
    TensorLike,
)
from jmask._ops.elementwise import elementwise
from jmask._ops.shape import data_of, dense, masked_of
from jmask._tables.stored_table import from_the_end
from jmask._tensors.masked_tensor import MaskedTensor, any_masked, joined
from jmask._tensors.methods import call, install
from jmask._tensors.row_sparse import RowSparse

# --- x[...] of a masked tensor -----------------------------------------------------------


def masked_getitem(x: MaskedTensor, index: IndexLike) -> MaskedTensor:
    """`x[index]`: integers, slices, None, Ellipsis, arrays, masked integers; a list of numbers.

    Raises:
        TypeError: for an index that is a boolean masked tensor.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1, 2, 3]), jnp.array([True, False, True]))
        >>> x[jmask.masked_tensor(jnp.array([2, 0]), jnp.array([True, False]))]
        MaskedTensor([3, --], dtype=int32)
    """
    x = dense(x, "indexing")
    index = with_array(index)
    if has_masked(index):
        return Positions(x, index).get()
    return joined(x.storage[index], x.valid[index])


def with_array(index: IndexLike) -> IndexLike:
    """Return the index, an array in place of a list: NumPy takes one and JAX none."""
    if not isinstance(index, list):
        return index
    return np.asarray(index) if index else np.zeros(0, np.int32)


def has_masked(index: IndexLike) -> bool:
    """Decide whether a part of the index is a `MaskedTensor`."""
    return any_masked(*(index if isinstance(index, tuple) else (index,)))


def known_places(index: IndexLike, shape: Shape, *, clip: bool) -> tuple[IndexLike, ...]:
    """Return the index with masked integers out of range, where nothing is read or written.

    With `clip` other integers that are out of range become those at the border.
    """
    parts = index if isinstance(index, tuple) else (index,)
    consumed = [_consumed(part) for part in parts]
    places, axis = [], 0
    for part, dimensions in zip(parts, consumed, strict=True):
        if part is Ellipsis:
            axis += len(shape) - sum(consumed)
        places.append(_place(part, shape[axis], clip) if dimensions == 1 else part)
        axis += dimensions
    return tuple(places)


def _consumed(part: IndexLike) -> int:
    """Count the dimensions of the tensor that a part of an index stands for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    is_mask = getattr(part, "dtype", None) == np.bool_
    return part.ndim if is_mask and not isinstance(part, MaskedTensor) else 1


def _place(part: IndexLike, size: int, clip: bool) -> IndexLike:
    if not isinstance(part, MaskedTensor | int | np.integer | np.ndarray | jax.Array):
        return part
    part = dense(part, "indexing")
    place = jnp.asarray(data_of(part))
    if not jnp.issubdtype(place.dtype, jnp.integer):
        if isinstance(part, MaskedTensor):
            raise TypeError(
                f"a MaskedTensor of {place.dtype} is no index: whether its masked entries "
                "are selected is not known. Use where(), or to_tensor(False) outside jit."
            )
        return part
    # A narrow integer may not hold the size.
    place = place.astype(jnp.int64 if place.dtype.itemsize == 8 else jnp.int32)
    if clip:
        place = jnp.clip(jnp.where(place < 0, place + size, place), 0, max(size - 1, 0))
    return jnp.where(masked_of(part), size, place)


install(masked_getitem=masked_getitem)


# --- x.at[...] of a masked tensor --------------------------------------------------------


class At:
    """`x.at`: indexing it gives the `Positions` to read or update."""

    __slots__ = ("x",)

    def __init__(self, x: MaskedTensor):
        self.x = x

    def __getitem__(self, index: IndexLike) -> "Positions":
        return Positions(self.x, index)

    def __repr__(self) -> str:
        return f"At({self.x!r})"


def _arithmetic(name: str, doc: str) -> Function:
    def method(self: "Positions", values: TensorLike, **kwargs: Argument) -> MaskedTensor:
        return self._combined(name, values, kwargs)

    method.__name__, method.__doc__ = name, doc
    return method


class Positions:
    """`x.at[index]`; keyword arguments of the methods are those of `jax.Array.at`."""

    __slots__ = ("index", "x")

    def __init__(self, x: MaskedTensor, index: IndexLike):
        self.x = dense(x, "at")
        self.index = with_array(index)

    def __repr__(self) -> str:
        return f"Positions({self.x!r}, {self.index!r})"

    def get(self, **kwargs: Argument) -> MaskedTensor:
        """Return the entries, masked out of range with mode="fill" and no `fill_value`."""
        fill = kwargs.pop("fill_value", None)
        index, kwargs = self._places("fill", kwargs, clipped=("clip", None))
        data = self.x.storage.at[index].get(fill_value=0 if fill is None else fill, **kwargs)
        valid = self.x.valid.at[index].get(fill_value=fill is not None, **kwargs)
        return joined(data, valid)

    def set(self, values: TensorLike, **kwargs: Argument) -> MaskedTensor:
        """Replace entries: by a masked tensor with its mask, by anything else as valid."""
        values = dense(values, "at")
        index, kwargs = self._places("drop", kwargs)
        data = self.x.storage.at[index].set(data_of(values), **kwargs)
        valid = self.x.valid.at[index].set(True, **kwargs)
        if isinstance(values, MaskedTensor):
            # Which of several values is written to one position is not defined, so the
            # mask must not depend on it.
            valid = valid.at[index].min(values.valid, **kwargs)
        return joined(data, valid)

    add = _arithmetic("add", "Add `values` to the entries that are valid.")
    subtract = _arithmetic("subtract", "Subtract `values` from the entries that are valid.")
    multiply = mul = _arithmetic("multiply", "Multiply the valid entries by `values`.")
    divide = _arithmetic("divide", "Divide the entries that are valid by `values`.")
    power = _arithmetic("power", "Raise the valid entries to the power of `values`.")
    min = _arithmetic("min", "Return the smaller of each valid entry and `values`.")
    max = _arithmetic("max", "Return the larger of each valid entry and `values`.")

    def apply(self, func: ArrayFunction, **kwargs: Argument) -> MaskedTensor:
        """Apply the elementwise `func` to the valid entries, once where positions repeat."""
        return self.set(elementwise(func)(self.get(**kwargs)), **kwargs)

    def _combined(self, name: str, values: TensorLike, kwargs: Options) -> MaskedTensor:
        values = dense(values, "at")
        index, kwargs = self._places("drop", kwargs)
        # Ones wherever the result is masked: no nan from there can reach a derivative.
        target = self.x.valid.at[index].get(fill_value=False, mode=kwargs.get("mode"))
        data = _ones_where(~self.x.valid, self.x.storage).at[index]
        clean = _ones_where(~target | masked_of(values), jnp.asarray(data_of(values)))
        data = getattr(data, name)(clean, **kwargs)
        if not isinstance(values, MaskedTensor):
            return joined(data, self.x.valid)
        return joined(data, self.x.valid.at[index].min(values.valid, **kwargs))

    def _places(
        self, outside: str, kwargs: Options, clipped: tuple[str | None, ...] = ("clip",)
    ) -> tuple[IndexLike, Options]:
        if not has_masked(self.index):
            return self.index, kwargs
        clip = kwargs.get("mode") in clipped
        places = known_places(self.index, self.x.shape, clip=clip)
        return places, {**kwargs, "mode": outside}


def _ones_where(masked: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.where(masked, jnp.ones_like(values, shape=()), values)


install(masked_at=At)


# --- x[...] of a RowSparse ---------------------------------------------------------------


def row_getitem(x: RowSparse, key: IndexLike) -> Tensor:
    """`x[key]`: dense where single rows are picked, otherwise row-sparse.

    Args:
        x: a row-sparse tensor of shape (V, *row).
        key: integers, slices, integer arrays, Ellipsis, None, or boolean arrays that are
            concrete; a tuple of them.

    Raises:
        IndexError: for too many indices, or an integer that is no row.
        TypeError: for what is no index, or a slice with traced bounds.

    Warns:
        StorageFallbackWarning: for index arrays in several dimensions, what such an array
            moves before the rows, or None before them, which make the tensor dense.
    """
    x.check_single()
    first, rest = _split(x, key)
    if _is_integer(first):
        return _rows_at(x, _row_numbers(x, first)[None])[(0, *rest)]
    several = sum(map(_is_array, rest)) > (not _is_array(first))
    if first is None or several or (isinstance(first, slice) and _moves_to_front(rest)):
        report_fallback(
            f"indexing a RowSparse of shape {x.shape} made it dense, at O(size) cost: index "
            "its rows and one further dimension at most"
        )
        return x.todense()[key]
    if isinstance(first, slice):
        return _columns(_slice(x, first), rest)
    rows = _rows_at(x, _row_numbers(x, first))
    return rows[(slice(None),) * (rows.ndim - x.ndim + 1) + rest]


def _rows_at(x: RowSparse, ids: jax.Array) -> jax.Array:
    """Return the rows `ids` of `x`: (*ids.shape, *row); negative ids count from the end."""
    return call("lookup", x, from_the_end(ids, x.shape[0]))


def _split(x: RowSparse, key: IndexLike) -> tuple[IndexLike, tuple[IndexLike, ...]]:
    """Split an index into that of the rows and those of the other dimensions."""
    key = key if isinstance(key, tuple) else (key,)
    key = tuple(_checked(k) for k in key)
    used = sum(map(_consumed, key))
    ellipses = [i for i, k in enumerate(key) if k is Ellipsis]
    if used > x.ndim or len(ellipses) > 1:
        raise IndexError(
            f"too many indices for a RowSparse of shape {x.shape}: {used}, and "
            f"{len(ellipses)} of `...`."
        )
    # One that stands for no dimension counts all the same, between index arrays.
    if ellipses and (used < x.ndim or key[0] is Ellipsis):
        at = ellipses[0]
        key = (*key[:at], *(slice(None),) * (x.ndim - used), *key[at + 1 :])
    return (key[0], key[1:]) if key else (slice(None), ())


def _checked(k: IndexLike) -> IndexLike:
    if k is None or k is Ellipsis or isinstance(k, slice):
        return k
    if isinstance(k, list | np.ndarray):
        k = np.asarray(k)
        k = k.astype(int) if k.size == 0 and k.dtype == float else k
    if isinstance(k, bool) or (_is_boolean(k) and k.ndim == 0):
        raise TypeError(
            f"a RowSparse is not indexed by a single boolean, got {k!r}: use None for a new "
            "dimension, or an array of booleans."
        )
    dtype = getattr(k, "dtype", None)
    if dtype is not None and (jnp.issubdtype(dtype, jnp.integer) or _is_boolean(k)):
        return k
    try:
        return operator.index(k)
    except TypeError:
        raise TypeError(
            f"a RowSparse is indexed by integers, slices and integer arrays, got {k!r}."
        ) from None


def _is_array(k: object) -> bool:
    return getattr(k, "ndim", 0) > 0


def _is_integer(k: object) -> bool:
    return not (k is None or k is Ellipsis or isinstance(k, slice) or _is_array(k))


def _moves_to_front(rest: tuple[IndexLike, ...]) -> bool:
    """Decide whether index arrays are apart, so that what they select comes before all else."""
    places = [i for i, k in enumerate(rest) if _is_array(k) or _is_integer(k)]
    return any(map(_is_array, rest)) and places[-1] - places[0] >= len(places)


def _is_boolean(k: object) -> bool:
    return getattr(k, "dtype", None) == jnp.dtype(bool)


def _row_numbers(x: RowSparse, k: IndexLike) -> jax.Array:
    if _is_boolean(k):
        if isinstance(k, jax.core.Tracer):
            raise TypeError(
                "a traced boolean index has no static size: use x.retain(rows), or "
                "jmask.numpy.where(mask, x, 0)."
            )
        if k.shape != x.shape[:1]:
            raise IndexError(
                f"a boolean index of shape {k.shape} does not fit {x.shape[0]} rows."
            )
        return jnp.asarray(np.flatnonzero(k))
    if isinstance(k, int):
        if not -x.shape[0] <= k < x.shape[0]:
            raise IndexError(f"index {k} is no row of a RowSparse of shape {x.shape}.")
        return jnp.asarray(k, x.indices.dtype)
    return jnp.asarray(k)


def _slice(x: RowSparse, rows: IndexLike) -> RowSparse:
    if rows == slice(None):
        return x
    try:
        start, stop, step = rows.indices(x.shape[0])
    except TypeError:
        raise TypeError(
            f"the bounds of a slice of rows must be known, got {rows}: use "
            "jax.lax.dynamic_slice on x.todense(), or x.retain(rows)."
        ) from None
    number = len(range(start, stop, step))
    distance = x.row_ids() - start
    ids = distance // step
    kept = (distance % step == 0) & (ids >= 0) & (ids < number)
    ids = jnp.where(kept & (x.row_ids() < x.shape[0]), ids, number)
    return RowSparse(ids, x.values, (number, *x.shape[1:]))


def _columns(x: RowSparse, rest: tuple[IndexLike, ...]) -> RowSparse:
    if not rest:
        return x
    key = (slice(None), *rest)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    shape = jax.eval_shape(lambda a: a[key], like).shape
    return x.with_leaves(x.index_leaf, x.values[key], shape=shape)


install(row_getitem=row_getitem)


def retain(x: RowSparse, rows: Numbers) -> RowSparse:
    """Keep only the rows of `x` whose index is among `rows` (m,); the others become zero.

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
