"""Select entries by conditions and indices, with the names of `jax.numpy` and `numpy.ma`.

    where(x > 2, x, 0)         [[0, --], [3, 4]]      masked where the condition is
    take(x, [0, 9], axis=0)    [[1, --], [--, --]]    masked where there is no entry
    masked_where(x < 0, x)     [1, -2, 3]  ->  [1, --, 3]
    masked_fill(x, x < 0, 7)                   [1,  7, 3]
    select([x < 0], [-x], x)                   [1,  2, 3]

    x MaskedTensor      [1, --, 3]      x[1:]  [--, 3]      x[[2, --]]  [3, --]
    x.at[1].set(5)      [1,  5, 3]      a plain value makes entries valid
    x.at[:2].add(5)     [6, --, 3]      arithmetic leaves masked entries masked
    x.at[0].set(masked) [--, --, 3]     a masked value masks

    x RowSparse         x[3] and x[[3, 3, 7]] are dense rows: zero if not stored, nan if no row
                        x[:, 1:3], columns, is RowSparse; all else is dense, with the warning

Functions of conditions keep the storage of a masked tensor: what it does not store is masked
already. What is read at indices is read from dense storage. As everywhere in JAX an index out
of range reads the entry at the border; a masked index reads a masked entry, and writes nothing.
Where positions repeat and one of the values written there is masked, so is the result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.array_types import trailing
from jmask._base.fallback import report_fallback
from jmask._base.types import (
    Argument,
    ArrayFunction,
    Dense,
    Function,
    IndexLike,
    Numbers,
    Options,
    Tensor,
    TensorLike,
)
from jmask._ops.lift import (
    adopted,
    aligned,
    data_of,
    dense,
    elementwise,
    entrywise,
    extends,
    is_hidden,
    masked_at,
)
from jmask._tables.rows_at import from_the_end
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    any_masked,
    as_masked_tensor,
    as_tensor,
    is_tensor,
    joined,
)
from jmask._tensors.methods import library
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import as_dense, is_sparse, with_stored_values

# Linear in both together, whatever the condition is; where it is False, the second is taken.
_plain_where = entrywise(jnp.where, scales=((1, 2),), vanishes=((0, 2),))


def where(
    condition: TensorLike,
    x: TensorLike | None = None,
    y: TensorLike | None = None,
    /,
    **kwargs: Argument,
) -> Tensor:
    """Choose entries as `jax.numpy.where`, with their masks; masked where the condition is.

    Raises:
        TypeError: if only a masked condition is given: the number of its entries that are
            True is not known.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., 2., 3.]), jnp.array([True, True, False]))
        >>> jmask.numpy.where(x < 2, x, 0.)
        MaskedTensor([1.0, 0.0, --], dtype=float32)
    """
    choose: Function = jnp.where
    operands = [adopted(a) for a in (condition, x, y)]
    if not any(map(is_tensor, operands)):
        return choose(*operands, **kwargs)
    if x is None or y is None:
        raise TypeError("where() of a masked or sparse condition needs `x` and `y`.")
    if not any_masked(*operands):
        return _plain_where(*operands, **kwargs)
    if not (is_sparse(data_of(operands[1])) and is_sparse(data_of(operands[2]))):
        # What one of them does not store may be chosen from the other.
        operands = [dense(a, "where") for a in operands]
    like, (holds, *values), (known, *valid) = aligned(operands, "where")
    return masked_at(like, choose(holds, *values), choose(holds, *valid) & known)


def masked_where(condition: TensorLike, x: TensorLike) -> MaskedTensor:
    """Mask the entries of `x` where `condition` is True, or itself masked.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jnp.array([1., -1., 2.])
        >>> jmask.numpy.masked_where(x < 0, x)
        MaskedTensor([1.0, --, 2.0], dtype=float32)
    """
    x, condition = as_masked_tensor(adopted(x)), as_tensor(adopted(condition))
    like, (values, holds), (valid, known) = aligned([x, condition], "masked_where")
    return masked_at(like, values, jnp.asarray(valid) & known & ~holds.astype(bool))


def masks_where(name: str, condition: Function) -> Function:
    """Return the function of `numpy.ma` that masks the entries for which a condition holds."""
    holds = entrywise(condition)

    @functools.wraps(condition)
    def masked(x: TensorLike, *args: Argument, **kwargs: Argument) -> MaskedTensor:
        x = as_masked_tensor(adopted(x))
        return masked_where(holds(x, *args, **kwargs), x)

    masked.__name__ = masked.__qualname__ = name
    masked.__doc__ = f"Mask entries of `x` with condition and arguments of `numpy.ma.{name}`."
    return masked


def masked_fill(x: TensorLike, where: TensorLike, value: TensorLike) -> Tensor:
    """Set the entries of `x` where `where` is True to `value`, which is valid.

    Args:
        x: a masked tensor or an array.
        where: boolean, broadcasts with `x`; the result is masked where it is.
        value: cast to the dtype of `x`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> x = jmask.masked_tensor(jnp.array([1., 2.]), jnp.array([True, False]))
        >>> jmask.numpy.masked_fill(x, jnp.array([False, True]), 7)
        MaskedTensor([1.0, 7.0], dtype=float32)
    """
    x, value = adopted(x), adopted(value)
    dtype = x.dtype if is_tensor(x) else jnp.result_type(x)
    value = value if isinstance(value, MaskedTensor) else jnp.asarray(value)
    return _where(where, value.astype(dtype), x)


_where = where


@functools.wraps(jnp.select)
def select(
    condlist: Sequence[Argument], choicelist: Sequence[Argument], default: Argument = 0
) -> Tensor:
    """Select with masks: the result is masked where a condition is, before which none holds."""
    operands = (*condlist, *choicelist, default)
    fits = len(condlist) == len(choicelist)
    if not fits or not any(is_tensor(adopted(x)) for x in operands):
        return jnp.select(condlist, choicelist, default)
    for condition, choice in zip(reversed(condlist), reversed(choicelist), strict=True):
        default = where(condition, choice, default)
    return default


def likened(function: Function) -> Function:
    """Lift a function that makes a tensor like another one, with its mask."""
    lifted = entrywise(function)

    @functools.wraps(function)
    def like(a: Argument, *args: Argument, **kwargs: Argument) -> Tensor:
        a = adopted(a)
        if kwargs.get("shape") is None:
            return lifted(a, *args, **kwargs)
        if isinstance(a, MaskedTensor):
            raise ValueError(
                f"{function.__name__}() keeps the mask of a MaskedTensor, so it cannot change "
                f"its `shape`: use {function.__name__.removesuffix('_like')}()."
            )
        return function(dense(a, function.__name__), *args, **kwargs)

    return like


@extends(jnp.pad)
def pad(
    array: MaskedTensor,
    pad_width: Argument,
    mode: str = "constant",
    kwargs: Options | None = None,
) -> MaskedTensor:
    """Pad with valid constants, or repeat entries with their mask.

    Mode "empty" pads with masked entries; a mode that computes with entries is a ValueError.
    """
    options: Options = kwargs or {}
    constants = {"constant": False, "empty": True}
    copies = ("edge", "reflect", "symmetric", "wrap")
    if mode not in (*constants, *copies) or options.get("reflect_type") == "odd":
        raise ValueError(
            f"`mode`={mode!r} of pad() computes with entries, some of which are masked: "
            f"expected one of {', '.join(map(repr, [*constants, *copies]))}."
        )
    data = jnp.pad(as_dense(array.storage), pad_width, mode, **options)
    if mode in constants:
        mode, options = "constant", {"constant_values": constants[mode]}
    return joined(data, ~jnp.pad(~array.valid, pad_width, mode, **options))


@extends(jnp.take, "a", "indices")
def take(
    a: Dense, indices: Dense, axis: int | None = None, **options: Argument
) -> MaskedTensor:
    """Read with masks: the result is masked where the index is, or is out of range.

    A `fill_value` for indices out of range is a valid entry.
    """
    after = 0 if axis is None else a.ndim - axis % a.ndim - 1
    hidden = is_hidden(indices)
    hidden = trailing(hidden, hidden.ndim + after)
    return _gathered(jnp.take, a, indices, hidden, {"axis": axis, **options})


@extends(jnp.take_along_axis, "arr", "indices")
def take_along_axis(
    arr: Dense, indices: Dense, axis: int | None = -1, **options: Argument
) -> MaskedTensor:
    """Read with masks: the result is masked where the index is, or is out of range."""
    hidden = is_hidden(indices)
    return _gathered(jnp.take_along_axis, arr, indices, hidden, {"axis": axis, **options})


def _gathered(
    function: Function, a: Dense, indices: Dense, hidden_index: jax.Array, options: Options
) -> MaskedTensor:
    """Read `a` at `indices`; where these are masked broadcasts to the result."""
    positions = jnp.where(is_hidden(indices), 0, as_dense(data_of(indices)))
    data = function(data_of(a), positions, **options)
    options["fill_value"] = options.get("fill_value") is None
    hidden = function(is_hidden(a), positions, **options)
    return joined(data, ~(hidden | jnp.broadcast_to(hidden_index, hidden.shape)))


def masked_getitem(x: MaskedTensor, index: IndexLike) -> MaskedTensor:
    """Return `x[index]`: integers, slices, None, Ellipsis, arrays, lists, masked integers.

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


