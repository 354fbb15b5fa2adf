"""Views: arrays that are made of tables, and not made.

    y    = convert_element_type t        t (V, D) in bfloat16: O(V) where it is made
    rows = gather y ids                  convert_element_type (gather t ids): O(n)

A view knows how to read some of its entries, and a read ends at a table, with a tap for its
rows. So a lookup in what is made of tables is a lookup in these, and its gradient is rows.

`plan` says which rows a read would need, from shapes alone; `read` does it. What equations make
of views is in `view_rules`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmask._autodiff.taps import NONE, Tap, Taps
from jmask._base.array_types import trailing
from jmask._base.row_ids import id_dtype, most_rows, numbered
from jmask._base.shardings import axes_of_type
from jmask._base.types import DType, Shape, Value
from jmask._kernels.gather import Gather

Lookup = tuple[list[Tap], Callable[[Taps], jax.Array]]
"""The taps of a lookup, and its result with these taps."""
Valid = jax.Array | None
"""Where entries count; None for everywhere. A table has no gradient from the others."""


class Where(NamedTuple):
    """The shape of entries to read, and a name: reads of one name are at the same positions."""

    entries: Shape
    name: Hashable = None

    def moved(self, key: Hashable, entries: Shape | None = None) -> "Where":
        """Return other positions, which `key` makes of these."""
        return Where(self.entries if entries is None else entries, (key, self.name))


class Positions(NamedTuple):
    """Indices along first dimensions of an array, in range: each (*entries,), or a number."""

    along: Sequence[jax.Array]
    where: Where

    @property
    def entries(self) -> Shape:
        return self.where.entries

    def moved(
        self, key: Hashable, along: Sequence[jax.Array], entries: Shape | None = None
    ) -> "Positions":
        """Return other indices, which `key` makes of these."""
        return Positions(along, self.where.moved(key, entries))

    @classmethod
    def of_all(cls, shape: Shape) -> "Positions":
        """Return those of all entries along dimensions of these sizes."""
        along = [lax.broadcasted_iota(id_dtype(n), shape, d) for d, n in enumerate(shape)]
        return cls(along, Where(shape))


class Plans:
    """A read that is only planned: the taps that it will take, in order."""

    def __init__(self) -> None:
        self.taps: list[Tap] = []
        self._known: dict[Hashable, bool] = {}

    def read(self, x: "View", count: int, where: Where) -> bool:
        """Decide whether positions along `count` dimensions read rows of tables."""
        key = id(x), count, where.name
        if key not in self._known:
            self._known[key] = x.plan(count, where, self)
        return self._known[key]


class Reads:
    """A read: what two operands of an equation are made of is read once."""

    def __init__(self, taps: Taps) -> None:
        self.taps = taps
        self._known: dict[Hashable, jax.Array] = {}

    def read(self, x: "View", positions: Positions, valid: Valid) -> jax.Array:
        """Return entries (*entries, *rest of the shape)."""
        key = id(x), len(positions.along), positions.where.name
        if key not in self._known:
            self._known[key] = x.read(positions, valid, self)
        return self._known[key]


def planned(x: "View", count: int, entries: Shape) -> list[Tap] | None:
    """Return the taps of a read, or None if it does not read rows."""
    plans = Plans()
    return plans.taps if plans.read(x, count, Where(entries)) else None


def read_at(x: "View", positions: Positions, valid: Valid, taps: Taps) -> jax.Array:
    """Return entries of a view (*entries, *rest of the shape)."""
    return Reads(taps).read(x, positions, valid)


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """An array that is made of tables: how to read some of it, and how to make it.

    Attributes:
        shape, dtype: of the array.
        plan: (how many first dimensions positions are along, where, plans) -> whether rows
            of tables can be read so; adds their taps in the order in which `read` takes them.
        read: (positions, where they count, reads) -> (*entries, *rest of the shape).
        make: (how operands are made) -> the array.
        whole: the taps and the result of one equation that reads all of it, if there is one.
        tables: the numbers of the leaves that it has a gradient for.
        equations: how many make it, each counted wherever it is used.
        is_lookup: whether its rows are decided when it runs, as those of a `dynamic_slice`.
        varies: the axes of a `shard_map` over which it differs.
        transpose_of: the view that it is a transpose of, and the order of its dimensions.
    """

    shape: Shape
    dtype: DType
    plan: Callable[[int, Where, Plans], bool]
    read: Callable[[Positions, Valid, Reads], jax.Array]
    make: Callable[[Callable[["View"], jax.Array]], jax.Array]
    tables: frozenset[int] = frozenset()
    equations: int = 0
    is_lookup: bool = False
    varies: frozenset[str] = frozenset()
    whole: Lookup | None = None
    transpose_of: "tuple[View, Sequence[int]] | None" = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @functools.cached_property
    def fits(self) -> list[bool]:
        """Whether it can be read by positions along its first 0, 1, ... dimensions."""
        return [planned(self, n, ()) is not None for n in range(self.ndim + 1)]


@dataclasses.dataclass(frozen=True, eq=False)
class TableView(View):
    """A table: a leaf that is differentiated, or what is the same for readers.

    Attributes:
        number: of the leaf.
        array: its value; of a trial its abstract value.
        width: of the lines of a packed table in another shape, (V, width).
    """

    number: int = -1
    array: Value = None
    width: int | None = None

    def tap(self, shape: Shape, rows: int, leading: int = 1, dtype: DType | None = None) -> Tap:
        """Return a tap of this shape for so many rows."""
        dtype, leading = dtype or self.dtype, 2 if self.width else leading
        return Tap(
            self.number, leading, shape, dtype, rows, varies=self.varies, width=self.width
        )


def view_of_table(number: int, x: Value, width: int | None = None) -> TableView:
    """Return the view of a leaf that is differentiated; of lines, of rows of this width."""
    shape, dtype, varies = tuple(x.shape), x.dtype, varies_of(x)

    def tap(count: int, entries: Shape) -> Tap:
        rows, leading = math.prod(entries), numbered_dimensions(shape, count)
        return view.tap((rows, *shape[leading:]), rows, leading)

    def plan(count: int, where: Where, plans: Plans) -> bool:
        can_be_read = count == 1 if width else count > 0
        if can_be_read:
            plans.taps.append(tap(count, where.entries))
        return can_be_read

    def read(positions: Positions, valid: Valid, reads: Reads) -> jax.Array:
        leading = numbered_dimensions(shape, len(positions.along))
        first = Positions(positions.along[:leading], positions.where)
        rows = gathered(x, first)
        if not reads.taps.is_without:
            ids = ids_at(first, shape[:leading], valid)
            rows = reads.taps.take(tap(leading, positions.entries), rows, ids)
        for position in positions.along[leading:]:  # of a table of so many entries
            rows = _chosen(rows, position, positions.entries)
        return rows

    view = TableView(
        shape,
        dtype,
        plan,
        read,
        lambda _: x,
        frozenset([number]),
        varies=varies,
        number=number,
        array=x,
        width=width,
    )
    return view


def varies_of(x: Value) -> frozenset[str]:
    """Return the axes of a `shard_map` over which an array, or an abstract one, differs."""
    return axes_of_type(getattr(x, "aval", x))


def varying(plan: Sequence[Tap], axes: frozenset[str]) -> list[Tap]:
    """Return taps of what differs over these axes."""
    return [dataclasses.replace(tap, varies=tap.varies | axes) for tap in plan]


def numbered_dimensions(shape: Shape, count: int) -> int:
    """Return how many of the first `count` dimensions of a table ids can number."""
    while count > 1 and math.prod(shape[:count]) > most_rows():
        count -= 1
    return count


def _chosen(rows: jax.Array, position: jax.Array, entries: Shape) -> jax.Array:
    """Return one entry along the dimension after `entries`."""
    lead = len(entries)
    index = jnp.broadcast_to(position, entries)[(..., *(None,) * (rows.ndim - lead))]
    index = jnp.broadcast_to(index, (*entries, 1, *rows.shape[lead + 1 :]))
    return lax.squeeze(jnp.take_along_axis(rows, index, lead, mode="clip"), [lead])


def per_entry(x: jax.Array, entries: Shape) -> jax.Array:
    """Return numbers along the first dimensions of entries, or one for all, of each."""
    return jnp.broadcast_to(trailing(x, len(entries)), entries)


def ids_at(positions: Positions, sizes: Shape, valid: Valid) -> jax.Array:
    """Return canonical ids (n,) of rows that are numbered along dimensions of these sizes."""
    count, entries = math.prod(sizes), positions.entries
    dtype = id_dtype(count)
    ids = jnp.broadcast_to(numbered(positions.along, sizes, dtype), entries)
    if valid is not None:
        ids = jnp.where(per_entry(valid, entries), ids, np.asarray(count, dtype))
    return ids.reshape(math.prod(entries))


def gathered(x: jax.Array, positions: Positions) -> jax.Array:
    """Return the entries (*entries, *rest of the shape) of an array at positions in range."""
    along, entries = positions.along, positions.entries
    if not along:
        return jnp.broadcast_to(x, (*entries, *x.shape))
    lead, first = len(entries), tuple(range(len(along)))
    offsets = tuple(range(lead, lead + x.ndim - len(along)))
    gather = Gather(
        lax.GatherDimensionNumbers(offsets, first, first),
        (1,) * len(along) + x.shape[len(along) :],
        lax.GatherScatterMode.CLIP,
    )
    dtype = id_dtype(max(x.shape[: len(along)]))
    indices = [jnp.broadcast_to(p.astype(dtype), entries) for p in along]
    return gather(x, jnp.stack(indices, -1))


def view_of_array(x: Value) -> View:
    """Return the view of an array as it is, which is read without a tap."""
    return View(
        tuple(x.shape),
        x.dtype,
        lambda count, where, plans: True,
        lambda positions, valid, reads: gathered(jnp.asarray(x), positions),
        lambda _: x,
    )


def without_gradient(x: View) -> View:
    """Return the view behind a `stop_gradient`."""

    def plan(count: int, where: Where, plans: Plans) -> bool:
        return x.fits[count]

    def read(positions: Positions, valid: Valid, reads: Reads) -> jax.Array:
        return lax.stop_gradient(read_at(x, positions, valid, NONE))

    make = lambda made: lax.stop_gradient(made(x))
    return View(x.shape, x.dtype, plan, read, make, equations=x.equations)


def element(x: View, number: jax.Array) -> View:
    """Return one array of a stack of them, by its number."""
    key = object()

    def plan(count: int, where: Where, plans: Plans) -> bool:
        return plans.read(x, count + 1, where.moved(key))

    def read(p: Positions, valid: Valid, reads: Reads) -> jax.Array:
        return reads.read(x, p.moved(key, [number, *p.along]), valid)

    def make(made: Callable[[View], jax.Array]) -> jax.Array:
        return lax.dynamic_index_in_dim(made(x), number, 0, keepdims=False)

    return View(x.shape[1:], x.dtype, plan, read, make, x.tables, x.equations, True, x.varies)
