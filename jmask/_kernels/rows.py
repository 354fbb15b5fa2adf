"""Reading and writing a few rows of a large array: the only gathers and scatters in jmask.

With `ids` in canonical form (padding = number of rows) and T of shape (V, *row):

    gather_rows(T, ids)      (n, *row): T[ids]; padding reads some valid row
    set_rows(T, ids, rows)   T with T[ids] = rows; padding writes nothing
    add_rows(T, ids, rows)   T with T[ids] += rows; padding writes nothing

A padding id reads an existing row, not zeros: arithmetic on what it reads is then the
arithmetic of an ordinary row, so it cannot raise a division by zero that no row has.
"""

import dataclasses
import functools
import itertools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from jmask._base.array_types import is_complex, is_known, real_dtype
from jmask._base.forms import parameter
from jmask._base.lowering import lower, primitive
from jmask._base.row_ids import Order, widen
from jmask._base.shardings import Shards, automatically, spec_at, spec_of, typed_like
from jmask._base.types import (
    ArrayFunction,
    IdArray,
    IdVector,
    RowArray,
    Scalar,
    Shaped,
    TableArray,
)
from jmask._kernels import tuning

# --- gathers ------------------------------------------------------------------------------
#
# `lax.gather` of whole rows, spelled so that XLA's CPU compiler vectorizes it.
#
# A gather that is not fused with arithmetic is a copying loop, and LLVM unrolls a loop over up
# to 64 entries of a row before its vectorizer looks at it, unless there is much in it: rows of
# 32 to 64 then take two to four times as long as they have to (jaxlib 0.10.0 to 0.12.0, float32
# and bfloat16). Some more operations in the loop prevent that, which cost little as vectors:
# here zeros are added to the bits of each entry, in ways that XLA and LLVM do not see through,
#
#     (i * (i + 1)) & 1            of the id i: one of two neighbours is even
#
# in a branch that is always taken: fusion does not look into branches, and would move them to
# each of several users of the rows. The result is the same bit for bit. Rows of other widths,
# other dtypes and other devices get the plain gather.

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
        # None means nan for floating rows. A nan is unequal to itself: JAX would not find what
        # it has compiled for it.
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

    @classmethod
    def of(cls, eqn: JaxprEqn) -> "Gather":
        """Return the gather that an equation is."""
        if eqn.primitive is SLOW_COPY:
            (gather,) = eqn.params.values()
            return gather
        return cls(**{f.name: parameter(eqn, f.name) for f in dataclasses.fields(cls)})

    def __call__(
        self, operand: jax.Array, indices: jax.Array, *, plain: bool = False
    ) -> jax.Array:
        """Gather, the fast way if there is one; or by the one operation, if `plain`.

        Rows lie where their indices do.
        """
        gather: ArrayFunction = self._gather
        if not plain and self.is_slow_copy(operand):
            gather = functools.partial(_vectorized, self)
        count, spec = indices.shape[-1], spec_of(indices)
        first, columns = spec_of(operand)[:count], spec_of(operand)[count:]
        are_rows = self.slice_sizes == (*(1,) * count, *operand.shape[count:])
        if not are_rows or not any((*first, *spec)):
            return gather(operand, indices)
        return automatically(gather, operand, indices, spec=spec_at(spec[:-1], columns))

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
        """Decide whether it copies rows of the widths that LLVM unrolls, by one index each."""
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
        rows = gather(lax.bitcast_convert_type(operand, bits), indices)
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


def in_branch(
    function: ArrayFunction, like: Shaped, ids: IdArray, *operands: jax.Array
) -> jax.Array:
    """Return function(*operands) in a branch that is always taken, into which no fusion looks.

    Args:
        like: the shape of the result.
        ids: integers that XLA does not know, one at least.
    """
    never_taken = lambda *_: typed_like(jnp.zeros(like.shape, like.dtype), like)
    result: jax.Array
    result = lax.cond(zero_of(ids.reshape(-1)[0]) == 0, function, never_taken, *operands)
    return result


# --- the primitive --------------------------------------------------------------------------


