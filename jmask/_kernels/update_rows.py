"""Tables updated in the rows of a gradient, each once: a primitive that knows the device.

    update(tables, ids, rows, scalars)         ids unique, rows of equal ids summed

An optimizer is one function of unique ids and their rows. How these are made from a gradient
is decided where the program is lowered for a device:

| several CPUs or TPUs    | equal ids summed by sorting; the update in `fused` form |
| one CPU                 | equal ids found by hashing; the update in `fused` form  |
|   and gathered rows     | blocks of rows in the order of their ids, of several    |
|                         | tables side by side                                     |
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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import is_known, sum_dtype
from jmask._base.lowering import CallPrimitive, switched_on
from jmask._base.row_ids import Order
from jmask._base.shardings import Shards, automatically, entry, spec_of, varying_alike
from jmask._base.types import Function, IdVector, Index, PyTree, PyTreeDef, TableArray
from jmask._kernels import tuning
from jmask._kernels._tpu import choice
from jmask._kernels.coalesce import (
    coalesce_rows,
    in_order,
    summed_by_hashing,
    summed_where_first,
)
from jmask._kernels.gathered_rows import GatheredRows, Rows, rows_at
from jmask._kernels.rows import add_rows, is_of_numbers, zero_of
from jmask._kernels.sharded_rows import Exchange, routed, sent_to_shards, with_derivative_of

Tables = Sequence[jax.Array]


Form = Callable[["RowUpdate"], list[jax.Array]]
"""Computes the tables after an update of unique ids and summed rows."""


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """A function of the rows of a gradient, in one or more forms.

    No form closes over a traced array: JAX keeps the parameters of a primitive.
    """

    definition: Form  # in operations that can be batched and differentiated
    # The same for XLA's compilers for CPUs and TPUs, if there is another form.
    fused: Form | None = None
    # The same as a kernel for one TPU, if there is one; see `_tpu.row_updates`.
    kernel: Form | None = None
    # Whether ids need not be unique: rows of equal ids may come one at a time.
    additive: bool = False
    by_rows: bool = False  # whether it may take more than one entry of a row

    @property
    def fastest(self) -> Form:
        """The form for XLA's compilers for CPUs and TPUs."""
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
        return self.values.array() if isinstance(self.values, GatheredRows) else self.values

    @property
    def is_in_blocks(self) -> bool:
        """True if a CPU makes its rows block by block."""
        return self.order == "any" and isinstance(self.values, GatheredRows)

    def coalesced(self) -> "RowUpdate":
        """Return the same update with the rows of equal ids summed."""
        if self.order != "any":
            return self
        return self.summed(coalesce_rows, "sorted")

    def summed(self, way: Function, order: Order) -> "RowUpdate":
        """Return the same update with the rows of equal ids summed in this way."""
        ids, rows = way(self.ids, self.rows, self.tables[0].shape[0])
        return dataclasses.replace(self, ids=ids, values=rows, order=order)

    def as_needed(self) -> "RowUpdate":
        """Return the same update; an additive one may take equal ids as they come."""
        return self if self.update.additive else self.coalesced()


def updated(x: RowUpdate) -> list[jax.Array]:
    """Return the tables after an update."""
    return updated_together([x])[0]


def updated_together(updates: Sequence[RowUpdate]) -> list[list[jax.Array]]:
    """Return the tables after each of several updates, none of which needs another."""
    results: dict[int, list[jax.Array]] = {}
    for i, x in enumerate(updates):
        assert x.order != "any" or not any(map(jnp.ndim, x.scalars))
        # A state that was made under jit may be on every device: it goes to where its table is.
        main = max(x.tables, key=lambda table: any(spec_of(table)[:1]))
        shards = Shards.of(main, *x.tables, x.ids, *jax.tree.leaves(x.values))
        if 0 in x.values.shape or main.shape[0] == 0:
            results[i] = list(x.tables)
        elif shards.mesh is not None:
            results[i] = _on_shards(shards, x)
        elif not x.is_in_blocks:
            results[i] = _update_rows([x])
    # One equation, so that a CPU does the blocks of several tables side by side.
    rest = [i for i in range(len(updates)) if i not in results]
    tables = iter(_update_rows([updates[i] for i in rest]) if rest else ())
    results |= {i: [next(tables) for _ in updates[i].tables] for i in rest}
    return [results[i] for i in range(len(updates))]


