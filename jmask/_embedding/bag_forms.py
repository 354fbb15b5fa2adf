"""Bags: the entries that `embedding_bag` makes one row of.

    ids       [[4, 1],        ids       [4, 1, 7, 2]
               [7, 2]]        segments  [0, 0, 1, 1]
    `EqualBags`                   `RaggedBags`

The two forms hold the same bags. Both have `sum`, `max` and `min` of an array of entries
(*entries, ...) over each bag, giving (*bags, ...), and `spread`, which brings what belongs
to a bag back to its entries. The combiners are written once, against these four.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.shapes import trailing
from jmask._kernels.rows import add_rows, gather_rows


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=(), meta_fields=("axis", "length")
)
@dataclasses.dataclass(frozen=True)
class EqualBags:
    """Bags that are the slices of an array along one axis; `spread` gives size 1 there.

    Attributes:
        axis: the last one of the ids.
        length: how many entries a bag has.
    """

    axis: int
    length: int

    @property
    def entry_dimensions(self) -> int:
        """How many dimensions the ids have."""
        return self.axis + 1

    def shape(self, entries: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the bags of ids of this shape."""
        return entries[: self.axis]

    def sum(self, x: jax.Array) -> jax.Array:
        return jnp.sum(x, self.axis, dtype=x.dtype)

    def max(self, x: jax.Array, initial: Any) -> jax.Array:
        return jnp.max(x, self.axis, initial=initial)

    def min(self, x: jax.Array, initial: Any) -> jax.Array:
        return jnp.min(x, self.axis, initial=initial)

    def spread(self, x: jax.Array) -> jax.Array:
        return jnp.expand_dims(x, self.axis)

    def numbers(self, ndim: int) -> jax.Array:
        """The entries of a bag, numbered; of `ndim` dimensions."""
        shape = [self.length if axis == self.axis else 1 for axis in range(ndim)]
        return lax.iota(jnp.int32, self.length).reshape(shape)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("of_entry",), meta_fields=("number",)
)
@dataclasses.dataclass(frozen=True)
class RaggedBags:
    """Bags that are the entries with equal numbers.

    Attributes:
        of_entry (n,): the bag of each entry; `number` where it is in none.
        number: how many bags there are.
    """

    of_entry: jax.Array
    number: int

    @property
    def entry_dimensions(self) -> int:
        """How many dimensions the ids have."""
        return 1

    def without(self, absent: Any) -> "RaggedBags":
        """The bags without the entries that are absent (n,), None for no one."""
        if absent is None:
            return self
        return RaggedBags(jnp.where(absent, self.number, self.of_entry), self.number)

    def shape(self, entries: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the bags."""
        return (self.number,)

    def sum(self, x: jax.Array) -> jax.Array:
        if self.number == 0:
            # A scatter into nothing is dropped, and the entries would have no gradient.
            return lax.slice_in_dim(x, 0, 0)
        zeros = jnp.zeros((self.number, *x.shape[1:]), x.dtype)
        return add_rows(zeros, self.of_entry, x, coalesced=False)

    def max(self, x: jax.Array, initial: Any) -> jax.Array:
        start = jnp.full((self.number, *x.shape[1:]), initial, x.dtype)
        return start.at[self.of_entry].max(x, mode="drop")

    def min(self, x: jax.Array, initial: Any) -> jax.Array:
        start = jnp.full((self.number, *x.shape[1:]), initial, x.dtype)
        return start.at[self.of_entry].min(x, mode="drop")

    def spread(self, x: jax.Array) -> jax.Array:
        return gather_rows(x, self.of_entry)

    def numbers(self, ndim: int) -> jax.Array:
        """The entries of all bags, numbered; of `ndim` dimensions."""
        count = self.of_entry.shape[0]
        return trailing(lax.iota(jnp.int32, count), ndim)


Bags = EqualBags | RaggedBags


def check_offsets(offsets: np.ndarray, count: int) -> None:
    """Refuse offsets that are not ascending from 0 to `count` at most.

    Raises:
        ValueError: with the first that is not.
    """
    if offsets.size and offsets[0] != 0:
        raise ValueError(f"`offsets` must begin with 0, got {offsets[0]}.")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falls.size:
        first, second = falls[0], falls[0] + 1
        raise ValueError(
            f"`offsets` must be ascending, got {offsets[first]} at {first} and "
            f"{offsets[second]} at {second}."
        )
    if offsets.size and offsets[-1] > count:
        raise ValueError(
            f"`offsets` end with {offsets[-1]}, beyond the {count} entries of `ids`."
        )


def check_weights(weights: Any, ids: Any) -> None:
    """Refuse weights that are no floating numbers, one for each id.

    Raises:
        TypeError, ValueError: with their dtype or shape.
    """
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(f"`weights` must be floating, got {weights.dtype}.")
    if weights.shape != ids.shape:
        raise ValueError(
            f"`weights` of shape {weights.shape} must have the shape of `ids`, {ids.shape}."
        )
