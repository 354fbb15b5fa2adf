"""`MaskedTensor`: a tensor some of whose entries do not exist.

    data    [1, nan, 3]
    mask    [T, F,   T]        True = valid
    tensor  [1, --,  3]        sum 4, mean 2, and no gradient to the middle

What lies under the mask is never read as a number: not by a result, not by a gradient.
Operations combine masks by intersection (an entry of `a + b` exists where both do), and
reductions run over the entries that exist.

The data may have any storage; the mask has the same one. With sparse storage (`RowSparse`,
BCOO, BCSR) the entries that are not stored do not exist either. Entries of the mask are
kept as the booleans of the stored values alone, so that data and mask share their indices
by construction.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.validation import checked_array, checked_dtype, checked_scalar, refuse_scipy
from jmask._tensors.flax_state import register_in_flax
from jmask._tensors.mask_positions import booleans, on_dense, on_sparse
from jmask._tensors.methods import MaskedMethods, call
from jmask._tensors.misuse import NamesItsFunctions
from jmask._tensors.storage import (
    is_sparse,
    sampled,
    scattered,
    stored_values,
    stype,
    unique_positions,
    with_stored_values,
)


@jax.tree_util.register_pytree_with_keys_class
class MaskedTensor(MaskedMethods, metaclass=NamesItsFunctions):
    """A tensor with masked entries, on dense or sparse storage.

    Args:
        data: an array, `RowSparse`, BCOO or BCSR.
        mask: where entries are valid. For dense data a boolean array; it and the data
            broadcast against each other. For sparse data a boolean array of the shape of
            the stored values, a dense boolean array of the shape of the tensor, or None:
            everything stored is valid. A sparse boolean mask gives the result its storage:
            an entry is valid where the mask is True and the data, if sparse, stores it. (A
            BCOO or BCSR of booleans that JAX made int32, as `BCOO.fromdense` does, is one.)

    Equal positions of sparse data are one entry: the sum of those that are valid.

    Raises:
        TypeError: if the mask is not boolean, or the data no known storage.
        ValueError: if shapes do not broadcast or indices differ.

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

    storage: Any
    valid: Any

    def __init__(self, data: Any, mask: Any = None):
        if isinstance(data, MaskedTensor):
            raise TypeError(
                "`data` is a MaskedTensor already: use its `.data`, or masked_where()."
            )
        if isinstance(data, np.ma.MaskedArray):
            raise TypeError("`data` is a numpy.ma array: use jmask.from_numpy_ma(data).")
        register_in_flax(MaskedTensor)
        stype(data, "data")  # refuses what is no storage
        if isinstance(mask, bool | list | tuple):
            mask = np.asarray(mask)
        if not is_sparse(data) and is_sparse(mask):
            mask = unique_positions(booleans(mask))
            data = with_stored_values(mask, sampled(jnp.asarray(data), mask))
        if is_sparse(data):
            self.storage, self.valid = on_sparse(data, mask)
        else:
            self.storage, self.valid = on_dense(data, mask)

    # --- pytree: data and the booleans of its stored values -----------------------------

    def tree_flatten_with_keys(self) -> Any:
        keys = (jax.tree_util.GetAttrKey("data"), jax.tree_util.GetAttrKey("mask"))
        return tuple(zip(keys, (self.storage, self.valid), strict=True)), None

    def tree_flatten(self) -> Any:
        return (self.storage, self.valid), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "MaskedTensor":
        # JAX also builds nodes of shapes and axes; only surely wrong numbers are refused.
        register_in_flax(cls)
        node = object.__new__(cls)
        node.storage, node.valid = children
        if isinstance(node.valid, jax.Array) and node.valid.dtype != jnp.dtype(bool):
            raise TypeError(
                f"the mask of a MaskedTensor came back as {node.valid.dtype} numbers: "
                "something mapped arithmetic over its leaves. Put an optax transformation "
                "inside jmask.lazy(...), and use the functions of jmask.numpy."
            )
        return node

    # --- description --------------------------------------------------------------------

    @property
    def data(self) -> Any:
        """The data in its storage; what lies under the mask is arbitrary."""
        return self.storage

    @property
    def mask(self) -> Any:
        """The mask in the storage of the data: True where an entry is valid."""
        return with_stored_values(self.storage, self.valid)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.storage.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the data."""
        return self.storage.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of entries, valid or not."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def stype(self) -> str:
        """The storage: "default", "row_sparse", "coo" or "csr"."""
        return stype(self.storage)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a MaskedTensor without dimensions.")
        return self.shape[0]

    def __iter__(self) -> Iterator["MaskedTensor"]:
        return (self[i] for i in range(len(self)))

    def __float__(self) -> float:
        return float(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def _number(self) -> Any:
        if self.shape or is_sparse(self.storage):
            raise TypeError(f"a MaskedTensor of shape {self.shape} is not one number.")
        if not self.valid:
            raise ValueError("a masked entry is not a number: use to_tensor(fill_value).")
        return self.storage

    def __bool__(self) -> bool:
        raise TypeError(
            "a MaskedTensor has no truth value: use all() or any(), or to_tensor(fill)."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a MaskedTensor does not become an array by itself, because its masked entries "
            "have no values: use to_tensor(fill), or jmask.to_numpy_ma(x)."
        )

    # --- data out -----------------------------------------------------------------------

    def get_data(self) -> Any:
        """Return data in its storage, arbitrary where masked; no gradient flows to there."""
        values = stored_values(self.storage)
        kept = jnp.where(self.valid, values, jax.lax.stop_gradient(values))
        return with_stored_values(self.storage, kept)

    def get_mask(self) -> Any:
        """Return the mask in the storage of the data."""
        return self.mask

    def to_tensor(self, fill_value: Any) -> jax.Array:
        """Return the dense array with `fill_value` at every entry that is not valid.

        Example:
            >>> import jax.numpy as jnp, jmask
            >>> x = jmask.masked_tensor(jnp.array([1, 2]), jnp.array([True, False]))
            >>> x.to_tensor(7)
            Array([1, 7], dtype=int32)
        """
        values = stored_values(self.storage)
        fill = checked_scalar("fill_value", fill_value, values.dtype)
        values = jnp.where(self.valid, values, fill)
        return scattered(values, self.storage, fill) if is_sparse(self.storage) else values

    def to_dense(self) -> "MaskedTensor":
        """Return the same tensor on dense storage; entries that are not stored are masked."""
        if not is_sparse(self.storage):
            return self
        values = stored_values(self.storage)
        mask = scattered(self.valid, self.storage, False)
        return MaskedTensor(scattered(values, self.storage, 0), mask)

    def to_sparse(self, nse: int | None = None) -> "MaskedTensor":
        """Return the same tensor on coordinate (BCOO) storage: every valid entry is stored.

        Args:
            nse: the number of stored entries, static; the exact number by default, which
                needs a concrete mask.
        """
        return call("to_coo", self, nse)

    def to_sparse_csr(self, nse: int | None = None) -> "MaskedTensor":
        """Return the same tensor on compressed row (BCSR) storage; arguments as `to_sparse`."""
        return call("to_csr", self, nse)

    def to_row_sparse(self, nse: int | None = None) -> "MaskedTensor":
        """Return the same tensor on row-sparse storage: rows with a valid entry are stored.

        Args:
            nse: the number of stored rows, static; the exact number by default, which
                needs a concrete mask.
        """
        return call("to_row_sparse", self, nse)

    def astype(self, dtype: Any) -> "MaskedTensor":
        """Return the tensor with its data cast to `dtype`."""
        values = stored_values(self.storage).astype(checked_dtype("dtype", dtype))
        return self.with_values(values)

    def with_values(self, values: Any, valid: Any = None) -> "MaskedTensor":
        """Return the tensor with other stored values (and mask) at the same positions."""
        known = isinstance(values, jax.Array | jax.ShapeDtypeStruct)
        values = values if known else checked_array("values", values)
        if valid is None and values.shape != stored_values(self.storage).shape:
            raise ValueError(
                f"`values` of shape {values.shape} do not fit: the tensor stores values of "
                f"shape {stored_values(self.storage).shape}."
            )
        storage = with_stored_values(self.storage, values)
        valid = self.valid if valid is None else valid
        return joined(storage, valid)


def masked_tensor(data: Any, mask: Any = None) -> MaskedTensor:
    """Return a `MaskedTensor` of data and a mask, True = valid; see `MaskedTensor`.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.masked_tensor(jnp.arange(3), jnp.array([True, False, True]))
        MaskedTensor([0, --, 2], dtype=int32)
    """
    return MaskedTensor(data, mask)


def joined(storage: Any, valid: Any) -> MaskedTensor:
    """Return a masked tensor of storage and the booleans of its stored values, unchecked."""
    return MaskedTensor.tree_unflatten(None, (storage, valid))


def is_tensor(x: Any) -> bool:
    """Decide whether `x` is sparse or masked: one leaf of a tree."""
    return is_sparse(x) or isinstance(x, MaskedTensor)


def as_tensor(x: Any) -> Any:
    """Return `x` if it is sparse or masked, and otherwise the array."""
    refuse_scipy("x", x)
    return x if is_tensor(x) else jnp.asarray(x)


def as_masked_tensor(x: Any) -> MaskedTensor:
    """Return `x` as a `MaskedTensor`: itself, or with every (stored) entry valid.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> jmask.as_masked_tensor(jnp.arange(3))
        MaskedTensor([0, 1, 2], dtype=int32)
    """
    if isinstance(x, MaskedTensor):
        return x
    stype(x)  # refuses what is no storage
    return MaskedTensor(x)


def common_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the broadcast shape of operands.

    Raises:
        ValueError: naming all shapes if they do not broadcast.
    """
    try:
        return tuple(jnp.broadcast_shapes(*shapes))
    except ValueError:
        listed = ", ".join(map(str, shapes))
        raise ValueError(f"operands of shapes {listed} do not broadcast.") from None