def _on_shards(shards: Shards, x: RowUpdate) -> list[jax.Array]:
    """Update tables that are sharded by their types: each device updates its own rows.

    What the gradient has of them crosses the network once, for all tables.
    """
    # Rows are summed where they live. With arrays of entries ids are unique already, and rows
    # that may be added one at a time are summed for an exchange alone.
    exchange, count = Exchange.of(shards, x.ids), x.tables[0].shape[0]
    as_they_come = x.update.additive and exchange is None
    is_kept = as_they_come or any(map(jnp.ndim, x.scalars))
    is_sent = bool(shards.rows) and not is_kept and not shards.routed_over(x.ids, x.order)
    in_columns = any(shards.columns) and x.update.by_rows  # and needs all of them
    order: Order = "any"
    if is_sent and exchange is not None and not in_columns:  # each round updates the tables
        where = entry(exchange.batch)
    else:
        exchange = None
        if is_sent:
            ids, values = routed(shards, count, x.ids, x.rows)
            x = dataclasses.replace(x, ids=ids, values=values, order="routed")
        where = shards.routed_over(x.ids, x.order)
        order = "any" if x.order == "any" else "unique"
    of_rows = (where, *shards.columns)
    if in_columns:
        ids, values = shards.put(x.ids, (where,)), shards.put(x.rows, of_rows)
        tree: PyTreeDef
        arrays, tree = jax.tree.flatten(dataclasses.replace(x, ids=ids, values=values))
        defined = lambda *arrays: _defined(tree.unflatten(arrays))
        new: list[jax.Array]
        new = automatically(defined, *arrays, spec=[spec_of(y) for y in x.tables])
        return new

    def here(
        tables: list[jax.Array], ids: IdVector, values: jax.Array, *scalars: jax.Array
    ) -> list[jax.Array]:
        def take(places: IdVector, rows: jax.Array, tables: list[jax.Array]) -> list[jax.Array]:
            return updated(RowUpdate(x.update, tables, places, rows, scalars, order))

        size = tables[0].shape[0]
        if exchange is None:
            return take(shards.local(ids, size), values, tables)
        return sent_to_shards(exchange, ids, values, size, take, tables)

    def routed_first(
        tables: list[jax.Array], ids: IdVector, values: jax.Array, *scalars: jax.Array
    ) -> list[jax.Array]:
        ids, values = routed(shards, count, ids, values)
        return _on_shards(shards, RowUpdate(x.update, tables, ids, values, scalars, "routed"))

    specs = [shards.spec, (where,), of_rows]
    specs += [of_rows if jnp.ndim(y) else () for y in x.scalars]
    out = [shards.spec] * len(x.tables)
    run: Function = functools.partial(shards.run, here, specs=specs, out=out)
    run = run if exchange is None else with_derivative_of(routed_first, run)
    tables: list[jax.Array] = run(list(x.tables), x.ids, x.rows, *x.scalars)
    return tables


def add_to_rows(
    table: TableArray, ids: IdVector, values: Rows, order: Order = "any"
) -> jax.Array:
    """Return `table` with `table[ids] += values`, duplicates summed, in place if possible."""
    if 0 in ids.shape:
        return table
    if not isinstance(values, GatheredRows):
        return add_rows(table, ids, values, order)
    (total,) = updated(RowUpdate(ADDITION, [table], ids, values, [], order))
    return total


def _added(x: RowUpdate) -> list[jax.Array]:
    return [add_rows(x.tables[0], x.ids, x.rows, x.order) if x.ids.shape[0] else x.tables[0]]


ADDITION = Update(_added, additive=True)


# --- lowered for devices --------------------------------------------------------------------


