"""Lookups: equations that read rows of tables, and of what is made of tables, or sum them.

    gather, slice, dynamic_slice         windows of an array, which are rows
    jmask_lookup_on_shards               rows of a table that is sharded over devices
    jmask_rows_of_lines                  rows of a packed table
    jmask_bag_sum                        sums of rows of a table, bag by bag
    bcoo_dot_general, bcsr_dot_general   X @ table, X sparse: a bag for each row of X

Where a table is looked up, the equation itself runs, and its result gets a tap. All rows of a
bag have its cotangent, which is not repeated for each of them. Where a view is looked up, rows
of its tables are read, and these have the taps.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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
    rows_of_ids,
    window_of,
)
from jmask._base.array_types import trailing, wide
from jmask._base.forms import aval_of, parameter
from jmask._base.jaxprs import bound
from jmask._base.row_ids import as_number, canonical, id_dtype, widen
from jmask._base.shardings import explicit_mesh, spec_of, typed_like
from jmask._base.types import (
    Argument,
    ArrayFunction,
    Function,
    IdArray,
    IdVector,
    Index,
    Shape,
    Shaped,
)
from jmask._kernels.gathered_rows import BAG_SUM, BagSum
from jmask._kernels.lines import LOOKUP as ROWS_OF_LINES
from jmask._kernels.rows import SLOW_COPY, Gather
from jmask._kernels.sharded_rows import LOOKUP
from jmask._tensors.storage import row_of_each

# --- sums of rows -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums of rows of a view, bag by bag."""

    x: View
    bags: int
    entries: int  # how many rows are summed in all
    aval: Shaped
    call: Callable[[], BagSum]  # makes ids, bags and weights, when it runs

    def lookup(self, result: Callable[[], jax.Array]) -> Lookup:
        """Return the sums that `result` computes of a table, with their tap."""
        assert isinstance(self.x, TableView)
        shape, dtype = (self.bags, *self.x.shape[1:]), self.aval.dtype
        tap = self.x.tap(shape, self.entries, dtype=dtype, kind="bags")

        def ids() -> tuple[IdVector, jax.Array | None, jax.Array | None]:
            """Return id, bag and weight of each entry, (entries,).

            None for bags of equal lengths, and for weights of 1.
            """
            call = self.call()
            ids, bag = call.positions.reshape(-1), call.bag_of_entry
            weight = None if call.weights is None else call.weights.reshape(-1)
            if bag is not None:
                padding = as_number(self.x.shape[0], ids.dtype)
                ids = jnp.where(bag < self.bags, ids, padding)
            return ids, bag, weight

        return [tap], lambda taps: taps.take(result, ids)

    def lookup_by_rows(self) -> Lookup | None:
        """Return how rows are read and then summed, or None if rows of `x` cannot be read."""
        x, count, dtype = self.x, self.entries, id_dtype(self.entries)
        plan = planned(x, 1, (count,))

        def run(taps: Taps) -> jax.Array:
            call = self.call()
            ids = call.positions.reshape(-1)
            rows, is_row = rows_of_ids(x, ids, taps)
            rows = rows.astype(self.aval.dtype)
            which = jnp.where(is_row, lax.iota(dtype, count), as_number(count, dtype))
            which = which.reshape(call.positions.shape)
            (sums,) = BAG_SUM(dataclasses.replace(call, table=rows, positions=which))
            return sums.astype(self.aval.dtype).reshape(self.aval.shape)

        return None if plan is None else (plan, run)


SPARSE_PRODUCTS = ("bcoo_dot_general", "bcsr_dot_general")


