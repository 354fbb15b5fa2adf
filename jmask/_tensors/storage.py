"""Storages: how the entries of a tensor are laid out, apart from what they mean.

| stype        | object                            | stored values            |
|--------------|-----------------------------------|--------------------------|
| "default"    | `jax.Array`                       | the array                |
| "row_sparse" | `RowSparse`                       | (n, *row)                |
| "coo"        | `jax.experimental.sparse.BCOO`    | (nse, *dense dimensions) |
| "csr"        | `jax.experimental.sparse.BCSR`    | (nse, *dense dimensions) |

Code for any storage asks for its stored values, the same storage with other values, which of
them are entries and not padding, and a dense array sampled at their positions:

    x = BCOO of [[0, 3], [4, 0]]      stored_values(x)               [3, 4]
                                      is_entry(x)                    [T, T]
                                      sampled([[5, 6], [7, 8]], x)   [6, 7]
                                      as_dense(x)                    [[0, 3], [4, 0]]
"""

import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR
from jax.typing import DTypeLike

from jmask._base.array_types import adds_when_cast, joint_dtype, sum_dtype, trailing
from jmask._base.types import (
    Argument,
    Function,
    Ids,
    Scalar,
    Shape,
    Sparse,
    Storage,
    Tensor,
    TypeIs,
)
from jmask._base.validation import abstract_leaf, refuse_other_tensors, shown
from jmask._kernels.coalesce import coalesce_rows
from jmask._kernels.rows import gather_rows
from jmask._tensors.row_sparse import RowSparse

_Storage = TypeVar("_Storage", bound=Storage)
_T = TypeVar("_T")


def stype(x: object, argument: str = "x") -> str:
    """Return the name of the storage of `x`, which the caller was given as `argument`."""
    for kind, name in ((RowSparse, "row_sparse"), (BCOO, "coo"), (BCSR, "csr")):
        if isinstance(x, kind):
            return name
    refuse_other_tensors(argument, x)
    is_list, is_leaf = isinstance(x, list), lambda leaf: not isinstance(leaf, list | tuple)
    leaves = jax.tree.leaves(x, is_leaf=is_leaf) if is_list else [x]
    others = [leaf for leaf in leaves if abstract_leaf(leaf) is None]
    if not others:
        return "default"
    array = ". Its `.todense()` is an array" if hasattr(x, "todense") else ""
    raise TypeError(
        f"`{argument}`: {'a list that holds ' * is_list}{shown(others[0])} is not a "
        f"storage: expected an array of numbers, RowSparse, BCOO or BCSR{array}."
    )


def is_sparse(x: object) -> TypeIs[Sparse]:
    return isinstance(x, RowSparse | BCOO | BCSR)


def array_if_none_sparse(x: _T) -> _T | jax.Array:
    """Return the array in place of a BCOO without sparse dimensions, which has no positions."""
    return x.todense() if isinstance(x, BCOO) and x.n_sparse == 0 else x


def stored_values(x: Tensor) -> jax.Array:
    """Return the stored values of a tensor, masked or not; of an array, the array."""
    s: Argument = getattr(x, "storage", x)
    return s.values if isinstance(s, RowSparse) else s.data if isinstance(s, BCOO | BCSR) else s


def with_stored_values(x: _Storage, values: jax.Array, shape: Shape | None = None) -> _Storage:
    """Return the storage of `x` with other values, of `shape`, at the same positions."""
    result: Argument = values  # of the class of `x`, which no checker follows
    if isinstance(x, RowSparse) and shape is None:
        result = x.with_values(values)
    elif isinstance(x, RowSparse):
        result = x.with_leaves(x.index_leaf, values, shape=shape)
    elif isinstance(x, BCOO | BCSR):
        kind: Function = BCSR if isinstance(x, BCSR) else BCOO
        result = kind(
            (values, *_index_arrays(x)),
            shape=x.shape if shape is None else shape,
            indices_sorted=x.indices_sorted,
            unique_indices=x.unique_indices,
        )
    return result


def coordinates(x: Sparse) -> tuple[jax.Array, ...]:
    """Return the index of each stored value in the sparse dimensions: arrays (nse,)."""
    if isinstance(x, RowSparse):
        return (x.row_ids(),)
    if isinstance(x, BCSR):
        rows = row_of_each(x.indptr, x.indices.shape[0])
        return rows.astype(x.indices.dtype), x.indices
    return tuple(x.indices[:, d] for d in range(x.n_sparse))


