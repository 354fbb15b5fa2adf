"""Tables updated in the rows of a gradient, each once: a primitive that knows the machine.

    update(tables, ids, rows, scalars)         ids unique, rows of equal ids summed

What an optimizer does to rows is one function of unique ids and their rows. How these are made
of a gradient is decided where the program is lowered for a device:

| one CPU                 | equal ids found by hashing: `hash_dedup`                |
|   and gathered rows     | blocks of rows in the order of their ids: `row_blocks`  |
| several CPUs or TPUs    | all sums at once; the update in its `fused` form        |
| one TPU                 | all sums at once; the update as a `kernel`              |
| one GPU, jax from 0.12  | all sums at once; the update in its `fused` form        |
| GPUs, vmap, derivatives | all sums at once; the update as it is defined           |

What is additive is added one by one instead, but on TPUs, and where XLA may have spread it over
several devices.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmask._base.array_types import explicit_sharding, varying_alike, with_whole_rows
from jmask._base.lowering import in_one_device, lower, primitive, switched_on
from jmask._base.row_ids import Order
from jmask._kernels import tpu_choice, tpu_rows
from jmask._kernels.block_loops import BlockLoop, block_size, run_side_by_side, together
from jmask._kernels.coalesce import coalesce_rows
from jmask._kernels.gather import zero_of
from jmask._kernels.gathered_rows import GatheredRows, Rows, as_array
from jmask._kernels.hash_dedup import deduplicated_tables
from jmask._kernels.odd_windows import in_windows
from jmask._kernels.row_blocks import rows_in_blocks, sums_in_blocks
from jmask._kernels.rows import add_rows

OnUniqueRows = Callable[..., list[jax.Array]]
"""(tables, ids, rows, scalars, is_sorted) -> tables; if sorted, padding comes last."""


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """What is done to the rows of a gradient.

    Attributes:
        definition: in operations that can be batched and differentiated.
        fused: the same for XLA's compilers for CPUs and TPUs, if there is another form.
        kernel: the same as a kernel for one TPU, if there is one; see `tpu_rows`.
        captures: whether it holds tracers, which no primitive may keep.
        additive: whether ids need not be unique: rows of equal ids may come one by one.
    """

    definition: OnUniqueRows
    fused: OnUniqueRows | None = None
    kernel: OnUniqueRows | None = None
    captures: bool = False
    additive: bool = False

    @property
    def fastest(self) -> OnUniqueRows:
        return self.fused or self.definition


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """An update that is to be done.

    Attributes:
        update: what is done.
        tables: arrays (V, ...).
        ids (n,): canonical.
        values (n, *row): one row for each id; rows of equal ids are summed.
        scalars: passed on to the update. If ids are unique, there may be arrays among them
            that belong to the entries, which then stay where they are.
        order: of the ids.
    """

    update: Update
    tables: Sequence[jax.Array]
    ids: jax.Array
    values: Rows
    scalars: Sequence[jax.Array]
    order: Order

    def __post_init__(self) -> None:
        assert self.order != "any" or not any(map(jnp.ndim, self.scalars))


def updated(given: Sequence[RowUpdate | list[Any]]) -> list[list[Any]]:
    """The tables of each update, all done at once; lists are results that there are already."""
    results = [x if isinstance(x, list) else _without_primitive(x) for x in given]
    remaining = [
        _part_of(x)
        for x, result in zip(given, results, strict=True)
        if isinstance(x, RowUpdate) and result is None
    ]
    parts = tuple(part for _, part in remaining)
    operands = [array for arrays, _ in remaining for array in arrays]
    made = _update_rows_p.bind(*operands, parts=parts) if parts else []
    tables = iter(_of_parts(made, [part.tables for part in parts]))
    return [next(tables) if result is None else result for result in results]


def _without_primitive(x: RowUpdate) -> list[jax.Array] | None:
    """The result where the primitive is not for such arrays."""
    if 0 in x.values.shape or x.tables[0].shape[0] == 0:
        return list(x.tables)
    if not (x.update.captures or (_is_placed(x) and x.update.additive)):
        return None
    operands, part = _part_of(x)
    return _by_definition(*operands, parts=(part,))


def _is_placed(x: RowUpdate) -> bool:
    return explicit_sharding(*x.tables, x.ids, *jax.tree.leaves(x.values)) is not None


@dataclasses.dataclass(frozen=True)
class _Part:
    """What is known of an update beside its operands: tables, scalars, ids, values.

    Attributes:
        is_alone: whether it is that of one device in a `shard_map`.
    """

    update: Update
    tables: int
    scalars: int
    form: Any
    order: Order
    is_alone: bool

    @property
    def count(self) -> int:
        return self.tables + self.scalars + 1 + self.form.num_leaves


def _part_of(x: RowUpdate) -> tuple[list[jax.Array], _Part]:
    ids, values, scalars, order = x.ids, x.values, x.scalars, x.order
    if _is_placed(x) and not x.update.additive:
        values = as_array(values)
        if order == "any":
            ids, values = coalesce_rows(ids, values, x.tables[0].shape[0])
            order = "sorted"
        ids, values, *scalars = map(with_whole_rows, (ids, values, *scalars))
    leaves, form = jax.tree.flatten(values)
    operands = varying_alike(*x.tables, *scalars, ids, *leaves)
    part = _Part(x.update, len(x.tables), len(scalars), form, order, in_one_device())
    return list(operands), part


def _of_parts(arrays: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    remaining = iter(arrays)
    return [list(itertools.islice(remaining, count)) for count in counts]


def add_to_rows(table: jax.Array, ids: jax.Array, values: Rows, order: Order = "any") -> Any:
    """`table` with `table[ids] += values`, duplicates summed, in place when possible."""
    if not isinstance(values, GatheredRows):
        return add_rows(table, ids, values, coalesced=order == "sorted")
    ((total,),) = updated([RowUpdate(ADDITION, [table], ids, values, [], order)])
    return total


def _added(
    tables: Sequence[jax.Array],
    ids: jax.Array,
    rows: jax.Array,
    scalars: Sequence[jax.Array],
    is_sorted: bool,
) -> list[jax.Array]:
    return [add_rows(tables[0], ids, rows, coalesced=is_sorted)]


def _added_by_kernel(
    tables: Sequence[jax.Array],
    ids: jax.Array,
    rows: jax.Array,
    scalars: Sequence[jax.Array],
    is_sorted: bool,
) -> list[jax.Array]:
    (table,) = tables
    if not tpu_choice.accepts(tables, ids, [rows]):
        return _added(tables, ids, rows, scalars, is_sorted)
    rows = rows.astype(table.dtype)
    return tpu_rows.update(
        lambda old, step: [old + step], tables, ids, [rows], padding_last=is_sorted
    )


ADDITION = Update(_added, kernel=_added_by_kernel, additive=True)


Operands = Sequence[jax.Array]
Parts = tuple[_Part, ...]
Pair = tuple[Operands, _Part]


def _each(
    run: Callable[[Operands, _Part], list[jax.Array]], given: Operands, parts: Parts
) -> list[jax.Array]:
    return [x for pair in _pairs(given, parts) for x in run(*pair)]


def _pairs(given: Operands, parts: Parts) -> list[Pair]:
    operands = _of_parts(given, [part.count for part in parts])
    return list(zip(operands, parts, strict=True))


def _shapes(*given: Any, parts: Parts) -> list[Any]:
    return _each(lambda operands, part: list(operands[: part.tables]), given, parts)


def _named(operands: Operands, part: _Part) -> Any:
    """Tables, scalars, ids and values."""
    *others, ids = operands[: part.count - part.form.num_leaves]
    values = part.form.unflatten(operands[part.count - part.form.num_leaves :])
    return others[: part.tables], others[part.tables :], ids, values


def _all_at_once(
    run: OnUniqueRows, operands: Operands, part: _Part, one_by_one: bool = False
) -> list[jax.Array]:
    if not one_by_one:
        operands, part = _summed(operands, part)
    arrays, scalars, ids, values = _named(operands, part)
    return run(arrays, ids, as_array(values), scalars, part.order == "sorted")


def _summed(operands: Operands, part: _Part) -> Pair:
    """The same with rows of equal ids summed."""
    if part.order != "any":
        return operands, part
    arrays, scalars, ids, values = _named(operands, part)
    ids, rows = coalesce_rows(ids, as_array(values), arrays[0].shape[0])
    part = dataclasses.replace(part, order="sorted", form=jax.tree.structure(rows))
    return [*arrays, *scalars, ids, rows], part


def _defined(operands: Operands, part: _Part) -> list[jax.Array]:
    update = part.update
    return _all_at_once(update.definition, operands, part, one_by_one=update.additive)


def _by_definition(*given: jax.Array, parts: Parts) -> list[jax.Array]:
    return _each(_defined, given, parts)


_update_rows_p = primitive("jmask_update_rows", _by_definition, _shapes)


def _on_tpus(*given: jax.Array, parts: Parts) -> list[jax.Array]:
    def run(operands: Operands, part: _Part) -> list[jax.Array]:
        if part.is_alone:
            return _by_kernel(operands, part)
        # Rows that are promised to be distinct are believed to be added faster than others.
        return _all_at_once(part.update.fastest, operands, part)

    return _each(run, given, parts)


def _on_one_tpu(*given: jax.Array, parts: Parts) -> list[jax.Array]:
    return _each(_by_kernel, given, parts)


def _by_kernel(operands: Operands, part: _Part) -> list[jax.Array]:
    tpu_choice.warn_if_copied(operands[0])
    return _all_at_once(part.update.kernel or part.update.fastest, operands, part)


def _on_one_gpu(*given: jax.Array, parts: Parts) -> list[jax.Array]:
    # A scatter of several tables is one kernel since jaxlib 0.12, and a loop over rows before.
    is_one_kernel = jax.__version_info__ >= (0, 12) and switched_on()
    return _each(_fused if is_one_kernel else _defined, given, parts)


def _fused(operands: Operands, part: _Part) -> list[jax.Array]:
    update = part.update
    return _all_at_once(update.fastest, operands, part, one_by_one=update.additive)


def _summed_if_spread(given: Operands, parts: Parts) -> list[Pair]:
    """The same on several devices, with rows of equal ids summed.

    What is added one by one, and spread over devices, XLA adds to a table of zeros on each, of
    which it sums all: it moves as much as the table holds.
    """
    pairs = _pairs(given, parts)
    return [pair if pair[1].is_alone else _summed(*pair) for pair in pairs]


def _summed_by_definition(*given: jax.Array, parts: Parts) -> list[jax.Array]:
    return [x for pair in _summed_if_spread(given, parts) for x in _defined(*pair)]


def _on_cpus(*given: jax.Array, parts: Parts) -> list[jax.Array]:
    pairs = _summed_if_spread(given, parts)
    return [table for tables in _side_by_side(pairs) for table in tables]


def _side_by_side(pairs: Sequence[Pair]) -> list[list[jax.Array]]:
    """As `_fused`, for several updates at once; of each the tables are arrays of their own."""
    several = [pair for pair in pairs if pair[1].tables > 1]
    results = iter([tables for group in together(several) for tables in _in_one_round(group)])
    return [next(results) if pair[1].tables > 1 else _fused(*pair) for pair in pairs]


def _in_one_round(pairs: Sequence[Pair]) -> list[list[jax.Array]]:
    """As `_fused`, in a loop of one round.

    XLA gives the wrong buffers to a scatter that is passed an array twice, as two slots of
    zeros are where a state is made in the program of its first step; the smallest program that
    shows it, and that of loops in combiners, is in docs/performance.md. What a loop carries are
    different arrays, and XLA cannot know that this one has a single round: it does not count.
    """

    def round_of(carried: tuple[jax.Array, list[list[jax.Array]]]) -> Any:
        is_open, tables = carried
        new = [
            _fused([*arrays, *operands[part.tables :]], part)
            for arrays, (operands, part) in zip(tables, pairs, strict=True)
        ]
        return jnp.zeros_like(is_open), new

    *_, ids, _ = _named(*pairs[0])
    tables = [list(operands[: part.tables]) for operands, part in pairs]
    carried = (zero_of(ids[0]) == 0, tables)
    return lax.while_loop(lambda carried: carried[0], round_of, carried)[1]


def _on_one_cpu(*given: jax.Array, parts: Parts) -> list[jax.Array]:
    parts = tuple(dataclasses.replace(x, update=_of_windows(x.update)) for x in parts)
    pairs = _pairs(given, parts)
    are_in_blocks = [_is_in_blocks(*pair) for pair in pairs]
    in_blocks = [pair for pair, is_in in zip(pairs, are_in_blocks, strict=True) if is_in]
    others = [pair for pair, is_in in zip(pairs, are_in_blocks, strict=True) if not is_in]
    size = block_size([_bytes_of_row(*pair) for pair in in_blocks])
    of_blocks = iter(run_side_by_side([_loop(*pair, size) for pair in in_blocks]))
    at_once = iter(_side_by_side(_with_unique_ids(others)))
    results = [next(of_blocks if is_in else at_once) for is_in in are_in_blocks]
    return [table for tables in results for table in tables]


def _of_windows(update: Update) -> Update:
    """The update of windows of rows, if it does the same to each entry."""
    if not (update.fused or update.additive):
        return update

    def run(tables: Any, ids: Any, rows: Any, scalars: Any, is_sorted: bool) -> list[jax.Array]:
        def of_windows(tables: Operands, ids: jax.Array, arrays: Operands) -> list[jax.Array]:
            return update.fastest(tables, ids, arrays[0], arrays[1:], is_sorted)

        each = (jnp.broadcast_to(x, rows.shape) if x.ndim else x for x in scalars)
        return in_windows(of_windows, tables, ids, [rows, *each], update.additive)

    return dataclasses.replace(update, fused=run)


def _is_in_blocks(operands: Operands, part: _Part) -> bool:
    return part.order == "any" and isinstance(_named(operands, part)[-1], GatheredRows)


def _bytes_of_row(operands: Operands, part: _Part) -> int:
    *_, values = _named(operands, part)
    return math.prod(values.shape[1:]) * values.dtype.itemsize


def _loop(operands: Operands, part: _Part, size: int) -> BlockLoop:
    arrays, scalars, ids, values = _named(operands, part)

    def block(tables: list[jax.Array], ids: jax.Array, rows: jax.Array) -> list[jax.Array]:
        return part.update.fastest(tables, ids, rows, scalars, False)

    kind = rows_in_blocks if part.update.additive else sums_in_blocks
    return kind(block, arrays, ids, values, size)


def _with_unique_ids(pairs: Sequence[Pair]) -> list[Pair]:
    """The same with unique ids, where the update asks for them."""
    is_hashed = [part.order == "any" and not part.update.additive for _, part in pairs]
    named = [_named(*pair) for pair, hashed in zip(pairs, is_hashed, strict=True) if hashed]
    tables = [(ids, values, arrays[0].shape[0]) for arrays, _, ids, values in named]
    unique = iter(zip(named, deduplicated_tables(tables), strict=True))
    results = []
    for (operands, part), hashed in zip(pairs, is_hashed, strict=True):
        if hashed:
            (arrays, scalars, _, _), (ids, values) = next(unique)
            operands = [*arrays, *scalars, ids, values]
            part = dataclasses.replace(part, order="unique", form=jax.tree.structure(values))
        results.append((operands, part))
    return results


lower(_update_rows_p, on_one=_by_definition, on_several=_summed_by_definition)
for platform in ("cuda", "rocm"):
    lower(_update_rows_p, _on_one_gpu, _summed_by_definition, platform=platform)
# XLA cannot spread a kernel over devices.
lower(_update_rows_p, on_one=_on_one_tpu, on_several=_on_tpus, platform="tpu")
# Where arrays are spread over devices, entries are not where their equals are.
lower(_update_rows_p, on_one=_on_one_cpu, on_several=_on_cpus, platform="cpu")
