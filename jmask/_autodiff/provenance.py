"""Rules for what each primitive adds to the facts about arrays.

    rows = gather table ids              Gathered: table[ids]
    m    = broadcast_in_dim mask         Product: mask, the same along each row
    z    = broadcast_in_dim 0.0          Product: 0
    x    = select_n m z rows             Gathered: table[where(mask, ids, V)]

A rule runs once for each equation, when the equation is run, and the program is never searched
backwards: the time is linear in it. What no rule knows is an array.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._autodiff.gathered_rows import (
    FACTS,
    Fact,
    Gathered,
    Product,
    Shape,
    Slices,
    is_sharded,
    longest_rows,
)
from jmask._base.array_types import is_known
from jmask._base.forms import aval_of, parameter
from jmask._base.row_ids import INT32_MAX, canonical, widen
from jmask._base.types import Atom, Function, Value
from jmask._kernels.gather import Gather

# Longer products are arrays. Programs multiply an array by few others before they sum it, and
# each rule goes through all factors.
_MOST_FACTORS = 8


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of an equation: its value, and what is known of it."""

    value: Value
    shape: Shape
    fact: Fact | None

    def product(self) -> Product:
        """Return the operand as a product, with itself as the one factor if none is known."""
        if isinstance(self.fact, Product):
            return self.fact
        dtype = self.value.dtype
        return Product(((self.value, tuple(range(len(self.shape)))),), self.shape, dtype)

    @property
    def is_zero(self) -> bool:
        return self.product().is_zero


def _broadcast(eqn: JaxprEqn, x: Operand, *_: Operand) -> Fact | None:
    shape, dims = aval_of(eqn.outvars[0]).shape, parameter(eqn, "broadcast_dimensions")
    if isinstance(x.fact, Gathered):  # more dimensions of size 1
        return _reshaped(x.fact, shape) if math.prod(shape) == math.prod(x.shape) else None
    return x.product().moved([int(d) for d in dims], shape)


def _reshape(eqn: JaxprEqn, x: Operand, *_: Operand) -> Fact | None:
    old, new = x.shape, aval_of(eqn.outvars[0]).shape
    if isinstance(x.fact, Gathered):
        return _reshaped(x.fact, new)
    if not isinstance(x.fact, Product) or 0 in old:
        return None
    wide_old, wide_new = ([d for d, size in enumerate(s) if size != 1] for s in (old, new))
    if [old[d] for d in wide_old] == [new[d] for d in wide_new]:
        to = dict(zip(wide_old, wide_new, strict=True))
        return x.fact.moved([to.get(d, -1) for d in range(len(old))], new)
    # Trailing dimensions that stay are whole rows, in row-major order, whatever their sizes.
    kept = 0
    while kept < min(len(old), len(new)) - 1 and old[-1 - kept] == new[-1 - kept]:
        kept += 1
    rows = longest_rows(x.fact, kept)
    return None if rows is None else _reshaped(rows, new)


def _reshaped(rows: Gathered, shape: Shape) -> Gathered | None:
    lead = len(shape) - len(rows.row)
    if lead < 1 or shape[lead:] != rows.row:
        return None
    entries = shape[:lead]
    return rows.moved(lambda x: x.reshape(entries), entries)


def _pad(eqn: JaxprEqn, x: Operand, padding: Operand) -> Fact | None:
    """Return a slice among zeros: the cotangent of `rows[:, 1:]`."""
    config = parameter(eqn, "padding_config")
    is_slice = all(low >= 0 and high >= 0 and not step for low, high, step in config)
    if not is_slice or not padding.is_zero or not isinstance(x.value, jax.Array):
        return None
    first = tuple(int(low) for low, *_ in config)
    return Slices(((x.value, x.fact, first),), aval_of(eqn.outvars[0]).shape)


def _add(eqn: JaxprEqn, x: Operand, y: Operand) -> Fact | None:
    """Join slices that do not overlap, or double a product as in the cotangent of x * x."""
    if isinstance(x.fact, Slices) and isinstance(y.fact, Slices):
        beside = not x.fact.overlaps(y.fact)
        return Slices(x.fact.parts + y.fact.parts, x.shape) if beside else None
    if not isinstance(x.fact, Product) or not isinstance(y.fact, Product):
        return None
    known, other = (sorted((id(a), dims) for a, dims in f.factors) for f in (x.fact, y.fact))
    if known != other:
        return None
    two = np.asarray(2, x.fact.dtype)
    return dataclasses.replace(x.fact, factors=(*x.fact.factors, (two, ())))


def _transpose(eqn: JaxprEqn, x: Operand) -> Fact | None:
    order, shape = parameter(eqn, "permutation"), aval_of(eqn.outvars[0]).shape
    if isinstance(x.fact, Product):
        return x.fact.moved([order.index(d) for d in range(len(order))], shape)
    if not isinstance(x.fact, Gathered):
        return None
    rows, lead = x.fact, len(x.fact.entries)
    if tuple(order[lead:]) != tuple(range(lead, len(order))):
        return None
    rows = dataclasses.replace(rows, index=rows.positions())
    return rows.moved(lambda a: a.transpose(order[:lead]), shape[:lead])


