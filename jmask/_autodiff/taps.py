"""Taps: arguments of zeros, one for each lookup, in which JAX differentiates.

    rows = table[ids]      becomes     rows = tapped(table[ids], tap)
    d loss / d tap         is          what the lookup adds to the gradient, at the rows `ids`

A table is a constant of the program with taps, so nothing as large as a table is made. What a
program looks up is found from its jaxpr first, in a trial, and found again when it runs with an
array for each tap: both go through the lookups in one order.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType

from jmask._base.row_ids import id_dtype
from jmask._base.shardings import (
    end_to_end,
    explicit_mesh,
    flattened,
    on_mesh,
    rows_in_any_order,
    typed_like,
    varying_alike,
    varying_axes,
    varying_over,
)
from jmask._base.types import (
    ArrayFunction,
    Arrays,
    DType,
    IdVector,
    PyTree,
    RowArray,
    Shape,
    Shaped,
    TableArray,
)
from jmask._kernels import tuning
from jmask._kernels.gathered_rows import GATHERED, GatheredRows, concatenated, pays
from jmask._kernels.rows import split_rows
from jmask._tensors.row_sparse import RowSparse


@jax.custom_jvp
def tapped(rows: jax.Array, tap: jax.Array) -> jax.Array:
    """Return rows, with the derivative of rows + tap.

    A sum would do, but what is compiled then adds zeros, and a sum with 0 is no -0.
    """
    return rows


def _derivative(primals: Arrays, tangents: Arrays) -> tuple[jax.Array, jax.Array]:
    known = [t for t in tangents if not isinstance(t, SymbolicZero)]
    return primals[0], sum(known[1:], known[0]) if known else jnp.zeros_like(primals[0])


tapped.defjvp(_derivative, symbolic_zeros=True)


@dataclasses.dataclass(frozen=True)
class Tap:
    """One lookup of a table: what is to be known of it before it runs."""

    table: int  # the number of the leaf
    leading: int  # how many dimensions of the table the ids number
    shape: Shape  # of the tap: rows (n, *row) of ids, or sums (bags, *row) of rows
    dtype: DType  # of the tap
    rows: int  # how many rows of the gradient it makes
    # "rows" (*ids.shape, *row); "bags", whose ids are (ids, bag of each or None if all bags
    # have one length, weight of each or None).
    kind: Literal["rows", "bags"] = "rows"
    ids: int = 1  # the number of dimensions of the ids
    varies: frozenset[str] = frozenset()  # the axes of `shard_map`s over which it differs
    like: Shaped | None = None  # the abstract rows, whose sharding it has, or None
    batch: Shape = ()  # the lengths of the loops that it is in, outermost first
    # Of packed tables, how many entries of a line a row has; `leading` is 2 then.
    width: int | None = None

    @property
    def row(self) -> Shape:
        """The shape of a row."""
        return self.shape[self.ids :]

    @property
    def key(self) -> tuple[int, int, Shape, DType]:
        """The key by which branches of a `cond` share taps: equal ones become one tap."""
        return self.table, self.leading, self.row, self.dtype

    def rows_of(self, table: Shape) -> int:
        """Return how many rows a table of this shape has, which is the id of padding."""
        first = math.prod(table[: self.leading])
        return math.prod(table) // self.width if self.width else first

    @property
    def count(self) -> int:
        """The number of rows in all rounds of its loops."""
        return math.prod(self.batch) * self.rows

    @property
    def size(self) -> int:
        """The number of entries of the table that it reads."""
        return self.rows * math.prod(self.shape[1:])

    def zeros(self) -> jax.Array:
        """Return the array in which JAX differentiates."""
        return self.varying(self.in_shape(jnp.zeros((*self.batch, *self.shape), self.dtype)))

    def varying(self, x: jax.Array) -> jax.Array:
        """Return an array that differs as it does, over axes that this is inside of."""
        inside = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
        return varying_over(self.varies & inside, x)

    def in_shape(self, x: jax.Array) -> jax.Array:
        """Return an array in the shape of all rounds, sharded as the rows are."""
        x = x.reshape(*self.batch, *self.shape)
        return x if self.like is None else typed_like(x, self.like)


class Taps:
    """The taps of a program, in the order of its lookups.

    The taps of a nested program are a list among them.

    Without specs and arrays it is a trial: nothing runs, and lookups are only noted.

    Attributes:
        record: of a trial the specs, each a `Tap`, or a list of them for a loop, a branch or
            another nested program; of a run in their places the ids.
        rows_only: whether a bag is to be read row by row, as in a branch.
        is_without: whether there are none, as where no gradient comes from.
        made: arrays that were made already at this level of traces, by their view, and
            whether no gradient is taken of them.
    """

    def __init__(
        self,
        specs: PyTree = None,
        arrays: PyTree = None,
        rows_only: bool = False,
        is_without: bool = False,
    ) -> None:
        self.record: list[PyTree] = []
        self.made: dict[tuple[Hashable, bool], jax.Array] = {}
        self.rows_only, self.is_without = rows_only, is_without
        self.is_trial = specs is None and not is_without
        self._given: Iterator[PyTree] = iter(zip(specs or (), arrays or (), strict=True))

    def take(
        self,
        read: Callable[[], jax.Array],
        ids: Callable[[], PyTree],
        as_result: ArrayFunction = lambda tap: tap,
    ) -> jax.Array:
        """Return rows that are read with the next tap, which `as_result` brings into form."""
        rows = read()
        if self.is_without:
            return rows
        _, tap = next(self._given)
        tap = as_result(on_mesh(jax.typeof(rows).sharding.mesh, tap)).reshape(rows.shape)
        self.record.append(ids())
        return tapped(*varying_alike(rows, typed_like(tap, rows)))

    def next_nested(self) -> tuple[PyTree, PyTree]:
        """Return specs and arrays of the next nested program; None twice in a trial."""
        return (None, None) if self.is_trial else next(self._given)

    def inside(self, specs: PyTree, arrays: PyTree, rows_only: bool = False) -> "Taps":
        """Return the taps of what an equation runs."""
        return Taps(specs, arrays, rows_only or self.rows_only)


NONE = Taps(is_without=True)
"""The taps of what has no gradient: there are none."""


# --- from taps to a gradient --------------------------------------------------------------


def gradients_of_tables(
    tables: Sequence[TableArray], specs: PyTree, ids: PyTree, cotangents: PyTree
) -> dict[int, RowSparse]:
    """Return the gradient of each table that has taps: the cotangents at the ids of all."""
    parts: dict[int, list[tuple[Tap, IdVector, RowArray]]] = defaultdict(list)
    of_lookups = jax.tree.leaves(ids, is_leaf=lambda x: isinstance(x, tuple))
    taps = zip(jax.tree.leaves(specs), of_lookups, jax.tree.leaves(cotangents), strict=True)
    for spec, i, cotangent in taps:
        table = tables[spec.table]
        mesh = explicit_mesh(table, cotangent) or jax.sharding.get_abstract_mesh()
        if AxisType.Explicit in mesh.axis_types:
            i, cotangent = jax.tree.map(functools.partial(on_mesh, mesh), (i, cotangent))
        both = _flat(spec, table, i, cotangent)
        # A table that devices share has the gradients of all of them.
        axes = frozenset[str]().union(*map(varying_axes, both)) - varying_axes(table)
        if axes:
            gather = functools.partial(lax.all_gather, tiled=True, to="invarying")
            both = tuple(gather(x, tuple(sorted(axes))) for x in varying_alike(*both))
        parts[spec.table].append((spec, *both))
    return {number: _joined(tables[number], of_table) for number, of_table in parts.items()}


def _flat(
    spec: Tap, table: TableArray, ids: PyTree, rows: jax.Array
) -> tuple[IdVector, RowArray]:
    row = spec.row
    if spec.kind == "rows":
        dimensions = rows.ndim - len(row)
        if ids.ndim != dimensions:  # a view has flat ids, in the order of its rows
            return flattened(ids, ids.ndim), flattened(rows, dimensions)
        return rows_in_any_order(ids, rows)
    # All entries of a bag have the cotangent of its sum.
    ids, bag, weight = ids
    bags, rounds, each = spec.shape[0], math.prod(spec.batch), None
    # The bags of all rounds of a loop are numbered in sequence.
    if bag is None:
        each = spec.rows // bags
        bag = lax.iota(jnp.int32, spec.count) // each
    elif spec.batch:
        first = bags * lax.iota(bag.dtype, rounds)[:, None]
        bag = bag.reshape(rounds, -1)
        bag = jnp.where(bag < bags, bag + first, rounds * bags)
    weight = None if weight is None else weight.reshape(-1)
    source = rows.reshape(-1, *row)
    known = GatheredRows(source, bag.reshape(-1), weight, table.dtype, each)
    result = known.array()
    # Few rows are better written: what makes them takes longer to compile than it saves.
    if pays(source.shape[0], result.shape[0]) and result.nbytes >= tuning.SMALL_ROWS:
        GATHERED.note(result, known)
    return ids.reshape(-1), result


def _joined(table: TableArray, parts: Sequence[tuple[Tap, IdVector, RowArray]]) -> RowSparse:
    """Return what several lookups of a table add to its gradient, as one `RowSparse`."""
    # Rows of the finest kind: single entries, rows of a packed table, rows.
    finest, *_ = min(parts, key=lambda part: (-part[0].leading, math.prod(part[0].row)))
    count, row = finest.rows_of(table.shape), finest.row
    all_ids, all_rows = [], []
    for spec, ids, rows in parts:
        each = math.prod(spec.row) // max(math.prod(row), 1)
        if spec.row != row:
            ids, rows = split_rows(ids, rows, each, count, row)
        all_ids.append(ids.astype(id_dtype(count)))
        all_rows.append(rows if rows.dtype == table.dtype else rows.astype(table.dtype))
    ids = all_ids[0] if len(parts) == 1 else end_to_end(all_ids)
    return RowSparse.from_rows(
        ids,
        concatenated(all_rows),
        table.shape,
        coalesced=False,
        leading=finest.leading,
        width=finest.width,
    )
