"""Groups: the entries that a reduction makes one number of.

    x = [[ 1, --,  3],      sum over axis 1:  groups {1, 3} and {5}, results 4 and 5
         [--,  5, --]]

Reductions are written once, against two forms that every storage is brought to:

| form       | a group is                          | storages                              |
|------------|-------------------------------------|---------------------------------------|
| `Slices`   | a slice of an array along some axes | dense; sparse ones, when all or none  |
|            |                                     | of their sparse axes are reduced      |
| `Segments` | the rows of an array with equal ids | BCOO and BCSR of which some sparse    |
|            |                                     | axes are kept, say the rows           |

Both have the entries (`values`, and which of them take part, `valid`); `sum`, `prod`,
`max`, `min` and `any` of an array of entries over each group; and `spread`, which brings the
result of a group back to its entries. An entry that takes no part must hold the identity:
then it does not matter which group it is in, and padding needs no group of its own. Which
entries are one group, apart from the entries, is said by `BySlices` and `BySegments`: bags of
embeddings are these alone.

A `Reduction` checks arguments, brings the storage to groups, runs a kernel on them, and wraps
the results:

    x MaskedTensor      MaskedTensor, masked where no entry was valid
    x array             array, over `where` or over all entries
    x sparse            over its entries, zeros included
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.sparse import BCOO, BCSR
from jax.typing import ArrayLike, DTypeLike

from jmask._base.array_types import trailing
from jmask._base.types import Argument, Axis, DType, Function, Mask, Tensor, TensorLike
from jmask._base.validation import refuse_scipy
from jmask._kernels.rows import add_rows, gather_rows
from jmask._ops.shape import dense
from jmask._tensors.masked_tensor import (
    MaskedTensor,
    as_booleans,
    as_tensor,
    is_tensor,
    joined,
)
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import (
    as_dense,
    coordinates,
    entries_at,
    is_entry,
    is_sparse,
    stored_values,
    unique_positions,
    with_stored_values,
)

# --- which entries are one group ---------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=[], meta_fields=["axes", "keepdims"]
)
@dataclasses.dataclass(frozen=True)
class BySlices:
    """Groups that are the slices of an array along `axes`; results keep these if `keepdims`."""

    axes: tuple[int, ...]
    keepdims: bool

    def sum(self, x: jax.Array) -> jax.Array:
        return jnp.sum(x, self.axes, dtype=x.dtype, keepdims=self.keepdims)

    def prod(self, x: jax.Array) -> jax.Array:
        return jnp.prod(x, self.axes, dtype=x.dtype, keepdims=self.keepdims)

    def max(self, x: jax.Array) -> jax.Array:
        return jnp.max(x, self.axes, keepdims=self.keepdims, initial=least(x.dtype))

    def min(self, x: jax.Array) -> jax.Array:
        return jnp.min(x, self.axes, keepdims=self.keepdims, initial=greatest(x.dtype))

    def any(self, x: jax.Array) -> jax.Array:
        return jnp.any(x, self.axes, keepdims=self.keepdims)

    def spread(self, result: jax.Array) -> jax.Array:
        """Return for each entry the result of its group, where it broadcasts to the entries."""
        return result if self.keepdims else jnp.expand_dims(result, self.axes)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["ids"], meta_fields=["number", "axes"]
)
@dataclasses.dataclass(frozen=True)
class BySegments:
    """Groups that are the rows of an array with equal `ids`; results are (number, *row).

    Attributes:
        ids (n,): the group of each row; `number` where it is in none.
        number: how many groups there are. At least one row is in results, as they are gathered
            by `ids` also where there is no group.
        axes: of the rows, reduced first.
    """

    ids: jax.Array
    number: int
    axes: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)

    def _rows(self, x: jax.Array, name: str) -> jax.Array:
        return getattr(BySlices(self.axes, False), name)(x) if self.axes else x

    def sum(self, x: jax.Array) -> jax.Array:
        x = self._rows(x, "sum")
        zeros = jnp.zeros((max(self.number, 1), *x.shape[1:]), x.dtype)
        return add_rows(zeros, self.ids, x)

    def max(self, x: jax.Array) -> jax.Array:
        return jax.ops.segment_max(self._rows(x, "max"), self.ids, max(self.number, 1))

    def min(self, x: jax.Array) -> jax.Array:
        return jax.ops.segment_min(self._rows(x, "min"), self.ids, max(self.number, 1))

    def any(self, x: jax.Array) -> jax.Array:
        return self.max(x.astype(jnp.uint8)) > 0

    def prod(self, x: jax.Array) -> jax.Array:
        """Scan over sorted segments: a scatter of products has no derivative at 0."""
        x = self._rows(x, "prod")
        if x.shape[0] == 0:
            return jnp.ones((max(self.number, 1), *x.shape[1:]), x.dtype)
        order = jnp.argsort(self.ids, stable=True)
        segments, x = BySegments(self.ids[order], self.number), x[order]
        changes = segments.ids[1:] != segments.ids[:-1]
        true = jnp.ones((1,), bool)
        starts = trailing(jnp.concatenate([true, changes]), x.ndim)
        ends = trailing(jnp.concatenate([changes, true]), x.ndim)
        _, running = lax.associative_scan(_join, (starts, x))
        product = segments.sum(jnp.where(ends, running, 0))
        is_empty = segments.sum(jnp.ones_like(segments.ids)) == 0
        return jnp.where(trailing(is_empty, product.ndim), 1, product)

    def spread(self, result: jax.Array) -> jax.Array:
        """Return for each entry the result of its group, where it broadcasts to the entries."""
        rows = gather_rows(result, self.ids)
        return jnp.expand_dims(rows, self.axes) if self.axes else rows


# --- entries in groups -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The part that both forms share: the entries, and the tensor they come from.

    Attributes:
        values: the entries, as the storage has them.
        valid: which of them take part; the shape of `values`.
        origin: the storage reduced.
        reduced: its axes that are reduced, in ascending order.
        shape: of the tensor of results.
        keeps: whether it stores results where `origin` stores values.
    """

    values: jax.Array
    valid: jax.Array
    origin: TensorLike
    reduced: tuple[int, ...]
    shape: tuple[int, ...]
    keeps: bool

    @property
    def size(self) -> int:
        """How many entries a group has, stored or not."""
        return math.prod(self.origin.shape[axis] for axis in self.reduced)

    def count(self, x: jax.Array) -> jax.Array:
        """Count the booleans `x` that are true in each group."""
        return self.sum(x.astype(_integer()))  # type: ignore[attr-defined]

    def positions(self) -> jax.Array:
        """Return for each entry its index in the reduced axes, flattened."""
        x, index = self.origin, jnp.zeros((), _integer())
        refuse_large(self.size, "reduced")
        sparse = sparse_dimensions(x)
        for axis in self.reduced:
            if axis < sparse:
                along = trailing(coordinates(x)[axis].astype(_integer()), self.values.ndim)
            else:
                dimension = axis - sparse + (sparse > 0)
                along = lax.broadcasted_iota(_integer(), self.values.shape, dimension)
            index = index * x.shape[axis] + along
        return jnp.broadcast_to(index, self.values.shape)

    def shaped(self, result: jax.Array) -> jax.Array:
        """Return results as the stored values of the tensor of results."""
        if not self.keeps:
            return result.reshape(self.shape)
        return result.reshape(result.shape[:1] + self.shape[sparse_dimensions(self.origin) :])

    def stored(self, result: jax.Array) -> Tensor:
        """Return the tensor of results."""
        result = self.shaped(result)
        return with_stored_values(self.origin, result, self.shape) if self.keeps else result


