"""Sums of rows, bag by bag, of which the rows are never written out.

    table [[1, 2],     positions [2, 0, 2]      sums [[6, 8],       row 2 + row 0
           [3, 4],     bags      [0, 0, 1]            [5, 6]]       row 2
           [5, 6]]

On a CPU bags that are equally long are summed column by column (`bag_columns`). Of others a
block of rows is read, and added to their bags, at a time: they stay in the cache of a core,
where all n rows of a large batch would go through memory twice. The bags of several tables are
summed side by side. Derivatives are those of a gather and a sum.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jmask._base.lowering import lower, primitive
from jmask._base.precision import wide
from jmask._base.shapes import is_known
from jmask._kernels.bag_columns import most_columns, read_rows, sum_columns
from jmask._kernels.block_loops import BlockLoop, block_size, run_side_by_side
from jmask._kernels.gather import Gather, in_branch
from jmask._kernels.odd_windows import add_in_windows
from jmask._kernels.rows import add_rows

# Rows that are read at once.
_FEW = 4096


def bag_sum(
    table: jax.Array,
    positions: jax.Array,
    bag_of_entry: jax.Array | None,
    weights: jax.Array | None,
    valid: jax.Array | None,
    bags: int,
    fill: float,
) -> jax.Array:
    """Sums (bags, *row) of the rows of each bag, in float32 at least.

    No array is spread over devices by its type, or differs from one to the other.

    Args:
        table (V, *row): floating; not empty.
        positions (n,): canonical ids, n > 0; V reads `fill`. Of bags that are equally long
            (bags, k).
        bag_of_entry (n,): canonical: `bags` where an entry is in none. None if the bags are
            equally long.
        weights: of the entries, of the same shape, in the dtype of the sums; None for ones.
        valid: a boolean; where it is False all sums begin with nan. None for True.
        bags: how many, > 0.
        fill: 0 or nan.
    """
    given = table, positions, bag_of_entry, weights, valid
    if not is_known(*positions.shape, bags) or not are_many(positions.size):
        return _by_parts(*given, bags, fill)
    operands, form = jax.tree.flatten(given)
    (sums,) = _bag_sum_p.bind(*operands, parts=(_Part(form, bags, fill),))
    return sums


def are_many(entries: int) -> bool:
    """Whether so many rows are better not written out."""
    return entries > _FEW


def _by_parts(
    table: jax.Array,
    positions: jax.Array,
    bag_of_entry: jax.Array | None,
    weights: jax.Array | None,
    valid: jax.Array | None,
    bags: int,
    fill: float,
    linear: bool = False,
) -> jax.Array:
    """The definition: all rows, and their sums; if `linear`, what JAX can transpose."""
    read = Gather.plain if linear else Gather.__call__
    rows = read_rows(table, positions, weights, fill, read)
    start = _start(table, bags, valid)
    if bag_of_entry is not None:
        return add_rows(start, bag_of_entry, rows, coalesced=False)
    total = jnp.sum(rows, 1, dtype=rows.dtype)
    return total if valid is None else start + total


def _start(table: jax.Array, bags: int, valid: jax.Array | None) -> jax.Array:
    """Sums (bags, *row) of nothing."""
    dtype = wide(table.dtype)
    start = 0 if valid is None else jnp.where(valid, 0, jnp.asarray(math.nan, dtype))
    return jnp.full((bags, *table.shape[1:]), start, dtype)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one table's sums have beside their operands."""

    form: Any
    bags: int
    fill: float

    @property
    def count(self) -> int:
        return self.form.num_leaves


def bag_sums(equations: Sequence[Any], operands: Sequence[jax.Array]) -> list[jax.Array]:
    """What several equations of this primitive make, of their parameters and all operands."""
    parts = [part for params in equations for part in params["parts"]]
    return _bag_sum_p.bind(*operands, parts=tuple(parts))


def _parts_of(operands: Any, parts: tuple[_Part, ...]) -> Iterator[tuple[_Part, Any]]:
    remaining = iter(operands)
    for part in parts:
        yield part, part.form.unflatten(itertools.islice(remaining, part.count))


def _defined(*operands: jax.Array, parts: tuple[_Part, ...]) -> list[jax.Array]:
    return [_of_part(part, x) for part, x in _parts_of(operands, parts)]


def _of_part(part: _Part, given: Any) -> jax.Array:
    table, positions, bag_of_entry, weights, valid = given
    return _by_parts(table, positions, bag_of_entry, weights, valid, part.bags, part.fill)


def _shapes(*operands: Any, parts: tuple[_Part, ...]) -> list[Any]:
    return [
        table.update(shape=(part.bags, *table.shape[1:]), dtype=wide(table.dtype))
        for part, (table, *_) in _parts_of(operands, parts)
    ]