def _on_a_cpu(operand: jax.Array, indices: jax.Array, *, gather: Gather) -> list[jax.Array]:
    plain = functools.partial(gather, plain=True)
    if not indices.size:
        return [plain(operand, indices)]
    like = jax.eval_shape(plain, operand, indices)
    return [in_branch(gather.on_bits, like, indices, operand, indices)]


def _shapes(operand: ShapedArray, indices: Shaped, *, gather: Gather) -> list[Shaped]:
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (operand, indices))
    rows = jax.eval_shape(functools.partial(gather, plain=True), *shapes)
    return [operand.update(shape=rows.shape, weak_type=False)]


SLOW_COPY = primitive(
    "jmask_gather", lambda *arrays, gather: [gather(*arrays, plain=True)], shapes=_shapes
)
"""A gather that `is_slow_copy`, which is its one parameter, of an operand and indices."""
lower(SLOW_COPY, _on_a_cpu, platform="cpu")


# Outside jit it is compiled for the platform, as in a program.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _vectorized(gather: Gather, operand: jax.Array, indices: jax.Array) -> jax.Array:
    return SLOW_COPY.bind(operand, indices, gather=gather)[0]


# --- rows read ----------------------------------------------------------------------------

_CLIP = lax.GatherScatterMode.CLIP
_DROP = lax.GatherScatterMode.FILL_OR_DROP


def gather_rows(table: TableArray, ids: IdVector, *, coalesced: bool = False) -> RowArray:
    """Gather `table[ids]` (n, *row); padding ids read an arbitrary existing row.

    `coalesced` says that ids are sorted, and unique but for padding.
    """
    if table.shape[0] == 0:
        return jnp.zeros((ids.shape[0], *table.shape[1:]), table.dtype)
    gather = Gather.rows_of(table.shape, _CLIP, indices_are_sorted=coalesced)
    return gather(table, ids[:, None])


def rows_or_fill(
    table: TableArray, ids: IdArray, fill: Scalar | None = 0, *, plain: bool = False
) -> jax.Array:
    """Gather `table[ids]` (*ids, *row); padding ids read `fill`, None for nan, and no row.

    The table must have a row. Padding has no derivative. If `plain`, it is one operation.
    """
    # Not `table.at[ids].get(...)`: like `jnp.where`, it drops what has no entries, and JAX then
    # gives a table that is looked up for nothing a gradient of dense zeros.
    gather = Gather.rows_of(table.shape, _DROP, ids.ndim, fill_value=fill)
    return gather(table, ids[..., None], plain=plain)


def ids_after_reading(ids: IdVector, rows: RowArray) -> IdVector:
    """Make ids (n,) depend on rows (n, *row) that were read, or on a scalar made of them.

    XLA orders a read before a write in place only where the write depends on the read.
    Otherwise it copies the table and reads from the copy.
    """
    shards = Shards.of(ids, rows)
    if shards.mesh is not None:
        return _ordered_on_shards(shards, ids, rows)
    read = zero_after_reading(rows)
    return ids if read is None else plus_zero(ids, read)


# In one program, so that outside of jit it is compiled once.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _ordered_on_shards(shards: Shards, ids: IdVector, rows: RowArray) -> IdVector:
    """Return ids as `ids_after_reading`, by what each device has of their rows."""
    columns = spec_of(rows)[1:]
    (batch,) = dataclasses.replace(shards, columns=columns).spec_of_ids(ids)
    specs = [(batch,), (batch, *columns) if rows.ndim else ()]
    ordered: jax.Array = shards.run(ids_after_reading, ids, rows, specs=specs, out=(batch,))
    return ordered


def zero_after_reading(rows: RowArray) -> jax.Array | None:
    """Return integer zeros (n,) that depend on rows (n, *row), as far as XLA can tell.

    None if there are no rows, or no integers of their size.
    """
    bits = BITS.get(real_dtype(rows.dtype).itemsize)
    if bits is None or not rows.size:
        return None
    entry = lax.stop_gradient(rows)
    entry = entry.reshape(rows.shape[0], -1)[:, 0] if rows.ndim else entry
    entry = entry.real if is_complex(entry) else entry
    return zero_of(lax.bitcast_convert_type(entry, bits))


