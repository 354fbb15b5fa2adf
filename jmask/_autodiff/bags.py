"""Bags that are written by hand: rows that are looked up to be summed.

    rows = t[ids]                            (B, L, D), not read yet
    rows = where(mask, rows, 0)              ids of padding where the mask is False
    rows = rows * weights[..., None]         weights of entries
    sums = rows.sum(1)                       one bag sum, as of `jmask.embedding_bag`

Otherwise the rows of a large batch go through memory twice, to be written and to be summed. So
do their cotangents, although each is the cotangent of its bag. Therefore rows that only one
equation uses are not read before it runs (`Rows`). If it sums them, the two become one bag sum;
if it does not, it gets an array.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmask._autodiff.lookups import WINDOWS, Sums, windows_of
from jmask._autodiff.taps import NONE, Taps
from jmask._autodiff.views import Lookup, TableView, View
from jmask._base.array_types import trailing, wide
from jmask._base.forms import aval_of, name_of, parameter
from jmask._base.jaxprs import bound_to_differentiate, read
from jmask._base.shardings import explicit_mesh
from jmask._base.types import Argument, Atom, Shape
from jmask._kernels.gathered_rows import BAG_SUM, BagSum, pays_in_blocks


class Entries(NamedTuple):
    """How each entry reads a row and scales it: arrays (*entries,)."""

    ids: jax.Array  # canonical; padding reads zeros, and has no gradient
    # Other ids that rows are read at, or None. An id outside of a table that a program promises
    # not to have reads its last row.
    read: jax.Array | None = None
    outside: jax.Array | None = None  # where rows are nan, or None
    weight: jax.Array | None = None  # in the dtype of sums, or None for ones


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Rows(View):
    """Rows (*entries, *row) of a table that are looked up, and not read yet."""

    table: TableView  # whose rows these are
    entries: Shape  # the shape of their ids
    # Makes the arrays that describe the entries, once the program runs.
    described: Callable[[], Entries]
    is_weighted: bool = False  # whether these have weights


class Scope:
    """The variables of one program: how often each is used, and what it is a broadcast of."""

    def __init__(self, jaxpr: Jaxpr, values: dict[Var, Argument]) -> None:
        self._jaxpr, self._value = jaxpr, functools.partial(read, values)

    @functools.cached_property
    def _uses(self) -> Counter[Atom]:
        operands = [v for eqn in self._jaxpr.eqns for v in eqn.invars] + self._jaxpr.outvars
        return Counter([v for v in operands if isinstance(v, Var)])

    @functools.cached_property
    def _makers(self) -> dict[Atom, JaxprEqn]:
        return {v: eqn for eqn in self._jaxpr.eqns for v in eqn.outvars}

    def _maker(self, v: Atom, *names: str) -> JaxprEqn | None:
        eqn = self._makers.get(v) if isinstance(v, Var) else None
        return eqn if eqn is not None and name_of(eqn) in names else None

    def is_alone(self, v: Atom) -> bool:
        """Decide whether one equation, or the result, has the only use of a variable."""
        return isinstance(v, Var) and self._uses[v] == 1

    def is_zero(self, v: Atom) -> bool:
        """Decide whether a variable is the number 0 of the program, cast and broadcast."""
        eqn = self._maker(v, "broadcast_in_dim", "convert_element_type")
        if eqn is not None:
            return self.is_zero(eqn.invars[0])
        x = None if isinstance(v, Var) and v in self._makers else self._value(v)
        is_number = isinstance(x, int | float | np.generic | np.ndarray) and np.ndim(x) == 0
        return is_number and not np.any(x)

    def per_entry(self, v: Atom, x: Rows) -> Callable[[], jax.Array] | None:
        """Return a function that returns numbers (*entries,) that a variable is along rows."""
        eqn = self._maker(v, "broadcast_in_dim")
        source = self._value(v if eqn is None else eqn.invars[0])
        dims = range(np.ndim(source)) if eqn is None else parameter(eqn, "broadcast_dimensions")
        lead, sizes = len(x.entries), dict(zip(dims, np.shape(source), strict=True))
        if isinstance(source, View) or any(d >= lead and n != 1 for d, n in sizes.items()):
            return None
        kept = [int(d) for d in dims if d < lead]
        own = [sizes[d] for d in kept]
        return lambda: lax.broadcast_in_dim(jnp.reshape(source, own), x.entries, kept)


def rows_of(eqn: JaxprEqn, name: str, args: Sequence[Argument], lookup: Lookup) -> Rows | None:
    """Return the rows of a lookup of whole rows that wait for their sum; None of any other."""
    x, aval = args[0], aval_of(eqn.outvars[0])
    plan, run = lookup
    if name not in WINDOWS or not isinstance(x, TableView) or plan[0].kind != "rows":
        return None
    windows = windows_of(eqn, name, args)
    if jax.sharding.get_abstract_mesh().manual_axes or explicit_mesh(aval) is not None:
        return None
    fill = windows.fill
    if not (
        windows.are_rows()
        and x.ndim > 1
        and pays_in_blocks(aval.shape, x.dtype)
        and jnp.issubdtype(x.dtype, jnp.floating)
        and (fill is None or fill == 0 or math.isnan(fill))
    ):
        return None

    def run_there(taps: Taps) -> jax.Array:
        # Where they are needed axes may be explicit that are automatic where they are read.
        with eqn.ctx.manager:
            return run(taps)

    def described() -> Entries:
        ids, rows = windows.ids(), x.shape[0]
        if windows.clips:
            return Entries(ids)
        if fill is None:
            return Entries(ids, dataclasses.replace(windows, clips=True).ids())
        return Entries(ids, None, None if fill == 0 else ids == np.asarray(rows, ids.dtype))

    return Rows(
        tuple(aval.shape),
        x.dtype,
        lambda p: None,
        lambda _: run_there(NONE),
        x.tables,
        is_lookup=True,
        varies=x.varies,
        whole=(plan, run_there),
        table=x,
        entries=windows.batch,
        described=described,
    )


def made_of_rows(
    eqn: JaxprEqn, name: str, args: Sequence[Argument], scope: Scope
) -> Lookup | Rows | None:
    """Return the sum that an equation makes of rows, or rows that wait on; else None."""
    which, *others = [i for i, x in enumerate(args) if isinstance(x, Rows)]
    if others or not scope.is_alone(eqn.invars[which]):
        return None
    if name in ("reduce_sum", "dot_general"):
        return _sum(eqn, name, args, which)
    x = args[which]
    made = _waiting(eqn, name, x, which, scope)
    if made is None:
        return None
    (plan, run), aval, (entries, described) = x.whole, aval_of(eqn.outvars[0]), made

    def changed(taps: Taps) -> jax.Array:
        inputs = [run(taps) if i == which else a for i, a in enumerate(args)]
        return bound_to_differentiate(eqn, inputs)[0]

    return dataclasses.replace(
        x,
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        make=lambda _: changed(NONE),
        whole=(plan, changed),
        entries=entries,
        described=described,
        is_weighted=x.is_weighted or name == "mul",
    )


_MOVES = ("broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose")


def _waiting(
    eqn: JaxprEqn, name: str, x: Rows, which: int, scope: Scope
) -> tuple[Shape, Callable[[], Entries]] | None:
    """Return the entries of what an equation makes of rows, if these wait on."""
    aval = aval_of(eqn.outvars[0])
    if name == "mul":
        other = eqn.invars[1 - which]
        numbers = scope.per_entry(other, x)
        if numbers is None or aval_of(other).dtype != x.dtype or x.dtype != wide(x.dtype):
            return None

        def scaled() -> Entries:
            known, weight = x.described(), numbers()
            return known._replace(
                weight=weight if known.weight is None else known.weight * weight
            )

        return x.entries, scaled
    if name == "select_n" and which > 0 and len(eqn.invars) == 3 and not x.is_weighted:
        # The ids of rows that are not chosen are replaced; of weights, 0 times infinity is nan.
        chosen = scope.per_entry(eqn.invars[0], x)
        is_mask = aval_of(eqn.invars[0]).dtype == jnp.dtype(bool)
        if chosen is None or not is_mask or not scope.is_zero(eqn.invars[3 - which]):
            return None

        def selected() -> Entries:
            (ids, at, outside, _), kept = x.described(), chosen() if which == 2 else ~chosen()
            padding = np.asarray(x.table.shape[0], ids.dtype)
            at = None if at is None else jnp.where(kept, at, padding)
            outside = None if outside is None else outside & kept
            return Entries(jnp.where(kept, ids, padding), at, outside)

        return x.entries, selected
    if name == "convert_element_type" and aval.dtype == wide(x.table.dtype):
        return x.entries, x.described
    if name in _MOVES:  # that leave rows as they are
        shape, row = tuple(aval.shape), x.shape[len(x.entries) :]
        lead, move = len(shape) - len(row), lambda a: a.reshape(shape[:lead])
        is_row_kept = lead > 0 and shape[lead:] == row
        if name == "transpose":
            order = tuple(parameter(eqn, "permutation"))
            move = lambda a: a.transpose(order[:lead])
            is_row_kept = order[lead:] == (*range(lead, x.ndim),)
        if is_row_kept and math.prod(shape) == math.prod(x.shape):
            return shape[:lead], lambda: jax.tree.map(move, x.described())
    return None


# --- sums ---------------------------------------------------------------------------------


def _sum(eqn: JaxprEqn, name: str, args: Sequence[Argument], which: int) -> Lookup | None:
    x, weights = args[which], None
    if name == "reduce_sum":
        summed = tuple(sorted(parameter(eqn, "axes")))
        kept = tuple(d for d in range(len(x.entries)) if d not in summed)
    else:
        other = args[1 - which]
        contracted, batch = parameter(eqn, "dimension_numbers")
        kept, summed = tuple(batch[which]), tuple(contracted[which])
        shared = (*batch[1 - which], *contracted[1 - which])
        free = [d for d in range(np.ndim(other)) if d not in shared]
        if isinstance(other, View) or any(other.shape[d] != 1 for d in free):
            return None
        weights = lambda: jnp.transpose(other, (*shared, *free))
    aval, dtype = aval_of(eqn.outvars[0]), wide(x.table.dtype)
    is_sum = summed and kept and sorted((*kept, *summed)) == list(range(len(x.entries)))
    if not is_sum or aval.dtype != dtype or math.prod(x.entries[d] for d in summed) < 2:
        return None
    bags, entries = math.prod(x.entries[d] for d in kept), math.prod(x.entries)
    by_bags = lambda a: a.transpose((*kept, *summed)).reshape(bags, -1)

    @functools.cache
    def described() -> Entries:
        known: Entries = jax.tree.map(by_bags, x.described())
        weight = None if known.weight is None else known.weight.astype(dtype)
        if weights is not None:
            of_bags = weights().reshape(bags, -1).astype(dtype)
            weight = of_bags if weight is None else weight * of_bags
        return known._replace(weight=weight)

    def bag_of(ids: jax.Array) -> BagSum:
        return BagSum(x.table.array, ids, None, described().weight, bags, 0)

    def result() -> jax.Array:
        known = described()
        (sums,) = BAG_SUM(bag_of(known.ids if known.read is None else known.read))
        if known.outside is not None:  # all of a bag with such a row is nan
            nan = jnp.where(known.outside.any(1), jnp.asarray(math.nan, sums.dtype), 0)
            sums = sums + trailing(nan, sums.ndim)
        return sums.reshape(aval.shape)

    sums = Sums(x.table, bags, entries, aval, lambda: bag_of(described().ids))
    return sums.lookup(result)
