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

Every form of bags is brought to three arrays first: for each entry the row that it reads, its
bag, and its weight. V is no row; b, the number of bags, is no bag; padding has weight 0:

    position  2 0 1 V        bag  0 0 1 b        weight  1 1 1 0
"""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmask._base.array_types import joint_dtype, sum_dtype, trailing
from jmask._base.row_ids import canonical, widen
from jmask._base.shardings import with_whole_rows
from jmask._base.types import Function, Ids, Numbers, Scalar
from jmask._base.validation import (
    check_flag,
    checked_array,
    checked_choice,
    checked_integer,
    naming_arguments,
)
from jmask._embedding.lookup import (
    MODES,
    AnyTable,
    bounded,
    check_norm_type,
    checked_integers,
    checked_table,
    is_padding,
    looked_up_rows,
    out_of_range_value,
    reads_of,
    rows_read,
    shape_of_rows,
)
from jmask._embedding.pad_bags import PaddedBags, check_weights, checked_offsets
from jmask._kernels.gathered_rows import bag_sum, is_bag_sum
from jmask._kernels.rows import add_rows
from jmask._ops.reduce import least, reduced
from jmask._tensors.storage import row_of_each

COMBINERS = ("sum", "mean", "sqrtn", "max")


@naming_arguments(
    per_sample_weights="write `weights`",
    padding_idx="write `padding_id`",
    sparse="leave it out, under jmask.grad the gradient is a RowSparse",
)
def embedding_bag(
    table: AnyTable,
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
    hashed: bool = False,
    width: int | None = None,
) -> jax.Array:
    """Return the rows of `table` with the given ids, combined bag by bag.

    Bags are given in one of four forms: what `jmask.pad_bags` makes of ragged ones; `ids`
    (..., L), whose last axis is a bag, padded to equal length; `ids` (n,) with `offsets`; or
    `ids` (n,) with `segment_ids`.

    Args:
        table (V, *row): an array, a `RowSparse`, or quantized. Integers have sums and maxima
            only.
        ids (..., L) or (n,): integers of any dtype, or a list; or `PaddedBags`, which bring
            their offsets and weights.
        offsets (b,): where each bag begins in `ids`; ascending from 0, equal ones for an
            empty bag. The last bag ends with `ids`.
        include_last_offset: `offsets` is (b + 1,), and its last number is where the last
            bag ends.
        segment_ids (n,): the bag of each id, in any order. -1 and `num_segments` are padding:
            such ids are not looked up. Traced numbers that are no bag are padding, too.
        num_segments: how many bags, static; by default the greatest of `segment_ids` + 1,
            which must then be concrete.
        weights: floating, of the shape of `ids`; not with "max". Padding counts as 0.
        combiner: "sum", "mean", "sqrtn" or "max", as defined above.
        padding_id: an id that is left out, as if it were not there.
        mode: what any other id outside the table gives, as in `embedding_lookup`: "fill"
            nan, "clip" the first or last row, "zero" zeros that count as a row, "raise" an
            error (after a failed check under jit, the id is left out).
        max_norm, norm_type: as in `embedding_lookup`, before the rows are weighted.
        hashed, width: as in `embedding_lookup`.

    Returns:
        One row for each bag (..., *row) or (b, *row), in the dtype of the table; floating
        numbers of 16 or 8 bits are summed in float32, and narrow integers in int32, which the
        result then is. nan, if traced `offsets` are not ascending from 0 to n at most.

    Raises:
        IndexError: in mode "raise", for concrete ids outside the table.
        TypeError: if an argument is not of the type above.
        ValueError: if the form of the bags is not clear, shapes do not fit, or the numbers of
            an argument are none of the above.

    Example:
        >>> import jax.numpy as jnp, jmask
        >>> table = jnp.array([[1., 2.], [3., 4.], [5., 6.]])
        >>> jmask.embedding_bag(table, [2, 0, 1], offsets=[0, 2, 2], combiner="mean")
        Array([[3., 4.],
               [0., 0.],
               [3., 4.]], dtype=float32)
    """
    # --- arguments ---------------------------------------------------------------------
    check_flag("include_last_offset", include_last_offset)
    if isinstance(mode, str) and mode in COMBINERS:
        raise ValueError(
            f"`mode` says what an id outside the table gives, got {mode!r}: how the rows of a "
            f"bag are combined is `combiner`={mode!r}."
        )
    if isinstance(ids, PaddedBags):
        others = (offsets, segment_ids, num_segments, weights)
        if include_last_offset or any(x is not None for x in others):
            raise ValueError(
                "what `pad_bags` makes has its offsets and weights: give these to `pad_bags`, "
                "and to `embedding_bag` neither them nor segments."
            )
        padded = ids
        ids, weights, segment_ids = padded.ids, padded.weights, padded.bag_of_entry
        if segment_ids is None:
            offsets, include_last_offset = padded.offsets, True
        else:
            num_segments = padded.offsets.shape[0] - 1
    table = checked_table(table)
    mode = checked_choice("mode", mode, MODES)
    ids = checked_integers("ids", ids, mode, "embedding_bag(table, ids)")
    combiner = checked_choice("combiner", combiner, COMBINERS)
    check_norm_type(norm_type)
    if weights is not None:
        if combiner == "max":
            raise ValueError(
                "`weights` have no meaning for `combiner` 'max': leave them out, or use 'sum', "
                "'mean' or 'sqrtn'."
            )
        weights = checked_array("weights", weights)
        check_weights(weights, ids)

    # --- the dtype that rows are combined in -----------------------------------------------
    kind = table.dtype
    is_integer = not jnp.issubdtype(kind, jnp.inexact)
    if combiner == "max" and jnp.issubdtype(kind, jnp.complexfloating):
        raise TypeError(
            f'`combiner`="max" needs an order, which {kind} has not: take "sum", "mean" '
            'or "sqrtn", or the maximum of `jnp.abs` of the rows looked up.'
        )
    if is_integer and (weights is not None or combiner in ("mean", "sqrtn")):
        what = f"`combiner`={combiner!r}" if weights is None else "`weights`"
        raise TypeError(
            f"{what} of a `table` of {kind} would be rounded: pass `table.astype(jnp.float32)`."
        )
    dtype = sum_dtype(kind)
    if is_integer:
        dtype = joint_dtype(kind, jnp.int32) if combiner == "sum" else kind
    weights = None if weights is None else weights.astype(dtype)

    # --- position, bag, weight -----------------------------------------------------------
    bags = _checked_bags(ids, segment_ids, num_segments, offsets, include_last_offset, mode)
    shape = shape_of_rows(table, width)
    masks = [x for x in (bags.padding, is_padding(ids, padding_id)) if x is not None]
    padding = functools.reduce(operator.or_, masks) if masks else None
    positions, padding, out_of_range = reads_of(ids, padding, mode, shape, hashed)
    if padding is not None:
        weights = None if weights is None else jnp.where(padding, 0, weights)
        if bags.ids is not None:
            bags = bags._replace(ids=jnp.where(padding, bags.shape[0], bags.ids))

    # --- combined ------------------------------------------------------------------------
    valid = jnp.ones(positions.shape, bool) if padding is None else jnp.logical_not(padding)
    rows_of: Function = lambda *reads: bounded(
        looked_up_rows(table, shape, *reads), max_norm, norm_type, positions.ndim
    )
    if combiner == "max":
        result = _max(rows_of(positions, padding, out_of_range), bags, valid)
    else:
        # A bag with an id out of range is nan:
        #     sums of floats, no padding in bags      by their sum: the gather fills in nan
        #     weights, padding in bags, integers      by a mark on the result, below
        # and all bags are where traced offsets do not ascend.
        fills_in = weights is None and jnp.issubdtype(dtype, jnp.inexact)
        # Padding in no bag reads nan, too, which `jax_debug_nans` would see outside jit.
        drops_padding = bags.ids is not None and not jax.config.jax_debug_nans
        fills_in &= out_of_range is not None and (drops_padding or padding is None)
        bag_count, fill = math.prod(bags.shape), math.nan if fills_in else 0
        if (
            isinstance(table, jax.Array)
            and shape == table.shape  # no lines
            and max_norm is None
            and is_bag_sum(table, positions, weights, bag_count)
        ):
            flat = (-1,) if bags.ids is not None else (bag_count, -1)
            weight = None if weights is None else weights.reshape(flat)
            result = bag_sum(table, positions.reshape(flat), bags.ids, weight, bag_count, fill)
            result = result.reshape(*bags.shape, *table.shape[1:])
        else:
            rows = rows_of(positions, None, out_of_range if fills_in else None).astype(dtype)
            result = bags.sum(rows if weights is None else rows * trailing(weights, rows.ndim))
        if combiner != "sum":
            counted = valid.astype(dtype) if weights is None else weights
            size = bags.sum(counted if combiner == "mean" else counted * counted)
            # Over infinity, unlike 0 / 0, an empty bag is 0, and so is every derivative; and a
            # nan in a bag of weight 0 is not hidden.
            size = trailing(jnp.where(size == 0, jnp.inf, size), result.ndim)
            result = result / (size if combiner == "mean" else jnp.sqrt(size))
        if out_of_range is not None and not fills_in:
            invalid = trailing(bags.sum(out_of_range.astype(jnp.int32)) > 0, result.ndim)
            # Adding a constant marks the bag and keeps the derivatives in its other rows. No
            # nan is computed for the bags without one, which `jax_debug_nans` would see.
            marks = jnp.where(invalid, out_of_range_value(result.dtype), 0)
            result = result + (marks - jax.lax.stop_gradient(jnp.where(invalid, result, 0)))
    if bags.ascends is not None:
        result = jnp.where(bags.ascends, result, out_of_range_value(result.dtype))
    if bags.shape == (0,):
        result = result[:0]
    return result if is_integer else result.astype(kind)


# --- sums --------------------------------------------------------------------------------


class Bags(NamedTuple):
    """Assign entries to bags.

    Attributes:
        shape: (b,); or `shape` of entries (*shape, L), whose last axis is a bag.
        ids (n,): the bag of each entry, b where it is in none; None if bags are an axis.
        padding: which entries are in no bag; None if all are in one.
        ascends: whether traced offsets ascend from 0 to n at most; None if that is known.
    """

    shape: tuple[int, ...]
    ids: jax.Array | None = None
    padding: Ids | None = None
    ascends: jax.Array | None = None

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum entries (n, ...) or (*shape, L, ...) bag by bag."""
        if self.ids is None:
            return jnp.sum(x, len(self.shape), dtype=x.dtype)
        # One row at least, from which nothing is read.
        zeros = jnp.zeros((max(self.shape[0], 1), *x.shape[1:]), x.dtype)
        return add_rows(zeros, self.ids, x)


