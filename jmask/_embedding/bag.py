"""Embedding bags: rows of a table, looked up and combined bag by bag.

    table = [[1, 2],        embedding_bag(table, [[2, 0], [1, -1]], padding_id=-1)
             [3, 4],             = [[5, 6] + [1, 2], [3, 4]]
             [5, 6]]

With r the rows of a bag and w their weights (1 if there are none):

    sum      Σ w r
    mean     Σ w r / Σ w
    sqrtn    Σ w r / sqrt(Σ w²)
    max      the maximum of r in each column

Padding is in no bag, and a bag with nothing in it is zeros. So is a mean of total weight 0,
and its derivative is 0. The gradient of max goes to the first entry that attains it.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmask._base.array_types import (
    explicit_sharding,
    trailing,
    varying_axes,
    wide,
    with_whole_rows,
)
from jmask._base.row_ids import canonical
from jmask._base.types import Ids, JvpArgs, Mask, Numbers, Scalar, Table, TensorLike
from jmask._base.validation import (
    check_flag,
    checked_array,
    checked_choice,
    checked_integer,
    naming_arguments,
)
from jmask._embedding.lookup import (
    MODES,
    Bound,
    Entries,
    checked_bound,
    checked_integers,
    checked_table,
    entries_of,
    is_padding,
    looked_up_rows,
    narrowed,
    positions_of,
)
from jmask._embedding.pad_bags import (
    PaddedBags,
    check_weights,
    checked_offsets,
)
from jmask._kernels.bag_sum import bag_sum
from jmask._ops.groups import BySegments, BySlices
from jmask._tensors.storage import row_of_each

COMBINERS = ("sum", "mean", "sqrtn", "max")

Bags = BySlices | BySegments
"""Which entries, arrays (*entries, ...), `embedding_bag` makes one row of.

    ids       [[4, 1],        ids       [4, 1, 7, 2]
               [7, 2]]        segments  [0, 0, 1, 1]
    `BySlices`                `BySegments`