def sparse_product(eqn: JaxprEqn, name: str, args: Sequence[Argument]) -> Sums | None:
    """Return X @ table for a sparse X, a bag of rows for each row of X.

    None if it is no sum of whole rows.
    """
    (data, indices, *pointers, table), aval = args, aval_of(eqn.outvars[0])
    (contract, contract_dense), batch = parameter(eqn, "dimension_numbers")
    shape, is_coo = parameter(eqn, "lhs_spinfo").shape, name == "bcoo_dot_general"
    batched = indices.ndim - (2 if is_coo else 1)
    stored = indices.shape[-1] if is_coo else 2
    is_sum = len(contract) == 1 and contract[0] >= batched and tuple(contract_dense) == (0,)
    if any(batch) or not is_sum or batched + stored < len(shape):
        return None
    if not is_coo and (batched or contract[0] != 1):
        return None
    entries = (*shape[:batched], indices.shape[-2] if is_coo else indices.shape[-1])
    kept = [d for d in range(len(shape)) if d not in contract]
    bags, rows = math.prod(shape[d] for d in kept), table.shape[0]

    def places() -> list[jax.Array]:
        """Return the index of each entry along each dimension."""
        if not is_coo:  # entries before the first row or after the last one are padding
            return [row_of_each(pointers[0], indices.shape[0]), indices]
        along = [lax.broadcasted_iota(indices.dtype, entries, d) for d in range(batched)]
        return along + [jnp.broadcast_to(indices[..., d], entries) for d in range(stored)]

    def call() -> BagSum:
        at, bag = places(), jnp.zeros(entries, jnp.int32)
        ids = canonical(at[contract[0]], rows)
        padding = as_number(rows, ids.dtype)
        inside = ids < padding
        for d in kept:
            inside = inside & (at[d] >= 0) & (at[d] < shape[d])
            bag = bag * np.int32(shape[d]) + at[d].astype(jnp.int32)
        ids, bag = jnp.where(inside, ids, padding), jnp.where(inside, bag, bags)
        weight = jnp.broadcast_to(data, entries).astype(wide(aval.dtype)).reshape(-1)
        return BagSum(table, ids.reshape(-1), bag.reshape(-1), weight, bags, 0)

    return Sums(table, bags, math.prod(entries), aval, call)


