"""The coordinates that a gradient check moves: real numbers, for the entries of its inputs.

    x = BCOO of [[-, 3],     stored values   3      4      0 (padding)
                 [4, -]]     entries         (0,1)  (1,0)  none
                             unspecified     (0,0)  (1,1)

| kind        | coordinates of                       | derivative along them                   |
|-------------|--------------------------------------|-----------------------------------------|
| specified   | a stored value that is an entry      | that in the stored value                |
| unspecified | an entry that is not stored          | that in the placeholder: 0 in           |
|             |                                      | masked semantics, any in plain ones     |
| hidden      | padding, and values under a mask     | 0, always                               |

An input's coordinates are a vector: those of its stored values, then the unspecified ones. An
entry stored twice is two specified coordinates. A complex number is two coordinates, its real
and its imaginary part.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.sparse import BCOO, BCSR
from jax.typing import DTypeLike

from jmask._base.types import DType, HostArray, Shape, Tensor, TensorLike
from jmask._tensors.masked_tensor import MaskedTensor, is_tensor, joined
from jmask._tensors.row_sparse import RowSparse
from jmask._tensors.specified import (
    placeholder_of,
    values_of,
    with_values_of,
    without_placeholder,
)
from jmask._tensors.storage import is_entry, is_sparse, sampled

Parts = tuple[jax.Array, jax.Array | None]
"""What is differentiated of an input: its stored values, and its placeholder if it has one."""


def wide(dtype: DTypeLike) -> DType:
    """float64 or complex128, whichever holds the numbers of this floating dtype."""
    return jnp.dtype(jnp.complex128 if parts_of(dtype) == 2 else jnp.float64)


def is_differentiable(x: object) -> bool:
    """Decide whether `x` is a tensor, array or number of floating or complex dtype."""
    if is_tensor(x):
        return bool(jnp.issubdtype(values_of(x).dtype, jnp.inexact))
    numbers = isinstance(x, jax.Array | np.ndarray | np.generic | float | complex)
    return numbers and bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def in_double_precision(x: TensorLike) -> Tensor:
    """Return a differentiable leaf in float64 or complex128."""
    values = jnp.asarray(values_of(x))
    return with_values_of(x, values.astype(wide(values.dtype)))


@dataclasses.dataclass(frozen=True)
class Input:
    """One differentiable leaf of the arguments, in double precision; `path` is in messages."""

    path: str
    tensor: TensorLike

    @functools.cached_property
    def positions(self) -> HostArray:
        """Return for each stored value the number of its entry, -1 for none."""
        return stored_positions(self.tensor)

    @functools.cached_property
    def values(self) -> HostArray:
        return np.asarray(values_of(self.tensor)).ravel()

    @functools.cached_property
    def specified(self) -> HostArray:
        """Return the numbers of the stored values that are entries."""
        return np.flatnonzero(self.positions.ravel() >= 0)

    @functools.cached_property
    def unspecified(self) -> HostArray:
        """Return the numbers of the entries that are not stored."""
        if not is_tensor(self.tensor):
            return np.zeros(0, np.int64)
        missing = np.ones(math.prod(self.tensor.shape), bool)
        missing[self.positions.ravel()[self.specified]] = False
        return np.flatnonzero(missing)

    @functools.cached_property
    def kinds(self) -> HostArray:
        stored = np.where(self.positions.ravel() >= 0, "specified", "hidden")
        others = np.full(len(self.unspecified), "unspecified")
        return np.repeat(np.concatenate([stored, others]), self.parts)

    @property
    def scales(self) -> HostArray:
        """Return the step along each coordinate: the size of the entry, but at least 1."""
        scales = np.ones(self.values.size + len(self.unspecified))
        scales[self.specified] = np.maximum(1, np.abs(self.values[self.specified]))
        return np.repeat(scales, self.parts)

    @property
    def parts(self) -> int:
        return parts_of(self.values.dtype)

    def numbers(self, steps: HostArray) -> tuple[HostArray, HostArray]:
        """Return steps along all coordinates as numbers, of stored values and of others."""
        numbers = steps.view(wide(self.values.dtype))
        return numbers[: self.values.size], numbers[self.values.size :]

    # --- points near the input ----------------------------------------------------------

    def moved(self, steps: HostArray) -> Tensor:
        """Return the tensor with `steps` added to its specified values."""
        values = self.values.copy()
        values[self.specified] += self.numbers(steps)[0][self.specified]
        return with_values_of(self.tensor, jnp.asarray(values.reshape(self.positions.shape)))

    def full(self, steps: HostArray) -> Tensor:
        """Return the tensor with every entry specified, and `steps` added."""
        stored, others = self.numbers(steps)
        dense = np.zeros(math.prod(self.tensor.shape), self.values.dtype)
        at = self.positions.ravel()[self.specified]
        np.add.at(dense, at, (self.values + stored)[self.specified])
        dense[self.unspecified] += others
        return fully_specified(self.tensor, dense.reshape(self.tensor.shape))

    # --- tangents and cotangents --------------------------------------------------------

    def tangent(self, steps: HostArray, with_placeholder: bool) -> Parts:
        """Return the tangent of `primal` with `steps` along all coordinates."""
        stored, others = self.numbers(steps)
        value_steps = jnp.asarray(stored.reshape(self.positions.shape))
        if not with_placeholder or not is_tensor(self.tensor):
            return value_steps, None
        placeholder = np.zeros(math.prod(self.tensor.shape), self.values.dtype)
        placeholder[self.unspecified] = others
        return value_steps, jnp.asarray(placeholder.reshape(self.tensor.shape))

    def derivatives(self, cotangent: Parts) -> HostArray:
        """Return the derivatives along all coordinates, from those in `primal`."""
        values, placeholder = cotangent
        others = np.zeros(len(self.unspecified))
        if placeholder is not None:
            others = np.ravel(placeholder)[self.unspecified]
        # JAX pairs a cotangent c with a tangent t as the real part of c * t.
        return reals_of(np.conj(np.concatenate([np.ravel(values), others])))

    # --- names --------------------------------------------------------------------------

    def described(self, coordinate: int) -> str:
        kind, (number, part) = self.kinds[coordinate], divmod(coordinate, self.parts)
        what, shape = part_name(part, self.parts), tuple(self.tensor.shape)
        if kind == "unspecified":
            at = self.unspecified[number - self.values.size]
            return f"{what}{entry(at, shape)}, which is not specified"
        stored = entry(number, self.positions.shape)
        if kind == "hidden":
            place = "under the mask" if isinstance(self.tensor, MaskedTensor) else "padding"
            return f"{what}stored value{stored.removeprefix('entry')}, which is {place}"
        position = self.positions.ravel()[number]
        several = np.sum(self.positions == position) > 1
        which = stored.replace("entry", ", stored value") if several else ""
        return f"{what}{entry(position, shape)}{which}"


KINDS = ("specified", "unspecified", "hidden")


def entry(number: int, shape: Shape) -> str:
    """Return the index of an entry as messages print it."""
    return f"entry {tuple(map(int, np.unravel_index(number, shape)))}"


def parts_of(dtype: DTypeLike) -> int:
    """Return how many coordinates a number has."""
    return 2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1


def part_name(part: int, parts: int) -> str:
    """Return which part of a number a coordinate is, as messages print it."""
    return ("real part of ", "imaginary part of ")[part] if parts == 2 else ""


def reals_of(numbers: HostArray) -> HostArray:
    """Return numbers (n,) in double precision as real coordinates (n * parts,).

    `reals.view(numbers.dtype)` is the inverse.
    """
    return np.ascontiguousarray(numbers).view(np.float64)


def random_reals(rng: np.random.Generator, shape: Shape) -> HostArray:
    """Numbers of random sign whose sizes are between 0.5 and 1.5: none is lost in a sum."""
    return rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.5, shape)


def primal(x: TensorLike, with_placeholder: bool) -> Parts:
    """Return what is differentiated of an input."""
    if not (with_placeholder and is_tensor(x)):
        return values_of(x), None
    placeholder = placeholder_of(x)
    zeros = jnp.zeros(tuple(x.shape), x.dtype)
    return values_of(x), zeros if placeholder is None else placeholder


def stored_positions(x: TensorLike) -> HostArray:
    """Return for each stored value the row-major number of its entry; -1 where it is none.

    Raises:
        ValueError: if one stored value stands for several entries.
    """
    x = without_placeholder(x)
    if isinstance(x, MaskedTensor):
        return np.where(np.asarray(x.valid), stored_positions(x.storage), -1)
    stored = np.shape(values_of(x))
    if getattr(x, "n_batch", 0):
        batch = x.shape[: x.n_batch]
        if stored[: x.n_batch] != batch:
            raise ValueError(
                f"a {type(x).__name__} of shape {x.shape} stores one value for several "
                f"entries: its data of shape {stored} broadcasts over batch dimensions {batch}."
            )
        # Without batch dimensions the stored values come in the same order.
        x = x.to_bcoo() if isinstance(x, BCSR) else x
        indices = jnp.broadcast_to(x.indices, (*batch, *x.indices.shape[x.n_batch :]))
        x = BCOO((jnp.zeros(stored), indices), shape=x.shape).update_layout(n_batch=0)
    numbers = np.arange(math.prod(x.shape)).reshape(x.shape)
    at_entries = np.where(is_entry(x), sampled(jnp.asarray(numbers), x), -1)
    return at_entries.reshape(stored)


def fully_specified(x: TensorLike, dense: HostArray) -> Tensor:
    """Return a tensor of the kind of `x` that stores every entry of `dense`."""
    x = without_placeholder(x)
    if isinstance(x, MaskedTensor):
        storage = fully_specified(x.storage, dense)
        return joined(storage, jnp.ones(values_of(storage).shape, bool))
    if not is_sparse(x):
        return jnp.asarray(dense)
    if isinstance(x, RowSparse):
        return RowSparse(np.arange(x.shape[0]), jnp.asarray(dense), x.shape, coalesced=True)
    # Ones, which are all stored: `fromdense` leaves zeros out.
    full = type(x).fromdense(jnp.ones(x.shape), n_batch=x.n_batch, n_dense=x.n_dense)
    values, *indices = jax.tree.leaves(full)
    arrays = (jnp.asarray(dense.reshape(values.shape)), *indices)
    return type(x)(arrays, shape=x.shape, indices_sorted=True, unique_indices=True)