"""


@naming_arguments(
    per_sample_weights="write `weights`",
    padding_idx="write `padding_id`",
    sparse="leave it out, under jmask.grad the gradient is a RowSparse",
)
def embedding_bag(
    table: Table,
    ids: Numbers | PaddedBags,
    *,
    offsets: Numbers | None = None,
    include_last_offset: bool = False,
    segment_ids: Numbers | None = None,
    num_segments: int | None = None,
    weights: Numbers | None = None,
    combiner: str = "sum",
    padding_id: int | None = None,
    mode: str = "fill",
    max_norm: Scalar | None = None,
    norm_type: float = 2.0,
) -> jax.Array:
    """Return the rows of `table` with the given ids, combined bag by bag.

    Bags are given in one of four forms: what `jmask.pad_bags` makes of ragged ones; `ids`
    (..., L), where each line is a bag, made of equal length by padding; `ids` (n,) with
    `offsets`; or `ids` (n,) with `segment_ids`.

    Args:
        table (V, *row): a real, floating array, or a `RowSparse`.
        ids (..., L) or (n,): integers of any dtype, or a list; or `PaddedBags`, which bring
            their offsets and weights.
        offsets (b,): where each bag begins in `ids`; ascending from 0, equal ones for an
            empty bag. The last bag ends with `ids`.
        include_last_offset: `offsets` is (b + 1,), and its last number is where the last
            bag ends.
        segment_ids (n,): the bag of each id, in any order. -1 and `num_segments` are padding:
            such ids are left out and not looked up. Traced numbers that are no bag are, too.
        num_segments: how many bags, static; by default the greatest of `segment_ids` + 1,
            which must then be concrete.
        weights: floating, of the shape of `ids`; not with "max". They are cast to the
            dtype in which is summed. Weights of padding count nowhere.
        combiner: "sum", "mean", "sqrtn" or "max", as defined above.
        padding_id: an id that is left out, as if it were not there.
        mode: what any other id outside the table gives, as in `embedding_lookup`: "fill"
            nan, "clip" the first or last row, "zero" zeros that count as a row, "raise" an
            error (after a failed check under jit, the id is left out).
        max_norm, norm_type: as in `embedding_lookup`, before the rows are weighted.

    Returns:
        One row for each bag (..., *row) or (b, *row), in the dtype of the table; float16
        and bfloat16 are summed in float32. nan, if traced `offsets` are not ascending from
        0 to n at most.

    Raises:
        IndexError: in mode "raise", for concrete ids outside the table.
        TypeError: if an argument is not of the type above.
        ValueError: if the form of the bags is not clear, shapes do not fit, `mode` or
            `combiner` is none of the above, concrete `offsets` are not ascending from 0 to
            n at most, `weights` are given with "max", `num_segments` is needed, or
            `max_norm` or `norm_type` is not positive.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> table = jnp.array([[1., 2.], [3., 4.], [5., 6.]])
        >>> jmask.embedding_bag(table, [[2, 0], [1, -1]], padding_id=-1)
        Array([[6., 8.],
               [3., 4.]], dtype=float32)
        >>> jmask.embedding_bag(table, [2, 0, 1], offsets=[0, 2, 2], combiner="mean")
        Array([[3., 4.],
               [0., 0.],
               [3., 4.]], dtype=float32)
    """
    check_flag("include_last_offset", include_last_offset)
    if isinstance(mode, str) and mode in COMBINERS:
        raise ValueError(
            f"`mode` says what an id outside the table gives, got {mode!r}: how the rows of a "
            f"bag are combined is `combiner`={mode!r}."
        )
    bags: Bags
    bag_of_entry, number, valid = None, 0, None
    if isinstance(ids, PaddedBags):
        others = (offsets, include_last_offset, segment_ids, num_segments, weights)
        if any(x is not None and x is not False for x in others):
            raise ValueError(
                "what `pad_bags` makes has its offsets and weights: give these to `pad_bags`, "
                "and to `embedding_bag` neither them nor segments."
            )
        offsets, weights, bag_of_entry = ids.offsets, ids.weights, ids.bag_of_entry
        number, include_last_offset = ids.offsets.shape[0] - 1, True
        ids = ids.ids
    table = checked_table(table, ids, "embedding_bag(table, ids)")
    mode = checked_choice(mode, "mode", MODES)
    ids = checked_integers(ids, "ids", mode)
    combiner = checked_choice(combiner, "combiner", COMBINERS)
    if not jnp.issubdtype(table.dtype, jnp.inexact):
        raise TypeError(
            f"`table` must be floating or complex, got {table.dtype}: pass "
            "`table.astype(jnp.float32)`."
        )
    if combiner == "max" and jnp.issubdtype(table.dtype, jnp.complexfloating):
        raise TypeError(
            f'`combiner`="max" needs an order, which {table.dtype} has not: take "sum", "mean" '
            'or "sqrtn", or the maximum of `jnp.abs` of the rows looked up.'
        )
    dtype = wide(table.dtype)
    bound = checked_bound(table, max_norm, norm_type)
    weights = _checked_weights(weights, ids, combiner, dtype)
    if segment_ids is not None or num_segments is not None:
        if offsets is not None or include_last_offset:
            raise ValueError(
                "`offsets` (with `include_last_offset`) and `segment_ids` (with "
                "`num_segments`) are two ways to give the bags: give one of them."
            )
        bags, left_out, valid = _segment_bags(ids, segment_ids, num_segments, mode)
    elif bag_of_entry is not None:
        bag_of_entry = checked_integers(bag_of_entry, "bag_of_entry", mode)
        bags, left_out = BySegments(jnp.asarray(bag_of_entry), number), bag_of_entry == number
    elif offsets is not None:
        bags, left_out, valid = _offset_bags(ids, offsets, include_last_offset, mode)
    else:
        bags, left_out, valid = _line_bags(ids, include_last_offset)
    padding = is_padding(ids, padding_id)
    absent = (
        left_out if padding is None else padding if left_out is None else padding | left_out
    )
    entries = entries_of(ids, absent, mode, table.shape)
    if combiner == "max":
        operands = (looked_up_rows(table, entries, bound), bags, _present(entries))
        if isinstance(bags, BySegments):  # a bag may have entries on every device
            operands = jax.tree.map(with_whole_rows, operands)
        result = _max(*operands)
        result = result if valid is None else jnp.where(valid, result, jnp.nan)
    else:
        if weights is not None and entries.absent is not None:
            weights = jnp.where(entries.absent, 0, weights)
        result = _sums(table, bags, entries, weights, valid, bound)
        result = _scaled(result, bags, weights, entries, combiner)
    if isinstance(bags, BySegments) and not bags.number:
        result = result[:0]
    return result.astype(table.dtype)


# --- combiners ---------------------------------------------------------------------------


def _sums(
    table: Table,
    bags: Bags,
    entries: Entries,
    weights: jax.Array | None,
    valid: jax.Array | None,
    bound: Bound | None,
) -> jax.Array:
    """Compute Σ w r of each bag: nan where `valid` is False."""
    dtype = wide(table.dtype)
    positions, absent, outside = entries
    arrays = [x for x in (table, positions, weights) if isinstance(x, jax.Array)]
    is_ragged = isinstance(bags, BySegments)
    shape = (bags.number,) if isinstance(bags, BySegments) else positions.shape[:-1]
    if isinstance(bags, BySegments) and absent is not None:
        bags = BySegments(jnp.where(absent, bags.number, bags.ids), bags.number)
    if (
        not isinstance(table, jax.Array)
        or bound is not None
        or 0 in (*positions.shape, *shape, *table.shape)
        or any(explicit_sharding(x) is not None or varying_axes(x) for x in arrays)
    ):
        if is_ragged and weights is None and bound is None:
            # What is in no bag need not be zeros, which would be one more pass over all rows.
            entries = entries._replace(absent=None)
        rows = looked_up_rows(table, entries, bound).astype(dtype)
        total = bags.sum(rows if weights is None else rows * trailing(weights, rows.ndim))
        return total if valid is None else jnp.where(valid, total, jnp.nan)
    fills_in = outside is not None and (is_ragged or absent is None)
    number = math.prod(shape)
    entry_shape = (-1,) if is_ragged else (number, -1)
    total = bag_sum(
        table,
        positions.reshape(entry_shape),
        bags.ids if isinstance(bags, BySegments) else None,
        None if weights is None else weights.reshape(entry_shape),
        valid,
        number,
        math.nan if fills_in else 0,
    ).reshape(*shape, *table.shape[1:])
    if outside is None or fills_in:
        return total
    missing = jnp.where(outside, jnp.asarray(jnp.nan, dtype), 0)
    if weights is not None:  # weights of other entries get no nan from here
        missing = missing * jnp.where(outside, weights, 0)
    return total + trailing(bags.sum(missing), total.ndim)


def _scaled(
    total: jax.Array, bags: Bags, weights: jax.Array | None, entries: Entries, combiner: str
) -> jax.Array:
    """Divide the sums Σ w r as "mean" and "sqrtn" say."""
    if combiner == "sum":
        return total
    if weights is None:
        weights = _present(entries).astype(total.dtype)
    scale = bags.sum(weights if combiner == "mean" else weights * weights)
    # Over infinity, unlike 0 / 0, an empty bag is 0, and so is every derivative; and a nan
    # in a bag of weight 0 is not hidden.
    scale = trailing(jnp.where(scale == 0, jnp.inf, scale), total.ndim)
    return total / (scale if combiner == "mean" else jnp.sqrt(scale))


@jax.custom_jvp
def _max(rows: jax.Array, bags: Bags, present: jax.Array) -> jax.Array:
    """Return the maximum of each column of a bag, 0 where the bag is empty."""
    greatest = _greatest(rows, bags, present)
    return jnp.where(trailing(bags.any(present), greatest.ndim), greatest, 0)


@_max.defjvp
def _max_jvp(primals: JvpArgs, tangents: JvpArgs) -> tuple[jax.Array, jax.Array]:
    """Differentiate in the first entry that attains the maximum, as a nan does."""
    rows, bags, present = primals
    attains = (rows == bags.spread(_greatest(rows, bags, present))) | jnp.isnan(rows)
    attains &= trailing(present, rows.ndim)
    last = present.ndim - 1  # along which entries of a bag are numbered
    shape = tuple(size if d == last else 1 for d, size in enumerate(rows.shape))
    numbers = lax.broadcasted_iota(jnp.int32, shape, last)
    first = bags.min(jnp.where(attains, numbers, np.iinfo(np.int32).max))
    tangent = bags.sum(jnp.where(numbers == bags.spread(first), tangents[0], 0))
    return _max(rows, bags, present), tangent


def _greatest(rows: jax.Array, bags: Bags, present: jax.Array) -> jax.Array:
    return bags.max(jnp.where(trailing(present, rows.ndim), rows, -jnp.inf))


def _present(entries: Entries) -> jax.Array:
    """Find which entries are there."""
    shape, absent = entries.positions.shape, entries.absent
    return jnp.ones(shape, bool) if absent is None else jnp.logical_not(absent)


# --- the forms of bags -------------------------------------------------------------------


# The bags; which ids are in none of them, None if all are in one; and whether the bags are well
# formed, None if that is known.
_Form = tuple[Bags, Mask, jax.Array | None]


def _line_bags(ids: Ids, include_last_offset: bool) -> _Form:
    if include_last_offset:
        raise ValueError("`include_last_offset` is about `offsets`, and they are missing.")
    if ids.ndim < 2:
        raise ValueError(
            f"`ids` of shape {ids.shape} are no bags yet: give `offsets` or `segment_ids` "
            "with `ids` (n,), or `ids` (b, L), each line a bag."
        )
    return BySlices((ids.ndim - 1,), False), None, None


def _segment_bags(ids: Ids, segment_ids: Ids, num_segments: int | None, mode: str) -> _Form:
    if segment_ids is None:
        raise ValueError("`num_segments` is about `segment_ids`, and they are missing.")
    segment_ids = checked_integers(segment_ids, "segment_ids", mode)
    if ids.ndim != 1 or segment_ids.shape != ids.shape:
        raise ValueError(
            "`segment_ids` say for each of the `ids` (n,) its bag: got `segment_ids` of shape "
            f"{segment_ids.shape} and `ids` of shape {ids.shape}."
        )
    if num_segments is None:
        if isinstance(segment_ids, jax.core.Tracer):
            raise ValueError(
                "`num_segments`, the number of bags, must be given for traced `segment_ids` "
                "(under jit, vmap or grad)."
            )
        num_segments = max(int(np.max(np.asarray(segment_ids), initial=-1)) + 1, 0)
    number = checked_integer("num_segments", num_segments)
    if number < 0:
        raise ValueError(f"`num_segments` must be >= 0, got {number}.")
    bag_of_entry = positions_of(segment_ids, None, number)
    left_out: Mask = bag_of_entry == number
    if isinstance(segment_ids, np.ndarray):
        if np.max(segment_ids, initial=0) > number:
            raise ValueError(
                f"`segment_ids` hold {np.max(segment_ids)}, and there are "
                f"`num_segments`={number} bags: give the number of bags; write padding as -1 "
                "or as `num_segments`."
            )
        left_out = (segment_ids < 0) | (segment_ids >= number)
    return BySegments(bag_of_entry, number), left_out, None


def _offset_bags(ids: Ids, offsets: Ids, include_last_offset: bool, mode: str) -> _Form:
    offsets = checked_offsets(offsets, ids, include_last_offset, mode)
    count, number = ids.shape[0], offsets.shape[0] - bool(include_last_offset)
    starts: Ids
    valid = None
    if isinstance(offsets, jax.core.Tracer):
        starts = narrowed(offsets, count + 1)
        ascending = (starts[1:] >= starts[:-1]).all()
        valid = ascending & (starts[:1] == 0).all() & (starts[-1:] <= count).all()
    else:
        starts = np.asarray(offsets).astype(np.int32)
    left_out = np.arange(count, dtype=np.int32) >= starts[-1] if include_last_offset else None
    bag_of_entry = canonical(row_of_each(starts, count), number)
    if valid is not None:  # otherwise there are no entries, and no derivatives
        bag_of_entry = jnp.where(valid, bag_of_entry, number)
    return BySegments(bag_of_entry, number), left_out, valid


def _checked_weights(
    weights: TensorLike, ids: Ids, combiner: str, dtype: DTypeLike
) -> jax.Array | None:
    if weights is None:
        return None
    if combiner == "max":
        raise ValueError(
            "`weights` have no meaning for `combiner` 'max': leave them out, or use 'sum', "
            "'mean' or 'sqrtn'."
        )
    weights = checked_array("weights", weights)
    check_weights(weights, ids)
    return weights.astype(dtype)