def _consumed(part: Argument) -> int:
    """Count the dimensions of the tensor that a part of an index stands for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    is_mask = getattr(part, "dtype", None) == np.bool_
    return part.ndim if is_mask and not isinstance(part, MaskedTensor) else 1


def _in_range(part: Argument, size: int, clip: bool) -> Argument:
    """Return integers in the range of their dimension, if `clip`; masked ones are `size`."""
    position = jnp.asarray(data_of(part))
    if not jnp.issubdtype(position.dtype, jnp.integer):
        if isinstance(part, MaskedTensor):
            raise TypeError(
                f"a MaskedTensor of {position.dtype} is no index: whether its masked entries "
                "are selected is not known. Use where(), or to_tensor(False) outside jit."
            )
        return part
    # A narrow integer may not hold the size.
    position = position.astype(jnp.int64 if position.dtype.itemsize == 8 else jnp.int32)
    if clip:
        from_start = jnp.where(position < 0, position + size, position)
        position = jnp.clip(from_start, 0, max(size - 1, 0))
    return jnp.where(is_hidden(part), size, position)


class At:
    """`x.at`: indexing it gives the `Positions` to read or update."""

    __slots__ = ("x",)

    def __init__(self, x: MaskedTensor):
        self.x = x

    def __getitem__(self, index: IndexLike) -> Positions:
        return Positions(self.x, index)

    def __repr__(self) -> str:
        return f"At({self.x!r})"


def _arithmetic(name: str, doc: str) -> Function:
    def method(self: Positions, values: TensorLike, **kwargs: Argument) -> MaskedTensor:
        values = dense(adopted(values), "at")
        index, kwargs = self._without_masked("drop", kwargs)
        # Ones wherever the result is masked: no nan from there can reach a derivative.
        target = self.valid.at[index].get(fill_value=False, mode=kwargs.get("mode"))
        data = _ones_where(~self.valid, self.data).at[index]
        clean = _ones_where(~target | is_hidden(values), jnp.asarray(data_of(values)))
        data = getattr(data, name)(clean, **kwargs)
        if not isinstance(values, MaskedTensor):
            return joined(data, self.valid)
        return joined(data, self.valid.at[index].min(values.valid, **kwargs))

    method.__name__, method.__doc__ = name, doc
    return method


class Positions:
    """`x.at[index]`, whose methods take the keyword arguments of `jax.Array.at`."""

    __slots__ = ("data", "index", "valid")

    def __init__(self, x: MaskedTensor, index: IndexLike):
        x = as_masked_tensor(dense(x, "indexing"))
        self.data, self.valid = as_dense(x.storage), x.valid
        index = _without_list(index)
        self.index: tuple[Argument, ...] = index if isinstance(index, tuple) else (index,)

    def __repr__(self) -> str:
        return f"Positions({joined(self.data, self.valid)!r}, {self.index!r})"

    def get(self, **kwargs: Argument) -> MaskedTensor:
        """Return the entries, masked out of range with mode="fill" and no `fill_value`."""
        fill = kwargs.pop("fill_value", None)
        # As in `jax.Array.at`, reading clips by default, and writing drops.
        index, kwargs = self._without_masked("fill", kwargs, clipped=("clip", None))
        data = self.data.at[index].get(fill_value=0 if fill is None else fill, **kwargs)
        valid = self.valid.at[index].get(fill_value=fill is not None, **kwargs)
        return joined(data, valid)

    def set(self, values: TensorLike, **kwargs: Argument) -> MaskedTensor:
        """Replace entries: by a masked tensor with its mask, by anything else as valid."""
        values = dense(adopted(values), "at")
        index, kwargs = self._without_masked("drop", kwargs)
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

    def _without_masked(
        self, mode: str, kwargs: Options, clipped: tuple[str | None, ...] = ("clip",)
    ) -> tuple[tuple[Argument, ...], Options]:
        """Return index and options by which masked integers are out of range, in this mode.

        The mode then holds for all integers, so the others are clipped here if they should be.
        """
        if not any_masked(*self.index):
            return self.index, kwargs
        clip, axis, parts = kwargs.get("mode") in clipped, 0, []
        of_ellipsis = self.data.ndim - sum(map(_consumed, self.index))
        for part in self.index:
            dimensions = of_ellipsis if part is Ellipsis else _consumed(part)
            if dimensions == 1 and not isinstance(part, slice) and part is not Ellipsis:
                part = _in_range(dense(part, "indexing"), self.data.shape[axis], clip)
            parts.append(part)
            axis += dimensions
        return tuple(parts), {**kwargs, "mode": mode}


def _ones_where(masked: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.where(masked, jnp.ones_like(values, shape=()), values)


def row_getitem(x: RowSparse, key: IndexLike) -> Tensor:
    """Return `x[key]`: dense for rows by their index, row-sparse for columns of all rows.

    Warns:
        StorageFallbackWarning: for an index that needs the dense array, such as a slice of
            rows or index arrays in several dimensions.
    """
    x.check_single()
    first: Argument
    first, *rest = key if isinstance(key, tuple) and key else (key,)
    first = _without_list(first)
    key = (first, *rest)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    shape = jax.eval_shape(lambda a: a[key], like).shape  # refuses what is no index
    if isinstance(first, int | np.integer) and not isinstance(first, bool):
        if not -x.shape[0] <= first < x.shape[0]:
            raise IndexError(f"index {first} is no row of a RowSparse of shape {x.shape}.")
        first = jnp.asarray(first)
    parts = [part is None or part is Ellipsis or isinstance(part, slice | int) for part in rest]
    if all(parts) and jnp.issubdtype(getattr(first, "dtype", object), jnp.integer):
        rows = library().embedding_lookup(x, from_the_end(first, x.shape[0]))
        return rows[(slice(None),) * first.ndim + tuple(rest)]
    is_slice = isinstance(first, slice) and first == slice(None)
    if not rest and (is_slice or first is Ellipsis):
        return x
    # Of stacked tables an index that begins with a slice may pick some, and a row of packed
    # ones is a part of a line.
    ends_in_row = sum(map(_consumed, rest)) <= x.ndim - x.leading and not x.width
    all_rows = (is_slice and x.leading == 1) or (first is Ellipsis and ends_in_row)
    # NumPy keeps the dimension of one index array in place, but not of several.
    if all_rows and (all(parts) or len(rest) == 1):
        return with_stored_values(x, x.values[key], shape)
    report_fallback(
        f"indexing a RowSparse of shape {x.shape} made it dense, at O(size) cost: index its "
        "rows by integers, or columns of all rows"
    )
    return x.todense()[key]


def _without_list(part: Argument) -> Argument:
    # NumPy takes a list as an array, and JAX takes none.
    return np.asarray(part, None if part else np.int32) if isinstance(part, list) else part


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