@dataclasses.dataclass(frozen=True)
class Slices(_Groups, BySlices):
    """Groups that are slices of `values`."""


@dataclasses.dataclass(frozen=True)
class Segments(_Groups, BySegments):
    """Groups that are rows of `values`, or slices of these."""

    def shaped(self, result: jax.Array) -> jax.Array:
        return super().shaped(result[: self.number])


Groups = Slices | Segments
Results = tuple[jax.Array, jax.Array]
"""Results of groups, and where there are any."""


class Kernel(Protocol):
    """Results of groups; other arguments are the options of a reduction."""

    def __call__(self, groups: Groups, /, *args: Argument, **options: Argument) -> Results: ...


def grouped(
    x: TensorLike, valid: jax.Array, axes: Sequence[int], keepdims: bool = False
) -> Groups:
    """Return the groups of a reduction: `Slices` or `Segments`.

    Args:
        x: a storage, with no position twice unless the reduction is a sum.
        valid: which of its stored values take part.
        axes: not negative, ascending.
    """
    axes, values = tuple(axes), stored_values(x)
    sparse = sparse_dimensions(x)
    shape = tuple(
        1 if axis in axes else size
        for axis, size in enumerate(x.shape)
        if keepdims or axis not in axes
    )
    reduced = [axis for axis in range(sparse) if axis in axes]
    kept = [axis for axis in range(sparse) if axis not in axes]
    # Stored values have one axis in place of the sparse ones.
    dense = tuple(axis - sparse + (sparse > 0) for axis in axes if axis >= sparse)
    if not kept or not reduced:
        along = (0, *dense) if reduced else dense
        return Slices(along, True, values, valid, x, axes, shape, bool(kept))
    number = math.prod(x.shape[axis] for axis in kept)
    refuse_large(number, "kept")
    ids, where = jnp.zeros((), _integer()), coordinates(x)
    for axis in kept:
        size = x.shape[axis]
        # Padding goes to some group: it takes no part, so that its entry is the identity.
        ids = ids * size + jnp.clip(where[axis], 0, max(size - 1, 0)).astype(_integer())
    return Segments(ids, number, values, valid, x, axes, shape, keeps=False, axes=dense)


