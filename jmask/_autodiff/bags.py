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

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmask._autodiff.lookups import WINDOWS, windows_of
from jmask._autodiff.sums import bag_of_table
from jmask._autodiff.taps import NONE, Taps
from jmask._autodiff.views import Lookup, TableView, View
from jmask._base.array_types import is_known, trailing, wide
from jmask._base.forms import aval_of, name_of, parameter
from jmask._base.jaxprs import bound, read
from jmask._base.row_ids import canonical, widen
from jmask._base.shardings import sharding_of_type
from jmask._base.types import Argument, Atom, Shape
from jmask._kernels.bag_sum import BAG_SUM, BagSum, are_many

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Entries:
    """How each entry reads a row and scales it: arrays (*entries,).

    Attributes:
        ids: canonical; padding reads zeros, and has no gradient.
        read: other ids that rows are read at, or None. An id outside of a table that a program
            promises not to have reads its last row.
        outside: where rows are nan, or None.
        weight: in the dtype of sums, or None for ones.
    """

    ids: Array
    read: Array | None = None
    outside: Array | None = None
    weight: Array | None = None

    def moved(self, function: Callable[[Array], Array]) -> "Entries":
        """Return it with all arrays in another shape."""
        arrays = (self.ids, self.read, self.outside, self.weight)
        return Entries(*(None if x is None else function(x) for x in arrays))  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False)
class Rows(View):
    """Rows (*entries, *row) of a table that are looked up, and not read yet.

    Attributes:
        table: whose rows these are.
        entries: the shape of their ids.
        described: makes the arrays that describe the entries, once the program runs.
        is_weighted: whether these have weights.
    """

    table: TableView | None = None
    entries: Shape = ()
    described: Callable[[], Entries] = lambda: Entries(jnp.zeros(0))
    is_weighted: bool = False


class Scope:
    """The variables of one program: how often each is used, and what it is a broadcast of."""

    def __init__(self, jaxpr: Jaxpr, values: dict[Var, Argument]) -> None:
        self._jaxpr, self._values = jaxpr, values

    @functools.cached_property
    def _uses(self) -> Counter[Atom]:
        operands = [v for eqn in self._jaxpr.eqns for v in eqn.invars] + self._jaxpr.outvars
        return Counter(v for v in operands if isinstance(v, Var))

    @functools.cached_property
    def _makers(self) -> dict[Atom, JaxprEqn]:
        return {v: eqn for eqn in self._jaxpr.eqns for v in eqn.outvars}

    def is_alone(self, v: Atom) -> bool:
        """Decide whether one equation, or the result, has the only use of a variable."""
        return isinstance(v, Var) and self._uses[v] == 1

    def broadcast(self, v: Atom) -> tuple[Argument, Sequence[int]] | None:
        """Return what a variable is a broadcast of, and the dimensions of that; else None."""
        if isinstance(v, Literal):
            return v.val, ()
        eqn = self._makers.get(v)
        if eqn is None:
            value = self._values[v]
            return (value, ()) if _is_number(value) else None
        if not eqn.invars:
            return None
        source = eqn.invars[0]
        known = None if aval_of(source).shape else self.broadcast(source)
        if name_of(eqn) == "convert_element_type":  # 0 is 0 in any dtype
            return known if known is not None and _is_zero(known[0]) else None
        if name_of(eqn) != "broadcast_in_dim":
            return None
        value = read(self._values, source)
        if known is None and isinstance(value, View):
            return None
        return known or (value, [int(d) for d in parameter(eqn, "broadcast_dimensions")])

    def per_entry(self, v: Atom, x: Rows) -> Callable[[], Array] | None:
        """Return a function that returns numbers (*entries,) that a variable is along rows."""
        value = read(self._values, v)
        if isinstance(value, View):
            return None
        source, dims = self.broadcast(v) or (value, range(np.ndim(value)))
        if np.ndim(source) == 0:
            return lambda: jnp.broadcast_to(source, x.entries)
        lead = len(x.entries)
        if any(d >= lead and n != 1 for d, n in zip(dims, source.shape, strict=True)):
            return None
        kept = [i for i, d in enumerate(dims) if d < lead]

        def numbers() -> Array:
            array = source.reshape([source.shape[i] for i in kept])
            return jax.lax.broadcast_in_dim(array, x.entries, [dims[i] for i in kept])

        return numbers


def _is_number(x: Argument) -> bool:
    """Decide whether a value is a number that the program has, and not an array."""
    return isinstance(x, int | float | np.generic | np.ndarray) and np.ndim(x) == 0


def _is_zero(x: Argument) -> bool:
    return _is_number(x) and not np.any(x)