def _same(eqn: JaxprEqn, x: Operand) -> Fact | None:
    return x.fact


def _convert(eqn: JaxprEqn, x: Operand) -> Fact | None:
    known, dtype = x.fact, jnp.dtype(parameter(eqn, "new_dtype"))
    if not isinstance(x.value, jax.Array):
        known = x.product()
    if isinstance(known, Product) and len(known.factors) == 1 and known.is_exact:
        ((array, dims),) = known.factors
        return Product(((array.astype(dtype), dims),), known.shape, dtype)
    if not isinstance(known, Product | Gathered) or not known.is_exact:
        return None
    if not all(jnp.issubdtype(x, jnp.floating) for x in (known.dtype, dtype)):
        return None
    if isinstance(known, Gathered) and known.weight is None and known.pays:
        return dataclasses.replace(known, source=known.source.astype(dtype), dtype=dtype)
    return dataclasses.replace(known, dtype=dtype)


def _negate(eqn: JaxprEqn, x: Operand) -> Fact | None:
    if isinstance(x.fact, Product):
        (array, dims), *others = x.fact.factors
        return dataclasses.replace(x.fact, factors=((-array, dims), *others))
    return x.fact.scaled(jnp.negative) if isinstance(x.fact, Gathered) else None


def _multiply(eqn: JaxprEqn, x: Operand, y: Operand) -> Fact | None:
    shape = aval_of(eqn.outvars[0]).shape
    for rows, other in ((x, y), (y, x)):
        if isinstance(rows.fact, Gathered | Slices) and rows.shape == shape:
            known = _rows_beside(rows, other)
            return None if known is None else _weighted(known, other)
    if any(isinstance(a.fact, Gathered | Slices) for a in (x, y)):
        return None
    if x.shape == y.shape and x.fact is None and y.fact is None:
        return None
    products = [a.product() for a in (x, y)]
    factors = tuple(factor for product in products for factor in product.factors)
    result = Product(factors, shape, products[0].dtype)
    every = {d for d, size in enumerate(shape) if size != 1}
    whole = sum(result.dims_of(number) == every for number in range(len(factors)))
    is_plain = whole > 1 or len(factors) > _MOST_FACTORS
    return None if is_plain or not all(p.is_exact for p in products) else result


def _rows_beside(x: Operand, other: Operand) -> Gathered | None:
    """Return an operand as rows, along which another is the same if rows can be so short."""
    if isinstance(x.fact, Product | Slices):
        most = len(x.shape) - max(other.product().differs, default=0) - 1
        return longest_rows(x.fact, most)
    return x.fact


def _weighted(rows: Gathered, other: Operand) -> Gathered | None:
    if not rows.is_exact or rows.factors == _MOST_FACTORS:
        return None
    if other.shape == ():
        return rows.scaled(lambda a: a * other.value)
    product = other.product()
    weight = product.per_entry(len(rows.entries)) if product.is_exact else None
    if weight is None:
        return None
    weight = jnp.broadcast_to(weight, rows.entries)
    if rows.weight is not None:
        weight = rows.weight * weight
    return dataclasses.replace(rows, weight=weight, factors=rows.factors + 1)


def _dot_general(eqn: JaxprEqn, *operands: Operand) -> Fact | None:
    """Multiply rows by weights, as in the backward pass of an einsum: nothing is summed."""
    contracted, batch = parameter(eqn, "dimension_numbers")
    result = aval_of(eqn.outvars[0])
    count, factors = len(batch[0]), []
    begin = count
    for x, sums, shared in zip(operands, contracted, batch, strict=True):
        if x.value.dtype != result.dtype or any(x.shape[d] != 1 for d in sums):
            return None
        free = [d for d in range(len(x.shape)) if d not in (*sums, *shared)]
        to = {d: i for i, d in enumerate(shared)} | {d: begin + i for i, d in enumerate(free)}
        begin += len(free)
        factors.append((x.value, tuple(to.get(d, -1) for d in range(len(x.shape)))))
    return Product(tuple(factors), result.shape, result.dtype)


def _gather(eqn: JaxprEqn, table: Operand, indices: Operand) -> Fact | None:
    """Return the rows that a lookup of whole rows reads."""
    row_ndim, shape = len(table.shape) - 1, aval_of(eqn.outvars[0]).shape
    entries, mode = shape[: len(shape) - row_ndim], parameter(eqn, "mode")
    lookup = Gather.rows_of(table.shape, mode, len(entries))
    reads = parameter(eqn, "dimension_numbers"), parameter(eqn, "slice_sizes")
    if reads != (lookup.dimension_numbers, lookup.slice_sizes) or not (row_ndim and entries):
        return None
    count, fills = table.shape[0], mode == lax.GatherScatterMode.FILL_OR_DROP
    if count > INT32_MAX:  # the index is int32
        return None
    index = lax.squeeze(indices.value, [len(indices.shape) - 1])
    if fills:
        index = canonical(index, count)
    else:  # lax, not jnp: `jnp.clip` is a call, which takes several times as long to trace
        index = widen(index, count)
        index = lax.clamp(np.zeros((), index.dtype), index, np.asarray(count - 1, index.dtype))
    fill = parameter(eqn, "fill_value")
    fill = np.nan if fill is None else fill
    rows = Gathered(
        table.value, index.astype(jnp.int32), None, entries, table.value.dtype, is_alone=True
    )
    if not fills or fill == 0:
        return rows
    return dataclasses.replace(rows, outside=index == count) if fill != fill else None


