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
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jmask._autodiff.lookups import WINDOWS, windows_of
from jmask._autodiff.sums import bag_of_table
from jmask._autodiff.taps import NONE, Taps
from jmask._autodiff.views import Lookup, TableView, View
from jmask._base.array_types import is_known, trailing, wide
from jmask._base.forms import aval_of, parameter
from jmask._base.row_ids import canonical, widen
from jmask._base.shardings import sharding_of_type
from jmask._base.types import Function, Shape, Value
from jmask._kernels.bag_sum import BAG_SUM, BagSum, are_many


@dataclasses.dataclass(frozen=True)
class Entries:
    """How each entry reads a row and scales it: arrays (*entries,).

    Attributes:
        ids: canonical; padding reads zeros, and has no gradient.
        read: other ids that rows are read at, or None. An id outside of a table that a program
            promises not to have reads its last row.
        weight: in the dtype of sums, or None for ones.
        slope: the weight of gradients, or None: the same. Where a mask leaves out an infinite
            weight it is nan, as JAX has 0 times infinity there.
        outside: where rows are nan, or None.
    """

    ids: jax.Array
    read: jax.Array | None = None
    weight: jax.Array | None = None
    slope: jax.Array | None = None
    outside: jax.Array | None = None

    def moved(self, function: Callable[[jax.Array], jax.Array]) -> "Entries":
        """Return it with all arrays in another shape."""
        others = (
            None if x is None else function(x)
            for x in (self.read, self.weight, self.slope, self.outside)
        )
        return Entries(function(self.ids), *others)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows(View):
    """Rows (*entries, *row) of a table that are looked up, and not read yet.

    Attributes:
        table: whose rows these are.
        entries: the shape of their ids.
        described: makes the arrays that describe the entries, once the program runs.
    """

    table: TableView | None = None
    entries: Shape = ()
    described: Callable[[], Entries] = lambda: Entries(jnp.zeros(0))


def rows_of(eqn: JaxprEqn, name: str, args: Sequence[Value], lookup: Lookup) -> Rows | None:
    """Return the rows of a lookup of whole rows that wait for their sum; None of any other."""
    x, aval = args[0], aval_of(eqn.outvars[0])
    plan, run = lookup
    if name not in WINDOWS or not isinstance(x, TableView) or plan[0].kind != "rows":
        return None
    windows = windows_of(eqn, name, args)
    entries, fill = windows.batch, windows.fill
    lead = len(entries)
    if jax.sharding.get_abstract_mesh().manual_axes or sharding_of_type(aval) is not None:
        return None
    if not (
        windows.sizes == (1, *x.shape[1:])
        and windows.single == windows.started == {0}
        and x.ndim > 1
        and tuple(windows.offsets) == tuple(range(lead, len(aval.shape)))
        and is_known(*entries)
        and are_many(math.prod(entries))
        and jnp.issubdtype(x.dtype, jnp.floating)
        and (fill is None or fill == 0 or math.isnan(fill))
    ):
        return None

    def described() -> Entries:
        (start,) = windows.starts().values()
        rows = x.shape[0]
        in_range = widen(jnp.clip(start, 0, rows - 1), rows)
        if windows.clips:
            return Entries(in_range)
        ids = canonical(start, rows)
        if fill is None:
            return Entries(ids, in_range)
        outside = None if fill == 0 else ids == np.asarray(rows, ids.dtype)
        return Entries(ids, outside=outside)

    return Rows(
        tuple(aval.shape),
        x.dtype,
        lambda count, where, plans: False,
        lambda *_: run(NONE),
        lambda _: run(NONE),
        x.tables,
        is_lookup=True,
        varies=x.varies,
        whole=lookup,
        table=x,
        entries=entries,
        described=described,
    )


