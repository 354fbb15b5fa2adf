"""Sums of rows: bag sums, and products with a sparse matrix, a bag for each of its rows.

    jmask_bag_sum                        sums of rows of a table, bag by bag
    bcoo_dot_general, bcsr_dot_general   X @ table, X sparse

Where a table is summed, the equation itself runs, and its sums get a tap: the cotangent of a
bag is that of all of its rows, which are not written out. Rows of a view are read with taps.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmask._autodiff.taps import Tap, Taps
from jmask._autodiff.views import (
    Lookup,
    Positions,
    TableView,
    View,
    planned,
    read_at,
    varies_of,
    varying,
    with_tap,
)
from jmask._base.array_types import trailing
from jmask._base.forms import aval_of, parameter
from jmask._base.jaxprs import bound
from jmask._base.row_ids import canonical, id_dtype
from jmask._base.types import Argument, Function, Shaped
from jmask._kernels.bag_sum import BagSum
from jmask._kernels.rows import add_rows


@dataclasses.dataclass(frozen=True)
class BagsOfTable:
    """Sums of rows of a table: entry i adds `weight[i]` times row `ids[i]` to bag `bag[i]`.

    Attributes:
        arrays: when it runs: ids, bag, weight (n,), canonical; weight None for ones.
    """

    table: View
    bags: int
    entries: int
    aval: Shaped
    arrays: Callable[[], tuple[jax.Array, jax.Array, jax.Array | None]]

    def lookup(self, sums: Callable[[], jax.Array]) -> Lookup:
        """Return the lookup that sums are, with their tap."""
        assert isinstance(self.table, TableView)
        shape = self.bags, *self.table.shape[1:]
        tap = self.table.tap(shape, self.entries, dtype=self.aval.dtype)
        (tap,) = varying([dataclasses.replace(tap, kind="bags")], varies_of(self.aval))
        return with_tap(tap, sums, self.arrays)


def bag_of_table(x: BagSum, aval: Shaped) -> BagsOfTable:
    """Return what a bag sum of a table adds up."""
    entries = math.prod(x.positions.shape)

    def arrays() -> tuple[jax.Array, jax.Array, jax.Array | None]:
        ids = x.positions.reshape(-1)
        weight = None if x.weights is None else x.weights.reshape(-1)
        if x.bag_of_entry is None:
            bag = lax.iota(jnp.int32, entries) // (entries // x.bags)
        else:
            bag = x.bag_of_entry
            ids = jnp.where(bag < x.bags, ids, np.asarray(x.table.shape[0], ids.dtype))
        return ids, bag, weight

    return BagsOfTable(x.table, x.bags, entries, aval, arrays)


def rows_of_bag(x: BagSum, aval: Shaped) -> tuple[list[Tap], Function]:
    """Return how a bag sum of a view reads rows, and then is one of these."""
    view, entries = x.table, math.prod(x.positions.shape)
    plan = varying(planned(view, 1, (entries,)) or [], varies_of(aval))

    def run(taps: Taps) -> BagSum:
        rows, exists = _rows_at(view, x.positions.reshape(-1), taps)
        padding = np.asarray(entries, id_dtype(entries))
        which = jnp.where(exists, lax.iota(padding.dtype, entries), padding)
        return dataclasses.replace(x, table=rows, positions=which.reshape(x.positions.shape))

    return plan, run


def _rows_at(view: View, ids: jax.Array, taps: Taps) -> tuple[jax.Array, jax.Array]:
    """Return the rows of a view at canonical ids (n,), and where they are no padding."""
    last = np.asarray(view.shape[0] - 1, ids.dtype)
    exists = ids <= last
    return read_at(view, Positions([jnp.minimum(ids, last)], ids.shape, exists), taps), exists


SPARSE_PRODUCTS = ("bcoo_dot_general", "bcsr_dot_general")


def sparse_product(
    eqn: JaxprEqn, name: str, args: Sequence[Argument], rows_only: bool
) -> Lookup | None:
    """Return X @ table for a sparse X, a bag of rows for each row of X.

    None if it is no sum of whole rows.
    """
    (*sparse, x), aval = args, aval_of(eqn.outvars[0])
    terms = (_coo_terms if name == "bcoo_dot_general" else _csr_terms)(eqn, sparse, x)
    if terms is None:
        return None
    if isinstance(x, TableView) and not rows_only:
        return terms.lookup(lambda: bound(eqn, [*sparse, x.array])[0])
    plan = planned(x, 1, (terms.entries,))

    def by_rows(taps: Taps) -> jax.Array:
        ids, bag, weight = terms.arrays()
        assert weight is not None
        rows = _rows_at(x, ids, taps)[0].astype(aval.dtype)
        rows = rows * trailing(weight.astype(aval.dtype), rows.ndim)
        sums = jnp.zeros((terms.bags, *x.shape[1:]), aval.dtype)
        return add_rows(sums, bag, rows).reshape(aval.shape)

    return None if plan is None else (varying(plan, varies_of(aval)), by_rows)


def _csr_terms(eqn: JaxprEqn, sparse: Sequence[Argument], table: View) -> BagsOfTable | None:
    data, columns, pointers = sparse
    is_plain = parameter(eqn, "dimension_numbers") == (((1,), (0,)), ((), ()))
    shape = parameter(eqn, "lhs_spinfo").shape
    if not is_plain or len(shape) != 2 or len(columns.shape) != 1:
        return None
    rows, entries = pointers.shape[0] - 1, columns.shape[0]

    def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
        number = lax.iota(pointers.dtype, entries)
        bag = jnp.searchsorted(pointers, number, side="right").astype(jnp.int32) - 1
        # Entries before the first row or after the last one are padding.
        bag = jnp.where((bag >= 0) & (bag < rows), bag, rows)
        return _in_bags(columns, bag, rows, data, table.shape[0])

    return BagsOfTable(table, rows, entries, aval_of(eqn.outvars[0]), arrays)


def _coo_terms(eqn: JaxprEqn, sparse: Sequence[Argument], table: View) -> BagsOfTable | None:
    data, indices = sparse
    (contract, contract_dense), batch = parameter(eqn, "dimension_numbers")
    shape = parameter(eqn, "lhs_spinfo").shape
    batched, columns = len(indices.shape) - 2, indices.shape[-1]
    if (
        any(batch)
        or len(contract) != 1
        or contract[0] < batched
        or batched + columns < len(shape)
        or tuple(contract_dense) != (0,)
    ):
        return None
    entries = (*shape[:batched], indices.shape[-2])
    kept = [d for d in range(len(shape)) if d not in contract]
    bags = math.prod(shape[d] for d in kept)

    def arrays() -> tuple[jax.Array, jax.Array, jax.Array]:
        places = [lax.broadcasted_iota(indices.dtype, entries, d) for d in range(batched)]
        places += [jnp.broadcast_to(indices[..., d], entries) for d in range(columns)]
        inside, bag = jnp.ones(entries, bool), jnp.zeros(entries, jnp.int32)
        for d in kept:
            inside = inside & (places[d] >= 0) & (places[d] < shape[d])
            bag = bag * np.int32(shape[d]) + places[d].astype(jnp.int32)
        bag = jnp.where(inside, bag, bags).reshape(-1)
        weight = jnp.broadcast_to(data, entries).reshape(-1)
        ids = places[contract[0]].reshape(-1)
        return _in_bags(ids, bag, bags, weight, table.shape[0])

    return BagsOfTable(table, bags, math.prod(entries), aval_of(eqn.outvars[0]), arrays)


def _in_bags(
    ids: jax.Array, bag: jax.Array, bags: int, weight: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    ids = canonical(ids, rows)
    padding = np.asarray(rows, ids.dtype)
    bag = jnp.where(ids < padding, bag, bags)
    return jnp.where(bag < bags, ids, padding), bag, weight
