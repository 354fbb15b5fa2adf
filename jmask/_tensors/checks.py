"""Validation of the arguments of `RowSparse`; each error names a way out."""

import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.array_types import shapes_from
from jmask._base.row_ids import wrap
from jmask._base.types import Argument, HostArray, Numbers, Shape, Shaped
from jmask._base.validation import checked_array, checked_integer


def checked_shape(shape: Sequence[int]) -> Shape:
    try:
        checked = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise TypeError(f"`shape` must be a tuple of integers, got {shape!r}.") from None
    if not checked or min(checked) < 0:
        raise ValueError(
            f"`shape` must have at least one dimension and no negative one, got {checked}."
        )
    return checked


def check_values(indices: Shaped, values: Shaped, shape: Shape) -> None:
    """Raise ValueError unless values (n, *row) have a row of `shape` for each index."""
    expected = (*indices.shape, *shape[1:])
    if values.shape != expected:
        raise ValueError(
            f"`values` of shape {values.shape} do not fit `shape` {shape} and `indices` of "
            f"shape {indices.shape}: expected values of shape {expected}."
        )


def check_coalesced(ids: HostArray, rows: int) -> None:
    """Raise ValueError unless ids are sorted, unique, and followed by padding alone."""
    valid = ids[(ids >= 0) & (ids < rows)]
    if not np.array_equal(ids[: valid.size], np.unique(valid)):
        raise ValueError(
            "`coalesced` was promised, but `indices` are not sorted and unique with "
            "padding last: leave the promise out and call coalesce()."
        )


def checked_replacement(values: Argument, old: Shaped) -> jax.Array:
    """Return stored values that have the shape of those that they replace."""
    if not isinstance(values, jax.Array | jax.ShapeDtypeStruct):
        values = checked_array("values", values)
    if jnp.shape(values) != jnp.shape(old):
        raise ValueError(
            f"`values` of shape {jnp.shape(values)} do not fit: the tensor stores values of "
            f"shape {jnp.shape(old)}."
        )
    return values


def checked_capacity(nse: int) -> int:
    nse = checked_integer("nse", nse)
    if nse < 0:
        raise ValueError(f"`nse`, the number of rows to store, must be >= 0, got {nse}.")
    return nse


def checked_indices(name: str, indices: Numbers) -> jax.Array:
    if isinstance(indices, tuple) and any(map(np.ndim, indices)):  # the arguments of BCOO
        raise TypeError(
            f"`{name}` is a tuple of arrays: write RowSparse(indices, values, shape)."
        )
    if isinstance(indices, np.ma.MaskedArray):
        raise TypeError(
            f"`{name}` is a MaskedArray: give `{name}.filled(-1)`, which is padding where it "
            "is masked."
        )
    # NumPy first: a list of 64-bit ids must not be truncated to JAX's default int32.
    if not isinstance(indices, jax.Array):
        indices = np.asarray(indices)
        if indices.size == 0 and indices.dtype == float:
            indices = indices.astype(np.int32)
        if indices.dtype in (np.int64, np.uint64) and not jax.config.read("jax_enable_x64"):
            narrow = indices.astype(np.int32)
            if (narrow != indices).any():
                raise ValueError(
                    f"`{name}` holds {indices[narrow != indices][0]}, which is beyond 32-bit "
                    "integers: set jax.config.update('jax_enable_x64', True)."
                )
            indices = narrow
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise TypeError(f"`{name}` must be integers, the numbers of rows, got {indices.dtype}.")
    if indices.ndim != 1:
        raise ValueError(f"`{name}` must have one dimension, got shape {indices.shape}.")
    return jnp.asarray(indices)


def fit_or_poison(
    values: jax.Array, needed: jax.Array | int, nse: int, most: int, what: str = "rows"
) -> jax.Array:
    """Return `values` if `needed` rows fit into `nse`; else raise, or return nan under jit."""
    if nse >= most:
        return values
    if not isinstance(needed, jax.core.Tracer):
        if int(needed) > nse:
            raise ValueError(f"`nse`={nse} is too small: {int(needed)} {what} must be stored.")
        return values
    if not jnp.issubdtype(values.dtype, jnp.inexact) or not nse:
        raise ValueError(
            f"`nse`={nse} may be too small for {values.dtype} values (up to {most} {what}), "
            "which cannot be checked while they are traced."
        )
    return jnp.where(needed <= nse, values, jnp.nan)


def leaf_from_words(leaf: Argument, values: Argument, row_ndim: int) -> Argument:
    """Return the opaque leaf of ids from the words that it consists of; refuse plain numbers.

    orbax and callbacks of the host (`jax.debug.print`) take keys apart into unsigned integers
    (..., 1 or 2), and give these, or their shape, back.
    """
    sizes = getattr(values, "shape", ())
    ids = tuple(sizes[: len(sizes) - row_ndim])
    if leaf.dtype == jnp.uint32 and tuple(leaf.shape) in ((*ids, 1), (*ids, 2)):
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        return shapes_from(wrap, leaf) if is_shape else wrap(leaf)
    is_tangent = leaf.dtype == jax.dtypes.float0
    if is_tangent or not isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    raise TypeError(
        f"the indices of a RowSparse came back as plain {leaf.dtype} numbers: something "
        "mapped arithmetic over the leaves of a sparse gradient. Put the optax "
        "transformation inside jmask.lazy(...), or work on `.values`; jmask.to_arrays(x) has "
        "plain arrays."
    )
