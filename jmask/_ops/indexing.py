"""Index masked and row-sparse tensors with the meaning that it has in JAX.

    x MaskedTensor      [1, --, 3]      x[1:]  [--, 3]      x[[2, --]]  [3, --]
    x.at[1].set(5)      [1,  5, 3]      a plain value makes entries valid
    x.at[:2].add(5)     [6, --, 3]      arithmetic leaves masked entries masked
    x.at[0].set(masked) [--, --, 3]     a masked value masks

As everywhere in JAX an index out of range reads the entry at the border; a masked index
reads a masked entry, and writes nothing. Where positions repeat and one of the values written
there is masked, so is the result.

    x RowSparse
    x[3]            the row: dense, zero if it is not stored
    x[[3, 3, 7]]    the rows: dense, (3, *row); nan for an index that is no row
    x[:, 1:3]       columns: RowSparse
    x[10:20]        all else is dense, with the warning
"""

from collections.abc import Sequence

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
    Tensor,
    TensorLike,
)
from jmask._ops.lift import adopted, data_of, dense, elementwise, is_hidden
from jmask._tables.rows_at import from_the_end
from jmask._tensors.masked_tensor import MaskedTensor, any_masked, as_masked_tensor, joined
from jmask._tensors.methods import library
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import as_dense, with_stored_values

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
    positions = Positions(x, index)
    if any_masked(*positions.index):
        return positions.get()
    return joined(positions.data[positions.index], positions.valid[positions.index])


def known_places(
    index: Sequence[Argument], sizes: Sequence[int], *, clip: bool
) -> tuple[Argument, ...]:
    """Return the index with masked integers out of range, where nothing is read or written.

    With `clip` other integers that are out of range become those at the border.
    """
    places, axis, left_out = [], 0, len(sizes) - sum(map(_consumed, index))
    for part in index:
        dimensions = left_out if part is Ellipsis else _consumed(part)
        if dimensions == 1 and not isinstance(part, slice) and part is not Ellipsis:
            part = _place(dense(part, "indexing"), sizes[axis], clip)
        places.append(part)
        axis += dimensions
    return tuple(places)


def _consumed(part: Argument) -> int:
    """Count the dimensions of the tensor that a part of an index stands for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    is_mask = getattr(part, "dtype", None) == np.bool_
    return part.ndim if is_mask and not isinstance(part, MaskedTensor) else 1


def _place(part: Argument, size: int, clip: bool) -> Argument:
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
    return jnp.where(is_hidden(part), size, place)


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

    __slots__ = ("data", "index", "valid")

    def __init__(self, x: MaskedTensor, index: IndexLike):
        x = as_masked_tensor(dense(x, "indexing"))
        self.data, self.valid = as_dense(x.storage), x.valid
        if isinstance(index, list):  # NumPy takes one as an array, and JAX takes none
            index = np.asarray(index) if index else np.zeros(0, np.int32)
        self.index: tuple[Argument, ...] = index if isinstance(index, tuple) else (index,)

    def __repr__(self) -> str:
        return f"Positions({joined(self.data, self.valid)!r}, {self.index!r})"

    def get(self, **kwargs: Argument) -> MaskedTensor:
        """Return the entries, masked out of range with mode="fill" and no `fill_value`."""
        fill = kwargs.pop("fill_value", None)
        index, kwargs = self._places("fill", kwargs, clipped=("clip", None))
        data = self.data.at[index].get(fill_value=0 if fill is None else fill, **kwargs)
        valid = self.valid.at[index].get(fill_value=fill is not None, **kwargs)
        return joined(data, valid)

    def set(self, values: TensorLike, **kwargs: Argument) -> MaskedTensor:
        """Replace entries: by a masked tensor with its mask, by anything else as valid."""
        values = dense(adopted(values), "at")
        index, kwargs = self._places("drop", kwargs)
        data = self.data.at[index].set(data_of(values), **kwargs)
        valid = self.valid.at[index].set(True, **kwargs)
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
        values = dense(adopted(values), "at")
        index, kwargs = self._places("drop", kwargs)
        # Ones wherever the result is masked: no nan from there can reach a derivative.
        target = self.valid.at[index].get(fill_value=False, mode=kwargs.get("mode"))
        data = _ones_where(~self.valid, self.data).at[index]
        clean = _ones_where(~target | is_hidden(values), jnp.asarray(data_of(values)))
        data = getattr(data, name)(clean, **kwargs)
        if not isinstance(values, MaskedTensor):
            return joined(data, self.valid)
        return joined(data, self.valid.at[index].min(values.valid, **kwargs))

    def _places(
        self, outside: str, kwargs: Options, clipped: tuple[str | None, ...] = ("clip",)
    ) -> tuple[tuple[Argument, ...], Options]:
        if not any_masked(*self.index):
            return self.index, kwargs
        places = known_places(self.index, self.valid.shape, clip=kwargs.get("mode") in clipped)
        return places, {**kwargs, "mode": outside}


def _ones_where(masked: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.where(masked, jnp.ones_like(values, shape=()), values)


# --- x[...] of a RowSparse ---------------------------------------------------------------


def row_getitem(x: RowSparse, key: IndexLike) -> Tensor:
    """`x[key]`: dense where single rows are picked, row-sparse for columns of all rows.

    Args:
        x: a row-sparse tensor of shape (V, *row).
        key: what JAX takes for arrays.

    Raises:
        IndexError: for too many indices, or an integer that is no row.
        TypeError: for what is no index.

    Warns:
        StorageFallbackWarning: for an index that needs the dense array, such as a slice of
            rows or index arrays in several dimensions.
    """
    x.check_single()
    first: Argument
    first, *rest = key if isinstance(key, tuple) and key else (key,)
    if isinstance(first, list):
        first = np.asarray(first) if first else np.zeros(0, np.int32)
    key = (first, *rest)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    shape = jax.eval_shape(lambda a: a[key], like).shape  # refuses what is no index
    if isinstance(first, int | np.integer) and not isinstance(first, bool):
        if not -x.shape[0] <= first < x.shape[0]:
            raise IndexError(f"index {first} is no row of a RowSparse of shape {x.shape}.")
        first = jnp.asarray(first)
    parts = [part is None or part is Ellipsis or isinstance(part, slice | int) for part in rest]
    if all(parts) and _is_integer(first):
        rows = library().embedding_lookup(x, from_the_end(first, x.shape[0]))
        return rows[(slice(None),) * first.ndim + tuple(rest)]
    # One array of columns stays where it is, unless an integer beside it is an array too.
    is_slice = isinstance(first, slice) and first == slice(None)
    all_rows = is_slice or (first is Ellipsis and sum(map(_consumed, rest)) < x.ndim)
    if all_rows and (all(parts) or len(rest) == 1):
        return with_stored_values(x, x.values[key], shape)
    report_fallback(
        f"indexing a RowSparse of shape {x.shape} made it dense, at O(size) cost: index its "
        "rows by integers, or columns of all rows"
    )
    return x.todense()[key]


def _is_integer(part: object) -> bool:
    dtype = getattr(part, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.integer)


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
