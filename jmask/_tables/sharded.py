"""`jmask.sharded`: the rows of a table distributed over the devices of a mesh.

    sharded(table (V, D), mesh)     a `jax.Array` (W, D), W the next multiple of the devices
    device s of S                   rows s R to (s + 1) R, R = W / S

It is an array as any other: optimizers, layers and checkpoints take it. Where axes of the mesh
are explicit, lookups and updates of jmask see by its type where rows live; see
`jmask._kernels.sharded_rows`. Where axes are automatic, XLA partitions what is plain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jmask._base.row_ids import COLUMNS, id_dtype, id_of
from jmask._base.shardings import automatically, by_rows, entry, explicit_mesh
from jmask._base.types import Argument, Numbers
from jmask._base.validation import as_table, check_flag, shown
from jmask._tables.packed import check_floating


def sharded(
    table: Numbers, mesh: Mesh, *, axis: str | Sequence[str] | None = None, hashed: bool = False
) -> jax.Array:
    """Shard the rows of a table over the devices of a mesh.

    Args:
        table (V, *row): a floating or complex array. A table that no device can hold is made
            where it lives, under jit: `jax.jit(lambda key:
            jmask.sharded(jax.random.normal(key, shape), mesh))(key)`. For a
            `jax.ShapeDtypeStruct` the result is one, with its sharding.
        mesh: of `jax.make_mesh`.
        axis: the axis or axes over which rows are sharded; all by default.
        hashed: number rows by a fixed permutation, so that ids that come often, or that have a
            factor in common, are on all shards alike. Lookups are told by `hashed=True`, too.

    Returns:
        An array (W, *row) with a `NamedSharding`, W the next multiple of the number of shards
        (and of 1,024 if `hashed`). Rows beyond V are zeros, which no id of the table names.

    Raises:
        TypeError: if `table` is no array, `mesh` no mesh, or `axis` no name.
        ValueError: if `table` is not floating (V, *row), or an axis is not one of the mesh.

    Example:
        >>> import jax, jax.numpy as jnp, jmask
        >>> mesh = jax.make_mesh((1,), ("x",))
        >>> table = jmask.sharded(jnp.arange(10.0).reshape(5, 2), mesh)
        >>> print(jax.typeof(table))
        float32[5@x,2]
        >>> jmask.embedding_lookup(table, jnp.array([3, 3]))
        Array([[6., 7.],
               [6., 7.]], dtype=float32)
    """
    if not isinstance(table, jax.ShapeDtypeStruct):
        table = as_table(table)
    check_floating(table)
    axes = checked_axes(mesh, axis)
    check_flag("hashed", hashed)
    shards = math.prod(mesh.shape[name] for name in axes)
    sharding = by_rows(mesh, entry(axes), table.ndim)
    multiple = math.lcm(shards, COLUMNS) if hashed else shards
    missing = -table.shape[0] % multiple

    def padded(table: jax.Array) -> jax.Array:
        rows = jnp.pad(table, [(0, missing)] + [(0, 0)] * (table.ndim - 1))
        if not hashed:
            return rows
        count = rows.shape[0]
        return rows[id_of(jnp.arange(count, dtype=id_dtype(count)), count)]

    if isinstance(table, jax.ShapeDtypeStruct):
        shape = (table.shape[0] + missing, *table.shape[1:])
        abstract: Argument = jax.ShapeDtypeStruct(shape, table.dtype, sharding=sharding)
        return abstract
    source = explicit_mesh(table)
    if source == mesh.abstract_mesh:
        return automatically(padded, table, spec=tuple(sharding.spec))
    is_elsewhere = source is not None or (
        not isinstance(table, jax.core.Tracer)
        and table.committed
        and table.sharding.device_set != set(mesh.devices.flat)
    )
    if is_elsewhere:  # it is gathered on its own mesh first
        whole = automatically(jax.jit(padded), table, spec=(None,) * table.ndim)
        return jax.device_put(whole, sharding)
    return jax.jit(padded, out_shardings=sharding)(table)


def checked_axes(mesh: Mesh, axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the axes of a mesh over which rows are sharded: all of them for None."""
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"`mesh` must be a jax.sharding.Mesh, got {type(mesh).__name__}: write for example "
            "jax.make_mesh((8,), ('x',))."
        )
    if axes is None:
        return tuple(mesh.axis_names)
    if not isinstance(axes, str | list | tuple):
        raise TypeError(f"`axis` must be the name of an axis, or several, got {shown(axes)}.")
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    unknown = [name for name in names if name not in mesh.axis_names]
    if not names or unknown or len(set(names)) != len(names):
        raise ValueError(
            f"`axis` must name different axes of the mesh, {mesh.axis_names}, got {names}."
        )
    return names
