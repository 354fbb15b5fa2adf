"""Arrays that say in their type where their entries are: JAX's explicit sharding.

    mesh = jax.make_mesh((8,), ("x",))            its axes are explicit
    jax.typeof(jax.device_put(ids, NamedSharding(mesh, P("x"))))       int32[16@x]

Where a result could be placed in several ways, as from a gather or a scatter, JAX
refuses to choose. jmask chooses for its own operations, by one rule: what is looked up lies
where its ids do, and an array that is updated stays where it is. How the operation gets
there is left to XLA's partitioner, as for axes that are not explicit.

In a `shard_map` a type says over which axes an array varies from device to device. For its own
operations jmask keeps to JAX's rule: operands vary over the same axes, and so do results.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmask._base.row_ids import Order, id_dtype
from jmask._base.types import Argument, Function, MeshAxes, PyTree, Shaped

Spec = tuple[MeshAxes, ...]
"""The axes that shard each dimension of an array."""
AnyMesh = AbstractMesh | Mesh


@contextlib.contextmanager
def on_explicit_mesh(tree: PyTree) -> Iterator[None]:
    """Context in which the mesh of arrays with explicit axes is set, outside of jit.

    JAX needs it for operations on no array of the mesh, such as the ones that a gradient starts
    from, and fails with an error about device assignments.
    """
    leaves = (x for x in jax.tree.leaves(tree) if explicit_mesh(x) is not None)
    places: list[Argument] = [x.sharding for x in leaves if not isinstance(x, jax.core.Tracer)]
    meshes = {place.mesh for place in places}
    with contextlib.ExitStack() as contexts:
        if len(meshes) == 1 and jax.sharding.get_abstract_mesh().empty:
            with contextlib.suppress(ValueError):  # while something is traced
                contexts.enter_context(jax.set_mesh(meshes.pop()))
        yield


# --- what types say, of arrays and of abstract ones ---------------------------------------


def explicit_mesh(*arrays: object) -> AnyMesh | None:
    """Return the mesh that the type of the first array with explicit axes names, or None."""
    return next((x.mesh for x in map(_explicit_sharding, arrays) if x is not None), None)


def spec_of(array: Shaped) -> Spec:
    """Return the axes that shard each dimension by its type: None, a name or several."""
    sharding = _explicit_sharding(array)
    spec = () if sharding is None else tuple(sharding.spec)
    return spec + (None,) * (getattr(array, "ndim", 0) - len(spec))


def _explicit_sharding(x: object) -> NamedSharding | None:
    sharding = _sharding_of(x)
    is_explicit = sharding is not None and AxisType.Explicit in sharding.mesh.axis_types
    return sharding if is_explicit else None


def _sharding_of(x: object) -> NamedSharding | None:
    sharding = getattr(_type_of(x), "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _type_of(x: object) -> object:
    return jax.typeof(x) if isinstance(x, jax.Array) else x


def varying_axes(x: object) -> frozenset[str]:
    """Return the axes of a `shard_map` over which an array differs, as far as JAX tracks it."""
    manual = getattr(_type_of(x), "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


# --- arrays of another type -----------------------------------------------------------------


def resharded(array: jax.Array, mesh: AnyMesh | None, spec: Spec) -> jax.Array:
    """Shard the array over the axes `spec` of a mesh, if there is one, as its type will say."""
    is_there = explicit_mesh(array) is not None and spec_of(array) == spec
    if mesh is None or is_there:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, P(*spec)))


def with_whole_rows(array: jax.Array, d: int = 0) -> jax.Array:
    """Return the array with dimension d on every device, if its type says that it is not."""
    spec = spec_of(array)
    if not any(spec[d : d + 1]):
        return array
    return resharded(array, explicit_mesh(array), (*spec[:d], None, *spec[d + 1 :]))


def on_every_device(x: jax.Array, *others: jax.Array) -> jax.Array:
    """Return `x` on every device of the explicit mesh in one of these types, if any."""
    return resharded(x, explicit_mesh(x, *others), (None,) * x.ndim)


def end_to_end(arrays: Sequence[jax.Array]) -> jax.Array:
    """Concatenate arrays (n, ...) along dimension 0, which types may shard differently.

    JAX refuses that. All are sharded over the axes of the one that is on most devices, if
    these divide all sizes, and otherwise dimension 0 is on every device.
    """
    specs, mesh = list(dict.fromkeys(map(spec_of, arrays))), explicit_mesh(*arrays)
    if len(specs) == 1 or mesh is None:
        return jnp.concatenate(arrays)
    devices = lambda spec: math.prod(mesh.shape[axis] for axis in names(spec[0]))
    specs.append((None, *specs[0][1:]))
    fit = [x for x in specs if not any(y.shape[0] % devices(x) for y in arrays)]
    spec = max(fit, key=devices)
    return jnp.concatenate([resharded(x, mesh, spec) for x in arrays])


def flattened(x: jax.Array, dimensions: int) -> jax.Array:
    """Return an array with its first dimensions as one, sharded as the first of them is."""
    # JAX has no sharding for the flat form of an array without entries.
    spec = [None] * x.ndim if 0 in x.shape else [*spec_of(x)]
    spec[1:dimensions] = [None] * (dimensions - 1)
    x = resharded(x, explicit_mesh(x), tuple(spec))
    return x.reshape(math.prod(x.shape[:dimensions]), *x.shape[dimensions:])


def rows_in_any_order(ids: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ids (n,) and rows (n, *row), flattened so that devices exchange no entries.

    Where types shard dimensions behind the first, each device has its own entries in sequence.
    """
    spec, ndim = spec_of(ids), ids.ndim
    axes = sum(map(names, spec), ())
    if not any(spec[1:]) or 0 in rows.shape:
        return flattened(ids, ndim), flattened(rows, ndim)
    columns = spec_at(spec, spec_of(rows)[ndim:])[ndim:]
    specs, out = [spec, (*spec, *columns)], [(entry(axes),), (entry(axes), *columns)]
    flat = lambda *arrays: [x.reshape(-1, *x.shape[ndim:]) for x in arrays]
    shards = Shards(explicit_mesh(ids), (), ())
    ids, rows = shards.run(flat, ids, rows, specs=specs, out=out)
    return ids, rows


