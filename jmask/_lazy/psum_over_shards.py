"""Sum over the rows of a table in a `shard_map`, where each device has some of them.

    rows of device 0: 3      of device 1: 4      clip_by_global_norm(1)
    each by itself           3 / 3, 4 / 4
    over both                3 / 5, 4 / 5        what one device with both rows does

An optimizer does the same to a row on any device. Its sums over rows (a norm, whether all are
finite) must be summed over the devices as well. A `ShardedTable` says which they are. An array
in a `shard_map` is the array of that device alone, as it is for optax.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jmask._base.array_types import varying_axes, varying_like
from jmask._base.forms import branches_of, name_of, within
from jmask._base.jaxprs import bound, inlined, interpret
from jmask._base.types import ArraysFunction, Gradient, Shaped, Table
from jmask._lazy.lattice import NEUTRAL, Kind, Replicated, RowWise
from jmask._lazy.row_locality import classify
from jmask._tables.sharded import RoutedRows
from jmask._updates.checks import NotRowLocalError, is_gradient_leaf

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


def with_sums_over(
    sharded: Mapping[int, Axes],
    program: ClosedJaxpr,
    kinds: Mapping[Var, Kind],
    *inputs: jax.Array,
) -> list[jax.Array]:
    """Run a program, and sum its sums over rows over the devices, too.

    Args:
        sharded: the axes for each table whose rows are sharded.
        program: traced as for one device, with its calls in line: by types, what comes of a sum
            of each device would differ as well.
        kinds: of its variables. The program is proved to treat rows alone, but for sums:
            see `row_locality`.
    """

    def rule(eqn: JaxprEqn, arrays: list[jax.Array]) -> list[jax.Array]:
        name = name_of(eqn)
        operand_kinds = [
            Replicated() if isinstance(v, Literal) else kinds[v] for v in eqn.invars
        ]
        tables = {
            kind.table for kind in operand_kinds if isinstance(kind, RowWise)
        } & sharded.keys()
        if name == "cond":
            # A branch may hold sums of its own, and `kinds` has the variables of the outer
            # program alone: it is proved again.
            which, *operands = arrays
            branches = []
            for branch in branches_of(eqn):
                inner = inlined(ClosedJaxpr(*branch))
                _, inner_kinds = classify(inner, inner, operand_kinds[1:])
                run = functools.partial(with_sums_over, sharded, inner, inner_kinds)
                branches.append(run)
            # A sum over devices is the same on all, a number of another branch may not be;
            # `switch` wants one type.
            every = [jax.eval_shape(branch, *operands) for branch in branches]
            return lax.switch(which, [_typed_as(every, f) for f in branches], *operands)
        # The rule does not enter loops: a sum in a body would stay that of one device.
        is_loop = tables and name in ("while", "scan")
        if is_loop and any(name_of(e) in (*NEUTRAL, "dot_general") for e in within([eqn])):
            raise NotRowLocalError(
                f"it may sum over rows inside a `{name}`, which in a shard_map would see the "
                "rows of one device alone",
                "Make the step outside of the shard_map, in the same jit: a ShardedTable is "
                "sharded there, too.",
            )
        outputs = bound(eqn, arrays)
        if tables and all(isinstance(kinds[v], Replicated) for v in eqn.outvars):
            # Rows went in and one number for all rows came out: a sum over rows.
            axes = tuple(axis for table in tables for axis in sharded[table])
            outputs = [_over_devices(name, x, axes) for x in outputs]
        return outputs

    return interpret(program.jaxpr, program.consts, inputs, rule)


def _typed_as(every: list[list[Shaped]], branch: ArraysFunction) -> ArraysFunction:
    """Return a branch whose outputs are typed as varying wherever another branch's are."""

    def run(*inputs: jax.Array) -> Sequence[jax.Array]:
        outputs = branch(*inputs)
        for shapes in every:
            outputs = list(map(varying_like, outputs, shapes))
        return outputs

    return run


def _over_devices(name: str, x: jax.Array, axes: Axes) -> jax.Array:
    """Reduce over all devices what each has reduced over its rows."""
    if name in ("reduce_sum", "dot_general"):
        return lax.psum(x, axes)
    if name == "reduce_and" and x.dtype == bool:
        return lax.psum((~x).astype(jnp.int32), axes) == 0
    if name == "reduce_or" and x.dtype == bool:
        return lax.psum(x.astype(jnp.int32), axes) > 0
    raise NotRowLocalError(
        f"in a shard_map it makes one number of all rows by `{name}`, for which jmask has no "
        "form over several devices",
        "Make the step outside of the shard_map, in the same jit.",
    )
