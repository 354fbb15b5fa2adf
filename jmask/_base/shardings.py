"""Arrays that say in their type where their entries are: JAX's explicit sharding.

    mesh = jax.make_mesh((8,), ("x",))            its axes are explicit
    jax.typeof(jax.device_put(ids, NamedSharding(mesh, P("x"))))       int32[16@x]

Where a result could be placed in several ways, as from a gather or a scatter, JAX
refuses to choose. jmask chooses for its own operations, by one rule: what is looked up lies
where its ids do, and an array that is updated stays where it is. How the operation gets
there is left to XLA's partitioner, as for axes that are not explicit.

In a `shard_map` a type says over which axes an array varies from device to device. For its own
operations jmask keeps to JAX's rule: what goes in varies alike, and so does what comes out.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jmask._base.row_ids import id_dtype
from jmask._base.types import ArrayFunction, Function, MeshAxes, PyTree, Shaped


@contextlib.contextmanager
def on_explicit_mesh(tree: PyTree) -> Iterator[None]:
    """Context in which the mesh of arrays with explicit axes is set, outside of jit.

    JAX needs it for operations on no array of the mesh, such as the ones that a gradient starts
    from, and fails with an error about device assignments.
    """
    leaves = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    shardings = (x.sharding for x in leaves if not isinstance(x, jax.core.Tracer))
    meshes = {
        x.mesh
        for x in shardings
        if isinstance(x, NamedSharding)
        and isinstance(x.mesh, Mesh)
        and AxisType.Explicit in x.mesh.axis_types
    }
    context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if len(meshes) == 1 and jax.sharding.get_abstract_mesh().empty:
        with contextlib.suppress(ValueError):  # while something is traced
            context = jax.set_mesh(meshes.pop())
    with context:
        yield


def explicit_sharding(*arrays: ArrayLike) -> NamedSharding | None:
    """Return sharding that the type of the first array with explicit axes names, or None."""
    shardings = (sharding_of_type(jax.typeof(array)) for array in arrays)
    return next((x for x in shardings if x is not None), None)


def sharding_of_type(shape: Shaped) -> NamedSharding | None:
    """Return the sharding of an abstract array that names explicit axes, or None."""
    sharding = getattr(shape, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def spec_of(array: jax.Array) -> tuple[MeshAxes, ...]:
    """Return the axes that shard each dimension by its type: None, a name or several."""
    return _whole_spec(explicit_sharding(array), len(jax.typeof(array).shape))


def _whole_spec(sharding: NamedSharding | None, ndim: int) -> tuple[MeshAxes, ...]:
    spec = () if sharding is None else tuple(sharding.spec)
    return spec + (None,) * (ndim - len(spec))


def sharding_of_rows(array: jax.Array) -> NamedSharding | None:
    """Return the sharding of an array (V, 1, ..., 1) that matches the rows of `array`."""
    is_traced = isinstance(array, jax.core.Tracer)
    sharding = explicit_sharding(array) if is_traced else getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    return by_rows(sharding.mesh, (*sharding.spec, None)[0], array.ndim)


def by_rows(mesh: Mesh | AbstractMesh, axes: MeshAxes, ndim: int) -> NamedSharding:
    """Return the sharding of an array (V, *row) by rows over `axes`, as a step returns it.

    A step that is given another spelling than it returns is compiled twice.
    """
    is_explicit = AxisType.Explicit in mesh.axis_types
    return NamedSharding(mesh, P(axes, *(None,) * (ndim - 1 if is_explicit else 0)))


def resharded(array: jax.Array, like: NamedSharding, spec: Sequence[MeshAxes]) -> jax.Array:
    """Shard the array over the axes `spec` of the mesh of `like`, as its type will say."""
    if explicit_sharding(array) is not None and spec_of(array) == tuple(spec):
        return array
    return jax.sharding.reshard(array, NamedSharding(like.mesh, P(*spec)))


def with_whole_rows(array: jax.Array, d: int = 0) -> jax.Array:
    """Return the array with dimension d on every device, if its type says that it is not."""
    sharding, spec = explicit_sharding(array), spec_of(array)
    if sharding is None or not any(spec[d : d + 1]):
        return array
    return resharded(array, sharding, (*spec[:d], None, *spec[d + 1 :]))


def end_to_end(arrays: Sequence[jax.Array]) -> jax.Array:
    """Concatenate arrays (n, ...) along dimension 0, which types may shard differently.

    JAX refuses that. All are sharded over the axes of the one that is on most devices, if
    these divide all sizes, and otherwise dimension 0 is on every device.
    """
    specs = list(dict.fromkeys(map(spec_of, arrays)))
    sharding = explicit_sharding(*arrays)
    if len(specs) == 1 or sharding is None:
        return jnp.concatenate(arrays)

    def devices(spec: tuple[MeshAxes, ...]) -> int:
        return math.prod(sharding.mesh.shape[axis] for axis in names(spec[0]))

    specs.append((None, *specs[0][1:]))
    fit = [x for x in specs if not any(y.shape[0] % devices(x) for y in arrays)]
    spec = max(fit, key=devices)
    return jnp.concatenate([resharded(x, sharding, spec) for x in arrays])


def flattens_in_place(ids: jax.Array) -> bool:
    """Decide whether ids go into one dimension without being moved between devices.

    JAX has no sharding for the flat form of an array without entries.
    """
    return not any(spec_of(ids)[1:]) and 0 not in ids.shape


def flat(ids: jax.Array) -> jax.Array:
    """Return ids in one dimension, sharded if their first dimension alone is."""
    sharding = explicit_sharding(ids)
    if sharding is not None and not flattens_in_place(ids):
        ids = resharded(ids, sharding, (None,) * ids.ndim)
    return ids.reshape(-1)


def is_ambiguous(table: jax.Array, ids: jax.Array, rows: jax.Array) -> bool:
    """Decide whether JAX, where axes are explicit, asks where a scatter of rows is to be."""
    spread = any(spec_of(x)[0] is not None for x in (table, ids, rows))
    return spread or spec_of(table)[1:] != spec_of(rows)[1:]


def automatically(
    function: Function,
    *arrays: jax.Array,
    like: NamedSharding,
    spec: Iterable[MeshAxes] | list[tuple[MeshAxes, ...]],
) -> PyTree:
    """Call `function` with its steps placed by XLA, and its result by `spec`, or by several."""
    placed = lambda spec: NamedSharding(like.mesh, P(*spec))
    result = list(map(placed, spec)) if isinstance(spec, list) else placed(spec)
    call = jax.sharding.auto_axes(function, axes=like.mesh.axis_names, out_sharding=result)
    # Outside of jit in one program, so that arrays of no mesh come to its devices.
    is_traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
    return (call if is_traced else jax.jit(call))(*arrays)


def without_repetition(spec: Sequence[MeshAxes]) -> tuple[MeshAxes, ...]:
    """Return the spec with each axis of the mesh at the first dimension that names it."""
    seen: set[str] = set()
    result = []
    for axes in spec:
        names = {axes} if isinstance(axes, str) else set(axes or ())
        result.append(None if names & seen else axes)
        seen |= names
    return tuple(result)


def varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Return arrays typed as varying over the same axes of a `shard_map`.

    JAX's own operations ask for it, and the type of their result follows: what is computed
    from a gradient of one device is not taken for the same on all.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return list(arrays)
    every = frozenset[str]().union(*map(varying_axes, arrays))
    return [varying_over(every, x) for x in arrays]


def typed_like(x: jax.Array, shape: Shaped) -> jax.Array:
    """Return a replicated array, typed as `shape` says: varying, or sharded."""
    sharding = sharding_of_type(shape)
    if sharding is not None:
        x = resharded(x, sharding, _whole_spec(sharding, x.ndim))
    return varying_over(axes_of_type(shape), x)


def on_every_device(x: jax.Array, shape: Shaped) -> jax.Array:
    """Return an array on all devices of the mesh that the type `shape` names, if any."""
    sharding = sharding_of_type(shape)
    return x if sharding is None else resharded(x, sharding, (None,) * x.ndim)


def on_mesh(mesh: AbstractMesh | Mesh, x: jax.Array) -> jax.Array:
    """Return an array whose type names another mesh on every device of this one.

    It was made where axes are automatic that are explicit here, or the other way round.
    """
    own = getattr(jax.typeof(x), "sharding", None)
    if own is None or own.mesh == mesh:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, P()))


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Return the axes over which an array in a `shard_map` differs, as far as JAX tracks it."""
    return axes_of_type(jax.typeof(x))