def _max(rows: jax.Array, bags: Bags, valid: jax.Array) -> jax.Array:
    """Return the maximum of each column of a bag, 0 where the bag is empty.

    It is read from the first entry that attains it, as a nan does: so goes its derivative.
    """
    if bags.ids is not None:  # a bag may have entries on every device
        bags = bags._replace(ids=with_whole_rows(bags.ids))
    axis = valid.ndim - 1
    rows, valid = with_whole_rows(rows, axis), with_whole_rows(valid, axis)
    exists = trailing(valid, rows.ndim)
    count = rows.shape[axis]
    if count == 0:
        return bags.sum(rows)
    # A barrier, so that both the maximum and the comparison see one array: see `reduce._ties`.
    constant = jax.lax.optimization_barrier(jax.lax.stop_gradient(rows))
    keys = jnp.where(exists, constant, least(rows.dtype))

    def of_bags(x: jax.Array, kind: str) -> jax.Array:
        if bags.ids is None:
            return reduced(x, (axis,), kind)
        return getattr(jax.ops, f"segment_{kind}")(x, bags.ids, max(bags.shape[0], 1))

    greatest = of_bags(keys, "max")
    if bags.ids is not None:
        greatest = greatest.at[bags.ids].get(mode="clip")
    attains = exists & ((constant == greatest) | (constant != constant))
    numbers = jax.lax.broadcasted_iota(jnp.int32, rows.shape, axis)
    first = of_bags(jnp.where(attains, numbers, count), "min")
    result = jnp.take_along_axis(rows, first, axis, mode="fill", fill_value=0)
    return result if bags.ids is not None else jnp.squeeze(result, axis)