def on_mesh(mesh: AnyMesh, x: jax.Array) -> jax.Array:
    """Return an array whose type names another mesh on every device of this one.

    It was made where axes are automatic that are explicit here, or the other way round.
    """
    own = _sharding_of(x)
    if own is None or mesh.empty or own.mesh == mesh:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, P()))


def on_this_mesh(x: jax.Array) -> jax.Array:
    """Return an array as this part of a program types it.

    Axes that are explicit elsewhere are automatic inside of `.at[ids].get(out_sharding=...)`.
    """
    own = _sharding_of(x)
    is_on_none = own is None or own.mesh.empty
    return x if is_on_none else on_mesh(jax.sharding.get_abstract_mesh(), x)


def varying_over(axes: frozenset[str], x: jax.Array) -> jax.Array:
    """Return an array typed as varying over at least these axes of a `shard_map`."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Return arrays typed as varying over the same axes of a `shard_map`.

    What a primitive makes of them is typed so: what is computed from a gradient of one device
    is not taken for the same on all.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return list(arrays)
    every = frozenset[str]().union(*map(varying_axes, arrays))
    return [varying_over(every, x) for x in arrays]


def typed_like(x: jax.Array, like: Shaped) -> jax.Array:
    """Return an array typed as another one: sharded on explicit axes, and varying, as that.

    Dimensions that the other one lacks come first, on every device.
    """
    spec = (*(None,) * (x.ndim - like.ndim), *spec_of(like))
    return varying_over(varying_axes(like), resharded(x, explicit_mesh(like), spec))


# --- arrays placed by XLA -------------------------------------------------------------------


def automatically(function: Function, *arrays: jax.Array, spec: Spec | list[Spec]) -> PyTree:
    """Call a function, its explicit axes automatic inside; `spec` shards its results."""
    mesh = explicit_mesh(*arrays)
    if mesh is None:
        return function(*arrays)
    placed = lambda spec: NamedSharding(mesh, P(*spec))
    result = list(map(placed, spec)) if isinstance(spec, list) else placed(spec)
    call = jax.sharding.auto_axes(function, axes=mesh.axis_names, out_sharding=result)
    # Outside of jit in one program, so that arrays of no mesh come to its devices.
    return jax.jit(call, inline=True)(*arrays)


def by_rows(mesh: AnyMesh, axes: MeshAxes, ndim: int) -> NamedSharding:
    """Return the sharding of an array (V, *row) by rows over `axes`, as a step returns it.

    To `jax.jit` P("x") and P("x", None) differ: a step would be compiled twice.
    """
    is_explicit = AxisType.Explicit in mesh.axis_types
    return NamedSharding(mesh, P(axes, *(None,) * (ndim - 1 if is_explicit else 0)))


def sharding_of_rows(array: jax.Array) -> NamedSharding | None:
    """Return the sharding of an array (V, 1, ..., 1) that matches the rows of `array`."""
    sharding = getattr(array, "sharding", _explicit_sharding(array))
    if not isinstance(sharding, NamedSharding):
        return None
    return by_rows(sharding.mesh, (*sharding.spec, None)[0], array.ndim)


# --- rows of an array that its type says are sharded, and code that runs on each device -------
#
#     jax.typeof(table)       float32[V@x, D]         S devices along the axis x, explicit
#     device s holds          rows s R to (s + 1) R   R = V / S, a block
#
# An operation of jmask on such an array is one `shard_map`: what its type says, JAX asks of all
# that is computed from it, and how ids and rows cross the network is written out.


def names(axes: MeshAxes) -> tuple[str, ...]:
    """Return the names of axes of a mesh, which are one, several, or None."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def entry(axes: Sequence[str]) -> MeshAxes:
    """Return axes as a dimension of a `PartitionSpec` has them."""
    return tuple(axes) if len(axes) > 1 else next(iter(axes), None)