# --- windows ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of an array that an equation reads, one for each of the entries `batch`."""

    shape: Shape  # of the array
    sizes: Shape  # of a window along each dimension of it
    single: frozenset[int]  # the dimensions that the result does not have, of size 1
    batch: Shape  # the shape of the entries
    offsets: Sequence[int]  # of each other dimension of a window, its place in the result
    # By its dimension, where windows begin: (*batch,), or one number.
    starts: Callable[[], Mapping[int, Index]]
    started: frozenset[int]  # the dimensions that `starts` will have
    clips: bool = True  # whether windows that do not fit are moved; others do not count
    fill: Argument = None  # what those are instead, or None: nothing is said of them

    def leading(self) -> int | None:
        """Return how many dimensions number the rows that it reads of an array.

        The trailing dimensions that each window covers whole are a row. None if entries of a
        matrix would be rows of their own, as in a lookup of columns.
        """
        shape = self.shape
        leading = len(shape)
        while leading > 1:
            d = leading - 1
            # A window that is as wide as the row can begin at 0 alone, if it must fit.
            at_0 = d not in self.single and (d not in self.started or self.clips)
            if not at_0 or self.sizes[d] != shape[d]:
                break
            leading -= 1
        if leading == len(shape) > 1:
            # A gather of as many entries as the matrix has, as in a sort, is no lookup.
            if self.batch == shape:
                return None
            if math.prod(self.sizes) > 1:
                # Some columns of a row, `t[ids, :10]`, are read from the row.
                first = next(d for d, size in enumerate(self.sizes) if size > 1)
                leading = max([first, *(d + 1 for d in self.single)])
                if leading in (0, len(shape)):
                    return None
        return leading

    def are_rows(self) -> bool:
        """Decide whether they are whole rows (*batch, *row) of an array, by one id each."""
        lead, row = len(self.batch), self.shape[1:]
        is_one = self.single == self.started == {0} and self.sizes == (1, *row)
        return is_one and tuple(self.offsets) == tuple(range(lead, lead + len(row)))

    def ids(self) -> IdArray:
        """Return the ids (*batch,) of whole rows; out of range they are moved, or padding."""
        starts, rows = jnp.asarray(self.starts()[0]), self.shape[0]
        if self.clips:
            return jnp.clip(widen(starts, rows), 0, rows - 1)
        return canonical(starts, rows)

    def positions(self, leading: int) -> Positions:
        """Return the positions of all rows in the windows, relative to where these begin.

        The entries are windows, and the rows in each of them.
        """
        more = [d for d in range(leading) if d not in self.single]
        entries, shape = (*self.batch, *(self.sizes[d] for d in more)), self.shape

        def made() -> tuple[list[jax.Array], Valid]:
            along = [jnp.zeros((), id_dtype(n)) for n in shape[:leading]]
            for axis, d in enumerate(more, len(self.batch)):
                if self.sizes[d] != 1:
                    along[d] = lax.broadcasted_iota(id_dtype(shape[d]), entries, axis)
            valid: Valid = None
            for d, start in () if self.clips else self.starts().items():
                start = widen(jnp.asarray(start), shape[d])
                fits = (start >= 0) & (start <= shape[d] - self.sizes[d])
                valid = fits if valid is None else valid & fits
            return along, None if valid is None else per_entry(valid, entries)

        return Positions(leading, entries, made)

    def before_transpose(self, order: Sequence[int]) -> "Windows":
        """Return the windows that these are in the array of which theirs is a transpose."""
        sorted_dims = sorted(range(len(order)), key=order.__getitem__)
        kept = [d for d in range(len(order)) if d not in self.single]
        offset = dict(zip(kept, self.offsets, strict=True))
        return dataclasses.replace(
            self,
            shape=tuple(self.shape[d] for d in sorted_dims),
            sizes=tuple(self.sizes[d] for d in sorted_dims),
            single=frozenset(order[d] for d in self.single),
            offsets=[offset[d] for d in sorted_dims if d in offset],
            starts=lambda: {order[d]: start for d, start in self.starts().items()},
            started=frozenset(order[d] for d in self.started),
        )

    def placed(self, rows: jax.Array, leading: int) -> jax.Array:
        """Return what is read (*entries, *window) as the equation has it."""
        lead = rows.ndim + leading - len(self.sizes)
        single = [lead + d - leading for d in self.single if d >= leading]
        rows = lax.squeeze(rows, single) if single else rows
        return jnp.moveaxis(rows, range(len(self.batch), rows.ndim), self.offsets)


def windows_of(eqn: JaxprEqn, name: str, args: Sequence[Argument]) -> Windows:
    """Return the windows that a `gather`, a `slice` or a `dynamic_slice` reads."""
    shape = args[0].shape
    if name not in WINDOWS:
        starts = parameter(eqn, "start_indices") if name == "slice" else args[1:]
        sizes, every = tuple(aval_of(eqn.outvars[0]).shape), range(len(starts))
        at = lambda: dict(enumerate(starts))
        return Windows(shape, sizes, frozenset(), (), every, at, frozenset(every))
    gather, indices = Gather.of(eqn), args[1]
    numbers = gather.dimension_numbers
    batch = tuple(indices.shape[:-1])
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    batching = dict(pairs)

    def starts_of_gather() -> dict[int, jax.Array]:
        columns: Sequence[jax.Array] = [indices]
        if indices.shape[-1] > 1:
            columns = lax.split(indices, (1,) * indices.shape[-1], indices.ndim - 1)
        columns = [lax.squeeze(x, [x.ndim - 1]) for x in columns]
        starts = dict(zip(numbers.start_index_map, columns, strict=True))
        for d, axis in batching.items():
            starts[d] = lax.broadcasted_iota(np.int32, batch, axis)
        return starts

    fills = gather.mode == lax.GatherScatterMode.FILL_OR_DROP
    fill = np.nan if gather.fill_value is None else gather.fill_value
    return Windows(
        shape,
        tuple(gather.slice_sizes),
        frozenset((*numbers.collapsed_slice_dims, *batching)),
        batch,
        numbers.offset_dims,
        starts_of_gather,
        frozenset((*numbers.start_index_map, *batching)),
        gather.mode == lax.GatherScatterMode.CLIP,
        fill if fills else None,
    )


