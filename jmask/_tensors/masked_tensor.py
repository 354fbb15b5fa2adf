"""`MaskedTensor`: a tensor some of whose entries do not exist.

    data    [1, nan, 3]
    mask    [T, F,   T]        True = valid
    tensor  [1, --,  3]        sum 4, mean 2, and no gradient to the middle

What lies under the mask is never read as a number: not by a result, not by a gradient.
Operations combine masks by intersection (an entry of `a + b` exists where both do), and
reductions run over the entries that exist. On sparse storage (`RowSparse`, BCOO, BCSR)
entries that are not stored do not exist either; the mask is kept for the stored values alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NoReturn, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO, BCSR
from jax.typing import DTypeLike

from jmask._base.types import (
    Argument,
    DType,
    PyTree,
    Scalar,
    Shape,
    Sparse,
    Storage,
    StorageLike,
    Tensor,
    TensorLike,
    TypeIs,
)
from jmask._base.validation import checked_dtype, checked_scalar, refuse_other_tensors
from jmask._tensors.checks import checked_replacement
from jmask._tensors.flax_state import register_in_flax
from jmask._tensors.methods import MaskedMethods, library
from jmask._tensors.storage import (
    array_if_none_sparse,
    coordinates,
    has_unique_positions,
    is_entry,
    is_sparse,
    read_at_positions,
    same_positions,
    sampled,
    scattered,
    sparse_sizes,
    stored_values,
    stype,
    unique_positions,
    with_stored_values,
)

_Tensor = TypeVar("_Tensor", bound=Tensor)


@jax.tree_util.register_pytree_with_keys_class
class MaskedTensor(MaskedMethods):
    """A tensor with masked entries, on dense or sparse storage.

    Args:
        data: an array, `RowSparse`, BCOO or BCSR.
        mask: where entries are valid, everything (stored) if None. For dense data a boolean
            array; it and the data broadcast against each other. For sparse data a boolean
            array of the shape of the tensor or of its stored values. A sparse mask, whose
            booleans JAX may have made int32, gives dense data its storage; for sparse data it
            stores positions in the same way, and the result has the positions of the mask.

    Equal positions of sparse data are one entry: the sum of those that are valid.

    Raises:
        TypeError: if the mask is not boolean, or the data no known storage.
        ValueError: if shapes do not broadcast, or a sparse mask numbers rows and its data
            entries.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> data, mask = jnp.array([1., jnp.nan, 3.]), jnp.array([True, False, True])
        >>> x = jmask.MaskedTensor(data, mask)
        >>> x
        MaskedTensor([1.0, --, 3.0], dtype=float32)
        >>> x * 2 + 1
        MaskedTensor([3.0, --, 7.0], dtype=float32)
        >>> x.to_tensor(0)
        Array([1., 0., 3.], dtype=float32)
    """

    __slots__ = ("storage", "valid")

    storage: Storage
    valid: jax.Array

    def __init__(self, data: StorageLike, mask: StorageLike | None = None):
        if isinstance(data, MaskedTensor):
            raise TypeError(
                "`data` is a MaskedTensor already: use its `.data`, or masked_where()."
            )
        register_in_flax(MaskedTensor)
        stype(data, "data")  # refuses what is no storage
        data = array_if_none_sparse(data)
        mask = None if mask is None else checked_mask(mask)
        if is_sparse(data):
            self.storage, self.valid = _on_sparse(data, mask)
        elif is_sparse(mask):
            mask = unique_positions(mask)
            self.storage = with_stored_values(mask, sampled(jnp.asarray(data), mask))
            self.valid = stored_values(mask) & is_entry(mask)
        else:
            data = jnp.asarray(data)
            mask = jnp.ones((), bool) if mask is None else jnp.asarray(mask)
            shape = common_shape([data.shape, mask.shape], "`data` and `mask`")
            self.storage, self.valid = (jnp.broadcast_to(x, shape) for x in (data, mask))

    # --- pytree: data and the booleans of its stored values -----------------------------

    def tree_flatten_with_keys(self) -> tuple[Sequence[tuple[object, PyTree]], None]:
        keys = (jax.tree_util.GetAttrKey("data"), jax.tree_util.GetAttrKey("mask"))
        return tuple(zip(keys, (self.storage, self.valid), strict=True)), None

    def tree_flatten(self) -> tuple[Sequence[PyTree], None]:
        return (self.storage, self.valid), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[PyTree]) -> Self:
        # JAX also builds nodes of shapes and axes; only surely wrong numbers are refused.
        register_in_flax(cls)
        node = object.__new__(cls)
        node.storage, node.valid = children
        kinds = (jnp.dtype(bool), jax.dtypes.float0)  # float0 in tangents and cotangents
        if isinstance(node.valid, jax.Array) and node.valid.dtype not in kinds:
            raise TypeError(
                f"the mask of a MaskedTensor came back as {node.valid.dtype} numbers: "
                "something mapped arithmetic over its leaves. Put an optax transformation "
                "inside jmask.lazy(...), and use the functions of jmask.numpy."
            )
        return node

    # --- description --------------------------------------------------------------------

    @property
    def data(self) -> Storage:
        """The data in its storage; what lies under the mask is arbitrary."""
        return self.storage

    @property
    def mask(self) -> Storage:
        """The mask in the storage of the data: True where an entry is valid."""
        return with_stored_values(self.storage, self.valid)

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return tuple(self.storage.shape)

    @property
    def dtype(self) -> DType:
        """The dtype of the data."""
        return self.storage.dtype

    @property
    def nbytes(self) -> int:
        """How many bytes data, mask and indices take."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    @property
    def stype(self) -> str:
        """The storage: "default", "row_sparse", "coo" or "csr"."""
        return stype(self.storage)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a MaskedTensor without dimensions.")
        return self.shape[0]

    def __iter__(self) -> Iterator[MaskedTensor]:
        return (self[i] for i in range(len(self)))

    def __float__(self) -> float:
        return float(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def _number(self) -> jax.Array:
        if is_sparse(self.storage) or self.shape:
            raise TypeError(f"a MaskedTensor of shape {self.shape} is not one number.")
        if not self.valid:
            raise ValueError("a masked entry is not a number: use to_tensor(fill_value).")
        return self.storage

    def __bool__(self) -> bool:
        raise TypeError(
            "a MaskedTensor has no truth value: use all() or any(), or to_tensor(fill)."
        )

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NoReturn:
        raise TypeError(
            "a MaskedTensor does not become an array by itself, because its masked entries "
            "have no values: use to_tensor(fill), or jmask.to_numpy_ma(x). Beside arrays of "
            "numpy.ma, whose operators ask for one, take jmask.from_numpy_ma of these."
        )

    # --- data out -----------------------------------------------------------------------

    def get_data(self) -> Storage:
        """Return data in its storage, arbitrary where masked; no gradient flows to there."""
        values = stored_values(self)
        kept = jnp.where(self.valid, values, jax.lax.stop_gradient(values))
        return with_stored_values(self.storage, kept)

    def get_mask(self) -> Storage:
        """Return the mask in the storage of the data."""
        return self.mask

    def to_tensor(self, fill_value: Scalar) -> jax.Array:
        """Return the dense array with `fill_value` at every entry that is not valid.

        Example:
            >>> import jax.numpy as jnp, jmask
            >>> x = jmask.masked_tensor(jnp.array([1, 2]), jnp.array([True, False]))
            >>> x.to_tensor(7)
            Array([1, 7], dtype=int32)
        """
        values = stored_values(self)
        fill = checked_scalar("fill_value", fill_value, values.dtype)
        values = jnp.where(self.valid, values, fill)
        return scattered(values, self.storage, fill)

    filled = to_tensor

    def to_dense(self) -> MaskedTensor:
        """Return the same tensor on dense storage; entries that are not stored are masked."""
        if not is_sparse(self.storage):
            return self
        data = scattered(stored_values(self), self.storage, 0)
        return joined(data, scattered(self.valid, self.storage, False))

    def to_sparse(self, nse: int | None = None) -> MaskedTensor:
        """Return `jmask.cast_storage(x, "coo")`: every valid entry is stored."""
        return library().cast_storage(self, "coo", nse=nse)

    def to_sparse_csr(self, nse: int | None = None) -> MaskedTensor:
        """Return `jmask.cast_storage(x, "csr")`: every valid entry is stored."""
        return library().cast_storage(self, "csr", nse=nse)

    def to_row_sparse(self, nse: int | None = None) -> MaskedTensor:
        """Return `jmask.cast_storage(x, "row_sparse")`: rows with a valid entry are stored."""
        return library().cast_storage(self, "row_sparse", nse=nse)

    def astype(self, dtype: DTypeLike) -> MaskedTensor:
        """Return the tensor with its data cast to `dtype`."""
        values = stored_values(self).astype(checked_dtype("dtype", dtype))
        return self.with_values(values)

    def with_values(self, values: jax.Array, valid: jax.Array | None = None) -> MaskedTensor:
        """Return the tensor with other stored values (and mask) at the same positions."""
        if valid is None:
            values, valid = checked_replacement(values, stored_values(self)), self.valid
        return joined(with_stored_values(self.storage, values), valid)


def masked_tensor(data: StorageLike, mask: StorageLike | None = None) -> MaskedTensor:
    """Return a `MaskedTensor` of data and a mask, True = valid; see `MaskedTensor`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.masked_tensor(jnp.arange(3), jnp.array([True, False, True]))
        MaskedTensor([0, --, 2], dtype=int32)
    """
    return MaskedTensor(data, mask)


def joined(storage: Storage, valid: jax.Array) -> MaskedTensor:
    """Return a masked tensor of storage and the booleans of its stored values, unchecked."""
    return MaskedTensor.tree_unflatten(None, (storage, valid))


def with_values_of(x: _Tensor, values: jax.Array) -> _Tensor:
    """Replace the stored values, masked or not, at the same positions."""
    result: Argument = values  # of the class of `x`, which no checker follows
    if isinstance(x, MaskedTensor):
        result = joined(with_stored_values(x.storage, values), x.valid)
    elif is_sparse(x):
        result = with_stored_values(x, values)
    return result


def is_tensor(x: object) -> TypeIs[Sparse | MaskedTensor]:
    """Decide whether `x` is sparse or masked: one leaf of a tree."""
    return is_sparse(x) or isinstance(x, MaskedTensor)


def any_masked(*operands: object) -> bool:
    """Decide whether one of them is a `MaskedTensor`."""
    return any(isinstance(x, MaskedTensor) for x in operands)


def as_tensor(x: TensorLike) -> Tensor:
    """Return `x` if it is sparse or masked, and otherwise the array."""
    refuse_other_tensors("x", x)
    return x if is_tensor(x) else jnp.asarray(x)


def as_masked_tensor(x: TensorLike) -> MaskedTensor:
    """Return `x` as a `MaskedTensor`: itself, or with every (stored) entry valid.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.as_masked_tensor(jnp.arange(3))
        MaskedTensor([0, 1, 2], dtype=int32)
    """
    if isinstance(x, MaskedTensor):
        return x
    stype(x)  # refuses what is no tensor
    return MaskedTensor(x)


def common_shape(shapes: Sequence[Shape], operands: str = "operands") -> Shape:
    """Return the broadcast shape of operands; the error names all shapes."""
    try:
        return tuple(jnp.broadcast_shapes(*shapes))
    except ValueError:
        listed = ", ".join(map(str, shapes))
        raise ValueError(f"{operands} of shapes {listed} do not broadcast.") from None


# --- sparse data and their mask ------------------------------------------------------------
#
# Equal positions of sparse data are one entry: the sum of those that are valid, if any is.


def _on_sparse(data: Sparse, mask: Storage | None) -> tuple[Storage, jax.Array]:
    """Return sparse data with unique positions, and which of its stored values are valid."""
    if getattr(data, "n_batch", 0):
        raise ValueError(
            f"`data` is a {type(data).__name__} with batch dimensions: use vmap over tensors "
            "without them."
        )
    values, shape = stored_values(data), tuple(data.shape)
    if is_sparse(mask) and tuple(mask.shape) != shape:
        raise ValueError(
            f"`mask` of shape {tuple(mask.shape)} must have the shape of `data`, {shape}."
        )
    if mask is None:
        valid = jnp.ones_like(values, bool)  # sharded as they are
    elif is_sparse(mask):
        if sparse_sizes(data) != sparse_sizes(mask):
            raise ValueError(
                f"`mask`, a {stype(mask)}, must store positions in the same way as `data`, a "
                f"{stype(data)}."
            )
        if not same_positions(data, mask):
            return _on_other_positions(data, mask)
        valid = stored_values(mask)
    else:
        fits = [mask.shape == shape, mask.shape == values.shape]
        if sum(fits) != 1:
            raise ValueError(
                f"`mask` of shape {mask.shape} fits {'both' if all(fits) else 'neither'} the "
                f"entries of a tensor of shape {shape} and its stored values of shape "
                f"{values.shape}: pass a {type(data).__name__} with the index arrays of `data`."
            )
        valid = sampled(mask, data) if fits[0] else mask
    if has_unique_positions(data):
        return data, valid & is_entry(data)
    return _with_unique_positions(data, valid)


def _on_other_positions(data: Sparse, mask: Sparse) -> tuple[Storage, jax.Array]:
    """Return the entries of `data` at the positions of a sparse mask, and which are valid."""
    values, flags, exists = stored_values(data), stored_values(mask), is_entry(data)
    if values.shape == flags.shape:
        # If both store the same positions, each boolean masks one stored value, also where
        # positions repeat. Of traced indices that is known only at run time.
        pairs = zip(coordinates(data), coordinates(mask), strict=True)
        is_alike = jnp.stack([jnp.array_equal(a, b) for a, b in pairs]).all()
        exists &= flags | ~is_alike
    pattern = unique_positions(mask)
    valid = stored_values(pattern) & is_entry(pattern)
    valid &= read_at_positions(data, exists, pattern)
    kept = jnp.where(exists, values, jnp.zeros_like(values))
    return with_stored_values(pattern, read_at_positions(data, kept, pattern)), valid


# Jitted, or some fifty operations would be dispatched one by one outside of jit.
@functools.partial(jax.jit, inline=True)
def _with_unique_positions(data: Sparse, valid: jax.Array) -> tuple[Storage, jax.Array]:
    values = stored_values(data)
    existing = with_stored_values(data, jnp.where(valid, values, jnp.zeros_like(values)))
    counts = unique_positions(with_stored_values(data, valid.astype(jnp.int32)))
    merged = unique_positions(existing)
    return merged, (stored_values(counts) > 0) & is_entry(merged)


def checked_mask(mask: Argument, name: str = "mask") -> Storage:
    """Return a mask as an array or a storage of booleans, or raise TypeError."""
    stype(mask, name)  # refuses what is no storage
    mask = array_if_none_sparse(mask)
    flags: Storage = mask if is_sparse(mask) else jnp.asarray(mask)
    # JAX makes booleans in storages of entries int32.
    if isinstance(flags, BCOO | BCSR) and jnp.issubdtype(flags.dtype, jnp.integer):
        return with_stored_values(flags, flags.data != 0)
    if flags.dtype != jnp.dtype(bool):
        raise TypeError(
            f"`{name}` must be boolean, True where an entry is valid, got {flags.dtype}. Write "
            f"`{name} != 0` if that is meant."
        )
    return flags