def sparse_dimensions(x: TensorLike) -> int:
    """Count the leading dimensions of `x` given by indices; 0 if it is dense."""
    if isinstance(x, RowSparse):
        return 1
    return int(x.n_sparse) if isinstance(x, BCOO | BCSR) else 0


def least(dtype: DTypeLike) -> ArrayLike:
    """Return the number that changes no maximum over `dtype`."""
    return _limits(dtype)[0]


def greatest(dtype: DTypeLike) -> ArrayLike:
    """Return the number that changes no minimum over `dtype`."""
    return _limits(dtype)[1]


def _limits(dtype: DTypeLike) -> tuple[ArrayLike, ArrayLike]:
    if jnp.issubdtype(dtype, jnp.bool_):
        return False, True
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf, dtype), np.asarray(np.inf, dtype)
    limits = jnp.iinfo(dtype)
    return np.asarray(limits.min, dtype), np.asarray(limits.max, dtype)


def refuse_large(size: int, axes: str) -> None:
    """Raise ValueError if a flattened index in `size` entries does not fit its dtype."""
    if size > jnp.iinfo(_integer()).max:
        raise ValueError(
            f"the {axes} axes have {size} entries, more than {_integer()} can count: set "
            "jax_enable_x64."
        )


def _integer() -> DType:
    return jnp.dtype(jnp.result_type(int))