def varying_over(axes: frozenset[str], x: jax.Array) -> jax.Array:
    """Return an array typed as varying over at least these axes of a `shard_map`."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def axes_of_type(type_of_array: object) -> frozenset[str]:
    """Return the axes over which arrays of a type, or an abstract array, differ."""
    manual = getattr(type_of_array, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


# --- rows of an array that its type says are sharded, and code that runs on each device -------
#
#     jax.typeof(table)       float32[V@x, D]         S devices along the axis x, explicit
#     device s holds          rows s R to (s + 1) R   R = V / S, a block
#
# An operation of jmask on such an array is one `shard_map`: what its type says, JAX asks of all
# that is computed from it, and how ids and rows cross the network is written out.

Spec = tuple[MeshAxes, ...]


def names(axes: MeshAxes) -> tuple[str, ...]:
    """Return the names of axes of a mesh, which are one, several, or None."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def entry(axes: Sequence[str]) -> MeshAxes:
    """Return axes as a dimension of a `PartitionSpec` has them."""
    return tuple(axes) if len(axes) > 1 else next(iter(axes), None)


@dataclasses.dataclass(frozen=True)
class Shards:
    """How the rows of a table are sharded."""

    mesh: AbstractMesh | Mesh  # its axes are explicit
    rows: tuple[str, ...]  # the axes that shard dimension 0; none if all devices have all rows
    columns: Spec  # the axes of the other dimensions, as in a `PartitionSpec`

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
        return self.without_columns(spec_of(ids)[0])

    def without_columns(self, axes: MeshAxes) -> MeshAxes:
        """Drop from some axes those over which columns are sharded."""
        taken = {axis for of_column in self.columns for axis in names(of_column)}
        return entry([axis for axis in names(axes) if axis not in taken])

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
