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

from jmask._autodiff.sums import SPARSE_PRODUCTS, sparse_product
from jmask._autodiff.taps import Tap, Taps
from jmask._autodiff.views import (
    Lookup,
    Positions,
    TableView,
    Valid,
    View,
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
from jmask._base.types import ArrayFunction, Shape, Value
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

    def positions(self, shape: Shape, leading: int) -> tuple[Positions, dict[int, jax.Array]]:
        """Return positions in range, and where windows begin in a row."""
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
        return Positions(along, entries, valid), in_row

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


# --- lookups ------------------------------------------------------------------------------

WINDOWS = ("gather", SLOW_COPY.name)
LOOKUPS = (
    *WINDOWS,
    BAG_SUM.primitive.name,
    LOOKUP.name,
    ROWS_OF_LINES.name,
    *SPARSE_PRODUCTS,
)
"""The equations that look rows up, wherever ids are; slices are views until they are read."""


def lookup_of(
    eqn: JaxprEqn,
    name: str,
    args: Sequence[Value],
    array: Callable[[Value], Value],
    rows_only: bool,
) -> Lookup | None:
    """Return how an equation looks rows up, or None if it does not.

    `array` makes arrays of ids; `rows_only` says that sums are to be of rows that are read.
    """
    x = args[0]
    if name in WINDOWS and isinstance(x, View):
        return window_lookup(eqn, name, [x, array(args[1])])
    if name == LOOKUP.name and isinstance(x, TableView):
        ids = args[1]
        return _of_equation(eqn, args, _placed(eqn, x, ids.shape), lambda: (ids, None))
    if name == ROWS_OF_LINES.name and isinstance(x, TableView):
        ids, aval = args[1], aval_of(eqn.outvars[0])
        width, entries = aval.shape[-1], math.prod(ids.shape)
        tap = dataclasses.replace(x.tap((entries, width), entries, 2), width=width)
        return _of_equation(eqn, args, tap, lambda: (ids.reshape(-1), None))
    if (
        name in SPARSE_PRODUCTS
        and [isinstance(a, View) for a in args].index(True) == len(args) - 1
    ):
        return sparse_product(eqn, name, args, rows_only)
    return None


def is_of_lines(eqn: JaxprEqn, name: str, x: View) -> bool:
    """Decide whether an equation makes of the lines of a packed table its rows, (V, width)."""
    shape = tuple(aval_of(eqn.outvars[0]).shape)
    is_matrix = name == "reshape" and len(x.shape) == len(shape) == 2
    return is_matrix and isinstance(x, TableView) and is_packed(x.shape, shape[1])


def slice_lookup(eqn: JaxprEqn, name: str, args: Sequence[Value]) -> Lookup | None:
    """Return how a slice of a table is read as a whole, by its equation."""
    strides = parameter(eqn, "strides") if name == "slice" else None
    if not isinstance(args[0], TableView) or (strides and set(strides) != {1}):
        return None
    return window_lookup(eqn, name, args)


def window_lookup(eqn: JaxprEqn, name: str, args: Sequence[Value]) -> Lookup | None:
    """Return how an equation reads windows of a view, or None if it does not read rows."""
    x, windows, aval = args[0], windows_of(eqn, name, args), aval_of(eqn.outvars[0])
    shape = x.shape
    leading = None if 0 in shape else windows.leading(shape)
    if leading is None:
        return None
    if isinstance(x, TableView):
        return _of_table(eqn, args, windows, leading)
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
        p, in_row = windows.positions(shape, leading)
        rows = read_at(x, p, taps)
        if p.valid is not None and windows.fill is not None:
            fill = jnp.asarray(windows.fill, rows.dtype)
            rows = jnp.where(trailing(p.valid, rows.ndim), rows, fill)
        return windows.placed(rows, shape, leading, in_row)

    return varying(plan, varies_of(aval)), run


# Of a table the equation itself runs, and what it makes gets a tap.


def _of_table(
    eqn: JaxprEqn, args: Sequence[Value], windows: Windows, leading: int
) -> Lookup | None:
    (x, *_), aval = args, aval_of(eqn.outvars[0])
    shape: Shape = x.shape
    is_whole_row = leading == 1 == windows.sizes[0] and windows.started == {0}
    sharding, of_table = (sharding_of_type(getattr(a, "aval", a)) for a in (aval, x.array))
    specs = [*(sharding.spec if sharding else ()), *(of_table.spec if of_table else ())]
    if sharding is not None and any(specs):  # rows are where their ids are: the tap is, too
        lead = len(windows.batch)
        in_order = tuple(windows.offsets) == tuple(range(lead, len(aval.shape)))
        if not (is_whole_row and in_order and 0 in windows.single):
            return None
        tap = _placed(eqn, x, windows.batch)
    else:
        leading = numbered_dimensions(shape, leading)  # of entries, if there are so many
        plan = planned(x, leading, windows.entries(leading))
        if plan is None:
            return None
        (tap,) = plan

    def ids_and_result() -> tuple[jax.Array, ArrayFunction | None]:
        in_row: Mapping[int, jax.Array] = {}
        if is_whole_row and not windows.clips:
            (start,) = windows.starts().values()
            ids = canonical(start, shape[0])
        else:
            p, in_row = windows.positions(shape, leading)
            ids = ids_at(p, shape[:leading])
        if tap.kind == "placed":
            return ids.reshape(windows.batch), None
        entries = windows.entries(leading)

        def as_result(rows: jax.Array) -> jax.Array:
            rows = rows.reshape(*entries, *shape[leading:])
            return windows.placed(rows, shape, leading, in_row)

        return ids.reshape(-1), as_result

    return _of_equation(eqn, args, tap, ids_and_result)


def _placed(eqn: JaxprEqn, x: TableView, ids: Shape) -> Tap:
    """Return the tap of rows that are sharded as the type of the result says."""
    aval, count = aval_of(eqn.outvars[0]), math.prod(ids)
    shape, sharding = tuple(aval.shape), sharding_of_type(aval)
    return Tap(x.number, 1, shape, x.dtype, count, "placed", len(ids), frozenset(), sharding)


def _of_equation(
    eqn: JaxprEqn,
    args: Sequence[Value],
    tap: Tap,
    ids_and_result: Callable[[], tuple[jax.Array, ArrayFunction | None]],
) -> Lookup:
    """Return the lookup that is an equation of a table, with a tap for its result."""
    (tap,) = varying([tap], varies_of(aval_of(eqn.outvars[0])))

    def run(taps: Taps) -> jax.Array:
        arrays = [args[0].array, *args[1:]]
        is_gather = eqn.primitive.name in WINDOWS
        out = gather_of(eqn)(*arrays) if is_gather else bound(eqn, arrays)[0]
        if taps.is_without:
            return out
        ids, as_result = ids_and_result()
        return taps.take(tap, out, ids, as_result)

    return [tap], run