# --- the forms of bags -------------------------------------------------------------------


def _checked_bags(
    ids: Ids,
    segment_ids: Numbers | None,
    num_segments: int | None,
    offsets: Numbers | None,
    include_last_offset: bool,
    mode: str,
) -> Bags:
    if (
        (offsets is not None and segment_ids is not None)
        or (offsets is None and include_last_offset)
        or (segment_ids is None and num_segments is not None)
    ):
        raise ValueError(
            "bags of `ids` (n,) are given by `offsets` (with `include_last_offset`) or by "
            "`segment_ids` (with `num_segments`): give one of them."
        )
    if offsets is None and segment_ids is None:  # lines of ids
        if ids.ndim < 2:
            raise ValueError(
                f"`ids` of shape {ids.shape} are no bags yet: give `offsets` or `segment_ids` "
                "with `ids` (n,), or `ids` (b, L), each line a bag."
            )
        return Bags(ids.shape[:-1])

    if offsets is not None:
        offsets = checked_offsets(offsets, ids, include_last_offset, mode)
        count, bag_count = ids.shape[0], offsets.shape[0] - bool(include_last_offset)
        starts: Ids
        padding: Ids | None = None
        ascends = None
        if isinstance(offsets, jax.core.Tracer):
            starts = widen(offsets, count + 1)
            ascending = (starts[1:] >= starts[:-1]).all()
            ascends = ascending & (starts[:1] == 0).all() & (starts[-1:] <= count).all()
        else:
            starts = np.asarray(offsets).astype(np.int32)
        if include_last_offset:
            padding = np.arange(count, dtype=np.int32) >= starts[-1]
        bags = canonical(row_of_each(starts, count), bag_count)
        if ascends is not None:  # otherwise there are no entries, and no derivatives
            bags = jnp.where(ascends, bags, bag_count)
        return Bags((bag_count,), bags, padding, ascends)

    segment_ids = checked_integers("segment_ids", segment_ids, mode)
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
        known = np.asarray(segment_ids)
        num_segments = max(int(known.max()) + 1, 0) if known.size else 0
    bag_count = checked_integer("num_segments", num_segments)
    is_known = isinstance(segment_ids, np.ndarray)
    most = np.max(segment_ids, initial=0) if is_known else 0
    if most > bag_count:
        raise ValueError(
            f"`segment_ids` hold {most}, and there are `num_segments`={bag_count} bags: give "
            "the number of bags, >= 0; write padding as -1 or as `num_segments`."
        )
    bags = rows_read(segment_ids, None, bag_count)
    # Known also while something is traced, so that concrete ids can be refused.
    padding = (segment_ids < 0) | (segment_ids >= bag_count) if is_known else bags == bag_count
    return Bags((bag_count,), bags, padding)