BAG_SUM = "jmask_bag_sum"
_bag_sum_p = primitive(BAG_SUM, _defined, _shapes)
"""Sums of one table or more: parameters and operands of several may be put together."""


def _derivative(primals: Any, tangents: Any, parts: tuple[_Part, ...]) -> Any:
    values = _bag_sum_p.bind(*primals, parts=parts)
    each = zip(_parts_of(primals, parts), _parts_of(tangents, parts), strict=True)
    return values, [_tangent(part, given, along) for (part, given), (_, along) in each]


def _tangent(part: _Part, given: Any, along: Any) -> Any:
    table, positions, bag_of_entry, weights, _ = given
    entries = positions, bag_of_entry
    of_table, _, _, of_weights, _ = along
    terms = []
    if not isinstance(of_table, ad.Zero):
        terms.append(_by_parts(of_table, *entries, weights, None, part.bags, 0, linear=True))
    if weights is not None and not isinstance(of_weights, ad.Zero):
        terms.append(_by_parts(table, *entries, of_weights, None, part.bags, part.fill))
    if not terms:
        value = jax.eval_shape(functools.partial(_of_part, part), given)
        return jnp.zeros(value.shape, value.dtype)
    return sum(terms[1:], terms[0])


ad.primitive_jvps[_bag_sum_p] = _derivative


def _on_a_cpu(*operands: jax.Array, parts: tuple[_Part, ...]) -> list[jax.Array]:
    each = list(_parts_of(operands, parts))
    columns = [i for i, x in enumerate(each) if is_short(*x, most_columns(len(each)))]
    rest = [i for i in range(len(each)) if i not in columns]
    found: dict[int, jax.Array] = {}
    if columns:
        chosen = tuple(parts[i] for i in columns)
        operands_of = [each[i][1] for i in columns]
        # Several users of a sum would each read the rows again.
        sums = in_branch(operands_of[0][1], functools.partial(_by_column, chosen), operands_of)
        found.update(zip(columns, sums, strict=True))
    if rest:
        size = block_size([_bytes_of_row(each[i][1][0]) for i in rest])
        sums = run_side_by_side([_loop(each[i][0], size, *each[i][1]) for i in rest])
        found.update(zip(rest, sums, strict=True))
    return [found[i] for i in range(len(each))]


def is_short(part: _Part, given: Any, most: int) -> bool:
    """Whether its bags are equally long, and have so many entries at most."""
    _, positions, bag_of_entry, *_ = given
    return bag_of_entry is None and positions.shape[1] <= most


def _by_column(parts: tuple[_Part, ...], operands: Any) -> list[jax.Array]:
    def sums(part: _Part, given: Any) -> jax.Array:
        table, positions, _, weights, valid = given
        start = _start(table, part.bags, valid)
        return sum_columns(table, positions, weights, start, part.fill)

    return [sums(part, x) for part, x in zip(parts, operands, strict=True)]


def _loop(
    part: _Part,
    size: int,
    table: jax.Array,
    positions: jax.Array,
    bag_of_entry: jax.Array | None,
    weights: jax.Array | None,
    valid: jax.Array | None,
) -> BlockLoop:
    count, bags = positions.size, part.bags
    blocks = -(-count // size)
    missing = (blocks + 1) * size - count  # the last block of all is empty
    if bag_of_entry is None:
        bag_of_entry = lax.iota(jnp.int32, count) // (count // bags)
    positions = jnp.pad(positions.reshape(-1), (0, missing), constant_values=table.shape[0])
    bag_of_entry = jnp.pad(bag_of_entry, (0, missing), constant_values=bags)
    weights = None if weights is None else jnp.pad(weights.reshape(-1), (0, missing))

    def block(number: Any, carried: tuple[jax.Array, None]) -> tuple[jax.Array, None]:
        first = jnp.minimum(number, blocks) * size
        of_block = functools.partial(
            lax.dynamic_slice_in_dim, start_index=first, slice_size=size
        )
        block_weights = None if weights is None else of_block(weights)
        rows = read_rows(table, of_block(positions), block_weights, part.fill)
        return add_in_windows(carried[0], of_block(bag_of_entry), rows), None

    return BlockLoop((_start(table, bags, valid), None), block, blocks, blocks)


def _bytes_of_row(table: jax.Array) -> int:
    return math.prod(table.shape[1:]) * wide(table.dtype).itemsize


# Where arrays are spread over devices, each block would go between them.
lower(_bag_sum_p, on_one=_on_a_cpu, on_several=_defined, platform="cpu")