def rows_of(eqn: JaxprEqn, name: str, args: Sequence[Argument], lookup: Lookup) -> Rows | None:
    """Return the rows of a lookup of whole rows that wait for their sum; None of any other."""
    x, aval = args[0], aval_of(eqn.outvars[0])
    plan, run = lookup
    if name not in WINDOWS or not isinstance(x, TableView) or plan[0].kind != "rows":
        return None
    windows = windows_of(eqn, name, args)
    lead, fill = len(windows.batch), windows.fill
    if jax.sharding.get_abstract_mesh().manual_axes or sharding_of_type(aval) is not None:
        return None
    if not (
        windows.sizes == (1, *x.shape[1:])
        and windows.single == windows.started == {0}
        and x.ndim > 1
        and tuple(windows.offsets) == tuple(range(lead, len(aval.shape)))
        and is_known(*windows.batch)
        and are_many(math.prod(windows.batch))
        and jnp.issubdtype(x.dtype, jnp.floating)
        and (fill is None or fill == 0 or math.isnan(fill))
    ):
        return None

    def described() -> Entries:
        start: Argument = windows.starts()[0]
        rows = x.shape[0]
        in_range = widen(jnp.clip(start, 0, rows - 1), rows)
        if windows.clips:
            return Entries(in_range)
        ids = canonical(start, rows)
        if fill is None:
            return Entries(ids, in_range)
        return Entries(ids, None, None if fill == 0 else ids == np.asarray(rows, ids.dtype))

    return Rows(
        tuple(aval.shape),
        x.dtype,
        lambda p: None,
        lambda _: run(NONE),
        x.tables,
        is_lookup=True,
        varies=x.varies,
        whole=lookup,
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
    x, made = args[which], None
    if name in _RULES:
        made = _RULES[name](eqn, x, which, scope)
    if made is None:
        return None
    (plan, run), aval, (entries, described) = x.whole, aval_of(eqn.outvars[0]), made

    def changed(taps: Taps) -> Array:
        return bound(eqn, [run(taps) if i == which else a for i, a in enumerate(args)])[0]

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


# --- rows that wait on --------------------------------------------------------------------

_Made = tuple[Shape, Callable[[], Entries]] | None


def _times(eqn: JaxprEqn, x: Rows, which: int, scope: Scope) -> _Made:
    other = eqn.invars[1 - which]
    numbers = scope.per_entry(other, x)
    if numbers is None or aval_of(other).dtype != x.dtype or x.dtype != wide(x.dtype):
        return None

    def described() -> Entries:
        known, weight = x.described(), numbers()
        weight = weight if known.weight is None else known.weight * weight
        return dataclasses.replace(known, weight=weight)

    return x.entries, described


def _select(eqn: JaxprEqn, x: Rows, which: int, scope: Scope) -> _Made:
    """Replace the ids of rows that are not chosen; of weights, 0 times infinity is nan."""
    if x.is_weighted or which == 0 or len(eqn.invars) != 3:
        return None
    zero, chosen = scope.broadcast(eqn.invars[3 - which]), scope.per_entry(eqn.invars[0], x)
    is_mask = aval_of(eqn.invars[0]).dtype == jnp.dtype(bool)
    if zero is None or not _is_zero(zero[0]) or chosen is None or not is_mask:
        return None

    def described() -> Entries:
        known, is_kept = x.described(), chosen() if which == 2 else ~chosen()
        assert x.table is not None
        padding = np.asarray(x.table.shape[0], known.ids.dtype)
        at = None if known.read is None else jnp.where(is_kept, known.read, padding)
        outside = None if known.outside is None else known.outside & is_kept
        return Entries(jnp.where(is_kept, known.ids, padding), at, outside)

    return x.entries, described


def _widened(eqn: JaxprEqn, x: Rows, which: int, scope: Scope) -> _Made:
    is_wide = x.table is not None and aval_of(eqn.outvars[0]).dtype == wide(x.table.dtype)
    return (x.entries, x.described) if is_wide else None


def _reshape(eqn: JaxprEqn, x: Rows, which: int, scope: Scope) -> _Made:
    shape, row = tuple(aval_of(eqn.outvars[0]).shape), x.shape[len(x.entries) :]
    lead = len(shape) - len(row)
    if lead < 1 or shape[lead:] != row or math.prod(shape) != math.prod(x.shape):
        return None
    entries = shape[:lead]
    return entries, lambda: x.described().moved(lambda a: a.reshape(entries))


def _transpose(eqn: JaxprEqn, x: Rows, which: int, scope: Scope) -> _Made:
    order, lead = tuple(parameter(eqn, "permutation")), len(x.entries)
    if order[lead:] != tuple(range(lead, x.ndim)):
        return None
    entries = tuple(x.entries[d] for d in order[:lead])
    return entries, lambda: x.described().moved(lambda a: a.transpose(order[:lead]))


_RULES: dict[str, Callable[[JaxprEqn, Rows, int, Scope], _Made]] = {
    "mul": _times,
    "select_n": _select,
    "convert_element_type": _widened,
    "transpose": _transpose,
    **dict.fromkeys("broadcast_in_dim expand_dims reshape squeeze".split(), _reshape),
}


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
    bags = math.prod(x.entries[d] for d in kept)
    bag_of = lambda ids, weight: BagSum(x.table, ids, None, weight, None, bags, 0)
    # Of the trial: no more than shapes.
    positions: Argument = jax.ShapeDtypeStruct((bags, math.prod(x.entries) // bags), np.int32)
    plan, _ = bag_of_table(bag_of(positions, None), aval).lookup(lambda: positions)

    def run(taps: Taps) -> Array:
        by_bags = lambda a: a.transpose((*kept, *summed)).reshape(bags, -1)
        known = x.described().moved(by_bags)
        weight = None if known.weight is None else known.weight.astype(dtype)
        if weights is not None:
            of_bags = weights().reshape(bags, -1).astype(dtype)
            weight = of_bags if weight is None else weight * of_bags
        bag = bag_of(known.ids if known.read is None else known.read, weight)
        ((sums,),) = BAG_SUM([dataclasses.replace(bag, table=x.table.array)])
        if known.outside is not None:  # all of a bag with such a row is nan
            nan = jnp.where(known.outside.any(1), jnp.asarray(math.nan, sums.dtype), 0)
            sums = sums + trailing(nan, sums.ndim)
        _, tapped = bag_of_table(bag_of(known.ids, weight), aval).lookup(lambda: sums)
        return tapped(taps).reshape(aval.shape)

    return plan, run
