"""Lookups: equations that read rows of tables, and of what is made of tables.

    gather, slice, dynamic_slice       windows of an array, which are rows
    jmask_lookup_on_shards             rows of a table that is sharded over devices
    jmask_rows_of_lines                rows of a packed table

Of a table the equation itself runs, and what it makes gets a tap. Of a view rows are read from
the tables, where the taps are.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._autodiff.sums import SPARSE_PRODUCTS
from jmask._autodiff.taps import Tap, Taps
from jmask._autodiff.views import (
    Lookup,
    Positions,
    TableView,
    Valid,
    View,
    Where,
    ids_at,
    numbered_dimensions,
    per_entry,
    planned,
    read_at,
    varies_of,
    varying,
)
from jmask._base.array_types import trailing
from jmask._base.forms import aval_of, parameter
from jmask._base.jaxprs import bound
from jmask._base.row_ids import canonical, id_dtype, widen
from jmask._base.shardings import sharding_of_type
from jmask._base.types import Shape, Value
from jmask._kernels.bag_sum import BAG_SUM
from jmask._kernels.gather import SLOW_COPY, Gather, slow_copy_of
from jmask._kernels.lines import LOOKUP as ROWS_OF_LINES
from jmask._kernels.lines import is_packed
from jmask._kernels.sharded_rows import LOOKUP

# --- windows ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of an array that an equation reads, one for each of the entries `batch`.

    Attributes:
        sizes: of a window along each dimension of the array.
        single: the dimensions that the result does not have, of size 1.
        batch: the shape of the entries.
        offsets: the dimensions of the result that the others of a window are.
        starts: by its dimension, where windows begin: (*batch,), or one number.
        started: the dimensions that `starts` will have.
        clips: whether windows that do not fit are moved; others do not count.
        fill: what those are instead, or None: nothing is said of them.
    """

    sizes: Shape
    single: frozenset[int]
    batch: Shape
    offsets: Sequence[int]
    starts: Callable[[], Mapping[int, jax.Array]]
    started: frozenset[int]
    clips: bool = True
    fill: Value = None

    def leading(self, shape: Shape) -> int | None:
        """Return how many dimensions number the rows that it reads of an array.

        The trailing dimensions that each window covers whole are a row. None if entries of a
        matrix would be rows of their own, as in a lookup of columns.
        """
        leading = len(shape)
        while leading > 1:
            d = leading - 1
            # A window that is as wide as the row can begin at 0 alone, if it must fit.
            at_0 = d not in self.single and (d not in self.started or self.clips)
            if not at_0 or self.sizes[d] != shape[d]:
                break
            leading -= 1
        if leading == len(shape) > 1:
            # Entries in the shape of a matrix, as of a sort, are no lookup of some.
            if self.batch == shape:
                return None
            if math.prod(self.sizes) > 1:
                # Some columns of a row, `t[ids, :10]`, are read from the row.
                first = next(d for d, size in enumerate(self.sizes) if size > 1)
                leading = max([first, *(d + 1 for d in self.single)])
                if leading in (0, len(shape)):
                    return None
        return leading

    def entries(self, leading: int) -> Shape:
        """Return the shape of the entries: of windows, and of rows in each of them."""
        return (*self.batch, *(self.sizes[d] for d in self._more(leading)))

    def _more(self, leading: int) -> list[int]:
        return [d for d in range(leading) if d not in self.single]

    def positions(
        self, shape: Shape, leading: int
    ) -> tuple[Positions, Valid, dict[int, jax.Array]]:
        """Return positions in range, where they count, and where windows begin in a row."""
        starts = {d: widen(jnp.asarray(s), shape[d]) for d, s in self.starts().items()}
        valid: Valid = None
        for d, start in starts.items():
            last = shape[d] - self.sizes[d]
            if not self.clips:
                fits = (start >= 0) & (start <= last)
                valid = fits if valid is None else valid & fits
            starts[d] = jnp.clip(start, 0, last)
        entries, more = self.entries(leading), self._more(leading)
        along = []
        for d in range(leading):
            p = per_entry(starts.get(d, jnp.zeros((), id_dtype(shape[d]))), entries)
            if d in more and self.sizes[d] > 1:
                axis = len(self.batch) + more.index(d)
                p = p + lax.broadcasted_iota(p.dtype, entries, axis)
            along.append(p)
        valid = None if valid is None else per_entry(valid, entries)
        in_row = {d: per_entry(s, entries) for d, s in starts.items() if d >= leading}
        return Positions(along, Where(entries)), valid, in_row

    def placed(
        self, rows: jax.Array, shape: Shape, leading: int, in_row: Mapping[int, jax.Array]
    ) -> jax.Array:
        """Return rows (*entries, *row) as the equation has them: parts of rows, transposed."""
        lead = len(self.entries(leading))
        if any(self.sizes[d] != shape[d] for d in range(leading, len(shape))):
            zeros = jnp.zeros(rows.shape[:lead], np.int32)
            firsts = [in_row.get(d, zeros) for d in range(leading, len(shape))]

            def part(row: jax.Array, *first: jax.Array) -> jax.Array:
                return lax.dynamic_slice(row, first, self.sizes[leading:])

            for _ in range(lead):
                part = jax.vmap(part)
            rows = part(rows, *firsts)
        single = [lead + d - leading for d in range(leading, len(shape)) if d in self.single]
        rows = lax.squeeze(rows, single) if single else rows
        return jnp.moveaxis(rows, range(len(self.batch), rows.ndim), self.offsets)


