"""`lax.gather` of whole rows, spelled so that XLA's CPU compiler vectorizes it.

A gather that is not fused with arithmetic is a copying loop, and LLVM makes scalar moves of a
loop over the entries of a row before its vectorizer looks at it: rows of 64 then take three
to four times as long as they have to, rows of 24 to 40 two to three times as long (jaxlib
0.10.0 to 0.12.0, float32 and bfloat16). Of 64 entries one more operation in the loop prevents
that. Here it is the bitwise `or` of each entry with a zero,

    z = (i * (i + 1)) & 1            of the id i: one of two neighbours is even

which neither XLA nor LLVM knows to be one. Of 24, 32 and 40 entries a row is gathered as
windows of 8, for which scalar moves become one vector:

    ids [5, 2], rows of 24           windows [15, 16, 17, 6, 7, 8] of 8

Both happen in a branch that is always taken: fusion does not look into branches, and would
move the `or` to each of several users of the rows, and the loop over windows into one over
rows. The result is the same bit for bit. Rows of other widths, other dtypes and other devices
get the plain gather; rows of 48 and 56 as well, whose steps take no less time in windows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._base.array_types import (
    automatically,
    explicit_sharding,
    spec_of,
    typed_like,
    without_repetition,
)
from jmask._base.lowering import is_on_one_device

_UNROLLED = 64
_WINDOW = 8
_IN_WINDOWS = (24, 32, 40)
_MODES = tuple(map(lax.GatherScatterMode.from_any, ("clip", "fill", "promise_in_bounds")))
_COPIED_SLOWLY = (2, 4)  # bytes of an entry
# Integers of as many bytes as a floating entry has.
BITS = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


@dataclasses.dataclass(frozen=True)
class Gather:
    """The parameters of a `lax.gather`, hashable."""

    dimension_numbers: lax.GatherDimensionNumbers
    slice_sizes: tuple[int, ...]
    mode: Any
    fill_value: Any = None
    indices_are_sorted: bool = False
    unique_indices: bool = False

    def __post_init__(self) -> None:
        # None is nan for floating rows; of two nans neither is equal to the other, and what is
        # compiled for the one would not be found for the other.
        if self.fill_value is not None and self.fill_value != self.fill_value:
            object.__setattr__(self, "fill_value", None)

    @classmethod
    def of_rows(
        cls, shape: tuple[int, ...], mode: Any, batch: int = 1, **settings: Any
    ) -> "Gather":
        """The gather of whole rows of a table (V, *row) by indices (*batch, 1)."""
        row = shape[1:]
        offsets = tuple(range(batch, batch + len(row)))
        numbers = lax.GatherDimensionNumbers(offsets, (0,), (0,))
        return cls(numbers, (1, *row), mode, **settings)

    def __call__(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        """Gather, the fast way if there is one."""
        return self._placed(self._fastest, operand, indices)

    def plain(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        """The one operation."""
        return self._placed(self._gather, operand, indices)

    def _placed(
        self, gather: Callable[..., jax.Array], operand: jax.Array, indices: jax.Array
    ) -> jax.Array:
        """The result of `gather`: rows that are where their indices are."""
        sharding = explicit_sharding(operand, indices)
        whole_rows = self.slice_sizes == (1, *operand.shape[1:])
        spread = spec_of(operand)[:1] + spec_of(indices)
        if sharding is None or not whole_rows or not any(spread):
            return gather(operand, indices)
        spec = without_repetition((*spec_of(indices)[:-1], *spec_of(operand)[1:]))
        return automatically(gather, operand, indices, like=sharding, spec=spec)

    def _fastest(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        if not self.is_slow_copy(operand):
            return self.plain(operand, indices)
        return _vectorized(self, operand, indices)

    def _gather(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        return lax.gather(
            operand,
            indices,
            self.dimension_numbers,
            self.slice_sizes,
            unique_indices=self.unique_indices,
            indices_are_sorted=self.indices_are_sorted,
            mode=self.mode,
            fill_value=self.fill_value,
        )

    def is_slow_copy(self, operand: Any) -> bool:
        """Whether it copies rows that XLA copies one by one, by one index each."""
        return (
            jnp.issubdtype(operand.dtype, jnp.floating)
            and jnp.dtype(operand.dtype).itemsize in _COPIED_SLOWLY
            and self.dimension_numbers.start_index_map == (0,)
            and not self.dimension_numbers.operand_batching_dims
            and (math.prod(self.slice_sizes) == _UNROLLED or self._has_windows(operand.shape))
        )

    def _has_windows(self, shape: tuple[int, ...]) -> bool:
        """Whether it gathers whole rows, of a width that windows are faster for."""
        return (
            math.prod(self.slice_sizes) in _IN_WINDOWS
            and self.slice_sizes == (1, *shape[1:])
            and self.dimension_numbers.collapsed_slice_dims == (0,)
            and self.mode in _MODES
            and 0 < math.prod(shape) // _WINDOW <= np.iinfo(np.int32).max
        )

    def vectorized(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        """The gather in a branch of its own."""
        if not indices.size:
            return self.plain(operand, indices)
        if math.prod(self.slice_sizes) == _UNROLLED:
            return lax.cond(_always(indices), self.on_bits, self._zeros, operand, indices)
        if self._suits_windows(operand, indices):
            return self._of_windows(operand, indices)
        return self.plain(operand, indices)

    def _zeros(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        """What the branch that is never taken returns: the least there is to compile."""
        rows = jax.eval_shape(self.plain, operand, indices)
        return typed_like(jnp.zeros(rows.shape, rows.dtype), rows)

    def _suits_windows(self, operand: jax.Array, indices: jax.Array) -> bool:
        """Whether ids count windows without overflow, and rows come out with entries last."""
        return (
            indices.dtype in (jnp.int32, jnp.int64)
            and self.dimension_numbers.offset_dims[0] == indices.ndim - 1
            and explicit_sharding(operand, indices) is None
        )

    def _of_windows(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        """The gather of each row as its windows, on one device.

        Columns that are spread over several devices would all be collected to make windows.
        """
        count = math.prod(operand.shape[1:]) // _WINDOW
        windows = operand.reshape(-1, _WINDOW)
        ids = self._inside(indices, operand.shape[0])
        places = ids * count + lax.broadcasted_iota(
            jnp.int32, (*ids.shape[:-1], count), ids.ndim - 1
        )
        places = places.reshape(-1, 1)
        gather = Gather.of_rows(windows.shape, self.mode, fill_value=self.fill_value)
        copied = lax.cond(
            _always(indices) & is_on_one_device(),
            lambda windows, places, *_: gather.plain(windows, places),
            lambda _, places, *rows: self.plain(*rows).reshape(places.shape[0], _WINDOW),
            *(windows, places, operand, indices),
        )
        return copied.reshape(*indices.shape[:-1], *operand.shape[1:])

    def _inside(self, indices: jax.Array, rows: int) -> jax.Array:
        """Those of no row as its mode has them: of the nearest one, or -1."""
        nearest = jnp.clip(indices, 0, rows - 1)
        if self.mode == lax.GatherScatterMode.FILL_OR_DROP:
            return jnp.where(nearest == indices, nearest, -1).astype(jnp.int32)
        clips = self.mode == lax.GatherScatterMode.CLIP
        return (nearest if clips else indices).astype(jnp.int32)

    def on_bits(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        """The gather of the entries' bits, each with `or` of zero."""
        bits = BITS[operand.dtype.itemsize]
        fill = np.asarray(np.nan if self.fill_value is None else self.fill_value, operand.dtype)
        gather = dataclasses.replace(self, fill_value=fill.view(bits).item())
        rows = gather.plain(lax.bitcast_convert_type(operand, bits), indices)
        entries = [d for d in range(rows.ndim) if d not in self.dimension_numbers.offset_dims]
        zero = zero_of(indices[..., 0]).astype(bits)
        rows |= lax.broadcast_in_dim(zero, rows.shape, entries)
        return lax.bitcast_convert_type(rows, operand.dtype)


def zero_of(number: jax.Array) -> jax.Array:
    """Zeros of the shape of integers, which neither XLA nor LLVM knows to be zeros."""
    return (number * (number + 1)) & 1


def _always(numbers: jax.Array) -> jax.Array:
    """A True that is not known to be one."""
    return zero_of(numbers.reshape(-1)[0]) == 0


# Differentiated by hand: a bitcast has no derivative.
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _vectorized(gather: Gather, operand: jax.Array, indices: jax.Array) -> jax.Array:
    return _on_this_platform(gather, operand, indices)


# A method is another function each time: outside jit its branches would be compiled each time.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _on_this_platform(gather: Gather, operand: jax.Array, indices: jax.Array) -> jax.Array:
    return lax.platform_dependent(operand, indices, cpu=gather.vectorized, default=gather.plain)


@_vectorized.defjvp
def _derivative(gather: Gather, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    operand, indices = primals
    # Entries that are filled in do not depend on the operand.
    of_tangent = dataclasses.replace(gather, fill_value=0)
    return gather(operand, indices), of_tangent.plain(tangents[0], indices)
