"""Rows of a table that is sharded by its type: looked up, and brought to where they live.

    lookup      all-gather of the ids, reduce-scatter of the rows          n + n D numbers
    update      all-gather of the ids and of the rows of the gradient      n + n D numbers

A lookup is one equation of a trace, `LOOKUP`, and so is its transpose, `ADD`. Each device keeps
what is its own, and reads, computes and writes where the row lives: parameters and state never
move.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmask._base.array_types import fewer, trailing
from jmask._base.lowering import primitive
from jmask._base.row_ids import id_dtype
from jmask._base.shardings import resharded, spec_of, without_repetition
from jmask._base.shards import Shards, Spec, entry, names
from jmask._base.types import Argument, ArrayFunction, Arrays, Shape, Shaped
from jmask._kernels.coalesce import coalesce_rows
from jmask._kernels.exchange import capacity_of, rows_from_owners, with_own_rows
from jmask._kernels.rows import add_rows, gather_rows

# --- lookup -------------------------------------------------------------------------------


# In one program, so that outside of jit ids of no mesh come to its devices.
@functools.partial(jax.jit, inline=True)
def looked_up(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the rows (*ids.shape, *row) of canonical ids, zeros for padding.

    The rows lie where their ids do, as far as their columns are not sharded over these axes.
    """
    shards = Shards.of(table, ids)
    assert shards is not None
    like = NamedSharding(shards.mesh, P())
    wanted = without_repetition((*spec_of(ids), *shards.columns))
    return resharded(
        _bound(shards, table, resharded(ids, like, _spec_of_ids(shards, spec_of(ids)))),
        like,
        wanted,
    )


def _bound(shards: Shards, table: jax.Array, ids: jax.Array) -> jax.Array:
    where = NamedSharding(shards.mesh, P(*spec_of(ids), *shards.columns))
    (rows,) = LOOKUP.bind(table, ids, sharding=where)
    return rows


def _spec_of_ids(shards: Shards, spec: Spec) -> Spec:
    """Return the spec of ids without the axes that columns are sharded over."""
    taken = {axis for axes in shards.columns for axis in names(axes)}
    return tuple(entry([axis for axis in names(x) if axis not in taken]) for x in spec)


def _lookup(table: jax.Array, ids: jax.Array, *, sharding: NamedSharding) -> list[jax.Array]:
    shards, spec = _shards(table, ids), spec_of(ids)
    if not ids.size:
        zeros = jnp.zeros((*ids.shape, *table.shape[1:]), table.dtype)
        return [resharded(zeros, sharding, tuple(sharding.spec))]
    batch, count = next(iter(spec), None), math.prod(ids.shape)
    capacity = None if any(spec[1:]) else capacity_of(shards, batch, count)
    shared = [tuple(axis for axis in names(axes) if axis in shards.rows) for axes in spec]
    others = tuple(axis for axis in shards.rows if axis not in sum(shared, ()))

    def by_all_gather(block: jax.Array, ids: jax.Array) -> jax.Array:
        for d, axes in enumerate(shared):
            if axes:
                ids = lax.all_gather(ids, axes, axis=d, tiled=True)
        size = block.shape[0]
        places = shards.local(ids, size)
        rows = gather_rows(block, places.reshape(-1)).reshape(*ids.shape, *block.shape[1:])
        rows = jnp.where(trailing(places < size, rows.ndim), rows, jnp.zeros((), rows.dtype))
        is_bool = rows.dtype == jnp.dtype(bool)
        rows = rows.astype(jnp.int8) if is_bool else rows
        for d, axes in enumerate(shared):
            if axes:
                rows = lax.psum_scatter(rows, axes, scatter_dimension=d, tiled=True)
        rows = lax.psum(rows, others) if others else rows
        return rows != 0 if is_bool else rows

    def rows_of(block: jax.Array, ids: jax.Array) -> jax.Array:
        if capacity is None:
            return by_all_gather(block, ids)
        rows = rows_from_owners(shards, batch, block, ids.reshape(-1), capacity, by_all_gather)
        return rows.reshape(*ids.shape, *block.shape[1:])

    return [
        shards.run(rows_of, table, ids, specs=[shards.spec, spec], out=tuple(sharding.spec))
    ]


def _shapes_of_rows(
    table: ShapedArray, ids: Shaped, *, sharding: NamedSharding
) -> list[Shaped]:
    shape = (*ids.shape, *table.shape[1:])
    return [table.update(shape=shape, sharding=sharding, weak_type=False)]


def _shards(*arrays: jax.Array) -> Shards:
    shards = Shards.of(*arrays)
    assert shards is not None
    return shards


def _add(
    ids: jax.Array, rows: jax.Array, *, shape: Shape, sharding: NamedSharding
) -> list[jax.Array]:
    zeros = resharded(jnp.zeros(shape, rows.dtype), sharding, tuple(sharding.spec))
    row = shape[1:]
    ids, rows = flat(ids, rows, len(row))
    return [add_rows(zeros, ids, rows)]