def windows_of(eqn: JaxprEqn, name: str, args: Sequence[Value]) -> Windows:
    """Return the windows that a `gather`, a `slice` or a `dynamic_slice` reads."""
    if name == "slice":
        begin, end = parameter(eqn, "start_indices"), parameter(eqn, "limit_indices")
        sizes = tuple(j - i for i, j in zip(begin, end, strict=True))
        every = range(len(sizes))
        at = lambda: {d: jnp.asarray(s, np.int32) for d, s in enumerate(begin)}
        return Windows(sizes, frozenset(), (), every, at, frozenset(every))
    if name == "dynamic_slice":
        sizes, every = tuple(aval_of(eqn.outvars[0]).shape), range(len(args) - 1)
        first = frozenset(every)
        return Windows(sizes, frozenset(), (), every, lambda: dict(enumerate(args[1:])), first)
    gather, indices = gather_of(eqn), args[1]
    numbers = gather.dimension_numbers
    batch = tuple(indices.shape[:-1])
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )

    def starts_of_gather() -> dict[int, jax.Array]:
        starts = {d: _column(indices, k) for k, d in enumerate(numbers.start_index_map)}
        for d, axis in batching.items():
            starts[d] = lax.broadcasted_iota(np.int32, batch, axis)
        return starts

    fills = gather.mode == lax.GatherScatterMode.FILL_OR_DROP
    fill = np.nan if gather.fill_value is None else gather.fill_value
    return Windows(
        tuple(gather.slice_sizes),
        frozenset((*numbers.collapsed_slice_dims, *batching)),
        batch,
        numbers.offset_dims,
        starts_of_gather,
        frozenset((*numbers.start_index_map, *batching)),
        gather.mode == lax.GatherScatterMode.CLIP,
        fill if fills else None,
    )


def _column(indices: jax.Array, k: int) -> jax.Array:
    """Return `indices[..., k]`, in one equation where there is no other column."""
    if indices.shape[-1] > 1:
        indices = lax.slice_in_dim(indices, k, k + 1, axis=-1)
    return lax.squeeze(indices, [indices.ndim - 1])


def gather_of(eqn: JaxprEqn) -> Gather:
    """Return the gather that an equation is."""
    if eqn.primitive is SLOW_COPY:
        return slow_copy_of(eqn.params)
    return Gather(**{f.name: parameter(eqn, f.name) for f in dataclasses.fields(Gather)})


WINDOWS = ("gather", SLOW_COPY.name)
"""The equations that read windows, wherever ids are; slices are views until they are read."""


def window_lookup(eqn: JaxprEqn, name: str, args: Sequence[Value]) -> Lookup | None:
    """Return how an equation reads windows of a view, or None if it does not read rows."""
    x, windows, aval = args[0], windows_of(eqn, name, args), aval_of(eqn.outvars[0])
    shape = x.shape
    leading = None if 0 in shape else windows.leading(shape)
    if leading is None:
        return None
    if isinstance(x, TableView):
        return _of_table(eqn, name, x, args, windows, leading)
    is_cut = any(windows.sizes[d] != shape[d] for d in range(leading, len(shape)))
    # Single entries of a matrix that would make whole windows are no lookup of rows.
    while not x.fits[leading]:
        leading += 1
        is_matrix = leading == len(shape) > 1 and math.prod(windows.sizes) > 1
        if is_cut or leading > len(shape) or is_matrix:
            return None
    plan = planned(x, leading, windows.entries(leading))
    assert plan is not None

    def run(taps: Taps) -> jax.Array:
        positions, valid, in_row = windows.positions(shape, leading)
        rows = read_at(x, positions, valid, taps)
        if valid is not None and windows.fill is not None:
            fill = jnp.asarray(windows.fill, rows.dtype)
            rows = jnp.where(trailing(valid, rows.ndim), rows, fill)
        return windows.placed(rows, shape, leading, in_row)

    return varying(plan, varies_of(aval)), run


