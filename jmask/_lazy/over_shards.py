"""Agree over the devices of a `shard_map` on what a step does, and what it counts.

    values of device 0: nan     of device 1: finite     skip_nonfinite: both skip the step

Devices that take a step together must all skip it or none, since dense parameters are copies.
A `ShardedTable` says over which axes its rows lie; an array in a `shard_map` is the array of
that device alone, as it is for optax. An optimizer that makes one number of all rows (a global
norm) would see those of one device, and is refused: see `proved_update`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import varying_axes
from jmask._base.types import Gradient, Table
from jmask._tables.sharded import RoutedRows
from jmask._updates.checks import is_gradient_leaf

Axes = tuple[str, ...]


def axes_of_rows(gradient: Gradient) -> Axes:
    """Return the axes of a `shard_map` over which rows are sharded, if the gradient says so."""
    is_sharded = isinstance(gradient, RoutedRows) and gradient.layout.inside()
    return gradient.layout.rows if is_sharded else ()


def agreed(
    holds: jax.Array, gradients: Sequence[Gradient], params: Sequence[Table]
) -> jax.Array:
    """Decide whether something holds on all devices that take a step together."""
    leaves = jax.tree.leaves(gradients, is_leaf=is_gradient_leaf)
    axes = set().union(*map(axes_of_rows, leaves))
    axes |= _axes_of_copies(holds, gradients, params)
    # There is no reduction by `and` over devices: the failures are counted.
    return holds if not axes else lax.psum((~holds).astype(jnp.int32), tuple(axes)) == 0


def counted(
    number: jax.Array,
    gradient: Gradient,
    gradients: Sequence[Gradient],
    params: Sequence[Table],
) -> jax.Array:
    """Sum the numbers of rows of one gradient that the devices have counted.

    Where it is not known whether an array is the same on all devices, the most that one has.
    """
    axes = axes_of_rows(gradient)
    if axes:
        return lax.psum(number, axes)
    others = tuple(_axes_of_copies(number, gradients, params))
    if not others:
        return number
    return lax.psum(number, others) if varying_axes(number) else lax.pmax(number, others)


def _axes_of_copies(
    x: jax.Array, gradients: Sequence[Gradient], params: Sequence[Table]
) -> set[str]:
    """Return the axes over which `x` may differ and parameters are the same.

    Without parameters these are taken to be sharded as their gradients are. Where a
    `shard_map` does not track what differs, all of its axes.
    """
    axes = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    # The index of a device differs on all of them. Where its type does not say so
    # (check_vma=False), the types of arrays say nothing either.
    if not axes or not varying_axes(lax.axis_index(tuple(axes))):
        return set(axes)
    leaves = jax.tree.leaves(gradients if params is None else params)
    return set(varying_axes(x).difference(frozenset.intersection(*map(varying_axes, leaves))))
