"""Rows of an array that its type says are sharded, and code that runs on each device.

    jax.typeof(table)       float32[V@x, D]         S devices along the axis x, explicit
    device s holds          rows s R to (s + 1) R   R = V / S, a block

An operation of jmask on such an array is one `shard_map`: what its type says, JAX asks of all
that is computed from it, and how ids and rows cross the network is written out.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmask._base.row_ids import id_dtype
from jmask._base.shardings import explicit_sharding, resharded, spec_of
from jmask._base.types import ArrayFunction, Function, MeshAxes, PyTree

Spec = tuple[MeshAxes, ...]


def names(axes: MeshAxes) -> tuple[str, ...]:
    """Return the names of axes of a mesh, which are one, several, or None."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def entry(axes: Sequence[str]) -> MeshAxes:
    """Return axes as a dimension of a `PartitionSpec` has them."""
    return tuple(axes) if len(axes) > 1 else next(iter(axes), None)


@dataclasses.dataclass(frozen=True)
class Shards:
    """How the rows of a table are sharded.

    Attributes:
        mesh: its axes are explicit.
        rows: the axes that shard dimension 0; none if all devices have all rows.
        columns: those of the other dimensions, as in a `PartitionSpec`.
    """

    mesh: AbstractMesh | Mesh
    rows: tuple[str, ...]
    columns: Spec

    @classmethod
    def of(cls, table: jax.Array, *others: jax.Array) -> "Shards | None":
        """Return what the type of a table says, on the mesh of any of these arrays."""
        sharding = explicit_sharding(table, *others)
        if sharding is None:
            return None
        first, *columns = spec_of(table)
        return cls(sharding.mesh, names(first), tuple(columns))

    @property
    def count(self) -> int:
        """The number of shards."""
        return math.prod(self.mesh.shape[axis] for axis in self.rows)

    @property
    def spec(self) -> Spec:
        """The spec of the table."""
        return (entry(self.rows), *self.columns)

    def spec_of_rows(self, axes: MeshAxes) -> Spec:
        """Return the spec of rows (n, *row) that are sharded over `axes`."""
        return (axes, *self.columns)

    def batch(self, ids: jax.Array) -> MeshAxes:
        """Return the axes over which ids (n,) are sharded and columns are not."""
        taken = {axis for axes in self.columns for axis in names(axes)}
        return entry([axis for axis in names(spec_of(ids)[0]) if axis not in taken])

    def local(self, ids: jax.Array, block: int) -> jax.Array:
        """Return the places of ids in the block of this device, R where a row is not there."""
        if not self.rows:
            return ids
        place = ids - lax.axis_index(self.rows).astype(ids.dtype) * block
        is_here = (place >= 0) & (place < block)
        return jnp.where(is_here, place, block).astype(id_dtype(block))

    def run(
        self,
        function: Function,
        *arguments: PyTree,
        specs: Sequence[Spec],
        out: Spec | list[Spec],
    ) -> PyTree:
        """Run `function` on what each device has of the arguments.

        Args:
            specs: where the arguments are to be; all arrays of one alike.
            out: where the results are.
        """
        outputs = [P(*x) for x in out] if isinstance(out, list) else P(*out)
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(P(*spec) for spec in specs),
            out_specs=outputs,
            check_vma=False,
        )

        # In one program, so that outside of jit arrays of no mesh come to its devices.
        @jax.jit
        def on_mesh(*arguments: PyTree) -> PyTree:
            pairs = zip(arguments, specs, strict=True)
            return mapped(*(jax.tree.map(self.put(spec), x) for x, spec in pairs))

        return on_mesh(*arguments)

    def put(self, spec: Spec) -> ArrayFunction:
        """Return the function that shards arrays by `spec`, as their types will say."""
        return functools.partial(resharded, like=NamedSharding(self.mesh, P()), spec=spec)


def all_gathered(axes: MeshAxes, *arrays: jax.Array) -> list[jax.Array]:
    """Return arrays (n, ...) of all devices along the axes, one after the other."""
    if not axes or not arrays[0].shape[0]:  # XLA gathers no empty arrays
        return list(arrays)
    return [lax.all_gather(x, axes, tiled=True) for x in arrays]