def changed(
    eqn: JaxprEqn,
    name: str,
    args: Sequence[Value],
    broadcast: Callable[[int], Value],
    bind: Callable[[Sequence[Value]], Value],
) -> Rows | None:
    """Return what an equation makes of rows, if these are rows that wait; else None.

    Args:
        broadcast: the number of an operand -> (what it is a broadcast of, the dimensions of
            this), or None.
        bind: operands as arrays -> the result, as the equation has it.
    """
    rule = _RULES.get(name)
    which = next(i for i, x in enumerate(args) if isinstance(x, Rows))
    made = None if rule is None else rule(eqn, args, which, broadcast)
    if made is None:
        return None
    x, aval = args[which], aval_of(eqn.outvars[0])
    plan, run = x.whole

    def changed_run(taps: Taps) -> jax.Array:
        return bind([run(taps) if i == which else a for i, a in enumerate(args)])

    entries, described = made
    return dataclasses.replace(
        x,
        shape=tuple(aval.shape),
        dtype=aval.dtype,
        read=lambda *_: changed_run(NONE),
        make=lambda _: changed_run(NONE),
        whole=(plan, changed_run),
        entries=entries,
        described=described,
    )


_Made = tuple[Shape, Callable[[], Entries]] | None


def _per_entry(x: Rows, other: Value, number: int, broadcast: Callable) -> Callable | None:
    """Return a function that returns numbers (*entries,) that an operand is along rows."""
    if np.ndim(other) == 0:
        return lambda: other
    lead, known = len(x.entries), broadcast(number)
    if known is not None:
        source, dims = known
        if np.ndim(source) == 0:
            return lambda: source
        if all(d < lead or size == 1 for d, size in zip(dims, source.shape, strict=True)):
            kept = [i for i, d in enumerate(dims) if d < lead]
            along = [dims[i] for i in kept]

            def numbers() -> jax.Array:
                array = source.reshape([source.shape[i] for i in kept])
                return jax.lax.broadcast_in_dim(array, x.entries, along)

            return numbers
    shape = tuple(other.shape)
    if len(shape) == x.ndim and all(size == 1 for size in shape[lead:]):
        return lambda: jnp.broadcast_to(other.reshape(shape[:lead]), x.entries)
    return None


def _times(eqn: JaxprEqn, args: Sequence[Value], which: int, broadcast: Callable) -> _Made:
    x, other = args[which], args[1 - which]
    if isinstance(other, View) or other.dtype != x.dtype or x.dtype != wide(x.dtype):
        return None
    numbers = _per_entry(x, other, 1 - which, broadcast)
    if numbers is None:
        return None

    def described() -> Entries:
        known, weight = x.described(), jnp.broadcast_to(numbers(), x.entries)
        slope = None if known.slope is None else known.slope * weight
        weight = weight if known.weight is None else known.weight * weight
        return dataclasses.replace(known, weight=weight, slope=slope)

    return x.entries, described


def _select(eqn: JaxprEqn, args: Sequence[Value], which: int, broadcast: Callable) -> _Made:
    x, predicate = args[which], args[0]
    if len(args) != 3 or which == 0 or isinstance(predicate, View):
        return None
    zero = broadcast(3 - which)
    if zero is None or not is_zero(zero[0]) or predicate.dtype != jnp.dtype(bool):
        return None
    chosen = _per_entry(x, predicate, 0, broadcast)
    if chosen is None:
        return None

    def described() -> Entries:
        known, is_kept = x.described(), jnp.broadcast_to(chosen(), x.entries)
        is_kept = is_kept if which == 2 else ~is_kept

        def kept(numbers: jax.Array | None, other: int) -> jax.Array | None:
            if numbers is None:
                return None
            return jnp.where(is_kept, numbers, np.asarray(other, numbers.dtype))

        padding = x.table.shape[0]
        outside = None if known.outside is None else known.outside & is_kept
        if known.weight is None:
            ids = jnp.where(is_kept, known.ids, np.asarray(padding, known.ids.dtype))
            return Entries(ids, kept(known.read, padding), outside=outside)
        read = kept(known.ids if known.read is None else known.read, padding)
        slope = known.weight if known.slope is None else known.slope
        slope = jnp.where(is_kept, slope, slope * np.asarray(0, slope.dtype))
        return Entries(known.ids, read, kept(known.weight, 0), slope, outside)

    return x.entries, described


def is_number(x: Value) -> bool:
    """Decide whether a value is a number that the program has, and not an array."""
    return isinstance(x, int | float | np.generic | np.ndarray) and np.ndim(x) == 0


def is_zero(x: Value) -> bool:
    return is_number(x) and not np.any(x)


