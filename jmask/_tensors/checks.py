"""Validation of the arguments of `RowSparse`; each error names a way out."""

import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.row_ids import wrap
from jmask._base.types import HostArray, Numbers, Shape, Shaped, Value
from jmask._base.validation import abstract_leaf, checked_array, checked_integer


def check_order(indices: object, values: object) -> None:
    """Refuse the arguments of BCOO and of MXNet, and values in front of indices."""
    order = "RowSparse(indices, values, shape)"
    if isinstance(indices, tuple) and any(np.ndim(x) for x in indices):
        raise TypeError(f"`indices` is a tuple of arrays: write {order}.")
    if values is None:
        raise TypeError(f"`values` must be given: write {order}.")
    arrays = [abstract_leaf(x) for x in (indices, values)]
    are_integers = [x is not None and jnp.issubdtype(x.dtype, jnp.integer) for x in arrays]
    if arrays[0] is not None and are_integers == [False, True]:
        raise TypeError(
            f"`indices` must be integers, the numbers of rows, got {arrays[0].dtype}: the "
            f"order is {order}."
        )


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


def shape_that_fits(indices: jax.Array, values: jax.Array) -> Shape:
    """Return the smallest shape with these rows."""
    if isinstance(indices, jax.core.Tracer):
        raise ValueError(
            "`shape` must be given while `indices` are traced: the number of rows is static."
        )
    last = int(indices.max()) if indices.size else -1
    return (max(last + 1, 0), *values.shape[1:])


def check_stored(ids: HostArray, values: Shape, shape: Shape) -> None:
    """Raise ValueError unless every id is a row or padding, and has its row of values."""
    if values != (*ids.shape, *shape[1:]) or ids.ndim != 1:
        raise ValueError(
            f"`indices` of shape {ids.shape} and `values` of shape {values} do not fit a "
            f"tensor of shape {shape}: expected (n,) and (n, *{shape[1:]})."
        )
    bad = np.flatnonzero((ids < 0) | (ids > shape[0]))
    if bad.size:
        raise ValueError(
            f"`indices[{bad[0]}]` is {ids[bad[0]]}, which is neither a row of a "
            f"tensor of shape {shape} nor the padding {shape[0]} ({bad.size} such "
            "in all; they are dropped)."
        )


def check_coalesced(ids: HostArray, rows: int) -> None:
    """Raise ValueError unless ids are sorted, unique, and followed by padding alone."""
    valid = ids[(ids >= 0) & (ids < rows)]
    leading = ids[: valid.size]
    if (leading == valid).all() and (np.diff(valid.astype(object)) > 0).all():
        return
    raise ValueError(
        "`coalesced` was promised, but `indices` are not sorted and unique with "
        "padding last: leave the promise out and call coalesce()."
    )


def check_values(indices: jax.Array, values: jax.Array, shape: Shape) -> None:
    """Raise ValueError unless values (n, *row) have a row of `shape` for each index."""
    if values.ndim == 0 or values.shape[0] != indices.shape[0]:
        raise ValueError(
            f"`values` must have one row for each of the {indices.shape[0]} `indices`, got "
            f"values of shape {values.shape}."
        )
    if values.shape[1:] != shape[1:]:
        raise ValueError(
            f"`values` of shape {values.shape} do not fit `shape` {shape}: expected rows of "
            f"shape {shape[1:]}, got {values.shape[1:]}."
        )


def checked_replacement(values: Value, old: Shaped) -> jax.Array:
    """Return stored values that have the shape of those that they replace."""
    known = isinstance(values, jax.Array | jax.ShapeDtypeStruct)
    values = values if known else checked_array("values", values)
    if jnp.shape(values) != jnp.shape(old):
        raise ValueError(
            f"`values` of shape {jnp.shape(values)} do not fit: the tensor stores values of "
            f"shape {jnp.shape(old)}."
        )
    return values


def checked_leading(leading: int, shape: Shape) -> int:
    leading = checked_integer("leading", leading)
    if not 1 <= leading <= len(shape):
        raise ValueError(
            f"`leading`, the number of dimensions that indices number, must be between 1 and "
            f"{len(shape)} for a tensor of shape {shape}, got {leading}."
        )
    return leading


def checked_capacity(nse: int) -> int:
    nse = checked_integer("nse", nse)
    if nse < 0:
        raise ValueError(f"`nse`, the number of rows to store, must be >= 0, got {nse}.")
    return nse


def checked_indices(indices: Numbers, name: str = "indices") -> jax.Array:
    # NumPy first: a list of 64-bit ids must not be truncated to JAX's default int32.
    if not isinstance(indices, jax.Array):
        indices = np.asarray(indices)
        if indices.size == 0 and indices.dtype == float:
            indices = indices.astype(np.int32)
        if indices.dtype in (np.int64, np.uint64) and not jax.config.read("jax_enable_x64"):
            limits = np.iinfo(np.int32)
            beyond = (indices > limits.max) | (indices < limits.min)
            if beyond.any():
                raise ValueError(
                    f"`{name}` holds {indices[beyond][0]}, which is beyond 32-bit "
                    "integers: set jax.config.update('jax_enable_x64', True)."
                )
            indices = indices.astype(np.int32)
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
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        raise ValueError(
            f"`nse`={nse} may be too small for {values.dtype} values (up to {most} {what}), "
            "which cannot be checked while they are traced."
        )
    return jnp.where(needed <= nse, values, jnp.nan)


def resized(
    ids: jax.Array, values: jax.Array, nse: int, rows: int, most: int
) -> tuple[jax.Array, jax.Array]:
    """Pad or cut coalesced ids (n,) and values (n, *row) to `nse` rows."""
    needed = jnp.sum(ids < rows)
    extra = max(nse - ids.shape[0], 0)
    ids = jnp.pad(ids, (0, extra), constant_values=rows)[:nse]
    widths = [(0, extra)] + [(0, 0)] * (values.ndim - 1)
    return ids, fit_or_poison(jnp.pad(values, widths)[:nse], needed, nse, most)


def refuse_tangent(leaf: Shaped) -> None:
    """Raise TypeError if the ids belong to a tangent: JAX gives it none."""
    if leaf.dtype == jax.dtypes.float0:
        raise TypeError(
            "this RowSparse is a tangent, as jax.jvp returns it, and has no indices: they are "
            "those of the tensor x that it is a tangent of. Use x.with_values(tangent.values)."
        )


def leaf_from_words(leaf: Value, values: Value, row_ndim: int) -> Value:
    """Return the opaque leaf of ids from the words that it consists of; refuse plain numbers.

    orbax and callbacks of the host (`jax.debug.print`) take keys apart into unsigned integers
    (..., 1 or 2), and give these, or their shape, back.
    """
    sizes = getattr(values, "shape", ())
    ids = tuple(sizes[: len(sizes) - row_ndim])
    if leaf.dtype == jnp.uint32 and tuple(leaf.shape) in ((*ids, 1), (*ids, 2)):
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        return jax.eval_shape(wrap, leaf) if is_shape else wrap(leaf)
    is_tangent = leaf.dtype == jax.dtypes.float0
    if is_tangent or not isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    raise TypeError(
        f"the indices of a RowSparse came back as plain {leaf.dtype} numbers: something "
        "mapped arithmetic over the leaves of a sparse gradient. Put the optax "
        "transformation inside jmask.lazy(...), or work on `.values`; jmask.to_arrays(x) has "
        "plain arrays."
    )
