"""Arrays that are known to be gathered rows, read from the program while it is traced.

    ct_bags (b, D)                               of bags
    ct = broadcast ct_bags                       Product: ct_bags, along the dimensions 0 and 2
    ct = mul ct weights (b, L, 1)                Product: and weights, along 0 and 1
    g  = scatter-add zeros(V, D) ids ct          ct_bags[bag of the entry] * weight

    rows = gather table ids                      Gathered: table[ids]
    rows = select_n mask zeros rows              Gathered: table[where(mask, ids, V)]
    sums = reduce_sum rows                       a sum of bags, of which no row is written

Each equation adds what is known of its result to what is known of its operands, once: the time
is linear in the program, and nothing is asked backwards. Facts follow the arrays into functions
that are called. Two consumers ask for them: `rows_added`, where a gradient scatters rows, and
`sum_of_lookups`, where a program sums rows that it looked up. What no rule knows is an array.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._base.array_facts import ArrayFacts
from jmask._base.array_types import joint_dtype, trailing, wide
from jmask._base.forms import aval_of, parameter
from jmask._base.shardings import explicit_sharding
from jmask._base.types import Atom, DType, HostArray, Shape, Value
from jmask._kernels import tuning
from jmask._kernels.bag_sum import are_many, bag_sum
from jmask._kernels.gathered_rows import GatheredRows, Rows, joined_rows, pays

# --- what is known -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Product:
    """An array that is a product of others, each broadcast to its shape.

    Attributes:
        factors: arrays in any order, each with the number of the dimension of the result that
            each of its own dimensions is. Each size is that of the result, or 1; the number is
            -1 for a dimension of size 1 that the result does not have.
        shape: of the result.
        dtype: of the result; the product is computed in the dtype of its factors.
    """

    factors: tuple[tuple[jax.Array | HostArray, Shape], ...]
    shape: Shape
    dtype: DType

    @property
    def is_exact(self) -> bool:
        """True if the result has the dtype in which it is computed."""
        dtypes = {x.dtype for x, _ in self.factors}
        return dtypes == {self.dtype} or self.dtype == joint_dtype(*dtypes)

    @property
    def is_zero(self) -> bool:
        """True if it is 0 everywhere, as the program says."""
        return any(not isinstance(x, jax.Array) and not np.any(x) for x, _ in self.factors)

    def dims_of(self, number: int) -> set[int]:
        """Return the dimensions along which a factor differs."""
        x, dims = self.factors[number]
        return {d for size, d in zip(x.shape, dims, strict=True) if size != 1}

    @property
    def differs(self) -> set[int]:
        """The dimensions along which it differs."""
        return set[int]().union(*map(self.dims_of, range(len(self.factors))))

    def moved(self, to: Sequence[int], shape: Shape) -> "Product":
        """Return the product with each dimension d as `to[d]` of another shape, -1 for none."""
        to = (*to, -1)
        factors = tuple((x, tuple(to[d] for d in dims)) for x, dims in self.factors)
        return Product(factors, shape, self.dtype)

    def per_entry(self, ndim: int) -> jax.Array | None:
        """Return the numbers (*shape[:ndim]) that are the same along all other dimensions."""
        if any(d >= ndim for d in self.differs):
            return None
        return self._multiplied(range(len(self.factors)), ndim)

    def _multiplied(self, which: Sequence[int], ndim: int) -> jax.Array:
        arrays = (self._expanded(number) for number in which)
        numbers = [x.reshape(x.shape[:ndim]) for x in arrays]
        return jnp.broadcast_to(functools.reduce(jnp.multiply, numbers), self.shape[:ndim])

    def _expanded(self, number: int) -> jax.Array:
        """Return a factor with all dimensions of the result, of size 1 where it is the same."""
        x, dims = self.factors[number]
        order = sorted(range(len(dims)), key=dims.__getitem__)
        sizes = dict(zip(dims, x.shape, strict=True))
        shape = [sizes.get(d, 1) for d in range(len(self.shape))]
        return jnp.transpose(jnp.asarray(x), order).reshape(shape)

    def rows(self, row_ndim: int) -> "Gathered | None":
        """Return the rows (*entries, *row) that one factor has, weighted by the others.

        Where none has, all entries of a row are one number: that times a row of ones.
        """
        # As an einsum: "bd,bl,l->bld" has the rows "bd", one for each b, and the weight "bl,l"
        # of each entry. The source is the factor with letters of the row, its index counts the
        # letters of entries that this factor has, and all other factors make the weight. Two
        # factors with letters of the row have no such form: their product is of full size.
        lead = len(self.shape) - row_ndim
        count = range(len(self.factors))
        with_rows = [i for i in count if any(d >= lead for d in self.dims_of(i))]
        if len(with_rows) > 1 or lead < 1:
            return None
        if not with_rows:
            ones = jnp.ones(self.shape[lead:], self.factors[0][0].dtype)
            factors = (*self.factors, (ones, tuple(range(lead, len(self.shape)))))
            whole = dataclasses.replace(self, factors=factors)
            return whole.rows(row_ndim) if ones.size > 1 else None
        dims = self.dims_of(with_rows[0])
        if any(d not in dims and size != 1 for d, size in enumerate(self.shape) if d >= lead):
            return None  # the same along a part of the row
        x, entries = self._expanded(with_rows[0]), self.shape[:lead]
        sizes, row = x.shape[:lead], self.shape[lead:]
        source = x.reshape(math.prod(sizes), *row)
        index = None
        if sizes != entries:
            index = lax.iota(jnp.int32, source.shape[0]).reshape(sizes)
            index = jnp.broadcast_to(index, entries)
        others = [i for i in count if i not in with_rows]
        if index is not None:
            # Numbers that are the same for all entries are multiplied into fewer source rows.
            numbers = [i for i in others if not self.dims_of(i)]
            for i in numbers:
                source = source * jnp.reshape(jnp.asarray(self.factors[i][0]), ())
            others = [i for i in others if i not in numbers]
        weight = self._multiplied(others, lead) if others else None
        return Gathered(source, index, weight, entries, self.dtype)


@dataclasses.dataclass(frozen=True)
class Gathered:
    """An array (*entries, *row) of rows source[index] * weight, cast to `dtype`.

    Attributes:
        source (m, *row): inexact.
        index (*entries,): int32, canonical: m stands for zeros. None: rows in their order.
        weight (*entries,): or None for ones.
        outside (*entries,): rows that are nan; None if no row is.
        is_alone: whether nothing but what led here needs the rows.
        factors: how many weights and masks have been applied.
    """

    source: jax.Array
    index: jax.Array | None
    weight: jax.Array | None
    entries: Shape
    dtype: DType
    outside: jax.Array | None = None
    is_alone: bool = False
    factors: int = 0

    @property
    def row(self) -> Shape:
        return self.source.shape[1:]

    @property
    def is_exact(self) -> bool:
        """True if the rows have the dtype in which they are computed; casts up are exact."""
        if self.weight is None:
            return joint_dtype(self.source, self.dtype) == self.dtype
        return self.dtype == joint_dtype(self.source, self.weight)

    @property
    def pays(self) -> bool:
        """True if the source is much smaller than the rows."""
        return pays(self.source.shape[0], math.prod(self.entries))

    def positions(self) -> jax.Array:
        """Return the index (*entries,), also of rows in their order."""
        if self.index is not None:
            return self.index
        return lax.iota(jnp.int32, self.source.shape[0]).reshape(self.entries)

    def moved(self, function: Callable[[jax.Array], jax.Array], entries: Shape) -> "Gathered":
        """Return it with `function` of each array of the entries, which moves them."""
        index, weight, outside = (
            None if x is None else function(x) for x in (self.index, self.weight, self.outside)
        )
        return dataclasses.replace(
            self, index=index, weight=weight, outside=outside, entries=entries
        )

    def rows(self, row_ndim: int) -> "Gathered | None":
        """Return it if its rows have so many dimensions, and none is nan."""
        return self if len(self.row) == row_ndim and self.outside is None else None

    def flat(self) -> GatheredRows:
        """Return it as rows (n, *row)."""
        index, weight = (
            None if x is None else x.reshape(-1) for x in (self.index, self.weight)
        )
        return GatheredRows(self.source, index, weight, self.dtype)

    def scaled(self, function: Callable[[jax.Array], jax.Array]) -> "Gathered | None":
        """Multiply by a number as `function` does; return None for a large source."""
        if self.weight is not None:
            return dataclasses.replace(self, weight=function(self.weight))
        return dataclasses.replace(self, source=function(self.source)) if self.pays else None


@dataclasses.dataclass(frozen=True)
class Slices:
    """An array that is slices which do not overlap, and zeros elsewhere.

    Attributes:
        parts: of each slice the array, what is known of it, and where it begins.
        shape: of the whole.
    """

    parts: tuple[tuple[jax.Array, "Fact | None", Shape], ...]
    shape: Shape

    def overlaps(self, other: "Slices") -> bool:
        """Decide whether a slice may have entries that one of the other has."""
        return not all(
            any(
                i + x.shape[d] <= j or j + y.shape[d] <= i
                for d, (i, j) in enumerate(zip(a, b, strict=True))
            )
            for x, _, a in self.parts
            for y, _, b in other.parts
        )

    def rows(self, row_ndim: int) -> "Gathered | None":
        """Return the rows of all slices, if at least one has gathered rows."""
        lead = len(self.shape) - row_ndim
        entries = self.shape[:lead]
        parts: list[Rows] = []
        for x, known, first in self.parts:
            rows = None if known is None else known.rows(row_ndim)
            if x.shape[lead:] != self.shape[lead:] or any(first[lead:]):
                return None
            plain = x.reshape(-1, *x.shape[lead:])
            parts.append(plain if rows is None else rows.flat())
        whole = joined_rows(parts)
        if whole is None or whole.index is None:
            return None

        def placed(numbers: jax.Array, elsewhere: int) -> jax.Array:
            result, begin = jnp.full(entries, elsewhere, numbers.dtype), 0
            for x, _, first in self.parts:
                end = begin + math.prod(x.shape[:lead])
                part = numbers[begin:end].reshape(x.shape[:lead])
                result, begin = lax.dynamic_update_slice(result, part, first[:lead]), end
            return result

        index = placed(whole.index, whole.source.shape[0])
        weight = None if whole.weight is None else placed(whole.weight, 0)
        return Gathered(whole.source, index, weight, entries, whole.dtype)


def longest_rows(known: "Product | Slices", most: int) -> Gathered | None:
    """Return an array as rows of as many dimensions as possible, up to `most`."""
    candidates = (known.rows(row_ndim) for row_ndim in range(most, 0, -1))
    return next((rows for rows in candidates if rows is not None), None)


Fact = Product | Gathered | Slices
FACTS: ArrayFacts[Fact] = ArrayFacts()


# --- consumers ---------------------------------------------------------------------------


def is_sharded(x: jax.Array) -> bool:
    """Decide whether an array is sharded by its type, or is one device's part of another.

    A caller may put the parts together, and the factors of a part are of that part alone.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return bool(manual) or explicit_sharding(x) is not None