def _widened(eqn: JaxprEqn, args: Sequence[Value], which: int, broadcast: Callable) -> _Made:
    (x,) = args
    is_wide = aval_of(eqn.outvars[0]).dtype == wide(x.table.dtype)
    return (x.entries, x.described) if is_wide else None


def _reshape(eqn: JaxprEqn, args: Sequence[Value], which: int, broadcast: Callable) -> _Made:
    x, shape = args[0], tuple(aval_of(eqn.outvars[0]).shape)
    row = x.shape[len(x.entries) :]
    lead = len(shape) - len(row)
    if lead < 1 or shape[lead:] != row or math.prod(shape) != math.prod(x.shape):
        return None
    entries = shape[:lead]
    return entries, lambda: x.described().moved(lambda a: a.reshape(entries))


def _transpose(eqn: JaxprEqn, args: Sequence[Value], which: int, broadcast: Callable) -> _Made:
    x, order = args[0], tuple(parameter(eqn, "permutation"))
    lead = len(x.entries)
    if order[lead:] != tuple(range(lead, x.ndim)):
        return None
    entries = tuple(x.entries[d] for d in order[:lead])
    return entries, lambda: x.described().moved(lambda a: a.transpose(order[:lead]))


_RULES: dict[str, Function] = {
    "mul": _times,
    "select_n": _select,
    "convert_element_type": _widened,
    "broadcast_in_dim": _reshape,
    "expand_dims": _reshape,
    "reshape": _reshape,
    "squeeze": _reshape,
    "transpose": _transpose,
}


# --- sums ---------------------------------------------------------------------------------


def sum_of(eqn: JaxprEqn, name: str, args: Sequence[Value]) -> Lookup | None:
    """Return the sum that an equation makes of rows that wait, as a bag sum; else None."""
    if name == "reduce_sum":
        (x,), weights = args, None
        summed = tuple(sorted(parameter(eqn, "axes")))
        kept = tuple(d for d in range(len(x.entries)) if d not in summed)
    elif name == "dot_general":
        which = next(i for i, a in enumerate(args) if isinstance(a, Rows))
        x, other = args[which], args[1 - which]
        contracted, batch = parameter(eqn, "dimension_numbers")
        kept, summed = tuple(batch[which]), tuple(contracted[which])
        shared = (*batch[1 - which], *contracted[1 - which])
        free = [d for d in range(np.ndim(other)) if d not in shared]
        if isinstance(other, View) or any(other.shape[d] != 1 for d in free):
            return None
        weights = lambda: jnp.transpose(other, (*shared, *free))
    else:
        return None
    aval, dtype = aval_of(eqn.outvars[0]), wide(x.table.dtype)
    is_sum = summed and kept and sorted((*kept, *summed)) == list(range(len(x.entries)))
    if not is_sum or aval.dtype != dtype or math.prod(x.entries[d] for d in summed) < 2:
        return None
    bags = math.prod(x.entries[d] for d in kept)

    def by_bags(a: jax.Array) -> jax.Array:
        return a.transpose((*kept, *summed)).reshape(bags, -1)

    def weighted(weight: jax.Array | None) -> jax.Array | None:
        weight = None if weight is None else weight.astype(dtype)
        if weights is None:
            return weight
        of_bags = weights().reshape(bags, -1).astype(dtype)
        return of_bags if weight is None else weight * of_bags

    # Of the trial: no more than shapes.
    positions: Value = jax.ShapeDtypeStruct((bags, math.prod(x.entries) // bags), np.int32)
    tap = bag_of_table(BagSum(x.table, positions, None, None, None, bags, 0), aval).tap

    def run(taps: Taps) -> jax.Array:
        known = x.described().moved(by_bags)
        weight = weighted(known.weight)
        read = known.ids if known.read is None else known.read
        ((sums,),) = BAG_SUM([BagSum(x.table.array, read, None, weight, None, bags, 0)])
        if known.outside is not None:  # all of a bag with such a row is nan
            nan = jnp.where(known.outside.any(1), jnp.asarray(math.nan, sums.dtype), 0)
            sums = sums + trailing(nan, sums.ndim)
        slope = weight if known.slope is None else weighted(known.slope)
        terms = bag_of_table(BagSum(x.table, known.ids, None, slope, None, bags, 0), aval)
        return terms.tapped(sums, taps).reshape(aval.shape)

    return [tap], run
