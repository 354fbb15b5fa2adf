"""Tables updated in the rows of a gradient, each once: a primitive that knows the machine.

    update(tables, ids, rows, scalars)         ids unique, rows of equal ids summed

What an optimizer does to rows is one function of unique ids and their rows. How these are made
of a gradient is decided where the program is lowered for a device:

| one CPU                 | equal ids found by hashing: `hash_dedup`                |
|   and factored rows     | blocks of rows in the order of their ids: `row_blocks`  |
| several CPUs, TPUs      | all sums at once; the update in its `fused` form        |
| GPUs, vmap, derivatives | all sums at once; the update as it is defined           |
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jmask._base.array_types import explicit_sharding, varying_alike
from jmask._base.row_ids import Order
from jmask._kernels.coalesce import coalesce_rows
from jmask._kernels.factored_rows import FactoredRows, Rows, as_array
from jmask._kernels.gather import zero_of
from jmask._kernels.hash_dedup import deduplicated_rows
from jmask._kernels.row_blocks import update_in_blocks
from jmask._kernels.rows import add_rows

OnUniqueRows = Callable[..., list[jax.Array]]
"""(tables, ids, rows, scalars, is_sorted) -> tables; if sorted, padding comes last."""


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """What is done to the rows of a gradient.

    Attributes:
        definition: in operations that can be batched and differentiated.
        fused: the same for XLA's compilers for CPUs and TPUs, if there is another form.
        captures: whether it holds tracers, which no primitive may keep.
        additive: whether ids need not be unique: rows of equal ids may come one by one.
    """

    definition: OnUniqueRows
    fused: OnUniqueRows | None = None
    captures: bool = False
    additive: bool = False

    @property
    def fastest(self) -> OnUniqueRows:
        return self.fused or self.definition


def update_rows(
    update: Update,
    tables: Sequence[jax.Array],
    ids: jax.Array,
    values: Rows,
    scalars: Sequence[jax.Array],
    order: Order,
) -> list[jax.Array]:
    """Tables updated with the sums of the rows of equal ids.

    Args:
        update: what is done.
        tables: arrays (V, ...).
        ids (n,): canonical.
        values (n, *row): one row for each id.
        scalars: passed on to the update. If ids are unique, there may be arrays among them
            that belong to the entries.
        order: of the ids.
    """
    if 0 in values.shape or tables[0].shape[0] == 0:
        return list(tables)
    leaves, form = jax.tree.flatten(values)
    is_placed = explicit_sharding(*tables, ids, *leaves) is not None
    if is_placed and not update.additive:
        ids, values = coalesce_rows(ids, as_array(values), tables[0].shape[0])
        order = "sorted"
        leaves, form = jax.tree.flatten(values)
    given = varying_alike(*tables, *scalars, ids, *leaves)
    how: Any = {"tables": len(tables), "update": update, "form": form, "order": order}
    if update.captures or (is_placed and update.additive):
        return _by_definition(*given, **how)
    return _update_rows_p.bind(*given, **how)


def add_to_rows(table: jax.Array, ids: jax.Array, values: Rows, order: Order = "any") -> Any:
    """`table` with `table[ids] += values`, duplicates summed, in place when possible."""
    if not isinstance(values, FactoredRows):
        return add_rows(table, ids, values, coalesced=order == "sorted")
    return update_rows(ADDITION, [table], ids, values, [], order)[0]


def _added(
    tables: Sequence[jax.Array],
    ids: jax.Array,
    rows: jax.Array,
    scalars: Sequence[jax.Array],
    is_sorted: bool,
) -> list[jax.Array]:
    return [add_rows(tables[0], ids, rows, coalesced=is_sorted)]


ADDITION = Update(_added, additive=True)


_update_rows_p = Primitive("jmask_update_rows")
_update_rows_p.multiple_results = True


@_update_rows_p.def_abstract_eval
def _shapes(*given: Any, tables: int, **how: Any) -> list[Any]:
    return list(given[:tables])


def _parts(given: Sequence[jax.Array], tables: int, form: Any) -> Any:
    """Tables, scalars, ids and values."""
    *others, ids = given[: len(given) - form.num_leaves]
    values = form.unflatten(given[len(given) - form.num_leaves :])
    return others[:tables], others[tables:], ids, values


def _all_at_once(
    run: OnUniqueRows,
    given: Sequence[jax.Array],
    tables: int,
    form: Any,
    order: Order,
    one_by_one: bool = False,
) -> list[jax.Array]:
    arrays, scalars, ids, values = _parts(given, tables, form)
    values = as_array(values)
    if order == "any" and not one_by_one:
        ids, values = coalesce_rows(ids, values, arrays[0].shape[0])
        order = "sorted"
    return run(arrays, ids, values, scalars, order == "sorted")


def _by_definition(*given: jax.Array, update: Update, **how: Any) -> list[jax.Array]:
    return _all_at_once(update.definition, given, one_by_one=update.additive, **how)


_update_rows_p.def_impl(
    jax.jit(_by_definition, static_argnames=("tables", "update", "form", "order"))
)


def _batched(given: Any, dims: Any, **how: Any) -> Any:
    mapped = jax.vmap(functools.partial(_by_definition, **how), in_axes=tuple(dims))
    return mapped(*given), (0,) * how["tables"]


batching.primitive_batchers[_update_rows_p] = _batched


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> Any:
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(_by_definition, **how), tuple(primals), tangents)


ad.primitive_jvps[_update_rows_p] = _derivative


def _on_tpu(*given: jax.Array, update: Update, **how: Any) -> list[jax.Array]:
    # Rows that are promised to be distinct are believed to be added faster than others.
    return _all_at_once(update.fastest, given, **how)


def _fused(*given: jax.Array, update: Update, **how: Any) -> list[jax.Array]:
    return _all_at_once(update.fastest, given, one_by_one=update.additive, **how)


def _on_cpus(*given: jax.Array, tables: int, **how: Any) -> list[jax.Array]:
    """As `_fused`, the tables being arrays of their own.

    XLA gives the wrong buffers to a scatter that is passed an array twice, as two slots of
    zeros are where a state is made in the program of its first step; the smallest program that
    shows it, and that of loops in combiners, is in docs/performance.md. What a loop carries are
    different arrays, and XLA cannot know that this one has a single round.
    """

    if tables == 1:
        return _fused(*given, tables=tables, **how)

    def round_of(carried: tuple[jax.Array, list[jax.Array]]) -> Any:
        is_open, arrays = carried
        return jnp.zeros_like(is_open), _fused(*arrays, *given[tables:], tables=tables, **how)

    carried = (zero_of(given[_ids(given, how)][0]) == 0, list(given[:tables]))
    return lax.while_loop(lambda carried: carried[0], round_of, carried)[1]


def _ids(given: Sequence[jax.Array], how: dict[str, Any]) -> int:
    return len(given) - how["form"].num_leaves - 1


def _on_one_cpu(
    *given: jax.Array, update: Update, tables: int, form: Any, order: Order
) -> list[jax.Array]:
    arrays, scalars, ids, values = _parts(given, tables, form)
    if order == "any" and isinstance(values, FactoredRows):

        def block(tables: list[jax.Array], ids: jax.Array, rows: jax.Array) -> list[jax.Array]:
            return update.fastest(tables, ids, rows, scalars, True)

        return update_in_blocks(block, arrays, ids, values, one_by_one=update.additive)
    if order == "any" and not update.additive:
        ids, values = deduplicated_rows(ids, values, arrays[0].shape[0])
        given, order = (*arrays, *scalars, ids, values), "unique"
    return _on_cpus(*given, update=update, tables=tables, form=form, order=order)


def _lowered(function: Callable[..., Any]) -> Any:
    return mlir.lower_fun(function, multiple_results=True)


def _on_cpu(ctx: Any, *operands: Any, **how: Any) -> Any:
    # Where arrays are spread over devices, entries are not where their equals are.
    one_device = getattr(ctx.module_context.axis_context, "num_devices", None) == 1
    return _lowered(_on_one_cpu if one_device else _on_cpus)(ctx, *operands, **how)


mlir.register_lowering(_update_rows_p, _lowered(_by_definition))
mlir.register_lowering(_update_rows_p, _lowered(_on_tpu), platform="tpu")
mlir.register_lowering(_update_rows_p, _on_cpu, platform="cpu")