# --- lookups ------------------------------------------------------------------------------

WINDOWS = ("gather", SLOW_COPY.name)
LOOKUPS = (*WINDOWS, BAG_SUM.primitive.name, LOOKUP.name, ROWS_OF_LINES.name, *SPARSE_PRODUCTS)
"""The equations that look rows up, wherever ids are; slices are views until they are read."""


def lookup_of(
    eqn: JaxprEqn, name: str, args: Sequence[Argument], array: Function, rows_only: bool
) -> Lookup | None:
    """Return how an equation looks rows up, or None if it does not.

    `array` makes arrays of views; `rows_only` says that sums are to be of rows that are read.
    """
    if name not in LOOKUPS:
        return None
    which = len(args) - 1 if name in SPARSE_PRODUCTS else 0
    x, aval = args[which], aval_of(eqn.outvars[0])
    if not isinstance(x, View):
        return None

    # 1. Sums of rows.
    if name == BAG_SUM.primitive.name or name in SPARSE_PRODUCTS:
        args = [a if i == which else array(a) for i, a in enumerate(args)]
        if name in SPARSE_PRODUCTS:
            sums = sparse_product(eqn, name, args)
        else:
            bag = BAG_SUM.call(eqn.params, args)
            sums = Sums(x, bag.bags, math.prod(bag.positions.shape), aval, lambda: bag)
        if sums is None or rows_only or not isinstance(x, TableView):
            return None if sums is None else sums.lookup_by_rows()
        of_array = [x.array if i == which else a for i, a in enumerate(args)]
        return sums.lookup(lambda: bound(eqn, of_array)[0])

    # 2. Rows by their ids.
    ids = array(args[1], is_constant=True)
    if name in WINDOWS:
        return window_lookup(eqn, name, [x, ids])
    if name == LOOKUP.name and not isinstance(x, TableView):
        return _lookup_on_shards(eqn, x, ids)
    if not isinstance(x, TableView):
        return None
    result = lambda: bound(eqn, [x.array, ids])[0]
    if name == LOOKUP.name:
        tap = _sharded_tap(x, ids.shape, aval)
        return [tap], lambda taps: taps.take(result, lambda: ids)
    width, rows = aval.shape[-1], math.prod(ids.shape)
    tap = x.tap((rows, width), rows, width=width)
    return [tap], lambda taps: taps.take(result, lambda: ids.reshape(-1))


