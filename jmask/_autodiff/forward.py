"""Run a program forwards, some of whose values are views: arrays made of tables, and not made.

    equation                          its operands
    jit, remat, scan, cond, ...       views go into what it runs
    gather, bag sums, X @ table       rows are read, with a tap
    slice, reshape, sin, ...          a view again
    any other                         arrays: it needs all of a table

Most equations have no view among their operands, and run as they are. In a trial nothing runs:
arrays are abstract, and what is found are the taps, in order, and what is needed of each table.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from jmask._autodiff import bags, nested
from jmask._autodiff.lookups import (
    LOOKUPS,
    bag_of_table,
    gather_of,
    is_of_lines,
    lookup_of,
    rows_of_bag,
    window_lookup,
)
from jmask._autodiff.nested import Flags, Needed
from jmask._autodiff.taps import NONE, Taps
from jmask._autodiff.view_rules import COMPUTING, views_of
from jmask._autodiff.views import (
    Lookup,
    Part,
    Positions,
    TableView,
    View,
    planned,
    read_at,
    varies_of,
    varying,
    view_of_table,
    without_gradient,
)
from jmask._base.array_types import is_known
from jmask._base.forms import CALLS, Opened, aval_of, called, name_of, within
from jmask._base.jaxprs import bound, bound_to_differentiate, read
from jmask._base.shardings import varying_over
from jmask._base.types import Argument, Shaped
from jmask._kernels.gathered_rows import BAG_SUM

# The user's line in a fallback warning must not be a line of this library.
source_info_util.register_exclusion(str(Path(__file__).parents[1]))

# A table by another type: each is bound to the table itself.
_SAME_TABLE = ("pvary", "pcast", "reshard", "sharding_constraint")
_BAGS = BAG_SUM.primitive.name
# `get` reads from a reference, `jax.new_ref(table)[ids]`.
LOOKING_UP = (*LOOKUPS, "dynamic_slice", "get", "new_ref")


class Need(NamedTuple):
    """One use of a table that a gradient goes through, and the rows that it needs."""

    table: int  # the number of the leaf
    # The equation that uses it, after those that run the program that this is in.
    eqns: tuple[JaxprEqn, ...]
    rows: int | None  # how many are read; None is all of them
    of: int = 0  # how many there are
    is_lookup: bool = False  # whether they are decided when it runs


class Forward:
    """Runs jaxprs forwards.

    Attributes:
        leaves: the abstract values of all leaves that are differentiated.
        needs: of the tables; in a trial.
        needed: which variables a gradient goes through.
    """

    def __init__(self, leaves: Sequence[Shaped]) -> None:
        self.leaves, self.needed = leaves, Needed()
        self.needs: list[Need] = []
        self._eqns: tuple[JaxprEqn, ...] = ()

    def run(
        self, program: Opened, inputs: Sequence[Argument], taps: Taps, wanted: Flags
    ) -> list[Argument]:
        """Return the outputs of a program; a gradient is taken of those that are wanted."""
        jaxpr, consts = program
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
        scope = bags.Scope(jaxpr, values)
        live, outer = self.needed.within(jaxpr, wanted), self._eqns
        for eqn in jaxpr.eqns:
            args = [read(values, v) for v in eqn.invars]
            flags = [v in live for v in eqn.outvars]
            if taps.is_trial and not any(isinstance(x, View) for x in args):
                outs = [aval_of(v) for v in eqn.outvars]
            else:
                self._eqns = (*outer, eqn)
                stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
                traceback = eqn.source_info.traceback
                with (
                    source_info_util.user_context(traceback, name_stack=stack),
                    eqn.ctx.manager,
                ):
                    outs = self._equation(eqn, args, taps, flags, scope)
            values.update(zip(eqn.outvars, outs, strict=True))
        self._eqns = outer
        return [read(values, v) for v in jaxpr.outvars]

    def arrays(
        self,
        program: Opened,
        inputs: Sequence[Argument],
        taps: Taps,
        wanted: Flags,
        but: Collection[int] = (),
    ) -> list[Argument]:
        """Return the outputs of a program as arrays, without those numbered in `but`."""
        outs = enumerate(zip(self.run(program, inputs, taps, wanted), wanted, strict=True))
        return [self.array(x, taps, not flag) for i, (x, flag) in outs if i not in but]

    def _equation(
        self, eqn: JaxprEqn, args: list[Argument], taps: Taps, flags: Flags, scope: bags.Scope
    ) -> list[Argument]:
        name, is_live = name_of(eqn), True in flags
        views = [x for x in args if isinstance(x, View)]
        if not views:
            return self._bound(eqn, name, args, taps)
        if name == _BAGS:
            return [self._bag_sum(eqn, args, taps, is_live)]
        aval = next(map(aval_of, eqn.outvars), None)  # what prints has no result
        enters = is_call(name)

        # 0. Rows that wait for their sum. They may wait in a call, too.
        if [x for x in views if isinstance(x, bags.Rows)]:
            made = None if enters or not is_live else bags.made_of_rows(eqn, name, args, scope)
            if isinstance(made, bags.Rows):
                return [made]
            if made is not None:
                return [self._looked_up(made, aval, taps)]
            args = [
                self.array(x, taps, not is_live)
                if isinstance(x, bags.Rows) and not (enters and scope.is_alone(v))
                else x
                for x, v in zip(args, eqn.invars, strict=True)
            ]

        # 1. What runs other programs: views go in.
        if enters and any(isinstance(x, View) for x in args):
            return self.run(called(eqn), args, taps, flags)
        x = next((x for x in args if isinstance(x, View)), None)
        if x is None:
            return self._bound(eqn, name, args, taps)
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
        ids = functools.partial(self.array, taps=taps, is_constant=True)
        lookup = lookup_of(eqn, name, args, ids, taps.rows_only) if eqn.outvars else None
        if lookup is not None:
            rows = None
            if is_live and not taps.rows_only and scope.is_alone(eqn.outvars[0]):
                rows = bags.rows_of(eqn, name, args, lookup)
            return [rows or self._looked_up(lookup, aval, taps, is_live)]

        # 4. What is a view again. Few rows are looked up before they are computed on.
        if name in COMPUTING:
            args = [self.array(a, taps, not is_live) if self._is_small(a) else a for a in args]
        if any(isinstance(a, View) for a in args):
            made_views = views_of(self._eqns, name, args)
            if made_views is not None:
                if name in ("slice", "dynamic_slice"):
                    whole = window_lookup(eqn, name, args)
                    return [dataclasses.replace(made_views[0], whole=whole)]
                return made_views

        # 5. Anything else needs arrays.
        return self._bound(eqn, name, [self.array(a, taps, not is_live) for a in args], taps)

    def _bound(
        self, eqn: JaxprEqn, name: str, args: Sequence[Argument], taps: Taps
    ) -> list[Argument]:
        """Run an equation as it is, but that rows are gathered the fast way."""
        if taps.is_trial:
            return [aval_of(v) for v in eqn.outvars]
        if _is_slow(eqn):
            return [gather_of(eqn)(*args)]
        if name in ("jit", "pjit") and any(map(_is_slow, within(called(eqn)[0].eqns))):
            return self.run(called(eqn), args, taps, [True] * len(eqn.outvars))
        return bound_to_differentiate(eqn, args)

    def _same(self, eqn: JaxprEqn, x: View, taps: Taps) -> View:
        """Return a table, or what is made of tables, as it is on other devices."""
        aval = aval_of(eqn.outvars[0])
        if isinstance(x, TableView):
            array = aval if taps.is_trial else bound(eqn, [x.array])[0]
            width = aval.shape[-1] if eqn.primitive.name == "reshape" else x.width
            return view_of_table(x.number, array, width)
        there = lambda rows: varying_over(varies_of(aval), rows)
        make = lambda made: bound(eqn, [made(x)])[0]
        varies = x.varies | varies_of(aval)
        reading = lambda p: ([Part(x)], there)
        return dataclasses.replace(x, reading=reading, make=make, varies=varies, whole=None)

    # --- lookups ------------------------------------------------------------------------

    def _looked_up(
        self,
        lookup: Lookup,
        abstract: Argument,
        taps: Taps,
        is_live: bool = True,
        is_lookup: bool = True,
        eqns: tuple[JaxprEqn, ...] = (),
    ) -> Argument:
        """Return rows; in a trial note their taps, and return what is `abstract`."""
        plan, run = lookup
        if not taps.is_trial:
            return run(taps if is_live else NONE)
        for tap in plan if is_live else ():
            taps.record.append(tap)
            count = tap.rows_of(self.leaves[tap.table].shape)
            need = Need(tap.table, eqns or self._eqns, tap.rows, count, is_lookup)
            self.needs.append(need)
        return abstract

    def _bag_sum(
        self, eqn: JaxprEqn, args: Sequence[Argument], taps: Taps, is_live: bool
    ) -> Argument:
        """Return bag sums: of a table with a tap, of a view of the rows that they read."""
        aval = aval_of(eqn.outvars[0])
        array = functools.partial(self.array, taps=taps, is_constant=not is_live)
        x = BAG_SUM.call(eqn.params, args)
        fields = ("positions", "bag_of_entry", "weights", "valid")
        x = dataclasses.replace(x, **{f: array(getattr(x, f)) for f in fields})
        if isinstance(x.table, TableView) and is_live and not taps.rows_only:
            of_array = dataclasses.replace(x, table=x.table.array)
            lookup = bag_of_table(x, aval).lookup(lambda: BAG_SUM(of_array)[0])
            return self._looked_up(lookup, aval, taps)
        if isinstance(x.table, View) and x.table.fits[1]:
            x = self._looked_up(rows_of_bag(x, aval), x, taps, is_live)
        else:
            x = dataclasses.replace(x, table=array(x.table))
        return aval if taps.is_trial else BAG_SUM(x)[0]

    def array(self, x: Argument, taps: Taps, is_constant: bool = False) -> Argument:
        """Return a view as an array: of its rows if they are few, else it needs all of tables.

        No gradient is taken of a constant. What several equations need is made once.
        """
        if not isinstance(x, View):
            return x
        key = id(x), is_constant
        if key not in taps.made:
            taps.made[key] = x, self._made(x, taps, is_constant)
        return taps.made[key][1]

    def _made(self, x: View, taps: Taps, is_constant: bool) -> Argument:
        abstract = jax.ShapeDtypeStruct(x.shape, x.dtype)
        if not is_constant:
            lookup = x.whole if isinstance(x, bags.Rows) else self._reading_of_all(x)
            if lookup is not None:
                return self._looked_up(lookup, abstract, taps, True, x.is_lookup, x.computed_by)
            eqns = x.computed_by or self._eqns
            self.needs += [Need(number, eqns, None) for number in x.tables]
        if taps.is_trial:
            return abstract
        assert x.make is not None
        assert is_constant or not x.tables, "a table with taps is needed as a whole"
        made = functools.partial(self.array, taps=taps, is_constant=True)
        return lax.stop_gradient(x.make(made))

    def _reading_of_all(self, x: View) -> Lookup | None:
        """Return how all of a view is read with the fewest rows of tables, at most half.

        Single entries of a matrix, as of some of its columns, are no rows.
        """
        if isinstance(x, TableView) or not is_known(*x.shape) or 0 in x.shape:
            return None
        readings: list[Lookup] = [] if x.whole is None else [x.whole]
        for count in [n for n, fits in enumerate(x.fits) if fits]:
            plan = varying(planned(x, count, x.shape[:count]) or [], x.varies)

            def run(taps: Taps, count: int = count) -> jax.Array:
                return read_at(x, Positions.of_all(x.shape[:count]), taps)

            readings.append((plan, run))
        fewest: tuple[int, Lookup] | None = None
        for reading in readings:
            total: Counter[int] = Counter()
            for tap in reading[0]:
                is_entry = tap.leading == len(self.leaves[tap.table].shape) > 1
                if is_entry and not tap.width and tap.rows > 1:
                    break
                total[tap.table] += tap.rows * math.prod(tap.shape[1:])
            else:
                sizes = {t: math.prod(self.leaves[t].shape) for t in total}
                is_few = all(2 * n <= sizes[t] for t, n in total.items())
                if is_few and (fewest is None or total.total() < fewest[0]):
                    fewest = total.total(), reading
        return fewest and fewest[1]

    def _is_small(self, x: Argument) -> bool:
        """Decide whether a value is a view all of which is better read before it is used."""
        if not isinstance(x, View) or isinstance(x, TableView) or not is_known(*x.shape):
            return False
        largest = max((math.prod(self.leaves[t].shape) for t in x.tables), default=0)
        return 8 * math.prod(x.shape) <= largest and self._reading_of_all(x) is not None


def is_call(name: str) -> bool:
    """Decide whether an equation is a call of a program, without rules of its derivative."""
    return name in CALLS and not name.startswith("custom")


def _is_slow(eqn: JaxprEqn) -> bool:
    """Decide whether an equation is a gather that can be faster."""
    is_gather = name_of(eqn) == "gather"
    return is_gather and gather_of(eqn).is_slow_copy(aval_of(eqn.invars[0]))