def _join(
    left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    starts_left, product = left
    starts, x = right
    # Not where(starts, x, product * x): x may be inf, and its derivative 0 * inf.
    return starts_left | starts, jnp.where(starts, 1, product) * x


# --- running a reduction -------------------------------------------------------------

# Why a function makes a sparse tensor dense.
NOT_DECOMPOSED = "it does not decompose into results of its stored values"


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A reduction on every storage: arguments checked, groups made, results wrapped.

    Attributes:
        name: in messages.
        kernel: takes groups and options; returns results and where there is one. With `like`
            it takes the dtype of the results as `dtype`.
        plain: the function of JAX for arrays without `where`, with the same options; None if
            the kernel serves them.
        like: the function of JAX that has results of the same dtype; None if the kernel
            decides it.
        empty: the result of an array where there is none, if the kernel gives another.
        stored: the kernel for ordinary sparse storage, where entries that are not stored are
            zeros. `kernel` itself if zeros change nothing; None if it needs a dense array.
        dense: whether the kernel needs all entries in one array, whatever the storage.
        one_axis: whether a tuple of axes is refused.
        absent: if the kernel gives a result for each entry, that of an entry of an array which
            takes no part while others of its group do. None for one result of a group.
    """

    name: str
    kernel: Kernel
    plain: Function | None = None
    like: Function | None = None
    empty: float | None = None
    stored: Kernel | None = None
    dense: bool = False
    one_axis: bool = False
    absent: float | None = None

    def __call__(
        self,
        x: TensorLike,
        axis: Axis,
        keepdims: bool,
        where: Mask,
        dtype: DTypeLike | None = None,
        **options: Argument,
    ) -> Tensor:
        if self.one_axis:
            single_axis(axis, self.name)
        x = as_tensor(x)
        axes = checked_axes(axis, len(x.shape))
        masked, kernel = isinstance(x, MaskedTensor), self.kernel
        if is_sparse(x):
            # Only kernels that zeros do not change know which zeros `where` leaves out.
            counts_zeros = where is None or self.stored is self.kernel
            nothing = any(x.shape[axis] == 0 for axis in axes)
            if self.stored and counts_zeros and not nothing and not getattr(x, "n_batch", 0):
                kernel = self.stored
            else:
                x = as_dense(x) if nothing else dense(x, self.name, NOT_DECOMPOSED)
        elif self.dense:
            x = dense(x, self.name, NOT_DECOMPOSED)
        if not is_tensor(x) and where is None and self.plain is not None:
            axis = tuple(axis) if isinstance(axis, Sequence) else axis
            # Not every function of JAX takes these.
            options |= {"dtype": dtype} if dtype is not None else {}
            options |= {"keepdims": keepdims} if self.absent is None else {}
            return self.plain(x, axis=axis, **options)
        storage, valid = entries_of(x, where)
        groups = grouped(storage, valid, axes, keepdims)
        if self.like is not None:
            options["dtype"] = result_dtype(self.like, x.dtype, dtype)
        result, exists = kernel(groups, **options)
        if self.like is not None:
            result = result.astype(options["dtype"])
        if self.absent is not None:
            if masked:
                return joined(with_stored_values(storage, result), valid)
            absent = jnp.where(groups.spread(exists), self.absent, self.empty or 0)
            return jnp.where(valid, result, absent.astype(result.dtype))
        if masked:
            return joined(groups.stored(result), groups.shaped(exists))
        if self.empty is not None and not is_sparse(x):
            result = jnp.where(exists, result, self.empty)
        return groups.stored(result)


def result_dtype(function: Function, kind: DTypeLike, dtype: DTypeLike | None = None) -> DType:
    """Return the dtype that a function of JAX, such as `jnp.sum`, gives for a dtype."""
    if dtype is not None:
        function = functools.partial(function, dtype=dtype)
    return jax.eval_shape(function, jax.ShapeDtypeStruct((1,), kind)).dtype


def checked_axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return `axis` as ascending axes that are not negative."""
    if axis is None:
        return tuple(range(ndim))
    try:
        axes = [operator.index(a) for a in (axis if isinstance(axis, Sequence) else (axis,))]
    except TypeError:
        raise TypeError(
            f"`axis` must be an int, a tuple of ints or None, got {axis!r}."
        ) from None
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(f"`axis` {a} is out of bounds for a tensor of {ndim} dimensions.")
    axes = sorted(a % ndim for a in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(f"`axis` {axis} names an axis twice.")
    return tuple(axes)


def single_axis(axis: Axis, name: str) -> int | None:
    """Return `axis`, or raise TypeError if it is a tuple."""
    if isinstance(axis, Sequence):
        raise TypeError(f"`axis` of {name} must be an int or None, got {axis!r}.")
    return axis


def entries_of(x: TensorLike, where: Mask | None) -> tuple[Tensor, jax.Array]:
    """Return the storage of a tensor with unique positions, and which values take part.

    Those are entries, valid if it is masked, where the booleans `where` are True.
    """
    x = unique_positions(x)
    storage, valid = (x.storage, x.valid) if isinstance(x, MaskedTensor) else (x, is_entry(x))
    if where is None:
        return storage, valid
    refuse_scipy("where", where)
    masked = isinstance(where, MaskedTensor)
    where = where if masked else as_booleans(as_tensor(where))
    if masked or not jnp.issubdtype(where.dtype, jnp.bool_):
        kind = "a MaskedTensor" if masked else where.dtype
        raise TypeError(
            f"`where` must be a boolean array, True where an entry takes part, got {kind}."
        )
    shape = tuple(storage.shape)
    try:
        fits = jnp.broadcast_shapes(where.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`where` of shape {where.shape} does not broadcast to `x` of shape {shape}."
        )
    return storage, valid & entries_at(where, storage)[0]