def _shapes_of_table(
    ids: Shaped, rows: ShapedArray, *, shape: Shape, sharding: NamedSharding
) -> list[Shaped]:
    return [rows.update(shape=shape, sharding=sharding, weak_type=False)]


LOOKUP = primitive("jmask_lookup_on_shards", _lookup, _shapes_of_rows)
"""Rows (*n, *row) of a table and ids (*n,), V for padding, which gives zeros."""
ADD = primitive("jmask_add_on_shards", _add, _shapes_of_table)
"""A table of zeros, of a shape and a sharding, plus rows (*n, *row) at ids (*n,)."""


def flat(ids: jax.Array, rows: jax.Array, row: int) -> tuple[jax.Array, jax.Array]:
    """Return ids (n,) and rows (n, *row), sharded if the first dimension of both alone is."""
    batch = ids.ndim
    if batch == 0:
        return ids.reshape(1), rows.reshape(1, *rows.shape)
    shards = _shards(ids, rows)
    spec, like = spec_of(ids)[:1], NamedSharding(shards.mesh, P())
    columns = spec_of(rows)[batch:]
    ids = resharded(ids, like, (*spec, *(None,) * (batch - 1)))
    rows = resharded(rows, like, (*spec, *(None,) * (batch - 1), *columns))
    return ids.reshape(-1), rows.reshape(math.prod(ids.shape), *rows.shape[batch:])


def _batched_lookup(
    operands: Sequence[jax.Array], dims: Sequence[int | None], **how: Argument
) -> tuple[list[jax.Array], list[int]]:
    (table, ids), (table_dim, ids_dim) = operands, dims
    if table_dim is None and ids_dim is not None:  # it is one lookup still
        return [looked_up(table, jnp.moveaxis(ids, ids_dim, 0))], [0]
    rows = jax.vmap(lambda *x: _lookup(*x, **how), in_axes=tuple(dims))(table, ids)
    return rows, [0]


def _define_linear(made: Primitive, linear: int, transposed: ArrayFunction) -> None:
    """Define derivatives of a primitive in one operand, whose cotangent `transposed` makes."""

    def derivative(primals: Arrays, tangents: Arrays, **how: Argument) -> Arrays:
        along = list(primals)
        along[linear] = ad.instantiate_zeros(tangents[linear])
        return made.bind(*primals, **how), made.bind(*along, **how)

    def transpose(cotangents: Argument, *operands: jax.Array, **how: Argument) -> Argument:
        results: list[Argument] = [None] * len(operands)
        is_zero, zero = isinstance(cotangents[0], ad.Zero), ad.Zero(operands[linear].aval)
        results[linear] = zero if is_zero else transposed(*cotangents, *operands)
        return results

    ad.primitive_jvps[made], ad.primitive_transposes[made] = derivative, transpose


def _added_like(rows: jax.Array, table: jax.Array, ids: jax.Array) -> jax.Array:
    shape, sharding = tuple(table.aval.shape), table.aval.sharding
    return ADD.bind(ids, rows, shape=shape, sharding=sharding)[0]


batching.primitive_batchers[LOOKUP] = _batched_lookup
_define_linear(LOOKUP, 0, _added_like)
_define_linear(ADD, 1, lambda table, ids, rows: _bound(_shards(table), table, ids))


# --- to the shards --------------------------------------------------------------------------


def routed(table: jax.Array, ids: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bring the rows of a gradient to the shards that they live on, equal ids summed.

    Args:
        table (V, *row): sharded by rows, by its type.
        ids, values: (n,), canonical, and (n, *row).

    Returns:
        ids and values (S m,), (S m, *row), where m is min(n, V / S): entries [s m, (s + 1) m)
        belong to shard s, where they are. They are sorted there, and unique but for padding.
    """
    shards, count = _shards(table), table.shape[0]
    batch, size, entries = shards.batch(ids), table.shape[0] // shards.count, ids.shape[0]

    def own(ids: jax.Array, values: jax.Array) -> list[jax.Array]:
        return with_own_rows(shards, batch, ids, [values], size, entries, summed)

    def summed(ids: jax.Array, values: list[jax.Array]) -> list[jax.Array]:
        places, rows = coalesce_rows(shards.local(ids, size), values[0], size)
        first = lax.axis_index(shards.rows).astype(id_dtype(count)) * size
        own_ids = jnp.where(places < size, places.astype(first.dtype) + first, count)
        missing = fewer(entries, size) - places.shape[0]  # as many slots, however they came
        if missing:
            own_ids = jnp.pad(own_ids, (0, missing), constant_values=count)
            rows = jnp.pad(rows, [(0, missing)] + [(0, 0)] * (rows.ndim - 1))
        return [own_ids, rows]

    here = entry(shards.rows)
    specs: list[Spec] = [(batch,), shards.spec_of_rows(batch)]
    return shards.run(own, ids, values, specs=specs, out=[(here,), shards.spec_of_rows(here)])
