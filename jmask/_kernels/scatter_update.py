"""One pass over the touched rows: a scatter whose combiner is the optimizer.

StableHLO's scatter takes several operands with their updates, and its combiner may be any
elementwise computation. With parameter and slots as operands and the row rule as combiner,
one operation reads, computes and writes each touched row:

    scatter(param, m, v; ids; grad, lr, -)  with  (p, m, v, g, lr, -) -> (p', m', v')

XLA runs it in place, with no temporaries, on CPU and TPU. The combiner can capture nothing,
so k operands have room for the gradient and k - 1 scalars. Ids must be unique apart from
padding. On GPUs, for which XLA makes such a scatter a loop over the rows, one at a time,
under vmap and where derivatives are taken, the same is done by gather, compute, scatter.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

from jmask._base.array_types import explicit_sharding, varying_alike
from jmask._base.jaxprs import evaluate, only_arithmetic
from jmask._base.row_ids import Order
from jmask._kernels.coalesce import coalesce_rows
from jmask._kernels.gather import zero_of
from jmask._kernels.hash_dedup import deduplicated_rows
from jmask._kernels.rows import gather_rows, set_rows

Combiner = Callable[..., Sequence[Any]]


def update_rows(
    combiner: Combiner,
    tables: Sequence[jax.Array],
    ids: jax.Array,
    grad: jax.Array,
    scalars: Sequence[Any],
    order: Order,
) -> list[jax.Array]:
    """Tables with `combiner` applied to the rows `ids`, in one pass where XLA allows.

    Args:
        combiner: (*table entries, grad entry, *scalars) -> new table entries, elementwise.
        tables: arrays (V, *row).
        ids (n,): canonical.
        grad (n, *row): the gradient of these rows; that of equal ids is summed first.
        scalars: what else the combiner takes.
        order: of the ids.

    Returns:
        The new tables; rows that are not in `ids` keep their bits.
    """
    dtypes = [x.dtype for x in tables]
    ids, grad, *arrays = varying_alike(ids, grad, *tables, *map(jnp.asarray, scalars))
    tables, scalars = arrays[: len(tables)], arrays[len(tables) :]

    def cast(*entries: Any) -> list[Any]:
        return [x.astype(d) for x, d in zip(combiner(*entries), dtypes, strict=True)]

    if explicit_sharding(*tables, ids, grad) is not None:
        ids, grad, order = _without_equal_ids(ids, grad, tables[0].shape[0], order)
    # XLA refuses a scatter of several precisions.
    one_dtype = len({x.dtype for x in (*tables, grad, *scalars)}) == 1
    empty = 0 in grad.shape or 0 in tables[0].shape
    if one_dtype and not empty and len(scalars) < len(tables):
        given = [*tables, grad, *scalars]
        entries = [jax.ShapeDtypeStruct((), x.dtype) for x in given]
        program = jax.make_jaxpr(cast)(*entries)
        # A traced hyperparameter cannot be captured; of a loop XLA aborts.
        if not program.consts and only_arithmetic(program.jaxpr):
            how = {"tables": len(tables), "program": program, "order": order}
            return _update_rows_p.bind(*given, ids, **how)
    return _gather_compute_scatter(cast, tables, ids, grad, scalars, order)


def _without_equal_ids(
    ids: jax.Array, grad: jax.Array, rows: int, order: Order
) -> tuple[jax.Array, jax.Array, Order]:
    if order != "any":
        return ids, grad, order
    ids, grad = coalesce_rows(ids, grad, rows)
    return ids, grad, "sorted"


def _gather_compute_scatter(
    combiner: Combiner,
    tables: Sequence[jax.Array],
    ids: jax.Array,
    grad: jax.Array,
    others: Sequence[jax.Array],
    order: Order,
) -> list[jax.Array]:
    # Arrays among the others belong to rows that are distinct.
    ids, grad, order = _without_equal_ids(ids, grad, tables[0].shape[0], order)
    is_sorted = order == "sorted"
    old = [gather_rows(x, ids, coalesced=is_sorted) for x in tables]
    new = combiner(*old, grad, *others)
    return [
        set_rows(x, ids, rows, coalesced=is_sorted) for x, rows in zip(tables, new, strict=True)
    ]


# --- the primitive -----------------------------------------------------------------------

_update_rows_p = Primitive("jmask_update_rows")
_update_rows_p.multiple_results = True


def _by_parts(
    *given: jax.Array, tables: int, program: ClosedJaxpr, order: Order
) -> list[jax.Array]:
    """The definition: what the single scatter computes, in three operations."""
    *arrays, ids = given
    grad = arrays[tables]
    rule = entry_by_entry(functools.partial(evaluate, program.jaxpr, program.consts))
    return _gather_compute_scatter(
        rule, arrays[:tables], ids, grad, arrays[tables + 1 :], order
    )


def entry_by_entry(scalar_function: Callable[..., Any]) -> Combiner:
    """A function of single entries as one of arrays, which are broadcast to each other."""

    def function(*given: jax.Array) -> tuple[Any, ...]:
        rows = jnp.broadcast_arrays(*given)
        mapped = scalar_function
        for _ in range(rows[0].ndim):
            mapped = jax.vmap(mapped)
        return tuple(mapped(*rows))

    return function


@_update_rows_p.def_abstract_eval
def _shapes(*given: Any, tables: int, program: ClosedJaxpr, order: Order) -> list[Any]:
    return list(given[:tables])


_update_rows_p.def_impl(jax.jit(_by_parts, static_argnames=("tables", "program", "order")))


def _batched(given: Any, dims: Any, **how: Any) -> Any:
    mapped = jax.vmap(functools.partial(_by_parts, **how), in_axes=tuple(dims))
    return mapped(*given), (0,) * how["tables"]


batching.primitive_batchers[_update_rows_p] = _batched


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> Any:
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(_by_parts, **how), tuple(primals), tangents)


ad.primitive_jvps[_update_rows_p] = _derivative


def _at_once(
    *given: jax.Array, tables: int, program: ClosedJaxpr, order: Order, on_cpu: bool = False
) -> list[jax.Array]:
    """One scatter."""
    *arrays, ids = given
    ids, arrays[tables], order = _without_equal_ids(ids, arrays[tables], len(arrays[0]), order)

    def scattered(old: Sequence[jax.Array]) -> list[jax.Array]:
        return _scattered(old, ids, arrays[tables:], program, order == "sorted")

    if on_cpu and tables > 1:
        return _apart(scattered, arrays[:tables], ids)
    return scattered(arrays[:tables])


def _apart(
    update: Callable[[list[jax.Array]], list[jax.Array]],
    tables: list[jax.Array],
    ids: jax.Array,
) -> list[jax.Array]:
    """`update(tables)`, each of which is an array of its own.

    On CPUs XLA gives the wrong buffers to a scatter that is passed an array twice, as two slots
    of zeros are where a state is made in the program of its first step; the smallest program
    that shows it, and that of loops in combiners, is in docs/performance.md. What a loop
    carries are different arrays, and XLA cannot know that this one has a single round.
    """

    def round_of(carried: tuple[jax.Array, list[jax.Array]]) -> Any:
        is_open, tables = carried
        return jnp.zeros_like(is_open), update(tables)

    carried = (zero_of(ids[0]) == 0, tables)
    return lax.while_loop(lambda carried: carried[0], round_of, carried)[1]


def _on_one_cpu(
    *given: jax.Array, tables: int, program: ClosedJaxpr, order: Order
) -> list[jax.Array]:
    """One scatter; equal ids are found by hashing, for which rows need no order."""
    *arrays, ids = given
    if order == "any":
        ids, arrays[tables] = deduplicated_rows(ids, arrays[tables], arrays[0].shape[0])
        order = "unique"
    return _at_once(*arrays, ids, tables=tables, program=program, order=order, on_cpu=True)


def _on_cpu(ctx: Any, *operands: Any, **how: Any) -> Any:
    # Where arrays are spread over devices, entries are not where their equals are.
    one_device = getattr(ctx.module_context.axis_context, "num_devices", None) == 1
    update = _on_one_cpu if one_device else functools.partial(_at_once, on_cpu=True)
    return _lowered(update)(ctx, *operands, **how)


# --- the scatter -------------------------------------------------------------------------

_scatter_rows_p = Primitive("jmask_scatter_rows")
_scatter_rows_p.multiple_results = True


def _scattered(
    tables: Sequence[jax.Array],
    ids: jax.Array,
    rows: Sequence[jax.Array],
    program: ClosedJaxpr,
    is_sorted: bool,
) -> list[jax.Array]:
    shape = (*ids.shape, *tables[0].shape[1:])
    rows = [jnp.broadcast_to(x, shape) for x in rows]
    # A scatter takes as many updates as operands: room that is left over is filled.
    rows += [rows[0]] * (len(tables) - len(rows))
    return _scatter_rows_p.bind(*tables, ids, *rows, program=program, is_sorted=is_sorted)


@_scatter_rows_p.def_abstract_eval
def _shapes_of_tables(*operands: Any, program: ClosedJaxpr, is_sorted: bool) -> list[Any]:
    return list(operands[: len(operands) // 2])


def _tensor_type(aval: Any) -> Any:
    return mlir.ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype))


def _one_scatter(ctx: Any, *operands: Any, program: ClosedJaxpr, is_sorted: bool) -> Any:
    """Lowering to a single scatter with the program as its combiner."""
    count = len(operands) // 2
    tables, ids, updates = operands[:count], operands[count], operands[count + 1 :]
    rank = len(ctx.avals_in[0].shape)
    of_ids = ctx.avals_in[count]
    column = stablehlo.reshape(
        _tensor_type(jax.ShapeDtypeStruct((*of_ids.shape, 1), of_ids.dtype)), ids
    )
    scatter = stablehlo.ScatterOp(
        [_tensor_type(aval) for aval in ctx.avals_out],
        tables,
        column,
        updates,
        stablehlo.ScatterDimensionNumbers.get(
            update_window_dims=list(range(1, rank)),
            inserted_window_dims=[0],
            input_batching_dims=[],
            scatter_indices_batching_dims=[],
            scattered_dims_to_operand_dims=[0],
            index_vector_dim=1,
        ),
        indices_are_sorted=mlir.ir.BoolAttr.get(is_sorted),
        unique_indices=mlir.ir.BoolAttr.get(True),
    )
    entry = _tensor_type(program.jaxpr.invars[0].aval)
    block = scatter.regions[0].blocks.append(*[entry] * (2 * count))
    with mlir.ir.InsertionPoint(block):
        results: Any
        results, _ = mlir.jaxpr_subcomp(
            ctx.module_context,
            program.jaxpr,
            ctx.name_stack,
            mlir.TokenSet(),
            [],
            *block.arguments[: len(program.jaxpr.invars)],
            dim_var_values=ctx.dim_var_values,
            const_lowering=ctx.const_lowering,
            outer_traceback=ctx.traceback,
        )
        stablehlo.ReturnOp(list(results))
    return scatter.results


mlir.register_lowering(_scatter_rows_p, _one_scatter)


def _lowered(function: Callable[..., Any]) -> Any:
    return mlir.lower_fun(function, multiple_results=True)


mlir.register_lowering(_update_rows_p, _lowered(_by_parts))
mlir.register_lowering(_update_rows_p, _lowered(_at_once), platform="tpu")
mlir.register_lowering(_update_rows_p, _on_cpu, platform="cpu")
