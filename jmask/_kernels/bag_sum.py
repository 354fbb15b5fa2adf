"""Sums of rows, bag by bag, of which the rows are never written out.

    table [[1, 2],     positions [2, 0, 2]      sums [[6, 8],       row 2 + row 0
           [3, 4],     bags      [0, 0, 1]            [5, 6]]       row 2
           [5, 6]]

On a CPU some hundred rows are read, and added to their bags, at a time: they stay in the cache
of a core, where all n rows of a large batch would go through memory twice. Derivatives are
those of a gather and a sum.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jmask._base.precision import wide
from jmask._kernels.gather import Gather
from jmask._kernels.rows import add_rows

# Rows that are read at a time: enough for all cores, and few enough for their caches.
_BLOCK = 4096


def bag_sum(
    table: jax.Array,
    positions: jax.Array,
    bag_of_entry: jax.Array | None,
    weights: jax.Array | None,
    bags: int,
    fill: float,
) -> jax.Array:
    """Sums (bags, *row) of the rows of each bag, in float32 at least.

    No array is spread over devices by its type, or differs from one to the other.

    Args:
        table (V, *row): floating; not empty.
        positions (n,): canonical ids; V reads `fill`. n > 0.
        bag_of_entry (n,): canonical: `bags` where an entry is in none. None if each bag has
            n / bags entries, one after the other.
        weights (n,): of the entries, in the dtype of the sums; None for ones.
        bags: how many, > 0.
        fill: 0 or nan.
    """
    if positions.shape[0] <= _BLOCK:
        return _by_parts(table, positions, bag_of_entry, weights, bags, fill)
    return _sum(bags, fill, table, positions, bag_of_entry, weights)


def _by_parts(
    table: jax.Array,
    positions: jax.Array,
    bag_of_entry: jax.Array | None,
    weights: jax.Array | None,
    bags: int,
    fill: float,
    linear: bool = False,
) -> jax.Array:
    """The definition: all rows, and their sums; if `linear`, what JAX can transpose."""
    rows = _read(table, positions, weights, fill, linear)
    if bag_of_entry is None:
        rows = rows.reshape(bags, positions.shape[0] // bags, *rows.shape[1:])
        return jnp.sum(rows, 1, dtype=rows.dtype)
    zeros = jnp.zeros((bags, *rows.shape[1:]), rows.dtype)
    return add_rows(zeros, bag_of_entry, rows, coalesced=False)


def _read(
    table: jax.Array,
    positions: jax.Array,
    weights: jax.Array | None,
    fill: float,
    linear: bool = False,
) -> jax.Array:
    fills = lax.GatherScatterMode.FILL_OR_DROP
    gather = Gather.of_rows(table.shape, fills, fill_value=fill)
    read = gather.plain if linear else gather
    rows = read(table, positions[:, None]).astype(wide(table.dtype))
    return rows if weights is None else rows * weights.reshape((-1,) + (1,) * (rows.ndim - 1))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _sum(
    bags: int,
    fill: float,
    table: jax.Array,
    positions: jax.Array,
    bag_of_entry: jax.Array | None,
    weights: jax.Array | None,
) -> jax.Array:
    operands, form = jax.tree.flatten((table, positions, bag_of_entry, weights))
    return _bag_sum_p.bind(*operands, form=form, bags=bags, fill=fill)


@_sum.defjvp
def _derivative(bags: int, fill: float, primals: Any, tangents: Any) -> Any:
    table, positions, bag_of_entry, weights = primals
    entries = positions, bag_of_entry
    tangent = _by_parts(tangents[0], *entries, weights, bags, 0, linear=True)
    if weights is not None:
        tangent += _by_parts(table, *entries, tangents[3], bags, fill)
    return _sum(bags, fill, *primals), tangent


_bag_sum_p = Primitive("jmask_bag_sum")


def _defined(*operands: jax.Array, form: Any, bags: int, fill: float) -> jax.Array:
    table, positions, bag_of_entry, weights = form.unflatten(operands)
    return _by_parts(table, positions, bag_of_entry, weights, bags, fill)


_bag_sum_p.def_impl(jax.jit(_defined, static_argnames=("form", "bags", "fill")))


@_bag_sum_p.def_abstract_eval
def _shape(*operands: Any, form: Any, bags: int, fill: float) -> Any:
    table = operands[0]
    return table.update(shape=(bags, *table.shape[1:]), dtype=wide(table.dtype))


def _batched(operands: Any, dims: Any, **how: Any) -> Any:
    mapped = jax.vmap(functools.partial(_defined, **how), in_axes=tuple(dims))
    return mapped(*operands), 0


batching.primitive_batchers[_bag_sum_p] = _batched


def _in_blocks(*operands: jax.Array, form: Any, bags: int, fill: float) -> jax.Array:
    table, positions, bag_of_entry, weights = form.unflatten(operands)
    count = positions.shape[0]
    blocks = -(-count // _BLOCK)
    missing = blocks * _BLOCK - count
    if bag_of_entry is None:
        bag_of_entry = lax.iota(jnp.int32, count) // (count // bags)
    positions = jnp.pad(positions, (0, missing), constant_values=table.shape[0])
    bag_of_entry = jnp.pad(bag_of_entry, (0, missing), constant_values=bags)
    weights = None if weights is None else jnp.pad(weights, (0, missing))

    def block(number: jax.Array, sums: jax.Array) -> jax.Array:
        of_block = functools.partial(
            lax.dynamic_slice_in_dim, start_index=number * _BLOCK, slice_size=_BLOCK
        )
        block_weights = None if weights is None else of_block(weights)
        rows = _read(table, of_block(positions), block_weights, fill)
        return add_rows(sums, of_block(bag_of_entry), rows, coalesced=False)

    zeros = jnp.zeros((bags, *table.shape[1:]), wide(table.dtype))
    return lax.fori_loop(0, blocks, block, zeros)


def _lowered(function: Any) -> Any:
    return mlir.lower_fun(function, multiple_results=False)


def _on_cpu(ctx: Any, *operands: Any, **how: Any) -> Any:
    # Where arrays are spread over devices, each block would go between them.
    one_device = getattr(ctx.module_context.axis_context, "num_devices", None) == 1
    return _lowered(_in_blocks if one_device else _defined)(ctx, *operands, **how)


mlir.register_lowering(_bag_sum_p, _lowered(_defined))
mlir.register_lowering(_bag_sum_p, _on_cpu, platform="cpu")