def _defined(x: RowUpdate) -> list[jax.Array]:
    return x.update.definition(x.as_needed())


def _fused(x: RowUpdate) -> list[jax.Array]:
    return x.update.fastest(x.as_needed())


def each(form: Form) -> Callable[[Sequence[RowUpdate]], list[jax.Array]]:
    """Return the form for several updates, one after the other."""
    return lambda updates: [table for x in updates for table in form(x)]


def summed_first(form: Form) -> Form:
    """Return the form with the rows of equal ids summed first."""
    return lambda x: form(x.coalesced())


_update_rows: CallPrimitive[Sequence[RowUpdate]]
_update_rows = CallPrimitive(
    "jmask_update_rows",
    each(_defined),
    lambda updates: [table for x in updates for table in x.tables],
)


def _on_a_tpu(x: RowUpdate) -> list[jax.Array]:
    choice.warn_if_copied(x.tables[0].shape, x.tables[0].dtype)
    size = math.prod(x.values.shape) * x.values.dtype.itemsize
    is_large = is_known(size) and size >= tuning.LARGE_SUMS
    # XLA's scatters gain from sorted ids where tables are small, and the kernel never does.
    if x.order == "any" and is_large and choice.accepts(x.tables[:1], x.ids, []):
        x = x.summed(summed_where_first, "unique")
    return (x.update.kernel or x.update.fastest)(x.coalesced())


def _on_one_gpu(x: RowUpdate) -> list[jax.Array]:
    if x.update.additive and x.order == "any":
        # XLA makes of `x + (-y)`, the last operation of SGD, a difference, which is no atomic
        # addition to it but a loop of compare and swap: each entry waits for all others of its
        # row, a hundred times as long with frequent ids (jaxlib 0.12.0.1, an H200). Zeros for
        # padding, which is not written, make it a choice, and no negation.
        rows = x.rows
        valid = lax.expand_dims(x.ids < x.tables[0].shape[0], range(1, rows.ndim))
        x = dataclasses.replace(x, values=jnp.where(valid, rows, jnp.zeros_like(rows)))
    # A scatter of several tables is one kernel since jaxlib 0.12, and a loop over rows before.
    if jax.__version_info__ < (0, 12) or not switched_on():
        return _defined(x)
    first, *others = x.tables  # behind a barrier equal arrays are two: see below
    return _fused(dataclasses.replace(x, tables=[first, *lax.optimization_barrier(others)]))


def _on_one_cpu(updates: Sequence[RowUpdate]) -> list[jax.Array]:
    if updates[0].is_in_blocks:  # and so are all
        return _side_by_side(updates)
    hashed = lambda x: x.summed(summed_by_hashing, "unique") if is_hashed(x) else x
    return each(_in_one_round)(list(map(hashed, updates)))


def is_hashed(x: RowUpdate) -> bool:
    """Decide whether rows of equal ids are found by hashing.

    Not in a `shard_map`, where a device has room for little more than its share of the rows.
    """
    is_alone = not jax.sharding.get_abstract_mesh().manual_axes
    return is_alone and x.order == "any" and not x.update.additive and is_known(*x.ids.shape)


# --- gathered rows, in blocks ---------------------------------------------------------------
#
# No more than a block of the n rows is ever written, which stays in the cache of a core: on
# CPUs a batch of 10^5 lookups otherwise writes and reads its rows several times through memory,
# which the operating system has to find first. The ids are sorted, and rows of equal
# ids are summed in the order in which they come:
#
#     ids    [4, 1, 4, 2]      in order   1  2 | 4  4        blocks of two
#     rows   [a, b, c, d]                 b  d | a  c
#                                         ids 1, 2 with b, d; then id 4 with a + c
#
# A sum that goes on in the next block is carried there. Where each row is added is found before
# the loop. Loops of several tables run side by side in one:
#
#     table a, 3 blocks       1 2 3           the body of the loop: a block of each,
#     table b, 2 blocks       1 2 -           an empty one where a table has no more
#
# XLA's CPU runtime spreads the operations of a body over cores. Two loops it runs one after the
# other, though they are of different tables, since their temporaries lie in the same memory: 26
# tables of bags then take 1.2 to 1.6 times as long on two cores.


