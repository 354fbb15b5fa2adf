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
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from jmask._base.types import DType, Function, MeshAxes, PyTree, Shaped, Value


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
    shardings = (_sharding_of_type(jax.typeof(array)) for array in arrays)
    return next((x for x in shardings if x is not None), None)


def _sharding_of_type(shape: Shaped) -> NamedSharding | None:
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


def placed(array: jax.Array, like: NamedSharding, spec: Sequence[MeshAxes]) -> jax.Array:
    """Shard the array over the axes `spec` of the mesh of `like`, as its type will say."""
    if explicit_sharding(array) is not None and spec_of(array) == tuple(spec):
        return array
    return jax.sharding.reshard(array, NamedSharding(like.mesh, P(*spec)))


def with_whole_rows(array: jax.Array, d: int = 0) -> jax.Array:
    """Return the array with dimension d on every device, if its type says that it is not."""
    sharding, spec = explicit_sharding(array), spec_of(array)
    if sharding is None or not any(spec[d : d + 1]):
        return array
    return placed(array, sharding, (*spec[:d], None, *spec[d + 1 :]))


def flat(ids: jax.Array) -> jax.Array:
    """Return ids in one dimension, sharded if their first dimension alone is."""
    sharding = explicit_sharding(ids)
    if sharding is not None and any(spec_of(ids)[1:]):
        ids = placed(ids, sharding, (None,) * ids.ndim)
    return ids.reshape(-1)


def is_ambiguous(table: jax.Array, ids: jax.Array, rows: jax.Array) -> bool:
    """Decide whether JAX, where axes are explicit, asks where a scatter of rows is to be."""
    spread = any(spec_of(x)[0] is not None for x in (table, ids, rows))
    return spread or spec_of(table)[1:] != spec_of(rows)[1:]


def placed_like(rows: jax.Array, ids: jax.Array) -> jax.Array:
    """Place rows (*ids.shape, *row) as the type of the ids says."""
    sharding = explicit_sharding(ids)
    if sharding is None:
        return rows
    return placed(rows, sharding, spec_of(ids) + spec_of(rows)[ids.ndim :])


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
    varying = list(map(varying_axes, arrays))
    every = frozenset[str]().union(*varying)
    return [_varying_over(every - axes, x) for axes, x in zip(varying, arrays, strict=True)]


def varying_like(x: jax.Array, shape: Shaped) -> jax.Array:
    """Return an array that is the same on all devices, typed as different where `shape` is."""
    return _varying_over(_axes_of(shape) - varying_axes(x), x)


def typed_like(x: jax.Array, shape: Shaped) -> jax.Array:
    """Return a replicated array, typed as `shape` says: varying, or sharded."""
    sharding = _sharding_of_type(shape)
    if sharding is not None:
        x = placed(x, sharding, _whole_spec(sharding, x.ndim))
    return varying_like(x, shape)


def on_every_device(x: jax.Array, shape: Shaped) -> jax.Array:
    """Return an array on all devices of the mesh that the type `shape` names, if any."""
    sharding = _sharding_of_type(shape)
    return x if sharding is None else placed(x, sharding, (None,) * x.ndim)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Return the axes over which an array in a `shard_map` differs, as far as JAX tracks it."""
    return _axes_of(jax.typeof(x))


def _varying_over(axes: frozenset[str], x: jax.Array) -> jax.Array:
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def _axes_of(type_of_array: object) -> frozenset[str]:
    manual = getattr(type_of_array, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


# --- shapes -------------------------------------------------------------------------------
#
# Shapes: arrays that broadcast against more dimensions, and programs for any size.
#
#     trailing([1, 2], ndim=3)     ->  [[[1]], [[2]]]      one number for each row
#     is_known(b, 5)               ->  False               b of `jax.export.symbolic_shape("b")`
#
# Where a size is not known, no way can be chosen by it: the one that is right for all is taken.


def trailing(x: jax.Array, ndim: int) -> jax.Array:
    """Return `x` with dimensions of size 1 appended, `ndim` in all."""
    return x.reshape(x.shape + (1,) * (ndim - x.ndim))


def is_known(*sizes: object) -> bool:
    """Decide whether all sizes are numbers, by which one way of several can be chosen."""
    return all(isinstance(x, int | np.integer) for x in sizes)


def fewer(count: int, limit: int) -> int:
    """Return the smaller of two sizes; the first where a program is for any size."""
    return min(count, limit) if is_known(count, limit) else count


# --- precision ----------------------------------------------------------------------------
#
# Which dtype to compute in: float32 at least.
#
# wide(bfloat16)   float32        wide(float64)  float64       wide(int8)   int8
# sum_dtype(bool)  int32          otherwise as wide
#
# adds_when_cast(float32, bfloat16)        cast(a + b) = cast(a) + cast(b), but for rounding
# not of integers, whose sums wrap:        uint8 200 + 100 = 44, float32 200 + 100 = 300


def is_narrow(dtype: DTypeLike) -> bool:
    """Decide whether a dtype is floating and of fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def is_complex(x: Shaped | None) -> bool:
    """Decide whether an array, or what has a dtype, is complex; None is not."""
    return x is not None and jnp.issubdtype(x.dtype, jnp.complexfloating)