def window_lookup(eqn: JaxprEqn, name: str, args: Sequence[Argument]) -> Lookup | None:
    """Return how an equation reads windows of a view, or None if it does not read rows.

    Where the view is a table the equation itself runs, and its result gets a tap. Any other
    view is read by rows, and the result is made of these.
    """
    x, windows, aval = args[0], windows_of(eqn, name, args), aval_of(eqn.outvars[0])
    is_strided = name == "slice" and set(parameter(eqn, "strides") or (1,)) != {1}
    if name not in WINDOWS and (is_strided or not isinstance(x, TableView)):
        return None  # it is a view, which is read where it is looked up
    is_table = isinstance(x, TableView)  # whose rows the equation itself looks up
    if x.transpose_of:  # columns of a transpose are rows
        x, order = x.transpose_of
        windows = windows.before_transpose(order)
    shape, sizes = x.shape, windows.sizes
    leading = None if 0 in shape else windows.leading()
    if leading is None:
        return None
    is_whole_row = leading == 1 == sizes[0] and windows.started == {0}

    # 1. Rows that types place on devices keep the shape of their ids.
    if isinstance(x, TableView) and is_table:
        arrays = [x.array, *args[1:]]
        result = lambda: Gather.of(eqn)(*arrays) if name in WINDOWS else bound(eqn, arrays)[0]
        if any((*spec_of(aval), *spec_of(x.array))):
            tap = _sharded_tap(x, windows.batch, aval)
            lookup = [tap], lambda taps: taps.take(result, windows.ids)
            return lookup if windows.are_rows() else None
        leading = numbered_dimensions(shape, leading)  # of entries, if there are so many

    # 2. How many dimensions number rows that can be read. Single entries of a matrix that would
    # make whole windows are no lookup of rows.
    is_cut = any(sizes[d] != shape[d] for d in range(leading, len(shape)))
    while not x.fits[leading]:  # more dimensions, until the view can be read by them
        leading += 1
        is_matrix = leading == len(shape) > 1 and math.prod(sizes) > 1
        if is_cut or leading > len(shape) or is_matrix:
            return None
    entries = windows.positions(leading).entries
    plan = planned(x, leading, entries) or []

    # 3. Where these rows are, and what the equation makes of them.
    def starts() -> list[Index]:
        known = windows.starts()
        return [known.get(d, 0) for d in range(x.ndim)]

    def reading() -> tuple[Positions, ArrayFunction]:
        p, cut = window_of(x, sizes, starts, (1,) * x.ndim, windows.positions(leading))
        as_rows = lambda rows: rows.reshape(*entries, *shape[leading:])
        return p, lambda rows: windows.placed(cut(as_rows(rows)), leading)

    # 4. A table: ids of its rows, and a tap that becomes what the equation returns.
    if isinstance(x, TableView) and is_table:

        def ids() -> jax.Array:
            if is_whole_row:
                return windows.ids().reshape(-1)
            return ids_at(reading()[0], shape[:leading])

        return plan, lambda taps: taps.take(result, ids, lambda tap: reading()[1](tap))

    # 5. Any other view: rows are read.
    def run(taps: Taps) -> jax.Array:
        p, placed = reading()
        rows = read_at(x, p, taps)
        if p.valid is not None:
            # Nothing that these rows are computed of has a gradient from outside of the view.
            known = windows.fill is not None
            other = jnp.asarray(windows.fill, rows.dtype) if known else lax.stop_gradient(rows)
            rows = jnp.where(trailing(p.valid, rows.ndim), rows, other)
        return placed(rows)

    return plan, run


def _lookup_on_shards(eqn: JaxprEqn, x: View, ids: jax.Array) -> Lookup | None:
    """Return a lookup in what is made of tables that are sharded by their types."""
    plan, aval, batch = planned(x, 1, ids.shape), aval_of(eqn.outvars[0]), ids.ndim
    if not x.shape[0] or plan is None:
        return None
    mesh, spec = explicit_mesh(aval), spec_of(aval)

    def placed(tap: Tap) -> Tap:
        if mesh is None or tap.rows != math.prod(ids.shape):
            return tap
        shape = *ids.shape, *tap.row
        where = NamedSharding(mesh, P(*(spec if shape == aval.shape else spec[:batch])))
        like = jax.ShapeDtypeStruct(shape, tap.dtype, sharding=where)
        return dataclasses.replace(tap, shape=shape, ids=batch, like=like)

    def run(taps: Taps) -> jax.Array:
        rows, is_row = rows_of_ids(x, ids, taps)
        rows = jnp.where(trailing(is_row, rows.ndim), rows, jnp.zeros((), rows.dtype))
        return typed_like(rows, aval)

    return list(map(placed, plan)), run


def _sharded_tap(x: TableView, ids: Shape, aval: Argument) -> Tap:
    """Return the tap of rows that are sharded as the type of the result says."""
    return x.tap(tuple(aval.shape), math.prod(ids), ids=len(ids), like=aval)
