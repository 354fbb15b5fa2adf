"""Rows read ahead of their update, some hundreds at a time: on CPUs.

An update of random rows waits for memory: the arithmetic on a row takes so many instructions
that the processor never sees far enough ahead to have the next rows under way. So a chunk of
rows is first *touched*, one entry of each cache line read and nothing done with it, which takes
few instructions and keeps as many lines under way as the processor can; then it is updated in
the cache. For rows 0 to 4 of a batch, in chunks of two:

    touch 0, 1   update 0, 1   touch 2, 3   update 2, 3   touch 3, 4   update 4

Two things hold this together. The ids of an update depend on what was touched, by a number
that is zero, which neither XLA nor LLVM knows; or reading would be removed, or tables copied so
that it can come later. And what is touched is written into a larger array in place, which XLA
does by a single core: the one that goes on to the update, in whose cache the rows are wanted.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmask._gather import BITS, zero_of

_LINE = 64
# Bytes: rows of a chunk stay in the cache of one core beside what else is in it, and tables
# that fit into a cache as a whole gain nothing. Of long rows the processor itself reads the
# rest when it has seen where they begin.
_CHUNK = 2**17
_LONG_ROWS = 2**12
_SMALL_TABLES = 2**24
# Instructions on a row: with fewer the processor sees far enough ahead by itself, if rows are
# in order. A root and a quotient hold it up as long as ten others.
_MUCH_WORK = 36
_SLOW = {"sqrt": 10, "rsqrt": 10, "div": 10, "exp": 10, "log": 10, "pow": 20}
_FEWEST_CHUNKS = 4

Update = Callable[[list[jax.Array], jax.Array, list[jax.Array]], list[jax.Array]]


def rows_read_ahead(
    tables: Sequence[Any], ids: Any, combiner: Any, is_sorted: bool
) -> int | None:
    """How many rows to read at a time, or None where it does not pay.

    Args:
        tables: arrays (V, *row), or anything with a shape and a dtype.
        ids: (n,).
        combiner: jaxpr of the arithmetic on an entry.
        is_sorted: whether the ids are in order.
    """
    row = sum(_width(x) * x.dtype.itemsize for x in tables)
    is_fast = tables[0].shape[0] * row < _SMALL_TABLES or row > _LONG_ROWS
    if is_fast or not all(_can_be_touched(x, ids) for x in tables):
        return None
    arithmetic = sum(_SLOW.get(eqn.primitive.name, 1) for eqn in combiner.eqns)
    vectors = -(-_width(tables[0]) * tables[0].dtype.itemsize // _LINE)
    if is_sorted and vectors * (arithmetic + 2 * len(tables)) < _MUCH_WORK:
        return None
    size = 2 ** int(math.log2(_CHUNK / row))
    return size if ids.shape[0] >= _FEWEST_CHUNKS * size else None


def in_chunks(
    update: Update,
    tables: Sequence[jax.Array],
    ids: jax.Array,
    rows: Sequence[jax.Array],
    size: int,
) -> list[jax.Array]:
    """`update(tables, ids, rows)`, `size` rows at a time.

    Args:
        update: tables, ids (size,) and rows (size, *row) to new tables. It drops the id V.
        tables: arrays (V, *row).
        ids (n,): canonical, n at least `size`.
        rows: arrays (n, *row), or () for rows that are all of this number.
        size: of a chunk.

    Returns:
        The new tables.
    """
    count, padding = ids.shape[0], tables[0].shape[0]
    position = lax.iota(jnp.int32, size)

    def chunk(number: jax.Array, carried: Any) -> Any:
        tables, touched, constant = carried
        start = jnp.minimum(number * size, count - size)
        ours = lax.dynamic_slice_in_dim(ids, start, size)
        # The last chunk begins early enough to be whole: what comes again is padding.
        ours = jnp.where(position + start < number * size, padding, ours)
        touched = lax.dynamic_update_slice(touched, _touch(tables, ours), (0,))
        parts = [
            lax.dynamic_slice_in_dim(x, start, size) if x.ndim else constant[i]
            for i, x in enumerate(rows)
        ]
        return update(tables, ours + touched[0], parts), touched, constant

    # One longer than what is written, or writing it would not be in place.
    touched = jnp.zeros((size + 1,), ids.dtype)
    # Carried, or XLA would fill them anew for each chunk.
    shape = (size, *tables[0].shape[1:])
    constant = {i: jnp.broadcast_to(x, shape) for i, x in enumerate(rows) if not x.ndim}
    carried = (list(tables), touched, constant)
    return lax.fori_loop(0, -(-count // size), chunk, carried)[0]


def _touch(tables: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
    """Zeros (n,), after each cache line of the rows `ids` was read."""
    bits = jnp.zeros_like(ids)
    for table in tables:
        width, step = _width(table), _step(table)
        entries = table.reshape(-1, step)
        read = lax.GatherDimensionNumbers((), (0, 1), (0,))
        for column in range(0, width, _of_a_line(table)):
            place = ids * (width // step) + column // step
            entry = lax.gather(entries, place[:, None], read, (1, 1), mode="clip")
            of_entry = BITS[table.dtype.itemsize]
            bits |= lax.bitcast_convert_type(entry, of_entry).astype(ids.dtype)
    return zero_of(bits)


def _can_be_touched(table: Any, ids: Any) -> bool:
    addresses = table.shape[0] * (_width(table) // _step(table))
    is_float = jnp.issubdtype(table.dtype, jnp.floating) and table.dtype.itemsize in BITS
    return is_float and addresses < jnp.iinfo(ids.dtype).max


def _step(table: Any) -> int:
    """Entries from one address to the next: what rows and lines both are multiples of."""
    return math.gcd(_width(table), _of_a_line(table))


def _of_a_line(table: Any) -> int:
    return _LINE // table.dtype.itemsize


def _width(table: Any) -> int:
    return math.prod(table.shape[1:])
