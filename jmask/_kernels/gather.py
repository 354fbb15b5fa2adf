"""`lax.gather` of whole rows, spelled so that XLA's CPU compiler vectorizes it.

A gather that is not fused with arithmetic is a copying loop, and LLVM unrolls a loop over up to
64 entries of a row before its vectorizer looks at it, unless there is much in it: rows of 32 to
64 then take two to four times as long as they have to (jaxlib 0.10.0 to 0.12.0, float32 and
bfloat16). Some more operations in the loop prevent that, which cost little as vectors: here
zeros are added to the bits of each entry, in ways that neither XLA nor LLVM sees through,

    (i * (i + 1)) & 1            of the id i: one of two neighbours is even

in a branch that is always taken: fusion does not look into branches, and would move them to
each of several users of the rows. The result is the same bit for bit. Rows of other widths,
other dtypes and other devices get the plain gather.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from jmask._base.lowering import lower, primitive
from jmask._base.shardings import (
    automatically,
    explicit_sharding,
    spec_of,
    typed_like,
    varying_alike,
    without_repetition,
)
from jmask._base.types import Argument, ArrayFunction, Scalar, Shaped
from jmask._kernels import tuning

# Integers of as many bytes as a floating entry has.
BITS = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


@dataclasses.dataclass(frozen=True)
class Gather:
    """The parameters of a `lax.gather`, hashable."""

    dimension_numbers: lax.GatherDimensionNumbers
    slice_sizes: tuple[int, ...]
    mode: lax.GatherScatterMode | str
    fill_value: Scalar | None = None
    indices_are_sorted: bool = False
    unique_indices: bool = False

    def __post_init__(self) -> None:
        # None is nan for floating rows; of two nans neither is equal to the other, and what is
        # compiled for the one would not be found for the other.
        if self.fill_value is not None and self.fill_value != self.fill_value:
            object.__setattr__(self, "fill_value", None)

    @classmethod
    def rows_of(
        cls,
        shape: tuple[int, ...],
        mode: lax.GatherScatterMode | str,
        batch: int = 1,
        *,
        fill_value: Scalar | None = None,
        indices_are_sorted: bool = False,
    ) -> "Gather":
        """Return the gather of whole rows of a table (V, *row) by indices (*batch, 1)."""
        row = shape[1:]
        offsets = tuple(range(batch, batch + len(row)))
        numbers = lax.GatherDimensionNumbers(offsets, (0,), (0,))
        return cls(numbers, (1, *row), mode, fill_value, indices_are_sorted)

    def __call__(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        """Gather, the fast way if there is one."""
        fast = functools.partial(_vectorized, self)
        return self._placed(
            fast if self.is_slow_copy(operand) else self._gather, operand, indices
        )

    def plain(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        """Return the one operation."""
        return self._placed(self._gather, operand, indices)

    def _placed(
        self, gather: ArrayFunction, operand: jax.Array, indices: jax.Array
    ) -> jax.Array:
        """Return the result of `gather`: rows that are where their indices are."""
        sharding = explicit_sharding(operand, indices)
        whole_rows = self.slice_sizes == (1, *operand.shape[1:])
        spread = spec_of(operand)[:1] + spec_of(indices)
        if sharding is None or not whole_rows or not any(spread):
            return gather(operand, indices)
        spec = without_repetition((*spec_of(indices)[:-1], *spec_of(operand)[1:]))
        return automatically(gather, operand, indices, like=sharding, spec=spec)

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

    def is_slow_copy(self, operand: Shaped) -> bool:
        """Decide whether it copies rows with one index each, which XLA copies one at a time."""
        return (
            jnp.issubdtype(operand.dtype, jnp.floating)
            and jnp.dtype(operand.dtype).itemsize in tuning.UNROLLED_BYTES
            and self.dimension_numbers.start_index_map == (0,)
            and not self.dimension_numbers.operand_batching_dims
            and math.prod(self.slice_sizes) in tuning.UNROLLED_WIDTHS
        )

    def on_bits(self, operand: jax.Array, indices: jax.Array) -> jax.Array:
        """Return the gather of the entries' bits, with zeros added to each."""
        bits = BITS[operand.dtype.itemsize]
        fill = np.asarray(np.nan if self.fill_value is None else self.fill_value, operand.dtype)
        gather = dataclasses.replace(self, fill_value=fill.view(bits).item())
        rows = gather.plain(lax.bitcast_convert_type(operand, bits), indices)
        entries = [d for d in range(rows.ndim) if d not in self.dimension_numbers.offset_dims]
        ids = indices[..., 0]
        zeros = (
            lax.broadcast_in_dim(zero.astype(bits), rows.shape, entries)
            for zero in (zero_of(ids), zero_of(ids - 1))
        )
        operations = -(-tuning.UNROLLED_OPERATIONS // math.prod(self.slice_sizes))
        more = operations - tuning.COPY_OPERATIONS
        # No two that follow each other are the same: LLVM would make one of them.
        ways = zip(
            itertools.cycle((lax.bitwise_or, lax.add, lax.bitwise_xor)), itertools.cycle(zeros)
        )
        for way, zero in itertools.islice(ways, more):
            rows = way(rows, zero)
        return lax.bitcast_convert_type(rows, operand.dtype)


def zero_of(number: jax.Array) -> jax.Array:
    """Return zeros that neither XLA nor LLVM knows to be zeros, of the shape of integers."""
    # lax, not operators of arrays: these take several times as long to trace.
    one = np.ones((), number.dtype)
    return lax.bitwise_and(lax.mul(number, lax.add(number, one)), one)


# --- the primitive --------------------------------------------------------------------------


def _by_definition(
    operand: jax.Array, indices: jax.Array, *, gather: Gather
) -> list[jax.Array]:
    return [gather.plain(operand, indices)]


def _on_a_cpu(operand: jax.Array, indices: jax.Array, *, gather: Gather) -> list[jax.Array]:
    if not indices.size:
        return [gather.plain(operand, indices)]

    def never_taken(operand: jax.Array, indices: jax.Array) -> jax.Array:
        rows = jax.eval_shape(gather.plain, operand, indices)
        return typed_like(jnp.zeros(rows.shape, rows.dtype), rows)

    is_taken = zero_of(indices.reshape(-1)[0]) == 0
    return [lax.cond(is_taken, gather.on_bits, never_taken, operand, indices)]


def _shapes(operand: ShapedArray, indices: Shaped, *, gather: Gather) -> list[Shaped]:
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (operand, indices))
    rows = jax.eval_shape(gather.plain, *shapes)
    return [operand.update(shape=rows.shape, weak_type=False)]


SLOW_COPY = primitive("jmask_gather", _by_definition, _shapes)
"""A gather that `is_slow_copy`: the parameter `gather` of an operand and indices."""
lower(SLOW_COPY, _on_a_cpu, platform="cpu")


def slow_copy_of(params: Mapping[str, Argument]) -> Gather:
    """Return the gather that an equation of `SLOW_COPY` with these parameters is."""
    gather: Gather = params["gather"]
    return gather


# Outside jit it is compiled for the platform, as in a program.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _vectorized(gather: Gather, operand: jax.Array, indices: jax.Array) -> jax.Array:
    operand, indices = varying_alike(operand, indices)
    return SLOW_COPY.bind(operand, indices, gather=gather)[0]