def spec_at(ids: Spec, columns: Spec) -> Spec:
    """Return the spec of rows that lie where their ids do; columns leave the axes to these."""
    taken = {axis for axes in ids for axis in names(axes)}
    return *ids, *(None if taken & {*names(axes)} else axes for axes in columns)


@dataclasses.dataclass(frozen=True)
class Shards:
    """How the rows of a table are sharded, as far as its type says."""

    mesh: AnyMesh | None  # its axes are explicit
    rows: tuple[str, ...]  # the axes that shard dimension 0; none if all devices have all rows
    columns: Spec  # the axes of the other dimensions, as in a `PartitionSpec`

    @classmethod
    def of(cls, table: Shaped, *others: Shaped) -> "Shards":
        """Return what the type of a table says, on the mesh of any of these arrays."""
        first, *columns = spec_of(table)
        return cls(explicit_mesh(table, *others), names(first), tuple(columns))

    @property
    def count(self) -> int:
        """The number of shards."""
        return self.devices(self.rows)

    def devices(self, axes: Collection[str]) -> int:
        """Return how many devices are along these axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes) if self.mesh else 1

    @property
    def spec(self) -> Spec:
        """The spec of the table."""
        return (entry(self.rows), *self.columns)

    def spec_of_ids(self, ids: jax.Array) -> Spec:
        """Return the spec of ids without the axes over which columns are sharded."""
        taken = {axis for of_column in self.columns for axis in names(of_column)}
        kept = lambda axes: entry([axis for axis in names(axes) if axis not in taken])
        return tuple(map(kept, spec_of(ids)))

    def routed_over(self, ids: jax.Array, order: Order) -> MeshAxes:
        """Return the axes over which ids (n,) are on the shards that have their rows, if so.

        `order` says that they were routed, and their type to the shards of which axes.
        """
        axes = self.spec[0]
        return axes if order == "routed" and spec_of(ids)[0] == axes else None

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
        """Run `function` on what each device has of the arguments, sharded by `specs`."""
        if self.mesh is None:
            return function(*arguments)
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
            return mapped(*(self.put(x, spec) for x, spec in pairs))

        return on_mesh(*arguments)

    def put(self, arrays: PyTree, spec: Spec) -> PyTree:
        """Shard arrays by `spec`, as their types will say."""
        shard = functools.partial(resharded, mesh=self.mesh, spec=spec)
        return jax.tree.map(shard, arrays)


def all_gathered(axes: MeshAxes, *arrays: jax.Array) -> list[jax.Array]:
    """Return arrays (n, ...) of all devices along the axes, one after the other."""
    if not axes or not arrays[0].shape[0]:  # XLA gathers no empty arrays
        return list(arrays)
    return [lax.all_gather(x, axes, tiled=True) for x in arrays]