def _select(eqn: JaxprEqn, which: Operand, *cases: Operand) -> Fact | None:
    """Keep rows where a condition of their entry holds, zeros elsewhere."""
    if len(cases) != 2 or which.value.dtype != jnp.dtype(bool):
        return None
    for x, other, is_first in ((cases[0], cases[1], True), (cases[1], cases[0], False)):
        if not other.is_zero or len(which.shape) != len(x.shape):
            continue
        rows = _rows_beside(x, which)
        kept = None if rows is None else which.product().per_entry(len(rows.entries))
        if rows is None or kept is None or not rows.is_exact:
            continue
        if rows.factors == _MOST_FACTORS:
            return None
        kept = ~kept if is_first else kept
        kept = jnp.broadcast_to(kept, rows.entries)
        index = jnp.where(kept, rows.positions(), rows.source.shape[0])
        weight = None if rows.weight is None else jnp.where(kept, rows.weight, 0)
        outside = None if rows.outside is None else rows.outside & kept
        return dataclasses.replace(
            rows, index=index, weight=weight, outside=outside, factors=rows.factors + 1
        )
    return None


_RULES: dict[str, Function] = {
    "add_any": _add,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "dot_general": _dot_general,
    "expand_dims": _reshape,
    "gather": _gather,
    "mul": _multiply,
    "name": _same,
    "neg": _negate,
    "pad": _pad,
    "reshape": _reshape,
    "select_n": _select,
    "squeeze": _reshape,
    "transpose": _transpose,
}
# Those that know something of operands of which nothing is known: anywhere, lookups and weights
# that are broadcast to rows, and on the way to a scatter factors of a cotangent as well.
_BEGIN = ("broadcast_in_dim", "gather")
_BEGIN_FACTORS = (*_BEGIN, "dot_general", "mul", "pad")
FOLLOWED = frozenset(_RULES)
# Most are tracers: a question about `jax.Array` alone takes ten times as long.
_ARRAYS = jax.core.Tracer, jax.Array


def note_facts(
    eqn: JaxprEqn,
    name: str,
    inputs: Sequence[Value],
    output: Value,
    uses: Counter[Atom],
    is_scattered: bool,
) -> None:
    """Note what an equation adds to what is known of its operands.

    If its result `is_scattered`, on the way to a scatter, rows of an array that is not much
    smaller are nothing but an array.
    """
    rule = _RULES.get(name)
    if rule is None or not isinstance(output, jax.core.Tracer):
        return
    known = [FACTS.of(x) for x in inputs]
    if is_scattered:
        known = [None if isinstance(x, Gathered) and not x.pays else x for x in known]
    begins = name in (_BEGIN_FACTORS if is_scattered else _BEGIN)
    if not begins and not any(known) and all(isinstance(x, _ARRAYS) for x in inputs):
        return
    operands = [
        _operand(x, v, fact) for x, v, fact in zip(inputs, eqn.invars, known, strict=True)
    ]
    shapes = [operand.shape for operand in operands if operand is not None]
    is_countable = is_known(*(size for shape in (*shapes, output.shape) for size in shape))
    if len(shapes) < len(inputs) or not is_countable or 0 in output.shape:
        return
    is_number = jnp.issubdtype(output.dtype, jnp.inexact) or output.dtype == jnp.dtype(bool)
    if not is_number or is_sharded(output):
        return
    fact = rule(eqn, *operands)
    if isinstance(fact, Gathered) and fact.is_alone and name != "gather":
        is_alone = all(
            uses[v] == 1
            for v, x in zip(eqn.invars, known, strict=True)
            if isinstance(x, Gathered)
        )
        fact = dataclasses.replace(fact, is_alone=is_alone)
    if fact is not None:
        FACTS.note(output, fact)


def note_uses(eqn: JaxprEqn, inputs: Sequence[Value], uses: Counter[Atom]) -> None:
    """Note which operands of a call are needed outside of it as well."""
    for v, x in zip(eqn.invars, inputs, strict=True):
        known = FACTS.of(x)
        if isinstance(known, Gathered) and known.is_alone and uses[v] > 1:
            FACTS.note(x, dataclasses.replace(known, is_alone=False))


def _operand(x: Value, v: Atom, fact: Fact | None) -> Operand | None:
    """Return an operand with its value as an array; None of a symbolic value."""
    if isinstance(x, bool | int | float | complex | np.generic | np.ndarray):
        x = np.asarray(x, aval_of(v).dtype)
    is_array = isinstance(x, jax.Array | np.ndarray)
    return Operand(x, tuple(x.shape), fact) if is_array else None
