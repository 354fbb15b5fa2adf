"""Run a program forwards, some of whose values are views: arrays made of tables, and not made.

    equation                          its operands
    jit, remat, scan, cond, ...       views go into what it runs
    gather, bag sums, X @ table       rows are read, with a tap
    slice, reshape, sin, ...          a view again
    any other                         arrays: it needs all of a table

Most equations have no view among their operands, and run as they are. In a trial nothing runs:
arrays are abstract, and what is found are the taps, in order, and the uses of each table.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmask._autodiff import bags, nested
from jmask._autodiff.lookups import (
    ROWS_OF_LINES,
    WINDOWS,
    gather_of,
    is_of_lines,
    lookup_in_lines,
    shard_lookup,
    slice_lookup,
    window_lookup,
)
from jmask._autodiff.needed import Flags, Needed
from jmask._autodiff.sums import SPARSE_PRODUCTS, bag_of_table, rows_of_bag, sparse_product
from jmask._autodiff.taps import NONE, Tap, Taps
from jmask._autodiff.view_rules import COMPUTING, RULES, views_of
from jmask._autodiff.views import (
    Lookup,
    Positions,
    Reads,
    TableView,
    Valid,
    View,
    planned,
    read_at,
    varies_of,
    varying,
    view_of_table,
    without_gradient,
)
from jmask._base.array_types import is_known
from jmask._base.forms import CALLS, aval_of, called, name_of, parameter
from jmask._base.jaxprs import bound, read, side_by_side
from jmask._base.shardings import varying_like
from jmask._base.types import Atom, Shaped, Value
from jmask._kernels.bag_sum import BAG_SUM
from jmask._kernels.sharded_rows import LOOKUP

# The user's line in a fallback warning must not be a line of this library.
source_info_util.register_exclusion(str(Path(__file__).parents[1]))

# A table by another type: each is bound to the table itself.
_SAME_TABLE = ("pvary", "pcast", "reshard", "sharding_constraint")
_BAGS = BAG_SUM.primitive.name


class Need(NamedTuple):
    """What one use needs of a table, where its gradient goes through it.

    `rows` of so many are read, decided when it runs if it is a lookup; None is all of them.
    """

    table: int
    eqn: JaxprEqn | None
    rows: int | None
    of: int = 0
    is_lookup: bool = False


class Forward:
    """Runs jaxprs forwards.

    Attributes:
        leaves: the abstract values of all leaves that are differentiated.
        uses: of the tables; in a trial.
        needed: which variables a gradient goes through.
    """

    def __init__(self, leaves: Sequence[Shaped]) -> None:
        self.leaves, self.needed = leaves, Needed()
        self.uses: list[Need] = []

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Value],
        inputs: Sequence[Value],
        taps: Taps,
        wanted: Flags,
    ) -> list[Value]:
        """Return the outputs of `jaxpr`; a gradient is taken of those that are wanted."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
        value_of, scope = functools.partial(read, values), Scope(jaxpr, values)
        live = self.needed.within(jaxpr, wanted)
        # Bag sums of several tables that do not need each other run in one loop.
        for eqns in side_by_side(jaxpr.eqns, _BAGS):
            eqn = eqns[0]
            args = [[value_of(v) for v in each.invars] for each in eqns]
            flags = [[v in live for v in each.outvars] for each in eqns]
            if taps.is_trial and not any(isinstance(x, View) for x in args[0]) and not eqns[1:]:
                outs = [aval_of(v) for v in eqn.outvars]
            else:
                stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
                traceback = eqn.source_info.traceback
                with (
                    source_info_util.user_context(traceback, name_stack=stack),
                    eqn.ctx.manager,
                ):
                    if eqn.primitive.name == _BAGS:
                        outs = self._bag_sums(eqns, args, taps, flags)
                    else:
                        outs = self._equation(eqn, args[0], taps, flags[0], scope)
            results = [v for each in eqns for v in each.outvars]
            values.update(zip(results, outs, strict=True))
        return [value_of(v) for v in jaxpr.outvars]

    def _equation(
        self, eqn: JaxprEqn, args: list[Value], taps: Taps, flags: Flags, scope: "Scope"
    ) -> list[Value]:
        name, is_live = name_of(eqn), any(flags)
        if not any(isinstance(x, View) for x in args):
            return self._without_views(eqn, name, args, taps, flags)
        is_call = name in CALLS and not name.startswith("custom")

        # 0. Rows that wait for their sum.
        if any(isinstance(x, bags.Rows) for x in args):
            made = self._sum_or_rows(eqn, name, args, taps, is_live, scope, is_call)
            if made is not None:
                return [made]
            args = [
                self.array(x, eqn, taps, not is_live)
                if isinstance(x, bags.Rows) and not (is_call and scope.is_alone(v))
                else x
                for x, v in zip(args, eqn.invars, strict=True)
            ]
            if not any(isinstance(x, View) for x in args):
                return self._bound(eqn, args, taps)
        x = next(x for x in args if isinstance(x, View))

        # 1. What runs other programs: views go in.
        if is_call:
            return self.run(*called(eqn), args, taps, flags)
        if is_live and name in nested.RULES:
            return nested.RULES[name](self, eqn, args, taps, flags)

        # 2. What does not change a table.
        if name == "stop_gradient":
            return [without_gradient(x)]
        if name == "optimization_barrier":
            arrays = [a for a in args if not isinstance(a, View)]
            rest = iter(bound(eqn, arrays) if arrays and not taps.is_trial else arrays)
            return [a if isinstance(a, View) else next(rest) for a in args]
        if name in _SAME_TABLE or is_of_lines(eqn, name, x):
            return [self._same(eqn, x, taps)]

        # 3. Lookups.
        lookup = self._lookup(eqn, name, args, taps, is_live)
        if lookup is not None:
            if is_live and not taps.rows_only and scope.is_alone(eqn.outvars[0]):
                rows = bags.rows_of(eqn, name, args, lookup)
                if rows is not None:
                    return [rows]
            return [self._looked_up(lookup, aval_of(eqn.outvars[0]), taps, is_live)]

        # 4. What is a view again. Few rows are looked up before they are computed on.
        if RULES.get(name) in COMPUTING:
            args = [
                self.array(a, eqn, taps, not is_live)
                if isinstance(a, View) and self._is_small(a)
                else a
                for a in args
            ]
            if not any(isinstance(a, View) for a in args):
                return self._bound(eqn, args, taps)
        views = views_of(eqn, name, args)
        if views is not None:
            if name in ("slice", "dynamic_slice"):
                whole = slice_lookup(eqn, name, args)
                views = [dataclasses.replace(views[0], whole=whole)]
            return views

        # 5. Anything else needs arrays.
        return self._bound(eqn, [self.array(a, eqn, taps, not is_live) for a in args], taps)

    def _without_views(
        self, eqn: JaxprEqn, name: str, args: list[Value], taps: Taps, flags: Flags
    ) -> list[Value]:
        """Run an equation as it is, but that rows are gathered the fast way."""
        if taps.is_trial:
            return [aval_of(v) for v in eqn.outvars]
        if name == "gather" and _is_slow(eqn):
            return [gather_of(eqn)(*args)]
        if name in ("jit", "pjit") and _gathers_slowly(called(eqn)[0]):
            return self.run(*called(eqn), args, taps, flags)
        return bound(eqn, args)

    def _bound(self, eqn: JaxprEqn, args: list[Value], taps: Taps) -> list[Value]:
        return [aval_of(v) for v in eqn.outvars] if taps.is_trial else bound(eqn, args)

    def _same(self, eqn: JaxprEqn, x: View, taps: Taps) -> View:
        """Return a table, or what is made of tables, as it is on other devices."""
        aval = aval_of(eqn.outvars[0])
        if isinstance(x, TableView):
            array = aval if taps.is_trial else bound(eqn, [x.array])[0]
            width = aval.shape[-1] if eqn.primitive.name == "reshape" else x.width
            return view_of_table(x.number, array, width)

        def read_there(positions: Positions, valid: Valid, reads: Reads) -> jax.Array:
            return varying_like(reads.read(x, positions, valid), aval)

        make = lambda made: bound(eqn, [made(x)])[0]
        varies = x.varies | varies_of(aval)
        return dataclasses.replace(x, read=read_there, make=make, varies=varies, whole=None)

    # --- lookups ------------------------------------------------------------------------

    def _looked_up(
        self,
        lookup: Lookup,
        abstract: Value,
        taps: Taps,
        is_live: bool = True,
        is_lookup: bool = True,
    ) -> Value:
        """Return rows; in a trial note their taps, and return what is `abstract`."""
        plan, run = lookup
        if not taps.is_trial:
            return run(taps if is_live else NONE)
        for tap in plan if is_live else ():
            taps.note(tap)
            count = tap.rows_of(self.leaves[tap.table].shape)
            self.uses.append(Need(tap.table, None, tap.rows, count, is_lookup))
        return abstract

    def _lookup(
        self, eqn: JaxprEqn, name: str, args: list[Value], taps: Taps, is_live: bool
    ) -> Lookup | None:
        """Return how an equation looks rows up, or None if it does not."""
        if name in WINDOWS and isinstance(args[0], View):
            indices = self.array(args[1], eqn, taps, is_constant=True)
            return window_lookup(eqn, name, [args[0], indices])
        if name == LOOKUP.name and isinstance(args[0], TableView):
            return shard_lookup(eqn, args)
        if name == ROWS_OF_LINES.name and isinstance(args[0], TableView):
            return lookup_in_lines(eqn, args)
        is_product = name in SPARSE_PRODUCTS and isinstance(args[-1], View)
        if is_product and not any(isinstance(x, View) for x in args[:-1]):
            return sparse_product(eqn, name, args, taps.rows_only or not is_live)
        return None

    def _sum_or_rows(
        self,
        eqn: JaxprEqn,
        name: str,
        args: list[Value],
        taps: Taps,
        is_live: bool,
        scope: "Scope",
        is_call: bool,
    ) -> Value | None:
        """Return the sum of rows that wait, or rows that still do; None if they are needed."""
        is_alone = [scope.is_alone(v) for v, x in scope.pairs(eqn, args, bags.Rows)]
        if is_call or not is_live or is_alone != [True]:
            return None
        total = bags.sum_of(eqn, name, args)
        if total is not None:
            return self._looked_up(total, aval_of(eqn.outvars[0]), taps)
        bind = lambda operands: bound(eqn, operands)[0]
        broadcast = lambda number: scope.broadcast(eqn.invars[number])
        return bags.changed(eqn, name, args, broadcast, bind)

    def _bag_sums(
        self,
        eqns: Sequence[JaxprEqn],
        args: Sequence[list[Value]],
        taps: Taps,
        flags: Sequence[Flags],
    ) -> list[Value]:
        """Return bag sums: of tables with a tap, of views of the rows that they read."""
        calls, after = [], []
        for eqn, operands, of_eqn in zip(eqns, args, flags, strict=True):
            is_live = any(of_eqn)
            sums = BAG_SUM.calls(eqn.params, operands)
            for x, v in zip(sums, eqn.outvars, strict=True):
                others = {
                    field: self.array(getattr(x, field), eqn, taps, not is_live)
                    for field in ("positions", "bag_of_entry", "weights", "valid")
                }
                x, tapped = dataclasses.replace(x, **others), None
                aval = aval_of(v)
                if isinstance(x.table, TableView) and is_live and not taps.rows_only:
                    tapped = bag_of_table(x, aval)
                    x = dataclasses.replace(x, table=x.table.array)
                elif isinstance(x.table, View) and x.table.fits[1]:
                    with_rows: Lookup = rows_of_bag(x, aval)
                    x = self._looked_up(with_rows, x, taps, is_live)
                elif isinstance(x.table, View):
                    table = self.array(x.table, eqn, taps, not is_live)
                    x = dataclasses.replace(x, table=table)
                calls.append(x)
                after.append(tapped)
        if taps.is_trial:
            for tapped in after:  # once all rows of views are read, as below
                if tapped is not None:
                    self._looked_up(([tapped.tap], _not_run), None, taps)
            return [aval_of(v) for eqn in eqns for v in eqn.outvars]
        leaves = [leaf for x in calls for leaf in jax.tree.leaves(x)]
        trees = [{"trees": (jax.tree.structure(x),)} for x in calls]
        outs = BAG_SUM.joined(trees, leaves)
        return [
            out if tapped is None else tapped.tapped(out, taps)
            for out, tapped in zip(outs, after, strict=True)
        ]

    # --- arrays -------------------------------------------------------------------------

    def array(
        self, x: Value, eqn: JaxprEqn | None, taps: Taps, is_constant: bool = False
    ) -> Value:
        """Return a view as an array: of its rows if they are few, else it needs all of tables.

        Of a constant no gradient is taken. What several equations need is made once.
        """
        if not isinstance(x, View):
            return x
        if is_constant:
            return self._constant(x, taps)
        key = id(x), False
        if key not in taps.made:
            taps.made[key] = x, self._read_or_needed(x, eqn, taps)
        return taps.made[key][1]

    def _constant(self, x: View, taps: Taps) -> Value:
        if taps.is_trial:
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        if isinstance(x, TableView):
            return lax.stop_gradient(x.array)
        key = id(x), True
        if key not in taps.made:
            made = x.make(lambda part: self._constant(part, taps))
            taps.made[key] = x, lax.stop_gradient(made)
        return taps.made[key][1]

    def _read_or_needed(self, x: View, eqn: JaxprEqn | None, taps: Taps) -> Value:
        abstract = jax.ShapeDtypeStruct(x.shape, x.dtype)
        lookup = x.whole if isinstance(x, bags.Rows) else self._reading_of_all(x)
        if lookup is not None:
            return self._looked_up(lookup, abstract, taps, is_lookup=x.is_lookup)
        if not taps.is_trial:
            assert not x.tables, "a table with taps is needed as a whole"
            return self._constant(x, taps)
        self.uses += [Need(number, eqn, None) for number in x.tables]
        return abstract

    def _reading_of_all(self, x: View) -> Lookup | None:
        """Return how all of a view is read with the fewest rows of tables, at most half."""
        if isinstance(x, TableView) or not is_known(*x.shape) or 0 in x.shape:
            return None
        readings: list[Lookup] = [] if x.whole is None else [x.whole]

        for count in [n for n, fits in enumerate(x.fits) if fits]:
            plan = varying(planned(x, count, x.shape[:count]) or [], x.varies)

            def run(taps: Taps, count: int = count) -> jax.Array:
                return read_at(x, Positions.of_all(x.shape[:count]), None, taps)

            readings.append((plan, run))
        few = [reading for reading in readings if self._is_few(reading[0])]
        return min(few, key=lambda reading: sum(map(_size, reading[0])), default=None)

    def _is_few(self, plan: Sequence[Tap]) -> bool:
        """Decide whether a read needs at most half of each table, and rows of it.

        Single entries of a matrix, as of some of its columns, are no rows.
        """
        for tap in plan:
            is_entry = tap.leading == len(self.leaves[tap.table].shape) > 1 and not tap.width
            if is_entry and tap.rows > 1:
                return False
        total = dict.fromkeys((tap.table for tap in plan), 0)
        for tap in plan:
            total[tap.table] += _size(tap)
        sizes = {t: math.prod(self.leaves[t].shape) for t in total}
        return all(2 * n <= sizes[t] for t, n in total.items())

    def _is_small(self, x: View) -> bool:
        """Decide whether all of a view is better read before it is computed on."""
        tables = [math.prod(self.leaves[t].shape) for t in x.tables]
        if isinstance(x, TableView) or not is_known(*x.shape):
            return False
        is_small = 8 * math.prod(x.shape) <= max(tables, default=0)
        return is_small and self._reading_of_all(x) is not None