def rows_added(eqn: JaxprEqn, updates: jax.Array) -> GatheredRows | None:
    """Return what makes the rows that a `scatter-add` of whole rows adds, if that is less."""
    known = FACTS.of(updates)
    shape, ndim = aval_of(eqn.outvars[0]).shape, len(updates.shape)
    row_ndim = len(shape) - 1
    whole_rows = lax.ScatterDimensionNumbers(tuple(range(ndim - row_ndim, ndim)), (0,), (0,))
    if (
        known is None
        or parameter(eqn, "dimension_numbers") != whole_rows
        or updates.shape[ndim - row_ndim :] != shape[1:]
        or not row_ndim
        or is_sharded(updates)
    ):
        return None
    least = tuning.LARGE_SLICES if isinstance(known, Slices) else tuning.SMALL_ROWS
    if updates.nbytes < least:
        return None
    rows = known.rows(row_ndim)
    if rows is None or rows.dtype != aval_of(eqn.outvars[0]).dtype:
        return None
    is_large = (
        rows.index is None and rows.weight is not None and updates.nbytes >= tuning.LARGE_ROWS
    )
    return rows.flat() if is_large or rows.pays else None


def sum_of_lookups(
    eqn: JaxprEqn, name: str, inputs: Sequence[Value], uses: Counter[Atom]
) -> jax.Array | None:
    """Return what an equation makes, if it sums rows that nothing else needs."""
    sums_of = SUMS.get(name)
    for which, kept, summed, weights in () if sums_of is None else sums_of(eqn, inputs):
        v, rows = eqn.invars[which], FACTS.of(inputs[which])
        if not isinstance(rows, Gathered) or not rows.is_alone or uses[v] > 1 or not kept:
            continue
        if sorted((*kept, *summed)) != list(range(len(rows.entries))):
            continue
        bags, length = (math.prod(rows.entries[d] for d in x) for x in (kept, summed))
        result = aval_of(eqn.outvars[0])
        if not (
            are_many(bags * length)
            and rows.is_exact
            and result.dtype == wide(rows.source.dtype)
            and jnp.issubdtype(rows.source.dtype, jnp.floating)
            and (weights is None or rows.weight is None)
            and not is_sharded(rows.source)
        ):
            continue
        moved = functools.partial(_by_bags, order=(*kept, *summed), shape=(bags, length))
        rows = rows.moved(moved, (bags, length))
        weight = rows.weight if weights is None else weights.reshape(bags, -1)
        weight = None if weight is None else weight.astype(result.dtype)
        sums = bag_sum(rows.source, rows.positions(), None, weight, None, bags, 0)
        if rows.outside is not None:
            outside = trailing(rows.outside.any(1), sums.ndim)
            sums = jnp.where(outside, jnp.asarray(math.nan, sums.dtype), sums)
        return sums.reshape(result.shape)
    return None


