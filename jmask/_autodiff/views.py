"""Views: arrays that are computed from tables, and not materialised.

    y    = convert_element_type t        t (V, D) in bfloat16: O(V) where it is made
    rows = gather y ids                  convert_element_type (gather t ids): O(n)

A view knows how to read its entries from other views. A read ends at a table, with a tap for
its rows. So a lookup in what is made of tables is a lookup in these, and its gradient is rows.
What equations make of views is in `view_rules`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._autodiff.taps import NONE, Tap, Taps
from jmask._base.array_types import is_known, trailing
from jmask._base.row_ids import as_number, id_dtype, most_rows, numbered, widen
from jmask._base.shardings import explicit_mesh, flattened, on_this_mesh, varying_axes
from jmask._base.types import Argument, ArrayFunction, DType, Index, Options, Shape
from jmask._kernels.rows import Gather
from jmask._kernels.sharded_rows import looked_up

Lookup = tuple[list[Tap], Callable[[Taps], jax.Array]]
"""The taps of a lookup, and its result with these taps."""
Valid = jax.Array | None
"""Where entries count; None for everywhere. A table has no gradient from the others."""


@dataclasses.dataclass(eq=False)
class Positions:
    """Entries of an array, by indices along its first dimensions, in range.

    A read that is planned asks how many indices there are; a read that runs has them made, once
    for all that is read at these positions.
    """

    count: int  # how many dimensions have indices
    entries: Shape  # the shape of the indices
    # Makes the indices, each (*entries,) or a number, and says where they count.
    made: Callable[[], tuple[Sequence[jax.Array], Valid]]

    @classmethod
    def of_all(cls, sizes: Shape) -> "Positions":
        """Return the positions of all entries along dimensions of these sizes."""

        def made() -> tuple[list[jax.Array], Valid]:
            dimensions = enumerate(sizes)
            return [lax.broadcasted_iota(id_dtype(n), sizes, d) for d, n in dimensions], None

        return cls(len(sizes), sizes, made)

    @functools.cached_property
    def _indices(self) -> tuple[Sequence[jax.Array], Valid]:
        return self.made()

    @property
    def along(self) -> Sequence[jax.Array]:
        return self._indices[0]

    @property
    def valid(self) -> Valid:
        return self._indices[1]


Reading = tuple[Sequence[tuple["View", Positions]], ArrayFunction]
"""What is read of other views, and a function of it that returns (*entries, *row)."""


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """An array that is made of tables: how to read some of it, and how to make it."""

    shape: Shape  # of the array
    dtype: DType
    # Positions -> how they are read; None if they are not by rows of tables.
    reading: Callable[[Positions], Reading | None]
    # (how operands are made) -> the array.
    make: Callable[[ArrayFunction], jax.Array] | None = None
    tables: frozenset[int] = frozenset()  # the numbers of the leaves that it has a gradient for
    equations: int = 0  # how many make it, each counted wherever it is used
    # Whether its rows depend on run-time values, as with `dynamic_slice`.
    is_lookup: bool = False
    is_stopped: bool = False  # whether it is behind a `stop_gradient`
    varies: frozenset[str] = frozenset()  # the axes of a `shard_map` over which it differs
    # The taps and the result of one equation that reads all of it, if there is one.
    whole: Lookup | None = None
    # The first equation that computes it or looks it up, and does not only move it, after those
    # that run the program that this is in; or nothing.
    computed_by: tuple[JaxprEqn, ...] = ()
    # The view that it is a transpose of, and the order of its dimensions.
    transpose_of: "tuple[View, Sequence[int]] | None" = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @functools.cached_property
    def fits(self) -> list[bool]:
        """For 0, 1, ... leading dimensions, whether positions along them can be read."""
        return [planned(self, n, ()) is not None for n in range(self.ndim + 1)]


@dataclasses.dataclass(frozen=True, eq=False)
class TableView(View):
    """A table: a leaf that is differentiated, or what is the same for readers."""

    number: int = -1  # of the leaf
    array: Argument = None  # its value; of a trial its abstract value
    width: int | None = None  # of the lines of a packed table in another shape, (V, width)

    def tap(self, shape: Shape, rows: int, leading: int = 1, **more: Argument) -> Tap:
        """Return a tap of this shape for so many rows."""
        known: Options = {"dtype": self.dtype, "width": self.width} | more
        return Tap(self.number, 2 if known["width"] else leading, shape, rows=rows, **known)

    def rows(self, p: Positions, taps: Taps) -> jax.Array:
        """Return rows, or entries of rows, with their tap."""
        leading, lead = numbered_dimensions(self.shape, p.count), len(p.entries)
        first = Positions(leading, p.entries, lambda: (p.along[:leading], p.valid))
        ids = lambda: ids_at(first, self.shape[:leading])
        rows = taps.take(lambda: entries_at(self.array, first), ids)
        for position in p.along[leading:]:  # of a table of so many entries
            index = trailing(jnp.broadcast_to(position, p.entries), rows.ndim)
            index = jnp.broadcast_to(index, (*p.entries, 1, *rows.shape[lead + 1 :]))
            rows = lax.squeeze(jnp.take_along_axis(rows, index, lead, mode="clip"), [lead])
        return rows


def view_of_table(number: int, x: Argument, width: int | None = None) -> TableView:
    """Return the view of a leaf that is differentiated; of lines, of rows of this width."""
    return TableView(
        tuple(x.shape),
        x.dtype,
        lambda p: None,
        lambda _: x,
        frozenset([number]),
        varies=varying_axes(x),
        number=number,
        array=x,
        width=width,
    )


def tables_of(operands: Iterable[Argument]) -> frozenset[int]:
    """Return the numbers of the tables that operands are made of; arrays are made of none."""
    views = (x for x in operands if isinstance(x, View))
    return frozenset[int]().union(*(x.tables for x in views))


def as_view(x: Argument) -> View:
    """Return a view; an array becomes one that is read without a tap."""
    if isinstance(x, View):
        return x
    read = lambda p: ((), lambda: entries_at(jnp.asarray(x), p))
    return View(tuple(x.shape), x.dtype, read, lambda _: x)


def without_gradient(x: View) -> View:
    """Return the view behind a `stop_gradient`."""
    make = lambda made: lax.stop_gradient(made(x, is_constant=True))
    reading = lambda p: ([(x, p)], lax.stop_gradient)
    return View(x.shape, x.dtype, reading, make, equations=x.equations, is_stopped=True)


# --- reads --------------------------------------------------------------------------------


class Reader:
    """Reads entries of views with taps, or only plans these; at the same positions once."""

    def __init__(self, taps: Taps | None = None) -> None:
        self.taps, self.plan = taps, list[Tap]()
        self._known: dict[tuple[View, Positions], Argument] = {}

    def read(self, x: View, p: Positions) -> Argument:
        """Return entries (*entries, *rest of the shape); in a plan, whether it can."""
        if (x, p) in self._known:
            return self._known[x, p]
        result: Argument = False
        if isinstance(x, TableView) and self.taps is not None:
            result = x.rows(p, self.taps)
        elif isinstance(x, TableView):
            result = p.count == 1 if x.width else p.count > 0
            if result:
                leading, rows = numbered_dimensions(x.shape, p.count), math.prod(p.entries)
                self.plan.append(x.tap((rows, *x.shape[leading:]), rows, leading))
        elif (reading := x.reading(p)) is not None:
            parts, finish = reading
            reader = Reader(self.taps and NONE) if x.is_stopped else self
            results = [reader.read(*part) for part in parts]
            result = all(results) if self.taps is None else finish(*results)
        self._known[x, p] = result
        return result


def planned(x: View, count: int, entries: Shape) -> list[Tap] | None:
    """Return the taps of a read, or None if it does not read rows."""
    reader, p = Reader(), Positions(count, entries, lambda: ([], None))
    return reader.plan if reader.read(x, p) else None


def read_at(x: View, p: Positions, taps: Taps) -> jax.Array:
    """Return entries of a view (*entries, *rest of the shape)."""
    return Reader(taps).read(x, p)


def rows_of_ids(x: View, ids: jax.Array, taps: Taps) -> tuple[jax.Array, jax.Array]:
    """Return rows (*ids.shape, *row) of a view by canonical ids, and which ids are rows."""
    last = as_number(x.shape[0] - 1, ids.dtype)
    is_row = ids <= last
    p = Positions(1, ids.shape, lambda: ([jnp.minimum(ids, last)], is_row))
    return read_at(x, p, taps), is_row


def numbered_dimensions(shape: Shape, count: int) -> int:
    """Return how many of the first `count` dimensions of a table ids can number."""
    while count > 1 and is_known(*shape[:count]) and math.prod(shape[:count]) > most_rows():
        count -= 1
    return count


def per_entry(x: jax.Array, entries: Shape) -> jax.Array:
    """Return numbers along the first dimensions of entries, or one for all, of each."""
    return jnp.broadcast_to(trailing(x, len(entries)), entries)


def ids_at(p: Positions, sizes: Shape) -> jax.Array:
    """Return canonical ids (n,) of rows that are numbered along dimensions of these sizes."""
    count = math.prod(sizes)
    dtype = id_dtype(count)
    ids = jnp.broadcast_to(numbered(p.along, sizes, dtype), p.entries)
    if p.valid is not None:
        ids = jnp.where(per_entry(p.valid, p.entries), ids, as_number(count, dtype))
    return flattened(ids, ids.ndim)


def entries_at(x: jax.Array, p: Positions) -> jax.Array:
    """Return the entries (*entries, *rest of the shape) of an array at positions in range."""
    x = on_this_mesh(x)  # rows are read where the view is looked up
    count, lead = p.count, len(p.entries)
    if not count:
        return jnp.broadcast_to(x, (*p.entries, *x.shape))
    if count == 1 and explicit_mesh(x, p.along[0]) is not None:
        return looked_up(x, p.along[0])
    first = tuple(range(count))
    gather = Gather(
        lax.GatherDimensionNumbers(tuple(range(lead, lead + x.ndim - count)), first, first),
        (1,) * count + x.shape[count:],
        lax.GatherScatterMode.CLIP,
    )
    dtype = id_dtype(max(x.shape[:count]))
    indices = [jnp.broadcast_to(i.astype(dtype), p.entries) for i in p.along]
    return gather(x, jnp.stack(indices, -1))


def window_of(
    x: View,
    shape: Shape,
    starts: Callable[[], Sequence[Index]],
    steps: Sequence[int],
    p: Positions,
) -> tuple[Positions, ArrayFunction]:
    """Return where positions in a window are in `x`, and what cuts rows of `x` to the window.

    Each entry of a batch may begin at a place of its own.
    """
    count, lead = p.count, len(p.entries)

    @functools.cache
    def begins() -> list[Index]:
        """Return where the window begins, clipped so that it fits; static bounds do fit."""

        def begin(s: Index, n: int, size: int) -> Index:
            if isinstance(s, int):
                return s
            return jnp.clip(widen(jnp.asarray(on_this_mesh(s)), n), 0, n - size)

        return list(map(begin, starts(), x.shape, shape))

    def at() -> tuple[list[jax.Array], Valid]:
        moved = []
        for q, n, begin, step in zip(p.along, x.shape, begins(), steps, strict=False):
            q = widen(q, n) if step == 1 else widen(q, n) * np.asarray(step, id_dtype(n))
            moved.append(q + (begin if isinstance(begin, int) else trailing(begin, lead)))
        return moved, p.valid

    def finish(rows: jax.Array) -> jax.Array:
        if rows.shape[lead:] == shape[count:] and -1 not in steps:
            return rows
        row = list(zip(begins(), shape, steps, strict=True))[count:]
        for d, (begin, size, step) in enumerate(row, lead):
            if step == -1:
                rows = lax.rev(rows, [d])
            elif size == rows.shape[d]:
                continue
            elif isinstance(begin, int):
                end = begin + (size - 1) * step + 1 if size else begin
                rows = lax.slice_in_dim(rows, begin, end, step, d)
            elif begin.ndim == 0:
                rows = lax.dynamic_slice_in_dim(rows, begin, size, d)
            else:
                one = (*(1,) * d, size, *(1,) * (rows.ndim - d - 1))
                index = trailing(begin, rows.ndim) + lax.broadcasted_iota(begin.dtype, one, d)
                rows = jnp.take_along_axis(rows, index, d, mode="clip")
        return rows

    return Positions(count, p.entries, at), finish
