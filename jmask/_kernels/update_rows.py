"""Tables updated in the rows of a gradient, each once: a primitive that knows the device.

    update(tables, ids, rows, scalars)         ids unique, rows of equal ids summed

An optimizer is one function of unique ids and their rows. How these are made from a gradient
is decided where the program is lowered for a device:

| CPUs, several TPUs      | equal ids summed by sorting; the update in `fused` form |
| one CPU, gathered rows  | blocks of rows in the order of their ids: `row_blocks`  |
| one TPU                 | equal ids summed by sorting; the update as a `kernel`   |
|   and many rows         | equal ids found by sorting; the update as a `kernel`    |
| one GPU, jax from 0.12  | equal ids summed by sorting; the update in `fused` form |
| GPUs, vmap, derivatives | the same; the update as it is defined                   |

Additive updates skip de-duplication and use an accumulating scatter, except on TPUs and where
XLA may shard the operands over devices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.lowering import CallDefinition, GroupedPrimitive, Results, switched_on
from jmask._base.row_ids import Order
from jmask._base.shardings import Shards, entry, spec_of, varying_alike
from jmask._base.types import IdVector, PyTreeDef, RowArray, TableArray
from jmask._kernels._tpu import choice, narrow_rows, row_updates  # noqa: F401
from jmask._kernels.coalesce import are_large, coalesce_rows, summed_where_first
from jmask._kernels.gathered_rows import GatheredRows, Rows, as_array
from jmask._kernels.row_blocks import (
    BlockLoop,
    block_size,
    rows_in_blocks,
    run_side_by_side,
    sums_in_blocks,
)
from jmask._kernels.rows import add_rows, is_routed, zero_of
from jmask._kernels.sharded_rows import routed, with_own_rows

Tables = Sequence[jax.Array]


Form = Callable[["RowUpdate"], list[jax.Array]]
"""What the tables become, by an update of unique ids and summed rows."""


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """A function of the rows of a gradient, in one or more forms."""

    definition: Form  # in operations that can be batched and differentiated
    # The same for XLA's compilers for CPUs and TPUs, if there is another form.
    fused: Form | None = None
    # The same as a kernel for one TPU, if there is one; see `_tpu.row_updates`.
    kernel: Form | None = None
    captures: bool = False  # whether it holds tracers, which no primitive may keep
    # Whether ids need not be unique: rows of equal ids may come one at a time.
    additive: bool = False

    @property
    def fastest(self) -> Form:
        return self.fused or self.definition


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tables", "ids", "values", "scalars"],
    meta_fields=["update", "order"],
)
@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """An update to be done."""

    update: Update  # what is done
    tables: Tables  # arrays (V, ...)
    ids: IdVector  # (n,): canonical
    values: Rows  # (n, *row): one row for each id; rows of equal ids are summed
    # Passed on to the update. If ids are unique, there may be arrays among them that belong to
    # the entries, which then stay where they are.
    scalars: Sequence[jax.Array]
    order: Order  # of the ids

    @property
    def rows(self) -> jax.Array:
        """The values as one array."""
        return as_array(self.values)

    @property
    def is_sorted(self) -> bool:
        """True if ids are sorted, with padding last."""
        return self.order == "sorted"

    def coalesced(self) -> "RowUpdate":
        """Return the same update with the rows of equal ids summed."""
        if self.order != "any":
            return self
        ids, rows = coalesce_rows(self.ids, self.rows, self.tables[0].shape[0])
        return dataclasses.replace(self, ids=ids, values=rows, order="sorted")

    def as_needed(self) -> "RowUpdate":
        """Return the same update; an additive one may take equal ids as they come."""
        return self if self.update.additive else self.coalesced()


def updated(updates: Sequence[RowUpdate | list[jax.Array]]) -> list[list[jax.Array]]:
    """Return the tables of each update, all done together; lists are results already there."""
    results = [x if isinstance(x, list) else _without_primitive(x) for x in updates]
    calls = [x for x, y in zip(updates, results, strict=True) if y is None]
    tables = iter(_update_rows([_prepared(x) for x in calls if isinstance(x, RowUpdate)]))
    return [next(tables) if result is None else result for result in results]


def _without_primitive(x: RowUpdate) -> list[jax.Array] | None:
    """Return the result where the primitive is not for such arrays."""
    assert x.order != "any" or not any(map(jnp.ndim, x.scalars))
    if 0 in x.values.shape or x.tables[0].shape[0] == 0:
        return list(x.tables)
    # A state that was made under jit may be on every device: it goes to where its table is.
    main = max(x.tables, key=lambda table: any(spec_of(table)[:1]))
    shards = Shards.of(main, *x.tables, x.ids, *jax.tree.leaves(x.values))
    if shards is not None:
        return _on_shards(shards, main, x)
    return _defined(_prepared(x)) if x.update.captures else None


def _on_shards(shards: Shards, main: jax.Array, x: RowUpdate) -> list[jax.Array]:
    """Update tables that are sharded by their types: each device updates its own rows.

    What the gradient has of them crosses the network once, for all tables.
    """
    ids, values = x.ids, x.rows
    # What is traced outside cannot be used on each device, and a sum along a row, one number of
    # which is kept, needs all of its columns.
    is_per_row = any(y.shape != x.tables[0].shape for y in x.tables)
    if x.update.captures or (any(shards.columns) and is_per_row):
        if shards.rows and not is_routed(shards, ids, x.order):
            ids, values = routed(main, ids, values)
            x = dataclasses.replace(x, ids=ids, order="routed")
        values = shards.put(shards.spec_of_rows(shards.batch(ids)))(values)
        return _defined(_prepared(dataclasses.replace(x, values=values)))
    is_there, count = is_routed(shards, x.ids, x.order), x.ids.shape[0]
    batch = entry(shards.rows) if is_there else shards.batch(x.ids)
    of_entries = {i: y for i, y in enumerate(x.scalars) if jnp.ndim(y)}
    numbers = {i: y for i, y in enumerate(x.scalars) if not jnp.ndim(y)}

    def updated_here(
        tables: list[jax.Array],
        ids: IdVector,
        rows: list[jax.Array],
        numbers: dict[int, jax.Array],
    ) -> list[jax.Array]:
        axes, size = None if is_there else batch, tables[0].shape[0]

        def with_all(
            ids: IdVector, rows: list[jax.Array], tables: list[jax.Array]
        ) -> list[jax.Array]:
            values, *more = rows
            scalars = numbers | dict(zip(of_entries, more, strict=True))
            own = [scalars[i] for i in range(len(scalars))]
            order: Order = "any" if x.order == "any" else "unique"
            places = shards.local(ids, size)
            (new,) = updated([RowUpdate(x.update, tables, places, values, own, order)])
            return new

        return with_own_rows(shards, axes, ids, rows, size, count, with_all, tables)

    specs = [shards.spec, (batch,), shards.spec_of_rows(batch), ()]
    rows = [values, *of_entries.values()]
    out = [shards.spec] * len(x.tables)
    return shards.run(updated_here, list(x.tables), x.ids, rows, numbers, specs=specs, out=out)


def _prepared(x: RowUpdate) -> RowUpdate:
    x = dataclasses.replace(x, tables=list(x.tables), scalars=list(x.scalars))
    tree: PyTreeDef
    operands, tree = jax.tree.flatten(x)
    return tree.unflatten(varying_alike(*operands))


def add_to_rows(
    table: TableArray, ids: IdVector, values: Rows, order: Order = "any"
) -> jax.Array:
    """Return `table` with `table[ids] += values`, duplicates summed, in place if possible."""
    if 0 in ids.shape:
        return table
    if not isinstance(values, GatheredRows):
        return add_rows(table, ids, values, order)
    ((total,),) = updated([RowUpdate(ADDITION, [table], ids, values, [], order)])
    return total


def _added(x: RowUpdate) -> list[jax.Array]:
    return [add_rows(x.tables[0], x.ids, x.rows, x.order) if x.ids.shape[0] else x.tables[0]]


def _added_by_kernel(x: RowUpdate) -> list[jax.Array]:
    rows = x.rows
    if not choice.accepts(x.tables, x.ids, [rows]):
        return _added(x)
    rows = rows.astype(x.tables[0].dtype)
    return row_updates.update(
        lambda old, step: [old + step], x.tables, x.ids, [rows], padding_last=x.is_sorted
    )


ADDITION = Update(_added, kernel=_added_by_kernel, additive=True)


# --- lowered for devices --------------------------------------------------------------------


def _defined(x: RowUpdate) -> list[jax.Array]:
    return x.update.definition(x.as_needed())


def _fused(x: RowUpdate) -> list[jax.Array]:
    return x.update.fastest(x.as_needed())


def _each(form: Form) -> CallDefinition[RowUpdate]:
    return lambda updates: list(map(form, updates))


_by_definition = _each(_defined)
_update_rows = GroupedPrimitive("jmask_update_rows", _by_definition, lambda x: list(x.tables))


def _on_a_tpu(x: RowUpdate) -> list[jax.Array]:
    choice.warn_if_copied(x.tables[0])
    # XLA's scatters gain from sorted ids where tables are small, and the kernel never does.
    if x.order == "any" and are_large(x.values) and choice.accepts(x.tables[:1], x.ids, []):
        ids, rows = summed_where_first(x.ids, x.rows, x.tables[0].shape[0])
        x = dataclasses.replace(x, ids=ids, values=rows, order="unique")
    return (x.update.kernel or x.update.fastest)(x.coalesced())


def _on_one_gpu(x: RowUpdate) -> list[jax.Array]:
    # A scatter of several tables is one kernel since jaxlib 0.12, and a loop over rows before.
    is_one_kernel = jax.__version_info__ >= (0, 12) and switched_on()
    return _behind_a_barrier(x) if is_one_kernel else _defined(x)


def _on_one_cpu(updates: Sequence[RowUpdate]) -> Results:
    in_blocks = [
        i
        for i, x in enumerate(updates)
        if x.order == "any" and isinstance(x.values, GatheredRows)
    ]
    rows = (updates[i].values for i in in_blocks)
    size = block_size([math.prod(x.shape[1:]) * x.dtype.itemsize for x in rows])
    tables = run_side_by_side([_loop(updates[i], size) for i in in_blocks])
    results = dict(zip(in_blocks, tables, strict=True))
    return [results[i] if i in results else _in_one_round(x) for i, x in enumerate(updates)]


def _loop(x: RowUpdate, size: int) -> BlockLoop:
    order: Order = "any" if x.update.additive else "unique"

    def block(tables: list[jax.Array], ids: IdVector, rows: RowArray) -> list[jax.Array]:
        return x.update.fastest(
            dataclasses.replace(x, tables=tables, ids=ids, values=rows, order=order)
        )

    kind = rows_in_blocks if x.update.additive else sums_in_blocks
    return kind(block, list(x.tables), x.ids, x.values, size)


# --- several tables, each in a buffer of its own --------------------------------------------
#
# XLA makes two slots of zeros one array, as they are where a state is made in the program of
# its first step. A scatter that is passed an array twice is then wrong: its GPU compiler
# (jaxlib 0.12.0) writes both results into one buffer, its CPU compiler (0.10.0 to 0.12.0) gives
# them the wrong ones. tests/lazy/test_lazy_one_pass.py runs the smallest program that shows it.


def _behind_a_barrier(x: RowUpdate) -> list[jax.Array]:
    """Do an update as `_fused`: arrays behind a barrier are two, on GPUs."""
    first, *others = x.tables
    return _fused(dataclasses.replace(x, tables=[first, *lax.optimization_barrier(others)]))


def _in_one_round(x: RowUpdate) -> list[jax.Array]:
    """Do an update as `_fused`, in a loop of one round: what a loop carries are two arrays.

    XLA cannot know that this one has a single round: it does not count.
    """
    if len(x.tables) == 1:
        return _fused(x)

    def one_round(
        carried: tuple[jax.Array, list[jax.Array]],
    ) -> tuple[jax.Array, list[jax.Array]]:
        is_open, tables = carried
        return jnp.zeros_like(is_open), _fused(dataclasses.replace(x, tables=tables))

    carried = (zero_of(x.ids[0]) == 0, list(x.tables))
    return lax.while_loop(lambda carried: carried[0], one_round, carried)[1]


# On several devices equal ids are summed first. XLA would add sharded rows that come one at a
# time to a table of zeros on each device, and sum these tables over devices: it moves as much
# as the table holds.
_coalesced = _each(lambda x: x.update.definition(x.coalesced()))
# XLA cannot shard a kernel over devices, and it is believed to add rows faster that are
# promised to be distinct.
_coalesced_and_fused = _each(lambda x: x.update.fastest(x.coalesced()))
_coalesced_in_one_round = _each(lambda x: _in_one_round(x.coalesced()))
_on_one_tpu = _each(_on_a_tpu)

_update_rows.lower(_by_definition, _coalesced)
_update_rows.lower(_each(_on_one_gpu), _coalesced, platform="gpu")
_update_rows.lower(_on_one_tpu, _coalesced_and_fused, platform="tpu")
_update_rows.lower(_on_one_cpu, _coalesced_in_one_round, platform="cpu")
