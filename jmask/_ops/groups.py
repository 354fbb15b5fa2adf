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
then it does not matter which group it is in, and padding needs no group of its own.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.sparse import BCOO, BCSR

from jmask._base.array_types import trailing
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.storage import coordinates, is_sparse, stored_values


@dataclasses.dataclass(frozen=True)
class Groups:
    """What both forms share: the entries, and the tensor they come from.

    Attributes:
        values: the entries, arranged as the form needs.
        valid: which of them take part; the shape of `values`.
        origin: the storage reduced.
        reduced: its axes that are reduced, in ascending order.
        shape: of the tensor of results.
    """

    values: Any
    valid: Any
    origin: Any
    reduced: tuple[int, ...]
    shape: tuple[int, ...]

    def count(self, x: Any) -> Any:
        """How many of the booleans `x` are true in each group."""
        return self.sum(x.astype(_integer()))

    def positions(self) -> Any:
        """For each entry its index in the reduced axes, flattened."""
        x, index = self.origin, jnp.zeros((), _integer())
        refuse_large(math.prod(x.shape[a] for a in self.reduced), "reduced")
        for axis in self.reduced:
            index = index * x.shape[axis] + _coordinate(x, axis)
        return self.arranged(jnp.broadcast_to(index, stored_values(x).shape))

    def arranged(self, x: Any) -> Any:
        """An array of the shape of the stored values, arranged as the entries."""
        return x

    def restored(self, x: Any) -> Any:
        """Entries as the stored values are arranged."""
        return x

    def sum(self, x: Any) -> Any:
        """The sum of `x` in each group: each form has its own."""
        raise NotImplementedError

    def spread(self, result: Any) -> Any:
        """For each entry the result of its group: each form has its own."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Slices(Groups):
    """Groups that are slices of `values` along `axes`; results keep these axes.

    Attributes:
        axes: of `values`.
        keeps: whether results are stored at the positions of `origin`.
    """

    axes: tuple[int, ...]
    keeps: bool

    def sum(self, x: Any) -> Any:
        return jnp.sum(x, self.axes, dtype=x.dtype, keepdims=True)

    def prod(self, x: Any) -> Any:
        return jnp.prod(x, self.axes, dtype=x.dtype, keepdims=True)

    def max(self, x: Any) -> Any:
        return jnp.max(x, self.axes, keepdims=True, initial=least(x.dtype))

    def min(self, x: Any) -> Any:
        return jnp.min(x, self.axes, keepdims=True, initial=greatest(x.dtype))

    def any(self, x: Any) -> Any:
        return jnp.any(x, self.axes, keepdims=True)

    def spread(self, result: Any) -> Any:
        return jnp.broadcast_to(result, self.values.shape)

    def shaped(self, result: Any) -> Any:
        """Results as the stored values of the tensor of results."""
        if self.keeps:
            sparse = sparse_dimensions(self.origin)
            return result.reshape(result.shape[:1] + self.shape[sparse:])
        return result.reshape(self.shape)

    def stored(self, result: Any) -> Any:
        """The tensor of results."""
        x, result = self.origin, self.shaped(result)
        if not self.keeps:
            return result
        if isinstance(x, RowSparse):
            return x.with_leaves(x.index_leaf, result, shape=self.shape)
        kind = BCSR if isinstance(x, BCSR) else BCOO
        indices = (x.indices, x.indptr) if isinstance(x, BCSR) else (x.indices,)
        return kind(
            (result, *indices),
            shape=self.shape,
            indices_sorted=x.indices_sorted,
            unique_indices=x.unique_indices,
        )


@dataclasses.dataclass(frozen=True)
class Segments(Groups):
    """Groups that are the rows `values[i]` with equal `ids[i]`; results are (number, *row).

    Attributes:
        ids (n,): the group of each row.
        number: how many groups there are.
        axes: of the stored values, dense and reduced: made one with their axis 0.
    """

    ids: Any
    number: int
    axes: tuple[int, ...]

    def sum(self, x: Any) -> Any:
        return jax.ops.segment_sum(x, self.ids, max(self.number, 1))

    def max(self, x: Any) -> Any:
        return jax.ops.segment_max(x, self.ids, max(self.number, 1))

    def min(self, x: Any) -> Any:
        return jax.ops.segment_min(x, self.ids, max(self.number, 1))

    def any(self, x: Any) -> Any:
        return self.max(x.astype(jnp.uint8)) > 0

    def prod(self, x: Any) -> Any:
        """By a scan over sorted segments: a scatter of products has no derivative at 0."""
        if x.shape[0] == 0:
            return jnp.ones((max(self.number, 1), *x.shape[1:]), x.dtype)
        order = jnp.argsort(self.ids, stable=True)
        ids, x = self.ids[order], x[order]
        changes = ids[1:] != ids[:-1]
        true = jnp.ones((1,), bool)
        starts = trailing(jnp.concatenate([true, changes]), x.ndim)
        ends = trailing(jnp.concatenate([changes, true]), x.ndim)
        _, running = lax.associative_scan(_join, (starts, x))
        count = jax.ops.segment_sum(jnp.ones_like(ids), ids, max(self.number, 1))
        product = jax.ops.segment_sum(jnp.where(ends, running, 0), ids, max(self.number, 1))
        return jnp.where(trailing(count, product.ndim) > 0, product, 1)

    def spread(self, result: Any) -> Any:
        return result[self.ids]

    def arranged(self, x: Any) -> Any:
        x = jnp.moveaxis(x, self.axes, range(1, 1 + len(self.axes)))
        return x.reshape(-1, *x.shape[1 + len(self.axes) :])

    def restored(self, x: Any) -> Any:
        values = stored_values(self.origin)
        sizes = (values.shape[0], *(values.shape[a] for a in self.axes))
        return jnp.moveaxis(x.reshape(sizes + x.shape[1:]), range(1, len(sizes)), self.axes)

    def shaped(self, result: Any) -> Any:
        """Results as the tensor of results, which is dense."""
        return result[: self.number].reshape(self.shape)

    stored = shaped


def grouped(x: Any, valid: Any, axes: Sequence[int], keepdims: bool = False) -> Any:
    """The groups of a reduction: `Slices` or `Segments`.

    Args:
        x: a storage, with no position twice unless the reduction is a sum.
        valid: which of its stored values take part; the shape of the stored values.
        axes: not negative, ascending.
        keepdims: whether reduced axes stay, with size 1, in the results.
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
        return Slices(values, valid, x, axes, shape, along, keeps=bool(kept))
    number = math.prod(x.shape[axis] for axis in kept)
    refuse_large(number, "kept")
    ids, where = jnp.zeros((), _integer()), coordinates(x)
    for axis in kept:
        size = x.shape[axis]
        ids = ids * size + jnp.clip(where[axis], 0, max(size - 1, 0)).astype(_integer())
    ids = jnp.repeat(ids, math.prod(values.shape[axis] for axis in dense))
    form = Segments(values, valid, x, axes, shape, ids, number, dense)
    return dataclasses.replace(form, values=form.arranged(values), valid=form.arranged(valid))


