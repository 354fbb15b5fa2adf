"""Narrow rows side by side in lines of 128, the width of a TPU's registers.

    rows of 64     line 0:  row 0 | row 1      line 1:  row 2 | row 3      ...

A TPU reads a row with its line and picks it out of that, in log2(128 / width) halvings. On
other devices an array of lines is, without a copy, one of rows. The gradient of rows becomes
one of lines, of which some entries exist: each row is placed in an empty line and those that
share a line are joined, in log2(128 / width) doublings, since ids are sorted; the last of them
is written, once:

    ids        0      1      4        2 rows in a line
    placed    a -    - b    c -
    joined    a -    a b    c -       the first is dropped

Both are exact: bits are moved, nothing is added; one bit pattern of nan, which is kept for
"no row here", is written as another. A row of one entry is read by one masked sum
of the bits of its line, and written with the line that was read and has new entries set in it.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from jmask._base.array_types import is_complex, wide
from jmask._base.lowering import lower, primitive
from jmask._base.shardings import explicit_mesh
from jmask._base.types import (
    Arrays,
    DType,
    IdArray,
    IdVector,
    LineArray,
    RowArray,
    Shape,
    Shaped,
    TableArray,
)
from jmask._kernels.rows import gather_rows, rows_or_fill

LANES = 128


def per_line(width: int) -> int:
    """Return how many rows of a width a line holds."""
    return max(LANES // width, 1)


def has_narrow_rows(shape: tuple[int, ...]) -> bool:
    """Decide whether rows of this shape have several entries and do not fill whole lines.

    A TPU keeps such a table transposed, or copies it into lines and back in each step.
    """
    width = math.prod(shape[1:])
    return width > 1 and width % LANES != 0


def is_packed(shape: Shape, width: int) -> bool:
    """Decide whether an array of this shape can be lines of several rows of this width."""
    return len(shape) > 1 and shape[-1] == LANES and width < LANES and LANES % width == 0


# --- lookup --------------------------------------------------------------------------------


def _by_definition(lines: TableArray, ids: IdArray, *, width: int) -> list[jax.Array]:
    return [rows_or_fill(lines.reshape(-1, width), ids)]


def _with_lines(lines: TableArray, ids: IdArray, *, width: int) -> list[jax.Array]:
    flat, each = ids.reshape(-1), per_line(width)
    rows = picked(gather_rows(lines, flat // each), flat % each, width)
    exists = (flat < lines.shape[0] * each)[:, None]
    return [jnp.where(exists, rows, jnp.zeros_like(rows)).reshape(*ids.shape, width)]


def _shapes(lines: ShapedArray, ids: Shaped, *, width: int) -> list[Shaped]:
    return [lines.update(shape=(*ids.shape, width), weak_type=False)]


LOOKUP = primitive("jmask_rows_of_lines", _by_definition, _shapes, is_lookup=True)
"""Rows (*n, width) of lines (L, 128) by canonical ids (*n,), zeros for padding."""
lower(LOOKUP, _with_lines, platform="tpu")


def rows_of_lines(lines: TableArray, ids: IdArray, width: int) -> jax.Array:
    """Return the rows that `LOOKUP` reads.

    It has the derivative of `lines.reshape(-1, width)[ids]`.
    """
    if explicit_mesh(lines, ids) is not None:
        return _by_definition(lines, ids, width=width)[0]
    return LOOKUP.bind(lines, ids, width=width)[0]


# --- lines read and written ----------------------------------------------------------------


def picked(line: LineArray, place: jax.Array, width: int) -> RowArray:
    """Return the row at `place` (n,) of each line (n, 128): halved until it is `width` wide."""
    if width == 1 and not is_complex(line):  # in one pass instead of seven
        is_own = lax.broadcasted_iota(place.dtype, line.shape, 1) == place[:, None]
        bits = lax.bitcast_convert_type(line, f"int{8 * line.dtype.itemsize}")
        # A sum of bits, all but one of which are zero, is exact for nan and -0.0 too.
        bits = jnp.sum(jnp.where(is_own, bits, 0), axis=1, keepdims=True, dtype=bits.dtype)
        return lax.bitcast_convert_type(bits, line.dtype)
    while line.shape[1] > width:
        half = line.shape[1] // 2
        in_second = (place // (half // width)) % 2 == 1
        line = jnp.where(in_second[:, None], line[:, half:], line[:, :half])
    return line


def widened(rows: RowArray, place: jax.Array) -> LineArray:
    """Return lines (n, 128) of zeros with the row of each (n, width) at its `place` (n,)."""
    zero = jnp.zeros((), rows.dtype)
    while rows.shape[1] < LANES:
        is_second = (place % 2 == 1)[:, None]
        halves = [jnp.where(is_second, zero, rows), jnp.where(is_second, rows, zero)]
        rows, place = jnp.concatenate(halves, axis=1), place // 2
    return rows


def masked_lines(
    ids: IdVector, rows: RowArray, lines: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Place rows (n, width) in lines; ids are sorted, and unique apart from padding.

    Returns for each entry (n,) the line that it writes, unique, or `lines` if it writes none;
    what all entries of that line write to it (n, 128); and where one does, booleans (n, 128).
    """
    if is_complex(rows):  # they have no bits of their own
        target, real, mask = masked_lines(ids, rows.real, lines)
        return target, lax.complex(real, masked_lines(ids, rows.imag, lines)[1]), mask
    dtype, rows = rows.dtype, rows.astype(wide(rows.dtype))
    width, rows_per_line = rows.shape[1], per_line(rows.shape[1])
    count = lines * rows_per_line
    target, place = jnp.where(ids < count, ids // rows_per_line, lines), ids % rows_per_line
    # Rows are told from the zeros around them by their bits, of which none are 0: bits that
    # one nan has change places with 0. An entry that is this nan becomes another one.
    integers, absent = _absent(rows.dtype)
    bits = lax.bitcast_convert_type(rows, integers)
    words = jnp.where(bits == absent, absent + 1, bits) ^ absent
    if width == 1:
        empty = jnp.zeros((ids.shape[0], LANES), words.dtype)
        target, words = inserted(empty, ids, words[:, 0], count)
    else:
        # Rows of a line are joined to one write, by OR of their bits: a sum would turn -0.0
        # into 0.0. With two rows a line, ids 4 and 5, rows a, b:
        #
        #     entry 0   a a | 0 0      joined   a a | 0 0
        #     entry 1   0 0 | b b               a a | b b    the last of a line writes it
        words = widened(words, place)
        target, words = joined_in_lines(target, lines, rows_per_line, words)
    # Entries that write nothing are masked, so that norms leave them out.
    mask = (words != 0) & (target < lines)[:, None]
    entries = lax.bitcast_convert_type(jnp.where(mask, words ^ absent, 0), rows.dtype)
    return target, entries.astype(dtype), mask


def marked(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Return floating values with their mask in them, as `unmarked` takes them apart.

    A kernel reads one array in place of two; what is masked is a nan that no arithmetic makes.
    """
    integers, absent = _absent(values.dtype)
    bits = lax.bitcast_convert_type(values, integers)
    bits = jnp.where(bits == absent, absent + 1, bits)
    return lax.bitcast_convert_type(jnp.where(mask, bits, absent), values.dtype)


def unmarked(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return values, 0 where they are masked, and the mask."""
    integers, absent = _absent(x.dtype)
    mask = lax.bitcast_convert_type(x, integers) != absent
    return jnp.where(mask, x, jnp.zeros_like(x)), mask


def _absent(dtype: DType) -> tuple[DType, int]:
    """Return integers of the size of a floating dtype, and a nan in them."""
    integers = jnp.dtype(f"int{8 * dtype.itemsize}")
    return integers, int(np.array(np.nan, dtype).view(integers)) | 1


def inserted(
    lines: LineArray, ids: IdVector, entries: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Insert entries (n,) in the lines (n, 128) that were read at `ids // 128`.

    Ids are sorted, and unique apart from padding, which is `count` or more. Returns the line
    (n,) that each entry writes, see `writers`, and that line (n, 128) with all new entries.
    """
    n = ids.shape[0]
    nowhere = -(-count // LANES)
    target = writers(jnp.where(ids < count, ids // LANES, nowhere), nowhere)
    place = writer_of_each(target, nowhere) * LANES + (ids % LANES).astype(jnp.int32)
    place = jnp.where(ids < count, place, lines.size)
    flat = lines.reshape(-1).at[place].set(entries, mode="drop", unique_indices=True)
    return target, flat.reshape(n, LANES)


def writers(line: jax.Array, lines: int) -> jax.Array:
    """Return the line that each entry (n,) writes, given the sorted lines in which they are.

    The last entry of a line writes it; all others write `lines`, which is past the end.
    """
    following = jnp.concatenate([line[1:], jnp.full(line[:1].shape, lines, line.dtype)])
    return jnp.where(following != line, line, lines)


def writer_of_each(target: jax.Array, lines: int) -> jax.Array:
    """Return the number of the entry that writes the line of each entry (n,); n if none does.

    `target` (n,) is what `writers` returns.
    """
    n = target.shape[0]
    return lax.cummin(jnp.where(target < lines, lax.iota(jnp.int32, n), n), reverse=True)


def joined_in_lines(
    line: jax.Array, lines: int, rows_per_line: int, *words: jax.Array
) -> Arrays:
    """Join what sorted entries write to the same line, at most `rows_per_line` of them.

    `line` (n,) is sorted, and `lines` where there is none; words (n, m) are integers, zero in
    bits that an entry does not write. Returns the line (n,) that each entry writes, as of
    `writers`, and the words of that line.
    """
    # Ids are sorted, so the entries of a line are neighbours, at most `rows_per_line` of them:
    # doubling the distance joins them in log2 of that many steps.
    joined, count = [], line.shape[0]
    for x in words:
        shift = 1
        while shift < rows_per_line:
            before = jnp.pad(x, ((shift, 0), (0, 0)))[:count]
            same = line == jnp.pad(line, (shift, 0), constant_values=-1)[:count]
            x |= jnp.where(same[:, None], before, jnp.zeros((), x.dtype))
            shift *= 2
        joined.append(x)
    return writers(line, lines), *joined
