"""Agree over the devices of a `shard_map` on what a step does, and what it counts.

    values of device 0: nan     of device 1: finite     skip_nonfinite: both skip the step

Devices that take a step together must all skip it or none, since dense parameters are copies.
A table that differs from device to device beside these is a block of one: what an optimizer
makes of all rows (a global norm) it would make of those of one device, and it is refused.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.shardings import varying_axes
from jmask._base.types import Gradient


def is_block(table: jax.Array, params: Sequence[jax.Array]) -> bool:
    """Decide whether a table is a block of one device, by the types of all parameters.

    It differs over an axis of a `shard_map` over which another parameter is the same. Where
    all differ, each device trains a model of its own.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return False
    common = frozenset.intersection(*map(varying_axes, jax.tree.leaves(params)))
    return any(varying_axes(x) - common for x in jax.tree.leaves(table))


def agreed(
    holds: jax.Array, gradients: Sequence[Gradient], params: Sequence[jax.Array]
) -> jax.Array:
    """Decide whether something holds on all devices that take a step together."""
    axes = _axes_of_copies(holds, gradients, params)
    # There is no reduction by `and` over devices: the failures are counted.
    return holds if not axes else lax.psum((~holds).astype(jnp.int32), tuple(axes)) == 0


def counted(
    number: jax.Array, gradients: Sequence[Gradient], params: Sequence[jax.Array]
) -> jax.Array:
    """Sum the numbers of rows of one gradient that the devices have counted.

    Where it is not known whether an array is the same on all devices, the most that one has.
    """
    others = tuple(_axes_of_copies(number, gradients, params))
    if not others:
        return number
    return lax.psum(number, others) if varying_axes(number) else lax.pmax(number, others)


def _axes_of_copies(
    x: jax.Array, gradients: Sequence[Gradient], params: Sequence[jax.Array]
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