def _by_bags(x: jax.Array, order: Shape, shape: Shape) -> jax.Array:
    return x.transpose(order).reshape(shape)


_Sum = tuple[int, Shape, Shape, jax.Array | None]
"""Which operand is summed, its dimensions that stay before those of a row, those of the entries
of one sum, and weights (*kept, *summed)."""


def _reduce_sum(eqn: JaxprEqn, inputs: Sequence[Value]) -> Iterator[_Sum]:
    known, axes = FACTS.of(inputs[0]), tuple(sorted(parameter(eqn, "axes")))
    if isinstance(known, Gathered) and axes:
        yield 0, tuple(d for d in range(len(known.entries)) if d not in axes), axes, None


def _weighted_sum(eqn: JaxprEqn, inputs: Sequence[Value]) -> Iterator[_Sum]:
    """Find rows and weights of entries, as in `jnp.einsum("bld,bl->bd", rows, weights)`."""
    contracted, batch = parameter(eqn, "dimension_numbers")
    for which in (0, 1):
        other = inputs[1 - which]
        kept, summed = tuple(batch[which]), tuple(contracted[which])
        shared = (*batch[1 - which], *contracted[1 - which])
        free = [d for d in range(np.ndim(other)) if d not in shared]
        if summed and all(other.shape[d] == 1 for d in free):
            yield which, kept, summed, jnp.transpose(other, (*shared, *free))


SUMS = {"reduce_sum": _reduce_sum, "dot_general": _weighted_sum}