def row_of_each(pointers: Ids, count: int) -> jax.Array:
    """Return the row of each of `count` entries in compressed rows; padding gets row V.

    pointers [0, 2, 2, 3]  ->  [0, 0, 2, 3]      three rows have begun by entry 3: padding
    """
    begun = jnp.zeros((count,), pointers.dtype).at[pointers].add(1, mode="drop")
    return jnp.cumsum(begun) - 1  # a search for each entry takes several times as long


def stored_at(x: RowSparse, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the stored rows, equal ones summed, and the position of each id among them.

    The ids are canonical. The position of an id that is not stored is the number of rows.
    """
    stored, values = x.row_ids(), x.values
    if not x.coalesced:
        stored, values = coalesce_rows(stored, values, x.shape[0])
    count = values.shape[0]
    places = jnp.searchsorted(stored, ids).astype(stored.dtype)
    if not count:
        return values, places
    # Padding of the tensor and of the ids is V, which is no row.
    exists = (stored[jnp.minimum(places, count - 1)] == ids) & (ids < x.shape[0])
    return values, jnp.where(exists, places, count)


def is_stored(x: Sparse) -> jax.Array:
    """Find which of the (nse,) places of `x` hold an entry or a row, and are not padding."""
    pairs = zip(coordinates(x), x.shape, strict=False)
    inside = [(index >= 0) & (index < size) for index, size in pairs]
    every = jnp.ones(stored_values(x).shape[:1], bool)  # of a BCOO without sparse dimensions
    return functools.reduce(jnp.logical_and, inside, every)


def is_entry(x: Storage) -> jax.Array:
    """Find which stored values (broadcast to their shape) are entries of `x`, not padding."""
    values = stored_values(x)
    if not is_sparse(x):
        return jnp.ones(values.shape, bool)
    return jnp.broadcast_to(trailing(is_stored(x), values.ndim), values.shape)


def entry_indices(x: Storage, numbers: jax.Array) -> list[jax.Array]:
    """Return the index in every dimension of stored values, given by their row-major number."""
    if not is_sparse(x):
        return list(jnp.unravel_index(numbers, x.shape))
    place, *rest = jnp.unravel_index(numbers, stored_values(x).shape)
    gathered = [gather_rows(index, place.astype(jnp.int32)) for index in coordinates(x)]
    return [*gathered, *rest]


def sampled(dense: jax.Array, like: Storage, shape: Shape | None = None) -> jax.Array:
    """Return the entries of `dense` at the stored positions of `like`.

    Args:
        dense: broadcasts to `shape`; only what is sampled is broadcast.
        shape: by default `like.shape`, than which trailing sizes may be larger; the result has
            the shape that stored values of a tensor of `shape` have.
    """
    shape = tuple(like.shape) if shape is None else shape
    if not is_sparse(like):
        return jnp.broadcast_to(dense, shape)
    where = coordinates(like)
    values = (*stored_values(like).shape[:1], *shape[len(where) :])
    if 0 in shape:
        return jnp.zeros(values, dense.dtype)
    dense = dense.reshape((1,) * (len(shape) - dense.ndim) + dense.shape)
    if isinstance(like, RowSparse) and dense.shape[0] > 1:
        dense = gather_rows(dense, where[0], coalesced=like.coalesced)
    else:
        sizes = dense.shape[: len(where)]
        places = [0 if size == 1 else i for i, size in zip(where, sizes, strict=True)]
        dense = dense.at[tuple(places)].get(mode="clip")
        if max(sizes, default=1) == 1:
            dense = dense[None]
    return jnp.broadcast_to(dense, values)


def scattered(values: jax.Array, like: Storage, fill: Scalar) -> jax.Array:
    """Return dense array with `values` at the stored positions of `like`, `fill` elsewhere."""
    if not is_sparse(like):
        return values
    dense = jnp.full(like.shape, fill, values.dtype)
    if not dense.size:  # to which JAX scatters padding, but without a derivative
        return dense
    first, *others = coordinates(like)
    first = jnp.where(is_stored(like), first, like.shape[0])
    return dense.at[(first, *others)].set(values, mode="drop")


def same_positions(x: Storage, y: Storage) -> bool:
    """Decide whether two tensors surely store the same positions in the same order.

    True for shared index arrays; concrete ones are compared. Traced ones that are not shared
    cannot be compared, and count as different.
    """
    return tuple(x.shape) == tuple(y.shape) and same_index_arrays(x, y)


def same_index_arrays(x: Storage, y: Storage) -> bool:
    """Decide as `same_positions`, for tensors whose dense, trailing sizes may differ."""
    kinds = [(stype(a), a.ndim, sparse_sizes(a)) for a in (x, y)]
    return kinds[0] == kinds[1] and all(map(_same_array, _index_arrays(x), _index_arrays(y)))


def sparse_sizes(x: Storage) -> Shape:
    """Return the sizes of the sparse dimensions, of which an array has none."""
    if isinstance(x, RowSparse):
        return (x.row_count,)
    return tuple(x.shape[: getattr(x, "n_sparse", 0)])


# Jitted, or some thirty operations would be dispatched one by one outside of jit.
@functools.partial(jax.jit, inline=True)
def read_at_positions(x: Sparse, values: jax.Array, like: Sparse) -> jax.Array:
    """Read the values at the positions of `x`, summed (booleans: `or`), at positions of `like`.

    The positions of both, of equal `sparse_sizes`, are sorted together and numbered:

        x at (0, 2) (1, 0), like at (1, 0) (3, 1)    numbers 0 1, 1 2
    """
    count, dtype = values.shape[0], sum_dtype(values.dtype)
    places = [jnp.stack(coordinates(tensor), axis=1) for tensor in (x, like)]
    both = jnp.concatenate([a.astype(joint_dtype(*places)) for a in places])
    total = both.shape[0]
    _, numbers = jnp.unique(both, axis=0, size=total, return_inverse=True)
    values_of_x = jnp.where(is_entry(x), values, jnp.zeros_like(values)).astype(dtype)
    sums = jnp.zeros((total, *values.shape[1:]), dtype).at[numbers[:count]].add(values_of_x)
    return sums[numbers[count:]].astype(values.dtype)


def has_unique_positions(x: Storage) -> bool:
    """Decide whether it is known that no two stored values have one position."""
    return getattr(x, "unique_indices", getattr(x, "coalesced", True))


def unique_positions(x: _Storage) -> _Storage:
    """Return the tensor with equal positions summed into one, as masked semantics need."""
    if not is_sparse(x) or has_unique_positions(x):
        return x
    result: Argument  # of the class of `x`
    if isinstance(x, RowSparse):
        result = x.coalesce()
    elif isinstance(x, BCSR):
        result = to_bcsr(sum_duplicates(x.to_bcoo(), x.nse))
    else:
        result = sum_duplicates(x, x.nse)
    return result


def summed_before_cast(x: _Storage, dtype: DTypeLike) -> _Storage:
    """Sum equal positions if that has to come before a cast: integers wrap, booleans `or`."""
    return x if adds_when_cast(x.dtype, dtype) else unique_positions(x)


def sum_duplicates(x: BCOO, nse: int | None = None) -> BCOO:
    """Sum equal positions into one, `nse` in all; booleans add as `or`."""
    counted = with_stored_values(x, x.data.astype(sum_dtype(x.dtype)))
    result = counted.sum_duplicates(nse=nse, remove_zeros=False)
    return with_stored_values(result, result.data.astype(x.dtype))


def as_dense(x: Storage) -> jax.Array:
    """Make a sparse tensor dense; booleans add as `or`, sums are rounded once."""
    if not is_sparse(x):
        return x
    if isinstance(x, BCOO | BCSR) and 0 in x.shape:  # as in `scattered`
        return jnp.zeros(x.shape, x.dtype)
    dtype = sum_dtype(x.dtype)
    if isinstance(x, RowSparse) or dtype == x.dtype:
        return x.todense()
    return with_stored_values(x, x.data.astype(dtype)).todense().astype(x.dtype)


def to_bcsr(x: BCOO) -> BCSR:
    """Return a matrix in coordinates, sorted or not, in compressed rows; padding comes last."""
    # `BCSR.from_bcoo` does not keep `unique_indices`.
    values, rows, columns = x.data, x.indices[:, 0], x.indices[:, 1]
    if not x.indices_sorted:
        order = jnp.lexsort((columns, rows))
        rows, columns, values = rows[order], columns[order], values[order]
    starts = jnp.searchsorted(rows, jnp.arange(x.shape[0] + 1, dtype=rows.dtype))
    return BCSR(
        (values, columns, starts.astype(columns.dtype)),
        shape=x.shape,
        indices_sorted=True,
        unique_indices=x.unique_indices,
    )


def _index_arrays(x: Storage) -> tuple[jax.Array, ...]:
    if isinstance(x, RowSparse):
        return (x.index_leaf,)
    if isinstance(x, BCSR):
        return x.indices, x.indptr
    return (x.indices,) if isinstance(x, BCOO) else ()


def _same_array(x: jax.Array, y: jax.Array) -> bool:
    if x is y:
        return True
    if isinstance(x, jax.core.Tracer) or isinstance(y, jax.core.Tracer):
        return False
    with jax.ensure_compile_time_eval():  # constants, also while something is traced
        return x.shape == y.shape and bool((x == y).all())
