"""Run a program forwards, some of whose values are views of tables that are not materialised.

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
import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Var

from jmask._autodiff import nested
from jmask._autodiff.bags_by_hand import WaitingRows, waiting
from jmask._autodiff.lookups import WINDOWS, lookup_of, window_lookup, windows_of
from jmask._autodiff.nested import Flags, Needed
from jmask._autodiff.taps import NONE, Tap, Taps
from jmask._autodiff.view_rules import COMPUTING, ENTRYWISE, SAME_ARRAY, views_of
from jmask._autodiff.views import (
    Lookup,
    Positions,
    TableView,
    View,
    planned,
    read_at,
    tables_of,
    view_of_table,
    without_gradient,
)
from jmask._base.array_types import at_most, is_known
from jmask._base.forms import (
    PLAIN_CALLS,
    Opened,
    aval_of,
    called,
    name_of,
    within,
    writes_reference,
)
from jmask._base.jaxprs import bound, bound_to_differentiate, contexts_of, read
from jmask._base.shardings import varying_axes, varying_over
from jmask._base.types import Argument, Shape, Shaped
from jmask._kernels.lines import is_packed
from jmask._kernels.rows import Gather

# The user's line in a fallback warning must not be a line of this library.
source_info_util.register_exclusion(str(Path(__file__).parents[1]))


class Need(NamedTuple):
    """One use of a table that a gradient goes through, and the rows that it needs."""

    table: int  # the number of the leaf
    # The equation that uses it, after those that run the program that this is in.
    eqns: tuple[JaxprEqn, ...]
    rows: int | None  # how many are read; None is all of them
    total: int = 0  # how many there are
    is_lookup: bool = False  # whether they are decided when it runs
    # The first equation that computes what is looked up, or None of a table itself.
    computed_by: JaxprEqn | None = None


@dataclasses.dataclass(frozen=True)
class Forward:
    """Runs jaxprs forwards, with taps; in a trial it notes what is needed of tables."""

    leaves: Sequence[Shaped]  # the abstract values of all leaves that are differentiated
    taps: Taps
    needed: Needed = dataclasses.field(default_factory=Needed)
    needs: list[Need] = dataclasses.field(default_factory=list)
    # Those that run the program that this is in; while one of its equations runs, that too.
    eqns: tuple[JaxprEqn, ...] = ()
    summed: Collection[Var] = ()  # variables of this program that a sum alone needs

    def run(
        self,
        program: Opened,
        inputs: Sequence[Argument],
        wanted: Flags,
        summed: Flags | None = None,
    ) -> list[Argument]:
        """Return the outputs of a program; a gradient is taken of those that are wanted.

        Args:
            summed: of which outputs a sum is taken, and nothing else.
        """
        jaxpr, consts = program
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
        live = self.needed.within(jaxpr, wanted)
        to_sum = self.needed.only_summed(jaxpr, summed or [False] * len(jaxpr.outvars))
        for eqn in jaxpr.eqns:
            args = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
            if self.taps.is_trial and not any(isinstance(x, View) for x in args):
                outs = [aval_of(v) for v in eqn.outvars]
            else:
                # `dataclasses.replace` calls three functions more, for each equation.
                eqns = (*self.eqns, eqn)
                inside = Forward(self.leaves, self.taps, self.needed, self.needs, eqns, to_sum)
                names, context = contexts_of(eqn)
                with names, context:
                    outs = inside.equation(eqn, args, [v in live for v in eqn.outvars])
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(values, v) for v in jaxpr.outvars]

    def arrays(
        self,
        program: Opened,
        inputs: Sequence[Argument],
        wanted: Flags,
        but: Collection[int] = (),
        taps: Taps | None = None,
    ) -> list[Argument]:
        """Return the outputs of a program as arrays, without those numbered in `but`."""
        inside = self if taps is None else dataclasses.replace(self, taps=taps)
        outs = enumerate(zip(inside.run(program, inputs, wanted), wanted, strict=True))
        return [inside.array(x, not flag) for i, (x, flag) in outs if i not in but]

    def equation(self, eqn: JaxprEqn, args: list[Argument], flags: Flags) -> list[Argument]:
        """Return the results of the last equation, which may be views."""
        name, is_live = name_of(eqn), True in flags or writes_reference(eqn)
        x = next((x for x in args if isinstance(x, View)), None)
        if x is None:
            return self._bound(eqn, name, args)
        aval = next(map(aval_of, eqn.outvars), None)  # what prints has no result

        # 0. Rows that wait for their sum.
        if isinstance(x, WaitingRows):
            now = lambda: self.equation(eqn, [a.now() if a is x else a for a in args], flags)[0]
            if name == "reduce_sum":
                lookup = x.summed(eqn)
                return [now() if lookup is None else self._looked_up(lookup, aval, x.table)]
            rows = x.computed(eqn, args, now)
            return [now() if rows is None else rows]

        # 1. What runs other programs: views go in.
        if name in PLAIN_CALLS:
            return self.run(called(eqn), args, flags, [v in self.summed for v in eqn.outvars])
        if is_live and name in nested.RULES:
            return nested.RULES[name](self, eqn, args, flags)

        # 2. What does not change a table.
        if name == "stop_gradient":
            return [without_gradient(x)]
        if name == "optimization_barrier":
            arrays = [a for a in args if not isinstance(a, View)]
            rest = iter(bound(eqn, arrays) if arrays and not self.taps.is_trial else arrays)
            return [a if isinstance(a, View) else next(rest) for a in args]
        shape: Shape = getattr(aval, "shape", ())
        # The lines of a packed table become its rows, (V, width).
        is_2d = name == "reshape" and x.ndim == len(shape) == 2
        is_same = name in SAME_ARRAY or (is_2d and is_packed(x.shape, shape[1]))
        if isinstance(x, TableView) and is_same:
            same: Argument = aval if self.taps.is_trial else bound(eqn, [x.array])[0]
            return [view_of_table(x.number, same, shape[1] if is_2d else x.width)]

        # 3. Lookups.
        array = functools.partial(self.array, is_constant=not is_live)
        lookup = lookup_of(eqn, name, args, array, self.taps.rows_only)
        if lookup is not None:
            now = functools.partial(self._looked_up, lookup, aval, x, is_live)
            is_to_sum = eqn.outvars[0] in self.summed and not self.taps.rows_only
            waits = is_live and name in WINDOWS and is_to_sum
            if not waits:
                return [now()]
            indices = array(args[1], is_constant=True)
            rows = waiting(x, indices, windows_of(eqn, name, [x, indices]), now)
            return [now() if rows is None else rows]

        # 4. What is a view again. Few rows are looked up before they are computed on. A result
        # with an array larger than its tables, as logits with their bias, is an array.
        if name in COMPUTING:
            args = [array(a) if self._reading_of_few(a) else a for a in args]
        if name in ENTRYWISE and self._has_larger_array(args):
            args = [array(a) for a in args]
        if any(isinstance(a, View) for a in args):
            made_views = views_of(self.eqns, name, args)
            if made_views is not None and name in ("slice", "dynamic_slice"):
                whole = window_lookup(eqn, name, args)
                return [dataclasses.replace(made_views[0], whole=whole)]
            if made_views is not None:
                return made_views

        # 5. Anything else needs arrays.
        tables = tables_of(args)
        return self._bound(eqn, name, [array(a, tables=tables) for a in args])

    def _bound(self, eqn: JaxprEqn, name: str, args: Sequence[Argument]) -> list[Argument]:
        """Run an equation as it is, but that rows are gathered the fast way."""
        if self.taps.is_trial:
            return [aval_of(v) for v in eqn.outvars]
        if _is_slow(eqn):
            return [Gather.of(eqn)(*args)]
        if name in ("jit", "pjit") and any(map(_is_slow, within(called(eqn)[0].eqns))):
            return self.run(called(eqn), args, [True] * len(eqn.outvars))
        if name == "pvary":  # of branches that share a tap the rows may vary already
            pairs = zip(eqn.outvars, args, strict=True)
            return [varying_over(varying_axes(aval_of(v)), x) for v, x in pairs]
        return bound_to_differentiate(eqn, args)

    def _looked_up(
        self,
        lookup: Lookup,
        abstract: Argument,
        x: View,
        is_live: bool = True,
        *,
        is_whole: bool = False,
    ) -> Argument:
        """Return rows of a view; in a trial note their taps, and return their abstract value.

        Args:
            is_whole: whether they are all of the view, which something needs as an array.
        """
        plan, run = lookup
        if not self.taps.is_trial:
            return run(self.taps if is_live else NONE)
        is_lookup, eqns = (x.is_lookup, x.computed_by) if is_whole else (True, ())
        varies = x.varies if is_whole else varying_axes(abstract)
        computed_by = x.computed_by[-1] if x.computed_by else None
        for tap in plan if is_live else ():
            self.taps.record.append(dataclasses.replace(tap, varies=varies))
            count = tap.rows_of(self.leaves[tap.table].shape)
            need = Need(tap.table, eqns or self.eqns, tap.rows, count, is_lookup, computed_by)
            self.needs.append(need)
        return abstract

    def array(
        self, x: Argument, is_constant: bool = False, tables: frozenset[int] = frozenset()
    ) -> Argument:
        """Return a view as an array: of its rows if they are few, else it needs all of tables.

        An array that several equations need is made once. No gradient is taken of a constant.

        Args:
            tables: the tables that all operands of the equation are made of.
        """
        if not isinstance(x, View):
            return x
        made = self.taps.made
        if (x, is_constant) not in made:
            made[x, is_constant] = self._made(x, is_constant, tables)
        return made[x, is_constant]

    def _made(self, x: View, is_constant: bool, tables: frozenset[int]) -> Argument:
        abstract = jax.ShapeDtypeStruct(x.shape, x.dtype)
        few = self._reading_of_few(x) if is_constant else None
        if few is not None:
            # As in `aux`: the loss has these rows already, or they are read without taps.
            rows = self.taps.made.get((x, False))
            rows = self._looked_up(few, abstract, x, is_live=False) if rows is None else rows
            return rows if self.taps.is_trial else lax.stop_gradient(rows)
        if x.tables and not is_constant:
            lookup = self._reading_of_all(x)
            if lookup is not None:
                return self._looked_up(lookup, abstract, x, is_whole=True)
            eqns = x.computed_by or self.eqns
            # A small factor of a large table is dense first. The large one waits, with a need
            # of no rows: in the next round the factor is an array, and rows of it may be read.
            sizes = {t: math.prod(self.leaves[t].shape) for t in x.tables | tables}
            is_small = lambda size: any(at_most(8 * size, other) for other in sizes.values())
            small = {t for t, size in sizes.items() if is_small(size)}
            for t in x.tables:
                waits = bool(small) and t not in small
                self.needs.append(Need(t, eqns, 0 if waits else None, is_lookup=waits))
        if self.taps.is_trial:
            return abstract
        assert x.make is not None
        assert is_constant or not x.tables, "a table with taps is needed as a whole"
        made = x.make(functools.partial(self.array, is_constant=is_constant))
        return lax.stop_gradient(made) if is_constant else made

    def _reading_of_all(self, x: View) -> Lookup | None:
        """Return how all of a view is read with the fewest rows of tables, at most half."""
        if isinstance(x, TableView) or not is_known(*x.shape) or 0 in x.shape:
            return None
        readings: list[Lookup] = [] if x.whole is None else [x.whole]
        for count in [n for n, fits in enumerate(x.fits) if fits]:
            plan = planned(x, count, x.shape[:count]) or []

            def run(taps: Taps, count: int = count) -> jax.Array:
                return read_at(x, Positions.of_all(x.shape[:count]), taps)

            readings.append((plan, run))

        def is_few(plan: Sequence[Tap]) -> bool:
            total: Counter[int] = Counter()
            for tap in plan:
                is_entry = tap.leading == len(self.leaves[tap.table].shape) > 1
                if is_entry and not tap.width and tap.rows > 1:
                    return False  # single entries of a matrix, as of columns, are no rows
                total[tap.table] += tap.size
            return all(
                at_most(2 * n, math.prod(self.leaves[t].shape)) for t, n in total.items()
            )

        few = [reading for reading in readings if is_few(reading[0])]
        return min(few, key=lambda reading: sum(x.size for x in reading[0]), default=None)

    def _reading_of_few(self, x: Argument) -> Lookup | None:
        """Return how all of a view is read if it is small: better read before it is used."""
        if not isinstance(x, View) or isinstance(x, TableView) or not is_known(*x.shape):
            return None
        size, sizes = math.prod(x.shape), (math.prod(self.leaves[t].shape) for t in x.tables)
        is_small = any(at_most(8 * size, other) for other in sizes)
        return self._reading_of_all(x) if is_small else None

    def _has_larger_array(self, args: Sequence[Argument]) -> bool:
        """Decide whether an array among operands is larger than all tables of the others."""
        shapes = [tuple(self.leaves[t].shape) for t in tables_of(args)]
        # Masks are broadcast to what they choose from.
        arrays = [x for x in args if np.ndim(x) and not isinstance(x, View)]
        others = [tuple(x.shape) for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
        # One with the rows of the tables, as a base with a product of factors, is read by rows.
        others = [x for x in others if any(x[0] != shape[0] for shape in shapes)]
        if not shapes or not is_known(*itertools.chain(*shapes, *others)):
            return False
        return max(map(math.prod, others), default=0) > sum(map(math.prod, shapes))


def _is_slow(eqn: JaxprEqn) -> bool:
    """Decide whether an equation is a gather that can be faster."""
    is_gather = name_of(eqn) == "gather"
    return is_gather and Gather.of(eqn).is_slow_copy(aval_of(eqn.invars[0]))