def _of_table(
    eqn: JaxprEqn,
    name: str,
    x: TableView,
    args: Sequence[Value],
    windows: Windows,
    leading: int,
) -> Lookup | None:
    shape, aval = x.shape, aval_of(eqn.outvars[0])
    is_whole_row = leading == 1 == windows.sizes[0] and windows.started == {0}
    sharding = sharding_of_type(aval)
    if sharding is not None and any((*sharding.spec, *_spec(x.array))):
        lead = len(windows.batch)
        in_order = tuple(windows.offsets) == tuple(range(lead, len(aval.shape)))
        if not (is_whole_row and in_order and 0 in windows.single):
            return None
        # Rows are where their ids are: the tap is, too.
        plan = [
            Tap(
                x.number,
                1,
                tuple(aval.shape),
                x.dtype,
                math.prod(windows.batch),
                "placed",
                lead,
                varies_of(aval),
                sharding,
            )
        ]
    else:
        leading = numbered_dimensions(shape, leading)  # of entries, if there are so many
        plan = varying(planned(x, leading, windows.entries(leading)) or [], varies_of(aval))
    (tap,) = plan

    def run(taps: Taps) -> jax.Array:
        if name in WINDOWS:
            out = gather_of(eqn)(x.array, args[1])
        else:
            out = bound(eqn, [x.array, *args[1:]])[0]
        if taps.is_without:
            return out
        if is_whole_row and not windows.clips:
            (start,) = windows.starts().values()
            ids = canonical(start, shape[0])
            in_row: Mapping[int, jax.Array] = {}
        else:
            positions, valid, in_row = windows.positions(shape, leading)
            first = Positions(positions.along[:leading], positions.where)
            ids = ids_at(first, shape[:leading], valid)
        if tap.kind == "placed":
            return taps.take(tap, out, ids.reshape(windows.batch))
        entries = windows.entries(leading)

        def as_result(rows: jax.Array) -> jax.Array:
            rows = rows.reshape(*entries, *shape[leading:])
            return windows.placed(rows, shape, leading, in_row)

        return taps.take(tap, out, ids.reshape(-1), as_result)

    return plan, run


def _spec(x: Value) -> tuple[object, ...]:
    aval: Value = getattr(x, "aval", x)
    sharding = sharding_of_type(aval)
    return () if sharding is None else tuple(sharding.spec)


def slice_lookup(eqn: JaxprEqn, name: str, args: Sequence[Value]) -> Lookup | None:
    """Return how a slice of a table is read as a whole, by its equation."""
    strides = parameter(eqn, "strides") if name == "slice" else None
    if not isinstance(args[0], TableView) or (strides and set(strides) != {1}):
        return None
    return window_lookup(eqn, name, args)


def shard_lookup(eqn: JaxprEqn, args: Sequence[Value]) -> Lookup:
    """Return how rows of a table over devices are looked up."""
    x, ids = args
    aval = aval_of(eqn.outvars[0])
    tap = Tap(
        x.number,
        1,
        tuple(aval.shape),
        x.dtype,
        math.prod(ids.shape),
        "placed",
        len(ids.shape),
        varies_of(aval),
        sharding_of_type(aval),
    )

    def run(taps: Taps) -> jax.Array:
        out = bound(eqn, [x.array, ids])[0]
        return out if taps.is_without else taps.take(tap, out, ids)

    return [tap], run


def is_of_lines(eqn: JaxprEqn, name: str, x: View) -> bool:
    """Decide whether an equation makes of the lines of a packed table its rows, (V, width)."""
    shape = tuple(aval_of(eqn.outvars[0]).shape)
    is_matrix = name == "reshape" and len(x.shape) == len(shape) == 2
    return is_matrix and isinstance(x, TableView) and is_packed(x.shape, shape[1])


def lookup_in_lines(eqn: JaxprEqn, args: Sequence[Value]) -> Lookup:
    """Return how rows of a packed table are read from its lines."""
    lines, ids = args
    aval, entries = aval_of(eqn.outvars[0]), math.prod(args[1].shape)
    width = aval.shape[-1]
    tap = dataclasses.replace(lines.tap((entries, width), entries, 2), width=width)

    def run(taps: Taps) -> jax.Array:
        out = bound(eqn, [lines.array, ids])[0]
        return taps.take(tap, out, ids.reshape(-1), lambda rows: rows.reshape(out.shape))

    return varying([tap], varies_of(aval)), run


LOOKUPS = (
    *WINDOWS,
    BAG_SUM.primitive.name,
    LOOKUP.name,
    ROWS_OF_LINES.name,
    *SPARSE_PRODUCTS,
)
"""The equations that look rows up."""