def real_dtype(dtype: DTypeLike) -> DType:
    """Return the dtype of the real part of numbers of `dtype`."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.finfo(dtype).dtype if is_complex else jnp.dtype(dtype)


def complex_dtype(dtype: DTypeLike) -> DType:
    """Return the dtype of pairs of `dtype`: complex64 for two numbers of float32.

    Raises:
        TypeError: if no dtype holds such pairs.
    """
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype(dtype)
    if jnp.dtype(dtype).itemsize < 4 or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"the state of a complex parameter cannot be {jnp.dtype(dtype)}: leave out "
            "`state_dtype` and `mu_dtype`, or take float32."
        )
    return joint_dtype(dtype, jnp.complex64)


def wide(dtype: DTypeLike) -> DType:
    """Return the dtype to compute in with numbers of `dtype`."""
    return jnp.dtype(jnp.float32) if is_narrow(dtype) else jnp.dtype(dtype)


def sum_dtype(dtype: DTypeLike) -> DType:
    """Return the dtype to sum in: int32 counts booleans, which add as `or` when cast back."""
    return jnp.dtype(jnp.int32) if dtype == jnp.dtype(bool) else wide(dtype)


def adds_when_cast(old: DTypeLike, new: DTypeLike) -> bool:
    """Decide whether a sum that is cast is the sum of what is cast, but for rounding."""
    return old == new or all(jnp.issubdtype(dtype, jnp.inexact) for dtype in (old, new))


def joint_dtype(*arrays: ArrayLike | DTypeLike) -> DType:
    """Return dtype of a sum of arrays, also where `jax_numpy_dtype_promotion` refuses one.

    8-bit floating numbers, which JAX promotes to nothing, are as bfloat16 beside others.
    """
    with jax.numpy_dtype_promotion("standard"):
        kinds = {dtype for x in arrays if (dtype := getattr(x, "dtype", x)) is not None}
        if len(kinds) > 1:
            arrays = tuple(jnp.bfloat16 if has_8_bits(x) else x for x in arrays)
        return jnp.result_type(*arrays)


def has_8_bits(x: Value) -> bool:
    """Decide whether an array, or a dtype, is floating and of 8 bits."""
    dtype: Value = getattr(x, "dtype", x)
    is_dtype = isinstance(dtype, np.dtype | type)
    return is_dtype and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 8


def is_nonzero(x: jax.Array) -> jax.Array:
    """Return x != 0 of numbers or booleans, which strict promotion compares with no number."""
    return x if x.dtype == jnp.dtype(bool) else x != 0


def added(x: ArrayLike, y: ArrayLike) -> jax.Array:
    dtype = joint_dtype(x, y)
    return jnp.asarray(x, dtype) + jnp.asarray(y, dtype)


def as_float(count: jax.Array) -> jax.Array:
    """Return count as a number that takes on the precision of what it meets, as Python's do."""
    with jax.numpy_dtype_promotion("standard"):
        return count * 1.0


# --- facts about traced arrays -------------------------------------------------------------
#
# What is known of traced arrays is kept next to them, not in any tree.
#
#     FACTS.note(x, "rows of y")       x is a tracer
#     FACTS.of(x)                      "rows of y", in the same trace
#     FACTS.of(jax.jit(f)(x))          None: what a call returns is another array

Fact = TypeVar("Fact")


class ArrayFacts(Generic[Fact]):
    """One fact for each traced array, by the identity of the array.

    It goes with its array, and keeps neither the array nor its trace alive.
    """

    # Tracers have no hash, and `==` of arrays is elementwise, so this is no WeakKeyDictionary:
    # the key is the address, which the callback of the weak reference removes before it is used
    # again.

    def __init__(self) -> None:
        self._facts: dict[int, tuple[weakref.ref[jax.Array], Fact]] = {}

    def note(self, x: jax.Array, fact: Fact) -> None:
        """Keep a fact about a traced array, in place of what was known of it."""
        if isinstance(x, jax.core.Tracer):
            key, facts = id(x), self._facts
            facts[key] = (weakref.ref(x, lambda _: facts.pop(key, None)), fact)

    def of(self, x: jax.Array) -> Fact | None:
        """Return the fact about an array, or None."""
        reference, fact = self._facts.get(id(x), (None, None))
        return fact if reference is not None and reference() is x else None

    def __len__(self) -> int:
        return len(self._facts)
