"""One pass over the touched rows: a scatter whose combiner is the optimizer.

StableHLO's scatter takes several operands with their updates, and its combiner may be any
elementwise computation. With parameter and slots as operands and the row rule as combiner,
one operation reads, computes and writes each touched row:

    scatter(param, m, v; ids; grad, lr, -)  with  (p, m, v, g, lr, -) -> (p', m', v')

XLA runs it in place, with no temporaries, on CPU and TPU. The combiner can capture nothing,
so with k operands there are k updates: the gradient and k - 1 scalars. Ids must be unique
apart from padding. On GPUs, for which XLA makes such a scatter a loop over the rows, one at a
time, under vmap and where derivatives are taken, the same is done by gather, compute, scatter.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.typing import ArrayLike

from jmask._base.forms import aval_of
from jmask._base.jaxprs import evaluate, only_arithmetic
from jmask._base.row_ids import Order
from jmask._base.types import Argument, Arrays, ArraysFunction, IdVector, Shaped
from jmask._kernels._tpu import choice, row_updates
from jmask._kernels.gathered_rows import Rows
from jmask._kernels.rows import gather_unique_rows, never_alone, set_rows
from jmask._kernels.update_rows import RowUpdate, Update


def update_elementwise(
    combiner: ArraysFunction,
    tables: Sequence[jax.Array],
    ids: IdVector,
    grad: Rows,
    scalars: Sequence[ArrayLike],
    order: Order,
) -> RowUpdate:
    """Make the update that applies `combiner` to the rows `ids`, in one pass if XLA allows.

    `combiner(*table entries, grad entry, *scalars)` returns new table entries, elementwise. It
    closes over no traced array. Rows of equal ids are summed first; rows that are not in `ids`
    keep their bits.
    """
    # 1. The combiner as a program of single entries. No form closes over a traced array.
    dtypes, count = [x.dtype for x in tables], len(tables)
    others = [jnp.asarray(x) for x in scalars]

    def cast(*entries: jax.Array) -> list[jax.Array]:
        return [x.astype(d) for x, d in zip(combiner(*entries), dtypes, strict=True)]

    entries = [jax.ShapeDtypeStruct((), x.dtype) for x in (*tables, grad, *others)]
    program = jax.make_jaxpr(cast)(*entries)

    # 2. By definition: what a single scatter computes, in three operations.
    rule = entry_by_entry(functools.partial(evaluate, program))

    def by_parts(x: RowUpdate) -> list[jax.Array]:
        old = [gather_unique_rows(table, x.ids, x.order) for table in x.tables]
        new = rule(*old, x.rows, *x.scalars)
        pairs = zip(x.tables, new, strict=True)
        return [set_rows(table, x.ids, rows, x.order) for table, rows in pairs]

    # 3. As one scatter. XLA refuses one of several precisions; of a loop in it XLA aborts.
    def in_one_scatter(x: RowUpdate) -> list[jax.Array]:
        grad = x.rows
        rows = [jnp.broadcast_to(y, grad.shape) for y in (grad, *x.scalars)]
        # A scatter takes as many updates as operands: room that is left over is filled.
        rows += [rows[0]] * (count - len(rows))
        ids, *rows = never_alone(x.tables[0].shape[0], x.ids, *rows)
        operands = *x.tables, ids[:, None], *rows
        is_sorted = x.order == "sorted"
        return _scatter_rows_p.bind(*operands, program=program, is_sorted=is_sorted)

    alike = len({x.dtype for x in entries}) == 1 and only_arithmetic(program.jaxpr)
    fused = in_one_scatter if alike and len(others) < count else None

    # 4. As a kernel for TPUs, where there is one. It passes all rows, then all scalars; the
    # rule takes them as they came.
    in_kernel = functools.partial(evaluate, program, rule=choice.bound_in_kernel)
    kernel_rule = entry_by_entry(in_kernel)

    def by_kernel(x: RowUpdate) -> list[jax.Array]:
        rows = [x.rows, *(jnp.broadcast_to(y, x.values.shape) for y in x.scalars if y.ndim)]
        is_scalar = [not y.ndim for y in x.scalars]
        scalars = [y for y in x.scalars if not y.ndim]
        if not choice.accepts(x.tables, x.ids, rows, scalars, program.jaxpr):
            return (fused or by_parts)(x)

        def body(*entries: jax.Array) -> Sequence[jax.Array]:
            old, (grad, *given) = entries[:count], entries[count:]
            arrays, scalars = iter(given), iter(given[len(rows) - 1 :])
            others = (next(scalars if alone else arrays) for alone in is_scalar)
            return kernel_rule(*old, grad, *others)

        jaxpr = program.jaxpr
        used = {id(v) for v in (*(v for e in jaxpr.eqns for v in e.invars), *jaxpr.outvars)}
        read = [i for i in range(count) if id(jaxpr.invars[i]) in used]
        is_sorted = x.order == "sorted"
        return row_updates.update(
            body, x.tables, x.ids, rows, scalars, padding_last=is_sorted, read=read
        )

    return RowUpdate(Update(by_parts, fused, by_kernel), tables, ids, grad, others, order)


def entry_by_entry(scalar_function: ArraysFunction) -> ArraysFunction:
    """Map a function of single entries over arrays of one shape, and scalars."""

    def function(*arrays: jax.Array) -> Arrays:
        # Scalars are not broadcast: they would have to be sharded as the arrays are.
        axes = [0 if x.ndim else None for x in arrays]
        mapped = scalar_function
        for _ in range(max(x.ndim for x in arrays)):
            mapped = jax.vmap(mapped, axes)
        return tuple(mapped(*arrays))

    return function


# --- the scatter -------------------------------------------------------------------------

_scatter_rows_p = Primitive("jmask_scatter_rows")
_scatter_rows_p.multiple_results = True


@_scatter_rows_p.def_abstract_eval  # type: ignore[untyped-decorator]  # of JAX
def _shapes_of_tables(*operands: Shaped, program: ClosedJaxpr, is_sorted: bool) -> list[Shaped]:
    return list(operands[: len(operands) // 2])


def _lowered(
    ctx: Argument,
    *operands: Argument,
    program: ClosedJaxpr,
    is_sorted: bool,
    on_tpus: bool = False,
) -> Sequence[Argument]:
    """Lower to a single scatter with the program as its combiner."""
    count = len(operands) // 2
    if on_tpus:
        is_sorted = is_sorted and choice.sorted_pays(ctx.avals_in[0], ctx.avals_in[count])
    tables, ids, updates = operands[:count], operands[count], operands[count + 1 :]
    rank = len(ctx.avals_in[0].shape)
    scatter = stablehlo.ScatterOp(
        [x.type for x in tables],
        tables,
        ids,
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
    dtype = aval_of(program.jaxpr.invars[0]).dtype
    entry = mlir.ir.RankedTensorType.get((), mlir.dtype_to_ir_type(dtype))
    block = scatter.regions[0].blocks.append(*[entry] * (2 * count))
    with mlir.ir.InsertionPoint(block):
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


mlir.register_lowering(_scatter_rows_p, _lowered)
mlir.register_lowering(
    _scatter_rows_p, functools.partial(_lowered, on_tpus=True), platform="tpu"
)