def sparse_dimensions(x: Any) -> int:
    """How many leading dimensions of `x` are given by indices; 0 if it is dense."""
    if isinstance(x, RowSparse):
        return 1
    return int(x.n_sparse) if is_sparse(x) else 0


def least(dtype: Any) -> Any:
    """The number that no maximum over `dtype` is changed by."""
    return _extreme(dtype, -jnp.inf, lambda info: info.min)


def greatest(dtype: Any) -> Any:
    """The number that no minimum over `dtype` is changed by."""
    return _extreme(dtype, jnp.inf, lambda info: info.max)


def refuse_large(size: int, axes: str) -> None:
    """Raise ValueError if a flattened index in `size` entries does not fit its dtype."""
    if size > jnp.iinfo(_integer()).max:
        raise ValueError(
            f"the {axes} axes have {size} entries, more than {_integer()} can count: set "
            "jax_enable_x64."
        )


def _extreme(dtype: Any, infinite: float, of_integers: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return infinite > 0
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.array(infinite, dtype)
    return jnp.array(of_integers(jnp.iinfo(dtype)), dtype)


def _integer() -> Any:
    return jnp.dtype(jnp.result_type(int))


def _coordinate(x: Any, axis: int) -> Any:
    """The index of each stored value in one axis; broadcasts to the stored values."""
    values, sparse = stored_values(x), sparse_dimensions(x)
    if axis < sparse:
        return trailing(coordinates(x)[axis].astype(_integer()), values.ndim)
    return lax.broadcasted_iota(_integer(), values.shape, axis - sparse + (sparse > 0))


def _join(left: Any, right: Any) -> Any:
    starts_left, product = left
    starts, x = right
    # Not where(starts, x, product * x): x may be inf, and its derivative 0 * inf.
    return starts_left | starts, jnp.where(starts, 1, product) * x