class _Loop(NamedTuple):
    """A loop over blocks that updates tables."""

    start: tuple[Tables, PyTree]  # the tables, and what else it carries
    block: Callable[[jax.Array, tuple[Tables, PyTree]], tuple[Tables, PyTree]]
    needed: Index  # how many blocks; those from `most` on change nothing
    most: int


def _side_by_side(updates: Sequence[RowUpdate]) -> list[jax.Array]:
    """Update tables block by block, those with about as many blocks in one loop."""
    bytes_of_row = [math.prod(x.values.shape[1:]) * x.values.dtype.itemsize for x in updates]
    size = tuning.block_size(sum(sorted(bytes_of_row)[-tuning.LOOPS_TOGETHER :]))
    loops = [
        (_as_they_come if x.update.additive else _summed_in_order)(x, size) for x in updates
    ]
    order = sorted(range(len(loops)), key=lambda i: -loops[i].most)
    results: dict[int, Tables] = {}
    while order:
        longest = loops[order[0]].most
        chosen = [i for i in order[: tuning.LOOPS_TOGETHER] if 2 * loops[i].most >= longest]
        order = order[len(chosen) :]
        results.update(zip(chosen, _in_one_loop([loops[i] for i in chosen]), strict=True))
    return [table for i in range(len(loops)) for table in results[i]]


def _in_one_loop(loops: Sequence[_Loop]) -> list[Tables]:
    def body(number: jax.Array, carried: list[PyTree]) -> list[PyTree]:
        return [loop.block(number, x) for loop, x in zip(loops, carried, strict=True)]

    count = functools.reduce(jnp.maximum, (loop.needed for loop in loops))
    carried = lax.fori_loop(0, count, body, [loop.start for loop in loops])
    return [tables for tables, _ in carried]