class Scope:
    """What rules ask about the variables of one program, besides their values."""

    def __init__(self, jaxpr: Jaxpr, values: dict[Var, Value]) -> None:
        self._jaxpr, self._values = jaxpr, values

    @functools.cached_property
    def _uses(self) -> Counter[Var]:
        operands = [v for eqn in self._jaxpr.eqns for v in eqn.invars] + self._jaxpr.outvars
        return Counter(v for v in operands if isinstance(v, Var))

    @functools.cached_property
    def _makers(self) -> dict[Var, JaxprEqn]:
        return {v: eqn for eqn in self._jaxpr.eqns for v in eqn.outvars}

    def is_alone(self, v: Atom) -> bool:
        """Decide whether one equation, or the result, has the only use of a variable."""
        return isinstance(v, Var) and self._uses[v] == 1

    def pairs(
        self, eqn: JaxprEqn, args: Sequence[Value], kind: type
    ) -> list[tuple[Atom, Value]]:
        """Return the variables and values of the operands of a kind."""
        of_eqn = zip(eqn.invars, args, strict=True)
        return [(v, x) for v, x in of_eqn if isinstance(x, kind)]

    def broadcast(self, v: Atom) -> tuple[Value, Sequence[int]] | None:
        """Return what a variable is a broadcast of, and the dimensions of that; else None."""
        if isinstance(v, Literal):
            return v.val, ()
        eqn = self._makers.get(v)
        if eqn is None:
            value = self._values[v]
            return (value, ()) if bags.is_number(value) else None
        if not eqn.invars:
            return None
        source = eqn.invars[0]
        known = None if aval_of(source).shape else self.broadcast(source)
        if name_of(eqn) == "convert_element_type":  # 0 is 0 in any dtype
            return known if known is not None and bags.is_zero(known[0]) else None
        if name_of(eqn) != "broadcast_in_dim":
            return None
        value = read(self._values, source)
        if known is None and isinstance(value, View):
            return None
        dims = [int(d) for d in parameter(eqn, "broadcast_dimensions")]
        return known or (value, dims)


def _size(tap: Tap) -> int:
    """Return how many entries of a table a tap reads."""
    return tap.rows * math.prod(tap.shape[1:])


def _not_run(taps: Taps) -> jax.Array:
    raise AssertionError("nothing runs in a trial")


def _is_slow(eqn: JaxprEqn) -> bool:
    """Decide whether a gather can be faster."""
    return gather_of(eqn).is_slow_copy(aval_of(eqn.invars[0]))


def _gathers_slowly(jaxpr: Jaxpr) -> bool:
    """Decide whether a call gathers rows in a way that can be faster."""
    for eqn in jaxpr.eqns:
        name = name_of(eqn)
        if name == "gather" and _is_slow(eqn):
            return True
        if name in ("jit", "pjit") and _gathers_slowly(called(eqn)[0]):
            return True
    return False