def plus_zero(ids: jax.Array, zero: jax.Array) -> jax.Array:
    """Add integer zeros, one for each id or one for all, on which the ids then depend."""
    return lax.add(ids, lax.convert_element_type(zero, ids.dtype))


def split_rows(
    ids: IdVector, rows: RowArray, each: int, count: int, row: tuple[int, ...]
) -> tuple[IdVector, RowArray]:
    """Split each row into `each` rows of shape `row`, of `count` in all, with canonical ids."""
    first = widen(ids, count)
    if each != 1:
        first = first[:, None] * each + np.arange(each, dtype=first.dtype)[None]
        first = jnp.minimum(first, count).reshape(-1)
    return first, rows.reshape(first.shape[0], *row)


def entries_of(ids: IdVector) -> jax.Array:
    """Number the entries (n,) of ids, int32."""
    return lax.iota(jnp.int32, ids.shape[0])


def sorted_with(ids: IdVector, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sort ids (n,) and carry numbers (n,) along; equal ids may have them in any order."""
    ordered, moved = lax.sort((ids, x), num_keys=1, is_stable=False)
    return ordered, moved


def set_rows(
    table: TableArray, ids: IdVector, rows: RowArray, order: Order = "any"
) -> TableArray:
    """Return `table` with `table[ids] = rows`, in place when its buffer may be reused."""
    return _write("set", table, ids, rows, order)


def add_rows(
    table: TableArray, ids: IdVector, rows: RowArray, order: Order = "any"
) -> TableArray:
    """Return `table` with `table[ids] += rows`, duplicates summed, in place when possible."""
    return _write("add", table, ids, rows, order)


Kind = Literal["set", "add"]
_SCATTERS = {"set": lax.scatter, "add": lax.scatter_add}


def _write(
    kind: Kind, table: TableArray, ids: IdVector, rows: RowArray, order: Order
) -> TableArray:
    # Nothing is written. Adding no rows is kept: a gradient goes through it to `rows`.
    if table.shape[0] == 0 or (kind == "set" and 0 in ids.shape):
        return table
    shards = Shards.of(table, ids, rows)
    rows = rows.astype(table.dtype)
    if shards.mesh is not None:
        of_rows = spec_of(rows)
        # Otherwise JAX infers the sharding of the result.
        if shards.rows or of_rows[0] or spec_of(ids)[0] or of_rows[1:] != shards.columns:
            return _on_shards(shards, kind, order, table, ids, rows)
    return _written_here(kind, table, ids, rows, order)


def _written_here(
    kind: Kind, table: TableArray, ids: IdVector, rows: RowArray, order: Order
) -> TableArray:
    if order == "any" or not ids.shape[0]:
        return scattered(table, ids, rows, kind, order)
    written: jax.Array
    (written,) = WRITE.bind(table, ids, rows, kind=kind, order=order)
    return written


# In one program, so that outside of jit it is compiled once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _on_shards(
    shards: Shards,
    kind: Kind | Literal["read"],
    order: Order,
    table: TableArray,
    ids: IdVector,
    *rows: RowArray,
) -> jax.Array:
    """Return the table with rows written, or rows read, by each shard where they live."""
    own_order: Order = "any" if order == "any" else "unique"

    def own(block: TableArray, ids: IdVector, *rows: RowArray) -> jax.Array:
        places = shards.local(ids, block.shape[0])
        if kind == "read":
            return _read_here(block, places, own_order)
        return _written_here(kind, block, places, rows[0], own_order)

    where = shards.routed_over(ids, order)  # else entries come to all shards
    of_rows = (where, *shards.columns)
    specs = [shards.spec, (where,), *(of_rows for _ in rows)]
    out = of_rows if kind == "read" else shards.spec
    result: jax.Array = shards.run(own, table, ids, *rows, specs=specs, out=out)
    return result


def scattered(
    table: TableArray, ids: IdVector, rows: RowArray, kind: Kind, order: Order
) -> TableArray:
    """Bind one scatter, which promises this order of the ids."""
    if is_of_numbers(table):
        new = scattered(table.reshape(-1), ids, rows.reshape(-1), kind, order)
        return new.reshape(table.shape)
    ids, rows = never_alone(table.shape[0], ids, rows)
    count, most = ids.shape[0], jnp.iinfo(ids.dtype).max
    are_known = is_known(count, table.shape[0])
    is_unique = order != "any" and are_known and table.shape[0] + count <= most
    if is_unique:  # padding V, V, V becomes V, V+1, V+2, so that this can be promised to XLA
        padding = table.shape[0] + lax.iota(ids.dtype, count)
        ids = jnp.where(ids >= table.shape[0], padding, ids)
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, table.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    return _SCATTERS[kind](
        table,
        ids[:, None],
        rows,
        dimensions,
        indices_are_sorted=is_unique and order == "sorted",
        unique_indices=is_unique,
        mode=_DROP,
    )


def is_of_numbers(table: Shaped) -> bool:
    """Decide whether each row is one number, (1, ..., 1), and is written as a number.

    XLA copies a scattered array (V, 1) that is a reshape of another one, as of stacked tables
    (CPU compiler of jaxlib 0.12).
    """
    return len(table.shape) > 1 and math.prod(table.shape[1:]) == 1


def never_alone(rows: int, ids: IdVector, *values: RowArray) -> list[jax.Array]:
    """Add padding to a single id (1,) and its rows.

    XLA makes slices of a gather and a scatter of one row, reads the one again where it is
    needed, and keeps a copy of the table for that (CPU compiler of jaxlib 0.10.0 to 0.12.0).
    """
    if ids.shape[0] != 1:
        return [ids, *values]
    padded = (jnp.concatenate([x, jnp.zeros_like(x)]) for x in values)
    return [jnp.concatenate([ids, jnp.full_like(ids, rows)]), *padded]


# --- unique ids --------------------------------------------------------------------------


WRITE = primitive(
    "jmask_write_rows",
    lambda *arrays, **how: [scattered(*arrays, **how)],
    shapes=lambda table, ids, rows, **_: [table],
)


# XLA for GPUs fuses the lookup of the old rows into the scatter that writes the new ones, and
# where it does not see that both are of one buffer (stacked tables) it reads from a copy of it.
lower(
    WRITE,
    lambda table, ids, rows, **how: [
        scattered(table, ids, lax.optimization_barrier(rows), **how)
    ],
    platform="gpu",
)


def gather_unique_rows(table: TableArray, ids: IdVector, order: Order) -> RowArray:
    """Gather rows as `gather_rows`, in O(n) on a TPU for tables of one entry a row too."""
    shards = Shards.of(table, ids)
    if shards.routed_over(ids, order):
        return _on_shards(shards, "read", order, table, ids)
    return _read_here(table, ids, order, on_a_mesh=shards.mesh is not None)


def _read_here(
    table: TableArray, ids: IdVector, order: Order, on_a_mesh: bool = False
) -> RowArray:
    if ids.shape[0] == 1:
        (ids,) = never_alone(table.shape[0], ids)
        return _read_here(table, ids, order, on_a_mesh)[:1]
    has_lines = table.ndim > 1 and table.size == table.shape[0] > 0 and ids.shape[0]
    if not has_lines or on_a_mesh:
        return gather_rows(table, ids, coalesced=order == "sorted")
    return READ.bind(table, ids, order=order)[0]


def read_rows(table: TableArray, ids: IdVector, *, order: Order) -> list[jax.Array]:
    """Gather rows: the definition of `READ`."""
    return [gather_rows(table, ids, coalesced=order == "sorted")]


READ = primitive(
    "jmask_read_rows",
    read_rows,
    shapes=lambda table, ids, **_: [
        table.update(shape=(*ids.shape, *table.shape[1:]), weak_type=False)
    ],
)