def _as_they_come(x: RowUpdate, size: int) -> _Loop:
    """Return the loop of an additive update, with equal ids."""
    count = x.ids.shape[0]
    size = min(size, count)
    blocks = -(-count // size)  # and one of padding
    missing = (blocks + 1) * size - count
    ids = jnp.pad(x.ids, (0, missing), constant_values=x.tables[0].shape[0])

    def block(number: jax.Array, carried: tuple[Tables, None]) -> tuple[Tables, None]:
        first = jnp.minimum(number, blocks) * size
        rows = rows_at(x.values, jnp.minimum(first + lax.iota(jnp.int32, size), count - 1))
        part = lax.dynamic_slice_in_dim(ids, first, size)
        new = dataclasses.replace(x, tables=carried[0], ids=part, values=rows)
        return x.update.fastest(new), None

    return _Loop((list(x.tables), None), block, blocks, blocks)


def _summed_in_order(x: RowUpdate, size: int) -> _Loop:
    """Return the loop of an update by sums of rows of equal ids, 16-bit ones in float32."""
    size = min(size, x.ids.shape[0])
    *plan, count = _plan(x.ids, x.tables[0].shape[0], size)
    most = plan[0].shape[0] - 1
    zero = jnp.zeros(x.values.shape[1:], sum_dtype(x.values.dtype))

    def block(number: jax.Array, carried: tuple[Tables, jax.Array]) -> tuple[Tables, jax.Array]:
        tables, open_sum = carried
        number = jnp.minimum(number, most)
        part = functools.partial(lax.dynamic_index_in_dim, index=number, keepdims=False)
        entries, slots, ids = map(part, plan)
        rows = rows_at(x.values, entries).astype(zero.dtype)
        sums = jnp.zeros((size + 1, *zero.shape), zero.dtype).at[0].set(open_sum)
        sums = add_rows(sums, slots, rows)
        new = dataclasses.replace(
            x, tables=tables, ids=ids, values=sums.astype(x.values.dtype), order="unique"
        )
        open_sum = lax.dynamic_index_in_dim(sums, slots[-1], keepdims=False)
        return x.update.fastest(new), open_sum

    start = list(x.tables), varying_alike(zero, x.ids)[0]
    return _Loop(start, block, count, most)


def _plan(ids: IdVector, rows: int, size: int) -> list[jax.Array]:
    """Return where the rows of each block are added.

    Returns:
        entries (blocks, size): which rows they are;
        slots (blocks, size): where each is added: 0 is the sum that the block before left open,
            and i + 1 a sum that begins with the row i;
        ids (blocks, size + 1): of the sums that are complete after the block, or padding;
        the number of blocks that are needed.
    """
    # All ids fit in n // size + 1 blocks. One more, of padding, completes the sum that the last
    # of these leaves open.
    blocks = ids.shape[0] // size + 2
    padding = blocks * size - ids.shape[0]
    ids, entries = in_order(ids)
    ids = jnp.pad(ids, (0, padding), constant_values=rows).reshape(blocks, size)
    entries = jnp.pad(entries, (0, padding)).reshape(blocks, size)
    # The id of the sum that a block leaves open is its last one. In the first block no sum is
    # open, so its own first id stands there, which begins no second sum.
    last = ids[:, -1:]
    open_ids = jnp.concatenate([ids[:1, :1], last[:-1]])
    begins = ids != jnp.concatenate([open_ids, ids[:, :-1]], 1)
    slots = jnp.where(begins, lax.broadcasted_iota(jnp.int32, ids.shape, 1) + 1, 0)
    sum_ids = jnp.concatenate([open_ids, jnp.where(begins, ids, rows)], 1)
    # Entries of one sum have the slot at which it begins, the greatest so far: by doublings, in
    # a loop, which XLA compiles five times faster than `lax.cummax`, two kernels for each power
    # of two, and runs two to five times faster (jaxlib 0.12.0).

    def twice_as_far(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        distance, slots = carried
        padded = jnp.concatenate([jnp.zeros_like(slots), slots], 1)
        before = lax.dynamic_slice_in_dim(padded, size - distance, size, 1)
        return 2 * distance, jnp.maximum(slots, before)

    start = jnp.int32(1), slots
    _, slots = lax.while_loop(lambda carried: carried[0] < size, twice_as_far, start)
    count = jnp.sum(last < rows, dtype=jnp.int32) + 1
    return [entries, slots, jnp.where(sum_ids == last, rows, sum_ids), count]


# --- several tables, each in a buffer of its own --------------------------------------------
#
# XLA makes two slots of zeros one array, as they are where a state is made in the program of
# its first step. A scatter that is passed an array twice is then wrong: its GPU compiler
# (jaxlib 0.12.0) writes both results into one buffer, its CPU compiler (0.10.0 to 0.12.0) gives
# them the wrong ones. tests/lazy/test_lazy_one_pass.py runs the smallest program that shows it.


def _in_one_round(x: RowUpdate) -> list[jax.Array]:
    """Do an update as `_fused`, in a loop of one round: what a loop carries are two arrays.

    XLA cannot know that this one has a single round: it does not count.
    """
    if all(map(is_of_numbers, x.tables)):
        flat = lambda arrays: [y.reshape(-1) if jnp.ndim(y) else y for y in arrays]
        (rows,), tables, scalars = flat([x.rows]), flat(x.tables), flat(x.scalars)
        new = dataclasses.replace(x, tables=tables, values=rows, scalars=scalars)
        pairs = zip(_in_one_round(new), x.tables, strict=True)
        return [y.reshape(old.shape) for y, old in pairs]
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
# as the table holds. For CPUs and TPUs it is the fused form: XLA cannot shard a kernel over
# devices, and is believed to add rows faster that are promised to be distinct.
_update_rows.lower(each(_defined), each(summed_first(_defined)))
_update_rows.lower(each(_on_one_gpu), each(summed_first(_defined)), platform="gpu")
_update_rows.lower(each(_on_a_tpu), each(summed_first(_fused)), platform="tpu")
_update_rows.lower(_on_one_cpu, each(summed_first(_in_one_round)), platform="cpu")
